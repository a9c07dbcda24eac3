"""Your answer beside the course's: `gpukit.compare("softmax.fused")`, once yours passes.

What each moves, compiles to and is predicted to take comes from gpukit/grading/example.py.
"""

from __future__ import annotations

import html
import re
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpukit import course, hardware
from gpukit.grading import example, registry
from gpukit.grading.judge import judge
from gpukit.grading.verdict import Shown
from gpukit.widgets import style

_RULE = re.compile(r"# -{4,} ?(\w+\.\w+)")
_MARKS = re.compile(r"[ \t]*# (BEGIN SOLUTION|END SOLUTION|STUB: .*)\n")
WIDTH = 80


class Comparison:
    """The two texts, and a table of what each does. A notebook shows the texts side by side, a terminal one below the other."""

    def __init__(self, exercise_id: str, yours: str, ours: str, table: style.Table | None, sentence: str):
        self.id, self.yours, self.ours, self.table, self.sentence = exercise_id, yours, ours, table, sentence

    def __repr__(self) -> str:
        parts = [f"{name}\n{'-' * len(name)}\n{_wrapped(text)}" for name, text in self._texts()]
        if self.table is not None:
            caption = textwrap.fill(self.table.caption, WIDTH)
            parts.append(f"{caption}\n{style.table(self.table.columns, self.table.rows)}")
        return "\n\n".join([*parts, textwrap.fill(self.sentence, WIDTH)])

    def _texts(self) -> list[tuple[str, str]]:
        return [(f"your {self.id}", self.yours), (f"the course's {self.id}", self.ours)]

    def _repr_html_(self) -> str:
        columns = "".join(
            f'<div style="min-width:0"><b>{html.escape(name)}</b><pre style="border-left:4px solid {color};'
            "padding:0.3em 0.8em;max-height:45em;overflow:auto;white-space:pre;font-size:12px;line-height:1.35"
            f'">{html.escape(text)}</pre></div>'
            for (name, text), color in zip(self._texts(), (style.YOURS, style.PEER), strict=True)
        )
        grid = "display:grid;grid-template-columns:repeat(auto-fit,minmax(30em,1fr));gap:1em"
        table = self.table._repr_html_() if self.table is not None else ""
        return f'<div style="{grid}">{columns}</div>{table}<p>{html.escape(self.sentence)}</p>'


def compare(exercise_id: str, gpu: str = "h200") -> Comparison | Shown:
    """Your answer to an exercise beside the course's, with what one call of each moves (counted), compiles to, and is
    predicted to take on a GPU that need not be there (modelled).

        gpukit.compare("softmax.fused", gpu="a100")

    Your answer is checked first. If it does not pass, the verdict is what you see: the course's answer would spoil the
    exercise. `gpu` is any GPU of gpukit/hardware.py.

    Raises UnknownExercise, and CourseError for an unknown GPU or a copy of the course without solutions.
    """
    return beside(exercise_id, gpu)


def beside(exercise_id: str, gpu: str = "h200", terminal: bool = False) -> Comparison | Shown:
    """`compare`, whose verdict is in words for a reader in a notebook, or in a terminal."""
    exercise = registry.exercise(exercise_id)
    try:
        target = hardware.gpu(gpu)
    except ValueError as error:
        raise course.CourseError(str(error)) from None
    root, impl = course.root(), course.impl()
    ours = course.exercise_file(exercise.concept, root, "solutions")
    if not ours.exists():
        raise course.CourseError("this copy of the course has no solutions/, so there is nothing to compare with")
    verdict = judge(exercise.id, impl, root, terminal=terminal)
    if not verdict.passed:
        name = "gpukit compare" if terminal else "gpukit.compare"
        first = f"{name} shows the course's answer beside yours once yours passes. Until then:"
        return Shown([("", first), (verdict.state, str(verdict))])
    yours = course.exercise_file(exercise.concept, root, impl)
    texts = [_section(path, exercise.id) for path in (yours, ours)]
    if not exercise.kernel and not exercise.watched:
        return Comparison(exercise.id, *texts, None, "Both pass the check. A plain function moves nothing on a GPU.")
    with ThreadPoolExecutor(2) as pool:
        mine, theirs = pool.map(lambda path: example.weigh(exercise.id, path, target.key)[0], (yours, ours))
    return Comparison(exercise.id, *texts, *_facts(exercise.kernel, target, mine, theirs))


