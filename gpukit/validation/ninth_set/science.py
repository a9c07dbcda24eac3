"""Scientific computing: systems of three diagonals, fields in turn, forces of neighbors, and potentials in float64."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation.new_kernels.case import FLOAT, KI, Work, empty, known, normal, place
from gpukit.validation.ninth_set.case import case

DIAGONALS, FIELDS = "systems of three diagonals", "fields in turn"
NEIGHBORS, CHARGES = "forces of neighbors in lists", "potentials of charges in float64"


@triton.jit
def three_diagonals(
    below_ptr, middle_ptr, above_ptr, x_ptr, share_ptr, part_ptr, y_ptr, n, L: tl.constexpr, BLOCK: tl.constexpr
):
    """A lane solves one of n systems, down and up again. Equation i of all systems lies in row i."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    share, part = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i in range(L):
        below = tl.load(below_ptr + i * n + at)
        factor = 1 / (tl.load(middle_ptr + i * n + at) - below * share)
        share = tl.load(above_ptr + i * n + at) * factor
        part = (tl.load(x_ptr + i * n + at) - below * part) * factor
        tl.store(share_ptr + i * n + at, share)
        tl.store(part_ptr + i * n + at, part)
    y = tl.zeros((BLOCK,), tl.float32)
    for i in range(L):
        row = (L - 1 - i) * n + at
        y = tl.load(part_ptr + row) - tl.load(share_ptr + row) * y
        tl.store(y_ptr + row, y)


