"""The interpreter layer: what Triton's own interpreter gets wrong, row by row, and what the layer catches.

Each function in ROWS passes with `install()` and fails without it; `plain` names the Triton versions in which it does.
"""

import os
import re
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

import gpukit
from gpukit import dispatch
from gpukit.simulator.interpreter import executor, layer, running
from gpukit.simulator.interpreter.bounds import Memory, guard, unguard_all
from gpukit.simulator.interpreter.faults import MemoryFault, RaceFault
from gpukit.simulator.interpreter.frames import original
from gpukit.simulator.interpreter.libdevice import Unsupported

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
ROWS = {}


def row(plain_fails=True):
    """Register a check; `plain_fails` says whether Triton's own interpreter fails it."""

    def register(check):
        ROWS[check.__name__] = (check, plain_fails)
        return check

    return register


@pytest.fixture(autouse=True)
def installed():
    layer.install()
    yield
    layer.install()
    unguard_all()


def line_of(fn, text):
    """Line in this file of the first line of `fn` that contains `text`."""
    source = Path(__file__).read_text().split("\n")
    start = next(i for i, line in enumerate(source) if line.startswith(f"def {fn.__name__}("))
    return next(i for i in range(start, len(source)) if text in source[i]) + 1


# ---- Triton 3.6 with NumPy >= 2.4, arguments ----------------------------------------------------------------------


@triton.jit
def sum_blocks(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        acc += tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr, tl.sum(acc, axis=0))


@row(plain_fails=VERSION < (3, 7))
def loop_with_a_runtime_bound():
    x, y = torch.arange(100.0), torch.zeros(1)
    sum_blocks[(1,)](x, y, 100, BLOCK=32)
    assert y.item() == 4950


@triton.jit
def store_if_positive(flag_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, 1.0, mask=(offs < 3) & (tl.load(flag_ptr) > 0))


@row()
def one_comparison_for_a_whole_mask():
    for flag, expected in ((1.0, [1, 1, 1, 0]), (-1.0, [0, 0, 0, 0])):
        y = torch.zeros(4)
        store_if_positive[(1,)](torch.tensor([flag]), y, BLOCK=4)
        assert y.tolist() == expected


@triton.jit
def descriptor_copy(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    y = tl.make_tensor_descriptor(y_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    y.store([tl.program_id(0) * BM, 0], x.load([tl.program_id(0) * BM, 0]) + 1)


@triton.jit
def host_descriptor_copy(x, y, BM: tl.constexpr):
    i = tl.program_id(0) * BM
    y.store([i, 0], x.load([i, 0]) + 1)


@row(plain_fails=False)
def device_descriptors():
    x = torch.randn(10, 12)
    y = torch.zeros_like(x)
    descriptor_copy[(3,)](x, y, 10, 12, BM=4, BN=16)
    assert torch.equal(y, x + 1)


@row(plain_fails=False)
def host_descriptors():
    x = torch.randn(10, 16)
    y = torch.zeros_like(x)
    blocks = [TensorDescriptor.from_tensor(t, [4, 16]) for t in (x, y)]
    host_descriptor_copy[(3,)](*blocks, BM=4)
    assert torch.equal(y, x + 1)


@triton.jit
def scalar_arguments(x_ptr, y_ptr, scale, flag, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs) * scale.to(tl.float32)
    if flag:
        x += 1
    tl.store(y_ptr + offs, x)


@row()
def float_and_bool_arguments():
    x, y = torch.ones(4), torch.zeros(4)
    scalar_arguments[(1,)](x, y, 0.5, True, BLOCK=4)
    assert y.tolist() == [1.5] * 4
    scalar_arguments[(1,)](x, y, 0.5, False, BLOCK=4)
    assert y.tolist() == [0.5] * 4


@triton.jit
def nan_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.maximum(x, 0.0) + tl.max(x, axis=0) * 0)


@row(plain_fails=VERSION < (3, 7))
def maximum_drops_nan_as_the_gpu_does():
    y = torch.zeros(2)
    nan_kernel[(1,)](torch.tensor([float("nan"), 2.0]), y, BLOCK=2)
    assert y.tolist() == [0.0, 2.0]


@row()
def infinities_make_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nan_kernel[(1,)](torch.full((2,), float("inf")), torch.zeros(2), BLOCK=2)
        nan_kernel[(1,)](torch.full((2,), float("nan")), torch.zeros(2), BLOCK=2)


# ---- bf16 ---------------------------------------------------------------------------------------------------------


@triton.jit
def bf16_op(a_ptr, b_ptr, y_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + offs)
    b = tl.load(b_ptr + offs)
    if OP == "add":
        y = a + b
    elif OP == "sub":
        y = a - b
    elif OP == "mul":
        y = a * b
    elif OP == "div":
        y = a / b
    elif OP == "neg":
        y = -a
    elif OP == "abs":
        y = tl.abs(a)
    elif OP == "scalar":
        y = a * 0.1 + 3
    elif OP == "fma":
        y = tl.fma(a, b, a)
    elif OP == "less":
        y = tl.where(a < b, a, b)
    elif OP == "equal":
        y = (a == b).to(tl.bfloat16)
    elif OP == "maximum":
        y = tl.maximum(a, b)
    elif OP == "clamp":
        y = tl.clamp(a, -0.5, 0.5)
    elif OP == "exp":
        y = tl.exp(a.to(tl.float32)).to(tl.bfloat16)
    elif OP == "full":
        y = tl.full((BLOCK,), 1.2, tl.bfloat16) * a
    elif OP == "cumsum":
        y = tl.cumsum(a, axis=0)
    elif OP == "int":
        y = (a * 100).to(tl.int32).to(tl.bfloat16)
    tl.store(y_ptr + offs, y)


BF16 = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a, b: -a,
    "abs": lambda a, b: a.abs(),
    "scalar": lambda a, b: a * torch.tensor(0.1, dtype=torch.bfloat16) + 3,
    "fma": lambda a, b: (a.double() * b.double() + a.double()).bfloat16(),
    "less": torch.minimum,
    "equal": lambda a, b: (a == b).bfloat16(),
    "maximum": torch.maximum,
    "clamp": lambda a, b: a.clamp(-0.5, 0.5),
    "exp": lambda a, b: a.float().exp().bfloat16(),
    "full": lambda a, b: torch.tensor(1.2, dtype=torch.bfloat16) * a,
    "cumsum": lambda a, b: a.float().cumsum(0).bfloat16(),
    "int": lambda a, b: (a * 100).int().bfloat16(),
}


