"""What a person meets before the first notebook: the Makefile, gpukit/bootstrap.py and `gpukit lab`.

The installation itself is what `make test` and .ci/run begin with. Here a stand-in plays pip, and what can go wrong on
a learner's machine is provoked.
"""

import errno
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gpukit import bootstrap, course, lab

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the Makefile needs a POSIX shell")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The files that set-up reads, in a folder whose name has a space."""
    folder = tmp_path / "gpu course"
    (folder / "gpukit").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "gpukit/bootstrap.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def make_lab(folder: Path, python: Path | str, **env: str) -> str:
    """What `make lab` says when it fails, less make's own last line."""
    call = ["make", "--no-print-directory", "lab", f"PYTHON={python}"]
    # What the make that runs these tests was told (`make -i test`, VENV=...) is not for this one.
    around = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "VENV", "ARGS")}
    done = subprocess.run(call, cwd=folder, env=around | env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("make")]
    assert len(lines) == 1, "one plain sentence"
    assert not (folder / ".venv").exists()
    return lines[0]


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_unsupported_python_gets_one_sentence(checkout, tmp_path):
    old = script(tmp_path / "old python" / "python3.9", "exit 1")
    said = make_lab(checkout, old)
    assert "Python 3.11, 3.12 or 3.13" in said and str(old) in said
    assert "none of these: no-such-python" in make_lab(checkout, "no-such-python")


def test_missing_venv_module_gets_one_sentence(checkout, tmp_path):
    """As on Debian without python3-venv: Python runs, ensurepip cannot be imported."""
    hide = "import runpy, sys; sys.modules['ensurepip'] = None; del sys.argv[0]; "
    hide += "runpy.run_path(sys.argv[0], {}, '__main__')"
    bare = script(
        tmp_path / "python3",
        f'if [ "$1" = -I ]; then shift; exec "{sys.executable}" -c "{hide}" "$@"; fi\nexec "{sys.executable}" "$@"',
    )
    assert f"sudo apt install python3.{sys.version_info[1]}-venv" in make_lab(checkout, bare)


def test_full_disk_gets_one_sentence(checkout):
    said = make_lab(checkout, sys.executable, MIN_FREE_GB="1000000")
    assert "GB free" in said and "needs 1e+06 GB" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_gets_one_sentence(checkout):
    checkout.chmod(0o555)
    try:
        assert "cannot be written" in make_lab(checkout, sys.executable)
    finally:
        checkout.chmod(0o755)


def test_read_only_folder_is_recognised(checkout, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(bootstrap.SetupError, match="cannot be written: copy the course"):
        bootstrap.check_machine(checkout, checkout / ".venv")


@pytest.mark.parametrize(
    ("code", "sentence"), ((errno.ENOSPC, "the disk is full"), (errno.EROFS, "a folder cannot be written"))
)
def test_system_errors_on_the_way_get_one_sentence(monkeypatch, capsys, code, sentence):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(bootstrap, "make", fail)
    assert bootstrap.main([]) == 1
    assert sentence in capsys.readouterr().err


@pytest.fixture
def steps(checkout, monkeypatch):
    """Runs bootstrap.make on `checkout` and returns what it did; making the environment and pip are stand-ins."""
    venv, done = checkout / ".venv", []
    run = subprocess.run

    def make_venv(command, **options):
        if "venv" not in command:
            return run(command, **options)
        done.append("create")
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").unlink(missing_ok=True)
        (venv / "bin" / "python").symlink_to(sys.executable)
        version = ".".join(map(str, sys.version_info[:3]))
        (venv / "pyvenv.cfg").write_text(f"version = {version}\ncommand = python -m venv --clear {venv}\n")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(bootstrap.subprocess, "run", make_venv)
    monkeypatch.setattr(bootstrap, "install", lambda root, venv, extras: done.append(f"install {sorted(extras)}"))
    monkeypatch.setenv("MIN_FREE_GB", "0.001")

    def make(*extras: str) -> list[str]:
        done.clear()
        bootstrap.make(checkout, venv, set(extras), "starting JupyterLab")
        return list(done)

    return make


def test_each_step_has_its_line_and_is_taken_once(steps, capsys):
    assert steps() == ["create", "install []"]
    lines = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in lines] == ["1/3", "2/3", "3/3"]
    assert lines[0].startswith("1/3 creating .venv") and lines[2] == "3/3 starting JupyterLab"
    assert steps() == []
    assert capsys.readouterr().out == ""


