"""A GPU as a benchmark sees it: a queue that works while the host goes on, a cache, a cold start. No clock is read.

    gpu = SimulatedGpu()
    device = Device(gpu)
    x, y = Buffer(8 << 20), Buffer(8 << 20)
    start = device.event()
    gpu.launch("gelu", x, y)
    end = device.event()  # all three only joined the queue
    device.synchronize()
    start.elapsed_us(end)

Time passes only by what happens: the host's clock by its own calls, each stream's by its kernels. So the same program
takes the same time everywhere, and a lesson can show what a real GPU hides: `gpu.lanes` are the spans to draw. What is
modelled: launches that return at once, compilation at a kernel's first call, slow clocks after idling, an L2 that keeps
what was used last, streams that run side by side, and runs that somebody else disturbs. What is not: anything inside a
kernel. Its figures are round numbers of the size that an H200 has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

MIB = 1 << 20
_GOLDEN = 0.6180339887498949  # multiples of it fill [0, 1) evenly from the first few on: short runs are fair samples


@dataclass(frozen=True)
class Span:
    """From start to end in µs, on "host" or a stream; kind "launch", "compile", "wait", "kernel", "flush" or "fill"."""

    lane: str
    name: str
    kind: str
    start_us: float
    end_us: float


@dataclass(eq=False)
class Buffer:
    """Device memory. Two buffers are never equal, whatever they hold."""

    nbytes: int
    zeros: bool = False


# What a device and an event know is kept here and not in their attributes: a benchmark holds both, and could read the answer.
_gpu_of: WeakKeyDictionary[Device, SimulatedGpu] = WeakKeyDictionary()
_happens: WeakKeyDictionary[Event, tuple[SimulatedGpu, float]] = WeakKeyDictionary()


class Event:
    """A mark in a queue: it happens when all that was queued before it is done."""

    def __init__(self, gpu: SimulatedGpu, happens_us: float):
        _happens[self] = gpu, happens_us

    def elapsed_us(self, end: Event) -> float:
        """From this event to `end`. Raises RuntimeError if one of them has not happened yet."""
        (gpu, start_us), (_, end_us) = _happens[self], _happens[end]
        if max(start_us, end_us) > gpu._now_us:
            raise RuntimeError("this event has not happened yet: the GPU is still working on what came before it")
        return end_us - start_us


@dataclass
class Counts:
    """What a program did, for a diagnosis."""

    events: int = 0
    clocks: int = 0
    synchronizes: int = 0
    flushes: int = 0
    kernels: int = 0
    warm_us: float = 0.0  # how long the GPU had worked when the first event was marked


@dataclass
class SimulatedGpu:
    """One simulated GPU and its host. Bandwidths in GB/s, times in µs."""

    launch_us: float = 5.0  # of the host, for each kernel
    latency_us: float = 2.0  # from the host's launch to the earliest start
    mark_us: float = 1.0  # of the host, for an event
    mark_gpu_us: float = 0.2  # of the stream that it is queued on
    wait_us: float = 4.0  # from the last kernel's end until synchronize returns
    compile_us: float = 90_000.0  # of the host, at a kernel's first launch
    slow: float = 1.4  # times as long, while the GPU has worked for less than
    slow_until_us: float = 5_000.0
    dram_gbps: float = 4_000.0
    l2_gbps: float = 10_000.0
    l2_bytes: int = 50 * MIB
    jitter: float = 0.04  # of a kernel's time, to both sides
    disturbed_every: int = 9  # of so many runs of a kernel one takes
    disturbed: float = 3.0  # times as long; 0 runs: never
    together: int = 1  # so many of them in a row, and then none for as many times longer
    phase: int = 0  # which run of the pattern of jitter and disturbances a kernel begins with
    flush_jitter: float = 0.0  # as jitter, of the time of a flush and of a fill
    zeros: float = 1.0  # a kernel's time on a buffer of zeros, which flips fewer bits and lets the clock rise
    counts: Counts = field(default_factory=Counts)
    lanes: list[Span] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)  # when each event happens

    def __post_init__(self) -> None:
        self._now_us = 0.0
        self._free_us: dict[str, float] = {}
        self._busy_us = 0.0
        self._in_l2: dict[int, tuple[Buffer, int]] = {}  # by use, the latest last
        self._runs: dict[str, int] = {}
        self._unmarked: dict[str, int] = {}  # runs before the first mark
        self._fillings = 0

    def launch(self, name: str, *buffers: Buffer, stream: str = "stream 0", least_us: float = 0.0) -> None:
        """Queue a kernel. It takes what memory takes for the bytes, from the L2 as far as they are in it."""
        self.counts.kernels += 1
        if name not in self._runs and self.compile_us:
            self._host(f"compile {name}", "compile", self.compile_us)
        run = self._runs[name] = self._runs.get(name, 0) + 1
        took = least_us + sum(self._touch(buffer) for buffer in buffers)
        took *= self.zeros if any(buffer.zeros for buffer in buffers) else 1.0
        place = run + self.phase
        took *= _unsteady(self.jitter, place)
        # Those in a row begin at the first mark anew: how many runs came before it does not decide which of them are disturbed.
        place -= self._unmarked.get(name, 0) if self.together > 1 else 0
        if self.disturbed_every and (place - 4) % (self.disturbed_every * self.together) < self.together:
            took *= self.disturbed
        self._enqueue(name, "kernel", took, stream)

    def replay(self, kernels: Sequence[tuple[str, float]]) -> None:
        """Queue a CUDA graph: (name, us) one after the other, for a single launch."""
        self._host("graph", "launch", self.launch_us)
        for name, took_us in kernels:
            self.counts.kernels += 1
            self._queue(name, "kernel", took_us, "stream 0")

    def flush(self) -> None:
        self.counts.flushes += 1
        self._enqueue("flush", "flush", self._filling_us(2 * self.l2_bytes), "stream 0")
        self._in_l2.clear()

    def fill(self, buffer: Buffer) -> Buffer:
        """Queue the kernel that writes a new buffer, which leaves it in the L2."""
        self._enqueue("fill", "fill", self._filling_us(buffer.nbytes), "stream 0")
        self._keep(buffer, buffer.nbytes)
        return buffer

    def wait(self) -> None:
        self.counts.synchronizes += 1
        start = self._now_us
        self._now_us = max([self._now_us, *self._free_us.values()]) + self.wait_us
        self._span("host", "synchronize", "wait", start, self._now_us)

    def mark(self) -> Event:
        if not self.counts.events:
            self.counts.warm_us, self._unmarked = self._busy_us, dict(self._runs)
        self.counts.events += 1
        self._now_us += self.mark_us
        happens = max(self._now_us, self._free_us.get("stream 0", 0.0)) + self.mark_gpu_us
        self._free_us["stream 0"] = happens
        self.marks.append(happens)
        return Event(self, happens)

    def now_us(self) -> float:
        self.counts.clocks += 1
        return self._now_us

    def cold_us(self, *buffers: Buffer, least_us: float = 0.0) -> float:
        """What a kernel on `buffers` takes out of device memory, at full clocks, undisturbed."""
        return least_us + sum(buffer.nbytes for buffer in buffers) / self.dram_gbps / 1e3

    # -- inside

    def _filling_us(self, nbytes: int) -> float:
        self._fillings += 1
        return nbytes / self.dram_gbps / 1e3 * _unsteady(self.flush_jitter, self._fillings + self.phase)

    def _touch(self, buffer: Buffer) -> float:
        """The time for the buffer's bytes, and the buffer in the L2 after it."""
        _, kept = self._in_l2.pop(id(buffer), (buffer, 0))
        self._keep(buffer, buffer.nbytes)
        return kept / self.l2_gbps / 1e3 + (buffer.nbytes - kept) / self.dram_gbps / 1e3

    def _keep(self, buffer: Buffer, nbytes: int) -> None:
        if nbytes > self.l2_bytes:  # it has pushed out its own beginning before anybody comes back to it
            self._in_l2.clear()
            return
        self._in_l2[id(buffer)] = buffer, nbytes
        while sum(kept for _, kept in self._in_l2.values()) > self.l2_bytes:
            del self._in_l2[next(iter(self._in_l2))]

    def _host(self, name: str, kind: str, took_us: float) -> None:
        self._span("host", name, kind, self._now_us, self._now_us + took_us)
        self._now_us += took_us

    def _enqueue(self, name: str, kind: str, took_us: float, stream: str) -> None:
        self._host(name, "launch", self.launch_us)
        self._queue(name, kind, took_us, stream)

    def _queue(self, name: str, kind: str, took_us: float, stream: str) -> None:
        if self._busy_us < self.slow_until_us:
            took_us *= self.slow
        start = max(self._now_us + self.latency_us, self._free_us.get(stream, 0.0))
        self._free_us[stream] = start + took_us
        self._busy_us += took_us
        self._span(stream, name, kind, start, start + took_us)

    def _span(self, lane: str, name: str, kind: str, start_us: float, end_us: float) -> None:
        self.lanes.append(Span(lane, name, kind, start_us, end_us))


