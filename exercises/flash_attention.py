"""FlashAttention: partial results that merge, tiles in PyTorch, Triton kernels (plain, causal, windows, packed), and gradients.

Nine exercises, from top to bottom; notebooks/13_flash_attention.ipynb explains them. For each query, o = softmax(s) v over
its scores s = scale q k^T, and LSE = log(sum(exp(s))). T_q queries, T_k keys, scale 1 / sqrt(D). Kernels add up in float32;
give tl.dot input_precision="ieee", so that float32 means float32. The code outside the gaps is complete.
"""

# What may be imported: torch, triton, einops, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import math

import torch
import triton
import triton.language as tl
from torch import Tensor


# ----------------------------------------------------------------------------------------------- flash_attention.merge
def merge(a: tuple[float, float, float], b: tuple[float, float, float]) -> tuple[float, float, float]:
    """The state of a query for the keys of a and of b together. a and b are states for different keys; so is the result.

    A state is (m, l, acc). For keys with scores s and one number v each, m = max(s), l = sum(exp(s - m)) and
    acc = sum(exp(s - m) v). The state of one key is (s, 1, v). The state of no keys at all is (-inf, 0, 0); either argument
    may be that, or both. Scores may be any finite float, also one like 1,000, for which exp(s) is too large for a float.
    From the state of all keys follow o = acc / l and LSE = m + log(l).
    """
    raise NotImplementedError("flash_attention.merge")  # your code here


# ----------------------------------------------------------------------------------------------- flash_attention.tiles
def attention_tiles(q: Tensor, k: Tensor, v: Tensor, BLOCK: int) -> Tensor:
    """One head in PyTorch, float32: q [T_q, D], k and v [T_k, D] -> o [T_q, D]. Any lengths, T_k >= 1, and any strides.

    Memory: besides o, at any time at most 16 blocks of BLOCK x BLOCK or BLOCK x D numbers, whichever is larger, and two
    numbers per query; no tensor is larger than a block or o. The scores of a block of queries with all keys would be too
    much.
    """
    (T_q, D), T_k = q.shape, k.shape[0]
    o = torch.zeros_like(q)
    raise NotImplementedError("flash_attention.tiles")  # your code here
    return o


# ------------------------------------------------------------------------------------------------ flash_attention.late
@triton.jit
def one_query_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr,
    T_q, T_k, scale,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program computes one query and takes BLOCK_N keys at a time. All tensors are contiguous."""
    query, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    q = tl.load(q_ptr + (head * T_q + query) * D + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)
    m = tl.full((), -float("inf"), tl.float32)
    l = tl.zeros((), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, T_k, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        mask = (keys[:, None] < T_k) & (offs_d[None, :] < D)
        offs = (head * T_k + keys[:, None]) * D + offs_d[None, :]
        k = tl.load(k_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        s = tl.where(keys < T_k, tl.sum(q[None, :] * k, axis=1) * scale, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=0))  # your code here
        l *= tl.exp(m - m_new)
        p = tl.exp(s - m_new)
        m = m_new
        l += tl.sum(p, axis=0)
        acc = acc * tl.exp(m - m_new) + tl.sum(p[:, None] * v, axis=0)
    tl.store(o_ptr + (head * T_q + query) * D + offs_d, acc / l, mask=offs_d < D)


def attention_by_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [H, T_q, D], k and v [H, T_k, D], contiguous, of one dtype -> o [H, T_q, D]. Slow: each query reads all keys."""
    (H, T_q, D), T_k = q.shape, k.shape[1]
    o = torch.empty_like(q)
    BLOCK_D = triton.next_power_of_2(D)
    one_query_kernel[(T_q, H)](q, k, v, o, T_q, T_k, 1 / math.sqrt(D), D=D, BLOCK_N=16, BLOCK_D=BLOCK_D, num_warps=1)
    return o


