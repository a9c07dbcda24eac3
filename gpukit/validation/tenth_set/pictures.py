"""Pictures: convolutions of videos, features of boxes, tables of colors, interleaved bits, and smaller pictures."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, HALF, UINT8, Work, empty, known, normal, place
from gpukit.validation.tenth_set.case import case

VIDEOS, BOXES, TABLES = "convolutions of videos", "features of boxes", "tables of colors"
ORDERS, SMALLER = "orders of interleaved bits", "pictures resized by tables"


@triton.jit
def convolve_video(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    T,
    H,
    W,
    C: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """3 x 3 pixels of a frame and of the two before it, channels last, as a product of BM pixels; bias and SiLU
    follow."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N)
    t, y, x = m // (H * W), m // W % H, m % W
    total = tl.zeros((BM, N), tl.float32)
    for turn in range(0, 27 * C, BK):
        tap, k = turn // C, turn % C + tl.arange(0, BK)
        frame, row, col = t + tap // 9 - 2, y + tap // 3 % 3 - 1, x + tap % 3 - 1
        inside = (frame >= 0) & (frame < T) & (row >= 0) & (row < H) & (col >= 0) & (col < W)
        at = ((frame * H + row) * W + col)[:, None] * C + k[None, :]
        pixel = tl.load(x_ptr + at, mask=inside[:, None], other=0.0)
        total = tl.dot(pixel, tl.load(w_ptr + (tap * C + k)[:, None] * N + n[None, :]), total)
    total += tl.load(bias_ptr + n)[None, :]
    total *= tl.sigmoid(total)
    tl.store(y_ptr + m[:, None] * N + n[None, :], total.to(y_ptr.dtype.element_ty), mask=(m < T * H * W)[:, None])


@case(
    "3 x 3 x 3 convolution of 13 frames of 90 x 157, 128 to 128 channels bf16, bias and SiLU, 128x128x32, 8 warps, 4 stages",
    VIDEOS,
    dict(T=13, H=90, W=157, C=128, N=128),
    dict(T=3, H=5, W=11, C=32, N=32),
)
def _(device, T, H, W, C, N):
    x, w, y = normal(device, T, H, W, C), normal(device, 27, C, N) / 32, empty(device, T, H, W, N)
    bias = normal(device, N, dtype=FLOAT)

    def run():
        convolve_video[(triton.cdiv(T * H * W, 128),)](
            x, w, bias, y, T, H, W, C=C, N=N, BM=128, BK=32, num_warps=8, num_stages=4
        )

    def want():
        video = F.pad(x.float().permute(3, 0, 1, 2), (1, 1, 1, 1, 2, 0))
        weights = w.float().view(3, 3, 3, C, N).permute(4, 3, 0, 1, 2)
        return F.silu(F.conv3d(video[None], weights, bias)[0]).permute(1, 2, 3, 0)

    return Work(run, y, want)


