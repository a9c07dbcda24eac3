"""exercises/ is solutions/ with the marked regions cleared: `gpukit stubs` rewrites it, with --check it compares.

A region lies between the lines `# BEGIN SOLUTION` and `# END SOLUTION`, inside a function or a kernel. It becomes a line
that raises NotImplementedError with the exercise's id, which the check reports as todo. Lines `# STUB: code` in the region
are put there instead: an exercise may start from code that is wrong.
"""

from __future__ import annotations

import ast
import html
import json
import re
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path

from gpukit.course import CourseError
from gpukit.grading import registry
from gpukit.grading.lint import importable

_BEGIN = re.compile(r"\s*# BEGIN SOLUTION\s*")
_END = re.compile(r"\s*# END SOLUTION\s*")
_STUB = re.compile(r"\s*# STUB: (.*)")
BACKUP = ".gpukit/backup"


class BadMarkers(CourseError):
    """Marked regions that do not pair up or lie outside a function; the message gives the line."""


def regions(source: str) -> list[tuple[int, int]]:
    """The lines (counted from 0) of each region's markers: [(begin, end)]. Raises BadMarkers."""
    found: list[tuple[int, int]] = []
    begin = None
    lines = source.splitlines()
    for number, line in enumerate(lines):
        if _BEGIN.fullmatch(line):
            if begin is not None:
                raise BadMarkers(
                    f"line {number + 1}: # BEGIN SOLUTION inside the region that begins in line {begin + 1}"
                )
            begin = number
        elif _END.fullmatch(line):
            if begin is None:
                raise BadMarkers(f"line {number + 1}: # END SOLUTION without # BEGIN SOLUTION")
            if any(text.strip() and _indent(text) < _indent(lines[begin]) for text in lines[begin:number]):
                raise BadMarkers(f"line {begin + 1}: the region reaches outside its block")
            found.append((begin, number))
            begin = None
    if begin is not None:
        raise BadMarkers(f"line {begin + 1}: # BEGIN SOLUTION without # END SOLUTION")
    return found


def clear(source: str, ids: Mapping[str, str] | None = None) -> str:
    """`source` with every region replaced by a gap.

    `ids` maps the name of an exercise's function to the exercise's id. A gap belongs to the exercise whose function
    holds it or is the next one below: helpers and kernels stand above the function that uses them. Without `ids` the
    gap is called after the function that it is in. Raises BadMarkers.
    """
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    exercises = sorted((f.end_lineno, ids[f.name]) for f in functions if ids and f.name in ids)
    lines = source.splitlines()
    kept: list[str] = []
    after = 0
    for begin, end in regions(source):
        around = [f for f in functions if f.lineno <= begin < f.end_lineno]
        if not around:
            raise BadMarkers(f"line {begin + 1}: # BEGIN SOLUTION outside a function")
        function = max(around, key=lambda f: f.lineno)
        name = next((exercise_id for last, exercise_id in exercises if last > begin), function.name)
        gap = [match[1] for line in lines[begin:end] if (match := _STUB.fullmatch(line))]
        gap = gap or [f'raise NotImplementedError("{name}")']
        gap[0] += "  # your code here"
        indent = " " * _indent(lines[begin])
        kept += lines[after:begin] + [indent + line for line in gap]
        after = end + 1
    return "\n".join([*kept, *lines[after:]]) + "\n"


def handed_out(concept: str, root: Path) -> str:
    """The stub of a concept: made from its solution where there is one, else exercises/<concept>.py as it is; "" without."""
    if concept in registry.added:
        return registry.added[concept].stub
    solution, stub = root / "solutions" / f"{concept}.py", root / "exercises" / f"{concept}.py"
    if solution.is_file():
        ids = {e.function: e.id for e in registry.concept(concept).values()}
        return clear(solution.read_text(encoding="utf-8"), ids)
    return stub.read_text(encoding="utf-8") if stub.is_file() else ""


