"""What a class has handed in and what was found: one SQLite file, grades.sqlite, in the folder that `gpukit class` writes.

verdicts     one row for each (student, exercise, file, version of the check, seed) that was judged, also those of files that
             were replaced since: they tell how many tries there were
handed_in    one row for each student: what was handed in, when, and what is to be said of it
expected     one row for each student and exercise of the assignment: which verdict counts now. Without a file there is a
             reason ("missing"); with a file and without its verdict the exercise is not graded yet, which is not the same
files        the text of each file that was judged, by its hash, so that a verdict can be repeated
settings     the texts of the assignment and the roster, and what graded last

There is no other file beside it (no WAL), so it can be copied or sent as it is; what a killed run has stored stays.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from gpukit import course

NAME = "grades.sqlite"
VERSION = 1
_WAIT_S = 60.0  # for another process that writes


class BadStore(course.CourseError):
    """The file is none of ours, or cannot be read or written."""


@dataclass(frozen=True)
class Graded:
    """A verdict as it is kept.

    file_hash      SHA-256 of the bytes of the file that was judged, 64 hexadecimal digits
    check_version  gpukit.classroom.grade.check_version of the exercise's concept
    state          of gpukit.grading.verdict.STATES; "error" with the diagnosis "grader" is never kept
    diagnosis      the label, "" for a pass
    title          of the exercise
    lines          what the learner reads
    seconds        that the check took
    when           ISO 8601, in UTC
    """

    student: str
    exercise: str
    file_hash: str
    check_version: str
    seed: int
    state: str
    diagnosis: str
    title: str
    checks_passed: int
    checks_total: int
    lines: tuple[str, ...]
    seconds: float
    when: str
    gpukit: str
    torch: str
    triton: str


@dataclass(frozen=True)
class HandedIn:
    """What a student has handed in.

    student    the roster's student_id, or what the submission is called where there is no roster
    path       where it was found; "" if nothing was handed in
    submitted  ISO 8601 with an offset; "" if nobody said when
    notes      sentences about it: twins of a file, names that were understood, what was left out
    """

    student: str
    name: str = ""
    email: str = ""
    path: str = ""
    submitted: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expected:
    """Which verdict on an exercise of a student counts now.

    file_hash  "" if there is no such file; `why` then is the sentence that says so
    fault      why the grader itself could not judge it, "" if it could or has not tried yet
    """

    student: str
    exercise: str
    file_hash: str
    check_version: str
    seed: int
    why: str = ""
    fault: str = ""


_KEY = "student, exercise, file_hash, check_version, seed"
_VERDICT = ", ".join(each.name for each in fields(Graded)).replace("when", '"when"')
_SCHEMA = f"""
CREATE TABLE verdicts (student TEXT NOT NULL, exercise TEXT NOT NULL, file_hash TEXT NOT NULL, check_version TEXT NOT NULL,
  seed INTEGER NOT NULL, state TEXT NOT NULL, diagnosis TEXT NOT NULL, title TEXT NOT NULL, checks_passed INTEGER NOT NULL,
  checks_total INTEGER NOT NULL, lines TEXT NOT NULL, seconds REAL NOT NULL, "when" TEXT NOT NULL, gpukit TEXT NOT NULL,
  torch TEXT NOT NULL, triton TEXT NOT NULL, UNIQUE ({_KEY}));
CREATE INDEX same_file ON verdicts (file_hash, exercise, check_version, seed);
CREATE TABLE handed_in (student TEXT PRIMARY KEY, name TEXT NOT NULL, email TEXT NOT NULL, path TEXT NOT NULL,
  submitted TEXT NOT NULL, notes TEXT NOT NULL);
CREATE TABLE expected (student TEXT NOT NULL, exercise TEXT NOT NULL, file_hash TEXT NOT NULL, check_version TEXT NOT NULL,
  seed INTEGER NOT NULL, why TEXT NOT NULL, fault TEXT NOT NULL, PRIMARY KEY (student, exercise));
