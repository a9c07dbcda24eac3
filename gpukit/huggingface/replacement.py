"""One module's forward, replaced and put back.

The new forward lies in the module's own dictionary, where Python finds it before the class's. Class, parameters, buffers,
hooks and names stay as they are, so that state_dict, save_pretrained, .to(device) and whatever wraps the model see no
difference. copy.deepcopy copies the replacement with the module.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpukit.huggingface.report import Report
from gpukit.kernels._dtypes import DTYPES
from gpukit.kernels._launch import interpreted

NAME = "_gpukit"  # the attribute of a replaced module that holds its Settings


@dataclass
class Settings:
    """What a replaced forward has to know of its module.

    part    the row of the report: "norms", "rope", "mlp", "attention" or "loss"
    report  where calls are counted that go to the original code
    """

    part: str
    report: Report


def settings_of(module: nn.Module) -> dict[str, Settings]:
    """The settings of a module, by part; {} for one that nothing was replaced in."""
    return module.__dict__.get(NAME, {})


def add_settings(module: nn.Module, settings: Settings) -> None:
    # Past nn.Module's own __setattr__, which looks for parameters and modules.
    module.__dict__.setdefault(NAME, {})[settings.part] = settings


def has_own_forward(module: nn.Module) -> bool:
    """Whether the module's forward is not its class's: it is ours, or another library's."""
    return "forward" in module.__dict__


def is_replaced(module: nn.Module) -> bool:
    """Whether the module's forward is what `replace_forward` put there. A module that was pickled has its class's instead:
    a bound method is stored by its name, forward."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return function is type(module).forward or getattr(function, "gpukit", False)


def replace_forward(module: nn.Module, forward: Callable, settings: Settings) -> None:
    """Make `forward(module, ...)` the module's forward. The module must have none of its own yet."""
    add_settings(module, settings)
    forward.gpukit, forward.__name__ = True, "forward"
    module.forward = types.MethodType(forward, module)


def put_back(module: nn.Module) -> None:
    """Undo `replace_forward` and `add_settings`."""
    module.__dict__.pop("forward", None)
    module.__dict__.pop(NAME, None)


def original(module: nn.Module, *arguments, **named):
    """module's forward as its class has it."""
    return type(module).forward(module, *arguments, **named)


def why_not(*tensors: Tensor | None) -> str:
    """Why the kernels cannot take these tensors, or "" if they can. None stands for an argument that is not there."""
    for x in tensors:
        if x is None:
            continue
        if type(x) not in (Tensor, nn.Parameter):
            return f"tensors of type {type(x).__name__}"
        if x.dtype not in DTYPES:
            return f"{x.dtype} tensors".replace("torch.", "")
        if not (x.is_cuda or (x.is_cpu and interpreted())):
            return f"tensors on device {x.device.type}"
    return ""


def stand_in(module: nn.Module, parameters: dict | None = None, modules: dict | None = None) -> nn.Module:
    """A copy of `module` without hooks and with other parameters or submodules, to try out what its forward computes. The
    module itself is not touched, and neither are its weights, which may lie on any device, or on none."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    for name in ("forward", NAME):
        copy.__dict__.pop(name, None)
    for name, old in copy.__dict__.items():
        if "_hooks" in name and isinstance(old, dict):
            copy.__dict__[name] = {}
    if parameters is not None:
        copy.__dict__["_parameters"] = parameters
    if modules is not None:
        copy.__dict__["_modules"] = {**module._modules, **modules}
    copy.__dict__["training"] = False
    return copy


@torch.no_grad()
def computes(call: Callable[[], Tensor], expected: Tensor) -> bool:
    """Whether call() returns `expected`, up to float32's rounding. A call that raises does not."""
    try:
        found = call()
    except Exception:  # whatever an unknown module raises on an input it was not made for
        return False
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return torch.allclose(found.double(), expected.double(), rtol=1e-4, atol=1e-5)
