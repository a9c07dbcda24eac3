"""NVIDIA's libdevice functions in the interpreter: those that NumPy or PyTorch has too, to a few units in the last place.

Triton checks the types of the arguments itself; what arrives here is the symbol of the library, such as "__nv_tanhf".
https://docs.nvidia.com/cuda/libdevice-users-guide/
"""

from __future__ import annotations

import numpy as np


class Unsupported(RuntimeError):
    """Something that the interpreter cannot run; the message says what to write instead."""


def _torch(name: str):
    def function(x):
        import torch
        from torch.utils._python_dispatch import _disable_current_modes

        at = torch.special if hasattr(torch.special, name) else torch
        # This is the kernel's arithmetic: whoever watches PyTorch's operations must not see it.
        with _disable_current_modes():
            return getattr(at, name)(torch.from_numpy(np.ascontiguousarray(x))).numpy()

    return function


erf = _torch("erf")  # NumPy has none, and Triton's own goes through Python element by element


def _round(x):
    """Halves away from zero, as C's round; NumPy's goes to even."""
    whole = np.trunc(x)
    return whole + np.copysign((np.abs(x - whole) >= 0.5).astype(x.dtype), x)


def _popc(x):
    return np.bitwise_count(x.view(f"u{x.itemsize}")).astype(np.int32)


def _clz(x):
    bits = 8 * x.itemsize
    value, zeros = x.view(f"u{x.itemsize}").astype(np.uint64), np.full(x.shape, bits, dtype=np.int32)
    for bit in range(bits):
        zeros[(value >> np.uint64(bit)) != 0] = bits - 1 - bit
    return zeros


_EQUAL = {
    "fabs": np.abs, "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint,
    "nearbyint": np.rint, "round": _round, "llrint": lambda x: np.rint(x).astype(np.int64),
    "llround": lambda x: _round(x).astype(np.int64),
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "rcbrt": lambda x: 1 / np.cbrt(x),
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(x.dtype.type(10), x), "expm1": np.expm1,
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "atan2": np.arctan2, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "sinpi": lambda x: np.sin(np.pi * np.fmod(x, 2)).astype(x.dtype),
    "cospi": lambda x: np.cos(np.pi * np.fmod(x, 2)).astype(x.dtype), "hypot": np.hypot,
    "pow": np.power, "powi": np.power, "fmod": np.fmod, "copysign": np.copysign, "nextafter": np.nextafter,
    "fdim": lambda x, y: np.maximum(x - y, 0), "fma": lambda x, y, z: (x.astype(np.longdouble) * y + z).astype(x.dtype),
    "ldexp": np.ldexp, "scalbn": np.ldexp, "logb": lambda x: np.frexp(x)[1].astype(x.dtype) - 1,
    "ilogb": lambda x: (np.frexp(x)[1] - 1).astype(np.int32), "saturate": lambda x: np.clip(x, 0, 1),
    "isnan": np.isnan, "isinf": np.isinf, "finite": np.isfinite, "signbit": np.signbit,
    "erf": erf, "erfc": _torch("erfc"), "erfinv": _torch("erfinv"), "erfcx": _torch("erfcx"),
    "lgamma": _torch("lgamma"), "normcdf": _torch("ndtr"), "normcdfinv": _torch("ndtri"),
    "j0": _torch("bessel_j0"), "j1": _torch("bessel_j1"), "y0": _torch("bessel_y0"), "y1": _torch("bessel_y1"),
    "cyl_bessel_i0": _torch("i0"), "cyl_bessel_i1": _torch("i1"),
    "popc": _popc, "popcll": _popc, "clz": _clz, "clzll": _clz,
    "float_as_int": lambda x: x.view(np.int32), "int_as_float": lambda x: x.view(np.float32),
    "float_as_uint": lambda x: x.view(np.uint32), "uint_as_float": lambda x: x.view(np.float32),
    "double_as_longlong": lambda x: x.view(np.int64), "longlong_as_double": lambda x: x.view(np.float64),
    "add_rn": np.add, "fadd_rn": np.add, "dadd_rn": np.add, "fsub_rn": np.subtract, "dsub_rn": np.subtract,
    "fmul_rn": np.multiply, "dmul_rn": np.multiply, "fdiv_rn": np.divide, "ddiv_rn": np.divide,
    "fsqrt_rn": np.sqrt, "dsqrt_rn": np.sqrt, "frcp_rn": np.reciprocal, "drcp_rn": np.reciprocal,
}  # fmt: skip
# Approximations differ from one GPU to the next, so no number is right; what to write instead.
_INSTEAD = {
    "fast_exp": "tl.exp", "fast_exp10": "tl.exp2(x * 3.3219281)", "fast_log": "tl.log", "fast_log2": "tl.log2",
    "fast_log10": "tl.log2(x) * 0.30103", "fast_sin": "tl.sin", "fast_cos": "tl.cos", "fast_tan": "libdevice.tan",
    "fast_tanh": "2 * tl.sigmoid(2 * x) - 1", "fast_pow": "tl.exp2(y * tl.log2(x))", "fast_fdivide": "x / y",
}  # fmt: skip


def evaluate(symbol: str, arguments: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """The function behind a symbol, on arrays of one shape. Raises Unsupported for one that is not in the table."""
    name = symbol.removeprefix("__nv_")
    # The fp32 form of a function ends in f, as erff and tanhf; a test of fp64 in d, as isnand.
    for base in (name, name.removesuffix("f"), name.removesuffix("d")):
        if base in _EQUAL:
            return np.asarray(_EQUAL[base](*arguments)).astype(dtype, copy=False)
    instead = _INSTEAD.get(name.removesuffix("f"), "tl operations, or PyTorch outside of the kernel")
    raise Unsupported(f"libdevice's {name} has no equal in the interpreter: write {instead}")
