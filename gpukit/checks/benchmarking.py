"""The exercises of notebook 04: a benchmark of one's own, the queue, impossible rates, a benchmark that lies, a program
that does. Those that measure get the simulated GPU of gpukit.simulator.queue_model: the same times on every machine."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from gpukit.grading.evidence import Evidence
from gpukit.grading.exercise import Case, FunctionExercise, Label, Misconception, Variant

MIB = 1 << 20
_DEVICE = "gpukit.simulator.queue_model"


# ---------------------------------------------------------------------------------------------------------- benchmark
def _cold_us(settings: dict, x_bytes: int, y_bytes: int, least_us: float, *_) -> float:
    from gpukit.simulator.queue_model import Buffer, SimulatedGpu

    return SimulatedGpu(**settings).cold_us(Buffer(x_bytes), Buffer(y_bytes), least_us=least_us)


def _function(name: str, settings: dict, mib: float, least_us: float, *tags: str) -> Case:
    return Case(name, (settings, int(mib * MIB), int(mib * MIB), least_us), frozenset(tags))


def _benchmark_cases(rng: Random) -> list[Case]:
    def about(value: float) -> float:
        return value * rng.uniform(0.8, 1.2)

    return [
        _function("a kernel that fits the L2", {}, about(14), about(14), "in-l2", "short"),
        _function("a matmul", {}, 2, about(300)),
        _function("a softmax larger than the L2", {}, about(250), 0.0),
        _function("a short kernel on 120 MiB", {}, 60, about(5), "short"),
        _function(
            "a kernel that fits the L2, slow launches", {"launch_us": 9.0}, about(16), about(20), "in-l2", "short"
        ),
        _function("a long kernel", {}, 4, about(2500)),
        _function("a GPU that takes twice as long at first", {"slow": 2.0}, about(20), about(40), "in-l2"),
    ]


def _pairs(evidence: Evidence) -> list[tuple[float, float, dict]]:
    """(yours, right, what was counted) of every case."""
    found = []
    for outcome in evidence.outcomes:
        yours = outcome.reply.output
        if isinstance(yours, bool) or not isinstance(yours, int | float):
            return []
        found.append((float(yours), _cold_us(*outcome.case.args), outcome.reply.counts))
    return found


def _all(evidence: Evidence, rule: Callable[[float, float, dict], bool]) -> bool:
    """Whether `rule` (yours, right, counts) holds in every case that failed."""
    pairs = _pairs(evidence)
    return bool(pairs) and all(
        rule(*pair) for pair, outcome in zip(pairs, evidence.outcomes, strict=True) if outcome.wrong is not None
    )


def _off_by(low: float, high: float) -> Callable[[Evidence], bool]:
    """Every failed case is too large by `low` to `high` us."""
    return lambda evidence: _all(evidence, lambda yours, right, _: low <= yours - right <= high)


def _times(low: float, high: float) -> Callable[[Evidence], bool]:
    return lambda evidence: _all(evidence, lambda yours, right, _: low <= yours / right <= high)


def _constant(evidence: Evidence) -> bool:
    """The same few microseconds for kernels of all lengths."""
    values = [yours for yours, _, _ in _pairs(evidence)]
    return bool(values) and max(values) < 12


def _warm_l2(evidence: Evidence) -> bool:
    failed = [outcome for outcome in evidence.outcomes if outcome.wrong is not None]
    return all("in-l2" in o.case.tags or "short" in o.case.tags for o in failed) and _all(
        evidence, lambda yours, right, _: yours < 0.97 * right
    )


def _slow_clocks(evidence: Evidence) -> bool:
    """At most as slow as the GPU is at first, and in one case just as slow."""
    shares = [
        (yours / right, outcome.case.args[0].get("slow", 1.4))
        for (yours, right, _), outcome in zip(_pairs(evidence), evidence.outcomes, strict=False)
        if outcome.wrong is not None
    ]
    return all(1.02 < share < 1.15 * slow for share, slow in shares) and any(
        share > 0.93 * slow for share, slow in shares
    )


_LOOP = """    run()
    device.synchronize()
    begun = device.clock()
    while device.clock() - begun < 25_000:
        run()
        device.synchronize()
