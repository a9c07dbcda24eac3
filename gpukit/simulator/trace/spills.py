"""What a kernel moves because its registers do not suffice: words that a thread stores to local memory and loads again.

A store of local memory goes through L1 to L2, as every store does. A load finds its word in L1 as long as L1 still holds it:
between two uses lies what the programs of an SM move in a turn of the loop, or outside of loops what they spill. How often a
loop turns is known from the loads and stores that the programs were seen to make in it, where a statement makes one of each
shape.
"""

from __future__ import annotations

from collections import Counter
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

from gpukit.simulator.compiler import assembly
from gpukit.simulator.interpreter.addresses import SECTOR_BYTES
from gpukit.simulator.prediction import mix
from gpukit.simulator.trace.levels import L1_PLACES
from gpukit.simulator.trace.recording import Recording

if TYPE_CHECKING:
    from gpukit.simulator.compiler.compile import Compiled


class Spills(NamedTuple):
    """32-byte sectors of local memory that a program stores and loads, the share of the loads that L1 lacks, and the share of
    L1 that local memory leaves to other loads."""

    stored: float = 0.0
    loaded: float = 0.0
    missed: float = 0.0
    left: float = 1.0


def spills(recording: Recording, compiled: Compiled | None, l1_bytes: int, programs_per_sm: int, read: float) -> Spills:
    """Of a mean program, of which so many share an L1 of so many bytes, and each brings `read` bytes into it by its other
    loads."""
    if compiled is None or not compiled.spills:
        return Spills()
    instructions = compiled.instructions
    loops = assembly.loops(instructions)
    moved: Counter = Counter()  # (opcode, loop) -> bytes of a thread
    turns: Counter = Counter()  # loop -> how often the words in it are used
    for i, times in enumerate(mix.weights(compiled, _executions(recording, compiled))):
        if mix.unit(instructions[i]) == "local":
            loop = assembly.innermost(loops, i)
            moved[instructions[i].base, loop] += times * mix.thread_bytes(instructions[i])
            turns[loop] = max(turns[loop], times)
    sectors = Counter()
    missed = used = 0.0
    for (base, loop), of_a_thread in moved.items():
        found = of_a_thread * compiled.threads / SECTOR_BYTES
        sectors[base] += found
        if base == "LDL":
            own = max(moved[base, loop], moved["STL", loop]) * compiled.threads
            used += own
            between = programs_per_sm * (own + (read if loop else 0)) / max(1.0, turns[loop])
            missed += found * NormalDist(l1_bytes, l1_bytes / L1_PLACES**0.5).cdf(between)
    if not sectors["LDL"]:
        return Spills(sectors["STL"])
    return Spills(sectors["STL"], sectors["LDL"], missed / sectors["LDL"], read / (read + used) if read else 1.0)


def _executions(recording: Recording, compiled: Compiled) -> mix.Executions:
    """How often a program runs the statements that load and store, in the mean: all that is known of its loops."""
    rows = range(len(recording) if recording.call.sampled is None else recording.whole)
    programs = recording.call.sampled or recording.call.programs
    runs = Counter(recording.site[row] for row in rows)
    first_lines = mix.statements(compiled.functions)
    by_line: dict[tuple[str, int], float] = {}
    for number, times in runs.items():
        site = recording.sites[number]
        (line,) = mix.statement([(site.file, site.line)], first_lines)
        by_line[line] = max(by_line.get(line, 0.0), times / programs)
    found = {}
    for instruction in compiled.instructions:
        frames = mix.statement(instruction.own_frames, first_lines)
        if frames and frames[0] in by_line:
            found[frames] = by_line[frames[0]]
    calls = Counter(frames[0] for frames in found)  # of a function that is called in several places
    return {frames: times / calls[frames[0]] for frames, times in found.items()}
