"""Parts of models: turns by three positions, tanh for a norm, quantiles, rows of experts, ranked lists, simplexes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import BF16, FLOAT, INT8, KI, Work, empty, known, normal, place
from gpukit.validation.twelfth_set.case import case

POSITIONS, BENT = "rotations by three positions", "gradients of tanh in place of a norm"
QUANTILES, EXPERTS = "losses of quantiles", "gates of as many rows as an expert has"
RANKED, SIMPLEXES = "losses of ranked lists", "projections on a simplex"


@triton.jit
def turn_by_three(
    x_ptr, cos_ptr, sin_ptr, position_ptr, y_ptr, T, ROW, FIRST: tl.constexpr, SECOND: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """The halves of HEADS heads of a token are turned against each other. A token has a time, a row and a column: the first
    FIRST angles of a head belong to the time, those up to SECOND to the row, and the others to the column."""
    token, head, i = tl.program_id(0), tl.arange(0, HEADS), tl.arange(0, D // 2)
    which = (i >= FIRST).to(tl.int32) + (i >= SECOND).to(tl.int32)
    at = tl.load(position_ptr + which * T + token) * (D // 2) + i
    cos, sin = tl.load(cos_ptr + at)[None, :], tl.load(sin_ptr + at)[None, :]
    place = head[:, None] * D + i[None, :]
    one = tl.load(x_ptr + token * ROW + place).to(tl.float32)
    two = tl.load(x_ptr + token * ROW + place + D // 2).to(tl.float32)
    y = y_ptr + token * HEADS * D + place
    tl.store(y, (one * cos - two * sin).to(y_ptr.dtype.element_ty))
    tl.store(y + D // 2, (two * cos + one * sin).to(y_ptr.dtype.element_ty))


@case(
    "32 heads of 128 of rows of 36 turned by three positions of 25,001 tokens bf16, tables fp32, 4 warps",
    POSITIONS,
    dict(T=25_001, heads=32, D=128, first=16, second=40),
    dict(T=50, heads=4, D=32, first=4, second=10),
)
def _(device, T, heads, D, first, second):
    """Positions are those of pictures of 40 x 50 patches, one after another; the last 4 heads of a row are values."""
    token = torch.arange(T)
    position = place(device, torch.stack([token // 2000, token % 2000 // 50, token % 50]).int())
    angle = torch.arange(64)[:, None] * 100.0 ** (-torch.arange(D // 2) / (D // 2))
    cos, sin, row = angle.cos().to(device), angle.sin().to(device), (heads + 4) * D
    x, y = normal(device, T, row), empty(device, T, heads, D)

    def run():
        turn_by_three[(T,)](x, cos, sin, position, y, T, row, FIRST=first, SECOND=second, HEADS=heads, D=D, num_warps=4)

    def want():
        at, i = position.to(y.device).long(), torch.arange(D // 2, device=y.device)
        which = (i >= first).long() + (i >= second).long()
        c, s = (table[at[which].T, i][:, None] for table in (cos, sin))
        one, two = x[:, : heads * D].float().view(T, heads, D).chunk(2, 2)
        return torch.cat([one * c - two * s, two * c + one * s], 2)

    return Work(run, y, want)


@triton.jit
def bent_gradients(
    x_ptr, g_ptr, scale_ptr, dx_ptr, part_ptr, heat_ptr, heat, M, N, ROWS, BM: tl.constexpr, BN: tl.constexpr
):
    """Of scale * tanh(heat * x) + shift, the gradients of x, of ROWS rows' share in scale and shift, and of heat, which all
    programs add to by an atomic each."""
    n, part = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
    to_scale, to_shift, to_heat = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for first in range(part * ROWS, tl.minimum((part + 1) * ROWS, M), BM):
        m = first + tl.arange(0, BM)
        at, live = m[:, None] * N + n[None, :], (m < tl.minimum((part + 1) * ROWS, M))[:, None] & (n < N)[None, :]
        x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + at, mask=live, other=0.0).to(tl.float32)
        y = 2 * tl.sigmoid(2 * heat * x) - 1
        inner = g * scale * (1 - y * y)
        to_scale, to_shift, to_heat = (
            to_scale + tl.sum(g * y, 0),
            to_shift + tl.sum(g, 0),
            to_heat + tl.sum(inner * x, 0),
        )
        tl.store(dx_ptr + at, (inner * heat).to(dx_ptr.dtype.element_ty), mask=live)
    tl.store(part_ptr + part * 2 * N + n, to_scale, mask=n < N)
    tl.store(part_ptr + part * 2 * N + N + n, to_shift, mask=n < N)
    tl.atomic_add(heat_ptr, tl.sum(to_heat, 0), sem="relaxed")


@triton.jit
def add_parts(part_ptr, y_ptr, PARTS, N, BP: tl.constexpr, BN: tl.constexpr):
    """Sums of columns."""
    p, n = tl.arange(0, BP), tl.program_id(0) * BN + tl.arange(0, BN)
    live = (p < PARTS)[:, None] & (n < N)[None, :]
    tl.store(y_ptr + n, tl.sum(tl.load(part_ptr + p[:, None] * N + n[None, :], mask=live, other=0.0), 0), mask=n < N)


@case(
    "gradients of tanh of 20,001 rows of 3600 bf16, scales and shifts in 66 parts and their sum, 4 x 512 at a time, 4 warps",
    BENT,
    dict(M=20_001, N=3600, parts=66),
    dict(M=45, N=100, parts=4),
)
def _(device, M, N, parts):
    """The gradient of the one factor in front of x is not cleared by what is measured."""
    x, g, dx, heat = normal(device, M, N), normal(device, M, N), empty(device, M, N), 0.7
    scale, part = normal(device, N, dtype=FLOAT), empty(device, parts, 2, N, dtype=FLOAT)
    to_scale, to_heat, rows = empty(device, 2, N, dtype=FLOAT), empty(device, 1, dtype=FLOAT), triton.cdiv(M, parts)

    def run():
        bent_gradients[(triton.cdiv(N, 512), parts)](
            x, g, scale, dx, part, to_heat, heat, M, N, rows, BM=4, BN=512, num_warps=4
        )
        add_parts[(triton.cdiv(2 * N, 64),)](
            part, to_scale, parts, 2 * N, BP=triton.next_power_of_2(parts), BN=64, num_warps=4
        )

    def want():
        z, up = x.float(), g.float()
        y = (heat * z).tanh()
        inner = up * scale * (1 - y * y)
        return inner * heat, torch.stack([(up * y).sum(0), up.sum(0)]), (inner * z).double().sum()[None]

    return Work(run, (dx, to_scale, to_heat), want)


@triton.jit
def quantile_losses(x_ptr, target_ptr, loss_ptr, dx_ptr, N, BN: tl.constexpr, BT: tl.constexpr):
    """Each of N quantiles of a sample is compared with each of N targets: a Huber loss, which weighs more on the side on
    which the quantile should be. Losses and gradients."""
    sample, i = tl.program_id(0), tl.arange(0, BN)
    x = tl.load(x_ptr + sample * N + i, mask=i < N, other=0.0)
    share = (i + 0.5) / N
    total, dx = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for first in range(0, N, BT):
        j = first + tl.arange(0, BT)
        target = tl.load(target_ptr + sample * N + j, mask=j < N, other=0.0)
        away = target[None, :] - x[:, None]
        near = tl.minimum(tl.maximum(away, -1.0), 1.0)
        weight = tl.where(j[None, :] < N, tl.abs(share[:, None] - (away < 0).to(tl.float32)), 0.0)
        total += tl.sum(weight * near * (away - 0.5 * near), 1)
        dx -= tl.sum(weight * near, 1)
    tl.store(loss_ptr + sample, tl.sum(tl.where(i < N, total, 0.0), 0) / N)
    tl.store(dx_ptr + sample * N + i, dx / N, mask=i < N)


@case(
    "losses and gradients of 200 quantiles and 200 targets of 8000 samples fp32, tiles of 256 x 16, 4 warps",
    QUANTILES,
    dict(M=8000, N=200),
    dict(M=5, N=21),
)
def _(device, M, N):
    x, target, dx = (normal(device, M, N, dtype=FLOAT) for _ in range(3))
    loss = empty(device, M, dtype=FLOAT)

    def run():
        quantile_losses[(M,)](x, target, loss, dx, N, BN=triton.next_power_of_2(N), BT=16, num_warps=4)

    def want():
        share, losses, gradients = (torch.arange(N, device=x.device) + 0.5) / N, [], []
        for mine, there in zip(x.split(500), target.split(500), strict=True):
            away = there[:, None, :] - mine[:, :, None]
            weight, near = (share[:, None] - (away < 0).float()).abs(), away.clamp(-1, 1)
            losses.append((weight * near * (away - 0.5 * near)).sum((1, 2)) / N)
            gradients.append(-(weight * near).sum(2) / N)
        return torch.cat(losses), torch.cat(gradients)

    return Work(run, (loss, dx), want)


@triton.jit
def gates_of_experts(x_ptr, count_ptr, y_ptr, scale_ptr, MOST, N, BM: tl.constexpr, BN: tl.constexpr):
    """SiLU(one half) * the other half of a row, as int8 with a scale per BN columns. An expert has room for MOST rows, and
    a tensor says how many it has: programs behind these have nothing to do."""
    block, first, expert = tl.program_id(0), tl.program_id(1) * BM, tl.program_id(2)
    count = tl.load(count_ptr + expert)
    if first >= count:
        return
    m, n = first + tl.arange(0, BM), block * BN + tl.arange(0, BN)
    row, live = (expert * MOST + m).to(tl.int64)[:, None], (m < count)[:, None]
    gate = tl.load(x_ptr + row * 2 * N + n[None, :], mask=live, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * tl.load(x_ptr + row * 2 * N + N + n[None, :], mask=live, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(y), 1), 1e-10) / 127
    tl.store(y_ptr + row * N + n[None, :], tl.floor(y / scale[:, None] + 0.5).to(tl.int8), mask=live)
    tl.store(scale_ptr + (expert * (N // BN) + block) * MOST + m, scale, mask=m < count)


@case(
    "gates of 160 experts of up to 1000 rows of 2 x 2048 bf16, to int8 with scales of 128, 16 x 128 per program of 4 warps",
    EXPERTS,
    dict(E=160, most=1000, N=2 * KI),
    dict(E=3, most=40, N=256),
)
def _(device, E, most, N):
    """Most experts have few rows. What is behind these stays 0."""
    share = known("meta", 1 << 16, E).double() / (1 << 16)
    count = place(device, (most * share**2).int())
    x, y = normal(device, E, most, 2 * N), empty(device, E, most, N, dtype=INT8)
    scale = empty(device, E, N // 128, most, dtype=FLOAT)

    def run():
        gates_of_experts[(N // 128, triton.cdiv(most, 16), E)](x, count, y, scale, most, N, BM=16, BN=128, num_warps=4)

    def want():
        out, scales = torch.zeros(E, most, N, device=y.device, dtype=BF16), torch.zeros_like(scale)
        for expert, rows in enumerate(count.tolist()):
            one, two = x[expert, :rows].float().chunk(2, 1)
            z = (F.silu(one) * two).view(rows, N // 128, 128)
            scales[expert, :, :rows] = z.abs().amax(2).T / 127
            out[expert, :rows] = (z / (z.abs().amax(2, keepdim=True) / 127) + 0.5).floor().view(rows, N)
        return out, scales

    return Work(run, (y, scale), want)


@triton.jit
def log_add(a, b):
    """The logarithm of the sum of two numbers whose logarithms are known."""
    largest = tl.maximum(a, b)
    return largest + tl.log(1 + tl.exp(tl.minimum(a, b) - largest))


@triton.jit
def ranked_losses(x_ptr, length_ptr, loss_ptr, dx_ptr, BLOCK: tl.constexpr):
    """Scores of a list whose best entry comes first. Its loss is minus the logarithm of how likely that order is, if entry
    after entry is drawn without putting it back: a scan from the end, and another for the gradients."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    live = i < tl.load(length_ptr + row)
    x = tl.load(x_ptr + row * BLOCK + i, mask=live, other=-1e30)
    log = tl.associative_scan(x, 0, log_add, reverse=True)
    tl.store(loss_ptr + row, tl.sum(tl.where(live, log - x, 0.0), 0))
    before = tl.cumsum(tl.where(live, tl.exp(-log), 0.0), 0)
    tl.store(dx_ptr + row * BLOCK + i, tl.exp(x) * before - 1, mask=live)


