"""What a GPU's caches make of a traced launch: sectors that reach L2, bytes that reach DRAM.

Three steps, in launch order. Programs go to the SMs in waves, program p to SM p mod sms, as many at a time as fit.
1. Each access is split into the instructions of its warps. A store goes through to L2 as it is: one instruction, its
   distinct 32-byte sectors. A load asks L1 for its sectors.
2. L1, one per SM and as large as shared memory leaves it, sees the accesses of the SM's programs in turn. What it does
   not hold is read from L2. Asynchronous copies of 16 bytes and tensor descriptors pass it by.
3. L2, one for all, lines of 128 bytes, sees the accesses of all programs of a wave step by step. What it does not hold is
   read from DRAM; what is written stays until its line is needed for another one.

Both caches replace the line that was used longest ago, where age is counted in lines filled since: exact for streams and
for what is used again at once, and a few percent generous in between.

Sources: https://docs.nvidia.com/nsight-compute/ProfilingGuide/#memory-tables (sectors, L1, L2),
https://docs.nvidia.com/cuda/hopper-tuning-guide/index.html#unified-shared-memory-l1-texture-cache (L1 and shared memory).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from gpukit.hardware import KIB, Gpu
from gpukit.simulator import coalesce
from gpukit.simulator.memory import SECTOR_BYTES, grid_offsets, touched
from gpukit.simulator.occupancy import occupancy, reserved_shared_bytes
from gpukit.simulator.recording import STORAGE_ALIGNMENT, Recording, Site

if TYPE_CHECKING:
    from gpukit.simulator.compile import Compiled
    from gpukit.simulator.trace import Launch

LINE_SECTORS = 4  # 128 bytes
_MAX_WINDOW = 8  # programs per SM that a sampled launch looks at
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

    l2_read_sectors, l2_write_sectors, l2_atomic_sectors   32-byte sectors that loads, stores and atomics move to L2
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
    dram_read_bytes: int
    dram_write_bytes: int
    dirty_bytes: int
    sites: tuple[SiteTraffic, ...] = field(repr=False)

    @property
    def l1_hit_rate(self) -> float:
        return 1 - self.l2_read_sectors / self.l1_read_sectors if self.l1_read_sectors else 0.0

    @property
    def l2_hit_rate(self) -> float:
        asked = (self.l2_read_sectors + self.l2_atomic_sectors) * SECTOR_BYTES
        return max(0.0, 1 - self.dram_read_bytes / asked) if asked else 0.0

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
        return "\n".join(f"{title:<12}{text}" for title, text in lines)

    def __str__(self) -> str:
        return self.report()


# ---- how a site's lanes travel ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """How one site moves: the elements of each warp instruction, None for a tile that one instruction moves whole, and
    whether its loads ask L1."""

    instructions: np.ndarray | None
    through_l1: bool


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
        found[site] = _Way(None if to == "TMA" else _instructions(layout, site.shape, vector), through_l1)
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
def _instructions(layout, shape: tuple[int, ...], vector: int) -> np.ndarray:
    """[instructions, elements]: the flat elements of the block that each warp instruction moves, -1 where none."""
    try:
        return layout.instructions(shape, vector)
    except NotImplementedError:  # a tensor core's layout: two neighbours a lane, 8 lanes a row
        return coalesce.blocked(shape, vector, tuple(range(len(shape)))[::-1], 4).instructions(shape, vector)


class _Counter:
    """Sectors that the warps' instructions ask for, remembered for accesses that differ only by whole sectors."""

    def __init__(self, recording: Recording, ways: dict[Site, _Way]):
        self.recording, self.ways = recording, ways
        self._known: dict[tuple, int] = {}

    def asked(self, row: int) -> int:
        recording = self.recording
        number, start = recording.tile[row], recording.start[row]
        site = recording.sites[recording.site[row]]
        if number < 0:
            lost = recording.irregular[-1 - number]
            live = np.ones(site.lanes, dtype=bool) if lost.live is None else lost.live.reshape(-1)
            offsets = np.zeros(site.lanes, dtype=np.int64)
            offsets[live] = lost.offsets
            return self._count(site, offsets, live)
        key = site, number, start % SECTOR_BYTES
        known = self._known.get(key)
        if known is None:
            tile = recording.tiles[number]
            live = np.zeros(tile.shape, dtype=bool)
            live[tuple(map(slice, tile.low, tile.high))] = True
            offsets = start % SECTOR_BYTES + grid_offsets(tile.shape, tile.strides).reshape(-1)
            known = self._known[key] = self._count(site, offsets, live.reshape(-1))
        return known

    def _count(self, site: Site, offsets: np.ndarray, live: np.ndarray) -> int:
        instructions = self.ways[site].instructions
        sectors = offsets // SECTOR_BYTES
        if instructions is None or instructions.size == 0 or site.lanes == 1:
            return int(np.unique(sectors[live]).size)
        nobody = np.iinfo(np.int64).max
        together = np.where((instructions >= 0) & live[instructions], sectors[instructions], nobody)
        together.sort(axis=1)
        first = together[:, 0] != nobody
        fresh = (together[:, 1:] != together[:, :-1]) & (together[:, 1:] != nobody)
        return int(np.count_nonzero(first) + np.count_nonzero(fresh))


