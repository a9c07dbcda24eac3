"""One operation as data, shared by tests, checks and benchmarks: what it computes, on which inputs, at what cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator, Tensor, dtype


@dataclass(frozen=True)
class Cost:
    """The least an operation must do: bytes read from and written to device memory, and FLOPs (a multiply-add is 2)."""

    read_bytes: int
    write_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True)
class Op:
    """One operation.

    reference    plain PyTorch that runs in any dtype, float64 included: what the result means
    library      PyTorch's own fused call for the same result: what a kernel is compared with
    make_inputs  (shape, dtype, generator) -> inputs on the CPU; the hard cases are in them (large values, constant rows)
    cost         (shape, dtype) -> Cost of the forward pass
    cost_bwd     the same for the backward pass, or None
    test_shapes  1, a power of two, that minus and plus one, a prime
    bench_shapes sizes from language models
    """

    name: str
    reference: Callable[..., Tensor]
    library: Callable[..., Tensor]
    make_inputs: Callable[[tuple[int, ...], dtype, Generator], tuple[Tensor, ...]]
    cost: Callable[[tuple[int, ...], dtype], Cost]
    test_shapes: tuple[tuple[int, ...], ...]
    bench_shapes: tuple[tuple[int, ...], ...]
    cost_bwd: Callable[[tuple[int, ...], dtype], Cost] | None = None
