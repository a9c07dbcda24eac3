"""Pictures: convolutions in groups and of int8, gradients of taps, soft filters, perspectives, two views, pyramids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.eleventh_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, INT8, UINT8, Work, empty, known, normal, place

GROUPS, TAPS, EIGHT = "convolutions in groups", "gradients of convolutions' weights", "convolutions of int8"
EDGES, PERSPECTIVES = "filters that keep edges", "perspectives by cubic weights"
VIEWS, PYRAMIDS = "differences of two views", "pyramids of pictures"


@triton.jit
def convolve_groups(x_ptr, w_ptr, shift_ptr, y_ptr, PIXELS, H, W, C: tl.constexpr, G: tl.constexpr, BM: tl.constexpr):
    """3 x 3 pixels, channels last; G channels see only each other. Shifts and ReLU follow."""
    m, g, first = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, G), tl.program_id(1) * G
    y, x = m // W % H, m % W
    total = tl.zeros((BM, G), tl.float32)
    for tap in range(9):
        row, col = tap // 3 - 1, tap % 3 - 1
        inside = (m < PIXELS) & (y + row >= 0) & (y + row < H) & (x + col >= 0) & (x + col < W)
        pixel = tl.load(
            x_ptr + (m + row * W + col)[:, None] * C + (first + g)[None, :], mask=inside[:, None], other=0.0
        )
        w = tl.load(w_ptr + ((tl.program_id(1) * 9 + tap) * G + g)[:, None] * G + g[None, :])
        total = tl.dot(pixel, w, total)
    total = tl.maximum(total + tl.load(shift_ptr + first + g)[None, :], 0.0)
    at = m[:, None] * C + (first + g)[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=(m < PIXELS)[:, None])


@case(
    "3 x 3 convolution in 12 groups of 32, 60 pictures of 57 x 55 fp16, shifts and ReLU, 128x32x32, 4 warps, 3 stages",
    GROUPS,
    dict(B=60, H=57, W=55, groups=12),
    dict(B=2, H=9, W=11, groups=3),
)
def _(device, B, H, W, groups):
    C = groups * 32
    x, w = normal(device, B, H, W, C, dtype=HALF), normal(device, groups, 9, 32, 32, dtype=HALF) / 16
    shift, y = normal(device, C, dtype=FLOAT), empty(device, B, H, W, C, dtype=HALF)

    def run():
        convolve_groups[(triton.cdiv(B * H * W, 128), groups)](
            x, w, shift, y, B * H * W, H, W, C=C, G=32, BM=128, num_warps=4, num_stages=3
        )

    def want():
        weights = w.float().permute(0, 3, 2, 1).reshape(C, 32, 3, 3)
        return (
            F.conv2d(x.float().permute(0, 3, 1, 2), weights, shift, padding=1, groups=groups).relu().permute(0, 2, 3, 1)
        )

    return Work(run, y, want)


@triton.jit
def tap_gradients(x_ptr, g_ptr, y_ptr, PIXELS, EACH, H, W, C: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    """The gradient of one tap's C x N weights: pixels times the gradients of their neighbors, summed over EACH pixels
    and added to the other programs' sums by atomics."""
    tap, begin, c, n = tl.program_id(0), tl.program_id(1) * EACH, tl.arange(0, C), tl.arange(0, N)
    row, col = tap // 3 - 1, tap % 3 - 1
    total = tl.zeros((C, N), tl.float32)
    for first in range(begin, tl.minimum(begin + EACH, PIXELS), BK):
        k = first + tl.arange(0, BK)
        y, x = k // W % H + row, k % W + col
        inside = (k < PIXELS) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        pixel = tl.load(x_ptr + (k + row * W + col)[:, None] * C + c[None, :], mask=inside[:, None], other=0.0)
        g = tl.load(g_ptr + k[:, None] * N + n[None, :], mask=(k < PIXELS)[:, None], other=0.0)
        total = tl.dot(tl.trans(pixel), g, total)
    tl.atomic_add(y_ptr + (tap * C + c)[:, None] * N + n[None, :], total, sem="relaxed")


@case(
    "gradients of 3 x 3 taps of 128 x 128 weights, 100 pictures of 56 x 56 bf16, 58 parts by atomics, 128x128x64, 16 warps, "
    "3 stages",
    TAPS,
    dict(B=100, H=56, W=56, C=128, N=128, each=5440),
    dict(B=2, H=9, W=11, C=32, N=32, each=128),
)
def _(device, B, H, W, C, N, each):
    """The sums are not cleared by what is measured. The last part has fewer pixels."""
    x, g, y = normal(device, B, H, W, C), normal(device, B, H, W, N), empty(device, 9, C, N, dtype=FLOAT)
    pixels = B * H * W

    def run():
        tap_gradients[(9, triton.cdiv(pixels, each))](
            x, g, y, pixels, each, H, W, C=C, N=N, BK=64, num_warps=16, num_stages=3
        )

    def want():
        wide = F.pad(x.float(), (0, 0, 1, 1, 1, 1))
        shifted = (wide[:, i : i + H, j : j + W].flatten(0, 2) for i in range(3) for j in range(3))
        return torch.stack([z.T @ g.float().flatten(0, 2) for z in shifted])

    return Work(run, y, want)


