"""Providers side by side: `gpukit bench softmax` measures on this GPU and records what it measured.

Every provider is compared with float64 first, then timed. The rows go to gpukit/results/<gpu>/<op>.csv, which notebooks
read where there is no GPU. `bytes` and `flops` are the least that the operation must move and do (`Op.cost`), so that a
provider's rate shows what it wastes.

An operation is measured as soon as a module of gpukit/reference holds its `Op`. Its providers are

    torch     op.reference, eager
    compile   torch.compile of op.reference
    library   op.library, PyTorch's own fused call
    gpukit    gpukit.kernels.<op.kernel or op.name>
    others    op.peers, by name: {"quack": "quack.softmax:softmax", "sdpa-cudnn": cudnn}

where a peer is a function that takes the reference's arguments (import a package that may be missing inside it), or
"module:name" of one; a peer called like one of the first four takes its place ("compile": what to compile). It measures
op.bench_shapes in op.bench_dtypes and op.bench_modes:

    fwd       the call             bwd   its gradient alone (where op.cost_bwd says what that costs)
    fwd+bwd   both in one call     wall  back to back, the host's time included: for optimizers and wrappers

An operation that changes its inputs or has state says so by `build(provider, inputs) -> call`: it makes copies and
whatever must exist first; `call()` is checked once, by what it returns, and then timed again and again.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib
import importlib.util
import json
import math
import os
import pkgutil
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpukit import hardware, tables
from gpukit.nearest import did_you_mean
from gpukit.op import Cost, Op

if TYPE_CHECKING:
    import torch

    from gpukit.timing import Timing

RESULTS = Path(__file__).parent / "results"
PROVIDERS = ("torch", "compile", "library", "gpukit")
FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
DTYPES = FLOATS | {long: long for long in FLOATS.values()}  # PyTorch's name of each dtype that a command takes
MODES = ("fwd", "bwd", "fwd+bwd", "wall")
MODE_WORDS = {"forward": "fwd", "backward": "bwd", "both": "fwd+bwd", **{mode: mode for mode in MODES}}
# Of a GPU: float64 references of longer tensors would take longer than the measurement. Of the CPU: what it does in 0.1 s.
_CHECKED_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 20}
_COPY_SHAPE = (32768, 16384)
# In which the providers take turns: the clock of a GPU falls as it gets hot, and one that came last would pay.
_ROUNDS = {"cuda": 3, "cpu": 1}
_GRAPHED = ("fwd", "bwd")


class BenchmarkFailed(RuntimeError):
    """gpukit gave a wrong result, or a time is impossible. The sound rows have been written."""


# ------------------------------------------------------------------------------------------------------------- records
@dataclass(frozen=True)
class Row:
    """One measurement; the fields are the columns of the CSV file."""

    op: str
    provider: str
    mode: str  # of MODES; "fwd-graph", "bwd-graph": replays of a CUDA graph, beside rows that are launch-bound
    dtype: str
    shape: tuple[int, ...]
    median_ms: float
    p20_ms: float
    p80_ms: float
    bytes: int
    flops: int
    peak_bytes: int  # device memory that the call took beyond its inputs
    gpu: str
    torch: str
    triton: str
    commit: str
    date: str
    note: str = ""
    sm_mhz: int = 0  # the SMs' clock right after the runs; 0: not known

    @property
    def gbps(self) -> float:
        return self.bytes / self.median_ms / 1e6

    @property
    def tflops(self) -> float:
        return self.flops / self.median_ms / 1e9

    @property
    def what(self) -> tuple:
        """A later measurement of the same thing replaces this row."""
        return self.op, self.provider, self.mode, self.dtype, self.shape


def rows(name: str, gpu: str = "h200") -> list[Row]:
    """The rows recorded in gpukit/results/<gpu>/<name>.csv. Raises FileNotFoundError, which says what there is."""
    path = RESULTS / gpu / f"{name}.csv"
    if not holds_times(path):
        there = sorted(f"{p.stem} on {p.parent.name}" for p in RESULTS.glob("*/*.csv") if holds_times(p))
        here = [each.removesuffix(f" on {gpu}") for each in there if each.endswith(f" on {gpu}")]
        elsewhere = [each for each in there if each.startswith(f"{name} on ")]
        hint, known = did_you_mean(name, here), ", ".join(elsewhere or here or there) or "none"
        more = f"{hint}  (all of them: {known})" if hint and not elsewhere else f"; there are: {known}"
        raise FileNotFoundError(f"no times of {name!r} on {gpu!r} are recorded{more}")
    return _read(path)


def notes(name: str, gpu: str = "h200") -> dict:
    """What was measured and is no row (call by call, over time): gpukit/results/<gpu>/<name>.json, {} where there is none."""
    path = RESULTS / gpu / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def holds_times(path: Path) -> bool:
    """Counters lie in the same folders."""
    return path.exists() and path.read_text().startswith("op,provider,mode,")


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [_parse(line) for line in csv.DictReader(file)]


def _parse(line: dict[str, str]) -> Row:
    kinds = {"float": float, "int": int, "str": str, "tuple[int, ...]": lambda s: tuple(int(n) for n in s.split("x"))}
    there = [field for field in fields(Row) if field.name in line or field.default is MISSING]
    return Row(**{field.name: kinds[str(field.type)](line[field.name]) for field in there})


def write(new: Iterable[Row], path: Path) -> None:
    """Add rows to the file; a row of the same thing is replaced."""
    merged = {row.what: row for row in [*_read(path), *new]}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        table.writeheader()
        for row in sorted(merged.values(), key=lambda row: (row.op, row.mode, row.dtype, row.shape, row.provider)):
            line = asdict(row)
            line["shape"] = shape_name(row.shape)
            for column in ("median_ms", "p20_ms", "p80_ms"):
                line[column] = f"{line[column]:.5g}"
            table.writerow(line)


def shape_name(shape: Sequence[int]) -> str:
    return "x".join(str(n) for n in shape)


# ---------------------------------------------------------------------------------------------------------- operations
@cache
def operations() -> dict[str, Op]:
    """Every `Op` of gpukit.reference, by its name. Imports PyTorch."""
    import gpukit.reference

    found: dict[str, Op] = {}
    for module in pkgutil.iter_modules(gpukit.reference.__path__):
        for value in vars(importlib.import_module(f"gpukit.reference.{module.name}")).values():
            if isinstance(value, Op) and found.setdefault(value.name, value) is not value:
                raise ValueError(f"two operations are called {value.name!r}")
    return found


@cache
def names() -> tuple[str, ...]:
    """The names of `operations()`, read from their modules' text: PyTorch takes seconds to import."""
    files = sorted((Path(__file__).parent / "reference").glob("*.py"))
    return tuple(name for file in files for name in re.findall(r'^    name="(\w+)",$', file.read_text(), re.MULTILINE))


