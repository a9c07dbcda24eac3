"""What becomes of a single integer that a program of a sampled launch reads, such as the class of a row: where the kernel makes
an address or a mask of it, how. So it can be worked out for programs that have not run.

    target = tl.load(target_ptr + pid)
    tl.load(x_ptr + target, mask=target >= 0)       # address: add(x_ptr, multiply(target, 4)); mask: greater_equal(target, 0)

Everything that is computed with such an integer is a `Read`, as in unknown.py. What is done to it in any other way than by
these sums, products and comparisons, a branch above all, is noted as `running.now.lost`: then nothing is known of other programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpukit.simulator.interpreter import running


class Read(np.ndarray):
    """An array that depends on integers that were read. `how`, of a single number: (function, operands), where an operand is an
    expression like it, ("read", number of the access, dtype) or a number; None where that is not known."""

    how = None

    def __array_finalize__(self, other):
        self.how = None

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__" or "out" in kwargs:
            _lose()
        result = getattr(ufunc, method)(*map(_plain, inputs), **{k: _plain(v) for k, v in kwargs.items()})
        return _marked(result, None if kwargs else _expression(ufunc, inputs))

    def __array_function__(self, function, types, args, kwargs):
        result = function(*map(_plain, args), **{k: _plain(v) for k, v in kwargs.items()})
        if function is np.where:
            return _marked(result, _expression(np.where, args) if len(args) == 3 else None)
        if function not in (np.broadcast_to, np.reshape, np.expand_dims):
            _lose()
        return _marked(result, _how(args[0]) if getattr(result, "size", 0) == 1 else None)

    def astype(self, dtype, *args, **kwargs):
        result = _plain(self).astype(dtype, *args, **kwargs)
        return _marked(result, None if self.how is None else (_cast, self.how, np.dtype(dtype)))

    def __getitem__(self, key):
        _lose()
        return _plain(self)[key]

    def item(self, *args):
        _lose()
        return _plain(self).item(*args)

    def __bool__(self):
        _lose()
        return bool(_plain(self))

    def __int__(self):
        _lose()
        return int(_plain(self))

    __index__ = __int__

    def __float__(self):
        _lose()
        return float(_plain(self))

    def tolist(self):
        _lose()
        return _plain(self).tolist()


def read(data: np.ndarray, position: int, known: bool) -> Read:
    """A single integer that the access of the running program with this number has read. `known`: whatever else the program has
    read, it reads this."""
    return _marked(data, ("read", position, data.dtype) if known else None)


def from_memory(addresses: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What lies at these addresses, which somebody has found to be inside of a tensor."""
    values = np.zeros(addresses.size, dtype=dtype)
    load = running.interpreter_module()._interpreter.load
    return load(addresses.astype(np.uint64), np.ones(addresses.size, dtype=bool), values, dtype)


def _cast(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return value.astype(dtype)


def plain_array(data: np.ndarray | None) -> np.ndarray | None:
    """The same numbers, of which nobody is to know any more what they depend on."""
    return data.view(np.ndarray) if isinstance(data, Read) else data


def _lose() -> None:
    if running.now is not None:
        running.now.lost = True


def _plain(value):
    if isinstance(value, Read):
        return value.view(np.ndarray)
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    return value


def _marked(value, how) -> Read:
    if not isinstance(value, (np.ndarray, np.generic)):
        _lose()
        return value
    marked = np.asarray(value).view(Read)
    marked.how = how if marked.size == 1 else None
    return marked


def _how(value):
    """Of an operand: its expression. A number that depends on nothing that was read stands for itself."""
    if isinstance(value, Read):
        return value.how
    if isinstance(value, np.ndarray) and value.size == 1:
        return value.reshape(1)
    return value if isinstance(value, (bool, int, float, np.generic)) else None


def _expression(function: Callable, operands) -> tuple | None:
    found = [_how(value) for value in operands]
    return None if any(how is None for how in found) else (function, *found)


@dataclass(frozen=True)
class Guided:
    """An access of one lane whose address or mask depends on integers that were read before it. `position`: which access of
    its program it is; `address` and `mask` are expressions, as Read has them."""

    position: int
    address: object
    mask: object


def guided(position: int, pointers: np.ndarray, mask: np.ndarray | None) -> Guided | None:
    """What an access depends on; None where on nothing that was read. Where that is not an expression, it is noted as lost."""
    if not isinstance(pointers, Read) and not isinstance(mask, Read):
        return None
    found = Guided(position, _how(pointers), True if mask is None else _how(mask))
    if found.address is None or found.mask is None or pointers.size != 1:
        _lose()
    return found


def outline(how) -> object:
    """An expression without the numbers of one program: two programs whose expressions have one outline do the same."""
    if isinstance(how, np.ndarray):
        return "number", how.dtype
    if isinstance(how, tuple):
        return tuple(map(outline, how))
    return type(how), how


def numbers(how) -> list[np.ndarray]:
    """The numbers of an expression that are this program's own, in order."""
    if isinstance(how, np.ndarray):
        return [how]
    return [number for part in how for number in numbers(part)] if isinstance(how, tuple) else []


def evaluate(how, own: list[np.ndarray], reads: Callable[[int, np.dtype], np.ndarray]):
    """The expression for many programs: `own` holds their numbers in place of its own (from the front, which are taken away), and
    reads(position, dtype) is what each has read by that access."""
    if isinstance(how, np.ndarray):
        return own.pop(0)
    if not isinstance(how, tuple):
        return how
    function, *operands = how
    if function == "read":
        return reads(*operands)
    return function(*[evaluate(operand, own, reads) for operand in operands])
