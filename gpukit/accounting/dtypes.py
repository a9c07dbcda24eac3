"""Number formats, bit by bit: what a bit pattern means, what a number becomes, how far apart neighbours are.

    value = (-1)^sign x 2^(exponent - bias) x (1 + mantissa / 2^mantissa_bits)      exponent field not 0: normal
    value = (-1)^sign x 2^(1 - bias)        x (0 + mantissa / 2^mantissa_bits)      exponent field 0: subnormal

Exact: integers and fractions, no torch, no rounding but the one that is asked for. Every value of these formats is a
Python float. Sources: IEEE 754-2019; fp8: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; fp4 and shared
scales: OCP Microscaling Formats v1.0,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf; tf32:
https://blogs.nvidia.com/blog/tensorfloat-32-precision-format/
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from gpukit.nearest import did_you_mean


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: 1 sign bit, then the exponent field, then the mantissa field.

    bias          subtracted from the exponent field; None asks for the usual 2^(exponent_bits - 1) - 1
    has_inf       the largest exponent field holds infinity and NaN, as in IEEE 754
    has_nan       without has_inf: all ones is NaN and nothing else is (fp8 e4m3); False: every pattern is a number
    saturates     what becomes of a number that is too large: the largest finite one instead of infinity or NaN
    storage_bits  what one element takes in memory; None for as many as it has. tf32 has 19 and takes 32
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int | None = None
    has_inf: bool = True
    has_nan: bool = True
    saturates: bool = False
    storage_bits: int | None = None

    def __post_init__(self) -> None:
        # Beyond these a value may not fit a Python float, and decode could not be exact.
        if not 1 <= self.exponent_bits <= 11 or not 0 <= self.mantissa_bits <= 52:
            raise ValueError(
                f"{self.name}: exponent_bits must be 1 to 11 and mantissa_bits 0 to 52, "
                f"got {self.exponent_bits} and {self.mantissa_bits}"
            )
        if self.has_inf and not (self.has_nan and self.mantissa_bits):
            raise ValueError(f"{self.name}: has_inf needs has_nan and a mantissa bit, to tell NaN from infinity")
        if self.bias is None:
            object.__setattr__(self, "bias", 2 ** (self.exponent_bits - 1) - 1)
        if self.storage_bits is None:
            object.__setattr__(self, "storage_bits", self.bits)

    # ---- sizes and limits

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def min_exponent(self) -> int:
        """Of the smallest normal number, and of all subnormal ones."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Of the largest finite number."""
        return math.frexp(self.max)[1] - 1

    @property
    def max_bits(self) -> int:
        """The pattern of the largest finite number."""
        top = (1 << (self.bits - 1)) - 1  # all ones but the sign
        if self.has_inf:
            return top - (1 << self.mantissa_bits)  # one exponent less than infinity's
        return top - 1 if self.has_nan else top

    @property
    def max(self) -> float:
        return self.decode(self.max_bits)

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """From 1 to the next larger number: 2^-mantissa_bits. Rounding errs by at most half of it, relatively."""
        return math.ldexp(1.0, -self.mantissa_bits)

    # ---- bits -> value

    def split(self, bits: int) -> tuple[int, int, int]:
        """The three fields: sign, exponent, mantissa. Raises ValueError if `bits` is not a pattern of this format."""
        if not 0 <= bits < 1 << self.bits:
            raise ValueError(f"{self.name}: bits must be 0 to 2^{self.bits} - 1, got {bits}")
        return (
            bits >> (self.bits - 1),
            bits >> self.mantissa_bits & (1 << self.exponent_bits) - 1,
            bits & (1 << self.mantissa_bits) - 1,
        )

    def kind(self, bits: int) -> str:
        """ "zero", "subnormal", "normal", "infinity" or "NaN"."""
        _, exponent, mantissa = self.split(bits)
        if bits & ~self.sign_bit > self.max_bits:
            return "infinity" if self.has_inf and not mantissa else "NaN"
        return "normal" if exponent else "subnormal" if mantissa else "zero"

    def decode(self, bits: int) -> float:
        """The value of a pattern, exactly."""
        sign, exponent, mantissa = self.split(bits)
        if bits & ~self.sign_bit > self.max_bits:
            return math.nan if self.kind(bits) == "NaN" else -math.inf if sign else math.inf
        implicit = 1 << self.mantissa_bits if exponent else 0
        value = math.ldexp(implicit + mantissa, max(exponent, 1) - self.bias - self.mantissa_bits)
        return -value if sign else value

    # ---- value -> bits

    def encode(self, value: float | Fraction, *, saturate: bool | None = None) -> int:
        """The pattern nearest to `value`, ties to the even pattern.

        Too large a number becomes the largest finite one (`saturate`, by default what the format does), else infinity,
        else NaN. For fp8 e4m3 both are in use: PyTorch 2.12 and newer, Triton and the GPU's own instruction saturate,
        PyTorch 2.11 and ml_dtypes give NaN. Raises ValueError for a NaN that the format cannot hold.
        """
        saturate = self.saturates if saturate is None else saturate
        if value != value:
            if not self.has_nan:
                raise ValueError(f"{self.name} has no NaN, so NaN cannot be encoded")
            return self._nan
        sign = self.sign_bit if value < 0 or (value == 0 and math.copysign(1, value) < 0) else 0
        code = self.max_bits + 1 if abs(value) == math.inf else self._nearest(abs(value))
        if code <= self.max_bits:
            return sign | code
        if saturate or not self.has_nan:
            return sign | self.max_bits
        return sign | (self.max_bits + 1 if self.has_inf else self._nan)

    @property
    def _nan(self) -> int:
        top = (1 << (self.bits - 1)) - 1
        return top - (1 << self.mantissa_bits - 1) + 1 if self.has_inf else top  # IEEE: the quiet one

    def _nearest(self, magnitude: float | Fraction) -> int:
        """The pattern of the nearest number as if exponents went on for ever; the sign is left out."""
        if magnitude == 0:
            return 0
        exponent = max(_floor_log2(magnitude), self.min_exponent)
        significand = round(Fraction(magnitude) / Fraction(2) ** (exponent - self.mantissa_bits))  # ties to even
        # A significand of 2^mantissa_bits or more carries its leading one into the exponent field, which is what turns
        # a subnormal into a normal number, and 1.111 rounded up into the next power of two.
        return (exponent - self.min_exponent << self.mantissa_bits) + significand

    def round(self, value: float | Fraction, *, saturate: bool | None = None) -> float:
        """The number of this format nearest to `value`: decode(encode(value))."""
        return self.decode(self.encode(value, saturate=saturate))

    def round_stochastic(self, value: float, u: float) -> float:
        """One of the two neighbours of `value`: the one further from zero if u, uniform in [0, 1), is less than the
        fraction of the gap that `value` has covered. On average over u the result is `value`."""
        gap = self.spacing(value)
        steps = Fraction(abs(value)) / Fraction(gap)
        whole = steps.numerator // steps.denominator
        return math.copysign(self.round((whole + (u < steps - whole)) * Fraction(gap)), value)

    # ---- neighbours

    def spacing(self, value: float) -> float:
        """From |value| to the next number away from zero: 2^(floor(log2 |value|) - mantissa_bits), and never less than
        the smallest subnormal number. NaN for infinity and NaN."""
        if not math.isfinite(value):
            return math.nan
        if value == 0:
            return self.smallest_subnormal
        return math.ldexp(1.0, max(_floor_log2(abs(value)), self.min_exponent) - self.mantissa_bits)

    def neighbours(self, bits: int) -> tuple[float, float]:
        """The next smaller and the next larger number; infinities count, beyond the last one there is NaN."""
        if self.kind(bits) == "NaN":
            return math.nan, math.nan
        position = self.sign_bit - 1 & bits
        position = (
            -position if bits & self.sign_bit else position
        )  # the same order as the values, 0 and -0 in one place
        return self._at(position - 1), self._at(position + 1)

    def _at(self, position: int) -> float:
        if abs(position) > self.max_bits + self.has_inf:
            return math.nan
        value = self.decode(abs(position))
        return -value if position < 0 else value

    # ---- for people

    def formula(self, bits: int) -> str:
        """The value formula with this pattern's numbers in it."""
        sign, exponent, mantissa = self.split(bits)
        if bits & ~self.sign_bit > self.max_bits:
            return f"exponent field {exponent} is the largest: {self.kind(bits)}" if self.has_inf else "all ones: NaN"
        lead, power = (1, exponent - self.bias) if exponent else (0, self.min_exponent)
        written = f"{exponent} - {self.bias}" if exponent else f"1 - {self.bias}"
        return f"(-1)^{sign} x 2^({written}) x ({lead} + {mantissa}/{2**self.mantissa_bits}) = " + (
            f"{'-' if sign else ''}2^{power} x {lead + mantissa / 2**self.mantissa_bits!r}"
        )

    def hex(self, bits: int) -> str:
        return f"0x{bits:0{-(-self.bits // 4)}X}"


