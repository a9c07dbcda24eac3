"""Which tensors are alive, told on any device and without a GPU: the bytes that a piece of code holds at most, and what it
keeps for its backward pass.

    with live.watch() as memory:
        loss = model(x).square().mean()
        memory.phase("backward")
        loss.backward()
    memory.peak_bytes, memory.timeline

The bytes are those of tensors. What an allocator adds, and what an operation takes and gives back inside itself, is not seen.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpukit import dispatch


@dataclass(frozen=True)
class Moment:
    """Bytes alive after an operation of PyTorch, forward or backward."""

    phase: str
    op: str  # "mm", "gelu_backward"
    bytes: int


class watch(dispatch.Mode):
    """A context manager that counts the tensors which were made inside it and are still alive.

    bytes       now; also right after the block, while what it made is still held
    peak_bytes  the most at any time; largest_bytes of a single tensor
    timeline    a Moment after each operation

    A tensor that existed before counts nothing, nor does a view: memory is counted once, however many tensors share it.
    With `arguments`, the tensors that the code was given, all others from before count as soon as an operation writes to
    them: they are its memory as well, made earlier.
    """

    def __init__(self, phase: str = "forward", arguments: Iterable | None = None):
        super().__init__()
        self._given = None if arguments is None else dispatch.storages([*arguments])
        self._before: set[int] = set()  # storages that count nothing so far
        self.bytes = self.peak_bytes = self.largest_bytes = 0
        self.timeline: list[Moment] = []
        self._phase = phase
        self._alive: dict[int, weakref.ref] = {}

    def phase(self, name: str) -> None:
        """Call the moments from here on `name`."""
        self._phase = name

    def operation(self, func, args, kwargs):
        op = func.name().removeprefix("aten::").partition(".")[0]
        for tensor in dispatch.tensors((args, kwargs)):
            self._note(tensor, made_here=op == "lift_fresh")  # torch.tensor(a list) is seen there first
        if self._given is not None:
            for tensor in dispatch.written(func, args, kwargs):
                key = tensor.untyped_storage()._cdata
                if key in self._before and key not in self._given:
                    del self._alive[key]
                    self._note(tensor, made_here=True)
        out = func(*args, **kwargs)
        for tensor in dispatch.tensors(out):
            self._note(tensor, made_here=True)
        self.timeline.append(Moment(self._phase, op, self.bytes))
        return out

    def _note(self, tensor: Tensor, made_here: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive and self._alive[key]() is not None:
            return
        size = storage.nbytes() if made_here else 0
        (self._before.discard if made_here else self._before.add)(key)

        def freed(ref: weakref.ref) -> None:
            self.bytes -= size
            if self._alive.get(key) is ref:
                del self._alive[key]
                self._before.discard(key)

        self._alive[key] = weakref.ref(storage, freed)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        self.largest_bytes = max(self.largest_bytes, size)


@dataclass(frozen=True)
class Saved:
    """A tensor that autograd keeps until the backward pass, and the operation that asked for it."""

    op: str  # "linear", "gelu"
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


@contextlib.contextmanager
def saved(known: Iterable[Tensor] = ()) -> Iterator[list[Saved]]:
    """The tensors that operations inside the block save for the backward pass, in order.

    Memory that two operations save is listed once, under the first; the memory of `known` (weights, say, which are there
    anyway) is not listed.
    """
    seen = {tensor.untyped_storage()._cdata for tensor in known}
    kept: list[Saved] = []
    held = []  # a storage that died would leave its address to another
    calls = _Calls()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            held.append(storage)
            kept.append(Saved(calls.name, tuple(tensor.shape), tensor.dtype, storage.nbytes()))
        return tensor

    with calls, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


class _Calls(TorchFunctionMode):
    """Knows the name of the function that runs."""

    name = ""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.name = func.__name__
        return func(*args, **(kwargs or {}))
