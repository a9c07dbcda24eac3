"""Number formats: seven functions in plain Python, in the order of notebooks/01_dtypes.ipynb, which explains them.

No tensors and no kernels here. A Python float is fp64 and holds every number of every smaller format exactly, so the
only rounding is the one that you write.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import math


# ------------------------------------------------------------------------------------------------------ dtypes.decode
def decode(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a bit pattern of 1 + exponent_bits + mantissa_bits bits, by the rules of IEEE 754.

    They have three cases: an exponent field of all ones, of all zeros, and the rest. The result may be infinite or NaN.
    """
    sign = bits >> (exponent_bits + mantissa_bits)
    exponent = bits >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = bits & (1 << mantissa_bits) - 1
    bias = 2 ** (exponent_bits - 1) - 1
    raise NotImplementedError("dtypes.decode")  # your code here


# ------------------------------------------------------------------------------------------------------- dtypes.round
def round_to(value: float, mantissa_bits: int) -> float:
    """The number nearest to `value` among 0 and all +-(1 + k / 2^mantissa_bits) x 2^e, where k and e are integers.

    Halfway between two of them the one with the even k wins. `value` is finite; e has no limits here.
    """
    raise NotImplementedError("dtypes.round")  # your code here


# -------------------------------------------------------------------------------------------------- dtypes.accumulate
def stall(step: float, mantissa_bits: int) -> float:
    """Where a running sum stops. It starts at 0, `step` > 0 is added for ever, and after each addition the sum is
    rounded to `mantissa_bits` (to nearest, ties to even, as in round_to). The result is the value that it never leaves.

    `step` is such a number itself. Find the result without adding: some of these sums would take months.
    """
    raise NotImplementedError("dtypes.accumulate")  # your code here


# -------------------------------------------------------------------------------------------------- dtypes.stochastic
def round_stochastic(value: float, mantissa_bits: int, u: float) -> float:
    """One of the two neighbours of `value` among the numbers of round_to; `value` itself if it is one of them.

    u is uniform in [0, 1). The neighbour further from zero is taken when u is less than its chance, and the chances are
    such that the result is `value` on average.
    """
    raise NotImplementedError("dtypes.stochastic")  # your code here


# -------------------------------------------------------------------------------------------------- dtypes.loss_scale
def loss_scale(overflowed: list[bool], scale: float, growth_interval: int) -> list[float]:
    """The loss scale in force at every step, and the one after the last step: len(overflowed) + 1 numbers.

    overflowed[i] says whether step i's scaled gradients held an infinity or NaN. Such a step is thrown away and the
    scale is halved for the next one. After `growth_interval` good steps in a row at one scale it is doubled.
    """
    scales = [scale]
    raise NotImplementedError("dtypes.loss_scale")  # your code here
    return scales


# ------------------------------------------------------------------------------------------------- dtypes.block_scale
def block_scale(values: list[float], max_exponent: int) -> int:
    """The exponent e of the scale 2^e that a block of numbers shares: element i is stored as values[i] / 2^e.

    e makes the best use of the element format, whose largest binade is 2^max_exponent to 2^(max_exponent + 1): it takes
    the block's largest magnitude there. Limits of an 8-bit scale: -127 <= e <= 127; a block of zeros gets -127.
    """
    raise NotImplementedError("dtypes.block_scale")  # your code here


# --------------------------------------------------------------------------------------------------- dtypes.pack_int4
def pack_int4(values: list[int]) -> list[int]:
    """Bytes (0 to 255) that hold two integers of 4 bits each, in two's complement, -8 to 7.

    The first of a pair is in the low half of its byte. An odd last one is followed by a zero.
    """
    packed = []
    raise NotImplementedError("dtypes.pack_int4")  # your code here
    return packed
