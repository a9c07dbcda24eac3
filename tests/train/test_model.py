"""The GPT: its parameters are those that the accounting counts, its mathematics is checked piece by piece, and each kernel of
gpukit can take an operation's place."""

import dataclasses
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gpukit import kernels
from gpukit.accounting import models
from gpukit.reference import rope as rope_reference
from gpukit.train import plan, presets
from gpukit.train.model import GPT, GPTConfig, Operations, rope

SMALL = GPTConfig(vocab_size=50, context=16, layers=2, heads=4, hidden=32, intermediate=48)
LLAMA = dataclasses.replace(
    SMALL, kv_heads=2, norm="rms", positions="rope", mlp="swiglu", biases=False, tied_embeddings=False
)
FAMILIES = {"gpt2": SMALL, "llama": LLAMA}


def tokens(config: GPTConfig, B: int = 2, T: int = 9) -> torch.Tensor:
    return torch.randint(config.vocab_size, (B, T))


def count(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


# ---- the shape


def test_gpt2_has_the_published_number_of_parameters():
    config = GPTConfig(**presets.preset("gpt2").settings.model)
    assert count(config) == 124_439_808 == models.parameters(models.preset("gpt2")).total


def test_llama_1b_has_the_published_number_of_parameters():
    # meta-llama/Llama-3.2-1B: its weight file holds 2,471,628,800 bytes of bf16.
    assert count(GPTConfig(**presets.preset("llama-1b").settings.model)) == 2_471_628_800 // 2


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_have_the_parameters_that_the_accounting_counts(name):
    model = presets.preset(name).settings.model
    assert count(GPTConfig(**model)) == models.parameters(plan.accounting_config(name, model)).total


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_combination_is_counted_and_runs(norm, positions, mlp, tied):
    model = {
        "vocab_size": 50, "context": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 32, "norm": norm,
        "positions": positions, "mlp": mlp, "biases": norm == "layer", "tied_embeddings": tied,
    }  # fmt: skip
    gpt = GPT(GPTConfig(**model))
    assert count(gpt.config) == models.parameters(plan.accounting_config("x", model)).total
    x = tokens(gpt.config)
    logits, loss = gpt(x), gpt(x, x.roll(-1, 1))
    assert logits.shape == (2, 9, 50) and loss.shape == ()
    assert abs(loss.item() - math.log(50)) < 0.2  # nothing is learned yet: every token is about as likely
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in gpt.parameters())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"heads": 3}, "GPTConfig: heads must divide hidden, and 3 does not divide 32"),
        ({"kv_heads": 3}, "GPTConfig: kv_heads must divide heads, and 3 does not divide 4"),
        ({"layers": 0}, "GPTConfig: layers must be a whole number from 1 to"),
        ({"norm": "batch"}, "GPTConfig: norm must be one of layer, rms, got 'batch'"),
        ({"positions": "alibi"}, "GPTConfig: positions must be one of learned, rope, got 'alibi'"),
        ({"mlp": "relu"}, "GPTConfig: mlp must be one of gelu, swiglu, got 'relu'"),
        ({"positions": "rope", "heads": 32}, "GPTConfig: rope needs an even head size, hidden / heads, got 1"),
        ({"dropout": 1.0}, "GPTConfig: dropout must be 0 or more and below 1, got 1.0"),
        ({"rope_base": 0.5}, "GPTConfig: rope_base must be a finite number above 1, got 0.5"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change, sentence):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(SMALL, **{"kv_heads": None, **change})
    assert str(error.value).startswith(sentence)


def test_a_sequence_longer_than_the_context_is_named():
    with pytest.raises(ValueError, match=r"a sequence must have 1 to 16 tokens \(context\), got 17"):
        GPT(SMALL)(tokens(SMALL, T=17))
    with pytest.raises(ValueError, match=r"tokens must be \[sequences, tokens\], got the shape \[3\]"):
        GPT(SMALL)(torch.zeros(3, dtype=torch.int64))


