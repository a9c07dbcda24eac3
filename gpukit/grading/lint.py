"""What a learner's file may not contain, told from its text before it runs.

Exercises need torch, Triton and arithmetic. Anything that reaches around them (files, processes, the interpreter's insides)
is either a slip or a way to fool the check, and gets one sentence that names the line. This is the cheap fence; the
worker's witnesses (gpukit.grading.worker) are the proof.
"""

from __future__ import annotations

import ast
import sys
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
    "storage futures monitor testing types torch_version".split()
)
# A module's own imports (typing.sys, torch.os) are doors to the whole standard library; these five are also torch functions.
_STDLIB = frozenset(sys.stdlib_module_names) - MODULES - {"copy", "random", "select", "signal", "trace"}
# Ways out of the tensors that the worker watches.
_ATTRIBUTES = frozenset(
    "numpy tolist untyped_storage storage set_ resize_ set_printoptions from_dlpack to_dlpack "
    "format format_map".split()  # "{0._gpu}".format(device) reads what no expression may; f-strings are seen here
)
# Standard modules that other modules hold: reached through any name, they are a way around the check.
_DOORS = frozenset(
    "os sys io subprocess shutil pathlib ctypes importlib builtins inspect gc pickle socket threading weakref".split()
)
_DUNDERS = frozenset("__init__ __post_init__ __name__ __doc__ __version__ __len__ __call__ __getitem__ __eq__".split())


@dataclass(frozen=True)
class Finding:
    line: int
    text: str


def lint(source: str, *, numpy: bool = True) -> Finding | None:
    """The first thing in `source` that an exercise may not use, or None. Raises SyntaxError.

    numpy  whether NumPy is allowed: in a kernel's host code it would compute where the worker does not look
    """
    tree = ast.parse(source)
    roots: dict[str, str] = {}  # name in the file -> what it was imported as
    modules: set[str] = set()  # the names that are modules for certain
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
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
                roots[name.asname or name.name] = f"{module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _BUILTINS:
            return Finding(node.lineno, f"{node.id}")
        if isinstance(node, ast.Name) and node.id in modules and id(node) not in bases:
            return Finding(node.lineno, f"the module {node.id} as a value")
        if isinstance(node, ast.Attribute):
            path = _path(node, roots)
            if path and not isinstance(node.ctx, ast.Load):
                return Finding(node.lineno, f"an assignment to {path}")
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
    if any(part.startswith("_") and part not in ("__future__", *_DUNDERS) for part in rest):
        return dotted
    if any(part in _STDLIB for part in rest):
        return dotted
    if first == "triton" and rest and rest[0] not in _TRITON:
        return dotted
    if first == "torch" and rest and rest[0] in _TORCH:
        return dotted
    return None


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
