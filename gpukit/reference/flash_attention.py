"""Attention, softmax(scale q k^T) v: what it means, on which inputs it is judged, and the least it must do."""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gpukit.op import Cost, Op


def seen(T_q: int, T_k: int, causal: bool = False, window: int | None = None, device=None) -> Tensor:
    """Which keys each query sees, [T_q, T_k] of bool. The last query stands beside the last key (bottom-right)."""
    places = torch.arange(T_q, device=device)[:, None] + T_k - T_q
    keys = torch.arange(T_k, device=device)[None, :]
    mask = keys <= places if causal else torch.ones(T_q, T_k, dtype=torch.bool, device=device)
    return mask if window is None else mask & ((places - keys).abs() < window)


def scores(q: Tensor, k: Tensor, causal: bool = False, scale: float | None = None, window: int | None = None) -> Tensor:
    """scale q k^T, [B, H, T_q, T_k], -inf where a query does not see a key. Each head of k serves H / H_kv of q."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mask = seen(q.shape[2], k.shape[2], causal, window, q.device)
    return (q @ k.mT * scale).masked_fill(~mask, -math.inf)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Attention as its formula says it, q [B, H, T_q, D], k and v [B, H_kv, T_k, D]: the scores, T_q x T_k for each head,
    are written to memory and read again several times. A query that sees no key gives 0."""
    s = scores(q, k, causal, scale, window)
    p = torch.softmax(s, dim=-1)
    if causal or window is not None:
        p = torch.where(torch.isneginf(s), 0, p)  # 0 as well where everything is -inf, instead of NaN
    return p @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def log_sum_exp(q: Tensor, k: Tensor, **options) -> Tensor:
    """log(sum(exp(score))) of each query, [B, H, T_q]; -inf where it sees no key."""
    return torch.logsumexp(scores(q, k, **options), dim=-1)


def library(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, window: int | None = None
) -> Tensor:
    """PyTorch's scaled_dot_product_attention, with whichever of its kernels it chooses."""
    mask, is_causal = None, causal and window is None and q.shape[2] == k.shape[2]
    if (causal or window is not None) and not is_causal:
        mask = seen(q.shape[2], k.shape[2], causal, window, q.device)
    return F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _sdpa(backend: str):
    """PyTorch's scaled_dot_product_attention by one of its kernels, which it would not always choose itself."""

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return attention


def flex(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """FlexAttention, which makes a Triton kernel of the mask it is given."""
    attention, block_mask = _flex(q.shape[2], k.shape[2], causal, q.device)
    return attention(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])


@cache
def _flex(T_q: int, T_k: int, causal: bool, device):
    """The compiled function and the blocks of its mask, which one computes once for a length and not at every call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i + T_k - T_q >= j, None, None, T_q, T_k, device=device)
    return torch.compile(flex_attention, dynamic=False), mask


def fa4(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """FlashAttention 4, which takes and returns [B, T, H, D]. It is handed views of that shape and copies nothing."""
    from flash_attn.cute import flash_attn_func

    o, *_ = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    return o.transpose(1, 2)


def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The formula in PyTorch's operations, for lengths T_q = T_k. In float32, which 16 bits ask for: a score of 110 in
    bfloat16 is off by up to 0.25, and its exponential by a quarter."""
    q, k, v, dtype = q.float(), k.float(), v.float(), q.dtype
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) if x.shape[1] < q.shape[1] else x for x in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(~seen(q.shape[2], k.shape[2], causal, device=q.device), -math.inf)
    return (torch.softmax(s, dim=-1) @ v).to(dtype)


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, all [B, H, T, D], on the CPU. Normal noise, v around 1, so that a row's sum matters; and by query of the
    first head, as far as there are so many, from the last one back, since those see the most if causal:

    -1  scores around 110, of which exp overflows fp32, so that the maximum must be subtracted
    -2  zeros: each key has the same weight
    -3  one key far above the rest
    """
    B, H, T, D = shape
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    v += 1
    if B and H and T > 2 and D:
        q[0, 0, -1] = 55 / math.sqrt(D)
        q[0, 0, -2] = 0
        q[0, 0, -3] = k[0, 0, 0] * (20 * math.sqrt(D) / k[0, 0, 0].square().sum())
        k[0, 0] += 2
    return q.to(dtype), k.to(dtype), v.to(dtype)


def pairs(T_q: int, T_k: int, causal: bool = False, window: int | None = None) -> int:
    """How many keys all queries see together: the elements of the matrix of scores that count."""
    total = 0
    for place in range(T_k - T_q, T_k):
        reach = T_q + T_k if window is None else window
        last = place if causal else min(place + reach - 1, T_k - 1)
        total += max(last - max(place - reach + 1, 0) + 1, 0)
    return total


def cost(shape: tuple[int, ...], dtype: torch.dtype, causal: bool = False) -> Cost:
    """Forward: q, k and v read once, o written once. Two products, 2 D FLOPs each for a query and a key that it sees;
    softmax is not counted, as in the literature."""
    B, H, T, D = shape
    size = B * H * T * D * dtype.itemsize
    return Cost(3 * size, size, 4 * B * H * D * pairs(T, T, causal))


def cost_bwd(shape: tuple[int, ...], dtype: torch.dtype, causal: bool = False) -> Cost:
    """Backward: q, k, v, o, do and the LSE read once, dq, dk and dv written once. Five products, the scores again and four
    for the gradients; kernels that compute the scores twice, as ours, do seven and are credited with five."""
    B, H, T, D = shape
    size = B * H * T * D * dtype.itemsize
    return Cost(5 * size + 4 * B * H * T, 3 * size, 10 * B * H * D * pairs(T, T, causal))


def _check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Two heads of at most 8,192 tokens: the reference in float64 holds several matrices of scores."""
    return 1, min(shape[1], 2), min(shape[2], 8192), shape[3]


