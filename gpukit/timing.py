"""How long a call takes, measured so that the number can be believed. The only caller of triton.testing.do_bench.

On a GPU every run starts with a cold L2 cache, because a kernel inside a model finds somebody else's data there. Under
about 20 µs launching is a large share of the time: `graph=True` takes the CPU out of it, `wall=True` asks for it: the
time from call to call that a training loop sees. Triton's interpreter is never timed: its time says nothing about a GPU.
"""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpukit import hardware
from gpukit.op import Cost

LAUNCH_BOUND_MS = 0.020
_HOST_MATTERS_MS = 0.3  # hardly a call takes the CPU as long, and looking costs 20 more of them
_GRAPH_CALLS = 50
_BUNCH_MS = 2  # of calls between two looks at the clock: the wait for the GPU at the end is a small share of it
_INTERPRETERS = ("triton.runtime.interpreter", "gpukit.simulator.interpreter.executor")
_PEAK_NAME = {
    torch.float64: "fp64", torch.float32: "tf32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.int8: "int8",
}  # fmt: skip


class NotTimed(RuntimeError):
    """There is no time worth reporting; the message says why."""


class ImpossibleTime(RuntimeError):
    """The time would need more than the GPU has, so it was not the time of this work."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds for one call: the median, and the times that 20 and 80 percent of the runs stayed below.

    how     "events" (CUDA events around each call, cold L2), "graph" (replays of a CUDA graph, cold L2), "wall" (the
            host's clock over calls back to back, warm caches) or "cpu" (the host's clock around each call, warm caches)
    sm_mhz  the clock of the GPU's SMs right after the runs, 0 where nobody says it. It falls under load, and with it
            everything that is limited by arithmetic
    host_ms how long the CPU takes for a call; 0 where it was not measured, since it hardly matters
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    how: str
    device: str
    sm_mhz: int = 0
    host_ms: float = 0.0

    @property
    def launch_bound(self) -> bool:
        """Whether launching took a large share of the time, or the GPU waited for it: fast kernels look alike then."""
        return self.how == "events" and self.median_ms < max(LAUNCH_BOUND_MS, self.host_ms)

    def __str__(self) -> str:
        note = ", launch-bound" if self.launch_bound else ""
        return f"{self.median_ms:.4g} ms ({self.p20_ms:.4g} to {self.p80_ms:.4g}) on {self.device}{note}"


def time_ms(
    fn: Callable,
    *inputs: Any,
    graph: bool = False,
    wall: bool = False,
    warmup_ms: float = 25,
    rep_ms: float = 100,
    grad_to_none: Iterable[Tensor] | None = None,
    cost: Cost | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    prepare: Callable[[tuple], Callable[[], object]] | None = None,
) -> Timing:
    """Time fn(*inputs), on a GPU if there is one and no input tensor is on the CPU, else on the CPU.

    graph         time replays of a CUDA graph of at least 50 calls. Inputs are copied and results kept until they make
                  three times the L2, and the calls take turns on them, so that each still reads and writes memory. The
                  percentiles are then over replays, each the mean of its calls.
    wall          time calls back to back by the host's clock, waiting for the GPU after each 2 ms of them: the longer of
                  what the host needs to issue a call and the GPU to do it. Inputs that fit the L2 stay there
    grad_to_none  tensors whose .grad is cleared before each run
    cost, dtype   the least that fn must do, and in which dtype: checked against the GPU's peaks
    device        "cpu" or "cuda", for a function without inputs
    prepare       in a graph: prepare(inputs) is the call to time instead of fn(*inputs), where it needs something before
                  it that shall not be timed, such as the forward pass of a gradient
    Raises NotTimed if fn runs a kernel in Triton's interpreter, ImpossibleTime above the GPU's peak, ValueError for a
    graph without a GPU or without input tensors, an unknown device, a length of time that is none. On the CPU caches
    stay warm.
    """
    check_ms(warmup_ms=warmup_ms, rep_ms=rep_ms)
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: 'cuda' needs a GPU, and there is none here")
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if graph and wall:
        raise ValueError("graph, wall: one of the two; a graph takes out the host's time that wall asks for")
    refuse_interpreter(fn, *inputs)
    on_gpu = torch.cuda.is_available() and device != "cpu" and all(x.is_cuda for x in tensors)
    if graph and not on_gpu:
        raise ValueError("graph: CUDA graphs need a GPU and inputs on it, got none")
    if graph and not tensors:
        raise ValueError("graph: pass the tensors that fn reads as inputs, so that copies of them can keep the L2 cold")
    if wall:
        how, percentiles = "wall", _time_wall(fn, inputs, warmup_ms, rep_ms, grad_to_none, on_gpu)
    elif graph:
        how, percentiles = "graph", _time_graph(fn, inputs, prepare, warmup_ms, rep_ms)
    elif on_gpu:
        how, percentiles = "events", _time_events(fn, inputs, warmup_ms, rep_ms, grad_to_none)
    else:
        how, percentiles = "cpu", _time_cpu(fn, inputs, warmup_ms, rep_ms, grad_to_none)
    if not percentiles[0] > 0:
        raise NotTimed("fn took less time than the clock can tell apart: give it more to do")
    if not on_gpu:
        return Timing(*percentiles, how, "cpu")
    clock = sm_mhz()
    host = _host_ms(fn, inputs) if how == "events" and percentiles[0] < _HOST_MATTERS_MS else 0.0
    timing = Timing(*percentiles, how, torch.cuda.get_device_name(), clock, host)
    if cost is not None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        if wall and cost.bytes < 3 * properties.L2_cache_size:  # warm: the bytes need not come out of memory
            cost = Cost(0, 0, cost.flops)
        check_possible(timing.median_ms, cost, dtype, timing.device)
    return timing


def copied(inputs: Iterable) -> tuple:
    """The inputs, with tensors of their own."""
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in inputs)


def check_ms(**given_ms: float) -> None:
    """Raise ValueError, which names the argument, for what is no length of time: 0, less, infinity, no number."""
    for name, ms in given_ms.items():
        if isinstance(ms, bool) or not isinstance(ms, int | float) or not 0 < ms < math.inf:
            raise ValueError(f"{name} must be a positive number of milliseconds, got {ms!r}")


def check_possible(median_ms: float, cost: Cost, dtype: torch.dtype | None, device: str) -> None:
    """Raise ImpossibleTime if `cost` in `median_ms` exceeds the bandwidth or the arithmetic peak of `device`.

    fp32 is checked against the tf32 peak, since a matmul may be allowed to use it. A GPU that gpukit.hardware does not
    know is not checked.
    """
    check_ms(median_ms=median_ms)
    try:
        gpu = hardware.gpu(device)
    except ValueError:
        return
    gbps = cost.bytes / median_ms / 1e6
    if gbps > gpu.hbm_gbps:
        raise ImpossibleTime(
            f"{cost.bytes:,} bytes in {median_ms:.4g} ms are {gbps:,.0f} GB/s, and {gpu.name} has {gpu.hbm_gbps:,.0f}: "
            "the data came out of a cache, or the work was not done"
        )
    peak = gpu.peak_flops.get(_PEAK_NAME.get(dtype, ""), math.inf)
    flops = cost.flops / median_ms * 1e3
    if flops > peak:
        raise ImpossibleTime(
            f"{cost.flops:,} FLOPs in {median_ms:.4g} ms are {flops / 1e12:,.0f} TFLOP/s, and {gpu.name} has "
            f"{peak / 1e12:,.0f} in {_PEAK_NAME[dtype]}: the work was not done"
        )


def _time_events(fn, inputs, warmup_ms, rep_ms, grad_to_none) -> list[float]:
    from triton.testing import do_bench

    return do_bench(
        lambda: fn(*inputs), warmup=warmup_ms, rep=rep_ms, grad_to_none=grad_to_none, quantiles=[0.5, 0.2, 0.8]
    )


def _host_ms(fn, inputs) -> float:
    """The CPU's time for a call, few enough of them in a row that it never waits for the GPU."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            fn(*inputs)
        times.append((time.perf_counter() - start) / 4 * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def _time_graph(fn, inputs, prepare, warmup_ms, rep_ms) -> tuple[float, float, float]:
    prepare = prepare or (lambda given: partial(fn, *given))
    stream = torch.cuda.Stream()  # a gradient runs where its forward pass ran, and a capture sees one stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = prepare(copied(inputs))()  # compiles, which a capture cannot
        made = result if isinstance(result, tuple | list) else (result,)
        call_bytes = sum(x.nbytes for x in [*inputs, *made] if isinstance(x, Tensor))
        del result, made
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        copies = max(2, math.ceil(3 * l2_bytes / max(call_bytes, 1)))
        calls = copies * math.ceil(_GRAPH_CALLS / copies)
        rotation = [prepare(copied(inputs)) for _ in range(copies)]
        for call in rotation:
            call()  # what is made once for these inputs and kept is no part of a call
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    results = deque(maxlen=copies)  # so a result's memory is free again only after `copies` others were written
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            results.append(rotation[i % copies]())

    def replay_ms() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    first = replay_ms()
    for _ in range(int(warmup_ms / first)):
        replay_ms()
    return _percentiles([replay_ms() / calls for _ in range(max(5, int(rep_ms / first)))])


def _time_cpu(fn, inputs, warmup_ms, rep_ms, grad_to_none) -> tuple[float, float, float]:
    def run_ms() -> float:
        for x in grad_to_none or ():
            x.grad = None
        start = time.perf_counter()
        fn(*inputs)
        return (time.perf_counter() - start) * 1e3

    first = run_ms()
    for _ in range(min(1000, int(warmup_ms / max(first, 1e-3)))):
        run_ms()
    runs, until = [], time.perf_counter() + rep_ms / 1e3
    while len(runs) < 5 or time.perf_counter() < until:
        runs.append(run_ms())
    return _percentiles(runs)


def _time_wall(fn, inputs, warmup_ms, rep_ms, grad_to_none, on_gpu) -> tuple[float, float, float]:
    wait = torch.cuda.synchronize if on_gpu else lambda: None

    def bunch_ms(calls: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            for x in grad_to_none or ():
                x.grad = None
            fn(*inputs)
        wait()
        return (time.perf_counter() - start) * 1e3 / calls

    bunch_ms(1)  # compiles
    calls = max(1, round(_BUNCH_MS / bunch_ms(3)))
    until = time.perf_counter() + warmup_ms / 1e3
    while time.perf_counter() < until:
        bunch_ms(calls)
    runs, until = [], time.perf_counter() + rep_ms / 1e3
    while len(runs) < 5 or time.perf_counter() < until:
        runs.append(bunch_ms(calls))
    return _percentiles(runs)


class ThisDevice:
    """What gpukit.simulator.queue_model.Device offers, on this machine: a benchmark written for the one runs on the other.

    Without a GPU the host does the work itself: it is done when a call returns, and its caches are what is flushed.
    """

    def __init__(self) -> None:
        self._gpu = torch.cuda.is_available()
        self._evicted = torch.empty(1 << (28 if self._gpu else 26), dtype=torch.int8, device=self.name)

    @property
    def name(self) -> str:
        return "cuda" if self._gpu else "cpu"

    def clock(self) -> float:
        return time.perf_counter() * 1e6

    def synchronize(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def event(self) -> _Event:
        return _Event(self._gpu)

    def flush_l2(self) -> None:
        self._evicted.zero_()

    def random(self, nbytes: int) -> Tensor:
        return torch.randn(nbytes // 4, device=self.name)

    def zeros(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes // 4, device=self.name)


class _Event:
    def __init__(self, on_gpu: bool):
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def elapsed_us(self, end: _Event) -> float:
        return (end._at - self._at) * 1e6 if self._event is None else self._event.elapsed_time(end._event) * 1e3


def sm_mhz() -> int:
    """The clock of the current GPU's SMs in MHz, from the driver's own library; 0 where it does not say."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    except (OSError, AssertionError, RuntimeError, AttributeError):
        return 0
    handle, mhz = ctypes.c_void_p(), ctypes.c_uint(0)
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return 0
    nvml.nvmlDeviceGetClockInfo(handle, 1, ctypes.byref(mhz))  # 1: NVML_CLOCK_SM
    return mhz.value


def _percentiles(runs: list[float]) -> tuple[float, float, float]:
    fifths = statistics.quantiles(runs, n=5, method="inclusive")
    return statistics.median(runs), fifths[0], fifths[3]


class _InterpreterSeen(BaseException):  # not an Exception: nothing between here and the kernel may swallow it
    pass


def refuse_interpreter(fn: Callable, *inputs) -> None:
    """Where kernels are interpreted, call fn once, and raise NotTimed at the first line that the interpreter runs."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return

    def watch(frame, event, _):
        if event == "call" and frame.f_globals.get("__name__") in _INTERPRETERS:
            raise _InterpreterSeen

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        fn(*inputs)
    except _InterpreterSeen:
        raise NotTimed(
            "fn ran a kernel in Triton's interpreter, whose time says nothing about a GPU: count its traffic with "
            "gpukit.trace() instead, or read the recorded times with gpukit.benchmark.rows()"
        ) from None
    finally:
        sys.setprofile(before)
