"""Kernels of kinds that all older sets lack, which nobody had predicted before they were measured.

The set was written without looking at the model. Two thirds of the kernels are what people write for language models,
recommenders, pictures, sound, science and data. Each of the others tests a trait: atomics, few programs, many small ones,
lengths that tensors give, steps that wait for one another, permutations, several launches, or rows that begin at odd bytes.

case       the register of the set
attention  dilated, by latents, with sigmoids, the rows before its gradients, and keys that are pooled or weighed
layers     margins, balances of experts, triangles that are inverted, bells, norms across channels, bent waves
products   preconditioners, means of outer products, 16 levels, two of four, drawn words, sums in fp16, blocks
pictures   convolutions in groups and of int8, gradients of taps, soft filters, perspectives, two views, pyramids
science    long filters, small networks, mixtures, sparse blocks, paths by chance, long integers, series
data       groups by keys, normals of meshes, packed differences, distinct keys, records, trees, filtered lines
"""

from gpukit.validation.eleventh_set import attention, data, layers, pictures, products, science  # noqa: F401
from gpukit.validation.eleventh_set.case import CASES

__all__ = ["CASES"]
