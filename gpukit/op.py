"""One operation as data, shared by tests, checks and benchmarks: what it computes, on which inputs, at what cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    """One operation. A module of gpukit.reference holds one, called OP, or several.

    reference    plain PyTorch that runs in any dtype, float64 included: what the result means
    library      PyTorch's own fused call for the same result: what a kernel is compared with
    make_inputs  (shape, dtype, generator) -> inputs on the CPU; the hard cases are in them (large values, constant rows)
    cost         (shape, dtype) -> Cost of the forward pass
    cost_bwd     the same for the backward pass, or None
    test_shapes  1, a power of two, that minus and plus one, a prime
    bench_shapes sizes from language models

    What only a benchmark reads (gpukit/benchmark.py says how):

    peers        more providers by name: a function with the reference's arguments, or "module:name" of a package that
                 need not be installed
    kernel       our function's name in gpukit.kernels; default: the operation's own name
    bench_dtypes names of torch dtypes
    arithmetic   name of the torch dtype that products are in, whose peak no time may exceed; default: the inputs'
    bench_modes  "fwd", "bwd", "fwd+bwd", "wall"
    grads        which inputs get gradients; default: all floating-point tensors
    check_shape  shape -> a smaller shape on which results are compared with float64; default: fewer of the first dimension
    cost_both    cost of forward and backward in one call, where that is less than their sum
    build        (provider, inputs) -> the call to time, for what must be set up first, such as an optimizer
    observed     (inputs, result) -> what is compared in the result's place, where providers draw random numbers of their
                 own; gradients are then not compared
    """

    name: str
    reference: Callable[..., Tensor | tuple[Tensor, ...]]
    library: Callable[..., Tensor | tuple[Tensor, ...]]
    make_inputs: Callable[[tuple[int, ...], dtype, Generator], tuple]
    cost: Callable[[tuple[int, ...], dtype], Cost]
    test_shapes: tuple[tuple[int, ...], ...]
    bench_shapes: tuple[tuple[int, ...], ...]
    cost_bwd: Callable[[tuple[int, ...], dtype], Cost] | None = None
    peers: Mapping[str, Callable | str] = field(default_factory=dict, hash=False)
    kernel: str = ""
    bench_dtypes: tuple[str, ...] = ("bfloat16",)
    arithmetic: str = ""
    bench_modes: tuple[str, ...] = ("fwd", "bwd")
    grads: tuple[int, ...] | None = None
    check_shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None
    cost_both: Callable[[tuple[int, ...], dtype], Cost] | None = None
    build: Callable[[Callable, tuple], Callable] | None = None
    observed: Callable[[tuple, Tensor], tuple[Tensor, ...]] | None = None
