"""Softmax and log-softmax over the last dimension, and their gradients:

    softmax        y = exp(x - max x) / sum(exp(x - max x))          dx = y (dy - sum(y dy))
    log_softmax    y = x - max x - log(sum(exp(x - max x)))          dx = dy - exp(y) sum(dy)

One family of kernels computes both; LOG says which.

Traffic for M rows of N: forward one read and one write, backward two reads and one write, the least possible. That
holds while a row stays in the registers of one program (N <= 32,768). A longer row is read a second time, from its end
backwards: the part read last is still in a cache. Times in comments are of an H200, bf16, 4,096 rows unless said.

Limits: a row of -inf alone is NaN, as in torch.softmax; second derivatives are left to PyTorch's operations.
Sources: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867 (one pass for maximum and sum);
https://triton-lang.org/main/getting-started/tutorials/02-fused-softmax.html (the persistent form).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._rows import acc_dtype, as_rows, check, empty, properties


@triton.jit
def _exp(x):
    """e^x as 2^(x log2 e), which is one instruction after the product. tl.exp needs three more, for results below
    2^-126, which are 0 here: a fifth of all instructions of a row."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def softmax_fwd_kernel(
    x_ptr, y_ptr,
    stride_xm, stride_xn,
    M, N,
    LOG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BLOCK_M whole rows per program, held in registers from the load to the store. EVEN: N is BLOCK_N."""
    # What the launcher knows, and the compiler then need not test: the first row, and half of each row, are inside.
    # For 781 columns that is 32 instead of 46 registers a thread, hence 64 instead of 42 warps on an SM.
    tl.assume(tl.program_id(0) * BLOCK_M < M)
    tl.assume(N > BLOCK_N // 2)
    # int64: a row's offset passes 2^31 elements long before a GPU's memory is full.
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & ((offs_n < N) | EVEN)
    # Nobody reads x again. Told so, the L2 gives short rows 8.3 us instead of 8.9; long rows are no faster, or slower.
    EVICT: tl.constexpr = "evict_first" if BLOCK_N <= 1024 else ""
    # -inf in the padding lanes: exp turns it into 0, so they add nothing to the sum.
    x = tl.load(
        x_ptr + offs_m * stride_xm + offs_n * stride_xn, mask=mask, other=-float("inf"), eviction_policy=EVICT
    ).to(ACC)
    x -= tl.max(x, axis=1, keep_dims=True)
    numerator = _exp(x)
    total = tl.sum(numerator, axis=1, keep_dims=True)
    # One division a row and a product an element: cheaper than a division an element.
    y = x - tl.log(total) if LOG else numerator * (1.0 / total)
    tl.store(y_ptr + offs_m * N + offs_n, y, mask=mask)


@triton.jit
def softmax_fwd_persistent_kernel(
    x_ptr, y_ptr,
    stride_xm, stride_xn,
    M, N,
    LOG: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, NUM_STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A fixed number of programs walk over the rows; NUM_STAGES - 1 rows ahead are on their way into shared memory."""
    tl.assume(N > BLOCK_N // 2)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = (offs_n < N) | EVEN
    for pid_m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=NUM_STAGES):
        row = tl.cast(pid_m, tl.int64)
        x = tl.load(x_ptr + row * stride_xm + offs_n * stride_xn, mask=mask_n, other=-float("inf")).to(ACC)
        x -= tl.max(x, axis=0)
        numerator = _exp(x)
        total = tl.sum(numerator, axis=0)
        y = x - tl.log(total) if LOG else numerator * (1.0 / total)
        tl.store(y_ptr + row * N + offs_n, y, mask=mask_n)


