"""The stages of a compiled kernel as rows to be read: what came from which source line, and what each row is for.

for row in listing(compiled, "SASS"):
    print(row.line, row.kind, row.text)
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from gpukit.simulator.compiler import assembly
from gpukit.simulator.compiler.compile import Compiled
from gpukit.simulator.prediction import mix

STAGES = ("TTIR", "TTGIR", "PTX", "SASS")

# What is worth a look, in the order of a legend.
LOAD, STORE, ATOMIC, COPY = "global load", "global store", "atomic", "asynchronous copy"
SHARED, TENSOR, SPECIAL = "shared memory", "tensor cores", "special function"
SPILL, BARRIER = "spilled to local memory", "barrier or wait"
KINDS = (LOAD, STORE, ATOMIC, COPY, SHARED, TENSOR, SPECIAL, SPILL, BARRIER)


@dataclass(frozen=True)
class Row:
    """One operation or instruction, or a jump target. `frames` are the source lines it came from, as (file, line), innermost
    call first; `kind` is one of KINDS or "", `bits` what a thread moves at once, 0 where that has no meaning."""

    text: str
    frames: tuple[tuple[str, int], ...] = ()
    kind: str = ""
    bits: int = 0
    is_label: bool = False

    def came_from(self, file: str, line: int) -> bool:
        return (file, line) in self.frames


def listing(compiled: Compiled, stage: str) -> list[Row]:
    """The rows of one of STAGES. Raises ValueError for another."""
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
    if stage in ("TTIR", "TTGIR"):
        return _operations(compiled.ttir if stage == "TTIR" else compiled.ttgir)
    rows = []
    for instruction in compiled.ptx_instructions if stage == "PTX" else compiled.instructions:
        rows += [Row(f"{label}:", is_label=True) for label in instruction.labels if "__" not in label]
        kind, bits = _ptx(instruction) if stage == "PTX" else _sass(instruction)
        rows.append(Row(re.sub(r"\s+", " ", instruction.text), instruction.own_frames, kind, bits))
    return rows


def of_line(rows: list[Row], file: str, line: int) -> list[Row]:
    """The rows that came from one source line."""
    return [row for row in rows if row.came_from(file, line)]


def counts(rows: list[Row], chosen: list[Row]) -> dict[str, tuple[int, int]]:
    """Kind -> how many rows there are of it, and how many of them are among the chosen ones; in the order of KINDS."""
    everywhere, here = (Counter(row.kind for row in some) for some in (rows, chosen))
    return {kind: (everywhere[kind], here[kind]) for kind in KINDS if everywhere[kind]}


# ---- Triton's own stages ------------------------------------------------------------------------------------------

_LOCATION = re.compile(r"^(#loc\w*) = loc\((.*)\)\s*$", re.MULTILINE)
_TRAILING = re.compile(r" loc\((#loc\w*)\)$")
_ANY_LOCATION = re.compile(r' loc\((?:[^()"]|"[^"]*"|\([^()]*\))*\)')
_OPERATIONS = (
    (LOAD, r"tt\.load|tt\.descriptor_load"),
    (STORE, r"tt\.store|tt\.descriptor_store"),
    (ATOMIC, r"tt\.atomic_\w+|ttng\.async_tma_reduce"),
    (COPY, r"ttg\.async_copy\w+|ttng\.async_tma_(?!store_wait)\w+"),
    (SHARED, r"ttg\.local_\w+"),
    (TENSOR, r"tt\.dot\w*|ttng\.warp_group_dot|ttng\.tc_gen5_mma\w*"),
    (SPECIAL, r"math\.(?:exp2?|log2?|r?sqrt|sin|cos|tanh)|arith\.divf"),
    (BARRIER, r"ttg\.async_wait|ttng\.warp_group_dot_wait|ttng\.wait_barrier|ttng\.async_tma_store_wait|gpu\.barrier"),
)
_OPERATIONS = tuple((kind, re.compile(rf'(?:^|[\s"])(?:{pattern})\b(?!_)')) for kind, pattern in _OPERATIONS)


def _operations(text: str) -> list[Row]:
    places = dict(_LOCATION.findall(text))
    rows = []
    for line in text.split("\n"):
        if not line.strip() or line.startswith("#loc"):
            continue
        place = _TRAILING.search(line)
        shown = _ANY_LOCATION.sub("", line).rstrip()
        if shown.strip() in ("}", "module {"):
            continue
        kind = next((kind for kind, pattern in _OPERATIONS if pattern.search(shown)), "")
        rows.append(Row(shown, _frames(place[1], places) if place else (), kind))
    return rows


def _frames(location: str, places: dict[str, str]) -> tuple[tuple[str, int], ...]:
    """Files and lines behind a location of MLIR, those of Triton's own functions left out."""
    text = places.get(location, "")
    if m := re.match(r'"([^"]+)":(\d+):\d+', text):
        return () if "/triton/language/" in m[1] else ((m[1], int(m[2])),)
    return tuple(frame for inner in re.findall(r"#loc\w*", text) for frame in _frames(inner, places))


# ---- PTX and SASS -------------------------------------------------------------------------------------------------

_PTX = (
    (TENSOR, r"mma\.|wgmma\.mma|tcgen05\.mma"),
    (SHARED, r"(?:ld|st|atom|red)\.(?:\w+\.)*?shared|ldmatrix|stmatrix|tcgen05\.(?:ld|st)\."),
    (SPILL, r"(?:ld|st)\.local"),
    (SPECIAL, r"(?:ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div)\.(?:\w+\.)*f(?:16|32)"),
    (BARRIER, r"bar\.|barrier|mbarrier|fence|membar|cp\.async\.(?:\w+\.)*wait|wgmma\.(?:wait|fence)|tcgen05\.wait"),
)
_PTX = tuple((kind, re.compile(pattern)) for kind, pattern in _PTX)


def _ptx(instruction: assembly.Instruction) -> tuple[str, int]:
    if access := assembly.global_access(instruction):
        kind, bits, to = access
        return {"load": LOAD, "store": STORE, "atomic": ATOMIC}[kind] if to == "registers" else COPY, bits or 0
    return next((kind for kind, pattern in _PTX if pattern.match(instruction.opcode)), ""), 0


_SASS = {
    LOAD: "LDG LD",
    STORE: "STG ST",
    ATOMIC: "ATOMG RED ATOM REDG",
    COPY: "LDGSTS UTMALDG UTMASTG UTMAREDG UBLKCP",
    SPILL: "LDL STL",
    BARRIER: "BAR DEPBAR LDGDEPBAR ERRBAR MEMBAR FENCE WARPGROUP SYNCS ARRIVES WARPSYNC",
}
_SASS = {opcode: kind for kind, opcodes in _SASS.items() for opcode in opcodes.split()}
_UNITS = {"shared": SHARED, "tensor": TENSOR, "special": SPECIAL}


def _sass(instruction: assembly.Instruction) -> tuple[str, int]:
    kind = _SASS.get(instruction.base) or _UNITS.get(mix.unit(instruction), "")
    tile = instruction.base.startswith("U")  # one instruction for a whole tile
    moves = kind in (LOAD, STORE, ATOMIC, COPY, SHARED, SPILL) and not tile
    return kind, 8 * mix.thread_bytes(instruction) if moves else 0
