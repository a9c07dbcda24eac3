"""What a GPU's caches make of a traced launch: sectors that reach L2, bytes that reach DRAM.

Programs go to the SMs in waves, program p to SM p mod sms, as many at a time as fit. Those of a wave take turns: the first
access of each, the second of each, and so on.

1. Each access is split into the instructions of its warps, and each of these into its distinct 32-byte sectors. Stores go
   through to L2. Where several instructions store to parts of one sector, most of them meet on the way (`ALONE`).
2. L1, one per SM and as large as shared memory leaves it, sees the loads of the SM's programs. What it does not hold is
   read from L2. Asynchronous copies of 16 bytes and tensor descriptors pass it by.
3. L2, one for all, lines of 128 bytes, sees everything. What it does not hold is read from DRAM, 64 bytes at a time; what
   is written stays until its line is needed for another one. Of a sampled launch, integers in memory may say which lines all
   programs gather, and how much these have to do (places.py).

L1 gives up the line that was used longest ago, and L2 one that was used long ago; L2's two halves may both hold a line (levels.py). Some
numbers are not derived but measured, on an H200, and taken for every GPU: the share ALONE, LINE_CLOCKS and COPY_CLOCKS
(instructions.py), L1_PLACES, L2_HOLDS, L2_SPREAD, L2_WAITS and L2_PARTS (levels.py). The table of python
-m gpukit.validation says how true the whole is, kernel by kernel, and why where it is not. What it leaves out: programs that
overtake one another, loads in flight, eviction hints, spilled registers below L2 (spills.py), the kernel's own code (some 10 kB).

Sources: https://docs.nvidia.com/nsight-compute/ProfilingGuide/#memory-tables (sectors, L1, L2),
https://docs.nvidia.com/cuda/hopper-tuning-guide/index.html#unified-shared-memory-l1-texture-cache (L1 and shared memory).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gpukit import tables
from gpukit.hardware import KIB, Gpu
from gpukit.simulator.compiler.occupancy import occupancy, reserved_shared_bytes
from gpukit.simulator.interpreter.addresses import SECTOR_BYTES
from gpukit.simulator.trace import coalesce
from gpukit.simulator.trace.contention import Contention, answers, contention, is_floating, merges
from gpukit.simulator.trace.instructions import ALONE, Form, Forms, alone_among_warps, ways_of
from gpukit.simulator.trace.levels import LINE_SECTORS
from gpukit.simulator.trace.recording import Recording
from gpukit.simulator.trace.spills import spills
from gpukit.simulator.trace.waves import WHOLE, Play, share

if TYPE_CHECKING:
    from gpukit.simulator.compiler.compile import Compiled

_SAMPLED_ROWS, _MAX_WINDOW = 60_000, 8  # of a sampled launch: accesses to play through the caches, and programs per SM


@dataclass(frozen=True)
class SiteTraffic:
    """What one tl.load, tl.store or atomic cost. `l1_sectors` are those its instructions asked for, `l2_sectors` those
    that reached L2, `dram_bytes` what was read from DRAM for it, `l1_clocks` the clocks
    that L1 takes for its instructions, whose lanes may meet in a bank or ask for many lines. Of a load's `instructions`, counted on the SMs
    whose L1 is followed, so many ask for something `new`, for which their warp has not asked before in this load: of so many it is in
    pairs of sectors that are new too, and of so many `late`, since L1 lacks it; of these so many are `fresh`: L1 has nothing of the
    pair of sectors that it is in. What the late ones of an access ask for lies in so many `pieces`, whose lines do not follow one
    another or those of the access before. There are so many `accesses`, and those with late instructions have `in_late` instructions;
    `late_parts` are the shares of such accesses in the first eighth of a program's, in the second, and so on. Of what was read from DRAM `dram_half_bytes`
    came as one half of a line, without the other. L2 gets so many `requests`, one for what an instruction moves of a line. Of
    a store's l2_sectors so many `odd_sectors` come in `odd_requests`, which fill some of them only in part. In so many lines a
    program's stores leave `parts` of sectors to others to fill, and in `small_parts` more they are smaller than a sector. Of what
    programs ask L2 for at different times, a share `first` comes from DRAM."""

    kind: str
    tensor: str
    line: int
    via: str
    l1_sectors: int
    l2_sectors: int
    dram_bytes: int
    l1_clocks: int = 0
    file: str = ""
    instructions: float = 0.0
    new: float = 0.0
    new_pairs: float = 0.0
    late: float = 0.0
    fresh: float = 0.0
    pieces: float = 0.0
    accesses: float = 0.0
    in_late: float = 0.0
    dram_half_bytes: int = 0
    requests: int = 0
    odd_sectors: int = 0
    odd_requests: int = 0
    parts: int = 0
    small_parts: int = 0
    first: float = 0.0
    late_parts: tuple[float, ...] = ()
    alone: int = 0


@dataclass(frozen=True)
class Traffic:
    """One launch on one GPU, with cold caches.

    l2_read_sectors     32-byte sectors from L2 to L1: of loads, of answers to atomics (without `unanswered_sectors`), and of
                        spilled registers that are loaded again
    l2_write_sectors    of stores, those of spilled registers included
    spilled_sectors     of these, what is stored because registers do not suffice
    reloaded_sectors    of l2_read_sectors, what is loaded again, a share `reloads_missed` of all such loads, which L1 lacks
    l2_atomic_sectors   of atomics
    dram_read_bytes, dram_write_bytes                      what L2 reads from and writes to DRAM while the kernel runs
    dirty_bytes                                            written, and still in L2 when the kernel ends
    pieces, piece_bytes                                    of both: parts of lines that leave L2 without the rest, and their bytes
    l1_hit_rate, l2_hit_rate                               of the sectors read there
    programs_per_sm, waves                                 how the grid was placed
    layouts                                                "compiled" or "assumed": where the warps' lanes are known from
    contention                                             how the atomics on each tensor meet
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
    contention: tuple[Contention, ...] = ()
    unanswered_sectors: int = 0  # of atomics that the compiler made reductions: nothing comes back
    reloaded_sectors: int = 0
    reloads_missed: float = 0.0
    pieces: int = 0
    piece_bytes: int = 0

    @property
    def l1_hit_rate(self) -> float:
        missed = self.l2_read_sectors + self.unanswered_sectors - self.l2_atomic_sectors - self.reloaded_sectors
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
            ("placed", f"{self.programs_per_sm} programs per SM, {self.waves:.2f} waves; lanes as {self.layouts}"),
        ]
        if self.l2_atomic_sectors:
            lines.insert(3, ("atomics", f"{self.l2_atomic_sectors:,} sectors"))
        return "\n".join(tables.facts(lines, width=12))

    def __str__(self) -> str:
        return self.report()


