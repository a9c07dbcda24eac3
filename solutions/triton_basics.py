"""The Triton ladder: eleven small kernels, each with one new idea; notebooks/05_triton_basics.ipynb explains them.

Each docstring says what its function must return, and after "Bound" how much memory traffic and how many launches and
programs the check allows. Everything outside the gaps is complete: allocation, launch grid, block sizes. BLOCK, BLOCK_M
and BLOCK_N are powers of two. Other sizes need not be multiples of them. A tensor of one dimension has fewer than 2^31
elements, so that an offset in it fits into 32 bits.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import torch
import triton
import triton.language as tl
from torch import Tensor


# ---------------------------------------------------------------------------------------- triton_basics.add_constant
@triton.jit
def add_constant_kernel(x_ptr, y_ptr, c, n, BLOCK: tl.constexpr):
    """Program 0 computes the first BLOCK elements, program 1 the next BLOCK, and so on."""
    # BEGIN SOLUTION
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(y_ptr + offs, x + c, mask=offs < n)
    # END SOLUTION


def add_constant(x: Tensor, c: float, BLOCK: int = 1024) -> Tensor:
    """x [n] contiguous -> y [n] = x + c. Bound: x is read once, y is written once."""
    n = x.numel()
    y = torch.empty_like(x)
    add_constant_kernel[(triton.cdiv(n, BLOCK),)](x, y, c, n, BLOCK=BLOCK)
    return y


# ------------------------------------------------------------------------------------------ triton_basics.vector_add
@triton.jit
def vector_add_kernel(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    """As in add_constant, with two inputs: program 0 computes the first BLOCK elements, and so on."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # BEGIN SOLUTION
    x = tl.load(x_ptr + offs, mask=offs < n)
    y = tl.load(y_ptr + offs, mask=offs < n)
    tl.store(z_ptr + offs, x + y, mask=offs < n)
    # END SOLUTION


def vector_add(x: Tensor, y: Tensor, BLOCK: int = 1024) -> Tensor:
    """x [n], y [n] contiguous -> z [n] = x + y.

    Bound: one launch, and no program without an element; x and y are read once, z is written once.
    """
    n = x.numel()
    z = torch.empty_like(x)
    # BEGIN SOLUTION
    grid = (triton.cdiv(n, BLOCK),)
    # END SOLUTION
    vector_add_kernel[grid](x, y, z, n, BLOCK=BLOCK)
    return z


