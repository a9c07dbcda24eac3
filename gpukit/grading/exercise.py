"""What an exercise is, as data. `gpukit/checks/<concept>.py` lists the exercises of one concept in `EXERCISES`; what the
learner reads about them stands in `gpukit/checks/<concept>.md` (gpukit/grading/prose.py).

Nothing here imports torch: the pytest plugin, `gpukit hint` and the progress panel read exercises without it.
Callables in an exercise import what they need when they are called, in the judge's process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from gpukit.grading import compare, prose
from gpukit.grading.messages import Job
from gpukit.grading.prose import Label, Prose

if TYPE_CHECKING:
    from gpukit.grading.evidence import Evidence, Outcome, Wrong
    from gpukit.grading.messages import LaunchFacts, Reply


@dataclass(frozen=True)
class Case:
    """One call of the learner's function. `args` stay in the judge; the worker gets copies of them, one case at a time.

    name  what the learner reads: "x [37, 781] float32"
    tags  facts that diagnosis reasons with: "tail" (row shorter than its block), "strided", "large", "masked", "float16".
          "once": arithmetic is in float32 and its results alone are rounded to 16 bits, which is then proved (compare.rounded);
          for exercises that promise it, and inputs whose sums do not cancel
    """

    name: str
    args: tuple[Any, ...]
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Misconception:
    """A wrong idea that a check recognizes. What the learner then reads stands in `gpukit/checks/<concept>.md`.

    name   the diagnosis, "tail-mask"; "tail-mask/2" where one exercise recognizes it in two ways and says two sentences
    gives  (*args) -> what the idea would compute; recognized if that is the learner's result wherever it differs from the
           right one
    when   (evidence) -> bool, where no formula describes the idea
    fill   (evidence) -> values for the {names} in the sentence

    The first that fits is shown.
    """

    name: str
    gives: Callable[..., Any] | None = None
    when: Callable[[Evidence], bool] | None = None
    fill: Callable[[Evidence], dict[str, Any]] | None = None

    @property
    def label(self) -> str:
        return _label(self.name)


@dataclass(frozen=True)
class Exercise:
    """What all exercises share. `id` is "<concept>.<name>"; the concept names the files in exercises/ and solutions/.

    Raises ProseError if `gpukit/checks/<concept>.md` says nothing about the exercise or about one of its misconceptions.
    """

    id: str
    function: str  # what the check calls in exercises/<concept>.py
    cases: Callable[[Random], list[Case]]  # fresh cases for a fresh seed; always the same number of them
    misconceptions: tuple[Misconception, ...] = ()
    timeout_s: float = 60.0
    prose: Prose | None = field(default=None, hash=False)  # None: that of gpukit/checks/<concept>.md

    def __post_init__(self) -> None:
        if self.prose is None:
            object.__setattr__(self, "prose", prose.of(self.id))
        mute = sorted({known.name for known in self.misconceptions} - self.prose.all_sentences.keys())
        if mute:
            raise prose.ProseError(f"{self.id}: gpukit/checks/{self.concept}.md has no sentence for {', '.join(mute)}")

    @property
    def concept(self) -> str:
        return self.id.partition(".")[0]

    @property
    def title(self) -> str:
        return self.prose.title

    @property
    def notebook(self) -> str:
        return self.prose.notebook

    @property
    def label(self) -> Label:
        return self.prose.label

    @property
    def hints(self) -> tuple[str, ...]:
        return self.prose.hints

    def sentence(self, known: Misconception, evidence: Evidence) -> str:
        """What the learner reads where `known` is recognized."""
        text = self.prose.all_sentences[known.name]
        return text.format(**known.fill(evidence)) if known.fill else text

    def explains(self, gives: Callable[..., Any], outcomes: list[Outcome]) -> bool:
        """Whether a wrong idea gives the learner's results."""
        predict = partial(self.predicts, gives)
        return all(self.fits(predict(outcome), outcome) for outcome in self.told_by(outcomes)) and self.plausible(
            predict, outcomes
        )

    def plausible(self, predict: Callable[[Outcome], Any], outcomes: list[Outcome]) -> bool:
        """Whether an idea that explains what is wrong may be so where the learner is right, where that was not looked at."""
        return True

    def remark(self, label: str) -> str:
        """What the exercise adds to the judge's own diagnosis of `label`; empty if it adds nothing."""
        names = {known.name for known in self.misconceptions}
        remarks = (text for name, text in self.prose.sentences.items() if name not in names and _label(name) == label)
        return next(remarks, "")


