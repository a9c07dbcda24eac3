"""Parts of layers: norms of heads, to int8 and of images, losses, draws, caches that are written and read, and casts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.eighth_set.case import case
from gpukit.validation.new_kernels.case import (
    BF16,
    FLOAT,
    FP8,
    HALF,
    INT8,
    INT32,
    KI,
    SMS,
    UINT8,
    Work,
    empty,
    known,
    normal,
    place,
)

HEADS, GROUPS = "norms of heads whose pairs are turned", "norms to int8 in groups of columns"
IMAGES, POLICY = "norms with shifts of an image", "policy losses of sequences"
DRAWS, LATENTS = "draws by running sums", "latents in rows of 656 bytes"
PAGES, LARGEST = "pages to sequences of varying length", "casts that watch the largest number"


@triton.jit
def norm_and_turn(x_ptr, w_ptr, cos_ptr, sin_ptr, y_ptr, eps, H: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """RMS norm of R heads of one token; then each pair of neighboring numbers is rotated."""
    token, r, d = tl.program_id(0), tl.program_id(1) * R + tl.arange(0, R), tl.arange(0, D)
    at = (token * H + r)[:, None] * D + d[None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * tl.load(w_ptr + d)[None, :]
    a, b = tl.split(tl.reshape(x, (R, D // 2, 2)))
    angle = token * (D // 2) + tl.arange(0, D // 2)
    cos, sin = tl.load(cos_ptr + angle)[None, :], tl.load(sin_ptr + angle)[None, :]
    y = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (R, D))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty))


@case(
    "RMS norm of 40 heads of 128 and a turn of neighbors, 16384 tokens bf16, 8 heads per program of 2 warps",
    HEADS,
    dict(T=16 * KI, H=40, D=128),
    dict(T=5, H=16, D=32),
)
def _(device, T, H, D):
    x, w, y = normal(device, T, H, D), normal(device, D, dtype=FLOAT), empty(device, T, H, D)
    angle = normal(device, T, D // 2, dtype=FLOAT)
    cos, sin = angle.cos(), angle.sin()

    def run():
        norm_and_turn[(T, H // 8)](x, w, cos, sin, y, 1e-6, H=H, R=8, D=D, num_warps=2)

    def want():
        z = F.rms_norm(x.float(), (D,), w, 1e-6)
        a, b, c, s = z[..., ::2], z[..., 1::2], cos[:, None], sin[:, None]
        return torch.stack([a * c - b * s, a * s + b * c], 3).flatten(2)

    return Work(run, y, want)


@triton.jit
def norm_to_groups(x_ptr, r_ptr, w_ptr, sum_ptr, q_ptr, scale_ptr, eps, M, N, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Stores x + r, and its RMS norm as int8. The scales of all rows for a group of columns lie side by side."""
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    at, mask = row * N + col, col < N
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) + tl.load(r_ptr + at, mask=mask, other=0.0)
    tl.store(sum_ptr + at, x.to(sum_ptr.dtype.element_ty), mask=mask)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * tl.load(w_ptr + col, mask=mask, other=0.0)
    y = tl.reshape(y, (BLOCK // GROUP, GROUP))
    scale = tl.maximum(tl.max(tl.abs(y), 1), 1e-10) / 127
    q = tl.reshape(tl.floor(y / scale[:, None] + 0.5), (BLOCK,))
    tl.store(q_ptr + at, q.to(tl.int8), mask=mask)
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(scale_ptr + group * M + row, scale, mask=group * GROUP < N)


@case(
    "residual and RMS norm to int8, 12288 rows of 7168 bf16, scales of 128 transposed, 8 warps",
    GROUPS,
    dict(M=12 * KI, N=7168),
    dict(M=3, N=384),
)
def _(device, M, N):
    x, r, w, total = normal(device, M, N), normal(device, M, N), normal(device, N, dtype=FLOAT), empty(device, M, N)
    q, scale = empty(device, M, N, dtype=INT8), empty(device, N // 128, M, dtype=FLOAT)

    def run():
        block = triton.next_power_of_2(N)
        norm_to_groups[(M,)](x, r, w, total, q, scale, 1e-5, M, N, BLOCK=block, GROUP=128, num_warps=8)

    def want():
        z = x.float() + r.float()
        y = F.rms_norm(z, (N,), w, 1e-5).view(M, N // 128, 128)
        s = y.abs().amax(2) / 127
        return z, (y / s[:, :, None]).round().view(M, N), s.T

    return Work(run, (total, q, scale), want)


@triton.jit
def modulated_norm(x_ptr, branch_ptr, mod_ptr, sum_ptr, y_ptr, T, N, eps, BLOCK: tl.constexpr):
    """Stores x + gate * branch, and its layer norm, scaled and shifted. All T tokens of an image share the three."""
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    at, mask, mod = row * N + col, col < N, row // T * 3 * N + col
    gate, scale = tl.load(mod_ptr + mod, mask=mask, other=0.0), tl.load(mod_ptr + mod + N, mask=mask, other=0.0)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    x += gate * tl.load(branch_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(sum_ptr + at, x.to(sum_ptr.dtype.element_ty), mask=mask)
    x = tl.where(mask, x - tl.sum(x, 0) / N, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * (1 + scale) + tl.load(mod_ptr + mod + 2 * N, mask=mask, other=0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@case(
    "gates, layer norm, scales and shifts of 96 images of 729 tokens of 1152 fp16",
    IMAGES,
    dict(B=96, T=729, N=1152),
    dict(B=2, T=3, N=144),
)
def _(device, B, T, N):
    x, branch = normal(device, B, T, N, dtype=HALF), normal(device, B, T, N, dtype=HALF)
    mod, total = normal(device, B, 3, N, dtype=FLOAT), empty(device, B, T, N, dtype=HALF)
    y = empty(device, B, T, N, dtype=HALF)

    def run():
        modulated_norm[(B * T,)](x, branch, mod, total, y, T, N, 1e-6, BLOCK=triton.next_power_of_2(N))

    def want():
        gate, scale, shift = mod[:, :, None].unbind(1)
        z = x.float() + gate * branch.float()
        return z, F.layer_norm(z, (N,), eps=1e-6) * (1 + scale) + shift

    return Work(run, (total, y), want)


@triton.jit
def policy_losses(new_ptr, old_ptr, ref_ptr, adv_ptr, start_ptr, grad_ptr, loss_ptr, clip, beta, BLOCK: tl.constexpr):
    """The mean of the clipped losses of a sequence's tokens, with a penalty for leaving the reference; and gradients."""
    start, stop = tl.load(start_ptr + tl.program_id(0)), tl.load(start_ptr + tl.program_id(0) + 1)
    advantage = tl.load(adv_ptr + tl.program_id(0))
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < stop
        new, old = tl.load(new_ptr + at, mask=mask, other=0.0), tl.load(old_ptr + at, mask=mask, other=0.0)
        apart = tl.load(ref_ptr + at, mask=mask, other=0.0) - new
        ratio, away = tl.exp(new - old), tl.exp(apart)
        free = ratio * advantage
        held = tl.minimum(tl.maximum(ratio, 1 - clip), 1 + clip) * advantage
        total += tl.where(mask, beta * (away - apart - 1) - tl.minimum(free, held), 0.0)
        grad = beta * (1 - away) - tl.where(free <= held, free, 0.0)
        tl.store(grad_ptr + at, grad / (stop - start), mask=mask)
    tl.store(loss_ptr + tl.program_id(0), tl.sum(total, 0) / (stop - start))


@case(
    "clipped policy losses of 4096 sequences of 16 to 8192 tokens fp32, one program each",
    POLICY,
    dict(B=4096, longest=8192),
    dict(B=5, longest=1500),
)
def _(device, B, longest):
    length = 16 + known("meta", longest - 15, B, dtype=torch.int64)
    start, tokens = place(device, F.pad(length.cumsum(0), (1, 0)).int()), int(length.sum())
    new, old, ref = (normal(device, tokens, dtype=FLOAT) / 4 - 2 for _ in range(3))
    advantage, grad, loss = (
        normal(device, B, dtype=FLOAT),
        empty(device, tokens, dtype=FLOAT),
        empty(device, B, dtype=FLOAT),
    )

    def run():
        policy_losses[(B,)](new, old, ref, advantage, start, grad, loss, 0.2, 0.04, BLOCK=1024)

    def want():
        spread = torch.repeat_interleave(torch.arange(B), length).to(new.device)
        leaf = new.clone().requires_grad_()
        a, ratio, apart = advantage[spread], (leaf - old).exp(), ref - leaf
        losses = 0.04 * (apart.exp() - apart - 1) - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        means = torch.zeros(B, device=new.device).index_add_(0, spread, losses) / length.to(new.device)
        means.sum().backward()
        return leaf.grad, means.detach()

    return Work(run, (grad, loss), want)


@triton.jit
def draw_by_sums(x_ptr, u_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Draws the first place whose running sum exceeds a share u of the row's sum: a pass for the sum, and another one."""
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, N, BLOCK):
        total += tl.load(x_ptr + row * N + first + col, mask=first + col < N, other=0.0)
    bound = tl.load(u_ptr + row) * tl.sum(total, 0)
    before, found = 0.0, 0
    for first in range(0, N, BLOCK):
        x = tl.load(x_ptr + row * N + first + col, mask=first + col < N, other=0.0)
        found += tl.sum(((before + tl.cumsum(x, 0) <= bound) & (first + col < N)).to(tl.int32), 0)
        before += tl.sum(x, 0)
    tl.store(y_ptr + row, found)


@case("draws from 3000 rows of 32,003 weights fp32 by running sums", DRAWS, dict(M=3000, N=32_003), dict(M=4, N=3001))
def _(device, M, N):
    """The weights are whole numbers, so that their sums are the same in any order."""
    x, u = (4 * normal(device, M, N, dtype=FLOAT)).abs().floor(), normal(device, M, dtype=FLOAT).sigmoid()
    y = empty(device, M, dtype=INT32)

    def want():
        return torch.searchsorted(x.cumsum(1), (u * x.sum(1))[:, None], right=True)[:, 0]

    return Work(lambda: draw_by_sums[(M,)](x, u, y, N, BLOCK=2048, num_warps=8), y, want)


@triton.jit
def latent_to_slot(x_ptr, slot_ptr, q_ptr, scale_ptr, rest_ptr):
    """A token's 512 latents become fp8 with four scales, which are powers of two; 64 more numbers stay as they are.

    All three pointers are to the same rows of 656 bytes."""
    token, i, j = tl.program_id(0), tl.arange(0, 4), tl.arange(0, 128)
    slot = tl.load(slot_ptr + token)
    x = tl.load(x_ptr + token * 576 + i[:, None] * 128 + j[None, :]).to(tl.float32)
    exponent = tl.maximum((tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23) - 7, 1)
    q = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    tl.store(q_ptr + slot * 656 + i[:, None] * 128 + j[None, :], q.to(q_ptr.dtype.element_ty))
    tl.store(scale_ptr + slot * 164 + 128 + i, (exponent << 23).to(tl.float32, bitcast=True))
    k = tl.arange(0, 64)
    tl.store(rest_ptr + slot * 328 + 264 + k, tl.load(x_ptr + token * 576 + 512 + k))


@case(
    "latents of 192 Ki tokens bf16, 512 to fp8 and 64 as they are, into slots of 656 bytes, 1 warp",
    LATENTS,
    dict(T=192 * KI, slots=256 * KI),
    dict(T=7, slots=11),
)
def _(device, T, slots):
    x, y = normal(device, T, 576), empty(device, slots, 656, dtype=UINT8)
    slot = place(device, torch.randperm(slots, generator=torch.Generator().manual_seed(0))[:T])
    views = y.view(FP8), y.view(FLOAT), y.view(BF16)

    def want():
        groups = x[:, :512].float().view(T, 4, 128)
        exponent = ((groups.abs().amax(2).view(INT32) >> 23) - 7).clamp(min=1)
        q = (groups * ((254 - exponent) << 23).view(FLOAT)[:, :, None]).to(FP8).view(T, 512)
        scale = (exponent << 23).view(FLOAT)
        rows = torch.cat([q.view(UINT8), scale.view(UINT8), x[:, 512:].contiguous().view(UINT8)], 1)
        return torch.zeros_like(y).index_copy_(0, slot, rows)

    return Work(lambda: latent_to_slot[(T,)](x, slot, *views, num_warps=1), y, want)


@triton.jit
def pages_to_rows(cache_ptr, scale_ptr, table_ptr, start_ptr, y_ptr, WIDEST, G: tl.constexpr, D: tl.constexpr):
    """One head of a page of 64 tokens becomes rows of its sequence. Programs beyond the end of a sequence stop at once."""
    page, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(start_ptr + sequence)
    length = tl.load(start_ptr + sequence + 1) - first
    if page * 64 < length:
        i, d = tl.arange(0, 64), tl.arange(0, D)
        place = tl.load(table_ptr + sequence * WIDEST + page) * 64 + i
        scale = tl.load(scale_ptr + place * G + head).to(tl.float32)
        x = tl.load(cache_ptr + (place * G + head)[:, None] * D + d[None, :]).to(tl.float32) * scale[:, None]
        row = first + page * 64 + i
        at = (row * G + head)[:, None] * D + d[None, :]
        tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=(page * 64 + i < length)[:, None])


@case(
    "pages of 64 tokens int8 to 96 sequences of 50 to 4096 tokens bf16, 8 heads of 128 with scales",
    PAGES,
    dict(B=96, longest=4096, pages=4096, G=8, D=128),
    dict(B=3, longest=200, pages=16, G=2, D=32),
)
def _(device, B, longest, pages, G, D):
    length = 50 + known("meta", longest - 49, B, dtype=torch.int64)
    start, tokens = place(device, F.pad(length.cumsum(0), (1, 0)).int()), int(length.sum())
    widest = triton.cdiv(longest, 64)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).int()
    used = F.pad(((length + 63) // 64).cumsum(0), (1, 0)).tolist()
    table = torch.zeros(B, widest, dtype=INT32)
    for i in range(B):
        table[i, : used[i + 1] - used[i]] = order[used[i] : used[i + 1]]
    cache, scale = normal(device, pages, 64, G, D, dtype=INT8), normal(device, pages, 64, G, dtype=HALF)
    table, y = place(device, table), empty(device, tokens, G, D)

    def run():
        pages_to_rows[(widest, G, B)](cache, scale, table, start, y, widest, G=G, D=D)

    def want():
        parts = []
        for i, n in enumerate(length.tolist()):
            mine = table[i, : triton.cdiv(n, 64)].long()
            parts.append((cache[mine].float() * scale[mine].float()[..., None]).flatten(0, 1)[:n])
        return torch.cat(parts)

    return Work(run, y, want)


@triton.jit
def cast_and_watch(x_ptr, scale_ptr, y_ptr, largest_ptr, n, BLOCK: tl.constexpr):
    """x * scale in 8 bits, by a fixed number of programs, which find the largest |x| together by an atomic maximum."""
    largest, scale = tl.zeros((BLOCK,), tl.float32), tl.load(scale_ptr)
    for first in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
        tl.store(y_ptr + at, (x * scale).to(y_ptr.dtype.element_ty), mask=at < n)
    tl.atomic_max(largest_ptr, tl.max(largest, 0), sem="relaxed")


@case(
    "100,000,003 bf16 to fp8 by 528 programs, which find the largest, 8 warps",
    LARGEST,
    dict(n=100_000_003, programs=4 * SMS),
    dict(n=20_001, programs=3),
)
def _(device, n, programs):
    """The scale is a power of two, so that the results are the same everywhere, to the bit."""
    x, scale = normal(device, n), torch.full((1,), 16.0, device=device)
    y, largest = empty(device, n, dtype=FP8), empty(device, 1, dtype=FLOAT)

    def run():
        cast_and_watch[(programs,)](x, scale, y, largest, n, BLOCK=4096, num_warps=8)

    return Work(run, (y, largest), lambda: ((x.float() * scale).to(FP8), x.float().abs().max()[None]))
