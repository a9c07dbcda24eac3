"""The programs of a launch on the SMs, wave by wave, and what they ask of the caches.

Program p goes to SM p mod sms, as many at a time as fit. Those of a wave take turns: the first access of each, the second of
each, and so on. Nothing waits for a store, so one that follows another goes to L2 right behind it, in the same turn. Of a
sampled launch the first waves are put together from the programs that ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpukit.hardware import Gpu
from gpukit.simulator.interpreter.addresses import SECTOR_BYTES
from gpukit.simulator.trace.instructions import Forms, Way
from gpukit.simulator.trace.levels import L1, L2, L2_WAITS, LINE_BYTES, LINE_SECTORS, by_line
from gpukit.simulator.trace.places import places, sectors_read, used_once
from gpukit.simulator.trace.recording import STORAGE_ALIGNMENT, Recording, Site, digit_places, digit_steps

_SAMPLED_SMS = 4  # SMs whose L1 is followed in a sampled launch
LATE_PARTS = 8  # of a program's accesses by one site, of which each is counted for itself
_FAR = 8  # a gather from so small a part of its tensor lies where the program does
GOLDEN = 0.6180339887498949  # its multiples, without their whole part, are spread evenly
WHOLE = np.uint8(SECTOR_BYTES)


@dataclass
class _Rows:
    """Accesses as columns: which program makes them, as its how-manieth, which row of the recording they are, and the
    address where they begin."""

    program: np.ndarray
    step: np.ndarray
    row: np.ndarray
    start: np.ndarray


def _recorded(recording: Recording) -> _Rows:
    program = np.array(recording.program, dtype=np.int64)
    begins = np.flatnonzero(np.diff(program, prepend=-1))  # the rows of a program are neighbours
    step = np.arange(program.size) - np.repeat(begins, np.diff([*begins, program.size]))
    return _Rows(program, step, np.arange(program.size), np.array(recording.start, dtype=np.int64))


def _reconstructed(recording: Recording, reach: np.ndarray) -> _Rows:
    """The accesses of the first programs of a sampled launch. One that was cut short goes on like the nearest program that
    was not, from where its own accesses began; what it never reached goes to addresses of its own, unless all programs that
    were not cut short begin there at one address, as with the weights of a norm. A gather asks for other elements in each
    program: the same ones, moved to somewhere in a tensor of that size, along the lattice on which they lie."""
    bounds: dict[int, list[int]] = {}
    for row, program in enumerate(recording.program):
        bounds.setdefault(program, [row, row + 1])[1] = row + 1
    complete = sorted({*recording.program[: recording.whole]})
    window = sorted({*recording.program[recording.whole :]})
    inside = sorted({*window, *(p for p in complete if p <= max(window, default=-1) or not window)})
    sites, tiles, starts = (np.array(c, dtype=np.int64) for c in (recording.site, recording.tile, recording.start))
    firsts: dict[int, list[int]] = {}  # where programs begin with a site
    for program in complete:
        first, last = bounds[program]
        found, at = np.unique(sites[first:last], return_index=True)
        for site, row in zip(found.tolist(), (first + at).tolist(), strict=True):
            firsts.setdefault(site, []).append(int(starts[row]))
    shared = {site for site, found in firsts.items() if len(found) > 1 and len({*found}) == 1}
    beyond = recording.extent
    gathered: dict[int, int] = {}  # where gathers from a tensor begin -> how far these are moved first
    extents: dict[int, tuple[int, int]] = {}  # of these sites: where what they touch begins, and over how many bytes
    for site in np.unique(sites[tiles < 0]).tolist():
        low = int(starts[sites == site].min()) // STORAGE_ALIGNMENT * STORAGE_ALIGNMENT
        ends = starts[sites == site] + reach[1, tiles[sites == site]]
        extents[site] = low, int(ends.max()) - low + recording.sites[site].width
    extents = _overlapping(extents)  # a row and its scale behind it move as one
    of_tensor = {
        name: {i for i, s in enumerate(recording.sites) if s.tensor == name}
        for name in {s.tensor for s in recording.sites}
    }
    # Shifts still free, by the row that the program goes on like and the tensor.
    places: dict[tuple[int, str], list[int]] = {}
    columns: list[list[np.ndarray]] = []
    for program in inside:
        own = np.arange(*bounds[program])
        if program not in recording.cut:
            columns.append([np.full(own.size, program), np.arange(own.size), own, starts[own]])
            continue
        rows = np.arange(*bounds[min(complete, key=lambda c: (abs(c - program), c))])
        moved = starts[rows].copy()
        tiled = own[tiles[own] >= 0]
        begin = {int(site): row for row, site in zip(tiled[::-1], sites[tiled][::-1], strict=True)}
        gathers = {*(sites[own[tiles[own] < 0]]).tolist()} - {*begin}
        for site in [*gathers]:  # lanes that are no tile, but the same ones as in the other program, or not far apart
            first, other = own[sites[own] == site][0], rows[sites[rows] == site]
            apart = reach[1, tiles[first]] - reach[0, tiles[first]]
            if other.size and (tiles[first] == tiles[other[0]] or apart * _FAR < extents[site][1]):
                begin[site] = first
                gathers.remove(site)
        shifts = {}  # a site that was not reached lies where another one on the same tensor has moved to
        for site in np.unique(sites[rows]).tolist():
            if site in begin:
                shift = int(starts[begin[site]] - starts[rows[sites[rows] == site][0]])
                shifts[site] = shift
                shifts.setdefault(recording.sites[site].tensor, shift)
        for site in np.unique(sites[rows]).tolist():
            regular = (sites[rows] == site) & (tiles[rows] >= 0)
            lost = (sites[rows] == site) & (tiles[rows] < 0)
            tensor = recording.sites[site].tensor
            elsewhere = site in gathers or not shifts.get(site, shifts.get(tensor))
            if lost.any() and recording.sites[site].kind != "store" and elsewhere:
                low, size = extents[site]
                if low not in gathered:
                    gathered[low] = beyond - low
                    beyond += -(-2 * size // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
                steps = np.array([_lattice(recording.irregular[-1 - tile].offsets, size) for tile in tiles[rows[lost]]])
                moved[lost] += gathered[low] + int(program * GOLDEN % 1 * size) // steps * steps
                lost[:] = False
            if not (regular | lost).any():
                continue
            shift = shifts.get(site, shifts.get(tensor, 0 if site in shared else None))
            if shift is None:
                key = int(rows[0]), tensor
                if not places.get(key):
                    # All that it does to the tensor moves as one: two stores may fill a sector together.
                    stored = [n for n in of_tensor[tensor] if recording.sites[n].kind != "load"]
                    these = (tiles[rows] >= 0) | np.isin(sites[rows], stored)
                    these = rows[these & np.isin(sites[rows], [*(of_tensor[tensor] - shared)])]
                    low = (starts[these] + reach[0, tiles[these]]).min() // STORAGE_ALIGNMENT * STORAGE_ALIGNMENT
                    accesses = np.stack([tiles[these], starts[these], sites[these]])
                    _, alike = np.unique(accesses, axis=1, return_index=True)
                    used = np.concatenate([recording.units(row, LINE_BYTES) for row in these[alike].tolist()])
                    lines, free = _places(np.unique(used) - low // LINE_BYTES)
                    places[key] = [beyond - low + place * LINE_BYTES for place in free]
                    beyond += -(-lines * LINE_BYTES // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
                shift = shifts[tensor] = places[key].pop()
            moved[regular] += shift
            moved[lost] += shift // LINE_BYTES * LINE_BYTES
        columns.append([np.full(rows.size, program), np.arange(rows.size), rows, moved])
    nothing = [np.zeros(0, dtype=np.int64)] * 4  # a launch may make no accesses
    return _Rows(*(np.concatenate(column) for column in zip(nothing, *columns, strict=True)))


def _overlapping(extents: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """For each site, where those that overlap with it begin, and how many bytes they have together."""
    found, those, end = {}, [], 0
    for site, (low, size) in sorted(extents.items(), key=lambda each: each[1]):
        those, end = ([*those, site], max(end, low + size)) if those and low < end else ([site], low + size)
        begin = extents[those[0]][0]
        found.update(dict.fromkeys(those, (begin, end - begin)))
    return found


def _lattice(offsets: np.ndarray, size: int) -> int:
    """Bytes by which a gather from a tensor of `size` bytes can be moved and still ask for what others may: whole lines,
    and more where its addresses lie further apart. A step of a binary search looks at every 2 ** k-th entry only, and
    the first one of all programs at the same."""
    apart = int(np.gcd.reduce(np.diff(offsets), initial=0)) or size
    return apart if apart % LINE_BYTES == 0 else LINE_BYTES


def _places(used: np.ndarray) -> tuple[int, list[int]]:
    """Copies of the lines `used`, sorted numbers, can lie in the gaps of the first: how many lines all of them reach over, and
    how far each is moved. (A program that reads a few numbers of each head would else spread over as much as the tensor.)"""
    steps = np.diff(used)
    ends = np.flatnonzero(steps > 1)
    longest = int(np.diff([-1, *ends, used.size - 1]).max())
    gap = int(steps[ends].min()) - 1 if ends.size else 0
    free = list(range(0, gap + 1, longest))
    return int(used[-1]) + free[-1] + 1, free


def _reach(recording: Recording) -> np.ndarray:
    """[2, tiles]: how far the first and the last live lane of each tile are from its start, in bytes. Irregular ones are at
    the end, backwards: they have the numbers -1, -2, ..."""
    spans = [tile.moved(0).span(0) for tile in recording.tiles]
    spans += [(lost.offsets.min(), lost.offsets.max()) for lost in recording.irregular[::-1]]
    return np.array(spans, dtype=np.int64).reshape(-1, 2).T


def _packed(start: np.ndarray, reach: np.ndarray, step: int) -> tuple[np.ndarray, int]:
    """The same addresses without the stretches that nobody uses, in steps of so many bytes, and how many bytes they then
    take. A sampled launch of large tensors uses little of them."""
    first, last = (start + reach) // step
    lowest = int(first.min(initial=0))
    size = int(last.max(initial=0)) - lowest + 2
    edges = np.bincount(first - lowest, minlength=size) - np.bincount(last - lowest + 1, minlength=size)
    used = np.cumsum(edges) > 0
    place = np.cumsum(used) - 1
    return start + (place[first - lowest] - first) * step, int(used.sum()) * step


def _tensors(recording: Recording) -> list[tuple[list[int], int]]:
    """Of each memory that arguments lie in, two of them perhaps in one: the numbers of the sites that are on it, and how many sectors it
    has."""
    found: dict[int, tuple[list[int], int]] = {}
    for name, argument in recording.call.arguments.items():
        sites = [i for i, site in enumerate(recording.sites) if site.tensor == name]
        tensor = getattr(argument, "base", argument)
        if sites and hasattr(tensor, "untyped_storage"):
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, ([], -(-storage.nbytes() // SECTOR_BYTES)))[0].extend(sites)
    return list(found.values())


class _Dram(NamedTuple):
    """Sectors between L2 and DRAM: read for each site, of these the share read as halves of lines, and the share of what programs
    ask for at different times that comes from there; read to complete sectors that were written in part, written, and written to
    L2 but not yet to DRAM. Of both of these: how many pieces of lines they are that leave L2 without the rest, and their sectors."""

    read: np.ndarray
    halves: np.ndarray
    first: np.ndarray
    completed: float
    written: float
    dirty: float
    pieces: float
    piece_sectors: float


def share(of: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Element by element; 0 where there is nothing."""
    return np.divide(of, total, out=np.zeros_like(of), where=total > 0)


