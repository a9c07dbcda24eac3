"""What notebook 04 shows: queues, launches and waits of the GPU in miniature, and what was measured on an H200."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from IPython.display import Markdown

from gpukit import benchmark, profiling
from gpukit.hardware import gpu as spec
from gpukit.lessons import diagram, layer
from gpukit.lessons.course_map import course_map as _map
from gpukit.profiling import Profile, Span
from gpukit.simulator.queue_model import Device, SimulatedGpu
from gpukit.timing import time_ms
from gpukit.widgets import style, times, versus
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.timeline import of_profile, timeline

STEADY = {"slow": 1.0, "disturbed_every": 0, "jitter": 0.0, "compile_us": 0.0}
_BASE = (2, 4, 256, 256)  # steps, layers, batch and width of the MLP that is trained
_WHAT = ("steps", "layers", "batch", "width")


def course_map() -> Picture:
    return _map("benchmarking")


@cache
def _notes() -> dict:
    return benchmark.notes("benchmarking")


@cache
def _rows() -> list[benchmark.Row]:
    return benchmark.rows("benchmarking")


def promise() -> Markdown:
    lies = _notes()["lies"]
    told = {name: 1e3 * lies[name]["told_ms"] for name in ("cached output", "side stream", "zeros")}
    true = 1e3 * lies["side stream"]["true_ms"]
    listed = ", ".join(f"**{us:,.0f} µs**" for us in told.values())
    return Markdown(
        f"One product of two 8,192 x 8,192 matrices in bfloat16 was measured in four ways on one H200: {listed} and "
        f"**{true:,.0f} µs** (measured, {_notes()['about']['date']}). Only the last is what the product costs a model. By "
        "the end of this notebook you will have met the mistake behind each of the other three, and written a benchmark "
        "that "
        "makes none of them."
    )


# ---- the queue -------------------------------------------------------------------------------------------------------


def queue() -> Picture:
    """Host, queue and GPU as boxes."""
    with diagram.canvas(19, 4.6) as ax:
        diagram.box(ax, 0, 1.2, 4.2, 2, "host (CPU)\nruns Python", style.PEER, bold=True)
        diagram.arrow(ax, (4.2, 2.2), (6.4, 2.2), "launch")
        for i, name in enumerate(("kernel 5", "kernel 4", "kernel 3")):
            diagram.box(ax, 6.4 + 2.1 * i, 1.7, 2.1, 1, name)
        diagram.text(ax, 9.55, 1.3, "the queue (a CUDA stream)", bold=True)
        diagram.arrow(ax, (12.7, 2.2), (14.8, 2.2), "next")
        diagram.box(ax, 14.8, 1.2, 4.2, 2, "GPU\nruns kernel 2", style.COMPUTE, bold=True)
        diagram.text(ax, 2.1, 3.6, "has moved on to the line\nthat launches kernel 6", size=9)
        diagram.text(ax, 16.9, 3.6, "takes one kernel after\nthe other", size=9)
        ax.plot([16.9, 16.9, 2.1], [1.2, 0.6, 0.6], color=style.BOUND, ls="--")
        diagram.arrow(ax, (2.1, 0.6), (2.1, 1.2), colour=style.BOUND, width=1.5)
        diagram.text(
            ax, 9.55, 0.3, "done: only when the host asks: torch.cuda.synchronize()", size=9, color=style.BOUND
        )
    return diagram.picture(
        ax, alt="The host launches kernels into a queue, the CUDA stream, and goes on. The GPU takes them out one after "
            "the "
        "other. Nothing comes back to the host unless it asks, by torch.cuda.synchronize().",
    )  # fmt: skip


def measured_with_events(flush: bool, us: float = 10.0) -> tuple[float, SimulatedGpu]:
    """What two events around one kernel say, and the GPU whose lanes show why."""
    gpu = SimulatedGpu(**STEADY, l2_bytes=40 << 20)
    device = Device(gpu)
    if flush:
        device.flush_l2()
    start = device.event()
    gpu.launch("kernel", least_us=us)
    end = device.event()
    device.synchronize()
    return start.elapsed_us(end), gpu


def gap() -> None:
    """Two events around a kernel, with an empty queue and behind a flush: where the marks fall."""
    from IPython.display import display

    for flush, words in ((False, "the queue is empty"), (True, "a flush of the L2 is queued first")):
        us, gpu = measured_with_events(flush)
        marks = list(zip(gpu.marks, ("start", "end"), strict=True))
        title = f"Events around a kernel of 10 µs, {words}: they say {us:.1f} µs (modelled)"
        display(timeline(gpu.lanes, marks=marks, window=(0, 48), title=title, gaps=False))


def four_ways() -> Table:
    """One kernel of three lengths: what a host clock says, before and after waiting, and what events say."""
    rows = []
    for us in (10.0, 60.0, 600.0):
        gpu = SimulatedGpu(**STEADY)
        device = Device(gpu)
        begun = device.clock()
        gpu.launch("kernel", least_us=us)
        called = device.clock()
        device.synchronize()
        clocks = called - begun, device.clock() - begun
        rows.append((us, *clocks, *(measured_with_events(flush, us)[0] for flush in (False, True))))
    names = ("kernel", "host clock", "host clock, waited", "events", "events after a flush")
    return style.table(dict.fromkeys(names, "µs"), rows, caption="modelled", formats=dict.fromkeys(names, ".1f"))


# ---- first calls and typical ones --------------------------------------------------------------------------------------


def first_calls() -> Picture:
    return times.first_calls(_notes()["first_calls_us"], "H200")


def what_first_calls_say() -> Markdown:
    calls = _notes()["first_calls_us"]
    matmul, compiled = calls["matmul"], calls["compiled gelu"]
    return Markdown(
        f"**What you saw.** The first matmul takes {matmul[0] / 1e3:.0f} ms, and those after the third about "
        f"{sorted(matmul)[len(matmul) // 2]:.0f} µs: the first call loads the library and chooses a kernel. The first call "
        "of a "
        f"function compiled by `torch.compile` takes {compiled[0] / 1e6:.1f} s, because it generates and compiles code. If "
        "you "
        f"averaged {len(matmul)} calls of the matmul, the first one included, your result would be "
        f"{sum(matmul) / len(matmul) / sorted(matmul)[len(matmul) // 2]:.1f} times the typical time (measured). "
        "The compiled GELU stays above the uncompiled one because these are times of the host's clock. A compiled function first "
        "checks whether its inputs are like those that it was compiled for, and for so short a kernel the host's part is most "
        "of the time."
    )


def clocks() -> Picture:
    """Left the GPU in miniature after idling, right an H200 under load: two ways in which a clock moves."""
    gpu = SimulatedGpu(jitter=0.0, disturbed_every=0)
    for _ in range(50):
        gpu.launch("k", least_us=200.0)
    runs = [span.end_us - span.start_us for span in gpu.lanes if span.kind == "kernel"]
    seconds, mhz, _ = zip(*_notes()["clocks"], strict=True)
    with style.use():
        fig, (left, right) = style.figure(1, 2, width=9, height=3)
        left.plot(range(1, len(runs) + 1), runs, color=style.PEER, marker="o", ms=3)
        left.set_title("Slow at first: a GPU that was idle\n(modelled, the GPU in miniature)")
        left.set_ylim(0, 1.1 * max(runs))
        style.axes(left, x="run", y="time of one run (µs)", grid="y")
        right.plot(seconds, mhz, color=style.YOURS)
        right.set_title("Slower later: one matmul again and again\n(measured, H200)")
        right.set_ylim(0, 1.1 * max(mhz))
        style.axes(right, x="time under load (s)", y="SM clock (MHz)", grid="y", whole="y")
    return style.picture(
        fig, alt=f"Left: runs of the GPU in miniature take {runs[0]:.0f} µs at first and {runs[-1]:.0f} µs later. Right: "
            "the "
        f"clock of an H200 falls from {max(mhz):,} to {mhz[-1]:,} MHz in {seconds[-1]:.0f} s of matrix products.",
    )  # fmt: skip


def what_the_clocks_say() -> Markdown:
    samples = _notes()["clocks"]
    rates = [rate for _, _, rate in samples[1:]]
    return Markdown(
        "**What you saw.** The two effects point in opposite directions. A GPU that has been idle may run at a low clock "
        "and "
        "raise it when work arrives, so its first runs are slow; the GPU in miniature does that for its first 5 ms. The "
        "H200 "
        f"was already at its highest clock, {samples[0][1]:,} MHz, when this record began, so its first runs are the "
        "fastest. "
        f"Under matrix products it reaches its power limit and lowers the clock to {samples[-1][1]:,} MHz, and "
        f"the rate falls from {max(rates):,.0f} to {rates[-1]:,.0f} TFLOP/s (measured). The cure for both is the same. "
        "Warm up "
        "for long enough that the time no longer changes, and write the clock beside the result."
    )


def spread() -> Picture:
    names = {"cold": "L2 flushed", "warm": "L2 warm", "host clock": "host clock"}
    runs = {names[name]: values for name, values in _notes()["runs_us"].items()}
    return times.spread(runs, "softmax 4096 x 4096 bfloat16, H200")


# ---- launches --------------------------------------------------------------------------------------------------------


def twenty_kernels(one_by_one: SimulatedGpu, one_graph: SimulatedGpu) -> None:
    from IPython.display import display

    for gpu, name in ((one_by_one, "launched one by one"), (one_graph, "one graph")):
        display(timeline(gpu.lanes, window=(0, 108), title=f"Twenty kernels of 2 µs, {name} (modelled)"))


@cache
def _chain() -> dict[str, dict[int, float]]:
    """provider -> elements of x -> µs of one x + 1, of twenty in a row."""
    lines: dict[str, dict[int, float]] = {"torch": {}, "graph": {}}
    for row in _rows():
        if row.op == "chain":
            lines[row.provider][row.shape[0]] = row.median_ms * 1e3 / 20
    return lines


def chain() -> Picture:
    eager, graph = ([*points.items()] for points in _chain().values())
    named = {"eager, one by one": eager, "one CUDA graph": graph}
    axes = {"x": "elements of x", "y": "time of one x + 1 (µs)", "log": "xy"}
    return times.curve(named, title="Twenty times x = x + 1 in float32, H200 (measured)", **axes)


def flat_until() -> int:
    """The largest x whose time in eager PyTorch is within 10% of the smallest x's."""
    eager = _chain()["torch"]
    return max(n for n, us in eager.items() if us < 1.1 * eager[1024])


