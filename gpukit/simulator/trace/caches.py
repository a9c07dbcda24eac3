"""What a GPU's caches make of a traced launch: sectors that reach L2, bytes that reach DRAM.

Programs go to the SMs in waves, program p to SM p mod sms, as many at a time as fit. Those of a wave take turns: the first
access of each, the second of each, and so on.

1. Each access is split into the instructions of its warps, and each of these into its distinct 32-byte sectors. Stores go
   through to L2. Where several instructions store to parts of one sector, most of them meet on the way (`_ALONE`).
2. L1, one per SM and as large as shared memory leaves it, sees the loads of the SM's programs. What it does not hold is
   read from L2. Asynchronous copies of 16 bytes and tensor descriptors pass it by.
3. L2, one for all, lines of 128 bytes, sees everything. What it does not hold is read from DRAM, 64 bytes at a time; what
   is written stays until its line is needed for another one.

Both caches give up the line that was used longest ago. Four numbers are not derived but measured, on an H200 (python -m
gpukit.validation), and taken for every GPU: the shares _ALONE, _L1_PLACES, _L2_HOLDS and _L2_PARTS. The table there says how true
the whole is, kernel by kernel, and why where it is not. What it leaves out: programs that overtake one another, loads in
flight, eviction hints, spilled registers below L2, the kernel's own code (some 10 KB).

Sources: https://docs.nvidia.com/nsight-compute/ProfilingGuide/#memory-tables (sectors, L1, L2),
https://docs.nvidia.com/cuda/hopper-tuning-guide/index.html#unified-shared-memory-l1-texture-cache (L1 and shared memory).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpukit import tables
from gpukit.hardware import KIB, Gpu
from gpukit.simulator.compiler.occupancy import occupancy, reserved_shared_bytes
from gpukit.simulator.interpreter.addresses import SECTOR_BYTES, grid_offsets, touched
from gpukit.simulator.trace import coalesce
from gpukit.simulator.trace.recording import STORAGE_ALIGNMENT, Recording, Site

if TYPE_CHECKING:
    from gpukit.simulator.compiler.compile import Compiled
    from gpukit.simulator.trace.tracer import Launch

LINE_SECTORS = 4
LINE_BYTES = LINE_SECTORS * SECTOR_BYTES
FETCH_SECTORS = 2  # what one read of DRAM brings
# Of the stores that could meet another one to the same sector on the way, in L1, how many reach L2 alone. When they come
# decides. Those of one warp: 0.2 to 0.7 were measured, 0.35 in the median. Those of neighbouring warps: 0.4 to 0.9, but 0 to
# 0.26 where a barrier after the last load has brought the warps in step.
_ALONE, _ALONE_APART, _ALONE_IN_STEP = 1 / 3, 2 / 3, 1 / 5
# An address has so many places in L1 to be in. What else wants them is chance, so a line lasts a quarter of L1's size more
# or less: two passes over 128 KiB miss 2.5 % of an L1 of 248 KiB, over 256 KiB some 58 %.
_L1_PLACES = 16
# How much of its size L2 holds of what lies between two uses: of 60 MiB, two passes over 32 MiB miss 1 %, over 48 MiB 63 %
# and over 64 MiB all. It has two halves, and what the other one's SMs read is in both.
_L2_HOLDS = 0.72
# When so much of L2 was filled since a sector was written in part, its rest is read from DRAM, and it is written there.
_L2_PARTS = 0.11
_SAMPLED_ROWS, _MAX_WINDOW = 60_000, 8  # of a sampled launch: accesses to play through the caches, and programs an SM
_SAMPLED_SMS = 4  # SMs whose L1 is followed in a sampled launch


@dataclass(frozen=True)
class SiteTraffic:
    """What one tl.load, tl.store or atomic cost. `l1_sectors` are those its instructions asked for, `l2_sectors` those
    that reached L2, `dram_bytes` what was read from DRAM for it."""

    kind: str
    tensor: str
    line: int
    via: str
    l1_sectors: int
    l2_sectors: int
    dram_bytes: int


@dataclass(frozen=True)
class Traffic:
    """One launch on one GPU, with cold caches.

    l2_read_sectors     32-byte sectors from L2 to L1: of loads, and the answers to atomics
    l2_write_sectors    of stores, those of spilled registers included, which are also in `spilled_sectors`
    l2_atomic_sectors   of atomics
    dram_read_bytes, dram_write_bytes                      what L2 reads from and writes to DRAM while the kernel runs
    dirty_bytes                                            written, and still in L2 when the kernel ends
    l1_hit_rate, l2_hit_rate                               of the sectors read there
    programs_per_sm, waves                                 how the grid was placed
    layouts                                                "compiled" or "assumed": where the warps' lanes are known from
    """

    gpu: str
    layouts: str
    programs_per_sm: int
    waves: float
    l1_bytes: int
    l1_read_sectors: int
    l2_read_sectors: int
    l2_write_sectors: int
    l2_atomic_sectors: int
    spilled_sectors: int
    dram_read_bytes: int
    dram_write_bytes: int
    dirty_bytes: int
    sites: tuple[SiteTraffic, ...] = field(repr=False)

    @property
    def l1_hit_rate(self) -> float:
        missed = self.l2_read_sectors - self.l2_atomic_sectors
        return max(0.0, 1 - missed / self.l1_read_sectors) if self.l1_read_sectors else 0.0

    @property
    def l2_hit_rate(self) -> float:
        asked = self.l2_read_sectors * SECTOR_BYTES
        return max(0.0, 1 - self.dram_read_bytes / asked) if asked else 0.0

    @property
    def l1_write_sectors(self) -> int:
        """Sectors that the stores' instructions ask for, before any meet on the way to L2."""
        return sum(site.l1_sectors for site in self.sites if site.kind == "store")

    @property
    def dram_bytes(self) -> int:
        return self.dram_read_bytes + self.dram_write_bytes

    def report(self) -> str:
        """Level by level, as text."""
        lines = [
            ("L1", f"{self.l1_read_sectors:,} sectors asked for, {self.l1_hit_rate:.0%} of them there"),
            ("L2 to L1", f"{self.l2_read_sectors:,} sectors"),
            ("L1 to L2", f"{self.l2_write_sectors:,} sectors stored"),
            ("L2", f"{self.l2_hit_rate:.0%} of the sectors read were there"),
            ("DRAM to L2", f"{self.dram_read_bytes:,} bytes"),
            ("L2 to DRAM", f"{self.dram_write_bytes:,} bytes, and {self.dirty_bytes:,} when it needs the room"),
            ("placed", f"{self.programs_per_sm} programs an SM, {self.waves:.2f} waves; lanes as {self.layouts}"),
        ]
        if self.l2_atomic_sectors:
            lines.insert(3, ("atomics", f"{self.l2_atomic_sectors:,} sectors"))
        return "\n".join(tables.facts(lines, width=12))

    def __str__(self) -> str:
        return self.report()


