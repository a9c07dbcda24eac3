"""Numbers of few bits, a step of an optimizer, adapters, experts, advantages, and bags of rows whose numbers differ."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import (
    BF16,
    FLOAT,
    FP8,
    HALF,
    INT8,
    KI,
    MI,
    UINT8,
    Work,
    empty,
    known,
    normal,
    place,
)
from gpukit.validation.seventh_set.case import case

BYTES34, FOUR, BOTH = "blocks of 34 bytes", "four bits and a shared exponent", "casts to 8 bits, both ways round"
FREE, ADAPTED, COMBINED = "steps without a schedule", "adapters that are added", "sums of experts' rows"
ADVANTAGES, BAGS = "advantages back in time", "bags of differing length"


@triton.jit
def blocks_of_34_bytes(scale_ptr, q_ptr, y_ptr, BLOCKS: tl.constexpr):
    """A scale of 2 bytes and 32 numbers of 1 byte lie behind one another; both pointers are to the same bytes."""
    block, i = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, 32)
    scale = tl.load(scale_ptr + block * 17).to(tl.float32)
    q = tl.load(q_ptr + block[:, None] * 34 + 2 + i[None, :]).to(tl.float32)
    tl.store(y_ptr + block[:, None] * 32 + i[None, :], (q * scale[:, None]).to(y_ptr.dtype.element_ty))


@case("128 Mi numbers in blocks of 34 bytes to bf16, 64 blocks per program", BYTES34, dict(n=4 * MI), dict(n=128))
def _(device, n):
    scale, q = normal(device, n, 1, dtype=HALF), normal(device, n, 32, dtype=INT8)
    packed, y = torch.cat([scale.view(INT8), q], 1).view(-1), empty(device, n, 32)
    halves = packed.view(HALF)

    def run():
        blocks_of_34_bytes[(n // 64,)](halves, packed, y, BLOCKS=64)

    return Work(run, y, lambda: scale.float() * q.float())


@triton.jit
def to_four_bits(x_ptr, code_ptr, exponent_ptr, G: tl.constexpr):
    """Groups of 32 share a power of two. A number becomes a sign and one of 0, 1/2, 1, 3/2, 2, 3, 4 and 6; two fill a byte."""
    group, i = tl.program_id(0) * G + tl.arange(0, G), tl.arange(0, 32)
    x = tl.load(x_ptr + group[:, None] * 32 + i[None, :]).to(tl.float32)
    largest = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
    exponent = tl.maximum((largest >> 23) - 2, 1)
    size = tl.abs(x) * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    code = (size > 0.25).to(tl.int32) + (size > 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size > 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size > 3.5).to(tl.int32) + (size > 5).to(tl.int32)
    low, high = tl.split(tl.reshape(code | (x < 0).to(tl.int32) << 3, (G, 16, 2)))
    byte = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(code_ptr + byte, (low | high << 4).to(tl.uint8))
    tl.store(exponent_ptr + group, exponent.to(tl.uint8))


@case("128 Mi bf16 to 4 bits, 32 share a power of two", FOUR, dict(n=128 * MI), dict(n=2048))
def _(device, n):
    x, code, exponent = normal(device, n), empty(device, n // 2, dtype=UINT8), empty(device, n // 32, dtype=UINT8)

    def want():
        groups = x.float().view(-1, 32)
        shared = ((groups.abs().amax(1).view(torch.int32) >> 23) - 2).clamp(min=1)
        size = groups.abs() * ((254 - shared) << 23).view(FLOAT)[:, None]
        codes = torch.bucketize(
            size, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], device=x.device), out_int32=True
        )
        codes = (codes + 8 * (groups < 0)).view(-1, 2)
        return codes[:, 0] + 16 * codes[:, 1], shared

    return Work(lambda: to_four_bits[(n // 1024,)](x, code, exponent, G=32), (code, exponent), want)


@triton.jit
def cast_both_ways(x_ptr, scale_ptr, y_ptr, z_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """A tile becomes 8 bits, and is stored as it is and transposed."""
    m, n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :]).to(tl.float32) * tl.load(scale_ptr)
    x = x.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None] * N + n[None, :], x)
    tl.store(z_ptr + n[:, None] * M + m[None, :], tl.trans(x))


@case(
    "16384 x 8192 bf16 to fp8 as it is and transposed, tiles of 64 x 128, 8 warps",
    BOTH,
    dict(M=16 * KI, N=8 * KI),
    dict(M=128, N=256),
)
def _(device, M, N):
    x, scale = normal(device, M, N), torch.full((1,), 16.0, device=device)
    y, z = empty(device, M, N, dtype=FP8), empty(device, N, M, dtype=FP8)

    def run():
        cast_both_ways[(N // 128, M // 64)](x, scale, y, z, M, N, BM=64, BN=128, num_warps=8)

    def want():
        right = (x.float() * scale).to(FP8)
        return right, right.T

    return Work(run, (y, z), want)


@triton.jit
def free_step(
    y_ptr, z_ptr, v_ptr, g_ptr, new_y_ptr, new_z_ptr, new_v_ptr, rate, share, beta, decay, n, BLOCK: tl.constexpr
):
    """AdamW whose weights y lie between a mean and the fast weights z: no schedule, and no first moment."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    y, z = tl.load(y_ptr + at, mask=mask, other=0.0), tl.load(z_ptr + at, mask=mask, other=0.0)
    v = tl.load(v_ptr + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
    v = v * 0.95 + g * g * 0.05
    step = g / (tl.sqrt(v) + 1e-8) + decay * y
    y += share * (z - y) + rate * (beta * (1 - share) - 1) * step
    tl.store(new_y_ptr + at, y, mask=mask)
    tl.store(new_z_ptr + at, z - rate * step, mask=mask)
    tl.store(new_v_ptr + at, v.to(tl.bfloat16), mask=mask)


@case("a step without a schedule, 20,000,003 fp32, 7 streams, 8 warps", FREE, dict(n=20_000_003), dict(n=3001))
def _(device, n):
    y, z, v, g = (
        normal(device, n, dtype=FLOAT),
        normal(device, n, dtype=FLOAT),
        normal(device, n).abs(),
        normal(device, n),
    )
    out = tuple(empty(device, n, dtype=dtype) for dtype in (FLOAT, FLOAT, BF16))

    def run():
        free_step[(triton.cdiv(n, 2048),)](y, z, v, g, *out, 0.01, 0.125, 0.9, 0.1, n, BLOCK=2048, num_warps=8)

    def want():
        square = 0.95 * v.float() + 0.05 * g.float() ** 2
        step = g.float() / (square.sqrt() + 1e-8) + 0.1 * y
        return torch.lerp(y, z, 0.125) + 0.01 * (0.9 * 0.875 - 1) * step, z - 0.01 * step, square

    return Work(run, out, want)


@triton.jit
def add_adapter(h_ptr, b_ptr, x_ptr, y_ptr, scale, N, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """y = x + scale * h @ b, where h has R columns: one product per tile. Hints say what L2 should keep."""
    m, n, r = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, R)
    h = tl.load(h_ptr + m[:, None] * R + r[None, :], eviction_policy="evict_last")
    b = tl.load(b_ptr + r[:, None] * N + n[None, :], eviction_policy="evict_last")
    at = m[:, None] * N + n[None, :]
    y = tl.load(x_ptr + at, eviction_policy="evict_first").to(tl.float32) + scale * tl.dot(h, b)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty))


