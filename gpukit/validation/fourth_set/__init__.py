"""Kernels of kinds that all older sets lack, which nobody had predicted before an H100 had measured them (2026-11-28).

The model was changed by what the third set showed, so that set has been looked at. These kernels took its place: measured
first, and predicted afterwards (gpukit.validation.unseen).

case       the register of the set
rows       gradients of norms, losses, choices among logits, a softmax down the columns
sequences  scans in parts, states that change with each step, gradients of a convolution's taps
attention  with biases, to blocks that a table names, with shared heads; its gradients; rotations of halves
images     colors, medians, blurs, warps, depthwise windows, patches
tables     segments, histograms, routes to experts, adapters by name, weights that are not all there
bits       weights of 4 bits, scales of few, optimizers with small states
products   shares of a product, odd batches, triangles, products that are reduced at once, solves
moves      odd sizes, merges, dropout that is drawn twice, gates, prices
"""

from gpukit.validation.fourth_set import (  # noqa: F401
    attention,
    bits,
    images,
    moves,
    products,
    rows,
    sequences,
    tables,
)
from gpukit.validation.fourth_set.case import CASES

__all__ = ["CASES"]
