"""The roofline: what a GPU can reach at a given number of FLOPs a byte, and where a kernel lies below that.

Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785. A multiply-add is 2 FLOPs; bytes are those
that device memory moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpukit.hardware import Gpu


@dataclass(frozen=True)
class Point:
    """One kernel: what it computes, what it moves, and how long it takes, if that is known.

    how  where time_us comes from: "measured" or "modelled"
    Raises ValueError for a number that is not positive.
    """

    name: str
    flops: float
    bytes: float
    time_us: float | None = None
    how: str = "measured"

    def __post_init__(self) -> None:
        for name in ("flops", "bytes", "time_us"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"roofline: {name} of {self.name!r} must be a positive number, got {value!r}")

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flops / self.bytes

    def flops_per_s(self, gpu: Gpu, dtype: str) -> float:
        """What it reaches; where no time is known, what the roof allows."""
        return attainable(gpu, dtype, self.intensity) if self.time_us is None else self.flops / self.time_us * 1e6

    def least_us(self, gpu: Gpu, dtype: str) -> float:
        """The least time by this roof."""
        return self.flops / attainable(gpu, dtype, self.intensity) * 1e6


def attainable(gpu: Gpu, dtype: str, intensity: float) -> float:
    """FLOP/s that `gpu` can reach at `intensity` FLOP a byte. Raises ValueError for a dtype without a rate."""
    return min(gpu.peak(dtype), intensity * gpu.hbm_gbps * 1e9)


def limit(gpu: Gpu, dtype: str, intensity: float) -> str:
    """ "memory" left of the ridge, "compute" right of it."""
    return "memory" if intensity < gpu.ridge(dtype) else "compute"
