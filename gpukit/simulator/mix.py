"""How often each machine instruction of a program runs, and which unit of the SM it keeps busy.

The listing says what an instruction is and which loop it is in; the interpreter says how often a source line ran. Put
together: an instruction runs as often as its loop turns, and no more often than its source line did.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gpukit.simulator import assembly
from gpukit.simulator.compile import Compiled

# SASS opcode -> unit. What is not listed is "alu": integers, logic, compares, selects, minima, moves.
_FMA = "FFMA FMUL FADD FFMA2 FMUL2 FADD2 HFMA2 HADD2 HMUL2 FSWZADD FFMA32I FMUL32I FADD32I"  # + - * in fp32, fp16, bf16
_IMAD = "IMAD IMUL IDP"  # also what copies registers and shifts (IMAD.MOV, IMAD.SHL): half the rate of FFMA
_XU = "MUFU"  # exp2, log2, 1/x, 1/sqrt(x), tanh, sin, cos
_CONVERT = "F2F F2I I2F I2FP F2IP F2FP FRND"
_FP64 = "DADD DMUL DFMA DSETP DMNMX"
_TENSOR = "HMMA HGMMA QGMMA IGMMA IMMA DMMA BGMMA BMMA QMMA OMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA"
_SHARED = "LDS STS LDSM STSM ATOMS"
_SHUFFLE = "SHFL REDUX"
_GLOBAL = "LDG STG LDGSTS ATOMG RED LD ST ATOM UTMALDG UTMASTG UTMAREDG UBLKCP"
_LOCAL = "LDL STL"  # spilled registers
_UNIFORM = "UMOV ULEA UIADD3 UIMAD ULOP3 USHF USEL UISETP UPRMT UPLOP3 ULDC R2UR S2UR UFLO UP2UR UR2UP USETMAXREG"
_CONTROL = (
    "BRA BRX EXIT RET CALL BSSY BSYNC BREAK WARPSYNC NANOSLEEP YIELD BAR DEPBAR LDGDEPBAR ERRBAR MEMBAR FENCE CCTL"
)
_CONTROL += " WARPGROUP SYNCS UTMACMDFLUSH UTMACCTL ARRIVES ELECT ACQBULK CCTLT PREEXIT VOTE VOTEU"

UNITS = {
    opcode: unit
    for unit, opcodes in (
        ("fma", _FMA), ("imad", _IMAD), ("special", _XU), ("convert", _CONVERT), ("fp64", _FP64), ("tensor", _TENSOR),
        ("shared", _SHARED), ("shuffle", _SHUFFLE), ("global", _GLOBAL), ("local", _LOCAL), ("uniform", _UNIFORM),
        ("control", _CONTROL),
    )
    for opcode in opcodes.split()
}  # fmt: skip


def unit(instruction: assembly.Instruction) -> str:
    """The unit that executes a SASS instruction."""
    if instruction.base in ("F2FP", "I2FP", "F2IP") and not instruction.opcode.endswith("F64"):
        return "alu"  # packed conversions run at the rate of integers
    return UNITS.get(instruction.base, "alu")


@dataclass(frozen=True)
class Mix:
    """What one warp executes, averaged over the warps of the programs that were looked at.

    units       unit -> warp instructions
    bytes       "shared", "local", "global" -> bytes that a warp's loads and stores of it move
    opcodes     SASS opcode -> warp instructions
    """

    units: Mapping[str, float]
    bytes: Mapping[str, float]
    opcodes: Mapping[str, float]

    @property
    def instructions(self) -> float:
        return sum(self.units.values())


def mix(compiled: Compiled, executions: Mapping[tuple[str, int], float] | None) -> Mix:
    """The instruction mix of a program. `executions`: (file, line) -> how often a program runs that line; None takes
    every loop for one that turns once."""
    units, moved, opcodes = Counter(), Counter(), Counter()
    for instruction, times in zip(compiled.instructions, weights(compiled, executions), strict=True):
        kind = unit(instruction)
        units[kind] += times
        opcodes[instruction.opcode] += times
        if kind in ("shared", "local", "global"):
            moved[kind] += times * 32 * _thread_bytes(instruction)
    return Mix(dict(units), dict(moved), dict(opcodes))


def _thread_bytes(instruction: assembly.Instruction) -> int:
    if instruction.base in ("LDSM", "STSM"):  # 8x8 matrices of 16-bit elements, 128 bytes each for the warp
        matrices = re.search(r"\.([124])$", instruction.opcode)
        return 4 * int(matrices[1]) if matrices else 4
    width = re.search(r"\.(?:[US])?(8|16|32|64|128|256)\b", instruction.opcode)
    return int(width[1]) // 8 if width else 4


def weights(compiled: Compiled, executions: Mapping[tuple[str, int], float] | None) -> list[float]:
    """How often each SASS instruction runs in one program."""
    instructions = compiled.instructions
    loops = assembly.loops(instructions)
    inner = [assembly.innermost(loops, i) for i in range(len(instructions))]
    if executions is None:
        return [1.0] * len(instructions)
    turns = _turns(compiled, loops, inner, executions)
    out = []
    for instruction, loop in zip(instructions, inner, strict=True):
        times = turns[loop] if loop else 1.0
        ran = executions.get((instruction.file, instruction.line))
        out.append(times if ran is None else min(times, ran))
    return out


def _turns(compiled: Compiled, loops, inner, executions) -> dict:
    """Loop -> how often its body runs in a program."""
    instructions = compiled.instructions
    lines: dict = {loop: Counter() for loop in loops}
    for instruction, loop in zip(instructions, inner, strict=True):
        if loop and (ran := executions.get((instruction.file, instruction.line))):
            lines[loop][ran] += 1
    passes = {loop: max(counts, key=counts.__getitem__) if counts else 1.0 for loop, counts in lines.items()}
    unrolled = {loop: _unrolled(compiled, loop, inner) for loop in loops}
    turns = {}
    # ptxas unrolls a loop into one that takes several steps at a time and one for the rest: they share the passes.
    left: dict = {}
    for loop in sorted(loops, key=lambda l: -unrolled[l]):
        group = (passes[loop], loop.depth, frozenset(lines_of(instructions, inner, loop)))
        rest = left.setdefault(group, passes[loop])
        turns[loop] = rest // unrolled[loop] if unrolled[loop] > 1 else rest
        left[group] = rest - turns[loop] * unrolled[loop]
    return turns


def lines_of(instructions, inner, loop) -> set[tuple]:
    """The source lines with memory accesses directly in a loop: what tells two loops apart."""
    return {
        (i.file, i.line)
        for i, around in zip(instructions, inner, strict=True)
        if around is loop and i.base in ("LDG", "STG", "LDGSTS", "UTMALDG", "HGMMA", "HMMA")
    }


def _unrolled(compiled: Compiled, loop: assembly.Loop, inner) -> int:
    """How many passes of the source loop one turn of a SASS loop is: loads and stores found against those expected."""
    found: Counter = Counter()
    for instruction, around in zip(compiled.instructions, inner, strict=True):
        if around is loop and instruction.base in ("LDG", "STG", "LDGSTS"):
            kind = "store" if instruction.base == "STG" else "load"
            found[kind, instruction.line] += _thread_bytes(instruction)
    factors = []
    for (kind, line), moved in found.items():
        layout = compiled.layout(line, kind)
        if layout is not None and layout.layout is not None:
            elements = 1
            for n in layout.shape:
                elements *= n
            factors.append(round(moved / max(1, elements / compiled.threads) / layout.element_bytes))
    return max(1, min(factors, default=1))
