"""A class of 60 with everything that goes wrong is graded with exactly the expected table, also after a kill in the middle."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpukit.classroom import assignment, intake, marks, roster
from gpukit.classroom.store import NAME, Store
from tests.classroom import synthetic, term
from tests.waiting import until

pytestmark = pytest.mark.skipif(not (synthetic.ROOT / "solutions").is_dir(), reason="a copy without solutions")


def command(folder: Path, *more: str) -> subprocess.Popen:
    words = [
        "class",
        "grade",
        "class",
        "-a",
        "assignment.toml",
        "-o",
        "out",
        "-j",
        "2",
        "--roster",
        "roster.csv",
        *more,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "gpukit", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def judges(pid: int) -> set[str]:
    """The processes that a run has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return set(children.read_text().split()) if children.exists() else set()


def ended(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def marked(folder: Path) -> dict[str, marks.Marked]:
    with Store(folder / "out" / NAME, create=False) as store:
        return {each.student: each for each in marks.marked(assignment.read(folder / "assignment.toml"), store)}


def differing(folder: Path, expected: dict[str, tuple[str, ...]]) -> dict[str, tuple]:
    """The students whose verdicts are not the expected ones, and both."""
    found = {}
    for student, row in marked(folder).items():
        got = [f"{m.state}:{m.graded.diagnosis}" if m.graded and m.graded.diagnosis else m.state for m in row.marks]
        fits = zip(got, expected[student], strict=True)
        if not all(g == e or (":" not in e and g.partition(":")[0] == e) for g, e in fits):
            found[student] = (got, expected[student])
    return found


@pytest.mark.prove
def test_a_class_of_sixty_is_graded_as_expected_also_after_a_kill(tmp_path):
    expected = synthetic.make(tmp_path)
    assert len(expected) == 60

    killed = command(tmp_path)
    started = []
    for line in killed.stdout:
        started.append(line)
        if re.match(r"\[2\d/60\]", line):
            break
    theirs = judges(killed.pid)
    assert len(theirs) == 2, "".join([*started, killed.stderr.read()])
    killed.kill()
    killed.communicate()
    until(lambda: all(map(ended, theirs)))
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if "journal" not in path.name) == [NAME]
    before = {mark.graded for row in marked(tmp_path).values() for mark in row.marks if mark.graded}
    open_ones = [mark for row in marked(tmp_path).values() for mark in row.marks if mark.state == marks.NOT_GRADED]
    assert len(before) >= 30 and open_ones and {mark.why for mark in open_ones} == {"not graded yet"}

    again = command(tmp_path)
    out, err = again.communicate()
    assert (again.returncode, err) == (0, ""), out + err
    assert f"{len(before)} verdicts were there" in out
    assert differing(tmp_path, expected) == {}
    rows = marked(tmp_path)
    assert before <= {mark.graded for row in rows.values() for mark in row.marks}  # none was judged twice
    assert rows["right03"].score == 30 and rows["half"].score == 10 and rows["absent"].score == 0
    assert (rows["late"].raw, rows["late"].days_late, rows["late"].score) == (30, 1, 15)
    sentences = {student: {mark.why for mark in row.marks if mark.why} for student, row in rows.items()}
    assert sentences["absent"] == {"nothing was handed in"}
    assert sentences["linked"] == {f"{name}.py is a symbolic link, not a file" for name in ("start", "memory")}
    assert sentences["huge"] == {"start.py is larger than 1 MiB"}
    assert all("zip bomb" in sentence for sentence in sentences["bomb"])
    assert all(sentences[student] for student, verdicts in expected.items() if "missing" in verdicts)

    resubmitted = tmp_path / "class" / "half" / "memory.py"
    shutil.copy(synthetic.ROOT / "solutions" / "memory.py", resubmitted)
    third = command(tmp_path)
    out, err = third.communicate()
    assert (third.returncode, err) == (0, ""), out + err
    assert "0 exercises run" in out and "[59/60] have no file to judge, or only files" in out
    assert "[60/60] half: 3 pass" in out and out.count("/60]") == 2


def test_an_interrupted_run_says_so_and_leaves_nothing_behind(tmp_path):
    synthetic.make(tmp_path)
    run = command(tmp_path)
    assert any(line.startswith("fence around") for line in run.stdout)
    until(lambda: len(judges(run.pid)) == 2 or run.poll() is not None)
    theirs = judges(run.pid)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate()
    assert run.returncode == 128 + signal.SIGTERM, out + err
    assert err == "" and re.search(r"interrupted: \d+ verdicts are kept; run the same command again", out)
    until(lambda: all(map(ended, theirs)))
    assert marked(tmp_path)["absent"].complete and os.listdir(tmp_path / "out") == [NAME]


def test_a_class_to_measure_with_is_the_same_each_time_and_can_be_read(tmp_path):
    for name in ("a", "b"):
        term.make(tmp_path / name, 8)
    first, second = (
        {path.relative_to(tmp_path / name).as_posix(): path.read_bytes() for path in (tmp_path / name).rglob("*.py")}
        for name in ("a", "b")
    )
    assert first == second and len({*first.values()}) > len(first) // 2
    chosen = assignment.read(tmp_path / "a" / "assignment.toml")
    people = roster.parse((tmp_path / "a" / "roster.csv").read_text())
    found = [*intake.read(tmp_path / "a" / "class", chosen.concepts, people)]
    assert chosen.exercises == term.EXERCISES and chosen.seed is None
    assert [each.student for each in found] == [f"u{n:03}" for n in range(8)]
    assert all(each.files.keys() == {*chosen.concepts} for each in found)
