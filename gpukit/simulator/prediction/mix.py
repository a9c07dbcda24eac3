"""How often each machine instruction of a program runs, and which unit of the SM it keeps busy.

The listing says what an instruction is and which loop it is in; the interpreter says how often a source line ran. Put
together: an instruction runs as often as its loop turns, and no more often than its source line did.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from gpukit.simulator.compiler import assembly
from gpukit.simulator.compiler.compile import Compiled

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

# SASS opcode -> what banks.turns calls it.
_ON_SHARED = {"LDS": "load", "LDSM": "load", "STS": "store", "STSM": "store", "LDGSTS": "copy"}

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
    if instruction.text.startswith("@!PT"):
        return "control"  # a load that no lane executes, with which ptxas keeps its distance from a barrier
    if instruction.base in ("F2FP", "I2FP", "F2IP") and not instruction.opcode.endswith("F64"):
        return "alu"  # packed conversions run at the rate of integers
    if instruction.opcode.startswith("IMAD.HI"):
        return "multiply high"  # at half the rate of the lower half of a product
    return UNITS.get(instruction.base, "alu")


@dataclass(frozen=True)
class Mix:
    """What one warp executes, averaged over the warps of the programs that were looked at.

    units       unit -> warp instructions
    bytes       "shared", "local", "global" -> bytes that a warp's loads and stores of it move; "operands": what tensor cores
                fetch from shared memory for it by themselves
    opcodes     SASS opcode -> warp instructions
    conflicts   clocks that a warp's accesses to shared memory take longer than their bytes, because lanes meet in its banks
    """

    units: Mapping[str, float]
    bytes: Mapping[str, float]
    opcodes: Mapping[str, float]
    conflicts: float = 0.0

    @property
    def instructions(self) -> float:
        return sum(self.units.values())


# How often a program runs a statement: see lines.LineCounter for the keys.
Executions = Mapping[tuple[tuple[str, int], ...], float]


def mix(compiled: Compiled, executions: Executions | None) -> Mix:
    """The instruction mix of a program; without `executions` every loop is taken for one that turns once."""
    units, moved, opcodes, conflicts = Counter(), Counter(), Counter(), 0.0
    for instruction, times in zip(compiled.instructions, weights(compiled, executions), strict=True):
        kind = unit(instruction)
        units[kind] += times
        opcodes[instruction.opcode] += times
        if kind in ("shared", "local", "global"):
            moved[kind] += times * 32 * thread_bytes(instruction)
        if kind == "tensor":
            moved["operands"] += times * operand_bytes(instruction)
        taken, least = shared_turns(compiled, instruction)
        conflicts += times * (taken - least)
    return Mix(dict(units), dict(moved), dict(opcodes), conflicts)


def shared_turns(compiled: Compiled, instruction: assembly.Instruction) -> tuple[float, float]:
    """Turns that an instruction on shared memory takes there, and how many it would take if no lanes met in a bank; none for all
    others. What ptxas made wider than it was in PTX meets nowhere that is known."""
    if instruction.base not in _ON_SHARED:
        return 0.0, 0.0
    width = thread_bytes(instruction)
    least = max(1.0, width / 4)
    return compiled.shared_turns.get((_ON_SHARED[instruction.base], width, instruction.frames), (least, least))


def _product(instruction: assembly.Instruction) -> tuple[int, int, int] | None:
    """Rows, columns and depth of an instruction of a warp group (HGMMA.64x128x16 and so on); None for all others."""
    shape = re.match(r"[A-Z]GMMA\.(\d+)x(\d+)x(\d+)", instruction.opcode)
    return tuple(map(int, shape.groups())) if shape else None


def puts_zeros(instruction: assembly.Instruction) -> bool:
    """Whether a copy to shared memory asks for nothing and stores zeros: what the pipeliner fetches ahead in the last turns of a loop
    whose turns are known."""
    return instruction.base == "LDGSTS" and instruction.text.endswith("!PT")


def product_flops(instruction: assembly.Instruction) -> int:
    """Operations of an instruction of a warp group; 0 for all others."""
    return 2 * math.prod(_product(instruction) or (0,))


def operand_bytes(instruction: assembly.Instruction) -> float:
    """Bytes that an instruction of a warp group fetches from shared memory, for each of its four warps: of its rows and of its
    columns 32 bytes each, or of the columns alone where the rows are in registers."""
    shape = _product(instruction)
    if not shape:
        return 0.0
    rows, columns, _ = shape
    rows = 0 if re.search(r"R\d+(?:\.reuse)?, R\d+(?:\.reuse)?, gdesc", instruction.text) else rows
    return (rows + columns) * 32 / 4


def thread_bytes(instruction: assembly.Instruction) -> int:
    """Bytes that one thread moves with a SASS load or store."""
    if instruction.base in ("LDSM", "STSM"):  # 8x8 matrices of 16-bit elements, 128 bytes each for the warp
        matrices = re.search(r"\.([124])$", instruction.opcode)
        return 4 * int(matrices[1]) if matrices else 4
    width = re.search(r"\.(?:[US])?(8|16|32|64|128|256)\b", instruction.opcode)
    return int(width[1]) // 8 if width else 4


def weights(compiled: Compiled, executions: Executions | None) -> list[float]:
    """How often each SASS instruction runs in one program."""
    instructions = compiled.instructions
    if executions is None:
        return [1.0] * len(instructions)
    ran = _ran(compiled, executions)
    loops = assembly.loops(instructions)
    waiting = {i for loop in loops if assembly.only_waits(instructions, loop) for i in range(loop.start, loop.end + 1)}
    loops = [loop for loop in loops if loop.start not in waiting]
    around = [assembly.innermost(loops, i) for i in range(len(instructions))]
    for i in (*_on_lines_from_outside(instructions, around), *_moved_into_loops(compiled, executions, around)):
        ran[i] = None
    turns, left_over = _turns(compiled, loops, around, ran)
    for i in _for_rare_numbers(instructions) | waiting:
        ran[i] = 0.0
    out = []
    for i, (instruction, loop, times) in enumerate(zip(instructions, around, ran, strict=True)):
        most = turns[loop] if loop else 1.0
        begin, once = left_over.get((loop, instruction.own_frames), (0, most))
        most = once if i >= begin else most
        out.append(most if times is None else min(most, times))
    return out


def _on_lines_from_outside(instructions, around) -> list[int]:
    """Instructions of a loop that do not say on whose behalf Triton's own code runs, and were given the line of an instruction
    before the loop (Instruction.own_frames): it says nothing of how often they run."""
    found, lender = [], 0
    for i, (instruction, loop) in enumerate(zip(instructions, around, strict=True)):
        if set(instruction.own_frames) <= set(instruction.frames):
            lender = i
        elif loop and lender < loop.start:
            found.append(i)
    return found


def _moved_into_loops(compiled: Compiled, executions: Executions, around) -> list[int]:
    """Instructions in more loops of the machine code than their line is in loops of the source: the compiler moved them there (a tile
    that a product reads from shared memory is stored just before it), and they run with each turn. Triton 3.6 does not say
    from where a function is called: a line of one is passed over."""
    first_lines = statements(compiled.functions)
    inside = Counter(
        (file, line + n - 1)
        for file, source, line in compiled.functions
        for node in _nodes(source)
        if isinstance(node, ast.For | ast.While)
        for n in range(node.lineno, node.end_lineno + 1)
    )
    return [
        i
        for i, (instruction, loop) in enumerate(zip(compiled.instructions, around, strict=True))
        if loop
        and statement(instruction.own_frames, first_lines) in executions
        and sum(inside[frame] for frame in instruction.own_frames) < loop.depth
    ]


_ON_REGISTERS = ("fma", "imad", "multiply high", "special", "convert", "fp64", "alu", "local", "uniform", "control")


def _for_rare_numbers(instructions) -> set[int]:
    """Instructions that a branch goes around within one statement, and that compute with registers, local memory and tables
    alone. Triton decides with selects and predicates what a statement does to each number; such a branch is one of NVIDIA's
    mathematical functions, around what only a rare number needs, as the sine of one above 105,615 does."""
    where = {label: i for i, instruction in enumerate(instructions) for label in instruction.labels}
    found: set[int] = set()
    for i, instruction in enumerate(instructions):
        target = re.match(r"@!?U?P\d+ BRA .*?(\.L[\w$.]+)", instruction.text)
        around = range(i + 1, where.get(target[1], 0) if target else 0)
        if around and all(_on_registers(instructions[n], instruction) for n in around):
            found.update(around)
    return found


def _on_registers(instruction: assembly.Instruction, branch: assembly.Instruction) -> bool:
    """Whether it is of the branch's statement, and computes with registers, local memory and constants alone."""
    kept = unit(instruction) in _ON_REGISTERS and instruction.base not in ("BAR", "EXIT")
    table = instruction.base == "LDG" and ".CONSTANT" in instruction.opcode
    return instruction.own_frames == branch.own_frames and (kept or table)


