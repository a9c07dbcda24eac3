"""How long a launch takes on a GPU, and why: `gpukit.predict(lambda: kernel[grid](x, y, n, BLOCK=1024), gpu="h200")`.

The model, whole. Counted: sectors and bytes at each level (trace and caches), the instructions that a program's warps
execute (SASS, with loop counts from the interpreter), registers and shared memory (compiler).

1. Each resource alone.  work / rate: DRAM, L2, and per SM L1 and shared memory, tensor cores, the units for fp32,
   integers and special functions, and the schedulers that issue one instruction of a warp per clock each. The busiest SM
   has ceil(programs / SMs) programs. Rates are those that a kernel reaches which does nothing else (machine.py). Memory
   has several: for whole lines, and for single sectors, where each lane asks for one of its own. Half of a line that is
   read from DRAM without the other takes as long as one that is read for a single lane. L2 looks for each line that it is
   asked for. Into L2, and from one of its halves to the other, stores come no faster than a kernel writes that does nothing
   else; sectors that an instruction fills only in part need a mask of their bytes beside them. L2 is busy for longer with a
   line in which a program leaves part of a sector to others. (Nsight Compute shows few reads from device memory for it.
   Measured on an H200: 256 MiB stored by rows of 32, 64, 128 and 256 bytes take 101, 69, 67 and 63 µs, and 476, 293, 194
   and 157 where each row begins and ends within a sector.) Parts of lines that leave L2 without the rest are written to
   DRAM one by one. Atomics keep L2's slices busy with updates of sectors, or one element with its changes, which wait for
   one another (contention.py), and a fence keeps its SM busy for longer where the warp's atomics are on more lines. Tensor
   cores fetch what they multiply from shared memory, and if they are busy for more than half of the time, their power brings the
   clock down, at most to that with which a large matmul runs. In
   each clock, each of the 32 banks that L1 and shared memory are made of gives one word: lanes that meet in a bank take
   more clocks (instructions.py, banks.py). So do the lines that L1 must look for, and those from which L1 passes on what
   is copied to shared memory. Words for which there are no registers go through L1 to L2 as others do (spills.py).
2. Sharing an SM.  The warps of the programs that fit on an SM are followed instruction by instruction: they take turns at
   its schedulers and units, at L1 and shared memory and at the tensor cores, and wait for results, for one another at barriers
   and for products (scoreboard.py). Followed with nothing to wait for in L2 and device memory, that is how long programs
   compute which do so together. How much longer one program takes that has an SM to itself and whose loads last as long as
   they do, each time the slowest of those that it needs, is what it waits for memory.
3. Taking turns.  Who waits for loads, computes, then stores, uses one resource at a time; others fill the gaps. With n users
   at different points that each need the resources d1, d2, ... and besides wait for the time z, a balanced network of queues
   takes no longer for all of them than

       d + z + (n - 1) longest / (1 + z / (n d)),  d = d1 + d2 + ...        Lazowska et al. 1984, balanced job bounds

   Such users are the programs on an SM, which take turns at computing and at memory, and z is what they wait for memory.
   Nobody waits for the stores of a program that has ended. What runs in the background (cp.async, TMA) takes no turn; what such
   a program stores, or loads itself, does, and so does the wait for a copy that is still on its way where the code needs it,
   and for device memory that the copies of others keep busy. Programs that begin together load the same at the same time, and
   all wait for who asked first. That bound is for programs at different points. Programs in step take what the simulation of 2.
   says of all of them with their waits, and then memory by turns; the time is the lesser of both.
4. The kernel's time is the largest of these, plus the launch, the wait for the first load and for the last store. Where
   programs differ in length, as under a causal mask, they begin in their order, each where another has ended, and the last ones
   go on alone.
5. A launch finds in L2 what the launches before it used, if all of that fits there (between.py).

Nothing is fitted to kernels.

Sources: https://homes.cs.washington.edu/~lazowska/qsp/ chapter 5; throughputs per SM and clock:
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#arithmetic-instructions
"""

from __future__ import annotations

import contextlib
import heapq
import html
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpukit import dispatch, hardware, tables
from gpukit.simulator.compiler.compile import Compiled, begin, compile
from gpukit.simulator.interpreter.addresses import SECTOR_BYTES
from gpukit.simulator.prediction import mix, scoreboard
from gpukit.simulator.prediction.between import Between, warmed
from gpukit.simulator.prediction.machine import Machine, machine
from gpukit.simulator.trace.contention import Contention, unknown
from gpukit.simulator.trace.launch import Launch
from gpukit.simulator.trace.levels import LINE_SECTORS
from gpukit.simulator.trace.torch_ops import TorchOp
from gpukit.simulator.trace.tracer import Trace, trace

if TYPE_CHECKING:
    from gpukit.simulator.trace.caches import SiteTraffic, Traffic

SAMPLE = 2  # programs of each launch that are looked at whole, at least
MEMORY, L2, L1, TENSOR = "device memory", "L2", "L1 and shared memory", "tensor cores"
FP32, INTEGER, SPECIAL, ISSUE = "fp32 arithmetic", "integers and logic", "special functions", "instruction issue"
STARTING, WAITING, LAUNCH, TURNS = "starting programs", "waiting for results", "launch", "taking turns"
RESOURCES = (MEMORY, L2, L1, TENSOR, FP32, INTEGER, SPECIAL, ISSUE, STARTING, WAITING, LAUNCH, TURNS)
_MANY_WAVES = 16  # programs on each place of an SM, one after another, of which the last ones show how a launch ends
_COMPUTING = FP32, INTEGER, SPECIAL, ISSUE

L2_BYTES_PER_CLOCK_AND_SM = 64  # what one SM takes at most; machine.csv, "L2, one SM"
L2_SLICES = {"h100-sxm": 80}  # as Nsight Compute counts them, and what goes to which (contention.py)
_MANY_STRETCHES = 1000  # of a tensor that is spread over all slices
L1_BYTES_PER_CLOCK = 128  # and shared memory, per SM; "L1, one SM"
# PyTorch's own kernels reach 0.78 (layer norm) to 1.0 (add) of what the model allows on an H200: the middle.
TORCH_OP = 0.87

# Lanes per clock and SM, by the unit of mix.UNITS; fp32 lanes are those of the Gpu.
_LANES = {"alu": 64, "imad": 64, "multiply high": 32, "special": 16, "convert": 16, "shuffle": 32}
_TENSOR_DTYPES = {"f16": "fp16", "bf16": "bf16", "tf32": "tf32", "e4m3": "fp8", "e5m2": "fp8", "f8f6f4": "fp8"}
_TENSOR_DTYPES |= {"s8": "int8", "u8": "int8", "f64": "fp64", "b8": "int8"}


