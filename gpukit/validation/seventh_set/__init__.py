"""Kernels of kinds that all older sets lack, which nobody had predicted before they were measured.

The model was looked at again after the sixth set. These kernels take that set's place: measured first, and predicted
afterwards (gpukit.validation.unseen). About half are what people write for language models and their data, and half test a
trait each: fields, padding, turns, loads in flight, spills, lanes, lengths, descriptors, float64.

case       the register of the set
layers     norms of gated groups, activations, rotations, rings, mixes, distributions, largest ones, entropies
steps      blocks of 34 bytes, 4 bits, fp8 both ways round, an optimizer, adapters, experts, advantages, bags
attention  gradients of queries, a prefix, one token with a cache of fp8, retention
products   of many shapes, of int8 in parts, with a norm inside, by descriptors, of sound, with scales of 32
places     tiles turned round, descriptors, fields of records, padding, what is used again, diagonals
turns      loads in flight, spills, a pipeline of tiles, atomics of lanes and of labels, float64, runs
"""

from gpukit.validation.seventh_set import attention, layers, places, products, steps, turns  # noqa: F401
from gpukit.validation.seventh_set.case import CASES

__all__ = ["CASES"]
