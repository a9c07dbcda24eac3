"""Number formats against torch and ml_dtypes bit by bit, and the notebook's exercises."""

import json
import math
import random
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from gpukit.accounting.dtypes import (
    FORMATS,
    Format,
    format_named,
    mx_bits_per_element,
    mx_dequantise,
    mx_quantise,
    mx_scale_exponent,
    pack_int4,
    quantise_symmetric,
    unpack_int4,
)
from gpukit.checks.dtypes import EXERCISES

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "01_dtypes.ipynb"
TORCH = {
    "fp64": (torch.float64, torch.int64),
    "fp32": (torch.float32, torch.int32),
    "fp16": (torch.float16, torch.int16),
    "bf16": (torch.bfloat16, torch.int16),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
}
# Eager casts to e4m3 saturate since 2.12 (https://github.com/pytorch/pytorch/pull/178817); before, they gave NaN.
TORCH_SATURATES_E4M3 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def same(a: float, b: float) -> bool:
    return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)


def torch_decode(name: str, patterns: list[int]) -> list[float]:
    dtype, carrier = TORCH[name]
    bits = FORMATS[name].bits
    signed = [p - (1 << bits) if carrier != torch.uint8 and p >= 1 << (bits - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=carrier).view(dtype).to(torch.float64).tolist()


def torch_encode(name: str, values: torch.Tensor) -> list[int]:
    dtype, carrier = TORCH[name]
    codes = values.to(dtype).view(carrier).to(torch.int64)
    return (codes & ((1 << FORMATS[name].bits) - 1)).tolist() if FORMATS[name].bits < 64 else codes.tolist()


def hard_values(fmt: Format, count: int, seed: int = 0) -> list[float]:
    """Numbers where rounding can go wrong: halfway between neighbours, just beside it, and over the whole range."""
    rng = random.Random(seed)
    values = [0.0, -0.0, 1.0, -1.0, fmt.max, -fmt.max, fmt.smallest_normal, fmt.smallest_subnormal]
    values += [
        fmt.smallest_subnormal / 2,
        fmt.smallest_subnormal * 0.75,
        fmt.smallest_normal - fmt.smallest_subnormal / 2,
    ]
    top = fmt.max + fmt.spacing(fmt.max) / 2
    values += [top, math.nextafter(top, 0), math.nextafter(top, math.inf), 4 * fmt.max]
    for _ in range(count):
        a = fmt.decode(rng.randrange(fmt.max_bits))
        halfway = a + fmt.spacing(a) / 2
        values += [
            a,
            halfway,
            -halfway,
            math.nextafter(halfway, 0),
            math.nextafter(halfway, math.inf),
            a * rng.random(),
        ]
    return values


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bits", "bias", "largest", "smallest_normal", "smallest_subnormal", "eps"),
    [
        ("fp64", 64, 1023, 1.7976931348623157e308, 2.0**-1022, 2.0**-1074, 2.0**-52),
        ("fp32", 32, 127, 3.4028234663852886e38, 2.0**-126, 2.0**-149, 2.0**-23),
        ("tf32", 19, 127, 3.4011621342146535e38, 2.0**-126, 2.0**-136, 2.0**-10),
        ("fp16", 16, 15, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10),
        ("bf16", 16, 127, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7),
        ("fp8_e5m2", 8, 15, 57344.0, 2.0**-14, 2.0**-16, 0.25),
        ("fp8_e4m3", 8, 7, 448.0, 2.0**-6, 2.0**-9, 0.125),
        ("fp4_e2m1", 4, 1, 6.0, 1.0, 0.5, 0.5),
    ],
)
def test_limits_by_hand(name, bits, bias, largest, smallest_normal, smallest_subnormal, eps):
    fmt = FORMATS[name]
    assert (fmt.bits, fmt.bias, fmt.max) == (bits, bias, largest)
    assert (fmt.smallest_normal, fmt.smallest_subnormal, fmt.eps) == (smallest_normal, smallest_subnormal, eps)


@pytest.mark.parametrize("name", TORCH)
def test_limits_equal_torch_finfo(name):
    fmt, info = FORMATS[name], torch.finfo(TORCH[name][0])
    assert (fmt.max, fmt.smallest_normal, fmt.eps, fmt.bits) == (info.max, info.smallest_normal, info.eps, info.bits)


