"""The numbers of notebook 09, without its looks."""

import csv

import pytest
import torch

import gpukit
from gpukit.kernels import _rows_shared
from gpukit.lessons import softmax as lesson
from gpukit.reference import softmax


def test_states_are_those_of_the_whole_row():
    row = torch.tensor([1.5, 3.0, 2.0, 5.0, 4.0, 0.5], dtype=torch.float64)
    for seen, (m, terms) in zip((2, 4, 6), lesson.states(row.view(3, 2).tolist()), strict=True):
        assert m == row[:seen].max()
        assert sum(terms) == pytest.approx(float((row[:seen] - m).exp().sum()))


def test_bars_say_how_they_were_rescaled():
    said = lesson.rescaled([[1.5, 3.0], [2.0, 5.0], [4.0, 0.5]]).alt
    assert (
        "after block 0 m is 3 and l is 1.223; after block 1 m is 5 and l is 1.215; after block 2 m is 5 and l is 1.594"
        in said
    )
    assert "from 1.2231 to 1.2153" in lesson.what_the_second_block_does()


def test_five_lines_are_counted_as_the_formula_says():
    x = torch.randn(4096, 4096, dtype=torch.bfloat16)
    with gpukit.trace() as five_lines:
        softmax.softmax(x)
    assert "5 M N + 2 M" in lesson.what_the_traffic_says(five_lines)
    assert five_lines.bytes / lesson.LEAST == pytest.approx(4, rel=1e-3)
    five, one = lesson.layer_bytes()
    assert five / one == pytest.approx(4, rel=1e-3)


def test_changes_of_a_nudge_add_up_to_nothing():
    assert "change by -0.009, +0.055, -0.041, -0.006" in lesson.nudge([0.5, -1.0, 2.0, 0.0], 1, 1.0).alt


def test_sentences_have_the_recorded_times():
    times = lesson.took()
    assert f"{times['torch', lesson.SHAPE]:.0f} µs" in lesson.promise().data
    assert "closest to the model at N = 65,536" in lesson.where_the_time_goes().data
    assert f"{lesson.persistent_us()['fused', (65536, 128)]:.1f} µs" in lesson.ask_few_programs().data
    assert "132 programs" in str(lesson.few_programs())
    assert "takes 9 times as long" in str(lesson.few_programs())


def test_no_time_is_mostly_launches():
    times = lesson.took()
    assert all(2 * graph > times[key] for key, graph in lesson.took("fwd-graph").items())


def test_views_begin_where_their_strides_say():
    x = torch.arange(12.0).view(3, 4)
    assert "t begins at 2 and steps by 4" in lesson.row_two({"t": x.t()}).alt


def test_what_sharing_gains_are_recorded_times():
    times = {(row["operation"], row["shape"], row["way"]): float(row["median_us"]) for row in long_rows("h100-sxm")}
    there = {(row["operation"], row["shape"], row["way"]): float(row["median_us"]) for row in long_rows("h200")}

    def best(found, operation, shape, begins):
        return min(
            us for (op, size, way), us in found.items() if (op, size) == (operation, shape) and way.startswith(begins)
        )

    said = lesson.what_sharing_gains().data
    assert f"**{best(there, 'softmax', '4096x65536', ('parts', 'pieces')):.0f} µs**" in said
    assert f"twice takes {there['softmax', '4096x65536', 'others']:.0f} (measured)" in said
    shared, twice = (times["softmax backward", "4096x131072", way] for way in ("parts (8192 8)", "others"))
    assert f"{shared:,.0f} µs when the programs share them, instead of {twice:,.0f} µs" in said
    assert lesson.LONG // _rows_shared.PART == 16 and "Each of 16 programs" in lesson.shared_row().alt
    said = lesson.what_sharing_gains_the_loss().data
    assert f"**{best(there, 'cross-entropy in place', '4096x128256', 'pieces'):.0f} µs**" in said
    assert f"instead of {times['layer norm backward', '4096x16384', 'others']:.0f}" in said


def long_rows(gpu):
    path = lesson.benchmark.RESULTS / gpu / "long_rows.csv"
    return list(csv.DictReader(path.read_text().splitlines()))


def test_nothing_recorded_is_said(monkeypatch):
    monkeypatch.setattr(lesson.benchmark, "RESULTS", lesson.benchmark.RESULTS / "nowhere")
    assert "No run is recorded" in lesson.promise().data
    assert "gpukit bench softmax" in lesson.where_the_time_goes().data
    assert "No times" in str(lesson.few_programs())
    assert "No times" in lesson.what_sharing_gains().data and "No times" in lesson.what_sharing_gains_the_loss().data
