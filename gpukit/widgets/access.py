"""Who touches what: one kernel launch, access by access, on the memory of its tensors.

    from gpukit.widgets.access import access

    with gpukit.trace(detail=True) as t:
        softmax(x)
    access(t.launches[0], {"x_ptr": x.shape, "y_ptr": y.shape})

Memory is drawn as it lies: one cell an element, one line a row, a thick line where a 32-byte sector begins. The widget
draws what the trace recorded and runs nothing.
"""

from __future__ import annotations

import html
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ipywidgets as widgets
import numpy as np
import traitlets

from gpukit.widgets import style

if TYPE_CHECKING:
    from gpukit.simulator.trace.tracer import Event, Launch

SECTOR_BYTES = 32
MAX_ELEMENTS = 1024
PLAY_MS = 500  # a step: time to see what changed
_UNTOUCHED, _FETCHED, _BEFORE, _NOW = range(4)
_COLOURS = {"load": style.READS, "store": style.WRITES, "atomic": style.WRITES}
_VERBS = {"load": "loads", "store": "stores", "atomic": "updates"}


@dataclass(frozen=True)
class Memory:
    """One tensor as it lies in memory. `lanes`: how many masked-off lanes any access to it has at most."""

    parameter: str
    rows: int
    columns: int
    itemsize: int
    lanes: int

    @property
    def name(self) -> str:
        return self.parameter.removesuffix("_ptr")

    def sector_begins(self, offset: int) -> bool:
        return offset * self.itemsize % SECTOR_BYTES == 0


@dataclass(frozen=True)
class Frame:
    """One tensor after a step. Per element: its state, the program that touched it last, and how. Then the row that the
    lanes which are masked off are drawn beside, and their number."""

    state: np.ndarray
    program: list[str]
    kind: list[str]
    masked_row: int = -1
    masked: int = 0


