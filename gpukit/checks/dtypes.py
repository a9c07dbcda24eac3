"""The exercises of notebook 01: cases, and what each wrong idea computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random

from gpukit.accounting import dtypes
from gpukit.accounting.dtypes import FORMATS, Format
from gpukit.grading.exercise import Case, FunctionExercise, Misconception
from gpukit.grading.ideas import only
from gpukit.grading.inputs import case

# ------------------------------------------------------------------------------------------------------ dtypes.decode
_IEEE = (
    FORMATS["fp16"],
    FORMATS["bf16"],
    FORMATS["fp32"],
    FORMATS["fp8_e5m2"],
    Format("e3m4", 3, 4),
    Format("e10m12", 10, 12),
)


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
            ("negative zero", fmt.sign_bit, "zero negative"),
            ("infinity", fmt.max_bits + 1, "special"),
            ("-infinity", fmt.sign_bit | fmt.max_bits + 1, "special negative"),
            ("NaN", fmt.encode(math.nan), "special"),
            ("NaN, negative, lowest bit", fmt.sign_bit | fmt.max_bits + 2, "special negative"),
            ("largest", fmt.max_bits, ""),
            ("smallest subnormal, negative", fmt.sign_bit | 1, "subnormal negative"),
            ("largest subnormal", (1 << fmt.mantissa_bits) - 1, "subnormal"),
        ):
            name = f"{fmt.name} {fmt.hex(bits)} ({what})"
            cases.append(case(name, bits, fmt.exponent_bits, fmt.mantissa_bits, tags=tags))
    return [*cases, *(case(f"4 bits, {bits:04b}", bits, 2, 1) for bits in range(16))]


def _decode(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    return Format("", exponent_bits, mantissa_bits).decode(bits)


def _decode_zero_as_normal(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    sign, exponent, fraction, bias = _fields(bits, exponent_bits, mantissa_bits)
    return _decode(bits, exponent_bits, mantissa_bits) if exponent else sign * (1 + fraction) * 2.0**-bias


def _decode_subnormal_exponent(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    sign, exponent, fraction, bias = _fields(bits, exponent_bits, mantissa_bits)
    return _decode(bits, exponent_bits, mantissa_bits) if exponent else sign * fraction * 2.0**-bias


def _decode_subnormal_as_normal(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    sign, exponent, fraction, bias = _fields(bits, exponent_bits, mantissa_bits)
    usual = exponent or not fraction
    return _decode(bits, exponent_bits, mantissa_bits) if usual else sign * (1 + fraction) * 2.0**-bias


def _decode_subnormal_with_one(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    sign, exponent, fraction, bias = _fields(bits, exponent_bits, mantissa_bits)
    return _decode(bits, exponent_bits, mantissa_bits) if exponent else sign * (1 + fraction) * 2.0 ** (1 - bias)


def _decode_subnormal_with_one_but_zero(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    of = _decode_subnormal_with_one if _fields(bits, exponent_bits, mantissa_bits)[2] else _decode
    return of(bits, exponent_bits, mantissa_bits)


def _decode_first_normals_as_subnormal(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    sign, exponent, fraction, bias = _fields(bits, exponent_bits, mantissa_bits)
    return sign * fraction * 2.0 ** (1 - bias) if exponent == 1 else _decode(bits, exponent_bits, mantissa_bits)


def _decode_without_bias(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    sign, exponent, fraction, _ = _fields(bits, exponent_bits, mantissa_bits)
    value = _decode(bits, exponent_bits, mantissa_bits)
    return sign * (1 + fraction) * 2.0**exponent if exponent and math.isfinite(value) else value


def _decode_by_all_ones(subnormal: bool, bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The mantissa as a share of the largest one, in normal numbers and perhaps in subnormal ones."""
    sign, exponent, fraction, bias = _fields(bits, exponent_bits, mantissa_bits)
    value, share = _decode(bits, exponent_bits, mantissa_bits), fraction * 2**mantissa_bits / (2**mantissa_bits - 1)
    if not exponent:
        return sign * share * 2.0 ** (1 - bias) if subnormal else value
    return sign * (1 + share) * 2.0 ** (exponent - bias) if math.isfinite(value) else value


