"""Which wrong ideas explain what a check saw, and what the cases that fail have in common."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from types import CellType, FunctionType
from typing import Any

from gpukit.grading.evidence import Evidence, Outcome
from gpukit.grading.exercise import Case, Exercise, Misconception
from gpukit.grading.ideas import On

# Its formula does not apply to these arguments.
_INAPPLICABLE = (ArithmeticError, ValueError, TypeError, IndexError, KeyError, RuntimeError, AttributeError)
# How a tag of a case reads after "fails for every case"; told where it tells the failed cases from the others.
TAGS = {
    "all-masked": "with a row of nothing but -inf",
    "beyond": "whose products or sums are beyond float32",
    "low": "with scores far below 0",
    "lifted": "whose residual lifts what is far below 0 above it",
    "underflow": "that is as small as numbers get",
    "outlier": "that begins far from the rest of it",
    "high": "with scores of 1,000",
    "faint": "with one score far above the others",
    "buried": "with some scores 100 above the others",
    "late-rise": "whose maximum rises by 11 in float16",
    "creeping": "with a maximum that rises by very little",
    "small-gradients": "with small gradients",
    "zeros": "with a block of zeros",
    "idle": "with a block of gradients of 0",
    "hidden": "with a high score where a query must not look",
    "fine": "whose scores have more digits than 16 bits",
    "turn": "with sums around 1.4",
    "eps": "with another eps than the usual one",
    "one-element": "in which one element of c alone tells the formats apart",
    "both": "in which both programs keep their results",
    "many-programs": "with nearly as many programs as rows",
    "sure": "in which the log-sum-exp is 0",
    "once": "in 16 bits whose results may be rounded only once",
    "counts": "with more elements than a number of 16 bits can count",
    "close": "with random numbers close to the threshold",
    "other-ratio": "with another number of tokens per parameter than 20",
    "several": "in which a name is called at several levels",
    "nested": "with calls inside calls",
    "tail": "whose row length is not a power of two",
    "open": "whose n is not a multiple of 4",
    "loops": "with fewer threads than float4s",
    "strided": "whose input is not contiguous",
    "large": "with large values",
    "masked": "with -inf in a row",
    "constant": "with a constant row",
    "ignored": "with a target that does not count",
    "long": "with rows longer than a block",
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
    "subnormal": "with a subnormal number",
    "special": "with an infinity or NaN",
    "negative": "with a negative number",
    "tie": "with a tie",
    "hair": "a hair beside a tie or a number of the format",
    "zero": "with a zero",
    "overflow": "that overflows",
    "in-l2": "whose data fits the L2",
    "short": "with a short kernel",
    "cached": "whose program keeps its results",
    "side": "whose program uses a stream of its own",
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
    "endless": "with a window of 2^31 - 1 keys",
    "first-block": "in which some queries of a program see none of its first block of keys",
    "aligned": "whose rows fill whole sectors",
    "misaligned": "that begins inside a sector",
    "off": "with lanes that are off",
    "broadcast": "in which several lanes want one word",
    "uniform": "in which all threads go round equally often",
    "ragged": "whose last warp or tile is not full",
    "ragged-c": "whose last tiles of C are not full",
    "ragged-k": "whose last block of K is not full",
    "long-k": "with more than one block of K",
    "deep": "with a very long K",
    "wide": "with more than eight tiles in a row",
    "many-blocks": "with very many blocks",
    "batched": "with more than one matrix",
    "a-strides": "whose a is not contiguous",
    "b-strides": "whose b is not contiguous",
    "strided-dy": "whose dy is not contiguous",
    "strides": "whose caches are not contiguous",
    "view": "with a view",
    "gaps": "whose elements do not lie side by side",
    "kinds": "with rows of many kinds",
    "tall": "with more rows than columns",
    "small-numbers": "with numbers around 1e-6",
    "many-tokens": "with several hundred tokens",
    "square": "whose matrices are square",
    "short-group": "whose last group is shorter",
    "short-chunk": "whose last chunk is shorter",
    "groups": "with more than one group",
    "uneven": "whose parts differ in size",
    "empty": "in which a part is empty",
    "empty-tensor": "with an empty tensor",
    "empty-piece": "with an empty piece",
    "padding-alone": "with a micro-batch of padding alone",
    "no-token": "with a sequence that has no token",
    "unused": "with a cache that is far longer than its sequences",
    "none": "without any keys",
    "equal": "whose maxima are equal",
    "rises": "whose second maximum is larger",
    "falls": "whose first maximum is larger",
    "steep": "whose scores are far apart",
    "positive": "whose numbers are all positive",
    "scaled": "with numbers around 1,000",
    "large-sums": "whose partial sums are beyond 65,504",
    "far": "far from 0",
    "digits": "whose sums have more digits than 16 bits hold",
    "far-target": "whose targets are far below the rest",
    "below": "with values far below 0",
    "tiny": "whose numbers or results are tiny",
    "small": "with a small norm",
    "drift": "whose values rise from block to block",
    "hot": "with large values in rows that do not count",
    "outside": "with values outside all bins",
    "smooth": "with label smoothing",
    "z": "with a z-loss",
    "heads": "with more than one head",
    "rest": "whose last block of queries is not full",
    "sequences": "with more than one sequence",
    "no-query": "with a sequence that has no query",
    "prompt": "whose cache is empty",
    "new-tokens": "with more than one new token",
    "first": "with the first token of a sequence",
    "batch": "with a batch",
    "long-run": "with many new tokens",
    "int8": "with a cache of 8 bits",
    "mha": "with as many heads for keys as for queries",
    "causal": "with a causal mask",
    "gated": "with a gated MLP",
    "sparse": "whose peak counts on sparsity",
    "recomputed": "with recomputation",
    "interrupted": "with interruptions",
    "moe": "of a mixture of experts",
    "fused": "with fused kernels",
    "separate": "with three kernels",
    "cache": "with a cache",
    "no-cache": "without a cache",
    "never": "in which no batch is large enough",
    "ieee": "in full float32",
    "tf32": "in tf32",
    "fp16": "in fp16",
    "bf16": "in bf16",
    "bf16 sums": "with sums in bf16",
    "several-fit": "that more than one format explains",
    "fp32": "in fp32",
    "int32": "in int32",
    "decay": "with weight decay",
    "early": "in its first steps",
    "large-eps": "with a large eps",
    "tensors": "of more than one tensor",
    "exact": "whose numbers need no rounding",
    "stopped": "in which training stops and goes on",
    "any-step": "with steps of any size",
    "runs": "with the same token several times in a row",
    "nothing": "in which there is nothing to join",
    "rising": "in the warm-up",
    "no-warm-up": "without a warm-up",
    "end": "after the last step",
    "padding": "with padding",
    "counts-differ": "whose micro-batches have different counts of tokens",
    "many": "of many micro-batches",
    "gpus": "on several GPUs",
    "one": "on a single GPU",
    "ddp": "with DDP",
    "fsdp": "with FSDP",
}


def ideas(exercise: Exercise, evidence: Evidence) -> tuple[Misconception, ...]:
    """The first of the exercise's wrong ideas that explains what was seen; where none does, the first two that do so
    together; or none."""
    # A plain result of another type or length can be what an idea gives; a tensor of another shape stands beside no other.
    comparable = not exercise.kernel or all(o.wrong.kind in ("values", "nan") for o in evidence.outcomes if o.wrong)
    for known in exercise.misconceptions:
        try:
            if known.gives is not None and comparable and exercise.explains(known.gives, evidence.outcomes):
                return (known,)
            if known.when is not None and known.when(evidence):
                several = comparable and len(evidence.failed) > 2
                return (several and _two(exercise, evidence)) or (known,)  # a pair that predicts all results says more
        except _INAPPLICABLE:
            continue
    return _two(exercise, evidence) if comparable else ()


def _two(exercise: Exercise, evidence: Evidence) -> tuple[Misconception, ...]:
    """Two ideas at once, which change the result in one of the ways of `_together`."""
    outcomes = exercise.told_by(evidence.outcomes)
    moved: list[tuple[Misconception, list[Any]]] = []
    for known in exercise.misconceptions:
        try:
            found = [exercise.predicts(known.gives, outcome) for outcome in outcomes] if known.gives else []
        except _INAPPLICABLE:
            continue
        if found:
            moved.append((known, found))
    for (first, firsts), (second, seconds) in combinations(moved, 2):
        if first.label == second.label:
            continue
        try:
            way = next(  # the two change every result in one way
                (
                    way
                    for way in _together(exercise, first.gives, second.gives)
                    if all(
                        (guess := way(a, b, outcome)) is not None and exercise.fits(guess, outcome)
                        for a, b, outcome in zip(firsts, seconds, outcomes, strict=True)
                    )
                ),
                None,
            )
            if way is not None and (
                any(  # where one of them explains each case alone, they may exclude each other
                    not exercise.fits(a, outcome) and not exercise.fits(b, outcome)
                    for a, b, outcome in zip(firsts, seconds, outcomes, strict=True)
                )
                or _apart(exercise, firsts, seconds, outcomes)
            ):
                if exercise.plausible(partial(_guess, exercise, first, second, way), evidence.outcomes):
                    return first, second
        except _INAPPLICABLE:
            continue
    return ()


def _apart(exercise: Exercise, firsts: list[Any], seconds: list[Any], outcomes: list[Outcome]) -> bool:
    """Whether two ideas that explain the results of plain numbers change no result both. Then neither excludes the other, and it
    does not matter which of the two is asked first. Of a kernel's cases too few are looked at to tell."""
    return not exercise.kernel and all(
        exercise.fits(_apply(_either, *pair, exercise.truth(outcome)), outcome)
        for a, b, outcome in zip(firsts, seconds, outcomes, strict=True)
        for pair in ((a, b), (b, a))
    )