@triton.jit
def softmax_fwd_online_kernel(
    x_ptr, y_ptr,
    stride_xm, stride_xn,
    N,
    LOG: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, ACC: tl.constexpr,
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
        smaller = _exp(-tl.abs(x - m_i))
        l_i = tl.where(x > m_i, l_i * smaller + 1.0, l_i + smaller)
        m_i = tl.maximum(m_i, x)
    m = tl.max(m_i, axis=0)
    total = tl.sum(l_i * _exp(m_i - m), axis=0)
    scale = tl.log(total) if LOG else 1.0 / total

    last = (N - 1) // BLOCK_N * BLOCK_N
    for start in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
        offs_n = last - start + offs
        x = tl.load(x_ptr + offs_n * stride_xn, mask=offs_n < N, other=-float("inf"), eviction_policy="evict_first")
        x = x.to(ACC) - m
        y = x - scale if LOG else _exp(x) * scale
        tl.store(y_ptr + offs_n, y, mask=offs_n < N, eviction_policy="evict_first")


@triton.jit
def softmax_bwd_kernel(
    y_ptr, dy_ptr, dx_ptr,
    stride_dym, stride_dyn,
    M, N,
    LOG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """BLOCK_M whole rows of y and dy per program, held in registers."""
    tl.assume(tl.program_id(0) * BLOCK_M < M)
    tl.assume(N > BLOCK_N // 2)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & ((offs_n < N) | EVEN)
    y = tl.load(y_ptr + offs_m * N + offs_n, mask=mask, other=0.0).to(ACC)
    dy = tl.load(dy_ptr + offs_m * stride_dym + offs_n * stride_dyn, mask=mask, other=0.0).to(ACC)
    if LOG:
        dx = dy - _exp(y) * tl.sum(dy, axis=1, keep_dims=True)
    else:
        dx = y * (dy - tl.sum(y * dy, axis=1, keep_dims=True))
    tl.store(dx_ptr + offs_m * N + offs_n, dx, mask=mask)


@triton.jit
def softmax_bwd_online_kernel(
    y_ptr, dy_ptr, dx_ptr,
    stride_dym, stride_dyn,
    N,
    LOG: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One row per program, longer than its registers: a pass for sum(y dy) or sum(dy), then a pass that writes."""
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
        dot_i += dy if LOG else y * dy
    dot = tl.sum(dot_i, axis=0)

    last = (N - 1) // BLOCK_N * BLOCK_N
    for start in tl.range(0, N, BLOCK_N, num_stages=NUM_STAGES):
        offs_n = last - start + offs
        mask_n = offs_n < N
        y = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0, eviction_policy="evict_first").to(ACC)
        dy = tl.load(dy_ptr + offs_n * stride_dyn, mask=mask_n, other=0.0, eviction_policy="evict_first").to(ACC)
        dx = dy - _exp(y) * dot if LOG else y * (dy - dot)
        tl.store(dx_ptr + offs_n, dx, mask=mask_n, eviction_policy="evict_first")


# One row a program up to here: at 65,536 a thread would have to hold more than its registers (365 us, 333 in two
# passes; backward 1,170 and 480). A float64 takes two registers.
RESIDENT = 32768
# Rows that fill an SM alone, longer than these, leave the memory idle while they compute: 172 us for 32,768 columns.
# With the next rows on their way meanwhile, in the persistent form, it is 144. Two rows of 64 KiB need shared memory.
ALONE = 16384
PERSISTENT_SHARED_BYTES = 130 * 1024


def _is_resident(N: int, dtype: torch.dtype) -> bool:
    return N <= (RESIDENT // 2 if dtype == torch.float64 else RESIDENT)


@cache
def _resident_config(N: int, dtype: torch.dtype) -> dict:
    """Rows that fit in registers."""
    BLOCK_N = triton.next_power_of_2(N)
    BLOCK_M = max(1, 1024 // BLOCK_N)  # shorter rows share a program, which is at least one busy warp
    even = N == BLOCK_N
    if even:
        # 128 bytes a thread, eight loads of 16: 71 us for 16,384 columns, 73 with half of that.
        num_warps = BLOCK_M * BLOCK_N * dtype.itemsize // (32 * 128)
    else:
        # 16 elements a thread, since loads may be of one element: 13.4 us for 8192 x 781, 14.4 with 32 elements.
        num_warps = BLOCK_M * BLOCK_N // (32 * 16)
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "EVEN": even,
        "ACC": acc_dtype(dtype),
        "num_warps": min(max(num_warps, 1), 32),
    }


def _persistent_programs(device: torch.device) -> int:
    """One program per SM, or 0 where two rows do not fit into its shared memory (and in the interpreter)."""
    gpu = properties(device)
    return gpu.multi_processor_count if gpu and gpu.shared_memory_per_multiprocessor >= PERSISTENT_SHARED_BYTES else 0


def _online_fwd_config(dtype: torch.dtype) -> dict:
    """32 warps, so that few rows are under way at a time, two per SM: those of 65,536 columns are 35 MB, which an
    H200's L2 (60 MB) keeps for the second pass. Two programs overlap by themselves: with blocks loaded ahead it is
    454 us instead of 333. In fp32 loading ahead helps: 711 us, and 732 with none ahead but twice the block."""
    return {
        "BLOCK_N": min(8192, 32768 // dtype.itemsize),
        "NUM_STAGES": 1 if dtype.itemsize == 2 else 3,
        "ACC": acc_dtype(dtype),
        "num_warps": 32,
    }


def _online_bwd_config(dtype: torch.dtype) -> dict:
    """Three blocks of 16 KiB of each tensor on their way: 479 us for 65,536 columns, 502 without. They are 96 KiB, all
    the shared memory of smaller GPUs."""
    return {"BLOCK_N": 16384 // dtype.itemsize, "NUM_STAGES": 4, "ACC": acc_dtype(dtype), "num_warps": 32}


def softmax_fwd(x: Tensor, log: bool = False) -> Tensor:
    y = empty(x)
    if x.numel() == 0:
        return y
    N, dtype = x.shape[-1], x.dtype
    resident = _is_resident(N, dtype)
    # Interleaved rows that are read once are faster without a copy (4096 x 4096: 119 us, 132 with it).
    x = as_rows(x, copy_interleaved=not resident)
    M = x.shape[0]
    with torch.cuda.device_of(x):
        if not resident:
            softmax_fwd_online_kernel[(M,)](x, y, *x.stride(), N, LOG=log, **_online_fwd_config(dtype))
            return y
        config = _resident_config(N, dtype)
        if N > ALONE and dtype.itemsize == 2 and (programs := _persistent_programs(x.device)):
            config = {name: value for name, value in config.items() if name != "BLOCK_M"}
            grid = (min(programs, M),)
            softmax_fwd_persistent_kernel[grid](x, y, *x.stride(), M, N, LOG=log, NUM_STAGES=3, **config)
        else:
            grid = (-(-M // config["BLOCK_M"]),)  # rounds up; triton.cdiv costs the CPU 2 us
            softmax_fwd_kernel[grid](x, y, *x.stride(), M, N, LOG=log, **config)
    return y


def softmax_bwd(y: Tensor, dy: Tensor, log: bool = False) -> Tensor:
    dx = empty(y)
    if y.numel() == 0:
        return dx
    N, dtype = y.shape[-1], y.dtype
    resident = _is_resident(N, dtype)
    y, dy = y.contiguous(), as_rows(dy, copy_interleaved=not resident)
    M = dy.shape[0]
    with torch.cuda.device_of(y):
        if resident:
            config = _resident_config(N, dtype)
            grid = (-(-M // config["BLOCK_M"]),)
            softmax_bwd_kernel[grid](y, dy, dx, *dy.stride(), M, N, LOG=log, **config)
        else:
            softmax_bwd_online_kernel[(M,)](y, dy, dx, *dy.stride(), N, LOG=log, **_online_bwd_config(dtype))
    return dx


class SoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, log: bool) -> Tensor:
        y = softmax_fwd(x, log)
        ctx.save_for_backward(y)
        ctx.log = log
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: a second derivative needs operations that PyTorch can follow
            if ctx.log:
                return dy - y.exp() * dy.sum(-1, keepdim=True), None
            return y * (dy - (y * dy).sum(-1, keepdim=True)), None
        return softmax_bwd(y, dy, ctx.log), None


# What torch.compile sees: operators that it does not look into, so that any shape works and no graph breaks. Outside it
# the Function is called, which costs the CPU 4 to 5 us a call; a custom operator costs 9, and 17 with a gradient.
softmax_op = torch.library.custom_op("gpukit::softmax", softmax_fwd, mutates_args=())
softmax_bwd_op = torch.library.custom_op("gpukit::softmax_bwd", softmax_bwd, mutates_args=())
softmax_op.register_fake(lambda x, log=False: empty(x))
softmax_bwd_op.register_fake(lambda y, dy, log=False: empty(y))


def _save(ctx, inputs, output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.log = inputs[1]


softmax_op.register_autograd(
    lambda ctx, dy: (softmax_bwd_op(*ctx.saved_tensors, dy, ctx.log), None), setup_context=_save
)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension.

    x [..., N], float16, bfloat16, float32 or float64, any strides, any N; computed in float32 (float64 for float64).
    Returns y, contiguous, in x's shape and dtype. Raises TypeError for another dtype, ValueError for a tensor without
    dimensions or on a device that Triton cannot use.
    """
    check("softmax", x=x)
    return softmax_op(x, False) if torch.compiler.is_compiling() else SoftmaxFunction.apply(x, False)


def log_softmax(x: Tensor) -> Tensor:
    """The logarithm of softmax over the last dimension, which stays finite where softmax(x) rounds to 0.

    x, y and the errors as in `softmax`.
    """
    check("log_softmax", x=x)
    return softmax_op(x, True) if torch.compiler.is_compiling() else SoftmaxFunction.apply(x, True)
