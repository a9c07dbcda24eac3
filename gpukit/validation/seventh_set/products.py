"""Products: of many shapes, in parts, with a norm inside, by descriptors, of windows of sound, with scales of 32."""

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
    SMS,
    UINT8,
    Work,
    empty,
    known,
    normal,
    place,
)
from gpukit.validation.seventh_set.case import case

SHAPES, INTEGERS, INSIDE = "products of many shapes", "products of int8 in parts", "a norm inside a product"
HALVES, SOUND, SCALES = (
    "tiles stored in halves by descriptors",
    "windows of sound as products",
    "products with scales of 32",
)


@triton.jit
def many_shapes(a_ptr, b_ptr, c_ptr, shape_ptr, at_ptr, count, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A fixed number of programs share the tiles of all products, whose shapes and places are in two tables."""
    tile, end = tl.program_id(0), 0
    for i in range(count):
        M, N, K = tl.load(shape_ptr + 3 * i), tl.load(shape_ptr + 3 * i + 1), tl.load(shape_ptr + 3 * i + 2)
        K = tl.multiple_of(K, 16)
        N = tl.multiple_of(N, 16)
        a = a_ptr + tl.multiple_of(tl.load(at_ptr + 3 * i), 16)
        b = b_ptr + tl.multiple_of(tl.load(at_ptr + 3 * i + 1), 16)
        c = c_ptr + tl.multiple_of(tl.load(at_ptr + 3 * i + 2), 16)
        begin, tiles_n = end, N // BN
        end = begin + tl.cdiv(M, BM) * tiles_n
        while tile < end:
            m = (tile - begin) // tiles_n * BM + tl.arange(0, BM)
            n, k = (tile - begin) % tiles_n * BN + tl.arange(0, BN), tl.arange(0, BK)
            total = tl.zeros((BM, BN), tl.float32)
            for first in range(0, K, BK):
                x = tl.load(a + m[:, None] * K + first + k[None, :], mask=m[:, None] < M, other=0.0)
                total = tl.dot(x, tl.load(b + (first + k)[:, None] * N + n[None, :]), total)
            tl.store(c + m[:, None] * N + n[None, :], total.to(c_ptr.dtype.element_ty), mask=m[:, None] < M)
            tile += tl.num_programs(0)


@case(
    "12 products fp16 of 100 to 3300 rows by 512 to 4096 columns, 132 programs, 128x128x32",
    SHAPES,
    dict(
        shapes=(
            (3300, 4096, 1024), (100, 512, 4096), (1733, 1024, 2048), (640, 2048, 2048), (2900, 768, 3072),
            (257, 4096, 4096), (1100, 3072, 768), (3001, 512, 512), (1500, 2304, 768), (2048, 2048, 2048),
            (333, 1280, 5120), (900, 2560, 1536),
        ),
        programs=SMS,
    ),
    dict(shapes=((130, 128, 64), (17, 256, 32), (200, 128, 96)), programs=3),
)  # fmt: skip
def _(device, shapes, programs):
    def places(sizes):
        return [sum(sizes[:i]) for i in range(len(sizes))], sum(sizes)

    sizes = [[M * K for M, N, K in shapes], [K * N for M, N, K in shapes], [M * N for M, N, K in shapes]]
    (a_at, a_size), (b_at, b_size), (c_at, c_size) = map(places, sizes)
    a, b, c = normal(device, a_size, dtype=HALF), normal(device, b_size, dtype=HALF), empty(device, c_size, dtype=HALF)
    shape = place(device, torch.tensor(shapes, dtype=INT32))
    at = place(device, torch.tensor([*zip(a_at, b_at, c_at, strict=True)], dtype=INT32))

    def run():
        many_shapes[(programs,)](a, b, c, shape, at, len(shapes), BM=128, BN=128, BK=32, num_warps=8, num_stages=3)

    def want():
        parts = zip(shapes, a.split(sizes[0]), b.split(sizes[1]), strict=True)
        return torch.cat([(x.view(M, K).float() @ y.view(K, N).float()).view(-1) for (M, N, K), x, y in parts])

    return Work(run, c, want)


@triton.jit
def integer_parts(x_ptr, w_ptr, y_ptr, N, K, SPAN, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x @ w.T of int8 over SPAN numbers, added as int32 to what the other parts have."""
    m, n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.int32)
    first = tl.program_id(2) * SPAN
    for i in range(first, first + SPAN, BK):
        k = i + tl.arange(0, BK)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :])
        w = tl.load(w_ptr + n[None, :] * K + k[:, None])
        total = tl.dot(x, w, total, out_dtype=tl.int32)
    tl.atomic_add(y_ptr + m[:, None] * N + n[None, :], total, sem="relaxed")


@case(
    "256 rows by 8192 x 32768 int8, 8 parts add int32, 128x128x128, 8 warps",
    INTEGERS,
    dict(M=256, N=8192, K=32_768, parts=8),
    dict(M=128, N=128, K=512, parts=2),
)
def _(device, M, N, K, parts):
    """The sums are not cleared by what is measured."""
    x, w, y = normal(device, M, K, dtype=INT8), normal(device, N, K, dtype=INT8), empty(device, M, N, dtype=INT32)

    def run():
        integer_parts[(N // 128, M // 128, parts)](
            x, w, y, N, K, K // parts, BM=128, BN=128, BK=128, num_warps=8, num_stages=3
        )

    return Work(run, y, lambda: x.double() @ w.double().T)


@triton.jit
def normed_product(x_ptr, w_ptr, y_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """RMS norm of x, times w: the squares are summed in the loop of the product, and the sum divides at its end."""
    m, n, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    x_at, w_at = x_ptr + m[:, None] * K + k[None, :], w_ptr + k[:, None] * N + n[None, :]
    total, squares = tl.zeros((BM, BN), tl.float32), tl.zeros((BM,), tl.float32)
    for _ in range(0, K, BK):
        x = tl.load(x_at)
        total = tl.dot(x, tl.load(w_at), total)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
        x_at += BK
        w_at += BK * N
    y = total * tl.rsqrt(squares / K + 1e-6)[:, None]
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty))


