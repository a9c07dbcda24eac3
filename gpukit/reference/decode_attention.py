"""Attention of one token, or a few, over a cache of keys and values: what it means, on which inputs it is judged, and the
least it must move.

Shapes are (B, H, H_kv, T, D): q [B, H, D] against caches [B, T, H_kv, D]. Each head of the cache serves H / H_kv query
heads in a row.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gpukit.op import Cost, Op
from gpukit.reference.kv_cache import dequantize, quantize


def seen(lengths: Tensor, T_q: int, T: int) -> Tensor:
    """Which cached tokens each query sees, [B, T_q, T] of bool: the last query all of its sequence's `lengths`, and each
    query before it one token less."""
    last = lengths[:, None] - T_q + torch.arange(T_q, device=lengths.device)
    return torch.arange(T, device=lengths.device) <= last[:, :, None]


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over the first `lengths` tokens, q [B, H, D] or [B, H, T_q, D], caches [B, T, H_kv, D], or
    int8 with scales [B, T, H_kv]. A query that sees no token gives 0; what lies behind the last token counts for nothing,
    NaN included."""
    if q.ndim == 3:
        return decode_attention(q[:, :, None], k_cache, v_cache, lengths, k_scales, v_scales, scale)[:, :, 0]
    H, T_q, D = q.shape[1:]
    T, H_kv = k_cache.shape[1:3]
    in_use = (torch.arange(T, device=q.device) < lengths[:, None])[:, :, None, None]
    k, v = (
        torch.where(in_use, x if x_scales is None else dequantize(x, x_scales, q.dtype), 0)
        .transpose(1, 2)
        .repeat_interleave(H // H_kv, dim=1)
        for x, x_scales in ((k_cache, k_scales), (v_cache, v_scales))
    )
    mask = seen(lengths, T_q, T)[:, None]
    s = (q @ k.mT * (1 / math.sqrt(D) if scale is None else scale)).masked_fill(~mask, -math.inf)
    return torch.where(mask, torch.softmax(s, dim=-1), 0) @ v


@lru_cache(maxsize=1)
def _mask(lengths: Tensor, T_q: int, T: int) -> Tensor | None:
    """What scaled_dot_product_attention needs to know of the lengths, found once: None where everything is seen."""
    mask = seen(lengths, T_q, T)[:, None]
    return None if bool(mask.all()) else mask


def library(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """PyTorch's scaled_dot_product_attention, with whichever of its kernels it chooses; an int8 cache is first made one of
    q's dtype."""
    single = q.ndim == 3
    q = q[:, :, None] if single else q
    if k_scales is not None:
        k_cache, v_cache = dequantize(k_cache, k_scales, q.dtype), dequantize(v_cache, v_scales, q.dtype)
    o = F.scaled_dot_product_attention(
        q,
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        _mask(lengths, q.shape[2], k_cache.shape[1]),
        enable_gqa=q.shape[1] != k_cache.shape[2],
    )
    return o[:, :, 0] if single else o


def _sdpa(backend: str):
    """`library` by one of its kernels, which it would not always choose itself."""

    def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return library(q, k_cache, v_cache, lengths)

    return attention


def fa4(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
    """FlashAttention 4 over whole caches, in as many parts as it chooses: a benchmark's sequences are all as long as the
    cache, and `lengths` is not looked at."""
    from flash_attn.cute import flash_attn_func

    o, *_ = flash_attn_func(q[:, None], k_cache, v_cache, num_splits=0)
    return o[:, 0]


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple:
    """q [B, H, D], the caches [B, T, H_kv, D] and lengths [B], all T, on the CPU. Normal noise, v around 1, so that the sum
    of the weights matters; and in the first sequence, as far as there are so many heads,

    -1  scores far above fp32's range of exp, so that the maximum must be subtracted
    -2  zeros: each token has the same weight
    -3  one token far above the rest
    """
    B, H, H_kv, T, D = shape
    q = torch.randn((B, H, D), generator=generator)
    k, v = (torch.randn((B, T, H_kv, D), generator=generator).to(dtype) for _ in range(2))
    v += 1
    q[0, -1] *= 400 * math.sqrt(D) / k[0, :, -1].float().norm(dim=-1).mean() / q[0, -1].norm()
    if H > 2:
        q[0, -2] = 0
        chosen = k[0, T // 2, (H - 3) // (H // H_kv)].float()
        q[0, -3] = chosen * (20 * math.sqrt(D) / chosen.square().sum())
    return q.to(dtype), k, v, torch.full((B,), T, dtype=torch.int32)


def make_int8_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple:
    """As `make_inputs`, with caches that are quantised: q, k, v, lengths, k_scales, v_scales."""
    q, k, v, lengths = make_inputs(shape, dtype, generator)
    (k, k_scales), (v, v_scales) = quantize(k), quantize(v)
    return q, k, v, lengths, k_scales, v_scales


def cache_bytes(tokens: int, H_kv: int, D: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Keys and values of so many tokens in one layer: what decoding one more token reads. dtype: of the cache; in int8
    there is a scale of 4 bytes for each head of a token."""
    return 2 * tokens * H_kv * (D * dtype.itemsize + (4 if dtype == torch.int8 else 0))


def cost(shape: tuple[int, ...], dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> Cost:
    """q, the lengths and the caches read once, o written once; two products, 2 D FLOPs each for a query head and a token.
    With 16 bits that is one FLOP a byte for each query head that shares a head of the cache."""
    B, H, H_kv, T, D = shape
    size = B * H * D * dtype.itemsize
    return Cost(
        size + 4 * B + B * cache_bytes(T, H_kv, D, cache_dtype or dtype),
        size,
        4 * B * H * T * D,
    )


def _check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One sequence: the reference holds the caches in float64, once for each query head."""
    return 1, *shape[1:]


OP = Op(
    name="decode_attention",
    reference=decode_attention,
    library=library,
    make_inputs=make_inputs,
    cost=cost,
    test_shapes=((1, 1, 1, 1, 16), (2, 3, 3, 31, 32), (1, 8, 2, 64, 64), (3, 4, 1, 65, 33), (1, 6, 3, 97, 80)),
    bench_shapes=((1, 32, 32, 8192, 128), (1, 32, 8, 32768, 128), (16, 32, 32, 8192, 128)),
    bench_modes=("fwd",),
    grads=(),
    check_shape=_check_shape,
    peers={
        "sdpa-flash": _sdpa("FLASH_ATTENTION"),
        "sdpa-cudnn": _sdpa("CUDNN_ATTENTION"),
        "sdpa-efficient": _sdpa("EFFICIENT_ATTENTION"),
        "fa4": fa4,
    },
)
INT8 = Op(
    name="decode_attention_int8",
    reference=decode_attention,
    library=library,
    make_inputs=make_int8_inputs,
    cost=lambda shape, dtype: cost(shape, dtype, torch.int8),
    test_shapes=OP.test_shapes,
    bench_shapes=OP.bench_shapes,
    bench_modes=("fwd",),
    grads=(),
    check_shape=_check_shape,
    kernel="decode_attention",
)
