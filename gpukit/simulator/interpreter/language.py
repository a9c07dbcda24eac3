"""What Triton's compiler makes of the words that its interpreter leaves to Python, and the functions that it lacks.

Python asks a block of 16 numbers for its truth once; the compiler asks each of them. So `and`, `or`, `not` and what an `if`
asks are rewritten (`rewriter`), and `min`, `max` and `range` have another meaning inside a kernel (`bind`).
"""

import ast
import builtins
import inspect
import itertools
from functools import cache, partial, partialmethod
from types import SimpleNamespace

import numpy as np
import triton.language as tl

from gpukit.simulator.interpreter import arithmetic, running
from gpukit.simulator.interpreter.integers import Read
from gpukit.simulator.interpreter.running import interpreter_module
from gpukit.simulator.interpreter.turns import alike

# ---- and, or, not -------------------------------------------------------------------------------------------------


def rewriter(plain):
    """The transformer of a kernel's text: `a and b` becomes interpreter_semantic.all_of(lambda: a, lambda: b)."""

    def call(name: str, values: list[ast.expr]) -> ast.Call:
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        function = ast.Attribute(value=ast.Name(id="interpreter_semantic", ctx=ast.Load()), attr=name, ctx=ast.Load())
        return ast.Call(func=function, args=[ast.Lambda(args=nothing, body=value) for value in values], keywords=[])

    class Rewriter(type(plain)):
        def visit_Assign(self, node):
            node.value = self.visit(node.value)  # Triton's own looks at the targets only
            return super().visit_Assign(node)

        def visit_BoolOp(self, node):
            self.generic_visit(node)
            return ast.copy_location(call("all_of" if isinstance(node.op, ast.And) else "any_of", node.values), node)

        def visit_UnaryOp(self, node):
            self.generic_visit(node)
            return ast.copy_location(call("none_of", [node.operand]), node) if isinstance(node.op, ast.Not) else node

        def visit_If(self, node):
            self.generic_visit(node)
            node.test = ast.copy_location(call("one_truth", [node.test]), node.test)
            return node

        visit_While = visit_IfExp = visit_If

    return Rewriter()


def compiled(plain):
    """A kernel's text as a function. Triton's own leaves all names of its interpreter among those of the file."""

    def _compile_and_exec(self, transformed_ast):
        names, made = self.fn.__globals__, dict(self.kwargs)
        names.setdefault("interpreter_semantic", interpreter_module().interpreter_semantic)
        exec(compile(transformed_ast, filename=self.filename, mode="exec"), names, made)
        return made[self.fn.__name__]

    return _compile_and_exec


def _joined(decisive: bool, method: str, conditions):
    """As the compiler joins them: what is known when it compiles may decide, and tensors are all computed."""
    tensors = []
    for condition in conditions:
        value = condition()
        if isinstance(value, tl.tensor):
            tensors.append(value)
        elif bool(value) is decisive:
            return value
    if not tensors:
        return value
    *others, result = tensors
    for other in reversed(others):
        result = getattr(other, method)(result)
    return result


def all_of(plain):
    return lambda *conditions: _joined(False, "logical_and", conditions)


def any_of(plain):
    return lambda *conditions: _joined(True, "logical_or", conditions)


def none_of(plain):
    def none_of(condition):
        value = condition()
        return value.__not__() if isinstance(value, tl.tensor) else not value

    return none_of


def one_truth(plain):
    """What `if`, `while` and `x if condition else y` ask. Triton's own says that every block is true."""

    def one_truth(condition):
        value = condition()
        if isinstance(value, tl.tensor) and value.handle.data.size > 1:
            raise ValueError(
                f"an `if` or a `while` asks for one truth, and its condition is a block of {value.handle.data.size:,}, which "
                "Triton's compiler refuses: tl.where chooses for each element"
            )
        return value

    return one_truth


# ---- names that mean something else inside a kernel ---------------------------------------------------------------


