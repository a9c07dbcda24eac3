"""The words of the course outside its notebooks (tests/notebooks/test_second_edition.py): stubs, checks, documents, docstrings."""

import re
import tokenize
from pathlib import Path

import pytest

from tests.words import docstrings, habits

ROOT = Path(__file__).resolve().parents[1]
# Concepts whose notebooks are being rewritten, with the texts of their exercises: this set only shrinks.
FIRST_EDITION = {
    "memory", "flops", "benchmarking", "triton_basics", "tiling", "fusion", "softmax", "norms",
}  # fmt: skip


def files(pattern: str) -> list[Path]:
    return [path for path in sorted(ROOT.glob(pattern)) if path.stem not in FIRST_EDITION]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", files("exercises/*.py"), ids=named)
def test_stubs(path):
    with path.open("rb") as file:
        comments = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    assert not habits("\n".join([*docstrings(path), *comments]))


@pytest.mark.parametrize("path", files("gpukit/checks/*.md"), ids=named)
def test_texts_of_checks(path):
    text = re.sub(r"(?m)^- [\w/-]+:", "-", path.read_text(encoding="utf-8"))  # without the names of diagnoses
    assert not habits(text)


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *ROOT.glob("docs/*")], ids=named)
def test_documents(path):
    assert not habits(path.read_text(encoding="utf-8"))


def test_public_docstrings():
    found = {
        f"{named(path)}: {habit}"
        for path in sorted((ROOT / "gpukit").rglob("*.py"))
        for text in docstrings(path)
        for habit in habits(text)
    }
    assert not found


def test_what_is_left_of_the_first_edition_exists():
    assert {path.stem for path in ROOT.glob("exercises/*.py")} >= FIRST_EDITION
