"""Habits of the course's first edition, and what is written in their place: of notebooks, stubs, checks' texts and documents."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HABITS = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bwho(so)?ever\b": "the reader, you, or the thing that acts",
    r"\bheld against\b": "checked against",
    r"\bsay before (you )?run": "predict",
    r"[«»]": '"..." or code',
    r"(?<!\w)one must\b|(?<!\w)one can\b|(?<!\w)one has\b": "you",
    r"\b(is|are|was) that of\b": "name the thing again",
    r"\d us\b|\u03bcs\b": "µs",
    r"(?<=\d) %": "%, without a space",
    r"\bKB\b": "kB (1,000 bytes) or KiB (1,024)",
    r"\bFLOPs?/byte|(?<!1 )\bFLOP per byte": "FLOPs per byte",
    r"\b[GT]B per second\b": "GB/s",
    r"\b[GTP]FLOPS\b": "TFLOP/s",
    r"\b(us|ns|ms|bytes|FLOPs|GB|tokens|times) a (launch|second|weight|parameter|element|program|step|token|call|row)\b": "per",
    r"\bcolour": "color",
    r"\bneighbour": "neighbor",
    r"\bnormalis": "normaliz",
    r"\bbehaviour": "behavior",
}


def habits(text: str) -> list[str]:
    """What of HABITS is in a text of prose, outside code and addresses."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return [f"{match[0]!r}: {better}" for habit, better in HABITS.items() for match in re.finditer(habit, text)]


def docstrings(path: Path) -> Iterator[str]:
    """Of a module and what it offers to others; names that its code has are left out of them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {word for node in ast.walk(tree) for word in _names(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and not getattr(node, "name", "").startswith(
            "_"
        ):
            yield re.sub(r"\w+", lambda word: "" if word[0] in names else word[0], ast.get_docstring(node) or "")


def _names(node: ast.AST) -> Iterator[str]:
    for name in ("id", "attr", "arg", "name"):
        if isinstance(value := getattr(node, name, None), str):
            yield value
