"""What one call of a kernel moves, compiles to and takes, without a GPU: `gpukit trace softmax --shape 4096x4096`, and the
same of every kernel that a file launches: `gpukit trace mine.py`.

Everything here is counted or modelled by gpukit.simulator; this module makes the inputs of an operation, which need no
memory, and puts the answers one below the other.
"""

from __future__ import annotations

import mmap
import runpy
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from gpukit import benchmark, dispatch, hardware, launches, tables
from gpukit.accounting import roofline
from gpukit.kernels._device import stood_in_for
from gpukit.op import Cost, Op
from gpukit.simulator.interpreter.sampled import Sampled
from gpukit.simulator.prediction.predict import Prediction, Step, predict

DTYPES = {name: getattr(torch, long) for name, long in benchmark.DTYPES.items()}


@dataclass(frozen=True)
class Report:
    """What `gpukit trace` found out: a first line, facts, and the prediction, whose steps hold each launch and its machine
    code. `ended` says why a file ended early; empty where it did not."""

    title: str
    facts: tuple[str, ...]
    prediction: Prediction
    ended: str = ""

    def __str__(self) -> str:
        lines = [tables.folded(line) for line in (self.title, *self.facts)]
        for step, times in self.steps():
            lines += ["", *_step_lines(step, times)]
        return "\n".join([*lines, "", "PREDICTED TIME", self.prediction.report()])

    def steps(self) -> list[tuple[Step, int]]:
        """The launches, each with how many like it came in a row."""
        found: list[tuple[Step, int]] = []
        for step in self.prediction.steps:
            if step.launch is None:
                continue
            if found and _alike(found[-1][0], step):
                found[-1] = found[-1][0], found[-1][1] + 1
            else:
                found.append((step, 1))
        return found


def command(op: str, shape: str | None, dtype: str, gpu: str) -> str:
    """What `gpukit trace` prints of an operation. Raises ValueError for what does not fit."""
    return str(operation(op, shape, dtype, gpu))


def operation(
    op: str, shape: str | None, dtype: str, gpu: str, say: Callable[[str], object] = lambda what: None
) -> Report:
    """Of the operation called `op`. `say` is told what is being done. Raises ValueError for what does not fit."""
    benchmark.refuse_unknown(op, shape, dtype)
    found = benchmark.operation(op)
    sizes = found.bench_shapes[0] if shape is None else tuple(map(int, shape.lower().split("x")))
    with _Announced(say):
        return report(found, sizes, DTYPES[dtype], hardware.gpu(gpu))


def file(path: Path, gpu: hardware.Gpu, say: Callable[[str], object] = lambda what: None) -> Report:
    """Of every Triton kernel that a Python file launches when it runs, as `python FILE.py` would run it. Its tensors are on
    the meta device or on the CPU, and nothing is computed in them. A file that ends with an error, such as a comparison of
    what was not computed, is reported up to there. Needs the interpreter (TRITON_INTERPRET=1). Raises ValueError for a
    file that is not there or launches nothing, and for a kernel that leaves its tensors, does not compile or cannot be
    traced."""
    if not path.is_file():
        raise ValueError(
            f"trace needs an operation or a Python file that launches kernels, and there is no file {path}"
        )
    errors: list[BaseException] = []

    def work() -> None:
        before = list(sys.argv), list(sys.path)
        sys.argv, sys.path[:0] = [str(path)], [str(path.resolve().parent)]
        try:
            runpy.run_path(str(path), run_name="__main__")
        except (Exception, SystemExit) as error:
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                errors.append(error)
        finally:
            sys.argv, sys.path[:] = before
        if errors and _of_a_kernel(errors[0]):
            raise errors[0]

    try:
        with hardware.imagined(gpu), _Announced(say):
            prediction = predict(work, gpu=gpu, torch_ops=False)
    except KeyboardInterrupt:
        raise
    except Exception as error:
        if errors:
            raise ValueError(f"{path.name} could not be traced: {_said(errors[0], path)}") from error
        if str(error).startswith("predict: nothing was launched"):
            raise ValueError(
                f"{path.name} launches no Triton kernel: what a file launches when it runs is traced, so call the kernel at "
                'its end, on tensors such as torch.empty(4096, 4096, device="meta")'
            ) from None
        raise ValueError(f"{path.name}: {error}") from error
    title = (
        f"{path.name} on {gpu.name}: traffic is counted, machine code compiled, time modelled; no GPU took part, and "
        "nothing was computed"
    )
    ended = ""
    if errors:
        ended = f"{path.name} ended early, and what it launched before is shown. {_said(errors[0], path)}"
        if isinstance(errors[0], AssertionError):
            ended += " (a trace computes no values, so there is nothing to compare)"
    return Report(title, (), prediction, ended)


def _of_a_kernel(error: BaseException) -> bool:
    """Whether it was raised while a kernel ran or was looked at: what was counted of that launch is not whole."""
    from triton.runtime.errors import InterpreterError

    from gpukit.simulator.interpreter.faults import Fault

    return isinstance(error, (Fault, InterpreterError, NotImplementedError))


