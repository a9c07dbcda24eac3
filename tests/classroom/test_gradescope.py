"""The zip's own scripts are run in the folders that Gradescope documents, in an environment that setup.sh makes; only pip is
replaced, by a script that links the packages of this environment."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpukit import cli, course
from gpukit.classroom import gradescope, leaks

ROOT = course.root(__file__)
pytestmark = pytest.mark.skipif(
    not ((ROOT / "solutions").is_dir() and (ROOT / ".git").exists()), reason="no checkout with solutions"
)
ASSIGNMENT = """title = "Week 1"
exercises = ["start.bytes_moved", "memory.llama"]
points = {start = 4, memory = 6}
deadline = 2026-10-12T12:00:00+00:00
late = {per_day = 0.5, at_most = 2}
seed = "student"
secret = "rosebud"
"""
# Gradescope sets no PYTHONPATH, which would lead to the checkout. The zip's folder stays as it was unpacked.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
    "PYTHONDONTWRITEBYTECODE": "1"
}
METADATA = {"created_at": "2026-10-12T06:00:00.123456-07:00", "users": [{"email": "ada@uni.example", "id": 1}]}
PIP = """#!/bin/sh
set -e
printf '%s\\n' "$@" > "$AUTOGRADER/pip"
for last; do :; done
for packages in "$AUTOGRADER"/venv/lib/python3*/site-packages; do printf '%s\\n%s\\n' "$last" "$PACKAGES" > "$packages/all.pth"; done
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Gradescope's /autograder after the image was built."""
    folder = tmp_path_factory.mktemp("a folder")
    (folder / "week1.toml").write_text(ASSIGNMENT)
    assert cli.main(["class", "gradescope", str(folder / "week1.toml"), "-o", str(folder / "autograder.zip")]) == 0
    place = folder / "autograder"
    with zipfile.ZipFile(folder / "autograder.zip") as archive:
        for info in archive.infolist():
            path = Path(archive.extract(info, place / "source"))
            path.chmod(info.external_attr >> 16)
    shutil.copy(place / "source" / "run_autograder", place / "run_autograder")
    pip = folder / "pip"
    pip.write_text(PIP)
    pip.chmod(0o755)
    packages = Path(importlib.util.find_spec("torch").origin).parents[1]
    environment = {**ENVIRONMENT, "AUTOGRADER": str(place), "PYTHON": sys.executable, "PACKAGES": str(packages)}
    subprocess.run(["bash", place / "source" / "setup.sh"], env={**environment, "PIP": "./pip"}, cwd=folder, check=True)
    where = subprocess.check_output(
        [place / "venv/bin/python", "-P", "-c", "import gpukit; print(gpukit.__file__)"], env=ENVIRONMENT, text=True
    )
    assert where.startswith(str(place / "source" / "course")), "the zip's package, not the checkout's"
    return place


def submitted(place: Path, files: dict[str, str], metadata: object = METADATA) -> subprocess.CompletedProcess:
    """Run the autograder on a submission, as Gradescope does."""
    for name in ("submission", "results"):
        shutil.rmtree(place / name, ignore_errors=True)
        (place / name).mkdir()
    for name, text in files.items():
        (place / "submission" / name).write_text(text)
    (place / "submission_metadata.json").write_text(json.dumps(metadata))
    return subprocess.run(
        [place / "run_autograder"],
        cwd=place,
        env={**ENVIRONMENT, "AUTOGRADER": str(place)},
        capture_output=True,
        text=True,
    )


def found(place: Path) -> dict:
    return json.loads((place / "results" / "results.json").read_text())


def test_the_zip_has_its_scripts_in_the_root_and_no_answers(place):
    source = place / "source"
    assert {path.name for path in source.iterdir()} == {
        *("setup.sh", "run_autograder", "assignment.toml", "README.md", "course"),
    }
    assert os.access(source / "run_autograder", os.X_OK) and os.access(source / "setup.sh", os.X_OK)
    assert {path.stem for path in (source / "course" / "exercises").iterdir()} == {"start", "memory"}
    assert not (source / "course" / "solutions").exists() and leaks.scan(source / "course", ROOT) == []
    arguments = (place / "pip").read_text().split("\n")
    assert arguments[0] == "install" and "--constraint" in arguments
    assert arguments[-2] == str(source / "course")


def test_a_submission_is_graded_and_late_work_costs(place):
    files = {
        "start.py": (ROOT / "solutions" / "start.py").read_text(),
        "memory.py": (ROOT / "exercises" / "memory.py").read_text(),
        "release.json": '{"concepts": ["start"]}',  # the learner's: nothing of it counts
    }
    done = submitted(place, files)
    assert done.returncode == 0, done.stderr
    results = found(place)
    assert results["score"] == 2 and results["extra_data"]["days_late"] == 1  # half of 4 points
    assert results["output"].startswith("2 of 10 points, after 2 lost by handing in 1 day late")
    assert (results["visibility"], results["stdout_visibility"]) == ("visible", "hidden")
    start, memory = results["tests"]
    assert (start["score"], start["max_score"], start["output"]) == (4, 4, "")
    assert (memory["score"], memory["max_score"]) == (0, 6) and memory["output"].startswith("memory.llama: not written")
    assert {"score", "max_score", "name", "output", "tags", "visibility", "extra_data"} == {*start}
    assert start["extra_data"]["seed"] != memory["extra_data"]["seed"] and "rosebud" not in json.dumps(results)


def test_a_submission_without_exercises_is_told_so(place):
    done = submitted(place, {"notes.txt": "hello"}, metadata={})
    assert done.returncode == 0, done.stderr
    results = found(place)
    assert results["score"] == 0 and results["extra_data"]["days_late"] == 0
    assert all("holds none of the exercises" in test["output"] for test in results["tests"])


def test_a_fault_of_the_grader_is_no_result(place, monkeypatch, capsys):
    """Gradescope then says that the autograder failed, and runs it again when asked."""
    submitted(place, {"start.py": (ROOT / "solutions" / "start.py").read_text()})
    (place / "results" / "results.json").unlink()

    class Broken:
        capacity = 1

        def __init__(self, jobs):
            self.work = []

        def submit(self, work):
            self.work.append(work)

        def next(self):
            return self.work.pop(), gradescope.pool.Answer(fault="the disk is full")

        def close(self):
            pass

    monkeypatch.setattr(gradescope.pool, "pool", Broken)
    assert gradescope.run(place) == 1
    assert "start.bytes_moved: the grader failed: the disk is full" in capsys.readouterr().out
    assert not (place / "results" / "results.json").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    (("there.zip", "nothing is overwritten"), ("no/folder.zip", "there is no folder"), ("ag.tar", "must name a file")),
)
def test_a_bad_place_is_refused_before_any_work(tmp_path, capsys, out, message):
    (tmp_path / "week1.toml").write_text(ASSIGNMENT)
    (tmp_path / "there.zip").write_bytes(b"mine")
    assert cli.main(["class", "gradescope", str(tmp_path / "week1.toml"), "-o", str(tmp_path / out)]) == 2
    assert message in capsys.readouterr().err and (tmp_path / "there.zip").read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.zip", "week1.toml"]
