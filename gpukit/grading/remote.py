"""The simulated GPU of an exercise's `setup` lies with the judge; in the learner's process are only its names.

A benchmark that is to find out a time runs in one process with what it measures, and what lies in that process Python can
read. So the judge makes the GPU and the programs, and the worker gets objects that know a number each: what is done with them
is written down and sent, all of it as soon as a call has to answer something. The judge believes nothing of what comes: what
is no call of these raises wire.Malformed.
"""

from __future__ import annotations

import importlib
import inspect
import socket
from collections.abc import Callable
from typing import Any

from gpukit.grading import wire
from gpukit.simulator.queue_model import Buffer, Device, Event

_MOST_AT_ONCE = 2_000  # calls in one message
_MOST = 500_000  # calls for one case: whoever makes more of them is in a loop without an end
_ARGUMENTS = {
    Device: dict.fromkeys(("clock", "synchronize", "event", "flush_l2"), ())
    | dict.fromkeys(("random", "zeros"), (int,)),
    Event: {"elapsed_us": (Event,)},
}


# ---- in the judge -------------------------------------------------------------------------------------------------
class Things:
    """What `setup`, "module:function", makes of a case's arguments. `described` is what the worker is told of them."""

    def __init__(self, setup: str, args: tuple):
        module, _, name = setup.partition(":")
        things, self._counts = getattr(importlib.import_module(module), name)(*args)
        self.described = tuple(map(_described, things))
        self._known: list[Any] = list(things)  # then what each call returned, by the call's number

    @property
    def counts(self) -> dict[str, Any]:
        return dict(vars(self._counts))

    def carry_out(self, calls: list) -> tuple[str, Any]:
        """("gives", number) of the last call, or ("raises", text). Raises TimeoutError after very many calls."""
        given: Any = None
        for call in calls:
            if len(self._known) > _MOST:
                raise TimeoutError
            try:
                given = self._call(call)()
            except RuntimeError as error:
                return "raises", str(error)
            self._known.append(given)
        return "gives", given if type(given) is float else 0.0

    def _call(self, call: Any) -> Callable[[], Any]:
        match call:
            case (int(at), str(name), *args) if 0 <= at < len(self._known):
                thing = self._known[at]
                if inspect.isfunction(thing) and not name:
                    kinds, does = (Buffer,) * _arity(thing), thing
                elif name in _ARGUMENTS.get(type(thing), ()):
                    kinds, does = _ARGUMENTS[type(thing)][name], getattr(thing, name)
                else:
                    raise wire.Malformed("it asks for what the device cannot do")
                if len(args) == len(kinds):
                    values = list(map(self._argument, args, kinds))
                    return lambda: does(*values)
        raise wire.Malformed("it asks for what the device cannot do")

    def _argument(self, value: Any, kind: type) -> Any:
        if type(value) is int and 0 <= value < 1 << 63:
            if kind is int:
                return value
            if value < len(self._known) and type(self._known[value]) is kind:
                return self._known[value]
        raise wire.Malformed("it asks for what the device cannot do")


def _arity(function: Callable) -> int:
    return len(inspect.signature(function).parameters)


def _described(thing: Any) -> Any:
    if isinstance(thing, Device):
        return "device"
    return f"function {_arity(thing)}" if inspect.isfunction(thing) else thing


# ---- in the worker ------------------------------------------------------------------------------------------------
def call(function: Callable[[tuple], Any], described: tuple, sock: socket.socket) -> Any:
    """function(arguments), with what the judge described as arguments."""
    line = _Line(sock, len(described))
    result = function(tuple(_thing(line, at, each) for at, each in enumerate(described)))
    line.answer()
    return result


class _Line:
    """What is to be done at the judge's, in its order."""

    def __init__(self, sock: socket.socket, things: int):
        self._sock, self._number, self._calls = sock, things, []

    def tell(self, at: int, name: str, *args: int) -> int:
        """Write a call down. The number of what it returns."""
        self._calls.append((at, name, *args))
        self._number += 1
        if len(self._calls) >= _MOST_AT_ONCE:
            self.answer()
        return self._number - 1

    def ask(self, at: int, name: str, *args: int) -> float:
        """Have a call, and all before it, carried out."""
        self._calls.append((at, name, *args))
        self._number += 1
        return self.answer()

    def answer(self) -> float:
        calls, self._calls = self._calls, []
        wire.send(self._sock, calls)
        how, value = wire.receive(self._sock)
        if how == "raises":
            self._number -= 1
            raise RuntimeError(value)
        return value


def _thing(line: _Line, at: int, described: Any) -> Any:
    if not isinstance(described, str):
        return described
    if described == "device":
        return _Device(line, at)
    if described == "function 0":
        return lambda: line.tell(at, "") and None

    def program(x):
        line.tell(at, "", _at(x, Buffer, "program: x must be a buffer that device.random or device.zeros made"))

    return program


class _Device:
    def __init__(self, line: _Line, at: int):
        self._line, self._at = line, at

    def clock(self) -> float:
        return self._line.ask(self._at, "clock")

    def synchronize(self) -> None:
        self._line.tell(self._at, "synchronize")

    def event(self) -> Any:
        return _Event(self._line, self._line.tell(self._at, "event"))

    def flush_l2(self) -> None:
        self._line.tell(self._at, "flush_l2")

    def random(self, nbytes: int) -> Buffer:
        return self._buffer("random", nbytes)

    def zeros(self, nbytes: int) -> Buffer:
        return self._buffer("zeros", nbytes)

    def _buffer(self, name: str, nbytes: int) -> Buffer:
        nbytes = int(nbytes)
        if not 0 <= nbytes < 1 << 63:
            raise ValueError(f"device.{name}: nbytes must be from 0 to 2^63 - 1, got {nbytes}")
        buffer = Buffer(nbytes, zeros=name == "zeros")
        buffer._at = self._line.tell(self._at, name, nbytes)
        return buffer


class _Event:
    def __init__(self, line: _Line, at: int):
        self._line, self._at = line, at

    def elapsed_us(self, end: Any) -> float:
        return self._line.ask(self._at, "elapsed_us", _at(end, _Event, "elapsed_us: `end` must be an event"))


def _at(value: Any, kind: type, otherwise: str) -> int:
    if not isinstance(value, kind) or not hasattr(value, "_at"):
        raise TypeError(f"{otherwise}, got {type(value).__name__}")
    return value._at
