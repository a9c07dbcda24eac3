"""From the text of PTX to instructions. https://docs.nvidia.com/cuda/parallel-thread-execution has the language; this reads what
NVRTC writes of a kernel that calls no function.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

TYPES = {
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8, "u16": np.uint16, "s16": np.int16, "b16": np.uint16, "u32": np.uint32,
    "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f16": np.float16,
    "f32": np.float32, "f64": np.float64, "pred": np.bool_,
}  # fmt: skip
MOST_BYTES = 1 << 20  # of arrays that a text defines outside its kernel
_ARRAY = re.compile(r"\.align\s+(\d+)\s+\.\w+\s+([\w$]+)\[(\d+)\]\s*(?:=\s*\{(.*)\})?$", re.DOTALL)
_SCALAR = re.compile(r"\.align\s+(\d+)\s+\.([a-z]\d+)\s+([\w$]+)\s*(?:=\s*(\S+))?$")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")


class PtxError(Exception):
    """What this does not read or run. The message is a sentence without its subject, "calls the function vprintf"; `line` is
    the one of the source, 0 where it is not known."""

    def __init__(self, message: str, line: int = 0):
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@!%p1 ld.global.v4.f32 {%f1, ...}, [%rd1+16];`

    guard  the predicate on which it depends and whether it must be false, None without
    op     its name and modifiers: ("ld", "global", "v4", "f32")
    args   its operands as they are written
    line   of the source, 0 where the compiler names none
    """

    guard: tuple[str, bool] | None
    op: tuple[str, ...]
    args: tuple[str, ...]
    line: int


