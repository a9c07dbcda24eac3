"""Attention: three gradients at once, shifted scores, caches of 4 bits, dropout, keys that are chosen, documents."""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, HALF, INT8, UINT8, Work, empty, known, normal, place
from gpukit.validation.twelfth_set.case import case

GRADIENTS, DISTANCES = "three gradients of attention in one launch", "attention with shifted scores of distances"
FOUR_BITS, DROPPED = "one token and a cache of 4 bits", "attention with dropout"
CHOSEN, DOCUMENTS = "attention to latents that each token chooses", "documents by their best words"
LOW = (1 << 32) - 1


@triton.jit
def all_gradients(
    q_ptr, k_ptr, v_ptr, g_ptr, log_ptr, less_ptr, dq_ptr, dk_ptr, dv_ptr, scale, T,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program keeps BN keys and goes over all queries. It holds the gradients of its keys and values and adds its share
    of each query's gradient by atomics. The logarithm of the sum of a query's exponentials is known, and the sum that is
    subtracted from the gradients of its weights."""
    n, head, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1), tl.arange(0, D)
    keys, there = (head * T + n)[:, None] * D + d[None, :], (n < T)[:, None]
    k, v = tl.load(k_ptr + keys, mask=there, other=0.0), tl.load(v_ptr + keys, mask=there, other=0.0)
    dk, dv = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    for begin in range(0, T, BM):
        m = begin + tl.arange(0, BM)
        rows, live = (head * T + m)[:, None] * D + d[None, :], m < T
        q = tl.load(q_ptr + rows, mask=live[:, None], other=0.0)
        g = tl.load(g_ptr + rows, mask=live[:, None], other=0.0)
        log = tl.load(log_ptr + head * T + m, mask=live, other=1e30)
        less = tl.load(less_ptr + head * T + m, mask=live, other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * 1.4427) - log[:, None])
        dv = tl.dot(tl.trans(p.to(g.dtype)), g, dv)
        ds = (p * (tl.dot(g, tl.trans(v)) - less[:, None]) * scale).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, dk)
        tl.atomic_add(dq_ptr + rows, tl.dot(ds, k), mask=live[:, None], sem="relaxed")
    tl.store(dk_ptr + keys, dk.to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_ptr + keys, dv.to(dv_ptr.dtype.element_ty), mask=there)


@case(
    "gradients of queries, keys and values, 32 heads of 64, 2000 tokens bf16, queries by atomics, 64x128, 8 warps, 2 stages",
    GRADIENTS,
    dict(H=32, T=2000, D=64),
    dict(H=2, T=150, D=32),
)
def _(device, H, T, D):
    """The gradients of queries are not cleared by what is measured."""
    q, k, v, g, dk, dv = (normal(device, H, T, D) for _ in range(6))
    log, less = normal(device, H, T, dtype=FLOAT) + 8, normal(device, H, T, dtype=FLOAT)
    dq, scale = empty(device, H, T, D, dtype=FLOAT), D**-0.5

    def run():
        all_gradients[(triton.cdiv(T, 128), H)](
            q, k, v, g, log, less, dq, dk, dv, scale, T, D=D, BM=64, BN=128, num_warps=8, num_stages=2
        )

    def want():
        out = []
        for head in range(H):
            a, b, c, e = (x[head].float() for x in (q, k, v, g))
            p = torch.exp2(a @ b.T * (scale * 1.4427) - log[head][:, None])
            ds = p * (e @ c.T - less[head][:, None]) * scale
            out.append((ds @ b, ds.T @ a, p.T @ e))
        return tuple(torch.stack(x) for x in zip(*out, strict=True))

    return Work(run, (dq, dk, dv), want)


@triton.jit
def shifted_attention(
    q_ptr, k_ptr, v_ptr, far_ptr, length_ptr, o_ptr, scale, T, H,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Each score gets another one, which depends on how far query and key are apart: another product has made these for all
    2 * T - 1 distances of a query, and row m is read from place T - 1 - m on. A sample has a length of its own."""
    first, head, b, d = tl.program_id(0) * BM, tl.program_id(1), tl.program_id(2), tl.arange(0, D)
    length = tl.load(length_ptr + b)
    if first >= length:
        return
    m = first + tl.arange(0, BM)
    rows, live = ((b * T + m) * H + head)[:, None] * D + d[None, :], m < length
    q = tl.load(q_ptr + rows, mask=live[:, None], other=0.0)
    far_ptr += (b * H + head).to(tl.int64) * T * (2 * T - 1)
    largest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    for begin in range(0, length, BN):
        n = begin + tl.arange(0, BN)
        keys, there = ((b * T + n) * H + head)[:, None] * D + d[None, :], n < length
        k = tl.load(k_ptr + keys, mask=there[:, None], other=0.0)
        at = (m * (2 * T - 1) + (T - 1) - m)[:, None] + n[None, :]
        far = tl.load(far_ptr + at, mask=live[:, None] & there[None, :], other=0.0)
        s = tl.where(there[None, :], (tl.dot(q, tl.trans(k)) + far) * scale, -1e30)
        new = tl.maximum(largest, tl.max(s, 1))
        shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
        v = tl.load(v_ptr + keys, mask=there[:, None], other=0.0)
        total, out = total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])
        largest = new
    tl.store(o_ptr + rows, (out / total[:, None]).to(o_ptr.dtype.element_ty), mask=live[:, None])


