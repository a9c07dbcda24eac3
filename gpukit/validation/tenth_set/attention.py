"""Attention: all in fp8, to latents and shared keys, along rows of pairs, and to the neighbors of pixels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, FP8, HALF, KI, Work, empty, normal
from gpukit.validation.tenth_set.case import case

EIGHT, LATENTS = "attention all in fp8", "attention of prompts to latents"
ROWS, PIXELS = "attention along rows with biases of pairs", "attention of pixels to neighbors"


@triton.jit
def attention_fp8(
    q_ptr, k_ptr, v_ptr, q_scale_ptr, k_scale_ptr, o_ptr, T, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Queries, keys, values and probabilities in fp8. Each block of BM queries and of BN keys has a scale; values lie with
    their tokens side by side, as a product in fp8 wants them. Probabilities are times 256, so that small ones do not
    become 0."""
    block, head = tl.program_id(0), tl.program_id(1)
    m, d = block * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + (head * T + m)[:, None] * D + d[None, :])
    q_scale = tl.load(q_scale_ptr + head * (T // BM) + block) * 1.4427 / D**0.5
    largest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    for begin in range(0, T, BN):
        n = begin + tl.arange(0, BN)
        k = tl.load(k_ptr + (head * T + n)[:, None] * D + d[None, :])
        s = tl.dot(q, tl.trans(k)) * (q_scale * tl.load(k_scale_ptr + head * (T // BN) + begin // BN))
        new = tl.maximum(largest, tl.max(s, 1))
        shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None] + 8)
        v = tl.load(v_ptr + (head * D + d)[:, None] * T + n[None, :])
        total = total * shrink + tl.sum(p, 1)
        # Apart from the sum so far: sums of products in fp8 keep few bits, and small ones would be lost beside it.
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), tl.trans(v))
        largest = new
    tl.store(o_ptr + (head * T + m)[:, None] * D + d[None, :], (out / total[:, None]).to(o_ptr.dtype.element_ty))


@case(
    "attention all in fp8, scales of blocks, 16 heads of 128, 4096 tokens, 128x64, 8 warps, 3 stages",
    EIGHT,
    dict(H=16, T=4 * KI, D=128),
    dict(H=2, T=256, D=32),
)
def _(device, H, T, D):
    """Values are near 1, so that the roundings of probabilities to fp8 are small beside them."""
    q, k = normal(device, H, T, D, dtype=FP8), normal(device, H, T, D, dtype=FP8)
    v, o = (normal(device, H, D, T, dtype=HALF) / 4 + 1).to(FP8), empty(device, H, T, D)
    q_scale = normal(device, H, T // 128, dtype=FLOAT).sigmoid() + 0.5
    k_scale = normal(device, H, T // 64, dtype=FLOAT).sigmoid() + 0.5

    def run():
        attention_fp8[(T // 128, H)](q, k, v, q_scale, k_scale, o, T, D=D, BM=128, BN=64, num_warps=8, num_stages=3)

    def want():
        queries = q.float() * q_scale.repeat_interleave(128, 1)[:, :, None]
        keys = k.float() * k_scale.repeat_interleave(64, 1)[:, :, None]
        return F.scaled_dot_product_attention(queries, keys, v.float().mT)

    return Work(run, o, want)


@triton.jit
def attention_to_latents(
    q_ptr,
    k_ptr,
    shared_ptr,
    v_ptr,
    o_ptr,
    scale,
    T,
    H,
    D: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Causal attention, where a query has D numbers for the keys of its head, and R that are turned by position, for
    keys that all heads share. The last block, which has the most keys, comes first."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    m, d, r = block * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, R)
    rows, live = (m * H + head)[:, None], (m < T)[:, None]
    q = tl.load(q_ptr + rows * (D + R) + d[None, :], mask=live, other=0.0)
    turned = tl.load(q_ptr + rows * (D + R) + D + r[None, :], mask=live, other=0.0)
    largest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    for begin in range(0, tl.minimum((block + 1) * BM, T), BN):
        n = begin + tl.arange(0, BN)
        at, there = (n * H + head)[:, None] * D + d[None, :], (n < T)[:, None]
        s = tl.dot(q, tl.trans(tl.load(k_ptr + at, mask=there, other=0.0)))
        shared = tl.load(shared_ptr + n[:, None] * R + r[None, :], mask=there, other=0.0)
        s = tl.dot(turned, tl.trans(shared), s) * scale
        s = tl.where(n[None, :] <= m[:, None], s, -1e30)
        new = tl.maximum(largest, tl.max(s, 1))
        shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        total, out = total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])
        largest = new
    tl.store(o_ptr + rows * D + d[None, :], (out / total[:, None]).to(o_ptr.dtype.element_ty), mask=live)


@case(
    "causal attention, 16 heads of 128 and 64 that share keys, 6100 tokens bf16, 128x64, 8 warps, 2 stages",
    LATENTS,
    dict(T=6100, H=16, D=128, R=64),
    dict(T=170, H=2, D=32, R=16),
)
def _(device, T, H, D, R):
    q, k, v = normal(device, T, H, D + R), normal(device, T, H, D), normal(device, T, H, D)
    shared, o = normal(device, T, R), empty(device, T, H, D)

    def run():
        attention_to_latents[(triton.cdiv(T, 128), H)](
            q, k, shared, v, o, (D + R) ** -0.5 * 1.4427, T, H, D=D, R=R, BM=128, BN=64, num_warps=8, num_stages=2
        )

    def want():
        keys = torch.cat([k, shared[:, None].expand(T, H, R)], 2)
        x = (y.float().transpose(0, 1)[None] for y in (q, keys, v))
        return F.scaled_dot_product_attention(*x, is_causal=True)[0].transpose(0, 1)

    return Work(run, o, want)


@triton.jit
def along_rows(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    gate_ptr,
    o_ptr,
    scale,
    N,
    H,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Attention along each row of a table of N columns. All rows share the biases of pairs of columns; a gate
    follows."""
    head, row = tl.program_id(1), tl.program_id(2)
    m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    at, live = ((row * N + m) * H + head)[:, None] * D + d[None, :], (m < N)[:, None]
    q = tl.load(q_ptr + at, mask=live, other=0.0)
    largest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    for begin in range(0, N, BN):
        n = begin + tl.arange(0, BN)
        keys, there = ((row * N + n) * H + head)[:, None] * D + d[None, :], n < N
        both = live & there[None, :]
        bias = tl.load(bias_ptr + (head * N + m)[:, None] * N + n[None, :], mask=both, other=0.0).to(tl.float32)
        s = tl.dot(q, tl.trans(tl.load(k_ptr + keys, mask=there[:, None], other=0.0))) * scale + bias
        s = tl.where(there[None, :], s * 1.4427, -1e30)
        new = tl.maximum(largest, tl.max(s, 1))
        shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
        v = tl.load(v_ptr + keys, mask=there[:, None], other=0.0)
        total, out = total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])
        largest = new
    gate = tl.sigmoid(tl.load(gate_ptr + at, mask=live, other=0.0).to(tl.float32))
    tl.store(o_ptr + at, (out / total[:, None] * gate).to(o_ptr.dtype.element_ty), mask=live)


@case(
    "attention along 160 rows of 385, biases of pairs and gates, 8 heads of 32 bf16, 64x32, 2 warps, 1 stage",
    ROWS,
    dict(S=160, N=385, H=8, D=32),
    dict(S=2, N=70, H=2, D=16),
)
def _(device, S, N, H, D):
    q, k, v, gate, o = (normal(device, S, N, H, D) for _ in range(5))
    bias = normal(device, H, N, N)

    def run():
        along_rows[(triton.cdiv(N, 64), H, S)](
            q, k, v, bias, gate, o, D**-0.5, N, H, D=D, BM=64, BN=32, num_warps=2, num_stages=1
        )

    def want():
        x = (y.float().transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(*x, attn_mask=bias.float())
        return out.transpose(1, 2) * gate.float().sigmoid()

    return Work(run, o, want)


@triton.jit
def around_pixels(
    q_ptr, k_ptr, v_ptr, o_ptr, scale, HIGH, WIDE, H, D: tl.constexpr, SIDE: tl.constexpr, BQ: tl.constexpr
):
    """Each pixel attends to the SIDE x SIDE pixels around it, which at an edge are moved into the picture. There is no
    product of tiles: BQ pixels of a line meet one neighbor each at a time."""
    x, d = tl.program_id(0) % tl.cdiv(WIDE, BQ) * BQ + tl.arange(0, BQ), tl.arange(0, D)
    y, head, image = tl.program_id(0) // tl.cdiv(WIDE, BQ), tl.program_id(1), tl.program_id(2)
    live = (x < WIDE)[:, None]
    at = (((image * HIGH + y) * WIDE + x) * H + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=live, other=0.0).to(tl.float32) * scale
    top = tl.minimum(tl.maximum(y - SIDE // 2, 0), HIGH - SIDE)
    left = tl.minimum(tl.maximum(x - SIDE // 2, 0), WIDE - SIDE)
    largest, total = tl.full((BQ,), -1e30, tl.float32), tl.zeros((BQ,), tl.float32)
    out = tl.zeros((BQ, D), tl.float32)
    for neighbor in range(SIDE * SIDE):
        pixel = (image * HIGH + top + neighbor // SIDE) * WIDE + left + neighbor % SIDE
        near = (pixel * H + head)[:, None] * D + d[None, :]
        s = tl.sum(q * tl.load(k_ptr + near, mask=live, other=0.0).to(tl.float32), 1)
        new = tl.maximum(largest, s)
        shrink, p = tl.exp2(largest - new), tl.exp2(s - new)
        v = tl.load(v_ptr + near, mask=live, other=0.0).to(tl.float32)
        total, out = total * shrink + p, out * shrink[:, None] + p[:, None] * v
        largest = new
    tl.store(o_ptr + at, (out / total[:, None]).to(o_ptr.dtype.element_ty), mask=live)


@case(
    "attention of pixels to 7 x 7 around them, 6 pictures of 60 x 60, 8 heads of 32 fp16, 32 pixels of a line, 4 warps",
    PIXELS,
    dict(B=6, side=60, H=8, D=32),
    dict(B=1, side=9, H=2, D=16),
)
def _(device, B, side, H, D):
    q, k, v, o = (normal(device, B, side, side, H, D, dtype=HALF) for _ in range(4))

    def run():
        around_pixels[(triton.cdiv(side, 32) * side, H, B)](
            q, k, v, o, D**-0.5 * 1.4427, side, side, H, D=D, SIDE=7, BQ=32, num_warps=4
        )

    def want():
        first = (torch.arange(side, device=q.device) - 3).clamp(0, side - 7)
        near = first[:, None] + torch.arange(7, device=q.device)
        keys, values = (x.float()[:, near[:, None, :, None], near[None, :, None, :]].flatten(3, 4) for x in (k, v))
        p = torch.einsum("byxhd,byxnhd->byxhn", q.float() * D**-0.5, keys).softmax(4)
        return torch.einsum("byxhn,byxnhd->byxhd", p, values)

    return Work(run, o, want)
