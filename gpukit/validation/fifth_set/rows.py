"""Rows: softmax with a bound, in the middle and under a diagonal; norms of weights and heads; steps, losses, rows to 8 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.fifth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, INT8, KI, MI, Work, empty, known, normal

BOUNDED, MIDDLE, DIAGONAL = "softmax with a bound", "softmax in the middle", "softmax under a diagonal"
WEIGHTS, HEADS, POWERS = "norms of weights", "norms of heads", "power iterations"
RATIOS, TRIPLETS, CHANNELS, FIRST = (
    "steps with ratios",
    "losses of triplets",
    "channels to 8 bits",
    "over the first dimension",
)


@triton.jit
def bounded_softmax(x_ptr, bound_ptr, y_ptr, N, coldness, BLOCK: tl.constexpr):
    """Softmax of a row of prime length at a temperature, of what is not below the row's bound; three passes."""
    row = tl.program_id(0).to(tl.int64) * N
    bound = tl.load(bound_ptr + tl.program_id(0))
    offs = tl.arange(0, BLOCK)
    m = tl.full((BLOCK,), -1e30, tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + row + start + offs, mask=start + offs < N, other=-float("inf")).to(tl.float32)
        m = tl.maximum(m, x)
    largest = tl.max(m, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + row + start + offs, mask=start + offs < N, other=-float("inf")).to(tl.float32)
        total += tl.where(x >= bound, tl.exp((x - largest) * coldness), 0.0)
    factor = 1 / tl.sum(total, 0)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + row + start + offs, mask=start + offs < N, other=-float("inf")).to(tl.float32)
        y = tl.where(x >= bound, tl.exp((x - largest) * coldness) * factor, 0.0)
        tl.store(y_ptr + row + start + offs, y.to(y_ptr.dtype.element_ty), mask=start + offs < N)


@case(
    "softmax of what is above a bound, 2048 rows of 128,257 fp16", BOUNDED, dict(M=2048, N=128_257), dict(M=3, N=3001)
)
def _(device, M, N):
    x, y = normal(device, M, N, dtype=HALF), empty(device, M, N, dtype=HALF)
    bound = normal(device, M, dtype=FLOAT).sigmoid() + 1

    def want():
        return torch.where(x >= bound[:, None], x.float() / 0.8, -float("inf")).softmax(1)

    return Work(lambda: bounded_softmax[(M,)](x, bound, y, N, 1.25, BLOCK=2048, num_warps=8), y, want)


