"""What people read: one page for each learner and one for the class, each a single file without scripts or outside addresses.

A learner's page holds what the learner's own checks would say, and nothing of anybody else. The page of the class is for the
instructor: it names students and links their pages.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from statistics import mean, median

import gpukit
from gpukit.classroom import gradebook
from gpukit.classroom.assignment import Assignment
from gpukit.classroom.gradebook import number
from gpukit.classroom.marks import NOT_GRADED, Mark, Marked
from gpukit.classroom.store import Graded, Store
from gpukit.grading import registry
from gpukit.grading.report import plain

# Colors of gpukit.widgets.style: green for a pass, amber for what is to be done, vermillion for the rest.
_LOOK = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --back: #fff; --box: #f6f8fa;
  --pass: #009e73; --todo: #e69f00; --fail: #d55e00; --none: #8c959f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --back: #0d1117;
  --box: #151b23; } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 0 .2rem } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem }
.soft { color: var(--soft); font-size: .9rem } .big { font-size: 1.25rem; margin: .3rem 0 1rem }
table { border-collapse: collapse; width: 100%; font-size: .92rem }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
th { font-weight: 600; color: var(--soft) } .n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
code, pre { font: .88em/1.45 ui-monospace, monospace } td { overflow-wrap: break-word }
.table { overflow-x: auto } td code, .count { white-space: nowrap }
.said { font-size: .78em; white-space: pre-wrap; overflow-wrap: anywhere; background: var(--box); border-left: 4px solid var(--none);
  padding: .5rem .8rem; margin: 0 }
.state::before { content: ""; display: inline-block; width: .65em; height: .65em; border-radius: 50%; margin-right: .45em;
  background: var(--fail) }
.state { white-space: nowrap } .pass::before { background: var(--pass) } .todo::before { background: var(--todo) }
.none::before { background: var(--none) } .said.fail { border-color: var(--fail) } .said.todo { border-color: var(--todo) }
.bar { display: inline-block; width: 6rem; height: .6rem; background: var(--line); margin-right: .5rem }
.bar i { display: block; height: 100%; background: var(--pass) }
footer { margin-top: 2rem; border-top: 1px solid var(--line); padding-top: .5rem }
@media print { :root { --ink: #000; --soft: #333; --line: #999; --back: #fff; --box: #fff }
  body { font-size: 10.5pt; margin: 0; max-width: none } .table { overflow: visible } section, tr { break-inside: avoid }
  h2, h3 { break-after: avoid } .bar, .state::before, .bar i { print-color-adjust: exact; -webkit-print-color-adjust: exact } }
"""


def learner(assignment: Assignment, row: Marked, students: Collection[str] = ()) -> str:
    """The page of one learner. Sentences that name another one of `students` are left out."""
    handed_in = row.handed_in
    name = f"{handed_in.name} ({row.student})" if handed_in.name not in ("", row.student) else row.student
    passed = sum(mark.state == "pass" for mark in row.marks)
    late = _late_rule(assignment)
    parts = [
        f"<h1>{_text(assignment.title)}</h1>",
        f'<div class="soft">{_text(name)}</div>',
        f'<p class="big"><b>{number(row.score)}</b> of {number(row.possible)} points · {passed} of {len(row.marks)} exercises pass</p>',
    ]
    facts = [f"Handed in {_time(handed_in.submitted)}." if handed_in.submitted else "", late, _lateness(row)]
    if not row.complete:
        facts.append("Not everything is graded yet, so the points may grow. What is not graded costs nothing.")
    if said := " ".join(filter(None, facts)):
        parts.append(f"<p>{_text(said)}</p>")
    parts += [f'<p class="soft">{_text(note)}</p>' for note in handed_in.notes if not _names(note, row, students)]
    lines = [
        (
            _exercise(mark.exercise),
            _state(mark.state),
            _n(
                f"{mark.graded.checks_passed}/{mark.graded.checks_total}"
                if mark.graded and mark.graded.checks_total
                else ""
            ),
            _n(f"{number(mark.points) or 'not yet'} of {number(mark.possible)}"),
            _n(mark.tries or ""),
        )
        for mark in row.marks
    ]
    parts.append(_table(("exercise", "state", "#checks", "#points", "#tries"), lines))
    if said := _said(mark for mark in row.marks if mark.state != "pass"):
        parts += ["<h2>What to look at</h2>", *said]
    if judged := [mark.graded for mark in row.marks if mark.graded]:
        parts += ["<h2>How it was graded</h2>", _origin(judged)]
    return _page(f"{assignment.title}: {row.student}", parts, judged)


