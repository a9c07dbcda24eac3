"""What notebook 02 says in numbers is what the accounting, PyTorch and the recorded rows say."""

import re

import pytest

from gpukit.accounting import memory, models
from gpukit.lessons import memory as lesson


def numbers(text) -> list[float]:
    return [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*\.?\d*", getattr(text, "data", str(text)))]


def test_the_layer_and_the_tables_are_the_whole_model():
    n = models.parameters(lesson.LLAMA)
    assert lesson.LLAMA.layers * lesson.layer_parameters() + n.embedding + n.head + lesson.LLAMA.hidden == n.total


def test_the_budget_is_what_the_calculator_adds_up():
    mb = {row[0]: row[1] for row in lesson.budget().rows}
    states = sum(size for name, size in mb.items() if name.startswith(("weights", "gradients", "AdamW")))
    assert states * 1e6 == 16 * lesson.layer_parameters()
    whole = memory.training_memory(lesson.LLAMA, lesson.BATCH, lesson.TOKENS)
    layers = lesson.LLAMA.layers
    assert layers * mb["activations, FlashAttention"] * 1e6 == pytest.approx(whole.parts["activations"])
    cache = memory.kv_cache_bytes(lesson.LLAMA, lesson.BATCH, lesson.TOKENS)
    assert layers * mb["KV cache, when serving"] * 1e6 == pytest.approx(cache)


def test_the_bars_under_the_layer_are_all_that_it_keeps():
    assert sum(lesson._saved_steps().values()) == lesson.layer_activations()


def test_a_layer_run_by_pytorch_keeps_what_the_formula_says():
    kept = lesson.SavedByBlock()
    assert kept.bytes == kept.computed
    assert 16 < kept.bytes / kept.unit < 16.1


def test_the_formula_lacks_the_table_of_positions():
    printed, counted, short = (each for each in numbers(lesson.formula()) if each > 1000)
    assert counted - printed == short == models.preset("gpt2").positions * 768


def test_the_promise_and_the_verdict_are_the_rows():
    rows = [row[-1] for row in lesson.measured().rows]
    assert sum(abs(off) < 0.001 for off in rows) == len(rows) - 1, "the text speaks of one exception"
    assert len(rows) >= 16


def test_only_both_switches_make_the_long_sequences_fit():
    for zero in range(4):
        for recompute in memory.RECOMPUTE:
            layout, run = memory.Parallel(data=8, zero=zero), memory.Run(recompute=recompute)
            held = memory.training_memory(lesson.LLAMA, 8, 32768, parallel=layout, run=run)
            assert held.fits(lesson.H100) == (zero == 3 and recompute == "full")
            largest = max(held.parts, key=held.parts.get)
    assert largest == "working"


def test_scores_overtake_the_states_where_the_text_says():
    lengths, grown, states = lesson._growth()
    overtaken = [T for T, size in zip(lengths, grown["scores kept"], strict=True) if size > states]
    assert overtaken[0] == 8192
