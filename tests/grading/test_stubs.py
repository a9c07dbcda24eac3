"""Clearing solutions into exercises, the drift check, the leak scan."""

import ast
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gpukit import course
from gpukit.grading import registry, stubs
from gpukit.grading.stubs import BadMarkers, clear, drift, leaks, write

SOURCE = '''"""Doc."""
import triton


@triton.jit
def first_kernel(x_ptr, N):
    """Contract."""
    pid = 0
    # BEGIN SOLUTION
    a = pid + 1
    b = a * 2

    c = b - 1  # why
    # END SOLUTION


def first(x):
    # BEGIN SOLUTION
    return first_kernel(x)
    # END SOLUTION


class F:
    def forward(ctx, x):
        y = x
        # BEGIN SOLUTION
        return y
        # END SOLUTION


def second(x):
    # BEGIN SOLUTION
    # STUB: y = 0
    # STUB: return y
    return F.forward(None, x)
    # END SOLUTION


def helper():
    # BEGIN SOLUTION
    return 1
    # END SOLUTION
'''
CLEARED = '''"""Doc."""
import triton


@triton.jit
def first_kernel(x_ptr, N):
    """Contract."""
    pid = 0
    raise NotImplementedError("alpha.first")  # your code here


def first(x):
    raise NotImplementedError("alpha.first")  # your code here


class F:
    def forward(ctx, x):
        y = x
        raise NotImplementedError("alpha.second")  # your code here


def second(x):
    y = 0  # your code here
    return y


def helper():
    raise NotImplementedError("helper")  # your code here
'''


