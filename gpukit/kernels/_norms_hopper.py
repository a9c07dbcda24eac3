"""The gradients of a LayerNorm of long rows on Hopper, in Gluon: each number is read once and written once
(gpukit.kernels._norm_backward chooses it and says what is computed; gpukit.kernels._hopper says how such a kernel is built).

A program per SM walks over rows. One warp fetches them, a row of x and one of dy at a time, into a ring of slots in shared memory,
and the next row comes while the other warps compute. The weight is read once by each program and stays in registers, and so do the
sums of its gradient and of the bias's: with 16,384 columns these take half of all registers of an SM. The numbers of a row are
therefore taken from shared memory a second time, when the threads have met for the row's two sums, instead of being kept.

A row in a slot is [parts, lanes, numbers]. A lane is a thread, which reads 16 bytes of each part. A thread can sum its own numbers,
and the threads meet once for each sum.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpukit.kernels._device import multiprocessors
from gpukit.kernels._hopper import barriers, blocks_like, fetch, next_slot
from gpukit.kernels._launch import checked_once, launch
from gpukit.kernels._rows import column_sums
from gpukit.kernels._rows_choices import RowsConfig


@gluon.jit
def _fetch_rows(descs, smems, ready, free, M, STAGES: gl.constexpr):
    """What one warp does: this program's rows of two tensors, one after the other, as soon as a slot is free."""
    slot, phase = gl.to_tensor(0), gl.to_tensor(1)
    for row in range(gl.program_id(0), M, gl.num_programs(0)):
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(ready.index(slot), 2 * descs[0].block_type.nbytes)
        for t in gl.static_range(2):
            fetch(descs[t], [row, 0, 0], ready.index(slot), smems[t].index(slot))
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.constexpr_function
def _spread(width, warps):
    """Which thread has what of a row."""
    return gl.BlockedLayout([1, 1, width], [1, 32, 1], [1, warps, 1], [2, 1, 0])


@gluon.jit
def _row_in(smem, slot):
    """The row in a slot, [parts, lanes, numbers], in the order of memory; what lies beyond the row's end is 0."""
    WIDTH: gl.constexpr = 128 // smem.dtype.primitive_bitwidth
    LANES: gl.constexpr = 32 * gl.num_warps()
    PARTS: gl.constexpr = smem.shape[2] * smem.shape[3] // (LANES * WIDTH)
    return smem.index(slot).reshape([PARTS, LANES, WIDTH]).load(_spread(WIDTH, gl.num_warps()))


@gluon.jit
def _columns(x):
    """Which columns the numbers of a row x are."""
    LAYOUT: gl.constexpr = x.type.layout
    part = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    lane = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    number = gl.arange(0, x.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return (part * x.shape[1] + lane) * x.shape[2] + number


@gluon.jit
def _as_it_is(x):
    """x. Behind an instruction that it does not know, the compiler keeps numbers of 16 bits, and not those in float32 that it
    makes of them, which take twice the registers."""
    if x.dtype.primitive_bitwidth == 16:
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)
    else:
        return x


@gluon.jit
def _put(y_ptr, y, N, EVEN: gl.constexpr):
    """Stores y as the row at y_ptr. EVEN: it is as long as a slot."""
    columns = _columns(y)
    if EVEN:
        gl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty))
    else:
        gl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=columns < N)


@gluon.jit
def _total(x):
    """The sum of a row: of each thread's numbers, and then over all threads."""
    return gl.sum(gl.sum(gl.sum(x, axis=2), axis=0), axis=0)


@gluon.jit
def _zeros(smem):
    """A row of zeros, in float32."""
    WIDTH: gl.constexpr = 128 // smem.dtype.primitive_bitwidth
    LANES: gl.constexpr = 32 * gl.num_warps()
    PARTS: gl.constexpr = smem.shape[2] * smem.shape[3] // (LANES * WIDTH)
    return gl.zeros([PARTS, LANES, WIDTH], gl.float32, _spread(WIDTH, gl.num_warps()))


@gluon.jit
def _vector(ptr, columns, N):
    """The weight as a row; None without."""
    if ptr is None:
        return None
    else:
        return gl.load(ptr + columns, mask=columns < N, other=0.0)


@gluon.jit
def _x_hat(smem, slot, mean, rstd):
    return (_row_in(smem, slot).to(gl.float32) - mean) * rstd


