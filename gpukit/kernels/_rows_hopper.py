"""Long rows on Hopper, in Gluon: each number is read once and written once (gpukit.kernels._rows_choices says which rows;
_cross_entropy_hopper and _norms_hopper are made of this; gpukit.kernels._hopper says how such a kernel is built).

A long row does not fit into the registers of a program, and to read it twice costs the memory half as much again. Here a program
per SM walks over rows. One warp fetches them, piece after piece, into a ring of slots in shared memory. The other warps wait for
each piece and add it to what they know of the row: its maximum and its sum. When its last piece has come they go through the row
once more, in shared memory, write the result, and free slot after slot for the next row, whose first pieces have come meanwhile.
The first HELD pieces of a row are kept in registers instead. A row may therefore be longer than shared memory, and there is room
for the next one.

A piece is [parts, lanes, numbers]. A lane is a thread, which reads 16 bytes of each part. A thread can sum its own numbers, and the
threads meet once for each row.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpukit.kernels._device import multiprocessors
from gpukit.kernels._hopper import fetch, next_slot
from gpukit.kernels._launch import checked_once, launch
from gpukit.kernels._rows_choices import RowsConfig

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _fetch_rows(descs, smems, ready, free, M, PIECES: gl.constexpr, STAGES: gl.constexpr):
    """What one warp does: piece after piece of this program's rows, of one tensor or of two, as soon as a slot is free."""
    ROWS: gl.constexpr = descs[0].block_type.shape[1]
    slot, phase = gl.to_tensor(0), gl.to_tensor(1)
    for row in range(gl.program_id(0), M, gl.num_programs(0)):
        for i in range(0, PIECES):
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(ready.index(slot), len(descs) * descs[0].block_type.nbytes)
            for t in gl.static_range(len(descs)):
                fetch(descs[t], [row, i * ROWS, 0], ready.index(slot), smems[t].index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.constexpr_function
def _spread(width, warps):
    """Which thread has what of a piece."""
    return gl.BlockedLayout([1, 1, width], [1, 32, 1], [1, warps, 1], [2, 1, 0])


@gluon.jit
def _piece(smem, slot):
    """The piece in a slot, [parts, lanes, numbers], in the order of memory; what lies beyond the row's end is 0."""
    WIDTH: gl.constexpr = 128 // smem.dtype.primitive_bitwidth
    LANES: gl.constexpr = 32 * gl.num_warps()
    PARTS: gl.constexpr = smem.shape[2] * smem.shape[3] // (LANES * WIDTH)
    return smem.index(slot).reshape([PARTS, LANES, WIDTH]).load(_spread(WIDTH, gl.num_warps()))


@gluon.jit
def _lanes(smem, value: gl.constexpr):
    """A number in float32 for each lane."""
    LAYOUT: gl.constexpr = _spread(128 // smem.dtype.primitive_bitwidth, gl.num_warps())
    return gl.full([32 * gl.num_warps()], value, gl.float32, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))


@gluon.jit
def _columns(x, i):
    """Which columns of a row the numbers of its i-th piece x are."""
    LAYOUT: gl.constexpr = x.type.layout
    part = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    lane = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    number = gl.arange(0, x.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return i * (x.shape[0] * x.shape[1] * x.shape[2]) + (part * x.shape[1] + lane) * x.shape[2] + number


@gluon.jit
def _as_it_is(x):
    """x. Behind an instruction that it does not know, the compiler keeps numbers of 16 bits, and not those in float32 that it
    makes of them, which take twice the registers."""
    if x.dtype.primitive_bitwidth == 16:
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)
    else:
        return x


@gluon.jit
def _put(y_ptr, y, i, N, EVEN: gl.constexpr):
    """Stores y as the i-th piece of the row at y_ptr. EVEN: all pieces are full."""
    columns = _columns(y, i)
    if EVEN:
        gl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty))
    else:
        gl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=columns < N)


# ---------------------------------------------------------------------------------------------------------- cross-entropy
@gluon.jit
def _exp(x):
    return gl.exp2(x * LOG2E)


@gluon.jit
def _join(m, l, x, i, N, PIECES: gl.constexpr, EVEN: gl.constexpr):
    """Running maximum m and sum l of exp(x - m) of each lane, after the i-th piece x as well."""
    if not EVEN:
        if i == PIECES - 1:
            x = gl.where(_columns(x, i) < N, x, -float("inf"))
    x = x.to(gl.float32)
    m_new = gl.maximum(m, gl.max(gl.max(x, axis=2), axis=0))
    e = _exp(x - m_new[None, :, None])
    return m_new, l * _exp(m - m_new) + gl.sum(gl.sum(e, axis=2), axis=0)


@gluon.jit
def _first_pass(
    smem, ready, free, slot, phase, N,
    PIECES: gl.constexpr, HELD: gl.constexpr, EVEN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A row's maximum, its sum of exp(x - maximum), the pieces held, and the slot and phase behind the row."""
    # The maximum starts finite, so that -inf - m is never NaN.
    m, l = _lanes(smem, -3.4028234663852886e38), _lanes(smem, 0.0)
    held = ()
    for i in gl.static_range(HELD):
        mbarrier.wait(ready.index(slot), phase)
        x = _piece(smem, slot)
        mbarrier.arrive(free.index(slot), count=1)
        held = held + (_as_it_is(x),)  # noqa: RUF005 no star here
        m, l = _join(m, l, x, i, N, PIECES, EVEN)
        slot, phase = next_slot(slot, phase, STAGES)
    for i in range(HELD, PIECES):
        mbarrier.wait(ready.index(slot), phase)
        m, l = _join(m, l, _piece(smem, slot), i, N, PIECES, EVEN)
        slot, phase = next_slot(slot, phase, STAGES)
    m_row = gl.max(m, axis=0)
    return m_row, gl.sum(l * _exp(m - m_row), axis=0), held, slot, phase


# -------------------------------------------------------------------------------------------------------------- launcher
@checked_once
def _described(x: Tensor, size: int) -> TensorDescriptor:
    """x [M, N] in pieces of `size` numbers. The TMA unit counts to 256 in each dimension: a row is described as [N / W, W]."""
    M, N = x.shape
    width = min(256, N & -N)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * x.element_size(), rank=3)
    return TensorDescriptor(x, [M, N // width, width], [x.stride(0), width, 1], [1, size // width, width], layout)


def programs_of(x: Tensor, config: RowsConfig) -> int:
    return min(len(x), multiprocessors(x.device) * config.PER_SM)


def _launch(kernel, x: Tensor, config: RowsConfig, *given, **constants) -> None:
    threads = 32 * config.WARPS + 128  # one warp counts as four: registers are shared out by fours
    launch(
        kernel, programs_of(x, config), *given, **constants,
        STAGES=config.STAGES, num_warps=config.WARPS, maxnreg=min(248, 2**16 // (threads * config.PER_SM) // 8 * 8),
    )  # fmt: skip


def _pieces(x: Tensor, config: RowsConfig) -> tuple[TensorDescriptor, dict]:
    N, size = x.shape[1], config.BYTES // x.element_size()
    return _described(x, size), {"PIECES": -(-N // size), "HELD": config.HELD, "EVEN": N % size == 0}
