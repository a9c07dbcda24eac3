"""PyTorch operations, counted as if each read its inputs and wrote its outputs once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpukit import dispatch
from gpukit.dispatch import tensors
from gpukit.simulator.interpreter import bounds, running

_ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_METADATA = {"_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "resize_", "resize_as_", "detach", "alias"}
# What these are given is a pattern for shape and dtype, or is overwritten without being read.
_WRITE_ONLY = {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros"}
_WRITE_ONLY |= {"new_ones", "new_full", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"}
_WRITE_ONLY |= {"exponential_", "log_normal_", "cauchy_", "geometric_"}
# These read as many elements of their source as they return, those write as many as they are given.
_GATHER = {"embedding": "weight", "index": "self", "index_select": "self", "gather": "self", "take": "self"}
_SCATTER = {"index_put_": "values", "index_copy_": "source", "scatter_": "src", "index_add_": "source"}
_SCATTER |= {"scatter_add_": "src", "masked_scatter_": "source"}
_READ_A_VALUE = {"_local_scalar_dense", "equal"}


@dataclass
class TorchOp:
    """One PyTorch op: bytes of the tensors it reads and of those it writes; views and bare allocations move none."""

    name: str
    read_bytes: int
    write_bytes: int

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes


def _nbytes(given) -> int:
    """Bytes of the distinct elements; one tensor given twice counts once, as does an expanded row; sparse ones 0."""
    seen = {}
    for t in given:
        if t.layout is not torch.strided:
            continue
        distinct = 1
        for n, stride in zip(t.shape, t.stride(), strict=True):
            distinct *= 1 if stride == 0 and n > 0 else n
        key = (t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), t.stride(), t.dtype)
        seen[key] = distinct * t.element_size()
    return sum(seen.values())


def _count(func, args, kwargs, out) -> tuple[int, int]:
    """Bytes an op reads and writes."""
    name = func._schema.name.split("::")[-1]
    returns = func._schema.returns
    outputs = tensors(out)
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if is_view or name in _ALLOCATE or name in _METADATA or torch.Tag.inplace_view in func.tags:
        return 0, 0
    given = {}
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        given[argument.name] = (tensors(value), written, argument.kwarg_only)
    if name in _SCATTER:
        source = given.get(_SCATTER[name], ([], False, False))[0]
        reads = [t for key, (ts, _, _) in given.items() if key != "self" for t in ts]
        moved = _nbytes(source)
        return _nbytes(reads) + (moved if "add" in name else 0), moved
    mutated = [t for ts, written, _ in given.values() if written for t in ts]
    written_bytes = _nbytes(mutated) if mutated else _nbytes(outputs)
    if not outputs and not mutated:
        written_bytes = 0
        if name not in _READ_A_VALUE:
            return 0, 0
    if name in _WRITE_ONLY:
        return 0, written_bytes
    reads = []
    for key, (used, written, kwarg_only) in given.items():
        overwritten = written and (kwarg_only or name == "copy_")  # out=... and copy_ do not read their destination
        if not overwritten and _GATHER.get(name) != key:
            reads += used
    return _nbytes(reads) + (_nbytes(outputs) if name in _GATHER else 0), written_bytes


def _note_memory(func, args, kwargs, out) -> None:
    """Tell the interpreter which memory is fresh and which has been filled."""
    name = func._schema.name.split("::")[-1]
    if name in _ALLOCATE:
        for tensor in tensors(out):
            if tensor.layout is torch.strided:
                bounds.note_allocation(tensor)
        return
    for tensor in dispatch.written(func, args, kwargs):
        if tensor.layout is torch.strided:
            bounds.note_written(tensor)


class CountOps(dispatch.Mode):
    """Appends each operation to `events`."""

    def __init__(self, events: list):
        super().__init__()
        self.events = events

    def operation(self, func, args, kwargs):
        events = self.events
        before = len(events)
        out = func(*args, **kwargs)
        launched = len(events) > before  # a custom op that is made of launches: they have been counted
        if not launched and not running.busy():
            read, write = _count(func, args, kwargs, out)
            _note_memory(func, args, kwargs, out)
            events.append(TorchOp(func._schema.name.replace("::", "."), read, write))
        return out