# --------------------------------------------------------------------------------------------- flash_attention.forward
@triton.jit
def load_rows(ptr, first, end, stride, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """[ROWS, BLOCK_D]: the rows first, first + 1, ... of a matrix whose rows begin `stride` elements apart. Elements in row
    `end` and beyond, and in column D and beyond, are 0."""
    rows = first + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(ptr + rows.to(tl.int64) * stride + columns, mask=(rows < end) & (columns < D), other=0.0)


@triton.jit
def store_rows(ptr, x, first, end, stride, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The counterpart of load_rows: stores x [ROWS, BLOCK_D] into the same places."""
    rows = first + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    tl.store(ptr + rows.to(tl.int64) * stride + columns, x, mask=(rows < end) & (columns < D))


@triton.jit
def update(acc, l, m, s, v):
    """Merges one more block of keys into the states of BLOCK_M queries, and returns acc, l, m.

    acc [BLOCK_M, BLOCK_D], l and m [BLOCK_M], float32, are the state of each query; before the first block acc and l are 0
    and m is -inf. s [BLOCK_M, BLOCK_N], float32, are the new scores, -inf where a key does not count. v [BLOCK_N, BLOCK_D]
    has the dtype of the tensors.
    """
    raise NotImplementedError("flash_attention.forward")  # your code here


@triton.jit
def attend(
    q, k_ptr, v_ptr, stride, T_k, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """o [BLOCK_M, BLOCK_D] and LSE [BLOCK_M] of the queries q [BLOCK_M, BLOCK_D] with all T_k >= 1 keys of one head. Rows of
    k and v begin `stride` elements apart."""
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    raise NotImplementedError("flash_attention.forward")  # your code here


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    T_q, T_k, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M queries of one head. All tensors are contiguous."""
    start_m, head = tl.program_id(0) * BLOCK_M, tl.program_id(1).to(tl.int64)
    q = load_rows(q_ptr + head * T_q * D, start_m, T_q, D, D, BLOCK_M, BLOCK_D)
    k_ptr += head * T_k * D
    v_ptr += head * T_k * D
    o, lse = attend(q, k_ptr, v_ptr, D, T_k, scale, D, BLOCK_M, BLOCK_N, BLOCK_D)
    store_rows(o_ptr + head * T_q * D, o, start_m, T_q, D, D, BLOCK_M, BLOCK_D)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + head * T_q + offs_m, lse, mask=offs_m < T_q)


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q [H, T_q, D], k and v [H, T_k, D], contiguous, of one dtype, D up to 256 -> o [H, T_q, D] in that dtype and LSE
    [H, T_q] in float32.

    Bound: q is loaded once, k and v once per block of 32 queries, o and LSE are stored once. Scores never go to memory.
    """
    (H, T_q, D), T_k = q.shape, k.shape[1]
    o, lse = torch.empty_like(q), torch.empty(H, T_q, dtype=torch.float32, device=q.device)
    blocks = {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    attention_kernel[(triton.cdiv(T_q, 32), H)](q, k, v, o, lse, T_q, T_k, 1 / math.sqrt(D), D=D, **blocks)
    return o, lse


# ---------------------------------------------------------------------------------------------- flash_attention.causal
@triton.jit
def causal_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    T_q, T_k, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M queries of one head. All tensors are contiguous."""
    start_m, head = tl.program_id(0) * BLOCK_M, tl.program_id(1).to(tl.int64)
    q = load_rows(q_ptr + head * T_q * D, start_m, T_q, D, D, BLOCK_M, BLOCK_D)
    k_ptr += head * T_k * D
    v_ptr += head * T_k * D
    offs_m = start_m + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    raise NotImplementedError("flash_attention.causal")  # your code here
    store_rows(o_ptr + head * T_q * D, o, start_m, T_q, D, D, BLOCK_M, BLOCK_D)
    tl.store(lse_ptr + head * T_q + offs_m, lse, mask=offs_m < T_q)


def attention_causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q [H, T_q, D], k and v [H, T_k, D], contiguous, of one dtype -> o [H, T_q, D] and LSE [H, T_q], float32.

    Query i sees the keys up to i + T_k - T_q: the last query sees all, whichever of the lengths is larger. A query that
    sees no key gives o = 0 and LSE = -inf. Bound: a program loads a block of 16 keys only if one of its 16 queries sees one
    of these keys.
    """
    (H, T_q, D), T_k = q.shape, k.shape[1]
    o, lse = torch.empty_like(q), torch.empty(H, T_q, dtype=torch.float32, device=q.device)
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    causal_kernel[(triton.cdiv(T_q, 16), H)](q, k, v, o, lse, T_q, T_k, 1 / math.sqrt(D), D=D, **blocks)
    return o, lse


# ---------------------------------------------------------------------------------------------- flash_attention.window
@triton.jit
def window_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    T_q, T_k, window, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M queries of one head, each with the `window` keys up to its own. All tensors are contiguous."""
    start_m, head = tl.program_id(0) * BLOCK_M, tl.program_id(1).to(tl.int64)
    q = load_rows(q_ptr + head * T_q * D, start_m, T_q, D, D, BLOCK_M, BLOCK_D)
    k_ptr += head * T_k * D
    v_ptr += head * T_k * D
    offs_m = start_m + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    raise NotImplementedError("flash_attention.window")  # your code here
    store_rows(o_ptr + head * T_q * D, o, start_m, T_q, D, D, BLOCK_M, BLOCK_D)
    tl.store(lse_ptr + head * T_q + offs_m, lse, mask=offs_m < T_q)


def attention_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """q [H, T_q, D], k and v [H, T_k, D], contiguous, of one dtype -> o [H, T_q, D] and LSE [H, T_q], float32.

    Query i lines up with key i + T_k - T_q and sees that key and the window - 1 keys before it, as far as there are such
    keys; window >= 1. A query that sees no key gives o = 0 and LSE = -inf. Bound: a program loads a block of 16 keys
    only if one of its 32 queries sees one of these keys.
    """
    (H, T_q, D), T_k = q.shape, k.shape[1]
    o, lse = torch.empty_like(q), torch.empty(H, T_q, dtype=torch.float32, device=q.device)
    blocks = {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    window_kernel[(triton.cdiv(T_q, 32), H)](q, k, v, o, lse, T_q, T_k, window, 1 / math.sqrt(D), D=D, **blocks)
    return o, lse


# ---------------------------------------------------------------------------------------------- flash_attention.packed
@triton.jit
def packed_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, cu_q_ptr, cu_k_ptr,
    H, H_kv, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (block, head, sequence): BLOCK_M queries of one of the H heads of one sequence. All tensors are contiguous."""
    start_m, head, sequence = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    raise NotImplementedError("flash_attention.packed")  # your code here
    q = load_rows(q_ptr, start_m, T_q, stride_q, D, BLOCK_M, BLOCK_D)
    o, _ = attend(q, k_ptr, v_ptr, stride_k, T_k, scale, D, BLOCK_M, BLOCK_N, BLOCK_D)
    store_rows(o_ptr, o, start_m, T_q, stride_q, D, BLOCK_M, BLOCK_D)


def attention_packed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int) -> Tensor:
    """Attention of sequences that are packed one after the other: q [sum of T_q, H, D], k and v [sum of T_k, H_kv, D],
    contiguous, of one dtype -> o like q. The queries of a sequence see all keys of their own sequence and no others.

    cu_q, cu_k [sequences + 1], int32: where each sequence begins in q and in k; the last number says where the last sequence
    ends. Every sequence has at least one key; it may have no query. longest: the largest T_q. H_kv divides H: with H = 6 and
    H_kv = 2, the query heads 0, 1 and 2 use head 0 of k and v, the others head 1. Bound: each head of k and v is loaded once
    per block of 16 queries of each head that uses it, q is loaded once, and o is stored once.
    """
    H, H_kv, D = q.shape[1], k.shape[1], q.shape[2]
    o = torch.empty_like(q)
    grid = (triton.cdiv(longest, 16), H, len(cu_q) - 1)
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    packed_kernel[grid](q, k, v, o, cu_q, cu_k, H, H_kv, 1 / math.sqrt(D), D=D, **blocks)
    return o


# ------------------------------------------------------------------------------------------- flash_attention.recompute
def gradient_tiles(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, BLOCK: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one head in PyTorch, float32: q, o, do [T_q, D], k, v [T_k, D], lse [T_q] -> dq, dk, dv.

    This is the backward pass of attention_tiles: o and lse are what forward kept, do is the gradient of o; all may have any
    strides. Memory: besides dq, dk and dv, at any time at most 16 blocks of BLOCK x BLOCK or BLOCK x D numbers, whichever is
    larger, one tensor as large as q, and two numbers per query.
    """
    (T_q, D), T_k = q.shape, k.shape[0]
    scale = 1 / math.sqrt(D)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    raise NotImplementedError("flash_attention.recompute")  # your code here
    return dq, dk, dv


# ------------------------------------------------------------------------------------------- flash_attention.gradients
@triton.jit
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    T_q, T_k, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program computes dk and dv of BLOCK_N keys of one head. All tensors are contiguous."""
    start_n, head = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    q_ptr += head * T_q * D
    do_ptr += head * T_q * D
    lse_ptr += head * T_q
    delta_ptr += head * T_q
    k = load_rows(k_ptr + head * T_k * D, start_n, T_k, D, D, BLOCK_N, BLOCK_D)
    v = load_rows(v_ptr + head * T_k * D, start_n, T_k, D, D, BLOCK_N, BLOCK_D)
    raise NotImplementedError("flash_attention.gradients")  # your code here
    store_rows(dk_ptr + head * T_k * D, dk, start_n, T_k, D, D, BLOCK_N, BLOCK_D)
    store_rows(dv_ptr + head * T_k * D, dv, start_n, T_k, D, D, BLOCK_N, BLOCK_D)


def dk_dv(q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Fills dk and dv. q and do are [H, T_q, D]; k, v, dk and dv are [H, T_k, D], all of one dtype; lse and delta = sum(o do)
    are [H, T_q] in float32. All are contiguous.

    Two runs agree to the bit, so there are no atomics. Bound: k and v are loaded once, everything of the queries once per
    block of 32 keys, dk and dv are stored once, and there are four products per pair of blocks.
    """
    (H, T_q, D), T_k = q.shape, k.shape[1]
    blocks = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    grid = (triton.cdiv(T_k, 32), H)
    dk_dv_kernel[grid](q, k, v, do, lse, delta, dk, dv, T_q, T_k, 1 / math.sqrt(D), D=D, **blocks)
