"""An assignment's file says what counts; a mistake in it is a sentence with the file, the key, what was given and what may be."""

import re
from datetime import UTC, datetime

import pytest

from gpukit.classroom import assignment

HEAD = 'title = "Week 2"\nexercises = ["start"]\n'


def parse(more: str = "", head: str = HEAD):
    return assignment.parse(head + more, "week2.toml")


def test_concepts_and_exercises_come_in_the_courses_order_and_once():
    found = parse(head='title = "t"\nexercises = ["memory.llama", "start", "memory.gpt2", "start.bytes_moved"]\n')
    assert found.exercises == ("start.bytes_moved", "memory.gpt2", "memory.llama")
    assert found.concepts == ("start", "memory")
    assert found.points == dict.fromkeys(found.exercises, 1) and found.possible == 3


def test_points_of_an_exercise_go_before_those_of_its_concept():
    head = 'title = "t"\nexercises = ["start", "memory"]\n'
    found = parse('[points]\n"memory.gpt2" = 0.5\nstart = 4\nmemory = 2', head).points
    assert [found[each] for each in ("start.bytes_moved", "memory.gpt2", "memory.llama")] == [4, 0.5, 2]
    assert parse("points = 3", head).possible == 3 * len(parse("", head).exercises)
    with pytest.raises(assignment.BadAssignment, match=r"points says nothing of memory\.llama, memory\.state"):
        parse("[points]\nstart = 4\nmemory.gpt2 = 0.5", head)  # without quotes, memory itself has no number


def test_deadline_and_late_rule():
    found = parse("deadline = 2026-10-12T23:59:00+02:00\nlate = {per_day = 0.1, at_most = 3}\n")
    assert found.deadline == datetime(2026, 10, 12, 21, 59, tzinfo=UTC)
    assert (found.per_day, found.at_most) == (0.1, 3)
    assert (parse().deadline, parse().per_day, parse().at_most) == (None, 0.0, None)


def test_seeds_are_the_same_for_all_or_each_students_own():
    everybody = parse()
    assert everybody.seed == everybody.seed_for("a", "start.bytes_moved") == everybody.seed_for("b", "memory.gpt2")
    assert everybody.seed != parse('secret = "s"').seed != parse(head=HEAD.replace("Week", "Weeks")).seed
    assert parse("seed = 7").seed_for("a", "x") == 7
    own = parse('seed = "student"\nsecret = "s"')
    seeds = {own.seed_for(student, exercise) for student in "ab" for exercise in ("memory.gpt2", "memory.llama")}
    assert own.seed is None and len(seeds) == 4 and all(0 <= seed < 1 << 31 for seed in seeds)
    assert own.seed_for("a", "memory.gpt2") == parse('seed = "student"\nsecret = "s"\npoints = 2').seed_for(
        "a", "memory.gpt2"
    )
    assert own.seed_for("a", "memory.gpt2") != parse('seed = "student"\nsecret = "t"').seed_for("a", "memory.gpt2")
    assert "'s'" not in repr(own)


@pytest.mark.parametrize(
    ("text", "sentence"),
    (
        ("exercises = ['start']", "week2.toml: title is missing; it must be a text"),
        ("title = ''\nexercises = ['start']", "title must be a text, got ''"),
        ('title = "a\\nb"\nexercises = ["start"]', "title must be a text in one line, got 'a"),
        ("title = '  '\nexercises = ['start']", "title must be a text in one line, got '  '"),
        (f"{HEAD}deadline = 2026-13-12T00:00:00Z", "(at line 3, column 16): 'deadline = 2026-13-12T00:00:00Z'"),
        ("title = 't'", "exercises is missing; it must be a list of concepts or exercises"),
        ("title = 't'\nexercises = []", "exercises must be a list of concepts or exercises, such as"),
        ("title = 't'\nexercises = 'start'", "got 'start'"),
        (
            "title = 't'\nexercises = ['sofmax']",
            "exercises: no concept or exercise is called 'sofmax'; did you mean 'soft",
        ),
        ("title = 't'\nexercises = ['memory.gpt3']", "called 'memory.gpt3'; did you mean 'memory.gpt2'?"),
        ("title = 't'\nexercises = ['zzzzzz']", "called 'zzzzzz'  (all of them: gpukit progress)"),
        (HEAD + "poinst = 3", "no key is called 'poinst'; did you mean 'points'?; the keys are title, exercises"),
        (HEAD + "points = -1", "points must be a number, 0 or more, got -1"),
        (HEAD + "points = nan", "points must be a number, 0 or more, got nan"),
        (HEAD + "points = true", "points must be a number, or a table by concept or exercise, got True"),
        (
            HEAD + "[points]\nsoftmax = 1",
            "points names 'softmax', which is not among the exercises  (they are start.bytes_moved)",
        ),
        (HEAD + "[points]\nstart = 'x'", "points.start must be a number, 0 or more, got 'x'"),
        (HEAD + "deadline = 2026-10-12", "deadline must be a date and time with its offset from UTC, such as"),
        (HEAD + "deadline = 2026-10-12T23:59:00", "deadline must be a date and time with its offset from UTC"),
        (HEAD + "deadline = 'tomorrow'", "got 'tomorrow'"),
        (HEAD + "late = {per_day = 0.1, at_most = 1}", "late says what days after the deadline cost, but there is no"),
        (HEAD + "late = {per_day = 10, at_most = 1}", "late.per_day must be a fraction of the points, 0 to 1, got 10"),
        (HEAD + "late = {per_day = 0.1}", "late.at_most is missing; it must be a whole number of days, 0 or more"),
        (
            HEAD + "late = {per_day = 0.1, at_most = -1}",
            "late.at_most must be a whole number of days, 0 or more, got -1",
        ),
        (HEAD + "late = {a = 1}", "late has no key 'a'; its keys are per_day and at_most"),
        (HEAD + "seed = 'each'", 'seed must be "student" (inputs of their own for each student) or a number'),
        (HEAD + "seed = -1", "or a number, 0 to 2147483647 (the same for all), got -1"),
        ("title = ", "this is not TOML: "),
        ("title = 't'\ntitle = 'u'", "this is not TOML: "),
    ),
)
def test_a_mistake_is_one_sentence(text, sentence):
    with pytest.raises(assignment.BadAssignment, match=re.escape(sentence)) as found:
        parse(head=text)
    assert str(found.value).startswith("week2.toml: ") and "\n" not in str(found.value)


def test_a_file_with_a_byte_order_mark_and_windows_line_ends_is_read(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbf" + HEAD.replace("\n", "\r\n").encode())
    assert assignment.read(path).title == "Week 2"
    assert assignment.parse(assignment.read(path).text) == assignment.read(path)


@pytest.mark.parametrize(
    ("data", "sentence"),
    ((b"title = '\xff'", "is not UTF-8 text"), (b"#" * (assignment.MAX_BYTES + 1), "is larger than 1 MiB")),
)
def test_a_file_that_is_no_text_is_refused(tmp_path, data, sentence):
    (tmp_path / "a.toml").write_bytes(data)
    with pytest.raises(assignment.BadAssignment, match=sentence):
        assignment.read(tmp_path / "a.toml")
    with pytest.raises(assignment.BadAssignment, match="cannot be read: No such file"):
        assignment.read(tmp_path / "b.toml")
    with pytest.raises(assignment.BadAssignment, match="cannot be read: Is a directory"):
        assignment.read(tmp_path)
