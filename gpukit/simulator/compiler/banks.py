"""How the lanes of a warp meet in the banks of shared memory: which instructions take how many turns.

Shared memory has 32 banks; word n of four bytes lies in bank n mod 32, and each bank gives or takes one word per clock. An
instruction therefore takes as many turns as the most words that its lanes want of one bank. Lanes that move 8 bytes come in
two groups, lanes that move 16 in four, each of them with turns of its own.

Where a lane's words lie is in the PTX: arithmetic on the thread's number. It is followed here for all threads of a program
side by side, from the first instruction to the last, each once, with zero for what no thread knows: arguments, the program's
number and what is loaded. These are the same for all lanes, so that they move all words together and leave the turns as they
are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from gpukit.simulator.compiler.assembly import Instruction

BANKS, WORD_BYTES, LANES = 32, 4, 32
_OPERAND = re.compile(r"%\w+(?:\.\w+)?|-?0[xX][0-9a-fA-F]+U?|-?\d+U?|[A-Za-z_$][\w$]*")
_ADDRESS = re.compile(r"\[\s*(%\w+|[A-Za-z_$][\w$]*)\s*(?:\+\s*(-?\d+))?\s*\]")
_SHARED = re.compile(
    r"(ld|st)\.(?:volatile\.|relaxed\.\w+\.)*shared(?:::cta)?\.|(ldmatrix|stmatrix)\.|(cp\.async\.c[ag])\."
)
_KINDS = {"ld": "load", "ldmatrix": "load", "st": "store", "stmatrix": "store"}
_COMPARES: dict[str, Callable] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def turns(ptx: Sequence[Instruction], threads: int) -> dict[tuple[str, int, tuple], tuple[float, float]]:
    """(kind, bytes of a lane, frames) of the instructions on shared memory -> turns that one of a warp takes there, and
    how many it would take without conflicts: both are means. `kind` is "load", "store", or "copy" for cp.async, which writes."""
    registers: dict[str, np.ndarray] = {"%tid.x": np.arange(threads), "%laneid": np.arange(threads) % LANES}
    found: dict[tuple[str, int, tuple], list[tuple[float, float]]] = {}
    for instruction in ptx:
        if m := _SHARED.match(instruction.opcode):
            kind, bits = _KINDS.get(m[1] or m[2], "copy"), _bits(instruction)
            predicate = re.match(r"@(!?)(%\w+)\s", instruction.text)
            live = np.ones(threads, dtype=bool)
            if predicate and predicate[2] in registers:
                live = registers[predicate[2]].astype(bool) ^ bool(predicate[1])
            at = _ADDRESS.search(instruction.text)
            if bits and at and at[1] in registers and live.any():
                taken = _turns(registers[at[1]] + int(at[2] or 0), live, bits // 8)
                key = kind, _moved(instruction, bits // 8), instruction.frames
                found.setdefault(key, []).append(taken)
        else:
            _execute(instruction, registers, threads)
    return {key: tuple(np.mean(taken, axis=0).tolist()) for key, taken in found.items()}


def _bits(instruction: Instruction) -> int:
    """That each lane moves, or that lie at its address."""
    opcode = instruction.opcode
    if "matrix" in opcode:
        return 128
    if opcode.startswith("cp.async"):
        size = re.search(r"\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)", instruction.text)
        return 8 * int(size[1], 0) if size else 0
    vector, element = re.search(r"\.v(\d)\b", opcode), re.search(r"\.[bsuf](\d+)\b", opcode)
    return int(element[1]) * int(vector[1] if vector else 1) if element else 0


def _moved(instruction: Instruction, nbytes: int) -> int:
    """Bytes that a lane moves: of a matrix it holds four, whose address another lane knows."""
    matrices = re.search(r"matrix\..*\.x(\d)", instruction.opcode)
    return 4 * int(matrices[1]) if matrices else 4 if "matrix" in instruction.opcode else nbytes


def _turns(addresses: np.ndarray, live: np.ndarray, nbytes: int) -> tuple[float, float]:
    """Of one instruction, the mean over all warps: turns, none where no lane is live, and those that so many words need at
    least."""
    groups = max(1, nbytes // WORD_BYTES)  # of lanes, which come one after the other
    words = addresses[:, None] // WORD_BYTES + np.arange(groups)
    taken = least = 0
    for first in range(0, len(addresses), LANES):
        for part in np.array_split(np.arange(first, min(first + LANES, len(addresses))), groups):
            wanted = np.unique(words[part][live[part]])
            taken += int(np.bincount(wanted % BANKS, minlength=1).max()) if wanted.size else 0
            least += -(-wanted.size // BANKS)
    warps = len(addresses) / LANES
    return taken / warps, least / warps


def _execute(instruction: Instruction, registers: dict[str, np.ndarray], threads: int) -> None:
    """Set the result if all that it comes from is known; a result that is not is the same zero for all lanes."""
    op = instruction.opcode.split(".")
    text = re.sub(r"^@!?%\w+\s+", "", instruction.text).partition(instruction.opcode)[2].rstrip("; ")
    names = _OPERAND.findall(text)
    if not names or not names[0].startswith("%") or op[0] in ("st", "bra", "bar"):
        return
    target, zero = names[0], np.zeros(threads, dtype=np.int64)
    values = [zero + _number(n) if re.match(r"-?\d", n) else registers.get(n, zero) for n in names[1:]]
    try:
        value = _value(op, values, registers.get(target, zero))
    except (IndexError, ValueError):
        value = None
    registers[target] = zero if value is None else _fit(value, op)


def _number(text: str) -> int:
    """A constant of PTX, as 64 bits with a sign: masks are written as numbers of 64 bits without one. Of a float, 0."""
    try:
        number = int(text.rstrip("U"), 0)
    except ValueError:
        return 0
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _fit(value: np.ndarray, op: list[str]) -> np.ndarray:
    """As many bits as the register has."""
    if op[0] == "setp" or "wide" in op or op[-1] in ("b64", "s64", "u64"):
        return value
    if op[-1] == "pred":
        return value & 1
    value = value & 0xFFFFFFFF
    return np.where(value >= 1 << 31, value - (1 << 32), value)


def _value(op: list[str], v: list[np.ndarray], old: np.ndarray) -> np.ndarray | None:
    name = op[0]
    unsigned = np.uint32(0xFFFFFFFF).astype(np.int64)
    if name in ("mov", "cvt", "cvta"):
        return v[0] if op[-1][0] in "bus" or op[-1] == "pred" else None
    if name in ("add", "sub", "min", "max", "mul", "mad") and op[-1][0] == "f":
        return None
    match name:
        case "add":
            return v[0] + v[1]
        case "sub":
            return v[0] - v[1]
        case "mul":
            return v[0] * v[1] if "hi" not in op else None
        case "mad":
            return v[0] * v[1] + v[2] if "hi" not in op else None
        case "min":
            return np.minimum(v[0], v[1])
        case "max":
            return np.maximum(v[0], v[1])
        case "neg":
            return -v[0]
        case "not":
            return ~v[0]
        case "and":
            return v[0] & v[1]
        case "or":
            return v[0] | v[1]
        case "xor":
            return v[0] ^ v[1]
        case "shl":
            return v[0] << np.clip(v[1], 0, 62)
        case "shr":
            return (v[0] & unsigned if op[-1] in ("u32", "b32") else v[0]) >> np.clip(v[1], 0, 62)
        case "bfe":
            bits = (v[0] >> v[1]) & ((1 << v[2]) - 1)
            return np.where(bits >> (v[2] - 1) & 1, bits - (1 << v[2]), bits) if op[-1] == "s32" else bits
        case "bfi":
            mask = ((1 << v[3]) - 1) << v[2]
            return v[1] & ~mask | v[0] << v[2] & mask
        case "lop3":
            return _lop3(*v[:3], int(v[3][0]))
        case "shf":
            low, high, n = v[0] & unsigned, v[1] & unsigned, v[2] & 31
            both = high << 32 | low
            return both >> n if "r" in op else both << n >> 32
        case "shfl":
            return v[0][np.arange(len(v[0])) // LANES * LANES + v[1] % LANES] if "idx" in op else None
        case "selp":
            return np.where(v[2] != 0, v[0], v[1])
        case "rem":
            return np.where(v[1] != 0, np.fmod(v[0], np.where(v[1] == 0, 1, v[1])), 0)
        case "div":
            return np.where(v[1] != 0, v[0] // np.where(v[1] == 0, 1, v[1]), 0) if op[-1][0] in "us" else None
        case "setp":
            return _COMPARES[op[1]](v[0], v[1]).astype(np.int64) if op[1] in _COMPARES and op[-1][0] in "bus" else None
    return None  # fmt: skip


def _lop3(a, b, c, table: int) -> np.ndarray:
    out = np.zeros_like(a)
    for k in range(8):
        if table >> k & 1:
            out |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return out
