"""Whether a result is the right one, and in a sentence how it is not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gpukit.grading import wire
from gpukit.grading.evidence import Wrong

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from gpukit.testing import Mismatch

_LONG_INT_BITS = 256  # 78 digits; of more than 4,300 Python refuses to make text


def plain(
    actual: Any, expected: Any, tolerance: float = 0.0, unit: str = "", names: Sequence[str] = ()
) -> Wrong | None:
    """Whether a plain result is the expected one; `tolerance`, `unit` and the `names` of several as in FunctionExercise."""

    def wrong(kind: str, text: str) -> Wrong:
        return Wrong(kind, text, actual=actual, expected=expected)

    if isinstance(actual, wire.Foreign):
        return wrong("type", f"returned a {actual.type}, expected {_kind(expected)}")
    if hasattr(expected, "untyped_storage"):
        return _plain_tensor(actual, expected, tolerance)
    if isinstance(expected, list | tuple):
        if not isinstance(actual, list | tuple):
            return wrong("type", f"returned {_kind(actual)}, expected {len(expected)} values")
        if len(actual) != len(expected):
            return wrong("shape", f"returned {len(actual)} values, expected {len(expected)}")
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            if (item := plain(a, e, tolerance, unit)) is not None:
                return wrong(item.kind, f"{_called(names, i)}: {item.text}")
        return None
    if isinstance(expected, bool) or not isinstance(expected, int | float):
        if type(actual) is not type(expected):
            return wrong("type", f"returned {_kind(actual)}, expected {_kind(expected)}")
        return None if actual == expected else wrong("values", f"expected {_short(expected)}, yours {_short(actual)}")
    if isinstance(actual, bool) or not isinstance(actual, int | float):
        return wrong("type", f"returned {_kind(actual)}, expected a number")
    if isinstance(expected, int) and isinstance(actual, float) and actual == expected:
        return wrong("values", f"expected {_number(expected)}{unit and ' '}{unit}, an int, yours {actual!r}, a float")
    if actual == expected == 0 and math.copysign(1, expected) < 0 < math.copysign(1, actual):
        return wrong("values", "expected -0.0, yours 0.0")
    if actual == expected or (actual != actual and expected != expected):
        return None
    if tolerance and _near(actual, expected, tolerance):
        return None
    unit = f" {unit}" if unit else ""
    # Where equality is asked for, each digit counts.
    right, yours = told_apart(expected, actual) if tolerance else (_number(expected), _number(actual))
    return wrong("values", f"expected {right}{unit}, yours {yours}")


def _called(names: Sequence[str], i: int) -> str:
    if len(names) == 1:
        return names[0].format(i)
    return names[i] if i < len(names) else f"value {i}"


def _near(actual: float, expected: float, tolerance: float) -> bool:
    try:
        return math.isfinite(actual) and math.isfinite(expected) and abs(actual - expected) <= tolerance * abs(expected)
    except OverflowError:  # an integer beyond the largest float
        return False


def _plain_tensor(actual: Any, expected: Tensor, tolerance: float) -> Wrong | None:
    """A tensor that plain PyTorch made; `tolerance` is relative to the largest element."""

    def wrong(kind: str, text: str) -> Wrong:
        return Wrong(kind, text, actual=actual, expected=expected)

    if not hasattr(actual, "untyped_storage"):
        return wrong("type", f"returned {_kind(actual)}, expected a torch.Tensor")
    if actual.shape != expected.shape:
        return wrong("shape", f"shape {list(actual.shape)}, expected {list(expected.shape)}")
    if actual.dtype != expected.dtype:
        return wrong("dtype", f"{_dtype(actual)}, expected {_dtype(expected)}")
    size = expected.nan_to_num(0.0, 0.0, 0.0).abs().max() if expected.numel() else 0.0
    near = (actual - expected).abs() <= tolerance * size
    far = ~(near | (actual == expected) | (actual.isnan() & expected.isnan()))
    if not bool(far.any()):
        return None
    at = tuple(_first(far))
    right, yours = told_apart(float(expected[at]), float(actual[at]))
    text = f"element {list(at)} expected" if at else "expected"
    return wrong("values", f"{text} {right}, yours {yours}{_how_many(int(far.sum()), far.numel())}")


def tensors(
    outputs: dict[str, Any],
    truths: Sequence[Tensor],
    natives: Sequence[Tensor],
    shown: Sequence[str] = (),
    gradients: bool = False,
) -> Wrong | None:
    """Whether a kernel exercise's results are right, each against its reference in float64 and in the case's dtype.

    shown      what the exercise calls the first ones, where that is not their name
    gradients  whether all behind the first are gradients
    """
    if len(outputs) != len(truths):
        text = f"returned {len(outputs)} tensors, expected {len(truths)}"
        return Wrong("type", text, actual=outputs, expected=truths)
    called = dict(zip(outputs, shown, strict=False))
    for (name, actual), truth, native in zip(outputs.items(), truths, natives, strict=True):
        wrong = tensor(name, actual, truth, native, gradient=gradients and name != "y", shown=called.get(name, ""))
        if wrong is not None:
            return wrong
    return None


def tensor(name: str, actual: Any, truth: Tensor, native: Tensor, *, gradient: bool, shown: str = "") -> Wrong | None:
    """Whether one output tensor is right: type, shape, dtype, every element written, values. `shown`: what the exercise
    calls it, where that is not its name."""
    import torch

    from gpukit.testing import compare

    shown = shown or name

    def wrong(kind: str, text: str, mismatch: Mismatch | None = None) -> Wrong:
        return Wrong(kind, text, name, actual, truth, mismatch)

    if actual is None:
        return wrong("no-gradient", f"{shown} is missing: the result does not know how to differentiate itself")
    if type(actual) is not torch.Tensor:
        kind = actual.type if isinstance(actual, wire.Foreign) else type(actual).__name__
        return wrong("type", f"{shown} is a {kind}, expected a torch.Tensor")
    if actual.shape != native.shape:
        return wrong("shape", f"{shown} has shape {list(actual.shape)}, expected {list(native.shape)}")
    if actual.dtype != native.dtype:
        return wrong("dtype", f"{shown} is {_dtype(actual)}, expected {_dtype(native)}")
    mismatch = compare(actual, truth, native, gradient=gradient)
    if mismatch is None:
        return None
    stray = torch.isnan(actual) & ~torch.isnan(truth)
    at = f"{shown}{list(mismatch.index)}" if mismatch.index else shown
    if bool(stray.any()):
        count = f"{int(stray.sum()):,} of {actual.numel():,} elements of {shown} are NaN; first at {_first(stray)}"
        return wrong("nan", count if actual.numel() > 1 else f"{shown} is NaN", mismatch)
    right, yours = told_apart(mismatch.expected, mismatch.actual)
    text = f"{at} expected {right}, yours {yours}{_how_many(mismatch.wrong, mismatch.total)}"
    return wrong("values", text, mismatch)


def rounded(
    outputs: dict[str, Tensor],
    truths: Sequence[Tensor],
    singles: Sequence[Tensor],
    shown: Sequence[str] = (),
    gradients: bool = False,
) -> str:
    """How results in 16 bits are not those of float32 arithmetic, rounded once; empty if they are. singles: the reference's
    in float32."""
    from gpukit.testing import compare_rounded

    called = dict(zip(outputs, shown, strict=False))
    for (name, actual), truth, single in zip(outputs.items(), truths, singles, strict=True):
        mismatch = compare_rounded(actual, truth, single, gradient=gradients and name != "y")
        if mismatch is not None:
            right, yours = told_apart(mismatch.expected, mismatch.actual)
            at = f"{called.get(name, name)}{list(mismatch.index)}"
            return f"{at} is {right}, yours {yours}{_how_many(mismatch.wrong, mismatch.total)}"
    return ""


def same(predicted: dict[str, Tensor], outputs: dict[str, Any]) -> bool:
    """Whether the outputs that a wrong idea speaks of are what it gives."""
    import torch

    for name, wrong in predicted.items():
        actual = outputs.get(name)
        if type(actual) is not torch.Tensor or actual.shape != wrong.shape:
            return False
        eps = torch.finfo(actual.dtype).eps if actual.dtype.is_floating_point else 0.0
        # A wrong idea may lose digits where the right result does not: exponentials of scores without their scale, say. With
        # the digits of float32 it is still told from any other.
        most = (16 if eps > 1e-6 else 128) * eps
        actual, wrong = (
            actual.double(),
            wrong.to(actual.dtype).double(),
        )  # where its dtype ends, an idea's result is infinite
        size = wrong[torch.isfinite(wrong)].abs().max() if bool(torch.isfinite(wrong).any()) else torch.tensor(1.0)
        if not torch.allclose(actual, wrong, rtol=most, atol=float(most * size), equal_nan=True):
            return False
    return True


def nearer(predicted: dict[str, Tensor], outputs: dict[str, Any], truths: dict[str, Tensor]) -> bool:
    """Whether one of the outputs lies clearly nearer to what a wrong idea gives than to the right result: in 16 bits the two may
    differ by less than `same` allows."""
    import torch

    def off(x: Tensor, actual: Tensor) -> float:
        x, actual = x.to(actual.dtype).double(), actual.double()
        alike = (x == actual) | (x.isnan() & actual.isnan())
        return float(torch.where(alike, 0, (x - actual).abs().nan_to_num(torch.inf)).max()) if actual.numel() else 0.0

    return any(off(wrong, outputs[name]) < 0.8 * off(truths[name], outputs[name]) for name, wrong in predicted.items())


def doubled(args: tuple, dtype: str = "float64") -> tuple:
    """The arguments with float64 for every floating-point tensor, which lies in memory as it did: an idea may read it with
    other strides."""
    import torch

    wide = getattr(torch, dtype)

    def double(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
            return x
        if x.is_contiguous():
            return x.to(wide)
        memory = x.new_empty(0).set_(x.untyped_storage()).to(wide)
        return memory.as_strided(x.shape, x.stride(), x.storage_offset())

    return tuple(map(double, args))


def reference(function: Callable, args: tuple, gradients: int) -> list[Tensor]:
    """What `function` returns, then the gradients of its first arguments; the last argument is then dy."""
    import torch

    if not gradients:
        with torch.no_grad():
            result = function(*args)
        return list(result) if isinstance(result, tuple | list) else [result]
    *inputs, dy = args
    for i in range(gradients):
        inputs[i] = inputs[i].detach().requires_grad_()
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs[:gradients], dy)]


def told_apart(expected: float, actual: float) -> tuple[str, str]:
    """Both numbers with as many digits as it takes to see that they differ, five at least; integers with all of theirs."""

    def shown(value: float, digits: int) -> str:
        if isinstance(value, int):
            return _number(value)
        text = f"{value:,.{digits}g}"
        return f"{value:,.0f}" if "e+" in text and abs(value) < 1e15 else text

    for digits in range(5, 18):
        right, yours = shown(expected, digits), shown(actual, digits)
        if right != yours:
            break
    return right, yours


def _how_many(wrong: int, total: int) -> str:
    return f" ({wrong:,} of {total:,} elements differ)" if total > 1 else ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**18 else _short(value)


def _short(value: Any) -> str:
    """The beginning of what Python writes for `value`."""
    if isinstance(value, int) and value.bit_length() > _LONG_INT_BITS:
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _kind(value: Any) -> str:
    if value is None:
        return "nothing (None)"
    name = value.type if isinstance(value, wire.Foreign) else type(value).__name__
    return f"{'an' if name[:1] in tuple('aeiou') else 'a'} {name}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first(where: Tensor) -> list[int]:
    return [int(i) for i in where.nonzero()[0]]
