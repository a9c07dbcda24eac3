"""The gradients of FlashAttention by pointers (gpukit.kernels.flash_attention says which pairs of queries and keys count).

The scores are computed again from q and k, and with p = exp(scale q k^T - LSE):
    dv = p^T do      dp = do v^T      ds = p (dp - delta)      dq = scale ds k      dk = scale ds^T q
where delta = sum(o do) of each row comes from a small kernel of its own. One kernel goes over the queries for a block of
dk and dv, another over the keys for a block of dq: the scores are computed twice, and nobody adds to what another program
writes, so that two runs agree in every bit. The first computes k q^T, the scores already transposed, because transposing
a result of tl.dot for the next product has given wrong numbers on Hopper.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels import _flash_choices as choices
from gpukit.kernels import _flash_descriptors as descriptors
from gpukit.kernels._attention import LOG2E, SIZES, _beyond, _load, _load_mask, _ranges, _seen, _sequence, _store
from gpukit.kernels._device import for_hopper
from gpukit.kernels._flash_choices import Config, Packed
from gpukit.kernels._flash_descriptors import DescriptorConfig
from gpukit.kernels._launch import launch, power_of_2


@triton.jit(do_not_specialize=["H", "T"])
def flash_attention_delta_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, sums_ptr,
    stride_ob, stride_oh, stride_ot, stride_od,
    stride_gb, stride_gh, stride_gt, stride_gd,
    H, T,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta = sum(o do) - dlse for BLOCK_M rows of one head. dlse_ptr: the gradient of the LSE, or None. sums_ptr: BLOCK_M D
    numbers for each program, which are to be 0, or None."""
    blocks = tl.cdiv(T, BLOCK_M)
    start = tl.program_id(0) % blocks * BLOCK_M
    # delta and the LSE are contiguous [B, H, T]: a row of them is one number of B H.
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
    if sums_ptr is not None:
        sums_ptr += tl.program_id(0).to(tl.int64) * (BLOCK_M * D)
        tl.store(sums_ptr + tl.arange(0, BLOCK_M * D), tl.zeros([BLOCK_M * D], tl.float32))


