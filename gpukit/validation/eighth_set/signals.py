"""Sound, images and science: taps, recurrences, transforms, flows, ends and frames, long rows, bytes, and linear systems."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.eighth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, MI, UINT8, Work, empty, normal

TAPS, STATES, COSINES = "31 taps of channels", "recurrences of complex states", "cosine transforms of 8 x 8"
FLOWS, ENDS, FRAMES = "flows on a lattice", "reflections at both ends", "frames of sound"
LONG, BYTES, SYSTEMS = "running sums of long rows", "bytes of many short programs", "conjugate gradients"


@triton.jit
def many_taps(x_ptr, w_ptr, y_ptr, T, C, TAPS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """SiLU of a weighted sum of TAPS tokens around each one, with weights for each channel; nothing lies beyond the ends."""
    t, c = tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros((BT, BC), tl.float32)
    for i in tl.static_range(TAPS):
        s = t + i - TAPS // 2
        x = tl.load(
            x_ptr + (tl.program_id(2) * T + s)[:, None] * C + c[None, :], mask=((s >= 0) & (s < T))[:, None], other=0.0
        )
        total += x.to(tl.float32) * tl.load(w_ptr + i * C + c)[None, :]
    y = total * tl.sigmoid(total)
    at = (tl.program_id(2) * T + t)[:, None] * C + c[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=(t < T)[:, None])


@case(
    "31 taps of 768 channels and SiLU, 16 sequences of 1999 tokens fp16, tiles of 16 x 64",
    TAPS,
    dict(B=16, T=1999, C=768),
    dict(B=2, T=41, C=64),
)
def _(device, B, T, C):
    x, w, y = (
        normal(device, B, T, C, dtype=HALF),
        normal(device, 31, C, dtype=FLOAT) / 4,
        empty(device, B, T, C, dtype=HALF),
    )

    def run():
        many_taps[(C // 64, triton.cdiv(T, 16), B)](x, w, y, T, C, TAPS=31, BT=16, BC=64)

    def want():
        return F.silu(F.conv1d(x.float().transpose(1, 2), w.T[:, None], padding=15, groups=C)).transpose(1, 2)

    return Work(run, y, want)


@triton.jit
def join_complex(ar, ai, br, bi, cr, ci, dr, di):
    """First h -> a h + b, then h -> c h + d, of complex numbers."""
    return cr * ar - ci * ai, cr * ai + ci * ar, cr * br - ci * bi + dr, cr * bi + ci * br + di


@triton.jit
def complex_states(xr_ptr, xi_ptr, ar_ptr, ai_ptr, yr_ptr, yi_ptr, T, C, BT: tl.constexpr, BC: tl.constexpr):
    """h = a h + x of complex numbers, with an a for each channel: BT tokens by a scan, then the next ones."""
    t, c = tl.arange(0, BT), tl.program_id(0) * BC + tl.arange(0, BC)
    ar = tl.zeros((BT, BC), tl.float32) + tl.load(ar_ptr + c)[None, :]
    ai = tl.zeros((BT, BC), tl.float32) + tl.load(ai_ptr + c)[None, :]
    hr, hi = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    last = (t == BT - 1)[:, None]
    for first in range(0, T, BT):
        at = (tl.program_id(1) * T + first + t)[:, None] * C + c[None, :]
        pr, pi, yr, yi = tl.associative_scan((ar, ai, tl.load(xr_ptr + at), tl.load(xi_ptr + at)), 0, join_complex)
        yr, yi = yr + pr * hr[None, :] - pi * hi[None, :], yi + pr * hi[None, :] + pi * hr[None, :]
        tl.store(yr_ptr + at, yr)
        tl.store(yi_ptr + at, yi)
        hr, hi = tl.sum(tl.where(last, yr, 0.0), 0), tl.sum(tl.where(last, yi, 0.0), 0)


@case(
    "complex recurrences of 2048 channels, 8 sequences of 1024 tokens fp32, by scans of 64 tokens",
    STATES,
    dict(B=8, T=1024, C=2048),
    dict(B=2, T=192, C=64),
)
def _(device, B, T, C):
    x, y = (
        [normal(device, B, T, C, dtype=FLOAT) for _ in "ri"],
        tuple(empty(device, B, T, C, dtype=FLOAT) for _ in "ri"),
    )
    size, angle = 0.9 + normal(device, C, dtype=FLOAT).sigmoid() / 11, normal(device, C, dtype=FLOAT)
    a = size * angle.cos(), size * angle.sin()

    def want():
        factor, h = torch.complex(*a), torch.zeros(B, C, dtype=torch.complex64, device=angle.device)
        out = torch.empty(B, T, C, dtype=torch.complex64, device=angle.device)
        for t in range(T):
            h = factor * h + torch.complex(x[0][:, t], x[1][:, t])
            out[:, t] = h
        return out.real, out.imag

    return Work(lambda: complex_states[(C // 32, B)](*x, *a, *y, T, C, BT=64, BC=32), y, want)


@triton.jit
def cosine_blocks(x_ptr, c_ptr, y_ptr, W, B: tl.constexpr):
    """c x c^T for B blocks x of 8 x 8 pixels, which lie side by side: down the columns first, and then along the rows."""
    i, j, k = tl.arange(0, 8), tl.arange(0, B * 8), tl.arange(0, 8)
    at = (tl.program_id(1) * 8 + i)[:, None] * W + tl.program_id(0) * B * 8 + j[None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    c = tl.load(c_ptr + i[:, None] * 8 + k[None, :])
    x = tl.reshape(tl.sum(c[:, :, None] * x[None, :, :], 1), (B * 8, 8))
    y = tl.sum(x[:, None, :] * c[None, :, :], 2)
    tl.store(y_ptr + at, tl.reshape(y, (8, B * 8)).to(y_ptr.dtype.element_ty))


@case(
    "cosine transforms of 8 x 8 pixels of 12 pictures of 2160 x 3840 bytes to fp16, 16 blocks side by side",
    COSINES,
    dict(H=12 * 2160, W=3840),
    dict(H=16, W=256),
)
def _(device, H, W):
    x, y = normal(device, H, W, dtype=torch.int8).view(UINT8), empty(device, H, W, dtype=HALF)
    k = torch.arange(8)
    table = (torch.cos((2 * k + 1) * k[:, None] * math.pi / 16) / 2).float()
    table[0] /= math.sqrt(2)
    c = table.to(device)

    def want():
        blocks = x.float().view(H // 8, 8, W // 8, 8).transpose(1, 2)
        return (c @ blocks @ c.T).transpose(1, 2).reshape(H, W)

    return Work(lambda: cosine_blocks[(W // 128, H // 8)](x, c, y, W, B=16), y, want)


@triton.jit
def flow(f_ptr, g_ptr, rate, H, W, BLOCK: tl.constexpr):
    """A step of a lattice Boltzmann method: nine numbers come from nine neighbors, and move toward their equilibrium."""
    y, x = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = x < W
    mass, right, down = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(9):
        at = (i * H + (y + H + 1 - i // 3) % H) * W + (x + W + 1 - i % 3) % W
        f = tl.load(f_ptr + at, mask=mask, other=1.0)
        mass += f
        right += (i % 3 - 1) * f
        down += (i // 3 - 1) * f
    right, down = right / mass, down / mass
    slow = 1 - 1.5 * (right * right + down * down)
    for i in tl.static_range(9):
        at = (i * H + (y + H + 1 - i // 3) % H) * W + (x + W + 1 - i % 3) % W
        f = tl.load(f_ptr + at, mask=mask, other=1.0)
        along = 3 * ((i % 3 - 1) * right + (i // 3 - 1) * down)
        weight = (4 if i % 3 == 1 else 1) * (4 if i // 3 == 1 else 1) / 36
        rest = weight * mass * (slow + along + along * along / 2)
        tl.store(g_ptr + (i * H + y) * W + x, f + rate * (rest - f), mask=mask)


@case(
    "a step of a flow of nine planes of 2400 x 3001 fp32, rows of 256 per program",
    FLOWS,
    dict(H=2400, W=3001),
    dict(H=5, W=300),
)
def _(device, H, W):
    f, g = normal(device, 9, H, W, dtype=FLOAT).sigmoid() + 1, empty(device, 9, H, W, dtype=FLOAT)

    def want():
        across, along = torch.arange(9, device=f.device) % 3 - 1, torch.arange(9, device=f.device) // 3 - 1
        come = torch.stack([f[i].roll((int(along[i]), int(across[i])), (0, 1)) for i in range(9)])
        mass = come.sum(0)
        u, v = ((come * way[:, None, None]).sum(0) / mass for way in (across, along))
        e = 3 * (across[:, None, None] * u + along[:, None, None] * v)
        weight = torch.tensor([1, 4, 1, 4, 16, 4, 1, 4, 1], device=f.device)[:, None, None] / 36
        return torch.lerp(come, weight * mass * (1 + e + e * e / 2 - 1.5 * (u * u + v * v)), 0.6)

    return Work(lambda: flow[(triton.cdiv(W, 256), H)](f, g, 0.6, H, W, BLOCK=256, num_warps=2), g, want)


@triton.jit
def reflect(x_ptr, y_ptr, n, PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Adds PAD samples at both ends, which mirror those next to the first and to the last sample."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.abs(at - PAD)
    source = n - 1 - tl.abs(n - 1 - source)
    mask = at < n + 2 * PAD
    x = tl.load(x_ptr + tl.program_id(1) * n + source, mask=mask, other=0.0)
    tl.store(y_ptr + tl.program_id(1) * (n + 2 * PAD) + at, x, mask=mask)


@case(
    "200 tracks of 480,001 samples fp16, 201 more at both ends by reflection, 4 warps",
    ENDS,
    dict(M=200, n=480_001, pad=201),
    dict(M=3, n=1501, pad=201),
)
def _(device, M, n, pad):
    x, y = normal(device, M, n, dtype=HALF), empty(device, M, n + 2 * pad, dtype=HALF)

    def run():
        reflect[(triton.cdiv(n + 2 * pad, 1024), M)](x, y, n, PAD=pad, BLOCK=1024)

    return Work(run, y, lambda: F.pad(x.float()[None], (pad, pad), "reflect")[0])


@triton.jit
def sound_frames(x_ptr, w_ptr, y_ptr, n, FRAMES, SIZE: tl.constexpr, HOP: tl.constexpr, R: tl.constexpr):
    """R frames of SIZE samples, which begin HOP samples apart. Their means are taken away, and a window scales them."""
    frame, i = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, triton.next_power_of_2(SIZE))
    mask = (frame < FRAMES)[:, None] & (i < SIZE)[None, :]
    x = tl.load(x_ptr + tl.program_id(1) * n + frame[:, None] * HOP + i[None, :], mask=mask, other=0.0)
    x -= (tl.sum(x, 1) / SIZE)[:, None]
    x *= tl.load(w_ptr + i, mask=i < SIZE, other=0.0)[None, :]
    at = (tl.program_id(1) * FRAMES + frame)[:, None] * SIZE + i[None, :]
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=mask)


@case(
    "frames of 400 samples, 160 apart, of 128 tracks of 480,000 fp32 to fp16, 4 frames per program of 2 warps",
    FRAMES,
    dict(M=128, n=480_000),
    dict(M=2, n=2000),
)
def _(device, M, n):
    frames = (n - 400) // 160 + 1
    x, w, y = (
        normal(device, M, n, dtype=FLOAT),
        torch.hann_window(400, device=device),
        empty(device, M, frames, 400, dtype=HALF),
    )

    def run():
        sound_frames[(triton.cdiv(frames, 4), M)](x, w, y, n, frames, SIZE=400, HOP=160, R=4, num_warps=2)

    def want():
        z = x.unfold(1, 400, 160)
        return (z - z.mean(2, keepdim=True)) * w

    return Work(run, y, want)


@triton.jit
def long_sums(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """A program computes the running sums of a long row: each block begins with the sum of those before it."""
    row, before = tl.program_id(0).to(tl.int64) * n, 0.0
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, mask=at < n, other=0.0)
        tl.store(y_ptr + row + at, before + tl.cumsum(x, 0), mask=at < n)
        before += tl.sum(x, 0)


@case(
    "running sums of 40 rows of 500,001 fp32, one program each, 4096 at a time, 16 warps",
    LONG,
    dict(M=40, n=500_001),
    dict(M=2, n=10_001),
)
def _(device, M, n):
    x, y = normal(device, M, n, dtype=FLOAT), empty(device, M, n, dtype=FLOAT)
    return Work(lambda: long_sums[(M,)](x, y, n, BLOCK=4096, num_warps=16), y, lambda: x.double().cumsum(1))


@triton.jit
def exclusive_or(x_ptr, key_ptr, y_ptr, BLOCK: tl.constexpr):
    """Four bytes per lane of one warp, with the bytes of a key that all programs share."""
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0) * BLOCK + i
    tl.store(y_ptr + at, tl.load(x_ptr + at) ^ tl.load(key_ptr + i))


@case("128 Mi bytes with a key of 128 bytes, 128 per program of 1 warp", BYTES, dict(n=128 * MI), dict(n=1024))
def _(device, n):
    x, key, y = (
        make(device, size, dtype=torch.int8).view(UINT8) for make, size in ((normal, n), (normal, 128), (empty, n))
    )

    def run():
        exclusive_or[(n // 128,)](x, key, y, BLOCK=128, num_warps=1)

    return Work(run, y, lambda: (x.view(-1, 128) ^ key).view(-1))


@triton.jit
def apply_matrix(p_ptr, ap_ptr, part_ptr, W: tl.constexpr):
    """A row of 5 p minus the four neighbors of p, and its part of p times that; nothing lies beyond the edge."""
    y, x = tl.program_id(0), tl.arange(0, W)
    at = p_ptr + y * W + x
    p = tl.load(at)
    ap = 5 * p - tl.load(at - 1, mask=x > 0, other=0.0) - tl.load(at + 1, mask=x < W - 1, other=0.0)
    ap -= tl.load(at - W, mask=(x >= 0) & (y > 0), other=0.0)
    ap -= tl.load(at + W, mask=(x >= 0) & (y < tl.num_programs(0) - 1), other=0.0)
    tl.store(ap_ptr + y * W + x, ap)
    tl.store(part_ptr + y, tl.sum(p * ap, 0))


@triton.jit
def squares(r_ptr, part_ptr, W: tl.constexpr):
    """A row's part of r times r."""
    r = tl.load(r_ptr + tl.program_id(0) * W + tl.arange(0, W))
    tl.store(part_ptr + tl.program_id(0), tl.sum(r * r, 0))


