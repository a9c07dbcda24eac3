"""From what a class has handed in to verdicts in the store: only what is new is judged, and whatever was judged stays.

A verdict belongs to a file, a check and a seed. So a second run judges what changed and what an interrupted run had left; with
one seed for all, the same file of two students is judged once; and an exercise that is still as it was handed out is "todo"
without being run. A fault of the grader's own is tried once more, and else left as "not graded".
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path

import gpukit
from gpukit import course
from gpukit.classroom import own as owned
from gpukit.classroom.assignment import Assignment
from gpukit.classroom.intake import Submission
from gpukit.classroom.pool import Answer, Pool, Work, version_of
from gpukit.classroom.store import Expected, Graded, HandedIn, Store
from gpukit.classroom.versions import check_version
from gpukit.grading import registry, stubs
from gpukit.grading.diagnose import Words
from gpukit.grading.messages import Failure
from gpukit.grading.verdict import Verdict

_TRIES = 2
_SAVE_S = 1.0  # what costs nothing to find again is written that often; what was run, at once
_Key = tuple[str, str, str, int]  # exercise, file_hash, check_version, seed


@dataclass
class Progress:
    """What there is to say while a class is graded.

    done, students  how many students have all their verdicts, and how many there are
    judged          exercises that were run in this run; left: those that have no verdict yet
    left_s          seconds that these may take, at the pace so far
    """

    students: int
    done: int = 0
    judged: int = 0
    left: int = 0
    left_s: float = 0.0
    fences: set[str] = field(default_factory=set)  # around what was run, one for each kind of machine


# Called with a student, the states of the exercises, and the progress.
Show = Callable[[str, list[str], Progress], None]


def enter(assignment: Assignment, submissions: Iterable[Submission], store: Store) -> None:
    """Say in the store what was handed in and what is expected of it, and keep its files. Raises BadStore."""
    handed_in: list[HandedIn] = []
    expected: list[Expected] = []
    for each in submissions:
        handed_in.append(HandedIn(each.student, each.name, each.email, each.path, each.submitted, each.notes))
        hashes = {concept: hashlib.sha256(data).hexdigest() for concept, data in each.files.items()}
        store.keep_files({hashes[concept]: data for concept, data in each.files.items()})
        for exercise in assignment.exercises:
            concept = exercise.partition(".")[0]
            expected.append(
                Expected(
                    each.student,
                    exercise,
                    hashes.get(concept, ""),
                    check_version(concept),
                    assignment.seed_for(each.student, exercise),
                    each.refused.get(concept, ""),
                )
            )
    store.replace(handed_in, expected)
    own = owned.as_json(concept for _, concept in assignment.own)
    store.set(assignment=assignment.text, own=own, started=_now())


def grade(
    store: Store,
    root: Path,
    make_pool: Callable[[], Pool],
    show: Show = lambda student, states, progress: None,
) -> Progress:
    """Judge what the store expects and lacks. `root` is the course, whose stubs tell what is unwritten; `make_pool` is called
    if there is anything to run, and `show` for each student of whom something new was found, when all of it is.

    Raises CourseError if the pool or the store fails; what was found until then is kept.
    """
    return _Run(store, root, show).all(make_pool)


class _Run:
    def __init__(self, store: Store, root: Path, show: Show):
        self.store, self.root, self.show = store, root, show
        current = store.current()
        expected = [each for each in store.expected() if each.file_hash]
        self.open = [each for each in expected if (each.student, each.exercise) not in current]
        self.left = Counter(each.student for each in self.open)  # by student, the exercises without a verdict
        self.to_come = Counter(each.exercise for each in self.open)  # by exercise, those that nobody has looked at yet
        students = len(store.handed_in())
        self.progress = Progress(students, students - len(self.left), left=len(self.open))
        self.waiting: dict[_Key, list[Expected]] = {}
        self.tries: Counter[_Key] = Counter()
        self.again: list[Work] = []
        self.seconds: dict[str, tuple[float, int]] = {}  # by exercise: the time of all its checks, and their number
        self.states: dict[str, list[str]] = {}
        self.unsaved: list[Graded] = []
        self.found: dict[_Key, Graded] = {}  # by this run, and not written yet
        self.saved = time.monotonic()
        for each in store.expected():
            if not each.file_hash:
                self.states.setdefault(each.student, []).append("missing")
        for graded in current.values():
            self._took(graded.exercise, graded.seconds)
            self.states.setdefault(graded.student, []).append(graded.state)

    def all(self, make_pool: Callable[[], Pool]) -> Progress:
        works, pool, under_way = self._works(), None, 0
        try:
            while True:
                while (pool is None or under_way < 2 * pool.capacity) and (work := next(works, None)):
                    pool = pool or make_pool()
                    pool.submit(work)
                    under_way += 1
                if not under_way and not self.again:
                    break
                if not under_way or self.again:
                    pool.submit(self.again.pop())
                    under_way += 1
                self._take(*pool.next(), pool)
                under_way -= 1
        finally:
            try:
                self._save()
            finally:
                if pool:
                    pool.close()
        self.store.set(finished=_now())
        return self.progress

    def _works(self) -> Iterator[Work]:
        """What must be run. What is known, will be known from another student, or is unwritten is settled on the way."""
        for each in self.open:
            self.to_come[each.exercise] -= 1
            key = (each.exercise, each.file_hash, each.check_version, each.seed)
            if key in self.waiting:
                self.waiting[key].append(each)
            elif same := self.found.get(key) or self.store.same(*key):
                self._free([each], same)
            else:
                source = self._file(each.file_hash)
                if verdict := unwritten(each.exercise, source, self.root):
                    self._free([each], _graded(each, verdict, "", ""))
                else:
                    self.waiting[key] = [each]
                    own = registry.added.get(each.exercise.partition(".")[0])
                    yield Work(each.exercise, source, each.file_hash, each.check_version, each.seed, own)

    def _file(self, file_hash: str) -> bytes:
        """The exercises of a file follow each other."""
        if self._last[0] != file_hash:
            self._last = file_hash, self.store.file(file_hash)
        return self._last[1]

    _last = ("", b"")

    def _free(self, theirs: list[Expected], graded: Graded) -> None:
        """Nothing had to be run."""
        self._took(theirs[0].exercise, 0.0)
        self._keep(theirs, graded, at_once=False)

    def _take(self, work: Work, answer: Answer, pool: Pool) -> None:
        if answer.other:
            raise course.CourseError(
                f"a worker has other checks, version {answer.other}: install the gpukit there that is here, {gpukit.__version__}"
            )
        key = (work.exercise, work.file_hash, work.check_version, work.seed)
        self.tries[key] += 1
        if answer.fault and self.tries[key] < _TRIES:
            self.again.append(work)
            return
        self.progress.judged += 1
        theirs = self.waiting.pop(key)
        self._took(work.exercise, answer.seconds)
        self.progress.left_s = self._expected_s() / pool.capacity
        if answer.verdict:
            self.progress.fences.add(answer.fence)
            self._keep(theirs, _graded(theirs[0], answer.verdict, answer.torch, answer.triton))
            return
        for each in theirs:
            self.store.fault(each.student, each.exercise, answer.fault)
            self.states.setdefault(each.student, []).append("not graded")
        self._finished(theirs)

    def _expected_s(self) -> float:
        """Of one process, for what is left: at the mean of each exercise so far, and of all where one has none."""
        spent, number = (sum(column) for column in zip(*self.seconds.values(), strict=True))
        mean = {exercise: spent / number for exercise, (spent, number) in self.seconds.items()}
        todo = self.to_come + Counter(exercise for exercise, *_ in self.waiting)
        return sum(mean.get(exercise, spent / number) * count for exercise, count in todo.items())

    def _keep(self, theirs: list[Expected], graded: Graded, at_once: bool = True) -> None:
        now = _now()
        key = (graded.exercise, graded.file_hash, graded.check_version, graded.seed)
        self.unsaved += [replace(graded, student=each.student, when=now) for each in theirs]
        self.found[key] = graded
        for each in theirs:
            self.states.setdefault(each.student, []).append(graded.state)
        if at_once or time.monotonic() > self.saved + _SAVE_S:
            self._save()
        self._finished(theirs)

    def _save(self) -> None:
        if self.unsaved:
            self.store.add(*self.unsaved)
        self.unsaved, self.found, self.saved = [], {}, time.monotonic()

    def _finished(self, theirs: list[Expected]) -> None:
        for each in theirs:
            self.progress.left -= 1
            self.left[each.student] -= 1
            if not self.left[each.student]:
                self.progress.done += 1
                self.show(each.student, self.states.get(each.student, []), self.progress)

    def _took(self, exercise: str, seconds: float) -> None:
        spent, number = self.seconds.get(exercise, (0.0, 0))
        self.seconds[exercise] = (spent + seconds, number + 1)


def unwritten(exercise_id: str, source: bytes, root: Path) -> Verdict | None:
    """The verdict "todo" where the exercise's part of a file is as the course in `root` hands it out."""
    exercise = registry.exercise(exercise_id)
    line = _unwritten(exercise.concept, source, root).get(exercise_id)
    if not line:
        return None
    gap = Failure("NotImplementedError", exercise_id, line, "", True, None, "")
    found = Words(exercise, f"exercises/{exercise.concept}.py", course.text(source), terminal=True).raised(gap, None)
    return Verdict(exercise_id, found.state, 0, 0, "exercises", found.lines, found.label)


@lru_cache(maxsize=8)  # the exercises of a file follow each other
def _unwritten(concept: str, source: bytes, root: Path) -> dict[str, int]:
    return stubs.unwritten(course.text(source), _stub(concept, root), concept)


_stub = cache(stubs.handed_out)


def _graded(each: Expected, verdict: Verdict, torch: str, triton: str) -> Graded:
    return Graded(
        student=each.student,
        exercise=each.exercise,
        file_hash=each.file_hash,
        check_version=each.check_version,
        seed=each.seed,
        state=verdict.state,
        diagnosis=verdict.diagnosis,
        title=registry.catalog()[each.exercise].title,
        checks_passed=verdict.checks_passed,
        checks_total=verdict.checks_total,
        lines=verdict.lines,
        seconds=verdict.seconds,
        when=_now(),
        gpukit=gpukit.__version__,
        torch=torch or version_of("torch"),
        triton=triton or version_of("triton"),
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
