"""Losses over a vocabulary: cross-entropy, its gradient in place, in chunks that never hold the logits, KL divergence.

Seven exercises, from top to bottom; notebooks/15_losses.ipynb explains them. M is the number of tokens and V the number of
classes, the entries of the vocabulary. A row of x [M, V] holds the logits of one token. Kernels compute in float32. The code
outside the gaps is complete.
"""

# What may be imported: torch, triton, einops, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F


def num_warps_for(BLOCK_V: int) -> int:
    return 4 if BLOCK_V <= 2048 else 8 if BLOCK_V <= 8192 else 16


# ---------------------------------------------------------------------------------------------- losses.cross_entropy
@triton.jit
def cross_entropy_kernel(x_ptr, target_ptr, loss_ptr, lse_ptr, V, ignore_index, BLOCK_V: tl.constexpr):
    """Each program computes the loss and the log-sum-exp of one row of x [M, V], which may be any number of blocks long."""
    pid_m = tl.program_id(0).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    raise NotImplementedError("losses.cross_entropy")  # your code here


def cross_entropy(x: Tensor, target: Tensor, BLOCK_V: int = 4096, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """x [M, V] contiguous, target [M] int64 -> loss [M] and log-sum-exp [M], both float32.

    A target is ignore_index, which may be any number, or else a class in [0, V). Where it is ignore_index, the row does not
    count, whatever it holds: its loss and its log-sum-exp are 0. Some logits of another row may be -inf, but not the target's.
    Bound: x is read once.
    """
    M, V = x.shape
    loss, lse = (torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(2))
    cross_entropy_kernel[(M,)](x, target, loss, lse, V, ignore_index, BLOCK_V=BLOCK_V, num_warps=num_warps_for(BLOCK_V))
    return loss, lse


# --------------------------------------------------------------------------------------------------- losses.in_place
@triton.jit
def cross_entropy_backward_kernel(
    x_ptr, target_ptr, lse_ptr, dloss_ptr,
    stride_dloss,
    V, ignore_index,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the losses over the logits x [M, V]. You decide which part of x a program takes."""
    raise NotImplementedError("losses.in_place")  # your code here


def cross_entropy_backward_(
    x: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, BLOCK_V: int = 2048, ignore_index: int = -100
) -> None:
    """Turns the logits x [M, V], contiguous, into their gradient, in place: no second tensor of that size is made.

    target [M] is what cross_entropy was given, and lse [M] what it returned: 0 where the target is ignore_index, which is any
    number that is no class. dloss [M] is the gradient of each row's loss; it may have any stride, 0 included. A row that is
    ignored has a gradient of 0.
    Bound: x is read once and written once, in one launch.
    """
    M, V = x.shape
    raise NotImplementedError("losses.in_place")  # your code here
    cross_entropy_backward_kernel[grid](
        x, target, lse, dloss, dloss.stride(0), V, ignore_index, BLOCK_V=BLOCK_V, num_warps=num_warps_for(BLOCK_V)
    )


# ------------------------------------------------------------------------------------------------- losses.one_launch
@triton.jit
def loss_and_gradient_kernel(x_ptr, target_ptr, scale_ptr, loss_ptr, V, ignore_index, BLOCK_V: tl.constexpr):
    """Each program computes the loss of one row and writes scale times its gradient over the row. One of the two results is
    wrong."""
    pid_m = tl.program_id(0).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    x_row = x_ptr + pid_m * V
    target = tl.load(target_ptr + pid_m)
    counts = target != ignore_index
    x = tl.load(x_row + offs_v, mask=mask_v, other=-float("inf")).to(tl.float32)
    m = tl.max(x, axis=0)
    lse = m + tl.log(tl.sum(tl.exp(x - m), axis=0))
    p = tl.exp(x - lse)
    dx = tl.where(offs_v == target, p - 1, p) * tl.load(scale_ptr)
    tl.store(x_row + offs_v, tl.where(counts, dx, 0.0), mask=mask_v)  # your code here
    x_target = tl.load(x_row + target, mask=counts, other=0.0).to(tl.float32)
    tl.store(loss_ptr + pid_m, tl.where(counts, lse - x_target, 0.0))


def loss_and_gradient_(x: Tensor, target: Tensor, scale: Tensor, ignore_index: int = -100) -> Tensor:
    """x [M, V] contiguous, V <= 65536, target [M] -> loss [M], float32. Writes scale times the gradient of the losses into x.

    scale, a float32 tensor without dimensions, multiplies the gradient of every row: it is 1 / count for a mean. target and
    ignore_index are as above, and a row that is ignored may hold anything.
    Bound: x is read once and written once, in one launch.
    """
    M, V = x.shape
    loss = torch.empty(M, dtype=torch.float32, device=x.device)
    BLOCK_V = triton.next_power_of_2(V)
    loss_and_gradient_kernel[(M,)](
        x, target, scale, loss, V, ignore_index, BLOCK_V=BLOCK_V, num_warps=num_warps_for(BLOCK_V)
    )
    return loss


# -------------------------------------------------------------------------------------------------- losses.smoothing
@triton.jit
def smoothed_fwd_kernel(x_ptr, target_ptr, loss_ptr, lse_ptr, V, smoothing, z_loss, BLOCK_V: tl.constexpr):
    """Each program computes the loss of one row. BLOCK_V is the smallest power of two that is at least V."""
    pid_m = tl.program_id(0).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    target = tl.load(target_ptr + pid_m)
    x = tl.load(x_ptr + pid_m * V + offs_v, mask=mask_v, other=-float("inf")).to(tl.float32)
    m = tl.max(x, axis=0)
    lse = m + tl.log(tl.sum(tl.exp(x - m), axis=0))
    raise NotImplementedError("losses.smoothing")  # your code here
    tl.store(loss_ptr + pid_m, loss)
    tl.store(lse_ptr + pid_m, lse)


@triton.jit
def smoothed_bwd_kernel(
    x_ptr, target_ptr, lse_ptr, dloss_ptr, dx_ptr,
    stride_dloss,
    V, smoothing, z_loss,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Each program computes one row of dx."""
    pid_m = tl.program_id(0).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    target = tl.load(target_ptr + pid_m)
    lse = tl.load(lse_ptr + pid_m)
    dloss = tl.load(dloss_ptr + pid_m * stride_dloss)
    x = tl.load(x_ptr + pid_m * V + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)
    raise NotImplementedError("losses.smoothing")  # your code here
    tl.store(dx_ptr + pid_m * V + offs_v, dx, mask=offs_v < V)


class SmoothedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, target: Tensor, smoothing: float, z_loss: float) -> Tensor:
        M, V = x.shape
        loss, lse = (torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(2))
        BLOCK_V = triton.next_power_of_2(V)
        smoothed_fwd_kernel[(M,)](
            x, target, loss, lse, V, smoothing, z_loss, BLOCK_V=BLOCK_V, num_warps=num_warps_for(BLOCK_V)
        )
        ctx.save_for_backward(x, target, lse)
        ctx.settings = smoothing, z_loss
        return loss

    @staticmethod
    def backward(ctx, dloss: Tensor):
        x, target, lse = ctx.saved_tensors
        M, V = x.shape
        dx = torch.empty_like(x)
        BLOCK_V = triton.next_power_of_2(V)
        smoothed_bwd_kernel[(M,)](
            x, target, lse, dloss, dx, dloss.stride(0), V, *ctx.settings,
            BLOCK_V=BLOCK_V, num_warps=num_warps_for(BLOCK_V),
        )  # fmt: skip
        return dx, None, None, None


def smoothed_cross_entropy(x: Tensor, target: Tensor, smoothing: float, z_loss: float) -> Tensor:
    """x [M, V] contiguous and finite, V <= 65536, target [M] int64 in [0, V) -> loss [M] float32, differentiable.

    smoothing  the share of each target's weight that is spread evenly over all V classes, the right one included
    z_loss     the weight of (log sum exp x)^2, which is added to the loss of each row
    Bound, forward and backward together: two reads and one write of x's size, one launch each. Forward keeps x, target and
    one number per row for backward.
    """
    return SmoothedFunction.apply(x, target, smoothing, z_loss)


# ----------------------------------------------------------------------------------------------------- losses.column
def evaluate(x: Tensor, weight: Tensor, target: Tensor, column: int, chunk: int) -> list[float]:
    """x [M, D], weight [V, D], target [M] -> three numbers about the logits x @ weight.T: the mean loss, and the mean and the
    largest logit of the class `column`, which somebody wants in a log.

    The logits are computed `chunk` tokens at a time, and no more than a few chunks of them may be in memory at any time. What
    tensors hold is counted, so what is kept stays in tensors: .item() may read a number, and .tolist() is refused.
    """
    total, watched = 0.0, []
    for first in range(0, len(x), chunk):
        rows = slice(first, first + chunk)
        logits = x[rows] @ weight.T
        total = total + F.cross_entropy(logits, target[rows], reduction="sum").item()  # your code here
        watched.append(logits[:, column])
    watched = torch.cat(watched)
    return [total / len(x), watched.mean().item(), watched.max().item()]


# ---------------------------------------------------------------------------------------------------- losses.chunked
def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, chunk: int, ignore_index: int = -100
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, D], weight [V, D], target [M] -> loss, the mean cross-entropy of x @ weight.T, with its gradients dx [M, D] and
    dweight [V, D].

    The mean is over the targets that are not ignore_index; there is at least one. The logits are computed `chunk` tokens at
    a time; the last chunk may be shorter. The memory must not grow with M, except for dx. At any time these may exist: dx
    once (so x is not copied, and dx is not put together from parts); four tensors as large as weight, one of them dweight;
    seven chunks of logits and their gradients; four chunks of x; and two numbers per token. You need PyTorch's operations
    alone, autograd included if you like.
    """
    raise NotImplementedError("losses.chunked")  # your code here


# --------------------------------------------------------------------------------------------------------- losses.kl
@triton.jit
def kl_fwd_kernel(x_ptr, t_ptr, loss_ptr, V, BLOCK_V: tl.constexpr):
    """Each program computes the divergence of one row, which may be any number of blocks long."""
    pid_m = tl.program_id(0).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    raise NotImplementedError("losses.kl")  # your code here


@triton.jit
def kl_bwd_kernel(t_ptr, dloss_ptr, dx_ptr, stride_dloss, V, BLOCK_V: tl.constexpr):
    """Each program computes one row of dx, which may be any number of blocks long."""
    pid_m = tl.program_id(0).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    raise NotImplementedError("losses.kl")  # your code here


def kl_fwd(x: Tensor, t: Tensor, BLOCK_V: int) -> Tensor:
    """Launches the kernel: x and t [M, V], contiguous -> loss [M] float32."""
    loss = torch.empty(len(x), dtype=torch.float32, device=x.device)
    kl_fwd_kernel[(len(x),)](x, t, loss, x.shape[1], BLOCK_V=BLOCK_V)
    return loss


def kl_bwd(t: Tensor, dloss: Tensor, BLOCK_V: int) -> Tensor:
    """Launches the kernel: t [M, V], contiguous, and dloss [M] with any stride -> dx [M, V] in t's dtype."""
    dx = torch.empty_like(t)
    kl_bwd_kernel[(len(t),)](t, dloss, dx, dloss.stride(0), t.shape[1], BLOCK_V=BLOCK_V)
    return dx


class KLFunction(torch.autograd.Function):
    """`backward` returns a gradient, or None, for each argument of `forward`."""

    @staticmethod
    def forward(ctx, x: Tensor, t: Tensor, BLOCK_V: int) -> Tensor:
        raise NotImplementedError("losses.kl")  # your code here

    @staticmethod
    def backward(ctx, dloss: Tensor):
        raise NotImplementedError("losses.kl")  # your code here


def kl_div(x: Tensor, t: Tensor, BLOCK_V: int = 2048) -> Tensor:
    """Log-probabilities x and probabilities t, both [M, V], contiguous and of one dtype -> loss [M] float32: the
    divergence of each row, the sum of t (log t - x). It is differentiable with respect to x.

    x is finite. t may be 0; such an element adds nothing.
    Bound, forward and backward together: three reads and one write of x's size, in two launches. Forward keeps one tensor
    of x's size for backward.
    """
    return KLFunction.apply(x, t, BLOCK_V)
