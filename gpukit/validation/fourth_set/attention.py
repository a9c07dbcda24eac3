"""Attention with biases, with blocks that a table names, with shared heads, its gradients, and rotations of halves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation.fourth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, KI, Work, empty, known, normal

BIASES, NAMED, SHARED = "attention with biases", "attention to blocks that a table names", "one token, shared heads"
GRADIENTS, HALVES = "gradients of attention", "rotations of halves"


@triton.jit
def biased_attention(
    q_ptr, k_ptr, v_ptr, bias_ptr, o_ptr, T, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """A bias for each query and key is added to the scores: as many numbers as there are scores."""
    head = tl.program_id(1)
    offs_m, offs_d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + (head * T + offs_m)[:, None] * D + offs_d[None, :])
    m, s = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    for start in range(0, T, BN):
        offs_n = start + tl.arange(0, BN)
        at = (head * T + offs_n)[:, None] * D + offs_d[None, :]
        bias = tl.load(bias_ptr + (head * T + offs_m)[:, None] * T + offs_n[None, :])
        scores = tl.dot(q, tl.trans(tl.load(k_ptr + at))) * scale + bias.to(tl.float32)
        new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp(scores - new[:, None])
        decay = tl.exp(m - new)
        s = s * decay + tl.sum(p, 1)
        total = tl.dot(p.to(v_ptr.dtype.element_ty), tl.load(v_ptr + at), total * decay[:, None])
        m = new
    o = total / s[:, None]
    tl.store(o_ptr + (head * T + offs_m)[:, None] * D + offs_d[None, :], o.to(o_ptr.dtype.element_ty))


@case(
    "attention with a bias per score, 16 heads of 64, 4096 tokens bf16",
    BIASES,
    dict(H=16, T=4096, D=64),
    dict(H=2, T=128, D=64),
    sample=1,
)
def _(device, H, T, D):
    q, k, v, o = normal(device, H, T, D), normal(device, H, T, D), normal(device, H, T, D), empty(device, H, T, D)
    bias = normal(device, H, T, T)

    def run():
        return biased_attention[(T // 64, H)](q, k, v, bias, o, T, D**-0.5, D=D, BM=64, BN=64)

    def want():
        return ((q.float() @ k.float().mT) * D**-0.5 + bias.float()).softmax(2) @ v.float()

    return Work(run, o, want)


@triton.jit
def slopes_attention(q_ptr, k_ptr, v_ptr, o_ptr, T, H, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Causal, where a key that is d tokens back loses d times the slope of its head; the longest programs come first."""
    head = tl.program_id(0)
    slope = tl.exp2(-8.0 * (head + 1) / H)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    offs_m, offs_d = first + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + (head * T + offs_m)[:, None] * D + offs_d[None, :])
    m, s = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    for start in range(0, first + BM, BN):
        offs_n = start + tl.arange(0, BN)
        at = (head * T + offs_n)[:, None] * D + offs_d[None, :]
        back = offs_m[:, None] - offs_n[None, :]
        scores = tl.dot(q, tl.trans(tl.load(k_ptr + at))) * scale - slope * back.to(tl.float32)
        scores = tl.where(back >= 0, scores, -1e30)
        new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp(scores - new[:, None])
        decay = tl.exp(m - new)
        s = s * decay + tl.sum(p, 1)
        total = tl.dot(p.to(v_ptr.dtype.element_ty), tl.load(v_ptr + at), total * decay[:, None])
        m = new
    o = total / s[:, None]
    tl.store(o_ptr + (head * T + offs_m)[:, None] * D + offs_d[None, :], o.to(o_ptr.dtype.element_ty))


