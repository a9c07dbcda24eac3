"""Products with int8 and int4 weights: what they mean, on which inputs they are judged, and the least they must move.

Shapes are (M, N, K): a [M, K] times the weight [K, N] that is stored in 8 or 4 bits, with a scale for each GROUP of rows in
each column.
"""

from functools import lru_cache

import torch
from torch import Generator, Tensor

from gpukit.op import Cost, Op

GROUP = 128


def _int4(weight: Tensor) -> Tensor:
    """-8..7 [K, N] of int16 [K / 4, N]: of 64 rows of weights, row j of 16 holds rows j, 16 + j, 32 + j and 48 + j, from
    the lowest bits on, each as q + 8."""
    K = 4 * weight.shape[0]
    row = torch.arange(K, device=weight.device)
    word = weight[row // 64 * 16 + row % 16].int()
    return (word >> (row % 64 // 16 * 4).view(K, 1)) % 16 - 8


def dequantize(q: Tensor, scales: Tensor) -> Tensor:
    """q [K, N] times its group's scale [K / group, N], in the scales' dtype."""
    return q.to(scales.dtype) * scales.repeat_interleave(q.shape[0] // scales.shape[0], dim=0)


def int8_matmul(a: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """a [M, K], weight int8 [K, N], scales [K / group, N]: the weight as floating-point numbers, then a product."""
    return a @ dequantize(weight, scales)


def int4_matmul(a: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """As `int8_matmul`, with weight int16 [K / 4, N]."""
    return a @ dequantize(_int4(weight), scales)


@lru_cache(maxsize=16)  # a CUDA graph goes through copies of the inputs
def _in_16_bits(weight: Tensor, scales: Tensor) -> Tensor:
    """The same weights as they would be without quantisation, made once: [N, K] in memory, as a linear layer has them."""
    q = weight if weight.dtype == torch.int8 else _int4(weight)
    return dequantize(q, scales).mT.contiguous().mT


def cublas(a: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """What decoding costs without quantisation: a product with weights in a's dtype."""
    return a @ _in_16_bits(weight, scales)


def _make(shape: tuple[int, int, int], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, Tensor]:
    M, N, K = shape
    a = torch.randn((M, K), generator=generator, dtype=torch.float32)
    groups = -(-K // GROUP)
    scales = torch.rand((groups, N), generator=generator, dtype=torch.float32).add_(0.1).div_(K**0.5)
    scales[:, :1] = 0  # a column of zeros
    return a.to(dtype), scales.to(dtype)


def make_int8_inputs(shape: tuple[int, int, int], dtype: torch.dtype, generator: Generator):
    """a [M, K], weight int8 [K, N] whose columns are contiguous, scales [K / GROUP, N] on the CPU."""
    a, scales = _make(shape, dtype, generator)
    _, N, K = shape
    return a, torch.randint(-128, 128, (N, K), generator=generator, dtype=torch.int8).mT, scales


def make_int4_inputs(shape: tuple[int, int, int], dtype: torch.dtype, generator: Generator):
    """a [M, K], weight int16 [K / 4, N], scales [K / GROUP, N] on the CPU. Any 16 bits are four weights."""
    a, scales = _make(shape, dtype, generator)
    _, N, K = shape
    return a, torch.randint(-32768, 32768, (K // 4, N), generator=generator, dtype=torch.int16), scales


def _cost(shape: tuple[int, int, int], dtype: torch.dtype, bits: int) -> Cost:
    M, N, K = shape
    read = M * K * dtype.itemsize + K * N * bits // 8 + -(-K // GROUP) * N * dtype.itemsize
    return Cost(read, M * N * dtype.itemsize, 2 * M * N * K)


def int8_cost(shape: tuple[int, int, int], dtype: torch.dtype) -> Cost:
    """a, a byte for each weight and a scale for each group of them once, the result once; one product."""
    return _cost(shape, dtype, 8)


def int4_cost(shape: tuple[int, int, int], dtype: torch.dtype) -> Cost:
    """As `int8_cost` with half a byte for each weight."""
    return _cost(shape, dtype, 4)


INT8 = Op(
    name="int8_matmul",
    reference=int8_matmul,
    library=int8_matmul,
    make_inputs=make_int8_inputs,
    cost=int8_cost,
    test_shapes=((1, 1, 128), (1, 33, 256), (16, 64, 128), (5, 65, 384), (17, 31, 256)),
    bench_shapes=((1, 14336, 4096), (4, 14336, 4096), (16, 14336, 4096)),
    bench_modes=("fwd",),
    peers={"cublas": cublas},
    grads=(0,),
    check_shape=lambda shape: shape,
)
INT4 = Op(
    name="int4_matmul",
    reference=int4_matmul,
    library=int4_matmul,
    make_inputs=make_int4_inputs,
    cost=int4_cost,
    test_shapes=INT8.test_shapes,
    bench_shapes=INT8.bench_shapes,
    bench_modes=("fwd",),
    peers={"cublas": cublas},
    grads=(0,),
    check_shape=lambda shape: shape,
)
