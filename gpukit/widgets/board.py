"""Boxes, lines and words on a board of pixels, drawn twice from one list: as SVG, live and in the page's own colours, and
as the still picture that a saved notebook keeps.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from gpukit.widgets import style

INK, LINE = "ink", "line"  # what is written and the thin lines: dark on a light page, light on a dark one
DARK, LIGHT = "#262626", "#FFFFFF"  # on a coloured box, whatever the page
_LIVE = {INK: "var(--jp-content-font-color1, #262626)", LINE: "var(--jp-border-color1, #bdbdbd)"}
_STILL = {INK: style.INK, LINE: "#BDBDBD"}
_ANCHOR = {"left": "start", "center": "middle", "right": "end"}
_POINTS_PER_PIXEL = 0.72


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


Shape = Box | Line | Dot | Words


def svg(shapes: Sequence[Shape], width: float, height: float, alt: str) -> str:
    """The board as SVG, never wider than the cell, with `alt` for those who cannot see it."""
    parts = "".join(map(_svg, shapes))
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="width:100%;max-width:{width:g}px;display:block" role="img" '
        f'aria-label="{html.escape(alt)}" font-family="var(--jp-ui-font-family, sans-serif)">{parts}</svg>'
    )


def _svg(shape: Shape) -> str:
    match shape:
        case Box():
            paint = f'fill="{_live(shape.fill)}" fill-opacity="{shape.opacity:g}"'
            if shape.edge != "none":
                paint += f' style="stroke:{_live(shape.edge)};stroke-width:{shape.edge_width:g}"'
            title = f"<title>{html.escape(shape.title)}</title>" if shape.title else ""
            where = f'x="{shape.x:.4g}" y="{shape.y:.4g}" width="{shape.width:.4g}" height="{shape.height:.4g}"'
            words = _svg(_inside(shape)) if shape.text else ""
            return f"<rect {where} {paint}>{title}</rect>{words}"
        case Line():
            points = " ".join(f"{x:.4g},{y:.4g}" for x, y in shape.points)
            dash = ";stroke-dasharray:6 4" if shape.dashed else ""
            look = f"fill:none;stroke:{_live(shape.colour)};stroke-width:{shape.width:g}{dash}"
            return f'<polyline points="{points}" style="{look}"/>'
        case Dot():
            look = f"fill:{_live(shape.fill)};stroke:{_live(shape.edge)};stroke-width:2"
            title = f"<title>{html.escape(shape.title)}</title>" if shape.title else ""
            return f'<circle cx="{shape.x:.4g}" cy="{shape.y:.4g}" r="{shape.radius:g}" style="{look}">{title}</circle>'
        case Words():
            look = f"fill:{_live(shape.colour)};font-size:{shape.size:g}px" + (";font-weight:700" if shape.bold else "")
            where = f'x="{shape.x:.4g}" y="{shape.y:.4g}" text-anchor="{_ANCHOR[shape.anchor]}"'
            return f'<text {where} dominant-baseline="central" style="{look}">{html.escape(shape.text)}</text>'


def still(shapes: Sequence[Shape], width: float, height: float, alt: str) -> style.Picture:
    """The board as a `Picture`."""
    from matplotlib.patches import Rectangle

    fig, ax = style.figure(width=width / 100, height=height / 100)
    fig.set_layout_engine("none")  # a pixel of the board is a pixel of the figure
    ax.set_position((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    for order, shape in enumerate(shapes, start=1):  # what comes later lies on top
        match shape:
            case Box():
                at = (shape.x, shape.y), shape.width, shape.height
                if shape.fill != "none":
                    paint = {"facecolor": _still(shape.fill), "alpha": shape.opacity, "edgecolor": "none"}
                    ax.add_patch(Rectangle(*at, **paint, zorder=order))
                if shape.edge != "none":
                    lw = shape.edge_width * _POINTS_PER_PIXEL
                    ax.add_patch(Rectangle(*at, facecolor="none", edgecolor=_still(shape.edge), lw=lw, zorder=order))
                if shape.text:
                    _write(ax, _inside(shape), order)
            case Line():
                ax.plot(
                    *zip(*shape.points, strict=True),
                    color=_still(shape.colour),
                    lw=shape.width * _POINTS_PER_PIXEL,
                    ls="--" if shape.dashed else "-",
                    zorder=order,
                )
            case Dot():
                side = 2 * shape.radius * _POINTS_PER_PIXEL
                ax.plot(
                    [shape.x],
                    [shape.y],
                    "o",
                    ms=side,
                    mfc=_still(shape.fill),
                    mec=_still(shape.edge),
                    mew=2 * _POINTS_PER_PIXEL,
                    zorder=order,
                )
            case Words():
                _write(ax, shape, order)
    return style.picture(fig, alt=alt)


def _write(ax, words: Words, order: int) -> None:
    ax.text(
        words.x,
        words.y,
        words.text,
        ha=words.anchor,
        va="center",
        size=words.size * _POINTS_PER_PIXEL,
        color=_still(words.colour),
        weight="bold" if words.bold else "normal",
        zorder=order,
    )


def _inside(box: Box) -> Words:
    middle = box.x + box.width / 2, box.y + box.height / 2
    return Words(*middle, box.text, "center", box.size, box.ink, box.bold)


def _live(colour: str) -> str:
    return _LIVE.get(colour, colour)


def _still(colour: str) -> str:
    return _STILL.get(colour, colour)


# ---- a row of keys ---------------------------------------------------------------------------------------------------


def legend(entries: Sequence[tuple[Box, str]], x: float, y: float, width: float) -> tuple[list[Shape], float]:
    """Each box, made 16 pixels wide, with its words beside it, in lines at most `width` long; and where they end."""
    shapes: list[Shape] = []
    at, line = x, y
    for box, text in entries:
        needs = 30 + 7.3 * len(text)
        if at > x and at + needs > x + width:
            at, line = x, line + 22
        shapes.append(
            Box(at, line - 8, 16, 16, box.fill, box.opacity, box.edge, box.edge_width, box.text, 10, box.ink, box.bold)
        )
        shapes.append(Words(at + 22, line, text))
        at += needs + 12
    return shapes, line + 16
