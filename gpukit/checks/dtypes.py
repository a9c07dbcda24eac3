"""The exercises of notebook 01: cases, hints, and the wrong answers that each check must recognise."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from gpukit.accounting import dtypes
from gpukit.accounting.dtypes import FORMATS, Format
from gpukit.grading.exercise import Case, FunctionExercise, Label, Misconception, Variant

NOTEBOOK = "01_dtypes"


def case(name: str, *args, tags: str = "") -> Case:
    return Case(name, args, frozenset(tags.split()))


# ------------------------------------------------------------------------------------------------------ dtypes.decode
_IEEE = (FORMATS["fp16"], FORMATS["bf16"], FORMATS["fp32"], FORMATS["fp8_e5m2"], Format("e3m4", 3, 4))


def _fields(bits: int, exponent_bits: int, mantissa_bits: int) -> tuple[int, int, float, int]:
    """Sign (+1, -1), exponent field, mantissa as a fraction of 1, bias."""
    sign, exponent, mantissa = Format("", exponent_bits, mantissa_bits).split(bits)
    return 1 - 2 * sign, exponent, mantissa / 2**mantissa_bits, 2 ** (exponent_bits - 1) - 1


def _decode_cases(rng: Random) -> list[Case]:
    cases = []
    for fmt in _IEEE:
        one, subnormal = fmt.encode(1.0), rng.randrange(1, 1 << fmt.mantissa_bits)
        for what, bits, tags in (
            ("1.0", one, ""),
            ("normal", rng.randrange(one + 1, fmt.max_bits), ""),
            ("negative", fmt.sign_bit | rng.randrange(1 << fmt.mantissa_bits, one), "negative"),
            ("subnormal", subnormal, "subnormal"),
            ("zero", 0, "zero"),
            ("infinity", fmt.max_bits + 1, "special"),
            ("-infinity", fmt.sign_bit | fmt.max_bits + 1, "special negative"),
            ("NaN", fmt.encode(math.nan), "special"),
        ):
            name = f"{fmt.name} {fmt.hex(bits)} ({what})"
            cases.append(case(name, bits, fmt.exponent_bits, fmt.mantissa_bits, tags=tags))
    return cases


def _decode(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    return Format("", exponent_bits, mantissa_bits).decode(bits)


def _decode_zero_as_normal(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    sign, exponent, fraction, bias = _fields(bits, exponent_bits, mantissa_bits)
    return _decode(bits, exponent_bits, mantissa_bits) if exponent else sign * (1 + fraction) * 2.0**-bias


def _decode_subnormal_exponent(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    sign, exponent, fraction, bias = _fields(bits, exponent_bits, mantissa_bits)
    return _decode(bits, exponent_bits, mantissa_bits) if exponent else sign * fraction * 2.0**-bias


def _decode_flushed(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    _, exponent, _, _ = _fields(bits, exponent_bits, mantissa_bits)
    return _decode(bits, exponent_bits, mantissa_bits) if exponent else 0.0


def _decode_all_ones_as_number(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    sign, exponent, fraction, bias = _fields(bits, exponent_bits, mantissa_bits)
    value = _decode(bits, exponent_bits, mantissa_bits)
    return value if math.isfinite(value) else sign * (1 + fraction) * 2.0 ** (exponent - bias)


def _decode_no_implicit_one(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    sign, exponent, fraction, bias = _fields(bits, exponent_bits, mantissa_bits)
    value = _decode(bits, exponent_bits, mantissa_bits)
    return sign * fraction * 2.0 ** (exponent - bias) if exponent and math.isfinite(value) else value


def _decode_one_more_bias(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    return _decode(bits, exponent_bits, mantissa_bits) / 2


DECODE = FunctionExercise(
    id="dtypes.decode",
    title="What a bit pattern means",
    notebook=NOTEBOOK,
    function="decode",
    label=Label(2, 10, "the value formula, subnormal numbers, infinity and NaN"),
    hints=(
        "fp16 has 1,024 patterns whose exponent field is 0. If they followed the usual formula, how far apart would "
        "they be, and which of them would be zero?",
        "An exponent field of 0 keeps the exponent of the smallest normal number and drops the leading 1; an exponent "
        "field of all ones holds no numbers at all, and its mantissa says which of the two it is.",
        "Branch on the exponent field. All ones: infinity when the mantissa is 0, NaN otherwise. Zero: the mantissa "
        "as a fraction of 1, times two to the power of one minus the bias. Else: one plus that fraction, times two to "
        "the power of field minus bias. Put the sign on at the end.",
    ),
    cases=_decode_cases,
    expected=_decode,
    misconceptions=(
        Misconception(
            "zero-is-normal",
            "with exponent field 0 you still add the leading 1, so pattern 0 is not zero. How do these formats write "
            "zero, and what else has that exponent field?",
            gives=_decode_zero_as_normal,
        ),
        Misconception(
            "subnormal-exponent",
            "your subnormal numbers are half of what they should be, and there is a gap below the smallest normal "
            "number. Which exponent makes them go on where the normal ones end?",
            gives=_decode_subnormal_exponent,
        ),
        Misconception(
            "flush-to-zero",
            "every pattern with exponent field 0 is zero in yours. That is what some GPU instructions do to be quick "
            "(flush to zero), but the format has numbers there. What are their values?",
            gives=_decode_flushed,
        ),
        Misconception(
            "no-specials",
            "the largest exponent field is read like any other, so there is no infinity and no NaN. Which values must "
            "a division by zero and 0/0 have?",
            gives=_decode_all_ones_as_number,
        ),
        Misconception(
            "nan-is-infinity",
            "NaN comes out as infinity: both have the largest exponent field. Which other field tells them apart?",
            gives=lambda *args: math.inf if math.isnan(_decode(*args)) else _decode(*args),
        ),
        Misconception(
            "no-leading-one",
            "normal numbers lack their leading 1, the bit that every one of them has and that is therefore not stored. "
            "What is pattern 1.0, whose mantissa is 0, in yours?",
            gives=_decode_no_implicit_one,
        ),
        Misconception(
            "bias",
            "every number is half of what it should be. What is the exponent field of 1.0, and what must the bias be?",
            gives=_decode_one_more_bias,
        ),
        Misconception(
            "no-sign",
            "negative numbers come out positive. What does the highest bit say?",
            gives=lambda *args: abs(_decode(*args)),
        ),
    ),
    wrong=(
        Variant(
            "exponent field 0 read as normal",
            (
                (
                    " elif exponent == 0:\n        value = mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)\n    else",
                    " else",
                ),
            ),
            diagnosis="zero-is-normal",
        ),
        Variant(
            "subnormals with exponent -bias", (("2.0 ** (1 - bias)", "2.0**-bias"),), diagnosis="subnormal-exponent"
        ),
        Variant(
            "subnormals flushed to zero",
            (("value = mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)", "value = 0.0"),),
            diagnosis="flush-to-zero",
        ),
        Variant(
            "no infinity and no NaN",
            (("if exponent == 2**exponent_bits - 1:", "if exponent == 2**exponent_bits:"),),
            diagnosis="no-specials",
        ),
        Variant(
            "NaN read as infinity",
            (("value = math.nan if mantissa else math.inf", "value = math.inf"),),
            diagnosis="nan-is-infinity",
        ),
        Variant(
            "no leading one",
            (("value = (1 + mantissa / 2**mantissa_bits) *", "value = mantissa / 2**mantissa_bits *"),),
            diagnosis="no-leading-one",
        ),
        Variant("sign forgotten", (("return -value if sign else value", "return value"),), diagnosis="no-sign"),
        Variant(
            "bias one too large",
            (("    bias = 2 ** (exponent_bits - 1) - 1\n", "    bias = 2 ** (exponent_bits - 1)\n"),),
            diagnosis="bias",
        ),
    ),
    right=(
        Variant(
            "one formula for normal and subnormal",
            source="""import math


