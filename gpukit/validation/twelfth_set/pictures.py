"""Pictures and points: first layers, windows with places of their own, surfaces of voxels, nearest seeds, lines, windows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, HALF, INT8, INT32, UINT8, Work, empty, known, normal, place
from gpukit.validation.twelfth_set.case import case

FIRST_LAYERS, DEFORMED = "first layers of pictures", "convolutions with places of their own"
VOXELS, SEEDS = "convolutions on surfaces of voxels", "nearest seeds by jumps"
LINES, SHIFTED = "costs along lines", "norms and shifted windows"


@triton.jit
def first_layer(
    x_ptr, w_ptr, scale_ptr, shift_ptr, y_ptr, PIXELS, H, W, HIGH, WIDE,
    N: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """7 x 7 windows around every second pixel of three planes, times 147 x N weights; scales, shifts and ReLU. The result
    has channels last."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N)
    picture, row, column = m // (HIGH * WIDE), m // WIDE % HIGH * 2 - 3, m % WIDE * 2 - 3
    total = tl.zeros((BM, N), tl.float32)
    for first in range(0, 147, BK):
        k = first + tl.arange(0, BK)
        r, c = row[:, None] + (k % 49 // 7)[None, :], column[:, None] + (k % 7)[None, :]
        live = (m < PIXELS)[:, None] & (k < 147)[None, :] & (r >= 0) & (r < H) & (c >= 0) & (c < W)
        plane = picture[:, None] * 3 + (k // 49)[None, :]
        x = tl.load(x_ptr + (plane * H + r) * W + c, mask=live, other=0.0)
        w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=(k < 147)[:, None], other=0.0)
        total = tl.dot(x, w, total)
    y = tl.maximum(total * tl.load(scale_ptr + n)[None, :] + tl.load(shift_ptr + n)[None, :], 0.0)
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty), mask=(m < PIXELS)[:, None])


@case(
    "7 x 7 windows of every second pixel of 64 pictures of 3 x 225 x 223 to 64 channels fp16, 128x64x32, 4 warps, 3 stages",
    FIRST_LAYERS,
    dict(B=64, H=225, W=223, N=64),
    dict(B=2, H=21, W=19, N=16),
)
def _(device, B, H, W, N):
    high, wide = (H + 1) // 2, (W + 1) // 2
    x, w, y = (normal(device, *s, dtype=HALF) for s in ((B, 3, H, W), (147, N), (B, high, wide, N)))
    scale, shift, pixels = normal(device, N, dtype=FLOAT), normal(device, N, dtype=FLOAT), B * high * wide

    def run():
        first_layer[(triton.cdiv(pixels, 128),)](
            x, w, scale, shift, y, pixels, H, W, high, wide, N=N, BM=128, BK=32, num_warps=4, num_stages=3
        )

    def want():
        out = F.conv2d(x.float(), w.T.reshape(N, 3, 7, 7).float(), stride=2, padding=3).permute(0, 2, 3, 1)
        return (out * scale + shift).relu()

    return Work(run, y, want)


@triton.jit
def deformed_windows(
    x_ptr, offset_ptr, strength_ptr, w_ptr, y_ptr, PIXELS, H, W,
    C: tl.constexpr, N: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """A 3 x 3 convolution whose nine taps lie at places of their own for each pixel, between four pixels each, and have
    strengths of their own. Channels are last."""
    m, c, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, C), tl.arange(0, N)
    live = m < PIXELS
    picture, row, column = m // (H * W), m // W % H, m % W
    total = tl.zeros((BM, N), tl.float32)
    for tap in range(9):
        r = row + tap // 3 - 1 + tl.load(offset_ptr + (m * 9 + tap) * 2, mask=live, other=0.0)
        s = column + tap % 3 - 1 + tl.load(offset_ptr + (m * 9 + tap) * 2 + 1, mask=live, other=0.0)
        top, left = tl.floor(r), tl.floor(s)
        strength = tl.load(strength_ptr + m * 9 + tap, mask=live, other=0.0).to(tl.float32)
        sample = tl.zeros((BM, C), tl.float32)
        for corner in tl.static_range(4):
            at_r, at_s = top + corner // 2, left + corner % 2
            weight = (1 - tl.abs(r - at_r)) * (1 - tl.abs(s - at_s)) * strength
            there = live & (at_r >= 0) & (at_r < H) & (at_s >= 0) & (at_s < W)
            at = ((picture * H + at_r.to(tl.int32)) * W + at_s.to(tl.int32))[:, None] * C + c[None, :]
            sample += weight[:, None] * tl.load(x_ptr + at, mask=there[:, None], other=0.0).to(tl.float32)
        w = tl.load(w_ptr + (tap * C + c)[:, None] * N + n[None, :])
        total = tl.dot(sample.to(w.dtype), w, total)
    tl.store(y_ptr + m[:, None] * N + n[None, :], total.to(y_ptr.dtype.element_ty), mask=live[:, None])


