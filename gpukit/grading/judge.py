"""The judge: makes fresh inputs, has a worker run the learner's function on them, and says what it found.

It runs in the caller's process (a notebook's kernel, pytest, the command line) and never imports the learner's code.
Kernels always run in Triton's interpreter first, so that a verdict does not depend on the machine; where there is a GPU they
then run there as well.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from gpukit import course
from gpukit.grading import messages, wire
from gpukit.grading.check_cells import protect_imports
from gpukit.grading.diagnose import Diagnosis, Words
from gpukit.grading.evidence import Outcome
from gpukit.grading.exercise import Case, Exercise
from gpukit.grading.lint import lint
from gpukit.grading.messages import Failure, Job, Reply
from gpukit.grading.registry import exercise as find
from gpukit.grading.server import Server, ServerFailed, Worker
from gpukit.grading.verdict import CheckFailed, Verdict
from gpukit.simulator.compiler import compile as compiler

COMPILED_FOR = ("a100-80gb", "h100-sxm")  # a pass means that the kernels compile for these, sm_80 and sm_90
COMPILE_S = 60
_PRINTED_BYTES = 1 << 16
_shown: dict[str, int] = {}  # hints shown in this process
_servers: dict[str, Server] = {}


def check(exercise_id: str) -> None:
    """Check one exercise: prints a line and returns, or raises CheckFailed with the diagnosis. For notebooks.

    Raises UnknownExercise, naming the nearest id.
    """
    exercise = find(exercise_id)
    verdict = _handed_over(exercise.id) or judge(exercise.id, course.impl())
    if not verdict.passed:
        raise CheckFailed(verdict)
    print(verdict)


def hint(exercise_id: str, number: int | None = None) -> None:
    """Print the next hint of an exercise, or hint `number` (1 to 3)."""
    exercise = find(exercise_id)
    if number is None:
        number = min(_shown.get(exercise.id, 0) + 1, len(exercise.hints))
    if number not in range(1, len(exercise.hints) + 1):
        raise course.CourseError(f"hint number must be 1 to {len(exercise.hints)}, got {number}")
    _shown[exercise.id] = max(number, _shown.get(exercise.id, 0))
    print(f"hint {number} of {len(exercise.hints)} for {exercise.id}: {exercise.hints[number - 1]}")


def judge(exercise_id: str, impl: str = "exercises", root: Path | None = None, seed: int | None = None) -> Verdict:
    """The verdict on one exercise of the course in `root` (default: the course around the working directory).

    Recorded for the progress panel unless `impl` is "solutions". Raises UnknownExercise and CourseNotFound.
    """
    exercise = find(exercise_id)
    root = root or course.root()
    protect_imports(root)
    path = course.exercise_file(exercise.concept, root, impl)
    shown = f"{impl}/{path.name}"
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.__class__.__name__}"
        verdict = Verdict(
            exercise.id, "missing", 0, 0, impl, (f"{exercise.id}: {shown} {reason}",), diagnosis="missing"
        )
    else:
        verdict = judge_source(exercise, source, shown=shown, impl=impl, seed=seed)
    if impl == "exercises":
        from gpukit.grading.report import record

        record(verdict, root)
    return verdict


def judge_source(
    exercise: Exercise, source: str, *, shown: str = "", impl: str = "exercises", seed: int | None = None
) -> Verdict:
    """The verdict on a file's text. `shown` is what messages call the file."""
    run = _Run(exercise, source, shown or f"{impl}/{exercise.concept}.py", impl, seed)
    start = time.perf_counter()
    try:
        state, label, lines = run.judge()
    except ServerFailed as error:
        state, label, lines = "error", "grader", (f"{exercise.id}: {error}; gpukit doctor says what is missing",)
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


