"""Reports (JSON, Markdown, JUnit, table) and the recorded progress."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from gpukit.grading import registry
from gpukit.grading.report import PROGRESS, Report, missing, plain, record, recorded, row
from gpukit.grading.verdict import STATES, Verdict

IDS = ("alpha.first", "alpha.second", "beta.third")


@pytest.fixture(autouse=True)
def three_exercises(monkeypatch):
    monkeypatch.setattr(registry, "exercises", lambda: {name: SimpleNamespace(id=name) for name in IDS})


def verdict(exercise_id, state="pass", *lines, label="", impl="exercises"):
    return Verdict(exercise_id, state, 2 if state == "pass" else 1, 2, impl, lines, label, 1.23456)


def test_json_has_one_row_for_every_exercise():
    report = Report("exercises", Path("/course"))
    report.add(verdict("beta.third", "fail", "beta.third: wrong", "  why", label="tail-mask"))
    content = json.loads(report.as_json())
    assert list(content) == ["impl", "complete", "fence", "exercises"]
    assert content["impl"] == "exercises" and content["complete"] is False
    assert [r["id"] for r in content["exercises"]] == list(IDS)
    assert [r["state"] for r in content["exercises"]] == ["missing", "missing", "fail"]
    assert content["exercises"][2] == {
        "id": "beta.third", "state": "fail", "checks_passed": 1, "checks_total": 2, "label": "tail-mask",
        "diagnosis": "beta.third: wrong\n  why", "seconds": 1.235,
    }  # fmt: skip
    for exercise_id in IDS[:2]:
        report.add(verdict(exercise_id))
    assert report.complete and not report.all_passed
    assert report.summary == "2 of 3 exercises pass, 1 fail"
    report.interrupted = True
    assert not report.complete


def test_a_run_of_some_notebooks_counts_what_is_in_them():
    report = Report("exercises", Path("/course"))
    report.add(verdict("alpha.first"))
    said = report.as_text(asked=())
    assert said.endswith("\n1 of 1 exercises pass; 2 more were not asked for") and "missing" not in said
    assert report.as_text(asked=IDS[:2]).endswith("\n1 of 2 exercises pass, 1 missing; 1 more was not asked for")
    assert report.as_text().endswith("1 of 3 exercises pass, 2 missing")


def test_a_verdict_goes_before_a_missing_cell():
    report = Report("exercises", Path("/course"))
    report.add(missing("alpha.first", "no cell"))
    report.add(verdict("alpha.first"))
    report.add(missing("alpha.first", "no cell"))
    assert report.rows[0]["state"] == "pass"


def test_no_gpu_does_not_count_against_the_whole():
    report = Report("exercises", Path("/course"))
    for exercise_id, state in zip(IDS, ("pass", "skipped", "pass"), strict=True):
        report.add(verdict(exercise_id, state, f"{exercise_id}: no GPU"))
    assert report.all_passed


def test_a_verdict_spells_out_what_is_no_text_and_cuts_what_is_long():
    """A learner's exception can say anything, in lines of any length."""
    lines = ("a" * 1000, "bell \x07, tab\t, \x1b[2J, \ud800, \u202e, é, 1\r2", "two\nlines", "x" * 399)
    found = verdict("alpha.first", "error", *lines)
    assert found.lines == (
        "a" * 399 + "…",
        "bell \\x07, tab , \\x1b[2J, \\ud800, \\u202e, é, 1\\r2",
        "two",
        "lines",
        "x" * 399,
    )
    assert Verdict(**{**found.as_dict(), "lines": found.lines}) == found  # as it is handed to a notebook
    assert str(found).encode() and all(len(line) <= 400 for line in str(found).splitlines())
    assert Verdict("a.b", "pass", 1, 1, "exercises", detail="\x1b[2J\tone\ntwo").detail == "\\x1b[2J\tone\ntwo"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"alpha.first": {"state": 1, "checks_total": "x"}}', '{"alpha.first": {}}']
)
def test_progress_that_somebody_edited_starts_again(course, text):
    (course / PROGRESS).parent.mkdir()
    (course / PROGRESS).write_text(text)
    assert recorded(course) == {}


def test_a_report_that_cannot_be_written_is_a_sentence(tmp_path):
    report = Report("exercises", Path("/course"))
    (tmp_path / "folder").mkdir()
    problems = report.write(tmp_path / "folder", "/dev/full", "/dev/null")
    assert problems == [
        f"{tmp_path / 'folder'} cannot be written: Is a directory",
        "/dev/full cannot be written: No space left on device",
    ]
    assert Path("/dev/full").is_char_device() and list(tmp_path.rglob("*")) == [tmp_path / "folder"]