_NOT_CONTIGUOUS = (
    "{} is to be contiguous, and of shape {} has strides {}. Where the elements lie in memory is a part of the result: who reads it "
    "next may go by addresses. Which call makes the tensor that is returned, and which shape does it give it?"
)
_ROUNDED_EARLY = (
    "for the last digits: a number is rounded to 16 bits before the last step. Convert to float32 what you load, compute with "
    "that, and let the store alone round"
)


def _first(gives: Any) -> Any:
    return next(iter(gives.values())) if isinstance(gives, dict) else gives


def _label(name: str) -> str:
    return name.partition("/")[0]


@dataclass(frozen=True)
class FunctionExercise(Exercise):
    """A plain Python function: numbers in, numbers out. Tensors may go in as well, and come out.

    expected   (*args) -> the right result, computed in the judge
    tolerance  relative error allowed in a float, in a tensor relative to its largest element; 0 asks for equality
    unit       of the result, shown in the diagnosis
    returns    what the docstring calls the results, where there are several; one name, with {} for the number, for those of a list
    in_place   positions of the arguments that the function changes, and which are its last results. All others stay as they are
    setup      "module:function" of gpukit, for arguments that are no plain data: called in the judge with the case's, it
               gives the function's arguments, by which the worker knows them only (gpukit.grading.remote), and an object
               whose attributes count what the call did (Reply.counts)
    memory_rule  (case, peak_bytes) -> (label, sentence) if the call held more tensors at once than the exercise allows,
                 else None; counted by gpukit.live, which the arguments do not enter
    largest_rule  (case, largest_bytes) -> the same for the largest tensor that it made; goes with a memory_rule
    """

    expected: Callable[..., Any] = field(kw_only=True)
    tolerance: float = 0.0
    unit: str = ""
    returns: tuple[str, ...] = ()
    in_place: tuple[int, ...] = ()
    setup: str = ""
    memory_rule: Callable[[Case, int], tuple[str, str] | None] | None = None
    largest_rule: Callable[[Case, int], tuple[str, str] | None] | None = None

    kernel: ClassVar[bool] = False

    @property
    def watched(self) -> bool:
        """Whether the worker looks at the tensors of the call."""
        return self.memory_rule is not None

    @property
    def bounds(self) -> int:
        """How many things are proved beside the values."""
        return int(self.memory_rule is not None)

    def job(self, path: str, device: str) -> Job:
        memory = self.memory_rule is not None
        return Job(path, self.function, "function", in_place=self.in_place, setup=self.setup, memory=memory)

    def differs(self, actual: Any, expected: Any) -> Wrong | None:
        return compare.plain(actual, expected, self.tolerance, self.unit, self.returns)

    def compare(self, case: Case, reply: Reply) -> Wrong | None:
        """How the result is not the right one."""
        return self.differs(reply.output, self.expected(*case.args))

    def truth(self, outcome: Outcome) -> Any:
        return self.expected(*outcome.case.args)

    def predicts(self, gives: Callable[..., Any], outcome: Outcome) -> Any:
        return gives(*outcome.case.args)

    def told_by(self, outcomes: list[Outcome]) -> list[Outcome]:
        """All: an idea must also be right where the learner's function is. Where powers of 2 underflow, what somebody computes
        depends on how it is written, and not on the idea alone."""
        return [outcome for outcome in outcomes if "underflow" not in outcome.case.tags] or outcomes

    def fits(self, predicted: Any, outcome: Outcome) -> bool:
        return self.differs(outcome.reply.output, predicted) is None

    def broken_rule(self, case: Case, reply: Reply) -> tuple[str, str] | None:
        broken = self.memory_rule(case, reply.peak_bytes) if self.memory_rule else None
        return broken or (self.largest_rule(case, reply.largest_bytes) if self.largest_rule else None)


