"""Softmax of the last dimension: y = exp(x - m) / sum(exp(x - m)), with m the row's maximum.

Five exercises, from top to bottom; notebooks/09_softmax.ipynb explains them. Every kernel converts to float32 after the
load, computes in float32 and stores in the dtype of x; float64 is as right, and on a GPU many times as slow. A row of
nothing but -inf gives NaN, as 0 / 0 does. The code outside the gaps is complete: it allocates the result, chooses the
block size and launches the kernel.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import torch
import triton
import triton.language as tl
from torch import Tensor


def num_warps_for(BLOCK_N: int) -> int:
    return 4 if BLOCK_N <= 2048 else 8 if BLOCK_N <= 8192 else 16


# ---------------------------------------------------------------------------------------------------- softmax.fused
@triton.jit
def softmax_fused_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    """Program i computes row i of y. BLOCK_N is the smallest power of two that is at least N."""
    pid_m = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    # BEGIN SOLUTION
    mask_n = offs_n < N
    row = pid_m.to(tl.int64) * N
    # exp(-inf) is 0: a padding lane adds nothing to the sum and can never be the maximum.
    x = tl.load(x_ptr + row + offs_n, mask=mask_n, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(y_ptr + row + offs_n, y, mask=mask_n)
    # END SOLUTION


def softmax_fused(x: Tensor) -> Tensor:
    """x [M, N] contiguous, 1 <= N <= 65536 -> y [M, N].

    Bound: x is read once and y is written once, in one launch.
    """
    M, N = x.shape
    y = torch.empty_like(x)
    BLOCK_N = triton.next_power_of_2(N)
    softmax_fused_kernel[(M,)](x, y, N, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N))
    return y


# -------------------------------------------------------------------------------------------------- softmax.strided
@triton.jit
def softmax_strided_kernel(
    x_ptr, y_ptr,
    B, C, N,
    stride_xa, stride_xb, stride_xc, stride_xn,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program i computes row i of the A B C rows of x [A, B, C, N], numbered in the order in which they lie in y.

    x has any strides, counted in elements. y is contiguous.
    """
    pid = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    # BEGIN SOLUTION
    mask_n = offs_n < N
    # int64 before the multiplication: a row may start more than 2^31 elements after x_ptr.
    row = pid.to(tl.int64)
    a, b, c = row // (B * C), row // C % B, row % C
    x_row = x_ptr + a * stride_xa + b * stride_xb + c * stride_xc
    x = tl.load(x_row + offs_n.to(tl.int64) * stride_xn, mask=mask_n, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(y_ptr + row * N + offs_n, y, mask=mask_n)
    # END SOLUTION


def softmax_strided(x: Tensor) -> Tensor:
    """x [N], [C, N], [B, C, N] or [A, B, C, N] with any strides, N <= 65536 -> y, contiguous, of the same shape.

    Bound: x is read once and y is written once. A copy of x would be a second read.
    """
    if not 1 <= x.ndim <= 4:
        raise ValueError(f"softmax_strided: x must have 1 to 4 dimensions, got {list(x.shape)}")
    x_4d = x[(None,) * (4 - x.ndim)]  # a view: missing leading dimensions have size 1
    A, B, C, N = x_4d.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    BLOCK_N = triton.next_power_of_2(N)
    softmax_strided_kernel[(A * B * C,)](
        x_4d, y, B, C, N, *x_4d.stride(), BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N)
    )
    return y


# --------------------------------------------------------------------------------------------------- softmax.online
@triton.jit
def softmax_online_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    """Program i computes row i in two passes over blocks of BLOCK_N elements.

    The row may have any number of blocks, and the last block need not be full.
    """
    pid_m = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    # BEGIN SOLUTION
    row = pid_m.to(tl.int64) * N
    m_i = tl.full((), -float("inf"), tl.float32)  # maximum of the elements seen so far
    l_i = tl.zeros((), tl.float32)  # sum of exp(x - m_i) over them
    for start in range(0, N, BLOCK_N):
        mask_n = start + offs_n < N
        x = tl.load(x_ptr + row + start + offs_n, mask=mask_n, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m_i, tl.max(x, axis=0))
        # Nothing but -inf so far: -inf - (-inf) would be NaN, so subtract 0 until there is a number.
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        l_i = l_i * tl.exp(m_i - shift) + tl.sum(tl.exp(x - shift), axis=0)
        m_i = m_new
    for start in range(0, N, BLOCK_N):
        mask_n = start + offs_n < N
        x = tl.load(x_ptr + row + start + offs_n, mask=mask_n, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + row + start + offs_n, tl.exp(x - m_i) / l_i, mask=mask_n)
    # END SOLUTION