def bind(scope) -> None:
    """For the time of a launch: functions of triton.language."""
    replaced = {
        "range": _counter(tl.range),
        "static_range": _unrolled(tl.static_range),
        "dot_scaled": _with_formats(tl.dot_scaled),
        "map_elementwise": _map_elementwise,
    }
    for name, meaning in replaced.items():
        scope.set_attr(tl, name, meaning)
        scope.set_attr(tl.core, name, meaning)
    semantic = interpreter_module().interpreter_semantic
    for name, method in _unbound_methods():
        scope.set_attr(tl.tensor, name, partialmethod(method, _semantic=semantic))


@cache
def _unbound_methods() -> list[tuple[str, object]]:
    """x.exp() and the like: Triton's interpreter knows a builtin by a mark, which the methods of tl.math lack."""
    methods = inspect.getmembers(tl.tensor, inspect.isfunction)
    unknown = [(name, method) for name, method in methods if not tl.core.is_builtin(method)]
    return [(name, method) for name, method in unknown if "_semantic" in inspect.signature(method).parameters]


def bind_words(scope, names: dict) -> None:
    """For the time of a launch: what is a builtin elsewhere, in the globals of a function that runs in it."""
    for word, meaning in _WORDS.items():
        if word not in names:
            scope.set_attr(Globals(names), word, meaning)


class Globals:
    """The globals of a module as attributes."""

    def __init__(self, names: dict):
        self.__dict__ = names


def _counter(plain):
    """`range`, or tl.range, whose counter is a tensor as the compiler makes it: of 64 bits if one of the bounds has so many."""

    def counted(*bounds, **options):
        numbers = plain(*bounds, **options)
        given = [*bounds, *options.values()]
        if any(isinstance(getattr(getattr(bound, "handle", None), "data", None), Read) for bound in given):
            # Of another length in each program: all are like those that run whole, or none.
            running.now.shortened = True
        wide = any(getattr(bound, "dtype", None) is tl.int64 for bound in given)
        wide = wide or any(not -(2**31) <= number < 2**31 for number in (numbers.start, numbers.stop, numbers.step))
        dtype, kind = (np.int64, tl.int64) if wide else (np.int32, tl.int32)
        handle = interpreter_module().TensorHandle

        def counter(n: int):
            return tl.core.tensor(handle(np.array([n], dtype=dtype), kind), kind)

        if running.now.seen is not None:
            running.now.lengths.append(len(numbers))
            return map(counter, _once(numbers))
        return alike(numbers, counter)

    return counted


def _unrolled(plain):
    """tl.static_range, whose counter is a number of the compiler."""

    def unrolled(*bounds, **options):
        return _once(plain(*bounds, **options))

    return unrolled


def _once(numbers):
    """All of them; in a program that only shows where its accesses begin as many as it takes until each has had a live lane."""
    made = running.now and running.now.seen
    if made is None or running.now.in_gluon:
        yield from numbers
        return
    before = len(made)
    for turn, number in enumerate(numbers, start=1):
        yield number
        if turn < len(numbers) and len(made) > before and (all(made.values()) or turn == _TURNS):
            running.now.shortened = True
            return


_TURNS = 64  # of a loop with masked accesses, before a program that only shows where they begin leaves it


def _extreme(plain, function: str, *args, **options):
    if not any(isinstance(arg, tl.tensor) for arg in args):
        return plain(*args, **options)
    result, *others = args
    for other in others:
        result = getattr(tl, function)(result, other)
    return result


_WORDS = {
    "range": _counter(range),
    "min": partial(_extreme, builtins.min, "minimum"),
    "max": partial(_extreme, builtins.max, "maximum"),
}


def _with_formats(plain):
    """tl.dot_scaled asks its formats for the value that a string has in the compiler."""

    def dot_scaled(*args, **options):
        args = [tl.constexpr(arg) if isinstance(arg, str) else arg for arg in args]
        return plain(*args, **{name: tl.constexpr(o) if isinstance(o, str) else o for name, o in options.items()})

    return dot_scaled


