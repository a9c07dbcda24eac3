"""FlashAttention: o = softmax(scale q k^T) v without the T x T matrix of scores in memory, and its gradients.

The same kernels, to be read first: `attention`, `attention_causal` and `dk_dv` in solutions/flash_attention.py.

Forward: a program holds a block of queries and walks over the keys. Of the scores it has one block at a time, of softmax
the running maximum m and sum l of each row, and of o the sums so far; when a larger maximum turns up, what was summed is
scaled down to it. Stored are o and each row's log-sum-exp (LSE), T numbers where the scores are T^2.

The gradients are in gpukit.kernels._flash_backward, with what they compute.

Which pairs count: query i stands beside key i + T_k - T_q, so that the last query is beside the last key (bottom-right,
as FlashAttention has it; is_causal of PyTorch's scaled_dot_product_attention puts the first beside the first). A query
sees the keys from `left` before to `right` after that place; causal is right = 0. A block in which everything is seen
needs no mask, so these blocks have a loop of their own.

These kernels take pointers and whatever has strides. For 16-bit tensors with the usual head sizes others take their place:
on Hopper those of gpukit.kernels._flash_hopper; for dk and dv on Blackwell, and in traces, gpukit.kernels._flash_descriptors.

Traffic: q, k, v once and o once, as long as the keys of a head stay in L2; without that each block of queries reads them.
A mask of the caller's is read block by block where the scores are; the kernels with pointers alone take one. Its gradient,
which has the size of the scores, is left to PyTorch's operations.

Limits: there are no second derivatives, no dropout, one head size for q, k and v. NaN or an infinity
in v reaches queries that do not see it as well, since 0 times it is NaN; so it does in PyTorch.
Sources: Dao 2023, https://arxiv.org/abs/2307.08691; Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867;
https://triton-lang.org/main/getting-started/tutorials/06-fused-attention.html
"""

import math
from typing import Literal, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels import _flash_choices as choices
from gpukit.kernels._arguments import check_runs, check_stored, check_tensors
from gpukit.kernels._attention import (
    LOG2E,
    SIZES,
    _add_product,
    _beyond,
    _load,
    _load_mask,
    _ranges,
    _seen,
    _sequence,
    _softmax_step,
    _store,
    check_scale,
)  # fmt: skip
from gpukit.kernels._autograd import differentiable, operator
from gpukit.kernels._device import for_hopper
from gpukit.kernels._flash_backward import flash_attention_bwd
from gpukit.kernels._flash_choices import Config, Packed
from gpukit.kernels._launch import launch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PRECISIONS = ("ieee", "tf32")
LEAST = torch.finfo(torch.float32).min
UNLIMITED = 2**30  # for left and right: farther than any sequence is long


