"""Boxes, arrows and words on an empty canvas: what the diagrams of the lessons are drawn with.

    with diagram.canvas(10, 4) as ax:
        diagram.box(ax, 0, 1, 3, 1, "HBM", style.READS)
        diagram.arrow(ax, (3, 1.5), (5, 1.5), "32 bytes")
    diagram.picture(ax, alt="HBM sends 32 bytes to the chip.")

A unit is half an inch, x runs to the right and y downwards, so that a diagram is laid out as text is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpukit.widgets import style
from gpukit.widgets.style import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALE = "#E8E8E8"  # a box without a meaning of its own
_DARK_INK = (PALE, "none", "white", style.NEUTRAL, style.WASTE, style.PEER)  # on these dark text is read more easily


@contextmanager
def canvas(width: float, height: float) -> Iterator[Axes]:
    """An empty canvas of width x height units (at most 20 wide: a page's width), in the course's style."""
    if not 0 < width <= 20:
        raise ValueError(f"canvas: width must be more than 0 and at most 20 units, got {width}")
    with style.use():
        _, ax = style.figure(width=width / 2, height=height / 2)
        ax.set_xlim(0, width)
        ax.set_ylim(height, 0)
        ax.axis("off")
        yield ax


def box(
    ax: Axes, x: float, y: float, width: float, height: float, words: str = "", colour: str = PALE,
    *, size: float = 10, bold: bool = False, dashed: bool = False, alpha: float = 1.0,
) -> None:  # fmt: skip
    """A box whose upper left corner is (x, y), with words in its middle. colour "none": an outline alone."""
    from matplotlib.patches import FancyBboxPatch

    edge = style.INK if colour == "none" or dashed else "none"
    ax.add_patch(
        FancyBboxPatch(
            (x + 0.06, y + 0.06), width - 0.12, height - 0.12, boxstyle="round,pad=0,rounding_size=0.08", facecolor=colour,
            edgecolor=edge, linewidth=1.2, linestyle="--" if dashed else "-", alpha=alpha,
        )
    )  # fmt: skip
    ink = style.INK if colour in _DARK_INK or alpha < 0.6 else "white"
    text(ax, x + width / 2, y + height / 2, words, color=ink, size=size, bold=bold)


def text(
    ax: Axes, x: float, y: float, words: str, *, size: float = 10, bold: bool = False, align: str = "center",
    color: str = style.INK, code: bool = False,
) -> None:  # fmt: skip
    """Words at (x, y), their middle there or, by align, their "left" or "right" end."""
    look = {"family": "monospace"} if code else {}
    weight = "bold" if bold else "normal"
    ax.text(x, y, words, ha=align, va="center", color=color, fontsize=size, fontweight=weight, **look)


def arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], words: str = "", colour: str = style.INK,
    *, width: float = 2, size: float = 9, both: bool = False,
) -> None:  # fmt: skip
    """An arrow, with words above its middle."""
    look = {"arrowstyle": "<|-|>" if both else "-|>", "lw": width, "color": colour, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=look)
    if words:
        middle, across = ((a + b) / 2 for a, b in zip(start, end, strict=True))
        upright = abs(end[0] - start[0]) < abs(end[1] - start[1])
        place = (middle + 0.15, across) if upright else (middle, across - 0.28)
        text(ax, *place, words, size=size, color=colour, align="left" if upright else "center")


def picture(ax: Axes, *, alt: str) -> Picture:
    """The diagram as a Picture; alt says in one or two sentences what it shows, numbers included."""
    return style.picture(ax.figure, alt=alt)
