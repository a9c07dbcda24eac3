"""The arithmetic of kernels as a GPU does it. Each function makes the replacement of one of Triton's from the plain one.

The interpreter holds bf16 as uint16 bits. An operation on them is done in fp32 and rounded once, which for + - * / and
sqrt is the correctly rounded bf16 result: 24 bits of significand are at least 2 * 8 + 2.
"""

import dataclasses
import sys
from functools import cache

import numpy as np
import triton
import triton.language as tl

from gpukit.simulator.interpreter import libdevice, running
from gpukit.simulator.interpreter.libdevice import Unsupported
from gpukit.simulator.interpreter.numerics import (
    bf16_bits,
    bf16_floats,
    fp4_floats,
    fp8_bits,
    fp8_floats,
    high_half,
    integers,
    tf32,
)
from gpukit.simulator.interpreter.running import interpreter_module
from gpukit.simulator.interpreter.unknown import Unknown, unknown
from gpukit.simulator.interpreter.wrapped import marked, narrowed


def is_bf16(handle) -> bool:
    return handle.data.dtype == np.uint16 and handle.dtype.scalar.name == "bf16"


def _floats(handle):
    return bf16_floats(handle.data) if is_bf16(handle) else handle.data


def _rounded(data):
    """The handle for the result of an op on bf16 operands."""
    make = interpreter_module().TensorHandle
    return make(data, tl.int1) if data.dtype == np.bool_ else make(bf16_bits(data), tl.bfloat16)


def elementwise(plain):
    """unary_op, binary_op, ternary_op: operands, then the NumPy function."""

    def op(self, *operands_and_op):
        *operands, function = operands_and_op
        if function is np.where or not any(is_bf16(x) for x in operands):
            result = plain(self, *operands_and_op)
            # Triton calls a comparison by its operands' type, and would splat it as that.
            if result.data.dtype == np.bool_:
                result.dtype = tl.int1
            elif len(operands) == 2 and running.now is not None and running.now.marking:
                result.data = marked(result.data, function, *(x.data for x in operands))
            return result
        return _rounded(function(*[_floats(x) for x in operands]))

    return op


def fma(plain):
    def create_fma(self, x, y, z):
        if z.data.dtype == np.float32:  # Triton 3.7 rounds the product as well
            make = interpreter_module().TensorHandle
            return make((x.data.astype(np.float64) * y.data + z.data).astype(np.float32), z.dtype)
        if not is_bf16(z):
            return plain(self, x, y, z)
        return _rounded(_floats(x).astype(np.float64) * _floats(y) + _floats(z))

    return create_fma


def cast(plain):
    def cast_impl(self, src, dst_type):
        target = dst_type.scalar
        if is_bf16(src):
            if target.name == "bf16":
                return src
            src = interpreter_module().TensorHandle(bf16_floats(src.data), tl.float32)
        if target.name == "bf16":
            return interpreter_module().TensorHandle(bf16_bits(src.data), target)
        if src.data.dtype.kind == "f" and target.is_int() and target.int_bitwidth >= 8:
            ti = interpreter_module()
            return ti.TensorHandle(integers(src.data, ti._get_np_dtype(target)), target)
        result = plain(self, src, dst_type)
        if running.now is not None and running.now.marking:
            result.data = narrowed(result.data, src.data)
        return result

    return cast_impl


_FP8 = ("fp8e4nv", "fp8e5")


def fp_to_fp(plain):
    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        standard = ("fp16", "bf16", "fp32", "fp64")
        target, source = dst_type.scalar, src.dtype.scalar
        if source.name in _FP8 and target.name in standard:
            floats = interpreter_module().TensorHandle(fp8_floats(src.data, source.name), tl.float32)
            return self.cast_impl(floats, dst_type)
        if target.name in _FP8 and source.name in standard:
            return interpreter_module().TensorHandle(fp8_bits(_floats(src), target.name), target)
        if "bf16" not in (target.name, source.name) or target.name not in standard or source.name not in standard:
            return plain(self, src, dst_type, rounding_mode)
        ti = interpreter_module()
        if target.name == "bf16" and rounding_mode == ti._ir.ROUNDING_MODE.RTZ:
            return ti.TensorHandle(bf16_bits(_floats(src), toward_zero=True), target)
        return self.cast_impl(src, dst_type)

    return create_fp_to_fp


