"""The gradients of the norms: dx row by row, and the sums over all rows that weight and bias need.

A program walks over many rows and keeps its own sums of the gradients of weight and bias; a second kernel adds those of
all programs, in a fixed order. On Hopper the rows of some LayerNorms come through gpukit.kernels._norms_hopper.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels import _norm_choices as choices
from gpukit.kernels._device import multiprocessors, properties
from gpukit.kernels._launch import launch, power_of_2
from gpukit.kernels._rows import as_rows, column_sums, empty
from gpukit.kernels._rows_choices import LAYER_NORM_BACKWARD, chosen


@triton.jit
def norm_bwd_kernel(
    dy_ptr, du_ptr, x_ptr, weight_ptr, stats_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    stride_dym, stride_dyn, stride_dum, stride_dun, stride_xm, stride_xn,
    M, N,
    CENTRE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, NUM_STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BLOCK_M whole rows at a time, the next ones on their way meanwhile (NUM_STAGES > 1); what they add to the gradients
    of weight and bias stays in registers until the end.

    du: the gradient that reaches u by itself, or None. dweight, dbias [programs, N], float32, or None.
    """
    tl.assume(N > BLOCK_N // 2)
    # Weight and both sums are for columns, which are the same in every row: loaded and stored once a program.
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask_n = (offs_n < N) | EVEN
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(ACC)
    if dweight_ptr is not None:
        dweight = tl.zeros([1, BLOCK_N], ACC)
    if dbias_ptr is not None:
        dbias = tl.zeros([1, BLOCK_N], ACC)

    # Rows in steps of the whole grid: programs that run at a time read neighbouring rows.
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    for start in tl.range(first, M, tl.num_programs(0) * BLOCK_M, num_stages=NUM_STAGES):
        offs_m = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_M)[:, None]
        mask_m = offs_m < M
        mask = mask_m & mask_n
        x = tl.load(x_ptr + offs_m * stride_xm + offs_n * stride_xn, mask=mask, other=0.0).to(ACC)
        dy = tl.load(dy_ptr + offs_m * stride_dym + offs_n * stride_dyn, mask=mask, other=0.0).to(ACC)
        rstd = tl.load(stats_ptr + offs_m, mask=mask_m, other=0.0)
        if CENTRE:
            x -= tl.load(stats_ptr + M + offs_m, mask=mask_m, other=0.0)
        x_hat = x * rstd  # in the padding -mean rstd, but always beside a dy of 0
        if dweight_ptr is not None:
            dweight += tl.sum(dy * x_hat, axis=0, keep_dims=True)
        if dbias_ptr is not None:
            dbias += tl.sum(dy, axis=0, keep_dims=True)
        # y = x_hat weight + bias, so this is the gradient of x_hat.
        dx_hat = dy
        if weight_ptr is not None:
            dx_hat = dy * weight
        # A change of x along x_hat, or of all of it, changes no y: that part of the gradient is taken out.
        dx = dx_hat - x_hat * (tl.sum(dx_hat * x_hat, axis=1, keep_dims=True) / N)
        if CENTRE:
            dx -= tl.sum(dx_hat, axis=1, keep_dims=True) / N
        # x_hat changes rstd times as fast as x.
        dx *= rstd
        if du_ptr is not None:
            dx += tl.load(du_ptr + offs_m * stride_dum + offs_n * stride_dun, mask=mask, other=0.0).to(ACC)
        tl.store(dx_ptr + offs_m * N + offs_n, dx, mask=mask)

    # A row of sums for each program; `column_sums` adds them in a fixed order, which atomics would not.
    offs = tl.program_id(0).to(tl.int64) * N + offs_n
    if dweight_ptr is not None:
        tl.store(dweight_ptr + offs, dweight, mask=mask_n)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + offs, dbias, mask=mask_n)


