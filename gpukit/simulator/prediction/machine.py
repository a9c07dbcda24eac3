"""What a GPU was measured to reach: the rows of gpukit/results/<gpu>/machine.csv that the prediction uses, each in one place.

They were written by `python -m gpukit.validation.times` from kernels that do one thing only. Of a GPU that nobody has
measured, latencies are taken to be those of an H200, and rates to be the same share of what its datasheet promises.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpukit import hardware

RESULTS = Path(__file__).parents[2] / "results"
MEASURED = "h200"

# Field of Machine -> row of machine.csv, and what the value goes with on another GPU: nothing, the clock, the bandwidth of
# its memory, or the size of the chip (SMs times clock).
ROWS = {
    "launch_us": ("launch on an idle stream", None),
    "next_launch_us": ("launch after a launch", None),
    "starts_per_us": ("empty programs", "clock"),
    "copy_gbps": ("copy", "memory"),
    "read_gbps": ("read", "memory"),
    "write_gbps": ("write", "memory"),
    "single_reads_per_us": ("loads all over 2 GiB", "memory"),
    "dram_ns": ("latency of device memory", None),
    "l2_ns": ("latency of L2", None),
    "l1_ns": ("latency of L1", "1 / clock"),
    "l2_gbps": ("L2, 32 MiB", "chip"),
    "l2_single_loads_per_us": ("loads all over 8 MiB", "chip"),
    "l2_single_stores_per_us": ("stores all over 8 MiB", "chip"),
    "atomics_per_us": ("atomics scattered, int32", "chip"),
    "fenced_atomics_per_us": ("atomics scattered, acq_rel", "chip"),
    "atomics_on_one_per_us": ("atomics on one element, int32", "clock"),
    "float_atomics_on_one_per_us": ("atomics on one element, fp32", "clock"),
    "atomic_ns": ("latency of an atomic", None),
    "fenced_atomic_ns": ("latency of an atomic, acq_rel", None),
    "matmul_tflops": ("cuBLAS bf16 4096", "tensor"),
    "matmul_fp32_tflops": ("cuBLAS fp32 4096", "fp32"),
    "wgmma_tflops": ("wgmma bf16", "tensor"),
    "mma_tflops": ("mma bf16", "tensor"),
}


@dataclass(frozen=True)
class Machine:
    """Units by the names: µs, ns, GB/s, TFLOP/s, things per µs.

    launch_us, next_launch_us    an empty launch on an idle stream, and one behind another
    starts_per_us                programs that begin, on all SMs together
    copy, read, write_gbps       device memory; a copy reads and writes by turns, which costs time
    single_reads_per_us          of 64 bytes each, which is the least that is read, all over the memory
    l2_single_loads, stores      of single sectors, all over L2; l2_gbps is for whole lines
    atomics_per_us               sectors, all over L2; fenced ones order what the thread did before and after (acq_rel)
    atomics_on_one_per_us        elements, all threads adding to one: the compiler makes one request of a warp's 32
    float_atomics_on_one_per_us  the same in fp32, where each of them is an addition of its own
    matmul_tflops                bf16, of a whole large matmul, whose power brings the clock down; matmul_fp32_tflops of one
                                 without tensor cores; wgmma and mma: of a loop of nothing but these instructions
    """

    launch_us: float
    next_launch_us: float
    starts_per_us: float
    copy_gbps: float
    read_gbps: float
    write_gbps: float
    single_reads_per_us: float
    dram_ns: float
    l2_ns: float
    l1_ns: float
    l2_gbps: float
    l2_single_loads_per_us: float
    l2_single_stores_per_us: float
    atomics_per_us: float
    fenced_atomics_per_us: float
    atomics_on_one_per_us: float
    float_atomics_on_one_per_us: float
    atomic_ns: float
    fenced_atomic_ns: float
    matmul_tflops: float
    matmul_fp32_tflops: float
    wgmma_tflops: float
    mma_tflops: float
    source: str


@cache
def machine(gpu: hardware.Gpu) -> Machine:
    """The measured machine, or one that was scaled from the H200, as its `source` says."""
    path = RESULTS / gpu.key / "machine.csv"
    known = gpu if path.exists() else hardware.gpu(MEASURED)
    with (RESULTS / known.key / "machine.csv").open(newline="") as file:
        values = {row["name"]: float(row["value"]) for row in csv.DictReader(file)}
    ratios = {
        None: 1.0,
        "clock": gpu.boost_mhz / known.boost_mhz,
        "1 / clock": known.boost_mhz / gpu.boost_mhz,
        "memory": gpu.hbm_gbps / known.hbm_gbps,
        "chip": gpu.sms * gpu.boost_mhz / (known.sms * known.boost_mhz),
        "fp32": gpu.peak_flops["fp32"] / known.peak_flops["fp32"],
        "tensor": gpu.peak_flops["fp16"] / known.peak_flops["fp16"],
    }
    source = f"measured on an {known.name.split()[0]}, gpukit/results/{known.key}/machine.csv"
    if known != gpu:
        source = f"assumed: {source}, scaled by what the datasheets say of {known.name} and {gpu.name}"
    return Machine(**{field: values[row] * ratios[by] for field, (row, by) in ROWS.items()}, source=source)