def get_bf16(plain):
    def get_bf16(self, value):
        return interpreter_module().TensorHandle(bf16_bits([value]), tl.bfloat16)

    return get_bf16


def dot(plain):
    def create_dot(self, a, b, d, input_precision=None, *rest, **kwargs):
        if running.now is not None and running.now.recorders:
            *batch, m, k = a.data.shape
            flops = 2 * int(np.prod(batch, dtype=np.int64)) * m * k * b.data.shape[-1]
            for recorder in running.now.recorders:
                recorder.dot(flops)
            if running.now.sampling:
                return _not_computed(a, b, d)
        ti = interpreter_module()
        make = ti.TensorHandle
        if a.dtype.scalar.name in _FP8 and b.dtype.scalar.name in _FP8:
            a, b = (make(fp8_floats(x.data, x.dtype.scalar.name), tl.float32) for x in (a, b))
        elif is_bf16(a) or is_bf16(b):
            a, b = (make(bf16_floats(x.data), tl.float32) if is_bf16(x) else x for x in (a, b))
        elif a.data.dtype == b.data.dtype == np.float16 and d.data.dtype == np.float32:
            # the same products and sums, but by BLAS, hundreds of times as fast
            a, b = (make(x.data.astype(np.float32), tl.float32) for x in (a, b))
        elif a.data.dtype == b.data.dtype == np.float32 and input_precision == ti._ir.INPUT_PRECISION.TF32:
            a, b = (make(tf32(x.data), tl.float32) for x in (a, b))
        return plain(self, a, b, d, input_precision, *rest, **kwargs)

    return create_dot


def _not_computed(a, b, d):
    """The sum of a sampled launch's products, as unknown as the factors."""
    origin = next((x.data for x in (a, b, d) if isinstance(x.data, Unknown)), None)
    if origin is None or isinstance(d.data, Unknown):
        return d
    return interpreter_module().TensorHandle(unknown(d.data, origin.source, origin.why), d.dtype)


