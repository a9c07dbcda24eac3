"""Cross-entropy of a linear layer's outputs: what it means, on which inputs it is judged, and the least it must move."""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gpukit.op import Cost, Op
from gpukit.reference import cross_entropy
from gpukit.reference._liger import cutedsl


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, **options) -> Tensor:
    """cross_entropy(x @ weight.T, target) for x [..., D], weight [V, D], target [...]: all logits in memory."""
    return cross_entropy.cross_entropy(x @ weight.mT, target, **options)


def library(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy.at_least_float32(F.cross_entropy(F.linear(x, weight), target))


def make_inputs(shape: tuple[int, int, int], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens M, width D, classes V) -> x [M, D], weight [V, D], target [M] on the CPU; logits of about unit size."""
    M, D, V = shape
    x = torch.randn((M, D), generator=generator, dtype=torch.float32)
    weight = torch.randn((V, D), generator=generator, dtype=torch.float32).div_(math.sqrt(D))
    target = torch.randint(0, V, (M,), generator=generator)
    target[2:3] = cross_entropy.IGNORE_INDEX
    return x.to(dtype), weight.to(dtype), target


def cost(shape: tuple[int, int, int], dtype: torch.dtype) -> Cost:
    """Forward: x and weight once; one product of 2 M V D."""
    M, D, V = shape
    return Cost((M + V) * D * dtype.itemsize + 8 * M, 4, 2 * M * V * D)


def cost_bwd(shape: tuple[int, int, int], dtype: torch.dtype) -> Cost:
    """Backward: both once more, and their gradients; two products."""
    M, D, V = shape
    return Cost((M + V) * D * dtype.itemsize, (M + V) * D * dtype.itemsize, 4 * M * V * D)


def _liger(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return cross_entropy.at_least_float32(liger_fused_linear_cross_entropy(x, weight, target))


def _liger_cutedsl(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss = cutedsl("fused_linear_cross_entropy", first=True)(x, weight, target)
    return cross_entropy.at_least_float32(loss)


def _quack(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    loss = chunked_linear_cross_entropy(x, weight, target, ignore_index=cross_entropy.IGNORE_INDEX)
    return cross_entropy.at_least_float32(loss)


OP = Op(
    name="linear_cross_entropy",
    reference=linear_cross_entropy,
    library=library,
    make_inputs=make_inputs,
    cost=cost,
    cost_bwd=cost_bwd,
    test_shapes=((1, 1, 3), (3, 16, 33), (10, 8, 251)),
    bench_shapes=((8192, 4096, 128256),),
    bench_modes=("fwd+bwd",),
    peers={"compile": library, "liger-triton": _liger, "liger-cutedsl": _liger_cutedsl, "quack": _quack},
    check_shape=lambda shape: (min(shape[0], 256), min(shape[1], 256), min(shape[2], 4096)),
)
