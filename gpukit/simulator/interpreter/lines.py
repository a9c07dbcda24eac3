"""How often a kernel runs each of its source lines, counted while the interpreter runs it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType

from gpukit import launches
from gpukit.simulator.compiler.compile import path, sources
from gpukit.simulator.interpreter import executor, layer
from gpukit.simulator.prediction.mix import statements


class LineCounter(launches.Onlooker):
    """A context manager; afterwards `launches` holds, per launch in order, statement -> runs, over the programs that were
    run whole. A statement is known by its first line and those of the calls it came in through, innermost first, each as
    (file, line). `at_launch` is called with each launch before it runs."""

    def __init__(self, at_launch: Callable[[object], None] | None = None):
        self.at_launch = at_launch
        self.launches: list[Counter] = []
        self._begun: list[list[tuple[int, Counter]]] = []  # of each launch: programs that ran, and the runs before each
        self._first_lines: dict[str, dict[int, int]] = {}
        self._known: dict[str, tuple[str, dict[int, int]] | None] = {}  # by the file name of a code object

    def __enter__(self) -> LineCounter:
        layer.install()
        self._outer = sys.gettrace()
        return super().__enter__()

    def __exit__(self, *exc_info) -> None:
        sys.settrace(self._outer)
        super().__exit__(*exc_info)

    # What the interpreter calls: a watcher's begin, and the methods of a recorder.

    def begin(self, call) -> LineCounter:
        if self.at_launch:
            self.at_launch(call)
        self.launches.append(Counter())
        self._begun.append([])
        self._first_lines = statements(sources(call.function))
        self._known = {}
        sys.settrace(self._call)
        return self

    def begins(self, program: int) -> None:
        self._begun[-1].append((program, self.launches[-1].copy()))

    def executions(self, launch: int, stands_for: Mapping[int, float]) -> dict:
        """Of a sampled launch, by its number: statement -> runs in all programs, of which each that ran stands for so many."""
        programs, before = zip(*self._begun[launch], strict=True)
        total: dict = {}
        for program, first, last in zip(programs, before, [*before[1:], self.launches[launch]], strict=True):
            for statement, count in last.items():
                total[statement] = total.get(statement, 0.0) + stands_for[program] * (count - first[statement])
        return total

    @property
    def role(self) -> str:
        return "whole"

    @role.setter
    def role(self, role: str) -> None:
        sys.settrace(self._outer)  # from now on programs run in part, and tracing costs half of the interpreter's time

    def end(self) -> None:
        sys.settrace(self._outer)

    def turn_begins(self) -> Counter:
        return self.launches[-1].copy()

    def repeat(self, turn, steps, times: int, before: Counter, after: Counter) -> None:
        self.rewind(after)
        for statement, count in after.items():
            self.launches[-1][statement] += (count - before[statement]) * times

    def rewind(self, state: Counter) -> None:
        self.launches[-1].clear()
        self.launches[-1].update(state)

    # What Python calls.

    def _call(self, frame: FrameType, event: str, arg):
        name = frame.f_code.co_filename
        try:
            known = self._known[name]
        except KeyError:
            first_lines = self._first_lines.get(path(name))
            known = self._known[name] = first_lines and (path(name), first_lines)
        if known is None:
            return None
        file, first_lines = known
        counts, callers, last = self.launches[-1], self._callers(frame), None

        def line(frame: FrameType, event: str, arg):
            nonlocal last
            if event == "line":
                first = first_lines.get(frame.f_lineno)
                if first is not None and first != last:  # a statement of several lines is entered several times
                    counts[((file, first), *callers)] += 1
                last = first
            return line

        return line

    def _callers(self, frame: FrameType) -> tuple[tuple[str, int], ...]:
        found = []
        while (frame := frame.f_back) is not None and frame.f_code is not executor.launch.__code__:
            file = path(frame.f_code.co_filename)
            first = self._first_lines.get(file, {}).get(frame.f_lineno)
            if first is not None:
                found.append((file, first))
        return tuple(found)
