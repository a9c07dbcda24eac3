"""From what a check saw to the few lines that the learner reads."""

from __future__ import annotations

import re
import signal
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from gpukit.grading import recognize
from gpukit.grading.compare import told_apart
from gpukit.grading.evidence import Evidence, Outcome
from gpukit.grading.exercise import Allowed, Case, Exercise
from gpukit.grading.messages import NOTHING_STORED, Failure, LaunchFacts
from gpukit.grading.verdict import MAX_LINES
from gpukit.simulator.cuda import nvrtc

WIDTH = 118
_SECTION = re.compile(r"^# -{4,} (\w+\.\w+)$", re.MULTILINE)  # above what belongs to each exercise of a file
_COMPLETE = re.compile(r'[^"]*"""Complete: ')  # a function that was handed out without a gap, behind its "def"
_INSIDE = (
    "the tensor has more than 2^32 elements, and an offset or a bound computed in 32 bits leads to others of them: which index has to "
    "be int64 before it is multiplied?"
)
# Every smaller case was right, and an index is negative.
_WRAPPED = (
    "the tensor has more than 2^31 elements, and an offset computed in int32 wraps around there and becomes negative: which "
    "index has to be int64 before it is multiplied by a stride?"
)
_ALL_MASKED = (
    "every lane is masked off there: the tensor has more than 2^31 elements, and a bound that is computed in int32, as a product "
    "of two sizes, wraps around and becomes negative. Which number does your mask compare with?"
)
_AUTOGRAD = {  # a part of PyTorch's message, and what an exercise may say of it
    "Trying to backward through the graph a second time": "backward-twice",
    "does not require grad and does not have a grad_fn": "detached",
}
_BRACKETS = (
    "square brackets cannot choose elements in a kernel. tl.load(pointer + offset) reads from memory, and tl.store(pointer + offset, "
    "value) writes to it. To take one element out of a block, reduce the block: tl.sum of a tl.where"
)
_ONE_ADDRESS = (
    "the address is a single one, and what goes with it is a block: add the block of offsets to the pointer, or make one number "
    "of the block first"
)
_TRITON = {  # a part of Triton's message, and what it means for the learner
    "Boolean value of Tensor": "an `if` asks for one truth, and this condition is a block: tl.where chooses for each element, and "
    "a mask says which elements are loaded or stored",
    "Expected dtype ['fp32', 'fp64']": "this operation takes float32 and refuses 16 bits: in which dtype was its argument loaded, "
    "and where can the kernel convert it?",
    "`_semantic` argument": _BRACKETS,
    "__setitem__": _BRACKETS,
    "unsupported tensor index": _BRACKETS,
    "cannot be block type if pointer argument is not a block": _ONE_ADDRESS,
    "invalid operands of type pointer": "a pointer is an address and no number: tl.load fetches the numbers that are there",
    "no attribute '__pow__'": "Triton has no ** for blocks: multiply the value by itself",
    "arguments must be of type tl.constexpr": "the length of a block must be known when the kernel is compiled. A parameter that is "
    "marked tl.constexpr is known then; other arguments and program numbers are not",
    "Loop-carried variable": "in compiled code a variable keeps one dtype: begin with 0.0 where floats are added",
    "create_histogram()": "the number of bins of tl.histogram is a power of two, and a constant that is known when the kernel is "
    "compiled. An argument of the launch is no such constant",
    "Cannot make_shape_compatible": "these blocks have different lengths: [:, None] makes a column of a block and [None, :] a row, "
    "and every row meets every column",
}


_NAN = (
    "NaN is what a new buffer holds here, and what a masked-off lane holds after a load without `other`. Is every element "
    "stored? Does a masked-off lane get into the result? Or does your arithmetic itself give NaN?"
)
_NO_STORE = (
    "the kernel stores nothing, and NaN is what a new buffer holds here. What a kernel returns, or gives a name, is gone when it ends: "
    "which call writes a result to memory?"
)


