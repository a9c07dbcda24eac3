"""Matrix multiplication with what follows it: what it means, on which inputs it is judged, and the least it must move.

Shapes are (M, N, K): a [M, K] times b [K, N].
"""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gpukit.op import Cost, Op


def matmul(
    a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str | None = None, residual: Tensor | None = None
) -> Tensor:
    """activation(a @ b + bias) + residual, each step a pass over memory of its own.

    activation: None, "gelu", "gelu_tanh" or "swiglu", silu of the first half of the columns times the second half.
    """
    y = a @ b
    if bias is not None:
        y = y + bias
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * up
    elif activation is not None:
        y = F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y if residual is None else y + residual


def naive_traffic(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Bytes that are read if each element of the result fetches its row of a and its column of b."""
    M, N, K = shape
    return 2 * M * N * K * dtype.itemsize


def tiled_traffic(shape: tuple[int, int, int], dtype: torch.dtype, BLOCK_M: int, BLOCK_N: int) -> int:
    """Bytes that programs read with a tile each: b once for each row of tiles, a once for each column of them."""
    M, N, K = shape
    rows, columns = -(-M // BLOCK_M), -(-N // BLOCK_N)
    return (columns * M * K + rows * K * N) * dtype.itemsize


def make_inputs(shape: tuple[int, int, int], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, Tensor]:
    """a [M, K] and b [K, N] on the CPU, the transpose of a linear layer's weight [N, K]; results of about unit size.

    Row 0 of a and column 0 of b are ones: their product is K, which sums in 16 bits do not reach.
    """
    M, N, K = shape
    a = torch.randn((M, K), generator=generator, dtype=torch.float32)
    weight = torch.randn((N, K), generator=generator, dtype=torch.float32).div_(max(K, 1) ** 0.5)
    a[:1] = 1
    weight[:1] = 1
    return a.to(dtype), weight.to(dtype).mT


def make_bias_inputs(shape: tuple[int, int, int], dtype: torch.dtype, generator: Generator):
    """a, b as in `make_inputs`, and bias [N]."""
    a, b = make_inputs(shape, dtype, generator)
    return a, b, torch.randn(shape[1], generator=generator, dtype=torch.float32).to(dtype)


def cost(shape: tuple[int, int, int], dtype: torch.dtype) -> Cost:
    """Forward: a and b read once, the result written once; a product and a sum for each of M N K."""
    M, N, K = shape
    return Cost((M * K + K * N) * dtype.itemsize, M * N * dtype.itemsize, 2 * M * N * K)


def cost_bwd(shape: tuple[int, int, int], dtype: torch.dtype) -> Cost:
    """Backward, da = dc b^T and db = a^T dc: dc, a and b read once, da and db written once; two products."""
    M, N, K = shape
    operands = (M * K + K * N) * dtype.itemsize
    return Cost(operands + M * N * dtype.itemsize, operands, 4 * M * N * K)


def bias_gelu_cost(shape: tuple[int, int, int], dtype: torch.dtype) -> Cost:
    """matmul's, the bias once, and a sum and five operations of GELU for each element of the result."""
    M, N, _ = shape
    plain = cost(shape, dtype)
    return Cost(plain.read_bytes + N * dtype.itemsize, plain.write_bytes, plain.flops + 6 * M * N)


def library(a: Tensor, b: Tensor) -> Tensor:
    """PyTorch's matmul: on a GPU cuBLAS."""
    return torch.matmul(a, b)


def matmul_bias_gelu(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return matmul(a, b, bias, "gelu")


def bias_gelu_library(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """cuBLAS with the bias in it, then PyTorch's fused GELU."""
    return F.gelu(F.linear(a, b.mT, bias))


def _at_most_2048(shape: tuple[int, ...]) -> tuple[int, ...]:
    """float64 of the measured sizes would take a CPU minutes."""
    return tuple(min(size, 2048) for size in shape)


OP = Op(
    name="matmul",
    reference=matmul,
    library=library,
    make_inputs=make_inputs,
    cost=cost,
    cost_bwd=cost_bwd,
    test_shapes=((1, 1, 1), (1, 33, 7), (64, 64, 64), (63, 65, 64), (17, 31, 97), (70, 3, 33), (3, 96, 1)),
    bench_shapes=(
        (1024, 1024, 1024), (1793, 1793, 1793), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (8192, 28672, 8192),
        (16384, 16384, 16384),
    ),
    bench_modes=("fwd",),
    peers={
        "quack": "quack.gemm_interface:gemm",
        "gpukit-pointers": "gpukit.kernels.matmul:matmul_by_pointers",
    },
    check_shape=_at_most_2048,
)  # fmt: skip

BIAS_GELU = Op(
    name="matmul_bias_gelu",
    reference=matmul_bias_gelu,
    library=bias_gelu_library,
    make_inputs=make_bias_inputs,
    cost=bias_gelu_cost,
    test_shapes=OP.test_shapes,
    bench_shapes=((8192, 8192, 8192),),
    bench_modes=("fwd",),
    peers={"compile": bias_gelu_library, "gpukit": "gpukit.kernels.matmul:matmul_bias_gelu"},
    check_shape=_at_most_2048,
)
