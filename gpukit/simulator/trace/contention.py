"""How atomics meet: what L2 has to do one after the other because several of them change one element.

A warp's atomics reach L2 sector by sector, up to four sectors of a line in one request. An update of a sector changes each
of its elements once, so that lanes on different elements of a sector share an update, and lanes on one element take as many
updates as they are. Two updates of one element also wait for one another, wherever they come from. Where the compiler sees
that all lanes of a warp add integers to one element, it adds them up before (`REDUX`), and one lane of the warp asks L2.

L2 is made of slices, each of which changes what it holds by itself. Where an address goes is not published. On an H100 Nsight
Compute has counted it: neighbors go to one slice by stretches of STRETCH_BYTES, and the next stretch to another slice, so that
of 16 Mi atomics on 1 KiB each of two slices gets half, and of those on 16 KiB each of 32 a 32nd part. Where programs go
through a sorted list, those that are on the GPU at a time change neighbors, in few slices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpukit.simulator.trace.levels import LINE_BYTES

STRETCH_BYTES = 512  # of neighbors that are in one slice of L2
_REDUCTIONS, _ATOMICS = {"RED", "REDG"}, {"ATOM", "ATOMG"}

if TYPE_CHECKING:
    from gpukit.simulator.compiler.compile import Compiled
    from gpukit.simulator.trace.instructions import Form, Forms
    from gpukit.simulator.trace.recording import Recording


@dataclass(frozen=True)
class Contention:
    """The atomics of one launch on one tensor.

    updates         of sectors, in the whole launch
    requests        that bring them: one for those of a line
    busiest         changes of the element that is changed most often: how many there are at least
    busiest_most    and at most. All programs of a launch say both; of a sampled one it is known that all elements
                    together are changed so often, and how many of the programs that were looked at share an element
    lines           of 128 bytes, that they may meet in, of what the programs change that are on the GPU at a time
    stretches       of STRETCH_BYTES, the same
    fullest         requests for the stretch that is asked for most, over the whole launch. Of a sampled launch, where chance
                    alone makes some stretches look fuller than others, half of the programs that were looked at say which
                    one it is and the other half how full it is
    """

    tensor: str
    floating: bool
    updates: float
    requests: float
    busiest: float
    busiest_most: float
    lines: int
    stretches: int
    fullest: float = 0.0


def contention(recording: Recording, forms: Forms, compiled: Compiled | None, at_a_time: int) -> tuple[Contention, ...]:
    """Of each tensor that the launch changes by atomics, with so many of its programs `at_a_time` on the GPU."""
    names = dict.fromkeys(site.tensor for site in recording.sites if site.kind == "atomic")
    return tuple(_of_tensor(name, recording, forms, compiled, at_a_time) for name in names)


def unknown(tensor: str, argument: object, lanes: int) -> Contention:
    """Of so many atomics on a tensor whose addresses nobody knows: spread over all of it, or all on one element."""
    changed = _tensor(argument)
    elements = max(1, changed.numel())
    return Contention(
        tensor, changed.is_floating_point(), lanes, lanes, lanes / elements, lanes, *_whole(changed)
    )  # fmt: skip


def _whole(tensor: torch.Tensor) -> tuple[int, int]:
    """The lines and the stretches of all of it."""
    nbytes = tensor.numel() * tensor.element_size()
    return -(-nbytes // LINE_BYTES), -(-nbytes // STRETCH_BYTES)


def merges(floating: bool, compiled: Compiled | None) -> bool:
    """Whether a warp's adds to one element are added up before they are sent."""
    return not floating and (compiled is None or any(i.opcode.startswith("REDUX") for i in compiled.instructions))


def answers(line: int, compiled: Compiled | None) -> bool:
    """Whether L2 sends back what the atomics of this line found. Where nobody asks for it, and their order does not matter
    (sem="relaxed"), the compiler makes them reductions (RED), which nothing comes back from; in any other order they stay ATOM."""
    if compiled is None:
        return True
    found = {i.opcode.partition(".")[0] for i in compiled.instructions if i.line == line}
    return bool(found & _ATOMICS) or not found & _REDUCTIONS


def _of_tensor(name: str, recording: Recording, forms: Forms, compiled: Compiled | None, at_a_time: int) -> Contention:
    call, tensor = recording.call, _tensor(recording.call.arguments.get(name))
    floating = tensor.is_floating_point()
    chosen = [i for i, site in enumerate(recording.sites) if (site.kind, site.tensor) == ("atomic", name)]
    rows = np.flatnonzero(np.isin(forms.sites, chosen))
    added_up = merges(floating, compiled)
    whole = rows if call.sampled is None else rows[rows < recording.whole]

    updates = requests = adds = 0
    for form, count in zip(*forms.counted(whole), strict=True):
        updates += count * form.updated(added_up)
        requests += count * form.requested(added_up)
        adds += count * (form.asked if added_up and form.one_element else form.lanes)
    found = _changes(recording, forms, whole, added_up)
    most = float(found.max(initial=0))

    def together(lines: int, stretches: int) -> tuple[int, int]:
        """Of these, those that the programs change which are on the GPU at a time: of a sorted list a few neighbors."""
        if at_a_time >= call.programs:
            return lines, stretches
        changed = at_a_time * _elements_of_a_program(recording, whole) * tensor.element_size()
        return min(lines, math.ceil(changed / LINE_BYTES)), min(stretches, math.ceil(changed / STRETCH_BYTES))

    if call.sampled is None:
        fullest = max(_asked_for(recording, forms, whole, added_up).values(), default=0.0)
        return Contention(
            name, floating, updates, requests, most, most, *together(*_touched(recording, whole)), fullest
        )
    scale = call.programs / call.sampled
    least = max(adds * scale / max(1, tensor.numel()), most)
    programs = _by_program(recording, whole)
    each = max((float(_changes(recording, forms, own, added_up).max()) for own in programs), default=0.0)
    share = 0.0  # of the fullest stretch: one program alone says nothing of the others
    if len(programs) > 1:
        halves = (np.concatenate(programs[first::2]) for first in (0, 1))
        share = _share_of_the_fullest(*(_asked_for(recording, forms, half, added_up) for half in halves))
    possible = each * math.ceil(_shared(recording, rows, whole) * call.programs)
    return Contention(
        name, floating, updates * scale, requests * scale, least, max(least, possible), *together(*_whole(tensor)),
        requests * scale * share,
    )  # fmt: skip


