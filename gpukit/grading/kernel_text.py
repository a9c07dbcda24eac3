"""What the text of a kernel may say, so that running it as Python can do nothing but compute.

The interpreter runs a kernel as Python, and the device (gpukit.grading.device) runs it in the process whose word counts. So
what is said there is on a list: the statements that Triton compiles, names of the function's own, public names of
triton.language and of its values. What is not on the list does not run.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib
import inspect
import math
import textwrap
import types
from collections.abc import Collection, Mapping
from typing import Any

BUILTINS = frozenset("range min max len int float bool abs isinstance print".split())
_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr,
    ast.If, ast.For, ast.While, ast.Pass, ast.Break, ast.Continue, ast.Assert, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp,
    ast.Compare, ast.Call, ast.keyword, ast.Constant, ast.Attribute, ast.Subscript, ast.Slice, ast.Starred, ast.Name,
    ast.NamedExpr, ast.Tuple, ast.List, ast.JoinedStr, ast.FormattedValue, ast.expr_context, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop,
)  # fmt: skip
_FEW = {"triton": {"language", "cdiv", "next_power_of_2"}, "torch": {"Tensor"}}
_FUNCTIONS = frozenset(f"triton.language.{name}" for name in ("math", "extra.libdevice", "extra.cuda.libdevice"))
_PARTS = frozenset({"triton.language.core", "triton.language.standard", "triton.language.random"})
_PACKAGES = {"triton.language.extra": {"libdevice", "cuda"}, "triton.language.extra.cuda": {"libdevice"}}
_INSIDE = frozenset({"to_ir", "mangle", "cache_key_part"})  # of the compiler's business


INSTEAD = {
    "a comprehension": "a check runs kernels without comprehensions: write the loop out",
    "the keyword": "a check runs kernels without **: name each argument of the call",
    "an assignment to": "a block is not changed in place: make a new one, with tl.where for some of its elements",
    "the name": "a kernel knows its arguments, its own names, constants of the file that are tl.constexpr, and @triton.jit "
    "functions beside it",
}


def instead(what: str) -> str:
    """What to write in the place of something refused."""
    known = (text for begin, text in INSTEAD.items() if what.startswith(begin))
    return next(
        known, "a check runs what kernels are made of: assignments, loops, if, return and the public names of tl"
    )


class Refused(ValueError):
    """A kernel says what the device does not run; `line` of its text, 0 where none is known."""

    def __init__(self, what: str, line: int = 0):
        super().__init__(what)
        self.what, self.line = what, line


def function(tree: ast.Module, name: str, known: Mapping[str, Any], fields: Collection[str] = ()) -> None:
    """Look at the text of one function. `known` is what the file's names mean in it, `fields` the names of a tuple's items.
    Raises Refused."""
    (root,) = tree.body
    if not isinstance(root, ast.FunctionDef) or root.name != name or root.decorator_list:
        raise Refused(f"{name} is not what it seems")
    own = {node.arg for node in ast.walk(root) if isinstance(node, ast.arg)}
    own |= {node.id for node in ast.walk(root) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    # Defaults and annotations are evaluated outside the function, where its own names mean nothing.
    outside = [*root.args.defaults, *root.args.kw_defaults, *(arg.annotation for arg in _arguments(root)), root.returns]
    for names, nodes in ((own, ast.walk(root)), (set(), (node for each in outside if each for node in ast.walk(each)))):
        for node in nodes:
            if what := _refused(node, root, names, known, fields):
                raise Refused(what, getattr(node, "lineno", 0))


def _arguments(root: ast.FunctionDef) -> list[ast.arg]:
    return [node for node in ast.walk(root.args) if isinstance(node, ast.arg)]


def _refused(
    node: ast.AST, root: ast.FunctionDef, own: set[str], known: Mapping[str, Any], fields: Collection[str]
) -> str:
    """What is not on the list, or an empty string."""
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return "a comprehension"
    if not isinstance(node, _NODES) or (isinstance(node, ast.FunctionDef) and node is not root):
        return ast.unparse(node).partition("\n")[0][:60] if isinstance(node, ast.stmt | ast.expr) else "a comprehension"
    if isinstance(node, ast.Name | ast.arg):
        name = node.id if isinstance(node, ast.Name) else node.arg
        if name.startswith("__") or not (name in own or name in known or name in BUILTINS):
            return f"the name {name}"
    if isinstance(node, ast.keyword) and (node.arg is None or node.arg.startswith("_")):
        return f"the keyword {node.arg or '**'}"
    if isinstance(node, ast.Attribute):
        if not isinstance(node.ctx, ast.Load):
            return f"an assignment to .{node.attr}"
        of = _module(node.value, own, known)
        said = _has(of, node.attr) if of is not None else node.attr in _methods() or node.attr in fields
        if node.attr.startswith("_") or not said:
            return f"{ast.unparse(node.value)}.{node.attr}"
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return "an assignment to an element"
    return ""


def _module(node: ast.expr, own: set[str], known: Mapping[str, Any]) -> types.ModuleType | None:
    """The module that an expression names; its parts are looked at on their own."""
    found = None
    if isinstance(node, ast.Name) and node.id not in own:
        found = known.get(node.id)
    elif isinstance(node, ast.Attribute) and (of := _module(node.value, own, known)) is not None:
        found = getattr(of, node.attr, None)
    return found if isinstance(found, types.ModuleType) else None


def _has(module: types.ModuleType, name: str) -> bool:
    """Whether a kernel may say module.name."""
    where = module.__name__
    if where in _FEW:
        return name in _FEW[where]
    if where in ("triton.language", *_PARTS):
        return name in importlib.import_module("triton.language").__all__ and name != "target_info"
    if where in _PACKAGES:
        return name in _PACKAGES[where]
    if where in _FUNCTIONS:
        return (getattr(vars(module).get(name), "__module__", None) or "").startswith("triton.language")
    return module is math


def imported(module: str, name: str) -> Any:
    """A module, or something in it, that a name of the learner's file stands for. Raises Refused."""
    if module == "builtins":
        if name in BUILTINS:
            return getattr(importlib.import_module(module), name)
    elif module in ("triton.language", "math", *_FEW, *_PARTS, *_PACKAGES, *_FUNCTIONS):
        found = importlib.import_module(module)
        if not name:
            return found
        if not name.startswith("_") and _has(found, name):
            return getattr(found, name)
    raise Refused(f"{module}.{name}".rstrip("."))


