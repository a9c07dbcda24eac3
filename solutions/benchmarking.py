"""Benchmarking: times that can be believed.

Six exercises, from top to bottom; notebooks/04_benchmarking.ipynb explains them. Three of them get a `device`, a GPU in
miniature that behaves the same on every machine. Its calls, with times in µs:

    device.clock()          read the host's clock
    device.synchronize()    wait until everything that was queued so far is done, on every stream
    device.event()          put a mark into the default stream's queue; a.elapsed_us(b) is the time between two marks, once
                            the GPU has passed both
    device.flush_l2()       queue a write of twice the L2's size, after which the L2 holds nothing else
    device.random(nbytes)   queue the filling of a new buffer with random numbers, and return the buffer
    device.zeros(nbytes)    the same with zeros
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
from collections.abc import Callable


# ----------------------------------------------------------------------------------------------- benchmarking.benchmark
def benchmark(device, run: Callable[[], None]) -> float:
    """How long the GPU needs for a typical run(), in µs, as it would be inside a model. Within 3%.

    run() launches one kernel of 10 µs or more, always on the same data, and returns at once. Inside a model this data would
    come from device memory, because other layers have used the L2 in the meantime. The first call of run() compiles the
    kernel. A GPU that was idle runs slowly until it has worked for 5 ms. Now and then another program disturbs a run, or a
    few in a row, which then take several times as long. The time that the host needs for its own part does not count.
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
    """(total, idle) in µs of kernels that run one after the other, launched by a host that never waits for the GPU.

    The host begins at time 0 and needs launch_us for each launch. A kernel starts as soon as its launch is done and the
    kernel before it has ended. With graph=True the host launches once, and that launch starts all kernels in their order.

    total  the time at which the last kernel has ended
    idle   for how much of this time the GPU runs no kernel
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
    """(TFLOP/s, GB/s, possible) of C [M, N] = A [M, K] B [K, N] in ms milliseconds, with itemsize bytes per element.

    Count the least work. Each element of C begins at zero, and K products are added to it. A and B are read once, and C is
    written once. 1 TFLOP is 10^12 operations, 1 GB is 10^9 bytes. `possible` says whether a GPU with these two peaks can have
    done it in that time; a rate that equals its peak is possible.
    """
    # BEGIN SOLUTION
    tflops = 2 * M * N * K / (ms * 1e9)
    gbps = (M * K + K * N + M * N) * itemsize / (ms * 1e6)
    return tflops, gbps, tflops <= peak_tflops and gbps <= peak_gbps
    # END SOLUTION


# ------------------------------------------------------------------------------------------------- benchmarking.profile
def profile_row(events: list[tuple[str, int, float, float]], name: str) -> tuple[int, float, float, float, float]:
    """One row of a profiler's table: (calls, self CPU, CPU total, self CUDA, CUDA total) of all calls of `name`, in µs.

    events[i] is (name, parent, cpu_us, cuda_us) of the i-th call, in the order in which the calls began:

    parent   the index of the call in which this call was made; -1 if it was made in none
    cpu_us   how long the host spent in this call, including all calls that were made in it
    cuda_us  how long the kernels ran that this call launched itself, not including those of calls that were made in it

    "total" is a call with everything that was made in it, at whatever depth; "self" is the call without it. The row adds up all
    calls of its name. A call that lies, at whatever depth, in another call of the same name adds nothing to the two totals:
    its time is in them already. A name that never occurs has a row of zeros.
    """
    # BEGIN SOLUTION
    calls, self_cpu, cpu_total, self_cuda, cuda_total = 0, 0.0, 0.0, 0.0, 0.0
    for called, parent, cpu_us, cuda_us in events:
        above = []  # the names of the calls around this one, the nearest first
        while parent >= 0:
            around, parent = events[parent][:2]
            above.append(around)
        if called == name:
            calls, self_cpu, self_cuda = calls + 1, self_cpu + cpu_us, self_cuda + cuda_us
            cpu_total += cpu_us if name not in above else 0.0
        if above[:1] == [name]:
            self_cpu -= cpu_us
        if called == name or name in above:
            cuda_total += cuda_us
    return calls, self_cpu, cpu_total, self_cuda, cuda_total
    # END SOLUTION


# ------------------------------------------------------------------------------------------------ benchmarking.detective
def speedup(device, old: Callable, new: Callable, x_bytes: int) -> float:
    """How many times as fast `new` is as `old`: 2.0 if it takes half the time. Within 5%.

    Both compute the same from a buffer of x_bytes: old(x), new(x), each on the default stream. What counts is the time
    for an x that the program has not seen before, as in a model. This GPU is warm and nothing disturbs it, so its times are
    steady.
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
    """How long the GPU needs for a typical run of program(x), in µs, whatever its author did to look fast. Within 6%.

    x is a buffer of x_bytes, made by device.random or device.zeros. What counts is the time for random numbers that the
    program has not seen before and that are not in the L2. The program may use any stream, keep what it has computed, or
    be faster on easy numbers. Its first call compiles. This GPU runs slowly until it has worked for 30 ms, and now and then a
    run, or a few in a row, are disturbed and take several times as long. Programs take 400 µs or more, so the few µs of the
    host do not matter.
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
