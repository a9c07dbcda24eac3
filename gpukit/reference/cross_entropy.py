"""Cross-entropy of logits with class indices: what it means, on which inputs it is judged, and the least it must move."""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gpukit.op import Cost, Op
from gpukit.reference._liger import cutedsl

IGNORE_INDEX = -100


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy of logits [..., V] with class indices [...], the mean over targets that are not ignore_index.

    A loss in 16 bits has two or three digits, so it is returned in float32, as all losses here."""
    lse = torch.logsumexp(logits, dim=-1)
    counts = target != ignore_index
    x_target = logits.gather(-1, torch.where(counts, target, 0).unsqueeze(-1)).squeeze(-1)
    losses = lse - (1 - label_smoothing) * x_target
    if label_smoothing:
        losses = losses - label_smoothing * logits.mean(dim=-1)
    losses = torch.where(counts, losses + z_loss * lse**2, 0)
    if reduction == "none":
        return at_least_float32(losses)
    return at_least_float32(losses.sum() if reduction == "sum" else losses.sum() / counts.sum())


def at_least_float32(loss: Tensor) -> Tensor:
    return loss if loss.dtype == torch.float64 else loss.float()


def library(logits: Tensor, target: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """PyTorch's cross_entropy, which holds log-probabilities of the logits' size for the backward pass."""
    return at_least_float32(F.cross_entropy(logits, target, ignore_index=ignore_index))


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, Tensor]:
    """logits [..., V] and target [...] on the CPU. Normal noise, and by row, as far as there are rows:

    0  large: exp of it overflows fp32      1  constant      2  to be ignored
    3  -inf in every second place, but not at the target     4  the target far below the rest
    """
    *_, V = shape
    x = torch.randn(shape, generator=generator, dtype=torch.float64).mul_(3)
    target = torch.randint(0, V, shape[:-1], generator=generator)
    rows, flat = x.view(-1, V), target.view(-1)
    if len(rows) > 0:
        rows[0] += 100
    if len(rows) > 1:
        rows[1] = 7
    if len(rows) > 2:
        flat[2] = IGNORE_INDEX
    if len(rows) > 3:
        flat[3] = 0
        rows[3, 1::2] = -math.inf
    if len(rows) > 4 and V > 1:
        rows[4, flat[4]] = -60
    return x.to(dtype), target


def cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward: the logits once, an index and a loss a row; a maximum, a difference, an exp and a sum an element."""
    *leading, V = shape
    rows = math.prod(leading)
    return Cost(rows * (V * dtype.itemsize + 8), 4 * rows, 4 * rows * V)


def cost_bwd(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Backward: the logits once, the gradient once; a difference, an exp and two products an element."""
    *leading, V = shape
    rows = math.prod(leading)
    return Cost(rows * (V * dtype.itemsize + 12), rows * V * dtype.itemsize, 4 * rows * V)


def cost_both(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward and backward at once: the logits once, the gradient once."""
    *leading, V = shape
    rows = math.prod(leading)
    return Cost(rows * (V * dtype.itemsize + 8), rows * (V * dtype.itemsize + 4), 8 * rows * V)


def _liger(logits: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return at_least_float32(liger_cross_entropy(logits, target))


def _liger_cutedsl(logits: Tensor, target: Tensor) -> Tensor:
    return at_least_float32(cutedsl("cross_entropy", first=True)(logits, target))


def _quack(logits: Tensor, target: Tensor) -> Tensor:
    from quack.cross_entropy import cross_entropy

    return at_least_float32(cross_entropy(logits, target, ignore_index=IGNORE_INDEX))


class _QuackInplace(torch.autograd.Function):
    """QuACK's loss and gradient from one kernel, the gradient where the logits were. The kernel adds losses up; that it
    computes the mean, without a pass over the gradient to divide it, is said by class weights of 1 / count."""

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor) -> Tensor:
        from quack.cross_entropy import cross_entropy_fwd

        count = (target != IGNORE_INDEX).sum()
        weight = (1 / count.float()).expand(logits.shape[-1]).contiguous()
        losses, dx = cross_entropy_fwd(
            logits, target, weight=weight, ignore_index=IGNORE_INDEX, return_dx=True, inplace_backward=True
        )
        ctx.dx = dx.detach()
        return losses.sum()

    @staticmethod
    def backward(ctx, dloss: Tensor) -> tuple[Tensor, None]:
        return ctx.dx, None  # of a loss, whose upstream gradient is 1 in every benchmark


OP = Op(
    name="cross_entropy",
    reference=cross_entropy,
    library=library,
    make_inputs=make_inputs,
    cost=cost,
    cost_bwd=cost_bwd,
    cost_both=cost_both,
    test_shapes=((1, 1), (2, 1), (6, 64), (5, 63), (5, 65), (7, 251), (2, 3, 781)),
    bench_shapes=((4096, 32000), (4096, 128256)),
    bench_modes=("fwd", "fwd+bwd"),
    peers={
        "compile": library,
        "liger-triton": _liger,
        "liger-cutedsl": _liger_cutedsl,
        "quack": _quack,
        "quack-inplace": _QuackInplace.apply,
        "gpukit-inplace": "gpukit.kernels.cross_entropy:cross_entropy_inplace",
    },
)
