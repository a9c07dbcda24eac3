"""Attention: gradients of queries, a prefix that all see, one token with a cache of fp8, and retention in chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, FP8, HALF, KI, Work, empty, known, normal, place
from gpukit.validation.seventh_set.case import case

QUERIES, PREFIX = "gradients of queries", "attention with a prefix that all see"
CACHED, RETENTION = "one token and a cache of fp8", "retention in chunks"


@triton.jit
def query_gradients(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, scale, T, SHARE: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Causal attention's gradient of BM queries, whose scores are computed again. `lse` and `scale` are for exp2."""
    first, head = tl.program_id(0) * BM, tl.program_id(1)
    m, d = first + tl.arange(0, BM), tl.arange(0, D)
    rows = (head * T + m)[:, None] * D + d[None, :]
    q, do = tl.load(q_ptr + rows), tl.load(do_ptr + rows)
    lse, delta = tl.load(lse_ptr + head * T + m), tl.load(delta_ptr + head * T + m)
    dq = tl.zeros((BM, D), tl.float32)
    for begin in range(0, first + BM, BN):
        n = begin + tl.arange(0, BN)
        at = (head // SHARE * T + n)[:, None] * D + d[None, :]
        k, v = tl.load(k_ptr + at), tl.load(v_ptr + at)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
        p = tl.where(m[:, None] >= n[None, :], p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(dq_ptr + rows, (dq * scale).to(dq_ptr.dtype.element_ty))


@case(
    "causal gradients of queries, 32 heads of 128 share 8, 4096 tokens bf16, 128x64, 8 warps",
    QUERIES,
    dict(H=32, share=4, T=4096, D=128),
    dict(H=2, share=2, T=256, D=16),
)
def _(device, H, share, T, D):
    q, do, dq = normal(device, H, T, D), normal(device, H, T, D), empty(device, H, T, D)
    k, v = normal(device, H // share, T, D), normal(device, H // share, T, D)
    lse, delta = normal(device, H, T, dtype=FLOAT) + 9, normal(device, H, T, dtype=FLOAT)
    scale = D**-0.5 * 1.4427

    def run():
        query_gradients[(T // 128, H)](
            q, k, v, do, lse, delta, dq, scale, T, SHARE=share, D=D, BM=128, BN=64, num_warps=8, num_stages=2
        )

    def want():
        out = torch.empty_like(dq, dtype=FLOAT)
        for h in range(H):  # one head's scores are large
            keys, values = k[h // share].float(), v[h // share].float()
            p = torch.exp2(q[h].float() @ keys.T * scale - lse[h][:, None]).tril()
            out[h] = (p * (do[h].float() @ values.T - delta[h][:, None])) @ keys * scale
        return out

    return Work(run, dq, want)


@triton.jit
def attend(q, k_ptr, v_ptr, at, largest, total, out, scale, m, n, MASKED: tl.constexpr):
    """What one block of keys adds."""
    s = tl.dot(q, tl.trans(tl.load(k_ptr + at))) * scale
    if MASKED:
        s = tl.where(m[:, None] >= n[None, :], s, -1e30)
    new = tl.maximum(largest, tl.max(s, 1))
    shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
    v = tl.load(v_ptr + at)
    return new, total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])


@triton.jit
def prefix_attention(
    q_ptr, k_ptr, v_ptr, o_ptr, scale, T, PREFIX: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Each token sees the first PREFIX ones and all before itself: a loop without a mask, and one with it."""
    first = tl.program_id(1) * BM
    head = tl.program_id(0) * T
    m, d = first + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + (head + m)[:, None] * D + d[None, :])
    largest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    free = tl.maximum(first, PREFIX)
    for begin in range(0, free, BN):
        n = begin + tl.arange(0, BN)
        at = (head + n)[:, None] * D + d[None, :]
        largest, total, out = attend(q, k_ptr, v_ptr, at, largest, total, out, scale, m, n, MASKED=False)
    for begin in range(free, first + BM, BN):
        n = begin + tl.arange(0, BN)
        at = (head + n)[:, None] * D + d[None, :]
        largest, total, out = attend(q, k_ptr, v_ptr, at, largest, total, out, scale, m, n, MASKED=True)
    tl.store(o_ptr + (head + m)[:, None] * D + d[None, :], (out / total[:, None]).to(o_ptr.dtype.element_ty))


@case(
    "attention with a prefix of 2048, 16 heads of 64, 8192 tokens fp16, 128x64, 4 warps",
    PREFIX,
    dict(H=16, T=8192, prefix=2048, D=64),
    dict(H=2, T=384, prefix=192, D=16),
)
def _(device, H, T, prefix, D):
    q, k, v, o = *(normal(device, H, T, D, dtype=HALF) for _ in range(3)), empty(device, H, T, D, dtype=HALF)

    def run():
        prefix_attention[(H, T // 128)](
            q, k, v, o, D**-0.5 * 1.4427, T, PREFIX=prefix, D=D, BM=128, BN=64, num_warps=4, num_stages=3
        )

    def want():
        live = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
        live[:, :prefix] = True
        return torch.stack([
            F.scaled_dot_product_attention(*(x[h].float()[None] for x in (q, k, v)), attn_mask=live)[0] for h in range(H)
        ])  # fmt: skip

    return Work(run, o, want)


@triton.jit
def one_token(
    q_ptr, k_ptr, v_ptr, start_ptr, o_ptr, scale, v_scale, G: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """SHARE queries of one token fill a part of a tile of 16 rows; all keys and values of its sequence are fp8."""
    group, sequence = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(start_ptr + sequence), tl.load(start_ptr + sequence + 1)
    i, d, n = tl.arange(0, 16), tl.arange(0, D), tl.arange(0, BN)
    rows, mine = ((sequence * G + group) * SHARE + i)[:, None] * D + d[None, :], i[:, None] < SHARE
    q = tl.load(q_ptr + rows, mask=mine, other=0.0)
    largest, total = tl.full((16,), -1e30, tl.float32), tl.zeros((16,), tl.float32)
    out = tl.zeros((16, D), tl.float32)
    for begin in range(start, stop, BN):
        at = ((begin + n) * G + group)[:, None] * D + d[None, :]
        live = begin + n < stop
        k = tl.load(k_ptr + at, mask=live[:, None], other=0.0).to(q.dtype)
        s = tl.where(live[None, :], tl.dot(q, tl.trans(k)) * scale, -1e30)
        new = tl.maximum(largest, tl.max(s, 1))
        shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
        v = tl.load(v_ptr + at, mask=live[:, None], other=0.0).to(q.dtype)
        out = tl.dot(p.to(q.dtype), v, out * shrink[:, None])
        total, largest = total * shrink + tl.sum(p, 1), new
    tl.store(o_ptr + rows, (out * (v_scale / total)[:, None]).to(o_ptr.dtype.element_ty), mask=mine)


@case(
    "one token of 128 sequences of 200 to 4000, 64 heads of 128 share 8, cache of fp8",
    CACHED,
    dict(B=128, longest=4000, G=8, share=8, D=128),
    dict(B=3, longest=300, G=2, share=4, D=32),
)
def _(device, B, longest, G, share, D):
    length = longest // 20 + known("meta", longest - longest // 20, B, dtype=torch.int64)
    start, tokens = place(device, F.pad(length.cumsum(0), (1, 0)).int()), int(length.sum())
    q, o = normal(device, B, G, share, D), empty(device, B, G, share, D)
    k, v = normal(device, tokens, G, D, dtype=FP8), normal(device, tokens, G, D, dtype=FP8)

    def run():
        one_token[(G, B)](
            q, k, v, start, o, 0.5 * D**-0.5 * 1.4427, 0.25, G=G, SHARE=share, D=D, BN=64, num_warps=4, num_stages=3
        )

    def want():
        parts = []
        for a, b, c in zip(q, k.split(length.tolist()), v.split(length.tolist()), strict=True):
            s = torch.einsum("gsd,ngd->gsn", a.float(), b.float()) * 0.5 * D**-0.5
            parts.append(torch.einsum("gsn,ngd->gsd", s.softmax(2), c.float()) * 0.25)
        return torch.stack(parts)

    return Work(run, o, want)


@triton.jit
def retention(q_ptr, k_ptr, v_ptr, decay_ptr, o_ptr, T, D: tl.constexpr, C: tl.constexpr):
    """A head of one sequence: chunks of C tokens in turn, with a state of D x D that waits for the chunk before."""
    first = tl.program_id(0) * T
    i, d = tl.arange(0, C), tl.arange(0, D)
    decay = tl.load(decay_ptr + tl.program_id(0))
    back = i[:, None] - i[None, :]
    inside = tl.where(back >= 0, tl.exp2(decay * back), 0.0)
    before, after = tl.exp2(decay * (i + 1))[:, None], tl.exp2(decay * (C - 1 - i))[:, None]
    whole = tl.exp2(decay * C)
    state = tl.zeros((D, D), tl.float32)
    for begin in range(0, T, C):
        at = (first + begin + i)[:, None] * D + d[None, :]
        q, k, v = tl.load(q_ptr + at), tl.load(k_ptr + at), tl.load(v_ptr + at)
        o = tl.dot(q, state.to(q.dtype)) * before
        s = tl.dot(q, tl.trans(k)) * inside
        o = tl.dot(s.to(v.dtype), v, o)
        state = tl.dot(tl.trans((k * after).to(k.dtype)), v, state * whole)
        tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty))


@case(
    "retention of 48 heads of 64, 16384 tokens bf16, one program per head",
    RETENTION,
    dict(H=48, T=16 * KI, D=64),
    dict(H=2, T=192, D=16),
)
def _(device, H, T, D):
    q, k, v, o = *(normal(device, H, T, D) for _ in range(3)), empty(device, H, T, D)
    decay = -normal(device, H, dtype=FLOAT).sigmoid() / 16

    def run():
        retention[(H,)](q, k, v, decay, o, T, D=D, C=64, num_warps=4)

    def want():
        out = torch.empty_like(o, dtype=FLOAT)
        back = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
        for h in range(H):
            out[h] = (q[h].float() @ k[h].float().T * torch.exp2(decay[h] * back)).tril() @ v[h].float()
        return out

    return Work(run, o, want)