def what_the_chain_says() -> Markdown:
    eager, graph = _chain().values()
    flat, larger = flat_until(), min(n for n in eager if n > flat_until())
    return Markdown(
        f"**What you saw.** Up to {flat:,} elements one `x + 1` in eager PyTorch takes about {eager[flat]:.0f} µs, whatever "
        "its size: "
        f"this is the time that the host needs to issue it. In a graph 1,024 elements take {graph[1024]:.1f} µs each and "
        f"{flat:,} take {graph[flat]:.1f}. (That is more bytes per second than a copy reaches, because `x` and the result, "
        f"{8 * flat / 1e6:.0f} MB together, fit into the L2.) "
        f"At {larger:,} elements the two are nearly equal ({eager[larger]:.1f} and "
        f"{graph[larger]:.1f} µs), because there the bytes take longer than the host: reading and writing {larger:,} "
        "floats "
        f"at the data sheet's {spec('h200').hbm_gbps:,.0f} GB/s takes {8 * larger / spec('h200').hbm_gbps / 1e3:.0f} µs "
        "(computed). A graph helps short kernels, and nothing else."
    )


# ---- waits -----------------------------------------------------------------------------------------------------------


def training_loop(look_every: int, after_each_launch: bool = False) -> SimulatedGpu:
    """Twenty steps of four kernels of 10 µs; the host waits every so many steps, or after each launch."""
    gpu = SimulatedGpu(**STEADY)
    for step in range(1, 21):
        for _ in range(4):
            gpu.launch("k", least_us=10.0)
            if after_each_launch:
                gpu.wait()
        if step % look_every == 0:
            gpu.wait()
    return gpu


