"""Attention: of prompts in chunks, of two softmaxes, of histories without a softmax, merged, along edges; and index scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, FP8, HALF, INT32, KI, Work, empty, known, normal, place
from gpukit.validation.ninth_set.case import case

CHUNKS, TWO, HISTORIES = "chunks of prompts and pages", "differences of two attentions", "attention with SiLU"
MERGED, SCORES, EDGES = "merged attentions", "index scores of many heads", "attention along edges"


@triton.jit
def prompt_chunk(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    start_ptr,
    context_ptr,
    o_ptr,
    scale,
    WIDEST,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """New tokens of a sequence see those that came before them and themselves; all keys and values lie in pages of 16."""
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(start_ptr + sequence)
    length, context = tl.load(start_ptr + sequence + 1) - start, tl.load(context_ptr + sequence)
    if block * BM < length:
        m, d = block * BM + tl.arange(0, BM), tl.arange(0, D)
        rows = ((start + m) * H + head)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + rows, mask=(m < length)[:, None], other=0.0)
        largest, total = tl.full((BM,), -1e30, tl.float32), tl.zeros((BM,), tl.float32)
        out = tl.zeros((BM, D), tl.float32)
        stop = context + tl.minimum((block + 1) * BM, length)
        for begin in range(0, stop, BN):
            n = begin + tl.arange(0, BN)
            live = n < stop
            page = tl.load(table_ptr + sequence * WIDEST + n // 16, mask=live, other=0)
            at = ((page * 16 + n % 16) * G + head // (H // G))[:, None] * D + d[None, :]
            s = tl.dot(q, tl.trans(tl.load(k_ptr + at, mask=live[:, None], other=0.0))) * scale
            s = tl.where(n[None, :] <= context + m[:, None], s, -1e30)
            new = tl.maximum(largest, tl.max(s, 1))
            shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
            v = tl.load(v_ptr + at, mask=live[:, None], other=0.0)
            total, out = total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])
            largest = new
        tl.store(o_ptr + rows, (out / total[:, None]).to(o_ptr.dtype.element_ty), mask=(m < length)[:, None])


@case(
    "chunks of 1 to 700 tokens of 14 prompts after up to 5000 in pages of 16, 32 heads of 128 share 8 bf16, 64x64",
    CHUNKS,
    dict(B=14, chunk=700, before=5000, H=32, G=8, D=128),
    dict(B=3, chunk=80, before=60, H=2, G=1, D=32),
)
def _(device, B, chunk, before, H, G, D):
    length = 1 + known("meta", chunk, B, dtype=torch.int64)
    context = known("meta", before + 1, B, dtype=torch.int64).flip(0)
    tokens, pages = int(length.sum()), (length + context + 15) // 16
    used, widest = F.pad(pages.cumsum(0), (1, 0)).tolist(), int(pages.max())
    order = torch.randperm(used[-1], generator=torch.Generator().manual_seed(1)).int()
    table = torch.zeros(B, widest, dtype=INT32)
    for i in range(B):
        table[i, : used[i + 1] - used[i]] = order[used[i] : used[i + 1]]
    start = place(device, F.pad(length.cumsum(0), (1, 0)).int())
    where, behind = place(device, table), place(device, context.int())
    q, o = normal(device, tokens, H, D), empty(device, tokens, H, D)
    k, v = normal(device, used[-1], 16, G, D), normal(device, used[-1], 16, G, D)

    def run():
        prompt_chunk[(triton.cdiv(chunk, 64), H, B)](
            q, k, v, where, start, behind, o, D**-0.5 * 1.4427, widest, H=H, G=G, D=D, BM=64, BN=64, num_stages=3
        )

    def want():
        parts, queries = [], q.float().split(length.tolist())
        for i, (old, new) in enumerate(zip(context.tolist(), length.tolist(), strict=True)):
            mine = where[i, : pages[i]].long()
            keys, values = (x[mine].float().flatten(0, 1)[: old + new].repeat_interleave(H // G, 1) for x in (k, v))
            mask = torch.ones(new, old + new, dtype=torch.bool, device=q.device).tril(old)
            x = (y.transpose(0, 1) for y in (queries[i], keys, values))
            parts.append(F.scaled_dot_product_attention(*x, attn_mask=mask).transpose(0, 1))
        return torch.cat(parts)

    return Work(run, o, want)


@triton.jit
def join_block(q, k_at, v, live, scale, largest, total, out):
    """The scores (for exp2) of one block of keys, and its values, join what is there."""
    s = tl.where(live, tl.dot(q, tl.trans(tl.load(k_at))) * scale, -1e30)
    new = tl.maximum(largest, tl.max(s, 1))
    shrink, p = tl.exp2(largest - new), tl.exp2(s - new[:, None])
    return new, total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])


@triton.jit
def two_attentions(
    q_ptr, k_ptr, v_ptr, share_ptr, w_ptr, o_ptr, scale, H, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """A head has two queries and two keys of D numbers, and values of 2 D. The second attention's output, times a share, is
    taken from the first one's; a norm follows."""
    head, block = tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0)
    m, n, d, e = block * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D), tl.arange(0, 2 * D)
    rows = (m * H + head)[:, None] * 2 * D
    q1, q2 = tl.load(q_ptr + rows + d[None, :]), tl.load(q_ptr + rows + D + d[None, :])
    largest1, largest2 = tl.full((BM,), -1e30, tl.float32), tl.full((BM,), -1e30, tl.float32)
    total1, total2 = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    out1, out2 = tl.zeros((BM, 2 * D), tl.float32), tl.zeros((BM, 2 * D), tl.float32)
    for begin in range(0, (block + 1) * BM, BN):
        at = ((begin + n) * H + head)[:, None] * 2 * D
        live = begin + n[None, :] <= m[:, None]
        v = tl.load(v_ptr + at + e[None, :])
        largest1, total1, out1 = join_block(q1, k_ptr + at + d[None, :], v, live, scale, largest1, total1, out1)
        largest2, total2, out2 = join_block(q2, k_ptr + at + D + d[None, :], v, live, scale, largest2, total2, out2)
    y = out1 / total1[:, None] - tl.load(share_ptr + head) * out2 / total2[:, None]
    y = y * tl.rsqrt(tl.sum(y * y, 1) / (2 * D) + 1e-5)[:, None] * tl.load(w_ptr + e)[None, :]
    tl.store(o_ptr + rows + e[None, :], y.to(o_ptr.dtype.element_ty))


