"""Softmax over the last dimension: y = exp(x - max x) / sum(exp(x - max x)), and its gradient dx = y (dy - sum(y dy)).

Traffic for M rows of N: forward one read and one write, backward two reads and one write, the least possible. That
holds while a row stays in the registers of one program (N <= 65,536, backward 32,768). A longer row is read a second
time, from its end backwards: the part read last is still in cache, and with one program per SM the row fits the L2.

Limits: a row of -inf alone is NaN, as in torch.softmax; second derivatives are left to PyTorch's operations.
Sources: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867 (one pass for maximum and sum);
https://triton-lang.org/main/getting-started/tutorials/02-fused-softmax.html (the persistent form).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def softmax_fwd_kernel(
    x_ptr, y_ptr,
    stride_xm, stride_xn,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BLOCK_M whole rows per program, held in registers from the load to the store."""
    # int64: a row's offset passes 2^31 elements long before a GPU's memory is full.
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    # -inf in the padding lanes: exp turns it into 0, so they add nothing to the sum.
    x = tl.load(x_ptr + offs_m * stride_xm + offs_n * stride_xn, mask=mask, other=-float("inf")).to(ACC)
    numerator = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    # One division a row and a product an element: cheaper than a division an element.
    y = numerator * (1.0 / tl.sum(numerator, axis=1, keep_dims=True))
    tl.store(y_ptr + offs_m * N + offs_n, y, mask=mask)


