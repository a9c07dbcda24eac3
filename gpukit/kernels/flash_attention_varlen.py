"""FlashAttention over sequences of different lengths, packed one after the other without padding.

The same kernel, to be read first: `attention_packed` in solutions/flash_attention.py.

The kernels are those of gpukit.kernels.flash_attention: they read from cu_seqlens where a sequence begins and ends, and
programs for blocks that a short sequence does not have end at once.
"""

import itertools
from typing import Literal, overload

import torch
from torch import Tensor

from gpukit.kernels._arguments import check_tensors
from gpukit.kernels._autograd import differentiable, operator
from gpukit.kernels._flash_backward import flash_attention_bwd
from gpukit.kernels._flash_choices import Packed
from gpukit.kernels.flash_attention import (
    cast,
    check,
    flash_attention_fwd,
    gradients,
    reach,
)


def _as_one_batch(x: Tensor) -> Tensor:
    """[total, H, D] as the launchers take it, [1, H, total, D]."""
    return x.transpose(0, 1).unsqueeze(0)


def _as_packed(x: Tensor) -> Tensor:
    return x.squeeze(0).transpose(0, 1)


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    left: int, right: int, scale: float, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o, laid out as q, and the LSE [H, total_q]."""
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    o, lse, _ = flash_attention_fwd(*map(_as_one_batch, (q, k, v)), left, right, scale, precision, packed=packed)
    return _as_packed(o), lse.squeeze(0)


def varlen_bwd(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    left: int, right: int, scale: float, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv, laid out as q, k and v."""
    packed = Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    gradients = flash_attention_bwd(
        _as_one_batch(do), dlse if dlse is None else dlse.unsqueeze(0), *map(_as_one_batch, (q, k, v, o)),
        lse.unsqueeze(0), left, right, scale, precision, packed=packed,
    )  # fmt: skip
    return tuple(map(_as_packed, gradients))


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(_as_packed(torch.empty_like(_as_one_batch(x))) for x in tensors)


_attention = differentiable(
    operator(
        "flash_attention_varlen",
        varlen_fwd,
        like=lambda q, *_: (*_like(q), q.new_empty(q.shape[1::-1], dtype=torch.float32)),
    ),
    operator("flash_attention_varlen_bwd", varlen_bwd, like=lambda do, dlse, q, k, v, *_: _like(q, k, v)),
    # cu_seqlens are saved, so that autograd notices when somebody fills them anew before the backward pass.
    keep=lambda inputs, results: ((*inputs[:3], *results, *inputs[3:5]), inputs[5:]),
    gradients=gradients,
    public=2,
    materialize=False,
)


def _check_lengths(name: str, cu_seqlens: Tensor, longest: int, x: Tensor, of: str) -> None:
    """Raise unless cu_seqlens describes x [total, H, D]. Its numbers are looked at once for each tensor, since a GPU has to
    be waited for, and not at all inside torch.compile or the capture of a CUDA graph."""
    op = "flash_attention_varlen"
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{op}: {name} must be int32 or int64 [sequences + 1], got {list(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if cu_seqlens.device != x.device:
        raise ValueError(f"{op}: {name} is on {cu_seqlens.device}, {of} on {x.device}; they must be on one device")
    if not isinstance(longest, int):
        raise TypeError(f"{op}: max_seqlen_{name[-1]} must be a Python integer, got {longest!r}")
    if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    version = 0 if cu_seqlens.is_inference() else cu_seqlens._version  # what inference mode makes counts no changes
    key = version, len(x), longest
    if getattr(cu_seqlens, "_gpukit_checked", None) == key:
        return
    places = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(places)]
    if places[0] != 0 or places[-1] != len(x) or min(lengths, default=0) < 0:
        raise ValueError(
            f"{op}: {name} must rise from 0 to the {len(x)} rows of {of}, got {_shortened(places)}, lengths "
            f"{_shortened(lengths)}"
        )
    if max(lengths, default=0) > longest:
        raise ValueError(f"{op}: max_seqlen_{name[-1]} is {longest}, and a sequence of {name} has {max(lengths)}")
    cu_seqlens._gpukit_checked = key


def _shortened(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:8]))}, ...]"


@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool = ..., scale: float | None = ..., window: int | None = ..., *,
    precision: str = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool = ..., scale: float | None = ..., window: int | None = ..., *,
    precision: str = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    *,
    precision: str = "ieee",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of sequences that lie one after the other: each attends to itself alone.

    q [total_q, H, D], k and v [total_k, H_kv, D]; sequence i is rows cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1 of q, and
    so of k and v with cu_seqlens_k. Both are int32 or int64 [sequences + 1], begin with 0 and end with the total; a
    sequence may be empty. max_seqlen_q, max_seqlen_k: the longest lengths, or more.
    The rest is as in `flash_attention`, for each sequence; lse is [H, total_q].

    Raises what `flash_attention` raises, and ValueError for cu_seqlens that do not rise or do not fit. To see that, the CPU
    waits for the GPU the first time a cu_seqlens tensor is passed, and when it has changed since (one made in inference mode
    is looked at once); inside torch.compile nobody looks.
    """
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    check_tensors("flash_attention_varlen", **tensors)
    q, k, v = cast(q, k, v)
    scale = check("flash_attention_varlen", q, k, v, scale, window, precision, "total H D")
    _check_lengths("cu_seqlens_q", cu_seqlens_q, max_seqlen_q, q, "q")
    _check_lengths("cu_seqlens_k", cu_seqlens_k, max_seqlen_k, k, "k")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"flash_attention_varlen: cu_seqlens_q and cu_seqlens_k must describe as many sequences, got "
            f"{len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}"
        )
    settings = *reach(causal, window), scale, precision
    cu_seqlens_q, cu_seqlens_k = (cu.int().contiguous() for cu in (cu_seqlens_q, cu_seqlens_k))
    o, lse = _attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *settings)
    return (o, lse) if return_lse else o
