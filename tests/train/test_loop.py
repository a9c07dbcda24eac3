"""The loop: a run that was stopped goes on bit for bit, and what goes wrong is a sentence."""

import dataclasses
import errno
import os
import signal
import subprocess
import sys

import pytest
import torch

from gpukit.train import checkpoint, loop
from gpukit.train.loop import NotFinite, Trainer
from gpukit.train.model import Operations
from gpukit.train.record import COLUMNS, TIMED, read_metrics, read_settings
from tests.train import corpus


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return corpus.prepared(folder), folder / "text"


def trainer(tmp_path, text, name="run", *, resume=False, operations=None, said=None, dropout=0.0, **changes) -> Trainer:
    say = (said if said is not None else []).append
    settings = corpus.settings(text[1], **changes).replace(model={**corpus.MODEL, "dropout": dropout})
    return Trainer(settings, tmp_path / name, text[0], resume=resume, operations=operations, say=say)


def numbers(folder):
    """The rows of a run, without what is timed."""
    return [{name: row[name] for name in COLUMNS if name not in TIMED} for row in read_metrics(folder / "metrics.csv")]


def test_a_run_is_recorded(tmp_path, text):
    said = []
    run = trainer(tmp_path, text, said=said)
    assert run.run() == 0
    rows = numbers(tmp_path / "run")
    assert [int(row["step"]) for row in rows] == [*range(1, 13)]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) - 0.3
    assert [bool(row["validation_loss"]) for row in rows] == [False, False, False, True] * 3
    assert (tmp_path / "run" / "samples.txt").read_text().count("=== step") == 3
    assert read_settings(tmp_path / "run") == run.settings
    assert len([line for line in said if "tokens/s" in line]) == 12


def test_tensorboard_is_written_where_it_is_installed(tmp_path, text):
    pytest.importorskip("tensorboard", exc_type=ImportError)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trainer(tmp_path, text)
    assert run.run() == 0
    run.record.close()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    for name in ("loss", "validation_loss"):
        written = [(event.step, pytest.approx(event.value)) for event in events.Scalars(name)]
        assert written == [(int(row["step"]), float(row[name])) for row in rows if row[name]]


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.2},
        {"micro_batches": 2, "dtype": "bf16", "recompute": "full", "dropout": 0.2},
        {"optimizer": "gpukit"},
    ],
    ids=["plain", "bf16", "gpukit"],
)
def test_a_run_that_is_stopped_goes_on_bit_for_bit(tmp_path, text, changes):
    changes = {"steps": 8, **changes}
    assert trainer(tmp_path, text, "whole", **changes).run() == 0
    stopped = trainer(tmp_path, text, "parts", **changes)
    steps = stopped.train_step

    def interrupted(**options):
        if stopped.step == 5:
            raise KeyboardInterrupt  # nothing is saved: step 4's checkpoint is the last
        return steps(**options)

    stopped.train_step = lambda norm_wanted: interrupted(norm_wanted=norm_wanted)
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    torch.manual_seed(99)
    again = trainer(tmp_path, text, "parts", resume=True, **changes)
    assert again.step == 4 and again.run() == 0
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert (tmp_path / "parts" / "samples.txt").read_text() == (tmp_path / "whole" / "samples.txt").read_text()


def test_passes_add_up_to_one_batch(tmp_path, text):
    for name, passes in (("one", 1), ("four", 4)):
        trainer(tmp_path, text, name, micro_batches=passes, steps=4).run()
    for a, b in zip(numbers(tmp_path / "one"), numbers(tmp_path / "four"), strict=True):
        for kind in ("loss", "validation_loss"):
            assert a[kind] == b[kind] == "" or float(a[kind]) == pytest.approx(float(b[kind]), rel=1e-4)


def test_to_compute_again_changes_no_bit(tmp_path, text):
    for name in ("none", "full"):
        trainer(tmp_path, text, name, recompute=name, steps=4, dropout=0.2).run()
    assert numbers(tmp_path / "none") == numbers(tmp_path / "full")


def test_both_optimizers_agree(tmp_path, text):
    for name in ("torch", "gpukit"):
        trainer(tmp_path, text, name, optimizer=name, steps=4).run()
    for a, b in zip(numbers(tmp_path / "torch"), numbers(tmp_path / "gpukit"), strict=True):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-3)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends(tmp_path, text, number, status):
    said = []
    run = trainer(tmp_path, text, said=said)
    before, say = signal.getsignal(number), run.say

    def told(line):
        say(line)
        if line.startswith("step  6"):
            os.kill(os.getpid(), number)

    run.say = told
    assert run.run() == status and signal.getsignal(number) is before
    assert said[-1].startswith(f"{number.name}: stopped after step")
    assert checkpoint.newest(tmp_path / "run" / "checkpoints").step == run.step == 7


