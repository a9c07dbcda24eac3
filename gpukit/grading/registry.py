"""Every exercise of the course, found in gpukit/checks."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache

import gpukit.checks
from gpukit.course import CourseError
from gpukit.grading.exercise import Exercise


class UnknownExercise(CourseError):
    pass


@cache
def exercises() -> dict[str, Exercise]:
    """All exercises by id, in the order of the notebooks. Imports no torch."""
    found: list[Exercise] = []
    for module in pkgutil.iter_modules(gpukit.checks.__path__):
        found += importlib.import_module(f"gpukit.checks.{module.name}").EXERCISES
    found.sort(key=lambda exercise: exercise.notebook)  # stable: within a notebook the file's order holds
    return {exercise.id: exercise for exercise in found}


def exercise(exercise_id: str) -> Exercise:
    """The exercise called `exercise_id`. Raises UnknownExercise, naming the nearest one."""
    known = exercises()
    if exercise_id in known:
        return known[exercise_id]
    near = difflib.get_close_matches(str(exercise_id), known, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownExercise(f"no exercise is called {exercise_id!r}{hint}  (all of them: gpukit progress)")
