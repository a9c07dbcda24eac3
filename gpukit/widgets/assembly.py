"""What a kernel became, stage by stage: choose a source line, and what it was compiled to is marked in the listing.

    from gpukit.widgets.assembly import assembly

    assembly(gpukit.compile(kernel, x, y, n, BLOCK=1024, gpu="h100"), stage="SASS", line=4)

Rows that do something worth a look carry a coloured tag: loads and stores with their width, copies, shared memory, tensor
cores. The rows come from gpukit.simulator.compiler.listing; this draws them.
"""

from __future__ import annotations

import html
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

import ipywidgets as widgets
import traitlets

from gpukit.simulator.compiler import listing
from gpukit.simulator.compiler.listing import STAGES, Row
from gpukit.widgets import style

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
_STILL_ROWS, _STILL_COLUMNS = 24, 84


class AssemblyView(widgets.VBox):
    """`stage` ("TTIR", "TTGIR", "PTX" or "SASS") and `line` (of the source, 0 for none) are traits. With a line chosen, rows
    that came from other lines are folded. Arrow keys move through the stages and the lines; a saved notebook keeps a picture
    of what was shown first."""

    stage = traitlets.Enum(STAGES)
    line = traitlets.Int(0)

    def __init__(self, compiled: Compiled, stage: str, line: int):
        self.compiled = compiled
        self._start = (stage, line)
        caption = {"description_width": "initial"}
        self.stage_menu = widgets.Dropdown(
            options=STAGES, value=stage, description="stage", style=caption, layout={"width": "160px"}
        )
        self.reset_button = widgets.Button(description="reset", layout={"width": "70px"})
        self.line_menu = widgets.Select(
            options=[("(no line: the whole listing)", 0), *((_option(n, text), n) for n, text in self.source.items())],
            value=line,
            rows=min(len(self.source) + 1, 12),
            layout={"width": "99%", "height": "auto"},
        )
        self.line_menu.add_class("gpukit-source")
        self.view = widgets.HTML()
        top = widgets.HBox([self.stage_menu, self.reset_button], layout={"flex_flow": "row wrap"})
        super().__init__([top, self.line_menu, self.view], stage=stage, line=line)
        traitlets.link((self, "stage"), (self.stage_menu, "value"))
        traitlets.link((self, "line"), (self.line_menu, "value"))
        self.reset_button.on_click(lambda _: self.reset())
        self.observe(lambda _: self._draw(), ["stage", "line"])
        self._draw()

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
        return _chosen(self.rows, self.compiled.file, self.line)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Kind -> how many rows there are of it, and how many of them came from the chosen line."""
        return _counts(self.rows, self.chosen())

    def reset(self) -> None:
        """As it was at first."""
        self.stage, self.line = self._start

    def _draw(self) -> None:
        self.view.value = _html(self.rows, self.chosen(), self.sentence())

    def sentence(self) -> str:
        """What is shown, in words."""
        return _sentence(self.compiled, self.stage, self.line, self.rows)

    def __repr__(self) -> str:
        stage, line = self._start
        return f"assembly viewer: {_sentence(self.compiled, stage, line, self._listings[stage])}"

    def _repr_png_(self) -> tuple[bytes, dict]:  # where no kernel runs, on a repository's page for instance
        still = self.picture()
        return still.data, {"width": still.width, "alt": still.alt}

    def picture(self) -> style.Picture:
        """What was shown first as a still."""
        stage, line = self._start
        rows = self._listings[stage]
        chosen = _chosen(rows, self.compiled.file, line)
        sentence = _sentence(self.compiled, stage, line, rows)
        return _picture(rows, chosen, self.source, line, sentence)


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


def _chosen(rows: list[Row], file: str, line: int) -> list[Row]:
    return [row for row in rows if row.came_from(file, line)]


def _counts(rows: list[Row], chosen: list[Row]) -> dict[str, tuple[int, int]]:
    everywhere, here = (Counter(row.kind for row in some) for some in (rows, chosen))
    return {kind: (everywhere[kind], here[kind]) for kind in listing.KINDS if everywhere[kind]}


def _sentence(compiled: Compiled, stage: str, line: int, rows: list[Row]) -> str:
    what = "operations" if stage.startswith("TT") else "instructions"
    text = f"{compiled.kernel} for {compiled.gpu.name}, {stage}: {sum(not row.is_label for row in rows)} {what}"
    if not line:
        return f"{text}."
    chosen = _chosen(rows, compiled.file, line)
    kinds = Counter((row.kind, row.bits) for row in chosen if row.kind)
    parts = [f"{n} x {kind}" + (f" of {bits} bits a thread" if bits else "") for (kind, bits), n in kinds.items()]
    return f"{text}, {len(chosen)} of them from line {line}{': ' if parts else ''}{', '.join(parts)}."


def _folded(rows: list[Row], chosen: list[Row]) -> list[Row | int]:
    """The chosen rows with their neighbours; a number stands for as many rows that are left out."""
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


def _more(rows: int) -> str:
    return f"{rows} more row{'s' * (rows > 1)}"


def _tag(row: Row) -> tuple[str, str, str]:
    """Background, ink and text of a row's tag."""
    colour, word = _TAGS[row.kind]
    return colour, "#000" if colour in _DARK_INK else "#fff", f"{word} {row.bits}" if row.bits else word


