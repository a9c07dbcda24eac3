"""All three gradients of FlashAttention in one pass for a head size of 64, on Hopper, in Gluon (gpukit.kernels._flash_hopper
launches it; gpukit.kernels._flash_backward explains what is computed).

A kernel for dq and another for dk and dv compute seven products, since both need the scores and the gradients of the weights.
Here a program computes five: it has a tile of keys, as for dk and dv, and adds what its keys give to dq to sums in memory, in
float32, by atomic additions. Programs add in an order that differs from run to run, and so does the last bit of dq;
under torch.use_deterministic_algorithms the two kernels compute the gradients.

Two groups of warps compute dk and dv, of 64 keys each, and hand each block of ds to a third group through shared memory. The
third group multiplies it by the keys of both. Nobody waits for it as long as there are buffers, so that its products go on
beside the exponentials of the others. dq is computed transposed, [columns, queries], since the first side of a product on the
tensor cores has 64 rows.

The tensor cores read their operands from shared memory, which is about as busy as they are. A group's 64 values are the same
for every block of queries, so it keeps them in registers, and their product with do reads half as much. lse and delta go the
other way: the warp that fetches brings them into shared memory, so that no group waits for device memory.

On an H200 the gradients of [4, 16, 4096, 64] take 1406 µs so, 779 if causal. With values in shared memory, and lse and delta
loaded by each group, they took 1546 and 829 beside it; cuDNN takes 1649 and 951. With a head size of 128 there are too few
registers for a third group: gpukit.kernels._flash_hopper_two_groups.

The sums lie in the order in which threads hold them, four of a thread in a row, so that an addition takes 16 bytes;
`dq_from_sums_kernel` brings them into rows.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from gpukit.kernels._attention import LOG2E, SIZES
from gpukit.kernels._flash_hopper_parts import (
    _add_product,
    _fetch_with_rows,
    _put_dk_dv,
    _queries,
    _scores,
    _send,
    _share,
    _tile,
    _weights,
)
from gpukit.kernels._hopper import barriers, blocks_like

GROUPS = tl.constexpr(2)


@gluon.jit
def _dq_product(k_smem, ds_smem, buffer, COLUMN: gl.constexpr):
    """Begins 64 of dq's columns, from COLUMN on, of a block, transposed: [64, queries] = k^T ds, over the keys of both groups."""
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    BLOCK_M: gl.constexpr = ds_smem.shape[2]
    dq = gl.zeros([64, BLOCK_M], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16]))
    for c in gl.static_range(GROUPS):
        k = k_smem.index(c).reshape([KEYS, D]).slice(COLUMN, 64, dim=1)
        dq = warpgroup_mma(k.permute((1, 0)), ds_smem.index(GROUPS * buffer + c), dq, use_acc=c > 0, is_async=True)
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
def _step(m, n, dk, dv, v, given, walk, seen, scale, ME: gl.constexpr, STAGES: gl.constexpr):
    """What the queries from m on, the n-th block of this program, give to dk and dv. Matrices are [keys, queries]; seen: the
    first and the last query that sees each key."""
    blocks, ds_smem, sent, taken, _done = given
    k_smem, _v_smem, q_smem, do_smem, row_smem, _kv_ready, _kv_free, ready, free = blocks
    _start, _end, full_start, full_end = walk
    lowest, highest = seen
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    slot = n % STAGES
    q, do = q_smem.index(slot).reshape([BLOCK_M, D]), do_smem.index(slot).reshape([BLOCK_M, D])
    mbarrier.wait(ready.index(slot), n // STAGES & 1)
    s = _scores(k_smem.index(ME).reshape([KEYS, D]), q)
    dp = _scores(v, do)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = _weights(s, row_smem, slot, m, full_start, full_end, lowest, highest, scale)
    dv = _add_product(dv, p, do)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    delta = row_smem.index(2 * slot + 1).load(gl.SliceLayout(0, dp.type.layout))
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = _add_product(dk, ds, q)
    _send(ds, n, ds_smem, sent, taken, ME)
    dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
    mbarrier.arrive(free.index(slot), count=1)
    return dk, dv


@gluon.jit
def _compute(given, tensors, walks, scale, ME: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    """What each of the first two groups does: dk and dv of its 64 keys, and ds for the third."""
    blocks, _ds_smem, _sent, _taken, done = given
    k_smem, v_smem, _q_smem, _do_smem, _row_smem, kv_ready, kv_free, _ready, _free = blocks
    tiles, each, H, groups, reach = walks
    T_k, T_q, right, left = reach
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    BLOCK_N: gl.constexpr = GROUPS * KEYS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [KEYS // 16, 1], [16, BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [KEYS // 16, 1], [16, D, 16])
    n, kv_phase = gl.to_tensor(0), gl.to_tensor(0)
    log2_scale = scale * LOG2E
    for i in range(0, _share(tiles, each)):
        row, block = _tile(i, each, gl.cdiv(T_k, BLOCK_N))
        walk = _queries(block, reach, BLOCK_N, BLOCK_M)
        start_n = block * BLOCK_N + ME * KEYS
        place = start_n + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT)) + T_q - T_k
        seen = place - right, gl.where(place < T_q, place + left, -1)
        dk = gl.zeros([KEYS, D], gl.float32, D_LAYOUT)
        dv = gl.zeros([KEYS, D], gl.float32, D_LAYOUT)
        mbarrier.wait(kv_ready.index(ME), kv_phase)
        v = v_smem.index(ME).reshape([KEYS, D]).load(gl.DotOperandLayout(0, LAYOUT, 2))
        for _group in range(0, groups):
            for m in range(walk[0], walk[1], BLOCK_M):
                dk, dv = _step(m, n, dk, dv, v, given, walk, seen, log2_scale, ME, STAGES)
                n += 1
        mbarrier.wait(done.index(0), kv_phase)  # dq needs these keys no more
        kv_phase ^= 1
        _put_dk_dv(dk * scale, dv, tensors, row, H, start_n, k_smem, v_smem, kv_free, ME)


@gluon.jit
def _compute_dq(given, sums_ptr, walks, BLOCK_M: gl.constexpr, BUFFERS: gl.constexpr):
    """What the third group does: for each block of ds the product with the keys, added to the sums of its queries."""
    blocks, ds_smem, sent, taken, done = given
    k_smem, _v_smem, _q_smem, _do_smem, _row_smem, kv_ready, _kv_free, _ready, _free = blocks
    tiles, each, _H, groups, reach = walks
    T_k, T_q, _right, _left = reach
    BLOCK_N: gl.constexpr = GROUPS * k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    n, kv_phase = gl.to_tensor(0), gl.to_tensor(0)
    for i in range(0, _share(tiles, each)):
        row, block = _tile(i, each, gl.cdiv(T_k, BLOCK_N))
        start, end, _full_start, _full_end = _queries(block, reach, BLOCK_N, BLOCK_M)
        for c in gl.static_range(GROUPS):
            mbarrier.wait(kv_ready.index(c), kv_phase)
        kv_phase ^= 1
        sums = sums_ptr + (row * groups).to(gl.int64) * (gl.cdiv(T_q, BLOCK_M) * BLOCK_M * D)
        for _group in range(0, groups):
            for m in range(start, end, BLOCK_M):
                buffer = n % BUFFERS
                mbarrier.wait(sent.index(buffer), n // BUFFERS & 1)
                dq = warpgroup_mma_wait(0, deps=(_dq_product(k_smem, ds_smem, buffer, 0),))
                mbarrier.arrive(taken.index(buffer), count=1)
                _add_to_sums(sums + m * D, dq)
                n += 1
            sums += gl.cdiv(T_q, BLOCK_M) * BLOCK_M * D
        mbarrier.arrive(done.index(0), count=1)


# Of T_q it must be known whether 16 divides it, as in gpukit.kernels._flash_descriptors.
@gluon.jit(do_not_specialize=["B", *[name for name in SIZES if name != "T_q"], "groups", "each"])
def flash_attention_bwd_hopper_kernel(
    lse_ptr, delta_ptr, sums_ptr, q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc,
    B, H, groups, T_q, T_k, left, right, each, scale,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk and dv in tiles of 2 x ROWS keys of one of the H heads of k and v, from blocks of BLOCK_M queries of all its query
    heads, and sums for dq: float32 [B, H groups, blocks, BLOCK_M D], zero before. lse and delta [B, H groups, T_q] are
    contiguous. REGISTERS: of a thread that computes dk and dv, and of one that computes dq."""
    k_smem, v_smem = blocks_like(k_desc, GROUPS), blocks_like(k_desc, GROUPS)
    q_smem, do_smem = blocks_like(q_desc, STAGES), blocks_like(q_desc, STAGES)
    row_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(min(2 * BLOCK_M, 128), 16, 2)
    ds_smem = gl.allocate_shared_memory(k_desc.dtype, [BUFFERS * GROUPS, ROWS, BLOCK_M], SWIZZLED)
    kv_ready, kv_free = barriers(GROUPS, 1), barriers(GROUPS, 1)
    ready, free = barriers(STAGES, 2), barriers(STAGES, GROUPS)  # ready: the copies have come, and lse and delta
    sent, taken, done = barriers(BUFFERS, GROUPS), barriers(BUFFERS, 1), barriers(1, 1)
    hopper.fence_async_shared()
    tiles = gl.cdiv(T_k, GROUPS * ROWS) * B * H
    walks = tiles, each, H, groups, (T_k, T_q, right, left)
    blocks = k_smem, v_smem, q_smem, do_smem, row_smem, kv_ready, kv_free, ready, free
    given = blocks, ds_smem, sent, taken, done
    fetched = lse_ptr, delta_ptr, k_desc, v_desc, q_desc, do_desc
    results = dk_desc, dv_desc
    gl.warp_specialize(
        [
            (_compute, (given, results, walks, scale, 0, BLOCK_M, STAGES)),
            (_compute, (given, results, walks, scale, 1, BLOCK_M, STAGES)),
            (_compute_dq, (given, sums_ptr, walks, BLOCK_M, BUFFERS)),
            (_fetch_with_rows, (blocks, fetched, walks)),
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
