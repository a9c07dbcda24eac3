"""One instruction of a warp, lane by lane: the sectors that it moves, the banks that it asks, the lanes that it keeps busy.

    from gpukit.widgets.warp import bank_viewer, timeline, warp_viewer

    warp_viewer(element_bytes=4, stride=2)
    bank_viewer(pitch=33)
    timeline(simt.launch(kernel, x, y, grid=1, block=32, detail=True))

Both viewers draw memory as it lies, 32 cells of four bytes a row: a row is a line of global memory, or a word of each bank.
What they show is counted by the thread-level model (gpukit.simulator.simt).
"""

from __future__ import annotations

import html
import linecache
from collections.abc import Callable
from dataclasses import dataclass

import ipywidgets as widgets
import numpy as np

from gpukit.simulator import simt
from gpukit.widgets import style

CELLS = 32  # of four bytes: a line of 128, or one word of each bank
CELL_BYTES = 4
_EMPTY, _WANTED, _WASTED, _LATER = range(4)


@dataclass(frozen=True)
class Cell:
    """Four bytes: what becomes of them, and the lanes that want them, as text."""

    state: int = _EMPTY
    text: str = ""
    title: str = ""


@dataclass(frozen=True)
class Board:
    """Rows of 32 cells, each with a name; `marks` says before which columns a thick line stands; then what it all means, in a
    sentence and in a few words."""

    rows: list[tuple[str, list[Cell]]]
    columns: list[str]
    marks: range
    sentence: str
    short: str
    legend: tuple[tuple[int, str], ...]


class _Viewer(widgets.VBox):
    """Controls above a board. The saved notebook keeps the board of the values that the viewer started with."""

    def __init__(self, controls: dict[str, widgets.Widget], board: Callable[..., Board], name: str):
        self.controls, self._make = controls, board
        self._start = {key: control.value for key, control in controls.items()}
        self._text = f"{name}: {self.board().short}"
        self.reset_button = widgets.Button(description="reset", layout={"width": "6em"})
        self.view = widgets.HTML()
        row = widgets.HBox([*controls.values(), self.reset_button], layout={"flex_flow": "row wrap"})
        super().__init__([row, self.view])
        for control in controls.values():
            control.observe(lambda _: self._draw(), "value")
        self.reset_button.on_click(lambda _: self.reset())
        self._draw()

    def board(self) -> Board:
        """The board for the controls as they stand."""
        return self._make(**{key: control.value for key, control in self.controls.items()})

    def reset(self) -> None:
        """Back to the values that the viewer started with."""
        for key, value in self._start.items():
            self.controls[key].value = value

    def _draw(self) -> None:
        self.view.value = _html(self.board())

    def __repr__(self) -> str:
        return self._text

    def _repr_png_(self) -> tuple[bytes, dict]:  # where no kernel runs, on a repository's page for instance
        still = self.picture()
        return still.data, {"width": still.width, "alt": still.alt}

    def picture(self) -> style.Picture:
        """The board that the viewer started with as a still."""
        board = self._make(**self._start)
        return _picture(board, board.sentence)


def _slider(text: str, value: int, low: int, high: int) -> widgets.IntSlider:
    return widgets.IntSlider(
        value,
        low,
        high,
        description=text,
        style={"description_width": "initial"},
        layout={"width": "24em", "flex": "0 0 auto"},
    )


def _menu(text: str, value: object, options: list) -> widgets.Dropdown:
    return widgets.Dropdown(
        value=value,
        options=options,
        description=text,
        style={"description_width": "initial"},
        layout={"width": "max-content"},
    )


# ---- global memory -----------------------------------------------------------------------------------------------------


