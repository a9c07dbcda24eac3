"""Every exercise of the course, found in gpukit/checks, and those that an assignment adds to it."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from gpukit.course import CourseError
from gpukit.grading import prose
from gpukit.grading.exercise import Exercise
from gpukit.grading.prose import Prose
from gpukit.nearest import did_you_mean


class UnknownExercise(CourseError):
    pass


@dataclass(frozen=True)
class Added:
    """A concept from outside the course, as texts, so that it can be kept in a file and sent to another process.

    check  what would be gpukit/checks/<name>.py; prose: the .md beside it; stub: exercises/<name>.py
    """

    name: str
    check: str
    prose: str
    stub: str = ""


added: dict[str, Added] = {}


def add(concept: Added) -> None:
    """Make a concept one of this process's exercises, in place of an added one of the same name. The text of its check is run:
    it is the instructor's, not a learner's. Raises what it raises, and ProseError.
    """
    if added.get(concept.name) == concept:
        return
    remove(concept.name)
    name = f"gpukit.checks.{concept.name}"
    module = ModuleType(name)
    try:
        added[concept.name], prose.added[concept.name] = concept, concept.prose
        exec(compile(concept.check, f"{concept.name}/check.py", "exec", dont_inherit=True), module.__dict__)
        sys.modules[name] = module
        exercises_of = {exercise.id for exercise in module.EXERCISES}
        if unlisted := exercises_of ^ prose.concept(concept.name).keys():
            raise prose.ProseError(
                f"check.py and check.md do not speak of the same exercises: {', '.join(sorted(unlisted))}"
            )
    except BaseException:
        remove(concept.name)
        raise


def remove(name: str) -> None:
    """Take an added concept out again."""
    if added.pop(name, None):
        del prose.added[name]
        sys.modules.pop(f"gpukit.checks.{name}", None)
    for cached in (catalog, globals()["concept"], exercises, prose.concept):
        cached.cache_clear()


@cache
def catalog() -> dict[str, Prose]:
    """What is written about each exercise, by id, in the order of the notebooks. Imports no check.

    Raises ProseError.
    """
    listed = [item for name in prose.concepts() for item in prose.concept(name).values()]
    listed.sort(key=lambda item: item.notebook)  # stable: within a notebook the file's order holds
    return {item.id: item for item in listed}


@cache
def concept(name: str) -> dict[str, Exercise]:
    """The exercises of one concept by id. Imports its check, and no torch. Raises ProseError."""
    return {exercise.id: exercise for exercise in importlib.import_module(f"gpukit.checks.{name}").EXERCISES}


@cache
def exercises() -> dict[str, Exercise]:
    """All exercises by id, in the order of the notebooks. Imports every check, and no torch. Raises ProseError."""
    found = {}
    for item in catalog().values():
        if item.id not in concept(item.concept):
            where = f"gpukit/checks/{item.concept}"
            raise prose.ProseError(f"{where}.md tells of {item.id}, which EXERCISES in {where}.py does not list")
        found[item.id] = concept(item.concept)[item.id]
    return found


def handed_out(root: Path) -> dict[str, Exercise]:
    """The exercises of the copy in `root`: those of the concepts that its release.json names, or all. What a learner is
    shown, never what a grade consists of: a learner may edit that file."""
    concepts = _release(root).get("concepts")
    if not isinstance(concepts, list):
        return exercises()
    return {name: e for name, e in exercises().items() if e.concept in concepts} or exercises()


def release(root: Path) -> str:
    """Which release the copy in `root` says that it is; "" where it is none. No more to be relied on than `handed_out`."""
    told = [_release(root).get(key) for key in ("version", "released", "commit")]
    if not all(isinstance(text, str) and text.isprintable() for text in told):
        return ""
    version, released, commit = told
    return f"gpukit {version}, released {released}{f', commit {commit}' if commit else ''}"


def _release(root: Path) -> dict:
    try:
        told = json.loads((root / "release.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def exercise(exercise_id: str) -> Exercise:
    """The exercise called `exercise_id`; of the checks only its concept's is imported.

    Raises UnknownExercise, naming the nearest one.
    """
    known = catalog()
    if exercise_id in known:
        return concept(known[exercise_id].concept)[exercise_id]
    names, what = list(known), "exercise"
    if "." not in exercise_id:
        names, what = [*dict.fromkeys(item.concept for item in known.values()), *names], "exercise or concept"
    raise UnknownExercise(
        f"no {what} is called {exercise_id!r}{did_you_mean(exercise_id, names)}  (all of them: gpukit progress)"
    )


def named(name: str) -> list[str]:
    """The ids that a learner's word stands for: "softmax" for all exercises of a concept, or the id of one exercise.

    Raises UnknownExercise.
    """
    return [item.id for item in catalog().values() if item.concept == name] or [exercise(name).id]