def _facts(kernel: bool, gpu: hardware.Gpu, mine: dict, theirs: dict) -> tuple[style.Table, str]:
    columns = {"one call": "", "yours": "", "the course's": ""}
    if not kernel:
        rows = [
            ("most bytes of tensors at a time (counted)", *(_bytes(each["peak_bytes"]) for each in (mine, theirs))),
            ("time on this CPU (measured)", *(_us(each["time_us"]) for each in (mine, theirs))),
        ]
        return style.table(columns, rows, caption=theirs["arguments"]), "Both pass the check."
    kinds = {
        "bytes loaded (counted)": lambda each: _bytes(each["load_bytes"]),
        "bytes stored (counted)": lambda each: _bytes(each["store_bytes"]),
        "bytes changed by atomics (counted)": lambda each: _bytes(each["atomic_bytes"]),
        "launches (counted)": lambda each: f"{each['launches']}",
        "registers per thread (compiled)": lambda each: f"{each['registers']}",
        "shared memory per program (compiled)": lambda each: _bytes(each["shared_bytes"]),
        "spilled bytes per thread (compiled)": lambda each: f"{each['spills']}",
        f"time on {gpu.name} (modelled)": lambda each: _us(each["time_us"]),
        "limited by (modelled)": lambda each: each["limit"],
    }
    rows = [(kind, text(mine), text(theirs)) for kind, text in kinds.items()]
    zeros = ("0", "0"), ("0 bytes", "0 bytes")  # most kernels spill nothing and use no atomics
    rows = [row for row in rows if not row[0].startswith(("spilled", "bytes changed")) or row[1:] not in zeros]
    caption = f"{theirs['arguments']}; counted in {example.PROGRAMS} programs of each launch and scaled to all of them"
    if max(mine["launches"], theirs["launches"]) > 1:
        caption += "; of several launches, the most registers and shared memory that one takes"
    ratio = mine["time_us"] / theirs["time_us"]
    if abs(ratio - 1) < 0.03:
        sentence = f"The two are predicted to take the same time on the {gpu.name}."
    else:
        slower = f"{ratio:.2f} times as long as" if ratio > 1 else f"{ratio:.2f} of the time of"
        sentence = f"Your version is predicted to take {slower} the course's on the {gpu.name}."
    return style.table(columns, rows, caption=caption), sentence


def _section(path: Path, exercise_id: str) -> str:
    """What a file holds of an exercise: from its rule to the next one; the whole file where the rule is gone."""
    text = _MARKS.sub("", course.text(course.read_bytes(path, path.parents[1])))
    lines = text.split("\n")
    rules = [(i, match[1]) for i, line in enumerate(lines) if (match := _RULE.match(line))]
    for (start, name), (end, _) in zip(rules, [*rules[1:], (len(lines), "")], strict=True):
        if name == exercise_id:
            return "\n".join(lines[start + 1 : end]).strip("\n")
    return text.strip("\n")


def _wrapped(text: str) -> str:
    """Code of at most WIDTH columns: what is longer goes on in the next line, behind an arrow."""
    lines = []
    for line in text.split("\n"):
        while len(line) > WIDTH:
            cut = line.rfind(" ", WIDTH // 2, WIDTH) + 1 or WIDTH
            lines.append(line[:cut].rstrip())
            line = "    ... " + line[cut:]
        lines.append(line)
    return "\n".join(lines)


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def _us(time_us: float) -> str:
    return f"{style.number(time_us)} µs"
