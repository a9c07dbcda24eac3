"""Number formats: seven functions in plain Python, in the order of notebooks/01_dtypes.ipynb, which explains them.

There are no tensors and no kernels here. A Python float is fp64, which holds every number of the smaller formats exactly.
So only the code that you write rounds anything.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import math


# ------------------------------------------------------------------------------------------------------ dtypes.decode
def decode(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a bit pattern of 1 + exponent_bits + mantissa_bits bits, by the rules of IEEE 754.

    The rules have three cases: an exponent field of all ones, of all zeros, and any other. The result may be infinite or NaN.
    """
    sign = bits >> (exponent_bits + mantissa_bits)
    exponent = bits >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = bits & (1 << mantissa_bits) - 1
    bias = 2 ** (exponent_bits - 1) - 1
    # BEGIN SOLUTION
    if exponent == 2**exponent_bits - 1:
        value = math.nan if mantissa else math.inf
    elif exponent == 0:
        value = mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)
    else:
        value = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    return -value if sign else value
    # END SOLUTION


# ------------------------------------------------------------------------------------------------------- dtypes.round
def round_to(value: float, mantissa_bits: int) -> float:
    """The number nearest to `value` among 0 and all +-(1 + k / 2^mantissa_bits) x 2^e, where k and e are integers.

    If `value` is in the middle between two of them, the result is the one with the even k. `value` lies between -1e290 and
    1e290, and may be as small as 5e-324; mantissa_bits lies between 1 and 23. The exponent e has no limits here.
    """
    # BEGIN SOLUTION
    fraction, exponent = math.frexp(value)  # value = fraction x 2^exponent, 1/2 <= |fraction| < 1
    steps = round(fraction * 2 ** (mantissa_bits + 1))  # Python's round takes ties to the even integer
    return math.ldexp(steps, exponent - mantissa_bits - 1)
    # END SOLUTION


# -------------------------------------------------------------------------------------------------- dtypes.accumulate
def stall(step: float, mantissa_bits: int) -> float:
    """The value at which a running sum stops. The sum starts at 0, `step` > 0 is added again and again, and after each addition
    the sum is rounded to `mantissa_bits` (to nearest, ties to even, as in round_to). At the result it no longer changes.

    `step` has no more than `mantissa_bits` mantissa bits. Find the result without adding: some of these sums would take months.
    """
    # BEGIN SOLUTION
    fraction, exponent = math.frexp(step)
    reach = exponent - 1 if fraction == 0.5 else exponent  # 2^reach is the first power of two that is not below step
    # From 2^(reach + mantissa_bits + 1) on, neighbours are 2 x 2^reach apart: step is at most half, and ties go back.
    return 2.0 ** (reach + mantissa_bits + 1)
    # END SOLUTION


# -------------------------------------------------------------------------------------------------- dtypes.stochastic
def round_stochastic(value: float, mantissa_bits: int, u: float) -> float:
    """One of the two neighbors of `value` among the numbers of round_to, or `value` itself if it is one of these numbers.

    `value` lies between -1e290 and 1e290, and may be as small as 5e-324. u is a random number, uniform in [0, 1). The result
    is the neighbor further from zero if u is less than the probability of that neighbor, and the other neighbor otherwise.
    The probability is such that the result is `value` on average.
    """
    # BEGIN SOLUTION
    fraction, exponent = math.frexp(abs(value))
    scaled = fraction * 2 ** (mantissa_bits + 1)
    lower = math.floor(scaled)
    chance = scaled - lower
    steps = lower + 1 if u < chance else lower
    return math.copysign(math.ldexp(steps, exponent - mantissa_bits - 1), value)
    # END SOLUTION


# -------------------------------------------------------------------------------------------------- dtypes.loss_scale
def loss_scale(overflowed: list[bool], scale: float, growth_interval: int) -> list[float]:
    """The loss scale of every step, and of the step after the last: len(overflowed) + 1 numbers.

    overflowed[i] says whether the scaled gradients of step i held an infinity or NaN. If they did, the step is thrown away and
    the next step has half the scale. After `growth_interval` good steps in a row at one scale, the next step has twice the
    scale. `scale` is the scale of the first step.
    """
    scales = [scale]
    # BEGIN SOLUTION
    good_steps = 0
    for bad in overflowed:
        good_steps = 0 if bad else good_steps + 1
        if bad:
            scale = scale / 2
        elif good_steps == growth_interval:
            scale = scale * 2
            good_steps = 0
        scales.append(scale)
    # END SOLUTION
    return scales


# ------------------------------------------------------------------------------------------------- dtypes.block_scale
def block_scale(values: list[float], max_exponent: int) -> int:
    """The exponent e of the scale 2^e that a block of numbers shares: element i is stored as values[i] / 2^e.

    The largest power of two in the element format is 2^max_exponent. Choose e so that the largest magnitude of the block,
    divided by 2^e, is at least 2^max_exponent and below 2^(max_exponent + 1). The scale is stored in 8 bits, so e is limited
    to -127 and 127. A block of zeros gets -127.
    """
    # BEGIN SOLUTION
    largest = max(abs(value) for value in values)
    if largest == 0:
        return -127
    exponent = math.frexp(largest)[1] - 1 - max_exponent
    return max(-127, min(127, exponent))
    # END SOLUTION


# --------------------------------------------------------------------------------------------------- dtypes.pack_int4
def pack_int4(values: list[int]) -> list[int]:
    """Bytes (0 to 255), each of which holds two of the integers from -8 to 7, in two's complement with 4 bits each.

    The first number of a pair is in the low half of its byte. If the list has an odd length, the last number shares its byte
    with a zero.
    """
    packed = []
    # BEGIN SOLUTION
    for i in range(0, len(values), 2):
        low = values[i] & 0xF  # without the mask the sign bits of a negative number spill into its neighbour
        high = values[i + 1] & 0xF if i + 1 < len(values) else 0
        packed.append(low | high << 4)
    # END SOLUTION
    return packed
