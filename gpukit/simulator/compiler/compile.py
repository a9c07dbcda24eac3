"""What Triton makes of a kernel: `gpukit.compile(kernel, x, y, n, BLOCK=1024, gpu="h100")` on any machine.

The wheel of Triton carries the whole toolchain, ptxas and nvdisasm included, so machine code for any GPU can be read
where there is none. Triton reads TRITON_INTERPRET when it is imported, hence the compiler runs in a process of its own
(worker.py); what it returns is kept on disk and costs nothing the second time.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import dataclasses
import gzip
import hashlib
import html
import inspect
import json
import linecache
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from collections.abc import Callable
from concurrent import futures
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import IO, Any

from gpukit import hardware, tables
from gpukit.simulator.compiler import assembly, banks, layouts
from gpukit.simulator.compiler.occupancy import Occupancy, occupancy

STRINGS_FOR_ANNOTATIONS = annotations.compiler_flag  # of a file that imports annotations from __future__, as this one
OLDEST = (7, 5)  # Triton's own minimum is older, but nothing older is tested by anybody
OLDEST_TRITON = (3, 6)
TIMEOUT_S = 300
_FORMAT = 3  # of what the worker returns: counts up when that changes, so that no old file is read


class CompileError(Exception):
    """Triton or ptxas refused the kernel. `str()` is their own message, after the line it is about.

    kernel, gpu   the kernel's name and the GPU's
    file, line    where in the learner's code, or None
    message       Triton's message without the excerpt of the source
    details       everything they said, for a bug report
    """

    def __init__(self, kernel: str, gpu: str, message: str, at: tuple[str, int] | None = None, details: str = ""):
        self.kernel, self.gpu, self.message, self.details = kernel, gpu, message, details
        self.file, self.line = at or (None, None)
        place = "" if at is None else f", {_file(self.file)}line {self.line}"
        self.source_line = _source_line(self.file, self.line)
        excerpt = f"\n    {self.source_line.strip()}" if self.source_line else ""
        super().__init__(f"{kernel} does not compile for {gpu}{place}:{excerpt}\n{message}")


def _file(file: str) -> str:
    path = Path(file)
    in_a_cell = file.startswith("<") or path.parent.name.startswith("ipykernel_")
    return "" if in_a_cell else f"{path.name} "


def plain(message: str) -> str:
    """The text of an exception, also of one that Triton passed on as its repr: AssertionError('why')."""
    if message.startswith("'NoneType' object has no attribute"):
        return "something here is None: the launch was given None where the kernel wants a tensor or a number"
    inner = re.fullmatch(r"[A-Z]\w+\((['\"].*['\"]),?\)", message, re.DOTALL)
    try:
        return str(ast.literal_eval(inner[1])) if inner else message
    except (ValueError, SyntaxError):
        return message


def _source_line(file: str | None, line: int | None) -> str:
    return "" if file is None else linecache.getline(file, line).rstrip()


# ---- the compiled kernel ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one GPU and one set of argument types.

    ttir, ttgir, llir, ptx, sass   the five stages as text; `sass` is what nvdisasm prints
    num_warps, num_stages          what it was compiled with (warp specialisation may have raised num_warps)
    registers                      32-bit registers of each thread
    spills, spill_stores, spill_loads   bytes of each thread that did not fit in registers; stores and loads of them
    stack_bytes                    local memory of each thread, the spills included
    shared_bytes                   shared memory of each program
    """

    kernel: str
    file: str = dataclasses.field(repr=False)  # a whole path: it would differ from machine to machine in a notebook
    line: int
    gpu: hardware.Gpu
    options: dict[str, Any]
    num_warps: int
    num_stages: int
    num_ctas: int
    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    shared_bytes: int
    functions: tuple[tuple[str, str, int], ...] = dataclasses.field(
        repr=False
    )  # (file, source, first line), kernel first
    ttir: str = dataclasses.field(repr=False)
    ttgir: str = dataclasses.field(repr=False)
    llir: str = dataclasses.field(repr=False)
    ptx: str = dataclasses.field(repr=False)
    sass: str = dataclasses.field(repr=False)

    @property
    def spills(self) -> int:
        return max(self.spill_stores, self.spill_loads)

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    @cached_property
    def occupancy(self) -> Occupancy:
        """How many programs fit on one SM at a time, and which resource says so."""
        return occupancy(self.gpu, self.num_warps, self.registers, self.shared_bytes)

    @cached_property
    def instructions(self) -> list[assembly.Instruction]:
        """The machine code, one entry per SASS instruction, in order."""
        return assembly.sass(self.sass)

    @cached_property
    def ptx_instructions(self) -> list[assembly.Instruction]:
        return assembly.ptx(self.ptx)

    @cached_property
    def accesses(self) -> list[assembly.MemoryAccess]:
        """The PTX instructions on global memory, those of one line and width counted together."""
        own = self._access_lines
        accesses = assembly.memory_accesses(self.ptx_instructions)
        return [dataclasses.replace(a, line=own.get((a.kind, a.file, a.line), a.line)) for a in accesses]

    @cached_property
    def _access_lines(self) -> dict[tuple[str, str, int], int]:
        """(kind, file, line) of a call of several lines -> its first line, which a trace names it by. The compiler names it by
        that of an argument."""
        found = {}
        for file, source, first in self.functions:
            for node in ast.walk(ast.parse(source)):  # outer calls come before inner ones
                if isinstance(node, ast.Call) and (kind := _access_kind(node.func)):
                    for line in range(node.lineno, node.end_lineno + 1):
                        found[kind, file, first + line - 1] = first + node.func.end_lineno - 1
        return found

    @property
    def loads(self) -> list[assembly.MemoryAccess]:
        return [a for a in self.accesses if a.kind == "load"]

    @property
    def stores(self) -> list[assembly.MemoryAccess]:
        return [a for a in self.accesses if a.kind == "store"]

    @property
    def atomics(self) -> list[assembly.MemoryAccess]:
        return [a for a in self.accesses if a.kind == "atomic"]

    @cached_property
    def tensor_core(self) -> list[assembly.TensorCoreUse]:
        """The PTX instructions for the tensor cores; empty where tl.dot became ordinary multiply-adds."""
        return assembly.tensor_core_uses(self.ptx_instructions)

    @cached_property
    def shared_turns(self) -> dict[tuple[str, int, tuple], tuple[float, float]]:
        """Of the instructions on shared memory, by kind, width and source line: turns that one of a warp takes, and those
        without bank conflicts (banks.turns)."""
        return banks.turns(self.ptx_instructions, self.threads)

    @cached_property
    def layouts(self) -> list[layouts.AccessLayout]:
        """For each load, store and atomic of a block: which thread holds which elements."""
        own = self._access_lines
        found = layouts.access_layouts(self.ttgir)
        return [dataclasses.replace(a, line=own.get((a.kind, a.file, a.line), a.line)) for a in found]

    def layout(self, line: int, kind: str) -> layouts.AccessLayout | None:
        """The layout of the `kind` ("load", "store", "atomic") on a source line, None if there is none."""
        return next((a for a in self.layouts if (a.line, a.kind) == (line, kind)), None)

    @property
    def source(self) -> dict[int, str]:
        """The kernel and what it calls in its own file: line -> text."""
        return {
            line + i: text
            for file, source, line in self.functions
            if file == self.file
            for i, text in enumerate(source.splitlines())
        }

    @cached_property
    def lines(self) -> dict[int, assembly.Line]:
        """For each source line of the kernel: the PTX and the SASS instructions that came from it."""
        return assembly.by_line(self.file, self.ptx_instructions, self.instructions)

    def report(self) -> str:
        """The facts as a short text."""
        return "\n".join(tables.facts(self._facts()))

    def _facts(self) -> list[tuple[str, str]]:
        o = self.occupancy
        warps = f"{self.num_warps} warp{'s' * (self.num_warps != 1)}"
        facts = [("kernel", f"{self.kernel} for {self.gpu.name}, {warps}, num_stages {self.num_stages}")]
        spilled = f"; {self.spills} bytes per thread spilled" if self.spills else ", no spills"
        facts.append(("registers", f"{self.registers} per thread{spilled}"))
        facts.append(("shared memory", f"{self.shared_bytes:,} bytes per program"))
        facts.append(("occupancy", str(o)))
        for title, rows in (("loads", self.loads), ("stores", self.stores), ("atomics", self.atomics)):
            if rows or title != "atomics":
                facts.append((title, "; ".join(map(str, rows)) or "none"))
        facts.append(("tensor cores", "; ".join(map(str, self.tensor_core)) or "not used"))
        return facts

    def __str__(self) -> str:
        return self.report()

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left">{html.escape(title)}</th><td style="text-align:left">'
            f"{html.escape(text)}</td></tr>"
            for title, text in self._facts()
        )
        return f"<table>{rows}</table>"


