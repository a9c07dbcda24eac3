"""Mutants: the wrong answers that nobody thought of, made from a solution by changing one thing in its gaps.

A check that accepts a mutant either lacks an input that tells it from the solution, or the mutant computes the same; then
solutions/answers lists it as equivalent with the reason (gpukit/integrity.py).
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gpukit.grading import stubs

_COMPARISONS = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt,),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt,),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_OPERATORS = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mod, ast.Mult),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}
_NAMES = {  # what stands for what, as an attribute (tl.float32) or a name
    "float32": ("float16",),
    "int64": ("int32",),
    "max": ("min", "sum"),
    "min": ("max",),
    "maximum": ("minimum",),
    "minimum": ("maximum",),
    "sum": ("max",),
    "exp": ("exp2",),
    "exp2": ("exp",),
    "cdiv": ("next_power_of_2",),
    "zeros": ("empty",),
    "zeros_like": ("empty_like",),
    "atomic_add": ("store",),
    "amax": ("amin",),
}
# Calls whose argument takes their place: a conversion, a bound or a function forgotten.
_TRANSPARENT = frozenset(
    "to float double exp log sqrt rsqrt abs round floor ceil contiguous clamp cast maximum minimum max min int sorted where".split()
)


@dataclass(frozen=True)
class Mutant:
    """line: in the solution's text; change: "< -> <=" and the like; source: the whole file."""

    line: int
    change: str
    source: str


def mutants(source: str, first: int, last: int) -> list[Mutant]:
    """One change each in the gaps that lie between two places of the text; none equals another or the source."""
    tree = ast.parse(source)
    gaps = [(begin + 1, end + 1) for begin, end in stubs.regions(source)]  # ast counts lines from 1

    def inside(node: ast.AST) -> bool:
        return any(begin < node.lineno and node.end_lineno < end for begin, end in gaps) and (
            first <= span(source, node)[0] < last
        )

    seen, found = {ast.dump(tree)}, []
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.stmt) or not inside(node):
            continue
        for change, new in _changes(node, tree):
            text = _spliced(source, node, new)
            try:
                dump = ast.dump(ast.parse(text))
            except SyntaxError:
                continue
            if dump not in seen:
                seen.add(dump)
                found.append(Mutant(node.lineno, change, text))
    return sorted(found, key=lambda mutant: (mutant.line, mutant.change))


def span(source: str, node: ast.AST) -> tuple[int, int]:
    """Where in the text the node begins and ends. (ast counts lines from 1, and columns in bytes.)"""
    lines = source.splitlines(keepends=True)

    def place(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)


def _spliced(source: str, node: ast.AST, new: str) -> str:
    begin, end = span(source, node)
    if isinstance(node, ast.expr):
        new = f"({new})" if "\n" not in new else new
    else:
        new = new.replace("\n", "\n" + " " * node.col_offset)
        if source.startswith("elif", begin) and new.startswith("if "):
            new = "el" + new
    return source[:begin] + new + source[end:]


