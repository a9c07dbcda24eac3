"""Pairs and triples that lie interleaved: strides of 2 and 3."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, HALF, MI, UINT8, Work, case, empty, normal

KIND = "interleaved"


@triton.jit
def rotate_pairs(x_ptr, cos_ptr, sin_ptr, y_ptr, H: tl.constexpr, D2: tl.constexpr):
    """Rotary embedding of elements 2 i and 2 i + 1, one token per program."""
    token = tl.program_id(0)
    i = tl.arange(0, D2)[None, :]
    at = (token * H + tl.arange(0, H)[:, None]) * 2 * D2 + 2 * i
    cos, sin = tl.load(cos_ptr + token * D2 + i), tl.load(sin_ptr + token * D2 + i)
    a, b = tl.load(x_ptr + at).to(tl.float32), tl.load(x_ptr + at + 1).to(tl.float32)
    tl.store(y_ptr + at, (a * cos - b * sin).to(y_ptr.dtype.element_ty))
    tl.store(y_ptr + at + 1, (a * sin + b * cos).to(y_ptr.dtype.element_ty))


@case("rotary embedding of neighbors bf16", KIND, dict(T=16384, H=32, D=128), dict(T=3, H=4, D=32))
def _(device, T, H, D):
    x, y = normal(device, T, H, D), empty(device, T, H, D)
    cos, sin = normal(device, T, D // 2, dtype=FLOAT), normal(device, T, D // 2, dtype=FLOAT)

    def want():
        a, b, c, s = x[..., ::2].float(), x[..., 1::2].float(), cos[:, None], sin[:, None]
        return torch.stack([a * c - b * s, a * s + b * c], -1).view(T, H, D)

    return Work(lambda: rotate_pairs[(T,)](x, cos, sin, y, H=H, D2=D // 2, num_warps=8), y, want)


@triton.jit
def complex_products(x_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    at = 2 * (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    a, b = tl.load(x_ptr + at), tl.load(x_ptr + at + 1)
    c, d = tl.load(y_ptr + at), tl.load(y_ptr + at + 1)
    tl.store(z_ptr + at, a * c - b * d)
    tl.store(z_ptr + at + 1, a * d + b * c)


@case("complex products, 32 Mi fp32", KIND, dict(n=32 * MI), dict(n=2048))
def _(device, n):
    x, y, z = normal(device, n, 2, dtype=FLOAT), normal(device, n, 2, dtype=FLOAT), empty(device, n, 2, dtype=FLOAT)
    return Work(
        lambda: complex_products[(n // 1024,)](x, y, z, BLOCK=1024),
        z,
        lambda: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y)),
    )


@triton.jit
def gated_pairs(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """SwiGLU where gate and value are neighbors."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(x_ptr + 2 * offs).to(tl.float32), tl.load(x_ptr + 2 * offs + 1).to(tl.float32)
    tl.store(y_ptr + offs, (gate / (1 + tl.exp(-gate)) * up).to(y_ptr.dtype.element_ty))


@case("gated pairs, 64 Mi bf16", KIND, dict(n=64 * MI), dict(n=2048))
def _(device, n):
    x, y = normal(device, n, 2), empty(device, n)

    def run():
        return gated_pairs[(n // 1024,)](x, y, BLOCK=1024)

    return Work(run, y, lambda: F.silu(x[:, 0].float()) * x[:, 1].float())


@triton.jit
def unpack_nibbles(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Two numbers of 4 bits in each byte, stored next to each other in 16 bits."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + 2 * offs, ((x & 15).to(tl.float32) - 8).to(y_ptr.dtype.element_ty))
    tl.store(y_ptr + 2 * offs + 1, ((x >> 4).to(tl.float32) - 8).to(y_ptr.dtype.element_ty))


def _bytes(device: str, *shape: int):
    if device == "meta":
        return torch.empty(shape, dtype=UINT8, device=device)
    return torch.randint(256, shape, dtype=UINT8, device=device)


@case("unpack 4 bits to fp16, 64 Mi bytes", KIND, dict(n=64 * MI), dict(n=4096))
def _(device, n):
    x, y = _bytes(device, n), empty(device, n, 2, dtype=HALF)

    def run():
        return unpack_nibbles[(n // 2048,)](x, y, BLOCK=2048)

    return Work(run, y, lambda: torch.stack([x & 15, x >> 4], -1).float() - 8)


@triton.jit
def planes(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Red, green and blue of each pixel into planes of their own."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for c in tl.static_range(3):
        x = tl.load(x_ptr + 3 * offs + c).to(tl.float32) * (1 / 255)
        tl.store(y_ptr + c * n + offs, x.to(y_ptr.dtype.element_ty))


@case("pixels of 3 bytes to planes of fp16", KIND, dict(n=32 * MI), dict(n=4096))
def _(device, n):
    x, y = _bytes(device, n, 3), empty(device, 3, n, dtype=HALF)
    return Work(lambda: planes[(n // 1024,)](x, y, n, BLOCK=1024), y, lambda: x.t().float() / 255)