@case(
    "matmul 4096 x 5120 x 3072 bf16 with the norm of its rows inside, 128x128x64, 4 warps",
    INSIDE,
    dict(M=4096, N=5120, K=3072),
    dict(M=128, N=256, K=128),
)
def _(device, M, N, K):
    x, w, y = normal(device, M, K), normal(device, K, N), empty(device, M, N)

    def run():
        normed_product[(M // 128, N // 128)](x, w, y, N, K, BM=128, BN=128, BK=64, num_warps=4, num_stages=3)

    return Work(run, y, lambda: F.rms_norm(x.float(), (K,), eps=1e-6) @ w.float())


@triton.jit
def in_halves(a, b, c, scale, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """a @ b.T by descriptors; the tile's left half is stored before the right one, which needs half of the memory."""
    i, j = tl.program_id(1) * BM, tl.program_id(0) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([i, k]), b.load([j, k]).T, total)
    left, right = tl.split(tl.permute(tl.reshape(total * scale, (BM, 2, BN // 2)), (0, 2, 1)))
    c.store([i, j], left.to(c.dtype))
    c.store([i, j + BN // 2], right.to(c.dtype))


@case(
    "matmul 4096 x 8192 x 4096 fp8, descriptors, 128x256x128, stored in halves",
    HALVES,
    dict(M=4096, N=8192, K=4096),
    dict(M=128, N=256, K=256),
)
def _(device, M, N, K):
    a, b, c = normal(device, M, K, dtype=FP8), normal(device, N, K, dtype=FP8), empty(device, M, N, dtype=HALF)
    tiles = [TensorDescriptor.from_tensor(x, [128 * (1 + (x is b)), 128]) for x in (a, b, c)]

    def run():
        in_halves[(N // 256, M // 128)](*tiles, 0.125, K, BM=128, BN=256, BK=128, num_warps=8, num_stages=3)

    return Work(run, c, lambda: a.float() @ b.float().T / 8)


@triton.jit
def every_second(
    x_ptr, w_ptr, bias_ptr, y_ptr, T, C: tl.constexpr, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Three taps of C channels around every second token, as products, and a GELU."""
    t, n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    half, c = T // 2, tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for tap in range(3):
        source = 2 * t + tap - 1
        live = (source >= 0) & (t < half)
        for i in range(0, C, BK):
            at = (tl.program_id(2) * T + source)[:, None] * C + i + c[None, :]
            x = tl.load(x_ptr + at, mask=live[:, None], other=0.0)
            total = tl.dot(x, tl.load(w_ptr + (tap * C + i + c)[:, None] * N + n[None, :]), total)
    y = total + tl.load(bias_ptr + n)[None, :]
    y = 0.5 * y * (1 + tl.erf(y * 0.7071067812))
    at = (tl.program_id(2) * half + t)[:, None] * N + n[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=t[:, None] < half)


@case(
    "3 taps around every second of 3000 tokens of 1280 bf16, 8 sequences, and GELU, 64x128x64",
    SOUND,
    dict(B=8, T=3000, C=1280),
    dict(B=2, T=140, C=128),
)
def _(device, B, T, C):
    x, w, y = normal(device, B, T, C), normal(device, 3 * C, C) * C**-0.5, empty(device, B, T // 2, C)
    bias = normal(device, C, dtype=FLOAT)

    def run():
        every_second[(C // 128, triton.cdiv(T // 2, 64), B)](
            x, w, bias, y, T, C=C, N=C, BM=64, BN=128, BK=64, num_warps=4, num_stages=4
        )

    def want():
        kernel = w.float().view(3, C, C).permute(2, 1, 0)
        return F.gelu(F.conv1d(x.float().transpose(1, 2), kernel, bias, stride=2, padding=1)).transpose(1, 2)

    return Work(run, y, want)


@triton.jit
def scaled_product(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, c_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """a @ b.T, where 32 numbers of a row share a power of two. Tensor cores of Hopper know no such scales."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    k, group = tl.arange(0, BK), tl.arange(0, BK // 32)
    total = tl.zeros((BM, BN), tl.float32)
    for i in range(0, K, BK):
        a = tl.load(a_ptr + m[:, None] * K + i + k[None, :])
        b = tl.load(b_ptr + n[None, :] * K + i + k[:, None])
        a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + i // 32 + group[None, :])
        b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + i // 32 + group[None, :])
        total = tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e4m3", total)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total.to(c_ptr.dtype.element_ty))


@case(
    "matmul 2048 x 4096 x 4096 fp8, tl.dot_scaled with scales of 32, 128x128x64, 8 warps",
    SCALES,
    dict(M=2048, N=4096, K=4096),
    dict(M=128, N=128, K=128),
)
def _(device, M, N, K):
    a, b, c = normal(device, M, K, dtype=FP8), normal(device, N, K, dtype=FP8), empty(device, M, N)
    a_scale, b_scale = ((known(device, 5, x, K // 32) + 123).to(UINT8) for x in (M, N))

    def run():
        scaled_product[(M // 128, N // 128)](
            a, b, a_scale, b_scale, c, N, K, BM=128, BN=128, BK=64, num_warps=8, num_stages=2
        )

    def want():
        full = [
            x.float() * torch.exp2(s.float() - 127).repeat_interleave(32, 1) for x, s in ((a, a_scale), (b, b_scale))
        ]
        return full[0] @ full[1].T

    return Work(run, c, want)
