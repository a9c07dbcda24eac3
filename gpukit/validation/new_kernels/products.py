"""Products of matrices: operands transposed by pointers, 8 bits, few programs, persistent programs, shared tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation import counted_kernels
from gpukit.validation.new_kernels.case import BF16, FLOAT, FP8, HALF, INT8, INT32, SMS, Work, case, empty, normal

TRANSPOSED, EIGHT_BITS = "transposed operands", "int8 and fp8 products"


@triton.jit
def product(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """c = a @ b for sizes that the tiles divide; tiles are taken in groups of eight rows of them."""
    pid, tiles_n = tl.program_id(0), N // BN
    group = pid // (8 * tiles_n)
    rows = min(M // BM - group * 8, 8)
    pid_m, pid_n = group * 8 + pid % (8 * tiles_n) % rows, pid % (8 * tiles_n) // rows
    offs_m, offs_n, offs_k = pid_m * BM + tl.arange(0, BM), pid_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    a = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    total = tl.zeros((BM, BN), SUM)
    for _ in range(0, K, BK):
        total = tl.dot(tl.load(a), tl.load(b), total, out_dtype=SUM)
        a += BK * stride_ak
        b += BK * stride_bk
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], total.to(c_ptr.dtype.element_ty))


def _matrix(device, rows, columns, dtype, transposed):
    if transposed:
        return normal(device, columns, rows, dtype=dtype).t()
    return normal(device, rows, columns, dtype=dtype)


def _product(device, M, N, K, tiles, dtype=BF16, transposed="", num_warps=8, num_stages=3):
    a, b = _matrix(device, M, K, dtype, "a" in transposed), _matrix(device, K, N, dtype, "b" in transposed)
    c = empty(device, M, N, dtype={INT8: INT32, FP8: BF16}.get(dtype, dtype))
    BM, BN, BK = tiles
    return Work(
        lambda: product[(M // BM * (N // BN),)](
            a, b, c, M, N, K, *a.stride(), *b.stride(), BM=BM, BN=BN, BK=BK,
            SUM=tl.int32 if dtype == INT8 else tl.float32, num_warps=num_warps, num_stages=num_stages,
        ),
        c,
        lambda: a.double() @ b.double() if dtype == INT8 else a.float() @ b.float(),
    )  # fmt: skip


_FULL, _SMALL = dict(M=4096, N=4096, K=4096), dict(M=128, N=256, K=256)


def _products(name: str, kind: str, **how):
    case(name, kind, _FULL | how, _SMALL | how)(_product)


_products("matmul 4096 bf16, a.T @ b, 128x128x64", TRANSPOSED, tiles=(128, 128, 64), transposed="a")
_products(
    "matmul 4096 fp16, a.T @ b.T, 64x128x32, 4 warps",
    TRANSPOSED,
    tiles=(64, 128, 32),
    dtype=HALF,
    transposed="ab",
    num_warps=4,
)
_products("matmul 4096 bf16, a.T @ b.T, 128x256x64", TRANSPOSED, tiles=(128, 256, 64), transposed="ab")
_products(
    "matmul 4096 bf16, a @ b.T, 64x64x64, 2 stages, 4 warps",
    TRANSPOSED,
    tiles=(64, 64, 64),
    transposed="b",
    num_warps=4,
    num_stages=2,
)
_products("matmul 4096 int8, a @ b.T, 128x128x128", EIGHT_BITS, tiles=(128, 128, 128), dtype=INT8, transposed="b")
_products("matmul 4096 int8, a @ b, 64x128x64, 4 warps", EIGHT_BITS, tiles=(64, 128, 64), dtype=INT8, num_warps=4)
_products("matmul 4096 fp8, a @ b.T, 128x256x128", EIGHT_BITS, tiles=(128, 256, 128), dtype=FP8, transposed="b")
_products(
    "matmul 4096 fp8, a @ b.T, 64x64x128, 4 warps",
    EIGHT_BITS,
    tiles=(64, 64, 128),
    dtype=FP8,
    transposed="b",
    num_warps=4,
)
_small_grid = dict(N=512, tiles=(128, 128, 64))
case(
    "matmul 512 x 512 x 16384 bf16, 16 programs",
    "small grids",
    dict(M=512, K=16384) | _small_grid,
    dict(M=128, K=256) | _small_grid,
)(_product)


@triton.jit
def scaled_product(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """c = a @ b.T in fp8, where each row of each BK columns has a scale of its own."""
    offs_m, offs_n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(K // BK):
        a = tl.load(a_ptr + offs_m[:, None] * K + k * BK + offs_k[None, :])
        b = tl.load(b_ptr + offs_n[None, :] * K + k * BK + offs_k[:, None])
        scale_a, scale_b = tl.load(a_scale_ptr + k * M + offs_m), tl.load(b_scale_ptr + k * N + offs_n)
        total += tl.dot(a, b) * scale_a[:, None] * scale_b[None, :]
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], total.to(c_ptr.dtype.element_ty))


@case("matmul 4096 fp8 with scales for 128 columns", EIGHT_BITS, _FULL, _SMALL)
def _(device, M, N, K):
    a, b, c = normal(device, M, K, dtype=FP8), normal(device, N, K, dtype=FP8), empty(device, M, N)
    scale_a, scale_b = normal(device, K // 128, M, dtype=FLOAT), normal(device, K // 128, N, dtype=FLOAT)

    def want():
        def real(x, scale):
            return x.float() * scale.t().repeat_interleave(128, 1)

        return real(a, scale_a) @ real(b, scale_b).t()

    def run():
        return scaled_product[(M // 128, N // 128)](
            a, b, scale_a, scale_b, c, M, N, K, BM=128, BN=128, BK=128, num_warps=8
        )

    return Work(run, c, want)


@triton.jit
def product_of_small_weights(
    a_ptr, b_ptr, scale_ptr, c_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """c = a @ b with weights b of 8 bits, which become bf16 on their way; a scale for each column."""
    offs_m, offs_n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + offs_m[:, None] * K + k + offs_k[None, :])
        b = tl.load(b_ptr + (k + offs_k)[:, None] * N + offs_n[None, :])
        total = tl.dot(a, b.to(tl.bfloat16), total)
    c = total * tl.load(scale_ptr + offs_n)[None, :]
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], c.to(c_ptr.dtype.element_ty))


@case("matmul 4096 bf16 by weights of 8 bits", EIGHT_BITS, _FULL, _SMALL)
def _(device, M, N, K):
    a, b = normal(device, M, K), normal(device, K, N, dtype=INT8)
    scale, c = normal(device, N, dtype=FLOAT), empty(device, M, N)

    def run():
        return product_of_small_weights[(M // 128, N // 128)](a, b, scale, c, N, K, BM=128, BN=128, BK=64, num_warps=8)

    return Work(run, c, lambda: (a.float() @ b.float()) * scale)


@triton.jit
def persistent_product(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c = a @ b by pointers: a fixed number of programs, each of which computes one tile after another."""
    for tile in tl.range(tl.program_id(0), M // BM * (N // BN), tl.num_programs(0)):
        offs_m = tile // (N // BN) * BM + tl.arange(0, BM)
        offs_n = tile % (N // BN) * BN + tl.arange(0, BN)
        offs_k = tl.arange(0, BK)
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            a = tl.load(a_ptr + offs_m[:, None] * K + k + offs_k[None, :])
            b = tl.load(b_ptr + (k + offs_k)[:, None] * N + offs_n[None, :])
            total = tl.dot(a, b, total)
        tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], total.to(c_ptr.dtype.element_ty))


