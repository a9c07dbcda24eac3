"""Attention of one token, or a few, over a cache of keys and values: softmax(scale q k^T) v for the end of a sequence.

The same kernels, to be read first: `decode`, `decode_split` and `decode_int8` in solutions/kv_cache.py.

Decoding reads the whole cache for each token and computes next to nothing with it, so only the memory counts. Two things
decide how near its speed one comes:

    packing    The query heads that share a head of the cache (GQA), and the few new tokens, are the rows of one tl.dot:
               the cache is read once for all of them.
    splitting  One sequence has H_kv rows of work, and a GPU has more SMs than that. So the tokens are split among several
               programs. Each keeps its own maximum m, sum l and weighted sum acc in float32, as one block of FlashAttention
               would, and the last of them to come to its end joins all, always in the same order:

                   M = max m      l = sum(l 2^(m - M))      o = sum(acc 2^(m - M)) / l

How many splits there are follows from the sizes of the tensors, not from the lengths, which only the GPU knows: each
sequence is split evenly by its own length, a short one into splits that are short, or empty. One grid thus serves every
step, and can be replayed in a CUDA graph.

An int8 cache has a scale for each head of each token. The scales multiply scores and weights, D times fewer numbers than
the elements. The integers become float16, where they are exact, and so do the rows of q, shrunk or grown to fit.

Traffic: the cache once, up to the lengths, q and o. The splits' sums, written and read, add 2 splits groups / T to what a
cache in 16 bits takes: 0.2% for 8 splits of 8,192 tokens.
Limits: no gradients. A batch of very unequal lengths would be balanced better by an equal share of all its tokens for each
SM than by splits of each sequence.
Sources: Dao, Haziza, Massa and Sizov 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html; Ainslie et al. 2023,
https://arxiv.org/abs/2305.13245 (GQA); Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gpukit.kernels._arguments import check_device, check_runs, check_tensors
from gpukit.kernels._attention import check_scale
from gpukit.kernels._autograd import operator
from gpukit.kernels._decode_kernel import decode_attention_kernel
from gpukit.kernels._device import properties
from gpukit.kernels._launch import interpreted, launch, power_of_2
from gpukit.kernels._tiles import counters

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PRECISIONS = ("ieee", "tf32")


# ------------------------------------------------------------------------------------------------------ configurations
class Config(NamedTuple):
    """Rows of queries and tokens in a block, warps, stages of the loop's loads, and programs that an SM runs at a time."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    per_sm: int


BLOCK_BYTES = 16 * 1024  # of keys, and as many of values
# What a program does besides its blocks, in blocks, by estimate: it starts, fills its pipeline, its sums are written and read.
OVERHEAD_BLOCKS = 2
MOST_SPLITS = 512


