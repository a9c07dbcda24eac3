"""What one traced launch did: its counts, access by access, and what the caches of a GPU make of it."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gpukit import hardware, tables
from gpukit.simulator.interpreter.addresses import SECTOR_BYTES
from gpukit.simulator.trace import caches
from gpukit.simulator.trace.recording import Recording

if TYPE_CHECKING:
    from gpukit.simulator.compiler.compile import Compiled


@dataclass
class Access:
    """All executions of one tl.load, tl.store or atomic on one tensor. `count` is how often it ran (once per program
    and loop iteration), `lanes` how many elements that were, masked-off lanes left out. `via` is "tma" for a tensor
    descriptor, else "lsu".

    run_bytes      the shortest run of lanes that lie next to each other in memory, among all executions
    vector_bytes   what one thread could move at once, judged by these runs and by where they begin: 16 at best
    again_bytes    those of `bytes` that a program had moved before with the same lanes of the same line, or that several lanes
                   of one execution share
    """

    kind: str
    tensor: str
    file: str
    line: int
    count: int = 0
    lanes: int = 0
    bytes: int = 0
    sectors: int = 0
    via: str = "lsu"
    run_bytes: int = 0
    vector_bytes: int = 0
    again_bytes: int = 0


@dataclass
class Event:
    """One executed access, kept by trace(detail=True): `offsets` of its lanes in elements from the tensor's first one,
    in lane order, and how many lanes were `masked` off."""

    program: tuple[int, ...]
    kind: str
    tensor: str
    line: int
    offsets: np.ndarray = field(repr=False)
    masked: int


@dataclass
class Launch:
    """One kernel launch. Bytes are lanes that are not masked off times their size; sectors are distinct 32-byte
    sectors per access and program, summed. `function` is the @triton.jit object, `file` where it is defined,
    `arguments` and `options` are what the caller passed: the kernel's parameters by name, and num_warps and so on.

    l2_read_sectors, l2_write_sectors, dram_read_bytes, dram_write_bytes are what the caches of the trace's GPU make of
    it: see `traffic`. A trace with sample=N ran `sampled` of the programs and scaled every count; else that is None.
    `assumed` are sentences about what a sample cannot know, and was taken to be so; `spread`, where its programs read integers
    and do not move the same, is the range in which the mean of all programs probably lies, as shares of the sample's mean: two
    standard errors to either side, and never beyond the least and the most that one program moved. It is None where the length of a
    tensor says how much all programs have to do (places.py).
    """

    kernel: str
    file: str
    grid: tuple[int, ...]
    programs: int
    function: object = field(repr=False)
    load_bytes: int = 0
    store_bytes: int = 0
    atomic_bytes: int = 0
    load_sectors: int = 0
    store_sectors: int = 0
    atomic_sectors: int = 0
    flops: int = 0  # of tl.dot: 2 M N K
    dry: bool = False
    accesses: list[Access] = field(default_factory=list, repr=False)
    events: list[Event] = field(default_factory=list, repr=False)
    arguments: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    options: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    assumed: list[str] = field(default_factory=list, repr=False)
    spread: tuple[float, float] | None = None
    gpu: str = "h200"
    sampled: int | None = None
    recording: Recording = field(kw_only=True, repr=False)

    @property
    def name(self) -> str:
        return self.kernel

    @property
    def read_bytes(self) -> int:
        return self.load_bytes

    @property
    def write_bytes(self) -> int:
        return self.store_bytes + self.atomic_bytes

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def descriptors(self) -> list[Access]:
        """The accesses through tensor descriptors, which a GPU's TMA unit makes."""
        return [access for access in self.accesses if access.via == "tma"]

    def _table(self) -> tuple[list[str], list[list[str]]]:
        titles = ["access", "times", "bytes", "sectors", "used", "run (B)", "per thread (B)"]
        rows = [
            [
                f"{a.kind} {a.tensor}, line {a.line}" + (" (descriptor)" if a.via == "tma" else ""),
                *map(cell, (a.count, a.bytes, a.sectors)),
                f"{a.bytes / (a.sectors * SECTOR_BYTES):.0%}" if a.sectors else "",
                *map(cell, (a.run_bytes, a.vector_bytes)),
            ]
            for a in self.accesses
        ]
        sectors = sum(a.sectors for a in self.accesses)
        used = f"{self.bytes / (sectors * SECTOR_BYTES):.0%}" if sectors else ""
        total = ["total", *map(cell, (sum(a.count for a in self.accesses), self.bytes, sectors)), used, "", ""]
        return titles, [*rows, total]

    def report(self) -> str:
        """What each access costs, as an aligned text table: how much of its sectors it uses, how long its runs of
        neighboring elements are, and what a thread could move at once."""
        return text_table(*self._table())

    def _repr_html_(self) -> str:
        return html_table(*self._table())

    @property
    def num_warps(self) -> int:
        return self.recording.call.num_warps

    def traffic(self, gpu: str | hardware.Gpu | None = None, compiled: Compiled | bool = True) -> caches.Traffic:
        """What the caches of a GPU (default: the trace's) make of this launch: sectors and bytes at each level.

        compiled   the kernel compiled for that GPU, which says which lanes store together and how many programs share
                   an SM. True compiles it now (seconds the first time, then from a cache) and falls back on False where
                   that fails; False assumes what Triton's compiler does by default.
        Raises ValueError for a launch that was not run, and for one whose irregular accesses were too many to keep.
        """
        if self.dry:
            raise ValueError(f"{self.kernel} was traced with dry=True: it made no accesses")
        target = gpu if isinstance(gpu, hardware.Gpu) else hardware.gpu(gpu or self.gpu)
        key = target.key, compiled if isinstance(compiled, bool) else id(compiled)
        if key not in self._traffic:
            found = _compiled(self, target) if compiled is True else compiled or None
            self._traffic[key] = caches.traffic(self.recording, target, found)
        return self._traffic[key]

    @property
    def _traffic(self) -> dict:
        return self.recording.answers

    @property
    def l2_read_sectors(self) -> int:
        return self.traffic().l2_read_sectors

    @property
    def l2_write_sectors(self) -> int:
        return self.traffic().l2_write_sectors

    @property
    def dram_read_bytes(self) -> int:
        return self.traffic().dram_read_bytes

    @property
    def dram_write_bytes(self) -> int:
        return self.traffic().dram_write_bytes


def text_table(titles: list[str], rows: list[list[str]]) -> str:
    """An aligned table; the last row is the total."""
    return "\n".join(tables.aligned([titles, *rows], right=range(1, len(titles)), rules=[1, -1]))


def html_table(titles: list[str], rows: list[list[str]]) -> str:
    def tr(cells, tag: str) -> str:
        first, *rest = (html.escape(c) for c in cells)
        numbers = "".join(f'<{tag} style="text-align:right">{c}</{tag}>' for c in rest)
        return f'<tr><{tag} style="text-align:left">{first}</{tag}>{numbers}</tr>'

    body = "".join(tr(row, "td") for row in rows[:-1])
    head, foot = tr(titles, "th"), tr(rows[-1], "th")
    return f"<table><thead>{head}</thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"


def cell(value) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:,}"


def _compiled(launch: Launch, gpu: hardware.Gpu) -> Compiled | None:
    from gpukit.simulator.compiler.compile import CompileError, compile

    try:
        return compile(launch, gpu=gpu)
    except (CompileError, TypeError, ValueError, RuntimeError, OSError):
        return None
