"""All three gradients of FlashAttention in one pass for a head size of 64, on Hopper, in Gluon (gpukit.kernels._flash_hopper launches it;
gpukit.kernels._flash_backward explains what is computed).

A kernel for dq and another for dk and dv compute seven products, since both need the scores and the gradients of the weights.
Here a program computes five: it has a tile of keys, as for dk and dv, and adds what its keys give to dq to sums in memory, in
float32, by atomic additions. Programs add in an order that differs from run to run, and so does the last bit of dq;
under torch.use_deterministic_algorithms the two kernels compute the gradients.

Two groups of warps compute dk and dv, of 64 keys each, as gpukit.kernels._flash_hopper_backward says, and hand each block of
ds to a third group through shared memory. The third group multiplies it by the keys of both. Nobody waits for it as long as
there are buffers, so that its products go on beside the exponentials of the others. dq is computed transposed, [columns,
queries], since the first side of a product on the tensor cores has 64 rows, and blocks of queries may be smaller.

On an H200 with [4, 16, 4096, 64] this takes 1390 µs where the two kernels take 1890. With a head size of 128 there are too
few registers for it: gpukit.kernels._flash_hopper_two_groups.

The sums lie in the order in which threads hold them, four of a thread in a row, so that an addition takes 16 bytes;
`dq_from_sums_kernel` brings them into rows.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from gpukit.kernels._attention import SIZES
from gpukit.kernels._flash_hopper_backward import _compute_dkv
from gpukit.kernels._flash_hopper_parts import _fetch_pairs, _key, _share, _tile, _walk
from gpukit.kernels._hopper import barriers, blocks_like, next_slot

GROUPS = tl.constexpr(2)


@gluon.jit
def _dq_product(k_smem, ds_smem, buffer):
    """Begins dq's block, transposed: [64 columns, queries] = k^T ds, over the keys of both groups."""
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    BLOCK_M: gl.constexpr = ds_smem.shape[2]
    dq = gl.zeros([64, BLOCK_M], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16]))
    for c in gl.static_range(GROUPS):
        k = k_smem.index(c).reshape([KEYS, D])
        dq = warpgroup_mma(k.permute((1, 0)), ds_smem.index(buffer * GROUPS + c), dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def _in_order(dq):
    """The numbers of a block of dq in the order of its sums. A thread of a product's result holds, for each 8 columns of it,
    two neighbors in each of two rows: the dimensions are taken apart into [warps, 2, 8, eights of columns, 4, 2] and put into
    a thread's order."""
    parts = gl.reshape(dq, [4, 2, 8, dq.shape[1] // 8, 4, 2])
    return gl.reshape(gl.permute(parts, (3, 0, 2, 4, 1, 5)), [dq.shape[0] * dq.shape[1]])


@gluon.jit
def _add_to_sums(sums_ptr, dq):
    """Add a block of dq to its sums."""
    parts = _in_order(dq)
    offs = gl.arange(0, parts.shape[0], layout=parts.type.layout)
    gl.atomic_add(sums_ptr + offs, parts, sem="relaxed")


@gluon.jit
def _compute_dq(given, walks, BLOCK_M: gl.constexpr, D: gl.constexpr, BUFFERS: gl.constexpr):
    """What the third group does: for each block of ds the product with the keys, added to the sums of its queries."""
    sums_ptr, k_smem, ds_smem, kv_ready, ds_ready, ds_free, done = given
    tiles, each, _H, groups, reach = walks
    T_k, T_q, _right, _left = reach
    BLOCK_N: gl.constexpr = GROUPS * k_smem.shape[3]
    buffer, phase, kv_phase = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for i in range(0, _share(tiles, each)):
        row, block = _tile(i, each, gl.cdiv(T_k, BLOCK_N))
        total, walk = _walk(block * BLOCK_N, reach, BLOCK_N, BLOCK_M)
        for c in gl.static_range(GROUPS):
            mbarrier.wait(kv_ready.index(c), kv_phase)
        kv_phase ^= 1
        sums = sums_ptr + (row * groups).to(gl.int64) * (gl.cdiv(T_q, BLOCK_M) * BLOCK_M * D)
        for _group in range(0, groups):
            for j in range(0, total):
                to = sums + _key(j, walk, BLOCK_M) * D
                mbarrier.wait(ds_ready.index(buffer), phase)
                dq = warpgroup_mma_wait(0, deps=(_dq_product(k_smem, ds_smem, buffer),))
                mbarrier.arrive(ds_free.index(buffer), count=1)
                _add_to_sums(to, dq)
                buffer, phase = next_slot(buffer, phase, BUFFERS)
            sums += gl.cdiv(T_q, BLOCK_M) * BLOCK_M * D
        mbarrier.arrive(done, count=1)


# Of T_q it must be known whether 16 divides it, as in gpukit.kernels._flash_descriptors.
@gluon.jit(do_not_specialize=["B", *[name for name in SIZES if name != "T_q"], "groups", "each"])
def flash_attention_bwd_hopper_kernel(
    lse_ptr, delta_ptr, sums_ptr, q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc,
    B, H, groups, T_q, T_k, left, right, each, scale,
    D: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk and dv in tiles of 2 x ROWS keys of one of the H heads of k and v, from blocks of BLOCK_M queries of all its query
    heads, and sums for dq: float32 [B, H groups, blocks, BLOCK_M D], zero before. lse and delta [B, H groups, T_q] are
    contiguous. REGISTERS: of a thread that computes dk and dv, and of one that computes dq."""
    k_smem = blocks_like(k_desc, GROUPS)
    v_smem = blocks_like(k_desc, GROUPS)
    q_smem = blocks_like(q_desc, STAGES)
    do_smem = blocks_like(q_desc, STAGES)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(min(2 * BLOCK_M, 128), 16, 2)
    ds_smem = gl.allocate_shared_memory(k_desc.dtype, [BUFFERS * GROUPS, ROWS, BLOCK_M], SWIZZLED)
    kv_ready, kv_free = barriers(GROUPS, 1), barriers(GROUPS, 1)
    ready, free = barriers(STAGES, 1), barriers(STAGES, GROUPS)
    ds_ready, ds_free, done = barriers(BUFFERS, GROUPS), barriers(BUFFERS, 1), barriers(1, 1)
    hopper.fence_async_shared()
    tiles = gl.cdiv(T_k, GROUPS * ROWS) * B * H
    reach = T_k, T_q, right, left
    walks = tiles, each, H, groups, reach
    fetched = k_desc, v_desc, q_desc, do_desc, k_smem, v_smem, q_smem, do_smem, kv_ready, kv_free, ready, free
    fetching = tiles, each, H, groups, gl.to_tensor(1), reach
    sent = ds_smem, ds_ready, ds_free
    given = (
        lse_ptr, delta_ptr, dk_desc, dv_desc, q_smem, do_smem, k_smem, v_smem, kv_ready, kv_free, ready, free,
    )  # fmt: skip
    for_dq = sums_ptr, k_smem, ds_smem, kv_ready, ds_ready, ds_free, done.index(0)
    gl.warp_specialize(
        [
            (_compute_dkv, (given, sent, done.index(0), walks, scale, 0, GROUPS, ROWS, BLOCK_M, D, STAGES, BUFFERS)),
            (_compute_dkv, (given, sent, done.index(0), walks, scale, 1, GROUPS, ROWS, BLOCK_M, D, STAGES, BUFFERS)),
            (_compute_dq, (for_dq, walks, BLOCK_M, D, BUFFERS)),
            (_fetch_pairs, (fetched, fetching, GROUPS, ROWS, BLOCK_M, STAGES)),
        ],
        [4, 4, 1], [REGISTERS[0], REGISTERS[1], 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["H", "blocks", "T_q"])
def dq_from_sums_kernel(
    sums_ptr, dq_ptr, dq_b, dq_h, dq_t, dq_d, H, blocks, T_q, scale, D: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """A block of dq [B, H, T_q, D] from its sums, which are in the order of `_in_order`."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    COUNT: tl.constexpr = 64 * BLOCK_M
    for part in tl.static_range(D // 64):
        sums = tl.load(sums_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_M * D) + part * COUNT + tl.arange(0, COUNT))
        sums = tl.permute(tl.reshape(sums, [BLOCK_M // 8, 4, 8, 4, 2, 2]), (0, 3, 5, 1, 4, 2))
        dq = tl.reshape(sums, [BLOCK_M, 64]) * scale
        t, d = block * BLOCK_M + tl.arange(0, BLOCK_M), part * 64 + tl.arange(0, 64)
        to = dq_ptr + row // H * dq_b + row % H * dq_h + t[:, None].to(tl.int64) * dq_t + d[None, :] * dq_d
        tl.store(to, dq.to(dq_ptr.dtype.element_ty), mask=t[:, None] < T_q)
