"""`python -m gpukit.validation` prints how the simulator's counts compare with a GPU's counters, anywhere.

python -m gpukit.validation                      the table from gpukit/results/h200/traffic.csv; exit status 1 for a miss
python -m gpukit.validation --measure DIR        on a GPU: run every kernel under ncu, trace it, write the table;
                                                 everything raw stays in DIR
python -m gpukit.validation --again DIR          the same table from DIR's raw counters, traced anew, without a GPU
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from gpukit import hardware
from gpukit.validation import counters, table, tracing


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpukit.validation", description=__doc__.split("\n")[0])
    parser.add_argument("--measure", metavar="DIR", type=Path, help="run the kernels under ncu on this machine's GPU")
    parser.add_argument("--again", metavar="DIR", type=Path, help="trace again and hold against what DIR holds")
    parser.add_argument("--only", metavar="TEXT", default="", help="kernels whose name contains this")
    parser.add_argument("--gpu", default="h200", help="whose table to show (default: h200)")
    parser.add_argument("--misses", action="store_true", help="show only rows outside their bars")
    parser.add_argument("--workers", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--seconds", type=float, default=240, help="how long ncu may take (default: 240)")
    args = parser.parse_args(argv)
    if args.measure is not None:
        return _measure(args)
    if args.again is not None:
        return _again(args)
    return _show(table.RESULTS / args.gpu / "traffic.csv", args)


def _show(path: Path, args) -> int:
    try:
        rows = [row for row in table.read(path) if args.only in row.kernel]
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    print(table.text(rows, everything=not args.misses))
    return int(any(row.misses for row in rows))


def _names(only: str) -> list[str]:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # names only: nothing is launched in this process
    from gpukit.validation.kernels import CASES

    return [name for name in CASES if only in name]


def _measure(args) -> int:
    folder = args.measure
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("ncu-*.csv"), *folder.glob("launches-*.jsonl"), *folder.glob("*.log")]:
        old.unlink()
    begin = time.monotonic()
    log = (folder / "log.txt").open("w")

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {line}", flush=True)
        log.write(line + "\n")
        log.flush()

    import torch

    device = torch.cuda.get_device_name()
    gpu = hardware.gpu(device)
    say(f"{device}, torch {torch.__version__}, triton {importlib.metadata.version('triton')}, {gpu.key}")
    facts = {
        "gpu": gpu.key,
        "device": device,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    names = _names(args.only)
    traced: dict[str, dict] = {}
    half = max(1, args.workers // 2)

    def trace() -> None:
        traced.update(tracing.trace_all(names, gpu.key, half))
        tracing.save(traced, folder / "traced.json")

    thread = threading.Thread(target=trace)  # needs no GPU, so it goes on beside ncu
    thread.start()
    try:
        counters.warm(names, folder, half, say)
        _values(folder, gpu.key, say)
        counters.measure(names, folder, say, args.seconds)
    except Exception as error:
        say(f"measuring failed: {error!r}")
    thread.join()
    for name, entry in traced.items():
        if "error" in entry:
            say(f"tracing {name} failed: {entry['error'].strip().splitlines()[-1]}")
    return _table(folder, traced, args, say)


def _values(folder: Path, gpu: str, say) -> None:
    """What the GPU computes where the interpreter might differ (values.py): kept for the tests."""
    path = folder / "values.npz"
    command = [sys.executable, "-m", "gpukit.validation.values", str(path)]
    done = subprocess.run(command, env=counters.environment(), capture_output=True, text=True, timeout=150)
    if done.returncode or not path.exists():
        say(f"values.npz was not made: {done.stderr[-800:]}")
        return
    (table.RESULTS / gpu).mkdir(parents=True, exist_ok=True)
    shutil.copy(path, table.RESULTS / gpu / "values.npz")
    say("values.npz: what the GPU computes, beside what the interpreter does")


def _again(args) -> int:
    if not (args.again / "facts.json").exists():
        print(f"{args.again} holds no measurement: no facts.json", file=sys.stderr)
        return 2
    gpu = json.loads((args.again / "facts.json").read_text())["gpu"]
    traced = tracing.trace_all(_names(args.only), gpu, args.workers)
    tracing.save(traced, args.again / "traced.json")
    for name, entry in traced.items():
        if "error" in entry:
            print(f"tracing {name} failed: {entry['error'].strip().splitlines()[-1]}", file=sys.stderr)
    return _table(args.again, traced, args, print)


def _table(folder: Path, traced: dict[str, dict], args, say) -> int:
    """Write traffic.csv here and among the results, measured.csv here, and print the table."""
    from gpukit.validation.kernels import CASES

    facts = json.loads((folder / "facts.json").read_text())
    good = {name: entry for name, entry in traced.items() if "error" not in entry}
    measured = counters.read(folder, {name: entry["kernel"] for name, entry in good.items()})
    with (folder / "measured.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["kernel", "counter", "value"])
        writer.writerows([name, *item] for name, values in measured.items() for item in values.items())
    rows = []
    for name in CASES:
        if name not in good or name not in measured:
            continue
        for counter, count in good[name]["counts"].items():
            value = counters.judged(measured[name], counter)
            if value is None or (not value and not count):
                continue
            rows.append(
                table.Row(
                    name, counter, round(count), round(value), table.ratio(count, value),
                    table.bar(counter, CASES[name].aligned), facts["gpu"], facts["triton"], facts["date"],
                )
            )  # fmt: skip
    table.write(rows, folder / "traffic.csv")
    whole = not args.only
    if rows and whole:
        table.write(rows, table.RESULTS / facts["gpu"] / "traffic.csv")
    say(f"{len(measured)} kernels measured, {len(good)} traced, {len(rows)} rows")
    print(table.text(rows, everything=not args.misses))
    return int(any(row.misses for row in rows) or len(measured) < len(good))


if __name__ == "__main__":
    sys.exit(main())
