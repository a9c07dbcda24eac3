"""A cache of the keys and values of a language model's attention, and the loop that writes text with it.

The same kernel, to be read first: `append_kernel` in solutions/kv_cache.py.

Without a cache each new token costs a pass over all tokens before it; with one it costs a pass over the weights and a read
of the cache. Prefill: the prompt goes through at once, with FlashAttention over itself, and its keys and values are kept.
Decode: one token at a time goes through, its keys and values are appended, and it attends to what is there.

The cache is [B, T_max, H_kv, D]: a token is one piece of memory, and appending it writes one piece. It is as large from the
start as it may become; caches in pages share that room among sequences, and are not here.

In int8 each head of a token has a scale of its own, its largest number / 127, so that appending a token never touches those
before it. That is D + 4 bytes for 2 D, and an error of half a step, 1/254 of the largest number.

Sources: Shazeer 2019, https://arxiv.org/abs/1911.02150 (what decoding reads); Pope et al. 2022,
https://arxiv.org/abs/2211.05102 (prefill, decode and their memory)
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check_tensors
from gpukit.kernels._autograd import operator
from gpukit.kernels._launch import INTERPRETED, launch, power_of_2
from gpukit.kernels.decode_attention import DTYPES, decode_attention
from gpukit.kernels.flash_attention import flash_attention


@triton.jit
def _append(
    x_ptr, cache_ptr, scales_ptr,
    stride_xh, stride_xd, stride_ch, stride_cd, stride_sh,
    H, D,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One token's heads [H, D] from x to the cache, as they are or as int8 with a scale for each head."""
    offs_d = tl.arange(0, BLOCK_D)[None, :].to(tl.int64)
    for first in tl.range(0, H, BLOCK_H):
        offs_h = first + tl.arange(0, BLOCK_H)[:, None].to(tl.int64)
        mask = (offs_h < H) & (offs_d < D)
        x = tl.load(x_ptr + offs_h * stride_xh + offs_d * stride_xd, mask=mask, other=0.0)
        if scales_ptr is not None:
            x = x.to(tl.float32)
            scale = tl.max(tl.abs(x), axis=1, keep_dims=True) / 127
            tl.store(scales_ptr + offs_h * stride_sh, scale, mask=offs_h < H)
            # To the nearest integer. At most 127, but for the rounding of the division.
            x = tl.floor(x / tl.where(scale == 0, 1.0, scale) + 0.5)
            x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        tl.store(cache_ptr + offs_h * stride_ch + offs_d * stride_cd, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def kv_append_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, lengths_ptr, counts_ptr,
    stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    stride_cb, stride_ct, stride_ch, stride_cd,
    stride_sb, stride_st, stride_sh,
    T, T_max, H, D,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Token t of sequence b, one program each, to place lengths[b] + t. counts_ptr: how many tokens of each sequence are
    real, or None if all. Both caches have the strides c, both scales s. A single token's program adds it to the length,
    which nobody else reads."""
    b = (tl.program_id(0) // T).to(tl.int64)
    t = (tl.program_id(0) % T).to(tl.int64)
    length = tl.load(lengths_ptr + b)
    place = length.to(tl.int64) + t
    if counts_ptr is not None:
        if t >= tl.load(counts_ptr + b):
            return
    if T == 1:
        tl.store(lengths_ptr + b, length + 1)
    # The class has looked already. In a replayed CUDA graph only this keeps a full cache from being overrun.
    if place >= T_max:
        return
    if k_scales_ptr is not None:
        k_scales_ptr += b * stride_sb + place * stride_st
        v_scales_ptr += b * stride_sb + place * stride_st
    at = b * stride_cb + place * stride_ct
    _append(
        k_ptr + b * stride_kb + t * stride_kt, k_cache_ptr + at, k_scales_ptr,
        stride_kh, stride_kd, stride_ch, stride_cd, stride_sh, H, D, BLOCK_H, BLOCK_D,
    )  # fmt: skip
    _append(
        v_ptr + b * stride_vb + t * stride_vt, v_cache_ptr + at, v_scales_ptr,
        stride_vh, stride_vd, stride_ch, stride_cd, stride_sh, H, D, BLOCK_H, BLOCK_D,
    )  # fmt: skip


def kv_append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scales: Tensor | None, v_scales: Tensor | None,
    lengths: Tensor, counts: Tensor | None,
) -> None:  # fmt: skip
    """k and v [B, H_kv, T, D] into the caches [B, T_max, H_kv, D], from each sequence's length on, and the lengths that
    follow from it."""
    B, H, T, D = k.shape
    if k.numel() == 0:
        return
    BLOCK_D = power_of_2(D)
    launch(
        kv_append_kernel, B * T, k, v, k_cache, v_cache, k_scales, v_scales, lengths, counts,
        *k.stride(), *v.stride(), *k_cache.stride(), *((0, 0, 0) if k_scales is None else k_scales.stride()),
        T, k_cache.shape[1], H, D,
        BLOCK_H=max(1, min(power_of_2(H), 1024 // BLOCK_D)), BLOCK_D=BLOCK_D, num_warps=4,
    )  # fmt: skip
    if T > 1:
        lengths += T if counts is None else counts


# One launch for what would be two slices, four with scales; an operator, so that torch.compile knows what it writes.
_kv_append = operator(
    "kv_append",
    kv_append,
    like=lambda *_: None,
    mutates=("k_cache", "v_cache", "k_scales", "v_scales", "lengths"),
)


class KVCache:
    """Keys and values of one layer for `batch` sequences of up to `max_tokens` tokens each.

    k, v                [batch, max_tokens, kv_heads, head_size] in dtype, or int8
    k_scales, v_scales  [batch, max_tokens, kv_heads] in float32 with int8=True, else None
    lengths             [batch] int32, on the device: how many tokens each sequence has

    dtype is float16, bfloat16 or float32, that of the keys and values which come in. device: default the GPU, in the
    interpreter the CPU. Raises ValueError and TypeError for other sizes and dtypes.
    """

    def __init__(
        self, batch: int, max_tokens: int, kv_heads: int, head_size: int, dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None, *, int8: bool = False,
    ):  # fmt: skip
        sizes = {"batch": batch, "max_tokens": max_tokens, "kv_heads": kv_heads, "head_size": head_size}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"KVCache: {name} must be a positive integer, got {size!r}")
        if head_size > 256:
            raise ValueError(f"KVCache: head_size must be 1 to 256, got {head_size}")
        if dtype not in DTYPES:
            raise TypeError(f"KVCache: dtype must be float16, bfloat16 or float32, got {dtype}; int8=True stores int8")
        device = torch.device(device or ("cpu" if INTERPRETED else "cuda"))
        shape, stored = (batch, max_tokens, kv_heads, head_size), torch.int8 if int8 else dtype
        self.dtype = dtype
        self.k, self.v = (torch.empty(shape, dtype=stored, device=device) for _ in range(2))
        self.k_scales, self.v_scales = (
            torch.empty(shape[:3], dtype=torch.float32, device=device) if int8 else None for _ in range(2)
        )
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        # The lengths once more, on the CPU: looking whether a token still fits must not wait for the GPU.
        self._known = [0] * batch

    @property
    def max_tokens(self) -> int:
        return self.k.shape[1]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, known without asking the GPU."""
        return max(self._known)

    @property
    def nbytes(self) -> int:
        """What the cache occupies, full or empty."""
        return sum(x.nbytes for x in (self.k, self.v, self.k_scales, self.v_scales) if x is not None)

    @property
    def bytes_in_use(self) -> int:
        """What decoding the next token reads of it."""
        batch, max_tokens = self.k.shape[:2]
        return self.nbytes // (batch * max_tokens) * sum(self._known)

    def clear(self) -> None:
        """Forget all tokens; the memory stays."""
        self.lengths.zero_()
        self._known = [0] * len(self._known)

    def append(self, k: Tensor, v: Tensor, counts: Sequence[int] | None = None) -> None:
        """Keep the keys and values of the next T tokens of each sequence.

        k, v    [batch, kv_heads, T, head_size] in the cache's dtype, any strides
        counts  how many of the T tokens of each sequence are real, where prompts of several lengths are padded at their end

        Raises ValueError if they do not fit, and then appends nothing; TypeError for another dtype.
        """
        batch, max_tokens, kv_heads, head_size = self.k.shape
        check_tensors("KVCache.append", k=k, v=v)
        for name, x in (("k", k), ("v", v)):
            if x.dtype != self.dtype:
                raise TypeError(f"KVCache.append: {name} must have the cache's dtype {self.dtype}, got {x.dtype}")
            shape = x.shape
            if shape != k.shape or len(shape) != 4 or (shape[0], shape[1], shape[3]) != (batch, kv_heads, head_size):
                raise ValueError(
                    f"KVCache.append: k and v must both be [{batch}, {kv_heads}, T, {head_size}], {name} is {list(shape)}"
                )
            if x.device != self.k.device:
                raise ValueError(f"KVCache.append: {name} is on {x.device}, the cache on {self.k.device}")
        T = k.shape[2]
        if counts is not None and (len(counts) != batch or not all(0 <= n <= T for n in counts)):
            raise ValueError(
                f"KVCache.append: counts must be {batch} numbers from 0 to {T}, the tokens given, got {list(counts)}"
            )
        added = [T] * batch if counts is None else map(int, counts)
        known = [n + more for n, more in zip(self._known, added, strict=True)]
        if max(known) > max_tokens:
            b = known.index(max(known))
            raise ValueError(
                f"KVCache.append: the cache is full: sequence {b} has {self._known[b]} of {max_tokens} tokens, and "
                f"{known[b] - self._known[b]} more do not fit; max_tokens must be at least {known[b]}"
            )
        new = None if counts is None else torch.tensor([int(n) for n in counts], dtype=torch.int32).to(self.k.device)
        if torch.compiler.is_compiling():
            append, k, v = _kv_append.op, k.detach(), v.detach()
        else:
            append = kv_append
        append(k, v, self.k, self.v, self.k_scales, self.v_scales, self.lengths, new)
        self._known = known

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, counts: Sequence[int] | None = None, scale: float | None = None
    ) -> Tensor:
        """Append k and v, then causal attention of q [batch, heads, T, head_size] over all that is cached: prefill while the
        cache is empty, decode from then on. Returns o like q.

        Prefill uses k and v as they are given, in int8 too. counts as in `append`, in prefill alone (ValueError): the rows
        of padding come back as well and mean nothing. A call that raises appends nothing."""
        first = self.longest == 0
        if counts is not None and not first:
            raise ValueError("KVCache.attend: counts are for the first call, of prompts; later tokens are all real")
        if q.shape[2:] != k.shape[2:]:
            raise ValueError(
                f"KVCache.attend: q must have k's tokens and head size, {list(k.shape[2:])}, got {list(q.shape[2:])}"
            )
        before = self._known
        self.append(k, v, counts)
        try:
            if first:
                return flash_attention(q, k, v, causal=True, scale=scale)
            return decode_attention(q, self.k, self.v, self.lengths, self.k_scales, self.v_scales, scale)
        except (TypeError, ValueError):  # q or scale does not fit
            self._known = before
            self.lengths.copy_(torch.tensor(before))
            raise