@gluon.jit
def _layer_norm_gradients(given, EVEN: gl.constexpr, STAGES: gl.constexpr):
    """What the warps do that do not fetch."""
    stats_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, x_smem, dy_smem, ready, free, M, N = given
    dweight, dbias = _zeros(x_smem), _zeros(x_smem)
    columns = _columns(dweight)
    weight = _vector(weight_ptr, columns, N)
    slot, phase = gl.to_tensor(0), gl.to_tensor(0)
    # The statistics of the next row are on their way as well.
    rstd_next = gl.load(stats_ptr + gl.program_id(0))
    mean_next = gl.load(stats_ptr + M + gl.program_id(0))
    for row in range(gl.program_id(0), M, gl.num_programs(0)):
        rstd, mean = rstd_next, mean_next
        following = gl.minimum(row + gl.num_programs(0), M - 1)
        rstd_next = gl.load(stats_ptr + following)
        mean_next = gl.load(stats_ptr + M + following)
        mbarrier.wait(ready.index(slot), phase)
        x_hat, dy = _x_hat(x_smem, slot, mean, rstd), _row_in(dy_smem, slot).to(gl.float32)
        if dweight_ptr is not None:
            dweight += dy * x_hat  # beyond the row's end dy is 0
        if dbias_ptr is not None:
            dbias += dy
        if weight_ptr is not None:
            dy *= _as_it_is(weight).to(gl.float32)
        along = _total(dy * x_hat) / N
        shift = _total(dy) / N
        x_hat, dy = _x_hat(x_smem, slot, mean, rstd), _row_in(dy_smem, slot).to(gl.float32)
        mbarrier.arrive(free.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
        if weight_ptr is not None:
            dy *= _as_it_is(weight).to(gl.float32)
        _put(dx_ptr + row.to(gl.int64) * N, (dy - x_hat * along - shift) * rstd, N, EVEN)
    offs = gl.program_id(0).to(gl.int64) * N
    if dweight_ptr is not None:
        _put(dweight_ptr + offs, dweight, N, EVEN)
    if dbias_ptr is not None:
        _put(dbias_ptr + offs, dbias, N, EVEN)


@gluon.jit
def layer_norm_gradients_kernel(
    stats_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, x_desc, dy_desc, M, N,
    EVEN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    x_smem, dy_smem = blocks_like(x_desc, STAGES), blocks_like(dy_desc, STAGES)
    ready, free = barriers(STAGES, 1), barriers(STAGES, 1)
    hopper.fence_async_shared()
    given = stats_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, x_smem, dy_smem, ready, free, M, N
    gl.warp_specialize(
        [
            (_layer_norm_gradients, (given, EVEN, STAGES)),
            (_fetch_rows, ((x_desc, dy_desc), (x_smem, dy_smem), ready, free, M, STAGES)),
        ],
        [1], [24],
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- launcher
@checked_once
def _described(x: Tensor, size: int) -> TensorDescriptor:
    """x [M, N] in blocks of a row of `size` numbers. The TMA unit counts to 256 in each dimension: a row is described as
    [N / W, W]."""
    M, N = x.shape
    width = min(256, N & -N)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * x.element_size(), rank=3)
    return TensorDescriptor(x, [M, N // width, width], [x.stride(0), width, 1], [1, size // width, width], layout)


def layer_norm_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, dx: Tensor, config: RowsConfig
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx [M, N], which it fills, dweight and dbias."""
    M, N = x.shape
    block = config.BYTES // x.element_size()
    given = [t for t in (weight, bias) if t is not None]
    programs = min(M, multiprocessors(x.device))
    partial = torch.empty((len(given), programs, N), dtype=torch.float32, device=x.device)
    dweight, dbias = None if weight is None else partial[0], None if bias is None else partial[-1]
    threads = 32 * config.WARPS + 128  # one warp counts as four: registers are shared out by fours
    launch(
        layer_norm_gradients_kernel, programs, stats, None if weight is None else weight.contiguous(), dx, dweight, dbias,
        _described(x, block), _described(dy, block), M, N,
        EVEN=N == block, STAGES=config.STAGES, num_warps=config.WARPS, maxnreg=min(248, 2**16 // threads // 8 * 8),
    )  # fmt: skip
    if not given:
        return dx, None, None
    sums, more = column_sums(partial, *given)
    return (dx, sums, more) if weight is not None else (dx, None, sums)
