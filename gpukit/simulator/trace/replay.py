"""One launch again, access by access: what each did to the elements of a tensor and which sectors it moved.

    memory = tensor_memory(launch, "x_ptr", x.shape)
    after(launch.events, memory, 3)  # the elements after three accesses

The launch was traced with gpukit.trace(detail=True).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpukit.simulator.simt import SECTOR_BYTES

if TYPE_CHECKING:
    from gpukit.simulator.trace.launch import Event, Launch

UNTOUCHED, FETCHED, BEFORE, NOW = range(4)  # fetched: moved with a sector of the last access, not asked for by it


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

    def sectors(self, offsets: np.ndarray) -> np.ndarray:
        """The 32-byte sector of each element, counted from the tensor's first."""
        return offsets * self.itemsize // SECTOR_BYTES

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


def tensor_memory(launch: Launch, parameter: str, shape: Sequence[int]) -> Memory:
    """A contiguous tensor that the launch touched; all but the last dimension make its rows.

    Raises ValueError for a parameter that was not touched and an access outside the shape.
    """
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


def after(events: Sequence[Event], memory: Memory, step: int) -> Frame:
    """The state of one tensor after `step` accesses."""
    elements = np.arange(memory.rows * memory.columns)
    state, program, kind = np.zeros(elements.size, dtype=np.int8), [""] * elements.size, [""] * elements.size
    for number, event in enumerate(events[:step], start=1):
        if event.tensor != memory.parameter:
            continue
        now = number == step
        if now:
            state[np.isin(memory.sectors(elements), memory.sectors(event.offsets))] = FETCHED
        state[event.offsets] = NOW if now else BEFORE
        for offset in event.offsets.tolist():
            program[offset], kind[offset] = name(event), event.kind
        if now:
            row = int(event.offsets.max()) // memory.columns if event.offsets.size else 0
            return Frame(state, program, kind, row, event.masked)
    return Frame(state, program, kind)


def name(event: Event) -> str:
    """The program of an access as people write it: "3", "0,1"."""
    return ",".join(map(str, event.program))