@torch.no_grad()
def generate(
    model: Callable[..., Tensor],
    prompt: Tensor,
    new_tokens: int,
    caches: Sequence[KVCache],
    counts: Sequence[int] | None = None,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each prompt by `new_tokens` tokens: [B, new_tokens] of int64.

    model        model(tokens [B, T], caches, counts) -> logits [B, T, V], calling `attend` of each layer's cache
    prompt       [B, T] of int64; where prompts differ in length, padded at their end to the longest
    caches       one for each layer, empty, with room for T + new_tokens - 1 tokens
    counts       the prompts' lengths, 1 to T; default: all T
    temperature  0: the most likely token each time. Else one is drawn with probability softmax(logits / temperature)
    generator    for drawing, on the logits' device: the same seed gives the same text

    The GPU is never waited for. Raises ValueError or TypeError for arguments that do not fit, before anything is computed.
    """
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"generate: prompt must be [B, T] with at least one token, got {list(prompt.shape)}")
    if prompt.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"generate: prompt must be int64, got {prompt.dtype}")
    if not isinstance(new_tokens, int) or new_tokens < 1:
        raise ValueError(f"generate: new_tokens must be a positive integer, got {new_tokens!r}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"generate: temperature must be 0 or more, got {temperature}")
    B, T = prompt.shape
    counts = None if counts is None else [int(n) for n in counts]
    if counts is not None and (len(counts) != B or not all(1 <= n <= T for n in counts)):
        raise ValueError(f"generate: counts must be {B} numbers from 1 to {T}, got {counts}")
    needed = (max(counts) if counts else T) + new_tokens - 1
    for i, cache in enumerate(caches):
        if cache.longest:
            raise ValueError(f"generate: caches[{i}] holds {cache.longest} tokens already; clear() it first")
        if len(cache.lengths) != B:
            raise ValueError(f"generate: caches[{i}] is for {len(cache.lengths)} sequences, and prompt has {B}")
        if cache.max_tokens < needed:
            raise ValueError(f"generate: caches[{i}] has room for {cache.max_tokens} tokens, and {needed} are needed")

    logits = model(prompt, caches, counts)
    if counts is None:
        logits = logits[:, -1]
    else:
        last = torch.tensor(counts).to(prompt.device) - 1
        logits = logits[torch.arange(B, device=prompt.device), last]
    text = []
    while True:
        if temperature:
            chances = torch.softmax(logits.float() / temperature, dim=-1)
            text.append(torch.multinomial(chances, 1, generator=generator))
        else:
            text.append(logits.argmax(-1, keepdim=True))
        if len(text) == new_tokens:
            return torch.cat(text, dim=1)
        logits = model(text[-1], caches)[:, -1]
