"""Data: groups by keys, normals of meshes, packed differences, distinct keys, records, trees, filtered lines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.eleventh_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, INT8, INT32, KI, MI, UINT8, Work, empty, known, normal, place

KEYS, NORMALS, DIFFERENCES = "groups by keys", "normals of meshes", "differences packed in blocks"
DISTINCT, RECORDS = "estimates of distinct keys", "records in another order"
TREES, LINES = "searches in wide trees", "lines of pictures without their filter"


@triton.jit
def group_by_keys(key_ptr, x_ptr, time_ptr, sum_ptr, count_ptr, last_ptr, n, BLOCK: tl.constexpr):
    """Of each key, the sum of what was paid, how often, and when last: three atomics per row."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    key = tl.load(key_ptr + at, mask=live, other=0)
    tl.atomic_add(sum_ptr + key, tl.load(x_ptr + at, mask=live, other=0.0), mask=live, sem="relaxed")
    tl.atomic_add(count_ptr + key, 1, mask=live, sem="relaxed")
    tl.atomic_max(last_ptr + key, tl.load(time_ptr + at, mask=live, other=0), mask=live, sem="relaxed")


@case(
    "6,000,001 rows by 500,000 keys, sums fp32, counts and last times int32 by atomics, some keys popular, 256 per program",
    KEYS,
    dict(n=6_000_001, keys=500_000),
    dict(n=900, keys=50),
)
def _(device, n, keys):
    """A quarter of the rows have one of 2000 keys. What is there is not cleared by what is measured."""
    share = known("meta", 1 << 22, n).double() / (1 << 22)
    key, time = place(device, (keys * share**4).int()), known(device, 1 << 30, n)
    x, total = normal(device, n, dtype=FLOAT).exp(), empty(device, keys, dtype=FLOAT)
    count, last = empty(device, keys, dtype=INT32), empty(device, keys, dtype=INT32)

    def run():
        group_by_keys[(triton.cdiv(n, 256),)](key, x, time, total, count, last, n, BLOCK=256)

    def want():
        at = key.to(x.device).long()
        sums = torch.zeros(keys, device=x.device, dtype=torch.float64).index_add_(0, at, x.double())
        latest = torch.zeros_like(last).scatter_reduce_(0, at, time.to(x.device), "amax")
        return sums, at.bincount(minlength=keys), latest

    return Work(run, (total, count, last), want)


@triton.jit
def normals_of_mesh(face_ptr, point_ptr, y_ptr, n, POINTS, BLOCK: tl.constexpr):
    """A face's normal, as long as its area is large, is added to those of its three points by atomics. Coordinates are
    in planes, and the three places of a face side by side."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    a = tl.load(face_ptr + 3 * at, mask=live, other=0)
    b = tl.load(face_ptr + 3 * at + 1, mask=live, other=0)
    c = tl.load(face_ptr + 3 * at + 2, mask=live, other=0)
    y, z = point_ptr + POINTS, point_ptr + 2 * POINTS
    x0, y0, z0 = tl.load(point_ptr + a), tl.load(y + a), tl.load(z + a)
    x1, y1, z1 = tl.load(point_ptr + b) - x0, tl.load(y + b) - y0, tl.load(z + b) - z0
    x2, y2, z2 = tl.load(point_ptr + c) - x0, tl.load(y + c) - y0, tl.load(z + c) - z0
    for corner in tl.static_range(3):
        to = y_ptr + (a if corner == 0 else (b if corner == 1 else c))
        tl.atomic_add(to, y1 * z2 - z1 * y2, mask=live, sem="relaxed")
        tl.atomic_add(to + POINTS, z1 * x2 - x1 * z2, mask=live, sem="relaxed")
        tl.atomic_add(to + 2 * POINTS, x1 * y2 - y1 * x2, mask=live, sem="relaxed")


@case(
    "normals of a mesh of 2000 x 1501 points fp32, 2 faces between each four, in pieces of 64 in any order, 128 per program",
    NORMALS,
    dict(high=2000, wide=1501),
    dict(high=14, wide=17),
)
def _(device, high, wide):
    """The sums are not cleared by what is measured."""
    points = high * wide
    corner = torch.arange(points).view(high, wide)[:-1, :-1].flatten()
    one, two = (
        torch.stack([corner, corner + 1, corner + wide], 1),
        torch.stack([corner + 1, corner + wide + 1, corner + wide], 1),
    )
    faces = torch.stack([one, two], 1).flatten(0, 1)
    faces = faces[: len(faces) // 64 * 64].view(-1, 64, 3)
    order = torch.randperm(len(faces), generator=torch.Generator().manual_seed(0))
    faces = place(device, faces[order].reshape(-1, 3).int())
    point, y = normal(device, 3, points, dtype=FLOAT), empty(device, 3, points, dtype=FLOAT)

    def run():
        normals_of_mesh[(triton.cdiv(len(faces), 128),)](faces, point, y, len(faces), points, BLOCK=128, num_warps=4)

    def want():
        at = faces.to(y.device).long()
        a, b, c = (point.double()[:, at[:, i]] for i in range(3))
        across, out = (
            torch.linalg.cross(b - a, c - a, dim=0),
            torch.zeros(3, points, device=y.device, dtype=torch.float64),
        )
        for i in range(3):
            out.index_add_(1, at[:, i], across)
        return out

    return Work(run, y, want)


@triton.jit
def unpack_differences(word_ptr, start_ptr, bits_ptr, first_ptr, least_ptr, y_ptr, BLOCK: tl.constexpr):
    """A block of numbers that rise or fall: of each, so many bits say by how much more than the block's least difference.
    A number's bits may lie in two words."""
    block, i = tl.program_id(0), tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + block).to(tl.int32)
    place = i * bits
    word = word_ptr + tl.load(start_ptr + block) + place // 32
    both = tl.load(word).to(tl.uint64) | (tl.load(word + 1).to(tl.uint64) << 32)
    more = (both >> (place % 32).to(tl.uint64)).to(tl.uint32) & ((1 << bits) - 1).to(tl.uint32)
    y = tl.load(first_ptr + block) + tl.cumsum(more.to(tl.int32) + tl.load(least_ptr + block), 0)
    tl.store(y_ptr + block * BLOCK + i, y)


