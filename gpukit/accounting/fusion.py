"""What a graph of operations moves through device memory, for any choice of which neighbors share a kernel.

A kernel reads each tensor that it needs and has not made itself, once, and writes each tensor that somebody needs after
it; whatever else it makes stays in registers. Nothing is run. Times are the larger of bytes over the memory's peak rate and
FLOPs over the peak of their unit: launches, caches and what cannot overlap are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpukit.hardware import Gpu

ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Op:
    """One operation: `output` is made from `inputs`.

    flops   for each element of the output; a function such as sin or exp counts as one
    tensor_cores   whether they compute it, in the dtype of the graph; else the fp32 lanes do
    starts  whether it must begin a kernel of its own: what comes before it cannot be fused with it
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    flops: float = 1
    tensor_cores: bool = False
    starts: bool = False


@dataclass(frozen=True)
class Graph:
    """Operations in the order in which they run.

    elements   tensor -> how many elements it has; every tensor of the graph is in it
    needed     the tensors that somebody needs afterwards
    late       inputs that do not exist yet when the first operation runs: they come with the last operation before their
               first use that `starts` a kernel
    Raises ValueError for a tensor that is used before it is made, made twice, never made though needed, or has no size.
    """

    name: str
    ops: tuple[Op, ...]
    elements: Mapping[str, int]
    needed: tuple[str, ...]
    dtype: str = "fp32"
    late: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.ops:
            raise ValueError(f"graph {self.name!r}: ops must hold at least one operation, got none")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"graph {self.name!r}: dtype must be one of {', '.join(ITEMSIZE)}, got {self.dtype!r}")
        made = [op.output for op in self.ops]
        for i, op in enumerate(self.ops):
            if op.output in made[:i]:
                raise ValueError(f"graph {self.name!r}: {op.output!r} is made twice")
            for tensor in op.inputs:
                if tensor in made[i:]:
                    raise ValueError(f"graph {self.name!r}: {op.name!r} needs {tensor!r} before it is made")
        for tensor in self.needed:
            if tensor not in made:
                raise ValueError(f"graph {self.name!r}: {tensor!r} is needed and no operation makes it")
        for tensor in self.tensors:
            size = self.elements.get(tensor)
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"graph {self.name!r}: elements of {tensor!r} must be a whole number, at least 1, got {size!r}"
                )

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor, in the order of its first appearance."""
        return tuple(dict.fromkeys(tensor for op in self.ops for tensor in (*op.inputs, op.output)))

    @property
    def boundaries(self) -> int:
        """How many pairs of neighboring operations there are, each of which may be fused."""
        return len(self.ops) - 1

    @property
    def fusible(self) -> tuple[bool, ...]:
        """Which boundaries may be fused; as an argument of `plan`, everything that can be."""
        return tuple(not op.starts for op in self.ops[1:])

    def nbytes(self, tensor: str) -> int:
        return self.elements[tensor] * ITEMSIZE[self.dtype]

    def plan(self, fused: Sequence[bool] | None = None) -> Plan:
        """The kernels, given which boundaries are fused: fused[i] puts operations i and i + 1 into one kernel.

        None: every operation is a kernel of its own, as in eager PyTorch.
        Raises ValueError for the wrong number of boundaries and for one that cannot be fused.
        """
        fused = (False,) * self.boundaries if fused is None else tuple(map(bool, fused))
        if len(fused) != self.boundaries:
            raise ValueError(
                f"plan: fused must hold {self.boundaries} values, one for each pair of neighbours, got {len(fused)}"
            )
        groups = [[0]]
        for i, together in enumerate(fused):
            if together and not self.fusible[i]:
                op = self.ops[i + 1].name
                raise ValueError(f"plan: {op!r} begins a kernel of its own, so boundary {i} cannot be fused")
            groups[-1].append(i + 1) if together else groups.append([i + 1])
        return Plan(self, fused, tuple(self._kernel(tuple(group)) for group in groups))

    def _kernel(self, group: tuple[int, ...]) -> Kernel:
        ops = tuple(self.ops[i] for i in group)
        made = {op.output for op in ops}
        later = {tensor for op in self.ops[group[-1] + 1 :] for tensor in op.inputs} | set(self.needed)
        reads = dict.fromkeys(tensor for op in ops for tensor in op.inputs if tensor not in made)
        return Kernel(group[0], ops, tuple(reads), tuple(op.output for op in ops if op.output in later))


@dataclass(frozen=True)
class Kernel:
    """Operations that share a launch, the first of which is number `first` of the graph, and what they move."""

    first: int
    ops: tuple[Op, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def last(self) -> int:
        return self.first + len(self.ops) - 1


@dataclass(frozen=True)
class Move:
    """Operation number `op` reads or writes `tensor` in memory: `kind` is "read" or "write"."""

    op: int
    kind: str
    tensor: str


@dataclass(frozen=True)
class Plan:
    """A graph and its kernels."""

    graph: Graph
    fused: tuple[bool, ...]
    kernels: tuple[Kernel, ...]

    @property
    def reads(self) -> int:
        """Tensors read, counted once for each kernel that reads them."""
        return sum(len(kernel.reads) for kernel in self.kernels)

    @property
    def writes(self) -> int:
        return sum(len(kernel.writes) for kernel in self.kernels)

    @property
    def accesses(self) -> int:
        return self.reads + self.writes

    @property
    def read_elements(self) -> int:
        return sum(self.graph.elements[tensor] for kernel in self.kernels for tensor in kernel.reads)

    @property
    def write_elements(self) -> int:
        return sum(self.graph.elements[tensor] for kernel in self.kernels for tensor in kernel.writes)

    @property
    def read_bytes(self) -> int:
        return self.read_elements * ITEMSIZE[self.graph.dtype]

    @property
    def write_bytes(self) -> int:
        return self.write_elements * ITEMSIZE[self.graph.dtype]

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def flops(self) -> float:
        return sum(op.flops * self.graph.elements[op.output] for op in self.graph.ops)

    @property
    def bytes_per_flop(self) -> float:
        return self.bytes / self.flops

    def kernel_bytes(self, kernel: Kernel) -> tuple[int, int]:
        """(read, written) by one kernel."""
        read, written = (sum(map(self.graph.nbytes, tensors)) for tensors in (kernel.reads, kernel.writes))
        return read, written

    def kernel_us(self, kernel: Kernel, gpu: Gpu) -> float:
        """Modelled: the larger of bytes over the memory's peak rate and FLOPs over the peak of their unit.

        Raises ValueError for a GPU without tensor cores for the graph's dtype."""
        times = [sum(self.kernel_bytes(kernel)) / gpu.hbm_gbps / 1e3]
        for unit, on in ((self.graph.dtype, True), ("fp32", False)):
            ops = [op for op in kernel.ops if op.tensor_cores == on]
            if ops:
                flops = sum(op.flops * self.graph.elements[op.output] for op in ops)
                times.append(flops / gpu.peak(unit) * 1e6)
        return max(times)

    def time_us(self, gpu: Gpu) -> float:
        """Of all kernels, one after the other."""
        return sum(self.kernel_us(kernel, gpu) for kernel in self.kernels)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Every trip to memory: a tensor is read by the first operation of a kernel that needs it, written by the one
        that makes it."""
        found = []
        for kernel in self.kernels:
            waiting, leaving = set(kernel.reads), set(kernel.writes)
            for i, op in enumerate(kernel.ops, kernel.first):
                found += [Move(i, "read", tensor) for tensor in dict.fromkeys(op.inputs) if tensor in waiting]
                waiting.difference_update(op.inputs)
                if op.output in leaving:
                    found.append(Move(i, "write", op.output))
        return tuple(found)

    def life(self, tensor: str) -> tuple[int, int] | None:
        """(first, last) operation between which `tensor` must lie in memory, or None if it never does.

        An input of the graph lies there from operation -1 on, unless it is late; what is needed afterwards stays for
        len(ops) operations.
        """
        at = {"read": [], "write": []}
        for move in self.moves:
            if move.tensor == tensor:
                at[move.kind].append(move.op)
        if not at["read"] and not at["write"]:
            return None
        last = len(self.graph.ops) if tensor in self.graph.needed else max(at["read"])
        if at["write"]:
            return at["write"][0], last
        starts = [i for i, op in enumerate(self.graph.ops[: at["read"][0] + 1]) if op.starts]
        return (starts[-1] if starts and tensor in self.graph.late else -1), last


# ---- the graphs of the lesson ----------------------------------------------------------------------------------------


def _chain(name: str, n: int, ops: Sequence[tuple[str, str, str]], needed: str, dtype: str) -> Graph:
    """Every tensor has n elements; an operation is (name, "its inputs", output)."""
    made = tuple(Op(op, tuple(inputs.split()), output) for op, inputs, output in ops)
    tensors = {tensor for op in made for tensor in (*op.inputs, op.output)}
    return Graph(name, made, dict.fromkeys(tensors, n), tuple(needed.split()), dtype)


def relu(n: int, dtype: str = "fp32") -> Graph:
    """y = max(x, 0): one comparison an element."""
    return _chain("ReLU", n, [("max", "x", "y")], "y", dtype)


def sin_cos(n: int, dtype: str = "fp32") -> Graph:
    """y = sin(x)**2 + cos(x)**2 as PyTorch runs it: five kernels."""
    ops = [("sin", "x", "s"), ("square", "s", "ss"), ("cos", "x", "c"), ("square", "c", "cc"), ("add", "ss cc", "y")]
    return _chain("sin\u00b2 + cos\u00b2", n, ops, "y", dtype)


def gelu(n: int, dtype: str = "fp32") -> Graph:
    """0.5 * x * (1 + tanh(0.79788456 * (x + 0.044715 * x * x * x))), in the order in which Python evaluates it."""
    ops = [
        ("0.5 *", "x", "half"),
        ("0.0447 *", "x", "a"),
        ("* x", "a x", "b"),
        ("* x", "b x", "c"),
        ("x +", "x c", "d"),
        ("0.798 *", "d", "e"),
        ("tanh", "e", "t"),
        ("1 +", "t", "u"),
        ("*", "half u", "y"),
    ]
    return _chain("GELU by hand", n, ops, "y", dtype)


def softmax(M: int, N: int, dtype: str = "fp32") -> Graph:
    """The naive five lines over the rows of x [M, N]."""
    ops = (
        Op("max", ("x",), "m"),
        Op("subtract", ("x", "m"), "z"),
        Op("exp", ("z",), "e"),
        Op("sum", ("e",), "s"),
        Op("divide", ("e", "s"), "y"),
    )
    sizes = {"x": M * N, "m": M, "z": M * N, "e": M * N, "s": M, "y": M * N}
    return Graph("softmax", ops, sizes, ("y",), dtype)


def sigmoids(n: int, keep: str = "s1 s2 y", dtype: str = "fp32") -> Graph:
    """y = sigmoid(sigmoid(sigmoid(x))) and dx from dy, which only exists when the rest of the model has run.

    keep   which results of the forward pass the backward pass finds in memory, "" to "s1 s2 y"; it computes the others
           again, from the last one before them that is there or from x
    Raises ValueError for a name that is not one of them.
    """
    kept = keep.split()
    if unknown := [tensor for tensor in kept if tensor not in ("s1", "s2", "y")]:
        raise ValueError(f"sigmoids: keep must name tensors among s1, s2 and y, got {', '.join(unknown)}")
    ops = [Op("sigmoid", ("x",), "s1"), Op("sigmoid", ("s1",), "s2"), Op("sigmoid", ("s2",), "y")]
    have, source = {}, "x"
    for tensor in ("s1", "s2", "y"):
        have[tensor] = tensor if tensor in kept else tensor + "'"
        if tensor not in kept:
            ops.append(Op("again", (source,), have[tensor]))
        source = have[tensor]
    ops += [
        Op("gradient", ("dy", have["y"]), "ds2"),
        Op("gradient", ("ds2", have["s2"]), "ds1"),
        Op("gradient", ("ds1", have["s1"]), "dx"),
    ]
    first = ops[3]
    ops[3] = Op(first.name, first.inputs, first.output, starts=True)
    sizes = dict.fromkeys({tensor for op in ops for tensor in (*op.inputs, op.output)}, n)
    what = f"keeping {' and '.join(kept)}" if len(kept) < 3 else "keeping all"
    return Graph(
        f"three sigmoids, {what if kept else 'keeping nothing'}", tuple(ops), sizes, ("y", "dx"), dtype, ("dy",)
    )


def bias_gelu(M: int, N: int, dtype: str = "fp32") -> Graph:
    """gelu(x + bias) for x [M, N], with PyTorch's GELU, itself one kernel."""
    ops = Op("+ bias", ("x", "bias"), "u"), Op("gelu", ("u",), "y", flops=9)
    return Graph("bias + GELU", ops, {"bias": N, **dict.fromkeys("xuy", M * N)}, ("y",), dtype)


def epilogue(M: int, N: int, K: int, dtype: str = "fp16") -> Graph:
    """relu(a @ b * scale + residual) with a scale for each column, and the matmul after it.

    A matmul needs whole rows of its input, which many programs have made: it begins a kernel of its own.
    """
    ops = (
        Op("a @ b", ("a", "b"), "c", 2 * K, tensor_cores=True),
        Op("* scale", ("c", "scale"), "d"),
        Op("+ residual", ("d", "residual"), "e"),
        Op("relu", ("e",), "y"),
        Op("y @ w", ("y", "w"), "z", 2 * N, tensor_cores=True, starts=True),
    )
    sizes = {"a": M * K, "b": K * N, "scale": N, "w": N * K, "z": M * K}
    sizes |= dict.fromkeys(("c", "d", "residual", "e", "y"), M * N)
    return Graph("matmul and its epilogue", ops, sizes, ("z",), dtype)


def free_flops(gpu: Gpu, itemsize: int) -> int:
    """FLOPs on the fp32 lanes that each element may cost before they, not memory, decide the time of a kernel that reads
    an element and writes one."""
    return math.floor(gpu.ridge("fp32") * 2 * itemsize)
