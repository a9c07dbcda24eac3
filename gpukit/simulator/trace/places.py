"""Where a gather goes in all programs of a sampled launch: told from the integers in memory by which it goes.

    row = tl.load(id_ptr + pid * BLOCK + i)
    tl.load(table_ptr + row[:, None] * N + tl.arange(0, N))

The programs that ran show that an access lies `scale` bytes further on for each 1 that was read, and that each element of ids is
read by one program. So the ids themselves say which rows the other programs ask for: some far more often than others, and L2
holds these. A program of a sampled launch that did not run is only known to ask for as many rows as its neighbors do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from gpukit.simulator.interpreter.addresses import SECTOR_BYTES
from gpukit.simulator.trace.levels import LINE_SECTORS
from gpukit.simulator.trace.recording import Recording

_PAIR_BYTES = 2 * SECTOR_BYTES  # which one read of DRAM brings
_PAIRS = LINE_SECTORS // 2  # of a line
_MOST_ROWS = 1024  # of one site, which are compared with the integers before them
_MOST_USES = 1 << 20  # of lines that are followed
# What SMs of both halves of L2 read is in both. A line that was read once is in 1.5 halves in the mean, one that was read so many
# times in 2 - 2 ** -times. L2_HOLDS was measured with lines that are read once between two looks: by that each further use
# adds to what the first one takes.
_AGAIN = 1 / 6, 1 / 12


class Places(NamedTuple):
    """The accesses of one site, one for each integer that was read or for each lane, in the order of programs: where they begin in the
    imaginary memory, how far the bytes lie from there that each of them asks for, and of which part of the launch, from its first
    program on, these are all."""

    starts: np.ndarray
    offsets: np.ndarray
    part: float = 1.0


def places(recording: Recording) -> dict[int, Places]:
    """Of a sampled launch, by site: where its loads and atomics go that are no tiles, where that is known."""
    found = _by_integers(recording)
    for site in {recording.site[row] for row in range(recording.whole) if recording.tile[row] < 0} - {*found}:
        if recording.sites[site].kind != "store" and (begun := _by_beginnings(recording, site)):
            found[site] = begun
    return found


def _by_integers(recording: Recording) -> dict[int, Places]:
    """Where they go by integers in memory of which each is read once."""
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
    """Of a sampled launch whose programs were cut short: the places of a site that is visited several times, always as far from where
    it was first, by what the first programs of the launch do there first. None where that is not so."""
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
    last = max(recording.cut) + 1
    if len({tuple(own) for own in further.values()}) != 1 or not all(program in begins for program in range(last)):
        return None
    starts = np.concatenate([_offsets(recording, begins[program]) for program in range(last)])
    return Places(starts, np.unique(next(iter(further.values()))), last / recording.call.programs)


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
    """The `scale` by which the accesses of a site move with what the site `source` has read just before, and the bytes that they
    ask for where that is 0; None if they go otherwise in any row."""
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
    """Whether all programs together seem to read each of `size` elements once, and later programs what comes later: those that
    ran read no element twice, and as many as are theirs, but for what chance makes of programs that differ."""
    rows = np.flatnonzero(sites == source)
    width = recording.sites[source].width
    of_program: dict[int, list[np.ndarray]] = {}
    for row in rows.tolist():
        of_program.setdefault(recording.program[row], []).append(_read(recording, row, width))
    read = {program: np.concatenate(own) for program, own in sorted(of_program.items())}
    counts = np.array([own.size for own in read.values()])
    everything = np.concatenate([*read.values()])
    firsts = np.array([own.min() for own in read.values()])
    lasts = np.array([own.max() for own in read.values()])
    if np.unique(everything).size < everything.size or (firsts[1:] <= lasts[:-1]).any():
        return False
    call = recording.call
    expected = counts.sum() * call.programs / call.sampled
    error = 2 * counts.std() * len(counts) ** 0.5 * call.programs / call.sampled
    return abs(expected - size) <= error + 0.05 * size


def sectors_read(found: Sequence[Places], others: float, capacity: int) -> list[float] | None:
    """The sectors that accesses read from DRAM, those of all `found` made side by side while the launch brings `others` lines more
    into L2, which holds `capacity` lines. A line is still there if no more than that were used since. None where less is used in
    the part of the launch that is known."""
    uses = sum(each.starts.size * -(-each.offsets.size * SECTOR_BYTES // _PAIR_BYTES) for each in found)
    some = 1 << max(0, (uses // _MOST_USES).bit_length())  # of so many lines one is followed
    followed = [_uses(each, some) for each in found]
    lines = [_since(line, time, 1 + len(_AGAIN)) for line, _, time in followed]

    def taken(window: float) -> float:
        """Lines of L2 that are taken by what is used in a window of the launch, in the mean of all that there are."""
        total = others * window
        for places, (_, _, time), since in zip(found, followed, lines, strict=True):
            begins = max(1e-9, places.part - window)  # the windows begin from 0 to here
            seen = [np.minimum(time, begins) - np.maximum(0, time - np.minimum(each, window)) for each in since]
            total += sum(
                w * some * np.maximum(0, each).sum() / begins for w, each in zip(_weights(), seen, strict=True)
            )
        return total

    low, high = 0.0, min(places.part for places in found)
    if taken(high) < capacity:
        if high < 1:
            return None
        low = high
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if taken(middle) < capacity else (low, middle)
    read = []
    for places, (_, pair, time) in zip(found, followed, strict=True):
        missed = _since(pair, time, 1)[0] > low
        rest = np.count_nonzero(missed & (time > low)) / max(1e-9, places.part - low) * (1 - places.part)
        read.append(2.0 * some * (np.count_nonzero(missed) + rest))
    return read


def _weights() -> list[float]:
    """Of the distances to the last use of a line, to the one before, and so on: what they count, so that the n-th use in a window
    adds _AGAIN[n - 2] to the 1 of the first."""
    adds = [1.0, *_AGAIN]
    return [*(one - other for one, other in zip(adds, adds[1:], strict=False)), adds[-1]]


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
    """For each use of a unit how long ago its last use was, the one before, and so on, `uses` of them; infinite where there was
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