def _decode_whole_mantissa(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    sign, exponent, fraction, bias = _fields(bits, exponent_bits, mantissa_bits)
    value, mantissa = _decode(bits, exponent_bits, mantissa_bits), fraction * 2**mantissa_bits
    if not math.isfinite(value):
        return value
    return sign * ((1 + mantissa) * 2.0 ** (exponent - bias) if exponent else mantissa * 2.0 ** (1 - bias))


def _decode_without_mantissa(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    """mantissa // 2**mantissa_bits is 0."""
    value = _decode(bits, exponent_bits, mantissa_bits)
    return (
        _decode(bits >> mantissa_bits << mantissa_bits, exponent_bits, mantissa_bits) if math.isfinite(value) else value
    )


def _decode_signed_infinity(*args: int) -> float:
    return _fields(*args)[0] * math.inf if math.isnan(_decode(*args)) else _decode(*args)


def _decode_exchanged(*args: int) -> float:
    """Infinity for NaN, and NaN for infinity."""
    return math.nan if math.isinf(_decode(*args)) else _decode_signed_infinity(*args)


def _decode_subnormal_doubled(*args: int) -> float:
    return _decode(*args) if _fields(*args)[1] else 2 * _decode(*args)


def _decode_quiet_nan_only(*args: int) -> float:
    sign, _, fraction, _ = _fields(*args)
    return sign * math.inf if math.isnan(_decode(*args)) and fraction < 0.5 else _decode(*args)


def _decode_unsigned_infinity(*args: int) -> float:
    return abs(_decode(*args)) if math.isinf(_decode(*args)) else _decode(*args)


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
    function="decode",
    cases=_decode_cases,
    expected=_decode,
    misconceptions=(
        Misconception("zero-is-normal", gives=_decode_zero_as_normal),
        Misconception("zero-is-normal", gives=_decode_subnormal_with_one),
        Misconception("subnormal-is-normal", gives=_decode_subnormal_as_normal),
        Misconception("subnormal-is-normal/2", gives=_decode_subnormal_with_one_but_zero),
        Misconception("normal-is-subnormal", gives=_decode_first_normals_as_subnormal),
        Misconception("subnormal-exponent", gives=_decode_subnormal_exponent),
        Misconception("subnormal-exponent/2", gives=_decode_subnormal_doubled),
        Misconception("nan-is-infinity/2", gives=_decode_quiet_nan_only),
        Misconception("whole-mantissa", gives=_decode_whole_mantissa),
        Misconception("mantissa-lost", gives=_decode_without_mantissa),
        Misconception("flush-to-zero", gives=_decode_flushed),
        Misconception("no-specials", gives=_decode_all_ones_as_number),
        Misconception(
            "nan-is-infinity", gives=lambda *args: math.inf if math.isnan(_decode(*args)) else _decode(*args)
        ),
        Misconception("nan-is-infinity", gives=_decode_signed_infinity),
        Misconception(
            "infinity-is-nan", gives=lambda *args: math.nan if math.isinf(_decode(*args)) else _decode(*args)
        ),
        Misconception("infinity-is-nan/2", gives=_decode_exchanged),
        Misconception("no-sign/2", gives=_decode_unsigned_infinity),
        Misconception("no-sign/3", gives=lambda *args: _decode(*args) + 0.0),
        Misconception("no-leading-one", gives=_decode_no_implicit_one),
        Misconception("bias", gives=_decode_one_more_bias),
        Misconception("bias/2", gives=_decode_without_bias),
        *(
            Misconception("all-ones-is-one", gives=partial(_decode_by_all_ones, subnormal))
            for subnormal in (False, True)
        ),
        Misconception("no-sign", gives=lambda *args: abs(_decode(*args))),
    ),
)


# ------------------------------------------------------------------------------------------------------- dtypes.round
def _steps(value: float, mantissa_bits: int) -> tuple[float, int]:
    """(value in units of its spacing, exponent of the spacing)."""
    significand, power = math.frexp(value)
    return significand * 2 ** (mantissa_bits + 1), power - mantissa_bits - 1


def _round(value: float, mantissa_bits: int) -> float:
    steps, unit = _steps(value, mantissa_bits)
    return math.ldexp(round(steps), unit)


def _round_half_away(value: float, mantissa_bits: int) -> float:
    steps, unit = _steps(abs(value), mantissa_bits)
    return math.copysign(math.ldexp(math.floor(steps + 0.5), unit), value)


def _round_half_down(value: float, mantissa_bits: int) -> float:
    steps, unit = _steps(abs(value), mantissa_bits)
    return math.copysign(math.ldexp(math.ceil(steps - 0.5), unit), value)


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
            ("a hair below a tie", math.nextafter(number(k, 0.5, -4, 4), 0), "hair"),
            ("a hair above a tie", math.nextafter(number(k, -0.5, -4, 4), math.inf), "hair"),
            ("exact", number(k, 0, -6, 6), ""),
            ("just below a power of 2", math.ldexp(2 - 2.0 ** -(k + 3), rng.randint(-6, 6)), ""),
        ):
            cases.append(case(f"{value!r} to {k} bits ({what})", value, k, tags=tags))
    return [
        *cases,
        case("0 to 10 bits", 0.0, 10, tags="zero"),
        case("1e-300 to 10 bits", 1e-300, 10),
        case("-1e290 to 3 bits", -1e290, 3, tags="negative"),
        *(case(f"{value!r} to {k} bits", value, k) for value, k in ((1003 * 5e-324, 3), (77 * 5e-324, 4))),
        *(case(f"{value!r} to 1 bit", value, 1) for value in (1.0, 1.25, -1.25, 1.75, 2.5, 0.875)),
        *(case(f"4,095.5 x 2^{shift} to 11 bits", math.ldexp(4095.5, shift), 11) for shift in (-20, 3)),
        # Numbers of the format, whose neighbors are nearer than those of fp64.
        *(
            case(f"{n * 5e-324!r} to {k} bits", n * 5e-324, k, tags="underflow")
            for n, k in ((1, 10), (-3, 23), (41, 7))
        ),
    ]