# ------------------------------------------------------------------------------------------- triton_basics.outer_add
@triton.jit
def outer_add_kernel(x_ptr, y_ptr, z_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Program (i, j) computes one tile of z, BLOCK_M rows high and BLOCK_N columns wide: the i-th tile from the top, the
    j-th from the left."""
    # BEGIN SOLUTION
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # times N it may be beyond 32 bits
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs_m, mask=offs_m < M)
    y = tl.load(y_ptr + offs_n, mask=offs_n < N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(z_ptr + offs_m[:, None] * N + offs_n[None, :], x[:, None] + y[None, :], mask=mask)
    # END SOLUTION


def outer_add(x: Tensor, y: Tensor, BLOCK_M: int = 16, BLOCK_N: int = 64) -> Tensor:
    """x [M], y [N] contiguous -> z [M, N] contiguous, with z[m, n] = x[m] + y[n].

    z may have more than 2^31 elements. An offset in 32 bits does not reach them; tl.program_id(0).to(tl.int64) has 64 bits.
    Bound: each program reads its part of x and its part of y once, and z is written once.
    """
    (M,), (N,) = x.shape, y.shape
    z = torch.empty(M, N, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
    outer_add_kernel[grid](x, y, z, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    return z


# -------------------------------------------------------------------------------------------- triton_basics.mul_relu
@triton.jit
def mul_relu_kernel(
    x_ptr, w_ptr, y_ptr,
    M, N,
    stride_xm, stride_xn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes one tile of y. x[m, n] lies m * stride_xm + n * stride_xn elements after x_ptr."""
    # In 64 bits, because a product with a stride may be beyond 32.
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    # BEGIN SOLUTION
    x = tl.load(x_ptr + offs_m * stride_xm + offs_n * stride_xn, mask=mask)
    w = tl.load(w_ptr + offs_n, mask=offs_n < N)
    tl.store(y_ptr + offs_m * N + offs_n, tl.maximum(x * w, 0.0), mask=mask)
    # END SOLUTION


@triton.jit
def mul_relu_backward_kernel(
    x_ptr, w_ptr, dy_ptr, dx_ptr,
    M, N,
    stride_xm, stride_xn, stride_dym, stride_dyn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same tiles. dy has strides of its own, which may be 0; dx is contiguous."""
    # In 64 bits, because a product with a stride may be beyond 32.
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    # BEGIN SOLUTION
    x = tl.load(x_ptr + offs_m * stride_xm + offs_n * stride_xn, mask=mask)
    w = tl.load(w_ptr + offs_n, mask=offs_n < N)
    dy = tl.load(dy_ptr + offs_m * stride_dym + offs_n * stride_dyn, mask=mask)
    dx = tl.where(x * w > 0, dy * w, 0.0)
    tl.store(dx_ptr + offs_m * N + offs_n, dx, mask=mask)
    # END SOLUTION


class MulReluFunction(torch.autograd.Function):
    """Ties the two launches to autograd. It is complete."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        M, N = x.shape
        y = torch.empty(M, N, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(M, 16), triton.cdiv(N, 64))
        mul_relu_kernel[grid](x, w, y, M, N, *x.stride(), BLOCK_M=16, BLOCK_N=64)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        x, w = ctx.saved_tensors
        M, N = x.shape
        dx = torch.empty(M, N, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(M, 16), triton.cdiv(N, 64))
        mul_relu_backward_kernel[grid](
            x, w, dy, dx, M, N, *x.stride(), *dy.stride(), BLOCK_M=16, BLOCK_N=64
        )  # fmt: skip
        return dx, None


def mul_relu(x: Tensor, w: Tensor) -> Tensor:
    """x [M, N] with any strides, w [N] contiguous -> y [M, N] contiguous, y[m, n] = max(x[m, n] * w[n], 0).

    Differentiable with respect to x; w is a constant. dy may have any strides, too. Where the product is exactly 0 the
    gradient is 0, as in PyTorch. x, w and dy are finite; a product may still be beyond float32, and an infinite one is treated
    like any other: above 0 y is infinite, below it y and the gradient are 0.
    Bound for both passes together: x is read twice, dy once, and w once per row of tiles and pass; y and dx are written
    once. Forward keeps one tensor of x's size and w for backward.
    """
    return MulReluFunction.apply(x, w)


# --------------------------------------------------------------------------------------------- triton_basics.row_sum
@triton.jit
def row_sum_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    """One program sums one row of x, whatever its length."""
    pid_m = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    # BEGIN SOLUTION
    row_ptr = x_ptr + pid_m.to(tl.int64) * N  # a matrix may have more elements than 32 bits can count
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        x = tl.load(row_ptr + start + offs_n, mask=start + offs_n < N, other=0.0)
        acc += x.to(tl.float32)
    tl.store(y_ptr + pid_m, tl.sum(acc, axis=0))
    # END SOLUTION


def row_sum(x: Tensor, BLOCK_N: int = 1024) -> Tensor:
    """x [M, N] contiguous, any N -> y [M], y[m] = sum over n of x[m, n], added up in float32.

    x may have more than 2^31 elements: a row's offset needs 64 bits.
    Bound: x is read once, in one launch.
    """
    M, N = x.shape
    y = torch.empty(M, dtype=x.dtype, device=x.device)
    row_sum_kernel[(M,)](x, y, N, BLOCK_N=BLOCK_N)
    return y


# ------------------------------------------------------------------------------------------------- triton_basics.dot
@triton.jit
def dot_kernel(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    """Each program multiplies one block of x by one block of y and adds up the products. All programs together make one
    number."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # BEGIN SOLUTION
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    tl.atomic_add(z_ptr, tl.sum(x * y, axis=0))
    # END SOLUTION


def dot(x: Tensor, y: Tensor, BLOCK: int = 1024) -> Tensor:
    """x [n], y [n] contiguous -> z [1] float32, the sum of x[i] * y[i], multiplied and added up in float32.

    Bound: x and y are read once, and each block has a program of its own.
    """
    n = x.numel()
    # BEGIN SOLUTION
    z = torch.zeros(1, dtype=torch.float32, device=x.device)
    # END SOLUTION
    dot_kernel[(triton.cdiv(n, BLOCK),)](x, y, z, n, BLOCK=BLOCK)
    return z


# ------------------------------------------------------------------------------------------ triton_basics.prefix_sum
@triton.jit
def prefix_sum_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    """One program walks along one row, block by block. tl.cumsum gives the running sums within one block."""
    row = tl.program_id(0).to(tl.int64) * N
    offs_n = tl.arange(0, BLOCK_N)
    # BEGIN SOLUTION
    carry = tl.zeros((), tl.float32)  # the sum of everything before this block
    for start in range(0, N, BLOCK_N):
        mask = start + offs_n < N
        x = tl.load(x_ptr + row + start + offs_n, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row + start + offs_n, carry + tl.cumsum(x, axis=0), mask=mask)
        carry += tl.sum(x, axis=0)
    # END SOLUTION


def prefix_sum(x: Tensor, BLOCK_N: int = 1024) -> Tensor:
    """x [M, N] contiguous, any N -> y [M, N], y[m, n] = x[m, 0] + ... + x[m, n], added up in float32.

    Bound: x is read once, y is written once.
    """
    M, N = x.shape
    y = torch.empty_like(x)
    prefix_sum_kernel[(M,)](x, y, N, BLOCK_N=BLOCK_N)
    return y


# ------------------------------------------------------------------------------------------- triton_basics.histogram
@triton.jit
def histogram_kernel(x_ptr, counts_ptr, n, num_bins, BLOCK: tl.constexpr):
    """Each program adds one block of x to the counts, which all programs share. The host sets them to 0 before the launch."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # BEGIN SOLUTION
    bins = tl.load(x_ptr + offs, mask=offs < n, other=-1)
    counted = (bins >= 0) & (bins < num_bins)  # a lane past the end holds -1
    tl.atomic_add(counts_ptr + bins, 1, mask=counted)
    # END SOLUTION


def histogram(x: Tensor, num_bins: int, BLOCK: int = 1024) -> Tensor:
    """x [n] int32, contiguous -> counts [num_bins] int32: how many elements of x are 0, 1, ..., num_bins - 1.

    Elements outside that range are not counted, however far outside they are.
    Bound: x is read once, and each block has a program of its own.
    """
    n = x.numel()
    counts = torch.zeros(num_bins, dtype=torch.int32, device=x.device)
    histogram_kernel[(triton.cdiv(n, BLOCK),)](x, counts, n, num_bins, BLOCK=BLOCK)
    return counts


# --------------------------------------------------------------------------------------------- triton_basics.dropout
@triton.jit
def dropout_kernel(x_ptr, y_ptr, p, seed, n, BLOCK: tl.constexpr):
    """tl.rand(seed, i) is a number in [0, 1): always the same one for the same seed and the same i."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # BEGIN SOLUTION
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
    keep = tl.rand(seed, offs) >= p
    tl.store(y_ptr + offs, tl.where(keep, x / (1 - p), 0.0), mask=mask)
    # END SOLUTION


class DropoutFunction(torch.autograd.Function):
    """Ties the launches to autograd. `ctx` carries p and the seed; no tensor as large as x has to be saved."""

    @staticmethod
    def forward(ctx, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        n = x.numel()
        y = torch.empty_like(x)
        dropout_kernel[(triton.cdiv(n, 256),)](x, y, p, seed, n, BLOCK=256)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        dy = dy.contiguous()  # the gradient of a sum has stride 0: one number for all
        n = dy.numel()
        dx = torch.empty_like(dy)
        # BEGIN SOLUTION
        dropout_kernel[(triton.cdiv(n, 256),)](dy, dx, ctx.p, ctx.seed, n, BLOCK=256)
        # END SOLUTION
        return dx, None, None


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """x contiguous, any shape, at most 2^24 elements, 0 <= p <= 1 -> y of its shape, differentiable.

    Number the elements of x by their order in memory. Element i is kept where tl.rand(seed, i) >= p, and then divided by
    1 - p, in float32. Where it is not kept the result is 0, even if x is an infinity or NaN there.
    Bound for both passes together: 2 reads and 2 writes of x's size, one launch per pass, and a copy of dy where it is not
    contiguous. Forward keeps no tensor for backward.
    """
    return DropoutFunction.apply(x, p, seed)


# -------------------------------------------------------------------------------------- triton_basics.detective_slow
@triton.jit
def scale_rows_kernel(x_ptr, s_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    """y[m, n] = x[m, n] * s[m]. The results are right, but too many bytes move. Find out why and fix it."""
    pid_m = tl.program_id(0)
    row = pid_m.to(tl.int64) * N
    s = tl.load(s_ptr + pid_m)
    # BEGIN SOLUTION
    # STUB: for start in range(0, N, BLOCK_N):
    # STUB:     offs_n = start + tl.arange(0, BLOCK_N)
    # STUB:     x = tl.load(x_ptr + row + offs_n, mask=offs_n < N)
    # STUB:     tl.store(y_ptr + row + offs_n, x * s, mask=offs_n < N)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row + offs_n, mask=offs_n < N)
    tl.store(y_ptr + row + offs_n, x * s, mask=offs_n < N)
    # END SOLUTION


def scale_rows(x: Tensor, s: Tensor, BLOCK_N: int = 1024) -> Tensor:
    """x [M, N] contiguous, s [M] contiguous -> y [M, N]. Bound: x is read once, y is written once."""
    M, N = x.shape
    y = torch.empty_like(x)
    scale_rows_kernel[(M, triton.cdiv(N, BLOCK_N))](x, s, y, N, BLOCK_N=BLOCK_N)
    return y


# -------------------------------------------------------------------------------------- triton_basics.detective_race
@triton.jit
def neighbour_mean_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y[i] = (x[i] + x[i + 1]) / 2. The last element has no right neighbor and stays as it is."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    neighbour = tl.load(x_ptr + offs + 1, mask=offs + 1 < n, other=0.0)
    tl.store(y_ptr + offs, tl.where(offs + 1 < n, (x + neighbour) / 2, x), mask=offs < n)


def neighbour_mean(x: Tensor, BLOCK: int = 1024) -> Tensor:
    """x [n] contiguous -> y [n]. The results look right, but they depend on the order of the programs. Fix that.

    Bound: y is written once, and each element of x is read twice, once for itself and once as a neighbor.
    """
    n = x.numel()
    # BEGIN SOLUTION
    # STUB: y = x.clone()
    # STUB: neighbour_mean_kernel[(triton.cdiv(n, BLOCK),)](y, y, n, BLOCK=BLOCK)
    y = torch.empty_like(x)
    neighbour_mean_kernel[(triton.cdiv(n, BLOCK),)](x, y, n, BLOCK=BLOCK)
    # END SOLUTION
    return y
