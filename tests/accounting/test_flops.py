"""gpukit.accounting.flops against torch's own counter, forward and backward, on a real transformer."""

import random
from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpukit.accounting.flops import (
    AGAIN,
    SQUARE,
    attention_share,
    backward_flops,
    einsum_flops,
    forward_flops,
    matmul_flops,
    matmul_parameters,
    parse_einsum,
    six_nd,
    step_flops,
    token_flops,
    two_nd,
)
from gpukit.accounting.memory import Run
from gpukit.accounting.models import PRESETS, parameters, preset
from tests.accounting.test_models import CONFIGS
from tests.accounting.transformer import Transformer

B, T = 2, 16


def count(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def built(config, run: Run, tokens: int = T):
    """The model and its tokens; without memory, unless experts have to be chosen."""
    with torch.device("cpu" if config.experts else "meta"):
        return Transformer(config, run), torch.zeros(B, tokens, dtype=torch.int64)


EAGER = [(c, Run("fp32", "eager", recompute)) for c in CONFIGS for recompute in ("none", "selective", "full")]
# FlashAttention's operation takes heads of one size, and torch has no formula for the CPU's.
FLASH = [(c, Run("fp32", "flash", recompute)) for c in CONFIGS for recompute in ("none", "full")
         if c.value_size == c.qk_size and not c.experts]  # fmt: skip


@pytest.mark.parametrize(("config", "run"), EAGER + FLASH, ids=lambda value: getattr(value, "name", None))
def test_a_step_is_what_torch_counts(config, run):
    model, ids = built(config, run)
    step = step_flops(config, B, T, causal=False, recompute=run.recompute, flash=run.attention == "flash")
    losses = []
    assert count(lambda: losses.append(model.loss(ids, ids))) == step.forward
    assert count(losses[0].backward) == step.backward + step.recomputed
    assert step.model == 3 * step.forward and step.hardware == step.model + step.recomputed


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_operations_are_what_torch_counts_for_their_modules(config):
    model, ids = built(config, Run("fp32", "eager"))
    with FlopCounterMode(display=False) as counter:
        model(ids)
    found = {name: sum(by_op.values()) for name, by_op in counter.get_flop_counts().items()}
    operations = forward_flops(config, B, T, causal=False).operations
    attention, mlp = (sum(n for name, n in found.items() if name.endswith(ending)) for ending in (".attention", ".mlp"))
    assert mlp == sum(operations.get(name, 0) for name in ("mlp", "router", "experts"))
    assert found["Transformer.head"] == operations["logits"]
    assert attention == sum(operations.values()) - mlp - operations["logits"]


@pytest.mark.parametrize("config", CONFIGS[:4], ids=lambda c: c.name)
def test_backward_by_operation(config):
    model, ids = built(config, Run("fp32", "flash"))
    loss = model.loss(ids, ids)
    backward = backward_flops(config, B, T, causal=False, flash=True)
    assert count(loss.backward) == backward.total
    assert backward.attention_flops * 2 == 5 * forward_flops(config, B, T, causal=False).attention_flops


def test_presets_in_full_size():
    for name in ("gpt2", "llama3-8b", "qwen2.5-7b"):
        model, ids = built(preset(name), Run("fp32", "flash"), 1024)
        assert count(lambda: model(ids)) == forward_flops(name, B, 1024, causal=False).total  # noqa: B023


# ---- causal, decode and prefill --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v3"))
def test_decoding_token_by_token_is_the_causal_prefill(name):
    """With a cache no pair of query and key is computed twice: 16 steps of one token are one pass over 16."""
    steps = [forward_flops(name, 1, 1, past=past).operations for past in range(16)]
    prefill = forward_flops(name, 1, 16).operations
    assert {op: sum(step[op] for step in steps) for op in prefill} == prefill
    two = [forward_flops(name, 3, 10).total, forward_flops(name, 3, 6, past=10).total]
    assert sum(two) == 3 * forward_flops(name, 1, 16).total


def test_causal_is_half_of_the_square_and_the_diagonal():
    half, full = (forward_flops("gpt2", 1, 1000, causal=causal).attention_flops for causal in (True, False))
    assert half * 2000 == full * 1001
    assert forward_flops("gpt2", 1, 1000, causal=False).attention_flops == 12 * 4 * 1000 * 1000 * 768


def test_logits():
    every, last, none = (forward_flops("gpt2", 2, 100, logits=which).total for which in ("all", "last", "none"))
    one = 2 * 768 * 50257
    assert every - none == 200 * one and last - none == 2 * one


@pytest.mark.parametrize("name", PRESETS)
def test_two_nd_is_exact_but_for_attention(name):
    """N is the active parameters without tables that are looked up, norms and biases, and with the head even if tied."""
    flops = forward_flops(name, 4, 512)
    assert flops.total - flops.attention_flops == two_nd(matmul_parameters(name), 4 * 512)
    assert six_nd(matmul_parameters(name), 2048) == 3 * two_nd(matmul_parameters(name), 2048)
    counted, config = parameters(preset(name)), preset(name)
    head = counted.head or counted.embedding
    small = counted.norms + config.layers * 10 * (config.hidden + config.intermediate)  # all biases are less than that
    table = counted.embedding + counted.positions
    assert 0 <= counted.active - table - counted.head + head - matmul_parameters(name) <= small


def test_grouped_heads_save_projections_not_attention():
    many, few = CONFIGS[0], CONFIGS[2]  # heads of 8 and of 12
    assert forward_flops(few, 1, 64).operations["k projection"] * 4 == 64 * 2 * 32 * 12 * 3 * 4
    assert forward_flops(few, 1, 64).attention_flops * 8 == forward_flops(many, 1, 64).attention_flops * 12


def test_absorbed_attention_works_on_the_cached_vector():
    """DeepSeek-V3: a key takes 2 x 128 heads x (576 + 512) instead of 2 x 128 x (192 + 128); the rest stays."""
    plain, absorbed = (forward_flops("deepseek-v3", 1, 1, past=99, absorbed=a) for a in (False, True))
    assert plain.attention_flops == 61 * 100 * 2 * 128 * (192 + 128)
    assert absorbed.attention_flops == 61 * 100 * 2 * 128 * (576 + 512)
    assert plain.total - plain.attention_flops == absorbed.total - absorbed.attention_flops


def test_the_share_of_attention_grows():
    shares = [attention_share("gpt2", tokens) for tokens in (128, 1024, 8192, 65536)]
    assert shares == sorted(shares) and 0.05 < shares[1] < 0.1 and shares[3] > 0.75


def test_flops_grow_with_batch_and_length():
    for name in PRESETS:
        by_batch = [step_flops(name, batch, 64).hardware for batch in (1, 2, 5)]
        by_length = [step_flops(name, 1, tokens).hardware for tokens in (1, 2, 64, 65, 4096)]
        assert by_batch == [n * by_batch[0] for n in (1, 2, 5)] and by_length == sorted(set(by_length))


# ---- matmul and einsum -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v3"))
def test_groups_of_one_token_are_all_of_its_flops(name):
    whole = forward_flops(name, 1, 512)
    forward, training = (token_flops(name, 512, phase) for phase in ("forward", "training"))
    assert 512 * sum(forward.values()) == pytest.approx(sum(whole.operations.values()), rel=1e-12)
    assert 512 * forward[SQUARE] == pytest.approx(whole.attention_flops, rel=1e-12)
    assert training == pytest.approx({group: 3 * part for group, part in forward.items()}, rel=1e-12)
    last = token_flops(name, 512, "decode")
    newest = forward_flops(name, 1, 1, past=511, logits="last")
    assert sum(last.values()) == pytest.approx(sum(newest.operations.values()), rel=1e-12)
    assert last[SQUARE] > 1.9 * forward[SQUARE]  # the newest token sees all of the context, the average half of it
    again = token_flops(name, 512, "training", "full")
    assert again.pop(AGAIN) > 0 and again == training


def test_matmul():
    a, b = torch.empty(1024, 256, device="meta"), torch.empty(256, 64, device="meta")
    assert matmul_flops(1024, 64, 256) == count(lambda: a @ b) == 2 * 1024 * 256 * 64
    assert matmul_flops(7, 5, 3, batch=4) == count(
        lambda: torch.empty(4, 7, 3, device="meta") @ torch.empty(4, 3, 5, device="meta")
    )


def test_two_linear_layers_forward_and_backward_are_six_times_data_times_parameters():
    """But for the gradient of the first layer's input, which nothing needs."""
    x = torch.empty(1024, 256, device="meta")
    layers = torch.nn.Sequential(torch.nn.Linear(256, 64, False), torch.nn.Linear(64, 64, False)).to("meta")
    weights = 256 * 64 + 64 * 64
    assert count(lambda: layers(x).sum().backward()) == 6 * 1024 * weights - matmul_flops(1024, 256, 64)


@pytest.mark.parametrize(
    ("expression", "sizes", "flops"),
    (
        ("ik,kj->ij", {"i": 3, "k": 5, "j": 7}, 2 * 105),
        ("i, o i -> o", {"i": 3, "o": 5}, 30),
        ("i, i o -> o", {"i": 3, "o": 5}, 30),
        ("o i, o i ->", {"i": 3, "o": 5}, 30),
        ("l i, i -> l", {"l": 4, "i": 3}, 24),
        ("... i, o i -> ... o", {"...": 4, "i": 3, "o": 5}, 120),
        ("bhqd,bhkd->bhqk", {"b": 2, "h": 3, "q": 4, "k": 5, "d": 6}, 2 * 720),
        ("batch head q d, batch head k d -> batch head q k", {"batch": 2, "head": 3, "q": 4, "k": 5, "d": 6}, 2 * 720),
        ("i,j->ij", {"i": 3, "j": 5}, 15),
        ("i,i->i", {"i": 3}, 3),
        ("ij->ji", {"i": 3, "j": 5}, 0),
        ("ij->i", {"i": 3, "j": 5}, 15),
        ("ii->", {"i": 3}, 3),
        ("ab,bc,cd->ad", {"a": 2, "b": 3, "c": 5, "d": 7}, 2 * 30 + 2 * 70),
    ),
)
def test_einsum(expression, sizes, flops):
    assert einsum_flops(expression, sizes) == flops


def test_random_einsums_are_what_torch_counts():
    """Where something is summed over: torch computes a product without a sum as a batched matmul with one addend."""
    rng = random.Random(1)
    for _ in range(60):
        names = "abcde"
        left = rng.sample(names, rng.randint(1, 4))
        right = rng.sample(names, rng.randint(1, 4))
        shared = [n for n in left if n in right]
        if not shared:
            continue
        summed = rng.choice(shared)
        output = [n for n in dict.fromkeys(left + right) if n != summed]  # an axis of one input alone stays
        rng.shuffle(output)
        sizes = {n: rng.randint(2, 6) for n in names}
        expression = f"{''.join(left)},{''.join(right)}->{''.join(output)}"
        a, b = (torch.empty([sizes[n] for n in axes], device="meta") for axes in (left, right))
        wanted = count(lambda: torch.einsum(expression, a, b))  # noqa: B023
        assert einsum_flops(expression, sizes) == wanted == 2 * prod(sizes[n] for n in {*left, *right}), expression


def test_an_expression_taken_apart():
    parsed = parse_einsum("b h q d, b h k d -> b h q k")
    assert parsed.inputs == (("b", "h", "q", "d"), ("b", "h", "k", "d"))
    assert parsed.output == ("b", "h", "q", "k") and parsed.summed == ("d",)
    assert parse_einsum("bqd, bkd -> bqk") == parse_einsum("bqd,bkd->bqk")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    (
        (lambda: matmul_flops(0, 1, 1), "matmul_flops: M must be a whole number from 1 to 10^9, got 0"),
        (lambda: matmul_flops(1, 1, 2.5), "matmul_flops: K must be a whole number, got 2.5"),
        (lambda: matmul_flops(1, 10**30, 1), "matmul_flops: N must be a whole number from 1 to 10^9"),
        (lambda: einsum_flops("ij,jk", {}), "write inputs -> output"),
        (lambda: einsum_flops("ij->k", {"i": 1, "j": 1}), "no input has the output's k"),
        (lambda: einsum_flops("ij->ii", {"i": 1, "j": 1}), "the output names an axis twice"),
        (lambda: einsum_flops("ij,jk->ik", {"i": 1}), "sizes lacks j, k"),
        (lambda: einsum_flops("ij,jk->ik", {"i": 1, "j": 0, "k": 1}), "j must be a whole number from 1"),
        (lambda: einsum_flops("i+,j->ij", {"i": 1}), "an axis is a name or ..., got '+'"),
        (lambda: forward_flops("gpt2", 0, 5), "forward_flops: batch must be a whole number from 1 to 10^9, got 0"),
        (lambda: forward_flops("gpt2", 1, 5.5), "forward_flops: tokens must be a whole number, got 5.5"),
        (lambda: forward_flops("gpt2", 1, 5, past=-1), "past must be a whole number from 0 to 10^12, got -1"),
        (lambda: forward_flops("gpt2", 1, 5, logits="some"), "logits must be one of all, last, none, got 'some'"),
        (lambda: forward_flops("gpt2", 1, 5, absorbed=True), "absorbed needs a model with MLA, and gpt2 has none"),
        (lambda: forward_flops("gpt5", 1, 5), "no model is called 'gpt5'; did you mean 'gpt2'?"),
        (lambda: step_flops("gpt2", 1, 5, recompute="half"), "recompute must be one of none, selective, full"),
        (lambda: two_nd(10**30, 1), "two_nd: parameters must be a whole number from 1 to 10^15"),
        (lambda: six_nd(70e9, 0), "six_nd: tokens must be a whole number from 1 to 10^18, got 0"),
        (lambda: six_nd(70e9, 1e30), "six_nd: tokens must be a whole number from 1 to 10^18, got 1e+30"),
    ),
)  # fmt: skip
def test_what_is_refused(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value)