@triton.jit
def convolve_bytes(
    x_ptr,
    w_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    PIXELS,
    H,
    W,
    N,
    C: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """3 x 3 pixels of int8, channels last, to int8 again: each channel has a scale and a shift, and ReLU cuts at 0."""
    m, n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    y, x = m // W % H, m % W
    total = tl.zeros((BM, BN), tl.int32)
    for tap in range(9):
        row, col = tap // 3 - 1, tap % 3 - 1
        inside = (m < PIXELS) & (y + row >= 0) & (y + row < H) & (x + col >= 0) & (x + col < W)
        for first in range(0, C, BK):
            k = first + tl.arange(0, BK)
            pixel = tl.load(x_ptr + (m + row * W + col)[:, None] * C + k[None, :], mask=inside[:, None], other=0)
            w = tl.load(w_ptr + n[:, None] * (9 * C) + (tap * C + k)[None, :])
            total = tl.dot(pixel, tl.trans(w), total, out_dtype=tl.int32)
    z = total.to(tl.float32) * tl.load(scale_ptr + n)[None, :] + tl.load(shift_ptr + n)[None, :]
    z = tl.minimum(tl.maximum(tl.floor(z + 0.5), 0.0), 127.0).to(tl.int8)
    tl.store(y_ptr + m[:, None] * N + n[None, :], z, mask=(m < PIXELS)[:, None])


@case(
    "3 x 3 convolution of 50 pictures of 42 x 43, 256 to 256 channels int8, scales, shifts and ReLU, 128x128x64, 8 warps, "
    "4 stages",
    EIGHT,
    dict(B=50, H=42, W=43, C=256, N=256),
    dict(B=2, H=9, W=11, C=64, N=128),
)
def _(device, B, H, W, C, N):
    x, w, y = (
        normal(device, B, H, W, C, dtype=INT8),
        normal(device, N, 9, C, dtype=INT8),
        empty(device, B, H, W, N, dtype=INT8),
    )
    scale, shift = (normal(device, N, dtype=FLOAT).sigmoid() + 0.5) * C**-0.5 / 500, normal(device, N, dtype=FLOAT) * 20

    def run():
        convolve_bytes[(N // 128, triton.cdiv(B * H * W, 128))](
            x, w, scale, shift, y, B * H * W, H, W, N, C=C, BM=128, BN=128, BK=64, num_warps=8, num_stages=4
        )

    def want():
        weights = w.double().view(N, 3, 3, C).permute(0, 3, 1, 2)
        z = torch.cat([F.conv2d(part.double().permute(0, 3, 1, 2), weights, padding=1) for part in x.split(10)])
        return (z.permute(0, 2, 3, 1) * scale + shift + 0.5).floor().clamp(0, 127)

    return Work(run, y, want)


@triton.jit
def keep_edges(x_ptr, y_ptr, H, W, near, alike, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A mean of SIDE x SIDE pixels, which count less the further they are away and the more they differ."""
    col, row, picture = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2)
    x_ptr += picture * H * W
    middle = tl.load(x_ptr + row * W + col, mask=col < W, other=0.0).to(tl.float32)
    total, weights = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for tap in range(SIDE * SIDE):
        down, across = tap // SIDE - SIDE // 2, tap % SIDE - SIDE // 2
        i, j = row + down, col + across
        inside = (i >= 0) & (i < H) & (j >= 0) & (j < W)
        x = tl.load(x_ptr + i * W + j, mask=inside, other=0.0).to(tl.float32)
        away = x - middle
        weight = tl.where(inside, tl.exp2(-near * (down * down + across * across) - alike * away * away), 0.0)
        total, weights = total + weight * x, weights + weight
    y = (total / weights).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (picture * H + row) * W + col, y, mask=col < W)


@case(
    "filters of 5 x 5 pixels that keep edges, 10 pictures of 1500 x 2001 fp16, 256 per program, 4 warps",
    EDGES,
    dict(B=10, H=1500, W=2001),
    dict(B=2, H=13, W=301),
)
def _(device, B, H, W):
    x, y = normal(device, B, H, W, dtype=HALF), empty(device, B, H, W, dtype=HALF)

    def run():
        keep_edges[(triton.cdiv(W, 256), H, B)](x, y, H, W, 0.25, 0.5, SIDE=5, BLOCK=256, num_warps=4)

    def want():
        z = x.float()
        wide, there = F.pad(z, (2, 2, 2, 2)), F.pad(torch.ones_like(z), (2, 2, 2, 2))
        total, weights = torch.zeros_like(z), torch.zeros_like(z)
        for i in range(5):
            for j in range(5):
                part = wide[:, i : i + H, j : j + W]
                weight = there[:, i : i + H, j : j + W] * torch.exp2(
                    -0.25 * ((i - 2) ** 2 + (j - 2) ** 2) - 0.5 * (part - z) ** 2
                )
                total, weights = total + weight * part, weights + weight
        return total / weights

    return Work(run, y, want)


@triton.jit
def cubic(away):
    """How much a pixel counts that is less than two away."""
    a = tl.abs(away)
    inner, outer = (1.5 * a - 2.5) * a * a + 1, ((-0.5 * a + 2.5) * a - 4) * a + 2
    return tl.where(a <= 1, inner, tl.where(a < 2, outer, 0.0))


@triton.jit
def perspective(x_ptr, way_ptr, y_ptr, H, W, HIGH, WIDE, BLOCK: tl.constexpr):
    """Pictures of 3 bytes per pixel seen from aside, as planes: 8 numbers say where a pixel comes from, and 4 x 4 pixels
    are mixed there."""
    col, row, picture = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2)
    way = way_ptr + picture * 8
    depth = tl.load(way + 6) * col + tl.load(way + 7) * row + 1
    x = (tl.load(way) * col + tl.load(way + 1) * row + tl.load(way + 2)) / depth
    y = (tl.load(way + 3) * col + tl.load(way + 4) * row + tl.load(way + 5)) / depth
    left, top = tl.floor(x), tl.floor(y)
    red, green, blue = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(16):
        j, i = left + (tap % 4 - 1), top + (tap // 4 - 1)
        weight = cubic(x - j) * cubic(y - i)
        inside = (col < WIDE) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        at = x_ptr + ((picture * H + i.to(tl.int32)) * W + j.to(tl.int32)) * 3
        red += weight * tl.load(at, mask=inside, other=0).to(tl.float32)
        green += weight * tl.load(at + 1, mask=inside, other=0).to(tl.float32)
        blue += weight * tl.load(at + 2, mask=inside, other=0).to(tl.float32)
    at = y_ptr + (picture * 3 * HIGH + row) * WIDE + col
    tl.store(at, (red / 255).to(y_ptr.dtype.element_ty), mask=col < WIDE)
    tl.store(at + HIGH * WIDE, (green / 255).to(y_ptr.dtype.element_ty), mask=col < WIDE)
    tl.store(at + 2 * HIGH * WIDE, (blue / 255).to(y_ptr.dtype.element_ty), mask=col < WIDE)


@case(
    "perspectives of 8 pictures of 1080 x 1920 x 3 bytes at 500 x 800 pixels to planes fp16, 16 pixels mixed, 128 per "
    "program, 4 warps",
    PERSPECTIVES,
    dict(B=8, H=1080, W=1920, high=500, wide=800),
    dict(B=2, H=40, W=50, high=20, wide=30),
)
def _(device, B, H, W, high, wide):
    x, y = normal(device, B, H, W, 3, dtype=INT8).view(UINT8), empty(device, B, 3, high, wide, dtype=HALF)
    share = known("meta", 1 << 16, B, 8).float() / (1 << 16) - 0.5
    middle = torch.tensor([W / wide, 0, 5, 0, H / high, 5, 0, 0])
    spread = torch.tensor([W / wide / 2, 0.4, 20, 0.4, H / high / 2, 20, 0.2 / wide, 0.2 / high])
    ways = place(device, middle + share * spread)

    def run():
        perspective[(triton.cdiv(wide, 128), high, B)](x, ways, y, H, W, high, wide, BLOCK=128, num_warps=4)

    def want():
        way = ways.to(y.device)[:, :, None, None]
        row, col = torch.arange(high, device=y.device)[:, None], torch.arange(wide, device=y.device)[None, :]
        depth = way[:, 6] * col + way[:, 7] * row + 1
        at_x, at_y = ((way[:, k] * col + way[:, k + 1] * row + way[:, k + 2]) / depth for k in (0, 3))
        points = torch.stack([at_x, at_y], 3)
        out, image = 0, torch.arange(B, device=y.device)[:, None, None]
        for tap in range(16):
            corner = points.floor() + torch.tensor([tap % 4 - 1, tap // 4 - 1], device=y.device)
            a = (points - corner).abs()
            weight = torch.where(
                a <= 1, 1.5 * a**3 - 2.5 * a**2 + 1, torch.where(a < 2, -0.5 * a**3 + 2.5 * a**2 - 4 * a + 2, 0)
            ).prod(3)
            j, i = corner.long().unbind(3)
            inside = (i >= 0) & (i < H) & (j >= 0) & (j < W)
            pixel = x[image, i.clamp(0, H - 1), j.clamp(0, W - 1)].float()
            out = out + (weight * inside)[..., None] * pixel / 255
        return out.permute(0, 3, 1, 2)

    return Work(run, y, want)


@triton.jit
def ones_of(x):
    """How many bits of a word of 64 are set, by sums within ever wider parts of it."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x += x >> 8
    x += x >> 16
    x += x >> 32
    return (x & 127).to(tl.int32)


@triton.jit
def view_differences(left_ptr, right_ptr, y_ptr, cost_ptr, W, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """How far to the left the right view's most similar pixel is, and in how many of 64 bits it differs."""
    col, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    left = tl.load(left_ptr + row * W + col, mask=col < W, other=0)
    least, best = tl.full((BLOCK,), 65, tl.int32), tl.zeros((BLOCK,), tl.int32)
    for away in range(MOST):
        there = (col < W) & (col >= away)
        cost = ones_of(left ^ tl.load(right_ptr + row * W + col - away, mask=there, other=0))
        better = there & (cost < least)
        least, best = tl.where(better, cost, least), tl.where(better, away, best)
    tl.store(y_ptr + row * W + col, best.to(tl.uint8), mask=col < W)
    tl.store(cost_ptr + row * W + col, least.to(tl.uint8), mask=col < W)


@case(
    "differences of two views of 1200 x 2001 words of 64 bits, 64 places each, 256 per program, 8 warps",
    VIEWS,
    dict(H=1200, W=2001),
    dict(H=5, W=301),
)
def _(device, H, W):
    """Words are tensors of int64, of which the kernel is given views as uint64."""
    left, right = (normal(device, H, 2 * W, dtype=FLOAT).view(torch.int64) for _ in range(2))
    y, cost = empty(device, H, W, dtype=UINT8), empty(device, H, W, dtype=UINT8)
    words = [x.view(torch.uint64) for x in (left, right)]

    def run():
        view_differences[(triton.cdiv(W, 256), H)](*words, y, cost, W, MOST=64, BLOCK=256, num_warps=8)

    def want():
        least, best = torch.full((H, W), 65, device=y.device), torch.zeros((H, W), device=y.device)
        for away in range(64):
            both = left[:, away:] ^ right[:, : W - away]
            ones = sum(both >> bit & 1 for bit in range(64))
            better = ones < least[:, away:]
            best[:, away:] = torch.where(better, away, best[:, away:])
            least[:, away:] = torch.where(better, ones, least[:, away:])
        return best, least

    return Work(run, (y, cost), want)


@triton.jit
def half_as_large(x_ptr, y_ptr, H, W, HIGH, WIDE, BLOCK: tl.constexpr):
    """A picture half as large, by weights of 1, 3, 3 and 1 in both directions; pixels at an edge are repeated."""
    col, row, plane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(4):
        line = tl.minimum(tl.maximum(2 * row + i - 1, 0), H - 1)
        for j in tl.static_range(4):
            at = tl.minimum(tl.maximum(2 * col + j - 1, 0), W - 1)
            x = tl.load(x_ptr + (plane * H + line) * W + at, mask=col < WIDE, other=0.0).to(tl.float32)
            total += ((1 if i % 3 == 0 else 3) * (1 if j % 3 == 0 else 3) / 64) * x
    tl.store(y_ptr + (plane * HIGH + row) * WIDE + col, total.to(y_ptr.dtype.element_ty), mask=col < WIDE)


@case(
    "pyramids of 40 planes of 1537 x 2050 fp16, 7 launches, each half as large, 256 per program, 2 warps",
    PYRAMIDS,
    dict(B=40, H=1537, W=2050, levels=7),
    dict(B=2, H=21, W=34, levels=3),
)
def _(device, B, H, W, levels):
    sizes = [(H, W)]
    for _ in range(levels):
        sizes.append(tuple(triton.cdiv(x, 2) for x in sizes[-1]))
    x, levels = normal(device, B, H, W, dtype=HALF), [empty(device, B, *size, dtype=HALF) for size in sizes[1:]]

    def run():
        for one, two in zip([x, *levels], levels, strict=False):
            high, wide = two.shape[1:]
            half_as_large[(triton.cdiv(wide, 256), high, B)](
                one, two, *one.shape[1:], high, wide, BLOCK=256, num_warps=2
            )

    def want():
        out = [x.float()]
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0], device=x.device) / 8
        for size in sizes[1:]:
            wide = F.pad(out[-1][:, None], (1, 2, 1, 2), mode="replicate")
            small = F.conv2d(wide, torch.outer(taps, taps)[None, None], stride=2)
            out.append(small[:, 0, : size[0], : size[1]])
        return tuple(out[1:])

    return Work(run, tuple(levels), want)
