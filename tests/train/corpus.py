"""A small text and a small model, for tests of what lies around them."""

from __future__ import annotations

import random
from pathlib import Path

from gpukit.train import data
from gpukit.train.presets import Settings

MODEL = {"vocab_size": 300, "context": 16, "layers": 1, "heads": 2, "hidden": 16}


def write(folder: Path, files: int = 60) -> Path:
    """Python files of words drawn at random, always the same."""
    source = random.Random(5)
    words = ["def", "return", "value", "for", "in", "range", "(x)", ":\n    ", "\n", "# the sum of it"]
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test_left_out.py").write_text("left out")
    for number in range(files):
        (folder / f"file{number:02}.py").write_text(" ".join(source.choices(words, k=120)))
    return folder


def settings(text: Path, **changes) -> Settings:
    """A run of 12 steps, each of which is recorded."""
    options = {
        "steps": 12,
        "rate": 1e-2,
        "warmup": 2,
        "dtype": "fp32",
        "log_every": 1,
        "eval_every": 4,
        "checkpoint_every": 4,
    }
    options |= {"seq": 16, "batch": 4, "eval_sequences": 12, "sample": 5, "text": str(text)}
    return Settings("tiny", MODEL, **{**options, **changes})


def prepared(tmp_path: Path) -> data.Corpus:
    return data.prepare(300, write(tmp_path / "text"), tmp_path / "cache", say=lambda line: None)