@case(
    "60,000 blocks of 1024 differences of 1 to 20 bits unpacked and summed up to int32, 4 warps",
    DIFFERENCES,
    dict(blocks=60_000),
    dict(blocks=9),
)
def _(device, blocks):
    """Words are a tensor of int32, of which the kernel is given a view as uint32."""
    bits = 1 + known("meta", 20, blocks, dtype=torch.int64)
    start = F.pad((bits * 32).cumsum(0), (1, 0))
    words = normal(device, int(start[-1]) + 1, dtype=FLOAT).view(INT32)
    first, least = known(device, 1 << 20, blocks), known(device, 300, blocks) - 200
    y, begin, narrow = empty(device, blocks, KI, dtype=INT32), place(device, start.int()), place(device, bits.to(UINT8))

    def run():
        unpack_differences[(blocks,)](words.view(torch.uint32), begin, narrow, first, least, y, BLOCK=KI, num_warps=4)

    def want():
        i, wide, out = torch.arange(KI, device=y.device), bits.to(y.device)[:, None], []
        for mine, at in zip(wide.split(1 << 13), start[:-1].to(y.device)[:, None].split(1 << 13), strict=True):
            word, low = at + i * mine // 32, i * mine % 32
            one, two = words[word].long() & 0xFFFFFFFF, words[word + 1].long() & 0xFFFFFFFF
            out.append(((one >> low) | (two << 1 << (31 - low))) & (1 << mine) - 1)
        return first.to(y.device)[:, None] + (torch.cat(out) + least.to(y.device)[:, None]).cumsum(1)

    return Work(run, y, want)