def test_make_test_adds_to_the_environment_of_make_lab(steps):
    assert steps() == ["create", "install []"]
    assert steps("dev") == ["install ['dev']"]
    assert steps() == steps("dev") == []
    assert steps("hf") == ["install ['dev', 'hf']"]


@pytest.mark.parametrize("name", ("pyproject.toml", "constraints.txt"))
def test_changed_requirements_are_installed_into_the_same_environment(steps, checkout, name):
    steps("dev")
    with (checkout / name).open("a") as file:
        file.write("# changed\n")
    assert steps() == ["install []"] and steps() == []


def test_broken_or_moved_environment_is_made_again(steps, checkout):
    steps()
    (checkout / ".venv" / "bin" / "python").unlink()
    assert steps() == ["create", "install []"]
    config = checkout / ".venv" / "pyvenv.cfg"
    config.write_text(config.read_text().replace(str(checkout), "/elsewhere"))
    (checkout / ".venv" / "gpukit.stamp").unlink()
    assert steps() == ["create", "install []"]


def test_interrupted_installation_is_taken_up_again(steps, checkout, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bootstrap, "install", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        steps()
    assert steps() == ["install []"]


PIP_SAYS = """Collecting torch
  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (812.3 MB)
  Downloading einops-0.8.2-py3-none-any.whl (64 kB)
Installing collected packages: einops, torch
{}"""


@pytest.mark.parametrize(
    ("error", "sentence"),
    (
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: Retrying ... Failed to establish a new connection: [Errno 111]", "index cannot be reached"),
        ("ERROR: No matching distribution found for triton>=3.6", "no fitting version"),
        ("ERROR: something new", "something new"),
    ),
)
def test_pip_failure_gets_one_sentence_and_keeps_its_log(checkout, capsys, error, sentence):
    venv = checkout / ".venv"
    script(venv / "bin" / "python", f"cat <<'END'\n{PIP_SAYS.format(error)}\nEND\nexit 1")
    with pytest.raises(bootstrap.SetupError, match=f"pip could not install the course: .*{sentence}"):
        bootstrap.install(checkout, venv, {"dev"})
    assert capsys.readouterr().out.splitlines() == [
        "    downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (812.3 MB)",
        "    unpacking 2 packages",
    ]
    assert error in (venv / "install.log").read_text()


def test_python_range_is_the_same_everywhere():
    supported = re.search(r"\((\d), (\d+)\) <= .* < \((\d), (\d+)\)", (ROOT / "Makefile").read_text())
    low, high = SpecifierSet(">={}.{}".format(*supported.groups()[:2])), "<{}.{}".format(*supported.groups()[2:])
    assert SpecifierSet(PROJECT["requires-python"]) == low & SpecifierSet(high)


def test_constraints_lie_within_the_ranges():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {name.replace("_", "-"): version for name, version in pins.items()}
    optional = PROJECT["optional-dependencies"].values()
    for text in [*PROJECT["dependencies"], *(text for extra in optional for text in extra)]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name.replace("_", "-")]), text


def test_lab_says_what_is_missing(tmp_path, monkeypatch, capsys):
    def said() -> str:
        assert lab.lab([]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    (tmp_path / "notebooks").mkdir()
    (tmp_path / "exercises").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "00_start.ipynb is missing" in said()
    (tmp_path / lab.FIRST).write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        assert "no answer could be saved" in said()
    with monkeypatch.context() as patch:
        patch.setattr(lab.importlib.util, "find_spec", lambda name: None)
        assert "JupyterLab is not installed" in said()

    def lost():
        raise course.CourseNotFound("no folder here")

    monkeypatch.setattr(course, "root", lost)
    assert said() == "gpukit lab: no folder here"


def test_lab_starts_at_the_first_notebook_and_passes_options_on(tmp_path):
    command = lab.command(tmp_path, ["--port=9000"])
    assert command[:3] == [sys.executable, "-m", "jupyterlab"] and command[-1] == "--port=9000"
    assert "--LabApp.default_url=/lab/tree/notebooks/00_start.ipynb" in command
    (tmp_path / "notebooks").mkdir()  # a copy with some of the concepts
    for name in ("09_softmax", "02_memory"):
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text("{}")
    assert "--LabApp.default_url=/lab/tree/notebooks/02_memory.ipynb" in lab.command(tmp_path, [])
    assert lab.environment()["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_ci_runs_the_documented_test_command():
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert re.search(r"^for target in test prove; do\n +PY_COLORS=0 make ", ci.read_text(), re.MULTILINE)
    assert "make test" in (ROOT / "README.md").read_text()
    assert "make prove" in (ROOT / "CONTRIBUTING.md").read_text()
