"""A file of one's own beside Nsight Compute: `gpukit trace --ncu FILE.py`, on a machine with a GPU.

The file runs twice, each time in a process of its own: once traced, which predicts each launch of a Triton kernel, and once
under ncu, which measures the same launches. Launches of one kernel with as many programs make one table.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from gpukit import hardware, tables
from gpukit.validation import counters, simulated_counts

# What a table shows -> our count, or ncu's counter where that is one of counters.JUDGED.
ROWS = {
    "registers per thread": "registers",
    "L1, sectors loaded": "l1_read_sectors",
    "L1, sectors stored": "l1_write_sectors",
    "L2, sectors read": "l2_read_sectors",
    "L2, sectors stored": "l2_write_sectors",
    "L2, sectors of atomics": "l2_atomic_sectors",
    "DRAM, bytes read": "dram_read_bytes",
    "DRAM, bytes written": "dram_write_bytes",
    "time (µs)": "time_us",
}
_SECONDS = 300
_NOT_ALLOWED = (
    "ncu may not read the counters of this GPU (ERR_NVGPUCTRPERM): run it as root, or allow it for every user as "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM says"
)


def command(path: Path) -> str:
    """What `gpukit trace --ncu` prints. Raises ValueError for a file that cannot be run or launches no Triton kernel, and
    RuntimeError where there is no GPU, no ncu, or none that may measure."""
    if not path.is_file():
        raise ValueError(f"--ncu needs a Python file that launches kernels, and there is no file {path}")
    gpu, ncu = this_gpu(), counters.find_ncu()
    traced = _traced(path, gpu)
    return report(gpu, traced, _measured(path, ncu, {launch["kernel"] for launch in traced}))


def this_gpu() -> hardware.Gpu:
    """The GPU of this machine. Raises RuntimeError where PyTorch sees none, and ValueError for one that is not in the table."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("--ncu measures on a GPU, and PyTorch finds none on this machine")
    return hardware.gpu(torch.cuda.get_device_name())


def _traced(path: Path, gpu: hardware.Gpu) -> list[dict]:
    """What gpukit counts and models of each launch of the file, in order."""
    import torch

    interpreted = (
        "0" if torch.cuda.is_available() else "1"
    )  # beside a GPU a kernel also runs, or the next one has no data
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "launches.json"
        call = [sys.executable, "-m", "gpukit.validation.own_file", "trace", str(path), gpu.key, str(answer)]
        environment = counters.environment(path.resolve().parent) | {"TRITON_INTERPRET": interpreted}
        done = subprocess.run(call, env=environment, capture_output=True, text=True)
        if not answer.exists():
            last = (done.stderr.strip().splitlines() or ["the process ended"])[-1]
            raise ValueError(f"{path.name} could not be traced: {last}")
        found = json.loads(answer.read_text())
    if isinstance(found, str):
        raise ValueError(f"{path.name} could not be traced: {found}")
    if not found:
        raise ValueError(f"{path.name} launches no Triton kernel")
    return found


def _measured(path: Path, ncu: str, kernels: set[str]) -> list[dict]:
    """What ncu saw of the file's launches of these kernels, in order."""
    only = ["--kernel-name", f"regex:^({'|'.join(map(re.escape, sorted(kernels)))})$"]
    target = ["gpukit.validation.own_file", "run", str(path)]
    known = counters.known_counters(ncu, lambda line: None)
    status, output, text = counters.profile(ncu, known, target, _SECONDS, only, path.resolve().parent)
    if "ERR_NVGPUCTRPERM" in output + text:
        raise RuntimeError(_NOT_ALLOWED)
    rows = counters.read_csv(text)
    if not rows:
        said = [line for line in (text + "\n" + output).splitlines() if line.strip()]
        wrong = [line for line in said if "==ERROR==" in line] or said[-1:] or ["nothing was said"]
        raise RuntimeError(f"ncu measured no kernel of {path.name} (status {status}): {wrong[0].strip()}")
    return rows