def decode(bits, exponent_bits, mantissa_bits):
    fields = f"{bits:0{1 + exponent_bits + mantissa_bits}b}"
    exponent, mantissa = int(fields[1 : 1 + exponent_bits], 2), int(fields[1 + exponent_bits :], 2)
    if "0" not in fields[1 : 1 + exponent_bits]:
        return float("nan") if mantissa else float("-inf" if fields[0] == "1" else "inf")
    implicit = min(exponent, 1)
    significand = mantissa + implicit * 2**mantissa_bits
    value = math.ldexp(significand, exponent + 1 - implicit - 2 ** (exponent_bits - 1) + 1 - mantissa_bits)
    return math.copysign(value, 0.5 - int(fields[0]))
""",
        ),
        Variant(
            "the mantissa bit by bit",
            source="""def decode(bits, exponent_bits, mantissa_bits):
    exponent = (bits >> mantissa_bits) % 2**exponent_bits
    power = 2.0 ** (max(exponent, 1) - (2 ** (exponent_bits - 1) - 1))
    value = power if exponent > 0 else 0.0
    for i in range(mantissa_bits):
        power = power / 2
        if bits >> (mantissa_bits - 1 - i) & 1:
            value += power
    if exponent == 2**exponent_bits - 1:
        value = float("inf")
        if bits % 2**mantissa_bits:
            value = value - value
    if bits >> exponent_bits + mantissa_bits:
        value = value * -1
    return value
""",
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------- dtypes.round
def _steps(value: float, mantissa_bits: int) -> tuple[float, int]:
    """(value in units of its spacing, exponent of the spacing)."""
    fraction, exponent = math.frexp(value)
    return fraction * 2 ** (mantissa_bits + 1), exponent - mantissa_bits - 1


def _round(value: float, mantissa_bits: int) -> float:
    steps, unit = _steps(value, mantissa_bits)
    return math.ldexp(round(steps), unit)


def _round_half_away(value: float, mantissa_bits: int) -> float:
    steps, unit = _steps(abs(value), mantissa_bits)
    return math.copysign(math.ldexp(math.floor(steps + 0.5), unit), value)


def _round_half_up(value: float, mantissa_bits: int) -> float:
    steps, unit = _steps(value, mantissa_bits)
    return math.ldexp(math.floor(steps + 0.5), unit)


def _round_cut(value: float, mantissa_bits: int) -> float:
    steps, unit = _steps(value, mantissa_bits)
    return math.ldexp(math.trunc(steps), unit)


def _round_log2_cut(value: float, mantissa_bits: int) -> float:
    """int() cuts towards zero, so numbers below 1 get the exponent above their own."""
    if value == 0:
        return 0.0
    unit = 2.0 ** (int(math.log2(abs(value))) - mantissa_bits)
    return round(value / unit) * unit


def _round_cases(rng: Random) -> list[Case]:
    def number(k: int, rest: float, low: int, high: int) -> float:
        """An odd count of spacings and `rest` of one: twice or half the spacing gives another number."""
        return math.ldexp(2**k + 2 * rng.randrange(2 ** (k - 1)) + 1 + rest, rng.randint(low, high) - k)

    cases = []
    for k in (10, 7, 3, 23):
        for what, value, tags in (
            ("above 1", number(k, -5 / 16, 1, 6), ""),
            ("below 1", number(k, 5 / 16, -6, -2), ""),
            ("negative", -number(k, 5 / 16, -4, 4), "negative"),
            ("tie", number(k, 0.5, -4, 4), "tie"),
            ("tie", number(k, -0.5, -4, 4), "tie"),
            ("negative tie", -number(k, -0.5, -4, 4), "negative tie"),
            ("exact", number(k, 0, -6, 6), ""),
            ("just below a power of 2", math.ldexp(2 - 2.0 ** -(k + 3), rng.randint(-6, 6)), ""),
        ):
            cases.append(case(f"{value!r} to {k} bits ({what})", value, k, tags=tags))
    return [*cases, case("0 to 10 bits", 0.0, 10, tags="zero"), case("1e-300 to 10 bits", 1e-300, 10)]


ROUND = FunctionExercise(
    id="dtypes.round",
    title="Round to a number of mantissa bits",
    notebook=NOTEBOOK,
    function="round_to",
    label=Label(2, 10, "spacing relative to the value, rounding to nearest, ties to even"),
    hints=(
        "Between 1,024 and 2,048 fp16 holds every integer, between 1 and 2 it holds steps of about 0.001. In which "
        "unit is rounding the same question in both places?",
        "Divide by the spacing at the value, round to an integer, multiply by the spacing again. The spacing is a "
        "power of two that follows from the exponent of the value; math.frexp gives that exponent exactly, and 0 for "
        "0.",
        "math.frexp splits the value into a fraction from 1/2 to 1 and an exponent. The fraction times two to the "
        "power of mantissa_bits + 1 counts the spacings; Python's round takes ties of such a count to the even one; "
        "math.ldexp puts the power of two back, with mantissa_bits + 1 taken from the exponent.",
    ),
    cases=_round_cases,
    expected=_round,
    misconceptions=(
        Misconception(
            "truncated",
            "the bits that do not fit are cut off, so every result lies towards zero. How far off can that be, and "
            "how far off is the nearest number at most?",
            gives=_round_cut,
        ),
        Misconception(
            "floored",
            "every result lies below the value, for negative numbers as well. Is that the nearest number?",
            gives=lambda value, k: math.ldexp(math.floor(_steps(value, k)[0]), _steps(value, k)[1]),
        ),
        Misconception(
            "ties-away",
            "only ties differ: yours always go away from zero. Over many additions that drifts; which neighbour of a "
            "tie does IEEE 754 take, so that it is up as often as down?",
            gives=_round_half_away,
        ),
        Misconception(
            "ties-up",
            "only ties differ: yours always go up. Over many additions that drifts; which neighbour of a tie does "
            "IEEE 754 take, so that it is up as often as down?",
            gives=_round_half_up,
        ),
        Misconception(
            "absolute-spacing",
            "yours rounds to multiples of 2^-mantissa_bits, whatever the size of the value. That is fixed point: how "
            "far apart are floating-point numbers near 1,000, and near 0.001?",
            gives=lambda value, k: round(value * 2**k) / 2**k,
        ),
        Misconception(
            "one-bit-short",
            "yours keeps one bit less than it should. The leading 1 of a number is not stored: is it one of the "
            "mantissa_bits?",
            gives=lambda value, k: _round(value, k - 1),
        ),
        Misconception(
            "one-bit-more",
            "yours keeps one bit more than it should. math.frexp's fraction starts at 1/2, not at 1: how many bits lie "
            "after its leading one?",
            gives=lambda value, k: _round(value, k + 1),
        ),
        Misconception(
            "decimal-digits",
            "yours keeps mantissa_bits decimal places. The bits of a mantissa are halves, quarters and eighths.",
            gives=lambda value, k: round(value, k),
        ),
        Misconception(
            "exponent-cut",
            "numbers below 1 are rounded too coarsely. The exponent of 0.3 is floor(log2(0.3)) = -2; where does a "
            "conversion to int put -1.74?",
            gives=_round_log2_cut,
        ),
    ),
    wrong=(
        Variant("cut off", (("steps = round(fraction * 2", "steps = int(fraction * 2"),), diagnosis="truncated"),
        Variant("floor", (("steps = round(fraction * 2", "steps = math.floor(fraction * 2"),), diagnosis="floored"),
        Variant(
            "half added before the floor",
            (
                (
                    "steps = round(fraction * 2 ** (mantissa_bits + 1))",
                    "steps = math.floor(fraction * 2 ** (mantissa_bits + 1) + 0.5)",
                ),
            ),
            diagnosis="ties-up",
        ),
        Variant(
            "half added to the magnitude",
            source="""import math


