"""The two levels of cache: what each holds, and which line it gives up."""

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
# L2 has two halves. A line is in the half that its address belongs to, and also in the other one once an SM there has read it: one that
# was read once takes the room of 1.5 lines in the mean, and L2 holds so much of its size of such lines. The next two are in parts of
# that. All are measured on an H200 of 60 MiB (gpukit/results/h200/l2_again.csv) by passes over the same bytes. An SM that reads its own
# bytes again, which are in its half by then, misses 1% of 40 MiB, 15% of 48 MiB and 87% of 56 MiB; 5, 57 and 96% of 32, 48 and 56 MiB are
# missed where another SM reads them in each pass, and 9, 69 and 99% of 32, 40 and 48 MiB where two SMs read each byte.
L2_HOLDS = 0.72
# A line lasts so much more or less (the standard deviation): what else wants its places is chance.
L2_SPREAD = 0.18
# What was stored is written to DRAM long before its line leaves, when so much of what L2 holds was used since. Of passes that store all of 28,
# 34 and 40 MiB again, 14, 50 and 81% were written between two passes.
L2_WAITS = 0.53
# When so much of L2 was filled since a sector was written in part, its rest is read from DRAM, and it is written there.
L2_PARTS = 0.11


def _run(units: np.ndarray) -> slice | np.ndarray:
    """Sorted numbers as an index: a slice where they follow one another, which NumPy is several times as fast with."""
    if units.size and int(units[-1]) - int(units[0]) == units.size - 1:
        return slice(int(units[0]), int(units[-1]) + 1)
    return units


class Lru:
    """How recently each sector of L1 was used, the same for those of one access. Exact: `latest` holds how many units were
    used last by each access, and what lies behind `horizon` is older than `capacity` other units."""

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


class _Recency:
    """How much room of L2 was used since each line was: `latest` holds how much was used last by each access, and the accesses up to
    `horizons` lie behind as much as each of the `limits`."""

    def __init__(self, lines: int, accesses: int, limits: np.ndarray):
        self.stamp = np.zeros(lines, dtype=np.int32)
        self.room = np.zeros(lines, dtype=np.int64)
        self.latest = np.zeros(accesses + 1, dtype=np.int64)
        self.limits, self.horizons, self.now = limits.astype(np.int64), np.zeros(limits.size, dtype=np.int64), 0

    def after(self, more: int) -> np.ndarray:
        """The horizons when so much more room will have been used."""
        since = np.cumsum(self.latest[self.now : self.horizons.min() : -1])
        found = self.now - np.searchsorted(since, self.limits - more, side="right")
        return np.maximum(self.horizons, found)

    def use(self, lines: np.ndarray, before: np.ndarray, number: np.ndarray, room: np.ndarray) -> None:
        """Different lines, used `before` by these accesses and now by those of this number, take so much room."""
        np.subtract.at(self.latest, before, self.room[lines])
        np.add.at(self.latest, number, room)
        self.stamp[lines], self.room[lines] = number, room


# Room in twelfths of what a line takes that was read once, of 1.5 lines: a line in one half, in both, and one in one half that an
# SM of any half reads long after the last time, and finds there or in the other half, from where it comes to both.
_READ_ONCE, _ONE_HALF, _BOTH_HALVES, _ANY_HALF = 12, 8, 16, 10
_SOON = 0.25  # of what L2 holds: uses that lie no further apart find a line in both halves if SMs of both have read it
_KINDS = 16  # of lines, that last for different times
_AT_ONCE = 1 / 8  # of what L2 holds, the most that is played at once: the horizons change evenly meanwhile


def _kind(lines: np.ndarray) -> np.ndarray:
    """Neighbors are of different kinds."""
    return (lines * 0x9E3779B1 & 0xFFFFFFFF) * _KINDS >> 32


