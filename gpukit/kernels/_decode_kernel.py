"""The kernel of decode_attention, which explains how the work is shared out: a program's walk over its tokens, the integers
of an int8 cache made floats in registers, and the join of all splits by the program that is done last."""

import triton
import triton.language as tl

from gpukit.kernels._attention import LOG2E, _add_product
from gpukit.kernels._tiles import is_last


@triton.jit
def _block(ptr, first, offs_n, offs_d, stride_t, stride_d, end, D: tl.constexpr):
    """Tokens first + offs_n of one head of a cache. Those from `end` on are zeros: nobody has written them, and 0 times
    whatever lies there might be NaN."""
    n = (first + offs_n).to(tl.int64)
    ptrs = ptr + n * stride_t + offs_d.to(tl.int64) * stride_d
    return tl.load(ptrs, mask=(first + offs_n < end) & (offs_d < D), other=0.0)


@triton.jit
def _two_bytes(pair, PTX: tl.constexpr):
    """The two integers of 8 bits in each int16, in float16. The bits of 1024 in float16 end in ten zeros: with a byte in
    their place, its first bit turned, they are 1024 + q + 128, without the conversion of an integer. And bytes that lie in
    pairs come from shared memory as numbers of 16 bits do, by whole registers and transposed, not one by one. The whole
    loop then makes 3.9 instructions for an element of the cache, where single bytes take 6.7.

    PTX: for two pairs at once, which Triton does not see. lop3 with 0x6A is (word & byte) ^ bits."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t; lop3.b32 $0, $2, 0x00FF00FF, 0x64806480, 0x6A;
                 shr.u32 t, $2, 8; lop3.b32 $1, t, 0x00FF00FF, 0x64806480, 0x6A; }""",
            "=r,=r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = ((pair & 255) ^ 0x6480).to(tl.float16, bitcast=True)
        high = (((pair >> 8) & 255) ^ 0x6480).to(tl.float16, bitcast=True)
    return low - 1152.0, high - 1152.0


