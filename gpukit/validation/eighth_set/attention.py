"""Attention: tiles that descriptors move, scores of int8, a tree of guesses, and windows of 49 pixels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit.validation.eighth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, INT8, Work, empty, known, normal, place

TILES, SCORES = "attention by descriptors", "attention with scores of int8"
TREES, WINDOWS = "attention of a tree of guesses", "attention in windows of 49"


@triton.jit
def add_block(s, v, largest, total, out):
    """Scores (for exp2) of one block of keys, and its values, join what is there."""
    new = tl.maximum(largest, tl.max(s, 1))
    shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
    return new, total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])


@triton.jit
def attention_by_descriptors(
    q, k, v, o, scale, T, SHARE: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """All queries see all keys of their sequence. The rows of all heads lie one after another."""
    head = tl.program_id(1)
    row, first = head * T + tl.program_id(0) * BM, head // SHARE * T
    queries = q.load([row, 0])
    largest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    for begin in range(first, first + T, BN):
        s = tl.dot(queries, tl.trans(k.load([begin, 0]))) * scale
        largest, total, out = add_block(s, v.load([begin, 0]), largest, total, out)
    o.store([row, 0], (out / total[:, None]).to(o.dtype))


@case(
    "attention, 24 heads of 128 share 6, 4096 tokens bf16, descriptors of 128 and 64 rows, 8 warps",
    TILES,
    dict(H=24, share=4, T=4096, D=128),
    dict(H=2, share=2, T=256, D=32),
)
def _(device, H, share, T, D):
    q, o = normal(device, H * T, D), empty(device, H * T, D)
    k, v = normal(device, H // share * T, D), normal(device, H // share * T, D)
    tiles = [TensorDescriptor.from_tensor(x, [rows, D]) for x, rows in ((q, 128), (k, 64), (v, 64), (o, 128))]

    def run():
        attention_by_descriptors[(T // 128, H)](
            *tiles, D**-0.5 * 1.4427, T, SHARE=share, D=D, BM=128, BN=64, num_warps=8, num_stages=3
        )

    def want():
        keys, values = (x.float().view(-1, T, D).repeat_interleave(share, 0) for x in (k, v))
        return F.scaled_dot_product_attention(q.float().view(H, T, D), keys, values).view(H * T, D)

    return Work(run, o, want)


@triton.jit
def integer_scores(
    q_ptr, k_ptr, v_ptr, q_scale_ptr, k_scale_ptr, o_ptr, T, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Queries and keys are int8; a block of either has a scale, for exp2. Values are not of 8 bits."""
    head, block = tl.program_id(1), tl.program_id(0)
    m, d, n = block * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN)
    rows = (head * T + m)[:, None] * D + d[None, :]
    q, q_scale = tl.load(q_ptr + rows), tl.load(q_scale_ptr + head * (T // BM) + block)
    largest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    for i in range(T // BN):
        at = (head * T + i * BN + n)[:, None] * D + d[None, :]
        s = tl.dot(q, tl.trans(tl.load(k_ptr + at)), out_dtype=tl.int32).to(tl.float32)
        s *= q_scale * tl.load(k_scale_ptr + head * (T // BN) + i)
        largest, total, out = add_block(s, tl.load(v_ptr + at), largest, total, out)
    tl.store(o_ptr + rows, (out / total[:, None]).to(o_ptr.dtype.element_ty))


@case(
    "attention with scores int8 and values fp16, 16 heads of 64, 6144 tokens, 128x64, 4 warps",
    SCORES,
    dict(H=16, T=6144, D=64),
    dict(H=2, T=256, D=32),
)
def _(device, H, T, D):
    q, k = normal(device, H, T, D, dtype=INT8), normal(device, H, T, D, dtype=INT8)
    v, o = normal(device, H, T, D, dtype=HALF), empty(device, H, T, D, dtype=HALF)
    q_scale, k_scale = (normal(device, H, T // rows, dtype=FLOAT).sigmoid() / 150 for rows in (128, 64))

    def run():
        integer_scores[(T // 128, H)](q, k, v, q_scale, k_scale, o, T, D=D, BM=128, BN=64, num_warps=4, num_stages=3)

    def want():
        out = torch.empty_like(o, dtype=FLOAT)
        for h in range(H):
            s = (q[h].float() @ k[h].float().T).view(T // 128, 128, T // 64, 64)
            s = s * q_scale[h][:, None, None, None] * k_scale[h][:, None] * 0.6931472
            out[h] = s.view(T, T).softmax(1) @ v[h].float()
        return out

    return Work(run, o, want)


@triton.jit
def tree_attention(q_ptr, k_ptr, v_ptr, start_ptr, seen_ptr, o_ptr, scale, H, SHARE: tl.constexpr, D: tl.constexpr):
    """64 guesses of one sequence. They see all its keys but the last 64, which are their own: bits say which of these."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    start, own = tl.load(start_ptr + sequence), tl.load(start_ptr + sequence + 1) - 64
    i, d = tl.arange(0, 64), tl.arange(0, D)
    rows = ((sequence * 64 + i) * H + head)[:, None] * D + d[None, :]
    q, stride = tl.load(q_ptr + rows), H // SHARE * D
    largest, total = tl.full((64,), -1e30, tl.float32), tl.zeros((64,), tl.float32)
    out = tl.zeros((64, D), tl.float32)
    for begin in range(start, own, 64):
        live = begin + i < own
        at = (begin + i)[:, None] * stride + head // SHARE * D + d[None, :]
        s = tl.dot(q, tl.trans(tl.load(k_ptr + at, mask=live[:, None], other=0.0))) * scale
        v = tl.load(v_ptr + at, mask=live[:, None], other=0.0)
        largest, total, out = add_block(tl.where(live[None, :], s, -1e30), v, largest, total, out)
    at = (own + i)[:, None] * stride + head // SHARE * D + d[None, :]
    seen = (tl.load(seen_ptr + sequence * 64 + i)[:, None] >> i[None, :].to(tl.int64)) & 1
    s = tl.where(seen == 1, tl.dot(q, tl.trans(tl.load(k_ptr + at))) * scale, -1e30)
    largest, total, out = add_block(s, tl.load(v_ptr + at), largest, total, out)
    tl.store(o_ptr + rows, (out / total[:, None]).to(o_ptr.dtype.element_ty))


@case(
    "trees of 64 guesses after 24 sequences of 1000 to 8000 tokens, 32 heads of 128 share 8 bf16",
    TREES,
    dict(B=24, shortest=1000, longest=8000, H=32, share=4, D=128),
    dict(B=2, shortest=20, longest=200, H=4, share=2, D=32),
)
def _(device, B, shortest, longest, H, share, D):
    """Guess 0 is the root; each other one comes after one of those before it, and sees what that one sees."""
    length = 64 + shortest + known("meta", longest - shortest + 1, B, dtype=torch.int64)
    start, tokens = place(device, F.pad(length.cumsum(0), (1, 0)).int()), int(length.sum())
    draws, seen = known("meta", 1 << 20, B, 64).tolist(), torch.zeros(B, 64, 64, dtype=torch.bool)
    for b in range(B):
        for i in range(64):
            if i:
                seen[b, i] = seen[b, draws[b][i] % i]
            seen[b, i, i] = True
    bits = place(device, (seen.long() << torch.arange(64)).sum(2))
    q, o = normal(device, B, 64, H, D), empty(device, B, 64, H, D)
    k, v = normal(device, tokens, H // share, D), normal(device, tokens, H // share, D)

    def run():
        tree_attention[(H, B)](q, k, v, start, bits, o, D**-0.5 * 1.4427, H, SHARE=share, D=D, num_stages=3)

    def want():
        parts = []
        for b, (keys, values) in enumerate(zip(k.split(length.tolist()), v.split(length.tolist()), strict=True)):
            mask = F.pad(seen[b].to(k.device), (keys.shape[0] - 64, 0), value=True)
            keys, values = (x.float().repeat_interleave(share, 1).transpose(0, 1) for x in (keys, values))
            out = F.scaled_dot_product_attention(q[b].float().transpose(0, 1), keys, values, attn_mask=mask)
            parts.append(out.transpose(0, 1))
        return torch.stack(parts)

    return Work(run, o, want)


@triton.jit
def window_attention(x_ptr, bias_ptr, o_ptr, scale, H: tl.constexpr, D: tl.constexpr):
    """One head of a window of 7 x 7 pixels, in tiles of 64 rows. A bias depends on how far apart two pixels are."""
    head, window = tl.program_id(0), tl.program_id(1)
    i, d = tl.arange(0, 64), tl.arange(0, D)
    at = ((window * 49 + i) * 3 * H + head)[:, None] * D + d[None, :]
    live = (i < 49)[:, None]
    q = tl.load(x_ptr + at, mask=live, other=0.0)
    k = tl.load(x_ptr + at + H * D, mask=live, other=0.0)
    v = tl.load(x_ptr + at + 2 * H * D, mask=live, other=0.0)
    apart = (i[:, None] // 7 - i[None, :] // 7 + 6) * 13 + i[:, None] % 7 - i[None, :] % 7 + 6
    both = live & (i < 49)[None, :]
    s = tl.dot(q, tl.trans(k)) * scale + tl.load(bias_ptr + apart * H + head, mask=both, other=0.0)
    s = tl.where((i < 49)[None, :], s, -1e30)
    p = tl.exp(s - tl.max(s, 1)[:, None])
    out = tl.dot(p.to(v.dtype), v) / tl.sum(p, 1)[:, None]
    tl.store(
        o_ptr + ((window * 49 + i) * H + head)[:, None] * D + d[None, :], out.to(o_ptr.dtype.element_ty), mask=live
    )


@case(
    "attention in 8192 windows of 7 x 7 pixels with a bias, 4 heads of 32 fp16, 2 warps",
    WINDOWS,
    dict(windows=8192, H=4, D=32),
    dict(windows=3, H=2, D=16),
)
def _(device, windows, H, D):
    x, bias = normal(device, windows, 49, 3, H, D, dtype=HALF), normal(device, 169, H, dtype=FLOAT)
    o = empty(device, windows, 49, H, D, dtype=HALF)

    def want():
        i = torch.arange(49, device=x.device)
        apart = (i[:, None] // 7 - i // 7 + 6) * 13 + i[:, None] % 7 - i % 7 + 6
        q, k, v = (x[:, :, j].float().transpose(1, 2) for j in range(3))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[apart].permute(2, 0, 1))
        return out.transpose(1, 2)

    return Work(lambda: window_attention[(H, windows)](x, bias, o, D**-0.5, H=H, D=D, num_warps=2), o, want)