class L2:
    """The one L2: lines of four sectors, of each of which some bytes are there. All counts are in sectors.

    dram_read, dram_written   what it read from DRAM and wrote there
    dirtied                   what was written and was not waiting to be written back already
    fills                     lines that were brought in; `uses` those that were used
    pieces, piece_sectors     of lines that were not whole: how often some were written back, and how many sectors that were
    """

    def __init__(self, lines: int, accesses: int, capacity_bytes: int):
        whole = capacity_bytes // LINE_BYTES
        self.capacity = int(whole * L2_HOLDS)  # in lines that were read once
        self.patience = int(whole * L2_PARTS)  # in uses
        spread = statistics.NormalDist(1.0, L2_SPREAD)
        kinds = np.array([spread.inv_cdf((i + 0.5) / _KINDS) for i in range(_KINDS)])
        limits = np.array([*kinds, *(L2_WAITS * kinds), _SOON])
        self.used = _Recency(lines, accesses, limits * self.capacity * _READ_ONCE)
        # As by_line has them: bytes of each sector that are here, and SECTOR_BYTES where some are not in DRAM yet.
        self.held = np.zeros(lines, dtype=np.uint32)
        self.dirty = np.zeros(lines, dtype=np.uint32)
        self.since = np.zeros((lines, LINE_SECTORS), dtype=np.int32)  # in uses: when it was first written
        self.weights = np.zeros(lines, dtype=np.int64)  # how many lines each stands for, of those that were used
        self.reader = np.full(lines, -1, dtype=np.int32)  # the SM that read it last
        self._place = np.zeros(lines, dtype=np.int32)
        self.uses = self.dram_read = self.dram_written = self.dirtied = 0
        self.fills = 0.0
        self.pieces = self.piece_sectors = 0

    def read(self, sectors: np.ndarray) -> int:
        """Sectors that had to come from DRAM: a pair at a time, less what is here whole."""
        return int(self._one(False, *by_line(sectors))[0, 0])

    def write(self, sectors: np.ndarray, filled: np.ndarray) -> None:
        """Store to these sectors, `filled` bytes of each."""
        self._one(True, *by_line(sectors, filled))

    def _one(self, writes: bool, lines: np.ndarray, asked: np.ndarray, filled: np.ndarray) -> np.ndarray:
        one = np.ones(1, dtype=np.int64)
        return self.play(lines.size * one, np.array([writes]), 0 * one, one, lines, asked, filled, np.ones_like(lines))

    def play(
        self,
        sizes: np.ndarray,
        writes: np.ndarray,
        sms: np.ndarray,
        readers: np.ndarray,
        lines: np.ndarray,
        asked: np.ndarray,
        filled: np.ndarray,
        weights: np.ndarray,
    ) -> np.ndarray:
        """Accesses one after another: the first asks for the first `sizes[0]` of `lines`, and so on, one at least; `writes` says
        which are stores, `sms` who makes them, and `readers` how many SMs load the same at the same time. Each line stands for so many,
        `weights`, that all accesses have in common and use alike. Returns for each access how many sectors had to come from DRAM, and
        how many of these came as one half of a line without the other.

        What happens to a line depends on the accesses to it alone, once it is known which of these find it here. So all lines
        go at a time: first as they are met for the first time, then those met a second time, and so on.
        """
        if sizes.size > 1 and weights.sum() > _AT_ONCE * self.capacity:
            half = sizes.size // 2
            at = int(sizes[:half].sum())
            parts = [(slice(None, half), slice(None, at)), (slice(half, None), slice(at, None))]
            return np.concatenate(
                [
                    self.play(
                        *(column[accesses] for column in (sizes, writes, sms, readers)),
                        *(column[own] for column in (lines, asked, filled, weights)),
                    )
                    for accesses, own in parts
                ],
                axis=1,
            )
        begins = np.cumsum(sizes) - sizes
        number = np.repeat(np.arange(self.used.now + 1, self.used.now + 1 + sizes.size), sizes)
        before, meetings = self._meetings(lines, number)
        within, young, recent = self._found(lines, before, weights, sizes, begins)
        used = np.add.reduceat(weights, begins)
        uses, writing = self.uses + np.cumsum(used), np.repeat(writes, sizes)
        self.uses = int(uses[-1])
        self.weights[lines] = weights
        columns = lines, within, young, np.repeat(uses - used, sizes), np.repeat(uses, sizes)
        columns = *columns, np.where(writing, np.uint32(0), asked), np.where(writing, asked, np.uint32(0)), filled
        both = 1 - 0.5 ** (np.repeat(readers, sizes) - 1)  # the chance that SMs of both halves read
        by = np.repeat(np.where(writes, -1, sms), sizes)
        fetched = np.zeros(lines.size, dtype=np.uint8)
        for met in meetings:
            own = lines[met]
            room = self._room(own, within[met], recent[met], by[met], both[met]) * weights[met]
            self.fills += float(room[~within[met]].sum()) / _READ_ONCE
            self.used.use(own, before[met], number[met], np.rint(room).astype(np.int64))
            self.reader[own] = by[met]
            fetched[met] = self._meet(*(column[met] for column in columns))
        self.used.now += sizes.size
        self.used.horizons = self.used.after(0)
        halves = fetched * (fetched <= LINE_SECTORS // 2)
        return np.add.reduceat(np.stack([fetched, halves]) * weights, begins, axis=1)

    def _found(self, lines, before, weights, sizes, begins) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of lines that were used `before`, by accesses of these sizes: which L2 has, of which it need not have written what was stored
        there, and which were used a short time ago."""
        kind, begin = _kind(lines), self.used.horizons
        # How far the horizons have come at each access, if what is not found now is not found then.
        brought = np.add.reduceat(np.where(before > begin[kind], 0, _READ_ONCE * weights), begins)
        so_far = np.cumsum(brought)
        end = self.used.after(so_far[-1])
        part = np.repeat((so_far - brought) / max(1, so_far[-1]), sizes)
        within, young = (before > begin[k] + (end - begin)[k] * part for k in (kind, _KINDS + kind))
        return within, young, before > begin[-1]

    def _meetings(self, lines: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, list[np.ndarray | slice]]:
        """By which access each was used before, and the places in `lines` where one is met for the first time in here, for the
        second, and so on."""
        before, at = self.used.stamp[lines].astype(np.int64), np.arange(lines.size)
        self._place[lines] = at
        if not (self._place[lines] != at).any():
            return before, [slice(None)]
        order = np.argsort(lines, kind="stable")
        again = np.flatnonzero(np.diff(lines[order]) == 0) + 1
        before[order[again]] = number[order[again - 1]]
        firsts = np.ones(lines.size, dtype=bool)
        firsts[again] = False
        which = at - np.maximum.accumulate(np.where(firsts, at, 0))
        return before, [order[which == n] for n in range(int(which.max()) + 1)]

    def _room(self, lines, within, recent, by, both) -> np.ndarray:
        """What each line takes once it is used: found or not, soon after the last time or not, by one SM, or with some chance by
        SMs of both halves; -1 for what is stored."""
        had = self.used.room[lines] / np.maximum(1, self.weights[lines])
        same = self.reader[lines] == by
        again = np.where(recent, np.where(same, had, (had + _BOTH_HALVES) / 2), np.where(same, _ONE_HALF, _ANY_HALF))
        read = np.where(within, again, _READ_ONCE)
        return np.where(by < 0, _ONE_HALF, read + (_BOTH_HALVES - read) * both)

    def _meet(self, lines, within, young, before, after, read, written, filled) -> np.ndarray:
        """Different lines, each met by one access: whether L2 has it, and it was used lately, the uses before and after this access, the
        sectors that it reads and those it writes. Returns how many sectors of each had to be read for it."""
        held, dirty, weights = self.held[lines], self.dirty[lines], self.weights[lines]
        # What was stored long ago was written to DRAM, and with a line that had to leave.
        gone = np.where(young, np.uint32(0), dirty)
        if gone.any():
            self._write_back(gone, held, weights)
            dirty ^= gone
            held = held & ~_bytes(gone) | gone
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
        kind = _kind(lines)
        young = self.used.stamp[lines] > self.used.horizons[_KINDS + kind]
        gone = np.where(young, self._late(dirty & ~held, lines, self.uses), dirty)
        self._write_back(gone, held, weights)
        self.held[lines], self.dirty[lines] = held & ~_bytes(gone) | gone, dirty ^ gone
        self._in_pieces(dirty ^ gone, weights)
        return _count(dirty ^ gone, weights)