# ---- the mathematics


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_does_not_see_the_ones_after_it(family):
    gpt = GPT(FAMILIES[family])
    x = tokens(gpt.config)
    changed = x.clone()
    changed[:, 5:] = (x[:, 5:] + 1) % 50
    a, b = gpt(x), gpt(changed)
    assert torch.equal(a[:, :5], b[:, :5]) and not torch.equal(a[:, 5], b[:, 5])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_cross_entropy_of_the_logits(family):
    gpt = GPT(FAMILIES[family])
    x, y = tokens(gpt.config), tokens(gpt.config)
    wanted = -gpt(x).double().log_softmax(-1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(gpt(x, y).double(), wanted, rtol=1e-6, atol=0)


def by_hand(gpt: GPT, x: torch.Tensor) -> torch.Tensor:
    """The Llama-shaped model again, in float64, one head and one token at a time wherever that can be written."""
    c, w = gpt.config, {name: value.double() for name, value in gpt.state_dict().items()}
    D, T = c.head_size, len(x)

    def norm(v, name):
        return v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]

    def turn(v, t):  # v [D] as D/2 complex numbers, turned by t times their speed
        i = torch.arange(D // 2, dtype=torch.float64)
        turned = torch.complex(v[: D // 2], v[D // 2 :]) * torch.exp(1j * t * c.rope_base ** (-2 * i / D))
        return torch.cat((turned.real, turned.imag))

    stream = w["embedding.weight"][x]
    for layer in range(c.layers):
        name = f"blocks.{layer}"
        rows = norm(stream, f"{name}.attention_norm") @ w[f"{name}.attention.qkv.weight"].T
        q, k, v = rows.split((c.heads * D, c.kv_heads * D, c.kv_heads * D), dim=1)
        out = torch.zeros(T, c.hidden, dtype=torch.float64)
        for head in range(c.heads):
            kv = head // (c.heads // c.kv_heads)
            for t in range(T):
                query = turn(q[t, head * D : (head + 1) * D], t)
                scores = torch.stack([query @ turn(k[s, kv * D : (kv + 1) * D], s) for s in range(t + 1)]) / D**0.5
                out[t, head * D : (head + 1) * D] = scores.softmax(0) @ v[: t + 1, kv * D : (kv + 1) * D]
        stream = stream + out @ w[f"{name}.attention.out.weight"].T
        gate, up = (norm(stream, f"{name}.mlp_norm") @ w[f"{name}.mlp.up.weight"].T).chunk(2, dim=1)
        stream = stream + (gate * gate.sigmoid() * up) @ w[f"{name}.mlp.down.weight"].T
    return norm(stream, "norm") @ w["head.weight"].T


def test_the_llama_shape_equals_its_formulas_written_out():
    gpt = GPT(LLAMA)
    with torch.no_grad():
        for parameter in gpt.parameters():  # far from its start, where attention is nearly even
            parameter.mul_(3)
        x = tokens(LLAMA, 1, 7)
        torch.testing.assert_close(gpt(x)[0].double(), by_hand(gpt, x[0]), rtol=1e-4, atol=1e-4)


def test_rope_is_the_reference():
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8)
    cos, sin = (table.float() for table in rope_reference.tables(7, 8))
    for ours, wanted in zip(rope(q, k, cos, sin), rope_reference.rope(q, k, cos, sin), strict=True):
        assert torch.equal(ours, wanted)


def test_dropout_is_for_training_only():
    gpt = GPT(dataclasses.replace(SMALL, dropout=0.5))
    x = tokens(SMALL)
    assert not torch.equal(gpt(x), gpt(x))
    gpt.eval()
    assert torch.equal(gpt(x), gpt(x))


def test_it_learns_a_line_by_heart():
    gpt = GPT(LLAMA)
    x = tokens(LLAMA, 1, 12)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    for _ in range(60):
        loss = gpt(x[:, :-1], x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1
    assert torch.equal(gpt.generate(x[:, :1], 11, temperature=0), x)


# ---- the operations

REPLACEMENTS = {
    "layer_norm": ("gpt2", kernels.layer_norm),
    "rms_norm": ("llama", kernels.rms_norm),
    "rope": ("llama", kernels.rope),
    "attention": ("llama", kernels.flash_attention),
    "gelu": ("gpt2", kernels.gelu),
    "swiglu": ("llama", kernels.swiglu),
    "loss": ("llama", kernels.linear_cross_entropy),
}


def test_there_is_a_replacement_for_every_operation():
    assert set(REPLACEMENTS) == {field.name for field in dataclasses.fields(Operations)}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_a_kernel_takes_the_place_of_one_operation(name, device):
    family, kernel = REPLACEMENTS[name]
    gpt = GPT(dataclasses.replace(FAMILIES[family], layers=1)).to(device)
    x, y = tokens(gpt.config).to(device), tokens(gpt.config).to(device)
    calls = []

    def called(*args, **kwargs):
        calls.append(name)
        return kernel(*args, **kwargs)

    def loss_and_gradients():
        gpt.zero_grad()
        loss = gpt(x, y)
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in gpt.parameters())]

    plain = loss_and_gradients()
    gpt.operations = Operations(**{name: called})
    for ours, wanted in zip(loss_and_gradients(), plain, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)
    assert calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_keeps_the_logits_once_and_in_float32(dtype, device):
    gpt = GPT(dataclasses.replace(SMALL, vocab_size=977)).to(device)
    x = tokens(gpt.config).to(device)
    kept = []

    def pack(tensor):
        if tensor.numel() == x.numel() * 977:
            kept.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16),
    ):
        gpt(x, x)
    # Two operations keep it, and it is one tensor in memory.
    assert {tensor.dtype for tensor in kept} == {torch.float32} and len({tensor.data_ptr() for tensor in kept}) == 1


# ---- writing


def test_generate_continues_and_can_be_repeated():
    gpt = GPT(SMALL)
    x = tokens(SMALL, 2, 3)
    draw = partial(gpt.generate, x, 20)  # 23 tokens: more than the context of 16
    first, again = (draw(generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.shape == (2, 23) and torch.equal(first[:, :3], x) and torch.equal(first, again)
    assert torch.equal(draw(top_k=1), draw(temperature=0))
    likeliest = F.softmax(gpt(x)[:, -1], -1).topk(3).indices
    drawn = torch.stack([gpt.generate(x, 1, top_k=3)[:, -1] for _ in range(30)], 1)
    assert all(set(drawn[row].tolist()) <= set(likeliest[row].tolist()) for row in range(2))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"count": -1}, "generate: count must be a whole number from 0"),
        ({"count": 1, "temperature": -0.5}, "generate: temperature must be 0 or more, got -0.5"),
        ({"count": 1, "top_k": 51}, "generate: top_k must be a whole number from 0 to 50, got 51"),
    ],
)
def test_generate_refuses(arguments, sentence):
    with pytest.raises(ValueError) as error:
        GPT(SMALL).generate(torch.zeros(1, 1, dtype=torch.int64), **arguments)
    assert str(error.value).startswith(sentence)
