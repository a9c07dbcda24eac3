"""Which memory a launch may touch and which program touched it: bounds and races, in NumPy, without Triton.

One `Memory` exists per launch. Every load, store and atomic of the interpreter becomes an `Access` and passes
`Memory.admit` before any byte is read or written, so a wild pointer is a sentence and never a crash.
"""

import ctypes
import math

import numpy as np

from gpukit.simulator.interpreter.addresses import Access
from gpukit.simulator.interpreter.faults import (
    MemoryFault,
    RaceFault,
    UnwrittenFault,
    WarpFault,
    WrappedFault,
    program_ids,
)
from gpukit.simulator.interpreter.warps import Warps

_FIRST_IMAGINARY, _IMAGINARY_STEP = 1 << 60, 1 << 30  # addresses that no process has, and room between two of them
_NEARBY = 4096  # bytes from a tensor at which an address may be meant for it, however small it is
_MAX_PENDING_LANES = 1 << 22  # of addresses kept per program, 32 MiB: beyond it races with earlier loads go unseen


# ---- what is legal ------------------------------------------------------------------------------------------------

_guarded: dict[int, list] = {}  # address of a storage -> [(tensor, name)]: keeps them alive, so no address is reused
_legal: dict[int, "Legal"] = {}


def guard(tensor, name: str | None = None) -> None:
    """From now on the elements of this view are the only legal ones in its storage (with those of other guards on it).

    Gaps between strided rows are illegal too. A tensor that is only reached through an address kept in memory (a table
    of pointers) has to be guarded to be known at all.
    """
    key = tensor.untyped_storage().data_ptr()
    _guarded.setdefault(key, []).append((tensor, name))
    _legal[key] = _union([t for t, _ in _guarded[key]])


def unguard_all() -> None:
    """Forget every guard."""
    _guarded.clear()
    _legal.clear()


