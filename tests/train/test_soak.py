"""The soak notices a run that goes wrong. The soak itself is for a GPU: python -m tests.train.soak."""

import math
import time

import pytest
import torch

from gpukit.train import ladder
from tests.train import corpus, soak


def test_what_a_row_allows():
    expected = [5.0, 4.0, 3.0]
    assert soak.allowed(expected, [expected, expected]) == soak.MEAN_BOUND
    bound = soak.allowed(expected, [expected, [5.0, 4.4, 3.0]])
    assert bound == pytest.approx(0.1 / 3 * soak.NOISES)
    row = soak.Row(expected, bound)
    assert row.note(expected) and row.note([5.5, 4.0, 3.0]) and row.note(expected)
    assert (row.runs, row.steps, row.repeated, row.step) == (3, 9, 1, 1) and row.largest == pytest.approx(0.1)
    assert not row.failed
    for wrong in ([5.0, 8.0, 3.0], [5.0, math.nan, 3.0], [6.0, 4.8, 3.6], [*expected, math.nan]):  # the last: a weight
        row = soak.Row(expected, bound)
        assert not row.note(wrong) and row.failed and row.note(expected) and row.failed


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
    assert [(row.runs, row.steps, row.repeated) for row in small.rows.values()] == [(2, 8, 1), (2, 8, 1)]
    assert not small.round(["tiny"], False, time.monotonic() - 1)  # its time is over


def test_one_wild_run_of_many_is_kept(small, monkeypatch):
    step, runs = ladder.Trained.step, []

    def wild(trained):
        runs.append(trained)
        return step(trained) * (100 if len(runs) == 27 else 1)

    monkeypatch.setattr(ladder.Trained, "step", wild)
    for _ in range(3):
        small.round(["tiny"], False, time.monotonic() + 3600)
    assert small.failed
    (row,) = [row for row in small.rows.values() if row.failed]
    assert row.runs == 3 and row.repeated == 1 and row.largest == pytest.approx(99, rel=0.05)


def test_adamw_stays_beside_pytorchs():
    distance, _ = soak.adamw(torch.device("cpu"), steps=2, copies=1)
    assert distance < soak.ADAMW_BOUND