def _ran(compiled: Compiled, executions: Executions) -> list[float | None]:
    """For each instruction how often its source line ran; None where that is not known. Triton 3.6 keeps only the
    innermost line of a call: each call has instructions of its own, which run at most as often as the call that runs most."""
    first_lines = statements(compiled.functions)
    executions = _passes_of_headers(compiled.functions, executions)
    anywhere: Counter = Counter()
    for frames, times in executions.items():
        anywhere[frames[:1]] = max(anywhere[frames[:1]], times)
    found = []
    for instruction in compiled.instructions:
        frames = statement(instruction.own_frames, first_lines)
        times = executions.get(frames, anywhere.get(frames))
        if times is None and len(frames) > 1 and frames[:1] in anywhere:
            times = 0.0  # the line ran, but never by way of this call: a loop without a turn, say
        found.append(times)
    return found


def _passes_of_headers(functions, executions: Executions) -> Executions:
    """The same, but that the line of a `for` or `while` ran as often as its body, and not once more each time it ended."""
    bodies = {
        (file, line + node.lineno - 1): (file, line + node.body[0].lineno - 1)
        for file, source, line in functions
        for node in _nodes(source)
        if isinstance(node, ast.For | ast.While)
    }

    def passes(frames) -> float:
        if frames[0] not in bodies:
            return executions[frames]
        body = (bodies[frames[0]], *frames[1:])
        if body not in executions:
            return 0.0
        # Where the body begins with an inner loop, its header ran once more each time that loop ended.
        return executions[body] - (passes(body) if body[0] in bodies else 0)

    return {frames: passes(frames) for frames in executions}


