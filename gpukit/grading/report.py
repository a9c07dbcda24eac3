"""What a grading run writes (JSON, Markdown, JUnit, a table) and what a learner's own checks leave behind (progress).

Every report has one row for every registered exercise, or for each that was asked for, in the course's order: what was not run
is "missing".
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

from gpukit import course, tables
from gpukit.grading import registry
from gpukit.grading.verdict import Verdict

PROGRESS = ".gpukit/progress.json"
_unsaved: set[Path] = set()  # courses whose progress could not be saved, which has been said
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")  # XML and terminals refuse these
# A path from the root of the file system with at least one folder; what is left of it is the file's name.
_HOST_PATH = re.compile(r"(?<![\w.)\]/])/(?:[\w.+@-]+/)+(?=[\w.+@-])")


def plain(text: str) -> str:
    """`text` without color codes and control characters."""
    return _CONTROL.sub("", _ANSI.sub("", text))


def row(verdict: Verdict) -> dict:
    """A verdict as a report shows it. `label` names the diagnosis, `diagnosis` is what the learner reads."""
    return {
        "id": verdict.id,
        "state": verdict.state,
        "checks_passed": verdict.checks_passed,
        "checks_total": verdict.checks_total,
        "label": verdict.diagnosis,
        "diagnosis": "" if verdict.passed else plain(str(verdict)),
        "seconds": round(verdict.seconds, 3),
    }


def missing(exercise_id: str, why: str) -> Verdict:
    """The verdict on an exercise that could not be judged because something of it is not there."""
    return Verdict(exercise_id, "missing", 0, 0, "exercises", (f"{exercise_id}: missing: {why}",), "missing")


def markdown_table(rows: Iterable[dict]) -> str:
    """A line for each row, with the first line of its diagnosis."""
    cells = [
        ("exercise", "state", "checks", "label", "diagnosis", "seconds"),
        ("---",) * 3 + ("---",) * 2 + ("---:",),
    ]
    for r in rows:
        first_line = r["diagnosis"].partition("\n")[0].removeprefix(f"{r['id']}: ")
        cells.append((r["id"], r["state"], _checks(r), r["label"], markdown(first_line), f"{r['seconds']:.1f}"))
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def junit_suite(name: str, rows: Sequence[dict], **properties: str) -> ElementTree.Element:
    """A testsuite with a testcase for each row."""
    kinds = [_junit_kind(r["state"]) for r in rows]
    suite = ElementTree.Element(
        "testsuite",
        name=plain(name),
        tests=str(len(rows)),
        failures=str(kinds.count("failure")),
        errors=str(kinds.count("error")),
        skipped=str(kinds.count("skipped")),
        time=f"{sum(r['seconds'] for r in rows):.3f}",
    )
    _junit_properties(suite, **properties)
    for r, kind in zip(rows, kinds, strict=True):
        concept = r["id"].partition(".")[0]
        case = ElementTree.SubElement(suite, "testcase", classname=concept, name=r["id"], time=f"{r['seconds']:.3f}")
        _junit_properties(case, exercise=r["id"], state=r["state"], checks=_checks(r), label=r["label"])
        if kind:
            message = r["diagnosis"].partition("\n")[0] or r["state"]
            ElementTree.SubElement(case, kind, type=r["state"], message=message).text = r["diagnosis"]
    return suite


def junit(*suites: ElementTree.Element) -> str:
    """The text of a JUnit file."""
    root = ElementTree.Element("testsuites")
    root.extend(suites)
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


class Report:
    """The rows of one grading run. `root` is the course's folder: paths in messages are made relative to it. `ids` are the
    exercises that were asked for, None for all."""

    def __init__(self, impl: str, root: Path, ids: Iterable[str] | None = None):
        self.impl = impl
        self._ids = None if ids is None else tuple(ids)
        self.root = root
        self.interrupted = False
        self.seen: dict[str, dict] = {}

    def add(self, graded: dict | Verdict) -> None:
        graded = row(graded) if isinstance(graded, Verdict) else graded
        known = self.seen.get(graded["id"])
        if known is None or known["state"] == "missing":  # the same exercise, checked in a second notebook
            self.seen[graded["id"]] = {**graded, "diagnosis": self._without_host_paths(graded["diagnosis"])}

    @property
    def rows(self) -> list[dict]:
        not_run = {
            "state": "missing",
            "checks_passed": 0,
            "checks_total": 0,
            "label": "",
            "diagnosis": "",
            "seconds": 0.0,
        }
        return [self.seen.get(exercise_id, {"id": exercise_id, **not_run}) for exercise_id in self.ids]

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(registry.exercises()) if self._ids is None else self._ids

    @property
    def complete(self) -> bool:
        return not self.interrupted and all(exercise_id in self.seen for exercise_id in self.ids)

    @property
    def all_passed(self) -> bool:
        """Whether nothing failed; an exercise that this machine cannot run (skipped) does not count against it."""
        return not self.interrupted and all(r["state"] in ("pass", "skipped") for r in self.rows)

    @property
    def fence(self) -> str:
        return f"fence around each exercise: {_fence()}"

    @cached_property
    def release(self) -> str:
        """Which exercises a learner's copy was graded on, as it says itself: a learner could edit that. "" in other folders."""
        told = registry.release(self.root)
        of = f"{len(self.ids)} of the course's {len(registry.exercises())} exercises graded"
        return f"{told}, as this copy's release.json says; {of}" if told else ""

    @property
    def notes(self) -> list[str]:
        """What a run rests on, in lines."""
        return [self.fence, f"release: {self.release}"] if self.release else [self.fence]

    @property
    def summary(self) -> str:
        """ "3 of 11 exercises pass, 7 todo, 1 fail" """
        return self._summary(self.rows)

    def _summary(self, rows: Sequence[dict]) -> str:
        states = [r["state"] for r in rows]
        others = [f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != "pass"]
        return ", ".join([f"{states.count('pass')} of {len(states)} exercises pass", *others])

    def as_json(self) -> str:
        release = {"release": self.release} if self.release else {}
        content = {"impl": self.impl, "complete": self.complete, "fence": _fence(), **release, "exercises": self.rows}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def as_markdown(self) -> str:
        notes = [self.summary + "."]
        if self.impl == "solutions":
            notes.append("Solutions were run: an instructor's run, not a grade.")
        if not self.complete:
            notes.append("Incomplete: not every exercise was run.")
        table = markdown_table(self.rows)
        release = f"\n\nRelease: {markdown(self.release)}." if self.release else ""
        return f"{' '.join(notes)}\n\n{table}\n\nFence around each exercise: {_fence()}.{release}\n"

    def as_junit(self) -> str:
        release = {"release": self.release} if self.release else {}
        return junit(
            junit_suite(
                "gpukit", self.rows, impl=self.impl, complete=str(self.complete).lower(), fence=_fence(), **release
            )
        )

    def as_text(self, asked: Collection[str] | None = None) -> str:
        """`asked`: the exercises that were asked for, also those that were not reached; None for all."""
        rows = [r for r in self.rows if asked is None or r["id"] in self.seen or r["id"] in asked]
        lines = tables.aligned([(r["id"], r["state"], _checks(r), r["label"]) for r in rows])
        if self.interrupted:
            lines.append("interrupted: the report is incomplete")
        left = len(self.rows) - len(rows)
        summary = self._summary(rows) + (
            f"; {left} more {'was' if left == 1 else 'were'} not asked for" if left else ""
        )
        if not rows:
            summary = self.summary
        return "\n".join([*lines, "" if lines else "no exercise was run", *self.notes, summary]).strip("\n")

    def write(self, json: str | None = None, markdown: str | None = None, junit: str | None = None) -> list[str]:
        """Write the reports asked for, each whole or not at all. A sentence for each that cannot be written."""
        problems = []
        for path, content in ((json, self.as_json), (markdown, self.as_markdown), (junit, self.as_junit)):
            try:
                if path:
                    write(Path(path), content())
            except OSError as error:
                problems.append(f"{path} cannot be written: {error.strerror or error}")
        return problems

    def _without_host_paths(self, text: str) -> str:
        for folder, name in ((self.root, ""), (Path.home(), "~/")):
            if folder != Path(folder.anchor):
                text = text.replace(f"{folder}{os.sep}", name)
        return _HOST_PATH.sub("", text)


