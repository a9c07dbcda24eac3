"""Attention: dilated, by latents, with sigmoids, the rows before its gradients, and keys that are pooled or weighed."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit.validation.eleventh_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, Work, empty, normal

DILATED, ROWS, POOLED = "dilated attention", "rows before gradients of attention", "keys pooled in blocks that overlap"
LATENTS, KEPT, SIGMOIDS = "latents that look at long inputs", "weights of keys for a cache", "attention with sigmoids"


@triton.jit
def dilated_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    scale,
    H,
    LENGTH,
    D: tl.constexpr,
    STEP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Every STEP-th token of a segment of LENGTH attends to the others of its kind; head h begins with token
    h % STEP."""
    segment, head, d = tl.program_id(1), tl.program_id(2), tl.arange(0, D)
    m, count = tl.program_id(0) * BM + tl.arange(0, BM), LENGTH // STEP
    first = segment * LENGTH + head % STEP
    rows = ((first + m * STEP) * H + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + rows, mask=(m < count)[:, None], other=0.0)
    largest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    for begin in range(0, count, BN):
        n = begin + tl.arange(0, BN)
        keys, there = ((first + n * STEP) * H + head)[:, None] * D + d[None, :], n < count
        s = tl.dot(q, tl.trans(tl.load(k_ptr + keys, mask=there[:, None], other=0.0))) * scale
        s = tl.where(there[None, :], s, -1e30)
        new = tl.maximum(largest, tl.max(s, 1))
        shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
        v = tl.load(v_ptr + keys, mask=there[:, None], other=0.0)
        total, out = total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])
        largest = new
    tl.store(o_ptr + rows, (out / total[:, None]).to(o_ptr.dtype.element_ty), mask=(m < count)[:, None])


@case(
    "dilated attention, every 4th token of segments of 8000, 16 heads of 64, 32,000 tokens bf16, 128x64, 4 warps, 3 stages",
    DILATED,
    dict(T=32_000, H=16, D=64, length=8000),
    dict(T=280, H=5, D=32, length=280),
)
def _(device, T, H, D, length):
    """Places of the result that no head reaches stay 0."""
    q, k, v, o = (normal(device, T, H, D) for _ in range(4))
    segments, step = T // length, 4

    def run():
        grid = triton.cdiv(length // step, 128), segments, H
        dilated_attention[grid](
            q, k, v, o, D**-0.5 * 1.4427, H, length, D=D, STEP=step, BM=128, BN=64, num_warps=4, num_stages=3
        )

    def want():
        out = torch.zeros(segments, length, H, D, device=o.device)
        for head in range(H):
            x = (y.view(segments, length, H, D)[:, head % step :: step, head].float() for y in (q, k, v))
            out[:, head % step :: step, head] = F.scaled_dot_product_attention(*x)
        return out.view(T, H, D)

    return Work(run, o, want)


@triton.jit
def rows_before_gradients(o_ptr, g_ptr, y_ptr, T, H, D: tl.constexpr, BT: tl.constexpr):
    """Sums of a result of attention times its gradient, which the gradients of scores need. Tokens come before heads,
    and in the sums behind them."""
    t, d, head, b = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, D), tl.program_id(1), tl.program_id(2)
    at, live = ((b * T + t) * H + head)[:, None] * D + d[None, :], t < T
    o = tl.load(o_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)
    tl.store(y_ptr + (b * H + head) * T + t, tl.sum(o * g, 1), mask=live)


@case(
    "sums of results times gradients, 5 sequences of 5001 tokens, 32 heads of 128 bf16, 16 tokens of a head, 2 warps",
    ROWS,
    dict(B=5, T=5001, H=32, D=128),
    dict(B=2, T=37, H=3, D=32),
)
def _(device, B, T, H, D):
    o, g, y = normal(device, B, T, H, D), normal(device, B, T, H, D), empty(device, B, H, T, dtype=FLOAT)

    def run():
        rows_before_gradients[(triton.cdiv(T, 16), H, B)](o, g, y, T, H, D=D, BT=16, num_warps=2)

    return Work(run, y, lambda: (o.float() * g.float()).sum(3).mT)


