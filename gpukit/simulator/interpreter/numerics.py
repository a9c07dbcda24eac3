"""Number formats that NumPy has not, and conversions that a GPU makes differently: bits in, bits out."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def bf16_floats(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) as float32, exactly."""
    return (np.asanyarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_bits(values, toward_zero: bool = False) -> np.ndarray:
    """Numbers as bf16 bits (uint16), rounded to nearest even; NaN stays NaN, what is too large becomes infinite."""
    values = np.asanyarray(values)
    shape = values.shape
    bits = values.astype(np.float32).reshape(-1).view(np.uint32)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    rounding = np.uint32(0) if toward_zero else np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + rounding) >> np.uint32(16)).astype(np.uint16)
    if nan.any():
        rounded[nan] = 0x7FFF  # what cvt.rn.bf16.f32 returns
    return rounded.reshape(shape)


def tf32(values: np.ndarray) -> np.ndarray:
    """fp32 numbers as the tensor cores read them: Triton passes them on unchanged, and the hardware takes no notice of the
    last 13 bits of the significand."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@lru_cache(maxsize=2)
def _fp8_values(name: str) -> np.ndarray:
    """The 256 numbers of a format, by their bits."""
    code = np.arange(256)
    bits, bias = (3, 7) if name == "fp8e4nv" else (2, 15)
    exponent, fraction = (code >> bits) & (0x7F >> bits), code & ((1 << bits) - 1)
    size = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias - bits), (1 + fraction / 2**bits) * 2.0 ** (exponent - bias)
    )
    if name == "fp8e4nv":
        size[(code & 0x7F) == 0x7F] = np.nan
    else:
        size[(code & 0x7F) == 0x7C] = np.inf
        size[(code & 0x7F) > 0x7C] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


def fp8_floats(bits: np.ndarray, name: str) -> np.ndarray:
    """fp8 bits (uint8) as float32, exactly; `name` is Triton's: "fp8e4nv" or "fp8e5"."""
    return _fp8_values(name)[bits]


def fp8_bits(values, name: str) -> np.ndarray:
    """Numbers as fp8 bits, rounded to nearest even. What is too large becomes the largest number, as from PTX's
    cvt.rn.satfinite; NaN becomes 0x7f."""
    values = np.asarray(values, dtype=np.float64)
    finite = _fp8_values(name)[: 0x7F if name == "fp8e4nv" else 0x7C].astype(np.float64)
    middles = (finite[1:] + finite[:-1]) / 2
    size = np.abs(values)
    code = np.searchsorted(middles, size)
    tie = (code < middles.size) & (middles[np.minimum(code, middles.size - 1)] == size)
    code += tie & (code % 2 == 1)
    code = np.where(np.isnan(values), 0x7F, code | (np.signbit(values) << 7))
    return code.astype(np.uint8)


_FP4_SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


def fp4_floats(bits: np.ndarray) -> np.ndarray:
    """fp4 bits (e2m1, in the lower half of a byte) as float32, exactly."""
    return np.where(bits & 8, -1, 1).astype(np.float32) * _FP4_SIZES[bits & 7]


def high_half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the bits of a product of unsigned integers."""
    if a.itemsize < 8:
        return (a.astype(np.uint64) * b >> np.uint64(8 * a.itemsize)).astype(a.dtype)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    middle = (a >> half) * (b & low) + ((a & low) * (b & low) >> half)  # no sum here is beyond 64 bits
    other = (a & low) * (b >> half) + (middle & low)
    return (a >> half) * (b >> half) + (middle >> half) + (other >> half)


def integers(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Floats as integers, truncated, as an H200 makes them: the limits of the type hold what is beyond them; of 8 bits those of
    16, whose low half they are. NaN is 0, but a float64's, and in 64 bits, has the highest bit alone."""
    info = np.iinfo(dtype)
    if info.bits == 8:
        return integers(values, np.dtype(f"{np.dtype(dtype).kind}2")).astype(dtype)
    wide = np.trunc(values.astype(np.float64))
    out = np.clip(np.nan_to_num(wide, nan=0.0), float(info.min), float(info.max))
    exact = out.astype(dtype) if info.bits < 64 else np.where(out >= float(info.max), 0, out).astype(dtype)
    exact = exact if info.bits < 64 else np.where(out >= float(info.max), info.max, exact)
    highest_bit = np.array(1 << (info.bits - 1), dtype=f"u{np.dtype(dtype).itemsize}").astype(dtype)
    return np.where(np.isnan(wide), highest_bit, exact) if 64 in (info.bits, 8 * values.itemsize) else exact