ROUND = FunctionExercise(
    id="dtypes.round",
    function="round_to",
    cases=_round_cases,
    expected=_round,
    misconceptions=(
        Misconception("truncated", gives=_round_cut),
        Misconception(
            "floored", gives=lambda value, k: math.ldexp(math.floor(_steps(value, k)[0]), _steps(value, k)[1])
        ),
        Misconception("ties-away", gives=_round_half_away),
        Misconception("ties-up", gives=_round_half_up),
        Misconception("ties-down", gives=_round_half_down),
        Misconception(
            "half-added-and-cut",
            gives=lambda value, k: math.ldexp(math.trunc(_steps(value, k)[0] + 0.5), _steps(value, k)[1]),
        ),
        Misconception("raised", gives=lambda value, k: math.ldexp(math.ceil(_steps(value, k)[0]), _steps(value, k)[1])),
        Misconception(
            "rounded-away",
            gives=lambda value, k: math.copysign(
                math.ldexp(math.ceil(abs(_steps(value, k)[0])), _steps(value, k)[1]), value
            ),
        ),
        Misconception("absolute-spacing", gives=lambda value, k: round(value * 2**k) / 2**k),
        Misconception("one-bit-short", gives=lambda value, k: _round(value, k - 1)),
        Misconception("one-bit-more", gives=lambda value, k: _round(value, k + 1)),
        Misconception("decimal-digits", gives=lambda value, k: round(value, k)),
        Misconception("exponent-cut", gives=_round_log2_cut),
        Misconception("ties-by-tolerance", when=only("hair")),
        Misconception("spacing-underflows", when=only("underflow")),
    ),
)