def _turns(compiled: Compiled, loops, around, ran) -> tuple[dict[assembly.Loop, float], dict[tuple, tuple[int, float]]]:
    """Loop -> how often its body runs in a program; (loop around it or None, place) of an unrolled loop -> from which
    instruction on there are copies of its body, and how often one runs.

    A body is one pass of a source loop, or several where a loop was unrolled; a load or store whose size is known tells
    how many. What came from one source loop shares its passes: ptxas makes of it a loop that takes several steps at a
    time and one for the rest.
    """
    own = {loop: [i for i, l in enumerate(around) if l is loop] for loop in loops}
    bodies = {loop: [compiled.instructions[i] for i in own[loop]] for loop in loops}
    lines = {loop: {compiled.instructions[i].own_frames: ran[i] for i in own[loop]} for loop in loops}
    nested: dict[assembly.Loop, dict] = {l: {} for l in loops}  # the lines of the loops in it
    for l in loops:
        for o in loops:
            if o != l and l.start <= o.start and o.end <= l.end:
                nested[l].update(lines[o])
    turns, left_over = {}, {}
    for siblings in _siblings(loops, bodies):
        steps = {loop: _passes_in_a_turn(compiled, bodies[loop]) for loop in siblings}
        known = set.intersection(*(set(steps[loop]) for loop in siblings))
        known = {place for place in known if lines[siblings[0]][place]}
        known -= {place for loop in siblings for place in nested[loop]}
        if known:
            # Of several that say the most the first one, in each process the same.
            place = max(sorted(known), key=lambda place: lines[siblings[0]][place] / steps[siblings[0]][place])
            passes, in_a_turn = lines[siblings[0]][place], {loop: steps[loop][place] for loop in siblings}
        else:
            passes = max(_passes(bodies[loop], lines[loop], nested[loop]) for loop in siblings)
            in_a_turn = {loop: _steps_of_the_counter(compiled, loop, lines[loop]) for loop in siblings}
        most = max(in_a_turn.values())
        for n in sorted(set(in_a_turn.values()), reverse=True):
            alike = [loop for loop in siblings if in_a_turn[loop] == n]
            each = passes // n if n > 1 else passes  # in the mean of several programs not always a whole number
            turns.update(dict.fromkeys(alike, each / len(alike)))
            passes -= n * each
        if most > 1:  # what is left over has copies of the body outside the loops, each run or skipped
            places = {place for loop in siblings for place in lines[loop]}
            main = next(loop for loop in siblings if in_a_turn[loop] == most)
            outer = _outer(main, loops)
            begin = main.end if outer else 0  # before a loop in a loop stands what is made ready for it
            outside = sum(
                loop == outer and i.own_frames in places
                for i, loop in zip(compiled.instructions[begin:], around[begin:], strict=True)
            )
            copies = min(most - 1, max(1, round(outside * most / len(bodies[main]))))
            left_over |= {(outer, place): (begin, passes / copies) for place in places}
    return turns, left_over


