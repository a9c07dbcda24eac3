"""Integers that a sampled launch cannot read, because their tensor has no values: what is computed from them is as unknown.

They count as 0, and a launch that uses one as an address, a mask or a bound says so: what a gather moves depends on its indices.
"""

import numpy as np

from gpukit.simulator.interpreter import running
from gpukit.simulator.interpreter.faults import UnknownFault
from gpukit.simulator.interpreter.frames import where


class Unknown(np.ndarray):
    """An array whose values nobody knows; `source` is the parameter that they were loaded from."""

    def __array_finalize__(self, other):
        self.source = getattr(other, "source", "")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if "out" in kwargs:
            kwargs["out"] = _plain(kwargs["out"])
        return _marked(getattr(ufunc, method)(*_plain(inputs), **kwargs), _source((self, *inputs)))

    def __array_function__(self, function, types, args, kwargs):
        return _marked(function(*_plain(args), **_plain(kwargs)), _source((self,)))


def unknown(data: np.ndarray, source: str) -> Unknown:
    """The array, marked."""
    marked = data.view(Unknown)
    marked.source = source
    return marked


def must_be_known(data, what: str) -> None:
    """Tell the watchers of a launch that depends on what a tensor without values holds. Raises UnknownFault if one minds."""
    if isinstance(data, Unknown):
        file, line = where()
        fault = UnknownFault(what=what, source=data.source, program=running.now.memory.program, file=file, line=line)
        for recorder in running.now.recorders:
            recorder.unknown(fault)


def _source(arrays) -> str:
    return next((array.source for array in arrays if isinstance(array, Unknown) and array.source), "")


def _plain(value):
    if isinstance(value, Unknown):
        return value.view(np.ndarray)
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _marked(value, source: str):
    if isinstance(value, (np.ndarray, np.generic)):
        return unknown(np.asarray(value), source)
    if isinstance(value, (tuple, list)):
        return type(value)(_marked(item, source) for item in value)
    return value