def waits() -> None:
    """The beginning of the loop without waits, with one per step, and with one per launch."""
    from IPython.display import display

    loops = {
        "the loss is read at the end": training_loop(20),
        "loss.item() in every step": training_loop(1),
        "CUDA_LAUNCH_BLOCKING=1": training_loop(20, after_each_launch=True),
    }
    for name, gpu in loops.items():
        total = gpu.lanes[-1].end_us
        title = f"{name}: {total:,.0f} µs for 20 steps, of which the first 4 are shown (modelled)"
        display(timeline(gpu.lanes, window=(0, 210), title=title))


# ---- curves ----------------------------------------------------------------------------------------------------------


def _matmuls() -> list[benchmark.Row]:
    return [row for row in _rows() if (row.op, row.mode) == ("matmul", "fwd")]


def matmul_curve() -> Picture:
    names = {("bfloat16", "library"): "bf16", ("float32", "library-tf32"): "tf32", ("float32", "library"): "fp32"}
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in names.values()}
    for row in _matmuls():
        lines[names[row.dtype, row.provider]].append((row.shape[0], row.tflops))
    axes = {
        "x": "M = N = K",
        "y": "TFLOP/s",
        "bounds": {"bf16 peak of the data sheet": spec("h200").peak("bf16") / 1e12},
    }
    return times.curve(lines, title="torch.matmul (cuBLAS), eager, cold L2, H200 (measured)", **axes)