def round_to(value, mantissa_bits):
    fraction, exponent = math.frexp(abs(value))
    steps = math.floor(fraction * 2 ** (mantissa_bits + 1) + 0.5)
    return math.copysign(math.ldexp(steps, exponent - mantissa_bits - 1), value)
""",
            diagnosis="ties-away",
        ),
        Variant(
            "fixed point",
            source="def round_to(value, bits):\n    return round(value * 2**bits) / 2**bits\n",
            diagnosis="absolute-spacing",
        ),
        Variant(
            "the leading one counted",
            source="""import math


def round_to(value, mantissa_bits):
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * 2**mantissa_bits), exponent - mantissa_bits)
""",
            diagnosis="one-bit-short",
        ),
        Variant(
            "frexp taken to start at 1",
            source="""import math


def round_to(value, mantissa_bits):
    fraction, exponent = math.frexp(value)
    return round(fraction * 2 ** (mantissa_bits + 2)) * 2.0 ** (exponent - mantissa_bits - 2)
""",
            diagnosis="one-bit-more",
        ),
        Variant(
            "decimal places",
            source="def round_to(value, mantissa_bits):\n    return round(value, mantissa_bits)\n",
            diagnosis="decimal-digits",
        ),
        Variant(
            "exponent cut towards zero",
            source="""import math


def round_to(value, mantissa_bits):
    if value == 0:
        return 0.0
    spacing = 2.0 ** (int(math.log2(abs(value))) - mantissa_bits)
    return round(value / spacing) * spacing
""",
            diagnosis="exponent-cut",
        ),
        Variant(
            "logarithm of zero",
            source="""import math


def round_to(value, mantissa_bits):
    spacing = 2.0 ** (math.floor(math.log2(abs(value))) - mantissa_bits)
    return round(value / spacing) * spacing
""",
            diagnosis="exception",
        ),
    ),
    right=(
        Variant(
            "divide by the spacing",
            source="""import math


def round_to(value, mantissa_bits):
    if value == 0:
        return value
    spacing = 2.0 ** (math.floor(math.log2(abs(value))) - mantissa_bits)
    count, rest = divmod(abs(value), spacing)
    if rest > spacing / 2 or (rest == spacing / 2 and count % 2 == 1):
        count += 1
    return math.copysign(count * spacing, value)
""",
        ),
        Variant(
            "let fp64 round: add a large number and take it away",
            source="""import math


def round_to(value, mantissa_bits):
    exponent = math.frexp(value)[1] - 1
    large = math.ldexp(1.5, exponent + 52 - mantissa_bits)
    return (value + large) - large
