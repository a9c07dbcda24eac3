"""What stands between a kernel and PyTorch's autograd."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class _NoBackward:
    """The context of a Function's forward pass after which none goes back: what it hands over to be kept is let go."""

    def save_for_backward(self, *tensors) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


def apply(function: type[torch.autograd.Function], *inputs):
    """function.apply(*inputs). Under torch.no_grad() its forward pass alone: autograd's part takes the CPU a third of a
    small kernel's call."""
    return function.apply(*inputs) if torch.is_grad_enabled() else function.forward(_NoBackward(), *inputs)


def refuse_second(op: str) -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated itself: its results would count as constants."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{op}: there is no second derivative, which create_graph=True asks for")


def differentiable(fn: Callable, inputs: Sequence[Tensor | None], upstream: Sequence[Tensor | None]) -> list:
    """The gradients of fn(*inputs) through PyTorch's own operations, which can be differentiated once more: what a
    backward pass returns under create_graph=True. None where an input is None or needs no gradient."""
    # Views, so that an input which was computed from another one still counts as independent of it.
    inputs = [None if x is None else x.view_as(x) for x in inputs]
    outputs = fn(*inputs)
    pairs = zip(outputs if isinstance(outputs, tuple) else (outputs,), upstream, strict=True)
    outputs, upstream = zip(*(pair for pair in pairs if pair[1] is not None), strict=True)
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    gradients = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=True, allow_unused=True))
    return [next(gradients) if x is not None and x.requires_grad else None for x in inputs]