@triton.jit
def softmax_fwd_persistent_kernel(
    x_ptr, y_ptr,
    stride_xm, stride_xn,
    M, N,
    BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs walk over the rows; num_stages - 1 rows ahead are on their way into shared memory."""
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    for pid_m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=NUM_STAGES):
        row = tl.cast(pid_m, tl.int64)
        x = tl.load(x_ptr + row * stride_xm + offs_n * stride_xn, mask=mask_n, other=-float("inf")).to(ACC)
        numerator = tl.exp(x - tl.max(x, axis=0))
        y = numerator * (1.0 / tl.sum(numerator, axis=0))
        tl.store(y_ptr + row * N + offs_n, y, mask=mask_n)


@triton.jit
def softmax_fwd_online_kernel(
    x_ptr, y_ptr,
    stride_xm, stride_xn,
    N,
    BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One row per program, longer than its registers: a pass for maximum and sum, then a pass that writes."""
    pid_m = tl.program_id(0).to(tl.int64)
    x_ptr += pid_m * stride_xm
    y_ptr += pid_m * N
    offs = tl.arange(0, BLOCK_N)

    # Every lane keeps a maximum and a sum of its own: the lanes meet once a row, not once a block. The start is finite,
    # so that -inf - m_i is never NaN; a row of -inf alone ends with l = 0 and so with NaN.
    m_i = tl.full([BLOCK_N], -3.4028234663852886e38, ACC)
    l_i = tl.zeros([BLOCK_N], ACC)
    for start in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
        offs_n = start + offs
        x = tl.load(x_ptr + offs_n * stride_xn, mask=offs_n < N, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(ACC)
        # The larger of x and m_i has weight 1, the other exp(-|x - m_i|): one exp serves both.
        smaller = tl.exp(-tl.abs(x - m_i))
        l_i = tl.where(x > m_i, l_i * smaller + 1.0, l_i + smaller)
        m_i = tl.maximum(m_i, x)
    m = tl.max(m_i, axis=0)
    scale = 1.0 / tl.sum(l_i * tl.exp(m_i - m), axis=0)

    last = (N - 1) // BLOCK_N * BLOCK_N
    for start in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
        offs_n = last - start + offs
        x = tl.load(x_ptr + offs_n * stride_xn, mask=offs_n < N, other=-float("inf"), eviction_policy="evict_first")
        tl.store(y_ptr + offs_n, tl.exp(x.to(ACC) - m) * scale, mask=offs_n < N, eviction_policy="evict_first")


@triton.jit
def softmax_bwd_kernel(
    y_ptr, dy_ptr, dx_ptr,
    stride_dym, stride_dyn,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BLOCK_M whole rows of y and dy per program, held in registers."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    y = tl.load(y_ptr + offs_m * N + offs_n, mask=mask, other=0.0).to(ACC)
    dy = tl.load(dy_ptr + offs_m * stride_dym + offs_n * stride_dyn, mask=mask, other=0.0).to(ACC)
    dx = y * (dy - tl.sum(y * dy, axis=1, keep_dims=True))
    tl.store(dx_ptr + offs_m * N + offs_n, dx, mask=mask)


@triton.jit
def softmax_bwd_online_kernel(
    y_ptr, dy_ptr, dx_ptr,
    stride_dym, stride_dyn,
    N,
    BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One row per program, longer than its registers: a pass for sum(y dy), then a pass that writes."""
    pid_m = tl.program_id(0).to(tl.int64)
    y_ptr += pid_m * N
    dy_ptr += pid_m * stride_dym
    dx_ptr += pid_m * N
    offs = tl.arange(0, BLOCK_N)

    dot_i = tl.zeros([BLOCK_N], ACC)
    for start in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
        offs_n = start + offs
        mask_n = offs_n < N
        y = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0, eviction_policy="evict_last").to(ACC)
        dy = tl.load(dy_ptr + offs_n * stride_dyn, mask=mask_n, other=0.0, eviction_policy="evict_last").to(ACC)
        dot_i += y * dy
    dot = tl.sum(dot_i, axis=0)

    last = (N - 1) // BLOCK_N * BLOCK_N
    for start in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
        offs_n = last - start + offs
        mask_n = offs_n < N
        y = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0, eviction_policy="evict_first").to(ACC)
        dy = tl.load(dy_ptr + offs_n * stride_dyn, mask=mask_n, other=0.0, eviction_policy="evict_first").to(ACC)
        tl.store(dx_ptr + offs_n, y * (dy - dot), mask=mask_n, eviction_policy="evict_first")


# An SM has 65,536 registers of 32 bits: one fp32 row of that length fills them (a few spill), or two of half of it.
RESIDENT_FWD = 65536
RESIDENT_BWD = 32768
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _is_resident(N: int, dtype: torch.dtype, limit: int) -> bool:
    return N <= (limit // 2 if dtype == torch.float64 else limit)


def _acc(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


@cache
def _resident_config(N: int) -> dict:
    """Rows that fit in registers: about 4,096 elements a program, so that shorter rows share one."""
    BLOCK_N = triton.next_power_of_2(N)
    return {"BLOCK_M": max(1, 4096 // BLOCK_N), "BLOCK_N": BLOCK_N, "num_warps": min(max(BLOCK_N // 1024, 4), 16)}


def _online_config(itemsize: int) -> dict:
    """Longer rows. 32 warps are half of the threads of an SM, so that few rows are under way at a time: one per SM, of
    131,072 halves, are 35 MB, which an H200's L2 (60 MB) keeps for the second pass. Three blocks of 16 KiB on their way
    keep the memory busy; for two tensors (the backward) they are 96 KiB, all the shared memory of smaller GPUs."""
    return {"BLOCK_N": 16384 // itemsize, "NUM_STAGES": 4, "num_warps": 32}


def _rows(x: Tensor) -> Tensor:
    """x [..., N] as [M, N]: a view where the strides allow it, else a copy.

    Interleaved rows (a transposed matrix) are copied too, since a program would fetch a 32-byte sector for each
    element, up to 16 times the bytes; so are rows that span 2^31 elements, because offsets within a row are int32."""
    x = x.reshape(-1, x.shape[-1])
    stride_m, stride_n = x.stride()
    if 0 < stride_m < stride_n or x.shape[1] * stride_n >= 2**31:
        return x.contiguous()
    return x


def softmax_fwd(x: Tensor) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    x = _rows(x)
    M, N = x.shape
    acc = _acc(x.dtype)
    with torch.cuda.device_of(x):
        if _is_resident(N, x.dtype, RESIDENT_FWD):
            config = _resident_config(N)
            grid = (-(-M // config["BLOCK_M"]),)  # rounds up; triton.cdiv costs the CPU 2 us
            softmax_fwd_kernel[grid](x, y, *x.stride(), M, N, ACC=acc, **config)
        else:
            softmax_fwd_online_kernel[(M,)](x, y, *x.stride(), N, ACC=acc, **_online_config(x.itemsize))
    return y


def softmax_fwd_persistent(x: Tensor, num_programs: int, num_stages: int = 2) -> Tensor:
    """The persistent form for x [M, N], N <= 65536: beside `softmax` to be read and measured, not used by it."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    M, N = x.shape
    config = _resident_config(N)
    softmax_fwd_persistent_kernel[(min(num_programs, M),)](
        x, y, *x.stride(), M, N,
        BLOCK_N=config["BLOCK_N"], NUM_STAGES=num_stages, ACC=_acc(x.dtype), num_warps=config["num_warps"],
    )  # fmt: skip
    return y


def softmax_bwd(y: Tensor, dy: Tensor) -> Tensor:
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return dx
    y, dy = y.contiguous(), _rows(dy)
    M, N = dy.shape
    acc = _acc(y.dtype)
    with torch.cuda.device_of(y):
        if _is_resident(N, y.dtype, RESIDENT_BWD):
            config = _resident_config(N)
            grid = (-(-M // config["BLOCK_M"]),)
            softmax_bwd_kernel[grid](y, dy, dx, *dy.stride(), M, N, ACC=acc, **config)
        else:
            softmax_bwd_online_kernel[(M,)](y, dy, dx, *dy.stride(), N, ACC=acc, **_online_config(y.itemsize))
    return dx


class SoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = softmax_fwd(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: a second derivative needs operations that PyTorch can follow
            return y * (dy - (y * dy).sum(-1, keepdim=True))
        return softmax_bwd(y, dy)


# What torch.compile sees: operators that it does not look into, so that any shape works and no graph breaks. Outside it
# the Function is called, which costs the CPU 4 to 5 us a call; a custom operator costs 9, and 17 with a gradient.
softmax_op = torch.library.custom_op("gpukit::softmax", softmax_fwd, mutates_args=())
softmax_bwd_op = torch.library.custom_op("gpukit::softmax_bwd", softmax_bwd, mutates_args=())
softmax_op.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
softmax_bwd_op.register_fake(lambda y, dy: torch.empty_like(y, memory_format=torch.contiguous_format))
softmax_op.register_autograd(
    lambda ctx, dy: softmax_bwd_op(*ctx.saved_tensors, dy),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)

_INTERPRETED = not isinstance(softmax_fwd_kernel, triton.JITFunction)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension.

    x [..., N], float16, bfloat16, float32 or float64, any strides, any N; computed in float32 (float64 for float64).
    Returns y, contiguous, in x's shape and dtype. Raises TypeError for another dtype, ValueError for a tensor without
    dimensions or on a device that Triton cannot use.
    """
    if x.dtype not in _DTYPES:
        raise TypeError(f"softmax: x must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError("softmax: x must have at least one dimension, got a scalar of shape []")
    if not (x.is_cuda or _INTERPRETED):
        raise ValueError(
            f"softmax: x is on {x.device}; Triton needs a CUDA tensor here, or TRITON_INTERPRET=1 before Python starts"
        )
    return softmax_op(x) if torch.compiler.is_compiling() else SoftmaxFunction.apply(x)