def _access_kind(called: ast.expr) -> str | None:
    """What a call does by its name: "load", "store" or "atomic"."""
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name if name in ("load", "store") else "atomic" if name.startswith("atomic_") else None


def compile(kernel: Any, *args: Any, gpu: str | hardware.Gpu = "h100", **kwargs: Any) -> Compiled:
    """Compile `kernel` as the launch `kernel[grid](*args, **kwargs)` would, for any GPU, on any machine.

        gpukit.compile(softmax_kernel, x, y, 4096, BLOCK=4096, num_warps=8, gpu="a100")
        gpukit.compile(t.launches[0], gpu="t4")            # the launch that a trace recorded

    args, kwargs  what the launch passes: tensors (only dtype and alignment count, so torch.empty(..., device="meta")
                  serves for any size), tensor descriptors, numbers, constexprs, num_warps, num_stages, maxnreg
    gpu           a name that hardware.gpu() knows, or a Gpu

    Types are specialised as by Triton's launcher: pointers and integers that 16 divides, integers equal to 1, None. An
    autotuned kernel is compiled with its first config, the one the interpreter runs; keywords given here go before it.

    Raises CompileError with Triton's own message, ValueError for an unknown GPU or one older than Turing, TypeError for
    arguments that the kernel does not take, RuntimeError where Triton is missing or too old.
    """
    target = gpu if isinstance(gpu, hardware.Gpu) else hardware.gpu(gpu)
    if target.compute_capability < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ValueError(f"gpu must have compute capability {oldest} (Turing) or later, {target.name} is older")
    triton_version = _triton_version()
    if hasattr(kernel, "grid") and hasattr(kernel, "function"):  # a traced launch
        if args or kwargs:
            raise TypeError("compile(launch) takes the launch's own arguments, so pass nothing but gpu")
        kernel, kwargs = kernel.function, {**kernel.arguments, **kernel.options}
    job = _job(kernel, args, kwargs) | {"capability": capability(target)}
    key = _key(job, triton_version)
    begun = _begun.pop(key, None)
    answer = _answer(key, lambda: begun.result() if begun else _ask_worker(job, target))
    if "error" in answer:
        error = answer["error"]
        if error["kind"] == "KeyError":  # an option that Triton does not know
            raise TypeError(f"{job['name']}: {error['message'].strip(chr(39))}")
        raise CompileError(job["name"], target.name, plain(error["message"]), error["at"], error["details"])
    return _compiled(job, target, answer)