@functools.cache
def _methods() -> frozenset[str]:
    """What a kernel may ask of a value: the public names of Triton's tensors, descriptors, types and constants."""
    import triton.language as tl

    classes = (tl.tensor, tl.pointer_type, tl.block_type, tl.constexpr, tl.core.tensor_descriptor)
    names = {name for each in classes for name in dir(each)} - _INSIDE
    shown = {"type", "shape", "dtype", "value", "element_ty", "scalar", "numel", "strides", "block_shape", "name"}
    shown |= {
        "ALL",
        "NONE",
        "primitive_bitwidth",
        "int_bitwidth",
        "fp_mantissa_width",
        "int_signedness",
        "address_space",
    }
    return frozenset(name for name in names | shown if not name.startswith("_"))


def named_tuple(name: Any, fields: Any) -> type:
    """A type of tuples. Raises Refused if a field has the name of something that other values hold."""
    for field in fields:
        if type(field) is not str or field in _elsewhere():
            raise Refused(f"the field {field}")
    return collections.namedtuple(str(name), fields)


@functools.cache
def _elsewhere() -> frozenset[str]:
    """The attributes of what a kernel may hold in the interpreter, from a block's array to a function's code."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction, TensorHandle

    handle = TensorHandle(np.zeros(1, dtype=np.int32), tl.int32)
    called = InterpretedFunction(named_tuple)
    things = (handle, handle.data, tl.tensor(handle, tl.int32), tl.constexpr(1), tl.int32, tl, math, tl.load)
    things += (called, called.rewriter, named_tuple, named_tuple.__code__, "", 1, 1.0, (), [], {}, slice(1), type)
    return frozenset(name for thing in things for name in dir(thing))


def as_run(made: types.FunctionType) -> ast.stmt:
    """What the interpreter finds when it reads a function's text again, from the last line that begins with "def" on."""
    lines, _ = inspect.getsourcelines(made)
    last = max(i for i, line in enumerate(lines) if line.strip().startswith("def "))
    (node,) = ast.parse(textwrap.dedent("".join(lines[last:]))).body
    return node
