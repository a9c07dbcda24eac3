"""INSTRUCTOR.md's commands, run as written on a class of three, and the steps of docs/grade.yml."""

import csv
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from gpukit import cli, course

ROOT = course.root(__file__)
pytestmark = pytest.mark.skipif(
    not ((ROOT / "solutions").is_dir() and (ROOT / ".git").exists()), reason="no checkout with solutions"
)
WRONG = "def bytes_moved(M, N, itemsize):\n    return M * N * itemsize\n"


def blocks() -> list[tuple[str, str, str]]:
    """(language, file, text) of each block of code."""
    return re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", (ROOT / "INSTRUCTOR.md").read_text(), re.MULTILINE | re.DOTALL)


def environment(tmp_path: Path) -> dict[str, str]:
    """A shell in which `gpukit` is this one."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    command = tmp_path / "bin" / "gpukit"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gpukit "$@"\n')
    command.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != "GPUKIT_IMPL"}
    return kept | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def right(name: str) -> str:
    return (ROOT / "solutions" / f"{name}.py").read_text()


@pytest.mark.prove
def test_a_term_as_written(tmp_path):
    handed_in, where = tmp_path / "handed-in", environment(tmp_path)
    for name in ("start", "memory"):  # Ada, in a folder
        (handed_in / "s1042" / "exercises").mkdir(parents=True, exist_ok=True)
        (handed_in / "s1042" / "exercises" / f"{name}.py").write_text(right(name))
    with zipfile.ZipFile(handed_in / "hoppergrace_LATE_90312_4455_exercises.zip", "w") as archive:
        archive.writestr("exercises/start.py", WRONG)
        archive.writestr("exercises/memory.py", right("memory"))
    (handed_in / "noetheremmy_90313_4456_start.py").write_text(right("start"))  # one file, and no other

    said = ""
    for language, name, text in blocks():
        if language == "sh":
            done = subprocess.run(["bash", "-ec", text], cwd=tmp_path, env=where, capture_output=True, text=True)
            assert done.returncode == 0, f"{text}{done.stdout}{done.stderr}"
            said += done.stdout
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)

    out = tmp_path / "week1"
    with zipfile.ZipFile(tmp_path / "learners.zip") as archive:
        assert not any("solutions/" in name for name in archive.namelist())
    with (out / "canvas.csv").open(newline="") as file:
        points = {row[1]: row[-1] for row in csv.reader(file)}
    assert points == {
        "ID": "Week 1: bytes",
        "": "15",
        "90311": "15",
        "90312": "4.5",
        "90313": "10",
    }  # a day late: 5 less 0.5
    assert "[3/3]" in said and "the same verdict as then" in said and "autograder.zip: Week 1: bytes" in said
    listed = re.findall(r"^\| (`[^|]*) \|", (ROOT / "INSTRUCTOR.md").read_text(), re.MULTILINE)
    names = [name for cell in listed for name in re.findall(r"`([^`]+)`", cell)]
    assert len(names) >= 9 and all((out / name).exists() for name in names)


def test_the_readme_names_files_and_commands_of_the_page():
    section = re.search(r"## Teach with it\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert len(re.findall(r"^- ", section, re.MULTILINE)) == 5 and "(INSTRUCTOR.md)" in section
    commands = "".join(text for language, _, text in blocks() if language == "sh")
    for action in re.findall(r"`(gpukit (?:class \w+|release))", section):
        assert f"{action} " in commands


def test_the_workflow_grades_a_push_and_comments_the_table(tmp_path):
    steps = {
        step["name"]: step
        for step in yaml.safe_load((ROOT / "docs" / "grade.yml").read_text())["jobs"]["grade"]["steps"]
        if "name" in step
    }
    where = environment(tmp_path)
    course_bin = tmp_path / "course" / ".venv" / "bin"
    course_bin.mkdir(parents=True)
    (course_bin / "gpukit").symlink_to(tmp_path / "bin" / "gpukit")
    (tmp_path / "course" / "week1.toml").write_text('title = "W"\nexercises = ["start"]\n')
    work = tmp_path / "class" / "work"
    for path, text in (
        ("exercises/start.py", WRONG),
        ("gpukit/checks/start.py", "1 / 0"),
        ("solutions/start.py", right("start")),
    ):
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(text)
    gh = tmp_path / "bin" / "gh"
    gh.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > gh.txt\n')
    gh.chmod(0o755)
    where |= {
        "ASSIGNMENT": "week1.toml",
        "GITHUB_REPOSITORY": "uni/ada",
        "GITHUB_SHA": "f00",
        "GITHUB_STEP_SUMMARY": "summary.md",
    }
    for name in ("grade", "comment"):
        subprocess.run(["bash", "-ec", steps[name]["run"]], cwd=tmp_path, env=where, check=True, capture_output=True)
    said = (tmp_path / "summary.md").read_text()
    assert (
        said.startswith("## work: 0 of 1 points\n")
        and "| start.bytes_moved | fail | " in said
        and "| one-way |" in said
    )
    assert (tmp_path / "gh.txt").read_text().split("\n")[:4] == [
        "api",
        "repos/uni/ada/commits/f00/comments",
        "-F",
        "body=@graded/grades.md",
    ]
    # bootstrap.py takes the environment's place from its own folder, as `make lab` calls it
    assert steps["install"]["run"] == "python -I course/gpukit/bootstrap.py --venv .venv"
    assert "ROOT / args.venv" in (ROOT / "gpukit" / "bootstrap.py").read_text()


def test_a_slip_of_the_hand_is_refused_before_anything_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in" / "ada").mkdir(parents=True)
    (tmp_path / "in" / "ada" / "start.py").write_text(course.text((ROOT / "exercises" / "start.py").read_bytes()))
    (tmp_path / "one.toml").write_text('title = "One"\nexercises = ["start"]\n')
    (tmp_path / "two.toml").write_text('title = "Two"\nexercises = ["dtypes"]\n')
    assert cli.main(["class", "grade", "in", "-a", "one.toml", "-o", "in/out"]) == 2
    assert "--out in/out lies in in, where it would be taken for a submission" in capsys.readouterr().err
    assert not (tmp_path / "in" / "out").exists()
    assert cli.main(["class", "grade", "in", "-a", "one.toml", "-o", "out", "-j", "1"]) == 0
    said = capsys.readouterr().out
    assert (
        "One: 1 exercise, 1 point\n" in said
        and "1 student, 1 exercise: 1 fail\n0 verdicts were there, 1 exercise run" in said
    )
    before = (tmp_path / "out" / "grades.json").read_bytes()
    assert cli.main(["class", "grade", "in", "-a", "two.toml", "-o", "out"]) == 2
    assert (
        "--out out holds the grades of start.bytes_moved, none of which is an exercise of 'Two'"
        in capsys.readouterr().err
    )
    assert (tmp_path / "out" / "grades.json").read_bytes() == before
