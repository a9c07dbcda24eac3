"""Parts of models and of training: averages along time, gradients, steps, losses, sparse softmaxes, and penalties."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import BF16, FLOAT, HALF, INT32, KI, UINT8, Work, empty, known, normal, place
from gpukit.validation.tenth_set.case import case

AVERAGES, GROUPS, ROUTES = "weighted averages along time", "gradients of group norm", "gradients of routes"
STEPS, OVERLAPS, SPARSE = "steps with two means", "overlaps of classes", "sparse softmaxes"
PENALTIES, LOSSES = "penalties of repeated words", "losses without logits"


@triton.jit
def averages_along_time(decay_ptr, bonus_ptr, k_ptr, v_ptr, r_ptr, y_ptr, T, C, BLOCK: tl.constexpr):
    """Each channel averages its values so far with weights exp(k) that decay, the newest one with a bonus, behind a
    gate. Sums are kept relative to the largest exponent seen, so that none overflows."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    decay, bonus = -tl.exp(tl.load(decay_ptr + col)), tl.load(bonus_ptr + col)
    a, b, high = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), -1e30, tl.float32)
    for t in range(T):
        at = (tl.program_id(1) * T + t) * C + col
        k, v = tl.load(k_ptr + at).to(tl.float32), tl.load(v_ptr + at).to(tl.float32)
        new = tl.maximum(high, k + bonus)
        old_part, new_part = tl.exp(high - new), tl.exp(k + bonus - new)
        y = (old_part * a + new_part * v) / (old_part * b + new_part)
        y *= tl.sigmoid(tl.load(r_ptr + at).to(tl.float32))
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty))
        new = tl.maximum(high + decay, k)
        old_part, new_part = tl.exp(high + decay - new), tl.exp(k - new)
        a, b, high = old_part * a + new_part * v, old_part * b + new_part, new


