"""Notebook cells as pytest items: nbval's, with the gaps closed that a saved notebook or a dying kernel opens.

Imported by gpukit.grading.plugin when the first notebook of a course is collected. Raises ImportError with one sentence
if nbval is not the one that this file was written against, because a grader that half works is worse than none.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import json
import signal
import subprocess
import time
import warnings
from pathlib import Path
from queue import Empty
from types import SimpleNamespace

import pytest

from gpukit.grading import registry
from gpukit.grading.check_cells import NOISE, check_ids, kernel_environment, uncompared
from gpukit.grading.report import missing, plain, row
from gpukit.grading.verdict import Verdict

_POLL_S = 0.5  # how long a kernel may be dead before it is noticed


def _load_nbval() -> tuple:
    found = importlib.metadata.version("nbval")
    wrong = f"gpukit grades with nbval 0.11 and found {found}: pip install 'nbval>=0.11,<0.12'"
    try:
        import nbval.kernel
        import nbval.plugin

        parts = (
            nbval.plugin.IPyNbFile,
            nbval.plugin.IPyNbCell,
            nbval.plugin.NbCellError,
            nbval.kernel.RunningKernel,
            nbval.kernel.start_new_kernel,
            nbval.kernel.CURRENT_ENV_KERNEL_NAME,
        )
    except (ImportError, AttributeError):
        raise ImportError(wrong) from None
    notebook, cell, _, kernel, *_ = parts
    as_expected = (
        found.startswith("0.11.")
        and {"name", "parent", "cell_num", "cell", "options"} <= inspect.signature(cell.__init__).parameters.keys()
        and all(hasattr(cell, name) for name in ("runtest", "setup", "repr_failure", "raise_cell_error"))
        and all(hasattr(notebook, name) for name in ("collect", "setup", "teardown", "get_kernel_message"))
        and all(hasattr(notebook, name) for name in ("setup_sanitize_files", "kernel"))
        and all(hasattr(kernel, name) for name in ("await_reply", "get_message", "is_alive", "stop"))
    )
    if not as_expected:
        raise ImportError(wrong)
    return parts


IPyNbFile, IPyNbCell, NbCellError, RunningKernel, start_new_kernel, CURRENT_ENV_KERNEL_NAME = _load_nbval()


class CellFailed(Exception):
    """A failure as its reader sees it: this text and nothing else."""


class KernelDied(Exception):
    """The message says how."""


class Failure:
    """What pytest prints for a failed item, and its first line for the summary and for JUnit."""

    def __init__(self, text: str, path: Path, message: str = ""):
        self.text = text
        self.reprcrash = SimpleNamespace(message=plain(message or text.partition("\n")[0]), path=str(path), lineno=0)

    def toterminal(self, writer) -> None:
        writer.line(self.text)

    def __str__(self) -> str:
        return self.text


class Kernel(RunningKernel):
    """nbval's kernel in an environment of its own. When it dies, KernelDied is raised within a second."""

    def __init__(self, cwd: str, environment: dict[str, str], startup_timeout: float):
        self.error = ""  # what the last execute_reply reported
        self.km, self.kc = start_new_kernel(
            startup_timeout=startup_timeout,
            kernel_name=CURRENT_ENV_KERNEL_NAME,
            stderr=subprocess.DEVNULL,
            cwd=cwd,
            env=environment,
        )
        try:
            self._ensure_iopub_up()
        except BaseException:
            self.stop()
            raise

    def await_reply(self, msg_id: str, timeout: float | None = None) -> None:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            message = self.poll("shell", deadline)
            if message["parent_header"].get("msg_id") == msg_id:
                content = message["content"]
                self.error = ""
                if content.get("status") != "ok":
                    self.error = f"{content.get('ename', content.get('status'))}: {content.get('evalue', '')}"
                return

    def poll(self, stream: str, deadline: float) -> dict:
        """The next message. Raises Empty at the deadline, KernelDied if there can be none."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Empty
            with contextlib.suppress(Empty):
                return self.get_message(stream, timeout=min(left, _POLL_S))
            if not self.is_alive():
                raise KernelDied(self._how_it_ended())

    def stop(self) -> None:
        """End the kernel and close every socket, also of a kernel that is dead."""
        if hasattr(self, "km"):
            self.kc.stop_channels()
            self.km.shutdown_kernel(now=True)
            del self.km  # nbval's sign that the kernel is gone

    def _how_it_ended(self) -> str:
        process = getattr(getattr(getattr(self, "km", None), "provisioner", None), "process", None)
        code = getattr(process, "returncode", None)
        if isinstance(code, int) and code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}" if isinstance(code, int) else "it ended"


class Notebook(IPyNbFile):
    """One notebook of the course. Its kernel starts when a cell needs it; `broken` says why no further cell can run."""

    def __init__(self, *args, root: Path, grading, **kwargs):
        super().__init__(*args, **kwargs)
        self.root, self.grading = root, grading
        self.broken = ""
        self._interrupted_at = 0.0

    def setup(self) -> None:
        pass  # not the kernel: whatever keeps it from starting, checks are graded

    def teardown(self) -> None:
        if self.kernel is not None:
            self.kernel.stop()

    def collect(self):
        owed = [e.id for e in registry.exercises().values() if e.notebook == self.path.stem]
        problem, cells = self._read()
        if problem:
            yield Unmet.from_parent(self, name="notebook", text=f"{self.path.name} {problem}")
        checked: set[str] = set()
        for cell in cells:
            ids = _graded(cell.cell.source)
            checked.update(ids)
            kind = Check if ids else Demo
            same = {"name": cell.name, "cell_num": cell.cell_num, "cell": cell.cell, "options": cell.options}
            yield kind.from_parent(self, **same)
        for exercise_id in owed:
            if exercise_id not in checked:
                why = f'{self.path.name} has no cell  gpukit.check("{exercise_id}")'
                why = f"{self.path.name} cannot be read" if problem else f"{why}: put it back"
                yield Unmet.from_parent(self, name=f"missing {exercise_id}", verdict=missing(exercise_id, why))

    def _read(self) -> tuple[str, list]:
        """What is wrong with the file, if anything, and nbval's items."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            return "is not UTF-8 text: restore it from git", []
        except json.JSONDecodeError as error:
            return f"is not JSON (line {error.lineno}): restore it from git", []
        except OSError as error:
            return f"cannot be read: {error.strerror}", []
        if not isinstance(content, dict) or not isinstance(content.get("cells"), list) or not content["cells"]:
            return "has no cells: restore it from git", []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about missing cell ids and the like, which change nothing here
                return "", list(super().collect())
        except Exception as error:  # whatever a damaged file makes nbformat or nbval raise
            said = str(error).partition("\n")[0][:120]
            return f"is not a notebook that nbformat can read ({type(error).__name__}: {said})", []

    def start_kernel(self) -> None:
        """Start the kernel unless it runs. Raises CellFailed if there is none to be had."""
        if self.broken:
            raise CellFailed(f"not run: {self.broken}")
        if self.kernel is not None:
            return
        environment = kernel_environment(self.grading.impl)
        environment["GPUKIT_VERDICTS"] = str(self.grading.verdicts_dir)
        try:
            self.setup_sanitize_files()
            self.sanitize_patterns.update(NOISE)
            timeout = self.config.option.nbval_kernel_startup_timeout
            self.kernel = Kernel(str(self.path.parent), environment, timeout)
        except Exception as error:
            said = str(error).partition("\n")[0]
            self.broken = f"the kernel did not start ({type(error).__name__}: {said}); try: gpukit doctor"
            raise CellFailed(f"not run: {self.broken}") from None

    def get_kernel_message(self, timeout: float | None = None, stream: str = "iopub") -> dict:
        now = time.monotonic()
        deadline = now + (float("inf") if timeout is None else timeout)
        if self.timed_out:  # a cell that prints for ever and ignores the interrupt would keep this going for ever
            self._interrupted_at = self._interrupted_at or now
            deadline = min(deadline, self._interrupted_at + (timeout or 0))
        return self.kernel.poll(stream, deadline)


