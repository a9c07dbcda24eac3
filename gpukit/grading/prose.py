"""What the learner reads of an exercise, as prose: `gpukit/checks/<concept>.md` beside the cases and formulas.

    # softmax
    notebook 09_softmax

    - no-max-subtraction: A sentence for each exercise of the file that has a misconception of this name.

    ## softmax.fused: Softmax in one read and one write
    difficulty 2/5, 20 min: masks, padding values, reductions over a block

    1. The first hint.
    2. The second.
    3. The third.

    - tail-mask: The sentence that the learner reads where this misconception is recognized.
    - tail-mask/2: Another one with the same diagnosis, recognized in another way.
    - traffic: No misconception of the exercise has this name, so it is added to the judge's own diagnosis "traffic".

An item goes on over the following lines if they are indented. Nothing here imports torch or a check.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import gpukit
from gpukit.course import CourseError

FOLDER = Path(gpukit.__file__).parent / "checks"
HINTS = 3
added: dict[str, str] = {}  # the text of such a file, by concept, where gpukit.grading.registry was given one


class ProseError(CourseError):
    """A prose file that cannot be read as such, or lacks something. The message names file, line and exercise."""


@dataclass(frozen=True)
class Label:
    difficulty: int  # 1 (a few minutes) to 5 (an evening)
    minutes: int
    teaches: str

    def __str__(self) -> str:
        return f"difficulty {self.difficulty}/5, {self.minutes} min: {self.teaches}"


@dataclass(frozen=True)
class Prose:
    """What is written about one exercise.

    id         "softmax.fused"
    title      "Softmax in one read and one write"
    notebook   "09_softmax"
    hints      three of them: the idea, the mechanism, the lines in words
    sentences  what the learner reads, by the name of the misconception or of the judge's diagnosis
    shared     sentences for the misconceptions of all exercises of the concept; one in `sentences` goes before them
    """

    id: str
    title: str
    notebook: str
    label: Label
    hints: tuple[str, ...]
    sentences: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)

    @property
    def concept(self) -> str:
        return self.id.partition(".")[0]

    @property
    def all_sentences(self) -> dict[str, str]:
        return self.shared | self.sentences


def concepts() -> list[str]:
    """The concepts that have a prose file."""
    return sorted({*(path.stem for path in FOLDER.glob("*.md")), *added})


@cache
def concept(name: str) -> dict[str, Prose]:
    """The exercises of one concept by id, in the order of the file. Raises ProseError."""
    try:
        text = added[name] if name in added else (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    except OSError:
        raise ProseError(f"{name} has no prose: gpukit/checks/{name}.md is missing") from None
    return parse(text, name)


def of(exercise_id: str) -> Prose:
    """The prose of one exercise. Raises ProseError."""
    name = exercise_id.partition(".")[0]
    try:
        return concept(name)[exercise_id]
    except KeyError:
        raise ProseError(
            f"{exercise_id} has no prose: gpukit/checks/{name}.md has no line '## {exercise_id}: …'"
        ) from None


def parse(text: str, name: str) -> dict[str, Prose]:
    """The exercises of concept `name` by id, from the text of its file. Raises ProseError."""
    notebook, shared, sections = "", {}, []
    for number, line in _paragraphs(text):
        try:
            if line.startswith("## "):
                exercise_id, title = _match(r"## (\w+\.\w+): (.+)", line, "'## concept.exercise: title'")
                if exercise_id.partition(".")[0] != name or exercise_id in [s["id"] for s in sections]:
                    raise ValueError(f"{exercise_id} is no exercise of {name}, or a second section of that name")
                sections.append({"id": exercise_id, "title": title, "label": None, "hints": [], "sentences": {}})
            elif line.startswith("# "):
                _match(rf"# ({name})", line, f"'# {name}'")
            elif line.startswith("notebook ") and not sections:
                (notebook,) = _match(r"notebook (\d\d_\w+)", line, "'notebook NN_name'")
            elif line.startswith("- "):
                label, sentence = _match(r"- ([\w-]+(?:/\d)?): (.+)", line, "'- name: sentence'")
                items = sections[-1]["sentences"] if sections else shared
                if label in items:
                    raise ValueError(f"a second sentence for {label!r}; call it '{label}/2'")
                items[label] = sentence
            elif sections and line.startswith("difficulty "):
                numbers = _match(
                    r"difficulty ([1-5])/5, (\d+) min: (.+)", line, "'difficulty N/5, M min: what it teaches'"
                )
                sections[-1]["label"] = Label(int(numbers[0]), int(numbers[1]), numbers[2])
            elif sections and line[0].isdigit():
                at, hint = _match(r"(\d)\. (.+)", line, "'1. hint'")
                if int(at) != len(sections[-1]["hints"]) + 1:
                    raise ValueError(f"hint {at} after {len(sections[-1]['hints'])} hints")
                sections[-1]["hints"].append(hint)
            else:
                raise ValueError(f"{line[:40]!r} is no heading, label, hint or item; a continued line is indented")
        except ValueError as error:
            raise ProseError(f"gpukit/checks/{name}.md, line {number}: {error}") from None
    if not notebook:
        raise ProseError(f"gpukit/checks/{name}.md names no notebook; its second line is 'notebook NN_{name}'")
    made = {}
    for section in sections:
        if section["label"] is None or len(section["hints"]) != HINTS:
            count = len(section["hints"])
            found = "no difficulty" if section["label"] is None else f"{count} hint{'s' * (count != 1)}"
            raise ProseError(
                f"gpukit/checks/{name}.md, {section['id']}: {found}; a difficulty and {HINTS} hints are needed"
            )
        made[section["id"]] = Prose(
            **section | {"notebook": notebook, "hints": tuple(section["hints"]), "shared": shared}
        )
    return made


def _paragraphs(text: str) -> list[tuple[int, str]]:
    """(line number, text) of each item, indented lines joined to the one before."""
    found: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line[:1].isspace() and line.strip() and found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
        elif line.strip():
            found.append((number, line.rstrip()))
    return found


def _match(pattern: str, line: str, wanted: str) -> tuple[str, ...]:
    found = re.fullmatch(pattern, line)
    if found is None:
        raise ValueError(f"expected {wanted}, got {line[:60]!r}")
    return found.groups()
