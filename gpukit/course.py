"""Where the course's files are, and which implementation is switched on."""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
from pathlib import Path
from types import ModuleType

IMPLS = ("exercises", "solutions")
_chosen: str | None = (
    None  # by `use`, for this process only: nothing on disk changes, so nothing can be left switched on
)


class CourseError(Exception):
    """A mistake that one sentence explains: shown without a traceback, in a notebook as on the command line."""

    def _render_traceback_(self) -> list[str]:  # IPython shows this in place of a traceback
        return [str(self)]


class CourseNotFound(CourseError):
    pass


def root(start: Path | str | None = None) -> Path:
    """The course's folder: the nearest one at or above `start` (default: the working directory) that holds notebooks/ and
    exercises/, else the checkout that this package lies in. Raises CourseNotFound."""
    start = Path.cwd() if start is None else Path(start).resolve()
    for folder in (start, *start.parents, Path(__file__).resolve().parents[1]):
        if (folder / "notebooks").is_dir() and (folder / "exercises").is_dir():
            return folder
    raise CourseNotFound(
        f"no folder at or above {start} holds notebooks/ and exercises/: change into the course's folder first"
    )


def impl() -> str:
    """ "exercises" or "solutions": what `use` chose in this process, else GPUKIT_IMPL, else "exercises"."""
    return _known(_chosen or os.environ.get("GPUKIT_IMPL") or "exercises")


def use(name: str) -> None:
    """Switch this process (a notebook's kernel) to "exercises" or "solutions"."""
    global _chosen
    _chosen = _known(name)


def _known(name: str) -> str:
    if name not in IMPLS:
        raise CourseError(f"impl must be 'exercises' or 'solutions', got {name!r}")
    return name


def exercise_file(concept: str, folder: Path | None = None, implementation: str | None = None) -> Path:
    """Where the functions of `concept` are: exercises/<concept>.py or solutions/<concept>.py."""
    return (folder or root()) / (implementation or impl()) / f"{concept}.py"


class Functions:
    """The functions of one concept in the implementation that is switched on, read again whenever the file changes: no
    kernel restart, no autoreload. `gpukit.exercise("softmax").softmax_fused(x)`."""

    def __init__(self, concept: str):
        self._concept = concept
        self._loaded: tuple[Path, str] | None = None
        self._module: ModuleType | None = None

    def __getattr__(self, name: str):
        path = exercise_file(self._concept)
        if not path.exists():
            raise CourseError(f"{path.parent.name}/{path.name} is missing")
        source = path.read_text(encoding="utf-8")
        if self._loaded != (path, source):
            linecache.checkcache(str(path))  # Triton reads a kernel's source through this cache
            spec = importlib.util.spec_from_file_location(f"gpukit_{path.parent.name}_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            exec(compile(source, str(path), "exec"), module.__dict__)
            self._loaded, self._module = (path, source), module
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise CourseError(f"{path.parent.name}/{path.name} defines no {name}") from None


def exercise(concept: str) -> Functions:
    """The learner's (or the solutions') functions of `concept`, for use in a notebook. See Functions."""
    return Functions(concept)