def bf16_row(op):
    def check():
        a, b = (torch.randn(256, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
        b[:16] = a[:16]
        if op == "cumsum":
            a = (a * 4).round()  # exact sums, so that the order of adding does not matter
        y = torch.full_like(a, float("nan"))
        bf16_op[(1,)](a, b, y, OP=op, BLOCK=256)
        ulp = 2.0**-8 if op == "exp" else 0  # two libraries' exp may differ in the last bit
        torch.testing.assert_close(y, BF16[op](a, b), rtol=ulp, atol=0)

    check.__name__ = f"bf16_{op}"
    return check


_PROMOTED_TO_37 = {"maximum", "clamp", "cumsum"}  # Triton 3.6 and 3.7 compute these in fp32 and return fp32
for _op in BF16:
    row(plain_fails=_op != "abs" and (VERSION[:2] > (3, 7) or _op not in _PROMOTED_TO_37))(bf16_row(_op))


@triton.jit
def to_bf16(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))


@row()
def bf16_store_rounds_to_nearest_even():
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0)).int()
    bits[:2048] = (bits[:2048] & -65536) | 0x8000  # halfway between two bf16 numbers
    x = bits.view(torch.float32)
    x[:6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-40, -0.0])
    y = torch.zeros(4096, dtype=torch.bfloat16)
    to_bf16[(1,)](x, y, BLOCK=4096)
    want = x.bfloat16()
    assert torch.equal(torch.isnan(y), torch.isnan(want))
    ok = ~torch.isnan(want)
    assert torch.equal(y[ok].view(torch.int16), want[ok].view(torch.int16))


@row()
def bf16_from_fp64_and_ints():
    for x in (torch.randn(64, dtype=torch.float64), torch.arange(1000, 1064)):
        y = torch.zeros(64, dtype=torch.bfloat16)
        to_bf16[(1,)](x, y, BLOCK=64)
        assert torch.equal(y, x.bfloat16())


@row(plain_fails=False)
def bf16_to_other_types():
    x = torch.tensor([1.5, -2.25, 1000.0, float("inf")], dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.float16, torch.float64):
        y = torch.zeros(4, dtype=dtype)
        to_bf16[(1,)](x, y, BLOCK=4)
        assert torch.equal(y, x.to(dtype))


@triton.jit
def bf16_reduce(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
    best, where = tl.max(x, axis=1, return_indices=True)
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.sum(x, axis=1))
    tl.store(y_ptr + BLOCK + offs, tl.max(x, axis=1))
    tl.store(y_ptr + 2 * BLOCK + offs, tl.min(x, axis=1))
    tl.store(y_ptr + 3 * BLOCK + offs, best)
    tl.store(y_ptr + 4 * BLOCK + offs, where)


@row()
def bf16_reductions():
    x = torch.randint(-9, 9, (32, 32), generator=torch.Generator().manual_seed(0)).bfloat16() / 4
    x += torch.arange(32) * 2**-4  # one largest element per row
    y = torch.zeros(5, 32, dtype=torch.bfloat16)
    bf16_reduce[(1,)](x, y, BLOCK=32)
    want = [x.sum(1), x.amax(1), x.amin(1), x.amax(1)]
    for got, expected in zip(y, want, strict=False):
        assert torch.equal(got, expected)
    assert torch.equal(x.gather(1, y[4].long()[:, None])[:, 0], x.amax(1))


@triton.jit
def dot(a_ptr, b_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + i, tl.dot(tl.load(a_ptr + i), tl.load(b_ptr + i)))


@row()
def bf16_dot():
    a, b = (torch.randn(32, 32, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    y = torch.zeros(32, 32)
    dot[(1,)](a, b, y, BLOCK=32)
    torch.testing.assert_close(y, a.float() @ b.float())


@triton.jit
def dot_precision(a_ptr, b_ptr, y_ptr, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(y_ptr + i, tl.dot(tl.load(a_ptr + i), tl.load(b_ptr + i), input_precision=PRECISION))


@row()
def fp32_dot_is_tf32_by_default():
    """The tensor cores take no notice of the last 13 bits; PTX shows that Triton passes them on."""
    a, b = (torch.randn(32, 32, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    short = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for x in (a, b)]
    want = {None: short[0] @ short[1], "tf32": short[0] @ short[1], "ieee": a.double() @ b.double()}
    for precision, expected in want.items():
        y = torch.zeros(32, 32)
        dot_precision[(1,)](a, b, y, PRECISION=precision, BLOCK=32)
        torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)
    assert (want["tf32"] - want["ieee"]).abs().max() > 1e-3


@triton.jit
def dot_of_8(x_ptr, y_ptr, K: tl.constexpr):
    a = tl.load(x_ptr + tl.arange(0, 16)[:, None] * K + tl.arange(0, K)[None, :])
    b = tl.load(x_ptr + tl.arange(0, K)[:, None] * 16 + tl.arange(0, 16)[None, :])
    tl.store(y_ptr + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], tl.dot(a, b))


@row()
def a_dot_that_is_too_small_for_the_gpu_is_refused():
    x = torch.ones(256, dtype=torch.float16)
    dot_of_8[(1,)](x, torch.zeros(256), K=16)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="K >= 16"):
        dot_of_8[(1,)](x, torch.zeros(256), K=8)


@triton.jit
def doubled_if(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    if x > 0:
        tl.store(x_ptr + offs, 2 * x)


@row()
def an_if_on_a_block_is_refused():
    x = torch.tensor([3.0, -1.0])
    doubled_if[(1,)](x, BLOCK=1)
    doubled_if[(1,)](x[1:], BLOCK=1)
    assert x.tolist() == [6, -1], "a single number is true or not"
    with pytest.raises(triton.runtime.errors.InterpreterError, match=r"a block of 2, .* tl.where"):
        doubled_if[(1,)](x, BLOCK=2)


# ---- other types --------------------------------------------------------------------------------------------------


@triton.jit
def through_fp8(x_ptr, y_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs).to(FORMAT).to(tl.float32))


@row()
def fp8_rounds_to_nearest_even():
    x = torch.cat([torch.randn(960, generator=torch.Generator().manual_seed(0)) * 30, torch.arange(64.0) / 512])
    for triton_format, dtype in ((tl.float8e4nv, torch.float8_e4m3fn), (tl.float8e5, torch.float8_e5m2)):
        for source in (x, x.bfloat16(), x.half()):
            y = torch.zeros(1024)
            through_fp8[(1,)](source, y, FORMAT=triton_format, BLOCK=1024)
            assert torch.equal(y, source.to(dtype).float())


@row()
def what_is_too_large_for_fp8_becomes_its_largest_number():
    x = torch.tensor([460.0, 1e6, -1e6, float("nan"), 0.0, -0.0, float("inf"), 1.0])
    y = torch.zeros(8)
    through_fp8[(1,)](x, y, FORMAT=tl.float8e4nv, BLOCK=8)
    assert y.tolist()[:3] == [448.0, 448.0, -448.0] and y[3].isnan() and y[6] == 448
    through_fp8[(1,)](x, y, FORMAT=tl.float8e5, BLOCK=8)
    assert y.tolist()[:3] == [448.0, 57344.0, -57344.0] and y[3].isnan() and y[6] == 57344


@triton.jit
def to_integers(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs).to(y_ptr.dtype.element_ty))