def _turns(program: np.ndarray, step: np.ndarray, stores: np.ndarray) -> np.ndarray:
    """The turn in which each access is made: its step, or that of the first of the stores of its program that follow one
    another. The rows of a program are neighbors, in the order of their steps."""
    follows = stores & np.roll(stores, 1) & (np.roll(program, 1) == program) & (step > 0)
    first = np.maximum.accumulate(np.where(follows, 0, np.arange(step.size)))
    return step[first]


def _changes(numbers: np.ndarray) -> np.ndarray:
    """Which of them is the first, or another one than that before it."""
    found = np.ones(numbers.size, dtype=bool)
    np.not_equal(numbers[1:], numbers[:-1], out=found[1:])
    return found


def _pieces(lines: np.ndarray) -> int:
    """Into how many pieces lines fall, whose lines follow one another."""
    return 1 + np.count_nonzero(np.diff(lines) > 1) if lines.size else 0


def _order(*columns: np.ndarray) -> np.ndarray:
    """np.lexsort of numbers from 0 on, several times as fast where they fit into one."""
    sizes = [int(column.max(initial=0)) + 1 for column in columns]
    if math.prod(sizes) >= 1 << 63:
        return np.lexsort(columns)
    key = columns[-1]
    for column, size in zip(columns[-2::-1], sizes[-2::-1], strict=True):
        key = key * size + column
    return np.argsort(key, kind="stable")


