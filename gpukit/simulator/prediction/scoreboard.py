"""How long one warp takes from its first instruction to its last, alone on the GPU: what nothing but other warps can hide.

A warp issues its instructions in order. After each it pauses as many cycles as the assembler wrote into it (`stall`): so
long until an addition or a multiplication is done. What takes longer, and how long is not known when the code is written,
marks its registers in a scoreboard, and the first instruction that names one of them waits. Copies from global to shared memory
(cp.async) and the products of a warp group (wgmma) go on in the background, in groups, and an instruction waits for all groups
but the last few.

Latencies in cycles: https://arxiv.org/abs/1804.06826 (Volta, tables 3.1 and 4.1) and https://arxiv.org/abs/2402.13499
(Hopper); a test holds sums over one warp and over four to what an H200 was measured to take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from gpukit.simulator.compiler import assembly
from gpukit.simulator.compiler.compile import Compiled
from gpukit.simulator.prediction import mix

LATENCY = {"shared": 21, "local": 33, "shuffle": 24, "special": 20, "convert": 20, "tensor": 33, "barrier": 20}
# Of each turn that an instruction takes in shared memory. An H200 takes 23 cycles for a load of 4 bytes a lane without
# conflicts, 25 where lanes meet by twos, 37 by eights and 85 by 32; 25 for 8 bytes a lane and 29 for 16. A barrier waits as
# long for the stores before it.
_TURN = 2
# Turns of a loop that stand for themselves alone, and turns that are followed: the later ones of these stand for the rest.
_FIRST, _TURNS = 2, 10
_LOADS = {"LDG": "load", "LD": "load", "ATOMG": "atomic", "ATOM": "atomic", "LDS": "shared", "LDSM": "shared",
          "ATOMS": "shared", "LDL": "local"}  # fmt: skip
_OTHERS = ("shuffle", "special", "convert", "tensor")  # units of mix.UNITS with latencies of their own
_ASYNCHRONOUS = re.compile("[A-Z]GMMA|UTC")  # tensor-core instructions that run in the background


class _Step(NamedTuple):
    kind: str | None  # of LATENCY, or "load", "store" to shared memory, "copy", "atomic", "fence"
    stall: int
    names: tuple[str, ...]  # registers that it reads or writes
    result: tuple[str, ...]  # those that it writes late
    ends: str | None = None  # "copies" or "products": it completes a group of them
    leaves: tuple[str, int] | None = None  # (which, n): it waits until at most n groups of them are unfinished


class Wait(NamedTuple):
    """How long a load lasts. Of its instructions a share `late`, spread evenly from the first on, asks for lines that L1 lacks,
    and gets them after so many cycles. The others ask for what is on its way already, or there: they last as long as that, and
    `again` cycles at least."""

    late: float
    cycles: float
    again: float


class Background(NamedTuple):
    """What goes on while the warp does. Of each instruction of a warp group, by its number among all: the cycles that the tensor
    cores need for it and its like in the program's other warp groups. Of each copy of the warp and its like in the other
    warps the cycles on the way from L2, one after another, and how long the first of them take."""

    products: Mapping[int, float]
    copying: float = 0.0
    latency: float = 0.0


def cycles(
    compiled: Compiled,
    times: Sequence[float],
    latency: Mapping[str, float],
    loads: Mapping[tuple[str, int], Wait] | None = None,
    background: Background | None = None,
) -> float:
    """Cycles that one warp takes alone. `times`: how often each instruction runs (mix.weights). `latency`: cycles of a
    "load", a "local" load, an "atomic" and a "fence", which depend on the caches; what is not given takes what LATENCY says,
    or 0. `loads`: of those on a line of the source, (file, line), how they wait, where that is known. Without `background`,
    copies and products take no time."""
    latency = {**LATENCY, **latency}
    steps = [_step(instruction) for instruction in compiled.instructions]
    in_shared = [_TURN * mix.shared_turns(compiled, instruction)[0] for instruction in compiled.instructions]
    known = [_wait(i, step, loads or {}) for i, step in zip(compiled.instructions, steps, strict=True)]
    asked: dict[tuple[str, int], float] = {}  # by line: how much of a late instruction is due
    coming: dict[tuple[str, int], float] = {}  # by line: when the last late one is there
    copies, products = _Groups(), _Groups()
    now = total = last_atomic = last_store = 0.0
    ready: dict[str, float] = {}
    for i, runs in _order(compiled.instructions, times):
        step, begin = steps[i], now
        for name in step.names:
            if name in ready and ready[name] > now:
                now = ready[name]
        if step.kind == "fence":  # waits for all that the warp has changed
            now = max(now, last_atomic)
        elif step.kind == "barrier":
            now = max(now, last_store)
        late = latency.get(step.kind, 0.0) + in_shared[i]
        if known[i]:
            line, wait = known[i]
            due = asked.get(line, math.ceil(wait.late))
            if due > 1 - 1e-6:
                due, coming[line] = due - 1, now + wait.cycles
            asked[line] = due + wait.late
            late = max(wait.again, coming.get(line, 0.0) - now)
        if background:
            if i in background.products:
                products.add(now, background.products[i])
            elif step.kind == "copy":
                copies.add(now, background.copying, background.latency)
            if step.ends is not None:
                (copies if step.ends == "copies" else products).end()
            elif step.leaves is not None:
                whose, left = step.leaves
                now = max(now, (copies if whose == "copies" else products).ready(left))
        if step.kind in ("fence", "barrier"):
            now += late
        if step.kind == "store":
            last_store = now + late
        elif step.kind == "atomic":
            last_atomic = now + late
        for name in step.result:
            ready[name] = now + late
        now += step.stall
        total += (now - begin) * runs
    return total


_PRODUCTS = "gsb0"  # counts the groups of products
_WAITS = re.compile(r"(?:WARPGROUP\.)?DEPBAR\.LE (gsb0|SB0), 0x([0-9a-f]+)")


class _Groups:
    """Groups of what goes on in the background, one after another."""

    def __init__(self) -> None:
        self._free = self._last = 0.0
        self._ends: list[float] = []

    def add(self, now: float, cycles: float, latency: float = 0.0) -> None:
        """Something of the group that is being made: it begins when all before it are through, and needs so long."""
        self._free = max(self._free, now) + cycles
        self._last = self._free + latency

    def end(self) -> None:
        """The group is complete."""
        self._ends.append(self._last)

    def ready(self, left: int) -> float:
        """When all but the last so many groups are done."""
        done = len(self._ends) - left
        return self._ends[done - 1] if done > 0 else 0.0


def _wait(instruction, step: _Step, loads: Mapping[tuple[str, int], Wait]) -> tuple[tuple[str, int], Wait] | None:
    """The line of a load and how it waits; None for what is no load, or on no line that is known."""
    if step.kind != "load":
        return None
    return next(((line, loads[line]) for line in instruction.own_frames if line in loads), None)


def _order(instructions, times) -> Iterator[tuple[int, float]]:
    """Indices of instructions in the order in which they run, and for how many runs each stands. Of innermost loops the
    first turns stand for themselves, and those followed after them for the rest: not in each of them a load comes late."""
    loops = assembly.loops(instructions)
    innermost = {l.start: l for l in loops if not any(o != l and l.start <= o.start and o.end <= l.end for o in loops)}
    i = 0
    while i < len(instructions):
        loop = innermost.get(i)
        if loop is None:
            yield i, times[i]
        for turn in range(_TURNS if loop else 0):
            for j in range(i, loop.end + 1):
                first = min(1.0, times[j] / (_FIRST + 1))
                yield j, first if turn < _FIRST else (times[j] - _FIRST * first) / (_TURNS - _FIRST)
        i = loop.end + 1 if loop else i + 1


@lru_cache(maxsize=1 << 14)
def _step(instruction: assembly.Instruction) -> _Step:
    unit = mix.unit(instruction)
    kind = _LOADS.get(instruction.base) or (unit if unit in _OTHERS else None)
    if _ASYNCHRONOUS.match(instruction.base):
        kind = None
    if instruction.base == "BAR":
        kind = "barrier"
    elif instruction.base in ("STS", "STSM"):
        kind = "store"
    elif instruction.base == "LDGSTS":
        kind = "copy"
    elif instruction.base == "MEMBAR" and ".GPU" in instruction.opcode:
        kind = "fence"
    operands = re.sub(r"c\[[^]]*\]\[[^]]*\]|desc\[[^]]*\]|^@!?U?P\w+\s", " ", instruction.text).split(None, 1)[1:]
    found = re.findall(r"\b(U?R)(\d+)\b(\.64)?", operands[0] if operands else "")
    names = [f"{file}{int(n) + k}" for file, n, wide in found for k in range(2 if wide else 1)]
    vectors = [int(n) for file, n, _ in found if file == "R"]
    unread = kind == "atomic" and re.match(r"P\w+, RZ", operands[0])  # nobody asked for the old value
    late = (kind in _OTHERS or instruction.base in _LOADS) and vectors and not unread
    result = [f"R{vectors[0] + k}" for k in range(_width(instruction, kind))] if late else []
    ends = leaves = None
    if instruction.base == "LDGDEPBAR":
        ends = "copies"
    elif waits := _WAITS.search(instruction.text):
        leaves = "products" if waits[1] == _PRODUCTS else "copies", int(waits[2], 16)
    elif _ASYNCHRONOUS.match(instruction.base) and _PRODUCTS in instruction.text:
        ends = "products"
    return _Step(kind, instruction.stall, tuple(names), tuple(result), ends, leaves)


def _width(instruction: assembly.Instruction, kind: str) -> int:
    """Registers that it writes."""
    if kind == "tensor":
        return 4
    return max(1, mix.thread_bytes(instruction) // 4) if kind in ("load", "shared", "local") else 1
