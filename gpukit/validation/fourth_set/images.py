"""Images: colors, medians, blurs, warps, depthwise convolutions, and patches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.fourth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, INT32, MI, Work, empty, known, normal

COLORS, FILTERS, WARPS, DEPTHWISE, PATCHES = "colors", "filters of images", "warps", "depthwise windows", "patches"


@triton.jit
def root(x):
    """The cube root of CIE's color spaces, which is a line near 0."""
    return tl.where(x > 0.008856, tl.exp2(tl.log2(tl.maximum(x, 1e-6)) / 3), 7.787 * x + 0.137931)


@triton.jit
def linear(x):
    """What a monitor makes of a number of sRGB."""
    return tl.where(x > 0.04045, tl.exp2(2.4 * tl.log2((x + 0.055) / 1.055)), x / 12.92)


@triton.jit
def to_lab(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """sRGB to CIELAB, a plane for each of the three."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r, g, b = linear(tl.load(x_ptr + at)), linear(tl.load(x_ptr + n + at)), linear(tl.load(x_ptr + 2 * n + at))
    x = root(0.4339 * r + 0.3762 * g + 0.1899 * b)
    y = root(0.2126 * r + 0.7152 * g + 0.0722 * b)
    z = root(0.0177 * r + 0.1095 * g + 0.8728 * b)
    tl.store(y_ptr + at, 116 * y - 16)
    tl.store(y_ptr + n + at, 500 * (x - y))
    tl.store(y_ptr + 2 * n + at, 200 * (y - z))


@case("colors of 16 Mi pixels, sRGB to CIELAB fp32", COLORS, dict(n=16 * MI), dict(n=2048))
def _(device, n):
    x, y = normal(device, 3, n, dtype=FLOAT).sigmoid(), empty(device, 3, n, dtype=FLOAT)

    def want():
        rgb = torch.where(x > 0.04045, ((x + 0.055) / 1.055) ** 2.4, x / 12.92)
        matrix = torch.tensor([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]])
        xyz = torch.stack([sum(w * c for w, c in zip(row, rgb, strict=True)) for row in matrix.tolist()])
        a, b, c = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 0.137931)
        return torch.stack([116 * b - 16, 500 * (a - b), 200 * (b - c)])

    return Work(lambda: to_lab[(n // 1024,)](x, y, n, BLOCK=1024), y, want)


@triton.jit
def in_order(a, b, c):
    """The smallest, the middle one and the largest of three."""
    low, high = tl.minimum(a, b), tl.maximum(a, b)
    return tl.minimum(low, c), tl.maximum(low, tl.minimum(high, c)), tl.maximum(high, c)


@triton.jit
def median(x_ptr, y_ptr, H, W, BLOCK: tl.constexpr):
    """Of 3 x 3 pixels: columns in order first, and then what is left. Beyond the edge is the edge."""
    i = tl.program_id(1)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = j < W
    left, right = tl.maximum(j - 1, 0), tl.minimum(j + 1, W - 1)
    up, own, down = x_ptr + tl.maximum(i - 1, 0) * W, x_ptr + i * W, x_ptr + tl.minimum(i + 1, H - 1) * W
    a0, a1, a2 = in_order(
        tl.load(up + left, mask=live), tl.load(own + left, mask=live), tl.load(down + left, mask=live)
    )
    b0, b1, b2 = in_order(tl.load(up + j, mask=live), tl.load(own + j, mask=live), tl.load(down + j, mask=live))
    c0, c1, c2 = in_order(
        tl.load(up + right, mask=live), tl.load(own + right, mask=live), tl.load(down + right, mask=live)
    )
    low = tl.maximum(tl.maximum(a0, b0), c0)
    _, middle, _ = in_order(a1, b1, c1)
    high = tl.minimum(tl.minimum(a2, b2), c2)
    _, y, _ = in_order(low, middle, high)
    tl.store(y_ptr + i * W + j, y, mask=live)


@case("medians of 3 x 3 pixels of 6000 x 8001 fp32", FILTERS, dict(H=6000, W=8001), dict(H=5, W=300))
def _(device, H, W):
    x, y = normal(device, H, W, dtype=FLOAT), empty(device, H, W, dtype=FLOAT)

    def want():
        padded = F.pad(x[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
        nine = [padded[i : i + H, j : j + W] for i in range(3) for j in range(3)]
        return torch.stack(nine).sort(0).values[4]

    return Work(lambda: median[(triton.cdiv(W, 256), H)](x, y, H, W, BLOCK=256), y, want)


@triton.jit
def blur(x_ptr, w_ptr, y_ptr, H, W, DOWN: tl.constexpr, RADIUS: tl.constexpr, BLOCK: tl.constexpr):
    """Weighted sums of 2 RADIUS + 1 neighbors, in a row or down a column; nothing lies beyond the edge."""
    i = tl.program_id(1)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for d in tl.static_range(2 * RADIUS + 1):
        if DOWN:
            row = i + d - RADIUS
            live = (j >= 0) & (row >= 0) & (row < H)
            x = tl.load(x_ptr + row * W + j, mask=live, other=0.0)
        else:
            col = j + d - RADIUS
            x = tl.load(x_ptr + i * W + col, mask=(col >= 0) & (col < W), other=0.0)
        total += tl.load(w_ptr + d) * x.to(tl.float32)
    tl.store(y_ptr + i * W + j, total.to(y_ptr.dtype.element_ty))


@case("blur of 8192 x 8192 fp16, 15 taps across and 15 down", FILTERS, dict(H=8192, W=8192), dict(H=40, W=512))
def _(device, H, W):
    x, w = normal(device, H, W, dtype=HALF), normal(device, 15, dtype=FLOAT).sigmoid()
    between, y = empty(device, H, W, dtype=HALF), empty(device, H, W, dtype=HALF)

    def run():
        blur[(W // 512, H)](x, w, between, H, W, DOWN=False, RADIUS=7, BLOCK=512)
        blur[(W // 512, H)](between, w, y, H, W, DOWN=True, RADIUS=7, BLOCK=512)

    def want():
        across = F.conv2d(x.float()[None, None], w.view(1, 1, 1, 15), padding=(0, 7))
        return F.conv2d(across, w.view(1, 1, 15, 1), padding=(7, 0))[0, 0]

    return Work(run, y, want)


@triton.jit
def warp(x_ptr, at_ptr, y_ptr, H, W, BLOCK: tl.constexpr):
    """Each pixel from a place of its own, in 256ths of a pixel, between four neighbors; all planes use the same places."""
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u, v = tl.load(at_ptr + pixel), tl.load(at_ptr + H * W + pixel)
    i, j = u // 256, v // 256
    down, right = (u % 256).to(tl.float32) / 256, (v % 256).to(tl.float32) / 256
    x_ptr += tl.program_id(1) * H * W
    source = i * W + j
    upper = tl.load(x_ptr + source) * (1 - right) + tl.load(x_ptr + source + 1) * right
    lower = tl.load(x_ptr + source + W) * (1 - right) + tl.load(x_ptr + source + W + 1) * right
    tl.store(y_ptr + tl.program_id(1) * H * W + pixel, upper * (1 - down) + lower * down)


@case(
    "32 planes of 1024 x 1024 fp32 warped, up to 8 pixels away",
    WARPS,
    dict(planes=32, side=1024),
    dict(planes=2, side=32),
)
def _(device, planes, side):
    x, y = normal(device, planes, side, side, dtype=FLOAT), empty(device, planes, side, side, dtype=FLOAT)
    moved = known("cpu", 16 * 256, 2, side, side) - 8 * 256
    at = torch.arange(side, dtype=INT32) * 256
    places = (moved + torch.stack([at[:, None].expand(side, side), at.expand(side, side)])).clamp(
        0, (side - 1) * 256 - 1
    )
    places = places.contiguous() if device == "meta" else places.contiguous().to(device)

    def run():
        return warp[(side * side // 256, planes)](x, places, y, side, side, BLOCK=256)

    def want():
        i, j = (places // 256).long()
        down, right = (places % 256).float() / 256
        upper = x[:, i, j] * (1 - right) + x[:, i, j + 1] * right
        return upper * (1 - down) + (x[:, i + 1, j] * (1 - right) + x[:, i + 1, j + 1] * right) * down

    return Work(run, y, want)


@triton.jit
def depthwise(x_ptr, w_ptr, y_ptr, H, W, C, BW: tl.constexpr, BC: tl.constexpr):
    """7 x 7 weights for each channel, channels last: BW pixels of a row and BC channels per program."""
    i, image = tl.program_id(1) % H, tl.program_id(1) // H
    j = tl.program_id(0) * BW + tl.arange(0, BW)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    total = tl.zeros((BW, BC), tl.float32)
    for tap in range(49):
        row, col = i + tap // 7 - 3, j + tap % 7 - 3
        live = (row >= 0) & (row < H) & (col >= 0) & (col < W)
        x = tl.load(x_ptr + ((image * H + row) * W + col)[:, None] * C + c[None, :], mask=live[:, None], other=0.0)
        total += x.to(tl.float32) * tl.load(w_ptr + tap * C + c).to(tl.float32)[None, :]
    at = ((image * H + i) * W + j)[:, None] * C + c[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=(j < W)[:, None])


@case(
    "depthwise 7 x 7, 32 images of 56 x 56 x 128 fp16, channels last",
    DEPTHWISE,
    dict(images=32, H=56, W=56, C=128),
    dict(images=2, H=5, W=9, C=64),
)
def _(device, images, H, W, C):
    x, w = normal(device, images, H, W, C, dtype=HALF), normal(device, 49, C, dtype=HALF)
    y = empty(device, images, H, W, C, dtype=HALF)

    def run():
        return depthwise[(triton.cdiv(W, 8), images * H, C // 64)](x, w, y, H, W, C, BW=8, BC=64)

    def want():
        weights = w.float().t().reshape(C, 1, 7, 7)
        return F.conv2d(x.float().permute(0, 3, 1, 2), weights, padding=3, groups=C).permute(0, 2, 3, 1)

    return Work(run, y, want)


@triton.jit
def depthwise_planes(x_ptr, w_ptr, y_ptr, H, W, C, BLOCK: tl.constexpr):
    """3 x 3 weights for each channel, a plane after another, at every second pixel: nine loads with a stride of 2."""
    plane = tl.program_id(1)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i, j = pixel // (W // 2), pixel % (W // 2)
    inside = i < H // 2
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(9):
        row, col = 2 * i + tap // 3 - 1, 2 * j + tap % 3 - 1
        live = inside & (row >= 0) & (row < H) & (col >= 0) & (col < W)
        x = tl.load(x_ptr + plane * H * W + row * W + col, mask=live, other=0.0)
        total += x.to(tl.float32) * tl.load(w_ptr + (plane % C) * 9 + tap).to(tl.float32)
    tl.store(y_ptr + plane * (H // 2) * (W // 2) + pixel, total.to(y_ptr.dtype.element_ty), mask=inside)


@case(
    "depthwise 3 x 3, every second pixel, 64 images of 96 planes of 112 x 112 fp16",
    DEPTHWISE,
    dict(images=64, C=96, H=112, W=112),
    dict(images=2, C=3, H=10, W=12),
)
def _(device, images, C, H, W):
    x, w = normal(device, images, C, H, W, dtype=HALF), normal(device, C, 1, 3, 3, dtype=HALF)
    y = empty(device, images, C, H // 2, W // 2, dtype=HALF)

    def run():
        grid = (triton.cdiv(H * W // 4, 1024), images * C)
        return depthwise_planes[grid](x, w, y, H, W, C, BLOCK=1024)

    return Work(run, y, lambda: F.conv2d(x.float(), w.float(), stride=2, padding=1, groups=C))


@triton.jit
def windows(x_ptr, y_ptr, C, H, W, BLOCK: tl.constexpr):
    """Each of the nine numbers around a pixel in a row of its own: one number of x becomes nine of y."""
    row = tl.program_id(1)  # of one image's C * 9
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, tap = row // 9, row % 9
    i, j = pixel // W + tap // 3 - 1, pixel % W + tap % 3 - 1
    live = (i >= 0) & (i < H) & (j >= 0) & (j < W)
    x = tl.load(x_ptr + ((tl.program_id(2) * C + c) * H + i) * W + j, mask=live, other=0.0)
    tl.store(y_ptr + (tl.program_id(2) * C * 9 + row) * H * W + pixel, x, mask=pixel < H * W)


@case(
    "windows of 3 x 3 laid out, 32 images of 128 planes of 56 x 56 fp16",
    PATCHES,
    dict(images=32, C=128, side=56),
    dict(images=2, C=3, side=7),
)
def _(device, images, C, side):
    x, y = normal(device, images, C, side, side, dtype=HALF), empty(device, images, C * 9, side * side, dtype=HALF)

    def run():
        return windows[(triton.cdiv(side * side, 1024), C * 9, images)](x, y, C, side, side, BLOCK=1024)

    return Work(run, y, lambda: F.unfold(x.float(), 3, padding=1))


@triton.jit
def patches(x_ptr, mean_ptr, y_ptr, SIDE: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr):
    """P x P pixels of three planes become one row, less the mean of their plane."""
    patch, image = tl.program_id(0), tl.program_id(1)
    of_row: tl.constexpr = SIDE // P
    offs = tl.arange(0, BLOCK)
    c, i, j = offs // (P * P), offs // P % P, offs % P
    live = offs < 3 * P * P
    at = ((image * 3 + c) * SIDE + patch // of_row * P + i) * SIDE + patch % of_row * P + j
    x = tl.load(x_ptr + at, mask=live).to(tl.float32) - tl.load(mean_ptr + c, mask=live)
    tl.store(y_ptr + (image * of_row * of_row + patch) * 3 * P * P + offs, x.to(y_ptr.dtype.element_ty), mask=live)


@case("patches of 14 x 14 of 512 images of 3 x 224 x 224 fp16", PATCHES, dict(images=512), dict(images=1))
def _(device, images):
    x, mean = normal(device, images, 3, 224, 224, dtype=HALF), normal(device, 3, dtype=FLOAT)
    y = empty(device, images, 256, 588, dtype=HALF)

    def run():
        return patches[(256, images)](x, mean, y, SIDE=224, P=14, BLOCK=1024)

    return Work(run, y, lambda: F.unfold(x.float() - mean[:, None, None], 14, stride=14).mT)