class Demo(IPyNbCell):
    """A cell that must run and, unless tagged, show what it showed when it was saved: nbval's rules."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if uncompared(self.cell.metadata.get("tags"), self.parent.root):
            self.options["check"] = False

    def setup(self) -> None:
        pass  # nbval would expect later cells to fail after a timeout, and pass them if they do not

    def runtest(self) -> None:
        if self.options["skip"]:
            pytest.skip("tagged nbval-skip")
        notebook = self.parent
        notebook.start_kernel()
        where = f"{self.name} of {notebook.path.name}"
        try:
            super().runtest()
            if notebook.timed_out:
                raise CellFailed(f"{where} ran past {self.config.option.nbval_cell_timeout:g} s and was interrupted")
            if notebook.kernel.error and not self.options["check_exception"]:
                raise CellFailed(f"{where} failed, and hid it: {notebook.kernel.error}")
        except KernelDied as error:
            notebook.broken = f"the kernel died in {where} ({error})"
            raise CellFailed(f"{where}: the kernel died while this cell ran ({error})") from None
        finally:
            if notebook.timed_out and not notebook.broken:
                notebook.broken = f"{where} ran past its limit of {self.config.option.nbval_cell_timeout:g} s"

    def repr_failure(self, excinfo) -> Failure:
        if isinstance(excinfo.value, CellFailed):
            return Failure(str(excinfo.value), self.path)
        text = str(super().repr_failure(excinfo))
        if getattr(self, "comparison_traceback", ()):  # nbval's account of what differs
            text += (
                f"\nThe saved output is stale or the cell wrong. `gpukit nb run {self.parent.path.stem}` saves it anew."
            )
        coloured = self.config.get_terminal_writer().hasmarkup and not getattr(self.config.option, "xmlpath", None)
        return Failure(text if coloured else plain(text), self.path, f"{self.name}: {excinfo.value}")

    def reportinfo(self):
        return self.path, 0, self.name


class Check(Demo):
    """A cell that calls gpukit.check. The judge decides; what the notebook says or does about it does not count."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ids = _graded(self.cell.source)
        self.extra_keyword_matches.update(self.ids)  # pytest -k softmax.fused
        self.options = {"skip": False, "check": False, "check_exception": True}
        self.rows: list[dict] = []

    def runtest(self) -> None:
        verdicts = [self.parent.grading.grade(exercise_id, self.parent.root) for exercise_id in self.ids]
        _remember(self, verdicts)
        for verdict in verdicts:
            self.parent.grading.hand_over(verdict)
        # For what later cells see, and nothing else: the verdict stands.
        with contextlib.suppress(Exception):
            super().runtest()
        if failed := [verdict for verdict in verdicts if verdict.state not in ("pass", "skipped")]:
            raise CellFailed("\n".join(plain(str(verdict)) for verdict in failed))
        if skipped := [verdict for verdict in verdicts if verdict.state == "skipped"]:
            pytest.skip(plain(str(skipped[0])).partition("\n")[0])

    def reportinfo(self):
        return self.path, 0, f"{', '.join(self.ids)} ({self.name} of {self.path.name})"