def _guess(exercise: Exercise, first: Misconception, second: Misconception, way: Callable, outcome: Outcome) -> Any:
    """What two ideas give at once in a case, in the given one of the ways in which they may."""
    a, b = (exercise.predicts(known.gives, outcome) for known in (first, second))
    return way(a, b, outcome)


def _together(exercise: Exercise, first: Callable[..., Any], second: Callable[..., Any]) -> list[Callable]:
    """The ways in which two ideas may change a result at once, each a function of what they give alone and the case: as one
    function with an option of each, one on the arguments that the other changes, by a sum or a product of the two changes, or
    by one change where the other makes none. None where a way does not apply."""

    def ways() -> Iterator[Callable]:
        both = merged(first, second)
        if both is not None:
            yield lambda a, b, outcome: exercise.predicts(both, outcome)
        for one, other in ((first, second), (second, first)):
            if isinstance(one, On):
                on = On(one.change, other)
                yield lambda a, b, outcome, on=on: exercise.predicts(on, outcome)
        for combine in (_sum, _product, _either, lambda a, b, right: _either(b, a, right)):
            yield lambda a, b, outcome, combine=combine: _apply(combine, a, b, exercise.truth(outcome))

    def applied(way: Callable) -> Callable:
        def guess(a: Any, b: Any, outcome: Outcome) -> Any:
            try:
                return way(a, b, outcome)
            except _INAPPLICABLE:
                return None

        return guess

    return [applied(way) for way in ways()]


