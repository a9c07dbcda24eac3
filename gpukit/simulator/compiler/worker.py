"""The other half of compile.py: a process that compiles one kernel for one target and prints what came out, as JSON. It is
forked from one that has imported Triton.

It runs without TRITON_INTERPRET, which changes Triton at import, and with a driver that only knows the target, so that
it works where there is no GPU and aims at any GPU where there is one. It imports neither torch, which takes longer than
most kernels, nor the learner's file: the job holds the source of each function the kernel needs and the globals they
use, which is as true for a notebook cell as for a file.
"""

import collections
import contextlib
import gc
import importlib
import io
import json
import linecache
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
import warnings

MISSING = "gpukit.missing"  # tag of a global that cannot be carried over: the kernel meets a NameError if it uses it


class _Dtype:
    """What Triton asks a PyTorch dtype for."""

    def __init__(self, name: str, itemsize: int):
        self.name, self.itemsize, self.is_floating_point = name, itemsize, "float" in name

    def __str__(self) -> str:
        return f"torch.{self.name}"

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other) -> bool:
        return isinstance(other, _Dtype) and self.name == other.name


class _Tensor:
    """What Triton asks a PyTorch tensor for when it specialises an argument: a dtype, and whether 16 divides the
    address."""

    def __init__(self, dtype: _Dtype, aligned: bool):
        self.dtype, self._address = dtype, 0 if aligned else 1

    def data_ptr(self) -> int:
        return self._address


def _without_torch() -> None:
    """Triton asks torch what a tensor is when it looks at its first argument, and would import it for that: one to two
    seconds. Until a kernel names torch, an empty module with that one class answers."""
    stand_in = types.ModuleType("torch")
    stand_in.Tensor = type("Tensor", (), {})
    sys.modules.setdefault("torch", stand_in)


def _with_torch() -> None:
    """The real one is imported next time."""
    if getattr(sys.modules.get("torch"), "__spec__", None) is None:
        sys.modules.pop("torch", None)


def _without_key() -> None:
    """Triton reads its own library, half a gigabyte, for the key of its cache: a third of a second in each process. Here that
    cache is an empty folder each time; gpukit's own, in compile.py, has Triton's version in its key."""
    import triton

    triton.runtime.cache.triton_key = lambda: triton.__version__


class _Target:
    """A driver that has a target and no device."""

    def __init__(self, capability: int):
        self._capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device=None) -> int:
        return 0


