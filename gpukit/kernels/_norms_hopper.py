"""The gradients of a LayerNorm of long rows on Hopper, in Gluon (gpukit.kernels._norm_backward chooses it and says what is
computed; gpukit.kernels._rows_hopper says how rows come through shared memory).

A row is one piece here. The weight is read once by each program and stays in registers, and so do the sums of its gradient and
of the bias's: with 16,384 columns these take half of all registers of an SM. The numbers of a row are therefore taken from shared
memory a second time, when the threads have met for the row's two sums, instead of being kept.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gpukit.kernels._hopper import barriers, blocks_like, next_slot
from gpukit.kernels._rows import column_sums
from gpukit.kernels._rows_choices import RowsConfig
from gpukit.kernels._rows_hopper import (
    _as_it_is,
    _columns,
    _described,
    _fetch_rows,
    _launch,
    _piece,
    _put,
    _spread,
    programs_of,
)


@gluon.jit
def _total(x):
    """The sum of a piece: of each thread's numbers, and then over all threads."""
    return gl.sum(gl.sum(gl.sum(x, axis=2), axis=0), axis=0)


@gluon.jit
def _zeros(smem):
    """A piece of zeros, in float32."""
    WIDTH: gl.constexpr = 128 // smem.dtype.primitive_bitwidth
    LANES: gl.constexpr = 32 * gl.num_warps()
    PARTS: gl.constexpr = smem.shape[2] * smem.shape[3] // (LANES * WIDTH)
    return gl.zeros([PARTS, LANES, WIDTH], gl.float32, _spread(WIDTH, gl.num_warps()))


@gluon.jit
def _vector(ptr, columns, N):
    """The weight as a piece; None without."""
    if ptr is None:
        return None
    else:
        return gl.load(ptr + columns, mask=columns < N, other=0.0)


@gluon.jit
def _x_hat(smem, slot, mean, rstd):
    return (_piece(smem, slot).to(gl.float32) - mean) * rstd


@gluon.jit
def _layer_norm_gradients(given, EVEN: gl.constexpr, STAGES: gl.constexpr):
    """What the warps do that do not fetch."""
    stats_ptr, weight_ptr, dx_ptr, dweight_ptr, dbias_ptr, x_smem, dy_smem, ready, free, M, N = given
    dweight, dbias = _zeros(x_smem), _zeros(x_smem)
    columns = _columns(dweight, 0)
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
        x_hat, dy = _x_hat(x_smem, slot, mean, rstd), _piece(dy_smem, slot).to(gl.float32)
        if dweight_ptr is not None:
            dweight += dy * x_hat  # beyond the row's end dy is 0
        if dbias_ptr is not None:
            dbias += dy
        if weight_ptr is not None:
            dy *= _as_it_is(weight).to(gl.float32)
        along = _total(dy * x_hat) / N
        shift = _total(dy) / N
        x_hat, dy = _x_hat(x_smem, slot, mean, rstd), _piece(dy_smem, slot).to(gl.float32)
        mbarrier.arrive(free.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
        if weight_ptr is not None:
            dy *= _as_it_is(weight).to(gl.float32)
        _put(dx_ptr + row.to(gl.int64) * N, (dy - x_hat * along - shift) * rstd, 0, N, EVEN)
    offs = gl.program_id(0).to(gl.int64) * N
    if dweight_ptr is not None:
        _put(dweight_ptr + offs, dweight, 0, N, EVEN)
    if dbias_ptr is not None:
        _put(dbias_ptr + offs, dbias, 0, N, EVEN)


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
            (_fetch_rows, ((x_desc, dy_desc), (x_smem, dy_smem), ready, free, M, 1, STAGES)),
        ],
        [1], [24],
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- launcher
def layer_norm_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, dx: Tensor, config: RowsConfig
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx [M, N], which it fills, dweight and dbias. A row is one piece."""
    M, N = x.shape
    block = config.BYTES // x.element_size()
    given = [t for t in (weight, bias) if t is not None]
    partial = torch.empty((len(given), programs_of(x, config), N), dtype=torch.float32, device=x.device)
    dweight, dbias = None if weight is None else partial[0], None if bias is None else partial[-1]
    _launch(
        layer_norm_gradients_kernel, x, config, stats, None if weight is None else weight.contiguous(), dx, dweight, dbias,
        _described(x, block), _described(dy, block), M, N, EVEN=N == block,
    )  # fmt: skip
    if not given:
        return dx, None, None
    sums, more = column_sums(partial, *given)
    return (dx, sums, more) if weight is not None else (dx, None, sums)