def softmax_online(x: Tensor, BLOCK_N: int = 4096) -> Tensor:
    """x [M, N] contiguous, any N; BLOCK_N a power of two -> y [M, N].

    Bound: x is read twice and y is written once.
    """
    M, N = x.shape
    y = torch.empty_like(x)
    softmax_online_kernel[(M,)](x, y, N, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N))
    return y


# ------------------------------------------------------------------------------------------------- softmax.backward
@triton.jit
def softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, stride_dym, stride_dyn, N, BLOCK_N: tl.constexpr):
    """Program i computes row i of dx from y and dy. y and dx are contiguous; dy has any strides, and they may be 0."""
    pid_m = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)  # 64 bits for what stride_dyn makes of it
    # BEGIN SOLUTION
    mask_n = offs_n < N
    row = pid_m.to(tl.int64)
    y = tl.load(y_ptr + row * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * stride_dym + offs_n * stride_dyn, mask=mask_n, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, axis=0))
    tl.store(dx_ptr + row * N + offs_n, dx, mask=mask_n)
    # END SOLUTION


def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """Launches the kernel: y [M, N] contiguous, dy [M, N] with any strides -> dx [M, N]."""
    M, N = y.shape
    dx = torch.empty_like(y)
    BLOCK_N = triton.next_power_of_2(N)
    softmax_backward_kernel[(M,)](y, dy, dx, *dy.stride(), N, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N))
    return dx


class SoftmaxFunction(torch.autograd.Function):
    """softmax_fused as a function that autograd can differentiate.

    `ctx` carries tensors from the forward pass to the backward pass.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        # BEGIN SOLUTION
        y = softmax_fused(x)
        ctx.save_for_backward(y)
        return y
        # END SOLUTION

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        # BEGIN SOLUTION
        (y,) = ctx.saved_tensors
        return softmax_backward(y, dy)
        # END SOLUTION


def softmax(x: Tensor) -> Tensor:
    """x [M, N] contiguous -> y [M, N], differentiable.

    The gradient that arrives for y may have any strides. If y was summed, its strides are 0.
    Bound, forward and backward together: 3 reads and 2 writes of M x N elements, one launch each. Forward keeps one tensor
    of M x N elements for backward.
    """
    return SoftmaxFunction.apply(x)


# ----------------------------------------------------------------------------------------------- softmax.persistent
@triton.jit
def softmax_persistent_kernel(x_ptr, y_ptr, M, N, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr):
    """A fixed number of programs share the M rows. NUM_STAGES is for tl.range: it lets the loads of a program's next
    rows begin while this row is computed.
    """
    offs_n = tl.arange(0, BLOCK_N)
    # BEGIN SOLUTION
    mask_n = offs_n < N
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=NUM_STAGES):
        offs = tl.cast(row, tl.int64) * N + offs_n
        x = tl.load(x_ptr + offs, mask=mask_n, other=-float("inf")).to(tl.float32)
        numerator = tl.exp(x - tl.max(x, axis=0))
        tl.store(y_ptr + offs, numerator / tl.sum(numerator, axis=0), mask=mask_n)
    # END SOLUTION


def softmax_persistent(x: Tensor, max_programs: int) -> Tensor:
    """x [M, N] contiguous, M >= 1, N <= 65536 -> y [M, N], in one launch of at most max_programs programs.

    No program takes more rows than M / max_programs, rounded up. max_programs is how many programs the GPU can hold at a
    time: the number of its SMs times the programs that fit on one SM.
    Bound: x is read once and y is written once.
    """
    M, N = x.shape
    y = torch.empty_like(x)
    BLOCK_N = triton.next_power_of_2(N)
    # BEGIN SOLUTION
    num_programs = min(M, max_programs)
    # END SOLUTION
    softmax_persistent_kernel[(num_programs,)](
        x, y, M, N, BLOCK_N=BLOCK_N, NUM_STAGES=2, num_warps=num_warps_for(BLOCK_N)
    )
    return y