@triton.jit
def norm_bwd_long_kernel(
    dy_ptr, du_ptr, x_ptr, weight_ptr, stats_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    stride_dym, stride_dyn, stride_dum, stride_dun, stride_xm, stride_xn,
    M, N,
    CENTRE: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One row at a time, in two passes. dweight and dbias [programs, N], which start as 0, are added to in memory: each
    program has a row of its own, and the sums between two passes let no thread run ahead into the next."""
    offs = tl.arange(0, BLOCK_N)
    offs_w = tl.program_id(0).to(tl.int64) * N + offs
    for pid_m in tl.range(tl.program_id(0), M, tl.num_programs(0)):
        row = tl.cast(pid_m, tl.int64)
        rstd = tl.load(stats_ptr + row)
        mean = 0.0
        if CENTRE:
            mean = tl.load(stats_ptr + M + row)
        # First pass: how much of dx_hat lies along x_hat, and along all ones.
        dot = tl.zeros([BLOCK_N], ACC)
        total = tl.zeros([BLOCK_N], ACC)
        for start in tl.range(0, N, BLOCK_N):
            offs_n = start + offs
            mask_n = offs_n < N
            x = tl.load(x_ptr + row * stride_xm + offs_n * stride_xn, mask=mask_n, other=0.0).to(ACC)
            dx_hat = tl.load(dy_ptr + row * stride_dym + offs_n * stride_dyn, mask=mask_n, other=0.0).to(ACC)
            if weight_ptr is not None:
                dx_hat *= tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(ACC)
            dot += dx_hat * ((x - mean) * rstd)
            total += dx_hat
        along = tl.sum(dot, axis=0) / N
        shift = 0.0
        if CENTRE:
            shift = tl.sum(total, axis=0) / N
        for start in tl.range(0, N, BLOCK_N):
            offs_n = start + offs
            mask_n = offs_n < N
            x = tl.load(x_ptr + row * stride_xm + offs_n * stride_xn, mask=mask_n, other=0.0).to(ACC)
            dy = tl.load(dy_ptr + row * stride_dym + offs_n * stride_dyn, mask=mask_n, other=0.0).to(ACC)
            x_hat = (x - mean) * rstd
            dx_hat = dy
            if weight_ptr is not None:
                dx_hat = dy * tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(ACC)
            # Second pass, which reads the row again: the same formula as in `norm_bwd_kernel`.
            dx = (dx_hat - x_hat * along - shift) * rstd
            if du_ptr is not None:
                dx += tl.load(du_ptr + row * stride_dum + offs_n * stride_dun, mask=mask_n, other=0.0).to(ACC)
            tl.store(dx_ptr + row * N + offs_n, dx, mask=mask_n)
            if dweight_ptr is not None:
                sums = tl.load(dweight_ptr + offs_w + start, mask=mask_n, other=0.0)
                tl.store(dweight_ptr + offs_w + start, sums + dy * x_hat, mask=mask_n)
            if dbias_ptr is not None:
                sums = tl.load(dbias_ptr + offs_w + start, mask=mask_n, other=0.0)
                tl.store(dbias_ptr + offs_w + start, sums + dy, mask=mask_n)


@cache
def _bwd_config(N: int, dtype: torch.dtype, centre: bool, tensors: int, shared_bytes: int) -> tuple:
    """The kernel, its programs on each SM, and its block. `tensors` are read for each row.

    Only 16 warps on an SM, since each program costs a row of float32 sums for weight and bias; a LayerNorm, which waits for
    two sums one after the other, needs a second program beside the first. What keeps the memory busy are the next two rows
    of each on their way into shared memory: RMSNorm of 16,384 x 4,096 takes 110 µs with them and 125 with twice the warps
    instead; 61 and 79 for 4,096 x 8,192.
    """
    if not choices.is_resident(N, dtype, choices.RESIDENT_BWD):
        return norm_bwd_long_kernel, 1, choices.long_config(dtype)
    BLOCK_N = power_of_2(N)
    num_warps = min(max(BLOCK_N // 512, 4), 16)
    programs = max(16 // num_warps, 2 if centre and BLOCK_N <= choices.BIAS_BWD else 1)
    # Copies into shared memory are of 16 bytes. At 16,384 columns they were slower than loads into registers.
    fits = 2 * tensors * BLOCK_N * dtype.itemsize * programs <= shared_bytes - 16 * 1024
    ahead = fits and N % 16 == 0 and 4096 <= BLOCK_N <= 8192
    config = choices.resident_config(N, dtype, max(1, 4096 // BLOCK_N), num_warps)
    return norm_bwd_kernel, programs, {**config, "NUM_STAGES": 3 if ahead else 1}


def norm_bwd(
    dy: Tensor, du: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dweight, dbias. x: what was normalized, which is u if there was a residual; dx is the residual's gradient too."""
    dx = empty(x)
    if x.numel() == 0:
        return dx, *(None if w is None else torch.zeros_like(w) for w in (weight, bias))
    N, dtype, centre = x.shape[-1], x.dtype, stats.shape[0] == 2
    gpu = properties(x.device)
    shared_bytes = gpu.smem_per_sm_bytes if gpu else 0
    kernel, per_sm, config = _bwd_config(N, dtype, centre, 2 if du is None else 3, shared_bytes)
    reread = kernel is norm_bwd_long_kernel
    dy, x = as_rows(dy, copy_interleaved=reread), as_rows(x, copy_interleaved=reread)
    du = None if du is None else as_rows(du, copy_interleaved=reread)
    M = x.shape[0]
    if du is None and centre and (on_hopper := chosen("_norms_hopper", LAYER_NORM_BACKWARD, x, dy)):
        return on_hopper[0].layer_norm_gradients(dy, x, weight, bias, stats, dx, on_hopper[1])
    programs = min(-(-M // config.get("BLOCK_M", 1)), per_sm * multiprocessors(x.device))
    new = torch.zeros if reread else torch.empty
    within = bias if N <= choices.BIAS_BWD else None  # whose gradient the kernel sums
    parameters = (weight is not None) + (within is not None)
    partial = new((parameters, programs, N), dtype=stats.dtype, device=x.device)
    dweight = None if weight is None else partial[0]
    dbias = None if within is None else partial[-1]
    launch(
        kernel, programs, dy, du, x, None if weight is None else weight.contiguous(), stats, dx, dweight, dbias,
        *dy.stride(), *(x if du is None else du).stride(), *x.stride(), M, N, CENTRE=centre, **config,
    )  # fmt: skip
    if weight is not None:
        dweight, dbias = column_sums(partial, weight, within)
    elif within is not None:
        dbias, _ = column_sums(partial, within)
    if bias is not within:
        dbias, _ = column_sums(dy.contiguous()[None], bias)
    return dx, dweight, dbias
