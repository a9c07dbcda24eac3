"""From what a check saw to the few lines that the learner reads."""

from __future__ import annotations

import signal
import textwrap
from collections import Counter
from dataclasses import dataclass

from gpukit.grading.evidence import Evidence, Outcome
from gpukit.grading.exercise import Case, Exercise, Misconception
from gpukit.grading.messages import Failure
from gpukit.grading.verdict import MAX_LINES

WIDTH = 118
# How a tag of a case reads after "fails for every case"; the first that tells the failed cases from the others is told.
TAGS = {
    "tail": "whose row length is not a power of two",
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
    "square": "whose matrices are square",
    "short-group": "whose last group is shorter",
    "short-chunk": "whose last chunk is shorter",
    "groups": "with more than one group",
    "uneven": "whose parts differ in size",
    "empty": "in which a part is empty",
    "none": "without any keys",
    "equal": "whose maxima are equal",
    "rises": "whose second maximum is larger",
    "falls": "whose first maximum is larger",
    "plunge": "whose later scores are far lower",
    "low": "whose scores are all far below 0",
    "spread": "in which one head's scores are far above the others'",
    "flat": "whose scores are all equal",
    "steep": "whose scores are far apart",
    "alike": "whose numbers are all alike",
    "positive": "whose numbers are all positive",
    "scaled": "with numbers around 1,000",
    "large-sums": "whose partial sums are beyond 65,504",
    "far": "far from 0",
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
}


class Diagnosis(Exception):
    """A verdict that is reached: its state, the label of what was found and the lines that the learner reads."""

    def __init__(self, state: str, label: str, lines: tuple[str, ...]):
        super().__init__(state, label, lines)
        self.state, self.label, self.lines = state, label, lines