""",
        ),
    ),
)


# -------------------------------------------------------------------------------------------------- dtypes.accumulate
def _ceil_log2(step: float) -> int:
    fraction, exponent = math.frexp(step)
    return exponent - 1 if fraction == 0.5 else exponent


def _floor_log2(step: float) -> int:
    return math.frexp(step)[1] - 1


def _stall(step: float, mantissa_bits: int) -> float:
    return 2.0 ** (_ceil_log2(step) + mantissa_bits + 1)


def _stall_cases(rng: Random) -> list[Case]:
    cases = [
        case("1 in 10 bits (fp16)", 1.0, 10),
        case("1 in 7 bits (bf16)", 1.0, 7),
        case("1 in 23 bits (fp32)", 1.0, 23),
        case("1 in 52 bits (fp64)", 1.0, 52),
    ]
    for k, name in ((10, "fp16"), (7, "bf16"), (3, "e4m3"), (23, "fp32")):
        tenth, power = _round(0.1, k), 2.0 ** rng.randint(-9, 9)
        other = _round(math.ldexp(rng.uniform(1.26, 1.9), rng.randint(-9, 9)), k)
        cases += [
            case(f"{tenth!r} in {k} bits ({name})", tenth, k),
            case(f"{power!r} in {k} bits ({name})", power, k, tags="tie"),
            case(f"{other!r} in {k} bits ({name})", other, k),
        ]
    return cases


ACCUMULATE = FunctionExercise(
    id="dtypes.accumulate",
    title="Where a low-precision sum stops",
    notebook=NOTEBOOK,
    function="stall",
    label=Label(3, 15, "why sums and dot products are kept in fp32"),
    hints=(
        "Adding 1 in fp16 goes on to 2,048 and not to 2,049. How far apart are the numbers from 2,048 on, and where "
        "does 2,049 lie between them?",
        "The sum stops as soon as the step is at most half the spacing: the rounded sum is then the old one, on a tie "
        "because the sum stands on a power of two, which is even. The spacing doubles at every power of two.",
        "Find the first power of two whose spacing, it divided by two to the power of mantissa_bits, is at least "
        "twice the step. For a step that is a power of two that is the step times two to the power of mantissa_bits + "
        "1; for any other step the next power of two above it takes its place.",
    ),
    cases=_stall_cases,
    expected=_stall,
    misconceptions=(
        Misconception(
            "whole-spacing",
            "yours stops where the spacing has grown to the step itself. There each addition still reaches the next "
            "number: how small must a step be, compared with the spacing, to round back?",
            gives=lambda step, k: 2.0 ** (_ceil_log2(step) + k),
        ),
        Misconception(
            "tie-goes-on",
            "steps that are powers of two should stop one binade earlier: the exact sum is a tie there. Which of the "
            "two neighbours is the even one?",
            gives=lambda step, k: 2.0 ** (_floor_log2(step) + k + 2),
        ),
        Misconception(
            "step-rounded-down",
            "steps that are not powers of two go on for another binade: a step of 1.5 is more than half of a spacing "
            "of 2. Which power of two must half the spacing reach?",
            gives=lambda step, k: 2.0 ** (_floor_log2(step) + k + 1),
        ),
        Misconception(
            "step-ignored",
            "yours is right for a step of 1 only. How does the sum at which it stops depend on the size of the step?",
            gives=lambda step, k: 2.0 ** (k + 1),
        ),
        Misconception(
            "not-a-power",
            "yours is the step times 2^(mantissa_bits + 1), which is right where the step is a power of two. Where "
            "does the spacing change, that is, at which numbers can a sum come to a halt?",
            gives=lambda step, k: step * 2 ** (k + 1),
        ),
        Misconception(
            "count-of-steps",
            "that is how many spacings of the step's size fit, not the value of the sum. What is the sum after that "
            "many?",
            gives=lambda step, k: _stall(step, k) / step,
        ),
    ),
    wrong=(
        Variant(
            "spacing as large as the step",
            (("return 2.0 ** (reach + mantissa_bits + 1)", "return 2.0 ** (reach + mantissa_bits)"),),
            diagnosis="whole-spacing",
        ),
        Variant(
            "a tie goes up",
            (("reach = exponent - 1 if fraction == 0.5 else exponent  #", "reach = exponent  #"),),
            diagnosis="tie-goes-on",
        ),
        Variant(
            "step rounded down to a power of two",
            (("reach = exponent - 1 if fraction == 0.5 else exponent  #", "reach = exponent - 1  #"),),
            diagnosis="step-rounded-down",
        ),
        Variant(
            "as for a step of 1",
            (("return 2.0 ** (reach + mantissa_bits + 1)", "return 2.0 ** (mantissa_bits + 1)"),),
            diagnosis="step-ignored",
        ),
        Variant(
            "a multiple of the step",
            (("return 2.0 ** (reach + mantissa_bits + 1)", "return step * 2.0 ** (mantissa_bits + 1)"),),
            diagnosis="not-a-power",
        ),
        Variant(
            "number of additions",
            (("return 2.0 ** (reach + mantissa_bits + 1)", "return 2.0 ** (reach + mantissa_bits + 1) / step"),),
            diagnosis="count-of-steps",
        ),
        Variant(
            "adding until it stops",
            source="""import math


def stall(step, mantissa_bits):
    total = 0.0
    while True:
        fraction, exponent = math.frexp(total + step)
        following = math.ldexp(round(fraction * 2 ** (mantissa_bits + 1)), exponent - mantissa_bits - 1)
        if following == total:
            return total
        total = following
""",
            diagnosis="timeout",
        ),
    ),
    right=(
        Variant(
            "double until the spacing is large enough",
            source="""def stall(step, mantissa_bits):
    total = 1.0
    while total > step:
        total /= 2
    while total / 2**mantissa_bits < 2 * step:
        total *= 2
    return total
""",
        ),
        Variant(
            "logarithm rounded up",
            source="""import math


def stall(step, mantissa_bits):
    half_spacing = 2.0 ** math.ceil(math.log2(step))
    spacing = 2 * half_spacing
    return spacing * 2**mantissa_bits
