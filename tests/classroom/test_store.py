"""Verdicts are kept as they were found, in one file; "not graded yet" is not "missing"; points follow the assignment's rules."""

import sqlite3
from dataclasses import replace

import pytest

from gpukit.classroom import assignment, marks
from gpukit.classroom.store import BadStore, Expected, Graded, HandedIn, Store

TEXT = 'title = "t"\nexercises = ["memory.gpt2", "memory.llama"]\npoints = 10\n'
LATE = "deadline = 2026-10-12T12:00:00+00:00\nlate = {per_day = 0.25, at_most = 2}\n"
PASS = Graded(
    "ada",
    "memory.gpt2",
    "f" * 64,
    "c1",
    7,
    "pass",
    "",
    "GPT-2",
    9,
    9,
    (),
    0.5,
    "2026-10-01T10:00:00+00:00",
    "0.1.0",
    "2",
    "3",
)
FAIL = replace(
    PASS, exercise="memory.llama", state="fail", diagnosis="two-matrices", lines=("memory.llama: wrong", "why?")
)


def expect(*graded: Graded) -> list[Expected]:
    return [Expected(each.student, each.exercise, each.file_hash, each.check_version, each.seed) for each in graded]


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "grades.sqlite") as store:
        yield store


def marked(store: Store, more: str = "") -> marks.Marked:
    (found,) = marks.marked(assignment.parse(TEXT + more), store)
    return found


def test_what_is_kept_comes_back_after_the_file_is_opened_again(store):
    handed_in = HandedIn("ada", "Ada Å", "ada@x", "ada.zip", "2026-10-01T10:00:00+02:00", ("a note", "another"))
    store.add(PASS, FAIL)
    store.replace([handed_in, HandedIn("bob")], expect(PASS, FAIL))
    store.keep_files({PASS.file_hash: b"def f(): pass\r\n"})
    store.set(assignment=TEXT, fence="all")
    with Store(store.path) as again:
        assert again.verdicts() == [PASS, FAIL] and again.verdicts("bob") == []
        assert again.handed_in() == [handed_in, HandedIn("bob")]
        assert again.expected() == expect(PASS, FAIL)
        assert again.file(PASS.file_hash) == b"def f(): pass\r\n"
        assert (again.setting("fence"), again.setting("none")) == ("all", "")
    assert [path.name for path in store.path.parent.iterdir()] == ["grades.sqlite"]


@pytest.mark.parametrize("changed", ({"file_hash": "e" * 64}, {"check_version": "c2"}, {"seed": 8}))
def test_a_verdict_counts_for_its_own_file_check_and_seed_alone(store, changed):
    store.add(PASS)
    store.replace([HandedIn("ada")], expect(replace(PASS, **changed)))
    assert store.current() == {}
    assert store.same(PASS.exercise, PASS.file_hash, PASS.check_version, PASS.seed) == PASS
    assert (
        store.same(
            *(changed.get(name, getattr(PASS, name)) for name in ("exercise", "file_hash", "check_version", "seed"))
        )
        is None
    )
    store.add(replace(PASS, **changed))
    assert list(store.current()) == [("ada", "memory.gpt2")]
    store.add(replace(PASS, **changed, state="fail"))  # the same key again
    assert [each.state for each in store.verdicts()] == ["pass", "fail"]


def test_a_pass_is_worth_its_points_and_missing_is_not_not_graded(store):
    missing = replace(expect(FAIL)[0], file_hash="", why="the submission has no memory.py")
    store.add(PASS)
    store.replace([HandedIn("ada")], [*expect(PASS), missing])
    found = marked(store)
    assert [(mark.state, mark.points) for mark in found.marks] == [("pass", 10), ("missing", 0)]
    assert found.marks[1].why == "the submission has no memory.py"
    assert (found.score, found.possible, found.complete) == (10, 20, True)

    store.replace([HandedIn("ada")], expect(PASS, FAIL))
    found = marked(store)
    assert (found.marks[1].state, found.marks[1].points, found.marks[1].why) == ("not graded", None, "not graded yet")
    assert (found.score, found.complete) == (10, False)

    store.add(FAIL)
    found = marked(store)
    assert (found.marks[1].state, found.marks[1].points, found.complete) == ("fail", 0, True)


def test_a_fault_of_the_grader_or_the_machine_takes_no_points(store):
    store.replace([HandedIn("ada")], expect(PASS, FAIL))
    store.fault("ada", "memory.gpt2", "the process ended")
    store.add(replace(FAIL, state="skipped"))
    found = marked(store)
    assert [mark.points for mark in found.marks] == [None, None] and not found.complete
    assert found.marks[0].why == "the grader failed: the process ended"
    assert "lacks what this exercise needs" in found.marks[1].why
    store.add(PASS)  # a later run
    assert marked(store).marks[0].state == "pass"


def test_files_that_were_judged_are_tries(store):
    store.add(replace(PASS, file_hash="0" * 64, state="fail"), replace(PASS, check_version="c0"), PASS)
    store.replace([HandedIn("ada")], expect(PASS, FAIL))
    assert [mark.tries for mark in marked(store).marks] == [2, 0]


@pytest.mark.parametrize(
    ("submitted", "days", "score"),
    (
        ("", 0, 10),
        ("2026-10-12T12:00:00+00:00", 0, 10),
        ("2026-10-12T14:00:00+02:00", 0, 10),
        ("2026-10-12T12:00:01+00:00", 1, 7.5),
        ("2026-10-13T12:00:00+00:00", 1, 7.5),
        ("2026-10-14T11:00:00+00:00", 2, 5),
        ("2026-10-14T12:00:01+00:00", 3, 0),
    ),
)
def test_each_day_that_has_begun_costs_its_part(store, submitted, days, score):
    store.add(PASS, FAIL)
    store.replace([HandedIn("ada", submitted=submitted)], expect(PASS, FAIL))
    found = marked(store, LATE)
    assert (found.days_late, found.score, found.raw) == (days, score, 10)
    assert marked(store, LATE.partition("late")[0]).score == 10  # no rule, no cost


def test_a_file_that_is_none_of_ours_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "grades.sqlite"
    path.write_bytes(b"not a database, and longer than nothing at all" * 9)
    with pytest.raises(BadStore, match="cannot be opened: file is not a database"):
        Store(path)
    assert path.read_bytes().startswith(b"not a database")
    path.unlink()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE t (x)")
    other.commit()
    other.close()
    with pytest.raises(BadStore, match="written by another version of gpukit class"):
        Store(path)
    with pytest.raises(BadStore, match="there are no grades here"):
        Store(tmp_path / "none.sqlite", create=False)
    with (
        pytest.raises(BadStore, match="the file with the hash 0000000000000000 is not kept here"),
        Store(tmp_path / "a") as store,
    ):
        store.file("0" * 64)


def test_a_disk_that_takes_no_more_is_one_sentence(store):
    store.add(PASS)
    store._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(BadStore, match="cannot be written: database or disk is full"):
        for seed in range(1000):
            store.add(replace(PASS, seed=seed, lines=("x" * 400,)))
    store._db.execute("PRAGMA max_page_count = 100000")
    assert store.verdicts()[0] == PASS
    store.add(FAIL)