class Legal:
    """The legal bytes of one storage: [start, end), less the units where `mask` is False (None: no gap)."""

    def __init__(self, start: int, end: int, unit: int = 1, mask: np.ndarray | None = None):
        self.start, self.end, self.unit = start, end, unit
        self.mask = None if mask is None or mask.all() else mask

    def ok(self, offsets: np.ndarray, width: int) -> np.ndarray:
        """For each byte offset, whether `width` bytes from there are legal."""
        inside = (offsets >= self.start) & (offsets + width <= self.end)
        if self.mask is None:
            return inside
        first = np.where(inside, offsets - self.start, 0)
        step = min(width, self.unit)
        for byte in range(0, width, step):
            inside &= self.mask[(first + byte) // self.unit]
        return inside


def _span(tensor) -> tuple[int, int]:
    """First byte and end of a view in its storage."""
    first = tensor.storage_offset()
    if tensor.numel() == 0:
        return first * tensor.element_size(), first * tensor.element_size()
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def mark(array: np.ndarray, tensor, first: int) -> np.ndarray:
    """The elements of `array` (one per element of the storage from `first` on) that are the view's, in its shape."""
    strides = tuple(s * array.itemsize for s in tensor.stride())
    return np.lib.stride_tricks.as_strided(array[tensor.storage_offset() - first :], tuple(tensor.shape), strides)


def _union(tensors) -> Legal:
    """The legal bytes when these views of one storage are the only legal ones."""
    start = min(_span(t)[0] for t in tensors)
    end = max(_span(t)[1] for t in tensors)
    sizes = {t.element_size() for t in tensors}
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return Legal(start, end)
    unit = math.gcd(*sizes, start)
    allowed = np.zeros((end - start) // unit, dtype=bool)
    for t in tensors:
        if t.numel() == 0:
            continue
        low, high = _span(t)
        size = t.element_size()
        own = np.zeros((high - low) // size, dtype=bool)
        mark(own, t, low // size)[...] = True
        allowed[(low - start) // unit : (high - start) // unit] |= np.repeat(own, size // unit)
    return Legal(start, end, unit, allowed)


# ---- what nobody has written --------------------------------------------------------------------------------------

_fresh: dict[int, "Fresh"] = {}  # by address of the storage


class Fresh:
    """The storage of a tensor that was allocated and not filled, and which of its elements have been written since."""

    def __init__(self, tensor):
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        self.alive = StorageWeakRef(storage)
        self.unit = tensor.element_size()
        self.written = np.zeros(storage.nbytes() // self.unit, dtype=bool)


def note_allocation(tensor) -> None:
    """From now on until `forget_allocations` or `note_written`, reading what no launch has stored is a fault."""
    storage = tensor.untyped_storage()
    if tensor.device.type == "cpu" and storage.nbytes():
        _fresh[storage.data_ptr()] = Fresh(tensor)


def note_written(tensor) -> None:
    """Something that is no launch has written to this tensor's storage: all of it counts as written."""
    if _fresh:
        _fresh.pop(tensor.untyped_storage().data_ptr(), None)


def forget_allocations() -> None:
    _fresh.clear()


def _fresh_storage(key: int) -> "Fresh | None":
    fresh = _fresh.get(key)
    if fresh is not None and fresh.alive.expired():  # the address belongs to another tensor by now
        del _fresh[key]
        return None
    return fresh


# ---- one launch ---------------------------------------------------------------------------------------------------


class Buffer:
    """The storage behind one or more tensor arguments. `key` is its address as the caller has it, `base` the address
    that the kernel sees (they differ where a GPU tensor was copied to be interpreted). An imaginary one (a meta tensor,
    a GPU's tensor in a sampled launch) has addresses and no memory behind them."""

    def __init__(self, key: int, base: int, nbytes: int, storage, imaginary: bool = False):
        self.key, self.base, self.nbytes, self.storage, self.imaginary = key, base, nbytes, storage, imaginary
        self.legal = _legal.get(key) or Legal(0, nbytes)
        self.fresh = None if imaginary else _fresh_storage(key)
        self.low, self.high = base + self.legal.start, base + self.legal.end
        self.history = None

    def words(self, unit: int) -> np.ndarray:
        """The memory itself, as unsigned integers of `unit` bytes."""
        raw = (ctypes.c_uint8 * (self.nbytes // unit * unit)).from_address(self.base)
        return np.frombuffer(raw, dtype=np.uint8).view(f"u{unit}")


class Parameter:
    """One tensor argument of the kernel."""

    def __init__(self, name: str, tensor, buffer: Buffer):
        self.name, self.tensor, self.buffer = name, tensor, buffer


class _History:
    """Per element of one written storage: the last program that stored it, the first that loaded it and the last whose
    atomic changed it, counted from 1; 0 is nobody; a negative number says that there were others too."""

    def __init__(self, nbytes: int, unit: int):
        self.unit = unit
        self.writer = np.zeros(nbytes // unit, dtype=np.int32)
        self.reader = np.zeros(nbytes // unit, dtype=np.int32)
        self.atomic = np.zeros(nbytes // unit, dtype=np.int32)


class Memory:
    """The live tensors of one launch, and who touched them."""

    def __init__(self, grid: tuple[int, ...], where):
        self.grid = grid
        self.alone = math.prod(grid) == 1  # one program races with nobody
        self.where = where  # () -> (file, line) of the running access
        self.buffers: dict[int, Buffer] = {}
        self.parameters: list[Parameter] = []
        self.linear = 0
        self.race: RaceFault | None = None
        self.unwritten: UnwrittenFault | None = None  # the first one
        self.disorder: WarpFault | None = None  # the first one
        self._next_imaginary = _FIRST_IMAGINARY
        self._released: dict[int, set[int]] = {}  # address of an atomic -> programs that passed through it
        self.start_program(0)

    def add(self, name: str, tensor, host=None) -> Parameter:
        """Register a tensor argument; `host` is the copy the kernel sees, where that is another one."""
        storage = tensor.untyped_storage()
        seen = storage if host is None else host.untyped_storage()
        imaginary = seen.device.type != "cpu"
        key = storage.data_ptr() or (-storage._cdata if imaginary else 0)  # meta tensors all have address 0
        if key not in self.buffers:
            base = seen.data_ptr()
            if imaginary:
                base = self._next_imaginary
                self._next_imaginary += -(-seen.nbytes() // _IMAGINARY_STEP) * _IMAGINARY_STEP + _IMAGINARY_STEP
            self.buffers[key] = Buffer(key, base, seen.nbytes(), storage, imaginary)
        parameter = Parameter(name, tensor, self.buffers[key])
        self.parameters.append(parameter)
        return parameter

    def where_copied(self, addresses: np.ndarray) -> np.ndarray:
        """Addresses that a kernel has read from a table: those of a tensor on a GPU as those of the copy that it works on."""
        for buffer in self.buffers.values():
            if buffer.key != buffer.base and not buffer.imaginary:
                inside = (addresses >= buffer.key) & (addresses < buffer.key + buffer.nbytes)
                addresses = np.where(inside, addresses - np.uint64(buffer.key) + np.uint64(buffer.base), addresses)
        return addresses

    def add_guarded(self) -> None:
        """Register the guarded CPU tensors that are no arguments: they may be reached through a table of pointers."""
        for key, views in _guarded.items():
            if key not in self.buffers and views[0][0].device.type == "cpu":
                self.add(views[0][1] or "a guarded tensor", views[0][0])

    def start_program(self, linear: int) -> None:
        self.linear = linear
        self._pending: list[Access] = []  # loads of this program from storages nobody has stored to yet
        self._pending_lanes = 0
        self._ordered: set[int] | None = None  # programs that atomics put before this one
        self.warps = Warps()

    @property
    def program(self) -> tuple[int, ...]:
        return self.ids(self.linear)

    def ids(self, linear: int) -> tuple[int, ...]:
        return program_ids(linear, self.grid)

    def admit(self, access: Access, parameter: Parameter | None) -> None:
        """Check one access before it happens. Raises MemoryFault."""
        if not access.lanes:
            access.parameter = parameter
            access.buffer = parameter.buffer if parameter else None
            return
        if parameter is None:
            if not self.parameters:
                raise ValueError(f"{access.kind} through a pointer, but the kernel was given no tensor")
            parameter = self._nearest(access)
        buffer = parameter.buffer
        access.parameter, access.buffer = parameter, buffer
        if access.low < buffer.low or access.high > buffer.high:
            raise self._outside(access)
        if buffer.legal.mask is not None and not buffer.legal.ok(access.offsets, access.width).all():
            raise self._outside(access)

    def _nearest(self, access: Access) -> Parameter:
        """The tensor that an access is meant for whose pointers say nothing of it, such as a table's. Raises MemoryFault where
        it is further from each than that one is large: to name one would be a guess."""

        def distance(p: Parameter) -> int:
            return max(p.buffer.low - access.low, access.low - p.buffer.high + 1, 0)

        found = min(self.parameters, key=distance)
        if distance(found) > max(found.buffer.nbytes, _NEARBY):
            file, line = self.where()
            place = {
                "program": self.program,
                "file": file,
                "line": line,
                "where": "far away",
                "first_index": 0,
                "lane": (),
            }
            raise MemoryFault(
                kind=access.kind, tensor="any tensor", name="", count=access.lanes, size=0, shape=(), **place
            )
        return found

    def _view(self, parameter: Parameter):
        """The view that a fault is described against: the guard nearest to the argument's first element."""
        first = _span(parameter.tensor)[0]

        def distance(guarded) -> int:
            low, high = _span(guarded[0])
            return max(low - first, first - high + 1, 0)

        guards = _guarded.get(parameter.buffer.key, [(parameter.tensor, None)])
        tensor, name = min(guards, key=distance)
        return tensor, name or parameter.name

    def _fields(self, access: Access, bad: np.ndarray) -> dict:
        view, name = self._view(access.parameter)
        flat = np.flatnonzero(bad)
        lanes = np.arange(access.lanes) if access.live is None else np.flatnonzero(access.live)
        shape = access.addresses.shape if access.live is None else access.live.shape
        file, line = self.where()
        return {
            "kind": access.kind,
            "tensor": access.parameter.name,
            "program": self.program,
            "file": file,
            "line": line,
            "count": int(flat.size),
            "lane": tuple(int(i) for i in np.unravel_index(lanes[flat[0]], shape)),
            "first_index": (int(access.offsets[flat[0]]) - _span(view)[0]) // view.element_size(),
            "size": view.numel(),
            "shape": tuple(view.shape),
            "name": name,
        }

    def _outside(self, access: Access) -> MemoryFault:
        fields = self._fields(access, ~access.buffer.legal.ok(access.offsets, access.width))
        view, _ = self._view(access.parameter)
        start, end = _span(view)
        index, size = fields["first_index"], view.element_size()
        if index < 0:
            where = "before the start"
        else:
            where = "past the end" if (index + 1) * size > end - start else "between rows"
        return MemoryFault(where=where, **fields)

    def wrapped(self, access: Access) -> WrappedFault:
        """What to say of an access that was admitted, and whose offset wrapped around on the way (wrapped.py)."""
        view, name = self._view(access.parameter)
        fields = {"kind": access.kind, "tensor": access.parameter.name, "program": self.program, "where": "inside"}
        at = {"count": access.lanes, "lane": (), "first_index": 0, "name": name}
        file, line = self.where()
        return WrappedFault(file=file, line=line, size=view.numel(), shape=tuple(view.shape), **fields, **at)

    # A race is a pair of accesses by two programs that no atomic orders, at least one of them a store. Programs run
    # one after another here, so it is enough to compare each access with what earlier programs left behind. The first
    # one is kept in `race` and raised when the launch ends: a store without its mask races with the next row long
    # before it leaves the tensor, and leaving the tensor is the better diagnosis.

    def load(self, access: Access) -> None:
        """Note a load that was admitted."""
        if access.lanes and access.buffer.fresh is not None:
            self._check_written(access)
        if self.alone or self.race or not access.lanes:
            return
        history = access.buffer.history
        if history is None:
            self._pending_lanes += access.lanes
            if self._pending_lanes <= _MAX_PENDING_LANES:
                self._pending.append(access)
            return
        index = access.index(history.unit)
        if index is None:
            return
        me = self.linear + 1
        writer = history.writer[index]
        clash = (writer != 0) & (writer != me)
        if clash.any():
            clash &= ~self._is_ordered(writer)
            if clash.any():
                self.race = self._race(access, clash, writer, "store")
        self._note_reader(history, index, me)

    def note_order(self, access: Access, values: np.ndarray | None = None) -> None:
        """Compare a load, or a store of `values` that has not happened yet, with what other threads of this program did."""
        if self.disorder or not access.lanes or access.buffer.imaginary:
            return
        if (found := self.warps.add(access)) is None:
            return
        earlier, bad = found
        if access.kind == "store" == earlier.kind:  # one value, stored twice, is the same in any order
            changes = self._changes(access, values, access.width, access.index(access.width))
            bad = bad & changes.reshape(-1)
        if bad.any():
            fields = {"clash": earlier.kind, "before": earlier.line, **self._fields(access, bad)}
            self.disorder = WarpFault(**fields)

    def _note_reader(self, history: _History, index, me: int) -> None:
        reader = history.reader[index]
        others = (reader != 0) & (reader != me) & (reader != -me)
        if not others.any():
            history.reader[index] = np.where(reader == -me, reader, me)
        else:  # a reader that an atomic put before this program is stood for by this program
            shared = np.where(self._is_ordered(reader), me, -np.abs(reader))
            history.reader[index] = np.where(others, shared, np.where(reader == -me, reader, me))

    def _check_written(self, access: Access) -> None:
        fresh = access.buffer.fresh
        index = access.index(fresh.unit)
        if index is None or self.unwritten is not None:
            return
        unwritten = ~fresh.written[index]
        if unwritten.any():
            self.unwritten = UnwrittenFault(**self._fields(access, unwritten.reshape(access.lanes, -1).any(axis=1)))

    def _note_written(self, access: Access) -> None:
        fresh = access.buffer.fresh
        if access.width >= fresh.unit:
            fresh.written[access.index(fresh.unit)] = True
        else:
            fresh.written[access.offsets // fresh.unit] = True

    def store(self, access: Access, values: np.ndarray) -> None:
        """Note a store that was admitted, before it happens."""
        if access.lanes and access.buffer.fresh is not None:
            self._note_written(access)
        if self.alone or self.race or not access.lanes:
            return
        me = self.linear + 1
        history = self._history(access)
        index = access.index(history.unit)
        if index is None:
            return
        writer, reader, atomic = history.writer[index], history.reader[index], history.atomic[index]
        others = (atomic != 0) & (atomic != me) & ~self._is_ordered(np.abs(atomic))
        if others.any():
            self.race = self._race(access, others, np.abs(atomic), "atomic")
            return
        stored = (writer != 0) & (writer != me)
        clash = stored | ((reader != 0) & (reader != me))
        if clash.any():
            clash &= self._changes(access, values, history.unit, index)
            clash &= ~np.where(stored, self._is_ordered(writer), self._is_ordered(reader))
            if clash.any():
                if stored[np.flatnonzero(clash)[0]]:
                    self.race = self._race(access, clash & stored, writer, "store")
                else:
                    self.race = self._race(access, clash & ~stored, reader, "load")
        history.writer[index] = me

    def _history(self, access: Access) -> _History:
        """Who wrote and read the storage so far; begun by its first store or atomic, with what this program has loaded."""
        history = access.buffer.history
        if history is None:
            history = access.buffer.history = _History(access.buffer.nbytes, access.width)
            for load in self._pending:
                if load.buffer is access.buffer and load.index(history.unit) is not None:
                    self._note_reader(history, load.index(history.unit), self.linear + 1)
        return history

    def _changes(self, access: Access, values: np.ndarray, unit: int, index) -> np.ndarray:
        """For each unit touched, whether the store changes it: two programs may well store the same value."""
        shape = access.addresses.shape if access.live is None else access.live.shape
        values = np.broadcast_to(values, shape)
        values = values.reshape(-1) if access.live is None else values[access.live]
        return access.buffer.words(unit)[index] != np.ascontiguousarray(values).view(f"u{unit}")

    def _is_ordered(self, programs: np.ndarray) -> np.ndarray:
        if not self._ordered:
            return np.zeros(programs.shape, dtype=bool)
        return np.isin(programs, list(self._ordered))

    def atomic(self, access: Access, ordering: bool, reads: bool = True) -> None:
        """Note an atomic; `reads` is False for an exchange. One on a single address that orders memory (not sem="relaxed")
        is taken for a lock or a counter: a program that passes through it later comes after everything done before. It
        cannot put itself behind a plain store to its own address: either may come first."""
        if access.lanes and access.buffer.fresh is not None:
            if reads:
                self._check_written(access)
            self._note_written(access)
        if not (self.alone or self.race or not access.lanes):
            self._note_atomic(access)
        if ordering and access.lanes == 1:
            self._pass(access)

    def _note_atomic(self, access: Access) -> None:
        # Atomics of several programs do not race with each other; a plain store among them does.
        history, me = self._history(access), self.linear + 1
        index = access.index(history.unit)
        if index is None:
            return
        writer, atomic = history.writer[index], history.atomic[index]
        clash = (writer != 0) & (writer != me) & ~self._is_ordered(writer)
        if clash.any():
            self.race = self._race(access, clash, writer, "store")
        history.atomic[index] = np.where((atomic != 0) & (np.abs(atomic) != me), -me, me)

    def _pass(self, access: Access) -> None:
        """The program comes after all that passed through this address before, and what these came after."""
        passed = self._released.setdefault(access.low, set())
        if self._ordered is None or self._ordered is passed:
            self._ordered = passed
        else:
            passed |= self._ordered
            self._ordered = set(passed)
        passed.add(self.linear + 1)

    def _race(self, access: Access, clash: np.ndarray, others: np.ndarray, did: str) -> RaceFault:
        other = int(others[np.flatnonzero(clash)[0]])
        bad = clash.reshape(access.lanes, -1).any(axis=1)  # several units per lane where a lane is wider than a unit
        known = other > 0 and other != self.linear + 1
        return RaceFault(other=self.ids(other - 1) if known else None, clash=did, **self._fields(access, bad))
