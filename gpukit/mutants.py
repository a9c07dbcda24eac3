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
    rounded = _rounded(tree, bool(re.search(_IN_FLOAT32, (ast.get_docstring(tree) or "") + source[first:last])))
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.stmt) or not inside(node):
            continue
        for change, new in (*_changes(node, tree), *rounded.get(node, ())):
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


# Functions of float32 whose argument may be rounded, and functions whose result is float32 where an argument is.
_OF_FLOATS = frozenset("exp exp2 log log2 sqrt rsqrt erf sin cos sigmoid rand dot".split())
_REDUCTIONS = frozenset("sum cumsum max".split())


_IN_FLOAT32 = r"(?:computed?s?|arithmetic is|multiplied and added up)\s+in\s+float32"  # what docstrings promise


def _rounded(tree: ast.AST, everything: bool) -> dict[ast.AST, list[tuple[str, str]]]:
    """What no kernel may do that promises float32, as (change, text) for a node: an operand of arithmetic, the argument of a
    function or the value that a name is given, rounded to the dtype of the kernel's tensors (`_Numbers.narrow`), which has 16
    bits in some cases.

    everything: else float32 is promised for sums alone, and rounded is what is added to in a loop.
    None are made of what has those bits anyway, since it was loaded, nor of a name with one use, since that is the rounding
    of its value.
    """
    found: dict[ast.AST, list[tuple[str, str]]] = {}
    for kernel in ast.walk(tree):
        if not isinstance(kernel, ast.FunctionDef) or "triton.jit" not in map(ast.unparse, kernel.decorator_list):
            continue
        numbers = _Numbers(kernel)
        for parent in ast.walk(kernel):
            if not (everything or numbers.narrow == "tl.bfloat16" or _adds_up(parent)):
                continue
            for node in filter(numbers.worth_rounding, _operands(parent, numbers)):
                text = f"({ast.unparse(node)}).to({numbers.narrow}).to(tl.float32)"
                found.setdefault(node, []).append((f"{ast.unparse(node)} in 16 bits", text))
            if isinstance(parent, ast.AugAssign) and numbers.is_float(parent.target):
                total = ast.unparse(ast.BinOp(left=parent.target, op=parent.op, right=parent.value))
                name = ast.unparse(parent.target)
                found[parent] = [(f"{name} in 16 bits", f"{name} = ({total}).to({numbers.narrow}).to(tl.float32)")]
    return found