@row()
def floats_beyond_an_integer_become_its_limit():
    x = torch.tensor([1e10, -1e10, float("nan"), float("inf"), -1.9, 2147483520.0, 0.5, -0.5])
    y = torch.zeros(8, dtype=torch.int32)
    for source, nan in ((x, 0), (x.double(), -(2**31))):
        to_integers[(1,)](source, y, BLOCK=8)
        assert y.tolist() == [2**31 - 1, -(2**31), nan, 2**31 - 1, -1, 2147483520, 0, 0]
    y = torch.zeros(8, dtype=torch.int64)
    to_integers[(1,)](x, y, BLOCK=8)
    assert y.tolist() == [10**10, -(10**10), -(2**63), 2**63 - 1, -1, 2147483520, 0, 0]


@row()
def floats_beyond_8_bits_become_the_low_half_of_16():
    """As an H200 made them, with Triton 3.6."""
    x = torch.tensor([128, 127.9, -129, 300, 40_000, -40_000, 70_000, -300])
    y, z = torch.zeros(8, dtype=torch.int8), torch.zeros(8, dtype=torch.uint8)
    for source in (x, x.double()):
        to_integers[(1,)](source, y, BLOCK=8)
        assert y.tolist() == [-128, 127, 127, 44, -1, 0, -1, -44]
        to_integers[(1,)](source, z, BLOCK=8)
        assert z.tolist() == [128, 127, 0, 44, 64, 0, 255, 0]
    x[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -1.5])
    to_integers[(1,)](x, y, BLOCK=8)
    assert y.tolist()[:4] == [-1, 0, 0, -1]


# ---- libdevice, PTX -----------------------------------------------------------------------------------------------


