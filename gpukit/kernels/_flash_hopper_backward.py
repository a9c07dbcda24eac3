"""The gradients of FlashAttention on Hopper, in Gluon (gpukit.kernels._flash_hopper launches them, and says what it wins;
gpukit.kernels._flash_backward explains what is computed).

Backward has one exponential to three or four products: here it is enough that the groups work side by side.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from gpukit.kernels._attention import LOG2E, SIZES
from gpukit.kernels._flash_hopper_parts import (
    _add_product,
    _fetch_pairs,
    _key,
    _put_dk_dv,
    _scores,
    _share,
    _tile,
    _unseen,
    _walk,
)
from gpukit.kernels._hopper import barriers, blocks_like, next_slot, put


@gluon.jit
def _ds(MASKED: gl.constexpr, s, dp, lse, delta, n, lowest, highest, scale):
    p = gl.exp2((_unseen(s, n, lowest, highest) if MASKED else s) * scale - lse[:, None])
    return p * (dp - delta[:, None])


@gluon.jit
def _step_dq(
    MASKED: gl.constexpr, j, total, dq, ds, slot, phase, last, turn, q, do, ring, turns, walk, lse, delta,
    lowest, highest, scale, ME: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Block j's ds, and beside it the product of block j - 1's with its keys, which lie in the slot `last`."""
    k_smem, v_smem, ready, free = ring
    BLOCK_N: gl.constexpr = ds.shape[1]
    D: gl.constexpr = q.shape[1]
    if CONSUMERS > 1:
        mbarrier.wait(turns.index(ME), turn)
    s = _scores(q, k_smem.index(slot).reshape([BLOCK_N, D]))
    dp = _scores(do, v_smem.index(slot).reshape([BLOCK_N, D]))
    dq = _add_product(dq, ds, k_smem.index(last).reshape([BLOCK_N, D]))
    if CONSUMERS > 1:
        mbarrier.arrive(turns.index((ME + 1) % CONSUMERS), count=1)
    s, dp = warpgroup_mma_wait(1, deps=(s, dp))
    ds = _ds(MASKED, s, dp, lse, delta, _key(j, walk, BLOCK_N), lowest, highest, scale)
    done, last = last, slot
    slot, phase = next_slot(slot, phase, STAGES)
    mbarrier.wait(ready.index(slot), phase, pred=j + 1 < total)  # here because of ptxas, as in `_step`
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.arrive(free.index(done), count=1)
    return dq, ds, slot, phase, last, turn ^ 1