def _adds_up(node: ast.AST) -> bool:
    """Whether a name is given a number that is computed with the one that it had; or random numbers are compared."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _called(node.value) != "where":
        return any(isinstance(n, ast.Name) and n.id == node.targets[0].id for n in ast.walk(node.value))
    return isinstance(node, ast.AugAssign | ast.Compare)


def _operands(node: ast.AST, numbers: _Numbers) -> list[ast.expr]:
    """The float32 numbers that a node computes with, or gives a name to."""
    match node:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return [left, right] if numbers.is_float(node) else []
        case ast.Compare(left=left, comparators=[right]):
            return [x for x in (left, right) if isinstance(x, ast.Call) and numbers.is_float(x)]
        case ast.Assign(value=value) | ast.Return(value=value):
            values = value.elts if isinstance(value, ast.Tuple) else [value]
            return [x for x in values if not isinstance(x, ast.Name) and numbers.is_float(x)]
        case ast.AugAssign(value=value) if numbers.is_float(node.target):
            return [value]
        case ast.Call(func=ast.Attribute(attr=name), args=[argument, *_]) if name in _OF_FLOATS | _REDUCTIONS:
            return [argument] if numbers.is_float(argument) and name not in ("rand", "dot") else []
        case ast.Call(func=ast.Attribute(attr="atomic_add"), args=[_, value, *_]):
            return [value] if numbers.is_float(value) else []
    return []


class _Numbers:
    """Which names and expressions of a kernel are float32, as far as its text says.

    narrow  the text of the type with 16 bits: that of the first tensor which the kernel loads and converts, or that of the
            factors of tl.dot; in kernels of float32 alone bfloat16
    """

    def __init__(self, kernel: ast.FunctionDef):
        self.uses = [n for n in ast.walk(kernel) if isinstance(n, ast.Name)]
        parameters = [a.arg for a in kernel.args.args if not a.annotation]
        pointers = [name for name in parameters if name.endswith("_ptr")]
        self.floats = set() if pointers else set(parameters)  # those of a function that a kernel calls
        pairs = []
        for node in ast.walk(kernel):
            if isinstance(node, ast.Assign | ast.AugAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                whole = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs += zip(target.elts, node.value.elts, strict=True) if whole else [(target, node.value)]
        for _ in range(3):  # a name may be used above the line that makes it float32, in a loop
            for target, value in pairs:
                if self.is_float(value):
                    self.floats |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
        changed = {n.target.id for n in ast.walk(kernel) if isinstance(n, ast.AugAssign)}
        self.narrowed = {ast.unparse(target) for target, _ in pairs} - changed
        for _ in pairs:  # until none is left that is given another number
            self.narrowed -= {ast.unparse(target) for target, value in pairs if not self.is_narrow(value)}
        self.narrow = self._narrow(kernel, pointers, {ast.unparse(target): value for target, value in pairs})

    def _narrow(self, kernel: ast.FunctionDef, pointers: list[str], made_of: dict[str, ast.expr]) -> str:
        calls = sorted((n for n in ast.walk(kernel) if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset))
        for call in calls:
            if self.is_converted(call) and isinstance(call.func.value, ast.Call):
                names = [n.id for n in ast.walk(call.func.value.args[0]) if isinstance(n, ast.Name)]
                names = [n.id for x in names for n in ast.walk(made_of.get(x, ast.Name(x))) if isinstance(n, ast.Name)]
                return f"{next((name for name in names if name in pointers), pointers[0])}.dtype.element_ty"
        if any(ast.unparse(call.func) == "tl.dot" for call in calls):
            asked = re.search(r"\.to\((\w+\.dtype)\)", ast.unparse(kernel))
            return asked[1] if asked else f"{pointers[0]}.dtype.element_ty"
        return "tl.bfloat16"

    def is_float(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self.floats
            case ast.BinOp(left=left, op=op, right=right):
                return isinstance(op, ast.Div) or self.is_float(left) or self.is_float(right)
            case ast.UnaryOp(op=ast.USub(), operand=value) | ast.Subscript(value=value):
                return self.is_float(value)
            case (
                ast.Call(func=ast.Attribute(attr="to"), args=[kind])
                | ast.Call(func=ast.Attribute(attr="cast"), args=[_, kind])
            ):
                return ast.unparse(kind) == "tl.float32"
            case ast.Call(func=ast.Attribute(attr="zeros" | "full"), args=[*_, kind]):
                return ast.unparse(kind) == "tl.float32"
            case ast.Call(args=args):
                name = _called(node)
                return name in _OF_FLOATS or (name != "load" and any(map(self.is_float, args)))
        return False

    def worth_rounding(self, node: ast.expr) -> bool:
        if isinstance(node, ast.UnaryOp):
            return self.worth_rounding(node.operand)
        if isinstance(node, ast.Name):
            uses = [type(n.ctx) for n in self.uses if n.id == node.id]
            return node.id in self.floats - self.narrowed and not (uses.count(ast.Store) == 1 and len(uses) == 2)
        return not self.is_narrow(node) and (_called(node) == "load" or self.is_float(node))

    def is_narrow(self, node: ast.AST) -> bool:
        """Whether it is made of numbers that were loaded, and of 0, 1 and infinity, without arithmetic."""
        match node:
            case ast.Name(id=name):
                return name in self.narrowed
            case ast.Constant(value=value):
                return value in (0, 1)
            case ast.UnaryOp(operand=value) | ast.Subscript(value=value):
                return self.is_narrow(value)
            case ast.Call(args=args):
                name = _called(node)
                if name in ("maximum", "minimum", "where"):
                    return all(map(self.is_narrow, args[-2:]))
                if name in ("max", "min", "abs", "full"):
                    return self.is_narrow(args[1 if name == "full" else 0])
                return name in ("zeros", "float") or self.is_converted(node)
        return False

    def is_converted(self, node: ast.AST) -> bool:
        """Whether it is tl.load(...).to(tl.float32), or what a name that is no float32 holds, converted."""
        match node:
            case ast.Call(func=ast.Attribute(attr="to", value=ast.Call(func=ast.Attribute(attr="load")))):
                return True
            case ast.Call(func=ast.Attribute(attr="to", value=ast.Name(id=name))):
                return name not in self.floats
        return False


def _called(node: ast.AST) -> str:
    func = getattr(node, "func", None)
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


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
