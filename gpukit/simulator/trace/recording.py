"""What a traced launch touched, kept so compactly that every trace can keep it: one row of four numbers per access.

It is all that the cache model is given (caches.py), and only if somebody asks. Addresses are those of an imaginary GPU on which each
storage begins on a boundary of 2 MiB.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from gpukit.simulator.interpreter.addresses import Access, Tile, touched
from gpukit.simulator.interpreter.running import Call

STORAGE_ALIGNMENT = 1 << 21
MAX_IRREGULAR_LANES = 1 << 24  # of accesses that are no tiles, 8 bytes each


@dataclass(frozen=True)
class Site:
    """One tl.load, tl.store or atomic of a kernel, on one tensor, with one block shape. `via` is "lsu" or "tma"."""

    kind: str
    tensor: str
    file: str
    line: int
    shape: tuple[int, ...]
    width: int
    via: str = "lsu"

    @property
    def lanes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Irregular:
    """Lanes that are no tile: byte offsets of the live ones from the storage's start, and which lanes are live."""

    offsets: np.ndarray
    live: np.ndarray | None


@dataclass
class Recording:
    """What one launch touched: accesses in the order in which they ran. Row i: program[i] made an access of site[i]; its lanes are those of
    tiles[tile[i]] moved to address start[i] or, where tile[i] is negative, irregular[-1 - tile[i]] after start[i]."""

    call: Call = field(repr=False)
    sites: list[Site] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    irregular: list[Irregular] = field(default_factory=list)
    program: array = field(default_factory=lambda: array("q"))
    site: array = field(default_factory=lambda: array("q"))
    tile: array = field(default_factory=lambda: array("q"))
    start: array = field(default_factory=lambda: array("q"))
    dots: bool = False  # whether it ran any tl.dot
    complete: bool = True  # False: more irregular lanes than are kept
    extent: int = 0  # bytes of the imaginary memory in use
    whole: int = 0  # of a sampled launch: rows of programs that ran from beginning to end, the first ones
    cut: set[int] = field(default_factory=set)  # and the programs that did not

    def __post_init__(self):
        self.answers: dict = {}  # of the cache model, by GPU
        self._bases: dict[int, int] = {}
        self._known: dict[object, int] = {}
        self._lanes = 0

    def __eq__(self, other) -> bool:
        columns = ("sites", "tiles", "program", "site", "tile", "start")
        return isinstance(other, Recording) and all(getattr(self, c) == getattr(other, c) for c in columns)

    def __len__(self) -> int:
        return len(self.program)

    def _number(self, item, items: list) -> int:
        known = self._known.get(item)
        if known is None:
            known = self._known[item] = len(items)
            items.append(item)
        return known

    def base(self, buffer) -> int:
        """Where a storage begins in the imaginary memory."""
        base = self._bases.get(buffer.key)
        if base is None:
            base = self._bases[buffer.key] = self.extent
            self.extent += -(-max(buffer.nbytes, 1) // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
        return base

    def add(self, access: Access, program: int, site: Site) -> None:
        """Note an access with at least one live lane."""
        base = self.base(access.buffer)
        tile = access.tile
        if tile is not None:
            start = base + tile.start - access.buffer.base
            number = self._number(tile.moved(0), self.tiles)
        else:
            self._lanes += access.lanes
            if self._lanes > MAX_IRREGULAR_LANES:
                self.complete = False
                return
            start = base
            number = -1 - len(self.irregular)
            self.irregular.append(Irregular(access.offsets, access.live))
        self.program.append(program)
        self.site.append(self._number(site, self.sites))
        self.tile.append(number)
        self.start.append(start)

    def starts(self, program: int) -> np.ndarray | None:
        """The addresses at which the accesses of a program of a sampled launch begin, as many as the first program that did not
        run whole has; None if they are of other sites than that one's, or there are none."""
        if len(self) == self.whole:
            return None
        programs, sites, starts = (np.array(c, dtype=np.int64) for c in (self.program, self.site, self.start))
        reference = sites[self.whole :][programs[self.whole :] == programs[self.whole]]
        own = np.flatnonzero(programs == program)[: reference.size]
        return starts[own] if np.array_equal(sites[own], reference) else None

    def infer(self, radices: list[int], probes: list[int], others: list[int]) -> bool:
        """Note the accesses of the programs `others` of a sampled launch as those of `probes` say, if these make the same ones,
        each at an address that goes up by so much with each digit of the program's number (digits.radices). Else nothing is
        noted, and it is False."""
        columns = [np.array(c, dtype=np.int64)[self.whole :] for c in (self.program, self.site, self.tile, self.start)]
        program, site, tile, start = columns
        rows = [np.flatnonzero(program == probe) for probe in probes]
        if not all(own.size == rows[0].size for own in rows) or len({probe in self.cut for probe in probes}) > 1:
            return False
        table = np.stack(rows)  # [probes, accesses]
        sites, tiles, starts = site[table], tile[table], start[table]
        if (sites != sites[0]).any() or (tiles != tiles[0]).any() or (tiles < 0).any():
            return False

        def places(programs: list[int]) -> np.ndarray:
            """[programs, 1 + digits]: 1, and the digits of their numbers."""
            linear, found = np.array(programs, dtype=np.int64), []
            for n in radices:
                found.append(linear % n)
                linear = linear // n
            return np.stack([np.ones_like(found[0]), *found], axis=1)

        known = places(probes)
        steps = np.rint(np.linalg.lstsq(known.astype(float), (starts - starts[0]).astype(float), rcond=None)[0])
        steps = steps.astype(np.int64)
        if (known @ steps + starts[0] != starts).any():
            return False
        moved = places(others) @ steps + starts[0]
        for number, own in zip(others, moved.tolist(), strict=True):
            self.program.extend([number] * len(own))
            self.site.extend(sites[0].tolist())
            self.tile.extend(tiles[0].tolist())
            self.start.extend(own)
        if probes[0] in self.cut:
            self.cut.update(others)
        return True

    def units(self, row: int, unit: int) -> np.ndarray:
        """The distinct units of `unit` bytes that row touches, sorted."""
        tile, start, width = self.tile[row], self.start[row], self.sites[self.site[row]].width
        if tile >= 0:
            return touched(self.tiles[tile].moved(start), width, unit) + start // unit
        offsets = self.irregular[-1 - tile].offsets
        return np.unique(np.concatenate([offsets // unit, (offsets + width - 1) // unit])) + start // unit

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        return zip(self.program, self.site, self.tile, self.start, strict=True)
