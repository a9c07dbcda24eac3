"""FLOPs and time: the answers that the checks expect, held against brute force, against PyTorch's counter and against
gpukit.accounting; what the misconceptions say; the figures in the notebook. tests/checks/test_answers.py judges the known answers."""

import itertools
import json
import random
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from gpukit import hardware
from gpukit.accounting import flops, models, roofline, training
from gpukit.checks.flops import AUDIT, CHINCHILLA, CRITICAL, DAYS, EINSUM, EXERCISES, LAYER, MFU, ROOFLINE
from gpukit.grading.judge import judge_source

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "03_flops.ipynb"
H100 = hardware.gpu("h100")
BY_ID = {exercise.id: exercise for exercise in EXERCISES}


def counted(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


# ---- the answers that the checks expect ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    ("a b, b c -> a c", "a, b -> a b", "a b -> a", "a b -> b a", "a a ->", "a b, c b, b -> a", "a, b, c -> a c"),
)
def test_einsum_by_running_the_loops(expression):
    sizes = {"a": 2, "b": 3, "c": 4}
    inputs, output = expression.split("->")
    operands, kept = [part.split() for part in inputs.split(",")], output.split()
    names = sorted({name for operand in operands for name in operand})
    products: dict[tuple, int] = {}
    operations = 0
    for index in itertools.product(*(range(sizes[name]) for name in names)):
        at = dict(zip(names, index, strict=True))
        operations += len(operands) - 1
        element = tuple(at[name] for name in kept)
        products[element] = products.get(element, 0) + 1
    summed = any(name not in kept for name in names)
    operations += sum(products.values()) if summed else 0
    assert EINSUM.expected(expression, sizes) == operations


def test_einsum_is_the_accountings_count_up_to_two_operands():
    for seed in range(5):
        for case in EINSUM.cases(random.Random(seed)):
            if case.args[0].count(",") <= 1:
                assert EINSUM.expected(*case.args) == flops.einsum_flops(*case.args), case.name


