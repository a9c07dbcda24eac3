"""A class's points in the forms that other programs import, and as JSON, JUnit and Markdown.

canvas.csv     Student, ID, SIS User ID, SIS Login ID, Section, the assignment's title; the second line is "Points Possible".
               The roster's columns canvas_id, sis_user_id and sis_login_id say who a student is to Canvas: one of them is
               needed, since Canvas would else guess by the name
moodle.csv     ID number, Email address, the assignment's title, each exercise. Moodle asks which column says who a student
               is: the roster's id_number where it has that column, else email
nbgrader.csv   the columns of `nbgrader export`
grades.json    everything that is known; junit.xml and grades.md: each exercise of each student

A student of whom the LMS's name for them is unknown, or who is not graded completely, has no line in canvas.csv and moodle.csv,
and a sentence says so: an import would otherwise write a wrong number, or somebody else's.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpukit.classroom.assignment import Assignment
from gpukit.classroom.marks import Mark, Marked
from gpukit.classroom.roster import Student
from gpukit.classroom.store import Store
from gpukit.grading import report
from gpukit.grading.verdict import Verdict

CANVAS_IDS = {"ID": "canvas_id", "SIS User ID": "sis_user_id", "SIS Login ID": "sis_login_id"}
NBGRADER = (
    *("assignment", "duedate", "timestamp", "student_id", "last_name", "first_name", "email"),
    *("raw_score", "late_submission_penalty", "score", "max_score"),
)
# Canvas takes a column whose name holds one of these for a total of its own, and leaves it out.
_NOT_FOR_CANVAS = re.compile(r"(Current|Final) (Score|Points|Grade)|Override (Score|Grade|Status)")


@dataclass(frozen=True)
class Book:
    """The text of a file, "" if it is not to be written, and the sentences about what is not in it."""

    text: str
    problems: tuple[str, ...] = ()


def canvas(assignment: Assignment, rows: Sequence[Marked], people: Mapping[str, Student]) -> Book:
    """The file that Canvas's gradebook imports."""
    if not any(column in person.columns for person in people.values() for column in CANVAS_IDS.values()):
        return Book("", (f"canvas.csv needs a roster with the column {_or(CANVAS_IDS.values())}",))
    if found := _NOT_FOR_CANVAS.search(assignment.title):
        return Book("", (f"canvas.csv is not written: Canvas ignores a column whose title holds {found[0]!r}",))

    def who(student: str) -> list[str] | str:
        told = people[student].columns if student in people else {}
        ids = [told.get(column, "") for column in CANVAS_IDS.values()]
        return [*ids, told.get("section", "")] if any(ids) else _or(CANVAS_IDS.values())

    lines, problems = _lines("canvas.csv", rows, people, who)
    table = [["Student", *CANVAS_IDS, "Section", assignment.title]]
    table.append(["    Points Possible", "", "", "", "", number(assignment.possible)])
    table += [[row.handed_in.name or row.student, *cells, number(row.score)] for row, cells in lines]
    return Book(_csv(table), problems)


def moodle(assignment: Assignment, rows: Sequence[Marked], people: Mapping[str, Student]) -> Book:
    """The file that Moodle's gradebook imports."""
    key = "id_number" if any("id_number" in person.columns for person in people.values()) else "email"
    if not any(key in person.columns for person in people.values()):
        return Book("", ("moodle.csv needs a roster with the column id_number or email",))

    def who(student: str) -> list[str] | str:
        told = people[student].columns if student in people else {}
        return [told.get("id_number", ""), told.get("email", "")] if told.get(key) else key

    lines, problems = _lines("moodle.csv", rows, people, who)
    table = [["ID number", "Email address", assignment.title, *assignment.exercises]]
    table += [[*who, number(row.score), *(number(mark.points) for mark in row.marks)] for row, who in lines]
    return Book(_csv(table), problems)


def nbgrader(assignment: Assignment, rows: Sequence[Marked], people: Mapping[str, Student]) -> Book:
    """The columns of `nbgrader export`; times are in UTC. Points of exercises that are not graded yet are not in the score."""
    table = [list(NBGRADER)]
    due = _utc(assignment.deadline)
    for row in rows:
        handed_in = row.handed_in
        submitted = _utc(datetime.fromisoformat(handed_in.submitted)) if handed_in.submitted else ""
        first, last = _names(handed_in.name, people.get(row.student))
        who = [handed_in.student, last, first, handed_in.email]
        points = [number(each) for each in (row.raw, row.penalty, row.score, row.possible)]
        table.append([assignment.title, due, submitted, *who, *points])
    open_ones = [row.student for row in rows if not row.complete]
    are = "is" if len(open_ones) == 1 else "are"
    said = f"nbgrader.csv: {', '.join(open_ones)} {are} not graded completely"
    return Book(_csv(table), (said,) if open_ones else ())


