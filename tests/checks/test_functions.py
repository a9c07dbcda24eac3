"""What holds for the cases and the ideas of all plain functions, whatever the seed."""

import random

import pytest

from gpukit.grading import registry
from gpukit.grading.exercise import FunctionExercise
from tests.checks.known import ids

EXERCISES = [each for each in registry.exercises().values() if isinstance(each, FunctionExercise)]


def of_tensors(exercise) -> bool:
    return any(hasattr(arg, "untyped_storage") for arg in exercise.cases(random.Random(1))[0].args)


def seeds(exercise) -> range:
    return range(2 if of_tensors(exercise) else 20)


@pytest.mark.parametrize("exercise", EXERCISES, ids=ids)
def test_every_seed_makes_the_same_number_of_cases_with_different_names(exercise):
    made = [exercise.cases(random.Random(seed)) for seed in seeds(exercise)]
    assert len({len(found) for found in made}) == 1
    for found in made:
        names = sorted(case.name for case in found)
        assert sorted(set(names)) == names


@pytest.mark.parametrize("exercise", EXERCISES, ids=ids)
def test_every_idea_differs_from_the_answer_whatever_the_seed(exercise):
    """A check that catches a wrong idea with most seeds only would pass it now and then."""
    for seed in seeds(exercise):
        cases = exercise.cases(random.Random(seed))
        right = [exercise.expected(*case.args) for case in cases]
        for known in exercise.misconceptions:
            if known.gives is not None:
                differ = (wrong_in(exercise, known.gives, *pair) for pair in zip(cases, right, strict=True))
                assert any(differ), f"{known.label}, seed {seed}"


def wrong_in(exercise, gives, case, right) -> bool:
    try:
        return exercise.differs(gives(*case.args), right) is not None
    except (ArithmeticError, ValueError):  # it would divide by zero, or find no value
        return True
