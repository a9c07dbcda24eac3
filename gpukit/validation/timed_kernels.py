"""Kernels whose time is predicted and measured, and microbenchmarks of what a machine does at most.

A `Case` is a piece of work of 50 µs and more on an H200. A `Rate` is a kernel that does one thing only: what comes out is
a constant of the machine (gpukit/results/<gpu>/machine.csv), and gpukit.simulator.prediction.predict may use it, naming the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit.kernels.softmax import softmax_bwd, softmax_fwd
from gpukit.validation import counted_kernels
from gpukit.validation.counted_kernels import BF16, FLOAT, HALF, SMS

MI = 1 << 20
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """`prepare(device)` allocates and returns a function of no arguments: the work. `sample` programs of each launch are
    looked at for the prediction."""

    name: str
    prepare: Callable[[str], Callable[[], object]]
    sample: int = 2


@dataclass(frozen=True)
class Rate:
    """`value(µs)` is in `unit`; µs are the time of this row, less that of the row `minus`."""

    name: str
    unit: str
    prepare: Callable[[str], Callable[[], object]]
    value: Callable[[float], float]
    minus: str | None = None


CASES: dict[str, Case] = {}
RATES: dict[str, Rate] = {}


def case(name: str, sample: int = 2):
    def register(prepare):
        CASES[name] = Case(name, prepare, sample)
        return prepare

    return register


def rate(name: str, unit: str, value: Callable[[float], float], minus: str | None = None):
    def register(prepare):
        RATES[name] = Rate(name, unit, prepare, value, minus)
        return prepare

    return register


def _normal(device: str, *shape: int, dtype=BF16) -> Tensor:
    """Random numbers, since a GPU that multiplies zeros draws less power and keeps a higher clock."""
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype == FP8:
        return torch.randn(shape, dtype=HALF, device=device).to(dtype)
    return torch.randn(shape, dtype=dtype, device=device)


def _indices(device: str, high: int, n: int) -> Tensor:
    """Random int32 below `high`. A prediction reads them, so they exist for "meta" too."""
    where = "cpu" if device == "meta" else device
    generator = torch.Generator(where).manual_seed(0)
    return torch.randint(high, (n,), generator=generator, dtype=torch.int32, device=where)


def _grid(n: int, block: int) -> tuple[int]:
    return (triton.cdiv(n, block),)


# ---- streams ------------------------------------------------------------------------------------------------------


def _copy(n: int, dtype, BLOCK: int, num_warps: int = 4, shift: int = 0):
    def prepare(device):
        x, y = _normal(device, n + shift, dtype=dtype)[shift:], _normal(device, n, dtype=dtype)
        return lambda: counted_kernels.copy[_grid(n, BLOCK)](x, y, n, BLOCK=BLOCK, num_warps=num_warps)

    return prepare


case("copy 512 MiB fp32")(_copy(128 * MI, FLOAT, 4096, 8))
case("copy 256 MiB bf16")(_copy(128 * MI, BF16, 4096))
case("copy 256 MiB bf16, blocks of 256")(_copy(128 * MI, BF16, 256))
case("copy 256 MiB bf16, shifted by 1")(_copy(128 * MI, BF16, 4096, shift=1))


@triton.jit
def add(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(z_ptr + offs, tl.load(x_ptr + offs, mask=mask) + tl.load(y_ptr + offs, mask=mask), mask=mask)


@case("add 256 MiB fp32")
def _(device):
    x, y, z = (_normal(device, 64 * MI, dtype=FLOAT) for _ in range(3))
    return lambda: add[_grid(64 * MI, 2048)](x, y, z, 64 * MI, BLOCK=2048)


@triton.jit
def block_sums(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.program_id(0), tl.sum(x.to(tl.float32), 0))


def _block_sums(n: int, BLOCK: int, num_warps: int):
    def prepare(device):
        x, y = _normal(device, n), _normal(device, n // BLOCK, dtype=FLOAT)
        return lambda: block_sums[(n // BLOCK,)](x, y, BLOCK=BLOCK, num_warps=num_warps)

    return prepare


case("sums of blocks, 512 MiB bf16")(_block_sums(256 * MI, 8192, 8))


@triton.jit
def fill(y_ptr, value, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.full((BLOCK,), 0, y_ptr.dtype.element_ty) + value)


@case("fill 512 MiB fp32")
def _(device):
    y = _normal(device, 128 * MI, dtype=FLOAT)
    return lambda: fill[(32768,)](y, 0.5, BLOCK=4096)


@case("in place, 512 MiB fp32")
def _(device):
    x = _normal(device, 128 * MI, dtype=FLOAT)
    return lambda: counted_kernels.add_in_place[(32768,)](x, BLOCK=4096)


@triton.jit
def adamw(p_ptr, g_ptr, m_ptr, v_ptr, n, lr, b1, b2, eps, wd, c1, c2, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    p, g = tl.load(p_ptr + offs, mask=mask), tl.load(g_ptr + offs, mask=mask)
    m, v = tl.load(m_ptr + offs, mask=mask), tl.load(v_ptr + offs, mask=mask)
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    p = p * (1 - lr * wd) - lr * (m / c1) / (tl.sqrt(v / c2) + eps)
    tl.store(p_ptr + offs, p, mask=mask)
    tl.store(m_ptr + offs, m, mask=mask)
    tl.store(v_ptr + offs, v, mask=mask)


@case("AdamW of 50 M parameters")
def _(device):
    n = 50_000_000
    p, g, m, v = (_normal(device, n, dtype=FLOAT) for _ in range(4))
    scalars = (1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5, 0.5)
    return lambda: adamw[_grid(n, 1024)](p, g, m, v, n, *scalars, BLOCK=1024)


def _grid_stride(programs: int, num_warps: int, BLOCK: int):
    def prepare(device):
        n = 64 * MI
        x, y = _normal(device, n, dtype=FLOAT), _normal(device, n, dtype=FLOAT)
        return lambda: counted_kernels.grid_stride_copy[(programs,)](x, y, n, BLOCK=BLOCK, num_warps=num_warps)

    return prepare


case("copy 256 MiB fp32, one program of 4 warps an SM", sample=1)(_grid_stride(SMS, 4, 1024))
case("copy 256 MiB fp32, four programs of 8 warps an SM", sample=1)(_grid_stride(4 * SMS, 8, 4096))


# ---- strides, gathers, atomics ------------------------------------------------------------------------------------


def _strided(n: int, stride_x: int, stride_y: int, dtype):
    def prepare(device):
        x, y = _normal(device, n * stride_x, dtype=dtype), _normal(device, n * stride_y, dtype=dtype)
        return lambda: counted_kernels.copy_strided[_grid(n, 1024)](x, y, n, stride_x, stride_y, BLOCK=1024)

    return prepare


case("load stride 2 fp32")(_strided(64 * MI, 2, 1, FLOAT))
case("load stride 16 fp16")(_strided(16 * MI, 16, 1, HALF))
case("load stride 64 fp32")(_strided(8 * MI, 64, 1, FLOAT))
case("store stride 16 fp16")(_strided(16 * MI, 1, 16, HALF))


@case("gather of 16 Mi elements from 256 MiB")
def _(device):
    x, y = _normal(device, 64 * MI, dtype=FLOAT), _normal(device, 16 * MI, dtype=FLOAT)
    index = _indices(device, 64 * MI, 16 * MI)
    return lambda: counted_kernels.gather[_grid(16 * MI, 2048)](x, index, y, BLOCK=2048)


@case("embedding, 128 Ki rows of 2 KiB")
def _(device):
    x, y = _normal(device, 256 * 1024, 1024), _normal(device, 128 * 1024, 1024)
    index = _indices(device, 256 * 1024, 128 * 1024)
    return lambda: counted_kernels.gather_rows[(128 * 1024,)](x, index, y, 1024, BLOCK=1024)


def _histogram(bins: int):
    def prepare(device):
        x, y = _indices(device, bins, 16 * MI), torch.zeros(bins, dtype=torch.int32, device=device)
        return lambda: counted_kernels.histogram[_grid(16 * MI, 1024)](x, y, BLOCK=1024)

    return prepare


case("histogram of 16 Mi in 4,096 bins")(_histogram(4096))
case("histogram of 16 Mi in 4 Mi bins")(_histogram(4 * MI))


@case("column sums by atomics, 16384 x 2048")
def _(device):
    x, y = _normal(device, 16384, 2048, dtype=FLOAT), _normal(device, 2048, dtype=FLOAT)
    return lambda: counted_kernels.atomic_rows[(16384,)](x, y, 2048, BLOCK=2048)


# ---- rows ---------------------------------------------------------------------------------------------------------


def _softmax(M: int, N: int, dtype=BF16, backward: bool = False):
    def prepare(device):
        x = _normal(device, M, N, dtype=dtype)
        if not backward:
            return lambda: softmax_fwd(x)
        dy = _normal(device, M, N, dtype=dtype)
        return lambda: softmax_bwd(x, dy)

    return prepare


case("gpukit softmax 4096 x 16384 bf16")(_softmax(4096, 16384))
case("gpukit softmax 4096 x 65536 bf16, online", sample=1)(_softmax(4096, 65536))
case("gpukit softmax 4096 x 131072 bf16, online", sample=1)(_softmax(4096, 131072))
case("gpukit softmax 4096 x 16384 fp32")(_softmax(4096, 16384, FLOAT))
case("gpukit softmax 65536 x 781 bf16")(_softmax(65536, 781))
case("gpukit softmax backward 4096 x 16384 bf16")(_softmax(4096, 16384, backward=True))
case("gpukit softmax backward 4096 x 65536 bf16, online", sample=1)(_softmax(4096, 65536, backward=True))
case("gpukit softmax backward 4096 x 16384 fp32")(_softmax(4096, 16384, FLOAT, backward=True))


@case("persistent softmax 4096 x 32768 bf16", sample=1)
def _(device):
    x, y = _normal(device, 4096, 32768), _normal(device, 4096, 32768)
    return lambda: counted_kernels.persistent_softmax[(SMS,)](x, y, 4096, 32768, BLOCK=32768, STAGES=3, num_warps=16)


def _rows(M: int, N: int, num_warps: int):
    def prepare(device):
        x, y = _normal(device, M, N), _normal(device, M, N)
        return lambda: counted_kernels.row_softmax[(M,)](x, y, N, N, BLOCK=N, num_warps=num_warps)

    return prepare


case("plain softmax 4096 x 16384 bf16, 16 warps")(_rows(4096, 16384, 16))
case("plain softmax 16384 x 4096 bf16, 1 warp, spilled")(_rows(16384, 4096, 1))
case("plain softmax 4096 x 65536 bf16, 16 warps, spilled", sample=1)(_rows(4096, 65536, 16))


@case("RMSNorm 16384 x 4096 bf16")
def _(device):
    x, w, y = _normal(device, 16384, 4096), _normal(device, 4096), _normal(device, 16384, 4096)
    return lambda: counted_kernels.rms_norm[(16384,)](x, w, y, 4096, BLOCK=4096, num_warps=8)


def _variance(M: int, N: int, num_warps: int):
    def prepare(device):
        x, y = _normal(device, M, N, dtype=FLOAT), _normal(device, M, dtype=FLOAT)
        return lambda: counted_kernels.row_variance[(M,)](x, y, N, BLOCK=1024, num_warps=num_warps)

    return prepare


case("two passes over 4096 rows of 64 KiB", sample=1)(_variance(4096, 16384, 8))
case("two passes over 32 rows of 4 MiB", sample=1)(_variance(32, MI, 8))


@case("column sums, 16384 x 8192 fp32", sample=1)
def _(device):
    x, y = _normal(device, 16384, 8192, dtype=FLOAT), _normal(device, 8192, dtype=FLOAT)
    return lambda: counted_kernels.column_sums[(256,)](x, y, 16384, 8192, BM=64, BN=32)


@triton.jit
def running_sums(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * N + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < N
    tl.store(y_ptr + offs, tl.cumsum(tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32), 0), mask=mask)


@case("running sums of 32768 rows of 2048")
def _(device):
    x, y = _normal(device, 32768, 2048), _normal(device, 32768, 2048)
    return lambda: running_sums[(32768,)](x, y, 2048, BLOCK=2048)


# ---- tiles --------------------------------------------------------------------------------------------------------


def _transpose(M: int, N: int, BM: int, BN: int, dtype=HALF):
    def prepare(device):
        x, y = _normal(device, M, N, dtype=dtype), _normal(device, N, M, dtype=dtype)
        return lambda: counted_kernels.transpose[(triton.cdiv(M, BM), triton.cdiv(N, BN))](x, y, M, N, BM=BM, BN=BN)

    return prepare


case("transpose 8192 x 8192 fp16, tiles of 64x64")(_transpose(8192, 8192, 64, 64))
case("transpose 8192 x 8192 fp32, tiles of 32x32")(_transpose(8192, 8192, 32, 32, FLOAT))
case("transpose 8192 x 4096 fp16, tiles of 1x1024")(_transpose(8192, 4096, 1, 1024))


# ---- arithmetic ---------------------------------------------------------------------------------------------------


@triton.jit
def exponentials(x_ptr, y_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    for _ in range(STEPS):
        x = tl.exp2(-x)
    tl.store(y_ptr + offs, x)


@triton.jit
def multiply_adds(x_ptr, y_ptr, factor, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    for _ in range(STEPS):
        x = x * factor + 0.5
    tl.store(y_ptr + offs, x)


@triton.jit
def xorshifts(x_ptr, y_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs).to(tl.uint32)
    for _ in range(STEPS):
        x ^= x << 13
        x ^= x >> 17
        x ^= x << 5
    tl.store(y_ptr + offs, x.to(tl.int32))


def _exponentials(n: int, steps: int, BLOCK: int = 1024, num_warps: int = 4):
    def prepare(device):
        x, y = _normal(device, n, dtype=FLOAT), _normal(device, n, dtype=FLOAT)
        return lambda: exponentials[(n // BLOCK,)](x, y, STEPS=steps, BLOCK=BLOCK, num_warps=num_warps)

    return prepare


def _multiply_adds(n: int, steps: int, BLOCK: int = 1024, num_warps: int = 4):
    def prepare(device):
        x, y = _normal(device, n, dtype=FLOAT), _normal(device, n, dtype=FLOAT)
        return lambda: multiply_adds[(n // BLOCK,)](x, y, 0.75, STEPS=steps, BLOCK=BLOCK, num_warps=num_warps)

    return prepare


def _xorshifts(n: int, steps: int):
    def prepare(device):
        x, y = _indices(device, 1 << 30, n), _indices(device, 1 << 30, n)
        return lambda: xorshifts[(n // 1024,)](x, y, STEPS=steps, BLOCK=1024)

    return prepare


case("exponentials, 16 an element")(_exponentials(32 * MI, 16))
case("exponentials, 8 an element")(_exponentials(32 * MI, 8))
case("multiply-adds, 128 an element")(_multiply_adds(64 * MI, 128))
case("xorshifts, 16 an element")(_xorshifts(32 * MI, 16))


@triton.jit
def alone(x_ptr, y_ptr, turns, factor, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks one after another, in each a chain of steps that wait for one another."""
    for i in range(turns):
        offs = (tl.program_id(0) * turns + i) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs)
        for _ in range(STEPS):
            x = x * factor + 0.5
        tl.store(y_ptr + offs, x)


