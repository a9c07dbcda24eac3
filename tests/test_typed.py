"""A type checker knows every public name: tests/typed.py uses them all."""

import inspect
import re
import subprocess
import sys

import pytest

import gpukit
from gpukit import course, kernels

ROOT = course.root(__file__)
TYPED = ROOT / "tests" / "typed.py"


def test_every_public_name_is_used():
    text = TYPED.read_text()
    for module, names in (("gpukit", gpukit.__all__), ("kernels", kernels.__all__)):
        assert {*names} - {*re.findall(rf"\b{module}\.(\w+)", text)} == set()


@pytest.mark.prove
def test_mypy_finds_the_mistakes_that_are_marked_and_no_other():
    pytest.importorskip("mypy", reason="mypy is not installed; make test installs it")
    options = ["--follow-imports=silent", "--warn-unused-ignores", f"--cache-dir={ROOT / 'build' / 'mypy'}"]
    call = [sys.executable, "-m", "mypy", *options, str(TYPED)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_parameter_and_result_of_a_public_name_has_a_type():
    """Where one is missing, a type checker says nothing about a wrong argument, and an editor shows Unknown."""
    bare = re.compile(r"\b(dict|list|set|tuple|type|Callable|Iterable|Iterator|Mapping|Sequence)\b(?!\[)")
    public = [(module, name) for module in (gpukit, kernels) for name in module.__all__ if name[:2] != "__"]
    lacking = []
    for module, name in public:
        thing = getattr(module, name)
        own = vars(thing).items() if inspect.isclass(thing) else [("", thing)]
        for part, function in own:
            if not inspect.isfunction(inspect.unwrap(function)) or (part[:1] == "_" and part != "__init__"):
                continue
            signature = inspect.signature(function)
            parts = {key: p.annotation for key, p in signature.parameters.items() if key != "self"}
            if part != "__init__":
                parts["return"] = signature.return_annotation
            lacking += [
                f"{name}.{part}: {key}"
                for key, a in parts.items()
                if a is inspect.Parameter.empty or bare.search(inspect.formatannotation(a).strip("'"))
            ]
    assert lacking == []
