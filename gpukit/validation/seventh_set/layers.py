"""Parts of layers and of sampling: norms, activations, rotations, caches, mixes, distributions, largest ones, entropies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, HALF, INT32, KI, MI, Work, empty, known, normal
from gpukit.validation.seventh_set.case import case

GATED, SQUARED, AXES = "norms of gated groups", "gradients of squared activations", "rotations by two coordinates"
RINGS, PAIRS, SHIFTS = "caches that are rings", "pairs split in registers", "mixes with the token before"
RESIDUES, LARGEST, ENTROPIES = "words instead of rejected ones", "largest ones with their places", "entropies of rows"


@triton.jit
def gated_norm(x_ptr, z_ptr, w_ptr, y_ptr, eps, N, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """RMS norm of x * SiLU(z) within each group of GROUP columns; ROWS rows of one group."""
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    at = row[:, None] * N + col[None, :]
    z = tl.load(z_ptr + at).to(tl.float32)
    x = tl.load(x_ptr + at).to(tl.float32) * z * tl.sigmoid(z)
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / GROUP + eps)
    y = x * factor[:, None] * tl.load(w_ptr + col)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty))


@case(
    "RMS norm of gated groups of 512, 16384 rows of 4096 bf16, 4 rows per program",
    GATED,
    dict(M=16 * KI, N=4096),
    dict(M=8, N=1024),
)
def _(device, M, N):
    x, z, w, y = normal(device, M, N), normal(device, M, N), normal(device, N, dtype=FLOAT), empty(device, M, N)

    def run():
        gated_norm[(M // 4, N // 512)](x, z, w, y, 1e-5, N, GROUP=512, ROWS=4)

    def want():
        gated = (x.float() * F.silu(z.float())).view(M, N // 512, 512)
        return F.rms_norm(gated, (512,), eps=1e-5).view(M, N) * w

    return Work(run, y, want)


@triton.jit
def relu_squared_backward(x_ptr, dy_ptr, dx_ptr, BLOCK: tl.constexpr):
    """dx of y = max(x, 0) ** 2: little work in each of many programs."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    positive = tl.maximum(tl.load(x_ptr + at), 0.0)
    tl.store(dx_ptr + at, 2.0 * positive * tl.load(dy_ptr + at))


@case("gradients of squared ReLU, 96 Mi fp16, 256 per program of 1 warp", SQUARED, dict(n=96 * MI), dict(n=1024))
def _(device, n):
    x, dy, dx = normal(device, n, dtype=HALF), normal(device, n, dtype=HALF), empty(device, n, dtype=HALF)

    def run():
        relu_squared_backward[(n // 256,)](x, dy, dx, BLOCK=256, num_warps=1)

    return Work(run, dx, lambda: 2 * x.float().relu() * dy.float())


@triton.jit
def rotate_by_two(x_ptr, y_ptr, H, SIDE, BT: tl.constexpr):
    """Heads of 64 of image patches: 32 numbers are turned by a patch's row, and 32 by its column. The angles are computed."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    i = tl.arange(0, 16)
    frequency = tl.exp2(i.to(tl.float32) * -0.8304820237)  # 10000 ** (-i / 16)
    patch = token % (SIDE * SIDE)
    at = (token * H + tl.program_id(1))[:, None] * 64 + i[None, :]
    for axis in tl.static_range(2):
        position = patch // SIDE if axis == 0 else patch % SIDE
        angle = position[:, None].to(tl.float32) * frequency[None, :]
        cos, sin = tl.cos(angle), tl.sin(angle)
        a = tl.load(x_ptr + at + 32 * axis).to(tl.float32)
        b = tl.load(x_ptr + at + 32 * axis + 16).to(tl.float32)
        tl.store(y_ptr + at + 32 * axis, (a * cos - b * sin).to(y_ptr.dtype.element_ty))
        tl.store(y_ptr + at + 32 * axis + 16, (b * cos + a * sin).to(y_ptr.dtype.element_ty))


@case(
    "rotations by row and column, 128 images of 24 x 24 patches, 16 heads of 64 fp16, 2 warps",
    AXES,
    dict(images=128, side=24, H=16),
    dict(images=1, side=4, H=3),
)
def _(device, images, side, H):
    T = images * side * side
    x, y = normal(device, T, H, 64, dtype=HALF), empty(device, T, H, 64, dtype=HALF)

    def want():
        frequency = 10000.0 ** (-torch.arange(16, device=x.device) / 16)
        patch = torch.arange(T, device=x.device) % side**2
        parts = x.float().view(T, H, 2, 2, 16)
        angle = torch.stack([patch // side, patch % side], 1)[:, None, :, None] * frequency
        a, b = parts[:, :, :, 0], parts[:, :, :, 1]
        return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 3).view(T, H, 64)

    return Work(lambda: rotate_by_two[(T // 16, H)](x, y, H, side, BT=16, num_warps=2), y, want)


@triton.jit
def into_rings(k_ptr, v_ptr, start_ptr, k_cache_ptr, v_cache_ptr, W: tl.constexpr, H: tl.constexpr, D: tl.constexpr):
    """A token's keys, normed, and values of all heads go to its place in the ring of its sequence."""
    sequence, i = tl.program_id(1), tl.program_id(0)
    head, d = tl.arange(0, H)[:, None], tl.arange(0, D)[None, :]
    source = ((sequence * tl.num_programs(0) + i) * H + head) * D + d
    slot = (tl.load(start_ptr + sequence) + i) % W
    to = ((sequence * W + slot) * H + head) * D + d
    k = tl.load(k_ptr + source).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, 1) / D + 1e-6)[:, None]
    tl.store(k_cache_ptr + to, k.to(k_cache_ptr.dtype.element_ty))
    tl.store(v_cache_ptr + to, tl.load(v_ptr + source))


