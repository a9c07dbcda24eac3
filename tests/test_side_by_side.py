"""`gpukit compare`: the course's answer is shown to those whose own passes, and what each does is worked out in its own process."""

import random
import shutil

import pytest
import torch

from gpukit import cli, course
from gpukit.grading import example, registry
from gpukit.grading.wire import Imaginary
from gpukit.side_by_side import WIDTH, compare
from tests.checks.known import ids

ROOT = course.root(__file__)
pytestmark = pytest.mark.skipif(not (ROOT / "solutions").is_dir(), reason="a copy of the course without solutions")
SECRET = "numerator / tl.sum(numerator, axis=0)"
KERNELS = [e for e in registry.exercises().values() if e.kernel]


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The course, with softmax as it is handed out and gelu solved."""
    for name in ("exercises", "solutions"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "notebooks").mkdir()
    shutil.copy(ROOT / "solutions" / "gelu.py", tmp_path / "exercises")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUKIT_IMPL", raising=False)
    return tmp_path


def test_nothing_is_given_away_before_a_pass(copy, capsys):
    found = compare("softmax.fused")
    assert "not written yet" in str(found) and SECRET not in str(found)
    assert cli.main(["compare", "softmax.fused"]) == 1
    said = capsys.readouterr().out
    assert SECRET not in said
    assert "gpukit hint softmax.fused 1" in said and "cell" not in said, "a terminal has no cells"


def test_both_texts_and_what_they_do(copy, capsys):
    slower = copy / "exercises" / "gelu.py"
    text = slower.read_text()
    assert text.count("def bias_gelu(") == 1
    slower.write_text(text.replace("BLOCK_M: int = 16, BLOCK_N: int = 128", "BLOCK_M: int = 16, BLOCK_N: int = 32"))
    assert cli.main(["compare", "gelu.bias", "--gpu", "a100"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= WIDTH
    assert "BLOCK_N: int = 32" in out and "BLOCK_N: int = 128" in out and "BEGIN SOLUTION" not in out
    loaded = next(line for line in out.splitlines() if line.startswith("bytes loaded (counted)"))
    # x once; a bias of 8 kB once for each of 512 rows of tiles, whatever their width
    assert loaded.split("  ")[-1] == f"{(8192 * 4096 + 512 * 4096) * 2 / 1e6:.3g} MB"
    assert "time on A100 80GB SXM (modelled)" in out and "atomics" not in out


def test_atomics_have_a_row_where_there_are_any(copy, capsys):
    shutil.copy(ROOT / "solutions" / "triton_basics.py", copy / "exercises")
    assert cli.main(["compare", "triton_basics.histogram"]) == 0
    rows = dict(line.rsplit("  ", 2)[::2] for line in capsys.readouterr().out.splitlines() if "(counted)" in line)
    rows = {name.split("  ")[0]: text for name, text in rows.items()}
    assert rows["bytes changed by atomics (counted)"] == f"{4 * 2**22 / 1e6:.3g} MB"
    assert rows["bytes stored (counted)"] == "0 bytes"


def test_a_function_has_two_texts(copy):
    shutil.copy(ROOT / "solutions" / "start.py", copy / "exercises")
    found = compare("start.bytes_moved")
    assert found.table is None and found.yours == found.ours and "def bytes_moved" in found.ours
    assert "your start.bytes_moved" in found._repr_html_()


def test_mistakes_are_sentences(copy):
    with pytest.raises(course.CourseError, match="no GPU is called 'h101'; did you mean 'h100'"):
        compare("gelu.bias", gpu="h101")
    shutil.rmtree(copy / "solutions")
    with pytest.raises(course.CourseError, match="has no solutions/"):
        compare("gelu.bias")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os\nos._exit(3)", "exit code 3"),
        ("raise ValueError('why')", "ValueError: why"),
        ("while True: pass", "no answer within"),
    ],
)
def test_an_answer_may_end_its_process_or_never_end(tmp_path, monkeypatch, source, said):
    if "while" in source:
        monkeypatch.setattr(example, "TIMEOUT_S", 2)
    (tmp_path / "softmax.py").write_text(source)
    with pytest.raises(course.CourseError, match=said):
        example.weigh("softmax.fused", tmp_path / "softmax.py", "h200")


def shape_of(value):
    if isinstance(value, torch.Tensor | Imaginary):
        dtype = str(value.dtype).removeprefix("torch.")
        return "tensor", len(value.shape), "float" in dtype
    return type(value)


@pytest.mark.parametrize("exercise", [e for e in KERNELS if e.id in example.EXAMPLES], ids=ids)
def test_an_example_is_a_call_like_those_of_the_check(exercise):
    given = [shape_of(arg) for arg in example.arguments(exercise, None)]
    huge = exercise.huge() if exercise.huge else []
    calls = [case.args for case in exercise.cases(random.Random(0))] + (huge if isinstance(huge, list) else [huge])
    assert any(given == [shape_of(arg) for arg in args[: len(given)]] for args in calls), f"{given}"


def test_every_kernel_has_an_example():
    without = {e.id for e in KERNELS} - example.EXAMPLES.keys()
    assert without == {"adamw.resume"}, "train's steps are its subject, not a size"
