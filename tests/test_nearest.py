"""Suggestions for unknown names: near ones, and none that has little to do with what was typed."""

import pytest

from gpukit.nearest import did_you_mean


@pytest.mark.parametrize(
    ("typed", "known", "said"),
    [
        ("sofmax.fused", ["softmax.fused", "losses.kl"], "; did you mean 'softmax.fused'?"),
        ("start.nothing", ["losses.smoothing", "start.bytes_moved"], ""),
        ("adam", ["sgd", "fp32-adamw"], "; did you mean 'fp32-adamw'?"),
        ("ad", ["fp32-adamw"], ""),
        (None, ["x"], ""),
        ("x", [], ""),
    ],
)
def test_did_you_mean(typed, known, said):
    assert did_you_mean(typed, known) == said
