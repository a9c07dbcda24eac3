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
    # BEGIN SOLUTION
    mask_n = offs_n < N
    x = tl.load(x_ptr + row * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + row * N + offs_n, x * rstd * weight, mask=mask_n)
    # END SOLUTION


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
    # BEGIN SOLUTION
    # STUB: mean = tl.sum(x, axis=0) / N
    # STUB: variance = tl.sum(x * x, axis=0) / N - mean * mean
    # STUB: y = (x - mean) * tl.rsqrt(variance + eps) * weight + bias
    # A padding lane would hold -mean, and its square would count.
    centred = tl.where(inside, x - tl.sum(x, axis=0) / N, 0.0)
    variance = tl.sum(centred * centred, axis=0) / N
    y = centred * tl.rsqrt(variance + eps) * weight + bias
    # END SOLUTION
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
    # BEGIN SOLUTION
    mean = tl.zeros((), tl.float32)  # of the elements seen so far
    m2 = tl.zeros((), tl.float32)  # the sum of their (x - mean)^2
    for start in range(0, N, BLOCK_N):
        mask_n = start + offs_n < N
        x = tl.load(x_ptr + row + start + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        here = tl.sum(mask_n.to(tl.float32), axis=0)  # elements in this block; start elements came before it
        block_mean = tl.sum(x, axis=0) / here
        centred = tl.where(mask_n, x - block_mean, 0.0)
        share = here / (start + here)
        delta = block_mean - mean
        mean += delta * share
        # Two groups spread about their own means, and the means about the common one.
        m2 += tl.sum(centred * centred, axis=0) + delta * delta * start * share
    rstd = tl.rsqrt(m2 / N + eps)
    for start in range(0, N, BLOCK_N):
        mask_n = start + offs_n < N
        x = tl.load(x_ptr + row + start + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        tl.store(y_ptr + row + start + offs_n, (x - mean) * rstd, mask=mask_n)
    # END SOLUTION


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
    # BEGIN SOLUTION
    mask_n = offs_n < N
    weight = tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(pid, M, tl.num_programs(0)):
        row = tl.cast(start, tl.int64)
        x = tl.load(x_ptr + row * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        x_hat = x * rstd
        g = dy * weight
        dx = rstd * (g - x_hat * (tl.sum(g * x_hat, axis=0) / N))
        tl.store(dx_ptr + row * N + offs_n, dx, mask=mask_n)
        dweight += dy * x_hat
    # After the loop, so that a program without rows leaves zeros.
    tl.store(partial_ptr + pid * N + offs_n, dweight, mask=mask_n)
    # END SOLUTION


@triton.jit
def sum_rows_kernel(partial_ptr, dweight_ptr, P, N, BLOCK_N: tl.constexpr):
    """Each program adds up BLOCK_N columns of partial [P, N] and writes as many elements of dweight."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # BEGIN SOLUTION
    total = tl.zeros([BLOCK_N], tl.float32)
    for p in range(P):
        total += tl.load(partial_ptr + p * N + offs_n, mask=offs_n < N, other=0.0)
    tl.store(dweight_ptr + offs_n, total, mask=offs_n < N)
    # END SOLUTION


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
    # BEGIN SOLUTION
    mask_n = offs_n < N
    offs = row * N + offs_n
    u = tl.load(x_ptr + offs, mask=mask_n, other=0.0).to(tl.float32)
    u += tl.load(residual_ptr + offs, mask=mask_n, other=0.0).to(tl.float32)
    # The next block gets u as it is rounded; y is to be the norm of that u.
    u = u.to(u_ptr.dtype.element_ty).to(tl.float32)
    tl.store(u_ptr + offs, u, mask=mask_n)
    weight = tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(u * u, axis=0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + offs, u * rstd * weight, mask=mask_n)
    # END SOLUTION


@triton.jit
def residual_rms_norm_backward_kernel(dy_ptr, du_ptr, u_ptr, weight_ptr, rstd_ptr, dx_ptr, N, BLOCK_N: tl.constexpr):
    """Program i computes row i of dx, which is the gradient of x and also of the residual."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    # BEGIN SOLUTION
    mask_n = offs_n < N
    offs = row * N + offs_n
    dy = tl.load(dy_ptr + offs, mask=mask_n, other=0.0).to(tl.float32)
    du = tl.load(du_ptr + offs, mask=mask_n, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + offs, mask=mask_n, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row)
    u_hat = u * rstd
    g = dy * weight
    dx = rstd * (g - u_hat * (tl.sum(g * u_hat, axis=0) / N)) + du
    tl.store(dx_ptr + offs, dx, mask=mask_n)
    # END SOLUTION


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
    # BEGIN SOLUTION
    stride_xd = tl.cast(stride_xd, tl.int64)  # HALF of them may be beyond 2^31 elements
    mask = (offs_h < H) & (offs_d < HALF)
    cos = tl.load(cos_ptr + t * HALF + offs_d, mask=offs_d < HALF, other=0.0)
    sin = tl.load(sin_ptr + t * HALF + offs_d, mask=offs_d < HALF, other=0.0)
    if BACKWARDS:
        sin = -sin
    x_ptrs = x_ptr + b * stride_xb + t * stride_xt + offs_h * stride_xh + offs_d * stride_xd
    x1 = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptrs + HALF * stride_xd, mask=mask, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + ((b * H + offs_h) * T + t) * (2 * HALF) + offs_d
    tl.store(y_ptrs, x1 * cos - x2 * sin, mask=mask)
    tl.store(y_ptrs + HALF, x2 * cos + x1 * sin, mask=mask)
    # END SOLUTION


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
        # BEGIN SOLUTION
        dx = turn(dy, cos, sin, True)
        # END SOLUTION
        return dx, None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, D] with any strides, D even, cos and sin [T, D/2] float32, contiguous -> y of x's shape, differentiable.

    Elements i and i + D/2 of a head are the coordinates of one point, which token t turns by the angle whose cosine and
    sine are cos[t, i] and sin[t, i]. Bound, forward and backward together: 2 reads and 2 writes of x's size, and the tables
    once for each token and pass, whatever the number of heads. Forward keeps only the tables for backward.
    """
    return RopeFunction.apply(x, cos, sin)
