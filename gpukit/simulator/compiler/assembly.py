"""PTX and SASS as data: instructions with the source lines they came from, what they do, and the loops of SASS.

PTX: https://docs.nvidia.com/cuda/parallel-thread-execution/
SASS: https://docs.nvidia.com/cuda/cuda-binary-utilities/#instruction-set-reference
"""

from __future__ import annotations

import bisect
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_TRITON = f"{os.sep}triton{os.sep}language{os.sep}"  # tl.max, tl.sum, tl.zeros and so on are functions with lines, too


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    opcode      with its suffixes: "ld.global.v4.b32", "LDG.E.128"
    text        as printed, the predicate and the operands included
    frames      (file, line) of the source, innermost function first
    own_frames  those that are not Triton's own; for what came from tl.max or tl.sum and does not say who called (Triton
                3.6 and 3.7) those of the instruction before
    file, line  of the first of these: the line of the learner; None, 0 if there is none
    position    line in the listing
    labels      names of the addresses here (jump targets)
    stall       SASS: cycles that the warp waits before its next instruction, as the assembler decided
    sets, reads, waits   SASS: of a warp's six counters of what is under way, the one that falls back when its result is
                there, the one when it has read its registers (None for neither), and those for which it waits to be zero
    """

    opcode: str
    text: str
    frames: tuple[tuple[str, int], ...]
    position: int
    labels: tuple[str, ...] = ()
    own_frames: tuple[tuple[str, int], ...] = field(repr=False, default=())
    stall: int = 1
    sets: int | None = None
    reads: int | None = None
    waits: tuple[int, ...] = ()

    @property
    def file(self) -> str | None:
        return self.own_frames[0][0] if self.own_frames else None

    @property
    def line(self) -> int:
        return self.own_frames[0][1] if self.own_frames else 0

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Line:
    """What one source line became."""

    ptx: tuple[Instruction, ...]
    sass: tuple[Instruction, ...]


# ---- reading the listings -----------------------------------------------------------------------------------------

_PTX_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s*,\s*"([^"]*)")?')
_PTX_LOC = re.compile(r"\s*\.loc\s+(\d+) (\d+) (\d+)(?:.*inlined_at (\d+) (\d+) (\d+))?")
_PTX_INSTRUCTION = re.compile(r"\s*(?:\{\s*)?(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:\.[\w:]+)*)\s.*;|\s*(ret|exit|trap);")
_LABEL = re.compile(r"^\s*([.$]?L[\w$.]*):")


def ptx(text: str) -> list[Instruction]:
    """The instructions of a PTX listing, in order."""
    lines = text.split("\n")
    files = {m[1]: os.path.join(m[2], m[3]) if m[3] else m[2] for m in map(_PTX_FILE.match, lines) if m}
    outer: dict[tuple, tuple] = {}  # a place inside an inlined function -> the place of the call
    found, here, own, labels = [], (), (), []
    for position, line in enumerate(lines, 1):
        if m := _PTX_LOC.match(line):
            place = m.group(1, 2, 3)
            if m[4]:
                outer[place] = m.group(4, 5, 6)
            else:
                outer.pop(place, None)
            here = _frames(place, outer, files)
        elif m := _LABEL.match(line):
            labels.append(m[1])
        elif (m := _PTX_INSTRUCTION.match(line)) and not line.lstrip().startswith("."):
            own = _own(here) or own
            found.append(Instruction(m[1] or m[2], line.strip(), here, position, tuple(labels), own))
            labels = []
    return found


def _own(frames) -> tuple:
    return tuple(frame for frame in frames if _TRITON not in frame[0])


def _frames(place, outer, files) -> tuple:
    frames = []
    while place is not None and len(frames) < 32:
        file, line, _ = place
        if line != "0":
            frames.append((files.get(file, "?"), int(line)))
        place = outer.get(place)
    return tuple(frames)


_SASS_INSTRUCTION = re.compile(
    r"\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?((?:@!?U?P\w+\s+)?)([A-Z][\w.]*)(.*?)\s*;"
    r"(?: /\* stall (\d+)(?:, sets (\d))?(?:, reads (\d))?(?:, waits ([\d ]+))? \*/)?"
)
_SASS_FILE = re.compile(r'\s*//## File "([^"]*)", line (\d+)')


def sass(text: str) -> list[Instruction]:
    """The instructions of nvdisasm's listing, in order, without the padding after the program's end."""
    found, here, own, labels, fresh = [], [], (), [], True
    for position, line in enumerate(text.split("\n"), 1):
        if m := _SASS_FILE.match(line):
            here = [(m[1], int(m[2]))] if fresh else [*here, (m[1], int(m[2]))]
            fresh = False
        elif m := _LABEL.match(line):
            labels.append(m[1])
        elif m := _SASS_INSTRUCTION.match(line):
            fresh = True
            if m[3] == "NOP":
                continue
            printed = f"{m[2]}{m[3]}{m[4]}"
            own = _own(here) or own
            counters = m[6] and int(m[6]), m[7] and int(m[7]), tuple(map(int, (m[8] or "").split()))
            found.append(
                Instruction(m[3], printed, tuple(here), position, tuple(labels), own, int(m[5] or 1), *counters)
            )
            labels = []
    return found


def ptxas_log(text: str) -> dict[str, int]:
    """What `ptxas -v` says: registers of a thread, and bytes of stack and spills."""

    def total(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, text)))

    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", text)), default=0),
        "stack_bytes": total(r"(\d+) bytes stack frame"),
        "spill_stores": total(r"(\d+) bytes spill stores"),
        "spill_loads": total(r"(\d+) bytes spill loads"),
    }


def by_line(file: str, ptx: Iterable[Instruction], sass: Iterable[Instruction]) -> dict[int, Line]:
    """Source line of `file` -> its PTX and SASS."""
    rows: dict[int, tuple[list, list]] = {}
    for column, instructions in enumerate((ptx, sass)):
        for instruction in instructions:
            if instruction.file == file:
                rows.setdefault(instruction.line, ([], []))[column].append(instruction)
    return {line: Line(tuple(p), tuple(s)) for line, (p, s) in sorted(rows.items())}


# ---- global memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryAccess:
    """PTX instructions of one kind on one source line. `bits` is what one thread moves at once, None where a whole
    tile is moved by one instruction; `to` says where a load goes: "registers", "shared memory" or "TMA"."""

    kind: str
    line: int
    file: str | None
    instruction: str
    bits: int | None
    count: int
    to: str

    def __str__(self) -> str:
        width = "a tile each" if self.bits is None else f"{self.bits} bits per thread"
        return f"line {self.line}: {self.count} x {self.instruction}, {width}"


_PLAIN_ACCESS = re.compile(r"(ld|st|atom|red)\.(?:[\w:]+\.)*?global\b")
_KINDS = {"ld": "load", "st": "store", "atom": "atomic", "red": "atomic"}


def global_access(instruction: Instruction) -> tuple | None:
    """What a PTX instruction on global memory does: "load", "store" or "atomic", bits a thread and where a load goes, as in
    MemoryAccess; None for every other."""
    opcode, text = instruction.opcode, instruction.text
    if m := _PLAIN_ACCESS.match(opcode):
        vector = re.search(r"\.v(\d+)\b", opcode)
        element = re.findall(r"\.[busf]+(\d+)(?:x(\d))?\b", opcode)
        bits = int(element[-1][0]) * int(element[-1][1] or 1) if element else 32
        return _KINDS[m[1]], bits * (int(vector[1]) if vector else 1), "registers"
    if opcode.startswith("cp.async.bulk"):
        if "prefetch" in opcode or re.search(r"(?:commit|wait)_group", opcode):
            return None
        if "reduce" in opcode:
            return "atomic", None, "TMA"
        return "store" if ".global.shared" in opcode else "load", None, "TMA"
    if opcode.startswith(("cp.async.ca", "cp.async.cg")):
        size = re.search(r"\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)", text)
        return "load", 8 * int(size[1], 0) if size else None, "shared memory"
    return None


def memory_accesses(ptx: Iterable[Instruction]) -> list[MemoryAccess]:
    """The instructions on global memory, equal ones of a source line counted together."""
    counts: Counter = Counter()
    for instruction in ptx:
        if access := global_access(instruction):
            kind, bits, to = access
            counts[kind, instruction.line, instruction.file, instruction.opcode, bits, to] += 1
    return [
        MemoryAccess(kind, line, file, opcode, bits, n, to)
        for (kind, line, file, opcode, bits, to), n in counts.items()
    ]


# ---- tensor cores -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorCoreUse:
    """Tensor-core instructions of one kind on one source line: a [m, k] times b [k, n], summed in `accumulator`.
    wgmma is issued by four warps together, mma by one, tcgen05.mma by one thread for the whole program."""

    line: int
    file: str | None
    instruction: str
    m: int
    n: int
    k: int
    a: str
    b: str
    accumulator: str
    count: int

    @property
    def flops(self) -> int:
        """Of one instruction; a multiply-add is 2."""
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        shape = f"{self.m}x{self.n}x{self.k}"
        return (
            f"line {self.line}: {self.count} x {self.instruction} {shape}, {self.a} x {self.b} into {self.accumulator}"
        )


_MMA = re.compile(
    r"(wgmma\.mma_async|mma)\.(?:sp\.)?sync\.aligned\.m(\d+)n(\d+)k(\d+)((?:\.(?!row|col)\w+)*?)?(?:\.row|\.col)*((?:\.\w+)+)$"
)
_TCGEN05_K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}


def tensor_core_uses(ptx: Iterable[Instruction]) -> list[TensorCoreUse]:
    """The tensor-core instructions, equal ones of a source line counted together."""
    ptx = list(ptx)
    counts: Counter = Counter()
    for i, instruction in enumerate(ptx):
        use = _tensor_core(instruction.opcode) or _tcgen05(ptx, i)
        if use:
            counts[instruction.line, instruction.file, *use] += 1
    return [TensorCoreUse(*key, count) for key, count in counts.items()]


def _tensor_core(opcode: str) -> tuple | None:
    if not (m := _MMA.match(opcode)):
        return None
    m_, n, k = map(int, m.group(2, 3, 4))
    types = [t for t in m[6].split(".") if re.fullmatch(r"(?:b?f|tf|e\dm|u|s|b)\d+\w*", t)]
    if len(types) == 3:  # wgmma: d, a, b
        d, a, b = types
    elif len(types) == 4:  # mma: d, a, b, c
        d, a, b, _ = types
    else:
        d = a = b = types[0] if types else "?"
    return m[1].partition(".")[0], m_, n, k, a, b, d


def _tcgen05(ptx: list[Instruction], i: int) -> tuple | None:
    """Shape and types are in a register, the instruction descriptor, that was set to a constant before."""
    m = re.match(r"tcgen05\.mma\.[\w:.]*kind::(\w+)", ptx[i].opcode)
    if not m:
        return None
    operands = re.findall(r"%r\d+", ptx[i].text.split("]", 1)[-1])
    for earlier in reversed(ptx[:i] if operands else []):
        if value := re.match(rf"mov\.b32\s+{re.escape(operands[-1])}, (\d+);", earlier.text):
            bits = int(value[1])
            rows, columns = (bits >> 24 & 0x1F) * 16, (bits >> 17 & 0x3F) * 8
            a = {"f16": ("f16", "bf16")[bits >> 7 & 1], "tf32": "tf32"}.get(m[1], m[1])
            return "tcgen05", rows, columns, _TCGEN05_K.get(m[1], 0), a, a, ("f16", "f32")[bits >> 4 & 1]
    return "tcgen05", 0, 0, _TCGEN05_K.get(m[1], 0), m[1], m[1], "f32"


# ---- loops --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """Instructions `start` to `end` (its backward branch), as indices into the listing; `depth` 1 is outermost."""

    start: int
    end: int
    depth: int

    def __contains__(self, index: int) -> bool:
        return self.start <= index <= self.end


def loops(listing: list[Instruction]) -> list[Loop]:
    """The loops of SASS or PTX, found by their backward branches; the endless one after the program's end is none."""
    where = {label: i for i, instruction in enumerate(listing) for label in instruction.labels}
    spans: dict[int, int] = {}  # several branches may go back to one start
    for i, instruction in enumerate(listing):
        if instruction.base.upper() == "BRA" and (target := re.search(r"[.$]L[\w$.]+", instruction.text)):
            start = where.get(target[0], i + 1)
            if start < i:
                spans[start] = max(i, spans.get(start, 0))
    # A branch back into the middle of a loop, or from behind the program's end to what is before it, comes from code that was moved
    # out: a wait that may take long.
    exits = [i for i, instruction in enumerate(listing) if instruction.text.startswith("EXIT")]
    spans = {
        s: e
        for s, e in spans.items()
        if not any(o < s <= end < e for o, end in spans.items()) and not any(s < i < e for i in exits)
    }
    ordered = sorted(spans.items(), key=lambda span: (span[0], -span[1]))
    return [Loop(start, end, 1 + sum(s < start and end <= e for s, e in ordered)) for start, end in ordered]


