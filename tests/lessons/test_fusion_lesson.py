"""The numbers that notebook 08 shows."""

from pathlib import Path

import pytest
import torch

import gpukit
from gpukit import notebooks
from gpukit.lessons import fusion as lesson
from gpukit.lessons import results


def test_the_gate_moves_what_pytorch_moves():
    x = torch.rand(64, 32)
    with gpukit.trace() as t:
        score = torch.sigmoid(x)
        score / score.sum(-1, keepdim=True)
    plan = lesson.gate_graph(64, 32).plan()
    assert (t.read_bytes, t.write_bytes) == (plan.read_bytes, plan.write_bytes)


def test_the_published_profile_has_the_trips_of_the_formula():
    assert "the 9 kernels take 17.127 ms and move 22 tensors" in lesson.what_the_profile_says().data
    assert "moves two: **11.1** times the time, for **11** times the trips" in lesson.what_the_profile_says().data


def test_blocks_and_their_start():
    assert lesson.blocks(256) == 262_144 and lesson.blocks(2048) == 32_768
    assert lesson.start_us(256) == pytest.approx(157.6, abs=0.1)


def test_six_ways_to_compute_gelu():
    rows = lesson.gelu_times({}).rows
    assert len(rows) == 6 and rows[0][1] == pytest.approx(707, abs=1)
    assert all(row[1] == pytest.approx(64.2, abs=0.1) for row in rows[1:])
    assert rows[4][2] > lesson.start_us(256)


def test_16_bytes_per_thread_are_as_fast_as_the_library_on_an_h100():
    us = {(row.provider, row.dtype): row.median_ms * 1e3 for row in results.rows("gelu_in_cuda", "h100-sxm")}
    for dtype, apart in (("bfloat16", 2), ("float32", 1.2)):
        assert us["cuda-vector", dtype] == pytest.approx(us["library", dtype], rel=0.02)
        assert us["cuda", dtype] > apart * us["library", dtype], "the text says that starting blocks hides in float32"
    assert f"one element per thread takes {us['cuda', 'float32']:.0f} µs" in lesson.what_the_times_say().data


def test_what_is_kept_is_what_backward_reads():
    for name, kept, *_ in lesson.recomputation().rows:
        graph = next(g for g in lesson.sigmoid_graphs() if g.name.endswith(_KEEPING[name]))
        first = next(i for i, op in enumerate(graph.ops) if op.starts)
        made = {op.output for op in graph.ops[first:]}
        assert {x for op in graph.ops[first:] for x in op.inputs} - made - {"dy"} == set(kept.split()), name


_KEEPING = {
    "PyTorch, op by op": "keeping all",
    "compute again, op by op": "keeping nothing",
    "keep all, two fused kernels": "keeping all",
    "keep s1 and s2, fused": "keeping s1 and s2",
    "keep x and y, fused: torch.compile": "keeping y",
    "keep nothing but x, fused": "keeping nothing",
}


def test_trips_of_three_sigmoids():
    assert [row[2] for row in lesson.recomputation().rows] == [15, 21, 9, 8, 6, 5]


def test_fusing_two_kernels_explains_a_factor_of_two():
    assert all(row[2] == pytest.approx(2, abs=0.01) and row[1] > 6 for row in lesson.claims().rows)


def test_both_kernels_in_cuda_are_shown_whole():
    one, vector = (lesson.cuda_source(name).data for name in ("gelu_kernel", "gelu_vector_kernel"))
    assert "tanhf" in one and one.count("__global__") == vector.count("__global__") == 1 and "uint4" in vector


def test_saved_outputs_show_what_is_recorded_now(monkeypatch):
    """Two cells keep their saved outputs in every run, since a GPU measures in them; those saved are recorded rows."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = Path(__file__).resolve().parents[2] / "notebooks" / "08_fusion.ipynb"
    outputs = {cell["id"]: cell.get("outputs") for cell in notebooks.read(path)["cells"]}
    ((times,), (text,)) = outputs["measured"], outputs["compiled"]
    assert "".join(times["data"]["text/plain"]) == repr(lesson.gelu_times({}))
    assert "".join(text["data"]["text/markdown"]) == lesson.compiled(torch.tanh).data
