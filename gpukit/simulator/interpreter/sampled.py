"""Runs a few programs of each launch on addresses alone: nothing is computed, stored or recorded, but what leaves its tensor
is found, also in tensors that no memory could hold."""

from __future__ import annotations

from gpukit import launches
from gpukit.simulator.interpreter import layer

_MOST = 4_000  # accesses of a launch


class TooLong(Exception):
    """A few programs share the work of a grid; where the last of them ends would take too long to find out."""


class Sampled(launches.Onlooker):
    """A context manager: inside, `sample` programs of each launch run, or more where these differ, spread over its grid. Raises
    MemoryFault, and TooLong for programs that make more accesses than anybody wants to wait for.

    silent   (file, line) of a store in each launch whose programs came to their stores and had every lane masked off
    """

    marking = True

    def __init__(self, sample: int):
        self.sample = sample
        self._left = 0
        self.silent: list[tuple[str, int]] = []
        self._masked: tuple[str, int] | None = None  # the launch's first store of no lane
        self._stored = False

    def __enter__(self) -> Sampled:
        layer.install()
        return super().__enter__()

    def begin(self, call) -> Sampled:
        self._left = _MOST
        self._masked, self._stored = None, False
        return self

    def access(self, access, program: int, file: str, line: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise TooLong
        if access.kind != "load":
            self._stored = self._stored or access.lanes > 0
            self._masked = self._masked or (file, line)

    def wrapped(self, fault) -> None:
        raise fault

    def end(self) -> None:
        if self._masked and not self._stored:
            self.silent.append(self._masked)
