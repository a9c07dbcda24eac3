"""What a learner's file may name, told from its text before it runs.

Exercises need torch, Triton, NumPy and the arithmetic of the standard library; gpukit.grading.names lists that, and what the
file defines itself is allowed besides. Anything else is a slip or a way to fool the check, and gets a sentence with its line
and what to use instead. This is the cheap fence; the others are the process (gpukit.grading.fence) and what the device saw
(gpukit.grading.device).

What an expression gives is not known here, so three things are kept apart from other values: modules, which are only named to
reach into them; strings as names of attributes; and assignments to attributes of what the file did not make.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import io
import math
import os
import pathlib
import string
import symtable
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from gpukit.grading.names import BUILTINS, INSTEAD, LOOKUPS, METHODS, MODULES, NEVER, TENSOR, UNDERSCORED, VALUES

_REFUSED_BUILTINS = frozenset(dir(builtins)) - BUILTINS - {"__name__", "__doc__"}
_PACKAGES = frozenset(path.rpartition(".")[0] for path in MODULES if "." in path) | MODULES.keys()
_MATCHED = frozenset("bool bytearray bytes dict float frozenset int list set str tuple".split())
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.NamedExpr)
_IMPORTS = (ast.Import, ast.ImportFrom)
_TYPE_PARAMETERS = tuple(getattr(ast, name) for name in ("TypeVar", "ParamSpec", "TypeVarTuple") if hasattr(ast, name))
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_ASYNC = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
_SEVERAL = (ast.Tuple, ast.List, ast.Set)
_NAMED = ("name", "arg", "asname", "rest")  # where a node has a name that it gives a value to, and no ast.Name
_INJECTED = frozenset({"interpreter_semantic"})  # what the interpreter leaves among a file's names
# Their calls take names as text, and would give a value attributes that nobody may write.
_ENUMS = frozenset(f"enum.{name}" for name in ("Enum", "Flag", "IntEnum", "IntFlag", "StrEnum"))
_FROM_TEXT = _ENUMS | {"types.SimpleNamespace"}
_DECORATORS = frozenset({"dataclasses.dataclass", "functools.total_ordering"})  # they give a class methods
_APART = _PACKAGES | _FROM_TEXT | _DECORATORS
_DEEP = max(path.count(".") for path in _PACKAGES) + 2  # nothing that is listed has so many dots
_OWN_VALUES = "an exercise may set attributes of its own objects only, and x.grad or x.requires_grad of a tensor"
_COUNTED = "this exercise counts the memory of tensors, and torch computes the same"
_LISTED = "torch, Triton, NumPy and what computes in the standard library are enough for every exercise"


@dataclass(frozen=True)
class Finding:
    """What is refused, in which line, and what to use instead."""

    line: int
    text: str
    instead: str = _LISTED


def lint(source: str, *, kernel: bool = False, counted: bool = False) -> Finding | None:
    """The first thing in `source` that an exercise may not use, or None. Raises SyntaxError.

    kernel   the exercise is a Triton kernel, to which tensors go as they are
    counted  the memory that the tensors take is counted: arrays and lists would hold as much unseen
    """
    away = {"numpy": "tensors do the same: x[i], x.sum(), torch.where(...)"} if kernel or counted else {}
    if counted:
        away |= dict.fromkeys(("numpy", "tolist"), _COUNTED)
    file = _File(source, away, counted)
    for node in file.looked_at:
        try:
            _LOOKS[type(node)](file, node)
        except _Refused as refused:
            return Finding(getattr(node, "lineno", 1), refused.text, refused.instead)
    return None


def importable(counted: bool = False) -> list[str]:
    """The packages that an exercise may import, those of other people first."""
    others = ["torch", "triton", "einops", *([] if counted else ["numpy"])]
    plain = {path.partition(".")[0] for path in MODULES} - {"torch", "triton", "einops", "numpy", "__future__"}
    return [*others, *sorted(plain)]


# What files, paths and the system are asked for by these names is refused, and no slip of the pen for another.
_KNOWN = frozenset({*dir(io.TextIOWrapper), *dir(pathlib.Path), *dir(os), *dir(sys)})


class _Refused(Exception):
    def __init__(self, text: str, *keys: str, instead: str = "", names: Iterable[str] = ()):
        """`keys` are what INSTEAD may know it as, the more exact ones first. `names`: those of which the last key may be a slip."""
        super().__init__(text)
        self.text = text
        self.instead = instead or next((INSTEAD[key] for key in keys if key in INSTEAD), "")
        if not self.instead:
            slip = keys and keys[-1] not in _KNOWN  # .read is no slip of .real
            meant = difflib.get_close_matches(keys[-1], names, 1, 0.75) if slip else []
            self.instead = f"is {text.removesuffix(keys[-1])}{meant[0]} meant?" if meant else _LISTED


# Decorators of torch and functools below which a method is a method.
_BINDING = {"no_grad", "enable_grad", "inference_mode", "cached_property", "cache", "lru_cache"}


class _File:
    """A learner's file. `away` are ways out of tensors that this exercise does not allow, with what to use instead."""

    def __init__(self, source: str, away: dict[str, str], counted: bool):
        self.source, self.away, self.counted = source, away, counted
        nodes = _walked(ast.parse(source))
        self.looked_at = [node for node in nodes if type(node) in _LOOKS]
        self.of_type: dict[type, list] = {}
        for node in nodes:
            self.of_type.setdefault(type(node), []).append(node)
        self.begins: dict[int, tuple[ast.expr, tuple[str, ...]]] = {}  # a.b.c: a, and the first _DEEP names after it
        for node in reversed(self.of_type.get(ast.Attribute, ())):  # from the inside
            first, names = self.begins.get(id(node.value), (node.value, ()))
            self.begins[id(node)] = first, (*names, node.attr)[:_DEEP]
        self.bases: set[int] = set()  # expressions that an attribute is taken of
        self.called: set[int] = set()
        self.asked: set[int] = set()  # places where a class is no more than a class: isinstance(x, type), type[int]
        self.shown: set[int] = set()  # places where type(x) is shown and goes nowhere else
        self.decorators: set[int] = set()  # what stands above a class of the file, a call's function included
        self.named: set[int] = set()  # annotations, and what a class inherits from
        self.classes: set[str] = set()
        self.setters: set[str] = set()  # methods that set attributes of their first argument, Python's own ones apart
        self.static_setters: set[str] = (
            set()
        )  # those that get the object as an argument, as ctx of an autograd.Function
        self.of_classes: set[int] = set()  # names of the class that a classmethod is called on
        self.own: set[str] = set()  # what may follow a dot because the file gives it its meaning
        self.roots: dict[str, str] = {}  # name in the file -> what it was imported as
        self.twice: set[str] = set()  # names that mean a module and something else that was imported
        self.in_class: set[int] = set()  # imports that make a module an attribute
        self.at_class_level: set[int] = set()  # names in the body of a class itself, where a method is a function
        self.selves: set[int] = set()  # names of a method's own object
        self.aliases: dict[int, list[str]] = {}  # the values of F = torch.nn.functional -> F
        self.local: set[int] = set()  # names that were imported, where a function has its own of that name
        self._note_definitions()
        self._note_imports()
        for owner in self._all(ast.ClassDef):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef):
                    self._note_method(node)
        self._note_places()
        self._note_shadows()

    # -- what the file defines -----------------------------------------------------------------------------------------

    def _all(self, *types: type) -> Iterator:
        for kind in types:
            yield from self.of_type.get(kind, ())

    def _note_definitions(self) -> None:
        annotations = [node.annotation for node in self._all(ast.arg, ast.AnnAssign) if node.annotation]
        annotations += [node.returns for node in self._all(ast.FunctionDef) if node.returns]
        self.named.update(id(part) for annotation in annotations for part in ast.walk(annotation))
        self.named.update(id(base) for node in self._all(ast.ClassDef) for base in node.bases)
        self.bases.update(id(node.value) for node in self._all(ast.Attribute))
        self.asked.update(id(node.value) for node in self._all(ast.Subscript))
        for node in self._all(ast.Call):
            self.called.add(id(node.func))
            self.own.update(keyword.arg for keyword in node.keywords if keyword.arg)
            if getattr(node.func, "id", getattr(node.func, "attr", "")) == "namedtuple":
                self.own.update(_words(node.args[1:]))
        self.shown.update(id(node.value) for node in self._all(ast.FormattedValue))
        self.asked.update(id(node.exc) for node in self._all(ast.Raise))
        self.asked.update(
            id(each) for node in self._all(ast.ExceptHandler) if node.type for each in _spread([node.type])
        )
        for node in self._all(ast.ClassDef):
            self._note_class(node)
            for above in node.decorator_list:
                settings = isinstance(above, ast.Call) and not above.args and not _starred(above)
                named = settings and all(word.arg != "cls" for word in above.keywords)  # no other class
                self.decorators.add(id(above.func if named else above))

    def _note_class(self, node: ast.ClassDef) -> None:
        self.classes.add(node.name)
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef):
                self.own.add(inner.name)
            elif isinstance(inner, ast.ClassDef):
                self.own.add(inner.name)
            else:
                targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
                self.own.update(
                    t.id for target in targets if target for t in _spread([target]) if isinstance(t, ast.Name)
                )

    def _note_method(self, node: ast.FunctionDef) -> None:
        first = [*node.args.posonlyargs, *node.args.args][:1]
        if not first or not all(self._binds(decorator) for decorator in node.decorator_list):
            return
        kinds = {name.id for name in node.decorator_list if isinstance(name, ast.Name)}
        bound, static = "classmethod" in kinds, "staticmethod" in kinds
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id == first[0].arg:
                self.selves.add(id(inner))
                if bound:
                    self.of_classes.add(id(inner))
            elif (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == first[0].arg
            ):
                if isinstance(inner.ctx, ast.Store):
                    self.own.add(inner.attr)
                if isinstance(inner.ctx, ast.Store) and not bound and node.name not in METHODS:
                    (self.static_setters if static else self.setters).add(node.name)

    def _binds(self, decorator: ast.expr) -> bool:
        """Whether a method below a decorator still gets its own object. The file's functions can give it any other."""
        named = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(named, ast.Name):
            return named.id in ("property", "classmethod", "staticmethod") and named.id not in self._defined
        module, _, name = (self._path(named) or "").rpartition(".")
        return module in ("torch", "functools") and name in _BINDING

    def _note_imports(self) -> None:
        meant: dict[str, set[str]] = {}
        for node in self._all(ast.Import):
            for name in node.names:
                first = name.name.partition(".")[0]
                meant.setdefault(name.asname or first, set()).add(name.name if name.asname else first)
        for node in self._all(ast.ImportFrom):
            for name in node.names:
                meant.setdefault(name.asname or name.name, set()).add(f"{node.module}.{name.name}")
        self.roots = {name: sorted(paths, key=lambda path: path not in _PACKAGES)[0] for name, paths in meant.items()}
        for node in self._all(*_ASSIGNMENTS):
            for name, value in _bindings(node):
                if isinstance(value, ast.Attribute) and (path := self._path(value)):
                    meant.setdefault(name, set()).add(path)
                    self.roots.setdefault(name, path)
                    if _names_only(node):
                        self.aliases.setdefault(id(value), []).append(name)
        self.twice = {name for name, paths in meant.items() if len(paths) > 1 and paths & _APART}
        for owner in self._all(ast.ClassDef):
            for node in _inside(owner.body):
                if isinstance(node, _IMPORTS):
                    self.in_class.add(id(node))
                elif isinstance(node, ast.Name):
                    self.at_class_level.add(id(node))
                for _, value in _bindings(node):
                    self.aliases.pop(id(value), None)

    def _note_places(self) -> None:
        """What Python's own functions do with a class, where the file has none of that name."""
        for node in self._all(ast.Call):
            name = getattr(node.func, "id", "")
            if name in ("isinstance", "issubclass") and name not in self._defined:
                self.asked.update(map(id, _spread(node.args)))
            elif name in ("print", "repr", "str") and name not in self._defined:
                self.shown.update(map(id, node.args))

    def _note_shadows(self) -> None:
        """Where a name that was imported means something else, a function's own variable: as Python decides it, by the
        innermost function or comprehension around it that gives the name a value."""
        arguments = {node.arg for node in self._all(ast.arg)}
        stored = {node.id for node in self._all(ast.Name) if isinstance(node.ctx, ast.Store)}
        if not (arguments | stored) & self.roots.keys():
            return
        outside: tuple[
            tuple[dict[str, bool], bool], ...
        ] = ()  # by scope: name -> whether it is a variable; is it a class
        waiting = [(node, outside) for node in ast.iter_child_nodes(self.of_type[ast.Module][0])]
        for node, scopes in waiting:
            if isinstance(node, ast.Name):
                if node.id in self.roots and self._is_variable(node.id, scopes):
                    self.local.add(id(node))
                continue
            inner: list[ast.AST] = []
            if isinstance(node, _FUNCTIONS):
                inner = node.body if isinstance(node.body, list) else [node.body]
                names = {arg.arg: True for arg in _arguments(node.args)} | self._given(inner)
            elif isinstance(node, ast.ClassDef):
                inner, names = node.body, self._given(node.body)
            elif isinstance(node, _COMPREHENSIONS):
                first, *others = node.generators
                results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                inner = [*results, first.target, *first.ifs, *others]
                targets = [part for each in node.generators for part in ast.walk(each.target)]
                names = {part.id: True for part in targets if isinstance(part, ast.Name)}
                waiting.append((first.iter, scopes))  # the rest of it belongs to the comprehension
            if inner:
                waiting += [(each, (*scopes, (names, isinstance(node, ast.ClassDef)))) for each in inner]
            if not isinstance(node, _COMPREHENSIONS):  # defaults, decorators, annotations: outside
                within = set(map(id, inner))
                waiting += [(child, scopes) for child in _children(node) if id(child) not in within]

    @staticmethod
    def _is_variable(name: str, scopes: tuple[tuple[dict[str, bool], bool], ...]) -> bool:
        for i, (names, of_class) in enumerate(reversed(scopes)):
            if name in names and (i == 0 or not of_class):
                return names[name] and not of_class
        return False

    def _given(self, body: list[ast.AST]) -> dict[str, bool]:
        """The names that get a value in a body, not in functions, classes and comprehensions inside: True, or False where it
        may be what was imported."""
        names: dict[str, bool] = {}
        for node in _inside(body):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.setdefault(node.id, True)
        for node in _inside(body):
            if isinstance(node, _IMPORTS):
                names |= {alias.asname or alias.name.partition(".")[0]: False for alias in node.names}
            elif isinstance(node, ast.Global | ast.Nonlocal):
                names |= dict.fromkeys(node.names, False)
            names |= {name: False for name, value in _bindings(node) if id(value) in self.aliases}
        return names

    # -- one node ------------------------------------------------------------------------------------------------------

    def _once(self, node: ast.Import | ast.ImportFrom) -> None:
        """Of a name with two meanings nobody could tell which one counts; a class would hand its module on."""
        for name in node.names:
            if (bound := name.asname or name.name.partition(".")[0]) in self.twice:
                raise _Refused(f"the name {bound} for two imports", instead="a name of its own for each of them")
        if id(node) in self.in_class:
            raise _Refused("an import in a class", instead="the import at the top of the file")

    def _import(self, node: ast.Import) -> None:
        self._once(node)
        for name in node.names:
            self._module(name.name, f"import {name.name}")

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level:
            raise _Refused("a relative import", "solutions")
        self._once(node)
        module = node.module or ""
        for name in node.names:
            path = f"{module}.{name.name}"
            if path in _PACKAGES:
                self._module(path, f"import {path}")
                continue
            self._module(module, f"import {module}")
            if name.name == "*":
                if module != "math":
                    raise _Refused(f"from {module} import *", instead="import the names that you use, one by one")
            else:
                self._in_module(module, name.name)

    def _module(self, path: str, text: str) -> None:
        if path not in _PACKAGES:
            parts = path.split(".")
            keys = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
            raise _Refused(text if "." not in path or parts[0] in MODULES else f"import {parts[0]}", *keys)
        if path.partition(".")[0] == "numpy" and self.counted:
            raise _Refused(text, instead=_COUNTED)

    def _in_module(self, module: str, name: str) -> None:
        listed = MODULES.get(module, frozenset())
        if (
            name in listed
            or (name.rstrip("_") in listed & TENSOR and not name.startswith("_"))
            or name == "__version__"
        ):
            return
        raise _Refused(f"{module}.{name}", f"{module}.{name}", name, names=listed)

    def _names_anew(self, node: ast.AST) -> None:
        """A name that gets its value from something else than an assignment: import … as, except … as, case …."""
        for name in (getattr(node, field, None) for field in _NAMED):
            if name and (name in _INJECTED or _of_python(name)):
                raise _Refused(name, name)

    def _name(self, node: ast.Name) -> None:
        if node.id in _REFUSED_BUILTINS:
            if not node.id.startswith("__") and node.id not in self._of_builtins:
                return
            raise _Refused(node.id, node.id)
        if node.id in _INJECTED or _of_python(node.id):
            raise _Refused(node.id, node.id)
        if node.id == "getattr" and id(node) not in self.called:
            raise _Refused("getattr as a value", "setattr")
        placed = id(node) in self.called or id(node) in self.asked
        if node.id == "type" and not placed and isinstance(node.ctx, ast.Load):
            raise _Refused("type as a value", instead="type(x) where the type of a value is meant")
        if not isinstance(node.ctx, ast.Load):
            return
        self._class_as_value(node, node.id)
        if id(node) in self.at_class_level and node.id in self.setters | self.static_setters:
            raise _Refused(f"the method {node.id} under another name", instead=f"self.{node.id}(...), in a method")
        path = self._path(node)
        self._from_text(node, path)
        if path in _PACKAGES and id(node) not in self.bases:
            raise _Refused(f"the module {node.id} as a value", instead=f"{node.id}.name, written out where it is used")

    @cached_property
    def _of_builtins(self) -> set[str]:
        """Of the refused names that Python knows too, those that ever mean Python's: somewhere they are no variable of a
        function."""
        found: set[str] = set()
        tables = [symtable.symtable(self.source, "exercise", "exec")]
        for table in tables:
            tables += table.get_children()
            for name in _REFUSED_BUILTINS.intersection(table.get_identifiers()):
                if table.get_type() != "function" or table.lookup(name).is_global():
                    found.add(name)
        return found

    def _attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if not isinstance(node.ctx, ast.Load):
            return self._set(node, path)
        if path:
            self._from_text(node, path)
            if path in _PACKAGES:
                self._module(path, path)
                aliases = self.aliases.get(id(node), [])
                if not self.twice.isdisjoint(aliases) or not (aliases or id(node) in self.bases):
                    raise _Refused(
                        f"the module {path} as a value", instead=f"{path}.name, written out where it is used"
                    )
                return None
            module, _, name = path.rpartition(".")
            if module in _PACKAGES:
                self._module(module, module)
                return self._in_module(module, name)
        if self._undefined(node):
            return None  # Python says so
        if node.attr == "format":
            return self._format(node)
        self._read(node.attr, node.value)
        self._class_as_value(node, node.attr)
        if node.attr == "__init__" and id(node) not in self.called:
            raise _Refused(f"{ast.unparse(node)} as a value", instead="super().__init__()")
        if node.attr in self.static_setters:
            raise _Refused(ast.unparse(node), instead=".apply(...), which calls it with a context of its own")
        if node.attr in self.setters and self._is_class(node.value):
            raise _Refused(
                ast.unparse(node), instead="a method that sets attributes is called on an object, not on its class"
            )
        return None

    def _is_class(self, node: ast.expr) -> bool:
        """Whether an expression is a class of the file's, as far as its text says."""
        named = getattr(node, "id", getattr(node, "attr", "")) in self.classes
        return named or id(node) in self.of_classes or _is_type(node)

    def _class_as_value(self, node: ast.expr, name: str) -> None:
        """A class under another name, of which a method could be called with any object to set attributes of."""
        if not self.setters or not (name in self.classes or id(node) in self.of_classes):
            return
        if not (self._stays(node) or id(node) in self.named or id(node) in self.decorators):
            raise _Refused(f"the class {name} as a value", instead=f"{name}(...), written out where an object is made")

    def _read(self, name: str, of: ast.expr | None = None) -> None:
        """Whether .name may follow an expression."""
        if name in NEVER or name in self.away:
            raise _Refused(f".{name}", name, instead=self.away.get(name, ""))
        if name == "__init__" and not self._constructs(of):
            raise _Refused(f".{name}", instead="super().__init__(), or a new object")
        if name.startswith("_"):
            own = name in self.own and not name.startswith("__") and (of is None or self._is_self(of))
            if not own and name not in UNDERSCORED and not (name in METHODS and self._is_super(of)):
                raise _Refused(f".{name}", name)
        elif (
            not (name in VALUES or name.rstrip("_") in TENSOR or name in self.own or name == "numpy")
            or name == "format"
        ):
            raise _Refused(f".{name}", name, names=VALUES | TENSOR | self.own)

    def _constructs(self, of: ast.expr | None) -> bool:
        """Whether .__init__ is asked of a class or super(), and not of an object that somebody else's would fill anew."""
        if id(of) not in self.bases:
            return False
        return self._is_super(of) or bool(self._path(of)) or (self._is_class(of) and not _is_type(of))

    def _set(self, node: ast.Attribute, path: str | None) -> None:
        """An assignment to x.name, however it is written."""
        base, name = node.value, node.attr
        if path:
            raise _Refused(f"an assignment to {path}", instead=_OWN_VALUES)
        if name.startswith("__") or name in NEVER:
            raise _Refused(f"an assignment to .{name}", name, instead=_OWN_VALUES)
        if self._is_self(base) or (isinstance(base, ast.Name) and base.id in self.classes):
            return
        library = name in VALUES or name.rstrip("_") in TENSOR
        if name in ("grad", "requires_grad", "data") or (
            name in self.own and not library and not isinstance(base, ast.Call)
        ):
            return
        raise _Refused(f"an assignment to {ast.unparse(node)}", instead=_OWN_VALUES)

    def _format(self, node: ast.Attribute) -> None:
        """ "{0._gpu}".format(device) reads what no expression may."""
        text = node.value
        literal = isinstance(text, ast.Constant) and isinstance(text.value, str) and id(node) in self.called
        try:
            plain = literal and not any(set(".[") & set(name) for name in _fields(text.value))
        except ValueError:
            plain = True  # Python will say what is wrong with it
        if not plain:
            raise _Refused("str.format with more than plain fields", instead="an f-string: f'{x.name}'")

    def _from_text(self, node: ast.expr, path: str | None) -> None:
        if path in _DECORATORS and id(node) not in self.decorators:
            name = ast.unparse(node)
            raise _Refused(f"{name} as a value", instead=f"@{name}, written above a class of yours")
        if (
            path not in _FROM_TEXT
            or id(node) in self.asked
            or id(node) in self.named
            or (path not in _ENUMS and id(node) in self.called)
        ):
            return
        name = ast.unparse(node)
        if path in _ENUMS:
            raise _Refused(f"{name} without a class statement", instead=f"class Kind({name}), with its names as lines")
        raise _Refused(f"{name} as a value", instead=f"{name}(name=value), written out where it is used")

    def _call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", "")
        if getattr(node.func, "attr", "") == "__init__" and not self._is_super(node.func.value):
            if not (node.args and id(node.args[0]) in self.selves - self.of_classes):
                raise _Refused(f"{ast.unparse(node.func)} of another object", instead="super().__init__()")
        if name == "getattr":
            text = node.args[1] if len(node.args) > 1 else None
            if not (isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.isidentifier()):
                raise _Refused("getattr with a computed name", "setattr")
            self._read(text.value, node.args[0])
        if name == "type" and (len(node.args) != 1 or node.keywords):
            raise _Refused("type with three arguments", instead="a class statement")
        if name == "type" and not self._stays(node):
            raise _Refused("type(x) as a value", instead="type(x), written out where it is compared, called or shown")
        if (_is_type(node.func) or _is_type_of(node.func)) and (_starred(node) or len(node.args) == 3):
            raise _Refused(f"{ast.unparse(node.func)} with three arguments", instead="a class statement")
        if self._path(node.func) == "types.SimpleNamespace" and (node.args or _starred(node)):
            text = ast.unparse(node.func)
            raise _Refused(
                f"{text} with names from elsewhere", instead=f"{text}(name=value), with the names written out"
            )
        if _is_type(node.func) and node.args and self._has_namespaces:
            raise _Refused(f"a call of {ast.unparse(node.func)} beside SimpleNamespace", instead="the class's name")
        for keyword in node.keywords:
            if keyword.arg and keyword.arg.startswith("__"):
                raise _Refused(f"{keyword.arg} as a keyword", keyword.arg)

    def _stays(self, node: ast.expr) -> bool:
        """Whether the class that type(x) gives is compared with classes, called, asked for its name or shown, so that no name
        and no function of the file's gets it: the type of a class makes classes, and some read names from text."""
        return any(id(node) in places for places in (self.shown, self.called, self.bases, self.asked, self._compared))

    @cached_property
    def _compared(self) -> set[int]:
        """Places where an expression is compared with classes, and goes nowhere else."""
        places: set[int] = set()
        for node in self._all(ast.Compare):
            operands = list(_spread([node.left, *node.comparators]))
            if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops) or self._are_classes(operands):
                places.update(map(id, operands))
        return places

    @cached_property
    def _has_namespaces(self) -> bool:
        return not {"types", "types.SimpleNamespace"}.isdisjoint(self.roots.values())

    def _are_classes(self, operands: list[ast.expr]) -> bool:
        """Whether no == is the file's own."""
        return all(
            isinstance(each, _SEVERAL)
            or _is_type(each)
            or self._path(each)
            or (isinstance(each, ast.Name) and (each.id in self.classes or each.id not in self._defined))
            for each in operands
        )

    def _function(self, node: ast.FunctionDef) -> None:
        if node.name in LOOKUPS or (node.name.startswith("__") and node.name not in METHODS):
            raise _Refused(f"def {node.name}", node.name)
        if node.name in _REFUSED_BUILTINS:
            self._name(ast.Name(node.name, ast.Store()))

    def _class(self, node: ast.ClassDef) -> None:
        self._names_anew(node)
        if any(keyword.arg == "metaclass" or keyword.arg is None for keyword in node.keywords):
            raise _Refused("a metaclass", instead="an ordinary class")
        if any(_is_type(base) for base in node.bases):
            raise _Refused("a metaclass", instead="an ordinary class")
        of = {self._path(base) for base in node.bases}
        if of & _FROM_TEXT and not (of & _ENUMS and any(_is_member(line) for line in node.body)):
            what = "an enumeration without names" if of & _ENUMS else "a class of SimpleNamespace"
            raise _Refused(what, instead="an ordinary class")
        if node.name in _REFUSED_BUILTINS:
            self._name(ast.Name(node.name, ast.Store()))

    def _pattern(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            self._read(name, None if getattr(node.cls, "id", "") in self.classes else node.cls)
        known = isinstance(node.cls, ast.Name) and (node.cls.id in _MATCHED or node.cls.id in self.classes)
        if node.patterns and not known:
            raise _Refused("a class pattern", instead="isinstance() and the attributes written out")

    def _async(self, node: ast.AST) -> None:
        raise _Refused("async", instead="an ordinary function: nothing here waits for anything")

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _undefined(self, node: ast.expr) -> bool:
        """Whether an expression begins with a name that nothing defines: a module that was not imported."""
        node, _ = self.begins.get(id(node), (node, ()))
        return isinstance(node, ast.Name) and node.id not in self._defined and not hasattr(builtins, node.id)

    @cached_property
    def _defined(self) -> set[str]:
        names = {node.id for node in self._all(ast.Name) if not isinstance(node.ctx, ast.Load)}
        names |= {node.arg for node in self._all(ast.arg)} | self.roots.keys() | _INJECTED
        names |= {node.name for node in self._all(ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)}
        names |= {node.name for node in self._all(*_TYPE_PARAMETERS)}
        if "*" in self.roots:  # from math, which is the only one that may
            names |= set(dir(math))
        names |= {node.name for node in self._all(ast.MatchAs, ast.MatchStar)}
        return names | {node.rest for node in self._all(ast.MatchMapping)}

    def _is_super(self, node: ast.expr | None) -> bool:
        """Whether an expression is super() or super(A, self), and super is Python's."""
        return (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "super"
            and "super" not in self._defined
            and not node.keywords
            and (not node.args or (len(node.args) == 2 and self._is_self(node.args[1])))
        )

    def _is_self(self, node: ast.expr) -> bool:
        return id(node) in self.selves

    def _path(self, node: ast.expr) -> str | None:
        """What an expression names, if it begins at something imported: "torch.nn.functional.softmax"."""
        first, names = self.begins.get(id(node), (node, ()))
        if isinstance(first, ast.Name) and first.id in self.roots and id(first) not in self.local:
            return ".".join([self.roots[first.id], *names])
        return None


_LOOKS = {
    ast.Import: _File._import,
    ast.ImportFrom: _File._import_from,
    ast.Name: _File._name,
    ast.Attribute: _File._attribute,
    ast.Call: _File._call,
    ast.FunctionDef: _File._function,
    ast.ClassDef: _File._class,
    ast.MatchClass: _File._pattern,
    **dict.fromkeys(
        (ast.alias, ast.arg, ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping), _File._names_anew
    ),
    **dict.fromkeys(_TYPE_PARAMETERS, _File._names_anew),
    **dict.fromkeys(_ASYNC, _File._async),
}


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that an assignment gives to expressions, with the expressions."""
    if not isinstance(node, _ASSIGNMENTS) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        for name, value in zip(target.elts, node.value.elts) if several else [(target, node.value)]:  # noqa: B905
            if isinstance(name, ast.Name):
                yield name.id, value


def _names_only(node: ast.AST) -> bool:
    """Whether an assignment is a statement that gives its value to names and to nothing else."""
    if isinstance(node, ast.NamedExpr):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return all(isinstance(target, ast.Name | ast.Tuple) for target in _spread(targets))


def _inside(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """What runs in a body itself: not what is in functions, lambdas and classes in it, and of comprehensions no targets."""
    waiting = list(body)
    for node in waiting:
        yield node
        if isinstance(node, ast.comprehension):
            waiting += [node.iter, *node.ifs]
        elif not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            waiting += _children(node)
        else:  # their defaults and decorators may hold :=
            waiting += [
                child
                for child in _children(node)
                if isinstance(child, ast.expr) and child is not getattr(node, "body", 0)
            ]
            waiting += [d for d in (*node.args.defaults, *node.args.kw_defaults) if d] if hasattr(node, "args") else []


def _children(node: ast.AST) -> list[ast.AST]:
    return list(ast.iter_child_nodes(node))


def _walked(tree: ast.AST) -> list[ast.AST]:
    """A tree's nodes, as ast.walk gives them, in half the time."""
    nodes = [tree]
    for node in nodes:
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif isinstance(value, list):
                nodes += [item for item in value if isinstance(item, ast.AST)]
    return nodes


def _of_python(name: str) -> bool:
    """Whether a name means something to Python that an exercise leaves alone."""
    return name in LOOKUPS or (name.startswith("__") and name not in UNDERSCORED and name not in METHODS)


def _is_type(node: ast.expr) -> bool:
    """Whether an expression is type(x)."""
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "type"


def _is_member(line: ast.stmt) -> bool:
    """Whether a line of an enumeration makes a member of it, for sure."""
    return isinstance(line, ast.Assign) and any(
        isinstance(target, ast.Name)
        and not target.id.startswith("_")
        and isinstance(line.value, ast.Constant | ast.Call)
        for target in line.targets
    )


def _is_type_of(node: ast.expr) -> bool:
    """Whether an expression is type[x]."""
    return isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "type"


def _starred(node: ast.Call) -> bool:
    return any(isinstance(arg, ast.Starred) for arg in node.args) or any(not word.arg for word in node.keywords)


def _spread(nodes: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """Expressions, with the elements of those that are tuples, lists and sets."""
    for node in nodes:
        yield node
        if isinstance(node, _SEVERAL):
            yield from _spread(node.elts)


def _words(nodes: Iterable[ast.expr]) -> Iterator[str]:
    """The field names in namedtuple("P", "x y") and namedtuple("P", ["x", "y"])."""
    for node in nodes:
        for part in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield from part.value.replace(",", " ").split()


def _arguments(args: ast.arguments) -> list[ast.arg]:
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]


def _fields(text: str) -> Iterator[str]:
    """The names between the braces of a format string, those inside another's format too."""
    for _, name, spec, _ in string.Formatter().parse(text):
        yield name or ""
        if spec:
            yield from _fields(spec)