@dataclass(frozen=True)
class Words:
    """How a learner reads what the judge found in one exercise. `shown` is what the file is called, `hint` the last line.

    Each method gives a Diagnosis; whether there is one is decided in gpukit.grading.judge.
    """

    exercise: Exercise
    shown: str
    hint: str

    # -- the file ------------------------------------------------------------------------------------------------------

    def unreadable(self, error: Exception) -> Diagnosis:
        if not isinstance(error, SyntaxError):  # NUL bytes, nesting beyond the parser
            return self._found("error", "syntax", f"Python cannot read {self.shown}: {error}")
        caret = " " * (max(1, error.offset or 1) - 1) + "^"
        text = f"Python cannot read {self.shown}, line {error.lineno}: {error.msg}"
        return self._found("error", "syntax", text, f"    {(error.text or '').rstrip(chr(10))}", f"    {caret}")

    def forbidden(self, line: int, what: str) -> Diagnosis:
        more = "exercises work with torch, Triton and arithmetic only; this is outside what the check can vouch for"
        return self._found("error", "forbidden", f"{self.shown}, line {line} uses {what}", more)

    def no_function(self) -> Diagnosis:
        text = f"{self.shown} defines no function {self.exercise.function}"
        return self._found("missing", "missing-function", text)

    # -- the run; `case` is None while the file is loading -------------------------------------------------------------

    def no_answer(self, case: Case | None) -> Diagnosis:
        where = f", in case {case.name}" if case else ", while the file was loading"
        text = f"no answer within {self.exercise.timeout_s:g} s{where}"
        return self._found("timeout", "timeout", text, "does every loop end?")

    def crashed(self, code: int, case: Case | None) -> Diagnosis:
        """`code` is the exit code of the process, negative for a signal."""
        known = -code in set(signal.Signals)
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"died of {signal.Signals(-code).name if known else f'signal {-code}'}"
        where = f" in case {case.name}" if case else " while the file was loading"
        text = f"the process that ran your code {how}{where}"
        return self._found("crashed", "crashed", text, "it ran in a process of its own: this notebook is unharmed")

    def malformed(self, error: Exception, case: Case | None) -> Diagnosis:
        where = f" in case {case.name}" if case else " while the file was loading"
        text = f"the process that ran your code sent an answer that cannot be judged{where}"
        more = f"{error}: an exercise returns its results and leaves the process around it alone"
        return self._found("error", "malformed", text, more)

    def check_failed(self, error: Exception) -> Diagnosis:
        text = f"the check itself failed on what your code did: {type(error).__name__}: {error}"
        return self._found("error", "grader", text[:300], f"gpukit check -v {self.exercise.id} shows where")

    def raised(self, error: Failure, case: Case | None) -> Diagnosis:
        at = f"{self.shown}, line {error.line}" if error.line else self.shown
        where = f", in case {case.name}" if case else ""
        if error.todo:
            text = f"not written yet: {at} still raises NotImplementedError"
            return self._found("todo", "todo", text, "replace that line by your code, then run this cell again")
        if error.fault:
            fault = error.fault
            first = {"race": "two programs race"}.get(fault.what, f"{fault.kind} outside {fault.tensor}")
            code = [f"line {error.line}: {error.source}"] if error.source else []
            more = [fault.text.partition(": ")[2] or fault.text, *code, *self._remark(fault.what)]
            more.append("nothing was damaged: the check runs your code on copies")
            return self._found("fail", fault.what, first + where, *more)
        more = [f"    {error.source}"] if error.source else []
        more += [error.message] if error.message else []
        more += [say for message, say in self.exercise.slips.items() if message in error.message]
        return self._found("error", "exception", f"{error.type} in {at}{where}", *more)

    def does_not_compile(self, gpu: str, line: int, message: str, source: str) -> Diagnosis:
        """The interpreter runs the kernel as Python; Triton's compiler, or ptxas, refuses it."""
        at = f", {self.shown}, line {line}" if line else ""
        text = f"right values here, but Triton cannot compile the kernel for {gpu}{at}"
        code = [f"    {source.splitlines()[line - 1].strip()}"] if 0 < line <= len(source.splitlines()) else []
        more = "a check runs kernels as Python; a GPU needs what Triton's compiler takes"
        return self._found("fail", "does-not-compile", text, *code, " ".join(message.split())[:300], more)

    # -- the results ---------------------------------------------------------------------------------------------------

    def values(self, outcomes: list[Outcome], where: str = "") -> Diagnosis:
        """Results that are not right, and the idea that explains them if one does."""
        evidence = Evidence(outcomes)
        wrong = evidence.first.wrong
        known = _recognise(self.exercise, evidence)
        head = {
            "values": "values differ",
            "nan": "some results are NaN",
            "shape": "wrong shape",
            "dtype": "wrong dtype",
            "type": "wrong type",
            "no-gradient": "no gradient",
        }[wrong.kind]
        passed = f"{len(evidence.passed)} of {len(outcomes)} cases pass"
        lines = [f"{self.exercise.id}: {head} ({passed}){where}"]
        if pattern := _pattern(evidence):
            lines += _wrap(f"  {pattern}")
        detail = f"  {evidence.case.name}: {wrong.text}"
        rows = evidence.row_ratio
        if rows is not None:
            factor = float(rows.reshape(-1)[(rows.reshape(-1) - 1).abs().argmax()])
            every = "every element" if evidence.ratio is not None else "each element of a row"
            detail += f"; {every} is off by the same factor, {factor:.4g}" if factor else f"; {every} is 0 in yours"
        lines += _wrap(detail)[:2]
        say = ""
        if known is not None:
            say = self.exercise.sentence(known, evidence)
        elif wrong.kind == "nan":
            say = "fresh buffers are filled with NaN here: was every element stored, and is NaN what the arithmetic gives?"
        lines += _wrap(f"  {say}") if say else []
        return Diagnosis("fail", known.label if known else wrong.kind, self._with_hint(lines))

    def input_changed(self, outcome: Outcome) -> Diagnosis:
        text = f"{' and '.join(outcome.reply.changed)} was changed by the call, in case {outcome.case.name}"
        more = self._remark("input-changed") or ["the caller still needs it: store into a buffer of your own"]
        return self._found("fail", "input-changed", text, *more)

    def aliases_input(self, outcome: Outcome) -> Diagnosis:
        text = f"{outcome.reply.aliases[0]} shares its memory with an input, in case {outcome.case.name}"
        return self._found("fail", "aliases-input", text, "a result lives in a buffer of its own")

    def on_cpu(self, outcome: Outcome) -> Diagnosis:
        return self._found("fail", "device", f"the result is not on the GPU, in case {outcome.case.name}")

    def disagrees(self, outcome: Outcome) -> Diagnosis:
        text = f"three runs on the GPU gave different results, in case {outcome.case.name}"
        return self._found("fail", "race", text, "do two programs write one address?")

    # -- whose work it was ---------------------------------------------------------------------------------------------

    def computes_outside(self, outcome: Outcome, operation: str, line: int) -> Diagnosis:
        at = f" (line {line} of {self.shown})" if line else ""
        launched = outcome.reply.launches
        many = "computes outside its kernel" if launched else "launched no Triton kernel of its own"
        return self._not_your_kernel(f"{self.shown} {many}: aten::{operation} ran{at}, in case {outcome.case.name}")

    def launches_nothing(self, outcome: Outcome) -> Diagnosis:
        return self._not_your_kernel(f"{self.shown} launched no Triton kernel of its own in case {outcome.case.name}")

    def stores_nothing(self) -> Diagnosis:
        return self._not_your_kernel("its kernels did not store the result")

    def loads_nothing(self) -> Diagnosis:
        return self._not_your_kernel("its kernels did not load the input")

    def same_without_kernels(self) -> Diagnosis:
        return self._not_your_kernel("the result is the same when its kernels do nothing")

    def _not_your_kernel(self, reason: str) -> Diagnosis:
        return self._found("fail", "not-your-kernel", "right values, but not your kernel", reason)

    # -- what it cost --------------------------------------------------------------------------------------------------

    def breaks_rule(self, label: str, sentence: str, case: Case) -> Diagnosis:
        return self._found("fail", label, f"right values, but {sentence}", f"in case {case.name}")

    def launches(self, outcome: Outcome) -> Diagnosis:
        launches = outcome.reply.launches
        text = f"{len(launches)} kernel launches (bound {self.exercise.traffic.launches})"
        counts = Counter(launch.kernel for launch in launches)
        names = ", ".join(f"{name}, {count} times" for name, count in counts.items())
        return self._costs("launches", text, f"launched: {names}")

    def traffic(self, outcome: Outcome, size: int) -> Diagnosis:
        """`size` is the bytes of the first argument, of which the bound is a multiple."""
        bound, reply = self.exercise.traffic, outcome.reply
        moved, allowed = (reply.read_bytes + reply.written_bytes) / size, bound.reads + bound.writes
        lines = [
            f"{outcome.case.name}: {_mib(reply.read_bytes)} read and {_mib(reply.written_bytes)} written, where "
            f"{bound.reads:g} reads and {bound.writes:g} writes of {_mib(size)} are enough"
        ]
        count: Counter[tuple[str, str]] = Counter()
        at: dict[tuple[str, str], set[int]] = {}
        sizes: dict[str, int] = {}  # of each tensor: "loaded twice" is said of its own bytes
        for launch in reply.launches:
            sizes |= launch.sizes
            for access in launch.accesses:
                key = ("loaded" if access.kind == "load" else "stored", access.tensor)
                count[key] += access.bytes
                at.setdefault(key, set()).add(access.line)
        most = [key for key, _ in count.most_common()]
        times = {key: count[key] / max(sizes.get(key[1], size), 1) for key in most}
        for key in [key for key in most if times[key] > 1.05][:2] or most[:3]:
            verb, tensor = key
            often = "once" if f"{times[key]:.2g}" == "1" else f"{times[key]:.2g} times"
            where = f"line{'s' if len(at[key]) > 1 else ''} {', '.join(map(str, sorted(at[key])))} of {self.shown}"
            lines.append(f"{tensor} is {verb} {often}: {where}")
        copied = reply.copied_read_bytes + reply.copied_write_bytes
        if copied > 0.05 * size:
            lines.append(f"{_mib(copied)} of that are copies and fills by PyTorch around your kernel")
        return self._costs("traffic", f"{moved / allowed:.1f}x the memory traffic (bound 1.0x)", *lines)

    def sectors(self, outcome: Outcome, times: float) -> Diagnosis:
        """`times`: the sectors touched, as a multiple of those that the bytes fill."""
        accesses = [access for launch in outcome.reply.launches for access in launch.accesses]
        worst = max(accesses, key=lambda access: 32 * access.sectors - access.bytes)
        text = f"{times:.1f}x the sectors that its bytes fill (bound {self.exercise.traffic.sectors:g}x)"
        detail = (
            f"{outcome.case.name}: the {worst.kind} of {worst.tensor} in line {worst.line} of {self.shown} moves "
            f"{worst.bytes:,} bytes and touches {worst.sectors:,} sectors of 32 bytes, where {-(-worst.bytes // 32):,} hold "
            "as much"
        )
        return self._costs("sectors", text, detail)

    def flops(self, outcome: Outcome, done: Counter[str], enough: float) -> Diagnosis:
        """`done`: the FLOPs of each kernel."""
        kernel, most = done.most_common(1)[0]
        text = f"{done.total() / enough:.1f}x the FLOPs (bound 1.0x)"
        detail = f"{outcome.case.name}: {enough:,.0f} are enough; tl.dot does {most:,} of {done.total():,} in {kernel}"
        return self._costs("flops", text, detail)

    # -- how it is put -------------------------------------------------------------------------------------------------

    def _costs(self, label: str, text: str, *more: str) -> Diagnosis:
        return self._found("fail", label, f"right values, but {text}", *more, *self._remark(label))

    def _remark(self, label: str) -> list[str]:
        remark = self.exercise.remark(label)
        return [remark] if remark else []

    def _found(self, state: str, label: str, text: str, *more: str) -> Diagnosis:
        lines = _wrap(f"{self.exercise.id}: {text}")
        for line in more:  # the learner's own code, indented by four, stays as it is
            lines += [line] if line.startswith("    ") else _wrap(f"  {line.strip()}")
        return Diagnosis(state, label, self._with_hint(lines))

    def _with_hint(self, lines: list[str]) -> tuple[str, ...]:
        return (*lines[: MAX_LINES - 1], f"  {self.hint}")


def _recognise(exercise: Exercise, evidence: Evidence) -> Misconception | None:
    """The first of the exercise's wrong ideas that explains what was seen."""
    comparable = all(outcome.wrong.kind in ("values", "nan") for outcome in evidence.outcomes if outcome.wrong)
    for known in exercise.misconceptions:
        try:
            if known.gives is not None and comparable and exercise.explains(known.gives, evidence.outcomes):
                return known
            if known.when is not None and known.when(evidence):
                return known
        except (ArithmeticError, ValueError, TypeError, IndexError, RuntimeError, AttributeError):
            continue  # its formula does not apply to these arguments
    return None


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


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", drop_whitespace=True, replace_whitespace=False) or []


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