OP = Op(
    name="flash_attention",
    reference=flash_attention,
    library=library,
    make_inputs=make_inputs,
    cost=cost,
    cost_bwd=cost_bwd,
    test_shapes=((1, 1, 1, 16), (1, 2, 64, 32), (1, 1, 63, 64), (2, 1, 65, 16), (1, 1, 97, 33), (1, 1, 33, 80)),
    bench_shapes=((4, 16, 4096, 64), (4, 16, 4096, 128), (1, 16, 16384, 128)),
    check_shape=_check_shape,
    peers={
        "formula": formula,
        "sdpa-flash": _sdpa("FLASH_ATTENTION"),
        "sdpa-cudnn": _sdpa("CUDNN_ATTENTION"),
        "flex": flex,
        "fa4": fa4,
    },
)


def _causal_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple:
    return *make_inputs(shape, dtype, generator), True


CAUSAL = Op(
    name="flash_attention_causal",
    reference=flash_attention,
    library=library,
    make_inputs=_causal_inputs,
    cost=lambda shape, dtype: cost(shape, dtype, True),
    cost_bwd=lambda shape, dtype: cost_bwd(shape, dtype, True),
    test_shapes=OP.test_shapes,
    bench_shapes=OP.bench_shapes,
    check_shape=_check_shape,
    peers=OP.peers,
    kernel="flash_attention",
)


def make_gqa_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple:
    """(B, H, H_kv, T, D) -> the q of `make_inputs` with all its heads, k and v with H_kv of theirs, and True: causal."""
    B, H, H_kv, T, D = shape
    q, k, v = make_inputs((B, H, T, D), dtype, generator)
    return q, k[:, :: H // H_kv].contiguous(), v[:, :: H // H_kv].contiguous(), True


def gqa_cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """`cost` of causal attention, with the fewer bytes of k and v."""
    B, H, H_kv, T, D = shape
    saved = 2 * B * (H - H_kv) * T * D * dtype.itemsize
    whole = cost((B, H, T, D), dtype, True)
    return Cost(whole.read_bytes - saved, whole.write_bytes, whole.flops)


def gqa_cost_bwd(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """`cost_bwd` of causal attention, with the fewer bytes of k, v and their gradients."""
    B, H, H_kv, T, D = shape
    saved = 2 * B * (H - H_kv) * T * D * dtype.itemsize
    whole = cost_bwd((B, H, T, D), dtype, True)
    return Cost(whole.read_bytes - saved, whole.write_bytes - saved, whole.flops)


GQA = Op(
    name="flash_attention_gqa",
    reference=flash_attention,
    library=library,
    make_inputs=make_gqa_inputs,
    cost=gqa_cost,
    cost_bwd=gqa_cost_bwd,
    test_shapes=((1, 1, 1, 1, 16), (1, 4, 2, 64, 32), (1, 2, 1, 63, 64), (2, 6, 2, 65, 16), (1, 3, 1, 33, 80)),
    bench_shapes=((2, 32, 8, 4096, 128),),
    check_shape=lambda shape: (1, shape[1] // shape[2], 1, min(shape[3], 8192), shape[4]),
    peers=OP.peers,
    kernel="flash_attention",
)
