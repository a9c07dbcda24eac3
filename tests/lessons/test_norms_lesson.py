"""The numbers of notebook 11, without its looks."""

from dataclasses import replace

import pytest
import torch

import gpukit
from gpukit import benchmark
from gpukit.lessons import layer, results
from gpukit.lessons import norms as lesson
from gpukit.reference import norms


def test_lines_move_ten_times_the_bytes_of_one_kernel():
    x, weight = torch.randn(64, 512).bfloat16(), torch.randn(512).bfloat16()
    with gpukit.trace() as eager:
        norms.rms_norm(x, weight)
    each = lesson.counted(eager, x.numel())
    assert sum(reads + writes for _, reads, writes in each) == pytest.approx(40, rel=0.02)
    assert [name for name, _, _ in each] == ["convert", "square", "mean", "multiply", "multiply", "convert"]


def test_digits_that_are_left():
    assert "4004001.6667 - 4004001.0000 = 0.6667" in lesson.digits().alt
    assert "4004001.75 - 4004001.00 = 0.75" in lesson.digits().alt


def test_squares_lose_their_digits_first():
    squares, centered = lesson.errors(
        (lambda x: x.square().mean() - x.mean().square(), lambda x: (x - x.mean()).square().mean())
    )
    assert all(a >= b for a, b in zip(squares[2:], centered[2:], strict=True))
    assert squares[-1] > 1 > centered[-1]


def test_groups_and_their_distances():
    shown = str(lesson.groups_table(torch.tensor([1.0, 3.0, 2.0, 2.0]), torch.tensor([9.0, 11.0])))
    assert "89.333" in shown and "4.667" in shown
    assert "is 2.667 from the one and 5.333 from the other" in lesson.two_groups([1, 3, 2, 2], [9, 11]).alt


def test_partial_sums():
    assert lesson.partial_bytes(528) == 2 * 528 * 4096 * 4
    assert "+133" in str(lesson.partial_table())


def test_measured_rows_are_those_of_graphs_where_all_have_one(tmp_path, monkeypatch):
    recorded = benchmark.rows("layer_norm")
    for mode in ("fwd", "bwd"):
        took, _ = lesson.judged("layer_norm", mode, lesson.SHAPE)
        assert set(took) >= set(lesson.NAMES), "a table has a column for each of these; the best may be another one"
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    calls = {r.provider: r for r in recorded if (r.mode, r.shape) == ("bwd", lesson.SHAPE)}
    graphs = {name: replace(row, mode="bwd-graph", median_ms=row.median_ms / 2) for name, row in calls.items()}
    benchmark.write([*calls.values(), *graphs.values()], tmp_path / "h200" / "layer_norm.csv")
    took, graph = lesson.judged("layer_norm", "bwd", lesson.SHAPE)
    assert graph and took.keys() == calls.keys() and {row.mode for row in took.values()} == {"bwd-graph"}
    del graphs["gpukit"]
    (tmp_path / "h200" / "layer_norm.csv").unlink()
    benchmark.write([*calls.values(), *graphs.values()], tmp_path / "h200" / "layer_norm.csv")
    took, graph = lesson.judged("layer_norm", "bwd", lesson.SHAPE)
    assert not graph and took.keys() == calls.keys() and {row.mode for row in took.values()} == {"bwd"}


def test_sentences_have_the_recorded_times():
    assert f"{lesson.micros('rms_norm', 'bwd', lesson.SHAPE, 'gpukit'):.0f} µs" in lesson.promise().data
    said = lesson.what_the_others_say().data
    kept = results.long_rows()["layer norm backward", (4096, 16384)]
    assert "At these shapes no other is faster." in said and "the fastest at" not in said
    assert f"take {kept.kept:.0f} µs with it and {kept.others:.0f} without" in said
    ours = sum(part.us("gpukit") for part in layer.PARTS if part.notebook == "11")
    assert f"{ours:,.0f} µs" in lesson.layer_line().data
