"""Walks: tables of letters by diagonals and by bits, labels along time, orbits, filters of sound, and sums that begin anew."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.fifth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, INT32, KI, UINT8, Work, empty, known, normal

LETTERS, LABELS, ORBITS, SOUND = "two strings", "labels along time", "orbits", "filters of sound"
SCANS = "scans of a row"


@triton.jit
def edit_distances(a_ptr, b_ptr, work_ptr, y_ptr, L, N: tl.constexpr):
    """Of one pair of strings, diagonal by diagonal; the last three lie in memory, where neighbors find them."""
    i = tl.arange(0, N)
    base = work_ptr + tl.program_id(0) * 3 * N
    a = tl.load(a_ptr + tl.program_id(0) * L + i - 1, mask=i > 0, other=0)
    for d in range(0, 2 * L + 1):
        before, earlier = base + (d + 2) % 3 * N + i, base + (d + 1) % 3 * N + i
        inner = (i > 0) & (i < d) & (d - i <= L)
        b = tl.load(b_ptr + tl.program_id(0) * L + d - i - 1, mask=inner, other=0)
        gap = tl.minimum(tl.load(before, mask=inner, other=0), tl.load(before - 1, mask=inner, other=0)) + 1
        both = tl.load(earlier - 1, mask=inner, other=0) + (a != b).to(tl.int32)
        tl.store(base + d % 3 * N + i, tl.where(inner, tl.minimum(gap, both), d), mask=(i <= d) & (d - i <= L))
        tl.debug_barrier()
    tl.store(y_ptr + tl.program_id(0), tl.load(base + 2 * L % 3 * N + L))


@case("edit distances of 4096 pairs of 255 letters", LETTERS, dict(B=4096, L=255), dict(B=3, L=15), sample=1)
def _(device, B, L):
    a, b = known(device, 4, B, L, dtype=UINT8), known(device, 5, B, L, dtype=UINT8)
    work, y = empty(device, B, 3, L + 1, dtype=INT32), empty(device, B, dtype=INT32)

    def want():
        steps = torch.arange(L + 1, device=a.device, dtype=INT32)
        row = steps.expand(B, -1)
        for i in range(L):
            best = row + 1
            best[:, 1:] = torch.minimum(best[:, 1:], row[:, :-1] + (a[:, i : i + 1] != b))
            row = (best - steps).cummin(1).values + steps
        return row[:, -1]

    return Work(lambda: edit_distances[(B,)](a, b, work, y, L, N=L + 1), y, want)


@triton.jit
def common_letters(mask_ptr, text_ptr, y_ptr, n, T, BLOCK: tl.constexpr):
    """Longest common subsequences of 64 and T letters, one pair per lane: a row of the table is 64 bits."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.full((BLOCK,), -1, tl.int64)
    for t in range(T):
        letter = tl.load(text_ptr + t * n + pair).to(tl.int32)
        u = v & tl.load(mask_ptr + pair * 4 + letter)
        v = (v + u) | (v - u)
    tl.store(y_ptr + pair, v)