def test_text_is_free_of_colours_and_host_paths():
    report = Report("exercises", Path("/home/me/my course"))
    lines = (
        "alpha.first: \x1b[31mwrong\x1b[0m\x07",
        "  /home/me/my course/exercises/alpha.py, line 3: 12.2 GB/s, 3/4 of 1.0/s",
        '  File "/opt/env/lib/python3.11/site-packages/torch/nn.py" and ~/x, exercises/alpha.py',
    )
    report.add(verdict("alpha.first", "error", *lines))
    shown = report.rows[0]["diagnosis"]
    assert shown.splitlines() == [
        "alpha.first: \\x1b[31mwrong\\x1b[0m\\x07",
        "  exercises/alpha.py, line 3: 12.2 GB/s, 3/4 of 1.0/s",
        '  File "nn.py" and ~/x, exercises/alpha.py',
    ]
    assert plain("a\tb\n\x1b]8;;http://x\x07c") == "a\tb\nc"


def test_markdown_is_a_table():
    report = Report("solutions", Path("/course"))
    report.add(verdict("alpha.first", "fail", "alpha.first: a | b < c", label="tail-mask", impl="solutions"))
    lines = report.as_markdown().splitlines()
    assert lines[0] == (
        "0 of 3 exercises pass, 1 fail, 2 missing. Solutions were run: an instructor's run, not a grade. "
        "Incomplete: not every exercise was run."
    )
    assert lines[2] == "| exercise | state | checks | label | diagnosis | seconds |"
    assert lines[4] == "| alpha.first | fail | 1/2 | tail-mask | a \\| b &lt; c | 1.2 |"
    assert len(lines) == 9 and lines[-1].startswith("Fence around each exercise: ")


@pytest.mark.parametrize("state", STATES)
def test_junit_names_the_exercise_in_every_state(state):
    report = Report("exercises", Path("/course"))
    lines = () if state == "pass" else (f"alpha.first: {state} & <more>", "  detail\x00")
    report.add(verdict("alpha.first", state, *lines))
    suite = ElementTree.fromstring(report.as_junit())[0]
    assert suite.attrib["tests"] == "3"
    cases = suite.findall("testcase")
    assert [case.attrib["name"] for case in cases] == list(IDS)
    assert cases[0].find("properties/property[@name='exercise']").attrib["value"] == "alpha.first"
    kinds = {child.tag for child in cases[0]} - {"properties"}
    expected = {"pass": set(), "skipped": {"skipped"}, "error": {"error"}, "crashed": {"error"}}.get(state, {"failure"})
    assert kinds == expected
    if state != "pass":
        assert cases[0].find(kinds.pop()).attrib["message"] == f"alpha.first: {state} & <more>"


def test_reports_are_written_where_asked(tmp_path):
    report = Report("exercises", Path("/course"))
    report.write(json=tmp_path / "new" / "a.json", markdown=None, junit=tmp_path / "a.xml")
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["a.json", "a.xml"]


def test_a_pass_has_no_diagnosis():
    assert row(verdict("alpha.first"))["diagnosis"] == ""


# ---- progress
@pytest.fixture
def course(tmp_path):
    (tmp_path / "exercises").mkdir()
    (tmp_path / "exercises" / "alpha.py").write_text("one\n")
    return tmp_path


def test_progress_keeps_the_last_verdict_and_sees_edits(course):
    assert recorded(course) == {}
    record(verdict("alpha.first", "fail", "alpha.first: wrong", label="tail-mask"), course)
    record(verdict("alpha.second"), course)
    record(verdict("alpha.first"), course)
    found = recorded(course)
    assert {name: r["state"] for name, r in found.items()} == {"alpha.first": "pass", "alpha.second": "pass"}
    assert not found["alpha.first"]["edited"]
    (course / "exercises" / "alpha.py").write_text("two\n")
    assert recorded(course)["alpha.first"]["edited"]


@pytest.mark.parametrize("odd", ["pipe", "link"])
def test_a_verdict_on_what_is_no_file_is_recorded_without_reading_it(course, odd):
    """A pipe has no end until somebody writes to it, and /dev/zero has none at all."""
    path = course / "exercises" / "alpha.py"
    path.unlink()
    if odd == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    record(verdict("alpha.first", "missing"), course)
    assert recorded(course)["alpha.first"]["state"] == "missing"


def test_solutions_are_no_progress(course):
    record(verdict("alpha.first", impl="solutions"), course)
    assert not (course / PROGRESS).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"alpha.first": 3}', "\x00"])
def test_damaged_progress_starts_again(course, text):
    (course / PROGRESS).parent.mkdir()
    (course / PROGRESS).write_text(text)
    assert recorded(course) == {}
    record(verdict("alpha.first"), course)
    assert recorded(course)["alpha.first"]["state"] == "pass"


def test_a_folder_that_cannot_be_written_is_no_error(course, capsys):
    (course / ".gpukit").write_text("a file where the folder should be")
    for _ in range(2):  # and said once
        record(verdict("alpha.first"), course)
    assert recorded(course) == {}
    assert capsys.readouterr().err == "gpukit: progress is not saved in .gpukit/progress.json: File exists\n"
