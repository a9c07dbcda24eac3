"""Science and sound: long filters, small networks, mixtures, sparse blocks, paths by chance, long integers, series."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.eleventh_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, Work, empty, known, normal, place

FILTERS, NETWORKS, MIXTURES = "long filters by products", "small networks in one launch", "densities of mixtures"
BLOCKS, PATHS = "sparse blocks times columns", "paths of prices by chance"
INTEGERS, SERIES = "products of long integers", "filters of series"
LOW = (1 << 32) - 1


@triton.jit
def filter_by_products(x_ptr, h_ptr, y_ptr, T, B: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """A channel's filter is as long as its B sequences: their moments so far are multiplied by a matrix that has the
    same number along each diagonal, and is read as such."""
    channel, b = tl.program_id(1), tl.arange(0, B)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    t = block * BM + tl.arange(0, BM)
    total = tl.zeros((BM, B), tl.float32)
    for first in range(0, (block + 1) * BM, BK):
        s = first + tl.arange(0, BK)
        back = t[:, None] - s[None, :]
        h = tl.load(h_ptr + channel * T + back, mask=(back >= 0) & (t < T)[:, None], other=0.0)
        x = tl.load(x_ptr + (channel * T + s)[:, None] * B + b[None, :], mask=(s < T)[:, None], other=0.0)
        total = tl.dot(h, x, total)
    at = (channel * T + t)[:, None] * B + b[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=(t < T)[:, None])


@case(
    "filters of 1000 moments of 640 channels, 64 sequences each bf16, by products, 64x64x32, 4 warps, 3 stages",
    FILTERS,
    dict(C=640, T=1000, B=64),
    dict(C=2, T=150, B=16),
)
def _(device, C, T, B):
    x, h, y = normal(device, C, T, B), normal(device, C, T), empty(device, C, T, B)

    def run():
        filter_by_products[(triton.cdiv(T, 64), C)](x, h, y, T, B=B, BM=64, BK=32, num_warps=4, num_stages=3)

    def want():
        at = torch.arange(T, device=h.device)
        back = at[:, None] - at[None, :]
        parts = zip(h.float().split(64), x.float().split(64), strict=True)
        return torch.cat([(taps[:, back.clamp(min=0)] * (back >= 0)) @ z for taps, z in parts])

    return Work(run, y, want)


@triton.jit
def small_network(
    x_ptr, first_ptr, inner_ptr, last_ptr, y_ptr, n, IN: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr,
    INNER: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """A network of INNER + 2 layers of D or less numbers, with ReLU between them: what a sample has inside is not
    stored."""
    m, k, d, o = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, IN), tl.arange(0, D), tl.arange(0, OUT)
    x = tl.load(x_ptr + m[:, None] * IN + k[None, :], mask=(m < n)[:, None], other=0.0)
    x = tl.maximum(tl.dot(x, tl.load(first_ptr + k[:, None] * D + d[None, :])), 0.0).to(x_ptr.dtype.element_ty)
    for layer in tl.static_range(INNER):
        w = tl.load(inner_ptr + (layer * D + d)[:, None] * D + d[None, :])
        x = tl.maximum(tl.dot(x, w), 0.0).to(x_ptr.dtype.element_ty)
    y = tl.dot(x, tl.load(last_ptr + d[:, None] * OUT + o[None, :]))
    tl.store(y_ptr + m[:, None] * OUT + o[None, :], y.to(y_ptr.dtype.element_ty), mask=(m < n)[:, None])


@case(
    "networks of 32, 4 times 64 and 16 numbers for 2,500,001 samples fp16, 128 per program of 4 warps",
    NETWORKS,
    dict(n=2_500_001),
    dict(n=300),
)
def _(device, n):
    shapes = (32, 64), (3, 64, 64), (64, 16)
    first, inner, last = (normal(device, *shape, dtype=HALF) / shape[-2] ** 0.5 for shape in shapes)
    x, y = normal(device, n, 32, dtype=HALF), empty(device, n, 16, dtype=HALF)

    def run():
        small_network[(triton.cdiv(n, 128),)](
            x, first, inner, last, y, n, IN=32, D=64, OUT=16, INNER=3, BM=128, num_warps=4
        )

    def want():
        z = x.float()
        for w in (first, *inner):
            z = (z @ w.float()).relu()
        return z @ last.float()

    return Work(run, y, want)


@triton.jit
def mixture_densities(x_ptr, factor_ptr, middle_ptr, weight_ptr, y_ptr, n, PARTS, D: tl.constexpr, BM: tl.constexpr):
    """The logarithm of a sum of PARTS densities: for each, a sample is multiplied by a D x D factor, and what remains
    less the middle's is squared and summed."""
    m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    x = tl.load(x_ptr + m[:, None] * D + d[None, :], mask=(m < n)[:, None], other=0.0)
    largest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    for part in range(PARTS):
        factor = tl.load(factor_ptr + (part * D + d)[:, None] * D + d[None, :])
        away = tl.dot(x, factor, input_precision="tf32") - tl.load(middle_ptr + part * D + d)[None, :]
        s = tl.load(weight_ptr + part) - 0.5 * tl.sum(away * away, 1)
        new = tl.maximum(largest, s)
        total = total * tl.exp(largest - new) + tl.exp(s - new)
        largest = new
    tl.store(y_ptr + m, largest + tl.log(total), mask=m < n)


