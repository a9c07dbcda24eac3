"""What learners are given holds no answers: the wheel, and a copy of the course without solutions/."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpukit import course, integrity
from gpukit.classroom import leaks
from gpukit.grading import prose

ROOT = course.root(__file__)
pytestmark = pytest.mark.skipif(not (ROOT / "solutions").is_dir(), reason="a copy of the course without solutions")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_wheel_holds_the_checks_and_their_prose_and_no_answers(wheel):
    assert {path.stem for path in (wheel / "gpukit" / "checks").glob("*.md")} == set(prose.concepts())
    tops = {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"gpukit"}
    assert {path.name for path in (wheel / "gpukit" / "_course").iterdir()} == {"docs", "exercises", "notebooks"}
    _as_committed(wheel / "gpukit" / "_course")
    assert leaks.scan(wheel, ROOT) == []


def test_course_without_solutions_holds_no_answers(tmp_path):
    for name in ("notebooks", "exercises", "gpukit", "design", "README.md", "CONTRIBUTING.md"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    _as_committed(tmp_path)
    found = leaks.scan(tmp_path, ROOT)
    assert [leak for leak in found if not set(leak.split("/")) & {"__pycache__", ".ipynb_checkpoints"}] == []


def _as_committed(folder: Path) -> None:
    """folder/exercises as git has them: a learner's own answers are no leak."""
    tracked = subprocess.run(["git", "ls-files", "exercises"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for name in tracked:
        committed = subprocess.run(["git", "show", f"HEAD:./{name}"], cwd=ROOT, capture_output=True, text=True).stdout
        (folder / name).write_text(committed)


def test_a_leak_is_found_in_code_prose_and_notebooks(tmp_path):
    line = "y = numerator / tl.sum(numerator, axis=0)"
    assert line in integrity.solution("softmax", ROOT)
    (tmp_path / "gpukit" / "kernels").mkdir(parents=True)
    (tmp_path / "gpukit" / "kernels" / "softmax.py").write_text(line)  # the library may
    (tmp_path / "gpukit" / "hint.md").write_text(f"    {line}\n")
    (tmp_path / "cell.ipynb").write_text(f'{{"cells": [{{"source": ["{line}"]}}]}}')
    assert [leak.partition(" repeats")[0] for leak in leaks.scan(tmp_path, ROOT)] == ["cell.ipynb", "gpukit/hint.md"]