def what_the_matmuls_say() -> Markdown:
    bf16 = {row.shape[0]: row for row in _matmuls() if row.dtype == "bfloat16"}
    best, last, small = max(bf16.values(), key=lambda row: row.tflops), bf16[max(bf16)], bf16[min(bf16)]
    fp32 = next(r for r in _matmuls() if (r.dtype, r.provider, r.shape[0]) == ("float32", "library", 8192))
    peak = spec("h200").peak("bf16") / 1e12
    rates = {seconds: rate for seconds, _, rate in _notes()["clocks"][1:]}
    short = min(seconds for seconds, rate in rates.items() if rate < best.tflops)
    return Markdown(
        f"**What you saw.** At {min(bf16)} the product takes {small.median_ms * 1e3:.1f} µs and reaches {small.tflops:.1f} "
        f"TFLOP/s: there is too little work to fill the GPU. The top is **{best.tflops:,.0f} TFLOP/s** at "
        f"{best.shape[0]:,}, "
        f"{best.tflops / peak:.0%} of the data sheet's {peak:,.0f}. At {max(bf16):,} it is only {last.tflops:,.0f}. One "
        "reason "
        f"is the clock: {best.sm_mhz:,} MHz after the runs at {best.shape[0]:,}, and {last.sm_mhz:,} MHz after those at "
        f"{max(bf16):,}, which take longer and draw more power. The rate falls by {1 - last.tflops / best.tflops:.0%} and "
        "the "
        f"clock by {1 - last.sm_mhz / best.sm_mhz:.0%}, so per cycle of the clock the larger product does more. In float32 "
        f"without tensor cores the product of 8,192 runs at "
        f"{fp32.tflops:.1f} TFLOP/s, {bf16[8192].tflops / fp32.tflops:.0f} times slower than in bfloat16 (measured). "
        f"The {max(rates.values()):,.0f} TFLOP/s in the section on clocks do not contradict this top: they lasted for less "
        f"than {short:.1f} s at the start of that record, and each point here is a median after a warm-up."
    )


@cache
def _mlp() -> dict[tuple[str, tuple[int, ...]], float]:
    return {(row.provider, row.shape): row.median_ms for row in _rows() if row.op == "mlp"}


def mlp_times(provider: str, name: str) -> dict[float, float]:
    """How many times as large -> how many times as long, where `name` alone grows."""
    i = _WHAT.index(name)
    rows = {shape: ms for (who, shape), ms in _mlp().items() if who == provider}
    others = _BASE[:i] + _BASE[i + 1 :]
    return {s[i] / _BASE[i]: ms / rows[_BASE] for s, ms in sorted(rows.items()) if s[:i] + s[i + 1 :] == others}


def mlp_curves() -> Picture:
    lines = {name: [*mlp_times("torch", name).items()] for name in _WHAT}
    axes = {"x": "one of the four, times as large", "y": "time, times as long", "log": "xy"}
    return times.curve(lines, title="Training a small MLP, eager, H200 (measured)", **axes)


def mlp_factors() -> Table:
    """What five times as much costs, eager and as a CUDA graph."""
    work = {"steps": 5.0, "layers": 5.0, "batch": 5.0, "width": 25.0}
    rows = [(f"5 x {name}", work[name], mlp_times("torch", name)[5], mlp_times("graph", name)[5]) for name in _WHAT]
    eager, graph = (
        next(row for row in _rows() if (row.op, row.provider, row.shape) == ("mlp", provider, _BASE))
        for provider in ("torch", "graph")
    )
    base = (
        f"{eager.median_ms:.2f} ms eager (percentiles 20 and 80: {eager.p20_ms:.2f} and {eager.p80_ms:.2f}) and "
        f"{graph.median_ms:.2f} ms as a graph"
    )
    columns = {"": "", "arithmetic (computed)": "x", "time, eager": "x", "time, one CUDA graph": "x"}
    return style.table(columns, rows, caption=f"measured on an H200; 1 x is {base}")


# ---- profiles --------------------------------------------------------------------------------------------------------

Event = tuple[str, int, float, float]


@cache
def _step() -> Profile:
    return profiling.recorded("mlp").note("small MLP")


