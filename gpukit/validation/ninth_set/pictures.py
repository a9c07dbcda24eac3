"""Pictures: points that queries sample, grids of hashes, splats, rays, and sums of areas."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, HALF, INT32, KI, UINT8, Work, empty, known, normal, place
from gpukit.validation.ninth_set.case import case

POINTS, HASHES, SPLATS = "points that a query samples", "grids of hashes", "splats of tiles"
RAYS, AREAS = "rays through volumes", "sums of areas"


@triton.jit
def sample_points(
    x_ptr, level_ptr, place_ptr, weight_ptr, y_ptr, S, Q, H, L, P: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr
):
    """Each query of a head samples P places in each of L pictures, between four pixels, and adds up what it finds."""
    q, d = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, D)
    head, image = tl.program_id(1), tl.program_id(2)
    live, row = q < Q, (image * Q + q) * H + head
    total = tl.zeros((BQ, D), tl.float32)
    for level in range(L):
        high, wide = tl.load(level_ptr + level * 3), tl.load(level_ptr + level * 3 + 1)
        first = tl.load(level_ptr + level * 3 + 2)
        for point in range(P):
            at = row * (L * P) + level * P + point
            weight = tl.load(weight_ptr + at, mask=live, other=0.0)
            x = tl.load(place_ptr + at * 2, mask=live, other=0.0) * wide - 0.5
            y = tl.load(place_ptr + at * 2 + 1, mask=live, other=0.0) * high - 0.5
            left, top = tl.floor(x), tl.floor(y)
            for corner in tl.static_range(4):
                i, j = left + corner % 2, top + corner // 2
                part = weight * (1 - tl.abs(x - i)) * (1 - tl.abs(y - j))
                inside = live & (i >= 0) & (i < wide) & (j >= 0) & (j < high)
                pixel = image * S + first + j.to(tl.int32) * wide + i.to(tl.int32)
                found = tl.load(x_ptr + (pixel * H + head)[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
                total += part[:, None] * found.to(tl.float32)
    tl.store(y_ptr + row[:, None] * D + d[None, :], total.to(y_ptr.dtype.element_ty), mask=live[:, None])


@case(
    "4 points in each of 4 pictures for 2 x 20,197 queries, 8 heads of 32 fp16, 32 queries per program",
    POINTS,
    dict(B=2, sizes=((100, 152), (50, 76), (25, 38), (13, 19)), H=8, D=32),
    dict(B=1, sizes=((6, 8), (3, 4)), H=2, D=16),
)
def _(device, B, sizes, H, D):
    """The queries are the pixels of all pictures, and each samples places up to a tenth of a picture away."""
    counts, L = [h * w for h, w in sizes], len(sizes)
    S, first = sum(counts), [sum(counts[:i]) for i in range(L)]
    level = torch.tensor([(h, w, at) for (h, w), at in zip(sizes, first, strict=True)], dtype=INT32)
    middle = torch.cat(
        [torch.cartesian_prod((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w).flip(1) for h, w in sizes]
    )
    away = (known("meta", 1 << 16, B, S, H, L, 4, 2).float() / (1 << 16) - 0.5) / 5
    places, level = place(device, middle[:, None, None, None] + away), place(device, level)
    x, y = normal(device, B, S, H, D, dtype=HALF), empty(device, B, S, H, D, dtype=HALF)
    weight = normal(device, B, S, H, L * 4, dtype=FLOAT).softmax(3)

    def run():
        sample_points[(triton.cdiv(S, 32), H, B)](x, level, places, weight, y, S, S, H, L, P=4, D=D, BQ=32, num_warps=4)

    def want():
        total, spread = 0, weight.view(B, S, H, L, 4)
        for i, (h, w) in enumerate(sizes):
            picture = x[:, first[i] : first[i] + h * w].float().permute(0, 2, 3, 1).reshape(B * H, D, h, w)
            at = 2 * places[:, :, :, i].transpose(1, 2).reshape(B * H, S, 4, 2) - 1
            found = F.grid_sample(picture, at, align_corners=False).view(B, H, D, S, 4)
            total = total + torch.einsum("bhdsp,bshp->bshd", found, spread[:, :, :, i])
        return total

    return Work(run, y, want)


@triton.jit
def hash_grids(p_ptr, table_ptr, side_ptr, y_ptr, n, L: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Two features of a point, between the eight corners of its cell in one of L grids. A corner's place in the table is its
    number where the table has a place for each corner, and else a hash."""
    level, i, f = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 2)
    live, side = i < n, tl.load(side_ptr + level)
    x = tl.load(p_ptr + i * 3, mask=live, other=0.0) * (side - 1)
    y = tl.load(p_ptr + i * 3 + 1, mask=live, other=0.0) * (side - 1)
    z = tl.load(p_ptr + i * 3 + 2, mask=live, other=0.0) * (side - 1)
    total = tl.zeros((BLOCK, 2), tl.float32)
    for corner in tl.static_range(8):
        a, b, c = tl.floor(x) + corner % 2, tl.floor(y) + corner // 2 % 2, tl.floor(z) + corner // 4
        part = (1 - tl.abs(x - a)) * (1 - tl.abs(y - b)) * (1 - tl.abs(z - c))
        a, b, c = a.to(tl.int32), b.to(tl.int32), c.to(tl.int32)
        slot = a ^ (b * 19_349_663) ^ (c * 83_492_791)
        if side * side * side <= SIZE:
            slot = (c * side + b) * side + a
        at = level * SIZE + (slot & (SIZE - 1))
        found = tl.load(table_ptr + at[:, None] * 2 + f[None, :], mask=live[:, None], other=0.0)
        total += part[:, None] * found.to(tl.float32)
    at = (i * L + level)[:, None] * 2 + f[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=live[:, None])


