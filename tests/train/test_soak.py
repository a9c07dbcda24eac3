"""The soak notices a run that goes wrong. The soak itself is for a GPU: python -m tests.train.soak."""

import math
import time

import pytest
import torch

from gpukit.train import ladder
from tests.train import corpus, soak


def test_the_worst_step_is_found():
    expected = soak.Expected.of([5.0, 4.0, 3.0], [[5.0, 4.0, 3.0], [5.0, 4.4, 3.0]])
    assert expected.allowed == pytest.approx([soak.LOSS_BOUND, 0.1 * soak.NOISES, 0.1 * soak.NOISES])
    assert expected.worst([5.0, 4.0, 3.0])[0] == 0.0
    assert expected.worst([5.0, 8.0, 3.0]) == (1.0, 2, expected.allowed[1])
    assert expected.worst([5.5, 4.4, 3.0])[:2] == (pytest.approx(0.1), 1)  # nothing had moved so early
    assert expected.worst([5.0, math.nan, 3.0])[:2] == (math.inf, 2)
    assert expected.worst([5.0, 4.0, 3.0, math.nan])[0] == math.inf  # a weight that is not finite


def test_configurations_are_ones_that_their_models_take():
    names = ["gpt2", "gpt-1.3b", "llama-1b", "tiny"]
    assert {name for name, _ in soak.configurations(names)} == set(names)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """One small configuration, and two ways that a CPU can compute quickly."""
    text = corpus.prepared(tmp_path)
    settings = corpus.settings(tmp_path / "text", steps=4, sample=0)
    monkeypatch.setattr(soak, "configurations", lambda chosen: [("tiny", settings)])
    monkeypatch.setattr(soak, "WAYS", {"explicit": {"attention": "explicit"}, "AdamW": {"optimizer": "gpukit"}})
    return soak.Soak(torch.device("cpu"), text, say=lambda line: None)


def test_ways_that_compute_the_same_are_within_bounds(small):
    assert small.round(["tiny"], False, time.monotonic() + 3600)
    assert small.round(["tiny"], False, time.monotonic() + 3600)
    assert not small.failed and small.steps == 16
    assert [row[:2] for row in small.rows.values()] == [[2, 8], [2, 8]]
    assert not small.round(["tiny"], False, time.monotonic() - 1)  # its time is over


def test_one_wild_run_of_many_is_kept(small, monkeypatch):
    step, runs = ladder.Trained.step, []

    def wild(trained):
        runs.append(trained)
        return step(trained) * (100 if len(runs) == 19 else 1)

    monkeypatch.setattr(ladder.Trained, "step", wild)
    for _ in range(3):
        small.round(["tiny"], False, time.monotonic() + 3600)
    assert small.failed
    (row,) = [row for row in small.rows.values() if row[2] > row[4]]
    assert row[0] == 3 and row[2] == pytest.approx(99, rel=0.05)


def test_adamw_stays_beside_pytorchs():
    distance, _ = soak.adamw(torch.device("cpu"), steps=2, copies=1)
    assert distance < soak.ADAMW_BOUND
