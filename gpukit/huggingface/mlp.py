"""The feed-forward layers: act(gate) * up in one pass, and GELU.

A gated layer (Llama, Qwen, Mistral, Gemma) computes down_proj(act(gate_proj(x)) * up_proj(x)). The three projections stay
what they are, so that LoRA, quantized layers and hooks on them keep working; only the product between them is replaced.
An ungated layer (GPT-2) has its GELU module replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpukit.huggingface.replacement import Settings, computes, original, settings_of, stand_in, why_not
from gpukit.kernels import geglu, gelu, swiglu

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass
class Activation(Settings):
    """name: of ACTIVATIONS."""

    name: str


def name_of(activation) -> str:
    """Which of ACTIVATIONS a module or function computes, "" for none: found by trying, since many classes compute one
    formula."""
    x = torch.linspace(-6, 6, 241)
    call = stand_in(activation).forward if isinstance(activation, nn.Module) else activation
    # The two forms of GELU differ by 5e-4 at most, so that the tolerance is less.
    return next((name for name, fn in ACTIVATIONS.items() if computes(lambda: call(x), fn(x))), "")


# -------------------------------------------------------------------------------------------------------- gated layers
def gated_forward(self, x):
    """What stands in for the forward of a gated layer."""
    settings = settings_of(self)["mlp"]
    gate, up = self.gate_proj(x), self.up_proj(x)
    reason = why_not(gate, up) or ("gate and up of different dtypes" if gate.dtype != up.dtype else "")
    if reason:
        settings.report.fell_back("mlp", reason)
        return self.down_proj(self.act_fn(gate) * up)
    return self.down_proj(gated_product(settings.name, gate, up))


def gated_product(name: str, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up, where `name` is of ACTIVATIONS."""
    if name == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, "tanh" if name == "gelu_tanh" else "none")


def kernel_of(settings: Activation | str) -> str:
    """The kernel's name, for the report."""
    return "swiglu" if getattr(settings, "name", "") == "silu" else "geglu"


def is_gated(module: nn.Module) -> bool:
    """Whether the module has the parts of a gated layer."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in PROJECTIONS)


def gated_settings(module: nn.Module, report) -> Activation | str:
    """How a gated layer's product is computed, or why the kernels cannot."""
    activation = getattr(module, "act_fn", None)
    if not callable(activation):
        return "has no act_fn"
    name = name_of(activation)
    if not name:
        return f"its activation is {type(activation).__name__}, and the kernels have SiLU and GELU"
    return Activation("mlp", report, name) if _is_gated_product(module, activation) else _OTHER


_OTHER = "computes something other than down_proj(act_fn(gate_proj(x)) * up_proj(x))"


@torch.no_grad()
def _is_gated_product(module: nn.Module, activation) -> bool:
    weights = {name: torch.sin(torch.arange(20.0) * (i + 1) + i) for i, name in enumerate(PROJECTIONS)}
    layers = {}
    for name, (rows, columns) in zip(PROJECTIONS, ((5, 4), (5, 4), (4, 5)), strict=True):
        layers[name] = nn.Linear(columns, rows, bias=False, device="meta")
        layers[name].weight = nn.Parameter(weights[name].view(rows, columns))
    x = torch.cos(torch.arange(8.0)).view(1, 2, 4)
    expected = layers["down_proj"](activation(layers["gate_proj"](x)) * layers["up_proj"](x))
    copy = stand_in(module, modules=layers)
    return computes(lambda: copy.forward(x), expected)


# ---------------------------------------------------------------------------------------------------------------- GELU
def gelu_forward(self, *arguments, **named):
    """What stands in for the forward of a GELU module."""
    settings = settings_of(self)["mlp"]
    x = arguments[0] if len(arguments) == 1 and not named else None
    reason = why_not(x) if isinstance(x, Tensor) and x.ndim else "arguments other than one tensor"
    if reason:
        settings.report.fell_back("mlp", reason)
        return original(self, *arguments, **named)
    return gelu(x, "tanh" if settings.name == "gelu_tanh" else "none")


def is_gelu(module: nn.Module) -> bool:
    """Whether the module's name says that it computes a GELU, of whichever form."""
    return "gelu" in type(module).__name__.lower() and not list(module.children()) and not list(module.parameters())


def gelu_settings(module: nn.Module, report) -> Activation | str:
    """Which form of GELU a module computes, or that it is neither of the two that the kernels have."""
    name = name_of(module)
    return Activation("mlp", report, name) if name.startswith("gelu") else "computes another form of GELU"