def refuse_unknown(op: str, shape: str | None = None, dtype: str = "bf16") -> None:
    """Raises ValueError for an operation, a shape such as "4096x1024" or a dtype that `gpukit trace` cannot take, at once:
    PyTorch takes seconds to import."""
    if op not in names():
        raise ValueError(f"op must be one of {', '.join(names())}, got {op!r}{did_you_mean(op, names())}")
    if shape is not None and not all(size.isdecimal() and int(size) for size in shape.lower().split("x")):
        raise ValueError(f"--shape must be positive numbers with x between them, such as 4096x1024, got {shape!r}")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def operation(name: str) -> Op:
    """The operation called `name`. Raises ValueError, which lists them."""
    refuse_unknown(name)
    return operations()[name]


def providers_of(op: Op) -> tuple[str, ...]:
    """The names of everything that can compute `op`, ours last."""
    peers = [name for name in op.peers if name not in PROVIDERS]
    return "torch", "compile", "library", *peers, "gpukit"


def provider(op: Op, name: str) -> Callable | None:
    """The function to time, or None if its package is not installed."""
    import torch

    own = {"torch": op.reference, "compile": op.reference, "library": op.library}
    given = op.peers.get(name) or own.get(name) or f"gpukit.kernels:{op.kernel or op.name}"
    if isinstance(given, str):
        module, _, path = given.partition(":")
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return None
        given = importlib.import_module(module)
        for part in path.split("."):
            given = getattr(given, part)
    return torch.compile(given, dynamic=False) if name == "compile" else given