def warp_viewer(element_bytes: int = 4, stride: int = 1, offset: int = 0, lanes: int = 32) -> _Viewer:
    """Lane i of a warp loads element offset + i * stride: which sectors move, and how much of them was wanted.

    element_bytes   1, 2, 4, 8 or 16; stride: 0 to 32 elements; offset: 0 to 31 elements; lanes: how many are on, 0 to 32
    Raises ValueError for anything else.
    """
    for name, value, allowed in (
        ("element_bytes", element_bytes, (1, 2, 4, 8, 16)),
        ("stride", stride, range(33)),
        ("offset", offset, range(32)),
        ("lanes", lanes, range(33)),
    ):
        if value not in allowed:
            raise ValueError(f"warp_viewer: {name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    controls = {
        "element_bytes": _menu("element", element_bytes, [(_of(n, "byte"), n) for n in (1, 2, 4, 8, 16)]),
        "stride": _slider("stride (elements)", stride, 0, 32),
        "offset": _slider("offset (elements)", offset, 0, 31),
        "lanes": _slider("lanes on", lanes, 0, 32),
    }
    return _Viewer(controls, global_board, "warp viewer")


def global_board(element_bytes: int, stride: int, offset: int, lanes: int) -> Board:
    """The lines of global memory that one load touches."""
    addresses = (offset + np.arange(simt.WARP) * stride) * element_bytes
    active = np.arange(simt.WARP) < lanes
    sectors = int(simt.sectors(addresses, active))
    lines = int(simt.distinct(addresses, simt.LINE_BYTES, active))
    wanted: dict[int, list[int]] = {}  # cell -> lanes
    for lane in range(lanes):
        first, last = addresses[lane] // CELL_BYTES, (addresses[lane] + element_bytes - 1) // CELL_BYTES
        for cell in range(first, last + 1):
            wanted.setdefault(cell, []).append(lane)
    per_sector = simt.SECTOR_BYTES // CELL_BYTES
    moved = {cell // per_sector for cell in wanted}
    rows = []
    for line in sorted({cell // CELLS for cell in wanted}):
        cells = []
        for cell in range(line * CELLS, (line + 1) * CELLS):
            state = _WANTED if cell in wanted else _WASTED if cell // per_sector in moved else _EMPTY
            title = f"bytes {cell * CELL_BYTES} to {cell * CELL_BYTES + 3}, sector {cell // per_sector}"
            cells.append(Cell(state, _lanes(wanted.get(cell, [])), title))
        rows.append((f"line {line}", cells))
    asked = len({int(a) + byte for a in addresses[:lanes] for byte in range(element_bytes)})
    sentence = (
        f"{_of(lanes, 'lane')} on, {_of(element_bytes, 'byte')} each, stride {stride}, offset {offset}: {_of(asked, 'byte')} "
        f"wanted, {_of(sectors, 'sector')} = {_of(sectors * simt.SECTOR_BYTES, 'byte')} moved"
    )
    sentence += f" ({asked / sectors / simt.SECTOR_BYTES:.0%} of them used), {_of(lines, 'line')}" if sectors else ""
    return Board(
        rows,
        [f"+{cell * CELL_BYTES}" if cell % per_sector == 0 else "" for cell in range(CELLS)],
        range(0, CELLS, per_sector),
        sentence,
        f"{_of(lanes, 'lane')}, {_of(element_bytes, 'byte')} each, stride {stride}, offset {offset}: {_of(sectors, 'sector')}",
        ((_WANTED, "wanted by the lane with this number"), (_WASTED, "moved with its sector, wanted by nobody")),
    )


# ---- shared memory -----------------------------------------------------------------------------------------------------

PATTERNS: dict[str, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]] = {  # lanes -> (row, column) of the tile
    "a column": lambda lane: (lane, 0 * lane),
    "a row": lambda lane: (0 * lane, lane),
    "the diagonal": lambda lane: (lane, lane),
    "every second word of a row": lambda lane: (lane // 16, lane % 16 * 2),
    "one word": lambda lane: (0 * lane + 2, 0 * lane + 5),
}


def bank_viewer(pattern: str = "a column", pitch: int = 32) -> _Viewer:
    """A warp reads part of a tile of 32 x 32 words in shared memory, whose rows begin `pitch` words apart, 32 to 40.

    Raises ValueError for another pitch or a pattern that is not in PATTERNS.
    """
    if pitch not in range(32, 41) or pattern not in PATTERNS:
        raise ValueError(
            f"bank_viewer: pattern must be one of {', '.join(PATTERNS)} and pitch 32 to 40, got {pattern!r}, {pitch!r}"
        )
    controls = {
        "pattern": _menu("the warp reads", pattern, list(PATTERNS)),
        "pitch": _slider("row pitch (words)", pitch, 32, 40),
    }
    return _Viewer(controls, shared_board, "bank viewer")


def shared_board(pattern: str, pitch: int) -> Board:
    """The words of shared memory that one load touches, a column for each bank."""
    row, column = PATTERNS[pattern](np.arange(simt.WARP))
    words = row * pitch + column
    passes = int(simt.bank_passes(words * simt.BANK_BYTES))
    wanted: dict[int, list[int]] = {}
    for lane, word in enumerate(words.tolist()):
        wanted.setdefault(word, []).append(lane)
    turns: dict[int, int] = {}  # bank -> words handed out
    rows: dict[int, list[Cell]] = {word // CELLS: [Cell()] * CELLS for word in wanted}
    for word in sorted(wanted):
        bank = word % simt.BANKS
        turns[bank] = turns.get(bank, 0) + 1
        title = f"word {word}, bank {bank}: handed out in pass {turns[bank]}"
        state = _WANTED if turns[bank] == 1 else _LATER
        rows[word // CELLS][bank] = Cell(state, _lanes(wanted[word]), title)
    used = len(turns)
    sentence = (
        f"a warp reads {pattern} of a tile with rows {pitch} words apart: {_of(len(wanted), 'word')} in {_of(used, 'bank')}, "
        f"{_of(passes, 'pass', 'passes')}"
    )
    return Board(
        [(f"word {CELLS * number}", cells) for number, cells in sorted(rows.items())],
        [str(bank) for bank in range(CELLS)],
        range(CELLS, CELLS),
        sentence,
        f"{pattern}, rows {pitch} words apart: {_of(passes, 'pass', 'passes')}",
        (
            (_WANTED, "handed out in the first pass, to the lane with this number"),
            (_LATER, "has to wait for another pass"),
        ),
    )


def _lanes(lanes: list[int]) -> str:
    return "" if not lanes else str(lanes[0]) if len(lanes) == 1 else f"{lanes[0]}-{lanes[-1]}"


def _of(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


# ---- the live board: HTML, which follows the page's theme --------------------------------------------------------------

_LINE = "var(--jp-border-color1, #bdbdbd)"
_INK = "var(--jp-content-font-color1, #262626)"
_LOOKS = {
    _EMPTY: "background:none;",
    _WANTED: f"background:{style.READS};color:#fff;font-weight:600;",
    # Stripes tell waste from use without colour.
    _WASTED: f"background:repeating-linear-gradient(45deg,{style.WASTE}cc 0 3px,{style.WASTE}55 3px 6px);",
    _LATER: f"background:{style.WASTE};color:#262626;font-weight:600;",
}


def _html(board: Board) -> str:
    def cell(kind: str, look: str, text: str, title: str = "") -> str:
        about = f' title="{html.escape(title)}"' if title else ""
        size = "width:23px;min-width:23px;height:18px;padding:0;text-align:center;font-size:10px;line-height:18px;"
        return f'<{kind}{about} style="{size}{look}">{html.escape(text)}</{kind}>'

    name = "border:0;background:none;text-align:right;padding:0 6px 0 0;white-space:nowrap;font-size:11px"
    plain = "border:0;background:none;font-weight:400;text-align:left;overflow:visible;white-space:nowrap;"
    head = "".join(cell("th", plain, text) for text in board.columns)
    lines = [f'<tr style="background:none"><th style="{name}"></th>{head}</tr>']
    for title, cells in board.rows:
        tds = []
        for column, each in enumerate(cells):
            edge = f"border:1px solid {_LINE};"
            edge += f"border-left:3px solid {_INK};" if column in board.marks else ""
            tds.append(cell("td", _LOOKS[each.state] + edge, each.text, each.title))
        lines.append(f'<tr style="background:none"><td style="{name}">{title}</td>{"".join(tds)}</tr>')
    legend = "".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:1em;height:1em;vertical-align:-2px;'
        f'margin-right:4px;{_LOOKS[state]}"></span>{text}</span>'
        for state, text in board.legend
    )
    sentence = html.escape(board.sentence[:1].upper() + board.sentence[1:])
    return (
        f'<div style="color:{_INK};overflow-x:auto"><p style="margin:4px 0;font-weight:600">{sentence}</p>'
        f'<table style="border-collapse:collapse;margin:0;table-layout:fixed"><tbody>{"".join(lines)}</tbody></table>'
        f'<div style="display:flex;flex-wrap:wrap;gap:2px 18px;font-size:12px;margin-top:6px">{legend}</div></div>'
    )


# ---- stills ------------------------------------------------------------------------------------------------------------


def _picture(board: Board, alt: str) -> style.Picture:
    from matplotlib.patches import Rectangle

    faces = {_EMPTY: "none", _WANTED: style.READS, _WASTED: style.WASTE, _LATER: style.WASTE}
    height = len(board.rows) + 2.6
    fig, ax = style.figure(height=max(1.1, 8.0 * height / (CELLS + 6)))
    ax.set_axis_off()
    ax.set(xlim=(-4, CELLS + 1), ylim=(height, 0), aspect="equal")
    ax.text(-3.6, 0.5, board.sentence[:1].upper() + board.sentence[1:], ha="left", va="center", size=9)
    for column, text in enumerate(board.columns):
        ax.text(column + 0.1, 1.5, text, ha="left", va="center", size=6)
    for number, (title, cells) in enumerate(board.rows):
        top = 2 + number
        ax.text(-0.3, top + 0.5, title, ha="right", va="center", size=7)
        for column, each in enumerate(cells):
            hatch = "////" if each.state == _WASTED else None
            box = {"facecolor": faces[each.state], "edgecolor": style.NEUTRAL, "lw": 0.4, "hatch": hatch}
            ax.add_patch(Rectangle((column, top), 1, 1, **box))
            ink = "white" if each.state == _WANTED else style.INK
            ax.text(column + 0.5, top + 0.52, each.text, ha="center", va="center", size=5, color=ink)
        for column in board.marks:
            ax.plot([column, column], [top, top + 1], color=style.INK, lw=1.8, solid_capstyle="butt")
    return style.picture(fig, alt=alt)


def timeline(run: simt.Run, warp: int = 0) -> style.Picture:
    """What each lane of one warp does while the warp issues its instructions, from launch(..., detail=True).

    Raises ValueError where the launch kept no detail or has no such warp.
    """
    from matplotlib.patches import Rectangle

    if not run.steps:
        raise ValueError("timeline: the launch kept no steps; use simt.launch(..., detail=True)")
    if not 0 <= warp < run.warps:
        raise ValueError(f"timeline: warp must be 0 to {run.warps - 1}, got {warp!r}")
    steps = [step for step in run.steps if step.active[warp].any()]
    busy = sum(int(step.active[warp].sum()) for step in steps)
    fig, ax = style.figure(height=4.0)
    line, since = None, 0
    for x, step in enumerate(steps):
        for lane in np.flatnonzero(step.active[warp]).tolist():
            ax.add_patch(Rectangle((x + 0.06, lane + 0.06), 0.88, 0.88, facecolor=style.COMPUTE, edgecolor="none"))
        if step.instruction.line != line:
            line, since = step.instruction.line, x
            ax.axvline(x, color=style.BOUND, lw=0.8)
            source = linecache.getline(run.file, line).strip() or f"line {line}"
            ax.text(
                since + 0.1, 32.4, source[:44], rotation=38, ha="left", va="bottom", size=7.5, family="DejaVu Sans Mono"
            )
    ax.set(xlim=(0, len(steps)), ylim=(0, 32), yticks=[0.5, 8.5, 16.5, 24.5, 31.5])
    ax.set_yticklabels(["0", "8", "16", "24", "31"])
    ax.set_xticks([x + 0.5 for x in range(0, len(steps), max(1, len(steps) // 12))])
    ax.set_xticklabels([str(x + 1) for x in range(0, len(steps), max(1, len(steps) // 12))])
    style.axes(ax, x="instruction issued by the warp", y="lane (green: active)")
    alt = (
        f"Warp {warp} issues {_of(len(steps), 'instruction')}; on average {busy / len(steps):.1f} of its 32 lanes are "
        "active in one."
    )
    return style.picture(fig, alt=alt)
