"""The two levels of cache: what each holds, and which line it gives up. Both give up the one that was used longest ago."""

from __future__ import annotations

import statistics
from functools import lru_cache

import numpy as np

from gpukit.simulator.interpreter.addresses import SECTOR_BYTES

LINE_SECTORS = 4
LINE_BYTES = LINE_SECTORS * SECTOR_BYTES
# An address has so many places in L1 to be in. What else wants them is chance, so a line lasts a quarter of L1's size more
# or less: two passes over 128 KiB miss 2.5% of an L1 of 248 KiB, over 256 KiB some 58%.
L1_PLACES = 16
# How much of its size L2 holds of what lies between two uses: of 60 MiB, two passes over 32 MiB miss 1%, over 48 MiB 63%
# and over 64 MiB all. It has two halves, and what the other one's SMs read is in both.
L2_HOLDS = 0.72
# When so much of L2 was filled since a sector was written in part, its rest is read from DRAM, and it is written there.
L2_PARTS = 0.11


def _run(units: np.ndarray) -> slice | np.ndarray:
    """Sorted numbers as an index: a slice where they follow one another, which NumPy is several times as fast with."""
    if units.size and int(units[-1]) - int(units[0]) == units.size - 1:
        return slice(int(units[0]), int(units[-1]) + 1)
    return units


class Lru:
    """How recently each unit of a cache (sector of L1, line of L2) was used, the same for the units of one access. Exact:
    `latest` holds how many units were used last by each access, and what lies behind `horizon` is older than `capacity`
    other units. A unit may stand for several, `weights`, that are always used together."""

    def __init__(self, units: int, accesses: int, capacity: int):
        self.stamp = np.zeros(units, dtype=np.int32)  # memory that is never touched is never taken
        self.latest = np.zeros(accesses + 1, dtype=np.int64)
        self._place = np.zeros(units, dtype=np.int32)
        self.capacity = max(1, capacity)
        self.now = self.horizon = self.inside = 0

    def within(self, units: np.ndarray) -> np.ndarray:
        """Which of them are younger than the horizon."""
        return self.stamp[_run(units)] > self.horizon

    def ages(self, units: np.ndarray) -> np.ndarray:
        """How many other units were used since each of these, which are within."""
        since = np.cumsum(self.latest[self.now : self.horizon : -1])
        return since[self.now - self.stamp[units]] - self.latest[self.stamp[units]]

    def use(self, units: np.ndarray, weights: np.ndarray | None = None) -> None:
        at = _run(units)
        before = self.stamp[at]
        found = before > self.horizon
        before = before[found]
        total, again = units.size, before.size
        if weights is None:
            np.subtract.at(self.latest, before, 1)
        else:
            np.subtract.at(self.latest, before, weights[found])
            total, again = int(weights.sum()), int(weights[found].sum())
        self.now += 1
        self.latest[self.now] = total
        self.stamp[at] = self.now
        self.inside += total - again
        while self.inside > self.capacity:
            self.horizon += 1
            self.inside -= int(self.latest[self.horizon])

    def use_all(
        self, units: np.ndarray, sizes: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray | slice]] | None:
        """Several accesses one after another, of `sizes` units each. Returns which units each finds `within`, and the places in
        `units` where a unit is used for the first time in here, for the second, and so on. None, and nothing is used, where
        one access decides what another finds: that takes fewer of them. One alone is always answered."""
        if sizes.size == 1:
            within = self.stamp[units] > self.horizon
            self.use(units, weights)
            return within, [slice(None)]
        total = int(weights.sum())
        if total > self.capacity:
            return None
        number = np.repeat(np.arange(self.now + 1, self.now + 1 + sizes.size), sizes)
        before = self.stamp[units].astype(np.int64)
        at = np.arange(units.size)
        self._place[units] = at
        meetings = [slice(None)]
        if (self._place[units] != at).any():  # some are used more than once
            order = np.argsort(units, kind="stable")
            again = np.flatnonzero(np.diff(units[order]) == 0) + 1
            before[order[again]] = number[order[again - 1]]
            firsts = np.ones(units.size, dtype=bool)
            firsts[again] = False
            which = at - np.maximum.accumulate(np.where(firsts, at, 0))
            meetings = [order[which == n] for n in range(int(which.max()) + 1)]
        # Up to where the horizon goes at most: if nothing were found.
        needed = self.inside + total - self.capacity
        left = np.cumsum(self.latest[self.horizon + 1 : self.now + 1]) if needed > 0 else np.zeros(0, dtype=np.int64)
        furthest = self.horizon + 1 + int(np.searchsorted(left, needed)) if needed > 0 else self.horizon
        within = before > self.horizon
        if (before[within] <= furthest).any():
            return None
        found_weights = weights[within]
        found = int(found_weights.sum())
        self.latest[self.now + 1 : self.now + 1 + sizes.size] = np.add.reduceat(weights, np.cumsum(sizes) - sizes)
        self.now += sizes.size
        recent = self.latest[self.horizon : self.now + 1]
        recent -= np.bincount(before[within] - self.horizon, found_weights, minlength=recent.size).astype(np.int64)
        for met in meetings:
            self.stamp[units[met]] = number[met]
        self.inside += total - found
        if self.inside > self.capacity:
            steps = int(np.searchsorted(left, self.inside - self.capacity)) + 1
            self.horizon, self.inside = self.horizon + steps, self.inside - int(left[steps - 1])
        return within, meetings

    def forget(self) -> None:
        self.horizon, self.inside = self.now, 0


