"""Everything that comes out of a graded class, written from the store: `gpukit class report OUT`, and the end of a grading run.

    canvas.csv, moodle.csv, nbgrader.csv, grades.json, grades.md, junit.xml    gpukit.classroom.gradebook
    class.html, learners/<student>.html                                        gpukit.classroom.pages
    compare50/submissions/<student>/, compare50/distribution/                  the files, for a search for similar ones:
        compare50 OUT/compare50/submissions/* -d OUT/compare50/distribution/*

Similarity is a hint to look, never a verdict: many exercises have one natural answer. gpukit only lays the files out.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from gpukit.classroom import assignment, gradebook, marks, own, pages, roster
from gpukit.classroom.assignment import Assignment
from gpukit.classroom.marks import Marked
from gpukit.classroom.store import Store
from gpukit.grading import report, stubs


def write(store: Store, out: Path, root: Path) -> list[str]:
    """Write the files into `out`, in place of those of an earlier run; what lies there besides stays. `root` is the course.
    Returns the sentences about what a file lacks. Raises BadStore, BadAssignment, OSError.
    """
    own.from_json(store.setting("own"))
    chosen = assignment.parse(store.setting("assignment"), f"the assignment in {store.path}")
    rows = marks.marked(chosen, store)
    told = store.setting("roster")
    people = {each.id: each for each in roster.parse(told).students} if told else {}
    books = {
        "canvas.csv": gradebook.canvas(chosen, rows, people),
        "moodle.csv": gradebook.moodle(chosen, rows, people),
        "nbgrader.csv": gradebook.nbgrader(chosen, rows, people),
        "grades.json": gradebook.Book(gradebook.as_json(chosen, rows, store)),
        "grades.md": gradebook.Book(gradebook.markdown(rows)),
        "junit.xml": gradebook.Book(gradebook.junit(rows)),
        "class.html": gradebook.Book(pages.group(chosen, rows, store)),
    }
    for name, book in books.items():
        if book.text:
            report.write(out / name, book.text)
        else:
            (out / name).unlink(missing_ok=True)  # of an earlier roster
    _learners(out / "learners", chosen, rows)
    _compare50(out / "compare50", chosen, store, root)
    return [problem for book in books.values() for problem in book.problems]


def _learners(folder: Path, chosen: Assignment, rows: list[Marked]) -> None:
    students = {name for row in rows for name in (row.student, row.handed_in.name) if name}
    written = {f"{pages.file_name(row.student)}.html": row for row in rows}
    for name, row in written.items():
        others = students - {row.handed_in.name}
        report.write(folder / name, pages.learner(chosen, row, others))
    for path in folder.glob("*.html") if folder.is_dir() else ():
        if path.name not in written:
            path.unlink()


def _compare50(folder: Path, chosen: Assignment, store: Store, root: Path) -> None:
    """One folder for each student, and the stubs, whose text compare50 leaves out of account."""
    if folder.is_dir():
        shutil.rmtree(folder)
    hashes = {
        (each.student, each.exercise.partition(".")[0]): each.file_hash for each in store.expected() if each.file_hash
    }
    for (student, concept), file_hash in hashes.items():
        path = folder / "submissions" / pages.file_name(student) / f"{concept}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.file(file_hash))
    for concept in chosen.concepts:
        report.write(folder / "distribution" / f"{concept}.py", stubs.handed_out(concept, root))