@case(
    "1000 keys and values each for 72 rings of 4096, 8 heads of 128 bf16, keys normed",
    RINGS,
    dict(B=72, S=1000, W=4096, H=8),
    dict(B=2, S=5, W=8, H=2),
)
def _(device, B, S, W, H):
    k, v = normal(device, B, S, H, 128), normal(device, B, S, H, 128)
    k_cache, v_cache = empty(device, B, W, H, 128), empty(device, B, W, H, 128)
    start = known(device, 100_000, B, dtype=torch.int64)

    def want():
        slot = (start[:, None] + torch.arange(S, device=k.device)) % W
        caches = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
        for cache, new in zip(caches, (F.rms_norm(k.float(), (128,), eps=1e-6), v), strict=True):
            cache[torch.arange(B, device=k.device)[:, None], slot] = new.to(cache.dtype)
        return caches

    def run():
        into_rings[(S, B)](k, v, start, k_cache, v_cache, W=W, H=H, D=128)

    return Work(run, (k_cache, v_cache), want)


@triton.jit
def gated_pairs(x_ptr, y_ptr, N, limit, BLOCK: tl.constexpr):
    """A gate and a number lie side by side: both are loaded in one tile, which is split in registers."""
    row, col = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = (row * N + col)[:, None] * 2 + tl.arange(0, 2)[None, :]
    gate, up = tl.split(tl.load(x_ptr + at, mask=col[:, None] < N, other=0.0).to(tl.float32))
    gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
    y = (up + 1) * gate * tl.sigmoid(1.702 * gate)
    tl.store(y_ptr + row * N + col, y.to(y_ptr.dtype.element_ty), mask=col < N)


@case(
    "clamped gates of pairs, 24576 rows of 2880 pairs bf16, split in registers",
    PAIRS,
    dict(M=24 * KI, N=2880),
    dict(M=3, N=1100),
)
def _(device, M, N):
    x, y = 3 * normal(device, M, N, 2), empty(device, M, N)

    def want():
        gate, up = x[..., 0].float().clamp(max=7), x[..., 1].float().clamp(-7, 7)
        return (up + 1) * gate * (1.702 * gate).sigmoid()

    return Work(lambda: gated_pairs[(M, triton.cdiv(N, 1024))](x, y, N, 7.0, BLOCK=1024), y, want)


@triton.jit
def mix_with_last(x_ptr, share_ptr, y_ptr, T, N: tl.constexpr, OUT: tl.constexpr):
    """OUT mixes of a token and the one before it, each with shares of its own for all columns."""
    token, col = tl.program_id(0), tl.arange(0, N)
    x = tl.load(x_ptr + token * N + col).to(tl.float32)
    before = tl.load(x_ptr + (token - 1) * N + col, mask=(token % T > 0) & (col < N), other=0.0).to(tl.float32)
    for i in tl.static_range(OUT):
        y = x + (before - x) * tl.load(share_ptr + i * N + col)
        tl.store(y_ptr + (i * tl.num_programs(0) + token) * N + col, y.to(y_ptr.dtype.element_ty))


@case(
    "5 mixes of a token and the last one, 8 sequences of 2048 tokens of 2048 bf16, 8 warps",
    SHIFTS,
    dict(B=8, T=2048, N=2048),
    dict(B=2, T=3, N=256),
)
def _(device, B, T, N):
    x, share = normal(device, B, T, N), normal(device, 5, N, dtype=FLOAT).sigmoid()
    y = empty(device, 5, B, T, N)

    def run():
        mix_with_last[(B * T,)](x, share, y, T, N=N, OUT=5, num_warps=8)

    def want():
        before = F.pad(x.float(), (0, 0, 1, 0))[:, :-1]
        return torch.lerp(x.float(), before, share[:, None, None])

    return Work(run, y, want)


