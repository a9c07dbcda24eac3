"""`python -m gpukit.validation` (`gpukit validate`) prints how the simulator's counts compare with a GPU's counters, anywhere.

python -m gpukit.validation                  the table from gpukit/results/h200/traffic.csv; exit status 1 if a kernel is
                                             outside its bar and no reason is stated
python -m gpukit.validation --measure DIR    on a GPU: run every kernel under ncu, trace it, write the table; DIR gets
                                             measured.json (all counters), traffic.csv, values.npz and log.txt
python -m gpukit.validation --again DIR      trace again, without a GPU, and hold it against DIR/measured.json
python -m gpukit.validation --again          the same against what the table itself holds

With --kernels new all of them are about gpukit.validation.new_kernels, and the table is halves_traffic.csv; with --kernels
third about third_set, and it is third_traffic.csv; the same holds for fourth, fifth, sixth, seventh, eighth, ninth, tenth,
eleventh and twelfth.
Then --measure only runs ncu: measured.json is to be traced with --again DIR.

What is traced depends a little on the compiler: trace again with the Triton that measured.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from gpukit.validation import counters, simulated_counts, traffic


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpukit.validation", description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--measure", metavar="DIR", type=Path, help="run the kernels under ncu on this machine's GPU")
    parser.add_argument(
        "--again", metavar="DIR", nargs="?", type=Path, const=Path(), help="trace again; against DIR, or the table"
    )
    parser.add_argument("--compiled", action="store_true", help="all kernels are in Triton's cache: compile none first")
    parser.add_argument("--workers", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--seconds", type=float, default=240, help="how long ncu may take (default: 240)")
    args = parser.parse_args(argv)
    if args.measure is not None:
        return _measure(args)
    if args.again is not None:
        return _again(args)
    return show(args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `gpukit validate`."""
    parser.add_argument("--only", metavar="TEXT", default="", help="kernels whose name contains this")
    parser.add_argument("--gpu", default="h200", help="whose table to show (default: h200)")
    parser.add_argument("--misses", action="store_true", help="show only rows outside their bars")
    parser.add_argument(
        "--kernels", choices=traffic.KERNELS, default="counted", help="which kernels (default: counted)"
    )


def show(args: argparse.Namespace) -> int:
    """Print the recorded table: 0, 1 if a row outside its bar has no reason, 2 if there is no such table."""
    try:
        rows = [row for row in traffic.read(_table(args.gpu, args)) if args.only in row.kernel]
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    if not rows:
        print(f"no kernel in the table of {args.gpu} has {args.only!r} in its name", file=sys.stderr)
        return 2
    return _print(rows, args)


def _print(rows: list[traffic.Row], args: argparse.Namespace) -> int:
    print(traffic.text(rows, everything=not args.misses))
    return int(any(row.unexplained for row in rows))


def _table(gpu: str, args: argparse.Namespace) -> Path:
    return traffic.RESULTS / gpu / traffic.KERNELS[args.kernels][1]


def _module(args: argparse.Namespace) -> str:
    return traffic.KERNELS[args.kernels][0]


def _cases(args: argparse.Namespace) -> dict:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # names only: nothing is launched in this process
    return importlib.import_module(_module(args)).CASES


def _names(args: argparse.Namespace) -> list[str]:
    return [name for name in _cases(args) if args.only in name]


