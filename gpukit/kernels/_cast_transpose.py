"""A matrix divided by factors and rounded to 8 bits, row by row and column by column, in one pass; and the factors.

Tensor cores read 8-bit operands along the dimension that is summed over, and of training's three products two sum over
another dimension than the first: every operand is needed in both orders. Made one after the other the two would read the
matrix twice, and the second would write with gaps.

A factor brings the largest element that it belongs to, of the whole matrix or of a row, to the format's largest number. A
factor may belong to a row only if the sum does not run over rows: the copy in columns has one for each column instead.

Traffic: for each element of a 16-bit matrix 2 bytes read and 2 written, or 1 where one copy is wanted; the factors, 2 read.
Limits: float8_e4m3fn and float8_e5m2; there is no gradient. Source: the formats, https://arxiv.org/abs/2209.05433
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check_tensors
from gpukit.kernels._autograd import operator
from gpukit.kernels._launch import launch

BLOCK_M, BLOCK_N, NUM_WARPS = 128, 64, 8
_FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
# No factor is smaller: its reciprocal is still a float32, and a matrix of zeros has a factor.
SMALLEST = 2.0**-100


class Copies(NamedTuple):
    """A matrix x [M, N] in 8 bits: rows [M, N] times row_factors, and columns [N, M] times column_factors. Factors are
    float32, [1] or one for each row of the copy. What was not asked for is None."""

    rows: Tensor | None
    columns: Tensor | None
    row_factors: Tensor | None
    column_factors: Tensor | None


@triton.jit
def _block(block, x_ptr, M, N, stride_xm, stride_xn, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A block of x in float32, its rows and its columns."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    offs_m = ((block // blocks_n) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = ((block % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :] * stride_xn, mask=mask, other=0.0)
    return x.to(tl.float32), offs_m, offs_n


@triton.jit
def maxima_kernel(
    x_ptr, row_ptr, column_ptr,
    M, N, stride_xm, stride_xn,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The largest magnitude in each row and column of x [M, N], or with WHOLE in all of it, to row_ptr. Maxima are int32 with
    the bits of a float32: of numbers without a sign the bits have the same order, and NaN is the largest."""
    x, offs_m, offs_n = _block(tl.program_id(0), x_ptr, M, N, stride_xm, stride_xn, BLOCK_M, BLOCK_N)
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    if WHOLE:
        tl.atomic_max(row_ptr, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")
    else:
        if row_ptr is not None:
            tl.atomic_max(row_ptr + offs_m, tl.max(bits, axis=1), mask=offs_m < M, sem="relaxed")
        if column_ptr is not None:
            tl.atomic_max(column_ptr + offs_n, tl.max(bits, axis=0), mask=offs_n < N, sem="relaxed")


@triton.jit
def _rounded(x, factor, FORMAT: tl.constexpr, LARGEST: tl.constexpr):
    x = x / factor
    # NaN stays NaN: tl.clamp would make a number of it, and the loss would hide what went wrong.
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x)).to(FORMAT)


