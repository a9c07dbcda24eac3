"""The judge: makes fresh inputs, has a worker run the learner's function on them, and says what it found.

It runs in the caller's process (a notebook's kernel, pytest, the command line) and never imports the learner's code.
Kernels always run in Triton's interpreter first, so that a verdict does not depend on the machine, and in a process that runs
nothing else of the learner's; where there is a GPU they then run there as well.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpukit import course
from gpukit.grading import cuda_text, messages, parts, registry, remote, wire
from gpukit.grading.check_cells import protect_imports
from gpukit.grading.diagnose import Diagnosis, Words
from gpukit.grading.evidence import Outcome
from gpukit.grading.example import offer
from gpukit.grading.exercise import Case, CudaExercise, Exercise
from gpukit.grading.messages import Failure, Job, Reply
from gpukit.grading.registry import exercise as find
from gpukit.grading.server import Deadline, Server, ServerFailed, ServerGone, Stopped, Worker
from gpukit.grading.verdict import CheckFailed, Shown, Verdict
from gpukit.simulator.compiler import compile as compiler
from gpukit.simulator.cuda import nvrtc

COMPILED_FOR = ("a100-80gb", "h100-sxm")  # a pass means that the kernels compile for these, sm_80 and sm_90
COMPILE_S = 60
_SEVERAL = 4  # programs that ought to share the work
_SEND_S = 120.0  # for a worker to take what is sent to it, also on a busy machine
_PRINTED_BYTES = 1 << 16
_shown: dict[str, int] = {}  # hints shown in this process
_servers: dict[str, Server] = {}
# Texts of files that did not load in so many seconds, and the exercises that were told so.
_endless: dict[str, tuple[float, set[str]]] = {}


def check(exercise_id: str) -> None:
    """Check one exercise, `gpukit.check("softmax.fused")`, or all exercises of a concept, `gpukit.check("softmax")`.

    One exercise: shows a line and returns if your answer passes, is not written yet or cannot be judged on this machine, and
    raises CheckFailed with the diagnosis if it is wrong. A concept: shows one line for each exercise and how many of them pass.

    Raises UnknownExercise, naming the nearest id.
    """
    ids = registry.named(exercise_id)
    verdicts = [_handed_over(each) or judge(each, course.impl()) for each in ids]
    if ids != [exercise_id]:
        count = f"{sum(verdict.passed for verdict in verdicts)} of {len(verdicts)} exercises pass"
        Shown([*((verdict.state, verdict.line) for verdict in verdicts), ("", count)]).show()
    elif verdicts[0].state in ("pass", "todo", "skipped"):
        Shown([(verdicts[0].state, f"{verdicts[0]}{offer(verdicts[0])}")]).show()
    else:
        raise CheckFailed(verdicts[0])


def hint(exercise_id: str, number: int | None = None) -> None:
    """Print the next hint of an exercise, or hint `number` (1 to 3)."""
    exercise = find(exercise_id)
    if number is None:
        number = min(_shown.get(exercise.id, 0) + 1, len(exercise.hints))
    if number not in range(1, len(exercise.hints) + 1):
        raise course.CourseError(f"hint number must be 1 to {len(exercise.hints)}, got {number}")
    _shown[exercise.id] = max(number, _shown.get(exercise.id, 0))
    text = f"hint {number} of {len(exercise.hints)} for {exercise.id}: {exercise.hints[number - 1]}"
    print(textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False))  # JupyterLab breaks within words


def judge(
    exercise_id: str,
    impl: str = "exercises",
    root: Path | None = None,
    seed: int | None = None,
    terminal: bool = False,
) -> Verdict:
    """The verdict on one exercise of the course in `root` (default: the course around the working directory), in words for
    a reader in a notebook, or in a terminal.

    Recorded for the progress panel unless `impl` is "solutions". Raises UnknownExercise and CourseNotFound.
    """
    exercise = find(exercise_id)
    root = root or course.root()
    protect_imports(root)
    path = course.exercise_file(exercise.concept, root, impl)
    shown = f"{impl}/{path.name}"
    try:
        source = course.text(course.read_bytes(path, root))
    except course.CourseError as error:
        lines = (f"{exercise.id}: {shown} {error}",)
        verdict = Verdict(exercise.id, "missing", 0, 0, impl, lines, diagnosis="missing")
    else:
        verdict = judge_source(exercise, source, shown=shown, impl=impl, seed=seed, terminal=terminal)
    if impl == "exercises":
        from gpukit.grading.report import record

        record(verdict, root)
    return verdict


def judge_source(
    exercise: Exercise,
    source: str,
    *,
    shown: str = "",
    impl: str = "exercises",
    seed: int | None = None,
    brief: bool = False,
    terminal: bool = False,
) -> Verdict:
    """The verdict on a file's text. `shown` is what messages call the file; `brief` ends at the first wrong case, without
    an idea of the reason."""
    run = _Run(exercise, course.plain(source), shown or f"{impl}/{exercise.concept}.py", impl, seed, brief, terminal)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():  # whether the caller makes errors of them (pytest -W error) changes no verdict
            warnings.simplefilter("ignore")
            state, label, lines = run.judge()
    except ServerFailed as error:
        state, label, lines = (
            "error",
            "grader",
            (f"{exercise.id}: {error}: try again; gpukit doctor says what is missing",),
        )
    except Exception as error:  # ours, or a worker's well-formed lie: one verdict either way, and -v shows where
        run.detail += traceback.format_exc()
        state, label, lines = "error", "grader", run.say.check_failed(error).lines
    return Verdict(
        exercise.id,
        state,
        run.passed if state != "pass" else run.total,
        run.total,
        impl,
        lines,
        label,
        round(time.perf_counter() - start, 3),
        run.seed,
        run.detail,
    )


class _Doubt(Exception):
    """Without the data in it, the learner's Python does not lead to the right results; `found` says so."""

    def __init__(self, found: Diagnosis):
        super().__init__(found.label)
        self.found = found


