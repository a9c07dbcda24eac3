"""Where the lanes of one load, store or atomic point: as a grid where they are one, and which sectors lie under it."""

import copy
import math
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

SECTOR_BYTES = 32


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
    line        of the kernel's text, if anybody asked; else 0
    position    which access of its program it is, where only the beginnings of programs are looked at
    guided      what its place depends on there (integers.py)
    """

    def __init__(self, kind: str, pointers: np.ndarray, live: np.ndarray | None, width: int, via: str = "lsu"):
        self.kind, self.pointers, self.width, self.via, self.line = kind, pointers, width, via, 0
        self.position, self.guided = 0, None
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

    def moved(self, step: int) -> "Access":
        """The same lanes, which are a grid, so many bytes further on, as far as recorders ask of them; it has no addresses."""
        other = copy.copy(self)
        other.tile, other.low, other.high = self.tile.moved(self.tile.start + step), self.low + step, self.high + step
        other._offsets = None
        other.__dict__.pop("addresses", None)
        return other

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