def _said(error: BaseException, path: Path) -> str:
    """An error of the file as one sentence with its line, and what helps against the most frequent ones."""
    from gpukit.simulator.interpreter.frames import original

    inner, _, line = original(error)
    if line is None:
        own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path.resolve()]
        line = own[-1].lineno if own else None
    words = " ".join(str(inner).split()) or "no message"
    kind = f"it ended with status {words}" if isinstance(inner, SystemExit) else f"{type(inner).__name__}: {words}"
    place = f"line {line}: " if line and f"line {line}" not in words else ""
    if "cuda" in words.lower() and ("not compiled with CUDA" in words or "NVIDIA" in words or "No CUDA" in words):
        kind += '. Without a GPU make the tensors on the meta device: device = "cuda" if torch.cuda.is_available() else "meta"'
    return f"{place}{kind}"


class _Announced(launches.Onlooker):
    """A context manager: inside, `say` is told of each launch and of what comes after the last one."""

    def __init__(self, say: Callable[[str], object]):
        self.say = say

    def begin(self, call) -> _Announced:
        self.kernel = call.kernel
        self.say(f"counting what {call.kernel} moves, {call.programs:,} programs")
        return self

    def turn_begins(self) -> None:
        pass

    def repeat(self, turn, steps, times, before, after) -> None:
        pass

    def rewind(self, state) -> None:
        pass

    def end(self) -> None:
        self.say(f"compiling {self.kernel} and playing its accesses through the caches")


def _alike(one: Step, other: Step) -> bool:
    return (one.name, one.launch.grid, one.launch.accesses) == (
        other.name,
        other.launch.grid,
        other.launch.accesses,
    ) and one.compiled.sass == other.compiled.sass


def report(op: Op, shape: tuple[int, ...], dtype: torch.dtype, gpu: hardware.Gpu) -> Report:
    """Traffic, compile facts and predicted time of the forward pass of our kernel. Needs the interpreter
    (TRITON_INTERPRET=1). Raises ValueError for an operation without a kernel and a shape or dtype that does not fit."""
    stood_in_for.clear()
    prediction = predict_op(op, shape, dtype, gpu)
    least = op.cost(shape, dtype)
    what = f"{op.name} {benchmark.shape_name(shape)} {str(dtype).removeprefix('torch.')} on {gpu.name}, forward"
    at_best = f"{least.bytes / gpu.hbm_gbps / 1e3:,.1f} µs at {gpu.hbm_gbps:,.0f} GB/s"
    title = f"{what}: traffic is counted, machine code compiled, time modelled; no GPU took part"
    facts = tables.facts(
        [("least traffic", f"{least.read_bytes:,} bytes read, {least.write_bytes:,} written; {at_best}")]
    )
    facts += _roofline(op, least, dtype, gpu, prediction.time_us)
    if stood_in_for:
        names = " and ".join(f"gpukit.kernels.{name}" for name in sorted(stood_in_for))
        on_the_gpu = f"the one for every GPU, where such a GPU runs one made for it, which is faster ({names})"
        facts += tables.facts([("kernel", on_the_gpu)])
    return Report(title, tuple(facts), prediction)


def _roofline(op: Op, least: Cost, dtype: torch.dtype, gpu: hardware.Gpu, time_us: float) -> list[str]:
    """Where the kernel lies below the roof: its useful FLOPs and least bytes, in the time that is predicted."""
    name = next(short for short, long in DTYPES.items() if long is dtype)
    if not least.flops or name not in gpu.peak_flops:
        return []
    point = roofline.Point(op.name, least.flops, least.bytes, time_us, "modelled")
    where = f"{point.intensity:.3g} FLOPs per byte, {roofline.limit(gpu, name, point.intensity)} side of the ridge at "
    share = f"{point.least_us(gpu, name) / time_us:.0%} of the roof"
    return tables.facts([("roofline", f"{where}{gpu.ridge(name):.3g}; {share} (modelled)")])


def _step_lines(step: Step, times: int) -> list[str]:
    launch, compiled = step.launch, step.compiled
    lines = [f"TRAFFIC of {heading(step, times)}", launch.report()]
    lines += ["", *map(tables.folded, tables.facts(cache_facts(step).items()))]
    return [*lines, "", f"MACHINE CODE of {launch.kernel}", tables.folded(compiled.report())]


def heading(step: Step, times: int) -> str:
    """A launch in a few words; `times`: how many like it there were in a row."""
    launch = step.launch
    how = "" if launch.sampled in (None, launch.programs) else f", {launch.sampled} of them looked at"
    programs = "1 program" if launch.programs == 1 else f"{launch.programs:,} programs"
    return f"{launch.kernel}, {programs}{how}{f'; each of {times:,} launches' if times > 1 else ''}"


