"""One verdict once more: the file that was judged, on the inputs on which it was judged, beside what was said then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gpukit
from gpukit import course
from gpukit.classroom import own
from gpukit.classroom.grade import unwritten
from gpukit.classroom.pool import version_of
from gpukit.classroom.store import Expected, Graded, Store
from gpukit.classroom.versions import check_version
from gpukit.grading import registry
from gpukit.grading.judge import judge_source
from gpukit.grading.verdict import Verdict
from gpukit.nearest import did_you_mean


@dataclass(frozen=True)
class Replay:
    """What was found then and now."""

    then: Graded
    now: Verdict
    changed: tuple[str, ...]  # what is not as it was then: versions

    @property
    def same(self) -> bool:
        """State, label and every line that the learner reads."""
        then = (self.then.state, self.then.diagnosis, self.then.lines)
        return then == (self.now.state, self.now.diagnosis, self.now.lines)

    def __str__(self) -> str:
        then = self.then
        lines = [
            f"{then.exercise} of {then.student}, graded {then.when}",
            f"file {then.file_hash[:16]}, seed {then.seed}, check {then.check_version}",
            f"gpukit {then.gpukit}, torch {then.torch}, triton {then.triton}",
            *(f"now: {each}" for each in self.changed),
            "",
        ]
        if self.same:
            return "\n".join([*lines, str(self.now), "", "the same verdict as then"])
        before = "\n".join(then.lines) or then.state.upper()
        return "\n".join([*lines, "then:", before, "", "now:", str(self.now), "", "the verdict differs"])


def replay(store: Store, student: str, exercise: str, root: Path) -> Replay:
    """Judge again what counts for a student's exercise. Raises CourseError if there is no such verdict."""
    own.from_json(store.setting("own"))
    expected = _expected(store, student, exercise)
    then = store.current().get((student, exercise))
    if then is None:
        why = expected.why or expected.fault or "it is not graded yet"
        raise course.CourseError(f"{exercise} of {student} has no verdict to repeat: {why}")
    source = store.file(then.file_hash)
    now = unwritten(exercise, source, root) or judge_source(
        registry.exercise(exercise), course.text(source), seed=then.seed, terminal=True
    )
    here = {
        "check": (then.check_version, check_version(exercise.partition(".")[0])),
        "gpukit": (then.gpukit, gpukit.__version__),
        "torch": (then.torch, version_of("torch")),
        "triton": (then.triton, version_of("triton")),
    }
    return Replay(then, now, tuple(f"{name} {now}" for name, (before, now) in here.items() if before != now))


def _expected(store: Store, student: str, exercise: str) -> Expected:
    rows = store.expected()
    students = dict.fromkeys(row.student for row in rows)
    if student not in students:
        raise course.CourseError(f"{store.path} knows no student {student!r}{did_you_mean(student, students)}")
    exercises = {row.exercise: row for row in rows if row.student == student}
    if exercise not in exercises:
        raise course.CourseError(f"{exercise!r} is no exercise of the assignment{did_you_mean(exercise, exercises)}")
    return exercises[exercise]