def test_tf32_takes_four_bytes_in_memory():
    assert (FORMATS["tf32"].bits, FORMATS["tf32"].storage_bits) == (19, 32)
    assert FORMATS["fp16"].storage_bits == 16


def test_all_values_of_fp4():
    fp4 = FORMATS["fp4_e2m1"]
    assert [fp4.decode(bits) for bits in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [fp4.kind(bits) for bits in (0, 1, 2, 7, 8)] == ["zero", "subnormal", "normal", "normal", "zero"]


# ---- against torch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e5m2", "fp8_e4m3"])
def test_decode_equals_torch_for_every_pattern(name):
    fmt = FORMATS[name]
    patterns = list(range(1 << fmt.bits))
    ours = map(fmt.decode, patterns)
    assert all(same(a, b) for a, b in zip(ours, torch_decode(name, patterns), strict=True))


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_decode_equals_torch_for_a_sample(name):
    fmt, rng = FORMATS[name], random.Random(1)
    patterns = [rng.randrange(1 << fmt.bits) for _ in range(3000)] + [fmt.encode(v) for v in (math.inf, -math.inf)]
    patterns += [0, fmt.sign_bit, 1, fmt.max_bits, (1 << fmt.mantissa_bits) - 1, (1 << fmt.mantissa_bits)]
    ours = map(fmt.decode, patterns)
    assert all(same(a, b) for a, b in zip(ours, torch_decode(name, patterns), strict=True))


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e5m2", "fp8_e4m3"])
def test_encode_turns_every_value_into_its_pattern(name):
    fmt = FORMATS[name]
    step = 1 if fmt.bits == 8 else 37
    for bits in range(0, 1 << fmt.bits, step):
        if fmt.kind(bits) != "NaN":
            assert fmt.encode(fmt.decode(bits), saturate=False) == bits


@pytest.mark.parametrize("name", TORCH)
def test_encode_equals_torch_on_hard_values(name):
    fmt = FORMATS[name]
    values = hard_values(fmt, 400)
    if name != "fp64":  # torch rounds a float64 to float32 first where it has no direct cast: feed it float32
        values = torch.tensor(values, dtype=torch.float32 if name != "fp32" else torch.float64)
        values = [v for v in values.double().tolist() if math.isfinite(v)]
    saturate = TORCH_SATURATES_E4M3 if name == "fp8_e4m3" else None
    expected = torch_encode(
        name, torch.tensor(values, dtype=torch.float64 if name in ("fp64", "fp32") else torch.float32)
    )
    for value, theirs in zip(values, expected, strict=True):
        ours = fmt.encode(value, saturate=saturate)
        ours = ours - (1 << 64) if fmt.bits == 64 and ours >> 63 else ours
        assert ours == theirs or fmt.kind(ours) == fmt.kind(theirs) == "NaN", value


def test_tf32_is_fp32_with_thirteen_bits_rounded_away():
    tf32, fp32, rng = FORMATS["tf32"], FORMATS["fp32"], random.Random(2)
    for _ in range(500):
        bits = rng.randrange(fp32.max_bits)
        low = bits & 0x1FFF
        kept = bits >> 13
        kept += low > 0x1000 or (low == 0x1000 and kept & 1)
        assert tf32.encode(fp32.decode(bits)) == kept


# ---- against ml_dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "theirs"),
    [
        (FORMATS["fp4_e2m1"], "float4_e2m1fn"),
        (FORMATS["fp8_e4m3"], "float8_e4m3fn"),
        (FORMATS["fp8_e5m2"], "float8_e5m2"),
        (Format("e3m2", 3, 2, has_inf=False, has_nan=False), "float6_e3m2fn"),
        (Format("e2m3", 2, 3, has_inf=False, has_nan=False), "float6_e2m3fn"),
        (Format("e3m4", 3, 4), "float8_e3m4"),
        (Format("e4m3 with infinity", 4, 3), "float8_e4m3"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_described_formats_equal_ml_dtypes(fmt, theirs):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    np = pytest.importorskip("numpy")
    dtype = getattr(ml_dtypes, theirs)
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    decoded = codes.view(dtype).astype(np.float64).tolist()
    assert all(same(fmt.decode(bits), value) for bits, value in enumerate(decoded))
    values = np.array(hard_values(fmt, 100), dtype=np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(dtype).view(np.uint8).tolist()
    for value, code in zip(values.tolist(), expected, strict=True):
        ours = fmt.encode(value, saturate=False)
        assert ours == code or fmt.kind(ours) == fmt.kind(code) == "NaN", value


# ---- rounding, spacing, neighbours -----------------------------------------------------------------------------------


def test_ties_go_to_the_even_pattern():
    fp16 = FORMATS["fp16"]
    assert [fp16.round(v) for v in (2049, 2051, 2049.0001)] == [2048, 2052, 2050]
    assert fp16.round(Fraction(2049)) == 2048


def test_too_large_numbers():
    fp16, bf16, e4m3, e5m2, fp4 = (FORMATS[n] for n in ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1"))
    assert fp16.round(65519.99) == 65504
    assert fp16.round(65520) == math.inf
    assert bf16.round(-1e39) == -math.inf
    assert e5m2.round(1e6) == math.inf
    assert e4m3.round(1e6) == 448
    assert e4m3.round(464, saturate=False) == 448
    assert math.isnan(e4m3.round(464.1, saturate=False))
    assert fp4.round(-math.inf) == -6
    with pytest.raises(ValueError, match="fp4_e2m1 has no NaN"):
        fp4.encode(math.nan)


def test_the_number_that_vanishes():
    assert FORMATS["fp16"].round(1e-8) == 0
    assert FORMATS["fp16"].round(3e-8) == FORMATS["fp16"].smallest_subnormal
    assert FORMATS["bf16"].round(1e-8) == pytest.approx(1e-8, rel=FORMATS["bf16"].eps / 2)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e5m2", "fp8_e4m3", "fp4_e2m1"])
def test_spacing_is_the_distance_to_the_next_number(name):
    fmt = FORMATS[name]
    for bits in range(0, fmt.max_bits, 1 if fmt.bits < 16 else 101):
        value, following = fmt.decode(bits), fmt.decode(bits + 1)
        assert fmt.spacing(value) == fmt.spacing(-value) == following - value
        assert fmt.neighbours(bits)[1] == following
        assert fmt.neighbours(bits + 1)[0] == value


def test_spacing_at_the_ends():
    fp16 = FORMATS["fp16"]
    assert fp16.spacing(0) == fp16.smallest_subnormal
    assert fp16.spacing(65504) == 32
    assert math.isnan(fp16.spacing(math.inf))


def test_neighbours_at_zero_and_beyond_the_last_number():
    fp16, fp4, e4m3 = FORMATS["fp16"], FORMATS["fp4_e2m1"], FORMATS["fp8_e4m3"]
    tiny = fp16.smallest_subnormal
    assert fp16.neighbours(0) == fp16.neighbours(fp16.sign_bit) == (-tiny, tiny)
    assert fp16.neighbours(fp16.max_bits) == (65472, math.inf)
    assert math.isnan(fp16.neighbours(fp16.encode(math.inf))[1])
    assert fp4.neighbours(7)[0] == 4 and math.isnan(fp4.neighbours(7)[1])
    assert math.isnan(e4m3.neighbours(e4m3.max_bits)[1])


def test_stochastic_rounding_is_right_on_average():
    bf16 = FORMATS["bf16"]
    value = 1 + 0.3 * bf16.eps
    draws = [bf16.round_stochastic(value, (i + 0.5) / 1000) for i in range(1000)]
    assert set(draws) == {1.0, 1 + bf16.eps}
    assert sum(draws) / 1000 == pytest.approx(value, abs=bf16.eps / 1000)
    assert bf16.round_stochastic(-value, 0.29) == -(1 + bf16.eps)
    assert bf16.round_stochastic(1.5, 0.0) == 1.5
    assert FORMATS["fp16"].round_stochastic(1e-8, 0.9) == 0


def test_formula_and_hex():
    fp32, fp16, e4m3 = FORMATS["fp32"], FORMATS["fp16"], FORMATS["fp8_e4m3"]
    assert fp32.formula(fp32.encode(-0.15625)) == "(-1)^1 x 2^(124 - 127) x (1 + 2097152/8388608) = -2^-3 x 1.25"
    assert fp16.formula(1) == "(-1)^0 x 2^(1 - 15) x (0 + 1/1024) = 2^-14 x 0.0009765625"
    assert fp16.formula(fp16.encode(math.inf)) == "exponent field 31 is the largest: infinity"
    assert e4m3.formula(0x7F) == "all ones: NaN"
    assert [f.hex(f.encode(1.0)) for f in (fp32, fp16, e4m3, FORMATS["tf32"])] == [
        "0x3F800000",
        "0x3C00",
        "0x38",
        "0x1FC00",
    ]


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_unknown_format_names_the_nearest():
    with pytest.raises(ValueError, match=r"no format is called 'fp12'; did you mean 'fp32'\?"):
        format_named("fp12")
    assert format_named("FP8 e4m3") is FORMATS["fp8_e4m3"]
    assert format_named(FORMATS["bf16"]) is FORMATS["bf16"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Format("x", 12, 3), "exponent_bits must be 1 to 11 and mantissa_bits 0 to 52, got 12 and 3"),
        (lambda: Format("x", 4, 3, has_nan=False), "has_inf needs has_nan and a mantissa bit"),
        (lambda: Format("x", 4, 0), "has_inf needs has_nan and a mantissa bit"),
        (lambda: FORMATS["fp16"].decode(1 << 16), r"fp16: bits must be 0 to 2\^16 - 1, got 65536"),
        (lambda: pack_int4([3, 8]), "values must be -8 to 7, got 8"),
        (lambda: unpack_int4(b"ab", 5), "count must be 0 to 4 for 2 bytes, got 5"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- blocks and integers ---------------------------------------------------------------------------------------------


def test_mx_scale_puts_the_largest_element_into_the_top_binade():
    rng = random.Random(3)
    for element, top in (("fp8_e4m3", 8), ("fp8_e5m2", 15), ("fp4_e2m1", 2)):
        assert FORMATS[element].max_exponent == top
        for _ in range(50):
            block = [rng.gauss(0, 10 ** rng.randint(-20, 20)) for _ in range(32)]
            scaled = max(map(abs, block)) / 2.0 ** mx_scale_exponent(block, top)
            assert 2**top <= scaled < 2 ** (top + 1)


def test_mx_scale_at_the_ends():
    assert mx_scale_exponent([0.0, -0.0], 8) == -127
    assert mx_scale_exponent([], 8) == -127
    assert mx_scale_exponent([1e-300], 8) == -127
    assert mx_scale_exponent([1e300], 8) == 127
    assert mx_scale_exponent([math.nextafter(1.0, 0)], 0) == -1  # math.log2 would say 0


def test_mx_blocks_against_torch():
    """A block decodes to scale x (value / scale rounded by torch); the scale is torch's e8m0 too."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(96, generator=generator) * torch.logspace(-3, 3, 96)
    blocks = mx_quantise(values.tolist(), "fp8_e4m3")
    assert [len(block.codes) for block in blocks] == [32, 32, 32]
    for block, part in zip(blocks, values.view(3, 32), strict=True):
        scale = torch.tensor([block.scale_bits], dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
        assert scale.item() == block.scale
        expected = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        assert block.decode() == expected.tolist()


def test_mx_special_blocks():
    assert mx_dequantise(mx_quantise([0.0] * 3, "fp4_e2m1")) == [0.0] * 3
    assert all(map(math.isnan, mx_dequantise(mx_quantise([1.0, math.inf], "fp4_e2m1"))))
    assert mx_dequantise(mx_quantise([7.9], "fp4_e2m1")) == [6.0]  # within the top binade, beyond its last number
    assert (mx_bits_per_element("fp4_e2m1"), mx_bits_per_element("fp8_e4m3")) == (4.25, 8.25)


def test_int4_round_trip_and_layout():
    assert pack_int4([1, -1, 7]) == bytes([0xF1, 0x07])
    for values in ([], [-8], list(range(-8, 8)), [random.Random(5).randint(-8, 7) for _ in range(101)]):
        packed = pack_int4(values)
        assert len(packed) == (len(values) + 1) // 2
        assert unpack_int4(packed, len(values)) == values


def test_symmetric_quantisation():
    scale, codes = quantise_symmetric([0.0, -12.7, 6.35], 8)
    assert (scale, codes) == (pytest.approx(0.1), [0, -127, 64])
    assert quantise_symmetric([0.0, 0.0], 4) == (1.0, [0, 0])


# ---- the lesson ------------------------------------------------------------------------------------------------------


def test_notebook_repeats_the_labels_of_its_exercises():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for exercise in EXERCISES:
        assert f"*{exercise.label}*" in prose, f"{exercise.id}: the notebook has another label"
    assert f"of which {sum(exercise.label.minutes for exercise in EXERCISES)} minutes are exercises" in prose
