"""Boxes, lines and words on a board of pixels, drawn twice from one list: as SVG, live and in the page's own colors, and
as the still picture that a saved notebook keeps.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpukit.widgets import style

WIDTH = 800  # pixels, as wide as the page's text
INK, LINE = "ink", "line"  # what is written and the thin lines: dark on a light page, light on a dark one
DARK, LIGHT = "#262626", "#FFFFFF"  # on a coloured box, whatever the page
_LIVE = {INK: "var(--jp-content-font-color1, #262626)", LINE: "var(--jp-border-color1, #bdbdbd)"}
_STILL = {INK: style.INK, LINE: "#BDBDBD"}
_ANCHOR = {"left": "start", "center": "middle", "right": "end"}
_POINTS_PER_PIXEL = 0.72
_DASH, _STRIPE, _STRIPES_APART = (6, 4), 1.5, 6


@dataclass(frozen=True)
class Box:
    """A rectangle, with `text` in its middle and `title` for the mouse."""

    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    opacity: float = 1.0  # of the fill
    edge: str = "none"
    edge_width: float = 1.0
    dashed: bool = False
    hatch: str = "none"  # stripes of this colour, so that no meaning hangs on colour alone
    text: str = ""
    size: float = 11
    ink: str = INK
    bold: bool = False
    title: str = ""


@dataclass(frozen=True)
class Line:
    points: tuple[tuple[float, float], ...]
    colour: str = LINE
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    radius: float
    fill: str = "none"
    edge: str = "none"
    title: str = ""


@dataclass(frozen=True)
class Words:
    x: float
    y: float  # of the middle of the line
    text: str
    anchor: str = "left"
    size: float = 12
    colour: str = INK
    bold: bool = False
    code: bool = False  # all letters equally wide, blanks kept


Shape = Box | Line | Dot | Words


@dataclass(frozen=True)
class Drawing:
    """Shapes on a board of `width` x `height` pixels; what comes later lies on top. `words` say what it shows, for those who
    cannot see it."""

    shapes: Sequence[Shape]
    height: float
    words: str
    width: float = WIDTH


def svg(drawing: Drawing) -> str:
    """The drawing as SVG: as wide as the cell at most, if it is not wider than a board. Without words it is no picture, and
    what is written in it is read as text."""
    said = f'role="img" aria-label="{html.escape(drawing.words)}" ' if drawing.words else ""
    width = f"{'width:100%;max-width' if drawing.width <= WIDTH else 'width'}:{drawing.width:g}px"
    parts = "".join(map(_svg, drawing.shapes))
    return (
        f'<svg viewBox="0 0 {drawing.width:g} {drawing.height:g}" {said}style="{width};display:block" '
        f'font-family="var(--jp-ui-font-family, sans-serif)">{parts}</svg>'
    )


def _svg(shape: Shape) -> str:
    match shape:
        case Box():
            paint = f'fill="{_live(shape.fill)}" fill-opacity="{shape.opacity:g}"'
            if shape.edge != "none":
                dash = f";stroke-dasharray:{_DASH[0]} {_DASH[1]}" if shape.dashed else ""
                paint += f' style="stroke:{_live(shape.edge)};stroke-width:{shape.edge_width:g}{dash}"'
            title = f"<title>{html.escape(shape.title)}</title>" if shape.title else ""
            where = f'x="{shape.x:.4g}" y="{shape.y:.4g}" width="{shape.width:.4g}" height="{shape.height:.4g}"'
            words = _svg(_inside(shape)) if shape.text else ""
            stripes = "".join(f"M{a:.4g} {b:.4g}L{c:.4g} {d:.4g}" for (a, b), (c, d) in _stripes(shape))
            look = f'd="{stripes}" style="stroke:{_live(shape.hatch)};stroke-width:{_STRIPE};pointer-events:none"'
            return f"<rect {where} {paint}>{title}</rect>{f'<path {look}/>' if stripes else ''}{words}"
        case Line():
            points = " ".join(f"{x:.4g},{y:.4g}" for x, y in shape.points)
            dash = f";stroke-dasharray:{_DASH[0]} {_DASH[1]}" if shape.dashed else ""
            look = f"fill:none;stroke:{_live(shape.colour)};stroke-width:{shape.width:g}{dash}"
            return f'<polyline points="{points}" style="{look}"/>'
        case Dot():
            look = f"fill:{_live(shape.fill)};stroke:{_live(shape.edge)};stroke-width:2"
            title = f"<title>{html.escape(shape.title)}</title>" if shape.title else ""
            return f'<circle cx="{shape.x:.4g}" cy="{shape.y:.4g}" r="{shape.radius:g}" style="{look}">{title}</circle>'
        case Words():
            look = f"fill:{_live(shape.colour)};font-size:{shape.size:g}px" + (";font-weight:700" if shape.bold else "")
            look += ";white-space:pre;font-family:var(--jp-code-font-family, monospace)" if shape.code else ""
            where = f'x="{shape.x:.4g}" y="{shape.y:.4g}" text-anchor="{_ANCHOR[shape.anchor]}"'
            return f'<text {where} dominant-baseline="central" style="{look}">{html.escape(shape.text)}</text>'


def still(drawing: Drawing) -> style.Picture:
    """The drawing as a `Picture`."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Rectangle

    width, height = drawing.width, drawing.height
    scale = min(WIDTH / width, 1)
    point = _POINTS_PER_PIXEL * scale
    fig, ax = style.figure(width=scale * width / 100, height=scale * height / 100)
    fig.set_layout_engine("none")  # a pixel of the board is a pixel of the figure
    ax.set_position((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    for order, shape in enumerate(drawing.shapes, start=1):  # what comes later lies on top
        match shape:
            case Box():
                at = (shape.x, shape.y), shape.width, shape.height
                if shape.fill != "none":
                    paint = {"facecolor": _still(shape.fill), "alpha": shape.opacity, "edgecolor": "none"}
                    ax.add_patch(Rectangle(*at, **paint, zorder=order))
                if stripes := _stripes(shape):
                    lines = {"colors": _still(shape.hatch), "linewidths": _STRIPE * point}
                    ax.add_collection(LineCollection(stripes, **lines, zorder=order), autolim=False)
                if shape.edge != "none":
                    lw, ls = shape.edge_width * point, "--" if shape.dashed else "-"
                    edge = {"facecolor": "none", "edgecolor": _still(shape.edge), "lw": lw, "ls": ls}
                    ax.add_patch(Rectangle(*at, **edge, zorder=order))
                if shape.text:
                    _write(ax, _inside(shape), order, point)
            case Line():
                lw, ls = shape.width * point, "--" if shape.dashed else "-"
                ax.plot(*zip(*shape.points, strict=True), color=_still(shape.colour), lw=lw, ls=ls, zorder=order)
            case Dot():
                mark = {"ms": 2 * shape.radius * point, "mew": 2 * point}
                ink = {"mfc": _still(shape.fill), "mec": _still(shape.edge)}
                ax.plot([shape.x], [shape.y], "o", **mark, **ink, zorder=order)
            case Words():
                _write(ax, shape, order, point)
    return style.picture(fig, alt=drawing.words)


def _write(ax, words: Words, order: int, point: float) -> None:
    look = {"size": words.size * point, "color": _still(words.colour)}
    look |= {"weight": "bold"} if words.bold else {}
    look |= {"family": "DejaVu Sans Mono"} if words.code else {}
    ax.text(words.x, words.y, words.text, ha=words.anchor, va="center", **look, zorder=order)


def _stripes(box: Box) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The ends of the stripes that rise through a box; those of neighbors meet."""
    if box.hatch == "none":
        return []
    left, right, top, bottom = box.x, box.x + box.width, box.y, box.y + box.height
    first = math.ceil((left + top) / _STRIPES_APART) * _STRIPES_APART
    sums = (first + _STRIPES_APART * i for i in range(int((right + bottom - first) // _STRIPES_APART) + 1))
    return [((max(left, s - bottom), min(bottom, s - left)), (min(right, s - top), max(top, s - right))) for s in sums]


def fits(text: str, width: float, size: float = 11) -> float:
    """The size at which a text stands inside a box of this width, `size` at most."""
    return min(size, 1.3 * width / max(len(text), 1))


def paragraph(text: str, y: float, **look: Any) -> tuple[list[Shape], float]:
    """Words in lines as long as the board is wide, the first one at `y`; and where the next one would stand."""
    lines = textwrap.wrap(text, 120)
    return [Words(10, y + 18 * i, line, **look) for i, line in enumerate(lines)], y + 18 * len(lines)


def _inside(box: Box) -> Words:
    middle = box.x + box.width / 2, box.y + box.height / 2
    return Words(*middle, box.text, "center", box.size, box.ink, box.bold)


def _live(colour: str) -> str:
    return _LIVE.get(colour, colour)


def _still(colour: str) -> str:
    return _STILL.get(colour, colour)


# ---- words above, a row of keys below ---------------------------------------------------------------------------------------------------


def heading(head: str, *lines: str) -> list[Shape]:
    """What a board says first, and smaller what follows."""
    return [Words(10, 16, head, size=13, bold=True), *(Words(10, 38 + 18 * i, line) for i, line in enumerate(lines))]


def legend(entries: Sequence[tuple[Box, str]], x: float, y: float, width: float) -> tuple[list[Shape], float]:
    """Each box, 16 pixels wide if not by itself, with its words beside it, in lines at most `width` long; and where they
    end."""
    shapes: list[Shape] = []
    at, line = x, y
    for box, text in entries:
        wide = box.width or 16
        needs = wide + 14 + 7.3 * len(text)
        if at > x and at + needs > x + width:
            at, line = x, line + 22
        shapes.append(replace(box, x=at, y=line - 8, width=wide, height=16, size=10))
        shapes.append(Words(at + wide + 6, line, text))
        at += needs + 12
    return shapes, line + 16
