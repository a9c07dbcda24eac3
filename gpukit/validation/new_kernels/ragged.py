"""Sizes that Triton does not know to be multiples of 16: addresses are not aligned, and stores are made element by element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation import counted_kernels
from gpukit.validation.new_kernels.case import BF16, FLOAT, HALF, INT8, KI, MI, Work, case, empty, known, normal

KIND = "ragged sizes"


@triton.jit
def add_tiles(x_ptr, y_ptr, z_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    i = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    j = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    mask = (i < M) & (j < N)
    x, y = tl.load(x_ptr + i * N + j, mask=mask), tl.load(y_ptr + i * N + j, mask=mask)
    tl.store(z_ptr + i * N + j, x + y, mask=mask)


def _add(device, M, N, dtype=BF16):
    x, y, z = normal(device, M, N, dtype=dtype), normal(device, M, N, dtype=dtype), empty(device, M, N, dtype=dtype)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 64))
    return Work(lambda: add_tiles[grid](x, y, z, M, N, BM=32, BN=64), z, lambda: x + y)


case("add tiles of 8192 x 8191 bf16", KIND, dict(M=8192, N=8191), dict(M=70, N=131))(_add)
case("add tiles of 8192 x 5002 fp32", KIND, dict(M=8192, N=5002, dtype=FLOAT), dict(M=70, N=130, dtype=FLOAT))(_add)


@case("softmax, 32768 rows of 3001 fp16", KIND, dict(M=32 * KI, N=3001), dict(M=5, N=301))
def _(device, M, N):
    x, y = normal(device, M, N, dtype=HALF), empty(device, M, N, dtype=HALF)
    block = triton.next_power_of_2(N)

    def run():
        return counted_kernels.row_softmax[(M,)](x, y, N, N, BLOCK=block, num_warps=8)

    return Work(run, y, lambda: x.float().softmax(1))


@triton.jit
def layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(x_ptr + tl.program_id(0) * N + offs, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / N
    d = tl.where(mask, x - mean, 0.0)
    y = d * tl.rsqrt(tl.sum(d * d, 0) / N + 1e-5)
    y = y * tl.load(w_ptr + offs, mask=mask, other=0.0) + tl.load(b_ptr + offs, mask=mask, other=0.0)
    tl.store(y_ptr + tl.program_id(0) * N + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@case("layer norm, 16384 rows of 5003 bf16", KIND, dict(M=16 * KI, N=5003), dict(M=5, N=301))
def _(device, M, N):
    x, w, b, y = normal(device, M, N), normal(device, N), normal(device, N), empty(device, M, N)
    block = triton.next_power_of_2(N)
    return Work(
        lambda: layer_norm[(M,)](x, w, b, y, N, BLOCK=block, num_warps=8),
        y,
        lambda: F.layer_norm(x.float(), (N,), w.float(), b.float()),
    )


@case("copy of 100,000,003 bf16 to a place shifted by 3", KIND, dict(n=100_000_003), dict(n=2003))
def _(device, n):
    x, y = normal(device, n), empty(device, n + 3)[3:]
    return Work(lambda: counted_kernels.copy[(triton.cdiv(n, 2048),)](x, y, n, BLOCK=2048), y, lambda: x)


@case("matmul 2047 x 4097 x 2051 bf16, masked", KIND, dict(M=2047, N=4097, K=2051), dict(M=67, N=130, K=45))
def _(device, M, N, K):
    a, b, c = normal(device, M, K), normal(device, K, N), empty(device, M, N)
    grid = (triton.cdiv(M, 64) * triton.cdiv(N, 64), 1)
    return Work(
        lambda: counted_kernels.matmul[grid](
            a, b, c, M, N, K, *a.stride(), *b.stride(), BM=64, BN=64, BK=32, GROUP_M=8, SPLIT_K=1
        ),
        c,
        lambda: a.float() @ b.float(),
    )


@triton.jit
def concatenate(a_ptr, b_ptr, y_ptr, NA, NB, BLOCK: tl.constexpr):
    """Row i of a, then row i of b."""
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    y = y_ptr + row * (NA + NB) + offs
    tl.store(y, tl.load(a_ptr + row * NA + offs, mask=offs < NA), mask=offs < NA)
    tl.store(y + NA, tl.load(b_ptr + row * NB + offs, mask=offs < NB), mask=offs < NB)


@case("concatenate rows of 1000 and of 1001 bf16", KIND, dict(M=64 * KI, NA=1000, NB=1001), dict(M=5, NA=100, NB=101))
def _(device, M, NA, NB):
    a, b, y = normal(device, M, NA), normal(device, M, NB), empty(device, M, NA + NB)
    block = triton.next_power_of_2(max(NA, NB))
    return Work(lambda: concatenate[(M,)](a, b, y, NA, NB, BLOCK=block), y, lambda: torch.cat([a, b], 1))


@triton.jit
def store_where(x_ptr, keep_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs), mask=tl.load(keep_ptr + offs) > 0)


@case("stores of half the elements, chosen at random", KIND, dict(n=64 * MI), dict(n=4096))
def _(device, n):
    x, keep, y = normal(device, n, dtype=FLOAT), known(device, 2, n, dtype=INT8), empty(device, n, dtype=FLOAT)
    return Work(lambda: store_where[(n // 1024,)](x, keep, y, BLOCK=1024), y, lambda: torch.where(keep > 0, x, 0))
