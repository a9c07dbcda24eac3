"""Kernels of kinds that all older sets lack, which nobody had predicted before they were measured.

The model was changed by what the fourth set showed, so that set has been looked at. These kernels took its place: measured
first, and predicted afterwards (gpukit.validation.unseen).

case      the register of the set
walks     tables of two strings, labels along time, orbits, filters of sound, scans of a row
grids     a stencil in place, stencils of solids, video
numbers   Fourier transforms, polynomials, whole numbers, roundings by chance, levels, waves
rows      softmax and norms of other forms, steps with ratios, losses of triplets, columns to 8 bits
places    histograms, segments, edges, look-ups, probes, narrow columns, few programs
products  in float32 and tf32, of 8 bits, for gradients of weights, small ones; attention of odd sizes
"""

from gpukit.validation.fifth_set import grids, numbers, places, products, rows, walks  # noqa: F401
from gpukit.validation.fifth_set.case import CASES

__all__ = ["CASES"]
