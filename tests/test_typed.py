"""A type checker knows every public name: tests/typed.py uses them all."""

import re
import subprocess
import sys

import pytest

import gpukit
from gpukit import course, kernels

ROOT = course.root(__file__)
TYPED = ROOT / "tests" / "typed.py"


def test_every_public_name_is_used():
    text = TYPED.read_text()
    for module, names in (("gpukit", gpukit.__all__), ("kernels", kernels.__all__)):
        assert {*names} - {*re.findall(rf"\b{module}\.(\w+)", text)} == set()


def test_mypy_finds_the_mistakes_that_are_marked_and_no_other():
    pytest.importorskip("mypy", reason="mypy is not installed; make test installs it")
    options = ["--follow-imports=silent", "--warn-unused-ignores", f"--cache-dir={ROOT / 'build' / 'mypy'}"]
    call = [sys.executable, "-m", "mypy", *options, str(TYPED)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
