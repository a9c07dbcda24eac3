"""Products of complex numbers, windows that widen, triangles, 4 bits, features, experts, two kinds of fp8, and norms."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit.validation.new_kernels.case import (
    FLOAT,
    FP8,
    HALF,
    INT8,
    INT32,
    KI,
    SMS,
    UINT8,
    Work,
    empty,
    known,
    normal,
    place,
)
from gpukit.validation.tenth_set.case import case

COMPLEX, WIDENED, TRIANGLES = "complex matrices", "windows that widen", "updates of triangles"
FOUR, CROSSED, GATED = "products with weights fp4", "crossed features", "experts of int8 with gates"
MIXED, NORMED, COVARIANCES = "products of two kinds of fp8", "norms behind products", "covariances by few programs"
FP8_E5 = torch.float8_e5m2


@triton.jit
def complex_product(a_ptr, b_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A complex product by three real ones: of the real parts, of the imaginary parts, and of the sums of both. Each
    matrix is stored as all of its real parts, followed by its imaginary parts."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    real, imaginary = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    sums = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        a_at, a_live = a_ptr + m[:, None] * K + k[None, :], (m < M)[:, None] & (k < K)[None, :]
        b_at, b_live = b_ptr + k[:, None] * N + n[None, :], (k < K)[:, None] & (n < N)[None, :]
        a1, a2 = tl.load(a_at, mask=a_live, other=0.0), tl.load(a_at + M * K, mask=a_live, other=0.0)
        b1, b2 = tl.load(b_at, mask=b_live, other=0.0), tl.load(b_at + K * N, mask=b_live, other=0.0)
        real, imaginary = tl.dot(a1, b1, real), tl.dot(a2, b2, imaginary)
        sums = tl.dot(a1 + a2, b1 + b2, sums)
    at, live = y_ptr + m[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
    tl.store(at, (real - imaginary).to(y_ptr.dtype.element_ty), mask=live)
    tl.store(at + M * N, (sums - real - imaginary).to(y_ptr.dtype.element_ty), mask=live)


@case(
    "complex matmul 3000 x 2008 x 1504 fp16 by three real products, 64x64x32, 4 warps, 3 stages",
    COMPLEX,
    dict(M=3000, N=2008, K=1504),
    dict(M=70, N=72, K=48),
)
def _(device, M, N, K):
    a, b, y = (normal(device, 2, *s, dtype=HALF) for s in ((M, K), (K, N), (M, N)))

    def run():
        grid = triton.cdiv(M, 64), triton.cdiv(N, 64)
        complex_product[grid](a, b, y, M, N, K, BM=64, BN=64, BK=32, num_warps=4, num_stages=3)

    def want():
        (a1, a2), (b1, b2) = a.float(), b.float()
        return torch.stack([a1 @ b1 - a2 @ b2, a1 @ b2 + a2 @ b1])

    return Work(run, y, want)


@triton.jit
def widened_windows(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    M,
    T,
    C: tl.constexpr,
    N: tl.constexpr,
    UP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A transposed convolution of 2 * UP taps: each moment becomes UP new ones. New moment r of a moment sees it
    through tap r, and the moment before it through tap r + UP. Bias and leaky ReLU follow."""
    m, n, r = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.program_id(2)
    total = tl.zeros((BM, BN), tl.float32)
    for turn in range(0, 2 * C, BK):
        back, k = turn // C, turn % C + tl.arange(0, BK)
        live = (m < M) & (m % T >= back)
        x = tl.load(x_ptr + (m - back)[:, None] * C + k[None, :], mask=live[:, None], other=0.0)
        total = tl.dot(x, tl.load(w_ptr + ((r + back * UP) * C + k)[:, None] * N + n[None, :]), total)
    y = total + tl.load(bias_ptr + n)[None, :]
    y = tl.where(y > 0, y, 0.1 * y).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (m * UP + r)[:, None] * N + n[None, :], y, mask=(m < M)[:, None])


@case(
    "12 tracks of 2001 moments of 512 fp16 to 8 times as many of 256, 16 taps, 128x64x32, 4 warps, 4 stages",
    WIDENED,
    dict(B=12, T=2001, C=512, N=256),
    dict(B=2, T=70, C=32, N=64),
)
def _(device, B, T, C, N):
    x, w = normal(device, B, T, C, dtype=HALF), normal(device, 16, C, N, dtype=HALF) / 16
    bias, y = normal(device, N, dtype=FLOAT), empty(device, B, 8 * T, N, dtype=HALF)

    def run():
        grid = triton.cdiv(B * T, 128), N // 64, 8
        widened_windows[grid](x, w, bias, y, B * T, T, C=C, N=N, UP=8, BM=128, BN=64, BK=32, num_warps=4, num_stages=4)

    def want():
        wide = F.conv_transpose1d(x.float().mT, w.float().permute(1, 2, 0), bias, stride=8)[:, :, : 8 * T]
        return F.leaky_relu(wide, 0.1).mT

    return Work(run, y, want)


