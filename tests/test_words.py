"""The words of the course outside its notebooks (tests/notebooks/test_second_edition.py): stubs, checks, documents, docstrings."""

import re
import tokenize
from pathlib import Path

import pytest

from tests.words import docstrings, habits

ROOT = Path(__file__).resolve().parents[1]


def files(pattern: str) -> list[Path]:
    return sorted(ROOT.glob(pattern))


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


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *ROOT.glob("design/*.md"), *ROOT.glob("docs/*.*")], ids=named)
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
