"""`gpukit.patch(model)`: a model of Hugging Face computes with gpukit's kernels. `gpukit.unpatch(model)`: as before.

Which module gets which kernel is found by structure, and by trying a copy of the module on a small input. No list of model
classes is needed, and a class that only looks familiar keeps its own code. The report says what stays as it was, and why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

from torch import nn

from gpukit.huggingface import mlp as mlps
from gpukit.huggingface import norms as normalizations
from gpukit.huggingface import rope as rotations
from gpukit.huggingface.replacement import (
    Settings,
    add_settings,
    has_own_forward,
    is_replaced,
    put_back,
    replace_forward,
    settings_of,
)
from gpukit.huggingface.report import PARTS, Report

RECORD = "_gpukit_patch"  # the attribute of a patched model that holds its Record


@dataclass
class Record:
    """What `unpatch` has to put back.

    modules         that have settings or another forward
    configs         whose attention implementation was changed, and what it was
    loss_functions  models whose loss function was changed, and what they had of their own in its place, if anything
    """

    report: Report
    modules: list[nn.Module] = field(default_factory=list)
    configs: list[tuple] = field(default_factory=list)
    loss_functions: list[tuple] = field(default_factory=list)


def patch(
    model: nn.Module, norms: bool = True, rope: bool = True, mlp: bool = True, attention: bool = True, loss: bool = True
) -> Report:
    """Replace what gpukit has kernels for in `model`, in place. Returns a report, which can be printed.

    model      a torch.nn.Module: a causal language model of transformers (GPT-2, Llama, Qwen, Mistral, Gemma and others
               of their structure), also inside PEFT's, DDP's or FSDP's wrappers. In any other model the parts that are
               recognized are replaced; the report says which are not
    norms      RMSNorm, in Gemma's form with 1 + weight too, and LayerNorm
    rope       rotary position embedding of queries and keys
    mlp        the product act(gate) * up of gated layers, with SiLU or GELU, and GELU modules
    attention  FlashAttention and the decode kernel, through transformers' attention interface
    loss       with labels and in training mode, the loss without the logits: outputs.logits is None then. The model takes
               one more argument, skip_logits: False keeps the logits in training, True spares them in evaluation too

    Results and gradients are the original's within rounding, but for the hidden states of padding, which mean nothing.
    A loss without logits can be differentiated once. Calls that the kernels cannot take (dropout in attention, masks that
    are neither causal nor padding, attention in float64, a device without Triton) go to the original code; the report
    counts them. Class, parameters, hooks and names stay as they are, and what save_pretrained writes.

    Patching once more looks at the model anew, with the arguments of the new call. Raises TypeError for a model that is no
    torch.nn.Module and for arguments that are not True or False; RuntimeError where `unpatch` does.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model must be a torch.nn.Module, got {type(model).__name__}")
    options = dict(zip(PARTS, (norms, rope, mlp, attention, loss), strict=True))
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"patch: {name} must be True or False, got {value!r}")
    unpatch(model)
    owner = _owner(model)
    record = Record(Report(type(owner).__name__, options))
    owner.__dict__[RECORD] = record
    if norms:
        _patch_norms(model, record)
    if mlp:
        _patch_mlps(model, record)
    if rope:
        _patch_rope(model, record)
    if attention:
        _patch_attention(model, record)
    if loss:
        _patch_loss(owner, record)
    return record.report


