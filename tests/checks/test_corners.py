"""What every check tries, whatever its exercise is about: layouts, corners, sizes beyond 32 bits, bounds in every case."""

import ast
import random
import re

import pytest
import torch

from gpukit import course, integrity
from gpukit.grading import registry
from gpukit.grading.exercise import FunctionExercise

KERNELS = [exercise for exercise in registry.exercises().values() if exercise.kernel]
FUNCTIONS = [e for e in registry.exercises().values() if isinstance(e, FunctionExercise) and not e.setup]
# Whole numbers of plain functions that no case has at 1 or below: bits of a format, sizes of a GPU or in bytes, edges of blocks
# whose memory is bounded, the number of a new token.
NEVER_ONE = {
    "capstone.pair": {"new"},
    "dtypes.decode": {"exponent_bits"},
    "flash_attention.recompute": {"BLOCK"},
    "flash_attention.tiles": {"BLOCK"},
    "kv_cache.speed": {"weights", "weight_bits", "cache_bits"},
    "matmul.tiles": {"BLOCK"},
    "memory.recompute": {"input_bytes", "block_bytes"},
    "memory.serve": {"gpu_bytes", "parameters"},
    "tiling.occupancy": {"sm_registers", "sm_shared_bytes"},
}
ROOT = course.root(__file__)


def promised_contiguous(exercise) -> bool:
    """By the docstring of the function that a check calls, or by that of its file."""
    source = integrity.solution(exercise.concept, ROOT)
    found = re.search(rf'^def {exercise.function}\(.*?"""(.*?)"""', source, re.MULTILINE | re.DOTALL)
    of_function, of_file = found[1] if found else source, ast.get_docstring(ast.parse(source))
    return "contiguous" in of_function.lower() or "tensors are contiguous" in of_file


def arguments(exercise) -> list[list[torch.Tensor]]:
    """The tensors at each position, over all cases."""
    cases = exercise.cases(random.Random(1))
    found = [
        [x for x in column if isinstance(x, torch.Tensor)]
        for column in zip(*(case.args for case in cases), strict=False)
    ]
    return [column for column in found if column]


@pytest.mark.parametrize("exercise", KERNELS, ids=lambda exercise: exercise.id)
def test_each_tensor_comes_in_other_layouts_too(exercise):
    """Unless the stub says that it is contiguous."""
    if promised_contiguous(exercise):
        return
    for i, column in enumerate(arguments(exercise)):
        if max(x.ndim for x in column) and max(x.numel() for x in column) > 1:
            assert any(not x.is_contiguous() for x in column), f"tensor {i} of {exercise.id} is contiguous in all cases"


@pytest.mark.parametrize("exercise", [e for e in KERNELS if e.gradients], ids=lambda exercise: exercise.id)
def test_the_upstream_gradient_is_that_of_a_sum_too(exercise):
    """y.sum().backward() hands on a gradient whose strides are all 0."""
    upstream = arguments(exercise)[-1]
    assert any(x.numel() > 1 and not any(x.stride()) for x in upstream)
    assert any(not x.is_contiguous() and all(x.stride()) for x in upstream)


@pytest.mark.parametrize("exercise", [e for e in KERNELS if e.gradients], ids=lambda exercise: exercise.id)
def test_what_forward_keeps_for_backward_is_bounded(exercise):
    """By less than all arguments and results, and the contract says so."""
    for case in exercise.cases(random.Random(1)):
        *given, dy = (x for x in case.args if isinstance(x, torch.Tensor))
        assert (
            0 <= exercise.traffic.allowed(case).saved < sum(x.numel() * x.element_size() for x in (*given, dy, dy, dy))
        )
    source = integrity.solution(exercise.concept, ROOT)
    assert re.search(rf'^def {exercise.function}\(.*?""".*?Forward keeps .*?"""', source, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("exercise", FUNCTIONS, ids=lambda exercise: exercise.id)
def test_each_count_is_tried_at_its_smallest(exercise):
    """A plain function meets each whole number at 1 or below, and each list with one item or none."""
    source = ast.parse(integrity.solution(exercise.concept, ROOT))
    function = next(x for x in source.body if isinstance(x, ast.FunctionDef) and x.name == exercise.function)
    columns = zip(*(case.args for case in exercise.cases(random.Random(1))), strict=False)
    never = set()
    for name, values in zip((arg.arg for arg in function.args.args), columns, strict=False):
        sizes = [len(value) if isinstance(value, list) else value for value in values]
        if all(type(size) is int for size in sizes) and min(sizes) > 1:
            never.add(name)
    assert never - {"addresses", "words"} == NEVER_ONE.get(exercise.id, set())  # a warp has 32 lanes


@pytest.mark.parametrize("exercise", [e for e in KERNELS if e.traffic], ids=lambda exercise: exercise.id)
def test_bounds_hold_in_every_case(exercise):
    for case in exercise.cases(random.Random(1)):
        allowed = exercise.traffic.allowed(case)
        assert min(allowed.reads, allowed.writes) >= 0 and allowed.launches > 0, case.name
