"""FlashAttention: o = softmax(scale q k^T) v without the T x T matrix of scores in memory, and its gradients.

The same kernels, to be read first: `attention`, `attention_causal` and `dk_dv` in solutions/flash_attention.py.

Forward: a program holds a block of queries and walks over the keys. Of the scores it has one block at a time, of softmax
the running maximum m and sum l of each row, and of o the sums so far; when a larger maximum turns up, what was summed is
scaled down to it. Stored are o and each row's log-sum-exp (LSE), T numbers where the scores are T^2.

Backward, with the scores computed again and p = exp(scale q k^T - LSE):
    dv = p^T do      dp = do v^T      ds = p (dp - delta)      dq = scale ds k      dk = scale ds^T q
where delta = sum(o do) of each row comes from a small kernel of its own. One kernel goes over the queries for a block of
dk and dv, another over the keys for a block of dq: the scores are computed twice, and nobody adds to what another program
writes, so that two runs agree in every bit. The first computes k q^T, the scores already transposed, because transposing
a result of tl.dot for the next one has given wrong numbers on Hopper.

Which pairs count: query i stands beside key i + T_k - T_q, so that the last query is beside the last key (bottom-right,
as FlashAttention has it; is_causal of PyTorch's scaled_dot_product_attention puts the first beside the first). A query
sees the keys from `left` before to `right` after that place; causal is right = 0. A block in which everything is seen
needs no mask, so these blocks have a loop of their own.

These kernels take pointers and whatever has strides. For 16-bit tensors with the usual head sizes others take their place:
on Hopper those of gpukit.kernels._flash_hopper; for dk and dv on Blackwell, and in traces, gpukit.kernels._flash_descriptors.

Traffic: q, k, v once and o once, as long as the keys of a head stay in L2; without that each block of queries reads them.
Limits: there are no second derivatives, no dropout, no bias on the scores, one head size for q, k and v. NaN or an infinity
in v reaches queries that do not see it as well, since 0 times it is NaN; so it does in PyTorch.
Sources: Dao 2023, https://arxiv.org/abs/2307.08691; Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867;
https://triton-lang.org/main/getting-started/tutorials/06-fused-attention.html
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels import _flash_descriptors as descriptors
from gpukit.kernels._arguments import check_runs, check_tensors
from gpukit.kernels._attention import LOG2E, SIZES, _add_product, _beyond, _ranges, _seen, _softmax_step, check_scale
from gpukit.kernels._autograd import differentiable, operator
from gpukit.kernels._device import for_hopper, properties
from gpukit.kernels._flash_descriptors import DescriptorConfig
from gpukit.kernels._launch import launch, power_of_2

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PRECISIONS = ("ieee", "tf32")
GLUON = "_flash_hopper"
UNLIMITED = 2**30  # for left and right: farther than any sequence is long


# ---------------------------------------------------------------------------------------------------- blocks of one head
@triton.jit
def _sequence(cu_ptr, batch, T):
    """Where a sequence begins and how long it is. cu_ptr: the beginnings in a packed batch, or None if all have length T."""
    first = batch * 0
    if cu_ptr is not None:
        first = tl.load(cu_ptr + batch).to(tl.int64)
        T = (tl.load(cu_ptr + batch + 1) - first).to(tl.int32)
    return first, T


@triton.jit
def _load(
    ptr, first, stride_t, stride_d, T,
    MASKED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows `first` and following of one head, [ROWS, BLOCK_D]. MASKED: those from T on are zeros."""
    offs_t = tl.arange(0, ROWS)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    # int64 up to the block; inside of it int32, which the launcher makes sure of, takes half the registers.
    ptrs = ptr + tl.cast(first, tl.int64) * stride_t + (offs_t * stride_t + offs_d * stride_d)
    if MASKED:
        return tl.load(ptrs, mask=(first + offs_t < T) & (offs_d < D), other=0.0)
    if D < BLOCK_D:
        return tl.load(ptrs, mask=offs_d < D, other=0.0)
    return tl.load(ptrs)