""",
        ),
    ),
    timeout_s=5.0,
)


# -------------------------------------------------------------------------------------------------- dtypes.stochastic
def _stochastic(value: float, k: int, up: Callable[[float], bool]) -> float:
    """Away from zero where `up` says so of the fraction of the gap that the value has covered."""
    steps, unit = _steps(abs(value), k)
    lower = math.floor(steps)
    return math.copysign(math.ldexp(lower + up(steps - lower), unit), value)


def _stochastic_from_below(value: float, k: int, u: float) -> float:
    steps, unit = _steps(value, k)
    return math.ldexp(math.floor(steps) + (u < steps - math.floor(steps)), unit)


def _stochastic_fixed_point(value: float, k: int, u: float) -> float:
    steps = abs(value) * 2**k
    return math.copysign((math.floor(steps) + (u < steps - math.floor(steps))) / 2**k, value)


def _stochastic_cases(rng: Random) -> list[Case]:
    cases = []
    for k in (10, 7, 3):
        for what, sign, chances, us in (
            ("just above a neighbour", 1, (2, 3), (0.05, 0.4, 0.7, 0.99)),
            ("just below a neighbour", 1, (13, 14), (0.01, 0.3, 0.6, 0.95)),
            ("negative", -1, (4, 5), (0.1, 0.6, 0.9)),
        ):
            for u in us:
                count = 2**k + rng.randrange(2**k) + rng.randint(*chances) / 16
                value = sign * math.ldexp(count, rng.choice((-6, -3, 2, 4)) - k)
                tags = "negative" if sign < 0 else ""
                cases.append(case(f"{value!r} to {k} bits, u {u} ({what})", value, k, u, tags=tags))
        exact = math.ldexp(2**k + rng.randrange(2**k), rng.randint(-5, 3) - k)
        cases += [case(f"{exact!r} to {k} bits, u {u} (exact)", exact, k, u) for u in (0.0, 0.3, 0.999)]
    return [*cases, case("0 to 10 bits, u 0", 0.0, 10, 0.0, tags="zero")]


STOCHASTIC = FunctionExercise(
    id="dtypes.stochastic",
    title="Stochastic rounding",
    notebook=NOTEBOOK,
    function="round_stochastic",
    label=Label(3, 15, "rounding that is right on average, for weights in bf16"),
    hints=(
        "A value lies a tenth of the way from one neighbour to the next. Over a thousand draws the average must be the "
        "value: how often must it go to the next one?",
        "The chance of the neighbour further from zero is the fraction of the gap that the value has covered. It is 0 "
        "for a number that is representable, so that one never moves.",
        "Count spacings in the magnitude as in round_to, but take the floor of the count. What is left of the count "
        "is the chance: add one if u is less than it. Put the power of two and the sign back.",
    ),
    cases=_stochastic_cases,
    expected=lambda value, k, u: _stochastic(value, k, lambda chance: u < chance),
    misconceptions=(
        Misconception(
            "nearest",
            "yours takes the nearest neighbour whatever u is. A weight update of less than half a spacing is then lost "
            "every time; how often should it come through?",
            gives=lambda value, k, u: _stochastic(value, k, lambda chance: chance > 0.5),
        ),
        Misconception(
            "coin-toss",
            "yours takes either neighbour half of the time, wherever the value lies between them. What is the average "
            "of the results for a value that is almost at one of them?",
            gives=lambda value, k, u: _stochastic(value, k, lambda chance: 0 < chance and u < 0.5),
        ),
        Misconception(
            "moves-exact-numbers",
            "a number that is representable must stay where it is, and in yours a toss can move it. What is its "
            "chance?",
            gives=lambda value, k, u: _stochastic(value, k, lambda chance: u < 0.5),
        ),
        Misconception(
            "inverted",
            "the closer the value is to the neighbour further from zero, the rarer yours takes it. Is the chance the "
            "part of the gap that is covered, or the part that is left?",
            gives=lambda value, k, u: _stochastic(value, k, lambda chance: 0 < chance and u < 1 - chance),
        ),
        Misconception(
            "other-draws",
            "on average yours is right: adding u and cutting off is how hardware does it. Here the neighbour further "
            "from zero belongs to the small u, so that results can be compared. Which u should take it?",
            gives=lambda value, k, u: _stochastic(value, k, lambda chance: u >= 1 - chance),
        ),
        Misconception(
            "added-then-nearest",
            "u is added and the result is rounded to nearest, so values go up too often, by half a spacing on average. "
            "What must follow the addition of u: rounding or cutting?",
            gives=lambda value, k, u: math.copysign(
                math.ldexp(round(_steps(abs(value), k)[0] + u), _steps(value, k)[1]), value
            ),
        ),
        Misconception(
            "negative-floor",
            "only negative values differ: floor goes to the neighbour further from zero there. Which neighbour does a "
            "small u take?",
            gives=_stochastic_from_below,
        ),
        Misconception(
            "absolute-spacing",
            "yours uses a spacing of 2^-mantissa_bits for every value. How far apart are the neighbours near 1,000, "
            "and near 0.001?",
            gives=_stochastic_fixed_point,
        ),
    ),
    wrong=(
        Variant(
            "to nearest", (("lower + 1 if u < chance else", "lower + 1 if chance > 0.5 else"),), diagnosis="nearest"
        ),
        Variant(
            "a coin",
            (("lower + 1 if u < chance else", "lower + 1 if u < 0.5 and chance else"),),
            diagnosis="coin-toss",
        ),
        Variant(
            "a coin, exact numbers too",
            (("lower + 1 if u < chance else", "lower + 1 if u < 0.5 else"),),
            diagnosis="moves-exact-numbers",
        ),
        Variant(
            "chance the wrong way round",
            (("chance = scaled - lower", "chance = math.ceil(scaled) - scaled"),),
            diagnosis="inverted",
        ),
        Variant(
            "u added, then cut",
            (
                ("    lower = math.floor(scaled)\n", ""),
                ("    chance = scaled - lower\n", ""),
                ("steps = lower + 1 if u < chance else lower", "steps = math.floor(scaled + u)"),
            ),
            diagnosis="other-draws",
        ),
        Variant(
            "u added, then rounded",
            (
                ("    lower = math.floor(scaled)\n", ""),
                ("    chance = scaled - lower\n", ""),
                ("steps = lower + 1 if u < chance else lower", "steps = round(scaled + u)"),
            ),
            diagnosis="added-then-nearest",
        ),
        Variant(
            "floor of negative numbers",
            (
                ("math.frexp(abs(value))", "math.frexp(value)"),
                (
                    "return math.copysign(math.ldexp(steps, exponent - mantissa_bits - 1), value)",
                    "return 2.0 ** (exponent - mantissa_bits - 1) * steps",
                ),
            ),
            diagnosis="negative-floor",
        ),
        Variant(
            "fixed point",
            source="""import math


def round_stochastic(value, mantissa_bits, u):
    scaled = abs(value) * 2**mantissa_bits
    steps = math.floor(scaled) + (u < scaled - math.floor(scaled))
    return math.copysign(steps / 2**mantissa_bits, value)
""",
            diagnosis="absolute-spacing",
        ),
    ),
    right=(
        Variant(
            "both neighbours, then the choice",
            source="""import math


def round_stochastic(value, mantissa_bits, u):
    if value == 0:
        return 0.0
    spacing = 2.0 ** (math.floor(math.log2(abs(value))) - mantissa_bits)
    near = math.trunc(value / spacing) * spacing
    far = near + math.copysign(spacing, value)
    return far if u * spacing < abs(value - near) else near
""",
        ),
        Variant(
            "one minus u added, then cut",
            source="""import math


def round_stochastic(value, mantissa_bits, u):
    fraction, exponent = math.frexp(value)
    count, rest = divmod(abs(fraction) * 2 ** (mantissa_bits + 1), 1)
    count += math.ceil(rest - u) if rest > u else 0
    return math.ldexp(count if value >= 0 else -count, exponent - (mantissa_bits + 1))