def _floor_log2(magnitude: float | Fraction) -> int:
    """Exact, which math.log2 is not next to a power of two."""
    numerator, denominator = Fraction(magnitude).as_integer_ratio()
    exponent = numerator.bit_length() - denominator.bit_length()
    return exponent if Fraction(numerator, denominator) >= Fraction(2) ** exponent else exponent - 1


_ALL = (
    Format("fp64", 11, 52),
    Format("fp32", 8, 23),
    Format("tf32", 8, 10, storage_bits=32),
    Format("fp16", 5, 10),
    Format("bf16", 8, 7),
    Format("fp8_e5m2", 5, 2),
    Format("fp8_e4m3", 4, 3, has_inf=False, saturates=True),
    Format("fp4_e2m1", 2, 1, has_inf=False, has_nan=False, saturates=True),
)
FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in _ALL}


def format_named(name: str | Format) -> Format:
    """The format called `name` ("fp16"); a Format is returned as it is. Raises ValueError naming the nearest."""
    if isinstance(name, Format):
        return name
    plain = str(name).lower().replace(" ", "_").replace("-", "_")
    if plain in FORMATS:
        return FORMATS[plain]
    raise ValueError(f"no format is called {name!r}{did_you_mean(plain, FORMATS)}  (all of them: {', '.join(FORMATS)})")


