"""Cross-entropy of x @ weight.T that never holds all the logits: a chunk of tokens at a time goes through the matrix
product, the loss and its gradient, and on into the gradients of x and of the weight.

The same kernel, to be read first: `linear_cross_entropy` in solutions/losses.py.

For M tokens, width D and V classes in chunks of C tokens, the memory is C V for a chunk's logits, which become their own
gradient in place, and D (M + V) for the two gradients, instead of 3 M V and those. The products are PyTorch's, three of
2 M V D FLOPs; nothing is computed twice. The gradients exist when the loss does; backward() only scales them, and where the
scale is 1 it reads that one number and leaves them as they are.

Limits: the weight's gradient is summed over chunks in the weight's dtype, one rounding a chunk (each product is summed in
float32 inside), so few large chunks are also more exact. Second derivatives are not there. In float16 the gradients exist
before a GradScaler's scale reaches them: what is below 6e-8 is 0 then.
Sources: https://arxiv.org/abs/2410.10989 (chunks), https://arxiv.org/abs/2411.09009 (the same aim without logits at all).
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check_tensors
from gpukit.kernels._autograd import operator, refuse_second
from gpukit.kernels._class_losses import check, reduced
from gpukit.kernels._device import multiprocessors
from gpukit.kernels._dtypes import DTYPES, torch_acc_dtype
from gpukit.kernels._launch import launch
from gpukit.kernels.cross_entropy import cross_entropy_fwd

# Logits of one chunk at least.
CHUNK_ELEMENTS = 1 << 27
ROW_ELEMENTS = 64
BLOCK = 4096


def chunk_logits(classes: int, width: int) -> int:
    """How many logits a chunk may have: CHUNK_ELEMENTS, or as many as the weight has numbers, since its gradient takes the
    same memory. Few chunks are faster, because each is added to that gradient, which is read and written for it. On an H200
    in bf16, 8,192 tokens x 4,096 x 128,256 take 41.5 ms in chunks of 1,024 tokens, 40.1 of 2,048, 39.4 of 4,096 and 39.5 in
    one, without backward()."""
    return max(CHUNK_ELEMENTS, classes * width)


def chunk_tokens(tokens: int, classes: int, width: int) -> int:
    """Tokens in one chunk: equal chunks of at most `chunk_logits`, a multiple of 128 where there are so many."""
    chunks = -(-tokens * classes // chunk_logits(classes, width))
    size = -(-tokens // max(chunks, 1))
    return max(1, size if size < 128 else -(-size // 128) * 128)


@triton.jit
def scale_kernel(x_ptr, scale_ptr, n, BLOCK: tl.constexpr):
    """x [n] *= scale in place, by a grid of any size. A scale of 1, as most are, costs no pass over x; the CPU could not see
    that without waiting for the GPU."""
    scale = tl.load(scale_ptr)
    if scale != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
            offs = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + offs, mask=offs < n)
            tl.store(x_ptr + offs, x.to(scale.dtype) * scale, mask=offs < n)


def _scale(x: Tensor, scale: Tensor) -> Tensor:
    """x, contiguous, times a scalar, in place."""
    if x.numel() > 0:
        programs = min(-(-x.numel() // BLOCK), 4 * multiprocessors(x.device))
        launch(scale_kernel, programs, x, scale, x.numel(), BLOCK=BLOCK, num_warps=8)
    return x


def linear_cross_entropy_fwd(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    need_x: bool,
    need_weight: bool,
    mean: bool,
    chunk: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of x [M, D], weight [V, D] and target [M], and its gradients; what is not needed is empty, [0]."""
    scale = torch.ones((), dtype=torch_acc_dtype(x.dtype), device=x.device)
    number = None
    if mean:
        number = (target != ignore_index).sum()
        scale /= number
    dx = torch.empty(x.shape if need_x else 0, dtype=x.dtype, device=x.device)
    dweight = torch.empty(weight.shape if need_weight else 0, dtype=x.dtype, device=x.device)
    M, V = len(x), len(weight)
    # One buffer for the logits of all chunks. Each row begins at a multiple of 128 bytes, without which cuBLAS takes slower
    # kernels, as for the 50,257 classes of GPT-2.
    width = -(-V // ROW_ELEMENTS) * ROW_ELEMENTS if V > ROW_ELEMENTS else V
    buffer = torch.empty((min(chunk, M), width), dtype=x.dtype, device=x.device)
    parts = []
    for start in range(0, max(M, 1), chunk):  # without tokens once, for the zeros of dweight
        rows = slice(start, start + chunk)
        part = x[rows]
        logits = buffer[: len(part), :V]
        torch.mm(part, weight.mT, out=logits)
        found, *_ = cross_entropy_fwd(
            logits,
            target[rows],
            ignore_index,
            label_smoothing,
            z_loss,
            scale=scale if need_x or need_weight else None,
        )
        parts.append(found)
        dlogits = logits  # what the kernel left there
        if need_x:
            torch.mm(dlogits, weight, out=dx[rows])
        if need_weight:
            dweight.addmm_(dlogits.mT, part, beta=1 if start else 0)  # with 0, what lay in dweight is not read
    losses = parts[0] if len(parts) == 1 else torch.cat(parts)
    return reduced(losses, target, "mean" if mean else "sum", number), dx, dweight


class LinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, target: Tensor, *settings) -> Tensor:
        need, kind = ctx.needs_input_grad[:2], x.device.type
        # Switching autocast off takes the CPU 10 µs, also where it is off.
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            loss, *ctx.gradients = linear_cross_entropy_fwd(x, weight, target, *need, *settings)
        return loss

    @staticmethod
    def backward(ctx, dloss: Tensor):
        refuse_second("linear_cross_entropy")
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy: backward ran twice, and the first has used the gradients")
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (
            _scale(g, dloss) if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=False)
        )
        return *scaled, *(None,) * 6


