"""Numbers one by one: Fourier transforms, polynomials, hashes, divisors, waves, roundings by chance, levels, stereo."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation.fifth_set.case import case
from gpukit.validation.new_kernels.case import BF16, FLOAT, HALF, INT32, MI, UINT8, Work, empty, known, normal

FOURIER, HORNER, WHOLE = "Fourier transforms", "polynomials by Horner", "hashes and divisors"
CHANCE, LEVELS, CHANNELS, PLACES = (
    "rounded by chance",
    "levels from a table",
    "channels side by side",
    "places by division",
)
WAVES = "waves of coordinates"


@triton.jit
def times(ar, ai, br, bi):
    """The product of two complex numbers."""
    return ar * br - ai * bi, ar * bi + ai * br


@triton.jit
def fourth_parts(x_ptr, y_ptr, n, ns, BLOCK: tl.constexpr):
    """One stage of a Fourier transform by fours: complex numbers a quarter of x apart, which are stored ns apart."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = j & (ns - 1)
    angle = -1.5707963267948966 * k.to(tl.float32) / ns
    c1, s1 = tl.cos(angle), tl.sin(angle)
    c2, s2 = times(c1, s1, c1, s1)
    c3, s3 = times(c1, s1, c2, s2)
    q = n // 4
    ar, ai = tl.load(x_ptr + 2 * j), tl.load(x_ptr + 2 * j + 1)
    br, bi = times(tl.load(x_ptr + 2 * (j + q)), tl.load(x_ptr + 2 * (j + q) + 1), c1, s1)
    cr, ci = times(tl.load(x_ptr + 2 * (j + 2 * q)), tl.load(x_ptr + 2 * (j + 2 * q) + 1), c2, s2)
    dr, di = times(tl.load(x_ptr + 2 * (j + 3 * q)), tl.load(x_ptr + 2 * (j + 3 * q) + 1), c3, s3)
    er, ei, fr, fi = ar + cr, ai + ci, ar - cr, ai - ci
    gr, gi, hr, hi = br + dr, bi + di, bi - di, dr - br
    to = y_ptr + 2 * ((j - k) * 4 + k)
    tl.store(to, er + gr)
    tl.store(to + 1, ei + gi)
    tl.store(to + 2 * ns, fr + hr)
    tl.store(to + 2 * ns + 1, fi + hi)
    tl.store(to + 4 * ns, er - gr)
    tl.store(to + 4 * ns + 1, ei - gi)
    tl.store(to + 6 * ns, fr - hr)
    tl.store(to + 6 * ns + 1, fi - hi)


