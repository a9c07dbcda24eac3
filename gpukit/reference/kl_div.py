"""KL divergence from log-probabilities: what it means, on which inputs it is judged, and the least it must move."""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gpukit.op import Cost, Op
from gpukit.reference._liger import cutedsl


def kl_div(input: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """KL divergence of log-probabilities input [..., V] from target, probabilities or log-probabilities [..., V]."""
    terms = target.exp() * (target - input) if log_target else torch.xlogy(target, target) - target * input
    if reduction == "none":
        return terms
    divisor = {"sum": 1, "mean": input.numel(), "batchmean": input.shape[0]}[reduction]
    return terms.sum() / divisor


def library(input: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False) -> Tensor:
    return F.kl_div(input, target, reduction=reduction, log_target=log_target)


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, Tensor]:
    """Log-probabilities and probabilities of random logits, on the CPU; the first row of the target has zeros."""
    x, t = (torch.randn(shape, generator=generator, dtype=torch.float64).mul_(2) for _ in range(2))
    t = torch.softmax(t, -1)
    t.view(-1, shape[-1])[:1, 1::2] = 0
    return torch.log_softmax(x, -1).to(dtype), t.to(dtype)


def cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward: both once; a logarithm, a difference, a product and a sum an element."""
    elements = math.prod(shape)
    return Cost(2 * elements * dtype.itemsize, dtype.itemsize, 4 * elements)


def cost_bwd(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Backward: the target once, the gradient once; a product an element."""
    elements = math.prod(shape)
    return Cost(elements * dtype.itemsize, elements * dtype.itemsize, elements)


def _liger(input: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction

    return LigerKLDivLossFunction.apply(input, target, "mean", False)


OP = Op(
    name="kl_div",
    reference=kl_div,
    library=library,
    make_inputs=make_inputs,
    cost=cost,
    cost_bwd=cost_bwd,
    test_shapes=((1, 1), (2, 1), (6, 64), (5, 63), (5, 65), (2, 3, 781), (3, 5000)),
    bench_shapes=((4096, 32768),),
    bench_dtypes=("float32", "bfloat16"),
    bench_modes=("fwd", "fwd+bwd"),
    grads=(0,),
    peers={"liger-triton": _liger, "liger-cutedsl": cutedsl("kl_div", "mean", False)},
)