def group(assignment: Assignment, rows: Sequence[Marked], store: Store) -> str:
    """The page of the class. Raises BadStore."""
    every = store.verdicts()
    handed_in = [row for row in rows if row.handed_in.path]
    scores = [row.score for row in rows]
    parts = [f"<h1>{_text(assignment.title)}</h1>"]
    if rows:
        parts.append(
            f'<p class="big">{len(handed_in)} of {len(rows)} students handed in · mean {number(mean(scores))}, '
            f"median {number(median(scores))} of {number(assignment.possible)} points</p>"
        )
    if late := _late_rule(assignment):
        parts.append(f'<p class="soft">{_text(late)}</p>')
    if open_ones := sum(not row.complete for row in rows):
        parts.append(f"<p><b>Not graded completely: {open_ones}.</b> Run gpukit class grade again.</p>")
    parts += ["<h2>Exercises</h2>", _exercises(assignment, rows, every)]
    parts += ["<h2>Misconceptions and other diagnoses</h2>", _misconceptions(rows, every)]
    parts += ["<h2>Points</h2>", _histogram(scores, assignment.possible)]
    parts += ["<h2>Students</h2>", _students(rows)]
    judged = [mark.graded for row in rows for mark in row.marks if mark.graded]
    return _page(f"{assignment.title}: the class", parts, judged)


def file_name(student: str) -> str:
    """A file's name without its ending, for a student whatever an LMS calls them: "s1042", "a_b-1f0c9a7e" for "a/b"."""
    plain_name = re.sub(r"[^\w+@-]+", "_", student)[:60]
    if plain_name == student:
        return student
    return f"{plain_name}-{hashlib.sha256(student.encode(errors='surrogatepass')).hexdigest()[:8]}"


# -- parts of a learner's page -----------------------------------------------------------------------------------------


def _said(marks: Iterable[Mark]) -> list[str]:
    """What each verdict says; exercises that lack one for the same reason stand together."""
    said: dict[tuple[str, ...], list[Mark]] = {}
    for mark in marks:
        judged = mark.graded and mark.state != NOT_GRADED
        said.setdefault((mark.exercise, *mark.graded.lines) if judged else (mark.state, mark.why), []).append(mark)
    return [
        f"<section><h3>{'<br>'.join(_exercise(mark.exercise) for mark in alike)}</h3>"
        f'<pre class="said {_kind(alike[0].state)}">{_text(chr(10).join(lines) or alike[0].state)}</pre></section>'
        for (_, *lines), alike in said.items()
    ]


def _origin(judged: Sequence[Graded]) -> str:
    lines = [
        (
            f"<code>{each.exercise}</code>",
            f"<code>{each.file_hash[:16]}</code>",
            _n(each.seed),
            f"<code>{each.check_version}</code>",
            _time(each.when),
        )
        for each in judged
    ]
    table = _table(("exercise", "file (SHA-256)", "#seed", "check", "when"), lines)
    first = judged[0]
    return (
        f"{table}<p class='soft'>A verdict can be repeated: <code>gpukit check {first.exercise} --seed {first.seed}</code> "
        "gives this one again on the same file.</p>"
    )


def _names(note: str, row: Marked, students: Collection[str]) -> bool:
    """Whether a sentence names another student."""
    words = set(re.findall(r"[^\s,;:()'\"]+", note))
    return any(
        other != row.student and (other in words or (" " in other and other in note)) for other in students if other
    )


# -- parts of the page of the class ------------------------------------------------------------------------------------


def _exercises(assignment: Assignment, rows: Sequence[Marked], every: Sequence[Graded]) -> str:
    lines = []
    for at, exercise in enumerate(assignment.exercises):
        marks = [row.marks[at] for row in rows]
        states = Counter(mark.state for mark in marks)
        tries = [mark.tries for mark in marks if mark.tries]
        seconds = [each.seconds for each in every if each.exercise == exercise and each.seconds]
        others = [(state, count) for state, count in states.most_common() if state != "pass"]
        share = states["pass"] / len(marks) if marks else 0
        lines.append(
            (
                _exercise(exercise),
                f'<span class="count"><span class="bar"><i style="width:{share:.0%}"></i></span>'
                f"{states['pass']} of {len(marks)}</span>",
                ", ".join(f'<span class="count">{count} {_text(state)}</span>' for state, count in others),
                _n(f"{mean(tries):.1f}" if tries else ""),
                _n(f"{median(seconds):.2f} s" if seconds else ""),
            )
        )
    return _table(("exercise", "passed", "others", "#mean tries", "#median check"), lines)


def _misconceptions(rows: Sequence[Marked], every: Sequence[Graded]) -> str:
    students = {row.student for row in rows}
    now = Counter(
        (mark.exercise, mark.graded.diagnosis)
        for row in rows
        for mark in row.marks
        if mark.graded and mark.graded.diagnosis and mark.state != "todo"
    )
    seen = {
        (each.student, each.exercise, each.diagnosis)
        for each in every
        if each.student in students and each.diagnosis and each.state not in ("todo", "skipped")
    }
    ever = Counter((exercise, diagnosis) for _, exercise, diagnosis in seen)
    lines = [
        (
            f"<code>{exercise}</code>",
            f"<code>{_text(diagnosis)}</code>",
            _text(_sentence(exercise, diagnosis)),
            _n(now[exercise, diagnosis]),
            _n(count),
        )
        for (exercise, diagnosis), count in sorted(ever.items(), key=lambda item: (-item[1], item[0]))
        if exercise in registry.catalog()
    ]
    if not lines:
        return '<p class="soft">None was recognized.</p>'
    return _table(("exercise", "diagnosis", "what learners read", "#students now", "#ever"), lines)


