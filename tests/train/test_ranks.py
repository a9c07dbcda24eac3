"""Several processes: the same numbers as with one, and no waiting for a process that is gone."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("cases", [("equal", "resumed"), ("moved", "full", "lost"), ("memory",)])
def test_several_processes(cases):
    """tests/train/ranks.py says what the cases are, of which `make prove` runs one more; each start of Python and PyTorch
    costs seconds."""
    command = [sys.executable, "-W", "error::UserWarning", "-m", "tests.train.ranks", *cases]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    if "lost" in cases:
        lines = [line for line in done.stdout.splitlines() if line.startswith("stopped: ")]
        subjects = ["process 1 of 2 (counted from 0)", "torchrun, or process 0,", "process 1 of 3 (counted from 0)"]
        assert len(lines) == 3
        for line, subject in zip(lines, subjects, strict=True):
            assert line.startswith(f"stopped: {subject} has died or no longer answers.") and "--resume" in line
