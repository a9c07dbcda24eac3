"""FlashAttention on Hopper, in Gluon (gpukit.kernels.flash_attention chooses it and explains what is computed,
gpukit.kernels._hopper how such a kernel is built).

What it wins, on an H200 with [4, 16, 4096, 128]: forward 810 us, where an ordinary Triton kernel with tensor descriptors
took 1100 and cuDNN 871; dq 1039 us after 1306 by pointers, dk and dv 1913 us after 2080 by descriptors. The tensor cores and
the units that compute exponentials each need about the same time for a block of scores, so both have to work all the time,
side by side:
    Two groups of four warps, with 64 queries each, take turns at the tensor cores; one group's exponentials are computed
    beside the products of the other. With a head size of 64 these are two programs on an SM, of one group each.
    Within a group, the scores of the next block and the product of this one with v are begun together, and the exponentials
    of the next computed while that product still goes on.
A program computes tile after tile, so that the first blocks of the next are fetched while the last one is finished.
Backward has one exponential to three or four products: there it is enough that the groups work side by side.

Sources: Shah et al. 2024, FlashAttention-3, https://arxiv.org/abs/2407.08608;
https://docs.nvidia.com/cuda/parallel-thread-execution/ (mbarrier, wgmma)
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpukit.kernels._attention import LOG2E, SIZES, _ranges
from gpukit.kernels._device import multiprocessors
from gpukit.kernels._flash_descriptors import described
from gpukit.kernels._hopper import barriers, blocks_like, fetch, next_slot, put, registers, swizzled
from gpukit.kernels._launch import launch


# ------------------------------------------------------------------------------------------------ what a program computes
@gluon.jit
def _share(tiles, each):
    """How many of the tiles are this program's: they are dealt out `each` at a time."""
    me, programs = gl.program_id(0), gl.num_programs(0)
    hands = gl.cdiv(tiles, each)
    mine = gl.cdiv(hands - me, programs) * each
    return gl.where((hands - 1) % programs == me, mine - (hands * each - tiles), mine)


