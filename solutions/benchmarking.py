"""Benchmarking: times that can be believed.

Five exercises, from top to bottom; notebooks/04_benchmarking.ipynb explains them. Three of them get a `device`, a GPU in
miniature that runs the same everywhere. Its calls, with times in microseconds:

    device.clock()          the host's clock
    device.synchronize()    wait until everything queued so far is done, on every stream
    device.event()          queue a mark on the default stream; start.elapsed_us(end) once both have happened
    device.flush_l2()       queue a write of twice the L2's size: nothing else is left in it
    device.random(nbytes)   queue the filling of a new buffer with random numbers, and return the buffer
    device.zeros(nbytes)    the same with zeros
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
from collections.abc import Callable


# ----------------------------------------------------------------------------------------------- benchmarking.benchmark
def benchmark(device, run: Callable[[], None]) -> float:
    """How long the GPU needs for a typical run(), in us, as a layer of a model would meet it. Within 3 %.

    run() launches one kernel, always on the same data, and returns at once. In a model that data would come out of
    memory: other layers have used the L2 since. The first call compiles. A GPU that was idle runs slowly until it has
    worked for 5 ms. Now and then a run is disturbed by somebody else and takes several times as long. What the host
    needs for its own part does not belong to the kernel.
    """
    # BEGIN SOLUTION
    run()
    device.synchronize()
    begun = device.clock()
    while device.clock() - begun < 25_000:
        run()
        device.synchronize()

    marks = []
    for _ in range(100):
        device.flush_l2()  # also keeps the GPU busy until the launch below has arrived
        start = device.event()
        run()
        marks.append((start, device.event()))
    device.synchronize()
    times = sorted(start.elapsed_us(end) for start, end in marks)
    return times[len(times) // 2]
    # END SOLUTION


# ------------------------------------------------------------------------------------------------ benchmarking.timeline
def timeline(kernels_us: list[float], launch_us: float, graph: bool) -> tuple[float, float]:
    """(total, idle) in us: one kernel after the other, launched by a host that never waits.

    The host begins at 0 and needs launch_us for each launch. A kernel starts when its launch is done and the kernel
    before it has ended. With a graph the host launches once, for all of them together.

    total  until the last kernel has ended
    idle   how much of it the GPU has nothing to do
    """
    # BEGIN SOLUTION
    launched = free = 0.0
    for i, took in enumerate(kernels_us):
        if i == 0 or not graph:
            launched += launch_us
        free = max(launched, free) + took
    return free, free - sum(kernels_us)
    # END SOLUTION


# ---------------------------------------------------------------------------------------------------- benchmarking.rate
def rate(
    M: int, N: int, K: int, itemsize: int, ms: float, peak_tflops: float, peak_gbps: float
) -> tuple[float, float, bool]:
    """(TFLOP/s, GB/s, possible) of C [M, N] = A [M, K] B [K, N] in ms milliseconds; itemsize bytes an element.

    The least work: every product of the definition, each added to an element of C, which began at zero; A and B read once,
    C written once. 1 TFLOP is 10^12 operations, 1 GB is 10^9 bytes. Whether a GPU with these two peaks can have done it in that time; at a peak it can.
    """
    # BEGIN SOLUTION
    tflops = 2 * M * N * K / (ms * 1e9)
    gbps = (M * K + K * N + M * N) * itemsize / (ms * 1e6)
    return tflops, gbps, tflops <= peak_tflops and gbps <= peak_gbps
    # END SOLUTION


# ------------------------------------------------------------------------------------------------ benchmarking.detective
def speedup(device, old: Callable, new: Callable, x_bytes: int) -> float:
    """How many times as fast `new` is as `old`: 2.0 if it takes half the time. Within 5 %.

    Both compute the same from a buffer of x_bytes: old(x), new(x), each on the default stream. What counts is the time
    for an x that was not there before, as in a model. This GPU is warm and disturbed by nobody, so its times are steady.
    """

    def time_us(program: Callable) -> float:
        # BEGIN SOLUTION
        # STUB: x = device.random(x_bytes)
        # STUB: program(x)  # compiles
        # STUB: times = []
        # STUB: for _ in range(20):
        # STUB:     device.flush_l2()
        # STUB:     before = device.event()
        # STUB:     program(x)
        # STUB:     after = device.event()
        # STUB:     device.synchronize()
        # STUB:     times.append(before.elapsed_us(after))
        # STUB: return sorted(times)[10]
        program(device.random(x_bytes))  # compiles
        times = []
        for _ in range(20):
            x = device.random(x_bytes)
            device.flush_l2()
            start = device.event()
            program(x)
            end = device.event()
            device.synchronize()
            times.append(start.elapsed_us(end))
        return sorted(times)[10]
        # END SOLUTION

    return time_us(old) / time_us(new)


# --------------------------------------------------------------------------------------------------- benchmarking.honest
def honest(device, program: Callable, x_bytes: int) -> float:
    """How long the GPU needs for a typical run of program(x), in us, whatever its author did to look fast. Within 6 %.

    x is a buffer of x_bytes, made by device.random or device.zeros. What counts is the time for random numbers that the
    program has not seen and that the L2 does not hold. The program may use any stream, keep what it has computed, or be
    quick on easy numbers. Its first call compiles, this GPU runs slowly until it has worked for 30 ms, and now and then a
    run is disturbed and takes several times as long. Programs take 400 us or more, so that the host's few
    microseconds do not matter here.
    """
    # BEGIN SOLUTION
    program(device.random(x_bytes))
    device.synchronize()
    times = []
    for _ in range(120):  # the first 30 ms of them are slow: few enough for a median
        x = device.random(x_bytes)
        device.flush_l2()
        device.synchronize()
        start = device.clock()  # not an event: that sees the default stream alone
        program(x)
        device.synchronize()
        times.append(device.clock() - start)
    return sorted(times)[len(times) // 2]
    # END SOLUTION
