"""Products in 8 bits: what they mean, how PyTorch makes them, on which inputs they are judged, and the least they must move.

Shapes are (M, N, K): a [M, K] times b [K, N], both in 16 bits when the product begins, as in training.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor

from gpukit.op import Cost, Op
from gpukit.reference import matmul

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def fp8_matmul(a: Tensor, b: Tensor, scaling: str = "tensor") -> Tensor:
    """a [M, K] @ b [K, N], of which 8 bits are an approximation, whatever the scaling."""
    return a @ b


def quantize(x: Tensor, dtype: torch.dtype, scaling: str) -> tuple[Tensor, Tensor]:
    """x [M, K] in 8 bits, and the factor that it has to be multiplied by again: float32 [] or, for "row", [M, 1]."""
    largest = torch.finfo(dtype).max
    size = x.abs().amax() if scaling == "tensor" else x.abs().amax(-1, keepdim=True)
    factor = (size.float() / largest).clamp(min=2.0**-100)
    return (x.float() / factor).clamp(-largest, largest).to(dtype), factor


def _product(a: Tensor, b: Tensor, formats: tuple[torch.dtype, torch.dtype], scaling: str) -> Tensor:
    """a [M, K] @ b [N, K]^T of operands in 8 bits, in bfloat16. On a GPU by cuBLAS."""
    left, right = (quantize(x.contiguous(), dtype, scaling) for x, dtype in zip((a, b), formats, strict=True))
    return _multiply(*left, *right).to(torch.bfloat16 if a.dtype == torch.float32 else a.dtype)


def _multiply(a: Tensor, a_factor: Tensor, b: Tensor, b_factor: Tensor, fast: bool = False) -> Tensor:
    """a [M, K] @ b [N, K]^T with their factors, in bfloat16. `fast` leaves a sum to the tensor cores, whose bits are few."""
    if not a.is_cuda:
        return ((a.float() * a_factor) @ (b.float() * b_factor).mT).bfloat16()
    b_factor = b_factor.mT if b_factor.ndim else b_factor
    return torch._scaled_mm(a, b.mT, scale_a=a_factor, scale_b=b_factor, out_dtype=torch.bfloat16, use_fast_accum=fast)


class _PyTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, scaling: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scaling = scaling
        return _product(a, b.mT, (E4M3, E4M3), scaling)

    @staticmethod
    def backward(ctx, dc: Tensor) -> tuple:
        a, b = ctx.saved_tensors
        of_gradient = E5M2 if ctx.scaling == "tensor" else E4M3
        da = _product(dc, b, (of_gradient, E4M3), ctx.scaling).to(a.dtype)
        db = _product(dc.mT, a.mT, (of_gradient, E4M3), ctx.scaling).to(b.dtype)
        return da, db.mT, None


def library(a: Tensor, b: Tensor, scaling: str = "tensor") -> Tensor:
    """The same in 8 bits through PyTorch, its gradients as well; float64 stays float64."""
    if a.dtype == torch.float64:
        return a @ b
    return _PyTorch.apply(a, b, scaling)


def make_inputs(shape: tuple[int, int, int], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, Tensor]:
    """a [M, K] and b [K, N] on the CPU, the transpose of a linear layer's weight [N, K]; results of about unit size."""
    M, N, K = shape
    a = torch.randn((M, K), generator=generator, dtype=torch.float32)
    weight = torch.randn((N, K), generator=generator, dtype=torch.float32).div_(max(K, 1) ** 0.5)
    return a.to(dtype), weight.to(dtype).mT


# What is timed of the product alone begins when its operands are in 8 bits. Each provider gets a [M, K] and b [N, K] in 16 bits.
def prepared(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """Without 8 bits: on a GPU cuBLAS's product."""
    return lambda: a @ b.mT


def prepared_library(a: Tensor, b: Tensor, scaling: str = "tensor", fast: bool = False) -> Callable[[], Tensor]:
    """PyTorch's product in 8 bits; float64 stays float64."""
    if a.dtype == torch.float64:
        return prepared(a, b)
    operands = *quantize(a, E4M3, scaling), *quantize(b, E4M3, scaling)
    return lambda: _multiply(*operands, fast)


def make_rows(shape: tuple[int, int, int], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, Tensor]:
    """a [M, K] and b [N, K] on the CPU, as in `make_inputs`."""
    a, b = make_inputs(shape, dtype, generator)
    return a, b.mT


def _at_most_2048(shape: tuple[int, ...]) -> tuple[int, ...]:
    """float64 of the measured sizes would take too long."""
    return tuple(min(size, 2048) for size in shape)


OP = Op(
    name="fp8_matmul",
    reference=fp8_matmul,
    library=library,
    make_inputs=make_inputs,
    cost=matmul.cost,
    cost_bwd=matmul.cost_bwd,
    test_shapes=((1, 1, 1), (1, 33, 7), (64, 64, 64), (63, 65, 64), (17, 31, 97), (70, 3, 33), (3, 96, 1)),
    bench_shapes=((4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096), (4096, 4096, 14336)),
    bench_modes=("fwd", "bwd", "fwd+bwd"),
    arithmetic="float8_e4m3fn",
    peers={"compile": library, "gpukit-by-row": "gpukit.kernels.fp8_matmul:fp8_matmul_by_row"},
    check_shape=_at_most_2048,
)


def product_cost(shape: tuple[int, int, int], dtype: torch.dtype) -> Cost:
    """a and b in 8 bits read once, the result in 16 written once; a product and a sum for each of M N K."""
    M, N, K = shape
    return Cost((M + N) * K, M * N * dtype.itemsize, 2 * M * N * K)


PRODUCT = Op(
    name="fp8_product",
    reference=prepared,
    library=prepared_library,
    make_inputs=make_rows,
    cost=product_cost,
    test_shapes=OP.test_shapes,
    bench_shapes=OP.bench_shapes,
    bench_modes=("fwd",),
    arithmetic="float8_e4m3fn",
    peers={
        "library-fast": partial(prepared_library, fast=True),
        "library-by-row": partial(prepared_library, scaling="row"),
        "gpukit": "gpukit.kernels.fp8_matmul:prepared_product",
        "gpukit-by-row": "gpukit.kernels.fp8_matmul:prepared_product_by_row",
    },
    build=lambda provider, inputs: provider(*inputs),
    check_shape=_at_most_2048,
)
