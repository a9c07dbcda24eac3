"""Kernels written to be hard to count, and those of the project: what the simulator counts is checked against Nsight Compute.

Each `Case` is a piece of work, one launch or several. `aligned` says that every run of neighboring elements begins on a
sector and ends on one; on those the simulator must be within 2%, on the others within 5%. A case with `sample` is traced
on that many programs. Why one is outside its bar stands in reasons.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit import kernels as project
from gpukit.kernels.adamw import AdamW
from gpukit.kernels.cross_entropy import cross_entropy_bwd, cross_entropy_fwd
from gpukit.kernels.gelu import gelu_bwd, swiglu_bwd
from gpukit.kernels.kl_div import kl_div_bwd, kl_div_fwd
from gpukit.kernels.norms import norm_bwd, norm_fwd
from gpukit.kernels.softmax import (
    _online_bwd_config,
    softmax_bwd,
    softmax_bwd_online_kernel,
    softmax_fwd,
    softmax_fwd_persistent_kernel,
)

HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
SMS = 132  # of an H100 and an H200: the grids of persistent kernels


@dataclass(frozen=True)
class Case:
    """`prepare(device)` allocates and returns a function of no arguments: the work, done once."""

    name: str
    prepare: Callable[[str], Callable[[], object]]
    aligned: bool = True
    sample: int | None = None


CASES: dict[str, Case] = {}


def case(name: str, aligned: bool = True, sample: int | None = None):
    def register(prepare):
        CASES[name] = Case(name, prepare, aligned, sample)
        return prepare

    return register


def _zeros(device: str, *shape: int, dtype=HALF) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _random(device: str, high: int, n: int, dtype=torch.int64) -> torch.Tensor:
    index = torch.randint(high, (n,), generator=torch.Generator().manual_seed(0), dtype=dtype)
    return index if device == "meta" else index.to(device)


# ---- one dimension ------------------------------------------------------------------------------------------------


@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


def _copy(n: int, dtype=HALF, BLOCK: int = 4096, num_warps: int = 4, shift: int = 0, shift_y: int = 0):
    def prepare(device):
        x, y = _zeros(device, n + shift, dtype=dtype)[shift:], _zeros(device, n + shift_y, dtype=dtype)[shift_y:]
        return lambda: copy[(triton.cdiv(n, BLOCK),)](x, y, n, BLOCK=BLOCK, num_warps=num_warps)

    return prepare


MI = 1 << 20
case("copy fp16")(_copy(4 * MI))
case("copy fp32")(_copy(4 * MI, FLOAT))
case("copy fp64")(_copy(2 * MI, DOUBLE))
case("copy int8")(_copy(8 * MI, torch.int8, BLOCK=8192))
case("copy, small blocks")(_copy(MI, BLOCK=256))
case("copy, 8 warps")(_copy(4 * MI, FLOAT, BLOCK=2048, num_warps=8))
case("copy, masked tail", aligned=False)(_copy(4 * MI - 1357))
case("copy, both shifted by 1", aligned=False)(_copy(2 * MI, shift=1, shift_y=1))
case("copy, source shifted by 8", aligned=False)(_copy(2 * MI, shift=8))
case("copy, destination shifted by 4", aligned=False)(_copy(2 * MI, FLOAT, shift_y=4))
case("copy 512 MB", sample=64)(_copy(128 * MI, FLOAT, BLOCK=8192, num_warps=8))


@triton.jit
def copy_strided(x_ptr, y_ptr, n, stride_x, stride_y, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(y_ptr + offs * stride_y, tl.load(x_ptr + offs * stride_x, mask=mask), mask=mask)


def _copy_strided(n: int, stride_x: int, stride_y: int, dtype=HALF):
    def prepare(device):
        x, y = _zeros(device, n * stride_x, dtype=dtype), _zeros(device, n * stride_y, dtype=dtype)
        return lambda: copy_strided[(triton.cdiv(n, 1024),)](x, y, n, stride_x, stride_y, BLOCK=1024)

    return prepare


case("load stride 2")(_copy_strided(MI, 2, 1))
case("load stride 3", aligned=False)(_copy_strided(MI, 3, 1))
case("load stride 16")(_copy_strided(MI, 16, 1))
case("load stride 32")(_copy_strided(MI, 32, 1))
case("load stride 64")(_copy_strided(MI, 64, 1))
case("load stride 256")(_copy_strided(MI // 4, 256, 1))
case("load stride 16 fp32")(_copy_strided(MI, 16, 1, FLOAT))
case("store stride 2")(_copy_strided(MI, 1, 2))
case("store stride 16")(_copy_strided(MI, 1, 16))
case("store stride 64")(_copy_strided(MI, 1, 64))


@triton.jit
def reverse(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(y_ptr + offs, tl.load(x_ptr + (n - 1) - offs, mask=mask), mask=mask)


@case("reverse")
def _(device):
    x, y = _zeros(device, 2 * MI, dtype=FLOAT), _zeros(device, 2 * MI, dtype=FLOAT)
    return lambda: reverse[(2048,)](x, y, 2 * MI, BLOCK=1024)


@triton.jit
def pairs(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Neighbors that belong together, loaded one after another: the second load asks for the sectors of the first."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    re = tl.load(x_ptr + 2 * offs)
    im = tl.load(x_ptr + 2 * offs + 1)
    tl.store(y_ptr + offs, re * re + im * im)


@case("interleaved pairs")
def _(device):
    x, y = _zeros(device, 4 * MI, dtype=FLOAT), _zeros(device, 2 * MI, dtype=FLOAT)
    return lambda: pairs[(1024,)](x, y, 2 * MI, BLOCK=2048)


@triton.jit
def stencil(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x_ptr + offs - 1, mask=(offs > 0) & (offs < n), other=0.0)
    here = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    right = tl.load(x_ptr + offs + 1, mask=offs + 1 < n, other=0.0)
    tl.store(y_ptr + offs, left + here + right, mask=offs < n)


@case("stencil of 3", aligned=False)
def _(device):
    x, y = _zeros(device, 2 * MI, dtype=FLOAT), _zeros(device, 2 * MI, dtype=FLOAT)
    return lambda: stencil[(1024,)](x, y, 2 * MI, BLOCK=2048)


@triton.jit
def add_in_place(x_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs) + 1)


@case("in place")
def _(device):
    x = _zeros(device, 4 * MI, dtype=FLOAT)
    return lambda: add_in_place[(1024,)](x, BLOCK=4096)


@triton.jit
def grid_stride_copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    for start in tl.range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


@case("persistent copy")
def _(device):
    x, y = _zeros(device, 4 * MI, dtype=FLOAT), _zeros(device, 4 * MI, dtype=FLOAT)
    return lambda: grid_stride_copy[(2 * SMS,)](x, y, 4 * MI, BLOCK=2048, num_warps=8)


# ---- gathers, scatters, atomics -----------------------------------------------------------------------------------


@triton.jit
def gather(x_ptr, index_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + tl.load(index_ptr + offs)))


@case("gather elements", aligned=False)
def _(device):
    x, y = _zeros(device, 8 * MI, dtype=FLOAT), _zeros(device, MI, dtype=FLOAT)
    index = _random(device, 8 * MI, MI)
    return lambda: gather[(512,)](x, index, y, BLOCK=2048)


@triton.jit
def scatter(x_ptr, index_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + tl.load(index_ptr + offs), tl.load(x_ptr + offs))


@case("scatter elements", aligned=False)
def _(device):
    x, y = _zeros(device, MI, dtype=FLOAT), _zeros(device, 8 * MI, dtype=FLOAT)
    index = torch.randperm(8 * MI, generator=torch.Generator().manual_seed(0))[:MI].to(device)
    return lambda: scatter[(512,)](x, index, y, BLOCK=2048)


@triton.jit
def gather_rows(x_ptr, index_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    """An embedding: one row per program."""
    row = tl.load(index_ptr + tl.program_id(0))
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_cols + offs, mask=offs < n_cols)
    tl.store(y_ptr + tl.program_id(0) * n_cols + offs, x, mask=offs < n_cols)


def _gather_rows(n_cols: int):
    def prepare(device):
        x, y = _zeros(device, 8192, n_cols), _zeros(device, 4096, n_cols)
        index = _random(device, 8192, 4096)
        return lambda: gather_rows[(4096,)](x, index, y, n_cols, BLOCK=triton.next_power_of_2(n_cols))

    return prepare


case("embedding, rows of 512")(_gather_rows(512))
case("embedding, rows of 300", aligned=False)(_gather_rows(300))


@triton.jit
def histogram(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + tl.load(x_ptr + offs), 1)


@case("histogram", aligned=False)
def _(device):
    x, y = _random(device, 4096, MI, torch.int32), _zeros(device, 4096, dtype=torch.int32)
    return lambda: histogram[(1024,)](x, y, BLOCK=1024)


@triton.jit
def atomic_rows(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * n_cols + offs, mask=offs < n_cols, other=0.0)
    tl.atomic_add(y_ptr + offs, x, mask=offs < n_cols)


@case("column sums by atomics")
def _(device):
    x, y = _zeros(device, 1024, 2048, dtype=FLOAT), _zeros(device, 2048, dtype=FLOAT)
    return lambda: atomic_rows[(1024,)](x, y, 2048, BLOCK=2048)


# ---- rows ---------------------------------------------------------------------------------------------------------


@triton.jit
def row_softmax(x_ptr, y_ptr, stride_m, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_m + offs, mask=offs < n_cols, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * stride_m + offs, e / tl.sum(e, 0), mask=offs < n_cols)


def _rows(M: int, N: int, stride: int, dtype=HALF, num_warps: int = 4):
    def prepare(device):
        x, y = _zeros(device, M, stride, dtype=dtype), _zeros(device, M, stride, dtype=dtype)
        BLOCK = triton.next_power_of_2(N)
        return lambda: row_softmax[(M,)](x, y, stride, N, BLOCK=BLOCK, num_warps=num_warps)

    return prepare


case("rows of 1024")(_rows(2048, 1024, 1024))
case("rows of 781", aligned=False)(_rows(2048, 781, 781))
case("rows of 784", aligned=False)(_rows(2048, 784, 784))
case("rows of 776", aligned=False)(_rows(2048, 776, 776))
case("rows of 781 fp32", aligned=False)(_rows(2048, 781, 781, FLOAT))
case("rows of 781, padded to 1024", aligned=False)(_rows(2048, 781, 1024))
case("rows of 30, padded to 32", aligned=False)(_rows(2048, 30, 32, num_warps=1))
case("rows of 65536", sample=16)(_rows(4096, 65536, 65536, BF16, num_warps=16))


@triton.jit
def persistent_softmax(x_ptr, y_ptr, M, n_cols, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """A fixed number of programs walk over the rows; with STAGES > 1 the next rows are on their way to shared memory."""
    offs = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(x_ptr + row * n_cols + offs, mask=offs < n_cols, other=-float("inf")).to(tl.float32)
        e = tl.exp(x - tl.max(x, 0))
        tl.store(y_ptr + row * n_cols + offs, e / tl.sum(e, 0), mask=offs < n_cols)


def _persistent(N: int, STAGES: int):
    def prepare(device):
        x, y = _zeros(device, 2048, N), _zeros(device, 2048, N)
        BLOCK = triton.next_power_of_2(N)
        return lambda: persistent_softmax[(4 * SMS,)](x, y, 2048, N, BLOCK=BLOCK, STAGES=STAGES)

    return prepare


case("persistent softmax, rows of 1024")(_persistent(1024, 2))
case("persistent softmax, rows of 781", aligned=False)(_persistent(781, 2))


@triton.jit
def row_variance(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    """Two passes over a row that is longer than the block: what of the second does L1 still hold?"""
    row = x_ptr + tl.program_id(0) * n_cols
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):
        total += tl.load(row + start + tl.arange(0, BLOCK))
    mean = tl.sum(total, 0) / n_cols
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):
        d = tl.load(row + start + tl.arange(0, BLOCK)) - mean
        total += d * d
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0) / n_cols)


def _variance(M: int, N: int, num_warps: int):
    def prepare(device):
        x, y = _zeros(device, M, N, dtype=FLOAT), _zeros(device, M, dtype=FLOAT)
        return lambda: row_variance[(M,)](x, y, N, BLOCK=1024, num_warps=num_warps)

    return prepare


case("two passes, rows of 4 KiB")(_variance(1024, 1024, 4))
case("two passes, rows of 16 KiB")(_variance(1024, 4096, 8))
case("two passes, rows of 64 KiB")(_variance(512, 16384, 8))
case("two passes, rows of 256 KiB")(_variance(264, 65536, 16))


@triton.jit
def column_sums(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    offs_n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for start in range(0, M, BM):
        offs_m = start + tl.arange(0, BM)
        mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
        total += tl.sum(tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :], mask=mask, other=0.0), 0)
    tl.store(y_ptr + offs_n, total, mask=offs_n < N)


def _columns(M: int, N: int):
    def prepare(device):
        x, y = _zeros(device, M, N, dtype=FLOAT), _zeros(device, N, dtype=FLOAT)
        return lambda: column_sums[(triton.cdiv(N, 32),)](x, y, M, N, BM=64, BN=32)

    return prepare


case("column sums")(_columns(1024, 4096))
case("column sums, ragged", aligned=False)(_columns(1000, 4001))


@triton.jit
def rms_norm(x_ptr, w_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * n_cols + offs, mask=offs < n_cols, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + offs, mask=offs < n_cols, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / n_cols + 1e-6) * w
    tl.store(y_ptr + tl.program_id(0) * n_cols + offs, y, mask=offs < n_cols)


@case("rms norm: a vector that all share")
def _(device):
    x, w, y = _zeros(device, 2048, 2048), _zeros(device, 2048), _zeros(device, 2048, 2048)
    return lambda: rms_norm[(2048,)](x, w, y, 2048, BLOCK=2048, num_warps=8)


@triton.jit
def rows_of_a_program(x_ptr, dy_ptr, dw_ptr, M, n_cols, BLOCK: tl.constexpr):
    """Partial sums over rows, one of them per program: the backward of a norm."""
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    rows = tl.cdiv(M, tl.num_programs(0))
    first = tl.program_id(0) * rows
    for row in range(first, min(first + rows, M)):
        x = tl.load(x_ptr + row * n_cols + offs, mask=offs < n_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * n_cols + offs, mask=offs < n_cols, other=0.0).to(tl.float32)
        total += x * dy
    tl.store(dw_ptr + tl.program_id(0) * n_cols + offs, total, mask=offs < n_cols)


@case("partial sums of rows")
def _(device):
    x, dy, dw = _zeros(device, 2048, 1024), _zeros(device, 2048, 1024), _zeros(device, SMS, 1024, dtype=FLOAT)
    return lambda: rows_of_a_program[(SMS,)](x, dy, dw, 2048, 1024, BLOCK=1024)


@triton.jit
def triangle(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Row i has i + 1 elements, as under a causal mask."""
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + offs, mask=offs <= row, other=0.0)
    tl.store(y_ptr + row * N + offs, x, mask=offs <= row)