@case("multiply-adds, 256 an element, one warp an SM", sample=1)
def _(device):
    x, y = _normal(device, SMS * 128 * 32, dtype=FLOAT), _normal(device, SMS * 128 * 32, dtype=FLOAT)
    return lambda: alone[(SMS,)](x, y, 128, 0.75, STEPS=256, BLOCK=32, num_warps=1)


@triton.jit
def dropout(x_ptr, y_ptr, p, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, offs) > p
    tl.store(y_ptr + offs, tl.where(keep, tl.load(x_ptr + offs) / (1 - p), 0.0))


@case("dropout of 128 Mi bf16")
def _(device):
    x, y = _normal(device, 128 * MI), _normal(device, 128 * MI)
    return lambda: dropout[_grid(128 * MI, 1024)](x, y, 0.1, 7, BLOCK=1024)


# ---- matrices -----------------------------------------------------------------------------------------------------


@triton.jit
def outer_products(a_ptr, b_ptr, c_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr):
    """c = a.T @ b without tl.dot: K products of a column and a row."""
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(K):
        acc += tl.load(a_ptr + k * N + offs_m)[:, None] * tl.load(b_ptr + k * N + offs_n)[None, :]
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc)


@case("matmul 4096 x 4096 x 256 fp32 without tl.dot, 64x64", sample=1)
def _(device):
    a, b = (_normal(device, 256, 4096, dtype=FLOAT) for _ in range(2))
    c = _normal(device, 4096, 4096, dtype=FLOAT)
    return lambda: outer_products[(64, 64)](a, b, c, 4096, 256, BM=64, BN=64)


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """c = a @ b for sizes that the tiles divide."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP_M * tiles_n)
    rows = min(tiles_m - group * GROUP_M, GROUP_M)
    pid_m = group * GROUP_M + (pid % (GROUP_M * tiles_n)) % rows
    pid_n = (pid % (GROUP_M * tiles_n)) // rows
    offs_m, offs_n = pid_m * BM + tl.arange(0, BM), pid_n * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    a = a_ptr + offs_m[:, None] * K + offs_k[None, :]
    b = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(a), tl.load(b), acc, input_precision=PRECISION)
        a += BK
        b += BK * stride_bk
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(c_ptr.dtype.element_ty))


def _matmul(
    M, N, K, BM, BN, BK, GROUP_M=8, dtype=BF16, precision="ieee", num_warps=4, num_stages=3, transposed=False
):  # fmt: skip
    def prepare(device):
        a = _normal(device, M, K, dtype=dtype)
        b = _normal(device, N, K, dtype=dtype).t() if transposed else _normal(device, K, N, dtype=dtype)
        c = _normal(device, M, N, dtype=BF16 if dtype == FP8 else dtype)
        return lambda: matmul[(M // BM * (N // BN),)](
            a, b, c, M, N, K, *b.stride(), BM=BM, BN=BN, BK=BK, GROUP_M=GROUP_M, PRECISION=precision,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip

    return prepare


case("matmul 4096 bf16, 128x128x64", sample=1)(_matmul(4096, 4096, 4096, 128, 128, 64, num_warps=8))
case("matmul 4096 bf16, 128x256x64", sample=1)(_matmul(4096, 4096, 4096, 128, 256, 64, num_warps=8))
case("matmul 4096 bf16, 64x64x32", sample=1)(_matmul(4096, 4096, 4096, 64, 64, 32))
case("matmul 4096 bf16, 32x64x64", sample=1)(_matmul(4096, 4096, 4096, 32, 64, 64))
case("matmul 4096 bf16, 128x128x64, 1 stage", sample=1)(
    _matmul(4096, 4096, 4096, 128, 128, 64, num_warps=8, num_stages=1)
)
case("matmul 4096 fp16, a @ b.T, 128x128x64", sample=1)(
    _matmul(4096, 4096, 4096, 128, 128, 64, dtype=HALF, num_warps=8, transposed=True)
)
case("matmul 8192 bf16, rows of 128x256x64", sample=1)(_matmul(8192, 8192, 8192, 128, 256, 64, GROUP_M=1, num_warps=8))
case("matmul 8192 bf16, groups of 128x256x64", sample=1)(_matmul(8192, 8192, 8192, 128, 256, 64, num_warps=8))
case("matmul 4096 fp8, 128x128x128", sample=1)(
    _matmul(4096, 4096, 4096, 128, 128, 128, dtype=FP8, num_warps=8, transposed=True)
)
case("matmul 4096 tf32, 128x128x32", sample=1)(
    _matmul(4096, 4096, 4096, 128, 128, 32, dtype=FLOAT, precision="tf32", num_warps=8)
)
case("matmul 2048 fp32, 64x64x32", sample=1)(_matmul(2048, 2048, 2048, 64, 64, 32, dtype=FLOAT))
case("matmul 2048 fp32, 128x64x16, 8 warps", sample=1)(_matmul(2048, 2048, 2048, 128, 64, 16, dtype=FLOAT, num_warps=8))
# 132 and 133 tiles: the second leaves one SM with two of them.
case("matmul 16896 x 128 x 16384 bf16, 128x128x64", sample=1)(_matmul(16896, 128, 16384, 128, 128, 64, 1, num_warps=8))
case("matmul 17024 x 128 x 16384 bf16, 128x128x64", sample=1)(_matmul(17024, 128, 16384, 128, 128, 64, 1, num_warps=8))
case("matmul 16 x 16384 x 8192 bf16, 16x64x128", sample=1)(_matmul(16, 16384, 8192, 16, 64, 128, GROUP_M=1))


def _descriptors(n: int, BM: int, BN: int, BK: int):
    def prepare(device):
        a, b, c = (_normal(device, n, n) for _ in range(3))
        blocks = [TensorDescriptor(t, [n, n], [n, 1], s) for t, s in ((a, [BM, BK]), (b, [BN, BK]), (c, [BM, BN]))]
        return lambda: counted_kernels.matmul_descriptors[(SMS,)](
            *blocks, n, n, n, BM=BM, BN=BN, BK=BK, GROUP_M=8, num_warps=8, num_stages=3
        )

    return prepare


case("matmul 4096 bf16, descriptors, persistent", sample=1)(_descriptors(4096, 128, 128, 64))
case("matmul 8192 bf16, descriptors, persistent", sample=1)(_descriptors(8192, 128, 256, 64))


def _attention(heads: int, T: int, D: int, BM: int, BN: int, num_warps: int):
    def prepare(device):
        q, k, v, o = (_normal(device, heads, T, D) for _ in range(4))
        return lambda: counted_kernels.attention[(T // BM, heads)](
            q, k, v, o, T, 0.1, D=D, BM=BM, BN=BN, num_warps=num_warps
        )

    return prepare


case("attention 64 heads, 4096 tokens, head 64", sample=1)(_attention(64, 4096, 64, 128, 64, 4))
case("attention 64 heads, 4096 tokens, head 128", sample=1)(_attention(64, 4096, 128, 128, 128, 8))
case("attention 8 heads, 16384 tokens, head 128", sample=1)(_attention(8, 16384, 128, 128, 64, 4))


# ---- PyTorch's own ------------------------------------------------------------------------------------------------


def _torch(work: Callable[..., object], *shapes: tuple[int, ...], dtype=BF16):
    def prepare(device):
        inputs = [_normal(device, *shape, dtype=dtype) for shape in shapes]
        return lambda: work(*inputs)

    return prepare


case("torch: add 16384 x 4096 bf16")(_torch(torch.add, (16384, 4096), (16384, 4096)))
case("torch: gelu 16384 x 4096 bf16")(_torch(torch.nn.functional.gelu, (16384, 4096)))
case("torch: sin(x)^2 + cos(x)^2, 16384 x 4096 bf16")(_torch(lambda x: x.sin() ** 2 + x.cos() ** 2, (16384, 4096)))
case("torch: sum of the rows, 16384 x 16384 bf16")(_torch(lambda x: x.sum(-1), (16384, 16384)))
case("torch: transposed copy 8192 x 8192 bf16")(_torch(lambda x: x.t().contiguous(), (8192, 8192)))
case("torch: layer norm 32768 x 4096 bf16")(
    _torch(lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), (32768, 4096))
)
case("torch: softmax 4096 x 65536 bf16")(_torch(lambda x: x.softmax(-1), (4096, 65536)))
case("torch: matmul 4096 bf16")(_torch(torch.matmul, (4096, 4096), (4096, 4096)))
case("torch: matmul 2048 fp32")(_torch(torch.matmul, (2048, 2048), (2048, 2048), dtype=FLOAT))
case("torch: MLP of 4096 tokens, 4096 wide")(
    _torch(lambda x, w1, w2: torch.nn.functional.gelu(x @ w1) @ w2, (4096, 4096), (4096, 16384), (16384, 4096))
)


# ---- rates of the machine -----------------------------------------------------------------------------------------


@rate("launch on an idle stream", "us", lambda us: us)
def _(device):
    x = _normal(device, 1024)
    return lambda: counted_kernels.copy[(1,)](x, x, 0, BLOCK=1024)


@rate("empty programs", "programs/us", lambda us: MI / us, minus="launch on an idle stream")
def _(device):
    x = _normal(device, 1024)
    return lambda: counted_kernels.copy[(MI,)](x, x, 0, BLOCK=1024)


rate("copy", "GB/s", lambda us: 4e-3 * 512 * MI / us)(_copy(512 * MI, BF16, 4096))
rate("read", "GB/s", lambda us: 2e-3 * 1024 * MI / us)(_block_sums(1024 * MI, 8192, 8))


@rate("write", "GB/s", lambda us: 4e-3 * 512 * MI / us)
def _(device):
    y = _normal(device, 512 * MI, dtype=FLOAT)
    return lambda: fill[(512 * MI // 4096,)](y, 0.5, BLOCK=4096)


@triton.jit
def chase(x_ptr, y_ptr, n, CACHE: tl.constexpr):
    """Each load's address is what the one before found."""
    at = tl.load(y_ptr)
    for _ in range(n):
        at = tl.load(x_ptr + at, cache_modifier=CACHE)
    tl.store(y_ptr, at)


