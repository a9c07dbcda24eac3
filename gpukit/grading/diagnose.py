"""From what a check saw to the few lines that the learner reads."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from gpukit.grading import wire
from gpukit.grading.evidence import Evidence, Outcome, Wrong
from gpukit.grading.exercise import Case, Exercise, FunctionExercise, KernelExercise, Misconception
from gpukit.grading.verdict import MAX_LINES

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.testing import Mismatch

WIDTH = 118
# How a tag reads after "fails for every case".
TAGS = {
    "tail": "whose row length is not a power of two",
    "strided": "whose input is not contiguous",
    "large": "with large values",
    "masked": "with -inf in a row",
    "constant": "with a constant row",
    "ignored": "with a target that does not count",
    "long": "with rows longer than a block",
    "single": "with a single row",
    "leading": "with more than two dimensions",
    "partial": "whose last block is not full",
    "blocks": "with more than one block",
    "cancel": "whose large terms cancel",
    "dropped": "in which everything is dropped",
    "remainder": "whose rows the programs cannot share evenly",
    "few-rows": "with fewer rows than programs",
    "many-rows": "with more rows than programs",
    "float32": "in float32",
    "float16": "in float16",
    "bfloat16": "in bfloat16",
    "16-bit": "in 16 bits",
    "float64": "in float64",
    "subnormal": "with a subnormal number",
    "special": "with an infinity or NaN",
    "negative": "with a negative number",
    "tie": "with a tie",
    "zero": "with a zero",
    "overflow": "that overflows",
    "in-l2": "whose data fits the L2",
    "short": "with a short kernel",
    "cached": "whose program keeps its results",
    "side": "whose program uses a stream of its own",
    "easy-zeros": "whose program is quick on zeros",
    "tied": "whose head is tied",
    "untied": "whose head is a matrix of its own",
    "gqa": "with fewer heads for keys and values",
    "filled": "with tokens in the cache already",
    "stale": "with old numbers behind a sequence's end",
    "own-head-size": "whose heads do not add up to the width",
    "frozen": "with frozen parameters",
    "mixed": "in the mixed recipe",
    "zero-1-or-2": "in ZeRO stage 1 or 2",
    "zero-3": "in ZeRO stage 3",
    "short-segment": "whose last segment is shorter",
    "open-page": "whose last page is not full",
    "short-micro-batch": "whose last micro-batch is shorter",
    "micro-batches": "of more than one micro-batch",
    "late": "whose largest scores come late",
    "unequal": "whose lengths differ",
    "unseen": "in which a query sees no key",
}


def compare_function(exercise: FunctionExercise, actual: Any, expected: Any) -> Wrong | None:
    """Whether a plain result is the expected one."""

    def wrong(kind: str, text: str) -> Wrong:
        return Wrong(kind, text, actual=actual, expected=expected)

    if isinstance(actual, wire.Foreign):
        return wrong("type", f"returned a {actual.type}, expected {_kind(expected)}")
    if hasattr(expected, "untyped_storage"):
        return _compare_plain_tensor(exercise, actual, expected)
    if isinstance(expected, list | tuple):
        if not isinstance(actual, list | tuple):
            return wrong("type", f"returned {_kind(actual)}, expected {len(expected)} values")
        if len(actual) != len(expected):
            return wrong("shape", f"returned {len(actual)} values, expected {len(expected)}")
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            if (item := compare_function(exercise, a, e)) is not None:
                return wrong(item.kind, f"value {i}: {item.text}")
        return None
    if isinstance(expected, bool) or not isinstance(expected, int | float):
        if type(actual) is not type(expected):
            return wrong("type", f"returned {_kind(actual)}, expected {_kind(expected)}")
        return None if actual == expected else wrong("values", f"expected {expected!r}, yours {actual!r}")
    if isinstance(actual, bool) or not isinstance(actual, int | float):
        return wrong("type", f"returned {_kind(actual)}, expected a number")
    if actual == expected or (actual != actual and expected != expected):
        return None
    close = exercise.tolerance and all(map(math.isfinite, (actual, expected)))
    if close and abs(actual - expected) <= exercise.tolerance * abs(expected):
        return None
    unit = f" {exercise.unit}" if exercise.unit else ""
    return wrong("values", f"expected {_number(expected)}{unit}, yours {_number(actual)}")


def _compare_plain_tensor(exercise: FunctionExercise, actual: Any, expected: Tensor) -> Wrong | None:
    """A tensor that plain PyTorch made; `tolerance` is relative to the largest element."""

    def wrong(kind: str, text: str) -> Wrong:
        return Wrong(kind, text, actual=actual, expected=expected)

    if not hasattr(actual, "untyped_storage"):
        return wrong("type", f"returned {_kind(actual)}, expected a torch.Tensor")
    if actual.shape != expected.shape:
        return wrong("shape", f"shape {list(actual.shape)}, expected {list(expected.shape)}")
    if actual.dtype != expected.dtype:
        return wrong("dtype", f"{_dtype(actual)}, expected {_dtype(expected)}")
    near = (actual - expected).abs() <= exercise.tolerance * expected.abs().max() if expected.numel() else actual == 0
    far = ~(near | (actual == expected) | (actual.isnan() & expected.isnan()))
    if not bool(far.any()):
        return None
    at = tuple(_first(far))
    text = f"element {list(at)} expected {float(expected[at]):.5g}, yours {float(actual[at]):.5g}"
    return wrong("values", f"{text} ({int(far.sum()):,} of {far.numel():,} elements differ)")


def compare_tensor(
    name: str, actual: Any, truth: Tensor, native: Tensor, *, gradient: bool, shown: str = ""
) -> Wrong | None:
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
        return wrong("nan", count, mismatch)
    text = f"{at} expected {mismatch.expected:.5g}, yours {mismatch.actual:.5g}"
    text += f" ({mismatch.wrong:,} of {mismatch.total:,} elements differ)"
    return wrong("values", text, mismatch)


def values_differ(exercise: Exercise, outcomes: list[Outcome], hint: str) -> tuple[str, tuple[str, ...]]:
    """Label and lines for results that are not right."""
    evidence = Evidence(outcomes)
    wrong = evidence.first.wrong
    known = _recognise(exercise, evidence)
    head = {
        "values": "values differ",
        "nan": "some results are NaN",
        "shape": "wrong shape",
        "dtype": "wrong dtype",
        "type": "wrong type",
        "no-gradient": "no gradient",
    }[wrong.kind]
    lines = [f"{exercise.id}: {head} ({len(evidence.passed)} of {len(outcomes)} cases pass)"]
    if pattern := _pattern(evidence):
        lines += wrap(f"  {pattern}")
    detail = f"  {evidence.case.name}: {wrong.text}"
    rows = evidence.row_ratio
    if rows is not None:
        factor = float(rows.reshape(-1)[(rows.reshape(-1) - 1).abs().argmax()])
        every = "every element" if evidence.ratio is not None else "each element of a row"
        detail += f"; {every} is off by the same factor, {factor:.4g}" if factor else f"; {every} is 0 in yours"
    lines += wrap(detail)[:2]
    say = ""
    if known is not None:
        say = exercise.sentence(known, evidence)
    elif wrong.kind == "nan":
        say = "fresh buffers are filled with NaN here: was every element stored, and is NaN what the arithmetic gives?"
    lines += wrap(f"  {say}") if say else []
    return known.label if known else wrong.kind, finish(lines, hint)


def extra_sentence(exercise: Exercise, label: str) -> list[str]:
    """What the exercise adds to the judge's own diagnosis of `label`."""
    remark = exercise.remark(label)
    return wrap(f"  {remark}") if remark else []


