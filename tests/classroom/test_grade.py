"""Only what is new is judged, once; a fault of the grader's own is tried once more and never counted; a verdict is repeated."""

import os
import signal
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import pytest

from gpukit import cli, course
from gpukit.classroom import assignment, grade, marks, pool, replay, versions
from gpukit.classroom.intake import Submission
from gpukit.classroom.store import NAME, Store
from gpukit.grading import registry, stubs
from gpukit.grading.verdict import Verdict
from tests.classroom import synthetic
from tests.waiting import until

ROOT = course.root(__file__)
ONE = assignment.parse('title = "t"\nexercises = ["start"]\nseed = 3\n')
OWN = assignment.parse('title = "t"\nexercises = ["start"]\nseed = "student"\n')
RIGHT = b"def bytes_moved(M, N, itemsize):\n    return 2 * M * N * itemsize\n"


class Fake:
    """A pool that answers from a list of faults first, and then with a pass."""

    capacity = 2

    def __init__(self, *faults: str, other: str = ""):
        self.faults, self.other, self.queue = deque(faults), other, deque()
        self.judged: Counter[str] = Counter()
        self.closed = 0

    def submit(self, work):
        self.queue.append(work)

    def next(self):
        work = self.queue.popleft()
        self.judged[work.exercise] += 1
        if self.other or (fault := self.faults.popleft() if self.faults else ""):
            return work, pool.Answer(fault=fault) if not self.other else pool.Answer(other=self.other)
        return work, pool.Answer(
            Verdict(work.exercise, "pass", 1, 1, "exercises", seed=work.seed), "all", "2", "3", 0.5
        )

    def close(self):
        self.closed += 1


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / NAME) as store:
        yield store


def hand_in(store, chosen=ONE, **files: bytes) -> None:
    submissions = [
        Submission(name, files={"start": data}) if data else Submission(name, refused={"start": "none"})
        for name, data in files.items()
    ]
    grade.enter(chosen, submissions, store)


def run(store, fake: Fake, shown: list | None = None) -> grade.Progress:
    show = (
        (lambda student, states, progress: shown.append((student, progress.done, progress.left)))
        if shown is not None
        else None
    )
    return grade.grade(store, ROOT, lambda: fake, *([show] if show else []))


def states(store, chosen=ONE) -> dict[str, str]:
    return {row.student: row.marks[0].state for row in marks.marked(chosen, store)}


def test_equal_files_are_judged_once_for_one_seed_and_each_with_its_own(store):
    hand_in(store, ada=RIGHT, bob=RIGHT, cy=RIGHT + b"#", dan=b"")
    shown = []
    assert run(store, fake := Fake(), shown).judged == 2 and fake.closed == 1
    assert states(store) == {"ada": "pass", "bob": "pass", "cy": "pass", "dan": "missing"}
    assert [(student, done) for student, done, _ in shown] == [("ada", 2), ("bob", 3), ("cy", 4)] and shown[-1][2] == 0
    hand_in(store, OWN, ada=RIGHT, bob=RIGHT)
    assert run(store, Fake()).judged == 2
    assert len({each.seed for each in store.expected()}) == 2


def test_a_second_run_judges_what_changed_and_nothing_else(store, monkeypatch):
    hand_in(store, ada=RIGHT, bob=RIGHT + b"#")
    run(store, Fake())
    hand_in(store, ada=RIGHT, bob=RIGHT + b"##", cy=RIGHT)
    assert states(store) == {"ada": "pass", "bob": "not graded", "cy": "not graded"}
    shown = []
    assert run(store, fake := Fake(), shown).judged == 1
    assert fake.judged == {"start.bytes_moved": 1} and {student for student, *_ in shown} == {"bob", "cy"}
    assert marks.marked(ONE, store)[1].marks[0].tries == 2
    assert run(store, Fake()).judged == 0

    monkeypatch.setattr(grade, "check_version", lambda concept: "newer")
    hand_in(store, ada=RIGHT)
    assert run(store, Fake()).judged == 1


def test_nothing_new_starts_no_process(store):
    hand_in(store, ada=RIGHT, bob=b"")
    run(store, Fake())
    hand_in(store, ada=RIGHT, bob=b"")

    def none():
        raise AssertionError("a pool was made")

    assert grade.grade(store, ROOT, none).judged == 0