@dataclass(frozen=True)
class Step:
    """One launch or PyTorch op. `resources` are µs that each would take alone; `time_us` is not their sum. `programs` on
    an SM at a time, `waves` of them; `mix` is what one warp executes. None and 0 where they do not apply. `most_us` is
    the time if all atomics meet that may, more than `time_us` where their addresses are not known."""

    name: str
    time_us: float
    resources: dict[str, float]
    launch: Launch | None = field(default=None, repr=False)
    compiled: Compiled | None = field(default=None, repr=False)
    mix: mix.Mix | None = field(default=None, repr=False)
    programs: int = 0
    waves: float = 0.0
    most_us: float = 0.0

    @property
    def uncertain(self) -> str:
        """Why it may take clearly longer; empty where the model knows all that it needs."""
        assumed = [
            f"at least {self.time_us:,.1f} µs: {self.name}, {each}"
            for each in (self.launch.assumed if self.launch else ())
        ]
        return ". ".join([*filter(None, [self._range, self._spread]), *assumed])

    @property
    def _spread(self) -> str:
        """Of a sampled launch whose programs go by integers: what it takes if the sample's mean is not that of all."""
        if self.launch is None or not self.launch.spread:
            return ""
        least, most = (each * self.time_us for each in self.launch.spread)
        return (
            f"{least:,.1f} to {most:,.1f} µs: the programs of {self.name} go by integers in memory, and those of the "
            f"{self.launch.sampled} that were looked at do not move the same; sample=None, on tensors that exist, runs all"
        )

    @property
    def _range(self) -> str:
        if self.most_us < 1.05 * self.time_us:
            return ""
        if self.launch is None:
            return f"up to {self.most_us:,.1f} µs: {self.name} goes by indices, and whether these meet or lie apart is not known"
        how = (
            "and how many of them meet is not known"
            if self.launch.sampled is None
            else (
                f"and {self.launch.sampled} of {self.launch.programs:,} programs were looked at: sample=None, on tensors that "
                "exist, counts how many meet"
            )
        )
        return f"up to {self.most_us:,.1f} µs: {self.name} changes elements by atomics, {how}"

    @property
    def limit(self) -> str:
        """The resource that takes longest."""
        alone = {name: us for name, us in self.resources.items() if name != TURNS}
        return max(alone, key=alone.__getitem__)


@dataclass(frozen=True)
class Prediction:
    """What `predict` says.

    time_us     of all steps, one after the other
    most_us     the same where all atomics meet that may; more than time_us where a sample does not show their addresses
    resources   µs that each resource is needed for, summed over the steps; "taking turns" is what could not overlap
    limit       the resource that is needed longest in the step that takes longest
    """

    gpu: hardware.Gpu
    machine: Machine
    steps: tuple[Step, ...]

    @property
    def time_us(self) -> float:
        return sum(step.time_us for step in self.steps)

    @property
    def most_us(self) -> float:
        return sum(max(step.time_us, step.most_us) for step in self.steps)

    @property
    def uncertain(self) -> list[str]:
        """The reasons for which it may take clearly longer, one for each such step."""
        return [step.uncertain for step in self.steps if step.uncertain]

    @property
    def limit(self) -> str:
        return max(self.steps, key=lambda step: step.time_us).limit

    @property
    def resources(self) -> dict[str, float]:
        total = {name: sum(step.resources.get(name, 0.0) for step in self.steps) for name in RESOURCES}
        return {name: us for name, us in total.items() if us > 0}

    def rows(self) -> list[tuple[str, float, bool]]:
        """(resource, µs, whether it is the limit), for a chart."""
        return [(name, us, name == self.limit) for name, us in self.resources.items()]

    def report(self) -> str:
        """The steps, and a bar for each resource, as text."""
        longest = max(*self.resources.values(), self.time_us)
        lines = [f"{self.time_us:,.1f} µs on {self.gpu.name}, limited by {self.limit}", ""]
        lines += tables.aligned(
            [
                (name, f"{us:>10,.1f} µs", "#" * max(1, round(40 * us / longest)) + " <- limit" * is_limit)
                for name, us, is_limit in self.rows()
            ]
        )
        if len(self.steps) > 1:
            lines += ["", *(f"{step.time_us:>10,.1f} µs  {step.name}, {step.limit}" for step in self.steps)]
        lines += ["", *self.uncertain] if self.uncertain else []
        return "\n".join([*lines, "", f"rates reached: {self.machine.source}"])

    def __str__(self) -> str:
        return self.report()

    def _repr_html_(self) -> str:
        longest = max(*self.resources.values(), self.time_us)

        def bar(us: float, is_limit: bool) -> str:
            style = f"width:{200 * us / longest:.0f}px;height:0.8em;background:currentColor"
            return f'<div style="{style};opacity:{0.9 if is_limit else 0.35}"></div>'

        rows = "".join(
            f'<tr><td style="text-align:left">{html.escape(name)}</td><td>{us:,.1f} µs</td>'
            f'<td style="text-align:left">{bar(us, is_limit)}</td></tr>'
            for name, us, is_limit in self.rows()
        )
        head = f"{self.time_us:,.1f} µs on {html.escape(self.gpu.name)}, limited by {html.escape(self.limit)}"
        notes = "".join(f"<p>{html.escape(reason)}</p>" for reason in self.uncertain)
        return f"<p><b>{head}</b></p><table>{rows}</table>{notes}"


def predict(
    work: Callable[[], object], gpu: str | hardware.Gpu = "h200", sample: int | None = SAMPLE, torch_ops: bool = True
) -> Prediction:
    """The time of everything that `work()` launches, on any GPU of the table.

        x = torch.empty(4096, 65536, dtype=torch.bfloat16, device="meta")    # a size is all that counts: no memory
        gpukit.predict(lambda: softmax(x), gpu="a100")

    sample   programs of each launch to look at, or more where these differ; the others are taken to be like them. None
             runs all of them, on tensors that must then exist. Inputs and outputs are not touched where it is a number.
    torch_ops  False leaves PyTorch's own operations out, such as those that make the inputs

    Raises ValueError for an unknown GPU, for work that launches nothing, and for a kernel that does not fit on the GPU;
    CompileError for one that does not compile.
    """
    target = gpu if isinstance(gpu, hardware.Gpu) else hardware.gpu(gpu)
    with trace(gpu=target, sample=sample) as t, _OpFacts(t) as facts, _line_counter(target) as lines:
        work()
    numbers = {id(launch): number for number, launch in enumerate(t.launches)}
    reached = machine(target)
    steps: list[Step] = []
    between = Between(target)
    for position, event in enumerate(t.events):
        overhead = reached.next_launch_us if steps else reached.launch_us
        if isinstance(event, Launch) and event.programs:
            _refuse_what_does_not_fit(event, target)
            number = numbers[id(event)]
            ran = (
                lines.launches[number]
                if event.sampled is None
                else lines.executions(number, event.recording.stands_for)
            )
            executions = {statement: n / event.programs for statement, n in ran.items()}
            steps.append(launch_step(event, compile(event, gpu=target), executions, overhead, between.launched(event)))
        elif isinstance(event, TorchOp) and event.bytes and torch_ops:
            steps.append(_op_step(event, facts.of.get(position), target, overhead))
            between.moved(event.bytes)
    if not steps:
        raise ValueError("predict: nothing was launched and no PyTorch op moved anything; pass a function that does")
    return Prediction(target, reached, tuple(steps))


