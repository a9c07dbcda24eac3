"""Products: 4 bits by 8, largest numbers, heads that are turned, two that are added, forms, antennas, trains, pairs."""

from __future__ import annotations

import math

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
from gpukit.validation.twelfth_set.case import case

FOUR_BY_EIGHT, LARGEST = "int8 by weights of 4 bits", "products of fp8 that watch the largest result"
TURNED, ADDED, HEADS = "heads turned and put into slots behind a product", "two products added", "a product per head"
COMPONENTS, FORMS, ANTENNAS = "principal components", "quadratic forms", "correlations of antennas"
TRAINS, SIGNS, VOLUMES = "rows from trains of tensors", "blocks turned by signs", "products of all pairs of pixels"


@triton.jit
def four_by_eight(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, y_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """x @ w.T of int8, where a byte has two weights, BK / 2 columns apart. BK columns share a scale of a weight's row: their
    sum is a whole number, which is added to the others as float32."""
    m, n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    half, live = tl.arange(0, BK // 2), (m < M)[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        code = tl.load(w_ptr + n[:, None] * (K // 2) + (first // 2 + half)[None, :])
        x_at = x_ptr + m[:, None] * K + (first + half)[None, :]
        low, high = (code & 15).to(tl.int8) - 8, (code >> 4).to(tl.int8) - 8
        part = tl.dot(tl.load(x_at, mask=live, other=0), tl.trans(low), out_dtype=tl.int32)
        part = tl.dot(tl.load(x_at + BK // 2, mask=live, other=0), tl.trans(high), part, out_dtype=tl.int32)
        total += part.to(tl.float32) * tl.load(w_scale_ptr + first // BK * N + n)[None, :]
    y = total * tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[:, None]
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty), mask=live)


@case(
    "500 rows int8 by 10,240 x 8192 weights of 4 bits, scales of rows and of 128, to fp16, 64x128x128, 4 warps, 4 stages",
    FOUR_BY_EIGHT,
    dict(M=500, N=10 * KI, K=8 * KI),
    dict(M=70, N=128, K=256),
)
def _(device, M, N, K):
    x, w, y = normal(device, M, K, dtype=INT8), normal(device, N, K // 2, dtype=INT8), empty(device, M, N, dtype=HALF)
    x_scale, w_scale = (normal(device, *s, dtype=FLOAT).sigmoid() / 64 for s in ((M,), (K // 128, N)))
    codes = w.view(UINT8)

    def run():
        grid = N // 128, triton.cdiv(M, 64)
        four_by_eight[grid](x, x_scale, codes, w_scale, y, M, N, K, BM=64, BN=128, BK=128, num_warps=4, num_stages=4)

    def want():
        blocks = codes.view(N, K // 128, 64)
        weights = torch.cat([blocks & 15, blocks >> 4], 2).float() - 8
        return x.float() @ (weights * w_scale.T[:, :, None]).view(N, K).T * x_scale[:, None]

    return Work(run, y, want)


@triton.jit
def watch_largest(x, w, bias_ptr, largest_ptr, y, scale, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """GELU(scale * x @ w.T + bias), and the largest of its absolute values, which the next cast to fp8 needs: one atomic per
    tile. A program takes every tl.num_programs(0)-th tile."""
    across = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * across, tl.num_programs(0)):
        m, n = tile // across * BM, tile % across * BN
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(x.load([m, k]), tl.trans(w.load([n, k])), total)
        z = total * scale + tl.load(bias_ptr + n + tl.arange(0, BN))[None, :]
        z *= 0.5 + 0.5 * tl.erf(z * 0.70710678)
        here = tl.where((m + tl.arange(0, BM) < M)[:, None], tl.abs(z), 0.0)
        tl.atomic_max(largest_ptr, tl.max(here), sem="relaxed")
        y.store([m, n], z.to(y.dtype))


@case(
    "GELU of 5000 x 7168 x 4096 fp8 and the largest result by atomics, descriptors, 132 programs, 128x128x128, 8 warps, 4 stages",
    LARGEST,
    dict(M=5000, N=7 * KI, K=4 * KI, programs=SMS),
    dict(M=150, N=256, K=128, programs=2),
)
def _(device, M, N, K, programs):
    """The largest is not cleared by what is measured."""
    x, w, y = normal(device, M, K, dtype=FP8), normal(device, N, K, dtype=FP8), empty(device, M, N)
    bias, largest, scale = normal(device, N, dtype=FLOAT), empty(device, 1, dtype=FLOAT), K**-0.5
    views = [TensorDescriptor.from_tensor(a, [128, 128]) for a in (x, w, y)]

    def run():
        watch_largest[(programs,)](
            *views[:2], bias, largest, views[2], scale, M, N, K, BM=128, BN=128, BK=128, num_warps=8, num_stages=4
        )

    def want():
        out = F.gelu(x.float() @ w.float().T * scale + bias)
        return out, out.abs().max()[None]

    return Work(run, (y, largest), want)


@triton.jit
def turned_heads(
    x_ptr, w_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, q_ptr, cache_ptr, M, K,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of x @ w.T is one head of D numbers. Heads of queries and keys are turned by a token's position, half against
    half; keys and values go to the token's slot of a cache."""
    head, m, d, half = tl.program_id(0), tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, D // 2)
    live = m < M
    total = tl.zeros((BM, D), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=live[:, None], other=0.0)
        total = tl.dot(x, tl.trans(tl.load(w_ptr + (head * D + d)[:, None] * K + k[None, :])), total)
    one, two = tl.split(tl.permute(tl.reshape(total, (BM, 2, D // 2)), (0, 2, 1)))
    at = tl.load(position_ptr + m, mask=live, other=0)[:, None] * (D // 2) + half[None, :]
    turn = live[:, None] & (head < QUERIES + KEYS)
    cos, sin = tl.load(cos_ptr + at, mask=turn, other=1.0), tl.load(sin_ptr + at, mask=turn, other=0.0)
    one, two = one * cos - two * sin, two * cos + one * sin
    if head < QUERIES:
        to = q_ptr + (m * QUERIES + head)[:, None] * D + half[None, :]
    else:
        slot = tl.load(slot_ptr + m, mask=live, other=0)
        to = cache_ptr + (slot * 2 * KEYS + head - QUERIES)[:, None] * D + half[None, :]
    tl.store(to, one.to(q_ptr.dtype.element_ty), mask=live[:, None])
    tl.store(to + D // 2, two.to(q_ptr.dtype.element_ty), mask=live[:, None])


@case(
    "3000 rows of 4096 bf16 by weights of 48 heads of 128, turned, 16 of them into slots, 128x128x64, 8 warps, 3 stages",
    TURNED,
    dict(M=3000, K=4 * KI, queries=32, keys=8, D=128, slots=20_000),
    dict(M=150, K=128, queries=2, keys=1, D=32, slots=200),
)
def _(device, M, K, queries, keys, D, slots):
    """Slots that no token has stay 0."""
    x, w = normal(device, M, K), normal(device, (queries + 2 * keys) * D, K)
    position, order = known(device, 8000, M), torch.randperm(slots, generator=torch.Generator().manual_seed(0))
    slot = place(device, order[:M].int())
    angle = torch.arange(8000)[:, None] * 10_000.0 ** (-torch.arange(D // 2) / (D // 2))
    cos, sin = angle.cos().to(device), angle.sin().to(device)
    q, cache = empty(device, M, queries, D), empty(device, slots, 2 * keys, D)

    def run():
        turned_heads[(queries + 2 * keys, triton.cdiv(M, 128))](
            x, w, cos, sin, position, slot, q, cache, M, K,
            QUERIES=queries, KEYS=keys, D=D, BM=128, BK=64, num_warps=8, num_stages=3,
        )  # fmt: skip

    def want():
        out = (x.float() @ w.float().T).view(M, -1, D)
        one, two = out[:, : queries + keys].chunk(2, 2)
        c, s = (table[position.to(q.device).long()][:, None] for table in (cos, sin))
        turned = torch.cat([one * c - two * s, two * c + one * s], 2)
        filled = torch.zeros(slots, 2 * keys, D, device=q.device)
        filled[slot.to(q.device).long()] = torch.cat([turned[:, queries:], out[:, queries + keys :]], 1)
        return turned[:, :queries], filled

    return Work(run, (q, cache), want)


@triton.jit
def two_added(
    a_ptr,
    u_ptr,
    b_ptr,
    v_ptr,
    y_ptr,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """a @ u + b @ v: the gradient of what two layers have read. GROUP tiles of one column follow one another."""
    down, tile = tl.cdiv(M, BM), tl.program_id(0)
    across = tl.cdiv(N, BN)
    first = tile // (GROUP * across) * GROUP
    high = tl.minimum(down - first, GROUP)
    m = (first + tile % (GROUP * across) % high) * BM + tl.arange(0, BM)
    n = tile % (GROUP * across) // high * BN + tl.arange(0, BN)
    total, live = tl.zeros((BM, BN), tl.float32), (m < M)[:, None]
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=live, other=0.0)
        total = tl.dot(a, tl.load(u_ptr + k[:, None] * N + n[None, :]), total)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        b = tl.load(b_ptr + m[:, None] * K + k[None, :], mask=live, other=0.0)
        total = tl.dot(b, tl.load(v_ptr + k[:, None] * N + n[None, :]), total)
    tl.store(y_ptr + m[:, None] * N + n[None, :], total.to(y_ptr.dtype.element_ty), mask=live)


@case(
    "a @ u + b @ v of 2500 x 5504 and 5504 x 4096 bf16, tiles in groups of 8, 128x256x64, 16 warps, 3 stages",
    ADDED,
    dict(M=2500, N=4 * KI, K=5504),
    dict(M=150, N=256, K=128),
)
def _(device, M, N, K):
    a, b, u, v, y = (normal(device, *s) for s in ((M, K), (M, K), (K, N), (K, N), (M, N)))

    def run():
        grid = (triton.cdiv(M, 128) * (N // 256),)
        two_added[grid](a, u, b, v, y, M, N, K, BM=128, BN=256, BK=64, GROUP=8, num_warps=16, num_stages=3)

    return Work(run, y, lambda: a.float() @ u.float() + b.float() @ v.float())


@triton.jit
def product_per_head(
    q_ptr, w_ptr, y_ptr, T, H, WIDE, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """The first K of the WIDE numbers of each head are multiplied by the head's own matrix of K x N."""
    t, n, head = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(2)
    k, live = tl.arange(0, K), (t < T)[:, None]
    q = tl.load(q_ptr + (t * H + head)[:, None] * WIDE + k[None, :], mask=live, other=0.0)
    w = tl.load(w_ptr + (head * K + k)[:, None] * N + n[None, :])
    tl.store(y_ptr + (t * H + head)[:, None] * N + n[None, :], tl.dot(q, w).to(y_ptr.dtype.element_ty), mask=live)


@case(
    "128 of 192 numbers of 128 heads of 1500 tokens bf16 by 128 x 512 matrices of heads, 64x256x128, 4 warps",
    HEADS,
    dict(T=1500, H=128, wide=192, K=128, N=512),
    dict(T=70, H=3, wide=48, K=32, N=256),
)
def _(device, T, H, wide, K, N):
    q, w, y = normal(device, T, H, wide), normal(device, H, K, N), empty(device, T, H, N)

    def run():
        grid = N // 256, triton.cdiv(T, 64), H
        product_per_head[grid](q, w, y, T, H, wide, K=K, N=N, BM=64, BN=256, num_warps=4)

    return Work(run, y, lambda: torch.einsum("thk,hkn->thn", q[:, :, :K].float(), w.float()))


@triton.jit
def components(
    x_ptr, middle_ptr, w_ptr, scale_ptr, y_ptr, M, K, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """(x - middle) @ w * scale: principal components, each with variance 1."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        x -= tl.load(middle_ptr + k, mask=k < K, other=0.0)[None, :]
        w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision="tf32")
    y = total * tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], y, mask=(m < M)[:, None] & (n < N)[None, :])


@case(
    "48 principal components of 400,001 rows of 300 fp32, tf32, 64x64x32, 2 warps, 3 stages",
    COMPONENTS,
    dict(M=400_001, K=300, N=48),
    dict(M=90, K=44, N=20),
)
def _(device, M, K, N):
    x, w, y = normal(device, M, K, dtype=FLOAT), normal(device, K, N, dtype=FLOAT), empty(device, M, N, dtype=FLOAT)
    middle, scale = normal(device, K, dtype=FLOAT), normal(device, N, dtype=FLOAT).sigmoid() / K**0.5

    def run():
        components[(triton.cdiv(M, 64),)](
            x, middle, w, scale, y, M, K, N, BM=64, BN=64, BK=32, num_warps=2, num_stages=3
        )

    return Work(run, y, lambda: (x - middle) @ w * scale)


@triton.jit
def quadratic_forms(x_ptr, j_ptr, y_ptr, M, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x @ j @ x for each row of x: a column of tiles of x @ j.T is multiplied by x and summed as soon as it is complete."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    y, live = tl.zeros((BM,), tl.int32), (m < M)[:, None]
    for start in range(0, K, BN):
        n = start + tl.arange(0, BN)
        total = tl.zeros((BM, BN), tl.int32)
        for first in range(0, K, BK):
            k = first + tl.arange(0, BK)
            x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=live & (k < K)[None, :], other=0)
            j = tl.load(j_ptr + n[:, None] * K + k[None, :], mask=(n < K)[:, None] & (k < K)[None, :], other=0)
            total = tl.dot(x, tl.trans(j), total, out_dtype=tl.int32)
        x = tl.load(x_ptr + m[:, None] * K + n[None, :], mask=live & (n < K)[None, :], other=0)
        y += tl.sum(total * x, 1)
    tl.store(y_ptr + m, y, mask=m < M)


@case(
    "energies of 16,000 rows of 2000 spins int8, 125 programs, 128x256x128, 8 warps, 3 stages",
    FORMS,
    dict(M=16_000, K=2000),
    dict(M=140, K=80),
)
def _(device, M, K):
    """Spins are -1 and 1."""
    x, j, y = normal(device, M, K, dtype=INT8), normal(device, K, K, dtype=INT8), empty(device, M, dtype=INT32)
    x = (x & 2) - 1

    def run():
        quadratic_forms[(triton.cdiv(M, 128),)](x, j, y, M, K, BM=128, BN=256, BK=128, num_warps=8, num_stages=3)

    return Work(run, y, lambda: (x.double() @ j.double().T * x).sum(1))


@triton.jit
def correlate_antennas(re_ptr, im_ptr, y_ptr, A, T, BM: tl.constexpr, BK: tl.constexpr):
    """For each pair of antennas of a channel, the sum over time of one signal times the other's conjugate: four products of
    int8. Only pairs on and below the diagonal are computed, in tiles of BM x BM."""
    if tl.program_id(1) > tl.program_id(0):
        return
    channel, k = tl.program_id(2), tl.arange(0, BK)
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BM + tl.arange(0, BM)
    re, im = tl.zeros((BM, BM), tl.int32), tl.zeros((BM, BM), tl.int32)
    left, right = (channel * A + i)[:, None] * T + k[None, :], (channel * A + j)[:, None] * T + k[None, :]
    for t in range(0, T, BK):
        a, b = tl.load(re_ptr + left + t), tl.load(im_ptr + left + t)
        c, d = tl.trans(tl.load(re_ptr + right + t)), tl.trans(tl.load(im_ptr + right + t))
        re = tl.dot(a, c, re, out_dtype=tl.int32)
        re = tl.dot(b, d, re, out_dtype=tl.int32)
        im = tl.dot(b, c, im, out_dtype=tl.int32) - tl.dot(a, d, out_dtype=tl.int32)
    at = channel * 2 * A * A + i[:, None] * A + j[None, :]
    tl.store(y_ptr + at, re)
    tl.store(y_ptr + at + A * A, im)


@case(
    "correlations of 256 antennas, 300 channels, 1024 moments, complex int8, half of the pairs, 64x64x64, 4 warps, 3 stages",
    ANTENNAS,
    dict(C=300, A=256, T=KI),
    dict(C=2, A=128, T=64),
)
def _(device, C, A, T):
    """Signals have 4 bits. Tiles above the diagonal stay 0."""
    re, im = (normal(device, C, A, T, dtype=INT8) >> 4 for _ in range(2))
    y = empty(device, C, 2, A, A, dtype=INT32)

    def run():
        correlate_antennas[(A // 64, A // 64, C)](re, im, y, A, T, BM=64, BK=64, num_warps=4, num_stages=3)

    def want():
        a, b = re.float(), im.float()
        out = torch.stack([a @ a.mT + b @ b.mT, b @ a.mT - a @ b.mT], 1)
        tile = torch.arange(A, device=y.device) // 64
        return out * (tile[:, None] >= tile)

    return Work(run, y, want)


@triton.jit
def rows_from_trains(
    name_ptr, one_ptr, two_ptr, three_ptr, y_ptr, TWO, THREE,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A word's row of A * B * C numbers is a product of three small tensors, A x R, R x B x R and R x C: the word's number in
    three digits says which."""
    row, a, r = tl.program_id(0), tl.arange(0, A), tl.arange(0, R)
    br, c, ab = tl.arange(0, B * R), tl.arange(0, C), tl.arange(0, A * B)
    name = tl.load(name_ptr + row)
    one = tl.load(one_ptr + name // (TWO * THREE) * (A * R) + a[:, None] * R + r[None, :])
    two = tl.load(two_ptr + name // THREE % TWO * (R * B * R) + r[:, None] * (B * R) + br[None, :])
    three = tl.load(three_ptr + name % THREE * (R * C) + r[:, None] * C + c[None, :])
    x = tl.reshape(tl.dot(one, two), (A * B, R)).to(one.dtype)
    y = tl.dot(x, three).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * (A * B * C) + ab[:, None] * C + c[None, :], y)


@case(
    "60,000 rows of 2048 fp16 from trains of three tensors of rank 16 for 100,000 words, some popular, 1 warp per row",
    TRAINS,
    dict(n=60_000, one=50, two=40, three=50),
    dict(n=40, one=3, two=2, three=4),
)
def _(device, n, one, two, three):
    """Low words are more likely."""
    share = known("meta", 1 << 20, n).double() / (1 << 20)
    name = place(device, (one * two * three * share**3).int())
    x, y, z = (normal(device, *s, dtype=HALF) / 4 for s in ((one, 16, 16), (two, 16, 8, 16), (three, 16, 16)))
    out = empty(device, n, 2048, dtype=HALF)

    def run():
        rows_from_trains[(n,)](name, x, y, z, out, two, three, A=16, B=8, C=16, R=16, num_warps=1)

    def want():
        at = name.to(out.device).long()
        digits = at // (two * three), at // three % two, at % three
        a, b, c = (tensor[digit].float() for tensor, digit in zip((x, y, z), digits, strict=True))
        return (a @ b.flatten(2)).view(n, 128, 16).bmm(c).flatten(1)

    return Work(run, out, want)


@triton.jit
def turn_by_signs(x_ptr, y_ptr, scale_ptr, M, N, factor, S: tl.constexpr, BM: tl.constexpr):
    """Each S columns are multiplied by a matrix of -1 and 1, which the program makes from bits of its places, and become
    int8 with a scale per row. Scales of a block of columns lie side by side."""
    block, m, i = tl.program_id(0), tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, S)
    odd = i[:, None] & i[None, :]
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    at, live = m[:, None] * N + (block * S + i)[None, :], (m < M)[:, None]
    x = tl.load(x_ptr + at, mask=live, other=0.0)
    y = tl.dot(x, (1 - 2 * (odd & 1)).to(x.dtype)) * factor
    scale = tl.maximum(tl.max(tl.abs(y), 1), 1e-10) / 127
    tl.store(y_ptr + at, tl.floor(y / scale[:, None] + 0.5).to(tl.int8), mask=live)
    tl.store(scale_ptr + block * M + m, scale, mask=m < M)


@case(
    "12,001 rows of 8192 bf16 turned by 128 x 128 signs to int8, scales of 128, 64x128x128, 4 warps",
    SIGNS,
    dict(M=12_001, N=8 * KI, S=128),
    dict(M=70, N=128, S=32),
)
def _(device, M, N, S):
    x, y, scale = normal(device, M, N), empty(device, M, N, dtype=INT8), empty(device, N // S, M, dtype=FLOAT)
    factor = 1 / math.sqrt(S)

    def run():
        turn_by_signs[(N // S, triton.cdiv(M, 64))](x, y, scale, M, N, factor, S=S, BM=64, num_warps=4)

    def want():
        signs = torch.ones(1, 1, device=y.device)
        while len(signs) < S:
            signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
        z = x.float().view(M, -1, S) @ signs * factor
        scales = z.abs().amax(2) / 127
        return (z / scales[:, :, None] + 0.5).floor().view(M, N), scales.T

    return Work(run, (y, scale), want)


@triton.jit
def pairs_of_pixels(
    a, b, y, half_ptr, P, K, scale, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Products of the features of all pairs of pixels of two pictures, and their means over 2 x 2 pixels of the second one:
    a tile has two of its lines."""
    n, m, picture = tl.program_id(0) * BN, tl.program_id(1) * BM, tl.program_id(2)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([picture * P + m, k]), tl.trans(b.load([picture * P + n, k])), total)
    total *= scale
    y.store([picture * P + m, n], total.to(y.dtype))
    half = tl.sum(tl.sum(tl.reshape(total, (BM, 2, WIDE // 2, 2)), 3), 1) / 4
    row, i = picture * P + m + tl.arange(0, BM), n // 4 + tl.arange(0, WIDE // 2)
    tl.store(half_ptr + row[:, None] * (P // 4) + i[None, :], half.to(half_ptr.dtype.element_ty))


@case(
    "all pairs of 90 x 64 pixels of 2 times 2 pictures of 256 features fp16, and means of 2 x 2, descriptors, 128x128x64, 8 warps, 4 stages",
    VOLUMES,
    dict(B=2, high=90, K=256),
    dict(B=1, high=4, K=64),
)
def _(device, B, high, K):
    P = high * 64
    a, b = normal(device, B * P, K, dtype=HALF), normal(device, B * P, K, dtype=HALF)
    y, half = empty(device, B * P, P, dtype=HALF), empty(device, B * P, P // 4, dtype=HALF)
    views = [TensorDescriptor.from_tensor(x, block) for x, block in ((a, [128, 64]), (b, [128, 64]), (y, [128, 128]))]

    def run():
        grid = P // 128, P // 128, B
        pairs_of_pixels[grid](*views, half, P, K, K**-0.5, WIDE=64, BM=128, BN=128, BK=64, num_warps=8, num_stages=4)

    def want():
        out = a.float().view(B, P, K) @ b.float().view(B, P, K).mT * K**-0.5
        return out.view(B * P, P), F.avg_pool2d(out.view(B * P, 1, high, 64), 2).view(B * P, P // 4)

    return Work(run, (y, half), want)