# ---- how a site's lanes travel ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """How one site moves: the elements of each warp instruction, None for a tile that one instruction moves whole,
    whether its loads ask L1, and how many warps there are."""

    instructions: np.ndarray | None
    through_l1: bool
    warps: int = 1


def _ways(launch: Launch, compiled: Compiled | None) -> dict[Site, _Way]:
    recording = launch.recording
    seen: dict[Site, set] = {site: set() for site in recording.sites}
    repeats = {site: 0 for site in recording.sites}
    for _, site, tile, start in recording.rows():
        repeats[recording.sites[site]] += 1
        if tile >= 0:
            seen[recording.sites[site]].add((tile, start % 256))
    integers = [v for v in launch.arguments.values() if isinstance(v, int) and not isinstance(v, bool)]
    known = {
        site: coalesce.facts(site, [(recording.tiles[t], start) for t, start in tiles], integers)
        for site, tiles in seen.items()
    }
    layouts = coalesce.assumed(known, launch.num_warps)
    ran = max(1, len(set(recording.program)))
    found = {}
    for site in recording.sites:
        layout, vector = layouts[site]
        to = "TMA" if site.via == "tma" else "registers"
        # The pipeliner copies what a loop loads for tl.dot into shared memory, from 4 bytes a thread on.
        if site.kind == "load" and launch.flops and repeats[site] > ran and vector * site.width >= 4 and to != "TMA":
            to = "shared memory" if len(site.shape) > 1 and launch.options.get("num_stages") != 1 else to
        if compiled is not None:
            layout, vector, to = _compiled_way(site, compiled, (layout, vector, to))
        through_l1 = to == "registers" or (to == "shared memory" and vector * site.width < 16)
        if to == "TMA":
            found[site] = _Way(None, False)
        elif site.lanes == 1:  # a scalar is loaded by every warp and stored by one thread
            warps = launch.num_warps if site.kind == "load" else 1
            found[site] = _Way(np.zeros((warps, 1), dtype=np.int64), through_l1, warps)
        else:
            instructions, warps = _instructions(layout, site.shape, vector, site.kind == "load")
            found[site] = _Way(instructions, through_l1, warps)
    return found


def _compiled_way(site: Site, compiled: Compiled, otherwise: tuple) -> tuple:
    access = next(
        (a for a in compiled.layouts if (a.kind, a.line, a.shape) == (site.kind, site.line, site.shape)), None
    )
    if access is None:
        return otherwise
    if access.to == "TMA" or access.layout is None:
        return otherwise[0], otherwise[1], access.to
    bits = [a.bits for a in compiled.accesses if (a.kind, a.line) == (site.kind, site.line) and a.bits]
    vector = max(1, max(bits) // (8 * site.width)) if bits else otherwise[1]
    return access.layout, vector, access.to


@lru_cache(maxsize=256)
def _instructions(layout, shape: tuple[int, ...], vector: int, copies: bool) -> tuple[np.ndarray, int]:
    """[instructions, elements]: the flat elements of the block that each warp instruction moves, -1 where none, those of a
    warp one after another; and how many warps there are. `copies`: threads that hold what others hold too load it as well, and do not store it."""
    try:
        held = layout.elements(shape, redundant=None if copies else -1)
    except NotImplementedError:  # a tensor core's layout: taken for rows
        held = coalesce.blocked(shape, vector, tuple(range(len(shape)))[::-1], 4).elements(shape, redundant=-1)
    warps, registers, lanes = held.shape
    vector = min(vector, registers)
    held = held.reshape(warps, registers // vector, vector, lanes).swapaxes(2, 3)
    return held.reshape(warps * (registers // vector), lanes * vector), warps


def _alone_among_warps(compiled: Compiled | None) -> float:
    """The share that applies to stores of neighbouring warps, by what comes last before the first of them."""
    if compiled is None:
        return _ALONE
    last = ""
    for instruction in compiled.instructions:
        name = instruction.opcode.partition(".")[0]
        if name == "STG":
            break
        last = name if name in ("LDG", "BAR") else last
    return _ALONE_IN_STEP if last == "BAR" else _ALONE_APART


class _Form(NamedTuple):
    """What accesses have in common that differ only by whole sectors: their site, the sectors that the warps'
    instructions ask for, of which so many are new to their warp, the distinct ones, as distances from the one where the
    access begins, and the bytes of each."""

    site: int
    asked: int
    warps: int
    sectors: np.ndarray
    filled: np.ndarray


class _Forms:
    """The forms of a recording's accesses, worked out when they are met."""

    def __init__(self, recording: Recording, ways: dict[Site, _Way]):
        self.recording, self.ways = recording, ways
        columns = recording.site, recording.tile, recording.start
        self.sites, self.tiles, self.starts = (np.array(c, dtype=np.int64) for c in columns)
        self._known: dict[int, _Form] = {}

    def counted(self, rows: np.ndarray) -> tuple[list[_Form], list[int]]:
        """Which forms these rows of the recording have, and how many have each."""
        forms, _, counts = self.of(rows, self.starts[rows])
        return forms, counts.tolist()

    def of(self, row: np.ndarray, start: np.ndarray) -> tuple[list[_Form], np.ndarray, np.ndarray]:
        """Of rows of the recording moved to addresses `start`: the forms there are, which of them each row has, and how
        many rows have each."""
        low = int(self.tiles.min(initial=0))
        keys = (self.sites[row] * (int(self.tiles.max(initial=0)) - low + 1) + self.tiles[row] - low) * SECTOR_BYTES
        keys += start % SECTOR_BYTES
        keys, first, which, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        forms = []
        for key, i in zip(keys.tolist(), first.tolist(), strict=True):
            if key not in self._known:
                self._known[key] = self._form(int(row[i]), int(start[i]) % SECTOR_BYTES)
            forms.append(self._known[key])
        return forms, which, counts

    def _form(self, row: int, begin: int) -> _Form:
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
        instructions = self.ways[site].instructions
        asked = warps = sectors.size
        if instructions is not None and instructions.size:
            moved = (instructions >= 0) & live[instructions]
            asked_for = np.where(moved, offsets[instructions] // SECTOR_BYTES, _NOBODY)
            asked, warps = _distinct(asked_for), _distinct(asked_for.reshape(self.ways[site].warps, -1))
        return _Form(number, asked, warps, sectors, filled)


_NOBODY = np.iinfo(np.int64).max
_WHOLE = np.uint8(SECTOR_BYTES)


def _distinct(rows: np.ndarray) -> int:
    """Distinct values in each row, summed; _NOBODY is none."""
    rows = np.sort(rows, axis=1)
    fresh = (rows[:, 1:] != rows[:, :-1]) & (rows[:, 1:] != _NOBODY)
    return int(np.count_nonzero(rows[:, 0] != _NOBODY) + np.count_nonzero(fresh))


# ---- the two caches -----------------------------------------------------------------------------------------------


class _Lru:
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
        return self.stamp[units] > self.horizon

    def ages(self, units: np.ndarray) -> np.ndarray:
        """How many other units were used since each of these, which are within."""
        since = np.cumsum(self.latest[self.now : self.horizon : -1])
        return since[self.now - self.stamp[units]] - self.latest[self.stamp[units]]

    def use(self, units: np.ndarray) -> None:
        before = self.stamp[units]
        before = before[before > self.horizon]
        np.subtract.at(self.latest, before, 1)
        self.now += 1
        self.latest[self.now] = units.size
        self.stamp[units] = self.now
        self.inside += units.size - before.size
        while self.inside > self.capacity:
            self.horizon += 1
            self.inside -= int(self.latest[self.horizon])

    def forget(self) -> None:
        self.horizon, self.inside = self.now, 0


@lru_cache(maxsize=8)
def _l1_ages(sectors: int) -> np.ndarray:
    """The ages at which 1,024 kinds of line are given up: the quantiles of a normal distribution."""
    spread = statistics.NormalDist(sectors, sectors / _L1_PLACES**0.5)
    return np.array([spread.inv_cdf((i + 0.5) / 1024) for i in range(1024)])


class _L1:
    """The L1 of one SM after another."""

    def __init__(self, sectors: int, accesses: int, capacity_bytes: int):
        self.ages = _l1_ages(capacity_bytes // SECTOR_BYTES)
        self.lru = _Lru(sectors, accesses, int(self.ages.max()))

    def read(self, sectors: np.ndarray) -> np.ndarray | None:
        """Which of the sectors were missing; None if all were."""
        hit = self.lru.within(sectors)
        if hit.any():
            inside = sectors[hit]
            kind = (inside // LINE_SECTORS * 0x9E3779B1 & 0xFFFFFFFF) >> 22  # neighbours are of different kinds
            hit[hit] = self.lru.ages(inside) < self.ages[kind]
        self.lru.use(sectors)
        return ~hit if hit.any() else None


class _L2:
    """The one L2: lines of four sectors, of each of which some bytes are there. All counts are in sectors.

    dram_read, dram_written   what it read from DRAM and wrote there
    dirtied                   what was written and was not waiting to be written back already
    fills                     lines that were brought in; `uses` those that were used
    """

    def __init__(self, sectors: int, accesses: int, capacity_bytes: int):
        lines = -(-sectors // LINE_SECTORS)
        whole = capacity_bytes // (SECTOR_BYTES * LINE_SECTORS)
        self.lru, self.patience = _Lru(lines, accesses, int(whole * _L2_HOLDS)), int(whole * _L2_PARTS)
        self.held = np.zeros(lines * LINE_SECTORS, dtype=np.uint8)  # bytes of each sector that are here
        self.dirty = np.zeros(lines * LINE_SECTORS, dtype=bool)
        self.since = np.zeros(lines * LINE_SECTORS, dtype=np.int32)  # in uses: when it was first written
        self.uses = self.fills = self.dram_read = self.dram_written = self.dirtied = 0

    def _touch(self, sectors: np.ndarray) -> None:
        """Make room for these sectors, and complete those that were written in part long ago."""
        lines = sectors // LINE_SECTORS
        lines = lines[np.flatnonzero(np.diff(lines, prepend=-1))]  # sorted, so equal ones are neighbours
        fresh = lines[~self.lru.within(lines)]
        if fresh.size:
            gone = (fresh[:, None] * LINE_SECTORS + np.arange(LINE_SECTORS)).reshape(-1)
            self._write_back(gone[self.dirty[gone]])
            self.held[gone] = 0
        if fresh.size < lines.size:
            waiting = sectors[self.dirty[sectors]]
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
        missing = sectors[self.held[sectors] < SECTOR_BYTES]
        if not missing.size:
            return 0
        pairs = missing // FETCH_SECTORS
        pairs = pairs[np.flatnonzero(np.diff(pairs, prepend=-1))]
        every = (pairs[:, None] * FETCH_SECTORS + np.arange(FETCH_SECTORS)).reshape(-1)
        every = every[self.held[every] < SECTOR_BYTES]
        self.held[every] = SECTOR_BYTES
        self.dram_read += every.size
        return every.size

    def write(self, sectors: np.ndarray, filled: np.ndarray) -> None:
        """Store to these sectors, `filled` bytes of each."""
        self._touch(sectors)
        self.held[sectors] = np.minimum(self.held[sectors] + filled, SECTOR_BYTES)
        first = sectors[~self.dirty[sectors]]
        self.dirtied += first.size
        self.since[first] = self.uses
        self.dirty[first] = True

    def finish(self) -> int:
        """Write back what is no longer held, and what was written in part long ago; the dirty sectors that stay."""
        dirty = np.flatnonzero(self.dirty)
        gone = ~self.lru.within(dirty // LINE_SECTORS) | self._late(dirty)
        self._write_back(dirty[gone])
        return dirty.size - int(np.count_nonzero(gone))


# ---- the launch on the GPU ----------------------------------------------------------------------------------------


def l1_bytes(gpu: Gpu, shared_bytes: int, programs_per_sm: int) -> int:
    """What shared memory leaves to L1: both share one memory, 28 KiB larger than the most that can be shared."""
    whole = gpu.smem_per_sm_bytes + 28 * KIB
    wanted = (shared_bytes + reserved_shared_bytes(gpu)) * programs_per_sm if shared_bytes else 0
    sizes = [size * KIB for size in (0, 8, 16, 32, 64, 100, 132, 164, 196, 228) if size * KIB <= gpu.smem_per_sm_bytes]
    return whole - next((size for size in sizes if size >= wanted), gpu.smem_per_sm_bytes)


def _placed(launch: Launch, gpu: Gpu, compiled: Compiled | None) -> tuple[int, int]:
    """Programs per SM and shared memory of each."""
    if compiled is not None:
        return max(1, compiled.occupancy.programs), compiled.shared_bytes
    threads = coalesce.LANES * launch.num_warps
    largest = max((site.lanes for site in launch.recording.sites), default=1)
    registers = min(255, 24 + 3 * largest // (2 * threads))
    shared = 0
    if launch.flops:
        loads = {site.shape: site for site in launch.recording.sites if site.kind == "load" and len(site.shape) > 1}
        shared = int(launch.options.get("num_stages") or 3) * sum(s.lanes * s.width for s in loads.values())
    shared = min(shared, gpu.smem_per_block_bytes)
    return max(1, occupancy(gpu, launch.num_warps, registers, shared).programs), shared


def window(launch: Launch) -> int:
    """How many programs, from the first on, a sampled launch should know the beginning of: two waves, or more where
    programs are short, since only the compiled kernel says how many fit on an SM."""
    from gpukit import hardware

    gpu, recording = hardware.gpu(launch.gpu), launch.recording
    programs_per_sm, _ = _placed(launch, gpu, None)
    recording.whole = len(recording)
    each = max(1, recording.whole // launch.sampled)  # accesses of a program
    per_sm = max(2 * programs_per_sm, min(_MAX_WINDOW, _SAMPLED_ROWS // (each * gpu.sms)))
    return min(launch.programs, gpu.sms * per_sm)


def traffic(launch: Launch, gpu: Gpu, compile_it: Compiled | bool = True) -> Traffic:
    """See Launch.traffic."""
    recording = launch.recording
    if launch.dry:
        raise ValueError(f"{launch.kernel} was traced with dry=True: it made no accesses")
    if not recording.complete:
        raise ValueError(
            f"{launch.kernel} made too many irregular accesses to keep: trace fewer programs, or with sample=N"
        )
    compiled = _compiled(launch, gpu) if compile_it is True else compile_it or None
    programs_per_sm, shared = _placed(launch, gpu, compiled)
    l1 = l1_bytes(gpu, shared, programs_per_sm)
    ways = _ways(launch, compiled)
    forms = _Forms(recording, ways)

    # By site: sectors that the instructions of the programs that ran ask for, the distinct ones of each warp, and of each
    # access.
    asked, warps, distinct = np.zeros((3, len(recording.sites)))
    ran = np.arange(len(recording) if launch.sampled is None else recording.whole)
    for form, count in zip(*forms.counted(ran), strict=True):
        asked[form.site] += count * form.asked
        warps[form.site] += count * form.warps
        distinct[form.site] += count * form.sectors.size

    play = _Play(launch, gpu, ways, forms, programs_per_sm)
    missed = play.l1(l1)
    dram = play.l2(gpu.l2_bytes)

    scale = 1.0 if launch.sampled is None else launch.programs / launch.sampled
    alone_among_warps = _alone_among_warps(compiled)
    sites = []
    for number, site in enumerate(recording.sites):
        to_l2 = asked[number]
        if site.kind == "load":
            to_l2 = distinct[number] * missed[number]
        elif site.kind == "store":
            of_one_warp, of_others = asked[number] - warps[number], warps[number] - distinct[number]
            to_l2 = distinct[number] + _ALONE * of_one_warp + alone_among_warps * of_others
        from_dram = round(dram.read[number] * SECTOR_BYTES)
        l1_sectors, l2_sectors = round(asked[number] * scale), round(to_l2 * scale)
        sites.append(SiteTraffic(site.kind, site.tensor, site.line, site.via, l1_sectors, l2_sectors, from_dram))

    def total(kind: str, name: str = "l2_sectors") -> int:
        return sum(getattr(s, name) for s in sites if s.kind == kind)

    spilled = 0 if compiled is None else compiled.spill_stores * compiled.threads * launch.programs // SECTOR_BYTES
    return Traffic(
        gpu=gpu.key, layouts="assumed" if compiled is None else "compiled", programs_per_sm=programs_per_sm,
        waves=launch.programs / (gpu.sms * programs_per_sm), l1_bytes=l1,
        l1_read_sectors=total("load", "l1_sectors"), l2_read_sectors=total("load") + total("atomic"),
        l2_write_sectors=total("store") + spilled, l2_atomic_sectors=total("atomic"), spilled_sectors=spilled,
        dram_read_bytes=sum(s.dram_bytes for s in sites) + round(dram.completed * SECTOR_BYTES),
        dram_write_bytes=round(dram.written * SECTOR_BYTES), dirty_bytes=round(dram.dirty * SECTOR_BYTES),
        sites=tuple(sites),
    )  # fmt: skip


def _compiled(launch: Launch, gpu: Gpu) -> Compiled | None:
    from gpukit.simulator.compiler.compile import CompileError, compile

    try:
        return compile(launch, gpu=gpu)
    except (CompileError, TypeError, ValueError, RuntimeError, OSError):
        return None


# ---- the programs, wave by wave -----------------------------------------------------------------------------------


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
    were not cut short begin there at one address, as with the weights of a norm."""
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
    # Shifts still free, by the row that the program goes on like and the site.
    places: dict[tuple[int, int], list[int]] = {}
    columns: list[list[np.ndarray]] = []
    for program in inside:
        own = np.arange(*bounds[program])
        if program not in recording.cut:
            columns.append([np.full(own.size, program), np.arange(own.size), own, starts[own]])
            continue
        rows = np.arange(*bounds[min(complete, key=lambda c: (abs(c - program), c))])
        moved = starts[rows].copy()
        begin = {int(site): row for row, site in zip(own[::-1], sites[own][::-1], strict=True)}
        shifts = {}  # a site that was not reached lies where another one on the same tensor has moved to
        for site in np.unique(sites[rows]).tolist():
            if site in begin:
                shift = int(starts[begin[site]] - starts[rows[sites[rows] == site][0]])
                shifts[site] = shift
                shifts.setdefault(recording.sites[site].tensor, shift)
        for site in np.unique(sites[rows]).tolist():
            regular = (sites[rows] == site) & (tiles[rows] >= 0)
            if not regular.any():
                continue
            shift = shifts.get(site, shifts.get(recording.sites[site].tensor, 0 if site in shared else None))
            if shift is None:
                key = int(rows[0]), site
                if not places.get(key):
                    these = rows[regular]
                    low = (starts[these] + reach[0, tiles[these]]).min() // STORAGE_ALIGNMENT * STORAGE_ALIGNMENT
                    moves = {*zip(tiles[these].tolist(), (starts[these] - low).tolist(), strict=True)}
                    blocks = [(recording.tiles[tile].moved(move), move // LINE_BYTES) for tile, move in moves]
                    width = recording.sites[site].width
                    used = np.concatenate([touched(block, width, LINE_BYTES) + line for block, line in blocks])
                    lines, free = _places(np.unique(used))
                    places[key] = [beyond - low + place * LINE_BYTES for place in free]
                    beyond += -(-lines * LINE_BYTES // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
                shift = places[key].pop()
            moved[regular] += shift
        columns.append([np.full(rows.size, program), np.arange(rows.size), rows, moved])
    nothing = [np.zeros(0, dtype=np.int64)] * 4  # a launch may make no accesses
    return _Rows(*(np.concatenate(column) for column in zip(nothing, *columns, strict=True)))


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


def _packed(start: np.ndarray, reach: np.ndarray) -> tuple[np.ndarray, int]:
    """The same addresses without the stretches that nobody uses, in steps of STORAGE_ALIGNMENT, and how many bytes they
    then take. A sampled launch of large tensors uses little of them."""
    first, last = (start + reach) // STORAGE_ALIGNMENT
    lowest = int(first.min(initial=0))
    edges = np.zeros(int(last.max(initial=0)) - lowest + 2, dtype=np.int64)
    np.add.at(edges, first - lowest, 1)
    np.add.at(edges, last - lowest + 1, -1)
    used = np.cumsum(edges) > 0
    place = np.cumsum(used) - 1
    return start + (place[first - lowest] - first) * STORAGE_ALIGNMENT, int(used.sum()) * STORAGE_ALIGNMENT


class _Dram(NamedTuple):
    """Sectors between L2 and DRAM: read for each site, read to complete sectors that were written in part, written, and
    written to L2 but not yet to DRAM."""

    read: np.ndarray
    completed: float
    written: float
    dirty: float


class _Play:
    """The programs of a launch, played wave by wave, first through L1, then through L2."""

    def __init__(self, launch: Launch, gpu: Gpu, ways: dict[Site, _Way], forms: _Forms, programs_per_sm: int):
        recording, self.gpu = launch.recording, gpu
        self.programs, self.sampled = launch.programs, launch.sampled is not None
        reach = _reach(recording)
        rows = _reconstructed(recording, reach) if self.sampled else _recorded(recording)
        start, extent = _packed(rows.start, reach[:, forms.tiles[rows.row]])
        self.sectors_in_memory = extent // SECTOR_BYTES
        self.program, self.step = rows.program, rows.step
        self.forms, which, _ = forms.of(rows.row, start)
        self.which, self.base = which.tolist(), (start // SECTOR_BYTES).tolist()
        self.kinds = [site.kind for site in recording.sites]
        through_l1 = np.array([s.kind == "load" and ways[s].through_l1 for s in recording.sites], dtype=bool)
        self.through_l1 = through_l1[forms.sites[rows.row]]
        self.sm = self.program % gpu.sms
        self.spacing = max(1, gpu.sms // _SAMPLED_SMS) if self.sampled else 1
        self.known = len(np.unique(rows.program))
        self.wave = gpu.sms * programs_per_sm
        if self.known < self.programs:  # a window: two waves, or what there is
            self.wave = min(self.wave, max(1, -(-self.known // 2)))
        self.l1_missed: dict[int, np.ndarray] = {}  # rows that found something in L1 -> which sectors they did not

    def _sectors(self, i: int) -> np.ndarray:
        return self.forms[self.which[i]].sectors + self.base[i]

    def l1(self, capacity: int) -> np.ndarray:
        """Of the sectors that each site's loads touch, the share that comes from L2."""
        sm = self.sm
        followed = self.through_l1 & (sm % self.spacing == 0)
        order = np.lexsort((self.program, self.step, self.program // self.wave, sm))
        cache, current = _L1(self.sectors_in_memory, order.size, capacity), -1
        read, missed = np.zeros((2, len(self.kinds)))
        for i in order[followed[order]].tolist():
            if sm[i] != current:
                current = sm[i]
                cache.lru.forget()
            sectors = self._sectors(i)
            missing = cache.read(sectors)
            site = self.forms[self.which[i]].site
            read[site] += sectors.size
            missed[site] += sectors.size if missing is None else np.count_nonzero(missing)
            if missing is not None:
                self.l1_missed[i] = missing
        return np.divide(missed, read, out=np.ones_like(read), where=read > 0)

    def _alike(self) -> list[int]:
        """For each row, that of the nearest SM whose L1 was followed: of a program as far on, at the same step, with an
        access of the same form. -1 where there is none."""
        begins = np.flatnonzero(np.diff(self.program, prepend=-1))
        first = np.full(int(self.program.max(initial=-1)) + 1, -1)
        first[self.program[begins]] = begins
        row = first[self.program - self.sm % self.spacing]
        which, there = np.array(self.which), np.minimum(row + self.step, self.step.size - 1)
        same = (row >= 0) & (self.step[there] == self.step) & (which[there] == which) & self.through_l1
        return np.where(same, there, -1).tolist()

    def l2(self, capacity: int) -> _Dram:
        """What passes between L2 and DRAM. Where only the first waves are known, each later one is taken to be like the
        last of these."""
        waves = self.program // self.wave
        cache = _L2(self.sectors_in_memory, 2 * self.step.size, capacity)
        read = np.zeros(len(self.kinds))
        before = (read, 0, 0, 0)  # when the last wave began
        done: set[tuple[int, int]] = set()
        step = wave = -1
        alike = self._alike()
        for i in np.lexsort((self.program, self.step, waves)).tolist():
            if waves[i] != wave:
                wave, before = waves[i], (read.copy(), cache.dram_read, cache.dirtied, cache.fills)
            if self.step[i] != step:
                step = self.step[i]
                done.clear()
            form = self.forms[self.which[i]]
            kind, sectors, missing = self.kinds[form.site], self._sectors(i), self.l1_missed.get(alike[i])
            if missing is not None:
                sectors = sectors[missing]
            else:
                access = self.which[i], self.base[i]
                if kind == "load" and access in done:  # another program reads the same at the same time
                    continue
                done.add(access)
            if kind != "store":
                read[form.site] += cache.read(sectors)
            if kind != "load":
                cache.write(sectors, form.filled if kind == "store" else _WHOLE)
        left = cache.finish()
        completed = cache.dram_read - read.sum()
        if self.known == self.programs:
            return _Dram(read, completed, cache.dram_written, left)
        more = (self.programs - self.known) / max(1, len(np.unique(self.program[waves == wave])))
        read_before, all_before, dirtied_before, fills_before = before
        completed += max(0.0, completed - (all_before - read_before.sum())) * more
        dirtied = cache.dirtied + (cache.dirtied - dirtied_before) * more
        fills = cache.fills + (cache.fills - fills_before) * more
        left = dirtied * min(1.0, cache.lru.capacity / max(1, fills))  # what is written and what is read leave L2 alike
        return _Dram(read + (read - read_before) * more, completed, dirtied - left, left)