def test_a_loss_that_is_no_number_stops_the_run(tmp_path, text):
    calls = []

    def loss(x, weight, targets):
        calls.append(1)
        return Operations().loss(x, weight, targets) * (float("nan") if x.requires_grad and len(calls) > 6 else 1.0)

    run = trainer(tmp_path, text, operations=Operations(loss=loss), eval_every=100, log_every=100)
    with pytest.raises(NotFinite) as error:
        run.run()
    lines = str(error.value).split("\n")
    assert lines[0].startswith("the loss of step 7 is nan (the last good one was step 6: loss ")
    assert "--rate" in lines[1] and "gradient_norm" in lines[2] and "kernels in use" in lines[3]
    assert checkpoint.newest(tmp_path / "run" / "checkpoints").step == 4


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path, text, monkeypatch):
    said = []
    run = trainer(tmp_path, text, said=said)
    real = os.fsync

    def full(file):
        if run.step == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file)

    monkeypatch.setattr(os, "fsync", full)
    assert run.run() == 0
    sentence = "no checkpoint of step 8 could be written: the disk is full; step-00000004 is kept, and training goes on"
    assert sentence in said
    assert [path.name for path in checkpoint.checkpoints(run.checkpoints)] == ["step-00000004", "step-00000012"]


def test_a_checkpoint_of_another_shape_is_refused(tmp_path, text):
    trainer(tmp_path, text, steps=4).run()
    other = dataclasses.replace(corpus.settings(text[1]), model={**corpus.MODEL, "hidden": 32})
    with pytest.raises(checkpoint.CheckpointError, match="hidden is 16 there and 32 here"):
        Trainer(other, tmp_path / "run", text[0], resume=True, say=lambda line: None)


def test_settings_that_do_not_fit_are_refused(text):
    with pytest.raises(
        ValueError, match="train: seq must be at most 16, the context that the model tiny is built for, got 17"
    ):
        corpus.settings(text[1], seq=17)
    with pytest.raises(ValueError, match="train: micro_batches must divide batch, and 3 does not divide 4"):
        corpus.settings(text[1], micro_batches=3)
    with pytest.raises(ValueError, match="train: rate must be a number above 0, got nan"):
        corpus.settings(text[1], rate=float("nan"))
    with pytest.raises(
        ValueError, match="train: sharding fsdp needs optimizer torch: gpukit's AdamW computes the norm"
    ):
        corpus.settings(text[1], sharding="fsdp", optimizer="gpukit")


# ---- from the command line


def command(folder, *options, cache, launcher=()):
    environment = {**os.environ, "GPUKIT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, *launcher, "-m", "gpukit.train", "--folder", str(folder), *options]
    return subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder.parent
    )  # fmt: skip


def begun(folder, settings):
    """A folder with settings and no checkpoint: --resume begins it."""
    loop.Record(folder, settings)
    return folder


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    settings = corpus.settings(corpus.write(tmp_path / "text"), steps=60, checkpoint_every=10)
    whole, killed = (begun(tmp_path / name, settings) for name in ("whole", "killed"))
    with command(whole, "--resume", cache=tmp_path) as process:
        assert process.wait(120) == 0, process.stdout.read()
    with command(killed, "--resume", cache=tmp_path) as process:
        for line in process.stdout:
            if line.startswith("step 25"):
                process.kill()
                break
        assert process.wait(120) == -signal.SIGKILL
    with command(killed, "--resume", cache=tmp_path) as process:
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and "resumed from step-000000" in output, output
    assert numbers(killed) == numbers(whole) and len(numbers(whole)) == 60


def test_two_processes_train_as_one_and_stop_at_a_signal(tmp_path):
    """With torchrun itself; tests/train/test_ranks.py has the rest."""
    settings = corpus.settings(corpus.write(tmp_path / "text"), steps=40, checkpoint_every=20)
    one, two = (begun(tmp_path / name, settings) for name in ("one", "two"))
    with command(one, "--resume", cache=tmp_path) as process:
        assert process.wait(120) == 0, process.stdout.read()
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with command(two, "--resume", "--sharding", "fsdp", cache=tmp_path, launcher=launcher) as process:
        for line in process.stdout:
            if line.startswith("step  3"):
                process.send_signal(signal.SIGINT)
                break
        output = process.communicate(timeout=120)[0]
    assert process.returncode != 0 and output.count("SIGINT: stopped after step") == 1, output
    with command(two, "--resume", cache=tmp_path, launcher=launcher) as process:
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and output.count("step 40 of 40") == 1, output
    for a, b in zip(numbers(one), numbers(two), strict=True):
        for name in ("loss", "gradient_norm", "validation_loss"):
            assert a[name] == b[name] == "" or float(a[name]) == pytest.approx(float(b[name]), rel=1e-4)


def test_gpukits_kernels_and_torch_compile_train_alike(tmp_path, monkeypatch):
    """The losses are those of PyTorch's attention and loss, up to rounding; evaluation goes around the compiler."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    text, losses = corpus.prepared(tmp_path), {}
    for name, changes in {"torch": {}, "gpukit": {"kernels": "gpukit", "compile": True}}.items():
        trainer = Trainer(
            corpus.settings(tmp_path / "text", steps=2, **changes), tmp_path / name, text, say=lambda line: None
        )
        losses[name] = [trainer.train_step()[0].item() for _ in range(2)] + [trainer.evaluate()]
    assert losses["gpukit"] == pytest.approx(losses["torch"], rel=1e-5)
    assert compiled == [trainer.model] and trainer.model.operations != Operations()
    with pytest.raises(ValueError, match="sharding fsdp needs compile off"):
        corpus.settings(tmp_path / "text", sharding="fsdp", compile=True)