def calls(profile: Profile) -> list[Event]:
    """What the host called, in order: (name, index of the call around it or -1, its µs, µs of the kernels it launched).

    A kernel belongs to the innermost PyTorch operation around its launch, as in PyTorch's own table.
    """
    host = [span for span in profile.spans if span.kind in ("op", "launch")]
    cuda = {span.launched: span.duration_us for span in profile.kernels}
    stack: dict[int, list[int]] = {}  # by thread: the calls that have not ended
    events: list[list] = []
    for i, span in enumerate(host):
        open_calls = stack.setdefault(span.lane, [])
        while open_calls and host[open_calls[-1]].end_us <= span.start_us:
            open_calls.pop()
        parent = open_calls[-1] if open_calls else -1
        events.append([span.name, parent, span.duration_us, 0.0])
        if span.kind == "launch" and parent >= 0:
            events[parent][3] += cuda.get(span.launched, 0.0)
        open_calls.append(i)
    return [tuple(event) for event in events]


def recorded_events() -> list[Event]:
    """The calls of one recorded training step of the small MLP on an H200."""
    return calls(_step())


def _halves() -> list[tuple[str, float, float]]:
    """(name, from, to in µs): the forward pass, and the backward pass from the first GELU on."""
    ops = [span for span in _step().spans if span.kind == "op"]
    forward = [span for span in ops if span.lane == 0]
    backward = next(span for span in ops if span.name.endswith("GeluBackward0"))
    return [
        ("forward", forward[0].start_us, forward[-1].end_us),
        ("backward, from the last GELU on", backward.start_us, max(span.end_us for span in ops)),
    ]


def step() -> None:
    """The recorded step in two timelines."""
    from IPython.display import display

    for name, start, end in _halves():
        display(timeline(of_profile(_step()), window=(start, end), title=f"One step of the small MLP, {name} (H200)"))


def busy() -> tuple[float, float]:
    """(µs in which the GPU ran a kernel, µs of the step) when steps are timed back to back, without a profiler."""
    return _step().busy_us, 1e3 * _mlp()["torch", _BASE] / _BASE[0]


def what_the_step_says() -> Markdown:
    worked, took = busy()
    graph = 1e3 * _mlp()["graph", _BASE] / _BASE[0]
    return Markdown(
        f"**What you saw.** The {len(_step().kernels)} kernels of the step run for {worked:.0f} µs together. Timed back to "
        "back, "
        f"without a profiler, a step takes {took:,.0f} µs, so the GPU works for **{worked / took:.0%}** of the time. A GPU "
        "twice "
        f"as fast would change nothing. One launch instead of {len(_step().kernels)} helps: as a CUDA graph the step takes "
        f"{graph:.0f} µs (measured). The two timelines cover more than {took:,.0f} µs: they show a single step, "
        "and recording it costs the host time as well."
    )


def _one_layer() -> list[Span]:
    """The spans of the second linear layer of the record, with its kernel."""
    spans = _step().spans
    _, linear, *_ = (span for span in spans if span.name == "aten::linear")
    inside = [s for s in spans if linear.start_us <= s.start_us <= linear.end_us and s.kind in ("op", "launch")]
    launched = {span.launched for span in inside if span.kind == "launch"}
    return [*inside, *(span for span in spans if span.on_gpu and span.launched in launched)]


def nesting() -> Picture:
    """One linear layer of the record: calls inside calls on the host, and the kernel on the GPU."""
    spans = _one_layer()
    first, last = spans[0].start_us, max(span.end_us for span in spans)
    with diagram.canvas(20, 5.8) as ax:
        scale = 15.6 / (last - first)
        ends: list[float] = []
        for span in spans:
            depth = 5 if span.on_gpu else sum(end > span.start_us for end in ends)
            ends = ends if span.on_gpu else [end for end in ends if end > span.start_us] + [span.end_us]
            colour = style.COMPUTE if span.on_gpu else style.PEER if span.kind == "launch" else diagram.PALE
            x, width = 2.8 + scale * (span.start_us - first), max(scale * span.duration_us, 0.25)
            name = "kernel" if span.on_gpu else span.name.replace("ExC", "")
            words = f"{name} {span.duration_us:.1f}"
            fits = width > 0.17 * len(words)
            diagram.box(ax, x, 0.5 + 0.9 * depth, width, 0.8, words if fits else "", colour, size=9)
            if not fits:
                diagram.text(ax, x + width + 0.1, 0.9 + 0.9 * depth, words, size=8, align="left")
        diagram.text(ax, 2.5, 0.9, "host", bold=True, align="right")
        diagram.text(ax, 2.5, 2.6, "calls inside\nthis call", size=9, align="right")
        diagram.text(ax, 2.5, 5.4, "GPU", bold=True, align="right")
    parts = ", ".join(f"{'kernel' if s.on_gpu else s.name} {s.duration_us:.1f} µs" for s in spans)
    return diagram.picture(ax, alt=f"One linear layer, recorded on an H200; what lies below lies inside: {parts}.")


