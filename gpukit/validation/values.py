"""The interpreter's numbers against a GPU's: small kernels that run in both, and what the GPU returned on record.

`python -m gpukit.validation.values FILE` runs them where it is (on a GPU, or in the interpreter) and keeps the results;
`--measure` does so on the GPU and puts them into gpukit/results/<gpu>/values.npz, which a test holds the interpreter to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

N = 256


@dataclass(frozen=True)
class Value:
    """One row: `run(device)` returns a tensor. `ulps` is how far the interpreter may be off, in units in the last place of
    the result's dtype, 0 for the same bits; `relative` likewise as a fraction of the largest element."""

    name: str
    run: Callable[[str], torch.Tensor]
    ulps: float = 0
    relative: float = 0


VALUES: dict[str, Value] = {}


def value(name: str, ulps: float = 0, relative: float = 0):
    def register(run):
        VALUES[name] = Value(name, run, ulps, relative)
        return run

    return register


def _normal(device: str, *shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def _special(device: str, dtype=torch.float32) -> torch.Tensor:
    """Numbers at which formats end, and halves, which decide how they are rounded."""
    inf, nan = float("inf"), float("nan")
    x = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        1.5,
        2.5,
        -2.5,
        inf,
        -inf,
        nan,
        3.4e38,
        -3.4e38,
        1e-40,
        65504.0,
        65520.0,
        448.0,
        464.0,
    ]
    x += [
        480.0,
        1e30,
        57344.0,
        61440.0,
        2.0**-9,
        2.0**-10,
        3 * 2.0**-10,
        2147483647.0,
        4294967296.0,
        -2147483904.0,
        1e10,
    ]
    bits = torch.randint(-(2**31), 2**31, (N - 2 * len(x),), generator=torch.Generator().manual_seed(5)).int()
    half = torch.tensor([1 + (2 * i + 1) * 2.0**-9 for i in range(len(x))])  # halfway between two bf16 numbers
    return torch.cat([torch.tensor(x), half, bits.view(torch.float32)]).to(dtype).to(device)


@triton.jit
def dot(a_ptr, b_ptr, y_ptr, PRECISION: tl.constexpr, FP8: tl.constexpr):
    i = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    if FP8:
        a, b = a.to(tl.float8e4nv), b.to(tl.float8e4nv)
    tl.store(y_ptr + i, tl.dot(a, b, input_precision=PRECISION))


def _dot(dtype, precision=None, fp8=False):
    def run(device):
        a, b = _normal(device, 64, 64, seed=1, dtype=dtype), _normal(device, 64, 64, seed=2, dtype=dtype)
        y = torch.empty(64, 64, device=device)
        dot[(1,)](a, b, y, PRECISION=precision, FP8=fp8)
        return y

    return run


value("dot fp32, default precision", relative=2e-6)(_dot(torch.float32))
value("dot fp32, ieee", relative=2e-6)(_dot(torch.float32, "ieee"))
value("dot fp32, tf32x3", relative=4e-6)(_dot(torch.float32, "tf32x3"))
value("dot fp16", relative=2e-6)(_dot(torch.float16))
value("dot bf16", relative=2e-6)(_dot(torch.bfloat16))
value("dot fp8", relative=2e-4)(_dot(torch.float16, fp8=True))  # the sums of Hopper's fp8 tensor cores are shorter


@triton.jit
def elementwise(a_ptr, b_ptr, y_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + offs), tl.load(b_ptr + offs)
    if OP == "add":
        y = a + b
    elif OP == "mul":
        y = a * b
    elif OP == "div":
        y = a / b
    elif OP == "div_rn":
        y = tl.div_rn(a, b)
    elif OP == "fma":
        y = tl.fma(a, b, a)
    elif OP == "mul_add":
        y = a * b + a
    elif OP == "maximum":
        y = tl.maximum(a, b)
    elif OP == "maximum_nan":
        y = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "clamp":
        y = tl.clamp(a, -0.5, 0.5)
    elif OP == "where":
        y = tl.where(a < b, a, b)
    elif OP == "exp":
        y = tl.exp(a)
    elif OP == "exp2":
        y = tl.exp2(a)
    elif OP == "log":
        y = tl.log(tl.abs(a))
    elif OP == "sqrt":
        y = tl.sqrt(tl.abs(a))
    elif OP == "rsqrt":
        y = tl.rsqrt(tl.abs(a))
    elif OP == "sigmoid":
        y = tl.sigmoid(a)
    elif OP == "sin":
        y = tl.sin(a)
    elif OP == "erf":
        y = tl.erf(a)
    elif OP == "floor":
        y = tl.floor(a)
    elif OP == "tanh":
        y = libdevice.tanh(a)
    elif OP == "pow":
        y = libdevice.pow(tl.abs(a), b)
    elif OP == "log1p":
        y = libdevice.log1p(tl.abs(a))
    elif OP == "expm1":
        y = libdevice.expm1(a)
    elif OP == "rint":
        y = libdevice.rint(a * 8)
    elif OP == "round":
        y = libdevice.round(a * 8)
    elif OP == "cumsum":
        y = tl.cumsum(a, 0)
    elif OP == "sort":
        y = tl.sort(a)
    elif OP == "flip":
        y = tl.flip(a, 0)
    elif OP == "rand":
        y = tl.rand(7, offs)
    elif OP == "randn":
        y = tl.randn(7, offs)
    elif OP == "int32":
        y = a.to(tl.int32)
    elif OP == "uint8":
        y = a.to(tl.uint8)
    elif OP == "int_div":
        y = a // b
    elif OP == "int_mod":
        y = a % b
    elif OP == "wrap":
        y = a * 65537 * 65537 + 2147483647
    elif OP == "umulhi":
        y = tl.umulhi(a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True))
    elif OP == "fp8e4nv":
        y = a.to(tl.float8e4nv).to(tl.float32)
    elif OP == "fp8e5":
        y = a.to(tl.float8e5).to(tl.float32)
    tl.store(y_ptr + offs, y)