def packed(launch, called: str = "") -> str:
    """A traced launch as text: all that the compiler needs of it, without its tensors (worker.py, `accepts`).

    called  what the learner's file is called there, so that the same kernel in another folder is the same text
    """
    job = _job(launch.function, (), {**launch.arguments, **launch.options})
    text = json.dumps(job, sort_keys=True)
    return text.replace(json.dumps(path(launch.file))[1:-1], called) if called else text


def answered(job: dict, ask: Callable[[], dict]) -> dict:
    """What `ask` answers to a job: asked once, then read from the disk."""
    return _answer(_key(job, _triton_version()), ask)


def _answer(key: str, ask: Callable[[], dict]) -> dict:
    answer = _recall(key)
    if answer is None:
        answer = ask()
        _remember(key, answer)
    return answer


_begun: dict[str, futures.Future] = {}
_background = futures.ThreadPoolExecutor(1)


def begin(launch, gpu: hardware.Gpu) -> None:
    """Start compiling a launch while the interpreter runs it: `compile` then has less to wait for. What is wrong with it,
    `compile` says."""
    with contextlib.suppress(Exception):
        job = _job(launch.function, (), {**launch.arguments, **launch.options}) | {"capability": capability(gpu)}
        key = _key(job, _triton_version())
        if key not in _begun and _recall(key) is None:
            _begun[key] = _background.submit(_ask_worker, job, gpu)