@case(
    "losses and gradients of 60,000 ranked lists of 20 to 512 scores fp32, two scans, 2 warps",
    RANKED,
    dict(M=60_000, N=512),
    dict(M=7, N=64),
)
def _(device, M, N):
    """Gradients behind a list's end stay 0."""
    length = place(device, 20 + known("meta", N - 19, M))
    x, dx, loss = normal(device, M, N, dtype=FLOAT), empty(device, M, N, dtype=FLOAT), empty(device, M, dtype=FLOAT)

    def run():
        ranked_losses[(M,)](x, length, loss, dx, BLOCK=N, num_warps=2)

    def want():
        live = torch.arange(N, device=x.device) < length.to(x.device)[:, None]
        z = x.double().masked_fill(~live, float("-inf"))
        log = z.flip(1).logcumsumexp(1).flip(1)
        before = (-log).exp().masked_fill(~live, 0).cumsum(1)
        return (log - z).masked_fill(~live, 0).sum(1), (z.exp() * before - 1).masked_fill(~live, 0)

    return Work(run, (loss, dx), want)


@triton.jit
def on_simplex(x_ptr, y_ptr, M, N: tl.constexpr, BM: tl.constexpr):
    """The nearest row whose numbers are not negative and have sum 1: a bound is subtracted, which the sorted row and its
    running sums tell."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N)
    at, live = m[:, None] * N + n[None, :], (m < M)[:, None]
    x = tl.load(x_ptr + at, mask=live, other=0.0)
    ordered = tl.sort(x, descending=True)
    sums = tl.cumsum(ordered, 1)
    inside = ordered * (n + 1)[None, :] > sums - 1
    count = tl.sum(inside.to(tl.int32), 1)
    bound = (tl.sum(tl.where(inside, ordered, 0.0), 1) - 1) / count
    tl.store(y_ptr + at, tl.maximum(x - bound[:, None], 0.0), mask=live)


@case(
    "100,001 rows of 256 fp32 projected on a simplex by a sort and a scan, 4 rows per program of 4 warps",
    SIMPLEXES,
    dict(M=100_001, N=256),
    dict(M=9, N=32),
)
def _(device, M, N):
    x, y = normal(device, M, N, dtype=FLOAT), empty(device, M, N, dtype=FLOAT)

    def run():
        on_simplex[(triton.cdiv(M, 4),)](x, y, M, N=N, BM=4, num_warps=4)

    def want():
        z = x.double()
        bound = z.amax(1, keepdim=True) - 1
        for _ in range(N):  # Newton's steps from below end at the bound
            inside = z > bound
            new = ((z * inside).sum(1, keepdim=True) - 1) / inside.sum(1, keepdim=True)
            if torch.equal(new, bound):
                break
            bound = new
        return (z - bound).clamp(min=0)

    return Work(run, y, want)