@case(
    "causal attention less a second one, 16 heads of 2 x 64, 6144 tokens bf16, 64x64, 2 stages",
    TWO,
    dict(H=16, T=6144, D=64),
    dict(H=2, T=128, D=16),
)
def _(device, H, T, D):
    q, k, v, o = *(normal(device, T, H, 2 * D) for _ in range(3)), empty(device, T, H, 2 * D)
    share, w = normal(device, H, dtype=FLOAT).sigmoid(), normal(device, 2 * D, dtype=FLOAT)

    def run():
        two_attentions[(T // 64, H)](
            q, k, v, share, w, o, D**-0.5 * 1.4427, H, D=D, BM=64, BN=64, num_warps=4, num_stages=2
        )

    def want():
        (q1, q2), (k1, k2), values = (
            *(x.float().transpose(0, 1).split(D, 2) for x in (q, k)),
            v.float().transpose(0, 1),
        )
        one = F.scaled_dot_product_attention(q1, k1, values, is_causal=True)
        two = F.scaled_dot_product_attention(q2, k2, values, is_causal=True)
        return F.rms_norm((one - share[:, None, None] * two).transpose(0, 1), (2 * D,), w, 1e-5)

    return Work(run, o, want)


@triton.jit
def history_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    start_ptr,
    o_ptr,
    scale,
    LONGEST,
    H: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """SiLU of each score and of a bias, which depends on how long ago something was, instead of a softmax."""
    block, head, user = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(start_ptr + user), tl.load(start_ptr + user + 1)
    if block * BM < stop - start:
        m, d = block * BM + tl.arange(0, BM), tl.arange(0, D)
        seen = (m < stop - start)[:, None]
        rows = ((start + m) * H + head)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + rows, mask=seen, other=0.0)
        out = tl.zeros((BM, D), tl.float32)
        for begin in range(0, tl.minimum((block + 1) * BM, stop - start), BN):
            n = begin + tl.arange(0, BN)
            at = ((start + n) * H + head)[:, None] * D + d[None, :]
            live = (n < stop - start)[:, None]
            s = tl.dot(q, tl.trans(tl.load(k_ptr + at, mask=live, other=0.0))) * scale
            ago = m[:, None] - n[None, :]
            s += tl.load(bias_ptr + head * LONGEST + ago, mask=(ago >= 0) & seen, other=0.0)
            p = tl.where(ago >= 0, s * tl.sigmoid(s), 0.0)
            v = tl.load(v_ptr + at, mask=live, other=0.0)
            out = tl.dot(p.to(v.dtype), v, out)
        tl.store(o_ptr + rows, (out / (stop - start)).to(o_ptr.dtype.element_ty), mask=seen)


