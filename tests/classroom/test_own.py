"""A concept of an instructor's own, in a folder that an assignment names: released, learned from, updated, graded, repeated."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpukit import cli, course
from gpukit.classroom import assignment, copies, leaks, own, pool, replay, report, update, versions
from gpukit.classroom.release import release
from gpukit.classroom.store import NAME, Store
from gpukit.grading import registry, stubs
from tests.classroom.test_update import files, put

ROOT = course.root(__file__)
pytestmark = pytest.mark.skipif(
    not ((ROOT / "solutions").is_dir() and (ROOT / ".git").exists()), reason="no checkout with solutions"
)
TOML = 'title = "W"\nown = ["triad"]\nexercises = ["triad"]\nseed = 3\n'


@pytest.fixture
def place(tmp_path):
    """The folder of INSTRUCTOR.md, and week.toml beside it."""
    page = (ROOT / "INSTRUCTOR.md").read_text()
    for name, text in re.findall(r"^```\w+ (triad/\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "week.toml").write_text(TOML)
    yield tmp_path
    registry.remove("triad")


def read(place: Path) -> assignment.Assignment:
    return assignment.read(place / "week.toml")


def test_it_is_an_exercise_like_all_others_until_it_is_removed(place):
    before = registry.catalog()
    chosen = read(place)
    assert chosen.exercises == ("triad.bytes_moved",) and chosen.concepts == ("triad",)
    assert registry.exercise("triad.bytes_moved").hints and registry.named("triad") == ["triad.bytes_moved"]
    assert len(registry.exercises()) == len(before) + 1
    stub = stubs.handed_out("triad", ROOT)
    assert 'raise NotImplementedError("triad.bytes_moved")  # your code here' in stub and "2 * n + n" not in stub
    one = versions.check_version("triad")
    (place / "triad" / "check.md").write_text((place / "triad" / "check.md").read_text() + "\n")
    read(place)
    assert versions.check_version("triad") != one
    registry.remove("triad")
    assert registry.catalog() == before and "gpukit.checks.triad" not in sys.modules


def test_graded_reported_and_repeated_after_the_folder_is_gone(place, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    solution = (place / "triad" / "solution.py").read_text()
    chosen = read(place)
    answers = {"right": solution, "wrong": solution.replace("2 * n + n", "n + n"), "stub": chosen.own[0][1].stub}
    for name, text in answers.items():
        (place / "in" / name).mkdir(parents=True)
        (place / "in" / name / "triad.py").write_text(text)
    grade = ["class", "grade", str(place / "in"), "-a", str(place / "week.toml"), "-o", str(place / "out"), "-j", "1"]
    assert cli.main(grade) == 0
    registry.remove("triad")  # as in another process
    for path in (place / "triad").iterdir():
        path.unlink()
    with Store(place / "out" / NAME) as store:
        report.write(store, place / "out", ROOT)
        found = {name: replay.replay(store, name, "triad.bytes_moved", ROOT) for name in answers}
    assert {name: each.now.state for name, each in found.items()} == {"right": "pass", "wrong": "fail", "stub": "todo"}
    assert found["wrong"].now.diagnosis == "one-input" and all(
        each.same and not each.changed for each in found.values()
    )
    page = (place / "out" / "learners" / "wrong.html").read_text()
    assert "What does a triad move?" in page and "How many does the statement name?" in page
    assert (place / "out" / "compare50" / "distribution" / "triad.py").read_text() == answers["stub"]
    assert solution not in "".join(path.read_text() for path in (place / "out").rglob("*.html"))
    assert "/solution.py" not in (place / "out" / "grades.json").read_text()


def test_another_process_learns_of_it_with_its_work(place):
    _, concept = read(place).own[0]
    version = versions.check_version("triad")
    registry.remove("triad")
    work = pool.Work("triad.bytes_moved", b"def triad_bytes(n):\n    return 3 * n\n", "f", version, 3, concept)
    answer = pool.judged(work)
    assert (answer.verdict.state, answer.verdict.diagnosis) == ("fail", "elements")


def test_released_searched_and_checked_in_the_copy(place):
    chosen = read(place)
    made, _ = release(place / "copy", chosen.concepts, ROOT, chosen.own)
    copy = place / "copy"
    assert made.concepts == ("triad",) and made.stubs["triad"] == chosen.own[0][1].stub
    assert [path.name for path in (copy / "exercises").iterdir()] == ["triad.py"]
    cells = json.loads((copy / "notebooks" / "20_triad.ipynb").read_bytes())["cells"]
    assert [cell["source"] for cell in cells if cell["cell_type"] == "code"] == [
        ['import gpukit; gpukit.check("triad.bytes_moved")']
    ]
    assert not [path for path in copy.rglob("*solution*") if path.is_file()]
    script = "import sys; sys.path.insert(0, ''); from gpukit.cli import main; sys.exit(main(sys.argv[1:]))"

    def check() -> str:
        done = subprocess.run([sys.executable, "-c", script, "check"], cwd=copy, capture_output=True, text=True)
        return done.stdout + done.stderr

    assert "not written yet" in check()
    (copy / "exercises" / "triad.py").write_text((place / "triad" / "solution.py").read_text())
    assert "PASS triad.bytes_moved" in check()
    line = "    return sum([n, n, n]) * 4 + 0 * len(str(n))\n"
    solution = place / "triad" / "solution.py"
    solution.write_text(solution.read_text().replace("    return 4 * (2 * n + n)\n", line))
    (copy / "notes.txt").write_text(line)
    shutil.rmtree(copy / ".gpukit")
    chosen = read(place)
    found = leaks.scan(copy, ROOT, own.solutions(folder for folder, _ in chosen.own))
    assert [each.partition(":")[0] for each in found if "__pycache__" not in each] == [
        "notes.txt repeats a line of triad/solution.py"
    ]
    lesson = {"cells": [{"cell_type": "markdown", "source": [line]}], "metadata": {}}
    (place / "triad" / "lesson.ipynb").write_text(json.dumps(lesson))
    with pytest.raises(course.CourseError, match="nothing is released: answers can be read in it\nnotebooks/20_triad"):
        release(place / "again.zip", chosen.concepts, ROOT, chosen.own)
    assert not (place / "again.zip").exists()


def test_the_command_takes_the_assignment_and_not_both(place, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    out = place / "copy.zip"
    assert cli.main(["release", str(out), "-a", str(place / "week.toml")]) == 0
    assert "concepts: triad\n" in capsys.readouterr().out
    assert cli.main(["release", str(out), "-a", str(place / "week.toml"), "--check"]) == 0
    assert cli.main(["release", str(out), "-a", str(place / "week.toml"), "--concepts", "start"]) == 2
    assert "--assignment and --concepts both say what is released" in capsys.readouterr().err


def test_the_autograder_holds_it_and_needs_no_folder(place, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["class", "gradescope", str(place / "week.toml"), "-o", str(place / "auto.zip")]) == 0
    with zipfile.ZipFile(place / "auto.zip") as archive:
        archive.extractall(place / "source")
    assert not list((place / "source").rglob("*solution*"))
    script = (
        "import sys; sys.path.insert(0, ''); from gpukit.classroom import assignment; from gpukit.grading import registry; "
        "print(assignment.read('../assignment.toml').exercises, registry.added)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=place / "source" / "course", capture_output=True, text=True
    )
    assert done.stdout == "('triad.bytes_moved',) {}\n", done.stderr


def test_an_update_without_it_leaves_its_exercises_whole(tmp_path):
    mine = {f"gpukit/checks/triad.{suffix}": b"old" for suffix in ("py", "md")}
    mine |= {"exercises/triad.py": b"stub\n", "notebooks/20_triad.ipynb": b'{"cells": []}'}
    copy = put(tmp_path / "copy", files() | mine, concepts=("start", "triad"))
    (copy / "exercises" / "triad.py").write_bytes(b"answer\n")
    newer = put(tmp_path / "newer", files() | {"gpukit/__init__.py": b"version = 2\n"}, "1.1")
    update.update(copy, newer)
    assert all((copy / name).read_bytes() == data for name, data in mine.items() if name != "exercises/triad.py")
    assert (copy / "exercises" / "triad.py").read_bytes() == b"answer\n"
    assert not (copy / "gpukit" / "old.py").exists() or "gpukit/old.py" in copies.read(newer).files
    said = copies.read(copy)
    assert said.concepts == ("start", "triad") and mine.keys() <= said.files.keys() and said.stubs["triad"] == "stub\n"


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        ({"week.toml": TOML.replace('"triad"', "3", 1)}, 'own must be a list of folders, such as ["scan"], got [3]'),
        ({"week.toml": TOML.replace('["triad"]', '["softmax"]', 1)}, "no concept or exercise is called 'triad'"),
        ({"week.toml": TOML.replace('["triad"]', '["traid"]', 1)}, "there is no folder .*traid; own names folders"),
        ({"week.toml": TOML.replace('["triad"]', '["triad", "./triad"]', 1)}, "two folders called triad"),
        ({"triad/check.py": None}, "triad: check.py cannot be read: No such file"),
        ({"triad/check.md": b"\xff"}, "triad: check.md is not UTF-8 text"),
        ({"triad/check.py": "1 +"}, "triad: check.py cannot be used: SyntaxError"),
        ({"triad/check.py": "1 / 0"}, "triad: check.py cannot be used: ZeroDivisionError"),
        ({"triad/check.py": "x = 1"}, "triad: check.py cannot be used: AttributeError"),
        ({"triad/check.py": "EXERCISES = []"}, "do not speak of the same exercises: triad.bytes_moved"),
        ({"triad/check.md": "# triad\nhello\n"}, "triad: check.md, line 2: 'hello' is no heading"),
        (
            {"triad/check.md": "# triad\nnotebook 20_triad\n"},
            "triad: triad.bytes_moved has no prose: check.md has no line",
        ),
        (
            {"triad/solution.py": "def triad_bytes(n):\n    return 12 * n\n"},
            "solution.py, line 1: .* would be handed out",
        ),
        ({"triad/solution.py": "def ("}, "triad: solution.py, line 1: "),
    ),
)
def test_what_is_wrong_with_a_folder_is_a_sentence(place, change, sentence):
    before = registry.catalog()
    for name, text in change.items():
        path = place / name
        path.unlink() if text is None else path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(assignment.BadAssignment, match=sentence.replace("[", r"\[")) as caught:
        read(place)
    assert str(caught.value).startswith(str(place / "week.toml")) and "\n" not in str(caught.value)
    assert registry.catalog() == before


def test_names_that_are_the_courses_are_refused(place):
    (place / "triad").rename(place / "softmax")
    (place / "week.toml").write_text(TOML.replace("triad", "softmax"))
    with pytest.raises(assignment.BadAssignment, match="the course has a concept of that name; rename the folder"):
        read(place)
    (place / "softmax").rename(place / "triad")
    told = place / "triad" / "check.md"
    told.write_text(told.read_text().replace("20_triad", "09_softmax"))
    (place / "week.toml").write_text(TOML)
    with pytest.raises(assignment.BadAssignment, match="names the notebook 09_softmax, which is that of softmax"):
        read(place)