@case(
    "3 x 3 taps at places up to 3 pixels away, 24 pictures of 60 x 61 of 64 to 128 channels fp16, 64x128x64, 4 warps, 1 stage",
    DEFORMED,
    dict(B=24, H=60, W=61, C=64, N=128),
    dict(B=2, H=7, W=9, C=16, N=32),
)
def _(device, B, H, W, C, N):
    pixels = B * H * W
    offset = place(device, known("meta", 1 << 16, pixels, 9, 2).float() * (6 / (1 << 16)) - 3)
    strength = normal(device, pixels, 9, dtype=HALF).sigmoid()
    x, w, y = (normal(device, *s, dtype=HALF) for s in ((B, H, W, C), (9, C, N), (pixels, N)))

    def run():
        deformed_windows[(triton.cdiv(pixels, 64),)](
            x, offset, strength, w, y, pixels, H, W, C=C, N=N, BM=64, num_warps=4, num_stages=1
        )

    def want():
        where = offset.to(y.device).view(B, H, W, 9, 2)
        row, column = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
        out = torch.zeros(B, N, H, W, device=y.device)
        planes = x.float().permute(0, 3, 1, 2)
        for tap in range(9):
            r = where[:, :, :, tap, 0] + (row + tap // 3 - 1).to(y.device)
            s = where[:, :, :, tap, 1] + (column + tap % 3 - 1).to(y.device)
            at = torch.stack([2 * s / (W - 1) - 1, 2 * r / (H - 1) - 1], 3)
            sample = F.grid_sample(planes, at, padding_mode="zeros", align_corners=True)
            sample *= strength.view(B, 1, H, W, 9)[..., tap].float()
            out += torch.einsum("bchw,cn->bnhw", sample, w[tap].float())
        return out.permute(0, 2, 3, 1).reshape(pixels, N)

    return Work(run, y, want)


@triton.jit
def voxel_windows(x_ptr, neighbor_ptr, w_ptr, bias_ptr, y_ptr, n, C: tl.constexpr, N: tl.constexpr, BM: tl.constexpr):
    """A 3 x 3 x 3 convolution of the voxels that are there: a table says for each of 27 taps in which row a voxel's neighbor
    is, or -1. Bias and ReLU."""
    m, c, o = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, C), tl.arange(0, N)
    total = tl.zeros((BM, N), tl.float32)
    for tap in range(27):
        row = tl.load(neighbor_ptr + tap * n + m, mask=m < n, other=-1)
        x = tl.load(x_ptr + row[:, None] * C + c[None, :], mask=(row >= 0)[:, None], other=0.0)
        total = tl.dot(x, tl.load(w_ptr + (tap * C + c)[:, None] * N + o[None, :]), total)
    y = tl.maximum(total + tl.load(bias_ptr + o)[None, :], 0.0)
    tl.store(y_ptr + m[:, None] * N + o[None, :], y.to(y_ptr.dtype.element_ty), mask=(m < n)[:, None])


