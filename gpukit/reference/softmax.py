"""Softmax over the last dimension: what it means, on which inputs it is judged, and the least it must move."""

import math

import torch
from torch import Generator, Tensor

from gpukit.op import Cost, Op
from gpukit.reference._liger import cutedsl


def softmax(x: Tensor) -> Tensor:
    """Softmax of x [..., N] over N, one pass over memory per line: five kernels where one would do.

    In PyTorch these lines read 5 M N + 2 M elements and write 3 M N + 2 M, for M rows: four times the fused minimum.
    A row of nothing but -inf has no softmax: its maximum is -inf, -inf - -inf is NaN, and so is the whole row, here as
    in torch.softmax and in the kernel. A row that holds +inf or NaN becomes NaN too.
    """
    maximum = x.amax(dim=-1, keepdim=True)
    shifted = x - maximum
    numerator = torch.exp(shifted)
    denominator = numerator.sum(dim=-1, keepdim=True)
    return numerator / denominator


def library(x: Tensor) -> Tensor:
    """PyTorch's fused softmax over the last dimension."""
    return torch.softmax(x, dim=-1)


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple[Tensor]:
    """x [shape] on the CPU. Normal noise, and by row, as far as there are rows:

    0  large: exp of it overflows fp32, so the maximum must be subtracted
    1  constant: every element of the result is 1 / N
    2  -inf in every second place, as a causal mask leaves it
    3  very negative: a sum that starts from exp(x) without the maximum is 0
    4  one element far above the rest
    """
    x = torch.randn(shape, generator=generator, dtype=torch.float64).mul_(3)
    rows = x.view(-1, shape[-1])
    for row, change in enumerate((_large, _constant, _masked, _very_negative, _peaked)):
        if row < len(rows):
            change(rows[row])
    return (x.to(dtype),)


def _large(row: Tensor) -> None:
    row.add_(100)


def _constant(row: Tensor) -> None:
    row.fill_(7)


def _masked(row: Tensor) -> None:
    row[1::2] = -math.inf  # the first element stays: a row of -inf alone is NaN


def _very_negative(row: Tensor) -> None:
    row.sub_(30_000)  # within the range of fp16


def _peaked(row: Tensor) -> None:
    row[-1:] = 50


def cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward: x read once, y written once; per element a maximum, a difference, an exp, a sum and a division."""
    elements = math.prod(shape)
    return Cost(elements * dtype.itemsize, elements * dtype.itemsize, 5 * elements)


def cost_bwd(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Backward, dx = y (dy - sum(y dy)): y and dy read once, dx written once; two products, a sum and a difference."""
    elements = math.prod(shape)
    return Cost(2 * elements * dtype.itemsize, elements * dtype.itemsize, 4 * elements)


OP = Op(
    name="softmax",
    reference=softmax,
    library=library,
    make_inputs=make_inputs,
    cost=cost,
    cost_bwd=cost_bwd,
    test_shapes=((1, 1), (2, 1), (6, 64), (5, 63), (5, 65), (7, 251), (2, 3, 781), (2, 1025)),
    bench_shapes=((4096, 1024), (8192, 781), (4096, 4096), (4096, 16384), (4096, 65536), (4096, 131072)),
    peers={
        "liger-triton": "liger_kernel.ops.softmax:LigerSoftmaxFunction.apply",
        "liger-cutedsl": cutedsl("softmax"),
        "quack": "quack.softmax:softmax",
    },
)


def log_softmax(x: Tensor) -> Tensor:
    """The logarithm of softmax(x), finite where softmax(x) rounds to 0."""
    shifted = x - x.amax(dim=-1, keepdim=True)
    return shifted - torch.exp(shifted).sum(dim=-1, keepdim=True).log()


def log_library(x: Tensor) -> Tensor:
    return torch.log_softmax(x, dim=-1)


# Its costs are softmax's: a difference takes the place of the division, in the gradient an exp that of a product.
LOG_SOFTMAX = Op(
    name="log_softmax",
    reference=log_softmax,
    library=log_library,
    make_inputs=make_inputs,
    cost=cost,
    cost_bwd=cost_bwd,
    test_shapes=OP.test_shapes,
    bench_shapes=((4096, 4096), (4096, 32000), (4096, 128256)),
)