@triton.jit
def _store_rows(
    o_ptr, o, offs_m, rows, groups, stride_oh, stride_ot, stride_od, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Rows offs_m of a head of the cache to o: row m is its query head m % groups, and token m // groups."""
    offs_d = tl.arange(0, BLOCK_D)[None, :].to(tl.int64)
    at = (offs_m % groups).to(tl.int64) * stride_oh + (offs_m // groups).to(tl.int64) * stride_ot
    mask = (offs_m < rows)[:, None] & (offs_d < D)
    tl.store(o_ptr + at[:, None] + offs_d * stride_od, o, mask=mask)


@triton.jit
def _joined(
    acc_ptr, stats_ptr, offs_r, mask_r, R, splits,
    D: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """ROWS rows of o: the splits' sums, in their order and CHUNK of them at a time, in one scale and added up."""
    offs_d = tl.arange(0, BLOCK_D)[None, None, :]
    m = tl.full([ROWS], -3.4028234663852886e38, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in tl.range(0, splits, CHUNK):
        offs_s = first + tl.arange(0, CHUNK)[:, None]
        mask = (offs_s < splits) & mask_r[None, :]
        at = offs_s * R + offs_r[None, :]
        m_part = tl.load(stats_ptr + at, mask=mask, other=-float("inf"), cache_modifier=".cg")
        l_part = tl.load(stats_ptr + splits * R + at, mask=mask, other=0.0, cache_modifier=".cg")
        acc_ptrs = acc_ptr + at[:, :, None] * D + offs_d
        part = tl.load(acc_ptrs, mask=mask[:, :, None] & (offs_d < D), other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(m_part, axis=0))  # finite, as every m is
        weight, shrink = tl.exp2(m_part - m_new[None, :]), tl.exp2(m - m_new)
        l = l * shrink + tl.sum(l_part * weight, axis=0)
        o = o * shrink[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        m = m_new
    return o / tl.where(l == 0, 1.0, l)[:, None]


@triton.jit
def decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, lengths_ptr, first_ptr, o_ptr, parts_ptr, counters_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd,
    stride_ksb, stride_kst, stride_ksh,
    stride_vsb, stride_vst, stride_vsh,
    stride_ob, stride_oh, stride_ot, stride_od,
    H_kv, groups, T_q, T_max, splits, scale,
    PRECISION: tl.constexpr, PAIRED: tl.constexpr, PTX: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One split of one head of the cache, for BLOCK_M of the groups T_q queries that read it. The last of the splits to
    come to its end joins them.

    parts_ptr: the splits' acc [splits, R, D], m and l [2, splits, R], R = B H T_q, or None where there is one split.
    k_scales_ptr, v_scales_ptr: of an int8 cache, or None; PAIRED: its numbers are read two at a time, D being even.
    first_ptr: the first token of each sequence that counts, or None if all do from the first on."""
    # Neighbouring programs read neighbouring heads of the same tokens, which lie side by side in memory.
    head = (tl.program_id(0) % H_kv).to(tl.int64)
    split = tl.program_id(0) // H_kv % splits
    rows = groups * T_q
    blocks_m = tl.cdiv(rows, BLOCK_M)
    block = tl.program_id(0) // H_kv // splits % blocks_m
    batch = (tl.program_id(0) // H_kv // splits // blocks_m).to(tl.int64)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    k_ptr += batch * stride_kb + head * stride_kh
    v_ptr += batch * stride_vb + head * stride_vh
    o_ptr += batch * stride_ob + head * groups * stride_oh

    # Row m is query head m % groups of the cache's head, and token m // groups.
    query_head = head * groups + offs_m % groups
    token = (offs_m // groups).to(tl.int64)
    mask_q = (offs_m < rows)[:, None] & (offs_d < D)[None, :]
    q_ptrs = q_ptr + batch * stride_qb + (query_head * stride_qh + token * stride_qt)[:, None]
    q = tl.load(q_ptrs + offs_d.to(tl.int64)[None, :] * stride_qd, mask=mask_q, other=0.0)
    scale *= LOG2E
    # Numbers of the cache's memory in a row, and of what a row of them is multiplied with.
    WIDTH: tl.constexpr = D // 2 if PAIRED else D
    BLOCK_W: tl.constexpr = BLOCK_D // 2 if PAIRED else BLOCK_D
    offs_w = tl.arange(0, BLOCK_W)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    if PAIRED:
        k_ptr, v_ptr = k_ptr.to(tl.pointer_type(tl.int16)), v_ptr.to(tl.pointer_type(tl.int16))
        stride_kt, stride_vt = stride_kt // 2, stride_vt // 2
        # Each row of q by a power of two, with which its largest number is 2^14 to 2^15 and fits into float16.
        q = q.to(tl.float32)
        exponent = tl.maximum(tl.max(tl.abs(q), axis=1).to(tl.int32, bitcast=True) >> 23, 15)[:, None]
        q *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)
        scale *= ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        q, q_odd = tl.split(tl.reshape(q.to(tl.float16), [BLOCK_M, BLOCK_W, 2]))
        acc_odd = acc

    # This split's blocks of tokens: all splits have as many, give or take one. They follow each other, since splits that take
    # every splits-th block instead are no faster: 38.6 µs on an H200, where this order takes 38.3.
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), T_max).to(tl.int32)
    if first_ptr is not None:
        # The sequence begins there: all that follows counts from its first token.
        first = tl.minimum(tl.maximum(tl.load(first_ptr + batch), 0).to(tl.int32), length)
        length -= first
        k_ptr += first.to(tl.int64) * stride_kt
        v_ptr += first.to(tl.int64) * stride_vt
        if k_scales_ptr is not None:
            k_scales_ptr += first.to(tl.int64) * stride_kst
            v_scales_ptr += first.to(tl.int64) * stride_vst
    blocks = tl.cdiv(length, BLOCK_N)
    start = blocks * split // splits * BLOCK_N
    end = tl.minimum(blocks * (split + 1) // splits * BLOCK_N, length)
    # Where each query stops seeing tokens of this split. The last query sees all of the sequence.
    seen = tl.minimum(length - T_q + 1 + offs_m // groups, end)[:, None]

    l = tl.zeros([BLOCK_M], tl.float32)
    # The maximum starts finite, so that -inf - m is never NaN. What saw no token, an empty split too, ends with l = 0.
    m = tl.full([BLOCK_M], -3.4028234663852886e38, tl.float32)
    for n in tl.range(start, end, BLOCK_N, num_stages=NUM_STAGES):
        k = _block(k_ptr, n, offs_n[:, None], offs_w, stride_kt, stride_kd, end, WIDTH)
        if PAIRED:
            k_even, k_odd = _two_bytes(k, PTX)
            s = tl.dot(q_odd, k_odd.T, tl.dot(q, k_even.T))
        else:
            s = tl.dot(q, k.to(q.dtype).T, input_precision=PRECISION)
        if k_scales_ptr is not None:
            at = batch * stride_ksb + head * stride_ksh + (n + offs_n).to(tl.int64) * stride_kst
            s *= tl.load(k_scales_ptr + at, mask=n + offs_n < end, other=0.0).to(tl.float32)[None, :]
        s = tl.where(n + offs_n[None, :] < seen, s, -float("inf"))
        # The product with the scale stands beside the subtraction, so that both are one instruction wherever the compiler
        # computes p; of scores around 500, rounded in one place and not in another, four digits would be left.
        m_new = tl.maximum(m, tl.max(s * scale, axis=1))
        p = tl.exp2(s * scale - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(p, axis=1)
        acc *= shrink[:, None]
        v = _block(v_ptr, n, offs_n[:, None], offs_w, stride_vt, stride_vd, end, WIDTH)
        if v_scales_ptr is None:
            acc = _add_product(acc, p, v, PRECISION)
        else:
            at = batch * stride_vsb + head * stride_vsh + (n + offs_n).to(tl.int64) * stride_vst
            v_scale = tl.load(v_scales_ptr + at, mask=n + offs_n < end, other=0.0).to(tl.float32)
            # Relative to the block's largest, and up to 2^14, so that neither small scales nor small weights vanish in
            # float16.
            largest = tl.max(v_scale, axis=0)
            p *= (v_scale / tl.where(largest == 0, 1.0, largest) * 16384)[None, :]
            p = p.to(q.dtype)
            largest /= 16384
            if PAIRED:
                v_even, v_odd = _two_bytes(v, PTX)
                acc += tl.dot(p, v_even) * largest
                acc_odd = acc_odd * shrink[:, None] + tl.dot(p, v_odd) * largest
            else:
                acc += tl.dot(p, v.to(q.dtype), input_precision=PRECISION) * largest
        m = m_new

    if PAIRED:
        acc = tl.interleave(acc, acc_odd)
    if parts_ptr is None:
        o = acc / tl.where(l == 0, 1.0, l)[:, None]
        _store_rows(o_ptr, o, offs_m, rows, groups, stride_oh, stride_ot, stride_od, D, BLOCK_D)
    else:
        # R rows of queries in the whole batch: parts [splits, R, D] come first, then maxima and sums, [splits, R] each.
        R = (tl.num_programs(0) // (splits * blocks_m)).to(tl.int64) * rows
        stats_ptr = parts_ptr + splits * R * D
        first = (batch * H_kv + head) * rows
        at = split * R + first + offs_m
        tl.store(parts_ptr + at[:, None] * D + offs_d[None, :], acc, mask=mask_q)
        tl.store(stats_ptr + at, m, mask=offs_m < rows)
        tl.store(stats_ptr + splits * R + at, l, mask=offs_m < rows)
        if is_last(counters_ptr + (batch * blocks_m + block) * H_kv + head, splits):
            # Of the block, the rows that there are.
            offs_r = block * BLOCK_M + tl.arange(0, ROWS)
            o = _joined(parts_ptr, stats_ptr, first + offs_r, offs_r < rows, R, splits, D, ROWS, CHUNK, BLOCK_D)
            _store_rows(o_ptr, o, offs_r, rows, groups, stride_oh, stride_ot, stride_od, D, BLOCK_D)