class _Run:
    """One check. What the learner reads of it is gpukit.grading.diagnose's business."""

    def __init__(self, exercise: Exercise, source: str, shown: str, impl: str, seed: int | None):
        self.exercise, self.source, self.impl = exercise, source, impl
        self.seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
        self.passed = self.total = 0
        self.beyond: tuple[Failure, Case] | None = None
        self.detail = ""
        number = min(_shown.get(exercise.id, 0) + 1, 3)
        self.say = Words(exercise, shown, f'hint {number} of 3: gpukit.hint("{exercise.id}")')

    def judge(self) -> tuple[str, str, tuple[str, ...]]:
        try:
            self._read()
            server = _server("cpu")
            if self.exercise.watched or "import torch" in self.source:
                server.prepare()  # loads while the cases are made; else each worker would load it
            cases = self.exercise.cases(random.Random(self.seed))
            self.total = len(cases) + self.exercise.bounds
            if self.exercise.kernel:
                _server("compile").prepare()
            outcomes = self._run_cases(server, "cpu", cases)
            self._judge_outcomes(outcomes)
            if self.exercise.kernel:
                self.passed = self.total - 1
                if self.beyond:
                    raise self._raised(*self.beyond)
                self._compiles(outcomes)
            if self.exercise.kernel and _gpu_present():
                self._judge_on_gpu(cases)
        except Diagnosis as found:
            return found.state, found.label, found.lines
        return "pass", "", ()

    def _read(self) -> None:
        try:
            # NumPy's arrays are not watched: neither what they compute nor what they hold.
            finding = lint(self.source, numpy=not self.exercise.watched)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self.say.unreadable(error) from None
        if finding is not None:
            raise self.say.forbidden(finding.line, finding.text)

    # -- running -------------------------------------------------------------------------------------------------------

    def _run_cases(self, server: Server, device: str, cases: list[Case]) -> list[Outcome]:
        """Send the cases to a fresh worker, one at a time, and compare as the answers come."""
        printed = bytearray()
        try:
            with tempfile.TemporaryDirectory(prefix="gpukit-") as folder, _working(server, printed) as worker:
                path = Path(folder) / f"{self.exercise.concept}.py"
                path.write_text(self.source, encoding="utf-8")
                return self._converse(worker, self.exercise.job(str(path), device), cases)
        finally:
            self.detail = printed.decode(errors="replace") + self.detail

    def _converse(self, worker: Worker, job: Job, cases: list[Case]) -> list[Outcome]:
        deadline = time.monotonic() + self.exercise.timeout_s
        outcomes: list[Outcome] = []
        current = None
        try:
            loaded = self._exchange(worker, job, deadline)
            if loaded.error:
                raise self._raised(loaded.error, None)
            if loaded.missing:
                raise self.say.no_function()
            for current in cases:
                reply = self._exchange(worker, current.args, deadline)
                if reply.error:
                    self.passed = sum(outcome.wrong is None for outcome in outcomes)
                    if reply.error.fault:
                        self._known_before(outcomes)
                    raise self._raised(reply.error, current)
                outcomes.append(Outcome(current, reply, self.exercise.compare(current, reply)))
            if job.how == "cpu" and self.exercise.huge and not any(outcome.wrong for outcome in outcomes):
                self._addresses(worker, deadline)
        except TimeoutError:
            raise self.say.no_answer(current) from None
        except wire.Malformed as error:
            raise self.say.malformed(error, current) from None
        except (wire.Closed, OSError):
            raise self.say.crashed(worker.end(), current) from None
        return outcomes

    def _addresses(self, worker: Worker, deadline: float) -> None:
        """One more call on tensors beyond 2^31 elements, of which only the addresses are looked at. What is wrong there is said
        after everything else."""
        args = self.exercise.huge()
        shapes = ", ".join(f"{list(arg.shape)} {arg.dtype}" for arg in args if isinstance(arg, wire.Imaginary))
        reply = self._exchange(worker, args, deadline)
        if reply.error:
            self.beyond = reply.error, Case(f"{shapes}, addresses only", args)

    def _raised(self, error: Failure, case: Case | None) -> Diagnosis:
        self.detail += error.traceback
        return self.say.raised(error, case)

    def _known_before(self, outcomes: list[Outcome]) -> None:
        """A known misconception in the values of earlier cases says more than the stray access it leads to later."""
        if any(outcome.wrong for outcome in outcomes):
            found = self.say.values(outcomes)
            if any(known.label == found.label for known in self.exercise.misconceptions) or self.exercise.remark(
                found.label
            ):
                raise found

    def _exchange(self, worker: Worker, message: Job | tuple, deadline: float) -> Reply:
        worker.sock.settimeout(max(0.001, deadline - time.monotonic()))
        messages.send(worker.sock, message)
        return messages.receive(worker.sock, Reply, deadline)

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
            if broken := self.exercise.broken_rule(outcome.case, outcome.reply):
                raise self.say.breaks_rule(*broken, outcome.case)
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

    def _traffic(self, outcomes: list[Outcome]) -> None:
        """What the largest case cost."""
        bound = self.exercise.traffic
        outcome = max(outcomes, key=lambda outcome: _numel(outcome.case.args[0]))
        first, reply = outcome.case.args[0], outcome.reply
        size = first.numel() * first.element_size()
        slack = 1 + bound.slack
        if len(reply.launches) > bound.launches:
            raise self.say.launches(outcome)
        if reply.read_bytes > bound.reads * size * slack or reply.written_bytes > bound.writes * size * slack:
            raise self.say.traffic(outcome, size)
        if bound.sectors is not None:  # right bytes may still come in pieces that waste most of each sector
            accesses = [access for launch in reply.launches for access in launch.accesses]
            times = 32 * sum(a.sectors for a in accesses) / max(sum(a.bytes for a in accesses), 1)
            if times > bound.sectors:
                raise self.say.sectors(outcome, times)
        if bound.flops is not None:
            done: Counter[str] = Counter()
            for launch in reply.launches:
                done[launch.kernel] += launch.flops
            enough = bound.flops(*outcome.case.args)
            if done.total() > enough * slack:
                raise self.say.flops(outcome, done, enough)

    def _compiles(self, outcomes: list[Outcome]) -> None:
        """What the interpreter runs, a GPU may still refuse: each kernel is compiled, with each set of dtypes that it met."""
        launches: dict[tuple, str] = {}
        for text in (text for outcome in outcomes for text in outcome.reply.compiles):
            packed = json.loads(text)
            if "refused" in packed:
                raise self.say.does_not_compile("a GPU", 0, packed["refused"], self.source)
            dtypes = [value[1] for value in [*packed["args"], *packed["kwargs"].values()] if value[0] == "tensor"]
            launches.setdefault((packed["name"], *dtypes), text)
        if not launches:
            return
        texts = tuple(launches.values())
        answer = compiler.answered({"accept": texts, "gpus": COMPILED_FOR}, lambda: self._ask_compiler(texts))
        if answer:
            raise self.say.does_not_compile(**answer, source=self.source)

    def _ask_compiler(self, launches: tuple[str, ...]) -> dict:
        """{}, or what was refused for which GPU and where."""
        with _working(_server("compile"), printed := bytearray()) as worker:
            deadline = time.monotonic() + COMPILE_S
            try:
                self._exchange(worker, Job("", "", "compile"), deadline)
                error = self._exchange(worker, (launches, COMPILED_FOR), deadline).error
            except TimeoutError:
                return {"gpu": "a GPU", "line": 0, "message": f"still not compiled after {COMPILE_S} s"}
            except (wire.Malformed, wire.Closed, OSError):
                return {"gpu": "a GPU", "line": 0, "message": "the compiler ended without an answer"}
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


def _server(device: str) -> Server:
    server = _servers.get(device)
    if server is None or not server.alive:
        server = _servers[device] = Server(device)
    return server


@contextlib.contextmanager
def _working(server: Server, printed: bytearray):
    """A worker that is gone, with all it started, at the end. What it prints goes to `printed`, up to a limit."""
    worker = server.fork()

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


def _numel(value: Any) -> int:
    return value.numel() if hasattr(value, "numel") else 0
