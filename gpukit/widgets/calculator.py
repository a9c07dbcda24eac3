"""What the calculators share: fields that are traits, an answer in words where nothing can be drawn, and stacked bars.

A calculator is a subclass with one trait for each field and `answer`, which makes the picture of their values. What cannot
be calculated is said in words on the board: the argument and the rule, as the calculator in gpukit.accounting says it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ipywidgets as widgets

from gpukit.widgets import board, style
from gpukit.widgets.board import WIDTH, Box, Drawing, Line, Shape, Words
from gpukit.widgets.view import View


class Calculator(View):
    """`fields`: trait -> control."""

    title = "calculator"

    def __init__(self, fields: Mapping[str, widgets.Widget], **start: str):
        self.answer(**start)  # what cannot be calculated at first is the caller's mistake
        super().__init__(fields, start)

    def answer(self, **values: str) -> Drawing:
        """The picture of the fields' values. Raises ValueError naming the argument and the rule."""
        raise NotImplementedError

    def drawing(self, **values: str) -> Drawing:
        try:
            return self.answer(**values)
        except ValueError as error:
            text = str(error)
            lines = textwrap.wrap(text, 110)[:4]
            box = Box(6, 6, WIDTH - 12, 24 + 18 * len(lines), edge=style.WASTE, edge_width=2)
            words = [Words(18, 26 + 18 * i, line) for i, line in enumerate(lines)]
            return Drawing([box, *words], 44 + 18 * len(lines), text)


# ---- stacked bars ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """parts: (name, value, colour), from left to right; `now` marks the one that the fields describe."""

    label: str
    parts: Sequence[tuple[str, float, str]]
    text: str = ""
    now: bool = False

    @property
    def total(self) -> float:
        return sum(value for _, value, _ in self.parts)


def bars(
    rows: Sequence[Bar], top: float, *, most: float, left: float = 120, unit=str, bound: float | None = None,
    bound_text: str = "",
) -> tuple[list[Shape], float]:  # fmt: skip
    """The bars from `top` down, on an axis from 0 to `most`; what is longer is cut and its text says how long. `unit` makes
    text of a value, for the mouse. A dashed line at `bound`. Returns the shapes and where they end."""
    right, high, gap = WIDTH - 125, 24, 7
    scale = (right - left) / most
    shapes: list[Shape] = []
    y = top + (18 if bound is not None else 0)
    first = y
    for row in rows:
        x = left
        shapes.append(Words(left - 8, y + high / 2, row.label, "right", bold=row.now))
        for name, value, colour in row.parts:
            wide = min(value * scale, right - x)
            if wide <= 0:
                continue
            title = f"{name}: {unit(value)}"
            label = name if row.now and wide > 8 + 6.4 * len(name) else ""
            ink = board.DARK if colour in (style.PEER, style.WASTE, style.NEUTRAL, style.YOURS) else board.LIGHT
            shapes.append(Box(x, y, wide, high, colour, 1.0 if row.now else 0.55, text=label, ink=ink, title=title))
            x += wide
        if row.now:
            shapes.append(Box(left - 1, y - 2, x - left + 2, high + 4, edge=board.INK, edge_width=2))
        if row.total * scale > right - left + 0.5:  # a torn end
            shapes.append(Words(right - 4, y + high / 2, "»", "right", 15, bold=True))
        place = x + 7
        if bound is not None and -4 < left + bound * scale - place < 7.5 * len(row.text):
            place = left + bound * scale + 7  # not across the dashed line
        shapes.append(Words(place, y + high / 2, row.text, bold=row.now))
        y += high + gap
    if bound is not None and bound <= most:
        at = left + bound * scale
        shapes.append(Line(((at, first - 6), (at, y - 2)), style.BOUND, 2, dashed=True))
        shapes.append(Words(at, first - 15, bound_text, "center", 11))
    shapes.append(Line(((left, first - 6), (left, y - 2)), board.INK))
    return shapes, y


def number_of(n: int, one: str) -> str:
    """ "1 sequence", "8 sequences"."""
    return f"{n:,} {one if n == 1 else one + 's'}"


def keys(parts: Sequence[tuple[str, str]], top: float) -> tuple[list[Shape], float]:
    """(name, colour) as a legend."""
    return board.legend([(Box(0, 0, 0, 0, colour), name) for name, colour in parts], 10, top, WIDTH - 20)