def _elementwise(op, a=_normal, b=_normal, dtype=torch.float32, out=None):
    def run(device):
        x = a(device, N, seed=1, dtype=dtype) if a is _normal else a(device, dtype)
        z = b(device, N, seed=2, dtype=dtype) if b is _normal else b(device, dtype)
        y = torch.empty(N, dtype=out or dtype, device=device)
        elementwise[(1,)](x, z, y, OP=op, BLOCK=N)
        return y

    return run


def _integers(device, dtype):
    x = torch.randint(-(2**31), 2**31, (N,), generator=torch.Generator().manual_seed(3))
    x[:8] = torch.tensor([7, -7, 7, -7, 1, -1, 2**31 - 1, -(2**31) + 1])
    return x.to(dtype).to(device)


def _divisors(device, dtype):
    x = torch.randint(1, 1000, (N,), generator=torch.Generator().manual_seed(4))
    x[:8] = torch.tensor([2, 2, -2, -2, 3, 3, 7, 7])
    return x.to(dtype).to(device)


for _op in ("add", "mul", "div_rn", "fma", "maximum", "maximum_nan", "clamp", "where", "floor", "sort", "flip", "rand"):
    value(f"{_op} fp32")(_elementwise(_op))
# tl.exp is the fast one of CUDA, whose error is 2 + 1.173 |x| ulps at most: 6 where |x| < 4, 105 where e^x is just finite.
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#intrinsic-functions
for _op, _ulps in (("div", 2), ("exp", 6), ("exp2", 2), ("log", 2), ("sqrt", 2), ("rsqrt", 2), ("sigmoid", 4)):
    value(f"{_op} fp32", ulps=_ulps)(_elementwise(_op))
for _op in ("sin", "erf", "tanh", "pow", "log1p", "expm1", "randn"):
    value(f"{_op} fp32", ulps=8)(_elementwise(_op))
for _op in ("rint", "round"):
    value(f"libdevice {_op} fp32")(_elementwise(_op))
value("a * b + a fp32: the compiler fuses", ulps=2, relative=1e-7)(_elementwise("mul_add"))
value("cumsum fp32", relative=1e-6)(_elementwise("cumsum"))
for _op in ("add", "mul", "fma", "maximum", "clamp", "where"):
    value(f"{_op} bf16")(_elementwise(_op, dtype=torch.bfloat16))
value("div bf16", ulps=1)(_elementwise("div", dtype=torch.bfloat16))
for _op in ("add", "mul", "maximum"):
    value(f"{_op} fp16")(_elementwise(_op, dtype=torch.float16))
value("maximum with NaN and infinities")(_elementwise("maximum", a=_special))
value("exp of special numbers", ulps=105)(_elementwise("exp", a=_special))
value("fp32 to bf16")(
    _elementwise("where", a=_special, b=lambda device, dtype: _special(device, dtype), out=torch.bfloat16)
)
value("fp32 to fp16")(
    _elementwise("where", a=_special, b=lambda device, dtype: _special(device, dtype), out=torch.float16)
)
value("fp32 to int32")(_elementwise("int32", a=_special, out=torch.int32))
value("bf16 to int32")(_elementwise("int32", a=_special, dtype=torch.bfloat16, out=torch.int32))
value("fp32 to fp8e4nv and back")(_elementwise("fp8e4nv", a=_special))
value("fp32 to fp8e5 and back")(_elementwise("fp8e5", a=_special))
value("fp16 to fp8e4nv and back")(_elementwise("fp8e4nv", a=_special, dtype=torch.float16, out=torch.float32))
value("int32 division")(_elementwise("int_div", a=_integers, b=_divisors, dtype=torch.int32))
value("int32 remainder")(_elementwise("int_mod", a=_integers, b=_divisors, dtype=torch.int32))
value("int32 wraps")(_elementwise("wrap", a=_integers, dtype=torch.int32, b=_divisors))
value("umulhi")(_elementwise("umulhi", a=_integers, b=_integers, dtype=torch.int32))