@case(
    "attention with SiLU in 48 histories of 100 to 2000, 8 heads of 64 fp16, a bias by distance, 64x32, 1 stage",
    HISTORIES,
    dict(B=48, longest=2000, H=8, D=64),
    dict(B=2, longest=130, H=2, D=16),
)
def _(device, B, longest, H, D):
    length = 100 + known("meta", longest - 99, B, dtype=torch.int64)
    start, tokens = place(device, F.pad(length.cumsum(0), (1, 0)).int()), int(length.sum())
    q, k, v = (normal(device, tokens, H, D, dtype=HALF) for _ in range(3))
    bias, o = normal(device, H, longest, dtype=FLOAT), empty(device, tokens, H, D, dtype=HALF)

    def run():
        history_attention[(triton.cdiv(longest, 64), H, B)](
            q, k, v, bias, start, o, D**-0.5, longest, H=H, D=D, BM=64, BN=32, num_warps=4, num_stages=1
        )

    def want():
        parts = []
        for mine in zip(*(x.float().split(length.tolist()) for x in (q, k, v)), strict=True):
            x, y, z = (part.transpose(0, 1) for part in mine)
            i = torch.arange(x.shape[1], device=x.device)
            s = x @ y.mT * D**-0.5 + bias[:, (i[:, None] - i).clamp(min=0)]
            parts.append((F.silu(s).tril() @ z / x.shape[1]).transpose(0, 1))
        return torch.cat(parts)

    return Work(run, o, want)


@triton.jit
def merge_two(a_ptr, b_ptr, a_sum_ptr, b_sum_ptr, o_ptr, sum_ptr, T, H, D: tl.constexpr):
    """Two attentions of one token and head to different keys become one. The sums are logarithms of sums of exponentials."""
    token, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    a_sum, b_sum = tl.load(a_sum_ptr + head * T + token), tl.load(b_sum_ptr + head * T + token)
    largest = tl.maximum(a_sum, b_sum)
    a_part, b_part = tl.exp(a_sum - largest), tl.exp(b_sum - largest)
    tl.store(sum_ptr + head * T + token, largest + tl.log(a_part + b_part))
    at = (token * H + head) * D + d
    a, b = tl.load(a_ptr + at).to(tl.float32), tl.load(b_ptr + at).to(tl.float32)
    o = a * (a_part / (a_part + b_part)) + b * (b_part / (a_part + b_part))
    tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty))


@case(
    "two attentions merged, 8192 tokens and 40 heads of 128 bf16, one head of a token per program",
    MERGED,
    dict(T=8 * KI, H=40, D=128),
    dict(T=5, H=3, D=32),
)
def _(device, T, H, D):
    a, b, o = normal(device, T, H, D), normal(device, T, H, D), empty(device, T, H, D)
    a_sum, b_sum, total = *(normal(device, H, T, dtype=FLOAT) * 3 for _ in "ab"), empty(device, H, T, dtype=FLOAT)

    def want():
        both = torch.logaddexp(a_sum, b_sum)
        parts = ((x - both).exp().T[:, :, None] * y.float() for x, y in ((a_sum, a), (b_sum, b)))
        return sum(parts), both

    return Work(lambda: merge_two[(T, H)](a, b, a_sum, b_sum, o, total, T, H, D=D), (o, total), want)


@triton.jit
def index_scores(
    q_ptr, k_ptr, w_ptr, s_ptr, S, first, H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """How much each key matters to each query: a weighted sum over heads of the positive parts of products in 8 bits. Query m
    is token first + m; blocks of keys that come after all queries of a tile are not looked at."""
    m, n, d = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, D)
    if tl.program_id(0) * BN < first + (tl.program_id(1) + 1) * BM:
        k = tl.trans(tl.load(k_ptr + n[:, None] * D + d[None, :]))
        total = tl.zeros((BM, BN), tl.float32)
        for head in range(H):
            q = tl.load(q_ptr + (m * H + head)[:, None] * D + d[None, :])
            total += tl.maximum(tl.dot(q, k), 0.0) * tl.load(w_ptr + m * H + head)[:, None]
        tl.store(s_ptr + m[:, None] * S + n[None, :], tl.where(n[None, :] <= first + m[:, None], total, 0.0))


