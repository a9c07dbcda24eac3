"""Parts of models: margins, balances of experts, triangles that are inverted, bells, norms across channels, bent waves."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.eleventh_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, INT32, Work, empty, known, normal

MARGINS, BALANCES, INVERSES = "margins of angles", "balances of experts", "inverses of triangles by products"
BELLS, CHANNELS, BENT = (
    "sums of bells of channels",
    "norms across channels that come first",
    "waves bent between filters",
)


@triton.jit
def angle_margins(x_ptr, label_ptr, y_ptr, N, cosine, sine, low, heat, BLOCK: tl.constexpr):
    """Logits of faces: cosines of angles, where the label's angle is made larger by a margin, times a factor. An angle
    that would pass 180 degrees keeps its cosine less a constant."""
    row, col = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + col, mask=col < N, other=0.0).to(tl.float32)
    turned = x * cosine - tl.sqrt(tl.maximum(1 - x * x, 0.0)) * sine
    turned = tl.where(x > low, turned, x - sine * sine)
    y = tl.where(col == tl.load(label_ptr + row), turned, x) * heat
    tl.store(y_ptr + row * N + col, y.to(y_ptr.dtype.element_ty), mask=col < N)


@case(
    "margins of labels' angles in 1400 rows of 85,742 cosines fp16, 1024 per program, 4 warps",
    MARGINS,
    dict(M=1400, N=85_742),
    dict(M=5, N=2001),
)
def _(device, M, N):
    x, y, margin = normal(device, M, N, dtype=HALF).tanh(), empty(device, M, N, dtype=HALF), 0.5
    label, low = known(device, N, M), math.cos(math.pi - margin)

    def run():
        angle_margins[(triton.cdiv(N, 1024), M)](
            x, label, y, N, math.cos(margin), math.sin(margin), low, 64.0, BLOCK=1024, num_warps=4
        )

    def want():
        at = label.to(x.device).long()[:, None]
        mine = x.float().gather(1, at)
        turned = torch.where(mine > low, (mine.arccos() + margin).cos(), mine - math.sin(margin) ** 2)
        return x.float().scatter(1, at, turned) * 64

    return Work(run, y, want)


@triton.jit
def balance_experts(
    x_ptr, share_ptr, count_ptr, T, N: tl.constexpr, BN: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    """The sums of each expert's probability over all tokens, and how often it is among the CHOICES largest, which are
    found one after another. All programs add to the same 2 * N numbers."""
    t, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BN)
    live = (t < T)[:, None] & (n < N)[None, :]
    x = tl.load(x_ptr + t[:, None] * N + n[None, :], mask=live, other=float("-inf"))
    e = tl.exp(x - tl.max(tl.where(live, x, -1e30), 1)[:, None])
    p = tl.where((t < T)[:, None], e / tl.maximum(tl.sum(e, 1), 1e-30)[:, None], 0.0)
    tl.atomic_add(share_ptr + n, tl.sum(p, 0), mask=n < N, sem="relaxed")
    count = tl.zeros((BN,), tl.int32)
    for _ in range(CHOICES):
        chosen = (n[None, :] == tl.argmax(x, 1)[:, None]) & (t < T)[:, None]
        count += tl.sum(chosen.to(tl.int32), 0)
        x = tl.where(chosen, float("-inf"), x)
    tl.atomic_add(count_ptr + n, count, mask=n < N, sem="relaxed")


@case(
    "balances of 160 experts over 300,000 tokens fp32, 6 choices, sums by atomics, 32 tokens per program of 4 warps",
    BALANCES,
    dict(T=300_000, N=160),
    dict(T=75, N=20),
)
def _(device, T, N):
    """The sums are not cleared by what is measured."""
    x, share, count = normal(device, T, N, dtype=FLOAT), empty(device, N, dtype=FLOAT), empty(device, N, dtype=INT32)

    def run():
        balance_experts[(triton.cdiv(T, 32),)](
            x, share, count, T, N=N, BN=triton.next_power_of_2(N), CHOICES=6, BLOCK=32, num_warps=4
        )

    def want():
        chosen = x.sort(dim=1, descending=True, stable=True).indices[:, :6]
        return x.softmax(1).sum(0), chosen.flatten().bincount(minlength=N)

    return Work(run, (share, count), want)


@triton.jit
def invert_triangle(a_ptr, y_ptr, S: tl.constexpr, TURNS: tl.constexpr):
    """The inverse of 1 + a, where a is below the diagonal: (1 - a)(1 + a^2)(1 + a^4) and so on, up to power S / 2, as all
    powers from S on are 0."""
    i, j = tl.arange(0, S)[:, None], tl.arange(0, S)[None, :]
    at = tl.program_id(0) * S * S + i * S + j
    power = tl.where(i > j, tl.load(a_ptr + at), 0.0)
    y = tl.where(i == j, 1.0, 0.0) - power
    for _ in range(TURNS):
        power = tl.dot(power, power, input_precision="tf32")
        y = tl.dot(y, power, y, input_precision="tf32")
    tl.store(y_ptr + at, y)


@case(
    "inverses of 8000 triangles of 64 x 64 fp32 by 10 tf32 products each, 4 warps",
    INVERSES,
    dict(n=8000, S=64),
    dict(n=3, S=16),
)
def _(device, n, S):
    a, y = normal(device, n, S, S, dtype=FLOAT) / S, empty(device, n, S, S, dtype=FLOAT)

    def want():
        eye = torch.eye(S, device=a.device, dtype=torch.float64)
        return torch.linalg.solve_triangular(eye + a.double().tril(-1), eye.expand(n, S, S), upper=False)

    return Work(lambda: invert_triangle[(n,)](a, y, S=S, TURNS=S.bit_length() - 2, num_warps=4), y, want)


@triton.jit
def sums_of_bells(x_ptr, w_ptr, y_ptr, M, C, BELLS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Each channel has a function of its own: a weighted sum of BELLS bells between -2 and 2, and a SiLU."""
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    at, live = m[:, None] * C + c[None, :], (m < M)[:, None] & (c < C)[None, :]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(x)
    for i in tl.static_range(BELLS):
        away = (x - (4 * i / (BELLS - 1) - 2)) * ((BELLS - 1) / 4)
        y += tl.load(w_ptr + i * C + c, mask=c < C, other=0.0)[None, :] * tl.exp(-away * away)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=live)


