"""Products: parts that are added later, equal shares of all steps, odd sizes, triangles, and rows that are reduced at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.fourth_set.case import case
from gpukit.validation.new_kernels.case import BF16, FLOAT, HALF, KI, SMS, Work, empty, normal

SHARES, BATCHES, ENDS, TRIANGLES = "shares of a product", "batches of odd products", "ends of products", "triangles"
REDUCED, SOLVES = "products that are reduced", "solves"


@triton.jit
def part_product(
    a_ptr, b_ptr, part_ptr, M, N, K, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """A tile of a @ b over SPAN of the K numbers, stored as it is."""
    offs_m, offs_n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(tl.program_id(1) * SPAN, tl.program_id(1) * SPAN + SPAN, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(a_ptr + offs_m[:, None] * K + k[None, :])
        b = tl.load(b_ptr + k[:, None] * N + offs_n[None, :])
        total = tl.dot(a, b, total)
    tl.store(part_ptr + (tl.program_id(1) * M + offs_m)[:, None] * N + offs_n[None, :], total)


@triton.jit
def add_products(part_ptr, c_ptr, n, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptr + part * n + at)
    tl.store(c_ptr + at, total.to(c_ptr.dtype.element_ty))


@case(
    "64 rows by 8192 x 16384 fp16, 4 parts added by a second launch",
    SHARES,
    dict(M=64, N=16 * KI, K=8192, parts=4),
    dict(M=64, N=128, K=256, parts=2),
)
def _(device, M, N, K, parts):
    a, b, c = normal(device, M, K, dtype=HALF), normal(device, K, N, dtype=HALF), empty(device, M, N, dtype=HALF)
    part = empty(device, parts, M, N, dtype=FLOAT)

    def run():
        part_product[(N // 128, parts)](a, b, part, M, N, K, SPAN=K // parts, BM=64, BN=128, BK=64)
        add_products[(M * N // 1024,)](part, c, M * N, PARTS=parts, BLOCK=1024)

    return Work(run, c, lambda: a.float() @ b.float())


@triton.jit
def share_product(a_ptr, b_ptr, c_ptr, N, K, SHARE, STEPS, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """All steps of all tiles are dealt out evenly: a program ends one tile, does others, and begins one more."""
    first = tl.program_id(0) * SHARE
    last = tl.minimum(first + SHARE, STEPS)
    of_tile = K // BK
    for tile in range(first // of_tile, tl.cdiv(last, of_tile)):
        begin, end = tl.maximum(first, tile * of_tile), tl.minimum(last, (tile + 1) * of_tile)
        offs_m = tile // (N // BN) * BM + tl.arange(0, BM)
        offs_n = tile % (N // BN) * BN + tl.arange(0, BN)
        total = tl.zeros((BM, BN), tl.float32)
        for step in range(begin, end):
            k = (step - tile * of_tile) * BK + tl.arange(0, BK)
            a = tl.load(a_ptr + offs_m[:, None] * K + k[None, :])
            b = tl.load(b_ptr + k[:, None] * N + offs_n[None, :])
            total = tl.dot(a, b, total)
        tl.atomic_add(c_ptr + offs_m[:, None] * N + offs_n[None, :], total, sem="relaxed")


@case(
    "matmul 3072 x 3328 x 4096 fp16, steps dealt out to 132 programs",
    SHARES,
    dict(M=3072, N=3328, K=4096, programs=SMS),
    dict(M=128, N=384, K=256, programs=5),
    sample=4,
)
def _(device, M, N, K, programs):
    """The result is not cleared by what is measured."""
    a, b, c = normal(device, M, K, dtype=HALF), normal(device, K, N, dtype=HALF), empty(device, M, N, dtype=FLOAT)
    steps = (M // 128) * (N // 128) * (K // 64)

    def run():
        return share_product[(programs,)](
            a, b, c, N, K, triton.cdiv(steps, programs), steps, BM=128, BN=128, BK=64, num_warps=8
        )

    return Work(run, c, lambda: a.float() @ b.float())


@triton.jit
def odd_products(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One small product a.T @ b.T per pair of tile and batch, with a mask in each dimension."""
    batch = tl.program_id(1)
    tiles = tl.cdiv(N, BN)
    offs_m, offs_n = tl.program_id(0) // tiles * BM + tl.arange(0, BM), tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a_live = (offs_m[:, None] < M) & (k[None, :] < K)
        b_live = (k[:, None] < K) & (offs_n[None, :] < N)
        a = tl.load(a_ptr + (batch * K + k[None, :]) * M + offs_m[:, None], mask=a_live, other=0.0)
        b = tl.load(b_ptr + (batch * N + offs_n[None, :]) * K + k[:, None], mask=b_live, other=0.0)
        total = tl.dot(a, b, total)
    live = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    at = (batch * M + offs_m[:, None]) * N + offs_n[None, :]
    tl.store(c_ptr + at, total.to(c_ptr.dtype.element_ty), mask=live)