# ---- microscaled blocks (OCP MX): 32 elements share one power of two -------------------------------------------------

MX_BLOCK = 32
E8M0_BIAS = 127  # the scale is an exponent and nothing else: code c means 2^(c - 127), 255 means NaN


@dataclass(frozen=True)
class Block:
    """Up to 32 elements of one format and their shared scale, as patterns."""

    element: Format
    scale_bits: int
    codes: tuple[int, ...]

    @property
    def scale(self) -> float:
        return math.nan if self.scale_bits == 255 else math.ldexp(1.0, self.scale_bits - E8M0_BIAS)

    def decode(self) -> list[float]:
        return [self.element.decode(code) * self.scale for code in self.codes]


def mx_scale_exponent(values: Iterable[float], max_exponent: int) -> int:
    """The exponent of a block's shared scale: it puts the largest magnitude into the element format's top binade, whose
    exponent is `max_exponent` (8 for e4m3, 15 for e5m2, 2 for e2m1). Clamped to what e8m0 can hold, -127 to 127; a
    block of zeros gets -127. OCP MX v1.0, section 6.3."""
    largest = max((abs(value) for value in values), default=0.0)
    if largest == 0:
        return -E8M0_BIAS
    return min(max(_floor_log2(largest) - max_exponent, -E8M0_BIAS), E8M0_BIAS)


def mx_quantise(values: Sequence[float], element: str | Format, block: int = MX_BLOCK) -> list[Block]:
    """Blocks of `block` values each; the last may be shorter. Elements that are still too large saturate. A block with
    an infinity or a NaN in it has no scale and decodes to NaN."""
    element = format_named(element)
    blocks = []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        if not all(map(math.isfinite, part)):
            blocks.append(Block(element, 255, (0,) * len(part)))
            continue
        exponent = mx_scale_exponent(part, element.max_exponent)
        codes = (element.encode(Fraction(value) / Fraction(2) ** exponent, saturate=True) for value in part)
        blocks.append(Block(element, exponent + E8M0_BIAS, tuple(codes)))
    return blocks


def mx_dequantise(blocks: Iterable[Block]) -> list[float]:
    return [value for block in blocks for value in block.decode()]


def mx_bits_per_element(element: str | Format, block: int = MX_BLOCK) -> float:
    """Elements and their share of the scale's 8 bits: 8.25 for fp8, 4.25 for fp4."""
    return format_named(element).bits + 8 / block


# ---- integers --------------------------------------------------------------------------------------------------------


def quantise_symmetric(values: Sequence[float], bits: int) -> tuple[float, list[int]]:
    """(scale, integers) with value ~ scale x integer: the largest magnitude becomes 2^(bits - 1) - 1, zero stays 0."""
    top = 2 ** (bits - 1) - 1
    scale = max((abs(value) for value in values), default=0.0) / top or 1.0
    return scale, [min(max(round(value / scale), -top), top) for value in values]


def pack_int4(values: Sequence[int]) -> bytes:
    """Two integers from -8 to 7 in a byte, two's complement, the first in the low half; after an odd last one comes 0.

    Raises ValueError for an integer outside that range."""
    for value in values:
        if not -8 <= value <= 7:
            raise ValueError(f"pack_int4: values must be -8 to 7, got {value}")
    padded = [*values, 0] if len(values) % 2 else values
    return bytes((low & 15) | (high & 15) << 4 for low, high in zip(padded[::2], padded[1::2], strict=True))


def unpack_int4(packed: bytes, count: int) -> list[int]:
    """The first `count` integers of `pack_int4`'s bytes. Raises ValueError if there are fewer."""
    if not 0 <= count <= 2 * len(packed):
        raise ValueError(f"unpack_int4: count must be 0 to {2 * len(packed)} for {len(packed)} bytes, got {count}")
    halves = (half for byte in packed for half in (byte & 15, byte >> 4))
    return [half - 16 if half >= 8 else half for half, _ in zip(halves, range(count), strict=False)]
