"""The forward kernel of FlashAttention on Hopper, in Gluon (gpukit.kernels._flash_hopper launches it and says how it works).

Each row's exponentials are those of its scores less a reference. That is the largest score so far, as in gpukit.kernels._attention,
or, with FIXED, the largest of the row's first block: then the blocks after it need no maxima, and what was added up before need
not shrink. Any reference gives the same result as long as nothing overflows and the first block is not far above all others,
since dividing by the sum takes it out again, and 16 bits with float32's exponents hold a weight of 2^60 as well as one of 1.
A tile notes in `failed` where its sums do not show that this was so. A second launch with running references then computes
again what is needed; it ends at once where no tile of a program failed.

Why this is faster: exponentials are computed beside the products, and multiply-adds are not. On an H200 a loop of products and
multiply-adds takes as long as one of the products and one of the multiply-adds together, even if other programs on the same SM
could fill the time. So each instruction that is left out saves time: a block of 64 x 128 scores needs about 230 of a thread
instead of 330.

Source: Hong et al. 2023, FlashDecoding++, https://arxiv.org/abs/2311.01282 (one reference for all, and what to do when it fails)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from gpukit.kernels._attention import LOG2E, SIZES
from gpukit.kernels._flash_hopper_parts import _add_product, _key, _scores, _share, _tile, _unseen, _walk
from gpukit.kernels._hopper import barriers, blocks_like, fetch, next_slot, put


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
LEAST = gl.constexpr(-3.4028234663852886e38)  # of float32: the running reference of a row that has seen nothing
LARGEST = gl.constexpr(2.0**64)  # sum that is trusted: far from the overflow of what it is multiplied with


@gluon.constexpr_function
def _sums_layout(rows):
    """For [rows, 4]: four threads share two rows of the scores, 8 rows apart, and each has a column here."""
    warps = [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [rows, 4])


@gluon.jit
def _added_up(l, p):
    """l + p's sums: l [rows, 4] is what each of the four threads that share a row has of its sum. Adding up these four can wait
    until the end."""
    sums = gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), axis=3), axis=1)
    return l + gl.convert_layout(sums, l.type.layout)


@gluon.jit
def _softmax_step(s, l, m, scale):
    """As gpukit.kernels._attention._softmax_step, but for l, which is that of `_added_up`."""
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale)
    p = gl.exp2(s * scale - m_new[:, None])
    shrink = gl.exp2(m - m_new)
    l = l * gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))[:, None]
    return p, _added_up(l, p), m_new, shrink


@gluon.jit
def _step(
    MASKED: gl.constexpr, j, acc, l, m, p, slot, phase, turn, q, ring, turns, walk, lowest, highest, scale,
    ME: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Block j's scores and exponentials, and beside them the product of block j - 1, whose exponentials are p, with its
    values."""
    k_smem, v_smem, ready, free = ring
    BLOCK_N: gl.constexpr = p.shape[1]
    D: gl.constexpr = q.shape[1]
    TURNS: gl.constexpr = CONSUMERS > 1 and D > 64  # with shorter products they only cost time
    if TURNS:
        mbarrier.wait(turns.index(ME), turn)
    s = _scores(q, k_smem.index(slot).reshape([BLOCK_N, D]))
    acc = _add_product(acc, p, v_smem.index(slot).reshape([BLOCK_N, D]))
    if TURNS:
        mbarrier.arrive(turns.index((ME + 1) % CONSUMERS), count=1)
    s = warpgroup_mma_wait(1, deps=(s,))  # all but the last product begun are done
    if MASKED:
        s = _unseen(s, _key(j, walk, BLOCK_N), lowest, highest)
    if FIXED:
        p = gl.exp2(s * scale - m[:, None])
        l = _added_up(l, p)
    else:
        p, l, m, shrink = _softmax_step(s, l, m, scale)
    # The next slot is needed soon. Waiting for it here keeps ptxas from moving the wait for the product up to the one for the
    # scores: the exponentials would come after both.
    last = slot
    slot, phase = next_slot(slot, phase, STAGES)
    mbarrier.wait(ready.index(slot), phase)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free.index(last), count=1)
    if not FIXED:
        acc *= gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, l, m, p, slot, phase, turn ^ 1


