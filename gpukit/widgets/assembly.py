"""What a kernel became, stage by stage: choose a source line, and what it was compiled to is marked in the listing.

    from gpukit.widgets.assembly import assembly

    assembly(gpukit.compile(kernel, x, y, n, BLOCK=1024, gpu="h100"), stage="SASS", line=4)

Rows that do something worth a look carry a colored tag: loads and stores with their width, copies, shared memory, tensor
cores. The rows come from gpukit.simulator.compiler.listing; this draws them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import ipywidgets as widgets
import traitlets

from gpukit.simulator.compiler import listing
from gpukit.simulator.compiler.listing import STAGES, Row
from gpukit.widgets import board, style
from gpukit.widgets.board import WIDTH, Box, Drawing, Shape, Words
from gpukit.widgets.view import View, menu

if TYPE_CHECKING:
    from gpukit.simulator.compiler.compile import Compiled

# kind -> colour, and what its tag says
_TAGS = {
    listing.LOAD: (style.READS, "load"),
    listing.STORE: (style.WRITES, "store"),
    listing.ATOMIC: (style.WRITES, "atomic"),
    listing.COPY: (style.PEER, "copy"),
    listing.SHARED: (style.NEUTRAL, "shared"),
    listing.TENSOR: (style.COMPUTE, "tensor"),
    listing.SPECIAL: (style.COMPUTE, "special"),
    listing.SPILL: (style.WASTE, "spill"),
    listing.BARRIER: (style.BOUND, "wait"),
}
_DARK_INK = (style.PEER, style.NEUTRAL, style.WASTE)  # colours on which black is read more easily than white
_AROUND = 2  # rows shown before and after those of the chosen line
_STILL_ROWS, _STILL_COLUMNS = 24, 92
_ROW, _LEFT, _LETTER = 17, 108, 7.3  # pixels: of a row, to its text, of a letter
_CSS = "<style>.gpukit-source select {font-family: var(--jp-code-font-family, monospace); font-size: 12px}</style>"
_FRAME = "width:max-content;max-width:100%;box-sizing:border-box;max-height:36em;overflow:auto;border:1px solid var(--jp-border-color1, #bdbdbd);margin-top:6px"


class AssemblyView(View):
    """`stage` ("TTIR", "TTGIR", "PTX" or "SASS") and `line` (of the source, 0 for none) are traits. With a line chosen, rows
    that came from other lines are folded. Arrow keys move through the stages and the lines."""

    stage = traitlets.Enum(STAGES)
    line = traitlets.Int(0)

    def __init__(self, compiled: Compiled, stage: str, line: int):
        self.compiled = compiled
        lines = widgets.Select(
            options=[("(no line: the whole listing)", 0), *((_option(n, text), n) for n, text in self.source.items())],
            rows=min(len(self.source) + 1, 12),
            layout={"width": "99%", "height": "auto"},
        )
        lines.add_class("gpukit-source")
        controls = {"stage": menu("stage", STAGES, 160), "line": lines}
        super().__init__(controls, {"stage": stage, "line": line}, row=[controls["stage"]], below=[lines])

    @property
    def source(self) -> dict[int, str]:
        return self.compiled.source

    @cached_property
    def _listings(self) -> dict[str, list[Row]]:
        return {stage: listing.listing(self.compiled, stage) for stage in STAGES}

    @property
    def rows(self) -> list[Row]:
        """The stage that is shown, whole."""
        return self._listings[self.stage]

    def chosen(self) -> list[Row]:
        """Its rows that came from the chosen line."""
        return self._chosen(self.stage, self.line)

    def _chosen(self, stage: str, line: int) -> list[Row]:
        return listing.of_line(self._listings[stage], self.compiled.file, line)

    def html(self) -> str:
        """The listing in a frame of its own, which scrolls and holds text; the source is in the menu above."""
        rows, chosen = self.rows, self.chosen()
        shapes, height = self._head(self.stage, self.line)
        head = board.svg(Drawing(shapes, height, self.sentence()))
        wide = max([WIDTH, *(_LEFT + _LETTER * len(row.text) for row in rows)]) + 10
        shapes, height = _lines(_folded(rows, chosen), chosen, 10, wide)
        body = board.svg(Drawing(shapes, height, "", wide))
        return f'{_CSS}{head}<div tabindex="0" role="region" aria-label="listing" style="{_FRAME}">{body}</div>'

    def drawing(self, stage: str, line: int) -> Drawing:
        """As a page: the source, and the first rows of the listing."""
        chosen = self._chosen(stage, line)
        shapes, y = self._head(stage, line)
        y += 8
        for number, text in self.source.items():
            shapes += [_mark(y, WIDTH)] if number == line else []
            shapes.append(Words(10, y, f"{number:>3}  {text[: _STILL_COLUMNS + 10]}", code=True))
            y += _ROW
        shown = _folded(self._listings[stage], chosen)
        more: list[Row | int | str] = ["... and so on"] if len(shown) > _STILL_ROWS else []
        rows, y = _lines([*shown[:_STILL_ROWS], *more], chosen, y + 14, WIDTH, _STILL_COLUMNS)
        words = _sentence(self.compiled, stage, line, self._listings[stage])
        return Drawing([*shapes, *rows], y, words)

    def _head(self, stage: str, line: int) -> tuple[list[Shape], float]:
        """What is shown in words and, by kind, how many rows of it there are."""
        rows, chosen = self._listings[stage], self._chosen(stage, line)
        shapes, y = board.paragraph(_sentence(self.compiled, stage, line, rows), 16)
        keys = []
        for kind, (everywhere, here) in listing.counts(rows, chosen).items():
            keys.append(
                (replace(_tag(kind), width=48), f"{kind}: {f'{here} of {everywhere}' if chosen else everywhere}")
            )
        if chosen:
            keys.append((Box(0, 0, 0, 0, style.YOURS, 0.25), "from the chosen line"))
        legend, y = board.legend(keys, 10, y + 6, WIDTH - 20)
        return [*shapes, *legend], y

    def __repr__(self) -> str:
        return f"assembly viewer: {self.drawing(**self._start).words}"


def assembly(compiled: Compiled, stage: str = "PTX", line: int = 0) -> AssemblyView:
    """A viewer of one compiled kernel.

    stage   "TTIR", "TTGIR", "PTX" or "SASS"
    line    a line of the source as `compiled.source` numbers them, 0 for none
    Raises ValueError for another stage and a line that the kernel does not have.
    """
    if stage not in STAGES:
        raise ValueError(f"assembly: stage must be one of {', '.join(STAGES)}, got {stage!r}")
    if line and line not in compiled.source:
        first, last = min(compiled.source), max(compiled.source)
        raise ValueError(f"assembly: line must be 0 or a line of {compiled.kernel}, {first} to {last}, got {line}")
    return AssemblyView(compiled, stage, line)


def _option(number: int, text: str) -> str:
    indent = len(text) - len(text.lstrip())
    return f"{number:>3}".replace(" ", "\u2007") + "  " + "\u00a0" * indent + text.strip()


def _sentence(compiled: Compiled, stage: str, line: int, rows: list[Row]) -> str:
    what = "operations" if stage.startswith("TT") else "instructions"
    text = f"{compiled.kernel} for {compiled.gpu.name}, {stage}: {sum(not row.is_label for row in rows)} {what}"
    if not line:
        return f"{text}."
    chosen = listing.of_line(rows, compiled.file, line)
    kinds = Counter((row.kind, row.bits) for row in chosen if row.kind)
    parts = [f"{n} x {kind}" + (f" of {bits} bits per thread" if bits else "") for (kind, bits), n in kinds.items()]
    return f"{text}, {len(chosen)} of them from line {line}{': ' if parts else ''}{', '.join(parts)}."


def _folded(rows: list[Row], chosen: list[Row]) -> list[Row | int]:
    """The chosen rows with their neighbors; a number stands for as many rows that are left out."""
    if not chosen:
        return list(rows)
    marked = set(map(id, chosen))
    near = {
        at + step for at, row in enumerate(rows) if id(row) in marked for step in range(-_AROUND, _AROUND + 1)
    }  # fmt: skip
    found: list[Row | int] = []
    for at, row in enumerate(rows):
        if at in near:
            found.append(row)
        elif found and isinstance(found[-1], int):
            found[-1] += 1
        else:
            found.append(1)
    return found


# ---- the listing -----------------------------------------------------------------------------------------------------


def _tag(kind: str, bits: int = 0) -> Box:
    """The colored tag of a row, to be put in its place."""
    colour, word = _TAGS[kind]
    ink = board.DARK if colour in _DARK_INK else board.LIGHT
    text = f"{word} {bits}" if bits else word
    return Box(0, 0, 0, 0, colour, text=text, ink=ink, size=11, title=kind)


def _lines(
    shown: list[Row | int | str], chosen: list[Row], y: float, wide: float, columns: int | None = None
) -> tuple[list[Shape], float]:
    """Rows from `y` down, the chosen ones marked, at most `columns` letters of each; and where they end."""
    marked, shapes = set(map(id, chosen)), []
    for row in shown:
        if isinstance(row, Row):
            shapes += [_mark(y, wide)] if id(row) in marked else []
            shapes += [replace(_tag(row.kind, row.bits), x=8, y=y - 7, width=92, height=14)] if row.kind else []
            shapes.append(Words(_LEFT, y, row.text[:columns], code=True, bold=row.is_label))
        else:
            text = f"... {row} more row{'s' * (row > 1)} ..." if isinstance(row, int) else row
            shapes.append(Words(_LEFT, y, text, code=True))
        y += _ROW
    return shapes, y


def _mark(y: float, wide: float) -> Box:
    return Box(0, y - _ROW / 2, wide, _ROW, style.YOURS, 0.25)
