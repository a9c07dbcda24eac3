"""What stands between a launcher and PyTorch: its operator, which torch.compile sees, and its gradient.

A kernel module writes launchers, functions of tensors and numbers that fill new tensors. `operator` registers one with
PyTorch, and `differentiable` makes of a forward and a backward launcher the function that the public one calls.
"""

import inspect
import typing
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Operator(typing.NamedTuple):
    """A launcher, and the operator of PyTorch that calls it. torch.compile does not look into an operator, so that any
    shape works and no graph breaks. Outside of it the launcher alone will do: an operator costs the CPU 9 µs per call."""

    name: str
    launcher: Callable
    op: Callable

    def either(self, compiled: bool) -> Callable:
        """What a backward pass calls that is made of several operators: `compiled` says whether torch.compile looks at it."""
        return self.op if compiled else self.launcher


def operator(name: str, launcher: Callable, like: Callable, mutates: Sequence[str] = (), **inside) -> Operator:
    """gpukit::name, which takes what the launcher takes but for its keyword-only parameters.

    like     with the same arguments: results of the same shapes, strides and dtypes, of which nothing is computed
    mutates  the names of the parameters that are written to
    inside   keyword-only arguments that the launcher gets from the operator
    A result that is not there is None for both; an operator cannot return that, and an empty tensor stands for it."""

    def call(*inputs):
        return _without_none(launcher(*inputs, **inside), inputs)

    # PyTorch reads from the signature what an operator takes and returns.
    whole = inspect.signature(launcher)
    taken = [parameter for parameter in whole.parameters.values() if parameter.kind is not parameter.KEYWORD_ONLY]
    returned = whole.return_annotation
    if typing.get_origin(returned) is tuple:
        returned = tuple[(Tensor,) * len(typing.get_args(returned))]
    call.__signature__ = whole.replace(parameters=taken, return_annotation=returned)
    op = torch.library.custom_op(f"gpukit::{name}", call, mutates_args=mutates)
    op.register_fake(lambda *inputs: _without_none(like(*inputs), inputs))
    return Operator(name, launcher, op)


def _without_none(results, inputs: tuple):
    if not isinstance(results, tuple) or None not in results:
        return results
    first = next(x for x in inputs if isinstance(x, Tensor))
    return tuple(first.new_empty(0) if x is None else x for x in results)


def differentiable(
    forward: Operator,
    backward: Operator,
    *,
    keep: Callable,
    gradients: Callable,
    again: Callable | None = None,
    public: int = 1,
    materialize: bool = True,
) -> Callable:
    """A function of forward's arguments that returns its first `public` results, and has a gradient.

    keep         keep(inputs, results) -> (tensors, settings): ctx.saved_tensors and ctx.settings of the backward pass
    gradients    gradients(backward, ctx, *upstream) -> the gradients of the first inputs, in their order; those of the
                 others are None. `backward` is the launcher or, inside torch.compile, the operator
    again        again(ctx, *upstream) -> the same through operations that PyTorch can differentiate once more, for
                 create_graph=True, under which a launcher's results would count as constants. None: RuntimeError
    materialize  whether an upstream gradient that nobody sent is zeros; else it is None

    Inside torch.compile it is the operator, under torch.no_grad() the launcher alone, and else a torch.autograd.Function,
    which costs the CPU 4 to 5 µs per call: autograd's part of an operator would cost 17.
    """

    def save(ctx, inputs, output) -> None:
        tensors, ctx.settings = keep(inputs, output)
        ctx.given = [x is not None for x in inputs]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(materialize)

    def shown(results):
        if not isinstance(results, tuple):
            return results
        return results[0] if public == 1 else results[:public]

    def of_inputs(ctx, found) -> tuple:
        found = found if isinstance(found, tuple) else (found,)
        there = [gradient if given else None for gradient, given in zip(found, ctx.given, strict=False)]
        return *there, *(None,) * (len(ctx.given) - len(found))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            results = forward.launcher(*inputs)
            save(ctx, inputs, results)
            return shown(results)

        @staticmethod
        def backward(ctx, *upstream):
            if not torch.is_grad_enabled():
                return of_inputs(ctx, gradients(backward.launcher, ctx, *upstream))
            if again is None:
                raise RuntimeError(f"{forward.name}: there is no second derivative, which create_graph=True asks for")
            return of_inputs(ctx, again(ctx, *upstream))

    def setup_context(ctx, inputs, output) -> None:
        save(ctx, inputs, output)
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[public:])

    forward.op.register_autograd(
        lambda ctx, *upstream: of_inputs(ctx, gradients(backward.op, ctx, *upstream[:public])),
        setup_context=setup_context,
    )

    def call(*inputs):
        if torch.compiler.is_compiling():
            return shown(forward.op(*inputs))
        if torch.is_grad_enabled():
            return Function.apply(*inputs)
        return shown(forward.launcher(*inputs))

    return call


def refuse_second(op: str) -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated itself: its results would count as constants."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{op}: there is no second derivative, which create_graph=True asks for")


def through_pytorch(fn: Callable, inputs: Sequence[Tensor | None], upstream: Sequence[Tensor | None]) -> tuple:
    """The gradients of fn(*inputs) through PyTorch's own operations, which can be differentiated once more: what `again`
    returns where no formula is at hand. None where an input is None or needs no gradient."""
    # Views, so that an input which was computed from another one still counts as independent of it.
    inputs = [None if x is None else x.view_as(x) for x in inputs]
    outputs = fn(*inputs)
    pairs = zip(outputs if isinstance(outputs, tuple) else (outputs,), upstream, strict=True)
    outputs, upstream = zip(*(pair for pair in pairs if pair[1] is not None), strict=True)
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    gradients = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=True, allow_unused=True))
    return tuple(next(gradients) if x is not None and x.requires_grad else None for x in inputs)
