"""Numbers that a sampled launch does not know: integers of a tensor without values, floats, of which it reads none, and what
atomics answer. What is computed from them is as unknown.

They count as 0, and a launch that uses one as an address, a mask or a bound says so: what a gather moves depends on its indices.
"""

import numpy as np

from gpukit.simulator.interpreter import running
from gpukit.simulator.interpreter.faults import UnknownFault
from gpukit.simulator.interpreter.frames import where

_MOST_TURNS = 10_000  # of a loop of one launch that looks at an atomic's answer; no lock of a program alone takes more


class Unknown(np.ndarray):
    """An array whose values nobody knows; `source` is the parameter that they were loaded from, `why` as UnknownFault has it."""

    def __array_finalize__(self, other):
        self.source, self.why = getattr(other, "source", ""), getattr(other, "why", "")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if "out" in kwargs:
            kwargs["out"] = _plain(kwargs["out"])
        return _marked(getattr(ufunc, method)(*_plain(inputs), **kwargs), *_origin((self, *inputs)))

    def __array_function__(self, function, types, args, kwargs):
        return _marked(function(*_plain(args), **_plain(kwargs)), self.source, self.why)


def unknown(data: np.ndarray, source: str, why: str = "no values") -> Unknown:
    """The array, marked."""
    marked = data.view(Unknown)
    marked.source, marked.why = source, why
    return marked


def must_be_known(data, what: str) -> None:
    """Tell the watchers of a launch that depends on what a tensor without values holds. Raises UnknownFault if one minds."""
    if isinstance(data, Unknown):
        file, line = where()
        place = dict(source=data.source, program=running.now.memory.program, file=file, line=line)
        if data.why == "atomic":
            turns = running.now.answers[file, line] = running.now.answers.get((file, line), 0) + 1
            if turns > _MOST_TURNS:
                raise UnknownFault(what=what, why="endless", **place)
        fault = UnknownFault(what=what, why=data.why, **place)
        for recorder in running.now.recorders:
            recorder.unknown(fault)


def _origin(arrays) -> tuple[str, str]:
    """Source and why of the first that has them; what stays unknown for every answer of an atomic goes before that."""
    found = [(array.source, array.why) for array in arrays if isinstance(array, Unknown) and array.source]
    return next((origin for origin in found if origin[1] != "atomic"), found[0] if found else ("", ""))


def _plain(value):
    if isinstance(value, Unknown):
        return value.view(np.ndarray)
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _marked(value, source: str, why: str):
    if isinstance(value, (np.ndarray, np.generic)):
        return unknown(np.asarray(value), source, why)
    if isinstance(value, (tuple, list)):
        return type(value)(_marked(item, source, why) for item in value)
    return value
