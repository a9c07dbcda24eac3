"""Cross-entropy in place on Hopper, in Gluon: the logits are read once, and their gradient takes their place
(gpukit.kernels.cross_entropy chooses it and says what is computed; gpukit.kernels._rows_hopper says how rows come through
shared memory).
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gpukit.kernels._hopper import barriers, blocks_like
from gpukit.kernels._rows_choices import RowsConfig
from gpukit.kernels._rows_hopper import (
    _columns,
    _exp,
    _fetch_rows,
    _first_pass,
    _launch,
    _piece,
    _pieces,
    _put,
)


@gluon.jit
def _gradient(x, m, factor, target, share, i):
    """factor exp(x - m) of the i-th piece, less `share` at the target, which only one piece of a row contains."""
    dx = _exp(x.to(gl.float32) - m) * factor
    if target // (x.shape[0] * x.shape[1] * x.shape[2]) == i:
        dx = gl.where(_columns(x, i) == target, dx - share, dx)
    return dx


@gluon.jit
def _cross_entropy_rows(
    given,
    Z_LOSS: gl.constexpr, PIECES: gl.constexpr, HELD: gl.constexpr, EVEN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the other warps do for cross-entropy in place: the same steps as gpukit.kernels.cross_entropy's first kernel."""
    x_ptr, target_ptr, loss_ptr, stats_ptr, scale_ptr, smem, ready, free, stride_xm, M, V, ignore_index = given
    slot, phase = gl.to_tensor(0), gl.to_tensor(0)
    all_rows = gl.load(scale_ptr).to(gl.float32)
    # The target of the next row is on its way as well.
    following = gl.load(target_ptr + gl.program_id(0)).to(gl.int64)
    for row in range(gl.program_id(0), M, gl.num_programs(0)):
        at = (slot + HELD) % STAGES
        row_ptr = x_ptr + row.to(gl.int64) * stride_xm
        target = following
        following = gl.load(target_ptr + gl.minimum(row + gl.num_programs(0), M - 1)).to(gl.int64)
        x_target = gl.load(row_ptr + target, mask=(target >= 0) & (target < V), other=float("nan")).to(gl.float32)
        m, l, held, slot, phase = _first_pass(smem, ready, free, slot, phase, V, PIECES, HELD, EVEN, STAGES)
        log_l = gl.log(l)
        loss = log_l + (m - x_target)
        factor = 1.0 / l
        if Z_LOSS != 0:
            loss += Z_LOSS * (m + log_l) * (m + log_l)
            factor *= 1 + 2 * Z_LOSS * (m + log_l)
        gl.store(loss_ptr + row, gl.where(target == ignore_index, 0.0, loss))
        gl.store(stats_ptr + 2 * row, m)
        gl.store(stats_ptr + 2 * row + 1, log_l)
        share = gl.where(target == ignore_index, 0.0, all_rows)
        factor *= share
        for i in gl.static_range(HELD):
            _put(row_ptr, _gradient(held[i], m, factor, target, share, i), i, V, EVEN)
        for i in range(HELD, PIECES):
            x = _piece(smem, at)
            mbarrier.arrive(free.index(at), count=1)
            at = gl.where(at == STAGES - 1, 0, at + 1)
            _put(row_ptr, _gradient(x, m, factor, target, share, i), i, V, EVEN)


@gluon.jit
def cross_entropy_rows_kernel(
    x_ptr, target_ptr, loss_ptr, stats_ptr, scale_ptr, x_desc, stride_xm, M, V, ignore_index,
    Z_LOSS: gl.constexpr, PIECES: gl.constexpr, HELD: gl.constexpr, EVEN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    smem = blocks_like(x_desc, STAGES)
    ready, free = barriers(STAGES, 1), barriers(STAGES, 1)
    hopper.fence_async_shared()
    given = x_ptr, target_ptr, loss_ptr, stats_ptr, scale_ptr, smem, ready, free, stride_xm, M, V, ignore_index
    gl.warp_specialize(
        [
            (_cross_entropy_rows, (given, Z_LOSS, PIECES, HELD, EVEN, STAGES)),
            (_fetch_rows, ((x_desc,), (smem,), ready, free, M, PIECES, STAGES)),
        ],
        [1], [24],
    )  # fmt: skip


def cross_entropy_rows(
    x: Tensor, target: Tensor, losses: Tensor, stats: Tensor, scale: Tensor, ignore_index: int, z_loss: float,
    config: RowsConfig,
) -> None:  # fmt: skip
    """Fill losses [M] and stats [M, 2], and put scale times the gradient in the place of x [M, V]."""
    desc, constants = _pieces(x, config)
    _launch(
        cross_entropy_rows_kernel, x, config, x, target, losses, stats, scale, desc, x.stride(0), *x.shape, ignore_index,
        Z_LOSS=z_loss, **constants,
    )  # fmt: skip