# ---- the two caches -----------------------------------------------------------------------------------------------


class _L1:
    """The L1 of one SM after another. `stamp` holds for each sector the number of fills when it was last used."""

    def __init__(self, sectors: int, capacity_bytes: int):
        self.stamp = np.zeros(sectors, dtype=np.int32)  # memory that is never touched is never taken
        self.capacity = max(1, capacity_bytes // SECTOR_BYTES)
        self.fills = self.capacity

    def next_sm(self) -> None:
        self.fills += self.capacity + 1

    def read(self, sectors: np.ndarray) -> np.ndarray | None:
        """The sectors that were missing; None if all were."""
        hit = self.stamp[sectors] > self.fills - self.capacity
        hits = np.count_nonzero(hit)
        self.fills += sectors.size - int(hits)
        self.stamp[sectors] = self.fills
        return None if not hits else sectors[~hit]


class _L2:
    """The one L2: lines of four sectors, each present or not. `dram_read`, `dram_written` and `dirtied`, what was written
    and was not waiting to be written back already, in sectors."""

    def __init__(self, sectors: int, capacity_bytes: int):
        lines = -(-sectors // LINE_SECTORS)
        self.stamp = np.zeros(lines, dtype=np.int32)
        self.present = np.zeros(lines * LINE_SECTORS, dtype=bool)
        self.dirty = np.zeros(lines * LINE_SECTORS, dtype=bool)
        self.capacity = max(1, capacity_bytes // (SECTOR_BYTES * LINE_SECTORS))
        self.fills = self.capacity
        self.dram_read = self.dram_written = self.dirtied = 0

    def _absent(self, sectors: np.ndarray) -> np.ndarray:
        """Make room for these sectors; those that were not there."""
        lines = sectors // LINE_SECTORS
        resident = self.stamp[lines] > self.fills - self.capacity
        if not resident.all():
            fresh = lines[~resident]
            fresh = fresh[np.flatnonzero(np.diff(fresh, prepend=-1))]  # sorted, so equal ones are neighbours
            dirty = self.dirty.reshape(-1, LINE_SECTORS)
            self.dram_written += int(np.count_nonzero(dirty[fresh]))
            dirty[fresh] = False
            self.present.reshape(-1, LINE_SECTORS)[fresh] = False
            self.fills += fresh.size
        self.stamp[lines] = self.fills
        return sectors[~self.present[sectors]]

    def read(self, sectors: np.ndarray) -> int:
        """Sectors that had to come from DRAM."""
        missing = self._absent(sectors)
        self.present[missing] = True
        self.dram_read += missing.size
        return missing.size

    def write(self, sectors: np.ndarray) -> None:
        self._absent(sectors)
        self.present[sectors] = True
        self.dirtied += sectors.size - int(np.count_nonzero(self.dirty[sectors]))
        self.dirty[sectors] = True

    def finish(self) -> int:
        """Write back what is no longer held; the dirty sectors that stay."""
        dirty = np.flatnonzero(self.dirty)
        gone = np.count_nonzero(self.stamp[dirty // LINE_SECTORS] <= self.fills - self.capacity)
        self.dram_written += int(gone)
        return dirty.size - int(gone)


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
    """How many programs, from the first on, a sampled launch should know the beginning of: two waves."""
    from gpukit import hardware

    gpu = hardware.gpu(launch.gpu)
    programs_per_sm, _ = _placed(launch, gpu, None)
    launch.recording.whole = len(launch.recording)
    return min(launch.programs, gpu.sms * min(_MAX_WINDOW, 2 * programs_per_sm))


@dataclass
class _Rows:
    """Accesses in some order, as columns; `row` is the row of the recording, `start` the address here."""

    program: np.ndarray
    step: np.ndarray
    row: np.ndarray
    start: np.ndarray

    def ordered(self, *keys: np.ndarray) -> np.ndarray:
        return np.lexsort(keys[::-1])


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
    counter = _Counter(recording, ways)
    scale = 1.0 if launch.sampled is None else launch.programs / launch.sampled
    whole = len(recording) if launch.sampled is None else recording.whole

    asked = np.zeros(len(recording.sites), dtype=np.int64)  # sectors of the warps' instructions, by site
    moved = np.zeros(len(recording.sites), dtype=np.int64)  # distinct sectors of the programs' accesses, by site
    sizes: dict[tuple, int] = {}
    for row in range(whole):
        site = recording.site[row]
        asked[site] += counter.asked(row)
        key = site, recording.tile[row], recording.start[row] % SECTOR_BYTES
        if key not in sizes:
            sizes[key] = recording.units(row, SECTOR_BYTES).size
        moved[site] += sizes[key]

    rows = _rows(recording) if launch.sampled is None else _reconstructed(recording, launch.programs, gpu)
    extent = max(recording.extent, int(rows.start.max(initial=0)) + STORAGE_ALIGNMENT)
    wave = gpu.sms * programs_per_sm
    present = len(np.unique(rows.program))
    if present < launch.programs:  # a window: two waves, or what there is
        wave = min(wave, max(1, -(-present // 2)))
    play = _Play(recording, rows, ways, gpu, wave, extent)
    sms = range(gpu.sms) if launch.sampled is None else range(0, gpu.sms, gpu.sms // _SAMPLED_SMS)
    missed = play.l1(l1, sms)
    share = np.ones(len(recording.sites))
    for site, (misses, reads) in play.l1_sites.items():
        share[site] = misses / reads
    dram, written, dirty = play.l2(gpu.l2_bytes, missed if launch.sampled is None else {}, launch.programs)

    rest = []
    for number, site in enumerate(recording.sites):
        if site.kind != "load":
            l2 = asked[number]
        elif launch.sampled is None:
            l2 = play.l2_read[number]
        else:
            l2 = moved[number] * share[number]
        bytes_read = round(dram[number] * SECTOR_BYTES)
        rest.append(
            SiteTraffic(
                site.kind, site.tensor, site.line, site.via, round(asked[number] * scale), round(l2 * scale), bytes_read
            )
        )

    def total(kind: str, name: str = "l2_sectors") -> int:
        return sum(getattr(s, name) for s in rest if s.kind == kind)

    return Traffic(
        gpu=gpu.key, layouts="assumed" if compiled is None else "compiled", programs_per_sm=programs_per_sm,
        waves=launch.programs / (gpu.sms * programs_per_sm), l1_bytes=l1,
        l1_read_sectors=total("load", "l1_sectors"), l2_read_sectors=total("load"), l2_write_sectors=total("store"),
        l2_atomic_sectors=total("atomic"), dram_read_bytes=sum(s.dram_bytes for s in rest),
        dram_write_bytes=round(written * SECTOR_BYTES), dirty_bytes=round(dirty * SECTOR_BYTES), sites=tuple(rest),
    )  # fmt: skip


def _compiled(launch: Launch, gpu: Gpu) -> Compiled | None:
    from gpukit.simulator.compile import CompileError, compile

    try:
        return compile(launch, gpu=gpu)
    except (CompileError, TypeError, ValueError, RuntimeError, OSError):
        return None


def _rows(recording: Recording) -> _Rows:
    program = np.array(recording.program, dtype=np.int64)
    return _Rows(program, _steps(program), np.arange(program.size), np.array(recording.start, dtype=np.int64))


def _steps(program: np.ndarray) -> np.ndarray:
    """Position of each row among its program's rows, which are neighbours."""
    begins = np.flatnonzero(np.diff(program, prepend=-1))
    return np.arange(program.size) - np.repeat(begins, np.diff([*begins, program.size]))


def _reconstructed(recording: Recording, programs: int, gpu: Gpu) -> _Rows:
    """The accesses of the first programs of a sampled launch. One that was cut short goes on like the nearest program that
    was not, from where its own accesses began; what it never reached goes to addresses of its own."""
    bounds: dict[int, list[int]] = {}
    for row, program in enumerate(recording.program):
        bounds.setdefault(program, [row, row + 1])[1] = row + 1
    complete = sorted({*recording.program[: recording.whole]})
    window = sorted({*recording.program[recording.whole :]})
    inside = sorted({*window, *(p for p in complete if p <= max(window, default=-1) or not window)})
    columns: list[list[np.ndarray]] = []
    beyond = recording.extent
    sites, tiles, starts = (np.array(c, dtype=np.int64) for c in (recording.site, recording.tile, recording.start))
    for program in inside:
        first, end = bounds[program]
        own = np.arange(first, end)
        if program not in recording.cut:
            columns.append([np.full(own.size, program), np.arange(own.size), own, starts[own]])
            continue
        donor = min(complete, key=lambda c: (abs(c - program), c))
        rows = np.arange(*bounds[donor])
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
            shift = shifts.get(site, shifts.get(recording.sites[site].tensor))
            if shift is None:
                low = starts[rows[regular]].min() // STORAGE_ALIGNMENT * STORAGE_ALIGNMENT
                span = starts[rows[regular]].max() - low + STORAGE_ALIGNMENT
                shift = beyond - low
                beyond += -(-span // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
            moved[regular] += shift
        columns.append([np.full(rows.size, program), np.arange(rows.size), rows, moved])
    return _Rows(*(np.concatenate(column) for column in zip(*columns, strict=True)))


class _Play:
    """The programs of a launch, played wave by wave."""

    def __init__(self, recording: Recording, rows: _Rows, ways: dict[Site, _Way], gpu: Gpu, wave: int, extent: int):
        self.recording, self.rows, self.gpu, self.wave = recording, rows, gpu, wave
        self.sectors_in_memory = -(-extent // SECTOR_BYTES)
        self.cached = np.array([s.kind == "load" and ways[s].through_l1 for s in recording.sites], dtype=bool)
        self.site = np.array(recording.site, dtype=np.int64)[rows.row]
        self.tile = np.array(recording.tile, dtype=np.int64)[rows.row]
        self.kinds = [site.kind for site in recording.sites]
        self.l1_sites: dict[int, list[int]] = {}
        self.l2_read = np.zeros(len(recording.sites), dtype=np.int64)
        self._relative: dict[tuple, np.ndarray] = {}

    def _sectors(self, i: int) -> np.ndarray:
        start, tile, site = int(self.rows.start[i]), int(self.tile[i]), int(self.site[i])
        key = tile, start % SECTOR_BYTES, site
        known = self._relative.get(key)
        if known is None:
            row = int(self.rows.row[i])
            origin = self.recording.start[row]
            if tile >= 0:
                shifted = self.recording.tiles[tile].moved(start % SECTOR_BYTES)
                known = touched(shifted, self.recording.sites[site].width, SECTOR_BYTES)
            else:
                known = self.recording.units(row, SECTOR_BYTES) - origin // SECTOR_BYTES
            self._relative[key] = known
        return known + start // SECTOR_BYTES

    def l1(self, capacity: int, sms) -> dict[int, np.ndarray]:
        """For each row through L1 that hit at least once: the sectors that did not."""
        missed: dict[int, np.ndarray] = {}
        rows = self.rows
        sm = rows.program % self.gpu.sms
        order = rows.ordered(sm, rows.program // self.wave, rows.step, rows.program)
        order = order[self.cached[self.site[order]] & np.isin(sm[order], list(sms))]
        cache, current = _L1(self.sectors_in_memory, capacity), -1
        for i in order.tolist():
            if sm[i] != current:
                current = sm[i]
                cache.next_sm()
            sectors = self._sectors(i)
            rest = cache.read(sectors)
            counts = self.l1_sites.setdefault(int(self.site[i]), [0, 0])
            counts[1] += sectors.size
            if rest is None:
                counts[0] += sectors.size
            else:
                missed[i] = rest
                counts[0] += rest.size
        return missed

    def l2(self, capacity: int, missed: dict[int, np.ndarray], programs: int) -> tuple[np.ndarray, float, float]:
        """Sectors read from DRAM by site, sectors written to it, and those that stay in L2. Where only the first waves
        are known, each later one is taken to be like the last of these."""
        rows = self.rows
        waves = rows.program // self.wave
        order = rows.ordered(waves, rows.step, rows.program)
        cache = _L2(self.sectors_in_memory, capacity)
        read = np.zeros(len(self.kinds), dtype=np.float64)
        last_read, last_dirty, last_fills = read, 0, cache.fills
        done: set[tuple[int, int]] = set()
        now = wave = -1
        for i in order.tolist():
            if waves[i] != wave:
                wave, last_read, last_dirty, last_fills = waves[i], read.copy(), cache.dirtied, cache.fills
            if rows.step[i] != now:
                now = rows.step[i]
                done.clear()
            site, kind = int(self.site[i]), self.kinds[self.site[i]]
            if kind == "load" and i not in missed:
                place = int(self.tile[i]), int(rows.start[i])
                if place in done:  # another program read the same at the same time
                    self.l2_read[site] += self._relative[place[0], place[1] % SECTOR_BYTES, site].size
                    continue
                done.add(place)
            sectors = missed[i] if i in missed else self._sectors(i)
            if kind == "load":
                self.l2_read[site] += sectors.size
            if kind != "store":
                read[site] += cache.read(sectors)
            if kind != "load":
                cache.write(sectors)
        left = cache.finish()
        known = len(np.unique(rows.program))
        if known == programs:
            return read, float(cache.dram_written), float(left)
        more = (programs - known) / max(1, len(np.unique(rows.program[waves == wave])))
        dirtied = cache.dirtied + (cache.dirtied - last_dirty) * more
        fills = cache.fills - cache.capacity + (cache.fills - last_fills) * more
        left = dirtied * min(1.0, cache.capacity / max(1, fills))  # what is written and what is read leave L2 alike
        return read + (read - last_read) * more, dirtied - left, left
