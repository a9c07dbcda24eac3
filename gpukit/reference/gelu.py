"""GELU, bias + GELU, SwiGLU and GEGLU: what they mean, on which inputs they are judged, and the least they must move."""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gpukit.op import Cost, Op
from gpukit.reference._liger import cutedsl


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Phi(x), or its tanh form: 5 and 8 passes over memory in PyTorch where one would do."""
    if approximate == "tanh":
        u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + torch.tanh(u))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    return gelu(x + bias, approximate)


def bias_gelu_library(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """PyTorch's fused GELU after the sum, which is rounded and written in between."""
    return F.gelu(x + bias, approximate=approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def swiglu_library(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return gelu(gate, approximate) * up


def geglu_library(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def _activations(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Normal noise in float64, and by row, as far as there are rows:

    0  large: e^x overflows fp32, and so does e^(x^2) by far
    1  very negative: 1 + erf(x) and 1 + tanh(u) are 0 to the last digit
    2  tiny: the result is x / 2
    3  the negative tail, from -6 to 0, where 1 + erf(x) cancels
    """
    x = torch.randn(shape, generator=generator, dtype=torch.float64).mul_(2)
    rows = x.view(-1, shape[-1])
    for row, change in enumerate((_large, _very_negative, _tiny, _tail)):
        if row < len(rows):
            change(rows[row])
    return x


def _large(row: Tensor) -> None:
    row.add_(300)


def _very_negative(row: Tensor) -> None:
    row.sub_(300)


def _tiny(row: Tensor) -> None:
    row.mul_(1e-3)


def _tail(row: Tensor) -> None:
    row.copy_(torch.linspace(-6, 0, len(row), dtype=row.dtype))


def make_gelu_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple[Tensor]:
    """x [shape] on the CPU."""
    return (_activations(shape, generator).to(dtype),)


def make_bias_gelu_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, Tensor]:
    """x [..., N] and bias [N] on the CPU."""
    x = _activations(shape, generator)
    return x.to(dtype), torch.randn(shape[-1], generator=generator, dtype=torch.float64).to(dtype)


def make_swiglu_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, Tensor]:
    """gate and up [shape] on the CPU."""
    gate = _activations(shape, generator)
    return gate.to(dtype), torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def gelu_cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward, erf form: x read and y written once; a scaling, an erf, a sum and two products an element."""
    elements = math.prod(shape)
    return Cost(elements * dtype.itemsize, elements * dtype.itemsize, 5 * elements)


def gelu_cost_bwd(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Backward, dx = dy (Phi(x) + x phi(x)): dy and x read, dx written; 4 for Phi, 4 for phi, and 3 to join them."""
    elements = math.prod(shape)
    return Cost(2 * elements * dtype.itemsize, elements * dtype.itemsize, 11 * elements)


def bias_gelu_cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward: GELU's, the bias read once and a sum an element."""
    elements, N = math.prod(shape), shape[-1]
    return Cost((elements + N) * dtype.itemsize, elements * dtype.itemsize, 6 * elements)


def bias_gelu_cost_bwd(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Backward: GELU's, the bias read and its gradient written once; the sum again, and one into the bias' gradient."""
    elements, N = math.prod(shape), shape[-1]
    return Cost((2 * elements + N) * dtype.itemsize, (elements + N) * dtype.itemsize, 13 * elements)


def swiglu_cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward: gate and up read, y written; a sigmoid (sign, exp, sum, division) and two products an element."""
    elements = math.prod(shape)
    return Cost(2 * elements * dtype.itemsize, elements * dtype.itemsize, 6 * elements)


def swiglu_cost_bwd(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Backward, with s the sigmoid: dup = dy gate s, dgate = dy up (s + gate s (1 - s)). dy, gate and up read, dgate and
    dup written; the sigmoid again, gate s, and 6 more an element."""
    elements = math.prod(shape)
    return Cost(3 * elements * dtype.itemsize, 2 * elements * dtype.itemsize, 11 * elements)


def geglu_cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward, erf form: gate and up read, y written; GELU's 5 and a product an element."""
    elements = math.prod(shape)
    return Cost(2 * elements * dtype.itemsize, elements * dtype.itemsize, 6 * elements)


def geglu_cost_bwd(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Backward: dup = dy gelu(gate), dgate = dy up gelu'(gate). dy, gate and up read, dgate and dup written; GELU's 11 for
    its derivative, which has Phi for GELU's value, and 3 products more an element."""
    elements = math.prod(shape)
    return Cost(3 * elements * dtype.itemsize, 2 * elements * dtype.itemsize, 14 * elements)


TEST_SHAPES = ((1, 1), (2, 1), (6, 64), (5, 63), (5, 65), (7, 251), (2, 3, 781), (2, 1025))

GELU = Op(
    name="gelu",
    reference=gelu,
    library=F.gelu,
    make_inputs=make_gelu_inputs,
    cost=gelu_cost,
    cost_bwd=gelu_cost_bwd,
    test_shapes=TEST_SHAPES,
    bench_shapes=((4096, 4096), (16384, 4096)),
)
BIAS_GELU = Op(
    name="bias_gelu",
    reference=bias_gelu,
    library=bias_gelu_library,
    make_inputs=make_bias_gelu_inputs,
    cost=bias_gelu_cost,
    cost_bwd=bias_gelu_cost_bwd,
    test_shapes=TEST_SHAPES,
    bench_shapes=((4096, 4096), (16384, 4096), (8192, 16384)),
)
SWIGLU = Op(
    name="swiglu",
    reference=swiglu,
    library=swiglu_library,
    make_inputs=make_swiglu_inputs,
    cost=swiglu_cost,
    cost_bwd=swiglu_cost_bwd,
    test_shapes=TEST_SHAPES,
    bench_shapes=((16384, 4096), (8192, 14336)),
    peers={
        "liger-triton": "liger_kernel.ops.swiglu:LigerSiLUMulFunction.apply",
        "liger-cutedsl": cutedsl("swiglu"),
    },
)
GEGLU = Op(
    name="geglu",
    reference=geglu,
    library=geglu_library,
    make_inputs=make_swiglu_inputs,
    cost=geglu_cost,
    cost_bwd=geglu_cost_bwd,
    test_shapes=TEST_SHAPES,
    bench_shapes=((16384, 4096), (8192, 14336)),
)
