"""A learner's page tells that learner's verdicts and nothing of anybody else; the page of the class counts right."""

import html
import re

import pytest

from gpukit.classroom import assignment, marks, pages, report
from gpukit.classroom.store import NAME
from gpukit.course import root
from tests.classroom import graded

ROOT = root(__file__)


@pytest.fixture
def written(tmp_path):
    with graded.make(tmp_path) as store:
        problems = report.write(store, tmp_path, ROOT)
    return tmp_path, problems


def cells(page: str) -> list[list[str]]:
    """The texts of a page's tables, row by row."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [
        [
            html.unescape(re.sub(r"<[^>]+>", "", cell))
            for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)
        ]
        for row in rows
    ]


def test_everything_is_written_from_the_store(written):
    folder, problems = written
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {
        *(NAME, "canvas.csv", "moodle.csv", "nbgrader.csv", "grades.json", "grades.md", "junit.xml", "class.html"),
        *(f"learners/s{n}.html" for n in (1, 2, 3, 4)),
        *("compare50/distribution/memory.py", "compare50/distribution/start.py"),
        *(f"compare50/submissions/s{n}/start.py" for n in (1, 2, 3)),
        *("compare50/submissions/s1/memory.py", "compare50/submissions/s3/memory.py"),
    }
    assert len(problems) == 4
    assert (folder / "compare50/submissions/s3/memory.py").read_bytes() == b"other = 1\n"
    assert "NotImplementedError" in (folder / "compare50/distribution/memory.py").read_text()


def test_a_second_report_leaves_nothing_of_the_first(written):
    folder, _ = written
    (folder / "mine.txt").write_text("kept")
    (folder / "learners" / "gone.html").write_text("of somebody who left")
    (folder / "compare50" / "submissions" / "gone").mkdir()
    with graded.Store(folder / NAME) as store:
        store.set(roster="")
        problems = report.write(store, folder, ROOT)
    assert not (folder / "learners" / "gone.html").exists() and not (folder / "compare50/submissions/gone").exists()
    assert not (folder / "canvas.csv").exists() and (folder / "mine.txt").read_text() == "kept"
    assert any("canvas.csv needs a roster" in problem for problem in problems)


def test_a_learners_page(written):
    folder, _ = written
    ada, grace = ((folder / "learners" / f"{name}.html").read_text() for name in ("s1", "s2"))
    assert "<b>10</b> of 12.5 points · 2 of 2 exercises pass" in ada and "Ada Lovelace (s1)" in ada
    assert "This came in 2 days late, which costs 2.5 of 12.5 points." in ada
    assert "costs 10% of the points. What comes more than 2 days late does not count." in ada
    assert ["start.bytes_moved", "a" * 16, "7", "v1", "2026-10-14 08:00 UTC"] in cells(ada)
    assert "gpukit 0.1.0, torch 2.13.0, triton 3.7.1" in ada and "start-1.py was taken" in ada
    said = html.unescape(re.search(r'<pre class="said fail">(.*?)</pre>', grace, re.DOTALL)[1])
    assert said == "\n".join(graded.LINES)
    assert "the submission has no memory.py" in grace and "<script" not in grace
    alan = (folder / "learners" / "s4.html").read_text()
    assert (
        alan.count("nothing was handed in") == 1 and "How it was graded" not in alan
    )  # one sentence for both exercises


def test_a_learners_page_names_nobody_else(written):
    folder, _ = written
    people = {"s1": "Lovelace", "s2": "Hopper", "s3": "Noether", "s4": "Turing"}
    for student in people:
        page = (folder / "learners" / f"{student}.html").read_text()
        for other, name in people.items():
            if other != student:
                assert name not in page and not re.search(rf"\b{other}\b", page), (student, other)
    assert "s2.zip may be s2 and s3" in (folder / "class.html").read_text()  # the instructor reads that


def test_not_graded_is_said_and_costs_nothing(written):
    folder, _ = written
    emmy = (folder / "learners" / "s3.html").read_text()
    assert (
        "the points may grow" in emmy
        and ["not yet of 2.5"] == [row[3] for row in cells(emmy) if "memory.gpt2" in row[0]][:1]
    )


def test_the_page_of_the_class(written):
    folder, _ = written
    page = (folder / "class.html").read_text()
    rows = cells(page)
    assert "3 of 4 students handed in" in page and "Not graded completely: 1." in page
    start, memory = (next(r for r in rows if r[0].startswith(name)) for name in ("start.bytes_moved", "memory.gpt2"))
    assert start[1:] == ["2 of 4", "1 fail, 1 missing", "1.3", "0.25 s"]
    assert memory[1:] == ["1 of 4", "2 missing, 1 not graded", "1.0", "0.25 s"]
    assert ["start.bytes_moved", "one-way"] == (found := next(r for r in rows if "one-way" in r))[:2]
    assert found[2].startswith("This counts one direction only") and found[3:] == ["1", "2"]
    assert re.search(r'<a href="learners/s1.html">s1</a>', page)


@pytest.mark.parametrize("name", ("s1", "class"))
def test_a_page_is_one_file_for_light_and_dark_and_paper(written, name):
    folder, _ = written
    page = (folder / ("class.html" if name == "class" else f"learners/{name}.html")).read_text()
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    assert not re.search(r"<(script|link|img|iframe)|https?://|@import|url\(", page)


def test_names_that_are_no_file_names():
    assert pages.file_name("s1042") == "s1042"
    names = ["../../etc", "a/b", "a\\b", ".", "Ada Lovelace", "a.zip", "x" * 300, "\udcff", "Ädä"]
    made = [pages.file_name(name) for name in names]
    assert len(set(made)) == len(names) and all(re.fullmatch(r"[\w@+-]{1,70}", name) for name in made)
    assert made[-1] == "Ädä"


def test_an_empty_class(tmp_path):
    with graded.make(tmp_path) as store:
        store.replace([], [])
        report.write(store, tmp_path, ROOT)
        chosen = assignment.parse(graded.ASSIGNMENT)
        assert marks.marked(chosen, store) == []
    assert "None was recognized." in (tmp_path / "class.html").read_text()
