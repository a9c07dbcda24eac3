"""The numbers of notebook 13, without its looks."""

import math
from dataclasses import replace

import pytest
import torch

import gpukit
from gpukit.kernels import _flash_hopper
from gpukit.lessons import flash_attention as lesson


def test_three_lines_move_129_times_the_bytes():
    q, k, v = (torch.empty(lesson.SHAPE, dtype=torch.bfloat16, device="meta") for _ in range(3))
    with gpukit.trace() as three_lines:
        torch.softmax(q @ k.mT, -1) @ v
    square = 2 * lesson.HEADS * lesson.TOKENS**2
    assert three_lines.bytes == 4 * square + 4 * q.nbytes and lesson.LEAST.bytes == 4 * q.nbytes
    assert "129 times the 0.27 GB" in lesson.what_the_lines_say(three_lines)
    assert "together" in str(lesson.lines_table(three_lines))


def test_the_picture_of_merging_adds_up():
    scores = torch.tensor([*lesson.LEFT, *lesson.RIGHT])
    whole = float((scores - scores.max()).exp().sum())
    assert lesson.merging().alt.endswith(f"both stack to {whole:.3f}.")


def test_states_say_what_softmax_says():
    s, v = [1.0, 3.0, 2.0], [1.0, -1.0, 4.0]
    m = max(s)
    state = m, sum(math.exp(x - m) for x in s), sum(math.exp(x - m) * y for x, y in zip(s, v, strict=True))
    (row,) = lesson.merged({"all": state}, 0.0).rows
    assert row[-1] == pytest.approx(float(torch.logsumexp(torch.tensor(s), 0)))
    assert row[-2] == pytest.approx(float(torch.softmax(torch.tensor(s), 0) @ torch.tensor(v)))


def test_recorded_lengths_are_those_of_the_promise():
    rows = lesson.by_length()
    assert {length for _, _, length in rows} == {512, 1024, 2048, 4096, 8192, lesson.TOKENS}
    gains = [rows["formula", "fwd", n].median_ms / rows["gpukit", "fwd", n].median_ms for n in (512, 8192)]
    assert 1 < gains[0] < gains[1], "the text says that the gain grows with the length"
    assert "cuDNN" in lesson._by_length_said(rows) and len(lesson._by_length_table(rows).rows) == 6


def test_the_clock_beside_the_model_of_the_pointer_kernel():
    rows = lesson.by_hand("attention_causal")
    assert rows["pointers"].gpu == rows["gpukit"].gpu and rows["gpukit"].median_ms < rows["pointers"].median_ms
    said = lesson.what_limits_it().data
    assert f"the kernel with pointers takes {rows['pointers'].median_ms:.2f} ms" in said
    assert "at most -" not in said, "a unit of the model is busy for longer than the kernel takes"


def test_a_walk_over_blocks_in_pytorch_saves_memory_and_no_time():
    rows = lesson.by_hand("attention_in_blocks")
    ms, held = ({each: getattr(row, what) for each, row in rows.items()} for what in ("median_ms", "peak_bytes"))
    assert ms["formula"] < ms["gpukit"] < ms["blocks"] / 50 and held["blocks"] < held["formula"] / 50, (
        "the text says so"
    )
    said = lesson.what_blocks_cost().data
    assert f"takes {ms['blocks'] / ms['formula']:.0f} times as long" in said and f"{ms['gpukit']:.2f} ms" in said
    assert [row[1:] for row in lesson.in_blocks().rows] == [(ms[each], held[each] / 1e6) for each in lesson._BY_HAND]


def test_three_lines_round_more_than_a_kernel():
    lines, kernel = lesson.rounding_errors()
    assert 0.001 < 2 * kernel < lines < 0.01, "the text says that the three lines are less accurate"


def test_texts_and_copies():
    found = lesson.texts()
    assert found["copies"] == 9 and found["real scores"] == pytest.approx(0.1727, abs=1e-4)


def test_computed_share_of_the_masks():
    shares = {(row[0], row[1]): row[-2] for row in lesson.causal_counted().rows}
    assert shares["256", "none"] == 0.75 and shares["4,096", "none"] == pytest.approx(0.516, abs=1e-3)
    assert shares["4,096", 512] == pytest.approx(0.1465, abs=1e-3)
    said = lesson.what_the_masks_say().data
    assert "75% of the scores" in said and "1.25 times" in said and "20% of what is computed" in said


def test_the_layer_needs_a_hundredth_of_the_bytes():
    lines, kernel = lesson.layer_bytes()
    assert lines / kernel == pytest.approx(1 + 4 * 32 * 8192 / (128 * 80))


def test_what_is_said_of_the_backward_pass_holds(monkeypatch):
    took = lesson._took
    shape = (4, 16, 4096, 128)
    call, graph = (took("flash_attention", mode, shape)["gpukit"] for mode in ("bwd", "bwd-graph"))
    said = lesson.what_the_times_say().data
    assert f"For D = 128 its blocks have {_flash_hopper.BACKWARD[128].BLOCK_M} queries" in said
    older = f"took {graph.median_ms * 1e3:,.0f} µs for 4,096 tokens, where the call of {call.date}"
    assert (older in said) == (graph.date < call.date)

    def of_one_day(op, mode, shape):
        return {name: replace(row, date=call.date) for name, row in took(op, mode, shape).items()}

    monkeypatch.setattr(lesson, "_took", of_one_day)
    assert "are older" not in lesson.what_the_times_say().data
