"""What the checks say to answers whose verdict is known: `gpukit integrity`, for contributors.

Right and wrong answers to the exercises of a concept lie in solutions/answers/<concept>.txt, beside the solution they are
changes of. They are in no wheel and in no hand-out. One line for an answer; what it changes behind it or indented under it:

    === softmax.fused                                                     the exercise
    tail-mask  pads-with-zero  other=-float("inf") => other=0.0           the diagnosis it must get, its name, one edit
    right  stores-y-first                                                 a right one
        old text => new text                                              more edits, one after the other
        = a line that stays                                               or whole lines, as in a diff;
        - a line that goes                                                between two such runs of lines stands a line of
        + a line that comes                                               three dots
    right  by-hand
        | the lines of a whole file

    equivalent  reads no more than it must  < N => <= N                   a mutant, or one made as below, that need not be
                                                                          rejected, and why

Columns are two spaces apart. The text that an edit replaces occurs exactly once in the exercise's section of the solution
(between the rules that name the exercises), or, where the section lacks it, in the file.

Answers that try the judge rather than an idea are made for each kernel exercise from its solution (`generated`), and those
that nobody thought of by changing one thing in it (gpukit/mutants.py).
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gpukit import course, mutants
from gpukit.course import CourseError
from gpukit.grading import registry, stubs
from gpukit.grading.exercise import Exercise, KernelExercise
from gpukit.grading.judge import judge_source
from gpukit.grading.verdict import MAX_LINES, Verdict
from gpukit.mutants import span
from gpukit.nearest import did_you_mean

RIGHT = "right"
EQUIVALENT = "equivalent"  # an answer made by machine that computes the same; the name says why
REJECTED = "rejected"  # a diagnosis that any rejection is right for
_RULE = r"^# -{4,} (\w+\.\w+)$"  # above each section of a solution
MAX_LINE = 140  # characters
_FAR = 1 << 40  # elements: beyond any tensor
# "some" mutants of a kernel are every tenth, always the same: a red CI must come from a change, not from the calendar.
_TENTH = 10


class AnswerError(CourseError):
    """An answer that cannot be read or applied. The message names file, line and exercise."""


@dataclass(frozen=True)
class Answer:
    """A file that a learner might hand in.

    diagnosis  what the check must say of it: a label, "rejected" for any, "right" if it must pass; "equivalent" for a mutant
               that may pass
    where      "solutions/answers/softmax.txt, line 12"
    """

    exercise: str
    name: str
    diagnosis: str
    source: str
    where: str


def answers(concept: str, root: Path | None = None) -> list[Answer]:
    """The known answers to the exercises of `concept`, wrong and right. Raises AnswerError."""
    path = (root or course.root()) / "solutions" / "answers" / f"{concept}.txt"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise AnswerError(f"{concept} has no known answers: solutions/answers/{path.name} is missing") from None
    return parse(text, solution(concept, root), f"solutions/answers/{path.name}")


def solution(concept: str, root: Path | None = None) -> str:
    """The text of solutions/<concept>.py."""
    return course.exercise_file(concept, root or course.root(), "solutions").read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------------------- reading the answers
@dataclass
class _Item:
    """One answer as it is written: its edits are (line number, old, new, whether they are whole lines)."""

    exercise: str
    name: str
    diagnosis: str
    line: int
    edits: list[tuple[int, str, str, bool]] = field(default_factory=list)
    file: list[str] = field(default_factory=list)


def parse(text: str, solution: str, shown: str = "answers") -> list[Answer]:
    """The answers in `text`, applied to `solution`. `shown` is what messages call the file. Raises AnswerError."""
    made, names = [], set()
    rules = set(re.findall(_RULE, solution, re.MULTILINE))
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("===") and line[3:].strip() not in rules:
            name = line[3:].strip()
            hint = did_you_mean(name, rules) or f"; it needs the line '# ---- {name}'"
            raise AnswerError(f"{shown}, line {number}: no section of the solution is called {name!r}{hint}")
    for item in _items(text, shown):
        where = f"{shown}, line {item.line}"
        if (item.exercise, item.name) in names:
            raise AnswerError(f"{where}, {item.exercise}: a second answer is called {item.name!r}")
        names.add((item.exercise, item.name))
        source = "".join(line + "\n" for line in item.file)
        if not item.file:
            source = solution
            for line, old, new, whole in item.edits:
                source = _replace(source, item.exercise, old, new, whole, f"{shown}, line {line}")
        if source == solution:
            raise AnswerError(f"{where}, {item.exercise}: {item.name!r} changes nothing")
        made.append(Answer(item.exercise, item.name, item.diagnosis, source, where))
    return made


def _items(text: str, shown: str) -> Iterator[_Item]:
    exercise, item, run = "", None, None  # run: (line number, old lines, new lines) of a diff
    for number, line in enumerate((*text.splitlines(), "==="), 1):
        indented = line.startswith("    ")
        mark = line[4:5] if indented and " => " not in f"{line} " else ""
        if run and mark not in ("-", "+", "="):
            at, old, new = run
            item.edits.append((at, "".join(old), "".join(new), True))
            run = None
        if not line.strip() or line.startswith("#"):
            continue
        if not indented:
            if item:
                yield item
            if line.startswith("==="):
                exercise, item = line[3:].strip(), None
                continue
            label, name, edit = (*re.split(r"\s{2,}", line.strip(), maxsplit=2), "", "")[:3]
            if " => " in f"{name} ":
                raise AnswerError(
                    f"{shown}, line {number}, {exercise}: columns are two spaces apart, {line[:60]!r} has two"
                )
            if not name or not exercise:
                raise AnswerError(f"{shown}, line {number}, {exercise}: expected 'diagnosis  name', got {line[:60]!r}")
            item = _Item(exercise, name, label, number)
            if edit:
                item.edits.append((number, *_fragment(edit, f"{shown}, line {number}, {exercise}"), False))
        elif item is None:
            raise AnswerError(f"{shown}, line {number}: an indented line before the first answer of {exercise}")
        elif mark == "|":
            item.file.append(line[6:])
        elif mark in ("-", "+", "="):
            run = run or (number, [], [])
            for sign, lines in zip("-+", run[1:], strict=True):
                if mark in (sign, "="):
                    lines.append(line[6:] + "\n")
        elif line.strip() != "...":
            item.edits.append((number, *_fragment(line, f"{shown}, line {number}, {exercise}"), False))


def _fragment(text: str, where: str) -> tuple[str, str]:
    old, arrow, new = f"{text} ".partition(" => ")
    if not arrow or not old.strip():
        raise AnswerError(f"{where}: expected 'old text => new text' or a line of a diff, got {text.strip()[:60]!r}")
    return old.strip(), new.strip()


def _replace(source: str, exercise: str, old: str, new: str, whole: bool, where: str) -> str:
    """`source` with the one occurrence of `old` replaced: in the exercise's section, or else in the file."""
    first, last = section(source, exercise)
    for start, end in ((first, last), (0, len(source))):
        found = [start + m.start() for m in re.finditer(re.escape(old), source[start:end])]
        if whole:
            found = [at for at in found if at == 0 or source[at - 1] == "\n"]
        if len(found) == 1:
            return source[: found[0]] + new + source[found[0] + len(old) :]
        if found:
            raise AnswerError(
                f"{where}, {exercise}: {_short(old)} occurs {len(found)} times in the solution; it must once"
            )
    raise AnswerError(f"{where}, {exercise}: {_short(old)} occurs nowhere in the solution")