""",
        ),
    ),
)


# -------------------------------------------------------------------------------------------------- dtypes.loss_scale
def _loss_scale(
    overflowed: list[bool],
    scale: float,
    growth_interval: int,
    *,
    reset_on_overflow: bool = True,
    reset_on_growth: bool = True,
    late: int = 0,
    shrink: float = 0.5,
) -> list[float]:
    scales, good = [scale], 0
    for bad in overflowed:
        if bad:
            scale, good = scale * shrink, 0 if reset_on_overflow else good
        else:
            good += 1
            if good == growth_interval + late or (not reset_on_growth and good > growth_interval):
                scale, good = scale * 2, 0 if reset_on_growth else good
        scales.append(scale)
    return scales


def _scale_grows_every_interval(overflowed: list[bool], scale: float, growth_interval: int) -> list[float]:
    scales = [scale]
    for i, bad in enumerate(overflowed):
        scale = scale / 2 if bad else scale * 2 if (i + 1) % growth_interval == 0 else scale
        scales.append(scale)
    return scales


def _loss_scale_cases(rng: Random) -> list[Case]:
    random = [[rng.random() < chance for _ in range(60)] for chance in (0.05, 0.2, 0.4)]
    good, bad = [False], [True]
    return [
        case("no step at all", [], 65536.0, 4),
        case("5 good steps (interval 8)", good * 5, 1024.0, 8),
        case("4 good steps (interval 4)", good * 4, 1024.0, 4),
        case("13 good steps (interval 4)", good * 13, 1024.0, 4),
        case("one overflow", bad, 65536.0, 4, tags="overflow"),
        case("3 overflows in a row (interval 2)", bad * 3, 65536.0, 2, tags="overflow"),
        case("2 good + 1 overflow + 3 good (interval 4)", good * 2 + bad + good * 3, 65536.0, 4, tags="overflow"),
        case("3 good + 1 overflow + 5 good (interval 4)", good * 3 + bad + good * 5, 65536.0, 4, tags="overflow"),
        case("interval 1", [False, True, False, False, True], 8.0, 1, tags="overflow"),
        case("60 random steps (interval 3)", random[0], 65536.0, 3, tags="overflow"),
        case("60 random steps (interval 5)", random[1], 65536.0, 5, tags="overflow"),
        case("60 random steps (interval 2)", random[2], 2.0**40, 2, tags="overflow"),
    ]


LOSS_SCALE = FunctionExercise(
    id="dtypes.loss_scale",
    title="A dynamic loss scale",
    notebook=NOTEBOOK,
    function="loss_scale",
    label=Label(2, 10, "keeping fp16 gradients between vanishing and overflowing"),
    hints=(
        "Which fact about the past does the next scale depend on, besides the scale itself? When does that fact start "
        "again from nothing?",
        "Count good steps. The count goes back to 0 in two places: after an overflow, because a row is broken, and "
        "after the scale has grown, because the steps before were good at another scale.",
        "For each step: if it overflowed, halve the scale and set the count to 0; else add 1 to the count and, when "
        "it has reached growth_interval, double the scale and set the count to 0. Append the scale at the end of "
        "either branch.",
    ),
    cases=_loss_scale_cases,
    expected=_loss_scale,
    misconceptions=(
        Misconception(
            "count-kept-on-overflow",
            "good steps from before an overflow still count after it, so the scale grows too early, back into the "
            "overflow. What does in a row mean?",
            gives=lambda *args: _loss_scale(*args, reset_on_overflow=False),
        ),
        Misconception(
            "count-kept-on-growth",
            "after the first growth yours doubles at every good step. At which scale were the steps good that it "
            "counts?",
            gives=lambda *args: _loss_scale(*args, reset_on_growth=False),
        ),
        Misconception(
            "one-step-late",
            "yours grows one step late: after growth_interval good steps the next one already has the larger scale.",
            gives=lambda *args: _loss_scale(*args, late=1),
        ),
        Misconception(
            "clock",
            "yours grows at fixed steps, whatever happened since. After an overflow, how many good steps must pass?",
            gives=_scale_grows_every_interval,
        ),
        Misconception(
            "wrong-direction",
            "an overflow means that the scaled gradients were too large. Which way should the scale go?",
            gives=lambda *args: _loss_scale(*args, shrink=2.0),
        ),
        Misconception(
            "never-shrinks",
            "yours does not shrink after an overflow, so the next step overflows as well. What should change?",
            gives=lambda *args: _loss_scale(*args, shrink=1.0),
        ),
        Misconception(
            "never-grows",
            "yours never grows, and after one unlucky step small gradients stay lost for good. When may it try again?",
            gives=lambda overflowed, scale, interval: _loss_scale(overflowed, scale, len(overflowed) + 1),
        ),
    ),
    wrong=(
        Variant(
            "count survives an overflow",
            (("good_steps = 0 if bad else good_steps + 1", "good_steps = good_steps if bad else good_steps + 1"),),
            diagnosis="count-kept-on-overflow",
        ),
        Variant(
            "count survives a growth",
            (
                ("elif good_steps == growth_interval:", "elif good_steps >= growth_interval:"),
                ("            scale = scale * 2\n            good_steps = 0\n", "            scale = scale * 2\n"),
            ),
            diagnosis="count-kept-on-growth",
        ),
        Variant(
            "more than the interval",
            (("elif good_steps == growth_interval:", "elif good_steps > growth_interval:"),),
            diagnosis="one-step-late",
        ),
        Variant(
            "by the clock",
            (
                ("for bad in overflowed:", "for step, bad in enumerate(overflowed):"),
                ("elif good_steps == growth_interval:", "elif (step + 1) % growth_interval == 0:"),
            ),
            diagnosis="clock",
        ),
        Variant("doubled on overflow", (("scale = scale / 2", "scale = scale * 2.0"),), diagnosis="wrong-direction"),
        Variant(
            "never halved", (("            scale = scale / 2\n", "            pass\n"),), diagnosis="never-shrinks"
        ),
        Variant(
            "never doubled",
            (("            scale = scale * 2\n            good_steps = 0\n", "            good_steps = 0\n"),),
            diagnosis="never-grows",
        ),
        Variant(
            "last scale missing",
            (("        scales.append(scale)\n", ""), ("return scales", "return scales + [scale] * 0")),
            diagnosis="shape",
        ),
    ),
    right=(
        Variant(
            "count down to the next growth",
            source="""def loss_scale(overflowed, scale, growth_interval):
    scales, until_growth = [], growth_interval
    for bad in overflowed:
        scales.append(scale)
        if bad:
            scale *= 0.5
            until_growth = growth_interval
            continue
        until_growth -= 1
        if until_growth == 0:
            scale *= 2
            until_growth = growth_interval
    return [*scales, scale]
""",
        ),
        Variant(
            "remember the last change",
            source="""def loss_scale(overflowed, scale, growth_interval):
    scales = [scale]
    since = 0
    for step, bad in enumerate(overflowed, start=1):
        factor = 0.5 if bad else 2.0 if step - since == growth_interval else 1.0
        if factor != 1.0:
            since = step
        scales.append(scales[-1] * factor)
    return scales