@triton.jit
def pool_keys(k_ptr, place_ptr, weight_ptr, y_ptr, H, D: tl.constexpr, LONG: tl.constexpr, STEP: tl.constexpr):
    """One key for LONG tokens, and the next for those that begin STEP later: a weighted sum of keys to which vectors for
    their places in the block are added."""
    block, head, i, d = tl.program_id(0), tl.program_id(1), tl.arange(0, LONG), tl.arange(0, D)
    k = tl.load(k_ptr + ((block * STEP + i) * H + head)[:, None] * D + d[None, :]).to(tl.float32)
    place = tl.load(place_ptr + i[:, None] * D + d[None, :])
    weight = tl.load(weight_ptr + head * LONG + i)
    y = tl.sum((k + place) * weight[:, None], 0)
    tl.store(y_ptr + (block * H + head) * D + d, y.to(y_ptr.dtype.element_ty))


@case(
    "keys of 200,000 tokens, 8 heads of 128 bf16, pooled in blocks of 32 that begin every 16 tokens, 4 warps",
    POOLED,
    dict(T=200_000, H=8, D=128),
    dict(T=112, H=3, D=32),
)
def _(device, T, H, D):
    blocks = (T - 32) // 16 + 1
    k, y, place = normal(device, T, H, D), empty(device, blocks, H, D), normal(device, 32, D, dtype=FLOAT) / 2
    weight = normal(device, H, 32, dtype=FLOAT).softmax(1)

    def run():
        pool_keys[(blocks, H)](k, place, weight, y, H, D=D, LONG=32, STEP=16, num_warps=4)

    def want():
        out = sum(k[i : i + 16 * blocks : 16].float() * weight[:, i, None] for i in range(32))
        return out + weight @ place

    return Work(run, y, want)


@triton.jit
def look_at_inputs(q_ptr, k_ptr, v_ptr, o_ptr, scale, T, H, D: tl.constexpr, L: tl.constexpr, BN: tl.constexpr):
    """All L latents of a head look at all T inputs of a sample. The latents are the same for each sample, and keys and
    values of an input lie side by side."""
    head, b, i, d = tl.program_id(0), tl.program_id(1), tl.arange(0, L), tl.arange(0, D)
    q = tl.load(q_ptr + (head * L + i)[:, None] * D + d[None, :])
    largest, total = tl.full((L,), -1e30, tl.float32), tl.zeros((L,), tl.float32)
    out = tl.zeros((L, D), tl.float32)
    for begin in range(0, T, BN):
        n = begin + tl.arange(0, BN)
        at, there = ((b * T + n) * H + head)[:, None] * 2 * D + d[None, :], n < T
        s = tl.dot(q, tl.trans(tl.load(k_ptr + at, mask=there[:, None], other=0.0))) * scale
        s = tl.where(there[None, :], s, -1e30)
        new = tl.maximum(largest, tl.max(s, 1))
        shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
        v = tl.load(v_ptr + at, mask=there[:, None], other=0.0)
        total, out = total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])
        largest = new
    at = ((b * L + i) * H + head)[:, None] * D + d[None, :]
    tl.store(o_ptr + at, (out / total[:, None]).to(o_ptr.dtype.element_ty))


@case(
    "64 latents look at 30,001 inputs of 12 samples, 8 heads of 64 fp16, 96 programs, 64x128, 4 warps, 3 stages",
    LATENTS,
    dict(B=12, T=30_001, H=8, D=64),
    dict(B=2, T=300, H=2, D=32),
)
def _(device, B, T, H, D):
    q, pairs = normal(device, H, 64, D, dtype=HALF), normal(device, B, T, H, 2, D, dtype=HALF)
    o = empty(device, B, 64, H, D, dtype=HALF)
    k, v = pairs[..., 0, :], pairs[..., 1, :]

    def run():
        look_at_inputs[(H, B)](q, k, v, o, D**-0.5 * 1.4427, T, H, D=D, L=64, BN=128, num_warps=4, num_stages=3)

    def want():
        keys, values = k.float().transpose(1, 2), v.float().transpose(1, 2)
        return F.scaled_dot_product_attention(q.float().expand(B, -1, -1, -1), keys, values).transpose(1, 2)

    return Work(run, o, want)


