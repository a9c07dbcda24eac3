"""Numbers on their way: pages, caches of 8 bits and in pieces, shards, rows for experts, words of four bytes, codebooks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation.new_kernels.case import (
    FLOAT,
    HALF,
    INT8,
    INT32,
    KI,
    MI,
    UINT8,
    Work,
    empty,
    known,
    normal,
    place,
)
from gpukit.validation.sixth_set.case import case, permutation

PAGES, BYTES, PIECES = "pages of a prefix", "caches of 8 bits", "caches in pieces"
SHARDS, EXPERTS, PLACES = "shards side by side", "rows for experts", "places in experts"
WORDS, CODEBOOKS = "four rows in a word", "codebooks"


@triton.jit
def copy_pages(x_ptr, from_ptr, to_ptr, y_ptr, PAGES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A page of the keys or of the values of a prefix goes to another pool; one warp moves it in steps of BLOCK."""
    pool = tl.program_id(1) * PAGES
    source = x_ptr + (pool + tl.load(from_ptr + tl.program_id(0))) * SIZE
    target = y_ptr + (pool + tl.load(to_ptr + tl.program_id(0))) * SIZE
    for i in range(0, SIZE, BLOCK):
        at = i + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at))


@case(
    "3500 of 6000 pages of keys and values, 32 KiB each, to other places bf16, 1 warp",
    PAGES,
    dict(pages=6000, moved=3500, size=16 * KI),
    dict(pages=12, moved=5, size=2048),
)
def _(device, pages, moved, size):
    x, y = normal(device, 2, pages, size), empty(device, 2, pages, size)
    source, target = (
        permutation(device, pages, torch.int64)[:moved],
        permutation(device, pages, torch.int64).flip(0)[:moved],
    )

    def run():
        copy_pages[(moved, 2)](x, source, target, y, PAGES=pages, SIZE=size, BLOCK=1024, num_warps=1)

    return Work(run, y, lambda: torch.zeros_like(x).index_copy(1, target, x[:, source]))


@triton.jit
def to_bytes(x_ptr, slot, y_ptr, scale_ptr, G: tl.constexpr, D: tl.constexpr):
    """The G heads of a token, each with a scale of its own, as bytes in a slot of the cache."""
    g, d = tl.arange(0, G), tl.arange(0, D)[None, :]
    x = tl.load(x_ptr + (tl.program_id(0) * G + g[:, None]) * D + d).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1) / 127, 1e-8)
    y = tl.floor(x / scale[:, None] + 0.5)
    tl.store(y_ptr + (slot * G + g[:, None]) * D + d, y.to(tl.int8))
    tl.store(scale_ptr + slot * G + g, scale.to(scale_ptr.dtype.element_ty))


@triton.jit
def keep_bytes(k_ptr, v_ptr, slot_ptr, ck_ptr, cv_ptr, sk_ptr, sv_ptr, G: tl.constexpr, D: tl.constexpr):
    """The key and the value of one token."""
    slot = tl.load(slot_ptr + tl.program_id(0))
    to_bytes(k_ptr, slot, ck_ptr, sk_ptr, G, D)
    to_bytes(v_ptr, slot, cv_ptr, sv_ptr, G, D)


@case(
    "keys and values of 96 Ki tokens, 8 heads of 128 bf16, to int8 in slots, 2 warps",
    BYTES,
    dict(T=96 * KI, slots=128 * KI, G=8, D=128),
    dict(T=6, slots=10, G=2, D=16),
)
def _(device, T, slots, G, D):
    x = normal(device, T, G, D), normal(device, T, G, D)
    slot = permutation(device, slots, torch.int64)[:T]
    cache = [empty(device, slots, G, D, dtype=INT8) for _ in x]
    scale = [empty(device, slots, G, dtype=HALF) for _ in x]

    def want():
        scales = [z.float().abs().amax(2).clamp(min=127e-8) / 127 for z in x]
        done = [(z.float() / s[:, :, None] + 0.5).floor() for z, s in zip(x, scales, strict=True)]
        return tuple(
            torch.zeros_like(c, dtype=FLOAT).index_copy(0, slot, z)
            for c, z in zip([*cache, *scale], [*done, *scales], strict=True)
        )

    return Work(lambda: keep_bytes[(T,)](*x, slot, *cache, *scale, G=G, D=D, num_warps=2), (*cache, *scale), want)


