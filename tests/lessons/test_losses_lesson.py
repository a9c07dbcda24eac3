"""The numbers of notebook 15, without its looks."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import gpukit
from gpukit import benchmark, live
from gpukit.kernels.linear_cross_entropy import chunk_tokens
from gpukit.lessons import layer, results
from gpukit.lessons import losses as lesson


@pytest.fixture(scope="module")
def eager():
    x = torch.empty(64, 1000, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with gpukit.trace() as trace:
        F.cross_entropy(x, torch.empty(64, dtype=torch.int64, device="meta")).backward()
    return trace, x


def test_pytorch_makes_six_passes(eager):
    assert lesson.passes(*eager) == {"PyTorch reads": 3, "PyTorch writes": 3, "least, both": 2}
    assert [name for name, _, _ in lesson.counted(*eager)] == [*lesson.RESULTS]
    assert "makes 6 passes" in lesson.what_the_passes_say(*eager) and "0 " in str(lesson.passes_table(*eager))


def test_pictures_show_what_autograd_computes():
    x = lesson.LOGITS.clone().requires_grad_()
    loss = F.cross_entropy(x[None], torch.tensor([lesson.TARGET]))
    loss.backward()
    assert lesson.gradient() == pytest.approx(x.grad.tolist())
    assert f"so the loss is {loss:.2f}." in lesson.from_logits().alt
    assert f"The loss, {loss:.2f}, is the distance" in lesson.as_a_distance().alt
    assert f"{lesson.WORDS[0]} {x.grad[0]:+.2f}" in lesson.pulls().alt
    x = x.detach()
    soft = F.cross_entropy(x[None], torch.tensor([lesson.TARGET]), label_smoothing=0.1)
    weights = [0.1 / 5 + 0.9 * (i == lesson.TARGET) for i in range(5)]
    assert float(soft) == pytest.approx(float(x.logsumexp(0) - (torch.tensor(weights).double() * x).sum()))
    assert f"{weights[lesson.TARGET]:.2f} for the right word" in lesson.smoothed_targets().alt


def test_terms_of_the_divergence():
    whole = F.kl_div(torch.log_softmax(lesson.LOGITS, 0), lesson.TEACHER, reduction="sum")
    assert sum(lesson.terms()) == pytest.approx(float(whole)) and float(lesson.TEACHER.sum()) == pytest.approx(1)
    assert min(lesson.terms()) < 0 < whole, "the text says that a term may be negative"
    assert f"add up to {whole:.3f}" in lesson.two_distributions().alt


def test_orders_agree_and_the_definition_overflows():
    row = torch.tensor([90.0, 1.0, 95.0, 94.0, -3.0, 0.5])
    state = row.max(), (row - row.max()).exp().sum()
    ours, theirs, typed = (line[-1] for line in lesson.joined(row, 3, {"all": state}).rows)
    assert ours == pytest.approx(theirs) and math.isnan(typed)


def test_only_the_z_loss_sees_a_shift():
    first, last = lesson.shifted([2.0, 0.5, -1.0, 0.25], 0, (0, 100)).rows
    assert last[1:3] == pytest.approx(first[1:3])
    assert last[3] > 1000 * first[3] and last[4] != pytest.approx(first[4], abs=0.01)
    assert float(torch.tensor(100.25).bfloat16()) == 100, "the text says to what 100.25 is rounded"


def test_views_hold_what_copies_free():
    rows = lesson.held({"view": lambda big: big[:1], "copy": lambda big: big[:1].clone()}).rows
    assert [row[1] for row in rows] == pytest.approx([8, 0], abs=1e-3)


def test_parts_keep_a_tensor_of_all_logits_and_chunks_do_not():
    x, weight = (torch.randn(n, 8, requires_grad=True) for n in (64, 512))
    target = torch.arange(64)

    def once():
        return F.cross_entropy(x @ weight.T, target)

    def in_parts():
        pairs = zip(x.split(8), target.split(8), strict=True)
        return sum(F.cross_entropy(a @ weight.T, t, reduction="sum") for a, t in pairs) / 64

    logits = 4 * 64 * 512
    runs = lesson.watched({"once": once, "parts": in_parts})
    assert runs["once"].peak_bytes == pytest.approx(3 * logits, rel=0.01)
    assert logits < runs["parts"].peak_bytes < 2 * logits
    said = lesson.what_the_parts_say(runs, x, weight).data
    assert f"from {3 * logits / 2**20:.1f} to" in said and f"({logits / 2**20:.0f} MiB)" in said


def test_peaks_of_the_last_layer():
    once, chunked = live.watch(), live.watch()
    tokens, width, classes = lesson.LINEAR
    once.peak_bytes = 3 * 2 * tokens * classes
    chunked.peak_bytes = 2 * (lesson.CHUNK * classes + (tokens + classes) * width)
    said = lesson.what_memory_says(once, chunked)
    assert "5.87 GiB: 3 tensors" in said and "1.29 GiB, of which 0.98" in said
    rows = lesson.took("linear_cross_entropy", "fwd+bwd", lesson.LINEAR)
    chunks = chunked.peak_bytes + 2 * (chunk_tokens(tokens, classes, width) - lesson.CHUNK) * classes
    for name, counted in (("library", once.peak_bytes), ("gpukit", chunks)):
        assert rows[name].peak_bytes == pytest.approx(counted, rel=0.001), "measured as it is counted"
    assert "1.96 GiB" in lesson.last_layer().alt


def test_sentences_have_the_recorded_times():
    rows = lesson.both()
    assert f"**{lesson.us(rows['library']):,.0f} µs**" in lesson.promise().data
    worth = {line[0]: line[3] for line in lesson.measured().rows}
    copy = results.copy_gbps("cross_entropy")
    assert worth["PyTorch"] == pytest.approx(rows["library"].median_ms * copy * 1e6 / (2 * lesson.M * lesson.V))
    said = lesson.what_was_measured().data
    assert f"holds {rows['library'].peak_bytes / (2 * lesson.M * lesson.V):.0f} tensors" in said
    assert rows["compile"].peak_bytes < rows["library"].peak_bytes, "torch.compile saves tensors"
    assert f"{lesson.us(rows['library']):,.0f}" in lesson.measured_bars().alt
    ours = rows["gpukit-inplace"].median_ms * layer.TOKENS / lesson.M
    assert f"**{ours:.1f} ms**" in lesson.layer_line().data


def test_a_row_that_does_not_fit_is_read_twice():
    found = lesson.in_place_passes((4096, 32_000))
    assert found[4096] == pytest.approx(2, abs=0.01) and found[32_000] == pytest.approx(2.745, abs=0.001)
    table = lesson.in_place_table(found)
    assert [row[2] is None for row in table.rows] == [True, False], "no time where none is recorded"
    said = lesson.what_in_place_does(found | {lesson.V: 2.87}).data
    kept = results.long_rows("h200")["cross-entropy in place", lesson.SHAPE]
    assert f"takes {kept.kept:.0f} µs there (measured)" in said
    worth = [row[3] for row in lesson.in_place_table(found | {lesson.V: 2.87}).rows[1:]]
    assert 2 < worth[-1] < 2.87, "another kernel's, which reads each logit once"
    assert "2.87 passes" in said and "launch-bound" in said


def test_chunks_save_memory_and_no_time_is_lost():
    rows = lesson.took("linear_cross_entropy", "fwd+bwd", lesson.LINEAR)
    assert rows["gpukit"].median_ms < min(rows["compile"].median_ms, rows["library"].median_ms)
    assert min(rows.values(), key=lambda row: row.peak_bytes) is rows["liger-triton"]
    slowest = max(rows.values(), key=lambda row: row.median_ms)
    assert slowest.provider.startswith("liger"), "in one of its implementations, Liger takes longest"
    assert lesson.chunk_ms(lesson.CHUNK) == pytest.approx(4.1, abs=0.1) and lesson.chunk_ms(4096) == pytest.approx(
        1.0, abs=0.05
    )
    assert "4,096 tokens at a time" in lesson.what_linear_says().data
    assert len(lesson.linear().rows) == 4


def test_the_divergence_in_half_the_bytes():
    wide, narrow = (
        lesson.took("kl_div", "fwd+bwd", (lesson.M, 32_768), dtype)["gpukit"] for dtype in ("float32", "bfloat16")
    )
    assert narrow.median_ms > 0.5 * wide.median_ms, "the text calls it an exception"
    said = lesson.what_kl_says().data
    assert f"{wide.gbps / results.copy_gbps('kl_div'):.0%} of the rate of a copy" in said
    assert lesson.kl().rows[-1][1:] == pytest.approx((lesson.us(wide), lesson.us(narrow)))


SENTENCES = (
    lesson.promise, lesson.measured, lesson.measured_bars, lesson.what_was_measured, lesson.linear, lesson.what_linear_says,
    lesson.kl, lesson.what_kl_says, lesson.layer_line, lambda: lesson.what_in_place_does({lesson.V: 2.87}),
)  # fmt: skip


def test_the_lesson_opens_where_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    for sentence in SENTENCES:
        said = sentence().data
        assert "No run is recorded" in said or not said
    once = live.watch()
    assert "(measured)" not in lesson.what_memory_says(once, once)
    assert lesson.in_place_table({4096: 2.0}).rows == [("4,096", 2.0, None, None)]


def test_the_lesson_shows_rows_that_are_recorded_later(tmp_path, monkeypatch):
    """With other times the sentences have other numbers; the best of the others is not another kernel of ours."""
    recorded = benchmark.rows("cross_entropy")
    times = {
        "gpukit": 0.773,
        "gpukit-inplace": 0.737,
        "library": 2.355,
        "compile": 1.343,
        "liger-triton": 1.4,
        "torch": 6.0,
    }
    slow = 9.0  # of whatever other library there are rows
    changed = [replace(row, median_ms=times.get(row.provider, slow)) if row.op != "copy" else row for row in recorded]
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    (tmp_path / "h200").mkdir()
    benchmark.write(changed, tmp_path / "h200" / "cross_entropy.csv")
    assert "**2,355 µs**" in lesson.promise().data and "**737 µs**" in lesson.promise().data
    assert "1.74 times as fast as the best of the others (torch.compile)" in lesson.what_was_measured().data
    assert "No run" in lesson.layer_line().data, "the last layer's rows are missing"