class _Run:
    """One check. What the learner reads of it is gpukit.grading.diagnose's business."""

    def __init__(
        self,
        exercise: Exercise,
        source: str,
        shown: str,
        impl: str,
        seed: int | None,
        brief: bool = False,
        terminal: bool = False,
    ):
        self.exercise, self.source, self.impl, self.brief = exercise, source, impl, brief
        self.seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
        self.passed = self.total = 0
        self.beyond: tuple[Failure, Case] | None = None
        self.detail = self.note = ""
        self.loading = False  # the learner's file
        self.say = Words(exercise, shown, source, min(_shown.get(exercise.id, 0) + 1, 3), terminal)

    def judge(self) -> tuple[str, str, tuple[str, ...]]:
        try:
            self._read()
            self._known_as_endless()
            server = _server("cpu")
            if self.exercise.watched or "import torch" in self.source:
                server.prepare()  # loads while the cases are made; else each worker would load it
            if self.exercise.kernel:
                _server("compile").prepare()
            with _one_thread():
                cases = self.exercise.cases(random.Random(self.seed))
                again = self._again(cases)
            with _one_thread():  # the cases may have been what loads torch
                self._judge_cases(server, cases, again)
        except Diagnosis as found:
            return found.state, found.label, self.say.noted(found.lines, self.note)
        return "pass", "", self.say.noted((), self.note)

    def _known_as_endless(self) -> None:
        """A file that did not load in time for one of its exercises is not waited for again by the others. Whoever asks a second
        time about the same one has it tried again."""
        seconds, told = _endless.get(self.source, (0.0, set()))
        if self.exercise.id in told:
            del _endless[self.source]
        elif seconds >= self.exercise.timeout_s:
            told.add(self.exercise.id)
            raise self.say.no_answer(None)

    def _too_late(self, case: Case | None) -> Diagnosis:
        if self.loading:
            _endless[self.source] = self.exercise.timeout_s, {self.exercise.id}
        return self.say.no_answer(case)

    def _again(self, cases: list[Case]) -> list[Case]:
        """One more call, if there is one: tensors of the same shapes as in an earlier call, and other numbers in them. A
        result that was kept from then is wrong now."""
        rng = random.Random(self.seed + 1)
        others = [
            replace(other, name=f"{case.name}, again with other numbers")
            for case, other in zip(cases, self.exercise.cases(rng), strict=True)
            if _other_numbers(case.args, other.args)
        ]
        others.sort(key=lambda case: sum(map(_numel, _tensors(case.args))))
        return others[len(others) // 2 :][:1]  # neither large, which costs, nor one number, of which any softmax is 1

    def _judge_cases(self, server: Server, cases: list[Case], again: list[Case]) -> None:
        self.total = len(cases) + self.exercise.bounds
        count, cases = len(cases), [*cases, *again]
        doubt: _Doubt | None = None
        try:
            if isinstance(self.exercise, CudaExercise):
                outcomes = self._run_cuda(server, cases)
            else:
                outcomes = (
                    self._run_apart(server, cases) if self.exercise.kernel else self._run_cases(server, "cpu", cases)
                )
        except _Doubt as found:  # what is wrong with it shows where the learner's Python sees the data
            doubt, seen, self.detail = found, self.detail, ""  # what it printed was about tensors without data
            outcomes = self._run_cases(server, "cpu", cases)
        outcomes, last = outcomes[:count], outcomes[count:]
        self._judge_outcomes(outcomes)
        if last and last[0].wrong:
            raise self.say.kept(last[0])
        for outcome in (*outcomes, *last):
            if outcome.reply.reused:
                raise self.say.reuses_memory(outcome)
        if self.exercise.kernel:
            self.passed = self.total - 1
        if self.beyond:
            raise self._raised(*self.beyond, beyond=True)
        if self.exercise.kernel:
            self._compiles(outcome.reply for outcome in outcomes)
        if doubt:
            self.detail += seen
            raise doubt.found
        if self.exercise.kernel and _gpu_present():
            self._judge_on_gpu(cases[:count])

    def _read(self) -> None:
        try:
            with warnings.catch_warnings():  # the worker's Python says them again
                warnings.simplefilter("ignore")
                kernel = self.exercise.kernel
                counted = self.exercise.watched and not kernel
                text, finding, out = parts.accepted(self.source, self.exercise.function, kernel=kernel, counted=counted)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self.say.unreadable(error) from None
        if finding is not None:
            raise self.say.forbidden(finding.line, finding.text, finding.instead)
        self.source, self.note = text, out and self.say.left_out(out.line, out.text)

    # -- running -------------------------------------------------------------------------------------------------------

    def _run_apart(self, server: Server, cases: list[Case]) -> list[Outcome]:
        """The host first: the learner's Python on tensors that hold no data. When its process has ended, what it asked for is
        done in another, where nothing of the learner's runs but the text of kernels. What was seen there counts.

        Raises _Doubt where the same calls may come out otherwise if the learner's Python sees the data.
        """
        (loading, *tapes), far, looked = self._tapes(server, cases)
        job = self.exercise.job(f"/{self.exercise.concept}.py", "device")
        uploads = bool(self.exercise.torch_ops)  # what the host may compute, the device has from the host
        with self._asking(server) as (ask, _):
            if error := ask(replace(job, source=self.source, tape=loading, uploads=uploads), None).error:
                raise self._doubtful(error, None)
            outcomes: list[Outcome] = []
            for case, tape in zip(cases, tapes, strict=True):
                reply = ask((case.args, tape), case)
                if reply.error and not reply.error.fault:
                    raise self._doubtful(reply.error, case)
                self._note(outcomes, case, reply)
                if looked and outcomes[-1].wrong:
                    raise self._doubt(outcomes[-1].wrong.text, case)
            if not any(outcome.wrong for outcome in outcomes):
                for case, tape in far:
                    self._addresses(ask((case.args, tape), case), case)
            return outcomes

    def _tapes(self, server: Server, cases: list[Case]) -> tuple[list[str], list[tuple[Case, str]], bool]:
        """What the host asks for: when it is loaded and in each case; in those on addresses alone; and whether it looked at numbers,
        which it may in some exercises. Raises _Doubt if it cannot go on without them."""
        from gpukit.grading.host import decoys

        looked, far = False, []
        with self._asking(server) as (ask, worker), _folder(worker) as folder:
            loaded = self._loaded(ask, folder, "host")
            if loaded.error:
                raise self._doubtful(loaded.error, None)
            if loaded.missing:
                raise self.say.no_function()
            tapes = [loaded.tape]
            for case in cases:
                reply = ask(decoys(case.args), case)
                if reply.error:
                    raise self._doubtful(reply.error, case)
                for operation, line in reply.host_ops:
                    looked = True
                    if operation not in self.exercise.torch_ops:
                        raise self._doubt(f"line {line} runs {operation}, which is none of your kernels", case)
                tapes.append(reply.tape)
            for case in self._far():
                reply = ask(decoys(case.args), case)
                if reply.tape:  # none where something goes wrong, which proves nothing
                    far.append((case, reply.tape))
                # But a grid that no GPU takes is as wrong as an address outside.
                if reply.error and reply.error.message.startswith("the grid's axis"):
                    self.beyond = reply.error, case
        return tapes, far, looked

    def _doubtful(self, error: Failure, case: Case | None) -> _Doubt:
        self.detail += error.traceback
        if error.type == "Refused" and error.line:  # the text of a kernel
            from gpukit.grading.kernel_text import instead

            return _Doubt(self.say.forbidden(error.line, error.message, instead(error.message)))
        return self._doubt(f"{error.type}: {error.message}", case)

    def _doubt(self, why: str, case: Case | None) -> _Doubt:
        return _Doubt(self.say.only_with_data(why, case))

    def _run_cases(self, server: Server, device: str, cases: list[Case]) -> list[Outcome]:
        """Send the cases to a fresh worker, one at a time, and compare as the answers come."""
        with self._asking(server) as (ask, worker), _folder(worker) as folder:
            loaded = self._loaded(ask, folder, device)
            if loaded.error:
                raise self._raised(loaded.error, None)
            if loaded.missing:
                raise self.say.no_function()
            outcomes: list[Outcome] = []
            for case in cases:
                self._note(outcomes, case, ask(case.args, case))
            if device == "cpu" and self.exercise.kernel and not any(outcome.wrong for outcome in outcomes):
                for far in self._far():
                    self._addresses(ask(far.args, far), far)
            return outcomes

    def _run_cuda(self, server: Server, cases: list[Case]) -> list[Outcome]:
        """The learner's function gives a text, another process compiles it, and a third one launches the kernel. The second may
        be led astray by the text, and all that it can do is to send other instructions."""
        text = self._text(server)
        begin = self.source.find(text)
        first = self.source.count("\n", 0, begin) if begin >= 0 else 0
        say = self.say if begin >= 0 else replace(self.say, shown=f"the text of {self.exercise.function}", source=text)
        if refused := cuda_text.refused(text):
            line, what, instead = refused
            raise say.forbidden(first + line, what, instead)
        with self._compiling(server, say) as ask:
            if error := ask(Job(str(nvrtc.find() or ""), "", "nvrtc")).error:
                self.detail += error.traceback
                raise say.no_compiler(error.message)
            compiled = ask(text)
            if error := compiled.error:
                self.detail += error.traceback
                raise say.not_cuda(error.line and first + error.line, error.message)
        with self._asking(server) as (ask, _):
            told = ask(self.exercise.launching(str(compiled.output)), None)
            if told.error:
                raise say.not_interpreted(told.error, first)
            if not self.exercise.launches(told.output):
                raise say.other_kernel(self.exercise.signature)
            self.say = say
            outcomes: list[Outcome] = []
            for case in cases:
                self._note(outcomes, case, _moved(ask(self.exercise.launched(*case.args), case), first, say))
            if not any(outcome.wrong for outcome in outcomes):
                for far in self._far():
                    self._addresses(_moved(ask(self.exercise.launched(*far.args), far), first, say), far)
                    if self.beyond:  # elsewhere it may well not end
                        break
            return outcomes

    def _text(self, server: Server) -> str:
        """What the learner's function returns."""
        with self._asking(server) as (ask, worker), _folder(worker) as folder:
            loaded = self._loaded(ask, folder, "cpu")
            if loaded.missing:
                raise self.say.no_function()
            reply = loaded if loaded.error else ask((), None)
            if reply.error:
                raise self._raised(reply.error, None)
            if not isinstance(reply.output, str):
                raise self.say.no_text(reply.output)
            return reply.output.replace("\r\n", "\n")

    @contextlib.contextmanager
    def _compiling(self, server: Server, say: Words) -> Iterator[Callable[[Any], Reply]]:
        """A fresh worker for the compiler. That it dies, or needs too long, is the text's fault."""
        try:
            with self._asking(server) as (ask, _):
                yield lambda message: ask(message, None)
        except Diagnosis as found:
            raise say.compiler_failed(found) if found.label in ("timeout", "crashed") else found from None

    def _loaded(self, ask: Callable[[Any, Case | None], Reply], folder: str, how: str) -> Reply:
        """The worker's answer to the learner's file."""
        path = Path(folder) / f"{self.exercise.concept}.py"
        path.write_text(self.source, encoding="utf-8")
        self.loading = True
        reply = ask(self.exercise.job(str(path), how), None)
        self.loading = False
        return reply

    def _note(self, outcomes: list[Outcome], case: Case, reply: Reply) -> None:
        """Compare the answer to a case. Raises what an error of the learner's is to the learner."""
        if reply.error:
            self.passed = sum(outcome.wrong is None for outcome in outcomes)
            if not reply.error.todo:
                self._known_before(outcomes)
            if not self.brief:
                self._compiles([reply], ran=False)
            raise self._raised(reply.error, case)
        outcomes.append(Outcome(case, reply, self.exercise.compare(case, reply)))
        if self.brief and outcomes[-1].wrong:
            raise Diagnosis("fail", outcomes[-1].wrong.kind, (outcomes[-1].wrong.text,))

    @contextlib.contextmanager
    def _asking(self, server: Server) -> Iterator[tuple[Callable[[Any, Case | None], Reply], Worker]]:
        """A fresh worker, and a function that sends it a message about a case and gives its answer. Raises what the end of the
        worker, or of its time, is to the learner."""
        printed = bytearray()
        current = None
        try:
            with _working(server, printed, self.exercise.timeout_s) as worker:
                deadline = Deadline(worker.pid, self.exercise.timeout_s)

                def ask(message: Any, case: Case | None) -> Reply:
                    nonlocal current
                    current = case
                    far_away = case is not None and getattr(self.exercise, "setup", "")
                    return (self._exchange_with_things if far_away else self._exchange)(worker, message, deadline)

                try:
                    yield ask, worker
                except Stopped:  # by whomever: the file may have nothing to do with it
                    raise self.say.no_answer(current) from None
                except TimeoutError:
                    raise self._too_late(current) from None
                except wire.Malformed as error:
                    raise self.say.malformed(error, current) from None
                except (wire.Closed, OSError):
                    code = worker.end()
                    late = code == -signal.SIGXCPU
                    raise (self._too_late(current) if late else self.say.crashed(code, current)) from None
        finally:
            self.detail = printed.decode(errors="replace") + self.detail

    def _far(self) -> list[Case]:
        """The calls on tensors beyond 2^31 elements, of which only the addresses are looked at."""
        given = self.exercise.huge() if self.exercise.huge else []
        found = []
        for args in given if isinstance(given, list) else [given]:
            shapes = ", ".join(map(_described, (arg for arg in args if isinstance(arg, wire.Imaginary))))
            found.append(Case(f"{shapes}, addresses only", args))
        return found

    def _addresses(self, reply: Reply, far: Case) -> None:
        """What is wrong there is said after everything else, and of several the first."""
        if reply.error and not self.beyond:
            self.beyond = reply.error, far

    def _raised(self, error: Failure, case: Case | None, beyond: bool = False) -> Diagnosis:
        self.detail += error.traceback
        return self.say.raised(error, case, beyond)

    def _known_before(self, outcomes: list[Outcome]) -> None:
        """A known misconception in the values of earlier cases says more than the stray access or the division by zero that
        it leads to later."""
        if any(outcome.wrong for outcome in outcomes):
            found = self.say.values(outcomes)
            if any(known.label == found.label for known in self.exercise.misconceptions) or self.exercise.remark(
                found.label
            ):
                raise found

    def _exchange(self, worker: Worker, message: Job | tuple, deadline: Deadline) -> Reply:
        return messages.read(Reply, self._said(worker, message, deadline))

    def _said(self, worker: Worker, message: Any, deadline: Deadline) -> Any:
        worker.sock.settimeout(_SEND_S)
        with deadline:
            messages.send(worker.sock, message)
            return wire.receive(worker.sock, deadline, worker.allowance)

    def _exchange_with_things(self, worker: Worker, args: tuple, deadline: Deadline) -> Reply:
        """As `_exchange`, for arguments that are the judge's: the worker's calls of them come before its reply."""
        things = remote.Things(self.exercise.setup, args)
        left = replace(worker.allowance)
        said = self._said(worker, things.described, deadline)
        while type(said) is list:
            worker.allowance = replace(left)  # calls are carried out and not kept
            said = self._said(worker, things.carry_out(said), deadline)
        return replace(messages.read(Reply, said), counts=things.counts)

    # -- what it means -------------------------------------------------------------------------------------------------

    def _judge_outcomes(self, outcomes: list[Outcome]) -> None:
        self.passed = sum(outcome.wrong is None for outcome in outcomes)
        self._inputs_untouched(outcomes)
        if self.passed < len(outcomes):
            raise self.say.values(outcomes)
        if self.exercise.kernel:
            self.passed += 2  # no access outside a tensor (that raises), inputs unchanged
            self._own_kernel(outcomes)
            self.passed += 1
            for outcome in outcomes:
                if outcome.reply.disorder:
                    raise self.say.warps_race(outcome)
        for outcome in outcomes:
            if broken := self.exercise.broken_rule(outcome.case, outcome.reply):
                raise self.say.breaks_rule(*broken, outcome.case)
        if self.exercise.kernel:
            self._work_is_shared(outcomes)
        if self.exercise.kernel and self.exercise.traffic is not None:
            self.passed += self.exercise.launch_rule is not None
            self._traffic(outcomes)

    def _inputs_untouched(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.reply.changed:
                raise self.say.input_changed(outcome)
        for outcome in outcomes:
            if outcome.reply.aliases:
                raise self.say.aliases_input(outcome)
        for outcome in outcomes:
            if outcome.reply.copies and not outcome.wrong:
                raise self.say.returns_a_copy(outcome)
        for outcome in outcomes:
            if outcome.reply.left:
                raise self.say.left_behind(outcome)

    def _own_kernel(self, outcomes: list[Outcome]) -> None:
        """The proof that the learner's own Triton kernel did the work."""
        substance = [outcome for outcome in outcomes if any(_numel(y) for y in outcome.reply.outputs.values())]
        # In a single case there may be nothing to load: dropout with p = 1, for instance.
        loads = any(outcome.reply.loaded for outcome in substance)
        for outcome in substance:
            for operation, line in outcome.reply.host_ops:
                if operation not in self.exercise.torch_ops:
                    raise self.say.computes_outside(outcome, operation, line)
            if not outcome.reply.launches:
                raise self.say.launches_nothing(outcome)
            if not outcome.reply.stored:
                raise self.say.stores_nothing()
            if not loads:
                raise self.say.loads_nothing()
        if substance and all(outcome.reply.same_without_kernels for outcome in substance):
            raise self.say.same_without_kernels()
        if substance and all(outcome.reply.mostly_copied for outcome in substance):
            raise self.say.mostly_copied()

    def _work_is_shared(self, outcomes: list[Outcome]) -> None:
        """Among several programs more than one loads or stores something, at least in one case: in a short one all may be the
        first program's."""
        grids = [(launch, outcome.case) for outcome in outcomes for launch in outcome.reply.launches]
        grids = [(launch, case) for launch, case in grids if launch.programs >= _SEVERAL]
        if grids and all(launch.working == 1 for launch, _ in grids):
            launch, case = max(grids, key=lambda grid: grid[0].programs)
            raise self.say.one_works(launch.kernel, launch.programs, case)

    def _traffic(self, outcomes: list[Outcome]) -> None:
        """What each case cost; the largest, which tells most, comes first."""
        bound = self.exercise.traffic
        largest = max(outcomes, key=lambda outcome: _numel(outcome.case.args[0]))
        outcomes = [largest, *(outcome for outcome in outcomes if outcome is not largest)]
        allowed = [bound.allowed(outcome.case) for outcome in outcomes]
        for outcome, limit in zip(outcomes, allowed, strict=True):
            if len(outcome.reply.launches) > limit.launches:
                raise self.say.launches(outcome, limit)
        slack = 1 + bound.slack
        over, by_kernels = [], []
        for outcome, limit in zip(outcomes, allowed, strict=True):
            reply, most = outcome.reply, (limit.reads * slack, limit.writes * slack)
            if reply.read_bytes > most[0] or reply.written_bytes > most[1]:
                over.append((outcome, limit))
            if (
                reply.read_bytes - reply.copied_read_bytes > most[0]
                or reply.written_bytes - reply.copied_write_bytes > most[1]
            ):
                by_kernels.append((outcome, limit))
        if over:
            raise self.say.traffic(*(by_kernels or over)[0], copies=not by_kernels)
        for outcome in () if bound.again else outcomes:  # what is small is loaded often before the sum shows it
            for again in _loaded_again(outcome, bound.slack):
                raise self.say.loads_again(outcome, *again)
        for outcome, limit in zip(outcomes, allowed, strict=True):
            reply = outcome.reply
            if reply.allocated_bytes > (memory := self._memory(outcome, limit.memory)):
                raise self.say.memory(outcome, memory)
            if limit.saved is not None and sum(size for _, size in reply.saved) > limit.saved * slack:
                raise self.say.saved(outcome, limit.saved)
        if bound.sectors is not None:  # right bytes may still come in pieces that waste most of each sector
            accesses = [access for launch in largest.reply.launches for access in launch.accesses]
            times = 32 * sum(a.sectors for a in accesses) / max(sum(a.bytes for a in accesses), 1)
            if times > bound.sectors:
                raise self.say.sectors(largest, times)
        if bound.flops is None:
            return
        for outcome in outcomes:
            done: Counter[str] = Counter()
            for launch in outcome.reply.launches:
                done[launch.kernel] += launch.flops
            enough = bound.flops(*outcome.case.args)
            if done.total() > enough * slack:
                raise self.say.flops(outcome, done, enough)

    def _memory(self, outcome: Outcome, bound: float | None) -> float:
        """The bytes that a call may allocate: some arguments may need a copy, and results have their dtypes in between."""
        if bound is not None:
            return bound * (1 + self.exercise.traffic.slack)
        return 4096 + 2 * sum(map(_nbytes, (*outcome.case.args, *outcome.reply.outputs.values())))

    def _compiles(self, replies: Iterable[Reply], ran: bool = True) -> None:
        """What the interpreter runs, a GPU may still refuse: each kernel is compiled, with each set of dtypes that it met. Where
        the interpreter stops, the compiler's reason is the better one."""
        launches: dict[tuple, str] = {}
        for text in (text for reply in replies for text in reply.compiles):
            packed = json.loads(text)
            if "refused" in packed:
                raise self.say.does_not_compile("a GPU", 0, packed["refused"], ran)
            dtypes = [value[1] for value in [*packed["args"], *packed["kwargs"].values()] if value[0] == "tensor"]
            launches.setdefault((packed["name"], *dtypes), text)
        if not launches:
            return
        texts = tuple(launches.values())
        answer = compiler.answered({"accept": texts, "gpus": COMPILED_FOR}, lambda: self._ask_compiler(texts))
        if answer:
            raise self.say.does_not_compile(**answer, ran=ran)

    def _ask_compiler(self, launches: tuple[str, ...]) -> dict:
        """{}, or what was refused for which GPU and where."""
        with _working(_server("compile"), printed := bytearray(), COMPILE_S) as worker:
            deadline = Deadline(worker.pid, COMPILE_S)
            try:
                self._exchange(worker, Job("", "", "compile"), deadline)
                error = self._exchange(worker, (launches, COMPILED_FOR), deadline).error
            except TimeoutError:  # raised and not returned: the next check asks again
                text = f"still not compiled after {COMPILE_S} s"
                raise self.say.does_not_compile("a GPU", 0, text) from None
            except (wire.Malformed, wire.Closed, OSError):
                code = worker.end()
                if not worker.server.alive:
                    raise ServerGone("the grading process is gone") from None
                text = f"the compiler ended without an answer (exit status {code})"
                raise self.say.does_not_compile("a GPU", 0, text) from None
        if error is None:
            return {}
        said = printed.decode(errors="replace")
        self.detail += said + error.traceback
        # The compiler's later passes print what is wrong and raise only that they failed.
        reasons = [line.partition("error: ")[2] for line in said.splitlines() if "error: " in line]
        message = reasons[0] if reasons and "PassManager" in error.message else error.message
        return {"gpu": error.type, "line": error.line, "message": compiler.plain(message)}

    def _judge_on_gpu(self, cases: list[Case]) -> None:
        outcomes = self._run_cases(_server("cuda"), "cuda", cases)
        if any(outcome.wrong for outcome in outcomes):
            raise self.say.values(outcomes, ", on the GPU only")
        for outcome in outcomes:
            if not all(device.startswith("cuda") for device in outcome.reply.devices):
                raise self.say.on_cpu(outcome)
            if not outcome.reply.agree:
                raise self.say.disagrees(outcome)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Cases and references are small: a second thread would mostly wait for the first, which on a busy machine takes many
    times as much CPU as the work itself. Nothing to do before torch is loaded."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    try:
        if torch:
            torch.set_num_threads(1)
        yield
    finally:
        if torch:
            torch.set_num_threads(before)


def _moved(reply: Reply, first: int, say: Words) -> Reply:
    """A reply about a kernel's text, whose first line is that behind line `first` of the file. Raises Diagnosis."""
    if not reply.error:
        launches = (
            replace(x, accesses=tuple(replace(a, line=first + a.line) for a in x.accesses)) for x in reply.launches
        )
        return replace(reply, launches=tuple(launches))
    error = reply.error
    if not error.fault:
        raise say.not_interpreted(error, first)
    line = error.line and first + error.line
    lines = say.source.splitlines()
    return Reply(error=replace(error, line=line, source=lines[line - 1].strip() if 0 < line <= len(lines) else ""))


def _server(device: str) -> Server:
    server = _servers.get(device)
    if server is None or not server.alive:
        server = _servers[device] = Server(device)
    return server


@contextlib.contextmanager
def _working(server: Server, printed: bytearray, cpu_s: float):
    """A worker that is gone, with all it started, at the end. What it prints goes to `printed`, up to a limit."""
    try:
        worker = server.fork(cpu_s)
    except ServerGone:  # since the last check
        worker = _server(server.device).fork(cpu_s)

    def drain() -> None:
        with os.fdopen(worker.stdout, "rb", buffering=0) as stream:
            while part := stream.read(1 << 16):
                printed.extend(part[: max(0, _PRINTED_BYTES - len(printed))])

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        yield worker
    finally:
        worker.end()
        reader.join(2)


def _folder(worker: Worker) -> tempfile.TemporaryDirectory:
    """For the learner's file: gone before the next one comes."""
    return tempfile.TemporaryDirectory(dir=worker.server.folder, ignore_cleanup_errors=True)


@functools.cache
def _gpu_present() -> bool:
    import torch

    return torch.cuda.is_available()


def _handed_over(exercise_id: str) -> Verdict | None:
    """The verdict that the pytest plugin reached before it ran this cell. Changing it changes nothing but the picture."""
    folder = os.environ.get("GPUKIT_VERDICTS")
    if not folder:
        return None
    with contextlib.suppress(OSError, ValueError, TypeError):
        data = json.loads((Path(folder) / f"{exercise_id}.json").read_text())
        return Verdict(**{**data, "lines": tuple(data["lines"])})
    return None


def _described(far: wire.Imaginary) -> str:
    return f"{list(far.shape)} {far.dtype}" + (f" with stride {far.gap}" if far.gap > 1 else "")


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors in the arguments of a case, those in its lists too."""
    if hasattr(value, "numel"):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _other_numbers(args: tuple, others: tuple) -> bool:
    """Whether both have tensors of the same shapes and dtypes, and a number in them differs."""
    pairs = list(itertools.zip_longest(_tensors(args), _tensors(others)))
    if any(a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
        return False
    return any(not bool(((a == b) | (a != a) & (b != b)).all()) for a, b in pairs)


def _loaded_again(outcome: Outcome, slack: float) -> Iterator[tuple[str, list[int], float]]:
    """Arguments of kernels of which programs load what they have loaded already: the name, the lines, and how often. In an input
    that was expanded, or where an index wraps around in a single row, many lanes have one address: that proves nothing."""
    if any(0 in x.stride() or (x.ndim > 1 and 1 in x.shape) for x in _tensors(outcome.case.args)):
        return
    once: Counter[tuple[str, str]] = Counter()
    again: Counter[tuple[str, str]] = Counter()
    lines: dict[tuple[str, str], set[int]] = {}
    for launch in outcome.reply.launches:
        for access in launch.accesses:
            if access.kind == "load":
                key = launch.kernel, access.tensor
                once[key] += access.bytes - access.again_bytes
                again[key] += access.again_bytes
                if access.again_bytes:
                    lines.setdefault(key, set()).add(access.line)
    for key, count in again.most_common():
        if count > slack * once[key]:
            yield key[1], sorted(lines[key]), 1 + count / max(once[key], 1)


def _numel(value: Any) -> int:
    return value.numel() if hasattr(value, "numel") else 0


def _nbytes(value: Any) -> int:
    return _numel(value) * value.element_size() if hasattr(value, "element_size") else 0