@dataclass(frozen=True)
class Traffic:
    """What the function may cost in every case: bytes moved (atomics are writes), and how often it may launch.

    reads    bytes, from the case's arguments; or a number, the multiple of the bytes of the first argument
    writes   likewise
    launches  or a function of the case's arguments
    memory   bytes that the call may allocate, as `reads`; without it as much as all arguments and results together
    saved    bytes that the forward pass may keep for the backward pass, as `reads`
    sectors  32-byte sectors touched, as a multiple of those that the bytes moved fill, for all accesses together, in the
             largest case
    flops    from the case's arguments, what tl.dot must do; a multiply-add is 2
    slack    by how much bytes and FLOPs may be more
    again    whether a program may load small arguments again and again, since the docstring allows it. Elsewhere it may not, even
             where the slack has room for that
    """

    reads: float | Callable[..., float]
    writes: float | Callable[..., float]
    launches: int | Callable[..., int] = 1
    memory: float | Callable[..., float] | None = None
    saved: float | Callable[..., float] | None = None
    slack: float = 0.05
    sectors: float | None = None
    flops: Callable[..., float] | None = None
    again: bool = False

    def allowed(self, case: Case) -> Allowed:
        """In bytes and launches, for one case."""
        first = case.args[0]
        size = first.numel() * first.element_size()

        def count(bound: float | Callable[..., float] | None) -> float | None:
            return bound(*case.args) if callable(bound) else None if bound is None else bound * size

        launches = self.launches(*case.args) if callable(self.launches) else self.launches
        return Allowed(count(self.reads), count(self.writes), launches, count(self.memory), count(self.saved))


@dataclass(frozen=True)
class Allowed:
    """A Traffic in one case. Bytes and launches; `memory` is None where the sum of arguments and results is the bound, `saved`
    where there is no backward pass."""

    reads: float
    writes: float
    launches: int
    memory: float | None
    saved: float | None