# ---- the live view: HTML, which follows the page's theme ----------------------------------------------------------

_INK = "var(--jp-content-font-color1, #262626)"
_FAINT = "var(--jp-content-font-color2, #5f5f5f)"
_LINE = "var(--jp-border-color1, #bdbdbd)"
_MONO = "var(--jp-code-font-family, monospace)"
_STYLE = f"<style>.gpukit-source select {{font-family: {_MONO}; font-size: 12px}}</style>"
_CHIP = "display:inline-block;width:6.2em;padding:0 3px;margin-right:8px;text-align:center;border-radius:2px;"


def _html(rows: list[Row], chosen: list[Row], sentence: str) -> str:
    marked = set(map(id, chosen))
    lines = []
    for row in _folded(rows, chosen):
        if isinstance(row, int):
            lines.append(f'<div style="color:{_FAINT};padding-left:9em">... {_more(row)} ...</div>')
            continue
        chip = f'<span style="{_CHIP}">&nbsp;</span>'
        if row.kind:
            back, ink, word = _tag(row)
            chip = f'<span title="{row.kind}" style="{_CHIP}background:{back};color:{ink}">{word}</span>'
        look = f"border-left:4px solid {style.YOURS if id(row) in marked else 'transparent'};"
        look += f"background:{style.YOURS}33;" if id(row) in marked else ""
        text = html.escape(row.text)
        lines.append(f'<div style="{look}padding-left:4px">{chip}{f"<b>{text}</b>" if row.is_label else text}</div>')
    box = f"max-height:36em;overflow:auto;border:1px solid {_LINE};padding:4px 0;margin-top:6px"
    code = f"font-family:{_MONO};font-size:12px;line-height:1.45;white-space:pre;width:max-content;min-width:100%"
    return (
        f'{_STYLE}<div style="color:{_INK};line-height:1.5"><div role="status">{html.escape(sentence)}</div>'
        f'{_legend(_counts(rows, chosen), bool(chosen))}<div tabindex="0" role="region" aria-label="listing" '
        f'style="{box}"><div style="{code}">{"".join(lines)}</div></div></div>'
    )


def _legend(counts: dict[str, tuple[int, int]], line_chosen: bool) -> str:
    spans = []
    for kind, (everywhere, here) in counts.items():
        colour, word = _TAGS[kind]
        ink = "#000" if colour in _DARK_INK else "#fff"
        chip = f'<span style="background:{colour};color:{ink};padding:0 4px;border-radius:2px">{word}</span>'
        number = f"{here} of {everywhere}" if line_chosen else f"{everywhere}"
        spans.append(f'<span style="white-space:nowrap">{chip} {kind}: {number}</span>')
    if line_chosen:
        bar = f'<span style="border-left:4px solid {style.YOURS};background:{style.YOURS}33;padding:0 4px">row</span>'
        spans.append(f'<span style="white-space:nowrap">{bar} from the chosen line</span>')
    return f'<div style="display:flex;flex-wrap:wrap;gap:2px 18px;font-size:12px">{"".join(spans)}</div>'


# ---- the still ----------------------------------------------------------------------------------------------------


def _picture(rows: list[Row], chosen: list[Row], source: dict[int, str], line: int, alt: str) -> style.Picture:
    from matplotlib.patches import Rectangle

    marked = set(map(id, chosen))
    shown = _folded(rows, chosen)
    left_out = len(shown) - _STILL_ROWS
    shown = shown[:_STILL_ROWS]
    height = len(source) + len(shown) + 3.0 + (left_out > 0)
    fig, ax = style.figure(height=0.19 * height)
    ax.set_axis_off()
    ax.set(xlim=(0, 100), ylim=(height, 0))
    mono = {"family": "DejaVu Sans Mono", "size": 7.5, "va": "center"}
    ax.text(0, 0.7, alt, size=9, va="center", wrap=True)
    y = 2.2
    for number, text in source.items():
        if number == line:
            ax.add_patch(Rectangle((0, y - 0.5), 100, 1, color=style.YOURS, alpha=0.2, lw=0))
        ax.text(1, y, f"{number:>3}  {text[: _STILL_COLUMNS + 10]}", **mono)
        y += 1
    y += 0.8
    for row in shown:
        if isinstance(row, int):
            ax.text(14, y, f"... {_more(row)} ...", color=style.BOUND, **mono)
            y += 1
            continue
        if id(row) in marked:
            ax.add_patch(Rectangle((0, y - 0.5), 100, 1, color=style.YOURS, alpha=0.2, lw=0))
        if row.kind:
            back, ink, word = _tag(row)
            ax.add_patch(Rectangle((1, y - 0.42), 11, 0.84, color=back, lw=0))
            ax.text(6.5, y, word, color=ink, ha="center", **mono)
        ax.text(14, y, row.text[:_STILL_COLUMNS], **mono)
        y += 1
    if left_out > 0:
        ax.text(14, y, "... and so on", color=style.BOUND, **mono)
    return style.picture(fig, alt=alt)
