"""Data: bags of bytes, products at named places, keys in place, pieces of lines, checksums, and cells of life."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

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
from gpukit.validation.tenth_set.case import case

BAGS, PLACES, SORTED = "bags of rows of bytes", "products at named places", "keys put in place"
PIECES, CHECKSUMS, CELLS = "pieces of lines", "checksums by tables", "cells of life"
FULL = (1 << 32) - 1


@triton.jit
def bags_of_bytes(
    row_ptr, start_ptr, share_ptr, byte_ptr, word_ptr, y_ptr, D: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr
):
    """Weighted sums of rows of D bytes. Behind its bytes, a row of WIDE has its scale and its offset in fp32."""
    i, d, bag = tl.arange(0, BR), tl.arange(0, D), tl.program_id(0)
    total = tl.zeros((BR, D), tl.float32)
    stop = tl.load(start_ptr + bag + 1)
    for first in range(tl.load(start_ptr + bag), stop, BR):
        live = first + i < stop
        row = tl.load(row_ptr + first + i, mask=live, other=0).to(tl.int64)
        share = tl.load(share_ptr + first + i, mask=live, other=0.0)
        last = word_ptr + row * (WIDE // 4) + D // 4
        scale, offset = tl.load(last, mask=live, other=0.0), tl.load(last + 1, mask=live, other=0.0)
        x = tl.load(byte_ptr + row[:, None] * WIDE + d[None, :], mask=live[:, None], other=0).to(tl.float32)
        total += share[:, None] * (x * scale[:, None] + offset[:, None])
    tl.store(y_ptr + bag * D + d, tl.sum(total, 0).to(y_ptr.dtype.element_ty))


@case(
    "96 Ki bags of 1 to 60 of 3,000,000 rows of 128 bytes, a scale and an offset, to fp16, 4 rows at a time, 1 warp",
    BAGS,
    dict(B=96 * KI, longest=60, rows=3_000_000, D=128),
    dict(B=7, longest=20, rows=50, D=32),
)
def _(device, B, longest, rows, D):
    """A tenth of the rows are in half of the places."""
    length = 1 + known("meta", longest, B, dtype=torch.int64)
    start, count = place(device, F.pad(length.cumsum(0), (1, 0)).int()), int(length.sum())
    names = place(device, ((known("meta", 1 << 22, count).double() / (1 << 22)) ** 3.3 * rows).int())
    table, y = normal(device, rows, D + 8, dtype=INT8).view(UINT8), empty(device, B, D, dtype=HALF)
    words, share = table.view(FLOAT), normal(device, count, dtype=FLOAT)
    words[:, -2:] = normal(device, rows, 2, dtype=FLOAT) / 64

    def run():
        bags_of_bytes[(B,)](names, start, share, table, words, y, D=D, WIDE=D + 8, BR=4, num_warps=1)

    def want():
        bag = torch.arange(B, device=y.device).repeat_interleave(length.to(y.device))
        out = torch.zeros(B, D, device=y.device)
        for mine, row, part in zip(bag.split(1 << 20), names.long().split(1 << 20), share.split(1 << 20), strict=True):
            x = table[row, :D].float() * words[row, -2:-1] + words[row, -1:]
            out.index_add_(0, mine, x * part[:, None])
        return out

    return Work(run, y, want)


@triton.jit
def products_at_places(a_ptr, b_ptr, row_ptr, col_ptr, y_ptr, n, D: tl.constexpr, BLOCK: tl.constexpr):
    """One number of a @ b.T for each pair of a row and a column that is named."""
    at, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    live = at < n
    row, col = tl.load(row_ptr + at, mask=live, other=0), tl.load(col_ptr + at, mask=live, other=0)
    a = tl.load(a_ptr + row[:, None] * D + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr + col[:, None] * D + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    tl.store(y_ptr + at, tl.sum(a * b, 1), mask=live)


@case(
    "2,500,000 products of rows of 128 of 400,000 fp16, rows in order and columns in any, 16 per program",
    PLACES,
    dict(n=2_500_000, rows=400_000, D=128),
    dict(n=301, rows=40, D=16),
)
def _(device, n, rows, D):
    """Columns are drawn evenly."""
    row, col = place(device, known("meta", rows, n).sort().values), known(device, rows, 2, n)[1].contiguous()
    a, b, y = normal(device, rows, D, dtype=HALF), normal(device, rows, D, dtype=HALF), empty(device, n, dtype=FLOAT)

    def run():
        products_at_places[(triton.cdiv(n, 16),)](a, b, row, col, y, n, D=D, BLOCK=16)

    def want():
        pairs = zip(row.to(y.device).long().split(1 << 18), col.to(y.device).long().split(1 << 18), strict=True)
        return torch.cat([(a[i].float() * b[j].float()).sum(1) for i, j in pairs])

    return Work(run, y, want)


@triton.jit
def keys_in_place(x_ptr, start_ptr, y_ptr, shift, DIGITS: tl.constexpr, BLOCK: tl.constexpr):
    """A pass of a sort by digits: a key goes behind all of smaller digits, all of its own digit in blocks before, and
    those before it in its block, which a scan for each digit counts."""
    digit, block = tl.arange(0, DIGITS), tl.program_id(0)
    x = tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK))
    mine = ((x >> shift) & (DIGITS - 1))[:, None] == digit[None, :]
    before = tl.cumsum(mine.to(tl.int32), 0) - 1 + tl.load(start_ptr + block * DIGITS + digit)[None, :]
    tl.store(y_ptr + tl.sum(tl.where(mine, before, 0), 1), x)


@case(
    "16 Mi keys int32 put in place by 4 of their bits, places known for each 1024, 8 warps",
    SORTED,
    dict(n=16 * MI),
    dict(n=4096),
)
def _(device, n):
    x, y, shift, blocks = known("meta", 1 << 30, n), empty(device, n, dtype=INT32), 9, n // 1024
    digit = x >> shift & 15
    count = (torch.arange(n) // 1024 * 16 + digit).bincount(minlength=blocks * 16).view(blocks, 16)
    start = (count.T.flatten().cumsum(0) - count.T.flatten()).view(16, blocks).T.int().contiguous()
    keys, start = place(device, x), place(device, start)

    def run():
        keys_in_place[(blocks,)](keys, start, y, shift, DIGITS=16, BLOCK=1024, num_warps=8)

    return Work(run, y, lambda: x[digit.sort(stable=True).indices])


@triton.jit
def write_pieces(start_ptr, value_ptr, slope_ptr, y_ptr, BLOCK: tl.constexpr):
    """A program writes one piece of a line, from where it starts to where the next one does."""
    piece, i = tl.program_id(0), tl.arange(0, BLOCK)
    start, stop = tl.load(start_ptr + piece), tl.load(start_ptr + piece + 1)
    value, slope = tl.load(value_ptr + piece), tl.load(slope_ptr + piece)
    for first in range(start, stop, BLOCK):
        at = first + i
        tl.store(y_ptr + at, value + slope * (at - start), mask=at < stop)


@case(
    "200,000 pieces of lines of 1 to 4000 fp32 written one after another, one per program of 1 warp, 128 at a time",
    PIECES,
    dict(pieces=200_000, longest=4000),
    dict(pieces=20, longest=300),
)
def _(device, pieces, longest):
    """Most pieces are short."""
    length = 1 + ((longest - 1) * (known("meta", 1 << 16, pieces).double() / (1 << 16)) ** 4).long()
    start, n = place(device, F.pad(length.cumsum(0), (1, 0)).int()), int(length.sum())
    value, slope, y = (
        normal(device, pieces, dtype=FLOAT),
        normal(device, pieces, dtype=FLOAT) / 64,
        empty(device, n, dtype=FLOAT),
    )

    def want():
        piece = torch.arange(pieces, device=y.device).repeat_interleave(length.to(y.device))
        return value[piece] + slope[piece] * (torch.arange(n, device=y.device) - start.to(y.device)[piece])

    return Work(lambda: write_pieces[(pieces,)](start, value, slope, y, BLOCK=128, num_warps=1), y, want)


@triton.jit
def checksums(x_ptr, table_ptr, y_ptr, n, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """A lane goes through the bytes of one message: what a table says of the last byte chooses where it looks next."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = at.to(tl.uint32) * 0 + 0xFFFFFFFF
    for i in range(WORDS):
        found ^= tl.load(x_ptr + at * WORDS + i, mask=at < n, other=0)
        for _ in tl.static_range(4):
            found = (found >> 8) ^ tl.load(table_ptr + (found & 255).to(tl.int32))
    tl.store(y_ptr + at, found ^ 0xFFFFFFFF, mask=at < n)


