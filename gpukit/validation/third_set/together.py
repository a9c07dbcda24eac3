"""Pairs of all with all, many streams in one launch, and many launches of little work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation.new_kernels.case import BF16, FLOAT, KI, MI, Work, empty, normal
from gpukit.validation.third_set.case import case

PAIRS, STREAMS, MANY, BUTTERFLIES = "pairs of all", "many streams", "many launches", "butterflies"


@triton.jit
def forces(p_ptr, q_ptr, f_ptr, n, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """On each body the sum over all others, in one dimension: (q - p) / (|q - p|^2 + 0.01)^(3/2)."""
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(p_ptr + own)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, STEP):
        d = tl.load(q_ptr + start + tl.arange(0, STEP))[None, :] - p[:, None]
        near = tl.rsqrt(d * d + 0.01)
        total += tl.sum(d * near * near * near, 1)
    tl.store(f_ptr + own, total)


@case("forces between 32 Ki bodies in one dimension", PAIRS, dict(n=32 * KI), dict(n=256), sample=1)
def _(device, n):
    p, q, f = normal(device, n, dtype=FLOAT), normal(device, n, dtype=FLOAT), empty(device, n, dtype=FLOAT)

    def want():
        found = []
        for part in p.double().split(1024):
            d = q.double()[None, :] - part[:, None]
            found.append((d * (d * d + 0.01) ** -1.5).sum(1))
        return torch.cat(found)

    return Work(lambda: forces[(n // 64,)](p, q, f, n, BLOCK=64, STEP=64), f, want)


@triton.jit
def distances(x_ptr, y_ptr, d_ptr, N, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Sums of |x - y| over D coordinates, which no tensor core computes."""
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for d in range(D):
        x, y = tl.load(x_ptr + i * D + d), tl.load(y_ptr + j * D + d)
        total += tl.abs(x[:, None] - y[None, :])
    tl.store(d_ptr + i[:, None] * N + j[None, :], total)


