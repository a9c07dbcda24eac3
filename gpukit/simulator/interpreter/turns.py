"""Long loops of a sampled launch: of those whose turns all do the same, one step further on each time, some turns are run.

    for k in tl.range(0, K, BLOCK_K):
        acc = tl.dot(a_desc.load([m, k]), b_desc.load([k, n]), acc)

A persistent program goes through such a loop for each of its tiles, and a sample knows no number but addresses. Three turns
say what the others do. Some of the others are run to check that, the last one among them; where the same loop was checked
before, only the last one. A loop is run whole if it stores or reads integers, if it branches or has another loop in it, and if
a variable besides its counter holds another integer in each turn: it may be carried on from one to the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np
import triton.language as tl

from gpukit.simulator.interpreter import running
from gpukit.simulator.interpreter.addresses import Access
from gpukit.simulator.interpreter.unknown import Unknown

_LEAST = 24  # turns: shorter loops are run whole
_FIRST = 3  # turns that say what the others do
_PROBES = 8  # turns that are run of the others, beside the last one
GOLDEN = 0.6180339887498949  # its multiples, without their whole part, are spread evenly


class Watch:
    """A recorder of single turns of a loop. `alike` is False once it has seen what makes turns differ in other ways."""

    def __init__(self):
        self.alike = True
        self.accesses: list[tuple[Access, int, str, int]] = []
        self.flops = 0

    def access(self, access: Access, program: int, file: str, line: int) -> None:
        tensor = access.parameter.tensor if access.parameter else None
        known = access.kind != "load" or access.tile is None or not tensor.is_floating_point()
        if known or access.buffer.fresh is not None or access.buffer.legal.mask is not None:
            self.alike = False
        self.accesses.append((access, program, file, line))

    def dot(self, flops: int) -> None:
        self.flops += flops

    def unknown(self, fault) -> None:
        self.alike = False

    wrapped = unknown

    def taken(self) -> tuple[list[tuple[Access, int, str, int]], int]:
        """What one turn did, and begin with the next."""
        found = self.accesses, self.flops
        self.accesses, self.flops = [], 0
        return found


def alike(numbers: range, make: Callable[[int], tl.tensor]) -> Iterator[tl.tensor]:
    """make(number) for each number, or for some of them where those tell the recorders what the others do."""
    now, plain = running.now, make

    def make(number: int) -> tl.tensor:
        if now is not None:
            now.work += running.TURN_LANES
        return plain(number)

    if now is not None and now.turns is not None:
        now.turns.alike = False  # a loop within a loop: the inner one is looked at
    recorders = now.recorders if now is not None else []
    able = all(hasattr(recorder, "repeat") for recorder in recorders)
    if not recorders or not able or not now.sampling or now.seen is not None or now.in_gluon or len(numbers) < _LEAST:
        yield from map(make, numbers)
        return
    outer, watch = now.turns, Watch()
    now.turns, now.recorders = watch, [*recorders, watch]
    states, locals_, done = [], [], []
    try:
        for turn in range(_FIRST):
            begun = now.work
            counter = make(numbers[turn])
            yield counter
            done.append(watch.taken())
            states.append([recorder.turn_begins() for recorder in recorders])
            frame = sys._getframe(1)
            locals_.append({name: value for name, value in frame.f_locals.items() if value is not counter})
            if not watch.alike:
                break
        steps, followed = _steps(done, locals_) if watch.alike else None, now.work
        if steps is not None:
            now.recorders = [watch]
            rest, frame = len(numbers) - _FIRST, sys._getframe(1)
            loop = frame.f_code, frame.f_lasti, len(numbers), tuple(steps)
            more = 0 if loop in now.uniform else _PROBES
            probes = sorted({*(_FIRST + int(i * GOLDEN % 1 * (rest - 1)) for i in range(more)), len(numbers) - 1})
            for turn in probes:
                counter = make(numbers[turn])
                yield counter
                here = {name: v for name, v in sys._getframe(1).f_locals.items() if v is not counter}
                if not (
                    watch.alike
                    and _as_told(watch.taken(), done[-1], steps, turn - _FIRST + 1)
                    and _same(here, locals_[-1])
                ):
                    break
            else:
                now.uniform.add(loop)
                now.recorders = recorders
                now.work = followed + rest * (followed - begun)  # as if all of them had been run
                for recorder, before, after in zip(recorders, states[-2], states[-1], strict=True):
                    recorder.repeat(done[-1], steps, rest, before, after)
                return
            now.work = followed
            for recorder, state in zip(recorders, states[-1], strict=True):
                recorder.rewind(state)
    finally:
        now.turns, now.recorders = outer, recorders
    yield from map(make, numbers[len(done) :])


def _steps(done: list, locals_: list[dict]) -> list[int] | None:
    """By how many bytes each access moves from turn to turn; None where turns differ in anything else."""
    if not _same(locals_[-1], locals_[-2]) or not done[-1][0]:
        return None
    steps = [
        last.tile.start - before.tile.start for (last, *_), (before, *_) in zip(done[-1][0], done[-2][0], strict=False)
    ]
    return steps if all(_as_told(turn, done[-1], steps, n - _FIRST + 1) for n, turn in enumerate(done[:-1])) else None


def _as_told(turn: tuple[list, int], last: tuple[list, int], steps: list[int], times: int) -> bool:
    """Whether a turn does what the last one did, every access as many steps further on."""
    (found, flops), (told, as_many) = turn, last
    if flops != as_many or not len(found) == len(told) == len(steps):
        return False
    for (access, _, *place), (other, _, *there), step in zip(found, told, steps, strict=True):
        same = place == there and access.parameter is other.parameter and access.width == other.width
        if not same or access.via != other.via or access.tile != other.tile.moved(other.tile.start + times * step):
            return False
    return True


def _same(names: dict, before: dict) -> bool:
    """Whether a program knows the same at the ends of two turns, the counter left out."""
    return names.keys() == before.keys() and all(_equal(value, before[name]) for name, value in names.items())


def _equal(value, before) -> bool:
    if value is before:
        return True
    if isinstance(value, tl.tensor) and isinstance(before, tl.tensor) and value.type == before.type:
        one, other = getattr(value.handle, "data", None), getattr(before.handle, "data", None)
        if isinstance(one, Unknown) and isinstance(other, Unknown):
            return True
        return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(one, other)
    plain = (bool, int, float, str, tl.constexpr)
    return type(value) is type(before) and isinstance(value, plain) and bool(value == before)
