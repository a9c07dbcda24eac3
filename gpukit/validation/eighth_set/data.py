"""Data handling and recommenders: rows by name, 2 bits, sorts, histograms, sparse rows, trees, events, dates and boxes."""

from __future__ import annotations

import datetime

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.eighth_set.case import case
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

NAMED, KEYS, ORDER = "steps of rows that are named", "keys to 2 bits", "places in order"
PLANES, SPARSE, EVENTS = "histograms of planes", "sparse rows times a vector", "last events of users"
TREES, DATES, BOXES = "decision trees", "dates of days", "overlaps of boxes"


@triton.jit
def named_steps(
    table_ptr, state_ptr, grad_ptr, id_ptr, new_table_ptr, new_state_ptr, rate, n, R: tl.constexpr, D: tl.constexpr
):
    """Adagrad with one state per row. Each row is named at most once, and what changes is stored in other tables."""
    i, d = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    live = i < n
    row = tl.load(id_ptr + i, mask=live, other=0)
    g = tl.load(grad_ptr + i[:, None] * D + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    state = tl.load(state_ptr + row, mask=live, other=1.0) + tl.sum(g * g, 1) / D
    at = row[:, None] * D + d[None, :]
    x = tl.load(table_ptr + at, mask=live[:, None], other=0.0) - rate / tl.sqrt(state)[:, None] * g
    tl.store(new_table_ptr + at, x, mask=live[:, None])
    tl.store(new_state_ptr + row, state, mask=live)


@case(
    "Adagrad for 400,001 named rows of 128 fp32 among 2 Mi, 4 rows per program of 2 warps",
    NAMED,
    dict(n=400_001, rows=2 * MI, D=128),
    dict(n=13, rows=40, D=32),
)
def _(device, n, rows, D):
    table, state, grad = (
        normal(device, rows, D, dtype=FLOAT),
        normal(device, rows, dtype=FLOAT).abs(),
        normal(device, n, D),
    )
    new_table, new_state = empty(device, rows, D, dtype=FLOAT), empty(device, rows, dtype=FLOAT)
    ids = place(device, torch.randperm(rows, generator=torch.Generator().manual_seed(0), dtype=INT32)[:n].clone())

    def run():
        named_steps[(triton.cdiv(n, 4),)](table, state, grad, ids, new_table, new_state, 0.05, n, R=4, D=D, num_warps=2)

    def want():
        g, at = grad.float(), ids.long()
        s = state[at] + g.square().mean(1)
        moved = table[at] - 0.05 * g / s.sqrt()[:, None]
        return torch.zeros_like(table).index_copy_(0, at, moved), torch.zeros_like(state).index_copy_(0, at, s)

    return Work(run, (new_table, new_state), want)


@triton.jit
def two_bits(x_ptr, code_ptr, low_ptr, exponent_ptr, C, BC: tl.constexpr):
    """32 tokens of a channel share their least number and a step between the four codes, which is a power of two."""
    block, c, i = tl.program_id(1), tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, 32)
    x = tl.load(x_ptr + (block * 32 + i)[:, None] * C + c[None, :]).to(tl.float32)
    low = tl.min(x, 0)
    span = (tl.max(x, 0) - low).to(tl.int32, bitcast=True)
    exponent = tl.maximum((span >> 23) - 1, 1)
    code = ((x - low[None, :]) * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[None, :]).to(tl.int32)
    word = tl.sum(tl.reshape(code << (i % 16 * 2)[:, None], (2, 16, BC)), 1)
    tl.store(code_ptr + (block * 2 + tl.arange(0, 2))[:, None] * C + c[None, :], word)
    tl.store(low_ptr + block * C + c, low.to(low_ptr.dtype.element_ty))
    tl.store(exponent_ptr + block * C + c, exponent.to(tl.uint8))