@case(
    "65,536 systems of 200 equations with three diagonals fp32, down and up, 64 per program of 2 warps",
    DIAGONALS,
    dict(n=64 * KI, L=200),
    dict(n=128, L=30),
)
def _(device, n, L):
    below, above, x = (normal(device, L, n, dtype=FLOAT) for _ in range(3))
    middle = below.abs() + above.abs() + 1
    share, part, y = (empty(device, L, n, dtype=FLOAT) for _ in range(3))

    def run():
        three_diagonals[(n // 64,)](below, middle, above, x, share, part, y, n, L=L, BLOCK=64, num_warps=2)

    def want():
        shares, parts, out = [torch.zeros(n, device=x.device)], [torch.zeros(n, device=x.device)], []
        for i in range(L):
            factor = 1 / (middle[i] - below[i] * shares[-1])
            parts.append((x[i] - below[i] * parts[-1]) * factor)
            shares.append(above[i] * factor)
        for i in range(L, 0, -1):
            out.append(parts[i] - shares[i] * out[-1] if out else parts[i])
        return torch.stack(out[::-1])

    return Work(run, y, want)


@triton.jit
def magnetic(e_ptr, hx_ptr, hy_ptr, new_hx_ptr, new_hy_ptr, H, W, c, BLOCK: tl.constexpr):
    """Both magnetic fields move with the differences of the electric one, which is 0 beyond the edge."""
    y, x = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, mask = y * W + x, x < W
    e = tl.load(e_ptr + at, mask=mask, other=0.0)
    down = tl.load(e_ptr + at + W, mask=mask & (y < H - 1), other=0.0) - e
    right = tl.load(e_ptr + at + 1, mask=x < W - 1, other=0.0) - e
    tl.store(new_hx_ptr + at, tl.load(hx_ptr + at, mask=mask, other=0.0) - c * down, mask=mask)
    tl.store(new_hy_ptr + at, tl.load(hy_ptr + at, mask=mask, other=0.0) + c * right, mask=mask)


@triton.jit
def electric(e_ptr, hx_ptr, hy_ptr, c_ptr, new_e_ptr, H, W, BLOCK: tl.constexpr):
    """The electric field moves with the differences of the magnetic ones, at a speed that differs from place to place."""
    y, x = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, mask = y * W + x, x < W
    turn = tl.load(hy_ptr + at, mask=mask, other=0.0) - tl.load(hy_ptr + at - 1, mask=mask & (x > 0), other=0.0)
    turn -= tl.load(hx_ptr + at, mask=mask, other=0.0) - tl.load(hx_ptr + at - W, mask=mask & (y > 0), other=0.0)
    e = tl.load(e_ptr + at, mask=mask, other=0.0) + tl.load(c_ptr + at, mask=mask, other=0.0) * turn
    tl.store(new_e_ptr + at, e, mask=mask)


@case(
    "4 steps of electric and magnetic fields of 2999 x 3001 fp32, 8 launches, 512 per program",
    FIELDS,
    dict(H=2999, W=3001),
    dict(H=7, W=600),
)
def _(device, H, W):
    """The first step reads what there is at the beginning, and later ones what they change."""
    start = [normal(device, H, W, dtype=FLOAT) for _ in "exy"]
    speed, (e, hx, hy) = (
        normal(device, H, W, dtype=FLOAT).sigmoid() / 2,
        (empty(device, H, W, dtype=FLOAT) for _ in "exy"),
    )
    grid = triton.cdiv(W, 512), H

    def run():
        old = start
        for _ in range(4):
            magnetic[grid](*old, hx, hy, H, W, 0.5, BLOCK=512)
            electric[grid](old[0], hx, hy, speed, e, H, W, BLOCK=512)
            old = e, hx, hy

    def want():
        f, a, b = (x.double() for x in start)
        pad = torch.nn.functional.pad
        for _ in range(4):
            a, b = a - 0.5 * pad(f, (0, 0, 0, 1)).diff(dim=0), b + 0.5 * pad(f, (0, 1)).diff(dim=1)
            f = f + speed * (pad(b, (1, 0)).diff(dim=1) - pad(a, (0, 0, 1, 0)).diff(dim=0))
        return f, a, b

    return Work(run, (e, hx, hy), want)


@triton.jit
def neighbor_forces(p_ptr, list_ptr, count_ptr, f_ptr, box, n, BLOCK: tl.constexpr):
    """The forces on each atom of those in its list, in a box that repeats. Atoms are four numbers each; the lists' first
    entries lie side by side, then the second ones."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(count_ptr + i)
    x, y, z = tl.load(p_ptr + i * 4), tl.load(p_ptr + i * 4 + 1), tl.load(p_ptr + i * 4 + 2)
    fx, fy, fz = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for turn in range(tl.max(count, 0)):
        live = turn < count
        j = tl.load(list_ptr + turn * n + i, mask=live, other=0)
        dx = x - tl.load(p_ptr + j * 4, mask=live, other=0.0)
        dy = y - tl.load(p_ptr + j * 4 + 1, mask=live, other=0.0)
        dz = z - tl.load(p_ptr + j * 4 + 2, mask=live, other=0.0)
        dx -= box * tl.floor(dx / box + 0.5)
        dy -= box * tl.floor(dy / box + 0.5)
        dz -= box * tl.floor(dz / box + 0.5)
        near = 1 / (dx * dx + dy * dy + dz * dz + 0.8)
        six = near * near * near
        force = tl.where(live, (2 * six - 1) * six * near, 0.0)
        fx += force * dx
        fy += force * dy
        fz += force * dz
    tl.store(f_ptr + i, fx)
    tl.store(f_ptr + n + i, fy)
    tl.store(f_ptr + 2 * n + i, fz)


@case(
    "forces on 384 Ki atoms fp32 of 20 to 75 neighbors in lists, up to 3000 places away, 128 per program",
    NEIGHBORS,
    dict(n=384 * KI, most=76),
    dict(n=256, most=30),
)
def _(device, n, most):
    count = 20 + known("meta", most - 20, n)
    away = known("meta", min(3000, n // 2 - 1), most, n) + 1
    away[1::2] *= -1
    names, count = place(device, (torch.arange(n, dtype=torch.int32) + away) % n), place(device, count)
    p, f = 3 * normal(device, n, 4, dtype=FLOAT), empty(device, 3, n, dtype=FLOAT)

    def want():
        total = torch.zeros(n, 3, dtype=torch.float64, device=p.device)
        for turn in range(most):
            d = (p[:, :3] - p[names[turn].long(), :3]).double()
            d = d - 8.0 * (d / 8.0 + 0.5).floor()
            near = 1 / (d.square().sum(1, keepdim=True) + 0.8)
            force = (2 * near**3 - 1) * near**4 * d
            total += torch.where((turn < count)[:, None], force, 0.0)
        return total.T

    return Work(lambda: neighbor_forces[(n // 128,)](p, names, count, f, 8.0, n, BLOCK=128), f, want)


@triton.jit
def potentials(p_ptr, at_ptr, charge_ptr, y_ptr, n, m, BM: tl.constexpr, BN: tl.constexpr):
    """The potential of m charges at each of n points: tiles of BM points and BN charges, summed at the end."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    x, y, z = tl.load(p_ptr + i), tl.load(p_ptr + n + i), tl.load(p_ptr + 2 * n + i)
    total = tl.zeros((BM, BN), tl.float64)
    for first in range(0, m, BN):
        j = first + tl.arange(0, BN)
        dx = x[:, None] - tl.load(at_ptr + j)[None, :]
        dy = y[:, None] - tl.load(at_ptr + m + j)[None, :]
        dz = z[:, None] - tl.load(at_ptr + 2 * m + j)[None, :]
        total += tl.load(charge_ptr + j)[None, :] / tl.sqrt(dx * dx + dy * dy + dz * dz + 0.01)
    tl.store(y_ptr + i, tl.sum(total, 1))


@case(
    "potentials of 768 charges at 128 Ki points fp64, tiles of 64 x 16",
    CHARGES,
    dict(n=128 * KI, m=768),
    dict(n=128, m=48),
)
def _(device, n, m):
    p, at, charge = (normal(device, *shape, dtype=torch.float64) for shape in ((3, n), (3, m), (m,)))
    charge, y = charge.abs(), empty(device, n, dtype=torch.float64)

    def want():
        total = torch.zeros_like(y)
        for j in range(m):
            total += charge[j] / ((p - at[:, j : j + 1]).square().sum(0) + 0.01).sqrt()
        return total

    return Work(lambda: potentials[(n // 64,)](p, at, charge, y, n, m, BM=64, BN=16), y, want)