def as_json(assignment: Assignment, rows: Iterable[Marked], store: Store) -> str:
    """Everything that is known, without the secret that seeds are derived from; each student on a line."""
    content = {
        "assignment": {
            "title": assignment.title,
            "points": dict(assignment.points),
            "possible": assignment.possible,
            "deadline": assignment.deadline.isoformat() if assignment.deadline else None,
            "late": {"per_day": assignment.per_day, "at_most": assignment.at_most},
        },
        **{key: store.setting(key) for key in ("started", "finished", "fence")},
    }
    head = json.dumps(content, indent=1, ensure_ascii=False).removesuffix("\n}")
    students = ",\n".join(json.dumps(_student(row), ensure_ascii=False) for row in rows)
    return f'{head},\n "students": [\n{students}\n]\n}}\n'


def _student(row: Marked) -> dict[str, Any]:
    points = {"raw": row.raw, "days_late": row.days_late, "penalty": row.penalty, "score": row.score}
    marks = [{**vars(mark), "graded": vars(mark.graded) if mark.graded else None} for mark in row.marks]
    return {**vars(row.handed_in), **points, "possible": row.possible, "complete": row.complete, "exercises": marks}


def junit(rows: Iterable[Marked]) -> str:
    """A testsuite for each student. What is not graded counts as skipped."""
    return report.junit(
        *(
            report.junit_suite(
                row.student,
                [report_row(mark) for mark in row.marks],
                score=number(row.score),
                possible=number(row.possible),
            )
            for row in rows
        )
    )


def markdown(rows: Iterable[Marked]) -> str:
    """A heading and a table for each student, as GitHub shows them."""
    return "\n".join(
        f"## {report.markdown(report.plain(row.student))}: {points(row)}\n\n"
        f"{report.markdown_table(report_row(mark) for mark in row.marks)}\n"
        for row in rows
    )


def points(row: Marked) -> str:
    """ "18 of 30 points, after 2 lost by handing in 1 day late" """
    said = f"{number(row.score)} of {number(row.possible)} points"
    if row.days_late and not row.penalty:
        said += f", handed in {days(row.days_late)} late"
    elif row.days_late:
        said += f", after {number(row.penalty)} lost by handing in {days(row.days_late)} late"
    return said + ("" if row.complete else " so far: not everything is graded")


def days(count: int) -> str:
    """ "1 day", "2 days" """
    return f"{count} day{'' if count == 1 else 's'}"


def report_row(mark: Mark) -> dict:
    """A mark as the reports of gpukit.grading.report show a verdict."""
    graded = mark.graded
    if graded is None:
        verdict = Verdict(mark.exercise, mark.state, 0, 0, "exercises", (f"{mark.exercise}: {mark.state}: {mark.why}",))
    else:
        checks = (graded.checks_passed, graded.checks_total)
        verdict = Verdict(
            mark.exercise, mark.state, *checks, "exercises", graded.lines, graded.diagnosis, graded.seconds, graded.seed
        )
    return report.row(verdict)


def number(value: float | None) -> str:
    """Points with at most two decimals, as Canvas keeps them: "7", "7.5", "" for None."""
    return "" if value is None else f"{value:.2f}".rstrip("0").rstrip(".")


def _lines(
    file: str, rows: Iterable[Marked], people: Mapping[str, Student], who: Callable[[str], list[str] | str]
) -> tuple[list[tuple[Marked, list[str]]], tuple[str, ...]]:
    """The students that an LMS can be told of, with what it calls them, and why the others are left out, a sentence for each
    reason."""
    lines: list[tuple[Marked, list[str]]] = []
    lacking: dict[str, list[str]] = {}  # by the reason
    for row in rows:
        found = who(row.student)
        if row.student not in people:
            lacking.setdefault(", who {is} not on the roster", []).append(row.student)
        elif isinstance(found, str):
            lacking.setdefault(f": the roster's column {found} is empty", []).append(row.student)
        elif not row.complete:
            lacking.setdefault(", who {is} not graded completely", []).append(row.student)
        else:
            lines.append((row, found))
    said = (
        f"{file} lacks {', '.join(names)}{why.replace('{is}', 'is' if len(names) == 1 else 'are')}"
        for why, names in lacking.items()
    )
    return lines, tuple(said)


def _names(name: str, person: Student | None) -> tuple[str, str]:
    """First and last name: the roster's, or split at the comma, or before the last word."""
    told = person.columns if person else {}
    if "first_name" in told or "last_name" in told:
        return told.get("first_name", ""), told.get("last_name", "")
    if "," in name:
        last, _, first = name.partition(",")
        return first.strip(), last.strip()
    first, _, last = name.rpartition(" ")
    return first, last


def _csv(table: Iterable[Sequence[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerows([_cell(cell) for cell in line] for line in table)
    return text.getvalue()


def _cell(text: str) -> str:
    """A learner may call a folder "=1+1": a spreadsheet would compute it."""
    text = report.plain(text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _utc(when: datetime | None) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if when else ""


def _or(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"