@triton.jit
def features_of_boxes(x_ptr, box_ptr, y_ptr, H, W, C: tl.constexpr, SIDE: tl.constexpr):
    """The mean of 2 x 2 points of one of SIDE x SIDE parts of a box, each between four pixels; a program has all
    channels."""
    part, box, c = tl.program_id(0), tl.program_id(1), tl.arange(0, C)
    at = box_ptr + box * 5
    image = tl.load(at).to(tl.int32)
    left, top = tl.load(at + 1), tl.load(at + 2)
    wide, high = (tl.load(at + 3) - left) / SIDE, (tl.load(at + 4) - top) / SIDE
    total = tl.zeros((C,), tl.float32)
    for point in tl.static_range(4):
        x = left + wide * (part % SIDE + 0.25 + 0.5 * (point % 2)) - 0.5
        y = top + high * (part // SIDE + 0.25 + 0.5 * (point // 2)) - 0.5
        x, y = tl.minimum(tl.maximum(x, 0.0), W - 1.0), tl.minimum(tl.maximum(y, 0.0), H - 1.0)
        col, row = tl.floor(x), tl.floor(y)
        across, down = x - col, y - row
        first = image * H * W + row.to(tl.int32) * W + col.to(tl.int32)
        right = tl.where(col < W - 1, 1, 0)
        below = tl.where(row < H - 1, W, 0)
        one, two = tl.load(x_ptr + first * C + c), tl.load(x_ptr + (first + right) * C + c)
        three = tl.load(x_ptr + (first + below) * C + c)
        four = tl.load(x_ptr + (first + below + right) * C + c)
        total += (1 - down) * ((1 - across) * one + across * two) + down * ((1 - across) * three + across * four)
    tl.store(y_ptr + (box * SIDE * SIDE + part) * C + c, (total / 4).to(y_ptr.dtype.element_ty))


@case(
    "features of 3000 boxes in 8 pictures of 100 x 152, 7 x 7 parts of 256 channels fp16, one part per program, 1 warp",
    BOXES,
    dict(B=8, H=100, W=152, C=256, boxes=3000),
    dict(B=2, H=12, W=15, C=32, boxes=5),
)
def _(device, B, H, W, C, boxes):
    """Boxes are small and large; some reach beyond the picture's edge."""
    share = known("meta", 1 << 16, 5, boxes).float() / (1 << 16)
    left, top = share[1] * W - 2, share[2] * H - 2
    corners = torch.stack(
        [(share[0] * B).floor(), left, top, left + 1 + share[3] ** 3 * W, top + 1 + share[4] ** 3 * H], 1
    )
    where = place(device, corners.contiguous())
    x, y = normal(device, B, H, W, C, dtype=HALF), empty(device, boxes, 7, 7, C, dtype=HALF)

    def run():
        features_of_boxes[(49, boxes)](x, where, y, H, W, C=C, SIDE=7, num_warps=1)

    def want():
        box, steps = where.to(y.device), (torch.arange(14, device=y.device) + 0.5) / 14
        at_x = (box[:, 1:2] + (box[:, 3:4] - box[:, 1:2]) * steps - 0.5).clamp(0, W - 1)
        at_y = (box[:, 2:3] + (box[:, 4:5] - box[:, 2:3]) * steps - 0.5).clamp(0, H - 1)
        out = []
        for i, xs, ys in zip(box[:, 0].int().tolist(), at_x, at_y, strict=True):
            col, row = xs.floor().long(), ys.floor().long()
            right, below = (col + 1).clamp(max=W - 1), (row + 1).clamp(max=H - 1)
            across, down = (xs - col)[None, :, None], (ys - row)[:, None, None]
            picture = x[i].float()
            upper = picture[row][:, col] * (1 - across) + picture[row][:, right] * across
            lower = picture[below][:, col] * (1 - across) + picture[below][:, right] * across
            points = upper * (1 - down) + lower * down
            out.append(points.view(7, 2, 7, 2, C).mean((1, 3)))
        return torch.stack(out)

    return Work(run, y, want)


@triton.jit
def tables_of_colors(x_ptr, table_ptr, y_ptr, n, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Three bytes of a pixel choose a place in a cube of SIDE places a side; its new color lies between the 8 around
    it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    red = tl.load(x_ptr + at, mask=live, other=0).to(tl.float32) * ((SIDE - 1) / 255)
    green = tl.load(x_ptr + n + at, mask=live, other=0).to(tl.float32) * ((SIDE - 1) / 255)
    blue = tl.load(x_ptr + 2 * n + at, mask=live, other=0).to(tl.float32) * ((SIDE - 1) / 255)
    i = tl.minimum(red.to(tl.int32), SIDE - 2)
    j = tl.minimum(green.to(tl.int32), SIDE - 2)
    k = tl.minimum(blue.to(tl.int32), SIDE - 2)
    red, green, blue = red - i, green - j, blue - k
    one, two, three = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for corner in tl.static_range(8):
        a, b, c = corner // 4, corner // 2 % 2, corner % 2
        part = (red if a else 1 - red) * (green if b else 1 - green) * (blue if c else 1 - blue)
        place = table_ptr + (((i + a) * SIDE + j + b) * SIDE + k + c) * 3
        one += part * tl.load(place, mask=live, other=0.0)
        two += part * tl.load(place + 1, mask=live, other=0.0)
        three += part * tl.load(place + 2, mask=live, other=0.0)
    tl.store(y_ptr + at, one.to(y_ptr.dtype.element_ty), mask=live)
    tl.store(y_ptr + n + at, two.to(y_ptr.dtype.element_ty), mask=live)
    tl.store(y_ptr + 2 * n + at, three.to(y_ptr.dtype.element_ty), mask=live)


@case(
    "colors of 2160 x 3840 pixels of 3 bytes from a table of 33 x 33 x 33 x 3 fp32 to fp16, 512 per program",
    TABLES,
    dict(H=2160, W=3840, side=33),
    dict(H=20, W=70, side=5),
)
def _(device, H, W, side):
    """Colors change slowly across the picture, with some noise, as in a photograph."""
    ramp = (torch.arange(H)[:, None] * 200 // H + torch.arange(W)[None, :] * 30 // W).int()
    planes = torch.stack([ramp, ramp.flip(0), (ramp + ramp.flip(1)) // 2]) + known("meta", 24, 3, H, W)
    x, table = place(device, planes.clamp(max=255).to(UINT8)), normal(device, side**3, 3, dtype=FLOAT)
    y = empty(device, 3, H, W, dtype=HALF)

    def run():
        tables_of_colors[(triton.cdiv(H * W, 512),)](x, table, y, H * W, SIDE=side, BLOCK=512)

    def want():
        at = x.to(y.device).view(3, 1, 1, 1, -1).flip(0).permute(1, 2, 3, 4, 0) / 127.5 - 1
        cube = table.view(side, side, side, 3).permute(3, 0, 1, 2)[None]
        return F.grid_sample(cube, at.float(), align_corners=True).view(3, H, W)

    return Work(run, y, want)


@triton.jit
def every_third(at):
    """Every third bit of a number, the lowest one first, moved together."""
    at = at & 0x09249249
    at = (at | at >> 2) & 0x030C30C3
    at = (at | at >> 4) & 0x0300F00F
    at = (at | at >> 8) & 0x030000FF
    return (at | at >> 16) & 0x3FF


@triton.jit
def interleave(x_ptr, y_ptr, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A cube in an order in which the bits of the three coordinates take turns: each place of the result looks up its
    own."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y, z = every_third(at), every_third(at >> 1), every_third(at >> 2)
    tl.store(y_ptr + at, tl.load(x_ptr + (z * SIDE + y) * SIDE + x))


@case(
    "a cube of 512 x 512 x 512 fp16 in the order of interleaved bits, 2048 per program",
    ORDERS,
    dict(side=512),
    dict(side=16),
)
def _(device, side):
    x, y = normal(device, side, side, side, dtype=HALF), empty(device, side**3, dtype=HALF)

    def want():
        at, bits = torch.arange(side**3, device=x.device), range(side.bit_length() - 1)
        return x[tuple(sum((at >> 3 * bit + axis & 1) << bit for bit in bits) for axis in (2, 1, 0))]

    return Work(lambda: interleave[(side**3 // 2048,)](x, y, SIDE=side, BLOCK=2048), y, want)


@triton.jit
def fewer_columns(x_ptr, first_ptr, weight_ptr, y_ptr, W, NEW, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """New pixels of a line, each the weighted sum of TAPS neighbors: a table says where they begin, and their
    weights."""
    col, row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(0)
    live, total = col < NEW, tl.zeros((BLOCK,), tl.float32)
    first = tl.load(first_ptr + col, mask=live, other=0)
    for tap in range(TAPS):
        x = tl.load(x_ptr + row * W + first + tap, mask=live, other=0).to(tl.float32)
        total += x * tl.load(weight_ptr + tap * NEW + col, mask=live, other=0.0)
    tl.store(y_ptr + row * NEW + col, total.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def fewer_lines(x_ptr, first_ptr, weight_ptr, y_ptr, H, NEW, W, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """The same for a new line: all of its pixels have the same weights."""
    col, line, plane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2)
    first, total = tl.load(first_ptr + line), tl.zeros((BLOCK,), tl.float32)
    for tap in range(TAPS):
        at = (plane * H + first + tap) * W + col
        total += tl.load(x_ptr + at, mask=col < W, other=0.0).to(tl.float32) * tl.load(weight_ptr + tap * NEW + line)
    tl.store(y_ptr + (plane * NEW + line) * W + col, total.to(y_ptr.dtype.element_ty), mask=col < W)


@case(
    "64 planes of 1200 x 1600 bytes to 384 x 512 fp16, 15 taps across and 15 down by tables, two launches",
    SMALLER,
    dict(B=64, H=1200, W=1600, high=384, wide=512, taps=15),
    dict(B=2, H=75, W=90, high=24, wide=29, taps=15),
)
def _(device, B, H, W, high, wide, taps):
    x = normal(device, B, H, W, dtype=torch.int8).view(UINT8)
    half, y = empty(device, B, H, wide, dtype=HALF), empty(device, B, high, wide, dtype=HALF)
    tables = []
    for old, new in ((W, wide), (H, high)):
        middle = (torch.arange(new) + 0.5) * old / new - 0.5
        first = (middle.round().int() - taps // 2).clamp(0, old - taps)
        away = (first + torch.arange(taps)[:, None] - middle) * new / old
        weight = (away.sinc() * (away / 2.5).cos().clamp(min=0)).float()
        tables.append((place(device, first), place(device, weight / weight.sum(0))))

    def run():
        (first, weight), (line, share) = tables
        fewer_columns[(B * H, triton.cdiv(wide, 256))](x, first, weight, half, W, wide, TAPS=taps, BLOCK=256)
        fewer_lines[(triton.cdiv(wide, 256), high, B)](half, line, share, y, H, high, wide, TAPS=taps, BLOCK=256)

    def want():
        matrices = []
        for (first, weight), old in zip(tables, (W, H), strict=True):
            at = first.long() + torch.arange(taps, device=first.device)[:, None]
            matrices.append(torch.zeros(old, len(first), device=weight.device).scatter_(0, at, weight).to(y.device))
        return matrices[1].T @ (x.float() @ matrices[0])

    return Work(run, y, want)