# -------------------------------------------------------------------------------------------------- dtypes.accumulate
def _ceil_log2(step: float) -> int:
    significand, power = math.frexp(step)
    return power - (significand == 0.5)


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
            case(f"just above 1 in {k} bits ({name})", 1 + 2.0**-k, k),
            case(f"just below 1 in {k} bits ({name})", 1 - 2.0 ** -(k + 1), k),
        ]
    return [*cases, *(case(f"{step!r} in 1 bit", step, 1) for step in (1.0, 1.5, 0.75, 5e-324))]


ACCUMULATE = FunctionExercise(
    id="dtypes.accumulate",
    function="stall",
    cases=_stall_cases,
    expected=_stall,
    misconceptions=(
        Misconception("whole-spacing", gives=lambda step, k: 2.0 ** (_ceil_log2(step) + k)),
        Misconception("tie-goes-on", gives=lambda step, k: 2.0 ** (_floor_log2(step) + k + 2)),
        Misconception("step-rounded-down", gives=lambda step, k: 2.0 ** (_floor_log2(step) + k + 1)),
        Misconception("one-binade-late", gives=lambda step, k: 2 * _stall(step, k)),
        Misconception("step-ignored", gives=lambda step, k: 2.0 ** (k + 1)),
        Misconception("not-a-power", gives=lambda step, k: step * 2 ** (k + 1)),
        Misconception("not-a-power/2", gives=lambda step, k: step * _stall(step, k)),
        Misconception("one-step-short", gives=lambda step, k: _stall(step, k) - step),
        Misconception("count-of-steps", gives=lambda step, k: _stall(step, k) / step),
    ),
    timeout_s=5.0,
)


# -------------------------------------------------------------------------------------------------- dtypes.stochastic
def _stochastic_noise(value: float, k: int, u: float) -> float:
    """u - 1/2 added, then rounded to nearest."""
    steps, unit = _steps(abs(value), k)
    return math.copysign(math.ldexp(round(steps + u - 0.5), unit), value)


def _stochastic(
    value: float, k: int, u: float, *, up: Callable[[float, float], bool] | None = None, below: bool = False
) -> float:
    """Away from zero where `up` says so of the fraction of the gap that the value has covered and of u. below: the neighbor
    below the value takes the place of the one nearer to zero, also where the value is negative."""
    steps, unit = _steps(value if below else abs(value), k)
    lower = math.floor(steps)
    away = up(steps - lower, u) if up else u < steps - lower
    rounded = math.ldexp(lower + away, unit)
    return rounded if below else math.copysign(rounded, value)


def _stochastic_around_nearest(value: float, k: int, u: float) -> float:
    steps, unit = _steps(abs(value), k)
    return math.copysign(math.ldexp(round(steps) + (u < steps - round(steps)), unit), value)


def _stochastic_by_distance(value: float, k: int, u: float) -> float:
    """The nearest neighbor, or for a u below the distance to it the other one."""
    steps, unit = _steps(abs(value), k)
    near = round(steps)
    other = near + (1 if steps > near else -1)
    return math.copysign(math.ldexp(other if u < abs(steps - near) else near, unit), value)


def _stochastic_unscaled(value: float, k: int, u: float) -> float:
    steps, unit = _steps(abs(value), k)
    lower = math.floor(steps)
    return math.copysign(math.ldexp(lower + (u < math.ldexp(steps - lower, unit)), unit), value)


def _stochastic_log2_cut(value: float, k: int, u: float) -> float:
    """int() cuts towards zero, so numbers below 1 get the exponent above their own."""
    if value == 0:
        return 0.0
    unit = 2.0 ** (int(math.log2(abs(value))) - k)
    lower = math.floor(abs(value) / unit)
    return math.copysign((lower + (u < abs(value) / unit - lower)) * unit, value)


def _stochastic_fixed_point(value: float, k: int, u: float) -> float:
    steps = abs(value) * 2**k
    return math.copysign((math.floor(steps) + (u < steps - math.floor(steps))) / 2**k, value)