@case(
    "densities of 200,001 points of 64 fp32 in mixtures of 32 parts, tf32, 128x64x64, 8 warps, 1 stage",
    MIXTURES,
    dict(n=200_001, parts=32, D=64),
    dict(n=300, parts=3, D=16),
)
def _(device, n, parts, D):
    """Middles are those of the parts, times their factors."""
    x, y = normal(device, n, D, dtype=FLOAT), empty(device, n, dtype=FLOAT)
    factor, weight = normal(device, parts, D, D, dtype=FLOAT) / D**0.5, normal(device, parts, dtype=FLOAT)
    middle = normal(device, parts, D, dtype=FLOAT)

    def run():
        mixture_densities[(triton.cdiv(n, 128),)](
            x, factor, middle, weight, y, n, parts, D=D, BM=128, num_warps=8, num_stages=1
        )

    def want():
        z = x.double()
        s = [w - 0.5 * (z @ f.double() - c).square().sum(1) for f, c, w in zip(factor, middle, weight, strict=True)]
        return torch.stack(s).logsumexp(0)

    return Work(run, y, want)


@triton.jit
def sparse_blocks(block_ptr, col_ptr, start_ptr, x_ptr, y_ptr, S: tl.constexpr, N: tl.constexpr):
    """S rows of a matrix of which only some blocks of S x S are there, times N columns."""
    row, i, n = tl.program_id(0), tl.arange(0, S), tl.arange(0, N)
    total = tl.zeros((S, N), tl.float32)
    for at in range(tl.load(start_ptr + row), tl.load(start_ptr + row + 1)):
        block = tl.load(block_ptr + (at * S + i)[:, None] * S + i[None, :])
        x = tl.load(x_ptr + (tl.load(col_ptr + at) * S + i)[:, None] * N + n[None, :])
        total = tl.dot(block, x, total)
    tl.store(y_ptr + (row * S + i)[:, None] * N + n[None, :], total.to(y_ptr.dtype.element_ty))


@case(
    "4000 rows of 1 to 80 of 4000 sparse blocks of 32 x 32 times 128 columns fp16, 4 warps, 3 stages",
    BLOCKS,
    dict(rows=4000, most=80, S=32, N=128),
    dict(rows=9, most=7, S=16, N=32),
)
def _(device, rows, most, S, N):
    """Most rows are short. Blocks lie in any columns."""
    length = 1 + ((most - 1) * (known("meta", 1 << 16, rows).double() / (1 << 16)) ** 2).long()
    start, count = place(device, F.pad(length.cumsum(0), (1, 0)).int()), int(length.sum())
    col, block = known(device, rows, count), normal(device, count, S, S, dtype=HALF)
    x, y = normal(device, rows, S, N, dtype=HALF), empty(device, rows, S, N, dtype=HALF)

    def run():
        sparse_blocks[(rows,)](block, col, start, x, y, S=S, N=N, num_warps=4, num_stages=3)

    def want():
        owner = torch.arange(rows, device=y.device).repeat_interleave(length.to(y.device))
        out = torch.zeros(rows, S, N, device=y.device)
        parts = zip(owner.split(1 << 13), block.split(1 << 13), col.to(y.device).long().split(1 << 13), strict=True)
        for mine, a, b in parts:
            out.index_add_(0, mine, a.float() @ x[b].float())
        return out

    return Work(run, y, want)