@case(
    "causal attention with slopes, 32 heads of 128, 4096 tokens bf16, 128x64",
    BIASES,
    dict(H=32, T=4096, D=128),
    dict(H=2, T=256, D=32),
    sample=8,
)
def _(device, H, T, D):
    q, k, v, o = normal(device, H, T, D), normal(device, H, T, D), normal(device, H, T, D), empty(device, H, T, D)

    def run():
        return slopes_attention[(H, T // 128)](q, k, v, o, T, H, D**-0.5, D=D, BM=128, BN=64, num_warps=8)

    def want():
        at = torch.arange(T, device=q.device)
        back = at[:, None] - at[None, :]
        slopes = torch.exp2(-8.0 * torch.arange(1, H + 1, device=q.device) / H)
        scores = (q.float() @ k.float().mT) * D**-0.5 - slopes[:, None, None] * back
        return scores.masked_fill(back < 0, -float("inf")).softmax(2) @ v.float()

    return Work(run, o, want)


@triton.jit
def named_attention(q_ptr, k_ptr, v_ptr, table_ptr, o_ptr, T, NAMED: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    """Queries of a block look at the NAMED blocks of keys that the row of a table says."""
    head, block = tl.program_id(1), tl.program_id(0)
    offs, offs_d = tl.arange(0, B), tl.arange(0, D)
    at_q = (head * T + block * B + offs)[:, None] * D + offs_d[None, :]
    q = tl.load(q_ptr + at_q)
    m, s = tl.full((B,), -1e30, tl.float32), tl.zeros((B,), tl.float32)
    total = tl.zeros((B, D), tl.float32)
    for i in range(NAMED):
        key = tl.load(table_ptr + block * NAMED + i)
        at = (head * T + key * B + offs)[:, None] * D + offs_d[None, :]
        scores = tl.dot(q, tl.trans(tl.load(k_ptr + at))) * 0.125
        new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp(scores - new[:, None])
        decay = tl.exp(m - new)
        s = s * decay + tl.sum(p, 1)
        total = tl.dot(p.to(v_ptr.dtype.element_ty), tl.load(v_ptr + at), total * decay[:, None])
        m = new
    tl.store(o_ptr + at_q, (total / s[:, None]).to(o_ptr.dtype.element_ty))


@case(
    "attention to 12 of 256 blocks of 64 that a table names, 32 heads of 64 fp16",
    NAMED,
    dict(H=32, T=16 * KI, named=12),
    dict(H=2, T=512, named=3),
)
def _(device, H, T, named):
    q, k, v, o = (normal(device, H, T, 64, dtype=HALF) for _ in range(4))
    table = known(device, T // 64, T // 64, named)

    def run():
        return named_attention[(T // 64, H)](q, k, v, table, o, T, NAMED=named, D=64, B=64)

    def want():
        out = []
        for block, keys in enumerate(table.long()):
            at = (keys[:, None] * 64 + torch.arange(64, device=keys.device)).view(-1)
            scores = q[:, block * 64 : block * 64 + 64].float() @ k[:, at].float().mT * 0.125
            out.append(scores.softmax(2) @ v[:, at].float())
        return torch.cat(out, 1)

    return Work(run, o, want)


@triton.jit
def shared_heads(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    m_ptr,
    s_ptr,
    T,
    SHARE: tl.constexpr,
    SPAN: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
):
    """SHARE heads of one new token look at SPAN of the keys that they have in common; 16 rows, most of them of no head."""
    of, part = tl.program_id(0), tl.program_id(1)
    row, offs_d = tl.arange(0, 16), tl.arange(0, D)
    live = row < SHARE
    q = tl.load(q_ptr + (of * SHARE + row)[:, None] * D + offs_d[None, :], mask=live[:, None], other=0.0)
    m, s = tl.full((16,), -1e30, tl.float32), tl.zeros((16,), tl.float32)
    total = tl.zeros((16, D), tl.float32)
    for start in range(part * SPAN, part * SPAN + SPAN, BN):
        at = (of * T + start + tl.arange(0, BN))[:, None] * D + offs_d[None, :]
        scores = tl.dot(q, tl.trans(tl.load(k_ptr + at))) * 0.0883883
        new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp(scores - new[:, None])
        decay = tl.exp(m - new)
        s = s * decay + tl.sum(p, 1)
        total = tl.dot(p.to(v_ptr.dtype.element_ty), tl.load(v_ptr + at), total * decay[:, None])
        m = new
    at = (of * SHARE + row) * tl.num_programs(1) + part
    tl.store(part_ptr + at[:, None] * D + offs_d[None, :], total, mask=live[:, None])
    tl.store(m_ptr + at, m, mask=live)
    tl.store(s_ptr + at, s, mask=live)


@triton.jit
def merge_spans(part_ptr, m_ptr, s_ptr, o_ptr, PARTS: tl.constexpr, D: tl.constexpr):
    at, d = tl.program_id(0) * PARTS + tl.arange(0, PARTS), tl.arange(0, D)
    m = tl.load(m_ptr + at)
    factor = tl.exp(m - tl.max(m, 0))
    total = tl.sum(tl.load(part_ptr + at[:, None] * D + d[None, :]) * factor[:, None], 0)
    o = total / tl.sum(tl.load(s_ptr + at) * factor, 0)
    tl.store(o_ptr + tl.program_id(0) * D + d, o.to(o_ptr.dtype.element_ty))


@case(
    "one token, 32 sequences of 8192, 32 heads of 128 share 8, 8 parts",
    SHARED,
    dict(B=32, T=8192, heads=8, share=4, D=128, parts=8),
    dict(B=2, T=256, heads=2, share=3, D=32, parts=2),
)
def _(device, B, T, heads, share, D, parts):
    q, o = normal(device, B * heads, share, D), empty(device, B * heads, share, D)
    k, v = normal(device, B * heads, T, D), normal(device, B * heads, T, D)
    part = empty(device, B * heads, share, parts, D, dtype=FLOAT)
    m, s = empty(device, B * heads, share, parts, dtype=FLOAT), empty(device, B * heads, share, parts, dtype=FLOAT)

    def run():
        shared_heads[(B * heads, parts)](q, k, v, part, m, s, T, SHARE=share, SPAN=T // parts, D=D, BN=64)
        merge_spans[(B * heads * share,)](part, m, s, o, PARTS=parts, D=D)

    return Work(run, o, lambda: (q.float() @ k.float().mT * 0.0883883).softmax(2) @ v.float())


@triton.jit
def key_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    T,
    scale,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """dk and dv of a block of keys: four products for each block of queries, probabilities from the sums of before."""
    head = tl.program_id(1)
    offs_n, offs_d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, D)
    at_k = (head * T + offs_n)[:, None] * D + offs_d[None, :]
    k, v = tl.load(k_ptr + at_k), tl.load(v_ptr + at_k)
    dk, dv = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    for start in range(0, T, BM):
        rows = head * T + start + tl.arange(0, BM)
        at = rows[:, None] * D + offs_d[None, :]
        q, do = tl.load(q_ptr + at), tl.load(do_ptr + at)
        p = tl.exp(tl.dot(k, tl.trans(q)) * scale - tl.load(lse_ptr + rows)[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - tl.load(delta_ptr + rows)[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(dk_ptr + at_k, (dk * scale).to(dk_ptr.dtype.element_ty))
    tl.store(dv_ptr + at_k, dv.to(dv_ptr.dtype.element_ty))


@case(
    "gradients of keys and values, 32 heads of 64, 2048 tokens bf16",
    GRADIENTS,
    dict(H=32, T=2048, D=64),
    dict(H=2, T=128, D=32),
    sample=1,
)
def _(device, H, T, D):
    q, k, v, do = (normal(device, H, T, D) for _ in range(4))
    lse, delta = normal(device, H, T, dtype=FLOAT).abs() + 4.0, normal(device, H, T, dtype=FLOAT)
    dk, dv = empty(device, H, T, D), empty(device, H, T, D)

    def run():
        return key_gradients[(T // 64, H)](q, k, v, do, lse, delta, dk, dv, T, D**-0.5, D=D, BM=64, BN=64)

    def want():
        p = (q.float() @ k.float().mT * D**-0.5 - lse[:, :, None]).exp()
        ds = p * (do.float() @ v.float().mT - delta[:, :, None])
        return ds.mT @ q.float() * D**-0.5, p.mT @ do.float()

    return Work(run, (dk, dv), want)


@triton.jit
def rotate_halves(qkv_ptr, cos_ptr, sin_ptr, y_ptr, HEADS, WIDTH, D: tl.constexpr, BLOCK: tl.constexpr):
    """The first half of each head of q and k with its second, where they lie in rows of q, k and v together."""
    token = tl.program_id(0)
    head, d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, D // 2)[None, :]
    live = head < HEADS
    cos, sin = tl.load(cos_ptr + token * D // 2 + d), tl.load(sin_ptr + token * D // 2 + d)
    at = token * WIDTH + head * D + d
    a = tl.load(qkv_ptr + at, mask=live).to(tl.float32)
    b = tl.load(qkv_ptr + at + D // 2, mask=live).to(tl.float32)
    to = (token * HEADS + head) * D + d
    tl.store(y_ptr + to, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=live)
    tl.store(y_ptr + to + D // 2, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=live)


@case(
    "rotary embedding of halves, 16384 tokens, 28 and 4 heads of 128 of q, k and v bf16",
    HALVES,
    dict(T=16 * KI, q=28, k=4, D=128),
    dict(T=3, q=3, k=2, D=32),
)
def _(device, T, q, k, D):
    x, y = normal(device, T, q + 2 * k, D), empty(device, T, q + k, D)
    angles = normal(device, T, D // 2, dtype=FLOAT)
    cos, sin = angles.cos(), angles.sin()

    def run():
        grid = (T, triton.cdiv(q + k, 8))
        return rotate_halves[grid](x, cos, sin, y, q + k, (q + 2 * k) * D, D=D, BLOCK=8)

    def want():
        a, b = x[:, : q + k].float().chunk(2, 2)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], 2)

    return Work(run, y, want)