""",
        ),
    ),
)


# ------------------------------------------------------------------------------------------------- dtypes.block_scale
def _clamp(exponent: int) -> int:
    return max(-127, min(127, exponent))


def _scale_of(largest: float, max_exponent: int) -> int:
    return _clamp(_floor_log2(largest) - max_exponent) if largest > 0 else -127


def _block_cases(rng: Random) -> list[Case]:
    cases = []
    for top, name in ((8, "e4m3"), (15, "e5m2"), (2, "e2m1")):
        size = math.ldexp(rng.uniform(1.1, 1.9), rng.randint(-20, 20))
        small = [rng.uniform(-0.4, 0.4) * size for _ in range(31)]
        power = math.ldexp(1.0, rng.randint(-30, 30))
        for what, values, tags in (
            ("32 numbers", [*small, size], ""),
            ("the largest one negative", [-size, *small], "negative"),
            ("the largest a power of two", [*(x * power / size for x in small), power], "tie"),
            ("one number", [size], ""),
            ("zeros but one", [0.0] * 31 + [-size], "negative zero"),
            ("all alike", [size] * 32, ""),
        ):
            cases.append(case(f"{what} ({name})", values, top, tags=tags))
    return [
        *cases,
        case("zeros (e4m3)", [0.0, -0.0, 0.0], 8, tags="zero"),
        case("smaller than any scale (e4m3)", [1e-45, -3e-44], 8),
        case("larger than any scale (e2m1)", [1e38, -1e42], 2, tags="overflow"),
    ]


BLOCK_SCALE = FunctionExercise(
    id="dtypes.block_scale",
    title="The scale of a microscaled block",
    notebook=NOTEBOOK,
    function="block_scale",
    label=Label(3, 15, "microscaling: one shared power of two for 32 small numbers"),
    hints=(
        "After the division the largest magnitude of the block should be as large as the element format can take, and "
        "no larger. In terms of powers of two: where does it stand before, and where should it stand?",
        "The exponent of a number is the floor of its base-2 logarithm. The scale's exponent is the difference of two "
        "exponents: that of the block's largest magnitude and that of the format's top binade.",
        "Take the largest absolute value of the block; a zero there is the special case. Its exponent is one less than "
        "what math.frexp gives; subtract max_exponent; bring the result into -127 to 127.",
    ),
    cases=_block_cases,
    expected=dtypes.mx_scale_exponent,
    misconceptions=(
        Misconception(
            "sign-forgotten",
            "blocks whose largest magnitude is negative get a scale that is too small: those numbers overflow. "
            "Largest in which sense?",
            gives=lambda values, top: _scale_of(max(0.0, *values), top),
        ),
        Misconception(
            "rounded-up",
            "yours is one too large except for powers of two, so the largest element lands one binade below the top "
            "and every element loses a bit. Which way must the logarithm be rounded?",
            gives=lambda values, top: _clamp(_ceil_log2(largest) - top) if (largest := max(map(abs, values))) else -127,
        ),
        Misconception(
            "element-exponent-forgotten",
            "yours brings the largest element to between 1 and 2, and leaves the upper binades of the element format "
            "unused. How far up does the format reach?",
            gives=lambda values, top: _scale_of(max(map(abs, values)), 0),
        ),
        Misconception(
            "wrong-direction",
            "yours has the opposite sign: elements are stored as value / 2^e, so large values need a large e.",
            gives=lambda values, top: (
                _clamp(top - _floor_log2(largest)) if (largest := max(map(abs, values))) else -127
            ),
        ),
        Misconception(
            "average",
            "yours scales by the mean magnitude, and the largest elements then overflow. Which element sets the limit?",
            gives=lambda values, top: _scale_of(sum(map(abs, values)) / len(values), top),
        ),
        Misconception(
            "smallest",
            "yours scales by the smallest magnitude, and every larger element then overflows. Which one sets the "
            "limit?",
            gives=lambda values, top: _scale_of(min(map(abs, values)), top),
        ),
        Misconception(
            "not-clamped",
            "the scale is stored in 8 bits, as e + 127. Which values of e can that hold?",
            gives=lambda values, top: _floor_log2(largest) - top if (largest := max(map(abs, values))) else -127,
        ),
    ),
    wrong=(
        Variant(
            "largest value, not magnitude",
            (
                ("largest = max(abs(value) for value in values)", "largest = max(values)"),
                ("if largest == 0:", "if largest <= 0:"),
            ),
            diagnosis="sign-forgotten",
        ),
        Variant(
            "logarithm rounded up",
            (
                (
                    "exponent = math.frexp(largest)[1] - 1 - max_exponent",
                    "exponent = math.ceil(math.log2(largest)) - max_exponent",
                ),
            ),
            diagnosis="rounded-up",
        ),
        Variant(
            "largest element to 1",
            (("math.frexp(largest)[1] - 1 - max_exponent", "math.frexp(largest)[1] - 1"),),
            diagnosis="element-exponent-forgotten",
        ),
        Variant(
            "opposite sign",
            (
                (
                    "exponent = math.frexp(largest)[1] - 1 - max_exponent",
                    "exponent = max_exponent + 1 - math.frexp(largest)[1]",
                ),
            ),
            diagnosis="wrong-direction",
        ),
        Variant(
            "mean magnitude",
            (
                (
                    "largest = max(abs(value) for value in values)",
                    "largest = sum(abs(value) for value in values) / len(values)",
                ),
            ),
            diagnosis="average",
        ),
        Variant(
            "smallest magnitude",
            (("largest = max(abs(value) for value in values)", "largest = min(abs(value) for value in values)"),),
            diagnosis="smallest",
        ),
        Variant("no limits", (("return max(-127, min(127, exponent))", "return exponent"),), diagnosis="not-clamped"),
        Variant(
            "zeros not thought of",
            (
                ("    if largest == 0:\n        return -127\n", ""),
                (
                    "exponent = math.frexp(largest)[1] - 1 - max_exponent",
                    "exponent = math.floor(math.log2(largest)) - max_exponent",
                ),
            ),
            diagnosis="exception",
        ),
    ),
    right=(
        Variant(
            "logarithm",
            source="""import math


def block_scale(values, max_exponent):
    top = max(max(values), -min(values))
    if not top:
        return -127
    return min(max(math.floor(math.log2(top)) - max_exponent, -127), 127)
""",
        ),
        Variant(
            "search from the largest scale down",
            source="""def block_scale(values, max_exponent):
    for exponent in range(127, -127, -1):
        if any(abs(value) / 2.0**exponent >= 2**max_exponent for value in values):
            return exponent
    return -127
