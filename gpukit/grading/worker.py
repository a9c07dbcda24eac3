"""The worker: answers the cases of a check, one after the other, in a process of its own. It knows no expected result and no
seed.

Most load the learner's file and call the function: on what the judge sends or, as the host of a kernel exercise, on tensors
that hold no data. A device does for such a host what that asked for. What it reports besides the outputs are witnesses:
which Triton kernels ran, what they loaded and stored, what the same calls give if launches do nothing.
"""

from __future__ import annotations

import contextlib
import copy
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
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from gpukit.grading import messages, remote, wire
from gpukit.grading.kernel_text import Refused
from gpukit.grading.messages import NOTHING_STORED, AccessFacts, Failure, Fault, Job, LaunchFacts, Reply

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
    # The first backward pass imports it, and sympy with it: half a second of each check of a gradient. The others take less.
    import numpy.ma  # noqa: F401
    import torch._subclasses.schema_check_mode
    import torch.fx.experimental.symbolic_shapes
    import triton.compiler.code_generator  # noqa: F401 (the interpreter imports it at the first launch)

    if os.environ["TRITON_INTERPRET"] == "1":
        import gpukit.grading.device
        import gpukit.grading.host
        import gpukit.simulator.interpreter.sampled
        import gpukit.simulator.trace.tracer  # noqa: F401
        from gpukit.simulator.interpreter import layer

        layer.install()


def run(sock: socket.socket) -> None:
    """Serve one check: a job, then its cases, until the judge closes the connection."""
    job = messages.receive(sock, Job)
    try:
        call, first = _BEGIN.get(job.how, _begin)(job)
    except BaseException as error:
        messages.send(sock, Reply(error=_describe(error, job.path)))
        return
    messages.send(sock, first)
    if call is None:
        return
    with contextlib.suppress(wire.Closed):
        while True:
            args = wire.receive(sock)
            try:
                reply = remote.call(call, args, sock) if job.setup else call(args)
            except BaseException as error:
                reply = Reply(error=_describe(error, job.path))
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
            messages.send(sock, reply)


def _begin(job: Job) -> tuple[Callable[[Any], Reply] | None, Reply]:
    """Load the learner's file. What answers a case, None if there is nothing that could, and the answer to the job."""
    function = getattr(_load(job.path), job.function, None)
    if not callable(function):
        return None, Reply(missing=True)
    call = {"function": _call_function, "cpu": _call_kernel, "cuda": _call_on_gpu}[job.how]
    placed = _placing() if job.how == "function" and not job.setup else lambda args: args
    return lambda args: call(function, placed(args), job), Reply()


def _placing() -> Callable[[tuple], tuple]:
    """Puts the arguments of a plain function where those of the calls before it lay; not all plain functions take tensors."""

    @cache
    def places() -> Any:
        from gpukit.grading.host import Places

        return Places()

    return lambda args: places().copied(args) if "torch" in sys.modules else args


def _begin_host(job: Job) -> tuple[Callable[[Any], Reply] | None, Reply]:
    """The learner's file, for calls on tensors without data."""
    from gpukit.grading.host import Recorder

    recorder = Recorder(job.path, _learner_line)
    with recorder:
        function = getattr(_load(job.path), job.function, None)
    if not callable(function):
        return None, Reply(missing=True)
    return lambda args: _call_on_host(function, args, job, recorder), Reply(tape=recorder.tape({}))


def _begin_device(job: Job) -> tuple[Callable[[Any], Reply], Reply]:
    """The storages of the check, and in them what the file made when it was loaded."""
    from gpukit.grading.device import Device

    device, *twins = (Device(job.source, job.path, job.uploads) for _ in range(3))
    for each in (device, *twins):
        each.play(job.tape, uploads=True)
    return lambda told: _call_on_device(device, twins, told, job), Reply()


def _begin_compiler(job: Job) -> tuple[Callable[[Any], Reply], Reply]:
    return _compile, Reply()


