"""Which memory a launch may touch and which program touched it: bounds and races, in NumPy, without Triton.

One `Memory` exists per launch. Every load, store and atomic of the interpreter becomes an `Access` and passes
`Memory.admit` before any byte is read or written, so a wild pointer is a sentence and never a crash.
"""

import ctypes
import math
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

SECTOR_BYTES = 32
_FIRST_IMAGINARY, _IMAGINARY_STEP = 1 << 60, 1 << 30  # addresses that no process has, and room between two of them
_MAX_PENDING_LANES = 1 << 22  # of addresses kept per program, 32 MiB: beyond it races with earlier loads go unseen


class Fault(Exception):
    """What a kernel did to memory that it must not do. The fields say where; `str()` is one sentence.

    kind         "load", "store" or "atomic"
    tensor       the kernel parameter that the pointer came from
    program      ids of the program, as many as the grid has axes
    file, line   where tl.load, tl.store or tl.atomic_* was called
    count        lanes of this access that are at fault
    lane         position of the first of them in the block
    first_index  its distance, in elements of the view, from the view's first element (negative: before it)
    size, shape  of the view: the guarded one if there is one, else the tensor that was passed
    name         what the view is called: the name given to `guard`, else the parameter's
    """

    def __init__(self, **fields):
        self.__dict__.update(fields)
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        raise NotImplementedError


class MemoryFault(Fault):
    """An access outside every legal element; `where` is "past the end", "before the start" or "between rows"."""

    def _sentence(self) -> str:
        elements = "1 element" if self.count == 1 else f"{self.count} elements"
        place = "between the rows" if self.where == "between rows" else self.where
        return (
            f"{self.kind} outside {self.tensor}: {_program(self.program)}, line {self.line}: {elements} {place} of "
            f"{self.name} {list(self.shape)}; first at index {self.first_index}"
        )


class RaceFault(Fault):
    """Two programs of one launch use one address and nothing says which comes first.

    other   ids of the other program, None where there are several
    clash   what the other one did: "load" or "store"
    """

    def _sentence(self) -> str:
        other = "another program" if self.other is None else _program(self.other)
        did = {
            ("store", "store"): f"stores a value that differs from the one {other} stored",
            ("store", "load"): f"stores to what {other} loads",
            ("load", "store"): f"loads what {other} stores",
        }[self.kind, self.clash]
        return (
            f"race on {self.tensor}: {_program(self.program)}, line {self.line}: {did}, at index {self.first_index} of "
            f"{self.name} {list(self.shape)}; programs run in any order"
        )


class UnwrittenFault(Fault):
    """A load, or an atomic, of elements of a fresh tensor (torch.empty) that nobody has written."""

    def _sentence(self) -> str:
        elements = "1 element" if self.count == 1 else f"{self.count} elements"
        return (
            f"{self.kind} of {self.tensor}: {_program(self.program)}, line {self.line}: {elements} of {self.name} "
            f"{list(self.shape)} that nobody has written; first at index {self.first_index}"
        )


def _program(ids) -> str:
    return f"program {ids[0]}" if len(ids) == 1 else f"program {tuple(ids)}"


def program_ids(linear: int, grid: tuple[int, ...]) -> tuple[int, ...]:
    """Ids of the linear-th program in launch order (axis 0 fastest, as on a GPU)."""
    ids = []
    for n in grid:
        ids.append(linear % n)
        linear //= n
    return tuple(ids)


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


class Tile(NamedTuple):
    """A block of addresses that is a grid: lane (i, j, ...) is at start + i * strides[0] + j * strides[1] + ..., and the
    lanes with low[d] <= index < high[d] in every dimension d are live. Nearly all blocks are of this kind."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.low, self.high, strict=True))

    def moved(self, start: int) -> "Tile":
        return self._replace(start=start)

    def span(self, width: int) -> tuple[int, int]:
        """First byte of the live lanes and the end of the last."""
        first = last = self.start
        for stride, low, high in zip(self.strides, self.low, self.high, strict=True):
            first += min(stride * low, stride * (high - 1))
            last += max(stride * low, stride * (high - 1))
        return first, last + width

    def run(self, width: int) -> int:
        """Lanes in a row that are next to each other in memory, counted over the fastest dimensions."""
        lanes = 1
        for stride, n in zip(self.strides[::-1], self.extents[::-1], strict=True):
            if n == 1:
                continue
            if stride != lanes * width:
                break
            lanes *= n
        return lanes

    def offsets(self) -> np.ndarray:
        """Distances of the live lanes from `start`, in lane order, int64."""
        grid = grid_offsets(self.shape, self.strides)
        return grid[tuple(map(slice, self.low, self.high))].reshape(-1)


@lru_cache(maxsize=128)
def grid_offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Distances in bytes of the lanes of a grid from its first one, int64, in the block's shape."""
    total = np.zeros(shape, dtype=np.int64)
    for axis, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        total += (np.arange(n, dtype=np.int64) * stride).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return total


