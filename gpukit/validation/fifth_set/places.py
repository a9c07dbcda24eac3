"""Places named by numbers: histograms, segments, edges, look-ups, probes; narrow columns, and programs with long loops."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.fifth_set.case import case
from gpukit.validation.new_kernels.case import (
    FLOAT,
    HALF,
    INT32,
    KI,
    MI,
    SMS,
    UINT8,
    Work,
    empty,
    known,
    normal,
    place,
)

BINS, SEGMENTS, EDGES, LOOKED_UP = "histograms of numbers", "largest of segments", "edges", "looked up in some order"
PROBES, NARROW, FEW = "probes of a table", "narrow columns", "few programs, long loops"
ODD_LOOPS = "odd rows in a persistent loop"


@triton.jit
def bins(x_ptr, y_ptr, n, low, factor, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """132 programs walk over numbers, each of which adds one to its bin in memory."""
    for first in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        bin_ = ((tl.load(x_ptr + at) - low) * factor).to(tl.int32)
        tl.atomic_add(y_ptr + tl.minimum(bin_, BINS - 1), 1, sem="relaxed")


@case("histogram of 16 Mi fp32 in 40 bins, 132 programs", BINS, dict(n=16 * MI, bins=40), dict(n=4096, bins=5))
@case("histogram of 32 Mi fp32 in 1 Mi bins, 132 programs", BINS, dict(n=32 * MI, bins=MI), dict(n=4096, bins=500))
def _(device, n, **sizes):
    """The bins are not cleared by what is measured."""
    # A bin's middle: rounding moves no number into another bin.
    x, y = (known(device, sizes["bins"], n).float() + 0.5) / sizes["bins"], empty(device, sizes["bins"], dtype=INT32)

    def run():
        return bins[(SMS,)](x, y, n, 0.0, float(sizes["bins"]), BINS=sizes["bins"], BLOCK=1024)

    return Work(run, y, lambda: (x * sizes["bins"]).int().bincount(minlength=sizes["bins"]))


@triton.jit
def largest_of_segments(x_ptr, segment_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """The largest number of each segment, whose members lie together: neighbors want the same place."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    segment = tl.load(segment_ptr + at, mask=at < n, other=0)
    tl.atomic_max(y_ptr + segment, tl.load(x_ptr + at, mask=at < n, other=0), mask=at < n, sem="relaxed")


@case(
    "largest of 100,003 segments of 16,300,489 int32, in order",
    SEGMENTS,
    dict(segments=100_003, mean=163),
    dict(segments=37, mean=9),
)
def _(device, segments, mean):
    n = segments * mean
    x, y = known(device, MI, n), empty(device, segments, dtype=INT32)
    segment = place(device, known("meta", segments, n).sort().values)

    def want():
        return y.new_zeros(segments).scatter_reduce(0, segment.long(), x, "amax")

    return Work(lambda: largest_of_segments[(triton.cdiv(n, 512),)](x, segment, y, n, BLOCK=512), y, want)