def _load(path: str) -> Any:
    """The learner's file as a module. Triton reads a kernel's source back from this path."""
    spec = importlib.util.spec_from_file_location("exercise", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["exercise"] = module
    spec.loader.exec_module(module)
    return module


def _compile(args: tuple[tuple[str, ...], tuple[str, ...]]) -> Reply:
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


def _begin_nvrtc(job: Job) -> tuple[Callable[[Any], Reply], Reply]:
    """The compiler is loaded before it sees a text: whether there is one does not depend on the text."""
    from gpukit.simulator.cuda import nvrtc

    nvrtc.load(job.path)
    return lambda text: Reply(output=nvrtc.to_ptx(text, job.path)), Reply()


def _begin_ptx(job: Job) -> tuple[Callable[[Any], Reply], Reply]:
    """The one kernel of a compiled text; the reply says what it is called and takes."""
    from gpukit.simulator.cuda import ptx

    kernels = ptx.read(job.source)
    found = [[kernel.name, [kind for kind, _ in kernel.params]] for kernel in kernels]
    return lambda told: _call_in_ptx(kernels[0], told), Reply(output=found)


_BEGIN = {
    "host": _begin_host, "device": _begin_device, "compile": _begin_compiler, "nvrtc": _begin_nvrtc, "ptx": _begin_ptx,
}  # fmt: skip


def _call_function(function: Any, args: tuple, job: Job) -> Reply:
    if job.setup:
        return Reply(output=_plain(function(*args)))
    before = copy.deepcopy(args)
    if not job.memory:
        output = function(*args)
        where = _where(output, args, _argument_names(function, args, job), job)
        output = _plain(_of_caller(output, args, job))
        return Reply(output=output, changed=_touched(function, args, before, job), **where)
    from gpukit import dispatch, live
    from gpukit.grading.host import ALLOCATIONS
    from gpukit.testing import poison

    given = dispatch.storages(args)
    floats = [x for x in dispatch.tensors(args) if x.is_floating_point()]

    class Fresh(dispatch.Mode):
        """What nobody has written holds NaN, not the zeros of memory that is new. Numbers that Python keeps are memory too:
        what it has allocated since the first one was taken out of a tensor, but no more than all of them would take in a
        list. Integers may be the bits of other numbers, and long integers can hold many: each has its size in the tensor, once
        for its place in an argument, each time where an argument's floats led to it, in whatever memory, and elsewhere once
        for its value, since a loop computes the same indices again and again."""

        taken = integer_bytes = 0

        def __init__(self):
            super().__init__()
            self.integers: set[tuple] = set()  # (storage, place), (value,), or an object of its own
            self.of_floats = weakref.WeakSet(x.untyped_storage() for x in floats)

        def operation(self, func, args, kwargs):
            out = func(*args, **kwargs)
            name = func.name().removeprefix("aten::").partition(".")[0]
            if any(x.untyped_storage() in self.of_floats for x in dispatch.tensors((args, kwargs))):
                self.of_floats.update(
                    x.untyped_storage() for x in dispatch.tensors(out) + dispatch.written(func, args, kwargs)
                )
            if name == "_local_scalar_dense" and args[0].is_floating_point():
                if not self.taken:
                    tracemalloc.start()
                self.taken += 1
            elif name == "_local_scalar_dense":
                storage = args[0].untyped_storage()
                if storage._cdata in given:
                    taken = storage._cdata, args[0].storage_offset()
                else:
                    taken = (object() if storage in self.of_floats else out,)
                if taken not in self.integers:
                    self.integers.add(taken)
                    self.integer_bytes += args[0].element_size() * (len(self.integers) > _NUMBERS_FREE)
            return poison(out) if name in ALLOCATIONS else out

    try:
        with Fresh() as numbers, live.watch(arguments=args) as memory:
            output = function(*args)
        kept = min(_NUMBER_BYTES * numbers.taken, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    touched = _touched(function, args, before, job)
    kept = max(0, kept - _NUMBER_BYTES * _NUMBERS_FREE) + numbers.integer_bytes
    peak, largest = memory.peak_bytes + kept, memory.largest_bytes
    where = _where(output, args, _argument_names(function, args, job), job)
    return Reply(output=_plain(output), peak_bytes=peak, largest_bytes=largest, changed=touched, **where)


def _of_caller(output: Any, args: tuple, job: Job) -> Any:
    """The results, whose last ones are the arguments that were to be changed: NaN where the caller, who goes on with the arguments,
    has something else than what was returned."""
    n = len(job.in_place)
    if not n or type(output) not in (tuple, list) or len(output) < n:
        return output
    import torch

    def seen(result: Any, arg: Any) -> Any:
        if not torch.is_tensor(result) or (result.shape, result.dtype) != (arg.shape, arg.dtype):
            return result
        return torch.where((result == arg) | (result.isnan() & arg.isnan()), result, torch.nan)

    return (*output[:-n], *map(seen, output[-n:], (args[i] for i in job.in_place)))


def _where(output: Any, args: tuple, names: list[str], job: Job) -> dict[str, tuple[str, ...]]:
    """Results of a plain function in memory where they do not belong. The last ones are the arguments that were to be changed, and
    lie where these do; the others lie in the memory of no argument that was to stay as it is."""
    torch = sys.modules.get("torch")  # a plain function may do without
    if torch is None:
        return {}

    def dense(x: Any) -> bool:
        return type(x) is torch.Tensor and x.layout == torch.strided and x.numel() > 0

    results, n = list(output) if type(output) in (tuple, list) else [output], len(job.in_place)
    others, last = (results[:-n], results[-n:]) if n and len(results) >= n else (results, [])
    pairs = [(names[i], x, args[i]) for i, x in zip(job.in_place, last, strict=False) if dense(x)]
    kept = [arg for i, arg in enumerate(args) if i not in job.in_place and dense(arg)]
    called = {"the result" if len(results) == 1 else f"result {i}": x for i, x in enumerate(others, 1) if dense(x)}
    return {"aliases": _sharing(called, kept), "copies": tuple(name for name, x, arg in pairs if not _shares(x, arg))}


_NUMBER_BYTES, _NUMBERS_FREE = 32, 64  # of a number in a list; some losses and norms may be kept as numbers


def _touched(function: Any, args: tuple, before: tuple, job: Job) -> tuple[str, ...]:
    """The names of the arguments that a plain function left otherwise than it found them, and was not to change."""
    return tuple(
        name
        for i, (name, arg, old) in enumerate(zip(_argument_names(function, args, job), args, before, strict=True))
        if i not in job.in_place and not _alike(arg, old)
    )


def _alike(arg: Any, old: Any) -> bool:
    if isinstance(arg, list | tuple):
        return len(arg) == len(old) and all(map(_alike, arg, old))
    if hasattr(arg, "untyped_storage"):
        return arg.grad is None and arg.requires_grad == old.requires_grad and _identical(arg, old)
    return arg is old or arg == old or arg != arg


def _plain(output: Any) -> Any:
    """A number is a number, computed with torch or without."""
    if type(output) in (list, tuple):
        return type(output)(map(_plain, output))
    return output.item() if type(output).__module__ == "torch" and getattr(output, "ndim", 1) == 0 else _trimmed(output)


_ADDRESSED = 8  # programs of each launch on imaginary tensors
# A host loop over every row of a huge tensor, or a real tensor of its size, proves nothing about addresses.
_ADDRESSED_S = 5.0  # of CPU time
_ADDRESSED_BYTES = 1 << 29  # of memory, beside what the process has


def _imaginary(args: tuple) -> bool:
    return any(isinstance(arg, wire.Imaginary) for arg in args)


def _on_meta(arg: Any) -> Any:
    """An imaginary tensor as one that has addresses and no memory."""
    return arg.tensor() if _imaginary((arg,)) else arg


def _on_addresses(call: Callable[[], Any]) -> Reply:
    """A call on tensors without memory: a few programs of each launch run, nothing is computed, and every access is held
    against the bounds of its tensor. Programs whose masks leave nothing to store are an error, too: so is a mask whose bound,
    a product of two sizes, is negative in 32 bits. What else goes wrong there proves nothing."""
    from gpukit.simulator.interpreter.faults import MemoryFault
    from gpukit.simulator.interpreter.sampled import Sampled

    try:
        with _within_limits(), Sampled(_ADDRESSED) as seen:
            call()
    except MemoryFault:
        raise
    except Exception:
        return Reply()
    if not seen.silent:
        return Reply()
    file, line = seen.silent[0]
    source = linecache.getline(file, line).strip()[:160]
    return Reply(error=Failure(NOTHING_STORED, "", line, source, todo=False, fault=None, traceback=""))


@contextlib.contextmanager
def _within_limits() -> Iterator[None]:
    """Raises TooLong after _ADDRESSED_S of CPU time, and MemoryError beyond _ADDRESSED_BYTES."""
    from gpukit.simulator.interpreter.sampled import TooLong

    def stop(*_):
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    try:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ADDRESSED_BYTES, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, _ADDRESSED_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def _call_kernel(function: Any, args: tuple, job: Job) -> Reply:
    """One call in Triton's interpreter, traced, and one in which launches do nothing."""
    import torch

    if _imaginary(args):
        from gpukit.grading.host import numbers_kept

        args = tuple(map(_on_meta, args))
        with _host_watch(job.path), numbers_kept():
            return _on_addresses(lambda: _outputs(function, args, job, _argument_names(function, args, job)))

    from triton.runtime.errors import InterpreterError

    from gpukit.simulator.interpreter import bounds
    from gpukit.simulator.trace.tracer import trace

    names = _argument_names(function, args, job)
    before = [_bytes(arg).clone() if isinstance(arg, torch.Tensor) else None for arg in args]
    for name, arg in zip(names, args, strict=False):
        if isinstance(arg, torch.Tensor):
            bounds.guard(arg, name)
    watch = _host_watch(job.path)
    with watch, trace(raises=False) as traced:
        try:
            outputs = _outputs(function, args, job, names)
        except InterpreterError as error:  # perhaps the compiler refuses the kernel, and says why
            compiles = tuple(_packed(launch, job.path) for launch in traced.launches[-1:])
            return Reply(error=_describe(error, job.path), compiles=compiles)
    outputs |= _changed_in_place(args, job, names)
    changed = [
        name
        for i, (name, arg, old) in enumerate(zip(names, args, before, strict=False))
        if old is not None and i not in job.in_place and not torch.equal(_bytes(arg), old)
    ]
    for i in job.in_place:
        _bytes(args[i]).copy_(before[i])  # the replay begins from the same
    replay = {}
    with contextlib.suppress(BaseException), _host_watch(job.path), trace(dry=True):
        replay = _outputs(function, args, job, names) | _changed_in_place(args, job, names)
    own = {"changed": tuple(changed), "host_ops": tuple(watch.used), "allocated_bytes": watch.allocated_bytes}
    return _seen(args, outputs, replay, traced, job, **own)


def _seen(args: tuple, outputs: dict[str, Any], replay: dict[str, Any], traced: Any, job: Job, **more: Any) -> Reply:
    """The results of a call, and what its trace witnessed. `replay`: the results where launches do nothing."""
    import torch

    own = [launch for launch in traced.launches if os.path.realpath(launch.file) == os.path.realpath(job.path)]
    tensors = {name: value for name, value in outputs.items() if type(value) is torch.Tensor}
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return Reply(
        outputs={name: _trimmed(value) for name, value in outputs.items()},
        devices=tuple(str(value.device) for value in tensors.values()),
        aliases=_sharing(tensors, inputs),
        launches=tuple(_launch_facts(launch, job.caches) for launch in own),
        compiles=tuple(dict.fromkeys(_packed(launch, job.path) for launch in own)),
        disorder=_fault("warp-race", traced.disorder[0]) if traced.disorder else None,
        copied_read_bytes=sum(op.read_bytes for op in traced.torch_ops),
        copied_write_bytes=sum(op.write_bytes for op in traced.torch_ops),
        same_without_kernels=bool(tensors)
        and all(
            type(replay.get(name)) is torch.Tensor and _identical(replay[name], value)
            for name, value in tensors.items()
        ),
        **more,
    )


def _call_on_host(function: Any, args: tuple, job: Job, recorder: Any) -> Reply:
    """One call on tensors without data, as the commands that the device carries out."""
    from gpukit.grading.host import numbers_kept

    tensors = [*recorder.arguments(args)]
    names = _argument_names(function, args, job)
    with contextlib.ExitStack() as stack:
        if _imaginary(args):
            stack.enter_context(_within_limits())
            stack.enter_context(numbers_kept())
        stack.enter_context(recorder)
        if job.gradients:
            outputs = recorder.both_passes(function, tensors, [f"d{name}" for name in names[: job.gradients]])
        else:
            outputs = _outputs(function, tensors, job, names)
    return Reply(tape=recorder.tape(outputs), host_ops=tuple(recorder.used))


def _call_on_device(device: Any, twins: list, told: tuple[tuple, str], job: Job) -> Reply:
    """One call's commands on the judge's tensors, traced. Two other devices carry them out without the launches, one of them on
    tensors in which every bit is the other one: what differs between these two is what copies make of the inputs."""
    import torch

    from gpukit.grading.host import mapped
    from gpukit.simulator.interpreter import bounds
    from gpukit.simulator.trace.tracer import trace

    args, tape = told
    bounds.unguard_all()
    if _imaginary(args):
        device.arguments(tuple(map(_on_meta, args)))
        return _on_addresses(lambda: device.play(tape))
    names = _names(device.parameters(job.function), args, job)
    replays = []
    for twin, flip in zip(twins, (False, True), strict=True):
        copies = twin.arguments(mapped(lambda arg: _copied(arg, "cpu"), args))
        for flipped in copies if flip else ():
            if isinstance(flipped, torch.Tensor):
                _bytes(flipped).bitwise_not_()
        outputs = _named(twin.play(tape, launching=False), names, job)
        replays.append(outputs | _changed_in_place(copies, job, names))
    args = device.arguments(args)
    for name, arg in zip(names, args, strict=False):
        if isinstance(arg, torch.Tensor):
            bounds.guard(arg, name)
    before = [_bytes(arg).clone() if isinstance(arg, torch.Tensor) else None for arg in args]
    with trace(raises=False) as traced:
        outputs = _named(device.play(tape), names, job)
    saved = _saved(device, names, args) if job.gradients else ()
    share = _share_copied(outputs, *replays, traced)
    outputs |= _changed_in_place(args, job, names)
    changed = tuple(
        name
        for i, (name, arg, old) in enumerate(zip(names, args, before, strict=False))
        if old is not None and i not in job.in_place and not torch.equal(_bytes(arg), old)
    )
    earlier = [device.storages[name] for name in device.before & device.storages.keys()]
    own = {"changed": changed, "allocated_bytes": device.allocated_bytes, "mostly_copied": share > 0.5, "saved": saved}
    own |= {"left": bool(job.gradients) and device.left, "reused": _sharing(outputs, earlier)}
    return _seen(args, outputs, replays[0], traced, job, **own)


def _call_in_ptx(kernel: Any, told: dict[str, Any]) -> Reply:
    """One launch, interpreted. On imaginary tensors only three blocks run, the first, the last, and the one whose first thread
    32 bits do not tell from the first of all: what they store must be apart."""
    import torch

    from gpukit.simulator.cuda.machine import WIDEST, Array, Launch

    names, values, blocks = told["names"], told["values"], told["blocks"]
    imaginary = _imaginary(values)
    arguments, before = [], {}
    for name, value in zip(names, values, strict=True):
        if isinstance(value, wire.Imaginary):
            meta = value.tensor()
            value = Array(name, meta.nbytes, None, meta.itemsize)
        elif isinstance(value, torch.Tensor):
            before[name] = value.clone()
            value = Array(name, value.nbytes, value.view(torch.uint8).numpy(), value.itemsize)
        arguments.append(value)
    alike = (1 << 32) // told["threads"]
    few = sorted({0, blocks - 1, *([alike] if alike < blocks else [])})
    launch = Launch(kernel, blocks, told["threads"], arguments, few if imaginary else None)
    accesses = tuple(AccessFacts(a.kind, a.array, a.line, a.bytes, a.sectors, a.width) for a in launch.run())
    if imaginary:
        result = next(argument for name, argument in zip(names, arguments, strict=True) if name == told["result"])
        if found := result.find_wrapped(WIDEST):
            raise found
        return Reply()
    tensors = {name: value for name, value in zip(names, values, strict=True) if isinstance(value, torch.Tensor)}
    moved = {kind: sum(a.bytes for a in accesses if a.kind == kind) for kind in ("load", "store")}
    sizes = {name: value.nbytes for name, value in tensors.items()}
    facts = LaunchFacts(kernel.name, (blocks,), blocks, moved["load"], moved["store"], 0, 0, accesses, sizes, 0)
    result = told["result"]
    changed = tuple(name for name in tensors if name != result and not _identical(tensors[name], before[name]))
    return Reply(outputs={result: tensors[result]}, changed=changed, launches=(facts,))


def _saved(device: Any, names: list[str], args: tuple) -> tuple[tuple[str, int], ...]:
    """What the forward pass kept, beside the upstream gradient, which comes later. A host may lie about where that pass ends,
    but y is complete there; otherwise all that there was counts as kept."""
    import torch

    tensors = [name for name, arg in zip(names, args, strict=False) if isinstance(arg, torch.Tensor)]
    if device.returned is None or not _identical(*device.returned[1:]):
        return (("all tensors", sum(x.nbytes for x in device.given.values()) + device.allocated_bytes),)
    called = {key: "tensors from before the call" for key in device.before}
    called |= {**dict(zip(device.given, tensors, strict=True)), device.returned[0]: "y"}
    saved: Counter[str] = Counter()
    for key, size in device.kept.items():
        saved[called.get(key, "other tensors")] += size
    del saved[tensors[-1]]
    return tuple(saved.items())


def _share_copied(outputs: dict[str, Any], replay: dict[str, Any], flipped: dict[str, Any], traced: Any) -> float:
    """The share of the returned elements that copies of inputs put there, and no kernel."""
    import torch

    copied = total = 0
    for name, value in outputs.items():
        if type(value) is torch.Tensor and value.numel():
            there, same, other = (_elements(each) for each in (value, replay[name], flipped[name]))
            stored = traced.written(value).reshape(-1)
            copied += int(((there == same).all(1) & (same != other).any(1) & ~stored).sum())
            total += value.numel()
    return copied / max(total, 1)


def _elements(tensor: Any) -> Any:
    """The bytes of each element."""
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8).view(tensor.numel(), -1)


def _call_on_gpu(function: Any, args: tuple, job: Job) -> Reply:
    """Three calls on the GPU, which must agree to the bit."""
    import torch

    names = _argument_names(function, args, job)
    runs = []
    for _ in range(3):
        copies = tuple(_copied(arg, "cuda") for arg in args)
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


def call(function: Any, args: tuple, exercise: Any) -> dict[str, Any]:
    """One call of an answer as a check makes it, gradients too."""
    job = exercise.job("", "cpu")
    return _outputs(function, args, job, _argument_names(function, args, job))


def _named(results: dict[str, Any], names: list[str], job: Job) -> dict[str, Any]:
    """The results of a device by the names that `_outputs` gives them: a gradient has another tolerance, so a host may not say
    what is one."""
    known = ["y", *(f"d{name}" for name in names)] if job.gradients else [f"y[{i}]" for i in range(len(results))]
    return results if [*results] == ["y"] else dict(zip(known, results.values(), strict=False))


def _changed_in_place(args: tuple, job: Job, names: list[str]) -> dict[str, Any]:
    """What the arguments hold that the function was to change."""
    return {names[i]: args[i].clone() for i in job.in_place}


def _argument_names(function: Any, args: tuple, job: Job) -> list[str]:
    code = getattr(function, "__code__", None)
    return _names(list(code.co_varnames[: code.co_argcount]) if code else [], args, job)


def _names(parameters: list[str], args: tuple, job: Job) -> list[str]:
    """What the arguments are called, also where the function does not say."""
    names = parameters[: len(args)]
    names += [f"argument {i + 1}" for i in range(len(names), len(args))]
    return [*names[: len(args) - 1], job.upstream] if job.gradients else names


def _host_watch(path: str):
    """A dispatch mode that poisons fresh buffers and notes every PyTorch operation outside HOST_OPS with its line."""
    from gpukit import dispatch
    from gpukit.grading.host import ALLOCATIONS, HOST_OPS
    from gpukit.testing import poison

    class HostWatch(dispatch.Mode):
        def __init__(self):
            super().__init__()
            self.used: list[tuple[str, int]] = []  # (operation, line)
            self.allocated_bytes = 0

        def operation(self, func, args, kwargs):
            name = func.name().removeprefix("aten::").partition(".")[0]
            out = func(*args, **kwargs)
            self.allocated_bytes += _new_bytes((args, kwargs), out)
            if name in ALLOCATIONS:
                poison(out)
            elif name not in HOST_OPS and len(self.used) < 20:
                self.used.append((name, _learner_line(path)))
            return out

    return HostWatch()


def _new_bytes(given: Any, out: Any) -> int:
    """The memory of results that are neither views of what was given nor written there."""
    from gpukit.dispatch import tensors

    old = {x.untyped_storage()._cdata for x in tensors(given)}
    new = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors(out)}
    return sum(size for storage, size in new.items() if storage not in old)


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
        accesses=tuple(
            AccessFacts(a.kind, a.tensor, a.line, a.bytes, a.sectors, again_bytes=a.again_bytes)
            for a in launch.accesses
        ),
        sizes={name: x.nbytes for name, x in launch.arguments.items() if hasattr(x, "nbytes")},
        longest=max(Counter(launch.recording.program).values(), default=0),
        dram_read_bytes=read,
        working=len(set(launch.recording.program)) if launch.recording.complete else launch.programs,
    )


