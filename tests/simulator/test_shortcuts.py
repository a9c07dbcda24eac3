"""The interpreter's short ways give what Triton's own give, in value, type and complaint."""

import itertools
import operator

import numpy as np
import pytest
import triton
import triton.language as tl

from gpukit.simulator.interpreter import executor, layer, shortcuts
from gpukit.simulator.interpreter.running import interpreter_module

if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

OPERATORS = (operator.add, operator.sub, operator.mul, operator.lt, operator.le, operator.gt, operator.ge)
TYPES = (tl.int1, tl.int8, tl.int32, tl.int64, tl.uint32, tl.float16, tl.bfloat16, tl.float32, tl.float64)
SHAPES = ((), (4,), (4, 1), (1, 8), (4, 8), (8, 4))
NUMBERS = (0, 1, -3, 2**31, 2**40, True, 0.0, -0.0, 0.5, -1e-42, 1e39, float("inf"), float("nan"))


@pytest.fixture
def language():
    layer.install()
    scope = executor._language()
    with np.errstate(all="ignore"):
        yield
    scope.restore()


def tensor(dtype, shape, first: int = -3):
    """Small numbers of a type; addresses for a pointer."""
    ti = interpreter_module()
    data = np.arange(first, first + max(1, int(np.prod(shape)))).reshape(shape or (1,))
    if dtype is tl.int1:
        data = data % 3 == 0
    elif dtype is tl.bfloat16:
        data = (data.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        data = data.astype(ti._get_np_dtype(dtype))
    return tl.tensor(ti.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def outcome(function, left, right):
    try:
        made = function(left, right)
    except Exception as error:
        return type(error), str(error)
    data = made.handle.data
    return str(made.type), str(made.dtype), str(made.handle.dtype), data.dtype, data.shape, data.tobytes()


def compare(monkeypatch, pairs) -> set[int]:
    """How many pairs gave a number and how many an error; both kinds of way agree in each."""
    results = {}
    for way in ("short", "long"):
        if way == "long":
            for name in ("_NUMBERS", "_OFFSETS"):
                monkeypatch.setattr(shortcuts, name, {})
        results[way] = [outcome(function, *pair) for pair in pairs for function in OPERATORS]
    for short, long, (pair, function) in zip(
        results["short"], results["long"], itertools.product(pairs, OPERATORS), strict=True
    ):
        assert short == long, (function.__name__, [(getattr(x, "type", x), getattr(x, "shape", "")) for x in pair])
    return {len(result) for result in results["short"]}


def test_numbers_of_all_types_and_shapes(language, monkeypatch):
    left = [tensor(dtype, shape) for dtype in TYPES for shape in SHAPES]
    right = [tensor(dtype, shape, first=-1) for dtype in TYPES for shape in SHAPES]
    assert compare(monkeypatch, list(itertools.product(left, right))) == {2, 6}


def test_plain_numbers_on_either_side(language, monkeypatch):
    tensors = [tensor(dtype, shape) for dtype in TYPES for shape in ((), (4,))]
    numbers = [*NUMBERS, *map(tl.constexpr, NUMBERS)]
    pairs = list(itertools.product(tensors, numbers))
    assert compare(monkeypatch, [*pairs, *(pair[::-1] for pair in pairs)]) == {2, 6}


def test_pointers(language, monkeypatch):
    for element in (tl.float32, tl.float16, tl.int1):
        pointers = [tensor(tl.pointer_type(element), shape, first=4096) for shape in SHAPES]
        offsets = [tensor(dtype, shape) for dtype in (tl.int32, tl.int64, tl.uint32, tl.float32) for shape in SHAPES]
        pairs = list(itertools.product(pointers, [*offsets, 3, 1.5, pointers[1]]))
        with monkeypatch.context() as patch:
            assert compare(patch, [*pairs, *(pair[::-1] for pair in pairs)]) == {2, 6}