class Job:
    """The functions and arguments of a packed launch. `builtins`: those that the functions have, if not all of Python's."""

    def __init__(self, job: dict, builtins: dict | None = None):
        self.job = job
        self.always = {"__builtins__": builtins} if builtins else {}
        self.functions: dict[str, object] = {}

    def value(self, packed):
        """The object that `compile.Packer` packed."""
        import triton.language as tl

        tag, *rest = packed
        if tag == "value":
            return rest[0]
        if tag == "tensor":
            name, itemsize, aligned = rest
            return _Tensor(_Dtype(name, itemsize), aligned)
        if tag == "descriptor":
            from triton.tools.tensor_descriptor import TensorDescriptor

            base, shape, strides, block_shape, padding = rest
            return TensorDescriptor(self.value(base), shape, strides, block_shape, padding)
        if tag == "tuple":
            items, fields = rest
            values = tuple(self.value(item) for item in items)
            return collections.namedtuple("Fields", fields)(*values) if fields else values
        if tag == "namedtuple":
            return collections.namedtuple(*rest)
        if tag == "constexpr":
            return tl.constexpr(self.value(rest[0]))
        if tag == "dtype":
            return tl.dtype(rest[0])
        if tag == "function":
            return self.functions[rest[0]]
        module, path = rest  # "import"
        if module.partition(".")[0] == "torch":
            _with_torch()
        found = importlib.import_module(module)
        for part in path.split(".") if path else ():
            found = getattr(found, part)
        return found

    def define(self) -> None:
        """All functions of the job, each at its own line of its own file, so that Triton's line numbers are true."""
        import triton

        for name, lines in self.job["files"].items():
            text = [lines.get(str(n), "\n") for n in range(1, max(map(int, lines)) + 1)]
            linecache.cache[name] = (sum(map(len, text)), None, text, name)  # None: never look whether it changed
        scopes = {}
        for key, function in self.job["functions"].items():
            scope = scopes[key] = {"__name__": function["module"], "__annotations__": {}, **self.always}
            # What annotations and defaults need has to be there when the function is made.
            for name, packed in function["globals"].items():
                if packed[0] not in ("function", MISSING):
                    with contextlib.suppress(ImportError, AttributeError):
                        scope[name] = self.value(packed)
            if function["constexpr_globals"]:
                import triton.language as tl

                scope["__annotations__"] = dict.fromkeys(function["constexpr_globals"], tl.constexpr)
            source = "\n" * (function["line"] - 1) + function["source"]
            exec(compile(source, function["file"], "exec", flags=function["flags"], dont_inherit=True), scope)
            made = scope[function["name"]]
            if function["kind"] == "jit":
                made = triton.jit(made, **function["options"])
            elif function["kind"] == "constexpr_function":
                made = triton.constexpr_function(made)
            self.functions[key] = scope[function["name"]] = made
        for key, function in self.job["functions"].items():
            for name, packed in function["globals"].items():
                if packed[0] == "function":
                    scopes[key][name] = self.functions[packed[1]]

    def compile(self):
        kernel = self.functions[self.job["kernel"]]
        args = [self.value(packed) for packed in self.job["args"]]
        kwargs = {name: self.value(packed) for name, packed in self.job["kwargs"].items()}
        return kernel.run(*args, grid=(1,), warmup=True, **kwargs, **self.job["options"])


def _true_lines(*args):
    """A stage hook of Triton's. Since 3.9 the instructions inside a piece of inline assembly (each load and store is one)
    are said to come from the source lines below it: without those marks they keep the line of the load or store."""
    if not args:  # asked what to add to the key of Triton's own cache
        return "gpukit", "gpukit"
    stages = args[1]
    make = stages["ptx"]

    def ptx(source, metadata):
        kept, inside = [], False
        for line in make(source, metadata).split("\n"):
            inside = (inside or "// begin inline asm" in line) and "// end inline asm" not in line
            if not (inside and line.lstrip().startswith(".loc")):
                kept.append(line)
        return "\n".join(kept)

    stages["ptx"] = ptx


_ENCODED = re.compile(r";\s*/\* 0x[0-9a-f]{16} \*/\n\s*/\* 0x([0-9a-f]{16}) \*/")


