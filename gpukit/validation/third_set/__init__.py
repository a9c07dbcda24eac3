"""Kernels that nobody had predicted when they were measured: of kinds that both older sets lack, all of them held back.

The half of gpukit.validation.new_kernels that had been held back was looked at when the model was fixed by it, so it can no
longer say how true the model is on what it has not seen. These could, until the model was fixed by them as well: fourth_set takes their place.

    gpukit validate --measure --set third    on a GPU: times and counters, into gpukit/results/<gpu>/
    gpukit validate --predict --set third    afterwards, anywhere: what the model says of what was measured

case           the register of the set
rows           sorts, scans, positions of maxima, statistics of channels
integers       hashes, divisions, powers, bits that are packed, single steps in float64
rearrangement  dimensions in another order, other grids of pixels, what is drawn together
matrices       float32 by parts, groups of unequal size, a vector, chains, convolutions as products
together       pairs of all, many streams, many launches
"""

from gpukit.validation.third_set import integers, matrices, rearrangement, rows, together  # noqa: F401
from gpukit.validation.third_set.case import CASES

__all__ = ["CASES"]
