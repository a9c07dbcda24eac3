"""Warnings are errors in the tests (tests/conftest.py), and other plugins of the environment cannot break a run by theirs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A plugin that warns wherever a plugin runs, in its own module and (stacklevel 2) in that of its caller.
PLUGIN = """
import functools
import warnings

import pytest


class Warned(pytest.PytestWarning):
    pass


def say(*args, what="", **kwargs):
    warnings.warn(f"{what}, in the plugin", Warned)
    warnings.warn(f"{what}, deprecated", DeprecationWarning)
    warnings.warn(f"{what}, in the caller", UserWarning, stacklevel=3)


def pytest_configure(config):
    say(what="configure")


def pytest_sessionstart(session):
    say(what="start")


def pytest_collection_modifyitems(items):
    say(what="collection")


def pytest_runtest_call(item):
    say(what="call")


def pytest_sessionfinish(session):
    say(what="finish")


def pytest_terminal_summary(terminalreporter):
    say(what="summary")


def pytest_unconfigure(config):
    say(what="end")
"""


@pytest.fixture
def run(tmp_path):
    """Runs a file of tests under the project's settings, in an environment with a plugin that warns."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "noisy.py").write_text(PLUGIN)
    installed = tmp_path / "noisy-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[pytest11]\nnoisy = noisy\n")

    def run(*options: str, **files: str) -> subprocess.CompletedProcess:
        for name, test in files.items():
            (tmp_path / "tests" / f"{name}.py").write_text(test)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": ""}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    return run


def test_a_plugin_that_warns_does_not_break_a_run_on_several_processes(run):
    done = run("-n", "1", test_it="def test_it():\n    pass\n")
    text = done.stdout + done.stderr
    assert done.returncode == 0 and "1 passed" in text, text
    assert "configure, in the plugin" in text and "finish, in the caller" in text, text  # it did warn


def test_a_warning_of_ours_or_of_a_library_is_an_error_and_a_plugins_is_none(run):
    done = run(
        "--continue-on-collection-errors",
        test_import="import warnings\n\nwarnings.warn('at import')\n",
        test_it="""
import os
import warnings

import numpy


def test_ours():
    warnings.warn("of ours")


def test_library():
    numpy.float64(1) / 0


def test_leak():
    open(os.__file__)


def test_let_off():
    open("/dev/null")  # pyproject.toml has the reason
""",
    )
    for said in (
        "ERROR tests/test_import.py - UserWarning: at import",
        "FAILED tests/test_it.py::test_ours - UserWarning: of ours",
        "FAILED tests/test_it.py::test_library - RuntimeWarning: divide by zero",
        "FAILED tests/test_it.py::test_leak - pytest.PytestUnraisableExceptionWarning",
        "3 failed, 1 passed",
    ):
        assert said in done.stdout, done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED and "INTERNALERROR" not in done.stdout
    assert "configure, in the plugin" in done.stderr and "call, in the caller" in done.stdout