def _disassemble(cubin: bytes) -> str:
    """SASS with source lines. Of the encoding only the scheduler's part is kept, as a comment (`_scheduled`)."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # -gi: source lines, with the calls through which a line of tl.max or of a helper came in
        options = ["--print-code", "--print-line-info-inline", "--print-instruction-encoding"]
        command = [knobs.nvidia.nvdisasm.path, *options, file.name]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return _ENCODED.sub(lambda m: f"; /* {_scheduled(int(m[1], 16))} */", listing)


def _scheduled(upper: int) -> str:
    """What the upper half of an instruction's 128 bits says to the scheduler, on Volta and later: the cycles that the warp
    pauses after it; of six counters the one that is taken back when its result is there, and the one when its operands have
    been read (7 for none of them); and those for which it waits, a bit each. https://arxiv.org/abs/1804.06826,
    triton/tools/disasm.py"""
    sets, reads = upper >> 46 & 7, upper >> 49 & 7
    waits = " ".join(str(n) for n in range(6) if upper >> 52 + n & 1)
    said = (
        f"stall {upper >> 41 & 15}",
        f"sets {sets}" * (sets < 7),
        f"reads {reads}" * (reads < 7),
        f"waits {waits}" * bool(waits),
    )
    return ", ".join(filter(None, said))


def _run(job: dict) -> dict:
    import triton

    _without_torch()
    triton.runtime.driver.set_active(_Target(job["capability"]))
    triton.knobs.runtime.add_stages_inspection_hook = _true_lines
    ptxas = io.StringIO()
    work = Job(job)
    with contextlib.redirect_stdout(ptxas), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            work.define()
            compiled = work.compile()
        except Exception as exc:
            return {"error": _explain(exc, job)}
    asm, metadata = compiled.asm, compiled.metadata
    return {
        **{stage: asm[stage] for stage in ("ttir", "ttgir", "llir", "ptx")},
        "sass": _disassemble(asm["cubin"]),
        "ptxas": ptxas.getvalue(),
        "metadata": {
            name: getattr(metadata, name) for name in ("name", "shared", "num_warps", "num_stages", "num_ctas")
        },
    }


def _explain(exc: Exception, job: dict) -> dict:
    """Triton's own message, and the line of the learner's code: the innermost one in a function of the job."""
    at = None
    innermost = exc
    while exc is not None:
        node, source = getattr(exc, "node", None), getattr(exc, "src", None)
        if source is not None and hasattr(node, "lineno"):
            for function in job["functions"].values():
                if function["source"].strip() == source.strip():
                    at = function["file"], function["line"] + node.lineno - 1
        innermost, exc = exc, exc.__cause__
    message = getattr(innermost, "error_message", None) or str(innermost) or type(innermost).__name__
    kind = type(innermost).__name__
    return {"kind": kind, "message": message, "at": at, "trace": "".join(traceback.format_exception(innermost))}


class _FarEnough(Exception):
    """Triton has taken a kernel as far as it was to go; `shared` are the bytes of shared memory, 0 if they are not known yet."""

    def __init__(self, shared: int = 0):
        super().__init__()
        self.shared = shared


def accepts(jobs: list[dict], gpus: list[str]) -> dict:
    """Whether Triton and ptxas take each kernel for each GPU, and a block of it fits there. {}, or the first error as
    `_explain` tells it, with the `gpu` that it is about. For a process that ends afterwards: Triton keeps its driver.

    Launches of one kernel differ in their dtypes. The first GPU, which should be the oldest, gets all of them; the others
    get one of each kernel, the whole way, since what a dtype makes wrong is wrong on all. On the first GPU one of each kernel
    goes the whole way too, that with most of bfloat16, for which old GPUs have the fewest instructions. Another width may not
    fit: it goes until Triton has lowered it, which is when its shared memory is known, and what is left is LLVM's and ptxas's
    work on instructions that all GPUs have. float16 takes as much room as bfloat16: where a kernel met both, it goes until its
    layouts are chosen."""
    import triton

    from gpukit import hardware

    _without_torch()
    widths = _of_each_width(jobs)
    oldest = list({job["name"]: job for job in sorted(widths, key=_bfloat16s)}.values())
    one_of_each = list({job["name"]: job for job in reversed(jobs)}.values())
    knobs = triton.knobs
    with knobs.compilation.scope(), knobs.runtime.scope():
        # Nobody reads what lies between: no source lines in it, no files of it.
        knobs.compilation.disable_line_info = knobs.compilation.store_binary_only = True
        knobs.runtime.add_stages_inspection_hook = stop = _Stop()
        for gpu, launches in zip(map(hardware.gpu, gpus), [jobs, *[one_of_each] * (len(gpus) - 1)], strict=True):
            for job in launches:
                stop.after = ""
                if launches is jobs and not any(job is each for each in oldest):
                    stop.after = "lowering" if any(job is each for each in widths) else "layouts"
                if refused := _refused(job, gpu):
                    return refused
    return {}


def _refused(job: dict, gpu) -> dict:
    import triton

    major, minor = gpu.compute_capability
    triton.runtime.driver.set_active(_Target(10 * major + minor))
    work = Job(job)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            work.define()
            try:
                shared = work.compile().metadata.shared
            except _FarEnough as end:
                shared = end.shared
            if shared > gpu.smem_per_block_bytes:  # Triton itself looks when it loads the kernel
                raise triton.OutOfResources(shared, gpu.smem_per_block_bytes, "shared memory")
        except Exception as exc:
            return _explain(exc, job) | {"gpu": gpu.name}
    return {}


def _of_each_width(jobs: list[dict]) -> list[dict]:
    """Of launches of one kernel that are alike but for float16 in place of bfloat16, one: that with bfloat16."""
    chosen: dict[tuple, tuple[int, dict]] = {}
    for job in jobs:
        key = job["name"], *("float16" if dtype == "bfloat16" else dtype for dtype in _dtypes(job))
        rank = _bfloat16s(job)
        if key not in chosen or rank > chosen[key][0]:
            chosen[key] = rank, job
    return [job for _, job in chosen.values()]


def _dtypes(job: dict) -> list[str]:
    """The dtypes of a launch's tensors."""
    return [value[1] for value in [*job["args"], *job["kwargs"].values()] if value[0] == "tensor"]