@triton.jit
def sum_of(part_ptr, PARTS: tl.constexpr):
    """The sum of all parts, which each program computes for itself."""
    return tl.sum(tl.load(part_ptr + tl.arange(0, PARTS)), 0)


@triton.jit
def move(
    x_ptr, r_ptr, p_ptr, ap_ptr, rr_ptr, pap_ptr, new_x_ptr, new_r_ptr, part_ptr, W: tl.constexpr, PARTS: tl.constexpr
):
    """A row of x + a p and of r - a A p, and its part of the new r times r."""
    at = tl.program_id(0) * W + tl.arange(0, W)
    a = sum_of(rr_ptr, PARTS) / sum_of(pap_ptr, PARTS)
    tl.store(new_x_ptr + at, tl.load(x_ptr + at) + a * tl.load(p_ptr + at))
    r = tl.load(r_ptr + at) - a * tl.load(ap_ptr + at)
    tl.store(new_r_ptr + at, r)
    tl.store(part_ptr + tl.program_id(0), tl.sum(r * r, 0))


@triton.jit
def turn(r_ptr, p_ptr, rr_ptr, new_rr_ptr, new_p_ptr, W: tl.constexpr, PARTS: tl.constexpr):
    """A row of the next direction, r + b p."""
    at = tl.program_id(0) * W + tl.arange(0, W)
    b = sum_of(new_rr_ptr, PARTS) / sum_of(rr_ptr, PARTS)
    tl.store(new_p_ptr + at, tl.load(r_ptr + at) + b * tl.load(p_ptr + at))