@case(
    "2 features of 300,000 points fp32 in each of 16 grids of 512 Ki places fp16, 16 to 1023 corners a side",
    HASHES,
    dict(n=300_000, sides=(16, 21, 28, 37, 49, 64, 84, 111, 147, 194, 256, 338, 446, 589, 777, 1023), size=512 * KI),
    dict(n=300, sides=(4, 9, 40), size=256),
)
def _(device, n, sides, size):
    L = len(sides)
    point, side = known(device, 1 << 20, n, 3).float() / (1 << 20), place(device, torch.tensor(sides, dtype=INT32))
    table, y = normal(device, L, size, 2, dtype=HALF), empty(device, n, L, 2, dtype=HALF)

    def run():
        hash_grids[(triton.cdiv(n, 256), L)](point, table, side, y, n, L=L, SIZE=size, BLOCK=256, num_warps=4)

    def want():
        out = torch.zeros(n, L, 2, device=table.device)
        for level, width in enumerate(sides):
            at = point * (width - 1)
            for corner in range(8):
                cell = at.floor() + torch.tensor([corner % 2, corner // 2 % 2, corner // 4], device=at.device)
                a, b, c = cell.long().unbind(1)
                slot = (c * width + b) * width + a if width**3 <= size else a ^ (b * 19_349_663) ^ (c * 83_492_791)
                out[:, level] += (1 - (at - cell).abs()).prod(1)[:, None] * table[level, slot & (size - 1)].float()
        return out

    return Work(run, y, want)


@triton.jit
def splat_tiles(list_ptr, start_ptr, splat_ptr, y_ptr, n, H, W, SIDE: tl.constexpr):
    """The colors of SIDE x SIDE pixels: splats, the nearest first, cover each other. A list says which ones a tile has."""
    tile, i = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.arange(0, SIDE * SIDE)
    row, col = tl.program_id(1) * SIDE + i // SIDE, tl.program_id(0) * SIDE + i % SIDE
    open_ = tl.full((SIDE * SIDE,), 1.0, tl.float32)
    red, green, blue = open_ * 0, open_ * 0, open_ * 0
    for at in range(tl.load(start_ptr + tile), tl.load(start_ptr + tile + 1)):
        splat = splat_ptr + tl.load(list_ptr + at)
        x, y = col - tl.load(splat), row - tl.load(splat + n)
        power = tl.load(splat + 2 * n) * x * x + tl.load(splat + 3 * n) * y * y + tl.load(splat + 4 * n) * x * y
        cover = tl.minimum(tl.load(splat + 5 * n) * tl.exp(-power), 0.99)
        cover = tl.where(cover < 1 / 255, 0.0, cover)
        red += open_ * cover * tl.load(splat + 6 * n)
        green += open_ * cover * tl.load(splat + 7 * n)
        blue += open_ * cover * tl.load(splat + 8 * n)
        open_ *= 1 - cover
    mask = (row < H) & (col < W)
    tl.store(y_ptr + row * W + col, red, mask=mask)
    tl.store(y_ptr + (H + row) * W + col, green, mask=mask)
    tl.store(y_ptr + (2 * H + row) * W + col, blue, mask=mask)


@case(
    "splats on 3600 tiles of 16 x 16 pixels, 5 to 800 of 400,000 each, 9 planes fp32, 2 warps",
    SPLATS,
    dict(n=400_000, H=720, W=1280, most=800),
    dict(n=50, H=30, W=35, most=40),
)
def _(device, n, H, W, most):
    """Most tiles have few splats. A splat's form is such that its power is never negative."""
    down, across = triton.cdiv(H, 16), triton.cdiv(W, 16)
    length = 5 + ((most - 5) * (known("meta", 1000, down * across) / 1000) ** 3).long()
    start, count = place(device, F.pad(length.cumsum(0), (1, 0)).int()), int(length.sum())
    names, y = known(device, n, count), empty(device, 3, H, W, dtype=FLOAT)
    share = normal(device, 9, n, dtype=FLOAT).sigmoid()
    wide, high = 1e-4 + share[2] / 100, 1e-4 + share[3] / 100
    mixed = (share[4] - 0.5) * (wide * high).sqrt()
    splats = torch.stack([share[0] * W, share[1] * H, wide, high, mixed, *share[5:]])

    def run():
        splat_tiles[(across, down)](names, start, splats, y, n, H, W, SIDE=16, num_warps=2)

    def want():
        out, i, begin = torch.zeros(3, down * 16, across * 16, device=y.device), torch.arange(16, device=y.device), 0
        for tile, number in enumerate(length.tolist()):
            top, left = tile // across * 16, tile % across * 16
            x0, y0, a, b, c, solid, *color = splats[:, names[begin : begin + number].to(y.device)][:, :, None, None]
            dx, dy = left + i - x0, (top + i)[:, None] - y0
            cover = (solid * (-(a * dx * dx + b * dy * dy + c * dx * dy)).exp()).clamp(max=0.99)
            cover = torch.where(cover < 1 / 255, 0.0, cover)
            left_open = F.pad((1 - cover).cumprod(0), (0, 0, 0, 0, 1, 0), value=1.0)[:-1] * cover
            out[:, top : top + 16, left : left + 16] = torch.stack([(left_open * part).sum(0) for part in color])
            begin += number
        return out[:, :H, :W]

    return Work(run, y, want)


@triton.jit
def times(a, b):
    return a * b


@triton.jit
def along_rays(thick_ptr, step_ptr, color_ptr, weight_ptr, y_ptr, S: tl.constexpr, R: tl.constexpr):
    """What is left of the light after each of S steps along a ray, by a scan; a ray's color is the weighted sum of theirs."""
    ray, s = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, S)
    at = ray[:, None] * S + s[None, :]
    passed = tl.exp(-tl.load(thick_ptr + at).to(tl.float32) * tl.load(step_ptr + at))
    passed = tl.maximum(passed, 1e-3)
    weight = tl.associative_scan(passed, 1, times) * (1 - passed) / passed
    tl.store(weight_ptr + at, weight.to(weight_ptr.dtype.element_ty))
    for channel in tl.static_range(3):
        color = tl.load(color_ptr + at * 3 + channel).to(tl.float32)
        tl.store(y_ptr + ray * 3 + channel, tl.sum(weight * color, 1))


@case(
    "colors of 300,000 rays of 128 steps fp16, by scans of 8 rays per program",
    RAYS,
    dict(rays=300_000, S=128),
    dict(rays=16, S=32),
)
def _(device, rays, S):
    thick, step = normal(device, rays, S, dtype=HALF).abs(), normal(device, rays, S, dtype=FLOAT).sigmoid() / 8
    color, weight = normal(device, rays, S, 3, dtype=HALF).sigmoid(), empty(device, rays, S, dtype=HALF)
    y = empty(device, rays, 3, dtype=FLOAT)

    def want():
        passed = (-thick.float() * step).exp().clamp(min=1e-3)
        share = F.pad(passed.cumprod(1), (1, 0), value=1.0)[:, :-1] * (1 - passed)
        return share, (share[..., None] * color.float()).sum(1)

    return Work(lambda: along_rays[(rays // 8,)](thick, step, color, weight, y, S=S, R=8), (weight, y), want)


@triton.jit
def sums_across(x_ptr, y_ptr, W, R: tl.constexpr, BLOCK: tl.constexpr):
    """Running sums along R whole rows of bytes."""
    row, col = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, BLOCK)
    at, mask = row[:, None] * W + col[None, :], (col < W)[None, :]
    tl.store(y_ptr + at, tl.cumsum(tl.load(x_ptr + at, mask=mask, other=0).to(tl.int32), 1), mask=mask)


@triton.jit
def sums_down(x_ptr, y_ptr, H, W, BH: tl.constexpr, BW: tl.constexpr):
    """Running sums down BW columns, BH rows at a time."""
    i, col, before = tl.arange(0, BH), tl.program_id(0) * BW + tl.arange(0, BW), tl.zeros((BW,), tl.int32)
    for first in range(0, H, BH):
        row = first + i
        at, mask = (tl.program_id(1) * H + row)[:, None] * W + col[None, :], (row < H)[:, None] & (col < W)[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0)
        tl.store(y_ptr + at, tl.cumsum(x, 0) + before[None, :], mask=mask)
        before += tl.sum(x, 0)


@case(
    "sums of areas of 24 pictures of 1080 x 1920 bytes, rows first and then columns, two launches",
    AREAS,
    dict(B=24, H=1080, W=1920),
    dict(B=2, H=38, W=50),
)
def _(device, B, H, W):
    x = normal(device, B, H, W, dtype=torch.int8).view(UINT8)
    half, y = empty(device, B, H, W, dtype=INT32), empty(device, B, H, W, dtype=INT32)

    def run():
        sums_across[(B * H // 2,)](x, half, W, R=2, BLOCK=triton.next_power_of_2(W))
        sums_down[(triton.cdiv(W, 64), B)](half, y, H, W, BH=16, BW=64)

    return Work(run, y, lambda: x.long().cumsum(1).cumsum(2))