def only_waits(listing: list[Instruction], loop: Loop) -> bool:
    """Whether a loop does nothing but ask whether a copy has arrived."""
    waiting = ("SYNCS", "BRA", "NOP", "NANOSLEEP", "YIELD")
    return all(instruction.base in waiting for instruction in listing[loop.start : loop.end + 1])


def innermost(found: list[Loop], index: int) -> Loop | None:
    """The innermost loop around an instruction."""
    around = [loop for loop in found[: bisect.bisect_right([loop.start for loop in found], index)] if index in loop]
    return max(around, key=lambda loop: loop.depth, default=None)


def counter_step(listing: list[Instruction], loop: Loop) -> int:
    """By how much the register that decides about another turn changes in one turn; 0 where that is not found."""
    body = listing[loop.start : loop.end + 1]
    predicate = re.match(r"@!?(%?U?[Pp]\d+)", body[-1].text)
    compares = [i for i in body if predicate and re.match(r"U?ISETP|setp", i.opcode) and predicate[1] in i.text]
    if not compares:
        return 0
    registers = set(re.findall(r"U?R\d+|%r[sd]?\d+", compares[-1].text))
    for instruction in reversed(body):
        register = r"(U?R\d+|%r[sd]?\d+)"
        step = re.search(rf"\s{register},(?: U?P\w+,)* {register}, (-?(?:0x[0-9a-f]+|\d+))\b", instruction.text)
        if step and step[1] in registers and re.match(r"U?IADD|VIADD|add\.[su]", instruction.opcode):
            value = int(step[3], 0) & 0xFFFFFFFF  # SASS prints -4 as 0xfffffffc
            return min(value, (1 << 32) - value)
    return 0
