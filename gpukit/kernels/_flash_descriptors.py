"""dk and dv of FlashAttention where there is a TMA unit: tensor descriptors fetch the blocks (gpukit.kernels._flash_backward
chooses it, and explains what is computed; these are the same steps. On Hopper gpukit.kernels._flash_hopper goes before it).

A descriptor names a whole tensor [B, H, T, D] once, with its strides; the TMA unit then fetches a block of rows from four
coordinates and fills with zeros what lies past the end. Pointers take an address for every 16 bytes instead, registers
that here were missing: on an H200 dk and dv of [4, 16, 4096, 128] took 2647 µs by pointers, 1859 so. For dq pointers are as
fast.
Source: https://triton-lang.org/main/getting-started/tutorials/06-fused-attention.html
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit.kernels._attention import LOG2E, SIZES, _beyond, _ranges, _seen
from gpukit.kernels._launch import checked_once, launch


@triton.jit
def _rows_of(desc, batch, head, first, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows `first` and following of one head, [ROWS, D]; those past the end are zeros."""
    return desc.load([batch, head, first, 0]).reshape([ROWS, D])


@triton.jit
def _put(desc, batch, head, first, x):
    """Store x as the rows from `first` on; what lies past the end is left out."""
    desc.store([batch, head, first, 0], x.to(desc.dtype).reshape([1, 1, x.shape[0], x.shape[1]]))


@triton.jit
def _add_dk_dv(
    dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, batch, head,
    start, end, hole_start, hole, lowest, highest, T_q, scale,
    MASKED: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What the queries start .. end - 1 give to dk and dv of the block k, v. Matrices are [keys, queries]."""
    for i in tl.range(start, end, BLOCK_M):
        m = _beyond(i, hole_start, hole) if MASKED else i
        offs_m = m + tl.arange(0, BLOCK_M)
        q = _rows_of(q_desc, batch, head, m, BLOCK_M, D)
        lse = tl.load(lse_ptr + offs_m, mask=offs_m < T_q, other=float("inf"))
        p = tl.exp2(tl.dot(k, q.T) * scale - (lse * LOG2E)[None, :])
        if MASKED:
            p = tl.where(_seen(m, lowest, highest, BLOCK_M), p, 0.0)
        do = _rows_of(do_desc, batch, head, m, BLOCK_M, D)
        dv = tl.dot(p.to(do.dtype), do, dv)
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < T_q, other=0.0)
        ds = p * (tl.dot(v, do.T) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


# Of T_q it must be known whether 16 divides it: a row of the LSE begins at a multiple of it, and numbers that may begin
# anywhere are copied one by one.
@triton.jit(do_not_specialize=[name for name in SIZES if name != "T_q"])
def flash_attention_bwd_kv_descriptor_kernel(
    lse_ptr, delta_ptr, q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc,
    H, groups, T_q, T_k, left, right, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one of the H heads of k and v, from all its query heads one after the other."""
    blocks = tl.cdiv(T_k, BLOCK_N)
    start_n = tl.program_id(0) % blocks * BLOCK_N
    row = tl.program_id(0) // blocks
    batch, head = row // H, row % H
    shift = T_k - T_q
    offs_n = start_n + tl.arange(0, BLOCK_N)
    lowest, highest = offs_n - shift - right, offs_n - shift + left
    last_n = tl.minimum(start_n + BLOCK_N, T_k) - 1
    start, end, full_start, full = _ranges(start_n - shift, last_n - shift, right, left, T_q, BLOCK_M)

    k = _rows_of(k_desc, batch, head, start_n, BLOCK_N, D)
    v = _rows_of(v_desc, batch, head, start_n, BLOCK_N, D)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    for group in tl.range(0, groups):
        of_query = head * groups + group
        first = (batch * H * groups + of_query).to(tl.int64) * T_q
        dk, dv = _add_dk_dv(
            dk, dv, k, v, q_desc, do_desc, lse_ptr + first, delta_ptr + first, batch, of_query,
            full_start, full_start + full, 0, 0, lowest, highest, T_q, scale * LOG2E, False, D, BLOCK_M,
        )  # fmt: skip
        dk, dv = _add_dk_dv(
            dk, dv, k, v, q_desc, do_desc, lse_ptr + first, delta_ptr + first, batch, of_query,
            start, end - full, full_start, full, lowest, highest, T_q, scale * LOG2E, True, D, BLOCK_M,
        )  # fmt: skip
    _put(dk_desc, batch, head, start_n, dk * scale)
    _put(dv_desc, batch, head, start_n, dv)


# ------------------------------------------------------------------------------------------------------------ launchers
class DescriptorConfig(NamedTuple):
    """As gpukit.kernels._flash_choices.Config."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


# By the head size, for 16-bit operands and 227 KiB of shared memory.
BACKWARD_KV = {64: DescriptorConfig(64, 64, 4, 3), 128: DescriptorConfig(64, 128, 8, 3)}


def describable(x: Tensor) -> bool:
    """Whether the TMA unit can read x [B, H, T, D] as it lies in memory: whole rows, whose addresses 16 bytes divide."""
    unit = 16 // x.itemsize
    stride_b, stride_h, stride_t, stride_d = x.stride()
    B, H, T, _ = x.shape
    return (
        stride_d == 1
        and x.data_ptr() % 16 == 0
        and (T == 1 or (stride_t > 0 and stride_t % unit == 0))
        and (H == 1 or (stride_h > 0 and stride_h % unit == 0))
        and (B == 1 or (stride_b > 0 and stride_b % unit == 0))
    )


def described(x: Tensor, rows: int) -> tuple[Tensor, list[int], list[int], list[int]]:
    """What a descriptor of x [B, H, T, D] is made of, for blocks of so many rows."""
    D = x.shape[3]
    # A dimension of one element may have any stride; the descriptor asks for one that 16 bytes divide.
    strides = [stride if size > 1 else D for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return x, list(x.shape), [*strides, 1], [1, 1, rows, D]


@checked_once
def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(*described(x, rows))


def backward_kv(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
    left: int, right: int, scale: float, config: DescriptorConfig,
) -> None:  # fmt: skip
    """Fill dk and dv. lse and delta are contiguous; the others are `describable`, in 16 bits, with a head size of
    BACKWARD_KV."""
    B, H_kv, T_k, D = k.shape
    M, N = config.BLOCK_M, config.BLOCK_N
    launch(
        flash_attention_bwd_kv_descriptor_kernel, -(-T_k // N) * H_kv * B,
        lse, delta, _descriptor(q, M), _descriptor(k, N), _descriptor(v, N), _descriptor(do, M),
        _descriptor(dk, N), _descriptor(dv, N), H_kv, q.shape[1] // H_kv, q.shape[2], T_k, left, right, scale,
        D=D, BLOCK_M=M, BLOCK_N=N, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
