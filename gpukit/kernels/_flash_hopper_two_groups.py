"""All three gradients of FlashAttention in one pass for a head size of 128, on Hopper, in Gluon: two groups of warps compute
dk, dv and, with each other's ds, dq as well (gpukit.kernels._flash_hopper launches it; gpukit.kernels._flash_hopper_one_pass is
what a head size of 64 has, and says why there is one pass and what happens to dq's sums).

A product on the tensor cores reads its operands from shared memory, at 128 bytes per clock. One of 64 x 32 x 16 takes the
tensor cores 16 clocks and reads 3 KiB, which take 24; one of 64 x 64 x 16 takes 32 clocks and reads 4 KiB, which take as long.
Blocks have to have 64 queries, then, and a thread has to hold 64 numbers each of dk and dv and 32 each of the scores and of
dp: 240 registers are just enough, and a third group for dq, as a head size of 64 has it, leaves 208.

So there are two groups, of 64 keys each. Each puts its block of ds into shared memory; then each computes 64 of dq's 128
columns, over the keys of both. That waits for the other group, and nothing may stand still meanwhile. This is in a step, of
64 queries, and in this order the tensor cores get the products:
    dq of the step before, for which both groups' ds have been there since the end of that step
    the scores. Beside them dq goes to shared memory, for two more warps to add it to the sums.
    dp. Beside it the exponentials are computed, which make the weights p.
    dv, with p from registers. Beside it ds is computed and put into shared memory.
    dk, with ds from shared memory. It is waited for after the next step's scores have been begun.

A group that added to memory itself would wait until its numbers have left the registers that dp needs. The two warps that do
so and the one that fetches count as one group of four: their registers cost nothing more. The one that fetches also brings
lse and delta into shared memory, from where a thread takes them when it needs them: 32 numbers that would not fit into its
registers.

On an H200 the gradients of [4, 16, 4096, 128] take 2703 µs so, 1487 if causal. With blocks of 32 queries and a third group for dq
they took 3005 and 1651 beside it; cuDNN takes 2558 and 1482. If the groups add by themselves it is 2927 and 1593, with three slots
for blocks of queries 2862 and 1558.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from gpukit.kernels._attention import LOG2E, SIZES
from gpukit.kernels._flash_hopper_one_pass import GROUPS, _dq_product, _in_order
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

PIECES = gl.constexpr(8)  # of a group's block of dq: 16 bytes for each thread that adds


@gluon.jit
def _begin_dq(given, n, ME: gl.constexpr, BUFFERS: gl.constexpr):
    """Begins 64 of dq's columns for the n-th block, once both groups' ds are there."""
    blocks, ds_smem, sent, _done, _to_add = given
    buffer = n % BUFFERS
    mbarrier.wait(sent.index(buffer), n // BUFFERS & 1)
    return _dq_product(blocks[0], ds_smem, buffer, 64 * ME)


@gluon.jit
def _hand_over(to_add, dq, n, ME: gl.constexpr):
    """Put the n-th block of dq, in the order of `_in_order`, where the warps that add take it from."""
    dq_smem, dq_ready, dq_free = to_add
    parts = _in_order(dq).reshape([PIECES, dq.shape[0] * dq.shape[1] // PIECES])
    mbarrier.wait(dq_free.index(ME), n & 1 ^ 1)
    dq_smem.index(ME).store(parts)
    mbarrier.arrive(dq_ready.index(ME), count=1)


@gluon.jit
def _add(given, sums_ptr, walks, BLOCK_M: gl.constexpr):
    """What two warps do: add each block of dq to its sums. A group that did so itself would wait until memory has taken the
    numbers from its registers."""
    blocks, _ds_smem, _sent, _done, to_add = given
    dq_smem, dq_ready, dq_free = to_add
    ROWS: gl.constexpr = blocks[0].shape[3]
    D: gl.constexpr = blocks[0].shape[4]
    tiles, each, _H, groups, reach = walks
    T_k, T_q, _right, _left = reach
    PIECE: gl.constexpr = dq_smem.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 2], [1, 0])
    offs = gl.arange(0, PIECE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    n = gl.to_tensor(0)
    for i in range(0, _share(tiles, each)):
        row, block = _tile(i, each, gl.cdiv(T_k, GROUPS * ROWS))
        start, end, _full_start, _full_end = _queries(block, reach, GROUPS * ROWS, BLOCK_M)
        sums = sums_ptr + (row * groups).to(gl.int64) * (gl.cdiv(T_q, BLOCK_M) * BLOCK_M * D)
        for _group in range(0, groups):
            for m in range(start, end, BLOCK_M):
                for c in gl.static_range(GROUPS):
                    mbarrier.wait(dq_ready.index(c), n & 1)
                    for piece in gl.static_range(PIECES):
                        part = dq_smem.index(c).slice(piece, 1, dim=0).load(LAYOUT)
                        gl.atomic_add(sums + m * D + (PIECES * c + piece) * PIECE + offs, part, sem="relaxed")
                    mbarrier.arrive(dq_free.index(c), count=1)
                n += 1
            sums += gl.cdiv(T_q, BLOCK_M) * BLOCK_M * D


@gluon.jit
def _step(
    FIRST: gl.constexpr, m, n, dk, dv, given, full_start, full_end, lowest, highest, scale,
    ME: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """The queries from m on, the n-th block of this program. Matrices are [keys, queries]. Of the block before, dk's product
    still goes on, and dq's is begun here; FIRST: there is none."""
    blocks, ds_smem, sent, _done, to_add = given
    k_smem, v_smem, q_smem, do_smem, row_smem, _kv_ready, _kv_free, ready, free = blocks
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    BLOCK_M: gl.constexpr = ds_smem.shape[2]
    slot, buffer = n % STAGES, n % BUFFERS
    k, v = k_smem.index(ME).reshape([KEYS, D]), v_smem.index(ME).reshape([KEYS, D])
    q, do = q_smem.index(slot).reshape([BLOCK_M, D]), do_smem.index(slot).reshape([BLOCK_M, D])
    mbarrier.wait(ready.index(slot), n // STAGES & 1)
    if FIRST:
        s = _scores(k, q)
    else:
        dq = _begin_dq(given, n - 1, ME, BUFFERS)
        s = _scores(k, q)
        dk, dq = warpgroup_mma_wait(1, deps=(dk, dq))
        mbarrier.arrive(free.index((n - 1) % STAGES), count=1)
        _hand_over(to_add, dq, n - 1, ME)
    dp = _scores(v, do)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = _weights(s, row_smem, slot, m, full_start, full_end, lowest, highest, scale)
    dv = _add_product(dv, p, do)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    delta = row_smem.index(2 * slot + 1).load(gl.SliceLayout(0, dp.type.layout))
    _send((p * (dp - delta[None, :])).to(q.dtype), n, ds_smem, sent, free, ME)
    dk = warpgroup_mma(ds_smem.index(GROUPS * buffer + ME), q, dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=(dv,))
    return dk, dv


@gluon.jit
def _compute(
    given, tensors, walks, scale, ME: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr
):  # fmt: skip
    """What a group does: dk and dv of its 64 keys, and 64 columns of dq."""
    blocks, _ds_smem, _sent, done, to_add = given
    k_smem, v_smem, _q_smem, _do_smem, _row_smem, kv_ready, kv_free, _ready, free = blocks
    tiles, each, H, groups, reach = walks
    T_k, T_q, right, left = reach
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    BLOCK_N: gl.constexpr = GROUPS * KEYS
    OF_KEYS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [KEYS // 16, 1], [16, BLOCK_M, 16]))
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [KEYS // 16, 1], [16, D, 16])
    n, kv_phase = gl.to_tensor(0), gl.to_tensor(0)
    log2_scale = scale * LOG2E
    for i in range(0, _share(tiles, each)):
        row, block = _tile(i, each, gl.cdiv(T_k, BLOCK_N))
        start, end, full_start, full_end = _queries(block, reach, BLOCK_N, BLOCK_M)
        start_n = block * BLOCK_N + ME * KEYS
        place = start_n + gl.arange(0, KEYS, layout=OF_KEYS) + T_q - T_k
        lowest, highest = place - right, gl.where(place < T_q, place + left, -1)
        dk = gl.zeros([KEYS, D], gl.float32, D_LAYOUT)
        dv = gl.zeros([KEYS, D], gl.float32, D_LAYOUT)
        for c in gl.static_range(GROUPS):
            mbarrier.wait(kv_ready.index(c), kv_phase)
        for _group in range(0, groups):
            dk, dv = _step(
                True, start, n, dk, dv, given, full_start, full_end, lowest, highest, log2_scale,
                ME, STAGES, BUFFERS,
            )  # fmt: skip
            n += 1
            for m in range(start + BLOCK_M, end, BLOCK_M):
                dk, dv = _step(
                    False, m, n, dk, dv, given, full_start, full_end, lowest, highest, log2_scale,
                    ME, STAGES, BUFFERS,
                )  # fmt: skip
                n += 1
            dq = _begin_dq(given, n - 1, ME, BUFFERS)
            dk, dq = warpgroup_mma_wait(0, deps=(dk, dq))
            mbarrier.arrive(free.index((n - 1) % STAGES), count=1)
            _hand_over(to_add, dq, n - 1, ME)
        mbarrier.arrive(done.index(0), count=1)
        mbarrier.wait(done.index(0), kv_phase)  # neither group's dq needs these keys any more
        kv_phase ^= 1
        _put_dk_dv(dk * scale, dv, tensors, row, H, start_n, k_smem, v_smem, kv_free, ME)


# Of T_q it must be known whether 16 divides it, as in gpukit.kernels._flash_descriptors.
@gluon.jit(do_not_specialize=["B", *[name for name in SIZES if name != "T_q"], "groups", "each"])
def flash_attention_bwd_two_groups_kernel(
    lse_ptr, delta_ptr, sums_ptr, q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc,
    B, H, groups, T_q, T_k, left, right, each, scale,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk and dv in tiles of 2 x ROWS keys of one of the H heads of k and v, from blocks of BLOCK_M queries of all its query
    heads, and sums for dq: float32 [B, H groups, blocks, BLOCK_M D], zero before. lse and delta [B, H groups, T_q] are
    contiguous."""
    k_smem, v_smem = blocks_like(k_desc, GROUPS), blocks_like(k_desc, GROUPS)
    q_smem, do_smem = blocks_like(q_desc, STAGES), blocks_like(q_desc, STAGES)
    row_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(min(2 * BLOCK_M, 128), 16, 2)
    ds_smem = gl.allocate_shared_memory(k_desc.dtype, [BUFFERS * GROUPS, ROWS, BLOCK_M], SWIZZLED)
    kv_ready, kv_free = barriers(GROUPS, 1), barriers(GROUPS, 1)
    # ready: the copies have come, and lse and delta. free: both groups are done with them, and with their ds of this block.
    gl.static_assert(STAGES == BUFFERS)
    ready, free = barriers(STAGES, 2), barriers(STAGES, GROUPS)
    COUNT: gl.constexpr = 64 * BLOCK_M
    dq_smem = gl.allocate_shared_memory(
        gl.float32, [GROUPS, PIECES, COUNT // PIECES], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    to_add = dq_smem, barriers(GROUPS, 1), barriers(GROUPS, 1)
    sent, done = barriers(BUFFERS, GROUPS), barriers(1, GROUPS)
    hopper.fence_async_shared()
    tiles = gl.cdiv(T_k, GROUPS * ROWS) * B * H
    walks = tiles, each, H, groups, (T_k, T_q, right, left)
    blocks = k_smem, v_smem, q_smem, do_smem, row_smem, kv_ready, kv_free, ready, free
    given = blocks, ds_smem, sent, done, to_add
    fetched = lse_ptr, delta_ptr, k_desc, v_desc, q_desc, do_desc
    results = dk_desc, dv_desc
    gl.warp_specialize(
        [
            (_compute, (given, results, walks, scale, 0, BLOCK_M, STAGES, BUFFERS)),
            (_compute, (given, results, walks, scale, 1, BLOCK_M, STAGES, BUFFERS)),
            (_add, (given, sums_ptr, walks, BLOCK_M)),
            (_fetch_with_rows, (blocks, fetched, walks)),
        ],
        [4, 2, 1], [REGISTERS, 24, 24],
    )  # fmt: skip