class AccessView(widgets.VBox):
    """A slider over the accesses of one launch (arrow keys work), buttons that play them, go one step back or forward, and
    reset.

    Step 0 is the memory before the launch; the picture kept in a saved notebook shows step `still`.
    """

    def __init__(self, launch: Launch, shapes: Mapping[str, Sequence[int]], still: int):
        self.launch, self.events = launch, launch.events
        self.memories = [_memory(launch, name, shape) for name, shape in shapes.items()]
        self.still = still
        self.slider = widgets.IntSlider(
            0, 0, len(self.events), description="step", layout={"width": "22em"}, style={"description_width": "initial"}
        )
        self.back_button = widgets.Button(description="back", layout={"width": "6em"})
        self.forward_button = widgets.Button(description="forward", layout={"width": "6em"})
        self.reset_button = widgets.Button(description="reset", layout={"width": "6em"})
        self.play = widgets.Play(min=0, max=len(self.events), interval=PLAY_MS, show_repeat=False)
        self.board = widgets.HTML()
        controls = [self.play, self.back_button, self.slider, self.forward_button, self.reset_button]
        super().__init__([widgets.HBox(controls, layout={"flex_flow": "row wrap"}), self.board])

        self.back_button.on_click(lambda _: self._move(self.slider.value - 1))
        self.forward_button.on_click(lambda _: self._move(self.slider.value + 1))
        self.reset_button.on_click(lambda _: self._move(0))
        self.slider.observe(lambda _: self._draw(), "value")
        traitlets.link((self.play, "value"), (self.slider, "value"))
        self._draw()

    def _move(self, step: int) -> None:
        self.slider.value = min(max(step, 0), len(self.events))

    def _draw(self) -> None:
        step = self.slider.value
        self.board.value = _board(self.memories, [self.frame(m, step) for m in self.memories], self.sentence(step))
        self.back_button.disabled, self.forward_button.disabled = step == 0, step == len(self.events)

    def frame(self, memory: Memory, step: int) -> Frame:
        """The state of one tensor after `step` accesses of the launch."""
        size = memory.rows * memory.columns
        state, program, kind = np.zeros(size, dtype=np.int8), [""] * size, [""] * size
        for number, event in enumerate(self.events[:step], start=1):
            if event.tensor != memory.parameter:
                continue
            now = number == step
            if now:
                state[_same_sectors(event.offsets, memory)] = _FETCHED
            state[event.offsets] = _NOW if now else _BEFORE
            for offset in event.offsets.tolist():
                program[offset], kind[offset] = _program(event), event.kind
            if now:
                row = int(event.offsets.max()) // memory.columns if event.offsets.size else 0
                return Frame(state, program, kind, row, event.masked)
        return Frame(state, program, kind)

    def sentence(self, step: int) -> str:
        """What happens in `step`, in words."""
        if step == 0:
            return (
                f"Before the launch of {self.launch.kernel}: {_count(self.launch.programs, 'program')}, "
                f"{_count(len(self.events), 'access', 'accesses')}. Step forward."
            )
        event = self.events[step - 1]
        memory = next((m for m in self.memories if m.parameter == event.tensor), None)
        text = f"Program {_program(event)} {_VERBS[event.kind]} {_count(len(event.offsets), 'element')} of "
        text += f"{event.tensor.removesuffix('_ptr')}"
        if memory is not None and len(event.offsets):
            used = len(event.offsets) * memory.itemsize
            sectors = len(np.unique(event.offsets * memory.itemsize // SECTOR_BYTES))
            text += f": {used} bytes, in {_count(sectors, 'sector')} of {SECTOR_BYTES} = {sectors * SECTOR_BYTES} bytes"
        if event.masked:
            text += f"; {_count(event.masked, 'lane')} masked off"
        return f"{text}. Line {event.line}: {linecache.getline(self.launch.file, event.line).strip()}"

    def __repr__(self) -> str:
        names = " and ".join(f"{m.name} [{m.rows}, {m.columns}]" for m in self.memories)
        return f"access viewer: {self.launch.kernel} on {names}, {_count(len(self.events), 'step')}"

    def _repr_png_(self) -> tuple[bytes, dict]:  # where no kernel runs, on a repository's page for instance
        picture = self.picture(self.still)
        return picture.data, {"width": picture.width, "alt": picture.alt}

    def picture(self, step: int) -> style.Picture:
        """One step as a still."""
        frames = [self.frame(memory, step) for memory in self.memories]
        return _picture(self.memories, frames, f"Step {step} of {len(self.events)}. {self.sentence(step)}")


def access(launch: Launch, shapes: Mapping[str, Sequence[int]], still: int = 0) -> AccessView:
    """Walk through one launch, traced with `gpukit.trace(detail=True)`.

    shapes  the kernel's tensor parameters -> their shapes; all but the last dimension make the rows of the picture.
            The tensors must be contiguous: rows are drawn one after another, as they lie in memory
    still   the step that a saved notebook shows
    Raises ValueError where the launch was not traced in detail, a parameter was not touched, an access lies outside the
    shape, or the tensors have more than 1,024 elements.
    """
    if not launch.events:
        raise ValueError("access: the launch holds no events; trace it with gpukit.trace(detail=True)")
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    if size > MAX_ELEMENTS:
        raise ValueError(f"access: draws at most {MAX_ELEMENTS:,} elements, got {size:,}; trace a smaller tensor")
    return AccessView(launch, shapes, min(still, len(launch.events)))


def _memory(launch: Launch, parameter: str, shape: Sequence[int]) -> Memory:
    touched = [a for a in launch.accesses if a.tensor == parameter and a.lanes]
    if not touched:
        known = ", ".join(sorted({a.tensor for a in launch.accesses}))
        raise ValueError(f"access: {launch.kernel} touches no {parameter!r}; it touches {known}")
    events = [event for event in launch.events if event.tensor == parameter]
    rows, columns = int(np.prod(shape[:-1])), int(shape[-1])
    reach = max(int(event.offsets.max()) for event in events if event.offsets.size)
    if reach >= rows * columns:
        raise ValueError(f"access: {parameter} is touched at element {reach}, outside its shape {list(shape)}")
    return Memory(parameter, rows, columns, touched[0].bytes // touched[0].lanes, max(e.masked for e in events))


def _same_sectors(offsets: np.ndarray, memory: Memory) -> np.ndarray:
    """Elements in the sectors of `offsets`: what is fetched together with them."""
    everything = np.arange(memory.rows * memory.columns)
    wanted = offsets * memory.itemsize // SECTOR_BYTES
    return np.flatnonzero(np.isin(everything * memory.itemsize // SECTOR_BYTES, wanted))


def _program(event: Event) -> str:
    return ",".join(map(str, event.program))


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


# ---- the live board: HTML, which follows the page's theme -----------------------------------------------------------

_LINE = "var(--jp-border-color1, #bdbdbd)"
_INK = "var(--jp-content-font-color1, #262626)"
_CELL = "width:24px;min-width:24px;height:24px;padding:0;text-align:center;font-size:12px;line-height:24px;"


def _board(memories: list[Memory], frames: list[Frame], sentence: str) -> str:
    tables = "".join(_table(memory, frame) for memory, frame in zip(memories, frames, strict=True))
    words, _, code = sentence.partition(" Line ")
    code = f'<br><code style="font-size:12px">line {html.escape(code)}</code>' if code else "<br>&nbsp;"
    return (
        f'<div style="color:{_INK};line-height:1.5"><p style="margin:4px 0">{html.escape(words)}{code}</p>'
        f'<div style="display:flex;flex-wrap:wrap;gap:8px 32px">{tables}</div>{_legend()}</div>'
    )


def _table(memory: Memory, frame: Frame) -> str:
    lines = []
    for row in range(memory.rows):
        first = row * memory.columns
        cells = [_cell(memory, frame, offset) for offset in range(first, first + memory.columns)]
        off = frame.masked if row == frame.masked_row else 0
        blank = f'<td style="{_CELL}border:0;background:none"></td>'
        padding = (
            f'<td title="lane masked off" style="{_CELL}border:1px dashed {style.NEUTRAL};'
            f'background:{style.NEUTRAL}30"></td>'
        )
        cells += [padding] * off + [blank] * (memory.lanes - off)
        head = (
            f'<td style="border:0;padding:0 6px 0 0;font-size:12px;white-space:nowrap;background:none">row {row}</td>'
        )
        lines.append(f'<tr style="background:none">{head}{"".join(cells)}</tr>')
    title = f'<div style="font-weight:600">{html.escape(memory.name)} [{memory.rows}, {memory.columns}]</div>'
    table = "border-collapse:collapse;margin:0;table-layout:auto"
    return f'<div>{title}<table style="{table}"><tbody>{"".join(lines)}</tbody></table></div>'


def _cell(memory: Memory, frame: Frame, offset: int) -> str:
    state, colour = int(frame.state[offset]), _COLOURS.get(frame.kind[offset], style.NEUTRAL)
    look = {
        _UNTOUCHED: "background:none;",
        _FETCHED: f"background:{style.WASTE}99;",
        _BEFORE: f"background:{colour}55;",
        _NOW: f"background:{colour};color:#fff;font-weight:700;",
    }[state]
    edge = f"3px solid {_INK}" if memory.sector_begins(offset) else f"1px solid {_LINE}"
    where = f"element {offset}, sector {offset * memory.itemsize // SECTOR_BYTES}"
    text = frame.program[offset]
    return f'<td title="{where}" style="{_CELL}{look}border:1px solid {_LINE};border-left:{edge}">{text}</td>'


def _legend() -> str:
    entries = [
        (f"background:{style.READS}", "loaded now"),
        (f"background:{style.WRITES}", "stored now"),
        (f"background:{style.READS}55", "touched before, by the program with this number"),
        (f"background:{style.WASTE}99", "in a sector that is moved, not asked for"),
        (f"border:1px dashed {style.NEUTRAL};background:{style.NEUTRAL}30", "lane masked off"),
        (f"border-left:3px solid {_INK}", "a 32-byte sector begins"),
    ]
    spans = "".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:1em;height:1em;vertical-align:-2px;'
        f'margin-right:4px;{look}"></span>{text}</span>'
        for look, text in entries
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:2px 18px;font-size:12px;margin-top:6px">{spans}</div>'


# ---- the still -------------------------------------------------------------------------------------------------------


def _picture(memories: list[Memory], frames: list[Frame], alt: str) -> style.Picture:
    from matplotlib.patches import Rectangle

    widest = max(memory.columns + memory.lanes for memory in memories) + 3
    lines = sum(memory.rows + 1.6 for memory in memories) + 1
    fig, ax = style.figure(height=8.0 * lines / widest)
    ax.set_axis_off()
    ax.set(xlim=(-2.6, widest - 2.6), ylim=(lines, 0), aspect="equal")
    ax.text(-2.4, 0.4, alt.partition(" Line ")[0], ha="left", va="center", size=9)
    top = 1.0
    for memory, frame in zip(memories, frames, strict=True):
        ax.text(
            0, top + 0.45, f"{memory.name} [{memory.rows}, {memory.columns}]", ha="left", va="center", weight="bold"
        )
        top += 1.0
        for row in range(memory.rows):
            ax.text(-0.3, top + row + 0.5, f"row {row}", ha="right", va="center", size=9)
        for offset in range(memory.rows * memory.columns):
            row, column = divmod(offset, memory.columns)
            state, colour = int(frame.state[offset]), _COLOURS.get(frame.kind[offset], style.NEUTRAL)
            face, alpha = {
                _UNTOUCHED: ("none", 1.0),
                _FETCHED: (style.WASTE, 0.6),
                _BEFORE: (colour, 0.3),
                _NOW: (colour, 1.0),
            }[state]
            ax.add_patch(Rectangle((column, top + row), 1, 1, facecolor=face, alpha=alpha, edgecolor="none"))
            ax.add_patch(Rectangle((column, top + row), 1, 1, facecolor="none", edgecolor=style.NEUTRAL, lw=0.6))
            if memory.sector_begins(offset):
                ax.plot([column, column], [top + row, top + row + 1], color=style.INK, lw=2.2, solid_capstyle="butt")
            ink = "white" if state == _NOW else style.INK
            ax.text(column + 0.5, top + row + 0.52, frame.program[offset], ha="center", va="center", size=9, color=ink)
        for lane in range(frame.masked):
            corner = (memory.columns + lane + 0.15, top + frame.masked_row + 0.15)
            ax.add_patch(Rectangle(corner, 0.7, 0.7, facecolor="#EEEEEE", edgecolor=style.NEUTRAL, lw=1, ls="--"))
        top += memory.rows + 0.6
    return style.picture(fig, alt=alt)
