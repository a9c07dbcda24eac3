"""Kernels of kinds that all older sets lack, which nobody had predicted before they were measured.

The set was written without looking at the model. Half of the kernels are what people write for language models, recommenders,
pictures, sound, graphs, science and data. The other half test a trait each: gathers and scatters by real indices, lengths that
tensors give, chains, few programs, scans, sorts, permutations, products with work before and after them, atomics, or several
launches.

case       the register of the set
attention  of prompts in chunks, of two softmaxes, of histories, merged, along edges; and index scores
layers     streams, states that tokens change, grammars, recurrences
products   of gates, spectra, zero points, experts' gradients, and batches by descriptors
pictures   points that queries sample, grids of hashes, splats, rays, sums of areas
science    systems of three diagonals, fields, neighbors, charges
data       ciphers, codes, signatures, trimmed means, depths, scales, parities, features, palettes, messages, digits
"""

from gpukit.validation.ninth_set import attention, data, layers, pictures, products, science  # noqa: F401
from gpukit.validation.ninth_set.case import CASES

__all__ = ["CASES"]