@triton.jit
def cast_transpose_kernel(
    x_ptr, row_factor_ptr, column_factor_ptr, rows_ptr, columns_ptr,
    M, N, stride_xm, stride_xn, stride_row_factor, stride_column_factor,
    FORMAT: tl.constexpr, LARGEST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of x [M, N] per program, to rows [M, N] and columns [N, M]; either may be None."""
    # The last block first: the L2 still holds what maxima_kernel has read last.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    x, offs_m, offs_n = _block(block, x_ptr, M, N, stride_xm, stride_xn, BLOCK_M, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    if rows_ptr is not None:
        factor = tl.load(row_factor_ptr + offs_m * stride_row_factor, mask=offs_m < M, other=1.0)
        tl.store(
            rows_ptr + offs_m[:, None] * N + offs_n[None, :], _rounded(x, factor[:, None], FORMAT, LARGEST), mask=mask
        )
    if columns_ptr is not None:
        factor = tl.load(column_factor_ptr + offs_n * stride_column_factor, mask=offs_n < N, other=1.0)
        y = tl.trans(_rounded(x, factor[None, :], FORMAT, LARGEST))
        tl.store(columns_ptr + offs_n[:, None] * M + offs_m[None, :], y, mask=tl.trans(mask))


def _blocks(x: Tensor) -> int:
    return -(-x.shape[0] // BLOCK_M) * -(-x.shape[1] // BLOCK_N)


def _cast(x: Tensor, row_factors: Tensor | None, column_factors: Tensor | None, dtype: torch.dtype) -> Copies:
    """The copies for which there are factors."""
    M, N = x.shape
    rows = None if row_factors is None else x.new_empty((M, N), dtype=dtype)
    columns = None if column_factors is None else x.new_empty((N, M), dtype=dtype)
    strides = [0 if factors is None or factors.numel() == 1 else 1 for factors in (row_factors, column_factors)]
    if x.numel():
        launch(
            cast_transpose_kernel, _blocks(x), x, row_factors, column_factors, rows, columns, M, N, *x.stride(), *strides,
            FORMAT=_FORMATS[dtype], LARGEST=torch.finfo(dtype).max, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=NUM_WARPS,
        )  # fmt: skip
    return Copies(rows, columns, row_factors, column_factors)


def scaled_copies(x: Tensor, dtype: torch.dtype, by_row: bool, rows: bool, columns: bool) -> Copies:
    """x [M, N] in 8 bits, as rows, columns or both, with one factor for all of it, or with by_row one for each row of a copy."""
    if x.stride(0) == 1 != x.stride(1):  # as it lies in memory, rows are columns
        other = scaled_copies(x.mT, dtype, by_row, columns, rows)
        return Copies(other.columns, other.rows, other.column_factors, other.row_factors)
    M, N = x.shape
    sizes = [M * rows, N * columns] if by_row else [1, 0]
    # float32 for the factors, int32 for the kernel: bits of positive numbers
    factors = x.new_full((sum(sizes),), SMALLEST * torch.finfo(dtype).max, dtype=torch.float32)
    maxima = factors.view(torch.int32).split(sizes)
    if x.numel():
        wanted = (rows, columns) if by_row else (True, False)
        found = [part if there else None for part, there in zip(maxima, wanted, strict=True)]
        launch(
            maxima_kernel, _blocks(x), x, *found, M, N, *x.stride(),
            WHOLE=not by_row, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=NUM_WARPS,
        )  # fmt: skip
    factors /= torch.finfo(dtype).max
    of_rows, of_columns = factors.split(sizes) if by_row else (factors, factors)
    return _cast(x, of_rows if rows else None, of_columns if columns else None, dtype)


def cast_transpose_launch(x: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [M, N] / factor [] in 8 bits: [M, N] and its transpose [N, M], both contiguous."""
    return _cast(x, factor, factor, dtype)[:2]


def _like(x: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype)


cast_transpose_op = operator("cast_transpose", cast_transpose_launch, like=_like).op


def cast_transpose(x: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [M, N] / factor in 8 bits, row by row and column by column: [M, N] and [N, M].

    x float32, float16 or bfloat16, any strides; factor float32, one element; dtype torch.float8_e4m3fn or float8_e5m2.
    What is larger than the format's largest number becomes that number; NaN stays NaN. Raises TypeError and ValueError.
    """
    check_tensors("cast_transpose", x=x, factor=factor)
    if x.ndim != 2:
        raise ValueError(f"cast_transpose: x must be a matrix [M, N], got the shape {list(x.shape)}")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"cast_transpose: x must be float32, float16 or bfloat16, got {x.dtype}")
    if factor.numel() != 1 or factor.dtype != torch.float32:
        raise ValueError(f"cast_transpose: factor must be one float32, got {list(factor.shape)} of {factor.dtype}")
    if dtype not in _FORMATS:
        raise TypeError(f"cast_transpose: dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}")
    if torch.compiler.is_compiling():
        return cast_transpose_op(x, factor, dtype)
    return cast_transpose_launch(x, factor, dtype)
