"""Other libraries as providers of a benchmark: what is called, with which arguments and in which layout. None is needed: a
small module of the same name takes each one's place, and computes the same with PyTorch."""

import os
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from gpukit import benchmark
from gpukit.reference import norms
from gpukit.reference._liger import cutedsl


@pytest.fixture
def library(monkeypatch):
    """library("quack.softmax", softmax=f) can be imported, and so can the packages above it."""

    def put(name, **functions):
        for end in range(name.count(".") + 1):
            parent = ".".join(name.split(".")[: end + 1])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
            sys.modules[parent].__path__ = []
            sys.modules[parent].__spec__ = object()  # what importlib.util.find_spec answers with
        for key, value in functions.items():
            monkeypatch.setattr(sys.modules[name], key, value, raising=False)
        above, _, last = name.rpartition(".")
        if above:
            monkeypatch.setattr(sys.modules[above], last, sys.modules[name], raising=False)

    return put


def wrong(op_name, provider, shape, modes=("fwd", "bwd")):
    """What the benchmark has to say against a provider's result and gradients, "" where they are right."""
    op = benchmark.operation(op_name)
    inputs = benchmark.make_inputs(op, shape, torch.bfloat16, "cpu")
    return benchmark._Truth(op, inputs, modes).refutes(benchmark.provider(op, provider))


def test_softmax_of_quack(library):
    library("quack.softmax", softmax=lambda x: torch.softmax(x, -1))
    assert wrong("softmax", "quack", (6, 65)) == ""


def test_without_a_library_there_is_no_provider(monkeypatch):
    for name in ("quack", "liger_kernel", "cutlass"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    softmax = benchmark.operation("softmax")
    assert benchmark.provider(softmax, "quack") is None and benchmark.provider(softmax, "liger-triton") is None
    with pytest.raises(ModuleNotFoundError, match="cutlass"):
        cutedsl("softmax")(torch.ones(2, 2))


def test_norms_of_quack(library):
    calls = []

    def rmsnorm(x, weight, residual=None, eps=1e-5, prenorm=False):
        u = x if residual is None else x + residual
        y = F.rms_norm(u, u.shape[-1:], weight, eps)
        return (y, u) if prenorm else y

    def layernorm_fwd(x, weight, bias, eps, return_rstd, return_mean):
        assert weight.dtype == bias.dtype == torch.float32 and return_rstd and return_mean
        calls.append((weight, bias))
        wide = x.float()
        mean, rstd = wide.mean(-1), (wide.var(-1, correction=0) + eps).rsqrt()
        return F.layer_norm(wide, wide.shape[-1:], weight, bias, eps).to(x.dtype), rstd, mean

    def layernorm_bwd(x, weight, dy, rstd, mean, has_bias):
        x_hat, dy = (x.float() - mean[:, None]) * rstd[:, None], dy.float()
        g = dy * weight
        dx = rstd[:, None] * (g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True))
        return dx.to(x.dtype), (dy * x_hat).sum(0), dy.sum(0) if has_bias else None

    library("quack.rmsnorm", rmsnorm=rmsnorm, layernorm_fwd=layernorm_fwd, layernorm_bwd=layernorm_bwd)
    for op in ("rms_norm", "residual_rms_norm", "layer_norm"):
        assert wrong(op, "quack", (7, 251)) == ""
    layer_norm = benchmark.provider(benchmark.operation("layer_norm"), "quack")
    inputs = norms.make_layer_norm_inputs((3, 8), torch.bfloat16, torch.Generator().manual_seed(0))
    calls.clear()
    layer_norm(*inputs), layer_norm(*inputs)
    assert calls[0][0] is calls[1][0] and calls[0][1] is calls[1][1], "vectors are converted once, not at each call"


def test_losses_of_quack(library):
    def cross_entropy(x, target, ignore_index):
        return F.cross_entropy(x.float(), target, ignore_index=ignore_index)

    def cross_entropy_fwd(x, target, weight, ignore_index, return_dx, inplace_backward):
        """As QuACK's: losses and gradients of single rows, each times its class's weight."""
        assert return_dx and inplace_backward and weight.shape == x.shape[1:] and weight.is_contiguous()
        counts = target != ignore_index
        at = torch.where(counts, target, 0)
        scale = torch.where(counts, weight[at], 0)
        p = torch.softmax(x.float(), -1)
        losses = (torch.logsumexp(x.float(), -1) - x.float().gather(1, at[:, None])[:, 0]) * scale
        p[torch.arange(len(x)), at] -= 1
        x.copy_(p * scale[:, None])
        return losses, x

    library("quack.cross_entropy", cross_entropy=cross_entropy, cross_entropy_fwd=cross_entropy_fwd)
    assert wrong("cross_entropy", "quack", (7, 251)) == ""
    assert wrong("cross_entropy", "quack-inplace", (7, 251)) == ""
    op = benchmark.operation("cross_entropy")
    logits, target = benchmark.make_inputs(op, (7, 251), torch.bfloat16, "cpu")
    x = logits.clone().requires_grad_()
    (dx,) = torch.autograd.grad(benchmark.provider(op, "quack-inplace")(x, target), x)
    assert dx.data_ptr() == x.data_ptr(), "the gradient is where the logits were"


def test_linear_loss_and_product_of_quack(library):
    def chunked(x, weight, target, ignore_index):
        return F.cross_entropy(F.linear(x, weight), target, ignore_index=ignore_index).float()

    def gemm(A, B):
        assert A.stride(1) == 1 and B.stride(0) == 1, "both along K, as a linear layer has them"
        return A @ B

    library("quack.linear_cross_entropy", chunked_linear_cross_entropy=chunked)
    library("quack.gemm_interface", gemm=gemm)
    assert wrong("linear_cross_entropy", "quack", (10, 8, 251), ("fwd+bwd",)) == ""
    assert wrong("matmul", "quack", (17, 31, 97), ("fwd",)) == ""