def _changes(node: ast.AST, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(what changes, the text that takes the node's place)"""

    def shown(old: object, new: object) -> str:
        return f"{old} -> {new}"

    def replaced(change, label: str):
        new = copy.deepcopy(node)
        change(new)
        return label, ast.unparse(new)

    match node:
        case ast.Compare(ops=[op]):
            for other in _COMPARISONS.get(type(op), ()):
                yield replaced(lambda n, o=other: setattr(n, "ops", [o()]), shown(_sign(op), _sign(other())))
        case ast.BinOp(op=op):
            for other in _OPERATORS.get(type(op), ()):
                yield replaced(lambda n, o=other: setattr(n, "op", o()), shown(_sign(op), _sign(other())))
            if isinstance(op, ast.BitAnd | ast.Add | ast.Sub | ast.Mult | ast.Div):
                yield f"without {_sign(op)} {ast.unparse(node.right)}", ast.unparse(node.left)
            pointer = ast.unparse(node.left).partition(" ")[0].endswith("_ptr")  # without it nothing would run
            if isinstance(op, ast.BitAnd | ast.Add | ast.Mult) and not pointer:
                yield f"without {ast.unparse(node.left)} {_sign(op)}", ast.unparse(node.right)
            if isinstance(op, ast.Sub | ast.Div | ast.FloorDiv):
                swapped = ast.BinOp(left=node.right, op=op, right=node.left)
                yield "operands swapped", ast.unparse(swapped)
        case ast.BoolOp(values=values):
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                text = ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(op=node.op, values=rest))
                yield f"without {ast.unparse(values[i])}", text
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield f"without {ast.unparse(node)[:1]}", ast.unparse(operand)
        case ast.Constant(value=bool() as value):
            yield shown(value, not value), repr(not value)
        case ast.Constant(value=int() as value):
            yield shown(value, value + 1), repr(value + 1)
            if value > 1:
                yield shown(value, value - 1), repr(value - 1)
        case ast.Constant(value=float() as value):
            other = 1.0 if value == 0 else 0.0
            yield shown(value, other), repr(other)
            if value not in (0.0, 1.0):
                yield shown(value, 1.1 * value), repr(1.1 * value)
        case ast.Constant(value="inf"):
            yield "inf -> 0", "'0'"
        case ast.Constant(value=str() as value) if value == "ieee":
            yield "ieee -> tf32", "'tf32'"
        case ast.Attribute(attr=name) if name in _NAMES:
            for other in _NAMES[name]:
                yield replaced(lambda n, o=other: setattr(n, "attr", o), shown(name, other))
        case ast.Name(id=name, ctx=ast.Load()):
            for other in _siblings(name, node, tree):
                yield shown(name, other), other
        case ast.Call(func=func, args=args, keywords=keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg in ("mask", "other", "input_precision", "reverse"):
                    rest = keywords[:i] + keywords[i + 1 :]
                    if keyword.arg == "mask":
                        rest = [k for k in rest if k.arg != "other"]
                    yield f"without {keyword.arg}=", ast.unparse(ast.Call(func=func, args=args, keywords=rest))
            called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            if called in _TRANSPARENT:
                method = isinstance(func, ast.Attribute) and ast.unparse(func.value) not in (
                    "tl",
                    "torch",
                    "math",
                    "libdevice",
                )
                kept = [func.value] if method else args[1:] if called == "where" else args
                for argument in kept[:2]:
                    yield f"without {called}()", ast.unparse(argument)
            for i in range(len(args) - 1):
                if called not in ("max", "min", "maximum", "minimum", "load", "store", "atomic_add") and ast.unparse(
                    args[i]
                ) != ast.unparse(args[i + 1]):
                    new = [*args[:i], args[i + 1], args[i], *args[i + 2 :]]
                    label = f"{ast.unparse(args[i])} and {ast.unparse(args[i + 1])} swapped"
                    yield label, ast.unparse(ast.Call(func=func, args=new, keywords=keywords))
            if called in ("range", "static_range"):
                for i in range(len(args)) if len(args) > 1 else ():
                    plus = ast.BinOp(left=args[i], op=ast.Add(), right=ast.Constant(1))
                    changed = [*args[:i], plus, *args[i + 1 :]]
                    yield (
                        f"{ast.unparse(args[i])} one more",
                        ast.unparse(ast.Call(func=func, args=changed, keywords=keywords)),
                    )
        case ast.IfExp(body=body, orelse=orelse):
            yield "always the first", ast.unparse(body)
            yield "always the second", ast.unparse(orelse)
        case ast.Assign() | ast.AugAssign():
            if isinstance(node, ast.AugAssign) or _assigned_before(node, tree):
                yield "statement left out", "pass"
            if isinstance(node, ast.AugAssign):
                plain = ast.Assign(targets=[node.target], value=node.value)
                yield f"{_sign(node.op)}= -> =", ast.unparse(ast.fix_missing_locations(plain))
        case ast.Expr(value=ast.Call()):
            yield "statement left out", "pass"
        case ast.If():
            yield "if always", replaced(lambda n: setattr(n, "test", ast.Constant(True)), "")[1]
            yield "if never", replaced(lambda n: setattr(n, "test", ast.Constant(False)), "")[1]
        case ast.Return(value=ast.Tuple(elts=elts)) if len(elts) > 1:
            yield (
                "results swapped",
                "return " + ast.unparse(ast.Tuple(elts=[elts[1], elts[0], *elts[2:]], ctx=ast.Load())),
            )
    if isinstance(node, ast.For | ast.While | ast.If):
        for i in range(len(node.body) - 1):
            if not isinstance(node.body[i + 1], ast.Return | ast.Continue | ast.Break) and not _independent(
                *node.body[i : i + 2]
            ):

                def swap(n, i=i):
                    n.body[i], n.body[i + 1] = n.body[i + 1], n.body[i]

                yield replaced(swap, f"lines {node.body[i].lineno} and {node.body[i + 1].lineno} swapped")


def _independent(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether two assignments give the same in either order: neither uses what the other assigns, and nothing else changes."""
    used = []
    for node in (first, second):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name | ast.Tuple):
            return False
        if any(not isinstance(n, ast.Name) for n in getattr(node.targets[0], "elts", [])):
            return False
        called = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
        if any("atomic" in name or name.endswith("_") for name in called):
            return False
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        used.append([{n.id for n in names if isinstance(n.ctx, ast.Store)}, {n.id for n in names}])
    return not (used[0][0] & used[1][1] or used[1][0] & used[0][1])


def _assigned_before(node: ast.Assign, tree: ast.AST) -> bool:
    """Whether what the statement assigns has a value without it; else leaving it out is a NameError."""
    names = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    function = next(
        f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.lineno <= node.lineno <= f.end_lineno
    )
    before = {a.arg for a in function.args.args}
    before |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and n.lineno < node.lineno}
    return names <= before


def _siblings(name: str, node: ast.Name, tree: ast.AST) -> list[str]:
    """Names of the same function that a slip of the pen would write for `name`: same beginning, other end."""
    function = next(
        f
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef | ast.Lambda) and f.lineno <= node.lineno <= f.end_lineno
    )
    prefix = re.match(r"stride_|offs_|mask_|BLOCK_|pid_", name)
    if not prefix:
        return []
    names = {a.arg for a in function.args.args} | {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    return sorted(n for n in names if n.startswith(prefix[0]) and n != name)[:3]


_SIGNS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>", ast.MatMult: "@",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip


def _sign(operator: ast.AST) -> str:
    return _SIGNS[type(operator)]
