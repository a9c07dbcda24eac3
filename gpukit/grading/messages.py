"""What judge and worker say to each other: a Job, then for the file and for each case a Reply.

A reply comes from a process in which the learner's code ran, so `receive` believes nothing about it: what has not exactly
the fields and types written here raises wire.Malformed, and every number is a count from 0 to 2**63. Values that the
learner's function returned are the one exception: they are whatever gpukit.grading.wire carries, for the judge to compare.
"""

from __future__ import annotations

import functools
import socket
import types
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from gpukit.grading import wire


@dataclass(frozen=True)
class Job:
    """One check: which function of which file, and how to call it. Its fields are the exercise's (gpukit.grading.exercise).

    how     "function" for plain Python, "cpu" for a kernel in the interpreter, "cuda" for one on the GPU; "host" for its
            Python on tensors without data and "device" for what that asked for; "compile" for neither file nor function:
            its cases are launches and the GPUs that they are compiled for. For a kernel in CUDA C++ "nvrtc", whose case is the
            text and whose path is the compiler's, and "ptx", which has the compiled text as its source and launches as cases
    memory  whether to count the bytes of the tensors that are alive
    upstream  what the exercise calls the upstream gradient, the last argument where `gradients` are asked for
    source, tape, uploads  a device's: the file's text, what the host did when it loaded it, and whether it may bring numbers
    """

    path: str
    function: str
    how: str
    gradients: int = 0
    in_place: tuple[int, ...] = ()
    setup: str = ""
    caches: tuple[int, int] | None = None
    memory: bool = False
    source: str = ""
    tape: str = ""
    uploads: bool = False
    upstream: str = "dy"


@dataclass(frozen=True)
class Fault:
    """An access outside a tensor ("out-of-bounds"), two programs at one address ("race") or two threads of one program
    ("warp-race"), as the interpreter told it; of a kernel in CUDA C++ also an access that is "misaligned" and a kernel that is
    "endless"."""

    what: str
    text: str
    kind: str = ""  # "load" or "store"
    tensor: str = ""
    line: int = 0


NOTHING_STORED = "NothingStored"  # the type of a Failure without an exception: all lanes of all stores are masked off


@dataclass(frozen=True)
class Failure:
    """An exception, seen from the learner's file: `line` is 0 if it has no line there, `todo` tells an unfilled gap."""

    type: str
    message: str
    line: int
    source: str
    todo: bool
    fault: Fault | None
    traceback: str


@dataclass(frozen=True)
class AccessFacts:
    """All executions of one tl.load, tl.store or atomic on one tensor in a launch. `again_bytes`: those of `bytes` that the
    same program had moved already, in the same line."""

    kind: str  # "load", "store" or "atomic"
    tensor: str
    line: int
    bytes: int
    sectors: int  # of 32 bytes
    width: int = 0  # bytes that one instruction moves for a thread; 0 where the compiler decides
    again_bytes: int = 0


@dataclass(frozen=True)
class LaunchFacts:
    """One launch of a kernel of the learner's.

    sizes            the bytes of each tensor among its arguments
    longest          how many loads and stores the busiest program made
    working          how many programs loaded or stored anything, as far as is known
    dram_read_bytes  what the job's `caches` read from memory; 0 without
    """

    kernel: str
    grid: tuple[int, ...]
    programs: int
    load_bytes: int
    store_bytes: int
    atomic_bytes: int
    flops: int
    accesses: tuple[AccessFacts, ...]
    sizes: dict[str, int]
    longest: int
    dram_read_bytes: int = 0
    working: int = 0


