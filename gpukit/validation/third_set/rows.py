"""Rows that are sorted, scanned and searched, and statistics of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, INT32, KI, MI, Work, empty, known, normal, place
from gpukit.validation.third_set.case import case

SORTS, SCANS, POSITIONS, CHANNELS = "sorts", "scans of pairs", "positions of maxima", "statistics of channels"


@triton.jit
def sort_rows(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y_ptr + at, tl.sort(tl.load(x_ptr + at)))


def _sort(device, M, N, dtype=FLOAT, num_warps=4):
    x = known(device, 1 << 30, M, N) if dtype == INT32 else normal(device, M, N, dtype=dtype)
    y = empty(device, M, N, dtype=dtype)
    return Work(lambda: sort_rows[(M,)](x, y, N=N, num_warps=num_warps), y, lambda: x.sort(1).values)


case("sort 64 Ki rows of 256 fp32", SORTS, dict(M=64 * KI, N=256), dict(M=3, N=16))(_sort)
case(
    "sort 16384 rows of 1024 int32",
    SORTS,
    dict(M=16 * KI, N=1024, dtype=INT32, num_warps=8),
    dict(M=3, N=32, dtype=INT32),
)(_sort)


@triton.jit
def combine(a1, b1, a2, b2):
    """First h -> a1 h + b1, then h -> a2 h + b2."""
    return a1 * a2, a2 * b1 + b2


@triton.jit
def recurrence_scan(a_ptr, x_ptr, y_ptr, N: tl.constexpr):
    """h = a h + x along a row, all steps of a row at once."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    _, h = tl.associative_scan((tl.load(a_ptr + at), tl.load(x_ptr + at)), 0, combine)
    tl.store(y_ptr + at, h)