@case(
    "8 bells and a SiLU of 70,001 rows of 1000 channels fp16, tiles of 16 x 128, 4 warps",
    BELLS,
    dict(M=70_001, C=1000),
    dict(M=19, C=150),
)
def _(device, M, C):
    x, y, w = normal(device, M, C, dtype=HALF), empty(device, M, C, dtype=HALF), normal(device, 8, C, dtype=FLOAT)

    def run():
        sums_of_bells[(triton.cdiv(M, 16), triton.cdiv(C, 128))](x, w, y, M, C, BELLS=8, BM=16, BC=128, num_warps=4)

    def want():
        z, out = x.float(), F.silu(x.float())
        for middle, weight in zip(torch.linspace(-2, 2, 8).tolist(), w, strict=True):
            out += weight * torch.exp(-(((z - middle) * 7 / 4) ** 2))
        return out

    return Work(run, y, want)


@triton.jit
def norm_channels(x_ptr, scale_ptr, shift_ptr, y_ptr, P, C: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr):
    """Layer norm over the C channels of each pixel, in planes of P pixels."""
    c, p, image = tl.arange(0, BC), tl.program_id(0) * BP + tl.arange(0, BP), tl.program_id(1)
    at, live = (image * C + c)[:, None] * P + p[None, :], (c < C)[:, None] & (p < P)[None, :]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    away = tl.where((c < C)[:, None], x - (tl.sum(x, 0) / C)[None, :], 0.0)
    factor = tl.rsqrt(tl.sum(away * away, 0) / C + 1e-6)
    scale, shift = tl.load(scale_ptr + c, mask=c < C, other=0.0), tl.load(shift_ptr + c, mask=c < C, other=0.0)
    y = away * factor[None, :] * scale[:, None] + shift[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=live)


@case(
    "layer norm over 192 channels of 160 pictures of 57 x 55 bf16, planes, tiles of 192 x 32, 8 warps",
    CHANNELS,
    dict(B=160, C=192, P=57 * 55),
    dict(B=2, C=24, P=77),
)
def _(device, B, C, P):
    x, y = normal(device, B, C, P), empty(device, B, C, P)
    scale, shift = normal(device, C, dtype=FLOAT), normal(device, C, dtype=FLOAT)

    def run():
        norm_channels[(triton.cdiv(P, 32), B)](
            x, scale, shift, y, P, C=C, BC=triton.next_power_of_2(C), BP=32, num_warps=8
        )

    return Work(run, y, lambda: F.layer_norm(x.float().mT, (C,), scale, shift, 1e-6).mT)


@triton.jit
def bend_waves(x_ptr, filter_ptr, bend_ptr, y_ptr, T, BLOCK: tl.constexpr):
    """A wave gets a sample between each two, is bent by the square of a sine, and loses every second sample again. Both
    filters are the same 12 numbers: 6 for each new sample, and all of them for each that stays."""
    t, track = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    bend = tl.load(bend_ptr + track)
    y = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(12):
        # New samples have places from -5 to 6 around 2 * t: an odd j has one that is even, at which an old one lies.
        new = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(6):
            at = t + ((j + 1) // 2 - k)
            x = tl.load(x_ptr + track * T + at, mask=(at >= 0) & (at < T), other=0.0).to(tl.float32)
            new += x * tl.load(filter_ptr + 2 * k + (j + 1) % 2)
        sine = tl.sin(new * bend)
        y += tl.load(filter_ptr + j) * (new + sine * sine / bend)
    tl.store(y_ptr + track * T + t, (y / 2).to(y_ptr.dtype.element_ty), mask=t < T)


@case(
    "waves of 200 tracks of 30,001 samples fp16 bent between two filters of 12, 256 per program, 4 warps",
    BENT,
    dict(tracks=200, T=30_001),
    dict(tracks=3, T=300),
)
def _(device, tracks, T):
    x, y = normal(device, tracks, T, dtype=HALF), empty(device, tracks, T, dtype=HALF)
    taps, bend = normal(device, 12, dtype=FLOAT) / 2, normal(device, tracks, dtype=FLOAT).sigmoid() + 0.5

    def run():
        bend_waves[(triton.cdiv(T, 256), tracks)](x, taps, bend, y, T, BLOCK=256, num_warps=4)

    def want():
        z = F.pad(x.float(), (6, 6))[:, None]
        phases = taps.view(6, 2).T[:, None].flip(2)
        new = F.conv1d(z, phases).mT.flatten(1)[:, 3:]  # from the first that the first result needs
        new = new + (new * bend[:, None]).sin() ** 2 / bend[:, None]
        return F.conv1d(new[:, None, :], taps[None, None], stride=2)[:, 0] / 2

    return Work(run, y, want)
