"""The product of 8-bit matrices on Hopper, in Gluon (gpukit.kernels.fp8_matmul chooses it; gpukit.kernels._hopper says how
such a kernel is built, and gpukit.kernels._matmul_hopper is its sister for 16 bits).

The tensor cores of Hopper add products of 8-bit numbers with about 14 bits, so a product of one block of K begins at 0, and
its sums go into others, in float32. That takes registers for both: of its 64 x 256 elements of a tile a group of warps
multiplies one half, then the other, with the same 64 registers of a thread, beside 128 for the sums. While one group waits
for its product and adds, the tensor cores work for the other.

Source: https://docs.nvidia.com/cuda/parallel-thread-execution/ (wgmma); https://arxiv.org/abs/2412.19437 (section 3.3)
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpukit.kernels._hopper import barriers, blocks_like, fetch, next_slot, put_tile, registers, swizzled
from gpukit.kernels._launch import checked_once, launch
from gpukit.kernels._tiles import tile_at

# A tile's rows are shared out among groups of warps, and its columns among products that follow one another.
CONSUMERS, ROWS = gl.constexpr(2), gl.constexpr(64)
HALVES, WIDTH = gl.constexpr(2), gl.constexpr(128)


@gluon.jit
def _fetch_all(given, sizes, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr):
    """What one warp does: block after block of K, as soon as all consumers are done with what was in its slot."""
    a_desc, b_desc, a_smem, b_smem, ready, free = given
    M, N, K = sizes
    tiles_m, tiles_n = gl.cdiv(M, CONSUMERS * ROWS), gl.cdiv(N, HALVES * WIDTH)
    slot, phase = gl.to_tensor(0), gl.to_tensor(1)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        pid_m, pid_n = tile_at(tile, tiles_m, tiles_n, GROUP_M)
        m, n = pid_m * CONSUMERS * ROWS, pid_n * HALVES * WIDTH
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(ready.index(slot), CONSUMERS * a_desc.block_type.nbytes + HALVES * b_desc.block_type.nbytes)
            for i in gl.static_range(CONSUMERS):
                fetch(a_desc, [m + i * ROWS, k], ready.index(slot), a_smem.index(slot * CONSUMERS + i))
            for i in gl.static_range(HALVES):
                fetch(b_desc, [n + i * WIDTH, k], ready.index(slot), b_smem.index(slot * HALVES + i))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _block_product(operands, slot, half: gl.constexpr, ME: gl.constexpr, zeros):
    """a b^T of the blocks in a slot, with the tensor cores' few bits."""
    a_smem, b_smem = operands
    a, b = a_smem.index(slot * CONSUMERS + ME), b_smem.index(slot * HALVES + half)
    product = warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(product,))


@gluon.jit
def _store(sums, after, m, n, M, N, ME: gl.constexpr, LAYOUT: gl.constexpr):
    """Begins the store of half a tile, times its factors; what lies outside of c is left out."""
    c_desc, c_smem, a_factor_ptr, b_factor_ptr, stride_a_factor, stride_b_factor = after
    offs_m = m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    offs_n = n + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    a_factor = gl.load(a_factor_ptr + offs_m * stride_a_factor, mask=offs_m < M, other=0.0)
    b_factor = gl.load(b_factor_ptr + offs_n * stride_b_factor, mask=offs_n < N, other=0.0)
    c = (sums * a_factor[:, None] * b_factor[None, :]).to(c_desc.dtype)
    put_tile(c, c_desc, c_smem, m, n, ME)


@gluon.jit
def _compute(
    given, after, sizes,
    ME: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What a group of warps does: ROWS rows of each tile."""
    a_smem, b_smem, ready, free = given
    M, N, K = sizes
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, WIDTH, 32])
    operands = a_smem, b_smem
    tiles_m, tiles_n = gl.cdiv(M, CONSUMERS * ROWS), gl.cdiv(N, HALVES * WIDTH)
    slot, phase = gl.to_tensor(0), gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        zeros = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        left, right = zeros, zeros
        for _ in range(0, K, BLOCK_K):
            mbarrier.wait(ready.index(slot), phase)
            left += _block_product(operands, slot, 0, ME, zeros)
            product = _block_product(operands, slot, 1, ME, zeros)
            mbarrier.arrive(free.index(slot), count=1)
            right += product
            slot, phase = next_slot(slot, phase, STAGES)
        pid_m, pid_n = tile_at(tile, tiles_m, tiles_n, GROUP_M)
        m, n = pid_m * CONSUMERS * ROWS + ME * ROWS, pid_n * HALVES * WIDTH
        _store(left, after, m, n, M, N, ME, LAYOUT)
        _store(right, after, m, n + WIDTH, M, N, ME, LAYOUT)
    tma.store_wait(0)


@gluon.jit
def fp8_hopper_kernel(
    a_desc, b_desc, c_desc, a_factor_ptr, b_factor_ptr, stride_a_factor, stride_b_factor, M, N, K,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """c = a b^T times the factors of a's and b's rows, tile after tile. REGISTERS: see gpukit.kernels._hopper.registers."""
    a_smem = blocks_like(a_desc, STAGES * CONSUMERS)
    b_smem = blocks_like(b_desc, STAGES * HALVES)
    c_smem = blocks_like(c_desc, CONSUMERS)
    ready, free = barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    hopper.fence_async_shared()
    fetched = a_desc, b_desc, a_smem, b_smem, ready, free
    given = a_smem, b_smem, ready, free
    after = c_desc, c_smem, a_factor_ptr, b_factor_ptr, stride_a_factor, stride_b_factor
    sizes = M, N, K
    gl.warp_specialize(
        [
            (_compute, (given, after, sizes, 0, BLOCK_K, GROUP_M, STAGES)),
            (_compute, (given, after, sizes, 1, BLOCK_K, GROUP_M, STAGES)),
            (_fetch_all, (fetched, sizes, BLOCK_K, GROUP_M, STAGES)),
        ],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- launcher
AVERAGE, COMPUTING = registers(consumers=CONSUMERS.value, per_sm=1)
STAGES, GROUP_M = 4, 8


@checked_once
def _descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], list(block), swizzled(rank=2, bits=8 * x.itemsize))


def fp8_hopper(
    a: Tensor, b: Tensor, c: Tensor, a_factors: Tensor, b_factors: Tensor, programs: int, block_k: int = 128
) -> None:
    """Fill c [M, N] from a [M, K] and b [N, K] in 8 bits, all contiguous in rows of whole 16 bytes, and the factors of their
    rows, float32 [M] and [N] of any stride. block_k: products that are added with the tensor cores' bits."""
    (M, K), N = a.shape, c.shape[1]
    a_desc, b_desc = _descriptor(a, ROWS.value, block_k), _descriptor(b, WIDTH.value, block_k)
    c_desc = _descriptor(c, ROWS.value, WIDTH.value)
    tiles = -(-M // (CONSUMERS.value * ROWS.value)) * -(-N // (HALVES.value * WIDTH.value))
    launch(
        fp8_hopper_kernel, min(programs, tiles), a_desc, b_desc, c_desc, a_factors, b_factors,
        a_factors.stride(0), b_factors.stride(0), M, N, K,
        BLOCK_K=block_k, GROUP_M=GROUP_M, STAGES=STAGES, REGISTERS=COMPUTING, num_warps=4, maxnreg=AVERAGE,
    )  # fmt: skip
