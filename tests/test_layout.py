"""The layout holds: imports point to lower layers, one concept has one name in every folder, nothing lies elsewhere."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A module may import from lower layers and from its own package. Longest match wins: gpukit.grading.judge is in
# gpukit.grading's layer.
LAYERS = {
    "gpukit": 0,  # __init__.py: names only, loaded when used
    "gpukit.nearest": -1,
    "gpukit.op": 0,
    "gpukit.hardware": 0,
    "gpukit.launches": 0,
    "gpukit.dispatch": 0,
    "gpukit.course": 0,
    "gpukit.tables": 0,
    "gpukit.accounting": 1,
    "gpukit.simulator": 1,
    "gpukit.reference": 1,
    "gpukit.kernels": 1,
    "gpukit.huggingface": 2,
    "gpukit.testing": 2,
    "gpukit.timing": 2,
    "gpukit.live": 2,
    "gpukit.nvcc": 2,
    "gpukit.profiling": 2,
    "gpukit.benchmark": 3,
    "gpukit.validation": 3,
    "gpukit.grading": 3,
    "gpukit.checks": 3,
    "gpukit.mutants": 4,
    "gpukit.patched_models": 4,
    "gpukit.integrity": 5,
    "gpukit.trace_report": 4,
    "gpukit.widgets": 4,
    "gpukit.train": 4,
    "gpukit.doctor": 5,
    "gpukit.lab": 5,
    "gpukit.notebooks": 5,
    "gpukit.lessons": 5,
    "gpukit.bootstrap": 5,
    "gpukit.side_by_side": 5,
    "gpukit.trace_page": 5,
    "gpukit.cheatsheet": 5,
    "gpukit.classroom": 6,
    "gpukit.cli": 7,
    "gpukit.__main__": 8,
    "gpukit.train.__main__": 8,  # `gpukit train` for torchrun
}
# Within a layer only these look at each other: checks/ lists exercises as data, grading/ finds them there.
SIBLINGS = {frozenset({"gpukit.grading", "gpukit.checks"})}
STANDARD_LIBRARY_ONLY = {"gpukit.bootstrap"}  # it runs before anything is installed


def package_of(module: str) -> str | None:
    """The entry of LAYERS that `module` belongs to: its own name, or the package it lies in."""
    while module and module not in LAYERS:
        module = module.rpartition(".")[0]
    return module if module != "gpukit" else None


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, modules: set[str]):
    """(line, module) for each import of gpukit, inside functions too. `from gpukit import x` counts as gpukit.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in modules else node.module


def broken_rules(name: str, tree: ast.AST, modules: set[str]) -> list[str]:
    """What the module called `name` imports and must not: "line: rule"."""
    own = package_of(name)
    if own is None and name != "gpukit":
        return [f"1: {name} belongs to no layer: give it one in LAYERS, tests/test_layout.py"]
    found = []
    for line, target in imports(tree, modules):
        if target.partition(".")[0] != "gpukit" or target == "gpukit":
            continue
        other = package_of(target)
        if name in STANDARD_LIBRARY_ONLY:
            found.append(f"{line}: {name} uses the standard library only, not {target}")
        elif name == "gpukit":
            found.append(f"{line}: gpukit/__init__.py loads modules when they are used, not {target} at import")
        elif other is not None and other != own and frozenset({own, other}) not in SIBLINGS:
            if LAYERS[other] >= LAYERS[own]:
                found.append(
                    f"{line}: {name} (layer {LAYERS[own]}) imports {target} (layer {LAYERS[other]}); "
                    "imports point to a lower layer"
                )
    return found


def test_imports_point_to_lower_layers():
    files = {name_of(path): path for path in sorted((ROOT / "gpukit").rglob("*.py"))}
    broken = [
        f"{path.relative_to(ROOT)}:{rule}"
        for name, path in files.items()
        for rule in broken_rules(name, ast.parse(path.read_text()), set(files))
    ]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("name", "source", "rule"),
    (
        ("gpukit.op", "from gpukit.grading.judge import judge", "1: gpukit.op (layer 0) imports gpukit.grading.judge"),
        (
            "gpukit.testing",
            "def f():\n    import gpukit.cli",
            "2: gpukit.testing (layer 2) imports gpukit.cli (layer 7)",
        ),
        ("gpukit.kernels.gelu", "from gpukit.simulator import trace", "layer 1) imports gpukit.simulator"),
        ("gpukit.bootstrap", "from gpukit import course", "1: gpukit.bootstrap uses the standard library only"),
        ("gpukit", "from gpukit.op import Op", "1: gpukit/__init__.py loads modules when they are used"),
        ("gpukit.helpers", "", "1: gpukit.helpers belongs to no layer"),
        ("gpukit.checks.gelu", "from gpukit.grading.exercise import Case", None),
        ("gpukit.kernels.gelu", "from gpukit.kernels.softmax import softmax", None),
        ("gpukit.widgets.bits", "import gpukit\nfrom gpukit import course", None),
    ),
)
def test_the_import_rule_itself(name, source, rule):
    found = broken_rules(name, ast.parse(source), {"gpukit.course", "gpukit.op", "gpukit.cli"})
    assert (rule is None and not found) or (len(found) == 1 and rule in found[0])