@gluon.jit
def _compute_dq(
    given, walks, scale,
    ME: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    lse_ptr, delta_ptr, dq_desc, q_smem, do_smem, dq_smem, k_smem, v_smem, q_ready, q_free, ready, free, turns = given
    tiles, each, H, reach = walks
    T_q, T_k, left, right = reach
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    ring = k_smem, v_smem, ready, free
    slot, phase, q_phase = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    turn = gl.to_tensor(1 if ME == 0 else 0)
    log2_scale = scale * LOG2E
    for i in range(0, _share(tiles, each)):
        row, block = _tile(i, each, gl.cdiv(T_q, BLOCK_M))
        total, walk = _walk(block * BLOCK_M, reach, BLOCK_M, BLOCK_N)
        start_m = block * BLOCK_M + ME * ROWS
        offs_m = start_m + gl.arange(0, ROWS, layout=OF_ROWS)
        place = offs_m + T_k - T_q
        lowest, highest = place - left, gl.minimum(place + right, T_k - 1)
        lse_row, delta_row = lse_ptr + row.to(gl.int64) * T_q, delta_ptr + row.to(gl.int64) * T_q
        lse = gl.load(lse_row + offs_m, mask=offs_m < T_q, other=0.0) * LOG2E
        lse = gl.where(lse == -float("inf"), 0.0, lse)  # sees nothing: exp(-inf - 0) is 0, exp(-inf + inf) NaN
        delta = gl.load(delta_row + offs_m, mask=offs_m < T_q, other=0.0)
        dq = gl.zeros([ROWS, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, D, 16]))

        mbarrier.wait(q_ready.index(ME), q_phase)
        q_phase ^= 1
        q, do = q_smem.index(ME).reshape([ROWS, D]), do_smem.index(ME).reshape([ROWS, D])
        mbarrier.wait(ready.index(slot), phase)
        s = _scores(q, k_smem.index(slot).reshape([BLOCK_N, D]))
        dp = _scores(do, v_smem.index(slot).reshape([BLOCK_N, D]))
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        ds = _ds(True, s, dp, lse, delta, _key(0, walk, BLOCK_N), lowest, highest, log2_scale)
        last = slot
        slot, phase = next_slot(slot, phase, STAGES)
        mbarrier.wait(ready.index(slot), phase, pred=total > 1)
        masked = walk[3]
        for j in range(1, masked):
            dq, ds, slot, phase, last, turn = _step_dq(
                True, j, total, dq, ds, slot, phase, last, turn, q, do, ring, turns, walk, lse, delta,
                lowest, highest, log2_scale, ME, CONSUMERS, STAGES,
            )  # fmt: skip
        for j in range(gl.maximum(masked, 1), total):
            dq, ds, slot, phase, last, turn = _step_dq(
                False, j, total, dq, ds, slot, phase, last, turn, q, do, ring, turns, walk, lse, delta,
                lowest, highest, log2_scale, ME, CONSUMERS, STAGES,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(ME), count=1)
        dq = _add_product(dq, ds, k_smem.index(last).reshape([BLOCK_N, D]))
        dq = warpgroup_mma_wait(0, deps=(dq,))
        mbarrier.arrive(free.index(last), count=1)
        tma.store_wait(0)
        dq_smem.index(ME).reshape([ROWS, D]).store((dq * scale).to(dq_smem.dtype))
        hopper.fence_async_shared()
        put(dq_desc, [row // H, row % H, start_m, 0], dq_smem.index(ME))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["B", *SIZES, "groups", "each"])
def flash_attention_bwd_q_hopper_kernel(
    lse_ptr, delta_ptr, q_desc, do_desc, k_desc, v_desc, dq_desc,
    B, H, groups, T_q, T_k, left, right, each, scale,
    D: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq in tiles as the forward kernel's. lse and delta [B, H, T_q] are contiguous."""
    q_smem = blocks_like(q_desc, CONSUMERS)
    do_smem = blocks_like(q_desc, CONSUMERS)
    dq_smem = blocks_like(q_desc, CONSUMERS)
    k_smem = blocks_like(k_desc, STAGES)
    v_smem = blocks_like(k_desc, STAGES)
    q_ready, q_free, turns = barriers(CONSUMERS, 1), barriers(CONSUMERS, 1), barriers(CONSUMERS, 1)
    ready, free = barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    hopper.fence_async_shared()
    tiles = gl.cdiv(T_q, CONSUMERS * ROWS) * B * H
    reach = T_q, T_k, left, right
    fetched = q_desc, do_desc, k_desc, v_desc, q_smem, do_smem, k_smem, v_smem, q_ready, q_free, ready, free
    fetching = tiles, each, H, gl.to_tensor(1), groups, reach
    given = lse_ptr, delta_ptr, dq_desc, q_smem, do_smem, dq_smem, k_smem, v_smem, q_ready, q_free, ready, free, turns
    walks = tiles, each, H, reach
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_compute_dq, (given, walks, scale, 0, 1, ROWS, BLOCK_N, D, STAGES)),
                (_fetch_pairs, (fetched, fetching, 1, ROWS, BLOCK_N, STAGES)),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute_dq, (given, walks, scale, 0, 2, ROWS, BLOCK_N, D, STAGES)),
                (_compute_dq, (given, walks, scale, 1, 2, ROWS, BLOCK_N, D, STAGES)),
                (_fetch_pairs, (fetched, fetching, 2, ROWS, BLOCK_N, STAGES)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip


@gluon.jit
def _step_dkv(
    MASKED: gl.constexpr, m, dk, dv, slot, phase, k, v, lse_row, delta_row, T_q, ring, lowest, highest, scale,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the queries from m on give to dk and dv. Matrices are [keys, queries]."""
    q_smem, do_smem, ready, free = ring
    D: gl.constexpr = k.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [k.shape[0] // 16, 1], [16, BLOCK_M, 16])
    offs_m = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT))
    lse = gl.load(lse_row + offs_m, mask=offs_m < T_q, other=float("inf")) * LOG2E
    mbarrier.wait(ready.index(slot), phase)
    q, do = q_smem.index(slot).reshape([BLOCK_M, D]), do_smem.index(slot).reshape([BLOCK_M, D])
    s = _scores(k, q)
    dp = _scores(v, do)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = gl.exp2(s * scale - lse[None, :])
    if MASKED:
        p = gl.where((offs_m[None, :] >= lowest[:, None]) & (offs_m[None, :] <= highest[:, None]), p, 0.0)
    dv = _add_product(dv, p, do)
    delta = gl.load(delta_row + offs_m, mask=offs_m < T_q, other=0.0)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    dk = _add_product(dk, p * (dp - delta[None, :]), q)
    dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
    mbarrier.arrive(free.index(slot), count=1)
    slot, phase = next_slot(slot, phase, STAGES)
    return dk, dv, slot, phase


@gluon.jit
def _compute_dkv(
    given, walks, scale,
    ME: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    lse_ptr, delta_ptr, dk_desc, dv_desc, q_smem, do_smem, k_smem, v_smem, kv_ready, kv_free, ready, free = given
    tiles, each, H, groups, reach = walks
    T_k, T_q, right, left = reach
    BLOCK_N: gl.constexpr = CONSUMERS * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, D, 16])
    ring = q_smem, do_smem, ready, free
    slot, phase, kv_phase = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for i in range(0, _share(tiles, each)):
        row, block = _tile(i, each, gl.cdiv(T_k, BLOCK_N))
        total, walk = _walk(block * BLOCK_N, reach, BLOCK_N, BLOCK_M)
        start_n = block * BLOCK_N + ME * ROWS
        place = start_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) + T_q - T_k
        lowest, highest = place - right, place + left
        dk = gl.zeros([ROWS, D], gl.float32, D_LAYOUT)
        dv = gl.zeros([ROWS, D], gl.float32, D_LAYOUT)
        mbarrier.wait(kv_ready.index(ME), kv_phase)
        k, v = k_smem.index(ME).reshape([ROWS, D]), v_smem.index(ME).reshape([ROWS, D])
        masked = total - walk[2] // BLOCK_M
        for group in range(0, groups):
            first = (row * groups + group).to(gl.int64) * T_q
            for j in range(0, masked):
                dk, dv, slot, phase = _step_dkv(
                    True, _key(j, walk, BLOCK_M), dk, dv, slot, phase, k, v, lse_ptr + first, delta_ptr + first,
                    T_q, ring, lowest, highest, scale * LOG2E, BLOCK_M, STAGES,
                )  # fmt: skip
            for j in range(masked, total):
                dk, dv, slot, phase = _step_dkv(
                    False, _key(j, walk, BLOCK_M), dk, dv, slot, phase, k, v, lse_ptr + first, delta_ptr + first,
                    T_q, ring, lowest, highest, scale * LOG2E, BLOCK_M, STAGES,
                )  # fmt: skip
        kv_phase ^= 1
        _put_dk_dv(dk * scale, dv, (dk_desc, dv_desc), row, H, start_n, k_smem, v_smem, kv_free, ME)


# Of T_q it must be known whether 16 divides it, as in gpukit.kernels._flash_descriptors.
@gluon.jit(do_not_specialize=["B", *[name for name in SIZES if name != "T_q"], "groups", "each"])
def flash_attention_bwd_kv_hopper_kernel(
    lse_ptr, delta_ptr, q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc,
    B, H, groups, T_q, T_k, left, right, each, scale,
    D: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk and dv in tiles of CONSUMERS x ROWS keys of one of the H heads of k and v, from blocks of BLOCK_N queries of all
    its query heads. lse and delta [B, H groups, T_q] are contiguous."""
    k_smem = blocks_like(k_desc, CONSUMERS)
    v_smem = blocks_like(k_desc, CONSUMERS)
    q_smem = blocks_like(q_desc, STAGES)
    do_smem = blocks_like(q_desc, STAGES)
    kv_ready, kv_free = barriers(CONSUMERS, 1), barriers(CONSUMERS, 1)
    ready, free = barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    hopper.fence_async_shared()
    tiles = gl.cdiv(T_k, CONSUMERS * ROWS) * B * H
    reach = T_k, T_q, right, left
    fetched = k_desc, v_desc, q_desc, do_desc, k_smem, v_smem, q_smem, do_smem, kv_ready, kv_free, ready, free
    fetching = tiles, each, H, groups, gl.to_tensor(1), reach
    given = lse_ptr, delta_ptr, dk_desc, dv_desc, q_smem, do_smem, k_smem, v_smem, kv_ready, kv_free, ready, free
    walks = tiles, each, H, groups, reach
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_compute_dkv, (given, walks, scale, 0, 1, ROWS, BLOCK_N, D, STAGES)),
                (_fetch_pairs, (fetched, fetching, 1, ROWS, BLOCK_N, STAGES)),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute_dkv, (given, walks, scale, 0, 2, ROWS, BLOCK_N, D, STAGES)),
                (_compute_dkv, (given, walks, scale, 1, 2, ROWS, BLOCK_N, D, STAGES)),
                (_fetch_pairs, (fetched, fetching, 2, ROWS, BLOCK_N, STAGES)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
