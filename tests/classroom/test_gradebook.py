"""Gradebooks have the columns that Canvas, Moodle and nbgrader document, and no line that an import would get wrong."""

import contextlib
import csv
import io
import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from gpukit.classroom import assignment, gradebook, marks, roster
from tests.classroom import graded


def table(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline=""), strict=True))


@pytest.fixture
def parts(tmp_path):
    """The assignment, the marks, the people and the store."""
    with contextlib.ExitStack() as stack:
        yield lambda **changed: _parts(stack.enter_context(graded.make(tmp_path)), **changed)


def _parts(store, title=""):
    chosen = assignment.parse(graded.ASSIGNMENT.replace("Week 2: bytes, FLOPs", title or "Week 2: bytes, FLOPs"))
    return chosen, marks.marked(chosen, store), {each.id: each for each in roster.parse(graded.ROSTER).students}, store


def test_canvas(parts):
    """The header row and "Points Possible" are what Canvas's own exporter writes; a row needs an id, not only a name."""
    chosen, rows, people, _ = parts()
    book = gradebook.canvas(chosen, rows, people)
    assert table(book.text) == [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Week 2: bytes, FLOPs"],
        ["    Points Possible", "", "", "", "", "12.5"],
        ["Ada Lovelace", "90311", "", "", "A", "10"],  # two days begun, 0.1 each
        ["Grace Hopper, jr.", "", "u2", "", "B", "0"],
        ["Alan Turing", "90314", "", "", "A", "0"],
    ]
    assert book.problems == (
        "canvas.csv lacks s3: the roster's column canvas_id, sis_user_id or sis_login_id is empty",
    )


def test_moodle_by_email_or_by_id_number(parts):
    chosen, rows, people, _ = parts()
    book = gradebook.moodle(chosen, rows, people)
    assert table(book.text) == [
        ["ID number", "Email address", "Week 2: bytes, FLOPs", "start.bytes_moved", "memory.gpt2"],
        ["", "ada@uni.example", "10", "10", "2.5"],
        ["", "grace@uni.example", "0", "0", "0"],
    ]
    assert book.problems == (
        "moodle.csv lacks s3, who is not graded completely",
        "moodle.csv lacks s4: the roster's column email is empty",
    )
    numbered = graded.ROSTER.replace("canvas_id,sis_user_id", "canvas_id,id_number")
    people = {each.id: each for each in roster.parse(numbered).students}
    book = gradebook.moodle(chosen, rows, people)
    assert table(book.text)[1:] == [["u2", "grace@uni.example", "0", "0", "0"]]
    assert book.problems == ("moodle.csv lacks s1, s3, s4: the roster's column id_number is empty",)


def test_nbgrader(parts):
    """The columns of nbgrader's CsvExportPlugin, which writes times in UTC."""
    chosen, rows, people, _ = parts()
    book = gradebook.nbgrader(chosen, rows, people)
    head, ada, grace, *_ = table(book.text)
    assert ",".join(head) == (
        "assignment,duedate,timestamp,student_id,last_name,first_name,email,raw_score,late_submission_penalty,score,max_score"
    )
    title, due = "Week 2: bytes, FLOPs", "2026-10-12 10:00:00"
    who = ["s1", "Lovelace", "Ada", "ada@uni.example"]
    assert ada == [title, due, "2026-10-13 10:30:00", *who, "12.5", "2.5", "10", "12.5"]
    assert grace == [title, due, "", "s2", "Hopper, jr.", "Grace", "grace@uni.example", "0", "0", "0", "12.5"]
    assert book.problems == ("nbgrader.csv: s3 is not graded completely",)


def test_without_a_roster_no_learning_system_is_told_anything(parts):
    chosen, rows, _, _ = parts()
    assert gradebook.canvas(chosen, rows, {}) == gradebook.Book(
        "", ("canvas.csv needs a roster with the column canvas_id, sis_user_id or sis_login_id",)
    )
    assert gradebook.moodle(chosen, rows, {}).text == ""
    assert len(table(gradebook.nbgrader(chosen, rows, {}).text)) == 5


def test_a_title_that_canvas_would_ignore_is_refused(parts):
    chosen, rows, people, _ = parts(title="My Final Score")
    assert gradebook.canvas(chosen, rows, people) == gradebook.Book(
        "", ("canvas.csv is not written: Canvas ignores a column whose title holds 'Final Score'",)
    )


def test_somebody_who_is_not_on_the_roster_has_no_line(parts):
    chosen, rows, people, _ = parts()
    del people["s4"]
    book = gradebook.canvas(chosen, rows, people)
    assert "Turing" not in book.text and "canvas.csv lacks s4, who is not on the roster" in book.problems


def test_being_late_that_costs_nothing_is_said_without_a_number(parts):
    row = replace(parts()[1][0], raw=0.0, penalty=0.0, days_late=1)
    assert gradebook.points(row) == "0 of 12.5 points, handed in 1 day late"


def test_students_who_are_left_out_for_one_reason_are_one_sentence(parts):
    chosen, rows, people, _ = parts()
    del people["s2"], people["s4"]
    assert "canvas.csv lacks s2, s4, who are not on the roster" in gradebook.canvas(chosen, rows, people).problems


def test_json_holds_everything_but_the_secret(parts):
    chosen, rows, _, store = parts()
    text = gradebook.as_json(chosen, rows, store)
    content = json.loads(text)
    ada, grace, emmy, _ = content["students"]
    assert (ada["score"], ada["days_late"], ada["complete"], emmy["complete"]) == (10, 2, True, False)
    assert ada["exercises"][0]["graded"]["file_hash"] == graded.RIGHT and ada["exercises"][0]["tries"] == 2
    assert grace["exercises"][0]["graded"]["diagnosis"] == "one-way"
    assert grace["exercises"][1]["why"] == "the submission has no memory.py"
    assert content["assignment"]["deadline"] == "2026-10-12T12:00:00+02:00" and "rosebud" not in text


def test_junit_has_a_suite_for_each_student(parts):
    _, rows, _, _ = parts()
    suites = ElementTree.fromstring(gradebook.junit(rows).partition("\n")[2])
    counts = [[suite.get(key) for key in ("name", "tests", "failures", "errors", "skipped")] for suite in suites]
    assert counts == [
        ["s1", "2", "0", "0", "0"],
        ["s2", "2", "2", "0", "0"],
        ["s3", "2", "0", "0", "1"],  # not graded costs nobody anything
        ["s4", "2", "2", "0", "0"],
    ]
    assert "<script>" in suites.find(".//failure").text


def test_markdown(parts):
    _, rows, _, _ = parts()
    text = gradebook.markdown(rows)
    assert "## s1: 10 of 12.5 points, after 2.5 lost by handing in 2 days late\n" in text
    assert "## s3: 10 of 12.5 points so far: not everything is graded\n" in text
    assert "| memory.gpt2 | missing | 0/0 |" in text and "<script>" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    ((0.0, "0"), (7.0, "7"), (7.5, "7.5"), (100.0, "100"), (10 / 3, "3.33"), (12345.678, "12345.68"), (None, "")),
)
def test_numbers(value, text):
    assert gradebook.number(value) == text


def test_a_cell_is_never_a_formula():
    assert gradebook._cell("=1+1") == "'=1+1" and gradebook._cell("ada@uni.example") == "ada@uni.example"
