"""Grids: a stencil in place, two in three dimensions, and the colors of video."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation.fifth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, UINT8, Work, empty, known, normal

CHECKERS, SOLID, VIDEO = "red and black", "stencils of solids", "video"


@triton.jit
def half_step(x_ptr, H, W, COLOR: tl.constexpr, BLOCK: tl.constexpr):
    """Every second number of a row becomes the mean of its four neighbors, in place; the border stays."""
    row = tl.program_id(1) + 1
    col = 1 + (row + COLOR) % 2 + 2 * (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    live = col < W - 1
    at = x_ptr + row * W + col
    total = tl.load(at - W, mask=live, other=0.0) + tl.load(at + W, mask=live, other=0.0)
    total += tl.load(at - 1, mask=live, other=0.0) + tl.load(at + 1, mask=live, other=0.0)
    tl.store(at, total * 0.25, mask=live)


@triton.jit
def copy_in(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """What the steps in place begin with."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@case(
    "4 red and black steps on 5001 x 4999 fp32, 9 launches",
    CHECKERS,
    dict(H=5001, W=4999, steps=4),
    dict(H=9, W=13, steps=2),
)
def _(device, H, W, steps):
    x, y = normal(device, H, W, dtype=FLOAT), empty(device, H, W, dtype=FLOAT)

    def run():
        copy_in[(triton.cdiv(H * W, 1024),)](x, y, H * W, BLOCK=1024)
        for _ in range(steps):
            half_step[(triton.cdiv(W, 1024), H - 2)](y, H, W, COLOR=0, BLOCK=512)
            half_step[(triton.cdiv(W, 1024), H - 2)](y, H, W, COLOR=1, BLOCK=512)

    def want():
        z = x.clone()
        odd = (torch.arange(1, H - 1, device=x.device)[:, None] + torch.arange(1, W - 1, device=x.device)) % 2
        for step in range(2 * steps):
            mean = (z[:-2, 1:-1] + z[2:, 1:-1] + z[1:-1, :-2] + z[1:-1, 2:]) * 0.25
            z[1:-1, 1:-1] = torch.where(odd == (1 - step % 2), mean, z[1:-1, 1:-1])
        return z

    return Work(run, y, want)


@triton.jit
def solid_means(x_ptr, y_ptr, A, B, C, BY: tl.constexpr, BX: tl.constexpr):
    """The weighted mean of 27 numbers; x has a border of one, and no size is a multiple of 16."""
    tiles = tl.cdiv(C, BX)
    z = tl.program_id(1)
    y = tl.program_id(0) // tiles * BY + tl.arange(0, BY)[:, None]
    x = tl.program_id(0) % tiles * BX + tl.arange(0, BX)[None, :]
    live = (y < B) & (x < C)
    total = tl.zeros((BY, BX), tl.float32)
    for dz in tl.static_range(3):
        for dy in tl.static_range(3):
            for dx in tl.static_range(3):
                weight = (1 + dz % 2) * (1 + dy % 2) * (1 + dx % 2) / 64  # 1, 2, 1 along each axis
                at = ((z + dz) * (B + 2) + y + dy) * (C + 2) + x + dx
                total += weight * tl.load(x_ptr + at, mask=live, other=0.0)
    tl.store(y_ptr + (z * B + y) * C + x, total, mask=live)


@case("27 points of 253 x 351 x 447 fp32", SOLID, dict(A=253, B=351, C=447), dict(A=3, B=9, C=37))
def _(device, A, B, C):
    x, y = normal(device, A + 2, B + 2, C + 2, dtype=FLOAT), empty(device, A, B, C, dtype=FLOAT)

    def run():
        return solid_means[(triton.cdiv(B, 8) * triton.cdiv(C, 64), A)](x, y, A, B, C, BY=8, BX=64)

    def want():
        line = torch.tensor([0.25, 0.5, 0.25], device=x.device)
        return sum(
            (line[a] * line[b] * line[c]).item() * x[a : a + A, b : b + B, c : c + C]
            for a in range(3)
            for b in range(3)
            for c in range(3)
        )

    return Work(run, y, want)


