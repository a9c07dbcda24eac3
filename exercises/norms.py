"""RMSNorm, LayerNorm, residual + RMSNorm and their gradients, and RoPE: kernels of whole rows.

Six exercises, from top to bottom; notebooks/11_norms.ipynb explains them. Every kernel converts to float32 after the load,
computes in float32 and stores in the dtype of its input. The code outside the gaps is complete: it allocates the results,
chooses the block sizes and launches the kernels.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import torch
import triton
import triton.language as tl
from torch import Tensor


def num_warps_for(BLOCK_N: int) -> int:
    return 4 if BLOCK_N <= 2048 else 8 if BLOCK_N <= 8192 else 16


# -------------------------------------------------------------------------------------------------- norms.rms_norm
@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, rstd_ptr, N, eps, BLOCK_N: tl.constexpr):
    """Program i computes row i of y, and number i of rstd. BLOCK_N is at least N."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    raise NotImplementedError("norms.rms_norm")  # your code here


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x [M, N] and weight [N], contiguous, N <= 16384 -> y [M, N] and rstd [M], which is float32.

    rstd[m] = 1 / sqrt(mean(x[m]^2) + eps), y[m] = x[m] * rstd[m] * weight. Bound: x and weight are loaded once for each
    row, and y is written once.
    """
    M, N = x.shape
    y = torch.empty_like(x)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    BLOCK_N = triton.next_power_of_2(N)
    rms_norm_kernel[(M,)](x, weight, y, rstd, N, eps, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N))
    return y, rstd


# ------------------------------------------------------------------------------------------------- norms.detective
@triton.jit
def layer_norm_kernel(x_ptr, weight_ptr, bias_ptr, y_ptr, N, eps, BLOCK_N: tl.constexpr):
    """Program i computes row i. The results agree with PyTorch's for most rows, but not for all. Find the cause and fix it."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    inside = offs_n < N
    weight = tl.load(weight_ptr + offs_n, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + offs_n, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * N + offs_n, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N  # your code here
    variance = tl.sum(x * x, axis=0) / N - mean * mean
    y = (x - mean) * tl.rsqrt(variance + eps) * weight + bias
    tl.store(y_ptr + row * N + offs_n, y, mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """x [M, N], weight [N] and bias [N], contiguous, N <= 16384 -> y [M, N].

    y[m] = (x[m] - mean(x[m])) / sqrt(var(x[m]) + eps) * weight + bias, where var(x[m]) is the mean of
    (x[m] - mean(x[m]))^2. Bound: x, weight and bias are loaded once for each row, and y is written once.
    """
    M, N = x.shape
    y = torch.empty_like(x)
    BLOCK_N = triton.next_power_of_2(N)
    layer_norm_kernel[(M,)](x, weight, bias, y, N, eps, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N))
    return y


# --------------------------------------------------------------------------------------------------- norms.welford
@triton.jit
def layer_norm_long_kernel(x_ptr, y_ptr, N, eps, BLOCK_N: tl.constexpr):
    """Program i computes row i in two passes over blocks of BLOCK_N elements.

    The row may have any number of blocks, and the last block need not be full.
    """
    row = tl.program_id(0).to(tl.int64) * N
    offs_n = tl.arange(0, BLOCK_N)
    raise NotImplementedError("norms.welford")  # your code here


def layer_norm_long(x: Tensor, BLOCK_N: int = 4096, eps: float = 1e-5) -> Tensor:
    """x [M, N] contiguous, any N; BLOCK_N a power of two -> y [M, N] = (x - mean) / sqrt(var + eps), without weights.

    Bound: x is read twice and y is written once.
    """
    M, N = x.shape
    y = torch.empty_like(x)
    layer_norm_long_kernel[(M,)](x, y, N, eps, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N))
    return y


# -------------------------------------------------------------------------------------------------- norms.backward
@triton.jit
def rms_norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, M, N, BLOCK_N: tl.constexpr
):  # fmt: skip
    """A fixed number of programs share the M rows. Each writes its rows of dx, and one row of partial [programs, N], float32."""
    pid = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    raise NotImplementedError("norms.backward")  # your code here


@triton.jit
def sum_rows_kernel(partial_ptr, dweight_ptr, P, N, BLOCK_N: tl.constexpr):
    """Each program adds up BLOCK_N columns of partial [P, N] and writes as many elements of dweight."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    raise NotImplementedError("norms.backward")  # your code here


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, programs: int) -> tuple[Tensor, Tensor]:
    """Launches both kernels: dy, x [M, N] contiguous, weight [N], rstd [M] -> dx [M, N], dweight [N]."""
    M, N = x.shape
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    partial = torch.empty((programs, N), dtype=torch.float32, device=x.device)
    BLOCK_N = triton.next_power_of_2(N)
    rms_norm_backward_kernel[(programs,)](
        dy, x, weight, rstd, dx, partial, M, N, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N)
    )
    sum_rows_kernel[(triton.cdiv(N, 64),)](partial, dweight, programs, N, BLOCK_N=64)
    return dx, dweight


class RmsNormFunction(torch.autograd.Function):
    """rms_norm as a function that autograd can differentiate. This class is complete."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, programs: int) -> Tensor:
        y, rstd = rms_norm(x, weight)
        ctx.save_for_backward(x, weight, rstd)
        ctx.programs = programs
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        return *rms_norm_backward(dy.contiguous(), x, weight, rstd, ctx.programs), None