@triton.jit
def _add_dk_dv(
    dk, dv, k, v,
    q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qt, stride_qd, stride_gt, stride_gd,
    start, end, hole_start, hole, lowest, highest, T_q, scale,
    mask_ptr, stats_ptr, start_n, T_k, stride_mt, stride_mk,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What the queries start .. end - 1 give to dk and dv of the block k, v. All matrices here are [keys, queries]; mask_ptr
    is of the head's mask, of which the keys' columns begin at start_n, or None."""
    for i in tl.range(start, end, BLOCK_M):
        m = _beyond(i, hole_start, hole) if MASKED else i
        offs_m = m + tl.arange(0, BLOCK_M)
        q = _load(q_ptr, m, stride_qt, stride_qd, T_q, MASKED, D, BLOCK_M, BLOCK_D)
        # For rows past the end +inf, of which p becomes 0.
        if mask_ptr is None:
            lse = tl.load(lse_ptr + offs_m, mask=offs_m < T_q, other=float("inf"))
        else:  # the maximum and 1 / sum in its place, for their digits: flash_attention_fwd_kernel says why
            lse = tl.load(stats_ptr + 2 * offs_m, mask=offs_m < T_q, other=float("inf"))
            share = tl.load(stats_ptr + 2 * offs_m + 1, mask=offs_m < T_q, other=0.0)
        s = tl.dot(k, q.T, input_precision=PRECISION)
        if mask_ptr is not None:
            s = s * scale + _load_mask(mask_ptr, start_n, m, stride_mk, stride_mt, T_k, T_q, s.shape[0], BLOCK_M)
            p = tl.exp2(s - lse[None, :]) * share[None, :]
        else:
            # p is softmax itself, not up to a factor: the LSE was kept for this. So no running maximum is needed.
            p = tl.exp2(s * scale - (lse * LOG2E)[None, :])
        if MASKED:
            p = tl.where(_seen(m, lowest, highest, BLOCK_M), p, 0.0)
        do = _load(do_ptr, m, stride_gt, stride_gd, T_q, MASKED, D, BLOCK_M, BLOCK_D)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < T_q, other=0.0)
        dp = tl.dot(v, do.T, input_precision=PRECISION)
        # The derivative of softmax: what dp has in common along a row is taken out, and delta is that.
        ds = p * (dp - delta[None, :])
        # Without `scale`, which is applied once to the finished sums.
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def flash_attention_bwd_kv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, mask_ptr, stats_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    stride_lb, stride_lh,
    stride_mb, stride_mh, stride_mt, stride_mk,
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
    if mask_ptr is not None:
        mask_ptr += batch * stride_mb + head * groups * stride_mh
        stats_ptr += 2 * (batch * stride_lb + head * groups * stride_lh)

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
    # All query heads that share these keys add to the same dk and dv, in this program, one after the other.
    for _ in tl.range(0, groups):
        dk, dv = _add_dk_dv(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qt, stride_qd, stride_gt, stride_gd,
            full_start, full_start + full, 0, 0, lowest, highest, T_q, scale * LOG2E,
            mask_ptr, stats_ptr, start_n, T_k, stride_mt, stride_mk, False, PRECISION, D, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        dk, dv = _add_dk_dv(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qt, stride_qd, stride_gt, stride_gd,
            start, end - full, full_start, full, lowest, highest, T_q, scale * LOG2E,
            mask_ptr, stats_ptr, start_n, T_k, stride_mt, stride_mk, True, PRECISION, D, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        q_ptr += tl.cast(stride_qh, tl.int64)
        do_ptr += tl.cast(stride_gh, tl.int64)
        lse_ptr += stride_lh
        delta_ptr += stride_lh
        if mask_ptr is not None:
            mask_ptr += tl.cast(stride_mh, tl.int64)
            stats_ptr += 2 * stride_lh
    _store(dk_ptr, dk * scale, start_n, stride_dkt, stride_dkd, T_k, D, BLOCK_N, BLOCK_D)
    _store(dv_ptr, dv, start_n, stride_dvt, stride_dvd, T_k, D, BLOCK_N, BLOCK_D)


@triton.jit
def _add_dq(
    dq, q, do, lse, delta,
    k_ptr, v_ptr, stride_kt, stride_kd, stride_vt, stride_vd,
    start, end, hole_start, hole, lowest, highest, T_k, scale,
    mask_ptr, share, start_m, T_q, stride_mt, stride_mk,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What the keys start .. end - 1 give to dq of the block q. Matrices are [queries, keys]; lse is in powers of 2. With a
    mask, whose rows for the queries begin at start_m, lse is their maximum and share 1 / their sum."""
    for i in tl.range(start, end, BLOCK_N):
        n = _beyond(i, hole_start, hole) if MASKED else i
        k = _load(k_ptr, n, stride_kt, stride_kd, T_k, MASKED, D, BLOCK_N, BLOCK_D)
        v = _load(v_ptr, n, stride_vt, stride_vd, T_k, MASKED, D, BLOCK_N, BLOCK_D)
        if mask_ptr is not None:
            added = _load_mask(mask_ptr, start_m, n, stride_mt, stride_mk, T_q, T_k, lse.shape[0], BLOCK_N)
            s = tl.dot(q, k.T, input_precision=PRECISION) * scale + added
            p = tl.exp2(s - lse[:, None]) * share[:, None]
        else:
            p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * scale - lse[:, None])
        if MASKED:
            p = tl.where(_seen(n, lowest, highest, BLOCK_N), p, 0.0)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def flash_attention_bwd_q_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, mask_ptr, stats_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd,
    stride_lb, stride_lh,
    stride_mb, stride_mh, stride_mt, stride_mk,
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
    # Rows past the end have q = 0 and do = 0: whatever p is there, what it gives is not stored.
    lse = tl.load(lse_ptr + offs_m, mask=offs_m < T_q, other=0.0) * LOG2E
    delta = tl.load(delta_ptr + offs_m, mask=offs_m < T_q, other=0.0)
    share = 1.0
    if mask_ptr is not None:
        mask_ptr += batch * stride_mb + head * stride_mh
        stats_ptr += 2 * (batch * stride_lb + head * stride_lh)
        lse = tl.load(stats_ptr + 2 * offs_m, mask=offs_m < T_q, other=0.0)
        share = tl.load(stats_ptr + 2 * offs_m + 1, mask=offs_m < T_q, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq = _add_dq(
        dq, q, do, lse, delta, k_ptr, v_ptr, stride_kt, stride_kd, stride_vt, stride_vd,
        full_start, full_start + full, 0, 0, lowest, highest, T_k, scale * LOG2E,
        mask_ptr, share, start_m, T_q, stride_mt, stride_mk, False, PRECISION, D, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    dq = _add_dq(
        dq, q, do, lse, delta, k_ptr, v_ptr, stride_kt, stride_kd, stride_vt, stride_vd,
        start, end - full, full_start, full, lowest, highest, T_k, scale * LOG2E,
        mask_ptr, share, start_m, T_q, stride_mt, stride_mk, True, PRECISION, D, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    _store(dq_ptr, dq * scale, start_m, stride_dqt, stride_dqd, T_q, D, BLOCK_M, BLOCK_D)


DELTA_ROWS = 64


def delta_and_zeros(o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None, sums: Tensor | None) -> Tensor:
    """delta, like lse; sums [B, H, blocks of DELTA_ROWS queries, DELTA_ROWS D] is filled with zeros in the same launch."""
    B, H, T, D = o.shape
    delta = torch.empty_like(lse)
    launch(
        flash_attention_delta_kernel, -(-T // DELTA_ROWS) * H * B,
        o, do, lse, None if dlse is None else dlse.contiguous(), delta, sums, *o.stride(), *do.stride(), H, T,
        D=D, BLOCK_M=DELTA_ROWS, BLOCK_D=max(16, power_of_2(D)),
    )  # fmt: skip
    return delta


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
    mask: Tensor | None = None,
    stats: Tensor | None = None,
    *,
    packed: Packed | None = None,
    configs: tuple[Config | DescriptorConfig, Config] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, laid out as q, k and v. configs: for dk and dv, whose kind says whether by pointers or by descriptors,
    and for dq. mask and stats: what the forward pass was given and returned."""
    B, H, T_q, D = q.shape
    _, H_kv, T_k, _ = k.shape
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    if dq.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    described = (
        configs is None and packed is None and mask is None and lse.is_contiguous() and choices.by_descriptors(q, k, v)
    )
    if described and not descriptors.describable(do):  # as after o.sum(): one number for all
        do = do.clone(memory_format=torch.contiguous_format)
    q, k, v, o, do = map(choices.near, (q, k, v, o, do))
    mask, stats = (None, None) if mask is None else (choices.near(mask), stats)
    hopper = for_hopper(choices.GLUON, q.device) if described else None
    sums = hopper.room_for_sums(q, k, left, right) if hopper else None
    delta = delta_and_zeros(o, do, lse, dlse, sums)
    if hopper:
        hopper.backward(q, k, v, do, lse, delta, sums, dq, dk, dv, left, right, scale)
        return dq, dk, dv
    for_kv, for_q = configs or (
        choices.config_of(f"backward_{x}", D, q.dtype, precision, q.device, mask is not None) for x in ("kv", "q")
    )
    if described:
        for_kv = descriptors.BACKWARD_KV[D]
    cu_q, cu_k, longest_q, longest_k = packed or (None, None, T_q, T_k)
    sequences = B if packed is None else len(cu_q) - 1
    inputs = [stride for x in (q, k, v, do) for stride in choices.strides(x, packed)]
    numbers = H // H_kv, longest_q, longest_k, left, right, scale
    if isinstance(for_kv, DescriptorConfig):
        descriptors.backward_kv(q, k, v, do, lse, delta, dk, dv, left, right, scale, for_kv)
    elif dk.numel():
        launch(
            flash_attention_bwd_kv_kernel, -(-longest_k // for_kv.BLOCK_N) * H_kv * sequences,
            q, k, v, do, lse, delta, dk, dv, cu_q, cu_k, mask, stats,
            *inputs, *choices.strides(dk, packed), *choices.strides(dv, packed), *choices.strides(lse, packed)[:2],
            *choices.mask_strides(mask), H_kv, *numbers,
            **choices.options(q, for_kv, precision),
        )  # fmt: skip
    launch(
        flash_attention_bwd_q_kernel, -(-longest_q // for_q.BLOCK_M) * H * sequences,
        q, k, v, do, lse, delta, dq, cu_q, cu_k, mask, stats,
        *inputs, *choices.strides(dq, packed), *choices.strides(lse, packed)[:2], *choices.mask_strides(mask), H, *numbers,
        **choices.options(q, for_q, precision),
    )  # fmt: skip
    return dq, dk, dv
