"""What the tests of the exercises share: an exercise's name in pytest, its cases, and its solution with a change."""

import random

from gpukit import course

ROOT = course.root(__file__)


def ids(exercise) -> str:
    return exercise.id


def cases(exercise, seed: int = 1) -> list:
    return exercise.cases(random.Random(seed))


def edited(concept: str, *edits: tuple[str, str]) -> str:
    """solutions/<concept>.py with each text, which stands there once, replaced by another."""
    source = (ROOT / "solutions" / f"{concept}.py").read_text(encoding="utf-8")
    for old, new in edits:
        assert source.count(old) == 1, f"{concept}: {old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    return source