@gluon.jit
def _compute(
    given, walks, scale,
    ME: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """What a group of warps does: ROWS queries of each tile."""
    lse_ptr, failed_ptr, o_desc, q_smem, o_smem, k_smem, v_smem, q_ready, q_free, ready, free, turns = given
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
        m = gl.full([ROWS], LEAST, gl.float32, OF_ROWS)

        mbarrier.wait(q_ready.index(ME), q_phase)
        q_phase ^= 1
        q = q_smem.index(ME).reshape([ROWS, D])
        if FIXED and D == 64:
            q = q.load(gl.DotOperandLayout(0, LAYOUT, 2))  # there are registers enough
        mbarrier.wait(ready.index(slot), phase)
        s = warpgroup_mma_wait(0, deps=(_scores(q, k_smem.index(slot).reshape([BLOCK_N, D])),))
        mbarrier.arrive(free.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
        # The first block has a mask if any has one.
        p, l, m, _shrink = _softmax_step(_unseen(s, _key(0, walk, BLOCK_N), lowest, highest), l, m, scale)
        if FIXED:
            m = gl.where(m == LEAST, 0.0, m)  # the row sees nothing of this block
        mbarrier.wait(ready.index(slot), phase)
        masked = walk[3]
        for j in range(1, masked):
            acc, l, m, p, slot, phase, turn = _step(
                True, j, acc, l, m, p, slot, phase, turn, q, ring, turns, walk, lowest, highest, scale,
                ME, CONSUMERS, STAGES, FIXED,
            )  # fmt: skip
        for j in range(gl.maximum(masked, 1), total):
            acc, l, m, p, slot, phase, turn = _step(
                False, j, acc, l, m, p, slot, phase, turn, q, ring, turns, walk, lowest, highest, scale,
                ME, CONSUMERS, STAGES, FIXED,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(ME), count=1)  # the next tile's queries may come
        acc = _add_product(acc, p, v_smem.index(slot).reshape([BLOCK_N, D]))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)

        l_row = gl.convert_layout(gl.sum(l, axis=1), OF_ROWS)
        if FIXED:
            finite = gl.convert_layout(gl.sum(acc * 0.0, axis=1), OF_ROWS) == 0.0  # inf * 0 is NaN
            trusted = finite & (l_row >= 0.5) & (l_row <= LARGEST)  # also past the last query, where scores are 0
            failed = gl.max(gl.where(trusted, 0, 1), axis=0)
            gl.store(failed_ptr + row * gl.cdiv(T_q, ROWS) + start_m // ROWS, failed, mask=start_m < T_q)
        gl.store(lse_ptr + row.to(gl.int64) * T_q + offs_m, (m + gl.log2(l_row)) / LOG2E, mask=offs_m < T_q)
        inverse = gl.convert_layout(1.0 / gl.where(l_row == 0, 1.0, l_row), gl.SliceLayout(1, O_LAYOUT))
        tma.store_wait(0)  # what the tile before left in o_smem has been read
        o_smem.index(ME).reshape([ROWS, D]).store((acc * inverse[:, None]).to(o_smem.dtype))
        hopper.fence_async_shared()  # the TMA unit sees what threads wrote
        put(o_desc, [row // H, row % H, start_m, 0], o_smem.index(ME))
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------------------------- kernel
@gluon.jit
def _failed(failed_ptr, tiles, each, T_q, CONSUMERS: gl.constexpr, ROWS: gl.constexpr):
    """Whether one of this program's tiles failed, of which `failed` has a number for each ROWS queries."""
    share, found = _share(tiles, each), gl.to_tensor(0)
    for first in range(0, share, 128):
        i = first + gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        row, block = _tile(i, each, gl.cdiv(T_q, CONSUMERS * ROWS))
        for c in gl.static_range(CONSUMERS):
            at = block * CONSUMERS + c
            there = (i < share) & (at * ROWS < T_q)
            failed = gl.load(failed_ptr + row * gl.cdiv(T_q, ROWS) + at, mask=there, other=0)
            found = gl.maximum(found, gl.max(failed, axis=0))
    return found > 0


@gluon.jit(do_not_specialize=["B", *SIZES, "groups", "each"])
def flash_attention_fwd_hopper_kernel(
    lse_ptr, failed_ptr, q_desc, k_desc, v_desc, o_desc,
    B, H, groups, T_q, T_k, left, right, each, scale,
    D: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Tiles of CONSUMERS x ROWS queries of one head, shared out among the programs, `each` at a time. lse [B, H, T_q] is
    contiguous. REGISTERS: of a consumer's thread; the fetching warp gives up those it does not need. failed: int32 [B, H, blocks
    of ROWS queries]. With FIXED it is filled with 1 where a block must be computed again, else 0; without, if it is given, only
    programs with such a block compute anything."""
    q_smem = blocks_like(q_desc, CONSUMERS)
    o_smem = blocks_like(o_desc, CONSUMERS)
    k_smem = blocks_like(k_desc, STAGES)
    v_smem = blocks_like(v_desc, STAGES)
    q_ready, q_free, turns = barriers(CONSUMERS, 1), barriers(CONSUMERS, 1), barriers(CONSUMERS, 1)
    ready, free = barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    hopper.fence_async_shared()

    tiles = gl.cdiv(T_q, CONSUMERS * ROWS) * B * H
    if failed_ptr is not None and not FIXED:
        tiles = gl.where(_failed(failed_ptr, tiles, each, T_q, CONSUMERS, ROWS), tiles, 0)
    fetched = q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_ready, q_free, ready, free
    given = lse_ptr, failed_ptr, o_desc, q_smem, o_smem, k_smem, v_smem, q_ready, q_free, ready, free, turns
    walks = tiles, each, H, groups, (T_q, T_k, left, right)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_compute, (given, walks, scale, 0, 1, ROWS, BLOCK_N, D, STAGES, FIXED)),
                (_fetch_all, (fetched, walks, 1, ROWS, BLOCK_N, STAGES)),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (given, walks, scale, 0, 2, ROWS, BLOCK_N, D, STAGES, FIXED)),
                (_compute, (given, walks, scale, 1, 2, ROWS, BLOCK_N, D, STAGES, FIXED)),
                (_fetch_all, (fetched, walks, 2, ROWS, BLOCK_N, STAGES)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