@case(
    "3 x 3 x 3 taps on 202,800 voxels of a surface, 64 to 64 channels fp16, a table of neighbors, 128x64x64, 4 warps, 3 stages",
    VOXELS,
    dict(side=260, C=64),
    dict(side=12, C=16),
)
def _(device, side, C):
    """Three layers of voxels lie along a surface of hills."""
    i, j = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    height = (side / 6 * (2 + (i / 30).sin() + (j / 40).cos())).long()
    places = torch.stack([i, j, height], 2)[:, :, None] + torch.tensor([[0, 0, k] for k in range(3)])
    places, n = places.view(-1, 3) + 1, 3 * side * side
    row = torch.full((side + 2, side + 2, int(places[:, 2].max()) + 2), -1, dtype=INT32)
    row[places.unbind(1)] = torch.arange(n, dtype=INT32)
    taps = [torch.tensor([a, b, c]) - 1 for a in range(3) for b in range(3) for c in range(3)]
    neighbor = place(device, torch.stack([row[(places + tap).unbind(1)] for tap in taps]))
    x, w, y = (normal(device, *s, dtype=HALF) for s in ((n, C), (27, C, C), (n, C)))
    bias = normal(device, C, dtype=FLOAT)

    def run():
        voxel_windows[(triton.cdiv(n, 128),)](x, neighbor, w, bias, y, n, C=C, N=C, BM=128, num_warps=4, num_stages=3)

    def want():
        out = bias.expand(n, C).clone()
        for at, taps in zip(neighbor.to(y.device).long(), w.float(), strict=True):
            out += (x[at.clamp(min=0)].float() * (at >= 0)[:, None]) @ taps
        return out.relu()

    return Work(run, y, want)


