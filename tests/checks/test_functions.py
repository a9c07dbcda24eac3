"""What holds for the cases and the ideas of all plain functions, whatever the seed."""

import random

import pytest
import torch

from gpukit import course
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


def test_answers_in_pytorch_make_their_tensors_where_their_inputs_are(monkeypatch):
    """A notebook's own cells call them on a GPU where there is one. On the meta device a tensor of the CPU is refused too."""
    monkeypatch.setenv("GPUKIT_IMPL", "solutions")
    attention, matmul, cache, capstone = map(course.exercise, ("flash_attention", "matmul", "kv_cache", "capstone"))

    def make(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k = make(20, 8), make(30, 8)
    step = (make(4, 8), make(4, dtype=torch.int64))
    made = [
        attention.attention_tiles(q, k, k, 16),
        *attention.gradient_tiles(q, k, k, q, make(20), q, 16),
        matmul.matmul_tiles(make(20, 30, dtype=torch.bfloat16), make(30, 40, dtype=torch.bfloat16), 16),
        *cache.attend(make(1, 2, 4, 8), make(1, 2, 2, 8), make(1, 2, 2, 8), make(1, 16, 2, 8), make(1, 16, 2, 8), 5),
        *capstone.step_gradient(make(10, 8), [step], 4, 1),
    ]
    assert {x.device.type for x in made} == {"meta"}
