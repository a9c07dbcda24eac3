"""The numbers of notebook 16, without its looks."""

import pytest
import torch

import gpukit
from gpukit.lessons import adamw as lesson
from gpukit.reference import adamw


def test_the_picture_of_the_lines_counts_as_the_trace():
    p, g, m, v = (torch.empty(1000, device="meta") for _ in range(4))
    with gpukit.trace() as lines:
        adamw.adamw([p], [g], [m], [v], step=1)
    assert [(op.read_bytes // 4000, op.write_bytes // 4000) for op in lines.torch_ops] == [*lesson.LINES.values()]
    said = str(lesson.bytes_reveal(lines, 1000))
    assert "80 bytes per weight" in said and ": 28 bytes" in said
    assert "1,184" in str(lesson.launches_reveal(lines))


def test_steps_without_correction():
    assert lesson.step_length(1) == pytest.approx(0.1 / 0.001**0.5)
    assert "step 12 is 6.6" in lesson.first_steps().alt


def test_blocks_are_numbered_in_one_row():
    told = "tensor 0 has the programs 0 to 2; tensor 1 has the programs 3 to 3; tensor 2 has the programs 4 to 7"
    assert told in lesson.blocks().alt


def test_rounding_at_random_is_right_on_average():
    assert lesson.bf16_gap(0.9971) == (1 - 2**-8, 1.0)
    assert (
        "at 26% of the way" in lesson.rounding_line().alt
        and "the mean of the results is 0.9971" in lesson.rounding_line().alt
    )


def test_bytes_of_the_recipes():
    moved = {name: round(each) for name, (each, _) in lesson.recipe_bytes().items()}
    assert [*moved.values()] == [28, 14, 28, 22]


def test_sentences_come_from_rows():
    assert "**9.1 ms**" in lesson.promise().data and "**0.94 ms**" in lesson.promise().data
    said = lesson.what_measuring_says().data
    assert "at all 4 sizes" in said and "at 98% of the rate of a copy" in said
    assert "218 million" in lesson.layer_line().data
