"""Few bits: weights of 4, rows and blocks of 8, and optimizers whose states are small."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.fourth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, FP8, HALF, INT8, KI, MI, UINT8, Work, empty, known, normal

FOUR, SCALES, STEPS = "weights of 4 bits", "scales of few", "steps of optimizers"


@triton.jit
def unpack_rows(w_ptr, scale_ptr, zero_ptr, y_ptr, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Eight weights of a column in an int32, which become eight rows: less a zero, and times a scale, for 128 rows."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    k = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    words = tl.load(w_ptr + k // 8 * N + n)
    scale, zero = tl.load(scale_ptr + k // 128 * N + n), tl.load(zero_ptr + k // 128 * N + n)
    y = (((words >> (k % 8 * 4)) & 15) - zero).to(tl.float32) * scale.to(tl.float32)
    tl.store(y_ptr + k * N + n, y.to(y_ptr.dtype.element_ty))


def _four_bits(device, K, N):
    w, zero = known(device, (1 << 31) - 1, K // 8, N), known(device, 16, K // 128, N, dtype=UINT8)
    return w, normal(device, K // 128, N, dtype=HALF), zero


def _unpacked(w, scale, zero):
    K = w.shape[0] * 8
    shifts = torch.arange(0, 32, 4, device=w.device)
    q = (w[:, None, :] >> shifts[:, None] & 15).reshape(K, -1) - zero.int().repeat_interleave(128, 0)
    return q.float() * scale.float().repeat_interleave(128, 0)


@case("11008 x 4096 weights of 4 bits to fp16, four times", FOUR, dict(K=11_008 * 4, N=4096), dict(K=256, N=128))
def _(device, K, N):
    w, scale, zero = _four_bits(device, K, N)
    y = empty(device, K, N, dtype=HALF)

    def run():
        return unpack_rows[(N // 128, K // 16)](w, scale, zero, y, N, ROWS=16, BLOCK=128)

    return Work(run, y, lambda: _unpacked(w, scale, zero))


@triton.jit
def vector_by_four_bits(x_ptr, w_ptr, scale_ptr, zero_ptr, part_ptr, K, N, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """A vector times weights of 4 bits; each program has WORDS * 8 rows, and stores a part of the sums."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(WORDS):
        word = tl.program_id(1) * WORDS + i
        words = tl.load(w_ptr + word * N + n)
        scale = tl.load(scale_ptr + word // 16 * N + n).to(tl.float32)
        zero = tl.load(zero_ptr + word // 16 * N + n).to(tl.int32)
        inner = tl.zeros((BLOCK,), tl.float32)
        for bit in tl.static_range(8):
            x = tl.load(x_ptr + word * 8 + bit).to(tl.float32)
            inner += x * (((words >> (4 * bit)) & 15) - zero).to(tl.float32)
        total += scale * inner
    tl.store(part_ptr + tl.program_id(1) * N + n, total)


@triton.jit
def add_parts(part_ptr, y_ptr, N, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, PARTS)
    y = tl.sum(tl.load(part_ptr + p[:, None] * N + n[None, :]), 0)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty))