def _key(job: dict, triton_version: str) -> str:
    versions = {"format": _FORMAT, "triton": triton_version, "flags": _flags()}
    text = json.dumps([versions, job], sort_keys=True)
    return hashlib.sha256(_CELLS.sub("ipykernel", text).encode()).hexdigest()


def _compiled(job: dict, gpu: hardware.Gpu, answer: dict) -> Compiled:
    kernel = job["functions"][job["kernel"]]
    metadata = answer["metadata"]
    facts = assembly.ptxas_log(answer["ptxas"])
    functions = tuple((f["file"], f["source"], f["line"]) for f in job["functions"].values())
    return Compiled(
        kernel=job["name"], file=kernel["file"], line=kernel["line"], gpu=gpu, options=job["options"],
        num_warps=metadata["num_warps"], num_stages=metadata["num_stages"], num_ctas=metadata["num_ctas"],
        shared_bytes=metadata["shared"], functions=functions, **facts,
        **{stage: answer[stage] for stage in ("ttir", "ttgir", "llir", "ptx", "sass")},
    )  # fmt: skip


def _triton_version() -> str:
    try:
        import triton
    except ModuleNotFoundError:
        raise RuntimeError(
            "gpukit.compile needs Triton, which has Linux wheels only: on macOS and Windows use a Linux container or WSL"
        ) from None
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        raise RuntimeError(f"gpukit.compile needs Triton {oldest} or later, got {triton.__version__}")
    return triton.__version__


def _flags() -> dict[str, str]:
    """The environment variables that change what Triton makes; not those that only say where or how much it prints."""
    names = (
        "TRITON_DEFAULT_FP_FUSION",
        "TRITON_F32_DEFAULT",
        "DISABLE_PTXAS_OPT",
        "PTXAS_OPTIONS",
        "TRITON_PTXAS_PATH",
    )
    return {name: os.environ[name] for name in names if name in os.environ}


# ---- the worker ---------------------------------------------------------------------------------------------------


def _ask_worker(job: dict, gpu: hardware.Gpu) -> dict:
    with tempfile.TemporaryDirectory(prefix="gpukit-compile-") as scratch:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DUMP_PTXAS_LOG": "1"}
        environment["TRITON_CACHE_DIR"] = scratch  # what Triton would keep, we keep
        told = {"job": job, "environment": environment, "path": _import_path(), "folder": os.getcwd()}
        try:
            said, complaints = _worker.ask(json.dumps(told), TIMEOUT_S)
        except TimeoutError:
            message = f"still not compiled after {TIMEOUT_S} s: smaller blocks make less code"
            raise CompileError(job["name"], gpu.name, message) from None
    try:
        answer = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        message = "the compiler process ended without an answer"
        raise CompileError(job["name"], gpu.name, message, None, complaints) from None
    if "error" in answer:
        error = answer["error"]
        # MLIR's passes print what they found wrong and raise only that they failed
        diagnosis = [line.split("error: ", 1)[1] for line in complaints.splitlines() if "error: " in line]
        if error["kind"] not in ("CompilationError", "TypeError") and diagnosis:
            error["message"] = "\n".join(dict.fromkeys(diagnosis))
        error["details"] = complaints + error.pop("trace")
    return answer


def _import_path() -> list[str]:
    return [entry or os.getcwd() for entry in sys.path]