@case("Fourier transform of 4 Mi complex fp32 by fours, 11 launches", FOURIER, dict(stages=11), dict(stages=5))
def _(device, stages):
    n = 4**stages
    x, a, b = normal(device, n, 2, dtype=FLOAT), empty(device, n, 2, dtype=FLOAT), empty(device, n, 2, dtype=FLOAT)
    block = min(256, n // 4)

    def run():
        source = x
        for stage in range(stages):
            to = a if stage % 2 == (stages - 1) % 2 else b
            fourth_parts[(n // 4 // block,)](source, to, n, 4**stage, BLOCK=block)
            source = to

    return Work(run, a, lambda: torch.view_as_real(torch.fft.fft(torch.view_as_complex(x))))


@triton.jit
def horner(x_ptr, c_ptr, y_ptr, DEGREE: tl.constexpr, BLOCK: tl.constexpr):
    """A polynomial whose coefficients are loaded: a chain of DEGREE multiply-adds per number, by two warps."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    y = tl.load(c_ptr)
    for i in tl.static_range(1, DEGREE + 1):
        y = y * x + tl.load(c_ptr + i)
    tl.store(y_ptr + at, y)


@case("polynomials of degree 150, 16 Mi fp32", HORNER, dict(n=16 * MI, degree=150), dict(n=1024, degree=9))
def _(device, n, degree):
    x, c, y = (
        normal(device, n, dtype=FLOAT).sigmoid(),
        normal(device, degree + 1, dtype=FLOAT),
        empty(device, n, dtype=FLOAT),
    )

    def want():
        y = torch.zeros_like(x)
        for i in range(degree + 1):
            y = y * x + c[i]
        return y

    return Work(lambda: horner[(n // 512,)](x, c, y, DEGREE=degree, BLOCK=512, num_warps=2), y, want)


@triton.jit
def hash_rows(x_ptr, y_ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """FNV-1a of rows of WORDS numbers, a row per lane, one word after the other; products of 64 bits."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.full((BLOCK,), 2166136261, tl.int64)
    for i in range(WORDS):
        h = ((h ^ tl.load(x_ptr + row * WORDS + i).to(tl.int64)) * 16777619) & 0xFFFFFFFF
    tl.store(y_ptr + row, (h >> 1).to(tl.int32))


@case("hashes of 4 Mi rows of 24 int32", WHOLE, dict(n=4 * MI, words=24), dict(n=256, words=5))
def _(device, n, words):
    x, y = known(device, (1 << 31) - 1, n, words), empty(device, n, dtype=INT32)

    def want():
        h = torch.full((n,), 2166136261, dtype=torch.int64, device=x.device)
        for i in range(words):
            h = ((h ^ x[:, i].long()) * 16777619) & 0xFFFFFFFF
        return h >> 1

    return Work(lambda: hash_rows[(n // 128,)](x, y, WORDS=words, BLOCK=128), y, want)


@triton.jit
def common_divisors(a_ptr, b_ptr, y_ptr, steps, BLOCK: tl.constexpr):
    """Euclid's remainders, as often as the largest pair needs them; no lane ends before the others."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    for _ in range(steps):
        rest = a % tl.maximum(b, 1)
        a, b = tl.where(b > 0, b, a), tl.where(b > 0, rest, 0)
    tl.store(y_ptr + at, a)


@case("common divisors of 2 Mi pairs int32, 24 steps", WHOLE, dict(n=2 * MI), dict(n=512))
def _(device, n):
    a, b = known(device, 1 << 15, n), (known(device, 1 << 15, 2 * n)[n:]).contiguous()
    y = empty(device, n, dtype=INT32)
    return Work(lambda: common_divisors[(n // 256,)](a, b, y, 24, BLOCK=256), y, lambda: torch.gcd(a, b))


@triton.jit
def round_by_chance(x_ptr, y_ptr, seed, BLOCK: tl.constexpr):
    """fp32 to bf16, up or down by chance: 16 random bits are added below the bits that stay."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x_ptr + at).to(tl.int32, bitcast=True) + (tl.randint(seed, at).to(tl.int32) & 0xFFFF)
    tl.store(y_ptr + at, (bits & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16))


@case("64 Mi fp32 to bf16, rounded by chance", CHANCE, dict(n=64 * MI), dict(n=2048))
def _(device, n):
    x, y = normal(device, n, dtype=FLOAT), empty(device, n, dtype=BF16)
    return Work(lambda: round_by_chance[(n // 1024,)](x, y, 7, BLOCK=1024), y, lambda: x)


@triton.jit
def from_levels(code_ptr, level_ptr, scale_ptr, y_ptr, BLOCK: tl.constexpr):
    """Two of 16 levels in each byte, looked up, times a scale for each 64 of them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(code_ptr + at).to(tl.int32)
    scale = tl.load(scale_ptr + at // 32).to(tl.float32)
    high, low = tl.load(level_ptr + (code >> 4)) * scale, tl.load(level_ptr + (code & 15)) * scale
    tl.store(y_ptr + 2 * at, high.to(y_ptr.dtype.element_ty))
    tl.store(y_ptr + 2 * at + 1, low.to(y_ptr.dtype.element_ty))


@triton.jit
def to_levels(x_ptr, level_ptr, code_ptr, scale_ptr, ROWS: tl.constexpr):
    """Blocks of 64 numbers by their largest; a number's code is how many middles between levels are below it."""
    row, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + row * 64 + i).to(tl.float32)
    scale = tl.max(tl.abs(x), 1)
    x = x / scale[:, None]
    code = tl.zeros((ROWS, 64), tl.int32)
    for level in tl.static_range(15):
        code += (x > (tl.load(level_ptr + level) + tl.load(level_ptr + level + 1)) * 0.5).to(tl.int32)
    pairs = tl.sum(tl.reshape(code, (ROWS, 32, 2)) * tl.where(tl.arange(0, 2) == 0, 16, 1)[None, None, :], 2)
    to = tl.program_id(0) * ROWS * 32 + tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(code_ptr + to, pairs.to(tl.uint8))
    tl.store(scale_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS), scale)


def _levels(device):
    """Sixteen, closer to one another around 0."""
    steps = torch.linspace(-1, 1, 16, device=device)
    return steps.abs().sqrt() * steps


@case("64 Mi bf16 to codes of 4 bits and back, two launches", LEVELS, dict(n=64 * MI), dict(n=4096))
def _(device, n):
    x, y, levels = normal(device, n), empty(device, n), _levels(device)
    code, scale = empty(device, n // 2, dtype=UINT8), empty(device, n // 64, dtype=FLOAT)

    def run():
        to_levels[(n // 64 // 16,)](x, levels, code, scale, ROWS=16)
        from_levels[(n // 2 // 1024,)](code, levels, scale, y, BLOCK=1024)

    def want():
        rows = x.float().view(-1, 64)
        largest = rows.abs().amax(1, keepdim=True)
        middles = (levels[1:] + levels[:-1]) / 2
        return (levels[torch.bucketize(rows / largest, middles)] * largest).view(-1)

    return Work(run, y, want)


@triton.jit
def middle_and_sides(x_ptr, y_ptr, n, gain, BLOCK: tl.constexpr):
    """Left and right of int16, side by side, become what both have and what differs, with limits."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    left = tl.load(x_ptr + 2 * at, mask=live, other=0).to(tl.int32)
    right = tl.load(x_ptr + 2 * at + 1, mask=live, other=0).to(tl.int32)
    middle, side = (left + right) * gain >> 8, (left - right) * gain >> 8
    tl.store(y_ptr + 2 * at, tl.minimum(tl.maximum(middle, -32768), 32767).to(tl.int16), mask=live)
    tl.store(y_ptr + 2 * at + 1, tl.minimum(tl.maximum(side, -32768), 32767).to(tl.int16), mask=live)


@case("48,000,001 stereo samples to middle and sides int16", CHANNELS, dict(n=48_000_001), dict(n=1001))
def _(device, n):
    x, y = known(device, 32767, n, 2, dtype=torch.int16), empty(device, n, 2, dtype=torch.int16)

    def want():
        left, right = x.int().unbind(1)
        return (torch.stack([left + right, left - right], 1) * 200 >> 8).clamp(-32768, 32767)

    return Work(lambda: middle_and_sides[(triton.cdiv(n, 1024),)](x, y, n, 200, BLOCK=1024), y, want)


@triton.jit
def by_division(x_ptr, y_ptr, n, B, C, D, E, BLOCK: tl.constexpr):
    """[A, B, C, D, E] to [A, D, C, B, E]: where an element comes from is found by dividing by sizes that are arguments."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e, rest = at % E, at // E
    b, rest = rest % B, rest // B
    c, rest = rest % C, rest // C
    d, a = rest % D, rest // D
    x = tl.load(x_ptr + (((a * B + b) * C + c) * D + d) * E + e, mask=at < n)
    tl.store(y_ptr + at, x, mask=at < n)


@case(
    "23 x 31 x 97 x 29 x 35 fp16, second and fourth dimension swapped",
    PLACES,
    dict(A=23, B=31, C=97, D=29, E=35),
    dict(A=2, B=3, C=5, D=7, E=9),
)
def _(device, A, B, C, D, E):
    x, y = normal(device, A, B, C, D, E, dtype=HALF), empty(device, A, D, C, B, E, dtype=HALF)
    n = A * B * C * D * E

    def run():
        return by_division[(triton.cdiv(n, 1024),)](x, y, n, B, C, D, E, BLOCK=1024)

    return Work(run, y, lambda: x.transpose(1, 3))


@triton.jit
def waves(x_ptr, y_ptr, OCTAVES: tl.constexpr, BLOCK: tl.constexpr):
    """Sines and cosines of a coordinate in OCTAVES octaves, stored side by side as bf16."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    octave = tl.arange(0, OCTAVES)[None, :]
    angle = tl.load(x_ptr + at) * tl.exp2(octave.to(tl.float32))
    to = y_ptr + at * 2 * OCTAVES + octave
    tl.store(to, tl.sin(angle).to(tl.bfloat16))
    tl.store(to + OCTAVES, tl.cos(angle).to(tl.bfloat16))


@case("8 octaves of waves of 12 Mi coordinates bf16", WAVES, dict(n=12 * MI), dict(n=256))
def _(device, n):
    x, y = normal(device, n, dtype=FLOAT), empty(device, n, 2, 8)

    def want():
        angle = x[:, None] * torch.exp2(torch.arange(8, device=x.device))
        return torch.stack([angle.sin(), angle.cos()], 1)

    return Work(lambda: waves[(n // 128,)](x, y, OCTAVES=8, BLOCK=128), y, want)
