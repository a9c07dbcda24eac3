"""The roster: a CSV file with a row for each student, which says whose a submission is.

    student_id,name,email,canvas_id,submitted
    s1042,Ada Lovelace,ada@uni.example,90311,2026-10-12T21:14:00+02:00

`student_id` is required and is what grades are listed under. `name` (or first_name and last_name) and `email` are for people
and pages; `submitted` is when the work came in, for the assignment's late rule, since no file can be trusted to say so. Any
other column may hold the number or name that an LMS gives the student: a submission belongs to the row that holds its number,
its name, its e-mail address or the part of that before the @. gpukit.classroom.gradebook says which columns an LMS needs.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from gpukit import course

MAX_BYTES = 16 << 20
# Each says who a student is: to gpukit, to people, to Canvas and to Moodle.
_UNIQUE = ("student_id", "email", "canvas_id", "sis_user_id", "sis_login_id", "id_number")
_SAID = ("name", "first_name", "last_name", "email", "submitted", "section")  # these do not name a student alone


class BadRoster(course.CourseError):
    """The message names the file, the line and the column."""


@dataclass(frozen=True)
class Student:
    """A row. `submitted` is ISO 8601 with an offset, "" where the roster does not say; `columns` are all cells with a value,
    by the name of their column in small letters, with _ for a space."""

    id: str
    name: str = ""
    email: str = ""
    submitted: str = ""
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def exact(self) -> Iterator[str]:
        """What belongs to this student alone."""
        others = (value for name, value in self.columns.items() if name not in _SAID)
        yield from (value.casefold() for value in (self.id, self.email, *others) if value)
        if "@" in self.email:
            yield self.email.partition("@")[0].casefold()

    @property
    def names(self) -> set[str]:
        """The ways in which an LMS writes the name, squeezed: "adalovelace", "lovelaceada"."""
        words = _words(self.name)
        return {"".join(words[at:] + words[:at]) for at in range(len(words))}


@dataclass(frozen=True)
class Roster:
    """`text` is the file's, from which `parse` makes an equal roster."""

    students: tuple[Student, ...] = ()
    where: str = ""
    text: str = field(default="", repr=False)
    _exact: dict[str, list[Student]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for student in self.students:
            for value in set(student.exact):
                self._exact.setdefault(value, []).append(student)

    def find(self, *keys: str) -> list[Student]:
        """The students that a submission may belong to; the keys that say most come first, names last."""
        for key in keys:
            if found := self._exact.get(key.casefold()):
                return found
        for key in keys:
            squeezed = "".join(_words(key))
            if found := [student for student in self.students if squeezed and squeezed in student.names]:
                return found
        return []


def read(path: Path | str) -> Roster:
    """Raises BadRoster."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadRoster(f"{path}: the roster cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise BadRoster(f"{path}: the roster is larger than 16 MiB")
    try:
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError:
        raise BadRoster(f"{path}: the roster is not UTF-8 text: save it as CSV UTF-8") from None
    return parse(text, str(path))


def parse(text: str, path: str = "roster") -> Roster:
    """The roster that a CSV text describes; `path` is what errors call it. Raises BadRoster."""
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)  # a spreadsheet writes semicolons where the comma is decimal
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise BadRoster(f"{path}: this is not CSV: {error}") from None
    columns = [name.strip().casefold().replace(" ", "_") for name in rows[0]] if rows else []
    if "student_id" not in columns:
        raise BadRoster(f"{path}: the roster's first line must name the column student_id, got {head.strip()[:80]!r}")
    if twice := sorted({name for name in columns if columns.count(name) > 1 and name}):
        raise BadRoster(f"{path}: the roster has two columns called {twice[0]!r}")
    students = _checked(path, columns, rows[1:])
    return Roster(students, path, text)


def _checked(path: str, columns: list[str], rows: list[list[str]]) -> tuple[Student, ...]:
    students: list[Student] = []
    seen: dict[tuple[str, str], int] = {}
    for line, cells in enumerate(rows, 2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) > len(columns):
            raise BadRoster(f"{path}, line {line}: {len(cells)} cells, but there are {len(columns)} columns")
        row = {name: cell.strip() for name, cell in zip(columns, cells, strict=False)}
        if not row["student_id"]:
            raise BadRoster(f"{path}, line {line}: student_id is empty")
        for name, value in row.items():
            if (name in _SAID and name != "email") or not value:
                continue
            before = seen.setdefault((name, value.casefold()), line)
            if before != line and name in _UNIQUE:
                raise BadRoster(
                    f"{path}, line {line}: {name} {value!r} is that of line {before}, too; each student needs a line"
                )
        name = row.get("name") or f"{row.get('first_name', '')} {row.get('last_name', '')}".strip()
        told = {key: value for key, value in row.items() if key and value}
        students.append(Student(row["student_id"], name, row.get("email", ""), _submitted(path, line, row), told))
    if not students:
        raise BadRoster(f"{path}: the roster names no student")
    return tuple(students)


def _submitted(path: str, line: int, row: dict[str, str]) -> str:
    given = row.get("submitted", "")
    if not given:
        return ""
    try:
        when = datetime.fromisoformat(given)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        allowed = "a date and time with its offset from UTC, such as 2026-10-12T21:14:00+02:00"
        raise BadRoster(f"{path}, line {line}: submitted must be {allowed}, got {given[:60]!r}")
    return when.isoformat()


def _words(name: str) -> list[str]:
    """A name's words, without accents and signs: "Lovelace, Ada-Á" is ["lovelace", "ada", "a"]."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", name.casefold()) if not unicodedata.combining(c))
    return "".join(c if c.isalnum() else " " for c in plain).split()