# A difference of these and a count of spacings is rounded.
_LAST, _QUARTER = math.nextafter(1.0, 0.0), math.nextafter(0.25, 0.0)


def _stochastic_difference(value: float, k: int, u: float) -> float:
    """The count less u, which is rounded, and then up."""
    steps, unit = _steps(abs(value), k)
    return math.copysign(math.ldexp(math.ceil(steps - u), unit), value)


def _stochastic_sum(value: float, k: int, u: float) -> float:
    """The count and u, a sum that is rounded, and then down."""
    steps, unit = _steps(abs(value), k)
    return math.copysign(math.ldexp(math.floor(steps + u), unit), value)


def _stochastic_cases(rng: Random) -> list[Case]:
    cases = []
    for k in (10, 7, 3):
        for what, sign, chances, us in (
            ("just above a neighbor", 1, (2, 3), (0.05, 0.4, 0.7, 0.99)),
            ("just below a neighbor", 1, (13, 14), (0.01, 0.3, 0.6, 0.95)),
            ("negative", -1, (4, 5), (0.1, 0.6, 0.9)),
        ):
            for u in us:
                count = 2**k + rng.randrange(2**k) + rng.randint(*chances) / 16
                value = sign * math.ldexp(count, rng.choice((-6, -3, 2, 4)) - k)
                tags = "negative" if sign < 0 else ""
                cases.append(case(f"{value!r} to {k} bits, u {u} ({what})", value, k, u, tags=tags))
        for what, sixteenths, u in (
            ("u as large as the chance", 4, 0.25),
            ("u as large as the chance", 8, 0.5),
            ("u 0", 1, 0.0),
        ):
            value = math.ldexp(2**k + rng.randrange(2**k) + sixteenths / 16, rng.choice((-6, 4)) - k)
            cases.append(case(f"{value!r} to {k} bits, u {u} ({what})", value, k, u))
        below = math.ldexp(2 ** (k + 1) - 4 / 16, rng.choice((-6, 4)) - k)
        for u in (0.5, 0.9):
            cases.append(case(f"{below!r} to {k} bits, u {u} (just below a power of 2)", below, k, u))
        exact = math.ldexp(2**k + rng.randrange(2**k), rng.randint(-5, 3) - k)
        cases += [case(f"{exact!r} to {k} bits, u {u} (exact)", exact, k, u) for u in (0.0, 0.3, 0.999)]
        hair = math.nextafter(exact, math.inf)
        cases.append(case(f"{hair!r} to {k} bits, u 0 (a hair above a neighbor)", hair, k, 0.0, tags="hair"))
        quarter = math.ldexp(2**k + rng.randrange(2**k) + 0.25, rng.choice((-6, 4)) - k)
        cases += [
            case(f"{exact!r} to {k} bits, u {_LAST!r} (exact)", exact, k, _LAST),
            case(f"{below!r} to {k} bits, u {_LAST!r} (just below a power of 2)", below, k, _LAST),
            case(f"{quarter!r} to {k} bits, u {_QUARTER!r} (u just below the chance)", quarter, k, _QUARTER),
        ]
    return [
        *cases,
        case("0 to 10 bits, u 0", 0.0, 10, 0.0, tags="zero"),
        case("-1 to 7 bits, u 0 (exact)", -1.0, 7, 0.0, tags="negative"),
        *(case(f"{value!r} to 1 bit, u {u}", value, 1, u) for value, u in ((1.25, 0.4), (1.25, 0.6), (1.75, 0.4))),
        case("1e-290 to 10 bits, u 0.5", 1e-290, 10, 0.5),
        # Subnormal in float64: its bits lie elsewhere, and there are fewer of them.
        *(
            case(f"{count * 5e-324!r} to {k} bits, u {u}", count * 5e-324, k, u)
            for count, k, u in ((1003, 3, 0.2), (1003, 3, 0.9), (77, 4, 0.1))
        ),
        case("-1e290 to 10 bits, u 0.5", -1e290, 10, 0.5, tags="negative"),
        *(
            case(f"{n * 5e-324!r} to {k} bits, u {u}", n * 5e-324, k, u, tags="underflow")
            for n, k, u in ((1, 10, 0.0), (-3, 7, 0.6), (41, 10, 0.2))
        ),
    ]


