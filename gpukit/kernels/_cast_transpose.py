"""A matrix divided by a factor and rounded to 8 bits, row by row and column by column, in one pass.

Tensor cores read 8-bit operands along the dimension that is summed over, and of training's three products two sum over
another dimension than the first: every operand is needed in both orders. Made one after the other the two would read the
matrix twice, and the second would write with gaps.

Traffic: 2 bytes read and 2 written for each element of a 16-bit matrix.
Limits: float8_e4m3fn and float8_e5m2; there is no gradient. Source: the formats, https://arxiv.org/abs/2209.05433
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check_tensors
from gpukit.kernels._autograd import operator
from gpukit.kernels._launch import launch

BLOCK_M, BLOCK_N, NUM_WARPS = 128, 64, 8
_FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def cast_transpose_kernel(
    x_ptr, factor_ptr, rows_ptr, columns_ptr,
    M, N, stride_xm, stride_xn,
    FORMAT: tl.constexpr, LARGEST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of x [M, N] per program, to rows [M, N] and columns [N, M]."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    offs_m = ((tl.program_id(0) // blocks_n) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = ((tl.program_id(0) % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :] * stride_xn, mask=mask, other=0.0).to(tl.float32)
    x /= tl.load(factor_ptr)
    # NaN stays NaN: tl.clamp would make a number of it, and the loss would hide what went wrong.
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x)).to(FORMAT)
    tl.store(rows_ptr + offs_m[:, None] * N + offs_n[None, :], x, mask=mask)
    tl.store(columns_ptr + offs_n[:, None] * M + offs_m[None, :], tl.trans(x), mask=tl.trans(mask))


def cast_transpose_launch(x: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [M, N] / factor [] in 8 bits: [M, N] and its transpose [N, M], both contiguous."""
    M, N = x.shape
    rows, columns = x.new_empty((M, N), dtype=dtype), x.new_empty((N, M), dtype=dtype)
    if x.numel():
        launch(
            cast_transpose_kernel, triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N), x, factor, rows, columns,
            M, N, *x.stride(),
            FORMAT=_FORMATS[dtype], LARGEST=torch.finfo(dtype).max, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=NUM_WARPS,
        )  # fmt: skip
    return rows, columns


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
