"""Attention through transformers' attention interface: a function and a mask builder, both registered as "gpukit".

transformers builds one mask for the whole model and hands it to every layer's attention. For its own "sdpa" the mask is a
table of T x T booleans per sequence. FlashAttention needs no table: causal attention and sliding windows are rules, and
padding is a list of which tokens are real. So the mask builder here returns

    None              each query sees the keys up to its own place, within the layer's sliding window if it has one
    [B, T]            the same, but only the keys that are true here: each sequence has padding before or after its tokens.
                      The queries are the last of the T; a cache with room to spare has more keys, which are not there yet
    [B, 1, T_q, T_k]  anything else, as sdpa's builder makes it

and the function below answers the first two with gpukit's kernels: FlashAttention for prompts and training, the decode
kernel for the one new token of each sequence while text is generated. With padding the real tokens are packed one sequence
after the other; the rows of padding come back as zeros, as they do from transformers' FlashAttention 2.

What the kernels do not have goes to the implementation that the model had before: dropout, soft-capped scores, masks of
the third form, attention weights as a result, float64.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from gpukit.huggingface.replacement import Settings, settings_of, why_not
from gpukit.kernels import decode_attention, flash_attention, flash_attention_varlen
from gpukit.kernels.flash_attention import DTYPES

NAME = "gpukit"
KERNELS = "flash_attention, decode_attention"
# The implementations whose masks can be made again for a call that falls back.
ORIGINALS = ("sdpa", "eager")
# What only some models pass, and what it would change: with a value, the call is not for our kernels.
_UNKNOWN = {"softcap": "soft-capped scores", "position_bias": "a bias on the scores", "s_aux": "attention sinks",
            "cache": "a paged cache", "head_mask": "masked heads"}  # fmt: skip


@dataclass
class Attention(Settings):
    """original: the implementation before, "sdpa" or "eager"."""

    original: str


# --------------------------------------------------------------------------------------------------------------- masks
def gpukit_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **more,
) -> Tensor | None:
    """The mask for `gpukit_attention`, in one of the three forms that this module's docstring lists.

    q_length queries from place q_offset on, kv_length keys from place kv_offset on. mask_function is transformers' rule of
    which pairs count; attention_mask [B, places] is false for padding.
    """
    if _is_causal(mask_function):
        found = _rows(q_length, kv_length, q_offset, kv_offset, attention_mask, batch_size, device)
        if found is not _NOT_ROWS:
            return found
    # Never None from here: by that sdpa_mask also means queries that stand beside the first keys.
    more["allow_is_causal_skip"] = False
    return masking_utils.sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device, **more,
    )  # fmt: skip


_NOT_ROWS = object()


def _rows(q_length: int, kv_length: int, q_offset, kv_offset: int, attention_mask: Tensor | None, batch: int, device):
    """The mask of causal attention in one of the first two forms, or _NOT_ROWS."""
    compiling = torch.compiler.is_compiling()
    if compiling and (attention_mask is not None or isinstance(q_offset, Tensor)):
        return _NOT_ROWS  # which depends on numbers that nobody knows yet
    # Keys up to the last query. A cache with room to spare has more.
    T_k = int(q_offset) + q_length - kv_offset
    if T_k != kv_length and (T_k > kv_length or kv_offset or compiling):
        return _NOT_ROWS
    if attention_mask is None:
        return None if T_k == kv_length else _all_real(torch.ones(batch, T_k, dtype=torch.bool, device=device))
    if attention_mask.shape[-1] < kv_offset + T_k:
        return _NOT_ROWS
    real = attention_mask[:, kv_offset : kv_offset + T_k].to(torch.bool)
    begins = real.clone()
    begins[:, 1:] &= ~real[:, :-1]
    # The CPU waits for the GPU here, once for all layers.
    everything, in_one_piece = torch.stack((real.all(), (begins.sum(dim=1) <= 1).all())).tolist()
    if everything:
        return None if T_k == kv_length else _all_real(real)
    # Packed tokens keep their distances, which a sliding window counts, if each sequence is in one piece.
    return real if in_one_piece else _NOT_ROWS


def _all_real(real: Tensor) -> Tensor:
    real._gpukit_all = True
    return real


def _is_causal(mask_function: Callable) -> bool:
    """Whether the rule is "keys up to the query's own place", all of them or those within a sliding window. The window's
    size need not be known here, since every layer passes its own; `passes_window` makes sure of that."""
    if mask_function is masking_utils.causal_mask_function:
        return True
    joined = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    return (
        len(joined) == 2
        and joined[1] is masking_utils.causal_mask_function
        and getattr(joined[0], "__qualname__", "").startswith("sliding_window_overlay.")
    )


def passes_window(module: nn.Module) -> bool:
    """Whether an attention module hands its sliding window to the attention function, by the name sliding_window."""
    constants = inspect.unwrap(type(module).forward).__code__.co_consts
    return any("sliding_window" in names for names in constants if isinstance(names, tuple))


class Tokens(NamedTuple):
    """Which tokens of a padded batch are real.

    q_places, k_places  their places among B x T_q and B x T_k, in order
    cu_q, cu_k          int32 [B + 1]: where each sequence's begin, once they are packed
    longest_q, longest_k
    first               int32 [B]: the first real key of each sequence
    to_the_end          whether every sequence's last key is real
    """

    q_places: Tensor
    k_places: Tensor
    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    first: Tensor
    to_the_end: bool


def _tokens(real: Tensor, T_q: int) -> Tokens:
    """real [B, T_k], of which the last T_q are queries too. Found once for a mask and kept with it: all layers get the same
    mask, and each search makes the CPU wait for the GPU."""
    key = T_q, real._version
    kept = getattr(real, "_gpukit_tokens", None)
    if kept is None or kept[0] != key:
        (q_places, cu_q, longest_q), (k_places, cu_k, longest_k) = _packed(real[:, -T_q:]), _packed(real)
        first, to_the_end = real.int().argmax(dim=1).int(), bool(real[:, -1].all())
        tokens = Tokens(q_places, k_places, cu_q, cu_k, longest_q, longest_k, first, to_the_end)
        real._gpukit_tokens = kept = key, tokens
    return kept[1]


def _packed(real: Tensor) -> tuple[Tensor, Tensor, int]:
    lengths = real.sum(dim=1, dtype=torch.int32)
    places = real.reshape(-1).nonzero().squeeze(1)
    return places, F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())


# ----------------------------------------------------------------------------------------------------------- attention
def gpukit_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **more,
) -> tuple[Tensor, Tensor | None]:
    """softmax(scaling q k^T) v of one layer, as transformers' attention modules call it.

    query [B, H, T_q, D], key and value [B, H_kv, T_k, D]; attention_mask as `gpukit_mask` made it; dropout and the rest as
    transformers' other attention functions take them. Returns (o [B, T_q, H, D], None): there are no attention weights.
    """
    settings = settings_of(module).get("attention")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # A model that shares its config with a patched one comes here too, and gets what it would have had.
    reason = "" if settings else "not patched"
    reason = reason or _why_not(module, query, key, value, attention_mask, dropout, is_causal, more)
    if reason:
        if settings:
            settings.report.fell_back("attention", reason)
        name = settings.original if settings else "sdpa"
        return _fall_back(
            name, module, query, key, value, attention_mask, sliding_window, is_causal,
            dropout=dropout, scaling=scaling, **more,
        )  # fmt: skip
    query, key, value = _cast(query, key, value)
    if attention_mask is not None:
        key, value = (x[:, :, : attention_mask.shape[1]] for x in (key, value))
        if getattr(attention_mask, "_gpukit_all", False):
            attention_mask = None
    (B, _, T_q, _), T_k = query.shape, key.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < T_k else None
    options = {"scale": scaling, "precision": _precision()}
    tokens = None if attention_mask is None else _tokens(attention_mask, T_q)
    if T_q == 1 and window is None and not torch.is_grad_enabled() and (tokens is None or tokens.to_the_end):
        o = decode_attention(
            query, key.transpose(1, 2), value.transpose(1, 2), _lengths(B, T_k, key.device),
            first=None if tokens is None else tokens.first, **options,
        )  # fmt: skip
    elif tokens is not None:
        o = _padded(query, key, value, tokens, window=window, **options)
    else:
        o = flash_attention(query, key, value, is_causal, window=window, **options)
    return o.transpose(1, 2), None


def _padded(query: Tensor, key: Tensor, value: Tensor, tokens: Tokens, **options) -> Tensor:
    B, H, T, D = query.shape
    q, k, v = (
        x.transpose(1, 2).reshape(-1, x.shape[1], D).index_select(0, places)
        for x, places in ((query, tokens.q_places), (key, tokens.k_places), (value, tokens.k_places))
    )
    o = flash_attention_varlen(q, k, v, tokens.cu_q, tokens.cu_k, tokens.longest_q, tokens.longest_k, True, **options)
    o = o.new_zeros(B * T, H, D).index_copy(0, tokens.q_places, o)
    return o.view(B, T, H, D).transpose(1, 2)


def _lengths(batch: int, tokens: int, device: torch.device) -> Tensor:
    """[batch] times `tokens`. All layers of a model decode at one length, and get one tensor; not while a graph is made, in
    which the tensor would be a part of the graph."""
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return torch.full((batch,), tokens, dtype=torch.int32, device=device)
    return _kept_lengths(batch, tokens, device)


@functools.lru_cache(maxsize=8)
def _kept_lengths(batch: int, tokens: int, device: torch.device) -> Tensor:
    return torch.full((batch,), tokens, dtype=torch.int32, device=device)


def _precision() -> str:
    """Of float32 products, as torch.set_float32_matmul_precision says."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """As autocast would; the decode kernel, which nobody trains with, does not do it itself."""
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return query, key, value
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))


def _why_not(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, is_causal: bool,
    more: dict,
) -> str:  # fmt: skip
    """Why this call is not for the kernels, or ""."""
    if dropout:
        return "dropout above 0 in training"
    if more.get("output_attentions"):
        return "attention weights are asked for"
    for name, reason in _UNKNOWN.items():
        if more.get(name) is not None:
            return reason
    if mask is not None and mask.ndim != 2:
        return "a mask that is neither causal nor padding"
    if mask is not None and not is_causal:
        return "padding where attention is not causal"
    if query.dtype not in DTYPES:
        return f"{query.dtype} tensors".replace("torch.", "")
    if not torch.is_autocast_enabled(query.device.type) and not query.dtype == key.dtype == value.dtype:
        return "query, key and value of different dtypes"
    if key.shape != value.shape or key.shape[-1] != query.shape[-1] or query.shape[-1] > 256:
        return "head sizes that differ or are above 256"
    return why_not(query, key, value)


# ------------------------------------------------------------------------------------------------------------ fallback
def _fall_back(
    name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    sliding_window: int | None, is_causal: bool, **more,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The call as the implementation called `name` would have got it."""
    if is_causal and (mask is None or mask.ndim == 2):
        mask = _table(name, query, key, mask, sliding_window)
    elif name == "eager" and mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    theirs = AttentionInterface()["sdpa"] if name == "sdpa" else eager_of(module)
    return theirs(
        module, query, key, value, mask, sliding_window=sliding_window, is_causal=is_causal, **more
    )  # fmt: skip


