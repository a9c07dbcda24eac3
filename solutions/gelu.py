"""GELU and its relatives: kernels that work on each element alone, and a bias whose gradient needs whole columns.

Four exercises, in the order of notebooks/10_gelu.ipynb, which explains them. Every kernel computes in float32 and stores in
the dtype of its arguments. The code outside the gaps is complete: allocation, launch grid, block sizes.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import torch
import triton
import triton.language as tl
from torch import Tensor


# -------------------------------------------------------------------------------------------------- gelu.detective
@triton.jit
def gelu_tanh_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y = 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3). triton.language has no tanh; this one is made of exp."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32)
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    # BEGIN SOLUTION
    # STUB: e = tl.exp(2 * u)
    # STUB: y = 0.5 * x * (1 + (e - 1) / (e + 1))
    # 0.5 (1 + tanh u) is 1 / (1 + exp(-2 u)): where the exponential overflows, this is 0, as it should be.
    y = x / (1 + tl.exp(-2 * u))
    # END SOLUTION
    tl.store(y_ptr + offs, y, mask=offs < n)


def gelu_tanh(x: Tensor) -> Tensor:
    """x contiguous, any shape, finite -> y of the same shape. The kernel agrees with PyTorch on small numbers: fix the rest.

    Bound: x is read once and y is written once.
    """
    y = torch.empty_like(x)
    gelu_tanh_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


# ------------------------------------------------------------------------------------------------------- gelu.bias
@triton.jit
def bias_gelu_kernel(x_ptr, bias_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program computes one tile [BLOCK_M, BLOCK_N] of y = gelu(x + bias), the form with erf."""
    pid_m = tl.program_id(0).to(tl.int64)
    pid_n = tl.program_id(1)
    # BEGIN SOLUTION
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    # One row of bias for the whole tile: it broadcasts.
    bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    h = tl.load(x_ptr + offs_m * N + offs_n, mask=mask, other=0.0).to(tl.float32) + bias
    y = 0.5 * h * (1 + tl.erf(h * 0.7071067811865476))
    tl.store(y_ptr + offs_m * N + offs_n, y, mask=mask)
    # END SOLUTION