@dataclass(frozen=True)
class TensorExercise(Exercise):
    """A function on tensors, or a kernel, whose results are compared with PyTorch's.

    reference  plain PyTorch, run by the judge in float64 and in the case's dtype
    gradients  how many leading arguments get a gradient. 0: the function is called and its results compared.
               n > 0: the last argument of each case is dy, the upstream gradient; y and the n gradients are compared
    returns    what the docstring calls the results; without it they are y, or y[0], y[1], which reads like an element of y
    contiguous  whether the docstring promises so of the first result
    launch_rule  (case, launches) -> (label, sentence) if the launches break a rule of the exercise, else None
    huge       () -> the arguments of one more call, or a list of several, some of them wire.Imaginary, of more than 2^31
               elements. A few programs run on addresses alone: an offset that was computed in 32 bits leaves its tensor
    """

    reference: Callable[..., Any] = field(kw_only=True)
    gradients: int = 0
    returns: tuple[str, ...] = ()
    contiguous: bool = False
    launch_rule: Callable[[Case, tuple[LaunchFacts, ...]], tuple[str, str] | None] | None = None
    huge: Callable[[], tuple[Any, ...] | list[tuple[Any, ...]]] | None = None

    def compare(self, case: Case, reply: Reply) -> Wrong | None:
        """How the results are not the right ones."""
        truths = compare.reference(self.reference, compare.doubled(case.args), self.gradients)
        natives = compare.reference(self.reference, case.args, self.gradients)
        return compare.tensors(reply.outputs, truths, natives, self.returns, gradients=self.gradients > 0)

    def truth(self, outcome: Outcome) -> dict[str, Any]:
        """The right results in float64, by their names."""
        truths = compare.reference(self.reference, compare.doubled(outcome.case.args), self.gradients)
        return dict(zip(outcome.reply.outputs, truths, strict=False))

    def predicts(self, gives: Callable[..., Any], outcome: Outcome) -> dict[str, Any]:
        """By name; of one tensor it is the first result, of several the first ones. Where an idea gives y alone, the
        gradients are those of its y, if the learner's are."""
        import torch

        args, outputs = compare.doubled(outcome.case.args), outcome.reply.outputs
        predicted = gives(*args)
        if isinstance(predicted, torch.Tensor):
            predicted = {next(iter(outputs)): predicted}
        elif not isinstance(predicted, dict):
            predicted = dict(zip(outputs, predicted, strict=False))
        if self.gradients and set(predicted) == {"y"} and compare.same(predicted, outputs):
            with contextlib.suppress(RuntimeError):  # not every formula can be differentiated
                own = compare.reference(lambda *given: _first(gives(*given, args[-1])), args, self.gradients)
                wrong = dict(zip(outputs, own, strict=False))
                predicted = wrong if compare.same(wrong, outputs) else predicted
        return predicted

    def told_by(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The first that failed: the arithmetic of an idea is as inexact as the learner's."""
        return [outcome for outcome in outcomes if outcome.wrong][:4]

    def plausible(self, predict: Callable[[Outcome], Any], outcomes: list[Outcome]) -> bool:
        """An idea may not be wrong in most of the cases in which the learner's kernel is right. In a few it may: the learner may
        have thought of one of them, and a formula has corners of its own."""
        passes = [self._passes(predict, outcome) for outcome in outcomes if not outcome.wrong]
        return 2 * sum(passes) >= len(passes)

    def _passes(self, predict: Callable[[Outcome], Any], outcome: Outcome) -> bool:
        """Whether what an idea gives is right in a case, as far as can be told: its formula may not apply there."""
        args, outputs = outcome.case.args, outcome.reply.outputs
        with contextlib.suppress(ArithmeticError, ValueError, TypeError, LookupError, RuntimeError, AttributeError):
            predicted = predict(outcome)
            if compare.same(predicted, outputs):
                return True
            truths = compare.reference(self.reference, compare.doubled(args), self.gradients)
            natives = compare.reference(self.reference, args, self.gradients)
            return all(
                name not in predicted
                or compare.tensor(
                    name, predicted[name].to(native.dtype), truth, native, gradient=self.gradients and name != "y"
                )
                is None
                for name, truth, native in zip(outputs, truths, natives, strict=False)
            )
        return True

    def fits(self, predicted: dict[str, Any], outcome: Outcome) -> bool:
        """Whether the results of which an idea speaks are what it gives and not the right ones, and the others are right."""
        outputs = outcome.reply.outputs
        if not compare.same(predicted, outputs) or not compare.nearer(predicted, outputs, self.truth(outcome)):
            return False
        if outputs.keys() <= predicted.keys():
            return True
        args = outcome.case.args
        truths = compare.reference(self.reference, compare.doubled(args), self.gradients)
        natives = compare.reference(self.reference, args, self.gradients)
        return all(
            name in predicted
            or compare.tensor(name, outputs[name], *pair, gradient=self.gradients and name != "y") is None
            for name, *pair in zip(outputs, truths, natives, strict=False)
        )

    def broken_rule(self, case: Case, reply: Reply) -> tuple[str, str] | None:
        if self.contiguous:
            name, result = next(iter(reply.outputs.items()))
            if not result.is_contiguous():
                return "not-contiguous", _NOT_CONTIGUOUS.format(name, list(result.shape), list(result.stride()))
        if "once" in case.tags:
            wide, single = (compare.doubled(case.args, dtype) for dtype in ("float64", "float32"))
            truths, singles = (compare.reference(self.reference, args, self.gradients) for args in (wide, single))
            if how := compare.rounded(reply.outputs, truths, singles, self.returns, gradients=self.gradients > 0):
                return "rounded-early", f"{_ROUNDED_EARLY}. Computed in float32 and rounded once, {how}"
        return self.launch_rule(case, reply.launches) if self.launch_rule else None


@dataclass(frozen=True)
class KernelExercise(TensorExercise):
    """A function on tensors whose work the learner's own Triton kernel must do.

    in_place   positions of the arguments that the function must change. What they hold afterwards are results like those
               returned: `reference` gives them behind its own, in this order. The function may then return nothing, or what it changed
    torch_ops  aten operations that the host code may use besides allocation, views and copies
    traffic    the bound on bytes moved, or None where the exercise does not grade it
    caches     (SMs, bytes of L2) of a GPU in miniature whose SMs hold one program each: a launch then has dram_read_bytes
               too, what its caches read from memory
    """

    in_place: tuple[int, ...] = ()
    torch_ops: frozenset[str] = frozenset()
    traffic: Traffic | None = None
    caches: tuple[int, int] | None = None

    kernel: ClassVar[bool] = True
    watched: ClassVar[bool] = True

    @property
    def bounds(self) -> int:
        """No access outside a tensor (which raises), inputs unchanged, the learner's own kernel, which compiles; then what it
        may cost."""
        return 4 + (self.traffic is not None) + (self.launch_rule is not None)

    def job(self, path: str, device: str) -> Job:
        upstream = f"d{self.returns[0]}" if self.returns else "dy"
        return Job(path, self.function, device, self.gradients, self.in_place, caches=self.caches, upstream=upstream)


@dataclass(frozen=True)
class CudaExercise(TensorExercise):
    """A function that returns the text of a kernel in CUDA C++. The judge has the text compiled and launches the kernel on the
    cases (gpukit.simulator.cuda); nothing of the learner's Python runs then.

    kernel_name  of the one __global__ function
    parameters   its parameters: type and name of each
    launch       (*args) -> the values of the parameters, the number of blocks and that of threads per block
    result       the parameter that the kernel writes, a tensor of NaN; it changes no other
    """

    kernel_name: str = field(kw_only=True)
    parameters: tuple[tuple[str, str], ...] = field(kw_only=True)
    launch: Callable[..., tuple[tuple[Any, ...], int, int]] = field(kw_only=True)
    result: str = "y"

    kernel: ClassVar[bool] = False
    watched: ClassVar[bool] = False

    @property
    def bounds(self) -> int:
        """No access that is misaligned or outside a tensor (which raises), inputs unchanged; then what it may cost."""
        return 2 + (self.launch_rule is not None)

    @property
    def signature(self) -> str:
        return f"{self.kernel_name}({', '.join(' '.join(each) for each in self.parameters)})"

    def job(self, path: str, device: str) -> Job:
        return Job(path, self.function, "function")

    def launching(self, ptx: str) -> Job:
        return Job("", self.kernel_name, "ptx", source=ptx)

    def launches(self, kernels: Any) -> bool:
        """Whether there is one kernel, and it takes what `launch` gives. kernels: [[name, [types in PTX]]]"""
        bits = {"float": 32, "int": 32, "long long": 64}
        wanted = [64 if kind.endswith("*") else bits[kind] for kind, _ in self.parameters]
        return [(name, [int(kind[1:]) for kind in kinds]) for name, kinds in kernels] == [(self.kernel_name, wanted)]

    def launched(self, *args: Any) -> dict[str, Any]:
        """The launch of a case, as data."""
        values, blocks, threads = self.launch(*args)
        names = [name for _, name in self.parameters]
        return {"names": names, "values": values, "blocks": blocks, "threads": threads, "result": self.result}
