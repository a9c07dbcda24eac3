"""The command `gpukit`, with a judge made for the test; at the end the real one, which must agree with pytest."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

import gpukit
from gpukit import cli, course, doctor
from gpukit.grading import registry
from gpukit.grading.exercise import Label
from gpukit.grading.report import recorded
from gpukit.grading.verdict import Verdict, in_color
from tests.grading.test_hostile import grading_processes
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[1]


def exercise(exercise_id):
    concept = exercise_id.partition(".")[0]
    hints = ("ask", "name", "describe")
    facts = {
        "kernel": exercise_id == "alpha.first",
        "title": "Do it",
        "notebook": f"01_{concept}",
        "label": Label(2, 10, "doing"),
        "hints": hints,
    }
    return types.SimpleNamespace(id=exercise_id, concept=concept, function=concept, **facts)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A course of three exercises in two files. The judge passes a file that says "right"."""
    known = {name: exercise(name) for name in ("alpha.first", "alpha.second", "beta.third")}
    monkeypatch.setattr(registry, "exercises", lambda: known)
    monkeypatch.setattr(registry, "catalog", lambda: known)
    monkeypatch.setattr(registry, "concept", lambda name: known)

    def judge(exercise_id, impl="exercises", root=None, seed=None, terminal=False):
        text = (root / impl / f"{exercise_id.partition('.')[0]}.py").read_text()
        if "interrupt" in text:
            raise KeyboardInterrupt
        state = "pass" if "right" in text else "fail"
        lines = () if state == "pass" else (f"{exercise_id}: wrong in {root}/exercises", "  why?")
        label = "" if state == "pass" else "tail-mask"
        return Verdict(exercise_id, state, int(state == "pass"), 1, impl, lines, label, 0.5, seed or 3, "printed\n")

    fake = types.ModuleType("gpukit.grading.judge")
    fake.judge = judge
    monkeypatch.setitem(sys.modules, "gpukit.grading.judge", fake)
    monkeypatch.delenv("GPUKIT_IMPL", raising=False)
    root = tmp_path / "course"
    for folder in ("notebooks", "exercises", "solutions"):
        (root / folder).mkdir(parents=True)
    (root / "exercises" / "alpha.py").write_text("right\n")
    (root / "exercises" / "beta.py").write_text("wrong\n")
    (root / "solutions" / "alpha.py").write_text("right\n")
    (root / "solutions" / "beta.py").write_text("right\n")
    monkeypatch.chdir(root / "notebooks")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return root