def unwritten(source: str, stub: str, concept: str) -> dict[str, int]:
    """The exercises of a concept whose gap is in `source` as in `stub`, so that a check would say todo, and the lines of these
    gaps; without those of which that cannot be told from the text. What stands between the exercise before and a function
    counts as a part of it."""
    if "NotImplementedError" not in source:  # what is written costs no parsing
        return {}
    try:
        theirs, ours = ast.parse(source).body, ast.parse(stub).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    functions = {each.function: each.id for each in registry.concept(concept).values()}
    sections, handed = _sections(theirs, functions), _sections(ours, functions)
    found = {}
    for function, section in sections.items():
        gap = f"NotImplementedError({functions[function]!r})"
        raises = (node for each in section for node in ast.walk(each) if isinstance(node, ast.Raise) and node.exc)
        lines = [node.lineno for node in raises if ast.unparse(node.exc) == gap]
        if not lines or list(map(ast.dump, section)) != list(map(ast.dump, handed.get(function, []))):
            continue
        if not _bound(section) & _bound([node for node in theirs if node not in section]):  # no other meaning elsewhere
            found[functions[function]] = min(lines)
    return found


def _sections(body: list[ast.stmt], functions: Collection[str]) -> dict[str, list[ast.stmt]]:
    """The statements that belong to each function: from behind the one before it."""
    found: dict[str, list[ast.stmt]] = {}
    section: list[ast.stmt] = []
    for node in body:
        section.append(node)
        if (name := getattr(node, "name", None)) in functions:
            found[name] = section
            section = []
    return found


def _bound(nodes: list[ast.stmt]) -> set[str]:
    """The names of the file that statements give a meaning to; what is inside a function has names of its own."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= {
                node.name,
                *(name for each in ast.walk(node) if isinstance(each, ast.Global) for name in each.names),
            }
            continue
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        waiting += ast.iter_child_nodes(node)
    return names


def may_import(counted: bool) -> str:
    """The lines in the head of an exercise's file that say what may be imported. `counted`: one of its exercises counts the
    memory of tensors."""
    names = importable(counted)
    text = f"What may be imported: {', '.join(names[:-1])} and {names[-1]}."
    return (
        "\n".join(textwrap.wrap(text, 120, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)) + "\n"
    )


def write(root: Path) -> list[str]:
    """Make root/exercises from root/solutions. What it did, a line for each file that changed.

    Whatever a file held before is kept in .gpukit/backup: it may be someone's work.
    """
    done = []
    for path, stub in _stubs(root).items():
        before = path.read_bytes() if path.exists() else None
        if before == stub.encode():
            continue
        kept = f"; what it held is in {_back_up(path, root)}" if before else ""
        path.parent.mkdir(exist_ok=True)
        path.write_text(stub, encoding="utf-8")
        done.append(f"exercises/{path.name}: written{kept}")
    return done


def made(root: Path) -> dict[str, str]:
    """The text of exercises/<concept>.py as `write` makes it, by concept."""
    return {path.stem: stub for path, stub in _stubs(root).items()}


def drift(root: Path) -> list[str]:
    """How root/exercises differs from what `write` would make: a line for each file, none if it does not."""
    stubs = _stubs(root)
    problems = []
    for path, stub in stubs.items():
        if not path.exists():
            problems.append(f"exercises/{path.name} is missing; it is made from solutions/{path.name}")
        elif path.read_bytes() != stub.encode():
            problems.append(f"exercises/{path.name} differs from solutions/{path.name}")
    without = [path for path in sorted((root / "exercises").glob("*.py")) if path not in stubs]
    return problems + [f"exercises/{path.name} has no solutions/{path.name}" for path in without]


def leaks(root: Path) -> list[str]:
    """Where a solution can be read: three lines of a region in a row in exercises/ or in a notebook's cells and output.

    Comments, blank lines and spacing do not matter.
    """
    secrets: dict[tuple[str, ...], str] = {}
    for path in sorted((root / "solutions").glob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for begin, end in regions("\n".join(lines)):
            code = normalised("\n".join(lines[begin + 1 : end]))
            for run in _runs(code, 3):
                secrets.setdefault(run, f"solutions/{path.name}, line {begin + 1}")
    found = []
    for path in sorted((root / "exercises").glob("*.py")):
        found += _leaked(path.read_text(encoding="utf-8"), secrets, f"exercises/{path.name}")
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        found += _leaked(readable(path), secrets, f"notebooks/{path.name}")
    return found


def normalised(code: str) -> list[str]:
    """The lines of code without comments, blank lines and spacing."""
    lines = (re.sub(r"\s+", "", line.partition("#")[0]) for line in code.splitlines())
    return [line for line in lines if line]


def _runs(lines: list[str], length: int) -> set[tuple[str, ...]]:
    return {tuple(lines[i : i + length]) for i in range(len(lines) - length + 1)}


def _leaked(text: str, secrets: dict[tuple[str, ...], str], where: str) -> list[str]:
    # A second look without tags: highlighted source in HTML.
    texts = (text, html.unescape(re.sub(r"<[^<>\n]*>", "", text)))
    common = {run for each in texts for run in _runs(normalised(each), 3)} & secrets.keys()
    return sorted({f"{where} shows the solution in {secrets[run]}" for run in common})


def readable(path: Path) -> str:
    """Everything in a file that a person can read; of a notebook the sources and text outputs, one after the other."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError, TypeError):
        return ""  # what is wrong with it, `gpukit nb clean --check` says
    return "\n".join(strings(cells))