STOCHASTIC = FunctionExercise(
    id="dtypes.stochastic",
    function="round_stochastic",
    cases=_stochastic_cases,
    expected=_stochastic,
    misconceptions=(
        Misconception("nearest", gives=partial(_stochastic, up=lambda chance, u: chance > 0.5)),
        Misconception("coin-toss", gives=partial(_stochastic, up=lambda chance, u: 0 < chance and u < 0.5)),
        Misconception("moves-exact-numbers", gives=partial(_stochastic, up=lambda chance, u: u < 0.5)),
        Misconception("inverted", gives=partial(_stochastic, up=lambda chance, u: 0 < chance and u < 1 - chance)),
        Misconception("inverted", gives=partial(_stochastic, up=lambda chance, u: u > chance)),
        Misconception("inverted", gives=partial(_stochastic, up=lambda chance, u: u >= chance)),
        Misconception("inverted", gives=partial(_stochastic, up=lambda chance, u: 0 < chance < u)),
        Misconception("other-draws", gives=partial(_stochastic, up=lambda chance, u: u >= 1 - chance)),
        Misconception("other-draws", gives=_stochastic_sum),
        Misconception("other-draws", gives=_stochastic_noise),
        Misconception("other-draws", gives=_stochastic_by_distance),
        Misconception("chance-unscaled", gives=_stochastic_unscaled),
        Misconception("doubled", gives=lambda *args: 2 * _stochastic(*args)),
        Misconception("exponent-cut", gives=_stochastic_log2_cut),
        Misconception(
            "added-then-nearest",
            gives=lambda value, k, u: math.copysign(
                math.ldexp(round(_steps(abs(value), k)[0] + u), _steps(value, k)[1]), value
            ),
        ),
        Misconception(
            "chance-included",
            gives=partial(_stochastic, up=lambda chance, u: 0 < chance and u <= chance),
        ),
        Misconception("difference-rounded", gives=_stochastic_difference),
        Misconception("truncated", gives=partial(_stochastic, up=lambda chance, u: False)),
        Misconception("always-up", gives=partial(_stochastic, up=lambda chance, u: chance > 0)),
        Misconception("always-up", gives=partial(_stochastic, up=lambda chance, u: True)),
        Misconception("one-bit-short", gives=lambda value, k, u: _stochastic(value, k - 1, u)),
        Misconception("one-bit-more", gives=lambda value, k, u: _stochastic(value, k + 1, u)),
        Misconception("no-sign", gives=lambda *args: abs(_stochastic(*args))),
        Misconception("negative-floor", gives=partial(_stochastic, below=True)),
        Misconception(
            "negative-floor/2",
            gives=lambda value, k, u: _stochastic(value, k, u if value > 0 else 1.0),
        ),
        Misconception("nearest/2", gives=_stochastic_around_nearest),
        Misconception("absolute-spacing", gives=_stochastic_fixed_point),
        Misconception("near-is-exact", when=only("hair")),
        Misconception("spacing-underflows", when=only("underflow")),
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
    least: float = 0.0,
    restart: int = 0,
    whole: bool = False,
) -> list[float]:
    scales, good = [scale], 0
    for bad in overflowed:
        if bad:
            scale = scale // 2 if whole else max(least, scale * shrink)
            good = restart if reset_on_overflow else good
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


def _scale_grows_at_the_next_step(overflowed: list[bool], scale: float, growth_interval: int) -> list[float]:
    scales, good = [scale], 0
    for bad in overflowed:
        if good == growth_interval:
            scale, good = scale * 2, 0
        scale, good = (scale / 2, 0) if bad else (scale, good + 1)
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
        case("5 overflows from 2 down (interval 3)", bad * 5, 2.0, 3, tags="overflow"),
        case("7 good steps (interval 1)", good * 7, 3.0, 1),
        case("4 good + 1 overflow + 4 good (interval 4)", good * 4 + bad + good * 4, 96.0, 4, tags="overflow"),
        case("300 good steps (interval 2,000)", good * 300, 65536.0, 2000),
    ]


