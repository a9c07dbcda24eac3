"""The matmul on Hopper, in Gluon (gpukit.kernels.matmul chooses it; gpukit.kernels._hopper says how such a kernel is built).

A program an SM computes tile after tile. One warp fetches blocks of a and b along K into a ring in shared memory; two groups
of four warps multiply, each 64 rows of the tile by all of its columns: 128 registers of a thread are sums. So that the tensor
cores need not wait while a tile is rounded and stored, it stays in registers, in 16 bits, until the first product of the next
tile has begun, and is stored beside that.

Source: https://docs.nvidia.com/cuda/parallel-thread-execution/ (wgmma)
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpukit.kernels._hopper import barriers, blocks_like, fetch, next_slot, put_tile, registers, swizzled
from gpukit.kernels._launch import checked_once, launch
from gpukit.kernels._matmul_persistent import oriented
from gpukit.kernels._tiles import epilogue, tile_at

# A tile's rows, shared out among groups of warps.
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)


@gluon.jit
def _fetch_all(
    given, sizes,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """What one warp does: block after block of K, as soon as all consumers are done with what was in its slot."""
    a_desc, b_desc, a_smem, b_smem, ready, free = given
    M, N, K = sizes
    tiles_m, tiles_n = gl.cdiv(M, CONSUMERS * ROWS), gl.cdiv(N, BLOCK_N)
    # A new barrier counts as if the phase before, 1, were over: all slots are free.
    slot, phase = gl.to_tensor(0), gl.to_tensor(1)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = tile_at(tile, tiles_m, tiles_n, GROUP_M)
        m, n = pid_m * CONSUMERS * ROWS, pid_n * BLOCK_N
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(ready.index(slot), CONSUMERS * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            for c in gl.static_range(CONSUMERS):
                if A_ROWS:
                    fetch(a_desc, [m + c * ROWS, k], ready.index(slot), a_smem.index(slot * CONSUMERS + c))
                else:
                    fetch(a_desc, [k, m + c * ROWS], ready.index(slot), a_smem.index(slot * CONSUMERS + c))
            if B_ROWS:
                fetch(b_desc, [k, n], ready.index(slot), b_smem.index(slot))
            else:
                fetch(b_desc, [n, k], ready.index(slot), b_smem.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _add_product(
    acc, operands, slot, use_acc,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """Begins acc + a b, or a b alone, of the blocks in a slot."""
    a_smem, b_smem = operands
    a = a_smem.index(slot * CONSUMERS + ME) if A_ROWS else a_smem.index(slot * CONSUMERS + ME).permute((1, 0))
    b = b_smem.index(slot) if B_ROWS else b_smem.index(slot).permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _piece(y, i: gl.constexpr, PIECES: gl.constexpr):
    """The i-th of PIECES parts of y's columns: which registers these are is known when it is compiled."""
    if PIECES == 1:
        return y
    else:
        HALF: gl.constexpr = y.shape[1] // 2
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], y.type.layout.warps_per_cta, [16, HALF, 16])
        left, right = gl.split(gl.permute(gl.reshape(y, [y.shape[0], 2, HALF]), (0, 2, 1)))
        half = left if i < PIECES // 2 else right
        return _piece(gl.convert_layout(half, LAYOUT, assert_trivial=True), i % (PIECES // 2), PIECES // 2)


@gluon.jit
def _compute(
    given, sizes,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, ACTIVATION: gl.constexpr, ME: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """What a group of warps does: ROWS rows of each tile."""
    z_ptr, bias_ptr, residual_ptr, scale_ptr, c_desc, a_smem, b_smem, c_smem, ready, free = given
    M, N, K = sizes
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    WIDTH: gl.constexpr = BLOCK_N // PIECES
    operands = a_smem, b_smem
    tiles_m, tiles_n = gl.cdiv(M, CONSUMERS * ROWS), gl.cdiv(N, BLOCK_N)
    slot, phase, last = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    # The tile before, to be stored. Of the first one there is none: it lies outside of c.
    y, y_m, y_n = gl.zeros([ROWS, BLOCK_N], c_desc.dtype, LAYOUT), M, N
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
        for i in gl.static_range(PIECES):
            mbarrier.wait(ready.index(slot), phase)
            acc = _add_product(acc, operands, slot, i > 0, A_ROWS, B_ROWS, ME)
            put_tile(_piece(y, i, PIECES), c_desc, c_smem, y_m, y_n + i * WIDTH, ME)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # all but the product just begun are done
            if i > 0:
                mbarrier.arrive(free.index(last), count=1)
            last = slot
            slot, phase = next_slot(slot, phase, STAGES)
        for _ in range(PIECES * BLOCK_K, K, BLOCK_K):
            mbarrier.wait(ready.index(slot), phase)
            acc = _add_product(acc, operands, slot, True, A_ROWS, B_ROWS, ME)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(free.index(last), count=1)
            last = slot
            slot, phase = next_slot(slot, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(last), count=1)
        pid_m, pid_n = tile_at(tile, tiles_m, tiles_n, GROUP_M)
        y_m, y_n = pid_m * CONSUMERS * ROWS + ME * ROWS, pid_n * BLOCK_N
        offs_m = y_m.to(gl.int64) + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        offs_n = y_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        acc = epilogue(acc, acc, z_ptr, bias_ptr, residual_ptr, scale_ptr, offs_m, offs_n, M, N, ACTIVATION, False)
        # Rounded now: behind an instruction that it does not know, the compiler cannot put this off until y is stored, while
        # the sums' registers are in use again.
        y = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc.to(c_desc.dtype)], c_desc.dtype, True, 2)
    for i in gl.static_range(PIECES):
        put_tile(_piece(y, i, PIECES), c_desc, c_smem, y_m, y_n + i * WIDTH, ME)
    tma.store_wait(0)


@gluon.jit
def matmul_hopper_kernel(
    a_desc, b_desc, c_desc, z_ptr, bias_ptr, residual_ptr, scale_ptr, M, N, K,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """c = activation(a @ b), tile after tile. A_ROWS, B_ROWS: whether a's descriptor is of [M, K] and b's of [K, N]; else of
    their transposes. K is more than PIECES - 1 blocks. REGISTERS: see gpukit.kernels._hopper.registers."""
    a_smem = blocks_like(a_desc, STAGES * CONSUMERS)
    b_smem = blocks_like(b_desc, STAGES)
    c_smem = blocks_like(c_desc, CONSUMERS)
    ready, free = barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    hopper.fence_async_shared()
    fetched = a_desc, b_desc, a_smem, b_smem, ready, free
    given = z_ptr, bias_ptr, residual_ptr, scale_ptr, c_desc, a_smem, b_smem, c_smem, ready, free
    sizes = M, N, K
    gl.warp_specialize(
        [
            (_compute, (given, sizes, A_ROWS, B_ROWS, ACTIVATION, 0, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PIECES)),
            (_compute, (given, sizes, A_ROWS, B_ROWS, ACTIVATION, 1, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PIECES)),
            (_fetch_all, (fetched, sizes, A_ROWS, B_ROWS, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- launcher
SHARED = swizzled(rank=2)
AVERAGE, COMPUTING = registers(consumers=CONSUMERS.value, per_sm=1)


@checked_once
def _of_rows(x: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), SHARED)


def _descriptor(x: Tensor, block: list[int]) -> tuple[TensorDescriptor, bool]:
    x, block, rows = oriented(x, block)
    return _of_rows(x, *block), rows


def matmul_hopper(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    z: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    programs: int,
    constants: dict,
) -> None:
    """Fill c [M, N], contiguous, from a [M, K] and b [K, N], 16-bit operands that can be described, as c can."""
    (M, K), N = a.shape, c.shape[1]
    BLOCK_N, BLOCK_K = constants["BLOCK_N"], constants["BLOCK_K"]
    a_desc, a_rows = _descriptor(a, [ROWS.value, BLOCK_K])
    b_desc, b_rows = _descriptor(b, [BLOCK_K, BLOCK_N])
    c_desc, _ = _descriptor(c, [ROWS.value, BLOCK_N // constants["PIECES"]])
    tiles = -(-M // (CONSUMERS.value * ROWS.value)) * -(-N // BLOCK_N)
    launch(
        matmul_hopper_kernel, min(programs, tiles), a_desc, b_desc, c_desc, z, bias, residual, scale, M, N, K,
        A_ROWS=a_rows, B_ROWS=b_rows, **constants, REGISTERS=COMPUTING, maxnreg=AVERAGE,
    )  # fmt: skip