def section(source: str, exercise: str) -> tuple[int, int]:
    """Where the part of the solution's text lies that belongs to `exercise`: between its rule and the next."""
    rules = list(re.finditer(_RULE, source, re.MULTILINE))
    for i, rule in enumerate(rules):
        if rule[1] == exercise:
            return rule.start(), rules[i + 1].start() if i + 1 < len(rules) else len(source)
    return 0, len(source)


def _short(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else text
    return repr(line if len(line) <= 60 else f"{line[:57]}...")


# ------------------------------------------------------------------------------------------------- generated answers
def generated(exercise: Exercise, source: str) -> list[Answer]:
    """Wrong answers that try the judge, made from the solution's text: what holds for all kernel exercises alike."""
    if not isinstance(exercise, KernelExercise):
        return []
    made = {
        "torch-has-the-last-word": ("not-your-kernel", _last_word(exercise, source)),
        "input-changed": ("input-changed" if not exercise.gradients else REJECTED, _changes_an_input(exercise, source)),
    }
    made["keeps-its-results"] = (REJECTED, _keeps_results(exercise, source))
    if exercise.traffic is not None:
        made["copies-its-arguments"] = (REJECTED, _copies_arguments(exercise, source))
    first, last = section(source, exercise.id)
    for number, call in enumerate(_calls(source, "store", first, last), 1):
        pointer = span(source, call.args[0])
        moved = f"{source[: pointer[0]]}({source[slice(*pointer)]}) + {_FAR}{source[pointer[1] :]}"
        made[f"store-{number}-far-outside"] = ("out-of-bounds", moved)
    for what in ("load", "store"):
        for number, call in enumerate(_calls(source, what, first, last), 1):
            if any(keyword.arg == "mask" for keyword in call.keywords):
                made[f"{what}-{number}-without-its-mask"] = (REJECTED, _without_mask(source, call))
    if exercise.huge:
        places = (span(source, node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
        widened = sorted(place for place in places if first <= place[0] < last and source[slice(*place)] == "tl.int64")
        for number, (begin, end) in enumerate(widened, 1):
            made[f"int64-{number}-is-uint32"] = (REJECTED, f"{source[:begin]}tl.uint32{source[end:]}")
    return [
        Answer(exercise.id, name, diagnosis, text, f"generated for {exercise.id}")
        for name, (diagnosis, text) in made.items()
        if text
    ]


def _calls(source: str, what: str, first: int, last: int) -> list[ast.Call]:
    """The calls of tl.<what> between two places of the text."""
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == f"tl.{what}"
        and first <= span(source, node)[0] < last
    ]
    return sorted(found, key=lambda call: span(source, call))


def _without_mask(source: str, call: ast.Call) -> str:
    start, end = span(source, call)
    kept = [keyword for keyword in call.keywords if keyword.arg not in ("mask", "other")]
    bare = ast.Call(func=call.func, args=call.args, keywords=kept)
    return source[:start] + ast.unparse(bare) + source[end:]


def _last_word(exercise: KernelExercise, source: str) -> str:
    """The right results, each sent through PyTorch once more: flipped twice, so they stay right."""
    body = """
def _by_torch(tensor):
    return tensor.reshape(-1).flip(0).flip(0).reshape(tensor.shape) if isinstance(tensor, torch.Tensor) else tensor


def {function}(*args):
    results = _of_solution(*args)
    for i in {in_place}:
        args[i].copy_(_by_torch(args[i]))
    return tuple(map(_by_torch, results)) if isinstance(results, tuple) else _by_torch(results)
"""
    return _wrapped(exercise, source, body)


def _changes_an_input(exercise: KernelExercise, source: str) -> str:
    """The right results, and the first tensor that is not to be changed is filled with ones."""
    body = """
def {function}(*args):
    results = _of_solution(*args)
    with torch.no_grad():
        next(x for i, x in enumerate(args) if i not in {in_place} and isinstance(x, torch.Tensor)).fill_(1)
    return results
"""
    return _wrapped(exercise, source, body)


def _copies_arguments(exercise: KernelExercise, source: str) -> str:
    """The right results, computed from copies: what `.contiguous()` costs where a tensor is not."""
    body = """
def {function}(*args):
    copies = (x.clone() if i not in {in_place} and isinstance(x, torch.Tensor) else x for i, x in enumerate(args))
    return _of_solution(*copies)
"""
    return _wrapped(exercise, source, body)


def _keeps_results(exercise: KernelExercise, source: str) -> str:
    """The right results of the first call with such tensors, by where they lie, and the same ones again in a later call."""
    body = """
_kept = {}


def {function}(*args):
    call = str([(x.data_ptr(), x.shape, x.dtype) for x in args if isinstance(x, torch.Tensor)])
    if call not in _kept:
        _kept[call] = _of_solution(*args)
    return _kept[call]
"""
    return _wrapped(exercise, source, body)


def _wrapped(exercise: KernelExercise, source: str, body: str) -> str:
    """The solution with the function that the check calls behind another of its name. Empty where it is no function."""
    if not re.search(rf"^def {exercise.function}\(", source, re.MULTILINE):
        return ""
    text = f"\n\n_of_solution = {exercise.function}\n\n" + body
    return source + text.replace("{function}", exercise.function).replace("{in_place}", repr(tuple(exercise.in_place)))


# ------------------------------------------------------------------------------- what is given away (classroom/leaks.py)
# The library holds the operations that the lessons build; everything else that a learner gets holds no answer.
_LIBRARY = frozenset("accounting kernels reference simulator validation".split())
TELLING = 30  # characters without spaces: shorter lines, such as `y = torch.empty_like(x)`, stand in any kernel


def secrets(root: Path | None = None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Where each telling line of an answer stands: the lines, without spaces, of all gaps and all right answers of the course
    in `root`, and of `more` solutions by their names, without those that a stub shows."""
    root = root or course.root()
    found: dict[str, str] = {}
    shown: set[str] = set()
    paths = sorted((root / "solutions").glob("*.py"))
    texts = {f"solutions/{path.name}": path.read_text(encoding="utf-8") for path in paths} | dict(more or {})
    for text in texts.values():
        shown |= set(stubs.normalised(stubs.clear(text)))
    right = [answer for path in paths for answer in answers(path.stem, root) if answer.diagnosis == RIGHT]
    for where, source in (*texts.items(), *((answer.where, answer.source) for answer in right)):
        found |= {line: where for line in stubs.normalised(source) if len(line) >= TELLING}
    handed_out = "\n".join(shown)  # a stub may show a line as a part of a longer one
    return {line: where for line, where in found.items() if line not in handed_out}


def in_library(parts: tuple[str, ...]) -> bool:
    """Whether a path below the course, ("gpukit", "kernels", "softmax.py"), is of the library, which may repeat an answer."""
    return parts[:1] == ("gpukit",) and parts[1] in _LIBRARY


# --------------------------------------------------------------------------------------------------------- the table
WRONG_NEEDED, RIGHT_NEEDED, DIAGNOSES_NEEDED = 5, 2, 4


def unfinished(exercise: Exercise, known: list[Answer], root: Path) -> list[str]:
    """What an exercise still lacks, a sentence each."""
    wrong = [answer.diagnosis for answer in known if answer.diagnosis not in (RIGHT, EQUIVALENT)]
    right = [answer for answer in known if answer.diagnosis == RIGHT]
    where = f"solutions/answers/{exercise.concept}.txt"
    lacks = []
    if len(wrong) < WRONG_NEEDED or len(set(wrong)) < DIAGNOSES_NEEDED:
        found = f"{len(wrong)} wrong answers with {len(set(wrong))} diagnoses"
        lacks.append(f"{where} holds {found}; {WRONG_NEEDED} with {DIAGNOSES_NEEDED} are needed")
    if len(right) < RIGHT_NEEDED:
        lacks.append(f"{where} holds {len(right)} right answers; {RIGHT_NEEDED} are needed")
    if not (root / "notebooks" / f"{exercise.notebook}.ipynb").exists():
        lacks.append(f"there is no notebooks/{exercise.notebook}.ipynb")
    return [f"{exercise.id}: {sentence}" for sentence in lacks]


@dataclass
class Row:
    """What the check of one exercise said. Counts are (as it must be, of how many)."""

    exercise: str
    wrong: tuple[int, int]
    named: tuple[int, int]  # of the known wrong answers: those that got their diagnosis
    generated: tuple[int, int]
    mutants: tuple[int, int]
    right: tuple[int, int]
    seconds: float
    misses: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        counts = (self.wrong, self.named, self.generated, self.mutants, self.right)
        return not self.misses and all(a == b for a, b in counts)


def judge_exercise(
    exercise_id: str, root: Path, seeds: Iterable[int] = (1,), mutate: str | None = None, right_alone: bool = False
) -> Row:
    """Try all answers to one exercise: wrong and generated ones with seed 1, right ones and the solution with each of `seeds`.

    mutate  which mutants of the solution are tried as well: "all", "functions" (all if it is no kernel), "some" (every
            tenth if it is a kernel), None
    right_alone  whether wrong, generated and changed ones are left out
    """
    start = time.perf_counter()
    exercise = registry.exercise(exercise_id)
    text = solution(exercise.concept, root)
    known = [answer for answer in answers(exercise.concept, root) if answer.exercise == exercise_id]
    misses = unfinished(exercise, known, root)

    def holds(answer: Answer, seed: int) -> tuple[bool, bool]:
        """(right verdict, right diagnosis)"""
        verdict = judge_source(exercise, answer.source, seed=seed, brief=answer.diagnosis == REJECTED)
        if answer.diagnosis == RIGHT:
            good = named = verdict.passed
        else:
            good = not verdict.passed
            named = good and answer.diagnosis in (REJECTED, verdict.diagnosis)
        if not named:
            wanted = "to pass" if answer.diagnosis == RIGHT else answer.diagnosis
            said = "passed" if verdict.passed else f"{verdict.diagnosis}: {verdict.lines[0] if verdict.lines else ''}"
            misses.append(f"{answer.where}: {answer.name}, seed {seed}: expected {wanted}, got {said}")
        elif answer.diagnosis not in (RIGHT, REJECTED) and (how := badly_said(verdict)):
            misses.append(f"{answer.where}: {answer.name}, seed {seed}: {verdict.diagnosis} is said in {how}")
        return good, named

    def count(found: list[bool]) -> tuple[int, int]:
        return sum(found), len(found)

    wrong, made, mutated = [], [], []
    if not right_alone:
        wrong = [holds(answer, 1) for answer in known if answer.diagnosis not in (RIGHT, EQUIVALENT)]
        made = [holds(answer, 1) for answer in _wrong(generated(exercise, text), known)]
        mutated = [holds(answer, 1) for answer in _tried(_wrong(_mutants(exercise_id, text), known), exercise, mutate)]
    rights = [Answer(exercise_id, "the solution", RIGHT, text, f"solutions/{exercise.concept}.py")]
    rights += [answer for answer in known if answer.diagnosis == RIGHT]
    right = [all([holds(answer, seed)[0] for seed in seeds]) for answer in rights]
    return Row(
        exercise_id,
        wrong=count([good for good, _ in wrong]),
        named=count([named for _, named in wrong]),
        generated=count([named for _, named in made]),
        mutants=count([good for good, _ in mutated]),
        right=count(right),
        seconds=time.perf_counter() - start,
        misses=tuple(misses),
    )


def badly_said(verdict: Verdict) -> str:
    """What keeps a learner from reading it at a glance: too many lines or too long ones; "" if nothing."""
    longest = max(map(len, verdict.lines), default=0)
    if not 0 < len(verdict.lines) <= MAX_LINES:
        return f"{len(verdict.lines)} lines"
    return f"a line of {longest} characters" if longest > MAX_LINE else ""


def _mutants(exercise_id: str, text: str) -> list[Answer]:
    return [
        Answer(exercise_id, mutant.change, REJECTED, mutant.source, f"mutant of {exercise_id}, line {mutant.line}")
        for mutant in mutants.mutants(text, *section(text, exercise_id))
    ]


def _tried(found: list[Answer], exercise: Exercise, mutate: str | None) -> list[Answer]:
    """Those of the mutants that `mutate` of judge_exercise asks for."""
    if mutate == "all" or (mutate and not exercise.kernel):
        return found
    return found[::_TENTH] if mutate == "some" else []


def _wrong(made: list[Answer], known: list[Answer]) -> list[Answer]:
    """Those made by machine that must be rejected: all but those that are known to compute the same."""
    same = {ast.dump(ast.parse(answer.source)) for answer in known if answer.diagnosis == EQUIVALENT}
    return [answer for answer in made if ast.dump(ast.parse(answer.source)) not in same]


def integrity(
    ids: list[str],
    root: Path,
    jobs: int = 1,
    seeds: Sequence[int] = (1,),
    mutate: str | None = None,
    right_alone: bool = False,
    show: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """One row for each exercise, `jobs` at a time; `show` is called with each as it comes, in the order of `ids`. What the
    arguments mean: judge_exercise. Right answers alone are shared out by seeds as well, and each seed counts."""
    rows = []
    parts = [(seed,) for seed in seeds] if right_alone else [seeds]
    tasks = [(exercise_id, part) for exercise_id in ids for part in parts]
    judge = partial(_judged, root=root, mutate=mutate, right_alone=right_alone)
    # Each process has a judge, and a fork server, of its own. Forked before torch is loaded, so nothing runs in threads yet.
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        found = pool.map(judge, tasks)
        for _ in ids:
            row = _together([next(found) for _ in parts])
            rows.append(row)
            show(row)
    return rows


def _judged(task: tuple[str, Sequence[int]], **options: Any) -> Row:
    exercise_id, seeds = task
    return judge_exercise(exercise_id, seeds=seeds, **options)


def _together(rows: list[Row]) -> Row:
    """The rows of one exercise as one."""
    counts = {
        name: tuple(sum(getattr(row, name)[i] for row in rows) for i in (0, 1))
        for name in ("wrong", "named", "generated", "mutants", "right")
    }
    misses = tuple(dict.fromkeys(miss for row in rows for miss in row.misses))
    return Row(rows[0].exercise, **counts, seconds=sum(row.seconds for row in rows), misses=misses)


HEADINGS = (
    "exercise",
    "wrong rejected",
    "diagnosis right",
    "generated rejected",
    "mutants",
    "right accepted",
    "seconds",
)


@cache
def _widths() -> tuple[int, ...]:
    return (max(map(len, registry.catalog())), *map(len, HEADINGS[1:]))


def heading() -> str:
    return "  ".join((HEADINGS[0].ljust(_widths()[0]), *HEADINGS[1:]))


def line(row: Row) -> str:
    cells = [f"{a} of {b}" if b else "none" for a, b in (row.wrong, row.named, row.generated, row.mutants, row.right)]
    cells = [row.exercise.ljust(_widths()[0]), *(c.rjust(w) for c, w in zip(cells, _widths()[1:], strict=False))]
    text = "  ".join((*cells, f"{row.seconds:.1f}".rjust(_widths()[-1])))
    return "\n".join((text, *(f"    {miss}" for miss in row.misses)))


def summary(rows: list[Row]) -> str:
    """The last line: what of everything is as it must be."""

    def share(name: str) -> str:
        good, of = (sum(getattr(row, name)[i] for row in rows) for i in (0, 1))
        return f"{good:,} of {of:,}"

    failed = sum(not row.whole for row in rows)
    return (
        f"wrong answers rejected {share('wrong')}, with their diagnosis {share('named')}; generated {share('generated')}, mutants {share('mutants')}; "
        f"right answers accepted {share('right')}\n"
        f"{len(rows) - failed} passed{f', {failed} failed' if failed else ''} in {sum(row.seconds for row in rows):.0f} s"
    )