@triton.jit
def _store(
    ptr, x, first, stride_t, stride_d, T,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_t = tl.arange(0, ROWS)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + tl.cast(first, tl.int64) * stride_t + (offs_t * stride_t + offs_d * stride_d)
    tl.store(ptrs, x, mask=(first + offs_t < T) & (offs_d < D))


@triton.jit
def _attend(
    acc, l, m, q,
    k_ptr, v_ptr, stride_kt, stride_kd, stride_vt, stride_vd,
    start, end, hole_start, hole, lowest, highest, T_k, scale,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The keys start .. end - 1, counted without a hole, added to the sums acc and l of the queries q, whose maximum so far
    is m.

    lowest, highest  [BLOCK_M] the first and the last key that each query sees
    scale            of the scores, times log2(e)"""
    for i in tl.range(start, end, BLOCK_N):
        n = _beyond(i, hole_start, hole) if MASKED else i
        k = _load(k_ptr, n, stride_kt, stride_kd, T_k, MASKED, D, BLOCK_N, BLOCK_D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            s = tl.where(_seen(n, lowest, highest, BLOCK_N), s, -float("inf"))
        p, l, m, shrink = _softmax_step(s, l, m, scale)
        v = _load(v_ptr, n, stride_vt, stride_vd, T_k, MASKED, D, BLOCK_N, BLOCK_D)
        acc = _add_product(acc * shrink[:, None], p, v, PRECISION)
    return acc, l, m


@triton.jit(do_not_specialize=SIZES)
def flash_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_q_ptr, cu_k_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_ob, stride_oh, stride_ot, stride_od,
    stride_lb, stride_lh,
    H, groups, T_q, T_k, left, right, scale,
    PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head per program. groups: query heads for each head of keys."""
    blocks = tl.cdiv(T_q, BLOCK_M)
    # The last queries see the most keys if causal. They begin first, so that short programs fill the end.
    start_m = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    batch = (tl.program_id(0) // blocks // H).to(tl.int64)
    first_q, T_q = _sequence(cu_q_ptr, batch, T_q)
    first_k, T_k = _sequence(cu_k_ptr, batch, T_k)
    if cu_q_ptr is not None:
        if start_m >= T_q:  # a sequence shorter than the longest
            return
    q_ptr += batch * stride_qb + head * stride_qh + first_q * stride_qt
    k_ptr += batch * stride_kb + head // groups * stride_kh + first_k * stride_kt
    v_ptr += batch * stride_vb + head // groups * stride_vh + first_k * stride_vt
    o_ptr += batch * stride_ob + head * stride_oh + first_q * stride_ot
    lse_ptr += batch * stride_lb + head * stride_lh + first_q

    shift = T_k - T_q
    offs_m = start_m + tl.arange(0, BLOCK_M)
    lowest, highest = offs_m + shift - left, tl.minimum(offs_m + shift + right, T_k - 1)
    last_m = tl.minimum(start_m + BLOCK_M, T_q) - 1
    start, end, full_start, full = _ranges(start_m + shift, last_m + shift, left, right, T_k, BLOCK_N)

    q = _load(q_ptr, start_m, stride_qt, stride_qd, T_q, True, D, BLOCK_M, BLOCK_D)
    scale *= LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    # The maximum starts finite, so that -inf - m is never NaN. A row that sees no key ends with l = 0.
    m = tl.full([BLOCK_M], -3.4028234663852886e38, tl.float32)
    acc, l, m = _attend(
        acc, l, m, q, k_ptr, v_ptr, stride_kt, stride_kd, stride_vt, stride_vd,
        full_start, full_start + full, 0, 0, lowest, highest, T_k, scale, False, PRECISION, D, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc, l, m = _attend(
        acc, l, m, q, k_ptr, v_ptr, stride_kt, stride_kd, stride_vt, stride_vd,
        start, end - full, full_start, full, lowest, highest, T_k, scale, True, PRECISION, D, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    o = acc * (1.0 / tl.where(l == 0, 1.0, l))[:, None]
    _store(o_ptr, o, start_m, stride_ot, stride_od, T_q, D, BLOCK_M, BLOCK_D)
    tl.store(lse_ptr + offs_m, (m + tl.log2(l)) / LOG2E, mask=offs_m < T_q)


# -------------------------------------------------------------------------------------------------------------- backward
@triton.jit(do_not_specialize=["H", "T"])
def flash_attention_delta_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr,
    stride_ob, stride_oh, stride_ot, stride_od,
    stride_gb, stride_gh, stride_gt, stride_gd,
    H, T,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta = sum(o do) - dlse for BLOCK_M rows of one head. dlse_ptr: the gradient of the LSE, or None."""
    blocks = tl.cdiv(T, BLOCK_M)
    start = tl.program_id(0) % blocks * BLOCK_M
    row = (tl.program_id(0) // blocks).to(tl.int64)  # of B H
    o_ptr += row // H * stride_ob + row % H * stride_oh
    do_ptr += row // H * stride_gb + row % H * stride_gh
    o = _load(o_ptr, start, stride_ot, stride_od, T, True, D, BLOCK_M, BLOCK_D)
    do = _load(do_ptr, start, stride_gt, stride_gd, T, True, D, BLOCK_M, BLOCK_D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    offs = start + tl.arange(0, BLOCK_M)
    if dlse_ptr is not None:
        dlse = tl.load(dlse_ptr + row * T + offs, mask=offs < T, other=0.0)
        # A row that sees nothing has LSE -inf, whose gradient is often NaN and concerns nobody.
        lse = tl.load(lse_ptr + row * T + offs, mask=offs < T, other=0.0)
        delta -= tl.where(lse == -float("inf"), 0.0, dlse)
    tl.store(delta_ptr + row * T + offs, delta, mask=offs < T)


@triton.jit
def _add_dk_dv(
    dk, dv, k, v,
    q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qt, stride_qd, stride_gt, stride_gd,
    start, end, hole_start, hole, lowest, highest, T_q, scale,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What the queries start .. end - 1 give to dk and dv of the block k, v. All matrices here are [keys, queries]."""
    for i in tl.range(start, end, BLOCK_M):
        m = _beyond(i, hole_start, hole) if MASKED else i
        offs_m = m + tl.arange(0, BLOCK_M)
        q = _load(q_ptr, m, stride_qt, stride_qd, T_q, MASKED, D, BLOCK_M, BLOCK_D)
        # For rows past the end +inf, of which p becomes 0.
        lse = tl.load(lse_ptr + offs_m, mask=offs_m < T_q, other=float("inf"))
        s = tl.dot(k, q.T, input_precision=PRECISION)
        p = tl.exp2(s * scale - (lse * LOG2E)[None, :])
        if MASKED:
            p = tl.where(_seen(m, lowest, highest, BLOCK_M), p, 0.0)
        do = _load(do_ptr, m, stride_gt, stride_gd, T_q, MASKED, D, BLOCK_M, BLOCK_D)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < T_q, other=0.0)
        dp = tl.dot(v, do.T, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def flash_attention_bwd_kv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    stride_lb, stride_lh,
    H, groups, T_q, T_k, left, right, scale,
    PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one of the H heads of k and v, from all its query heads one after the other."""
    blocks = tl.cdiv(T_k, BLOCK_N)
    start_n = tl.program_id(0) % blocks * BLOCK_N  # the first keys are seen by the most queries if causal
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    batch = (tl.program_id(0) // blocks // H).to(tl.int64)
    first_q, T_q = _sequence(cu_q_ptr, batch, T_q)
    first_k, T_k = _sequence(cu_k_ptr, batch, T_k)
    if cu_k_ptr is not None:
        if start_n >= T_k:
            return
    q_ptr += batch * stride_qb + head * groups * stride_qh + first_q * stride_qt
    k_ptr += batch * stride_kb + head * stride_kh + first_k * stride_kt
    v_ptr += batch * stride_vb + head * stride_vh + first_k * stride_vt
    do_ptr += batch * stride_gb + head * groups * stride_gh + first_q * stride_gt
    dk_ptr += batch * stride_dkb + head * stride_dkh + first_k * stride_dkt
    dv_ptr += batch * stride_dvb + head * stride_dvh + first_k * stride_dvt
    lse_ptr += batch * stride_lb + head * groups * stride_lh + first_q
    delta_ptr += batch * stride_lb + head * groups * stride_lh + first_q

    # Seen from a key, left and right change places.
    shift = T_k - T_q
    offs_n = start_n + tl.arange(0, BLOCK_N)
    lowest, highest = offs_n - shift - right, offs_n - shift + left
    last_n = tl.minimum(start_n + BLOCK_N, T_k) - 1
    start, end, full_start, full = _ranges(start_n - shift, last_n - shift, right, left, T_q, BLOCK_M)

    # Keys past the end are zeros here; what they collect is not stored.
    k = _load(k_ptr, start_n, stride_kt, stride_kd, T_k, True, D, BLOCK_N, BLOCK_D)
    v = _load(v_ptr, start_n, stride_vt, stride_vd, T_k, True, D, BLOCK_N, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for _ in tl.range(0, groups):
        dk, dv = _add_dk_dv(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qt, stride_qd, stride_gt, stride_gd,
            full_start, full_start + full, 0, 0, lowest, highest, T_q, scale * LOG2E,
            False, PRECISION, D, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        dk, dv = _add_dk_dv(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qt, stride_qd, stride_gt, stride_gd,
            start, end - full, full_start, full, lowest, highest, T_q, scale * LOG2E,
            True, PRECISION, D, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        q_ptr += tl.cast(stride_qh, tl.int64)
        do_ptr += tl.cast(stride_gh, tl.int64)
        lse_ptr += stride_lh
        delta_ptr += stride_lh
    _store(dk_ptr, dk * scale, start_n, stride_dkt, stride_dkd, T_k, D, BLOCK_N, BLOCK_D)
    _store(dv_ptr, dv, start_n, stride_dvt, stride_dvd, T_k, D, BLOCK_N, BLOCK_D)


@triton.jit
def _add_dq(
    dq, q, do, lse, delta,
    k_ptr, v_ptr, stride_kt, stride_kd, stride_vt, stride_vd,
    start, end, hole_start, hole, lowest, highest, T_k, scale,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What the keys start .. end - 1 give to dq of the block q. Matrices are [queries, keys]; lse is in powers of 2."""
    for i in tl.range(start, end, BLOCK_N):
        n = _beyond(i, hole_start, hole) if MASKED else i
        k = _load(k_ptr, n, stride_kt, stride_kd, T_k, MASKED, D, BLOCK_N, BLOCK_D)
        v = _load(v_ptr, n, stride_vt, stride_vd, T_k, MASKED, D, BLOCK_N, BLOCK_D)
        p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * scale - lse[:, None])
        if MASKED:
            p = tl.where(_seen(n, lowest, highest, BLOCK_N), p, 0.0)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def flash_attention_bwd_q_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd,
    stride_lb, stride_lh,
    H, groups, T_q, T_k, left, right, scale,
    PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head: the same walk as forward."""
    blocks = tl.cdiv(T_q, BLOCK_M)
    start_m = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    batch = (tl.program_id(0) // blocks // H).to(tl.int64)
    first_q, T_q = _sequence(cu_q_ptr, batch, T_q)
    first_k, T_k = _sequence(cu_k_ptr, batch, T_k)
    if cu_q_ptr is not None:
        if start_m >= T_q:
            return
    q_ptr += batch * stride_qb + head * stride_qh + first_q * stride_qt
    k_ptr += batch * stride_kb + head // groups * stride_kh + first_k * stride_kt
    v_ptr += batch * stride_vb + head // groups * stride_vh + first_k * stride_vt
    do_ptr += batch * stride_gb + head * stride_gh + first_q * stride_gt
    dq_ptr += batch * stride_dqb + head * stride_dqh + first_q * stride_dqt
    lse_ptr += batch * stride_lb + head * stride_lh + first_q
    delta_ptr += batch * stride_lb + head * stride_lh + first_q

    shift = T_k - T_q
    offs_m = start_m + tl.arange(0, BLOCK_M)
    lowest, highest = offs_m + shift - left, tl.minimum(offs_m + shift + right, T_k - 1)
    last_m = tl.minimum(start_m + BLOCK_M, T_q) - 1
    start, end, full_start, full = _ranges(start_m + shift, last_m + shift, left, right, T_k, BLOCK_N)

    q = _load(q_ptr, start_m, stride_qt, stride_qd, T_q, True, D, BLOCK_M, BLOCK_D)
    do = _load(do_ptr, start_m, stride_gt, stride_gd, T_q, True, D, BLOCK_M, BLOCK_D)
    lse = tl.load(lse_ptr + offs_m, mask=offs_m < T_q, other=0.0) * LOG2E
    delta = tl.load(delta_ptr + offs_m, mask=offs_m < T_q, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = _add_dq(
        dq, q, do, lse, delta, k_ptr, v_ptr, stride_kt, stride_kd, stride_vt, stride_vd,
        full_start, full_start + full, 0, 0, lowest, highest, T_k, scale * LOG2E,
        False, PRECISION, D, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    dq = _add_dq(
        dq, q, do, lse, delta, k_ptr, v_ptr, stride_kt, stride_kd, stride_vt, stride_vd,
        start, end - full, full_start, full, lowest, highest, T_k, scale * LOG2E,
        True, PRECISION, D, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    _store(dq_ptr, dq * scale, start_m, stride_dqt, stride_dqd, T_q, D, BLOCK_M, BLOCK_D)


# ------------------------------------------------------------------------------------------------------ configurations
class Config(NamedTuple):
    """Blocks of queries and keys, warps, and stages of the loop's loads. Backward, BLOCK_N keys a program for dk and dv,
    BLOCK_M queries a program for dq."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


class Table(NamedTuple):
    """The configurations for one kind of GPU, each by the head size rounded up: 64 or less, 128, 256."""

    shared_kib: int  # of an SM, at least
    forward: dict[int, Config]
    backward_kv: dict[int, Config]
    backward_q: dict[int, Config]


# For operands of 16 bits; the first table's 64 and 128 as measured on an H200, the others by registers and shared memory as
# compiled. The blocks of q, k and v that are on their way must fit into shared memory.
TABLES = (
    Table(  # Hopper, and Blackwell's data-centre parts
        220,
        forward={64: Config(128, 64, 4, 3), 128: Config(128, 128, 8, 3), 256: Config(128, 64, 8, 2)},
        backward_kv={64: Config(64, 64, 4, 3), 128: Config(64, 128, 8, 2), 256: Config(32, 32, 4, 1)},
        backward_q={64: Config(64, 64, 4, 3), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 2)},
    ),
    Table(  # A100
        160,
        forward={64: Config(128, 64, 4, 3), 128: Config(128, 64, 8, 2), 256: Config(64, 32, 8, 2)},
        backward_kv={64: Config(64, 64, 4, 2), 128: Config(32, 64, 4, 2), 256: Config(32, 32, 4, 1)},
        backward_q={64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 2), 256: Config(32, 32, 4, 1)},
    ),
    Table(  # GeForce and other small parts
        100,
        forward={64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 2), 256: Config(32, 32, 4, 1)},
        backward_kv={64: Config(32, 64, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
        backward_q={64: Config(64, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    ),
)
# Without tensor cores (float32 with "ieee", Turing) each thread has its operands in registers, so that blocks are small.
PLAIN = {64: Config(32, 16, 4, 1), 128: Config(16, 16, 4, 1), 256: Config(16, 16, 4, 1)}
INTERPRETER = Config(32, 16, 4, 1)
DELTA_ROWS = 64


def config_of(kind: str, D: int, dtype: torch.dtype, precision: str, device: torch.device) -> Config:
    """kind: "forward", "backward_kv" or "backward_q"."""
    gpu = properties(device)
    if gpu is None:
        return INTERPRETER
    size = max(64, power_of_2(D))
    wide = dtype == torch.float32
    shared_kib = gpu.smem_per_sm_bytes // 1024
    fits = [table for table in TABLES if shared_kib >= table.shared_kib]
    if not fits or (wide and precision == "ieee"):
        return PLAIN[size]
    return getattr(fits[-1 if wide else 0], kind)[size]  # tf32 has twice the bytes: the smallest blocks


# ------------------------------------------------------------------------------------------------------------ launchers
class Packed(NamedTuple):
    """Sequences of several lengths one after the other, as one batch element: where each begins (and the last ends), int32
    [sequences + 1], and how long the longest is."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def _by_descriptors(*tensors: Tensor) -> bool:
    """Whether gpukit.kernels._flash_descriptors is for q and the others: Hopper and Blackwell's data-centre parts, 16 bits, a
    head size that was measured, and tensors of which a descriptor can be made."""
    q = tensors[0]
    gpu = properties(q.device)
    return (
        gpu is not None
        and gpu.compute_capability[0] >= 9
        and gpu.smem_per_sm_bytes >= TABLES[0].shared_kib * 1024
        and q.itemsize == 2
        and q.shape[3] in descriptors.BACKWARD_KV
        and all(x.numel() and descriptors.describable(x) for x in tensors)
    )


def _near(x: Tensor) -> Tensor:
    """x, or a copy if the offsets within a block of its rows would not fit into int32."""
    return x if max(x.stride(2), x.stride(3)) < 2**22 else x.contiguous()


def _options(q: Tensor, config: Config, precision: str) -> dict:
    D = q.shape[3]
    return {
        "PRECISION": precision, "D": D,
        "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "BLOCK_D": max(16, power_of_2(D)),
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


def _strides(x: Tensor, packed: Packed | None) -> tuple[int, ...]:
    """Of a tensor or of the LSE. In a packed batch sequences lie where cu_seqlens says, not a stride apart."""
    return x.stride() if packed is None else (0, *x.stride()[1:])


def flash_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: int,
    right: int,
    scale: float,
    precision: str,
    *,
    packed: Packed | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """o, laid out as q, and the LSE [B, H, T_q] in float32. config: of the kernel with pointers, which then it is."""
    B, H, T_q, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty((B, H, T_q), dtype=torch.float32, device=q.device)
    if o.numel() == 0:
        return o, lse
    if config is None and packed is None and _by_descriptors(q, k, v) and (hopper := for_hopper(GLUON, q.device)):
        hopper.forward(q, k, v, o, lse, left, right, scale)
        return o, lse
    q, k, v = map(_near, (q, k, v))
    config = config or config_of("forward", D, q.dtype, precision, q.device)
    cu_q, cu_k, longest_q, longest_k = packed or (None, None, T_q, k.shape[2])
    sequences = B if packed is None else len(cu_q) - 1
    launch(
        flash_attention_fwd_kernel, -(-longest_q // config.BLOCK_M) * H * sequences,
        q, k, v, o, lse, cu_q, cu_k,
        *_strides(q, packed), *_strides(k, packed), *_strides(v, packed), *_strides(o, packed),
        *_strides(lse, packed)[:2], H, H // k.shape[1], longest_q, longest_k, left, right, scale,
        **_options(q, config, precision),
    )  # fmt: skip
    return o, lse


def flash_attention_bwd(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    left: int,
    right: int,
    scale: float,
    precision: str,
    *,
    packed: Packed | None = None,
    configs: tuple[Config | DescriptorConfig, Config] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, laid out as q, k and v. configs: for dk and dv, whose kind says whether by pointers or by descriptors,
    and for dq."""
    B, H, T_q, D = q.shape
    _, H_kv, T_k, _ = k.shape
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    if dq.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    described = configs is None and packed is None and lse.is_contiguous() and _by_descriptors(q, k, v)
    if described and not descriptors.describable(do):  # as after o.sum(): one number for all
        do = do.clone(memory_format=torch.contiguous_format)
    q, k, v, o, do = map(_near, (q, k, v, o, do))
    delta = torch.empty_like(lse)
    launch(
        flash_attention_delta_kernel, -(-T_q // DELTA_ROWS) * H * B,
        o, do, lse, None if dlse is None else dlse.contiguous(), delta, *o.stride(), *do.stride(), H, T_q,
        D=D, BLOCK_M=DELTA_ROWS, BLOCK_D=max(16, power_of_2(D)),
    )  # fmt: skip
    if described and (hopper := for_hopper(GLUON, q.device)):
        hopper.backward(q, k, v, do, lse, delta, dq, dk, dv, left, right, scale)
        return dq, dk, dv
    for_kv, for_q = configs or (config_of(f"backward_{x}", D, q.dtype, precision, q.device) for x in ("kv", "q"))
    if described:
        for_kv = descriptors.BACKWARD_KV[D]
    cu_q, cu_k, longest_q, longest_k = packed or (None, None, T_q, T_k)
    sequences = B if packed is None else len(cu_q) - 1
    inputs = [stride for x in (q, k, v, do) for stride in _strides(x, packed)]
    numbers = H // H_kv, longest_q, longest_k, left, right, scale
    if isinstance(for_kv, DescriptorConfig):
        descriptors.backward_kv(q, k, v, do, lse, delta, dk, dv, left, right, scale, for_kv)
    elif dk.numel():
        launch(
            flash_attention_bwd_kv_kernel, -(-longest_k // for_kv.BLOCK_N) * H_kv * sequences,
            q, k, v, do, lse, delta, dk, dv, cu_q, cu_k,
            *inputs, *_strides(dk, packed), *_strides(dv, packed), *_strides(lse, packed)[:2], H_kv, *numbers,
            **_options(q, for_kv, precision),
        )  # fmt: skip
    launch(
        flash_attention_bwd_q_kernel, -(-longest_q // for_q.BLOCK_M) * H * sequences,
        q, k, v, do, lse, delta, dq, cu_q, cu_k,
        *inputs, *_strides(dq, packed), *_strides(lse, packed)[:2], H, *numbers,
        **_options(q, for_q, precision),
    )  # fmt: skip
    return dq, dk, dv


def gradients(backward, ctx, do: Tensor | None, dlse: Tensor | None) -> tuple:
    """Of q, k and v, from what `flash_attention_fwd` was given and returned."""
    o = ctx.saved_tensors[3]
    return backward(torch.zeros_like(o) if do is None else do, dlse, *ctx.saved_tensors, *ctx.settings)


_attention = differentiable(
    operator(
        "flash_attention",
        flash_attention_fwd,
        like=lambda q, *_: (torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
    ),
    operator(
        "flash_attention_bwd",
        flash_attention_bwd,
        like=lambda do, dlse, q, k, v, *_: tuple(map(torch.empty_like, (q, k, v))),
    ),
    keep=lambda inputs, results: ((*inputs[:3], *results), inputs[3:]),
    gradients=gradients,
    public=2,
    materialize=False,
)


# --------------------------------------------------------------------------------------------------------------- public
def check(
    op: str, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, precision: str, dims: str
) -> None:
    """Raise TypeError or ValueError for what the kernels cannot take. dims: the names of q's dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} must be float16, bfloat16 or float32, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        if x.ndim != len(dims.split()):
            raise ValueError(f"{op}: {name} must have the dimensions [{dims}], got shape {list(x.shape)}")
        check_runs(op, name, x)
        if x.device != q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q on {q.device}; they must be on one device")
    if not 1 <= q.shape[-1] <= 256:
        raise ValueError(f"{op}: the head size, q's last dimension, must be 1 to 256, got {q.shape[-1]}")
    if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        shapes = f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        raise ValueError(f"{op}: k and v must have one shape, and q's head size, got q, k and v of {shapes}")
    H, H_kv = q.shape[1], k.shape[1]
    if H != H_kv and (H_kv == 0 or H % H_kv):
        raise ValueError(f"{op}: the heads of k and v must divide those of q, got {H} of q and {H_kv} of k")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    check_scale(op, scale)
    if window is not None and not (isinstance(window, int) and window >= 1):
        raise ValueError(f"{op}: window must be None or a whole number of at least 1 key, got {window!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"{op}: precision must be {' or '.join(map(repr, PRECISIONS))}, got {precision!r}")
    return scale


def reach(causal: bool, window: int | None) -> tuple[int, int]:
    """How many keys before and after its own place a query sees."""
    left = UNLIMITED if window is None else min(window - 1, UNLIMITED)
    return left, 0 if causal else left


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast in its dtype, as PyTorch's scaled_dot_product_attention takes them."""
    kind = tensors[0].device.type
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) if x.dtype in DTYPES else x for x in tensors)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    *,
    precision: str = "ieee",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v for each head, never holding the matrix of scores.

    q [B, H, T_q, D], k and v [B, H_kv, T_k, D]: float16, bfloat16 or float32, one dtype, any strides. Tensors [B, T, H, D]
    are passed as q.transpose(1, 2), which copies nothing; the result is laid out as q. D is 1 to 256. H_kv divides H: each
    head of k and v serves H / H_kv query heads in a row (GQA; MQA with H_kv = 1).
    causal      query i sees the keys up to i + T_k - T_q: the last query sees all. F.scaled_dot_product_attention's
                is_causal counts from the first key instead; where T_q = T_k both are one
    scale       default 1 / sqrt(D)
    window      a query sees so many keys up to its own place, and if not causal as many from there on; None: all
    precision   of float32 products: "ieee", or "tf32", which keeps 10 bits of the mantissas and is many times faster
    return_lse  return (o, lse), where lse [B, H, T_q], float32, is the log of each row's sum of exp(score). It has a
                gradient too, so that results over several sets of keys can be joined

    A query that sees no key gives 0, and LSE -inf. Products are summed in float32. Under autocast q, k and v are cast
    first. Raises TypeError for a dtype, ValueError for a shape, device or number that does not fit.
    """
    check_tensors("flash_attention", q=q, k=k, v=v)
    q, k, v = cast(q, k, v)
    scale = check("flash_attention", q, k, v, scale, window, precision, "B H T D")
    if len(k) != len(q):
        raise ValueError(f"flash_attention: q and k must have one batch size, got {len(q)} and {len(k)}")
    settings = *reach(causal, window), scale, precision
    o, lse = _attention(q, k, v, *settings)
    return (o, lse) if return_lse else o


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """flash_attention with the arguments of F.scaled_dot_product_attention, and its causal mask: query i sees the keys up
    to i, whatever the lengths. Four dimensions, no attn_mask and no dropout; ValueError for these, else as above."""
    check_tensors("scaled_dot_product_attention", query=query, key=key, value=value)
    if attn_mask is not None or dropout_p:
        raise ValueError("scaled_dot_product_attention: attn_mask and dropout_p are not supported, only is_causal")
    if not enable_gqa and query.ndim == key.ndim == 4 and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"scaled_dot_product_attention: query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True"
        )
    if not is_causal or query.ndim != 4 or key.ndim != 4 or value.ndim != 4 or query.shape[2] == key.shape[2]:
        return flash_attention(query, key, value, is_causal, scale)
    square = min(query.shape[2], key.shape[2])  # the queries beyond see all keys, the keys beyond are seen by none
    o = flash_attention(query[:, :, :square], key[:, :, :square], value[:, :, :square], True, scale)
    if square == query.shape[2]:
        return o
    return torch.cat((o, flash_attention(query[:, :, square:], key, value, False, scale)), dim=2)