@pytest.mark.parametrize(
    ("op", "shape"),
    (
        ("flash_attention", (2, 3, 65, 64)),
        ("flash_attention_causal", (1, 2, 64, 128)),
        ("flash_attention_gqa", (1, 4, 2, 65, 128)),
    ),
)
def test_flash_attention_4_has_tokens_before_heads(op, shape, library):
    *_, T, D = shape
    given = []

    def flash_attn_func(q, k, v, causal=False):
        given.append((q, k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return o.transpose(1, 2), None

    library("flash_attn.cute", flash_attn_func=flash_attn_func)
    assert wrong(op, "fa4", shape) == ""
    for x in given[0]:
        assert x.shape[1] == T and x.shape[3] == D and x.transpose(1, 2).is_contiguous(), "a view, no copy"


def test_flash_attention_4_decodes_the_caches_where_they_lie(library):
    given = []

    def flash_attn_func(q, k, v, num_splits=1):
        assert num_splits == 0, "how many parts a cache is cut into is for it to choose"
        given.append((q, k, v))
        o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True)
        return o.transpose(1, 2), None

    library("flash_attn.cute", flash_attn_func=flash_attn_func)
    assert wrong("decode_attention", "fa4", (2, 6, 2, 65, 32), ("fwd",)) == ""
    for q, k, v in given:
        assert q.shape == (2, 1, 6, 32) and k.shape == v.shape == (2, 65, 2, 32) and k.is_contiguous()


@pytest.mark.parametrize("op", ("flash_attention", "flash_attention_causal", "flash_attention_gqa"))
def test_the_formula_passes_the_rule(op):
    shape = (1, 4, 2, 65, 64) if op.endswith("gqa") else (1, 2, 65, 64)
    assert wrong(op, "formula", shape) == ""


def test_a_query_of_grouped_heads_sees_its_own_head_of_k():
    q, k, v, causal = benchmark.make_inputs(
        benchmark.operation("flash_attention_gqa"), (1, 6, 2, 5, 16), torch.float32, "cpu"
    )
    assert q.shape == (1, 6, 5, 16) and k.shape == v.shape == (1, 2, 5, 16) and causal
    cost = benchmark.operation("flash_attention_gqa").cost((1, 6, 2, 5, 16), torch.bfloat16)
    assert cost.read_bytes == 2 * (q.numel() + k.numel() + v.numel()) and cost.write_bytes == 2 * q.numel()
    back = benchmark.operation("flash_attention_gqa").cost_bwd((1, 6, 2, 5, 16), torch.bfloat16)
    assert back.write_bytes == cost.read_bytes and back.read_bytes == 2 * (3 * q.numel() + 2 * k.numel()) + 4 * 6 * 5


def test_liger_in_cute_is_asked_for_by_name(library, monkeypatch):
    monkeypatch.setenv("LIGER_KERNEL_STRICT", "0")
    seen = []

    def put(name, compute):
        def call(*inputs, impl):
            seen.append((name, impl))
            return compute(*inputs)

        library("liger_kernel.functional", **{name: call})

    library("cutlass")
    put("softmax", lambda x: torch.softmax(x, -1))
    put("rms_norm", lambda x, w, eps: F.rms_norm(x, x.shape[-1:], w, eps))
    put("layer_norm", lambda x, w, b, eps: F.layer_norm(x, x.shape[-1:], w, b, eps))
    put("fused_add_rms_norm", lambda x, r, w, eps: (F.rms_norm(x + r, x.shape[-1:], w, eps), x + r))
    put("swiglu", lambda a, b: F.silu(a) * b)
    put("cross_entropy", lambda x, t: (F.cross_entropy(x.float(), t), None, None, None))
    put("fused_linear_cross_entropy", lambda x, w, t: (F.cross_entropy(F.linear(x, w), t).float(), None, None, None))
    put("kl_div", lambda a, b, reduction, log_target: (b * (b.log() - a)).mean())
    names = {op: "liger-cutedsl" for op in ("softmax", "rms_norm", "layer_norm", "residual_rms_norm", "swiglu")}
    for op, provider in names.items():
        assert wrong(op, provider, (7, 251)) == ""
    assert wrong("cross_entropy", "liger-cutedsl", (7, 251)) == ""
    assert wrong("linear_cross_entropy", "liger-cutedsl", (10, 8, 251), ("fwd+bwd",)) == ""
    benchmark.provider(benchmark.operation("kl_div"), "liger-cutedsl")(torch.zeros(2, 3), torch.ones(2, 3))
    assert {name for name, _ in seen} == {
        "softmax", "rms_norm", "layer_norm", "fused_add_rms_norm", "swiglu", "cross_entropy",
        "fused_linear_cross_entropy", "kl_div",
    }  # fmt: skip
    assert {impl for _, impl in seen} == {"nvidia-cutedsl"}
    assert os.environ["LIGER_KERNEL_STRICT"] == "1", "Liger may not answer with its Triton kernel"


@pytest.mark.parametrize("op", [name for name, op in benchmark.operations().items() if "liger-triton" in op.peers])
def test_liger_is_there_in_both_implementations(op):
    peers = benchmark.operation(op).peers
    assert "liger-cutedsl" in peers and "liger" not in peers, "the provider's name says which implementation it is"