LOSS_SCALE = FunctionExercise(
    id="dtypes.loss_scale",
    function="loss_scale",
    cases=_loss_scale_cases,
    expected=_loss_scale,
    returns=("scales[{}]",),
    misconceptions=(
        Misconception("count-kept-on-overflow", gives=partial(_loss_scale, reset_on_overflow=False)),
        Misconception("count-kept-on-growth", gives=partial(_loss_scale, reset_on_growth=False)),
        Misconception("shape", when=lambda evidence: evidence.kind == "shape"),
        Misconception("shifted", gives=lambda *args: [args[1], *_loss_scale(*args)[:-1]]),
        Misconception("one-step-late", gives=partial(_loss_scale, late=1)),
        Misconception("one-step-late/2", gives=_scale_grows_at_the_next_step),
        Misconception("one-step-early", gives=partial(_loss_scale, late=-1)),
        Misconception("one-step-early/2", gives=partial(_loss_scale, restart=1)),
        Misconception("never-below-one", gives=partial(_loss_scale, least=1.0)),
        Misconception("whole-numbers", gives=partial(_loss_scale, whole=True)),
        Misconception("clock", gives=_scale_grows_every_interval),
        Misconception("wrong-direction", gives=partial(_loss_scale, shrink=2.0)),
        Misconception("shrinks-too-much", gives=partial(_loss_scale, shrink=0.25)),
        Misconception("shrinks-too-much", gives=partial(_loss_scale, shrink=0.1)),
        Misconception("never-shrinks", gives=partial(_loss_scale, shrink=1.0)),
        Misconception(
            "never-grows", gives=lambda overflowed, scale, interval: _loss_scale(overflowed, scale, len(overflowed) + 1)
        ),
    ),
)


# ------------------------------------------------------------------------------------------------- dtypes.block_scale
def _magnitude(values: list[float]) -> float:
    return max(map(abs, values))


def _block_scale(
    values: list[float],
    top: int,
    *,
    of: Callable[[list[float]], float] = _magnitude,
    exponent: Callable[[float], int] = _floor_log2,
    sign: int = 1,
    limits: tuple[float, float] = (-127, 127),
    zeros: int = -127,
) -> int:
    found = of(values)
    return min(max(sign * (exponent(found) - top), limits[0]), limits[1]) if found > 0 else zeros


_OTHER_LIMITS = ((-128, 127), (-127, 128), (-128, 128), (-126, 127), (-126, 126))
_NO_LIMITS = ((-math.inf, 127), (-127, math.inf), (-math.inf, math.inf))


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
        case("one zero (e2m1)", [0.0], 2, tags="zero"),
        case("just below 1, the nearest in fp32 (int8)", [1 - 2.0**-24, -0.5], 0),
        case("just below 8, the nearest float (e4m3)", [0.5, -math.nextafter(8.0, 0.0)], 8),
        *(
            case(f"largest 2^{power} (e2m1, e = {power - 2})", [2.0**power, -0.75 * 2.0**power], 2)
            for power in (-126, -125, -124, 128, 129, 130)
        ),
    ]


