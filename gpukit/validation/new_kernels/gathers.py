"""Gathers whose indices are known: small tables, bags of rows, sparse rows, pages and columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation import counted_kernels
from gpukit.validation.new_kernels.case import FLOAT, INT32, KI, MI, UINT8, Work, case, empty, known, normal, place

KIND = "gathers"


@triton.jit
def look_up(index_ptr, table_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(table_ptr + tl.load(index_ptr + offs).to(tl.int32)))


@case("look 64 Mi bytes up in a table of 256", KIND, dict(n=64 * MI), dict(n=4096))
def _(device, n):
    index, table = known(device, 256, n, dtype=UINT8), normal(device, 256, dtype=FLOAT)
    y = empty(device, n, dtype=FLOAT)
    return Work(lambda: look_up[(n // 1024,)](index, table, y, BLOCK=1024), y, lambda: table[index.long()])


@case("gather 16 Mi within windows of 4096", KIND, dict(n=16 * MI), dict(n=8192))
def _(device, n):
    x, y = normal(device, n, dtype=FLOAT), empty(device, n, dtype=FLOAT)
    window = torch.arange(n, dtype=INT32) // 4096 * 4096
    index = place(device, window + known("cpu", 4096, n))

    def run():
        return counted_kernels.gather[(n // 1024,)](x, index, y, BLOCK=1024)

    return Work(run, y, lambda: x[index.long()])


@triton.jit
def bag(table_ptr, index_ptr, y_ptr, SIZE: tl.constexpr, N: tl.constexpr):
    """The sum of SIZE rows of a table, one bag per program, row after row."""
    sums = tl.zeros((N,), tl.float32)
    for i in range(SIZE):
        row = tl.load(index_ptr + tl.program_id(0) * SIZE + i)
        sums += tl.load(table_ptr + row.to(tl.int64) * N + tl.arange(0, N))
    tl.store(y_ptr + tl.program_id(0) * N + tl.arange(0, N), sums)


@case("bags of 32 rows of 128 fp32", KIND, dict(bags=16 * KI, rows=MI), dict(bags=5, rows=90))
def _(device, bags, rows):
    table, y = normal(device, rows, 128, dtype=FLOAT), empty(device, bags, 128, dtype=FLOAT)
    index = known(device, rows, bags, 32)

    def run():
        return bag[(bags,)](table, index, y, SIZE=32, N=128, num_warps=4)

    return Work(run, y, lambda: torch.stack([table[i.long()] for i in index.t()]).sum(0))


@triton.jit
def sparse_rows(first_ptr, column_ptr, value_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    """A sparse matrix times a vector; how long a row is, only its data say."""
    row = tl.program_id(0)
    end = tl.load(first_ptr + row + 1)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.load(first_ptr + row), end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        column = tl.load(column_ptr + offs, mask=offs < end, other=0)
        value = tl.load(value_ptr + offs, mask=offs < end, other=0.0)
        sums += value * tl.load(x_ptr + column, mask=offs < end, other=0.0)
    tl.store(y_ptr + row, tl.sum(sums, 0))


@case(
    "sparse matrix of 64 Ki rows of 1 to 511", KIND, dict(rows=64 * KI, columns=MI), dict(rows=7, columns=50), sample=64
)
def _(device, rows, columns):
    lengths = 1 + known("cpu", 511, rows)
    first = torch.cat([torch.zeros(1, dtype=INT32), lengths.cumsum(0).to(INT32)])
    n = int(first[-1])
    column, value = known(device, columns, n), normal(device, n, dtype=FLOAT)
    x, y = normal(device, columns, dtype=FLOAT), empty(device, rows, dtype=FLOAT)
    first = place(device, first)

    def want():
        row = torch.repeat_interleave(torch.arange(rows), lengths.long()).to(x.device)
        product = value.double() * x[column.long()].double()
        return torch.zeros(rows, dtype=torch.float64, device=x.device).index_add_(0, row, product)

    return Work(lambda: sparse_rows[(rows,)](first, column, value, x, y, BLOCK=128, num_warps=1), y, want)


@triton.jit
def copy_pages(x_ptr, page_ptr, y_ptr, SIZE: tl.constexpr):
    page = tl.load(page_ptr + tl.program_id(0)).to(tl.int64)
    offs = tl.arange(0, SIZE)
    tl.store(y_ptr + tl.program_id(0) * SIZE + offs, tl.load(x_ptr + page * SIZE + offs))


@case("64 Ki pages of 4 KiB in another order", KIND, dict(pages=64 * KI), dict(pages=9))
def _(device, pages):
    x, y = normal(device, pages, 2048), empty(device, pages, 2048)
    order = place(device, torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(INT32))
    return Work(lambda: copy_pages[(pages,)](x, order, y, SIZE=2048), y, lambda: x[order.long()])


@triton.jit
def gather_columns(x_ptr, index_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """The same columns of every row."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.load(index_ptr + offs))
    tl.store(y_ptr + tl.program_id(0) * BLOCK + offs, x)


@case("1024 columns, drawn, of 32768 rows of 4096 fp32", KIND, dict(M=32 * KI, N=4096), dict(M=3, N=2048))
def _(device, M, N):
    x, y = normal(device, M, N, dtype=FLOAT), empty(device, M, 1024, dtype=FLOAT)
    index = known(device, N, 1024)
    return Work(lambda: gather_columns[(M,)](x, index, y, N, BLOCK=1024), y, lambda: x[:, index.long()])