@case("triangle", aligned=False)
def _(device):
    x, y = _zeros(device, 2048, 2048), _zeros(device, 2048, 2048)
    return lambda: triangle[(2048,)](x, y, 2048, BLOCK=2048)


@triton.jit
def rope(x_ptr, cos_ptr, sin_ptr, y_ptr, H: tl.constexpr, HALF_D: tl.constexpr):
    token = tl.program_id(0)
    offs = tl.arange(0, HALF_D)
    cos, sin = tl.load(cos_ptr + token * HALF_D + offs), tl.load(sin_ptr + token * HALF_D + offs)
    x = token * H * 2 * HALF_D + tl.arange(0, H)[:, None] * 2 * HALF_D + offs[None, :]
    a, b = tl.load(x_ptr + x), tl.load(x_ptr + x + HALF_D)
    tl.store(y_ptr + x, a * cos[None, :] - b * sin[None, :])
    tl.store(y_ptr + x + HALF_D, b * cos[None, :] + a * sin[None, :])


@case("rotary embedding")
def _(device):
    x, y = _zeros(device, 1024, 16, 128), _zeros(device, 1024, 16, 128)
    cos, sin = _zeros(device, 1024, 64), _zeros(device, 1024, 64)
    return lambda: rope[(1024,)](x, cos, sin, y, H=16, HALF_D=64)


