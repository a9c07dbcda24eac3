"""The numbers that notebook 10 shows."""

import math

import pytest
import torch

from gpukit.lessons import gelu as lesson
from gpukit.lessons import layer


def test_what_cancels_far_below_zero():
    assert 0.5 < lesson.digits(-5.0) < 2
    assert lesson.digits(-1.0) > 6
    x = torch.linspace(-0.5, -9, 800, dtype=torch.float64)
    y, truth = lesson._formulas(x)["x sigmoid"]
    assert ((y.double() - truth) / truth).abs().max() < 1e-4


def test_exponentials_end_where_their_dtype_does():
    ends = {row[0]: row[2:] for row in lesson.exp_ends().rows}
    assert ends["float32"][0] == pytest.approx(math.log(torch.finfo(torch.float32).max))
    assert ends["bfloat16"][1] == pytest.approx(ends["float32"][1], abs=0.001) and 10 < ends["float32"][1] < 10.1
    assert 0.85 < lesson.same_in_16_bits() < 1


def test_partial_sums_by_the_height_of_a_tile():
    rows = {row[0]: row[1:] for row in lesson.partial_sums().rows}
    assert rows[16][0] * 16 == lesson.M
    assert rows[1][2] > 1 and rows[16][2] == pytest.approx(0.083, abs=0.001) and rows[256][2] < 0.01


def test_the_budget_of_instructions():
    """132 SMs of 128 lanes at 1,980 MHz, 4 bytes per element at 4,800 GB/s."""
    assert lesson.instruction_budget() == pytest.approx(132 * 128 * 1.98e9 / (4.8e12 / 4))


def test_what_autograd_keeps():
    assert [row[2] for row in lesson.kept().rows] == [1, 3]


def test_the_recorded_rows_say_what_the_text_says():
    """Sentences of the notebook that hold for these rows; a new measurement may need others."""
    fwd, bwd, graph = (lesson._rows("bias_gelu", mode) for mode in ("fwd", "bwd", "bwd-graph"))
    assert fwd["library"] > 3 * fwd["gpukit"]
    assert bwd["library"] < bwd["gpukit"] and graph["library"] > 1.5 * graph["gpukit"]
    swiglu = [lesson._rows("swiglu", mode, lesson._SWIGLU.shape) for mode in ("fwd", "bwd")]
    for took in swiglu:
        level = [took[p] for p in ("compile", "liger-triton", "gpukit")]
        assert max(level) < 1.03 * min(level) and took["library"] > 1.5 * took["gpukit"]
    assert lesson._layer_us("gpukit", "fwd") == pytest.approx(lesson._SWIGLU.us("gpukit"))
    assert lesson._SWIGLU.times * lesson._SWIGLU.shape[0] == layer.TOKENS