def test_layer_is_what_pytorch_counts():
    B, T, d_model, heads, kv_heads, head_dim, d_ff = 2, 24, 32, 6, 2, 16, 40

    def weight(*shape):
        return torch.zeros(shape, device="meta", requires_grad=True)

    def layer(gated):
        x = weight(B, T, d_model)
        q = (x @ weight(d_model, heads * head_dim)).view(B, T, heads, head_dim).transpose(1, 2)
        k, v = ((x @ weight(d_model, kv_heads * head_dim)).view(B, T, kv_heads, head_dim) for _ in "kv")
        k, v = (t.transpose(1, 2).repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        y = (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).reshape(B, T, -1)
        x = x + y @ weight(heads * head_dim, d_model)
        h = F.silu(x @ weight(d_model, d_ff))
        h = h * (x @ weight(d_model, d_ff)) if gated else h
        return x + h @ weight(d_ff, d_model)

    for gated in (False, True):
        forward = counted(lambda g=gated: layer(g))
        both = counted(lambda g=gated: layer(g).sum().backward())
        expected = LAYER.expected(B, T, d_model, heads, kv_heads, head_dim, d_ff, gated, False)
        assert expected == (forward, both - forward)


def test_layer_is_the_accountings_count():
    for seed in range(5):
        for case in LAYER.cases(random.Random(seed)):
            B, T, d_model, heads, kv_heads, head_dim, d_ff, gated, causal = case.args
            config = models.Config(
                "", 10, d_model, 1, heads, kv_heads=kv_heads, head_size=head_dim, intermediate=d_ff, glu=gated
            )
            forward = flops.forward_flops(config, B, T, causal=causal, logits="none").total
            assert LAYER.expected(*case.args) == (forward, 2 * forward)


def test_audit_is_the_accountings_count():
    for case in AUDIT.cases(random.Random(0)):
        layers, d_model, d_ff, vocab, positions, tied, B, T = case.args
        if not layers:  # the head alone; no model of the accounting is without layers
            assert AUDIT.expected(*case.args) == 6 * B * T * vocab * d_model
            continue
        config = models.Config(
            "", vocab, d_model, layers, 1, intermediate=d_ff, positions=positions, tied_embeddings=tied
        )
        assert AUDIT.expected(*case.args) == flops.step_flops(config, B, T, causal=False).model


def test_mfu_is_the_accountings():
    for case in MFU.cases(random.Random(0)):
        tokens, forward, gpus, rate, sparse, recomputed = case.args
        mfu, hfu = MFU.expected(*case.args)
        assert hfu == pytest.approx(mfu * (3 + recomputed) / 3)
        if rate in (1979.0, 989.4):
            ours = training.mfu(tokens, 3 * forward, H100, gpus)
            assert mfu == pytest.approx(ours, rel=2e-4)  # the headline is printed with four digits
            assert sparse == (rate > 1000)


def test_days_are_the_accountings_and_what_is_lost_is_half_an_interval():
    run = (70e9, 70e9, 15e12, 1024, 989.4, 0.5)
    cost = training.training_cost(70e9, 15e12, H100, 1024, 0.5)
    assert DAYS.expected(*run, 1.0, 0, 0.0) == pytest.approx(cost.days) == pytest.approx(143.94, abs=0.01)
    rng, gap, restart, stops = random.Random(0), 2.0, 0.5, 20_000
    lost = sum(rng.uniform(0, 1000) % gap + restart for _ in range(stops))
    assert DAYS.expected(*run, gap, stops, restart) == pytest.approx(cost.days + lost / 24, rel=0.01)


def test_the_best_model_spends_the_whole_budget_and_is_the_accountings():
    for case in CHINCHILLA.cases(random.Random(0)):
        gpus, peak, mfu, days, ratio = case.args
        params, tokens = CHINCHILLA.expected(*case.args)
        assert 6 * params * tokens == pytest.approx(gpus * peak * 1e12 * mfu * days * training.DAY_S)
        assert tokens == pytest.approx(ratio * params)
        if ratio == training.CHINCHILLA:
            assert params == pytest.approx(training.chinchilla_parameters(int(6 * params * tokens)), rel=1e-6)


def test_mlp_is_the_roofline_of_its_kernels():
    M, d_model, d_ff = 300, 512, 2048
    rates = (H100.peak("bf16") / 1e12, H100.peak("fp32") / 1e12, H100.hbm_gbps)
    products = [roofline.matmul_point("", M, d_ff, d_model), roofline.matmul_point("", M, d_model, d_ff)]
    gelu = roofline.elementwise_point("", M * d_ff, flops=8)
    three = roofline.least_us(products, H100, "bf16") + gelu.least_us(H100, "fp32")
    assert ROOFLINE.expected(M, d_model, d_ff, 2, *rates, False) == pytest.approx(three)
    assert ROOFLINE.expected(M, d_model, d_ff, 2, *rates, True) == pytest.approx(
        roofline.least_us(products, H100, "bf16")  # GELU's lanes need less than the product's bytes
    )


def test_critical_batch_by_trying_every_batch():
    for seed in range(3):
        for case in CRITICAL.cases(random.Random(seed)):
            params, weight, kv, attention, tflops, gbps = map(Fraction, case.args)
            batch, found = CRITICAL.expected(*case.args), 0
            last = (
                batch if batch > 5000 else 0
            )  # of a late crossing the batch itself and the one before, which are enough
            for B in (*range(1, 5000), last - 1, last):
                fetch_s = (params * weight + B * kv) / (gbps * 10**9)
                if B > 0 and B * (2 * params + attention) / (tflops * 10**12) >= fetch_s:
                    found = B
                    break
            assert batch == found, case.name


def test_critical_batch_of_weights_alone_is_the_accountings():
    for weights, size in (("bf16", 2.0), ("fp8", 1.0), ("int4", 0.5)):
        ours = roofline.critical_batch(H100, "bf16", weights)
        answer = CRITICAL.expected(8e9, size, 0.0, 0.0, H100.peak("bf16") / 1e12, H100.hbm_gbps)
        assert answer - 1 < ours <= answer


# ---- the checks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_fresh_seeds_give_fresh_numbers_and_as_many_cases(exercise):
    first, second = (exercise.cases(random.Random(seed)) for seed in (0, 1))
    assert len(first) == len(second) and [case.args for case in first] != [case.args for case in second]
    assert exercise.cases(random.Random(0)) == first


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_no_wrong_idea_is_right_and_no_two_are_the_same(exercise):
    """For any seed: a check that mistakes one idea for another sends people to the wrong place."""
    for seed in range(20):
        cases = exercise.cases(random.Random(seed))
        expected = [exercise.expected(*case.args) for case in cases]
        ideas = [known for known in exercise.misconceptions if known.gives is not None]
        answers = [(known.label, [_answer(known, case) for case in cases]) for known in ideas]
        for label, answer in answers:
            assert not _same(exercise, answer, expected), f"{label} is right, seed {seed}"
        for (a, one), (b, other) in itertools.combinations(answers, 2):
            assert a == b or not _same(exercise, one, other), f"{a} is {b}, seed {seed}"


def _answer(known, case):
    try:
        return known.gives(*case.args)
    except ArithmeticError as error:
        return str(error)


def _same(exercise, one, other) -> bool:
    return all(exercise.differs(a, b) is None for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("exercise_id", "source"),
    (
        (  # the counter itself
            "flops.layer",
            "from torch.utils.flop_counter import FlopCounterMode\n\ndef layer_flops(*a):\n    return 0, 0\n",
        ),
        ("flops.layer", "def layer_flops(B, T, d_model, *rest):\n    n = 12 * d_model**2\n    return 2 * n, 4 * n\n"),
        ("flops.einsum", "def einsum_flops(expression, sizes):\n    return 33554432\n"),
        ("flops.days", "def training_days(*a):\n    return 143.94\n"),
        ("flops.days", "def training_days(*a):\n    return float('nan')\n"),
        ("flops.mfu", "def utilization(*a):\n    return 0.5\n"),
        ("flops.mfu", "def utilization(*a):\n    return 0.5, 0.5, 0.5\n"),
        ("flops.critical_batch", "def critical_batch(*a):\n    return True\n"),
        ("flops.critical_batch", "def critical_batch(*a):\n    return None\n"),
        ("flops.audit", "class Any(int):\n    __eq__ = lambda s, o: True\n\ndef step_flops(*a):\n    return Any(1)\n"),
    ),
)
def test_lazy_and_cheating_answers_do_not_pass(exercise_id, source):
    verdict = judge_source(BY_ID[exercise_id], source, seed=0)
    assert not verdict.passed and verdict.lines


def test_other_number_types_are_accepted():
    source = """import numpy as np


def step_flops(layers, d_model, d_ff, vocab, positions, tied, B, T):
    per_token = np.int64(layers) * (4 * d_model**2 + 2 * d_model * d_ff) + np.int64(vocab) * d_model
    return np.int64(6) * B * T * (per_token + layers * 2 * T * d_model)
"""
    assert judge_source(AUDIT, source, seed=0).passed


# ---- the notebook ----------------------------------------------------------------------------------------------------


def test_the_figures_of_the_lectures_are_printed_by_cells():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    texts = [json.dumps(cell["outputs"], ensure_ascii=False) for cell in cells if cell["cell_type"] == "code"]
    printed = "\n".join(texts)
    for figure in (
        "33,554,432",  # 2 * 1024 * 256 * 64
        "125,829,120",  # 6 * data points * parameters, of two linear layers
        "92,274,688",  # what runs: the first layer's input needs no gradient
        "262,144",  # M N, a sum of two matrices
        "143.9",  # days for 70 B, 15 T tokens, 1,024 H100, MFU 0.5
        "72.0",  # the same with the headline rate
        "989.4",  # H100, dense
        "1,979",  # H100, with sparsity
        "312.0",  # A100
        "12.5",  # times, from instructions that do more
        "1,000",  # all four causes together
        "91,300,000,000",  # parameters, in three digits, for 10^24 FLOPs, 20 tokens each
        "295 with bf16 weights",  # critical batch of an H100
    ):
        assert figure in printed, figure
