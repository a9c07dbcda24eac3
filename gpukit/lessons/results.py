"""What was measured on an H200 and is kept in gpukit/results, as the lessons need it: a lesson also opens where nothing is
recorded."""

from __future__ import annotations

from gpukit import benchmark
from gpukit.hardware import gpu


def rows(name: str) -> list[benchmark.Row]:
    """The rows of gpukit/results/h200/<name>.csv; none where nothing is recorded."""
    try:
        return benchmark.rows(name, "h200")
    except FileNotFoundError:
        return []


def copy_gbps(name: str) -> float:
    """GB/s at which memory was copied in the run of these rows; the data sheet's where no run is recorded."""
    return next((row.gbps for row in rows(name) if row.op == "copy"), gpu("h200").hbm_gbps)


def copy_us(name: str, moved: float) -> float:
    """Microseconds in which a copy moves `moved` bytes at that rate."""
    return moved / copy_gbps(name) / 1e3
