"""What the FlashAttention kernels for Hopper share: which tiles a program computes, which blocks it walks over for each, and
how a product is begun."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from gpukit.kernels._attention import _ranges


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
