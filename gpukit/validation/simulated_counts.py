"""The simulator's counts of the kernels, each traced in the interpreter; `python -m gpukit.validation.simulated_counts` in
processes of their own, since Triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

from gpukit.validation.counters import COUNTED

COUNTERS = (
    "l1_read_sectors",
    "l1_write_sectors",
    "l2_read_sectors",
    "l2_write_sectors",
    "l2_atomic_sectors",
    "dram_read_bytes",
    "dram_write_bytes",
    "dram_bytes",
)


def trace_case(name: str, gpu: str, compiled: bool = True, module: str = COUNTED) -> dict:
    """Counts of one case, summed over its launches, and facts, as plain data. Needs the interpreter."""
    import gpukit
    from gpukit import hardware

    case, machine = importlib.import_module(module).CASES[name], hardware.gpu(gpu)
    begin = time.perf_counter()
    with hardware.imagined(machine):  # grids of a fixed size and configurations are made for this GPU
        launch = case.prepare("meta" if case.sample else "cpu")
        with gpukit.trace(gpu=gpu, sample=case.sample) as t:
            launch()
    middle = time.perf_counter()
    traffic = [recorded.traffic(compiled=compiled) for recorded in t.launches]
    return {
        "case": name,
        "kernels": [recorded.kernel for recorded in t.launches],
        "counts": {counter: sum(count(each, counter) for each in traffic) for counter in COUNTERS},
        "layouts": [each.layouts for each in traffic],
        "programs_per_sm": [each.programs_per_sm for each in traffic],
        "dirty_bytes": sum(each.dirty_bytes for each in traffic),
        "trace_s": round(middle - begin, 3),
        "caches_s": round(time.perf_counter() - middle, 3),
    }


def count(traffic, counter: str) -> int:
    """One of COUNTERS, as Nsight Compute counts it."""
    if counter == "l2_atomic_sectors":
        # L2 has two halves. An SM asks the one that is near, and every other atomic is carried out in the other one: it is
        # counted in both.
        return round(1.5 * traffic.l2_atomic_sectors)
    if counter not in ("l1_read_sectors", "l1_write_sectors"):
        return getattr(traffic, counter)
    kind = "load" if counter == "l1_read_sectors" else "store"
    # What a descriptor moves is not among what ncu counts there.
    return sum(site.l1_sectors for site in traffic.sites if site.kind == kind and site.via == "lsu")


def trace_all(names: list[str], gpu: str, workers: int, module: str = COUNTED) -> dict[str, dict]:
    """Case -> what trace_case says, or {"case", "error"}."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }

    def run(part: list[str]) -> list[dict]:
        command = [sys.executable, "-m", "gpukit.validation.simulated_counts", gpu, module]
        done = subprocess.run(command, input=json.dumps(part), capture_output=True, text=True, env=env)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
        named = {entry["case"] for entry in found}
        lost = [
            {"case": name, "error": done.stderr[-1000:] or "the process ended"} for name in part if name not in named
        ]
        return found + lost

    # Small parts, so that the long ones do not come last on one worker.
    parts = [names[i : i + 4] for i in range(0, len(names), 4)]
    with ThreadPoolExecutor(workers) as pool:
        return {entry["case"]: entry for entries in pool.map(run, parts) for entry in entries}


def main() -> None:
    gpu, module = sys.argv[1:]
    for name in json.loads(sys.stdin.read()):
        try:
            entry = trace_case(name, gpu, module=module)
        except Exception:
            entry = {"case": name, "error": traceback.format_exc()[-1500:]}
        print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
