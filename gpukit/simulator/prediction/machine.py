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
    "pieces_per_us": ("sectors of lines that leave L2 in part", "memory"),
    "single_reads_per_us": ("loads all over 2 GiB", "memory"),
    "dram_ns": ("latency of device memory", None),
    "last_of_8_ns": ("the last of 8 lines after one", None),
    "last_in_a_row_ns": ("the last of 8 lines in a row after one", None),
    "tile_ns": ("a tile of device memory after one of L2", None),
    "l2_ns": ("latency of L2", None),
    "l1_ns": ("latency of L1", "1 / clock"),
    "l2_gbps": ("L2, 32 MiB", "chip"),
    "l2_single_loads_per_us": ("loads all over 8 MiB", "chip"),
    "l2_single_stores_per_us": ("stores all over 8 MiB", "chip"),
    "l2_parts_per_us": ("rows of 64 bytes, from within a sector", "chip"),
    "l2_small_parts_per_us": ("rows of 16 bytes", "chip"),
    "atomics_per_us": ("atomics scattered, int32", "chip"),
    "fenced_atomics_per_us": ("atomics scattered, acq_rel", "chip"),
    "atomics_in_order_per_us": ("atomics on neighbours, int32", "chip"),
    "fenced_atomics_in_order_per_us": ("atomics on neighbours, acq_rel", "chip"),
    "atomics_on_one_per_us": ("atomics on one element, int32", "clock"),
    "float_atomics_on_one_per_us": ("atomics on one element, fp32", "clock"),
    "atomic_ns": ("latency of an atomic", None),
    "fenced_atomic_ns": ("latency of an atomic, acq_rel", None),
    "matmul_tflops": ("cuBLAS bf16 4096", "tensor"),
    "matmul_fp32_tflops": ("cuBLAS fp32 4096", "fp32"),
    "wgmma_tflops": ("wgmma bf16", "tensor"),
    "mma_tflops": ("mma bf16", "tensor"),
    "tensor_mhz": ("clock beside wgmma", "clock"),
}


@dataclass(frozen=True)
class Machine:
    """Units by the names: µs, ns, GB/s, TFLOP/s, things per µs.

    launch_us, next_launch_us    an empty launch on an idle stream, and one behind another
    starts_per_us                programs that begin, on all SMs together
    copy, read, write_gbps       device memory; a copy reads and writes by turns, which costs time
    dram, l2, l1_ns              one load whose address the one before has found
    last_of_8_ns                 by so much later than one line comes the last of 8 that a warp asks for at once, all over the memory
    last_in_a_row_ns             the same of 8 lines that follow one another
    tile_ns                      by so much later than from L2 comes from device memory the last of 128 rows of 64 bytes, which
                                 are copied to shared memory together
    pieces_per_us                parts of lines that L2 writes to device memory without the rest, in no order
    single_reads_per_us          of 64 bytes each, which is the least that is read, all over the memory
    l2_single_loads, stores      of single sectors, all over L2; l2_gbps is for whole lines
    l2_parts_per_us              of lines in which a program leaves part of a sector to others, in rows of 64 bytes, and
    l2_small_parts_per_us        in rows of 16 bytes
    atomics_per_us               sectors, all over L2; fenced ones order what the thread did before and after (acq_rel). Those
                                 in order are of neighbors, a line of them for a warp
    atomics_on_one_per_us        elements, all threads adding to one: the compiler makes one request of a warp's 32
    float_atomics_on_one_per_us  the same in fp32, where each of them is an addition of its own
    matmul_tflops                bf16, of a whole large matmul, whose power brings the clock down; matmul_fp32_tflops of one
                                 without tensor cores; wgmma and mma: of a loop of nothing but these instructions
    tensor_mhz                   the clock of the SMs while each of them multiplies by wgmma a third of the time
    """

    launch_us: float
    next_launch_us: float
    starts_per_us: float
    copy_gbps: float
    read_gbps: float
    write_gbps: float
    pieces_per_us: float
    single_reads_per_us: float
    dram_ns: float
    last_of_8_ns: float
    last_in_a_row_ns: float
    tile_ns: float
    l2_ns: float
    l1_ns: float
    l2_gbps: float
    l2_single_loads_per_us: float
    l2_single_stores_per_us: float
    l2_parts_per_us: float
    l2_small_parts_per_us: float
    atomics_per_us: float
    fenced_atomics_per_us: float
    atomics_in_order_per_us: float
    fenced_atomics_in_order_per_us: float
    atomics_on_one_per_us: float
    float_atomics_on_one_per_us: float
    atomic_ns: float
    fenced_atomic_ns: float
    matmul_tflops: float
    matmul_fp32_tflops: float
    wgmma_tflops: float
    mma_tflops: float
    tensor_mhz: float
    source: str


@cache
def machine(gpu: hardware.Gpu) -> Machine:
    """The measured machine, or one that was scaled from the H200, as its `source` says. What is not measured yet of a measured
    one is scaled, too."""
    first = hardware.gpu(MEASURED)
    known = gpu if _path(gpu).exists() else first
    scaled = {field: _values(first)[row] * _ratio(gpu, first, by) for field, (row, by) in ROWS.items()}
    own = {field: _values(known)[row] for field, (row, _) in ROWS.items() if row in _values(known)}
    source = f"measured on an {known.name.split()[0]}, gpukit/results/{known.key}/machine.csv"
    if known != gpu:
        source = f"assumed: {source}, scaled by what the datasheets say of {known.name} and {gpu.name}"
        own = {}
    return Machine(**scaled | own, source=source)


def _path(gpu: hardware.Gpu) -> Path:
    return RESULTS / gpu.key / "machine.csv"


@cache
def _values(gpu: hardware.Gpu) -> dict[str, float]:
    with _path(gpu).open(newline="") as file:
        return {row["name"]: float(row["value"]) for row in csv.DictReader(file)}


def _ratio(gpu: hardware.Gpu, known: hardware.Gpu, by: str | None) -> float:
    """What a value of `known` is multiplied with for a GPU, by what it goes with (ROWS)."""
    if by in ("clock", "1 / clock"):
        ratio = gpu.boost_mhz / known.boost_mhz
        return ratio if by == "clock" else 1 / ratio
    if by == "memory":
        return gpu.hbm_gbps / known.hbm_gbps
    if by == "chip":
        return gpu.sms * gpu.boost_mhz / (known.sms * known.boost_mhz)
    dtype = {"fp32": "fp32", "tensor": "fp16"}.get(by)
    return gpu.peak_flops[dtype] / known.peak_flops[dtype] if dtype else 1.0
