"""One instruction of a warp, lane by lane: the sectors that it moves, the banks that it asks, the lanes that it keeps busy.

    from gpukit.widgets.warp import bank_viewer, timeline, warp_viewer

    warp_viewer(element_bytes=4, stride=2)
    bank_viewer(pitch=33)
    timeline(simt.launch(kernel, x, y, grid=1, block=32, detail=True))

Both viewers draw memory as it lies, 32 cells of four bytes per row: a row is a line of global memory, or a word of each bank.
What they show is counted by the thread-level model (gpukit.simulator.simt).
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable

import numpy as np
import traitlets

from gpukit.simulator import simt
from gpukit.widgets import board, style
from gpukit.widgets.board import WIDTH, Box, Drawing, Line, Words
from gpukit.widgets.view import View, menu, slider

CELLS = 32  # words of four bytes: a line of 128, or one word of each bank
_LEFT, _WIDE, _HIGH = 66, 22.5, 20  # pixels: where the cells begin, and of each
_LANE = {"ink": board.LIGHT, "bold": True}
WANTED, WASTED, LATER = {"fill": style.READS, **_LANE}, {"hatch": style.WASTE}, {"fill": style.WASTE, "ink": board.DARK}

PATTERNS: dict[str, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]] = {  # lanes -> (row, column) of the tile
    "a column": lambda lane: (lane, 0 * lane),
    "a row": lambda lane: (0 * lane, lane),
    "the diagonal": lambda lane: (lane, lane),
    "every second word of a row": lambda lane: (lane // 16, lane % 16 * 2),
    "one word": lambda lane: (0 * lane + 2, 0 * lane + 5),
}


class WarpView(View):
    """Lane i of a warp loads element `offset` + i * `stride`; `element_bytes` and `lanes` that are on are traits, too."""

    element_bytes = traitlets.Int()
    stride = traitlets.Int()
    offset = traitlets.Int()
    lanes = traitlets.Int()

    def __init__(self, **start: int):
        controls = {
            "element_bytes": menu("element", [(_of(n, "byte"), n) for n in (1, 2, 4, 8, 16)], 150),
            "stride": slider("stride (elements)", 0, 32, 300),
            "offset": slider("offset (elements)", 0, 31, 300),
            "lanes": slider("lanes on", 0, 32, 300),
        }
        super().__init__(controls, start)

    def drawing(self, element_bytes: int, stride: int, offset: int, lanes: int) -> Drawing:
        load = _load(element_bytes, stride, offset, lanes)
        each = simt.SECTOR_BYTES // simt.WORD_BYTES

        def cell(word: int) -> dict:
            look = WANTED if word in load.wanted else WASTED if word in load.moved else {}
            first = word * simt.WORD_BYTES
            title = f"bytes {first} to {first + simt.WORD_BYTES - 1}, sector {word // each}"
            return {**look, "text": _span(load.wanted.get(word, [])), "title": title}

        words = (
            f"{_of(lanes, 'lane')} on, {_of(element_bytes, 'byte')} each, stride {stride}, offset {offset}: "
            f"{_of(load.asked_bytes, 'byte')} wanted, {_of(load.sectors, 'sector')} = "
            f"{_of(load.sectors * simt.SECTOR_BYTES, 'byte')} moved"
        )
        if load.sectors:
            share = load.asked_bytes / load.sectors / simt.SECTOR_BYTES
            words += f" ({share:.0%} of them used), {_of(load.lines, 'line')}"
        rows = {line * CELLS: f"line {line}" for line in sorted({word // CELLS for word in load.wanted})}
        heads = [f"+{i * simt.WORD_BYTES}" if i % each == 0 else "" for i in range(CELLS)]
        keys = ((WANTED, "wanted by the lane with this number"), (WASTED, "moved with its sector, wanted by nobody"))
        return _memory(words, heads, rows, cell, keys, range(0, CELLS, each))

    def __repr__(self) -> str:
        n, stride, offset, lanes = self._start.values()
        sectors = _of(_load(**self._start).sectors, "sector")
        return f"warp viewer: {_of(lanes, 'lane')}, {_of(n, 'byte')} each, stride {stride}, offset {offset}: {sectors}"


class BankView(View):
    """A warp reads words of a tile in shared memory: `pattern` and `pitch` are traits."""

    pattern = traitlets.Unicode()
    pitch = traitlets.Int()

    def __init__(self, **start):
        controls = {
            "pattern": menu("the warp reads", PATTERNS, 280),
            "pitch": slider("row pitch (words)", 32, 40, 300),
        }
        super().__init__(controls, start)

    def drawing(self, pattern: str, pitch: int) -> Drawing:
        load = _read(pattern, pitch)

        def cell(word: int) -> dict:
            if word not in load.wanted:
                return {}
            title = f"word {word}, bank {word % simt.BANKS}: handed out in pass {load.turn[word]}"
            return {**(WANTED if load.turn[word] == 1 else LATER), "text": _span(load.wanted[word]), "title": title}

        words = (
            f"a warp reads {pattern} of a tile with rows {pitch} words apart: {_of(len(load.wanted), 'word')} in "
            f"{_of(load.banks, 'bank')}, {_of(load.passes, 'pass', 'passes')}"
        )
        rows = {first: f"word {first}" for first in sorted({word // CELLS * CELLS for word in load.wanted})}
        keys = (
            (WANTED, "handed out in the first pass, to the lane with this number"),
            (LATER, "has to wait for another pass"),
        )
        return _memory(words, map(str, range(CELLS)), rows, cell, keys)

    def __repr__(self) -> str:
        pattern, pitch = self._start.values()
        passes = _read(pattern, pitch).passes
        return f"bank viewer: {pattern}, rows {pitch} words apart: {_of(passes, 'pass', 'passes')}"


def warp_viewer(element_bytes: int = 4, stride: int = 1, offset: int = 0, lanes: int = 32) -> WarpView:
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
    return WarpView(element_bytes=element_bytes, stride=stride, offset=offset, lanes=lanes)


def bank_viewer(pattern: str = "a column", pitch: int = 32) -> BankView:
    """A warp reads part of a tile of 32 x 32 words in shared memory, whose rows begin `pitch` words apart, 32 to 40.

    Raises ValueError for another pitch or a pattern that is not in PATTERNS.
    """
    if pitch not in range(32, 41) or pattern not in PATTERNS:
        raise ValueError(
            f"bank_viewer: pattern must be one of {', '.join(PATTERNS)} and pitch 32 to 40, got {pattern!r}, {pitch!r}"
        )
    return BankView(pattern=pattern, pitch=pitch)


def _load(element_bytes: int, stride: int, offset: int, lanes: int) -> simt.GlobalLoad:
    return simt.global_load((offset + np.arange(lanes) * stride) * element_bytes, element_bytes)


def _read(pattern: str, pitch: int) -> simt.SharedLoad:
    row, column = PATTERNS[pattern](np.arange(simt.WARP))
    return simt.shared_load(row * pitch + column)


def _memory(
    words: str, heads: Iterable[str], rows: dict[int, str], cell: Callable[[int], dict], keys: Iterable[tuple[dict, str]],
    marks: Iterable[int] = (),
) -> Drawing:  # fmt: skip
    """Memory as it lies. rows: the first word of each -> its name; cell: word -> how its box looks; a thick line stands
    before the columns of `marks`."""
    said = words[:1].upper() + words[1:]
    shapes, y = board.paragraph(said, 16)
    shapes += [Words(_LEFT + (i + 0.5) * _WIDE, y + 6, head, "center", 9) for i, head in enumerate(heads)]
    y += 18
    for first, name in rows.items():
        shapes.append(Words(_LEFT - 6, y + _HIGH / 2, name, "right", 11))
        for column in range(CELLS):
            look = {"edge": board.LINE, **cell(first + column)}
            size = board.fits(look.get("text", ""), _WIDE, 10)
            shapes.append(Box(_LEFT + column * _WIDE, y, _WIDE, _HIGH, **look, size=size))
        shapes += [Line(((x, y), (x, y + _HIGH)), board.INK, 3) for x in (_LEFT + mark * _WIDE for mark in marks)]
        y += _HIGH
    looks = [(Box(0, 0, 0, 0, edge=board.LINE, **look), text) for look, text in keys]
    legend, bottom = board.legend(looks, 10, y + 18, WIDTH - 20)
    return Drawing([*shapes, *legend], bottom, words)


def _span(lanes: list[int]) -> str:
    return "" if not lanes else str(lanes[0]) if len(lanes) == 1 else f"{lanes[0]}-{lanes[-1]}"


def _of(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


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
