"""Short ways for what kernels do most: sums, products and comparisons of numbers of one type, and pointers plus offsets.

Triton's own way works out the types and the shape of both operands at each operation, in twenty calls of Python. Where both
have one type, or the other is a plain number that takes it on, there is nothing to work out, and NumPy broadcasts as Triton
does. Everything else, and everything that Triton refuses, goes Triton's own way.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl

from gpukit.simulator.interpreter import running
from gpukit.simulator.interpreter.running import interpreter_module
from gpukit.simulator.interpreter.wrapped import marked

_SIGNED = (tl.int32, tl.int64)
_FLOATS = (tl.float16, tl.float32, tl.float64)
# By identity: Triton's hash and == of a type are written in Python. A copy of a type goes Triton's own way.
_NUMBERS = {id(dtype): np.dtype(dtype.name.replace("fp", "float")) for dtype in (*_SIGNED, *_FLOATS)}
_TAKES_INTEGERS = {id(dtype) for dtype in (tl.int32, tl.int64, tl.float32)}
_TAKES_FLOATS = {id(tl.float32)}
_OFFSETS = {id(dtype) for dtype in _SIGNED}
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_joined: dict[tuple, list[int] | None] = {}  # two shapes -> that of both together

_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


def bind(scope) -> None:
    """For the time of a launch: the operators of Triton's tensors. What stands there now is Triton's own way."""
    for name, function in _ARITHMETIC.items():
        for prefix in ("", "r"):
            plain = getattr(tl.tensor, f"__{prefix}{name}__")
            scope.set_attr(tl.tensor, f"__{prefix}{name}__", _operator(plain, function, reflected=bool(prefix)))
    for name, function in _COMPARISONS.items():
        scope.set_attr(tl.tensor, f"__{name}__", _operator(getattr(tl.tensor, f"__{name}__"), function, truth=True))
    scope.set_attr(tl.tensor, "__add__", _with_pointers(tl.tensor.__add__))
    scope.set_attr(tl.core, "_unwrap_if_constexpr", _unwrapped(tl.core._unwrap_if_constexpr))


def _operator(plain, function, reflected: bool = False, truth: bool = False):
    tensor, block_type, handle = tl.tensor, tl.block_type, interpreter_module().TensorHandle

    def operator(self, other):
        dtype = self.dtype
        kind = _NUMBERS.get(id(dtype))
        if kind is None:
            return plain(self, other)
        type_ = self.type
        left = self.handle.data
        if other.__class__ is tensor:
            if other.dtype is not dtype:
                return plain(self, other)
            type_ = _type_of_both(self, other, dtype)
            right = other.handle.data
        else:
            right = _number(other, dtype, kind)
        if type_ is None or right is None:
            return plain(self, other)
        data = function(right, left) if reflected else function(left, right)
        if running.now is not None and running.now.marking:
            data = marked(data, function, right, left) if reflected else marked(data, function, left, right)
        if truth:
            dtype = tl.int1
            type_ = block_type(dtype, type_.shape) if type_.__class__ is block_type else dtype
        return tensor(handle(data, dtype), type_)

    return operator


def _with_pointers(plain):
    """Pointers plus offsets. `plain` adds numbers."""
    tensor, pointer_type, builder = tl.tensor, tl.pointer_type, interpreter_module().interpreter_builder

    def add(self, other):
        if self.dtype.__class__ is not pointer_type or other.__class__ is not tensor or id(other.dtype) not in _OFFSETS:
            return plain(self, other)
        type_ = _type_of_both(self, other, self.dtype)
        return plain(self, other) if type_ is None else tensor(builder.create_addptr(self.handle, other.handle), type_)

    return add


def _unwrapped(plain):
    """The value of a constant, and everything else as it is. Triton asks this of each argument of each operation, and looks first
    whether it is a list."""
    constant = tl.constexpr
    others = {tl.tensor, tl.dtype, tl.pointer_type, tl.block_type, bool, int, float, str, type(None)}

    def unwrap(o):
        kind = o.__class__
        return o if kind in others else o.value if kind is constant else plain(o)

    return unwrap


def _type_of_both(left, right, dtype):
    """The type of a result of elements `dtype`; None where the shapes do not fit, or have not the same number of axes."""
    a, b = left.type, right.type
    if b.__class__ is not tl.block_type:
        return a
    if a.__class__ is not tl.block_type:
        return tl.block_type(dtype, b.shape)
    if a.shape is b.shape:
        return a
    key = left.handle.data.shape, right.handle.data.shape
    if key not in _joined:
        fits = len(key[0]) == len(key[1]) and all(m == n or 1 in (m, n) for m, n in zip(*key, strict=True))
        _joined[key] = [max(m, n) for m, n in zip(*key, strict=True)] if fits else None
    shape = _joined[key]
    return None if shape is None else tl.block_type(dtype, shape)


def _number(value, dtype, kind: np.dtype):
    """A plain number as the operand that Triton makes of it beside numbers of that type; None where that is not so simple."""
    if value.__class__ is tl.constexpr:
        value = value.value
    if value.__class__ is int:
        if id(dtype) not in _TAKES_INTEGERS or not -(2**31) <= value < 2**31:
            return None
    elif value.__class__ is float:
        # Small and large ones have 64 bits. A zero may be negative, which Triton forgets before 3.9.
        if id(dtype) not in _TAKES_FLOATS or not _SMALLEST <= abs(value) <= _LARGEST:
            return None
    else:
        return None
    return np.array([value], dtype=kind)


def of_one_shape(plain):
    """Operands that need no broadcasting. Blocks of one shape have one object for it (type_cache.py)."""

    def broadcast_impl_value(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a.__class__ is b.__class__ and (a.__class__ is not tl.block_type or a.shape is b.shape):
            return lhs, rhs
        return plain(self, lhs, rhs)

    return broadcast_impl_value


def of_one_type(plain):
    """A cast to the type that a tensor has."""

    def cast(self, input, dst_ty, *rest):
        return input if input.type.scalar is dst_ty.scalar else plain(self, input, dst_ty, *rest)

    return cast


def direct(meaning):
    """What Triton's interpreter puts in the place of a function of its language, without two calls in between: one hands on the
    interpreter, the other looks whether that was done."""
    builtin = (getattr(meaning, "__kwdefaults__", None) or {}).get("member")
    function = getattr(builtin, "__wrapped__", None)
    if not tl.core.is_builtin(builtin) or function is None:
        return meaning
    semantic = interpreter_module().interpreter_semantic

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call