def report(gpu: hardware.Gpu, traced: list[dict], measured: list[dict]) -> str:
    """A table for each kernel and number of programs, in 80 columns: gpukit's numbers, ncu's, and how far gpukit's are off."""
    lines = [
        f"{gpu.name}; per launch, from cold caches. Sectors have 32 bytes.",
        "gpukit: counted and modelled without the GPU; ncu: measured on it",
    ]
    theirs = _grouped(measured, "launch__grid_size")
    for (kernel, programs), own in _grouped(traced, "programs").items():
        seen = theirs.get((kernel, programs), [])
        rows = [["", "gpukit", "ncu", "deviation"], ["launches", f"{len(own):,}", f"{len(seen):,}", ""]]
        for title, name in ROWS.items():
            our = _mean([launch.get(name) for launch in own])
            their = _mean([_of_ncu(row, name) for row in seen])
            if our or their:
                rows.append([title, _cell(our), _cell(their), _deviation(our, their)])
        lines += ["", f"{kernel}, {programs:,} program{'s' * (programs != 1)}"[:80]]
        lines += tables.aligned(rows, right=range(1, 4), rules=[1])
        uncertain = {launch["uncertain"] for launch in own if launch.get("uncertain")}
        lines += [line for why in uncertain for line in textwrap.wrap(why, 80)]
    return "\n".join(lines)


def _grouped(launches: list[dict], count: str) -> dict[tuple[str, int], list[dict]]:
    found: dict[tuple[str, int], list[dict]] = {}
    for launch in launches:
        found.setdefault((launch["kernel"], int(launch.get(count, 0))), []).append(launch)
    return found


def _of_ncu(row: dict, name: str) -> float | None:
    if name == "registers":
        return row.get("launch__registers_per_thread")
    if name == "time_us":
        ns = counters.judged(row, "time_ns")
        return None if ns is None else ns / 1e3
    return counters.judged(row, name)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value != int(value) else f"{value:,.0f}"


def _deviation(our: float | None, their: float | None) -> str:
    return f"{our / their - 1:+.1%}" if our is not None and their else "-"


# ---- the file's own processes -------------------------------------------------------------------------------------


def _run(path: Path) -> None:
    """As `python FILE.py` does."""
    sys.argv = [str(path)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"it ended with status {end.code}") from None


def launches(path: Path, gpu: hardware.Gpu) -> list[dict]:
    """Each launch of the file as plain data: kernel, programs, and our values of ROWS. The time is the kernel's own,
    without the launch. Raises whatever the file raises."""
    from gpukit.simulator.prediction.machine import machine
    from gpukit.simulator.prediction.predict import LAUNCH, predict

    found = []
    for step in predict(lambda: _run(path), gpu=gpu).steps:
        if step.launch is None:
            continue
        traffic = step.launch.traffic(gpu, step.compiled)
        own = step.time_us - step.resources[LAUNCH] + 2e-3 * machine(gpu).dram_ns
        counts = {name: simulated_counts.count(traffic, name) for name in simulated_counts.COUNTERS}
        found.append(
            {"kernel": step.name, "programs": step.launch.programs, "registers": step.compiled.registers, "time_us": own,
             "uncertain": step.uncertain, **counts}
        )  # fmt: skip
    return found


def main(what: str, path: Path, *more: str) -> int:
    if what == "run":  # under ncu, which looks at what is between these two
        import torch

        torch.cuda.cudart().cudaProfilerStart()
        _run(path)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        return 0
    gpu, answer = hardware.gpu(more[0]), Path(more[1])
    try:
        found = launches(path, gpu)
    except Exception as error:
        nothing = isinstance(error, ValueError) and str(error).startswith("predict: nothing was launched")
        found = [] if nothing else f"{type(error).__name__}: {error}".splitlines()[0]
    answer.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
