"""FlashAttention on Hopper, in Gluon (gpukit.kernels.flash_attention chooses it and explains what is computed,
gpukit.kernels._hopper how such a kernel is built).

What it wins, on an H200 with [4, 16, 4096, 128]: forward 810 µs, where an ordinary Triton kernel with tensor descriptors
took 1100 and cuDNN 871; dq 1039 µs after 1306 by pointers, dk and dv 1913 µs after 2080 by descriptors. The tensor cores and
the units that compute exponentials each need about the same time for a block of scores, so both have to work all the time,
side by side:
    Two groups of four warps, with 64 queries each, take turns at the tensor cores; one group's exponentials are computed
    beside the products of the other. With a head size of 64 these are two programs on an SM, of one group each.
    Within a group, the scores of the next block and the product of this one with v are begun together, and the exponentials
    of the next computed while that product still goes on.
A program computes tile after tile, so that the first blocks of the next are fetched while the last one is finished.
Over long sequences the maxima of a row's first block serve for all its blocks (gpukit.kernels._flash_hopper_forward): in one run
that took [4, 16, 4096, 128] from 851 to 744 µs, and [4, 16, 4096, 64] from 650 to 504.
The kernels are in gpukit.kernels._flash_hopper_forward, _flash_hopper_backward (dq; dk and dv), and _flash_hopper_one_pass and
_flash_hopper_two_groups (all three gradients at once, with a head size of 64 and of 128).

Sources: Shah et al. 2024, FlashAttention-3, https://arxiv.org/abs/2407.08608;
https://docs.nvidia.com/cuda/parallel-thread-execution/ (mbarrier, wgmma)
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpukit.kernels._device import multiprocessors
from gpukit.kernels._flash_descriptors import described
from gpukit.kernels._flash_hopper_backward import (
    flash_attention_bwd_kv_hopper_kernel,
    flash_attention_bwd_q_hopper_kernel,
)
from gpukit.kernels._flash_hopper_forward import flash_attention_fwd_hopper_kernel
from gpukit.kernels._flash_hopper_one_pass import dq_from_sums_kernel, flash_attention_bwd_hopper_kernel
from gpukit.kernels._flash_hopper_two_groups import flash_attention_bwd_two_groups_kernel
from gpukit.kernels._hopper import registers, swizzled
from gpukit.kernels._launch import checked_once, launch


class HopperConfig(NamedTuple):
    """CONSUMERS groups of warps with 64 queries each, blocks of BLOCK_N keys, slots for them, programs that share an SM. For
    dk and dv exchange keys and queries."""

    CONSUMERS: int
    BLOCK_N: int
    STAGES: int
    PER_SM: int


class OnePass(NamedTuple):
    """For all gradients at once: 128 keys, blocks of BLOCK_M queries, slots for them, buffers for what passes from the
    groups that compute dk and dv to who computes dq, and whether that is a third group. It is chosen where a query sees at
    least `keys` on average: with 512 of them one pass is faster for a head size of 64 and slower for 128
    (gpukit/results/h200/attention_tried.csv)."""

    BLOCK_M: int
    STAGES: int
    BUFFERS: int
    third: bool
    keys: int


# By the head size; 227 KiB of shared memory and 65,536 registers for the programs on an SM.
FORWARD = {64: HopperConfig(1, 128, 2, 2), 128: HopperConfig(2, 128, 2, 1)}
FORWARD_FIXED = {64: HopperConfig(2, 128, 4, 1), 128: HopperConfig(2, 128, 2, 1)}
# From so many queries and keys on; with 1,024 and a head size of 64 a causal pass takes 7% longer than with FORWARD.
FIXED_FROM = {64: 2048, 128: 1024}
BACKWARD_Q = {64: HopperConfig(1, 64, 4, 2), 128: HopperConfig(2, 64, 4, 1)}
BACKWARD_KV = {64: HopperConfig(1, 64, 4, 2), 128: HopperConfig(2, 32, 8, 1)}
BACKWARD = {64: OnePass(64, 2, 3, True, 512), 128: OnePass(64, 2, 2, False, 1024)}
ONE_PASS_REGISTERS = (
    208,
    72,
)  # of a thread for dk and dv, and of one for dq: with 24 for the fetching ones all of the SM's
ROWS = 64
SHARED = swizzled(rank=4)


@checked_once
def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(*described(x, rows), SHARED)


@cache
def _constants(config: HopperConfig) -> dict:
    average, consumer = registers(config.CONSUMERS, config.PER_SM)
    return {
        "CONSUMERS": config.CONSUMERS, "ROWS": ROWS, "BLOCK_N": config.BLOCK_N, "STAGES": config.STAGES,
        "REGISTERS": consumer, "num_warps": 4, "maxnreg": average,
    }  # fmt: skip


def _programs(consumers: int, per_sm: int, x: Tensor) -> tuple[int, int]:
    """How many programs for tiles of x [B, H, T, D], and how many tiles a program gets at a time."""
    B, H, T, _ = x.shape
    tiles, places = -(-T // (consumers * ROWS)) * B * H, multiprocessors(x.device) * per_sm
    each = 2 if tiles >= 2 * places else 1  # one long and one short walk, where there are enough of both
    return min(-(-tiles // each), places), each


def forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, left: int, right: int, scale: float) -> None:
    """Fill o and lse. All but lse are `describable` (gpukit.kernels._flash_descriptors), in 16 bits, with a head size of
    FORWARD."""
    B, H, T_q, D = q.shape
    if not reference_is_fixed(q, k, left, right):
        _forward(FORWARD[D], False, None, q, k, v, o, lse, left, right, scale)
        return
    failed = torch.empty((B, H, -(-T_q // ROWS)), dtype=torch.int32, device=q.device)
    _forward(FORWARD_FIXED[D], True, failed, q, k, v, o, lse, left, right, scale)
    _forward(FORWARD[D], False, failed, q, k, v, o, lse, left, right, scale)


def reference_is_fixed(q: Tensor, k: Tensor, left: int, right: int) -> bool:
    """Whether the forward pass takes the first block's maxima as references: over long sequences where every query sees keys
    of that block, as without a window, and in bfloat16, since float16 holds no number above 65,504."""
    T_q, T_k = q.shape[2], k.shape[2]
    long = min(T_q, T_k) >= FIXED_FROM[q.shape[3]]
    return long and q.dtype == torch.bfloat16 and left >= T_k and (right >= T_k or T_q <= T_k)


def _forward(
    config: HopperConfig, fixed: bool, failed: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    left: int, right: int, scale: float,
) -> None:  # fmt: skip
    B, H, T_q, D = q.shape
    programs, each = _programs(config.CONSUMERS, config.PER_SM, q)
    launch(
        flash_attention_fwd_hopper_kernel, programs,
        lse, failed,
        _descriptor(q, ROWS), _descriptor(k, config.BLOCK_N), _descriptor(v, config.BLOCK_N), _descriptor(o, ROWS),
        B, H, H // k.shape[1], T_q, k.shape[2], left, right, each, scale, D=D, FIXED=fixed, **_constants(config),
    )  # fmt: skip


def room_for_sums(q: Tensor, k: Tensor, left: int, right: int) -> Tensor | None:
    """Where all gradients are to come from one pass, room for the sums of dq: in float32, for whole blocks of queries, not yet
    zero. Else None."""
    B, H, T_q, D = q.shape
    T_k = k.shape[2]
    seen = min(T_q, T_k) if right >= T_q else min(left, min(T_q, T_k) // 2)
    if seen < BACKWARD[D].keys or torch.are_deterministic_algorithms_enabled():
        return None
    rows = BACKWARD[D].BLOCK_M
    return torch.empty((B, H, -(-T_q // rows), rows * D), dtype=torch.float32, device=q.device)


def backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, sums: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor, left: int, right: int, scale: float,
) -> None:  # fmt: skip
    """Fill dq, dk and dv. lse and delta are contiguous, the others as in `forward`; sums is what `room_for_sums` gave, filled
    with zeros."""
    if sums is None:
        backward_in_two(q, k, v, do, lse, delta, dq, dk, dv, left, right, scale)
    else:
        backward_in_one(q, k, v, do, lse, delta, sums, dq, dk, dv, left, right, scale)


def backward_in_one(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, sums: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, left: int, right: int, scale: float,
) -> None:  # fmt: skip
    """As `backward`: five products, and sums of dq in memory."""
    B, H, T_q, D = q.shape
    _, H_kv, T_k, _ = k.shape
    BLOCK_M, stages, buffers, third, _ = BACKWARD[D]
    blocks = sums.shape[2]
    programs, each = _programs(2, 1, k)
    average, consumer = registers(2, 1)
    kernel = flash_attention_bwd_hopper_kernel if third else flash_attention_bwd_two_groups_kernel
    launch(
        kernel, programs,
        lse, delta, sums, _descriptor(q, BLOCK_M), _descriptor(do, BLOCK_M), _descriptor(k, ROWS), _descriptor(v, ROWS),
        _descriptor(dk, ROWS), _descriptor(dv, ROWS),
        B, H_kv, H // H_kv, T_q, T_k, left, right, each, scale, ROWS=ROWS, BLOCK_M=BLOCK_M, STAGES=stages,
        BUFFERS=buffers, REGISTERS=ONE_PASS_REGISTERS if third else consumer, num_warps=4,
        maxnreg=128 if third else average,
    )  # fmt: skip
    launch(
        dq_from_sums_kernel, blocks * B * H,
        sums, dq, *dq.stride(), H, blocks, T_q, scale, D=D, BLOCK_M=BLOCK_M,
    )  # fmt: skip


def backward_in_two(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    left: int, right: int, scale: float,
) -> None:  # fmt: skip
    """As `backward`: dq in one kernel, dk and dv in another, seven products; the same bits each time."""
    B, H, T_q, D = q.shape
    _, H_kv, T_k, _ = k.shape
    config = BACKWARD_Q[D]
    programs, each = _programs(config.CONSUMERS, config.PER_SM, q)
    launch(
        flash_attention_bwd_q_hopper_kernel, programs,
        lse, delta, _descriptor(q, ROWS), _descriptor(do, ROWS), _descriptor(k, config.BLOCK_N),
        _descriptor(v, config.BLOCK_N), _descriptor(dq, ROWS),
        B, H, H // H_kv, T_q, T_k, left, right, each, scale, D=D, **_constants(config),
    )  # fmt: skip
    config = BACKWARD_KV[D]
    programs, each = _programs(config.CONSUMERS, config.PER_SM, k)
    launch(
        flash_attention_bwd_kv_hopper_kernel, programs,
        lse, delta, _descriptor(q, config.BLOCK_N), _descriptor(do, config.BLOCK_N), _descriptor(k, ROWS),
        _descriptor(v, ROWS), _descriptor(dk, ROWS), _descriptor(dv, ROWS),
        B, H_kv, H // H_kv, T_q, T_k, left, right, each, scale, D=D, **_constants(config),
    )  # fmt: skip