@triton.jit
def with_libdevice(x_ptr, y_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    if OP == "tanh":
        y = libdevice.tanh(x)
    elif OP == "pow":
        y = libdevice.pow(tl.abs(x), x * 0 + 1.5)
    elif OP == "atan2":
        y = libdevice.atan2(x, x * x)
    elif OP == "log1p":
        y = libdevice.log1p(tl.abs(x))
    elif OP == "erf":
        y = tl.extra.cuda.libdevice.erf(x)
    elif OP == "round":
        y = libdevice.round(x * 2)
    elif OP == "isnan":
        y = tl.where(libdevice.isnan(x / x), -1.0, x)
    elif OP == "fast_expf":
        y = libdevice.fast_expf(x)
    elif OP == "yn":
        y = libdevice.yn(2, x)
    elif OP == "add_rz":
        y = libdevice.add_rz(x, x)
    tl.store(y_ptr + offs, y)


LIBDEVICE = {
    "tanh": torch.tanh,
    "pow": lambda x: x.abs() ** 1.5,
    "atan2": lambda x: torch.atan2(x, x * x),
    "log1p": lambda x: torch.log1p(x.abs()),
    "erf": torch.erf,
    "round": lambda x: torch.trunc(x * 2 + torch.copysign(torch.tensor(0.5), x)),
    "isnan": lambda x: torch.where(x == 0, -1.0, x),
}


@row()
def libdevice_functions():
    for dtype in (torch.float32, torch.float64):
        x = torch.cat([torch.randn(60), torch.tensor([0.25, -0.75, 0.0, 1.25])]).to(dtype)
        for op, function in LIBDEVICE.items():
            y = torch.zeros_like(x)
            with_libdevice[(1,)](x, y, OP=op, BLOCK=64)
            torch.testing.assert_close(y, function(x).to(dtype), rtol=4e-7, atol=1e-7, msg=op)


@row()
def arithmetic_of_a_kernel_is_no_operation_of_pytorch():
    """erf is PyTorch's inside; whoever watches what the host code computes must not see it."""
    seen = []

    class Watch(dispatch.Mode):
        def operation(self, func, args, kwargs):
            seen.append(func.name())
            return func(*args, **kwargs)

    x, y = torch.randn(64), torch.zeros(64)
    with Watch():
        with_libdevice[(1,)](x, y, OP="erf", BLOCK=64)
    assert seen == []
    torch.testing.assert_close(y, torch.erf(x))


@row()
def libdevice_functions_without_an_equal_say_what_to_write():
    want = {"fast_expf": "write tl.exp$", "yn": "write tl operations, or PyTorch", "add_rz": "write tl operations"}
    for op, text in want.items():
        with pytest.raises(triton.runtime.errors.InterpreterError, match="has no equal in the interpreter") as caught:
            with_libdevice[(1,)](torch.ones(8), torch.zeros(8), OP=op, BLOCK=8)
        error, file, line = original(caught.value)
        assert isinstance(error, Unsupported) and re.search(text, str(error))
        assert (file, line) == (__file__, line_of(with_libdevice, f"libdevice.{op}"))
    with pytest.raises(triton.runtime.errors.InterpreterError, match=r"libdevice\.tanh does not take .*bfloat16"):
        with_libdevice[(1,)](torch.ones(8).bfloat16(), torch.zeros(8), OP="tanh", BLOCK=8)
    assert libdevice.tanh(1.0) is None  # outside of a launch it is Triton's own


@triton.jit
def with_ptx(x_ptr, y_ptr):
    x = tl.load(x_ptr)
    y = tl.inline_asm_elementwise("neg.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr, y)


@row()
def inline_ptx_is_refused():
    with pytest.raises(
        triton.runtime.errors.InterpreterError, match="inline PTX does not run in the interpreter: write"
    ):
        with_ptx[(1,)](torch.ones(1), torch.zeros(1))


@triton.jit
def descriptor_add(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr, OP: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    y = tl.make_tensor_descriptor(y_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    if OP == "add":
        y.atomic_add([0, 0], x.load([tl.program_id(0) * BM, 0]))
    else:
        y.atomic_max([0, 0], x.load([tl.program_id(0) * BM, 0]))


@row()
def descriptor_atomics():
    x, y = torch.arange(48.0).view(12, 4), torch.zeros(12, 4)
    descriptor_add[(3,)](x, y, 12, 4, BM=4, BN=4, OP="add")
    assert torch.equal(y[:4], x.view(3, 4, 4).sum(0)) and not y[4:].any()
    x, y = x.flip(0).int(), torch.zeros(12, 4, dtype=torch.int32)
    descriptor_add[(3,)](x, y, 12, 4, BM=4, BN=4, OP="max")
    assert torch.equal(y[:4], x[:4])


@triton.jit
def atomic_add(x_ptr, index_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + tl.load(index_ptr + offs), tl.load(x_ptr + offs), mask=offs < BLOCK - 1)


@row()
def bf16_atomic_add():
    x = torch.tensor([1.0, 2.0, 256.0, 1.0, 1.0, 5.0, 0.5, 100.0], dtype=torch.bfloat16)
    index = torch.tensor([0, 1, 2, 2, 2, 1, 0, 0])
    y = torch.zeros(3, dtype=torch.bfloat16)
    atomic_add[(1,)](x, index, y, BLOCK=8)
    assert y.tolist() == [1.5, 7.0, 256.0]  # 256 + 1 rounds back to 256, twice; the last lane is masked off


# ---- autotune -----------------------------------------------------------------------------------------------------


@triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 64, 128)], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def add_one_in_place(x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else offs < n
    tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask=mask) + 1, mask=mask)
    tl.store(y_ptr, BLOCK)


@row()
def autotune_runs_its_first_config_once():
    for n in (100, 128):
        x, y = torch.zeros(n), torch.zeros(1)
        add_one_in_place[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, y, n)
        assert torch.equal(x, torch.ones(n))
        assert y.item() == 32


@triton.autotune(
    [triton.Config({"BLOCK": b}) for b in (32, 64, 128)],
    key=["n"],
    prune_configs_by={
        "early_config_prune": lambda configs, named, **kw: [c for c in configs if c.kwargs["BLOCK"] > 32]
    },
)
@triton.jit
def block_used(y_ptr, n, BLOCK: tl.constexpr):
    tl.store(y_ptr, BLOCK)


@row()
def autotune_prunes_configs_first():
    y = torch.zeros(1)
    block_used[(1,)](y, 100)
    assert y.item() == 64


# ---- bounds -------------------------------------------------------------------------------------------------------


def inside(shape, margin=256, dtype=torch.float32, strides=None):
    """A view inside a larger buffer, so that a fault that is missed does no harm."""
    view = torch.zeros(margin * 2 + 4 * int(np.prod(shape)), dtype=dtype)
    strides = strides or torch.empty(shape).stride()
    return view.as_strided(shape, strides, margin)


@triton.jit
def copy_rows(x_ptr, y_ptr, stride, n_cols, BLOCK: tl.constexpr, MASK_LOAD: tl.constexpr, MASK_STORE: tl.constexpr):
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + pid * stride + offs, mask=offs < n_cols if MASK_LOAD else None)
    if MASK_STORE:
        tl.store(y_ptr + pid * stride + offs, x, mask=offs < n_cols)
    else:
        tl.store(y_ptr + pid * stride + offs, x)


def fault_of(launch, kind=MemoryFault):
    with pytest.raises(kind) as caught:
        launch()
    return caught.value


@row()
def store_past_the_end():
    """Each program races with the next row before the last one leaves the tensor: the diagnosis is the latter."""
    x, y = inside((37, 781)), inside((37, 781))
    x.normal_()
    guard(x, "x")
    guard(y, "y")
    fault = fault_of(lambda: copy_rows[(37, 1)](x, y, 781, 781, BLOCK=1024, MASK_LOAD=True, MASK_STORE=False))
    assert (fault.kind, fault.tensor, fault.count, fault.where) == ("store", "y_ptr", 243, "past the end")
    assert str(fault) == (
        f"store outside y_ptr: program (36, 0), line {line_of(copy_rows, 'offs, x)')}: 243 elements past the end of "
        "y [37, 781]; first at index 28897"
    )


@row()
def load_past_the_end():
    x, y = inside((37, 781)), inside((37, 781))
    guard(x, "x")
    fault = fault_of(lambda: copy_rows[(37,)](x, y, 781, 781, BLOCK=1024, MASK_LOAD=False, MASK_STORE=True))
    line = line_of(copy_rows, "tl.load")
    assert (fault.kind, fault.tensor, fault.program, fault.line) == ("load", "x_ptr", (36,), line)
    assert (fault.count, fault.first_index, fault.size, fault.shape) == (243, 28897, 28897, (37, 781))
    assert (fault.where, fault.lane, fault.file) == ("past the end", (781,), __file__)
    assert str(fault) == (
        f"load outside x_ptr: program 36, line {line}: 243 elements past the end of x [37, 781]; first at index 28897"
    )


@row()
def store_between_rows():
    x, y = inside((8, 24), strides=(32, 1)), inside((8, 24), strides=(32, 1))
    guard(y, "y")
    copy_rows[(8,)](x, y, 32, 24, BLOCK=32, MASK_LOAD=True, MASK_STORE=True)
    fault = fault_of(lambda: copy_rows[(8,)](x, y, 32, 24, BLOCK=32, MASK_LOAD=True, MASK_STORE=False))
    assert (fault.kind, fault.where, fault.count, fault.first_index) == ("store", "between rows", 8, 24)
    assert "store outside y_ptr: program 0" in str(fault) and "8 elements between the rows of y [8, 24]" in str(fault)


@triton.jit
def shifted(x_ptr, y_ptr, shift, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs + shift))