def _like(x, weight, target, need_x, need_weight, *_):
    loss = x.new_empty((), dtype=torch_acc_dtype(x.dtype))
    return loss, x.new_empty(x.shape if need_x else 0), x.new_empty(weight.shape if need_weight else 0)


# What torch.compile sees: one operator that gives the gradients with the loss.
linear_cross_entropy_op = operator("linear_cross_entropy", linear_cross_entropy_fwd, like=_like).op


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.need = inputs[3:5]


def _backward(ctx, dloss, *_):
    gradients = ((g * dloss).to(g.dtype) if need else None for g, need in zip(ctx.saved_tensors, ctx.need, strict=True))
    return *gradients, *((None,) * 8)


linear_cross_entropy_op.register_autograd(_backward, setup_context=_setup_context)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    *,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """cross_entropy(x @ weight.T, target, ...) without the logits in memory.

    x [..., D] and weight [V, D] of one dtype (float16, bfloat16, float32 or float64), target [...] int64 or int32.
    reduction "mean" or "sum": the loss is a scalar, float32 (float64 for float64). chunk: tokens at a time; by default
    as many as 2^27 logits allow, or as many logits as the weight has numbers, if these are more. The loss's gradients are computed with the loss; backward() runs once.

    Raises TypeError and ValueError for what does not fit.
    """
    check_tensors("linear_cross_entropy", x=x, weight=weight, target=target)
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(
            f"linear_cross_entropy: x [..., D] needs a weight [V, D], got {list(x.shape)} and {list(weight.shape)}"
        )
    if x.dtype not in DTYPES:
        raise TypeError(f"linear_cross_entropy: x must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise TypeError(
            "linear_cross_entropy: x and weight must have one dtype and device, got "
            f"{x.dtype} on {x.device} and {weight.dtype} on {weight.device}"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"linear_cross_entropy: reduction must be 'mean' or 'sum', got {reduction!r}: each chunk's gradient is "
            "needed before the next, and with 'none' nobody knows it yet"
        )
    if chunk is not None and not (isinstance(chunk, int) and chunk >= 1):
        raise ValueError(f"linear_cross_entropy: chunk must be a whole number of tokens, at least 1, got {chunk}")
    V = weight.shape[0]
    check(x, target, ignore_index, label_smoothing, reduction, z_loss, classes=V)
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # as for any matrix product
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    x, target = x.reshape(-1, x.shape[-1]), target.reshape(-1).contiguous()
    settings = (
        reduction == "mean",
        chunk or chunk_tokens(len(x), V, x.shape[1]),
        ignore_index,
        float(label_smoothing),
        float(z_loss),
    )
    if torch.compiler.is_compiling():
        need = (x.requires_grad, weight.requires_grad)
        return linear_cross_entropy_op(x, weight, target, *need, *settings)[0]
    return LinearCrossEntropyFunction.apply(x, weight, target, *settings)
