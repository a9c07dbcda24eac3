"""A trait each: odd places, indices of indices, atomics, chains in few programs, bounds in tables, functions, launches."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, HALF, INT8, INT32, KI, MI, Work, empty, known, normal, place
from gpukit.validation.sixth_set.case import case, permutation

SLICES, TWICE, BITS, TICKETS = "slices", "indices of indices", "bits set by atomics", "work by tickets"
BALANCED, RAGGED, DOUBLING = "rows and columns balanced", "means of sequences", "sums by doubling"
NORMALS, DIAGONALS, REMAINDERS = "normal numbers", "diagonals", "chains of remainders"


@triton.jit
def cut(x_ptr, y_ptr, stride_b, stride_m, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """A tile of a slice that begins anywhere within a sector, with rows of any length, becomes contiguous."""
    m, n = tl.program_id(1) * BM + tl.arange(0, BM)[:, None], tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    live = (m < M) & (n < N)
    x = tl.load(x_ptr + tl.program_id(2) * stride_b + m * stride_m + n, mask=live, other=0)
    tl.store(y_ptr + (tl.program_id(2) * M + m) * N + n, x, mask=live)


@case(
    "x[:, 1:, 5:] of 300 x 301 x 1003 int8, tiles of 8 x 128",
    SLICES,
    dict(B=300, M=301, N=1003, dtype=INT8),
    dict(B=2, M=9, N=131, dtype=INT8),
)
@case(
    "x[:, 1:, 5:] of 150 x 301 x 2007 int16, tiles of 8 x 128",
    SLICES,
    dict(B=150, M=301, N=2007, dtype=torch.int16),
    dict(B=2, M=9, N=131, dtype=torch.int16),
)
def _(device, B, M, N, dtype):
    x, y = known(device, 128, B, M, N, dtype=INT8).to(dtype), empty(device, B, M - 1, N - 5, dtype=dtype)
    piece = x[:, 1:, 5:]

    def run():
        grid = triton.cdiv(N - 5, 128), triton.cdiv(M - 1, 8), B
        cut[grid](piece, y, *piece.stride()[:2], M - 1, N - 5, BM=8, BN=128)

    return Work(run, y, lambda: piece)


@triton.jit
def twice_named(x_ptr, p_ptr, q_ptr, y_ptr, BLOCK: tl.constexpr):
    """y[i] = x[p[q[i]]]: the second load waits for the first one, and the third for the second one."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + tl.load(p_ptr + tl.load(q_ptr + at))))


