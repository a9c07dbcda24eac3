"""Where in the user's code something happens: tracebacks without Triton's frames and the simulator's."""

import os
import sys
import sysconfig
from types import CodeType, TracebackType

import triton
from triton.runtime.errors import InterpreterError

from gpukit.simulator.interpreter.faults import Fault

_OURS = (os.path.dirname(os.path.abspath(triton.__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LIBRARIES = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_internal: dict[str, bool] = {}


def _is_internal(filename: str) -> bool:
    known = _internal.get(filename)
    if known is None:
        known = _internal[filename] = filename.startswith(_OURS)
    return known


def where() -> tuple[str, int]:
    """File and line of the running access: the innermost frame that is neither Triton's nor the simulator's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def calls(outermost: CodeType) -> list[tuple[CodeType, int]]:
    """Which instructions of the user's functions led to the running access, innermost first, below the frame that runs
    `outermost`: two loads on one line are told apart, and those that one function makes for two callers."""
    frame, found = sys._getframe(1), []
    while frame is not None and frame.f_code is not outermost:
        if not _is_internal(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def line_in_kernel() -> int:
    """The line of the kernel itself, or of the function of a group of warps, from which the running access is made."""
    frame, line = sys._getframe(1), 0
    while frame is not None and (not _is_internal(frame.f_code.co_filename) or not line):
        if not _is_internal(frame.f_code.co_filename):
            line = frame.f_lineno
        frame = frame.f_back
        # A helper in Gluon is called by way of the interpreter, which calls it by way of the executor.
        while frame is not None and frame.f_code.co_name in ("__call__", "call", "wrapper"):
            frame = frame.f_back
    return line


def user_frames(frames):
    """A traceback of (frame, last instruction, line) triples, outermost first, without Triton's frames and ours."""
    trace = None
    for frame, instruction, line in reversed([f for f in frames if not _is_internal(f[0].f_code.co_filename)]):
        trace = TracebackType(trace, frame, instruction, line)
    return trace


def frames_of(trace):
    while trace is not None:
        yield trace.tb_frame, trace.tb_lasti, trace.tb_lineno
        trace = trace.tb_next


def frames_inside(outermost: CodeType):
    """The running frames below the one that runs `outermost`, as `user_frames` takes them."""
    frames = []
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        frames.append((frame, frame.f_lasti, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def original(exc: BaseException) -> tuple[BaseException, str | None, int | None]:
    """The exception behind Triton's InterpreterErrors, and the file and line of user code that it came from."""
    while isinstance(exc, InterpreterError) and exc.__cause__ is not None:
        exc = exc.__cause__
    if isinstance(exc, Fault):
        return exc, exc.file, exc.line
    if isinstance(exc, SyntaxError) and exc.filename:
        return exc, exc.filename, exc.lineno
    file = line = None
    for frame, _, number in frames_of(exc.__traceback__):
        filename = frame.f_code.co_filename
        if not (_is_internal(filename) or filename.startswith(_LIBRARIES)):
            file, line = filename, number
    return exc, file, line