_LEAST_L1 = 28 * KIB
_PREFERS_SHARED = 48 * KIB  # for more than that, Triton asks the driver for as much shared memory as there is


def l1_bytes(gpu: Gpu, shared_bytes: int, programs_per_sm: int) -> int:
    """What shared memory leaves to L1: both share one memory, 28 KiB larger than the most that can be shared."""
    if shared_bytes > _PREFERS_SHARED:
        return _LEAST_L1
    whole = gpu.smem_per_sm_bytes + _LEAST_L1
    wanted = (shared_bytes + reserved_shared_bytes(gpu)) * programs_per_sm if shared_bytes else 0
    sizes = [size * KIB for size in (0, 8, 16, 32, 64, 100, 132, 164, 196, 228) if size * KIB <= gpu.smem_per_sm_bytes]
    return whole - next((size for size in sizes if size >= wanted), gpu.smem_per_sm_bytes)


def _placed(recording: Recording, gpu: Gpu, compiled: Compiled | None) -> tuple[int, int]:
    """Programs per SM and shared memory of each."""
    if compiled is not None:
        return max(1, compiled.occupancy.programs), compiled.shared_bytes
    threads = coalesce.LANES * recording.call.num_warps
    largest = max((site.lanes for site in recording.sites), default=1)
    registers = min(255, 24 + 3 * largest // (2 * threads))
    shared = 0
    if recording.dots:
        loads = {site.shape: site for site in recording.sites if site.kind == "load" and len(site.shape) > 1}
        shared = int(recording.call.options.get("num_stages") or 3) * sum(s.lanes * s.width for s in loads.values())
    shared = min(shared, gpu.smem_per_block_bytes)
    return max(1, occupancy(gpu, recording.call.num_warps, registers, shared).programs), shared


def window(recording: Recording, gpu: Gpu) -> int:
    """How many programs, from the first on, a sampled launch should know the beginning of: two waves, or more where
    programs are short, since only the compiled kernel says how many fit on an SM."""
    programs_per_sm, _ = _placed(recording, gpu, None)
    recording.whole = len(recording)
    each = max(1, recording.whole // max(1, recording.call.sampled))  # accesses of a program
    per_sm = max(2 * programs_per_sm, min(_MAX_WINDOW, _SAMPLED_ROWS // (each * gpu.sms)))
    return min(recording.call.programs, gpu.sms * per_sm)


def _left_in_part(recording: Recording, forms: Forms, rows: np.ndarray) -> np.ndarray:
    """[2, sites]: the lines with sectors that these rows' programs, and those that they stand for, fill only in part by all that they
    store there, and have not read; last those in which they store less than a sector's size, and nothing in the lines beside them."""
    program = np.array(recording.program, dtype=np.int64)[rows]
    kept, which, _ = forms.of(rows, forms.starts[rows])
    stores = [recording.sites[form.site].kind == "store" for form in kept]
    odd = [is_store and bool((form.filled < SECTOR_BYTES).any()) for form, is_store in zip(kept, stores, strict=True)]
    written = {recording.sites[form.site].tensor for form, is_odd in zip(kept, odd, strict=True) if is_odd}
    counts = np.zeros((2, len(recording.sites)))
    if not written:
        return counts
    # What of these tensors was read is there, as if it were stored whole.
    reads = [
        recording.sites[form.site].kind == "load" and recording.sites[form.site].tensor in written for form in kept
    ]
    chosen = np.flatnonzero(np.array(odd)[which] | np.array(reads)[which])
    columns: list[list[np.ndarray]] = [[], [], [], []]
    for at in chosen.tolist():
        form = kept[which[at]]
        sectors = form.sectors + int(forms.starts[rows[at]]) // SECTOR_BYTES
        filled = np.full(sectors.size, int(WHOLE)) if reads[which[at]] else form.filled.astype(np.int64)
        for column, own in zip(columns, (program[at], sectors, filled, form.site), strict=True):
            column.append(np.broadcast_to(own, sectors.shape))
    programs, sectors, filled, sites = (np.concatenate(column) for column in columns)
    _, first, own = np.unique(programs * (int(sectors.max()) + 1) + sectors, return_index=True, return_inverse=True)
    filled = np.bincount(own, filled)
    lines = sectors[first] // LINE_SECTORS
    keys = programs[first] * (int(lines.max()) + 2) + lines
    keys, line, own = np.unique(keys, return_index=True, return_inverse=True)
    odd = np.bincount(own, filled < SECTOR_BYTES) > 0
    alone = (np.diff(keys, prepend=-2) > 1) & (np.diff(keys, append=keys[-1] + 2) > 1)
    small = alone & (np.bincount(own, filled) < SECTOR_BYTES)
    for i, some in enumerate((odd & ~small, odd & small)):
        at = first[line[some]]
        stand_for = [recording.stands_for.get(program, 1.0) for program in programs[at].tolist()]
        counts[i] = np.bincount(sites[at], stand_for, minlength=len(recording.sites))
    return counts


# A store of a warp meets the one before to its sector if no more than so many stores are between. (On an H200, of those with none, one and
# seven in between all, 57 and 78%, and none were seen to meet.)
_SOON = 4
_AT_ONCE = 16  # statements that are looked at together


def _stored_again(
    recording: Recording, forms: Forms, rows: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """What stores that follow one another, as those of the parts of complex numbers, store to sectors of those before them. The
    first site of each site's like, or itself; and [3, sites]: sectors of their warps' instructions, distinct ones, and those that
    are filled in part by each and as a whole by all. The programs of rows stand for so many (`weights`)."""
    sites = recording.sites
    like, again = np.arange(len(sites)), np.zeros((3, len(sites)))
    kept, which, _ = forms.of(rows, forms.starts[rows])
    program, begin = np.array(recording.program, dtype=np.int64)[rows], forms.starts[rows] // SECTOR_BYTES
    stores = np.array([site.kind == "store" for site in sites], dtype=bool)[forms.sites[rows]]
    first = np.flatnonzero(~stores | np.diff(program, prepend=-1).astype(bool) | ~np.roll(stores, 1))
    groups: Counter = Counter()
    ends = np.append(first[1:], rows.size)[: first.size]
    follow = ends - first > 1
    for begins, end in zip(first[follow].tolist(), ends[follow].tolist(), strict=True):
        for i in range(begins, end, _AT_ONCE):
            members = tuple((int(which[r]), int(begin[r] - begin[i])) for r in range(i, min(end, i + _AT_ONCE)))
            groups[members] += 1.0 if weights is None else float(weights[i])
    for members, weight in groups.items():
        by_tensor: dict[str, list[tuple[Form, np.ndarray]]] = {}
        for number, moved in members:
            form = kept[number]
            way = forms.ways[sites[form.site]].of(0)
            in_between = np.inf if way is None else len(way) / forms.ways[sites[form.site]].warps
            if form.asked < form.lanes and in_between <= _SOON:
                by_tensor.setdefault(sites[form.site].tensor, []).append((form, form.sectors + moved))
        for those in by_tensor.values():
            all_sectors, place = np.unique(np.concatenate([sectors for _, sectors in those]), return_inverse=True)
            filled = np.bincount(place, np.concatenate([form.filled for form, _ in those]))
            seen = np.zeros(all_sectors.size, dtype=bool)
            for form, sectors in those:
                at = np.searchsorted(all_sectors, sectors)
                before = np.count_nonzero(seen[at])
                if before:
                    like[form.site] = like[those[0][0].site]
                partial = form.filled < SECTOR_BYTES
                gone = partial & (seen[at] | (filled[at] >= SECTOR_BYTES))
                met = form.warps * before / max(1, sectors.size)
                again[:, form.site] += weight * np.array([met, before, np.count_nonzero(gone)])
                seen[at] = True
    return like, again


def _shares(late: np.ndarray, each: np.ndarray) -> tuple[float, ...]:
    """Part by part. Where a program has fewer accesses than there are parts, one is for the parts without any behind it, too."""
    last = np.maximum.accumulate(np.where(each > 0, np.arange(each.size), 0))
    return tuple((late[last] / np.maximum(each[last], 1)).tolist())


def _still_odd(asked: float, distinct: float, partly: float, to_l2: float) -> float:
    """Of the stores that fill sectors only in part, how many reach L2 and still do. Of the sectors that several fill together, those
    become whole where all of these meet."""
    met, again = asked - to_l2, asked - distinct
    together = (met / again) ** (asked / distinct - 1) if again else 0.0
    return max(0.0, to_l2 - min(met, together * (distinct - partly))) / asked


def traffic(recording: Recording, gpu: Gpu, compiled: Compiled | None) -> Traffic:
    """See Launch.traffic; without the compiled kernel its layouts are assumed."""
    call = recording.call
    if not recording.complete:
        raise ValueError(
            f"{call.kernel} made too many irregular accesses to keep: trace fewer programs, or with sample=N"
        )
    programs_per_sm, shared = _placed(recording, gpu, compiled)
    l1 = l1_bytes(gpu, shared, programs_per_sm)
    ways = ways_of(recording, compiled)
    forms = Forms(recording, ways)

    # By site: sectors that the instructions of the programs that ran ask for, and the distinct ones of each access; of those
    # asked for again the ones that may meet the store before, which is the same warp's or another's; clocks of L1 for
    # them; updates of sectors by atomics.
    asked, distinct, of_one_warp, of_others, clocks, updated = np.zeros((6, len(recording.sites)))
    requests, odd, odd_sectors, partly, alone = np.zeros((5, len(recording.sites)))
    added_up = [merges(is_floating(call.arguments.get(site.tensor)), compiled) for site in recording.sites]
    ran = np.arange(len(recording) if call.sampled is None else recording.whole)
    stand_for = None  # how many accesses of all programs each of these stands for
    if call.sampled is not None:
        stand_for = np.array([recording.stands_for[recording.program[row]] for row in ran.tolist()])
    for form, count in zip(*forms.counted(ran, stand_for), strict=True):
        asked[form.site] += count * form.asked
        distinct[form.site] += count * form.sectors.size
        clocks[form.site] += count * form.clocks
        updated[form.site] += count * form.updated(added_up[form.site])
        requests[form.site] += count * form.requests
        odd[form.site] += count * form.odd
        odd_sectors[form.site] += count * form.odd_sectors
        alone[form.site] += count * form.alone
        partly[form.site] += count * np.count_nonzero(form.filled < SECTOR_BYTES)
        if form.asked < form.lanes:  # else each lane has a sector of its own, and none of them meet
            of_one_warp[form.site] += count * (form.asked - form.warps)
            of_others[form.site] += count * (form.warps - form.sectors.size)

    like, (warps_again, distinct_again, completed) = _stored_again(recording, forms, ran, stand_for)
    of_one_warp += warps_again
    of_others *= 1 - share(distinct_again, distinct)

    def together(column: np.ndarray) -> np.ndarray:
        """Of all sites that store to the same sectors, one behind the other."""
        return np.bincount(like, column, minlength=len(like))[like]

    through_l1 = sum(
        n for n, site in zip(distinct, recording.sites, strict=True) if site.kind == "load" and ways[site].through_l1
    )
    local = spills(recording, compiled, l1, programs_per_sm, through_l1 * SECTOR_BYTES / max(1, call.programs))
    play = Play(recording, gpu, ways, forms, programs_per_sm)
    missed = play.l1(round(l1 * local.left))
    dram = play.l2(gpu.l2_bytes, distinct)

    each, late = play.late_parts
    parts = _left_in_part(recording, forms, ran)
    others_alone = alone_among_warps(compiled)
    all_asked, all_distinct, all_partly = (
        together(column) for column in (asked, distinct - distinct_again, partly - completed)
    )
    arriving = all_asked - (1 - ALONE) * together(of_one_warp) - (1 - others_alone) * together(of_others)
    sites = []
    for number, site in enumerate(recording.sites):
        to_l2 = updated[number]  # of atomics
        if site.kind == "load":
            copied = ways[site].copies and not ways[site].through_l1  # each instruction by itself
            to_l2 = asked[number] if copied else distinct[number] * missed[number]
        elif site.kind == "store":
            to_l2 = asked[number] * arriving[number] / all_asked[number] if asked[number] else 0.0
        from_dram = round(dram.read[number] * SECTOR_BYTES)
        arrive = to_l2 / asked[number] if asked[number] else 0.0  # of the requests
        still_odd = (
            _still_odd(all_asked[number], all_distinct[number], all_partly[number], arrive * all_asked[number])
            if odd[number]
            else 0.0
        )
        l1_sectors, l2_sectors = round(asked[number]), round(to_l2)
        sites.append(
            SiteTraffic(
                site.kind, site.tensor, site.line, site.via, l1_sectors, l2_sectors, from_dram, round(clocks[number]),
                site.file, *play.waiting[:, number].tolist(), round(from_dram * dram.halves[number]),
                round(requests[number] * arrive), round(odd_sectors[number] * still_odd), round(odd[number] * still_odd),
                *(round(n) for n in parts[:, number]), float(dram.first[number]),
                _shares(late[number], each[number]), round(alone[number]),
            )
        )  # fmt: skip

    def total(kind: str, name: str = "l2_sectors") -> int:
        return sum(getattr(s, name) for s in sites if s.kind == kind)

    unanswered = sum(s.l2_sectors for s in sites if s.kind == "atomic" and not answers(s.line, compiled))
    spilled, reloaded = round(local.stored * call.programs), round(local.loaded * local.missed * call.programs)
    return Traffic(
        gpu=gpu.key, layouts="assumed" if compiled is None else "compiled", programs_per_sm=programs_per_sm,
        waves=call.programs / (gpu.sms * programs_per_sm), l1_bytes=l1,
        l1_read_sectors=total("load", "l1_sectors"), l2_read_sectors=total("load") + total("atomic") - unanswered + reloaded,
        l2_write_sectors=total("store") + spilled, l2_atomic_sectors=total("atomic"), spilled_sectors=spilled,
        dram_read_bytes=sum(s.dram_bytes for s in sites) + round(dram.completed * SECTOR_BYTES),
        dram_write_bytes=round(dram.written * SECTOR_BYTES), dirty_bytes=round(dram.dirty * SECTOR_BYTES),
        sites=tuple(sites), contention=contention(recording, forms, compiled, min(call.programs, gpu.sms * programs_per_sm)),
        unanswered_sectors=unanswered, reloaded_sectors=reloaded, reloads_missed=local.missed,
        pieces=round(dram.pieces), piece_bytes=round(dram.piece_sectors * SECTOR_BYTES),
    )  # fmt: skip
