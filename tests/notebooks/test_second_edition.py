"""The shape and the words of a lesson, as CONTRIBUTING.md has them: every notebook that closes with "Check yourself"."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.words import habits

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))["cells"] for path in ROOT.glob("notebooks/*.ipynb")
}
MOST_LINES = 12  # of a code cell that a learner sees


def source(cell: dict) -> str:
    return "".join(cell["source"])


def hidden(cell: dict) -> bool:
    return cell["metadata"].get("jupyter", {}).get("source_hidden", False)


def prose(cells: list[dict]) -> str:
    """What is said in Markdown, without code and addresses."""
    text = "\n".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)


REWRITTEN = {stem: cells for stem, cells in NOTEBOOKS.items() if "**Check yourself**" in prose(cells)}


@pytest.mark.parametrize("stem", sorted(REWRITTEN))
def test_a_lesson_opens_and_closes_as_all_do(stem):
    cells = REWRITTEN[stem]
    text = prose(cells)
    assert cells[0]["cell_type"] == "markdown"
    for part in ("**You will be able to**", "**You need**"):
        assert part in source(cells[0]), f"the opening cell says {part}"
    assert any("course_map()" in source(cell) for cell in cells[:4]), "the map of the course stands at the head"
    assert "## What you can now do" in text
    rules = text.split("**Three rules to remember**")[1].split("**Check yourself**")[0]
    assert len(re.findall(r"(?m)^\d\. ", rules)) == 3
    questions = next(source(cell) for cell in cells if "**Check yourself**" in source(cell))
    assert questions.count("<details>") == questions.count("</details>") == 5, "five questions with folded answers"
    assert "## Your turn" in text and "**Sources.**" in text
    assert text.count("**What you s") >= 1, "what a table or figure showed is said in words"


@pytest.mark.parametrize("stem", sorted(NOTEBOOKS))
def test_every_exercise_has_the_same_heading(stem):
    """A heading of level 2 with the exercise's id and nothing else, above its check. The first check of the course stands
    under no heading of its own."""
    text = "\n".join(source(cell) for cell in NOTEBOOKS[stem])
    headed = re.findall(r"(?m)^(#+ .*\bExercise\b.*)$", text)
    checked = re.findall(r'(?m)^import gpukit; gpukit\.check\("([\w.]+)"\)$', text)
    assert headed == [f"## Exercise: {each}" for each in checked if each != "start.bytes_moved"]


@pytest.mark.parametrize("stem", sorted(REWRITTEN))
def test_a_visible_cell_teaches_or_shows(stem):
    for cell in REWRITTEN[stem]:
        if cell["cell_type"] != "code" or hidden(cell):
            continue
        text = source(cell)
        assert len(text.splitlines()) <= MOST_LINES, (
            f"{cell['id']}: at most {MOST_LINES} lines, the rest into gpukit/lessons"
        )
        assert "Markdown(" not in text, f"{cell['id']}: a sentence with numbers belongs into gpukit/lessons"
        assert max(map(len, text.splitlines()), default=0) <= 100, f"{cell['id']}: JupyterLab would scroll sideways"


@pytest.mark.parametrize("stem", sorted(REWRITTEN))
def test_a_lesson_has_pictures(stem):
    """Saved ones: two diagrams at least beside the map."""
    outputs = [output for cell in REWRITTEN[stem] if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3


@pytest.mark.parametrize("stem", sorted(REWRITTEN))
def test_words(stem):
    assert not habits(prose(REWRITTEN[stem]))


@pytest.mark.parametrize("stem", sorted(NOTEBOOKS))
def test_words_of_saved_outputs(stem):
    for cell in NOTEBOOKS[stem]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            said = (output.get("text", ""), data.get("text/plain", ""), data.get("text/markdown", ""))
            assert not habits("\n".join("".join(text) for text in said)), cell["id"]


@pytest.mark.parametrize("stem", sorted(REWRITTEN))
def test_what_shows_is_a_function_of_the_lesson(stem):
    """A hidden cell is one expression: its sentences and figures are written in gpukit/lessons."""
    for cell in REWRITTEN[stem]:
        if cell["cell_type"] == "code" and hidden(cell):
            assert len(ast.parse(source(cell)).body) == 1, cell["id"]


@pytest.mark.parametrize("stem", sorted(REWRITTEN))
def test_no_sentence_shows_a_field_instead_of_its_number(stem):
    """What a missing f before a string leaves in an output, such as {rate:,.0f}."""
    for cell in REWRITTEN[stem]:
        for output in cell.get("outputs", []):
            shown = "".join(output.get("data", {}).get("text/markdown", ""))
            assert not re.search(r"\{[^{}\n]+:[,.\d]*[df%]\}", shown), cell["id"]
