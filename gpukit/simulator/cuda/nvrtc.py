"""NVRTC, NVIDIA's compiler for CUDA C++ as a library: it needs neither a GPU nor a driver. PyPI has it as nvidia-cuda-nvrtc;
PyTorch's CUDA builds bring one along, which does as well.

The compiler reads what the text includes and takes as long as it likes, so a stranger's text is compiled behind a fence.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

INSTALL = "pip install nvidia-cuda-nvrtc"
NAME = "kernel.cu"  # what the compiler calls the text
# PTX for the oldest GPU of the course: what it says of loads, stores and arithmetic holds for all.
_OPTIONS = ("--gpu-architecture=compute_80", "--std=c++17", "--generate-line-info")


class NotInstalled(RuntimeError):
    """There is no NVRTC that can be loaded; the message says so in one sentence."""


class CompileError(Exception):
    """The compiler refuses a text. `line` counts from 1, 0 where it names none; the message is its first error."""

    def __init__(self, message: str, line: int = 0):
        super().__init__(message)
        self.line = line


def find() -> Path | None:
    """The newest libnvrtc among the installed packages, None without one. Nothing is loaded."""
    found = {path.resolve() for folder in _folders() for path in folder.glob("libnvrtc[.-]*so*") if path.is_file()}
    return max((path for path in found if "builtins" not in path.name), key=_version, default=None)


def _folders() -> Iterator[Path]:
    for package, inside in (("nvidia", "*/lib"), ("torch", "lib")):
        spec = importlib.util.find_spec(package)
        for place in spec.submodule_search_locations or () if spec else ():
            yield from Path(place).glob(inside)


def _version(path: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", path.name.partition(".so")[2])))


@cache
def load(path: str) -> ctypes.CDLL:
    """The library that `find` has found, "" for none. Raises NotInstalled."""
    if not path:
        raise NotInstalled("NVRTC, NVIDIA's compiler for CUDA C++, is not installed")
    try:
        for builtins in Path(path).parent.glob(
            "libnvrtc-builtins*so*"
        ):  # which not every build looks for beside itself
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(path)
    except OSError as error:
        raise NotInstalled(f"NVRTC, NVIDIA's compiler for CUDA C++, cannot be loaded: {error}") from None


def to_ptx(text: str, path: str = "") -> str:
    """The PTX of a text. `path` as for `load`; without it the library is looked for. Raises CompileError, NotInstalled."""
    library = load(path or str(find() or ""))
    program = ctypes.c_void_p()
    _done(library, library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), NAME.encode(), 0, None, None))
    try:
        options = (ctypes.c_char_p * len(_OPTIONS))(*map(str.encode, _OPTIONS))
        if library.nvrtcCompileProgram(program, len(options), options):
            raise _first_error(_text(library, program, "ProgramLog"))
        return _text(library, program, "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _done(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _done(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode(errors="replace")


def _done(library: ctypes.CDLL, code: int) -> None:
    if code:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(library.nvrtcGetErrorString(code).decode())


def _first_error(log: str) -> CompileError:
    """kernel.cu(7): error: expected a ";" """
    found = re.search(rf"^{re.escape(NAME)}\((\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (.*)", log, re.MULTILINE)
    return CompileError(found[2], int(found[1])) if found else CompileError(log.strip().partition("\n")[0])