def test_a_fault_is_tried_once_more_and_never_counted(store):
    hand_in(store, ada=RIGHT, bob=RIGHT + b"#")
    assert run(store, fake := Fake("out of memory")).judged == 2
    assert states(store) == {"ada": "pass", "bob": "pass"} and fake.judged.total() == 3

    hand_in(store, ada=RIGHT + b"1", bob=RIGHT + b"2")
    run(store, fake := Fake("a", "b", "a", "b"))
    assert fake.judged.total() == 4 and states(store) == {"ada": "not graded", "bob": "not graded"}
    row = marks.marked(ONE, store)[0]
    assert row.marks[0].why in ("the grader failed: a", "the grader failed: b") and not row.complete
    run(store, Fake())
    assert states(store) == {"ada": "pass", "bob": "pass"}


def test_a_worker_with_other_checks_ends_the_run_in_a_sentence(store):
    hand_in(store, ada=RIGHT)
    with pytest.raises(course.CourseError, match=r"a worker has other checks, version abc, gpukit 9 on node1: install"):
        run(store, Fake(other="abc, gpukit 9 on node1"))
    assert states(store) == {"ada": "not graded"}
    (work,) = [pool.Work("start.bytes_moved", RIGHT, "f", "not this one", 3)]
    assert pool.judged(work).other.startswith(versions.check_version("start"))


def test_what_is_found_before_the_pool_fails_is_kept(store):
    hand_in(store, ada=RIGHT, bob=RIGHT + b"#")

    class Ends(Fake):
        def next(self):
            if self.judged:
                raise course.CourseError("it is gone")
            return super().next()

    with pytest.raises(course.CourseError, match="it is gone"):
        run(store, Ends())
    assert states(store) == {"ada": "pass", "bob": "not graded"}


@pytest.mark.parametrize("concept", sorted({e.concept for e in registry.catalog().values()}))
def test_a_stub_is_todo_by_its_text_and_a_solution_is_not(concept):
    stub = stubs.handed_out(concept, ROOT)
    lines = stub.split("\n")
    found = stubs.unwritten(stub, stub, concept)
    for exercise_id, line in found.items():
        assert f'raise NotImplementedError("{exercise_id}")' in lines[line - 1]
    solution = (ROOT / "solutions" / f"{concept}.py").read_text()
    assert stubs.unwritten(solution, stub, concept) == {}
    assert stubs.unwritten("\n\n# mine\n" + stub, stub, concept) == {name: line + 3 for name, line in found.items()}
    assert stubs.unwritten("def f(:", stub, concept) == stubs.unwritten("\0", stub, concept) == {}


def test_a_stub_whose_names_are_given_another_meaning_is_run():
    stub = stubs.handed_out("memory", ROOT)
    assert "memory.llama" in stubs.unwritten(stub, stub, "memory")
    for more in (
        "def llama(*args):\n    return 3\n",
        "llama = print\n",
        "from math import exp as llama\n",
        "for llama in (1,): pass\n",
        "def f():\n    global llama\n",
        "if True:\n    def llama(): pass\n",
    ):
        assert "memory.llama" not in stubs.unwritten(stub + more, stub, "memory"), more
    assert "memory.llama" not in stubs.unwritten(
        stub.replace("def llama(vocab", "def llama(vocabulary"), stub, "memory"
    )


def test_unwritten_says_what_a_check_says():
    from gpukit.grading.judge import judge_source

    text = stubs.handed_out("memory", ROOT)
    by_text = grade.unwritten("memory.llama", text.encode(), ROOT)
    judged = judge_source(registry.exercise("memory.llama"), text, seed=1, terminal=True)
    assert (by_text.state, by_text.lines, by_text.diagnosis) == (judged.state, judged.lines, judged.diagnosis)


# -- processes
def work(source: bytes = RIGHT, seed: int = 1) -> pool.Work:
    return pool.Work("start.bytes_moved", source, f"{seed}", versions.check_version("start"), seed)


def test_a_judge_that_is_killed_costs_nothing_but_another_try(store):
    files = {f"s{n}": RIGHT + b"#%d" % n for n in range(6)}
    hand_in(store, **files)
    local = pool.Local(2)
    victims = []

    def show(student, states, progress):
        if not victims:
            victims.append(next(each.process.pid for each in local._processes if each.work))
            os.kill(victims[0], signal.SIGKILL)

    progress = grade.grade(store, ROOT, lambda: local, show)
    assert progress.judged == 6 and set(states(store).values()) == {"pass"} and len(victims) == 1
    assert not local._processes and not Path(f"/proc/{victims[0]}").exists()


def test_a_students_line_counts_what_is_missing_and_what_the_grader_failed_on(store):
    chosen = assignment.parse('title = "t"\nexercises = ["start", "memory.gpt2"]\nseed = 3\n')
    files = {"start": RIGHT}
    submissions = [
        Submission("ada", files=files, refused={"memory": "none"}),
        Submission("bob", files={"start": b"#"}, refused={"memory": "none"}),
    ]
    grade.enter(chosen, submissions, store)
    seen = {}
    grade.grade(
        store, ROOT, lambda: Fake("", "broken", "broken"), lambda name, states, _: seen.update({name: sorted(states)})
    )
    assert seen == {"ada": ["missing", "pass"], "bob": ["missing", "not graded"]}


