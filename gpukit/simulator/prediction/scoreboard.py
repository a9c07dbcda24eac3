"""How long programs take that share an SM, warp by warp and instruction by instruction.

A warp issues its instructions in order. After each it pauses as many cycles as the assembler wrote into it (`stall`): so
long until an addition or a multiplication is done. What takes longer, and how long is not known when the code is written,
marks its registers in a scoreboard, and the first instruction that names one of them waits. Copies from global to shared memory
(cp.async, TMA) and the products of a warp group (wgmma) go on in the background, in groups, and an instruction waits for all
groups but the last few. At a barrier all warps of a program wait for one another.

Warps share what an SM has. Each of its four schedulers issues one instruction in a cycle, and has units that take one after
another, each for some cycles (PIPES). L1 and shared memory serve all four. Tensor cores multiply in the background, one product
after another, once all four warps of a group have asked for it; what a scheduler issues meanwhile delays its tensor core by
as many cycles. (On an H200 1,024,000 cycles of products beside 2,830,000 instructions of another warp took 3,807,000.)

Latencies in cycles: https://arxiv.org/abs/1804.06826 (Volta, tables 3.1 and 4.1) and https://arxiv.org/abs/2402.13499
(Hopper); tests hold sums over one warp and over four, and products that are waited for, to what an H200 was measured to take.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from gpukit.simulator.compiler import assembly
from gpukit.simulator.compiler.compile import Compiled
from gpukit.simulator.prediction import mix

SCHEDULERS = 4
# "product": from when tensor cores are through with it until a warp that waits for it goes on.
LATENCY = {
    "shared": 21,
    "local": 33,
    "shuffle": 24,
    "special": 20,
    "convert": 20,
    "tensor": 33,
    "barrier": 20,
    "product": 45,
}
# Unit of mix.UNITS -> the unit of a scheduler that executes it, and for how many cycles it takes no other.
PIPES = {"fma": ("fp32", 1), "imad": ("fp32", 2), "multiply high": ("fp32", 4), "fp64": ("fp64", 2), "alu": ("alu", 2),
         "special": ("special", 8), "convert": ("special", 8), "tensor": ("mma", 0)}  # fmt: skip
# Of each turn that an instruction takes in shared memory. An H200 takes 23 cycles for a load of 4 bytes a lane without
# conflicts, 25 where lanes meet by twos, 37 by eights and 85 by 32; 25 for 8 bytes a lane and 29 for 16. A barrier waits as
# long for the stores before it.
_TURN = 2
# A tensor core that multiplies in the background takes what its scheduler leaves it for so many cycles at a time. (On an H200
# a warp beside it issued IMAD, LOP3 and FFMA every 6, 4.7 and 1.35 cycles, in place of 2, 2 and 1.)
_BURST = 4
# Cycles until a warp goes on where branches come together again, as Nsight Compute saw them on an H200.
_JOINS = {"BSYNC": 9}
# Turns of a loop that stand for themselves alone, and turns that are followed: the later ones of these stand for the rest.
_FIRST, _TURNS = 2, 10
_LOADS = {"LDG": "load", "LD": "load", "ATOMG": "atomic", "ATOM": "atomic", "LDS": "shared", "LDSM": "shared",
          "ATOMS": "shared", "LDL": "local"}  # fmt: skip
_OTHERS = ("shuffle", "special", "convert", "tensor")  # units of mix.UNITS with latencies of their own
_ASYNCHRONOUS = re.compile("[A-Z]GMMA|UTC")  # tensor-core instructions that run in the background
_COPIES = {"LDGSTS": "copy", "UTMALDG": "bulk copy"}


class _Step(NamedTuple):
    kind: (
        str | None
    )  # of LATENCY, or "load", "store" to shared memory, "copy", "bulk copy", "arrival" of one, "atomic", "fence"
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
    """What goes on while warps do. Of each instruction of a warp group, by its number among all: the cycles that tensor cores need
    for it. Of each instruction that copies to shared memory: the cycles that what it copies is on the way from L2, one copy
    after another, and how much later it is there."""

    products: Mapping[int, float] = {}
    copies: Mapping[int, tuple[float, float]] = {}


class Sm(NamedTuple):
    """So many programs of so many warps share an SM. By their numbers among all: for how many clocks instructions keep L1 and
    shared memory busy, and tensor cores those that one warp executes (mma)."""

    warps: int = 1
    programs: int = 1
    l1: Mapping[int, float] = {}
    mma: Mapping[int, float] = {}


def cycles(
    compiled: Compiled,
    times: Sequence[float],
    latency: Mapping[str, float],
    loads: Mapping[tuple[str, int], Wait] | None = None,
    background: Background | None = None,
    sm: Sm | None = None,
) -> float:
    """Cycles from a program's first instruction to its last, in the mean of the programs on an SM, which begin together.
    `times`: how often each instruction runs (mix.weights). `latency`: cycles of a "load", a "local" load, an "atomic" and a
    "fence", which depend on the caches; what is not given takes what LATENCY says, or 0. `loads`: of those on a line of the
    source, (file, line), how they wait, where that is known. Without `background`, copies and products take no time."""
    return _Simulation(compiled, times, {**LATENCY, **latency}, loads or {}, background, sm or Sm()).run()


class _Warp:
    __slots__ = ("asked", "changed", "coming", "copied", "copies", "now", "number", "order", "product", "products", "ready",
                 "stored", "total", "waited")  # fmt: skip

    def __init__(self, number: int):
        self.number = number
        self.order = 0  # the next instruction's place in the order in which they run
        self.now = self.total = 0.0  # cycles; and with each instruction counted for as many runs as it stands for
        self.ready: dict[str, float] = {}  # by register: when it is there
        self.stored = self.changed = 0.0  # when its last store to shared memory, and its last atomic, will be done
        self.asked: dict[tuple[str, int], float] = {}  # by line: how much of a late instruction is due
        self.coming: dict[tuple[str, int], float] = {}  # by line: when the last late one is there
        self.copied, self.copies = 0.0, []  # when the last copy is there; and the last of each group
        self.product, self.products = None, []  # likewise
        self.waited = 0  # bulk copies that it has waited for


class _Product:
    """An instruction of a warp group: when the tensor core of each scheduler is through with it, once all its warps have come."""

    __slots__ = ("arrived", "ends", "waiting")

    def __init__(self):
        self.arrived, self.ends, self.waiting = 0, [math.inf] * SCHEDULERS, []


class _Simulation:
    def __init__(self, compiled, times, latency, loads, background, sm):
        instructions = compiled.instructions
        self.steps = [_step(instruction) for instruction in instructions]
        in_shared = [_TURN * mix.shared_turns(compiled, instruction)[0] for instruction in instructions]
        self.late = [latency.get(s.kind, 0.0) + turns for s, turns in zip(self.steps, in_shared, strict=True)]
        self.loads = [_wait(i, step, loads) for i, step in zip(instructions, self.steps, strict=True)]
        units = [PIPES.get(mix.unit(i)) if not _ASYNCHRONOUS.match(i.base) else None for i in instructions]
        self.pipes = [(unit[0], sm.mma.get(i, unit[1])) if unit else None for i, unit in enumerate(units)]
        self.order = [(i, runs, min(1.0, runs)) for i, runs in _order(instructions, times) if runs > 0]
        self.goes_on = [
            background and (i in background.products or i in background.copies or step.ends or step.kind == "arrival")
            for i, step in enumerate(self.steps)
        ]
        self.after_product = latency["product"]
        self.background, self.sm = background, sm
        self.warps = [_Warp(n) for n in range(sm.warps * sm.programs)]
        # When each warp may go on, as far as is known, since when it wants to, which decides among several, and which it is.
        self.queue = [(0.0, 0.0, warp.number) for warp in self.warps]
        self.issue = [0.0] * SCHEDULERS  # from when on each scheduler, its units, and its tensor core are free
        self.free = [dict.fromkeys((name for name, _ in PIPES.values()), 0.0) for _ in range(SCHEDULERS)]
        self.tensor = [0.0] * SCHEDULERS
        self.l1 = self.l2 = 0.0  # the same of L1 and shared memory, and of the way from L2
        self.multiplying: list[list[_Product]] = [[] for _ in range(SCHEDULERS)]
        self.products: dict[
            tuple[int, int], _Product
        ] = {}  # by warp group and number: those for which not all have come
        self.made = [0] * len(self.warps)
        self.bulk: list[list[float]] = [[] for _ in range(sm.programs)]  # when each bulk copy of a program is there
        self.at_barrier: list[list[tuple[_Warp, float]]] = [[] for _ in range(sm.programs)]

    def run(self) -> float:
        queue, order, end = self.queue, self.order, len(self.order)
        while queue:
            now, since, number = heapq.heappop(queue)
            warp = self.warps[number]
            while warp.order < end:
                i, runs, share = order[warp.order]
                begin = self._may_begin(warp, now, i)
                if begin is None:  # it is called when what it waits for is known
                    break
                if begin > now and queue and queue[0] < (begin, since):  # others come first
                    heapq.heappush(queue, (begin, since, number))
                    break
                now = self._issued(warp, begin, i, share)
                warp.total += (now - warp.now) * runs
                warp.now = now
                warp.order += 1
                if self.steps[i].kind == "barrier" and self.sm.warps > 1:
                    self._meet(warp, i, runs)
                    break
                since = now
                if queue and queue[0] < (now, now):
                    heapq.heappush(queue, (now, now, number))
                    break
        ends = [warp.total for warp in self.warps]
        return (
            sum(max(ends[first : first + self.sm.warps]) for first in range(0, len(ends), self.sm.warps))
            / self.sm.programs
        )

    def _may_begin(self, warp: _Warp, now: float, i: int) -> float | None:
        """When a warp may issue an instruction; None where that depends on warps of its group that have not come yet."""
        step, scheduler = self.steps[i], warp.number % SCHEDULERS
        ready = warp.ready
        for name in step.names:
            if name in ready and ready[name] > now:
                now = ready[name]
        if step.kind is None:
            pass
        elif step.kind == "fence":  # waits for all that the warp has changed
            now = max(now, warp.changed)
        elif step.kind == "barrier":
            now = max(now, warp.stored)
        elif step.kind == "arrival":
            bulk = self.bulk[warp.number // self.sm.warps]
            if warp.waited < len(bulk):
                now = max(now, bulk[warp.waited])
        if step.leaves is not None and self.background:
            whose, left = step.leaves
            groups = warp.copies if whose == "copies" else warp.products
            last = groups[len(groups) - left - 1] if len(groups) > left else None
            if isinstance(last, _Product):
                if last.ends[0] == math.inf:
                    last.waiting.append(warp.number)
                    return None
                last = max(last.ends) + self.after_product
            now = max(now, last or 0.0)
        if self.issue[scheduler] > now:
            now = self.issue[scheduler]
        if self.pipes[i] and self.free[scheduler][self.pipes[i][0]] > now:
            now = self.free[scheduler][self.pipes[i][0]]
        if self.tensor[scheduler] > now > self.issue[scheduler]:
            idle = now - self.issue[scheduler]
            now = self.issue[scheduler] + math.ceil(idle / _BURST - 1e-6) * _BURST
        return now

    def _issued(self, warp: _Warp, now: float, i: int, share: float) -> float:
        """Issues an instruction that is there for a `share` of the programs; when the warp may issue the next one."""
        step, scheduler = self.steps[i], warp.number % SCHEDULERS
        self.issue[scheduler] = now + share
        if self.pipes[i]:
            name, taken = self.pipes[i]
            self.free[scheduler][name] = now + taken * share
        if self.tensor[scheduler] > now:
            self.tensor[scheduler] += share
            for product in self.multiplying[scheduler]:
                if product.ends[scheduler] > now:
                    product.ends[scheduler] += share
        done = now
        if i in self.sm.l1:
            done = self.l1 if self.l1 > now else now
            self.l1 = done + self.sm.l1[i] * share
        done += self.late[i]
        if self.loads[i]:
            line, wait = self.loads[i]
            due = warp.asked.get(line, math.ceil(wait.late))
            if due > 1 - 1e-6:
                due, warp.coming[line] = due - 1, done - self.late[i] + wait.cycles
            warp.asked[line] = due + wait.late
            done = max(done - self.late[i] + wait.again, warp.coming.get(line, 0.0))
        if self.goes_on[i]:
            self._goes_on(warp, now, i, share)
        if step.kind == "fence":
            now += self.late[i]
        elif step.kind == "barrier" and self.sm.warps == 1:
            now += self.late[i]
        elif step.kind == "store":
            warp.stored = done
        elif step.kind == "atomic":
            warp.changed = done
        for name in step.result:
            warp.ready[name] = done
        return now + step.stall

    def _goes_on(self, warp: _Warp, now: float, i: int, share: float) -> None:
        """What an instruction begins or ends in the background."""
        step, program = self.steps[i], warp.number // self.sm.warps
        if i in self.background.products:
            warp.product = self._multiply(warp, now, self.background.products[i] * share)
        elif i in self.background.copies and (step.kind == "copy" or warp.number % self.sm.warps == 0):
            on_the_way, latency = self.background.copies[i]
            self.l2 = max(self.l2, now) + on_the_way * share
            if step.kind == "copy":
                warp.copied = self.l2 + latency
            else:  # one warp asks for all
                self.bulk[program].append(self.l2 + latency)
        elif step.kind == "arrival":
            warp.waited += 1
        if step.ends == "copies":
            warp.copies.append(warp.copied)
        elif step.ends == "products":
            warp.products.append(warp.product)

    def _multiply(self, warp: _Warp, now: float, taken: float) -> _Product:
        """A warp asks for a product of its group; the last one of the group makes it begin."""
        size = min(SCHEDULERS, self.sm.warps)
        place = warp.number // size, self.made[warp.number]
        self.made[warp.number] += 1
        product = self.products.setdefault(place, _Product())
        product.arrived += 1
        if product.arrived == size:
            del self.products[place]
            for scheduler in range(SCHEDULERS):
                self.tensor[scheduler] = product.ends[scheduler] = max(self.tensor[scheduler], now) + taken
                under_way = [p for p in self.multiplying[scheduler] if p.ends[scheduler] > now]
                self.multiplying[scheduler] = [*under_way, product]
            for number in product.waiting:
                heapq.heappush(self.queue, (now, now, number))
        return product

    def _meet(self, warp: _Warp, i: int, runs: float) -> None:
        """A warp has come to a barrier; the last of its program sets all free."""
        here = self.at_barrier[warp.number // self.sm.warps]
        here.append((warp, runs))
        if len(here) == self.sm.warps:
            free = max(each.now for each, _ in here) + self.late[i]
            for each, times in here:
                each.total += (free - each.now) * times
                each.now = free
                heapq.heappush(self.queue, (free, free, each.number))
            here.clear()


_PRODUCTS = "gsb0"  # counts the groups of products
_WAITS = re.compile(r"(?:WARPGROUP\.)?DEPBAR\.LE (gsb0|SB0), 0x([0-9a-f]+)")


def _wait(instruction, step: _Step, loads: Mapping[tuple[str, int], Wait]) -> tuple[tuple[str, int], Wait] | None:
    """The line of a load and how it waits; None for what is no load, or on no line that is known."""
    if step.kind != "load":
        return None
    return next(((line, loads[line]) for line in instruction.own_frames if line in loads), None)


def _order(instructions, times) -> Iterator[tuple[int, float]]:
    """Indices of instructions in the order in which they run, and for how many runs each stands. Of innermost loops the
    first turns stand for themselves, and those followed after them for the rest: not in each of them a load comes late. A loop
    that does nothing but ask whether a copy has arrived is none."""
    loops = [loop for loop in assembly.loops(instructions) if not _asks(instructions[loop.start : loop.end + 1])]
    innermost = {l.start: l for l in loops if not any(o != l and l.start <= o.start and o.end <= l.end for o in loops)}
    i = 0
    while i < len(instructions):
        loop = innermost.get(i)
        if loop is None:
            yield i, times[i]
        turns = min(_TURNS, math.ceil(max(times[i : loop.end + 1]) - 1e-6)) if loop else 0
        for turn in range(turns):
            for j in range(i, loop.end + 1):
                first = min(1.0, times[j] / (_FIRST + 1))
                if turns < _TURNS:
                    yield j, times[j] / turns
                else:
                    yield j, first if turn < _FIRST else (times[j] - _FIRST * first) / (_TURNS - _FIRST)
        i = loop.end + 1 if loop else i + 1


def _asks(body) -> bool:
    return all(instruction.base in ("SYNCS", "BRA", "NOP", "NANOSLEEP", "YIELD") for instruction in body)


@lru_cache(maxsize=1 << 14)
def _step(instruction: assembly.Instruction) -> _Step:
    unit = mix.unit(instruction)
    kind = _LOADS.get(instruction.base) or (unit if unit in _OTHERS else None)
    kind = _COPIES.get(instruction.base, kind)
    if _ASYNCHRONOUS.match(instruction.base):
        kind = None
    if instruction.base == "BAR":
        kind = "barrier"
    elif instruction.base in ("STS", "STSM"):
        kind = "store"
    elif instruction.base == "SYNCS" and "TRYWAIT" in instruction.opcode:
        kind = "arrival"
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
    stall = instruction.stall + _JOINS.get(instruction.base, 0)
    return _Step(kind, stall, tuple(names), tuple(result), ends, leaves)


def _width(instruction: assembly.Instruction, kind: str) -> int:
    """Registers that it writes."""
    if kind == "tensor":
        return 4
    return max(1, mix.thread_bytes(instruction) // 4) if kind in ("load", "shared", "local") else 1