@triton.jit
def next_word(state):
    """A generator's next state, and a word of it."""
    state = state * 747796405 + 2891336453
    word = ((state >> ((state >> 28) + 4)) ^ state) * 277803737
    return state, (word >> 22) ^ word


@triton.jit
def price_paths(y_ptr, n, drift, spread, STEPS, BLOCK: tl.constexpr):
    """The mean of a price along a path of 2 * STEPS steps, which are drawn: two words become two normal numbers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = at.to(tl.uint32) * 2654435769 + 12345
    log, total = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for _ in range(STEPS):
        state, one = next_word(state)
        state, two = next_word(state)
        u = ((one >> 8).to(tl.float32) + 0.5) * (1 / (1 << 24))
        angle = (two >> 8).to(tl.float32) * (6.283185307 / (1 << 24))
        far = tl.sqrt(-2 * tl.log(u))
        log += drift + spread * far * tl.cos(angle)
        total += tl.exp(log)
        log += drift + spread * far * tl.sin(angle)
        total += tl.exp(log)
    tl.store(y_ptr + at, total / (2 * STEPS), mask=at < n)


@case(
    "means of prices along 400,001 paths of 252 steps fp32, drawn in the kernel, 128 per program, 4 warps",
    PATHS,
    dict(n=400_001, steps=126),
    dict(n=300, steps=9),
)
def _(device, n, steps):
    y, drift, spread = empty(device, n, dtype=FLOAT), 1e-4, 0.01

    def run():
        price_paths[(triton.cdiv(n, 128),)](y, n, drift, spread, steps, BLOCK=128, num_warps=4)

    def want():
        state = (torch.arange(n, device=y.device) * 2654435769 + 12345) & LOW
        log, total = torch.zeros(n, device=y.device), 0
        for _ in range(steps):
            words = []
            for _ in range(2):
                state = (state * 747796405 + 2891336453) & LOW
                word = ((state >> (state >> 28) + 4 ^ state) * 277803737) & LOW
                words.append((word >> 22 ^ word) >> 8)
            far = (-2 * ((words[0].float() + 0.5) / (1 << 24)).log()).sqrt()
            angle = words[1].float() * (2 * math.pi / (1 << 24))
            for wave in (angle.cos(), angle.sin()):
                log = log + drift + spread * far * wave
                total = total + log.exp()
        return total / (2 * steps)

    return Work(run, y, want)


@triton.jit
def long_products(a_ptr, b_ptr, y_ptr, n, L: tl.constexpr, BLOCK: tl.constexpr):
    """Products of integers of L words, to integers of 2 * L. A lane has one pair, and sums all products of a word with
    one of the other number that belong to a place: low and high halves apart, so that no sum overflows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    carry = tl.zeros((BLOCK,), tl.uint64)
    for k in range(2 * L):
        low, high = carry & 0xFFFFFFFF, carry >> 32
        for i in range(tl.maximum(0, k - L + 1), tl.minimum(k + 1, L)):
            a = tl.load(a_ptr + i * n + at, mask=live, other=0).to(tl.uint64)
            product = a * tl.load(b_ptr + (k - i) * n + at, mask=live, other=0)
            low, high = low + (product & 0xFFFFFFFF), high + (product >> 32)
        tl.store(y_ptr + k * n + at, low.to(tl.uint32), mask=live)
        carry = high + (low >> 32)


