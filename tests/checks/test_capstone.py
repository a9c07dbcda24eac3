"""What is special about the exercises of notebook 17; tests/checks/test_answers.py judges the known answers of all exercises."""

import json
import random
from itertools import islice

import pytest
import torch

from gpukit import course
from gpukit.accounting import collectives
from gpukit.accounting.training import Schedule
from gpukit.checks.capstone import ACCUMULATE, ATTENTION, DQ, EXERCISES, PAIR, RATE, RING
from gpukit.grading import registry, worker
from gpukit.grading.judge import judge_source
from gpukit.train import tokenizer
from gpukit.train.model import GPT, GPTConfig, Operations
from tests.checks import known
from tests.checks.known import cases, ids

ROOT = course.root(__file__)
NOTEBOOK = json.loads((ROOT / "notebooks" / "17_capstone.ipynb").read_text(encoding="utf-8"))


def solution() -> dict:
    """The names of solutions/capstone.py."""
    space = {"__name__": "capstone_solution"}
    path = ROOT / "solutions" / "capstone.py"
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), space)
    return space


def shown(exercise, name: str) -> str:
    """What a learner reads who answers as the known wrong answer `name`."""
    return " ".join(str(judge_source(exercise, known.source(exercise, name), seed=1)).split())


# ---------------------------------------------------------------------------------------------------------- references
def test_joins_one_after_the_other_are_the_tokenizers_training():
    text = "the cat sat on the mat, and the other cat sat there; banana bandana " * 3
    learned = tokenizer.train([text], 257 + 20)
    found: dict[str, int] = {}
    for piece in tokenizer._pieces().findall(text):
        found[piece] = found.get(piece, 0) + 1
    pieces, tokens = [list(piece.encode()) for piece in found], [bytes([byte]) for byte in range(256)]
    for new in range(256, 276):
        (a, b), pieces = PAIR.expected(pieces, list(found.values()), new)
        tokens.append(tokens[a] + tokens[b])
    assert tokens == learned.tokens


def test_the_rate_is_that_of_the_training_loop():
    for case in cases(RATE):
        step, steps, warmup, peak, final = case.args
        if not steps:  # no training loop is without steps
            assert RATE.expected(*case.args) == peak * final
            continue
        assert RATE.expected(*case.args) == pytest.approx(Schedule(steps, warmup, peak, final).rate(step), rel=1e-12)


def test_what_is_sent_is_what_the_accounting_says():
    for case in cases(RING):
        parameters, gpus, engine, micro, weight, gradient, reshard = case.args
        step = collectives.step(
            engine, parameters, gpus,
            micro_batches=micro, weight_bytes=weight, gradient_bytes=gradient, reshard=reshard,
        )  # fmt: skip
        assert RING.expected(*case.args) == step.total


def test_gradients_averaged_over_gpus_are_those_of_the_whole_step():
    """Eight micro-batches of unequal counts on one GPU, and dealt out to four."""
    case = cases(ACCUMULATE)[3]
    weight, batches, counted, _ = case.args
    batches = [*batches, *(cases(ACCUMULATE, seed=2)[3].args[1])]
    counted = sum(int((targets != -100).sum()) for _, targets in batches)
    loss, gradient = ACCUMULATE.expected(weight, batches, counted, 1)
    shares = [ACCUMULATE.expected(weight, batches[i::2], counted, 2) for i in (0, 1)]
    assert sum(share[0] for share in shares) / 2 == pytest.approx(loss)
    torch.testing.assert_close(sum(share[1] for share in shares) / 2, gradient)
    rows, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    weight = weight.clone().requires_grad_()
    whole = torch.nn.functional.cross_entropy(rows @ weight.T, targets)
    whole.backward()
    assert whole.item() == pytest.approx(loss)
    torch.testing.assert_close(weight.grad, gradient)


