"""What the pytest plugin, the canonicaliser and the command line agree on about notebooks and their kernels.

Imports nothing heavy: a check cell is recognised from its text, a kernel's environment is a dictionary.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import sys
from pathlib import Path

_PACKAGE_PARENT = Path(__file__).resolve().parents[2]
# In a cell that Python's parser rejects (a magic, a slip of the learner) the call is looked for in the text.
_CALL_IN_TEXT = re.compile(r"\bgpukit\.check\(\s*[\"']([\w.-]+)[\"']")
_KERNEL_DROPS = ("COLUMNS", "LINES", "MPLBACKEND")  # a terminal's size and a forced backend change what cells show

# Cells whose saved output depends on more than the cell and the versions in constraints.txt carry one of these tags:
# "hardware" where it depends on the machine or its speed, "answers" where it depends on what exercises/ holds.
UNCOMPARED = ("hardware", "answers")
# One that shows registers, instructions or what is modelled from them, which differ between two versions of Triton, carries
# this tag: its output is compared where Triton has the version of constraints.txt, with which it was saved.
COMPILER = "compiler"

# Text that differs between two runs of the same cell and says nothing: (pattern, replacement). The canonicaliser
# removes it from saved outputs and the plugin from both sides of a comparison, so that a canonical notebook always
# compares equal.
NOISE = (
    (r"(?<= at )0x[0-9a-fA-F]{6,16}(?=[ >,)\]])", "0x..."),
    (r"(?m)[ \t]+$", ""),
)


def check_ids(source: str) -> list[str]:
    """The exercises that a cell checks, in order: every `gpukit.check("id")` or `check("id")`, wherever it stands."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return list(dict.fromkeys(_CALL_IN_TEXT.findall(source)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_check(node.func)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    arguments = [[*call.args, *(keyword.value for keyword in call.keywords)][:1] for call in calls]
    ids = [a.value for args in arguments for a in args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return list(dict.fromkeys(ids))


def _is_check(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr == "check" and isinstance(function.value, ast.Name) and function.value.id == "gpukit"
    return isinstance(function, ast.Name) and function.id == "check"


def uncompared(tags: object, root: Path) -> bool:
    """Whether a cell with these tags of the course in `root` may show something else here than it showed when it was saved."""
    if not isinstance(tags, list):
        return False
    return any(tag in tags for tag in UNCOMPARED) or (COMPILER in tags and not _pinned("triton", root))


def _pinned(package: str, root: Path) -> bool:
    """Whether the version that is installed is the one in the course's constraints.txt."""
    try:
        pins = (root / "constraints.txt").read_text(encoding="utf-8").split()
        return f"{package}=={importlib.metadata.version(package)}" in pins
    except (OSError, importlib.metadata.PackageNotFoundError):
        return False


def without_noise(text: str) -> str:
    for pattern, replacement in NOISE:
        text = re.sub(pattern, replacement, text)
    return text


def kernel_environment(impl: str) -> dict[str, str]:
    """The environment of a notebook's kernel: this process's, so that gpukit can be imported and `impl` is switched on.

    PYTEST_* stays out: with it ipykernel does not capture what C code and GPU kernels print, and learner code could
    tell that it is being graded.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k not in _KERNEL_DROPS}
    # Absolute: the kernel starts in the notebook's folder.
    path = [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if _PACKAGE_PARENT.name != "site-packages" and str(_PACKAGE_PARENT) not in path:
        path.append(str(_PACKAGE_PARENT))
    environment["PYTHONPATH"] = os.pathsep.join(path)
    environment["GPUKIT_IMPL"] = impl
    return environment


def protect_imports(root: Path) -> None:
    """Keep a learner's torch.py from being imported as torch in this process.

    `python -m` puts the working directory first on sys.path. The course's learner folders leave the path, its root
    (which may be where gpukit itself is imported from) goes to the end.
    """
    root = root.resolve()
    learner_folders = [root / name for name in ("notebooks", "exercises", "solutions")]

    def place(entry: str) -> int:
        folder = Path(entry or ".").resolve()
        if any(folder == learner or learner in folder.parents for learner in learner_folders):
            return 2
        return 1 if folder == root else 0

    places = [(place(entry), entry) for entry in sys.path]
    at_the_end = list(dict.fromkeys(str(Path(entry or ".").resolve()) for where, entry in places if where == 1))
    sys.path[:] = [entry for where, entry in places if where == 0] + at_the_end