@triton.jit
def _attend(
    acc, l, m, q,
    k_ptr, v_ptr, stride_kt, stride_kd, stride_vt, stride_vd,
    start, end, hole_start, hole, lowest, highest, T_k, scale,
    mask_ptr, start_m, T_q, stride_mt, stride_mk,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The keys start .. end - 1, counted without a hole, added to the sums acc and l of the queries q, whose maximum so far
    is m.

    lowest, highest  [BLOCK_M] the first and the last key that each query sees
    scale            of the scores, times log2(e)
    mask_ptr         of the head's mask, of which the queries' rows begin at start_m; or None"""
    for i in tl.range(start, end, BLOCK_N):
        n = _beyond(i, hole_start, hole) if MASKED else i
        k = _load(k_ptr, n, stride_kt, stride_kd, T_k, MASKED, D, BLOCK_N, BLOCK_D)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if mask_ptr is not None:
            s = s * scale + _load_mask(mask_ptr, start_m, n, stride_mt, stride_mk, T_q, T_k, s.shape[0], BLOCK_N)
        if MASKED:
            # -inf before the maximum is taken: what is not seen must not count there either.
            s = tl.where(_seen(n, lowest, highest, BLOCK_N), s, -float("inf"))
        p, l, m, shrink = _softmax_step(s, l, m, scale if mask_ptr is None else 1.0)
        v = _load(v_ptr, n, stride_vt, stride_vd, T_k, MASKED, D, BLOCK_N, BLOCK_D)
        acc = _add_product(acc * shrink[:, None], p, v, PRECISION)
    return acc, l, m


@triton.jit(do_not_specialize=SIZES)
def flash_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, mask_ptr, stats_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_ob, stride_oh, stride_ot, stride_od,
    stride_lb, stride_lh,
    stride_mb, stride_mh, stride_mt, stride_mk,
    H, groups, T_q, T_k, left, right, scale,
    PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head per program. groups: query heads for each head of keys.

    mask_ptr: booleans as bytes, or what is added to the scores, [B, H, T_q, T_k]; or None, as then its strides and stats_ptr.
    stats [B, H, T_q, 2]: each row's maximum in powers of 2, and 1 / sum. Of a row that a mask has moved far from 0 the LSE has
    no digits left of what tells its keys apart."""
    # Programs in one dimension: block of queries, head, sequence.
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
    if mask_ptr is not None:
        mask_ptr += batch * stride_mb + head * stride_mh
        stats_ptr += 2 * (batch * stride_lb + head * stride_lh)
    lse_ptr += batch * stride_lb + head * stride_lh + first_q

    # Where query 0 stands among the keys.
    shift = T_k - T_q
    offs_m = start_m + tl.arange(0, BLOCK_M)
    lowest, highest = offs_m + shift - left, tl.minimum(offs_m + shift + right, T_k - 1)
    last_m = tl.minimum(start_m + BLOCK_M, T_q) - 1
    start, end, full_start, full = _ranges(start_m + shift, last_m + shift, left, right, T_k, BLOCK_N)

    # Read once and kept in registers or shared memory for the whole walk.
    q = _load(q_ptr, start_m, stride_qt, stride_qd, T_q, True, D, BLOCK_M, BLOCK_D)
    # e^(scale s) is 2^(scale log2(e) s): one factor for both, applied inside the exponent.
    scale *= LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    # The maximum starts finite, so that -inf - m is never NaN. A row that sees no key ends with l = 0.
    m = tl.full([BLOCK_M], -3.4028234663852886e38, tl.float32)
    # Blocks in which everything is seen first, and without a mask; then those at the edges, around that hole.
    acc, l, m = _attend(
        acc, l, m, q, k_ptr, v_ptr, stride_kt, stride_kd, stride_vt, stride_vd,
        full_start, full_start + full, 0, 0, lowest, highest, T_k, scale,
        mask_ptr, start_m, T_q, stride_mt, stride_mk, False, PRECISION, D, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc, l, m = _attend(
        acc, l, m, q, k_ptr, v_ptr, stride_kt, stride_kd, stride_vt, stride_vd,
        start, end - full, full_start, full, lowest, highest, T_k, scale,
        mask_ptr, start_m, T_q, stride_mt, stride_mk, True, PRECISION, D, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    # One division a row. A row that saw nothing has acc = 0, and gets 0, not NaN.
    o = acc * (1.0 / tl.where(l == 0, 1.0, l))[:, None]
    _store(o_ptr, o, start_m, stride_ot, stride_od, T_q, D, BLOCK_M, BLOCK_D)
    # m and l are in powers of 2; the LSE is in powers of e, as PyTorch has it. log2(0) is -inf.
    tl.store(lse_ptr + offs_m, (m + tl.log2(l)) / LOG2E, mask=offs_m < T_q)
    if mask_ptr is not None:
        tl.store(stats_ptr + 2 * offs_m, m, mask=offs_m < T_q)
        tl.store(stats_ptr + 2 * offs_m + 1, 1.0 / tl.where(l == 0, 1.0, l), mask=offs_m < T_q)


# ------------------------------------------------------------------------------------------------------------ launchers
def flash_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: int,
    right: int,
    scale: float,
    precision: str,
    mask: Tensor | None = None,
    *,
    packed: Packed | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """o, laid out as q, the LSE [B, H, T_q] in float32, and with a mask [B, H, T_q, T_k] (bytes, or what is added to the
    scores) the kernel's stats. config: of the kernel with pointers, which then it is."""
    B, H, T_q, D = q.shape
    o = torch.empty_like(q)
    lse = torch.empty((B, H, T_q), dtype=torch.float32, device=q.device)
    stats = None if mask is None else lse.new_empty((B, H, T_q, 2))
    if o.numel() == 0:
        return o, lse, stats
    if (
        config is None
        and packed is None
        and mask is None
        and choices.by_descriptors(q, k, v)
        and (hopper := for_hopper(choices.GLUON, q.device))
    ):
        hopper.forward(q, k, v, o, lse, left, right, scale)
        return o, lse, stats
    q, k, v = map(choices.near, (q, k, v))
    mask = None if mask is None else choices.near(mask)
    config = config or choices.config_of("forward", D, q.dtype, precision, q.device, mask is not None)
    cu_q, cu_k, longest_q, longest_k = packed or (None, None, T_q, k.shape[2])
    sequences = B if packed is None else len(cu_q) - 1
    launch(
        flash_attention_fwd_kernel, -(-longest_q // config.BLOCK_M) * H * sequences,
        q, k, v, o, lse, cu_q, cu_k, mask, stats,
        *choices.strides(q, packed), *choices.strides(k, packed), *choices.strides(v, packed), *choices.strides(o, packed),
        *choices.strides(lse, packed)[:2], *choices.mask_strides(mask), H, H // k.shape[1], longest_q, longest_k, left, right, scale,
        **choices.options(q, config, precision),
    )  # fmt: skip
    return o, lse, stats


def gradients(backward, ctx, do: Tensor | None, dlse: Tensor | None) -> tuple:
    """Of q, k and v, from what the launcher was given and returned."""
    saved = ctx.saved_tensors  # once: under checkpointing a second look is refused
    return backward(torch.zeros_like(saved[3]) if do is None else do, dlse, *saved, *ctx.settings)


def _like(q, k, v, left, right, scale, precision, mask=None):
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return torch.empty_like(q), lse, None if mask is None else lse.new_empty((*lse.shape, 2))


def _gradients(backward, ctx, do: Tensor | None, dlse: Tensor | None) -> tuple:
    q, k, v, o, lse, stats, mask = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    found = backward(do, dlse, q, k, v, o, lse, *ctx.settings, mask, stats)
    if mask is None or not ctx.needs_input_grad[7]:
        return found
    dmask = _mask_gradient(do, dlse, q, k, v, o, mask, stats, *ctx.settings[:3])
    return *found, *(None,) * 4, dmask  # none of the numbers


def _mask_gradient(do, dlse, q, k, v, o, mask, stats, left: int, right: int, scale: float) -> Tensor:
    """ds = p (dp - delta) of every score, in PyTorch's operations: the gradient is as large as the matrix of scores."""
    T_q, T_k = mask.shape[2:]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v, o, do = (x.float() for x in (q, k, v, o, do))
    top, share = stats.unsqueeze(-2).unbind(-1)  # [B, H, T_q, 1]
    s = (q @ k.mT) * (scale * LOG2E.value) + (mask.float() * LOG2E.value).clamp(min=LEAST)
    offset = torch.arange(T_k, device=q.device) - torch.arange(T_q, device=q.device)[:, None] - (T_k - T_q)
    unseen = (mask == -math.inf) | (offset < -left) | (offset > right)
    delta = (o * do).sum(-1, keepdim=True)
    delta = delta if dlse is None else delta - dlse.unsqueeze(-1)
    ds = (s - top).exp2() * share * (do @ v.mT - delta)
    return ds.masked_fill(unseen, 0).to(mask.dtype)


_attention = differentiable(
    operator("flash_attention", flash_attention_fwd, like=_like),
    operator(
        "flash_attention_bwd",
        flash_attention_bwd,
        like=lambda do, dlse, q, k, v, *_: tuple(map(torch.empty_like, (q, k, v))),
    ),
    keep=lambda inputs, results: ((*inputs[:3], *results, inputs[7]), inputs[3:7]),
    gradients=_gradients,
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


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = ..., scale: float | None = ..., window: int | None = ..., *,
    attn_mask: Tensor | None = ..., precision: str = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = ..., scale: float | None = ..., window: int | None = ..., *,
    attn_mask: Tensor | None = ..., precision: str = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    *,
    attn_mask: Tensor | None = None,
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
    attn_mask   broadcast to [B, H, T_q, T_k]: bool, True where a query sees a key, or float16, bfloat16 or float32, added to
                the scaled scores. On top of causal and window. The gradient of what is added is made for every score: B H T_q
                T_k numbers, several times
    precision   of float32 products: "ieee", or "tf32", which keeps 10 bits of the mantissas and is many times faster
    return_lse  return (o, lse), where lse [B, H, T_q], float32, is the log of each row's sum of exp(score). It has a
                gradient too, so that results over several sets of keys can be joined

    A query that sees no key gives 0, and LSE -inf. Products are summed in float32. Under autocast q, k and v are cast
    first. On Hopper, where a query sees 512 keys or more on average (1,024 for a head size of 128), q's gradient is added up
    in an order that differs from run to run, and so do its last bits; after torch.use_deterministic_algorithms(True) they are
    the same each time. Raises TypeError for a dtype, ValueError for a shape, device or number that does not fit.
    """
    check_tensors("flash_attention", q=q, k=k, v=v)
    q, k, v = cast(q, k, v)
    scale = check("flash_attention", q, k, v, scale, window, precision, "B H T D")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"flash_attention: q and k must have one batch size, got {len(q)} and {len(k)}")
    mask = None if attn_mask is None else _mask("flash_attention", attn_mask, q, k)
    settings = *reach(causal, window), scale, precision
    o, lse = _attention(q, k, v, *settings, mask)
    return (o, lse) if return_lse else o


def _mask(op: str, attn_mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """attn_mask as [B, H, T_q, T_k], a view, booleans as bytes; raises TypeError or ValueError for what it cannot be."""
    check_tensors(op, attn_mask=attn_mask)
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in DTYPES:
        raise TypeError(f"{op}: attn_mask must be bool, float16, bfloat16 or float32, got {attn_mask.dtype}")
    if attn_mask.device != q.device:
        raise ValueError(f"{op}: attn_mask is on {attn_mask.device}, q on {q.device}; they must be on one device")
    check_stored(op, "attn_mask", attn_mask)
    shape = *q.shape[:3], k.shape[2]
    try:
        mask = attn_mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{op}: attn_mask must be broadcastable to [B, H, T_q, T_k], here {list(shape)}, got {list(attn_mask.shape)}"
        ) from None
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _as_four(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> tuple:
    """query, key and value as [B, H, T, D], the mask for them, and the result's shape: dimensions that are missing are added,
    those before the heads are broadcast and become one."""
    qkv = query, key, value
    op, shapes = "scaled_dot_product_attention", [list(x.shape) for x in qkv]
    if min(x.ndim for x in qkv) < 2:
        raise ValueError(f"{op}: query, key and value must have at least two dimensions [T D], got {shapes}")
    ndim = max(x.ndim for x in qkv)
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in qkv))
    except RuntimeError:
        raise ValueError(f"{op}: the dimensions before the heads must be equal or 1, got {shapes}") from None
    heads = [x if x.ndim > 2 else x.unsqueeze(0) for x in qkv]
    q, k, v = (x.expand(*batch, *x.shape[-3:]).reshape(batch.numel(), *x.shape[-3:]) for x in heads)
    if attn_mask is not None and attn_mask.ndim > 3:
        try:
            attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:]).reshape(-1, *attn_mask.shape[-3:])
        except RuntimeError:
            raise ValueError(
                f"{op}: attn_mask must be broadcastable to {[*batch, *q.shape[1:3], k.shape[2]]}, got {list(attn_mask.shape)}"
            ) from None
    return q, k, v, attn_mask, (*batch, *q.shape[1:3], v.shape[-1])[-ndim:]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """flash_attention with the arguments of F.scaled_dot_product_attention, and its causal mask: query i sees the keys up
    to i, whatever the lengths.

    query [..., H, T_q, D], key and value [..., H_kv, T_k, D]: four dimensions, or two or more, those before the heads
    broadcast. attn_mask as there, but not with is_causal, and no dropout; ValueError for these, else as above."""
    check_tensors("scaled_dot_product_attention", query=query, key=key, value=value)
    if dropout_p:
        raise ValueError(f"scaled_dot_product_attention: dropout_p is not supported, it must be 0, got {dropout_p}")
    if attn_mask is not None and is_causal:
        raise ValueError(
            "scaled_dot_product_attention: attn_mask and is_causal exclude each other; put both into the mask"
        )
    if not query.ndim == key.ndim == value.ndim == 4 or not len(query) == len(key) == len(value):
        query, key, value, attn_mask, shape = _as_four(query, key, value, attn_mask)
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        ).reshape(shape)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"scaled_dot_product_attention: query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True"
        )
    if not is_causal or query.shape[2] == key.shape[2]:
        return flash_attention(query, key, value, is_causal, scale, attn_mask=attn_mask)
    square = min(query.shape[2], key.shape[2])  # the queries beyond see all keys, the keys beyond are seen by none
    o = flash_attention(query[:, :, :square], key[:, :, :square], value[:, :, :square], True, scale)
    if square == query.shape[2]:
        return o
    return torch.cat((o, flash_attention(query[:, :, square:], key, value, False, scale)), dim=2)
