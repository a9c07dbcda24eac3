"""What a traced launch touched, kept so compactly that every trace can keep it: one row of four numbers per access.

It is all that the cache model is given (caches.py), and only if somebody asks. Addresses are those of an imaginary GPU on which each
storage begins on a boundary of 2 MiB.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from gpukit.simulator.interpreter.addresses import Access, Tile, touched
from gpukit.simulator.interpreter.integers import Guided, evaluate, from_memory, numbers, outline
from gpukit.simulator.interpreter.running import Call
from gpukit.simulator.trace.levels import LINE_BYTES

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
    """Lanes that are no tile: byte offsets of the live ones from where the access begins, which is on a line of 128 bytes,
    and which lanes are live."""

    offsets: np.ndarray
    live: np.ndarray | None


def digit_places(radices: Sequence[int], programs: Sequence[int] | np.ndarray) -> np.ndarray:
    """[programs, 1 + digits]: 1, and the digits of their numbers."""
    linear, found = np.array(programs, dtype=np.int64), []
    for n in radices:
        found.append(linear % n)
        linear = linear // n
    return np.stack([np.ones_like(found[0]), *found], axis=1)


def digit_steps(known: np.ndarray, values: np.ndarray) -> np.ndarray | None:
    """By how much numbers [programs, ...] go up with each digit, if `known` are the digits of their programs (`digit_places`); None
    if they go up otherwise. The first of the steps, of the column of ones, only makes up for the first number."""
    found = np.rint(np.linalg.lstsq(known.astype(float), (values - values[0]).astype(float), rcond=None)[0])
    found = found.astype(np.int64)
    return None if (known @ found + values[0] != values).any() else found


class _Lines:
    """What numbers that go up by so much with each digit of a program's number (digits.radices) in `probes` are in `others`."""

    def __init__(self, radices: list[int], probes: list[int], others: list[int]):
        self._known, self._wanted = digit_places(radices, probes), digit_places(radices, others)

    def follow(self, values: np.ndarray) -> np.ndarray | None:
        """Of [probes, n] numbers the [others, n]; None if they go up otherwise."""
        if values.dtype.kind not in "iu":
            alike = (values == values[0]).all()
            return np.broadcast_to(values[0], (len(self._wanted), *values.shape[1:])) if alike else None
        exact = values.astype(np.int64)
        by = digit_steps(self._known, exact)
        return None if by is None else (self._wanted @ by + exact[0]).astype(values.dtype)


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
    position: array = field(default_factory=lambda: array("q"))  # which access of its program, as far as Access has it
    dots: bool = False  # whether it ran any tl.dot
    complete: bool = True  # False: more irregular lanes than are kept
    extent: int = 0  # bytes of the imaginary memory in use
    whole: int = 0  # of a sampled launch: rows of programs that ran from beginning to end, the first ones
    cut: set[int] = field(default_factory=set)  # and the programs that did not
    stands_for: dict[int, float] = field(
        default_factory=dict
    )  # how many programs each of them stands for that ran whole

    def __post_init__(self):
        self.answers: dict = {}  # of the cache model, by GPU
        self._bases: dict[int, int] = {}
        self._known: dict[object, int] = {}
        self._buffers: dict[int, object] = {}  # by site
        # By program, of the accesses that depend on integers which it reads: what on, and the row, or -1 where no lane was live.
        self._guided: dict[int, list[tuple[Guided, int]]] = {}
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

    def _irregular(self, offsets: np.ndarray, live: np.ndarray | None) -> int:
        """What `tile` says of such lanes: the same where an access before was of the same form."""
        key = tuple(None if a is None else blake2b(a.tobytes()).digest() for a in (offsets, live))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = -1 - len(self.irregular)
            self.irregular.append(Irregular(offsets, live))
            self._lanes += offsets.size
        return known

    def base(self, buffer) -> int:
        """Where a storage begins in the imaginary memory."""
        base = self._bases.get(buffer.key)
        if base is None:
            base = self._bases[buffer.key] = self.extent
            self.extent += -(-max(buffer.nbytes, 1) // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
        return base

    def base_of(self, site: int) -> int:
        """Where the storage begins in the imaginary memory on which a site's newest access was."""
        return self.base(self._buffers[site])

    def add(self, access: Access, program: int, site: Site) -> None:
        """Note an access with at least one live lane."""
        base = self.base(access.buffer)
        tile = access.tile
        if tile is not None:
            start = base + tile.start - access.buffer.base
            number = self._number(tile.moved(0), self.tiles)
        else:
            if self._lanes + access.lanes > MAX_IRREGULAR_LANES:
                self.complete = False
                return
            first = int(access.offsets.min()) // LINE_BYTES * LINE_BYTES
            start = base + first
            number = self._irregular(access.offsets - first, access.live)
        self.program.append(program)
        self.site.append(self._number(site, self.sites))
        self._buffers[self.site[-1]] = access.buffer
        self.tile.append(number)
        self.start.append(start)
        self.position.append(access.position)

    def repeat(self, steps: list[int], times: int) -> None:
        """The accesses of the newest rows, one for each of `steps`, are made so many times more, each of them so many bytes further
        on each time."""
        for column in (self.program, self.site, self.tile, self.position):
            column.extend(column[-len(steps) :] * times)
        starts = np.array(self.start[-len(steps) :]) + np.arange(1, times + 1)[:, None] * np.array(steps)
        self.start.frombytes(starts.tobytes())

    def guide(self, access: Access, program: int) -> None:
        """Note, after `add` if it has a live lane, what the place of an access depends on."""
        self._guided.setdefault(program, []).append((access.guided, len(self) - 1 if access.lanes else -1))

    def _unguided(self, first: int) -> tuple[np.ndarray, ...]:
        """Of the rows from `first` on whose place depends on no integer that was read: programs, sites, tiles, starts, positions.
        Programs that ran whole do not say on what theirs depend, but where they make these accesses, the others do."""
        guided = [row for own in self._guided.values() for _, row in own if row >= 0]
        columns = self.program, self.site, self.tile, self.start, self.position
        rows = [np.array(column, dtype=np.int64) for column in columns]
        kept = np.arange(len(self)) >= first
        kept[guided] = False
        kept[: self.whole] &= ~np.isin(rows[1][: self.whole], rows[1][guided])
        return tuple(column[kept] for column in rows)

    def starts(self, program: int) -> np.ndarray | None:
        """The addresses at which the accesses of a program of a sampled launch begin that did not run whole, without those that
        depend on integers which it reads; None if they are of other sites than those of the first such program, if one of the two
        was cut short and the other was not, or if there are none."""
        if len(self) == self.whole:
            return None
        model = self.program[self.whole]
        programs, sites, _, starts, _ = self._unguided(0)
        reference, own = (np.flatnonzero(programs == one) for one in (model, program))
        alike = np.array_equal(sites[own], sites[reference]) and (program in self.cut) == (model in self.cut)
        return starts[own] if alike else None

    def infer(self, radices: list[int], probes: list[int], others: list[int], turns: list[list[int]]) -> bool:
        """Note the accesses of the programs `others` of a sampled launch as those of `probes` say, if these make the same ones,
        each at an address that goes up by so much with each digit of the program's number (digits.radices), or that it makes of
        such numbers and of the integers that it reads. So must the `turns` of each probe's loops, and a loop of several turns may
        have no less than two in any program. Else nothing is noted, and it is False."""
        program, *columns = self._unguided(self.whole)
        rows = [np.flatnonzero(program == probe) for probe in probes]
        if not all(own.size == rows[0].size for own in rows) or len({probe in self.cut for probe in probes}) > 1:
            return False
        sites, tiles, starts, positions = (column[np.stack(rows)] for column in columns)  # [probes, accesses]
        if any((same != same[0]).any() for same in (sites, tiles, positions)):
            return False
        lines = _Lines(radices, probes, others)
        if len({len(own) for own in turns}) > 1:
            return False
        loops = np.array(turns, dtype=np.int64)
        turned = lines.follow(loops)
        if turned is None or (turned < 2)[:, (loops >= 2).all(axis=0)].any():
            return False
        moved = lines.follow(starts)
        if moved is None:
            return False
        live = np.ones(moved.shape, dtype=bool)
        found = self._follow(
            lines, probes, dict(zip(positions[0].tolist(), zip(sites[0].tolist(), moved.T, strict=True), strict=True))
        )
        if found is None:
            return False
        own = [positions[0], sites[0], tiles[0]]
        for position, site, tile, start, here in found:
            own = [np.append(column, value) for column, value in zip(own, (position, site, tile), strict=True)]
            moved, live = np.column_stack([moved, start]), np.column_stack([live, here])
        order = np.argsort(own[0])
        live = live[:, order]
        for column, values in (
            (self.program, np.broadcast_to(np.array(others)[:, None], live.shape)),
            (self.site, np.broadcast_to(own[1][order], live.shape)),
            (self.tile, np.broadcast_to(own[2][order], live.shape)),
            (self.start, moved[:, order]),
            (self.position, np.broadcast_to(own[0][order], live.shape)),
        ):
            column.extend(values[live].tolist())
        if probes[0] in self.cut:
            self.cut.update(others)
        return True

    def _follow(
        self, lines: _Lines, probes: list[int], places: dict[int, tuple[int, np.ndarray]]
    ) -> list[tuple] | None:
        """Of each access whose place depends on integers: its position, site and tile, where it begins in the programs that have
        not run, and whether it has a live lane there. `places` has the site and the beginnings of the others by position. None
        where that cannot be told."""
        each = [self._guided.get(probe, []) for probe in probes]

        def reads(position: int, dtype: np.dtype) -> np.ndarray:
            site, starts = places[position]
            buffer = self._buffers[site]
            return from_memory(starts - self.base(buffer) + buffer.base, dtype)

        found = []
        for alike in zip(*each, strict=False):
            guide = alike[0][0]
            outlines = {(g.position, outline(g.address), outline(g.mask)) for g, _ in alike}
            own = [
                lines.follow(np.concatenate(n)[None].T)
                for n in zip(*(numbers((g.address, g.mask)) for g, _ in alike), strict=True)
            ]
            rows = [row for _, row in alike if row >= 0]
            if len(outlines) > 1 or any(values is None for values in own) or not rows:
                return None
            if len({(self.site[row], self.tile[row]) for row in rows}) > 1:
                return None
            site, tile = self.site[rows[0]], self.tile[rows[0]]
            buffer, width = self._buffers[site], self.sites[site].width
            own = [values[:, 0] for values in own]
            address = evaluate(guide.address, own, reads).astype(np.int64)
            here = np.broadcast_to(evaluate(guide.mask, own, reads), address.shape)
            if (
                tile < 0
                or buffer.legal.mask is not None
                or ((address < buffer.low) | (address + width > buffer.high))[here].any()
            ):
                return None
            found.append((guide.position, site, tile, address - buffer.base + self.base(buffer), here))
        return found if len({len(own) for own in each}) == 1 else None

    def units(self, row: int, unit: int) -> np.ndarray:
        """The distinct units of `unit` bytes that row touches, sorted."""
        tile, start, width = self.tile[row], self.start[row], self.sites[self.site[row]].width
        if tile >= 0:
            return touched(self.tiles[tile].moved(start), width, unit) + start // unit
        offsets = self.irregular[-1 - tile].offsets
        return np.unique(np.concatenate([offsets // unit, (offsets + width - 1) // unit])) + start // unit

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        return zip(self.program, self.site, self.tile, self.start, strict=True)