def _sum(a: Any, b: Any, right: Any) -> Any:
    return a + b - right


def _product(a: Any, b: Any, right: Any) -> Any:
    """Where the right result is 0, a factor changes nothing."""
    if hasattr(right, "untyped_storage"):
        return _either(a, b, right).where(right == 0, a * b / right)
    if not right:
        return _either(a, b, right)
    exact = all(isinstance(each, int) for each in (a, b, right)) and not a * b % right
    return a * b // right if exact else a * b / right


def _either(a: Any, b: Any, right: Any) -> Any:
    """`b` where `a` is right. Both may be infinite or NaN, of which there are no sums."""
    if hasattr(right, "untyped_storage"):
        return b.where((a == right) | (a.isnan() & right.isnan()), a)
    return b if a == right or (a != a and right != right) else a  # NaN is not equal to itself


class _Both(str):
    """The names of two faults, for a function that compares its fault with the names of those it knows."""

    def __new__(cls, a: str, b: str):
        made = super().__new__(cls, f"{a} and {b}")
        made.parts = getattr(a, "parts", {str(a)}) | getattr(b, "parts", {str(b)})
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and not self.parts.isdisjoint(getattr(other, "parts", {str(other)}))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def merged(a: Any, b: Any) -> Any:
    """One function that does what two made from one do: two partials of one function, or two that one function returned, whose
    options differ in what each of them sets. None if they are none."""
    try:
        return _merged(a, b)
    except (_Apart, *_INAPPLICABLE):
        return None


