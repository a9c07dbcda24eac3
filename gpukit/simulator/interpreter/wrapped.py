"""Offsets that wrapped around in 32 bits. Most lead out of their tensor, where a bound shows them; a uint32 begins at 0 again, and
an int32 is positive again beyond 2^32: the tensor has an element there, and it is another one.

Where a launch asks for it, such numbers are marked, and what sums, products, shifts and comparisons make of them. A hash wraps
around on purpose: what a remainder, a division or a mask of bits makes of it is a number like any other.
"""

import numpy as np

_CAN_WRAP = frozenset((np.add, np.subtract, np.multiply, np.left_shift))


class Wrapped(np.ndarray):
    """An array with an element that wrapped around, or that was computed from one."""

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if "out" in kwargs:
            kwargs["out"] = _plain(kwargs["out"])
        result = getattr(ufunc, method)(*_plain(inputs), **kwargs)
        result = np.asarray(result)
        return result.view(Wrapped) if ufunc in _CAN_WRAP or result.dtype == np.bool_ else result


def marked(result: np.ndarray, function, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The result of a NumPy function of two arrays, marked where its 32 bits are too few."""
    if result.dtype not in (np.int32, np.uint32) or function not in _CAN_WRAP or isinstance(result, Wrapped):
        return result
    exact = function(_plain(left).astype(np.int64), _plain(right).astype(np.int64))
    return result if (exact == result).all() else result.view(Wrapped)


def narrowed(result: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Integers of 64 bits converted to 32, marked where these are too few."""
    if result.dtype not in (np.int32, np.uint32) or source.dtype != np.int64 or isinstance(result, Wrapped):
        return result
    return result if (result == source).all() else result.view(Wrapped)


def _plain(value):
    if isinstance(value, Wrapped):
        return value.view(np.ndarray)
    return type(value)(map(_plain, value)) if isinstance(value, (tuple, list)) else value