@triton.jit
def weigh_keys(q_ptr, k_ptr, log_ptr, y_ptr, scale, T, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """How much weight each key gets from all queries that see it: a cache keeps the heaviest. The logarithm of the sum
    of each query's exponentials is known."""
    block, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    n = block * BN + tl.arange(0, BN)
    k = tl.load(k_ptr + (head * T + n)[:, None] * D + d[None, :], mask=(n < T)[:, None], other=0.0)
    total = tl.zeros((BN,), tl.float32)
    for begin in range(block * BN, T, BM):
        m = begin + tl.arange(0, BM)
        q = tl.load(q_ptr + (head * T + m)[:, None] * D + d[None, :], mask=(m < T)[:, None], other=0.0)
        log = tl.load(log_ptr + head * T + m, mask=m < T, other=1e30)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - log[None, :])
        total += tl.sum(tl.where(n[:, None] <= m[None, :], p, 0.0), 1)
    tl.store(y_ptr + head * T + n, total, mask=n < T)


@case(
    "weights of keys by all later queries, 32 heads of 128, 4500 tokens bf16, 128x64, 8 warps, 2 stages",
    KEPT,
    dict(H=32, T=4500, D=128),
    dict(H=2, T=200, D=32),
)
def _(device, H, T, D):
    q, k = normal(device, H, T, D), normal(device, H, T, D)
    log, y = normal(device, H, T, dtype=FLOAT) + 8, empty(device, H, T, dtype=FLOAT)

    def run():
        grid = triton.cdiv(T, 128), H
        weigh_keys[grid](q, k, log, y, D**-0.5 * 1.4427, T, D=D, BM=64, BN=128, num_warps=8, num_stages=2)

    def want():
        out = []
        for queries, keys, logs in zip(q.float(), k.float(), log, strict=True):
            s = queries @ keys.T * (D**-0.5 * 1.4427) - logs[:, None]
            out.append(s.exp2().tril().sum(0))
        return torch.stack(out)

    return Work(run, y, want)


@triton.jit
def sigmoid_attention(q, k, v, o, scale, bias, T, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Each score becomes a sigmoid of its own: no sum over a row is needed. Values behind the last token are read as
    0, so scores need no mask."""
    m, head = tl.program_id(0) * BM, tl.program_id(1)
    query = tl.reshape(q.load([head, m, 0]), (BM, D))
    out = tl.zeros((BM, D), tl.float32)
    for n in range(0, T, BN):
        s = tl.dot(query, tl.trans(tl.reshape(k.load([head, n, 0]), (BN, D)))) * scale + bias
        p = 1 / (1 + tl.exp2(-s))
        out = tl.dot(p.to(q.dtype), tl.reshape(v.load([head, n, 0]), (BN, D)), out)
    o.store([head, m, 0], tl.reshape(out.to(o.dtype), (1, BM, D)))


@case(
    "attention with sigmoids, 16 heads of 128, 4001 tokens fp16, descriptors of 128 and 64 rows, 8 warps, 2 stages",
    SIGMOIDS,
    dict(H=16, T=4001, D=128),
    dict(H=2, T=200, D=32),
)
def _(device, H, T, D):
    q, k, v, o = (normal(device, H, T, D, dtype=HALF) for _ in range(4))
    long, short = [1, 128, D], [1, 64, D]
    views = [TensorDescriptor.from_tensor(x, block) for x, block in ((q, long), (k, short), (v, short), (o, long))]
    bias = -math.log(T)

    def run():
        sigmoid_attention[(triton.cdiv(T, 128), H)](
            *views, D**-0.5 * 1.4427, bias * 1.4427, T, D=D, BM=128, BN=64, num_warps=8, num_stages=2
        )

    def want():
        heads = zip(q.float(), k.float(), v.float(), strict=True)
        return torch.stack([(a @ b.T * D**-0.5 + bias).sigmoid() @ c for a, b, c in heads])

    return Work(run, o, want)