class _Apart(Exception):
    """Two values that are no two options of one thing."""


def _merged(a: Any, b: Any) -> Any:
    if a is b:
        return a
    if type(a) is not type(b):
        if a is None or b is None:  # an option that only one of them sets
            return b if a is None else a
        raise _Apart
    if isinstance(a, str):
        return a if a == b or not b else b if not a else _Both(a, b)
    if isinstance(a, dict):
        return {key: _merged(a.get(key), b.get(key)) for key in {**a, **b}}
    if isinstance(a, tuple) and len(a) == len(b):
        return tuple(map(_merged, a, b))
    if isinstance(a, partial):
        function = _merged(a.func, b.func)
        return partial(function, *_merged(a.args, b.args), **_merged(a.keywords, b.keywords))
    if isinstance(a, FunctionType) and a.__code__ is b.__code__:
        cells = [
            _merged(x.cell_contents, y.cell_contents)
            for x, y in zip(a.__closure__ or (), b.__closure__ or (), strict=True)
        ]
        made = FunctionType(a.__code__, a.__globals__, a.__name__, None, tuple(map(CellType, cells)))
        made.__defaults__ = _merged(a.__defaults__, b.__defaults__)
        made.__kwdefaults__ = _merged(a.__kwdefaults__, b.__kwdefaults__)
        return made
    if bool(a == b):
        return a
    raise _Apart


def _apply(combine: Callable[..., Any], a: Any, b: Any, right: Any) -> Any:
    """`combine` the numbers and tensors of results that may hold several. An idea speaks of some results by name, perhaps."""
    if isinstance(right, dict):
        return {
            name: _apply(combine, a.get(name, right[name]), b.get(name, right[name]), right[name])
            for name in right
            if name in a or name in b
        }
    if isinstance(right, list | tuple):
        return type(right)(_apply(combine, *three) for three in zip(a, b, right, strict=True))
    made = combine(a, b, right)
    return int(made) if isinstance(right, int) and made == int(made) else made


def pattern(evidence: Evidence) -> str:
    """Which cases fail: by the one thing that they have in common and no other has, else by name. A single case that fails, or
    cases that share two such things, do not show which of them is the cause."""
    if not evidence.passed:
        return ""
    shared = [phrase for tag, phrase in TAGS.items() if evidence.tag(tag)]
    if len(shared) == 1 and len(evidence.failed) > 1:
        return f"fails for every case {shared[0]}; passes for the others"
    return f"fails for {_some(evidence.failed, 40)}; passes for {_some(evidence.passed, 28)}"


def _some(cases: tuple[Case, ...], width: int) -> str:
    """As many whole names as fit, a part of one at least. Names have commas of their own."""
    shown = [textwrap.shorten(cases[0].name, width, placeholder=" …")]
    while len(shown) < len(cases) and len(" | ".join((*shown, cases[len(shown)].name))) <= width:
        shown.append(cases[len(shown)].name)
    more = len(cases) - len(shown)
    return " | ".join(shown) + (f" and {more} more" if more else "")
