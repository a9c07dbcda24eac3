"""`gpukit lab`: the course in JupyterLab."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from gpukit import course

FIRST = "notebooks/00_start.ipynb"


def lab(argv: list[str]) -> int:
    """Open JupyterLab at the first notebook; `argv` goes to JupyterLab ("--port=9000", "--no-browser").

    Does not return, except with 2, after one sentence, where JupyterLab cannot start.
    """
    try:
        root = course.root()
    except course.CourseNotFound as error:
        return _refuse(str(error))
    if (first := _first(root)) is None:
        return _refuse(
            f"{root / FIRST} is missing, and so is every other notebook: the course's files are not complete"
        )
    if not os.access(root / "exercises", os.W_OK):
        return _refuse(f"{root} cannot be written, so no answer could be saved: copy the course to where you can write")
    if importlib.util.find_spec("jupyterlab") is None:
        return _refuse(f"JupyterLab is not installed for {sys.executable}: make lab, in {root}, installs it")
    print(
        f"JupyterLab opens {first}. If no browser window comes up, open the address below. Stop: Ctrl-C twice.",
        flush=True,
    )
    os.chdir(root)
    start = command(root, argv)
    # JupyterLab takes this process over: Ctrl-C, its question whether to stop, and the exit status are all its own.
    os.execve(start[0], start, environment())


def _first(root: Path) -> str | None:
    """FIRST, or in a copy with some of the concepts the first notebook that it has."""
    found = sorted(path.name for path in (root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    return f"notebooks/{found[0]}" if found else None


def command(root: Path, argv: list[str]) -> list[str]:
    """How JupyterLab is started. It takes the first free port from 8888 up."""
    options = [
        f"--ServerApp.root_dir={root}",
        f"--ServerApp.jpserver_extensions={{'{__name__}': True}}",
        "--LabApp.custom_css=True",
        f"--LabApp.default_url=/lab/tree/{_first(root) or FIRST}",
        "--Application.log_level=WARN",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # in a container; JupyterLab refuses root unless told
        options.append("--allow-root")
    return [sys.executable, "-m", "jupyterlab", *options, *argv]


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(server) -> None:
    """Let JupyterLab find custom.css of this package, after the user's own if there is one: the look of pictures in the dark."""
    server.web_app.settings["static_custom_path"].append(str(Path(__file__).parent / "widgets"))


def environment() -> dict[str, str]:
    """Ours, with this Python's commands first, so that a terminal in JupyterLab finds `gpukit`."""
    return os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}


def _refuse(sentence: str) -> int:
    print(f"gpukit lab: {sentence}", file=sys.stderr)
    return 2
