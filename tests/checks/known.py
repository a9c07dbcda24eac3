"""What the tests of the exercises share: names, cases, and the known answers of solutions/answers."""

import random
from functools import cache

from gpukit import course, integrity
from gpukit.grading.exercise import Exercise

ROOT = course.root(__file__)


def ids(exercise) -> str:
    return exercise.id


def cases(exercise, seed: int = 1) -> list:
    return exercise.cases(random.Random(seed))


def answers(exercise: Exercise) -> list[integrity.Answer]:
    return [answer for answer in of_concept(exercise.concept) if answer.exercise == exercise.id]


@cache
def of_concept(concept: str) -> list[integrity.Answer]:
    return integrity.answers(concept, ROOT)


def wrong(exercise: Exercise) -> list[integrity.Answer]:
    return [answer for answer in answers(exercise) if answer.diagnosis not in (integrity.RIGHT, integrity.EQUIVALENT)]


def right(exercise: Exercise) -> list[integrity.Answer]:
    return [answer for answer in answers(exercise) if answer.diagnosis == integrity.RIGHT]


def source(exercise: Exercise, name: str) -> str:
    """The text of the known answer called `name`."""
    (found,) = [answer.source for answer in answers(exercise) if answer.name == name]
    return found


def edited(concept: str, *edits: tuple[str, str]) -> str:
    """solutions/<concept>.py with each text, which stands there once, replaced by another."""
    text = integrity.solution(concept, ROOT)
    for old, new in edits:
        assert text.count(old) == 1, f"{concept}: {old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    return text