def _unsteady(jitter: float, place: int) -> float:
    """By what the time of a run is off, which is run number `place`."""
    return 1.0 + jitter * (2.0 * (place * _GOLDEN % 1.0) - 1.0)


class Device:
    """What a benchmark may call, and no more: there is nothing here to read the answer from."""

    def __init__(self, gpu: SimulatedGpu):
        _gpu_of[self] = gpu

    def clock(self) -> float:
        """The host's clock, in µs."""
        return _gpu_of[self].now_us()

    def synchronize(self) -> None:
        """Wait until everything queued so far is done, on every stream."""
        _gpu_of[self].wait()

    def event(self) -> Event:
        """Queue a mark on the default stream; `start.elapsed_us(end)` once both have happened."""
        return _gpu_of[self].mark()

    def flush_l2(self) -> None:
        """Queue a write of twice the L2's size: nothing else is left in it."""
        _gpu_of[self].flush()

    def random(self, nbytes: int) -> Buffer:
        """A new buffer full of random numbers. Filling it is queued like any kernel, and leaves it in the L2."""
        return _gpu_of[self].fill(Buffer(nbytes))

    def zeros(self, nbytes: int) -> Buffer:
        """A new buffer full of zeros, likewise."""
        return _gpu_of[self].fill(Buffer(nbytes, zeros=True))


