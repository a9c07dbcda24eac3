"""The numbers that notebook 04 shows."""

import pytest

from gpukit.checks.benchmarking import PROFILE
from gpukit.lessons import benchmarking as lesson
from gpukit.lessons import layer


def test_events_are_right_behind_a_flush_alone():
    assert lesson.measured_with_events(True)[0] == pytest.approx(10.2)
    assert lesson.measured_with_events(False)[0] == pytest.approx(17.0)
    assert lesson.measured_with_events(True, 600.0)[0] == pytest.approx(600.2)


def test_waits_cost_what_the_prose_says():
    assert lesson.training_loop(20).lanes[-1].end_us == 811
    assert lesson.training_loop(1).lanes[-1].end_us == 51 * 20
    assert lesson.training_loop(20, after_each_launch=True).lanes[-1].end_us > 1600


def test_the_flat_part_of_the_chain_ends_before_bytes_matter():
    assert lesson.flat_until() == 4_194_304
    assert "16,777,216 elements the two are nearly equal" in lesson.what_the_chain_says().data


def test_the_table_of_the_record_is_what_the_exercise_asks_for():
    events = lesson.recorded_events()
    names = {event[0] for event in events}
    assert {name: lesson.row(events, name) for name in names} == {
        name: pytest.approx(PROFILE.expected(events, name)) for name in names
    }
    cuda = sum(lesson.row(events, name)[3] for name in names)
    assert cuda == pytest.approx(lesson.busy()[0], rel=0.01), "each kernel once"


def test_two_rows_by_hand_are_in_the_prose():
    linear, addmm = (lesson.row(lesson.layer_events(), name) for name in ("aten::linear", "aten::addmm"))
    assert [round(value, 1) for value in linear] == [1, 3.2, 59.7, 0.0, 9.0]
    assert [round(value, 1) for value in addmm] == [1, 37.8, 47.4, 9.0, 9.0]


def test_rates_catch_two_of_the_lies():
    assert lesson.caught() == ["side stream", "cached output"]


def test_the_layer_adds_up():
    pytorch, ours = layer.totals_us()
    assert layer.weights() == 218_103_808
    assert ours < pytorch and layer.products_us() / pytorch == pytest.approx(0.79, abs=0.01)
    assert layer.table().rows[-1][2] == pytest.approx(sum(row[2] for row in layer.table().rows[:-1]))