@row()
def load_before_the_start():
    x, y = inside((64,)), inside((64,))
    guard(x, "x")
    fault = fault_of(lambda: shifted[(1,)](x, y, -3, BLOCK=64))
    assert (fault.where, fault.count, fault.first_index) == ("before the start", 3, -3)
    assert "3 elements before the start of x [64]; first at index -3" in str(fault)


@row()
def atomic_past_the_end():
    y = inside((3,))
    guard(y, "counts")
    index = torch.tensor([0, 1, 2, 3, 0, 0, 0, 99])
    fault = fault_of(lambda: atomic_add[(1,)](torch.ones(8), index, y, BLOCK=8))
    assert (fault.kind, fault.tensor, fault.count, fault.first_index) == ("atomic", "y_ptr", 1, 3)
    assert "1 element past the end of counts [3]" in str(fault)


@row()
def descriptor_with_too_many_rows():
    x, y = inside((10, 16)), inside((12, 16))
    guard(x, "x")
    fault = fault_of(lambda: descriptor_copy[(3,)](x, y, 12, 16, BM=4, BN=16))
    assert (fault.kind, fault.tensor, fault.program, fault.count) == ("load", "x_ptr", (2,), 32)
    unguard_all()
    guard(y[:10], "y")
    fault = fault_of(lambda: descriptor_copy[(3,)](x, y, 12, 16, BM=4, BN=16))
    assert (fault.kind, fault.tensor, fault.where, fault.shape) == ("store", "y_ptr", "past the end", (10, 16))


@row()
def host_descriptor_of_a_guarded_tensor():
    x, y = inside((8, 16)), inside((10, 16))
    guard(x, "x")
    blocks = [TensorDescriptor(t, [12, 16], [16, 1], [4, 16]) for t in (x, inside((12, 16)))]
    fault = fault_of(lambda: host_descriptor_copy[(3,)](*blocks, BM=4))
    assert (fault.kind, fault.tensor, fault.program, fault.count) == ("load", "x", (2,), 64)
    assert y.shape == (10, 16)


def test_the_pointer_decides_which_tensor_is_meant():
    """A pointer derived from x that lands in y is a fault of x, though y is legal memory."""
    both = torch.zeros(128)
    x, y = torch.zeros(32), torch.zeros(32)
    distance = (y.data_ptr() - x.data_ptr()) // 4
    fault = fault_of(lambda: shifted[(1,)](x, both, distance, BLOCK=32))
    assert (fault.tensor, fault.first_index) == ("x_ptr", distance if distance < 0 else max(distance, 32))
    both = torch.zeros(64)
    x, y = both[:32], both[32:]
    shifted[(1,)](x, torch.zeros(32), 32, BLOCK=32)  # not guarded: all of the storage is legal
    guard(x, "x")
    guard(y, "y")
    shifted[(1,)](x, torch.zeros(32), 32, BLOCK=32)  # legal: two guards on one storage


def test_a_wild_pointer_is_a_fault_and_not_a_crash():
    for shift in (2**40, -(2**40), 10**15):
        fault = fault_of(lambda s=shift: shifted[(1,)](torch.zeros(64), torch.zeros(64), s, BLOCK=64))
        assert (fault.tensor, fault.count, fault.first_index) == ("x_ptr", 64, shift)


@triton.jit
def store_far(x_ptr, y_ptr, shift, HOW: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    if HOW == "chosen":
        y_ptrs = tl.where(offs % 2 == 0, y_ptr + offs + shift, y_ptr + offs)
    elif HOW == "of two":
        y_ptrs = tl.where(offs % 2 == 0, x_ptr + offs, y_ptr + offs) + shift
    elif HOW == "joined":
        y_ptrs = tl.reshape(tl.join(y_ptr + offs, y_ptr + offs + shift), [2 * BLOCK])
    elif HOW == "put together":
        y_ptrs = tl.cat(y_ptr + offs, y_ptr + offs + shift, can_reorder=True)
    else:
        y_ptrs = (y_ptr.to(tl.int64) + 4 * (offs + shift)).to(tl.pointer_type(tl.float32))
    tl.store(y_ptrs, 0.0)


@pytest.mark.filterwarnings("ignore:.*can_reorder")  # Triton 3.9's
@pytest.mark.parametrize("shift", [2**34, -(2**34)])
def test_pointers_that_are_chosen_or_joined_belong_to_their_tensor(shift):
    for how in ("chosen", "joined", "put together"):
        fault = fault_of(lambda how=how: store_far[(1,)](torch.zeros(64), torch.zeros(64), shift, HOW=how, BLOCK=64))
        assert (fault.tensor, fault.count, fault.where) == (
            "y_ptr", 32 if how == "chosen" else 64, "past the end" if shift > 0 else "before the start",
        )  # fmt: skip


@pytest.mark.parametrize("shift", [2**34, -(2**34)])
def test_where_nobody_knows_which_tensor_was_meant_none_is_named(shift):
    for how in ("of two", "a number"):
        fault = fault_of(lambda how=how: store_far[(1,)](torch.zeros(64), torch.zeros(64), shift, HOW=how, BLOCK=64))
        assert (fault.kind, fault.tensor, fault.where, fault.count) == ("store", "any tensor", "far away", 64)
        assert "_ptr" not in str(fault)
    near = torch.zeros(1 << 16)  # elements next to it are taken for its own
    fault = fault_of(lambda: store_far[(1,)](torch.zeros(64), near, near.numel() - 32, HOW="a number", BLOCK=64))
    assert (fault.tensor, fault.count, fault.first_index) == ("y_ptr", 32, near.numel())


@triton.jit
def through_an_address(table_ptr, y_ptr, BLOCK: tl.constexpr):
    x_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))


def test_tables_of_pointers():
    x, y = torch.randn(16), torch.zeros(16)
    table = torch.tensor([x.data_ptr()])
    fault_of(lambda: through_an_address[(1,)](table, y, BLOCK=16))
    guard(x, "x")
    through_an_address[(1,)](table, y, BLOCK=16)
    assert torch.equal(x, y)


def test_masked_lanes_never_count_and_empty_tensors_work():
    y = torch.zeros(781)
    copy_rows[(1,)](torch.ones(781), y, 781, 781, BLOCK=1024, MASK_LOAD=True, MASK_STORE=True)
    assert y.sum() == 781
    copy_rows[(1,)](torch.zeros(0), torch.zeros(0), 0, 0, BLOCK=16, MASK_LOAD=True, MASK_STORE=True)
    fault_of(lambda: copy_rows[(1,)](torch.zeros(0), y, 0, 1, BLOCK=16, MASK_LOAD=True, MASK_STORE=True))


