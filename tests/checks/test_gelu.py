"""What is special about the exercises of notebook 10; tests/checks/test_answers.py judges the known answers of all exercises."""

import random

import pytest
import torch

from gpukit import course
from gpukit.checks.gelu import BACKWARD, BIAS, DETECTIVE, EXERCISES, SWIGLU
from gpukit.grading.judge import judge_source
from gpukit.reference import gelu
from gpukit.testing import compare
from gpukit.widgets.gelu import activations, tails
from tests.checks import known
from tests.checks.known import edited, ids

ROOT = course.root(__file__)


def solution() -> str:
    return (ROOT / "solutions" / "gelu.py").read_text(encoding="utf-8")


def verdict(exercise, name: str):
    return judge_source(exercise, known.source(exercise, name), seed=1)


@pytest.mark.parametrize("exercise", EXERCISES, ids=ids)
def test_cases_hold_what_breaks_kernels(exercise):
    cases = exercise.cases(random.Random(1))
    tags = set().union(*(case.tags for case in cases))
    assert {"float32", "float16", "bfloat16", "large"} <= tags
    assert any(case.args[0].shape[-1] & (case.args[0].shape[-1] - 1) for case in cases)
    everything = torch.cat([case.args[0].float().reshape(-1) for case in cases if "special" not in case.tags])
    assert everything.min() < -180 and everything.max() > 180
    assert max(case.args[0].numel() for case in cases) <= 1 << 15


def test_tiles_hang_over_both_edges():
    shapes = [(*case.args[0].shape, *case.args[2:]) for case in BIAS.cases(random.Random(1))]
    assert any(M % m for M, _, m, _ in shapes) and any(N % n for _, N, _, n in shapes)
    assert any(M % m == 0 and N % n == 0 for M, N, m, n in shapes)
    assert all(len({M, N, m, n}) > 2 for M, N, m, n in shapes if N > 1), "nothing is right by symmetry"


def test_no_case_is_a_single_number_in_the_tail():
    """There 1 + erf and 1 + tanh cancel, and no larger element beside it sets the tolerance: right answers would fail."""
    for exercise in EXERCISES:
        for seed in range(100):
            x, *rest = exercise.cases(random.Random(seed))[0].args
            assert x.numel() == 1
            assert x + (rest[0] if exercise in (BIAS, BACKWARD) else 0) > -1, (exercise.id, seed)


def test_halves_of_one_matrix_reach_the_kernel_as_they_are():
    strided = [case for case in SWIGLU.cases(random.Random(1)) if "strided" in case.tags]
    for case in strided:
        gate, up, _ = case.args
        assert gate.stride(1) == up.stride(1) == 1
        assert max(gate.stride(0), up.stride(0)) == 2 * gate.shape[1]
    # One case tells apart whose stride was taken for whose.
    assert {case.args[0].stride() == case.args[1].stride() for case in strided} == {True, False}


def test_references_are_those_of_the_course():
    """The exercises' own formulas, against gpukit.reference."""
    x, bias = torch.randn(4, 30).double(), torch.randn(30).double()
    assert torch.allclose(DETECTIVE.reference(x), gelu.gelu(x, "tanh"))
    assert torch.allclose(BIAS.reference(x, bias), gelu.bias_gelu(x, bias))
    assert torch.allclose(BACKWARD.reference(x, bias), gelu.bias_gelu(x, bias))
    assert torch.allclose(SWIGLU.reference(x, x.flip(0)), gelu.swiglu(x, x.flip(0)))


def test_what_pytorch_computes_in_one_dtype_is_right_in_every_case():
    """GELU written out, in the dtype of the case, cancels below 0: no case may hang on that."""
    for case in BIAS.cases(random.Random(2)):
        x, bias, *_ = case.args
        truth, native = BIAS.reference(x.double(), bias.double()), BIAS.reference(x, bias)
        h = x.float() + bias.float()
        y = (0.5 * h * (1 + torch.erf(h * 0.5**0.5))).to(x.dtype)
        assert compare(y, truth, native) is None, case.name


def test_the_planted_overflow_passes_on_small_numbers():
    shown = " ".join(str(verdict(DETECTIVE, "unmended")).split())
    assert "9 of 14 cases pass" in shown and "fails for every case with large values" in shown
    assert "in which line is a result no longer a finite number?" in shown and "infinity" not in shown


def test_replacing_the_nan_is_seen_through():
    shown = str(verdict(DETECTIVE, "hides-the-nan"))
    assert "What is GELU of 40?" in shown


def test_a_wrong_forward_is_said_to_come_first():
    found = judge_source(BACKWARD, edited("gelu", ("y = 0.5 * h * (1 + tl.erf", "y = h * (1 + tl.erf")), seed=1)
    assert found.diagnosis == "forward-first"
    assert "gelu.bias must pass first" in str(found)


def test_atomics_are_refused_although_their_values_are_right():
    assert "right values, but with atomics" in str(verdict(BACKWARD, "atomics"))


def test_a_saved_sigmoid_is_counted():
    shown = str(verdict(SWIGLU, "keeps-the-sigmoid"))
    assert "1.3x the writes (bound 1.0x)" in shown and "Can you compute what you need from gate and up?" in " ".join(
        shown.split()
    )


@pytest.mark.parametrize(
    ("exercise", "edits"),
    (
        (
            DETECTIVE,
            (("    tl.store(y_ptr + offs, y, mask=offs < n)\n", "    tl.store(y_ptr + offs, x, mask=offs < n)\n"),),
        ),
        (BIAS, (("    bias_gelu_kernel[grid]", "    bias_gelu_kernel[(1, 1)]"),)),
        (BACKWARD, (("    return dx, dbias\n", "    return dy, dbias\n"),)),
        (BACKWARD, (("    return dx, dbias\n", "    return dx, torch.zeros_like(bias)\n"),)),
        (BACKWARD, (("grid[0], N, BLOCK_P=triton.next_power_of_2(grid[0])", "1, N, BLOCK_P=1"),)),
        (SWIGLU, (("    return dgate, dup\n", "    return dgate, dgate\n"),)),
        (SWIGLU, (("dy * silu, mask=mask_n", "dy * 0, mask=mask_n"),)),
    ),
)
def test_lazy_answers_do_not_pass(exercise, edits):
    assert not judge_source(exercise, edited("gelu", *edits), seed=1).passed


def test_pictures():
    curves = {"a": [0.0, -0.25, 1.0], "b": [0.0, 0.0, 2.0]}
    drawn = activations([-1.0, 0.0, 1.0], curves, curves)
    assert drawn.data.startswith(b"\x89PNG")
    assert str(drawn) == "Lowest values: a -0.250, b 0.000. Steepest slopes: a 1.000, b 2.000."
    drawn = tails([-1.0, -2.0, -3.0], {"one": [1e-7, 1e-3, 1.0], "other": [0.0, 1e-7, 1e-7]})
    assert str(drawn) == "Relative error for x from -1 to -3: one up to 1e+00; other up to 1e-07."