@case(
    "common letters of 512 Ki pairs of 64 and 200, by bits int64",
    LETTERS,
    dict(n=512 * KI, T=200),
    dict(n=256, T=9),
)
def _(device, n, T):
    masks, text = known(device, 1 << 62, n, 4, dtype=torch.int64), known(device, 4, T, n, dtype=UINT8)
    y = empty(device, n, dtype=torch.int64)

    def run():
        return common_letters[(n // 128,)](masks, text, y, n, T, BLOCK=128)

    def want():
        v = torch.full_like(y, -1)
        for letters in text.long():
            u = v & masks.gather(1, letters[:, None])[:, 0]
            v = (v + u) | (v - u)
        return v

    # Numbers of 64 bits are compared by halves, which a double holds.
    halves = y.view(INT32)
    return Work(run, halves, lambda: want().view(INT32))


@triton.jit
def sum3(a, b, c):
    """log(exp a + exp b + exp c)."""
    m = tl.maximum(a, tl.maximum(b, c))
    return m + tl.log(tl.exp(a - m) + tl.exp(b - m) + tl.exp(c - m))


@triton.jit
def label_losses(p_ptr, label_ptr, work_ptr, y_ptr, T, B, C, L, N: tl.constexpr):
    """CTC: the states of one sequence step through time, each of which adds what its two neighbors were."""
    s, b = tl.arange(0, N), tl.program_id(0)
    odd = (s % 2 == 1) & (s < 2 * L)
    label = tl.load(label_ptr + b * L + s // 2, mask=odd, other=0)
    skip = odd & (s > 1) & (label != tl.load(label_ptr + b * L + s // 2 - 1, mask=odd & (s > 1), other=0))
    live = s < 2 * L + 1
    alpha = tl.where(s < 2, tl.load(p_ptr + b * C + label), -1e30)
    for t in range(1, T):
        row = work_ptr + (b * 2 + t % 2) * N + s
        tl.store(row, alpha)
        tl.debug_barrier()
        one = tl.load(row - 1, mask=s > 0, other=-1e30)
        two = tl.load(row - 2, mask=skip, other=-1e30)
        alpha = sum3(alpha, one, two) + tl.load(p_ptr + (t * B + b) * C + label)
    ends = tl.where(live & (s >= 2 * L - 1), alpha, -1e30)
    m = tl.max(ends, 0)
    tl.store(y_ptr + b, -m - tl.log(tl.sum(tl.exp(ends - m), 0)))


@case(
    "CTC losses of 1024 sequences, 400 steps of 80 classes, 63 labels fp32",
    LABELS,
    dict(B=1024, T=400, C=80, L=63),
    dict(B=3, T=20, C=11, L=7),
    sample=1,
)
def _(device, B, T, C, L):
    p, labels = normal(device, T, B, C, dtype=FLOAT).log_softmax(2), known(device, C - 1, B, L) + 1
    work, y = empty(device, B, 2, 2 * L + 2, dtype=FLOAT), empty(device, B, dtype=FLOAT)

    def want():
        ones = torch.ones(B, dtype=torch.long)
        return F.ctc_loss(p.cpu(), labels.long().cpu(), T * ones, L * ones, reduction="none")

    return Work(lambda: label_losses[(B,)](p, labels, work, y, T, B, C, L, N=2 * L + 2, num_warps=2), y, want)


@triton.jit
def slope(x, y):
    """How fast both change."""
    return x * (1.1 - 0.4 * y), y * (0.1 * x - 0.4)


@triton.jit
def orbits(start_ptr, end_ptr, n, steps, h, BLOCK: tl.constexpr):
    """Hunters and hunted: Runge and Kutta's steps of fourth order, each of which waits for the one before."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(start_ptr + at), tl.load(start_ptr + n + at)
    for _ in range(steps):
        ax, ay = slope(x, y)
        bx, by = slope(x + 0.5 * h * ax, y + 0.5 * h * ay)
        cx, cy = slope(x + 0.5 * h * bx, y + 0.5 * h * by)
        dx, dy = slope(x + h * cx, y + h * cy)
        x += h / 6 * (ax + 2 * bx + 2 * cx + dx)
        y += h / 6 * (ay + 2 * by + 2 * cy + dy)
    tl.store(end_ptr + at, x)
    tl.store(end_ptr + n + at, y)


@case("2000 steps of 16,896 orbits fp32, 132 programs", ORBITS, dict(n=16_896, steps=2000), dict(n=128, steps=12))
def _(device, n, steps):
    start, end = normal(device, 2, n, dtype=FLOAT).sigmoid() + 1, empty(device, 2, n, dtype=FLOAT)
    h = 0.005

    def run():
        return orbits[(n // 128,)](start, end, n, steps, h, BLOCK=128)

    def want():
        def f(z):
            return torch.stack([z[0] * (1.1 - 0.4 * z[1]), z[1] * (0.1 * z[0] - 0.4)])

        z = start
        for _ in range(steps):
            a = f(z)
            b = f(z + 0.5 * h * a)
            c = f(z + 0.5 * h * b)
            z = z + h / 6 * (a + 2 * b + 2 * c + f(z + h * c))
        return z

    return Work(run, end, want)


@triton.jit
def equalize(x_ptr, y_ptr, T, tracks, b0, b1, b2, a1, a2, BLOCK: tl.constexpr):
    """A filter with two states runs through both channels of BLOCK tracks; left and right lie next to each other."""
    track = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    l1, l2 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    r1, r2 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for t in range(T):
        at = (t * tracks + track) * 2
        left, right = tl.load(x_ptr + at), tl.load(x_ptr + at + 1)
        y, z = b0 * left + l1, b0 * right + r1
        l1, r1 = b1 * left - a1 * y + l2, b1 * right - a1 * z + r2
        l2, r2 = b2 * left - a2 * y, b2 * right - a2 * z
        tl.store(y_ptr + at, y)
        tl.store(y_ptr + at + 1, z)


@case(
    "1000 samples of 16,896 stereo tracks filtered fp32",
    SOUND,
    dict(T=1000, tracks=16_896),
    dict(T=9, tracks=64),
    sample=1,
)
def _(device, T, tracks):
    x, y = normal(device, T, tracks, 2, dtype=FLOAT), empty(device, T, tracks, 2, dtype=FLOAT)
    b0, b1, b2, a1, a2 = 0.2, 0.4, 0.2, -0.4, 0.2

    def run():
        return equalize[(tracks // 64,)](x, y, T, tracks, b0, b1, b2, a1, a2, BLOCK=64, num_warps=2)

    def want():
        s1 = s2 = torch.zeros_like(x[0])
        out = []
        for now in x:
            out.append(b0 * now + s1)
            s1, s2 = b1 * now - a1 * out[-1] + s2, b2 * now - a2 * out[-1]
        return torch.stack(out)

    return Work(run, y, want)


@triton.jit
def products_from_right(x_ptr, y_ptr, N: tl.constexpr):
    """Running products of a row, from its end: what is left of light that passes all layers behind."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y_ptr + at, tl.cumprod(tl.load(x_ptr + at), 0, reverse=True))


@case("running products from the right, 256 Ki rows of 128 fp32", SCANS, dict(M=256 * KI, N=128), dict(M=3, N=32))
def _(device, M, N):
    x, y = normal(device, M, N, dtype=FLOAT) * 0.1 + 1, empty(device, M, N, dtype=FLOAT)
    return Work(lambda: products_from_right[(M,)](x, y, N=N, num_warps=1), y, lambda: x.flip(1).cumprod(1).flip(1))


@triton.jit
def add_unless(begin, sum_, begins, number):
    """The sum of two stretches: of the second alone, where it begins anew."""
    return begin | begins, tl.where(begins != 0, number, sum_ + number)


@triton.jit
def sums_anew(x_ptr, begin_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Running sums of a row of odd length, which begin again where a byte says so."""
    i = tl.arange(0, BLOCK)
    at, live = tl.program_id(0) * N + i, i < N
    begin = tl.load(begin_ptr + at, mask=live, other=0).to(tl.int32)
    _, y = tl.associative_scan((begin, tl.load(x_ptr + at, mask=live, other=0.0)), 0, add_unless)
    tl.store(y_ptr + at, y, mask=live)


@case("sums that begin anew, 32 Ki rows of 1009 fp32", SCANS, dict(M=32 * KI, N=1009), dict(M=3, N=61))
def _(device, M, N):
    x, y = normal(device, M, N, dtype=FLOAT), empty(device, M, N, dtype=FLOAT)
    begin = (known(device, 16, M, N, dtype=UINT8) == 0).to(UINT8)

    def want():
        total = x.double().cumsum(1)
        first = torch.where(begin != 0, torch.arange(N, device=x.device), 0).cummax(1).values
        return total - (total - x).gather(1, first)

    return Work(lambda: sums_anew[(M,)](x, begin, y, N, BLOCK=triton.next_power_of_2(N)), y, want)