""",
        ),
    ),
)


# --------------------------------------------------------------------------------------------------- dtypes.pack_int4
def _halves(values: list[int], half: Callable[[int], int], shift: tuple[int, int] = (0, 4)) -> list[int]:
    padded = [*values, *[0] * (len(values) % 2)]
    return [half(a) << shift[0] | half(b) << shift[1] for a, b in zip(padded[::2], padded[1::2], strict=True)]


def _nibble(value: int) -> int:
    return value & 15


def _pack_cases(rng: Random) -> list[Case]:
    def draw(count: int, low: int, high: int) -> list[int]:
        return [rng.randint(low, high) for _ in range(count)]

    return [
        case("nothing", []),
        case("1 and 2", [1, 2]),
        case("-1 and 0", [-1, 0], tags="negative"),
        case("0 and -8", [0, -8], tags="negative"),
        case("8 numbers from 0 to 7", [*draw(6, 0, 7), 3, 5]),
        case("all sixteen", list(range(-8, 8)), tags="negative"),
        case("32 numbers from -8 to 7", [-3, 5, *draw(30, -8, 7)], tags="negative"),
        case("3 numbers from 0 to 7", [4, 6, 5]),
        case("only -8", [-8], tags="negative"),
        case("7 numbers from -8 to 7", [*draw(5, -8, 7), -2, -7], tags="negative"),
    ]


PACK_INT4 = FunctionExercise(
    id="dtypes.pack_int4",
    title="Two numbers in a byte",
    notebook=NOTEBOOK,
    function="pack_int4",
    label=Label(2, 10, "how 4-bit weights lie in memory"),
    hints=(
        "Python's -1 has infinitely many ones in front. Which four bits of it belong into the byte, and what becomes "
        "of the others when the two halves are joined?",
        "Mask each number to its low four bits, which is two's complement; shift the second one up by four; join them.",
        "Walk over the list in steps of two. The low half is the first number and 15, the high half is the second one "
        "and 15, or 0 where there is none; the byte is the low half or the high half shifted left by four.",
    ),
    cases=_pack_cases,
    expected=lambda values: list(dtypes.pack_int4(values)),
    misconceptions=(
        Misconception(
            "no-mask",
            "the sign bits of a negative number go on above its four bits and overwrite its neighbour, or leave the "
            "byte. Which bits may each of the two contribute?",
            gives=lambda values: _halves(values, lambda value: value),
        ),
        Misconception(
            "low-not-masked",
            "a negative number in the low half overwrites the high half with its sign bits. Which bits may it "
            "contribute?",
            gives=lambda values: [b & 255 for b in _halves(values, lambda value: value)],
        ),
        Misconception(
            "halves-swapped",
            "the two halves of each byte are swapped: a kernel that unpacks them would exchange neighbouring weights. "
            "Which half holds the first number?",
            gives=lambda values: _halves(values, _nibble, (4, 0)),
        ),
        Misconception(
            "offset-binary",
            "yours stores value + 8, which is how unsigned formats with a zero point do it. What are the four bits of "
            "0, and of -1, in two's complement?",
            gives=lambda values: _halves(values, lambda value: value + 8),
        ),
        Misconception(
            "offset-binary",
            "yours stores value + 8, which is how unsigned formats with a zero point do it. What are the four bits of "
            "0, and of -1, in two's complement?",
            gives=lambda values: [
                b - (128 if len(values) % 2 and i == len(values) // 2 else 0)  # the padding is 0, not 0 + 8
                for i, b in enumerate(_halves(values, lambda value: value + 8))
            ],
        ),
        Misconception(
            "sign-magnitude",
            "yours keeps the sign in the highest bit and the magnitude in the other three, as floating-point formats "
            "do. How does two's complement write -1?",
            gives=lambda values: _halves(values, lambda value: abs(value) & 7 | (8 if value < 0 else 0)),
        ),
        Misconception(
            "last-one-lost",
            "an odd last number is missing. How many bytes do five numbers need?",
            when=lambda evidence: (
                evidence.kind == "shape"
                and all(len(c.args[0]) % 2 for c in evidence.failed)
                and not any(len(c.args[0]) % 2 for c in evidence.passed)
            ),
        ),
        Misconception(
            "not-packed",
            "yours has one byte a number: the memory traffic of int8, not half of it. How do two share a byte?",
            when=lambda evidence: evidence.kind == "shape" and len(evidence.outputs) == len(evidence.case.args[0]),
        ),
    ),
    wrong=(
        Variant(
            "no mask",
            (
                ("low = values[i] & 0xF", "low = values[i]"),
                ("high = values[i + 1] & 0xF if", "high = values[i + 1] if"),
            ),
            diagnosis="no-mask",
        ),
        Variant(
            "mask on the whole byte only",
            (
                ("low = values[i] & 0xF", "low = values[i]"),
                ("high = values[i + 1] & 0xF if", "high = values[i + 1] if"),
                ("packed.append(low | high << 4)", "packed.append((low | high << 4) & 0xFF)"),
            ),
            diagnosis="low-not-masked",
        ),
        Variant(
            "first number in the high half",
            (("packed.append(low | high << 4)", "packed.append(low << 4 | high)"),),
            diagnosis="halves-swapped",
        ),
        Variant(
            "eight added",
            (
                ("low = values[i] & 0xF", "low = values[i] + 8"),
                ("high = values[i + 1] & 0xF if", "high = values[i + 1] + 8 if"),
            ),
            diagnosis="offset-binary",
        ),
        Variant(
            "sign and magnitude",
            (
                ("low = values[i] & 0xF", "low = abs(values[i]) & 7 | (values[i] < 0) << 3"),
                ("high = values[i + 1] & 0xF if", "high = abs(values[i + 1]) & 7 | (values[i + 1] < 0) << 3 if"),
            ),
            diagnosis="sign-magnitude",
        ),
        Variant(
            "odd last number lost",
            (("for i in range(0, len(values), 2):", "for i in range(0, len(values) - 1, 2):"),),
            diagnosis="last-one-lost",
        ),
        Variant(
            "a byte each",
            source="def pack_int4(values):\n    return [value & 15 for value in values]\n",
            diagnosis="not-packed",
        ),
    ),
    right=(
        Variant(
            "remainders",
            source="""def pack_int4(values):
    values = list(values) + [0] * (len(values) % 2)
    return [values[2 * i] % 16 + 16 * (values[2 * i + 1] % 16) for i in range(len(values) // 2)]
""",
        ),
        Variant(
            "one large integer, cut into bytes",
            source="""def pack_int4(values):
    whole = 0
    for value in reversed(values):
        whole = whole * 16 + (value if value >= 0 else 16 + value)
    return [whole >> 8 * i & 255 for i in range((len(values) + 1) // 2)]
""",
        ),
    ),
)

EXERCISES = [DECODE, ROUND, ACCUMULATE, STOCHASTIC, LOSS_SCALE, BLOCK_SCALE, PACK_INT4]