def cache_facts(step: Step) -> dict[str, str]:
    """What a launch asks of L2 and of device memory."""
    launch, compiled = step.launch, step.compiled
    try:
        traffic = launch.traffic(compiled.gpu, compiled)
    except ValueError as error:  # too many irregular accesses
        facts = {"caches": str(error)}
    else:
        found = f"{traffic.l2_hit_rate:.0%} of the reads found there"
        dirty = f", {traffic.dirty_bytes:,} more still in L2 at the end" if traffic.dirty_bytes else ""
        changed = f", {traffic.l2_atomic_sectors:,} changed by atomics" if traffic.l2_atomic_sectors else ""
        facts = {
            "L2": f"{traffic.l2_read_sectors:,} sectors read, {traffic.l2_write_sectors:,} written{changed}; {found}",
            "device memory": f"{traffic.dram_read_bytes:,} bytes read, {traffic.dram_write_bytes:,} written{dirty}",
        }
    return facts


def predict_op(op: Op, shape: tuple[int, ...], dtype: torch.dtype, gpu: hardware.Gpu) -> Prediction:
    """The prediction for the forward pass of gpukit's kernel; its steps hold the traced launches and the machine code.
    Needs the interpreter. Raises ValueError as `report` does."""
    kernel = _kernel(op)
    own = ", ".join(map(benchmark.shape_name, op.bench_shapes))
    wrong = f"--shape {benchmark.shape_name(shape)} does not fit {op.name} (its benchmark shapes: {own})"
    least = op.cost(shape, dtype) if len(shape) == len(op.bench_shapes[0]) else None
    if least is not None and least.bytes > gpu.hbm_bytes:
        raise ValueError(
            f"--shape {benchmark.shape_name(shape)}: {op.name} moves at least {least.bytes / 1e9:,.0f} GB, and "
            f"{gpu.name} has {gpu.hbm_bytes / 1e9:,.0f} GB"
        )
    with Sizes(), hardware.imagined(gpu):
        try:
            inputs = op.make_inputs(shape, dtype, torch.Generator().manual_seed(0))
        except (ValueError, IndexError, TypeError, RuntimeError) as error:
            if "values to unpack" in str(error):
                takes = len(op.bench_shapes[0])
                raise ValueError(f"{wrong}: it takes {takes} sizes, and these are {len(shape)}") from None
            raise ValueError(f"{wrong}: {error}") from None
        try:
            with Sampled(1):  # what is launched to prepare the call makes floats, which have no values here
                call = op.build(kernel, inputs) if op.build else lambda: kernel(*inputs)
            return predict(call, gpu=gpu)
        except (TypeError, IndexError) as error:
            raise ValueError(f"{wrong}: {error}") from None


def _kernel(op: Op) -> Callable:
    try:
        found = benchmark.provider(op, "gpukit")
    except AttributeError:
        found = None
    if found is None:
        raise ValueError(f"{op.name} cannot be traced: gpukit.kernels has no {op.kernel or op.name}")
    return found


class Sizes(dispatch.Mode):
    """Inside the block PyTorch's floating-point results on the CPU have a size and no values: their memory is promised
    and never touched, so that a tensor larger than this machine costs nothing. Integers are computed, since they may be
    indices."""

    def operation(self, func, args, kwargs):
        try:
            return self._run(func, args, kwargs)
        except (RuntimeError, OSError) as error:
            if not isinstance(error, OSError) and "can't allocate memory" not in str(error):
                raise
            raise ValueError(f"{func} needs a tensor larger than this machine can promise") from None

    def _run(self, func, args, kwargs):
        name = func._schema.name.split("::")[-1]
        returned = [r.alias_info for r in func._schema.returns]
        views = any(alias is not None and not alias.is_write for alias in returned)
        given = dispatch.tensors((args, kwargs))
        floats = any(x.is_floating_point() for x in given)
        if name.startswith(("empty", "new_empty")):
            return _to_cpu(func(*_to_meta(args), **_to_meta({**kwargs, "device": "meta"})))
        if views or name == "_local_scalar_dense" or (given and not floats):
            return func(*args, **kwargs)
        written = [
            (args[i] if i < len(args) else kwargs.get(a.name))
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        if written:
            return written[0] if len(returned) == 1 else tuple(written) if returned else None
        if not given:  # one that makes a tensor of nothing; what it counts or draws in integers is needed
            fills = name in ("rand", "randn", "ones") and (kwargs.get("dtype") or torch.float32).is_floating_point
            return (
                _to_cpu(torch.empty(args[0], dtype=kwargs.get("dtype"), device="meta"))
                if fills
                else func(*args, **kwargs)
            )
        has_device = any(a.name == "device" for a in func._schema.arguments)
        out = func(*_to_meta(args), **_to_meta({**kwargs, **({"device": "meta"} if has_device else {})}))
        return _to_cpu(out)


def _to_meta(values):
    return dispatch.map_tensors(
        lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), values
    )


def _to_cpu(values):
    return dispatch.map_tensors(lambda x: _promised(x).as_strided(x.shape, x.stride()), values)


_NORESERVE = 0x4000  # of Linux' sys/mman.h; Python has a name for it from 3.13 on


def _promised(like: torch.Tensor) -> torch.Tensor:
    """Zeros for as many elements as `like` spans, in pages that exist once somebody writes to them."""
    last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    elements = 1 + last if like.numel() else 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * like.element_size(), flags=flags), dtype=like.dtype)
