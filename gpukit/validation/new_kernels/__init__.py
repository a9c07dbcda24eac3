"""Kernels that the simulator was not built with, of kinds that the older cases lack; a module for some kinds each.

They are split in two halves before anything of them was measured: gpukit.validation.halves says how, and prints both.

case        what a case is, and its check against PyTorch
walks       programs whose steps wait for one another
neighbors   stencils, windows, pools
ragged      sizes that are no multiples of 16
pairs       interleaved pairs and triples
products    matrices: transposed, in 8 bits, few or persistent programs
attention   causal in blocks of 64, and of one token over a cache
atomics     with and without contention, and sums across programs
gathers     with indices that are known
launches    several launches, small grids, persistent loops
"""

from gpukit.validation.new_kernels import (  # noqa: F401
    atomics,
    attention,
    gathers,
    launches,
    neighbors,
    pairs,
    products,
    ragged,
    walks,
)  # fmt: skip
from gpukit.validation.new_kernels.case import CASES

__all__ = ["CASES"]
