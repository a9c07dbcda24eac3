"""The pytest plugin that makes `pytest --nbval notebooks` a sound grader, whatever a learner saved, tagged or deleted.

nbval stays the runner: it executes cells and compares outputs. This plugin replaces its items, for notebooks of a
course only (a folder notebooks/ beside exercises/), by those of gpukit.grading.cells. There a check cell is graded by
the judge in pytest's own process; the cell's text, outputs and tags decide nothing. Options and reports are here.

Loaded by every pytest run of the environment, so nothing heavy is imported before a notebook is collected.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from gpukit import course
from gpukit.grading import registry
from gpukit.grading.check_cells import protect_imports
from gpukit.grading.report import Report
from gpukit.grading.verdict import Verdict, not_graded

CELL_TIMEOUT_S = 120.0
_GRADING = pytest.StashKey["Grading"]()
_CONFTESTS_OFF = pytest.StashKey[bool]()
# nbval, which pytest loads behind this plugin, imports nbformat, which imports jsonschema, and that builds 38 grammars of web
# addresses for 1.5 s if this package is there. No notebook has such an address to check.
sys.modules.setdefault("rfc3987_syntax", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpukit", "gpukit: grading of the course's notebooks, with --nbval")
    group.addoption("--gpukit-impl", metavar="IMPL", help="exercises (default) or solutions; before GPUKIT_IMPL")
    group.addoption("--gpukit-seed", metavar="N", type=int, help="replay the inputs of an earlier run")
    for kind in ("json", "markdown", "junit"):
        group.addoption(f"--gpukit-{kind}", metavar="FILE", help=f"write the report by exercise as {kind}")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """A conftest.py in a learner's folder could change any grade, so a run on notebooks alone loads none."""
    known = early_config.known_args_namespace
    if not _on(known):
        return
    paths = [Path(str(arg).partition("::")[0]).resolve() for arg in known.file_or_dir] or [Path.cwd()]
    if all(course_of(path / "any.ipynb" if path.is_dir() else path) for path in paths):
        known.noconftest = True
        early_config.stash[_CONFTESTS_OFF] = True


def pytest_configure(config: pytest.Config) -> None:
    if not _on(config.option):
        return
    impl = config.getoption("--gpukit-impl") or os.environ.get("GPUKIT_IMPL") or "exercises"
    if impl not in course.IMPLS:
        raise pytest.UsageError(f"--gpukit-impl and GPUKIT_IMPL must be exercises or solutions, got {impl!r}")
    config.stash[_GRADING] = Grading(config, impl)
    if getattr(config.option, "dist", "no") == "load":  # xdist: the cells of a notebook share a kernel
        config.option.dist = "loadfile"


def pytest_unconfigure(config: pytest.Config) -> None:
    if grading := config.stash.get(_GRADING, None):
        shutil.rmtree(grading.verdicts_dir, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector):
    found = yield
    grading = parent.config.stash.get(_GRADING, None)
    if grading is None or file_path.suffix != ".ipynb" or not found:
        return found
    root = course_of(file_path)
    if root is None:
        return found
    grading.prepare(root)
    from gpukit.grading.cells import Notebook

    return [Notebook.from_parent(parent, path=file_path, root=root, grading=grading)]


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items and (grading := items[0].config.stash.get(_GRADING, None)):
        grading.selected = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if call.when == "call":
        report.gpukit = getattr(item, "rows", [])  # plain data: it travels from an xdist worker with the report
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport):
    rows = getattr(report, "gpukit", None)
    if not rows:
        return None
    letter = {"passed": ".", "failed": "F", "skipped": "s"}[report.outcome]
    return report.outcome, letter, f"{report.outcome.upper()} {', '.join(r['id'] for r in rows)}"


def pytest_report_header(config: pytest.Config) -> str | None:
    grading = config.stash.get(_GRADING, None)
    return f"gpukit: {grading.what}" if grading else None


