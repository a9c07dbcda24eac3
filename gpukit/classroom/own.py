"""Exercises of an instructor's own: a folder for each concept, outside the course, which an assignment names.

    scan/check.py       the exercises as data, as in gpukit/checks/softmax.py
    scan/check.md       what learners read of them, as in gpukit/checks/softmax.md
    scan/solution.py    the exercises filled, gaps between # BEGIN SOLUTION and # END SOLUTION; nobody gets it
    scan/lesson.ipynb   the notebook; without it one is made of the titles and the checks

The folder's name is the concept's, and exercises are called scan.something. In a learners' copy they are exercises like all
others; in the grading process they are known as long as it lives. Grades keep their texts, so that a verdict can be repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from gpukit.classroom import copies
from gpukit.course import CourseError
from gpukit.grading import prose, registry, stubs
from gpukit.grading.registry import Added

PARTS = ("check.py", "check.md", "solution.py")
LESSON = "lesson.ipynb"


def read(folder: Path) -> Added | None:
    """The concept in a folder, from now on one of this process's. None where the course itself has it, as in an autograder,
    whose course was released with it. Raises CourseError, which names the file and what is wrong with it.
    """
    name = folder.name
    known = (prose.FOLDER / f"{name}.md").is_file()
    if known and not folder.is_dir():
        return None
    if known or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        why = "the course has a concept of that name" if known else "a name has small letters, digits and _"
        raise CourseError(f"{folder}: a concept cannot be called {name!r}: {why}; rename the folder")
    check, told, solution = (_text(folder, part) for part in PARTS)
    try:
        registry.add(Added(name, check, told))
        exercises = registry.concept(name).values()
        made = Added(name, check, told, stubs.stub(solution, {e.function: e.id for e in exercises}, "solution.py"))
        registry.add(made)
        _fits(folder, name)
    except CourseError as error:
        registry.remove(name)
        raise CourseError(f"{folder}: {str(error).replace(f'gpukit/checks/{name}.', 'check.')}") from None
    except Exception as error:
        registry.remove(name)
        raise CourseError(f"{folder}: check.py cannot be used: {type(error).__name__}: {error}") from None
    return made


def _text(folder: Path, part: str) -> str:
    if not folder.is_dir():
        raise CourseError(f"there is no folder {folder}; own names folders, seen from the assignment's file")
    try:
        return (folder / part).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CourseError(
            f"{folder}: {part} cannot be read: {error.strerror}; it must hold {', '.join(PARTS)}"
        ) from None
    except UnicodeDecodeError:
        raise CourseError(f"{folder}: {part} is not UTF-8 text: save it as UTF-8") from None


def _fits(folder: Path, name: str) -> None:
    """Raises CourseError where the concept has no exercise, or its notebook has the name of the course's."""
    told = prose.concept(name)
    if not told:
        raise CourseError("check.md has no line '## concept.exercise: title', so there is no exercise")
    notebook = next(iter(told.values())).notebook
    if others := {each.concept for each in registry.catalog().values() if each.notebook == notebook} - {name}:
        raise CourseError(
            f"check.md names the notebook {notebook}, which is that of {others.pop()}; choose another name"
        )


def files(folder: Path, concept: Added) -> dict[str, bytes]:
    """What a learners' copy holds of a concept, by path. Raises CourseError for a lesson that is no notebook."""
    notebook = next(iter(prose.concept(concept.name).values())).notebook
    lesson = folder / LESSON
    data = lesson.read_bytes() if lesson.is_file() else _lesson(concept.name)
    if copies.cells(data) == copies.digest(data):
        raise CourseError(f"{lesson} is not a notebook that can be read")
    return {
        f"gpukit/checks/{concept.name}.py": concept.check.encode(),
        f"gpukit/checks/{concept.name}.md": concept.prose.encode(),
        f"exercises/{concept.name}.py": concept.stub.encode(),
        f"notebooks/{notebook}.ipynb": data,
    }


def _lesson(name: str) -> bytes:
    """A notebook with a heading and a check for each exercise."""
    cells = [_cell("markdown", f"# {name}", f"title-{name}")]
    for each in prose.concept(name).values():
        at = each.id.replace(".", "-").replace("_", "-")
        asked = f"## Exercise: {each.id}\n\n*{each.label}*\n\n{each.title} Write it in `exercises/{name}.py`."
        cells += [
            _cell("markdown", asked, f"exercise-{at}"),
            _cell("code", f'import gpukit; gpukit.check("{each.id}")', f"check-{at}"),
        ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return (
        json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"
    ).encode()


def _cell(kind: str, source: str, name: str) -> dict:
    cell = {"cell_type": kind, "id": name[:64], "metadata": {}, "source": source.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def solutions(folders: Iterable[Path]) -> Mapping[str, str]:
    """The texts that no learner may get, by what they are called."""
    return {f"{folder.name}/solution.py": _text(folder, "solution.py") for folder in folders}


def as_json(concepts: Iterable[Added]) -> str:
    return json.dumps([asdict(each) for each in concepts], ensure_ascii=False)


def from_json(text: str) -> tuple[Added, ...]:
    """The concepts that `as_json` wrote, from now on those of this process."""
    concepts = tuple(Added(**each) for each in json.loads(text or "[]"))
    for each in concepts:
        registry.add(each)
    return concepts