@case(
    "matmul 4096 bf16, persistent, by pointers",
    "persistent loops",
    _FULL | dict(programs=SMS),
    _SMALL | dict(programs=2),
)
def _(device, M, N, K, programs):
    a, b, c = normal(device, M, K), normal(device, K, N), empty(device, M, N)

    def run():
        return persistent_product[(programs,)](a, b, c, M, N, K, BM=128, BN=128, BK=64, num_warps=8)

    return Work(run, c, lambda: a.float() @ b.float())


@case(
    "matmul 1024 x 1024 x 16384 bf16, 8 programs add to a tile",
    "atomics",
    dict(M=1024, N=1024, K=16384),
    dict(M=128, N=128, K=1024),
)
def _(device, M, N, K):
    a, b, c = normal(device, M, K), normal(device, K, N), empty(device, M, N, dtype=FLOAT)
    grid = (M // 128 * (N // 128), 8)
    return Work(
        lambda: counted_kernels.matmul[grid](
            a, b, c, M, N, K, *a.stride(), *b.stride(), BM=128, BN=128, BK=64, GROUP_M=1, SPLIT_K=8, num_warps=8
        ),
        c,
        lambda: a.float() @ b.float(),
    )


@triton.jit
def small_products(a_ptr, b_ptr, c_ptr, D: tl.constexpr):
    """One product of D x D per program."""
    at = tl.program_id(0) * D * D + tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)).to(c_ptr.dtype.element_ty))


@case("16,384 products of 64 x 64 fp16", "small products", dict(n=16384), dict(n=3))
def _(device, n):
    a, b, c = (
        normal(device, n, 64, 64, dtype=HALF),
        normal(device, n, 64, 64, dtype=HALF),
        empty(device, n, 64, 64, dtype=HALF),
    )
    return Work(lambda: small_products[(n,)](a, b, c, D=64), c, lambda: torch.bmm(a.float(), b.float()))