# ---- tiles --------------------------------------------------------------------------------------------------------


@triton.jit
def transpose(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    x = tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :], mask=mask)
    tl.store(y_ptr + offs_n[None, :] * M + offs_m[:, None], x, mask=mask)


def _transpose(M: int, N: int, BM: int, BN: int, dtype=HALF):
    def prepare(device):
        x, y = _zeros(device, M, N, dtype=dtype), _zeros(device, N, M, dtype=dtype)
        return lambda: transpose[(triton.cdiv(M, BM), triton.cdiv(N, BN))](x, y, M, N, BM=BM, BN=BN)

    return prepare


case("transpose, 64x64")(_transpose(2048, 1024, 64, 64))
case("transpose, 32x32 fp32")(_transpose(1024, 1024, 32, 32, FLOAT))
case("transpose, 1x1024")(_transpose(1024, 1024, 1, 1024))
case("transpose, 1024x1")(_transpose(1024, 1024, 1024, 1))
case("transpose, 16x16")(_transpose(512, 512, 16, 16))
case("transpose 1000x1000, 64x64", aligned=False)(_transpose(1000, 1000, 64, 64))


@triton.jit
def copy_2d(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    tl.store(y_ptr + offs_m * N + offs_n, tl.load(x_ptr + offs_m * N + offs_n, mask=mask), mask=mask)


def _copy_2d(M: int, N: int, BM: int, BN: int, dtype=HALF):
    def prepare(device):
        x, y = _zeros(device, M, N, dtype=dtype), _zeros(device, M, N, dtype=dtype)
        return lambda: copy_2d[(triton.cdiv(M, BM), triton.cdiv(N, BN))](x, y, M, N, BM=BM, BN=BN)

    return prepare


case("tiles of 64x64")(_copy_2d(2048, 2048, 64, 64))
case("tiles of 128x16")(_copy_2d(2048, 1024, 128, 16))
case("tiles of 16x8")(_copy_2d(512, 512, 16, 8))
case("tiles of 64x64, ragged", aligned=False)(_copy_2d(1500, 1500, 64, 64))


@triton.jit
def permute(x_ptr, y_ptr, B, H, T, D: tl.constexpr, BT: tl.constexpr):
    """[B, T, H, D] -> [B, H, T, D]."""
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    offs_t = (tl.program_id(0) * BT + tl.arange(0, BT))[:, None]
    offs_d = tl.arange(0, D)[None, :]
    x = tl.load(x_ptr + ((b * T + offs_t) * H + h) * D + offs_d, mask=offs_t < T)
    tl.store(y_ptr + ((b * H + h) * T + offs_t) * D + offs_d, x, mask=offs_t < T)


@case("permute heads")
def _(device):
    x, y = _zeros(device, 2, 1024, 16, 64), _zeros(device, 2, 16, 1024, 64)
    return lambda: permute[(16, 32)](x, y, 2, 16, 1024, D=64, BT=64)


@triton.jit
def stencil_2d(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    i = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    j = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    mask = (i > 0) & (i < M - 1) & (j > 0) & (j < N - 1)
    x = x_ptr + i * N + j
    total = tl.load(x, mask=mask) + tl.load(x - 1, mask=mask) + tl.load(x + 1, mask=mask)
    total += tl.load(x - N, mask=mask) + tl.load(x + N, mask=mask)
    tl.store(y_ptr + i * N + j, total, mask=mask)


@case("stencil of 5, tiles of 32x64", aligned=False)
def _(device):
    x, y = _zeros(device, 1024, 1024, dtype=FLOAT), _zeros(device, 1024, 1024, dtype=FLOAT)
    return lambda: stencil_2d[(32, 16)](x, y, 1024, 1024, BM=32, BN=64)


# ---- matrices -----------------------------------------------------------------------------------------------------


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """c = a @ b; GROUP_M = 1: tiles in rows. SPLIT_K > 1: that many programs share a tile and add to it."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP_M * tiles_n)
    rows = min(tiles_m - group * GROUP_M, GROUP_M)
    pid_m = group * GROUP_M + (pid % (GROUP_M * tiles_n)) % rows
    pid_n = (pid % (GROUP_M * tiles_n)) // rows
    offs_m = pid_m * BM + tl.arange(0, BM)
    offs_n = pid_n * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(tl.program_id(1) * BK, K, BK * SPLIT_K):
        offs_k = k + tl.arange(0, BK)
        a_mask = (offs_m[:, None] < M) & (offs_k[None, :] < K)
        b_mask = (offs_k[:, None] < K) & (offs_n[None, :] < N)
        a = tl.load(a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc)
    c = c_ptr + offs_m[:, None] * N + offs_n[None, :]
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    if SPLIT_K == 1:
        tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=mask)
    else:
        tl.atomic_add(c, acc, mask=mask)


def _matmul(M, N, K, BM, BN, BK, GROUP_M=1, SPLIT_K=1, dtype=BF16, transposed=(), num_warps=4, num_stages=3):
    def prepare(device):
        a = _zeros(device, K, M, dtype=dtype).t() if "a" in transposed else _zeros(device, M, K, dtype=dtype)
        b = _zeros(device, N, K, dtype=dtype).t() if "b" in transposed else _zeros(device, K, N, dtype=dtype)
        c = _zeros(device, M, N, dtype=dtype if SPLIT_K == 1 else FLOAT)
        grid = (triton.cdiv(M, BM) * triton.cdiv(N, BN), SPLIT_K)
        return lambda: matmul[grid](
            a, b, c, M, N, K, *a.stride(), *b.stride(), BM=BM, BN=BN, BK=BK, GROUP_M=GROUP_M, SPLIT_K=SPLIT_K,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip

    return prepare


case("matmul 512, 64x64x32")(_matmul(512, 512, 512, 64, 64, 32))
case("matmul 1024, 128x128x64")(_matmul(1024, 1024, 1024, 128, 128, 64, num_warps=8))
case("matmul 1024, 64x64x32, 1 stage")(_matmul(1024, 1024, 1024, 64, 64, 32, num_stages=1))
case("matmul 512, a @ b.T")(_matmul(512, 512, 512, 64, 64, 64, transposed="b"))
case("matmul 512, a.T @ b")(_matmul(512, 512, 512, 64, 64, 64, transposed="a"))
case("matmul 512 fp32")(_matmul(512, 512, 512, 64, 64, 32, dtype=FLOAT))
case("matmul 500, ragged", aligned=False)(_matmul(500, 500, 500, 64, 64, 32))
case("matmul 1000, ragged", aligned=False)(_matmul(1000, 1000, 1000, 64, 128, 64))
case("matmul 256x256x4096, split 8")(_matmul(256, 256, 4096, 64, 64, 64, SPLIT_K=8))
case("matmul 4096, rows of tiles", sample=6)(_matmul(4096, 4096, 4096, 128, 128, 64, num_warps=8))
case("matmul 4096, groups of 8", sample=6)(_matmul(4096, 4096, 4096, 128, 128, 64, GROUP_M=8, num_warps=8))
case("matmul 8192, rows of tiles", sample=4)(_matmul(8192, 8192, 8192, 128, 256, 64, num_warps=8))
case("matmul 8192, groups of 8", sample=4)(_matmul(8192, 8192, 8192, 128, 256, 64, GROUP_M=8, num_warps=8))


@triton.jit
def copy_by_descriptor(x, y, BM: tl.constexpr, BN: tl.constexpr):
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    y.store([i, j], x.load([i, j]))


def _by_descriptor(M: int, N: int, BM: int, BN: int, width: int | None = None):
    def prepare(device):
        x, y = (_zeros(device, M, width or N)[:, :N] for _ in range(2))
        blocks = [TensorDescriptor(t, [M, N], [t.stride(0), 1], [BM, BN]) for t in (x, y)]
        return lambda: copy_by_descriptor[(triton.cdiv(M, BM), triton.cdiv(N, BN))](*blocks, BM=BM, BN=BN)

    return prepare


case("descriptor, tiles of 64x64")(_by_descriptor(2048, 2048, 64, 64))
case("descriptor, tiles of 128x32")(_by_descriptor(1024, 1024, 128, 32))
case("descriptor, ragged", aligned=False)(_by_descriptor(1000, 1000, 64, 64))


@triton.jit
def matmul_descriptors(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr):
    """a @ b.T on a fixed number of programs."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        group = tile // (GROUP_M * tiles_n)
        rows = min(tiles_m - group * GROUP_M, GROUP_M)
        i = (group * GROUP_M + (tile % (GROUP_M * tiles_n)) % rows) * BM
        j = (tile % (GROUP_M * tiles_n)) // rows * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(a.load([i, k]), b.load([j, k]).T, acc)
        c.store([i, j], acc.to(tl.bfloat16))


def _descriptors(M: int, N: int, K: int, BM: int, BN: int, BK: int, GROUP_M: int):
    def prepare(device):
        a, b, c = (_zeros(device, *shape, dtype=BF16) for shape in ((M, K), (N, K), (M, N)))
        blocks = [TensorDescriptor.from_tensor(t, s) for t, s in ((a, [BM, BK]), (b, [BN, BK]), (c, [BM, BN]))]
        return lambda: matmul_descriptors[(min(SMS, triton.cdiv(M, BM) * triton.cdiv(N, BN)),)](
            *blocks, M, N, K, BM=BM, BN=BN, BK=BK, GROUP_M=GROUP_M, num_warps=8, num_stages=3
        )

    return prepare


case("matmul 1024, descriptors")(_descriptors(1024, 1024, 1024, 128, 128, 64, 8))
case("matmul 4096, descriptors, persistent", sample=6)(_descriptors(4096, 4096, 4096, 128, 128, 64, 8))


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, o_ptr, T, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    head = tl.program_id(1).to(tl.int64) * T * D
    offs_m, offs_d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + head + offs_m[:, None] * D + offs_d[None, :])
    m_i, l_i = tl.full((BM,), -float("inf"), tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, T, BN):
        offs_n = start + tl.arange(0, BN)
        k = tl.load(k_ptr + head + offs_n[None, :] * D + offs_d[:, None])
        s = tl.dot(q, k) * scale
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + head + offs_n[:, None] * D + offs_d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
    tl.store(o_ptr + head + offs_m[:, None] * D + offs_d[None, :], (acc / l_i[:, None]).to(o_ptr.dtype.element_ty))


def _attention(heads: int, T: int, D: int, BM: int, BN: int, num_warps: int):
    def prepare(device):
        q, k, v, o = (_zeros(device, heads, T, D, dtype=BF16) for _ in range(4))
        return lambda: attention[(T // BM, heads)](q, k, v, o, T, 0.1, D=D, BM=BM, BN=BN, num_warps=num_warps)

    return prepare


case("attention 4 heads, 1024 tokens")(_attention(4, 1024, 64, 128, 64, 4))
case("attention 16 heads, 16384 tokens", sample=2)(_attention(16, 16384, 128, 128, 64, 8))


# ---- what L2 keeps ------------------------------------------------------------------------------------------------


@triton.jit
def twice(x_ptr, y_ptr, half, BLOCK: tl.constexpr):
    """Reads two blocks half a tensor apart: everything is read twice, the second time half a launch later."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x_ptr + offs), tl.load(x_ptr + (offs + half) % (2 * half))
    tl.store(y_ptr + tl.program_id(0), tl.sum(a + b, 0))


def _twice(megabytes: int):
    def prepare(device):
        n = megabytes * MI // 4
        x, y = _zeros(device, n, dtype=FLOAT), _zeros(device, n // 4096, dtype=FLOAT)
        return lambda: twice[(n // 4096,)](x, y, n // 2, BLOCK=4096, num_warps=8)

    return prepare


case("16 MiB twice")(_twice(16))
case("32 MiB twice")(_twice(32))
case("48 MiB twice")(_twice(48))
case("64 MiB twice")(_twice(64))
case("128 MiB twice")(_twice(128))


# ---- the project's own --------------------------------------------------------------------------------------------


def own(
    name: str, work: Callable, *shapes: tuple[int, ...], dtype=BF16, aligned: bool = True, sample: int | None = None
):
    """What gpukit.kernels launches for `work(*tensors)`, zeros of these shapes: a line for each form of a kernel."""

    def prepare(device):
        tensors = [_zeros(device, *shape, dtype=dtype) for shape in shapes]
        return lambda: work(*tensors)

    case(f"gpukit {name}", aligned, sample)(prepare)


own("softmax 2048x1024 bf16", softmax_fwd, (2048, 1024))
own("softmax 2048x781 bf16", softmax_fwd, (2048, 781), aligned=False)
own("softmax 4096x4096 bf16", softmax_fwd, (4096, 4096), sample=32)
own("softmax 512x131072 bf16, online", softmax_fwd, (512, 131072), sample=2)
own("softmax 2048x1000 bf16, padded rows", lambda x: softmax_fwd(x[:, :1000]), (2048, 1024), aligned=False)
own("softmax 1024x1024 bf16, interleaved", lambda x: softmax_fwd(x[:, ::2]), (1024, 2048))
own("softmax backward 2048x1024 bf16", softmax_bwd, (2048, 1024), (2048, 1024))
own("softmax backward 2048x781 fp32", softmax_bwd, (2048, 781), (2048, 781), dtype=FLOAT, aligned=False)
own("log_softmax 2048x1024 bf16", partial(softmax_fwd, log=True), (2048, 1024))


@case("gpukit softmax backward 264x65536 bf16, online", sample=4)
def _(device):
    y, dy, dx = (_zeros(device, 264, 65536, dtype=BF16) for _ in range(3))
    # On Hopper softmax_bwd lets several programs share such rows; this is the kernel of every other GPU.
    return lambda: softmax_bwd_online_kernel[(264,)](
        y, dy, dx, *dy.stride(), 65536, LOG=False, **_online_bwd_config(65536, BF16)
    )


@case("gpukit softmax 1024x32768 bf16, persistent", sample=33)
def _(device):
    x, y = _zeros(device, 1024, 32768, dtype=BF16), _zeros(device, 1024, 32768, dtype=BF16)
    return lambda: softmax_fwd_persistent_kernel[(SMS,)](
        x, y, 32768, 1, 1024, 32768, LOG=False, BLOCK_N=32768, EVEN=True, NUM_STAGES=3, ACC=tl.float32, num_warps=16
    )


own("gelu 2048x2048 bf16", project.gelu, (2048, 2048))
own("gelu backward 2048x2048 bf16", partial(gelu_bwd, bias=None, approximate="none"), (2048, 2048), (2048, 2048))
own("bias_gelu 1000x1000 bf16", project.bias_gelu, (1000, 1000), (1000,), aligned=False)
own("bias_gelu backward 2048x1024 bf16", partial(gelu_bwd, approximate="none"), (2048, 1024), (2048, 1024), (1024,))
own("swiglu 2048x1024 bf16", project.swiglu, (2048, 1024), (2048, 1024))
own("swiglu backward 2048x1024 bf16", swiglu_bwd, *[(2048, 1024)] * 3)
own("rms_norm 2048x2048 bf16", project.rms_norm, (2048, 2048), (2048,))
own("layer_norm 2048x1000 bf16", project.layer_norm, (2048, 1000), (1000,), (1000,), aligned=False)
own(
    "layer_norm 264x65536 bf16, online",
    lambda x, weight, bias: norm_fwd(x, None, weight, bias, 1e-5, centre=True),
    (264, 65536), (65536,), (65536,), sample=2,
)  # fmt: skip
own("residual_rms_norm 2048x2048 bf16", project.residual_rms_norm, (2048, 2048), (2048, 2048), (2048,))
own("rope 2x16x512x128 bf16", project.rope, (2, 16, 512, 128), (2, 4, 512, 128), (512, 64), (512, 64))
own("kl_div 2048x1024 bf16", partial(kl_div_fwd, log_target=False, reduced=True), (2048, 1024), (2048, 1024))
own("kl_div backward 2048x1024 bf16", partial(kl_div_bwd, log_target=False, reduced=True, scale=1.0), (2048, 1024), ())


def _norm_backward(M: int, N: int, centre: bool):
    def prepare(device):
        dy, x, w = _zeros(device, M, N, dtype=BF16), _zeros(device, M, N, dtype=BF16), _zeros(device, N, dtype=BF16)
        stats = _zeros(device, 1 + centre, M, dtype=FLOAT)
        return lambda: norm_bwd(dy, None, x, w, w if centre else None, stats)

    return prepare


case("gpukit rms_norm backward 2048x2048 bf16")(_norm_backward(2048, 2048, centre=False))
case("gpukit layer_norm backward 2048x1000 bf16", aligned=False)(_norm_backward(2048, 1000, centre=True))


def _losses(M: int, V: int):
    def prepare(device):
        x, target = _zeros(device, M, V, dtype=BF16), _zeros(device, M, dtype=torch.int64)
        return lambda: cross_entropy_fwd(x, target, -100, 0.0, 0.0)

    return prepare


case("gpukit cross_entropy 2048x1024 bf16")(_losses(2048, 1024))
case("gpukit cross_entropy 264x65537 bf16", aligned=False)(_losses(264, 65537))


@case("gpukit cross_entropy with its gradient in place, 132x32768 bf16")
def _(device):
    x, target = _zeros(device, 132, 32768, dtype=BF16), _zeros(device, 132, dtype=torch.int64)
    one = torch.ones((), device=device)
    return lambda: cross_entropy_fwd(x, target, -100, 0.0, 0.0, scale=one)


@case("gpukit cross_entropy backward 66x32768 bf16")
def _(device):
    x, target = _zeros(device, 66, 32768, dtype=BF16), _zeros(device, 66, dtype=torch.int64)
    stats, dloss = _zeros(device, 66, 2, dtype=FLOAT), _zeros(device, 66, dtype=FLOAT)
    return lambda: cross_entropy_bwd(x, target, stats, dloss, -100, 0.0, 0.0)


@case("gpukit linear_cross_entropy 1024x64, 4096 classes, bf16")
def _(device):
    x, w = _zeros(device, 1024, 64, dtype=BF16), _zeros(device, 4096, 64, dtype=BF16)
    target = _zeros(device, 1024, dtype=torch.int64)
    return lambda: project.linear_cross_entropy(x, w.requires_grad_(), target)


def _adamw(dtype: torch.dtype, **options):
    def prepare(device):
        params = [torch.nn.Parameter(_zeros(device, n, dtype=dtype)) for n in (2 * MI, 4096, 1001)]
        for p in params:
            p.grad = torch.zeros_like(p)
        return AdamW(params, **options).step

    return prepare


case("gpukit adamw 2 M fp32", aligned=False)(_adamw(FLOAT))
case("gpukit adamw 2 M bf16, master weights, clipped", aligned=False)(_adamw(BF16, master_weights=True, max_norm=1.0))
