"""Every known wrong answer is rejected with its diagnosis, and every right one accepted: the tests of the checks themselves."""

import ast

import pytest

from gpukit import course
from gpukit.grading.exercise import Exercise, Variant
from gpukit.grading.judge import judge_source
from gpukit.grading.registry import exercises
from gpukit.grading.stubs import clear
from gpukit.grading.verdict import MAX_LINES
from tests.checks.lesson_cases import edited

EXERCISES = list(exercises().values())
WRONG = [(exercise, variant) for exercise in EXERCISES for variant in exercise.wrong]
RIGHT = [(exercise, variant) for exercise in EXERCISES for variant in exercise.right]


def solution(exercise: Exercise) -> str:
    return course.exercise_file(exercise.concept, course.root(__file__), "solutions").read_text()


def source_of(exercise: Exercise, variant: Variant) -> str:
    if variant.source:
        return variant.source
    return edited(exercise.concept, *variant.edits)


def ids(pairs):
    return [f"{exercise.id}-{variant.name}" for exercise, variant in pairs]


@pytest.mark.parametrize(("exercise", "variant"), WRONG, ids=ids(WRONG))
def test_wrong_answer_is_rejected_with_its_diagnosis(exercise, variant):
    verdict = judge_source(exercise, source_of(exercise, variant), seed=1)  # which label is found may depend on chance
    assert not verdict.passed
    assert verdict.diagnosis == variant.diagnosis, f"{verdict.diagnosis}\n{verdict}\n{verdict.detail[-2000:]}"
    assert 0 < len(verdict.lines) <= MAX_LINES
    assert all(len(line) <= 140 for line in verdict.lines), verdict.lines


@pytest.mark.parametrize(("exercise", "variant"), RIGHT, ids=ids(RIGHT))
def test_right_answer_is_accepted(exercise, variant):
    verdict = judge_source(exercise, source_of(exercise, variant))
    assert verdict.passed, f"{verdict}\n{verdict.detail[-2000:]}"


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_solution_passes_and_stub_does_not(exercise):
    text = solution(exercise)
    verdict = judge_source(exercise, text)
    assert verdict.passed, f"{verdict}\n{verdict.detail[-2000:]}"
    assert verdict.checks_passed == verdict.checks_total > 0
    stub = judge_source(exercise, clear(text))
    assert stub.state in ("todo", "fail"), str(stub)
    ast.parse(clear(text))


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_exercise_is_complete(exercise):
    assert len(exercise.wrong) >= 5
    assert len(exercise.right) >= 2
    assert len(exercise.hints) == 3
    assert len(set(exercise.hints)) == 3
    assert 1 <= exercise.label.difficulty <= 5
    assert all(variant.diagnosis for variant in exercise.wrong)
    assert not any(variant.diagnosis for variant in exercise.right)
    names = [variant.name for variant in (*exercise.wrong, *exercise.right)]
    assert len(set(names)) == len(names)
    assert (course.root(__file__) / "notebooks" / f"{exercise.notebook}.ipynb").exists()
