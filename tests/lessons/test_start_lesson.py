"""What notebook 00 shows."""

import pytest
import torch

import gpukit
from gpukit.lessons import start as lesson
from gpukit.reference import softmax


def test_least_time_is_bytes_over_the_data_sheets_rate():
    assert lesson.least_us(2 * 4096 * 4096 * 4) == pytest.approx(27.96, abs=0.01)
    assert lesson.least_us(8e9, "b200") == pytest.approx(8e9 / 7700e9 * 1e6)


def test_a_llama_layer_is_read_in_ninety_microseconds():
    """4 matrices of attention (two of them a quarter as wide) and 3 of the MLP, in bfloat16, at 4,800 GB/s."""
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    assert f"{layer / 1e6:.0f} million weights" in lesson.story().data
    assert f"{2 * layer / 4800e3:.0f} µs" in lesson.story().data


def test_the_parts_hold_every_exercise():
    minutes = [m for each in lesson.exercise_minutes().values() for m in each]
    *parts, whole = lesson.hours().rows
    assert sum(row[2] for row in parts) == whole[2] == len(minutes)
    assert whole[3] == pytest.approx(sum(minutes) / 60)


def test_the_promise_is_recorded_and_the_five_lines_move_four_times_the_bytes():
    us = lesson._softmax_us()
    assert us["torch"] > us["library"] > us["gpukit"] > lesson.least_us(2 * 4096 * 4096 * 4)
    x = torch.zeros(4096, 4096)
    with gpukit.trace() as counted:
        softmax.softmax(x)
    assert "**4.0 times** as many bytes" in lesson.what_five_lines_say(counted).data
    assert "numerator / denominator reads 67 MB and writes 67" in lesson.five_lines(counted).alt