@case(
    "checksums of 600,001 messages of 384 bytes, a table of 256 int32 for each byte in turn, 64 per program of 2 warps",
    CHECKSUMS,
    dict(n=600_001, words=96),
    dict(n=150, words=3),
)
def _(device, n, words):
    """Words are tensors of int32, of which the kernel is given views as uint32."""
    table = torch.arange(256)
    for _ in range(8):
        table = torch.where(table & 1 == 1, table >> 1 ^ 0xEDB88320, table >> 1)
    table = place(device, torch.where(table >= 1 << 31, table - (1 << 32), table).int())
    x, y = known(device, (1 << 31) - 1, n, words), empty(device, n, dtype=INT32)
    views = [z.view(torch.uint32) for z in (x, table, y)]

    def run():
        checksums[(triton.cdiv(n, 64),)](*views, n, WORDS=words, BLOCK=64, num_warps=2)

    def want():
        entries, found = table.to(y.device).long() & FULL, torch.full((n,), FULL, device=y.device)
        for word in x.to(y.device).long().unbind(1):
            found = found ^ word
            for _ in range(4):
                found = found >> 8 ^ entries[found & 255]
        found = found ^ FULL
        return torch.where(found >= 1 << 31, found - (1 << 32), found)

    return Work(run, y, want)


