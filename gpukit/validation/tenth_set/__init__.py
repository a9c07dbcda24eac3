"""Kernels of kinds that all older sets lack, which nobody had predicted before they were measured.

The set was written without looking at the model. Two thirds of the kernels are what people write for language models,
recommenders, pictures, videos, sound, science and data. Each of the others tests a trait: rows of odd length, few programs,
many small ones, steps that wait for one another, lengths that tensors give, atomics, permutations, or words of many bits.

case       the register of the set
attention  in fp8, to latents and shared keys, along rows with biases of pairs, of pixels to neighbors
layers     averages along time, gradients, steps, overlaps, sparse softmaxes, penalties, losses without logits
products   of complex numbers, windows that widen, triangles, 4 bits, features, experts, two kinds of fp8, norms
pictures   convolutions of videos, features of boxes, tables of colors, interleaved bits, smaller pictures
science    Fourier transforms, kernels, factors, charges, lattices, correlations, rotations, shortest paths
data       bags of bytes, products at named places, keys in place, pieces of lines, checksums, cells of life
"""

from gpukit.validation.tenth_set import attention, data, layers, pictures, products, science  # noqa: F401
from gpukit.validation.tenth_set.case import CASES

__all__ = ["CASES"]