class Diagnosis(Exception):
    """A verdict that is reached: its state, the label of what was found and the lines that the learner reads."""

    def __init__(self, state: str, label: str, lines: tuple[str, ...]):
        super().__init__(state, label, lines)
        self.state, self.label, self.lines = state, label, lines


@dataclass(frozen=True)
class Words:
    """How a learner reads what the judge found in one exercise.

    shown     what the file is called
    source    its text
    hint      the number of the next hint
    terminal  whether the reader sits at a command line, and not in a notebook

    Each method gives a Diagnosis; whether there is one is decided in gpukit.grading.judge.
    """

    exercise: Exercise
    shown: str
    source: str = ""
    hint: int = 1
    terminal: bool = False

    # -- the file ------------------------------------------------------------------------------------------------------

    def unreadable(self, error: Exception) -> Diagnosis:
        if not isinstance(error, SyntaxError):  # NUL bytes, nesting beyond the parser
            why = "" if isinstance(error, RecursionError) else str(error)  # a MemoryError of the parser says nothing
            why = why or "an expression or a statement in it is nested too deeply"
            return self._found("error", "syntax", f"Python cannot read {self.shown}: {why}")
        if error.lineno is None:  # of a NUL byte Python does not say where it is
            line = self.source.count("\n", 0, max(0, self.source.find("\0"))) + 1
            return self._found("error", "syntax", f"Python cannot read {self.shown}, line {line}: {error.msg}")
        caret = " " * (max(1, error.offset or 1) - 1) + "^"
        said = "a number in it has too many digits" if "integer string conversion" in error.msg else error.msg
        text = f"Python cannot read {self.shown}, line {error.lineno}: {said}"
        return self._found("error", "syntax", text, f"    {(error.text or '').rstrip(chr(10))}", f"    {caret}")

    def forbidden(self, line: int, what: str, instead: str = "") -> Diagnosis:
        more = (
            instead or "exercises use what computes in torch, Triton, NumPy and the standard library, and nothing else"
        )
        return self._found("error", "forbidden", f"{self.shown}, line {line} uses {what}", more)

    def left_out(self, line: int, what: str) -> str:
        """Of something at the level of the file that is refused, and that the exercise does not need."""
        return f"note: line {line} of {self.shown} uses {what}, which a check does not allow; it was left out, and this exercise does not need it"

    def noted(self, lines: tuple[str, ...], note: str | None) -> tuple[str, ...]:
        """A verdict's lines with a note before the hint, as far as there is room."""
        more = _wrap(f"  {note}") if note else []
        if not lines:
            return tuple(more)
        return (*lines[:-1], *more, lines[-1]) if len(lines) + len(more) <= MAX_LINES else lines

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
        unharmed = "" if self.terminal else ": this notebook is unharmed"
        return self._found("crashed", "crashed", text, f"it ran in a process of its own{unharmed}")

    def malformed(self, error: Exception, case: Case | None) -> Diagnosis:
        where = f" in case {case.name}" if case else " while the file was loading"
        text = f"the process that ran your code sent an answer that cannot be judged{where}"
        more = f"{error}: an exercise returns its results and leaves the process around it alone"
        return self._found("error", "malformed", text, more)

    def check_failed(self, error: Exception) -> Diagnosis:
        text = f"the check itself failed on what your code did: {type(error).__name__}: {error}"
        return self._found("error", "grader", text[:300], f"gpukit check -v {self.exercise.id} shows where")

    def raised(self, error: Failure, case: Case | None, beyond: bool = False) -> Diagnosis:
        """`beyond`: in a tensor of more than 2^31 elements."""
        at = f"{self.shown}, line {error.line}" if error.line else self.shown
        where = f", in case {case.name}" if case else ""
        if error.todo:
            text = f"not written yet: {at} still raises NotImplementedError"
            again = f"check it again with: gpukit check {self.exercise.id}" if self.terminal else "run this cell again"
            more = f"replace that line with your code, then {again}"
            of = error.message  # a gap is marked with the exercise that it belongs to
            if of != self.exercise.id and of.startswith(f"{self.exercise.concept}."):
                more = f"that gap belongs to {of[:60]}, on which this exercise builds: fill that one first"
            return self._found("todo", "todo", text, more)
        if error.type == NOTHING_STORED:
            code = [f"line {error.line}: {error.source}"] if error.source else []
            return self._found("fail", "nothing-stored", f"nothing is stored{where}", *code, _ALL_MASKED)
        if error.fault:
            fault = error.fault
            first = {
                "race": "two programs race",
                "endless": "the kernel does not end",
                "misaligned": f"misaligned {fault.kind} of {fault.tensor}",
                "stored-twice": f"two threads store the same elements of {fault.tensor}",
                "unreached": f"most of {fault.tensor} is not stored",
            }.get(fault.what, f"{fault.kind} outside {fault.tensor}")
            code = [f"line {error.line}: {error.source}"] if error.source else []
            inside = "computed in 32 bits wraps around" in fault.text
            first = f"{fault.kind} of other elements of {fault.tensor}" if inside else first
            wrapped = beyond and "before the start" in fault.text
            why = [_INSIDE] if inside else [_WRAPPED] if wrapped else self._remark(fault.what)
            more = [fault.text.partition(": ")[2] or fault.text, *code, *self._built_on(error.line), *why]
            more.append("nothing was damaged: the check runs your code on copies")
            return self._found("fail", fault.what, first + where, *more)
        more = [f"    {error.source}"] if error.source else []
        for message, label in _AUTOGRAD.items():
            if message in error.message and (why := self._remark(label)):
                return self._found("error", label, f"{error.type} in {at}{where}", *more, message, *why)
        more += [error.message] if error.message else []
        more += [*_means(error.message), *self._built_on(error.line), *self._remark(error.type)]
        return self._found("error", "exception", f"{error.type} in {at}{where}", *more)

    def does_not_compile(self, gpu: str, line: int, message: str, ran: bool = True) -> Diagnosis:
        """Triton's compiler, or ptxas, refuses the kernel. `ran`: the interpreter ran it, as Python."""
        at = f", {self.shown}, line {line}" if line else ""
        text = f"{'right values here, but ' if ran else ''}Triton cannot compile the kernel for {gpu}{at}"
        code = self._code(line)
        more = (
            ["the check ran your kernel as Python, in the interpreter; for a GPU it must also compile"] if ran else []
        )
        more += _means(message)
        return self._found("fail", "does-not-compile", text, *code, " ".join(message.split())[:300], *more)

    # -- a kernel in CUDA C++ ------------------------------------------------------------------------------------------

    def no_text(self, output: object) -> Diagnosis:
        kind = getattr(output, "type", type(output).__name__)
        text = f"{self.exercise.function} returned a {kind}, expected a str: the text of the kernel"
        return self._found("fail", "type", text)

    def no_compiler(self, why: str) -> Diagnosis:
        """No fault of the answer, and nothing is known of it."""
        return self._found("skipped", "no-compiler", f"cannot be judged here: {why}", f"to install it: {nvrtc.INSTALL}")

    def compiler_failed(self, found: Diagnosis) -> Diagnosis:
        how = "takes longer than a check waits" if found.label == "timeout" else "ends without an answer"
        text = f"the compiler {how} when it compiles {self.shown}"
        return self._found(found.state, found.label, text, "a kernel of a few lines takes it a tenth of a second")

    def not_cuda(self, line: int, message: str) -> Diagnosis:
        """NVRTC refuses the text."""
        at = f", line {line}" if line else ""
        text = f"the compiler refuses {self.shown}{at}"
        return self._found("fail", "does-not-compile", text, *self._code(line), " ".join(message.split())[:300])

    def not_interpreted(self, error: Failure, first: int) -> Diagnosis:
        """It compiles, and has something in it that the check does not run. `first`: the line before the kernel's first."""
        line = error.line and first + error.line
        at = f" ({self.shown}, line {line})" if line else ""
        said = error.message if error.type == "PtxError" else f"cannot be run here, {error.type}: {error.message}"
        text = f"the kernel {said}{at}"
        more = (
            "the check interprets loads, stores, shared memory, arithmetic, loops and branches of a kernel on one axis"
        )
        return self._found("error", "unsupported", text, *self._code(line), more)

    def other_kernel(self, signature: str) -> Diagnosis:
        text = f"{self.shown} must define one __global__ function, with the arguments that it was handed out with"
        return self._found("fail", "signature", text, f'extern "C" __global__ void {signature}')

    def _code(self, line: int) -> list[str]:
        lines = self.source.splitlines()
        return [f"    {lines[line - 1].strip()}"] if 0 < line <= len(lines) else []

    def _built_on(self, line: int) -> list[str]:
        """What to say where a line of the file belongs to another exercise of it."""
        before = "\n".join(self.source.splitlines()[:line])
        above = _SECTION.findall(before)
        if not above or above[-1] == self.exercise.id or above[-1].partition(".")[0] != self.exercise.concept:
            return []
        if _COMPLETE.match(before.rpartition("\ndef ")[2]):
            return []
        return [f"that line belongs to {above[-1]}, on which this exercise builds: it must pass first. Does it?"]

    # -- the results ---------------------------------------------------------------------------------------------------

    def values(self, outcomes: list[Outcome], where: str = "") -> Diagnosis:
        """Results that are not right, and the idea that explains them if one does."""
        evidence = Evidence(outcomes)
        wrong = evidence.first.wrong
        known = recognize.ideas(self.exercise, evidence)
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
        pattern = recognize.pattern(evidence)
        if pattern and len(known) < 2:
            lines += _wrap(f"  {pattern}")
        detail = f"  {evidence.case.name}: {wrong.text}"
        rows = evidence.row_ratio
        if rows is not None:
            factor = float(rows.reshape(-1)[(rows.reshape(-1) - 1).abs().argmax()])
            every = "every element" if evidence.ratio is not None else "each element of a row"
            shown = told_apart(1.0, factor)[1]
            remark = f"; {every} is off by the same factor, {shown}" if factor else f"; {every} is 0 in yours"
            detail += remark if len(_wrap(detail + remark)) <= 2 else ""
        lines += _wrap(detail)[:2]
        says = [self.exercise.sentence(idea, evidence) for idea in known]
        if len(says) > 1:
            says = [f"two things at once: (1) {says[0]}", f"(2) {says[1]}"]
        elif not says and wrong.kind == "nan":
            says = [_NO_STORE if _only_loads(evidence.first.reply.launches) else _NAN]
        for say in says:
            lines += _wrap(f"  {say}")
        return Diagnosis("fail", known[0].label if known else wrong.kind, self._with_hint(lines))

    def input_changed(self, outcome: Outcome) -> Diagnosis:
        text = f"{' and '.join(outcome.reply.changed)} was changed by the call, in case {outcome.case.name}"
        instead = (
            "store into a buffer of your own" if self.exercise.kernel else "work on a copy, and leave no gradient in it"
        )
        more = self._remark("input-changed") or [f"the caller still needs it: {instead}"]
        return self._found("fail", "input-changed", text, *more)

    def kept(self, outcome: Outcome) -> Diagnosis:
        """Right in every case, and wrong in a call after them with shapes that an earlier call had."""
        text = "right where it is called once, but wrong in a later call with tensors of the same shapes"
        more = "A result may have been kept from the earlier call. Compute each call from its own inputs"
        return self._found("fail", "kept", text, f"{outcome.case.name}: {outcome.wrong.text}", more)

    def aliases_input(self, outcome: Outcome) -> Diagnosis:
        text = f"{outcome.reply.aliases[0]} shares its memory with an input, in case {outcome.case.name}"
        return self._found("fail", "aliases-input", text, "a result lives in a buffer of its own")

    def returns_a_copy(self, outcome: Outcome) -> Diagnosis:
        text = f"what is returned for {outcome.reply.copies[0]} is a copy of it, in case {outcome.case.name}"
        more = "the function changes the caller's own tensor, and returns that tensor or a view of it: what the caller stores in "
        more += "the copy, nobody else sees, and the copy takes as much memory again"
        return self._found("fail", "returns-a-copy", f"right values, but {text}", more)

    def left_behind(self, outcome: Outcome) -> Diagnosis:
        text = f"a forward pass leaves tensors behind, in case {outcome.case.name}"
        more = "its tensors are still in memory when its result is gone. A variable of the file may hold them: when backward runs, it "
        more += "has another layer's tensors. Or an attribute of ctx holds the result, and the result holds ctx, so neither is ever "
        more += "freed. Hand tensors to ctx.save_for_backward"
        return self._found("fail", "left-behind", text, more)

    def reuses_memory(self, outcome: Outcome) -> Diagnosis:
        text = f"{outcome.reply.reused[0]} lies in memory from before the call, in case {outcome.case.name}"
        more = "the next call overwrites what this one returned: allocate the result anew in each call"
        return self._found("fail", "reused-memory", f"right values, but {text}", more)

    def on_cpu(self, outcome: Outcome) -> Diagnosis:
        return self._found("fail", "device", f"the result is not on the GPU, in case {outcome.case.name}")

    def disagrees(self, outcome: Outcome) -> Diagnosis:
        text = f"three runs on the GPU gave different results, in case {outcome.case.name}"
        return self._found("fail", "race", text, "do two programs write one address?")

    def warps_race(self, outcome: Outcome) -> Diagnosis:
        """Right here, where all lanes of a line are done before the next line begins."""
        fault = outcome.reply.disorder
        text = f"right values here, but on a GPU two threads of one program race, in case {outcome.case.name}"
        remark = self._remark(fault.what) or [_WARPS]
        return self._found("fail", fault.what, text, fault.text.partition(": ")[2], *self._code(fault.line), *remark)

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

    def mostly_copied(self) -> Diagnosis:
        return self._not_your_kernel("most of the result was copied from the input by PyTorch and stored by no kernel")

    def only_with_data(self, why: str, case: Case | None) -> Diagnosis:
        """Right where the learner's Python saw the numbers, but not where only the kernels did."""
        where = f" in case {case.name}" if case else ""
        text = f"a second run{where}, in which your kernels saw the numbers and your Python only shapes, went wrong"
        return self._not_your_kernel(f"{text}: {why}")

    def _not_your_kernel(self, reason: str) -> Diagnosis:
        return self._found("fail", "not-your-kernel", "right values, but not your kernel", reason)

    # -- what it cost --------------------------------------------------------------------------------------------------

    def one_works(self, kernel: str, programs: int, case: Case) -> Diagnosis:
        """A grid of several programs, all but one of which load and store nothing."""
        text = (
            f"of the {programs:,} programs of {kernel} one does all the work: which share of it belongs to a program, and how "
            "many SMs of a GPU are idle meanwhile?"
        )
        return self.breaks_rule("one-program", text, case)

    def breaks_rule(self, label: str, sentence: str, case: Case) -> Diagnosis:
        return self._found("fail", label, f"right values, but {sentence}", f"in case {case.name}")

    def launches(self, outcome: Outcome, allowed: Allowed) -> Diagnosis:
        launches = outcome.reply.launches
        text = f"{len(launches)} kernel launches (bound {allowed.launches})"
        counts = Counter(launch.kernel for launch in launches)
        names = ", ".join(f"{name}, {count} times" for name, count in counts.items())
        return self._costs("launches", text, f"{outcome.case.name} launched: {names}")

    def memory(self, outcome: Outcome, allowed: float) -> Diagnosis:
        got = outcome.reply.allocated_bytes
        text = f"{_times(got / max(allowed, 1))} the memory (bound 1.0x)"
        more = f"{outcome.case.name}: the call allocates {_mib(got)}, where {_mib(allowed)} are enough"
        return self._costs("memory", text, more)

    def saved(self, outcome: Outcome, allowed: float) -> Diagnosis:
        saved = outcome.reply.saved
        text = f"forward keeps {_mib(sum(size for _, size in saved))} for backward (bound {_mib(allowed)})"
        kept = ", ".join(f"{name} ({_mib(size)})" for name, size in saved)
        return self._costs("saved", text, f"{outcome.case.name}: {kept}")

    def traffic(self, outcome: Outcome, allowed: Allowed, copies: bool) -> Diagnosis:
        """`copies`: it is PyTorch's copies and fills alone that exceed the bound, in this case and in all others."""
        bound, reply = self.exercise.traffic, outcome.reply
        first = outcome.case.args[0]
        size = first.numel() * first.element_size()

        def enough(count: float | Callable[..., float], total: float) -> str:
            return _mib(total) if callable(count) or count == 1 else f"{count:g} x {_mib(size)}"

        lines = [
            f"{outcome.case.name}: {_mib(reply.read_bytes)} read and {_mib(reply.written_bytes)} written, where "
            f"{enough(bound.reads, allowed.reads)} and {enough(bound.writes, allowed.writes)} are enough"
        ]
        count: Counter[tuple[str, str]] = Counter()
        again: Counter[tuple[str, str]] = Counter()
        at: dict[tuple[str, str], set[int]] = {}
        sizes: dict[str, int] = {}  # of each tensor: "loaded twice" is said of its own bytes
        for launch in reply.launches:
            sizes |= launch.sizes
            for access in launch.accesses:
                key = ("loaded" if access.kind == "load" else "stored", access.tensor)
                count[key] += access.bytes
                again[key] += access.again_bytes
                at.setdefault(key, set()).add(access.line)
        most = [key for key, _ in count.most_common()]
        times = {key: count[key] / max(sizes.get(key[1], size), 1) for key in most}
        # What each program loads again is to blame before what many programs load, as tiles of a product must.
        repeated = [key for key in most if again[key] > 0.05 * count[key] and not bound.again]
        for key in repeated[:2] or [key for key in most if times[key] > 1.05][:2] or most[:3]:
            verb, tensor = key
            often = "once" if f"{times[key]:.2g}" == "1" else f"{_often(times[key])} times"
            where = f"line{'s' if len(at[key]) > 1 else ''} {', '.join(map(str, sorted(at[key])))} of {self.shown}"
            lines.append(f"{tensor} is {verb} {often}: {where}")
        copied = reply.copied_read_bytes + reply.copied_write_bytes
        if copied > 0.05 * size:
            lines.append(f"{_mib(copied)} of that are copies and fills by PyTorch around your kernel")
        reads, writes = reply.read_bytes / max(allowed.reads, 1), reply.written_bytes / max(allowed.writes, 1)
        both = (reply.read_bytes + reply.written_bytes) / max(allowed.reads + allowed.writes, 1)
        # Where only one of the two is too much, their sum may be within the bound.
        often, what = (
            (both, "memory traffic")
            if min(reads, writes) > 1 + bound.slack
            else max((reads, "reads"), (writes, "writes"))
        )
        text = f"{_times(often)} the {what} (bound 1.0x)"
        if copies:  # the remark on traffic says nothing of them; and what the kernels load again is within the bound
            why = self._remark("copied") or [_COPIED if reply.copied_read_bytes else _FILLED]
            return self._found("fail", "traffic", f"right values, but {text}", lines[0], *lines[1:][-1:], *why)
        return self._costs("traffic", text, *lines)

    def loads_again(self, outcome: Outcome, tensor: str, lines: list[int], times: float) -> Diagnosis:
        """A small argument, so that the sum of all bytes keeps its bound."""
        text = f"right values, but each program loads the same elements of {tensor} {_often(times)} times (bound 1)"
        where = f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))} of {self.shown}"
        more = (
            "What stays the same from step to step of a loop is loaded before the loop, and what all rows of a tile share is "
            "loaded as one row, which broadcasts"
        )
        return self._found("fail", "traffic", text, f"{outcome.case.name}: {where}", *self._code(lines[0]), more)

    def sectors(self, outcome: Outcome, times: float) -> Diagnosis:
        """`times`: the sectors touched, as a multiple of those that the bytes fill."""
        accesses = [access for launch in outcome.reply.launches for access in launch.accesses]
        worst = max(accesses, key=lambda access: 32 * access.sectors - access.bytes)
        most = self.exercise.traffic.sectors
        text = f"{_times(times, most)} the sectors that its bytes fill (bound {most:g}x)"
        detail = (
            f"{outcome.case.name}: the {worst.kind} of {worst.tensor} in line {worst.line} of {self.shown} moves "
            f"{worst.bytes:,} bytes and touches {worst.sectors:,} sectors of 32 bytes, where {-(-worst.bytes // 32):,} hold "
            "as much"
        )
        return self._costs("sectors", text, detail)

    def flops(self, outcome: Outcome, done: Counter[str], enough: float) -> Diagnosis:
        """`done`: the FLOPs of each kernel."""
        kernel, most = done.most_common(1)[0]
        text = f"{_times(done.total() / enough)} the FLOPs (bound 1.0x)"
        detail = f"{outcome.case.name}: {enough:,.0f} are enough; tl.dot does {most:,} of {done.total():,} in {kernel}"
        return self._costs("flops", text, detail)

    # -- how it is put -------------------------------------------------------------------------------------------------

    def _costs(self, label: str, text: str, *more: str) -> Diagnosis:
        facts, remark = [f"right values, but {text}", *more], self._remark(label)
        # The remark asks the question: where a verdict has no room for all lines, facts in the middle are left out.
        while len(facts) > 3 and len(self._wrapped(*facts, *remark)) >= MAX_LINES:
            del facts[-2]
        return self._found("fail", label, *facts, *remark)

    def _remark(self, label: str) -> list[str]:
        remark = self.exercise.remark(label)
        return [remark] if remark else []

    def _found(self, state: str, label: str, text: str, *more: str) -> Diagnosis:
        return Diagnosis(state, label, self._with_hint(self._wrapped(text, *more)))

    def _wrapped(self, text: str, *more: str) -> list[str]:
        lines = _wrap(f"{self.exercise.id}: {text}")
        for line in more:  # the learner's own code, indented by four, stays as it is
            lines += [line] if line.startswith("    ") else _wrap(f"  {line.strip()}")
        return lines

    def _with_hint(self, lines: list[str]) -> tuple[str, ...]:
        name = self.exercise.id
        ask = f"gpukit hint {name} {self.hint}" if self.terminal else f'gpukit.hint("{name}")'
        return (*lines[: MAX_LINES - 1], f"  hint {self.hint} of 3: {ask}")