_PAGE_BYTES = 4096
_MOST_LINES = 1 << 16  # of accesses that L2 plays at once


class _Asks:
    """What accesses ask of L2, line by line. Accesses of one form that begin at the same sector of a line ask for the same. Where
    no other access touches any of their lines, these lines are always used together, and one line stands for all of those of
    which the same is asked."""

    def __init__(self, play: Play, rows: np.ndarray, alike: np.ndarray):
        which, base = play.which[rows], play.base[rows]
        self.sites = play.sites[rows]
        stores = play.are("store")[rows]
        self.writes = stores | (np.diff(rows, prepend=-1) == 0)  # an atomic that is there for the second time
        keys = ((which * LINE_SECTORS + base % LINE_SECTORS) * 2 + self.writes) * (play.step.size + 1) + alike + 1
        _, first, kind = np.unique(keys, return_index=True, return_inverse=True)
        columns: list[list[np.ndarray]] = [
            [np.zeros(0, dtype=np.int64)],
            *([np.zeros(0, dtype=np.uint32)] for _ in "ab"),
            [np.zeros(0, dtype=np.int64)],
        ]
        sizes = np.zeros((2, first.size), dtype=np.int64)  # of each line by itself, and of those that stand for several
        for number, i in enumerate(first.tolist()):
            form, missing = play.forms[which[i]], play.l1_missed.get(int(alike[i]), slice(None))
            sectors = (form.sectors + base[i] % LINE_SECTORS)[missing]
            filled = form.filled[missing] if stores[i] else np.full(sectors.size, WHOLE)
            lines, asked, filled = by_line(sectors, filled)
            _, one, count = np.unique(asked.astype(np.uint64) << 32 | filled, return_index=True, return_counts=True)
            one, count = one[np.argsort(one)], count[np.argsort(one)]
            sizes[:, number] = lines.size, one.size
            for column, own in zip(columns, (lines, asked, filled, np.ones_like(lines)), strict=True):
                column.append(own)
            for column, own in zip(columns, (lines[one], asked[one], filled[one], count), strict=True):
                column.append(own)
        self._columns = [np.concatenate(column) for column in columns]
        self._first, begins = play.place[rows], np.cumsum(sizes.T).reshape(-1, 2).T - sizes
        self._from, self.sizes = begins[0, kind], sizes[0, kind]
        self._ends = np.cumsum(self.sizes)
        together = self._together(kind, play.lines_in_memory)
        self._from[together], self.sizes[together] = begins[1, kind[together]], sizes[1, kind[together]]

    def _together(self, kind: np.ndarray, lines_in_memory: int) -> np.ndarray:
        """Which accesses share no line with an access of another kind or at another place."""
        _, some, place = np.unique(kind * lines_in_memory + self._first, return_index=True, return_inverse=True)
        different = int(self.sizes[some].sum())
        if 4 * int(kind.max(initial=0)) >= kind.size:  # mostly gathers, whose lines overlap: looking would save no time
            return np.zeros(kind.size, dtype=bool)
        last, apart = np.zeros(lines_in_memory, dtype=np.int32), np.zeros(some.size, dtype=bool)
        parts = np.array_split(np.arange(some.size), min(some.size, -(-different // _MOST_LINES)))
        for look in (False, True):
            for part in parts:
                lines, own = self.lines(some[part])[0], np.repeat(part, self.sizes[some[part]])
                if look:
                    other = last[lines] != own
                    apart[last[lines[other]]] = apart[own[other]] = True
                else:
                    last[lines] = own
        return ~apart[place]

    def parts(self, first: int, last: int) -> Iterator[slice]:
        """The accesses from `first` to `last`, some at a time."""
        while first < last:
            most = (self._ends[first - 1] if first else 0) + _MOST_LINES
            end = min(last, max(first + 1, int(np.searchsorted(self._ends, most, side="right"))))
            yield slice(first, end)
            first = end

    def lines(self, part: slice | np.ndarray) -> list[np.ndarray]:
        """Of these accesses: the lines, the sectors asked for, the bytes that are written and how many lines each stands for, as
        L2.play takes them."""
        sizes = self.sizes[part]
        ends = np.cumsum(sizes)
        at = np.arange(ends[-1]) + np.repeat(self._from[part] - (ends - sizes), sizes)
        lines, *others = (column[at] for column in self._columns)
        return [lines + np.repeat(self._first[part], sizes), *others]


class Play:
    """The programs of a launch, played wave by wave, first through L1, then through L2."""

    def __init__(self, recording: Recording, gpu: Gpu, ways: dict[Site, Way], forms: Forms, programs_per_sm: int):
        self.gpu = gpu
        self.programs, self.sampled = recording.call.programs, recording.call.sampled is not None
        reach = _reach(recording)
        rows = _reconstructed(recording, reach) if self.sampled else _recorded(recording)
        reach = reach[:, forms.tiles[rows.row]]
        start, extent = _packed(rows.start, reach, STORAGE_ALIGNMENT)
        self.sectors_in_memory = extent // SECTOR_BYTES
        self.program, self.step = rows.program, rows.step
        self.forms, which, _ = forms.of(rows.row, start)
        self.which, self.base = which, start // SECTOR_BYTES
        self.sizes = np.array([form.sectors.size for form in self.forms], dtype=np.int64)[which]  # in sectors
        start, extent = _packed(start, reach, _PAGE_BYTES)  # L2 asks of an address only where in a line it is
        self.grid, self.tile, self.start = recording.call.grid, forms.tiles[rows.row], rows.start
        self.place, self.lines_in_memory = start // LINE_BYTES, extent // LINE_BYTES
        self.kinds = [site.kind for site in recording.sites]
        self.tensors = _tensors(recording)
        through_l1 = np.array([s.kind == "load" and ways[s].through_l1 for s in recording.sites], dtype=bool)
        self.sites = forms.sites[rows.row]
        self.through_l1 = through_l1[self.sites]
        self.turn = _turns(self.program, self.step, self.are("store"))
        self.sm = self.program % gpu.sms
        self.spacing = max(1, gpu.sms // _SAMPLED_SMS) if self.sampled else 1
        self.known = len(np.unique(rows.program))
        self.wave = gpu.sms * programs_per_sm
        if self.known < self.programs:  # a window: two waves, or what there is
            self.wave = min(self.wave, max(1, -(-self.known // 2)))
        self.places = places(recording) if self.sampled else {}
        self.used_once = used_once(recording) if self.sampled else set()
        self.waiting = np.zeros((8, len(self.kinds)))  # of loads' instructions, as SiteTraffic has them
        self.late_parts = np.zeros((2, len(self.kinds), LATE_PARTS))  # accesses, and those with late instructions
        self.l1_missed: dict[int, np.ndarray] = {}  # rows that found something in L1 -> which sectors they did not

    def are(self, kind: str) -> np.ndarray:
        """Which rows are of a kind."""
        return np.array([each == kind for each in self.kinds], dtype=bool)[self.sites]

    def sectors(self, i: int) -> np.ndarray:
        """That row i touches."""
        return self.forms[self.which[i]].sectors + self.base[i]

    def l1(self, capacity: int) -> np.ndarray:
        """Of the sectors that each site's loads touch, the share that comes from L2."""
        sm = self.sm
        followed = self.through_l1 & (sm % self.spacing == 0)
        order = _order(self.program, self.step, self.program // self.wave, sm)
        cache, current = L1(self.sectors_in_memory, order.size, capacity), -1
        parts, ended = self._parts(), {}
        read, missed = np.zeros((2, len(self.kinds)))
        for i in order[followed[order]].tolist():
            if sm[i] != current:
                current = sm[i]
                cache.lru.forget()
            form = self.forms[self.which[i]]
            sectors, site = form.sectors + self.base[i], form.site
            beside = cache.beside(sectors)
            missing = cache.read(sectors)
            late, fresh = form.late(missing), form.late(~beside if missing is None else missing & ~beside)
            lines = (sectors if missing is None else sectors[missing]) // LINE_SECTORS
            pieces = _pieces(lines)
            if lines.size:  # what begins where the last one ended is no new piece
                own = self.program[i], site
                pieces -= 0 <= lines[0] - ended.get(own, -2) <= 1
                ended[own] = lines[-1]
            in_late = form.instructions * (late > 0)
            self.waiting[:, site] += form.instructions, form.new, form.new_pairs, late, fresh, pieces, 1, in_late
            self.late_parts[:, site, parts[i]] += 1, late > 0
            read[site] += sectors.size
            missed[site] += sectors.size if missing is None else np.count_nonzero(missing)
            if missing is not None:
                self.l1_missed[i] = missing
        return np.divide(missed, read, out=np.ones_like(read), where=read > 0)

    def _parts(self) -> np.ndarray:
        """In which of LATE_PARTS equal parts of its program's accesses by one site each row is."""
        order = np.lexsort((self.step, self.sites, self.program))
        first = np.flatnonzero(_changes(self.sites[order]) | _changes(self.program[order]))
        counts = np.diff(first, append=order.size)
        parts = np.empty(order.size, dtype=np.int64)
        parts[order] = (np.arange(order.size) - np.repeat(first, counts)) * LATE_PARTS // np.repeat(counts, counts)
        return parts

    def _alike(self) -> np.ndarray:
        """For each row, that of the nearest SM whose L1 was followed: of a program as far on, at the same step, with an
        access of the same form. -1 where there is none."""
        begins = np.flatnonzero(np.diff(self.program, prepend=-1))
        first = np.full(int(self.program.max(initial=-1)) + 1, -1)
        first[self.program[begins]] = begins
        row = first[self.program - self.sm % self.spacing]
        there = np.minimum(row + self.step, self.step.size - 1)
        same = (row >= 0) & (self.step[there] == self.step) & (self.which[there] == self.which) & self.through_l1
        return np.where(same, there, -1)

    def _asked_of_l2(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of rows in their order those that L2 sees, for each the row of the SM whose L1 says what it lacks, or -1, how many
        sectors it asks for, and for how many programs. Where several load the same at the same time, L2 sees one of them. An
        atomic is there twice: it reads, and then it writes."""
        alike = self._alike()[rows] if self.l1_missed else np.full(rows.size, -1)
        missed = np.full(self.step.size, -1)  # how many sectors, where that is known
        missed[[*self.l1_missed]] = [np.count_nonzero(missing) for missing in self.l1_missed.values()]
        alike = np.where((alike >= 0) & (missed[alike] >= 0), alike, -1)
        times = 1 + self.are("atomic")[rows]
        times[(alike >= 0) & (missed[alike] == 0)] = 0
        whole = np.flatnonzero(self.are("load")[rows] & (alike < 0))
        turn = np.cumsum(_changes(self.turn[rows]))
        columns = self.base[rows[whole]], self.which[rows[whole]], turn[whole]
        order = _order(*columns)
        fresh = np.logical_or.reduce([_changes(column[order]) for column in columns])
        times[whole[order[~fresh]]] = 0
        readers = np.ones(rows.size, dtype=np.int64)
        readers[whole[order[fresh]]] = np.diff(np.flatnonzero(fresh), append=fresh.size)
        asked = np.where(alike >= 0, missed[alike], self.sizes[rows])
        return tuple(np.repeat(column, times) for column in (rows, alike, asked, readers))

    def l2(self, capacity: int, touched: np.ndarray) -> _Dram:
        """What passes between L2 and DRAM. Where only the first waves are known, what is `touched` later, of all sectors that each
        site touches, is taken to fare like that in the last of these waves, but for tensors that L2 holds by then (`_later`)."""
        waves = self.program // self.wave
        cache = L2(self.lines_in_memory, 2 * self.step.size, capacity)
        read, halves = np.zeros((2, len(self.kinds)))
        before = (read, 0, 0, 0)  # when the last wave began
        rows, alike, asked, readers = self._asked_of_l2(_order(self.step, self.program, self.turn, waves))
        asks, asked = _Asks(self, rows, alike), np.bincount(self.sites[rows], asked, minlength=read.size)
        wave = -1
        for wave in np.unique(waves).tolist():
            before = (read.copy(), cache.dram_read, cache.dirtied, cache.fills)
            first, last = np.searchsorted(waves[rows], [wave, wave + 1]).tolist()
            for part in asks.parts(first, last):
                who = self.sm[rows[part]], readers[part]
                fetched, in_halves = cache.play(asks.sizes[part], asks.writes[part], *who, *asks.lines(part))
                read += np.bincount(asks.sites[part], fetched, minlength=read.size)
                halves += np.bincount(asks.sites[part], in_halves, minlength=read.size)
        halves = share(halves, read)
        left = cache.finish()
        completed = cache.dram_read - read.sum()
        if self.known == self.programs:
            pieces = cache.pieces, cache.piece_sectors
            read = self._by_integers(read, cache.dirtied, cache.capacity)
            return _Dram(read, halves, np.minimum(1, share(read, asked)), completed, cache.dram_written, left, *pieces)
        in_wave, so_far = (np.bincount(self.sites, self.sizes * of, minlength=read.size) for of in (waves == wave, 1))
        rest = np.maximum(0, touched - so_far)
        stores = np.array([kind != "load" for kind in self.kinds], dtype=bool)
        more, more_stores = rest.sum() / max(1, in_wave.sum()), rest[stores].sum() / max(1, in_wave[stores].sum())
        read_before, all_before, dirtied_before, fills_before = before
        completed += max(0.0, completed - (all_before - read_before.sum())) * more_stores
        dirtied = cache.dirtied + (cache.dirtied - dirtied_before) * more_stores
        in_a_wave, of_sites = cache.fills - fills_before, rest / np.maximum(1, in_wave)
        later = self._later(read, read - read_before, of_sites, in_a_wave, cache.capacity)
        fills = cache.fills + in_a_wave * more - (((read - read_before) * of_sites).sum() - later.sum()) / LINE_SECTORS
        left = dirtied * min(1.0, L2_WAITS * cache.capacity / max(1, fills))
        asked = asked * touched / np.maximum(1, so_far)
        # A line that is not whole when the last known wave ends may be filled soon after.
        part = dirtied / max(1, cache.dirtied) * self._stays_in_pieces(cache.capacity)
        pieces = cache.pieces * part, cache.piece_sectors * part
        read = self._at_least_once(self._by_integers(read + later, dirtied, cache.capacity))
        return _Dram(read, halves, np.minimum(1, share(read, asked)), completed, dirtied - left, left, *pieces)

    def _by_integers(self, read: np.ndarray, written: float, capacity: int) -> np.ndarray:
        """The same sectors that each site reads from DRAM, but where integers in memory say which lines all programs load."""
        loads = [site for site in self.places if self.kinds[site] == "load"]
        if not loads:
            return read
        others = np.delete(read, loads).sum() + written
        found = sectors_read([self.places[site] for site in loads], others / LINE_SECTORS, capacity)
        if found is not None:
            read = read.copy()
            read[loads] = found
        return read

    def _at_least_once(self, read: np.ndarray) -> np.ndarray:
        """The same sectors, but that each byte of a tensor is read if the programs together have all of it, and store nothing there. Where
        they differ in length, those that are worked out from the few that ran lie across one another, and find each other's bytes."""
        read = read.copy()
        for sites, size in self.tensors:
            first = next((site for site in sites if site in self.used_once), None)
            if first is not None and all(self.kinds[site] == "load" for site in sites):
                read[first] += max(0.0, size - read[sites].sum())
        return read

    def _stays_in_pieces(self, capacity: int) -> float:
        """Of what is stored in parts of lines, the share whose rest is not stored before the line has left L2, which holds `capacity`
        lines: what goes by indices, and where the program that stores the rest comes so much later, or none does. Programs whose
        places are no sums over the axes of the grid are taken to come soon."""
        lines = np.array([np.unique(form.sectors // LINE_SECTORS).size for form in self.forms])[self.which]
        of_a_program = lines.sum() / max(1, self.known)
        far = total = 0.0
        for site, kind in enumerate(self.kinds):
            rows = np.flatnonzero(self.sites == site)
            if kind != "store" or not rows.size:
                continue
            number = lines[rows].sum()
            apart = self._programs_until_the_rest(rows)
            total += number
            far += number * (apart * of_a_program > capacity)
        return far / total if total else 0.0

    def _programs_until_the_rest(self, rows: np.ndarray) -> float:
        """After how many programs one stores beside what another has stored, in the line where that ends; 0 where that is not known."""
        if (self.tile[rows] < 0).any():
            return math.inf
        first = rows[np.unique(self.program[rows], return_index=True)[1]]
        by = digit_steps(digit_places(self.grid, self.program[first]), self.start[first])
        if by is None:
            return 0.0
        beside = [axis for axis, step in enumerate(np.abs(by[1:])) if self.grid[axis] > 1 and 0 < step < LINE_BYTES]
        return math.prod(self.grid[: beside[0]]) if beside else math.inf  # programs go along the first axis first

    def _later(self, read: np.ndarray, wave: np.ndarray, more: np.ndarray, fills: int, capacity: int) -> np.ndarray:
        """Sectors that each site reads from DRAM in the waves that are not known, `more` times as many as in the last one, where it
        read `wave` of them and L2 brought in `fills` lines. When all of a tensor has been read, programs come back to what was
        read first. Unless so much was brought in meanwhile that it has left L2, nothing more is read of the tensor."""
        later = wave * more
        for sites, size in self.tensors:
            new, before = wave[sites].sum(), read[sites].sum()
            if new and before + later[sites].sum() > size and fills * size / new <= capacity:
                later[sites] *= max(0.0, size - before) / later[sites].sum()
        return later