@case(
    "scores of 4096 keys for the last 2048 queries, 64 heads of 128 fp8 that share a key, 128x128, 8 warps, 2 stages",
    SCORES,
    dict(T=2 * KI, S=4 * KI, H=64, D=128),
    dict(T=128, S=384, H=3, D=32),
)
def _(device, T, S, H, D):
    q, k = normal(device, T, H, D, dtype=FP8), normal(device, S, D, dtype=FP8)
    w, s = normal(device, T, H, dtype=FLOAT).sigmoid(), empty(device, T, S, dtype=FLOAT)

    def run():
        index_scores[(S // 128, T // 128)](q, k, w, s, S, S - T, H=H, D=D, BM=128, BN=128, num_warps=8, num_stages=2)

    def want():
        out = torch.zeros_like(s)
        for h in range(H):
            out += (q[:, h].float() @ k.float().T).relu() * w[:, h : h + 1]
        return out.tril(S - T)

    return Work(run, s, want)


@triton.jit
def edge_attention(
    x_ptr, from_ptr, to_ptr, column_ptr, start_ptr, y_ptr, H: tl.constexpr, D: tl.constexpr, BE: tl.constexpr
):
    """A node's softmax over its neighbors, of which BE are looked at together, in each of H heads."""
    node, i, h, d = tl.program_id(0), tl.arange(0, BE), tl.arange(0, H), tl.arange(0, D)
    start, stop = tl.load(start_ptr + node), tl.load(start_ptr + node + 1)
    mine = tl.load(to_ptr + node * H + h)
    largest, total = tl.full((H,), -1e30, tl.float32), tl.zeros((H,), tl.float32)
    out = tl.zeros((H, D), tl.float32)
    for first in range(start, stop, BE):
        live = first + i < stop
        column = tl.load(column_ptr + first + i, mask=live, other=0)
        s = tl.load(from_ptr + column[:, None] * H + h[None, :], mask=live[:, None], other=0.0) + mine[None, :]
        s = tl.where(live[:, None], tl.where(s > 0, s, 0.2 * s), -1e30)
        new = tl.maximum(largest, tl.max(s, 0))
        shrink, p = tl.exp(largest - new), tl.exp(s - new[None, :])
        at = (column[:, None] * H + h[None, :])[:, :, None] * D + d[None, None, :]
        x = tl.load(x_ptr + at, mask=live[:, None, None], other=0.0).to(tl.float32)
        out = out * shrink[:, None] + tl.sum(x * p[:, :, None], 0)
        total, largest = total * shrink + tl.sum(p, 0), new
    y = out / total[:, None]
    tl.store(y_ptr + (node * H + h)[:, None] * D + d[None, :], y.to(y_ptr.dtype.element_ty))


@case(
    "attention of 200,003 nodes to 1 to 300 neighbors, 4 heads of 32 fp16, 8 neighbors at a time, 1 warp",
    EDGES,
    dict(n=200_003, H=4, D=32),
    dict(n=40, H=2, D=16),
)
def _(device, n, H, D):
    """Most nodes have few neighbors: a number is 300 times the tenth power of one below 1. Low nodes are popular."""
    length = 1 + (299 * (known("meta", 1000, n) / 1000) ** 10).long()
    start, edges = place(device, F.pad(length.cumsum(0), (1, 0)).int()), int(length.sum())
    column = place(device, (n * (known("meta", 1 << 20, edges) / (1 << 20)) ** 2).int())
    x, y = normal(device, n, H, D, dtype=HALF), empty(device, n, H, D, dtype=HALF)
    source, target = normal(device, n, H, dtype=FLOAT), normal(device, n, H, dtype=FLOAT)

    def run():
        edge_attention[(n,)](x, source, target, column, start, y, H=H, D=D, BE=8, num_warps=1)

    def want():
        row = torch.repeat_interleave(torch.arange(n), length).to(x.device)
        weight = F.leaky_relu(source[column] + target[row], 0.2).exp()
        total = torch.zeros(n, H, device=x.device).index_add_(0, row, weight)
        out = torch.zeros(n, H, D, device=x.device)
        return out.index_add_(0, row, (weight / total[row])[:, :, None] * x[column].float())

    return Work(run, y, want)