def test_the_gradients_are_pytorchs():
    for case in cases(ATTENTION):
        q, k, v, do = (x.double() for x in case.args)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        group = len(q) // len(k)
        shared = (x.repeat_interleave(group, 0) for x in (k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, *shared, is_causal=True)
        torch.testing.assert_close(ATTENTION.reference(q, k, v), o)
        dq, *_ = torch.autograd.grad(o, (q, k, v), do)
        lse = (q @ k.repeat_interleave(group, 0).mT / q.shape[-1] ** 0.5).masked_fill(
            torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1), -torch.inf
        )
        ours = DQ.reference(q, k, v, do, lse.logsumexp(-1), (o * do).sum(-1))
        torch.testing.assert_close(ours, dq)


# --------------------------------------------------------------------------------------------------------------- cases
@pytest.mark.parametrize("exercise", (DQ, ATTENTION), ids=ids)
def test_cases_hold_what_breaks_kernels(exercise):
    tags = set().union(*(case.tags for case in cases(exercise)))
    assert {"float32", "float16", "bfloat16", "gqa", "blocks", "rest"} <= tags
    # What rounds a sum after each block shows after many blocks alone.
    lengths = {case.args[0].shape[1] for case in cases(exercise) if "many-blocks" not in case.tags}
    assert lengths & {15, 31} and 16 in lengths and lengths & {17, 33} and max(lengths) <= 80


def test_micro_batches_without_a_token_and_gpus_without_one():
    counts = [[int((t != -100).sum()) for _, t in case.args[1]] for case in cases(ACCUMULATE)]
    assert any(0 in found and len(found) > 1 for found in counts) and [0] in counts


def test_names_of_cases_do_not_depend_on_the_seed():
    for exercise in (PAIR, RATE, ACCUMULATE, DQ, ATTENTION):
        first, second = ([c.name for c in exercise.cases(random.Random(seed))] for seed in (1, 2))
        assert first == second


# ----------------------------------------------------------------------------------------------------------- diagnoses
def test_what_a_learner_reads():
    assert "Which one does the docstring ask for?" in shown(PAIR, "takes-the-larger-pair")
    assert "a thousand times as much" in shown(ACCUMULATE, "averages-the-means")
    assert "The logits of one micro-batch take" in shown(ACCUMULATE, "one-graph-for-all")
    assert "In which order does autograd expect" in shown(ATTENTION, "returns-dv-first")


# ------------------------------------------------------------------------------------------------------- in the model
def test_a_gpt_trains_with_the_solutions_attention_as_with_pytorchs():
    config = GPTConfig(
        64, 24, 2, 4, 32, kv_heads=2, norm="rms", positions="rope", mlp="swiglu", biases=False, intermediate=48
    )

    def losses(operations: Operations):
        torch.manual_seed(0)
        model, draw = GPT(config, operations), torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        while True:
            tokens = torch.randint(64, (2, 21), generator=draw)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    mine = Operations(attention=solution()["attention_for_gpt"])
    theirs, ours = (list(islice(losses(operations), 4)) for operations in (Operations(), mine))
    assert ours == pytest.approx(theirs, rel=1e-5) and theirs[-1] < theirs[0]


# -------------------------------------------------------------------------------------------------------- the notebook
def test_the_notebook_keeps_to_its_size_and_adds_up_the_minutes():
    minutes = sum(exercise.label.minutes for exercise in EXERCISES)
    assert f"of which {minutes} minutes are exercises" in "".join(NOTEBOOK["cells"][0]["source"])
    for cell in NOTEBOOK["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert len(text.splitlines()) <= 15 and max(map(len, text.splitlines())) <= 100, cell["id"]
        else:
            assert len(text.split()) <= 280, cell["id"]


def test_the_upstream_gradient_is_called_what_the_stub_calls_it():
    """In a report of an access outside of it, for example."""
    assert worker._names(["q", "k", "v"], (1, 2, 3, 4), ATTENTION.job("", "cpu"))[-1] == "do"
    assert worker._names(["x"], (1, 2), registry.exercise("norms.rope").job("", "cpu"))[-1] == "dy"
