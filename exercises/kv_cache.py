"""Decoding with a cache of keys and values: masks, tokens per second, one token's attention, shared heads, parts, 8 bits.

Six exercises, from top to bottom; notebooks/14_kv_cache.ipynb explains them. A cache is [B, T_max, H_kv, D]: token t of
sequence b lies at [b, t]. The slots after a sequence's last token were never written and may hold anything, NaN included.
Kernels compute sums in float32; give tl.dot input_precision="ieee". The code outside the gaps is complete.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


# ----------------------------------------------------------------------------------------------------- kv_cache.attend
def attend(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The next T tokens of each sequence: store their keys and values, then compute causal attention over all tokens so far.

    q is [B, T, H, D], k and v are [B, T, H_kv, D]. The caches are [B, T_max, H_kv, D] and already hold `length` tokens of
    each sequence, 0 or more. H_kv divides H: query head h reads head h // (H / H_kv) of the cache. Each token sees itself
    and all tokens before it. All tensors may have any strides. Returns o [B, T, H, D] and the two caches, changed in place.
    """
    end = length + q.shape[1]
    k_cache[:, length:end] = k
    v_cache[:, length:end] = v
    # scaled_dot_product_attention has heads before tokens
    q, keys, values = (x.transpose(1, 2) for x in (q, k_cache[:, :end], v_cache[:, :end]))
    o = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)  # your code here
    return o.transpose(1, 2), k_cache, v_cache


# ------------------------------------------------------------------------------------------------------ kv_cache.speed
def tokens_per_second(
    weights: int, weight_bits: int, layers: int, kv_heads: int, head_size: int, cache_bits: int, batch: int, prompt: int,
    new: int, hbm_gbps: float,
) -> float:  # fmt: skip
    """Tokens per second of all sequences of a batch together, if a step takes as long as reading its bytes from memory.

    weights     numbers that every step reads, of weight_bits each
    cache_bits  bits per element of the cache. If there are 8, each head of each token also has two scales of 4 bytes, one
                for its keys and one for its values
    prompt      tokens in each sequence's cache before the first step, 0 or more
    new         number of steps. Each appends a token to every sequence and then reads all that is cached, the new token
                included
    hbm_gbps    speed of the memory in 10^9 bytes per second
    """
    raise NotImplementedError("kv_cache.speed")  # your code here


# ----------------------------------------------------------------------------------------------------- kv_cache.decode
@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, o_ptr,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    H, scale,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: one head of one sequence. q and o are contiguous; the caches have the strides that are given."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // H, row % H
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)  # in 64 bits, because a column times its stride may need more than 32
    mask_d = offs_d < D
    q = tl.load(q_ptr + row * D + offs_d, mask=mask_d, other=0.0).to(tl.float32) * scale
    length = tl.load(lengths_ptr + b)
    raise NotImplementedError("kv_cache.decode")  # your code here


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
    """Attention of each sequence's newest token over its cache: softmax(q k^T / sqrt(D)) v.

    q [B, H, D] is contiguous. k_cache and v_cache [B, T_max, H, D] may have any strides, each its own. lengths [B] int32
    says how many tokens of each sequence count, 0 to T_max. Returns o, shaped like q; a sequence of length 0 gives zeros.
    D is 1 to 128. Bound: q, and each key and value within the lengths, are loaded once, and o is stored once.
    """
    B, H, D = q.shape
    o = torch.empty_like(q)
    decode_kernel[(B * H,)](
        q, k_cache, v_cache, lengths, o, *k_cache.stride(), *v_cache.stride(), H, D**-0.5,
        D=D, BLOCK_T=32, BLOCK_D=triton.next_power_of_2(D),
    )  # fmt: skip
    return o


# ----------------------------------------------------------------------------------------------------- kv_cache.packed
@triton.jit
def packed_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, o_ptr,
    T_max, H_kv, GROUP, scale,
    D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program: one head of one sequence's cache, and all GROUP query heads that read it. All tensors are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // H_kv, row % H_kv
    offs_d = tl.arange(0, D)
    length = tl.load(lengths_ptr + b)
    raise NotImplementedError("kv_cache.packed")  # your code here