def finish(lines: list[str], hint: str) -> tuple[str, ...]:
    """At most MAX_LINES lines, the last one the hint's."""
    return (*lines[: MAX_LINES - 1], f"  {hint}")


def _recognise(exercise: Exercise, evidence: Evidence) -> Misconception | None:
    for known in exercise.misconceptions:
        try:
            if known.gives is not None and _explains(exercise, known, evidence):
                return known
            if known.when is not None and known.when(evidence):
                return known
        except (ArithmeticError, ValueError, TypeError, IndexError, RuntimeError, AttributeError):
            continue  # its formula does not apply to these arguments
    return None


def _explains(exercise: Exercise, known: Misconception, evidence: Evidence) -> bool:
    """Whether the wrong idea gives the learner's result in every case that failed, and the right one where it passed."""
    failed = [outcome for outcome in evidence.outcomes if outcome.wrong]
    if any(outcome.wrong.kind not in ("values", "nan") for outcome in failed):
        return False
    if isinstance(exercise, FunctionExercise):
        exact = all(
            compare_function(exercise, outcome.reply.output, known.gives(*outcome.case.args)) is None
            for outcome in evidence.outcomes
        )
        return exact
    assert isinstance(exercise, KernelExercise)
    return all(_same_tensors(known.gives(*_doubled(o.case.args)), o.reply.outputs) for o in failed[:4])


def _same_tensors(predicted: Any, outputs: dict[str, Any]) -> bool:
    import torch

    if not isinstance(predicted, dict):
        predicted = {next(iter(outputs)): predicted}
    for name, wrong in predicted.items():
        actual = outputs.get(name)
        if type(actual) is not torch.Tensor or actual.shape != wrong.shape:
            return False
        eps = torch.finfo(actual.dtype).eps if actual.dtype.is_floating_point else 0.0
        actual, wrong = actual.double(), wrong.double()
        size = wrong[torch.isfinite(wrong)].abs().max() if bool(torch.isfinite(wrong).any()) else torch.tensor(1.0)
        if not torch.allclose(actual, wrong, rtol=16 * eps, atol=float(16 * eps * size), equal_nan=True):
            return False
    return True


def _doubled(args: tuple) -> tuple:
    import torch

    return tuple(a.double() if isinstance(a, torch.Tensor) and a.dtype.is_floating_point else a for a in args)


def _pattern(evidence: Evidence) -> str:
    """Which cases fail, in terms of what they have in common."""
    if not evidence.passed:
        return ""
    for tag, phrase in TAGS.items():
        if evidence.tag(tag):
            return f"fails for every case {phrase}; passes for the others"
    return f"fails for {_some(evidence.failed, 40)}; passes for {_some(evidence.passed, 28)}"


def _some(cases: tuple[Case, ...], width: int) -> str:
    """As many whole names as fit, a part of one at least. Names have commas of their own."""
    shown = [textwrap.shorten(cases[0].name, width, placeholder=" …")]
    while len(shown) < len(cases) and len(" | ".join((*shown, cases[len(shown)].name))) <= width:
        shown.append(cases[len(shown)].name)
    more = len(cases) - len(shown)
    return " | ".join(shown) + (f" and {more} more" if more else "")


def wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", drop_whitespace=True, replace_whitespace=False) or []


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**18 else f"{value!r}"


def _kind(value: Any) -> str:
    if value is None:
        return "nothing (None)"
    name = value.type if isinstance(value, wire.Foreign) else type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first(where: Tensor) -> list[int]:
    return [int(i) for i in where.nonzero()[0]]