@triton.jit
def wave(now_ptr, before_ptr, speed_ptr, next_ptr, N, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """A step of a wave, with two neighbors on each side of three axes; a program goes DEPTH planes down a column."""
    P = N + 4
    x, y = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    live = x < N
    for z in range(tl.program_id(2) * DEPTH, tl.program_id(2) * DEPTH + DEPTH):
        at = ((z + 2) * P + y + 2) * P + x + 2
        c = tl.load(now_ptr + at, mask=live, other=0.0)
        near = tl.load(now_ptr + at - 1, mask=live, other=0.0) + tl.load(now_ptr + at + 1, mask=live, other=0.0)
        near += tl.load(now_ptr + at - P, mask=live, other=0.0) + tl.load(now_ptr + at + P, mask=live, other=0.0)
        near += tl.load(now_ptr + at - P * P, mask=live, other=0.0)
        near += tl.load(now_ptr + at + P * P, mask=live, other=0.0)
        far = tl.load(now_ptr + at - 2, mask=live, other=0.0) + tl.load(now_ptr + at + 2, mask=live, other=0.0)
        far += tl.load(now_ptr + at - 2 * P, mask=live, other=0.0)
        far += tl.load(now_ptr + at + 2 * P, mask=live, other=0.0)
        far += tl.load(now_ptr + at - 2 * P * P, mask=live, other=0.0)
        far += tl.load(now_ptr + at + 2 * P * P, mask=live, other=0.0)
        inner = (z * N + y) * N + x
        bend = 1.3333333 * near - 0.083333333 * far - 7.5 * c
        y_ = 2 * c - tl.load(before_ptr + inner, mask=live, other=0.0)
        y_ += tl.load(speed_ptr + inner, mask=live, other=0.0) * bend
        tl.store(next_ptr + inner, y_, mask=live)


@case("a wave of 360 x 360 x 360 fp32, columns of 12 planes", SOLID, dict(N=360, depth=12), dict(N=8, depth=4))
def _(device, N, depth):
    now, before = normal(device, N + 4, N + 4, N + 4, dtype=FLOAT), normal(device, N, N, N, dtype=FLOAT)
    speed, y = normal(device, N, N, N, dtype=FLOAT).sigmoid(), empty(device, N, N, N, dtype=FLOAT)

    def run():
        return wave[(triton.cdiv(N, 128), N, N // depth)](now, before, speed, y, N, DEPTH=depth, BLOCK=128)

    def want():
        def moved(axis, by):
            places = [slice(2, N + 2)] * 3
            places[axis] = slice(2 + by, N + 2 + by)
            return now[tuple(places)]

        near, far = (sum(moved(axis, by) + moved(axis, -by) for axis in range(3)) for by in (1, 2))
        c = moved(0, 0)
        return 2 * c - before + speed * (4 / 3 * near - far / 12 - 7.5 * c)

    return Work(run, y, want)


@triton.jit
def video_to_planes(y_ptr, uv_ptr, out_ptr, H, W, BY: tl.constexpr, BX: tl.constexpr):
    """NV12 to three planes: a byte of light per pixel, and a pair of colors, interleaved, for each four pixels."""
    frame = tl.program_id(2)
    row = tl.program_id(1) * BY + tl.arange(0, BY)[:, None]
    col = tl.program_id(0) * BX + tl.arange(0, BX)[None, :]
    live = (row < H) & (col < W)
    light = tl.load(y_ptr + (frame * H + row) * W + col, mask=live, other=16).to(tl.float32) * 1.164 - 18.624
    pair = uv_ptr + (frame * (H // 2) + row // 2) * W + col // 2 * 2
    u = tl.load(pair, mask=live, other=128).to(tl.float32) - 128
    v = tl.load(pair + 1, mask=live, other=128).to(tl.float32) - 128
    to = out_ptr + (frame * 3 * H + row) * W + col
    half = out_ptr.dtype.element_ty
    tl.store(to, (tl.clamp(light + 1.793 * v, 0.0, 255.0) / 255).to(half), mask=live)
    tl.store(to + H * W, (tl.clamp(light - 0.213 * u - 0.533 * v, 0.0, 255.0) / 255).to(half), mask=live)
    tl.store(to + 2 * H * W, (tl.clamp(light + 2.112 * u, 0.0, 255.0) / 255).to(half), mask=live)


@case("48 frames of 1080 x 1920, NV12 to planes of fp16", VIDEO, dict(B=48, H=1080, W=1920), dict(B=2, H=6, W=40))
def _(device, B, H, W):
    light, uv = known(device, 256, B, H, W, dtype=UINT8), known(device, 256, B, H // 2, W // 2, 2, dtype=UINT8)
    out = empty(device, B, 3, H, W, dtype=HALF)

    def run():
        return video_to_planes[(triton.cdiv(W, 256), triton.cdiv(H, 4), B)](light, uv, out, H, W, BY=4, BX=256)

    def want():
        y = light.float() * 1.164 - 18.624
        u, v = (uv.float() - 128).repeat_interleave(2, 1).repeat_interleave(2, 2).unbind(3)
        return torch.stack([y + 1.793 * v, y - 0.213 * u - 0.533 * v, y + 2.112 * u], 1).clamp(0, 255) / 255

    return Work(run, out, want)