@case("keys of 160 Ki tokens of 1024 fp16 to 2 bits, 32 tokens of a channel share", KEYS, dict(T=160 * KI), dict(T=64))
def _(device, T):
    x, code = normal(device, T, 1024, dtype=HALF), empty(device, T // 16, 1024, dtype=INT32)
    low, exponent = empty(device, T // 32, 1024, dtype=HALF), empty(device, T // 32, 1024, dtype=UINT8)

    def want():
        groups = x.float().view(T // 32, 32, 1024)
        least = groups.amin(1)
        shared = (((groups.amax(1) - least).view(INT32) >> 23) - 1).clamp(min=1)
        codes = ((groups - least[:, None]) * ((254 - shared) << 23).view(FLOAT)[:, None]).long().view(T // 16, 16, 1024)
        return (codes << (2 * torch.arange(16, device=x.device))[:, None]).sum(1).int(), least, shared

    def run():
        two_bits[(1024 // 128, T // 32)](x, code, low, exponent, 1024, BC=128)

    return Work(run, (code, low, exponent), want)


@triton.jit
def places_in_order(x_ptr, key_ptr, place_ptr, N: tl.constexpr):
    """Sorts a row. A number and its place lie in 64 bits together, so that equal numbers stay in their order."""
    row, i = tl.program_id(0) * N, tl.arange(0, N)
    both = tl.sort(tl.load(x_ptr + row + i).to(tl.int64) << 32 | i.to(tl.int64))
    tl.store(key_ptr + row + i, (both >> 32).to(tl.int32))
    tl.store(place_ptr + row + i, both.to(tl.int32))


@case(
    "6000 rows of 1024 int32 in order with their places, as int64, 8 warps", ORDER, dict(M=6000, N=KI), dict(M=3, N=64)
)
def _(device, M, N):
    x = (normal(device, M, N, dtype=FLOAT) * 1000).int()
    key, at = empty(device, M, N, dtype=INT32), empty(device, M, N, dtype=INT32)

    def want():
        found = x.sort(dim=1, stable=True)
        return found.values, found.indices

    return Work(lambda: places_in_order[(M,)](x, key, at, N=N, num_warps=8), (key, at), want)


@triton.jit
def plane_histograms(x_ptr, y_ptr, n, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """Counts the bytes of EACH blocks of a plane in registers, and adds the 256 counts to those of the plane."""
    plane, first = tl.program_id(1), tl.program_id(0) * EACH * BLOCK
    total = tl.zeros((256,), tl.int32)
    for i in range(EACH):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        total += tl.histogram(tl.load(x_ptr + plane * n + at).to(tl.int32), 256)
    tl.atomic_add(y_ptr + plane * 256 + tl.arange(0, 256), total, sem="relaxed")


@case(
    "histograms of 96 planes of 1080 x 1920 bytes, 25 blocks of 1024 per program",
    PLANES,
    dict(planes=96, programs=81),
    dict(planes=3, programs=2),
)
def _(device, planes, programs):
    """The counts are not cleared by what is measured. Dark bytes are the most frequent ones, as they are in pictures."""
    n = programs * 25 * 1024
    x = (normal(device, planes, n, dtype=HALF).abs() * 60).clamp(max=255).to(UINT8)
    y = empty(device, planes, 256, dtype=INT32)

    def want():
        return torch.stack([torch.bincount(plane, minlength=256) for plane in x])

    return Work(lambda: plane_histograms[(programs, planes)](x, y, n, EACH=25, BLOCK=1024), y, want)


@triton.jit
def sparse_rows(value_ptr, column_ptr, start_ptr, x_ptr, y_ptr, R: tl.constexpr, L: tl.constexpr):
    """R rows of a sparse matrix times a vector: L lanes walk along each row, until the longest of the rows ends."""
    row, lane = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, L)
    start, stop = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    total = tl.zeros((R, L), tl.float32)
    for i in range(0, tl.max(stop - start, 0), L):
        at = start[:, None] + i + lane[None, :]
        live = at < stop[:, None]
        column = tl.load(column_ptr + at, mask=live, other=0)
        total += tl.load(value_ptr + at, mask=live, other=0.0) * tl.load(x_ptr + column, mask=live, other=0.0)
    tl.store(y_ptr + row, tl.sum(total, 1))


@case(
    "512 Ki sparse rows of 1 to 150 of 1 Mi columns times a vector fp32, 32 rows by 4 lanes",
    SPARSE,
    dict(M=512 * KI, N=MI),
    dict(M=64, N=500),
)
def _(device, M, N):
    """Most rows are short: a length is 150 times the fifth power of a number below 1."""
    length = 1 + (149 * (known("meta", 1000, M) / 1000) ** 5).long()
    start, count = place(device, F.pad(length.cumsum(0), (1, 0)).int()), int(length.sum())
    column, value = known(device, N, count), normal(device, count, dtype=FLOAT)
    x, y = normal(device, N, dtype=FLOAT), empty(device, M, dtype=FLOAT)

    def want():
        row = torch.repeat_interleave(torch.arange(M), length).to(x.device)
        return torch.zeros(M, device=x.device).index_add_(0, row, value * x[column])

    return Work(lambda: sparse_rows[(M // 32,)](value, column, start, x, y, R=32, L=4), y, want)


@triton.jit
def last_events(user_ptr, time_ptr, last_ptr, BLOCK: tl.constexpr):
    """The latest time at which each user was seen."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_max(last_ptr + tl.load(user_ptr + at), tl.load(time_ptr + at), sem="relaxed")


@case("last of 20 Mi events int32 of 300,000 users, 256 per program of 2 warps", EVENTS, dict(n=20 * MI), dict(n=1024))
def _(device, n):
    """Some users are seen far more often than others."""
    user = (known("meta", 1 << 20, n).double() / (1 << 20)).pow(3).mul(300_000).int()
    user, time, last = place(device, user), known(device, 1 << 30, n), empty(device, 300_000, dtype=INT32)

    def want():
        return torch.zeros_like(last).scatter_reduce_(0, user.long(), time.to(last.device), "amax")

    return Work(lambda: last_events[(n // 256,)](user, time, last, BLOCK=256, num_warps=2), last, want)


@triton.jit
def decide(x_ptr, feature_ptr, bound_ptr, leaf_ptr, y_ptr, TREES, WIDTH, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up the leaves that each row reaches. A node names a feature and a bound; nodes 2 i + 1 and 2 i + 2 follow i."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    nodes: tl.constexpr = (1 << DEPTH) - 1
    for tree in range(TREES):
        node = tl.zeros((BLOCK,), tl.int32)
        for _ in tl.static_range(DEPTH):
            x = tl.load(x_ptr + row * WIDTH + tl.load(feature_ptr + tree * nodes + node))
            node = 2 * node + 1 + (x > tl.load(bound_ptr + tree * nodes + node)).to(tl.int32)
        total += tl.load(leaf_ptr + tree * (nodes + 1) + node - nodes)
    tl.store(y_ptr + row, total)


@case(
    "48 decision trees of depth 6 for 256 Ki rows of 40 fp32",
    TREES,
    dict(n=256 * KI, trees=48, depth=6),
    dict(n=256, trees=3, depth=3),
)
def _(device, n, trees, depth):
    nodes = (1 << depth) - 1
    x, bound = known(device, 1000, n, 40).float(), known(device, 999, trees, nodes).float() + 0.5
    feature, leaf, y = (
        known(device, 40, trees, nodes),
        normal(device, trees, nodes + 1, dtype=FLOAT),
        empty(device, n, dtype=FLOAT),
    )

    def run():
        decide[(n // 128,)](x, feature, bound, leaf, y, trees, 40, DEPTH=depth, BLOCK=128)

    def want():
        total = torch.zeros(n, device=x.device)
        for tree in range(trees):
            node = torch.zeros(n, dtype=torch.int64, device=x.device)
            for _ in range(depth):
                number = x.gather(1, feature[tree][node].long()[:, None])[:, 0]
                node = 2 * node + 1 + (number > bound[tree][node])
            total += leaf[tree][node - nodes]
        return total

    return Work(run, y, want)


@triton.jit
def dates(day_ptr, year_ptr, month_ptr, date_ptr, BLOCK: tl.constexpr):
    """Year, month and day of the month of days since 1970. The years of this arithmetic begin in March."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    day = tl.load(day_ptr + at) + 719_468
    era = day // 146_097
    rest = day - era * 146_097
    year = (rest - rest // 1460 + rest // 36_524 - rest // 146_096) // 365
    rest -= 365 * year + year // 4 - year // 100
    month = (5 * rest + 2) // 153
    tl.store(date_ptr + at, (rest - (153 * month + 2) // 5 + 1).to(tl.int8))
    month = tl.where(month < 10, month + 3, month - 9)
    tl.store(month_ptr + at, month.to(tl.int8))
    tl.store(year_ptr + at, (year + era * 400 + (month <= 2).to(tl.int32)).to(tl.int16))


@case("dates of 64 Mi days int32, three columns of 16 and 8 bits", DATES, dict(n=64 * MI), dict(n=1024))
def _(device, n):
    day = known(device, 60_000, n) - 20_000
    year, month, date = empty(device, n, dtype=torch.int16), empty(device, n, dtype=INT8), empty(device, n, dtype=INT8)

    def want():
        first = datetime.date(1970, 1, 1).toordinal() - 20_000
        days = (datetime.date.fromordinal(first + i) for i in range(60_000))
        table = torch.tensor([(x.year, x.month, x.day) for x in days], dtype=torch.int16, device=year.device)
        return table[day.to(year.device).long() + 20_000].unbind(1)

    return Work(lambda: dates[(n // 1024,)](day, year, month, date, BLOCK=1024), (year, month, date), want)


@triton.jit
def overlaps(box_ptr, y_ptr, n, WORDS: tl.constexpr, BM: tl.constexpr):
    """Sets a bit where two boxes share more than half of their union. A word holds the bits of 32 boxes."""
    m, i = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, 32)
    left, top = tl.load(box_ptr + m)[:, None], tl.load(box_ptr + n + m)[:, None]
    right, bottom = tl.load(box_ptr + 2 * n + m)[:, None], tl.load(box_ptr + 3 * n + m)[:, None]
    area = (right - left) * (bottom - top)
    for word in range(tl.program_id(1) * WORDS, (tl.program_id(1) + 1) * WORDS):
        other = box_ptr + word * 32 + i
        x0, y0 = tl.load(other)[None, :], tl.load(other + n)[None, :]
        x1, y1 = tl.load(other + 2 * n)[None, :], tl.load(other + 3 * n)[None, :]
        wide = tl.maximum(tl.minimum(right, x1) - tl.maximum(left, x0), 0.0)
        both = wide * tl.maximum(tl.minimum(bottom, y1) - tl.maximum(top, y0), 0.0)
        bits = (3 * both > area + (x1 - x0) * (y1 - y0)).to(tl.int32) << i[None, :]
        tl.store(y_ptr + word * n + m, tl.sum(bits, 1))


@case("which of 16384 boxes overlap by half, as bits, 64 by 16 x 32 per program", BOXES, dict(n=16 * KI), dict(n=1024))
def _(device, n):
    """Corners are whole numbers, so that all areas are exact."""
    corner = known("cpu", 600, 2, n)
    corner = place(device, torch.cat([corner, corner + 50 + corner.roll(7, 1) % 90]).float())
    y = empty(device, n // 32, n, dtype=INT32)

    def want():
        out, shift = torch.empty_like(y), torch.arange(32, device=y.device)[:, None]
        area = (corner[2] - corner[0]) * (corner[3] - corner[1])
        for word in range(n // 32):
            mine = corner[:, 32 * word : 32 * word + 32, None]
            wide = (torch.minimum(mine[2], corner[2]) - torch.maximum(mine[0], corner[0])).clamp(min=0)
            high = (torch.minimum(mine[3], corner[3]) - torch.maximum(mine[1], corner[1])).clamp(min=0)
            found = 3 * wide * high > area + area[32 * word : 32 * word + 32, None]
            out[word] = (found.long() << shift).sum(0).int()
        return out

    return Work(lambda: overlaps[(n // 64, n // 512)](corner, y, n, WORDS=16, BM=64), y, want)