CREATE TABLE files (file_hash TEXT PRIMARY KEY, packed BLOB NOT NULL);
CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL);
PRAGMA user_version = {VERSION};
"""


class Store:
    """The file, open. `with Store(path) as store`; every method commits what it writes."""

    def __init__(self, path: Path | str, create: bool = True):
        """Raises BadStore; also where there is no file and `create` is False."""
        self.path = Path(path)
        if not create and not self.path.is_file():
            raise BadStore(f"{self.path}: there are no grades here; gpukit class grade ... -o FOLDER makes them")
        with self._plainly("opened"):
            self._db = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None)
            try:
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                empty = not self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
                if version == 0 and empty:
                    self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
                elif version != VERSION:
                    raise BadStore(
                        f"{self.path}: it was written by another version of gpukit class (form {version}, not {VERSION}), "
                        "or by another program: grade into another folder"
                    )
            except BaseException:
                self._db.close()
                raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_) -> None:
        self._db.close()

    # -- verdicts --------------------------------------------------------------------------------------------------------

    def add(self, *graded: Graded) -> None:
        """Keep verdicts. The same key again replaces the row. Raises BadStore."""
        rows = [tuple(json.dumps(v) if isinstance(v, tuple) else v for v in astuple(each)) for each in graded]
        marks = ", ".join("?" * len(fields(Graded)))
        with self._transaction() as db:
            db.executemany(f"INSERT OR REPLACE INTO verdicts ({_VERDICT}) VALUES ({marks})", rows)
            db.executemany(
                "UPDATE expected SET fault = '' WHERE student = ? AND exercise = ?",
                [(each.student, each.exercise) for each in graded],
            )

    def verdicts(self, student: str | None = None) -> list[Graded]:
        """All verdicts, or those of a student, also on files that were replaced since; the oldest first."""
        where, values = ("WHERE student = ?", (student,)) if student is not None else ("", ())
        return self._graded(f'{where} ORDER BY "when", rowid', values)

    def same(self, exercise: str, file_hash: str, check_version: str, seed: int) -> Graded | None:
        """A verdict on the same file and inputs, no matter whose."""
        where = "WHERE file_hash = ? AND exercise = ? AND check_version = ? AND seed = ? LIMIT 1"
        found = self._graded(where, (file_hash, exercise, check_version, seed))
        return found[0] if found else None

    def current(self, student: str | None = None) -> dict[tuple[str, str], Graded]:
        """The verdicts that count, by (student, exercise): those of `expected` that there are, of all students or of one."""
        key = " AND ".join(f"verdicts.{name} = expected.{name}" for name in _KEY.split(", "))
        one, values = (" AND verdicts.student = ?", (student,)) if student is not None else ("", ())
        found = self._graded(f"WHERE EXISTS (SELECT 1 FROM expected WHERE {key}){one}", values)
        return {(each.student, each.exercise): each for each in found}

    # -- what was handed in ----------------------------------------------------------------------------------------------

    def replace(self, handed_in: Iterable[HandedIn], expected: Iterable[Expected]) -> None:
        """Say what there is now: who handed in what, and which verdicts count. Verdicts stay as they are. Raises BadStore."""
        rows = [(*astuple(each)[:-1], json.dumps(each.notes)) for each in handed_in]
        with self._transaction() as db:
            db.execute("DELETE FROM handed_in")
            db.execute("DELETE FROM expected")
            db.executemany("INSERT INTO handed_in VALUES (?, ?, ?, ?, ?, ?)", rows)
            db.executemany("INSERT INTO expected VALUES (?, ?, ?, ?, ?, ?, ?)", [astuple(each) for each in expected])

    def fault(self, student: str, exercise: str, why: str) -> None:
        """Say that the grader itself failed on an exercise: it stays ungraded. Raises BadStore."""
        with self._transaction() as db:
            db.execute(
                "UPDATE expected SET fault = ? WHERE student = ? AND exercise = ?", (why or "?", student, exercise)
            )

    def handed_in(self) -> list[HandedIn]:
        """One for each student, in the order of the roster or of the submissions' names."""
        with self._plainly("read"):
            rows = self._db.execute("SELECT * FROM handed_in ORDER BY rowid").fetchall()
        return [HandedIn(*row[:-1], notes=tuple(json.loads(row[-1]))) for row in rows]

    def expected(self) -> list[Expected]:
        """One for each student and exercise of the assignment."""
        with self._plainly("read"):
            return [Expected(*row) for row in self._db.execute("SELECT * FROM expected ORDER BY rowid")]

    # -- files and settings ----------------------------------------------------------------------------------------------

    def keep_files(self, files: Mapping[str, bytes]) -> None:
        """Keep the bytes of files, by hash. Raises BadStore."""
        with self._plainly("read"):
            known = "SELECT 1 FROM files WHERE file_hash = ?"
            new = [each for each in files if not self._db.execute(known, (each,)).fetchone()]
        if not new:  # nothing to write, and nothing to wait for
            return
        packed = ((file_hash, zlib.compress(files[file_hash])) for file_hash in new)
        with self._transaction() as db:
            db.executemany("INSERT OR IGNORE INTO files VALUES (?, ?)", packed)

    def file(self, file_hash: str) -> bytes:
        """Raises BadStore if it was not kept."""
        with self._plainly("read"):
            row = self._db.execute("SELECT packed FROM files WHERE file_hash = ?", (file_hash,)).fetchone()
        if row is None:
            raise BadStore(f"{self.path}: the file with the hash {file_hash[:16]} is not kept here")
        return zlib.decompress(row[0])

    def set(self, **settings: str) -> None:
        """Keep settings: `assignment` (the TOML text), `own` (its concepts, gpukit.classroom.own), `roster` (the CSV text), `fence`,
        `started`, `finished`. Raises BadStore."""
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", settings.items())

    def setting(self, key: str) -> str:
        """ "" if it was not set."""
        with self._plainly("read"):
            row = self._db.execute("SELECT value FROM settings WHERE key = ?", (key,)).fetchone()
        return row[0] if row else ""

    def _graded(self, where: str, values: tuple) -> list[Graded]:
        at = [each.name for each in fields(Graded)].index("lines")
        with self._plainly("read"):
            rows = self._db.execute(f"SELECT {_VERDICT} FROM verdicts {where}", values).fetchall()
        return [Graded(*row[:at], tuple(json.loads(row[at])), *row[at + 1 :]) for row in rows]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._plainly("written"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _plainly(self, done: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise BadStore(f"{self.path} cannot be {done}: {error}") from None