class Unmet(pytest.Item):
    """Something that the notebook should hold and does not."""

    def __init__(self, *args, text: str = "", verdict: Verdict | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.text = text or str(verdict)
        self.rows: list[dict] = []
        self.verdict = verdict

    def runtest(self) -> None:
        if self.verdict:
            _remember(self, [self.verdict])
        raise CellFailed(self.text)

    def repr_failure(self, excinfo) -> Failure | str:
        if isinstance(excinfo.value, CellFailed):
            return Failure(str(excinfo.value), self.path)
        return super().repr_failure(excinfo)

    def reportinfo(self):
        return self.path, 0, self.verdict.id if self.verdict else self.path.name


def _graded(source: str) -> list[str]:
    """The exercises that a cell checks; gpukit.check("softmax") stands for all of a concept."""
    found: list[str] = []
    for name in check_ids(source):
        with contextlib.suppress(registry.UnknownExercise):  # which the judge says
            found += registry.named(name)
            continue
        found.append(name)
    return [*dict.fromkeys(found)]


def _remember(item: pytest.Item, verdicts: list[Verdict]) -> None:
    """Verdicts as rows for gpukit's report, as properties for JUnit, and with -v what the learner's code printed."""
    item.rows = [row(verdict) for verdict in verdicts]
    for graded in item.rows:
        checks = f"{graded['checks_passed']}/{graded['checks_total']}"
        named = {"exercise": graded["id"], "state": graded["state"], "checks": checks, "label": graded["label"]}
        item.user_properties += named.items()
    if item.config.option.verbose > 0:
        for verdict in verdicts:
            if verdict.detail:
                item.add_report_section("call", f"detail of {verdict.id}", plain(verdict.detail))