def rms_norm_trained(x: Tensor, weight: Tensor, programs: int) -> Tensor:
    """x [M, N] and weight [N], contiguous -> y [M, N], differentiable.

    `programs` is the number of programs that compute the gradients; it may be larger than M. The rows are shared evenly
    among them. dweight is the sum over all M rows of dy * x * rstd, the same to the last bit in every run, so atomics are
    not allowed. Bound, forward and backward together: 4 reads and 2 writes of M x N elements, weight once for each row
    (forward) and once for each program (backward), one float32 row for each program; three launches. Forward keeps x,
    weight and one number per row for backward.
    """
    return RmsNormFunction.apply(x, weight, programs)


# -------------------------------------------------------------------------------------------------- norms.residual
@triton.jit
def residual_rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, y_ptr, u_ptr, rstd_ptr, N, eps, BLOCK_N: tl.constexpr):
    """Program i computes row i of y and of u, and number i of rstd."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    raise NotImplementedError("norms.residual")  # your code here


@triton.jit
def residual_rms_norm_backward_kernel(dy_ptr, du_ptr, u_ptr, weight_ptr, rstd_ptr, dx_ptr, N, BLOCK_N: tl.constexpr):
    """Program i computes row i of dx, which is the gradient of x and also of the residual."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    raise NotImplementedError("norms.residual")  # your code here


def residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [M, N] contiguous, weight [N] -> y, u [M, N], rstd [M]: u = x + residual, y = u * rstd * weight."""
    M, N = x.shape
    y, u = torch.empty_like(x), torch.empty_like(x)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    BLOCK_N = triton.next_power_of_2(N)
    residual_rms_norm_kernel[(M,)](
        x, residual, weight, y, u, rstd, N, eps, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N)
    )
    return y, u, rstd


def residual_rms_norm_both_ways(
    x: Tensor, residual: Tensor, weight: Tensor, dy: Tensor, du: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a training step does here: forward, then backward. All are [M, N] contiguous, weight is [N] -> y, u, dx.

    y and u both go on into the model. dy and du are the gradients of the loss with respect to y and u, and dx is the
    gradient with respect to x. Bound, without weight: forward reads two tensors of M x N elements and writes two,
    backward reads three and writes one; one launch each.
    """
    y, u, rstd = residual_rms_norm(x, residual, weight)
    M, N = x.shape
    dx = torch.empty_like(x)
    BLOCK_N = triton.next_power_of_2(N)
    residual_rms_norm_backward_kernel[(M,)](
        dy, du, u, weight, rstd, dx, N, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N)
    )
    return y, u, dx


# ------------------------------------------------------------------------------------------------------ norms.rope
@triton.jit
def rope_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr,
    H, T, HALF,
    stride_xb, stride_xh, stride_xt, stride_xd,
    BACKWARDS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program turns one token: all H heads of x[b, :, t]. x has any strides (in elements), y is contiguous.

    HALF is half of a head's size. cos and sin are [T, HALF], contiguous. With BACKWARDS, turn by the same angles in the
    other direction.
    """
    b = (tl.program_id(0) // T).to(tl.int64)
    t = (tl.program_id(0) % T).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)[:, None].to(tl.int64)  # BLOCK_H >= H; 64 bits for what strides make of it
    offs_d = tl.arange(0, BLOCK_D)[None, :].to(tl.int64)  # BLOCK_D >= HALF
    raise NotImplementedError("norms.rope")  # your code here


def turn(x: Tensor, cos: Tensor, sin: Tensor, backwards: bool) -> Tensor:
    """Launches the kernel: x [B, H, T, D] with any strides -> y, contiguous."""
    B, H, T, D = x.shape
    y = torch.empty((B, H, T, D), dtype=x.dtype, device=x.device)
    BLOCK_H, BLOCK_D = triton.next_power_of_2(H), triton.next_power_of_2(D // 2)
    rope_kernel[(B * T,)](
        x, cos, sin, y, H, T, D // 2, *x.stride(), BACKWARDS=backwards, BLOCK_H=BLOCK_H, BLOCK_D=BLOCK_D
    )
    return y


class RopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin, False)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        raise NotImplementedError("norms.rope")  # your code here
        return dx, None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, D] with any strides, D even, cos and sin [T, D/2] float32, contiguous -> y of x's shape, differentiable.

    Elements i and i + D/2 of a head are the coordinates of one point, which token t turns by the angle whose cosine and
    sine are cos[t, i] and sin[t, i]. Bound, forward and backward together: 2 reads and 2 writes of x's size, and the tables
    once for each token and pass, whatever the number of heads. Forward keeps only the tables for backward.
    """
    return RopeFunction.apply(x, cos, sin)
