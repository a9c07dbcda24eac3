"""What notebook 03 says in numbers is what the accounting, PyTorch's counter and the recorded rows say."""

import json

import pytest

from gpukit.accounting import flops, memory, models, roofline, training
from gpukit.course import root
from gpukit.grading.stubs import clear
from gpukit.lessons import flops as lesson

SOLUTION = (root(__file__) / "solutions" / "flops.py").read_text()


def test_the_layers_are_the_model_without_its_head():
    whole = flops.forward_flops(lesson.LLAMA, lesson.BATCH, lesson.TOKENS, logits="none").total
    assert lesson.LLAMA.layers * sum(lesson._layer_operations().values()) == whole
    forward = lesson.layer().rows[-1][1]
    assert forward * 1e9 == pytest.approx(whole / lesson.LLAMA.layers)


def test_pytorch_counts_what_the_table_of_models_computes():
    for row in lesson.model_counts().rows:
        assert row[2] in (None, row[3]), row[0]


def step_flops(source: str):
    namespace: dict = {}
    exec(compile(source, "flops.py", "exec"), namespace)
    return namespace["step_flops"]


def test_the_evidence_shows_an_excess_with_the_stub_and_none_with_the_solution():
    said = {row[0]: row[-1] for row in lesson.evidence(step_flops(SOLUTION)).rows}
    assert set(said.values()) == {0}
    said = {row[0]: row[-1] for row in lesson.evidence(step_flops(clear(SOLUTION))).rows}
    assert said["as it is"] == said["layers = 4"] == 0 < said["tied = False"] < said["tied = False, vocab = 10000"]
    assert said["positions = 4096"] > 0


def test_the_saved_detective_is_the_stubs():
    cells = json.loads((root(__file__) / "notebooks" / "03_flops.ipynb").read_text())["cells"]
    shown = json.dumps(next(cell["outputs"] for cell in cells if cell["id"] == "evidence"))
    excess = {row[0]: row[-1] for row in lesson.evidence(step_flops(clear(SOLUTION))).rows}["positions = 4096"]
    assert f"{excess:,}" in shown, "saved outputs are made with the stubs"


def test_where_attention_takes_half():
    for name in ("gpt2", "llama3-8b"):
        half = lesson._half(name)
        assert flops.attention_share(name, half - 1) < 0.5 <= flops.attention_share(name, half)
    # (weights of a layer and its share of the head) / h, as the text says
    for name, each in (("gpt2", 17.5), ("llama3-8b", 14.0)):
        assert lesson._half(name) / models.preset(name).hidden == pytest.approx(each, rel=0.01)


def test_full_recomputation_costs_what_runs():
    rows = lesson.days().rows
    full = flops.step_flops("llama3-70b", 1, 8192, recompute="full").hardware * 15e12 / 8192
    assert rows[-1][1] * 1e24 == pytest.approx(full)
    assert rows[1][-1] == pytest.approx(2 * rows[0][-1]) == pytest.approx(143.9, abs=0.1)


def test_the_promise_is_below_the_reported_hours():
    hours = lesson._work_405b() / 400e12 / 3600
    assert 0.85 < hours / lesson._HOURS < 0.95, "the text speaks of a small rest"


def test_the_cosine_is_below_half_for_nearly_half_of_the_run():
    assert sum(row[1] for row in lesson.bands().rows) == pytest.approx(100)
    assert lesson._plan(15).share_below(0.5) == pytest.approx(0.465, abs=0.01)


def test_batches_that_do_not_fit_are_marked():
    for row in lesson.decode().rows:
        held = memory.inference_memory(lesson.LLAMA, row[1], 2048, prefill=2048 if row[0] == "prefill" else 1)
        assert (row[-1] == "yes") == held.fits(lesson.H100)
    assert [row[-1] for row in lesson.decode().rows[-2:]] == ["no", "no"]


def test_no_operation_of_the_widget_that_the_text_names_crosses_a_ridge():
    lowest = min(ridge for row in lesson.ridges().rows for ridge in row[-2:])
    low = {
        p.name: p.intensity
        for p in lesson.points()
        if p.name in ("ReLU", "GELU", "AdamW", "softmax", "attention, decode")
    }
    assert max(low.values()) <= 4 < 9.5 < lowest
    (linear,) = [p for p in lesson.points() if p.name == "linear, M = 64"]
    assert linear.intensity < min(row[-1] for row in lesson.ridges().rows) < 2 * linear.intensity


def test_the_corner_of_the_measured_layer_is_where_the_text_says():
    least, took = lesson._linear()
    share = {M: least[M] / took[M] for M in took}
    assert abs(min(share, key=share.get) - roofline.critical_batch(lesson.H200)) < 30
    assert max(share.values()) < 0.75


def test_the_best_model_for_llamas_budget():
    budget = 6 * 8.03e9 * 15e12
    assert training.chinchilla_parameters(budget) == pytest.approx(78e9, rel=0.01)