def test_clear():
    assert clear(SOURCE, {"first": "alpha.first", "second": "alpha.second"}) == CLEARED
    assert 'NotImplementedError("forward")' in clear(SOURCE)
    assert clear(CLEARED) == CLEARED


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f():\n    # BEGIN SOLUTION\n    pass\n", "line 2: # BEGIN SOLUTION without # END SOLUTION"),
        ("def f():\n    pass\n    # END SOLUTION\n", "line 3: # END SOLUTION without # BEGIN SOLUTION"),
        ("def f():\n    # BEGIN SOLUTION\n    # BEGIN SOLUTION\n    pass\n", "line 3: # BEGIN SOLUTION inside"),
        ("# BEGIN SOLUTION\nx = 1\n# END SOLUTION\n", "line 1: # BEGIN SOLUTION outside a function"),
        ("def f():\n    # BEGIN SOLUTION\n    pass\nx = 1\n    # END SOLUTION\n", "line 2: the region reaches outside"),
    ],
)
def test_bad_markers_name_their_line(source, message):
    with pytest.raises(BadMarkers, match=message):
        clear(source)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    known = {
        f"alpha.{name}": SimpleNamespace(id=f"alpha.{name}", concept="alpha", function=name)
        for name in ("first", "second")
    }
    monkeypatch.setattr(registry, "exercises", lambda: known)
    for folder in ("solutions", "notebooks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "solutions" / "alpha.py").write_text(SOURCE)
    return tmp_path


def test_write_makes_the_exercises_and_keeps_what_was_there(tiny):
    assert drift(tiny) == ["exercises/alpha.py is missing; it is made from solutions/alpha.py"]
    assert write(tiny) == ["exercises/alpha.py: written"]
    exercise = tiny / "exercises" / "alpha.py"
    assert exercise.read_text() == CLEARED
    assert write(tiny) == [] and drift(tiny) == []
    for number in (1, 2):
        exercise.write_text(f"my answer {number}\n")
        assert drift(tiny) == ["exercises/alpha.py differs from solutions/alpha.py"]
        kept = f".gpukit/backup/alpha-{number}.py"
        assert write(tiny) == [f"exercises/alpha.py: written; what it held is in {kept}"]
        assert (tiny / kept).read_text() == f"my answer {number}\n"
    (tiny / "exercises" / "old.py").write_text("")
    assert drift(tiny) == ["exercises/old.py has no solutions/old.py"]


def test_a_bad_file_is_named(tiny):
    (tiny / "solutions" / "alpha.py").write_text("def f(:\n")
    with pytest.raises(BadMarkers, match=r"solutions/alpha\.py, line 1"):
        write(tiny)


def test_a_copy_without_solutions_says_so(tmp_path):
    with pytest.raises(course.CourseError, match="no solutions/ folder"):
        write(tmp_path)


LEAK = "a=pid+1\n\n  b = a*2 # a comment\n# another\nc = b - 1\n"


def cell(source="", outputs=()):
    return {"cell_type": "code", "source": source.splitlines(keepends=True), "outputs": list(outputs)}


@pytest.mark.parametrize(
    "leaky",
    [
        cell(LEAK),
        cell(outputs=[{"output_type": "stream", "text": LEAK.splitlines(keepends=True)}]),
        cell(outputs=[{"output_type": "display_data", "data": {"text/plain": LEAK}}]),
        cell(
            outputs=[
                {"output_type": "display_data", "data": {"text/html": LEAK.replace("a", '<span class="n">a</span>')}}
            ]
        ),
        {"cell_type": "markdown", "source": f"The answer:\n```python\n{LEAK}```\n"},
    ],
    ids=["source", "stream", "text", "html", "markdown"],
)
def test_a_leak_in_a_notebook_is_found(tiny, leaky):
    write(tiny)
    (tiny / "notebooks" / "01_x.ipynb").write_text(json.dumps({"cells": [cell("x = 1"), leaky]}))
    assert leaks(tiny) == ["notebooks/01_x.ipynb shows the solution in solutions/alpha.py, line 9"]


def test_no_leak_in_two_lines_or_in_a_stub(tiny):
    write(tiny)
    (tiny / "notebooks" / "01_x.ipynb").write_text(json.dumps({"cells": [cell("a = pid + 1\nb = a * 2\nd = b\n")]}))
    (tiny / "notebooks" / "02_y.ipynb").write_text("no JSON")
    assert leaks(tiny) == []
    (tiny / "exercises" / "alpha.py").write_text(LEAK)
    assert leaks(tiny) == ["exercises/alpha.py shows the solution in solutions/alpha.py, line 9"]


# ---- the course's own solutions
ROOT = course.root(__file__)
needs_solutions = pytest.mark.skipif(not (ROOT / "solutions").is_dir(), reason="a copy of the course without solutions")


@needs_solutions
def test_no_solution_of_this_course_leaks():
    assert [line for line in leaks(ROOT) if line.split()[0] not in edited_here()] == []


@needs_solutions
def test_exercises_are_what_solutions_make_them():
    assert [line for line in drift(ROOT) if line.split()[0] not in edited_here()] == [], "run: gpukit stubs"


def edited_here() -> set[str]:
    """Files in exercises/ that differ from the last commit: a learner's answers are meant to."""
    command = ["git", "diff", "--name-only", "--relative", "HEAD", "--", "exercises"]
    try:
        return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split())
    except FileNotFoundError:
        return set()


@needs_solutions
@pytest.mark.parametrize("path", sorted((ROOT / "solutions").glob("*.py")), ids=lambda path: path.stem)
def test_stub_and_solution_have_the_same_signatures(path):
    def signatures(source):
        found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        return [(f.name, ast.unparse(f.args), ast.get_docstring(f)) for f in found]

    source = path.read_text()
    assert stubs.regions(source), "nothing is left to the learner"
    stub = signatures(clear(source))
    assert stub == [each for each in signatures(source) if each in stub]
    asked = {e.function for e in registry.exercises().values() if e.concept == path.stem}
    assert asked <= {name for name, *_ in stub}


COMPILED = """
import ast
from pathlib import Path
import gpukit

gaps = 0
for file in sorted(Path("exercises").glob("*.py")):
    for node in ast.parse(file.read_text()).body:
        decorated = isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
        if not decorated or "raise NotImplementedError" not in ast.unparse(node):
            continue
        kernel = getattr(gpukit.exercise(file.stem), node.name)
        try:
            kernel[(1,)]()
        except NotImplementedError as error:
            gaps += str(error).startswith(file.stem + ".")
        else:
            raise AssertionError(node.name)
print(gaps)
"""


def test_a_kernel_with_a_gap_says_so_where_kernels_are_compiled():
    """As in the interpreter, so that a lesson's cell catches it on a GPU too."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(course.root())}
    environment.pop("GPUKIT_IMPL", None)
    run = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment, cwd=course.root()
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 30
