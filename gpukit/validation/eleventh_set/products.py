"""Products: preconditioners, means of outer products, 16 levels, two of four, drawn words, sums in fp16, blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit.validation.eleventh_set.case import case
from gpukit.validation.new_kernels.case import (
    FLOAT,
    FP8,
    HALF,
    KI,
    SMS,
    UINT8,
    Work,
    empty,
    known,
    normal,
    place,
)

PRECONDITIONERS, OUTER, LEVELS = "preconditioners", "means of outer products", "products with weights of 16 levels"
TWO_OF_FOUR, DRAWN = "products with two weights of four", "logits of words that are drawn"
HALVES, BLOCKS = "products whose sums are fp16", "products by blocks whose columns are dealt out"


@triton.jit
def precondition(g_ptr, old_ptr, y_ptr, keep, M, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A mean over time of g @ g.T, for each of many gradients."""
    m, n, which = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.program_id(2)
    g_ptr += which * M * K
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        a_live, b_live = (m < M)[:, None] & (k < K)[None, :], (n < M)[:, None] & (k < K)[None, :]
        a = tl.load(g_ptr + m[:, None] * K + k[None, :], mask=a_live, other=0.0)
        b = tl.load(g_ptr + n[:, None] * K + k[None, :], mask=b_live, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="tf32")
    at, live = which * M * M + m[:, None] * M + n[None, :], (m < M)[:, None] & (n < M)[None, :]
    old = tl.load(old_ptr + at, mask=live, other=0.0)
    tl.store(y_ptr + at, keep * old + (1 - keep) * total, mask=live)


@case(
    "preconditioners of 40 gradients of 1000 x 772, tf32, 64x64x32, 4 warps, 4 stages",
    PRECONDITIONERS,
    dict(B=40, M=1000, K=772),
    dict(B=2, M=90, K=76),
)
def _(device, B, M, K):
    g, old, y = (normal(device, B, *s, dtype=FLOAT) for s in ((M, K), (M, M), (M, M)))

    def run():
        grid = triton.cdiv(M, 64), triton.cdiv(M, 64), B
        precondition[grid](g, old, y, 0.9, M, K, BM=64, BN=64, BK=32, num_warps=4, num_stages=4)

    return Work(run, y, lambda: 0.9 * old + 0.1 * (g @ g.mT))


