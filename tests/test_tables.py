"""Text in columns."""

import os

import pytest

from gpukit import tables


def test_columns_are_aligned():
    assert tables.aligned([("a", "bcd"), ("efgh", "")]) == ["a     bcd", "efgh"]
    assert tables.aligned([("a", "n", ""), ("bcd", "10,000", "x")], right=[1]) == ["a         n", "bcd  10,000  x"]


def test_rules_stand_above_rows_and_are_as_long_as_the_first_line():
    rows = [("name", "n", "note"), ("a", "1", ""), ("b", "2", "a longer one"), ("total", "3", "")]
    lines = tables.aligned(rows, right=[1], rules=[1, -1])
    assert lines[1] == lines[4] == "-" * len(lines[0])
    assert [line.split()[0] for line in (lines[0], lines[2], lines[3], lines[5])] == ["name", "a", "b", "total"]
    only_total = tables.aligned([("name", "n"), ("total", "0")], rules=[1, -1])
    assert only_total == ["name   n", "--------", "--------", "total  0"]


def test_no_rows_are_no_lines():
    assert tables.aligned([]) == []


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError):
        tables.aligned([("a", "b"), ("c",)])


def test_facts_begin_at_one_column():
    assert tables.facts([("L1", "x"), ("L2 to L1", "y")], width=12) == ["L1          x", "L2 to L1    y"]


def test_a_fact_that_is_wider_than_a_page_is_folded_at_its_semicolons():
    first, second = "a" * 60, "b" * 60
    (line,) = tables.facts([("loads", f"{first}; {second}")], width=8)
    assert line == f"loads   {first};\n        {second}"


def test_lines_are_broken_between_words_under_their_last_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    told = f"short\n  {'word ' * 12}\n  working   15.28 GB   {'logits ' * 6}"
    lines = tables.folded(told).split("\n")
    assert max(map(len, lines)) <= 40 and lines[0] == "short" and " ".join(lines).split() == told.split()
    assert lines[2].startswith("  word") and lines[-1].startswith(" " * 20 + "logits")


def test_what_no_terminal_shows_stays_as_it_is(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size(fallback))
    assert tables.folded("word " * 100) == "word " * 100 and tables.narrowed([("a" * 300, "b" * 300, "c")])[0].endswith(
        "c"
    )


def test_a_table_loses_last_columns_where_there_is_no_room(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert tables.narrowed([("id", "state", "a long title of it"), ("one", "pass", "t")]) == ["id   state", "one  pass"]