@gluon.jit
def _tile(i, each, blocks):
    """This program's i-th tile: which of all B H heads, and which block of its queries. If causal, later queries see more
    keys: blocks come in turn from the end and from the beginning, so that two in a row are as much work as any other two."""
    index = (gl.program_id(0) + i // each * gl.num_programs(0)) * each + i % each
    row, at = index // blocks, index % blocks
    return row, gl.where(at % 2 == 0, blocks - 1 - at // 2, at // 2)


@gluon.jit
def _walk(start_m, reach, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The blocks of keys that the queries from start_m on see: how many, and what `_key` asks. Those with a mask come first."""
    T_q, T_k, left, right = reach
    first = start_m + T_k - T_q
    last = gl.minimum(start_m + BLOCK_M, T_q) - 1 + T_k - T_q
    start, end, full_start, full = _ranges(first, last, left, right, T_k, BLOCK_N)
    masked = gl.cdiv(gl.maximum(end - full - start, 0), BLOCK_N)
    # Queries that see nothing get one block all the same, of which the mask leaves nothing.
    return gl.maximum(masked + full // BLOCK_N, 1), (start, full_start, full, masked)


@gluon.jit
def _key(j, walk, BLOCK_N: gl.constexpr):
    """The first key of the j-th block."""
    start, full_start, full, masked = walk
    n = start + j * BLOCK_N
    return gl.where(j < masked, n + gl.where(n >= full_start, full, 0), full_start + (j - masked) * BLOCK_N)


# -------------------------------------------------------------------------------------------------------------- fetching
@gluon.jit
def _fetch_all(
    given, walks,
    CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What one warp does: for each tile the queries, and then slot after slot, as soon as all consumers are done with what
    was in it."""
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_ready, q_free, ready, free = given
    tiles, each, H, groups, reach = walks
    T_q = reach[0]
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    # A new barrier counts as if the phase before, 1, were over: all slots are free.
    slot, phase, q_phase = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(1)
    for i in range(0, _share(tiles, each)):
        row, block = _tile(i, each, gl.cdiv(T_q, BLOCK_M))
        batch, head = row // H, row % H
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_free.index(c), q_phase)
            mbarrier.expect(q_ready.index(c), q_desc.block_type.nbytes)
            fetch(q_desc, [batch, head, block * BLOCK_M + c * ROWS, 0], q_ready.index(c), q_smem.index(c))
        q_phase ^= 1
        total, walk = _walk(block * BLOCK_M, reach, BLOCK_M, BLOCK_N)
        before = gl.to_tensor(0)
        # A slot gets a block of keys and the values of the block before it: these are used at the same time.
        for j in range(0, total + 1):
            n = _key(j, walk, BLOCK_N)
            mbarrier.wait(free.index(slot), phase)
            if (j == 0) | (j == total):
                mbarrier.expect(ready.index(slot), k_desc.block_type.nbytes)
            else:
                mbarrier.expect(ready.index(slot), 2 * k_desc.block_type.nbytes)
            fetch(k_desc, [batch, head // groups, n, 0], ready.index(slot), k_smem.index(slot), pred=j < total)
            fetch(v_desc, [batch, head // groups, before, 0], ready.index(slot), v_smem.index(slot), pred=j > 0)
            before = n
            slot, phase = next_slot(slot, phase, STAGES)


# ------------------------------------------------------------------------------------------------------------- computing
@gluon.jit
def _scores(q, k):
    """Begins q k^T. The layout says which thread holds what of the result: here each warp has 16 rows."""
    ROWS: gl.constexpr = q.shape[0]
    BLOCK_N: gl.constexpr = k.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_product(acc, p, v):
    """Begins acc + p v, with p from registers: the scores' layout is, but for its name, that of an operand."""
    p = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _unseen(s, n, lowest, highest):
    """s with -inf for the keys that a query does not see; its first column is key n."""
    offs = n + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
    return gl.where((offs >= lowest[:, None]) & (offs <= highest[:, None]), s, -float("inf"))


@gluon.constexpr_function
def _sums_layout(rows):
    """For [rows, 4]: four threads share two rows of the scores, 8 rows apart, and each has a column here."""
    warps = [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [rows, 4])


@gluon.jit
def _softmax_step(s, l, m, scale):
    """As gpukit.kernels._attention._softmax_step, but for l [rows, 4], what each of the four threads that share a row has
    of its sum: adding up these four can wait until the end."""
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale)
    p = gl.exp2(s * scale - m_new[:, None])
    shrink = gl.exp2(m - m_new)
    sums = gl.sum(gl.sum(gl.reshape(p, [s.shape[0], s.shape[1] // 8, 4, 2]), axis=3), axis=1)
    l = l * gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))[:, None]
    l += gl.convert_layout(sums, l.type.layout)
    return p, l, m_new, shrink


@gluon.jit
def _step(
    MASKED: gl.constexpr, j, acc, l, m, p, slot, phase, turn, q, ring, turns, walk, lowest, highest, scale,
    ME: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Block j's scores and exponentials, and beside them the product of block j - 1, whose exponentials are p, with its
    values."""
    k_smem, v_smem, ready, free = ring
    BLOCK_N: gl.constexpr = p.shape[1]
    D: gl.constexpr = q.shape[1]
    if CONSUMERS > 1:
        mbarrier.wait(turns.index(ME), turn)
    s = _scores(q, k_smem.index(slot).reshape([BLOCK_N, D]))
    acc = _add_product(acc, p, v_smem.index(slot).reshape([BLOCK_N, D]))
    if CONSUMERS > 1:
        mbarrier.arrive(turns.index((ME + 1) % CONSUMERS), count=1)
    s = warpgroup_mma_wait(1, deps=(s,))  # all but the last product begun are done
    if MASKED:
        s = _unseen(s, _key(j, walk, BLOCK_N), lowest, highest)
    p, l, m, shrink = _softmax_step(s, l, m, scale)
    # The next slot is needed soon. Waiting for it here keeps ptxas from moving the wait for the product up to the one for the
    # scores: the exponentials would come after both.
    last = slot
    slot, phase = next_slot(slot, phase, STAGES)
    mbarrier.wait(ready.index(slot), phase)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free.index(last), count=1)
    acc *= gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, l, m, p, slot, phase, turn ^ 1


@gluon.jit
def _compute(
    given, walks, scale,
    ME: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """What a group of warps does: ROWS queries of each tile."""
    lse_ptr, o_desc, q_smem, o_smem, k_smem, v_smem, q_ready, q_free, ready, free, turns = given
    tiles, each, H, _groups, reach = walks
    T_q, T_k, left, right = reach
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, D, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    ring = k_smem, v_smem, ready, free
    slot, phase, q_phase = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    turn = gl.to_tensor(1 if ME == 0 else 0)  # the first turn is the first consumer's, which waits for nobody
    scale *= LOG2E
    for i in range(0, _share(tiles, each)):
        row, block = _tile(i, each, gl.cdiv(T_q, BLOCK_M))
        total, walk = _walk(block * BLOCK_M, reach, BLOCK_M, BLOCK_N)
        start_m = block * BLOCK_M + ME * ROWS
        offs_m = start_m + gl.arange(0, ROWS, layout=OF_ROWS)
        place = offs_m + T_k - T_q
        lowest, highest = place - left, gl.minimum(place + right, T_k - 1)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        l = gl.zeros([ROWS, 4], gl.float32, _sums_layout(ROWS))
        m = gl.full([ROWS], -3.4028234663852886e38, gl.float32, OF_ROWS)

        mbarrier.wait(q_ready.index(ME), q_phase)
        q_phase ^= 1
        q = q_smem.index(ME).reshape([ROWS, D])
        mbarrier.wait(ready.index(slot), phase)
        s = warpgroup_mma_wait(0, deps=(_scores(q, k_smem.index(slot).reshape([BLOCK_N, D])),))
        mbarrier.arrive(free.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
        # The first block has a mask if any has one.
        p, l, m, _shrink = _softmax_step(_unseen(s, _key(0, walk, BLOCK_N), lowest, highest), l, m, scale)
        mbarrier.wait(ready.index(slot), phase)
        masked = walk[3]
        for j in range(1, masked):
            acc, l, m, p, slot, phase, turn = _step(
                True, j, acc, l, m, p, slot, phase, turn, q, ring, turns, walk, lowest, highest, scale,
                ME, CONSUMERS, STAGES,
            )  # fmt: skip
        for j in range(gl.maximum(masked, 1), total):
            acc, l, m, p, slot, phase, turn = _step(
                False, j, acc, l, m, p, slot, phase, turn, q, ring, turns, walk, lowest, highest, scale,
                ME, CONSUMERS, STAGES,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(ME), count=1)  # the next tile's queries may come
        acc = _add_product(acc, p, v_smem.index(slot).reshape([BLOCK_N, D]))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)

        l_row = gl.convert_layout(gl.sum(l, axis=1), OF_ROWS)
        gl.store(lse_ptr + row.to(gl.int64) * T_q + offs_m, (m + gl.log2(l_row)) / LOG2E, mask=offs_m < T_q)
        inverse = gl.convert_layout(1.0 / gl.where(l_row == 0, 1.0, l_row), gl.SliceLayout(1, O_LAYOUT))
        tma.store_wait(0)  # what the tile before left in o_smem has been read
        o_smem.index(ME).reshape([ROWS, D]).store((acc * inverse[:, None]).to(o_smem.dtype))
        hopper.fence_async_shared()  # the TMA unit sees what threads wrote
        put(o_desc, [row // H, row % H, start_m, 0], o_smem.index(ME))
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------------------------- kernel
@gluon.jit(do_not_specialize=["B", *SIZES, "groups", "each"])
def flash_attention_fwd_hopper_kernel(
    lse_ptr, q_desc, k_desc, v_desc, o_desc,
    B, H, groups, T_q, T_k, left, right, each, scale,
    D: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles of CONSUMERS x ROWS queries of one head, shared out among the programs, `each` at a time. lse [B, H, T_q] is
    contiguous. REGISTERS: of a consumer's thread; the fetching warp gives up those it does not need."""
    q_smem = blocks_like(q_desc, CONSUMERS)
    o_smem = blocks_like(o_desc, CONSUMERS)
    k_smem = blocks_like(k_desc, STAGES)
    v_smem = blocks_like(v_desc, STAGES)
    q_ready, q_free, turns = barriers(CONSUMERS, 1), barriers(CONSUMERS, 1), barriers(CONSUMERS, 1)
    ready, free = barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    hopper.fence_async_shared()

    tiles = gl.cdiv(T_q, CONSUMERS * ROWS) * B * H
    fetched = q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_ready, q_free, ready, free
    given = lse_ptr, o_desc, q_smem, o_smem, k_smem, v_smem, q_ready, q_free, ready, free, turns
    walks = tiles, each, H, groups, (T_q, T_k, left, right)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_compute, (given, walks, scale, 0, 1, ROWS, BLOCK_N, D, STAGES)),
                (_fetch_all, (fetched, walks, 1, ROWS, BLOCK_N, STAGES)),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (given, walks, scale, 0, 2, ROWS, BLOCK_N, D, STAGES)),
                (_compute, (given, walks, scale, 1, 2, ROWS, BLOCK_N, D, STAGES)),
                (_fetch_all, (fetched, walks, 2, ROWS, BLOCK_N, STAGES)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- backward
@gluon.jit
def _fetch_pairs(
    given, walks,
    CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `_fetch_all`: for each tile ROWS rows of a and b for each consumer, then block after block of x and y, of `repeat`
    heads one after the other. For dq a and b are q and do; for dk and dv they are k and v."""
    a_desc, b_desc, x_desc, y_desc, a_smem, b_smem, x_smem, y_smem, own_ready, own_free, ready, free = given
    tiles, each, H, repeat, shared, reach = walks
    TILE: gl.constexpr = CONSUMERS * ROWS
    slot, phase, own_phase = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(1)
    for i in range(0, _share(tiles, each)):
        row, block = _tile(i, each, gl.cdiv(reach[0], TILE))
        batch, head = row // H, row % H
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(own_free.index(c), own_phase)
            mbarrier.expect(own_ready.index(c), 2 * a_desc.block_type.nbytes)
            fetch(a_desc, [batch, head, block * TILE + c * ROWS, 0], own_ready.index(c), a_smem.index(c))
            fetch(b_desc, [batch, head, block * TILE + c * ROWS, 0], own_ready.index(c), b_smem.index(c))
        own_phase ^= 1
        total, walk = _walk(block * TILE, reach, TILE, BLOCK)
        for j in range(0, repeat * total):
            first = _key(j % total, walk, BLOCK)
            head_xy = head * repeat // shared + j // total
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(ready.index(slot), 2 * x_desc.block_type.nbytes)
            fetch(x_desc, [batch, head_xy, first, 0], ready.index(slot), x_smem.index(slot))
            fetch(y_desc, [batch, head_xy, first, 0], ready.index(slot), y_smem.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


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
        kv_phase ^= 1
        k, v = k_smem.index(ME).reshape([ROWS, D]), v_smem.index(ME).reshape([ROWS, D])
        masked = total - walk[2] // BLOCK_M
        for group in range(0, groups):
            first = (row * groups + group).to(gl.int64) * T_q
            for j in range(0, masked):
                dk, dv, slot, phase = _step_dkv(
                    True, _key(j, walk, BLOCK_M), dk, dv, slot, phase, k, v, lse_ptr + first, delta_ptr + first, T_q, ring,
                    lowest, highest, scale * LOG2E, BLOCK_M, STAGES,
                )  # fmt: skip
            for j in range(masked, total):
                dk, dv, slot, phase = _step_dkv(
                    False, _key(j, walk, BLOCK_M), dk, dv, slot, phase, k, v, lse_ptr + first, delta_ptr + first, T_q, ring,
                    lowest, highest, scale * LOG2E, BLOCK_M, STAGES,
                )  # fmt: skip
        k.store((dk * scale).to(k.dtype))  # the block itself is done with
        v.store(dv.to(v.dtype))
        hopper.fence_async_shared()
        put(dk_desc, [row // H, row % H, start_n, 0], k_smem.index(ME))
        put(dv_desc, [row // H, row % H, start_n, 0], v_smem.index(ME))
        tma.store_wait(0)
        mbarrier.arrive(kv_free.index(ME), count=1)


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


# -------------------------------------------------------------------------------------------------------------- launcher
class HopperConfig(NamedTuple):
    """CONSUMERS groups of warps with 64 queries each, blocks of BLOCK_N keys, slots for them, programs that share an SM. For
    dk and dv exchange keys and queries."""

    CONSUMERS: int
    BLOCK_N: int
    STAGES: int
    PER_SM: int


# By the head size; 227 KiB of shared memory and 65,536 registers for the programs on an SM.
FORWARD = {64: HopperConfig(1, 128, 2, 2), 128: HopperConfig(2, 128, 2, 1)}
BACKWARD_Q = {64: HopperConfig(1, 64, 4, 2), 128: HopperConfig(2, 64, 4, 1)}
BACKWARD_KV = {64: HopperConfig(1, 64, 4, 2), 128: HopperConfig(2, 32, 8, 1)}
ROWS = 64
SHARED = swizzled(rank=4)


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(*described(x, rows), SHARED)


def _constants(config: HopperConfig) -> dict:
    average, consumer = registers(config.CONSUMERS, config.PER_SM)
    return {
        "CONSUMERS": config.CONSUMERS, "ROWS": ROWS, "BLOCK_N": config.BLOCK_N, "STAGES": config.STAGES,
        "REGISTERS": consumer, "num_warps": 4, "maxnreg": average,
    }  # fmt: skip


def _programs(config: HopperConfig, x: Tensor) -> tuple[int, int]:
    """How many programs for tiles of x [B, H, T, D], and how many tiles a program gets at a time."""
    B, H, T, _ = x.shape
    tiles, places = -(-T // (config.CONSUMERS * ROWS)) * B * H, multiprocessors(x.device) * config.PER_SM
    each = 2 if tiles >= 2 * places else 1  # one long and one short walk, where there are enough of both
    return min(-(-tiles // each), places), each


def forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, left: int, right: int, scale: float) -> None:
    """Fill o and lse. All but lse are `describable` (gpukit.kernels._flash_descriptors), in 16 bits, with a head size of
    FORWARD."""
    B, H, T_q, D = q.shape
    config = FORWARD[D]
    programs, each = _programs(config, q)
    launch(
        flash_attention_fwd_hopper_kernel, programs,
        lse, _descriptor(q, ROWS), _descriptor(k, config.BLOCK_N), _descriptor(v, config.BLOCK_N), _descriptor(o, ROWS),
        B, H, H // k.shape[1], T_q, k.shape[2], left, right, each, scale, D=D, **_constants(config),
    )  # fmt: skip


def backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    left: int, right: int, scale: float,
) -> None:  # fmt: skip
    """Fill dq, dk and dv. lse and delta are contiguous, the others as in `forward`."""
    B, H, T_q, D = q.shape
    _, H_kv, T_k, _ = k.shape
    config = BACKWARD_Q[D]
    programs, each = _programs(config, q)
    launch(
        flash_attention_bwd_q_hopper_kernel, programs,
        lse, delta, _descriptor(q, ROWS), _descriptor(do, ROWS), _descriptor(k, config.BLOCK_N),
        _descriptor(v, config.BLOCK_N), _descriptor(dq, ROWS),
        B, H, H // H_kv, T_q, T_k, left, right, each, scale, D=D, **_constants(config),
    )  # fmt: skip
    config = BACKWARD_KV[D]
    programs, each = _programs(config, k)
    launch(
        flash_attention_bwd_kv_hopper_kernel, programs,
        lse, delta, _descriptor(q, config.BLOCK_N), _descriptor(do, config.BLOCK_N), _descriptor(k, ROWS),
        _descriptor(v, ROWS), _descriptor(dk, ROWS), _descriptor(dv, ROWS),
        B, H_kv, H // H_kv, T_q, T_k, left, right, each, scale, D=D, **_constants(config),
    )  # fmt: skip
