"""Products: in float32 and tf32, of 8 bits with an end, for gradients of weights, small ones, sums of two; attention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.fifth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, FP8, HALF, INT8, KI, Work, empty, normal

FLOATS, BYTES, GRADIENTS, SMALL = (
    "products of float32",
    "products of 8 bits with an end",
    "gradients of weights",
    "products of 32 x 32",
)
SUMS, WARPS = "sums over two dimensions", "tiles of two warps"
ODD_ATTENTION, WINDOWS, FEW_KEYS = "attention of odd sizes", "windows to both sides", "attention to few keys"


@triton.jit
def float_product(
    a_ptr, b_ptr, c_ptr, M, N, K, HOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """a @ b of float32 with a mask for what K leaves over; HOW says what tl.dot does with it."""
    offs_m, offs_n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(a_ptr + offs_m[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + offs_n[None, :], mask=k[:, None] < K, other=0.0)
        total = tl.dot(a, b, total, input_precision=HOW)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], total)


def _float_product(device, M, N, K, how, BM, BN, warps, stages):
    a, b, c = normal(device, M, K, dtype=FLOAT), normal(device, K, N, dtype=FLOAT), empty(device, M, N, dtype=FLOAT)

    def run():
        return float_product[(N // BN, M // BM)](
            a, b, c, M, N, K, HOW=how, BM=BM, BN=BN, BK=32, num_warps=warps, num_stages=stages
        )

    return Work(run, c, lambda: a.double() @ b.double())


@case("matmul 1536 x 2048 x 1000 fp32 as it is, 64x64", FLOATS, dict(M=1536, N=2048, K=1000), dict(M=64, N=64, K=72))
def _(device, M, N, K):
    return _float_product(device, M, N, K, "ieee", BM=64, BN=64, warps=8, stages=2)


@case("matmul 4096 x 4096 x 1999 tf32, 128x64", FLOATS, dict(M=4096, N=4096, K=1999), dict(M=128, N=64, K=71))
def _(device, M, N, K):
    return _float_product(device, M, N, K, "tf32", BM=128, BN=64, warps=4, stages=3)


@triton.jit
def byte_product(a_ptr, b_ptr, row_ptr, col_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """a @ b.T of int8, times a scale of the row and one of the column, and a square of what is above 0."""
    offs_m, offs_n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.int32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(a_ptr + offs_m[:, None] * K + k[None, :])
        b = tl.load(b_ptr + offs_n[None, :] * K + k[:, None])
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    y = total.to(tl.float32) * tl.load(row_ptr + offs_m)[:, None] * tl.load(col_ptr + offs_n)[None, :]
    y = tl.maximum(y, 0.0)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], (y * y).to(c_ptr.dtype.element_ty))


@case(
    "matmul 8192 x 3072 x 4096 int8, two scales and a square, 128x64x128, 4 stages",
    BYTES,
    dict(M=8192, N=3072, K=4096),
    dict(M=128, N=128, K=256),
)
def _(device, M, N, K):
    a, b, c = normal(device, M, K, dtype=INT8), normal(device, N, K, dtype=INT8), empty(device, M, N)
    row = normal(device, M, dtype=FLOAT).sigmoid() * 1e-3
    col = normal(device, N, dtype=FLOAT).sigmoid() * 1e-3

    def run():
        return byte_product[(M // 128, N // 64)](
            a, b, row, col, c, M, N, K, BM=128, BN=64, BK=128, num_warps=4, num_stages=4
        )

    def want():
        return ((a.double() @ b.double().T).float() * row[:, None] * col).relu() ** 2

    return Work(run, c, want)


@triton.jit
def gated_bytes(x_ptr, a_ptr, b_ptr, y_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """silu(x @ a.T) * (x @ b.T) in fp8: two products in one loop, which share x."""
    offs_m, offs_n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    one, two = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(x_ptr + offs_m[:, None] * K + k[None, :])
        one = tl.dot(x, tl.load(a_ptr + offs_n[None, :] * K + k[:, None]), one)
        two = tl.dot(x, tl.load(b_ptr + offs_n[None, :] * K + k[:, None]), two)
    one = one * 0.05
    y = one * tl.sigmoid(one) * two * 0.05
    tl.store(y_ptr + offs_m[:, None] * N + offs_n[None, :], y.to(y_ptr.dtype.element_ty))


@case(
    "gated product 4096 x 7168 x 2048 fp8, two in a loop",
    BYTES,
    dict(M=4096, N=7168, K=2048),
    dict(M=128, N=64, K=256),
)
def _(device, M, N, K):
    x, a, b = (normal(device, rows, K, dtype=FP8) for rows in (M, N, N))
    y = empty(device, M, N, dtype=HALF)

    def run():
        return gated_bytes[(N // 64, M // 128)](x, a, b, y, N, K, BM=128, BN=64, BK=128, num_warps=8)

    return Work(run, y, lambda: F.silu(x.float() @ a.float().T * 0.05) * (x.float() @ b.float().T * 0.05))


@triton.jit
def weight_part(
    x_ptr, dy_ptr, part_ptr, M, N, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """A tile of x.T @ dy over SPAN tokens; both are transposed where they lie, and the token is what is summed over."""
    offs_m, offs_n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, SPAN, BK):
        token = tl.program_id(2) * SPAN + start + tl.arange(0, BK)
        x = tl.load(x_ptr + token[None, :] * M + offs_m[:, None])
        total = tl.dot(x, tl.load(dy_ptr + token[:, None] * N + offs_n[None, :]), total)
    tl.store(part_ptr + (tl.program_id(2) * M + offs_m[:, None]) * N + offs_n[None, :], total)


@triton.jit
def add_weight_parts(part_ptr, dw_ptr, n, parts, BLOCK: tl.constexpr):
    """The parts are added to what is there, as gradients of several batches are."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(dw_ptr + at)
    for i in range(parts):
        total += tl.load(part_ptr + i * n + at)
    tl.store(dw_ptr + at, total)