def _bytes(tensor: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _copied(arg: Any, device: str) -> Any:
    """A tensor with a storage of its own that looks the same; anything else as it is."""
    import torch

    if not isinstance(arg, torch.Tensor):
        return arg
    flat = torch.empty(0, dtype=arg.dtype).set_(arg.untyped_storage()).to(device, copy=True)
    return flat.as_strided(arg.shape, arg.stride(), arg.storage_offset())


def _sharing(outputs: dict[str, Any], others: list) -> tuple[str, ...]:
    """The names of the results that lie in the memory of one of the other tensors."""
    import torch

    tensors = {name: value for name, value in outputs.items() if type(value) is torch.Tensor and value.numel()}
    return tuple(name for name, value in tensors.items() if any(_shares(value, other) for other in others))


def _shares(a: Any, b: Any) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _trimmed(value: Any) -> Any:
    """A tensor without the memory around its elements; anything else as it is."""
    torch = sys.modules.get("torch")  # a plain function may do without
    if torch is None or type(value) is not torch.Tensor or value.layout != torch.strided:
        return value
    from gpukit.testing import span_of

    span = span_of(value.shape, value.stride())
    if value.untyped_storage().nbytes() <= span * value.itemsize:
        return value
    flat = value.detach().as_strided((span,), (1,), value.storage_offset()).clone()
    return flat.as_strided(value.shape, value.stride(), 0)


def _identical(a: Any, b: Any) -> bool:
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(
        a.detach().contiguous().view(-1).view(torch.uint8), b.detach().contiguous().view(-1).view(torch.uint8)
    )


def _fault(what: str, error: Any) -> Fault:
    return Fault(
        what=what,
        text=str(error),
        kind=getattr(error, "kind", ""),
        tensor=getattr(error, "tensor", ""),
        line=getattr(error, "line", 0),
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
            fault = _fault("race" if isinstance(error, faults.RaceFault) else "out-of-bounds", error)
    frames = list(_frames(error))
    line = next((number for name, number in reversed(frames) if name == path), line or 0)
    if isinstance(error, SyntaxError) and error.filename == path:
        line = error.lineno or 0
    if isinstance(error, Refused):
        line = error.line  # of a text that was read and not run
    if type(error).__module__.startswith("gpukit.simulator.cuda."):
        line = getattr(error, "line", 0)  # of the kernel's text
        if hasattr(error, "what"):
            fault = Fault(error.what, f"{error.what}: {error}", error.kind, error.tensor, line)
    if fault and fault.line:
        line = fault.line  # inside the kernel, where the frames end at its launch
    return Failure(
        type=type(error).__name__,
        message=(_text(error).partition("\n")[0] or _ABOUT.get(type(error), ""))[:150],
        line=int(line or 0),
        source=linecache.getline(path, line).strip()[:160] if line else "",
        todo=isinstance(error, NotImplementedError) and bool(frames) and frames[-1][0] == path,
        fault=fault,
        traceback="".join(traceback.format_exception(error))[-8000:],
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as another:  # the learner's own __str__ may do anything
        return f"its text cannot be shown: __str__ raises {type(another).__name__}"


def _frames(error: BaseException) -> Iterator[tuple[str, int]]:
    for frame, number in traceback.walk_tb(error.__traceback__):
        yield frame.f_code.co_filename, number