def layer_events() -> list[Event]:
    """The calls of that one layer."""
    return calls(Profile(tuple(sorted(_one_layer(), key=lambda s: (s.start_us, -s.duration_us))), ""))


def row(events: Sequence[Event], name: str) -> tuple[int, float, float, float, float]:
    """One row of the table: calls, self CPU, CPU total, self CUDA, CUDA total."""
    counted = [0, 0.0, 0.0, 0.0, 0.0]
    within: list[bool] = []  # for each call: whether it lies in one of that name, or is one
    for each, around, host, gpu in events:
        inside = around >= 0 and within[around]
        within.append(inside or each == name)
        counted[4] += gpu * within[-1]
        counted[1] -= host * (around >= 0 and events[around][0] == name)
        if each == name:
            for i, more in enumerate((1, host, host * (not inside), gpu)):
                counted[i] += more
    return tuple(counted)


def profiler_table(profile_row: Callable, most: int = 10) -> Table:
    """The rows of the recorded step with the largest self CPU, by `profile_row` or, while that is a stub, by `row`."""
    events, by = recorded_events(), "your profile_row"
    names = dict.fromkeys(event[0] for event in events)
    try:
        rows = [(name, *profile_row(events, name)) for name in names]
    except NotImplementedError:
        rows, by = [(name, *row(events, name)) for name in names], "the course"
    rows = sorted(rows, key=lambda r: -r[2])[:most]
    times_of = ("self CPU", "CPU total", "self CUDA", "CUDA total")
    columns = {"name": "", "calls": "", **dict.fromkeys(times_of, "µs")}
    caption = f"One step of the small MLP, recorded on an {_step().device}: the {most} largest self CPU times, computed by {by}"
    return style.table(columns, rows, caption=caption, formats=dict.fromkeys(times_of, ",.1f"))


def outlier() -> Markdown:
    rows = {name: row(recorded_events(), name) for name in {event[0] for event in recorded_events()}}
    name = max(rows, key=lambda each: rows[each][1])
    count, self_cpu, *_ = rows[name]
    linears = [event[2] for event in recorded_events() if event[0] == "aten::linear"]
    took = busy()[1]
    return Markdown(
        f"**What you saw.** `{name}` was called {count} times, with {self_cpu:,.0f} µs of self CPU time. A whole step "
        "takes "
        f"{took:,.0f} µs when steps are timed back to back, so this cannot be typical. The host stood still once, inside "
        "one "
        "call, before its launch; the record does not say why. The first `aten::linear` is a smaller disturbance: it took "
        f"{linears[0]:.0f} µs, where the other three took {min(linears[1:]):.0f} to {max(linears[1:]):.0f}. A profiler "
        "records one "
        "step, so it shows such disturbances as if they were the rule. The median of many timed steps does not notice them."
    )


def shares() -> Table:
    """The three recorded steps: how long the GPU works, and of how much."""
    record = profiling.recorded("mlp")
    alone = {"small MLP": 500 * _mlp()["torch", _BASE], "small MLP, graph": 500 * _mlp()["graph", _BASE]}
    rows = []
    for name in ("small MLP", "small MLP, graph", "large MLP"):
        part = record.note(name)
        took = alone.get(name, part.span_us)
        rows.append((name, len(part.kernels), part.busy_us, took, part.busy_us / took))
    columns = {"step": "", "kernels": "", "GPU works": "µs", "step takes": "µs", "share": ""}
    formats = {"GPU works": ",.0f", "step takes": ",.0f", "share": ".0%"}
    caption = "H200; small steps: timed back to back without a profiler; large (batch and width 4,096): as recorded"
    return style.table(columns, rows, formats=formats, caption=caption)


def single_kernels() -> Table:
    """What the profiler calls the kernels of single PyTorch calls."""
    record = profiling.recorded("mlp")
    found = [(name, record.note(name)) for name in record.notes if "MLP" not in name and name != "all"]
    names = [part.kernels[-1].name for _, part in found]
    names = [name if len(name) <= 58 else f"{name[:57]}…" for name in names]
    rows = [(call, name, part.busy_us) for (call, part), name in zip(found, names, strict=True)]
    caption = "measured on an H200 by the profiler: a single call each"
    return style.table({"call": "", "its kernel": "", "time": "µs"}, rows, caption=caption, formats={"time": ",.1f"})