@triton.jit
def reduce(x_ptr, y_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
    if OP == "sum":
        y = tl.sum(x, 1)
    elif OP == "max":
        y = tl.max(x, 1)
    elif OP == "argmax":
        y = tl.argmax(x, 1)
    elif OP == "argmin":
        y = tl.argmin(x, 1)
    tl.store(y_ptr + tl.arange(0, BLOCK), y)


def _reduce(op, dtype=torch.float32, out=None, nan=False):
    def run(device):
        x = _normal(device, 64, 64, seed=6, dtype=dtype)
        if nan:
            x[::4, ::8] = float("nan")
            x[1] = float("nan")
        y = torch.empty(64, dtype=out or dtype, device=device)
        reduce[(1,)](x, y, OP=op, BLOCK=64)
        return y

    return run


value("sum fp32", relative=1e-6)(_reduce("sum"))
value("sum fp16", relative=4e-3)(_reduce("sum", torch.float16))
value("sum bf16", relative=3e-2)(_reduce("sum", torch.bfloat16))
value("max fp32 with NaN")(_reduce("max", nan=True))
value("max bf16 with NaN")(_reduce("max", torch.bfloat16, nan=True))
value("argmax fp32")(_reduce("argmax", out=torch.int32))
value("argmin fp32")(_reduce("argmin", out=torch.int32))


@triton.jit
def atomics(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + offs % 8, tl.load(x_ptr + offs))


def _atomics(dtype):
    def run(device):
        x = (_normal(device, N, seed=7) * 4).round().to(dtype)  # whole numbers: the order does not matter
        y = torch.zeros(8, dtype=dtype, device=device)
        atomics[(1,)](x, y, BLOCK=N)
        return y

    return run


value("atomic add fp32")(_atomics(torch.float32))
value("atomic add fp16")(_atomics(torch.float16))
value("atomic add bf16")(_atomics(torch.bfloat16))


@triton.jit
def arguments(x_ptr, y_ptr, scale, shift, flag, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs) * scale + shift
    if flag:
        x = x + 1
    tl.store(y_ptr + offs, x)


@value("float, integer and bool arguments", ulps=1)
def _(device):
    x, y = _normal(device, N), torch.empty(N, device=device)
    arguments[(1,)](x, y, 0.1, 3, True, BLOCK=N)
    return y


def distance(got: np.ndarray, want: np.ndarray, dtype: str) -> tuple[float, float]:
    """How far two arrays of bits are apart: in ulps of that dtype, and relative to the largest finite element. NaN equals
    NaN; infinite where one is NaN or infinite and the other is not."""
    a, b = (np.frombuffer(x.tobytes(), dtype=np.uint8) for x in (got, want))
    x, y = (torch.from_numpy(v.copy()).view(getattr(torch, dtype)) for v in (a, b))
    if not x.dtype.is_floating_point:
        off = (x.long() - y.long()).abs()
        return float(off.max()), float(off.max()) / max(1.0, float(y.long().abs().max()))
    x, y, eps = x.double(), y.double(), torch.finfo(x.dtype).eps
    same = (x == y) | (torch.isnan(x) & torch.isnan(y))
    if bool(same.all()):
        return 0.0, 0.0
    if not bool(torch.isfinite(x[~same]).all() and torch.isfinite(y[~same]).all()):
        return float("inf"), float("inf")
    off = torch.where(same, 0.0, (x - y).abs())
    tiny = torch.finfo(getattr(torch, dtype)).tiny
    ulp = torch.exp2(torch.floor(torch.log2(y.abs().clamp_min(tiny)))) * eps
    largest = float(y[torch.isfinite(y)].abs().max())
    return float(torch.nan_to_num(off / ulp).max()), float(off.max()) / max(largest, tiny)


def run_all(device: str) -> dict[str, np.ndarray]:
    """Each result as bytes under "name|dtype"; one that failed as its message under "name|error"."""
    found = {}
    for name, row in VALUES.items():
        try:
            y = row.run(device).cpu().contiguous()
            found[f"{name}|{str(y.dtype).split('.')[-1]}"] = y.view(-1).view(torch.uint8).numpy()
        except Exception as error:
            found[f"{name}|error"] = np.frombuffer(repr(error)[:300].encode(), dtype=np.uint8)
    return found


if __name__ == "__main__":
    on_gpu = not triton.knobs.runtime.interpret
    np.savez_compressed(sys.argv[1], **run_all("cuda" if on_gpu else "cpu"))