"""
_MARKS = """    for _ in range(100):
        device.flush_l2()  # also keeps the GPU busy until the launch below has arrived
        start = device.event()
        run()
        marks.append((start, device.event()))
    device.synchronize()
    times = sorted(start.elapsed_us(end) for start, end in marks)
    return times[len(times) // 2]
"""
_HOST_CLOCK = """    times = []
    for _ in range(100):
        {before}
        start = device.clock()
        run()
        {after}
        times.append(device.clock() - start)
    times = sorted(times)
    return times[len(times) // 2]
"""


def _clocked(before: str, after: str) -> str:
    return _HOST_CLOCK.format(before=before, after=after)


BENCHMARK = FunctionExercise(
    id="benchmarking.benchmark",
    title="A benchmark of one's own",
    notebook="04_benchmarking",
    function="benchmark",
    label=Label(3, 30, "warm-up, a cold L2, events, the median"),
    hints=(
        "Four things stand between a call and its time: what happens once, what the host does, where the data is, and "
        "what happens now and then. Which line of yours deals with which?",
        "Warm up by time, not by count, and only start counting that time once the kernel is compiled. Then, for each "
        "run: empty the L2, mark, run, mark. All of it joins one queue, so that the GPU never waits for the host between "
        "the two marks.",
        "Collect about a hundred pairs of events, each around one call that follows a flush; synchronise once after the "
        "last; take the elapsed times, sort them and return the middle one.",
    ),
    cases=_benchmark_cases,
    expected=_cold_us,
    setup=f"{_DEVICE}:one_function",
    tolerance=0.03,
    unit="us",
    misconceptions=(
        Misconception(
            "milliseconds",
            "so this is a thousandth of the right figure. Which unit does the device count in, and which does the "
            "contract ask for?",
            when=_times(0.0009, 0.0013),
        ),
        Misconception(
            "no-synchronise",
            "so this is what the host needs to queue a kernel: the same few microseconds for each, however long it runs. "
            "What has to happen before the clock is read again?",
            when=_constant,
        ),
        Misconception(
            "one-pair",
            "so all runs lie between one pair of marks. That is a mean, with the disturbed runs in it, and each run finds "
            "its data where the run before has left it. What can a hundred pairs tell that one cannot?",
            when=lambda e: bool(_pairs(e)) and all(1 <= counts["events"] <= 2 for _, _, counts in _pairs(e)),
        ),
        Misconception(
            "compile-counted",
            "so the first call is among the timed ones, and it compiled: tens of milliseconds. Which calls should come "
            "before the first measurement?",
            when=lambda e: _all(e, lambda yours, right, _: 800 < yours - right < 120_000 and yours / right > 1.2),
        ),
        Misconception(
            "not-divided",
            "so this is the time of many runs together. How long does one take?",
            when=_times(4, 100_000),
        ),
        Misconception(
            "flush-counted",
            "so the time for emptying the L2 is in it. Between which two marks should there be nothing but run()?",
            when=lambda e: _off_by(20, 60)(e) and _pairs(e)[0][2]["flushes"] > 0,
        ),
        Misconception(
            "host-time",
            "so a constant of some microseconds is added, which short kernels notice: the launch, and the wait for the "
            "GPU to answer. Which clock is beside the GPU?",
            when=lambda e: _off_by(3, 20)(e) and not _pairs(e)[0][2]["events"],
        ),
        Misconception(
            "gap-counted",
            "so the GPU had run dry when the first mark was queued, and the time until the launch arrived is in it. What "
            "could keep the queue busy in the meantime?",
            when=_off_by(3, 20),
        ),
        Misconception(
            "short-warm-up",
            "so most of the timed runs fell into the first 5 ms of the GPU's work, when it is slow. A hundred short "
            "kernels are over sooner than that: how long, rather than how often, should the warm-up run?",
            when=_slow_clocks,
        ),
        Misconception(
            "warm-l2",
            "so kernels whose data fits the L2 look faster than they are in a model: run() leaves its own data there for "
            "the next run(). What lies in the L2 when the timed run begins?",
            when=_warm_l2,
        ),
        Misconception(
            "mean",
            "so every figure is about a fifth too large. Now and then a run takes three times as long: which of mean and "
            "median notices, and is that run typical?",
            when=_times(1.05, 1.38),
        ),
        Misconception(
            "minimum",
            "so this is the luckiest run, not a typical one. Half of the runs should be above the figure, half below.",
            when=_times(0.94, 0.972),
        ),
    ),
    wrong=(
        Variant(
            "host clock, no wait",
            ((_LOOP + "\n    marks = []\n" + _MARKS, _LOOP + _clocked("device.flush_l2()", "pass")),),
            diagnosis="no-synchronise",
        ),
        Variant(
            "three runs, mean, no warm-up",
            source="def benchmark(device, run):\n    times = []\n    for _ in range(3):\n        start = device.clock()\n"
            "        run()\n        device.synchronize()\n        times.append(device.clock() - start)\n"
            "    return sum(times) / len(times)\n",
            diagnosis="compile-counted",
        ),
        Variant("no warm-up at all", ((_LOOP, ""), ("range(100)", "range(20)")), diagnosis="short-warm-up"),
        Variant(
            "one call to warm up",
            ((_LOOP, "    run()\n    device.synchronize()\n"), ("range(100)", "range(20)")),
            diagnosis="short-warm-up",
        ),
        Variant(
            "host clock around each call",
            (
                (
                    _LOOP + "\n    marks = []\n" + _MARKS,
                    _LOOP + _clocked("device.flush_l2(); device.synchronize()", "device.synchronize()"),
                ),
            ),
            diagnosis="host-time",
        ),
        Variant(
            "flush inside",
            (
                (
                    _LOOP + "\n    marks = []\n" + _MARKS,
                    _LOOP
                    + _clocked("device.synchronize()", "device.flush_l2(); device.synchronize()").replace(
                        "run()", "run()", 1
                    ),
                ),
            ),
            diagnosis="flush-counted",
        ),
        Variant(
            "flush between the marks",
            (
                (
                    "        device.flush_l2()  # also keeps the GPU busy until the launch below has arrived\n        start = device.event()\n",
                    "        start = device.event()\n        device.flush_l2()\n",
                ),
            ),
            diagnosis="flush-counted",
        ),
        Variant(
            "waits before the first mark",
            (
                (
                    "        start = device.event()\n        run()",
                    "        device.synchronize()\n        start = device.event()\n        run()",
                ),
            ),
            diagnosis="gap-counted",
        ),
        Variant(
            "no flush",
            (("        device.flush_l2()  # also keeps the GPU busy until the launch below has arrived\n", ""),),
            diagnosis="warm-l2",
        ),
        Variant(
            "a hundred in one pair of marks",
            (
                (
                    _MARKS,
                    "    start = device.event()\n    for _ in range(100):\n        run()\n    end = device.event()\n    device.synchronize()\n    return start.elapsed_us(end) / 100\n",
                ),
                ("    marks = []\n", ""),
            ),
            diagnosis="one-pair",
        ),
        Variant(
            "the mean", (("    return times[len(times) // 2]", "    return sum(times) / len(times)"),), diagnosis="mean"
        ),
        Variant(
            "the fastest run", (("    return times[len(times) // 2]", "    return times[0]"),), diagnosis="minimum"
        ),
        Variant(
            "the total", (("    return times[len(times) // 2]", "    return sum(times)"),), diagnosis="not-divided"
        ),
        Variant(
            "in ms",
            (("    return times[len(times) // 2]", "    return times[len(times) // 2] / 1000"),),
            diagnosis="milliseconds",
        ),
        Variant(
            "reads the mark too early",
            (
                (
                    "        marks.append((start, device.event()))\n    device.synchronize()\n",
                    "        marks.append((start, device.event()))\n",
                ),
            ),
            diagnosis="exception",
        ),
        Variant("a constant", source="def benchmark(device, run):\n    return 50.0\n", diagnosis="values"),
    ),
    right=(
        Variant(
            "waits after each run, torch's median",
            source="""import torch


def benchmark(device, run):
    for _ in range(3):
        run()
    device.synchronize()
    t0 = device.clock()
    while device.clock() < t0 + 50_000:
        device.flush_l2()
        run()
        device.synchronize()
    times = torch.empty(61)
    for i in range(61):
        device.flush_l2()
        before = device.event()
        run()
        after = device.event()
        device.synchronize()
        times[i] = before.elapsed_us(after)
    return times.median()
""",
        ),
        Variant(
            "warms up with flushes, drops the disturbed quarter",
            source="""def one(device, run):
    device.flush_l2()
    start = device.event()
    run()
    end = device.event()
    device.synchronize()
    return start.elapsed_us(end)


def benchmark(device, run):
    one(device, run)
    worked = 0.0
    while worked < 30_000:
        worked += one(device, run)
    times = sorted(one(device, run) for _ in range(200))[:175]
    return sum(times) / len(times)
""",
        ),
        Variant(
            "a thousand warm-up calls and half a thousand timed",
            source="""def benchmark(device, run):
    for _ in range(1000):
        run()
    device.synchronize()
    starts, ends = [], []
    for _ in range(501):
        device.flush_l2()
        starts.append(device.event())
        run()
        ends.append(device.event())
    device.synchronize()
    return sorted(map(lambda s, e: s.elapsed_us(e), starts, ends))[250]
""",
        ),
    ),
    timeout_s=20.0,
)


# ----------------------------------------------------------------------------------------------------------- timeline
def _timeline(kernels_us: list[float], launch_us: float, graph: bool) -> tuple[float, float]:
    launched = free = 0.0
    for i, took in enumerate(kernels_us):
        launched += launch_us if i == 0 or not graph else 0.0
        free = max(launched, free) + took
    return free, free - sum(kernels_us)


def _timeline_cases(rng: Random) -> list[Case]:
    def some(count: int, low: int, high: int) -> list[float]:
        return [float(rng.randrange(low, high)) for _ in range(count)]

    short, long, mixed = some(5, 1, 4), some(4, 20, 90), [30.0, *some(9, 1, 4), *some(2, 20, 40), *some(4, 1, 4)]
    return [
        Case("one kernel", (some(1, 8, 20), 5.0, False)),
        Case("five short kernels", (short, 5.0, False)),
        Case("four long kernels", (long, 5.0, False)),
        Case("a long one, then short ones, then both", (mixed, 5.0, False)),
        Case("short ones, then a long one", ([*some(6, 1, 4), 200.0], 4.5, False)),
        Case("five short kernels, a graph", (short, 5.0, True)),
        Case("sixteen kernels, a graph", (mixed, 5.0, True)),
        Case("kernels as long as a launch", ([6.0] * 5, 6.0, False)),
        Case("a GPU of 148 SMs, 500 kernels", (some(500, 1, 12), 5.5, False)),
    ]


TIMELINE = FunctionExercise(
    id="benchmarking.timeline",
    title="Host and GPU, side by side",
    notebook="04_benchmarking",
    function="timeline",
    label=Label(2, 20, "launch overhead, the queue, CUDA graphs"),
    hints=(
        "Draw two lines, one for the host and one for the GPU, and put three kernels on them. When may the second one "
        "start: what are the two things that it waits for?",
        "Carry two numbers from kernel to kernel: when its launch is done, and when the GPU is free. The later of the two "
        "is its start. The host's number never looks at the GPU's.",
        "For each kernel add one launch to the host's time (with a graph for the first kernel only), then set the GPU's "
        "time to the larger of the two plus the kernel's. Idle is what the kernels' times leave of the total.",
    ),
    cases=_timeline_cases,
    expected=_timeline,
    tolerance=1e-9,
    unit="us",
    misconceptions=(
        Misconception(
            "host-waits",
            "so the host launches the next kernel only when the last one has ended. It does not wait: what does it do "
            "while the GPU works?",
            gives=lambda ks, us, graph: (
                sum(ks) + us * (1 if graph else len(ks)),
                us * (1 if graph else len(ks)),
            ),
        ),
        Misconception(
            "graph-launches",
            "so a graph is launched kernel by kernel. How many launches does the host make for it?",
            gives=lambda ks, us, graph: _timeline(ks, us, False),
        ),
        Misconception(
            "free-graph",
            "so a graph costs the host nothing. One launch is left: when can the first kernel start?",
            gives=lambda ks, us, graph: (sum(ks), 0.0) if graph else _timeline(ks, us, False),
        ),
        Misconception(
            "larger-of-sums",
            "so the longer of all launches and all kernels is the total. That holds in the middle of a long run; what "
            "about its first launch and its last kernel, and a long kernel among short ones?",
            gives=lambda ks, us, graph: _of_total(ks, max(sum(ks), us * (1 if graph else len(ks)))),
        ),
        Misconception(
            "larger-each",
            "so each kernel takes the longer of its launch and its own time. But launches run ahead: what has the host "
            "done by the end of a long kernel?",
            gives=lambda ks, us, graph: _of_total(
                ks, us + sum(ks) if graph else us + sum(max(k, us) for k in ks[:-1]) + ks[-1]
            ),
        ),
        Misconception(
            "larger-each",
            "so each kernel takes the longer of its launch and its own time. But launches run ahead: what has the host "
            "done by the end of a long kernel?",
            gives=lambda ks, us, graph: _of_total(ks, us + sum(ks) if graph else sum(max(k, us) for k in ks)),
        ),
        Misconception(
            "first-launch-free",
            "so the first kernel starts at 0. What does the host do from 0 on?",
            gives=lambda ks, us, graph: _of_total(ks, _timeline(ks, us, graph)[0] - us),
        ),
        Misconception(
            "gaps-only",
            "so idle leaves out the time before the first kernel. Does the GPU have anything to do then?",
            gives=lambda ks, us, graph: (_timeline(ks, us, graph)[0], _timeline(ks, us, graph)[1] - us),
        ),
        Misconception(
            "host-idle",
            "so idle is what the host has left. Whose idle time is asked for?",
            gives=lambda ks, us, graph: (
                _timeline(ks, us, graph)[0],
                _timeline(ks, us, graph)[0] - us * (1 if graph else len(ks)),
            ),
        ),
        Misconception(
            "busy-for-idle",
            "so this is how long the GPU works. How long does it not?",
            gives=lambda ks, us, graph: (_timeline(ks, us, graph)[0], sum(ks)),
        ),
    ),
    wrong=(
        Variant(
            "one after the other",
            (("free = max(launched, free) + took", "free = free + took + (launch_us if i == 0 or not graph else 0)"),),
            diagnosis="host-waits",
        ),
        Variant(
            "graph launched kernel by kernel",
            (
                (
                    "        if i == 0 or not graph:\n            launched += launch_us\n",
                    "        launched += launch_us\n",
                ),
            ),
            diagnosis="graph-launches",
        ),
        Variant("graph for nothing", (("if i == 0 or not graph:", "if not graph:"),), diagnosis="free-graph"),
        Variant(
            "larger of the sums",
            (
                (
                    "    return free, free - sum(kernels_us)",
                    "    total = max(launched, sum(kernels_us))\n    return total, total - sum(kernels_us)",
                ),
            ),
            diagnosis="larger-of-sums",
        ),
        Variant(
            "larger one by one",
            (
                (
                    "free = max(launched, free) + took",
                    "free = launch_us + free + took if i == 0 else free + (took if graph else max(took, launch_us))",
                ),
            ),
            diagnosis="values",
        ),
        Variant(
            "each the larger of two",
            source="def timeline(kernels_us, launch_us, graph):\n    total = sum(kernels_us) + launch_us if graph else sum(max(k, launch_us) for k in kernels_us)\n    return total, total - sum(kernels_us)\n",
            diagnosis="larger-each",
        ),
        Variant(
            "starts at 0",
            (("    launched = free = 0.0", "    launched, free = -launch_us, 0.0"),),
            diagnosis="first-launch-free",
        ),
        Variant(
            "gaps between kernels",
            (("return free, free - sum(kernels_us)", "return free, free - sum(kernels_us) - launch_us"),),
            diagnosis="gaps-only",
        ),
        Variant(
            "the host's idle time",
            (("return free, free - sum(kernels_us)", "return free, free - launched"),),
            diagnosis="host-idle",
        ),
        Variant(
            "busy, not idle",
            (("return free, free - sum(kernels_us)", "return free, sum(kernels_us)"),),
            diagnosis="busy-for-idle",
        ),
        Variant("total alone", (("return free, free - sum(kernels_us)", "return free"),), diagnosis="type"),
    ),
    right=(
        Variant(
            "the last kernel that had to wait decides",
            source="def timeline(kernels_us, launch_us, graph):\n"
            "    n = len(kernels_us)\n"
            "    ready = [launch_us if graph else launch_us * (i + 1) for i in range(n)]\n"
            "    total = max(ready[i] + sum(kernels_us[i:]) for i in range(n))\n"
            "    return total, total - sum(kernels_us)\n",
        ),
        Variant(
            "two clocks and a queue",
            source="from collections import deque\n\n\n"
            "def timeline(kernels_us, launch_us, graph):\n"
            "    arrivals = deque()\n"
            "    clock = 0.0\n"
            "    for number, length in enumerate(kernels_us):\n"
            "        if number == 0 or not graph:\n"
            "            clock = clock + launch_us\n"
            "        arrivals.append((clock, length))\n"
            "    now, idle = 0.0, 0.0\n"
            "    while arrivals:\n"
            "        arrival, length = arrivals.popleft()\n"
            "        if arrival > now:\n"
            "            idle += arrival - now\n"
            "            now = arrival\n"
            "        now += length\n"
            "    return [now, idle]\n",
        ),
    ),
    timeout_s=20.0,
)


def _of_total(kernels_us: list[float], total: float) -> tuple[float, float]:
    return total, total - sum(kernels_us)


# --------------------------------------------------------------------------------------------------------------- rate
def _rate(M, N, K, itemsize, ms, peak_tflops, peak_gbps) -> tuple[float, float, bool]:
    tflops = 2 * M * N * K / ms / 1e9
    gbps = (M * K + K * N + M * N) * itemsize / ms / 1e6
    return tflops, gbps, tflops <= peak_tflops and gbps <= peak_gbps


def _rate_cases(rng: Random) -> list[Case]:
    def odd(low: int, high: int) -> int:
        return rng.randrange(low, high) * 2 + 1

    def case(name: str, M: int, N: int, K: int, itemsize: int, limit: str, share: float) -> Case:
        """A time at which `limit` would run at `share` of its peak."""
        peaks = 989.0, 4800.0
        tflops, gbps, _ = _rate(M, N, K, itemsize, 1.0, *peaks)
        ms = (tflops / peaks[0] if limit == "compute" else gbps / peaks[1]) / share
        return Case(name, (M, N, K, itemsize, ms, *peaks))

    return [
        case("4096 cubed at three quarters of the peak", 4096, 4096, 4096, 2, "compute", 0.75),
        case("odd sizes, a third of the peak", odd(500, 900), odd(1000, 1500), odd(300, 500), 2, "compute", 0.31),
        case("8192 cubed, five times the peak", 8192, 8192, 8192, 2, "compute", 5.0),
        case("one row: a vector, faster than memory", 1, odd(4000, 5000), odd(4000, 5000), 2, "memory", 1.6),
        case("one row, 0.8 of what memory gives", 1, odd(4000, 5000), odd(4000, 5000), 2, "memory", 0.8),
        case("a thin K, faster than memory", odd(4000, 5000), odd(4000, 5000), 8, 4, "memory", 1.2),
        case(
            "a little above the arithmetic peak", odd(2000, 3000), odd(2000, 3000), odd(2000, 3000), 2, "compute", 1.04
        ),
        Case("exactly at the peak", (1000, 1000, 1000, 2, 2.0, 1.0, 4800.0)),
        case("one element an hour", 1, 1, 1, 4, "memory", 1e-9),
    ]


RATE = FunctionExercise(
    id="benchmarking.rate",
    title="A rate, and whether it can be true",
    notebook="04_benchmarking",
    function="rate",
    label=Label(2, 15, "FLOPs and bytes per second, impossible figures"),
    hints=(
        "A time alone cannot look wrong. Which two rates does it imply, and what is each of them limited by?",
        "An element of C takes K products and as many sums. Three matrices cross the bus once, each with its own two "
        "sizes. Mind that ms are thousandths of a second: 10^12 a second is 10^9 a millisecond.",
        "Divide twice the product of the three sizes by ms times 10^9, and the bytes of A, B and C by ms times 10^6. "
        "Possible means that both are at most their peak.",
    ),
    cases=_rate_cases,
    expected=_rate,
    tolerance=1e-9,
    misconceptions=(
        Misconception(
            "one-flop",
            "so a product and the sum it goes into count as one operation. How many does this course count?",
            gives=lambda M, N, K, b, ms, f, g: (
                _rate(M, N, K, b, ms, f, g)[0] / 2,
                _rate(M, N, K, b, ms, f, g)[1],
                _rate(M, N, K, b, 2 * ms, f, 2e30)[0] <= f and _rate(M, N, K, b, ms, f, g)[1] <= g,
            ),
        ),
        Misconception(
            "seconds",
            "so ms is taken for seconds, or the other way round: a thousand times off. How many seconds is a millisecond?",
            when=lambda e: _first_ratio(e, 0) in (1000, 0.001),
        ),
        Misconception(
            "scaled-unit",
            "so one of the rates is in another unit. 1 TFLOP is 10^12 operations and 1 GB is 10^9 bytes, not 2^30.",
            when=lambda e: (
                _first_ratio(e, 1) in (round(1e9 / 2**30, 6), 1e9, 1e3, 1e-3) or _first_ratio(e, 0) in (1e12, 1e3, 1e-3)
            ),
        ),
        Misconception(
            "output-free",
            "so C costs nothing. Where is the result when the kernel is done?",
            gives=lambda M, N, K, b, ms, f, g: _with_bytes(M, N, K, b, ms, f, g, (M * K + K * N) * b),
        ),
        Misconception(
            "elements",
            "so these are elements a second. How many bytes does one take?",
            gives=lambda M, N, K, b, ms, f, g: _with_bytes(M, N, K, b, ms, f, g, M * K + K * N + M * N),
        ),
        Misconception(
            "read-again",
            "so A is read for every column of C, or B for every row. The least is asked for: each once.",
            gives=lambda M, N, K, b, ms, f, g: _with_bytes(M, N, K, b, ms, f, g, (2 * M * N * K + M * N) * b),
        ),
        Misconception(
            "one-limit",
            "so only one of the two peaks is held against it. A vector times a matrix needs little arithmetic and can "
            "still be impossible; a large matmul the other way round.",
            when=lambda e: _verdict_only(e) and all(o.reply.output[2] for o in e.outcomes if o.wrong),
        ),
        Misconception(
            "strict",
            "so a GPU at its peak is called impossible. What may it reach, and what may it not exceed?",
            when=lambda e: _verdict_only(e) and len(e.failed) == 1 and "exactly" in e.failed[0].name,
        ),
        Misconception(
            "inverted",
            "so what is possible is called impossible, and the other way round. When is the last value True?",
            when=lambda e: _verdict_only(e) and not e.passed,
        ),
    ),
    wrong=(
        Variant("a multiply-add is one", (("tflops = 2 * M", "tflops = M"),), diagnosis="one-flop"),
        Variant("ms for seconds", (("(ms * 1e9)", "(ms * 1e12)"), ("(ms * 1e6)", "(ms * 1e9)")), diagnosis="seconds"),
        Variant("GiB", (("itemsize / (ms * 1e6)", "itemsize / (ms * 1e-3) / 2**30"),), diagnosis="scaled-unit"),
        Variant("FLOP/s", (("(ms * 1e9)", "(ms * 1e-3)"),), diagnosis="scaled-unit"),
        Variant("forgets C", (("K * N + M * N) * itemsize", "K * N) * itemsize"),), diagnosis="output-free"),
        Variant("elements, not bytes", ((" * itemsize / (ms * 1e6)", " / (ms * 1e6)"),), diagnosis="elements"),
        Variant("naive traffic", (("(M * K + K * N + M * N)", "(2 * M * N * K + M * N)"),), diagnosis="read-again"),
        Variant("arithmetic alone", ((" and gbps <= peak_gbps", ""),), diagnosis="one-limit"),
        Variant("memory alone", (("tflops <= peak_tflops and gbps", "gbps"),), diagnosis="one-limit"),
        Variant("either will do", (("peak_tflops and gbps", "peak_tflops or gbps"),), diagnosis="one-limit"),
        Variant("below the peak", (("tflops <= peak_tflops", "tflops < peak_tflops"),), diagnosis="strict"),
        Variant(
            "impossible, not possible",
            (
                (
                    "return tflops, gbps, tflops <= peak_tflops and gbps <= peak_gbps",
                    "return tflops, gbps, not (tflops <= peak_tflops and gbps <= peak_gbps)",
                ),
            ),
            diagnosis="inverted",
        ),
        Variant(
            "a word for the verdict", (("tflops <= peak_tflops and gbps <= peak_gbps", '"possible"'),), diagnosis="type"
        ),
    ),
    right=(
        Variant(
            "seconds first",
            source="def rate(M, N, K, itemsize, ms, peak_tflops, peak_gbps):\n"
            "    seconds = ms / 1000\n"
            "    flops = sum(2 * M * N for _ in range(K))\n"
            "    moved = itemsize * (M * K) + itemsize * (K * N) + itemsize * (M * N)\n"
            "    per_second = flops / seconds / 10**12, moved / seconds / 10**9\n"
            "    return (*per_second, not (per_second[0] > peak_tflops or per_second[1] > peak_gbps))\n",
        ),
        Variant(
            "shares of the peaks",
            source="import math\n\n\n"
            "def rate(M, N, K, itemsize, ms, peak_tflops, peak_gbps):\n"
            "    tflops = math.prod((2, M, N, K)) * 1e-9 / ms\n"
            "    gbps = sum(math.prod(pair) for pair in ((M, K), (K, N), (M, N))) * itemsize * 1e-6 / ms\n"
            "    return [tflops, gbps, max(tflops / peak_tflops, gbps / peak_gbps) <= 1]\n",
        ),
    ),
    timeout_s=20.0,
)


def _with_bytes(M, N, K, itemsize, ms, peak_tflops, peak_gbps, moved) -> tuple[float, float, bool]:
    tflops, gbps = _rate(M, N, K, itemsize, ms, peak_tflops, peak_gbps)[0], moved / ms / 1e6
    return tflops, gbps, tflops <= peak_tflops and gbps <= peak_gbps


def _first_ratio(evidence: Evidence, index: int) -> float | None:
    """yours / right of one of the values in the first case that failed, to six digits."""
    yours, right = evidence.outputs[index], evidence.expected[index]
    return float(f"{yours / right:.6g}")


def _verdict_only(evidence: Evidence) -> bool:
    """Both rates are right in every case, and the verdict is one."""
    return all(type(outcome.reply.output[2]) is bool for outcome in evidence.outcomes) and all(
        abs(yours - right) <= 1e-9 * abs(right)
        for outcome in evidence.outcomes
        for yours, right in zip(outcome.reply.output[:2], _rate(*outcome.case.args)[:2], strict=True)
    )


# ---------------------------------------------------------------------------------------------------------- detective
_STEADY = {"slow": 1.0, "disturbed_every": 0, "jitter": 0.02, "dram_gbps": 400.0, "l2_gbps": 1_000.0}


def _speedup(settings: dict, x_bytes: int, y_bytes: int, old_us: float, new_us: float, how: str) -> float:
    return _cold_us(settings, x_bytes, y_bytes, old_us) / _cold_us(settings, x_bytes, y_bytes, new_us)


def _speedup_cases(rng: Random) -> list[Case]:
    def case(name: str, mib: int, old: float, new: float, how: str) -> Case:
        tags = frozenset({how} - {"plain"} | ({"in-l2"} if 2 * mib < 50 else set()))
        return Case(
            name, (_STEADY, mib * MIB, mib * MIB, old * rng.uniform(0.9, 1.1), new * rng.uniform(0.9, 1.1), how), tags
        )

    return [
        case("a new program, honest", 60, 200, 60, "plain"),
        case("the same program twice, honest", 60, 150, 150, "plain"),
        case("a new program that is slower, honest", 16, 50, 180, "plain"),
        case("the program that was announced", 60, 200, 190, "cached"),
        case("announced too, and slower", 16, 100, 400, "cached"),
        case("announced, small data", 12, 90, 60, "cached"),
    ]


DETECTIVE = FunctionExercise(
    id="benchmarking.detective",
    title="Detective: hundreds of times as fast",
    notebook="04_benchmarking",
    function="speedup",
    label=Label(3, 20, "results that are not computed again, fresh inputs"),
    hints=(
        "The new program's time does not depend on how much it computes. What would a person do who is asked the same "
        "question twenty times?",
        "A program may keep its results and look them up by their input. Warm-up asks the question for the first time, "
        "before anybody measures; all timed calls after that ask it again.",
        "Each timed call needs an input that the program has never seen, made before the first mark. Filling it leaves "
        "it in the L2: mind the order.",
    ),
    cases=_speedup_cases,
    expected=_speedup,
    setup=f"{_DEVICE}:two_programs",
    tolerance=0.05,
    misconceptions=(
        Misconception(
            "cached",
            "so the new program still answers without computing: that many bytes in that time are more than the memory "
            "has. From its second timed call on, has it seen its input before?",
            when=lambda e: e.tag("cached") and _rises(e),
        ),
        Misconception(
            "input-timed",
            "so making the input is timed along with the program. Filling x is a kernel too: on which side of the first "
            "mark does it belong?",
            gives=lambda s, x, y, old, new, how: _fill_timed(s, x, y, old, new),
        ),
        Misconception(
            "warm-input",
            "so x still lies in the L2 when the program reads it, for filling it put it there. What happened to the flush?",
            gives=lambda s, x, y, old, new, how: _warm_ratio(s, x, y, old, new),
        ),
        Misconception(
            "inverted",
            "so this is the other way round: 2.0 should mean that `new` takes half the time.",
            gives=lambda *case: 1 / _speedup(*case),
        ),
    ),
    wrong=(
        Variant(
            "as found",
            (
                (
                    "        for _ in range(20):\n            x = device.random(x_bytes)\n",
                    "        x = device.random(x_bytes)\n        for _ in range(20):\n",
                ),
            ),
            diagnosis="cached",
        ),
        Variant(
            "waits and repeats",
            (
                (
                    "        for _ in range(20):\n            x = device.random(x_bytes)\n            device.flush_l2()\n",
                    "        x = device.random(x_bytes)\n        for _ in range(20):\n            device.synchronize()\n            device.flush_l2()\n",
                ),
            ),
            diagnosis="cached",
        ),
        Variant(
            "two inputs in turn",
            (
                (
                    "        for _ in range(20):\n            x = device.random(x_bytes)\n",
                    "        inputs = [device.random(x_bytes), device.random(x_bytes)]\n        for i in range(20):\n            x = inputs[i % 2]\n",
                ),
            ),
            diagnosis="cached",
        ),
        Variant(
            "fills between the marks",
            (
                (
                    "            x = device.random(x_bytes)\n            device.flush_l2()\n            start = device.event()\n",
                    "            device.flush_l2()\n            start = device.event()\n            x = device.random(x_bytes)\n",
                ),
            ),
            diagnosis="input-timed",
        ),
        Variant(
            "flushes before it fills",
            (
                (
                    "            x = device.random(x_bytes)\n            device.flush_l2()\n",
                    "            device.flush_l2()\n            x = device.random(x_bytes)\n",
                ),
            ),
            diagnosis="warm-input",
        ),
        Variant(
            "no flush",
            (
                (
                    "            device.flush_l2()\n            start = device.event()\n            program(x)\n            end",
                    "            start = device.event()\n            program(x)\n            end",
                ),
            ),
            diagnosis="warm-input",
        ),
        Variant(
            "divides the wrong way",
            (("time_us(old) / time_us(new)", "time_us(new) / time_us(old)"),),
            diagnosis="inverted",
        ),
        Variant(
            "believes it is never faster",
            (("time_us(old) / time_us(new)", "min(1.0, time_us(old) / time_us(new))"),),
            diagnosis="values",
        ),
    ),
    right=(
        Variant(
            "all inputs first, one queue",
            source="""def speedup(device, old, new, x_bytes):
    def measure(program):
        program(device.random(x_bytes))
        inputs = [device.random(x_bytes) for _ in range(21)]
        marks = []
        for x in inputs:
            device.flush_l2()
            start = device.event()
            program(x)
            marks.append((start, device.event()))
        device.synchronize()
        return sorted(a.elapsed_us(b) for a, b in marks)[10]

    return measure(old) / measure(new)
""",
        ),
        Variant(
            "both programs in turn, each with an input of its own",
            source="""def one(device, program, x_bytes):
    x = device.random(x_bytes)
    device.flush_l2()
    start = device.event()
    program(x)
    end = device.event()
    device.synchronize()
    return start.elapsed_us(end)


def speedup(device, old, new, x_bytes):
    ratios = []
    for i in range(31):
        times = one(device, old, x_bytes), one(device, new, x_bytes)
        if i:
            ratios.append(times[0] / times[1])
    return sum(ratios) / len(ratios)
""",
        ),
        Variant(
            "the whole loop between two clocks, the flushes taken off",
            source="""def speedup(device, old, new, x_bytes):
    def loop(program):
        inputs = [device.random(x_bytes) for _ in range(100)]
        device.synchronize()
        begun = device.clock()
        for x in inputs:
            device.flush_l2()
            program(x)
        device.synchronize()
        return device.clock() - begun

    nothing = loop(lambda x: None)
    old(device.random(x_bytes))
    new(device.random(x_bytes))
    return (loop(old) - nothing) / (loop(new) - nothing)
""",
        ),
    ),
    timeout_s=20.0,
)


def _rises(evidence: Evidence) -> bool:
    return all(
        outcome.reply.output > 10 * _speedup(*outcome.case.args) for outcome in evidence.outcomes if outcome.wrong
    )


def _fill_timed(settings: dict, x_bytes: int, y_bytes: int, old_us: float, new_us: float) -> float:
    from gpukit.simulator.queue_model import Buffer, SimulatedGpu

    fill = SimulatedGpu(**settings).cold_us(Buffer(x_bytes))
    old, new = (_warm_us(settings, x_bytes, y_bytes, us) for us in (old_us, new_us))
    return (fill + old) / (fill + new)


def _warm_ratio(settings: dict, x_bytes: int, y_bytes: int, old_us: float, new_us: float) -> float:
    return _warm_us(settings, x_bytes, y_bytes, old_us) / _warm_us(settings, x_bytes, y_bytes, new_us)


def _warm_us(settings: dict, x_bytes: int, y_bytes: int, least_us: float) -> float:
    """x out of the L2, if it fits: what has just been filled is there."""
    if x_bytes > 50 * MIB:
        return _cold_us(settings, x_bytes, y_bytes, least_us)
    return _cold_us(settings, 0, y_bytes, least_us) + x_bytes / settings["l2_gbps"] / 1e3


# ------------------------------------------------------------------------------------------------------------- honest
_SMALL = {"dram_gbps": 100.0, "l2_gbps": 500.0, "zeros": 0.75, "slow_until_us": 30_000.0}


def _honest_cases(rng: Random) -> list[Case]:
    def case(name: str, mib: float, least_us: float, how: str, *tags: str) -> Case:
        nbytes = int(mib * rng.uniform(0.9, 1.1) * MIB)
        return Case(name, (_SMALL, nbytes, 8 * MIB, least_us * rng.uniform(0.9, 1.1), how), frozenset(tags))

    return [
        case("a plain program, data larger than the L2", 80, 100, "plain"),
        case("a plain program, data that fits the L2", 36, 300, "plain", "in-l2"),
        case("a program that keeps its results", 64, 400, "cached", "cached"),
        case("a program that keeps its results, small data", 30, 200, "cached", "cached", "in-l2"),
        case("a program on a stream of its own", 70, 300, "side", "side"),
        case("a program on a stream of its own, small data", 36, 400, "side", "side", "in-l2"),
        case("a plain program, mostly arithmetic", 2, 1500, "plain"),
    ]


def _honest_us(settings: dict, x_bytes: int, y_bytes: int, least_us: float, how: str) -> float:
    return _cold_us(settings, x_bytes, y_bytes, least_us)


_HONEST_LOOP = """        x = device.random(x_bytes)
        device.flush_l2()
        device.synchronize()
        start = device.clock()  # not an event: that sees the default stream alone
        program(x)
        device.synchronize()
        times.append(device.clock() - start)
"""
HONEST = FunctionExercise(
    id="benchmarking.honest",
    title="A benchmark that cannot be cheated",
    notebook="04_benchmarking",
    function="honest",
    label=Label(4, 40, "side streams, cached results, easy inputs, warm caches: all at once"),
    hints=(
        "Four ways to look fast are named in the contract. For each: what would the benchmark have to do so that it "
        "makes no difference?",
        "An event sees one stream, the host sees all of them once it has waited. A fresh random input defeats a memory and "
        "an easy number at the same time, but leaves itself in the L2.",
        "For each of some fifty runs: fill a new random buffer, flush, wait until everything is done; read the clock, run, "
        "wait again, read the clock. Return the median: the first runs compile and are slow, and there are few of them.",
    ),
    cases=_honest_cases,
    expected=_honest_us,
    setup=f"{_DEVICE}:one_program",
    tolerance=0.06,
    unit="us",
    misconceptions=(
        Misconception(
            "side-stream",
            "so the marks lie on the default stream, and the work does not: nothing of it is between them. Which call "
            "waits for every stream?",
            when=lambda e: all("side" in o.case.tags for o in e.outcomes if o.wrong),
        ),
        Misconception(
            "cached",
            "so a program that keeps its results answers without working. Which of the inputs has it seen before?",
            when=lambda e: (
                all("cached" in o.case.tags for o in e.outcomes if o.wrong) and _all(e, lambda y, r, _: y < 0.7 * r)
            ),
        ),
        Misconception(
            "zeros",
            "so every program looks about a quarter too fast. Zeros flip fewer bits in the arithmetic units, which lets a "
            "GPU keep a higher clock: what should x hold?",
            when=_times(0.70, 0.80),
        ),
        Misconception(
            "no-wait",
            "so this is what the host needs to launch a program. What has to happen before the clock is read again?",
            when=_constant,
        ),
        Misconception(
            "compile-counted",
            "so the first call is among the timed ones and carries weight: it compiled. Is it typical?",
            when=lambda e: _all(e, lambda yours, right, _: 800 < yours - right < 120_000 and yours / right > 1.2),
        ),
        Misconception(
            "warm-input",
            "so data that fits the L2 is read from there: filling x, or the run before, put it there. What comes between "
            "that and the start?",
            when=lambda e: (
                all("in-l2" in o.case.tags for o in e.outcomes if o.wrong) and _all(e, lambda y, r, _: y < r)
            ),
        ),
        Misconception(
            "mean",
            "so every figure is about a fifth too large: now and then a run takes three times as long. Is that run "
            "typical?",
            when=_times(1.05, 1.32),
        ),
        Misconception(
            "short-warm-up",
            "so most of the timed runs fell into the first 30 ms of the GPU's work. How many runs does that take, and are "
            "there enough after them?",
            when=_times(1.32, 1.5),
        ),
        Misconception(
            "flush-counted",
            "so filling x or emptying the L2 is timed along with the program. What should lie between the two readings?",
            when=lambda e: _all(e, lambda yours, right, _: yours - right > 200),
        ),
    ),
    wrong=(
        Variant(
            "events on the default stream",
            (
                (
                    _HONEST_LOOP,
                    "        x = device.random(x_bytes)\n        device.flush_l2()\n        start = device.event()\n        program(x)\n        end = device.event()\n        device.synchronize()\n        times.append(start.elapsed_us(end))\n",
                ),
            ),
            diagnosis="side-stream",
        ),
        Variant(
            "one input for all",
            (
                (
                    "    times = []\n    for _ in range(120):  # the first 30 ms of them are slow: few enough for a median\n        x = device.random(x_bytes)\n",
                    "    times = []\n    x = device.random(x_bytes)\n    for _ in range(120):\n",
                ),
            ),
            diagnosis="cached",
        ),
        Variant(
            "zeros",
            (
                (
                    "        x = device.random(x_bytes)\n        device.flush_l2()",
                    "        x = device.zeros(x_bytes)\n        device.flush_l2()",
                ),
            ),
            diagnosis="zeros",
        ),
        Variant(
            "no flush",
            (("        device.flush_l2()\n        device.synchronize()\n", "        device.synchronize()\n"),),
            diagnosis="warm-input",
        ),
        Variant(
            "flush before the fill",
            (
                (
                    "        x = device.random(x_bytes)\n        device.flush_l2()\n",
                    "        device.flush_l2()\n        x = device.random(x_bytes)\n",
                ),
            ),
            diagnosis="warm-input",
        ),
        Variant(
            "does not wait",
            (("        program(x)\n        device.synchronize()\n        times", "        program(x)\n        times"),),
            diagnosis="no-wait",
        ),
        Variant(
            "mean of all",
            (
                ("    return sorted(times)[len(times) // 2]", "    return sum(times) / len(times)"),
                ("    program(device.random(x_bytes))\n    device.synchronize()\n    times = []", "    times = []"),
            ),
            diagnosis="compile-counted",
        ),
        Variant(
            "mean after a warm-up",
            (("    return sorted(times)[len(times) // 2]", "    return sum(times[60:]) / 60"),),
            diagnosis="mean",
        ),
        Variant("five runs", (("range(120)", "range(5)"),), diagnosis="short-warm-up"),
        Variant(
            "waits too late",
            (
                (
                    "        device.flush_l2()\n        device.synchronize()\n        start",
                    "        device.flush_l2()\n        start",
                ),
            ),
            diagnosis="flush-counted",
        ),
    ),
    right=(
        Variant(
            "events, with a wait before each",
            source="""def honest(device, program, x_bytes):
    def once():
        x = device.random(x_bytes)
        device.flush_l2()
        device.synchronize()
        start = device.event()
        program(x)
        device.synchronize()
        end = device.event()
        device.synchronize()
        return start.elapsed_us(end)

    for _ in range(30):
        once()
    return sorted(once() for _ in range(31))[15]
""",
        ),
        Variant(
            "the launch and the wait taken off",
            source="""import math


def honest(device, program, x_bytes):
    program(device.random(x_bytes))
    device.synchronize()
    begun = device.clock()
    device.synchronize()
    wait = device.clock() - begun
    seen, times = 0.0, []
    while seen < 60_000 or len(times) < 20:
        device.random(x_bytes)
        x = device.random(x_bytes)
        device.flush_l2()
        device.synchronize()
        begun = device.clock()
        program(x)
        device.synchronize()
        times.append(device.clock() - begun - wait)
        seen += times[-1]
    times.sort()
    return times[math.floor(len(times) * 0.45)]
""",
        ),
    ),
    timeout_s=20.0,
)

EXERCISES = [BENCHMARK, TIMELINE, RATE, DETECTIVE, HONEST]
