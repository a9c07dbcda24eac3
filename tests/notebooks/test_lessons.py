"""What the lessons on kernels have in common: what a notebook says of its exercises, its size, and hints without code.

What is special about one lesson's exercises stands in its own file; tests/checks/test_answers.py judges the known answers of all.
"""

import json
import random
import re
from pathlib import Path

import pytest
import torch

from gpukit.grading.registry import exercises
from tests.checks.known import ids

ROOT = Path(__file__).resolve().parents[2]
LESSONS = (
    "fusion",
    "triton_basics",
    "softmax",
    "gelu",
    "norms",
    "matmul",
    "flash_attention",
    "kv_cache",
    "losses",
    "adamw",
)
EXERCISES = {lesson: [e for e in exercises().values() if e.id.startswith(f"{lesson}.")] for lesson in LESSONS}
ALL = list(exercises().values())
FIRST = "start.bytes_moved"  # the first check of the course stands under no heading of its own
WIDE = ("triton_basics", "softmax", "gelu")  # code cells of more than 100 columns; JupyterLab scrolls them sideways


def cells_of(lesson: str) -> list[dict]:
    (path,) = (ROOT / "notebooks").glob(f"??_{lesson}.ipynb")
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("exercise", [e for found in EXERCISES.values() for e in found], ids=ids)
def test_cases_are_fresh_but_always_the_same_ones(exercise):
    """A seed says all of the inputs, and nothing of what the cases are for."""
    first, second, again = (exercise.cases(random.Random(seed)) for seed in (1, 2, 1))
    assert [(case.name, case.tags) for case in first] == [(case.name, case.tags) for case in second]
    assert len({case.name for case in first}) == len(first) >= 5
    assert all(same(a.args, b.args) for a, b in zip(first, again, strict=True))
    assert not all(same(a.args, b.args) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("exercise", ALL, ids=ids)
def test_notebook_says_what_the_registry_says(exercise):
    """The label above each check is the exercise's; in lessons on kernels the statement stands right above its check."""
    cells = cells_of(exercise.id.partition(".")[0])
    checks = [i for i, cell in enumerate(cells) if cell["id"] == "check-" + re.sub(r"[._]", "-", exercise.id)]
    assert len(checks) == 1, f"one cell with the id check-{re.sub(r'[._]', '-', exercise.id)} belongs into the notebook"
    check = cells[checks[0]]
    above = "".join("".join(cell["source"]) for cell in cells[: checks[0]])
    if exercise.id != FIRST:
        assert f"*{exercise.label}*" in above, "the notebook and gpukit/checks have different labels"
    if exercise.concept in LESSONS:
        assert f"## Exercise: {exercise.id}\n" in "".join(cells[checks[0] - 1]["source"])
    assert "".join(check["source"]) == f'import gpukit; gpukit.check("{exercise.id}")'
    assert not check["outputs"]


@pytest.mark.parametrize("lesson", LESSONS)
def test_notebook_adds_up_the_minutes(lesson):
    minutes = sum(exercise.label.minutes for exercise in EXERCISES[lesson])
    said = f"of which {minutes} minutes are exercises"
    assert said in "".join(cells_of(lesson)[0]["source"])


@pytest.mark.parametrize("lesson", LESSONS)
def test_notebook_keeps_to_its_size(lesson):
    """Those of the first edition; test_second_edition.py has the shape of the others."""
    cells = cells_of(lesson)
    if any("**Check yourself**" in "".join(cell["source"]) for cell in cells):
        return
    assert 20 <= len(cells) <= 40
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            lines = text.splitlines()
            assert len(lines) <= 15, cell["id"]
            assert lesson in WIDE or max(map(len, lines)) <= 100, cell["id"]
        else:
            assert len(text.split()) <= 120, cell["id"]


@pytest.mark.parametrize("exercise", [e for found in EXERCISES.values() for e in found], ids=ids)
def test_diagnoses_and_hints_tell_no_code(exercise):
    lesson = exercise.id.partition(".")[0]
    call = r"tl\.(?!rand)\w+\(" if lesson == "triton_basics" else r"tl\.\w+\("
    pointer = r"\w+_ptr \+" if lesson == "softmax" else r"\w+_ptr"
    texts = [*exercise.hints, *exercise.prose.shared.values(), *exercise.prose.sentences.values()]
    for text in texts:
        assert not re.search(rf"{call}|{pointer}|mask=|other=|\.clone\(|\w+\[", text), text