@dataclass
class Layout:
    """Arrays that lie side by side: where each begins, and the bytes of all."""

    places: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, name: str, nbytes: int, align: int) -> None:
        self.places[name] = -(-self.nbytes // align) * align
        self.nbytes = self.places[name] + nbytes


@dataclass
class Kernel:
    """params: type and name of each. registers: the bits of those that begin so. shared, local: a block's and a thread's arrays.
    data: those outside the kernel, with what they hold at first."""

    name: str
    params: list[tuple[str, str]]
    code: list[Instruction]
    labels: dict[str, int]
    registers: dict[str, int]
    shared: Layout
    local: Layout
    data: Layout
    initial: bytearray


def read(text: str) -> list[Kernel]:
    """The kernels of a text. Raises PtxError."""
    try:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        return _read(re.sub(r"^[ \t]*\.(version|target|address_size|file)\b.*", "", text, flags=re.MULTILINE))
    except (KeyError, IndexError, ValueError, TypeError) as error:  # a type or a directive of which this knows nothing
        raise PtxError(f"has something in it that is not interpreted here: {error}") from None


def _read(text: str) -> list[Kernel]:
    data, shared, initial = Layout(), Layout(), bytearray()
    kernels = []
    for begin, body in _top(text):
        head = " ".join(begin.split())
        if entry := re.search(r"\.entry ([\w$]+) ?\((.*?)\)", head):
            kernels.append(_kernel(entry[1], entry[2], body, data, shared, initial))
        elif ".func" in head and body:
            raise PtxError("has a function that the compiler did not inline into the kernel")
        elif head.startswith((".visible .entry", ".extern .shared")):
            raise PtxError("has shared memory whose size the launch decides")
        elif re.match(r"(\.visible |\.weak |\.extern )?\.(global|const|shared)\b", head):
            _array(head, shared if ".shared" in head else data, initial)
    return kernels


def _top(text: str) -> Iterator[tuple[str, str]]:
    """The declarations outside kernels as (text, ""), and kernels as (head, body)."""
    at = 0
    while found := re.compile(r"[;{]").search(text, at):
        head = text[at : found.start()]
        if found[0] == ";":
            yield head, ""
            at = found.end()
        elif head.rstrip().endswith("="):  # what an array holds
            end = text.index(";", at)
            yield text[at:end], ""
            at = end + 1
        else:
            depth, at = 1, found.end()
            while depth:
                brace = re.compile(r"[{}]").search(text, at)
                if brace is None:
                    raise PtxError("ends too early")
                depth += 1 if brace[0] == "{" else -1
                at = brace.end()
            yield head, text[found.end() : at - 1]


def _kernel(name: str, params: str, body: str, data: Layout, shared: Layout, initial: bytearray) -> Kernel:
    named = []
    for param in filter(None, map(str.strip, params.split(","))):
        words = param.split()
        if "[" in param:
            raise PtxError("takes a struct as an argument")
        named.append((words[1][1:], words[-1]))
    kernel = Kernel(name, named, [], {}, {}, Layout({**shared.places}, shared.nbytes), Layout(), data, initial)
    if unknown := {kind for kind, _ in named} - TYPES.keys():
        raise PtxError(f"takes an argument of the type {unknown.pop()}")
    line = 0
    for statement in _statements(body):
        if statement.endswith(":"):
            kernel.labels[statement[:-1]] = len(kernel.code)
        elif loc := _LOC.match(statement):
            line = int(loc[2]) if int(loc[1]) == 1 and int(loc[2]) else line
        elif statement.startswith(".reg"):
            kind, names = statement.split(None, 2)[1:]
            for register in names.split(","):
                kernel.registers[register.strip().partition("<")[0]] = np.dtype(TYPES[kind[1:]]).itemsize * 8
        elif statement.startswith((".shared", ".local")):
            _array(statement, kernel.shared if statement.startswith(".shared") else kernel.local, None)
        elif not statement.startswith("."):
            kernel.code.append(_instruction(statement, line))
    return kernel


def _statements(body: str) -> Iterator[str]:
    """Statements and labels of a body. A label and a directive .loc end with their lines; braces around statements are left out."""
    body = re.sub(r"^[ \t]*(\.loc\b.*|[\w$]+:)[ \t]*$", r"\1;", body, flags=re.MULTILINE)
    for part in body.split(";"):
        if statement := " ".join(part.split()).lstrip("{} "):
            yield statement


def _instruction(statement: str, line: int) -> Instruction:
    guard, rest = None, statement
    if found := re.match(r"@(!?)(%\w+) ", statement):
        guard, rest = (found[2], found[1] == "!"), statement[found.end() :]
    name, _, operands = rest.partition(" ")
    args = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", operands)
    return Instruction(guard, tuple(name.split(".")), tuple(args), line)


def _array(declaration: str, layout: Layout, initial: bytearray | None) -> None:
    if found := _ARRAY.search(declaration):
        align, name, count, values = int(found[1]), found[2], int(found[3]), found[4]
        kind = re.search(r"\.([a-z]\d+) ", declaration)
        each = np.dtype(TYPES[kind[1]])
    elif found := _SCALAR.search(declaration):
        align, name, count, values = int(found[1]), found[3], 1, found[4]
        each = np.dtype(TYPES[found[2]])
    else:
        raise PtxError(f"declares {declaration[:60]}")
    layout.add(name, count * each.itemsize, align)
    if initial is None:
        return
    if layout.nbytes > MOST_BYTES:
        raise PtxError(f"defines arrays of {layout.nbytes:,} bytes outside the kernel")
    initial.extend(bytes(layout.nbytes - len(initial)))
    if values:
        numbers = np.array([number(value.strip(), each) for value in values.split(",")], each)
        at = layout.places[name]
        initial[at : at + numbers.nbytes] = numbers.tobytes()


def number(text: str, kind: np.dtype) -> np.generic:
    """A constant as it is written: 12, 0xff, -1, 0f3F800000, 0d3FF0000000000000. Raises PtxError."""
    try:
        if text[:2] in ("0f", "0F"):
            value = np.array(int(text[2:], 16), np.uint32)
        elif text[:2] in ("0d", "0D"):
            value = np.array(int(text[2:], 16), np.uint64)
        else:
            value = np.array(int(text.rstrip("U"), 0) & (1 << 64) - 1, np.uint64).astype(f"u{kind.itemsize}")
    except ValueError:
        raise PtxError(f"uses {text[:40]}") from None
    if value.dtype.itemsize != kind.itemsize:
        raise PtxError(f"uses {text[:40]} as a number of {8 * kind.itemsize} bits")
    return value.view(kind)[()]