@case(
    "products of 150,001 pairs of integers of 32 words int32, places in turn, 64 per program of 2 warps",
    INTEGERS,
    dict(n=150_001, words=32),
    dict(n=70, words=5),
)
def _(device, n, words):
    """Words are tensors of int32, of which the kernel is given views as uint32."""
    a, b = (normal(device, words, n, dtype=FLOAT).view(torch.int32) for _ in range(2))
    y = empty(device, 2 * words, n, dtype=torch.int32)
    views = [x.view(torch.uint32) for x in (a, b, y)]

    def run():
        long_products[(triton.cdiv(n, 64),)](*views, n, L=words, BLOCK=64, num_warps=2)

    def want():
        # By digits of 16 bits, whose products and sums fit into int64.
        digits = [torch.stack([x.long() & 0xFFFF, x.long() >> 16 & 0xFFFF], 1).flatten(0, 1) for x in (a, b)]
        total = torch.zeros(4 * words, n, device=y.device, dtype=torch.int64)
        for i, digit in enumerate(digits[0]):
            total[i : i + 2 * words] += digit * digits[1]
        for i in range(4 * words - 1):
            total[i + 1] += total[i] >> 16
        low, high = (total & 0xFFFF).view(2 * words, 2, n).unbind(1)
        out = low | high << 16
        return torch.where(out >= 1 << 31, out - (1 << 32), out)

    return Work(run, y, want)


@triton.jit
def filter_series(x_ptr, level_noise_ptr, slope_noise_ptr, y_ptr, score_ptr, n, T, BLOCK: tl.constexpr):
    """A lane goes along a series and keeps a level, a slope and how sure it is of both; it stores each level, and at the
    end a sum of how surprising the numbers were."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    level_noise = tl.load(level_noise_ptr + at, mask=live, other=1.0)
    slope_noise = tl.load(slope_noise_ptr + at, mask=live, other=1.0)
    level, slope, score = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    p, q, r = tl.full((BLOCK,), 10.0, tl.float32), tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), 1.0, tl.float32)
    for t in range(T):
        x = tl.load(x_ptr + t * n + at, mask=live, other=0.0)
        level += slope
        p, q, r = p + 2 * q + r + level_noise, q + r, r + slope_noise
        away, whole = x - level, p + 1
        one, two = p / whole, q / whole
        level, slope = level + one * away, slope + two * away
        p, q, r = p - one * p, q - one * q, r - two * q
        score += tl.log(whole) + away * away / whole
        tl.store(y_ptr + t * n + at, level, mask=live)
    tl.store(score_ptr + at, score, mask=live)


@case(
    "levels and slopes of 50,001 series along 500 moments fp32, 32 per program of 1 warp",
    SERIES,
    dict(n=50_001, T=500),
    dict(n=75, T=20),
)
def _(device, n, T):
    x, y, score = normal(device, T, n, dtype=FLOAT), empty(device, T, n, dtype=FLOAT), empty(device, n, dtype=FLOAT)
    level_noise, slope_noise = (normal(device, n, dtype=FLOAT).sigmoid() * size for size in (0.3, 0.01))

    def run():
        filter_series[(triton.cdiv(n, 32),)](x, level_noise, slope_noise, y, score, n, T, BLOCK=32, num_warps=1)

    def want():
        noise = torch.diag_embed(torch.stack([level_noise, slope_noise], 1).double())
        step = torch.tensor([[1.0, 1.0], [0.0, 1.0]], device=x.device, dtype=torch.float64)
        state, p = (
            torch.zeros(n, 2, device=x.device, dtype=torch.float64),
            torch.diag(torch.tensor([10.0, 1.0])).double(),
        )
        p, total, levels = p.to(x.device).expand(n, 2, 2), 0, []
        for z in x.double():
            state, p = state @ step.T, step @ p @ step.T + noise
            away, whole = z - state[:, 0], p[:, 0, 0] + 1
            gain = p[:, :, 0] / whole[:, None]
            state, p = state + gain * away[:, None], p - gain[:, :, None] * p[:, :1, :]
            total = total + whole.log() + away**2 / whole
            levels.append(state[:, 0])
        return torch.stack(levels), total

    return Work(run, (y, score), want)