def decode_packed(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
    """As `decode`, with fewer heads in the cache: q is [B, H, D], the caches are [B, T_max, H_kv, D].

    All tensors are contiguous, and lengths are at least 1. GROUP = H / H_kv neighboring query heads, 1 to 64 of them, read
    the same head of the cache. D is a power of two, at least 16. Bound: q, and each key and value within the
    lengths, are loaded once, whatever GROUP is.
    """
    B, H, D = q.shape
    _, T_max, H_kv, _ = k_cache.shape
    o, GROUP = torch.empty_like(q), H // H_kv
    packed_kernel[(B * H_kv,)](
        q, k_cache, v_cache, lengths, o, T_max, H_kv, GROUP, D**-0.5,
        D=D, BLOCK_G=max(16, triton.next_power_of_2(GROUP)), BLOCK_T=32,
    )  # fmt: skip
    return o


# ------------------------------------------------------------------------------------------------------ kv_cache.split
@triton.jit
def part_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, acc_ptr, m_ptr, l_ptr,
    T_max, H, scale,
    SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (row, split): one of SPLITS parts of the tokens of one head. q and the caches are contiguous."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = row // H, row % H
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + row * D + offs_d).to(tl.float32) * scale
    length = tl.load(lengths_ptr + b)
    raise NotImplementedError("kv_cache.split")  # your code here


@triton.jit
def combine_kernel(acc_ptr, m_ptr, l_ptr, o_ptr, SPLITS: tl.constexpr, D: tl.constexpr):
    """One program: one row of o from its SPLITS parts."""
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, D)
    raise NotImplementedError("kv_cache.split")  # your code here


def decode_split(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, SPLITS: int) -> Tensor:
    """As `decode`, with SPLITS programs for each head of a sequence, in two launches and without atomics.

    q [B, H, D] and the caches [B, T_max, H, D] are contiguous, D is a power of two, and lengths are at least 1. In general
    SPLITS divides neither the lengths nor their number of blocks of 32, and a sequence may have fewer blocks than SPLITS.
    Bound: each key and value within the lengths is loaded once, and q SPLITS times. Each part stores D + 2 float32 numbers
    once, and they are loaded once (m twice). No program reads more than its share of its own sequence's tokens, rounded up
    to blocks of 32.
    """
    (B, H, D), T_max = q.shape, k_cache.shape[1]
    o = torch.empty_like(q)
    raise NotImplementedError("kv_cache.split")  # your code here
    part_kernel[(B * H, SPLITS)](
        q, k_cache, v_cache, lengths, acc, m, l, T_max, H, D**-0.5, SPLITS=SPLITS, D=D, BLOCK_T=32
    )
    combine_kernel[(B * H,)](acc, m, l, o, SPLITS=SPLITS, D=D)
    return o


# ------------------------------------------------------------------------------------------------------- kv_cache.int8
@triton.jit
def quantize(x_ptr, cache_ptr, scale_ptr, D: tl.constexpr):
    """Store the D numbers at x_ptr as D int8 at cache_ptr and one float32, their scale, at scale_ptr."""
    offs_d = tl.arange(0, D)
    raise NotImplementedError("kv_cache.int8")  # your code here


@triton.jit
def append_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, lengths_ptr,
    T_max, H, D: tl.constexpr,
):  # fmt: skip
    """One program: the new token's keys and values of one head of one sequence."""
    row = tl.program_id(0).to(tl.int64)
    slot = (row // H * T_max + tl.load(lengths_ptr + row // H)) * H + row % H
    quantize(k_ptr + row * D, k_cache_ptr + slot * D, k_scales_ptr + slot, D)
    quantize(v_ptr + row * D, v_cache_ptr + slot * D, v_scales_ptr + slot, D)


@triton.jit
def int8_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, lengths_ptr, o_ptr,
    T_max, H, scale, D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program: one head of one sequence, whose tokens fit into one block. The caches already hold the new token."""
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + row * D + offs_d).to(tl.float32) * scale
    length = tl.load(lengths_ptr + row // H) + 1
    offs_t = tl.arange(0, BLOCK_T)
    slots = (row // H * T_max + offs_t) * H + row % H
    raise NotImplementedError("kv_cache.int8")  # your code here


def decode_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    lengths: Tensor,
) -> Tensor:
    """Append the newest token of each sequence to caches in int8, then compute its attention over what they hold.

    q, k and v [B, H, D] are the newest token's. The caches [B, T_max, H, D] int8 and the scales [B, T_max, H] float32 are
    changed in place. lengths [B] int32 counts the tokens before the newest, fewer than T_max. Everything is contiguous, and
    D is a power of two. The D numbers of a head are stored as integers from -127 to 127, rounded to nearest, with the scale
    that makes the largest of them 127; a row of zeros has the scale 0. In any other row the largest number is at least 2e-36,
    so that the scale is no subnormal number. Returns o, shaped like q. Bound: each element and scale within the lengths is
    loaded once.
    """
    (B, H, D), T_max = q.shape, k_cache.shape[1]
    o = torch.empty_like(q)
    append_kernel[(B * H,)](k, v, k_cache, v_cache, k_scales, v_scales, lengths, T_max, H, D=D)
    int8_kernel[(B * H,)](
        q, k_cache, v_cache, k_scales, v_scales, lengths, o, T_max, H, D**-0.5,
        D=D, BLOCK_T=triton.next_power_of_2(T_max),
    )  # fmt: skip
    return o