@case(
    "2048 products of 197 x 64 and 64 x 197 bf16, both transposed",
    BATCHES,
    dict(batch=2048, M=197, N=197, K=64),
    dict(batch=2, M=37, N=70, K=45),
)
def _(device, batch, M, N, K):
    a, b, c = normal(device, batch, K, M), normal(device, batch, N, K), empty(device, batch, M, N)

    def run():
        grid = (triton.cdiv(M, 64) * triton.cdiv(N, 64), batch)
        return odd_products[grid](a, b, c, M, N, K, BM=64, BN=64, BK=32)

    return Work(run, c, lambda: a.float().mT @ b.float().mT)


@triton.jit
def product_with_end(
    a_ptr, b_ptr, bias_ptr, r_ptr, c_ptr, pre_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """gelu(a @ b + bias) + r; what goes into gelu is stored too."""
    offs_m, offs_n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(a_ptr + offs_m[:, None] * K + k[None, :])
        b = tl.load(b_ptr + k[:, None] * N + offs_n[None, :])
        total = tl.dot(a, b, total)
    total += tl.load(bias_ptr + offs_n).to(tl.float32)[None, :]
    at = offs_m[:, None] * N + offs_n[None, :]
    tl.store(pre_ptr + at, total.to(pre_ptr.dtype.element_ty))
    y = 0.5 * total * (1 + tl.erf(total * 0.70710678)) + tl.load(r_ptr + at).to(tl.float32)
    tl.store(c_ptr + at, y.to(c_ptr.dtype.element_ty))


@case(
    "matmul 8192 x 4096 x 512 bf16 with bias, GELU and a residual",
    ENDS,
    dict(M=8192, N=4096, K=512),
    dict(M=128, N=256, K=64),
)
def _(device, M, N, K):
    a, b, bias, r = normal(device, M, K), normal(device, K, N), normal(device, N), normal(device, M, N)
    c, pre = empty(device, M, N), empty(device, M, N)

    def run():
        grid = (N // 128, M // 128)
        return product_with_end[grid](a, b, bias, r, c, pre, N, K, BM=128, BN=128, BK=64, num_warps=8)

    def want():
        x = a.float() @ b.float() + bias.float()
        return F.gelu(x) + r.float(), x

    return Work(run, (c, pre), want)


@triton.jit
def triangle_product(a_ptr, b_ptr, c_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Of a square matrix the lower triangle counts: a program goes as far as its rows do."""
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    offs_m, offs_n = first + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, first + BM, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(a_ptr + offs_m[:, None] * K + k[None, :])
        a = tl.where(offs_m[:, None] >= k[None, :], a, 0.0)
        total = tl.dot(a, tl.load(b_ptr + k[:, None] * N + offs_n[None, :]), total)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], total.to(c_ptr.dtype.element_ty))


@case(
    "lower triangle of 4096 x 4096 by 4096 x 4096 fp16",
    TRIANGLES,
    dict(M=4096, N=4096),
    dict(M=256, N=128),
    sample=8,
)
def _(device, M, N):
    a, b, c = normal(device, M, M, dtype=HALF), normal(device, M, N, dtype=HALF), empty(device, M, N, dtype=HALF)

    def run():
        return triangle_product[(N // 128, M // 128)](a, b, c, N, M, BM=128, BN=128, BK=32, num_warps=8)

    return Work(run, c, lambda: a.float().tril() @ b.float())


@triton.jit
def sums_of_scores(x_ptr, y_ptr, out_ptr, N, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """log sum exp over each row of x @ y.T / 16, less the number on the diagonal: a contrastive loss, no score is stored."""
    offs_m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    x = tl.load(x_ptr + offs_m[:, None] * D + d[None, :])
    m, s, own = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    for start in range(0, N, BN):
        offs_n = start + tl.arange(0, BN)
        y = tl.load(y_ptr + offs_n[None, :] * D + d[:, None])
        scores = tl.dot(x, y) * 0.0625
        own += tl.sum(tl.where(offs_m[:, None] == offs_n[None, :], scores, 0.0), 1)
        new = tl.maximum(m, tl.max(scores, 1))
        s = s * tl.exp(m - new) + tl.sum(tl.exp(scores - new[:, None]), 1)
        m = new
    tl.store(out_ptr + offs_m, m + tl.log(s) - own)


@case(
    "contrastive losses of 16384 pairs of 256 bf16",
    REDUCED,
    dict(N=16 * KI, D=256),
    dict(N=128, D=64),
    sample=1,
)
def _(device, N, D):
    x, y, out = normal(device, N, D), normal(device, N, D), empty(device, N, dtype=FLOAT)

    def run():
        return sums_of_scores[(N // 64,)](x, y, out, N, BM=64, BN=64, D=D)

    def want():
        scores = x.float() @ y.float().t() * 0.0625
        return scores.logsumexp(1) - scores.diagonal()

    return Work(run, out, want)


@triton.jit
def nearest(x_ptr, c_ptr, which_ptr, distance_ptr, CENTERS, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """Of each point the center that is nearest, and how far it is, by products: |c|^2 - 2 x c."""
    offs_m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    x = tl.load(x_ptr + offs_m[:, None] * D + d[None, :])
    best, which = tl.full((BM,), 1e30, tl.float32), tl.zeros((BM,), tl.int32)
    for start in range(0, CENTERS, BN):
        offs_n = start + tl.arange(0, BN)
        c = tl.load(c_ptr + offs_n[None, :] * D + d[:, None])
        far = tl.sum(c.to(tl.float32) * c.to(tl.float32), 0)[None, :] - 2 * tl.dot(x, c)
        low = tl.min(far, 1)
        which = tl.where(low < best, start + tl.argmin(far, 1), which)
        best = tl.minimum(best, low)
    tl.store(which_ptr + offs_m, which)
    tl.store(distance_ptr + offs_m, best + tl.sum(x.to(tl.float32) * x.to(tl.float32), 1))


@case(
    "the nearest of 1024 centers to 256 Ki points of 64 fp16",
    REDUCED,
    dict(points=256 * KI, centers=1024),
    dict(points=64, centers=128),
    sample=1,
)
def _(device, points, centers):
    """Distances are checked; which center is stored too, and may differ where two are equally far."""
    x, c = normal(device, points, 64, dtype=HALF), normal(device, centers, 64, dtype=HALF)
    which, far = empty(device, points, dtype=torch.int32), empty(device, points, dtype=FLOAT)

    def run():
        return nearest[(points // 64,)](x, c, which, far, centers, BM=64, BN=64, D=64)

    def want():
        squares = c.float().square().sum(1)
        parts = [(squares - 2 * part.float() @ c.float().t()).amin(1) for part in x.split(16 * KI)]
        return torch.cat(parts) + x.float().square().sum(1)

    return Work(run, far, want)


@triton.jit
def solve_triangles(l_ptr, b_ptr, x_ptr, N: tl.constexpr, SYSTEMS: tl.constexpr):
    """L x = b for SYSTEMS small triangles side by side: an unknown at a time, from a row of L and the x so far."""
    system, j = tl.program_id(0) * SYSTEMS + tl.arange(0, SYSTEMS), tl.arange(0, N)
    b = tl.load(b_ptr + system[:, None] * N + j[None, :])
    x = tl.zeros((SYSTEMS, N), tl.float32)
    for i in range(N):
        row = tl.load(l_ptr + (system[:, None] * N + i) * N + j[None, :])
        is_i = j[None, :] == i
        rest = tl.sum(tl.where(is_i, b, 0.0) - row * x, 1)
        x = tl.where(is_i, (rest / tl.sum(tl.where(is_i, row, 0.0), 1))[:, None], x)
    tl.store(x_ptr + system[:, None] * N + j[None, :], x)


@case("64 Ki triangles of 32 x 32 solved fp32", SOLVES, dict(systems=64 * KI), dict(systems=32))
def _(device, systems):
    lower = normal(device, systems, 32, 32, dtype=FLOAT) / 16
    if device != "meta":
        lower.diagonal(dim1=1, dim2=2).copy_(lower.diagonal(dim1=1, dim2=2).sigmoid() + 1)
    b, x = normal(device, systems, 32, dtype=FLOAT), empty(device, systems, 32, dtype=FLOAT)

    def run():
        return solve_triangles[(systems // 16,)](lower, b, x, N=32, SYSTEMS=16)

    return Work(run, x, lambda: torch.linalg.solve_triangular(lower.tril(), b[:, :, None], upper=False)[:, :, 0])


@triton.jit
def gram(x_ptr, c_ptr, T, D: tl.constexpr, BK: tl.constexpr):
    """x.T @ x of one batch, over its T rows: a tall matrix by itself."""
    d = tl.arange(0, D)
    total = tl.zeros((D, D), tl.float32)
    for start in range(0, T, BK):
        rows = tl.program_id(0) * T + start + tl.arange(0, BK)
        x = tl.load(x_ptr + rows[:, None] * D + d[None, :])
        total = tl.dot(tl.trans(x), x, total)
    tl.store(c_ptr + (tl.program_id(0) * D + d)[:, None] * D + d[None, :], total)


@case("x.T x of 512 matrices of 2048 x 128 bf16", BATCHES, dict(batch=512, T=2048), dict(batch=2, T=128), sample=1)
def _(device, batch, T):
    x, c = normal(device, batch, T, 128, dtype=BF16), empty(device, batch, 128, 128, dtype=FLOAT)
    return Work(lambda: gram[(batch,)](x, c, T, D=128, BK=64, num_warps=8), c, lambda: x.float().mT @ x.float())
