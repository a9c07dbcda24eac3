"""`python -m gpukit.validation.times` prints predicted beside measured times, anywhere.

python -m gpukit.validation.times                     the table from gpukit/results/h200/times.csv
python -m gpukit.validation.times --measure FILE.csv  on a GPU: time every case and every rate, about a minute
python -m gpukit.validation.times --again FILE.csv    predict each case of FILE.csv anew, on any machine, and write
                                                      times.csv and machine.csv among the results

With --kernels new all of them are about gpukit.validation.new_kernels, and the table is halves.csv; with --kernels third
about gpukit.validation.third_set, and it is third.csv; with --kernels fourth, fifth, sixth, seventh, eighth, ninth, tenth,
eleventh or twelfth about fourth_set, fifth_set, sixth_set, seventh_set, eighth_set, ninth_set, tenth_set, eleventh_set or
twelfth_set, and it is fourth.csv, fifth.csv, sixth.csv, seventh.csv, eighth.csv, ninth.csv, tenth.csv, eleventh.csv or
twelfth.csv.

Times are medians with a cold L2 (gpukit.timing), inputs random, the GPU at whatever clock it chooses. Where the CPU takes longer
to launch everything than the GPU to run it, a CUDA graph of it is timed.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.metadata
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from gpukit import hardware, tables

RESULTS = Path(__file__).parents[1] / "results"
# What --kernels chooses -> the module with the cases, and the table among the results.
KERNELS = {
    "timed": ("gpukit.validation.timed_kernels", "times.csv"),
    "new": ("gpukit.validation.new_kernels", "halves.csv"),
    "third": ("gpukit.validation.third_set", "third.csv"),
    "fourth": ("gpukit.validation.fourth_set", "fourth.csv"),
    "fifth": ("gpukit.validation.fifth_set", "fifth.csv"),
    "sixth": ("gpukit.validation.sixth_set", "sixth.csv"),
    "seventh": ("gpukit.validation.seventh_set", "seventh.csv"),
    "eighth": ("gpukit.validation.eighth_set", "eighth.csv"),
    "ninth": ("gpukit.validation.ninth_set", "ninth.csv"),
    "tenth": ("gpukit.validation.tenth_set", "tenth.csv"),
    "eleventh": ("gpukit.validation.eleventh_set", "eleventh.csv"),
    "twelfth": ("gpukit.validation.twelfth_set", "twelfth.csv"),
}
LEAST_US = 50  # shorter ones are shown and not judged: launching is too much of them
MEDIAN_BAR, WORST_BAR = 0.15, 0.35  # of |predicted / measured - 1|
# Why a case is further off than WORST_BAR. One that is not has no reason here.
REASONS: dict[str, str] = {
    "torch: softmax 4096 x 65536 bf16": (
        "PyTorch's kernel goes over a row three times (aten/src/ATen/native/cuda/SoftMax.cu), and an op is taken to read "
        "its input once"
    ),
    "column sums by atomics, 16384 x 2048": (
        "all programs add to the same 2,048 numbers, each behind a fence. The model takes for a fence what it takes where nobody else "
        "changes its lines"
    ),
}


@dataclass(frozen=True)
class Row:
    """One case; the fields are the columns of times.csv. `triton` compiled what was measured, `predicted_with` what was
    predicted."""

    case: str
    predicted_us: float
    measured_us: float
    ratio: float
    limit: str
    gpu: str
    torch: str
    triton: str
    predicted_with: str
    date: str

    @property
    def judged(self) -> bool:
        return self.measured_us >= LEAST_US

    @property
    def misses(self) -> bool:
        return self.judged and abs(self.ratio - 1) > WORST_BAR

    @property
    def unexplained(self) -> bool:
        return self.misses and self.case not in REASONS


@dataclass(frozen=True)
class MachineRow:
    """One measured constant of a machine; the fields are the columns of machine.csv."""

    name: str
    value: float
    unit: str
    median_us: float
    gpu: str
    torch: str
    triton: str
    date: str


# ---- the tables ---------------------------------------------------------------------------------------------------


def read(gpu: str = "h200", kernels: str = "timed") -> list[Row]:
    """The rows of gpukit/results/<gpu>/times.csv, of halves.csv or of third.csv. Raises FileNotFoundError with what to run."""
    path = RESULTS / gpu / KERNELS[kernels][1]
    if not path.exists():
        raise FileNotFoundError(
            f"no such file: {path}; on a machine with that GPU run: python -m gpukit.validation.times --measure FILE"
        )
    return _read(path, Row)


def machine(gpu: str = "h200") -> dict[str, MachineRow]:
    """The rows of gpukit/results/<gpu>/machine.csv by name."""
    return {row.name: row for row in _read(RESULTS / gpu / "machine.csv", MachineRow)}


def _read(path: Path, kind):
    numbers = {f.name for f in fields(kind) if f.type in ("float", float)}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [kind(**{name: float(text) if name in numbers else text for name, text in row.items()}) for row in rows]


def write(rows: Iterable[Row | MachineRow], path: Path) -> None:
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(f.name for f in fields(rows[0]))
        for row in rows:
            writer.writerow(f"{value:.5g}" if isinstance(value, float) else value for value in asdict(row).values())


def deviations(rows: Iterable[Row]) -> tuple[float, float]:
    """Median and largest |predicted / measured - 1| of the judged rows."""
    found = [abs(row.ratio - 1) for row in rows if row.judged]
    return statistics.median(found), max(found)


def table(gpu: str = "h200", everything: bool = True) -> str:
    """Predicted and measured times, the median and the worst deviation, and a reason for each miss. Raises
    FileNotFoundError where that GPU has no measured times."""
    return text(read(gpu), everything)


def text(rows: list[Row], everything: bool = True) -> str:
    shown = [row for row in rows if everything or row.misses]
    titles = ["case", "limit", "predicted (us)", "measured (us)", "ratio", ""]
    cells = [
        [
            row.case, row.limit, f"{row.predicted_us:,.1f}", f"{row.measured_us:,.1f}", f"{row.ratio:.2f}",
            "MISS" if row.misses else "" if row.judged else "not judged",
        ]
        for row in shown
    ]  # fmt: skip
    lines = tables.aligned([titles, *cells], right=range(2, 6), rules=[1])
    misses = [f"{row.case}: {REASONS.get(row.case, 'reason not known')}" for row in rows if row.misses]
    judged = [row for row in rows if row.judged]
    median, worst = deviations(rows)
    summary = (
        f"{len(judged)} cases of {LEAST_US} us and more: predicted times are off by {median:.1%} in the median "
        f"(bar {MEDIAN_BAR:.0%}) and by {worst:.1%} at worst (bar {WORST_BAR:.0%}); {len(misses)} beyond that"
    )
    return "\n".join([*lines, "", *misses, *([""] if misses else []), summary])


# ---- the kernels --------------------------------------------------------------------------------------------------


def cases(kernels: str) -> dict:
    """The kernels of a set of KERNELS, by name."""
    return importlib.import_module(KERNELS[kernels][0]).CASES


def _rates(kernels: str) -> dict:
    return getattr(importlib.import_module(KERNELS[kernels][0]), "RATES", {})


def _work(name: str, kernels: str):
    return (cases(kernels).get(name) or _rates(kernels)[name]).prepare("cuda")


# ---- predicting ---------------------------------------------------------------------------------------------------


def predict_case(name: str, gpu: str, kernels: str = "timed") -> tuple[float, str]:
    """µs and the limiting resource. Needs the interpreter."""
    from gpukit.simulator.prediction.predict import predict

    case = cases(kernels)[name]
    prediction = predict(case.prepare("meta"), gpu=gpu, sample=case.sample)
    return prediction.time_us, prediction.limit


def _predict_one(name: str, gpu: str, kernels: str) -> tuple[float, str] | str:
    from gpukit.simulator.interpreter.faults import UnknownFault

    try:
        return predict_case(name, gpu, kernels)
    except UnknownFault as fault:  # the model says what it cannot know: that is no mistake in it
        return f"refused: {fault}"
    except Exception:
        return traceback.format_exc()


def again(path: Path, only: str, workers: int, kernels: str) -> int:
    """Predict the cases of FILE anew and write them among the results. 0, 1 where one could not be predicted, 2 if it holds
    none."""
    if not path.exists():
        print(f"no such file: {path}", file=sys.stderr)
        return 2
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    chosen, rates = cases(kernels), _rates(kernels)
    measured = [row for row in _read(path, _Raw) if not row.error]
    by_name = {row.name: row for row in measured}
    names = [name for name in chosen if name in by_name and only in name]
    rows, failed = [], 0
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        gpus = [by_name[name].gpu for name in names]
        for name, found in zip(names, pool.map(_predict_one, names, gpus, [kernels] * len(names)), strict=True):
            if isinstance(found, str):
                failed += 1
                print(f"{name}: {found}", file=sys.stderr)
                continue
            raw = by_name[name]
            us, limit = found
            rows.append(
                Row(
                    name, us, raw.median_us, us / raw.median_us, limit, raw.gpu, raw.torch, raw.triton,
                    importlib.metadata.version("triton"), raw.date,
                )
            )  # fmt: skip
    if not rows and failed:
        return 1
    if not rows:
        print(f"{path} holds no measured case", file=sys.stderr)
        return 2
    gpu = rows[0].gpu
    if not only:
        write(rows, RESULTS / gpu / KERNELS[kernels][1])
        if constants := _machine_rows(by_name, rates):
            write(constants, RESULTS / gpu / "machine.csv")
        rows = read(gpu, kernels)
    print(text(rows))
    return int(failed > 0)


def _machine_rows(measured: dict[str, _Raw], rates: dict) -> list[MachineRow]:
    found = []
    for rate in rates.values():
        if rate.name not in measured or (rate.minus and rate.minus not in measured):
            continue
        raw = measured[rate.name]
        us = raw.median_us - (measured[rate.minus].median_us if rate.minus else 0)
        value = rate.value(us)
        found.append(MachineRow(rate.name, value, rate.unit, raw.median_us, raw.gpu, raw.torch, raw.triton, raw.date))
    return found


# ---- measuring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Raw:
    """One line of what --measure writes. `sm_mhz` and `watts` are medians while the case ran, 0 where not known."""

    name: str
    median_us: float
    p20_us: float
    p80_us: float
    sm_mhz: float
    watts: float
    gpu: str
    torch: str
    triton: str
    date: str
    seconds: float
    error: str


def measure(path: Path, only: str, workers: int, seconds: float, kernels: str) -> int:
    """Time the cases on this machine's GPU and write them to `path`. 0, 1 where not all were measured, 2 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        print("--measure needs an NVIDIA GPU, and PyTorch sees none", file=sys.stderr)
        return 2
    begin = time.monotonic()
    names = [name for name in [*_rates(kernels), *cases(kernels)] if only in name]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(f.name for f in fields(_Raw))

    def child(what: str, given: list[str], limit: float) -> None:
        command = [sys.executable, "-m", "gpukit.validation.times", what, str(path), "--seconds", f"{limit:.0f}"]
        command += ["--kernels", kernels]
        try:
            subprocess.run([*command, "--names", "|".join(given)], env=_environment(), timeout=limit + 20)
        except subprocess.TimeoutExpired:
            print(f"{what}: ended after {limit + 20:.0f} s", flush=True)

    # Everything is compiled first, side by side, into Triton's own cache.
    with ThreadPoolExecutor(workers) as pool:
        for i in range(workers):
            pool.submit(child, "--warm", names[i::workers], 0.6 * seconds)
    print(f"[{time.monotonic() - begin:5.1f} s] {len(names)} cases compiled and run once", flush=True)
    left = names
    while left and (rest := seconds - (time.monotonic() - begin)) > 1:
        child("--time", left, rest)
        done = {row.name for row in _read(path, _Raw)}
        if not done & set(left):  # it broke on the first one: that may not cost the others
            done.add(left[0])
            print(f"{left[0]}: the process ended", flush=True)
        left = [name for name in left if name not in done]
    rows = _read(path, _Raw)
    good = [row for row in rows if not row.error]
    print(f"[{time.monotonic() - begin:5.1f} s] {len(good)} of {len(names)} measured: {path}", flush=True)
    for row in rows:
        if row.error:
            print(f"{row.name}: {row.error}")
    for row in _machine_rows({row.name: row for row in good}, _rates(kernels)):
        print(f"{row.name:<40}{row.value:>14,.4g} {row.unit}")
    return int(len(good) < len(names))


