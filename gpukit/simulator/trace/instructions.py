"""How an access travels: as the instructions of its warps, each of which asks for its distinct 32-byte sectors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpukit.simulator.compiler.banks import BANKS, WORD_BYTES
from gpukit.simulator.interpreter.addresses import SECTOR_BYTES, grid_offsets, touched
from gpukit.simulator.trace import coalesce
from gpukit.simulator.trace.coalesce import LANES
from gpukit.simulator.trace.levels import LINE_BYTES, LINE_SECTORS
from gpukit.simulator.trace.recording import Recording, Site

if TYPE_CHECKING:
    from gpukit.simulator.compiler.compile import Compiled

# Of the stores that could meet another one to the same sector on the way, in L1, how many reach L2 alone. When they come
# decides. Those of one warp: 0.2 to 0.7 were measured, 0.35 in the median. Those of neighbouring warps: 0.4 to 0.9, but 0 to
# 0.26 where a barrier after the last load has brought the warps in step. Where each lane of an instruction stores to a sector
# of its own, all do (measured: 67,108,864 of 67,108,864).
ALONE, ALONE_APART, ALONE_IN_STEP = 1 / 3, 2 / 3, 1 / 5
# Clocks that L1 takes to look for a line. On an H200 a warp's 32 words in as many lines, each in a bank of its own, take 9.7
# (steps of 33, 36, 65 words), and 17 or 25 of them 5.7 and 7.8.
LINE_CLOCKS = 0.3
_NOBODY = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Way:
    """How one site moves: the elements of each warp instruction, None for a tile that one instruction moves whole,
    whether its loads ask L1, how many warps there are, and whether they copy to shared memory (cp.async). `by_alignment`: where the line was compiled to instructions of
    several widths, (bytes that a thread moves, the elements of each instruction), the widest first."""

    instructions: np.ndarray | None
    through_l1: bool
    warps: int = 1
    copies: bool = False
    by_alignment: tuple[tuple[int, np.ndarray], ...] = ()

    def of(self, start: int) -> np.ndarray | None:
        """The elements of each instruction of an access that begins at this address: the widest that is aligned there."""
        return next((moved for width, moved in self.by_alignment if start % width == 0), self.instructions)


def ways_of(recording: Recording, compiled: Compiled | None) -> dict[Site, Way]:
    """How each site moves, as compiled or as Triton's compiler does by default."""
    call = recording.call
    seen: dict[Site, set] = {site: set() for site in recording.sites}
    repeats = {site: 0 for site in recording.sites}
    for _, site, tile, start in recording.rows():
        repeats[recording.sites[site]] += 1
        if tile >= 0:
            seen[recording.sites[site]].add((tile, start % 256))
    integers = [v for v in call.arguments.values() if isinstance(v, int) and not isinstance(v, bool)]
    known = {
        site: coalesce.facts(site, [(recording.tiles[t], start) for t, start in tiles], integers)
        for site, tiles in seen.items()
    }
    layouts = coalesce.assumed(known, call.num_warps)
    ran = max(1, len(set(recording.program)))
    found = {}
    for site in recording.sites:
        layout, vector = layouts[site]
        to = "TMA" if site.via == "tma" else "registers"
        # The pipeliner copies what a loop loads for tl.dot into shared memory, from 4 bytes a thread on.
        if site.kind == "load" and recording.dots and repeats[site] > ran and vector * site.width >= 4 and to != "TMA":
            to = "shared memory" if len(site.shape) > 1 and call.options.get("num_stages") != 1 else to
        if compiled is not None:
            layout, vector, to = _compiled_way(site, compiled, (layout, vector, to))
        if to == "TMA":
            found[site] = Way(None, False)
        elif site.lanes == 1:  # a scalar is loaded by every warp and stored by one thread
            warps = call.num_warps if site.kind == "load" else 1
            found[site] = Way(np.zeros((warps, 1), dtype=np.int64), True, warps)
        else:
            copies = to == "shared memory"  # by one thread for each element
            each = site.kind == "load" and not copies
            instructions, warps = _instructions(layout, site.shape, vector, each)
            # A line may load several tensors; of this one a thread moves no more than it holds in a row.
            through_l1 = not copies or instructions.shape[1] // LANES * site.width < 16
            widths = _widths(site, compiled)
            by_alignment = tuple(
                (width, _instructions(layout, site.shape, max(1, width // site.width), each)[0]) for width in widths
            )
            found[site] = Way(instructions, through_l1, warps, copies, by_alignment if len(widths) > 1 else ())
    return found


def _compiled_way(site: Site, compiled: Compiled, otherwise: tuple) -> tuple:
    alike = [a for a in compiled.layouts if (a.kind, a.line, a.shape) == (site.kind, site.line, site.shape)]
    access = next((a for a in alike if site.tensor in a.tensors), next(iter(alike), None))
    if access is None:
        return otherwise
    if access.to == "TMA" or access.layout is None:
        return otherwise[0], otherwise[1], access.to
    bits = [a.bits for a in compiled.accesses if (a.kind, a.line) == (site.kind, site.line) and a.bits]
    vector = max(1, max(bits) // (8 * site.width)) if bits else otherwise[1]
    return access.layout, vector, access.to


def _widths(site: Site, compiled: Compiled | None) -> list[int]:
    """Bytes that a thread moves with the instructions of this line, the most first."""
    accesses = () if compiled is None else compiled.accesses
    return sorted(
        {a.bits // 8 for a in accesses if (a.kind, a.line) == (site.kind, site.line) and a.bits}, reverse=True
    )


@lru_cache(maxsize=256)
def _instructions(layout, shape: tuple[int, ...], vector: int, each: bool) -> tuple[np.ndarray, int]:
    """[instructions, elements]: the flat elements of the block that each warp instruction moves, -1 where none, those of a
    warp one after another; and how many warps there are. `each`: threads that hold what others hold too load it as well, and do
    not store or copy it."""
    try:
        held = layout.elements(shape, redundant=None if each else -1)
    except NotImplementedError:  # a tensor core's layout: taken for rows
        held = coalesce.blocked(shape, vector, tuple(range(len(shape)))[::-1], 4).elements(shape, redundant=-1)
    warps, registers, lanes = held.shape
    vector = min(vector, registers)
    held = held.reshape(warps, registers // vector, vector, lanes).swapaxes(2, 3)
    return held.reshape(warps * (registers // vector), lanes * vector), warps


def alone_among_warps(compiled: Compiled | None) -> float:
    """The share that applies to stores of neighboring warps, by what comes last before the first of them."""
    if compiled is None:
        return ALONE
    last = ""
    for instruction in compiled.instructions:
        name = instruction.opcode.partition(".")[0]
        if name == "STG":
            break
        last = name if name in ("LDG", "BAR") else last
    return ALONE_IN_STEP if last == "BAR" else ALONE_APART


class Form(NamedTuple):
    """What accesses have in common that differ only by whole sectors: their site, the sectors that the warps'
    instructions ask for, of which so many are new to their warp, the distinct ones, as distances from the one where the
    access begins, and the bytes of each. Of a store and an atomic also its lanes; of an atomic the updates of sectors that they
    take and the requests that bring them (contention.py), and whether all lanes change one element. Then the clocks that L1
    takes for the instructions. Of a load how many instructions have a live lane and how many of them ask for sectors that are
    new to their warp, and for pairs of sectors, which DRAM is read in; of each of these sectors the instruction, in order, and the
    place in `sectors`. Of loads and stores `requests` ask L2, each for what one instruction moves of one line; so many `odd` ones
    move some of their `odd_sectors` only in part. Of copies past L1 so many of the sectors that are asked for come for a lane `alone`."""

    site: int
    asked: int
    warps: int
    sectors: np.ndarray
    filled: np.ndarray
    lanes: int = 0
    updates: int = 0
    requests: int = 0
    one_element: bool = False
    clocks: float = 0.0
    instructions: int = 0
    new: int = 0
    new_pairs: int = 0
    new_in: np.ndarray | None = None
    new_sectors: np.ndarray | None = None
    odd: int = 0
    odd_sectors: int = 0
    alone: int = 0

    def late(self, missing: np.ndarray | None) -> int:
        """Of a load's instructions those that bring in, as the first of their warp, something that is `missing` among its
        sectors; None stands for all of them."""
        if missing is None or not self.new:
            return self.new
        return _groups(self.new_in[missing[self.new_sectors]])

    def updated(self, added_up: bool) -> int:
        """Updates of sectors, where the adds of a warp to one element may be `added_up` before."""
        return self.asked if added_up and self.one_element else self.updates

    def requested(self, added_up: bool) -> int:
        """Requests that bring these updates."""
        return self.asked if added_up and self.one_element else self.requests


class Forms:
    """The forms of a recording's accesses, worked out when they are met."""

    def __init__(self, recording: Recording, ways: dict[Site, Way]):
        self.recording, self.ways = recording, ways
        columns = recording.site, recording.tile, recording.start
        self.sites, self.tiles, self.starts = (np.array(c, dtype=np.int64) for c in columns)
        self._known: dict[int, Form] = {}

    def counted(self, rows: np.ndarray, stand_for: np.ndarray | None = None) -> tuple[list[Form], list[float]]:
        """Which forms these rows of the recording have, and how many have each, or how many all of these `stand_for`."""
        forms, which, counts = self.of(rows, self.starts[rows])
        return forms, (counts if stand_for is None else np.bincount(which, stand_for, minlength=len(forms))).tolist()

    def of(self, row: np.ndarray, start: np.ndarray) -> tuple[list[Form], np.ndarray, np.ndarray]:
        """Of rows of the recording moved to addresses `start`: the forms there are, which of them each row has, and how
        many rows have each."""
        low = int(self.tiles.min(initial=0))
        keys = (self.sites * (int(self.tiles.max(initial=0)) - low + 1) + self.tiles - low)[row] * SECTOR_BYTES
        keys += start % SECTOR_BYTES
        keys, first, which, counts = _unique(keys)
        forms = []
        for key, i in zip(keys.tolist(), first.tolist(), strict=True):
            if key not in self._known:
                self._known[key] = self._form(int(row[i]), int(start[i]) % SECTOR_BYTES)
            forms.append(self._known[key])
        return forms, which, counts

    def _form(self, row: int, begin: int) -> Form:
        recording, number, tile = self.recording, int(self.sites[row]), int(self.tiles[row])
        site = recording.sites[number]
        if tile >= 0:
            block = recording.tiles[tile]
            live = np.zeros(block.shape, dtype=bool)
            live[tuple(map(slice, block.low, block.high))] = True
            live = live.reshape(-1)
            offsets = begin + grid_offsets(block.shape, block.strides).reshape(-1)
            sectors = touched(block.moved(begin), site.width, SECTOR_BYTES)
        else:
            lost = recording.irregular[-1 - tile]
            live = np.ones(site.lanes, dtype=bool) if lost.live is None else lost.live.reshape(-1)
            offsets = np.zeros(site.lanes, dtype=np.int64)
            offsets[live] = lost.offsets
            sectors = np.unique(lost.offsets // SECTOR_BYTES)
        elements = np.unique(offsets[live])
        lanes = np.bincount(np.searchsorted(sectors, elements // SECTOR_BYTES), minlength=sectors.size)
        filled = np.minimum(lanes * site.width, SECTOR_BYTES).astype(np.uint8)
        instructions = self.ways[site].of(begin)
        asked = warps = updates = requests = sectors.size
        alone = 0
        clocks = float(-(-sectors.size // LINE_SECTORS))
        moves = instructions is not None and instructions.size
        addresses = elements[None, :]
        if moves:
            way, moved = self.ways[site], (instructions >= 0) & live[instructions]
            addresses = np.where(moved, offsets[instructions], _NOBODY)
            if site.kind == "atomic":
                updates, requests = _updates(addresses, SECTOR_BYTES), _updates(addresses, LINE_BYTES)
            asked_for = np.where(moved, addresses // SECTOR_BYTES, _NOBODY)
            asked, warps = _distinct(asked_for), _distinct(asked_for.reshape(way.warps, -1))
            if not way.copies:
                clocks = _clocks(addresses, site.width)
            elif way.through_l1:
                of_lanes = addresses.reshape(len(addresses), LANES, -1)
                clocks = _clocks(of_lanes.min(axis=2), of_lanes.shape[2] * site.width, copies=True)
            else:
                together, alone = _past_l1(addresses)
                asked, clocks = together + alone, together / 4 + alone / 8  # 128 bytes in a clock
        odd = odd_sectors = 0
        if site.kind != "atomic":
            requests, odd, odd_sectors = _requests(addresses, site.width)
        count = int(np.count_nonzero(live)) if site.kind != "load" else 0
        running = new = new_pairs = 0
        new_in = new_sectors = None
        if site.kind == "load" and moves:
            running = int(np.count_nonzero(moved.any(axis=1)))
            new_in, new_sectors = _new_to_their_warp(asked_for, self.ways[site].warps, sectors)
            of_pairs, _ = _new_to_their_warp(
                np.where(moved, asked_for // 2, _NOBODY), self.ways[site].warps, np.unique(sectors // 2)
            )
            new, new_pairs = _groups(new_in), _groups(of_pairs)
        return Form(
            number, asked, warps, sectors, filled, count, updates, requests, tile >= 0 and elements.size == 1, clocks,
            running, new, new_pairs, new_in, new_sectors, odd, odd_sectors, alone,
        )  # fmt: skip


def _unique(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """np.unique of numbers from 0 on with all that it returns, several times as fast where there are few different ones."""
    if int(numbers.max(initial=0)) > numbers.size:
        return np.unique(numbers, return_index=True, return_inverse=True, return_counts=True)
    counts = np.bincount(numbers)
    there = np.flatnonzero(counts)
    first = np.zeros(counts.size, dtype=np.int64)
    first[numbers[::-1]] = np.arange(numbers.size)[::-1]  # of those that go to one place the last stays
    return there, first[there], (np.cumsum(counts > 0) - 1)[numbers], counts[there]


def _distinct(rows: np.ndarray) -> int:
    """Distinct values in each row, summed; _NOBODY is none."""
    rows = np.sort(rows, axis=1)
    fresh = (rows[:, 1:] != rows[:, :-1]) & (rows[:, 1:] != _NOBODY)
    return int(np.count_nonzero(rows[:, 0] != _NOBODY) + np.count_nonzero(fresh))


def _groups(rising: np.ndarray) -> int:
    """How many different numbers there are among these, of which none is less than the one before."""
    return int(np.count_nonzero(rising[1:] != rising[:-1])) + min(1, rising.size)


def _new_to_their_warp(rows: np.ndarray, warps: int, sectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the sectors that each instruction asks for, those for which no instruction of its warp has asked before: the numbers
    of the instructions, in order, and the places in `sectors`; _NOBODY is none."""
    own = rows.reshape(warps, -1)
    live = np.flatnonzero(own != _NOBODY)
    place = np.searchsorted(sectors, own.reshape(-1)[live])
    _, first = np.unique(live // own.shape[1] * sectors.size + place, return_index=True)
    first = np.sort(first)
    return live[first] // rows.shape[1], place[first]


def _sorted(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows and the values of what is not _NOBODY, row by row, sorted."""
    rows = np.sort(rows, axis=1)
    row, lane = np.nonzero(rows != _NOBODY)
    return row, rows[row, lane]


def _past_l1(rows: np.ndarray) -> tuple[int, int]:
    """Sectors that copies of 16 bytes a lane move from L2, the instruction of each row of addresses: those that two neighboring
    lanes move together, half of it each, and those that a lane moves alone, even if several lanes copy the same."""
    lanes = rows.reshape(len(rows), LANES, -1).min(axis=2).reshape(len(rows), -1, 2)
    live = lanes != _NOBODY
    sectors = lanes // SECTOR_BYTES
    pairs = live.all(axis=2) & (sectors[..., 0] == sectors[..., 1]) & (lanes[..., 0] != lanes[..., 1])
    together = int(np.count_nonzero(pairs))
    own = int(np.count_nonzero(live)) - 2 * together
    return together, own


# A copy to shared memory of less than 16 bytes a lane is filled into L1 and stored from there. On an H200 it takes so many clocks
# more than it takes L1 to find the words, and each lane takes its own, even if several copy the same.
COPY_CLOCKS = 1.5


def _clocks(rows: np.ndarray, width: int, copies: bool = False) -> float:
    """Clocks in which L1 finds and moves what the instruction of each row asks for, one row after another: elements of `width`
    bytes at these addresses; _NOBODY is none. L1 is the same memory as shared memory, whose 32 banks give a word of four
    bytes each in a clock. Of 16 bytes to a lane it moves those of 8 lanes at a time, and of 8 bytes those of 16: what lanes of
    two such groups have in common it moves twice."""
    groups = max(1, rows.shape[1] // LANES * width // WORD_BYTES)
    lines = np.zeros(len(rows))
    row, address = _sorted(rows)
    if not row.size:
        return 0.0
    np.add.at(lines, np.unique(np.stack([row, address // LINE_BYTES]), axis=1)[0], 1)
    row, address = _sorted(rows.reshape(len(rows) * groups, -1))
    words = address[:, None] // WORD_BYTES + np.arange(max(1, width // WORD_BYTES))
    first = int(words.min()) // BANKS * BANKS
    span = -(-(int(words.max()) - first + 1) // BANKS) * BANKS
    distinct = row[:, None] * span + words - first
    distinct = distinct.reshape(-1) if copies else np.unique(distinct)
    banks = distinct // span * BANKS + distinct % BANKS
    lanes = (
        np.bincount(banks, minlength=len(rows) * groups * BANKS)
        .reshape(len(rows), groups, BANKS)
        .max(axis=2)
        .sum(axis=1)
    )
    clocks = np.maximum(lanes, LINE_CLOCKS * lines)
    return float(clocks.sum()) + (COPY_CLOCKS * np.count_nonzero(clocks) if copies else 0.0)


def _requests(rows: np.ndarray, width: int) -> tuple[int, int, int]:
    """Of instructions that move elements of `width` bytes at the addresses of each row: for how many lines, in how many of these a
    sector is moved only in part, and how many sectors those lines have. _NOBODY is none."""
    row, address = _sorted(rows)
    if not row.size:
        return 0, 0, 0
    fresh = (np.diff(row, prepend=-1) != 0) | (np.diff(address, prepend=-1) != 0)
    sector = address[fresh] // SECTOR_BYTES
    begins = np.flatnonzero((np.diff(row[fresh], prepend=-1) != 0) | (np.diff(sector, prepend=-1) != 0))
    filled = np.diff([*begins, sector.size]) * width
    row, line = row[fresh][begins], sector[begins] // LINE_SECTORS
    firsts = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(line, prepend=-1) != 0))
    odd = np.logical_or.reduceat(filled < SECTOR_BYTES, firsts)
    return firsts.size, int(np.count_nonzero(odd)), int(np.diff([*firsts, line.size])[odd].sum())


def _updates(rows: np.ndarray, unit: int) -> int:
    """Of each row and each `unit` bytes the lanes on the element that most of its lanes name, summed; _NOBODY is none."""
    row, offset = _sorted(rows)
    if not row.size:
        return 0
    begins = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(offset, prepend=-1) != 0))
    times = np.diff([*begins, row.size])  # of an element, in its row
    place, row = offset[begins] // unit, row[begins]
    of_places = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(place, prepend=-1) != 0))
    return int(np.maximum.reduceat(times, of_places).sum())