def _outer(loop: assembly.Loop, loops) -> assembly.Loop | None:
    """The loop that a loop is in."""
    around = [l for l in loops if l != loop and l.start <= loop.start and loop.end <= l.end]
    return max(around, key=lambda l: l.depth, default=None)


_MOVERS = ("LDG", "STG", "LDGSTS", "UTMALDG", *_TENSOR.split())  # what tells one loop from another


def _siblings(loops, bodies) -> list[list[assembly.Loop]]:
    """The loops, those of one depth that load, store or multiply on a common source line put together."""
    groups: list[tuple[int, set, list]] = []
    for loop in loops:
        movers = {i.own_frames for i in bodies[loop] if i.base in _MOVERS} or {i.own_frames for i in bodies[loop]}
        for depth, theirs, members in groups:
            if depth == loop.depth and theirs & movers:
                theirs |= movers
                members.append(loop)
                break
        else:
            groups.append((loop.depth, movers, [loop]))
    return [members for _, _, members in groups]


def _passes_in_a_turn(compiled: Compiled, body: list[assembly.Instruction]) -> dict[tuple, int]:
    """For each load and store of a loop's body: bytes that a thread moves there over those of one execution."""
    found: Counter = Counter()
    for instruction in body:
        if instruction.base in ("LDG", "STG", "LDGSTS") and not puts_zeros(instruction):
            kind = "store" if instruction.base == "STG" else "load"
            found[kind, instruction.own_frames] += thread_bytes(instruction)
    steps = {}
    for (kind, place), moved in found.items():
        once = _thread_bytes_of_a_pass(compiled, kind, place[0][1] if place else 0)
        if once:
            steps[place] = max(1, round(moved / once))
    return steps


def _thread_bytes_of_a_pass(compiled: Compiled, kind: str, line: int) -> int:
    """What a thread moves when a source line's loads or stores run once; 0 where that is not known."""
    accesses = [a for a in compiled.layouts if (a.kind, a.line) == (kind, line)]
    try:
        return sum(a.count * a.element_bytes * a.layout.held(a.shape) for a in accesses if a.layout is not None)
    except NotImplementedError:
        return 0


def _steps_of_the_counter(compiled: Compiled, loop: assembly.Loop, lines) -> int:
    """Where no load or store tells how many passes a turn makes: PTX has the loop as it was, and ptxas, which repeats its
    body, counts in larger steps."""
    ptx = compiled.ptx_instructions
    alike = [
        (len(lines.keys() & {i.own_frames for i in ptx[l.start : l.end + 1]}), -l.end, l) for l in assembly.loops(ptx)
    ]
    if not alike:
        return 1
    once = assembly.counter_step(ptx, max(alike, key=lambda found: found[:2])[2])
    return max(1, assembly.counter_step(compiled.instructions, loop) // once) if once else 1


def _passes(body, lines, nested) -> float:
    """Where no load or store tells: the passes of the innermost source line in a loop. The lines of an inner loop lie
    around it too (what the pipeliner put before and after it) and do not count, nor do others that ran as often as these."""
    counts = Counter(lines[i.own_frames] for i in body if i.own_frames not in nested)
    counts.pop(None, None)
    around = {times: n for times, n in counts.items() if times not in nested.values()}
    counts = around or counts
    enough = max(1, sum(counts.values()) // 50)
    return max((times for times, n in counts.items() if n >= enough), default=1.0)


def statement(frames, first_lines: Mapping[str, Mapping[int, int]]) -> tuple[tuple[str, int], ...]:
    """Places in the source, (file, line), as Executions knows them: with the first line of the statement that each is in."""
    return tuple((file, first_lines.get(file, {}).get(line, line)) for file, line in frames)


@lru_cache(maxsize=256)
def _nodes(source: str) -> tuple[ast.AST, ...]:
    """Those of a function, outer ones before inner ones. Each prediction asks for them several times."""
    return tuple(ast.walk(ast.parse(source)))


def statements(functions) -> dict[str, dict[int, int]]:
    """For functions as `compile.sources` lists them: file -> each line -> the first line of the statement it is in."""
    found: dict[str, dict[int, int]] = {}
    for file, source, line in functions:
        first_lines = found.setdefault(file, {})
        for node in _nodes(source):  # outer statements come before inner ones
            if isinstance(node, ast.stmt):
                for n in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    first_lines[line + n - 1] = line + node.lineno - 1
    return found