def scaling_here() -> Table:
    """The MLP's step on this machine, with one of layers, batch and width made five times as large."""
    torch.set_num_threads(1)  # a CPU's times are steadier so
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[tuple] = []
    for layers, batch, width in ((4, 64, 64), (20, 64, 64), (4, 320, 64), (4, 64, 320)):
        parts = [m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.GELU())]
        model, x = torch.nn.Sequential(*parts).to(device), torch.randn(batch, width, device=device)
        us = 1e3 * time_ms(lambda m, x: m(x).mean().backward(), model, x, wall=True).median_ms
        rows.append((layers, batch, width, us, us / rows[0][3] if rows else 1.0))
    columns = {"layers": "", "batch": "", "width": "", "one step": "µs", "times": ""}
    return style.table(columns, rows, caption=f"On this machine ({device}), now", formats={"times": ".2f"})


def nsight() -> Picture:
    """The rows of Nsight Systems' timeline, as a sketch."""
    with diagram.canvas(19, 6.7) as ax:
        rows = (
            ("CPU threads", "python: running", ((0, 13.2, "", style.NEUTRAL),)),
            ("NVTX", "ranges that you named", ((0, 6.4, "step 11", diagram.PALE), (6.6, 6.6, "step 12", diagram.PALE))),
            ("OS runtime", "waits in the system", ((11.8, 1.4, "read", style.WASTE),)),
            (
                "CUDA API", "calls of the host",
                (*((0.2 + 0.75 * i, 0.6, "", style.PEER) for i in range(6)), (4.7, 1.8, "synchronize", style.WASTE),
                 *((6.9 + 0.75 * i, 0.6, "", style.PEER) for i in range(6))),
            ),
            (
                "GPU: kernels", "one row per stream",
                (*((0.6 + 0.85 * i, 0.75, "", style.COMPUTE) for i in range(6)), *((7.4 + 0.85 * i, 0.75, "", style.COMPUTE) for i in range(6))),
            ),
            ("GPU: memory", "copies to and from the host", ((5.8, 0.5, "", style.WRITES), (12.6, 0.6, "", style.READS))),
        )  # fmt: skip
        for i, (name, what, boxes) in enumerate(rows):
            y = 0.2 + 1.0 * i
            diagram.text(ax, 5.3, y + 0.28, name, bold=True, align="right")
            diagram.text(ax, 5.3, y + 0.66, what, size=8, align="right")
            for x, width, words, colour in boxes:
                diagram.box(ax, 5.6 + x, y + 0.1, width, 0.75, words, colour, size=8)
        diagram.arrow(ax, (5.6, 6.35), (18.8, 6.35), "time")
    return diagram.picture(
        ax, alt="A sketch of Nsight Systems' timeline, from top to bottom: CPU threads, NVTX ranges, OS runtime, CUDA API "
        "calls, kernels on the GPU, memory copies. A synchronizing call in the API row stands above a gap in the kernels' "
        "row.",
    )  # fmt: skip


# ---- lies ------------------------------------------------------------------------------------------------------------


def lies() -> Table:
    """The time that each lie reported, and the true one."""
    found = _notes()["lies"].items()
    rows = [(n, e["what"], e["told_ms"] * 1e3, e["true_ms"] * 1e3, e["true_ms"] / e["told_ms"]) for n, e in found]
    columns = {"lie": "", "what": "", "reported": "µs", "true": "µs", "true / reported": "times"}
    formats = {"reported": ",.1f", "true": ",.1f", "true / reported": ",.2f"}
    return style.table(columns, rows, caption="measured on an H200", formats=formats)


def caught() -> list[str]:
    """The lies whose rates are beyond the data sheet's."""
    h200 = spec("h200")
    return [
        name
        for name, lie in _notes()["lies"].items()
        if lie["flops"] / lie["told_ms"] * 1e3 > h200.peak("bf16")
        or lie["bytes"] / lie["told_ms"] / 1e6 > h200.hbm_gbps
    ]


def what_the_lies_say() -> Markdown:
    mhz = {name: run["sm_mhz"] for name, run in _notes()["lies"]["zeros"]["all"].items()}
    return Markdown(
        f"**What you saw.** `rate` catches the {' and the '.join(caught())}: their figures would need more arithmetic per "
        "second than the GPU has. It cannot catch the other two lies, because a time that is 1.2 to 1.3 times too short still "
        "looks "
        f"possible. The zeros kept the SMs at {mhz['zeros']:,} MHz, and random numbers brought them down to "
        f"{mhz['random']:,} "
        "(measured). The true time in the row of the zeros was measured together with them, so it differs a little from the time "
        "of the same product in the rows above."
    )


