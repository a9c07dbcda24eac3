"""What is special about the exercises of notebook 11; tests/checks/test_answers.py judges the known answers of all exercises."""

import random

import pytest
import torch

from gpukit import course
from gpukit.checks.norms import BACKWARD, DETECTIVE, EXERCISES, RESIDUAL, RMS_NORM, ROPE, WELFORD
from gpukit.grading.judge import judge_source
from gpukit.reference import norms, rope
from gpukit.testing import compare
from gpukit.widgets.norms import cancellation
from tests.checks import known
from tests.checks.known import edited, ids

ROOT = course.root(__file__)


def solution() -> str:
    return (ROOT / "solutions" / "norms.py").read_text(encoding="utf-8")


def verdict(exercise, name: str):
    source = known.source(exercise, name)
    return judge_source(exercise, source, seed=1)


@pytest.mark.parametrize("exercise", EXERCISES, ids=ids)
def test_cases_hold_what_breaks_kernels(exercise):
    cases = exercise.cases(random.Random(1))
    tags = set().union(*(case.tags for case in cases))
    assert {"float32", "float16", "bfloat16", "large"} <= tags
    assert any(case.args[0].shape[-1] & (case.args[0].shape[-1] - 1) for case in cases)
    *most, largest = sorted(case.args[0].numel() for case in cases)
    assert max(most) <= 1 << 15 and largest <= 1 << 17  # one of Welford's is as long as 16 bits cannot count


@pytest.mark.parametrize("exercise", [e for e in EXERCISES if e is not ROPE], ids=ids)
def test_hard_rows_come_in_every_dtype(exercise):
    """Zeros, numbers that are all alike, squares beyond float16, tiny ones: the sum that is normalized is such a row, too."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows = [case.args for case in known.cases(exercise) if case.args[0].dtype == dtype]
        rows = [x + rest[0] if exercise is RESIDUAL else x for x, *rest in rows]
        held = [row.double() for x in rows for row in x if len(row) > 1]
        assert any(row.eq(0).all() for row in held)
        assert any(row.eq(row[0]).all() and row[0] for row in held)
        assert any(row.abs().max() > 256 for row in held)
        assert any(0 < row.abs().max() < 0.01 for row in held)


def test_gradients_come_in_every_layout():
    for exercise, arguments in ((BACKWARD, (3,)), (ROPE, (0, 3))):
        for at in arguments:
            given = [case.args[at] for case in known.cases(exercise)]
            assert any(x.is_contiguous() for x in given)
            assert any(x.stride(-1) == 2 for x in given) and any(x.stride(-2) < x.stride(-1) for x in given)
            assert any(x.stride(-1) == 1 and not x.is_contiguous() for x in given)  # a gap, or heads behind tokens
        assert any(not any(case.args[3].stride()) for case in known.cases(exercise)), "the gradient of a sum"


@pytest.mark.parametrize("exercise", [e for e in EXERCISES if e is not ROPE], ids=ids)
def test_no_weight_is_one_and_every_row_differs(exercise):
    """A kernel that forgets the weight, or takes another row's, must not get away with it."""
    for case in exercise.cases(random.Random(1)):
        x, *rest = case.args
        for vector in (arg for arg in rest if isinstance(arg, torch.Tensor) and arg.shape == x.shape[-1:]):
            assert vector.eq(1).double().mean() < 0.1
        assert len(x) == 1 or not x[0].equal(x[-1]) or "tiny" in case.tags


def test_friendly_rows_do_not_see_the_planted_fault():
    """The stub of norms.detective passes wherever the mean is not large: that is what makes it a detective's case."""
    shown = str(verdict(DETECTIVE, "unmended"))
    assert "Only rows far from 0 are wrong" in shown
    cases = known.cases(DETECTIVE)
    far = [case for case in cases if "far" in case.tags]
    assert any(
        f"({passed} of {len(cases)} cases pass)" in shown for passed in range(len(cases) - len(far), len(cases) - 1)
    ), shown
    for case in far:
        x = case.args[0].float()
        assert (x.mean(-1).abs() > 500 * x.std(-1)).any()