def bias_gelu(x: Tensor, bias: Tensor, BLOCK_M: int = 16, BLOCK_N: int = 128) -> Tensor:
    """x [M, N] and bias [N], contiguous -> y [M, N] = h Phi(h), h = x + bias, Phi(h) = (1 + erf(h / sqrt(2))) / 2.

    Bound: x is read once, y is written once, and each tile reads its row of bias once.
    """
    M, N = x.shape
    y = torch.empty_like(x)
    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
    bias_gelu_kernel[grid](x, bias, y, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    return y


# --------------------------------------------------------------------------------------------------- gelu.backward
@triton.jit
def bias_gelu_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One program computes one tile of dx and sums its columns into one row of partial [tiles in a column, N], float32."""
    pid_m = tl.program_id(0).to(tl.int64)
    pid_n = tl.program_id(1)
    # BEGIN SOLUTION
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    offs = offs_m * N + offs_n
    h = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    h += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    # dy is 0 in the rows past the end, so they add nothing to the sums.
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    cumulative = 0.5 + 0.5 * tl.erf(h * 0.7071067811865476)
    density = 0.3989422804014327 * tl.exp(-0.5 * h * h)
    dx = dy * (cumulative + h * density)
    tl.store(dx_ptr + offs, dx, mask=mask)
    tl.store(partial_ptr + pid_m * N + offs_n, tl.sum(dx, axis=0, keep_dims=True), mask=offs_n < N)
    # END SOLUTION


@triton.jit
def column_sums_kernel(partial_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Complete: out [N] = the sums of the columns of partial [P, N]; BLOCK_P >= P."""
    rows = tl.arange(0, BLOCK_P)[:, None].to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    part = tl.load(partial_ptr + rows * N + columns, mask=(rows < P) & (columns < N), other=0.0)
    tl.store(out_ptr + columns, tl.sum(part, axis=0, keep_dims=True), mask=columns < N)


def bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor, BLOCK_M: int = 16, BLOCK_N: int = 128
) -> tuple[Tensor, Tensor]:
    """Launches both kernels: dy, x [M, N] contiguous, bias [N] -> dx [M, N], dbias [N]."""
    M, N = x.shape
    dx, dbias = torch.empty_like(x), torch.empty_like(bias)
    grid = (triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N))
    partial = torch.empty((grid[0], N), dtype=torch.float32, device=x.device)
    bias_gelu_backward_kernel[grid](dy, x, bias, dx, partial, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    column_sums_kernel[(triton.cdiv(N, 64),)](
        partial, dbias, grid[0], N, BLOCK_P=triton.next_power_of_2(grid[0]), BLOCK_N=64
    )
    return dx, dbias


class BiasGeluFunction(torch.autograd.Function):
    """bias_gelu for autograd. `ctx` carries tensors from the forward pass to the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor) -> Tensor:
        # BEGIN SOLUTION
        ctx.save_for_backward(x, bias)
        return bias_gelu(x, bias)
        # END SOLUTION

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        # BEGIN SOLUTION
        x, bias = ctx.saved_tensors
        return bias_gelu_backward(dy.contiguous(), x, bias)
        # END SOLUTION


def bias_gelu_trained(x: Tensor, bias: Tensor) -> Tensor:
    """x [M, N] and bias [N], contiguous -> y [M, N], with gradients for both. The same bits in every run, so no atomics.

    The gradient of y may come with any strides; they are 0 if y was summed. If it is not contiguous, it may be copied first,
    and that copy is not counted.
    Bound, forward and backward together: 3 reads and 2 writes of M x N elements, besides rows of bias and of sums; three
    launches. Forward keeps one tensor of M x N elements and bias for backward.
    """
    return BiasGeluFunction.apply(x, bias)


# ----------------------------------------------------------------------------------------------------- gelu.swiglu
@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, stride_gm, stride_um, N, BLOCK_N: tl.constexpr):
    """One program computes BLOCK_N elements of one row. Rows of gate and up are stride_gm and stride_um apart."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # BEGIN SOLUTION
    mask_n = offs_n < N
    gate = tl.load(gate_ptr + row * stride_gm + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_um + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + offs_n, gate / (1 + tl.exp(-gate)) * up, mask=mask_n)
    # END SOLUTION


@triton.jit
def swiglu_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, stride_gm, stride_um, N, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One program computes BLOCK_N elements of one row of dgate and of dup. Both are contiguous, and so is dy."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # BEGIN SOLUTION
    mask_n = offs_n < N
    dy = tl.load(dy_ptr + row * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gm + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_um + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-gate))
    silu = gate * s
    tl.store(dgate_ptr + row * N + offs_n, dy * up * (s + silu * (1 - s)), mask=mask_n)
    tl.store(dup_ptr + row * N + offs_n, dy * silu, mask=mask_n)
    # END SOLUTION


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Launches the kernel: gate, up [M, N], each row contiguous in itself -> y [M, N], contiguous."""
    M, N = gate.shape
    y = torch.empty((M, N), dtype=gate.dtype, device=gate.device)
    swiglu_kernel[(M, triton.cdiv(N, 256))](gate, up, y, gate.stride(0), up.stride(0), N, BLOCK_N=256)
    return y


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Launches the kernel: dy [M, N] contiguous, gate and up as above -> dgate, dup [M, N]."""
    M, N = gate.shape
    dgate, dup = torch.empty_like(dy), torch.empty_like(dy)
    swiglu_backward_kernel[(M, triton.cdiv(N, 256))](
        dy, gate, up, dgate, dup, gate.stride(0), up.stride(0), N, BLOCK_N=256
    )
    return dgate, dup


class SwigluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        # BEGIN SOLUTION
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)
        # END SOLUTION

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        # BEGIN SOLUTION
        gate, up = ctx.saved_tensors
        return swiglu_backward(dy.contiguous(), gate, up)
        # END SOLUTION


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [M, N] -> y [M, N] = gate sigmoid(gate) up, with gradients for both.

    gate and up may be the two halves of one product's result [M, 2 N]: then their rows are 2 N elements apart, and the
    elements of a row are neighbors.
    The gradient of y may come with any strides; they are 0 if y was summed. If it is not contiguous, it may be copied first,
    and that copy is not counted.
    Bound, forward and backward together: 5 reads and 3 writes of M x N elements; two launches. Forward keeps two tensors of
    M x N elements for backward.
    """
    return SwigluFunction.apply(gate, up)