# --------------------------------------------------------------------------------------------------------------- a run
def run(
    op_name: str,
    providers: Sequence[str] | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
    dtypes: Sequence[str] | None = None,
    modes: Sequence[str] | None = None,
    *,
    device: str = "cuda",
    commit: str | None = None,
    out: Path | None = None,
    record: bool = True,
    rep_ms: float = 100,
    graph: bool = False,
    say: Callable[[str], None] = print,
    go_on: Callable[[int, int, str], bool] = lambda done, total, what: True,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure `op_name`, say a line per row and write the rows (on a GPU: to gpukit/results, or to the file `out`).

    providers, shapes, dtypes, modes   default: the operation's own; on the CPU fewer of a shape's first dimension
    commit    of the code measured; default: GPUKIT_COMMIT, else git's
    record    False: nothing is written, and the rate of a copy is not measured
    graph     forward and backward in a CUDA graph as well, not only where one of the calls is launch-bound
    go_on     (steps done, steps in all, what comes now) -> whether to go on; rows measured so far are kept
    on_row    called with each row as it is measured
    Raises BenchmarkFailed at the end if gpukit was wrong or a time impossible, ValueError for unknown names or a graph
    on the CPU, RuntimeError without a GPU (device="cpu" times PyTorch there, and writes only to `out`).
    """
    import torch
    import torch._functorch.config

    op = operation(op_name)
    _check(device, graph, rep_ms)
    steps = plan(op, providers, shapes, dtypes, modes, device)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    if not record:
        out = None
    elif out is None and device == "cuda":
        out = RESULTS / gpu_key(gpu) / f"{op_name}.csv"
    bench = _Bench(op, device, gpu, commit or _commit(), rep_ms, say, on_row)
    done = 0
    for shape, dtype in dict.fromkeys((step[0], step[1]) for step in steps):
        these = [step for step in steps if step[:2] == (shape, dtype)]
        # A compiled backward pass frees what it was given, unless told that it will run again.
        with torch._functorch.config.patch(donated_buffer=False):
            more = bench.measure(these, graph, lambda i, what, at=done: go_on(at + i, len(steps), what))
        done += len(these)
        if out is not None and bench.rows:
            write(bench.rows, out)  # after every shape: a run that is cut short keeps what it has
        if not more:
            break
    if device == "cuda" and record:
        bench.copy()
        write(bench.rows, out)
    say(summary(bench.rows))
    if bench.failures:
        raise BenchmarkFailed("; ".join(bench.failures))
    return bench.rows


def _check(device: str, graph: bool, rep_ms: float) -> None:
    import torch

    from gpukit.timing import check_ms

    check_ms(rep_ms=rep_ms)
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda or cpu, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "no GPU here, so nothing was measured; with --show, gpukit bench prints what is recorded, and with --device cpu it "
            "times PyTorch on the CPU"
        )
    if graph and device == "cpu":
        raise ValueError("graph: CUDA graphs need a GPU, got device cpu")


Step = tuple[tuple[int, ...], "torch.dtype", str, tuple[str, ...]]


def plan(op: Op, providers=None, shapes=None, dtypes=None, modes=None, device="cuda") -> list[Step]:
    """What a run measures: (shape, dtype, provider, modes), one provider at a time. Raises ValueError for unknown names."""
    import torch

    providers = providers or providers_of(op)
    modes = modes or [m for m in op.bench_modes if m not in ("bwd", "fwd+bwd") or op.cost_bwd or op.cost_both]
    known = dict.fromkeys([*PROVIDERS, *op.peers])
    for what, given, allowed in (("providers", providers, known), ("modes", modes, MODES)):
        if unknown := [name for name in given if name not in allowed]:
            raise ValueError(f"{what} must be among {', '.join(allowed)}, got {', '.join(unknown)}")
    floats = {_short(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    dtypes = dtypes or op.bench_dtypes
    if unknown := [name for name in dtypes if name not in floats]:
        raise ValueError(f"dtypes must be torch's names, such as bfloat16, got {', '.join(unknown)}")
    if shapes is None:
        shapes = op.bench_shapes if device == "cuda" else dict.fromkeys(_cut(op, s, device) for s in op.bench_shapes)
    for shape in shapes:
        if len(shape) != len(op.bench_shapes[0]) or min(shape) < 1:
            raise ValueError(
                f"shapes must be of {len(op.bench_shapes[0])} positive numbers for {op.name}, such as "
                f"{shape_name(op.bench_shapes[0])}, got {shape_name(shape)}"
            )
    own = [p for p in providers if p in providers_of(op)]
    return [(tuple(s), floats[d], p, tuple(modes)) for s in shapes for d in dtypes for p in own]


def gpu_key(gpu: str) -> str:
    """The folder of a GPU's results: its key in gpukit.hardware, or its name without blanks."""
    try:
        return hardware.gpu(gpu).key
    except ValueError:
        return gpu.lower().replace("nvidia", "").strip().replace(" ", "-")


def _commit() -> str:
    if named := os.environ.get("GPUKIT_COMMIT"):
        return named
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("-changed" if changed.stdout.strip() else "")


def identity(gpu: str, commit: str = "") -> dict[str, str]:
    """What all rows of one run share: GPU, versions, commit and date."""
    import torch

    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else ""
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": triton,
        "commit": commit or _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


class _Bench:
    """The rows of one run, and what all of them share."""

    def __init__(self, op: Op, device: str, gpu: str, commit: str, rep_ms: float, say: Callable, on_row: Callable):
        self.op, self.device, self.rep_ms, self.say, self.on_row = op, device, rep_ms, say, on_row
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self.same = identity(gpu, commit)

    def measure(self, steps: list[Step], graph: bool, go_on: Callable[[int, str], bool]) -> bool:
        """Time the providers of one shape and dtype. False if `go_on` said so."""
        import torch

        from gpukit.timing import refuse_interpreter

        shape, dtype, _, modes = steps[0]
        torch.compiler.reset()  # each shape is compiled for itself, as dynamic=False says
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()  # what the graphs of the shape before kept in pools of their own
        try:
            inputs = make_inputs(self.op, shape, dtype, self.device)
        except torch.OutOfMemoryError as error:
            self.say(f"{shape_name(shape)} {_short(dtype)}: not timed: {_first_line(error)}")
            return True
        small = _cut(self.op, shape, self.device)
        truth = _Truth(self.op, inputs if small == shape else make_inputs(self.op, small, dtype, self.device), modes)
        ready, more = {}, True
        for done, (*_, name, _) in enumerate(steps):
            what = f"{name} {shape_name(shape)} {_short(dtype)}"
            if not (more := go_on(done, f"{self.op.name} {what}")):
                break
            with self._reported(name, what):
                fn = provider(self.op, name)
                if fn is None:
                    self.say(f"{what}: not installed, skipped")
                    continue
                refuse_interpreter(_call(self.op, fn, truth.inputs))
                if wrong := truth.refutes(fn):
                    self._fail(f"{what}: not timed: {wrong}", ours=name == "gpukit")
                    continue
                ready[name] = fn
        del truth
        for mode in modes:
            timed = self._time(ready, mode, shape, dtype, inputs)
            if mode in _GRAPHED and self.op.build is None and (graph or any(row.note for row in timed)):
                self._time({row.provider: ready[row.provider] for row in timed}, mode, shape, dtype, inputs, graph=True)
        return more

    @contextmanager
    def _reported(self, name: str, what: str) -> Iterator[None]:
        """An error inside costs a provider its rows, not the run."""
        from gpukit.timing import NotTimed

        try:
            yield
        except NotTimed as error:
            self.say(f"{what}: {error}")
        except Exception as error:  # out of memory, or a shape that is refused
            if isinstance(error, ModuleNotFoundError) and name != "gpukit":  # a peer imports it when it is called
                self.say(f"{what}: {error.name} is not installed, skipped")
                return
            self._fail(f"{what}: {_first_line(error)}", ours=name == "gpukit" or _is_impossible(error))

    def _fail(self, line: str, ours: bool) -> None:
        self.say(line)
        if ours:
            self.failures.append(line)

    def _cost(self, mode: str, shape: tuple[int, ...], dtype: torch.dtype) -> Cost | None:
        op = self.op
        if mode == "bwd":
            return op.cost_bwd and op.cost_bwd(shape, dtype)
        if mode != "fwd+bwd":
            return op.cost(shape, dtype)
        if op.cost_both:
            return op.cost_both(shape, dtype)
        there, back = op.cost(shape, dtype), op.cost_bwd and op.cost_bwd(shape, dtype)
        return back and Cost(*(getattr(there, f.name) + getattr(back, f.name) for f in fields(Cost)))

    def _time(self, fns: dict, mode: str, shape, dtype, inputs, *, graph: bool = False) -> list[Row]:
        """Time these providers in rounds, and make of each one's median round a row."""
        if (cost := self._cost(mode, shape, dtype)) is None:
            return []
        rounds, peak = {name: [] for name in fns}, {}
        for turn in range(_ROUNDS[self.device]):
            for name in [*fns][:: -1 if turn % 2 else 1]:
                with self._reported(name, f"{name} {shape_name(shape)} {_short(dtype)} {mode}" + " in a graph" * graph):
                    timing, peak[name] = self._round(fns[name], mode, dtype, inputs, cost, graph)
                    rounds[name].append(timing)
                    continue
                del fns[name]  # it failed, and takes no part any more
        named, rows = f"{mode}-graph" if graph else mode, []
        for name in fns:
            times = sorted(rounds[name], key=lambda timing: timing.median_ms)
            rows.append(self._add(name, named, dtype, shape, times[len(times) // 2], cost, peak[name]))
        return rows

    def _round(self, fn, mode: str, dtype, inputs, cost: Cost, graph: bool) -> tuple[Timing, int]:
        """One provider's time, and the memory that the call takes."""
        import torch

        from gpukit.timing import copied, time_ms

        inputs = copied(inputs)  # some providers write gradients into them, and the next would get what they left
        rep_ms = self.rep_ms / _ROUNDS[self.device]
        dtype = getattr(torch, self.op.arithmetic) if self.op.arithmetic else dtype
        options = {"cost": cost, "dtype": dtype, "device": self.device, "rep_ms": rep_ms, "warmup_ms": min(rep_ms, 25)}
        gradient = mode in ("bwd", "fwd+bwd") and partial(_gradient, self.op, fn, forward=mode == "fwd+bwd")
        if graph:
            return time_ms(fn, *inputs, graph=True, prepare=gradient or None, **options), 0
        call, arguments = (fn, inputs) if self.op.build is None else (_call(self.op, fn, inputs), ())
        if gradient:
            call, arguments = gradient(inputs), ()
        timing = time_ms(call, *arguments, wall=mode == "wall", **options)
        return timing, peak_bytes(call, arguments, self.device)

    def copy(self) -> None:
        """What the memory system gives to the simplest kernel: the rate that the others are checked against."""
        import torch

        from gpukit.timing import time_ms

        x = torch.randn(_COPY_SHAPE, device=self.device, dtype=torch.bfloat16)
        y = torch.empty_like(x)
        cost = Cost(x.nbytes, x.nbytes, 0)
        timing = time_ms(y.copy_, x, rep_ms=self.rep_ms, cost=cost, dtype=x.dtype)
        self._add("torch", "fwd", x.dtype, _COPY_SHAPE, timing, cost, 0, op="copy")

    def _add(self, name, mode, dtype, shape, timing: Timing, cost: Cost, peak_bytes: int, op: str = "") -> Row:
        row = Row(
            op=op or self.op.name,
            provider=name,
            mode=mode,
            dtype=_short(dtype),
            shape=shape,
            median_ms=timing.median_ms,
            p20_ms=timing.p20_ms,
            p80_ms=timing.p80_ms,
            bytes=cost.bytes,
            flops=cost.flops,
            peak_bytes=peak_bytes,
            note="launch-bound" if timing.launch_bound else "",
            sm_mhz=timing.sm_mhz,
            **self.same,
        )
        self.rows.append(row)
        self.on_row(row)
        self.say(line(row))
        return row


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _is_impossible(error: Exception) -> bool:
    from gpukit.timing import ImpossibleTime

    return isinstance(error, ImpossibleTime)


def _cut(op: Op, shape: tuple[int, ...], device: str) -> tuple[int, ...]:
    """`shape` with fewer of its first dimension, or what the operation says."""
    if op.check_shape is not None:
        return op.check_shape(shape)
    per_row = max(1, math.prod(shape[1:]))
    return (max(1, min(shape[0], _CHECKED_ELEMENTS[device] // per_row)), *shape[1:])


def make_inputs(op: Op, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple:
    """The operation's inputs on `device`. They are made there: the CPU would take seconds for what a GPU needs."""
    import torch

    try:
        with torch.device(device):
            inputs = op.make_inputs(shape, dtype, torch.Generator(device).manual_seed(0))
    except (RuntimeError, ValueError):  # it insists on the CPU
        inputs = op.make_inputs(shape, dtype, torch.Generator().manual_seed(0))
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs)


def _call(op: Op, fn: Callable, inputs: tuple) -> Callable:
    return (lambda: fn(*inputs)) if op.build is None else op.build(fn, inputs)


def _leaves(op: Op, inputs: tuple, convert: Callable) -> list:
    """Copies of the inputs that collect gradients where the operation has them."""
    import torch

    copies = [convert(x.detach()) if isinstance(x, torch.Tensor) else x for x in inputs]
    wanted = [i for i, x in enumerate(copies) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for i in wanted if op.grads is None else op.grads:
        copies[i].requires_grad_()
    return copies


def _several(result) -> tuple:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


class _Truth:
    """What an operation gives for `inputs`, in float64 and from PyTorch in the inputs' own dtype."""

    def __init__(self, op: Op, inputs: tuple, modes: Sequence[str]):
        self.op, self.inputs = op, inputs
        self.backward = op.build is None and op.observed is None and any("bwd" in mode for mode in modes)

    def _results(self, fn: Callable, convert: Callable) -> tuple[tuple, tuple]:
        """Results and gradients."""
        import torch

        if not self.backward:
            with torch.no_grad() if self.op.build is None else torch.enable_grad():
                copies = tuple(convert(x.detach()) if isinstance(x, torch.Tensor) else x for x in self.inputs)
                result = _call(self.op, fn, copies)()
                return _several(result if self.op.observed is None else self.op.observed(copies, result)), ()
        leaves = _leaves(self.op, self.inputs, convert)
        y = _several(fn(*leaves))
        dy = _upstream(y)
        gradients = torch.autograd.grad(y, [x for x in leaves if getattr(x, "requires_grad", False)], dy)
        return tuple(part.detach() for part in y), gradients

    def refutes(self, fn: Callable) -> str:
        """What is wrong with fn's result or gradient by the project's tolerance rule, or ""."""
        import torch

        from gpukit.testing import compare

        if not hasattr(self, "truth"):
            self.truth = self._results(self.op.reference, lambda x: x.double() if x.is_floating_point() else x.clone())
            self.native = self._results(self.op.library, torch.clone)
        given = self._results(fn, torch.clone)
        for kind in (0, 1):
            for i, (y, truth, native) in enumerate(zip(given[kind], self.truth[kind], self.native[kind], strict=True)):
                what = ("gradient" if kind else "result") + (f" {i}" if len(given[kind]) > 1 else "")
                if y.shape != truth.shape or y.dtype != native.dtype:
                    return f"{what} is {list(y.shape)} {y.dtype}, expected {list(truth.shape)} {native.dtype}"
                if mismatch := compare(y, truth, native, gradient=bool(kind)):
                    return f"{what}: {mismatch}"
        return ""


def _upstream(y: tuple) -> tuple:
    """Gradients from above, the same for every provider and dtype. Of a loss it is 1, as backward() has it: who makes the
    gradient along with the loss need not touch it again then."""
    import torch

    return tuple(
        torch.ones_like(part)
        if part.ndim == 0
        else torch.randn(part.shape, generator=torch.Generator(part.device).manual_seed(1), device=part.device).to(
            part.dtype
        )
        for part in y
    )


def _gradient(op: Op, fn: Callable, inputs: tuple, *, forward: bool) -> Callable:
    """A function that runs the backward pass of fn, as often as it is called; with the forward pass before it or not."""
    import torch

    leaves = _leaves(op, inputs, lambda x: x)
    wanted = [x for x in leaves if getattr(x, "requires_grad", False)]
    y = _several(fn(*leaves))
    dy = _upstream(y)
    if forward:
        return lambda: torch.autograd.grad(_several(fn(*leaves)), wanted, dy)
    return lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True)


def peak_bytes(call: Callable, arguments: tuple, device: str) -> int:
    """Device memory that the call takes beyond what is there before it; 0 on the CPU."""
    import torch

    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(*arguments)
    return torch.cuda.max_memory_allocated() - before


# --------------------------------------------------------------------------------------------------------- in words
def line(row: Row) -> str:
    """A row as a line of text."""
    rate = f"{row.tflops:7.1f} TFLOP/s" if counts_flops(row) else f"{row.gbps:7.{0 if row.gbps >= 10 else 2}f} GB/s"
    return (
        f"{row.op:10} {row.mode:9} {row.dtype:9} {shape_name(row.shape):12} {row.provider:8}"
        f"{row.median_ms * 1e3:10.1f} µs {rate}  {row.note}".rstrip()
    )


def counts_flops(row: Row) -> bool:
    """Whether arithmetic, not memory, limits the operation: more than 100 FLOPs a byte, the ridge of an H200 being 206."""
    return row.flops > 100 * row.bytes


def when(rows: Iterable[Row]) -> str:
    """The day on which these rows were measured, or the first and the last one; empty for no rows."""
    days = sorted({row.date for row in rows})
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else ""


def best_peer(rows: Iterable[Row]) -> Row | None:
    """The fastest of these rows that is neither a kernel of this project (gpukit, gpukit-inplace) nor the learner's, or None.
    What a claim of speed is measured by is decided here alone: by everything that was recorded, whatever a table shows."""
    others = (row for row in rows if not row.provider.startswith("gpukit") and row.provider != "yours")
    return min(others, key=lambda row: row.median_ms, default=None)


def summary(rows: Sequence[Row]) -> str:
    """By shape: how much faster gpukit is than the best of the others, and which share of the copy rate it reaches."""
    copy = next((row.gbps for row in rows if row.op == "copy"), None)
    lines = []
    for ours in [row for row in rows if row.provider == "gpukit"]:
        best = best_peer(row for row in rows if row.what[2:] == ours.what[2:] and row.op == ours.op)
        text = f"{ours.op} {ours.mode} {ours.dtype} {shape_name(ours.shape)}: {ours.median_ms * 1e3:.1f} µs"
        if best:
            text += f", {best.median_ms / ours.median_ms:.2f} x as fast as {best.provider}"
        if copy and not counts_flops(ours):
            text += f", {ours.gbps / copy:.2f} of the copy rate"
        lines.append(text)
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- command line
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpukit bench`."""
    parser.add_argument(
        "ops", nargs="*", metavar="OP", help="operations, such as softmax (without any they are listed), or all"
    )
    parser.add_argument("--providers", type=_words, metavar="torch,gpukit", help="default: all that an operation has")
    parser.add_argument("--shape", type=_shapes, metavar="4096x1024,8192x781", help="default: the operation's own")
    parser.add_argument("--dtype", type=_words, metavar="bfloat16,float32", help="default: the operation's own")
    parser.add_argument(
        "--mode", type=_modes, metavar="forward,backward,both,wall", help="default: the operation's own"
    )
    parser.add_argument("--graph", action="store_true", help="time forward and backward in a CUDA graph as well")
    parser.add_argument(
        "--seconds", type=_seconds, metavar="N", help="begin nothing new after N seconds; keep what is there"
    )
    parser.add_argument(
        "--rep-ms", type=float, default=100, metavar="N", help="time for each row (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="default: %(default)s")
    parser.add_argument("--commit", help="of the code measured (default: GPUKIT_COMMIT, else git's)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write DIR/<gpu>/<op>.csv (default: gpukit/results); with --show, pictures",
    )
    parser.add_argument(
        "--show", action="store_true", help="measure nothing; print what is recorded on --gpu, with --out draw it, too"
    )
    parser.add_argument("--gpu", help="with --show: a GPU with recorded rows (default: h200)")


def _words(text: str) -> list[str]:
    words = [word for word in text.split(",") if word]
    if not words:
        raise argparse.ArgumentTypeError(f"must name at least one, got {text!r}")
    return words


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return seconds


def _modes(text: str) -> list[str]:
    if unknown := [word for word in _words(text) if word not in MODE_WORDS]:
        raise argparse.ArgumentTypeError(f"must be among {', '.join(MODE_WORDS)}, got {', '.join(unknown)}")
    return [MODE_WORDS[word] for word in _words(text)]


def _shapes(text: str) -> list[tuple[int, ...]]:
    try:
        return [tuple(int(n) for n in shape.split("x")) for shape in _words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 4096x1024,8192x781, got {text!r}") from None


def command(given: argparse.Namespace) -> int:
    """`gpukit bench`: the exit status, 1 where something was wrong."""
    try:
        ops = [operation(name) for name in (names() if given.ops == ["all"] else given.ops)]
        if given.providers and (unknown := set(given.providers) - {p for op in ops for p in (*PROVIDERS, *op.peers)}):
            raise ValueError(f"providers: none of these operations knows {', '.join(sorted(unknown))}")
        _check(given.device, given.graph, given.rep_ms)
        total = sum(len(_plan_of(op, given)) for op in ops)
    except (ValueError, RuntimeError) as error:
        print(tables.folded(f"gpukit: {error}"), file=sys.stderr)
        return 2
    import torch

    progress = _Progress(total, given.seconds)
    failed = 0
    for op in ops:
        steps = _plan_of(op, given)
        if progress.left_out:  # out of time: not even the inputs are made
            progress.left_out += len(steps)
            continue
        gpu = gpu_key(torch.cuda.get_device_name()) if given.device == "cuda" else "cpu"
        try:
            run(
                op.name,
                list(dict.fromkeys(step[2] for step in steps)),
                given.shape,
                given.dtype,
                given.mode,
                device=given.device,
                commit=given.commit,
                out=given.out and given.out / gpu / f"{op.name}.csv",
                rep_ms=given.rep_ms,
                graph=given.graph,
                say=progress.say,
                go_on=progress.go_on,
            )
        except (BenchmarkFailed, ValueError, ImportError) as error:
            progress.say(f"{op.name}: {_first_line(error)}")
            failed = 1
        progress.before += len(steps)
    progress.end()
    return failed


def _plan_of(op: Op, given: argparse.Namespace) -> list[Step]:
    providers = given.providers and [p for p in given.providers if p in (*PROVIDERS, *op.peers)]
    return plan(op, providers, given.shape, given.dtype, given.mode, given.device) if providers != [] else []


class _Progress:
    """Steps done, steps left and the time for them: a bar on a terminal, where each line of a row pushes it down."""

    def __init__(self, total: int, seconds: float | None):
        self.total, self.seconds, self.before, self.left_out = total, seconds, 0, 0
        self.start = time.monotonic()
        self.bar = ""

    def go_on(self, done: int, total: int, what: str) -> bool:
        done += self.before
        spent = time.monotonic() - self.start
        if self.seconds is not None and spent > self.seconds:
            self.left_out = self.before + total - done
            return False
        left = f"{spent / done * (self.total - done):.0f} s left" if done else ""
        filled = 30 * done // max(self.total, 1)
        self.bar = f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{self.total} {left}  {what}"
        self._draw()
        return True

    def say(self, text: str) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        if text:
            print(text, flush=True)
        self._draw()

    def _draw(self) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{self.bar[:100]}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        self.bar = ""
        self.say(f"out of time: {self.left_out} of {self.total} steps were not begun" if self.left_out else "")