@case(
    "averages of 2048 channels along 400 tokens of 40 sequences bf16, weights that decay, 64 channels, 2 warps",
    AVERAGES,
    dict(B=40, T=400, C=2 * KI),
    dict(B=2, T=20, C=128),
)
def _(device, B, T, C):
    decay, bonus = normal(device, C, dtype=FLOAT) - 2, normal(device, C, dtype=FLOAT)
    k, v, r, y = (normal(device, B, T, C) for _ in range(4))

    def run():
        averages_along_time[(C // 64, B)](decay, bonus, k, v, r, y, T, C, BLOCK=64, num_warps=2)

    def want():
        a, b, out, rate = 0, 0, [], (-decay.double().exp()).exp()
        for t in range(T):
            weight, value = k[:, t].double().exp(), v[:, t].double()
            now = weight * bonus.double().exp()
            out.append((a + now * value) / (b + now) * r[:, t].double().sigmoid())
            a, b = a * rate + weight * value, b * rate + weight
        return torch.stack(out, 1)

    return Work(run, y, want)


@triton.jit
def group_norm_gradients(
    x_ptr,
    g_ptr,
    mean_ptr,
    factor_ptr,
    scale_ptr,
    dx_ptr,
    dscale_ptr,
    dshift_ptr,
    P,
    C,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has one group of EACH channels of P pixels. It sums the gradients of its channels, which it adds to
    those of other images by atomics, and then goes over the group again for the gradients of x."""
    group, image, i = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    place = image * tl.num_programs(0) + group
    mean, factor, live = tl.load(mean_ptr + place), tl.load(factor_ptr + place), i < P
    one, two = 0.0, 0.0
    for channel in range(group * EACH, (group + 1) * EACH):
        at, scale = (image * C + channel) * P + i, tl.load(scale_ptr + channel)
        g = tl.load(g_ptr + at, mask=live, other=0.0).to(tl.float32)
        x = (tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32) - mean) * factor
        shift, along = tl.sum(g, 0), tl.sum(g * x, 0)
        tl.atomic_add(dshift_ptr + channel, shift, sem="relaxed")
        tl.atomic_add(dscale_ptr + channel, along, sem="relaxed")
        one += scale * shift
        two += scale * along
    one, two = one / (EACH * P), two / (EACH * P)
    for channel in range(group * EACH, (group + 1) * EACH):
        at, scale = (image * C + channel) * P + i, tl.load(scale_ptr + channel)
        g = tl.load(g_ptr + at, mask=live, other=0.0).to(tl.float32)
        x = (tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32) - mean) * factor
        tl.store(dx_ptr + at, (factor * (scale * g - one - x * two)).to(dx_ptr.dtype.element_ty), mask=live)


@case(
    "gradients of group norm, 48 images of 320 channels of 63 x 63 bf16, 32 groups, atomics for scales, 8 warps",
    GROUPS,
    dict(B=48, C=320, P=63 * 63, G=32),
    dict(B=3, C=8, P=90, G=4),
)
def _(device, B, C, P, G):
    """The gradients of scales and shifts are not cleared by what is measured."""
    x, g, dx = (normal(device, B, C, P) for _ in range(3))
    scale = normal(device, C, dtype=FLOAT)
    dscale, dshift = empty(device, C, dtype=FLOAT), empty(device, C, dtype=FLOAT)
    groups = x.view(B, G, -1).float()
    mean, factor = groups.mean(2), (groups.var(2, correction=0) + 1e-5).rsqrt()

    def run():
        group_norm_gradients[(G, B)](
            x, g, mean, factor, scale, dx, dscale, dshift, P, C,
            EACH=C // G, BLOCK=triton.next_power_of_2(P), num_warps=8,
        )  # fmt: skip

    def want():
        normed = ((groups - mean[:, :, None]) * factor[:, :, None]).view(B, C, P)
        scaled = (g.float() * scale[:, None]).view(B, G, -1)
        z = normed.view(B, G, -1)
        back = scaled - scaled.mean(2, keepdim=True) - z * (scaled * z).mean(2, keepdim=True)
        return (back * factor[:, :, None]).view(B, C, P), (g.float() * normed).sum((0, 2)), g.float().sum((0, 2))

    return Work(run, (dx, dscale, dshift), want)


@triton.jit
def route_gradients(g_ptr, x_ptr, place_ptr, weight_ptr, dx_ptr, dweight_ptr, N: tl.constexpr, CHOICES: tl.constexpr):
    """A token's gradient goes to the rows of its experts, times their weights; a weight's gradient is the product with
    such a row."""
    token, col = tl.program_id(0), tl.arange(0, N)
    g = tl.load(g_ptr + token * N + col).to(tl.float32)
    for choice in range(CHOICES):
        at = token * CHOICES + choice
        row = tl.load(place_ptr + at) * N + col
        weight, x = tl.load(weight_ptr + at), tl.load(x_ptr + row).to(tl.float32)
        tl.store(dx_ptr + row, (g * weight).to(dx_ptr.dtype.element_ty))
        tl.store(dweight_ptr + at, tl.sum(g * x, 0))


@case(
    "gradients of 20,000 tokens of 2048 bf16 to rows of 4 experts each, and of their weights, 4 warps",
    ROUTES,
    dict(T=20_000, N=2 * KI, choices=4),
    dict(T=9, N=128, choices=3),
)
def _(device, T, N, choices):
    rows = T * choices
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0), dtype=INT32)
    where, weight = place(device, order), normal(device, T, choices, dtype=FLOAT).softmax(1)
    g, x, dx, dweight = (
        normal(device, T, N),
        normal(device, rows, N),
        empty(device, rows, N),
        empty(device, T, choices, dtype=FLOAT),
    )

    def run():
        route_gradients[(T,)](g, x, where, weight, dx, dweight, N=N, CHOICES=choices, num_warps=4)

    def want():
        back = torch.zeros_like(x)
        back[where.long()] = (g.float()[:, None] * weight[:, :, None]).to(BF16).flatten(0, 1)
        return back, (x[where.long()].view(T, choices, N).float() * g.float()[:, None]).sum(2)

    return Work(run, (dx, dweight), want)


@triton.jit
def two_means(
    p_ptr,
    g_ptr,
    fast_ptr,
    slow_ptr,
    square_ptr,
    new_p_ptr,
    new_fast_ptr,
    new_slow_ptr,
    new_square_ptr,
    half_ptr,
    rate,
    share,
    shrink,
    n,
    BLOCK: tl.constexpr,
):
    """A step along a fast and a slow mean of gradients; parameters are also stored in bf16."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    p, g = tl.load(p_ptr + at, mask=live), tl.load(g_ptr + at, mask=live).to(tl.float32)
    fast = 0.9 * tl.load(fast_ptr + at, mask=live) + 0.1 * g
    slow = 0.9999 * tl.load(slow_ptr + at, mask=live) + 0.0001 * g
    square = 0.999 * tl.load(square_ptr + at, mask=live) + 0.001 * g * g
    p -= rate * ((fast + share * slow) / (tl.sqrt(square) + 1e-8) + shrink * p)
    tl.store(new_fast_ptr + at, fast, mask=live)
    tl.store(new_slow_ptr + at, slow, mask=live)
    tl.store(new_square_ptr + at, square, mask=live)
    tl.store(new_p_ptr + at, p, mask=live)
    tl.store(half_ptr + at, p.to(half_ptr.dtype.element_ty), mask=live)


@case(
    "a step with two means of gradients, 25,000,003 fp32 and bf16, 10 streams, 1024 per program",
    STEPS,
    dict(n=25_000_003),
    dict(n=3001),
)
def _(device, n):
    p, fast, slow, square = (normal(device, n, dtype=FLOAT) for _ in range(4))
    g, half, square = normal(device, n), empty(device, n), square.abs()
    new = [empty(device, n, dtype=FLOAT) for _ in range(4)]

    def run():
        two_means[(triton.cdiv(n, 1024),)](p, g, fast, slow, square, *new, half, 0.1, 5.0, 0.01, n, BLOCK=1024)

    def want():
        x = g.double()
        one, two, three = 0.9 * fast + 0.1 * x, 0.9999 * slow + 1e-4 * x, 0.999 * square + 1e-3 * x * x
        after = p - 0.1 * ((one + 5 * two) / (three.sqrt() + 1e-8) + 0.01 * p)
        return after, one, two, three, after

    return Work(run, (*new, half), want)


@triton.jit
def class_overlaps(x_ptr, label_ptr, y_ptr, P, CLASSES, BC: tl.constexpr, BLOCK: tl.constexpr):
    """A softmax over the classes of each pixel. For each class, a program adds the probabilities at pixels of that
    class, all probabilities, and the number of pixels to 3 of 3 * CLASSES sums, which all programs share."""
    c, i, image = tl.arange(0, BC), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    live = (c < CLASSES)[:, None] & (i < P)[None, :]
    at = (image * CLASSES + c)[:, None] * P + i[None, :]
    x = tl.load(x_ptr + at, mask=live, other=-1e30).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0)[None, :])
    p = tl.where(live, e / tl.sum(e, 0)[None, :], 0.0)
    label = tl.load(label_ptr + image * P + i, mask=i < P, other=255).to(tl.int32)
    mine = c[:, None] == label[None, :]
    mask = c < CLASSES
    tl.atomic_add(y_ptr + c, tl.sum(tl.where(mine, p, 0.0), 1), mask=mask, sem="relaxed")
    tl.atomic_add(y_ptr + CLASSES + c, tl.sum(p, 1), mask=mask, sem="relaxed")
    tl.atomic_add(y_ptr + 2 * CLASSES + c, tl.sum(mine.to(tl.float32), 1), mask=mask, sem="relaxed")


@case(
    "overlaps of 19 classes in 12 images of 510 x 1021 bf16, 57 sums by atomics, 256 pixels per program, 4 warps",
    OVERLAPS,
    dict(B=12, P=510 * 1021, classes=19),
    dict(B=2, P=900, classes=19),
)
def _(device, B, P, classes):
    """The sums are not cleared by what is measured."""
    x, label = normal(device, B, classes, P), known(device, classes, B, P, dtype=UINT8)
    y = empty(device, 3, classes, dtype=FLOAT)

    def run():
        class_overlaps[(triton.cdiv(P, 256), B)](x, label, y, P, classes, BC=32, BLOCK=256, num_warps=4)

    def want():
        p, mine = x.float().softmax(1), F.one_hot(label.to(y.device).long(), classes).mT
        return torch.stack([(p * mine).double().sum((0, 2)), p.double().sum((0, 2)), mine.double().sum((0, 2))])

    return Work(run, y, want)


@triton.jit
def sparse_softmax(x_ptr, y_ptr, N, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Squares of what is above a bound, for which they sum to 1. The bound is found by halving an interval STEPS
    times."""
    row, col = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + col, mask=col < N, other=float("-inf")).to(tl.float32) / 2
    high = tl.max(x, 0)
    low = high - 1
    for _ in range(STEPS):
        middle = (low + high) / 2
        above = tl.maximum(x - middle, 0.0)
        enough = tl.sum(above * above, 0) >= 1
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    y = tl.maximum(x - low, 0.0)
    y *= y
    tl.store(y_ptr + row * N + col, (y / tl.sum(y, 0)).to(y_ptr.dtype.element_ty), mask=col < N)


@case(
    "sparse softmaxes of 16 Ki rows of 5000 fp16, 20 halvings, 8 warps",
    SPARSE,
    dict(M=16 * KI, N=5000),
    dict(M=5, N=300),
)
def _(device, M, N):
    x, y = normal(device, M, N, dtype=HALF) * 2, empty(device, M, N, dtype=HALF)

    def run():
        sparse_softmax[(M,)](x, y, N, STEPS=20, BLOCK=triton.next_power_of_2(N), num_warps=8)

    def want():
        z = x.float() / 2
        high = z.amax(1, keepdim=True)
        low = high - 1
        for _ in range(24):
            middle = (low + high) / 2
            enough = (z - middle).clamp(min=0).square().sum(1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        p = (z - low).clamp(min=0).square()
        return p / p.sum(1, keepdim=True)

    return Work(run, y, want)


@triton.jit
def count_words(word_ptr, count_ptr, L, V, BLOCK: tl.constexpr):
    """How often each of V words is among the L words of a row, by atomics."""
    row, i = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(word_ptr + row * L + i, mask=i < L, other=0)
    tl.atomic_add(count_ptr + row * V + word, 1, mask=i < L, sem="relaxed")


@triton.jit
def penalize(x_ptr, count_ptr, y_ptr, often, repeat, heat, n, BLOCK: tl.constexpr):
    """Logits of words that were there are made smaller, by a factor and by a share of how often they were."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, count = tl.load(x_ptr + at, mask=at < n).to(tl.float32), tl.load(count_ptr + at, mask=at < n)
    x = tl.where(count > 0, tl.where(x > 0, x / repeat, x * repeat), x) - often * tl.minimum(count, 10)
    tl.store(y_ptr + at, x / heat, mask=at < n)


@case(
    "penalties of 6000 words each in 500 rows of 128,259 logits bf16 to fp32, counted by atomics, two launches",
    PENALTIES,
    dict(B=500, L=6000, V=128_259),
    dict(B=3, L=300, V=1001),
)
def _(device, B, L, V):
    """Some words are far more frequent than others. Counts are not cleared by what is measured."""
    words = place(device, ((known("meta", 1 << 20, B, L).double() / (1 << 20)) ** 3 * V).int())
    x, count, y = normal(device, B, V), empty(device, B, V, dtype=INT32), empty(device, B, V, dtype=FLOAT)

    def run():
        count_words[(triton.cdiv(L, 512), B)](words, count, L, V, BLOCK=512)
        penalize[(triton.cdiv(B * V, 2048),)](x, count, y, 0.25, 1.2, 0.8, B * V, BLOCK=2048)

    def want():
        found = torch.zeros(B, V, device=y.device).scatter_add_(
            1, words.to(y.device).long(), torch.ones(B, L, device=y.device)
        )
        z = x.float()
        z = torch.where(found > 0, torch.where(z > 0, z / 1.2, z * 1.2), z) - 0.25 * found.clamp(max=10)
        return found, z / 0.8

    return Work(run, (count, y), want)


@triton.jit
def loss_parts(
    x_ptr,
    w_ptr,
    label_ptr,
    part_ptr,
    T,
    V,
    EACH,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Logits of EACH words for BM tokens are made by products and not stored: the largest of them, the sum of
    exponentials, and the label's, if it is among them."""
    m, part = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1)
    label = tl.load(label_ptr + m)
    largest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    mine = tl.zeros((BM,), tl.float32)
    for begin in range(part * EACH, tl.minimum((part + 1) * EACH, V), BN):
        n = begin + tl.arange(0, BN)
        s = tl.zeros((BM, BN), tl.float32)
        for first in range(0, D, BK):
            k = first + tl.arange(0, BK)
            w = tl.load(w_ptr + n[:, None] * D + k[None, :], mask=(n < V)[:, None], other=0.0)
            s = tl.dot(tl.load(x_ptr + m[:, None] * D + k[None, :]), tl.trans(w), s)
        mine += tl.sum(tl.where(label[:, None] == n[None, :], s, 0.0), 1)
        s = tl.where(n[None, :] < V, s, -1e30)
        new = tl.maximum(largest, tl.max(s, 1))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(s - new[:, None]), 1)
        largest = new
    at = part_ptr + part * 3 * T + m
    tl.store(at, largest)
    tl.store(at + T, total)
    tl.store(at + 2 * T, mine)


@triton.jit
def join_parts(part_ptr, y_ptr, T, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """A token's loss, of what PARTS programs found."""
    part, m = tl.arange(0, PARTS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = part_ptr + part[:, None] * 3 * T + m[None, :]
    largest, total, mine = tl.load(at), tl.load(at + T), tl.load(at + 2 * T)
    high = tl.max(largest, 0)
    total = tl.sum(total * tl.exp(largest - high[None, :]), 0)
    tl.store(y_ptr + m, high + tl.log(total) - tl.sum(mine, 0))


@case(
    "losses of 4096 tokens and 32,003 words without logits, 768 bf16, 4 parts, 128x128x64, 8 warps, 3 stages, two launches",
    LOSSES,
    dict(T=4 * KI, V=32_003, D=768),
    dict(T=128, V=1001, D=64),
)
def _(device, T, V, D):
    """128 programs share the work. The last words of a part are those that fill a tile."""
    x, w, label = normal(device, T, D), normal(device, V, D) / 16, known(device, V, T)
    part, y = empty(device, 4, 3, T, dtype=FLOAT), empty(device, T, dtype=FLOAT)
    each = triton.cdiv(triton.cdiv(V, 4), 128) * 128

    def run():
        loss_parts[(T // 128, 4)](x, w, label, part, T, V, each, D=D, BM=128, BN=128, BK=64, num_warps=8, num_stages=3)
        join_parts[(T // 128,)](part, y, T, PARTS=4, BLOCK=128)

    return Work(run, y, lambda: F.cross_entropy(x.float() @ w.float().T, label.to(y.device).long(), reduction="none"))
