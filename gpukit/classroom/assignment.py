"""An assignment: one small TOML file that says which exercises count, for how much, until when and on which inputs.

    title = "Week 2: memory and FLOPs"
    exercises = ["start", "memory", "flops.training"]     # concepts or single exercises; nothing else is ever "missing"
    points = 10                                           # for each exercise; or a table, see below
    deadline = 2026-10-12T23:59:00+02:00                  # optional; the offset from UTC is required
    seed = "student"                                      # optional: inputs of their own for each student; or a number
    secret = "any words"                                  # optional: what seeds are derived from in place of the title
    own = ["scan"]                                        # optional: folders with concepts of your own, seen from this file

    [points]                                              # in place of the number: for each exercise of a concept,
    memory = 10                                           # and for single exercises, which go before their concept
    "flops.training" = 20

    [late]                                                # optional; without it late work is named late, and counts
    per_day = 0.1                                         # the fraction of the points that each day that began costs
    at_most = 3                                           # days after which nothing counts

Without `seed` all students get the same inputs, which are derived from the secret, or from the title.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from gpukit import course
from gpukit.classroom import own as owned
from gpukit.grading import registry
from gpukit.grading.registry import Added
from gpukit.nearest import did_you_mean

KEYS = ("title", "exercises", "points", "deadline", "late", "seed", "secret", "own")
MAX_BYTES = 1 << 20
_SEEDS = 1 << 31


class BadAssignment(course.CourseError):
    """The message names the file, the key, what was given and what is allowed."""


@dataclass(frozen=True)
class Assignment:
    """What an assignment's file says.

    exercises   ids, in the course's order
    points      of each exercise, by id
    deadline    with its offset from UTC; None if there is none
    per_day     the fraction of the points that each day after the deadline costs, 0 to 1
    at_most     days after the deadline in which work is still accepted; None: no limit
    seed        the inputs' seed for everybody; None: each student has seeds of their own
    text        the file's text, from which `parse` makes an equal assignment
    own         the concepts that are not the course's, each with its folder, where the assignment was read from a file
    """

    title: str
    exercises: tuple[str, ...]
    points: Mapping[str, float]
    deadline: datetime | None = None
    per_day: float = 0.0
    at_most: int | None = None
    seed: int | None = None
    secret: str = field(default="", repr=False)
    text: str = field(default="", repr=False)
    own: tuple[tuple[Path, Added], ...] = field(default=(), repr=False, compare=False)

    @property
    def concepts(self) -> tuple[str, ...]:
        """The concepts that the exercises belong to: the files that a submission should hold."""
        return tuple(dict.fromkeys(each.partition(".")[0] for each in self.exercises))

    @property
    def possible(self) -> float:
        """The points of somebody who passes everything in time."""
        return sum(self.points[each] for each in self.exercises)

    def seed_for(self, student: str, exercise: str) -> int:
        """The seed of the inputs on which this exercise of this student is judged, 0 to 2^31 - 1."""
        return self.seed if self.seed is not None else _derived(self.secret or self.title, student, exercise)


def read(path: Path | str) -> Assignment:
    """The assignment in a file. Raises BadAssignment."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadAssignment(f"{path}: the assignment cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise BadAssignment(f"{path}: the assignment is larger than 1 MiB; it should be a small TOML file")
    try:
        return parse(data.decode("utf-8-sig"), str(path), path.parent)
    except UnicodeDecodeError:
        raise BadAssignment(f"{path}: the assignment is not UTF-8 text: save it as UTF-8") from None


