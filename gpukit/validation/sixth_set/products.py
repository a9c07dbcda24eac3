"""Products: of experts in fp8 blocks, by words of 4 bits, of few rows, Newton-Schulz steps; other pipelines, and spills."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation.new_kernels.case import FLOAT, FP8, HALF, INT32, Work, empty, known, normal, place
from gpukit.validation.sixth_set.case import case

BLOCKS, WORDS, FEW_ROWS = "experts in fp8 blocks", "products by words of 4 bits", "few rows by large weights"
MUON, PIPELINES, SPILLS = "Newton-Schulz steps", "one product, other pipelines", "more than registers hold"


@triton.jit
def block_scaled(x_ptr, sx_ptr, w_ptr, sw_ptr, row_ptr, expert_ptr, y_ptr, T, N, K, BM: tl.constexpr, B: tl.constexpr):
    """BM rows, named by a table, by the weights of their expert. B numbers of a row, or B x B weights, share a scale."""
    offs_m, offs_n, offs_k = tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, B), tl.arange(0, B)
    row, expert = tl.load(row_ptr + offs_m), tl.load(expert_ptr + tl.program_id(1))
    live = row < T
    weight = (expert * N + tl.program_id(0) * B + offs_n)[None, :] * K
    scale = (expert * (N // B) + tl.program_id(0)) * (K // B)
    total = tl.zeros((BM, B), tl.float32)
    for i in range(K // B):
        x = tl.load(x_ptr + row[:, None] * K + i * B + offs_k[None, :], mask=live[:, None], other=0.0)
        w = tl.load(w_ptr + weight + i * B + offs_k[:, None])
        sx = tl.load(sx_ptr + row * (K // B) + i, mask=live, other=0.0)
        total += tl.dot(x, w) * (sx * tl.load(sw_ptr + scale + i))[:, None]
    y = total.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs_m[:, None] * N + tl.program_id(0) * B + offs_n[None, :], y)


@case(
    "16384 rows of 4096 tokens by 32 experts of 2048 x 4096 fp8, scales of 128 x 128, 64x128x128",
    BLOCKS,
    dict(T=4096, rows=16_384, E=32, N=4096, K=2048),
    dict(T=40, rows=200, E=3, N=256, K=256),
)
def _(device, T, rows, E, N, K):
    x, w = normal(device, T, K, dtype=FP8), normal(device, E, N, K, dtype=FP8)
    sx, sw = normal(device, T, K // 128, dtype=FLOAT), normal(device, E, N // 128, K // 128, dtype=FLOAT)
    counts = known("meta", E, rows).bincount(minlength=E).tolist()
    tokens = known("meta", T, rows).split(counts)
    padded = [torch.cat([t, t.new_full((-len(t) % 64,), T)]) for t in tokens]  # T is no token
    expert = place(device, torch.arange(E, dtype=INT32).repeat_interleave(torch.tensor([len(t) // 64 for t in padded])))
    row = place(device, torch.cat(padded))
    y = empty(device, len(row), N)

    def run():
        block_scaled[(N // 128, len(expert))](
            x, sx, w, sw, row, expert, y, T, N, K, BM=64, B=128, num_warps=4, num_stages=3
        )

    def want():
        full = x.float() * sx.repeat_interleave(128, 1)
        parts = []
        for e, t in enumerate(padded):
            weights = w[e].float() * sw[e].repeat_interleave(128, 0).repeat_interleave(128, 1)
            t = t.to(x.device).long()
            parts.append((full[t.clamp(max=T - 1)] * (t < T)[:, None]) @ weights.T)
        return torch.cat(parts)

    return Work(run, y, want)


@triton.jit
def word_product(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    y_ptr,
    M,
    N,
    K,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """x @ w, where a word holds eight 4-bit weights of a column, and GROUP of them share a scale and a zero point."""
    offs_m, offs_n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for i in range(0, K, BK):
        x = tl.load(x_ptr + offs_m[:, None] * K + i + offs_k[None, :], mask=offs_m[:, None] < M, other=0.0)
        word = tl.load(w_ptr + ((i + offs_k) // 8)[:, None] * N + offs_n[None, :])
        zero = tl.load(zero_ptr + i // GROUP * (N // 8) + offs_n // 8) >> (offs_n % 8 * 4) & 15
        scale = tl.load(scale_ptr + i // GROUP * N + offs_n)
        w = (word >> (offs_k % 8 * 4)[:, None] & 15) - zero[None, :]
        total = tl.dot(x, w.to(x.dtype) * scale[None, :], total)
    at = offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=offs_m[:, None] < M)


@case(
    "200 rows by 8192 x 8192 weights of 4 bits with zero points fp16, 64x64x64",
    WORDS,
    dict(M=200, N=8192, K=8192),
    dict(M=40, N=64, K=256),
)
def _(device, M, N, K):
    x, y = normal(device, M, K, dtype=HALF), empty(device, M, N, dtype=HALF)
    scale = normal(device, K // 128, N, dtype=HALF).sigmoid() / 8
    w, zero = known(device, 2**31 - 1, K // 8, N), known(device, 2**31 - 1, K // 128, N // 8)

    def run():
        word_product[(N // 64, triton.cdiv(M, 64))](
            x, w, scale, zero, y, M, N, K, GROUP=128, BM=64, BN=64, BK=64, num_warps=4, num_stages=3
        )

    def want():
        shifts = torch.arange(0, 32, 4, device=x.device)
        weights = (w[:, None] >> shifts[:, None] & 15).view(K, N)
        zeros = (zero[:, :, None] >> shifts & 15).view(K // 128, N)
        full = (weights - zeros.repeat_interleave(128, 0)).half() * scale.repeat_interleave(128, 0)
        return x.float() @ full.float()

    return Work(run, y, want)


@triton.jit
def few_rows(x_ptr, w_ptr, y_ptr, N, K, SPAN, BN: tl.constexpr, BK: tl.constexpr):
    """16 rows of x @ w.T over SPAN numbers, added to what the other parts have."""
    offs_m, offs_n = tl.arange(0, 16), tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((16, BN), tl.float32)
    first = tl.program_id(1) * SPAN
    for i in range(first, first + SPAN, BK):
        k = i + tl.arange(0, BK)
        x = tl.load(x_ptr + offs_m[:, None] * K + k[None, :])
        total = tl.dot(x, tl.load(w_ptr + offs_n[None, :] * K + k[:, None]), total)
    tl.atomic_add(y_ptr + offs_m[:, None] * N + offs_n[None, :], total, sem="relaxed")


@case(
    "16 rows by 28672 x 8192 bf16, 4 parts added by atomics, 16x64x128, 5 stages",
    FEW_ROWS,
    dict(N=28_672, K=8192, parts=4),
    dict(N=128, K=512, parts=2),
)
def _(device, N, K, parts):
    """The sums are not cleared by what is measured."""
    x, w, y = normal(device, 16, K), normal(device, N, K), empty(device, 16, N, dtype=FLOAT)

    def run():
        few_rows[(N // 64, parts)](x, w, y, N, K, K // parts, BN=64, BK=128, num_warps=4, num_stages=5)

    return Work(run, y, lambda: x.float() @ w.float().T)


@triton.jit
def gram(x_ptr, y_ptr, M, K, B: tl.constexpr, BK: tl.constexpr):
    """x @ x.T: tiles up to the diagonal, which are stored a second time where they belong beyond it."""
    first_m, first_n = tl.program_id(0) * B, tl.program_id(1) * B
    if first_n <= first_m:
        m, n, k = first_m + tl.arange(0, B), first_n + tl.arange(0, B), tl.arange(0, BK)
        total = tl.zeros((B, B), tl.float32)
        for i in range(0, K, BK):
            a = tl.load(x_ptr + m[:, None] * K + i + k[None, :])
            total = tl.dot(a, tl.load(x_ptr + n[None, :] * K + i + k[:, None]), total)
        y = total.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + m[:, None] * M + n[None, :], y)
        tl.store(y_ptr + n[None, :] * M + m[:, None], y)


@triton.jit
def add_product(
    a_ptr,
    b_ptr,
    c_ptr,
    y_ptr,
    alpha,
    beta,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """alpha * c + beta * a @ b; tiles in groups of GROUP rows of them."""
    tiles_n = N // BN
    group = tl.program_id(0) // (GROUP * tiles_n)
    inside = tl.program_id(0) % (GROUP * tiles_n)
    m = (group * GROUP + inside % GROUP) * BM + tl.arange(0, BM)
    n, k = inside // GROUP * BN + tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for i in range(0, K, BK):
        a = tl.load(a_ptr + m[:, None] * K + i + k[None, :])
        total = tl.dot(a, tl.load(b_ptr + (i + k)[:, None] * N + n[None, :]), total)
    at = m[:, None] * N + n[None, :]
    y = alpha * tl.load(c_ptr + at).to(tl.float32) + beta * total
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty))


@case(
    "a Newton-Schulz step of 2048 x 5120 bf16, half of the first product, three launches",
    MUON,
    dict(M=2048, K=5120),
    dict(M=256, K=256),
)
def _(device, M, K):
    x = normal(device, M, K) * K**-0.5
    a, b, y = empty(device, M, M), empty(device, M, M), empty(device, M, K)

    def run():
        gram[(M // 128, M // 128)](x, a, M, K, B=128, BK=64, num_warps=8, num_stages=4)
        for left, right, old, new, alpha, beta, n in ((a, a, a, b, -4.775, 2.0315, M), (b, x, x, y, 3.4445, 1.0, K)):
            add_product[(M // 128 * (n // 256),)](
                left, right, old, new, alpha, beta, n, M, BM=128, BN=256, BK=64, GROUP=2, num_warps=8, num_stages=3
            )

    def want():
        s = (x.float() @ x.float().T).bfloat16().float()
        t = (-4.775 * s + 2.0315 * s @ s).bfloat16().float()
        return t, 3.4445 * x.float() + t @ x.float()

    return Work(run, (b, y), want)


@triton.jit
def odd_product(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """a @ b.T with masks on all sides; what lies outside is loaded from the first row."""
    offs_m, offs_n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    a_row, b_row = tl.where(offs_m < M, offs_m, 0), tl.where(offs_n < N, offs_n, 0)
    total = tl.zeros((BM, BN), tl.float32)
    for i in range(0, K, BK):
        k = i + tl.arange(0, BK)
        a = tl.load(a_ptr + a_row[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        total = tl.dot(a, tl.load(b_ptr + b_row[None, :] * K + k[:, None], mask=k[:, None] < K, other=0.0), total)
    at = offs_m[:, None] * N + offs_n[None, :]
    tl.store(c_ptr + at, total.to(c_ptr.dtype.element_ty), mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))


def _odd_product(name: str, K: int, how: tuple[int, ...]) -> None:
    """`how` is the tile, the warps and the stages."""

    @case(f"matmul 3000 x 2504 x {K} bf16, {name}", PIPELINES, dict(M=3000, N=2504, K=K), dict(M=70, N=40, K=104))
    def _(device, M, N, K):
        BM, BN, BK, warps, stages = how
        a, b, c = normal(device, M, K), normal(device, N, K), empty(device, M, N)

        def run():
            odd_product[(triton.cdiv(M, BM), triton.cdiv(N, BN))](
                a, b, c, M, N, K, BM=BM, BN=BN, BK=BK, num_warps=warps, num_stages=stages
            )

        return Work(run, c, lambda: a.float() @ b.float().T)


_odd_product("64x128x32, 4 warps, 1 stage", 2008, (64, 128, 32, 4, 1))
_odd_product("32x64x64, 2 warps, 2 stages", 2008, (32, 64, 64, 2, 2))
_odd_product("128x256x32, 16 warps, 4 stages", 6008, (128, 256, 32, 16, 4))


@triton.jit
def two_large_tiles(x_ptr, a_ptr, b_ptr, y_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """(x @ a) * sigmoid(x @ b) with two tiles of BM x BN, for which 4 warps have too few registers."""
    m, n, k = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    one, two = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for i in range(0, K, BK):
        x = tl.load(x_ptr + m[:, None] * K + i + k[None, :])
        at = (i + k)[:, None] * N + n[None, :]
        one, two = tl.dot(x, tl.load(a_ptr + at), one), tl.dot(x, tl.load(b_ptr + at), two)
    tl.store(y_ptr + m[:, None] * N + n[None, :], (one * tl.sigmoid(two)).to(y_ptr.dtype.element_ty))


@case(
    "two products 2048 x 4096 x 2048 fp16 and a gate, 128x128x32, 4 warps",
    SPILLS,
    dict(M=2048, N=4096, K=2048),
    dict(M=128, N=128, K=64),
)
def _(device, M, N, K):
    x, a, b, y = (
        normal(device, M, K, dtype=HALF),
        *(normal(device, K, N, dtype=HALF) for _ in "ab"),
        empty(device, M, N, dtype=HALF),
    )
    small = K**-0.5
    a, b = a * small, b * small

    def run():
        two_large_tiles[(N // 128, M // 128)](x, a, b, y, N, K, BM=128, BN=128, BK=32, num_warps=4, num_stages=3)

    return Work(run, y, lambda: (x.float() @ a.float()) * (x.float() @ b.float()).sigmoid())