@lru_cache(maxsize=8)
def _l1_ages(sectors: int) -> np.ndarray:
    """The ages at which 1,024 kinds of line are given up: the quantiles of a normal distribution."""
    spread = statistics.NormalDist(sectors, sectors / L1_PLACES**0.5)
    return np.array([spread.inv_cdf((i + 0.5) / 1024) for i in range(1024)])


class L1:
    """The L1 of one SM after another."""

    def __init__(self, sectors: int, accesses: int, capacity_bytes: int):
        self.ages = _l1_ages(max(1, capacity_bytes // SECTOR_BYTES))
        self.lru = Lru(sectors + sectors % 2, accesses, int(self.ages.max()))

    def beside(self, sectors: np.ndarray) -> np.ndarray:
        """Of which of the sectors the other one of their pair is there."""
        others = sectors ^ 1
        return self._young(others, self.lru.stamp[others] > self.lru.horizon)

    def read(self, sectors: np.ndarray) -> np.ndarray | None:
        """Which of the sectors were missing; None if all were."""
        hit = self._young(sectors, self.lru.within(sectors))
        self.lru.use(sectors)
        return ~hit if hit.any() else None

    def _young(self, sectors: np.ndarray, within: np.ndarray) -> np.ndarray:
        """Which of the sectors are there, of those `within` the horizon."""
        if within.any():
            inside = sectors[within]
            kind = (inside // LINE_SECTORS * 0x9E3779B1 & 0xFFFFFFFF) >> 22  # neighbours are of different kinds
            within[within] = self.lru.ages(inside) < self.ages[kind]
        return within


def by_line(sectors: np.ndarray, filled: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorted sectors as the lines they are in. A line's four sectors are the four bytes of a uint32: of each line, SECTOR_BYTES
    in the bytes of the sectors that are asked for, and the bytes `filled` of each (0 to SECTOR_BYTES, uint8)."""
    lines = sectors // LINE_SECTORS
    first = np.flatnonzero(np.diff(lines, prepend=lines[0] - 1))
    place = (sectors % LINE_SECTORS * 8).astype(np.uint32)
    asked = np.add.reduceat(_SECTOR << place, first, dtype=np.uint32)
    if filled is None:
        return lines[first], asked, np.zeros_like(asked)
    return lines[first], asked, np.add.reduceat(filled.astype(np.uint32) << place, first, dtype=np.uint32)


_SECTOR = np.uint32(SECTOR_BYTES)
_WHOLE = np.uint32(SECTOR_BYTES * 0x01010101)  # a line whose sectors are all there, or all asked for
_EVEN = np.uint32(SECTOR_BYTES * 0x00010001)  # the first sectors of its pairs, which one read of DRAM brings
_SHIFT = SECTOR_BYTES.bit_length() - 1


def _bytes(sectors: np.ndarray) -> np.ndarray:
    """All bits of each of these sectors, given as SECTOR_BYTES in its byte."""
    return (sectors >> _SHIFT) * np.uint32(0xFF)


def _count(sectors: np.ndarray, weights: np.ndarray) -> int:
    return int(np.bitwise_count(sectors) @ weights)


class L2:
    """The one L2: lines of four sectors, of each of which some bytes are there. All counts are in sectors.

    dram_read, dram_written   what it read from DRAM and wrote there
    dirtied                   what was written and was not waiting to be written back already
    fills                     lines that were brought in; `uses` those that were used
    pieces, piece_sectors     of lines that were not whole: how often some were written back, and how many sectors that were
    """

    def __init__(self, lines: int, accesses: int, capacity_bytes: int):
        whole = capacity_bytes // LINE_BYTES
        self.lru, self.patience = Lru(lines, accesses, int(whole * L2_HOLDS)), int(whole * L2_PARTS)
        # As by_line has them: bytes of each sector that are here, and SECTOR_BYTES where some are not in DRAM yet.
        self.held = np.zeros(lines, dtype=np.uint32)
        self.dirty = np.zeros(lines, dtype=np.uint32)
        self.since = np.zeros((lines, LINE_SECTORS), dtype=np.int32)  # in uses: when it was first written
        self.weights = np.zeros(lines, dtype=np.int64)  # how many lines each stands for, of those that were used
        self.uses = self.fills = self.dram_read = self.dram_written = self.dirtied = 0
        self.pieces = self.piece_sectors = 0

    def read(self, sectors: np.ndarray) -> int:
        """Sectors that had to come from DRAM: a pair at a time, less what is here whole."""
        return int(self._one(False, *by_line(sectors))[0, 0])

    def write(self, sectors: np.ndarray, filled: np.ndarray) -> None:
        """Store to these sectors, `filled` bytes of each."""
        self._one(True, *by_line(sectors, filled))

    def _one(self, writes: bool, lines: np.ndarray, asked: np.ndarray, filled: np.ndarray) -> np.ndarray:
        return self.play(np.array([lines.size]), np.array([writes]), lines, asked, filled, np.ones_like(lines))

    def play(
        self,
        sizes: np.ndarray,
        writes: np.ndarray,
        lines: np.ndarray,
        asked: np.ndarray,
        filled: np.ndarray,
        weights: np.ndarray,
    ) -> np.ndarray:
        """Accesses one after another: the first asks for the first `sizes[0]` of `lines`, and so on, one at least; `writes` says
        which are stores. Each line stands for so many, `weights`, that all accesses have in common and use alike. Returns for
        each access how many sectors had to come from DRAM, and how many of these came as one half of a line without the other.

        What happens to a line depends on the accesses to it alone, once it is known which of these find it here. So all lines
        go at a time: first as they are met for the first time, then those met a second time, and so on.
        """
        found = self.lru.use_all(lines, sizes, weights)
        if found is None:  # the first ones must be looked at before the others
            half = sizes.size // 2
            at = int(sizes[:half].sum())
            return np.concatenate(
                [
                    self.play(sizes[:half], writes[:half], lines[:at], asked[:at], filled[:at], weights[:at]),
                    self.play(sizes[half:], writes[half:], lines[at:], asked[at:], filled[at:], weights[at:]),
                ],
                axis=1,
            )
        within, meetings = found
        begins = np.cumsum(sizes) - sizes
        used = np.add.reduceat(weights, begins)
        uses, writing = self.uses + np.cumsum(used), np.repeat(writes, sizes)
        self.uses = int(uses[-1])
        self.fills += int(weights[~within].sum())
        columns = within, np.repeat(uses - used, sizes), np.repeat(uses, sizes), np.where(writing, np.uint32(0), asked)
        columns = lines, *columns, np.where(writing, asked, np.uint32(0)), filled
        self.weights[lines] = weights
        fetched = np.zeros(lines.size, dtype=np.uint8)
        for met in meetings:
            fetched[met] = self._meet(*(column[met] for column in columns))
        halves = fetched * (fetched <= LINE_SECTORS // 2)
        return np.add.reduceat(np.stack([fetched, halves]) * weights, begins, axis=1)

    def _meet(self, lines, within, before, after, read, written, filled) -> np.ndarray:
        """Different lines, each met by one access: whether L2 has it, the uses before and after this access, the sectors that
        it reads and those it writes. Returns how many sectors of each had to be read for it."""
        held, dirty, weights = self.held[lines], self.dirty[lines], self.weights[lines]
        # Of a line that is brought in, what was written before has left.
        gone = np.where(within, np.uint32(0), dirty)
        if gone.any():
            self._write_back(gone, held, weights)
            dirty ^= gone
        held[~within] = 0
        # What was written in part long ago is completed.
        waiting = dirty & (read | written) & ~held
        if waiting.any():
            late = self._late(waiting, lines, before)
            self._write_back(late, held, weights)
            dirty ^= late
            held = held & ~_bytes(late) | late
        missing = read & ~held
        pairs = missing | (missing & _EVEN) << np.uint32(8) | missing >> np.uint32(8) & _EVEN
        fetched = pairs & ~held & _WHOLE
        self.dram_read += _count(fetched, weights)
        held = held & ~_bytes(fetched) | fetched
        if written.any():
            total = held + filled
            full = (total | total >> np.uint32(1)) & _WHOLE  # 32 to 64 bytes
            held = full | total & ~_bytes(full)
            first = written & ~dirty
            self.dirtied += _count(first, weights)
            dirty |= first
            waiting = first & ~held
            for sector in range(LINE_SECTORS):
                here = np.flatnonzero(waiting >> np.uint32(8 * sector) & _SECTOR)
                self.since[lines[here], sector] = after[here]
        self.held[lines], self.dirty[lines] = held, dirty
        return np.bitwise_count(fetched)

    def _late(self, waiting: np.ndarray, lines: np.ndarray, uses: np.ndarray | int) -> np.ndarray:
        """Of sectors that were written in part, those of which that was long ago."""
        late = np.zeros_like(waiting)
        some = np.flatnonzero(waiting)
        long_ago = (uses[some] if isinstance(uses, np.ndarray) else uses) - self.since[lines[some]].T > self.patience
        for sector, ago in enumerate(long_ago):
            late[some] |= waiting[some] & ago.astype(np.uint32) << np.uint32(8 * sector + _SHIFT)
        return late

    def _write_back(self, sectors: np.ndarray, held: np.ndarray, weights: np.ndarray) -> None:
        """Write these sectors to DRAM, their rest read from there before."""
        self.dram_written += _count(sectors, weights)
        self.dram_read += _count(sectors & ~held, weights)
        self._in_pieces(sectors, weights)

    def _in_pieces(self, sectors: np.ndarray, weights: np.ndarray) -> None:
        part = (sectors != 0) & (sectors != _WHOLE)
        self.pieces += int(weights[part].sum())
        self.piece_sectors += _count(sectors[part], weights[part])

    def finish(self) -> int:
        """Write back what is no longer held, and what was written in part long ago; the dirty sectors that stay, whose pieces are
        counted too."""
        lines = np.flatnonzero(self.dirty)
        dirty, held, weights = self.dirty[lines], self.held[lines], self.weights[lines]
        gone = np.where(self.lru.within(lines), self._late(dirty & ~held, lines, self.uses), dirty)
        self._write_back(gone, held, weights)
        self.held[lines], self.dirty[lines] = held & ~_bytes(gone) | gone, dirty ^ gone
        self._in_pieces(dirty ^ gone, weights)
        return _count(dirty ^ gone, weights)
