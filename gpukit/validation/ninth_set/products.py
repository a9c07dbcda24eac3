"""Products: of gated activations, of spectra by bands, of 8 bits with zero points, of experts' gradients, of batches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit.validation.new_kernels.case import FLOAT, HALF, INT8, KI, Work, empty, known, normal, place
from gpukit.validation.ninth_set.case import case

GATES, BANDS = "gates in front of products", "bands of spectra"
ZEROS, EXPERTS = "products of 8 bits with zero points", "gradients of experts' weights"
BATCHES = "batches by descriptors of three dimensions"


@triton.jit
def gate_and_multiply(x_ptr, w_ptr, y_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """(SiLU of the first K columns of x, times the others) @ w: what is multiplied is never stored."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        at = x_ptr + m[:, None] * 2 * K + k[None, :]
        gate, up = tl.load(at).to(tl.float32), tl.load(at + K).to(tl.float32)
        x = (gate * tl.sigmoid(gate) * up).to(w_ptr.dtype.element_ty)
        total = tl.dot(x, tl.load(w_ptr + k[:, None] * N + n[None, :]), total)
    tl.store(y_ptr + m[:, None] * N + n[None, :], total.to(y_ptr.dtype.element_ty))


@case(
    "gates of 4096 x 5632 pairs fp16 inside a product with 5632 x 2048, 128x128x32, 8 warps, 3 stages",
    GATES,
    dict(M=4 * KI, N=2 * KI, K=5632),
    dict(M=128, N=128, K=96),
)
def _(device, M, N, K):
    x, w, y = (
        normal(device, M, 2 * K, dtype=HALF),
        normal(device, K, N, dtype=HALF) / 8,
        empty(device, M, N, dtype=HALF),
    )

    def run():
        gate_and_multiply[(M // 128, N // 128)](x, w, y, N, K, BM=128, BN=128, BK=32, num_warps=8, num_stages=3)

    return Work(run, y, lambda: (F.silu(x[:, :K].float()) * x[:, K:].float()) @ w.float())


@triton.jit
def bands_of_spectra(
    x_ptr, w_ptr, y_ptr, M, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Logarithms of the power of N bands. A row of x holds K complex numbers, whose squares are weighted."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        at, mask = x_ptr + m[:, None] * 2 * K + 2 * k[None, :], (m < M)[:, None] & (k < K)[None, :]
        real, other = tl.load(at, mask=mask, other=0.0), tl.load(at + 1, mask=mask, other=0.0)
        w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(real * real + other * other, w, total, input_precision="tf32")
    y = tl.log2(tl.maximum(total, 1e-10)) * 0.30103
    tl.store(y_ptr + m[:, None] * N + n[None, :], y, mask=(m < M)[:, None] & (n < N)[None, :])


@case(
    "80 bands of 299,999 spectra of 201 complex fp32, a tf32 product and logarithms, 64x128x32, 4 warps",
    BANDS,
    dict(M=299_999, K=201, N=80),
    dict(M=70, K=21, N=10),
)
def _(device, M, K, N):
    x, y = normal(device, M, K, 2, dtype=FLOAT), empty(device, M, N, dtype=FLOAT)
    w = normal(device, K, N, dtype=FLOAT).sigmoid()

    def run():
        bands_of_spectra[(triton.cdiv(M, 64),)](x, w, y, M, K=K, N=N, BM=64, BN=128, BK=32, num_warps=4, num_stages=3)

    return Work(run, y, lambda: (x.double().square().sum(2) @ w.double()).log10())


@triton.jit
def with_zero_points(
    x_ptr, w_ptr, zero_ptr, row_ptr, scale_ptr, y_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """(x - the row's zero point) @ w.T with scales of rows and columns. Sums of w, which zero points need, are made beside
    the product."""
    m, n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    total, sums = tl.zeros((BM, BN), tl.int32), tl.zeros((BN,), tl.int32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        w = tl.load(w_ptr + n[:, None] * K + k[None, :])
        total = tl.dot(tl.load(x_ptr + m[:, None] * K + k[None, :]), tl.trans(w), total, out_dtype=tl.int32)
        sums += tl.sum(w.to(tl.int32), 1)
    y = (total - tl.load(zero_ptr + m)[:, None] * sums[None, :]).to(tl.float32)
    y *= tl.load(row_ptr + m)[:, None] * tl.load(scale_ptr + n)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty))


@case(
    "matmul 4096 x 6144 x 4096 int8, zero points of rows, sums of weights inside, 128x128x64, 8 warps, 5 stages",
    ZEROS,
    dict(M=4 * KI, N=6 * KI, K=4 * KI),
    dict(M=128, N=128, K=192),
)
def _(device, M, N, K):
    x, w, y = normal(device, M, K, dtype=INT8), normal(device, N, K, dtype=INT8), empty(device, M, N)
    zero = known(device, 60, M) - 30
    row, scale = normal(device, M, dtype=FLOAT).sigmoid() / 64, normal(device, N, dtype=FLOAT).sigmoid() / 64

    def run():
        with_zero_points[(N // 128, M // 128)](
            x, w, zero, row, scale, y, N, K, BM=128, BN=128, BK=64, num_warps=8, num_stages=5
        )

    def want():
        return (x.double() - zero[:, None]) @ w.double().T * row[:, None] * scale

    return Work(run, y, want)


@triton.jit
def expert_gradients(x_ptr, g_ptr, start_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x.T @ g for the rows of one expert, which lie one after another: how many they are differs."""
    expert = tl.program_id(2)
    start, stop = tl.load(start_ptr + expert), tl.load(start_ptr + expert + 1)
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(start, stop, BK):
        k = first + tl.arange(0, BK)
        live = (k < stop)[:, None]
        x = tl.load(x_ptr + k[:, None] * M + m[None, :], mask=live, other=0.0)
        total = tl.dot(tl.trans(x), tl.load(g_ptr + k[:, None] * N + n[None, :], mask=live, other=0.0), total)
    at = (expert * M + m)[:, None] * N + n[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty))


@case(
    "gradients of 48 experts' weights of 2048 x 768 by 40,000 rows bf16 in all, 128x128x64, 8 warps, 3 stages",
    EXPERTS,
    dict(E=48, T=40_000, M=2048, N=768),
    dict(E=4, T=300, M=128, N=128),
)
def _(device, E, T, M, N):
    """Some experts have many rows, and some have none."""
    expert = (E * (known("meta", 1 << 20, T) / (1 << 20)) ** 2).long()
    count = torch.bincount(expert, minlength=E)
    count[0], count[E // 2] = count[0] + count[E // 2], 0
    start = place(device, F.pad(count.cumsum(0), (1, 0)).int())
    x, g, y = normal(device, T, M), normal(device, T, N), empty(device, E, M, N)

    def run():
        expert_gradients[(M // 128, N // 128, E)](
            x, g, start, y, M, N, BM=128, BN=128, BK=64, num_warps=8, num_stages=3
        )

    def want():
        pairs = zip(x.split(count.tolist()), g.split(count.tolist()), strict=True)
        return torch.stack([a.float().T @ b.float() for a, b in pairs])

    return Work(run, y, want)


@triton.jit
def batches(a, b, c, y, share, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """share * c + a.T @ b for each matrix of a batch. A block of a descriptor has one matrix of it."""
    m, n, i = tl.program_id(0) * BM, tl.program_id(1) * BN, tl.program_id(2)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        left = tl.reshape(a.load([i, k, m]), (BK, BM))
        total = tl.dot(tl.trans(left), tl.reshape(b.load([i, k, n]), (BK, BN)), total)
    total += share * tl.reshape(c.load([i, m, n]), (BM, BN)).to(tl.float32)
    y.store([i, m, n], tl.reshape(total, (1, BM, BN)).to(y.dtype))


@case(
    "40 products a.T @ b of 1000 x 712 x 800 fp16 and a share of c, descriptors of 3 dimensions, 128x64x64, 4 warps",
    BATCHES,
    dict(B=40, M=1000, N=712, K=800),
    dict(B=2, M=136, N=72, K=80),
)
def _(device, B, M, N, K):
    """Descriptors read nothing beyond the ends, and store nothing there."""
    a, b, c = (normal(device, B, *shape, dtype=HALF) for shape in ((K, M), (K, N), (M, N)))
    y = empty(device, B, M, N, dtype=HALF)
    blocks = [1, 64, 128], [1, 64, 64], [1, 128, 64], [1, 128, 64]
    tiles = [TensorDescriptor.from_tensor(x, block) for x, block in zip((a, b, c, y), blocks, strict=True)]

    def run():
        batches[(triton.cdiv(M, 128), triton.cdiv(N, 64), B)](
            *tiles, 0.5, K, BM=128, BN=64, BK=64, num_warps=4, num_stages=4
        )

    return Work(run, y, lambda: c.float() / 2 + a.float().mT @ b.float())