def scaled(block, scale, format, packed_along_k: bool) -> np.ndarray:
    """The numbers of a block in a microscaling format as fp32; K is its last axis. Two numbers of 4 bits share a byte."""
    if format.name == "E2M1":
        axis = block.data.ndim - (1 if packed_along_k else 2)
        halves = np.stack([fp4_floats(block.data & 15), fp4_floats(block.data >> 4)], axis=axis + 1)
        values = halves.reshape([n * (2 if d == axis else 1) for d, n in enumerate(block.data.shape)])
    else:
        kind = block.dtype.scalar.name
        values = fp8_floats(block.data, kind) if kind in _FP8 else _floats(block).astype(np.float32)
    if scale is None:
        return values
    if scale.dtype.scalar.name in _FP8:
        factors = fp8_floats(scale.data, scale.dtype.scalar.name)
    else:  # an exponent alone
        factors = np.where(scale.data == 255, np.nan, np.exp2(scale.data.astype(np.float32) - 127))
    return values * np.repeat(factors.astype(np.float32), values.shape[-1] // factors.shape[-1], axis=-1)


def umulhi(plain):
    def create_umulhi(self, lhs, rhs):
        bits = f"u{lhs.data.itemsize}"  # of a signed integer too
        product = high_half(lhs.data.view(bits), rhs.data.view(bits))
        return interpreter_module().TensorHandle(product.view(lhs.data.dtype), lhs.dtype.scalar)

    return create_umulhi


def options(plain):
    """The options of Triton's interpreter, with all ways to multiply fp32 that its compiler has for NVIDIA's GPUs. Without
    the search for overflows: each sum and product of integers was computed again in 64 bits, half the time of a kernel, and
    nothing said what was found, since that takes the option debug."""
    allowed = dict.fromkeys([*plain.allowed_dot_input_precisions, "bf16x3", "bf16x6"])
    return dataclasses.replace(plain, allowed_dot_input_precisions=tuple(allowed), sanitize_overflow=False)


@cache
def _min_dot_rule():
    try:
        from triton.backends.nvidia.compiler import min_dot_size
    except ImportError:  # a Triton built for another maker's GPUs
        return lambda lhs, rhs: (1, 1, 1)
    return min_dot_size(None)


def min_dot_size(lhs, rhs):
    """The smallest M, N and K that tl.dot takes on NVIDIA's GPUs; Triton's interpreter takes any."""
    return _min_dot_rule()(lhs, rhs)


def nan_dropping(function):
    """tl.maximum and tl.minimum drop a NaN, as the GPU does; Triton 3.6 kept it."""

    def make(plain):
        return lambda self, lhs, rhs: self.binary_op(lhs, rhs, function)

    return make


def reduced(plain):
    """A single number that nobody knows stays unknown; Triton makes a new array of it."""

    def to_tensor(self, ret, dtype):
        out = plain(self, ret, dtype)
        if isinstance(ret, Unknown) and not isinstance(out.handle.data, Unknown):
            out.handle.data = unknown(out.handle.data, ret.source, ret.why)
        return out

    return to_tensor


def reduce_sum(plain):
    def sum(self, input):
        if not is_bf16(input.handle):
            return plain(self, input)
        total = np.sum(bf16_floats(input.handle.data), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(bf16_bits(total), tl.bfloat16)

    return sum


def reduce_min_max(plain):
    def min_max(self, input, val_reduce_op, idx_reduce_op=None):
        source = input[0] if isinstance(input, tuple) else input
        if idx_reduce_op is None and val_reduce_op in (np.nanmax, np.nanmin):
            # the same value without NumPy's warning about rows that are all NaN
            reduce = np.fmax.reduce if val_reduce_op is np.nanmax else np.fmin.reduce
            value = reduce(_floats(source.handle), axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(bf16_bits(value) if is_bf16(source.handle) else value, source.dtype)
        if not is_bf16(source.handle):
            return plain(self, input, val_reduce_op, idx_reduce_op)
        out = plain(self, self.to_tensor(bf16_floats(source.handle.data), tl.float32), val_reduce_op, idx_reduce_op)
        if val_reduce_op is None:
            return out
        value, index = out if isinstance(out, tuple) else (out, None)
        value = self.to_tensor(bf16_bits(value.handle.data).reshape(value.shape), tl.bfloat16)
        return value if index is None else (value, index)

    return min_max


def scan(function):
    def make(plain):
        def scan(self, input):
            if not is_bf16(input.handle):
                return plain(self, input)
            return [self.to_tensor(bf16_bits(function(bf16_floats(input.handle.data), axis=self.axis)), tl.bfloat16)]

        return scan

    return make


def extern_elementwise(plain):
    def create_extern_elementwise(self, libName, libPath, symbol, argList, retType, isPure):
        ti = interpreter_module()
        result = retType.scalar
        return ti.TensorHandle(libdevice.evaluate(symbol, [x.data for x in argList], ti._get_np_dtype(result)), result)

    return create_extern_elementwise


def inline_asm(plain):
    def create_inline_asm(self, *args, **kwargs):
        raise Unsupported("inline PTX does not run in the interpreter: write the operation with tl functions")

    return create_inline_asm


def erf(plain):
    def create_erf(self, arg):
        return self.unary_op(arg, libdevice.erf)

    return create_erf


LIBDEVICE = "triton.language.extra.cuda.libdevice", "triton.language.extra.libdevice"


def bind_libdevice(scope) -> None:
    """`libdevice.tanh(x)` in a kernel: the functions of tl.extra.libdevice are empty, and those for CUDA ask for what
    Triton's compiler passes them."""
    cuda, common = map(sys.modules.get, LIBDEVICE)
    if cuda is None:
        return
    semantic = interpreter_module().interpreter_semantic

    def bound(name, function):
        def call(*args, _semantic=None):
            if function is None:
                raise Unsupported(f"libdevice.{name} is not among NVIDIA's functions in Triton {triton.__version__}")
            try:
                return function(*args, _semantic=semantic)
            except KeyError as exc:
                raise TypeError(f"libdevice.{name} does not take {exc}: cast the arguments, x.to(tl.float32)") from None

        return call

    for module in (cuda, common):
        for name, function in list(vars(module).items()) if module else ():
            if callable(function) and getattr(function, "__module__", "") == module.__name__:
                scope.set_attr(module, name, bound(name, getattr(cuda, name, None)))