@triton.jit
def jump(x_ptr, y_ptr, H, W, step, BLOCK: tl.constexpr):
    """Each pixel looks at the seeds that nine pixels `step` apart know of, and keeps the nearest. A seed is its row times
    65,536 and its column, and -1 where none is known."""
    row, column = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    best, nearest = tl.full((BLOCK,), -1, tl.int32), tl.full((BLOCK,), 2147483647, tl.int32)
    for i in tl.static_range(9):
        r, c = row + (i // 3 - 1) * step, column + (i % 3 - 1) * step
        there = (r >= 0) & (r < H) & (c >= 0) & (c < W)
        seed = tl.load(x_ptr + r * W + c, mask=there, other=-1)
        down, across = (seed >> 16) - row, (seed & 65535) - column
        away = tl.where(seed < 0, 2147483647, down * down + across * across)
        best, nearest = tl.where(away < nearest, seed, best), tl.minimum(away, nearest)
    tl.store(y_ptr + row * W + column, best, mask=column < W)


@case(
    "nearest of 3000 seeds for 1800 x 2101 pixels int32, jumps of 1024 to 1, 11 launches, 256 per program, 4 warps",
    SEEDS,
    dict(H=1800, W=2101, seeds=3000, first=1024),
    dict(H=23, W=37, seeds=9, first=16),
)
def _(device, H, W, seeds, first):
    start = torch.full((H * W,), -1, dtype=INT32)
    at = known("meta", H * W, seeds).long()
    start[at] = (at // W << 16 | at % W).int()
    start, one, two = (
        place(device, start.view(H, W)),
        empty(device, H, W, dtype=INT32),
        empty(device, H, W, dtype=INT32),
    )
    steps = [first >> i for i in range(first.bit_length())]
    targets = [(one, two)[i % 2] for i in range(len(steps))]

    def run():
        source = start
        for step, target in zip(steps, targets, strict=True):
            jump[(triton.cdiv(W, 256), H)](source, target, H, W, step, BLOCK=256, num_warps=4)
            source = target

    def want():
        row, column = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
        row, column, now = row.to(one.device), column.to(one.device), start.to(one.device).long()
        for step in steps:
            wide, best = F.pad(now, (step,) * 4, value=-1), torch.full_like(now, -1)
            nearest = torch.full_like(now, 2147483647)
            for i in range(9):
                seed = wide[i // 3 * step :, i % 3 * step :][:H, :W]
                away = (((seed >> 16) - row) ** 2 + ((seed & 65535) - column) ** 2).masked_fill(seed < 0, 2147483647)
                best, nearest = torch.where(away < nearest, seed, best), torch.minimum(away, nearest)
            now = best
        return now

    return Work(run, targets[-1], want)


@triton.jit
def costs_along_line(x_ptr, y_ptr, W, small, large, D: tl.constexpr):
    """The least cost of D distances along a line of pixels: what a pixel costs itself, and the least of what its neighbor
    costs at the same distance, at the next one and at any, with a penalty for each change."""
    line, d = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    before, after = tl.maximum(d - 1, 0), tl.minimum(d + 1, D - 1)
    x_ptr, y_ptr = x_ptr + line * W * D + d, y_ptr + line * W * D + d
    cost = tl.zeros((D,), tl.int32)
    for column in range(W):
        least = tl.min(cost, 0)
        near = tl.minimum(tl.gather(cost, before, 0), tl.gather(cost, after, 0)) + small
        way = tl.minimum(tl.minimum(cost, near), least + large)
        cost = tl.load(x_ptr + column * D).to(tl.int32) + way - least
        tl.store(y_ptr + column * D, cost.to(tl.int16))


@case(
    "least costs of 128 distances along 2000 lines of 600 pixels bytes to int16, one line per program of 1 warp",
    LINES,
    dict(lines=2000, W=600),
    dict(lines=3, W=20),
)
def _(device, lines, W):
    x = normal(device, lines, W, 128, dtype=INT8).view(UINT8)
    y = empty(device, lines, W, 128, dtype=torch.int16)

    def run():
        costs_along_line[(lines,)](x, y, W, 7, 86, D=128, num_warps=1)

    def want():
        out, cost = [], torch.zeros(lines, 128, device=y.device, dtype=torch.int64)
        for column in x.long().unbind(1):
            least, wide = cost.amin(1, keepdim=True), F.pad(cost, (1, 1), value=1 << 20)
            near = torch.minimum(wide[:, 2:], wide[:, :-2]) + 7
            cost = column + torch.minimum(torch.minimum(cost, near), least + 86) - least
            out.append(cost)
        return torch.stack(out, 1)

    return Work(run, y, want)


@triton.jit
def shifted_windows(
    x_ptr, scale_ptr, shift_ptr, y_ptr, n, H, W,
    SIDE: tl.constexpr, MOVE: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Layer norm of pixels, which are then put into windows of SIDE x SIDE, as if the picture had been rolled by MOVE up and
    to the left."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BC)
    pixel, window = m % (SIDE * SIDE), m // (SIDE * SIDE)
    picture, down, across = (
        window // (H // SIDE * (W // SIDE)),
        window // (W // SIDE) % (H // SIDE),
        window % (W // SIDE),
    )
    row, column = (down * SIDE + pixel // SIDE + MOVE) % H, (across * SIDE + pixel % SIDE + MOVE) % W
    live = (m < n)[:, None] & (c < C)[None, :]
    x = tl.load(x_ptr + ((picture * H + row) * W + column)[:, None] * C + c[None, :], mask=live, other=0.0).to(
        tl.float32
    )
    away = tl.where((c < C)[None, :], x - (tl.sum(x, 1) / C)[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(away * away, 1) / C + 1e-5)
    scale, shift = tl.load(scale_ptr + c, mask=c < C, other=0.0), tl.load(shift_ptr + c, mask=c < C, other=0.0)
    y = away * factor[:, None] * scale[None, :] + shift[None, :]
    tl.store(y_ptr + m[:, None] * C + c[None, :], y.to(y_ptr.dtype.element_ty), mask=live)


@case(
    "layer norm of 300 pictures of 56 x 56 pixels of 96 fp16 into windows of 7 x 7, rolled by 3, 16 pixels per program of 2 warps",
    SHIFTED,
    dict(B=300, H=56, W=56, C=96),
    dict(B=2, H=14, W=21, C=24),
)
def _(device, B, H, W, C):
    x, y, n = normal(device, B, H, W, C, dtype=HALF), empty(device, B * H * W, C, dtype=HALF), B * H * W
    scale, shift = normal(device, C, dtype=FLOAT), normal(device, C, dtype=FLOAT)

    def run():
        shifted_windows[(triton.cdiv(n, 16),)](
            x, scale, shift, y, n, H, W, SIDE=7, MOVE=3, C=C, BC=triton.next_power_of_2(C), BM=16, num_warps=2
        )

    def want():
        out = F.layer_norm(x.float(), (C,), scale, shift).roll((-3, -3), (1, 2)).view(B, H // 7, 7, W // 7, 7, C)
        return out.transpose(2, 3).reshape(n, C)

    return Work(run, y, want)
