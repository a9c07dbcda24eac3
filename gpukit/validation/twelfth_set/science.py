"""Science: gates of states, densities in cells, sharp waves, cubic fields, farthest points."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, INT32, Work, empty, known, normal, place
from gpukit.validation.twelfth_set.case import case

STATES, CELLS, SHARP = "gates of two bits of a state", "densities of particles in cells", "steps of sharp waves"
FIELDS, FARTHEST = "fields between 64 points", "farthest points one after another"
FLOAT64 = torch.float64


@triton.jit
def two_bit_gate(x_ptr, y_ptr, gate_ptr, SIZE, low, high, BLOCK: tl.constexpr):
    """Of SIZE complex numbers, each four whose places differ in the bits `low` and `high` only are multiplied by a complex
    4 x 4 matrix. Real and imaginary parts lie in planes."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = (at >> low << (low + 1)) | (at & ((1 << low) - 1))
    at = (at >> high << (high + 1)) | (at & ((1 << high) - 1))
    one, two = 1 << low, 1 << high
    a, b, c, d = (
        tl.load(x_ptr + at),
        tl.load(x_ptr + at + one),
        tl.load(x_ptr + at + two),
        tl.load(x_ptr + at + one + two),
    )
    x_ptr += SIZE
    e, f, g, h = (
        tl.load(x_ptr + at),
        tl.load(x_ptr + at + one),
        tl.load(x_ptr + at + two),
        tl.load(x_ptr + at + one + two),
    )
    for i in tl.static_range(4):
        re_ptr, im_ptr = gate_ptr + 4 * i, gate_ptr + 16 + 4 * i
        p, q, r, s = tl.load(re_ptr), tl.load(re_ptr + 1), tl.load(re_ptr + 2), tl.load(re_ptr + 3)
        t, u, v, w = tl.load(im_ptr), tl.load(im_ptr + 1), tl.load(im_ptr + 2), tl.load(im_ptr + 3)
        to = y_ptr + at + (i % 2) * one + (i // 2) * two
        tl.store(to, p * a - t * e + q * b - u * f + r * c - v * g + s * d - w * h)
        tl.store(to + SIZE, p * e + t * a + q * f + u * b + r * g + v * c + s * h + w * d)


@case(
    "four gates of 2 of 24 bits of a state of 16 Mi complex fp32, 4 launches, 256 fours per program, 4 warps",
    STATES,
    dict(bits=24, pairs=((0, 1), (3, 17), (9, 22), (21, 23))),
    dict(bits=11, pairs=((0, 1), (3, 7), (5, 10), (9, 10))),
)
def _(device, bits, pairs):
    size = 1 << bits
    start, one, two = normal(device, 2, size, dtype=FLOAT), *(empty(device, 2, size, dtype=FLOAT) for _ in range(2))
    gates = normal(device, len(pairs), 2, 4, 4, dtype=FLOAT) / 2
    targets = [(one, two)[i % 2] for i in range(len(pairs))]

    def run():
        source = start
        for (low, high), gate, target in zip(pairs, gates, targets, strict=True):
            two_bit_gate[(size // 4 // 256,)](source, target, gate, size, low, high, BLOCK=256, num_warps=4)
            source = target

    def want():
        state = torch.complex(start[0], start[1])
        for (low, high), gate in zip(pairs, gates, strict=True):
            parts = state.view(1 << (bits - high - 1), 2, 1 << (high - low - 1), 2, 1 << low)
            matrix = torch.complex(gate[0], gate[1]).view(2, 2, 2, 2)
            state = torch.einsum("pqrs,arbsc->apbqc", matrix, parts).reshape(size)
        return torch.stack([state.real, state.imag])

    return Work(run, targets[-1], want)


@triton.jit
def densities_in_cells(point_ptr, start_ptr, y_ptr, n, SIDE, reach, factor, MOST: tl.constexpr):
    """A program has one of SIDE x SIDE x SIDE cells, with up to MOST particles. It adds up a bell of the distance to each
    particle of the 27 cells around, where three neighbors along a line lie behind one another."""
    x, y, z, i = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.arange(0, MOST)
    cell = (z * SIDE + y) * SIDE + x
    mine = tl.load(start_ptr + cell) + i
    live = mine < tl.load(start_ptr + cell + 1)
    px = tl.load(point_ptr + mine, mask=live, other=0.0)
    py = tl.load(point_ptr + n + mine, mask=live, other=0.0)
    pz = tl.load(point_ptr + 2 * n + mine, mask=live, other=0.0)
    total = tl.zeros((MOST,), tl.float32)
    for line in range(9):
        up, down = z + line // 3 - 1, y + line % 3 - 1
        if (up >= 0) & (up < SIDE) & (down >= 0) & (down < SIDE):
            row = (up * SIDE + down) * SIDE
            begin = tl.load(start_ptr + row + tl.maximum(x - 1, 0))
            end = tl.load(start_ptr + row + tl.minimum(x + 1, SIDE - 1) + 1)
            for first in range(begin, end, MOST):
                there = first + i < end
                dx = px[:, None] - tl.load(point_ptr + first + i, mask=there, other=1e9)[None, :]
                dy = py[:, None] - tl.load(point_ptr + n + first + i, mask=there, other=1e9)[None, :]
                dz = pz[:, None] - tl.load(point_ptr + 2 * n + first + i, mask=there, other=1e9)[None, :]
                near = tl.maximum(reach - (dx * dx + dy * dy + dz * dz), 0.0)
                total += tl.sum(near * near * near, 1)
    tl.store(y_ptr + mine, total * factor, mask=live)


@case(
    "densities of particles in 32 x 32 x 32 cells of 0 to 31 each fp32, 27 cells around, one cell per program of 1 warp",
    CELLS,
    dict(side=32),
    dict(side=4),
)
def _(device, side):
    count = known("meta", 32, side**3).long()
    start = F.pad(count.cumsum(0), (1, 0))
    cell, n = torch.arange(side**3).repeat_interleave(count), int(start[-1])
    corner = torch.stack([cell % side, cell // side % side, cell // side**2]).float().to(device)
    point, y, where = (
        normal(device, 3, n, dtype=FLOAT).sigmoid() + corner,
        empty(device, n, dtype=FLOAT),
        place(device, start.int()),
    )

    def run():
        densities_in_cells[(side, side, side)](point, where, y, n, side, 1.0, 1.5667, MOST=32, num_warps=1)

    def want():
        # All cells at a time, 32 places each of which may be empty, and one shift of the grid after another.
        grid = torch.full((3, side + 2, side + 2, side + 2, 32), 1e9, device=y.device)
        place_in = torch.arange(n) - start[:-1].repeat_interleave(count)
        x, row, plane = cell % side + 1, cell // side % side + 1, cell // side**2 + 1
        at = tuple(a.to(y.device) for a in (plane, row, x, place_in))
        grid[(slice(None), *at)] = point
        out = torch.zeros(n, device=y.device)
        for shift in range(27):
            to = (at[0] + shift // 9 - 1, at[1] + shift // 3 % 3 - 1, at[2] + shift % 3 - 1)
            for i in range(0, n, 1 << 18):
                part = slice(i, i + (1 << 18))
                around = grid[(slice(None), *(a[part] for a in to))]
                away = (around - point[:, part, None]).square().sum(0)
                out[part] += (1 - away).clamp(min=0).pow(3).sum(1)
        return out * 1.5667

    return Work(run, y, want)


@triton.jit
def upwind_face(a, b, c, d, e):
    """What a wave has between its third and fourth of five cells: three parabolas, each of which weighs the less the less
    smooth it is."""
    one, two, three = (2 * a - 7 * b + 11 * c) / 6, (-b + 5 * c + 2 * d) / 6, (2 * c + 5 * d - e) / 6
    p, q, r = a - 2 * b + c, b - 2 * c + d, c - 2 * d + e
    s, t, u = a - 4 * b + 3 * c, b - d, 3 * c - 4 * d + e
    s, t, u = 13 / 12 * p * p + s * s / 4 + 1e-6, 13 / 12 * q * q + t * t / 4 + 1e-6, 13 / 12 * r * r + u * u / 4 + 1e-6
    s, t, u = 0.1 / (s * s), 0.6 / (t * t), 0.3 / (u * u)
    return (s * one + t * two + u * three) / (s + t + u)


@triton.jit
def sharp_step(x_ptr, y_ptr, N, share, BLOCK: tl.constexpr):
    """A step of waves that move to the right, whose lines close to rings."""
    i, line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    live = i < N
    a = tl.load(x_ptr + line * N + (i + N - 3) % N, mask=live)
    b = tl.load(x_ptr + line * N + (i + N - 2) % N, mask=live)
    c = tl.load(x_ptr + line * N + (i + N - 1) % N, mask=live)
    d = tl.load(x_ptr + line * N + i, mask=live)
    e = tl.load(x_ptr + line * N + (i + 1) % N, mask=live)
    f = tl.load(x_ptr + line * N + (i + 2) % N, mask=live)
    y = d - share * (upwind_face(b, c, d, e, f) - upwind_face(a, b, c, d, e))
    tl.store(y_ptr + line * N + i, y, mask=live)


@case(
    "a step of 2500 lines of 4999 waves fp64, weighted parabolas of five cells, 128 per program, 4 warps",
    SHARP,
    dict(lines=2500, N=4999),
    dict(lines=3, N=150),
)
def _(device, lines, N):
    """Triton hands a number of Python's to a kernel as float32, in which 0.375 is exact."""
    x, y = normal(device, lines, N, dtype=FLOAT64), empty(device, lines, N, dtype=FLOAT64)

    def run():
        sharp_step[(triton.cdiv(N, 128), lines)](x, y, N, 0.375, BLOCK=128, num_warps=4)

    def want():
        a, b, c, d, e = (x.roll(k, 1) for k in (2, 1, 0, -1, -2))
        parts = (2 * a - 7 * b + 11 * c) / 6, (-b + 5 * c + 2 * d) / 6, (2 * c + 5 * d - e) / 6
        rough = (
            13 / 12 * (a - 2 * b + c) ** 2 + (a - 4 * b + 3 * c) ** 2 / 4,
            13 / 12 * (b - 2 * c + d) ** 2 + (b - d) ** 2 / 4,
            13 / 12 * (c - 2 * d + e) ** 2 + (3 * c - 4 * d + e) ** 2 / 4,
        )
        weights = [share / (r + 1e-6) ** 2 for share, r in zip((0.1, 0.6, 0.3), rough, strict=True)]
        face = sum(w * p for w, p in zip(weights, parts, strict=True)) / sum(weights)
        return x - 0.375 * (face - face.roll(1, 1))

    return Work(run, y, want)


@triton.jit
def spline(t, K: tl.constexpr):
    """How much point K of four around weighs, of which a place lies t behind the second."""
    if K == 0:
        w = (1 - t) * (1 - t) * (1 - t)
    elif K == 1:
        w = 4 + t * t * (3 * t - 6)
    elif K == 2:
        w = 1 + t * (3 + t * (3 - 3 * t))
    else:
        w = t * t * t
    return w / 6


@triton.jit
def cubic_field(place_ptr, field_ptr, y_ptr, n, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A field at places between the points of its grid, which closes to a ring in all directions: 64 points around a place
    weigh by a cubic spline."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    x, y = tl.load(place_ptr + at, mask=live, other=0.0), tl.load(place_ptr + n + at, mask=live, other=0.0)
    z = tl.load(place_ptr + 2 * n + at, mask=live, other=0.0)
    i, j, k = x.to(tl.int32), y.to(tl.int32), z.to(tl.int32)
    x, y, z = x - i, y - j, z - k
    total = tl.zeros((BLOCK,), tl.float32)
    for c in tl.static_range(4):
        for b in tl.static_range(4):
            row = ((k + (c - 1)) % SIDE * SIDE + (j + (b - 1)) % SIDE) * SIDE
            line = tl.zeros((BLOCK,), tl.float32)
            for a in tl.static_range(4):
                line += spline(x, a) * tl.load(field_ptr + row + (i + (a - 1)) % SIDE, mask=live, other=0.0)
            total += spline(y, b) * spline(z, c) * line
    tl.store(y_ptr + at, total, mask=live)


@case(
    "fields of 128 x 128 x 128 points at 1,000,001 places fp32, 64 points around each, any order, 128 per program, 4 warps",
    FIELDS,
    dict(n=1_000_001, side=128),
    dict(n=300, side=8),
)
def _(device, n, side):
    """No place lies in the first cell of a direction, as the remainder of -1 is not that of a ring."""
    where = known("meta", 1 << 23, 3, n).float() / (1 << 23) * (side - 1) + 1
    where = place(device, where.clamp(max=side - 1e-3))
    field, y = normal(device, side, side, side, dtype=FLOAT), empty(device, n, dtype=FLOAT)

    def run():
        cubic_field[(triton.cdiv(n, 128),)](where, field, y, n, SIDE=side, BLOCK=128, num_warps=4)

    def want():
        at = where.to(y.device).double()
        cell, t = at.long(), at - at.long()
        weights = [(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, 1 + 3 * t + 3 * t**2 - 3 * t**3, t**3]
        out = torch.zeros(n, device=y.device, dtype=FLOAT64)
        for a in range(4):
            for b in range(4):
                for c in range(4):
                    x, row, plane = ((cell[i] + k - 1) % side for i, k in enumerate((a, b, c)))
                    out += weights[a][0] * weights[b][1] * weights[c][2] * field[plane, row, x] / 216
        return out

    return Work(run, y, want)


@triton.jit
def farthest_points(x_ptr, y_ptr, STEPS, N: tl.constexpr):
    """Point 0 of a cloud, and after it always the point that is farthest from all that were chosen: each step waits for the
    one before. The cloud stays in registers, three planes of N."""
    cloud, i = tl.program_id(0), tl.arange(0, N)
    px, py = tl.load(x_ptr + cloud * 3 * N + i), tl.load(x_ptr + cloud * 3 * N + N + i)
    pz = tl.load(x_ptr + cloud * 3 * N + 2 * N + i)
    away, last = tl.full((N,), 1e30, tl.float32), cloud * 0
    for step in range(STEPS):
        tl.store(y_ptr + cloud * STEPS + step, last)
        chosen = i == last
        dx = px - tl.sum(tl.where(chosen, px, 0.0), 0)
        dy = py - tl.sum(tl.where(chosen, py, 0.0), 0)
        dz = pz - tl.sum(tl.where(chosen, pz, 0.0), 0)
        away = tl.minimum(away, dx * dx + dy * dy + dz * dz)
        last = tl.argmax(away, 0)


@case(
    "200 farthest points of 100 clouds of 8192 points fp32, one cloud per program of 16 warps",
    FARTHEST,
    dict(clouds=100, steps=200, N=8192),
    dict(clouds=3, steps=12, N=256),
)
def _(device, clouds, steps, N):
    """Coordinates are whole numbers, so that distances are exact; of equal ones the first point is chosen."""
    x, y = known(device, 2000, clouds, 3, N).float(), empty(device, clouds, steps, dtype=INT32)

    def run():
        farthest_points[(clouds,)](x, y, steps, N=N, num_warps=16)

    def want():
        points, i = x.to(y.device).long(), torch.arange(N, device=y.device)
        away, last, out = torch.full((clouds, N), 1 << 40, device=y.device), torch.zeros_like(y[:, 0]).long(), []
        for _ in range(steps):
            out.append(last)
            mine = points.gather(2, last[:, None, None].expand(clouds, 3, 1))
            away = torch.minimum(away, (points - mine).square().sum(1))
            last = N - 1 - (away * N + (N - 1 - i)).amax(1) % N
        return torch.stack(out, 1)

    return Work(run, y, want)