@cache
def config_of(rows: int, D: int, dtype: torch.dtype, cache_dtype: torch.dtype, shared_bytes: int | None) -> Config:
    """rows: query heads for each head of the cache, times new tokens. dtype: of q. shared_bytes: of an SM, None in the
    interpreter.

    Enough bytes must be on their way to hide the memory's latency: two programs on an SM whose loads fill its shared
    memory."""
    if shared_bytes is None:
        return Config(min(max(16, power_of_2(rows)), 64), 32, 4, 1, 2)
    BLOCK_D = max(16, power_of_2(D))
    if dtype == torch.float32:
        # Without tensor cores a thread holds whole rows of its products' operands: larger blocks do not fit its registers.
        BLOCK_M, BLOCK_N, num_warps, most_ahead = 16, 16, 8, 0 if cache_dtype == torch.int8 else 3
    else:
        # An int8 block is converted in registers, of which many rows leave too few for a large one.
        most_rows = 32 if cache_dtype == torch.int8 and BLOCK_D > 128 else 64
        BLOCK_M = min(max(16, power_of_2(rows)), most_rows)
        BLOCK_N = BLOCK_BYTES // (BLOCK_D * (cache_dtype if BLOCK_M == 16 else dtype).itemsize)
        BLOCK_N = min(max(BLOCK_N, 32), 128 if BLOCK_D >= 64 else 64)
        if cache_dtype == torch.int8 and BLOCK_M == 64:
            BLOCK_N = 32
        # What is converted on the way gains nothing by a third block ahead: 375 us with two, 393 with three.
        num_warps, most_ahead = 8 if BLOCK_M == 64 else 4, 2 if cache_dtype == torch.int8 else 3
    stage = 2 * BLOCK_N * BLOCK_D * cache_dtype.itemsize
    besides = 5 * 1024 + BLOCK_M * BLOCK_D * dtype.itemsize  # q, and what passes between warps
    # 64 rows are Hopper's own instruction, which keeps one more block in shared memory.
    per_sm = 1 if BLOCK_M == 64 or shared_bytes // 2 - besides < 2 * stage else 2
    ahead = (shared_bytes // per_sm - besides) // stage
    return Config(BLOCK_M, BLOCK_N, num_warps, min(max(ahead, 1), most_ahead) + 1, per_sm)


@cache
def splits_of(work: int, T_max: int, BLOCK_N: int, slots: int) -> int:
    """How many programs share the tokens of one block of queries.

    work   blocks of queries in the whole batch
    slots  programs that the GPU is to run at a time
    The programs run in turns of `slots`; a turn takes as long as one program's blocks of tokens and its overhead. Of equal
    times the fewest splits."""
    blocks = -(-T_max // BLOCK_N)
    turns = lambda splits: -(-work * splits // slots) * (-(-blocks // splits) + OVERHEAD_BLOCKS)  # noqa: E731
    most = min(blocks, MOST_SPLITS, max(8 * slots // work, 1))
    return min(range(1, most + 1), key=turns)


def chunk_of(splits: int, ROWS: int, BLOCK_D: int) -> int:
    """How many splits' sums the join reads in one round. Each round waits for memory once.

    4,096 numbers are 32 for each thread of four warps. 4 query heads to each of 8 heads of 32,768 tokens, in 16 splits, take
    40.3 µs on an H200 with two such rounds, and 38.3 with one of twice the size; 8 query heads to each 50.2 and 44.1. It is not
    made larger for other shapes, since some kernels would lack registers."""
    numbers = 8192 if splits > 8 and ROWS in (4, 8) and BLOCK_D == 128 else 4096
    return max(numbers // (ROWS * BLOCK_D), 1)


# ------------------------------------------------------------------------------------------------------------ launchers
def decode_attention_fwd(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    scale: float,
    precision: str,
    first: Tensor | None = None,
    *,
    splits: int | None = None,
    config: Config | None = None,
    keep: bool = True,
) -> Tensor:
    """o, laid out as q, both [B, H, T_q, D] or [B, H, D]. splits, config: instead of what the sizes say. keep: see `counters`."""
    o = torch.empty_like(q)
    if o.numel() == 0:
        return o
    strides = q.stride(), o.stride()
    if q.ndim == 4:
        B, H, T_q, D = q.shape
    else:  # the strides of a fourth dimension cost less than a view that has it
        (B, H, D), T_q = q.shape, 1
        strides = [(batch, head, 0, d) for batch, head, d in strides]
    _, T_max, H_kv, _ = k_cache.shape
    if T_max == 0:
        return o.zero_()
    groups = H // H_kv
    gpu = properties(q.device)
    shared_bytes = gpu.smem_per_sm_bytes if gpu else None
    config = config or config_of(groups * T_q, D, q.dtype, k_cache.dtype, shared_bytes)
    work = B * H_kv * -(-groups * T_q // config.BLOCK_M)
    # A program on each SM keeps the memory busy: 8 heads of 32,768 tokens take 51 us in 16 splits and 55 in 33. Of int8 the
    # instructions are the limit, of which two programs issue more: 32 heads of 8,192 take 40 us in 8 splits and 46 in 4.
    slots = (gpu.sms if gpu else 2) * (config.per_sm if k_cache.dtype == torch.int8 else 1)
    splits = splits or splits_of(work, T_max, config.BLOCK_N, slots)
    strides_k, strides_v = k_cache.stride(), v_cache.stride()
    paired = k_cache.dtype == torch.int8 and q.dtype != torch.float32 and D % 2 == 0
    paired = paired and _in_pairs(k_cache, strides_k) and _in_pairs(v_cache, strides_v)
    BLOCK_D = max(32 if paired else 16, power_of_2(D))
    ROWS = min(config.BLOCK_M, power_of_2(groups * T_q))
    parts = count = None
    if splits > 1:
        parts = torch.empty(splits * B * H * T_q * (D + 2), dtype=torch.float32, device=q.device)
        count = counters(work, q.device, keep)
    launch(
        decode_attention_kernel, work * splits, q, k_cache, v_cache, k_scales, v_scales, lengths, first, o, parts, count,
        *strides[0], *strides_k, *strides_v,
        *((0, 0, 0) if k_scales is None else k_scales.stride()),
        *((0, 0, 0) if v_scales is None else v_scales.stride()),
        *strides[1], H_kv, groups, T_q, T_max, splits, scale,
        PRECISION=precision, PAIRED=paired, PTX=paired and not interpreted(), D=D,
        BLOCK_M=config.BLOCK_M, BLOCK_N=config.BLOCK_N, BLOCK_D=BLOCK_D, NUM_STAGES=config.num_stages,
        ROWS=ROWS, CHUNK=chunk_of(splits, ROWS, BLOCK_D), num_warps=config.num_warps,
    )  # fmt: skip
    return o


def _in_pairs(cache: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether two neighboring numbers of 8 bits are one of 16 wherever a row of the cache begins."""
    return strides[3] == 1 and not (strides[0] | strides[1] | strides[2] | cache.data_ptr()) & 1


_decode_attention = operator(
    "decode_attention", decode_attention_fwd, like=lambda q, *_: torch.empty_like(q), keep=False
)


# --------------------------------------------------------------------------------------------------------------- public
def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, k_scales: Tensor | None, v_scales: Tensor | None,
    scale: float, precision: str, first: Tensor | None,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError for what the kernels cannot take."""
    op = "decode_attention"
    if q.dtype not in DTYPES:
        raise TypeError(f"{op}: q must be float16, bfloat16 or float32, got {q.dtype}")
    int8 = k_scales is not None or v_scales is not None
    stored = torch.int8 if int8 else q.dtype
    if k_cache.dtype != stored or v_cache.dtype != stored:
        name, x = ("k_cache", k_cache) if k_cache.dtype != stored else ("v_cache", v_cache)
        rule = "int8, since there are scales" if int8 else f"the dtype of q, {q.dtype}"
        more = "; int8 needs k_scales and v_scales" if x.dtype == torch.int8 else ""
        raise TypeError(f"{op}: {name} must be {rule}, got {x.dtype}{more}")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: lengths must be int32 or int64, got {lengths.dtype}")
    shape, cached = q.shape, k_cache.shape
    if len(shape) not in (3, 4) or len(cached) != 4:
        raise ValueError(
            f"{op}: q must be [B, H, D] or [B, H, T_q, D] and the caches [B, T_max, H_kv, D], got {list(shape)} and "
            f"{list(cached)}"
        )
    if v_cache.shape != cached or cached[0] != shape[0] or cached[3] != shape[-1]:
        raise ValueError(
            f"{op}: k_cache and v_cache must have one shape, and q's batch and head size, got {list(cached)} and "
            f"{list(v_cache.shape)} for q {list(shape)}"
        )
    if lengths.shape != shape[:1]:
        raise ValueError(f"{op}: lengths must be [{shape[0]}], one for each sequence, got {list(lengths.shape)}")
    if first is not None:
        if not isinstance(first, Tensor) or first.dtype not in (torch.int32, torch.int64) or first.shape != shape[:1]:
            given = f"{first.dtype} {list(first.shape)}" if isinstance(first, Tensor) else repr(first)
            raise ValueError(f"{op}: first must be int32 or int64 [{shape[0]}], one for each sequence, got {given}")
        check_device(op, "first", first, "q", q)
    if int8:
        for name, x in (("k_scales", k_scales), ("v_scales", v_scales)):
            if not isinstance(x, Tensor) or x.shape != cached[:3]:
                given = list(x.shape) if isinstance(x, Tensor) else repr(x)
                raise ValueError(f"{op}: {name} must be {list(cached[:3])}, one for each head of a token, got {given}")
            if x.dtype not in DTYPES:
                raise TypeError(f"{op}: {name} must be float16, bfloat16 or float32, got {x.dtype}")
    if not 1 <= shape[-1] <= 256:
        raise ValueError(f"{op}: the head size, q's last dimension, must be 1 to 256, got {shape[-1]}")
    H, H_kv = shape[1], cached[2]
    if H != H_kv and (H_kv == 0 or H % H_kv):
        raise ValueError(f"{op}: the heads of the caches must divide those of q, got {H} of q and {H_kv} of the caches")
    check_scale(op, scale)
    if precision not in PRECISIONS:
        raise ValueError(f"{op}: precision must be {' or '.join(map(repr, PRECISIONS))}, got {precision!r}")
    device = q.device
    check_runs(op, "q", q)
    if k_cache.device != device or v_cache.device != device or lengths.device != device or int8:
        others = {
            "k_cache": k_cache,
            "v_cache": v_cache,
            "lengths": lengths,
            "k_scales": k_scales,
            "v_scales": v_scales,
        }
        for name, x in others.items():
            if x is not None and x.device != device:
                raise ValueError(f"{op}: {name} is on {x.device}, q on {device}; they must be on one device")
    if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
        raise ValueError(
            f"{op}: q, k_cache or v_cache requires a gradient, and there is none; call it inside torch.no_grad(), or train "
            "with flash_attention"
        )


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    scale: float | None = None,
    *,
    precision: str = "ieee",
    first: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v of the newest token, or the newest few, of each sequence over all its tokens in a cache.

    q [B, H, D], or [B, H, T_q, D] for the newest T_q tokens; k_cache and v_cache [B, T_max, H_kv, D], to which these tokens
    have been appended; lengths [B] int32 or int64: how many tokens count, the new ones among them. float16, bfloat16 or
    float32, one dtype, any strides; D is 1 to 256. H_kv divides H: each head of the caches serves H / H_kv query heads in
    a row (GQA). Query t sees the first lengths - T_q + 1 + t tokens, so the last one sees all.
    k_scales, v_scales  [B, T_max, H_kv], of int8 caches, whose numbers stand for themselves times their scale
    scale               default 1 / sqrt(D)
    precision           of float32 products: "ieee", or "tf32", which keeps 10 bits of the mantissas
    first               [B] int32 or int64: the first token that counts, where sequences are padded at their beginning
                        (lengths then count the padding too); None: 0 for all

    Returns o, in q's shape, layout and dtype, summed in float32, the same bits at every call. A query that sees no token
    gives 0. Nothing before `first` or behind the lengths is read. Raises TypeError for a dtype, ValueError for a shape, device or number that
    does not fit, and on the CPU for a length outside 0 .. T_max; on a GPU such a length counts as the nearest of these.
    """
    check_tensors("decode_attention", q=q, k_cache=k_cache, v_cache=v_cache, lengths=lengths)
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None and q.ndim else scale or 0.0
    _check(q, k_cache, v_cache, lengths, k_scales, v_scales, scale, precision, first)
    compiling = torch.compiler.is_compiling()
    if not compiling and lengths.is_cpu and len(lengths):
        known = lengths.tolist()
        low, high = min(known), max(known)
        if low < 0 or high > k_cache.shape[1]:
            raise ValueError(
                f"decode_attention: lengths must be 0 to {k_cache.shape[1]}, the caches' tokens, got {low} to {high}"
            )
    call = _decode_attention.op if compiling else decode_attention_fwd
    first = None if first is None else first.contiguous()
    return call(q, k_cache, v_cache, lengths.contiguous(), k_scales, v_scales, float(scale), precision, first)