@case(
    "gradients of 768 x 640 weights by 131,072 tokens bf16, 16 parts and their sum",
    GRADIENTS,
    dict(M=768, N=640, T=128 * KI, parts=16),
    dict(M=128, N=128, T=256, parts=2),
)
def _(device, M, N, T, parts):
    x, dy = normal(device, T, M), normal(device, T, N)
    part, dw = empty(device, parts, M, N, dtype=FLOAT), empty(device, M, N, dtype=FLOAT)

    def run():
        weight_part[(M // 128, N // 128, parts)](x, dy, part, M, N, SPAN=T // parts, BM=128, BN=128, BK=64, num_warps=8)
        add_weight_parts[(M * N // 512,)](part, dw, M * N, parts, BLOCK=512)

    return Work(run, dw, lambda: x.float().T @ dy.float())


@triton.jit
def tiny_products(a_ptr, b_ptr, c_ptr, COUNT: tl.constexpr, D: tl.constexpr):
    """COUNT products of D x D, one after the other, by one warp; the third matrix is added to."""
    i, j = tl.arange(0, D)[:, None], tl.arange(0, D)[None, :]
    for step in range(COUNT):
        at = (tl.program_id(0) * COUNT + step) * D * D + i * D + j
        c = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
        tl.store(c_ptr + at, c.to(c_ptr.dtype.element_ty))


@case("64 Ki products of 32 x 32 fp16, 8 by a warp", SMALL, dict(n=64 * KI), dict(n=16))
def _(device, n):
    a, b, c = (normal(device, n, 32, 32, dtype=HALF) for _ in range(3))
    return Work(lambda: tiny_products[(n // 8,)](a, b, c, COUNT=8, D=32, num_warps=1), c, lambda: a.float() @ b.float())


@triton.jit
def double_sum(a_ptr, b_ptr, y_ptr, M, N, B, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """y[m, n] = sum over b and c of a[b, m, c] * b[c, b, n]: the outer loop moves both, C numbers go into a product."""
    offs_m, offs_n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, C)
    total = tl.zeros((BM, BN), tl.float32)
    for i in range(B):
        a = tl.load(a_ptr + (i * M + offs_m[:, None]) * C + c[None, :])
        b = tl.load(b_ptr + (c[:, None] * B + i) * N + offs_n[None, :])
        total = tl.dot(a, b, total)
    tl.store(y_ptr + offs_m[:, None] * N + offs_n[None, :], total.to(y_ptr.dtype.element_ty))


@case(
    "bmc,cbn->mn of 50, 4096, 32 and 4096 bf16, 128x128",
    SUMS,
    dict(M=4096, N=4096, B=50, C=32),
    dict(M=128, N=128, B=3, C=32),
)
def _(device, M, N, B, C):
    a, b, y = normal(device, B, M, C), normal(device, C, B, N), empty(device, M, N)

    def run():
        return double_sum[(M // 128, N // 128)](a, b, y, M, N, B, C=C, BM=128, BN=128, num_warps=8)

    return Work(run, y, lambda: torch.einsum("bmc,cbn->mn", a.float(), b.float()))


@triton.jit
def two_warps(a_ptr, b_ptr, c_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """a.T @ b by two warps, so that each thread has 64 numbers of the result; then half a sine."""
    offs_m, offs_n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    M = tl.num_programs(1) * BM
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(a_ptr + k[None, :] * M + offs_m[:, None])
        total = tl.dot(a, tl.load(b_ptr + k[:, None] * N + offs_n[None, :]), total)
    y = 0.5 * tl.sin(total)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], y.to(c_ptr.dtype.element_ty))


@case("sines of a.T @ b, 2560 x 3072 x 1024 bf16, 2 warps", WARPS, dict(M=2560, N=3072, K=1024), dict(M=64, N=64, K=64))
def _(device, M, N, K):
    a, b, c = normal(device, K, M) * 0.05, normal(device, K, N), empty(device, M, N)

    def run():
        return two_warps[(N // 64, M // 64)](a, b, c, N, K, BM=64, BN=64, BK=32, num_warps=2, num_stages=3)

    return Work(run, c, lambda: 0.5 * (a.float().T @ b.float()).sin())


@triton.jit
def odd_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    T,
    S,
    scale,
    BEFORE,
    AFTER,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Attention of T queries to S keys, BEFORE and AFTER of them around each; heads of D numbers are padded to WIDE."""
    head = tl.program_id(1)
    first = tl.program_id(0) * BM
    offs_m, d = first + tl.arange(0, BM), tl.arange(0, WIDE)
    at_q = (head * T + offs_m)[:, None] * D + d[None, :]
    live_q = (offs_m[:, None] < T) & (d[None, :] < D)
    q = tl.load(q_ptr + at_q, mask=live_q, other=0.0)
    m, s = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, WIDE), tl.float32)
    for start in range(tl.maximum(first - BEFORE, 0) // BN * BN, tl.minimum(first + BM + AFTER, S), BN):
        offs_n = start + tl.arange(0, BN)
        at = (head * S + offs_n)[:, None] * D + d[None, :]
        live = (offs_n[:, None] < S) & (d[None, :] < D)
        scores = tl.dot(q, tl.trans(tl.load(k_ptr + at, mask=live, other=0.0))) * scale
        back = offs_m[:, None] - offs_n[None, :]
        scores = tl.where((back <= BEFORE) & (-back <= AFTER) & (offs_n[None, :] < S), scores, -1e30)
        new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        decay = tl.exp2(m - new)
        s = s * decay + tl.sum(p, 1)
        v = tl.load(v_ptr + at, mask=live, other=0.0)
        total = tl.dot(p.to(v.dtype), v, total * decay[:, None])
        m = new
    tl.store(o_ptr + at_q, (total / s[:, None]).to(o_ptr.dtype.element_ty), mask=live_q)


def _attention(device, H, T, S, D, before, after, dtype, BM, BN, warps, stages):
    q, k, v = (
        normal(device, H, T, D, dtype=dtype),
        normal(device, H, S, D, dtype=dtype),
        normal(device, H, S, D, dtype=dtype),
    )
    o = empty(device, H, T, D, dtype=dtype)

    def run():
        scale, wide = 1.4426950408889634 * D**-0.5, triton.next_power_of_2(D)
        return odd_attention[(triton.cdiv(T, BM), H)](
            q, k, v, o, T, S, scale, before, after, D=D, WIDE=wide, BM=BM, BN=BN, num_warps=warps, num_stages=stages
        )

    def want():
        back = torch.arange(T, device=q.device)[:, None] - torch.arange(S, device=q.device)
        return F.scaled_dot_product_attention(q[None], k[None], v[None], (back <= before) & (-back <= after))[0]

    return Work(run, o, want)


@case(
    "causal attention, 20 heads of 80, 3001 tokens bf16, 32x128",
    ODD_ATTENTION,
    dict(H=20, T=3001, D=80),
    dict(H=2, T=171, D=20),
    sample=8,
)
def _(device, H, T, D):
    return _attention(device, H, T, T, D, T, 0, torch.bfloat16, BM=32, BN=128, warps=4, stages=2)


@case(
    "windows of 200 to both sides, 24 heads of 64, 10,000 tokens fp16, 64x32, 2 warps",
    WINDOWS,
    dict(H=24, T=10_000, D=64),
    dict(H=2, T=250, D=32),
)
def _(device, H, T, D):
    side = 200 if T > 1000 else 20
    return _attention(device, H, T, T, D, side, side, HALF, BM=64, BN=32, warps=2, stages=4)


@case(
    "77 keys for 80 heads of 40, 16,384 queries fp16, 128x128",
    FEW_KEYS,
    dict(H=80, T=16 * KI, S=77, D=40),
    dict(H=2, T=128, S=13, D=20),
)
def _(device, H, T, S, D):
    return _attention(device, H, T, S, D, T + S, T + S, HALF, BM=128, BN=128, warps=8, stages=1)
