"""What a learner's file may not contain, told from its text before it runs.

Exercises need torch, Triton and arithmetic. Anything that reaches around them (files, processes, the interpreter's insides)
is either a slip or a way to fool the check, and gets one sentence that names the line. This is the cheap fence; the
worker's witnesses (gpukit.grading.worker) are the proof.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass

MODULES = frozenset(
    "__future__ abc collections dataclasses einops enum functools itertools math numpy torch triton typing".split()
)
_BUILTINS = frozenset(
    "eval exec compile open input breakpoint globals locals vars __import__ __builtins__ setattr delattr memoryview".split()
)
_TRITON = frozenset("jit autotune heuristics Config cdiv next_power_of_2 language".split())
_TORCH = frozenset(
    "utils jit ops library compile overrides os sys hub load save multiprocessing serialization fx package classes "
    "storage futures monitor testing types torch_version distributed".split()
)
# A module's own imports (typing.sys, torch.os) are doors to the whole standard library; these six are also functions of torch or
# NumPy.
_STDLIB = frozenset(sys.stdlib_module_names) - MODULES - {"array", "copy", "random", "select", "signal", "trace"}
# Ways out of the tensors that the worker watches. A block's handle holds it as a NumPy array in the interpreter.
_ATTRIBUTES = frozenset(
    "handle numpy tolist untyped_storage storage set_ resize_ apply_ map_ map2_ set_printoptions from_dlpack to_dlpack "
    "format format_map".split()  # "{0._gpu}".format(device) reads what no expression may; f-strings are seen here
)
# Reached through any name, these are a way around the check: standard modules that other modules hold; functions that
# evaluate text or set attributes; the frames of generators.
_DOORS = frozenset(
    "os sys io subprocess shutil pathlib ctypes importlib builtins inspect gc pickle socket threading weakref bltns mp np "
    "stdlib_re f2py knobs pytree get_type_hints ForwardRef evaluate_forward_ref singledispatch singledispatchmethod "
    "update_wrapper wraps global_enum gi_frame cr_frame ag_frame tb_frame f_back f_globals f_locals f_builtins".split()
)
_HOOKS = frozenset("__torch_function__ __torch_dispatch__".split())
_DUNDERS = frozenset("__init__ __post_init__ __name__ __doc__ __version__ __len__ __call__ __getitem__ __eq__".split())


@dataclass(frozen=True)
class Finding:
    line: int
    text: str


def lint(source: str, *, numpy: bool = True) -> Finding | None:
    """The first thing in `source` that an exercise may not use, or None. Raises SyntaxError.

    numpy  whether NumPy is allowed: it computes, and holds arrays, where the worker does not look
    """
    tree = ast.parse(source)
    roots: dict[str, str] = {}  # name in the file -> what it was imported as
    modules: set[str] = set()  # the names that are modules for certain
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if problem := _module(name.name):
                    return Finding(node.lineno, problem)
                if name.name.partition(".")[0] == "numpy" and not numpy:
                    return Finding(node.lineno, "import numpy")
                alias = name.asname or name.name.partition(".")[0]
                roots[alias] = name.name if name.asname else alias
                modules.add(alias)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                return Finding(node.lineno, "a relative import")
            if problem := _module(module) or ("import numpy" if module.startswith("numpy") and not numpy else None):
                return Finding(node.lineno, problem)
            for name in node.names:
                if problem := _module(f"{module}.{name.name}"):
                    return Finding(node.lineno, problem)
                if name.name == "*" and module != "math":
                    return Finding(node.lineno, f"from {module} import *")
                roots[name.asname or name.name] = f"{module}.{name.name}"
    classes: set[str] = set()  # names of what type() gave
    for node in ast.walk(tree):
        for name, value in _bindings(node):
            if isinstance(value, ast.Attribute) and (path := _path(value, roots)):
                roots.setdefault(name, path)
            elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "type":
                classes.add(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _BUILTINS | _HOOKS:
            return Finding(node.lineno, f"{node.id}")
        if isinstance(node, ast.Name) and node.id == "getattr" and id(node) not in called:
            return Finding(node.lineno, "getattr as a value")
        if isinstance(node, ast.FunctionDef) and node.name in _HOOKS:
            return Finding(node.lineno, f"def {node.name}")
        if isinstance(node, ast.MatchClass) and (node.patterns or node.kwd_attrs):
            return Finding(node.lineno, "a class pattern")
        if isinstance(node, ast.Name) and node.id in modules and id(node) not in bases:
            return Finding(node.lineno, f"the module {node.id} as a value")
        if isinstance(node, ast.Attribute):
            path = _path(node, roots)
            if path and not isinstance(node.ctx, ast.Load):
                return Finding(node.lineno, f"an assignment to {path}")
            of_class = isinstance(node.value, ast.Call) or getattr(node.value, "id", None) in classes
            if of_class and not isinstance(node.ctx, ast.Load):
                return Finding(node.lineno, f"an assignment to {ast.unparse(node)}")
            if node.attr in _DOORS:
                return Finding(node.lineno, f".{node.attr}")
            if node.attr.startswith("_") and node.attr not in _DUNDERS and not _is_self(node.value):
                return Finding(node.lineno, f".{node.attr}")
            if node.attr in _ATTRIBUTES:
                return Finding(node.lineno, f".{node.attr}")
            if path and (problem := _module(path)):
                return Finding(node.lineno, problem)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1] if len(node.args) > 1 else None
            if not (isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isidentifier()):
                return Finding(node.lineno, "getattr with a computed name")
            if name.value.startswith("_") or name.value in _ATTRIBUTES:
                return Finding(node.lineno, f"getattr(…, {name.value!r})")
    return None


def _module(dotted: str) -> str | None:
    """What is wrong with importing or naming `dotted`, or None."""
    first, *rest = dotted.split(".")
    if first not in MODULES:
        return f"import {first}"
    for again in ("torch", "triton"):  # torch.nn.functional holds torch
        if again in rest:
            return _module(".".join(rest[rest.index(again) :]))
    if any(part in _DOORS for part in rest):
        return dotted
    if any(part.startswith("_") and part not in ("__future__", *_DUNDERS) for part in rest):
        return dotted
    if any(part in _STDLIB for part in rest):
        return dotted
    if first == "triton" and rest and rest[0] not in _TRITON:
        return dotted
    if first == "torch" and rest and (rest[0] in _TORCH or {"ops", "parallel"} & set(rest)):
        return dotted
    return None


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that an assignment gives to expressions, with the expressions."""
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        for name, value in zip(target.elts, node.value.elts) if several else [(target, node.value)]:  # noqa: B905
            if isinstance(name, ast.Name):
                yield name.id, value


def _path(node: ast.Attribute, roots: dict[str, str]) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in roots:
        return ".".join([roots[node.id], *reversed(parts)])
    return None


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "ctx")