@triton.jit
def residual_distribution(p_ptr, q_ptr, y_ptr, V, BLOCK: tl.constexpr):
    """max(p - q, 0), scaled to the sum 1: a word is drawn from it where a draft's word was rejected. Two passes over the row."""
    first = tl.program_id(0) * V
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, V, BLOCK):
        at = i + tl.arange(0, BLOCK)
        p = tl.load(p_ptr + first + at, mask=at < V, other=0.0)
        q = tl.load(q_ptr + first + at, mask=at < V, other=0.0)
        total += tl.maximum(p - q, 0.0)
    factor = 1 / tl.sum(total, 0)
    for i in range(0, V, BLOCK):
        at = i + tl.arange(0, BLOCK)
        p = tl.load(p_ptr + first + at, mask=at < V, other=0.0)
        q = tl.load(q_ptr + first + at, mask=at < V, other=0.0)
        tl.store(y_ptr + first + at, tl.maximum(p - q, 0.0) * factor, mask=at < V)


@case(
    "192 distributions of 151,936 words fp32 less those of a draft, two passes, 16 warps",
    RESIDUES,
    dict(M=192, V=151_936),
    dict(M=2, V=9000),
)
def _(device, M, V):
    p, q = normal(device, M, V, dtype=FLOAT).sigmoid() / V, normal(device, M, V, dtype=FLOAT).sigmoid() / V
    y = empty(device, M, V, dtype=FLOAT)

    def run():
        residual_distribution[(M,)](p, q, y, V, BLOCK=8192, num_warps=16)

    return Work(run, y, lambda: F.normalize((p - q).relu(), 1, 1))


@triton.jit
def largest_with_places(x_ptr, y_ptr, place_ptr, N: tl.constexpr, K: tl.constexpr):
    """The K largest of a row, in order: a number's bits and its place are put into one int32, which is sorted."""
    i = tl.arange(0, N)
    bits = tl.load(x_ptr + tl.program_id(0) * N + i).to(tl.int16, bitcast=True).to(tl.int32)
    key = (tl.where(bits < 0, bits ^ 0x7FFF, bits) << 10) + (1023 - i)
    key = tl.topk(key, K)
    to = tl.program_id(0) * K + tl.arange(0, K)
    tl.store(place_ptr + to, 1023 - (key & 1023))
    bits = key >> 10
    bits = tl.where(bits < 0, bits ^ 0x7FFF, bits).to(tl.int16)
    tl.store(y_ptr + to, bits.to(tl.float16, bitcast=True))


@case("the 16 largest of 32 Ki rows of 1024 fp16 and their places, by a sort", LARGEST, dict(M=32 * KI), dict(M=3))
def _(device, M):
    x, y, places = (
        normal(device, M, 1024, dtype=HALF),
        empty(device, M, 16, dtype=HALF),
        empty(device, M, 16, dtype=INT32),
    )

    def want():
        """Of equal ones the first comes first."""
        found = x.float().sort(dim=1, descending=True, stable=True)
        return found.values[:, :16], found.indices[:, :16]

    return Work(lambda: largest_with_places[(M,)](x, y, places, N=1024, K=16), (y, places), want)


@triton.jit
def entropies(x_ptr, label_ptr, log_ptr, entropy_ptr, V, BLOCK: tl.constexpr):
    """The log of the label's probability and the entropy of a row in one pass: each lane keeps a maximum and two sums."""
    x_ptr += tl.program_id(0) * V
    largest = tl.full((BLOCK,), -1e30, tl.float32)
    total, weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i in range(0, V, BLOCK):
        at = i + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < V, other=-60000.0).to(tl.float32)
        new = tl.maximum(largest, x)
        shrink, e = tl.exp(largest - new), tl.exp(x - new)
        total, weighted, largest = total * shrink + e, weighted * shrink + e * x, new
    top = tl.max(largest, 0)
    share = tl.exp(largest - top)
    whole = tl.sum(total * share, 0)
    lse = top + tl.log(whole)
    label = tl.load(x_ptr + tl.load(label_ptr + tl.program_id(0))).to(tl.float32)
    tl.store(log_ptr + tl.program_id(0), label - lse)
    tl.store(entropy_ptr + tl.program_id(0), lse - tl.sum(weighted * share, 0) / whole)


@case(
    "entropies and labels of 4096 rows of 49,155 fp16, one pass",
    ENTROPIES,
    dict(M=4096, V=49_155, block=2048),
    dict(M=3, V=301, block=128),
)
def _(device, M, V, block):
    x, label = normal(device, M, V, dtype=HALF), known(device, V, M, dtype=torch.int64)
    log, entropy = empty(device, M, dtype=FLOAT), empty(device, M, dtype=FLOAT)

    def want():
        logs = x.float().log_softmax(1)
        return logs.gather(1, label[:, None])[:, 0], -(logs.exp() * logs).sum(1)

    return Work(lambda: entropies[(M,)](x, label, log, entropy, V, BLOCK=block), (log, entropy), want)