def test_references_are_those_of_the_course():
    """The exercises' own formulas, against gpukit.reference, gradients included."""
    generator = torch.Generator().manual_seed(0)
    x, w, b, dy = (torch.randn(shape, generator=generator).double() for shape in ((3, 40), 40, 40, (3, 40)))
    residual, du = torch.randn(2, 3, 40, generator=generator).double()
    assert torch.allclose(RMS_NORM.reference(x, w)[0], norms.rms_norm(x, w))
    assert torch.allclose(DETECTIVE.reference(x, w, b), norms.layer_norm(x, w, b))
    assert torch.allclose(
        WELFORD.reference(x, 16), norms.layer_norm(x, torch.ones(40).double(), torch.zeros(40).double())
    )
    x.requires_grad_()
    y, u = norms.residual_rms_norm(x, residual, w)
    (dx,) = torch.autograd.grad((y, u), x, (dy, du))
    found = RESIDUAL.reference(x.detach(), residual, w, dy, du)
    assert all(torch.allclose(a, e) for a, e in zip(found, (y, u, dx), strict=True))
    q = torch.randn(1, 2, 5, 8, generator=generator).double()
    tables = rope.tables(5, 8)
    assert torch.allclose(ROPE.reference(q, *tables), rope.rope(q, q, *tables)[0])


def test_pytorchs_own_norms_are_right_answers_of_the_detective_and_welford():
    """Values that PyTorch itself misses would be unfair. (It is refused all the same, since it is no kernel of one's own.)"""
    for exercise, call in (
        (DETECTIVE, lambda x, w, b, eps=1e-5: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, eps)),
        (WELFORD, lambda x, BLOCK_N, eps=1e-5: torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)),
    ):
        for case in exercise.cases(random.Random(3)):
            double = [a.double() if isinstance(a, torch.Tensor) else a for a in case.args]
            truth, native = exercise.reference(*double), exercise.reference(*case.args)
            assert compare(call(*case.args), truth, native) is None, case.name


def test_a_wrong_forward_is_said_to_come_first():
    found = judge_source(BACKWARD, edited("norms", ("x * rstd * weight, mask", "x * rstd, mask")), seed=1)
    assert found.diagnosis == "forward-first"
    assert "norms.rms_norm must pass first" in str(found)


def test_idle_programs_are_asked_about():
    shown = str(verdict(BACKWARD, "stores-in-the-loop"))
    assert "fails for every case with fewer rows than programs" in shown
    assert "a program that had nothing to do" in " ".join(shown.split())


def test_no_program_takes_all_that_a_division_leaves_over():
    shown = " ".join(str(verdict(BACKWARD, "the-last-one-takes-the-rest")).split())
    assert "15 rows are 2 for each of 8 programs at most" in shown


def test_atomics_are_refused_although_their_values_are_right():
    shown = str(verdict(BACKWARD, "atomics"))
    assert "right values, but with atomics" in shown


def test_a_weight_that_is_loaded_for_each_row_is_named():
    shown = str(verdict(BACKWARD, "weight-for-each-row"))
    assert "x the reads" in shown
    assert "weight and the sums can stay in registers" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("exercise", "old", "new"),
    (
        # Zeros where the work is hard, a constant in its place, the input handed back, somebody else's gradient.
        (RMS_NORM, "x * rstd * weight, mask", "x * weight, mask"),
        (RMS_NORM, "    return y, rstd\n", "    return x, rstd\n"),
        (BACKWARD, "    return dx, dweight\n\n\nclass", "    return dy, dweight\n\n\nclass"),
        (BACKWARD, "    for p in range(P):\n", "    for p in range(1, P):\n"),
        (RESIDUAL, "    return y, u, dx\n", "    return y, u, du\n"),
        (RESIDUAL, "    return y, u, dx\n", "    return y, residual, dx\n"),
        (ROPE, "        return turn(x, cos, sin, False)\n", "        return x\n"),
        (ROPE, "        dx = turn(dy, cos, sin, True)\n", "        dx = torch.zeros_like(dy)\n"),
    ),
)
def test_lazy_answers_do_not_pass(exercise, old, new):
    assert not judge_source(exercise, edited("norms", (old, new)), seed=1).passed


def test_dy_handed_back_is_known():
    found = judge_source(
        ROPE, edited("norms", ("        dx = turn(dy, cos, sin, True)\n", "        dx = dy.clone()\n")), seed=1
    )
    assert found.diagnosis == "gradient-not-turned"


def test_picture_of_the_cancellation():
    drawn = cancellation([1, 10, 100], {"one": [1e-7, 1e-5, 2.0], "other": [0.0, 1e-7, 1e-7]})
    assert drawn.data.startswith(b"\x89PNG")
    assert str(drawn) == (
        "Relative error of the variance, mean 100 times the spread: one up to 2e+00; other up to 1e-07."
    )


def test_results_have_the_names_of_the_docstring():
    assert "rstd is NaN" in str(
        verdict(RMS_NORM, next(a.name for a in known.wrong(RMS_NORM) if a.diagnosis == "rstd-missing"))
    )
    assert ": dx[" in str(
        verdict(RESIDUAL, next(a.name for a in known.wrong(RESIDUAL) if a.diagnosis == "du-forgotten"))
    )