@triton.jit
def outer_means(
    a_ptr,
    b_ptr,
    count_ptr,
    y_ptr,
    S,
    N,
    C: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """For each pair of N places, the C x C products of their channels, summed over S sequences and divided by how many
    of these have both places. A tile has several pairs, and each pair's numbers are stored side by side."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, S, BK):
        s = (first + tl.arange(0, BK))[:, None]
        a = tl.load(a_ptr + s * N * C + m[None, :], mask=(s < S) & (m < N * C)[None, :], other=0.0)
        b = tl.load(b_ptr + s * N * C + n[None, :], mask=(s < S) & (n < N * C)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total)
    pair, live = (m // C)[:, None] * N + (n // C)[None, :], (m < N * C)[:, None] & (n < N * C)[None, :]
    total /= tl.load(count_ptr + pair, mask=live, other=1.0) + 1e-3
    at = (pair * C + (m % C)[:, None]) * C + (n % C)[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=live)


@case(
    "means over 120 sequences of outer products of 32 channels of 365 places bf16, 128x128x32, 8 warps, 3 stages",
    OUTER,
    dict(S=120, N=365, C=32),
    dict(S=40, N=5, C=32),
)
def _(device, S, N, C):
    a, b, y = normal(device, S, N, C), normal(device, S, N, C), empty(device, N, N, C, C)
    count = known(device, S, N, N).float() + 1

    def run():
        grid = triton.cdiv(N * C, 128), triton.cdiv(N * C, 128)
        outer_means[grid](a, b, count, y, S, N, C=C, BM=128, BN=128, BK=32, num_warps=8, num_stages=3)

    return Work(
        run,
        y,
        lambda: torch.einsum("sic,sjd->ijcd", a.float(), b.float()) / (count[:, :, None, None].to(y.device) + 1e-3),
    )


@triton.jit
def levels_product(
    x_ptr,
    w_ptr,
    level_ptr,
    scale_ptr,
    y_ptr,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """x @ w.T, where 4 bits of w choose one of 16 levels from a table, and BK neighbors share a scale."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k, byte = first + tl.arange(0, BK), first // 2 + tl.arange(0, BK // 2)
        code = tl.load(w_ptr + n[:, None] * (K // 2) + byte[None, :]).to(tl.int32)
        low, high = tl.load(level_ptr + (code & 15)), tl.load(level_ptr + (code >> 4))
        scale = tl.load(scale_ptr + n * (K // BK) + first // BK)
        w = (tl.reshape(tl.join(low, high), (BN, BK)) * scale[:, None]).to(tl.float16)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m < M)[:, None], other=0.0)
        total = tl.dot(x, tl.trans(w), total)
    y = total.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None] * N + n[None, :], y, mask=(m < M)[:, None])


@case(
    "200 rows fp16 by 10,240 x 6144 weights of 16 levels from a table, scales of 64, 64x64x64, 4 warps, 2 stages",
    LEVELS,
    dict(M=200, N=10 * KI, K=6 * KI),
    dict(M=70, N=128, K=128),
)
def _(device, M, N, K):
    x, w, y = (
        normal(device, M, K, dtype=HALF),
        known(device, 256, N, K // 2, dtype=UINT8),
        empty(device, M, N, dtype=HALF),
    )
    level, scale = normal(device, 16, dtype=FLOAT) / 8, normal(device, N, K // 64, dtype=FLOAT).sigmoid() + 0.5

    def run():
        grid = triton.cdiv(M, 64), N // 64
        levels_product[grid](x, w, level, scale, y, M, N, K, BM=64, BN=64, BK=64, num_warps=4, num_stages=2)

    def want():
        code = w.to(y.device)
        weights = level[torch.stack([code & 15, code >> 4], 2).view(N, K).int()]
        return x.float() @ (weights.view(N, -1, 64) * scale[:, :, None]).view(N, K).T

    return Work(run, y, want)


@triton.jit
def two_of_four(x_ptr, w_ptr, place_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x @ w.T, where two of each four neighbors in w are not 0: these are stored, and four bits that say where they
    are."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k, pair, four = first + tl.arange(0, BK), first // 2 + tl.arange(0, BK // 2), first // 4 + tl.arange(0, BK // 4)
        w = tl.load(w_ptr + n[:, None] * (K // 2) + pair[None, :])
        one, two = tl.split(tl.reshape(w, (BN, BK // 4, 2)))
        places = tl.load(place_ptr + n[:, None] * (K // 4) + four[None, :])
        i, j = places & 3, places >> 2
        # An outer join of evens and of odds puts the four in order: 0 and 2, 1 and 3.
        even = tl.join(tl.where(i == 0, one, 0.0), tl.where(i == 2, one, tl.where(j == 2, two, 0.0)))
        odd = tl.join(tl.where(i == 1, one, tl.where(j == 1, two, 0.0)), tl.where(j == 3, two, 0.0))
        w = tl.reshape(tl.join(even, odd), (BN, BK)).to(x_ptr.dtype.element_ty)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m < M)[:, None], other=0.0)
        total = tl.dot(x, tl.trans(w), total)
    y = total.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None] * N + n[None, :], y, mask=(m < M)[:, None])


@case(
    "2000 rows bf16 by 6144 x 4096 weights of which two in four are there, 128x128x64, 8 warps, 3 stages",
    TWO_OF_FOUR,
    dict(M=2000, N=6 * KI, K=4 * KI),
    dict(M=140, N=128, K=128),
)
def _(device, M, N, K):
    x, w, y = normal(device, M, K), normal(device, N, K // 2), empty(device, M, N)
    pairs = torch.tensor([(i, j) for j in range(4) for i in range(j)])
    which = known("meta", len(pairs), N, K // 4).long()
    places = place(device, (pairs[which, 0] | pairs[which, 1] << 2).to(UINT8))

    def run():
        grid = triton.cdiv(M, 128), N // 128
        two_of_four[grid](x, w, places, y, M, N, K, BM=128, BN=128, BK=64, num_warps=8, num_stages=3)

    def want():
        full = torch.zeros(N, K // 4, 4, device=y.device)
        return x.float() @ full.scatter_(2, pairs[which].to(y.device), w.float().view(N, -1, 2)).view(N, K).T

    return Work(run, y, want)


@triton.jit
def drawn_words(
    x_ptr,
    w_ptr,
    name_ptr,
    log_ptr,
    label_ptr,
    y_ptr,
    share,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Logits of N words that were drawn, less the logarithms of how likely that was. A row's own label among them
    becomes -40."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    name = tl.load(name_ptr + n, mask=n < N, other=0)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m < M)[:, None], other=0.0)
        total = tl.dot(x, tl.trans(tl.load(w_ptr + name[:, None] * K + k[None, :])), total)
    y = total * share - tl.load(log_ptr + n, mask=n < N, other=0.0)[None, :]
    y = tl.where(tl.load(label_ptr + m, mask=m < M, other=-1)[:, None] == name[None, :], -40.0, y)
    live = (m < M)[:, None] & (n < N)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty), mask=live)


@case(
    "logits of 8001 of 250,000 words fp8 that are drawn, for 6000 rows of 1024, 128x256x128, 16 warps, 3 stages",
    DRAWN,
    dict(M=6000, N=8001, K=KI, words=250_000),
    dict(M=140, N=150, K=256, words=400),
)
def _(device, M, N, K, words):
    """Low words are more likely."""
    share = known("meta", 1 << 20, N).double() / (1 << 20)
    name = place(device, (words * share**3).int())
    x, w, label = normal(device, M, K, dtype=FP8), normal(device, words, K, dtype=FP8), known(device, words, M)
    log, y = normal(device, N, dtype=FLOAT), empty(device, M, N)

    def run():
        grid = triton.cdiv(M, 128), triton.cdiv(N, 256)
        drawn_words[grid](x, w, name, log, label, y, 0.25, M, N, K, BM=128, BN=256, BK=128, num_warps=16, num_stages=3)

    def want():
        names = name.to(y.device)
        out = x.float() @ w.view(UINT8)[names.long()].view(FP8).float().T / 4 - log
        return out.masked_fill(label.to(y.device)[:, None] == names, -40.0)

    return Work(run, y, want)


@triton.jit
def sums_in_halves(x, w, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x @ w with sums in fp16, which take half of the registers. A program takes every tl.num_programs(0)-th tile, down
    one column of tiles after the other."""
    down = tl.cdiv(M, BM)
    for tile in range(tl.program_id(0), down * tl.cdiv(N, BN), tl.num_programs(0)):
        m, n = tile % down * BM, tile // down * BN
        total = tl.zeros((BM, BN), tl.float16)
        for k in range(0, K, BK):
            total = tl.dot(x.load([m, k]), w.load([k, n]), total, out_dtype=tl.float16)
        y.store([m, n], total)


@case(
    "matmul 6000 x 5000 x 2048 fp16, sums in fp16, descriptors, 132 programs, 128x256x64, 8 warps, 3 stages",
    HALVES,
    dict(M=6000, N=5000, K=2 * KI, programs=SMS),
    dict(M=200, N=264, K=128, programs=2),
)
def _(device, M, N, K, programs):
    x, w, y = (normal(device, *s, dtype=HALF) for s in ((M, K), (K, N), (M, N)))
    tiles = (x, [128, 64]), (w, [64, 256]), (y, [128, 256])
    views = [TensorDescriptor.from_tensor(tensor, tile) for tensor, tile in tiles]

    def run():
        sums_in_halves[(programs,)](*views, M, N, K, BM=128, BN=256, BK=64, num_warps=8, num_stages=3)

    return Work(run, y, lambda: x.float() @ w.float())


@triton.jit
def dealt_blocks(x_ptr, w_ptr, y_ptr, M, S: tl.constexpr, B: tl.constexpr, BM: tl.constexpr):
    """Each of B blocks of S columns is multiplied by a matrix of its own; the results are dealt out, so that neighbors
    come from different blocks."""
    m, i, block = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, S), tl.program_id(1)
    live = (m < M)[:, None]
    x = tl.load(x_ptr + m[:, None] * (B * S) + (block * S + i)[None, :], mask=live, other=0.0)
    w = tl.load(w_ptr + (block * S + i)[:, None] * S + i[None, :])
    at = m[:, None] * (B * S) + (i * B + block)[None, :]
    tl.store(y_ptr + at, tl.dot(x, w).to(y_ptr.dtype.element_ty), mask=live)


@case(
    "7000 rows of 64 blocks of 64 bf16 times a matrix each, columns dealt out, 64x64x64, 2 warps",
    BLOCKS,
    dict(M=7000, S=64, B=64),
    dict(M=70, S=32, B=3),
)
def _(device, M, S, B):
    x, w, y = normal(device, M, B, S), normal(device, B, S, S), empty(device, M, S, B)

    def run():
        dealt_blocks[(triton.cdiv(M, 64), B)](x, w, y, M, S=S, B=B, BM=64, num_warps=2)

    return Work(run, y, lambda: torch.einsum("mbi,bij->mjb", x.float(), w.float()))
