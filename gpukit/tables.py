"""Text in columns: the one place where cells are aligned. The code that makes a cell decides what its number looks like."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Sequence

WIDEST = 112  # letters of a printed line in a notebook's page


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), rules: Iterable[int] = ()) -> list[str]:
    """One line for each row, two spaces between columns, no spaces at the end.

    right   the columns that are aligned to the right; the others are to the left
    rules   the rows above which a rule is drawn, as long as the first line; -1 is the last row

    Raises ValueError for rows of different lengths.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    lines = [line.rstrip() for line in lines]
    rule = "-" * len(lines[0]) if lines else ""
    for row in sorted((row % len(lines) for row in rules), reverse=True):
        lines.insert(row, rule)
    return lines


def facts(pairs: Iterable[tuple[str, str]], width: int = 18) -> list[str]:
    """One line for each (title, text); all texts begin `width` characters from the left, so that several lists line up.
    Where a line would be wider than a notebook, each of its parts between semicolons has a line of its own."""
    lines = []
    for title, text in pairs:
        fold = ";\n" + " " * width
        lines.append(title.ljust(width) + (text if width + len(text) <= WIDEST else text.replace("; ", fold)))
    return lines


def folded(text: str) -> str:
    """`text` with its lines broken between words where the terminal is narrower; what follows stands under the last column of
    its line. Where no terminal shows it (a pipe, a file) it stays as it is. Lines of a table of numbers are not for this."""
    columns = shutil.get_terminal_size((0, 0)).columns
    return "\n".join(_folded(line, columns) for line in text.split("\n")) if columns else text


def _folded(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    column = max((gap.end() for gap in re.finditer("^ +|(?<=\\S)  +", line)), default=0)
    indent = " " * min(column, columns // 2)
    parts = textwrap.wrap(
        line, max(columns, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(parts)


def narrowed(rows: Sequence[Sequence[str]]) -> list[str]:
    """`rows`, aligned, without the last columns that a terminal has no room for."""
    columns = shutil.get_terminal_size((0, 0)).columns
    lines = aligned(rows)
    while columns and max(map(len, lines)) > columns and len(rows[0]) > 2:
        rows = [row[:-1] for row in rows]
        lines = aligned(rows)
    return lines
