"""Rotary position embedding of queries and keys in one launch: each pair of numbers is turned by an angle of its token.

The same kernel, to be read first: `rope` in solutions/norms.py.

    q1, q2 = the halves of a head;    out = (q1 cos - q2 sin, q2 cos + q1 sin)

as LLaMA and GPT-NeoX pair them, not GPT-J (neighbors 0 and 1, 2 and 3). The gradient is the turn backwards, with -sin.
Traffic: q and k read and written once. cos and sin are read once for each token, whatever the number of heads.

Limits: whole heads are turned; where only the first part of a head is (partial rotary factors), pass that part. cos and
sin get no gradient. Source: Su et al. 2021, https://arxiv.org/abs/2104.09864
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check, check_device
from gpukit.kernels._autograd import differentiable, operator
from gpukit.kernels._dtypes import acc_dtype
from gpukit.kernels._launch import launch, power_of_2
from gpukit.kernels._rows import empty


@triton.jit
def _rotate(
    x_ptr, out_ptr,
    stride_h, stride_d, stride_oh,
    cos, sin, offs_d,
    H, HALF,
    BLOCK_H: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The H heads of one token: x and out point to the first of them."""
    # cos and sin stay in registers for all heads of the token.
    for start in range(0, H, BLOCK_H):
        # int64: heads of a [B, H, T, D] tensor are T D elements apart.
        offs_h = (start + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
        mask = (offs_h < H) & (offs_d < HALF)
        x_ptrs = x_ptr + offs_h * stride_h
        offs_out = offs_h * stride_oh + offs_d
        x1 = tl.load(x_ptrs + offs_d * stride_d, mask=mask).to(ACC)
        x2 = tl.load(x_ptrs + (HALF + offs_d) * stride_d, mask=mask).to(ACC)
        # Both halves were read before either is written.
        tl.store(out_ptr + offs_out, x1 * cos - x2 * sin, mask=mask)
        tl.store(out_ptr + offs_out + HALF, x2 * cos + x1 * sin, mask=mask)


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_cb, stride_ct, stride_cd,
    stride_sb, stride_st, stride_sd,
    H, H_KV, T, HALF,
    BACKWARDS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token of one sequence per program, all heads of q and of k. HALF: half of a head's size."""
    # One dimension of programs: a grid's second ends at 65,535, and T may be longer.
    b = (tl.program_id(0) // T).to(tl.int64)
    t = (tl.program_id(0) % T).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)[None, :].to(tl.int64)
    cos = tl.load(cos_ptr + b * stride_cb + t * stride_ct + offs_d * stride_cd, mask=offs_d < HALF).to(ACC)
    sin = tl.load(sin_ptr + b * stride_sb + t * stride_st + offs_d * stride_sd, mask=offs_d < HALF).to(ACC)
    if BACKWARDS:
        # The turn by the opposite angle, which is also the transpose of the turn: hence the gradient.
        sin = -sin
    # The results are contiguous, so their strides follow from the sizes and need not be passed.
    D = 2 * HALF
    _rotate(
        q_ptr + b * stride_qb + t * stride_qt, q_out_ptr + (b * H * T + t) * D,
        stride_qh, stride_qd, tl.cast(T, tl.int64) * D, cos, sin, offs_d, H, HALF, BLOCK_H, ACC,
    )  # fmt: skip
    _rotate(
        k_ptr + b * stride_kb + t * stride_kt, k_out_ptr + (b * H_KV * T + t) * D,
        stride_kh, stride_kd, tl.cast(T, tl.int64) * D, cos, sin, offs_d, H_KV, HALF, BLOCK_H, ACC,
    )  # fmt: skip


@cache
def _config(H: int, half: int, dtype: torch.dtype) -> dict:
    """512 numbers of each half at a time, 16 a thread."""
    BLOCK_D = power_of_2(half)
    BLOCK_H = max(1, min(power_of_2(H), 512 // BLOCK_D))
    num_warps = min(max(BLOCK_H * BLOCK_D // 512, 1), 8)
    return {"BLOCK_H": BLOCK_H, "BLOCK_D": BLOCK_D, "ACC": acc_dtype(dtype), "num_warps": num_warps}


def rope_turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backwards: bool) -> tuple[Tensor, Tensor]:
    q_out, k_out = empty(q), empty(k)
    if q.numel() == 0 and k.numel() == 0:
        return q_out, k_out
    B, H, T, D = q.shape
    tables = [x.stride() if x.ndim == 3 else (0, *x.stride()) for x in (cos, sin)]  # 0: one table for all sequences
    config = _config(max(H, k.shape[1]), D // 2, q.dtype)
    launch(
        rope_kernel, B * T, q, k, cos, sin, q_out, k_out,
        *q.stride(), *k.stride(), *tables[0], *tables[1],
        H, k.shape[1], T, D // 2, BACKWARDS=backwards, **config,
    )  # fmt: skip
    return q_out, k_out


# The turn back is a rope too: forward and backward are one operator, and the second derivative is there.
_operator = operator("rope", rope_turn, like=lambda q, k, cos, sin, backwards: (empty(q), empty(k)))
_rope = differentiable(
    _operator,
    _operator,
    keep=lambda inputs, _: (inputs[2:4], inputs[4:]),
    gradients=lambda backward, ctx, dq, dk: backward(dq, dk, *ctx.saved_tensors, not ctx.settings[0]),
    again=lambda ctx, dq, dk: _rope(dq, dk, *ctx.saved_tensors, not ctx.settings[0]),
    public=2,
)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k, each token's heads turned by the angles whose cosines and sines are given.

    q [B, H, T, D] and k [B, H_kv, T, D]: one dtype out of float16, bfloat16, float32 and float64, any strides; D even.
    cos, sin [T, D/2], or [B, T, D/2] where sequences have positions of their own, in any of these dtypes. Tables that
    repeat themselves for the second half are passed as cos[..., : D // 2]. Computed in float32 (float64 for float64).
    Returns (q, k) turned, contiguous, in their shapes and dtype. Raises TypeError for other or unequal dtypes, ValueError
    for shapes that do not fit together, an odd D, tables that need a gradient, and devices that Triton cannot use.
    """
    check("rope", q=q, k=k, cos=cos, sin=sin)
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4:
            raise ValueError(f"rope: {name} must be [batch, heads, tokens, head size], got {list(x.shape)}")
    B, _, T, D = q.shape
    if k.dtype != q.dtype:
        raise TypeError(f"rope: k must have the dtype of q, {q.dtype}, got {k.dtype}")
    if (k.shape[0], *k.shape[2:]) != (B, T, D):
        raise ValueError(f"rope: k must be [{B}, heads, {T}, {D}] as q is but for the heads, got {list(k.shape)}")
    if D % 2:
        raise ValueError(f"rope: the head size of q and k must be even, got {D}")
    for name, table in (("cos", cos), ("sin", sin)):
        if tuple(table.shape) not in ((T, D // 2), (B, T, D // 2)):
            raise ValueError(f"rope: {name} must be [{T}, {D // 2}] or [{B}, {T}, {D // 2}], got {list(table.shape)}")
        if table.requires_grad:
            raise ValueError(f"rope: {name} requires a gradient, and gets none here; pass {name}.detach()")
    if cos.shape != sin.shape:
        raise ValueError(f"rope: sin must have the shape of cos, {list(cos.shape)}, got {list(sin.shape)}")
    for name, x in (("k", k), ("cos", cos), ("sin", sin)):
        check_device("rope", name, x, "q", q)
    return _rope(q, k, cos, sin, False)
