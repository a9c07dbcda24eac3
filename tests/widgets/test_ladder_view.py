"""The pictures and tables of the ladder, from the recorded rows."""

import pytest

from gpukit.widgets import ladder
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.versus import Missing


@pytest.mark.parametrize("preset", ["gpt2", "gpt-1.3b", "llama-1b"])
def test_what_was_recorded_is_shown(preset):
    picture = ladder.steps(preset)
    assert isinstance(picture, Picture) and "PyTorch's best" in picture.alt and "bf16 weights" in picture.alt
    assert isinstance(ladder.losses(preset), Picture)
    table = ladder.table(preset)
    assert isinstance(table, Table) and len(table.rows) == len(ladder.rows(preset))
    kernels = ladder.kernels(preset, "bf16 weights")
    times = [row[2] for row in kernels.rows]
    assert len(times) == 10 and times == sorted(times, reverse=True)


def test_what_was_not_recorded(tmp_path):
    assert isinstance(ladder.steps("tiny", tmp_path), Missing)
    assert isinstance(ladder.losses("tiny", tmp_path), Missing)
    assert ladder.rows("tiny", tmp_path) == []