@triton.jit
def pull(x_ptr, from_ptr, to_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Two points at the ends of a spring, three numbers each: the pull is added to one end, and taken from the other."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(from_ptr + at) * 3, tl.load(to_ptr + at) * 3
    x = tl.load(x_ptr + b) - tl.load(x_ptr + a)
    y = tl.load(x_ptr + b + 1) - tl.load(x_ptr + a + 1)
    z = tl.load(x_ptr + b + 2) - tl.load(x_ptr + a + 2)
    factor = 1 - tl.rsqrt(x * x + y * y + z * z + 0.01)
    tl.atomic_add(y_ptr + a, factor * x, sem="relaxed")
    tl.atomic_add(y_ptr + a + 1, factor * y, sem="relaxed")
    tl.atomic_add(y_ptr + a + 2, factor * z, sem="relaxed")
    tl.atomic_add(y_ptr + b, -factor * x, sem="relaxed")
    tl.atomic_add(y_ptr + b + 1, -factor * y, sem="relaxed")
    tl.atomic_add(y_ptr + b + 2, -factor * z, sem="relaxed")


@case("2 Mi springs between 256 Ki points of three fp32", EDGES, dict(points=256 * KI, per=8), dict(points=64, per=4))
def _(device, points, per):
    """The sums are not cleared by what is measured. Springs of a point lie together, their other ends do not."""
    n = points * per
    x, y = normal(device, points, 3, dtype=FLOAT), empty(device, points, 3, dtype=FLOAT)
    a, b = place(device, torch.arange(n, dtype=INT32) // per), known(device, points, n)

    def want():
        d = x[b.long()] - x[a.long()]
        d = d * (1 - (d.square().sum(1, keepdim=True) + 0.01).rsqrt())
        return torch.zeros_like(x).index_add(0, a.long(), d).index_add(0, b.long(), -d)

    return Work(lambda: pull[(n // 128,)](x, a, b, y, n, BLOCK=128), y, want)


@triton.jit
def look_up(x_ptr, at_ptr, y_ptr, BLOCK: tl.constexpr):
    """One number for each index."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + tl.load(at_ptr + i)))


def _look_up(device, n, at):
    x, y = normal(device, 4 * n, dtype=FLOAT), empty(device, n, dtype=FLOAT)
    at = place(device, at)
    return Work(lambda: look_up[(n // 512,)](x, at, y, BLOCK=512), y, lambda: x[at.long()])


@case("16 Mi of 64 Mi fp32 by indices that rise", LOOKED_UP, dict(n=16 * MI), dict(n=1024))
def _(device, n):
    return _look_up(device, n, torch.arange(n, dtype=INT32) * 4 + known("meta", 4, n))


@case("16 Mi of 64 Mi fp32, by indices 4099 apart", LOOKED_UP, dict(n=16 * MI), dict(n=1024))
def _(device, n):
    return _look_up(device, n, (torch.arange(n) * 4099 % (4 * n)).int())


@triton.jit
def probe(key_ptr, table_ptr, y_ptr, MASK: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr):
    """How many of PROBES neighbors in a table of 64-bit keys are the key that is looked for; the first place is hashed."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_ptr + at)
    slot = (key * 40503 >> 7) & MASK
    found = tl.zeros((BLOCK,), tl.int32)
    for i in range(PROBES):
        found += (tl.load(table_ptr + ((slot + i) & MASK)) == key).to(tl.int32)
    tl.store(y_ptr + at, found)


@case("4 Mi keys in a table of 8 Mi int64, 6 probes", PROBES, dict(n=4 * MI, size=8 * MI), dict(n=512, size=64))
def _(device, n, size):
    key, table = known(device, size, n, dtype=torch.int64), known(device, size, size, dtype=torch.int64)
    y = empty(device, n, dtype=INT32)

    def want():
        slot = (key * 40503 >> 7) & (size - 1)
        return sum((table[(slot + i) & (size - 1)] == key).int() for i in range(6))

    return Work(lambda: probe[(n // 256,)](key, table, y, MASK=size - 1, PROBES=6, BLOCK=256), y, want)


@triton.jit
def narrow_columns(x_ptr, y_ptr, WIDTH, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The first COLS numbers of rows that are WIDTH long, moved together: 32 bytes out of 2 KiB."""
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    tl.store(y_ptr + row * COLS + col, tl.load(x_ptr + row * WIDTH + col))


@case("16 of 1024 columns of 2,000,000 rows fp16", NARROW, dict(M=2_000_000, N=1024), dict(M=256, N=64))
def _(device, M, N):
    x, y = empty(device, M, N, dtype=HALF), empty(device, M, 16, dtype=HALF)
    if device != "meta":
        x[:, :16] = normal(device, M, 16, dtype=HALF)
    return Work(lambda: narrow_columns[(M // 128,)](x, y, N, ROWS=128, COLS=16), y, lambda: x[:, :16])


@triton.jit
def dots_of_stretches(x_ptr, y_ptr, out_ptr, SPAN, BLOCK: tl.constexpr):
    """The product of two stretches, three lengths and all, by one of few programs with many warps."""
    offs = tl.program_id(0) * SPAN + tl.arange(0, BLOCK)
    xy, xx, yy = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, SPAN, BLOCK, num_stages=3):
        x, y = tl.load(x_ptr + start + offs).to(tl.float32), tl.load(y_ptr + start + offs).to(tl.float32)
        xy += x * y
        xx += x * x
        yy += y * y
    tl.store(out_ptr + tl.program_id(0), tl.sum(xy, 0) / tl.sqrt(tl.sum(xx, 0) * tl.sum(yy, 0)) + tl.sum(xx, 0) / SPAN)


@case("cosines of 24 pairs of 1 Mi fp16, 16 warps", FEW, dict(pairs=24, n=MI), dict(pairs=3, n=8192))
def _(device, pairs, n):
    x, y, out = (
        normal(device, pairs, n, dtype=HALF),
        normal(device, pairs, n, dtype=HALF),
        empty(device, pairs, dtype=FLOAT),
    )

    def want():
        a, b = x.float(), y.float()
        return F.cosine_similarity(a, b) + a.square().mean(1)

    return Work(lambda: dots_of_stretches[(pairs,)](x, y, out, n, BLOCK=4096, num_warps=16), out, want)


@triton.jit
def silu_rows(x_ptr, bias_ptr, keep_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    """264 programs walk over rows of odd length, in which a byte says what is kept; the bias stays in registers."""
    i = tl.arange(0, BLOCK)
    bias = tl.load(bias_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        x = tl.load(x_ptr + row * N + i, mask=i < N, other=0.0).to(tl.float32) + bias
        keep = tl.load(keep_ptr + row * N + i, mask=i < N, other=0)
        y = tl.where(keep != 0, x * tl.sigmoid(x) * 1.25, 0.0)
        tl.store(y_ptr + row * N + i, y.to(y_ptr.dtype.element_ty), mask=i < N)


@case(
    "bias, SiLU and a mask of bytes, 16384 rows of 4093 fp16, 264 programs",
    ODD_LOOPS,
    dict(M=16 * KI, N=4093),
    dict(M=300, N=61),
)
def _(device, M, N):
    x, bias, y = normal(device, M, N, dtype=HALF), normal(device, N, dtype=HALF), empty(device, M, N, dtype=HALF)
    keep = (known(device, 5, M, N, dtype=UINT8) > 0).to(UINT8)

    def run():
        return silu_rows[(2 * SMS,)](x, bias, keep, y, M, N, BLOCK=triton.next_power_of_2(N), num_warps=8)

    return Work(run, y, lambda: F.silu(x.float() + bias.float()) * keep * 1.25)