@triton.jit
def update_triangles(a_ptr, b_ptr, gate_ptr, y_ptr, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Each pair i, j of a channel hears of all pairs i, k and j, k: a product a @ b.T for each channel, behind a
    gate."""
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    first = tl.program_id(2) * N * N
    total = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, N, BK):
        k = begin + tl.arange(0, BK)
        a_live, b_live = (i < N)[:, None] & (k < N)[None, :], (j < N)[:, None] & (k < N)[None, :]
        a = tl.load(a_ptr + first + i[:, None] * N + k[None, :], mask=a_live, other=0.0)
        b = tl.load(b_ptr + first + j[:, None] * N + k[None, :], mask=b_live, other=0.0)
        total = tl.dot(a, tl.trans(b), total)
    at, live = first + i[:, None] * N + j[None, :], (i < N)[:, None] & (j < N)[None, :]
    gate = tl.load(gate_ptr + at, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (total * tl.sigmoid(gate)).to(y_ptr.dtype.element_ty), mask=live)


@case(
    "96 products a @ b.T of 501 x 501 bf16 behind a gate, rows of odd length, 64x64x32, 4 warps, 2 stages",
    TRIANGLES,
    dict(C=96, N=501),
    dict(C=2, N=77),
)
def _(device, C, N):
    a, b, gate, y = (normal(device, C, N, N) for _ in range(4))

    def run():
        grid = triton.cdiv(N, 64), triton.cdiv(N, 64), C
        update_triangles[grid](a, b, gate, y, N, BM=64, BN=64, BK=32, num_warps=4, num_stages=2)

    return Work(run, y, lambda: a.float() @ b.float().mT * gate.float().sigmoid())


@triton.jit
def fp4_weights(x_ptr, w_ptr, scale_ptr, y_ptr, share, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x @ w.T, where a byte of w has two numbers of a sign, two bits of exponent and one of mantissa, and 16 neighbors
    share a scale in fp8. Their bits are moved to where fp16 has them, which is the number times 2 ** -14."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k, byte = first + tl.arange(0, BK), first // 2 + tl.arange(0, BK // 2)
        code = tl.load(w_ptr + n[:, None] * (K // 2) + byte[None, :]).to(tl.uint16)
        code = tl.reshape(tl.join(code & 15, code >> 4), (BN, BK // 16, 16))
        w = ((code & 8) << 12 | (code & 7) << 9).to(tl.float16, bitcast=True).to(tl.float32) * 16384
        group = first // 16 + tl.arange(0, BK // 16)
        scale = tl.load(scale_ptr + n[:, None] * (K // 16) + group[None, :]).to(tl.float32)
        w = tl.reshape(w * scale[:, :, None], (BN, BK)).to(tl.float16)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m < M)[:, None], other=0.0)
        total = tl.dot(x, tl.trans(w), total)
    y = (total * share).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None] * N + n[None, :], y, mask=(m < M)[:, None])


@case(
    "300 rows fp16 by 12,288 x 8192 weights fp4, scales fp8 of 16, 64x128x64, 8 warps, 3 stages",
    FOUR,
    dict(M=300, N=12 * KI, K=8 * KI),
    dict(M=70, N=128, K=128),
)
def _(device, M, N, K):
    x, w = normal(device, M, K, dtype=HALF), normal(device, N, K // 2, dtype=INT8).view(UINT8)
    scale, y = (normal(device, N, K // 16, dtype=FLOAT).sigmoid() + 0.5).to(FP8), empty(device, M, N, dtype=HALF)

    def run():
        grid = triton.cdiv(M, 64), N // 128
        fp4_weights[grid](x, w, scale, y, 0.125, M, N, K, BM=64, BN=128, BK=64, num_warps=8, num_stages=3)

    def want():
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], device=w.device)
        codes = torch.stack([w & 15, w >> 4], 2).view(N, K)
        weights = values[codes.int()].view(N, -1, 16) * scale.float()[:, :, None]
        return x.float() @ weights.view(N, K).T / 8

    return Work(run, y, want)


@triton.jit
def crossed(x, w, first, last, bias_ptr, y, K, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """first * (x @ w.T + bias) + x, all by descriptors; `last` is x again, in tiles of the result's form."""
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(x.load([m, k]), tl.trans(w.load([n, k])), total)
    col = n + tl.arange(0, BN)
    total += tl.load(bias_ptr + col, mask=col < N, other=0.0)[None, :]
    y.store([m, n], (first.load([m, n]).to(tl.float32) * total + last.load([m, n]).to(tl.float32)).to(y.dtype))


@case(
    "crossed features, 20,000 samples of 1504 fp16, a product and two tiles, descriptors, 128x128x32, 8 warps, 3 stages",
    CROSSED,
    dict(M=20_000, N=1504),
    dict(M=136, N=160),
)
def _(device, M, N):
    first, x, y = (normal(device, M, N, dtype=HALF) for _ in range(3))
    w, bias = normal(device, N, N, dtype=HALF) / 32, normal(device, N, dtype=FLOAT)
    small, tile = [128, 32], [128, 128]
    blocks = (x, small), (w, small), (first, tile), (x, tile), (y, tile)
    *inputs, out = (TensorDescriptor.from_tensor(tensor, block) for tensor, block in blocks)

    def run():
        grid = triton.cdiv(M, 128), triton.cdiv(N, 128)
        crossed[grid](*inputs, bias, out, N, N, BM=128, BN=128, BK=32, num_warps=8, num_stages=3)

    return Work(run, y, lambda: first.float() * (x.float() @ w.float().T + bias) + x.float())


@triton.jit
def gated_experts(
    x_ptr,
    w_ptr,
    name_ptr,
    expert_ptr,
    row_ptr,
    scale_ptr,
    y_ptr,
    T,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """SiLU of one product times another, for BM rows that are gathered for one expert: its first N weights are those of
    the gate. Names of T and above stand for no row."""
    at, n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    expert, token = tl.load(expert_ptr + tl.program_id(1)), tl.load(name_ptr + at)
    live, columns = token < T, expert * 2 * N + n
    gate, up = tl.zeros((BM, BN), tl.int32), tl.zeros((BM, BN), tl.int32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(x_ptr + token[:, None] * K + k[None, :], mask=live[:, None], other=0)
        w = w_ptr + columns[:, None] * K + k[None, :]
        gate = tl.dot(x, tl.trans(tl.load(w)), gate, out_dtype=tl.int32)
        up = tl.dot(x, tl.trans(tl.load(w + N * K)), up, out_dtype=tl.int32)
    row = tl.load(row_ptr + token, mask=live, other=0.0)[:, None]
    g = gate.to(tl.float32) * row * tl.load(scale_ptr + columns)[None, :]
    u = up.to(tl.float32) * row * tl.load(scale_ptr + columns + N)[None, :]
    y = (g * tl.sigmoid(g) * u).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at[:, None] * N + n[None, :], y, mask=live[:, None])


@case(
    "two of 32 experts for 8192 tokens, 2048 to 1024 pairs int8 and their gates, 64x64x128, 4 warps, 3 stages",
    GATED,
    dict(E=32, T=8 * KI, N=KI, K=2 * KI),
    dict(E=3, T=60, N=64, K=256),
)
def _(device, E, T, N, K):
    """Some experts are popular. The rows of each are filled up to a multiple of 64."""
    expert = (E * (known("meta", 1 << 20, 2 * T) / (1 << 20)) ** 1.5).long()
    names, owners = [], []
    for i in range(E):
        mine = (expert == i).nonzero()[:, 0] % T
        names.append(F.pad(mine, (0, -len(mine) % 64), value=T))
        owners += [i] * (len(names[-1]) // 64)
    names, owners = place(device, torch.cat(names).int()), place(device, torch.tensor(owners, dtype=INT32))
    x, w, y = normal(device, T, K, dtype=INT8), normal(device, E, 2 * N, K, dtype=INT8), empty(device, len(names), N)
    row, scale = normal(device, T, dtype=FLOAT).sigmoid() / 4096, normal(device, E, 2 * N, dtype=FLOAT).sigmoid() / 64

    def run():
        gated_experts[(N // 64, len(owners))](
            x, w, names, owners, row, scale, y, T, N, K, BM=64, BN=64, BK=128, num_warps=4, num_stages=3
        )

    def want():
        out = []
        for tokens, i in zip(names.long().view(-1, 64), owners.tolist(), strict=True):
            live = tokens < T
            token = torch.where(live, tokens, 0)
            both = x[token].float() @ w[i].float().T * row[token][:, None] * scale[i]
            out.append(F.silu(both[:, :N]) * both[:, N:] * live[:, None])
        return torch.cat(out)

    return Work(run, y, want)


@triton.jit
def persistent_fp8(g_ptr, w_ptr, y_ptr, share, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """share * g @ w.T; gradients have 5 bits of exponent, weights 4. A program takes every 132nd tile."""
    across = N // BN
    for tile in range(tl.program_id(0), M // BM * across, tl.num_programs(0)):
        m, n = tile // across * BM + tl.arange(0, BM), tile % across * BN + tl.arange(0, BN)
        total = tl.zeros((BM, BN), tl.float32)
        for first in range(0, K, BK):
            k = first + tl.arange(0, BK)
            w = tl.load(w_ptr + n[:, None] * K + k[None, :])
            total = tl.dot(tl.load(g_ptr + m[:, None] * K + k[None, :]), tl.trans(w), total)
        tl.store(y_ptr + m[:, None] * N + n[None, :], (total * share).to(y_ptr.dtype.element_ty))


@case(
    "matmul 4096 x 5120 x 6144 of fp8 e5m2 by e4m3, 132 programs, 128x256x128, 8 warps, 3 stages",
    MIXED,
    dict(M=4 * KI, N=5 * KI, K=6 * KI, programs=SMS),
    dict(M=256, N=256, K=256, programs=1),
)
def _(device, M, N, K, programs):
    g, w, y = normal(device, M, K, dtype=HALF).to(FP8_E5), normal(device, N, K, dtype=FP8), empty(device, M, N)

    def run():
        persistent_fp8[(programs,)](g, w, y, 0.125, M, N, K, BM=128, BN=256, BK=128, num_warps=8, num_stages=3)

    return Work(run, y, lambda: g.float() @ w.float().T / 8)


@triton.jit
def norm_behind(
    x_ptr, w_ptr, bias_ptr, last_ptr, scale_ptr, y_ptr, M, K, N: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    """Layer norm of (x @ w + bias + last): a tile has whole rows of the result."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N)
    live = (m < M)[:, None]
    total = tl.zeros((BM, N), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=live, other=0.0)
        total = tl.dot(x, tl.load(w_ptr + k[:, None] * N + n[None, :]), total)
    at = m[:, None] * N + n[None, :]
    total += tl.load(bias_ptr + n)[None, :] + tl.load(last_ptr + at, mask=live, other=0.0).to(tl.float32)
    total -= (tl.sum(total, 1) / N)[:, None]
    total *= tl.rsqrt(tl.sum(total * total, 1) / N + 1e-5)[:, None] * tl.load(scale_ptr + n)[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=live)


@case(
    "100,000 rows of 1024 bf16 by 1024 x 256, bias, residual and layer norm, 128x256x64, 16 warps, 3 stages",
    NORMED,
    dict(M=100_000, K=KI, N=256),
    dict(M=140, K=128, N=64),
)
def _(device, M, K, N):
    x, w, last, y = normal(device, M, K), normal(device, K, N) / 32, normal(device, M, N), empty(device, M, N)
    bias, scale = normal(device, N, dtype=FLOAT), normal(device, N, dtype=FLOAT)

    def run():
        norm_behind[(triton.cdiv(M, 128),)](
            x, w, bias, last, scale, y, M, K, N=N, BM=128, BK=64, num_warps=16, num_stages=3
        )

    return Work(run, y, lambda: F.layer_norm(x.float() @ w.float() + bias + last.float(), (N,)) * scale)


@triton.jit
def covariances(x_ptr, mean_ptr, tile_ptr, y_ptr, R, N, BT: tl.constexpr, BK: tl.constexpr):
    """Covariances of N columns of R rows: a program sums one tile of the lower triangle, and stores it twice."""
    i, j = tl.load(tile_ptr + 2 * tl.program_id(0)), tl.load(tile_ptr + 2 * tl.program_id(0) + 1)
    m, n = i * BT + tl.arange(0, BT), j * BT + tl.arange(0, BT)
    m_mean, n_mean = tl.load(mean_ptr + m)[None, :], tl.load(mean_ptr + n)[None, :]
    total = tl.zeros((BT, BT), tl.float32)
    for first in range(0, R, BK):
        row = first + tl.arange(0, BK)[:, None]
        a = tl.load(x_ptr + row * N + m[None, :], mask=row < R, other=0.0) - tl.where(row < R, m_mean, 0.0)
        b = tl.load(x_ptr + row * N + n[None, :], mask=row < R, other=0.0) - tl.where(row < R, n_mean, 0.0)
        total = tl.dot(tl.trans(a.to(tl.float16)), b.to(tl.float16), total)
    total /= R - 1
    tl.store(y_ptr + m[:, None] * N + n[None, :], total)
    tl.store(y_ptr + n[:, None] * N + m[None, :], tl.trans(total))


@case(
    "covariances of 640 columns of 32,001 rows fp16, lower triangle, 55 programs, 64x64x64, 2 warps, 4 stages",
    COVARIANCES,
    dict(R=32_001, N=640),
    dict(R=133, N=128),
)
def _(device, R, N):
    x, y = normal(device, R, N, dtype=HALF) + 0.5, empty(device, N, N, dtype=FLOAT)
    mean = x.float().mean(0)
    tiles = place(device, torch.tensor([(i, j) for i in range(N // 64) for j in range(i + 1)], dtype=INT32))

    def run():
        covariances[(len(tiles),)](x, mean, tiles, y, R, N, BT=64, BK=64, num_warps=2, num_stages=4)

    return Work(run, y, lambda: x.double().T.cov())