# ---- check
def test_check_says_what_the_notebook_says(tiny, capsys):
    assert cli.main(["check", "alpha"]) == 0
    assert capsys.readouterr().out == "PASS alpha.first  1/1\nPASS alpha.second  1/1\n\n2 of 2 exercises pass\n"
    assert cli.main(["check", "beta.third", "-v", "--seed", "9"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("beta.third: wrong in ") and "--seed 9" in out and "  | printed" in out
    assert cli.main(["check", "beta.third", "--impl", "solutions"]) == 0
    assert "an instructor's run, not a grade" in capsys.readouterr().out
    assert cli.main(["check"]) == 1
    assert "2 of 3 exercises pass" in capsys.readouterr().out
    assert cli.main(["check", "alpha.first"]) == 0  # a kernel that passes has something to be compared with
    assert capsys.readouterr().out == "PASS alpha.first  1/1  next: gpukit compare alpha.first\n"


def test_verdicts_are_colored_in_a_terminal_only(tiny, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert (in_color("pass", "PASS x"), in_color("todo", "x\n  why")) == (
        "\x1b[32mPASS x\x1b[0m",
        "\x1b[33mx\x1b[0m\n  why",
    )
    monkeypatch.setenv("NO_COLOR", "1")
    assert in_color("fail", "x") == "x"


def test_impl_comes_from_the_environment_too(tiny, monkeypatch):
    monkeypatch.setenv("GPUKIT_IMPL", "solutions")
    assert cli.main(["check", "all"]) == 0
    assert cli.main(["check", "all", "--impl", "exercises"]) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["check", "alpha.frist"], "gpukit: no exercise is called 'alpha.frist'; did you mean 'alpha.first'?"),
        (["check", "--impl", "mine"], "gpukit check: argument --impl: invalid choice: 'mine'"),
        (["check", "--seed", "x"], "gpukit check: argument --seed: must be a whole number, 0 to 2147483647, got 'x'"),
        (["hint", "alpha.first", "4"], "gpukit: hint number must be 1 to 3, got 4"),
        (["grade", "--submission", "/no/such"], "gpukit: there is no folder /no/such"),
        (["grade", "--submission", ".", "--impl", "solutions"], "gpukit: --submission grades a learner's files"),
        (["grade", "--json", "/no/such/x.json"], "gpukit: /no/such/x.json cannot be written: there is no folder"),
        (["nb", "clean", "07_none"], "gpukit: there is no notebook 07_none"),
        (["nb"], "gpukit nb: the following arguments are required: ACTION"),
        (["hint", "alpha"], "gpukit: a hint is for one exercise; those of alpha are alpha.first, alpha.second"),
        (["check", "start.nothing"], "gpukit: no exercise is called 'start.nothing'  (all of them"),
        (["trace", "softmax", "--gpu", "h201"], "gpukit: no GPU is called 'h201'; did you mean 'h200'?"),
        (["nothing-like-it"], "gpukit: no command is called 'nothing-like-it'  (all of them: gpukit --help)"),
        (["grad"], "gpukit: no command is called 'grad'; did you mean 'grade'?"),
        (["replay"], "gpukit: no command is called 'replay'; did you mean 'class replay'?  (all of them"),
        (["gradescop"], "gpukit: no command is called 'gradescop'; did you mean 'class gradescope'?"),
        (
            ["class", "grede"],
            "gpukit class: no command is called 'grede'; did you mean 'grade'?  (all of them: grade, rep",
        ),
        (["nb", "cleen"], "gpukit nb: no command is called 'cleen'; did you mean 'clean'?  (all of them: run, clean)"),
        (
            ["grade", "--jsno", "x"],
            "gpukit grade: unrecognized arguments: --jsno; did you mean '--json'?  (more: gpukit gr",
        ),
        (["progress", "more"], "gpukit progress: unrecognized arguments: more  (more: gpukit progress --help)"),
        (["grade", "alpah"], "gpukit: no exercise or concept is called 'alpah'; did you mean 'alpha'?"),
        (["check", "--seed", "-1"], "gpukit check: argument --seed: must be a whole number, 0 to 2147483647, got '-1'"),
        (
            ["release", "x", "--assignment", "a", "--concepts", "b"],
            "gpukit: --assignment and --concepts both say what is",
        ),
        (["cheatsheet", "--html", "/no/such/x.html"], "gpukit: /no/such/x.html cannot be written: there is no folder"),
    ],
)
def test_mistakes_get_one_sentence(tiny, capsys, arguments, sentence):
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(sentence) and captured.err.count("\n") == 1 and captured.out == ""


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(
        f"\n    {name} " in out for name in ("lab", "check", "hint", "grade", "progress", "doctor", "nb", "stubs")
    )