def strings(value) -> list[str]:
    """The texts in what a JSON file holds. nbformat stores a text as a list of lines, so a list of strings is joined."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        joined = all(isinstance(item, str) for item in value)
        return ["".join(value)] if joined else [text for item in value for text in strings(item)]
    return [text for item in value.values() for text in strings(item)] if isinstance(value, dict) else []


def _stubs(root: Path) -> dict[Path, str]:
    solutions = sorted((root / "solutions").glob("*.py"))
    if not solutions:
        raise CourseError("there is no solutions/ folder here, so there is nothing to make exercises/ from")
    found = {}
    for path in solutions:
        concept = path.stem
        ids = {e.function: e.id for e in registry.exercises().values() if e.concept == concept}
        found[root / "exercises" / path.name] = stub(path.read_text(encoding="utf-8"), ids, f"solutions/{path.name}")
    return found


def stub(solution: str, ids: dict[str, str], where: str) -> str:
    """The stub that a solution makes. `ids`: as for `clear`; `where` is what errors call the file. Raises BadMarkers."""
    try:
        text = clear(solution, ids)
        _each_has_a_gap(solution, ids)
    except BadMarkers as error:
        raise BadMarkers(f"{where}, {error}") from None
    except SyntaxError as error:
        raise BadMarkers(f"{where}, line {error.lineno}: {error.msg}") from None
    return text


def _each_has_a_gap(source: str, ids: dict[str, str]) -> None:
    """Raises BadMarkers for an exercise that would be handed out solved: no gap between the one before and its function's end."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name in ids]
    above = 0
    for function in sorted(functions, key=lambda f: f.end_lineno):
        if not any(above <= begin < function.end_lineno for begin, _ in regions(source)):
            raise BadMarkers(
                f"line {function.lineno}: {ids[function.name]} has no # BEGIN SOLUTION: it would be handed out solved"
            )
        above = function.end_lineno


def _back_up(path: Path, root: Path) -> Path:
    folder = root / BACKUP
    folder.mkdir(parents=True, exist_ok=True)
    free = next(n for n in range(1, 10_000) if not (folder / f"{path.stem}-{n}.py").exists())
    backup = folder / f"{path.stem}-{free}.py"
    backup.write_bytes(path.read_bytes())
    return backup.relative_to(root)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
