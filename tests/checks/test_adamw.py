"""What is special about the exercises of notebook 16; tests/checks/test_answers.py judges the known answers of all exercises."""

import random
import re

import pytest
import torch

from gpukit import course
from gpukit.checks.adamw import CLIP, EXERCISES, MANY, RESUME, ROUNDING, UPDATE
from gpukit.grading.judge import judge_source
from tests.checks import known
from tests.checks.known import ids

ROOT = course.root(__file__)


def shown(exercise, name: str) -> str:
    """What a learner reads who answers as the known wrong answer `name`."""
    source = known.source(exercise, name)
    return " ".join(str(judge_source(exercise, source, seed=1)).split())


def tensors(case):
    return [arg for arg in case.args if isinstance(arg, torch.Tensor)]


# ---------------------------------------------------------------------------------------------------------- references
def test_the_reference_is_pytorchs():
    for case in UPDATE.cases(random.Random(1)):
        p, g, m, v, step, lr, beta1, beta2, eps, weight_decay = case.args
        weights = p.double().requires_grad_()
        weights.grad = g.double()
        optimizer = torch.optim.AdamW([weights], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
        optimizer.state[weights] = {
            "step": torch.tensor(step - 1.0, dtype=torch.float64), "exp_avg": m.double(), "exp_avg_sq": v.double(),
        }  # fmt: skip
        optimizer.step()
        doubled = (x.double() for x in (p, g, m, v))
        expected = UPDATE.reference(*doubled, step, lr, beta1, beta2, eps, weight_decay)
        given = (weights, *(optimizer.state[weights][name] for name in ("exp_avg", "exp_avg_sq")))
        for ours, theirs in zip(expected, given, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-14)


def test_clipping_is_pytorchs():
    for case in CLIP.cases(random.Random(1)):
        g, max_norm = case.args
        p = torch.zeros_like(g, dtype=torch.float64).requires_grad_()
        p.grad = g.double()
        torch.nn.utils.clip_grad_norm_([p], max_norm)
        torch.testing.assert_close(g.double() * CLIP.reference(g.double(), max_norm), p.grad)


def test_training_is_pytorchs_wherever_it_stops():
    for case in RESUME.cases(random.Random(1)):
        p, q, gradients, turns, _, lr, weight_decay = case.args
        params = [x.double().requires_grad_() for x in (p, q)]
        groups = [{"params": [params[0]], "weight_decay": weight_decay}, {"params": [params[1]], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=lr)
        for i, g in enumerate(gradients.double()):
            params[0].grad, params[1].grad = g, g if turns[i] else None
            optimizer.step()
        doubled = (x.double() for x in (p, q, gradients))
        ours = RESUME.reference(*doubled, *case.args[3:])
        none = torch.full_like(params[0], torch.nan)
        states = [optimizer.state[x].get(name, none) for x in params for name in ("exp_avg", "exp_avg_sq")]
        for mine, theirs in zip(ours, [*params, *states], strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-14, equal_nan=True)


def test_rounding_at_random_is_right_on_average():
    x = torch.full((20_000,), 1 + 2.0**-9)  # a quarter of the way from 1 to the next bfloat16
    y = ROUNDING.reference(x, 5).view(torch.bfloat16).double()
    assert set(y.tolist()) == {1.0, 1 + 2.0**-7}
    assert abs(float(y.mean()) - float(x[0])) < 5 * float(y.std()) / len(x) ** 0.5


# --------------------------------------------------------------------------------------------------------------- cases
@pytest.mark.parametrize("exercise", EXERCISES, ids=ids)
def test_cases_hold_what_breaks_kernels(exercise):
    lengths = {case.args[0].numel() for case in exercise.cases(random.Random(1))}
    # CLIP adds up blocks, and the noise of ROUNDING may repeat where 16 bits count the elements.
    most = 1 << 21 if exercise is CLIP else 1 << 17 if exercise is ROUNDING else 1 << 14
    assert any(n % 64 for n in lengths) and max(lengths) <= most
    assert 1 in lengths or exercise is MANY
    if exercise is MANY:
        sizes = [size for case in MANY.cases(random.Random(1)) for size in case.args[5]]
        assert {0, 1} <= set(sizes)
    elif exercise is not RESUME:
        assert {13, 1023, 1024, 1025} <= lengths


def test_some_weights_never_moved_and_some_options_are_unusual():
    given = [case.args for case in UPDATE.cases(random.Random(1))]
    assert any(((g == 0) & (m == 0) & (v == 0)).any() for _, g, m, v, *_ in given)
    assert {0.0, 0.9} <= {args[6] for args in given} and {1e-8, 0.01} <= {args[8] for args in given}
    turns = [case.args[3] for case in RESUME.cases(random.Random(1))]
    assert any(not any(each) for each in turns), "q never has a gradient"


def test_rounding_sees_every_kind_of_float():
    x = torch.cat([case.args[0] for case in ROUNDING.cases(random.Random(1))])
    exact = x == x.bfloat16().float()
    assert (x < 0).any() and x.isinf().any() and (x == 0).any() and exact.any() and not exact.all()


# ----------------------------------------------------------------------------------------------------------- diagnoses
def test_what_a_learner_reads():
    assert "1 - beta^step at step 1" in shown(UPDATE, "no-correction")
    assert "Only" not in shown(CLIP, "as-found") and "16-bit ones are not" in shown(CLIP, "as-found")
    assert re.search(r"\d+ programs for the work of \d+", shown(MANY, "one-grid-for-the-largest"))
    assert "adamw.update must pass first" in shown(RESUME, "an-update-without-correction")


def test_the_detectives_stub_is_the_code_as_found():
    source = (ROOT / "exercises" / "adamw.py").read_text(encoding="utf-8")
    found = judge_source(CLIP, source, seed=1)
    assert (found.state, found.diagnosis) == ("fail", "squares-in-own-dtype")
