"""How long a launch takes on a GPU, and why: `gpukit.predict(lambda: kernel[grid](x, y, n, BLOCK=1024), gpu="h200")`.

The model, whole. Counted: bytes and sectors at each level (trace and caches), the instructions that a program's warps
execute (SASS, with loop counts from the interpreter), registers and shared memory (compiler).

1. Each resource alone.  work / rate: DRAM, L2, L1, shared memory, tensor cores, and per SM the units for fp32,
   integers, special functions and the schedulers that issue one instruction of a warp per clock each. The busiest SM has
   ceil(programs / SMs) programs.
2. Taking turns.  A program that waits for its loads, computes, then stores, uses one resource at a time; the SM's other
   programs fill the gaps. With n programs at different points, a balanced network of queues takes no longer than

       longest + (all of them in turn - longest) / n            Lazowska et al. 1984, balanced job bounds

   n is the programs that fit on an SM, one more where memory takes part, since the stores of a program that has ended are
   still under way. What runs in the background (cp.async, TMA, tensor cores whose results nothing in the loop needs)
   takes no turn.
3. Waiting.  Too little in flight (Little's law): each dependent round of loads waits for the latency of memory, and only
   n programs per SM wait at once.
4. The kernel's time is the largest of these, plus the launch, the wait for the first load and for the last store.

Nothing is fitted to kernels. Four numbers are measured machine constants and say from where (`Machine`).

Sources: https://homes.cs.washington.edu/~lazowska/qsp/ chapter 5; throughputs per SM and clock:
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#arithmetic-instructions
"""

from __future__ import annotations

import contextlib
import html
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpukit import hardware
from gpukit.simulator import assembly, mix
from gpukit.simulator.compile import Compiled, compile
from gpukit.simulator.memory import SECTOR_BYTES
from gpukit.simulator.trace import Launch, TorchOp, Trace, trace

if TYPE_CHECKING:
    from gpukit.simulator.caches import Traffic

SAMPLE = 3  # programs of each launch that are looked at whole
MEMORY, L2, L1, TENSOR = "device memory", "L2", "L1 and shared memory", "tensor cores"
FP32, INTEGER, SPECIAL, ISSUE = "fp32 arithmetic", "integers and logic", "special functions", "instruction issue"
WAITING, LAUNCH, TURNS = "waiting for memory", "launch", "taking turns"
RESOURCES = (MEMORY, L2, L1, TENSOR, FP32, INTEGER, SPECIAL, ISSUE, WAITING, LAUNCH, TURNS)


@dataclass(frozen=True)
class Machine:
    """What one kind of GPU reaches of its peaks, measured and not derived.

    copy     share of the memory's peak that a plain copy reaches, reads and writes counted
    tensor   share of the tensor cores' peak that cuBLAS reaches at large sizes: under such load the clock drops
    """

    copy: float
    tensor: float
    source: str


_H200 = Machine(4.25 / 4.8, 741 / 989.4, "measured on an H200: torch's copy of 1 Gi bf16, cuBLAS bf16 4096^3")
MACHINES = {
    "h200": _H200,
    "h100-sxm": Machine(
        3.05 / 3.35,
        661 / 989.4,
        "https://github.com/triton-lang/triton, python/tutorials/gluon/07-persistence.py (cuBLAS)",
    ),
}
ASSUMED = Machine(_H200.copy, _H200.tensor, "assumed to be as on an H200")

LAUNCH_US = 3.0  # from a launch on an idle stream to the first instruction, and from the last one to the end event
NEXT_LAUNCH_US = 1.0  # the same where the launch before it is still running
DRAM_US, L2_US = (
    0.75,
    0.25,
)  # latency of a load, unloaded; https://arxiv.org/abs/2402.13499 measures some 270 cycles for L2
L2_BYTES_PER_CLOCK = 5120  # of an A100, GA100 whitepaper; taken for H100 to B200 too
L2_BYTES_PER_CLOCK_AND_SM = 64  # what one SM takes at most
L1_BYTES_PER_CLOCK = 128  # and shared memory, per SM
MMA_ON_HOPPER = (
    0.63  # of the peak is what mma reaches where wgmma is meant to be used, https://arxiv.org/abs/2402.13499
)
TORCH_OP = (
    0.83  # of the copy rate is what PyTorch's elementwise kernels reach (F.gelu 3.41, F.rms_norm 3.18 of 4.25 TB/s)
)

