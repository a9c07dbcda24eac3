"""Which part of a learner's file one exercise needs, so that a name refused elsewhere costs the other exercises nothing.

A file holds several exercises. What the lint refuses in it is taken out of the text, with all that cannot be without it,
unless the exercise needs that; the text that remains is looked at again as a whole, and it alone runs. So whatever this file
gets wrong, it cannot make anything run that the lint has not accepted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from gpukit.grading.lint import Finding, lint

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_MOST = 64  # statements that are taken out: a file with more is refused as it is


def accepted(
    source: str, function: str, *, kernel: bool = False, counted: bool = False
) -> tuple[str, Finding | None, Finding | None]:
    """The text that `function` is judged by, each line where it was; what is refused in it, if anything is; and the first
    finding that was taken out at the level of the file, where no exercise will be told of it. Raises SyntaxError.

    kernel, counted  as in gpukit.grading.lint.lint
    """
    text, noted = source, None
    for _ in range(_MOST):
        finding = lint(text, kernel=kernel, counted=counted)
        if finding is None:
            return text, None, noted
        smaller, top_level = _without(text, finding.line, function)
        if smaller is None:
            return source, finding, None
        text, noted = smaller, noted or (finding if top_level else None)
    return source, lint(source, kernel=kernel, counted=counted), None


def _without(source: str, line: int, function: str) -> tuple[str | None, bool]:
    """The text without the statement around a line and those that cannot be without it, and whether one of them is no
    function or class. None where `function` needs one of them, or where they share a line with others."""
    body = ast.parse(source).body
    gone = {i for i, node in enumerate(body) if _first(node) <= line <= _last(node)}
    if len(gone) != 1:
        return None, False
    while True:
        lost = {name for i in gone for name in _binds(body[i])}
        more = {i for i, node in enumerate(body) if i not in gone and _reads(_at_once(node)) & lost}
        if not more:
            break
        gone |= more
    if not all(_removable(body[i]) for i in gone):
        return None, False
    kept = [node for i, node in enumerate(body) if i not in gone]
    if function in lost or lost & _needed(function, kept):
        return None, False
    lines = source.split("\n")
    for i in gone:
        lines[_first(body[i]) - 1 : _last(body[i])] = [""] * (_last(body[i]) - _first(body[i]) + 1)
    smaller = "\n".join(lines)
    try:
        same = [ast.dump(node) for node in ast.parse(smaller).body] == [ast.dump(node) for node in kept]
    except SyntaxError:
        same = False
    return (smaller, any(not isinstance(body[i], _DEFINITIONS) for i in gone)) if same else (None, False)


def _first(node: ast.stmt) -> int:
    """The line where a statement begins, its decorators included."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _removable(node: ast.stmt) -> bool:
    """Whether a statement only gives names their meaning. What does more may be needed by anything."""
    if isinstance(node, (*_DEFINITIONS, *_IMPORTS)):
        return not any(alias.name == "*" for alias in getattr(node, "names", ()))
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(isinstance(part, ast.Name | ast.Tuple | ast.expr_context) for t in targets for part in ast.walk(t))
    return _is_main(node)


def _is_main(node: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == "__main__":`, below which nothing runs in a check."""
    return isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) == "__name__ == '__main__'"


def _binds(node: ast.stmt) -> set[str]:
    """The names that a statement gives a meaning in the file."""
    if isinstance(node, _DEFINITIONS):
        return {node.name}
    if isinstance(node, _IMPORTS):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if _is_main(node):
        return set()
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}


def _at_once(node: ast.stmt) -> Iterable[ast.AST]:
    """What of a statement runs while the file is loading: of a function its decorators, defaults and annotations."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
    return [] if _is_main(node) else [node]


def _reads(nodes: Iterable[ast.AST]) -> set[str]:
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


def _needed(function: str, body: list[ast.stmt]) -> set[str]:
    """The names that a function uses, and what these use, and what runs with every load of the file; a function's own
    variables count as well."""
    found: set[str] = set()
    waiting = {function}
    for node in body:
        if not _removable(node):
            waiting |= _reads([node])
    while waiting:
        found |= waiting
        waiting = {name for node in body if _binds(node) & waiting for name in _reads([node])} - found
    return found
