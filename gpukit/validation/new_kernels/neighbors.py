"""Stencils, windows and pools: each element is loaded by several of its neighbors."""

from __future__ import annotations

import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, MI, Work, case, empty, normal

KIND = "overlapping loads"


@triton.jit
def taps(x_ptr, w_ptr, y_ptr, n, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """y[i] = the sum of w[k] * x[i + k]."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TAPS):
        total += tl.load(w_ptr + k) * tl.load(x_ptr + offs + k, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, total, mask=offs < n)


@case("stencil of 7 taps, 64 Mi fp32", KIND, dict(n=64 * MI), dict(n=2500))
def _(device, n):
    x, w, y = normal(device, n + 6, dtype=FLOAT), normal(device, 7, dtype=FLOAT), empty(device, n, dtype=FLOAT)

    def run():
        return taps[(triton.cdiv(n, 1024),)](x, w, y, n, TAPS=7, BLOCK=1024)

    return Work(run, y, lambda: sum(w[k] * x[k : k + n] for k in range(7)))


@triton.jit
def window_sums(x_ptr, y_ptr, n, window, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(window):
        total += tl.load(x_ptr + offs + k, mask=offs < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, total, mask=offs < n)


@case("sums over windows of 50, 16 Mi bf16", KIND, dict(n=16 * MI, window=50), dict(n=2500, window=11))
def _(device, n, window):
    x, y = normal(device, n + window - 1), empty(device, n, dtype=FLOAT)

    def run():
        return window_sums[(triton.cdiv(n, 1024),)](x, y, n, window, BLOCK=1024)

    return Work(run, y, lambda: sum(x[k : k + n].float() for k in range(window)))


@triton.jit
def laplacian(x_ptr, y_ptr, Z, Y, X, BY: tl.constexpr, BX: tl.constexpr):
    """Six neighbors in space less six times the point; the faces stay 0."""
    i = tl.program_id(2)
    j = (tl.program_id(1) * BY + tl.arange(0, BY))[:, None]
    k = (tl.program_id(0) * BX + tl.arange(0, BX))[None, :]
    inside = (i > 0) & (i < Z - 1) & (j > 0) & (j < Y - 1) & (k > 0) & (k < X - 1)
    x = x_ptr + (i * Y + j) * X + k
    total = -6.0 * tl.load(x, mask=inside)
    total += tl.load(x - 1, mask=inside) + tl.load(x + 1, mask=inside)
    total += tl.load(x - X, mask=inside) + tl.load(x + X, mask=inside)
    total += tl.load(x - X * Y, mask=inside) + tl.load(x + X * Y, mask=inside)
    tl.store(y_ptr + (i * Y + j) * X + k, total, mask=inside)


@case("laplacian of 256 x 512 x 512 fp32", KIND, dict(Z=256, Y=512, X=512), dict(Z=4, Y=9, X=140))
def _(device, Z, Y, X):
    x, y = normal(device, Z, Y, X, dtype=FLOAT), empty(device, Z, Y, X, dtype=FLOAT)

    def want():
        near = -6 * x[1:-1, 1:-1, 1:-1] + x[:-2, 1:-1, 1:-1] + x[2:, 1:-1, 1:-1] + x[1:-1, :-2, 1:-1]
        return F.pad(near + x[1:-1, 2:, 1:-1] + x[1:-1, 1:-1, :-2] + x[1:-1, 1:-1, 2:], (1,) * 6)

    grid = (triton.cdiv(X, 128), triton.cdiv(Y, 4), Z)
    return Work(lambda: laplacian[grid](x, y, Z, Y, X, BY=4, BX=128), y, want)


@triton.jit
def convolution(x_ptr, w_ptr, y_ptr, H, W, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """K x K weights on one plane; x is K - 1 larger than y each way."""
    i = (tl.program_id(1) * BM + tl.arange(0, BM))[:, None]
    j = (tl.program_id(0) * BN + tl.arange(0, BN))[None, :]
    mask = (i < H) & (j < W)
    total = tl.zeros((BM, BN), tl.float32)
    for di in tl.static_range(K):
        for dj in tl.static_range(K):
            x = tl.load(x_ptr + (i + di) * (W + K - 1) + j + dj, mask=mask, other=0.0)
            total += x * tl.load(w_ptr + di * K + dj)
    tl.store(y_ptr + i * W + j, total, mask=mask)


@case("convolution 5 x 5 of 4096 x 4096 fp32", KIND, dict(H=4096, W=4096), dict(H=19, W=75))
def _(device, H, W):
    x, w, y = (
        normal(device, H + 4, W + 4, dtype=FLOAT),
        normal(device, 5, 5, dtype=FLOAT),
        empty(device, H, W, dtype=FLOAT),
    )
    grid = (triton.cdiv(W, 64), triton.cdiv(H, 16))
    return Work(
        lambda: convolution[grid](x, w, y, H, W, K=5, BM=16, BN=64),
        y,
        lambda: sum(w[i, j] * x[i : i + H, j : j + W] for i in range(5) for j in range(5)),
    )


@triton.jit
def causal_convolution(x_ptr, w_ptr, y_ptr, T, C, TAPS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """A few taps along time for each channel, then SiLU, as state-space models begin."""
    t = (tl.program_id(1) * BT + tl.arange(0, BT))[:, None]
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    batch = tl.program_id(2) * T * C
    total = tl.zeros((BT, BC), tl.float32)
    for k in tl.static_range(TAPS):
        at = t + k - (TAPS - 1)
        x = tl.load(x_ptr + batch + at * C + c[None, :], mask=(at >= 0) & (t < T), other=0.0)
        total += x.to(tl.float32) * tl.load(w_ptr + k * C + c).to(tl.float32)[None, :]
    y = total / (1 + tl.exp(-total))
    tl.store(y_ptr + batch + t * C + c[None, :], y.to(y_ptr.dtype.element_ty), mask=t < T)


@case("causal convolution of 4 taps, channels last", KIND, dict(B=4, T=4096, C=4096), dict(B=2, T=21, C=256))
def _(device, B, T, C):
    x, w, y = normal(device, B, T, C), normal(device, 4, C), empty(device, B, T, C)

    def want():
        long = F.pad(x.float(), (0, 0, 3, 0))
        return F.silu(sum(w[k].float() * long[:, k : k + T] for k in range(4)))

    grid = (C // 128, triton.cdiv(T, 16), B)
    return Work(lambda: causal_convolution[grid](x, w, y, T, C, TAPS=4, BT=16, BC=128), y, want)


@triton.jit
def max_pool(x_ptr, y_ptr, H, W, OH, OW, BLOCK: tl.constexpr):
    """The largest of 3 x 3, every second row and column."""
    plane, i = tl.program_id(1), tl.program_id(0)
    j = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    for di in tl.static_range(3):
        for dj in tl.static_range(3):
            at = plane * H * W + (2 * i + di) * W + 2 * j + dj
            best = tl.maximum(best, tl.load(x_ptr + at, mask=j < OW, other=-float("inf")).to(tl.float32))
    tl.store(y_ptr + (plane * OH + i) * OW + j, best.to(y_ptr.dtype.element_ty), mask=j < OW)


@case("max-pool 3 x 3, every second, 512 planes of 513 x 513", KIND, dict(N=512, H=513), dict(N=2, H=11))
def _(device, N, H):
    out = (H - 3) // 2 + 1
    x, y = normal(device, N, H, H), empty(device, N, out, out)
    block = triton.next_power_of_2(out)

    def run():
        return max_pool[(out, N)](x, y, H, H, out, out, BLOCK=block)

    return Work(run, y, lambda: F.max_pool2d(x.float(), 3, 2))
