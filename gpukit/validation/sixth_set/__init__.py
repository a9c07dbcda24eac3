"""Kernels of kinds that all older sets lack, which nobody had predicted before they were measured.

The model was changed by what the fifth set showed, so that set has been looked at. These kernels took its place: measured
first, and predicted afterwards (gpukit.validation.unseen). About half are what people write for language models, and half
test a trait each: odd sizes, places within a sector, indices, atomics, few programs, chains, stages, warps, registers.

case      the register of the set
blocks    dropout behind a GELU, gradients of a norm, heads taken apart, embeddings; attention of newer kinds
caches    pages, caches of 8 bits and in pieces, shards, rows for experts, places in experts, words, codebooks
training  losses in chunks, labels of a teacher, norms of many tensors, steps, states, taps, routes, nuclei
products  of experts in fp8 blocks, by words of 4 bits, of few rows, Newton-Schulz steps; other pipelines, and spills
traits    odd places, indices of indices, atomics, chains in few programs, bounds in tables, functions, launches
"""

from gpukit.validation.sixth_set import blocks, caches, products, training, traits  # noqa: F401
from gpukit.validation.sixth_set.case import CASES

__all__ = ["CASES"]
