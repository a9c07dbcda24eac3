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
    raise NotImplementedError("benchmarking.benchmark")  # your code here


# ------------------------------------------------------------------------------------------------ benchmarking.timeline
def timeline(kernels_us: list[float], launch_us: float, graph: bool) -> tuple[float, float]:
    """(total, idle) in us: one kernel after the other, launched by a host that never waits.

    The host begins at 0 and needs launch_us for each launch. A kernel starts when its launch is done and the kernel
    before it has ended. With a graph the host launches once, for all of them together.

    total  until the last kernel has ended
    idle   how much of it the GPU has nothing to do
    """
    raise NotImplementedError("benchmarking.timeline")  # your code here


# ---------------------------------------------------------------------------------------------------- benchmarking.rate
def rate(
    M: int, N: int, K: int, itemsize: int, ms: float, peak_tflops: float, peak_gbps: float
) -> tuple[float, float, bool]:
    """(TFLOP/s, GB/s, possible) of C [M, N] = A [M, K] B [K, N] in ms milliseconds; itemsize bytes an element.

    The least work: every product of the definition, each added to an element of C, which began at zero; A and B read once,
    C written once. 1 TFLOP is 10^12 operations, 1 GB is 10^9 bytes. Whether a GPU with these two peaks can have done it in that time; at a peak it can.
    """
    raise NotImplementedError("benchmarking.rate")  # your code here


# ------------------------------------------------------------------------------------------------ benchmarking.detective
def speedup(device, old: Callable, new: Callable, x_bytes: int) -> float:
    """How many times as fast `new` is as `old`: 2.0 if it takes half the time. Within 5 %.

    Both compute the same from a buffer of x_bytes: old(x), new(x), each on the default stream. What counts is the time
    for an x that was not there before, as in a model. This GPU is warm and disturbed by nobody, so its times are steady.
    """

    def time_us(program: Callable) -> float:
        x = device.random(x_bytes)  # your code here
        program(x)  # compiles
        times = []
        for _ in range(20):
            device.flush_l2()
            before = device.event()
            program(x)
            after = device.event()
            device.synchronize()
            times.append(before.elapsed_us(after))
        return sorted(times)[10]

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
    raise NotImplementedError("benchmarking.honest")  # your code here
