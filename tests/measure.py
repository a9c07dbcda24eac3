"""How fast: prints the table in design/measuring.md. `make measure`; with ARGS=--quick it leaves out the long runs."""

from __future__ import annotations

import argparse
import functools
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORT = (
    "import sys, time; start = time.perf_counter(); import gpukit; print(time.perf_counter() - start, *sys.modules)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a person waits for; print a Markdown table.")
    parser.add_argument("--quick", action="store_true", help="leave out the notebooks and `make test`")
    parser.add_argument("--repeat", type=int, default=5, help="of each verdict and import (default: 5)")
    args = parser.parse_args()
    print(f"{cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}, ", end="")
    print(f"triton {version('triton')}, {time.strftime('%Y-%m-%d')}\n\n| what | measured | at most |\n|---|---|---|")
    measure_import(args.repeat)
    measure_verdicts(args.repeat)
    measure_endless()
    measure_redraws()
    measure_simulator()
    measure_traces()
    if not args.quick:
        measure_submission()
        notebooks = [sys.executable, "-m", "pytest", "-q", "--nbval", "notebooks", "--gpukit-impl=solutions"]
        row("`pytest --nbval notebooks --gpukit-impl=solutions`", seconds(lambda: run(notebooks)), 90)
        row("`make test`, environment ready", seconds(lambda: run(["make", "test"])), 540)


def measure_import(repeat: int) -> None:
    times, loaded = [], set()
    for _ in range(repeat):
        took, *modules = run([sys.executable, "-c", IMPORT]).split()
        times.append(float(took))
        loaded |= {"torch", "triton", "numpy"} & set(modules)
    row(
        f"`import gpukit` (it loads {', '.join(sorted(loaded)) or 'no torch, triton or numpy'})",
        statistics.median(times),
        0.1,
    )


def measure_verdicts(repeat: int) -> None:
    """The first verdict starts the worker's server and the first on a kernel loads torch; later ones are warm."""
    from gpukit.grading.exercise import FunctionExercise
    from gpukit.grading.judge import judge
    from gpukit.grading.registry import exercises

    def verdict_s(exercise_id: str) -> float:
        started = time.perf_counter()
        verdict = judge(exercise_id, impl="solutions", root=ROOT)
        took = time.perf_counter() - started
        if not verdict.passed:
            sys.exit(f"the solution of {exercise_id} does not pass:\n{verdict}")
        return took

    kernels = [exercise_id for exercise_id, e in exercises().items() if not isinstance(e, FunctionExercise)]
    row("the first verdict in a notebook", verdict_s(next(iter(exercises()))))
    row("the first one on a kernel", verdict_s(kernels[0]))
    warm = {exercise_id: [verdict_s(exercise_id) for _ in range(repeat)] for exercise_id in exercises()}
    for exercise_id, exercise in exercises().items():
        at_most = 0.3 if isinstance(exercise, FunctionExercise) else 3
        row(f"`{exercise_id}`, warm", statistics.median(warm[exercise_id]), at_most)
    row("median of all exercises, warm", statistics.median(map(statistics.median, warm.values())), 3)


def measure_endless() -> None:
    """How long after its limit a check ends code that never does."""
    from dataclasses import replace

    from gpukit.grading import judge
    from tests.grading.test_judge import ADD, DOUBLE, DOUBLE_SOURCE

    loops = {
        "of Python": (ADD, "def add(a, b):\n    while True: pass\n"),
        "in a kernel": (
            DOUBLE,
            DOUBLE_SOURCE.replace("mask = offs < n\n", "mask = offs < n\n    while True:\n        pass\n"),
        ),
    }
    for where, (exercise, source) in loops.items():
        judged = functools.partial(judge.judge_source, replace(exercise, timeout_s=2), source)
        row(f"an endless loop {where}, limit 2 s", seconds(judged), 7)


def measure_redraws() -> None:
    """A picture that follows its slider."""
    from tests.widgets.test_calculators import CHANGES, MAKERS

    for name, make in MAKERS.items():
        view = make()
        slowest = max(seconds(functools.partial(setattr, view, field, value)) for field, value in CHANGES[name].items())
        row(f"a field of the {name} calculator changed, until its picture is there", slowest, 0.1)


def measure_simulator() -> None:
    """Seconds of processor time; nothing is compiled beforehand."""
    os.environ["TRITON_INTERPRET"] = "1"  # also where there is a GPU; Triton is not imported before
    from tests.simulator import speed

    programs = 1024

    def rows_s(programs: int, how: str) -> float:
        return min(speed.processor_s(speed.rows(programs, how)) for _ in range(3))

    plain, layer, traced = (rows_s(programs, how) for how in ("plain", "layer", "trace"))
    row(f"{programs:,} programs of a row kernel, Triton's own interpreter", plain)
    row(f"the same in gpukit's: {plain / layer:.1f} times as fast", layer, 2)
    row(f"the same traced: {traced / plain:.2f} of the time of Triton's own", traced, min(2, 1.3 * plain))
    row("the same sampled: 4 of 8,192 programs", rows_s(8192, "sample"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUKIT_CACHE"] = folder
        for name in speed.REAL_SHAPES:
            row(f"trace, compile and predict {name}", speed.processor_s(speed.real_shape(name)), 5)
    del os.environ["GPUKIT_CACHE"]


def measure_submission() -> None:
    """Seconds of processor time that grading all exercises takes, none of whose kernels was compiled before."""
    command = [sys.executable, "-m", "gpukit", "grade", "--submission", str(ROOT / "solutions")]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUKIT_CACHE"] = folder
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(command)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    del os.environ["GPUKIT_CACHE"]
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row("a submission of all exercises, nothing compiled before, seconds of processor time", spent, 40)


def measure_traces() -> None:
    """Each `gpukit trace` as a person starts it: seconds of processor time of a process of its own, with nothing compiled
    beforehand."""
    from gpukit import benchmark
    from tests.simulator import speed

    for name in benchmark.names():
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "GPUKIT_CACHE": folder}
            command = [sys.executable, "-m", "gpukit", "trace", name]
            took = speed.processor_s(
                functools.partial(subprocess.run, command, env=environment, cwd=ROOT, check=True, capture_output=True)
            )
        row(f"`gpukit trace {name}`, the first one", took, 5)


def row(what: str, measured_s: float, at_most_s: float | None = None) -> None:
    shown = f"{measured_s:.1f} s" if measured_s >= 1 else f"{1000 * measured_s:.1f} ms"
    print(f"| {what} | {shown} | {f'{at_most_s:g} s' if at_most_s else ''} |", flush=True)


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