class _Worker:
    """The process that has Triton's compiler loaded and forks one for each job (worker.py, `serve`): importing Triton takes longer
    than compiling most kernels. It begins with the first job, ends with this process or when it has been idle for a minute,
    and is started again when it is needed. Threads may ask at the same time."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def ask(self, told: str, seconds: float) -> tuple[str, str]:
        """What a job's process prints, and what it complains about on stderr. Raises TimeoutError after `seconds`."""
        why = ""
        for _ in range(2):  # it may end just now, since it was idle
            with tempfile.TemporaryFile("w+", encoding="utf-8") as file, tempfile.TemporaryFile() as stderr:
                file.write(told)
                file.seek(0)
                read_end, write_end = os.pipe()
                with os.fdopen(read_end, "rb", buffering=0) as stdout:
                    try:
                        asked = self._send([file.fileno(), write_end, stderr.fileno()])
                    finally:
                        os.close(write_end)
                    said = _all_of(stdout, seconds)
                stderr.seek(0)
                complaints = stderr.read().decode(errors="replace")
            pid, _, answer = said.partition(b"\n")
            if pid:
                return answer.decode(), complaints
            with self._lock:
                if self._process is asked:
                    why = self.end()
        return "", why

    def _send(self, descriptors: list[int]) -> subprocess.Popen:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            with contextlib.suppress(OSError):  # it ended: nobody will answer
                socket.send_fds(self._control, [b"J"], descriptors)
            return self._process

    def _start(self) -> None:
        self.end()
        self._control, theirs = socket.socketpair()
        self._complaints = tempfile.TemporaryFile()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_import_path()), "TRITON_INTERPRET": "0"}
        code = f"from gpukit.simulator.compiler.worker import serve; serve({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-X", "utf8", "-c", code],
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._complaints,
                start_new_session=True,  # Ctrl-C in a terminal ends what waits for it
            )

    def end(self) -> str:
        """What it said on its own stderr, which is why it did not start if it did not."""
        if self._process is None:
            return ""
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        with self._complaints as file:
            file.seek(0)
            return file.read().decode(errors="replace")