@triton.jit
def middle_softmax(x_ptr, y_ptr, C, S, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Over the second of three dimensions, all of which is in registers: BLOCK places of the third per program."""
    c = tl.arange(0, ROWS)[:, None]
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at, live = (tl.program_id(1) * C + c) * S + s, (c < C) & (s < S)
    x = tl.load(x_ptr + at, mask=live, other=-1e30).to(tl.float32)
    p = tl.exp(x - tl.max(x, 0)[None, :])
    tl.store(y_ptr + at, (p / tl.sum(p, 0)[None, :]).to(y_ptr.dtype.element_ty), mask=live)


@case(
    "softmax over 150 classes of 8 images of 300 x 301 bf16", MIDDLE, dict(B=8, C=150, S=90_300), dict(B=2, C=19, S=77)
)
def _(device, B, C, S):
    x, y = normal(device, B, C, S), empty(device, B, C, S)

    def run():
        return middle_softmax[(triton.cdiv(S, 32), B)](x, y, C, S, ROWS=triton.next_power_of_2(C), BLOCK=32)

    return Work(run, y, lambda: x.float().softmax(1))


@triton.jit
def diagonal_softmax(x_ptr, y_ptr, scale, T: tl.constexpr):
    """A row of scores up to the diagonal; what is behind it is not loaded, and zeros are stored there."""
    row = tl.program_id(0)
    i = tl.arange(0, T)
    live = i <= row % T
    x = tl.load(x_ptr + row * T + i, mask=live, other=-float("inf")).to(tl.float32) * scale
    p = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * T + i, (p / tl.sum(p, 0)).to(y_ptr.dtype.element_ty))


@case("softmax of 192 triangles of 1024 x 1024 fp16", DIAGONAL, dict(B=192, T=1024), dict(B=2, T=64))
def _(device, B, T):
    x, y = normal(device, B, T, T, dtype=HALF), empty(device, B, T, T, dtype=HALF)

    def want():
        behind = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        return (x.float() * 0.125).masked_fill(behind, -float("inf")).softmax(2)

    return Work(lambda: diagonal_softmax[(B * T,)](x, y, 0.125, T=T), y, want)


@triton.jit
def weight_norm(v_ptr, g_ptr, w_ptr, N, BLOCK: tl.constexpr):
    """A row becomes as long as g says; its 16 warps hold it meanwhile."""
    i = tl.arange(0, BLOCK)
    at, live = tl.program_id(0) * N + i, i < N
    v = tl.load(v_ptr + at, mask=live, other=0.0).to(tl.float32)
    factor = tl.load(g_ptr + tl.program_id(0)).to(tl.float32) / tl.sqrt(tl.sum(v * v, 0))
    tl.store(w_ptr + at, (v * factor).to(w_ptr.dtype.element_ty), mask=live)


@case("weight norm of 12288 rows of 12,289 bf16, 16 warps", WEIGHTS, dict(M=12_288, N=12_289), dict(M=3, N=301))
def _(device, M, N):
    v, g, w = normal(device, M, N), normal(device, M), empty(device, M, N)

    def run():
        return weight_norm[(M,)](v, g, w, N, BLOCK=triton.next_power_of_2(N), num_warps=16)

    return Work(run, w, lambda: g.float()[:, None] * F.normalize(v.float(), dim=1))


@triton.jit
def head_norms(x_ptr, w_ptr, y_ptr, ROWS: tl.constexpr, D: tl.constexpr):
    """RMS norm of heads of 96, which are rows of 128 in part; two warps hold ROWS of them."""
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / D + 1e-6)[:, None] * tl.load(w_ptr + d, mask=d < D, other=0.0)
    tl.store(y_ptr + row * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


@case("RMS norm of 1 Mi heads of 96 bf16, 2 warps", HEADS, dict(M=MI), dict(M=32))
def _(device, M):
    x, w, y = normal(device, M, 96), normal(device, 96, dtype=FLOAT), empty(device, M, 96)

    def run():
        return head_norms[(M // 16,)](x, w, y, ROWS=16, D=96, num_warps=2)

    return Work(run, y, lambda: F.rms_norm(x.float(), (96,), w, 1e-6))


@triton.jit
def rows_by_vector(w_ptr, v_ptr, u_ptr, N, BLOCK: tl.constexpr):
    """u = W v / |v|, a row per program, which finds |v| on its way."""
    offs = tl.arange(0, BLOCK)
    total, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        v = tl.load(v_ptr + start + offs)
        total += tl.load(w_ptr + tl.program_id(0) * N + start + offs) * v
        squares += v * v
    tl.store(u_ptr + tl.program_id(0), tl.sum(total, 0) * tl.rsqrt(tl.sum(squares, 0)))


@triton.jit
def vector_by_columns(w_ptr, u_ptr, v_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """v = u W / |u|, BLOCK columns per program: few programs, each of which goes down all rows."""
    row, col = tl.arange(0, ROWS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total, squares = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS,), tl.float32)
    for first in range(0, M, ROWS):
        u = tl.load(u_ptr + first + row)
        total += tl.load(w_ptr + (first + row)[:, None] * N + col[None, :]) * u[:, None]
        squares += u * u
    tl.store(v_ptr + col, tl.sum(total, 0) * tl.rsqrt(tl.sum(squares, 0)))


@case("2 power iterations of 4096 x 2048 fp32, 64 columns a program", POWERS, dict(M=4096, N=2048), dict(M=64, N=128))
def _(device, M, N):
    w, start = normal(device, M, N, dtype=FLOAT), normal(device, N, dtype=FLOAT)
    u, v = empty(device, M, dtype=FLOAT), empty(device, N, dtype=FLOAT)
    block = min(N, 1024)

    def run():
        for source in (start, v):
            rows_by_vector[(M,)](w, source, u, N, BLOCK=block)
            vector_by_columns[(N // 64,)](w, u, v, M, N, ROWS=32, BLOCK=64)

    def want():
        a = start
        for _ in range(2):
            b = w @ F.normalize(a, dim=0)
            a = F.normalize(b, dim=0) @ w
        return b, a

    return Work(run, (u, v), want)


@triton.jit
def moments_step(p_ptr, g_ptr, m_ptr, v_ptr, new_m_ptr, new_v_ptr, step_ptr, part_ptr, N, BLOCK: tl.constexpr):
    """LAMB's moments and direction, and the squares of direction and weights, summed per block of a layer."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p, g = tl.load(p_ptr + at), tl.load(g_ptr + at).to(tl.float32)
    m = 0.9 * tl.load(m_ptr + at) + 0.1 * g
    v = 0.99 * tl.load(v_ptr + at) + 0.01 * g * g
    step = m / (tl.sqrt(v) + 1e-6) + 0.01 * p
    tl.store(new_m_ptr + at, m)
    tl.store(new_v_ptr + at, v)
    tl.store(step_ptr + at, step)
    tl.store(part_ptr + tl.program_id(0), tl.sum(p * p, 0))
    tl.store(part_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(step * step, 0))


@triton.jit
def ratio_step(p_ptr, step_ptr, part_ptr, new_p_ptr, blocks, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program sums the parts of its layer again, and moves by the ratio of their roots."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = part_ptr + tl.program_id(0) // PARTS * PARTS + tl.arange(0, PARTS)
    ratio = tl.sqrt(tl.sum(tl.load(part), 0) / tl.sum(tl.load(part + blocks), 0))
    tl.store(new_p_ptr + at, tl.load(p_ptr + at) - 0.01 * ratio * tl.load(step_ptr + at))


@case("LAMB for 24 layers of 1 Mi fp32, two launches", RATIOS, dict(L=24, N=MI), dict(L=3, N=4096))
def _(device, L, N):
    p, g, m = normal(device, L, N, dtype=FLOAT), normal(device, L, N), normal(device, L, N, dtype=FLOAT)
    v = normal(device, L, N, dtype=FLOAT).sigmoid()
    new_m, new_v, step, new_p = (empty(device, L, N, dtype=FLOAT) for _ in range(4))
    blocks = L * N // 1024
    part = empty(device, 2, blocks, dtype=FLOAT)

    def run():
        moments_step[(blocks,)](p, g, m, v, new_m, new_v, step, part, N, BLOCK=1024)
        ratio_step[(blocks,)](p, step, part, new_p, blocks, PARTS=N // 1024, BLOCK=1024)

    def want():
        a, b = 0.9 * m + 0.1 * g.float(), 0.99 * v + 0.01 * g.float() ** 2
        s = a / (b.sqrt() + 1e-6) + 0.01 * p
        return a, b, p - 0.01 * p.norm(dim=1, keepdim=True) / s.norm(dim=1, keepdim=True) * s

    return Work(run, (new_m, new_v, new_p), want)


@triton.jit
def triplets(x_ptr, near_ptr, far_ptr, y_ptr, N: tl.constexpr):
    """How much nearer, by a margin, a row's partner must be than another row; both are named by indices."""
    row, i = tl.program_id(0), tl.arange(0, N)
    x = tl.load(x_ptr + row * N + i).to(tl.float32)
    a = x - tl.load(x_ptr + tl.load(near_ptr + row) * N + i).to(tl.float32)
    b = x - tl.load(x_ptr + tl.load(far_ptr + row) * N + i).to(tl.float32)
    tl.store(y_ptr + row, tl.maximum(tl.sqrt(tl.sum(a * a, 0)) - tl.sqrt(tl.sum(b * b, 0)) + 1, 0.0))


@case("losses of 256 Ki triplets of 512 fp16", TRIPLETS, dict(M=256 * KI, N=512), dict(M=8, N=64))
def _(device, M, N):
    x, y = normal(device, M, N, dtype=HALF), empty(device, M, dtype=FLOAT)
    near, far = known(device, M, 2, M).unbind()

    def want():
        a, b = (torch.linalg.vector_norm(x - x[i.long()], dim=1, dtype=FLOAT) for i in (near, far))
        return (a - b + 1).clamp(min=0)

    return Work(lambda: triplets[(M,)](x, near, far, y, N=N, num_warps=2), y, want)


@triton.jit
def channel_maxima(x_ptr, part_ptr, M, N, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of each column over ROWS rows."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.zeros((STEP, BLOCK), tl.float32)
    for first in range(0, ROWS, STEP):
        row = tl.program_id(1) * ROWS + first + tl.arange(0, STEP)
        x = tl.load(x_ptr + row[:, None] * N + col[None, :]).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(part_ptr + tl.program_id(1) * N + col, tl.max(largest, 0))


@triton.jit
def channels_to_bytes(x_ptr, part_ptr, y_ptr, N, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program finds the scales of its columns among the parts, and rounds ROWS rows to 8 bits."""
    col, part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PARTS)
    scale = 127 / tl.max(tl.load(part_ptr + part[:, None] * N + col[None, :]), 0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * N + col[None, :]
    y = tl.floor(tl.load(x_ptr + at).to(tl.float32) * scale[None, :] + 0.5)
    tl.store(y_ptr + at, y.to(tl.int8))


@case(
    "channels of 16384 x 10240 bf16 to int8, two launches",
    CHANNELS,
    dict(M=16 * KI, N=10_240, parts=32),
    dict(M=64, N=128, parts=2),
)
def _(device, M, N, parts):
    x, part, y = normal(device, M, N), empty(device, parts, N, dtype=FLOAT), empty(device, M, N, dtype=INT8)

    def run():
        channel_maxima[(N // 64, parts)](x, part, M, N, ROWS=M // parts, STEP=16, BLOCK=64)
        channels_to_bytes[(N // 64, M // 32)](x, part, y, N, PARTS=parts, ROWS=32, BLOCK=64)

    return Work(run, y, lambda: (x.float() * (127 / x.float().abs().amax(0)) + 0.5).floor())


@triton.jit
def mean_of_first(x_ptr, y_ptr, M, n, BLOCK: tl.constexpr):
    """Means over the first of two dimensions: each program adds M stretches that are n apart, four loads ahead."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(M, num_stages=4):
        total += tl.load(x_ptr + i.to(tl.int64) * n + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total / M, mask=at < n)


@case("means of 37 times 10,000,019 bf16", FIRST, dict(M=37, n=10_000_019), dict(M=5, n=1019))
def _(device, M, n):
    x, y = normal(device, M, n), empty(device, n, dtype=FLOAT)
    return Work(lambda: mean_of_first[(triton.cdiv(n, 512),)](x, y, M, n, BLOCK=512), y, lambda: x.float().mean(0))