def _line_counter(gpu: hardware.Gpu):
    try:
        from gpukit.simulator.interpreter.lines import LineCounter
    except ModuleNotFoundError:  # no Triton outside Linux: PyTorch ops can be predicted all the same
        return contextlib.nullcontext()
    return LineCounter(lambda call: begin(call, gpu))


def _refuse_what_does_not_fit(launch: Launch, gpu: hardware.Gpu) -> None:
    given = [getattr(value, "base", value) for value in launch.arguments.values()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in given if isinstance(t, torch.Tensor)}
    if sum(storages.values()) > gpu.hbm_bytes:
        raise ValueError(
            f"{launch.kernel} is given tensors of {sum(storages.values()) / 1e9:,.0f} GB, and {gpu.name} has "
            f"{gpu.hbm_bytes / 1e9:,.0f} GB"
        )


# ---- one launch ---------------------------------------------------------------------------------------------------


def launch_step(
    launch: Launch,
    compiled: Compiled,
    executions: mix.Executions | None,
    overhead_us: float | None = None,
    in_l2: dict[str, float] | None = None,
) -> Step:
    """The model of the module's docstring for one launch: what was traced, what was compiled, how often lines ran.
    `overhead_us` None stands for a launch on an idle stream; `in_l2`: of its tensors, by name, the bytes that L2 has when it begins."""
    gpu, reached = compiled.gpu, machine(compiled.gpu)
    clock = _mhz(compiled)  # cycles per µs
    _refuse_what_cannot_run(launch, compiled)
    per_sm = -(-launch.programs // gpu.sms)  # on the busiest SM
    together = min(compiled.occupancy.programs, per_sm)
    warp = mix.mix(compiled, executions)
    traffic = warmed(_traffic(launch, compiled), launch, in_l2 or {})

    # 1. Each resource alone, in µs.
    work = _per_program(launch, compiled, warp, traffic)
    alone = {
        **_memory_us(launch, compiled, warp, traffic),
        **{name: us * per_sm for name, us in work.items()},
        STARTING: launch.programs / reached.starts_per_us,
    }
    alone[L1] += per_sm * compiled.num_warps * warp.bytes.get("operands", 0.0) / L1_BYTES_PER_CLOCK / clock
    times = mix.weights(compiled, executions)
    multiplies = _tensor_cycles(compiled, launch.flops / launch.programs)
    products = _products(compiled, times, multiplies)
    alone[TENSOR] = max(alone[TENSOR], sum(times[i] * each for i, each in products.items()) * per_sm / clock)

    # 2. and 3. Sharing an SM, and taking turns.
    turns, alone[WAITING] = _shared_us(launch, compiled, warp, traffic, work, times, multiplies, products)

    # 4. Together.
    busy_share = per_sm * multiplies / clock / max(turns, *alone.values())
    turns *= clock / _mhz_while(busy_share, compiled)
    longest = max(alone.values())
    busy = max(longest, turns)
    # The last programs begin when others end, and long ones among them go on alone.
    ragged = _ragged(launch, gpu.sms * together)
    busy *= 1 + (ragged - 1) * min(1.0, _MANY_WAVES * together / per_sm)
    alone[TURNS] = busy - longest
    alone[LAUNCH] = (reached.launch_us if overhead_us is None else overhead_us) + 2e-3 * reached.dram_ns
    resources = {name: alone[name] for name in RESOURCES if alone.get(name)}
    in_waves = launch.programs / (gpu.sms * together)
    met = [_contention_us(each, gpu) for each in traffic.contention]
    most = max(busy, alone[L2] + sum(at_most - least for least, at_most in met)) + alone[LAUNCH]
    return Step(launch.kernel, busy + alone[LAUNCH], resources, launch, compiled, warp, together, in_waves, most)


def _refuse_what_cannot_run(launch: Launch, compiled: Compiled) -> None:
    gpu, fit = compiled.gpu, compiled.occupancy
    if not fit.programs:
        raise ValueError(
            f"{launch.kernel} cannot run on {gpu.name}: a program asks for {compiled.shared_bytes:,} bytes of shared "
            f"memory and {compiled.registers} registers in each of {compiled.threads} threads, and {fit.limit} do not "
            f"suffice (at most {gpu.smem_per_block_bytes:,} bytes and {gpu.registers_per_sm:,} registers)"
        )
    if any(use.instruction == "tcgen05" for use in compiled.tensor_core):
        raise ValueError(
            f"{launch.kernel}: no time is predicted on {gpu.name}, where products run on tcgen05, in the background and with a "
            "memory of their own: nothing here was measured on such a GPU (gpukit.trace and gpukit.compile count all the same)"
        )


def _shared_us(
    launch: Launch, compiled: Compiled, warp: mix.Mix, traffic: Traffic | SimpleNamespace, work: dict[str, float],
    times: list[float], multiplies: float, products: dict[int, float],
) -> tuple[float, float]:  # fmt: skip
    """µs for which the busiest SM takes turns at its programs, and for how much of it these wait for results. `work`: µs for which
    one program keeps each unit busy; `times`: how often each instruction runs; the tensor cores multiply for so many cycles of a
    program, and for each instruction of `products`."""
    reached, clock = machine(compiled.gpu), _mhz(compiled)
    per_sm = -(-launch.programs // compiled.gpu.sms)
    together = min(compiled.occupancy.programs, per_sm)
    waits_for_loads = not _asynchronous(launch, compiled)
    in_turn = traffic if waits_for_loads else _in_the_open(traffic, compiled)
    memory = max(_memory_us(launch, compiled, warp, in_turn).values()) / per_sm
    loads = {name: us / per_sm for name, us in _memory_us(launch, compiled, warp, _loads(traffic)).items()}
    loading = max(loads.values())
    units = [max(0.0, work[L1] - _copied_us(launch, compiled, traffic)), *(work[name] for name in _COMPUTING)]
    late = {name: ns * 1e-3 * clock for name, ns in _latencies(traffic, reached).items()}
    loaded = _waits(traffic, reached, clock, compiled.num_warps)
    copies = _copying(compiled, times, traffic, loading * clock, reached)
    shared = scoreboard.Sm(
        compiled.num_warps, 1, _in_l1(launch, compiled, times, traffic), _multiplying(compiled, times, multiplies)
    )

    @cache
    def simulated(programs: int, loads_wait: bool = False, copies_wait: bool = False) -> float:
        """µs that programs take which share an SM and begin together, of what is in device memory and L2 only what is said."""
        waits = (late, loaded) if loads_wait else ({}, None)
        goes_on = scoreboard.Background(products, copies if copies_wait else dict.fromkeys(copies, (0.0, 0.0)))
        return scoreboard.cycles(compiled, times, *waits, goes_on, shared._replace(programs=programs)) / clock

    nothing_is_late, loads_are_late = simulated(1), simulated(1, True)
    coming = simulated(1, True, True) - loads_are_late if copies else 0.0
    # What a program stores at its end is under way while the next one begins.
    waited = loading if waits_for_loads and per_sm > together else memory
    waits = loads_are_late - nothing_is_late + max(0.0, coming - waited)  # copies arrive while others are waited for
    # The part of it for which device memory is waited for that others' copies keep busy.
    copied = 0.0 if waits_for_loads else min(coming, loads[MEMORY])
    compute = max(units)
    of_a_warp = scoreboard.cycles(compiled, times, {}) / clock
    waiting = (waits + max(0.0, of_a_warp - compute)) * per_sm / together
    waves, rest = divmod(per_sm, together)
    turns, share = 0.0, 1.0
    for programs, times_over in ((together, waves), (rest, 1)):
        if programs and times_over:
            computing = max(nothing_is_late if programs == 1 else simulated(programs) / programs, compute)
            staggered = _in_turn(programs, computing + waited + waits, (computing, max(memory, copied)))
            if programs == together:  # fewer programs of the last round, if there is one, gain as much
                in_step = simulated(programs, True)
                if copies:
                    in_step = max(in_step, simulated(programs, True, True) - waited)
                in_step = _in_turn(programs, max(in_step, programs * compute) + waited, (max(memory, copied),))
                share = min(1.0, in_step / staggered)
            turns += times_over * max(nothing_is_late + waited + waits, share * staggered)
    return turns, waiting


def _products(compiled: Compiled, times: list[float], cycles: float) -> dict[int, float]:
    """Of each instruction of a warp group, by its number, the cycles that tensor cores need for it: for multiplying, for which
    those of a program need so many, or for fetching what they multiply from shared memory."""
    flops = {i: mix.product_flops(each) for i, each in enumerate(compiled.instructions) if each.base.endswith("GMMA")}
    if not any(times[i] for i in flops):
        return {}
    groups = max(1.0, compiled.num_warps / scoreboard.SCHEDULERS)
    total = sum(times[i] * n for i, n in flops.items()) * groups
    fetched = {
        i: scoreboard.SCHEDULERS * mix.operand_bytes(compiled.instructions[i]) / L1_BYTES_PER_CLOCK for i in flops
    }
    return {i: max(cycles * n / total, fetched[i]) for i, n in flops.items()}


def _multiplying(compiled: Compiled, times: list[float], cycles: float) -> dict[int, float]:
    """Of each instruction with which one warp multiplies (mma), by its number, the cycles for which it keeps the tensor core of
    its scheduler busy, of which those of a program have so many on each scheduler."""
    found = [i for i, each in enumerate(compiled.instructions) if each.base in ("HMMA", "IMMA", "DMMA", "QMMA", "BMMA")]
    total = sum(times[i] for i in found) * compiled.num_warps / scoreboard.SCHEDULERS
    return dict.fromkeys(found, cycles / total) if total else {}


def _in_l1(
    launch: Launch, compiled: Compiled, times: list[float], traffic: Traffic | SimpleNamespace
) -> dict[int, float]:
    """Of each instruction that asks L1 or shared memory, by its number, the clocks for which it keeps them busy."""
    found: dict[int, float] = {}
    by_line: dict[tuple[str, tuple[str, int]], list[int]] = {}
    clocks = _l1_clocks(compiled, traffic)
    for i, instruction in enumerate(compiled.instructions):
        unit = mix.unit(instruction)
        if unit == "shared":
            found[i] = max(1.0, mix.shared_turns(compiled, instruction)[0])
        elif unit == "local":
            found[i] = max(1.0, mix.thread_bytes(instruction) / 4)
        elif unit in ("shuffle", "global"):
            found[i] = 1.0
        kind = {"LDG": "load", "LD": "load", "LDGSTS": "load", "STG": "store", "ST": "store"}.get(instruction.base)
        if kind and not mix.puts_zeros(instruction):
            line = next((line for line in instruction.own_frames if (kind, line) in clocks), None)
            if line:
                by_line.setdefault((kind, line), []).append(i)
    for place, numbers in by_line.items():
        executed = sum(times[i] for i in numbers) * compiled.num_warps * launch.programs
        found.update((i, max(1.0, clocks[place] / executed)) for i in numbers if executed)
    return found


def _l1_clocks(compiled: Compiled, traffic: Traffic | SimpleNamespace) -> dict[tuple[str, tuple[str, int]], float]:
    """For which a launch keeps L1 busy, by what it does and the line of the source."""
    found: Counter = Counter()
    copied = _copied(compiled, traffic)
    for site in traffic.sites:
        if site.via != "tma":
            clocks = _copied_clocks(compiled, [site]) if site in copied else site.l1_clocks
            found[site.kind, (site.file, site.line)] += clocks
    return found


def _latencies(traffic: Traffic | SimpleNamespace, reached: Machine) -> dict[str, float]:
    """ns that a load lasts in the mean, one of a word for which there was no register, an atomic, and a fence besides it."""
    hits, found = traffic.l2_hit_rate, traffic.l1_hit_rate
    missed = traffic.reloads_missed
    return {
        "load": found * reached.l1_ns + (1 - found) * (hits * reached.l2_ns + (1 - hits) * reached.dram_ns),
        "local": missed * reached.l2_ns + (1 - missed) * reached.l1_ns,
        "atomic": reached.atomic_ns,
        "fence": reached.fenced_atomic_ns - reached.atomic_ns,
    }


def _copying(
    compiled: Compiled, times: list[float], traffic: Traffic | SimpleNamespace, loading: float, reached: Machine
) -> dict[int, tuple[float, float]]:
    """Of each instruction that copies to shared memory, by its number: cycles for which what it copies is on the way, of the
    `loading` cycles that L2 and device memory need for what a program loads, and how much later it is there."""
    found: dict[int, tuple[float, float]] = {}
    sites = [site for site in _copied(compiled, traffic) if site.l2_sectors]
    for bases, via in (("LDGSTS", "lsu"), ("UTMALDG", "tma")):
        numbers = [i for i, each in enumerate(compiled.instructions) if each.base == bases and not mix.puts_zeros(each)]
        asked = sum(times[i] for i in numbers) * (compiled.num_warps if via == "lsu" else 1)
        moved = [site for site in sites if (site.via == "tma") == (via == "tma")]
        if not asked or not moved:
            continue
        sectors = sum(site.l2_sectors for site in moved)
        share = sectors / max(sectors, traffic.l2_read_sectors)
        first = sum(site.first * site.l2_sectors for site in moved) / sectors
        from_dram = min(1.0, sum(site.dram_bytes for site in moved) / (sectors * SECTOR_BYTES))
        latency = reached.l2_ns + _begun_together(traffic, first, from_dram) * reached.tile_ns
        found.update(dict.fromkeys(numbers, (share * loading / asked, latency * 1e-3 * _mhz(compiled))))
    return found


def _begun_together(traffic: Traffic | SimpleNamespace, first: float, from_dram: float) -> float:
    """Of what is loaded, the share for which device memory is waited for. Programs that begin together ask for the same at the
    same time, and all wait for who asked first. Those that follow them do not begin together, and find it in L2."""
    begun = min(1.0, 1 / traffic.waves)
    return begun * max(first, from_dram) + (1 - begun) * from_dram


def _waits(
    traffic: Traffic | SimpleNamespace, reached: Machine, clock: float, num_warps: int
) -> dict[tuple[str, int], scoreboard.Wait]:
    """How the loads of each line of the source wait. Of several tensors on one line, which are waited for together, for the
    slowest of those that L1 lacks."""
    lines: dict[tuple[str, int], list[SiteTraffic]] = {}
    for site in traffic.sites:
        if site.kind == "load" and site.new:
            lines.setdefault((site.file, site.line), []).append(site)
    found = {}
    for line, sites in lines.items():
        share = sum(site.late for site in sites) / sum(site.instructions for site in sites)
        accesses, in_late = sum(site.accesses for site in sites), sum(site.in_late for site in sites)
        parts = [
            sum(late * site.accesses for late, site in zip(column, sites, strict=True)) / accesses
            for column in zip(*(site.late_parts for site in sites), strict=True)
        ]
        within = sum(site.late for site in sites) / in_late if in_late else 0.0
        at_once = sum(max(1, round(site.instructions / site.accesses / num_warps)) for site in sites)
        slow = [site for site in sites if 2 * site.late >= share * site.instructions]
        from_dram, last = max(((_from_dram(site, traffic), site) for site in slow), key=lambda pair: pair[0])
        found[line] = scoreboard.Wait(tuple(parts), at_once, within, from_dram, *_last_piece(last, reached, clock))
    return found


def _last_piece(site: SiteTraffic, reached: Machine, clock: float) -> tuple[float, scoreboard.Memory]:
    """For how many pieces of device memory a late instruction waits, and what they last. Of pieces in which many instructions
    follow one another, the lines come one soon after the other."""
    pieces = site.pieces / site.late if site.late else 1.0
    last = reached.last_of_8_ns if pieces >= 0.5 else reached.last_in_a_row_ns
    each = reached.l1_ns, reached.l2_ns, reached.dram_ns, last / _LAST_OF_8
    return max(1.0, pieces), scoreboard.Memory(*(ns * 1e-3 * clock for ns in each))


# By so many times the spread comes the last of 8 later than one, where what one lasts beyond the least is exponentially
# distributed: 1/2 + 1/3 + ... + 1/8.
_LAST_OF_8 = sum(1 / n for n in range(2, 9))


def _from_dram(site: SiteTraffic, traffic: Traffic | SimpleNamespace) -> float:
    """Of a site's loads that L1 lacks, the share that L2 lacks, too."""
    from_dram = min(1.0, site.dram_bytes / (site.l2_sectors * SECTOR_BYTES)) if site.l2_sectors else 0.0
    from_dram = _begun_together(traffic, site.first, from_dram)
    # The other sector of a pair comes to L2 with the first, which this load asks for or one before it.
    return from_dram * site.new_pairs / site.new * (site.fresh / site.late if site.late else 1.0)


def _ragged(launch: Launch, slots: int) -> float:
    """By how many times longer a launch takes because its programs differ in length: they begin in the order of their numbers, each
    where one has ended, on so many places of the SMs. A program is as long as the nearest of those that were looked at from
    beginning to end, along the axis of the grid on which their lengths change least."""
    recording, programs = launch.recording, launch.programs
    numbers = recording.program if launch.sampled is None else recording.program[: recording.whole]
    counts = Counter(numbers)
    if len({*counts.values()}) < 2:
        return 1.0
    known, lengths = np.array(sorted(counts)), np.array([counts[number] for number in sorted(counts)], dtype=float)
    x, y = (*launch.grid, 1)[:2]

    def roughness(axis: Callable) -> float:
        order = np.lexsort((known, axis(known)))
        return float(np.abs(np.diff(lengths[order])).sum())

    axes = (lambda n: n), (lambda n: n % x), (lambda n: n // x % y), (lambda n: n // (x * y))
    axis = min(axes, key=roughness)
    order = np.argsort(axis(known), kind="stable")
    places, last = axis(known)[order], axis(np.arange(programs))
    at = np.clip(np.searchsorted(places, last), 1, places.size - 1)
    at -= last - places[at - 1] < places[at] - last
    every = lengths[order][at]
    every = every[-slots * _MANY_WAVES :]  # the last ones show how it ends
    ends = [0.0] * min(slots, every.size)
    for length in every.tolist():
        heapq.heapreplace(ends, ends[0] + length)
    return max(1.0, max(ends) / (every.mean() * -(-every.size // slots)))


def _in_turn(users: float, alone: float, needs: Sequence[float]) -> float:
    """µs until so many users of common resources are done that begin together. Each of them takes `alone` by itself, and needs
    each resource for so long."""
    alone = max(alone, *needs)
    needed = min(sum(needs), alone)
    if not needed:
        return alone
    return alone + (users - 1) * max(needs) / (1 + (alone - needed) / (users * needed))


def _traffic(launch: Launch, compiled: Compiled) -> Traffic | SimpleNamespace:
    if launch.accesses and launch.recording.complete:
        return launch.traffic(compiled.gpu, compiled)
    # There is nothing to play through the caches, or too many irregular accesses: as if these held nothing.
    reads, writes, atomics = launch.load_sectors, launch.store_sectors, launch.atomic_sectors
    return SimpleNamespace(
        l1_read_sectors=reads, l2_read_sectors=reads, l2_write_sectors=writes, l2_atomic_sectors=atomics,
        l1_hit_rate=0.0, l2_hit_rate=0.0, dirty_bytes=0, sites=(), unanswered_sectors=0, reloads_missed=0.0,
        pieces=0, piece_bytes=0,
        contention=tuple(unknown(a.tensor, launch.arguments.get(a.tensor), a.lanes) for a in launch.accesses if a.kind == "atomic"),
        dram_read_bytes=(reads + atomics) * SECTOR_BYTES, dram_write_bytes=(writes + atomics) * SECTOR_BYTES,
    )  # fmt: skip


# ---- memory -------------------------------------------------------------------------------------------------------


def _memory_us(launch: Launch, compiled: Compiled, warp: mix.Mix, traffic: Traffic) -> dict[str, float]:
    """µs of DRAM and of L2 for the whole launch."""
    gpu, reached = compiled.gpu, machine(compiled.gpu)
    fetched = 0  # bytes of DRAM that lanes ask for one by one, and of pieces that bring half of a line: as long as a whole one
    scattered = {(a.tensor, a.line) for a in launch.accesses if a.kind == "load" and 2 * a.sectors > a.lanes}
    for site in traffic.sites:
        if site.kind == "load":
            fetched += site.dram_bytes if (site.tensor, site.line) in scattered else site.dram_half_bytes
    # What is still in L2 at the end took the place of what others had written there.
    written = traffic.dram_write_bytes + traffic.dirty_bytes - traffic.piece_bytes
    dram = _dram_us(max(0, traffic.dram_read_bytes - fetched), written, reached)
    # Loads and stores cross between L2 and the SMs in directions of their own.
    loaded = (traffic.l2_read_sectors - traffic.l2_atomic_sectors + traffic.unanswered_sectors) * SECTOR_BYTES
    one_sm = L2_BYTES_PER_CLOCK_AND_SM * min(gpu.sms, launch.programs) * gpu.boost_mhz
    # A sector that comes for one lane alone takes as long to arrive as two that come together.
    alone = sum(site.alone for site in traffic.sites) * SECTOR_BYTES
    l2 = max(0.0, loaded / (reached.l2_gbps * 1e3), (loaded + alone) / one_sm)
    if traffic.l2_atomic_sectors:
        l2 += _all_slices_us(traffic.contention, gpu)
        fences = sum(n for opcode, n in warp.opcodes.items() if opcode.startswith("MEMBAR") and ".GPU" in opcode)
        fences *= compiled.num_warps
        asked = sum(each.requests for each in traffic.contention) / launch.programs
        l2 += fences * -(-launch.programs // gpu.sms) * _fence_us(gpu, asked / fences) if fences else 0.0
        # Changes of one element wait for one another, while the rest of L2 goes on.
        l2 = max(l2, *(_contention_us(each, gpu)[0] for each in traffic.contention))
    l2 = max(l2, *_stored_us(traffic, one_sm, reached), _asked_us(traffic, reached), _left_us(launch, traffic, reached))
    dram += fetched / (2 * SECTOR_BYTES) / reached.single_reads_per_us + traffic.pieces / reached.pieces_per_us
    return {MEMORY: dram, L2: l2}


# A part of a sector needs a mask of its bytes beside it, for which stores were measured to take so much longer on an H200:
# 143,800 whole sectors per µs, and 119,800 in part.
_MASKED = 1.2


def _stored_us(traffic: Traffic | SimpleNamespace, one_sm: float, reached: Machine) -> tuple[float, float]:
    """µs for which L2 is busy with taking in what is stored, and with passing on between its halves what belongs to the other
    one: half of what is stored, and of what is read from DRAM."""
    stores = [site for site in traffic.sites if site.kind == "store"]
    odd, requests = sum(site.odd_sectors for site in stores), sum(site.odd_requests for site in stores)
    whole = max(0, traffic.l2_write_sectors - odd)
    # A request takes as long to announce as one sector: a single one counts twice, and four that come together five times.
    per_us = 2 * reached.l2_single_stores_per_us
    whole_per_us = _MASKED * per_us * 4 / 5
    into = whole / min(whole_per_us, one_sm / SECTOR_BYTES) + (requests + odd) / per_us
    return into, (whole + traffic.dram_read_bytes / SECTOR_BYTES + _MASKED * odd) / whole_per_us


def _left_us(launch: Launch, traffic: Traffic | SimpleNamespace, reached: Machine) -> float:
    """µs for which L2 is busy with lines in which programs leave parts of sectors to others. Single elements, of which each lane has
    one in a sector of its own, were measured to take no longer than other parts of sectors."""
    lanes = {(a.kind, a.tensor, a.line): a.lanes for a in launch.accesses}
    stores = [site for site in traffic.sites if site.kind == "store"]
    several = [site for site in stores if 4 * site.l1_sectors <= 3 * lanes["store", site.tensor, site.line]]
    # What nobody completes L2 reads from DRAM, and it is counted there.
    completed = traffic.dram_read_bytes - sum(site.dram_bytes for site in traffic.sites)
    parts = sum(site.parts for site in several) - completed / (LINE_SECTORS * SECTOR_BYTES)
    return parts / reached.l2_parts_per_us + sum(site.small_parts for site in several) / reached.l2_small_parts_per_us


def _asked_us(traffic: Traffic | SimpleNamespace, reached: Machine) -> float:
    """µs for which L2 looks for the lines that loads and stores ask for: for one as long as for a single sector. What belongs to its
    other half is looked for in both: half of what is stored, and of what is read from DRAM."""
    lines = 0.0
    for site in traffic.sites:
        if site.kind != "atomic" and site.l2_sectors:
            away = 1.0 if site.kind == "store" else min(1.0, site.dram_bytes / (site.l2_sectors * SECTOR_BYTES))
            lines += site.requests * (1 + away / 2)
    return lines / reached.l2_single_loads_per_us


def _fence_us(gpu: hardware.Gpu, lines: float) -> float:
    """For which an SM is busy with one fence of one warp, which waits for atomics on so many lines: what 32 fenced atomics take longer
    than others, where these are on one line and where each has its own."""
    reached = machine(gpu)
    one = 1 / reached.fenced_atomics_in_order_per_us - 1 / reached.atomics_in_order_per_us
    many = 1 / reached.fenced_atomics_per_us - 1 / reached.atomics_per_us
    return 32 * gpu.sms * (one + (many - one) * min(1.0, max(0.0, lines - 1) / 31))


def _dram_us(read: float, written: float, reached: Machine) -> float:
    """As much of both as there is of the lesser goes at the rate of a copy, the rest at that of reading or writing."""
    both = 2 * min(read, written)
    rest = reached.read_gbps if read > written else reached.write_gbps
    return (both / reached.copy_gbps + (read + written - both) / rest) * 1e-3


def _all_slices_us(contention: Sequence[Contention], gpu: hardware.Gpu) -> float:
    """For which atomics on several tensors keep the busiest slice of L2 busy. Those on small tensors, which are in a few slices, wait
    for one another. Of large ones the popular elements are in different slices, and to the fullest the others add what they add to
    every slice."""
    full = [_slices_us(each, gpu) for each in contention]
    even = [
        min(us, each.updates / machine(gpu).atomics_per_us) if each.stretches > _MANY_STRETCHES else us
        for us, each in zip(full, contention, strict=True)
    ]
    return max((us - own for us, own in zip(full, even, strict=True)), default=0.0) + sum(even)


def _slices_us(of: Contention, gpu: hardware.Gpu) -> float:
    """For which the atomics on one tensor keep the slice of L2 busy that has most to do with their updates of sectors."""
    reached = machine(gpu)
    a_slice = reached.atomics_on_one_per_us / 32  # a warp's adds to one element are one request
    fullest = of.fullest / a_slice
    if gpu.key not in L2_SLICES:
        return max(fullest, of.updates / _atomics_per_us(of.lines, reached))
    # Or with the requests that pass it. Of two halves of L2 an SM asks the near one, so that every other request also passes
    # a slice that hands it on. As long as few slices are asked, these are others.
    slices, stretches = L2_SLICES[gpu.key], max(1, of.stretches)
    share = -(-stretches // slices) / stretches  # of the stretches, those in the fullest slice
    passing = 1.5 if stretches**2 > slices / 2 else 1.0
    return max(
        fullest, share * max(of.updates / a_slice, of.requests * passing / 1.5 * slices / reached.atomics_per_us)
    )


def _atomics_per_us(lines: float, reached: Machine) -> float:
    """Sectors of atomics that L2 answers where its slices have not been counted: chance spreads the lines over as many as are
    busy when all of L2 is, and all wait for the slice to which most fell: so many that there is one such slice in every other
    case, by Poisson's law."""
    of_a_slice = reached.atomics_on_one_per_us / 32  # a warp's adds to one element are one request
    slices = reached.atomics_per_us / of_a_slice
    if lines > 20 * slices:
        return reached.atomics_per_us
    share = or_less = math.exp(-lines / slices)  # of the slices with so many lines, and with so many or less
    fullest = 0
    while slices * (1 - or_less) >= 0.5:
        fullest += 1
        share *= lines / slices / fullest
        or_less += share
    return of_a_slice * min(slices, lines / max(1, fullest))


def _contention_us(of: Contention, gpu: hardware.Gpu) -> tuple[float, float]:
    """For which the atomics on one tensor take at least, and at most: the slices of L2 with their updates of sectors, or
    one element with its changes, which wait for one another."""
    reached = machine(gpu)
    one_ns = 1e3 / reached.float_atomics_on_one_per_us if of.floating else 32e3 / reached.atomics_on_one_per_us
    slices = _slices_us(of, gpu)
    return max(slices, of.busiest * one_ns * 1e-3), max(slices, of.busiest_most * one_ns * 1e-3)


# ---- the units of an SM -------------------------------------------------------------------------------------------


def _per_program(launch: Launch, compiled: Compiled, warp: mix.Mix, traffic: Traffic) -> dict[str, float]:
    """µs for which one program keeps each unit of its SM busy."""
    gpu, warps = compiled.gpu, compiled.num_warps

    def lanes(*units: str) -> float:
        """Cycles for these units' instructions."""
        rates = {"fma": gpu.fp32_lanes_per_sm, "fp64": _fp64_lanes(gpu), **_LANES}
        return sum(warps * 32 * warp.units.get(unit, 0.0) / rates[unit] for unit in units)

    copied = _copied(compiled, traffic)
    by_threads = [site for site in traffic.sites if site.kind in ("load", "store") and site not in copied]
    moved = warps * (warp.bytes.get("shared", 0.0) + warp.bytes.get("local", 0.0))
    clocks = sum(site.l1_clocks for site in by_threads if site.via != "tma") + _copied_clocks(compiled, copied)
    clocks /= launch.programs
    asked = sum(warps * warp.units.get(unit, 0.0) for unit in ("global", "shared", "local", "shuffle"))
    cycles = {
        # In each clock one instruction, or 128 bytes of it; more where lanes meet in a bank.
        L1: max(moved / L1_BYTES_PER_CLOCK + clocks + lanes("shuffle"), asked) + warps * warp.conflicts,
        FP32: lanes("fma", "imad", "multiply high", "fp64"),
        INTEGER: lanes("alu"),
        SPECIAL: lanes("special", "convert"),
        ISSUE: warps * warp.instructions / 4,
    }
    tensor = _tensor_cycles(compiled, launch.flops / launch.programs) / _full_mhz(gpu)
    return {**{name: n / _mhz(compiled) for name, n in cycles.items()}, TENSOR: tensor}


def _mhz(compiled: Compiled) -> float:
    """The clock of the SMs: the highest there is, or what an H200 was measured to have where it uses tensor cores."""
    return machine(compiled.gpu).tensor_mhz if compiled.tensor_core else compiled.gpu.boost_mhz


def _mhz_while(busy: float, compiled: Compiled) -> float:
    """The clock while tensor cores multiply for a share of the time. Beyond a half of it their power brings the clock down.
    (Nsight Compute saw 1,750 to 1,840 MHz in 35 of 40 kernels on an H200 whose tensor cores were busy for less than half of
    the time, 1,600 to 1,760 where it was more, and 1,500 where it was nine tenths.)"""
    return _mhz(compiled) - max(0.0, 2 * min(1.0, busy) - 1) * (_mhz(compiled) - _full_mhz(compiled.gpu))


def _full_mhz(gpu: hardware.Gpu) -> float:
    """The clock with which tensor cores that are never idle reach what a large matmul does: their power brings it down."""
    return _peak_mhz(gpu) * machine(gpu).matmul_tflops * 1e12 / gpu.peak_flops["fp16"]


def _peak_mhz(gpu: hardware.Gpu) -> float:
    """The clock that the tensor cores' peak in the datasheet is for: with it they do a power of two per clock. (An H200's is
    1,830 of 1,980 MHz.)"""
    peak = gpu.peak_flops["fp16"] / gpu.sms
    return min(gpu.boost_mhz, 1e-6 * peak / 2 ** round(math.log2(1e-6 * peak / gpu.boost_mhz)))


def _fp64_lanes(gpu: hardware.Gpu) -> float:
    return gpu.peak_flops["fp64"] / (2 * gpu.sms * gpu.boost_mhz * 1e6)


def _tensor_cycles(compiled: Compiled, dot_flops: float) -> float:
    """Cycles that one SM's tensor cores need for one program; 0 where tl.dot became ordinary multiply-adds."""
    if not dot_flops or not compiled.tensor_core:
        return 0.0
    gpu = compiled.gpu
    main = max(compiled.tensor_core, key=lambda use: use.flops * use.count)
    of_a_cycle = gpu.peak(_TENSOR_DTYPES.get(main.a, "fp16")) / gpu.sms / (_peak_mhz(gpu) * 1e6)
    if gpu.compute_capability == (9, 0) and main.instruction == "mma":
        reached = machine(gpu)
        of_a_cycle *= reached.mma_tflops / reached.wgmma_tflops  # Hopper's tensor cores are built for wgmma
    return dot_flops / of_a_cycle


def _matmul_share(gpu: hardware.Gpu) -> float:
    """Of the tensor cores' peak, what a large matmul reaches."""
    return machine(gpu).matmul_tflops * 1e12 / gpu.peak_flops["fp16"]


def _background(compiled: Compiled) -> set[tuple[str | None, int]]:
    """Lines whose loads go to shared memory by cp.async or the TMA unit while the program computes."""
    return {(a.file, a.line) for a in compiled.accesses if a.kind == "load" and a.to != "registers"}


def _copied_us(launch: Launch, compiled: Compiled, traffic: Traffic | SimpleNamespace) -> float:
    """For which one program's loads in the background pass L1."""
    return _copied_clocks(compiled, _copied(compiled, traffic)) / launch.programs / _mhz(compiled)


def _copied_clocks(compiled: Compiled, sites: Sequence[SiteTraffic]) -> float:
    """Clocks for which L1 passes on what is copied to shared memory there. Copies of 16 bytes go by it, line by line as L2 sends
    them; narrower ones are filled in there, and then looked for as other loads are."""
    narrow = {
        (a.file, a.line)
        for a in compiled.accesses
        if a.kind == "load" and a.to != "registers" and 0 < (a.bits or 0) < 128
    }
    total = 0.0
    for site in sites:
        whole = site.l2_sectors * SECTOR_BYTES / L1_BYTES_PER_CLOCK
        if (site.file, site.line) in narrow:
            whole += site.l1_clocks
        elif site.via != "tma":
            whole = max(site.l1_clocks, site.requests)
        total += whole
    return total


def _copied(compiled: Compiled, traffic: Traffic | SimpleNamespace) -> list[SiteTraffic]:
    """What is loaded in the background."""
    background = {line for _, line in _background(compiled)}
    return [site for site in traffic.sites if site.kind == "load" and site.line in background]


def _loads(traffic: Traffic | SimpleNamespace) -> SimpleNamespace:
    """What a launch moves without what it stores."""
    return SimpleNamespace(
        sites=[site for site in traffic.sites if site.kind != "store"], l2_read_sectors=traffic.l2_read_sectors,
        l2_write_sectors=0, l2_atomic_sectors=traffic.l2_atomic_sectors, dram_read_bytes=traffic.dram_read_bytes,
        dram_write_bytes=0, dirty_bytes=0, pieces=0, piece_bytes=0, contention=traffic.contention, unanswered_sectors=traffic.unanswered_sectors,
    )  # fmt: skip


def _in_the_open(traffic: Traffic | SimpleNamespace, compiled: Compiled) -> SimpleNamespace:
    """What a program moves itself: all but its loads in the background."""
    background = _background(compiled)
    hidden = [site for site in traffic.sites if site.kind == "load" and (site.file, site.line) in background]
    return SimpleNamespace(
        sites=[site for site in traffic.sites if site not in hidden],
        l2_read_sectors=traffic.l2_read_sectors - sum(site.l2_sectors for site in hidden),
        l2_write_sectors=traffic.l2_write_sectors, l2_atomic_sectors=traffic.l2_atomic_sectors,
        dram_read_bytes=max(0, traffic.dram_read_bytes - sum(site.dram_bytes for site in hidden)),
        dram_write_bytes=traffic.dram_write_bytes, dirty_bytes=traffic.dirty_bytes, pieces=traffic.pieces,
        piece_bytes=traffic.piece_bytes, contention=traffic.contention,
        unanswered_sectors=traffic.unanswered_sectors,
    )  # fmt: skip


def _asynchronous(launch: Launch, compiled: Compiled) -> bool:
    """Whether most bytes are loaded in the background."""
    background = _background(compiled)
    loads = [access for access in launch.accesses if access.kind == "load"]
    hidden = sum(a.bytes for a in loads if (a.file, a.line) in background)
    return bool(loads) and 2 * hidden > sum(a.bytes for a in loads)


# ---- PyTorch ops --------------------------------------------------------------------------------------------------


def _op_step(op: TorchOp, facts: _Facts | None, gpu: hardware.Gpu, overhead_us: float) -> Step:
    """A PyTorch op: what it reads and writes at the rate of PyTorch's kernels, or its FLOPs on the tensor cores."""
    reached, facts = machine(gpu), facts or _Facts()
    resources = {MEMORY: _dram_us(op.read_bytes, op.write_bytes, reached) / (1.0 if facts.flops else TORCH_OP)}
    if facts.flops:
        on_tensor_cores = facts.dtype not in ("fp32", "fp64")
        share = _matmul_share(gpu) if on_tensor_cores else reached.matmul_fp32_tflops * 1e12 / gpu.peak_flops["fp32"]
        rate = gpu.peak_flops.get(facts.dtype, gpu.peak_flops["fp32"]) * share
        resources[TENSOR if on_tensor_cores else FP32] = facts.flops / rate * 1e6
    if facts.single:
        resources[L2] = facts.single / reached.l2_single_loads_per_us
    longest = max(resources.values())
    edges = overhead_us + 2e-3 * reached.dram_ns
    one = reached.float_atomics_on_one_per_us if facts.floating else reached.atomics_on_one_per_us / 32
    most = max(longest, facts.added / one, facts.picked / reached.single_reads_per_us) + edges
    return Step(op.name, longest + edges, {**resources, LAUNCH: edges}, most_us=most)


@dataclass(frozen=True)
class _Facts:
    """Of a PyTorch op: what a matmul computes, and how many elements lie a sector and more from the one that the next
    thread reads. PyTorch's elementwise kernels walk in the order of the output: a transposed input is read like that. Of one
    that goes by indices, how many elements it adds at an address that these name, and how many such addresses it reads from."""

    flops: int = 0
    dtype: str = "fp32"
    single: int = 0
    added: int = 0
    picked: int = 0
    floating: bool = True


# PyTorch's operations that add where indices say, and those that read there: the argument that is added, or read from.
_ADDS = {
    "index_add": 3,
    "scatter_add": 3,
    "scatter_reduce": 3,
    "bincount": 0,
    "histc": 0,
    "embedding_dense_backward": 0,
}
_PICKS = {"gather", "take", "index", "index_select"}
_PIECE_BYTES = 64  # which are read at once: what is picked in longer runs costs no more than a copy


def _by_indices(name: str, args: tuple, out: object) -> _Facts | None:
    """Of an operation that goes by indices; None for every other, and where it reads long runs."""
    name = name.partition("::")[2].rstrip("_")
    if name in _ADDS and isinstance(args[_ADDS[name]], torch.Tensor):
        return _Facts(added=args[_ADDS[name]].numel(), floating=name not in ("bincount",))
    if name in _PICKS and isinstance(out, torch.Tensor) and out.numel():
        if name == "index":
            run = out.numel() // max(1, *(i.numel() for i in args[1] if i is not None))
        else:
            run = math.prod(args[0].shape[args[1] % args[0].dim() + 1 :]) if name == "index_select" else 1
        if run * out.element_size() < _PIECE_BYTES:
            return _Facts(picked=out.numel() // max(1, run))
    return None


_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_DTYPES |= {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}


class _OpFacts(dispatch.Mode):
    """What the trace does not say of PyTorch's ops, by their position among its events."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace
        self.of: dict[int, _Facts] = {}

    def operation(self, func, args, kwargs):
        from torch.utils.flop_counter import flop_registry

        out = func(*args, **kwargs)
        if not self.trace.events or not isinstance(self.trace.events[-1], TorchOp):
            return out
        position, inputs = len(self.trace.events) - 1, [a for a in args if isinstance(a, torch.Tensor)]
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            flops = count(*args, **kwargs, out_val=out)
            self.of.setdefault(position, _Facts(flops, _DTYPES.get(inputs[0].dtype, "fp32")))
        elif by_indices := _by_indices(func._schema.name, args, out):
            self.of.setdefault(position, by_indices)
        elif isinstance(out, torch.Tensor):
            self.of.setdefault(position, _Facts(single=sum(_elements_apart(x, out) for x in inputs)))
        return out


def _elements_apart(x: torch.Tensor, out: torch.Tensor) -> int:
    """The elements of an input, if those of neighbors in the output lie a sector and more from one another."""
    if x.shape != out.shape or 1 not in out.stride():
        return 0
    step = x.stride(out.stride().index(1)) * x.element_size()
    return x.numel() if step >= SECTOR_BYTES else 0
