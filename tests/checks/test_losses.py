"""What is special about the exercises of notebook 15; tests/checks/test_answers.py judges the known answers of all exercises,
tests/kernels/test_cross_entropy.py and tests/kernels/test_kl_div.py test the kernels."""

import pytest
import torch
import torch.nn.functional as F

from gpukit import course, integrity, live
from gpukit.checks import losses as checks
from gpukit.checks.losses import CHUNKED, COLUMN, CROSS_ENTROPY, EXERCISES, IN_PLACE, KL, ONE_LAUNCH, SMOOTHING
from gpukit.grading.exercise import KernelExercise
from gpukit.grading.judge import judge_source
from gpukit.grading.stubs import clear
from gpukit.kernels import cross_entropy, kl_div, linear_cross_entropy
from tests.checks.known import cases, ids

ROOT = course.root(__file__)
SOLUTION = (ROOT / "solutions" / "losses.py").read_text(encoding="utf-8")


# ---- cases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise", [e for e in EXERCISES if isinstance(e, KernelExercise)], ids=ids)
def test_cases_hold_what_breaks_kernels(exercise):
    tags = set().union(*(case.tags for case in cases(exercise)))
    assert {"float32", "float16", "bfloat16", "tail"} <= tags
    assert {"long", "partial"} <= tags or exercise in (ONE_LAUNCH, SMOOTHING)  # a row is one block there
    assert max(case.args[0].numel() for case in cases(exercise)) <= 1 << 17
    wanted = {
        CROSS_ENTROPY: {"ignored", "masked", "large", "far-target"},
        IN_PLACE: {"ignored", "hot", "strided", "large"},
        ONE_LAUNCH: {"ignored", "far-target", "large"},
        SMOOTHING: {"smooth", "z", "strided", "large"},
        KL: {"zero", "strided"},
    }
    assert wanted[exercise] <= tags