@triton.jit
def sums_of_three(a, b, c):
    """The two bits of the sum of three bits, for 64 sums at once."""
    return a ^ b ^ c, (a & b) | (c & (a ^ b))


@triton.jit
def cells_of_life(x_ptr, y_ptr, H, W, BLOCK: tl.constexpr):
    """A step of the game of life, on a torus; a word has 64 cells of a line, whose neighbors are counted bit by bit."""
    col, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    live, left, right = col < W, (col + W - 1) % W, (col + 1) % W
    above, below = (row + H - 1) % H * W, (row + 1) % H * W
    ones, twos, now = col.to(tl.uint64) * 0, col.to(tl.uint64) * 0, col.to(tl.uint64) * 0
    fours = ones
    for i in tl.static_range(3):
        line = above if i == 0 else (row * W if i == 1 else below)
        x = tl.load(x_ptr + line + col, mask=live, other=0)
        one = (x << 1) | (tl.load(x_ptr + line + left, mask=live, other=0) >> 63)
        two = (x >> 1) | (tl.load(x_ptr + line + right, mask=live, other=0) << 63)
        if i == 1:
            now = x
            low, high = one ^ two, one & two
        else:
            low, high = sums_of_three(one, x, two)
        ones, carry = ones ^ low, ones & low
        twos, more = sums_of_three(twos, high, carry)
        fours |= more
    tl.store(y_ptr + row * W + col, twos & (ones | now) & (fours ^ 0xFFFFFFFFFFFFFFFF), mask=live)


@case(
    "two steps of the game of life on 24,000 x 32,064 cells, 64 in a word, 256 words per program, two launches",
    CELLS,
    dict(H=24_000, W=501),
    dict(H=9, W=5),
)
def _(device, H, W):
    """Words are tensors of int64, of which the kernel is given views as uint64."""
    x = normal(device, H, 2 * W, dtype=FLOAT).view(torch.int64)
    half, y = empty(device, H, W, dtype=torch.int64), empty(device, H, W, dtype=torch.int64)
    words = [z.view(torch.uint64) for z in (x, half, y)]

    def run():
        cells_of_life[(triton.cdiv(W, 256), H)](*words[:2], H, W, BLOCK=256)
        cells_of_life[(triton.cdiv(W, 256), H)](*words[1:], H, W, BLOCK=256)

    def want():
        cells = torch.stack([(x >> bit & 1).to(UINT8) for bit in range(64)], 2).view(H, W * 64)
        for _ in range(2):
            lines = cells + cells.roll(1, 1) + cells.roll(-1, 1)
            around = lines + lines.roll(1, 0) + lines.roll(-1, 0)
            cells = ((around == 3) | ((around == 4) & (cells == 1))).to(UINT8)
        out = torch.zeros_like(y)
        for bit in range(64):
            out |= cells.view(H, W, 64)[:, :, bit].long() << bit
        return out

    return Work(run, y, want)
