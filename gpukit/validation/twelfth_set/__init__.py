"""Kernels of kinds that all older sets lack, which nobody had predicted before they were measured.

The set was written without looking at the model. Two thirds of the kernels are what people write for language models,
recommenders, pictures, science and data. Each of the others tests a trait: places that tensors name, whether all are as likely
or some popular, atomics, lengths that tensors give, steps that wait for one another, few programs, many small ones, several
launches, scans and sorts, narrow types, or rows that begin at odd places.

case       the register of the set
attention  three gradients at once, shifted scores, caches of 4 bits, dropout, keys that are chosen, documents
products   4 bits by 8, largest numbers, heads that are turned, two that are added, forms, antennas, trains, pairs
pictures   first layers, windows with places of their own, surfaces of voxels, nearest seeds, lines, windows
layers     turns by three positions, tanh for a norm, quantiles, rows of experts, ranked lists, simplexes
data       rows of many tables, words of letters, numbers in text, bytes as letters, bars of trades, heaviest edges
science    gates of states, densities in cells, sharp waves, cubic fields, farthest points
"""

from gpukit.validation.twelfth_set import attention, data, layers, pictures, products, science  # noqa: F401
from gpukit.validation.twelfth_set.case import CASES

__all__ = ["CASES"]
