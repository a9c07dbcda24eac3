"""The look of the course: colors with a fixed meaning, one matplotlib style, tables. Rows go in, pictures come out.

    from gpukit.widgets import style

    with style.use():
        fig, ax = style.figure()
        ax.barh(["naive", "fused"], [61.0, 24.4], color=style.READS)
        style.axes(ax, x="traffic (MiB)")
        style.label(ax, 24.4, 1, "24.4 MiB")
    style.show(fig, alt="Naive softmax moves 61.0 MiB, fused 24.4 MiB.")

Colors: Okabe and Ito 2008, https://jfly.uni-koeln.de/color/ (told apart with every common color blindness).
"""

from __future__ import annotations

import base64
import html
import io
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpukit import tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

READS = "#0072B2"  # blue: bytes read from memory
WRITES = "#D55E00"  # vermillion: bytes written to memory
COMPUTE = "#009E73"  # green: floating-point work, a passed check
WASTE = "#E69F00"  # orange: bytes or lanes paid for and not used, padding
BOUND = "#6E6E6E"  # dark grey: what the hardware allows; drawn as a dashed line
YOURS = "#CC79A7"  # purple: the learner's own
PEER = "#56B4E9"  # sky blue: what it is compared with, PyTorch for instance
NEUTRAL = "#B3B3B3"  # light grey: anything without a meaning of its own

COLOURS = {
    "reads": READS,
    "writes": WRITES,
    "compute": COMPUTE,
    "waste": WASTE,
    "bound": BOUND,
    "yours": YOURS,
    "peer": PEER,
    "neutral": NEUTRAL,
}

INK = "#262626"
CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # bbox of a text: the card's white, so no line crosses it
MAX_PNG_BYTES = 100_000
_DPI = 100  # of the shown size; the file holds twice as many pixels, for screens that can show them