def test_judges_that_never_answer_end_the_run_in_a_sentence(monkeypatch):
    monkeypatch.setattr(pool.sys, "executable", "/bin/false")
    local = pool.Local(1)
    local.submit(work())
    faults = [local.next()[1].fault]
    local.submit(work())
    faults.append(local.next()[1].fault)
    assert faults == ["the process that graded it ended with status 1"] * 2
    with pytest.raises(
        course.CourseError, match=r"the processes that grade end without an answer; the last one ended with"
    ):
        for _ in range(9):
            local.submit(work())
            local.next()
    local.close()


def test_a_judge_is_used_for_all_files_of_a_run_and_ends_with_it():
    local = pool.Local(1)
    for seed in (1, 2, 3):
        local.submit(work(seed=seed))
    (process,) = local._processes
    answers = [local.next() for _ in range(3)]
    assert [(w.seed, a.verdict.seed, a.verdict.state) for w, a in answers] == [(n, n, "pass") for n in (1, 2, 3)]
    assert local._processes == [process]
    local.close()
    assert process.process.returncode == 0
    until(lambda: not Path(f"/proc/{process.process.pid}").exists())


# -- replay
def test_a_verdict_is_repeated_with_its_seed_and_file(store, tmp_path, capsys):
    wrong = b"def bytes_moved(M, N, itemsize):\n    return 2 * M * N * 4 + 7\n"
    hand_in(store, OWN, ada=wrong, bob=RIGHT, cy=b"")
    local = pool.Local(1)
    grade.grade(store, ROOT, lambda: local)
    found = replay.replay(store, "ada", "start.bytes_moved", ROOT)
    assert found.same and found.then.state == "fail" and found.now.seed == OWN.seed_for("ada", "start.bytes_moved")
    assert str(found).endswith("the same verdict as then") and f"seed {found.then.seed}" in str(found)
    assert cli.main(["class", "replay", str(tmp_path), "bob", "start.bytes_moved"]) == 0
    assert "PASS start.bytes_moved" in capsys.readouterr().out

    store.add(replace(found.then, state="pass", lines=(), diagnosis="", torch="1.0"))  # as if another torch had said so
    again = replay.replay(store, "ada", "start.bytes_moved", ROOT)
    assert not again.same and str(again).endswith("the verdict differs") and "now: torch " in str(again)
    assert cli.main(["class", "replay", str(tmp_path), "ada", "start.bytes_moved"]) == 1


@pytest.mark.parametrize(
    ("student", "exercise", "sentence"),
    (
        ("adda", "start.bytes_moved", "knows no student 'adda'; did you mean 'ada'?"),
        (
            "ada",
            "start.byte_moved",
            "'start.byte_moved' is no exercise of the assignment; did you mean 'start.bytes_moved'?",
        ),
        ("cy", "start.bytes_moved", "start.bytes_moved of cy has no verdict to repeat: none"),
        ("ada", "start.bytes_moved", "has no verdict to repeat: it is not graded yet"),
    ),
)
def test_what_cannot_be_repeated_is_a_sentence(store, tmp_path, capsys, student, exercise, sentence):
    hand_in(store, ada=RIGHT, cy=b"")
    assert cli.main(["class", "replay", str(tmp_path), student, exercise]) == 2
    assert sentence in capsys.readouterr().err


# -- the command
@pytest.mark.parametrize(
    ("words", "sentence"),
    (
        (["grade", "class", "-a", "none.toml", "-o", "out"], "none.toml: the assignment cannot be read: No such file"),
        (["grade", "none", "-a", "a.toml", "-o", "out"], "there is no folder or zip none"),
        (["grade", "class", "-a", "a.toml", "-o", "out", "-j", "0"], "--jobs must be 1 or more, got 0"),
        (["grade", "class", "-a", "a.toml", "-o", "a.toml"], "a.toml cannot be made: File exists"),
        (["grade", "class", "-a", "a.toml", "-o", "out", "--roster", "r.csv"], "r.csv: the roster cannot be read"),
        (["replay", "none", "ada", "start.bytes_moved"], "none/grades.sqlite: there are no grades here"),
    ),
)
def test_a_mistake_is_one_sentence_and_writes_nothing(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    synthetic.write(tmp_path / "a.toml", 'title = "t"\nexercises = ["start"]\n')
    synthetic.write(tmp_path / "class" / "ada" / "start.py", RIGHT)
    assert cli.main(["class", *words]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "out").exists()
