"""The exercises of notebook 04: a benchmark of one's own, the queue, impossible rates, a profiler's table, a benchmark that
lies, a program that does. Those that measure get the simulated GPU of gpukit.simulator.queue_model: the same times on every machine."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

from gpukit.grading.evidence import Evidence
from gpukit.grading.exercise import Case, FunctionExercise, Misconception
from gpukit.grading.ideas import only

MIB = 1 << 20
_DEVICE = "gpukit.simulator.queue_model"


# ---------------------------------------------------------------------------------------------------------- benchmark
def _cold_us(settings: dict, x_bytes: int, y_bytes: int, least_us: float, *_) -> float:
    from gpukit.simulator.queue_model import Buffer, SimulatedGpu

    return SimulatedGpu(**settings).cold_us(Buffer(x_bytes), Buffer(y_bytes), least_us=least_us)


def _function(name: str, settings: dict, mib: float, least_us: float, *tags: str) -> Case:
    return Case(name, (settings, int(mib * MIB), int(mib * MIB), least_us), frozenset(tags))


_TOGETHER = 3  # runs in a row are disturbed, of nine times as many


def _out_of_phase(*cases: Case) -> list[Case]:
    """Nine cases with other runs disturbed in each: no run and no few runs in a row, whichever, are typical in all of them. A
    flush, too, takes a little longer or shorter each time."""
    return [
        replace(
            found,
            args=(
                {"flush_jitter": 0.08, "together": _TOGETHER, "phase": _TOGETHER * i} | found.args[0],
                *found.args[1:],
            ),
        )
        for i, found in enumerate(cases)
    ]


def _benchmark_cases(rng: Random) -> list[Case]:
    def about(value: float) -> float:
        return value * rng.uniform(0.8, 1.2)

    return _out_of_phase(
        _function("a kernel that fits the L2", {}, about(14), about(14), "in-l2", "short"),
        _function("a matmul", {}, 2, about(300)),
        _function("a softmax larger than the L2", {}, about(250), 0.0),
        _function("a short kernel on 120 MiB", {}, 60, about(5), "short"),
        _function(
            "a kernel that fits the L2, slow launches", {"launch_us": 9.0}, about(16), about(20), "in-l2", "short"
        ),
        _function("a long kernel", {}, 4, about(2500)),
        _function("a kernel of ten µs", {"jitter": 0.02}, 1, rng.uniform(10, 12), "in-l2", "short"),
        _function("a GPU that takes twice as long at first", {"slow": 2.0}, about(20), about(40), "in-l2"),
        _function("a kernel of a millisecond", {}, 8, about(1000), "in-l2"),
    )


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
    """Every failed case is too large by `low` to `high` µs."""
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


def _gap(evidence: Evidence) -> bool:
    """Every failed case is too large by as much as the GPU waits between a mark that it passes at once and the kernel behind it,
    give or take what disturbs a median."""
    from gpukit.simulator.queue_model import SimulatedGpu

    failed = [(p, o.case.args[0]) for p, o in zip(_pairs(evidence), evidence.outcomes, strict=False) if o.wrong]
    waits = [(yours - right, SimulatedGpu(**settings), right) for (yours, right, _), settings in failed]
    return bool(waits) and all(
        abs(more - gpu.launch_us - gpu.latency_us) < 1 + 0.01 * right for more, gpu, right in waits
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


def _few_runs(evidence: Evidence) -> bool:
    """Most cases are right. In the others most of the timed runs were disturbed, or unlucky."""
    return 2 * len(evidence.passed) > len(evidence.outcomes) and _times(1.02, 3.6)(evidence)


def _few_pairs(evidence: Evidence) -> bool:
    return _few_runs(evidence) and all(2 < counts["events"] <= 18 for _, _, counts in _pairs(evidence))


def _flush_taken_off(evidence: Evidence) -> bool:
    """Two flushes for each timed run, one of them between its marks, and results that are off by little to either side."""
    twice = all(counts["flushes"] > 0.75 * counts["events"] > 1 for _, _, counts in _pairs(evidence))
    return bool(evidence.passed) and twice and _times(0.7, 1.3)(evidence)


def _slow_at_first(evidence: Evidence) -> bool:
    """As slow as a GPU at first, disturbed or not."""
    return _all(evidence, lambda yours, right, _: 1.28 < yours / right < 1.52 or 3.8 < yours / right < 4.6)


def _left_out(evidence: Evidence) -> str:
    """What the function never does, in words. Where results are wrong in several ways, no formula predicts them."""
    pairs = zip(_pairs(evidence), evidence.outcomes, strict=False)
    done = [counts for (_, _, counts), outcome in pairs if outcome.wrong]
    if not all(counts["kernels"] for counts in done):
        return ""
    lacks = {
        "it never waits for the GPU": lambda c: not c["synchronizes"],
        "it takes the time from the host's clock, which counts the launch and the wait, too": lambda c: not c["events"],
        "it never empties the L2": lambda c: not c["flushes"],
        "its first timed run finds a GPU that has worked for less than 5 ms": (
            lambda c: c["events"] and c["warm_us"] < 5_000
        ),
        "it measures a run or two, and now and then one is disturbed": lambda c: c["kernels"] <= 3,
    }
    return "; ".join(text for text, lacking in lacks.items() if any(map(lacking, done)))


BENCHMARK = FunctionExercise(
    id="benchmarking.benchmark",
    function="benchmark",
    cases=_benchmark_cases,
    expected=_cold_us,
    setup=f"{_DEVICE}:one_function",
    tolerance=0.03,
    unit="µs",
    misconceptions=(
        Misconception("milliseconds", when=_times(0.0009, 0.0013)),
        Misconception("few-runs/2", when=_few_pairs),
        Misconception("flush-taken-off", when=_flush_taken_off),
        Misconception("no-synchronise", when=_constant),
        Misconception(
            "one-pair", when=lambda e: bool(_pairs(e)) and all(1 <= counts["events"] <= 2 for _, _, counts in _pairs(e))
        ),
        Misconception(
            "compile-counted",
            when=lambda e: _all(e, lambda yours, right, _: 800 < yours - right < 120_000 and yours / right > 1.2),
        ),
        Misconception("not-divided", when=_times(4, 100_000)),
        Misconception("flush-counted", when=lambda e: _off_by(20, 60)(e) and _pairs(e)[0][2]["flushes"] > 0),
        Misconception("host-time", when=lambda e: _off_by(3, 20)(e) and not _pairs(e)[0][2]["events"]),
        Misconception("gap-counted", when=_gap),
        Misconception("short-warm-up", when=_slow_clocks),
        Misconception("warm-l2", when=_warm_l2),
        Misconception("mean", when=lambda e: not e.passed and _times(1.05, 1.38)(e)),
        Misconception("minimum", when=_times(0.94, 0.972)),
        Misconception("left-out", when=lambda e: bool(_left_out(e)), fill=lambda e: {"what": _left_out(e)}),
    ),
    timeout_s=20.0,
)


# ----------------------------------------------------------------------------------------------------------- timeline
def _rest(total: float, busy: float, host: float, launch_us: float) -> float:
    return total - busy


def _timeline(
    kernels_us: list[float], launch_us: float, graph: bool,
    *, beside: str = "", waits: bool = False, in_graph: int | None = 1, first_free: bool = False,
    way_us: float = 0.0, idle: Callable[..., float] = _rest,
) -> tuple[float, float]:  # fmt: skip
    """The right times, or what errs in what the keywords say.

    beside    a kernel does not wait for its launch, or not for the kernel before
    waits     the host launches when the kernel before has ended
    in_graph  launches of a graph; None for one a kernel
    way_us    from the end of a launch until the GPU has it
    idle      (total, time of all kernels, of all launches, of one) -> what is taken for idle
    """
    launched = free = 0.0
    for i, kernel_us in enumerate(kernels_us):
        launch = launch_us * (in_graph * (i == 0) if graph and in_graph is not None else 1)
        launched += launch
        starts = {"launch": free, "kernel": launched}.get(beside, max(launched + way_us, free))
        free = (free + launch if waits else starts) + kernel_us
        free = max(launched, free) if beside == "launch" else free
    total = free - launch_us * first_free
    return total, idle(total, sum(kernels_us), launched, launch_us)


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
        Case("one kernel, a graph", (some(1, 8, 20), 5.0, True)),
        Case("launches that take no time", (mixed, 0.0, False)),
        Case("kernels far shorter than a launch, a graph", ([0.25] * 10, 5.0, True)),
        Case("a long one, just long enough for those behind it", ([22.0, 2.0, 2.0, 9.0], 7.0, False)),
        Case("a GPU of 148 SMs, 500 kernels", (some(500, 1, 12), 5.5, False)),
    ]


def _graph_never_idle(kernels_us: list[float], launch_us: float, graph: bool) -> tuple[float, float]:
    total, idle = _timeline(kernels_us, launch_us, graph)
    return total, 0.0 if graph else idle


TIMELINE = FunctionExercise(
    id="benchmarking.timeline",
    function="timeline",
    cases=_timeline_cases,
    expected=_timeline,
    tolerance=1e-9,
    returns=("total", "idle"),
    unit="µs",
    misconceptions=(
        Misconception("host-waits", gives=partial(_timeline, waits=True)),
        Misconception("host-waits", gives=partial(_timeline, waits=True, in_graph=None)),
        Misconception("host-waits", gives=partial(_timeline, waits=True, in_graph=0)),
        Misconception("host-waits", gives=partial(_timeline, waits=True, idle=lambda *_: 0.0)),
        Misconception("swapped", gives=lambda ks, us, graph: _timeline(ks, us, graph)[::-1]),
        Misconception("graph-launches", gives=partial(_timeline, in_graph=None)),
        Misconception("free-graph", gives=partial(_timeline, in_graph=0)),
        Misconception(
            "larger-of-sums", gives=lambda ks, us, graph: _of_total(ks, max(sum(ks), us * (1 if graph else len(ks))))
        ),
        Misconception(
            "larger-each",
            gives=lambda ks, us, graph: _of_total(
                ks, us + sum(ks) if graph else us + sum(max(k, us) for k in ks[:-1]) + ks[-1]
            ),
        ),
        Misconception(
            "larger-each",
            gives=lambda ks, us, graph: _of_total(ks, us + sum(ks) if graph else sum(max(k, us) for k in ks)),
        ),
        Misconception(
            "larger-each",
            gives=lambda ks, us, graph: _of_total(ks, us + (sum(ks) if graph else sum(max(k, us) for k in ks))),
        ),
        Misconception(
            "larger-each",
            gives=lambda ks, us, graph: _of_total(
                ks, us + (sum(ks) if graph else ks[0] + sum(max(k, us) for k in ks[1:]))
            ),
        ),
        Misconception(
            "limit-changes",
            gives=lambda ks, us, graph: _of_total(ks, max(us + sum(ks), 0.0 if graph else us * len(ks) + ks[-1])),
        ),
        Misconception("way-to-the-gpu", gives=partial(_timeline, way_us=2.0)),
        Misconception("launch-beside-kernel", gives=partial(_timeline, beside="launch")),
        Misconception("kernels-side-by-side", gives=partial(_timeline, beside="kernel")),
        Misconception("host-idle/2", gives=partial(_timeline, idle=lambda total, busy, host, launch: host)),
        Misconception(
            "larger-of-sums/2", gives=partial(_timeline, idle=lambda total, busy, host, launch: max(0.0, host - busy))
        ),
        Misconception("first-launch-free", gives=partial(_timeline, first_free=True)),
        Misconception(
            "gaps-only", gives=partial(_timeline, idle=lambda total, busy, host, launch: total - busy - launch)
        ),
        Misconception("gaps-only", gives=_graph_never_idle),
        Misconception("host-idle", gives=partial(_timeline, idle=lambda total, busy, host, launch: total - host)),
        Misconception("busy-for-idle", gives=partial(_timeline, idle=lambda total, busy, host, launch: busy)),
    ),
    timeout_s=20.0,
)


def _of_total(kernels_us: list[float], total: float) -> tuple[float, float]:
    busy = sum(kernels_us)
    return total, total - busy


# --------------------------------------------------------------------------------------------------------------- rate
def _rate(
    M, N, K, itemsize, ms, peak_tflops, peak_gbps,
    *, operations=lambda M, N, K: 2 * M * N * K, elements=lambda M, N, K: M * K + K * N + M * N, whole_bytes=True,
    scale=1.0, below=operator.le, possible=operator.and_,
) -> tuple[float, float, bool]:  # fmt: skip
    """The right rates and verdict, or what errs in what the keywords say.

    scale     of both rates
    below     what a rate must be to its peak
    possible  (arithmetic is, memory is) -> the verdict
    """
    tflops = operations(M, N, K) * scale / ms / 1e9
    gbps = elements(M, N, K) * (itemsize if whole_bytes else 1) * scale / ms / 1e6
    return tflops, gbps, possible(below(tflops, peak_tflops), below(gbps, peak_gbps))


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
        case("8 bits, odd sizes", odd(500, 900), odd(1000, 1500), odd(300, 500), 1, "memory", 0.9),
        Case("exactly at the peak", (1000, 1000, 1000, 2, 2.0, 1.0, 4800.0)),
        Case("exactly at the peak of memory", (1000, 1000, 1000, 2, 2.0, 989.0, 3.0)),
        case("one millionth above the arithmetic peak", 2048, 2048, 2048, 2, "compute", 1 + 1e-6),
        case("one millionth above the peak of memory", 1, 4096, 4096, 2, "memory", 1 + 1e-6),
        case("one millionth below the arithmetic peak", 2048, 2048, 2048, 2, "compute", 1 - 1e-6),
        Case("close to both peaks", (1000, 1000, 1000, 2, 2.0, 1.25, 4.0)),
        case("faster than the arithmetic and the memory", odd(60, 90), odd(60, 90), odd(60, 90), 2, "compute", 9.0),
        case("one element an hour", 1, 1, 1, 4, "memory", 1e-9),
    ]


def _rate_shares_added(*case) -> tuple[float, float, bool]:
    tflops, gbps, _ = _rate(*case)
    return tflops, gbps, tflops / case[5] + gbps / case[6] <= 1


def _lenient(evidence: Evidence) -> bool:
    """Right but for rates a little above a peak, which are called possible."""
    above = [
        max(tflops / case.args[5], gbps / case.args[6])
        for case in evidence.failed
        for tflops, gbps, _ in [_rate(*case.args)]
    ]
    return evidence.outputs[2] is True and not evidence.expected[2] and all(1 < rate < 1.1 for rate in above)


def _strict_for(one: int) -> Callable[..., tuple[float, float, bool]]:
    """One of the two rates must stay below its peak."""

    def gives(*case) -> tuple[float, float, bool]:
        tflops, gbps, possible = _rate(*case)
        return tflops, gbps, possible and (tflops, gbps)[one] < case[5 + one]

    return gives


RATE = FunctionExercise(
    id="benchmarking.rate",
    function="rate",
    cases=_rate_cases,
    expected=_rate,
    tolerance=1e-9,
    returns=("TFLOP/s", "GB/s", "possible"),
    misconceptions=(
        Misconception("one-flop", gives=partial(_rate, operations=lambda M, N, K: M * N * K)),
        Misconception("first-addition-free", gives=partial(_rate, operations=lambda M, N, K: M * N * (2 * K - 1))),
        Misconception("swapped", gives=lambda *case: (*_rate(*case)[1::-1], _rate(*case)[2])),
        *(Misconception("seconds", gives=partial(_rate, scale=scale)) for scale in (1e-3, 1e3, 1e-6)),
        Misconception("seconds", when=lambda e: _first_ratio(e, 0) in (1000, 0.001)),
        Misconception(
            "scaled-unit",
            when=lambda e: (
                _first_ratio(e, 1) in (round(1e9 / 2**30, 6), 1e9, 1e3, 1e-3) or _first_ratio(e, 0) in (1e12, 1e3, 1e-3)
            ),
        ),
        Misconception("output-free", gives=partial(_rate, elements=lambda M, N, K: M * K + K * N)),
        Misconception("output-free/2", gives=partial(_rate, elements=lambda M, N, K: M * N)),
        Misconception("output-twice", gives=partial(_rate, elements=lambda M, N, K: M * K + K * N + 2 * M * N)),
        Misconception("shares-added", gives=_rate_shares_added),
        Misconception("elements", gives=partial(_rate, whole_bytes=False)),
        Misconception("read-again", gives=partial(_rate, elements=lambda M, N, K: 2 * M * N * K + M * N)),
        Misconception("one-limit", gives=partial(_rate, possible=lambda arithmetic, memory: arithmetic)),
        Misconception("one-limit", gives=partial(_rate, possible=lambda arithmetic, memory: memory)),
        Misconception("one-limit", gives=partial(_rate, possible=operator.or_)),
        Misconception("lenient", when=_lenient),
        Misconception("strict", gives=partial(_rate, below=operator.lt)),
        Misconception("strict", gives=_strict_for(0)),
        Misconception("strict", gives=_strict_for(1)),
        Misconception(
            "inverted", gives=partial(_rate, possible=lambda arithmetic, memory: not (arithmetic and memory))
        ),
        Misconception("inverted", gives=partial(_rate, below=operator.gt)),
    ),
    timeout_s=20.0,
)


def _first_ratio(evidence: Evidence, index: int) -> float | None:
    """yours / right of one of the values in the first case that failed, to six digits."""
    yours, right = evidence.outputs[index], evidence.expected[index]
    return float(f"{yours / right:.6g}")


# ------------------------------------------------------------------------------------------------------------ profile
Event = tuple[str, int, float, float]


def _profile_row(
    events: list[Event], name: str,
    *, inside: str = "children", totals: str = "outermost", launched: str = "all", outer_only: bool = False, mean: bool = False,
) -> tuple[int, float, float, float, float]:  # fmt: skip
    """The right row, or what errs in what the keywords say.

    inside    what self CPU leaves out: "children", "nothing", "all" that is below, however deep, the same "once" for each
              call, or "kernels" as well
    totals    which calls they add up: the "outermost", "every" one, or those whose "parent" has another name
    launched  whose kernels CUDA total has: of "all" that is below, of the calls and their "children", those "near", which have
              the name or are called by it, of all calls' "own", of the "counted" ones' own
    """
    above = [_above(events, i) for i in range(len(events))]
    mine = [
        i
        for i, event in enumerate(events)
        if event[0] == name and not (outer_only and name in _names(events, above[i]))
    ]
    below = {i: [j for j, found in enumerate(above) if i in found] for i in mine}
    children = {i: [j for j in below[i] if events[j][1] == i] for i in mine}
    once = dict.fromkeys(mine, ()) | {i: set().union(*below.values()) for i in mine[:1]}
    left_out = {
        "children": children,
        "kernels": children,
        "all": below,
        "nothing": dict.fromkeys(mine, ()),
        "once": once,
    }[inside]
    self_cpu = sum(events[i][2] - sum(events[j][2] for j in left_out[i]) for i in mine)
    self_cuda = sum(events[i][3] for i in mine)
    self_cpu -= self_cuda if inside == "kernels" else 0.0
    kept = {
        "outermost": lambda i: name not in _names(events, above[i]),
        "parent": lambda i: name not in _names(events, above[i][:1]),
        "every": lambda i: True,
    }[totals]
    counted = [i for i in mine if kept(i)]
    kernels = children if launched == "children" else below
    cpu_total = sum(events[i][2] for i in counted)
    cuda_total = sum(events[i][3] + sum(events[j][3] for j in kernels[i]) for i in counted)
    if launched in ("own", "counted"):
        cuda_total = sum(events[i][3] for i in (mine if launched == "own" else counted))
    elif launched == "near":
        cuda_total = sum(event[3] for event in events if event[0] == name or name in _names(events, _parent(event)))
    each = len(mine) if mean and mine else 1
    return len(mine), *(us / each for us in (self_cpu, float(cpu_total), float(self_cuda), float(cuda_total)))


def _parent(event: Event) -> list[int]:
    return [event[1]] if event[1] >= 0 else []


def _one_total(column: int, totals: str) -> Callable[..., tuple[int, float, float, float, float]]:
    """Only one of the two totals adds up the wrong calls."""

    def gives(*case) -> tuple[int, float, float, float, float]:
        row = [*_profile_row(*case)]
        row[column] = _profile_row(*case, totals=totals)[column]
        return tuple(row)

    return gives


def _kernels_inclusive(events: list[Event], name: str, *, launched: str) -> tuple[int, float, float, float, float]:
    """cuda_us treated like cpu_us: children's are taken away for self, and the call's own are taken for the total."""
    row = [*_profile_row(events, name, launched=launched)]
    row[3] -= sum(event[3] for event in events if name in _names(events, _parent(event)))
    return tuple(row)


def _above(events: list[Event], i: int) -> list[int]:
    """The calls around call i, the nearest first."""
    found = []
    while (i := events[i][1]) >= 0:
        found.append(i)
    return found


def _names(events: list[Event], calls: list[int]) -> set[str]:
    return {events[i][0] for i in calls}


def _profile_cases(rng: Random) -> list[Case]:
    def us(low: int, high: int) -> float:
        return rng.randrange(8 * low, 8 * high) / 8  # sums of eighths are exact

    def tree(*calls: tuple[str, int, float]) -> list[Event]:
        """Events from (name, parent, cuda us): the host spends some time in each, and the time of what is inside."""
        spent = [us(1, 9) for _ in calls]
        for i in reversed(range(len(calls))):
            if calls[i][1] >= 0:
                spent[calls[i][1]] += spent[i]
        return [(name, parent, cpu, cuda) for (name, parent, cuda), cpu in zip(calls, spent, strict=True)]

    def layer(at: int, parent: int = -1) -> list[tuple[str, int, float]]:
        return [
            ("layer", parent, 0.0), ("aten::linear", at, 0.0), ("aten::t", at + 1, 0.0), ("aten::transpose", at + 2, 0.0),
            ("aten::addmm", at + 1, us(5, 40)), ("cudaLaunchKernel", at + 4, 0.0),
        ]  # fmt: skip

    nested = tree(("aten::div", -1, us(1, 3)), ("aten::div", 0, us(4, 9)), ("cudaLaunchKernel", 1, us(10, 20)))
    apart = tree(
        ("step", -1, 0.0), ("forward", 0, us(1, 3)), ("step", 1, us(4, 9)), ("aten::mm", 2, us(10, 20)), ("step", -1, us(2, 4)),
    )  # fmt: skip
    four = tree(*(call for i in range(4) for call in layer(6 * i)))
    mixed = tree(
        ("aten::mean", -1, us(1, 4)), ("aten::sum", 0, us(5, 9)), ("aten::div", 0, us(1, 4)), ("aten::fill_", 2, us(2, 6)),
        ("aten::sum", -1, us(3, 8)),
    )  # fmt: skip
    alike = tree(
        ("aten::add_", -1, us(1, 4)), ("aten::addmm", 0, us(5, 9)), ("aten::add", -1, us(2, 6)), ("add", 2, us(1, 3))
    )
    names = ("aten::linear", "aten::addmm", "aten::gelu", "aten::sum", "cudaLaunchKernel")
    many = [(rng.choice(names), rng.randrange(max(-1, i - 12), i), us(0, 9) * rng.randrange(2)) for i in range(200)]
    return [
        Case("one call with nothing inside", (tree(("aten::gelu", -1, us(3, 9))), "aten::gelu")),
        Case("a layer: aten::addmm, with the launch inside", (tree(*layer(0)), "aten::addmm")),
        Case("a layer: aten::linear, whose kernel another call launches", (tree(*layer(0)), "aten::linear")),
        Case("a layer: all of it", (tree(*layer(0)), "layer")),
        Case("four layers: aten::linear", (four, "aten::linear")),
        Case("four layers: aten::addmm", (four, "aten::addmm")),
        Case("a call that launches kernels itself and has others inside", (mixed, "aten::mean")),
        Case("one call at the top, one inside another", (mixed, "aten::sum"), frozenset({"several"})),
        Case("a call in a call of its own name", (nested, "aten::div"), frozenset({"nested"})),
        Case("a call in a call of its own name, another between", (apart, "step"), frozenset({"nested"})),
        Case("a name that begins others, and ends in another", (alike, "aten::add")),
        Case("a name that never occurs", (four, "aten::softmax"), frozenset({"none"})),
        Case("200 calls", (tree(*many), "aten::addmm"), frozenset({"nested"})),
    ]


PROFILE = FunctionExercise(
    id="benchmarking.profile",
    function="profile_row",
    cases=_profile_cases,
    expected=_profile_row,
    tolerance=1e-9,
    returns=("calls", "self CPU", "CPU total", "self CUDA", "CUDA total"),
    misconceptions=(
        Misconception("total-for-self", gives=partial(_profile_row, inside="nothing")),
        Misconception(
            "total-for-self/2", gives=partial(_profile_row, inside="nothing", totals="every", launched="own")
        ),
        Misconception("all-levels", gives=partial(_profile_row, inside="all")),
        Misconception("all-levels", gives=partial(_profile_row, inside="once")),
        Misconception("kernels-on-host", gives=partial(_profile_row, inside="kernels")),
        Misconception("own-kernels", gives=partial(_profile_row, launched="own")),
        Misconception("own-kernels", gives=partial(_profile_row, launched="counted")),
        *(
            Misconception("kernels-inclusive", gives=partial(_kernels_inclusive, launched=launched))
            for launched in ("own", "counted", "all")
        ),
        Misconception("children-kernels", gives=partial(_profile_row, launched="children")),
        Misconception("children-kernels", gives=partial(_profile_row, launched="near")),
        Misconception("nested-twice", gives=partial(_profile_row, totals="every")),
        Misconception("nested-parent", gives=partial(_profile_row, totals="parent")),
        *(Misconception("nested-twice", gives=_one_total(column, "every")) for column in (2, 4)),
        *(Misconception("nested-parent", gives=_one_total(column, "parent")) for column in (2, 4)),
        Misconception("outer-only", gives=partial(_profile_row, outer_only=True)),
        Misconception("mean", gives=partial(_profile_row, mean=True)),
        Misconception("swapped", gives=lambda *case: _swapped(*_profile_row(*case))),
    ),
    timeout_s=20.0,
)


def _swapped(calls: int, self_cpu: float, cpu_total: float, self_cuda: float, cuda_total: float) -> tuple[float, ...]:
    """CPU behind CUDA."""
    return calls, self_cuda, cuda_total, self_cpu, cpu_total


# ---------------------------------------------------------------------------------------------------------- detective
_STEADY = {"slow": 1.0, "disturbed_every": 0, "jitter": 0.02, "dram_gbps": 400.0, "l2_gbps": 1_000.0}


def _speedup(settings: dict, x_bytes: int, y_bytes: int, old_us: float, new_us: float, how: str) -> float:
    return _cold_us(settings, x_bytes, y_bytes, old_us) / _cold_us(settings, x_bytes, y_bytes, new_us)


def _speedup_cases(rng: Random) -> list[Case]:
    def case(name: str, mib: int, old: float, new: float, how: str) -> Case:
        tags = frozenset({*how.split()} - {"plain"} | ({"in-l2"} if 2 * mib < 50 else set()))
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
        case("two programs that keep their results", 60, 220, 110, "both cached"),
    ]


DETECTIVE = FunctionExercise(
    id="benchmarking.detective",
    function="speedup",
    cases=_speedup_cases,
    expected=_speedup,
    setup=f"{_DEVICE}:two_programs",
    tolerance=0.05,
    misconceptions=(
        Misconception("cached", when=lambda e: e.tag("cached") and _rises(e)),
        Misconception("old-cached", when=only("both")),
        Misconception("input-timed", gives=lambda s, x, y, old, new, how: _fill_timed(s, x, y, old, new)),
        Misconception("warm-input", gives=lambda s, x, y, old, new, how: _warm_ratio(s, x, y, old, new)),
        Misconception("inverted", gives=lambda *case: 1 / _speedup(*case)),
    ),
    timeout_s=20.0,
)


def _rises(evidence: Evidence) -> bool:
    wrong = [outcome for outcome in evidence.outcomes if outcome.wrong and "both" not in outcome.case.tags]
    return bool(wrong) and all(outcome.reply.output > 10 * _speedup(*outcome.case.args) for outcome in wrong)


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
_SMALL = {"dram_gbps": 100.0, "l2_gbps": 500.0, "zeros": 0.75, "slow_until_us": 30_000.0, "jitter": 0.08}


def _honest_cases(rng: Random) -> list[Case]:
    def case(name: str, mib: float, least_us: float, how: str, *tags: str) -> Case:
        nbytes = int(mib * rng.uniform(0.9, 1.1) * MIB)
        return Case(name, (_SMALL, nbytes, 8 * MIB, least_us * rng.uniform(0.9, 1.1), how), frozenset(tags))

    return _out_of_phase(
        case("a plain program, data larger than the L2", 80, 100, "plain"),
        case("a plain program, data that fits the L2", 36, 300, "plain", "in-l2"),
        case("a plain program, data that fits the L2 twice", 18, 350, "plain", "in-l2"),
        case("a program that keeps its results", 64, 400, "cached", "cached"),
        case("a program that keeps its results, small data", 30, 200, "cached", "cached", "in-l2"),
        case("a program on a stream of its own", 70, 300, "side", "side"),
        case("a program on a stream of its own, small data", 36, 400, "side", "side", "in-l2"),
        case("a plain program, mostly arithmetic", 2, 1500, "plain"),
        case("a plain program, half arithmetic", 24, 600, "plain", "in-l2"),
    )


def _honest_us(settings: dict, x_bytes: int, y_bytes: int, least_us: float, how: str) -> float:
    return _cold_us(settings, x_bytes, y_bytes, least_us)


def _fill_counted(evidence: Evidence) -> bool:
    """The time to fill x and that of a program that then finds x in the L2, in all cases on the default stream."""
    from gpukit.simulator.queue_model import Buffer, SimulatedGpu

    for outcome, (yours, _, _) in zip(evidence.outcomes, _pairs(evidence), strict=False):
        settings, x_bytes, y_bytes, least_us, how = outcome.case.args
        fill_us = SimulatedGpu(**settings).cold_us(Buffer(x_bytes))
        both_us = fill_us + _warm_us(settings, x_bytes, y_bytes, least_us)
        if how != "side" and abs(yours / both_us - 1) > 0.06:
            return False
    return bool(_pairs(evidence))


HONEST = FunctionExercise(
    id="benchmarking.honest",
    function="honest",
    cases=_honest_cases,
    expected=_honest_us,
    setup=f"{_DEVICE}:one_program",
    tolerance=0.06,
    unit="µs",
    misconceptions=(
        Misconception("side-stream", when=lambda e: all("side" in o.case.tags for o in e.outcomes if o.wrong)),
        Misconception(
            "cached",
            when=lambda e: (
                all("cached" in o.case.tags for o in e.outcomes if o.wrong) and _all(e, lambda y, r, _: y < 0.7 * r)
            ),
        ),
        Misconception(
            "warm-input",
            when=lambda e: (
                all("in-l2" in o.case.tags for o in e.outcomes if o.wrong) and _all(e, lambda y, r, _: y < r)
            ),
        ),
        Misconception("zeros", when=_times(0.70, 0.80)),
        Misconception("few-runs", when=_few_runs),
        Misconception("no-wait", when=_constant),
        Misconception(
            "compile-counted",
            when=lambda e: _all(e, lambda yours, right, _: 800 < yours - right < 120_000 and yours / right > 1.2),
        ),
        Misconception("minimum", when=_times(0.9, 0.96)),
        Misconception("few-runs", when=lambda e: bool(e.passed) and _times(1.05, 1.6)(e)),
        Misconception("mean", when=_times(1.05, 1.32)),
        Misconception("short-warm-up", when=_slow_at_first),
        Misconception("flush-counted", when=lambda e: _all(e, lambda yours, right, _: yours - right > 200)),
        Misconception("flush-counted", when=_fill_counted),
    ),
    timeout_s=20.0,
)

EXERCISES = [BENCHMARK, TIMELINE, RATE, PROFILE, DETECTIVE, HONEST]