def _chase(span_bytes: int, steps: int, CACHE: str, apart: int = 128):
    """A cycle through all places `apart` bytes from one another, in random order."""

    def prepare(device):
        nodes, words = span_bytes // apart, apart // 8
        order = torch.randperm(nodes, device=device) * words
        x = torch.zeros(nodes * words, dtype=torch.int64, device=device)
        x[order] = order.roll(-1)
        y = torch.zeros(1, dtype=torch.int64, device=device)
        return lambda: chase[(1,)](x, y, steps, CACHE=CACHE, num_warps=1)

    return prepare


rate("latency of device memory", "ns", lambda us: us / 4096 * 1e3)(_chase(512 * MI, 4096, ".cg", 1024))
rate("latency of L2, first round", "ns", lambda us: us / 8192 * 1e3)(_chase(MI, 8192, ".cg"))
rate("latency of L2", "ns", lambda us: us / 32768 * 1e3, minus="latency of L2, first round")(
    _chase(MI, 5 * 8192, ".cg")
)
rate("latency of L1", "ns", lambda us: us / 65536 * 1e3)(_chase(16 * 1024, 65536, ""))


@triton.jit
def tiles_in_turn(x_ptr, y_ptr, turns, WRAP: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Adds up tiles of ROWS rows, which are W apart. All programs load the same ones, each while the one before is added; after
    WRAP of them come the first ones again."""
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float16)
    for i in tl.range(turns, num_stages=2):
        total += tl.load(x_ptr + row * W + col + (i % WRAP) * COLS)
    tl.store(y_ptr + (tl.program_id(0) * ROWS + row) * COLS + col, total)


def _tiles_in_turn(wrap: int):
    def prepare(device):
        x, y = _normal(device, 128, 1024 * 32, dtype=HALF), _normal(device, 132 * 128, 32, dtype=HALF)
        return lambda: tiles_in_turn[(132,)](
            x, y, 1024, WRAP=wrap, W=1024 * 32, ROWS=128, COLS=32, num_warps=8
        )  # fmt: skip

    return prepare


rate("8 tiles in turn, again and again", "ns", lambda us: us / 1024 * 1e3)(_tiles_in_turn(8))
rate(
    "a tile of device memory after one of L2",
    "ns",
    lambda us: us / 1024 * 1e3,
    minus="8 tiles in turn, again and again",
)(_tiles_in_turn(1024))


@triton.jit
def lines_in_turn(x_ptr, y_ptr, lines, turns, AT_ONCE: tl.constexpr, APART: tl.constexpr):
    """One warp asks for AT_ONCE lines, all over x or APART from each other, and what they hold decides which ones come next."""
    lane = tl.arange(0, 32)
    number, seed = lane // (32 // AT_ONCE), 1
    for _ in range(turns):
        at = (seed + (0 if APART else number) * 40503).to(tl.uint32) * 747796405
        at = (at ^ (at >> 15)) * 277803737
        at = tl.umulhi(at ^ (at >> 13), tl.full((32,), lines, tl.uint32)).to(tl.int64)
        at += number * APART
        found = tl.load(x_ptr + at * 32 + lane % (32 // AT_ONCE), cache_modifier=".cg")
        seed = seed * 1664525 + tl.sum(found, 0)
    tl.store(y_ptr, seed)


def _lines_in_turn(at_once: int, apart: int = 0):
    def prepare(device):
        x = _indices(device, 1 << 30, 512 * MI)
        return lambda: lines_in_turn[(1,)](
            x, x, 16 * MI - at_once * apart, 4096, AT_ONCE=at_once, APART=apart, num_warps=1
        )  # fmt: skip

    return prepare


rate("a line of device memory", "ns", lambda us: us / 4096 * 1e3)(_lines_in_turn(1))
rate("the last of 8 lines after one", "ns", lambda us: us / 4096 * 1e3, minus="a line of device memory")(
    _lines_in_turn(8)
)
rate("the last of 8 lines in a row after one", "ns", lambda us: us / 4096 * 1e3, minus="a line of device memory")(
    _lines_in_turn(8, 1)
)


@rate("launch after a launch", "us", lambda us: us / 32, minus="latency of L1")
def _(device):
    """Behind a kernel of a millisecond, in which the CPU can issue them all."""
    x, first = _normal(device, 1024), _chase(16 * 1024, 65536, "")(device)

    def work():
        first()
        for _ in range(32):
            counted_kernels.copy[(1,)](x, x, 0, BLOCK=1024)

    return work


@triton.jit
def read_again(x_ptr, y_ptr, n, turns, apart, BLOCK: tl.constexpr):
    """The n elements from `apart` times the program's number on, `turns` blocks of them; n is a power of two."""
    total = tl.zeros((BLOCK,), tl.int32)
    own = tl.program_id(0) * apart
    for i in range(turns):
        at = x_ptr + tl.multiple_of((own + i * BLOCK) & (n - 1), 16) + tl.arange(0, BLOCK)
        total += tl.load(at, cache_modifier=".cg")
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


def _read_again(mebibytes: int, programs: int):
    """16 MiB for each program, two of 1,024 threads on an SM."""

    def prepare(device):
        n, BLOCK = mebibytes * MI // 4, 8192
        x, y = _indices(device, 100, n), _indices(device, 100, programs)
        apart = max(1, n // programs // BLOCK) * BLOCK
        return lambda: read_again[(programs,)](x, y, n, 4 * MI // BLOCK, apart, BLOCK=BLOCK, num_warps=32)

    return prepare


rate("L2, 8 MiB", "GB/s", lambda us: 2 * SMS * 16e-3 * MI / us)(_read_again(8, 2 * SMS))
rate("L2, 32 MiB", "GB/s", lambda us: 2 * SMS * 16e-3 * MI / us)(_read_again(32, 2 * SMS))
rate("L2, one SM", "GB/s", lambda us: 16e-3 * MI / us)(_read_again(8, 1))


@triton.jit
def read_own(x_ptr, y_ptr, turns, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """WORDS of the program's own, again and again out of L1."""
    total = tl.zeros((BLOCK,), tl.int32)
    x_ptr += tl.program_id(0) * WORDS
    for i in range(turns):
        total += tl.load(x_ptr + tl.multiple_of((i * BLOCK) % WORDS, 16) + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


@rate("L1, one SM", "GB/s", lambda us: 2 * 4096 * 4 * 4096 / us * 1e-3)
def _(device):
    x, y = _indices(device, 100, 2 * SMS * 16384), _indices(device, 100, 2 * SMS)
    return lambda: read_own[(2 * SMS,)](x, y, 4096, BLOCK=4096, WORDS=16384, num_warps=8)


rate("exp2, one SM", "lanes/us", lambda us: 32 * MI * 256 / SMS / us)(_exponentials(32 * MI, 256))
rate("multiply-add, one SM", "lanes/us", lambda us: 32 * MI * 2048 / SMS / us)(_multiply_adds(32 * MI, 2048))
rate("xorshift, one SM", "lanes/us", lambda us: 32 * MI * 256 * 6 / SMS / us)(_xorshifts(32 * MI, 256))


@triton.jit
def dots(a_ptr, b_ptr, c_ptr, turns, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The same product again and again: tensor cores and nothing else."""
    a = tl.load(a_ptr + tl.arange(0, BM)[:, None] * BK + tl.arange(0, BK)[None, :])
    b = tl.load(b_ptr + tl.arange(0, BN)[None, :] * BK + tl.arange(0, BK)[:, None])
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(turns):
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :], acc)


def _dots(BM: int, BN: int, BK: int, dtype, num_warps: int, programs: int):
    def prepare(device):
        a, b = _normal(device, BM, BK, dtype=dtype), _normal(device, BN, BK, dtype=dtype)
        c = _normal(device, BM, BN, dtype=FLOAT)
        return lambda: dots[(programs,)](a, b, c, 4096, BM=BM, BN=BN, BK=BK, num_warps=num_warps)

    return prepare


def _dot_rate(name: str, *shape_and_more) -> None:
    BM, BN, BK, _, _, programs = shape_and_more
    flops = 2 * BM * BN * BK * 4096 * programs
    rate(name, "TFLOP/s", lambda us: flops / us * 1e-6)(_dots(*shape_and_more))


_dot_rate("wgmma bf16", 128, 256, 128, BF16, 8, SMS)
_dot_rate("wgmma fp8", 128, 256, 128, FP8, 8, SMS)
_dot_rate("wgmma tf32", 128, 128, 64, FLOAT, 8, SMS)
_dot_rate("mma bf16", 32, 128, 64, BF16, 4, 4 * SMS)
_dot_rate("mma tf32", 32, 128, 32, FLOAT, 4, 4 * SMS)
rate("cuBLAS bf16 4096", "TFLOP/s", lambda us: 2 * 4096**3 / us * 1e-6)(
    _torch(torch.matmul, (4096, 4096), (4096, 4096))
)
rate("cuBLAS bf16 8192", "TFLOP/s", lambda us: 2 * 8192**3 / us * 1e-6)(
    _torch(torch.matmul, (8192, 8192), (8192, 8192))
)
rate("cuBLAS fp32 4096", "TFLOP/s", lambda us: 2 * 4096**3 / us * 1e-6)(
    _torch(torch.matmul, (4096, 4096), (4096, 4096), dtype=FLOAT)
)


@triton.jit
def hashed(i):
    """Numbers without an order; the last step of MurmurHash3, https://github.com/aappleby/smhasher (public domain)."""
    i = i.to(tl.uint32)
    i = (i ^ (i >> 16)) * 0x85EBCA6B
    i = (i ^ (i >> 13)) * 0xC2B2AE35
    return i ^ (i >> 16)


@triton.jit
def atomics(x_ptr, n, turns, SCATTER: tl.constexpr, SEM: tl.constexpr, BLOCK: tl.constexpr):
    """Adds to neighboring elements, or with SCATTER to places all over x; n is a power of two."""
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for i in range(turns):
        offs = here + i * tl.num_programs(0) * BLOCK
        if SCATTER:
            offs = hashed(offs).to(tl.int32)
        tl.atomic_add(x_ptr + (offs & (n - 1)), tl.full((BLOCK,), 1, x_ptr.dtype.element_ty), sem=SEM)


def _atomics(words: int, scatter: bool, dtype=torch.int32, sem: str = "relaxed", programs: int = 8 * SMS):
    def prepare(device):
        x = torch.zeros(words, dtype=dtype, device=device)
        return lambda: atomics[(programs,)](x, words, 32, SCATTER=scatter, SEM=sem, BLOCK=1024)

    return prepare


_ADDED = 8 * SMS * 32 * 1024
rate("atomics on neighbours, int32", "elements/us", lambda us: _ADDED / us)(_atomics(4 * MI, False))
rate("atomics on neighbours, fp32", "elements/us", lambda us: _ADDED / us)(_atomics(4 * MI, False, FLOAT))
rate("atomics on neighbours of 2,048, fp32", "elements/us", lambda us: _ADDED / us)(_atomics(2048, False, FLOAT))
rate("atomics scattered, int32", "elements/us", lambda us: _ADDED / us)(_atomics(4 * MI, True))
rate("atomics scattered over 4,096, int32", "elements/us", lambda us: _ADDED / us)(_atomics(4096, True))
rate("atomics on one element, int32", "elements/us", lambda us: _ADDED / us)(_atomics(1, False))
rate("atomics on one element, fp32", "elements/us", lambda us: 16 * MI / us)(_atomics(1, False, FLOAT, programs=512))
rate("atomics on neighbours, acq_rel", "elements/us", lambda us: _ADDED / us)(_atomics(4 * MI, False, sem="acq_rel"))
rate("atomics scattered, acq_rel", "elements/us", lambda us: _ADDED / us)(_atomics(4 * MI, True, sem="acq_rel"))
rate("atomics on neighbours of 2,048, acq_rel", "elements/us", lambda us: _ADDED / us)(
    _atomics(2048, False, FLOAT, "acq_rel")
)


@triton.jit
def all_over(x_ptr, n, turns, STORE: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr):
    """Loads or stores of four bytes each, at places all over x, or APART elements from one another; n is a power of two."""
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(turns):
        offs = here + i * tl.num_programs(0) * BLOCK
        offs = (offs * APART if APART else hashed(offs).to(tl.int32)) & (n - 1)
        if STORE:
            tl.store(x_ptr + offs, here)
        else:
            total += tl.load(x_ptr + offs, cache_modifier=".cg")
    if not STORE:
        tl.store(x_ptr + here, total, mask=total == 1)  # never, but the compiler cannot know


def _all_over(mebibytes: int, store: bool = False, apart: int = 0):
    def prepare(device):
        words = mebibytes * MI // 4
        x = torch.zeros(words, dtype=torch.int32, device=device)
        return lambda: all_over[(8 * SMS,)](x, words, 32, STORE=store, APART=apart, BLOCK=1024)

    return prepare


rate("loads all over 8 MiB", "sectors/us", lambda us: _ADDED / us)(_all_over(8))
rate("loads all over 2 GiB", "sectors/us", lambda us: _ADDED / us)(_all_over(2048))
rate("loads every 64 bytes", "sectors/us", lambda us: _ADDED / us)(_all_over(2048, apart=16))
rate("loads every 256 bytes", "sectors/us", lambda us: _ADDED / us)(_all_over(8192, apart=64))
rate("stores all over 8 MiB", "sectors/us", lambda us: _ADDED / us)(_all_over(8, store=True))
rate("stores all over 2 GiB", "sectors/us", lambda us: _ADDED / us)(_all_over(2048, store=True))


@triton.jit
def halves_of_sectors(x_ptr, value, BLOCK: tl.constexpr):
    """BLOCK sectors that two programs fill, one after the other, the first 16 bytes and the last 16 bytes of each."""
    sector = (tl.program_id(0) // 2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = sector[:, None] * 8 + tl.program_id(0) % 2 * 4 + tl.arange(0, 4)[None, :]
    tl.store(x_ptr + words, words.to(tl.float32) + value)


@triton.jit
def pieces_of_rows(x_ptr, value, W, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """WORDS words of each of ROWS rows, which are W words apart; the program beside this one stores the next ones."""
    row, word = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    words = row[:, None] * W + word[None, :]
    tl.store(x_ptr + words, words.to(tl.float32) + value)


def _pieces_of_rows(words: int, begin: int):
    def prepare(device):
        x = _normal(device, 64 * MI + 16, dtype=FLOAT)[begin:]
        return lambda: pieces_of_rows[(8192 // words, 2 * words)](x, 1.5, 8192, ROWS=4096 // words, WORDS=words)

    return prepare


# Each of them leaves parts of sectors to the programs beside it: in one line, or those of 64 bytes every other time in two.
rate("rows of 16 bytes", "lines/us", lambda us: 16 * MI / us)(_pieces_of_rows(4, 0))
rate("rows of 64 bytes, from within a sector", "lines/us", lambda us: 1.5 * 4 * MI / us)(_pieces_of_rows(16, 1))


@triton.jit
def sectors_of_lines(x_ptr, value, LINES, BLOCK: tl.constexpr):
    """One sector of each of BLOCK lines, in no order; what fills the rest of a line comes when it has left L2."""
    line = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64) * 1_000_003 % LINES
    words = line[:, None] * 32 + tl.program_id(1) * 8 + tl.arange(0, 8)[None, :]
    tl.store(x_ptr + words, words.to(tl.float32) + value)


@rate("sectors of lines that leave L2 in part", "sectors/us", lambda us: 16 * MI / us)
def _(device):
    x = _normal(device, 4 * MI, 32, dtype=FLOAT)
    return lambda: sectors_of_lines[(4 * MI // 256, 4)](x, 1.5, 4 * MI, BLOCK=256)


@rate("stores of halves of sectors", "sectors/us", lambda us: 64 * MI / us)
def _(device):
    x = _normal(device, 32 * MI, 8, dtype=FLOAT)
    return lambda: halves_of_sectors[(2 * 32 * MI // 256,)](x, 1.5, BLOCK=256)


@gluon.jit
def products_in_turn(x_ptr, y_ptr, turns, clocks):
    """Products of 64 x 16 and 16 x 64 by one warp group, each waited for before the next one begins: so many times a hundred, and
    for so many clocks, at least."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    in_shared: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    at = (
        x_ptr
        + gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None] * 16
        + gl.arange(0, 16, gl.SliceLayout(0, rows))[None, :]
    )
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 16], in_shared, gl.load(at))
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 16], in_shared, gl.load(at + 1024))
    hopper.fence_async_shared()
    gl.thread_barrier()
    total = gl.zeros([64, 64], gl.float32, of_total)
    begin = gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], gl.int64, is_pure=False, pack=1)
    now, done = begin, 0
    while (done < turns) | (now - begin < clocks):
        for _ in range(100):
            total = hopper.warpgroup_mma(a, b.permute((1, 0)), total, is_async=True)
            total = hopper.warpgroup_mma_wait(0, deps=(total,))
        now = gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], gl.int64, is_pure=False, pack=1)
        done += 1
    gl.store(y_ptr + gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, of_total)), gl.sum(total, 1))


_CLOCKS = 1 << 21


def _products_in_turn(turns: int, clocks: int):
    def prepare(device):
        x, y = _normal(device, 2048), _normal(device, SMS * 64, dtype=FLOAT)
        return lambda: products_in_turn[(SMS,)](x, y, turns, clocks)

    return prepare


rate("clock beside wgmma", "MHz", lambda us: _CLOCKS / us)(_products_in_turn(0, _CLOCKS))
rate("a product of 64 x 64 x 16 and its wait", "ns", lambda us: us / 1e5 * 1e3)(_products_in_turn(1000, 0))


@triton.jit
def sums_in_turn(x_ptr, turns, BLOCK: tl.constexpr):
    """Sums over all threads of a program, each of which waits for the one before."""
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    for _ in range(turns):
        x = x * 0.5 + tl.sum(x, 0) * 0.001
    tl.store(x_ptr + tl.arange(0, BLOCK), x)


@triton.jit
def atomics_in_turn(x_ptr, turns, SEM: tl.constexpr):
    """Each adds what the one before found."""
    at = tl.load(x_ptr)
    for _ in range(turns):
        at = tl.atomic_add(x_ptr, at & 1, sem=SEM)
    tl.store(x_ptr + 1, at)


def _sums_in_turn(num_warps: int):
    def prepare(device):
        x = _normal(device, 32 * num_warps, dtype=FLOAT)
        return lambda: sums_in_turn[(1,)](x, 8192, BLOCK=32 * num_warps, num_warps=num_warps)

    return prepare


def _atomics_in_turn(sem: str):
    def prepare(device):
        x = torch.zeros(2, dtype=torch.int32, device=device)
        return lambda: atomics_in_turn[(1,)](x, 8192, SEM=sem, num_warps=1)

    return prepare


rate("latency of a sum over 1 warp", "ns", lambda us: us / 8192 * 1e3)(_sums_in_turn(1))
rate("latency of a sum over 4 warps", "ns", lambda us: us / 8192 * 1e3)(_sums_in_turn(4))
rate("latency of an atomic", "ns", lambda us: us / 8192 * 1e3)(_atomics_in_turn("relaxed"))
rate("latency of an atomic, acq_rel", "ns", lambda us: us / 8192 * 1e3)(_atomics_in_turn("acq_rel"))


@triton.jit
def products(x_ptr, y_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs).to(tl.uint32)
    for _ in range(STEPS):
        x = tl.umulhi(x, x | 0x80000001)
    tl.store(y_ptr + offs, x.to(tl.int32))


@rate("multiply high, one SM", "lanes/us", lambda us: 32 * MI * 256 / SMS / us)
def _(device):
    x, y = _indices(device, 1 << 30, 32 * MI), _indices(device, 1 << 30, 32 * MI)
    return lambda: products[(32 * MI // 1024,)](x, y, STEPS=256, BLOCK=1024)


def _empty_programs(num_warps: int):
    def prepare(device):
        x = _normal(device, 1024)
        return lambda: counted_kernels.copy[(MI,)](x, x, 0, BLOCK=1024, num_warps=num_warps)

    return prepare


for _warps in (1, 8, 32):
    rate(
        f"empty programs of {_warps} warp{'s' * (_warps > 1)}",
        "programs/us",
        lambda us: MI / us,
        "launch on an idle stream",
    )(_empty_programs(_warps))


@triton.jit
def lanes_apart(x_ptr, y_ptr, turns, APART: tl.constexpr, LANES: tl.constexpr):
    """Each thread loads 16 neighbors out of L1, one after the other; the lanes of a warp lie APART elements from one
    another."""
    lanes = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float32)
    own = x_ptr + tl.program_id(0) * 32 * LANES + lanes * APART
    for i in range(turns):
        for k in tl.static_range(16):
            total += tl.load(own + (i & 1) * 16 + k)
    tl.store(y_ptr + tl.program_id(0) * LANES + lanes, total, mask=total == 1)  # never, but the compiler cannot know


def _lanes_apart(apart: int):
    def prepare(device):
        x = torch.zeros(SMS * 32 * 1024 + 32, device=device)
        y = torch.zeros(SMS * 1024, device=device)
        return lambda: lanes_apart[(SMS,)](x, y, 256, APART=apart, LANES=1024, num_warps=32)

    return prepare


for _bytes in (4, 8, 32, 128):
    rate(f"L1, lanes {_bytes} bytes apart, one SM", "instructions/us", lambda us: 32 * 256 * 16 / us)(
        _lanes_apart(_bytes // 4)
    )