_RC = {
    "figure.dpi": _DPI,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "grid.color": "#E2E2E2",
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "legend.frameon": False,
    **{key: INK for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")},
}


@contextmanager
def use() -> Iterator[None]:
    """Draw in the course's style inside the block: `with style.use():`. Nothing stays switched on after it."""
    import matplotlib
    from cycler import cycler

    cycle = cycler(color=[YOURS, PEER, COMPUTE, WASTE, READS, WRITES, BOUND])
    with matplotlib.rc_context({**_RC, "axes.prop_cycle": cycle}):
        yield


def figure(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float | None = None, **subplots: Any):
    """A figure twice as wide as high (inches, at 100 pixels each) and its axes, as `plt.subplots` returns them.

    It is not registered with pyplot, so a cell shows it once, through `show`, and nothing is left open.
    """
    from matplotlib.figure import Figure

    with use():
        fig = Figure((width, width / 2 if height is None else height), layout="constrained", facecolor="none")
        _card(fig)
        return fig, fig.subplots(rows, columns, **subplots)


def _card(fig: Figure) -> None:
    """A white card with round corners behind the figure: the page itself on a light theme, a card on a dark one."""
    from matplotlib.patches import FancyBboxPatch

    width, height = fig.get_size_inches()
    radius = 0.12
    box = FancyBboxPatch(
        (radius, radius),
        width - 2 * radius,
        height - 2 * radius,
        boxstyle=f"round,pad={radius},rounding_size={radius}",
        transform=fig.dpi_scale_trans,
        facecolor="white",
        edgecolor="none",
        zorder=-10,
    )
    box.set_in_layout(False)
    fig.add_artist(box)
    fig.get_layout_engine().set(w_pad=0.12, h_pad=0.12)


def axes(ax: Axes, *, x: str = "", y: str = "", log: str = "", grid: str = "", whole: str = "") -> None:
    """Label the axes: `x` and `y` are "quantity (unit)". `log`, `grid` and `whole` name axes: "", "x", "y" or "xy".

    Ticks are written as text and tables have them, 1,500 and not 1500; on an axis of `whole` numbers without fractions.
    """
    from matplotlib.ticker import ScalarFormatter

    for name, text in (("x", x), ("y", y)):
        axis = getattr(ax, f"{name}axis")
        if name in log:
            getattr(ax, f"set_{name}scale")("log")
            text = text[:-1] + ", log scale)" if text.endswith(")") else f"{text} (log scale)"
        if text:
            getattr(ax, f"set_{name}label")(text)
        if name in grid:
            ax.grid(axis=name)
        if name in whole:
            axis.set_major_formatter("{x:,.0f}")
        elif type(axis.get_major_formatter()) is ScalarFormatter:  # no names, and no scale of its own
            axis.set_major_formatter(_thousands())


def _thousands():
    """Matplotlib's own formatter for a linear axis, with commas: it still chooses how many digits the ticks need."""
    from matplotlib.ticker import ScalarFormatter

    class Thousands(ScalarFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            text = super().__call__(x, pos)
            digits = re.search(r"\d+", text)
            return text.replace(digits[0], f"{int(digits[0]):,}", 1) if digits else text

    return Thousands()


def label(ax: Axes, x: float, y: float, text: str, *, dx: float = 6, dy: float = 0, **style: Any):
    """Write `text` beside the point (x, y), `dx` and `dy` points away: a direct label in place of a legend."""
    align = {"ha": "left" if dx >= 0 else "right", "va": "center" if dy == 0 else "bottom" if dy > 0 else "top"}
    options = {"color": INK, "annotation_clip": False, **align, **style}
    return ax.annotate(text, (x, y), (dx, dy), textcoords="offset points", **options)


def names(ax: Axes, ends: Sequence[tuple[tuple[float, float], str]], **style: Any) -> None:
    """Write each line's name beside its end, (point, name), as high as it lies but never two on each other, with a dot of the
    line's color before it. Call it last: it needs the lines and the limits of the axes."""
    points_high = 0.72 * 72 * ax.figure.get_size_inches()[1] / ax.get_subplotspec().get_gridspec().nrows
    to_share = ax.transScale + ax.transLimits
    above = math.inf
    for point, name in sorted(ends, key=lambda end: -end[0][1]):
        height = to_share.transform(point)[1]
        place = min(height, above - 13 / points_high)
        beside = {"dy": (place - height) * points_high, "va": "center", **style}
        colors = [line.get_color() for line in ax.lines if _ends_at(line, point)]
        for color in colors[:1]:
            label(ax, *point, "\N{BLACK CIRCLE}", dx=8, **{**beside, "color": color})
        label(ax, *point, name, dx=20 if colors else 8, **beside)
        above = place


def _ends_at(line: Line2D, point: tuple[float, float]) -> bool:
    """Whether the last point of a line is `point`, or lies above it, outside of the axes."""
    x, y = line.get_xydata()[-1]
    return x == point[0] and (y == point[1] or y > point[1] == line.axes.get_ylim()[1])


def png(fig: Figure) -> bytes:
    """The figure as a PNG, the same bytes for the same figure. Raises ValueError where it takes more than 100 kB."""
    with use():
        for dpi in (2 * _DPI, 1.5 * _DPI, _DPI):
            buffer = io.BytesIO()
            fig.savefig(buffer, format="png", dpi=dpi, pil_kwargs={"compress_level": 0})  # only to be read below
            data = _with_palette(buffer)
            if len(data) <= MAX_PNG_BYTES:
                return data
    raise ValueError(
        f"png: the figure takes {len(data):,} bytes, at most {MAX_PNG_BYTES:,} are allowed; draw fewer points"
    )


def _with_palette(png: io.BytesIO) -> bytes:
    """The picture in 256 colors, which a chart does not exceed, in a third of the bytes and without metadata."""
    from PIL import Image

    image = Image.open(png).convert("RGBA").quantize(256, method=Image.Quantize.FASTOCTREE)
    palette = image.getpalette("RGBA")
    for i in range(0, len(palette), 4):
        if min(palette[i : i + 4]) >= 250 or palette[i + 3] <= 5:
            # Quantizing greys the card's white a little, and leaves a trace of colour around it.
            palette[i : i + 4] = [255, 255, 255, 255 if palette[i + 3] > 5 else 0]
    image.putpalette(palette, "RGBA")
    buffer = io.BytesIO()
    image.save(buffer, "png", optimize=True)
    return buffer.getvalue()


@dataclass(frozen=True, repr=False)
class Picture:
    """A PNG with words for those who cannot see it; they are its text form, so a saved output does not vary.

    Shown at the end of a cell or by `IPython.display.display`; `data` fits `ipywidgets.Image(value=...)`.
    """

    data: bytes
    alt: str
    width: int  # pixels on the page

    def __repr__(self) -> str:
        return self.alt

    def html(self) -> str:
        """An element for a place that holds nothing but HTML; elsewhere the picture itself is shown."""
        source = base64.b64encode(self.data).decode()
        alt = html.escape(self.alt)
        return f'<img class="gpukit-picture" width="{self.width}" alt="{alt}" src="data:image/png;base64,{source}">'

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"image/png": self.data, "text/plain": self.alt}, {"image/png": {"width": self.width, "alt": self.alt}}


def picture(fig: Figure, *, alt: str) -> Picture:
    """The figure as a `Picture`. `alt` says in one or two sentences what the figure shows, numbers included."""
    if not alt.strip():
        raise ValueError("picture: alt must say what the figure shows, got an empty text")
    return Picture(png(fig), alt, round(fig.get_size_inches()[0] * _DPI))


def show(fig: Figure, *, alt: str) -> None:
    """Display the figure in a notebook, with `alt` as its text form."""
    from IPython.display import display

    display(picture(fig, alt=alt))


# ---- tables ----------------------------------------------------------------------------------------------------------

_FIGURE_SPACE, _POINT_SPACE = "\u2007", "\u2008"  # as wide as a digit and as a point, where digits are tabular


def number(value: float, digits: int = 3) -> str:
    """A number for people: whole numbers in full, others to `digits` significant digits, thousands separated."""
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    magnitude = math.floor(math.log10(abs(value)))
    if not -5 <= magnitude < 15:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(digits - 1 - magnitude, 0)}f}"


