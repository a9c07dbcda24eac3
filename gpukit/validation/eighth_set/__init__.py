"""Kernels of kinds that all older sets lack, which nobody had predicted before they were measured.

The model was looked at again after the seventh set. These kernels take that set's place: measured first, and predicted
afterwards (gpukit.validation.unseen). About half are what people write for language models, recommenders, images and sound,
and half test a trait each: odd places, few programs, many short ones, chains, lengths, atomics, or several launches.

case       the register of the set
layers     norms of heads, to int8 and of images, policy losses, draws, latents, pages, casts
attention  by descriptors, with scores of int8, of a tree of guesses, in windows
products   with three weights, between rows, by descriptors, of experts, complex ones, of features
data       rows by name, 2 bits, places in order, histograms, sparse rows, events, trees, dates, boxes
signals    taps, complex recurrences, cosines, flows, reflections, frames, long sums, bytes, conjugate gradients
"""

from gpukit.validation.eighth_set import attention, data, layers, products, signals  # noqa: F401
from gpukit.validation.eighth_set.case import CASES

__all__ = ["CASES"]