def import_cycles(sources: dict[str, str]) -> list[str]:
    """The circles among modules (name -> source), each as "a -> b -> a". Imports inside functions count, and names of
    modules that are given as text to be imported later; those under TYPE_CHECKING are for readers and type checkers only."""
    edges = {}
    for name, source in sources.items():
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = []
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} if name != "gpukit" else set()
        edges[name] = ({target for _, target in imports(tree, set(sources))} | texts & sources.keys()) - {
            name,
            "gpukit",
        }
    found = []
    while True:
        try:
            graphlib.TopologicalSorter(edges).prepare()
            return found
        except graphlib.CycleError as error:
            cycle = error.args[1][::-1]  # it lists who is imported before who imports
            found.append(" -> ".join(cycle))
            edges[cycle[0]].discard(cycle[1])


def test_no_imports_go_round_in_a_circle():
    cycles = import_cycles({name_of(path): path.read_text() for path in (ROOT / "gpukit").rglob("*.py")})
    assert not cycles, "modules that import each other: " + "; ".join(cycles)


def test_import_cycles_are_found():
    sources = {
        "a": "from b import f\nfrom c import g",
        "b": "def f():\n    import d",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a",
        "d": "import importlib\nMODULE = 'a'\nimportlib.import_module(MODULE)",
        "e": "import f",
        "f": "from e import x",
    }
    first, second = sorted(import_cycles(sources), key=len, reverse=True)
    assert sorted(first.split(" -> ")[1:]) == ["a", "b", "d"] and sorted(second.split(" -> ")[1:]) == ["e", "f"]
    assert "a -> b" in f"{first} -> {first}" and first.split(" -> ")[0] == first.split(" -> ")[-1]


PACKAGES = sorted(path.parent for path in (ROOT / "gpukit").rglob("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_package_begins_with_a_map_of_its_modules(package):
    """At most 15 lines, which name every module and every package in it."""
    about = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    assert 0 < len(about.split("\n")) <= 15, f"{package.name}/__init__.py: a docstring of 1 to 15 lines"
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    missing = modules - {"__init__", "__main__"} - set(re.findall(r"\w+", about))
    assert not missing, f"{package.name}/__init__.py: its map does not name {', '.join(sorted(missing))}"


def test_no_module_is_called_utils_or_edits_the_search_path():
    for path in (ROOT / "gpukit").rglob("*.py"):
        assert path.stem not in ("utils", "helpers", "common"), f"{path}: name a module after what it is about"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("append", "insert", "extend"):
                assert ast.unparse(node.value) != "sys.path", (
                    f"{path}:{node.lineno}: gpukit is installed; leave sys.path"
                )


def concepts(folder: str, pattern: str = "*.py") -> set[str]:
    stems = {path.stem for path in (ROOT / folder).glob(pattern)}
    return {stem for stem in stems if not stem.startswith("_")}


def test_a_concept_has_one_name_in_every_folder():
    notebooks = [path.stem for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+", stem) for stem in notebooks), "notebooks are called 09_softmax.ipynb"
    assert len({stem[:2] for stem in notebooks}) == len(notebooks), "two notebooks have one number"
    lessons = {stem[3:] for stem in notebooks}
    for folder in ("exercises", "solutions", "gpukit/checks"):
        assert concepts(folder) == lessons, f"{folder}/ and notebooks/ name different concepts"
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}
    assert lessons <= tested, f"no test_<concept>.py in any folder of tests: {sorted(lessons - tested)}"
    # Lesson «losses» teaches three kernel modules and «norms» two, so these need no namesake among the lessons.
    operations = tuple(concepts("gpukit/reference"))  # «flash_attention» is that of flash_attention_varlen too
    untold = [name for name in concepts("gpukit/kernels") if not name.startswith(operations)]
    assert not untold, f"a kernel has its Op in gpukit/reference/: {sorted(untold)}"


def test_readme_lists_the_notebooks_that_exist():
    readme = (ROOT / "README.md").read_text()
    listed = set(re.findall(r"\(notebooks/(\w+\.ipynb)\)", readme))
    assert listed == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_files_stay_small():
    """Notebooks 1 MB (the pictures in them are small PNGs), anything else 200 kB."""
    tops = [".ci", "exercises", "gpukit", "notebooks", "solutions", "tests"]
    files = [path for top in tops for path in (ROOT / top).rglob("*") if "__pycache__" not in path.parts]
    for path in files:
        if path.is_file() and ".ipynb_checkpoints" not in path.parts:
            limit = 1_000_000 if path.suffix == ".ipynb" else 200_000
            assert path.stat().st_size <= limit, f"{path.relative_to(ROOT)}: over {limit:,} bytes"


def test_every_kernel_module_names_the_functions_to_be_read_first():
    """The kernels of gpukit are fast; those of solutions/ are the same ideas, each alone, in a page."""
    for concept in concepts("gpukit/kernels"):
        text = ast.get_docstring(ast.parse((ROOT / "gpukit/kernels" / f"{concept}.py").read_text()))
        found = re.search(r"The same kernels?, to be read first: ([^.]*)\sin\s(solutions/\w+\.py)\.", text)
        assert found, f"gpukit/kernels/{concept}.py: the docstring names no function of solutions/"
        tree = ast.parse((ROOT / found[2]).read_text())
        there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        named = set(re.findall(r"`(\w+)`", found[1]))
        assert named and named <= there, f"{found[2]} has no {sorted(named - there)}"
