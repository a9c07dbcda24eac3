"""Atomics, with many programs at one address and with none, and sums that programs make together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation.new_kernels.case import FLOAT, INT32, KI, MI, UINT8, Work, case, empty, known, normal, place

KIND = "atomics"


@triton.jit
def count(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + tl.load(x_ptr + offs), 1)


def _count(device, n, bins):
    """Which of the bins is drawn: for one bin each number is 0."""
    x, y = known(device, bins, n), empty(device, bins, dtype=INT32)
    return Work(lambda: count[(n // 1024,)](x, y, BLOCK=1024), y, lambda: torch.bincount(x.long(), minlength=bins))


case("16 Mi atomics into one address", KIND, dict(n=16 * MI, bins=1), dict(n=4096, bins=1))(_count)
case("16 Mi atomics into 256 addresses, drawn", KIND, dict(n=16 * MI, bins=256), dict(n=4096, bins=256))(_count)


@triton.jit
def count_in_order(y_ptr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """The lanes of a warp go to addresses next to each other; all warps go to the same ones."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + offs % BINS, 1)


@case("16 Mi atomics into 256 addresses, in order", KIND, dict(n=16 * MI), dict(n=4096))
def _(device, n):
    y = empty(device, 256, dtype=INT32)

    def run():
        return count_in_order[(n // 1024,)](y, BINS=256, BLOCK=1024)

    return Work(run, y, lambda: torch.full((256,), n // 256, dtype=INT32))


@triton.jit
def add_rows(x_ptr, index_ptr, y_ptr, N: tl.constexpr):
    """The gradient of an embedding: each row is added to the row that its token names."""
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * N + tl.arange(0, N))
    tl.atomic_add(y_ptr + tl.load(index_ptr + row) * N + tl.arange(0, N), x)


def _add_rows(device, rows, table, N):
    x, y = normal(device, rows, N, dtype=FLOAT), empty(device, table, N, dtype=FLOAT)
    if table >= rows:  # each row is named at most once
        index = place(device, torch.randperm(table, generator=torch.Generator().manual_seed(0))[:rows].to(INT32))
    else:
        index = known(device, table, rows)

    def want():
        return torch.zeros_like(y).index_add_(0, index.long(), x)

    return Work(lambda: add_rows[(rows,)](x, index, y, N=N), y, want)


case(
    "add 64 Ki rows of 512 to rows of their own",
    KIND,
    dict(rows=64 * KI, table=128 * KI, N=512),
    dict(rows=5, table=9, N=64),
)(_add_rows)
case("add 64 Ki rows of 512 to 64 rows", KIND, dict(rows=64 * KI, table=64, N=512), dict(rows=9, table=3, N=64))(
    _add_rows
)


@triton.jit
def total(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """The sum of all squares: one atomic per program, all to one address."""
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.atomic_add(y_ptr, tl.sum(x * x, 0))


@case("sum of squares of 128 Mi, one atomic per program", "sums across programs", dict(n=128 * MI), dict(n=8192))
def _(device, n):
    x, y = normal(device, n), empty(device, 1, dtype=FLOAT)
    return Work(lambda: total[(n // 4096,)](x, y, BLOCK=4096), y, lambda: x.double().square().sum()[None])


@triton.jit
def highest(x_ptr, index_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_max(y_ptr + tl.load(index_ptr + offs), tl.load(x_ptr + offs).to(tl.int32))


@case("maxima of 16 Mi in 64 Ki groups", KIND, dict(n=16 * MI, groups=64 * KI), dict(n=4096, groups=50))
def _(device, n, groups):
    x, index, y = known(device, 256, n, dtype=UINT8), known(device, groups, n), empty(device, groups, dtype=INT32)

    def want():
        return torch.zeros(groups, dtype=INT32, device=x.device).scatter_reduce_(0, index.long(), x.to(INT32), "amax")

    return Work(lambda: highest[(n // 1024,)](x, index, y, BLOCK=1024), y, want)


@triton.jit
def column_totals(x_ptr, y_ptr, M, N, ROWS: tl.constexpr, BN: tl.constexpr):
    """Sums over ROWS rows in registers, then one atomic per column."""
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    rows = tl.program_id(0) * ROWS
    sums = tl.zeros((BN,), tl.float32)
    for i in range(rows, rows + ROWS):
        sums += tl.load(x_ptr + i * N + cols).to(tl.float32)
    tl.atomic_add(y_ptr + cols, sums)


@case(
    "column sums of 32768 x 4096 bf16, 256 programs add",
    "sums across programs",
    dict(M=32 * KI, N=4096),
    dict(M=256, N=512),
)
def _(device, M, N):
    x, y = normal(device, M, N), empty(device, N, dtype=FLOAT)

    def run():
        return column_totals[(M // 128, N // 256)](x, y, M, N, ROWS=128, BN=256)

    return Work(run, y, lambda: x.double().sum(0))
