"""Rotary position embedding inside transformers' attention modules.

The attention modules of one file call a function apply_rotary_pos_emb of that file. Replacing it there would change every
model of the family in the process, patched or not. So the module gets a forward that is the same compiled code with other
global names: one of them, apply_rotary_pos_emb, is ours.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpukit.huggingface.replacement import computes, why_not
from gpukit.huggingface.report import Report
from gpukit.kernels import rope

NAME = "apply_rotary_pos_emb"


def calls_rope(module: nn.Module) -> bool:
    """Whether the forward of the module's class calls a global function apply_rotary_pos_emb."""
    forward = inspect.unwrap(type(module).forward)
    return NAME in getattr(forward, "__globals__", {}) and NAME in forward.__code__.co_names


def forward_with_rope(module: nn.Module, report: Report) -> Callable | str:
    """The forward of the module's class that turns queries and keys with the kernel, or why there can be none."""
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType) or hasattr(forward, "__wrapped__"):
        return "its forward is wrapped in a decorator"
    theirs = forward.__globals__[NAME]
    if not _turns_halves(theirs):
        return "its apply_rotary_pos_emb is not the rotation of a head's two halves"
    names = {**forward.__globals__, NAME: _with_kernel(theirs, report)}
    # torch.compile looks global names up in the module called __name__, and would find the original there.
    del names["__name__"]
    ours = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__, ours.__annotations__, ours.__doc__ = (
        forward.__kwdefaults__,
        forward.__annotations__,
        forward.__doc__,
    )
    ours.__module__, ours.__qualname__ = forward.__module__, forward.__qualname__
    return ours


def _with_kernel(theirs: Callable, report: Report) -> Callable:
    kept: tuple = (None, None, 0, ())  # cos and sin, for how many sequences, and their halves

    def halves_of(cos: Tensor, sin: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """The first halves, [sequences, T, D/2]. All layers of a model get the same two tables. To cut them anew in each
        costs the host 7 µs, where the kernel's checks and launch cost 25."""
        nonlocal kept
        if torch.compiler.is_compiling():
            return _halves(cos, sin, sequences)
        found = kept  # another thread may replace it
        if cos is not found[0] or sin is not found[1] or sequences != found[2]:
            kept = found = cos, sin, sequences, _halves(cos, sin, sequences)
        return found[3]

    def apply_rotary_pos_emb(q, k, cos, sin, *arguments, **named):
        """q and k [B, H, T, D] with cos and sin [B or 1, T, D], whose second halves repeat the first."""
        reason = "arguments other than q, k, cos and sin" if arguments or named else _why_not(q, k, cos, sin)
        if reason:
            report.fell_back("rope", reason)
            return theirs(q, k, cos, sin, *arguments, **named)
        return rope(q, k, *halves_of(cos, sin, len(q)))

    return apply_rotary_pos_emb


def _halves(cos: Tensor, sin: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
    # One table for all sequences is read with a stride of 0.
    cos, sin = (table[..., : table.shape[-1] // 2].expand(sequences, -1, -1) for table in (cos, sin))
    return cos, sin


def _why_not(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str:
    B, _, T, D = q.shape
    if cos.shape not in ((B, T, D), (1, T, D)) or sin.shape != cos.shape or (k.shape[0], *k.shape[2:]) != (B, T, D):
        return "tables of another shape"
    if q.dtype != k.dtype:
        return "queries and keys of different dtypes"
    # The tables are wider than q and k under autocast; the kernel computes in float32 then, and rounds once.
    autocast = torch.is_autocast_enabled(q.device.type)
    if not autocast and torch.promote_types(q.dtype, cos.dtype) != q.dtype:
        return "tables wider than queries and keys"
    return why_not(q, k, cos, sin)


def _turns_halves(theirs: Callable) -> bool:
    """Whether `theirs` computes (q1 cos - q2 sin, q2 cos + q1 sin) of a head's halves q1 and q2, for q and for k."""
    steps = torch.arange(2 * 2 * 3 * 8, dtype=torch.float32)
    q, k = torch.sin(steps).view(2, 2, 3, 8), torch.cos(steps * 0.7).view(2, 2, 3, 8)[:, :1]
    angles = torch.arange(2 * 3 * 4, dtype=torch.float32).view(2, 3, 4) * 0.37
    cos, sin = (torch.cat((table, table), dim=-1) for table in (angles.cos(), angles.sin()))
    turned = [_turned(x, angles.cos()[:, None], angles.sin()[:, None]) for x in (q, k)]
    return all(computes(lambda i=i: theirs(q, k, cos, sin)[i], turned[i]) for i in range(2))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