def _bfloat16s(job: dict) -> int:
    """How many tensors of a launch are in bfloat16."""
    return _dtypes(job).count("bfloat16")


class _Stop:
    """A stage hook of Triton's: what comes behind the "layouts" or behind Triton's own "lowering" is left out, or nothing."""

    after = ""

    def __call__(self, *args):
        if not args:  # asked what to add to the key of Triton's own cache
            return ("gpukit", "gpukit")
        stages = args[1]

        def enough(source, metadata):
            raise _FarEnough

        make = stages["llir"]

        def lowered(source, metadata):
            """Triton's own stage, until it would hand the module to LLVM."""
            from triton._C.libtriton import llvm

            def enough(*_):
                raise _FarEnough(source.get_int_attr("ttg.shared") or 0)

            to_module, llvm.to_module = llvm.to_module, enough
            try:
                return make(source, metadata)
            finally:
                llvm.to_module = to_module

        if self.after:
            stages["llir"] = {"layouts": enough, "lowering": lowered}[self.after]


def warm_up() -> None:
    """Load what compiling needs, by compiling a kernel that does nothing: half a second, once."""
    import triton.tools.tensor_descriptor  # noqa: F401

    _without_key()
    lines = {"1": "def nothing():\n", "2": "    pass\n"}
    function = {
        "name": "nothing",
        "module": "",
        "file": "<nothing>",
        "line": 1,
        "source": "".join(lines.values()),
        "flags": 0,
    }
    function |= {"kind": "jit", "options": {}, "constexpr_globals": [], "globals": {}}
    job = {"name": "nothing", "kernel": "nothing#0", "args": [], "kwargs": {}, "options": {}}
    with tempfile.TemporaryDirectory(prefix="gpukit-compile-") as scratch:
        os.environ["TRITON_CACHE_DIR"] = scratch
        accepts([job | {"functions": {"nothing#0": function}, "files": {"<nothing>": lines}}], ["h100"])


_IDLE_S = 60.0


def serve(control: int) -> None:
    """Answer the jobs that come over `control`, a socket: each brings the file that it lies in and those for what is printed and for
    stderr. Triton is imported once, and each job has a process of its own, forked from this one."""
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    gc.freeze()  # a collection in a forked process would copy all that it looks at
    asked = socket.socket(fileno=control)
    asked.settimeout(_IDLE_S)
    while True:
        try:
            descriptors = socket.recv_fds(asked, 1, 3)[1]
        except TimeoutError:
            break
        if not descriptors:  # nobody is there any more
            break
        if os.fork() == 0:
            asked.close()
            _answer(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
    os._exit(0)


def _answer(file: int, stdout: int, stderr: int) -> None:
    """Print the number of this process and what came out of the job, in a line each. Never returns."""
    try:
        os.setsid()  # whoever waits can end it with all that it starts
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for descriptor in (stdout, stderr):
            os.close(descriptor)
        print(os.getpid(), flush=True)
        with open(file, encoding="utf-8") as told:
            told = json.load(told)
        os.environ.clear()
        os.environ.update(told["environment"])
        sys.path[:] = told["path"]
        os.chdir(told["folder"])
        print(json.dumps(_run(told["job"])), flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
