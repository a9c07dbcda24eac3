"""The measurement of patched models, on a small one and on the CPU, where only PyTorch's own can be timed."""

import pytest
import torch

from gpukit import benchmark, patched_models

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

TINY = patched_models.Model(
    "Llama",
    {
        "vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "eos_token_id": 66,
    },
    (2, 6), (1, 4),
)  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(patched_models.MODELS, "tiny", TINY)
    monkeypatch.setattr(patched_models, "NEW_TOKENS", 2)


def test_rows(tmp_path):
    said, file = [], tmp_path / "tiny.csv"
    rows = patched_models.run(
        "tiny", ["torch", "liger", "gpukit"], ["fwd+bwd"], device="cpu", out=file, rep_ms=1, say=said.append
    )
    assert [(row.op, row.provider, row.mode, row.shape) for row in rows] == [("patch-tiny", "torch", "fwd+bwd", (2, 6))]
    parameters = sum(p.numel() for p in TINY.build("cpu").parameters())
    assert rows[0].flops == (6 * parameters + 12 * 16 * 6) * 12 and rows[0].bytes == 2 * parameters
    assert [row.what for row in benchmark._read(file)] == [rows[0].what]
    assert "liger is not installed, skipped" in said and any("interpreter" in line for line in said), said


def test_generation():
    (row,) = patched_models.run("tiny", ["torch"], ["wall"], device="cpu", rep_ms=1, say=lambda text: None)
    assert row.mode == "wall" and row.shape == (1, 4) and row.median_ms > 0


def test_a_wrong_loss_is_an_error(monkeypatch):
    step = patched_models._step
    monkeypatch.setattr(
        patched_models, "_step", lambda model, ids: step(model, ids) * (2 if "_gpukit_patch" in vars(model) else 1)
    )
    with pytest.raises(benchmark.BenchmarkFailed, match="tiny: gpukit's loss is "):
        patched_models.run("tiny", ["gpukit"], ["fwd+bwd"], device="cpu", rep_ms=1, say=lambda text: None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("llama-2b",), "model must be among gpt2, llama-1b, .*, got llama-2b"),
        (("tiny", ["lgier"]), "providers must be among torch, .*, got lgier"),
        (("tiny", ["torch"], ["bwd"]), r"modes must be among fwd\+bwd, wall, got bwd"),
    ],
    ids=["model", "provider", "mode"],
)
def test_unknown_names(given, message):
    with pytest.raises(ValueError, match=message):
        patched_models.run(*given, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert patched_models.main([]) == 2
    assert capsys.readouterr().err == "gpukit.patched_models needs a GPU; nothing was measured\n"


def test_every_model_can_be_patched():
    """On the meta device, where they take no memory."""
    from gpukit.huggingface.patching import patch

    for name, model in patched_models.MODELS.items():
        report = patch(model.build("meta"))
        assert not report.kept and report.count("attention") and report.count("loss"), name