@case(
    "a vector times 16384 x 32768 weights of 4 bits, 32 parts",
    FOUR,
    dict(K=16 * KI, N=32 * KI, parts=32),
    dict(K=512, N=256, parts=2),
)
def _(device, K, N, parts):
    w, scale, zero = _four_bits(device, K, N)
    x, y = normal(device, K, dtype=HALF), empty(device, N, dtype=FLOAT)
    part = empty(device, parts, N, dtype=FLOAT)

    def run():
        grid = (N // 256, parts)
        vector_by_four_bits[grid](x, w, scale, zero, part, K, N, WORDS=K // 8 // parts, BLOCK=256)
        add_parts[(N // 128,)](part, y, N, PARTS=parts, BLOCK=128)

    return Work(run, y, lambda: x.float() @ _unpacked(w, scale, zero))


@triton.jit
def shared_exponents(x_ptr, y_ptr, exponent_ptr, ROWS: tl.constexpr):
    """32 neighbors share a power of 2, and are stored in fp8: MX's form of numbers."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127 - 8
    factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    y = tl.minimum(tl.maximum(x * factor[:, None], -448.0), 448.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty))
    tl.store(exponent_ptr + rows, (exponent + 127).to(tl.uint8))


@case("128 Mi bf16 to fp8, 32 share an exponent", SCALES, dict(n=128 * MI), dict(n=4096))
def _(device, n):
    """All factors are powers of 2, so that the results are the same everywhere, to the bit."""
    x, y, exponents = normal(device, n), empty(device, n, dtype=FP8), empty(device, n // 32, dtype=UINT8)

    def want():
        rows = x.float().view(-1, 32)
        exponent = torch.frexp(rows.abs().amax(1)).exponent - 9
        y = (rows * torch.exp2(-exponent.float())[:, None]).clamp(-448, 448)
        return y.to(FP8).view(-1), exponent + 127

    return Work(lambda: shared_exponents[(n // 32 // 64,)](x, y, exponents, ROWS=64), (y, exponents), want)


@triton.jit
def scales_of_blocks(x_ptr, y_ptr, scale_ptr, N, BLOCK: tl.constexpr):
    """A block of 128 x 128 has one scale, and becomes whole numbers of 8 bits."""
    i, j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = i[:, None] * N + j[None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    scale = tl.max(tl.max(tl.abs(x), 1), 0) / 127
    y = x / scale
    tl.store(y_ptr + at, (y + tl.where(y > 0, 0.5, -0.5)).to(tl.int8))
    tl.store(scale_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), scale)


@case("8192 x 16384 bf16 to int8, 128 x 128 share a scale", SCALES, dict(M=8192, N=16 * KI), dict(M=128, N=256))
def _(device, M, N):
    x, y = normal(device, M, N), empty(device, M, N, dtype=INT8)
    scales = empty(device, M // 128, N // 128, dtype=FLOAT)

    def run():
        return scales_of_blocks[(N // 128, M // 128)](x, y, scales, N, BLOCK=128, num_warps=8)

    def want():
        blocks = x.float().view(M // 128, 128, N // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 127
        return (blocks / scale[:, None, :, None]).round().view(M, N), scale

    return Work(run, (y, scales), want)


@triton.jit
def norm_to_bytes(x_ptr, r_ptr, w_ptr, sum_ptr, y_ptr, scale_ptr, N, BLOCK: tl.constexpr):
    """A residual is added, the sum is stored and normalized, and goes on as int8 with a scale for its row."""
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    live = offs < N
    x = tl.load(x_ptr + row * N + offs, mask=live, other=0.0).to(tl.float32)
    x += tl.load(r_ptr + row * N + offs, mask=live, other=0.0).to(tl.float32)
    tl.store(sum_ptr + row * N + offs, x.to(sum_ptr.dtype.element_ty), mask=live)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + 1e-6) * tl.load(w_ptr + offs, mask=live, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(y), 0) / 127
    q = y / scale
    tl.store(y_ptr + row * N + offs, (q + tl.where(q > 0, 0.5, -0.5)).to(tl.int8), mask=live)
    tl.store(scale_ptr + row, scale)


@case("residual, RMS norm and int8, 16384 rows of 5120 bf16", SCALES, dict(M=16 * KI, N=5120), dict(M=3, N=160))
def _(device, M, N):
    x, r, w = normal(device, M, N), normal(device, M, N), normal(device, N)
    total, y, scales = empty(device, M, N), empty(device, M, N, dtype=INT8), empty(device, M, dtype=FLOAT)

    def run():
        block = triton.next_power_of_2(N)
        return norm_to_bytes[(M,)](x, r, w, total, y, scales, N, BLOCK=block, num_warps=8)

    def want():
        added = x.float() + r.float()
        z = F.rms_norm(added, (N,), w.float(), 1e-6)
        scale = z.abs().amax(1) / 127
        return added, (z / scale[:, None]).round(), scale

    return Work(run, (total, y, scales), want)


@triton.jit
def adam_of_bytes(p_ptr, g_ptr, m_ptr, v_ptr, ms_ptr, vs_ptr, q_ptr, nm_ptr, nv_ptr, rate, BLOCK: tl.constexpr):
    """A step of Adam whose two states are int8 with a scale for each BLOCK of them; what it changes goes elsewhere."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + at).to(tl.float32)
    m = 0.9 * tl.load(m_ptr + at).to(tl.float32) * tl.load(ms_ptr + block) + 0.1 * g
    root = tl.load(v_ptr + at).to(tl.float32) * tl.load(vs_ptr + block)
    v = 0.99 * root * root + 0.01 * g * g
    p = tl.load(p_ptr + at).to(tl.float32)
    tl.store(q_ptr + at, (p - rate * (m / (tl.sqrt(v) + 1e-3) + 0.01 * p)).to(q_ptr.dtype.element_ty))
    scale_m, scale_v = tl.max(tl.abs(m), 0) / 127, tl.max(tl.sqrt(v), 0) / 127
    z = m / scale_m
    tl.store(nm_ptr + at, (z + tl.where(z > 0, 0.5, -0.5)).to(tl.int8))
    tl.store(nv_ptr + at, (tl.sqrt(v) / scale_v + 0.5).to(tl.int8))


@case("Adam with states of 8 bits, 64 Mi bf16", STEPS, dict(n=64 * MI), dict(n=1024))
def _(device, n):
    p, g, q = normal(device, n), normal(device, n), empty(device, n)
    m, v = normal(device, n, dtype=INT8), normal(device, n, dtype=INT8)
    ms = normal(device, n // 256, dtype=FLOAT).sigmoid() / 127
    vs = normal(device, n // 256, dtype=FLOAT).sigmoid() / 127
    new_m, new_v = empty(device, n, dtype=INT8), empty(device, n, dtype=INT8)

    def run():
        return adam_of_bytes[(n // 256,)](p, g, m, v, ms, vs, q, new_m, new_v, 0.125, BLOCK=256)

    def want():
        each, old, grad = p.float(), m.float().view(-1, 256), g.float().view(-1, 256)
        new = 0.9 * old * ms[:, None] + 0.1 * grad
        root = (0.99 * (v.float().view(-1, 256) * vs[:, None]) ** 2 + 0.01 * grad**2).sqrt()
        step = (new / (root + 1e-3)).view(-1) + 0.01 * each
        rounded = [(z / (z.abs().amax(1, keepdim=True) / 127)).round().view(-1) for z in (new, root)]
        return each - 0.125 * step, *rounded

    return Work(run, (q, new_m, new_v), want)


@triton.jit
def squares_of_rows(g_ptr, row_ptr, col_ptr, N, BM: tl.constexpr, BN: tl.constexpr):
    """Squares of a tile, summed both ways and added to what other tiles find."""
    i, j = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    g = tl.load(g_ptr + i[:, None] * N + j[None, :]).to(tl.float32)
    tl.atomic_add(row_ptr + i, tl.sum(g * g, 1))
    tl.atomic_add(col_ptr + j, tl.sum(g * g, 0))


@triton.jit
def factored_step(p_ptr, g_ptr, row_ptr, col_ptr, q_ptr, total, rate, N, BM: tl.constexpr, BN: tl.constexpr):
    """Each gradient over the root of what its row and its column hold: a state of M + N numbers in place of M N."""
    i, j = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    at = i[:, None] * N + j[None, :]
    scale = tl.rsqrt(tl.load(row_ptr + i)[:, None] * tl.load(col_ptr + j)[None, :] / total)
    step = tl.load(g_ptr + at).to(tl.float32) * scale
    tl.store(q_ptr + at, (tl.load(p_ptr + at).to(tl.float32) - rate * step).to(q_ptr.dtype.element_ty))


@triton.jit
def clear(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32))


@case("a step with factored squares, 8192 x 8192 bf16, three launches", STEPS, dict(M=8192, N=8192), dict(M=64, N=192))
def _(device, M, N):
    p, g, q, sums = normal(device, M, N), normal(device, M, N), empty(device, M, N), empty(device, M + N, dtype=FLOAT)

    def run():
        clear[((M + N) // 256,)](sums, BLOCK=256)
        squares_of_rows[(N // 64, M // 64)](g, sums, sums[M:], N, BM=64, BN=64)
        factored_step[(N // 64, M // 64)](p, g, sums, sums[M:], q, 1.0 * M * N, 16.0, N, BM=64, BN=64)

    def want():
        squares = g.float() ** 2
        scale = (squares.sum(1, keepdim=True) * squares.sum(0) / (M * N)).rsqrt()
        return p.float() - 16.0 * g.float() * scale

    return Work(run, q, want)