def test_the_fault_comes_before_the_store():
    y = inside((100,))
    guard(y)
    fault_of(lambda: shifted[(1,)](torch.ones(128), y, 0, BLOCK=128))
    assert y.sum() == 0 and y.untyped_storage().tolist() == [0] * y.untyped_storage().nbytes()


def test_guards_are_forgotten_with_unguard_all():
    y = inside((100,))
    guard(y)
    unguard_all()
    shifted[(1,)](torch.ones(128), y, 0, BLOCK=128)


@pytest.mark.parametrize("shape", [(8, 24), (4, 6, 5)])
def test_guards_of_any_strides(shape):
    base = torch.zeros(2048)
    view = base.as_strided(shape, [s * 2 for s in torch.empty(shape).stride()], 100).transpose(0, -1)
    guard(view)
    from gpukit.simulator.interpreter import bounds

    legal = bounds._legal[base.untyped_storage().data_ptr()]
    want = torch.zeros(2048, dtype=torch.bool)
    want.as_strided(view.shape, view.stride(), 100)[...] = True
    assert np.array_equal(legal.ok(np.arange(0, 8192, 4), 4), want.numpy())


# ---- races --------------------------------------------------------------------------------------------------------


@triton.jit
def overlapping(x_ptr, y_ptr, step, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * step + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs) + tl.program_id(0))


@triton.jit
def constant_store(y_ptr):
    tl.store(y_ptr, 3.0)


@row()
def two_programs_store_different_values():
    x, y = torch.zeros(64), inside((64,))
    guard(y, "y")
    overlapping[(4,)](x, y, 16, BLOCK=16)
    fault = fault_of(lambda: overlapping[(4,)](x, y, 8, BLOCK=16), RaceFault)
    assert (fault.kind, fault.clash, fault.tensor) == ("store", "store", "y_ptr")
    assert (fault.program, fault.other, fault.count, fault.first_index) == ((1,), (0,), 8, 8)
    line = line_of(overlapping, "tl.store")
    assert str(fault) == (
        f"race on y_ptr: program 1, line {line}: stores a value that differs from the one program 0 stored, at index 8 "
        "of y [64]; programs run in any order"
    )


@triton.jit
def neighbour_in_place(x_ptr, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    other = offs + SHIFT
    x = tl.load(x_ptr + other, mask=(other >= 0) & (other < n), other=0.0)
    tl.store(x_ptr + offs, x + 1, mask=offs < n)


@row()
def a_program_loads_what_another_stores():
    fault = fault_of(lambda: neighbour_in_place[(4,)](torch.arange(64.0), 64, SHIFT=-1, BLOCK=16), RaceFault)
    assert (fault.kind, fault.clash, fault.program, fault.other, fault.first_index) == ("load", "store", (1,), (0,), 15)
    assert "program 1, line" in str(fault) and "loads what program 0 stores, at index 15" in str(fault)


@row()
def a_program_stores_what_another_loaded_before():
    fault = fault_of(lambda: neighbour_in_place[(4,)](torch.arange(64.0), 64, SHIFT=1, BLOCK=16), RaceFault)
    assert (fault.kind, fault.clash, fault.program, fault.other, fault.first_index) == ("store", "load", (1,), (0,), 16)
    assert "stores to what program 0 loads" in str(fault)


def test_what_is_no_race():
    neighbour_in_place[(4,)](torch.arange(64.0), 64, SHIFT=0, BLOCK=16)  # in place, own elements
    neighbour_in_place[(4,)](torch.arange(64.0), 64, SHIFT=0, BLOCK=16)  # a second launch starts afresh
    constant_store[(8,)](torch.zeros(1))  # equal values
    y = torch.zeros(3)
    atomic_add[(5,)](torch.ones(8), torch.zeros(8, dtype=torch.int64), y, BLOCK=8)
    assert y[0] == 35


@triton.jit
def locked_sum(lock_ptr, total_ptr, ORDER: tl.constexpr):
    while tl.atomic_cas(lock_ptr, 0, 1, sem=ORDER) == 1:
        pass
    tl.store(total_ptr, tl.load(total_ptr) + tl.program_id(0))
    tl.atomic_xchg(lock_ptr, 0, sem=ORDER)


def test_a_lock_orders_programs():
    lock, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    locked_sum[(9,)](lock, total, ORDER="acq_rel")
    assert total.item() == 36
    fault_of(lambda: locked_sum[(9,)](lock, total, ORDER="relaxed"), RaceFault)


@triton.jit
def last_one_sums(x_ptr, count_ptr, y_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(x_ptr + pid, pid + 1.0)
    if tl.atomic_add(count_ptr, 1) == tl.num_programs(0) - 1:
        tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK)), axis=0))


def test_a_counter_orders_programs():
    y = torch.zeros(1)
    last_one_sums[(8,)](torch.zeros(8), torch.zeros(1, dtype=torch.int32), y, BLOCK=8)
    assert y.item() == 36


# ---- launching and errors -----------------------------------------------------------------------------------------


@triton.jit
def helper(x_ptr, offs):
    return tl.load(x_ptr + offs)


@triton.jit
def uses_helper(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, helper(x_ptr, offs))


@triton.jit
def mistake(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, undefined_name)  # noqa: F821


