"""The ladder: its rungs, what it predicts, and that all of them train the same model."""

import csv
import itertools
import math
import re
from pathlib import Path

import pytest
import torch

from gpukit import cli, hardware, profiling
from gpukit.train import data, ladder, presets
from gpukit.train.compiled import Miscompiled
from gpukit.train.loop import Trainer
from tests.train import corpus, timeline

H200 = hardware.gpu("h200")
ROOT = Path(__file__).parents[2]


def test_each_rung_changes_what_its_start_was():
    found = ladder.how(passes=8)
    assert next(iter(found)) == "naive" and found["naive"][2] == ladder.How(passes=8)
    for rung, start, way in found.values():
        if start:
            changed = {name for name, value in vars(way).items() if value != getattr(found[start][2], name)}
            assert changed and changed == set(rung.changes), rung.name
    assert found["one pass"][2].passes == 1
    assert list(ladder.how(["fp8", "naive"])) == ["fp8", "naive"]
    with pytest.raises(ValueError, match="no rung is called 'fp9'"):
        ladder.how(["fp9"])
    with pytest.raises(ValueError, match="precision must be"):
        ladder.How(precision="int8")


def test_the_model_of_a_step_gets_faster_and_smaller_as_it_should():
    settings = presets.preset("gpt2").settings
    ms, memory = {}, {}
    for name, (_, _, way) in ladder.how(passes=8).items():
        seconds, memory[name] = ladder.predict(settings, way, H200)
        ms[name] = seconds * 1e3
    main = [rung.name for rung in ladder.RUNGS if not rung.starts_from]
    assert all(ms[b] <= ms[a] for a, b in itertools.pairwise(main))
    # Above the least that the products take at the peak, and attention with all of the square.
    flops = ladder.plan.flops_per_token(ladder.plan.accounting_config("gpt2", settings.model), settings.seq)
    assert ms["naive"] > flops * settings.tokens_per_step / H200.peak("fp32") * 1e3
    assert ms["bf16 weights"] > 0.8 * flops * settings.tokens_per_step / H200.peak("bf16") * 1e3
    assert memory["chunked loss"] < memory["torch.compile"]
    assert memory["recomputation"] < memory["bf16 weights"] and ms["recomputation"] > ms["bf16 weights"]


@pytest.mark.parametrize("name", ["gpt2", "gpt-1.3b", "llama-1b"])
def test_the_recorded_rungs_exist_and_agree_with_their_times(name):
    """Rows can be read, and time, tokens and MFU of each belong together."""
    settings = presets.preset(name).settings
    flops = ladder.plan.flops_per_token(ladder.plan.accounting_config(name, settings.model), settings.seq)
    path = ladder.benchmark.RESULTS / "h200" / f"ladder-{name}.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == ladder.COLUMNS and len({row["rung"] for row in rows}) == len(rows)
    for row in rows:
        assert row["rung"] in ladder.how() and row["starts_from"] == ladder.how()[row["rung"]][1]
        tokens = int(row["batch"]) * int(row["seq"])
        assert int(row["tokens_per_s"]) == pytest.approx(tokens / float(row["step_ms"]) * 1e3, rel=1e-3)
        assert float(row["mfu"]) == pytest.approx(int(row["tokens_per_s"]) * flops / H200.peak("bf16"), abs=1e-3)


def test_the_readme_shows_recorded_rows():
    with (ladder.benchmark.RESULTS / "h200" / "ladder-gpt2.csv").open(newline="") as file:
        recorded = {(int(row["tokens_per_s"]), f"{float(row['mfu']):.1%}") for row in csv.DictReader(file)}
    shown = (ROOT / "docs" / "ladder.svg").read_text(encoding="utf-8")  # which the README shows
    rows = re.findall(r">([\d,]+) tokens/s, ([\d.]+)% MFU<", shown)
    assert len(rows) == 8 and {(int(tokens.replace(",", "")), f"{share}%") for tokens, share in rows} <= recorded


def test_all_ways_train_the_same_model(tmp_path):
    """Those that a CPU can run: the losses differ by rounding alone."""
    text, settings = corpus.prepared(tmp_path), corpus.settings(tmp_path / "text", steps=5)
    ways = [
        ladder.How(passes=2),
        ladder.How(attention="pytorch"),
        ladder.How(attention="pytorch", recompute="cheap"),
        ladder.How(attention="pytorch", recompute="blocks", optimizer="fused"),
    ]
    first, *others = [ladder.measure(settings, way, text, torch.device("cpu")).losses for way in ways]
    assert len(first) == 5 and first[-1] < first[0]
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-4)
    # bf16 throughout, with gpukit's AdamW: rounding to 8 bits of mantissa moves the loss by less than the steps do.
    rounded = ladder.measure(settings, ladder.How(precision="bf16", optimizer="gpukit"), text, torch.device("cpu"))
    assert rounded.losses == pytest.approx(first, rel=0.02)


def test_explicit_attention_is_attention():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    for causal in (False, True):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        torch.testing.assert_close(ladder.explicit_attention(q, k, v, causal), expected)


