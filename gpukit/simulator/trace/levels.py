"""The two levels of cache: what each holds, and which line it gives up. Both give up the one that was used longest ago."""

from __future__ import annotations

import statistics
from functools import lru_cache

import numpy as np

from gpukit.simulator.interpreter.addresses import SECTOR_BYTES

LINE_SECTORS = 4
LINE_BYTES = LINE_SECTORS * SECTOR_BYTES
FETCH_SECTORS = 2  # what one read of DRAM brings
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


def _distinct(units: np.ndarray) -> np.ndarray:
    """Each of the sorted numbers once."""
    fresh = np.ones(units.size, dtype=bool)
    np.not_equal(units[1:], units[:-1], out=fresh[1:])
    return units[fresh]


class Lru:
    """How recently each unit of a cache (sector of L1, line of L2) was used, the same for the units of one access. Exact:
    `latest` holds how many units were used last by each access, and what lies behind `horizon` is older than `capacity`
    other units."""

    def __init__(self, units: int, accesses: int, capacity: int):
        self.stamp = np.zeros(units, dtype=np.int32)  # memory that is never touched is never taken
        self.latest = np.zeros(accesses + 1, dtype=np.int64)
        self.capacity = max(1, capacity)
        self.now = self.horizon = self.inside = 0

    def within(self, units: np.ndarray) -> np.ndarray:
        """Which of them are younger than the horizon."""
        return self.stamp[_run(units)] > self.horizon

    def ages(self, units: np.ndarray) -> np.ndarray:
        """How many other units were used since each of these, which are within."""
        since = np.cumsum(self.latest[self.now : self.horizon : -1])
        return since[self.now - self.stamp[units]] - self.latest[self.stamp[units]]

    def use(self, units: np.ndarray) -> None:
        at = _run(units)
        before = self.stamp[at]
        before = before[before > self.horizon]
        np.subtract.at(self.latest, before, 1)
        self.now += 1
        self.latest[self.now] = units.size
        self.stamp[at] = self.now
        self.inside += units.size - before.size
        while self.inside > self.capacity:
            self.horizon += 1
            self.inside -= int(self.latest[self.horizon])

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
        self.ages = _l1_ages(capacity_bytes // SECTOR_BYTES)
        self.lru = Lru(sectors, accesses, int(self.ages.max()))

    def read(self, sectors: np.ndarray) -> np.ndarray | None:
        """Which of the sectors were missing; None if all were."""
        hit = self.lru.within(sectors)
        if hit.any():
            inside = sectors[hit]
            kind = (inside // LINE_SECTORS * 0x9E3779B1 & 0xFFFFFFFF) >> 22  # neighbours are of different kinds
            hit[hit] = self.lru.ages(inside) < self.ages[kind]
        self.lru.use(sectors)
        return ~hit if hit.any() else None


class L2:
    """The one L2: lines of four sectors, of each of which some bytes are there. All counts are in sectors.

    dram_read, dram_written   what it read from DRAM and wrote there
    dirtied                   what was written and was not waiting to be written back already
    fills                     lines that were brought in; `uses` those that were used
    """

    def __init__(self, sectors: int, accesses: int, capacity_bytes: int):
        lines = -(-sectors // LINE_SECTORS)
        whole = capacity_bytes // (SECTOR_BYTES * LINE_SECTORS)
        self.lru, self.patience = Lru(lines, accesses, int(whole * L2_HOLDS)), int(whole * L2_PARTS)
        self.held = np.zeros(lines * LINE_SECTORS, dtype=np.uint8)  # bytes of each sector that are here
        self.dirty = np.zeros(lines * LINE_SECTORS, dtype=bool)
        self.since = np.zeros(lines * LINE_SECTORS, dtype=np.int32)  # in uses: when it was first written
        self.uses = self.fills = self.dram_read = self.dram_written = self.dirtied = 0

    def _touch(self, sectors: np.ndarray) -> None:
        """Make room for these sectors, and complete those that were written in part long ago."""
        lines = _distinct(sectors // LINE_SECTORS)
        fresh = lines[~self.lru.within(lines)]
        if fresh.size:
            gone = (fresh[:, None] * LINE_SECTORS + np.arange(LINE_SECTORS)).reshape(-1)
            self._write_back(gone[self.dirty[gone]])
            self.held[gone] = 0
        if fresh.size < lines.size:
            waiting = sectors[self.dirty[_run(sectors)]]
            self._write_back(waiting[self._late(waiting)])
        self.lru.use(lines)
        self.uses += lines.size
        self.fills += fresh.size

    def _late(self, dirty: np.ndarray) -> np.ndarray:
        return (self.held[dirty] < SECTOR_BYTES) & (self.uses - self.since[dirty] > self.patience)

    def _write_back(self, dirty: np.ndarray) -> None:
        """Write these sectors to DRAM, their rest read from there before."""
        self.dram_written += dirty.size
        self.dram_read += int(np.count_nonzero(self.held[dirty] < SECTOR_BYTES))
        self.held[dirty] = SECTOR_BYTES
        self.dirty[dirty] = False

    def read(self, sectors: np.ndarray) -> int:
        """Sectors that had to come from DRAM: a pair at a time, less what is here whole."""
        self._touch(sectors)
        missing = sectors[self.held[_run(sectors)] < SECTOR_BYTES]
        if not missing.size:
            return 0
        pairs = _distinct(missing // FETCH_SECTORS)
        every = (pairs[:, None] * FETCH_SECTORS + np.arange(FETCH_SECTORS)).reshape(-1)
        every = every[self.held[_run(every)] < SECTOR_BYTES]
        self.held[_run(every)] = SECTOR_BYTES
        self.dram_read += every.size
        return every.size

    def write(self, sectors: np.ndarray, filled: np.ndarray) -> None:
        """Store to these sectors, `filled` bytes of each."""
        self._touch(sectors)
        at = _run(sectors)
        self.held[at] = np.minimum(self.held[at] + filled, SECTOR_BYTES)
        first = sectors[~self.dirty[at]]
        self.dirtied += first.size
        at = _run(first)
        self.since[at] = self.uses
        self.dirty[at] = True

    def finish(self) -> int:
        """Write back what is no longer held, and what was written in part long ago; the dirty sectors that stay."""
        dirty = np.flatnonzero(self.dirty)
        gone = ~self.lru.within(dirty // LINE_SECTORS) | self._late(dirty)
        self._write_back(dirty[gone])
        return dirty.size - int(np.count_nonzero(gone))