def unpatch(model: nn.Module) -> None:
    """Take out what `patch` put into `model`: it computes what it did before, bit for bit. A model that is not patched stays
    as it is.

    Raises TypeError for what is no torch.nn.Module, ValueError for a part of a model that was patched as a whole, and
    RuntimeError, before anything is changed, where another library has replaced a forward after `patch` did.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch: model must be a torch.nn.Module, got {type(model).__name__}")
    owners = [module for module in model.modules() if RECORD in module.__dict__]
    if not owners and any(settings_of(module) for module in model.modules()):
        raise ValueError(f"unpatch: this {type(model).__name__} was patched as a part of a model; pass that model")
    records = [owner.__dict__[RECORD] for owner in owners]
    for module in (module for record in records for module in record.modules):
        if has_own_forward(module) and not is_replaced(module):
            raise RuntimeError(
                f"unpatch: the forward of a {type(module).__name__} was replaced once more after gpukit.patch; undo that first"
            )
    for record in records:
        for module in record.modules:
            put_back(module)
        for config, name in record.configs:
            if config._attn_implementation == "gpukit":
                config._attn_implementation = {"": name}  # this config alone, not those inside of it
        for of, own in record.loss_functions:
            of.__dict__.pop("_loss_function", None)
            of.__dict__.update(own)
    for owner in owners:
        del owner.__dict__[RECORD]


# --------------------------------------------------------------------------------------------------------------- parts
def _patch_norms(model: nn.Module, record: Record) -> None:
    for module in model.modules():
        if kernel := normalizations.kind_of(module):
            settings = normalizations.settings_for(module, record.report)
            _replace(module, normalizations.norm_forward, settings, "norms", kernel, record)


def _patch_mlps(model: nn.Module, record: Record) -> None:
    inside = set()  # the activations of gated layers
    for module in model.modules():
        if mlps.is_gated(module):
            settings = mlps.gated_settings(module, record.report)
            if _replace(module, mlps.gated_forward, settings, "mlp", mlps.kernel_of(settings), record):
                inside.add(id(module.act_fn))
    for module in model.modules():
        if mlps.is_gelu(module) and id(module) not in inside:
            settings = mlps.gelu_settings(module, record.report)
            _replace(module, mlps.gelu_forward, settings, "mlp", "gelu", record)


def _patch_rope(model: nn.Module, record: Record) -> None:
    found: dict[type, Callable | str] = {}
    for module in model.modules():
        if rotations.calls_rope(module):
            kind = type(module)
            if kind not in found:
                found[kind] = rotations.forward_with_rope(module, record.report)
            forward = found[kind]
            settings = forward if isinstance(forward, str) else Settings("rope", record.report)
            _replace(module, forward, settings, "rope", "rope", record)


def _patch_attention(model: nn.Module, record: Record) -> None:
    attentions = _transformers("attention")
    for module in model.modules() if attentions else ():
        if not attentions.is_attention(module):
            continue
        settings = attentions.settings_for(module, record.report)
        if isinstance(settings, str):
            record.report.kept["attention", type(module).__name__, settings] += 1
            continue
        add_settings(module, settings)
        record.modules.append(module)
        record.report.replaced["attention", type(module).__name__, attentions.KERNELS] += 1
    # Only now: the settings of a later layer depend on what its config says.
    configs = {id(module.config): module.config for module in record.modules if "attention" in settings_of(module)}
    for config in configs.values():
        record.configs.append((config, config._attn_implementation))
        config._attn_implementation = {"": attentions.NAME}


def _patch_loss(owner: nn.Module, record: Record) -> None:
    losses = _transformers("loss")
    if not losses or not losses.is_causal_lm(owner):
        return
    settings = losses.settings_for(owner, record.report)
    forward = losses.forward_without_logits(type(owner))
    if _replace(owner, forward, settings, "loss", "linear_cross_entropy", record):
        replace_forward(settings.head, losses.head_forward, settings)
        record.modules.append(settings.head)
        own = {name: owner.__dict__[name] for name in ("_loss_function",) if name in owner.__dict__}
        record.loss_functions.append((owner, own))
        owner.loss_function = settings.loss_function


def _replace(
    module: nn.Module, forward: Callable, settings: Settings | str, part: str, kernel: str, record: Record
) -> bool:
    """Replace one forward and say so in the report. settings: a string says why it cannot be done."""
    if not isinstance(settings, str) and has_own_forward(module):
        settings = "another library has replaced its forward"
    name = type(module).__name__
    if isinstance(settings, str):
        record.report.kept[part, name, settings] += 1
        return False
    replace_forward(module, forward, settings)
    record.modules.append(module)
    record.report.replaced[part, name, kernel] += 1
    return True


def _transformers(part: str) -> ModuleType | None:
    """gpukit.huggingface.<part>, which needs transformers; None where it is not loaded, since then no model is one of its."""
    if "transformers" not in sys.modules:
        return None
    from gpukit.huggingface import attention, loss

    return {"attention": attention, "loss": loss}[part]


def _owner(model: nn.Module) -> nn.Module:
    """The model of transformers inside of wrappers, or `model` itself."""
    if "transformers" not in sys.modules:
        return model
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
