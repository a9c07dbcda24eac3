"""Work of more than one launch, few programs, and programs that take one piece after another."""

from __future__ import annotations

import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation import counted_kernels
from gpukit.validation.new_kernels.case import BF16, FLOAT, INT8, KI, MI, SMS, Work, case, empty, normal

LAUNCHES, FEW, PERSISTENT = "several launches", "small grids", "persistent loops"


@triton.jit
def partial_columns(x_ptr, part_ptr, N, ROWS: tl.constexpr, BN: tl.constexpr):
    """The sums of ROWS rows, for BN columns per program."""
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    sums = tl.zeros((BN,), tl.float32)
    for i in range(ROWS):
        sums += tl.load(x_ptr + (tl.program_id(0) * ROWS + i) * N + cols).to(tl.float32)
    tl.store(part_ptr + tl.program_id(0) * N + cols, sums)


@case("column means of 65536 x 2048 bf16 in two launches", LAUNCHES, dict(M=64 * KI, N=2048), dict(M=512, N=512))
def _(device, M, N):
    x, part = normal(device, M, N), empty(device, M // 128, N, dtype=FLOAT)
    y = empty(device, N, dtype=FLOAT)

    def run():
        partial_columns[(M // 128, N // 256)](x, part, N, ROWS=128, BN=256)
        counted_kernels.column_sums[(triton.cdiv(N, 32),)](part, y, M // 128, N, BM=64, BN=32)

    return Work(run, y, lambda: x.double().sum(0))


@triton.jit
def partial_squares(x_ptr, part_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(part_ptr + tl.program_id(0), tl.sum(x * x, 0))


@triton.jit
def finish_norm(part_ptr, factor_ptr, n, largest, BLOCK: tl.constexpr):
    """One program adds up what all others left."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        sums += tl.load(part_ptr + offs, mask=offs < n, other=0.0)
    tl.store(factor_ptr, tl.minimum(1.0, largest / tl.sqrt(tl.sum(sums, 0))))


@triton.jit
def scale(x_ptr, factor_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, (tl.load(x_ptr + offs).to(tl.float32) * tl.load(factor_ptr)).to(y_ptr.dtype.element_ty))


@case("clip 128 Mi bf16 to a norm, three launches", LAUNCHES, dict(n=128 * MI), dict(n=16 * KI))
def _(device, n):
    x, y = normal(device, n), empty(device, n)
    part, factor = empty(device, n // 4096, dtype=FLOAT), empty(device, 1, dtype=FLOAT)

    def run():
        partial_squares[(n // 4096,)](x, part, BLOCK=4096)
        finish_norm[(1,)](part, factor, n // 4096, 1.0, BLOCK=1024)
        scale[(n // 4096,)](x, factor, y, BLOCK=4096)

    return Work(run, y, lambda: x.float() / x.double().square().sum().sqrt().float())


@triton.jit
def row_scales(x_ptr, scale_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * N + offs, mask=offs < N, other=0.0).to(tl.float32)
    tl.store(scale_ptr + tl.program_id(0), tl.max(tl.abs(x), 0) / 127)


@triton.jit
def quantize(x_ptr, scale_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Whole numbers from -127 to 127; halves go to the larger one."""
    row = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + offs).to(tl.float32) * (1 / tl.load(scale_ptr + row))
    tl.store(y_ptr + row * N + offs, tl.floor(x + 0.5).to(tl.int8))


@case("quantize 16384 rows of 8192 bf16 in two launches", LAUNCHES, dict(M=16 * KI, N=8192), dict(M=3, N=2048))
def _(device, M, N):
    x, scales, y = normal(device, M, N), empty(device, M, dtype=FLOAT), empty(device, M, N, dtype=INT8)

    def run():
        row_scales[(M,)](x, scales, N, BLOCK=N, num_warps=8)
        quantize[(M, N // 1024)](x, scales, y, N, BLOCK=1024)

    def want():
        return (x.float() * (127 / x.float().abs().amax(1, keepdim=True)) + 0.5).floor()

    return Work(run, y, want)


@triton.jit
def softmax_of_long_rows(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Two passes: the maximum and the sum together, then the results."""
    base = tl.program_id(0) * N + tl.arange(0, BLOCK)
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + base + start)
        new = tl.maximum(m, x)
        s = s * tl.exp(m - new) + tl.exp(x - new)
        m = new
    largest = tl.max(m, 0)
    total = tl.sum(s * tl.exp(m - largest), 0)
    for start in range(0, N, BLOCK):
        tl.store(y_ptr + base + start, tl.exp(tl.load(x_ptr + base + start) - largest) / total)


@case("softmax of 48 rows of 512 Ki fp32", FEW, dict(M=48, N=512 * KI), dict(M=2, N=16 * KI))
def _(device, M, N):
    x, y = normal(device, M, N, dtype=FLOAT), empty(device, M, N, dtype=FLOAT)

    def run():
        return softmax_of_long_rows[(M,)](x, y, N, BLOCK=4096, num_warps=8)

    return Work(run, y, lambda: x.softmax(1))


@triton.jit
def sums_of_parts(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """The n numbers of a program's part, block after block."""
    offs = tl.program_id(0) * n + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        sums += tl.load(x_ptr + offs + start).to(tl.float32)
    tl.store(y_ptr + tl.program_id(0), tl.sum(sums, 0))


@case("sums by 8 programs, 16 Mi fp32", FEW, dict(n=2 * MI), dict(n=32 * KI))
def _(device, n):
    x, y = normal(device, 8 * n, dtype=FLOAT), empty(device, 8, dtype=FLOAT)

    def run():
        return sums_of_parts[(8,)](x, y, n, BLOCK=8192, num_warps=16)

    return Work(run, y, lambda: x.double().view(8, n).sum(1))


@triton.jit
def persistent_layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, M, N: tl.constexpr):
    """Weights are loaded once per program, which takes one row after another."""
    offs = tl.arange(0, N)
    w, b = tl.load(w_ptr + offs).to(tl.float32), tl.load(b_ptr + offs).to(tl.float32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        x = tl.load(x_ptr + row * N + offs).to(tl.float32)
        d = x - tl.sum(x, 0) / N
        y = d * tl.rsqrt(tl.sum(d * d, 0) / N + 1e-5) * w + b
        tl.store(y_ptr + row * N + offs, y.to(y_ptr.dtype.element_ty))


@case(
    "persistent layer norm, 16384 rows of 8192 bf16",
    PERSISTENT,
    dict(M=16 * KI, N=8192, programs=2 * SMS),
    dict(M=7, N=256, programs=2),
)
def _(device, M, N, programs):
    x, w, b, y = normal(device, M, N), normal(device, N), normal(device, N), empty(device, M, N)

    def run():
        return persistent_layer_norm[(programs,)](x, w, b, y, M, N=N, num_warps=8)

    return Work(run, y, lambda: F.layer_norm(x.float(), (N,), w.float(), b.float()))


@triton.jit
def persistent_gelu(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs).to(tl.float32)
        y = x / (1 + tl.exp(-1.5957691216 * (x + 0.044715 * x * x * x)))
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty))


@case("persistent GELU of 128 Mi bf16", PERSISTENT, dict(n=128 * MI, programs=4 * SMS), dict(n=8192, programs=3))
def _(device, n, programs):
    x, y = normal(device, n, dtype=BF16), empty(device, n, dtype=BF16)

    def run():
        return persistent_gelu[(programs,)](x, y, n, BLOCK=1024)

    return Work(run, y, lambda: F.gelu(x.float(), approximate="tanh"))


@triton.jit
def persistent_transpose(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    """y = x.T, tile after tile."""
    for tile in range(tl.program_id(0), M // BLOCK * (N // BLOCK), tl.num_programs(0)):
        i = tile // (N // BLOCK) * BLOCK + tl.arange(0, BLOCK)
        j = tile % (N // BLOCK) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i[:, None] * N + j[None, :])
        tl.store(y_ptr + j[:, None] * M + i[None, :], tl.trans(x))


@case(
    "persistent transposition of 8192 x 8192 bf16",
    PERSISTENT,
    dict(M=8192, N=8192, programs=2 * SMS),
    dict(M=128, N=256, programs=3),
)
def _(device, M, N, programs):
    x, y = normal(device, M, N), empty(device, N, M)

    def run():
        return persistent_transpose[(programs,)](x, y, M, N, BLOCK=64)

    return Work(run, y, lambda: x.t())