def _sentence(exercise: str, diagnosis: str) -> str:
    """What the course says of a misconception, "" of what the judge itself finds, such as an exception."""
    said = registry.catalog()[exercise].all_sentences.get(diagnosis, "").removeprefix("so ")
    return said[:1].upper() + said[1:]


def _histogram(scores: Sequence[float], possible: float) -> str:
    """How many students have how many tenths of the points."""
    counts = Counter(min(9, int(10 * score / possible)) if possible else 9 for score in scores)
    most = max(counts.values(), default=1)
    lines = [
        (
            _n(f"{number(possible * tenth / 10)} to {number(possible * (tenth + 1) / 10)}"),
            f'<span class="bar" style="width:24rem;max-width:60%"><i style="width:{counts[tenth] / most:.0%}"></i></span>'
            f"{counts[tenth]}",
        )
        for tenth in reversed(range(10))
    ]
    return _table(("#points", "students"), lines)


def _students(rows: Iterable[Marked]) -> str:
    lines = []
    for row in rows:
        states = Counter(mark.state for mark in row.marks)
        link = f'<a href="learners/{html.escape(file_name(row.student))}.html">{_text(row.student)}</a>'
        name = row.handed_in.name if row.handed_in.name != row.student else ""
        notes = "".join(f'<div class="soft">{_text(note)}</div>' for note in row.handed_in.notes)
        lines.append(
            (
                link,
                _text(name),
                _text(", ".join(f"{count} {state}" for state, count in sorted(states.items(), key=_pass_first)))
                + notes,
                _n(row.days_late or ""),
                _n(number(row.score) + ("" if row.complete else " so far")),
            )
        )
    return _table(("student", "name", "exercises", "#days late", "#points"), lines)


def _pass_first(item: tuple[str, int]) -> tuple[bool, str]:
    return item[0] != "pass", item[0]


# -- HTML --------------------------------------------------------------------------------------------------------------


def _page(title: str, parts: Iterable[str], judged: Sequence[Graded]) -> str:
    versions = sorted({f"gpukit {each.gpukit}, torch {each.torch}, triton {each.triton}" for each in judged})
    when = (
        f"Graded {_time(max(each.when for each in judged))} with {'; '.join(versions)}."
        if judged
        else f"Nothing was judged. gpukit {gpukit.__version__}."
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{_text(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_LOOK}</style></head>\n<body>\n'
        + "\n".join(parts)
        + f'\n<footer class="soft">{_text(when)}</footer>\n</body>\n</html>\n'
    )


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Cells are HTML; a heading with # belongs to a column of numbers."""
    heads = "".join(f'<th class="n">{each[1:]}</th>' if each[0] == "#" else f"<th>{each}</th>" for each in head)
    body = "\n".join(
        "<tr>" + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in line) + "</tr>"
        for line in lines
    )
    return f'<div class="table"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _n(value: object) -> str:
    return f'<td class="n">{_text(str(value))}</td>'


def _exercise(exercise: str) -> str:
    told = registry.catalog().get(exercise)
    return f"<code>{_text(exercise)}</code>{f' {_text(told.title)}' if told else ''}"


def _state(state: str) -> str:
    return f'<span class="state {_kind(state)}">{_text(state)}</span>'


def _kind(state: str) -> str:
    return state if state in ("pass", "todo") else "none" if state in (NOT_GRADED, "missing") else "fail"


def _late_rule(assignment: Assignment) -> str:
    if assignment.deadline is None:
        return ""
    said = f"Deadline {_time(assignment.deadline.isoformat())}."
    if assignment.per_day:
        said += f" Each day that begins after it costs {assignment.per_day * 100:.3g}% of the points."
    if assignment.at_most is not None:
        said += f" What comes more than {gradebook.days(assignment.at_most)} late does not count."
    return said


def _lateness(row: Marked) -> str:
    if not row.days_late:
        return ""
    if not row.penalty:
        return f"This came in {gradebook.days(row.days_late)} late."
    return f"This came in {gradebook.days(row.days_late)} late, which costs {number(row.penalty)} of {number(row.raw)} points."


def _time(iso: str) -> str:
    """ "2026-10-12 12:00 +00:00" """
    return re.sub(r"^(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)[\d:.]*(.*)$", r"\1 \2 \3", iso).replace(" +00:00", " UTC").strip()


def _text(text: str) -> str:
    return html.escape(plain(text))
