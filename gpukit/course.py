"""Where the course's files are, and which implementation is switched on."""

from __future__ import annotations

import codecs
import importlib.util
import inspect
import io
import linecache
import os
import re
import stat
import sys
import tokenize
from pathlib import Path
from types import ModuleType
from typing import Any

IMPLS = ("exercises", "solutions")
MAX_SOURCE_BYTES = 1 << 20
_ENCODINGS = ("utf-8", "ascii", "iso8859", "cp125")  # others, utf-7 among them, hide what a text says
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
        f"no folder at or above {start} holds notebooks/ and exercises/: change into the course's folder first, or lay the "
        "course out in a new one with gpukit init DIR"
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


def read_bytes(path: Path, within: Path) -> bytes:
    """A learner's file, of those below the folder `within`. Raises CourseError, which says of the file why it is refused."""
    try:
        if not path.resolve().is_relative_to(
            within.resolve()
        ):  # to the solutions, or to anything else of the machine's
            raise CourseError("is a symbolic link, or lies in one, that leads out of the course")
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe would never end
                raise CourseError("is not a file")
            data = file.read(MAX_SOURCE_BYTES + 1)
    except FileNotFoundError:
        raise CourseError("is missing") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: links that go round in a circle
        raise CourseError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_SOURCE_BYTES:
        raise CourseError("is larger than 1 MiB")
    return data


def text(data: bytes) -> str:
    """A file of Python as Python reads it, and as it reads it again from UTF-8: without a byte order mark, with plain line ends,
    and with no other encoding in its first lines. Raises CourseError."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        if not codecs.lookup(encoding).name.startswith(_ENCODINGS):
            raise CourseError(f"is written in {encoding}: save it as UTF-8")
        return plain(data.decode(encoding))
    except (SyntaxError, ValueError, LookupError):
        raise CourseError("is not text in the encoding that it names, or in UTF-8: save it as UTF-8") from None


_COOKIE = re.compile(r"^([ \t\f]*#.*?coding[:=][ \t]*)([-\w.]+)", re.ASCII)  # PEP 263, as the tokenize module has it


def plain(source: str) -> str:
    """The text of a program, unchanged when it is written as UTF-8 and read by Python."""
    lines = io.StringIO(source.removeprefix("\ufeff"), newline=None).read().split("\n")
    return "\n".join([_COOKIE.sub(r"\1utf-8", line) if n < 2 else line for n, line in enumerate(lines)])


_GAP = re.compile(r"""^\s*raise NotImplementedError\(['"]([^'"]*)['"]\)""", re.MULTILINE)


def _refuse_if_unwritten(kernel: Any) -> None:
    """Launching a Triton kernel with a gap raises what the gap says, as in the interpreter. On a GPU Triton's compiler would
    say that it knows no `raise`."""
    function = getattr(kernel, "fn", None)
    if not inspect.isfunction(function) or not hasattr(kernel, "run"):
        return
    gap = _GAP.search(inspect.getsource(function))
    if gap:

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(gap[1])

        kernel.run = refuse


class Functions:
    """The functions of one concept in the implementation that is switched on, read again whenever the file changes: no
    kernel restart, no autoreload. `gpukit.exercise("softmax").softmax_fused(x)`."""

    def __init__(self, concept: str):
        self._concept = concept
        self._loaded: tuple[Path, str] | None = None
        self._module: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        path = exercise_file(self._concept)
        try:
            source = text(read_bytes(path, path.parents[1]))
        except CourseError as error:
            raise CourseError(f"{path.parent.name}/{path.name} {error}") from None
        if self._loaded != (path, source):
            linecache.checkcache(str(path))  # Triton reads a kernel's source through this cache
            spec = importlib.util.spec_from_file_location(f"gpukit_{path.parent.name}_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
            if _GAP.search(source):
                for value in vars(module).values():
                    _refuse_if_unwritten(value)
            self._loaded, self._module = (path, source), module
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise CourseError(f"{path.parent.name}/{path.name} defines no {name}") from None


def exercise(concept: str) -> Functions:
    """The learner's (or the solutions') functions of `concept`, for use in a notebook. See Functions."""
    return Functions(concept)
