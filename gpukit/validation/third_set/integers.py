"""Arithmetic on whole numbers and bits, numbers of 64 bits, and functions that are computed from others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from gpukit.validation.new_kernels.case import FLOAT, HALF, INT32, MI, UINT8, Work, empty, known, normal
from gpukit.validation.third_set.case import case

INTEGERS, BITS, DOUBLES, FUNCTIONS = "whole numbers", "bits that are packed", "64 bits", "functions"
LONG, DOUBLE = torch.int64, torch.float64


@triton.jit
def remainders(x_ptr, y_ptr, divisor, BLOCK: tl.constexpr):
    """Quotient plus remainder by a number that only the launch knows, eight times."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    for _ in tl.static_range(8):
        x = x // divisor + x % divisor * 7919
    tl.store(y_ptr + at, x)


@case("8 divisions of 32 Mi int32", INTEGERS, dict(n=32 * MI), dict(n=2048))
def _(device, n):
    x, y = known(device, 1 << 30, n), empty(device, n, dtype=INT32)

    def want():
        z = x.long()
        for _ in range(8):
            z = z // 100_003 + z % 100_003 * 7919
        return z

    return Work(lambda: remainders[(n // 1024,)](x, y, 100_003, BLOCK=1024), y, want)


@triton.jit
def powers(x_ptr, y_ptr, EXPONENT: tl.constexpr, BLOCK: tl.constexpr):
    """x to a power modulo 65,521, by squares."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at).to(tl.int64)
    y = tl.full((BLOCK,), 1, tl.int64)
    for bit in tl.static_range(16):
        if (EXPONENT >> bit) & 1:
            y = y * x % 65_521
        x = x * x % 65_521
    tl.store(y_ptr + at, y.to(tl.int32))


@case("powers modulo a prime, 16 Mi int64", DOUBLES, dict(n=16 * MI), dict(n=512))
def _(device, n):
    x, y = known(device, 65_521, n), empty(device, n, dtype=INT32)

    def want():
        z, out, e = x.long(), torch.ones_like(x, dtype=LONG), 40_961
        while e:
            out = out * z % 65_521 if e % 2 else out
            z, e = z * z % 65_521, e // 2
        return out

    return Work(lambda: powers[(n // 512,)](x, y, EXPONENT=40_961, BLOCK=512), y, want)


@triton.jit
def pack_bits(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Which of 32 numbers are positive, in the bits of one."""
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 32)
    x = tl.load(x_ptr + word[:, None] * 32 + bit[None, :])
    tl.store(y_ptr + word, tl.sum((x > 0).to(tl.int32) << bit[None, :], 1))


@case("signs of 128 Mi fp16 packed into bits", BITS, dict(n=128 * MI), dict(n=4096))
def _(device, n):
    x, y = normal(device, n, dtype=HALF), empty(device, n // 32, dtype=INT32)

    def want():
        weights = 1 << torch.arange(32, device=x.device)
        return ((x.view(-1, 32) > 0) * weights).sum(1).to(INT32)  # the upper bit is a sign

    return Work(lambda: pack_bits[(n // 32 // 64,)](x, y, BLOCK=64), y, want)


@triton.jit
def unpack_bits(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Eight numbers of 0 or 1 out of each byte, whose bits all eight threads read."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x_ptr + at // 8).to(tl.int32)
    tl.store(y_ptr + at, ((bits >> (at % 8)) & 1).to(y_ptr.dtype.element_ty))


@case("16 Mi bytes unpacked into 128 Mi fp16", BITS, dict(n=16 * MI), dict(n=512))
def _(device, n):
    x, y = known(device, 256, n, dtype=UINT8), empty(device, n, 8, dtype=HALF)

    def run():
        return unpack_bits[(n // 128,)](x, y, BLOCK=1024)

    return Work(run, y, lambda: (x[:, None].to(INT32) >> torch.arange(8, device=x.device)) & 1)


@triton.jit
def bit_counts(x_ptr, y_ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Bits in which WORDS words of a row differ from those of the first row: a distance of codes."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for word in range(WORDS):
        x = tl.load(x_ptr + row * WORDS + word) ^ tl.load(x_ptr + word)
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        total += (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
    tl.store(y_ptr + row, total)


@case("bits that 4 Mi codes of 512 differ in", BITS, dict(n=4 * MI), dict(n=512))
def _(device, n):
    x, y = known(device, (1 << 31) - 1, n, 16), empty(device, n, dtype=INT32)

    def want():
        differ = x ^ x[0]
        return sum(((differ >> bit) & 1).sum(1) for bit in range(31))

    return Work(lambda: bit_counts[(n // 256,)](x, y, WORDS=16, BLOCK=256), y, want)


@triton.jit
def polynomial(x_ptr, y_ptr, DEGREE: tl.constexpr, BLOCK: tl.constexpr):
    """1 + x / 2 (1 + x / 2 (...)), in float64."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    y = tl.full((BLOCK,), 1.0, tl.float64)
    for _ in tl.static_range(DEGREE):
        y = y * x * 0.5 + 1.0
    tl.store(y_ptr + at, y)


@case("polynomials of degree 24, 16 Mi fp64", DOUBLES, dict(n=16 * MI), dict(n=1024))
def _(device, n):
    x, y = normal(device, n, dtype=FLOAT).double(), empty(device, n, dtype=DOUBLE)

    def want():
        z = torch.ones_like(x)
        for _ in range(24):
            z = z * x * 0.5 + 1.0
        return z

    return Work(lambda: polynomial[(n // 1024,)](x, y, DEGREE=24, BLOCK=1024), y, want)


@triton.jit
def powers_of_angles(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """|sin x| to the power 1.7, and the error function: functions of the library, far from zero too."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, libdevice.pow(tl.abs(libdevice.sin(x)), 1.7) + libdevice.erf(x))


@case("sines, powers and error functions of 32 Mi fp32", FUNCTIONS, dict(n=32 * MI), dict(n=1024))
def _(device, n):
    x, y = normal(device, n, dtype=FLOAT), empty(device, n, dtype=FLOAT)

    def run():
        return powers_of_angles[(n // 1024,)](x, y, BLOCK=1024)

    return Work(run, y, lambda: x.double().sin().abs() ** 1.7 + x.double().erf())


@triton.jit
def cube_roots(x_ptr, y_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """By Newton's method, from 1: each step divides."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.abs(tl.load(x_ptr + at)) + 0.5
    y = tl.full((BLOCK,), 1.0, tl.float32)
    for _ in tl.static_range(STEPS):
        y = (2.0 * y + x / (y * y)) / 3.0
    tl.store(y_ptr + at, y)


@case("cube roots of 64 Mi fp32 in 10 steps", FUNCTIONS, dict(n=64 * MI), dict(n=1024))
def _(device, n):
    x, y = normal(device, n, dtype=FLOAT), empty(device, n, dtype=FLOAT)

    def run():
        return cube_roots[(n // 1024,)](x, y, STEPS=10, BLOCK=1024)

    return Work(run, y, lambda: (x.double().abs() + 0.5) ** (1 / 3))
