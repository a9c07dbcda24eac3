"""How long programs take that share an SM, warp by warp and instruction by instruction.

A warp issues its instructions in order. After each it pauses as many cycles as the assembler wrote into it (`stall`): so
long until an addition or a multiplication is done. What takes longer, and how long is not known when the code is written,
is counted: a warp has six counters, and of an instruction the assembler says which one it raises until its result is there, or
until it has read its registers, and which ones must be zero before it is issued. As there are only six, an instruction that waits
for a load waits for all that are counted with it. Copies from global to shared memory (cp.async, TMA) and the products of a warp
group (wgmma) go on in the background, in groups, and an instruction waits for all groups but the last few. At a barrier all warps
of a program wait for one another.

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
from gpukit.simulator.trace.waves import GOLDEN

SCHEDULERS = 4
# "view": of the fence behind which tensor cores see what was stored to shared memory. (On an H200 it and MEMBAR take 27 cycles.)
# "product": from when tensor cores are through with it until a warp that waits for it goes on.
LATENCY = {
    "shared": 21,
    "local": 33,
    "shuffle": 24,
    "special": 20,
    "convert": 20,
    "tensor": 33,
    "barrier": 20,
    "view": 16,
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
# Cycles from when L1 or shared memory takes up an instruction until it has read its registers, which others may then change:
# https://arxiv.org/abs/2503.20481.
_READ = 11
_COUNTERS = 6
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
    waits: tuple[int, ...]  # counters that must be zero
    sets: int | None  # the one that it raises until its result is there
    reads: int | None  # and until it has read its registers
    names: tuple[str, ...]  # registers that it reads or writes
    result: tuple[str, ...]  # those that it writes late, which nobody counts: of tensor cores
    ends: str | None = None  # "copies" or "products": it completes a group of them
    leaves: tuple[str, int] | None = None  # (which, n): it waits until at most n groups of them are unfinished


class Memory(NamedTuple):
    """Cycles that a load lasts: one that L1 has, one that L2 has, and the mean of those from device memory. These last for
    different times. What one lasts beyond the shortest is taken to be distributed exponentially, with `spread` for its mean:
    of 2, 4 and 8 lines all over the memory of an H200 the last one comes then as late as was measured, and of single ones a tenth,
    half and nine tenths."""

    l1: float
    l2: float
    dram: float
    spread: float


class Wait(NamedTuple):
    """How the loads of a line of the source last, which a warp makes `at_once` at a time. Of the first of equal parts of them a share
    late[0] asks for lines that L1 lacks, of the second late[1], and so on: of their instructions a share `within`, from the first
    one on as evenly as can be. In a share `from_dram` of these times, for all warps of a program the same ones, each of them waits for
    the last of so many `pieces` of device memory, else for L2: they are given the mean of both. All others ask for what is on its way
    already, or there: they last as long as that, and as a load that L1 has at least."""

    late: Sequence[float]
    at_once: int
    within: float
    from_dram: float
    pieces: float
    memory: Memory


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
    __slots__ = ("changed", "copied", "copies", "counters", "loads", "now", "number", "order", "product", "products", "ready",
                 "stored", "total", "waited")  # fmt: skip

    def __init__(self, number: int):
        self.number = number
        self.order = 0  # the next instruction's place in the order in which they run
        self.now = self.total = 0.0  # cycles; and with each instruction counted for as many runs as it stands for
        self.counters = [0.0] * _COUNTERS  # when each will be zero
        self.ready: dict[str, float] = {}  # by register: when it is there
        self.stored = self.changed = 0.0  # when its last store to shared memory, and its last atomic, will be done
        self.loads: dict[tuple[str, int], _Loads] = {}  # by line of the source
        self.copied, self.copies = 0.0, []  # when the last copy is there; and the last of each group
        self.product, self.products = None, []  # likewise
        self.waited = 0  # bulk copies that it has waited for


class _Loads:
    """A warp's loads of a line of the source: how many there were, and how many these stand for; whether those made at once are late;
    when the last late one is there; how much is due of late ones, and of late ones among those made at once."""

    __slots__ = ("begun", "coming", "count", "due", "due_within", "late")

    def __init__(self, wait: Wait):
        self.count, self.begun, self.late, self.coming = 0, 0.0, False, 0.0
        self.due, self.due_within = math.ceil(wait.late[0]), 0.0


def _due(due: float, share: float) -> tuple[bool, float]:
    """Whether the next one is among a share that is spread evenly, and how much is due after it."""
    return (True, due - 1 + share) if share and due > 1 - 1e-6 else (False, due + share)


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
        self.made_of: dict[tuple[str, int], float] = {}  # how many loads of a line of the source a warp makes
        for each, n in zip(self.loads, times, strict=True):
            if each:
                self.made_of[each[0]] = self.made_of.get(each[0], 0.0) + n
        self.lasting = {line: _lasting(wait) for line, wait in loads.items()}
        self.drawn = 0
        units = [PIPES.get(mix.unit(i)) if not _ASYNCHRONOUS.match(i.base) else None for i in instructions]
        self.pipes = [(unit[0], sm.mma.get(i, unit[1])) if unit else None for i, unit in enumerate(units)]
        self.order = [(i, runs, min(1.0, runs)) for i, runs in _order(instructions, times) if runs > 0]
        self.goes_on = [
            background and (i in background.products or i in background.copies or step.ends or step.kind == "arrival")
            for i, step in enumerate(self.steps)
        ]
        # Who finds that a copy has not arrived asks again, in a loop of its own behind the program's end.
        again = {i for loop in assembly.loops(instructions) for i in range(loop.start, loop.end + 1)
                 if assembly.only_waits(instructions, loop)}  # fmt: skip
        asks, waits = (
            sum(n for i, n in enumerate(times) if self.steps[i].kind == kind and i not in again)
            for kind in ("bulk copy", "arrival")
        )
        self.at_a_barrier = max(1, round(asks / waits)) if waits else 1  # bulk copies that are waited for together
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
        for counter in step.waits:
            if warp.counters[counter] > now:
                now = warp.counters[counter]
        if warp.ready:
            for name in step.names:
                now = max(now, warp.ready.get(name, 0.0))
        if step.kind is None:
            pass
        elif step.kind == "fence":  # waits for all that the warp has changed
            now = max(now, warp.changed)
        elif step.kind == "barrier":
            now = max(now, warp.stored)
        elif step.kind == "arrival":
            bulk = self.bulk[warp.number // self.sm.warps]
            last = (warp.waited + 1) * self.at_a_barrier
            if last <= len(bulk):
                now = max(now, bulk[last - 1])
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
        if step.reads is not None:
            warp.counters[step.reads] = max(warp.counters[step.reads], done + _READ)
        done = self._loaded(warp, done, *self.loads[i]) if self.loads[i] else done + self.late[i]
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
        if step.sets is not None:
            warp.counters[step.sets] = max(warp.counters[step.sets], done)
        for name in step.result:
            warp.ready[name] = done
        return now + step.stall

    def _loaded(self, warp: _Warp, now: float, line: tuple[str, int], wait: Wait) -> float:
        """When a load is there that L1 takes up now."""
        load = warp.loads.get(line)
        if load is None:
            load = warp.loads[line] = _Loads(wait)
        if load.count % wait.at_once == 0:
            part = min(len(wait.late) - 1, int(len(wait.late) * load.begun / self.made_of[line] + 1e-6))
            load.late, load.due = _due(load.due, wait.late[part])
            load.due_within = math.ceil(wait.within)
        load.count += 1
        load.begun += self.order[warp.order][1]
        if load.late:
            late, load.due_within = _due(load.due_within, wait.within)
            if late:
                self.drawn += 1
                load.coming = now + self.lasting[line][self.drawn % _DRAWS]
        return max(now + wait.memory.l1, load.coming)

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


_DRAWS = 89


def _lasting(wait: Wait) -> list[float]:
    """Cycles that late loads last, one after another: those from device memory as evenly distributed as chance would have them in the
    long run."""
    chances = [(n * GOLDEN + 0.5) % 1 for n in range(_DRAWS)]  # that one of them is there by then
    last = [-math.log(1 - chance ** (1 / wait.pieces)) for chance in chances]
    memory, share = wait.memory, wait.from_dram
    return [(1 - share) * memory.l2 + share * (memory.dram + memory.spread * (each - 1)) for each in last]


def _order(instructions, times) -> Iterator[tuple[int, float]]:
    """Indices of instructions in the order in which they run, and for how many runs each stands. Of innermost loops the
    first turns stand for themselves, and those followed after them for the rest: not in each of them a load comes late. A loop
    that does nothing but ask whether a copy has arrived is none."""
    loops = [loop for loop in assembly.loops(instructions) if not assembly.only_waits(instructions, loop)]
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
    elif instruction.opcode.startswith("FENCE.VIEW"):
        kind = "view"
    elif instruction.base == "MEMBAR" and ".GPU" in instruction.opcode:
        kind = "fence"
    operands = re.sub(r"c\[[^]]*\]\[[^]]*\]|desc\[[^]]*\]|^@!?U?P\w+\s", " ", instruction.text).split(None, 1)[1:]
    found = re.findall(r"\b(U?R)(\d+)\b(\.64)?", operands[0] if operands else "")
    names = [f"{file}{int(n) + k}" for file, n, wide in found for k in range(2 if wide else 1)]
    result = [name for name in names if name[0] == "R"][:1]
    result = [f"R{int(result[0][1:]) + k}" for k in range(4)] if kind == "tensor" and result else []
    ends = leaves = None
    if instruction.base == "LDGDEPBAR":
        ends = "copies"
    elif waits := _WAITS.search(instruction.text):
        leaves = "products" if waits[1] == _PRODUCTS else "copies", int(waits[2], 16)
    elif _ASYNCHRONOUS.match(instruction.base) and _PRODUCTS in instruction.text:
        ends = "products"
    stall = instruction.stall + _JOINS.get(instruction.base, 0)
    counters = instruction.waits, instruction.sets, instruction.reads
    return _Step(kind, stall, *counters, tuple(names), tuple(result), ends, leaves)
