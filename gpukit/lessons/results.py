"""What was measured on an H200 and is kept in gpukit/results, as the lessons need it: a lesson also opens where nothing is
recorded."""

from __future__ import annotations

from gpukit import benchmark
from gpukit.hardware import gpu


def rows(name: str, key: str = "h200") -> list[benchmark.Row]:
    """The rows of gpukit/results/<key>/<name>.csv; none where nothing is recorded."""
    try:
        return benchmark.rows(name, key)
    except FileNotFoundError:
        return []


def anywhere(name: str) -> list[benchmark.Row]:
    """The rows of an H200, or where there are none those of an H100: all of one GPU. None where nothing is recorded."""
    return rows(name) or rows(name, "h100-sxm")


def short(row: benchmark.Row) -> str:
    """The GPU of a row in a sentence: "H100"."""
    return benchmark.gpu_key(row.gpu).partition("-")[0].upper()


def copy_gbps(name: str) -> float:
    """GB/s at which memory was copied in the run of these rows; the data sheet's where no run is recorded."""
    return next((row.gbps for row in rows(name) if row.op == "copy"), gpu("h200").hbm_gbps)


def copy_us(name: str, moved: float) -> float:
    """Microseconds in which a copy moves `moved` bytes at that rate."""
    return moved / copy_gbps(name) / 1e3