@triton.jit
def mistake_in_a_reduction(x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(x_ptr, tl.sum(x, axis=3))


def test_original_finds_the_exception_and_the_line():
    for kernel, text in ((mistake, "undefined_name"), (mistake_in_a_reduction, "axis=3")):
        with pytest.raises(triton.runtime.errors.InterpreterError) as caught:
            kernel[(1,)](torch.zeros(8), BLOCK=8)
        exc, file, line = original(caught.value)
        assert isinstance(exc, NameError if kernel is mistake else ValueError)
        assert (file, line) == (__file__, line_of(kernel, text))
    fault = fault_of(lambda: uses_helper[(1,)](torch.zeros(4), torch.zeros(8), BLOCK=8))
    assert original(fault) == (fault, __file__, line_of(helper, "tl.load"))
    assert original(ValueError("x"))[1:] == (None, None)


def test_the_traceback_of_a_fault_ends_in_the_kernel():
    launches = {
        MemoryFault: (lambda: uses_helper[(1,)](torch.zeros(4), torch.zeros(8), BLOCK=8), helper, "tl.load"),
        RaceFault: (lambda: overlapping[(2,)](torch.zeros(64), torch.zeros(64), 8, BLOCK=16), overlapping, "tl.store"),
    }
    for kind, (launch, kernel, text) in launches.items():
        fault = fault_of(launch, kind)
        last = traceback.extract_tb(fault.__traceback__)[-1]
        assert (last.filename, last.lineno, last.name) == (__file__, line_of(kernel, text), kernel.__name__)
        assert fault.__cause__ is None and fault.__suppress_context__


def test_triton_is_left_as_it_was_after_a_launch():
    before = tl.load, tl.core.load, tl.sum, tl.range, tl.core.tensor.__dict__.get("__index__")
    uses_helper[(1,)](torch.zeros(8), torch.zeros(8), BLOCK=8)
    with pytest.raises(triton.runtime.errors.InterpreterError):
        mistake[(1,)](torch.zeros(8), BLOCK=8)
    assert (tl.load, tl.core.load, tl.sum, tl.range, tl.core.tensor.__dict__.get("__index__")) == before
    assert not running.busy()


@triton.jit
def where_am_i(y_ptr):
    pid = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(y_ptr + pid, pid)


def test_grids():
    for grid in ((24,), (4, 6), [2, 3, 4], (4, 0)):
        y = torch.full((24,), -1.0)
        where_am_i[grid](y)
        assert torch.equal(y, torch.arange(24.0)) or 0 in grid
    wrong = {4: "tuple of 1 to 3", (1, 1, 1, 1): "tuple of 1 to 3", (2.0,): "axis 0", (1, 65_536): "axis 1"}
    for grid, text in wrong.items():
        with pytest.raises(TypeError, match=text):
            where_am_i[grid](torch.zeros(24))


class OnGpu:
    """What the launch looks at of a tensor on a GPU."""

    device = torch.device("cuda", 0)
    is_cuda, is_cpu = True, False

    def untyped_storage(self):
        raise AssertionError("a launch with a tensor on the wrong side must touch neither")


def test_a_cpu_tensor_beside_one_on_a_gpu(monkeypatch):
    with pytest.raises(ValueError, match=r"sum_blocks: y_ptr is on the CPU and x_ptr on the GPU; .*y_ptr\.to\("):
        sum_blocks[(1,)](OnGpu(), torch.zeros(4), 4, BLOCK=4)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)  # which a GPU can read
    assert executor._refuse_cpu_tensors(sum_blocks, {"x_ptr": OnGpu(), "y_ptr": torch.zeros(4)}) is None


def test_cpu_tensors_for_a_launch_on_a_gpu(monkeypatch):
    """Where kernels are compiled, and a trace interprets them first."""
    executor._refuse_cpu_tensors(sum_blocks, {"x_ptr": torch.zeros(4)})  # interpreted for good
    compiled = SimpleNamespace(__name__="sum_blocks", compiled=object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    executor._refuse_cpu_tensors(compiled, {"x_ptr": torch.zeros(4)})  # nothing to run it on
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="sum_blocks: x_ptr is on the CPU; a GPU reads no tensor there"):
        executor._refuse_cpu_tensors(compiled, {"x_ptr": torch.zeros(4), "n": 4})


def test_a_launch_that_is_only_predicted_takes_indices_from_the_cpu(monkeypatch):
    """Also where there is a GPU: nothing runs on it."""
    monkeypatch.setattr(executor, "_refuse_cpu_tensors", lambda *_: pytest.fail("this launch runs nowhere"))
    table, y = (torch.empty(1000, device="meta") for _ in range(2))
    with gpukit.trace(sample=1) as t:
        gathers[(2,)](table, torch.arange(8) * 100, y, BLOCK=4)
    assert t.launches[0].programs == 2


@triton.jit
def gathers(table_ptr, ids_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(table_ptr + tl.load(ids_ptr + offs)))


def _empty(x_ptr):
    x = tl.load(x_ptr)
    raise NotImplementedError("softmax.fused")  # your code here
    tl.store(x_ptr, x)


def _calls_an_empty_one(x_ptr):
    _inner(x_ptr)


def _refused(x_ptr):
    raise ValueError("no exercise's gap")


_inner = triton.runtime.jit.JITFunction(_empty)


@pytest.mark.parametrize("function", [_empty, _calls_an_empty_one])
def test_an_empty_gap_says_so_on_a_gpu_too(function):
    with pytest.raises(NotImplementedError, match=r"^softmax\.fused$"):
        executor.counted_launch(_compile)(triton.runtime.jit.JITFunction(function), grid=(1,), warmup=False)


def test_what_else_does_not_compile_stays_the_compilers():
    with pytest.raises(triton.compiler.errors.CompilationError, match="Raise"):
        executor.counted_launch(_compile)(triton.runtime.jit.JITFunction(_refused), grid=(1,), warmup=False)


def _compile(kernel, *, grid, warmup):
    source = triton.compiler.ASTSource(kernel, {"x_ptr": "*fp32"})
    # Triton 3.9 warns where nobody says whether products and sums are fused.
    options = {"enable_fp_fusion": True}
    triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32), options=options)


def test_a_triton_outside_the_range_is_named(monkeypatch):
    layer.uninstall()
    missing = (*layer._PATCHES, ("triton.runtime.interpreter", "InterpreterBuilder.create_nothing", None))
    monkeypatch.setattr(layer, "_PATCHES", missing)
    with pytest.raises(RuntimeError, match=rf"3\.6 to 3\.9, and Triton {triton.__version__} has no .*create_nothing"):
        layer.install()
    assert not layer._installed


def test_install_twice_is_install_once():
    names = [(owner, name) for owner, name, _ in layer._installed]
    layer.install()
    assert [(owner, name) for owner, name, _ in layer._installed] == names


def test_importing_triton_installs_the_layer():
    code = (
        "import sys; from gpukit.simulator.interpreter import autoload; autoload.arm(); autoload.arm();"
        "assert not {'triton', 'numpy', 'torch'} & set(sys.modules);"
        "import triton; from gpukit.simulator.interpreter import layer; assert layer._installed"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    code = (  # as transformers and others look for it
        "import gpukit, importlib.util as u, sys; assert u.find_spec('triton') and u.find_spec('triton');"
        "assert 'triton' not in sys.modules; import triton;"
        "from gpukit.simulator.interpreter import autoload, layer; assert layer._installed;"
        "assert not [finder for finder in sys.meta_path if isinstance(finder, autoload._After)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    code = "import gpukit; from gpukit.simulator.interpreter import layer; assert layer._installed"  # it imports Triton
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})


