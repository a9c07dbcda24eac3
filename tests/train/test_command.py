"""`gpukit train`: what it says before it starts, and what it refuses, each in a sentence."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from gpukit import benchmark, cli, hardware, kernels
from gpukit.accounting import models
from gpukit.train import data, plan, presets
from gpukit.train.loop import Trainer
from gpukit.train.record import Record, read_settings
from tests.train import corpus


def test_the_plan_of_gpt2(capsys):
    assert cli.main(["train", "--preset", "gpt2", "--dry-run", "--gpu", "h200"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpt2: 124,439,808 parameters, 12 layers, hidden 768, MHA\n")
    assert "64 sequences x 1,024 tokens = 65,536 tokens" in out and "time, modelled:" in out and "H200 SXM" in out


def test_flops_per_token_are_those_of_the_formula():
    config = plan.accounting_config("gpt2", presets.preset("gpt2").settings.model)
    assert plan.flops_per_token(config, 1024) == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    untied = models.preset("llama3-8b")
    assert plan.multiplied_parameters(untied) == models.parameters(untied).total - 128256 * 4096


def test_the_memory_of_gpt2_is_what_an_h200_took():
    """In 8 passes: gpukit/results/h200/ladder-gpt2.csv, rung "fused AdamW", which has 9.2 GB."""
    settings = presets.preset("gpt2").settings.replace(micro_batches=8)
    config = plan.accounting_config("gpt2", settings.model)
    with open(benchmark.RESULTS / "h200" / "ladder-gpt2.csv", newline="") as file:
        found = next(int(row["peak_bytes"]) for row in csv.DictReader(file) if row["rung"] == "fused AdamW")
    assert plan.step_memory(config, settings).total_bytes == pytest.approx(found, rel=0.05)


def test_the_memory_of_gpt2_with_our_kernels_is_what_an_h200_took():
    """In one pass, rung "gpukit attention": the logits of a chunk alone are there."""
    settings = presets.preset("gpt2").settings.replace(kernels="gpukit")
    config = plan.accounting_config("gpt2", settings.model)
    with open(benchmark.RESULTS / "h200" / "ladder-gpt2.csv", newline="") as file:
        found = next(int(row["peak_bytes"]) for row in csv.DictReader(file) if row["rung"] == "gpukit attention")
    assert plan.step_memory(config, settings).total_bytes == pytest.approx(found, rel=0.05)


def test_mfu_is_said_with_its_formula_and_peak():
    settings = presets.preset("gpt2").settings
    config = plan.accounting_config("gpt2", settings.model)
    text = plan.mfu_formula(config, settings, hardware.gpu("h200"), 2, "")
    assert "6 x 123,653,376 + 12 x 12 x 768 x 1,024" in text and "2 x 989.4 TFLOP/s, H200 SXM, bf16, dense" in text
    assert plan.mfu_formula(config, settings, None, 1, "this CPU") == "MFU not given: no peak of this CPU is known"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--preset", "gtp2"], "train: no preset is called 'gtp2'; did you mean 'gpt2'?"),
        (["--seq", "129"], "train: seq must be at most 128, the context that the model tiny is built for, got 129"),
        (["--steps", "0"], "train: steps must be a whole number from 1"),
        (["--rate", "-1"], "train: rate must be a number above 0, got -1.0"),
        (["--gpu", "h200"], "--gpu plans for a GPU that need not be here: add --dry-run"),
        (["--dry-run", "--gpu", "h300"], "no GPU is called 'h300'; did you mean"),
        (
            ["--ladder", "--seq", "64"],
            "--ladder: the rungs themselves say what changes, so it takes --batch, --micro-batches",
        ),
        (["--resume", "--run", "/no/such"], "there is no run in /no/such to go on with: it has no config.json"),
    ],
)
def test_mistakes_get_one_sentence(options, sentence, capsys):
    assert cli.main(["train", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"gpukit: {sentence}") and error.count("\n") == 1


def test_a_large_preset_without_a_gpu_offers_the_small_one(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["train", "--preset", "gpt2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gpukit: there is no GPU here, and gpt2") and "--preset tiny is made for a CPU" in error
    assert cli.main(["train", "--device", "cuda"]) == 2
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path, capsys):
    settings = corpus.settings(tmp_path)
    Record(tmp_path, settings)
    assert cli.main(["train", "--run", str(tmp_path)]) == 2
    assert "holds a run already: --resume goes on with it" in capsys.readouterr().err
    assert cli.main(["train", "--run", str(tmp_path), "--resume", "--preset", "gpt2"]) == 2
    assert "is of the preset tiny, not gpt2" in capsys.readouterr().err
    assert read_settings(tmp_path) == settings
    (tmp_path / "config.json").write_text("{")
    assert cli.main(["train", "--run", str(tmp_path), "--resume"]) == 2
    assert "config.json is not what gpukit train writes" in capsys.readouterr().err


def test_the_tiny_preset_learns_in_a_few_steps(tmp_path):
    """A whole run ends below `reaches` (README.md says what was measured); 25 steps must be well on their way."""
    preset = presets.preset("tiny")
    assert preset.reaches and preset.measured and not preset.needs_gpu
    settings = preset.settings.replace(steps=25, log_every=25, checkpoint_every=25, eval_sequences=8, sample=0)
    text = data.prepare(settings.model["vocab_size"], Path(kernels.__file__).parent, tmp_path, say=lambda line: None)
    trainer = Trainer(settings, tmp_path / "run", text, say=lambda line: None)
    before = trainer.evaluate()
    assert trainer.run() == 0 and trainer.evaluate() < before - 1


def test_more_processes_than_gpus_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for name, value in (("WORLD_SIZE", 4), ("RANK", 2), ("LOCAL_RANK", 2)):
        monkeypatch.setenv(name, str(value))
    assert cli.main(["train", "--preset", "gpt2"]) == 2
    assert "each needs a GPU of its own: --nproc-per-node can be at most 2 here" in capsys.readouterr().err


def test_the_plan_of_four_gpus_with_shares(monkeypatch, capsys):
    options = ["train", "--preset", "llama-1b", "--dry-run", "--gpu", "h200", "--sharding", "fsdp"]
    for name, value in (("WORLD_SIZE", 4), ("RANK", 0)):
        monkeypatch.setenv(name, str(value))
    assert cli.main(options) == 0
    out = capsys.readouterr().out
    assert "over 4 processes, each with a share of the model" in out and "gathered" in out
    monkeypatch.setenv("RANK", "1")
    assert cli.main(options) == 0 and not capsys.readouterr().out


def test_a_small_model_runs_on_one_thread(monkeypatch):
    tiny, gpt2 = (presets.preset(name).settings for name in ("tiny", "gpt2"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert presets.threads(tiny, 8) == 1 and presets.threads(gpt2, 8) == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert presets.threads(tiny, 4) == 4


@pytest.mark.parametrize("name", presets.PRESETS)
def test_settings_survive_json(name):
    settings = presets.preset(name).settings
    assert presets.Settings(**settings.as_json()) == settings


def test_the_options_are_known_without_torch():
    code = "import sys; from gpukit import cli; cli._parser(); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "False\n"


def test_the_curves_are_drawn(tmp_path):
    from gpukit.widgets.training_run import loss_curves

    assert "No training run" in repr(loss_curves(tmp_path / "none"))
    record = Record(tmp_path / "a", corpus.settings(tmp_path))
    record.rewind(0)
    for step in range(1, 9):
        record.row(
            {
                "step": step,
                "tokens": 64 * step,
                "loss": 5 / step,
                "validation_loss": 6 / step if step % 4 == 0 else None,
            }
        )
    with open(record.metrics, "a") as file:
        file.write("9,57")  # a row that is being written
    picture = loss_curves(tmp_path / "a")
    assert picture.alt == "Loss by tokens. a: the loss goes from 5.00 to 0.62, the validation loss to 0.75."
    with pytest.raises(ValueError, match="x must be tokens, step or seconds, got 'days'"):
        loss_curves(tmp_path / "a", x="days")
