"""Softmax and log-softmax over the last dimension, or another, and their gradients:

The same kernels, to be read first: `softmax_fused`, `softmax_online`, `softmax_persistent` and `softmax_backward` in
solutions/softmax.py.

    softmax        y = exp(x - max x) / sum(exp(x - max x))          dx = y (dy - sum(y dy))
    log_softmax    y = x - max x - log(sum(exp(x - max x)))          dx = dy - exp(y) sum(dy)

One family of kernels computes both; LOG says which.

Traffic for M rows of N: forward one read and one write, backward two reads and one write, the least possible. That
holds while a row stays in the registers of one program (N <= 32,768). A longer row is read a second time, from its end
backwards: the part read last is still in a cache. On Hopper most of these rows are read once, too: in
gpukit.kernels._rows_shared several programs share a row. Times in comments are
of an H200, bf16, 4,096 rows unless said.

Limits: a row of -inf alone is NaN, as in torch.softmax; second derivatives are left to PyTorch's operations.
Sources: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867 (one pass for maximum and sum);
https://triton-lang.org/main/getting-started/tutorials/02-fused-softmax.html (the persistent form).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check, check_dim, check_tensors
from gpukit.kernels._autograd import differentiable, operator
from gpukit.kernels._device import properties
from gpukit.kernels._dtypes import DTYPES, acc_dtype
from gpukit.kernels._launch import launch, power_of_2
from gpukit.kernels._rows import as_rows, empty
from gpukit.kernels._rows_choices import shared


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
    # BLOCK_N is the power of two at or above N.
    tl.assume(N > BLOCK_N // 2)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = (offs_n < N) | EVEN
    # Row after row in steps of the grid. The loads of the next rows depend on nothing computed here, so Triton can begin
    # them before this row is done.
    for pid_m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=NUM_STAGES):
        row = tl.cast(pid_m, tl.int64)
        x = tl.load(x_ptr + row * stride_xm + offs_n * stride_xn, mask=mask_n, other=-float("inf")).to(ACC)
        x -= tl.max(x, axis=0)
        numerator = _exp(x)
        total = tl.sum(numerator, axis=0)
        y = x - tl.log(total) if LOG else numerator * (1.0 / total)
        tl.store(y_ptr + row * N + offs_n, y, mask=mask_n)


@triton.jit
def softmax_fwd_pieces_kernel(
    x_ptr, y_ptr,
    stride_xm, stride_xn,
    N,
    LOG: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A row per program in three pieces of which only the last has padding, A + B < N <= A + B + C."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    # A block's size is a power of two, but a sum of three need not be.
    offs_a, offs_b, offs_c = tl.arange(0, A), A + tl.arange(0, B), A + B + tl.arange(0, C)
    a = tl.load(x_ptr + offs_a * stride_xn).to(ACC)
    b = tl.load(x_ptr + offs_b * stride_xn).to(ACC)
    c = tl.load(x_ptr + offs_c * stride_xn, mask=offs_c < N, other=-float("inf")).to(ACC)
    # One maximum for all three: numerators under different ones could not be added.
    maximum = tl.maximum(tl.maximum(tl.max(a, axis=0), tl.max(b, axis=0)), tl.max(c, axis=0))
    a, b, c = a - maximum, b - maximum, c - maximum
    exp_a, exp_b, exp_c = _exp(a), _exp(b), _exp(c)
    total = tl.sum(exp_a, axis=0) + tl.sum(exp_b, axis=0) + tl.sum(exp_c, axis=0)
    scale = tl.log(total) if LOG else 1.0 / total
    y_ptr += row * N
    tl.store(y_ptr + offs_a, a - scale if LOG else exp_a * scale)
    tl.store(y_ptr + offs_b, b - scale if LOG else exp_b * scale)
    tl.store(y_ptr + offs_c, c - scale if LOG else exp_c * scale, mask=offs_c < N)


@triton.jit
def softmax_fwd_online_kernel(
    x_ptr, y_ptr,
    stride_xm, stride_xn,
    N,
    LOG: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One row per program, longer than its registers: a pass for maximum and sum, then a pass that writes."""
    pid_m = tl.program_id(0).to(tl.int64)
    x_ptr += pid_m * stride_xm
    y_ptr += pid_m * N
    offs = tl.arange(0, BLOCK_N)

    # The start is finite, so that -inf - m_i is never NaN; a row of -inf alone ends with l_i = 0 and so with NaN.
    m_i = tl.cast(-3.4028234663852886e38, ACC)
    l_i = tl.cast(0.0, ACC)
    for start in tl.range(0, N, BLOCK_N):
        offs_n = start + offs
        x = tl.load(x_ptr + offs_n * stride_xn, mask=offs_n < N, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(ACC)
        m_new = tl.maximum(m_i, tl.max(x, axis=0))
        # What was summed under the old maximum shrinks to what it is under the new one.
        l_i = l_i * _exp(m_i - m_new) + tl.sum(_exp(x - m_new), axis=0)
        m_i = m_new
    scale = tl.log(l_i) if LOG else 1.0 / l_i

    # From the end backwards: the blocks read last are those still in a cache.
    last = (N - 1) // BLOCK_N * BLOCK_N
    for start in tl.range(0, N, BLOCK_N):
        offs_n = last - start + offs
        x = tl.load(x_ptr + offs_n * stride_xn, mask=offs_n < N, other=-float("inf"), eviction_policy="evict_first")
        x = x.to(ACC) - m_i
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
    # Of log-softmax y is the logarithm, and the derivative needs the softmax: e^y.
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
    LOG: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One row per program, longer than its registers: a pass for sum(y dy) or sum(dy), then a pass that writes."""
    pid_m = tl.program_id(0).to(tl.int64)
    y_ptr += pid_m * N
    dy_ptr += pid_m * stride_dym
    dx_ptr += pid_m * N
    offs = tl.arange(0, BLOCK_N)

    # A sum for each lane, joined once after the loop: a reduction in each step would make all warps wait.
    dot_i = tl.zeros([BLOCK_N], ACC)
    for start in tl.range(0, N, BLOCK_N):
        offs_n = start + offs
        mask_n = offs_n < N
        y = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0, eviction_policy="evict_last").to(ACC)
        dy = tl.load(dy_ptr + offs_n * stride_dyn, mask=mask_n, other=0.0, eviction_policy="evict_last").to(ACC)
        dot_i += dy if LOG else y * dy
    dot = tl.sum(dot_i, axis=0)

    last = (N - 1) // BLOCK_N * BLOCK_N
    for start in tl.range(0, N, BLOCK_N):
        offs_n = last - start + offs
        mask_n = offs_n < N
        y = tl.load(y_ptr + offs_n, mask=mask_n, other=0.0, eviction_policy="evict_first").to(ACC)
        dy = tl.load(dy_ptr + offs_n * stride_dyn, mask=mask_n, other=0.0, eviction_policy="evict_first").to(ACC)
        dx = dy - _exp(y) * dot if LOG else y * (dy - dot)
        tl.store(dx_ptr + offs_n, dx, mask=mask_n, eviction_policy="evict_first")


# One row a program up to here: at 65,536 a thread would have to hold more than its registers (365 us, 298 in two
# passes; backward 1,170 and 479). A float64 takes two registers.
RESIDENT = 32768
# Rows that fill an SM alone, longer than these, leave the memory idle while they compute: 164 us for 32,768 columns.
# With the next rows on their way meanwhile, in the persistent form, it is 146. Two rows of 64 KiB need shared memory,
# and copies into it are of 16 bytes: 32,001 columns take 271 us that way and 240 in the plain form.
ALONE = 16384
PERSISTENT_SHARED_BYTES = 130 * 1024


def _is_resident(N: int, dtype: torch.dtype) -> bool:
    return N <= (RESIDENT // 2 if dtype == torch.float64 else RESIDENT)


@cache
def _resident_config(N: int, dtype: torch.dtype) -> dict:
    """Rows that fit in registers."""
    BLOCK_N = power_of_2(N)
    BLOCK_M = max(1, 1024 // BLOCK_N)  # shorter rows share a program, which is at least one busy warp
    # 128 bytes a thread, eight loads of 16: 54 us for 12,288 columns, 63 with a quarter of that in each thread.
    num_warps = BLOCK_M * BLOCK_N * dtype.itemsize // (32 * 128)
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "EVEN": N == BLOCK_N,
        "ACC": acc_dtype(dtype),
        "num_warps": min(max(num_warps, 1), 32),
    }


@cache
def _pieces_config(N: int, dtype: torch.dtype) -> dict | None:
    """Rows whose loads are of single elements, so that idle lanes cost as much as others: 781 as 512 + 256 + 16 lanes is
    9.7 µs in a CUDA graph, as 1024 it is 10.1. None where pieces save less than a tenth, or where they were no faster:
    longer rows, which have more warps."""
    if N % 16 == 0 or not 512 < N < 1024:
        return None
    A = 512
    B = power_of_2(N - A) // 2
    if B < 16:
        return None
    C = power_of_2(max(N - A - B, 16))
    return {"A": A, "B": B, "C": C, "ACC": acc_dtype(dtype), "num_warps": 1} if A + B + C < 922 else None


def _persistent_programs(device: torch.device) -> int:
    """One program per SM, or 0 where two rows do not fit into its shared memory (and in the interpreter)."""
    gpu = properties(device)
    return gpu.sms if gpu and gpu.smem_per_sm_bytes >= PERSISTENT_SHARED_BYTES else 0


@cache
def _online_fwd_config(N: int, dtype: torch.dtype) -> dict:
    """Few rows under way at a time, so that the L2 keeps them for the second pass: at 65,536 columns, two programs on an
    SM, they are 35 MB of an H200's 60. A block is as large as registers allow, since the lanes meet once a block."""
    if N % 16:  # loads of single elements: 389 us for 50,257 columns with 4,096 at a time, 505 with 16,384
        BLOCK_N = 4096
    elif N <= 65536:
        BLOCK_N = 16384  # 298 us for 65,536 columns, 342 with twice as many
    else:
        BLOCK_N = 32768  # one program on an SM, or the rows leave the L2: 660 us for 131,072 columns, 668 with two
    if dtype == torch.float64:
        BLOCK_N = min(BLOCK_N, 8192)
    return {"BLOCK_N": BLOCK_N, "ACC": acc_dtype(dtype), "num_warps": 16 if BLOCK_N <= 16384 else 32}


@cache
def _online_bwd_config(N: int, dtype: torch.dtype) -> dict:
    """As forward: 479 µs for 65,536 columns, 505 with half of the block; 1,012 for 131,072, and 1,074. For 50,257 columns
    it is 492, and 548 with twice the block."""
    BLOCK_N = 8192 if N % 16 or dtype == torch.float64 else 16384 if N <= 65536 else 32768
    return {"BLOCK_N": BLOCK_N, "ACC": acc_dtype(dtype), "num_warps": 32}


def softmax_fwd(x: Tensor, log: bool = False) -> Tensor:
    y = empty(x)
    if x.numel() == 0:
        return y
    N, dtype = x.shape[-1], x.dtype
    resident = _is_resident(N, dtype)
    # Interleaved rows that are read once are faster without a copy (4096 x 4096: 119 us, 132 with it).
    x = as_rows(x, copy_interleaved=not resident)
    M, strides = x.shape[0], x.stride()
    if not resident and (on_hopper := shared("forward", x)):
        on_hopper.softmax_parts(x, y, log)
        return y
    if not resident:
        launch(softmax_fwd_online_kernel, M, x, y, *strides, N, LOG=log, **_online_fwd_config(N, dtype))
        return y
    if pieces := _pieces_config(N, dtype):
        launch(softmax_fwd_pieces_kernel, M, x, y, *strides, N, LOG=log, **pieces)
        return y
    config = _resident_config(N, dtype)
    if N > ALONE and N % 16 == 0 and dtype.itemsize == 2 and (programs := _persistent_programs(x.device)):
        config = {name: value for name, value in config.items() if name != "BLOCK_M"}
        kernel, programs = softmax_fwd_persistent_kernel, min(programs, M)
        launch(kernel, programs, x, y, *strides, M, N, LOG=log, NUM_STAGES=3, **config)
        return y
    programs = -(-M // config["BLOCK_M"])  # rounds up; triton.cdiv costs the CPU 2 us
    launch(softmax_fwd_kernel, programs, x, y, *strides, M, N, LOG=log, **config)
    return y


def softmax_bwd(y: Tensor, dy: Tensor, log: bool = False) -> Tensor:
    dx = empty(y)
    if y.numel() == 0:
        return dx
    N, dtype = y.shape[-1], y.dtype
    resident = _is_resident(N, dtype)
    y, dy = as_rows(y.contiguous()), as_rows(dy, copy_interleaved=not resident)
    M, strides = dy.shape[0], dy.stride()
    if resident:
        config = _resident_config(N, dtype)
        programs = -(-M // config["BLOCK_M"])
        launch(softmax_bwd_kernel, programs, y, dy, dx, *strides, M, N, LOG=log, **config)
    elif on_hopper := shared("log_softmax" if log else "softmax", y, dy):
        on_hopper.softmax_gradients(y, dy, dx, log)
    else:
        config = _online_bwd_config(N, dtype)
        launch(softmax_bwd_online_kernel, M, y, dy, dx, *strides, N, LOG=log, **config)
    return dx


def _second(ctx, dy: Tensor) -> Tensor:
    """dx in operations that PyTorch can follow."""
    (y,), (log,) = ctx.saved_tensors, ctx.settings
    return dy - y.exp() * dy.sum(-1, keepdim=True) if log else y * (dy - (y * dy).sum(-1, keepdim=True))


_softmax = differentiable(
    operator("softmax", softmax_fwd, like=lambda x, log=False: empty(x)),
    operator("softmax_bwd", softmax_bwd, like=lambda y, dy, log=False: empty(y)),
    keep=lambda inputs, y: ((y,), inputs[1:]),
    gradients=lambda backward, ctx, dy: backward(*ctx.saved_tensors, dy, *ctx.settings),
    again=_second,
)


def _over(op: str, x: Tensor, dim: int, dtype: torch.dtype | None, log: bool) -> Tensor:
    """The kernels take rows: another dimension is moved to the end and back."""
    if dtype is not None:
        if dtype not in DTYPES:
            raise TypeError(f"{op}: dtype must be float16, bfloat16, float32, float64 or None, got {dtype!r}")
        check_tensors(op, x=x)
        x = x.to(dtype)
    check(op, scalars=True, x=x)
    dim = check_dim(op, "x", dim, x)
    if dim >= x.ndim - 1:
        return _softmax(x, log) if x.ndim else _softmax(x.view(1), log).view(())
    return _softmax(x.movedim(dim, -1), log).movedim(-1, dim).contiguous()


def softmax(x: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax over the dimension `dim`.

    x [..., N], float16, bfloat16, float32 or float64, any strides, any N; a scalar is a row of one. Computed in float32
    (float64 for float64). dim: the last, or any other, which costs a copy of the result. dtype: what x is converted to
    first, as in torch.softmax.
    Returns y, contiguous, in x's shape and dtype. Raises TypeError for another dtype, ValueError for a dim that x does not
    have or a tensor on a device that Triton cannot use.
    """
    return _over("softmax", x, dim, dtype, False)


def log_softmax(x: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    """The logarithm of softmax, which stays finite where softmax(x) rounds to 0.

    x, dim, dtype, y and the errors as in `softmax`.
    """
    return _over("log_softmax", x, dim, dtype, True)
