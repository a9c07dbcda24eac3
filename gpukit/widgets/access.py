"""Who touches what: one kernel launch, access by access, on the memory of its tensors.

    from gpukit.widgets.access import access

    with gpukit.trace(detail=True) as t:
        softmax(x)
    access(t.launches[0], {"x_ptr": x.shape, "y_ptr": y.shape})

Memory is drawn as it lies: one cell an element, one line a row, a thick line where a 32-byte sector begins. The widget
draws what the trace recorded and runs nothing.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import ipywidgets as widgets
import numpy as np
import traitlets

from gpukit.simulator.simt import SECTOR_BYTES
from gpukit.simulator.trace import replay
from gpukit.simulator.trace.replay import BEFORE, FETCHED, NOW, UNTOUCHED, Frame, Memory
from gpukit.widgets import board, style
from gpukit.widgets.board import WIDTH, Box, Drawing, Line, Shape, Words
from gpukit.widgets.view import Walk, button

if TYPE_CHECKING:
    from gpukit.simulator.trace.launch import Launch

MAX_ELEMENTS = 1024
PLAY_MS = 500  # a step: time to see what changed
_CELL = 24  # pixels
_COLOURS = {"load": style.READS, "store": style.WRITES, "atomic": style.WRITES}
_VERBS = {"load": "loads", "store": "stores", "atomic": "updates"}
_MASKED = {"fill": style.NEUTRAL, "opacity": 0.2, "edge": style.NEUTRAL, "dashed": True}


class AccessView(Walk):
    """The accesses of one launch: buttons that play them, go one step back or forward, and reset; `step` is a trait."""

    def __init__(self, launch: Launch, shapes: Mapping[str, Sequence[int]], still: int):
        self.launch, self.events = launch, launch.events
        self.memories = [replay.tensor_memory(launch, name, shape) for name, shape in shapes.items()]
        self.play = widgets.Play(min=0, max=len(self.events), interval=PLAY_MS, show_repeat=False)
        self.back_button = button("back", lambda: setattr(self, "step", self.step - 1))
        super().__init__({}, {}, still={"step": min(still, len(self.events))}, row=[self.play, self.back_button])
        traitlets.link((self.play, "value"), (self, "step"))

    def last(self) -> int:
        return len(self.events)

    def adapt(self) -> None:
        super().adapt()
        self.back_button.disabled = self.step == 0

    def drawing(self, step: int) -> Drawing:
        said = f"Step {step} of {self.last()}. {self.told(step)}"
        text, _, code = said.partition(" Line ")
        shapes, y = board.paragraph(text, 16)
        shapes.append(Words(10, y, f"line {code}" if code else "", size=board.fits(code, WIDTH, 12), code=True))
        x, top, below, width = 10.0, y + 16, y + 16, float(WIDTH)
        for memory in self.memories:
            wide, high = _head(memory) + (memory.columns + memory.lanes) * _CELL, (memory.rows + 1) * _CELL + 12
            if x > 10 and x + wide > WIDTH - 10:
                x, top = 10.0, below
            shapes += _tensor(memory, replay.after(self.events, memory, step), x, top)
            x, below, width = x + wide + 24, max(below, top + high), max(width, x + wide + 10)
        looks = [
            (Box(0, 0, 0, 0, style.READS), "loaded now"),
            (Box(0, 0, 0, 0, style.WRITES), "stored now"),
            (Box(0, 0, 0, 0, style.READS, 0.33), "touched before, by the program with this number"),
            (Box(0, 0, 0, 0, style.WASTE, 0.6), "in a sector that is moved, not asked for"),
            (Box(0, 0, 0, 0, **_MASKED), "lane masked off"),
            (Box(0, 0, 0, 0, board.INK), "thick line: a 32-byte sector begins"),
        ]
        keys, bottom = board.legend(looks, 10, below + 14, WIDTH - 20)
        return Drawing([*shapes, *keys], bottom, said, width)

    def told(self, step: int) -> str:
        """What happens in `step`, in words."""
        if step == 0:
            return (
                f"Before the launch of {self.launch.kernel}: {_count(self.launch.programs, 'program')}, "
                f"{_count(len(self.events), 'access', 'accesses')}. Step forward."
            )
        event = self.events[step - 1]
        memory = next((m for m in self.memories if m.parameter == event.tensor), None)
        text = f"Program {replay.name(event)} {_VERBS[event.kind]} {_count(len(event.offsets), 'element')} of "
        text += f"{event.tensor.removesuffix('_ptr')}"
        if memory is not None and len(event.offsets):
            used = len(event.offsets) * memory.itemsize
            sectors = len(np.unique(memory.sectors(event.offsets)))
            text += f": {used} bytes, in {_count(sectors, 'sector')} of {SECTOR_BYTES} = {sectors * SECTOR_BYTES} bytes"
        if event.masked:
            text += f"; {_count(event.masked, 'lane')} masked off"
        return f"{text}. Line {event.line}: {linecache.getline(self.launch.file, event.line).strip()}"

    def __repr__(self) -> str:
        names = " and ".join(f"{m.name} [{m.rows}, {m.columns}]" for m in self.memories)
        return f"access viewer: {self.launch.kernel} on {names}, {_count(len(self.events), 'step')}"


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
    return AccessView(launch, shapes, still)


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _head(memory: Memory) -> int:
    """Pixels of the words before a row."""
    return 36 + 7 * len(str(memory.rows - 1))


def _tensor(memory: Memory, frame: Frame, left: float, top: float) -> list[Shape]:
    """One tensor, a cell an element, and beside a row the lanes of its access that are masked off."""
    shapes: list[Shape] = [Words(left, top + 10, f"{memory.name} [{memory.rows}, {memory.columns}]", bold=True)]
    left, top = left + _head(memory), top + _CELL
    looks = {UNTOUCHED: ("none", 1.0), FETCHED: (style.WASTE, 0.6), BEFORE: (None, 0.33), NOW: (None, 1.0)}
    begins: list[Shape] = []
    for offset, state in enumerate(frame.state.tolist()):
        row, column = divmod(offset, memory.columns)
        x, y = left + column * _CELL, top + row * _CELL
        fill, opacity = looks[state]
        fill = fill or _COLOURS[frame.kind[offset]]
        text, ink = frame.program[offset], board.LIGHT if state == NOW else board.INK
        title = f"element {offset}, sector {memory.sectors(offset)}"
        look = {"text": text, "size": board.fits(text, _CELL, 12), "ink": ink, "bold": state == NOW, "title": title}
        shapes.append(Box(x, y, _CELL, _CELL, fill, opacity, board.LINE, **look))
        if memory.sector_begins(offset):
            begins.append(Line(((x, y), (x, y + _CELL)), board.INK, 3))
        if column == 0:
            shapes.append(Words(x - 8, y + _CELL / 2, f"row {row}", "right"))
    right, y = left + memory.columns * _CELL, top + frame.masked_row * _CELL
    masked = {**_MASKED, "title": "lane masked off"}
    shapes += [Box(right + i * _CELL + 3, y + 3, _CELL - 6, _CELL - 6, **masked) for i in range(frame.masked)]
    return [*shapes, *begins]