def side_stream() -> Picture:
    """A program on a stream of its own, and two events that see the default stream."""
    gpu = SimulatedGpu(**STEADY)
    device = Device(gpu)
    device.flush_l2()
    device.event()
    gpu.launch("matmul", least_us=40.0, stream="stream 1")
    device.event()
    device.synchronize()
    marks = list(zip(gpu.marks, ("", "start, end"), strict=True))
    return timeline(gpu.lanes, marks=marks, title="A side stream: nothing lies between the two marks (modelled)")


# ---- providers side by side ------------------------------------------------------------------------------------------


def why_more_than_four() -> Markdown:
    """Times of softmax as bytes times rate."""
    rows = {
        (r.provider, r.mode, r.shape): r
        for r in benchmark.rows("softmax")
        if r.op == "softmax" and r.dtype == "bfloat16"
    }
    eager, ours = (rows[name, "fwd-graph", (4096, 4096)] for name in ("torch", "gpukit"))
    moved = 4.0  # times the least bytes, counted in notebook 00
    rates = moved * eager.gbps, ours.gbps
    return Markdown(
        f"**What you saw.** At 4,096 x 4,096, with both in a CUDA graph, the five lines take {1e3 * eager.median_ms:.0f} "
        "µs and "
        f"the fused kernel {1e3 * ours.median_ms:.1f}, so it is {eager.median_ms / ours.median_ms:.1f} times as fast. A "
        "factor of 4 comes from the bytes: the five lines move four times as many (counted in notebook 00). The rest is the "
        f"rate at which the bytes move: {rates[0]:,.0f} GB/s in the five lines' kernels, {rates[1]:,.0f} GB/s in the fused one, "
        f"{rates[1] / rates[0]:.1f} "
        f"times as much. {moved:.0f} x {rates[1] / rates[0]:.1f} = {moved * rates[1] / rates[0]:.1f}. A count of bytes "
        "predicts the "
        "time only among kernels that reach the same rate, and PyTorch's reductions and broadcasts here do not reach a "
        "copy's."
    )


def bandwidths() -> Markdown:
    """The three figures in GB/s that the course has for an H200's memory."""
    copies = {name: next(r.gbps for r in benchmark.rows(name) if r.op == "copy") for name in ("softmax", "fusion")}
    sheet = spec("h200").hbm_gbps
    return Markdown(
        f"A word on bandwidth, because three figures for the same memory appear in this course. **{sheet:,.0f} GB/s** is "
        "the "
        "data sheet's, an upper limit: a time that implies more is impossible. "
        f"**{copies['softmax']:,.0f} GB/s** is what a copy of 1 GiB reached, measured beside the kernels in the chart; the "
        f"column *model* divides the least bytes by it. A copy of 512 MiB, which notebook 08 uses, reached "
        f"**{copies['fusion']:,.0f} GB/s** (measured). No kernel whose data comes from this memory and goes back "
        "to it can be expected to be faster than a copy."
    )


def cost_of_measuring() -> Markdown:
    ours, bare = (sorted(run[key] for run in _notes()["overhead"])[1] for key in ("ours_s", "bare_s"))
    return Markdown(
        f"All these precautions cost next to nothing: `gpukit`'s timing takes {ours / bare:.2f} times as long as a bare "
        "`triton.testing.do_bench` of the same call (median of three, measured on an H200)."
    )


def softmax() -> versus.Versus | versus.Missing:
    return versus.versus("softmax")


# ---- the layer -------------------------------------------------------------------------------------------------------


def llama_layer() -> Table:
    return layer.table()


def what_the_layer_says() -> Markdown:
    pytorch, ours = layer.totals_us()
    products = layer.products_us()
    most = max(layer.PARTS, key=lambda part: part.us("library") - part.us("gpukit"))
    before, after = most.us("library"), most.us("gpukit")
    return Markdown(
        f"**What you saw.** The layer takes {pytorch / 1e3:.1f} ms, of which the products take {products / pytorch:.0%}. "
        "They run "
        "at the rate of a large matmul, so little can be gained there. The other lines take "
        f"{(pytorch - products) / 1e3:.2f} "
        f"ms with PyTorch's functions and {(ours - products) / 1e3:.2f} ms with the kernels that you will write. A kernel "
        f'gains most in the line "{most.name}": {after:,.0f} µs instead of {before:,.0f}, which is '
        f"{(before - after) / (pytorch - ours):.0%} of all that the kernels save."
    )