_WARPS = (
    "Each warp of a program goes at its own pace. Take the number from a block that is already loaded, or let a reduction or "
    "tl.debug_barrier() stand between the two lines"
)
_COPIED = (
    "the kernels alone would keep the bound: which line outside them copies a tensor, as .contiguous(), .clone(), .to() and "
    "arithmetic do? Strides can be handed to a kernel as they are"
)
_FILLED = (
    "the kernels alone would keep the bound: which line outside them fills a tensor, as torch.zeros does, and how large must "
    "that tensor be?"
)


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", drop_whitespace=True, replace_whitespace=False) or []


def _means(message: str) -> list[str]:
    """What a message of Triton's means for the learner, where it does not say so itself."""
    return [why for part, why in _TRITON.items() if part in message][:1]


def _only_loads(launches: tuple[LaunchFacts, ...]) -> bool:
    return bool(launches) and all(access.kind == "load" for launch in launches for access in launch.accesses)


def _often(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 else f"{count:.2g}"


def _times(ratio: float, bound: float = 1.0) -> str:
    """With as many digits as it takes to see that it is beyond the bound."""
    digits = next((n for n in range(1, 9) if f"{ratio:.{n}f}" != f"{bound:.{n}f}"), 9)
    return f"{ratio:.{digits}f}x"


def _mib(count: float) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"