def _table(name: str, query: Tensor, key: Tensor, real: Tensor | None, sliding_window: int | None) -> Tensor | None:
    """The mask that transformers would have made for the implementation called `name`."""
    T_q, T_k = query.shape[2], key.shape[2]
    q_offset = (T_k if real is None else real.shape[1]) - T_q
    rule = masking_utils.causal_mask_function
    if sliding_window is not None:
        rule = masking_utils.sliding_window_causal_mask_function(sliding_window)
    build = masking_utils.sdpa_mask if name == "sdpa" else masking_utils.eager_mask
    return build(
        batch_size=len(query), q_length=T_q, kv_length=T_k, q_offset=q_offset, mask_function=rule, attention_mask=real,
        local_size=sliding_window, dtype=query.dtype, device=query.device,
    )  # fmt: skip


def eager_of(module: nn.Module) -> Callable | None:
    """The function eager_attention_forward of the file in which the module's class is defined, None if there is none."""
    for kind in type(module).__mro__:
        if found := getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None):
            return found
    return None


# ------------------------------------------------------------------------------------------------------- what is there
def is_attention(module: nn.Module) -> bool:
    """Whether the module calls transformers' attention interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "config")


def settings_for(module: nn.Module, report) -> Attention | str:
    """What `gpukit_attention` has to know of the module, or why the module keeps its attention."""
    config = module.config
    name = config._attn_implementation
    if name not in ORIGINALS:
        return f"uses {name}, and calls could not fall back to it"
    if any(getattr(x, "attn_logit_softcapping", None) is not None for x in (module, config)):
        return "soft-capped scores"
    if getattr(module, "reorder_and_upcast_attn", False) and name == "eager":
        return "reorder_and_upcast_attn"
    if getattr(config, "sliding_window", None) is not None and not passes_window(module):
        return "keeps its sliding window to itself"
    if name == "eager" and eager_of(module) is None:
        return "has no eager_attention_forward to fall back to"
    return Attention("attention", report, name)


# On import, so that a model that was saved whole finds its attention when it is loaded.
AttentionInterface.register(NAME, gpukit_attention)
AttentionMaskInterface.register(NAME, gpukit_mask)
