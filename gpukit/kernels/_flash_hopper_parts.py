"""What the FlashAttention kernels for Hopper share: which tiles a program computes, which blocks it walks over for each, how
those are fetched, how a product is begun, and how results leave through shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

from gpukit.kernels._attention import LOG2E, _ranges
from gpukit.kernels._hopper import fetch, next_slot, put


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


@gluon.jit
def _fetch_own(a_desc, b_desc, a_smem, b_smem, ready, free, phase, batch, head, block):
    """For the block-th tile the rows of a and b that each consumer keeps, once it is done with those of the tile before."""
    CONSUMERS: gl.constexpr = a_smem.shape[0]
    ROWS: gl.constexpr = a_smem.shape[3]
    for c in gl.static_range(CONSUMERS):
        mbarrier.wait(free.index(c), phase)
        mbarrier.expect(ready.index(c), 2 * a_desc.block_type.nbytes)
        fetch(a_desc, [batch, head, (block * CONSUMERS + c) * ROWS, 0], ready.index(c), a_smem.index(c))
        fetch(b_desc, [batch, head, (block * CONSUMERS + c) * ROWS, 0], ready.index(c), b_smem.index(c))
    return phase ^ 1


@gluon.jit
def _fetch_pairs(
    given, walks,
    CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What one warp does backward, as `_fetch_all` forward: for each tile ROWS rows of a and b for each consumer, then block
    after block of x and y, of `repeat` heads one after the other. For dq a and b are q and do; for dk and dv they are k and v."""
    a_desc, b_desc, x_desc, y_desc, a_smem, b_smem, x_smem, y_smem, own_ready, own_free, ready, free = given
    tiles, each, H, repeat, shared, reach = walks
    TILE: gl.constexpr = CONSUMERS * ROWS
    slot, phase, own_phase = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(1)
    for i in range(0, _share(tiles, each)):
        row, block = _tile(i, each, gl.cdiv(reach[0], TILE))
        batch, head = row // H, row % H
        own_phase = _fetch_own(a_desc, b_desc, a_smem, b_smem, own_ready, own_free, own_phase, batch, head, block)
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
def _queries(block, reach, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """The queries that see the block-th tile of keys, in whole blocks: the first, the end, and from where to where no mask is
    needed. Keys that nobody sees get one block all the same, of which the mask leaves nothing."""
    T_k, T_q, right, left = reach
    first = block * BLOCK_N + T_q - T_k
    last = gl.minimum(block * BLOCK_N + BLOCK_N, T_k) - 1 + T_q - T_k
    start, end, full_start, full = _ranges(first, last, right, left, T_q, BLOCK_M)
    # A mask, too, for keys past the last one: they are 0 and could give 0 * inf to dq.
    full = gl.where((block + 1) * BLOCK_N > T_k, 0, full)
    end = start + gl.maximum(gl.cdiv(end - start, BLOCK_M), 1) * BLOCK_M
    return start, end, full_start, full_start + full


@gluon.jit
def _fetch_with_rows(blocks, tensors, walks):
    """What one warp does where all gradients come from one pass: for each tile the keys and values of each group, then q, do,
    lse (in powers of 2) and delta block after block. A slot is ready when its copies have come, and these rows."""
    k_smem, v_smem, q_smem, do_smem, row_smem, kv_ready, kv_free, ready, free = blocks
    lse_ptr, delta_ptr, k_desc, v_desc, q_desc, do_desc = tensors
    tiles, each, H, groups, reach = walks
    T_k, T_q, _right, _left = reach
    GROUPS: gl.constexpr = k_smem.shape[0]
    ROWS: gl.constexpr = k_smem.shape[3]
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    TILE: gl.constexpr = GROUPS * ROWS
    LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    n, kv_phase = gl.to_tensor(0), gl.to_tensor(1)
    for i in range(0, _share(tiles, each)):
        row, block = _tile(i, each, gl.cdiv(T_k, TILE))
        batch, head = row // H, row % H
        kv_phase = _fetch_own(k_desc, v_desc, k_smem, v_smem, kv_ready, kv_free, kv_phase, batch, head, block)
        start, end, _full_start, _full_end = _queries(block, reach, TILE, BLOCK_M)
        for group in range(0, groups):
            rows = (row * groups + group).to(gl.int64) * T_q
            for m in range(start, end, BLOCK_M):
                slot = n % STAGES
                mbarrier.wait(free.index(slot), n // STAGES & 1 ^ 1)
                mbarrier.expect(ready.index(slot), 2 * q_desc.block_type.nbytes)
                fetch(q_desc, [batch, head * groups + group, m, 0], ready.index(slot), q_smem.index(slot))
                fetch(do_desc, [batch, head * groups + group, m, 0], ready.index(slot), do_smem.index(slot))
                offs = m + gl.arange(0, BLOCK_M, layout=LAYOUT)
                lse = gl.load(lse_ptr + rows + offs, mask=offs < T_q, other=float("inf")) * LOG2E
                delta = gl.load(delta_ptr + rows + offs, mask=offs < T_q, other=0.0)
                row_smem.index(2 * slot).store(lse)
                row_smem.index(2 * slot + 1).store(delta)
                mbarrier.arrive(ready.index(slot), count=1)
                n += 1


@gluon.jit
def _scores(q, k):
    """Begins q k^T, with q from shared memory or registers. The layout says which thread holds what of the result: here each
    warp has 16 rows."""
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


@gluon.jit
def _weights(s, row_smem, slot, m, full_start, full_end, lowest, highest, scale):
    """p from the scores [keys, queries] of the queries from m on, whose lse lies in the slot. Outside of full_start .. full_end
    - 1 a mask is needed: a key is seen by the queries from `lowest` to `highest`."""
    OF_QUERIES: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    lse = row_smem.index(2 * slot).load(OF_QUERIES)
    p = gl.exp2(s * scale - lse[None, :])
    if (m < full_start) | (m >= full_end):
        offs_m = m + gl.arange(0, s.shape[1], layout=OF_QUERIES)
        p = gl.where((offs_m[None, :] >= lowest[:, None]) & (offs_m[None, :] <= highest[:, None]), p, 0.0)
    return p


@gluon.jit
def _send(ds, n, ds_smem, sent, taken, ME: gl.constexpr):
    """Put this group's ds of the n-th block where those who compute dq take it from, once they are done with what was there."""
    BUFFERS: gl.constexpr = sent.shape[0]
    GROUPS: gl.constexpr = ds_smem.shape[0] // BUFFERS
    buffer = n % BUFFERS
    mbarrier.wait(taken.index(buffer), n // BUFFERS & 1 ^ 1)
    ds_smem.index(GROUPS * buffer + ME).store(ds)
    hopper.fence_async_shared()
    mbarrier.arrive(sent.index(buffer), count=1)


@gluon.jit
def _put_dk_dv(dk, dv, tensors, row, H, start_n, k_smem, v_smem, kv_free, ME: gl.constexpr):
    """Store the ME-th group's dk and dv, of the keys from start_n on, through the blocks that its keys and values were in."""
    dk_desc, dv_desc = tensors
    ROWS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    k_smem.index(ME).reshape([ROWS, D]).store(dk.to(k_smem.dtype))
    v_smem.index(ME).reshape([ROWS, D]).store(dv.to(v_smem.dtype))
    hopper.fence_async_shared()
    put(dk_desc, [row // H, row % H, start_n, 0], k_smem.index(ME))
    put(dv_desc, [row // H, row % H, start_n, 0], v_smem.index(ME))
    tma.store_wait(0)
    mbarrier.arrive(kv_free.index(ME), count=1)
