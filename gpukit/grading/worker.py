"""The worker: loads the learner's file and calls the function, case by case, on inputs that the judge sends.

It knows no expected result and no seed. What it reports besides the outputs are witnesses: which Triton kernels ran, what
they loaded and stored, which PyTorch operations the host code used, what a replay without the kernels returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import linecache
import os
import resource
import signal
import socket
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpukit.grading import messages, wire
from gpukit.grading.messages import AccessFacts, Failure, Fault, Job, LaunchFacts, Reply

_ALLOCATIONS = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())
# Host code may allocate, look at tensors in other ways and copy them. Nothing here computes anything.
HOST_OPS = _ALLOCATIONS | frozenset(
    "zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill_ zero_ "
    "view _unsafe_view reshape as_strided expand permute transpose t select slice squeeze unsqueeze unbind split "
    "split_with_sizes alias detach flatten unflatten _reshape_alias movedim unfold view_as_real lift "
    "clone copy_ _to_copy contiguous to".split()
)
_ABOUT = {MemoryError: "it asks for more memory than a check may have", SystemExit: "the file ends the program"}


def preload(device: str) -> None:
    """What every worker needs, loaded once in the server before it forks. Off Linux there is no Triton: exercises without
    kernels work all the same."""
    if device == "compile":  # a worker that compiles needs no torch
        from gpukit.simulator.compiler import worker

        return worker.warm_up()
    import torch

    torch.set_num_threads(1)  # a thread pool does not survive fork
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language  # noqa: F401

    if os.environ["TRITON_INTERPRET"] == "1":
        import gpukit.simulator.trace.tracer  # noqa: F401
        from gpukit.simulator.interpreter import layer

        layer.install()


def run(sock: socket.socket) -> None:
    """Serve one check: a job, then its cases, until the judge closes the connection."""
    job = messages.receive(sock, Job)
    try:
        function = _compile if job.how == "compile" else getattr(_load(job.path), job.function, None)
    except BaseException as error:
        messages.send(sock, Reply(error=_describe(error, job.path)))
        return
    if not callable(function):
        messages.send(sock, Reply(missing=True))
        return
    messages.send(sock, Reply())
    call = {"function": _call_function, "cpu": _call_kernel, "cuda": _call_on_gpu, "compile": _compile}[job.how]
    with contextlib.suppress(wire.Closed):
        while True:
            args = wire.receive(sock)
            try:
                reply = call(function, args, job)
            except BaseException as error:
                reply = Reply(error=_describe(error, job.path))
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
            messages.send(sock, reply)


def _load(path: str) -> Any:
    """The learner's file as a module. Triton reads a kernel's source back from this path."""
    spec = importlib.util.spec_from_file_location("exercise", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["exercise"] = module
    spec.loader.exec_module(module)
    return module


def _compile(function: Any, args: tuple[tuple[str, ...], tuple[str, ...]], job: Job) -> Reply:
    """The answer of Triton and ptxas to packed launches for some GPUs, as an error if they refuse one. There is no function
    of the learner's."""
    from gpukit.simulator.compiler import worker

    launches, gpus = args
    with tempfile.TemporaryDirectory(prefix="gpukit-compile-") as scratch:
        os.environ["TRITON_CACHE_DIR"] = scratch
        refused = worker.accepts([json.loads(text) for text in launches], list(gpus))
    if not refused:
        return Reply()
    line = refused["at"][1] if refused["at"] else 0
    failure = Failure(refused["gpu"], refused["message"][:400], line, "", False, None, refused["trace"][-8000:])
    return Reply(error=failure)


def _call_function(function: Any, args: tuple, job: Job) -> Reply:
    if job.setup:
        module, _, name = job.setup.partition(":")
        args, counts = getattr(importlib.import_module(module), name)(*args)
        return Reply(output=_plain(function(*args)), counts=dict(vars(counts)))
    if not job.memory:
        return Reply(output=_plain(function(*args)))
    from gpukit import live

    with live.watch() as memory:
        output = function(*args)
    return Reply(output=_plain(output), peak_bytes=memory.peak_bytes)


def _plain(output: Any) -> Any:
    """A number is a number, computed with torch or without."""
    if type(output) in (list, tuple):
        return type(output)(map(_plain, output))
    return output.item() if type(output).__module__ == "torch" and getattr(output, "ndim", 1) == 0 else output


_ADDRESSED = 8  # programs of each launch on imaginary tensors
# A host loop over every row of a huge tensor, or a real tensor of its size, proves nothing about addresses.
_ADDRESSED_S = 5.0  # of CPU time
_ADDRESSED_BYTES = 1 << 29  # of memory, beside what the process has


