"""The numbers that notebook 06 shows."""

import math

import numpy as np
import pytest

from gpukit.lessons import coalescing as lesson
from gpukit.simulator import simt


def test_the_four_factors_are_a_thousand():
    assert math.prod(factor for _, factor in lesson.FACTORS) == 1000


@pytest.mark.parametrize(("warps", "share"), ((1, 0.2), (2, 0.4), (5, 1.0), (9, 1.0)))
def test_enough_warps_hide_the_wait(warps, share):
    spans = lesson._issue(warps, 100)
    assert sum(stop - start for mine in spans for start, stop in mine if stop <= 100) / 100 == pytest.approx(share)
    starts = sorted(start for mine in spans for start, _ in mine)
    assert len(set(starts)) == len(starts)  # one warp at a time


def test_little_and_the_strides():
    flight = lesson.flight()
    assert flight["bytes in flight"] == pytest.approx(flight["loads of 128 bytes per SM"] * 128 * 132)
    assert lesson.bends() == {"float32": 8, "float16": 16}
    for stride in (1, 2, 16):
        measured = int(lesson.recorded()[f"copy, stride {stride}"]["l2_read_sectors"])
        assert lesson.per_warp(stride, 2) * 2**20 / 32 == measured


def test_the_recorded_rows_say_what_the_text_says():
    """Sentences of the notebook that hold for these rows; a new measurement may need others."""
    assert list(map(lesson.latency_ns, lesson.PLACES)) == sorted(map(lesson.latency_ns, lesson.PLACES))
    assert lesson.flight()["loads of 128 bytes per SM"] > 64
    few, many = lesson.in_flight().rows
    assert few[3] < 0.5 * many[3]
    dram = lesson._dram_mb()
    assert dram[32] == pytest.approx(2 * dram[16], rel=0.01) and dram[64] == pytest.approx(dram[32], rel=0.01)
    assert [need > has for _, need, has in lesson.first_level().rows] == [True, False, True, True]
    copy, tiles, rows, torch = lesson.transposes_timed().rows
    assert copy[3] > tiles[3] > 0.9 * copy[3] and torch[2] > 5 * tiles[2] and rows[3] < torch[3]


def test_views_and_gathers():
    def read_row(t, v, y):
        y[t.lane] = v[3, t.lane]

    x = np.ones((64, 64), dtype=np.float32)
    rows = lesson.views(read_row, {"x": x, "x.T": x.T, "x[:, 1:]": x[:, 1:]}).rows
    assert [row[-2:] for row in rows] == [(4, 1), (32, 32), (5, 2)]

    def by_token(t, ids, table, y):
        for d in range(table.shape[1]):
            y[t.index, d] = table[ids[t.index], d]

    def by_element(t, ids, table, y):
        token, d = t.index // y.shape[1], t.index % y.shape[1]
        y[token, d] = table[ids[token], d]

    found = {row[0]: row[1:] for row in lesson.gathers(by_token, by_element).rows}
    assert found[1] == (32, 256, 256, 0.125) and found[8] == (256, 2048, 256, 1.0) and found[32][2] == found[32][0]


def test_pitches():
    assert [row[1] for row in lesson.pitches().rows] == [math.gcd(pitch, simt.BANKS) for pitch in range(32, 41)]
