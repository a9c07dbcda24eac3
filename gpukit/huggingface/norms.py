"""RMSNorm and LayerNorm modules, whose rows gpukit.kernels normalizes in one pass.

Libraries write an RMSNorm's weight in two ways: y = x / rms(x) * weight (Llama), and y = x / rms(x) * (1 + weight) (Gemma,
whose weights begin at 0). The class's name does not tell which it is, so a copy of the module is tried on a small input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpukit.huggingface.replacement import Settings, computes, original, settings_of, stand_in, why_not
from gpukit.kernels import layer_norm, rms_norm


@dataclass
class Norm(Settings):
    """eps: as the kernel takes it, or None for the smallest step of the input's dtype, which torch.nn.RMSNorm uses.
    one_plus: whether the row is multiplied by 1 + weight.
    promotes: whether the result has the wider dtype of input and weight, as the products of PyTorch have."""

    eps: float | None
    one_plus: bool = False
    promotes: bool = False


def norm_forward(self, *arguments, **named):
    """What stands in for the forward of a norm. It takes one tensor; anything else goes to the original."""
    settings = settings_of(self)["norms"]
    x = arguments[0] if len(arguments) == 1 and not named else None
    weight, bias = self.weight, getattr(self, "bias", None)
    reason = why_not(x, weight, bias) if isinstance(x, Tensor) and x.ndim else "arguments other than one tensor"
    if reason:
        settings.report.fell_back("norms", reason)
        return original(self, *arguments, **named)
    x = x.to(_result_dtype(self, settings, x, weight))
    if isinstance(self, nn.LayerNorm):
        return layer_norm(x, weight, bias, settings.eps)
    eps = torch.finfo(x.dtype).eps if settings.eps is None else settings.eps
    # In float32, so that 1 + weight keeps the digits of a small weight.
    return rms_norm(x, weight.float() + 1 if settings.one_plus else weight, eps)


def _result_dtype(module: nn.Module, settings: Norm, x: Tensor, weight: Tensor | None) -> torch.dtype:
    """The dtype of the original's result, which what follows relies on."""
    if settings.promotes and weight is not None:
        return torch.promote_types(x.dtype, weight.dtype)
    # On a GPU autocast runs torch's own norms in float32; on the CPU it leaves them alone.
    native = isinstance(module, nn.LayerNorm | nn.RMSNorm)
    if native and x.is_cuda and x.dtype != torch.float64 and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return x.dtype


def kind_of(module: nn.Module) -> str:
    """The kernel that may compute what `module` computes, "" for what is no norm by its name."""
    if type(module) is nn.LayerNorm:
        return "layer_norm"
    # T5's LayerNorm, for one, is an RMSNorm; and of those that are not the report is to say so.
    return "rms_norm" if type(module).__name__.endswith(("RMSNorm", "LayerNorm")) else ""


def settings_for(module: nn.Module, report) -> Norm | str:
    """How the kernel has to be called for a module of which `kind_of` knows the kernel, or why it cannot be."""
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        if len(module.normalized_shape) != 1:
            return f"normalizes over {len(module.normalized_shape)} dimensions, the kernel over the last one"
        return Norm("norms", report, module.eps)
    eps = next(
        (value for name in ("variance_epsilon", "eps") if isinstance(value := getattr(module, name, None), float)), 0.0
    )
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if set(shapes) != {"weight"} or len(shapes["weight"]) != 1 or list(module.children()):
        return "has other parameters than one weight for each column"
    if not eps > 0:
        return "has no number called eps or variance_epsilon above 0"
    for one_plus in (False, True):
        if _is_rms_norm(module, shapes["weight"][0], eps, one_plus):
            return Norm("norms", report, eps, one_plus, _promotes(module, shapes["weight"][0]))
    return "computes something other than RMSNorm"


def _probe(N: int) -> tuple[Tensor, Tensor]:
    """A row and a weight that leave no doubt which formula it was, the same at every call: no random number is drawn."""
    steps = torch.arange(N, dtype=torch.float32)
    return torch.sin(steps * 1.7 + 0.3)[None] * 1.5, torch.cos(steps * 0.9)


def _is_rms_norm(module: nn.Module, N: int, eps: float, one_plus: bool) -> bool:
    x, weight = _probe(N)
    expected = F.rms_norm(x, (N,), 1 + weight if one_plus else weight, eps)
    # Rows as small as eps show where eps stands in the formula.
    small = x * eps**0.5
    expected_small = F.rms_norm(small, (N,), 1 + weight if one_plus else weight, eps)
    copy = stand_in(module, {"weight": nn.Parameter(weight)})
    return computes(lambda: copy.forward(x), expected) and computes(lambda: copy.forward(small), expected_small)


@torch.no_grad()
def _promotes(module: nn.Module, N: int) -> bool:
    x, weight = _probe(N)
    return stand_in(module, {"weight": nn.Parameter(weight)}).forward(x.bfloat16()).dtype == torch.float32