@dataclass(frozen=True)
class Reply:
    """The answer to a job (the file is loaded, `missing` its function, or an `error`), then the one to each case.

    output       what a plain function returned; `counts` what the object of its `setup` counted (the judge's word), `peak_bytes` the most
                 bytes of tensors that were alive, `largest_bytes` the most of one
    outputs      a kernel exercise's results by name, `devices` of those that are tensors
    changed      arguments that the call changed and should not have; `aliases` results in the memory of an argument,
                 `reused` results in memory from before the call, `copies` results that should have been in the memory of an
                 argument
    host_ops     PyTorch operations beside allocation, views and copies: (name, line)
    allocated_bytes  of the tensors that the host code made
    saved        what a forward pass keeps for the backward pass: (name, bytes)
    left         whether a forward pass leaves tensors behind once nobody holds its result
    compiles     the learner's launches as gpukit.simulator.compiler.compile packs them
    same_without_kernels  whether a replay in which launches do nothing gave the same
    disorder     what two threads of one program do at one address without a barrier, if they do
    mostly_copied  whether more than half of what it returned are copies of inputs that no kernel stored
    agree        whether three runs on a GPU gave the same
    tape         what a host asks of a device (gpukit.grading.host)
    """

    error: Failure | None = None
    missing: bool = False
    output: Any = None
    counts: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0
    largest_bytes: int = 0
    outputs: dict[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    launches: tuple[LaunchFacts, ...] = ()
    host_ops: tuple[tuple[str, int], ...] = ()
    allocated_bytes: int = 0
    saved: tuple[tuple[str, int], ...] = ()
    left: bool = False
    compiles: tuple[str, ...] = ()
    copied_read_bytes: int = 0
    copied_write_bytes: int = 0
    same_without_kernels: bool = False
    mostly_copied: bool = False
    disorder: Fault | None = None
    agree: bool = True
    tape: str = ""

    @property
    def read_bytes(self) -> int:
        """What the launches loaded and PyTorch copied."""
        return sum(launch.load_bytes for launch in self.launches) + self.copied_read_bytes

    @property
    def written_bytes(self) -> int:
        return sum(launch.store_bytes + launch.atomic_bytes for launch in self.launches) + self.copied_write_bytes

    @property
    def stored(self) -> bool:
        """Whether a kernel of the learner's wrote anything."""
        return any(launch.store_bytes or launch.atomic_bytes for launch in self.launches)

    @property
    def loaded(self) -> bool:
        return any(launch.load_bytes for launch in self.launches)


_MESSAGES = frozenset({Job, Fault, Failure, AccessFacts, LaunchFacts, Reply})
_hints = functools.cache(get_type_hints)


def send(sock: socket.socket, message: Any) -> None:
    """Send a Job, a Reply or plain data."""
    wire.send(sock, _plain(message))


def receive(sock: socket.socket, kind: type, deadline: wire.Deadline | None = None) -> Any:
    """The next message, a `kind`. Raises wire.Malformed if it is none, else what wire.receive raises."""
    return read(kind, wire.receive(sock, deadline))


def read(kind: type, value: Any) -> Any:
    """What came, as a `kind`. Raises wire.Malformed if it is none."""
    return _typed(kind, value, kind.__name__)


def _plain(value: Any) -> Any:
    """Messages as dicts. Whatever else the learner's function returned, a dataclass of its own too, stays what it is."""
    if type(value) in _MESSAGES:
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _typed(kind: Any, value: Any, name: str) -> Any:
    """`value` as the annotation `kind` has it; `name` is what the error calls it."""
    inside = get_args(kind)
    if kind is Any:
        return value
    if isinstance(kind, types.UnionType):  # X | None
        return None if value is None else _typed(inside[0], value, name)
    if is_dataclass(kind) and type(value) is dict and value.keys() == _hints(kind).keys():
        return kind(**{key: _typed(hint, value[key], f"{name}.{key}") for key, hint in _hints(kind).items()})
    if get_origin(kind) is tuple and type(value) is tuple:
        kinds = inside[:1] * len(value) if inside[-1] is ... else inside
        if len(kinds) == len(value):
            return tuple(_typed(each, item, name) for each, item in zip(kinds, value, strict=True))
    if get_origin(kind) is dict and type(value) is dict:
        return {_typed(inside[0], key, name): _typed(inside[1], item, name) for key, item in value.items()}
    if type(value) is kind and (kind is not int or 0 <= value < 1 << 63):
        return value
    raise wire.Malformed(f"{name} is not what it should be")