class Grading:
    """One run: which implementation, the verdicts so far, the report. `config.stash` holds it under --nbval."""

    def __init__(self, config: pytest.Config, impl: str):
        self.config = config
        self.impl = impl
        self.report: Report | None = None  # of the first course whose notebook is collected
        self.selected = False  # the user asked for a part: -k, --lf, a cell
        try:
            self.verdicts_dir = Path(tempfile.mkdtemp(prefix="gpukit-"))  # only this user may look into it
        except OSError as error:
            raise pytest.UsageError(f"gpukit needs a temporary folder: {error}") from None
        self.problems: list[str] = []  # with the reports
        self._verdicts: dict[tuple[Path, str], Verdict] = {}
        config.pluginmanager.register(self, "gpukit-grading")

    @property
    def what(self) -> str:
        return "solutions (an instructor's run, not a grade)" if self.impl == "solutions" else "exercises"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        for path, _ in _arguments(session.config):
            folder = path / "notebooks" if (path / "notebooks").is_dir() else path
            if root := course_of(folder / "any.ipynb" if folder.is_dir() else folder):
                self.prepare(root)

    def prepare(self, root: Path) -> None:
        """Before the first notebook of a course is collected: nbval as the course needs it. Raises UsageError."""
        if self.report is not None:
            return
        config, option = self.config, self.config.option
        for name in ("conftest.py", "pytest.ini", "pytest.toml", "tox.ini"):
            if (root / "notebooks" / name).exists() and not (name == "conftest.py" and _CONFTESTS_OFF in config.stash):
                raise pytest.UsageError(f"notebooks/{name} could change grades: remove it, then run pytest again")
        try:
            import gpukit.grading.cells  # noqa: F401
        except ImportError as error:
            raise pytest.UsageError(str(error)) from None
        protect_imports(root)
        self.report = Report(self.impl, root)
        option.nbval_current_env = True  # a saved kernel name may not exist here, and is the learner's to edit
        option.nbval_kernel_name = None
        if type(option.nbval_cell_timeout) is int:  # nbval's default is an int, a value from the command line a float
            option.nbval_cell_timeout = CELL_TIMEOUT_S
        if option.nbval_sanitize_with:  # relative to where pytest was started, else to the project
            given = Path(option.nbval_sanitize_with)
            places = [config.invocation_params.dir / given, config.rootpath / given]
            option.nbval_sanitize_with = str(next((place for place in places if place.exists()), places[0]))

    def grade(self, exercise_id: str, root: Path) -> Verdict:
        """The judge's verdict, once for each exercise of a run."""
        key = (root, exercise_id)
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(exercise_id, root)
        return self._verdicts[key]

    def hand_over(self, verdict: Verdict) -> None:
        """Let `gpukit.check` in the kernel show this verdict; the copy that counts stays here."""
        if verdict.id in registry.exercises():  # any other id is whatever the learner typed: no name for a file
            path = self.verdicts_dir / f"{verdict.id}.json"
            with contextlib.suppress(OSError):  # no room for it: the kernel asks the judge itself
                path.write_text(json.dumps(verdict.as_dict()), encoding="utf-8")

    def _judge(self, exercise_id: str, root: Path) -> Verdict:
        try:
            from gpukit.grading.judge import judge

            seed = self.config.getoption("--gpukit-seed")
            return judge(exercise_id, impl=self.impl, root=root, seed=seed, terminal=True)
        except registry.UnknownExercise as error:
            lines, label = (f"{exercise_id}: {error}",), "unknown-exercise"
        except Exception as error:
            return not_graded(exercise_id, self.impl, error)
        return Verdict(exercise_id, "error", 0, 0, self.impl, lines, label)

    # ---- the report: built from pytest's reports, which reach the main process from xdist's workers too

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for graded in getattr(report, "gpukit", ()):
            if self.report is not None:
                self.report.add(graded)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(session.config, "workerinput"):
            return
        if self.report is None:
            return
        self.report.interrupted = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        option = session.config.option
        self.problems = self.report.write(option.gpukit_json, option.gpukit_markdown, option.gpukit_junit)
        if self.problems and exitstatus == 0:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        if exitstatus == 0 and self._asked(session.config) is None and not self.report.all_passed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED  # a whole notebook is gone

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for problem in self.problems:
            terminalreporter.line(f"gpukit: {problem}")
        asked = self._asked(self.config)
        if self.report is not None and (asked is None or asked or self.report.seen):
            terminalreporter.section(f"gpukit: {self.what}")
            for line in self.report.as_text(asked).splitlines():
                terminalreporter.line(line)

    def _asked(self, config: pytest.Config) -> set[str] | None:
        """The exercises of the notebooks that pytest was asked for, where one without a result is missing; None for all."""
        if self.selected or getattr(config.option, "lf", False) or config.option.collectonly:
            return set()
        folders = [folder for path, cell in _arguments(config) if not cell for folder in (path, path / "notebooks")]
        courses = [folder for folder in folders if folder.is_dir() and course_of(folder / "any.ipynb")]
        if any(folder.name == "notebooks" for folder in courses):
            return None
        files = {path.stem for path, cell in _arguments(config) if not cell and course_of(path)}
        return {name for name, exercise in registry.exercises().items() if exercise.notebook in files}


def course_of(notebook: Path) -> Path | None:
    """The root of the course that `notebook` belongs to, or None: other people's notebooks are left to nbval."""
    for folder in notebook.resolve().parents:
        if folder.name == "notebooks" and any((folder.parent / name).is_dir() for name in course.IMPLS):
            return folder.parent
    return None


def _arguments(config: pytest.Config) -> list[tuple[Path, str]]:
    """What pytest was asked for: (path, cell), the cell "" for a whole file or folder."""
    parts = [str(arg).partition("::") for arg in config.args]
    return [((config.invocation_params.dir / path).resolve(), cell) for path, _, cell in parts]


def _on(option: object) -> bool:
    return bool(getattr(option, "nbval", False) or getattr(option, "nbval_lax", False))