def _share_of_the_fullest(one: Counter, other: Counter) -> float:
    """Of all requests, those for the fullest stretch: that of one half of the programs has so many in the other, in the mean of
    both ways. Among few requests the fullest stretch is fuller than its share; in programs that did not choose it it is not."""
    return sum(b[max(a, key=a.__getitem__)] / b.total() for a, b in ((one, other), (other, one))) / 2


def _asked_for(recording: Recording, forms: Forms, rows: np.ndarray, added_up: bool) -> Counter:
    """Stretch of memory -> requests of these rows for it. The lanes of a row share its requests evenly."""
    found: Counter = Counter()
    for own, form, count in _distinct(recording, forms, rows):
        stretches, lanes = np.unique(own // STRETCH_BYTES, return_counts=True)
        each = lanes * (count * form.requested(added_up) / max(1, own.size))
        found.update(dict(zip(stretches.tolist(), each.tolist(), strict=True)))
    return found


def _elements_of_a_program(recording: Recording, rows: np.ndarray) -> float:
    """How many elements a program changes in these rows, in the mean of those that change any."""
    own = [
        np.unique(np.concatenate([_addresses(recording, row) for row in rows_of_one.tolist()])).size
        for rows_of_one in _by_program(recording, rows)
    ]
    return sum(own) / max(1, len(own))


def _changes(recording: Recording, forms: Forms, rows: np.ndarray, added_up: bool) -> np.ndarray:
    """How often each element that these rows touch is changed by them."""
    addresses, weights = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    for own, form, count in _distinct(recording, forms, rows):
        once = form.asked / form.lanes if added_up and form.one_element else 1.0
        addresses.append(own)
        weights.append(np.full(own.size, count * once))
    _, which = np.unique(np.concatenate(addresses), return_inverse=True)
    return np.bincount(which, np.concatenate(weights)) if which.size else np.zeros(0)


def _distinct(recording: Recording, forms: Forms, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Form, int]]:
    """Of rows that are alike, once: the addresses of their live lanes, their form, and how many there are."""
    keys = np.stack([forms.sites[rows], forms.tiles[rows], forms.starts[rows]])
    _, first, counts = np.unique(keys, axis=1, return_index=True, return_counts=True)
    for i, count in zip(first.tolist(), counts.tolist(), strict=True):
        (form,), _ = forms.counted(rows[i : i + 1])
        yield _addresses(recording, int(rows[i])), form, count


def _addresses(recording: Recording, row: int) -> np.ndarray:
    """Of the live lanes of one row, in the imaginary memory."""
    tile = recording.tile[row]
    offsets = recording.tiles[tile].offsets() if tile >= 0 else recording.irregular[-1 - tile].offsets
    return offsets.reshape(-1) + recording.start[row]


def _touched(recording: Recording, rows: np.ndarray) -> tuple[int, int]:
    """The lines and the stretches that these rows touch."""
    found = {(recording.tile[row], recording.start[row], recording.site[row]): row for row in rows.tolist()}
    if not found:
        return 0, 0
    lines = np.unique(np.concatenate([recording.units(row, LINE_BYTES) for row in found.values()]))
    return int(lines.size), int(np.unique(lines // (STRETCH_BYTES // LINE_BYTES)).size)


def _by_program(recording: Recording, rows: np.ndarray) -> list[np.ndarray]:
    program = np.array([recording.program[row] for row in rows.tolist()], dtype=np.int64)
    return [rows[program == number] for number in np.unique(program)]


def _shared(recording: Recording, rows: np.ndarray, whole: np.ndarray) -> float:
    """Of the programs of a sampled launch, the largest part that changes one element: of those that were looked at from
    beginning to end, where two of them do, else also of those of which only the beginning is known."""

    def busiest(chosen: np.ndarray) -> tuple[int, int]:
        programs = [
            np.unique(np.concatenate([_addresses(recording, int(row)) for row in own]))
            for own in _by_program(recording, chosen)
        ]
        if not programs:
            return 0, 1
        return int(np.unique(np.concatenate(programs), return_counts=True)[1].max()), len(programs)

    (most, of), (most_begun, of_begun) = busiest(whole), busiest(rows)
    begun = most_begun / of_begun
    return max(begun, most / of) if most > 1 else begun


def is_floating(argument: object) -> bool:
    """Whether an argument's elements are floating-point numbers."""
    return _tensor(argument).is_floating_point()


def _tensor(argument: object) -> torch.Tensor:
    """The tensor of an argument, a descriptor's too; a single float32 where there is none."""
    tensor = argument if isinstance(argument, torch.Tensor) else getattr(argument, "base", None)
    return tensor if isinstance(tensor, torch.Tensor) else torch.empty(1, device="meta")