@case(
    "2 steps of conjugate gradients on 2048 x 4096 fp32, 7 launches, 8 warps",
    SYSTEMS,
    dict(H=2048, W=4096),
    dict(H=16, W=64),
)
def _(device, H, W):
    b, zero, ap = normal(device, H, W, dtype=FLOAT), empty(device, H, W, dtype=FLOAT), empty(device, H, W, dtype=FLOAT)
    x, r, p = ([empty(device, H, W, dtype=FLOAT) for _ in range(2)] for _ in range(3))
    rr, pap = [empty(device, H, dtype=FLOAT) for _ in range(3)], empty(device, H, dtype=FLOAT)

    def run():
        squares[(H,)](b, rr[0], W=W, num_warps=8)
        before = zero, b, b
        for i in range(2):
            apply_matrix[(H,)](before[2], ap, pap, W=W, num_warps=8)
            move[(H,)](*before, ap, rr[i], pap, x[i], r[i], rr[i + 1], W=W, PARTS=H, num_warps=8)
            turn[(H,)](r[i], before[2], rr[i], rr[i + 1], p[i], W=W, PARTS=H, num_warps=8)
            before = x[i], r[i], p[i]

    def want():
        found, rest, way = torch.zeros_like(b), b, b
        for _ in range(2):
            wide = F.pad(way, (1, 1, 1, 1))
            after = 5 * way - wide[:-2, 1:-1] - wide[2:, 1:-1] - wide[1:-1, :-2] - wide[1:-1, 2:]
            a = rest.square().sum() / (way * after).sum()
            found, old, rest = found + a * way, rest, rest - a * after
            way = rest + rest.square().sum() / old.square().sum() * way
        return found, way

    return Work(run, (x[1], p[1]), want)
