"""Attention by plain pointers: causal, in blocks of 64, and of one new token over a cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, INT32, Work, case, empty, normal, place

CAUSAL, LAUNCHES = "causal attention", "several launches"
INF = float("inf")


@triton.jit
def causal(q_ptr, k_ptr, v_ptr, o_ptr, T, GROUP, WINDOW, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """softmax(q k^T) v for BM queries of a head; GROUP heads share keys and values, WINDOW keys are seen."""
    head = tl.program_id(1)
    offs_m, offs_d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + head * T * D + offs_m[:, None] * D + offs_d[None, :])
    first = k_ptr + head // GROUP * T * D
    values = v_ptr + head // GROUP * T * D
    m, s = tl.full((BM,), -float("inf"), tl.float32), tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    begin = max(0, tl.program_id(0) * BM - WINDOW + 1) // BN * BN
    for start in range(begin, (tl.program_id(0) + 1) * BM, BN):
        offs_n = start + tl.arange(0, BN)
        k = tl.load(first + offs_n[None, :] * D + offs_d[:, None])
        distance = offs_m[:, None] - offs_n[None, :]
        x = tl.where((distance >= 0) & (distance < WINDOW), tl.dot(q, k) * scale, -1e30)
        new = tl.maximum(m, tl.max(x, 1))
        p = tl.exp2(x - new[:, None])
        old = tl.exp2(m - new)
        s = s * old + tl.sum(p, 1)
        v = tl.load(values + offs_n[:, None] * D + offs_d[None, :])
        total = tl.dot(p.to(v.dtype), v, total * old[:, None])
        m = new
    o = (total / s[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + head * T * D + offs_m[:, None] * D + offs_d[None, :], o)


def _causal(device, H, T, D, group=1, window=None, num_warps=4, num_stages=3, BM=64):
    q, o = normal(device, H, T, D), empty(device, H, T, D)
    k, v = normal(device, H // group, T, D), normal(device, H // group, T, D)
    seen = window or T
    scale = D**-0.5 * 1.4426950408889634  # of exp2

    def want():
        i = torch.arange(T, device=q.device)
        distance = i[:, None] - i[None, :]
        mask = (distance >= 0) & (distance < seen)
        heads = zip(q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), strict=True)
        return torch.stack(
            [F.scaled_dot_product_attention(*(x.float() for x in each), attn_mask=mask) for each in heads]
        )

    def run():
        return causal[(T // BM, H)](
            q, k, v, o, T, group, seen, scale, D=D, BM=BM, BN=64, num_warps=num_warps, num_stages=num_stages
        )

    return Work(run, o, want)


_SMALL = dict(H=2, T=192, D=64)
case("causal attention, 32 heads of 64, 4096 tokens, 64x64", CAUSAL, dict(H=32, T=4096, D=64), _SMALL, sample=8)(
    _causal
)
case("causal attention, 16 heads of 128, 8192 tokens, 64x64", CAUSAL, dict(H=16, T=8192, D=128), _SMALL, sample=8)(
    _causal
)
case(
    "causal attention, 32 heads share 8, 4096 tokens, 64x64, 2 stages", CAUSAL,
    dict(H=32, T=4096, D=128, group=4, num_stages=2), _SMALL | dict(group=2), sample=8,
)(_causal)  # fmt: skip
case(
    "causal attention, window of 512, 16384 tokens, 128x64", CAUSAL,
    dict(H=16, T=16384, D=64, window=512, BM=128), dict(H=2, T=256, D=64, window=70, BM=128), sample=8,
)(_causal)  # fmt: skip


@triton.jit
def one_token(
    q_ptr, k_ptr, v_ptr, pages_ptr, part_ptr, lse_ptr, T, scale,
    PARTS: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """G queries that share a cache of pages of PAGE tokens: one of PARTS parts of the T keys per program."""
    row, part = tl.program_id(0), tl.program_id(1)
    offs_g, offs_d, offs_n = tl.arange(0, G), tl.arange(0, D), tl.arange(0, PAGE)
    q = tl.load(q_ptr + (row * G + offs_g[:, None]) * D + offs_d[None, :])
    m, s = tl.full((G,), -float("inf"), tl.float32), tl.zeros((G,), tl.float32)
    total = tl.zeros((G, D), tl.float32)
    pages = T // PAGE // PARTS
    for i in range(part * pages, (part + 1) * pages):
        page = tl.load(pages_ptr + row * (T // PAGE) + i).to(tl.int64) * PAGE * D
        k = tl.load(k_ptr + page + offs_n[None, :] * D + offs_d[:, None])
        x = tl.dot(q, k) * scale
        new = tl.maximum(m, tl.max(x, 1))
        p = tl.exp2(x - new[:, None])
        old = tl.exp2(m - new)
        s = s * old + tl.sum(p, 1)
        v = tl.load(v_ptr + page + offs_n[:, None] * D + offs_d[None, :])
        total = tl.dot(p.to(v.dtype), v, total * old[:, None])
        m = new
    at = (row * PARTS + part) * G + offs_g
    tl.store(part_ptr + at[:, None] * D + offs_d[None, :], total / s[:, None])
    tl.store(lse_ptr + at, m + tl.log2(s))


@triton.jit
def merge(part_ptr, lse_ptr, o_ptr, PARTS: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """The parts of one query, weighted by their sums."""
    row, g = tl.program_id(0) // G, tl.program_id(0) % G
    at = (row * PARTS + tl.arange(0, PARTS)) * G + g
    lse = tl.load(lse_ptr + at)
    w = tl.exp2(lse - tl.max(lse, 0))
    part = tl.load(part_ptr + at[:, None] * D + tl.arange(0, D)[None, :])
    o = tl.sum(part * (w / tl.sum(w, 0))[:, None], 0)
    tl.store(o_ptr + tl.program_id(0) * D + tl.arange(0, D), o.to(o_ptr.dtype.element_ty))


def _one_token(device, rows, T, parts, D=128, page=64, G=16):
    q, o = normal(device, rows, G, D), empty(device, rows, G, D)
    k, v = normal(device, rows * T, D), normal(device, rows * T, D)
    order = torch.randperm(rows * T // page, generator=torch.Generator().manual_seed(0)).to(INT32)
    pages = place(device, order.view(rows, T // page))
    partial, lse = empty(device, rows, parts, G, D, dtype=FLOAT), empty(device, rows, parts, G, dtype=FLOAT)

    def run():
        one_token[(rows, parts)](
            q, k, v, pages, partial, lse, T, D**-0.5 * 1.4426950408889634, PARTS=parts, PAGE=page, G=G, D=D
        )
        merge[(rows * G,)](partial, lse, o, PARTS=parts, G=G, D=D)

    def want():
        keys, values = (x.view(-1, page, D)[pages.long()].view(rows, T, D).float() for x in (k, v))
        return F.scaled_dot_product_attention(q.float(), keys, values)

    return Work(run, o, want)


case(
    "one token, 64 rows of 8192 in pages, 8 parts",
    LAUNCHES,
    dict(rows=64, T=8192, parts=8),
    dict(rows=2, T=512, parts=2),
)(_one_token)
case(
    "one token, 8 rows of 65536 in pages, 64 parts",
    LAUNCHES,
    dict(rows=8, T=65536, parts=64),
    dict(rows=1, T=512, parts=4),
)(_one_token)
