"""Providers side by side: `python -m gpukit.benchmark softmax` measures on this GPU and records what it measured.

Every provider is compared with float64 first, then timed. The rows go to gpukit/results/<gpu>/<op>.csv, which notebooks
read where there is no GPU. `bytes` and `flops` are the least that the operation must move and do (`Op.cost`), so that a
provider's rate shows what it wastes.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import math
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gpukit import hardware
from gpukit.op import Cost, Op

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gpukit.timing import Timing

RESULTS = Path(__file__).parent / "results"
PROVIDERS = ("torch", "compile", "library", "liger", "gpukit")
MODES = ("fwd", "bwd")
# "fwd-graph" rows come by themselves beside "fwd" rows that are launch-bound.
_LIGER = {"softmax": ("liger_kernel.ops.softmax", "LigerSoftmaxFunction")}
_CHECKED_ELEMENTS = 1 << 24
_COPY_SHAPE = (32768, 16384)


class BenchmarkFailed(RuntimeError):
    """gpukit gave a wrong result, or a time is impossible. The sound rows have been written."""


@dataclass(frozen=True)
class Row:
    """One measurement; the fields are the columns of the CSV file."""

    op: str
    provider: str  # torch: the reference, eager; compile: torch.compile of it; library: PyTorch's fused call; gpukit
    mode: str  # fwd, bwd, fwd-graph
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


def ops() -> list[str]:
    """The operations that can be measured: the modules of gpukit.reference."""
    import gpukit.reference

    return [module.name for module in pkgutil.iter_modules(gpukit.reference.__path__)]


def _op(name: str) -> Op:
    if name not in ops():
        raise ValueError(f"op must be one of {', '.join(ops())}, got {name!r}")
    return importlib.import_module(f"gpukit.reference.{name}").OP


def rows(op_name: str, gpu: str = "h200") -> list[Row]:
    """The recorded rows of `op_name` on `gpu`, a key of gpukit.hardware. Raises FileNotFoundError: what there is."""
    path = RESULTS / gpu / f"{op_name}.csv"
    if not path.exists():
        there = sorted(f"{p.stem} on {p.parent.name}" for p in RESULTS.glob("*/*.csv") if p.stem in ops())
        raise FileNotFoundError(
            f"no times of {op_name!r} on {gpu!r} are recorded; there are: {', '.join(there) or 'none'}"
        )
    return _read(path)


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [_parse(line) for line in csv.DictReader(file)]


def _parse(line: dict[str, str]) -> Row:
    kinds = {"float": float, "int": int, "str": str, "tuple[int, ...]": lambda s: tuple(int(n) for n in s.split("x"))}
    return Row(**{field.name: kinds[str(field.type)](line[field.name]) for field in fields(Row)})


def write(new: Iterable[Row], path: Path) -> None:
    """Add rows to the file; a row of the same thing is replaced."""
    merged = {row.what: row for row in [*_read(path), *new]}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        table.writeheader()
        for row in sorted(merged.values(), key=lambda row: (row.op, row.mode, row.dtype, row.shape, row.provider)):
            line = asdict(row)
            line["shape"] = _name(row.shape)
            for column in ("median_ms", "p20_ms", "p80_ms"):
                line[column] = f"{line[column]:.5g}"
            table.writerow(line)


def _name(shape: Sequence[int]) -> str:
    return "x".join(str(n) for n in shape)


def run(
    op_name: str,
    providers: Sequence[str] = PROVIDERS,
    shapes: Sequence[tuple[int, ...]] | None = None,
    dtypes: Sequence[str] = ("bfloat16",),
    modes: Sequence[str] = MODES,
    *,
    device: str = "cuda",
    commit: str | None = None,
    out: Path | None = None,
    rep_ms: float = 100,
) -> list[Row]:
    """Measure `op_name`, print a line per row and write the rows (on a GPU: to gpukit/results, or to `out`).

    shapes    default: the operation's bench_shapes
    dtypes    names of torch dtypes
    commit    of the code measured; default: GPUKIT_COMMIT, else git's
    Raises BenchmarkFailed at the end if gpukit was wrong or a time impossible, ValueError for unknown names,
    RuntimeError without a GPU (device="cpu" times PyTorch there, and writes only to `out`).
    """
    import torch
    import torch._functorch.config

    op = _op(op_name)
    for what, given, known in (("providers", providers, PROVIDERS), ("modes", modes, MODES)):
        if unknown := set(given) - set(known):
            raise ValueError(f"{what} must be among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"no GPU here, so nothing was measured; recorded times: gpukit.benchmark.rows({op_name!r}); "
            "device='cpu' times PyTorch on the CPU"
        )
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    if out is None and device == "cuda":
        out = RESULTS / _key(gpu) / f"{op_name}.csv"
    bench = _Bench(op, device, gpu, commit or _commit(), rep_ms)
    for shape in shapes or op.bench_shapes:
        for dtype in dtypes:
            # A compiled backward pass frees what it was given, unless told that it will run again.
            with torch._functorch.config.patch(donated_buffer=False):
                bench.measure(tuple(shape), getattr(torch, dtype), providers, modes)
            if out is not None:
                write(bench.rows, out)  # after every shape: a run that is cut short keeps what it has
    if device == "cuda":
        bench.copy()
        write(bench.rows, out)
    print(summary(bench.rows))
    if bench.failures:
        raise BenchmarkFailed("; ".join(bench.failures))
    return bench.rows


def _key(gpu: str) -> str:
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


class _Bench:
    """The rows of one run, and what all of them share."""

    def __init__(self, op: Op, device: str, gpu: str, commit: str, rep_ms: float):
        import torch
        import triton

        self.op, self.device, self.rep_ms = op, device, rep_ms
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self.same = {
            "gpu": gpu,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        }

    def measure(self, shape, dtype, providers, modes) -> None:
        import torch

        from gpukit.timing import NotTimed

        torch.compiler.reset()  # each shape is compiled for itself, as dynamic=False says
        generator = torch.Generator().manual_seed(0)
        small = self.op.make_inputs(_cut(shape), dtype, generator)
        inputs = tuple(x.to(self.device) for x in self.op.make_inputs(shape, dtype, generator))
        for provider in providers:
            what = f"{provider} {_name(shape)} {_short(dtype)}"
            try:
                fn = _provider(self.op, provider)
                if fn is None:
                    print(f"{what}: not installed, skipped")
                elif wrong := _wrong(self.op, fn, small, modes, self.device):
                    self._fail(f"{what}: not timed: {wrong}", ours=provider == "gpukit")
                else:
                    for mode in modes:
                        self._time(provider, fn, mode, shape, dtype, inputs)
            except NotTimed as error:
                print(f"{what}: {error}")
            except (
                Exception
            ) as error:  # a provider that is out of memory or refuses a shape costs its rows, not the run
                self._fail(f"{what}: {_first_line(error)}", ours=provider == "gpukit" or _is_impossible(error))
        measured = [row for row in self.rows if row.shape == shape and row.dtype == _short(dtype)]
        if any(row.mode == "fwd" and row.note for row in measured):
            self._graphs({row.provider: row for row in measured if row.mode == "fwd"}, dtype, inputs)

    def _fail(self, line: str, ours: bool) -> None:
        print(line)
        if ours:
            self.failures.append(line)

    def _time(self, provider, fn, mode, shape, dtype, inputs) -> None:
        from gpukit.timing import time_ms

        cost = self.op.cost if mode == "fwd" else self.op.cost_bwd
        if cost is None:
            return
        cost = cost(shape, dtype)
        call, arguments = (fn, inputs) if mode == "fwd" else (_backward(fn, inputs), ())
        timing = time_ms(call, *arguments, rep_ms=self.rep_ms, cost=cost, dtype=dtype)
        self._add(provider, mode, dtype, shape, timing, cost, _peak_bytes(call, arguments, self.device))

    def _graphs(self, launch_bound: dict[str, Row], dtype, inputs) -> None:
        """All providers again without the CPU: beside one launch-bound row the others cannot be judged either."""
        from gpukit.timing import time_ms

        for provider, row in launch_bound.items():
            cost = self.op.cost(row.shape, dtype)
            try:
                fn = _provider(self.op, provider)
                timing = time_ms(fn, *inputs, graph=True, rep_ms=self.rep_ms, cost=cost, dtype=dtype)
                self._add(provider, "fwd-graph", dtype, row.shape, timing, cost, row.peak_bytes)
            except Exception as error:
                line = f"{provider} {_name(row.shape)} in a graph: {_first_line(error)}"
                self._fail(line, ours=provider == "gpukit" or _is_impossible(error))

    def copy(self) -> None:
        """What the memory system gives to the simplest kernel: the rate that the others are held against."""
        import torch

        from gpukit.timing import time_ms

        x = torch.randn(_COPY_SHAPE, device=self.device, dtype=torch.bfloat16)
        y = torch.empty_like(x)
        cost = Cost(x.nbytes, x.nbytes, 0)
        timing = time_ms(y.copy_, x, rep_ms=self.rep_ms, cost=cost, dtype=x.dtype)
        self._add("torch", "fwd", x.dtype, _COPY_SHAPE, timing, cost, 0, op="copy")

    def _add(self, provider, mode, dtype, shape, timing: Timing, cost: Cost, peak_bytes: int, op: str = "") -> None:
        row = Row(
            op=op or self.op.name,
            provider=provider,
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
            **self.same,
        )
        self.rows.append(row)
        print(_line(row), flush=True)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _is_impossible(error: Exception) -> bool:
    from gpukit.timing import ImpossibleTime

    return isinstance(error, ImpossibleTime)


def _cut(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with fewer rows: float64 references of full tensors would take longer than the measurement."""
    per_row = max(1, math.prod(shape[1:]))
    return (max(1, min(shape[0], _CHECKED_ELEMENTS // per_row)), *shape[1:])


def _provider(op: Op, name: str) -> Callable | None:
    """The function to time, or None if its package is not installed."""
    import torch

    if name == "torch":
        return op.reference
    if name == "library":
        return op.library
    if name == "compile":
        return torch.compile(op.reference, dynamic=False)
    if name == "gpukit":
        return getattr(importlib.import_module("gpukit.kernels"), op.name)
    if op.name not in _LIGER or importlib.util.find_spec("liger_kernel") is None:
        return None
    module, function = _LIGER[op.name]
    return getattr(importlib.import_module(module), function).apply


def _wrong(op: Op, fn: Callable, inputs: tuple[Tensor, ...], modes: Sequence[str], device: str) -> str:
    """What is wrong with fn's result or gradient by the project's tolerance rule, or ""."""
    import torch

    from gpukit.testing import compare

    backward = "bwd" in modes and op.cost_bwd is not None

    def results(call, convert):
        arguments = [convert(x) for x in inputs]
        if backward:
            arguments = [x.requires_grad_(x.is_floating_point()) for x in arguments]
        y = call(*arguments)
        if not backward:
            return y, ()
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        dy = dy.to(inputs[0].dtype).to(y.dtype).to(y.device)
        return y.detach(), torch.autograd.grad(y, [x for x in arguments if x.requires_grad], dy)

    y, gradients = results(fn, lambda x: x.detach().clone().to(device))
    truth, true_gradients = results(op.reference, lambda x: x.detach().to(device, torch.float64))
    native, native_gradients = results(op.library, lambda x: x.detach().clone().to(device))
    if y.shape != truth.shape or y.dtype != native.dtype:
        return f"result is {list(y.shape)} {y.dtype}, expected {list(truth.shape)} {native.dtype}"
    if mismatch := compare(y, truth, native):
        return f"result: {mismatch}"
    for given, true, plain in zip(gradients, true_gradients, native_gradients, strict=True):
        if mismatch := compare(given, true, plain, gradient=True):
            return f"gradient: {mismatch}"
    return ""


def _backward(fn: Callable, inputs: tuple[Tensor, ...]) -> Callable:
    """A function that runs only the backward pass of fn, as often as it is called."""
    import torch

    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    y = fn(*leaves)
    dy = torch.randn(y.shape, device=y.device, dtype=y.dtype)
    wanted = [x for x in leaves if x.requires_grad]
    return lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True)


def _peak_bytes(call: Callable, arguments: tuple, device: str) -> int:
    import torch

    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(*arguments)
    return torch.cuda.max_memory_allocated() - before


def _line(row: Row) -> str:
    return (
        f"{row.op:10} {row.mode:9} {row.dtype:9} {_name(row.shape):12} {row.provider:8}"
        f"{row.median_ms * 1e3:10.1f} us {row.gbps:7.0f} GB/s  {row.note}".rstrip()
    )


def summary(rows: Sequence[Row]) -> str:
    """By shape: how much faster gpukit is than the best of the others, and which share of the copy rate it reaches."""
    copy = next((row.gbps for row in rows if row.op == "copy"), None)
    lines = []
    for ours in [row for row in rows if row.provider == "gpukit"]:
        others = [row for row in rows if row.what[2:] == ours.what[2:] and row.op == ours.op and row is not ours]
        line = f"{ours.op} {ours.mode} {ours.dtype} {_name(ours.shape)}: {ours.median_ms * 1e3:.1f} us"
        if others:
            best = min(others, key=lambda row: row.median_ms)
            line += f", {best.median_ms / ours.median_ms:.2f} x as fast as {best.provider}"
        if copy:
            line += f", {ours.gbps / copy:.2f} of the copy rate"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpukit.benchmark", description=__doc__.splitlines()[0])
    parser.add_argument("op", help=f"one of {', '.join(ops())}")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="default: %(default)s")
    parser.add_argument("--shapes", default="", help="such as 4096x1024,8192x781; default: the operation's own")
    parser.add_argument("--dtypes", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--modes", default=",".join(MODES), help="default: %(default)s")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--commit", help="of the code measured; default: GPUKIT_COMMIT, else git's")
    parser.add_argument("--out", type=Path, help="CSV file to add to; default: gpukit/results/<gpu>/<op>.csv")
    parser.add_argument("--rep-ms", type=float, default=100, help="time to spend on each row; default: %(default)s")
    parser.add_argument("--show", metavar="GPU", nargs="?", const="h200", help="print the recorded rows; default: h200")
    given = parser.parse_args(arguments)
    try:
        if given.show:
            recorded = rows(given.op, given.show)
            print(*map(_line, recorded), summary(recorded), sep="\n")
            return 0
        run(
            given.op,
            given.providers.split(","),
            [tuple(int(n) for n in shape.split("x")) for shape in given.shapes.split(",") if shape] or None,
            given.dtypes.split(","),
            given.modes.split(","),
            device=given.device,
            commit=given.commit,
            out=given.out,
            rep_ms=given.rep_ms,
        )
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
