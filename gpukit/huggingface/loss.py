"""The loss of a causal language model without its logits.

transformers computes logits = lm_head(hidden), [B, T, V], and hands them to a loss function. For a vocabulary of 128,000
they are most of a training step's memory. gpukit's linear_cross_entropy takes the hidden states and lm_head's weight
instead, and holds the logits of a few tokens at a time.

So while a model in training mode is called with labels, lm_head's own forward computes the loss, and returns it in the
place of the logits. The model hands it on to its loss function, which recognizes it and returns it. The hooks of lm_head
run as ever; FSDP needs that, since it gathers the weight for just this call. A model that changes its logits before they
reach the loss function (soft-capping, a factor) is noticed, because what arrives is no longer what lm_head returned. The
call is then made again without the kernel, and so are all later ones.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from gpukit.huggingface.replacement import Settings, original, settings_of, why_not
from gpukit.huggingface.report import Report
from gpukit.kernels import linear_cross_entropy

HEAD = "lm_head"
# What a caller may pass on to the loss function through the model.
_OPTIONS = ("num_items_in_batch", "ignore_index", "shift_labels")


class _LogitsChanged(Exception):
    """The loss function got something other than what lm_head returned."""


@dataclass
class Loss(Settings):
    """What a model and its lm_head share.

    head     the layer that would compute the logits
    call     what a call under way has to say to lm_head: the labels and _OPTIONS; then the loss. Empty otherwise
    changed  whether the model turned out to change its logits before the loss function gets them
    """

    head: nn.Linear
    call: dict = field(default_factory=dict)
    changed: bool = False

    def loss_function(self, logits: Tensor, labels: Tensor, *arguments, **named) -> Tensor:
        """What stands in for ForCausalLMLoss."""
        if "labels" not in self.call:
            return ForCausalLMLoss(logits, labels, *arguments, **named)
        if logits is not self.call.get("loss"):
            raise _LogitsChanged
        return logits


def forward_without_logits(model_class: type) -> Callable:
    """What stands in for the forward of a causal language model of this class. The result has no logits (None) where the
    loss was computed without them: in training mode, and where a caller passes skip_logits=True."""
    theirs = inspect.unwrap(model_class.forward)
    names = list(inspect.signature(theirs).parameters)[1:]

    # inspect.signature, by which generate() and the Trainer find out what a model takes, shows the original's arguments.
    @functools.wraps(theirs)
    def forward(self, *arguments, skip_logits: bool | None = None, **named):
        settings = settings_of(self)["loss"]
        given = {**dict(zip(names, arguments, strict=False)), **named}
        wanted = given.get("labels") is not None and (self.training if skip_logits is None else skip_logits)
        reason = _why_not(self, settings, given) if wanted else ""
        if reason:
            settings.report.fell_back("loss", reason)
        if not wanted or reason:
            return original(self, *arguments, **named)
        settings.call["labels"] = given["labels"]
        settings.call["options"] = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
        try:
            outputs = original(self, *arguments, **named)
            if "loss" not in settings.call:  # lm_head could not do it
                return outputs
            # A ModelOutput does not let go of an entry, so a new one is made.
            return type(outputs)(**{name: x for name, x in outputs.items() if name != "logits"})
        except torch.OutOfMemoryError:
            raise
        except (_LogitsChanged, IndexError, RuntimeError, TypeError, ValueError):
            # A loss has no dimensions: whoever takes a part of the logits before the loss function does is seen by that.
            if "loss" not in settings.call:
                raise
            settings.changed = True
        finally:
            settings.call.clear()
        return forward(self, *arguments, skip_logits=skip_logits, **named)

    return forward


def head_forward(self, hidden):
    """What stands in for the forward of lm_head. hidden [B, T, D]; returns logits, or the loss while a call asks for it."""
    settings = settings_of(self)["loss"]
    if "labels" not in settings.call:
        return original(self, hidden)
    # Only here, where FSDP has put the weight together.
    if reason := why_not(hidden, self.weight):
        settings.report.fell_back("loss", reason)
        settings.call.clear()
        return original(self, hidden)
    options = settings.call["options"]
    ignored = options.get("ignore_index", -100)
    targets = options.get("shift_labels")
    if targets is None:  # token t predicts token t + 1, and the last one nothing
        targets = F.pad(settings.call["labels"], (0, 1), value=ignored)[..., 1:]
    total = options.get("num_items_in_batch")
    loss = linear_cross_entropy(
        hidden, self.weight, targets.to(hidden.device).reshape(hidden.shape[:-1]), ignored,
        reduction="mean" if total is None else "sum",
    )  # fmt: skip
    if total is not None:
        loss = loss / (total.to(loss.device) if isinstance(total, Tensor) else total)
    settings.call["loss"] = loss
    return loss


def _why_not(model: nn.Module, settings: Loss, given: dict) -> str:
    """Why this call has to compute logits, or ""."""
    if settings.changed:
        return "the model changes its logits before its loss"
    if getattr(model, HEAD) is not settings.head:
        return "lm_head was exchanged after patch"
    if getattr(model.loss_function, "__self__", None) is not settings:
        return "another loss function was set after patch"
    if given.get("return_dict", getattr(model.config, "return_dict", True)) is False:
        return "a tuple is asked for"
    kept = given.get("logits_to_keep", 0)
    return "logits_to_keep" if isinstance(kept, Tensor) or kept != 0 else ""


def is_causal_lm(model: nn.Module) -> bool:
    """Whether the model hands lm_head's result and labels to the loss function that all models of transformers share."""
    forward = inspect.unwrap(type(model).forward)
    return (
        isinstance(getattr(model, HEAD, None), nn.Module)
        and "labels" in inspect.signature(forward).parameters
        and "loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ())
    )


def settings_for(model: nn.Module, report: Report) -> Loss | str:
    """What the model and lm_head have to know for a loss without logits, or why there can be none."""
    head = getattr(model, HEAD)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in head.__dict__:
        return f"its lm_head is {type(head).__name__}, not a plain torch.nn.Linear"
    if head.bias is not None:
        return "its lm_head has a bias"
    if model.loss_function is not ForCausalLMLoss:
        return "has a loss function of its own"
    if getattr(model.config, "final_logit_softcapping", None) is not None:
        return "soft-capped logits"
    return Loss("loss", report, head)