def test_rows_of_a_rung_are_replaced_and_stay_in_order(tmp_path, monkeypatch):
    text = corpus.prepared(tmp_path)
    monkeypatch.setattr(data, "prepare", lambda *_, **__: text)
    settings = corpus.settings(tmp_path / "text", steps=5)
    said = []
    for names in (["FlashAttention", "naive"], ["naive"]):
        ladder.climb(settings, names, passes=2, device="cpu", folder=tmp_path, say=said.append)
    with (tmp_path / "ladder-tiny.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["rung"] for row in rows] == ["naive", "FlashAttention"]
    assert all(math.isfinite(float(row["loss"])) and float(row["step_ms"]) > 0 for row in rows)
    with (tmp_path / "ladder-tiny-losses.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * 5
    assert said[0].startswith("FlashAttention: scores never written") and "tokens/s" in said[1]
    assert all(len(sentence) <= 100 for sentence in said)
    with pytest.raises(ValueError, match="passes must divide batch"):
        ladder.climb(settings, passes=3, device="cpu")
    with pytest.raises(ValueError, match="steps must be"):
        ladder.climb(settings.replace(steps=4), device="cpu")


def test_the_command(capsys):
    assert cli.main(["train", "--rungs", "naive"]) == 2
    assert "add --ladder" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert cli.main(["train", "--preset", "gpt2", "--ladder"]) == 2
        assert "gpt2 needs a GPU, and there is none here: --preset tiny" in capsys.readouterr().err


def test_a_rung_without_enough_memory_takes_its_old_losses_along(tmp_path):
    path, columns = tmp_path / "losses.csv", ("rung", "step", "loss")
    ladder._merge(path, columns, "naive", [("naive", 1, "3.0"), ("naive", 2, "2.9")])
    ladder._merge(path, columns, "fp8", [("fp8", 1, "3.1")])
    ladder._merge(path, columns, "naive", [])
    assert path.read_text() == "rung,step,loss\nfp8,1,3.1\n"


def test_the_vocabulary_is_rounded_up_where_that_is_cheap():
    assert presets.padded(50_257) == 50_304 and presets.padded(128_256) == 128_256 and presets.padded(300) == 300
    settings = presets.preset("gpt2").settings
    assert settings.shape["vocab_size"] == 50_304 and settings.model["vocab_size"] == 50_257


def test_a_wrongly_compiled_model_is_found_at_its_first_loss(tmp_path, monkeypatch):
    """A compiler that forgets a norm: neither the ladder nor the loop trains with it."""

    def compiled(model, **options):
        def called(inputs, targets):
            with torch.no_grad():
                kept = model.norm.weight.clone()
                model.norm.weight.zero_()
            loss = model.forward(inputs, targets)
            with torch.no_grad():
                model.norm.weight.copy_(kept)
            return loss

        return called

    monkeypatch.setattr(torch, "compile", compiled)
    settings = presets.preset("tiny").settings.replace(batch=2, steps=5, seq=16)
    text = corpus.prepared(tmp_path)
    way = ladder.How(compiled=True)
    wrong = ladder.Trained(settings, way, text, torch.device("cpu"))
    with pytest.raises(Miscompiled, match=r"first loss is .* and the model's own is .*190517.*Start again"):
        wrong.step()
    monkeypatch.setattr(torch, "compile", lambda model, **options: lambda *batch: model.forward(*batch))
    right = ladder.Trained(settings, way, text, torch.device("cpu"))
    assert right.step().isfinite() and right.checked

    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda model: setattr(model, "_compiled_call_impl", compiled(model))
    )
    trainer = Trainer(
        corpus.settings(tmp_path / "text", steps=2, compile=True), tmp_path / "run", text, say=lambda line: None
    )
    with pytest.raises(Miscompiled):
        trainer.train_step()


def test_the_timeline_of_a_step():
    """It begins at the first matrix product, kernels are told apart by their names, and what no picture shows is bridged."""
    spans = [
        profiling.Span("Memcpy HtoD", "kernel", 0, 90_000), profiling.Span("nvjet_sm90_tst_192x192", "kernel", 100_000, 1000),
        profiling.Span("flash_attention_fwd_hopper_kernel", "kernel", 101_000, 500),
        profiling.Span("triton_poi_fused_gelu", "kernel", 101_500, 300), profiling.Span("cross_entropy_rows_kernel", "kernel", 101_800, 200),
        profiling.Span("cutlass_80_simt_sgemm", "kernel", 101_000, 10),
    ]  # fmt: skip
    rows = timeline.rows("naive", profiling.Profile(tuple(spans), "H100"))
    assert [tuple(row.values())[1:] for row in rows] == [
        ("matrix products", "0.00", "1.01", "1.01"), ("attention", "1.00", "0.50", "0.50"),
        ("everything else", "1.50", "0.30", "0.30"), ("loss", "1.80", "0.20", "0.20"),
    ]  # fmt: skip