# Lanes per clock and SM, by the unit of mix.UNITS; fp32 lanes are those of the Gpu.
_LANES = {"alu": 64, "imad": 64, "special": 16, "convert": 16, "shuffle": 32}
_TENSOR_DTYPES = {"f16": "fp16", "bf16": "bf16", "tf32": "tf32", "e4m3": "fp8", "e5m2": "fp8", "f8f6f4": "fp8"}
_TENSOR_DTYPES |= {"s8": "int8", "u8": "int8", "f64": "fp64", "b8": "int8"}


@dataclass(frozen=True)
class Step:
    """One launch or PyTorch op. `resources` are µs that each would take alone; `time_us` is not their sum. `programs` on
    an SM at a time, `waves` of them; `mix` is what one warp executes. None and 0 where they do not apply."""

    name: str
    time_us: float
    resources: dict[str, float]
    launch: Launch | None = field(default=None, repr=False)
    compiled: Compiled | None = field(default=None, repr=False)
    mix: mix.Mix | None = field(default=None, repr=False)
    programs: int = 0
    waves: float = 0.0

    @property
    def limit(self) -> str:
        """The resource that takes longest."""
        alone = {name: us for name, us in self.resources.items() if name != TURNS}
        return max(alone, key=alone.__getitem__)


@dataclass(frozen=True)
class Prediction:
    """What `predict` says.

    time_us     of all steps, one after the other
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
        width = max(len(name) for name in self.resources)
        longest = max(*self.resources.values(), self.time_us)
        lines = [f"{self.time_us:,.1f} us on {self.gpu.name}, limited by {self.limit}", ""]
        for name, us, is_limit in self.rows():
            bar = "#" * max(1, round(40 * us / longest))
            lines.append(f"{name:<{width}}  {us:>10,.1f} us  {bar}{' <- limit' if is_limit else ''}")
        if len(self.steps) > 1:
            lines += ["", *(f"{step.time_us:>10,.1f} us  {step.name}, {step.limit}" for step in self.steps)]
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
        return f"<p><b>{head}</b></p><table>{rows}</table>"


def predict(work: Callable[[], object], gpu: str | hardware.Gpu = "h200", sample: int | None = SAMPLE) -> Prediction:
    """The time of everything that `work()` launches, on any GPU of the table.

        x = torch.empty(4096, 65536, dtype=torch.bfloat16, device="meta")    # a size is all that counts: no memory
        gpukit.predict(lambda: softmax(x), gpu="a100")

    sample   programs of each launch to look at; the others are taken to be like them. None runs all of them, on tensors
             that must then exist. Inputs and outputs are not touched where it is a number.

    Raises ValueError for an unknown GPU, for work that launches nothing, and for a kernel that does not fit on the GPU;
    CompileError for one that does not compile.
    """
    target = gpu if isinstance(gpu, hardware.Gpu) else hardware.gpu(gpu)
    with trace(gpu=target, sample=sample) as t, _OpFlops(t) as flops, _line_counter() as lines:
        work()
    runs = dict(zip(map(id, t.launches), getattr(lines, "launches", ()), strict=True))
    machine = MACHINES.get(target.key, ASSUMED)
    steps: list[Step] = []
    for position, event in enumerate(t.events):
        overhead = NEXT_LAUNCH_US if steps else LAUNCH_US
        if isinstance(event, Launch) and event.programs:
            _refuse_what_does_not_fit(event, target)
            ran = event.programs if event.sampled is None else event.sampled
            executions = {statement: n / ran for statement, n in runs[id(event)].items()}
            steps.append(launch_step(event, compile(event, gpu=target), executions, overhead, machine))
        elif isinstance(event, TorchOp) and event.bytes:
            steps.append(_op_step(event, flops.of.get(position), target, overhead, machine))
    if not steps:
        raise ValueError("predict: nothing was launched and no PyTorch op moved anything; pass a function that does")
    return Prediction(target, machine, tuple(steps))


def _line_counter():
    try:
        from gpukit.simulator.lines import LineCounter
    except ModuleNotFoundError:  # no Triton outside Linux: PyTorch ops can be predicted all the same
        return contextlib.nullcontext()
    return LineCounter()


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
    overhead_us: float = LAUNCH_US,
    machine: Machine = ASSUMED,
) -> Step:
    """The model of the module's docstring for one launch: what was traced, what was compiled, how often lines ran."""
    gpu = compiled.gpu
    clock = gpu.boost_mhz  # cycles per µs
    fit = compiled.occupancy
    if not fit.programs:
        raise ValueError(
            f"{launch.kernel} cannot run on {gpu.name}: a program asks for {compiled.shared_bytes:,} bytes of shared "
            f"memory and {compiled.registers} registers in each of {compiled.threads} threads, and {fit.limit} do not "
            f"suffice (at most {gpu.smem_per_block_bytes:,} bytes and {gpu.registers_per_sm:,} registers)"
        )
    busy_sms = min(gpu.sms, launch.programs)
    per_sm = -(-launch.programs // gpu.sms)  # on the busiest SM
    together = min(fit.programs, per_sm)
    warp = mix.mix(compiled, executions)
    traffic = _traffic(launch, compiled)
    dot_flops = launch.flops / launch.programs if compiled.tensor_core else 0.0

    # 1. Each resource alone, in µs.
    work = _per_program(compiled, warp, dot_flops, machine)
    sectors = traffic.l2_read_sectors + traffic.l2_write_sectors + 2 * traffic.l2_atomic_sectors
    l2_rate = min(_l2_bytes_per_clock(gpu), L2_BYTES_PER_CLOCK_AND_SM * busy_sms) * clock
    l1_bytes = traffic.l1_read_sectors * SECTOR_BYTES / launch.programs
    alone = {
        # What is still in L2 at the end took the place of what others had written there.
        MEMORY: (traffic.dram_bytes + traffic.dirty_bytes) / (gpu.hbm_gbps * machine.copy * 1e3),
        L2: sectors * SECTOR_BYTES / l2_rate,
        **{name: us * per_sm for name, us in work.items()},
    }
    alone[L1] += l1_bytes * per_sm / (L1_BYTES_PER_CLOCK * clock)

    # 2. Taking turns.
    busiest_unit = max(alone[name] for name in (L1, FP32, INTEGER, SPECIAL, ISSUE))
    compute = max(busiest_unit, warp.stalls / clock * per_sm)  # of programs one after the other
    waits_for_loads = not _asynchronous(launch, compiled)
    # Where there is arithmetic besides the tensor cores', it is arithmetic on their results.
    results_needed = max(alone[FP32], alone[SPECIAL]) > 0.1 * alone[TENSOR]
    memory = max(alone[MEMORY], alone[L2]) if waits_for_loads else 0.0
    tensor = alone[TENSOR] if results_needed else 0.0
    in_turn, longest_of_them = compute + memory + tensor, max(busiest_unit, memory, tensor)
    n = together + waits_for_loads
    turns = longest_of_them + (in_turn - longest_of_them) / n

    # 3. Waiting.
    hit_rate = traffic.l2_hit_rate
    latency = L2_US * hit_rate + DRAM_US * (1 - hit_rate)
    rounds, rounds_ahead = _rounds(compiled, executions)
    waves = launch.programs / (gpu.sms * together)
    lonely = rounds * latency + max((compute + tensor) / per_sm, rounds_ahead * latency)
    alone[WAITING] = math.ceil(waves) * max(rounds, rounds_ahead) * latency

    # 4. Together.
    longest = max(alone.values())
    busy = max(longest, turns, math.ceil(waves) * lonely)
    alone[TURNS] = busy - longest
    alone[LAUNCH] = overhead_us + DRAM_US + DRAM_US
    total = busy + alone[LAUNCH]
    resources = {name: alone[name] for name in RESOURCES if alone.get(name)}
    return Step(launch.kernel, total, resources, launch, compiled, warp, together, waves)


def _traffic(launch: Launch, compiled: Compiled) -> Traffic | SimpleNamespace:
    try:
        return launch.traffic(compiled.gpu, compiled)
    except ValueError:  # too many irregular accesses to play through the caches: as if these held nothing
        reads, writes, atomics = launch.load_sectors, launch.store_sectors, launch.atomic_sectors
        return SimpleNamespace(
            l1_read_sectors=reads, l2_read_sectors=reads, l2_write_sectors=writes, l2_atomic_sectors=atomics,
            l2_hit_rate=0.0, dram_bytes=(reads + writes + 2 * atomics) * SECTOR_BYTES, dirty_bytes=0,
        )  # fmt: skip


def _l2_bytes_per_clock(gpu: hardware.Gpu) -> float:
    """Of the whole GPU; where nothing is published, the A100's share per SM."""
    datacenter = gpu.compute_capability in ((8, 0), (9, 0), (10, 0))
    return L2_BYTES_PER_CLOCK if datacenter else L2_BYTES_PER_CLOCK / 108 * gpu.sms


def _per_program(compiled: Compiled, warp: mix.Mix, dot_flops: float, machine: Machine) -> dict[str, float]:
    """µs for which one program keeps each unit of its SM busy."""
    gpu, warps = compiled.gpu, compiled.num_warps
    clock = gpu.boost_mhz

    def lanes(*units: str) -> float:
        """Cycles for these units' instructions."""
        rates = {"fma": gpu.fp32_lanes_per_sm, "fp64": _fp64_lanes(gpu), **_LANES}
        return sum(warps * 32 * warp.units.get(unit, 0.0) / rates[unit] for unit in units)

    on_chip = warp.bytes.get("shared", 0.0) + warp.bytes.get("local", 0.0)
    cycles = {
        L1: warps * on_chip / L1_BYTES_PER_CLOCK + lanes("shuffle"),
        FP32: lanes("fma", "imad", "fp64"),
        INTEGER: lanes("alu"),
        SPECIAL: lanes("special", "convert"),
        ISSUE: warps * warp.instructions / 4,
    }
    return {**{name: n / clock for name, n in cycles.items()}, TENSOR: _tensor_us(compiled, dot_flops, machine)}


def _fp64_lanes(gpu: hardware.Gpu) -> float:
    return gpu.peak_flops["fp64"] / (2 * gpu.sms * gpu.boost_mhz * 1e6)


def _tensor_us(compiled: Compiled, dot_flops: float, machine: Machine) -> float:
    """µs that one SM's tensor cores need for one program."""
    if not dot_flops:
        return 0.0
    uses = compiled.tensor_core
    main = max(uses, key=lambda use: use.flops * use.count)
    peak = compiled.gpu.peak(_TENSOR_DTYPES.get(main.a, "fp16"))
    if compiled.gpu.compute_capability == (9, 0) and main.instruction == "mma":
        peak *= MMA_ON_HOPPER
    return dot_flops / (peak * machine.tensor / compiled.gpu.sms) * 1e6


def _asynchronous(launch: Launch, compiled: Compiled) -> bool:
    """Whether most bytes are loaded in the background, by cp.async or the TMA unit, while the program computes."""
    background = {(a.file, a.line) for a in compiled.accesses if a.kind == "load" and a.to != "registers"}
    loads = [access for access in launch.accesses if access.kind == "load"]
    hidden = sum(a.bytes for a in loads if (a.file, a.line) in background)
    return bool(loads) and 2 * hidden > sum(a.bytes for a in loads)


def _rounds(compiled: Compiled, executions: mix.Executions | None) -> tuple[float, float]:
    """How often a program waits for loads into registers: each turn of a loop that has some, and once for those outside
    loops. And how often for loads that run num_stages - 1 turns ahead, while it computes."""
    instructions = compiled.instructions
    loops = assembly.loops(instructions)
    times = mix.weights(compiled, executions)
    waits: dict = {}
    for i, instruction in enumerate(instructions):
        if instruction.base in ("LDG", "LDGSTS", "UTMALDG"):
            key = assembly.innermost(loops, i), instruction.base != "LDG"
            waits[key] = max(waits.get(key, 0.0), times[i])
    now, ahead = (sum(n for (_, is_ahead), n in waits.items() if is_ahead == which) for which in (False, True))
    return now, ahead / max(1, compiled.num_stages - 1)


# ---- PyTorch ops --------------------------------------------------------------------------------------------------


def _op_step(op: TorchOp, matmul: tuple[int, str] | None, gpu, overhead_us: float, machine: Machine) -> Step:
    """A PyTorch op: what it reads and writes at the rate of PyTorch's kernels, or its FLOPs on the tensor cores."""
    efficiency = 1.0 if matmul else TORCH_OP
    resources = {MEMORY: op.bytes / (gpu.hbm_gbps * machine.copy * efficiency * 1e3)}
    if matmul:
        flops, dtype = matmul
        rate = gpu.peak_flops.get(dtype, gpu.peak_flops["fp32"])
        share = machine.tensor if dtype not in ("fp32", "fp64") else 1.0
        resources[TENSOR if share < 1 else FP32] = flops / (rate * share) * 1e6
    longest = max(resources.values())
    edges = overhead_us + 2 * DRAM_US
    return Step(op.name, longest + edges, {**resources, LAUNCH: edges})


_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_DTYPES |= {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}


class _OpFlops(TorchDispatchMode):
    """FLOPs and dtype of the matmuls among PyTorch's ops, by their position in the trace's events."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in trace.py

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace
        self.of: dict[int, tuple[int, str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.utils.flop_counter import flop_registry

        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None and self.trace.events and isinstance(self.trace.events[-1], TorchOp):
            tensor = next(a for a in args if isinstance(a, torch.Tensor))
            flops = count(*args, **(kwargs or {}), out_val=out)
            self.of[len(self.trace.events) - 1] = flops, _DTYPES.get(tensor.dtype, "fp32")
        return out
