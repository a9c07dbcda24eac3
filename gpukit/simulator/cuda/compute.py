"""What each instruction of PTX makes of its operands: arrays with an element per thread, of the instruction's type.

Numbers of 32 bits are rounded as the GPU rounds them, after each instruction once. The approximations, such as ex2.approx, are
NumPy's here and better than a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpukit.simulator.cuda.ptx import TYPES, PtxError

Op = tuple[str, ...]
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def result_type(op: Op) -> str:
    """The type of what an instruction gives."""
    if op[0] == "cvt":
        return op[-2]
    if op[0] in ("mul", "mad") and op[1] == "wide":
        return _WIDE[op[-1]]
    return "b32" if op[0] in ("popc", "clz", "bfind") else "pred" if op[0] in ("setp", "testp") else op[-1]


def operand_types(op: Op, count: int) -> list[str]:
    """The types of `count` operands behind the first, which is the result."""
    kind = op[-1]
    kinds = [kind] * count
    if op[0] in ("shl", "shr"):
        kinds[1] = "u32"
    elif op[0] == "selp" or (op[0] == "setp" and count == 3):
        kinds[2] = "pred"
    elif op[0] in ("bfe", "bfi"):
        kinds[-2:] = ["u32", "u32"]
    elif op[0] == "shf":
        kinds[2] = "u32"
    elif op[0] == "mad" and op[1] == "wide":
        kinds[2] = _WIDE[kind]
    return kinds


def compute(op: Op, *x: np.ndarray) -> np.ndarray:
    """The result of an instruction. Raises PtxError for one that is not known here."""
    name = op[0]
    if name == "cvt":
        return _convert(op, *x)
    if name == "setp":
        return _compare(op, *x)
    floats = x[0].dtype.kind == "f"
    function = (_FLOATS if floats else _INTEGERS).get(name) or _ANY.get(name)
    if function is None:
        raise PtxError(f"has the instruction {'.'.join(op)}, which is not interpreted here")
    if not floats or name in _ANY:
        return function(op, *x)
    if "ftz" in op:
        x = tuple(map(_flushed, x))
    y = _rounded(op, function, x)
    if name == "div" and "approx" in op:  # the divisor's reciprocal is too small for a normal number
        y = np.where((np.abs(x[1]) > 2.0**126) & np.isfinite(x[1]), x[0] * np.copysign(np.float32(0), x[1]), y)
    if "sat" in op:
        y = np.where(np.isnan(y), 0, np.clip(y, 0, 1)).astype(y.dtype)
    return _flushed(y) if "ftz" in op else y


def _flushed(x: np.ndarray) -> np.ndarray:
    """Numbers too small for a normal float are 0."""
    if x.dtype != np.float32:
        return x
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _rounded(op: Op, function: Callable[..., np.ndarray], x: tuple[np.ndarray, ...]) -> np.ndarray:
    """Computed with twice the digits, which holds a product and a sum of two of them, and rounded as `op` says."""
    kind = x[0].dtype
    if kind == np.float64:
        return function(*x)
    wide = function(*(each.astype(np.float64) for each in x))
    return _to(wide, kind, op)


def _to(wide: np.ndarray, kind: np.dtype, op: Op) -> np.ndarray:
    """Rounded to the nearest, or to the neighbor that a modifier names: rz, rm and rp go to 0, down and up."""
    y = wide.astype(kind)
    down, up = np.array(-np.inf, kind), np.array(np.inf, kind)
    if "rm" in op or "rz" in op:
        y = np.where((y > wide) & ((wide > 0) | ("rm" in op)), np.nextafter(y, down), y)
    if "rp" in op or "rz" in op:
        y = np.where((y < wide) & ((wide < 0) | ("rp" in op)), np.nextafter(y, up), y)
    return y


def _convert(op: Op, x: np.ndarray) -> np.ndarray:
    to = np.dtype(TYPES[op[-2]])
    if x.dtype.kind == "f":
        x = _flushed(x) if "ftz" in op else x
        x = next((_ROUND[part](x) for part in op if part in _ROUND), x)
    if x.dtype.kind == "f" and to.kind != "f":  # beyond the last integer is the last integer
        info = np.iinfo(to)
        inside = np.where(np.isnan(x) | (x >= info.max) | (x <= info.min), 0, x).astype(to)
        return np.where(x >= info.max, np.array(info.max, to), np.where(x <= info.min, np.array(info.min, to), inside))
    if "sat" in op and to.kind == "f":
        x = np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(x.dtype)
    if "sat" in op and to.kind != "f":
        info = np.iinfo(to)
        return np.clip(x.astype(object), int(info.min), int(info.max)).astype(to)
    return _to(x, to, op) if to.kind == "f" else x.astype(to)


def _compare(op: Op, a: np.ndarray, b: np.ndarray, also: np.ndarray | None = None) -> np.ndarray:
    which = op[1]
    if which in ("num", "nan"):
        y = (np.isnan(a) | np.isnan(b)) == (which == "nan")
    elif a.dtype.kind == "f" and which.endswith("u") and which[:-1] in _COMPARE:
        y = _COMPARE[which[:-1]](a, b) | np.isnan(a) | np.isnan(b)
    else:
        y = _COMPARE[which](a, b)
        if a.dtype.kind == "f" and which == "ne":  # of NaN nothing is true
            y = y & ~(np.isnan(a) | np.isnan(b))
    if also is None:
        return y
    return {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[op[2]](y, also)


def _product(op: Op, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """mul.lo, .hi or .wide."""
    if op[1] == "wide":
        wide = TYPES[_WIDE[op[-1]]]
        return a.astype(wide) * b.astype(wide)
    if op[1] == "hi":
        return (a.astype(object) * b.astype(object) >> 8 * a.dtype.itemsize).astype(a.dtype)
    return a * b


def _quotient(op: Op, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Toward 0, as in C."""
    if a.dtype.kind == "u":
        return a // b
    down = a // b
    return down + ((a - down * b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


def _shift(op: Op, a: np.ndarray, by: np.ndarray) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    inside = np.minimum(by, bits - 1).astype(a.dtype)
    if op[0] == "shl":
        return np.where(by >= bits, 0, a << inside).astype(a.dtype)
    return np.where((by >= bits) & (op[-1][0] != "s"), 0, a >> inside).astype(a.dtype)


def _funnel(op: Op, low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
    by = (by & 31 if "wrap" in op else np.minimum(by, 32)).astype(np.uint64)
    both = high.astype(np.uint64) << np.uint64(32) | low
    return (both << by >> np.uint64(32) if "l" in op else both >> by).astype(np.uint32)


def _field(op: Op, a: np.ndarray, at: np.ndarray, count: np.ndarray) -> np.ndarray:
    at, count = (np.minimum(each & 255, 63).astype(np.uint64) for each in (at, count))
    bits = (a.astype(np.int64).view(np.uint64) >> at) & ((np.uint64(1) << count) - np.uint64(1))
    if op[-1][0] == "s":
        sign = (np.uint64(1) << count) >> np.uint64(1)
        bits = (bits ^ sign) - sign
    return bits.astype(a.dtype)


def _insert(op: Op, a: np.ndarray, into: np.ndarray, at: np.ndarray, count: np.ndarray) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    ones = np.where(
        count >= bits,
        ~np.zeros_like(a),
        (np.ones_like(a) << np.minimum(count, bits - 1).astype(a.dtype)) - np.ones_like(a),
    )
    shift = np.minimum(at, bits - 1).astype(a.dtype)
    return np.where(at >= bits, into, into & ~(ones << shift) | (a & ones) << shift)


def _bytes(op: Op, a: np.ndarray, b: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """prmt: four of the eight bytes of a and b; bit 3 of a choice repeats the byte's sign."""
    both = np.stack([a, b], 1).view(np.uint8)
    made = np.zeros((len(a), 4), np.uint8)
    for i in range(4):
        choice = chosen >> np.uint32(4 * i) & 15
        byte = both[np.arange(len(a)), choice & 7]
        made[:, i] = np.where(choice & 8, np.where(byte & 128, 255, 0), byte)
    return made.view(np.uint32)[:, 0]


_FLOATS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": lambda a, b, c: a * b + c,
    "mad": lambda a, b, c: a * b + c, "rcp": np.reciprocal, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a), "ex2": np.exp2,
    "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "min": np.fmin, "max": np.fmax,
}  # fmt: skip
_INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda op, a, b: a + b, "sub": lambda op, a, b: a - b, "mul": _product, "div": _quotient,
    "mad": lambda op, a, b, c: _product(op, a, b) + c, "rem": lambda op, a, b: a - _quotient(op, a, b) * b,
    "and": lambda op, a, b: a & b, "or": lambda op, a, b: a | b, "xor": lambda op, a, b: a ^ b, "not": lambda op, a: ~a,
    "cnot": lambda op, a: (a == 0).astype(a.dtype), "shl": _shift, "shr": _shift, "shf": _funnel, "bfe": _field,
    "bfi": _insert, "prmt": _bytes,
    "min": lambda op, a, b: np.minimum(a, b), "max": lambda op, a, b: np.maximum(a, b),
    "popc": lambda op, a: np.bitwise_count(a).astype(np.uint32),
    "clz": lambda op, a: (8 * a.dtype.itemsize - np.ceil(np.log2(a.astype(np.longdouble) + 1))).astype(np.uint32),
}  # fmt: skip
_ANY: dict[str, Callable[..., np.ndarray]] = {
    "mov": lambda op, a: a, "neg": lambda op, a: -a, "abs": lambda op, a: np.abs(a),
    "selp": lambda op, a, b, p: np.where(p, a, b), "copysign": lambda op, sign, a: np.copysign(a, sign),
}  # fmt: skip