def _all_of(stdout: IO[bytes], seconds: float) -> bytes:
    """What a job's process says until it ends. Its first line is its number: if it takes too long, or nobody waits any more, it
    is killed with what it has started."""
    said, end = b"", time.monotonic() + seconds
    try:
        while select.select([stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            part = stdout.read(1 << 16)
            if not part:
                return said
            said += part
        raise TimeoutError
    except BaseException:
        pid = said.partition(b"\n")[0]
        if pid:
            with contextlib.suppress(OSError):
                os.killpg(int(pid), signal.SIGKILL)
        raise


_worker = _Worker()
atexit.register(_worker.end)


def _cache_folder() -> Path:
    base = os.environ.get("GPUKIT_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpukit")
    return Path(base) / "compile"


# The folder of a notebook's cells is called after its process; the same cell in another one need not be compiled again.
_CELLS = re.compile(r"\bipykernel_\d+\b")
_recent: dict[str, dict] = {}  # so that what is asked again and again need not be unpacked again and again


def _recall(key: str) -> dict | None:
    if key not in _recent:
        try:
            text = gzip.decompress((_cache_folder() / f"{key}.json.gz").read_bytes()).decode()
            _keep(key, json.loads(_CELLS.sub(f"ipykernel_{os.getpid()}", text)))
        except (OSError, ValueError, EOFError):  # none, or one that was cut short
            return None
    return _recent[key]


def _keep(key: str, answer: dict) -> None:
    if len(_recent) >= 64:
        del _recent[next(iter(_recent))]
    _recent[key] = answer


def _remember(key: str, answer: dict) -> None:
    _keep(key, answer)
    folder = _cache_folder()
    with contextlib.suppress(OSError):  # a disk that is full or read-only costs time and nothing else
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(gzip.compress(json.dumps(answer).encode(), compresslevel=1))
        os.replace(file.name, folder / f"{key}.json.gz")


# ---- the job: a launch as plain data ------------------------------------------------------------------------------


def capability(gpu: hardware.Gpu) -> int:
    """Its compute capability as Triton writes it: 90 for 9.0."""
    major, minor = gpu.compute_capability
    return 10 * major + minor


def _job(kernel, args, kwargs) -> dict:
    kwargs = dict(kwargs)
    function, kwargs = _unwrap(kernel, args, kwargs)
    fn = function.fn
    signature = inspect.signature(fn)
    named = {name: value for name, value in kwargs.items() if name in signature.parameters}
    options = {name: value for name, value in kwargs.items() if name not in signature.parameters}
    options.pop("grid", None)
    try:
        signature.bind(*args, **named)
    except TypeError as exc:
        raise TypeError(f"{fn.__name__}: {exc}; it takes {signature}") from None
    for name, value in options.items():
        if not isinstance(value, (bool, int, str, type(None))):
            raise TypeError(f"{fn.__name__}: no parameter is called {name!r}; it takes {signature}")
    packer = Packer()
    parameters = list(signature.parameters.values())
    return {
        "name": fn.__name__,
        "kernel": packer.function(function),
        "args": [packer.argument(fn, parameters[min(i, len(parameters) - 1)], value) for i, value in enumerate(args)],
        "kwargs": {name: packer.argument(fn, signature.parameters[name], value) for name, value in named.items()},
        "options": options,
        "functions": packer.functions,
        "files": packer.files,
    }


def _unwrap(kernel, args, kwargs):
    """The @triton.jit function inside @triton.autotune and @triton.heuristics, and the keywords that those add."""
    seen = kernel
    while True:
        if hasattr(seen, "configs"):  # the first config, as in the interpreter
            kwargs = {**seen.configs[0].all_kwargs(), **kwargs}
        elif hasattr(seen, "values") and hasattr(seen, "arg_names"):
            for name, heuristic in seen.values.items():
                kwargs[name] = heuristic({**dict(zip(seen.arg_names, args, strict=False)), **kwargs})
        elif isinstance(getattr(seen, "fn", None), types.FunctionType):
            return seen, kwargs
        if not hasattr(seen, "fn"):
            raise TypeError(f"kernel must be a @triton.jit function or a traced launch, got {kernel!r}")
        seen = seen.fn


JIT_OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "noinline")


def _alike(value):
    """A number that Triton specialises on as on this one, the same for all of its kind: one compilation serves them."""
    if isinstance(value, (tuple, list)):
        items = [_alike(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, float):
        return 0.5
    if isinstance(value, (bool, str)) or hasattr(value, "untyped_storage") or not hasattr(value, "__index__"):
        return value
    value = int(value)
    kind = next((bits for bits in (31, 63) if -(1 << bits) <= value < 1 << bits), 64)
    smallest = {31: 0, 63: 1 << 32, 64: 1 << 63}[kind]
    return value if value == 1 else smallest + (16 if value % 16 == 0 else 3)


class Packer:
    """Values as JSON, and the functions they need with the source and the globals of each."""

    def __init__(self):
        self.functions: dict[str, dict] = {}
        self.files: dict[str, dict[str, str]] = {}  # the lines that belong to the functions
        self._keys: dict[int, str] = {}

    def argument(self, fn, parameter: inspect.Parameter, value):
        packed = self.value(value if "constexpr" in str(parameter.annotation) else _alike(value))
        if packed is None:
            raise TypeError(
                f"{fn.__name__}: {parameter.name} must be a tensor, a tensor descriptor, a number or a constexpr, got {value!r}"
            )
        return packed

    def value(self, value):
        """`value` as [tag, ...], or None if it cannot be carried over."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return ["value", value]
        if isinstance(value, type) and hasattr(
            value, "untyped_storage"
        ):  # Tensor, as an annotation: no compiler needs it
            return ["import", "builtins", "object"]
        if hasattr(value, "untyped_storage"):
            # A GPU's allocations begin on 256 bytes, so a view's offset decides, here as there.
            aligned = value.storage_offset() * value.element_size() % 16 == 0
            return ["tensor", str(value.dtype).split(".")[-1], value.element_size(), aligned]
        if hasattr(value, "block_shape") and hasattr(value, "base"):
            sizes = [list(map(int, sizes)) for sizes in (value.shape, value.strides, value.block_shape)]
            return ["descriptor", self.value(value.base), *sizes, getattr(value, "padding", "zero")]
        if isinstance(value, (tuple, list)):
            items = [self.value(item) for item in value]
            return None if None in items else ["tuple", items, list(getattr(value, "_fields", ()))]
        if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            return ["namedtuple", value.__name__, list(value._fields)]
        if isinstance(value, types.ModuleType):
            return ["import", value.__name__, ""]
        return self._triton_value(value)

    def _triton_value(self, value):
        import triton.language as tl

        if isinstance(value, tl.constexpr):
            inner = self.value(value.value)
            return None if inner is None else ["constexpr", inner]
        if isinstance(value, tl.dtype):
            return ["dtype", value.name] if type(value) is tl.dtype else None
        if hasattr(type(value), "__index__"):  # an integer of NumPy
            return ["value", int(value)]
        inner = getattr(value, "fn", None)
        if isinstance(inner, types.FunctionType) and not inner.__module__.startswith("triton."):
            return ["function", self.function(value)]
        named = inner if isinstance(inner, types.FunctionType) else value
        module, path = getattr(named, "__module__", None), getattr(named, "__qualname__", None)
        if module is None or path is None or "<" in path or not module.startswith(("triton", "math", "builtins")):
            return None
        return ["import", module, path]

    def function(self, wrapped) -> str:
        """Pack a @triton.jit or constexpr function with everything it uses; its key in `functions`."""
        fn = wrapped.fn
        if id(fn) in self._keys:
            return self._keys[id(fn)]
        key = self._keys[id(fn)] = f"{fn.__name__}#{len(self._keys)}"
        source, line, names = _source(fn)
        file = path(fn.__code__.co_filename)
        lines = self.files.setdefault(file, {})
        lines.update({str(line + i): text for i, text in enumerate(source.splitlines(keepends=True))})
        scope = {**fn.__globals__, **inspect.getclosurevars(fn).nonlocals}
        annotations = fn.__globals__.get("__annotations__", {})
        used = sorted((names - set(fn.__code__.co_varnames)) & scope.keys())
        record = self.functions[key] = {
            "name": fn.__name__,
            "module": fn.__module__,
            "file": file,
            "line": line,
            "source": source,
            "flags": fn.__code__.co_flags & STRINGS_FOR_ANNOTATIONS,
            "kind": "constexpr_function" if type(wrapped).__name__ == "ConstexprFunction" else "jit",
            "options": self._options(wrapped),
            "constexpr_globals": [name for name in used if "constexpr" in str(annotations.get(name, ""))],
            "globals": {},
        }
        record["globals"] = {name: self.value(scope[name]) or ["gpukit.missing"] for name in used}
        return key

    def _options(self, wrapped) -> dict:
        wrapped = getattr(wrapped, "compiled", wrapped)  # of the function that a trace interprets beside a GPU
        given = getattr(wrapped, "kwargs", None) or vars(wrapped)  # the interpreter's own keeps them in `kwargs`
        return {name: given[name] for name in JIT_OPTIONS if given.get(name)}


def sources(kernel) -> list[tuple[str, str, int]]:
    """A @triton.jit function and those that it calls: (file, source, first line) of each."""
    packer = Packer()
    packer.function(kernel)
    return [(f["file"], f["source"], f["line"]) for f in packer.functions.values()]


@cache
def path(code_file: str) -> str:
    """The file of a code object as the compiler names it; that of a notebook cell is no path."""
    return code_file if code_file.startswith("<") else os.path.abspath(code_file)


@lru_cache(512)  # each launch is packed, and most are of a function that was packed before
def _source(fn) -> tuple[str, int, frozenset[str]]:
    """The function from its `def` on, not indented, the line that is on, and the names that it reads or assigns."""
    try:
        block, first = inspect.getsourcelines(fn)
    except OSError:
        raise TypeError(
            f"{fn.__name__}: its source cannot be read, so it cannot be compiled; define it in a file or a notebook cell"
        ) from None
    text = textwrap.dedent("".join(block))
    (node,) = ast.parse(text).body
    source = "".join(text.splitlines(keepends=True)[node.lineno - 1 :])
    names = frozenset(each.id for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Name))  # no decorator's
    return source, first + node.lineno - 1, names