@pytest.mark.parametrize("exercise", (CROSS_ENTROPY, IN_PLACE, ONE_LAUNCH), ids=ids)
def test_logits_come_with_minus_infinity_wherever_it_may_be(exercise):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows = [row for case in cases(exercise) if case.args[0].dtype == dtype for row in case.args[0].isinf()]
        assert any(row[: len(row) // 2].all() for row in rows) and any(row[len(row) // 2 + 1 :].all() for row in rows)
        assert any(row.sum() == len(row) - 1 for row in rows)
    targets = [(x, target, rest) for x, target, *rest in (case.args for case in cases(exercise))]
    assert any((target == 0).any() and (target == x.shape[1] - 1).any() for x, target, _ in targets)


@pytest.mark.parametrize("exercise", (CROSS_ENTROPY, IN_PLACE, ONE_LAUNCH, CHUNKED), ids=ids)
def test_another_index_than_minus_100_is_ignored(exercise):
    at = {CROSS_ENTROPY: 3, IN_PLACE: 5, ONE_LAUNCH: 3, CHUNKED: 4}[exercise]
    args = [case.args for case in cases(exercise)]
    found = {given[at] for given in args if len(given) > at and (given[1 if at != 4 else 2] == given[at]).any()}
    assert found - {checks.IGNORE}


@pytest.mark.parametrize("exercise", (IN_PLACE, SMOOTHING, KL), ids=ids)
def test_upstream_gradients_come_with_every_stride(exercise):
    at = 3 if exercise is IN_PLACE else -1
    assert {0, 1, 2} <= {case.args[at].stride(0) for case in cases(exercise)}


# ---- the references are PyTorch's, and the project's kernels agree ----------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_cross_entropy_is_pytorchs(seed):
    for case in cases(CROSS_ENTROPY, seed):
        x, target, _, *rest = case.args
        index = rest[0] if rest else checks.IGNORE
        x = x.double()  # around 300 float32 has few digits left for a loss of 5
        loss, lse = checks._cross_entropy(x, *case.args[1:])
        torch.testing.assert_close(
            loss, F.cross_entropy(x, target, ignore_index=index, reduction="none"), equal_nan=True
        )
        assert bool((lse[target == index] == 0).all())
        counted = target != index
        torch.testing.assert_close(lse[counted], x.logsumexp(-1)[counted], equal_nan=True)


def test_gradients_are_autograds():
    for case in cases(IN_PLACE):
        x, target, lse, dloss, _, *index = case.args
        leaf = x.double().requires_grad_()
        losses = F.cross_entropy(leaf, target, ignore_index=(*index, checks.IGNORE)[0], reduction="none")
        (expected,) = torch.autograd.grad(losses, leaf, dloss.double())
        counted = target != (*index, checks.IGNORE)[0]
        torch.testing.assert_close(lse[counted], leaf.detach().logsumexp(-1)[counted].float(), equal_nan=True)
        args = x.double(), target, leaf.detach().logsumexp(-1), dloss.double(), 0, *index
        torch.testing.assert_close(checks._gradient(*args), expected, rtol=1e-6, atol=1e-9, equal_nan=True)
    for case in cases(ONE_LAUNCH):
        x, target, scale, *index = case.args
        loss, dx = checks._loss_and_gradient(x.double(), target, scale.double(), *index)
        leaf = x.double().requires_grad_()
        scaled = scale.double() * F.cross_entropy(
            leaf, target, ignore_index=(*index, checks.IGNORE)[0], reduction="sum"
        )
        scaled.backward()
        # Of an ignored row of NaN PyTorch's own gradient is NaN; the stub says that such a row gets zeros, whatever it holds.
        expected = leaf.grad.masked_fill((target == (*index, checks.IGNORE)[0])[:, None], 0)
        torch.testing.assert_close(dx, expected, rtol=1e-6, atol=1e-9, equal_nan=True)
        torch.testing.assert_close(loss.sum() * scale.double(), scaled.detach(), equal_nan=True)


def test_smoothing_and_z_loss_are_pytorchs_and_the_projects():
    for case in cases(SMOOTHING):
        x, target, smoothing, z_loss, _ = case.args
        x = x.double()
        expected = (
            F.cross_entropy(x, target, label_smoothing=smoothing, reduction="none") + z_loss * x.logsumexp(-1) ** 2
        )
        torch.testing.assert_close(checks._smoothed(x, target, smoothing, z_loss), expected, equal_nan=True)
    x, target, smoothing, z_loss, _ = cases(SMOOTHING)[5].args
    ours = cross_entropy(x, target, label_smoothing=smoothing, reduction="none", z_loss=z_loss)
    torch.testing.assert_close(checks._smoothed(x, target, smoothing, z_loss), ours)


def test_divergence_is_pytorchs_and_the_projects():
    for case in cases(KL):
        x, t, *_ = (arg.double() if isinstance(arg, torch.Tensor) else arg for arg in case.args)
        torch.testing.assert_close(checks._kl(x, t), F.kl_div(x, t, reduction="none").sum(-1), equal_nan=True)
    x, t, *_ = cases(KL)[6].args
    torch.testing.assert_close(checks._kl(x, t).sum(), kl_div(x, t, reduction="sum"))


def test_linear_cross_entropy_is_pytorchs_and_the_projects():
    for case in cases(CHUNKED):
        x, weight, target, _, *index = case.args
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        loss = F.cross_entropy(leaves[0] @ leaves[1].T, target, ignore_index=(*index, checks.IGNORE)[0])
        loss.backward()
        expected = [loss.item(), *(leaf.grad for leaf in leaves)]
        torch.testing.assert_close(checks._linear(*case.args), expected)
    x, weight, target, _ = cases(CHUNKED)[0].args
    ours = linear_cross_entropy(x, weight, target, chunk=3)
    assert ours.item() == pytest.approx(checks._linear(x, weight, target, 3)[0], rel=1e-9)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise", (COLUMN, CHUNKED), ids=ids)
@pytest.mark.parametrize("seed", range(2))
def test_solution_stays_well_under_what_is_allowed_and_all_logits_do_not(exercise, seed):
    namespace = {}
    exec(compile(SOLUTION, "solutions/losses.py", "exec"), namespace)
    for case in cases(exercise, seed):
        with live.watch() as memory:
            namespace[exercise.function](*case.args)
        assert exercise.memory_rule(case, memory.peak_bytes) is None
        assert exercise.memory_rule(case, int(1.25 * memory.peak_bytes)) is None, "another style has no room"
        x, weight, chunk = *case.args[:2], case.args[4 if exercise is COLUMN else 3]
        logits = len(x) * len(weight) * x.element_size()
        assert len(x) <= chunk or exercise.memory_rule(case, logits + 2 * x.nbytes + 2 * weight.nbytes) is not None


# ---- the detectives, cheats ------------------------------------------------------------------------------------------


def test_one_launch_starts_with_right_gradients_and_wrong_losses():
    verdict = judge_source(ONE_LAUNCH, clear(SOLUTION), seed=1)
    assert verdict.diagnosis == "read-after-write"
    assert "loss[0] expected" in str(verdict)


def test_column_starts_with_right_numbers_and_too_much_memory():
    verdict = judge_source(COLUMN, clear(SOLUTION), seed=1)
    assert verdict.diagnosis == "something-kept"
    assert verdict.checks_passed == verdict.checks_total - 1


def answered(function: str, body: str) -> str:
    return SOLUTION + f"\n\ndef {function}(*args):\n    {body}\n"


CHEATS = {
    IN_PLACE: ("x = args[0]\n    x.zero_()", "fail"),
    ONE_LAUNCH: ("args[0].zero_()\n    return args[0].float().sum(-1)", "fail"),
    SMOOTHING: ("return args[0].sum(-1)", "fail"),
    COLUMN: ("return [11.5, 0.0, 7.0]", "fail"),
    CHUNKED: ("return args[0].sum(), args[0].clone(), args[1].clone()", "fail"),
    KL: ("return F.kl_div(args[0], args[1], reduction='none').sum(-1)", "fail"),
    CROSS_ENTROPY: ("return torch.zeros(len(args[0])), torch.zeros(len(args[0]))", "fail"),
}


@pytest.mark.parametrize("exercise", CHEATS, ids=ids)
def test_cheats_do_not_pass(exercise):
    body, state = CHEATS[exercise]
    verdict = judge_source(exercise, answered(exercise.function, body), seed=1)
    assert verdict.state == state


def test_losses_by_pytorch_beside_a_kernel_do_not_pass():
    before, after = SOLUTION.split("    loss_and_gradient_kernel[(M,)](")
    borrowed = "    borrowed = F.cross_entropy(x.float(), target, ignore_index=ignore_index, reduction='none')\n"
    after = after.replace("    return loss\n", "    return borrowed\n", 1)
    verdict = judge_source(ONE_LAUNCH, before + borrowed + "    loss_and_gradient_kernel[(M,)](" + after, seed=1)
    assert verdict.diagnosis == "not-your-kernel"


@pytest.mark.parametrize(
    ("exercise", "names"),
    [
        (CHUNKED, ("knows-minus-100-only", "overwrites-dweight")),
        (CHUNKED, ("divides-by-all-tokens", "ignored-rows-have-a-softmax")),
        (ONE_LAUNCH, ("scales-the-loss", "no-one-hot")),
    ],
    ids=lambda value: getattr(value, "id", None),
)
def test_two_mistakes_at_once_are_both_told(exercise, names):
    """Each of two known answers with the edits of the other."""
    text = (ROOT / "solutions" / "answers" / "losses.txt").read_text(encoding="utf-8")
    found = [item for item in integrity._items(text, "") if item.exercise == exercise.id and item.name in names]
    assert {item.name for item in found} == set(names)
    source = SOLUTION
    for _, old, new, whole in (edit for item in found for edit in item.edits):
        source = integrity._replace(source, exercise.id, old, new, whole, "")
    verdict = judge_source(exercise, source, seed=1)
    assert verdict.diagnosis in {item.diagnosis for item in found}
    assert "two things at once" in str(verdict)
