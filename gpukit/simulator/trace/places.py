"""What integers in memory say of the programs of a sampled launch that did not run: where they gather, and how long they are.

    row = tl.load(id_ptr + pid * BLOCK + i)
    tl.load(table_ptr + row[:, None] * N + tl.arange(0, N))

The programs that ran show that the second load lies so many bytes further on for each 1 that the first one has read, and that each
element of ids is read by one program. Then ids itself says which rows the other programs ask for. Some rows are asked for far more
often than others, and L2 holds these. A few programs do not show that: what they have in common says little of what thousands have.

Where programs read different numbers of ids, as those of a graph's nodes do, the length of ids says how much all of them have to do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from gpukit.simulator.interpreter.addresses import SECTOR_BYTES
from gpukit.simulator.trace.levels import LINE_BYTES, LINE_SECTORS
from gpukit.simulator.trace.recording import Recording

_PAIR_BYTES = 2 * SECTOR_BYTES  # which one read of DRAM brings
_PAIRS = LINE_SECTORS // 2  # of a line
_MOST_ROWS = 1024  # of one site, which are compared with the integers before them
_MOST_USES = 1 << 20  # of lines that are followed
_ALIKE, _LEAST = (
    0.02,
    0.1,
)  # programs whose lengths differ by no more are alike; none stands for less than this part of its share
# L2 has two halves. A line is in the half that its address belongs to, and also in the other one once an SM there has read it: after n
# uses by any SM it takes the room of 2 - 2 ** -n lines in the mean. L2_HOLDS counts lines that were read once, of 1.5 lines' room. In
# their measure the second use adds 1/6 of a line, and the third 1/12; what further ones add is left out.
_AGAIN = 1 / 6, 1 / 12


class Places(NamedTuple):
    """The accesses of one site in the order of programs, one for each integer that was read or for each lane. `starts` says where each of
    them begins in the imaginary memory, and `offsets` how far from there the bytes lie that it asks for. They are all that the
    launch makes, or all of its first `part`."""

    starts: np.ndarray
    offsets: np.ndarray
    part: float = 1.0


def places(recording: Recording) -> dict[int, Places]:
    """Where the loads and the atomics of a sampled launch go that are no tiles: the sites of which that is known."""
    found = _by_integers(recording)
    for site in {recording.site[row] for row in range(recording.whole) if recording.tile[row] < 0} - {*found}:
        if recording.sites[site].kind != "store" and (begun := _by_beginnings(recording, site)):
            found[site] = begun
    return found


def _by_integers(recording: Recording) -> dict[int, Places]:
    """Those that go by integers in memory, each of which is read once."""
    whole = np.arange(recording.whole)
    sites, tiles = (np.array(column, dtype=np.int64)[whole] for column in (recording.site, recording.tile))
    gathers = [site for site in np.unique(sites[tiles < 0]).tolist() if recording.sites[site].kind != "store"]
    if not gathers:
        return {}
    sources = {site: read for site in np.unique(sites).tolist() if (read := _integers(recording, site)) is not None}
    found = {}
    for site in gathers:
        for source, numbers in sources.items():
            if source != site and (law := _law(recording, sites, site, source, numbers)):
                if _each_once(recording, sites, source, numbers.size):
                    found[site] = Places(law[0] * numbers.astype(np.int64), law[1])
                    break
    return found


def _by_beginnings(recording: Recording, site: int) -> Places | None:
    """A site that programs visit several times, always as far from where they were first, and in the same line or the next. The first
    programs of the launch were cut short after one visit, which then says where the others go. None where that is not so."""
    sites, programs = np.array(recording.site, dtype=np.int64), np.array(recording.program, dtype=np.int64)
    if not recording.cut:
        return None
    rows = np.flatnonzero(sites == site)
    firsts = rows[np.sort(np.unique(programs[rows], return_index=True)[1])]
    begins = dict(zip(programs[firsts].tolist(), firsts.tolist(), strict=True))
    further: dict[int, list[int]] = {}
    for row in rows[rows < recording.whole].tolist():
        apart = _offsets(recording, row), _offsets(recording, begins[recording.program[row]])
        if apart[0].size != apart[1].size or (apart[0] - apart[1] != apart[0][0] - apart[1][0]).any():
            return None
        further.setdefault(recording.program[row], []).append(int(apart[0][0] - apart[1][0]))
    last, steps = max(recording.cut) + 1, {tuple(own) for own in further.values()}
    if len(steps) != 1 or not all(program in begins for program in range(last)):
        return None
    if max(map(max, steps)) - min(map(min, steps)) >= LINE_BYTES:  # what lies further on is asked for later
        return None
    starts = np.concatenate([_offsets(recording, begins[program]) for program in range(last)])
    return Places(starts, np.unique(*steps), last / recording.call.programs)


def _integers(recording: Recording, site: int) -> np.ndarray | None:
    """What lies in the tensor that a site loads from; None where these are no integers, or unknown."""
    own = recording.sites[site]
    tensor = recording.call.arguments.get(own.tensor)
    if own.kind != "load" or not isinstance(tensor, torch.Tensor) or tensor.is_floating_point() or tensor.is_meta:
        return None
    everything = tensor.new_empty(0).set_(tensor.untyped_storage(), 0, (_elements(tensor),))
    return everything.cpu().numpy()


def _elements(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _offsets(recording: Recording, row: int) -> np.ndarray:
    """Where the live lanes of a row are in the imaginary memory."""
    tile = recording.tile[row]
    lanes = recording.tiles[tile].offsets() if tile >= 0 else recording.irregular[-1 - tile].offsets
    return lanes.reshape(-1) + recording.start[row]


def _read(recording: Recording, row: int, width: int) -> np.ndarray:
    """The numbers of the elements of its tensor that a row reads."""
    return (_offsets(recording, row) - recording.base_of(recording.site[row])) // width


def _law(
    recording: Recording, sites: np.ndarray, site: int, source: int, numbers: np.ndarray
) -> tuple[int, np.ndarray] | None:
    """The law of a site whose accesses go by what the site `source` has read just before: by how many bytes they move for each 1 that
    was read, and which bytes they ask for where a 0 was read. None if any row breaks it."""
    last, scale, patterns = -1, None, {}
    for row in np.flatnonzero((sites == site) | (sites == source)).tolist():
        if sites[row] == source:
            if len(patterns) == _MOST_ROWS:
                break
            last = row
            continue
        if last < 0 or recording.program[last] != recording.program[row]:
            return None
        if recording.tile[row] >= 0:  # of a few live lanes, which chance made a grid
            continue
        own = numbers[_read(recording, last, recording.sites[source].width)].astype(np.int64)
        lanes = _offsets(recording, row)
        if lanes.size % own.size:
            return None
        lanes = lanes.reshape(own.size, -1)
        other = np.flatnonzero(own != own[0])
        if scale is None and other.size:
            scale, rest = divmod(int(lanes[other[0], 0] - lanes[0, 0]), int(own[other[0]] - own[0]))
            if rest or not scale:
                return None
        if scale is None:
            continue
        lanes = lanes - scale * own[:, None]
        if (lanes != lanes[0]).any():
            return None
        patterns.setdefault(last, []).append(lanes[0])
    if not patterns:
        return None
    found = [np.unique(np.concatenate(lanes)) for lanes in patterns.values()]
    return (scale, found[0]) if all(np.array_equal(each, found[0]) for each in found) else None


def _each_once(recording: Recording, sites: np.ndarray, source: int, size: int) -> bool:
    """Whether the programs of the launch together seem to have each of the `size` elements of a tensor once, and later programs what
    comes later: those that ran have no element twice, and so many that all programs would have `size` of them, within four standard
    errors of a sample whose programs differ."""
    of_program: dict[int, list[int]] = {}
    for row in np.flatnonzero(sites == source).tolist():
        of_program.setdefault(recording.program[row], []).append(row)
    call = recording.call
    counts = np.array([sum(_lanes(recording, row) for row in rows) for rows in of_program.values()])
    counts = np.append(counts, np.zeros(call.sampled - counts.size, dtype=np.int64))  # programs that have none
    of_all = counts.sum() * call.programs / call.sampled
    error = 4 * counts.std() * counts.size**0.5 * call.programs / call.sampled
    if abs(of_all - size) > error + 0.05 * size:
        return False
    last = -1
    for _, rows in sorted(of_program.items()):
        if min(recording.start[row] for row in rows) < last:  # so most of what programs share needs no closer look
            return False
        own = np.concatenate([_offsets(recording, row) for row in rows])
        if own.min() <= last or not ((np.diff(own) > 0).all() or np.unique(own).size == own.size):
            return False
        last = int(own.max())
    return True


def used_once(recording: Recording) -> set[int]:
    """Loads by which the programs of a sampled launch together have each element of a tensor once."""
    sites = np.array(recording.site, dtype=np.int64)[: recording.whole]
    found = set()
    for site in np.unique(sites).tolist():
        tensor = recording.call.arguments.get(recording.sites[site].tensor)
        if recording.sites[site].kind == "load" and isinstance(tensor, torch.Tensor):
            if _each_once(recording, sites, site, _elements(tensor)):
                found.add(site)
    return found


def stand_for(recording: Recording, programs: Sequence[int]) -> dict[int, float]:
    """How many programs of the launch each of `programs` stands for, which ran whole. That is the same for all of them, but where the
    programs have different numbers of elements of a tensor and each element once. Then the size of the tensor says how many all
    programs have, and long ones stand for fewer programs than short ones if by chance too many long ones ran (or the other way
    round): for a number that goes up or down with their length along a line, as survey statisticians calibrate their samples."""
    call, programs = recording.call, sorted(programs)
    even = call.programs / max(1, len(programs))
    lanes = np.array([_lanes(recording, row) for row in range(recording.whole)])
    sites, of = (np.array(c, dtype=np.int64)[: recording.whole] for c in (recording.site, recording.program))
    for site in np.argsort(-np.bincount(sites, lanes), kind="stable").tolist() if len(programs) < call.programs else ():
        here, tensor = sites == site, call.arguments.get(recording.sites[site].tensor)
        counts = np.bincount(np.searchsorted(programs, of[here]), lanes[here], minlength=len(programs))
        if recording.sites[site].kind == "atomic" or not isinstance(tensor, torch.Tensor):
            continue
        if counts.std() > _ALIKE * counts.mean() and _each_once(recording, sites, site, _elements(tensor)):
            apart = counts - counts.mean()
            slope = (_elements(tensor) / call.programs - counts.mean()) / apart.var()
            found = np.maximum(_LEAST, 1 + slope * apart)
            found *= call.programs / found.sum()
            return dict(zip(programs, found.tolist(), strict=True))
    return dict.fromkeys(programs, even)


def _lanes(recording: Recording, row: int) -> int:
    tile = recording.tile[row]
    return math.prod(recording.tiles[tile].extents) if tile >= 0 else recording.irregular[-1 - tile].offsets.size


def sectors_read(found: Sequence[Places], others: float, capacity: int) -> list[float] | None:
    """How many sectors each of `found` reads from DRAM. All of them are made side by side, while the launch brings `others` lines more
    into L2, which holds `capacity` lines: what was used last is still there if no more lines than that were used since. None where
    the part of the launch that is known uses fewer."""
    uses = sum(each.starts.size * np.unique(each.offsets // _PAIR_BYTES).size for each in found)
    some = 1 << max(0, (uses // _MOST_USES).bit_length())  # of so many lines one is followed
    line, pair, time, of = _all_uses(found, some)
    since = _since(line, time, 1 + len(_AGAIN))
    part = np.array([each.part for each in found])

    def taken(window: float) -> float:
        """Lines of L2 that are taken by what is used in a window of the launch, in the mean of all that there are."""
        begins = np.maximum(1e-9, part - window)[of]  # the windows begin from 0 to here
        seen = [np.minimum(time, begins) - np.maximum(0, time - np.minimum(each, window)) for each in since]
        each = sum(w * np.maximum(0, own) / begins for w, own in zip(_weights(), seen, strict=True))
        return others * window + some * float(np.sum(each))

    low, high = 0.0, float(part.min())
    if taken(high) < capacity:
        if high < 1:
            return None
        low = high
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if taken(middle) < capacity else (low, middle)
    missed = _since(pair, time, 1)[0] > low
    counts, later = (np.bincount(of[those], minlength=len(found)) for those in (missed, missed & (time > low)))
    rest = later / np.maximum(1e-9, part - low) * (1 - part)
    return (2.0 * some * (counts + rest)).tolist()


def _all_uses(found: Sequence[Places], some: int) -> tuple[np.ndarray, ...]:
    """The lines, the pairs of sectors and the times of the uses by all of `found`, in the order of time, and which makes each. What one
    asks for another may have brought just before: a row and its scale behind it."""
    columns = [_uses(each, some) for each in found]
    of = np.repeat(np.arange(len(found)), [own[0].size for own in columns])
    line, pair, time = (np.concatenate(each) for each in zip(*columns, strict=True))
    order = np.lexsort((of, time))
    return line[order], pair[order], time[order], of[order]


def _weights() -> list[float]:
    """What the time since the last use of a line counts, the one since the use before it, and so on, so that the first use of a line in a
    window counts 1 and the n-th one _AGAIN[n - 2]."""
    adds = [1.0, *_AGAIN]
    return [*(one - other for one, other in itertools.pairwise(adds)), adds[-1]]


def _uses(places: Places, some: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The lines, the pairs of sectors and the times, as parts of the launch, of the uses of one line out of `some`."""
    columns: list[list[np.ndarray]] = [[np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]]
    begins = places.starts % _PAIR_BYTES
    for begin in np.unique(begins).tolist():
        draws = np.flatnonzero(begins == begin)
        for further in np.unique((places.offsets + begin) // _PAIR_BYTES).tolist():
            pair = places.starts[draws] // _PAIR_BYTES + further
            kept = (pair // _PAIRS * 0x9E3779B1 & 0xFFFFFFFF) >> 8 & some - 1 == 0
            for column, own in zip(columns, (pair[kept], draws[kept]), strict=True):
                column.append(own)
    pair, draw = (np.concatenate(column) for column in columns)
    order = np.argsort(draw, kind="stable")
    pair, draw = pair[order], draw[order]
    return pair // _PAIRS, pair, (draw + 0.5) / places.starts.size * places.part


def _since(unit: np.ndarray, time: np.ndarray, uses: int) -> list[np.ndarray]:
    """How long before each use of a unit the last one was, the one before that, and so on, `uses` of them; infinite where there was
    none."""
    order = np.argsort(unit, kind="stable")
    sorted_unit, sorted_time = unit[order], time[order]
    found = []
    for back in range(1, uses + 1):
        since = np.full(unit.size, np.inf)
        same = np.flatnonzero(sorted_unit[back:] == sorted_unit[:-back])
        since[order[same + back]] = sorted_time[same + back] - sorted_time[same]
        found.append(since)
    return found