def record(verdict: Verdict, root: Path) -> None:
    """Remember a learner's verdict in the course's .gpukit/progress.json, for `gpukit progress` and the progress panel.

    Solutions are no progress and are not recorded. Nothing is raised, and a sentence is enough, once for a course: a check in a
    read-only folder is still a check.
    """
    if verdict.impl != "exercises":
        return
    graded = {k: v for k, v in row(verdict).items() if k != "diagnosis"}
    graded["file"] = _file_hash(verdict.id, root)
    try:
        write(root / PROGRESS, json.dumps({**_progress(root), verdict.id: graded}, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        if root not in _unsaved:
            _unsaved.add(root)
            with contextlib.suppress(OSError):
                print(f"gpukit: progress is not saved in {PROGRESS}: {error.strerror or error}", file=sys.stderr)


def recorded(root: Path) -> dict[str, dict]:
    """The last recorded row of each exercise, by id. `edited` tells that its file has changed since."""
    return {
        exercise_id: {**graded, "edited": graded.get("file") != _file_hash(exercise_id, root)}
        for exercise_id, graded in _progress(root).items()
    }


def _progress(root: Path) -> dict[str, dict]:
    try:
        content = json.loads((root / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # none yet, or damaged: the next check starts it again
        return {}
    kinds = {"state": str, "checks_passed": int, "checks_total": int}
    entries = content.items() if isinstance(content, dict) else ()
    return {
        key: value
        for key, value in entries
        if isinstance(value, dict) and all(type(value.get(name)) is kind for name, kind in kinds.items())
    }


def _file_hash(exercise_id: str, root: Path) -> str:
    try:
        data = course.read_bytes(course.exercise_file(exercise_id.partition(".")[0], root, "exercises"), root)
    except course.CourseError:  # a pipe never ends, and /dev/zero neither
        return ""
    return hashlib.sha256(data).hexdigest()[:16]


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # /dev/stdout is no file to replace
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _fence() -> str:
    from gpukit.grading import fence

    return fence.active()


def _checks(r: dict) -> str:
    return f"{r['checks_passed']}/{r['checks_total']}"


def markdown(text: str) -> str:
    """`text` for a cell of a table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _junit_kind(state: str) -> str:
    return {"pass": "", "skipped": "skipped", "not graded": "skipped", "error": "error", "crashed": "error"}.get(
        state, "failure"
    )


def _junit_properties(parent: ElementTree.Element, **properties: str) -> None:
    element = ElementTree.SubElement(parent, "properties")
    for name, value in properties.items():
        ElementTree.SubElement(element, "property", name=name, value=value)
