"""What is special about the exercises of notebook 09; tests/checks/test_answers.py judges the known answers of all exercises."""

import random

import pytest

from gpukit import course
from gpukit.checks.softmax import BACKWARD, EXERCISES, FUSED, ONLINE, PERSISTENT, STRIDED
from gpukit.grading.judge import judge_source
from tests.checks import known
from tests.checks.known import ids

ROOT = course.root(__file__)


def solution() -> str:
    return (ROOT / "solutions" / "softmax.py").read_text(encoding="utf-8")


def verdict(exercise, name: str):
    source = known.source(exercise, name)
    return judge_source(exercise, source, seed=1)


@pytest.mark.parametrize("exercise", EXERCISES, ids=ids)
def test_cases_hold_what_breaks_kernels(exercise):
    cases = exercise.cases(random.Random(1))
    tags = set().union(*(case.tags for case in cases))
    assert {"float32", "float16", "bfloat16", "large"} <= tags
    lengths = {case.args[0].shape[-1] for case in cases}
    assert {1, 64, 781} <= lengths
    assert any(n & (n - 1) for n in lengths)
    assert max(case.args[0].numel() for case in cases) <= 1 << 16


def test_row_lengths_of_the_lesson_are_checked():
    for exercise in (FUSED, ONLINE, BACKWARD, PERSISTENT):
        lengths = {case.args[0].shape[-1] for case in exercise.cases(random.Random(1))}
        assert {1, 64, 781, 1000, 1024, 1025} <= lengths, exercise.id


def test_strided_cases_are_views_without_gaps():
    for case in STRIDED.cases(random.Random(1)):
        (x,) = case.args
        assert ("strided" in case.tags) == (not x.is_contiguous())
        assert "gaps" in case.tags or x.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_padding_lanes_are_counted_for_the_learner():
    shown = " ".join(str(verdict(FUSED, "pads-with-zero")).split())
    assert "fails for every case whose row length is not a power of two" in shown
    assert "The 243 padding lanes are being counted in the sum" in shown
    assert "every element is off by the same factor" in shown


def test_third_load_is_named_by_its_lines():
    shown = str(verdict(FUSED, "loads-three-times"))
    assert "x_ptr is loaded 3 times: lines" in shown
    assert "One load is enough" in shown


def test_a_wrong_forward_is_said_to_come_first():
    source = solution().replace(
        'x_ptr + row + offs_n, mask=mask_n, other=-float("inf")', "x_ptr + row + offs_n, mask=mask_n, other=0.0"
    )
    found = judge_source(BACKWARD, source, seed=1)
    assert found.diagnosis == "forward-first"
    assert "softmax.fused must pass first" in str(found)
