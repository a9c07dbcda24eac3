"""From verdicts to points, by the assignment's rules; every output (pages, gradebooks, reports) takes its numbers from here.

An exercise that passes is worth its points, any other verdict nothing. What is late costs what the assignment says. What could
not be graded yet, or not because the grader or the machine failed, is "not graded": it has no points, takes none away, and the
total says that it is incomplete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpukit.classroom.assignment import Assignment
from gpukit.classroom.store import Graded, HandedIn, Store

NOT_GRADED = "not graded"
_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Mark:
    """One exercise of one student.

    state     of gpukit.grading.verdict.STATES, or NOT_GRADED
    points    before what lateness costs; None if the exercise is not graded
    possible  the points of a pass
    why       the sentence that stands in place of a verdict, "" where there is one
    graded    the verdict, None where there is none
    tries     different files of this student that were judged on this exercise
    """

    exercise: str
    state: str
    points: float | None
    possible: float
    why: str = ""
    graded: Graded | None = None
    tries: int = 0


@dataclass(frozen=True)
class Marked:
    """A student's work on the assignment.

    days_late  days after the deadline that have begun, 0 in time or where no time is known
    raw        the points of what is graded, before what lateness costs
    penalty    points that lateness costs
    possible   the points of somebody who passes everything in time
    """

    handed_in: HandedIn
    marks: tuple[Mark, ...]
    days_late: int
    raw: float
    penalty: float
    possible: float

    @property
    def student(self) -> str:
        return self.handed_in.student

    @property
    def score(self) -> float:
        """The points, of those exercises that are graded."""
        return self.raw - self.penalty

    @property
    def complete(self) -> bool:
        """Whether every exercise is graded; else the score may grow."""
        return all(mark.points is not None for mark in self.marks)


def marked(assignment: Assignment, store: Store) -> list[Marked]:
    """Each student's points, in the store's order of students. Raises BadStore."""
    current = store.current()
    files: dict[tuple[str, str], set[str]] = {}
    for each in store.verdicts():
        files.setdefault((each.student, each.exercise), set()).add(each.file_hash)
    expected = {(each.student, each.exercise): each for each in store.expected()}
    found = []
    for handed_in in store.handed_in():
        marks = []
        for exercise in assignment.exercises:
            key = (handed_in.student, exercise)
            state, why = _outcome(current.get(key), expected.get(key))
            possible = assignment.points[exercise]
            points = None if state == NOT_GRADED else possible if state == "pass" else 0.0
            marks.append(Mark(exercise, state, points, possible, why, current.get(key), len(files.get(key, ()))))
        raw = sum(mark.points or 0.0 for mark in marks)
        days = days_late(assignment, handed_in.submitted)
        found.append(
            Marked(handed_in, tuple(marks), days, raw, penalty(assignment, raw, days), float(assignment.possible))
        )
    return found


def days_late(assignment: Assignment, submitted: str) -> int:
    """Days after the deadline that have begun: a minute late is one day. `submitted` is ISO 8601, "" where it is not known."""
    if assignment.deadline is None or not submitted:
        return 0
    return max(0, math.ceil((datetime.fromisoformat(submitted) - assignment.deadline) / _DAY))


def penalty(assignment: Assignment, raw: float, days: int) -> float:
    """The points that work worth `raw` loses by being `days` late."""
    if assignment.at_most is not None and days > assignment.at_most:
        return raw
    return raw * min(1.0, days * assignment.per_day)


def _outcome(graded: Graded | None, expected) -> tuple[str, str]:
    """The state, and a sentence where there is no verdict."""
    if graded is not None and graded.state != "skipped":
        return graded.state, ""
    if graded is not None:
        return NOT_GRADED, "the machine that graded lacks what this exercise needs"
    if expected is None:
        return NOT_GRADED, "this exercise was not part of the last run"
    if not expected.file_hash:
        return "missing", expected.why
    return NOT_GRADED, f"the grader failed: {expected.fault}" if expected.fault else "not graded yet"