@case(
    "an adapter of rank 16 added to 16384 x 6144 bf16, tiles of 64 x 128",
    ADAPTED,
    dict(M=16 * KI, N=6144),
    dict(M=128, N=128),
)
def _(device, M, N):
    h, b, x, y = normal(device, M, 16), normal(device, 16, N), normal(device, M, N), empty(device, M, N)

    def run():
        add_adapter[(M // 64, N // 128)](h, b, x, y, 2.0, N, R=16, BM=64, BN=128)

    return Work(run, y, lambda: x.float() + 2 * (h.float() @ b.float()))


@triton.jit
def combine(x_ptr, row_ptr, share_ptr, y_ptr, N: tl.constexpr, K: tl.constexpr):
    """A token's K rows, each times its share; one that was dropped has the number -1 and adds nothing."""
    col = tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for i in range(K):
        row = tl.load(row_ptr + tl.program_id(0) * K + i)
        if row >= 0:
            x = tl.load(x_ptr + row * N + col)
            total += x.to(tl.float32) * tl.load(share_ptr + tl.program_id(0) * K + i)
    tl.store(y_ptr + tl.program_id(0) * N + col, total.to(y_ptr.dtype.element_ty))


@case(
    "sums of 6 experts' rows of 2048 bf16 for 16384 tokens, some of them dropped",
    COMBINED,
    dict(T=16 * KI, rows=80_000, N=2048),
    dict(T=20, rows=100, N=256),
)
def _(device, T, rows, N):
    x, y, share = normal(device, rows, N), empty(device, T, N), normal(device, T, 6, dtype=FLOAT).sigmoid()
    row = torch.randperm(6 * T, generator=torch.Generator().manual_seed(0)).int().view(T, 6)
    row = place(device, row.where(row < rows, -1))

    def want():
        total = torch.zeros(T, N, device=x.device)
        for i in range(6):
            total += x[row[:, i].clamp(min=0)].float() * (share[:, i] * (row[:, i] >= 0))[:, None]
        return total

    return Work(lambda: combine[(T,)](x, row, share, y, N=N, K=6), y, want)


@triton.jit
def advantages(reward_ptr, value_ptr, done_ptr, advantage_ptr, return_ptr, T, E, BLOCK: tl.constexpr):
    """Generalized advantages of BLOCK episodes, the last step first: each waits for the one after it."""
    episode = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    advantage, after = tl.zeros((BLOCK,), tl.float32), tl.load(value_ptr + T * E + episode)
    for i in range(T):
        at = (T - 1 - i) * E + episode
        value, live = tl.load(value_ptr + at), 1.0 - tl.load(done_ptr + at).to(tl.float32)
        surprise = tl.load(reward_ptr + at) + 0.99 * live * after - value
        advantage = surprise + 0.99 * 0.95 * live * advantage
        after = value
        tl.store(advantage_ptr + at, advantage)
        tl.store(return_ptr + at, advantage + value)


@case("advantages of 64 Ki episodes of 256 steps fp32", ADVANTAGES, dict(E=64 * KI, T=256), dict(E=256, T=20))
def _(device, E, T):
    reward, value = normal(device, T, E, dtype=FLOAT), normal(device, T + 1, E, dtype=FLOAT)
    done = (normal(device, T, E) > 2).to(UINT8)
    advantage, returns = empty(device, T, E, dtype=FLOAT), empty(device, T, E, dtype=FLOAT)

    def want():
        found, last = torch.empty_like(reward), torch.zeros_like(reward[0])
        for t in reversed(range(T)):
            live = 1.0 - done[t].float()
            last = reward[t] + 0.99 * live * value[t + 1] - value[t] + 0.99 * 0.95 * live * last
            found[t] = last
        return found, found + value[:-1]

    def run():
        advantages[(E // 128,)](reward, value, done, advantage, returns, T, E, BLOCK=128)

    return Work(run, (advantage, returns), want)


@triton.jit
def bags(table_ptr, id_ptr, start_ptr, y_ptr, R: tl.constexpr):
    """The mean of a bag's rows of 64; R rows at a time."""
    start, stop = tl.load(start_ptr + tl.program_id(0)), tl.load(start_ptr + tl.program_id(0) + 1)
    i, col = tl.arange(0, R), tl.arange(0, 64)
    total = tl.zeros((R, 64), tl.float32)
    for first in range(start, stop, R):
        mask = first + i < stop
        row = tl.load(id_ptr + first + i, mask=mask, other=0)
        total += tl.load(table_ptr + row[:, None] * 64 + col[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
    y = tl.sum(total, 0) / (stop - start)
    tl.store(y_ptr + tl.program_id(0) * 64 + col, y.to(y_ptr.dtype.element_ty))


def _bags(order: str) -> None:
    name = f"means of 32 Ki bags of 1 to 400 rows of 64 fp16, {order}, 2 warps"

    @case(name, BAGS, dict(B=32 * KI, rows=MI), dict(B=5, rows=100))
    def _(device, B, rows):
        """Most bags are short: a length is 400 times the fourth power of a number below 1."""
        length = 1 + (399 * (known("meta", 1000, B) / 1000) ** 4).long()
        if order == "longest first":
            length = length.sort(descending=True).values
        start = place(device, F.pad(length.cumsum(0), (1, 0)).int())
        ids, table, y = (
            known(device, rows, int(length.sum())),
            normal(device, rows, 64, dtype=HALF),
            empty(device, B, 64),
        )

        def want():
            bag = torch.repeat_interleave(torch.arange(B, device=table.device), length.to(table.device))
            total = torch.zeros(B, 64, device=table.device).index_add_(0, bag, table[ids].float())
            return total / length.to(table.device)[:, None]

        return Work(lambda: bags[(B,)](table, ids, start, y, R=8, num_warps=2), y, want)


_bags("in any order")
_bags("longest first")