def _map_elementwise(function, *args, pack=1):
    """A scalar function on each element, or on `pack` of them at a time."""
    make = interpreter_module().TensorHandle
    pack = getattr(pack, "value", pack)
    blocks = np.broadcast_arrays(*(arg.handle.data for arg in args))
    shape, size = blocks[0].shape, blocks[0].size
    kinds = [arg.dtype for arg in args]
    rows = []
    for start in range(0, size, pack):
        lanes = range(start, start + pack)
        scalars = [
            tl.core.tensor(make(block.reshape(-1)[lane : lane + 1], kind), kind)
            for (block, kind), lane in itertools.product(zip(blocks, kinds, strict=True), lanes)
        ]
        rows.append(function(*scalars))
    single = not isinstance(rows[0], (tuple, tl.tuple))
    columns = list(zip(*([row] if single else list(row) for row in rows), strict=True))
    results = []
    for first in range(0, len(columns), pack):  # one result of the function is `pack` of its values
        values = [value for row in zip(*columns[first : first + pack], strict=True) for value in row]
        kind = values[0].dtype
        data = np.concatenate([value.handle.data.reshape(1) for value in values]).reshape(shape)
        results.append(tl.core.tensor(make(data, kind), tl.block_type(kind, list(shape))))
    return results[0] if single else tuple(results)


def left_of_a_tensor(plain):
    """What a constant does with a tensor on its right is the tensor's business: `TWO * x` is a tensor, not a constant."""
    return lambda self, other: NotImplemented if isinstance(other, tl.tensor) else plain(self, other)


# ---- functions that combine ---------------------------------------------------------------------------------------


def combining(plain):
    """A reduction or a scan with a function of the kernel's author, which is rewritten as kernels are, along an axis that may
    be counted from the end. Triton's takes the function as it stands, and the axis."""

    def generic(self, input):
        function, axis = self.combine_fn, self.axis
        self.combine_fn = SimpleNamespace(fn=function)
        if axis is not None:
            self.axis = axis % len(input[0].shape)
        try:
            return plain(self, input)
        finally:
            self.combine_fn, self.axis = function, axis

    return generic


def combining_in_a_tree(plain):
    """A reduction with a function of the kernel's author: neighbors first, then pairs of neighbors, all of a round at once.
    Triton's goes through the elements one after the other, which takes long and rounds otherwise than a GPU."""
    one_by_one = combining(plain)

    def generic(self, input):
        axis = 0 if self.axis is None else self.axis % len(input[0].shape)
        kinds = [value.dtype.scalar for value in input]
        values = [value.handle.data.reshape(-1) if self.axis is None else value.handle.data for value in input]
        values = [np.moveaxis(value, axis, -1) for value in values]
        while (n := values[0].shape[-1]) > 1:
            if n % 2:
                return one_by_one(self, input)
            halves = [self.to_tensor(v[..., i::2], kind) for i in (0, 1) for v, kind in zip(values, kinds, strict=True)]
            made = self.combine_fn(*halves)
            made = made if isinstance(made, tuple) else (made,)
            shape = (*values[0].shape[:-1], n // 2)
            values = [np.broadcast_to(getattr(x, "handle", SimpleNamespace(data=x)).data, shape) for x in made]
        if self.keep_dims:
            shape = [1] * len(input[0].shape)
            values = [value.reshape(shape) if self.axis is None else np.moveaxis(value, -1, axis) for value in values]
        else:
            values = [value[..., 0] if value.ndim > 1 else value.item() for value in values]
        return [self.to_tensor(value, kind) for value, kind in zip(values, kinds, strict=True)]

    return generic


# ---- products of scaled blocks ------------------------------------------------------------------------------------


def dot_scaled(plain):
    """Scaled numbers as fp32, then a product. GPUs without a unit for it do the same with bf16."""

    def create_dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, fast, a_k_pack, b_k_pack, acc):
        ti = interpreter_module()
        left = arithmetic.scaled(a, a_scale, a_format, a_k_pack)
        right = np.swapaxes(arithmetic.scaled(_transposed(b), b_scale, b_format, b_k_pack), -1, -2)
        a, b = (ti.TensorHandle(np.ascontiguousarray(x), tl.float32) for x in (left, right))
        return self.create_dot(a, b, acc, ti._ir.INPUT_PRECISION.IEEE, 0)

    return create_dot_scaled


def _transposed(handle):
    return interpreter_module().TensorHandle(np.swapaxes(handle.data, -1, -2), handle.dtype)