@case("x[p[q]] of 8 Mi, all int64", TWICE, dict(n=8 * MI), dict(n=1024))
def _(device, n):
    x, y = known(device, MI, n, dtype=torch.int64), empty(device, n, dtype=torch.int64)
    p, q = permutation(device, n, torch.int64), permutation(device, n, torch.int64).flip(0)
    return Work(lambda: twice_named[(n // 256,)](x, p, q, y, BLOCK=256, num_warps=2), y, lambda: x[p[q]])


@triton.jit
def set_bits(key_ptr, word_ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Two bits of a filter are set for each key."""
    key = tl.load(key_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    for factor in tl.static_range(40503, 60494, 19990):
        place = key * factor >> 5 & (WORDS * 32 - 1)
        tl.atomic_or(word_ptr + (place >> 5).to(tl.int32), (1 << (place & 31)).to(tl.int32), sem="relaxed")


@case("two of 64 Mi bits for 8 Mi keys int64", BITS, dict(n=8 * MI, words=2 * MI), dict(n=1024, words=256))
def _(device, n, words):
    """The bits are not cleared by what is measured."""
    key, word = known(device, 1 << 40, n, dtype=torch.int64), empty(device, words, dtype=INT32)

    def want():
        bits = torch.zeros(32 * words, dtype=torch.int64, device=key.device)
        for factor in (40503, 60493):
            bits[key * factor >> 5 & (32 * words - 1)] = 1
        packed = (bits.view(words, 32) << torch.arange(32, device=key.device)).sum(1)
        return packed - (packed >> 31 << 32)

    return Work(lambda: set_bits[(n // 512,)](key, word, WORDS=words, BLOCK=512), word, want)


@triton.jit
def clear(ticket_ptr):
    """One program, one number."""
    tl.store(ticket_ptr, 0)


@triton.jit
def by_tickets(x_ptr, y_ptr, ticket_ptr, tiles, BLOCK: tl.constexpr):
    """Programs draw the numbers of the tiles whose roots they take, until there is none left."""
    tile = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    while tile < tiles:
        at = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, tl.sqrt(tl.load(x_ptr + at)))
        tile = tl.atomic_add(ticket_ptr, 1, sem="relaxed")


@case("roots of 64 Mi fp32, tiles by tickets to 264 programs, two launches", TICKETS, dict(n=64 * MI), dict(n=64 * KI))
def _(device, n):
    x, y = normal(device, n, dtype=FLOAT).abs(), empty(device, n, dtype=FLOAT)
    ticket = empty(device, 8, dtype=INT32)

    def run():
        clear[(1,)](ticket, num_warps=1)
        by_tickets[(264,)](x, y, ticket, n // 8192, BLOCK=8192, num_warps=8)

    return Work(run, y, x.sqrt)


@triton.jit
def balance(x_ptr, y_ptr, steps, N: tl.constexpr):
    """A matrix in registers whose rows and columns are brought to the sum 1 in turn: each step waits for the one before."""
    at = tl.program_id(0) * N * N + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    p = tl.exp(tl.load(x_ptr + at))
    for _ in range(steps):
        p = p / tl.sum(p, 1)[:, None]
        p = p / tl.sum(p, 0)[None, :]
    tl.store(y_ptr + at, p)


@case(
    "60 matrices of 64 x 64 fp32 balanced, 200 steps, 8 warps",
    BALANCED,
    dict(n=60, steps=200, warps=8),
    dict(n=2, steps=3, warps=8),
)
@case(
    "8192 matrices of 64 x 64 fp32 balanced, 20 steps",
    BALANCED,
    dict(n=8192, steps=20, warps=4),
    dict(n=2, steps=4, warps=4),
)
def _(device, n, steps, warps):
    x, y = normal(device, n, 64, 64, dtype=FLOAT), empty(device, n, 64, 64, dtype=FLOAT)

    def want():
        p = x.exp()
        for _ in range(steps):
            p = F.normalize(F.normalize(p, 1, 2), 1, 1)
        return p

    return Work(lambda: balance[(n,)](x, y, steps, N=64, num_warps=warps), y, want)


@triton.jit
def sequence_means(x_ptr, start_ptr, y_ptr, N, BM: tl.constexpr, BN: tl.constexpr):
    """BN columns of the mean of a sequence, which is as long as two neighbors in a table are apart."""
    start, stop = tl.load(start_ptr + tl.program_id(1)), tl.load(start_ptr + tl.program_id(1) + 1)
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(start, stop, BM):
        row = first + tl.arange(0, BM)[:, None]
        total += tl.load(x_ptr + row * N + col[None, :], mask=row < stop, other=0.0).to(tl.float32)
    y = tl.sum(total, 0) / (stop - start)
    tl.store(y_ptr + tl.program_id(1) * N + col, y.to(y_ptr.dtype.element_ty))


@case(
    "means of 1500 sequences of 1 to 900 tokens of 768 bf16",
    RAGGED,
    dict(count=1500, longest=900, N=768),
    dict(count=3, longest=40, N=256),
)
def _(device, count, longest, N):
    length = known("meta", longest, count, dtype=torch.int64) + 1
    start = place(device, F.pad(length.cumsum(0), (1, 0)))
    x, y = normal(device, int(length.sum()), N), empty(device, count, N)

    def run():
        sequence_means[(N // 128, count)](x, start, y, N, BM=16, BN=128)

    def want():
        return torch.stack([z.mean(0, dtype=FLOAT) for z in x.split(length.tolist())])

    return Work(run, y, want)


@triton.jit
def add_shifted(x_ptr, y_ptr, by, BLOCK: tl.constexpr):
    """y[i] = x[i] + x[i - by], where there is an i - by."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + tl.load(x_ptr + at - by, mask=at >= by, other=0))


@case("prefix sums of 4 Mi int64 by doubling, 22 launches", DOUBLING, dict(n=4 * MI), dict(n=1024))
def _(device, n):
    x, y = known(device, MI, n, dtype=torch.int64), empty(device, 2, n, dtype=torch.int64)
    steps = int(math.log2(n))

    def run():
        for i in range(steps):
            add_shifted[(n // 512,)](y[(i + 1) % 2] if i else x, y[i % 2], 1 << i, BLOCK=512)

    return Work(run, y[(steps - 1) % 2], lambda: x.cumsum(0))


@triton.jit
def two_normals(u_ptr, v_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    """Two normal numbers of two uniform ones: a logarithm, a root, a sine and a cosine."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r, angle = tl.sqrt(-2 * tl.log(tl.load(u_ptr + at))), 6.283185307 * tl.load(v_ptr + at)
    tl.store(y_ptr + at, (r * tl.cos(angle)).to(y_ptr.dtype.element_ty))
    tl.store(z_ptr + at, (r * tl.sin(angle)).to(z_ptr.dtype.element_ty))


@case("48 Mi pairs of normal numbers fp32 to fp16, 8 warps", NORMALS, dict(n=48 * MI), dict(n=4096))
def _(device, n):
    u, v = normal(device, n, dtype=FLOAT).sigmoid(), normal(device, n, dtype=FLOAT).sigmoid()
    y, z = empty(device, n, dtype=HALF), empty(device, n, dtype=HALF)

    def want():
        r, angle = (-2 * u.log()).sqrt(), 2 * math.pi * v
        return r * angle.cos(), r * angle.sin()

    return Work(lambda: two_normals[(n // 2048,)](u, v, y, z, BLOCK=2048, num_warps=8), (y, z), want)


@triton.jit
def diagonal_sums(x_ptr, y_ptr, N, ROWS, BLOCK: tl.constexpr):
    """ROWS rows' shares of the sums along diagonals: each row is read from a place further right, and round its end."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(1) * ROWS, (tl.program_id(1) + 1) * ROWS):
        total += tl.load(x_ptr + row * N + (d + row) % N, mask=d < N, other=0.0)
    tl.atomic_add(y_ptr + d, total, mask=d < N, sem="relaxed")


@case(
    "sums along the 8191 diagonals of 8192 x 8191 fp32, 64 programs add",
    DIAGONALS,
    dict(M=8192, N=8191),
    dict(M=128, N=65),
)
def _(device, M, N):
    """The sums are not cleared by what is measured."""
    x, y = normal(device, M, N, dtype=FLOAT), empty(device, N, dtype=FLOAT)

    def run():
        diagonal_sums[(triton.cdiv(N, 512), 64)](x, y, N, M // 64, BLOCK=512)

    def want():
        at = torch.arange(N, device=x.device) + torch.arange(M, device=x.device)[:, None]
        return x.gather(1, at % N).sum(0)

    return Work(run, y, want)


@triton.jit
def remainders(x_ptr, y_ptr, steps, BLOCK: tl.constexpr):
    """Numbers of 64 bits that follow one another: each is a product's remainder by a prime."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    for _ in range(steps):
        x = x * 48271 % 2147483647
    tl.store(y_ptr + at, x)


@case(
    "300 remainders in turn of 67,584 int64, 264 programs of 2 warps",
    REMAINDERS,
    dict(n=67_584, steps=300),
    dict(n=512, steps=20),
)
def _(device, n, steps):
    x, y = known(device, MI, n, dtype=torch.int64) + 1, empty(device, n, dtype=torch.int64)

    def want():
        return x * pow(48271, steps, 2147483647) % 2147483647

    return Work(lambda: remainders[(n // 256,)](x, y, steps, BLOCK=256, num_warps=2), y, want)