def _measure(args: argparse.Namespace) -> int:
    folder = args.measure
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    log = (folder / "log.txt").open("w")

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {line}", flush=True)
        log.write(line + "\n")
        log.flush()

    facts = counters.facts()
    say(", ".join(facts.values()))
    names, module = _names(args), _module(args)
    traced: dict[str, dict] = {}
    half = max(1, args.workers // 2)
    thread = threading.Thread(target=lambda: traced.update(simulated_counts.trace_all(names, facts["gpu"], half)))
    if args.kernels == "counted":
        thread.start()  # needs no GPU, so it goes on beside ncu
    runs: list[dict] = []
    try:
        if not args.compiled:
            counters.warm(names, half, say, module)
        runs = counters.measure(names, say, args.seconds, module)
        (folder / "measured.json").write_text(json.dumps({"facts": facts, "runs": runs}))
        if args.kernels == "counted":
            _values(folder, facts["gpu"], say)
    except Exception as error:
        say(f"measuring failed: {error!r}")
    if args.kernels != "counted":
        return 0 if runs else 1
    thread.join()
    return _compare(folder, facts, runs, traced, args, say)


def _values(folder: Path, gpu: str, say) -> None:
    """What the GPU computes where the interpreter might differ (values.py): kept for the tests."""
    path = folder / "values.npz"
    command = [sys.executable, "-m", "gpukit.validation.values", str(path)]
    done = subprocess.run(command, env=counters.environment(), capture_output=True, text=True, timeout=150)
    if done.returncode or not path.exists():
        say(f"values.npz was not made: {done.stderr[-800:]}")
        return
    (traffic.RESULTS / gpu).mkdir(parents=True, exist_ok=True)
    shutil.copy(path, traffic.RESULTS / gpu / "values.npz")
    say("values.npz: what the GPU computes, beside what the interpreter does")


def _again(args: argparse.Namespace) -> int:
    if args.again == Path():
        return _refresh(args)
    path = args.again / "measured.json"
    if not path.exists():
        print(f"{args.again} holds no measurement: no measured.json", file=sys.stderr)
        return 2
    return compare_kept(path, args, args.again)


def compare_kept(path: Path, args: argparse.Namespace, folder: Path | None = None) -> int:
    """Trace the kernels of args.kernels whose counters a file holds, and hold them against it: the table goes among the
    results, and into `folder`."""
    kept = json.loads(path.read_text())
    traced = simulated_counts.trace_all(_names(args), kept["facts"]["gpu"], args.workers, _module(args))
    return _compare(folder, kept["facts"], kept["runs"], traced, args, print)


def _compare(folder: Path | None, facts: dict, runs: list[dict], traced: dict[str, dict], args, say) -> int:
    """Write traffic.csv into the folder and, if it is of all kernels, the table among the results, and print it."""
    good = _traced_well(traced, say)
    measured = counters.matched(runs, {name: entry["kernels"] for name, entry in good.items()})
    values = {
        (name, counter): value
        for name in measured
        for counter in counters.JUDGED
        if (value := counters.judged(measured[name], counter)) is not None
    }
    rows = _rows(good, values, facts, args)
    if folder is not None:
        traffic.write(rows, folder / "traffic.csv")
    if rows and not args.only:
        traffic.write(rows, _table(facts["gpu"], args))
    lost = sorted({*traced} - {*measured})
    say(f"{len(measured)} kernels measured, {len(good)} traced, {len(rows)} rows")
    if lost:
        say(f"without a row: {', '.join(lost)}")
    return _print(rows, args) or int(bool(lost))


def _refresh(args: argparse.Namespace) -> int:
    """Trace again what the recorded table holds, and write it."""
    path = _table(args.gpu, args)
    old = traffic.read(path)
    facts = {name: getattr(old[0], name) for name in ("gpu", "triton", "date")}
    here = importlib.metadata.version("triton")
    if here != facts["triton"]:
        print(f"measured with Triton {facts['triton']}, traced with {here}: some kernels differ", file=sys.stderr)
    values = {(row.kernel, row.counter): float(row.measured) for row in old}
    for name in {row.kernel for row in old}:
        parts = [values.get((name, f"dram_{way}_bytes"), 0.0) for way in ("read", "write")]
        values[name, "dram_bytes"] = sum(parts)
    names = [name for name in _names(args) if (name, "l2_read_sectors") in values]
    good = _traced_well(simulated_counts.trace_all(names, facts["gpu"], args.workers, _module(args)), print)
    new = _rows(good, values, facts, args)
    kept = [row for row in old if row.kernel not in good]
    order = {name: i for i, name in enumerate(_cases(args))}
    rows = sorted([*new, *kept], key=lambda row: order.get(row.kernel, len(order)))
    traffic.write(rows, path)
    return _print([row for row in rows if args.only in row.kernel], args)


def _traced_well(traced: dict[str, dict], say) -> dict[str, dict]:
    for name, entry in traced.items():
        if "error" in entry:
            say(f"tracing {name} failed: {entry['error'].strip().splitlines()[-1]}")
    return {name: entry for name, entry in traced.items() if "error" not in entry}


def _rows(
    traced: dict[str, dict], measured: dict[tuple[str, str], float], facts: dict, args: argparse.Namespace
) -> list[traffic.Row]:
    cases = _cases(args)
    return [
        traffic.row(
            name, counter, count, measured[name, counter], cases[name].aligned, facts["gpu"], facts["triton"],
            facts["date"],
        )
        for name in cases
        if name in traced
        for counter, count in traced[name]["counts"].items()
        if (name, counter) in measured and (measured[name, counter] or count)
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