@case("linear recurrence by a scan, 16384 rows of 2048 fp32", SCANS, dict(M=16 * KI, N=2048), dict(M=3, N=64))
def _(device, M, N):
    a, x, y = (
        normal(device, M, N, dtype=FLOAT).sigmoid(),
        normal(device, M, N, dtype=FLOAT),
        empty(device, M, N, dtype=FLOAT),
    )

    def want():
        h, out = torch.zeros(M, device=x.device, dtype=torch.float64), []
        for t in range(N):
            h = a[:, t].double() * h + x[:, t].double()
            out.append(h)
        return torch.stack(out, 1)

    return Work(lambda: recurrence_scan[(M,)](a, x, y, N=N), y, want)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def running_maxima(x_ptr, y_ptr, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Down the columns of ROWS rows at a time; each block begins with the maxima before it."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    before = tl.full((BLOCK,), -float("inf"), tl.float32)
    for first in range(0, N, ROWS):
        at = (first + rows)[:, None] * tl.num_programs(0) * BLOCK + cols[None, :]
        x = tl.maximum(tl.load(x_ptr + at).to(tl.float32), before[None, :])
        tl.store(y_ptr + at, tl.associative_scan(x, 0, larger).to(y_ptr.dtype.element_ty))
        before = tl.maximum(before, tl.max(x, 0))


@case("running maxima down 4096 rows of 16384 bf16", SCANS, dict(N=4096, C=16 * KI), dict(N=64, C=128))
def _(device, N, C):
    x, y = normal(device, N, C), empty(device, N, C)
    return Work(lambda: running_maxima[(C // 64,)](x, y, N, ROWS=32, BLOCK=64), y, lambda: x.float().cummax(0).values)


@triton.jit
def first_maximum(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Where the largest number of a row is."""
    offs = tl.arange(0, BLOCK)
    best, at = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + tl.program_id(0) * N + start + offs).to(tl.float32)
        at = tl.where(x > best, start + offs, at)
        best = tl.maximum(best, x)
    which = tl.argmax(best, 0)
    tl.store(y_ptr + tl.program_id(0), tl.sum(tl.where(offs == which, at, 0), 0))


@case("argmax of 4096 rows of 32768 fp32", POSITIONS, dict(M=4096, N=32 * KI), dict(M=3, N=2048))
def _(device, M, N):
    x, y = normal(device, M, N, dtype=FLOAT), empty(device, M, dtype=INT32)
    return Work(lambda: first_maximum[(M,)](x, y, N, BLOCK=1024), y, lambda: x.argmax(1))


@triton.jit
def largest_in_turn(x_ptr, y_ptr, K: tl.constexpr, N: tl.constexpr):
    """The K largest of a row, one after another."""
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + tl.program_id(0) * N + offs)
    for k in range(K):
        best = tl.max(x, 0)
        tl.store(y_ptr + tl.program_id(0) * K + k, best)
        x = tl.where(offs == tl.argmax(x, 0), -float("inf"), x)


@case("the 8 largest of 128 Ki rows of 256 fp32", POSITIONS, dict(M=128 * KI, N=256), dict(M=5, N=64))
def _(device, M, N):
    x, y = normal(device, M, N, dtype=FLOAT), empty(device, M, 8, dtype=FLOAT)

    def run():
        return largest_in_turn[(M,)](x, y, K=8, N=N, num_warps=1)

    return Work(run, y, lambda: x.topk(8, 1).values)


@triton.jit
def channel_moments(x_ptr, sum_ptr, square_ptr, C, P, IMAGES: tl.constexpr, BLOCK: tl.constexpr):
    """Sum and sum of squares of one channel of IMAGES images of P pixels: stretches of P, C * P apart."""
    channel = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    total, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for image in range(IMAGES):
        for start in range(0, P, BLOCK):
            live = start + offs < P
            x = tl.load(x_ptr + (image * C + channel) * P + start + offs, mask=live, other=0.0).to(tl.float32)
            total += x
            squares += x * x
    tl.store(sum_ptr + channel, tl.sum(total, 0))
    tl.store(square_ptr + channel, tl.sum(squares, 0))


@case(
    "moments of 512 channels of 64 images of 56 x 56 bf16",
    CHANNELS,
    dict(images=64, C=512, P=3136),
    dict(images=3, C=5, P=100),
)
def _(device, images, C, P):
    x = normal(device, images, C, P)
    total, squares = empty(device, C, dtype=FLOAT), empty(device, C, dtype=FLOAT)

    def run():
        return channel_moments[(C,)](x, total, squares, C, P, IMAGES=images, BLOCK=1024)

    return Work(run, (total, squares), lambda: (x.double().sum((0, 2)), x.double().square().sum((0, 2))))


@triton.jit
def group_norm(x_ptr, w_ptr, b_ptr, y_ptr, P, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """One group of CHANNELS channels of an image per program, in two passes over its stretch of memory."""
    group = tl.program_id(0) % GROUPS
    base = tl.program_id(0) * CHANNELS * P
    offs = tl.arange(0, BLOCK)
    total, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CHANNELS * P, BLOCK):
        x = tl.load(x_ptr + base + start + offs, mask=start + offs < CHANNELS * P, other=0.0).to(tl.float32)
        total += x
        squares += x * x
    mean = tl.sum(total, 0) / (CHANNELS * P)
    scale = tl.rsqrt(tl.sum(squares, 0) / (CHANNELS * P) - mean * mean + 1e-5)
    for start in range(0, CHANNELS * P, BLOCK):
        at = start + offs
        live = at < CHANNELS * P
        channel = group * CHANNELS + at // P
        x = tl.load(x_ptr + base + at, mask=live, other=0.0).to(tl.float32)
        y = (x - mean) * scale * tl.load(w_ptr + channel, mask=live) + tl.load(b_ptr + channel, mask=live)
        tl.store(y_ptr + base + at, y.to(y_ptr.dtype.element_ty), mask=live)


@case(
    "group norm of 64 images of 320 channels of 64 x 64 bf16",
    CHANNELS,
    dict(images=64, C=320, groups=32, P=4096),
    dict(images=2, C=8, groups=2, P=49),
)
def _(device, images, C, groups, P):
    x, y = normal(device, images, C, P), empty(device, images, C, P)
    w, b = normal(device, C, dtype=FLOAT), normal(device, C, dtype=FLOAT)

    def run():
        return group_norm[(images * groups,)](
            x, w, b, y, P, CHANNELS=C // groups, GROUPS=groups, BLOCK=2048, num_warps=8
        )

    return Work(run, y, lambda: F.group_norm(x.float(), groups, w, b))


@triton.jit
def losses(x_ptr, target_ptr, y_ptr, N, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr):
    """Cross-entropy with smoothed labels: a row is read once, and one number of it again."""
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    m, s = tl.full((BLOCK,), -float("inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        live = start + offs < N
        x = tl.load(x_ptr + row * N + start + offs, mask=live, other=-1e30).to(tl.float32)
        new = tl.maximum(m, x)
        s = s * tl.exp(m - new) + tl.exp(x - new)
        total += tl.where(live, x, 0.0)
        m = new
    largest = tl.max(m, 0)
    lse = largest + tl.log(tl.sum(s * tl.exp(m - largest), 0))
    right = tl.load(x_ptr + row * N + tl.load(target_ptr + row)).to(tl.float32)
    tl.store(y_ptr + row, lse - (1 - SMOOTHING) * right - SMOOTHING * tl.sum(total, 0) / N)


@case(
    "losses with smoothed labels, 4096 rows of 50,257 bf16",
    "one number of a row again",
    dict(M=4096, N=50_257),
    dict(M=3, N=1500),
)
def _(device, M, N):
    x, target, y = normal(device, M, N), known(device, N, M), empty(device, M, dtype=FLOAT)

    def run():
        return losses[(M,)](x, target, y, N, SMOOTHING=0.1, BLOCK=1024)

    return Work(run, y, lambda: F.cross_entropy(x.float(), target.long(), label_smoothing=0.1, reduction="none"))


@triton.jit
def keep_positive(x_ptr, first_ptr, y_ptr, BLOCK: tl.constexpr):
    """Positive numbers move together: where a block's begin is known, where each of them goes says a scan."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    keep = (x > 0).to(tl.int32)
    place = tl.load(first_ptr + tl.program_id(0)) + tl.cumsum(keep, 0) - keep
    tl.store(y_ptr + place, x, mask=keep > 0)


@case("positive ones of 64 Mi int32 moved together", SCANS, dict(n=64 * MI), dict(n=4096))
def _(device, n):
    x = known("cpu", 7, n) - 3
    first = F.pad((x.view(-1, 1024) > 0).sum(1).cumsum(0), (1, 0)).to(INT32)
    kept = int(first[-1])
    x, first, y = place(device, x), place(device, first[:-1].contiguous()), empty(device, kept, dtype=INT32)
    return Work(lambda: keep_positive[(n // 1024,)](x, first, y, BLOCK=1024), y, lambda: x[x > 0])