@triton.jit
def neighbor_or_zero(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    tl.store(y_ptr + i, tl.load(x_ptr + i - 1, mask=i > 0, other=0.0))
    offs = i + tl.arange(0, BLOCK)
    tl.store(y_ptr + 4 + offs, tl.load(x_ptr + offs - 1, mask=offs > 0, other=0.0))


@row(plain_fails=False)  # masked lanes are 0 there
def zero_for_a_masked_load_of_one_number():
    x, y = torch.arange(1.0, 5.0), torch.full((8,), 7.0)
    neighbor_or_zero[(4,)](x, y, BLOCK=1)
    assert y.tolist() == 2 * [0, 1, 2, 3]


# ---- what stays different -----------------------------------------------------------------------------------------


@triton.jit
def beyond_the_mask(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n))


@row()
def masked_lanes_without_other_hold_nan():
    """And the largest finite number, in turns; of integers the largest and 0."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn):
        y = torch.full((8,), 5.0, dtype=dtype)
        beyond_the_mask[(1,)](torch.ones(8).to(dtype), y, 3, BLOCK=8)
        y = y.double()
        assert y[:3].tolist() == [1, 1, 1] and bool(y[3::2].isnan().all()), dtype
        assert y[4::2].tolist() == [torch.finfo(dtype).max] * 2, dtype
    y = torch.zeros(8, dtype=torch.int32)
    beyond_the_mask[(1,)](torch.ones(8, dtype=torch.int32), y, 3, BLOCK=8)
    assert y.tolist() == [1, 1, 1, 2**31 - 1, 0, 2**31 - 1, 0, 2**31 - 1]


@triton.jit
def begins_and_adds(count_ptr, FIRST: tl.constexpr):
    """One program sets the count that the others add to: too late for those that came before it."""
    if tl.program_id(0) == FIRST:
        tl.store(count_ptr, 10.0)
    else:
        tl.atomic_add(count_ptr, 1.0, sem="relaxed")


@triton.jit
def begins_and_adds_too(count_ptr, FIRST: tl.constexpr):
    """Its own atomic add, which orders memory, does not put the others behind its store."""
    if tl.program_id(0) == FIRST:
        tl.store(count_ptr, 10.0)
    tl.atomic_add(count_ptr, 1.0)


@row()
def a_store_beside_atomics():
    for first in (0, 3):
        fault_of(lambda first=first: begins_and_adds_too[(4,)](torch.zeros(1), FIRST=first), RaceFault)
    for first in (0, 2, 3):
        fault = fault_of(lambda first=first: begins_and_adds[(4,)](torch.zeros(1), FIRST=first), RaceFault)
        assert "by an atomic" in str(fault) and "count_ptr" in str(fault)


@triton.jit
def far_row(x_ptr, y_ptr, stride):
    row = tl.program_id(0)
    tl.store(y_ptr + row, row * stride)  # int32 times int32


@row(plain_fails=False)
def int32_offsets_wrap():
    y = torch.zeros(3, dtype=torch.int64)
    far_row[(3,)](y, y, 1 << 30)
    assert y.tolist() == [0, 1 << 30, -(1 << 31)]


@triton.jit
def growing_total(y_ptr, n):
    total = 0
    for _ in range(n):
        total += 0.5
    tl.store(y_ptr, total)


@row(plain_fails=VERSION < (3, 7))  # the bound of the loop
def a_dtype_may_change_in_a_loop():
    y = torch.zeros(1)
    growing_total[(1,)](y, 3)
    assert y.item() == 1.5


# ---- the table ----------------------------------------------------------------------------------------------------


def test_every_row_of_the_table_is_a_test():
    tests = Path(__file__).parents[1]
    table = (tests.parent / "gpukit/simulator/interpreter/differences_from_a_gpu.md").read_text()
    rows = [
        line for line in table.split("\n") if line.startswith("| ") and "---" not in line and "| tests |" not in line
    ]
    named = {row: re.findall(r"`([\w/.:]+)`", row.split("|")[-2]) for row in rows}
    assert len(rows) > 20 and all(named.values())
    for name in {name for names in named.values() for name in names}:
        file, _, function = name.rpartition("::")
        text = (tests.parent / (file or "tests/simulator/test_interpreter.py")).read_text()
        assert f"def {function}(" in text or function in ROWS, name
    assert ROWS.keys() <= {name for names in named.values() for name in names}


@pytest.mark.parametrize("name", ROWS)
def test_row(name):
    ROWS[name][0]()


@pytest.mark.parametrize("name", [name for name, (_, plain_fails) in ROWS.items() if plain_fails])
def test_row_fails_without_the_layer(name):
    layer.uninstall()
    with pytest.raises((AssertionError, triton.runtime.errors.InterpreterError, Exception, pytest.fail.Exception)):
        ROWS[name][0]()


def test_addresses_in_a_table_lead_to_the_copies_of_a_gpus_tensors():
    memory = Memory((1,), where=lambda: ("", 0))
    on_gpu, copy = torch.zeros(8), torch.zeros(8)
    memory.add("x", on_gpu, copy)
    there = np.array([on_gpu.data_ptr(), on_gpu.data_ptr() + 28, on_gpu.data_ptr() + 32, 7], dtype=np.uint64)
    found = memory.where_copied(there)
    assert found.tolist() == [copy.data_ptr(), copy.data_ptr() + 28, on_gpu.data_ptr() + 32, 7]


def test_what_is_compiled_after_an_interpreted_launch_has_tritons_own_min():
    """The compiler's module is imported with the first kernel; it must not find the interpreter's functions then."""
    code = """
import sys, torch, triton, triton.language as tl
from gpukit.simulator.interpreter import layer
layer.install()
from tests.simulator.test_interpreter import copy_rows
assert "triton.compiler.code_generator" not in sys.modules
copy_rows[(1,)](torch.ones(8), torch.empty(8), 8, 8, BLOCK=8, MASK_LOAD=True, MASK_STORE=True)
taken = sys.modules["triton.compiler.code_generator"].CodeGenerator.builtin_namespace["min"]
assert taken in (tl.minimum, getattr(tl.core, "builtin_min", None)), taken
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])