def _without_sign_of_zero(text: str) -> str:
    """A number that was rounded to nothing but zeros says neither plus nor minus: 0.00% and not -0.00%."""
    digits = set(text) & set("0123456789")
    return text.lstrip("+-") if digits == {"0"} else text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, repr=False)
class Table:
    """Rows as a table in HTML, which takes its colors from the page's theme, and in text.

    columns  name -> unit ("" for none); the unit goes into the header
    rows     one sequence a row; numbers are written by `number` or by `formats`, text is left as it is
    formats  name -> format specification, for instance {"time": ".1f"}
    links    column name -> one address a row ("" for none), in HTML only
    whole    columns of text whose cells are never broken into lines, in HTML; columns of numbers never are
    """

    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    formats: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, Sequence[str]] = field(default_factory=dict)
    whole: Collection[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table: {len(self.columns)} columns {list(self.columns)}, got a row of {len(row)}: {row}"
                )

    def _column(self, index: int, name: str) -> tuple[bool, list[tuple[str, str]]]:
        """Whether the column holds numbers, and its cells as (text before the point, text from the point on)."""
        values = [row[index] for row in self.rows]
        cells = []
        for value in values:
            if _is_number(value):
                text = format(value, self.formats[name]) if name in self.formats else number(value)
                text = _without_sign_of_zero(text)
                whole, point, fraction = text.partition(".")
                cells.append((whole, point + fraction))
            else:
                cells.append(("" if value is None else str(value), ""))
        return any(map(_is_number, values)), cells

    def __repr__(self) -> str:
        columns, right = [], set()
        for index, (name, unit) in enumerate(self.columns.items()):
            numeric, cells = self._column(index, name)
            tail = max((len(fraction) for _, fraction in cells), default=0)
            texts = [_header(name, unit), *(whole + fraction.ljust(tail) for whole, fraction in cells)]
            texts.insert(1, "-" * max(map(len, texts)))
            columns.append(texts)
            if numeric:
                right.add(index)
        lines = tables.aligned([*zip(*columns, strict=True)], right)
        return "\n".join([self.caption, *lines] if self.caption else lines)

    def _repr_html_(self) -> str:
        columns = []
        for index, (name, unit) in enumerate(self.columns.items()):
            numeric, cells = self._column(index, name)
            tail = max((len(fraction) for _, fraction in cells), default=0)
            texts = [html.escape(whole + fraction) + _blanks(fraction, tail) for whole, fraction in cells]
            if name in self.links:
                addresses = [html.escape(address) for address in self.links[name]]
                texts = [f'<a href="{a}">{t}</a>' if a else t for t, a in zip(texts, addresses, strict=True)]
            look = f"text-align:{'right' if numeric else 'left'}"
            if numeric or name in self.whole:
                look += ";white-space:nowrap"
            if numeric:
                look += ";font-variant-numeric:tabular-nums"
            header = f'<th style="{look}">{html.escape(_header(name, unit))}</th>'
            columns.append([header, *(f'<td style="{look}">{text}</td>' for text in texts)])
        head, *body = ["<tr>" + "".join(cells) + "</tr>" for cells in zip(*columns, strict=True)]
        caption = f'<caption style="text-align:left">{html.escape(self.caption)}</caption>' if self.caption else ""
        return f"<table>{caption}<thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"


def _header(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


def _blanks(fraction: str, tail: int) -> str:
    """Blanks as wide as the digits that `fraction` lacks, so that the points of a column stand in one line."""
    missing = tail - len(fraction)
    return _FIGURE_SPACE * missing if fraction or not missing else _POINT_SPACE + _FIGURE_SPACE * (missing - 1)


def table(columns: Mapping[str, str], rows: Sequence[Sequence[Any]], **options: Any) -> Table:
    """A `Table`, for a cell's last line: `style.table({"name": "", "time": "µs"}, [("torch", 58.2)])`."""
    return Table(columns, [tuple(row) for row in rows], **options)