def parse(text: str, where: str = "assignment", folder: Path | None = None) -> Assignment:
    """The assignment that a TOML text describes; `where` is what errors call it. Concepts of its own are read in `folder`, or are
    known without it. Raises BadAssignment.
    """
    try:
        content = tomllib.loads(text.replace("\r\n", "\n"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        at = re.search(r"at line (\d+)", str(error))
        line = f": {_shown(text.splitlines()[int(at[1]) - 1].strip())}" if at else ""
        raise BadAssignment(f"{where}: this is not TOML: {error}{line}") from None
    for key in content:
        if key not in KEYS:
            raise BadAssignment(
                f"{where}: no key is called {key!r}{did_you_mean(key, KEYS)}; the keys are {', '.join(KEYS)}"
            )
    take = _Take(where, content)
    title = take("title", str, "a text", required=True)
    if not title.strip() or not title.isprintable():  # it becomes the name of a column
        raise take.bad("title", "a text in one line")
    own = _own(take, folder)
    exercises = _exercises(take)
    per_day, at_most = _late(take)
    secret = take("secret", str, "a text", "")
    return Assignment(
        title=title,
        exercises=exercises,
        points=_points(take, exercises),
        deadline=_deadline(take),
        per_day=per_day,
        at_most=at_most,
        seed=_seed(take, secret or title),
        secret=secret,
        text=text,
        own=own,
    )


class _Take:
    """Values of a table of the file, checked as they are taken."""

    def __init__(self, where: str, content: Mapping[str, Any], inside: str = ""):
        self.where, self.content, self.inside = where, content, inside

    def __call__(self, key: str, kind: type | tuple, allowed: str, default: Any = None, required: bool = False) -> Any:
        if key not in self.content:
            if required:
                raise BadAssignment(f"{self.where}: {self.inside}{key} is missing; it must be {allowed}")
            return default
        value = self.content[key]
        if not isinstance(value, kind) or isinstance(value, bool) or value == "":
            raise self.bad(key, allowed)
        return value

    def bad(self, key: str, allowed: str) -> BadAssignment:
        return BadAssignment(f"{self.where}: {self.inside}{key} must be {allowed}, got {_shown(self.content[key])}")


def _own(take: _Take, folder: Path | None) -> tuple[tuple[Path, Added], ...]:
    allowed = 'a list of folders, such as ["scan"]'
    names = take("own", list, allowed, [])
    if not all(isinstance(name, str) and name for name in names):
        raise take.bad("own", allowed)
    paths = [folder / name for name in names] if folder else []
    if twice := [path.name for n, path in enumerate(paths) if path.name in [other.name for other in paths[:n]]]:
        raise BadAssignment(
            f"{take.where}: own names two folders called {twice[0]}; each concept needs a name of its own"
        )
    try:
        return tuple((path, concept) for path in paths if (concept := owned.read(path)))
    except course.CourseError as error:
        raise BadAssignment(f"{take.where}: own: {error}") from None


def _exercises(take: _Take) -> tuple[str, ...]:
    allowed = 'a list of concepts or exercises, such as ["softmax", "memory.gpt2"]'
    names = take("exercises", list, allowed, required=True)
    if not names or not all(isinstance(name, str) for name in names):
        raise take.bad("exercises", allowed)
    known = registry.catalog()
    chosen = {each for name in names for each in _named(name, known, f"{take.where}: exercises")}
    return tuple(each for each in known if each in chosen)


def _named(name: str, known: Iterable[str], where: str) -> list[str]:
    """The ids that "softmax" or "softmax.fused" stands for."""
    found = [each for each in known if name in (each, each.partition(".")[0])]
    if not found:
        names = dict.fromkeys(part for each in known for part in (each.partition(".")[0], each))
        raise BadAssignment(
            f"{where}: no concept or exercise is called {name!r}{did_you_mean(name, names)}  (all of them: gpukit progress)"
        )
    return found


def _points(take: _Take, exercises: tuple[str, ...]) -> dict[str, float]:
    given = take("points", (int, float, dict), "a number, or a table by concept or exercise", 1)
    if not isinstance(given, dict):
        return dict.fromkeys(exercises, _number(take, "points"))
    given = _flat(given)
    table = _Take(take.where, given, "points.")
    found: dict[str, float] = {}
    for name in sorted(given, key=lambda name: "." in name):  # an exercise goes before its concept
        if not any(name in (each, each.partition(".")[0]) for each in exercises):
            names = [part for each in exercises for part in (each.partition(".")[0], each)]
            hint = did_you_mean(name, names)
            raise BadAssignment(
                f"{take.where}: points names {name!r}, which is not among the exercises{hint}  (they are {', '.join(exercises)})"
            )
        for each in _named(name, exercises, ""):
            found[each] = _number(table, name)
    if without := [each for each in exercises if each not in found]:
        raise BadAssignment(f"{take.where}: points says nothing of {', '.join(without)}; each exercise needs a number")
    return {each: found[each] for each in exercises}


def _flat(table: dict[str, Any]) -> dict[str, Any]:
    """`softmax.fused = 2` without quotes is a table in a table to TOML."""
    flat = {}
    for name, value in table.items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _number(take: _Take, key: str) -> float:
    allowed = "a number, 0 or more"
    value = take(key, (int, float), allowed, 1)
    if not (math.isfinite(value) and value >= 0):
        raise take.bad(key, allowed)
    return value


def _deadline(take: _Take) -> datetime | None:
    allowed = "a date and time with its offset from UTC, such as 2026-10-12T23:59:00+02:00 (without quotes)"
    deadline = take("deadline", datetime, allowed)
    if deadline is not None and deadline.tzinfo is None:
        raise take.bad("deadline", allowed)
    return deadline


def _late(take: _Take) -> tuple[float, int | None]:
    given = take("late", dict, "a table with per_day and at_most", {})
    late = _Take(take.where, given, "late.")
    for key in given:
        if key not in ("per_day", "at_most"):
            raise BadAssignment(f"{take.where}: late has no key {key!r}; its keys are per_day and at_most")
    if not given:
        return 0.0, None
    per_day = late("per_day", (int, float), "a fraction of the points, 0 to 1", required=True)
    at_most = late("at_most", int, "a whole number of days, 0 or more", required=True)
    if not 0 <= per_day <= 1:
        raise late.bad("per_day", "a fraction of the points, 0 to 1")
    if at_most < 0:
        raise late.bad("at_most", "a whole number of days, 0 or more")
    if "deadline" not in take.content:
        raise BadAssignment(f"{take.where}: late says what days after the deadline cost, but there is no deadline")
    return float(per_day), at_most


def _seed(take: _Take, secret: str) -> int | None:
    allowed = f'"student" (inputs of their own for each student) or a number, 0 to {_SEEDS - 1} (the same for all)'
    given = take("seed", (int, str), allowed, _derived(secret))
    if given == "student":
        return None
    if not isinstance(given, int) or not 0 <= given < _SEEDS:
        raise take.bad("seed", allowed)
    return given


def _derived(*words: str) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(words).encode()).digest()[:4], "big") % _SEEDS


def _shown(value: Any) -> str:
    text = value.isoformat() if hasattr(value, "isoformat") else repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
