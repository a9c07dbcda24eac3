"""Who looks at the launches of kernels: gpukit.trace() and whatever else the interpreter reports to.

The interpreter shows each launch to all watchers, and the launch table of gpukit.kernels hands launches to Triton while
there is one: what goes through the table, nobody sees.

A watcher has `begin(call) -> recorder`, `dry`: if any is dry, launches are listed but not run, and `sample`: how many
programs of a launch to run, None for all; with `marking` integers that wrap around in 32 bits are marked. A recorder has
`access(access, program, file, line)`, `dot(flops)`, `unwritten(fault)` and `disorder(fault)`, which may raise it, and
`end()`; for sampled launches `unknown(fault)` and `wrapped(fault)`, which may raise it, `begins(program)`, `role`, `window()` and
`cut(program)` too, and `starts(program)` and `inferred(radices, probes, others, turns)` where window() asks for programs. If all
recorders of a launch have `turn_begins()`, `repeat(turn, steps, times, before, after)` and `rewind(state)`, long loops of a sample
may be run in part: the first of these says at the end of a turn what it takes to come back there, and the second is told that
the last turn is done so many times more, each access a step of so many bytes further on each time (interpreter/turns.py).
"""

from __future__ import annotations

watchers: list = []  # in the order in which they came


def watch(watcher: object) -> None:
    """From now on every launch is shown to `watcher`."""
    watchers.append(watcher)


def unwatch(watcher: object) -> None:
    """The end of `watch`. Raises ValueError for who did not watch."""
    watchers.remove(watcher)


def watched() -> bool:
    """Whether anybody looks at the launches made now."""
    return bool(watchers)


class Onlooker:
    """A context manager that watches launches and is the recorder of each: one to derive from, which takes note of nothing."""

    dry, sample, marking, role = False, None, False, "whole"

    def __enter__(self):
        watch(self)
        return self

    def __exit__(self, *exc_info) -> None:
        unwatch(self)

    def begin(self, call):
        return self

    def begins(self, program: int) -> None:
        pass

    def access(self, access, program: int, file: str, line: int) -> None:
        pass

    def dot(self, flops: int) -> None:
        pass

    def unknown(self, fault) -> None:
        pass

    unwritten = disorder = wrapped = unknown

    def window(self) -> int:
        return 0

    def cut(self, program: int) -> None:
        pass

    def end(self) -> None:
        pass