@triton.jit
def distinct_keys(x_ptr, y_ptr, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """A key's hash chooses one of 2 ** BITS numbers by its first bits, and raises it to the place of the first bit that is
    set behind them: the largest places tell how many keys differ."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x ^= x >> 16
    rest = (x << BITS) | (1 << (BITS - 1))
    place = tl.full((BLOCK,), 1, tl.int32)
    for step in tl.static_range(5):
        none = (rest >> (32 - (16 >> step))) == 0
        place, rest = tl.where(none, place + (16 >> step), place), tl.where(none, rest << (16 >> step), rest)
    tl.atomic_max(y_ptr + (x >> (32 - BITS)).to(tl.int32), place, mask=at < n, sem="relaxed")


@case(
    "places of first bits of 12 Mi keys int32, largest in each of 16 Ki groups by atomics, 1024 per program, 8 warps",
    DISTINCT,
    dict(n=12 * MI, bits=14),
    dict(n=3000, bits=6),
)
def _(device, n, bits):
    """What is there is not cleared by what is measured."""
    x, y = known(device, 1 << 30, n), empty(device, 1 << bits, dtype=INT32)

    def run():
        distinct_keys[(triton.cdiv(n, 1024),)](x, y, n, BITS=bits, BLOCK=1024, num_warps=8)

    def want():
        full = (1 << 32) - 1
        z = x.to(y.device).long()
        z = (z ^ z >> 16) * 0x85EBCA6B & full
        # The second factor is taken apart, so that no product has more than 63 bits.
        z = z ^ z >> 13
        z = (z * (0xC2B2AE35 >> 16) << 16) + z * (0xC2B2AE35 & 0xFFFF) & full
        z = z ^ z >> 16
        rest = z << bits & full | 1 << bits - 1
        place = 33 - torch.frexp(rest.double())[1].long()  # log2 of a power of two is not always whole on a GPU
        return torch.zeros_like(y).scatter_reduce_(0, z >> 32 - bits, place.int(), "amax")

    return Work(run, y, want)


@triton.jit
def order_records(x_ptr, order_ptr, y_ptr, n, WORDS: tl.constexpr, BW: tl.constexpr, BLOCK: tl.constexpr):
    """Records of WORDS words each, put in the order that is given."""
    at, w = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BW)
    live = (at < n)[:, None] & (w < WORDS)[None, :]
    row = tl.load(order_ptr + at, mask=at < n, other=0)
    x = tl.load(x_ptr + row[:, None] * WORDS + w[None, :], mask=live, other=0)
    tl.store(y_ptr + at[:, None] * WORDS + w[None, :], x, mask=live)


@case(
    "2,000,001 records of 84 bytes in any other order, 8 per program of 1 warp",
    RECORDS,
    dict(n=2_000_001, words=21),
    dict(n=77, words=21),
)
def _(device, n, words):
    order = place(device, torch.randperm(n, generator=torch.Generator().manual_seed(0), dtype=INT32))
    x, y = normal(device, n, words, dtype=FLOAT).view(INT32), empty(device, n, words, dtype=INT32)

    def run():
        order_records[(triton.cdiv(n, 8),)](x, order, y, n, WORDS=words, BW=32, BLOCK=8, num_warps=1)

    return Work(run, y, lambda: x[order.to(y.device).long()])


@triton.jit
def search_tree(x_ptr, tree_ptr, y_ptr, n, LEVELS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """How many of WIDE ** LEVELS keys are not above x. A node of a tree has WIDE keys side by side, the first of which is
    the first of all below it: how many of them are not above x says which node of the next level is read."""
    at, w = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    x, node = tl.load(x_ptr + at, mask=at < n, other=0), tl.zeros((BLOCK,), tl.int32)
    level_ptr, nodes = tree_ptr, 1
    for _ in tl.static_range(LEVELS):
        keys = tl.load(level_ptr + node[:, None] * WIDE + w[None, :], mask=(at < n)[:, None], other=0)
        node = node * WIDE + tl.sum((keys <= x[:, None]).to(tl.int32), 1) - 1
        nodes *= WIDE
        level_ptr += nodes
    tl.store(y_ptr + at, node + 1, mask=at < n)


@case(
    "searches of 8,000,001 int32 in a tree of 5 levels of 16 keys, 32 per program of 2 warps",
    TREES,
    dict(n=8_000_001, levels=5, wide=16),
    dict(n=100, levels=2, wide=16),
)
def _(device, n, levels, wide):
    """Keys rise by 1 to 1000, and none is above the numbers that are searched."""
    keys = known("meta", 1000, wide**levels).add(1).cumsum(0).int()
    keys -= keys[0].item()
    tree = place(device, torch.cat([keys[:: wide ** (levels - i)] for i in range(1, levels + 1)]))
    x, y = known(device, int(keys[-1]), n), empty(device, n, dtype=INT32)

    def run():
        search_tree[(triton.cdiv(n, 32),)](x, tree, y, n, LEVELS=levels, WIDE=wide, BLOCK=32, num_warps=2)

    return Work(run, y, lambda: torch.searchsorted(keys.to(y.device), x.to(y.device), right=True))


@triton.jit
def lines_without_filter(x_ptr, y_ptr, W, BLOCK: tl.constexpr):
    """A line's first byte names a filter; the others are what each of three colors has more than that of the pixel before
    it, modulo 256: a sum along the line of each color."""
    line, color, i = tl.program_id(0), tl.arange(0, 4), tl.arange(0, BLOCK)
    at, live = i[:, None] * 3 + color[None, :], (i < W)[:, None] & (color < 3)[None, :]
    x = tl.load(x_ptr + line.to(tl.int64) * (3 * W + 1) + 1 + at, mask=live, other=0).to(tl.int32)
    tl.store(y_ptr + line.to(tl.int64) * 3 * W + at, tl.cumsum(x, 0).to(tl.uint8), mask=live)


@case(
    "16,200 lines of 1920 pixels of 3 bytes and one byte before them, sums along lines, 8 warps",
    LINES,
    dict(lines=16_200, W=1920),
    dict(lines=7, W=50),
)
def _(device, lines, W):
    x, y = normal(device, lines, 3 * W + 1, dtype=INT8).view(UINT8), empty(device, lines, W, 3, dtype=UINT8)

    def run():
        lines_without_filter[(lines,)](x, y, W, BLOCK=triton.next_power_of_2(W), num_warps=8)

    return Work(run, y, lambda: x[:, 1:].reshape(lines, W, 3).long().cumsum(1) & 255)