def _call_on_addresses(function: Any, args: tuple, job: Job) -> Reply:
    """A call on tensors without memory: a few programs of each launch run, nothing is computed, and every access is held
    against the bounds of its tensor. What else goes wrong there proves nothing."""
    import torch

    from gpukit.simulator.interpreter.faults import MemoryFault
    from gpukit.simulator.interpreter.sampled import Sampled, TooLong

    def tensor(arg):
        dtype = getattr(torch, arg.dtype) if isinstance(arg, wire.Imaginary) else None
        return torch.empty(arg.shape, dtype=dtype, device="meta") if dtype else arg

    def stop(*_):
        raise TooLong

    args = tuple(map(tensor, args))
    before = signal.signal(signal.SIGVTALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    try:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ADDRESSED_BYTES, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, _ADDRESSED_S)
        with _host_watch(job.path), Sampled(_ADDRESSED):
            _outputs(function, args, job, _argument_names(function, args, job))
    except MemoryFault:
        raise
    except Exception:
        return Reply()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
    return Reply()


def _call_kernel(function: Any, args: tuple, job: Job) -> Reply:
    """One call in Triton's interpreter, traced, and one in which launches do nothing."""
    if any(isinstance(arg, wire.Imaginary) for arg in args):
        return _call_on_addresses(function, args, job)
    import torch

    from gpukit.simulator.interpreter import bounds
    from gpukit.simulator.trace.tracer import trace

    inputs = {f"argument {i + 1}": arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    names = _argument_names(function, args, job)
    before = [_bytes(arg).clone() if isinstance(arg, torch.Tensor) else None for arg in args]
    for name, arg in zip(names, args, strict=False):
        if isinstance(arg, torch.Tensor):
            bounds.guard(arg, name)
    watch = _host_watch(job.path)
    with watch, trace(raises=False) as traced:
        outputs = _outputs(function, args, job, names)
    outputs |= _changed_in_place(args, job, names)
    changed = [
        name
        for i, (name, arg, old) in enumerate(zip(names, args, before, strict=False))
        if old is not None and i not in job.in_place and not torch.equal(_bytes(arg), old)
    ]
    for i in job.in_place:
        _bytes(args[i]).copy_(before[i])  # the replay begins from the same
    own = [launch for launch in traced.launches if os.path.realpath(launch.file) == os.path.realpath(job.path)]
    tensors = [value for value in outputs.values() if type(value) is torch.Tensor]
    aliases = tuple(
        name
        for name, value in outputs.items()
        if type(value) is torch.Tensor and value.numel() and any(_shares(value, arg) for arg in inputs.values())
    )
    same = False
    with contextlib.suppress(BaseException), _host_watch(job.path), trace(dry=True):
        replay = _outputs(function, args, job, names) | _changed_in_place(args, job, names)
        same = bool(tensors) and all(
            type(replay.get(name)) is torch.Tensor and _identical(replay[name], value)
            for name, value in outputs.items()
            if type(value) is torch.Tensor
        )
    return Reply(
        outputs=outputs,
        devices=tuple(str(value.device) for value in tensors),
        changed=tuple(changed),
        aliases=aliases,
        launches=tuple(_launch_facts(launch, job.caches) for launch in own),
        host_ops=tuple(watch.used),
        compiles=tuple(dict.fromkeys(_packed(launch, job.path) for launch in own)),
        copied_read_bytes=sum(op.read_bytes for op in traced.torch_ops),
        copied_write_bytes=sum(op.write_bytes for op in traced.torch_ops),
        same_without_kernels=same,
    )


def _call_on_gpu(function: Any, args: tuple, job: Job) -> Reply:
    """Three calls on the GPU, which must agree to the bit."""
    import torch

    def fresh(arg):
        if not isinstance(arg, torch.Tensor):
            return arg
        flat = torch.empty(0, dtype=arg.dtype).set_(arg.untyped_storage()).cuda()
        return flat.as_strided(arg.shape, arg.stride(), arg.storage_offset())

    names = _argument_names(function, args, job)
    runs = []
    for _ in range(3):
        copies = tuple(fresh(arg) for arg in args)
        with _host_watch(job.path):
            outputs = _outputs(function, copies, job, names)
        runs.append(outputs | _changed_in_place(copies, job, names))
        torch.cuda.synchronize()
    first, *others = runs
    tensors = {name: value for name, value in first.items() if type(value) is torch.Tensor}
    agree = all(_identical(other[name], value) for other in others for name, value in tensors.items())
    return Reply(outputs=first, devices=tuple(str(value.device) for value in tensors.values()), agree=agree)


def _outputs(function: Any, args: tuple, job: Job, names: list[str]) -> dict[str, Any]:
    """The function's results by name: y (or y[0], y[1]), and the gradients dx, … if the exercise asks for them."""
    import torch

    gradients = job.gradients
    if not gradients:
        result = function(*args)
        changed = [args[i] for i in job.in_place]
        items = result if isinstance(result, tuple | list) else (result,)
        if changed and (result is None or all(any(item is arg for arg in changed) for item in items)):
            return {}  # PyTorch's own functions in place return what they changed
        return {f"y[{i}]": item for i, item in enumerate(result)} if isinstance(result, tuple | list) else {"y": result}
    *inputs, dy = args
    for i in range(gradients):
        inputs[i] = inputs[i].detach().requires_grad_()
    y = function(*inputs)
    if not isinstance(y, torch.Tensor) or y.grad_fn is None:
        return {"y": y, f"d{names[0]}": None}
    grads = torch.autograd.grad(y, inputs[:gradients], dy, allow_unused=True)
    return {"y": y.detach(), **{f"d{name}": grad for name, grad in zip(names, grads, strict=False)}}


def _changed_in_place(args: tuple, job: Job, names: list[str]) -> dict[str, Any]:
    """What the arguments hold that the function was to change."""
    return {names[i]: args[i].clone() for i in job.in_place}


def _argument_names(function: Any, args: tuple, job: Job) -> list[str]:
    code = getattr(function, "__code__", None)
    names = list(code.co_varnames[: code.co_argcount]) if code else []
    names += [f"argument {i + 1}" for i in range(len(names), len(args))]
    return [*names[: len(args) - 1], "dy"] if job.gradients else names


def _host_watch(path: str):
    """A dispatch mode that poisons fresh buffers and notes every PyTorch operation outside HOST_OPS with its line."""
    from gpukit import dispatch
    from gpukit.testing import poison

    class HostWatch(dispatch.Mode):
        def __init__(self):
            super().__init__()
            self.used: list[tuple[str, int]] = []  # (operation, line)

        def operation(self, func, args, kwargs):
            name = func.name().removeprefix("aten::").partition(".")[0]
            out = func(*args, **kwargs)
            if name in _ALLOCATIONS:
                poison(out)
            elif name not in HOST_OPS and len(self.used) < 20:
                self.used.append((name, _learner_line(path)))
            return out

    return HostWatch()


def _learner_line(path: str) -> int:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == path:
            return frame.f_lineno
        frame = frame.f_back
    return 0


def _packed(launch: Any, path: str) -> str:
    """A launch as text for the compiler; what cannot be one is a refusal already."""
    from gpukit.simulator.compiler import compile as compiler

    try:
        return compiler.packed(launch, called=os.path.basename(path))
    except TypeError as error:
        return json.dumps({"name": launch.kernel, "refused": str(error)})


def _launch_facts(launch: Any, caches: tuple[int, int] | None) -> LaunchFacts:
    read = 0
    if caches:
        from gpukit import hardware

        sms, l2_bytes = caches
        one_program = {"max_threads_per_sm": 32 * launch.num_warps, "smem_per_sm_bytes": 0}
        small = dataclasses.replace(hardware.gpu("h200"), sms=sms, l2_bytes=l2_bytes, **one_program)
        read = launch.traffic(small, compiled=False).dram_read_bytes
    return LaunchFacts(
        kernel=launch.kernel,
        grid=tuple(launch.grid),
        programs=launch.programs,
        load_bytes=launch.load_bytes,
        store_bytes=launch.store_bytes,
        atomic_bytes=launch.atomic_bytes,
        flops=launch.flops,
        accesses=tuple(AccessFacts(a.kind, a.tensor, a.line, a.bytes, a.sectors) for a in launch.accesses),
        sizes={name: x.nbytes for name, x in launch.arguments.items() if hasattr(x, "nbytes")},
        longest=max(Counter(launch.recording.program).values(), default=0),
        dram_read_bytes=read,
    )


def _bytes(tensor: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _shares(a: Any, b: Any) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _identical(a: Any, b: Any) -> bool:
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(
        a.detach().contiguous().view(-1).view(torch.uint8), b.detach().contiguous().view(-1).view(torch.uint8)
    )


def _describe(error: BaseException, path: str) -> Failure:
    """An exception as plain data, seen from the learner's file: type, message, line and that line's text."""
    fault = None
    line = 0
    if "triton" in sys.modules:
        from gpukit.simulator.interpreter import faults
        from gpukit.simulator.interpreter.frames import original

        error, file, line = original(error)
        line = line if file == path else 0  # autograd raises in ours, and our line is not one of the learner's
        if isinstance(error, faults.MemoryFault | faults.RaceFault):
            fault = Fault(
                what="race" if isinstance(error, faults.RaceFault) else "out-of-bounds",
                text=str(error),
                kind=getattr(error, "kind", ""),
                tensor=getattr(error, "tensor", ""),
                line=getattr(error, "line", 0),
            )
    frames = list(_frames(error))
    line = next((number for name, number in reversed(frames) if name == path), line or 0)
    if isinstance(error, SyntaxError) and error.filename == path:
        line = error.lineno or 0
    if fault and fault.line:
        line = fault.line  # inside the kernel, where the frames end at its launch
    return Failure(
        type=type(error).__name__,
        message=(str(error).partition("\n")[0] or _ABOUT.get(type(error), ""))[:150],
        line=int(line or 0),
        source=linecache.getline(path, line).strip()[:160] if line else "",
        todo=isinstance(error, NotImplementedError) and bool(frames) and frames[-1][0] == path,
        fault=fault,
        traceback="".join(traceback.format_exception(error))[-8000:],
    )


def _frames(error: BaseException) -> Iterator[tuple[str, int]]:
    for frame, number in traceback.walk_tb(error.__traceback__):
        yield frame.f_code.co_filename, number
