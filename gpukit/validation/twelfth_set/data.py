"""Data: rows of many tables, words of letters, numbers in text, bytes as letters, bars of trades, heaviest edges."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, HALF, INT8, INT32, UINT8, Work, empty, known, normal, place
from gpukit.validation.twelfth_set.case import case

TABLES, LETTERS, TEXT = "rows of many tables side by side", "counts of words of letters", "numbers from text"
CODED, BARS, EDGES = "bytes as letters", "bars of trades", "heaviest edges of components"


@triton.jit
def rows_of_tables(
    key_ptr, size_ptr, start_ptr, dense_ptr, table_ptr, y_ptr, TABLES: tl.constexpr, BT: tl.constexpr, D: tl.constexpr
):
    """One row of each of TABLES tables, which lie behind one another: the remainder of a key says which. The rows stand
    behind D numbers of the sample itself."""
    sample, t, d = tl.program_id(0), tl.arange(0, BT), tl.arange(0, D)
    size = tl.load(size_ptr + t, mask=t < TABLES, other=1)
    key = tl.load(key_ptr + sample * TABLES + t, mask=t < TABLES, other=0)
    row = tl.load(start_ptr + t, mask=t < TABLES, other=0) + key % size
    x = tl.load(table_ptr + row.to(tl.int64)[:, None] * D + d[None, :], mask=(t < TABLES)[:, None], other=0.0)
    y = y_ptr + sample * ((TABLES + 1) * D)
    tl.store(y + ((t + 1) * D)[:, None] + d[None, :], x, mask=(t < TABLES)[:, None])
    tl.store(y + d, tl.load(dense_ptr + sample * D + d))


@case(
    "rows of 26 tables of 4 to 4,000,000 rows of 64 fp16 for 70,001 samples, some popular, one sample per program of 2 warps",
    TABLES,
    dict(B=70_001, D=64, largest=4_000_000),
    dict(B=30, D=16, largest=400),
)
def _(device, B, D, largest):
    """Each table is larger than the one before by the same factor. Low keys are more likely."""
    sizes = torch.tensor([round(4 * (largest / 4) ** (i / 25)) for i in range(26)])
    starts = F.pad(sizes.cumsum(0), (1, 0))
    share = known("meta", 1 << 20, B, 26).double() / (1 << 20)
    key = place(device, (share**3 * (1 << 24)).int())
    size, start = place(device, sizes.int()), place(device, starts[:-1].int())
    dense, table = normal(device, B, D, dtype=HALF), normal(device, int(starts[-1]), D, dtype=HALF)
    y = empty(device, B, 27, D, dtype=HALF)

    def run():
        rows_of_tables[(B,)](key, size, start, dense, table, y, TABLES=26, BT=32, D=D, num_warps=2)

    return Work(run, y, lambda: torch.cat([dense[:, None], table[(start + key % size).to(y.device).long()]], 1))


@triton.jit
def count_words(x_ptr, y_ptr, n, K: tl.constexpr, BLOCK: tl.constexpr):
    """Counts of words of K letters of 2 bits, 16 in an int32, of which one begins at each letter. A word and the one that
    is read on the other strand, backwards with each letter's partner, count as the smaller of both."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = tl.load(x_ptr + at // 16, mask=at < n, other=0).to(tl.uint32).to(tl.uint64)
    two = tl.load(x_ptr + at // 16 + 1, mask=at < n, other=0).to(tl.uint32).to(tl.uint64)
    word = ((one | (two << 32)) >> (at % 16 * 2).to(tl.uint64)).to(tl.uint32) & ((1 << (2 * K)) - 1)
    other = word ^ 0xFFFFFFFF
    other = ((other >> 2) & 0x33333333) | ((other & 0x33333333) << 2)
    other = ((other >> 4) & 0x0F0F0F0F) | ((other & 0x0F0F0F0F) << 4)
    other = ((other >> 8) & 0x00FF00FF) | ((other & 0x00FF00FF) << 8)
    other = ((other >> 16) | (other << 16)) >> (32 - 2 * K)
    tl.atomic_add(y_ptr + tl.minimum(word, other).to(tl.int32), 1, mask=at < n, sem="relaxed")


@case(
    "counts of words of 11 letters along 30,000,000 letters of 2 bits int32, by atomics, 512 per program, 4 warps",
    LETTERS,
    dict(n=30_000_000, K=11),
    dict(n=3000, K=4),
)
def _(device, n, K):
    """All words are as likely. Counts are not cleared by what is measured."""
    x, y = known(device, (1 << 31) - 1, n // 16 + 2), empty(device, 1 << 2 * K, dtype=INT32)

    def run():
        count_words[(triton.cdiv(n, 512),)](x, y, n, K=K, BLOCK=512, num_warps=4)

    def want():
        letters = (x.to(y.device)[:, None] >> torch.arange(0, 32, 2, device=y.device, dtype=INT32) & 3).flatten()
        word, other = (torch.zeros(n, device=y.device, dtype=INT32) for _ in range(2))
        for i in range(K):
            word |= letters[i : i + n] << 2 * i
            other |= 3 - letters[i : i + n] << 2 * (K - 1 - i)
        return torch.minimum(word, other).bincount(minlength=1 << 2 * K)

    return Work(run, y, want)


@triton.jit
def read_numbers(text_ptr, start_ptr, y_ptr, n, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers of 1 to MOST digits, of which a tensor says where they begin: one character lies between two of them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(start_ptr + at, mask=at < n, other=0)
    end = tl.load(start_ptr + at + 1, mask=at < n, other=0) - 1
    y = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(MOST):
        digit = tl.load(text_ptr + start + i, mask=start + i < end, other=48).to(tl.int32) - 48
        y = tl.where(start + i < end, y * 10 + digit, y)
    tl.store(y_ptr + at, y, mask=at < n)


@case(
    "24,000,001 numbers of 1 to 9 digits in text to int32, places known, 256 per program, 4 warps",
    TEXT,
    dict(n=24_000_001),
    dict(n=600),
)
def _(device, n):
    """What lies between numbers is not read, so it may be a digit, too."""
    length = 1 + known("meta", 9, n)
    start = F.pad((length + 1).cumsum(0), (1, 0)).int()
    text = normal(device, int(start[-1]), dtype=INT8).view(UINT8) % 10 + 48
    where, y = place(device, start), empty(device, n, dtype=INT32)

    def run():
        read_numbers[(triton.cdiv(n, 256),)](text, where, y, n, MOST=9, BLOCK=256, num_warps=4)

    def want():
        begin, out = start[:-1].to(y.device), torch.zeros(n, device=y.device, dtype=torch.int64)
        for i in range(9):
            live = i < length.to(y.device)
            digit = text[(begin + i).clamp(max=len(text) - 1)].long() - 48
            out = torch.where(live, out * 10 + digit, out)
        return out

    return Work(run, y, want)


@triton.jit
def bytes_as_letters(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Three bytes become four of 64 letters, which are stored as one int32."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    one = tl.load(x_ptr + 3 * at, mask=live, other=0).to(tl.uint32)
    two = tl.load(x_ptr + 3 * at + 1, mask=live, other=0).to(tl.uint32)
    three = tl.load(x_ptr + 3 * at + 2, mask=live, other=0).to(tl.uint32)
    bits, y = (one << 16) | (two << 8) | three, tl.zeros((BLOCK,), tl.uint32)
    for i in tl.static_range(4):
        six = (bits >> (18 - 6 * i)) & 63
        # A to Z, a to z, 0 to 9, + and /
        letter = tl.where(six < 26, six + 65, tl.where(six < 52, six + 71, tl.where(six < 62, six - 4, 43)))
        y |= tl.where(six == 63, 47, letter) << (8 * i)
    tl.store(y_ptr + at, y.to(tl.int32, bitcast=True), mask=live)


@case(
    "240,000,000 bytes as 64 letters, 3 bytes to an int32, 512 int32 per program, 4 warps",
    CODED,
    dict(n=80_000_000),
    dict(n=700),
)
def _(device, n):
    x, y = normal(device, n, 3, dtype=INT8).view(UINT8), empty(device, n, dtype=INT32)

    def run():
        bytes_as_letters[(triton.cdiv(n, 512),)](x, y, n, BLOCK=512, num_warps=4)

    def want():
        letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
        one, two, three = x.int().unbind(1)
        six = torch.stack([one >> 2, (one & 3) << 4 | two >> 4, (two & 15) << 2 | three >> 6, three & 63], 1)
        return torch.tensor(list(letters), device=y.device, dtype=UINT8)[six].view(INT32)[:, 0]

    return Work(run, y, want)


@triton.jit
def bars_of_trades(price_ptr, size_ptr, start_ptr, y_ptr, volume_ptr, n, BLOCK: tl.constexpr):
    """Of the trades of a bar, one per program: the first, highest, lowest and last price, the mean price by what was traded,
    and how much that was."""
    bar, i = tl.program_id(0), tl.arange(0, BLOCK)
    begin, end = tl.load(start_ptr + bar), tl.load(start_ptr + bar + 1)
    high, low = tl.full((BLOCK,), -1e30, tl.float32), tl.full((BLOCK,), 1e30, tl.float32)
    paid, volume = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for first in range(begin, end, BLOCK):
        live = first + i < end
        price = tl.load(price_ptr + first + i, mask=live, other=0.0)
        size = tl.load(size_ptr + first + i, mask=live, other=0)
        high = tl.maximum(high, tl.where(live, price, -1e30))
        low = tl.minimum(low, tl.where(live, price, 1e30))
        paid, volume = paid + price * size, volume + size
    traded = tl.sum(volume, 0)
    tl.store(y_ptr + bar, tl.load(price_ptr + begin))
    tl.store(y_ptr + n + bar, tl.max(high, 0))
    tl.store(y_ptr + 2 * n + bar, tl.min(low, 0))
    tl.store(y_ptr + 3 * n + bar, tl.load(price_ptr + end - 1))
    tl.store(y_ptr + 4 * n + bar, tl.sum(paid, 0) / traded)
    tl.store(volume_ptr + bar, traded)


@case(
    "80,000 bars of 1 to 3000 trades fp32 and int32, six columns, one bar per program of 1 warp, 128 at a time",
    BARS,
    dict(n=80_000, most=3000),
    dict(n=20, most=400),
)
def _(device, n, most):
    """Most bars are short."""
    length = 1 + ((most - 1) * (known("meta", 1 << 16, n).double() / (1 << 16)) ** 3).long()
    start = F.pad(length.cumsum(0), (1, 0))
    price, size = (
        normal(device, int(start[-1]), dtype=FLOAT) + 100,
        normal(device, int(start[-1]), dtype=INT8).int().abs() + 1,
    )
    y, volume, where = empty(device, 5, n, dtype=FLOAT), empty(device, n, dtype=INT32), place(device, start.int())

    def run():
        bars_of_trades[(n,)](price, size, where, y, volume, n, BLOCK=128, num_warps=1)

    def want():
        at, z = torch.arange(n).repeat_interleave(length).to(y.device), price.double()
        amount, begin = size.to(y.device).double(), start.to(y.device)
        high, low, paid, traded = (torch.zeros(n, device=y.device, dtype=torch.float64) for _ in range(4))
        high.scatter_reduce_(0, at, z, "amax", include_self=False)
        low.scatter_reduce_(0, at, z, "amin", include_self=False)
        paid.index_add_(0, at, z * amount)
        traded.index_add_(0, at, amount)
        return torch.stack([z[begin[:-1]], high, low, z[begin[1:] - 1], paid / traded]), traded

    return Work(run, (y, volume), want)


@triton.jit
def heaviest_edges(end_ptr, weight_ptr, part_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Each component of a graph learns its heaviest edge to another one: a weight's bits and the edge's number, in one int64,
    which both components raise by an atomic."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    one = tl.load(part_ptr + tl.load(end_ptr + at, mask=live, other=0))
    two = tl.load(part_ptr + tl.load(end_ptr + n + at, mask=live, other=0))
    weight = tl.load(weight_ptr + at, mask=live, other=0.0).to(tl.int32, bitcast=True).to(tl.int64)
    edge = (weight << 32) | at
    tl.atomic_max(y_ptr + one, edge, mask=live & (one != two), sem="relaxed")
    tl.atomic_max(y_ptr + two, edge, mask=live & (one != two), sem="relaxed")


@case(
    "heaviest of 5,000,001 edges of 1,000,000 nodes in 200,000 components, some popular, int64 by atomics, 256 per program",
    EDGES,
    dict(n=5_000_001, nodes=1_000_000, parts=200_000),
    dict(n=900, nodes=200, parts=40),
)
def _(device, n, nodes, parts):
    """What is there is not cleared by what is measured."""
    share = known("meta", 1 << 22, nodes).double() / (1 << 22)
    part, end = place(device, (parts * share**3).int()), known(device, nodes, 2, n)
    weight, y = normal(device, n, dtype=FLOAT).abs(), empty(device, parts, dtype=torch.int64)

    def run():
        heaviest_edges[(triton.cdiv(n, 256),)](end, weight, part, y, n, BLOCK=256, num_warps=4)

    def want():
        one, two = part.to(y.device).long()[end.to(y.device).long()]
        edge = weight.view(INT32).long() << 32 | torch.arange(n, device=y.device)
        differ, out = one != two, torch.zeros_like(y)
        for owner in (one, two):
            out.scatter_reduce_(0, owner[differ], edge[differ], "amax")
        return out

    return Work(run, y, want)