@case("distances of 4096 and 4096 points in 64 dimensions", PAIRS, dict(M=4096, N=4096, D=64), dict(M=64, N=128, D=5))
def _(device, M, N, D):
    x, y = normal(device, M, D, dtype=FLOAT), normal(device, N, D, dtype=FLOAT)
    d = empty(device, M, N, dtype=FLOAT)

    def run():
        return distances[(M // 64, N // 64)](x, y, d, N, D=D, BM=64, BN=64)

    return Work(run, d, lambda: torch.cdist(x, y, p=1))


@triton.jit
def sums_of_pairs(a_ptr, b_ptr, y_ptr, N, BM: tl.constexpr, BN: tl.constexpr):
    """y[i, j] = max(a[i] + b[j], 0): much is stored, and next to nothing loaded."""
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    y = tl.maximum(tl.load(a_ptr + i)[:, None] + tl.load(b_ptr + j)[None, :], 0.0)
    tl.store(y_ptr + i[:, None] * N + j[None, :], y.to(y_ptr.dtype.element_ty))


@case("all sums of 16384 and 8192 numbers, stored in bf16", PAIRS, dict(M=16 * KI, N=8192), dict(M=16, N=256))
def _(device, M, N):
    a, b, y = normal(device, M, dtype=FLOAT), normal(device, N, dtype=FLOAT), empty(device, M, N)

    def run():
        return sums_of_pairs[(M // 8, N // 128)](a, b, y, N, BM=8, BN=128)

    return Work(run, y, lambda: (a[:, None] + b[None, :]).relu())


@triton.jit
def mean_of_eight(a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr, y_ptr, BLOCK: tl.constexpr):
    """Eight tensors become one."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(a_ptr + at).to(tl.float32) + tl.load(b_ptr + at) + tl.load(c_ptr + at) + tl.load(d_ptr + at)
    total += tl.load(e_ptr + at).to(tl.float32) + tl.load(f_ptr + at) + tl.load(g_ptr + at) + tl.load(h_ptr + at)
    tl.store(y_ptr + at, (total * 0.125).to(y_ptr.dtype.element_ty))


@case("mean of 8 tensors of 32 Mi bf16", STREAMS, dict(n=32 * MI), dict(n=2048))
def _(device, n):
    tensors, y = [normal(device, n) for _ in range(8)], empty(device, n)

    def run():
        return mean_of_eight[(n // 1024,)](*tensors, y, BLOCK=1024)

    return Work(run, y, lambda: sum(x.float() for x in tensors) / 8)


@triton.jit
def split_in_six(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """One tensor becomes six: what a float32 is, as sign, whole part and so on."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.abs(x))
    tl.store(y_ptr + n + at, tl.floor(x))
    tl.store(y_ptr + 2 * n + at, x - tl.floor(x))
    tl.store(y_ptr + 3 * n + at, x * x)
    tl.store(y_ptr + 4 * n + at, tl.where(x > 0, 1.0, 0.0))
    tl.store(y_ptr + 5 * n + at, -x)


@case("16 Mi fp32 become six tensors", STREAMS, dict(n=16 * MI), dict(n=2048))
def _(device, n):
    x, y = normal(device, n, dtype=FLOAT), empty(device, 6, n, dtype=FLOAT)

    def want():
        return torch.stack([x.abs(), x.floor(), x - x.floor(), x * x, (x > 0).float(), -x])

    return Work(lambda: split_in_six[(n // 1024,)](x, y, n, BLOCK=1024), y, want)


@triton.jit
def momentum(p_ptr, g_ptr, m_ptr, rate, BLOCK: tl.constexpr):
    """Signs of a moving mean: two tensors change in place, in their own dtypes."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g, m = tl.load(g_ptr + at).to(tl.float32), tl.load(m_ptr + at)
    step = 0.9 * m + 0.1 * g
    sign = tl.where(step > 0, 1.0, 0.0) - tl.where(step < 0, 1.0, 0.0)
    tl.store(m_ptr + at, 0.99 * m + 0.01 * g)
    tl.store(p_ptr + at, (tl.load(p_ptr + at).to(tl.float32) - rate * sign).to(p_ptr.dtype.element_ty))


@case("signs of a moving mean, 24 tensors of 2 Mi", MANY, dict(tensors=24, n=2 * MI), dict(tensors=3, n=2048))
def _(device, tensors, n):
    """From zeros, where a step is a sign, whatever came before: one launch for each tensor."""
    g = normal(device, tensors, n)
    p, m = empty(device, tensors, n, dtype=BF16), empty(device, tensors, n, dtype=FLOAT)

    def run():
        for i in range(tensors):
            momentum[(n // 1024,)](p[i], g[i], m[i], 0.125, BLOCK=1024)

    return Work(run, (p, m), lambda: (-0.125 * g.float().sign(), 0.01 * g.float()))


@triton.jit
def butterfly(x_ptr, y_ptr, APART, BLOCK: tl.constexpr):
    """Sum and difference of numbers that lie APART from one another."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = t // APART * 2 * APART + t % APART
    a, b = tl.load(x_ptr + at), tl.load(x_ptr + at + APART)
    tl.store(y_ptr + at, a + b)
    tl.store(y_ptr + at + APART, a - b)


@case("Hadamard transform of 16 Mi fp32 in 24 launches", BUTTERFLIES, dict(n=16 * MI), dict(n=1024))
def _(device, n):
    """Numbers go to and fro between two tensors; from neighbors on, twice as far apart each time."""
    steps = n.bit_length() - 1
    x, y, z = normal(device, n, dtype=FLOAT), empty(device, n, dtype=FLOAT), empty(device, n, dtype=FLOAT)

    def run():
        source = x
        for step in range(steps):
            target = (y, z)[step % 2]
            butterfly[(n // 512 // 2,)](source, target, 1 << step, BLOCK=512)
            source = target

    def want():
        h = x.double()
        for step in range(steps):
            h = h.view(-1, 2, 1 << step)
            h = torch.stack([h[:, 0] + h[:, 1], h[:, 0] - h[:, 1]], 1).view(-1)
        return h

    return Work(run, (y, z)[(steps - 1) % 2], want)


@triton.jit
def smooth(x_ptr, y_ptr, W, BLOCK: tl.constexpr):
    """A step of diffusion on a grid whose rows and columns go round."""
    i = tl.program_id(1)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    above, below = (i + tl.num_programs(1) - 1) % tl.num_programs(1), (i + 1) % tl.num_programs(1)
    around = tl.load(x_ptr + above * W + j) + tl.load(x_ptr + below * W + j)
    around += tl.load(x_ptr + i * W + (j + W - 1) % W) + tl.load(x_ptr + i * W + (j + 1) % W)
    tl.store(y_ptr + i * W + j, 0.5 * tl.load(x_ptr + i * W + j) + 0.125 * around)


@case("16 steps of diffusion on 2048 x 2048 fp32", MANY, dict(side=2048, steps=16), dict(side=256, steps=2))
def _(device, side, steps):
    """All of it fits in L2, and each step finds there what the one before it stored."""
    x = normal(device, side, side, dtype=FLOAT)
    y, z = empty(device, side, side, dtype=FLOAT), empty(device, side, side, dtype=FLOAT)

    def run():
        source = x
        for step in range(steps):
            target = (y, z)[step % 2]
            smooth[(side // 256, side)](source, target, side, BLOCK=256)
            source = target

    def want():
        h = x.double()
        for _ in range(steps):
            h = 0.5 * h + 0.125 * (h.roll(1, 0) + h.roll(-1, 0) + h.roll(1, 1) + h.roll(-1, 1))
        return h

    return Work(run, (y, z)[(steps - 1) % 2], want)
