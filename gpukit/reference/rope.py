"""Rotary position embedding: what it means, on which inputs it is judged, and the least it must move."""

import torch
from torch import Generator, Tensor

from gpukit.op import Cost, Op
from gpukit.reference._liger import cutedsl

BASE = 10_000.0  # LLaMA's, of https://arxiv.org/abs/2104.09864


def tables(T: int, D: int, base: float = BASE) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D/2] of the angles t base^(-2 i / D), float64."""
    frequencies = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = torch.outer(torch.arange(T, dtype=torch.float64), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, D] turned by the angles of cos, sin [T, D/2] or [B, T, D/2]."""
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q, cos, sin), rotate(k, cos, sin)


def library(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch has no such function: this is how models write it, with the tables repeated and a half turned over."""
    cos, sin = (torch.cat((table, table), dim=-1).unsqueeze(-3) for table in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((-x2, x1), dim=-1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def _liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Made for heads after tokens in memory, [B, T, H, D]: other layouts are copied first, and only copies written over."""
    from liger_kernel.ops.rope import LigerRopeFunction

    cos, sin = (torch.cat((table, table), dim=-1).unsqueeze(0) for table in (cos, sin))
    return LigerRopeFunction.apply(q, k, cos, sin)


def _liger_cutedsl(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.cat((table, table), dim=-1).unsqueeze(0) for table in (cos, sin))
    return cutedsl("rope")(q, k, cos, sin)


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, ...]:
    """q [B, H, T, D], k [B, H_kv, T, D], cos and sin [T, D/2] on the CPU, for a shape (B, H, H_kv, T, D). Normal noise; the
    first token of q is large, the last one of k tiny."""
    B, H, H_kv, T, D = shape
    q = torch.randn((B, H, T, D), generator=generator, dtype=torch.float64)
    k = torch.randn((B, H_kv, T, D), generator=generator, dtype=torch.float64)
    q[:, :, :1] *= 1000
    k[:, :, -1:] *= 1e-3
    return tuple(x.to(dtype) for x in (q, k, *tables(T, D)))


def cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward: q, k, cos and sin read, q and k written; four products and two sums for each two numbers."""
    B, H, H_kv, T, D = shape
    elements = B * (H + H_kv) * T * D
    return Cost((elements + T * D) * dtype.itemsize, elements * dtype.itemsize, 3 * elements)


OP = Op(
    name="rope",
    reference=rope,
    library=library,
    make_inputs=make_inputs,
    cost=cost,
    cost_bwd=cost,  # the turn back
    test_shapes=(
        (1, 1, 1, 1, 2),
        (2, 2, 1, 1, 4),
        (1, 4, 2, 5, 6),
        (2, 3, 1, 7, 62),
        (1, 5, 5, 3, 64),
        (1, 8, 2, 2, 130),
    ),
    bench_shapes=((4, 32, 8, 4096, 128), (8, 16, 16, 2048, 64)),
    peers={"liger-triton": _liger, "liger-cutedsl": _liger_cutedsl},
    grads=(0, 1),
)