@case(
    "attention of 20 sounds of 200 to 900 frames, 8 heads of 64 fp16, scores of 1799 distances added, 64x64, 4 warps, 3 stages",
    DISTANCES,
    dict(B=20, T=900, H=8, D=64),
    dict(B=2, T=150, H=2, D=32),
)
def _(device, B, T, H, D):
    """Rows behind a sample's length stay 0."""
    q, k, v, o = (normal(device, B, T, H, D, dtype=HALF) for _ in range(4))
    far = normal(device, B, H, T, 2 * T - 1, dtype=HALF)
    length, scale = known(device, T - T * 2 // 9 + 1, B) + T * 2 // 9, D**-0.5

    def run():
        grid = triton.cdiv(T, 64), H, B
        shifted_attention[grid](
            q, k, v, far, length, o, scale * 1.4427, T, H, D=D, BM=64, BN=64, num_warps=4, num_stages=3
        )

    def want():
        out = torch.zeros(B, T, H, D, device=o.device)
        for b, count in enumerate(length.tolist()):
            x, y, z = (a[b, :count].float().transpose(0, 1) for a in (q, k, v))
            i = torch.arange(count, device=o.device)
            at = (T - 1 - i[:, None] + i).expand(H, count, count)
            s = x @ y.mT + far[b, :, :count].float().gather(2, at)
            out[b, :count] = ((s * scale).softmax(2) @ z).transpose(0, 1)
        return out

    return Work(run, o, want)


@triton.jit
def four_bit_parts(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, length_ptr, part_ptr, largest_ptr, total_ptr, scale, T,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """GROUP queries that share a head of keys go over one part of a cache. A byte holds number d of a key in its low bits and
    number d + D / 2 in its high ones, 8 more than it is; a token's scale is applied behind and before the products."""
    b, head, part, parts = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    i, d = tl.arange(0, 16), tl.arange(0, D // 2)
    length = tl.load(length_ptr + b)
    each = tl.cdiv(tl.cdiv(length, parts), BN) * BN
    row = b * HEADS * GROUP + head * GROUP + i
    q_at, live = row[:, None] * D + d[None, :], (i < GROUP)[:, None]
    q_low, q_high = tl.load(q_ptr + q_at, mask=live, other=0.0), tl.load(q_ptr + q_at + D // 2, mask=live, other=0.0)
    largest, total = tl.full((16,), -1e30, tl.float32), tl.zeros((16,), tl.float32)
    low, high = tl.zeros((16, D // 2), tl.float32), tl.zeros((16, D // 2), tl.float32)
    for begin in range(part * each, tl.minimum((part + 1) * each, length), BN):
        n = begin + tl.arange(0, BN)
        token, there = (b * T + n) * HEADS + head, n < length
        at = token[:, None] * (D // 2) + d[None, :]
        k = tl.load(k_ptr + at, mask=there[:, None], other=0)
        s = tl.dot(q_low, tl.trans(((k & 15).to(tl.float32) - 8).to(q_low.dtype)))
        s = tl.dot(q_high, tl.trans(((k >> 4).to(tl.float32) - 8).to(q_low.dtype)), s)
        s *= (tl.load(k_scale_ptr + token, mask=there, other=0.0).to(tl.float32) * scale)[None, :]
        s = tl.where(there[None, :], s, -1e30)
        new = tl.maximum(largest, tl.max(s, 1))
        shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + at, mask=there[:, None], other=0)
        p = (p * tl.load(v_scale_ptr + token, mask=there, other=0.0).to(tl.float32)[None, :]).to(q_low.dtype)
        low = tl.dot(p, ((v & 15).to(tl.float32) - 8).to(q_low.dtype), low * shrink[:, None])
        high = tl.dot(p, ((v >> 4).to(tl.float32) - 8).to(q_low.dtype), high * shrink[:, None])
        largest = new
    at = (row * parts + part)[:, None] * D + d[None, :]
    tl.store(part_ptr + at, low, mask=live)
    tl.store(part_ptr + at + D // 2, high, mask=live)
    tl.store(largest_ptr + row * parts + part, largest, mask=i < GROUP)
    tl.store(total_ptr + row * parts + part, total, mask=i < GROUP)


@triton.jit
def sum_of_parts(part_ptr, largest_ptr, total_ptr, y_ptr, D: tl.constexpr, PARTS: tl.constexpr):
    """The parts of a query's result are brought to one maximum and added."""
    row, p, d = tl.program_id(0), tl.arange(0, PARTS), tl.arange(0, D)
    largest = tl.load(largest_ptr + row * PARTS + p)
    factor = tl.exp2(largest - tl.max(largest, 0))
    total = tl.sum(tl.load(total_ptr + row * PARTS + p) * factor, 0)
    parts = tl.load(part_ptr + (row * PARTS + p)[:, None] * D + d[None, :])
    tl.store(y_ptr + row * D + d, (tl.sum(parts * factor[:, None], 0) / total).to(y_ptr.dtype.element_ty))


@case(
    "one token of 40 sequences of 500 to 16,000, 64 heads of 128 share 8, cache of 4 bits, 8 parts and their sum, 4 warps, 3 stages",
    FOUR_BITS,
    dict(B=40, T=16_000, heads=8, D=128),
    dict(B=2, T=600, heads=2, D=32),
)
def _(device, B, T, heads, D):
    group, parts, scale = 8, 8, D**-0.5
    q, y = normal(device, B, heads * group, D), empty(device, B, heads * group, D)
    k, v = (normal(device, B, T, heads, D // 2, dtype=INT8).view(UINT8) for _ in range(2))
    k_scale, v_scale = (normal(device, B, T, heads, dtype=HALF).sigmoid() / 4 for _ in range(2))
    length = place(device, T // 32 + known("meta", T - T // 32 + 1, B))
    part = empty(device, B, heads * group, parts, D, dtype=FLOAT)
    largest, total = (empty(device, B, heads * group, parts, dtype=FLOAT) for _ in range(2))

    def run():
        four_bit_parts[(B, heads, parts)](
            q, k, v, k_scale, v_scale, length, part, largest, total, scale * 1.4427, T,
            HEADS=heads, GROUP=group, D=D, BN=64, num_warps=4, num_stages=3,
        )  # fmt: skip
        sum_of_parts[(B * heads * group,)](part, largest, total, y, D=D, PARTS=parts, num_warps=2)

    def full(x, factor, b, count):
        code = x[b, :count].to(y.device)
        return (torch.cat([code & 15, code >> 4], 2).float() - 8) * factor[b, :count, :, None].float()

    def want():
        out = []
        for b, count in enumerate(length.tolist()):
            keys, values = full(k, k_scale, b, count), full(v, v_scale, b, count)
            queries = q[b].float().view(heads, group, D)
            p = (torch.einsum("hgd,nhd->hgn", queries, keys) * scale).softmax(2)
            out.append(torch.einsum("hgn,nhd->hgd", p, values).flatten(0, 1))
        return torch.stack(out)

    return Work(run, y, want)


@triton.jit
def attention_with_dropout(
    q_ptr, k_ptr, v_ptr, o_ptr, scale, bound, keep, T, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """A hash of a weight's place says whether it is dropped; the sum that weights are divided by has all of them."""
    m, head, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1), tl.arange(0, D)
    rows = (head * T + m)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + rows, mask=(m < T)[:, None], other=0.0)
    largest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    for begin in range(0, T, BN):
        n = begin + tl.arange(0, BN)
        keys, there = (head * T + n)[:, None] * D + d[None, :], n < T
        s = tl.dot(q, tl.trans(tl.load(k_ptr + keys, mask=there[:, None], other=0.0))) * scale
        s = tl.where(there[None, :], s, -1e30)
        new = tl.maximum(largest, tl.max(s, 1))
        shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
        total = total * shrink + tl.sum(p, 1)
        x = ((head * T + m) * T)[:, None].to(tl.uint32) + n[None, :].to(tl.uint32)
        x = x * 747796405 + 2891336453
        x = (x ^ (x >> 16)) * 277803737
        p = tl.where(((x ^ (x >> 15)) >> 8).to(tl.int32) >= bound, p, 0.0)
        v = tl.load(v_ptr + keys, mask=there[:, None], other=0.0)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None])
        largest = new
    y = out / (total * keep)[:, None]
    tl.store(o_ptr + rows, y.to(o_ptr.dtype.element_ty), mask=(m < T)[:, None])


@case(
    "attention with a tenth of the weights dropped, 16 heads of 128, 3500 tokens bf16, 128x64, 8 warps, 3 stages",
    DROPPED,
    dict(H=16, T=3500, D=128),
    dict(H=2, T=150, D=32),
)
def _(device, H, T, D):
    q, k, v, o = (normal(device, H, T, D) for _ in range(4))
    scale, bound = D**-0.5, (1 << 24) // 10

    def run():
        attention_with_dropout[(triton.cdiv(T, 128), H)](
            q, k, v, o, scale * 1.4427, bound, 0.9, T, D=D, BM=128, BN=64, num_warps=8, num_stages=3
        )

    def want():
        out = []
        for head in range(H):
            x = (torch.arange(T * T, device=o.device).view(T, T) + head * T * T) * 747796405 + 2891336453 & LOW
            x = (x ^ x >> 16) * 277803737 & LOW
            p = (q[head].float() @ k[head].float().T * scale).softmax(1) * ((x ^ x >> 15) >> 8 >= bound)
            out.append(p @ v[head].float() / 0.9)
        return torch.stack(out)

    return Work(run, o, want)


@triton.jit
def attend_to_chosen(
    q_ptr, kv_ptr, choice_ptr, o_ptr, scale, COUNT, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BN: tl.constexpr
):
    """Each token has COUNT places of a cache, which it attends to with all of its H heads. Of what lies there, D numbers are
    keys and values, and R more are keys only."""
    token, h, d, r = tl.program_id(0), tl.arange(0, H), tl.arange(0, D), tl.arange(0, R)
    q_at = (token * H + h)[:, None] * (D + R)
    q, turned = tl.load(q_ptr + q_at + d[None, :]), tl.load(q_ptr + q_at + D + r[None, :])
    largest, total = tl.full((H,), -1e30, tl.float32), tl.zeros((H,), tl.float32)
    out = tl.zeros((H, D), tl.float32)
    for begin in range(0, COUNT, BN):
        row = tl.load(choice_ptr + token * COUNT + begin + tl.arange(0, BN))[:, None] * (D + R)
        kv = tl.load(kv_ptr + row + d[None, :])
        s = tl.dot(q, tl.trans(kv))
        s = tl.dot(turned, tl.trans(tl.load(kv_ptr + row + D + r[None, :])), s) * scale
        new = tl.maximum(largest, tl.max(s, 1))
        shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
        total, out = total * shrink + tl.sum(p, 1), tl.dot(p.to(kv.dtype), kv, out * shrink[:, None])
        largest = new
    y = (out / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + (token * H + h)[:, None] * D + d[None, :], y)


@case(
    "300 tokens attend to 2048 of 60,000 latents each that they choose, 64 heads of 512 + 64 bf16, 64x32, 8 warps, 2 stages",
    CHOSEN,
    dict(M=300, T=60_000, count=2048, H=64, D=512, R=64),
    dict(M=3, T=200, count=64, H=16, D=64, R=16),
)
def _(device, M, T, count, H, D, R):
    q, kv, o = normal(device, M, H, D + R), normal(device, T, D + R), empty(device, M, H, D)
    choice, scale = known(device, T, M, count), (D + R) ** -0.5

    def run():
        attend_to_chosen[(M,)](q, kv, choice, o, scale * 1.4427, count, H=H, D=D, R=R, BN=32, num_warps=8, num_stages=2)

    def want():
        out = []
        for x, mine in zip(q, choice.to(o.device).long(), strict=True):
            keys = kv[mine].float()
            out.append((x.float() @ keys.T * scale).softmax(1) @ keys[:, :D])
        return torch.stack(out)

    return Work(run, o, want)


@triton.jit
def best_words(
    q_ptr, x_ptr, start_ptr, y_ptr, WORDS, Q: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """A document's score for a query: the sum over the query's Q words of their largest product with a word of the document.
    A program takes BM words of queries at a time."""
    document, d, queries = tl.program_id(0), tl.arange(0, D), WORDS // Q
    begin, end = tl.load(start_ptr + document), tl.load(start_ptr + document + 1)
    for first in range(0, WORDS, BM):
        q = tl.load(q_ptr + (first + tl.arange(0, BM))[:, None] * D + d[None, :])
        best = tl.full((BM,), -1e30, tl.float32)
        for n in range(begin, end, BN):
            word = n + tl.arange(0, BN)
            x = tl.load(x_ptr + word[:, None] * D + d[None, :], mask=(word < end)[:, None], other=0.0)
            s = tl.where((word < end)[None, :], tl.dot(q, tl.trans(x)), -1e30)
            best = tl.maximum(best, tl.max(s, 1))
        score = tl.sum(tl.reshape(best, (BM // Q, Q)), 1)
        tl.store(y_ptr + document * queries + first // Q + tl.arange(0, BM // Q), score)


@case(
    "scores of 5000 documents of 20 to 180 words for 16 queries of 32 words by best words, 128 fp16, 128x64, 4 warps, 3 stages",
    DOCUMENTS,
    dict(documents=5000, queries=16, D=128),
    dict(documents=5, queries=8, D=32),
)
def _(device, documents, queries, D):
    length = 20 + known("meta", 161, documents)
    start = F.pad(length.cumsum(0), (1, 0)).int()
    q, x = normal(device, queries * 32, D, dtype=HALF), normal(device, int(start[-1]), D, dtype=HALF)
    y, where = empty(device, documents, queries, dtype=FLOAT), place(device, start)

    def run():
        best_words[(documents,)](q, x, where, y, queries * 32, Q=32, D=D, BM=128, BN=64, num_warps=4, num_stages=3)

    def want():
        ends, words = start.tolist(), q.float()
        scores = [(words @ x[a:b].float().T).amax(1).view(queries, 32).sum(1) for a, b in pairwise(ends)]
        return torch.stack(scores)

    return Work(run, y, want)