def _environment() -> dict[str, str]:
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}


def _warm(names: list[str], seconds: float, kernels: str) -> int:
    import torch

    begin = time.monotonic()
    for name in names:
        if time.monotonic() - begin > seconds:
            break
        try:
            work = _work(name, kernels)
            work()
            torch.cuda.synchronize()
            del work
            torch.cuda.empty_cache()
        except Exception as error:
            print(f"{name} does not run: {error!r}"[:500], flush=True)
    return 0


def _time(path: Path, names: list[str], seconds: float, kernels: str) -> int:
    """In a process of its own: what breaks the CUDA context ends it, and the next one goes on."""
    import torch

    from gpukit.timing import time_ms

    begin = time.monotonic()
    device = torch.cuda.get_device_name()
    facts = {
        "gpu": hardware.gpu(device).key,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    clocks = _Clocks()
    try:
        for name in names:
            start, lost = time.monotonic(), False
            if start - begin > seconds:
                break
            times, error = (0.0, 0.0, 0.0), ""
            try:
                work = _work(name, kernels)
                work()
                torch.cuda.synchronize()
                if hasattr(work, "wrong"):
                    error = work.wrong()
                running = time.monotonic()
                timing = time_ms(work)
                if timing.launch_bound:  # of many short launches: without the host
                    timing = time_ms(_captured(work).replay)
                times = tuple(1e3 * ms for ms in (timing.median_ms, timing.p20_ms, timing.p80_ms))
                sm_mhz, watts = clocks.since(running)
                del work
                torch.cuda.empty_cache()
            except Exception as exc:
                error, sm_mhz, watts = f"{exc!r}"[:300], 0.0, 0.0
                try:
                    torch.cuda.synchronize()
                except Exception:
                    lost = True
            row = _Raw(
                name, *times, sm_mhz, watts, **facts, seconds=time.monotonic() - start,
                error=error.replace("\n", " "),
            )  # fmt: skip
            with path.open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(
                    f"{value:.6g}" if isinstance(value, float) else value for value in asdict(row).values()
                )
            print(f"{row.median_us:>10,.1f} us {row.sm_mhz:>6.0f} MHz {row.watts:>4.0f} W  {name} {error}", flush=True)
            if lost:
                return 3
    finally:
        clocks.end()
    return 0


def _captured(work):
    """A CUDA graph of all that work() launches. It has run before, so that everything is compiled."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


class _Clocks:
    """The SM clock and the power as nvidia-smi sees them every 20 ms; zeros where it is missing."""

    def __init__(self):
        query = "nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits -lms 20 -i 0"
        self.seen: list[tuple[float, float, float]] = []
        try:
            self.process = subprocess.Popen(query.split(), stdout=subprocess.PIPE, text=True)
        except OSError:
            self.process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            try:
                mhz, watts = map(float, line.split(","))
            except ValueError:
                continue
            self.seen.append((time.monotonic(), mhz, watts))

    def since(self, start: float) -> tuple[float, float]:
        found = [(mhz, watts) for when, mhz, watts in self.seen if when > start]
        if not found:
            return 0.0, 0.0
        return statistics.median(mhz for mhz, _ in found), statistics.median(watts for _, watts in found)

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpukit.validation.times", description=__doc__.split("\n")[0])
    parser.add_argument("--measure", metavar="FILE", type=Path, help="time everything on this machine's GPU")
    parser.add_argument("--again", metavar="FILE", type=Path, help="predict again and hold against what FILE holds")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name contains this")
    parser.add_argument("--gpu", default="h200", help="whose table to show (default: h200)")
    parser.add_argument("--workers", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--seconds", type=float, default=120, help="how long measuring may take (default: 120)")
    parser.add_argument("--kernels", choices=KERNELS, default="timed", help="which kernels (default: timed)")
    for own in ("--warm", "--time"):
        parser.add_argument(own, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--names", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.warm is not None:
        return _warm(args.names.split("|"), args.seconds, args.kernels)
    if args.time is not None:
        return _time(args.time, args.names.split("|"), args.seconds, args.kernels)
    if args.measure is not None:
        return measure(args.measure, args.only, args.workers, args.seconds, args.kernels)
    if args.again is not None:
        return again(args.again, args.only, args.workers, args.kernels)
    try:
        print(text(read(args.gpu, args.kernels)))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