@triton.jit
def keep_pieces(x_ptr, slot_ptr, y_ptr, G: tl.constexpr, D: tl.constexpr):
    """A token's keys into pages of 16 tokens, in which 8 numbers of a head's 16 tokens follow one another."""
    slot = tl.load(slot_ptr + tl.program_id(0))
    i = tl.arange(0, G * D)
    to = (slot // 16 * (G * D // 8) + i // 8) * 128 + slot % 16 * 8 + i % 8
    tl.store(y_ptr + to, tl.load(x_ptr + tl.program_id(0) * G * D + i))


@case(
    "keys of 160 Ki tokens, 8 heads of 128 fp16, into pages in pieces of 8",
    PIECES,
    dict(T=160 * KI, G=8, D=128),
    dict(T=48, G=2, D=16),
)
def _(device, T, G, D):
    x, y = normal(device, T, G, D, dtype=HALF), empty(device, T // 16, G * D // 8, 16, 8, dtype=HALF)
    page = permutation("meta", T // 16)
    slot = place(device, (page[:, None] * 16 + torch.arange(16, dtype=INT32)).flatten())

    def want():
        rows = torch.empty_like(x).index_copy(0, slot.long(), x)
        return rows.view(T // 16, 16, G * D // 8, 8).transpose(1, 2)

    return Work(lambda: keep_pieces[(T,)](x, slot, y, G=G, D=D), y, want)


@triton.jit
def gather_shards(x_ptr, y_ptr, M, S, BLOCK: tl.constexpr):
    """A shard's row of S numbers to its columns of the whole."""
    shard, row = tl.program_id(1), tl.program_id(0)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + (shard * M + row) * S + i, mask=i < S, other=0.0)
    tl.store(y_ptr + (row * tl.num_programs(1) + shard) * S + i, x, mask=i < S)


@case("8 shards of 16384 rows of 1802 fp16 side by side", SHARDS, dict(M=16_384, S=1802), dict(M=3, S=50))
def _(device, M, S):
    x, y = normal(device, 8, M, S, dtype=HALF), empty(device, M, 8, S, dtype=HALF)

    def run():
        gather_shards[(M, 8)](x, y, M, S, BLOCK=triton.next_power_of_2(S))

    return Work(run, y, lambda: x.transpose(0, 1))


@triton.jit
def send_rows(x_ptr, to_ptr, y_ptr, COPIES: tl.constexpr, N: tl.constexpr):
    """A token's row is read once and stored in as many places as it has experts."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + tl.program_id(0) * N + i)
    for copy in tl.static_range(COPIES):
        tl.store(y_ptr + tl.load(to_ptr + tl.program_id(0) * COPIES + copy) * N + i, x)


@case("16384 rows of 2048 bf16 to 8 experts each", EXPERTS, dict(T=16_384, N=2048), dict(T=5, N=64))
def _(device, T, N):
    x, y, to = normal(device, T, N), empty(device, 8 * T, N), permutation(device, 8 * T)

    def run():
        send_rows[(T,)](x, to, y, COPIES=8, N=N, num_warps=8)

    return Work(run, y, lambda: torch.empty_like(y).index_copy(0, to.long(), x.repeat_interleave(8, 0)))


@triton.jit
def count_experts(expert_ptr, count_ptr, E: tl.constexpr, BLOCK: tl.constexpr):
    """How many of BLOCK choices each expert has."""
    expert = tl.load(expert_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.store(count_ptr + tl.program_id(0) * E + tl.arange(0, E), tl.histogram(expert, E))


@triton.jit
def first_places(count_ptr, first_ptr, blocks, E: tl.constexpr, ROWS: tl.constexpr):
    """One program: what lies before each block's choices of each expert, from counts that it reads twice."""
    at = tl.arange(0, ROWS)[:, None] * E + tl.arange(0, E)[None, :]
    total = tl.zeros((E,), tl.int32)
    for i in range(0, blocks, ROWS):
        total += tl.sum(tl.load(count_ptr + i * E + at), 0)
    before = tl.cumsum(total, 0) - total
    for i in range(0, blocks, ROWS):
        count = tl.load(count_ptr + i * E + at)
        tl.store(first_ptr + i * E + at, before[None, :] + tl.cumsum(count, 0) - count)
        before += tl.sum(count, 0)


@triton.jit
def places_in_experts(expert_ptr, first_ptr, place_ptr, E: tl.constexpr, BLOCK: tl.constexpr):
    """Each choice's place in the order by experts: the block's first one plus those that came before it in the block."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = (tl.load(expert_ptr + at)[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)
    first = tl.load(first_ptr + tl.program_id(0) * E + tl.arange(0, E))
    tl.store(place_ptr + at, tl.sum(chosen * (tl.cumsum(chosen, 0) - 1 + first[None, :]), 1))


@case("places of 1 Mi choices of 64 experts int32, three launches", PLACES, dict(n=MI, E=64), dict(n=4096, E=8))
def _(device, n, E):
    expert, where = known(device, E, n), empty(device, n, dtype=INT32)
    count, first = empty(device, n // 256, E, dtype=INT32), empty(device, n // 256, E, dtype=INT32)

    def run():
        count_experts[(n // 256,)](expert, count, E=E, BLOCK=256)
        first_places[(1,)](count, first, n // 256, E=E, ROWS=16, num_warps=4)
        places_in_experts[(n // 256,)](expert, first, where, E=E, BLOCK=256, num_warps=8)

    return Work(run, where, lambda: expert.argsort(stable=True).argsort())


@triton.jit
def pack_rows(x_ptr, y_ptr, N, BN: tl.constexpr):
    """Four rows of bytes become one of words, which hold a byte of each."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    word = tl.zeros((BN,), tl.int32)
    for i in tl.static_range(4):
        byte = tl.load(x_ptr + (tl.program_id(1) * 4 + i) * N + col).to(tl.int32) & 255
        word |= byte << (8 * i)
    tl.store(y_ptr + tl.program_id(1) * N + col, word)


@case("14336 x 20,480 int8, four rows in a word, 1 warp", WORDS, dict(K=14_336, N=20_480), dict(K=8, N=256))
def _(device, K, N):
    x, y = normal(device, K, N, dtype=INT8), empty(device, K // 4, N, dtype=INT32)

    def run():
        pack_rows[(N // 256, K // 4)](x, y, N, BN=256, num_warps=1)

    return Work(run, y, lambda: x.view(K // 4, 4, N).transpose(1, 2).contiguous().view(INT32)[:, :, 0])


@triton.jit
def decode(code_ptr, one_ptr, two_ptr, scale_ptr, y_ptr, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Eight weights are the sum of two vectors, which a byte names in each of two codebooks, times the row's scale."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, 8)[None, :]
    one, two = tl.load(code_ptr + 2 * at).to(tl.int32), tl.load(code_ptr + 2 * at + 1).to(tl.int32)
    y = tl.load(one_ptr + one[:, None] * 8 + i) + tl.load(two_ptr + two[:, None] * 8 + i)
    tl.store(y_ptr + at[:, None] * 8 + i, y * tl.load(scale_ptr + at // ROW)[:, None])


@case(
    "16384 x 12288 weights fp16 from two codebooks of 256 vectors of 8",
    CODEBOOKS,
    dict(M=16_384, N=12_288),
    dict(M=4, N=512),
)
def _(device, M, N):
    code, y = known(device, 256, M, N // 8, 2, dtype=UINT8), empty(device, M, N, dtype=HALF)
    one, two, scale = (
        normal(device, 256, 8, dtype=HALF),
        normal(device, 256, 8, dtype=HALF),
        normal(device, M, dtype=HALF),
    )

    def run():
        decode[(M * N // 1024,)](code, one, two, scale, y, ROW=N // 8, BLOCK=128)

    def want():
        a, b = code.long().unbind(2)
        return ((one[a] + two[b]) * scale[:, None, None]).view(M, N)

    return Work(run, y, want)
