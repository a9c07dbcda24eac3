"""The learners' copy: what it holds, what it lacks, where it is refused, and that it can be learned from."""

import gzip
import json
import pickle
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from gpukit import cli, course, integrity
from gpukit.classroom import copies, leaks
from gpukit.classroom import release as releasing
from gpukit.classroom.release import release
from gpukit.grading import registry
from gpukit.grading.report import Report
from gpukit.grading.verdict import Verdict
from gpukit.widgets import progress
from tests.classroom import proved
from tests.words import habits

ROOT = course.root(__file__)
pytestmark = pytest.mark.skipif(
    not ((ROOT / "solutions").is_dir() and (ROOT / ".git").exists()), reason="no checkout with solutions"
)
CONCEPTS = ("memory", "softmax")
SECRET = "y = numerator / tl.sum(numerator, axis=0)"  # of solutions/softmax.py


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the copy, what it says of itself, the notebooks that it lacks)"""
    out = tmp_path_factory.mktemp("release") / "copy"
    said, lacking = release(out, list(CONCEPTS), ROOT)
    return out, said, lacking


@pytest.fixture
def small(monkeypatch):
    """A release takes seconds because of the search; these tests are about the rest."""
    monkeypatch.setattr(leaks, "scan", lambda *_: [])


def below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_copy_holds_the_chosen_concepts_and_no_answers(made):
    out, said, _ = made
    names = below(out)
    assert {name for name in names if name.split("/")[0] in ("exercises", "notebooks")} == {
        *(f"exercises/{concept}.py" for concept in CONCEPTS),
        *("notebooks/02_memory.ipynb", "notebooks/09_softmax.ipynb"),
    }
    assert {"Makefile", "pyproject.toml", "README.md", "LICENSE", "gpukit/checks/norms.py"} <= names
    tops = {path.name for path in out.iterdir()}
    assert not tops & {"solutions", "tests", ".git", "CONTRIBUTING.md", "design", ".ci", "INSTRUCTOR.md"}
    assert leaks.scan(out, ROOT) == []
    assert said.concepts == CONCEPTS and said.files.keys() == names - {copies.NAME}
    assert copies.load(out)[0] == copies.read(out) == said
    assert said.stubs["softmax"].encode() == (out / "exercises" / "softmax.py").read_bytes()


def test_prerequisites_are_named_and_not_included(made):
    out, _, lacking = made
    assert lacking == ["00_start", "01_dtypes", "05_triton_basics", "08_fusion"]
    readme = (out / "README.md").read_text()
    assert all(name in readme for name in lacking)
    assert set(re.findall(r"\((notebooks/\S+)\)", readme)) <= below(out)
    assert "make lab" in readme and ".venv/bin/gpukit check" in readme and "## Hand in" in readme
    assert not habits(readme) and "{" not in readme


def test_a_copy_lists_its_own_exercises_and_the_grade_of_another_lists_all(made, monkeypatch, capsys):
    from gpukit.grading import judge as judging

    monkeypatch.chdir(made[0])
    monkeypatch.setattr(judging, "judge", lambda name, **_: Verdict(name, "todo", 0, 1, "exercises"))
    ids = [e.id for e in registry.catalog().values() if e.concept in CONCEPTS]
    assert cli._chosen([]) == ids and cli._chosen(["softmax.fused"]) == ["softmax.fused"]
    assert cli.main(["progress"]) == 0
    assert f"0 of {len(ids)} exercises pass" in capsys.readouterr().out
    assert len(progress.Progress().exercises) == len(ids)
    assert len(Report("exercises", made[0]).rows) == len(registry.catalog())
    all_of_them = len(registry.catalog())
    for arguments, count in (
        ([], len(ids)), (["softmax.fused"], 1), (["all"], all_of_them), (["--submission", "."], all_of_them)
    ):  # fmt: skip
        cli.main(["grade", *arguments])
        said = capsys.readouterr().out
        assert f"\n0 of {count} exercises pass, " in said
        release = f"release: {made[1]}, as this copy's release.json says; {count} of the course's {all_of_them} exercises graded\n"
        assert (release in said) == ("--submission" not in arguments)


@pytest.mark.parametrize(
    "text", ("", "[]", "{}", "[" * 9999, '{"version": "1", "released": "2026-01-01", "commit": 7, "concepts": 7}',
             '{"version": "\\u001b[2J", "released": "", "commit": "", "concepts": ["none"]}'),
)  # fmt: skip
def test_a_release_that_a_learner_has_spoiled_says_nothing_and_all_exercises_are_listed(tmp_path, text):
    (tmp_path / "release.json").write_text(text)
    assert registry.release(tmp_path) == "" and registry.handed_out(tmp_path) == registry.exercises()
    assert len(Report("exercises", tmp_path).notes) == 1


def test_its_makefile_has_the_targets_that_work_there(made):
    out, _, _ = made
    text = (out / "Makefile").read_text()
    assert set(re.findall(r"^([a-z][\w-]*):", text, re.MULTILINE)) == {"help", "lab", "grade", "clean"}
    assert "TRITON" not in text and "PYTEST" not in text
    said = subprocess.run(["make", "--no-print-directory"], cwd=out, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  ([a-z-]+) ", said, re.MULTILINE) == ["help", "lab", "grade", "clean"]
    assert "CONTRIBUTING" not in (out / "AGENTS.md").read_text()
    for target in ("lab", "grade", "clean"):
        done = subprocess.run(["make", "-n", target], cwd=out, capture_output=True, text=True)
        assert done.returncode == 0 and "$(" not in done.stdout, done.stderr


def test_it_is_todo_as_handed_out_and_passes_with_the_solutions(made, tmp_path):
    copy = shutil.copytree(made[0], tmp_path / "copy")
    assert proved.problems(copy, ROOT, list(CONCEPTS)) == []


def test_the_proof_sees_a_stub_that_is_solved_and_a_solution_that_is_not(made, tmp_path, monkeypatch):
    copy = shutil.copytree(made[0], tmp_path / "copy")
    runs = iter([{"memory.gpt2": "fail", "memory.llama": "pass"}, {"memory.gpt2": "pass", "memory.llama": "todo"}])
    monkeypatch.setattr(proved, "states", lambda *_: next(runs))
    assert proved.problems(copy, ROOT, ["memory"]) == [
        "memory.llama: the stub is pass, expected todo",
        "memory.llama: the solution is todo, expected pass",
    ]


def test_a_zip_is_the_same_release(small, tmp_path):
    said, _ = release(tmp_path / "week-1.zip", ["start"], ROOT)
    with zipfile.ZipFile(tmp_path / "week-1.zip") as archive:
        assert {name.split("/")[0] for name in archive.namelist()} == {"week-1"}
    loaded, files = copies.load(tmp_path / "week-1.zip")
    assert loaded == said and b"bytes_moved" in files["exercises/start.py"]
    assert [path.name for path in tmp_path.iterdir()] == ["week-1.zip"]


@pytest.mark.parametrize("place", ("full", "inside", "around", "file", "nowhere"))
def test_places_that_are_refused(place, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    out = {"inside": ROOT / "build" / "copy", "around": ROOT.parent, "nowhere": tmp_path / "a" / "b"}.get(
        place, tmp_path / place
    )
    with pytest.raises(course.CourseError, match=f"{re.escape(str(out))} (lies|is there)|there is no folder"):
        release(out, [], ROOT)
    assert below(tmp_path) == {"full/mine.txt", "file"}


def test_concepts_are_named_whole(tmp_path):
    with pytest.raises(course.CourseError, match=r"whole concepts: softmax, not softmax\.fused"):
        release(tmp_path / "x", ["softmax.fused"], ROOT)
    with pytest.raises(course.CourseError, match=r"no concept is called .softmx.; did you mean .softmax."):
        release(tmp_path / "x", ["softmx"], ROOT)


# ------------------------------------------------------------------------------------- a course of two exercises, in git
@pytest.fixture
def little(tmp_path, small, monkeypatch) -> Path:
    """A checkout with the files of one concept."""
    root = tmp_path / "course"
    for name in ("exercises/start.py", "solutions/start.py", "notebooks/00_start.ipynb", "Makefile"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "exercises" / "start.py").write_text(releasing.stubs.made(root)["start"])
    (root / "gpukit").mkdir()
    (root / "gpukit" / "__init__.py").write_text("")
    commit(root)
    return root


def commit(root: Path) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for call in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *call], cwd=root, check=True, capture_output=True)


def test_only_what_is_committed_is_released(little, tmp_path):
    (little / "exercises" / "start.py").write_text("mine")
    (little / "gpukit" / "draft.py").write_text("mine")
    release(tmp_path / "out", ["start"], little)
    assert "gpukit/draft.py" not in below(tmp_path / "out")
    assert "mine" not in (tmp_path / "out" / "exercises" / "start.py").read_text()


def test_a_committed_answer_is_refused(little, tmp_path):
    shutil.copy(little / "solutions" / "start.py", little / "exercises" / "start.py")
    commit(little)
    with pytest.raises(course.CourseError, match=r"in the last commit exercises/start\.py differs"):
        release(tmp_path / "out", ["start"], little)


def test_a_link_and_a_folder_without_git_are_refused(little, tmp_path):
    (little / "gpukit" / "link.py").symlink_to("/etc/hostname")
    commit(little)
    with pytest.raises(course.CourseError, match=r"gpukit/link\.py is a symbolic link"):
        release(tmp_path / "out", ["start"], little)
    shutil.rmtree(little / ".git")
    with pytest.raises(course.CourseError, match="has no commit to release"):
        release(tmp_path / "out", ["start"], little)
    assert not (tmp_path / "out").exists()


def test_a_leak_stops_the_release_and_leaves_nothing(little, tmp_path, monkeypatch):
    monkeypatch.setattr(leaks, "scan", lambda *_: ["README.md repeats a line of solutions/start.py, line 1: x"])
    with pytest.raises(course.CourseError, match=r"nothing is released: .*\nREADME.md repeats"):
        release(tmp_path / "out", ["start"], little)
    assert [path.name for path in tmp_path.iterdir()] == ["course"]


# ---------------------------------------------------------------------------------------------------------- the search
def test_the_search_reads_every_kind_of_file(tmp_path, monkeypatch):
    line = releasing.stubs.normalised(SECRET)[0]
    assert line in integrity.secrets(ROOT)
    monkeypatch.setattr(integrity, "secrets", lambda *_: {line: "solutions/softmax.py"})

    def put(name: str, data: bytes | str) -> None:
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)

    def notebook(**cell) -> str:
        return json.dumps({"cells": [{"cell_type": "code", "source": [], "outputs": [], **cell}]})

    put("plain.txt", f"    {SECRET}  # why\n")
    put("prose.md", f"divide: `{SECRET}` does it")
    put("report.json", json.dumps({"diagnosis": f"a\n{SECRET}\nb"}))
    put("source.ipynb", notebook(source=["def f():\n", f"    {SECRET}\n", "    return y"]))
    put("output.ipynb", notebook(outputs=[{"text": [f"x\n{SECRET}\n"]}]))
    put("page.html", SECRET.replace("numerator", "<b>numerator</b>").replace(" / ", " &#47; "))
    put("answer.pkl", pickle.dumps({"source": f"{SECRET}"}))
    put("report.md.gz", gzip.compress(SECRET.encode()))
    with zipfile.ZipFile(tmp_path / "in.whl", "w") as archive:
        archive.writestr("gpukit/kernels/softmax.py", SECRET)
        archive.writestr("gpukit/hint.py", SECRET)
    put("dist/in.whl", (tmp_path / "in.whl").read_bytes())
    put("notebooks/.ipynb_checkpoints/x.ipynb", "{}")
    put("gpukit/__pycache__/x.pyc", "")
    put("solutions/x.py", "")
    put("gpukit/kernels/softmax.py", SECRET)  # the library may
    put("fine.txt", "y = numerator")
    (tmp_path / "copy" / "link.txt").symlink_to("/etc/hostname")
    found = leaks.scan(tmp_path / "copy", ROOT)
    told = {sentence.split(" ")[0] for sentence in found if "repeats a line" in sentence}
    assert told == {
        *("plain.txt", "prose.md", "report.json", "source.ipynb", "output.ipynb", "page.html", "answer.pkl"),
        *("report.md.gz!content", "dist/in.whl!gpukit/hint.py", "dist/in.whl!gpukit/kernels/softmax.py"),
    }
    others = {sentence.split(" ")[0] for sentence in found} - told
    assert others == {
        *("notebooks/.ipynb_checkpoints/x.ipynb", "gpukit/__pycache__/x.pyc", "solutions/x.py", "link.txt"),
    }
    # A wheel, searched by itself, is the course's package: its library is the library.
    (only,) = leaks.scan(tmp_path / "in.whl", ROOT)
    assert only.startswith("gpukit/hint.py repeats")


def test_what_cannot_be_searched_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(integrity, "secrets", lambda *_: {"x": "y"})
    (tmp_path / "broken.zip").write_bytes(b"PK\x03\x04" + b"\0" * 10)
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8b\x08" + b"\0" * 10)
    assert len([line for line in leaks.scan(tmp_path, ROOT) if "cannot be searched" in line]) >= 1
    monkeypatch.setattr(integrity, "secrets", lambda *_: {})
    with pytest.raises(course.CourseError, match="no solutions/"):
        leaks.scan(tmp_path, ROOT)


def test_the_commands_say_what_was_made(little, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(little)
    assert cli.main(["release", str(tmp_path / "out"), "--concepts", "start"]) == 0
    assert "concepts: start" in capsys.readouterr().out
    assert cli.main(["release", str(tmp_path / "out"), "--check"]) == 0
    assert "no answer was found" in capsys.readouterr().out
    assert cli.main(["release", str(tmp_path / "out")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    monkeypatch.setattr(leaks, "scan", lambda *_: ["x repeats"])
    assert cli.main(["release", str(tmp_path / "out"), "--check"]) == 1