# ------------------------------------------------------------------------------------- what the exercises are called with
def one_function(settings: dict, x_bytes: int, y_bytes: int, least_us: float) -> tuple[tuple, Counts]:
    """(device, run), and what it counts: run() launches one kernel, always on the same buffers."""
    gpu = SimulatedGpu(**settings)
    x, y = Buffer(x_bytes), Buffer(y_bytes)
    return (Device(gpu), lambda: gpu.launch("run", x, y, least_us=least_us)), gpu.counts


def two_programs(
    settings: dict, x_bytes: int, y_bytes: int, old_us: float, new_us: float, how: str
) -> tuple[tuple, Counts]:
    """(device, old, new, x_bytes), and what it counts: `new` deceives as in `one_program`, and so does `old` if `how`
    begins with "both"; otherwise it is plain."""
    gpu = SimulatedGpu(**settings)
    both, how = how.startswith("both "), how.removeprefix("both ")
    old = _program(gpu, "old", y_bytes, old_us, how if both else "plain")
    new = _program(gpu, "new", y_bytes, new_us, how)
    return (Device(gpu), old, new, x_bytes), gpu.counts


def one_program(settings: dict, x_bytes: int, y_bytes: int, least_us: float, how: str) -> tuple[tuple, Counts]:
    """(device, program, x_bytes), and what it counts: program(x) launches a kernel on x. `how` it deceives a benchmark:

    "plain"   not at all
    "cached"  it keeps its results: an x that it has seen is not computed again
    "side"    it works on a stream of its own
    """
    gpu = SimulatedGpu(**settings)
    return (Device(gpu), _program(gpu, "program", y_bytes, least_us, how), x_bytes), gpu.counts


def _program(gpu: SimulatedGpu, name: str, y_bytes: int, least_us: float, how: str) -> Callable[[Buffer], None]:
    seen: list[Buffer] = []

    def program(x: Buffer) -> None:
        if how == "cached" and any(x is other for other in seen):
            return
        seen.append(x)
        stream = "stream 1" if how == "side" else "stream 0"
        gpu.launch(name, x, Buffer(y_bytes), least_us=least_us, stream=stream)

    return program