def test_version_and_no_command(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"gpukit {gpukit.__version__}\n"
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_hints_climb(tiny, capsys):
    assert cli.main(["hint", "alpha.first"]) == 0
    assert capsys.readouterr().out == "hint 1 of 3 for alpha.first: ask\nnext: gpukit hint alpha.first 2\n"
    assert cli.main(["hint", "alpha.first", "3"]) == 0
    assert capsys.readouterr().out == "hint 3 of 3 for alpha.first: describe\n"


def test_progress_shows_every_exercise(tiny, capsys):
    from gpukit.grading.report import record

    record(Verdict("alpha.first", "pass", 1, 1, "exercises"), tiny)
    assert cli.main(["progress"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["alpha.first", "pass", "1/1"]
    assert lines[2].startswith("alpha.second  not tried")
    assert lines[-2] == "1 of 3 exercises pass"
    assert lines[-1].startswith("next: alpha.second, in notebooks/")
    for name in ("alpha.second", "beta.third"):
        record(Verdict(name, "pass", 1, 1, "exercises"), tiny)
    assert cli.main(["progress"]) == 0
    assert capsys.readouterr().out.endswith("\n3 of 3 exercises pass\n")


def test_options_of_lab_go_to_jupyterlab(monkeypatch):
    seen = []
    monkeypatch.setattr("gpukit.lab.lab", lambda argv: seen.append(argv) or 0)
    assert cli.main(["lab", "--port=9000", "--no-browser"]) == 0
    assert seen == [["--port=9000", "--no-browser"]]


def test_help_of_lab_shows_what_may_be_given(capsys):
    with pytest.raises(SystemExit):
        cli.main(["lab", "--help"])
    out = capsys.readouterr().out
    assert "usage: gpukit lab [OPTION ...]" in out and "--no-browser  " in out and "--port=9000" in out


def test_a_concept_of_one_exercise_has_its_hint(tiny, capsys):
    assert cli.main(["hint", "beta"]) == 0
    assert capsys.readouterr().out == "hint 1 of 3 for beta.third: ask\nnext: gpukit hint beta.third 2\n"


def test_a_hint_is_as_wide_as_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["hint", "start"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= 60


def test_a_verdict_is_broken_anew_where_the_terminal_is_narrower(monkeypatch):
    """Its lines were broken for 118 letters. Those of one paragraph are joined; a new fact stays on a line of its own."""
    facts = ["word " * 30 + "ends here.", "x_ptr is loaded twice: line 3", "In which line? " + "why " * 30 + "so?"]
    broken = [line for fact in facts for line in textwrap.wrap(f"  {fact}", 118, subsequent_indent="  ")]
    code = "    y = x" + " + x" * 30
    text = "\n".join(
        ["softmax.fused: values differ", *broken[:2], code, *broken[2:], "  hint 1 of 3: gpukit hint softmax.fused 1"]
    )
    assert len(broken) == 5
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli._in_paragraphs(text).split("\n")
    assert [" ".join(line.split()) for line in lines[1:-1]] == [facts[0], code.strip(), *facts[1:]] and lines[2] == code
    monkeypatch.setenv("COLUMNS", "118")
    assert cli._in_paragraphs(text) == text


@pytest.mark.parametrize(
    "command", ("progress", "doctor", "memory --model llama3-8b --batch 8 --gpus 8xh100 --zero 3", "memory --model none",
                "flops --model 70B --tokens 15T --gpus 1024xh100 --mfu 0.5", "class gradescope --help"),
)  # fmt: skip
def test_no_line_is_wider_than_the_terminal(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        cli.main(command.split())
    out, err = capsys.readouterr()
    assert out + err and max(map(len, f"{out}{err}".split("\n"))) <= 80


# ---- grade
def test_grade_of_what_is_named(tiny, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert cli.main(["grade", "alpha", f"--json={path}"]) == 0
    report = json.loads(path.read_text())
    assert [e["id"] for e in report["exercises"]] == ["alpha.first", "alpha.second"] and report["complete"] is True
    assert cli.main(["grade", "beta.third"]) == 1
    assert capsys.readouterr().out.endswith("\n0 of 1 exercises pass, 1 fail\n")
    assert cli.main(["grade", "alpha", "--submission", str(tiny)]) == 0
    assert cli.main(["grade", "all", "beta"]) == 1


def test_grade_writes_three_reports(tiny, tmp_path, capsys):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "markdown", "junit")}
    assert cli.main(["grade", *(f"--{kind}={path}" for kind, path in files.items())]) == 1
    report = json.loads(files["json"].read_text())
    assert {e["id"]: e["state"] for e in report["exercises"]} == {
        "alpha.first": "pass",
        "alpha.second": "pass",
        "beta.third": "fail",
    }
    assert report["complete"] is True and str(tiny) not in files["json"].read_text()
    assert "| beta.third | fail |" in files["markdown"].read_text()
    assert 'name="beta.third"' in files["junit"].read_text()
    assert capsys.readouterr().out.endswith("2 of 3 exercises pass, 1 fail\n")
    assert cli.main(["grade", "--impl", "solutions", f"--json={files['json']}"]) == 0
    assert json.loads(files["json"].read_text())["impl"] == "solutions"


def test_interrupted_grade_writes_what_it_has(tiny, tmp_path, capsys):
    (tiny / "exercises" / "beta.py").write_text("interrupt\n")
    path = tmp_path / "out.json"
    assert cli.main(["grade", f"--json={path}"]) == 130
    report = json.loads(path.read_text())
    assert report["complete"] is False
    assert [e["state"] for e in report["exercises"]] == ["pass", "pass", "missing"]
    assert "interrupted: the report is incomplete" in capsys.readouterr().out


def test_an_exception_of_the_grader_costs_one_exercise(tiny, tmp_path, monkeypatch, capsys):
    real = sys.modules["gpukit.grading.judge"].judge

    def judge(exercise_id, **kwargs):
        if exercise_id == "alpha.first":
            raise RecursionError("too deep\x1b[0m")
        return real(exercise_id, **kwargs)

    monkeypatch.setattr(sys.modules["gpukit.grading.judge"], "judge", judge)
    path = tmp_path / "out.json"
    assert cli.main(["grade", f"--json={path}"]) == 1
    rows = json.loads(path.read_text())["exercises"]
    assert [row["state"] for row in rows] == ["error", "pass", "fail"]
    assert "the grader failed: RecursionError: too deep" in rows[0]["diagnosis"]


def test_a_report_without_room_is_a_sentence_and_the_others_are_written(tiny, tmp_path, capsys):
    path = tmp_path / "out.xml"
    assert cli.main(["grade", "--json", "/dev/full", f"--junit={path}"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "gpukit: /dev/full cannot be written: No space left on device\n"
    assert path.exists() and captured.out.endswith("2 of 3 exercises pass, 1 fail\n")


@pytest.mark.parametrize("inner", ["exercises", "."])
def test_submission_is_copied_into_a_pristine_tree(tiny, tmp_path, monkeypatch, inner):
    """Only the exercise files count: not a conftest, not a torch.py, not a link, not the submission's solutions."""
    monkeypatch.setenv("GPUKIT_IMPL", "solutions")  # a toggle left on is not for submissions
    folder = tmp_path / "the class" / "student 7"
    (folder / inner).mkdir(parents=True)
    (folder / inner / "alpha.py").symlink_to(tiny / "solutions" / "alpha.py")
    (folder / inner / "beta.py").write_text("right\n")
    for name in ("torch.py", "conftest.py", "gpukit.py"):
        (folder / inner / name).write_text("raise SystemExit\n")
    seen = {}
    real = sys.modules["gpukit.grading.judge"].judge

    def spy(exercise_id, impl, root, seed, terminal):
        seen[exercise_id] = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        return real(exercise_id, impl, root, seed)

    monkeypatch.setattr(sys.modules["gpukit.grading.judge"], "judge", spy)
    path = tmp_path / "out.json"
    assert cli.main(["grade", "--submission", str(folder), f"--json={path}"]) == 1
    assert seen == {"beta.third": ["exercises/beta.py"]}
    rows = json.loads(path.read_text())["exercises"]
    assert [e["state"] for e in rows] == ["missing", "missing", "pass"]
    assert rows[0]["diagnosis"] == "alpha.first: missing: alpha.py is a symbolic link, not a file"


def test_a_submission_of_links_and_pipes_is_refused(tiny, tmp_path, capsys):
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.mkfifo(folder / "alpha.py")  # reading it would wait for ever
    (folder / "beta.py").write_text("#" * (1 << 21))
    path = tmp_path / "out.json"
    assert cli.main(["grade", "--submission", str(folder), f"--json={path}"]) == 1
    said = [row["diagnosis"] for row in json.loads(path.read_text())["exercises"]]
    assert said[0] == "alpha.first: missing: alpha.py is not a file"
    assert said[2] == "beta.third: missing: beta.py is larger than 1 MiB"
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "exercises").symlink_to(tiny / "solutions")
    assert cli.main(["grade", "--submission", str(tmp_path / "whole")]) == 2
    assert "whole/exercises is a symbolic link, not a folder" in capsys.readouterr().err


def test_submission_without_exercises_is_refused(tiny, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert cli.main(["grade", "--submission", str(tmp_path / "empty")]) == 2
    assert "holds none of the exercises (alpha.py, beta.py)" in capsys.readouterr().err


# ---- nb, stubs
def test_nb_clean_and_check(tiny, capsys):
    path = tiny / "notebooks" / "01_alpha.ipynb"
    path.write_text('{"cells": [], "nbformat": 4, "nbformat_minor": 5, "metadata": {}}')
    assert cli.main(["nb", "clean", "--check"]) == 1
    assert capsys.readouterr().out == "01_alpha.ipynb is not canonical: gpukit nb clean 01_alpha.ipynb\n"
    assert cli.main(["nb", "clean"]) == 0
    assert cli.main(["nb", "clean"]) == 0
    assert capsys.readouterr().out == "01_alpha.ipynb: cleaned\n"
    assert cli.main(["nb", "clean", "--check", "01_alpha.ipynb"]) == 0
    assert cli.main(["nb", "run", "01_alpha"]) == 2
    assert "exercises/beta.py differs from solutions/beta.py: notebooks are saved with" in capsys.readouterr().err
    (tiny / "exercises" / "beta.py").write_text("right\n")
    assert cli.main(["nb", "run", "01_alpha"]) == 0
    assert capsys.readouterr().out.endswith("01_alpha.ipynb: outputs unchanged\n")


def test_stubs_and_check(tiny, capsys):
    source = "def alpha():\n    # BEGIN SOLUTION\n    return 1\n    # END SOLUTION\n"
    for name in ("alpha", "beta"):
        (tiny / "solutions" / f"{name}.py").write_text(source)
    assert cli.main(["stubs", "--check"]) == 1
    assert cli.main(["stubs"]) == 0
    assert cli.main(["stubs", "--check"]) == 0
    assert capsys.readouterr().out.endswith("exercises/ is what solutions/ makes it\n")


# ---- doctor
def test_doctor_finds_this_environment_whole(capsys):
    rows = doctor.examine()
    names = [row.name for row in rows]
    assert names[:2] == ["machine", "Python"] and {"torch", "numpy", "Jupyter kernel", "course", "GPU"} <= set(names)
    text = doctor.as_text(rows)
    assert not any(line.startswith(doctor.MISSING) for line in text.splitlines()), text
    assert cli.main(["doctor"]) == 0


def test_doctor_names_what_mends_it(monkeypatch, capsys):
    real = doctor.metadata.version

    def version(name):
        if name == "torch":
            return "2.3.0"
        if name == "nbval":
            raise doctor.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.9.1")
    monkeypatch.setattr(doctor, "_gpus", lambda: [])
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "missing  Python" in out and "missing  torch" in out and "missing  nbval" in out
    assert '-m pip install "torch>=2.11"' in out and '-m pip install "nbval>=0.11,<0.12"' in out
    assert "3 missing or of another version." in out


def test_doctor_without_a_course(monkeypatch, tmp_path):
    def lost(start=None):
        raise course.CourseNotFound("no folder at or above holds notebooks/")

    monkeypatch.setattr(course, "root", lost)
    assert doctor._course().state == doctor.MISSING


def test_doctor_sees_a_kernel_that_starts_another_python(monkeypatch, tmp_path):
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    other = tmp_path / "python"
    for argv0, state in ((str(other), doctor.MISSING), (shutil.which("sh"), doctor.NOTE)):
        spec = {"argv": [argv0, "-f", "{connection_file}"], "display_name": "x", "language": "python"}
        (folder / "kernel.json").write_text(json.dumps(spec))
        assert doctor._kernel().state == state


# ---- the real judge: one verdict everywhere
def test_command_line_pytest_and_submission_agree(tmp_path):
    root = tmp_path / "my course"
    for folder in ("notebooks", "exercises"):
        (root / folder).mkdir(parents=True)
    # An answer with a known misconception: bytes read, but not bytes written.
    answer = "def bytes_moved(M, N, itemsize):\n    return M * N * itemsize\n"
    (root / "exercises" / "start.py").write_text(answer)
    source = 'import gpukit; gpukit.check("start.bytes_moved")'
    cell = {"cell_type": "code", "id": "check", "metadata": {}, "execution_count": 1, "outputs": [], "source": source}
    nb = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (root / "notebooks" / "00_start.ipynb").write_text(json.dumps(nb))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("GPUKIT_IMPL", None)

    def run(*command):
        return subprocess.run(
            [sys.executable, "-m", *command], cwd=root, env=environment, capture_output=True, text=True
        )

    checked = run("gpukit", "check", "start.bytes_moved")
    assert checked.returncode == 1, checked.stderr
    first_line = checked.stdout.splitlines()[0]
    assert recorded(root)["start.bytes_moved"]["state"] == "fail"
    plugin = [] if _plugin_installed() else ["-p", "gpukit.grading.plugin"]
    graded = run("pytest", *plugin, "--nbval", "notebooks/00_start.ipynb", "--gpukit-json=nbval.json")
    assert graded.returncode == 1 and first_line in graded.stdout, graded.stdout + graded.stderr
    submitted = run("gpukit", "grade", "--submission", "exercises", "--json=grade.json")
    assert submitted.returncode == 1 and first_line in submitted.stdout, submitted.stderr
    rows = []
    for name in ("nbval.json", "grade.json"):
        content = json.loads((root / name).read_text())
        rows.append({k: v for k, v in content["exercises"][0].items() if k != "seconds"})
    assert rows[0] == rows[1]
    assert rows[0]["state"] == "fail" and rows[0]["label"] == "one-way"


def _plugin_installed():
    from importlib.metadata import entry_points

    return any(entry.value == "gpukit.grading.plugin" for entry in entry_points(group="pytest11"))


# ---- a grading run in the world: signals, pipes, full disks, a learner's settings and modules
RIGHT = "def bytes_moved(M, N, itemsize):\n    return 2 * M * N * itemsize\n"
HOSTILE = (
    "torch",
    "numpy",
    "random",
    "json",
    "tempfile",
    "sitecustomize",
    "usercustomize",
    "conftest",
    "gpukit_plugin",
)
SETTINGS = {
    "pytest.ini": "[pytest]\naddopts = --no-such-option\n",
    "tox.ini": "[pytest]\naddopts = --no-such-option\n",
    "setup.cfg": "[tool:pytest]\naddopts = --no-such-option\n",
}


@pytest.fixture
def real_course(tmp_path):
    root = tmp_path / "my course"
    for folder in ("notebooks", "exercises"):
        (root / folder).mkdir(parents=True)
    (root / "exercises" / "start.py").write_text(RIGHT)
    return root


def grade(root, *arguments, shell=None, **kwargs):
    environment = {k: v for k, v in os.environ.items() if k != "GPUKIT_IMPL"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "gpukit", "grade", *arguments]
    command = ["bash", "-c", shell, "bash", *command] if shell else command
    return subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def states(path):
    return {row["id"]: row["state"] for row in json.loads(path.read_text())["exercises"]}


@pytest.mark.parametrize("link", ["exercises", "exercises/start.py"])
def test_links_out_of_the_course_are_refused(real_course, tmp_path, link):
    """A course that is itself reached through a link is one like others."""
    from gpukit.grading.judge import judge

    (tmp_path / "course").symlink_to(real_course)
    assert judge("start.bytes_moved", root=tmp_path / "course").passed
    (real_course / link).rename(tmp_path / "elsewhere")
    (real_course / link).symlink_to(tmp_path / "elsewhere")
    verdict = judge("start.bytes_moved", root=tmp_path / "course")
    assert verdict.state == "missing" and "that leads out of the course" in str(verdict)


def test_a_learners_settings_and_modules_change_no_verdict(real_course, tmp_path):
    for folder in (real_course, real_course / "notebooks", real_course / "exercises"):
        for name in HOSTILE:
            (folder / f"{name}.py").write_text("import os\nos.write(2, b'shadowed')\nos._exit(0)\n")
        for name, text in SETTINGS.items():
            (folder / name).write_text(text)
    for folder in (real_course, real_course / "notebooks"):
        path = tmp_path / "out.json"
        process = grade(folder, f"--json={path}")
        out, err = process.communicate()
        assert process.returncode == 1 and "shadowed" not in err, err
        assert out.startswith("PASS start.bytes_moved") and states(path)["start.bytes_moved"] == "pass"
        path.unlink()


@pytest.mark.parametrize(("name", "status"), [("SIGHUP", 129), ("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_a_run_with_its_report_and_no_process(real_course, tmp_path, name, status):
    (real_course / "exercises" / "start.py").write_text("while True:\n    pass\n")
    path = tmp_path / "out.json"
    process = grade(real_course, f"--json={path}")
    until(lambda: len(grading_processes(process.pid)) > 1)
    for _ in range(3):  # whoever sends one sends several
        process.send_signal(getattr(signal, name))
    out, err = process.communicate()
    assert (process.returncode, err) == (status, "")
    assert "interrupted: the report is incomplete" in out
    assert json.loads(path.read_text())["complete"] is False
    until(lambda: not grading_processes(process.pid))


@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM"])
@pytest.mark.parametrize("command", [("gpukit", "check"), ("pytest", "--nbval", "-p", "no:cacheprovider", "notebooks")])
def test_a_signal_in_a_check_leaves_no_process(real_course, command, name):
    (real_course / "exercises" / "start.py").write_text("while True:\n    pass\n")
    source = 'import gpukit; gpukit.check("start.bytes_moved")'
    cell = {"cell_type": "code", "id": "check", "metadata": {}, "execution_count": 1, "outputs": [], "source": source}
    nb = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (real_course / "notebooks" / "00_start.ipynb").write_text(json.dumps(nb))
    environment = {k: v for k, v in os.environ.items() if k != "GPUKIT_IMPL"} | {"PYTHONPATH": str(ROOT)}
    plugin = [] if command[0] != "pytest" or _plugin_installed() else ["-p", "gpukit.grading.plugin"]
    process = subprocess.Popen(
        [sys.executable, "-m", *command, *plugin], cwd=real_course, env=environment, stdout=subprocess.DEVNULL
    )
    until(lambda: len(grading_processes(process.pid)) > 1)
    process.send_signal(getattr(signal, name))
    assert process.wait(60) == -getattr(signal, name)
    until(lambda: not grading_processes(process.pid))


@pytest.mark.parametrize(
    ("shell", "status", "said"),
    [
        ('"$@" --json out.json | head -1; exit ${PIPESTATUS[0]}', 1, ""),
        ('"$@" --json out.json >&-', 1, ""),
        ('"$@" --json out.json > /dev/full', 1, "gpukit: the output cannot be written: No space left on device\n"),
        ('"$@" > /dev/full', 2, "gpukit: No space left on device\n"),
        ('"$@" | true; exit ${PIPESTATUS[0]}', 1, ""),
        ('PYTHONIOENCODING=ascii PYTHONWARNINGS=error "$@" --json out.json', 1, ""),
    ],
)
def test_where_nothing_can_be_written_is_a_sentence(real_course, shell, status, said):
    process = grade(real_course, shell=shell)
    _, err = process.communicate()
    assert process.returncode == status, err
    assert said is None or err == said
    assert "Traceback" not in err and "Exception ignored" not in err
    if said == "" and "--json" in shell:
        assert states(real_course / "out.json")["start.bytes_moved"] == "pass"


# ---- validate ----------------------------------------------------------------------------------------------------


def outside(gpu):
    """1 where a recorded row of traffic is outside its bar and says not why, or where the times of a set are outside theirs, else
    0."""
    from gpukit.validation import halves, times, traffic, unseen

    rows = [row for path in (traffic.RESULTS / gpu).glob("*traffic.csv") for row in traffic.read(path)]
    sets = [name for name in unseen.SETS if (times.RESULTS / gpu / times.KERNELS[name][1]).exists()]
    return int(any(row.unexplained for row in rows) or any(halves.outside(times.read(gpu, name)) for name in sets))


def test_validate_prints_what_is_recorded(capsys):
    assert cli.main(["validate", "--gpu", "h200"]) == outside("h200")
    out = capsys.readouterr().out
    assert "TRAFFIC, simulated and measured on h200\nkernel" in out
    assert re.search(r"\n\d+ rows judged: \d+ within their bar", out)
    assert "TIMES, simulated and measured on h200\n" in out
    assert cli.main(["validate", "--misses", "--gpu", "h200"]) == outside("h200")
    assert len(capsys.readouterr().out) < len(out)


def test_validate_ends_with_1_where_a_row_is_outside_its_bar_without_a_reason(capsys, monkeypatch):
    from gpukit.validation import times, traffic

    for module in (times, traffic):
        with monkeypatch.context() as patch:
            cli.main(["validate", "--misses", "--gpu", "h200"])
            assert not re.search("reason (is )?not known\n", capsys.readouterr().out)
            patch.setattr(module, "REASONS", {})
            assert cli.main(["validate", "--misses", "--gpu", "h200"]) == 1
            assert re.search("reason (is )?not known\n", capsys.readouterr().out)


def test_validate_without_measurements(capsys, monkeypatch, tmp_path):
    from gpukit.validation import times

    monkeypatch.setattr(times, "RESULTS", tmp_path)
    assert cli.main(["validate", "--gpu", "H200"]) == outside("h200")
    assert "TIMES, simulated and measured on h200\nnothing is recorded: no such file: " in capsys.readouterr().out
    assert cli.main(["validate", "--gpu", "t4"]) == 1
    assert capsys.readouterr().out.count("nothing is recorded") == 6
    assert cli.main(["validate", "--gpu", "h3000"]) == 2
    assert "no GPU is called 'h3000'" in capsys.readouterr().err


def test_completion_knows_the_public_names_and_loads_nothing():
    code = (
        "import sys, gpukit; print(*dir(gpukit)); print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    names = set("check compare compile exercise hint patch predict trace unpatch use".split())
    assert names <= set(out[0].split()) and out[1] == "[]"


def test_seeds_are_a_number_or_a_range(capsys):
    assert [list(cli._seeds(text)) for text in ("1", "3", "5-7")] == [[1], [1, 2, 3], [5, 6, 7]]
    for text in ("0", "7-5", "x", "3-", "-3", "0-2"):
        with pytest.raises(SystemExit):
            cli.main(["integrity", "dtypes.round", f"--seeds={text}"])
        assert f"got {text!r}" in capsys.readouterr().err