def find_tile(addresses: np.ndarray, live: np.ndarray | None) -> Tile | None:
    """The grid that these addresses (uint64) are, None if they are none or no lane is live."""
    shape = addresses.shape
    start = int(addresses.item(0))
    strides = []
    for axis, n in enumerate(shape):
        step = int(addresses.item(math.prod(shape[axis + 1 :]))) - start if n > 1 else 0
        strides.append(step - (1 << 64) if step >= 1 << 63 else step + (1 << 64) if step < -(1 << 63) else step)
    if (
        addresses.size > 1
        and not ((addresses - addresses.item(0)).view(np.int64) == grid_offsets(shape, tuple(strides))).all()
    ):
        return None
    low, high = (0,) * len(shape), shape
    if live is not None:
        box = _box(live)
        if box is None:
            return None
        low, high = box
    return Tile(start, shape, tuple(strides), low, high)


def _box(live: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The lanes that are live as a box (low, high), None if they are none or another shape."""
    flat = live.reshape(-1)
    count = int(np.count_nonzero(flat))
    if not count:
        return None
    first, last = int(flat.argmax()), flat.size - 1 - int(flat[::-1].argmax())
    low, high = [], []
    for n in live.shape[::-1]:
        low.append(first % n)
        high.append(last % n + 1)
        first, last = first // n, last // n
    low, high = tuple(low[::-1]), tuple(high[::-1])
    inside = live[tuple(map(slice, low, high))]
    return (low, high) if inside.size == count and inside.all() else None


def touched(tile: Tile, width: int, unit: int) -> np.ndarray:
    """The distinct units of `unit` bytes under the live lanes, sorted; unit 0 is the one in which `start` lies."""
    return _touched(tile._replace(start=tile.start % unit), width, unit)


@lru_cache(maxsize=1024)
def _touched(tile: Tile, width: int, unit: int) -> np.ndarray:
    run = tile.run(width)
    first = tile.start + tile.offsets()[::run]
    if run > 1 or unit % width or tile.start % width:
        last = (first + run * width - 1) // unit
        first = first // unit
        most = int((last - first).max()) + 1
        if most > 1:
            every = first[:, None] + np.arange(most)
            return np.unique(every[every <= last[:, None]])
    else:
        first = first // unit
    return np.unique(first)


class Access:
    """One executed tl.load, tl.store or atomic of one program: where its lanes point, those masked off left out.

    lanes       how many are live; `masked` how many are not
    low, high   first byte touched and the end of the last, if any lane is live
    tile        the lanes as a grid, None where they are none
    via         how a GPU moves it: "lsu" (the SM's ordinary way), "tma" (a descriptor)
    """

    def __init__(self, kind: str, pointers: np.ndarray, live: np.ndarray | None, width: int, via: str = "lsu"):
        self.kind, self.pointers, self.width, self.via = kind, pointers, width, via
        if live is not None:
            live = live.astype(bool, copy=False)
            if live.all():
                live = None
            elif live.shape != pointers.shape:
                live = np.broadcast_to(live, pointers.shape)
        self.live = live
        self.parameter = self.buffer = self._offsets = self._contiguous = None
        self.tile = find_tile(pointers, live)
        if self.tile is not None:
            self.lanes = math.prod(self.tile.extents)
            self.low, self.high = self.tile.span(width)
        else:
            self.lanes = self.addresses.size
            if self.lanes:
                self.low, self.high = int(self.addresses.min()), int(self.addresses.max()) + width
        self.masked = pointers.size - self.lanes

    @cached_property
    def addresses(self) -> np.ndarray:
        """The addresses of the live lanes, one dimension if a mask has left some out."""
        return self.pointers if self.live is None else self.pointers[self.live]

    @property
    def offsets(self) -> np.ndarray:
        """Byte offsets from the start of the storage, one per lane, in lane order."""
        if self._offsets is None:
            if self.tile is not None:
                self._offsets = self.tile.offsets() + (self.tile.start - self.buffer.base)
            else:
                self._offsets = (self.addresses.reshape(-1) - np.uint64(self.buffer.base)).view(np.int64)
        return self._offsets

    @property
    def contiguous(self) -> bool:
        """Whether the lanes, in order, cover one run of memory."""
        if self._contiguous is None:
            if self.tile is not None:
                self._contiguous = self.tile.run(self.width) == self.lanes
            else:
                flat = self.addresses.reshape(-1)
                self._contiguous = (
                    self.lanes > 0
                    and self.high - self.low == self.lanes * self.width
                    and bool((flat[1:] > flat[:-1]).all())
                )
        return self._contiguous

    def index(self, unit: int):
        """Which units of `unit` bytes of the storage are touched: a slice or an array; None if smaller than one."""
        if self.width < unit:
            return None
        if self.contiguous:
            base = self.buffer.base
            return slice((self.low - base) // unit, (self.high - base) // unit)
        first = self.offsets // unit
        if self.width == unit:
            return first
        return (first[:, None] + np.arange(self.width // unit)).reshape(-1)

    @property
    def sectors(self) -> int:
        """Distinct 32-byte sectors, as if the storage began on a sector (GPU allocations begin on 256 bytes)."""
        if not self.lanes:
            return 0
        if self.contiguous:
            low, high = self.low - self.buffer.base, self.high - self.buffer.base
            return (high - 1) // SECTOR_BYTES - low // SECTOR_BYTES + 1
        if self.tile is not None:
            return touched(self.tile.moved(self.tile.start - self.buffer.base), self.width, SECTOR_BYTES).size
        return self.distinct_sectors().size

    @property
    def runs(self) -> tuple[int, int]:
        """Bytes of the shortest run of live lanes next to each other, and of the widest access a thread could make
        that divides every run and its beginning: 1 to 16."""
        width = self.width
        if self.tile is not None:
            lanes = self.tile.run(width)
            steps = [s for s, n in zip(self.tile.strides, self.tile.extents, strict=True) if n > 1 and abs(s) != width]
            ends = math.gcd(self.low - self.buffer.base, lanes * width, 16, *(steps if lanes < self.lanes else ()))
            return lanes * width, max(ends, width)
        step = np.flatnonzero(np.diff(self.offsets) != width) + 1
        edges = np.concatenate([[0], step, [self.lanes]])
        shortest = int(np.diff(edges).min()) * width
        starts = self.offsets[edges[:-1]]
        vector = math.gcd(16, shortest, int(np.gcd.reduce(starts)), int(np.gcd.reduce(np.diff(edges))) * width)
        return shortest, max(vector, width)

    def distinct_sectors(self) -> np.ndarray:
        """The distinct 32-byte sectors of the storage, sorted, of lanes that are no tile."""
        low, high = self.low - self.buffer.base, self.high - self.buffer.base
        first, last = low // SECTOR_BYTES, (high - 1) // SECTOR_BYTES
        touched = self.offsets // SECTOR_BYTES
        if last - first > 8 * self.lanes + 1024:
            return np.unique(touched)
        seen = np.zeros(last - first + 1, dtype=bool)
        seen[touched - first] = True
        return np.flatnonzero(seen) + first


class _History:
    """Per element of one written storage: the last program that stored it and the first that loaded it, counted from
    1; 0 is nobody; a negative reader says that others loaded it too."""

    def __init__(self, nbytes: int, unit: int):
        self.unit = unit
        self.writer = np.zeros(nbytes // unit, dtype=np.int32)
        self.reader = np.zeros(nbytes // unit, dtype=np.int32)


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
        parameter = parameter or self._nearest(access.low)
        if parameter is None:
            raise ValueError(f"{access.kind} through a pointer, but the kernel was given no tensor")
        buffer = parameter.buffer
        access.parameter, access.buffer = parameter, buffer
        if access.low < buffer.low or access.high > buffer.high:
            raise self._outside(access)
        if buffer.legal.mask is not None and not buffer.legal.ok(access.offsets, access.width).all():
            raise self._outside(access)

    def _nearest(self, address: int) -> Parameter | None:
        def distance(p: Parameter) -> int:
            return max(p.buffer.low - address, address - p.buffer.high + 1, 0)

        return min(self.parameters, key=distance, default=None)

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
        history = access.buffer.history
        if history is None:
            history = access.buffer.history = _History(access.buffer.nbytes, access.width)
            for load in self._pending:
                if load.buffer is access.buffer and load.index(history.unit) is not None:
                    self._note_reader(history, load.index(history.unit), me)
        index = access.index(history.unit)
        if index is None:
            return
        writer, reader = history.writer[index], history.reader[index]
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
        """Note an atomic; `reads` is False for an exchange. One on a single address that orders memory (not sem="relaxed") is taken for a lock or a
        counter: whoever passes through it later comes after everything done before."""
        if access.lanes and access.buffer.fresh is not None:
            if reads:
                self._check_written(access)
            self._note_written(access)
        if not ordering or access.lanes != 1:
            return
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