BLOCK_SCALE = FunctionExercise(
    id="dtypes.block_scale",
    function="block_scale",
    cases=_block_cases,
    expected=dtypes.mx_scale_exponent,
    misconceptions=(
        Misconception("sign-forgotten", gives=partial(_block_scale, of=lambda values: max(0.0, *values))),
        Misconception("rounded-up", gives=partial(_block_scale, exponent=_ceil_log2)),
        Misconception("element-exponent-forgotten", gives=lambda values, top: _block_scale(values, 0)),
        Misconception("wrong-direction", gives=partial(_block_scale, sign=-1)),
        Misconception("average", gives=partial(_block_scale, of=lambda values: sum(map(abs, values)) / len(values))),
        Misconception("smallest", gives=partial(_block_scale, of=lambda values: min(map(abs, values)))),
        Misconception("frexp-exponent", gives=partial(_block_scale, exponent=lambda found: math.frexp(found)[1])),
        Misconception("scale-itself", gives=lambda values, top: 2.0 ** _block_scale(values, top)),
        Misconception(
            "logarithm-rounded", gives=partial(_block_scale, exponent=lambda found: math.floor(math.log2(found)))
        ),
        Misconception("rounded-up/2", gives=partial(_block_scale, exponent=lambda found: round(math.log2(found)))),
        *(Misconception("not-clamped/2", gives=partial(_block_scale, limits=limits)) for limits in _OTHER_LIMITS),
        Misconception("zeros-get-zero", gives=partial(_block_scale, zeros=0)),
        *(Misconception("not-clamped", gives=partial(_block_scale, limits=limits)) for limits in _NO_LIMITS),
    ),
)


# --------------------------------------------------------------------------------------------------- dtypes.pack_int4
def _halves(values: list[int], half: Callable[[int], int], shift: tuple[int, int] = (0, 4)) -> list[int]:
    padded = [*values, *[0] * (len(values) % 2)]
    return [half(a) << shift[0] | half(b) << shift[1] for a, b in zip(padded[::2], padded[1::2], strict=True)]


def _nibble(value: int) -> int:
    return value & 15


def _added(values: list[int]) -> list[int]:
    padded = [*values, *[0] * (len(values) % 2)]
    return [a + 16 * b for a, b in zip(padded[::2], padded[1::2], strict=True)]


def _last_high(values: list[int]) -> list[int]:
    packed = _halves(values, _nibble)
    return [*packed[:-1], packed[-1] << 4] if len(values) % 2 else packed


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
    function="pack_int4",
    cases=_pack_cases,
    expected=lambda values: list(dtypes.pack_int4(values)),
    returns=("packed[{}]",),
    misconceptions=(
        Misconception("no-mask", gives=lambda values: _halves(values, lambda value: value)),
        Misconception("no-mask", gives=_added),
        Misconception("low-not-masked", gives=lambda values: [b & 255 for b in _halves(values, lambda value: value)]),
        Misconception(
            "high-not-masked",
            gives=lambda values: [
                a & 15 | b << 4 for a, b in zip(*[iter([*values, *[0] * (len(values) % 2)])] * 2, strict=True)
            ],
        ),
        Misconception("last-in-the-high-half", gives=_last_high),
        Misconception("three-bits", gives=lambda values: _halves(values, lambda value: value & 7)),
        Misconception("halves-swapped", gives=lambda values: _halves(values, _nibble, (4, 0))),
        Misconception("offset-binary", gives=lambda values: _halves(values, lambda value: value + 8)),
        Misconception(
            "offset-binary",
            gives=lambda values: [
                b - (128 if len(values) % 2 and i == len(values) // 2 else 0)  # the padding is 0, not 0 + 8
                for i, b in enumerate(_halves(values, lambda value: value + 8))
            ],
        ),
        Misconception(
            "sign-magnitude",
            gives=lambda values: _halves(values, lambda value: abs(value) & 7 | (8 if value < 0 else 0)),
        ),
        Misconception(
            "last-one-lost",
            when=lambda evidence: (
                evidence.kind == "shape"
                and all(len(c.args[0]) % 2 for c in evidence.failed)
                and not any(len(c.args[0]) % 2 for c in evidence.passed)
            ),
        ),
        Misconception(
            "not-packed",
            when=lambda evidence: evidence.kind == "shape" and len(evidence.outputs) == len(evidence.case.args[0]),
        ),
    ),
)

EXERCISES = [DECODE, ROUND, ACCUMULATE, STOCHASTIC, LOSS_SCALE, BLOCK_SCALE, PACK_INT4]
