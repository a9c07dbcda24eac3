"""The third set of kernels: measured first and predicted afterwards, by two commands.

gpukit validate --measure    on a GPU: the times of third_set's kernels, and Nsight Compute's counters of them
gpukit validate --predict    afterwards, on any machine: the model's times and traffic beside these

The first writes third_raw.csv and third_counters.json into gpukit/results/<gpu>/, the second third.csv and
third_traffic.csv, which `gpukit validate` shows before all else.

The rows of the H100 were predicted once it was measured (2026-11-27), and are kept as they were. They showed two mistakes in how
often instructions of a loop run (those of tl.max, and those for what an inner loop leaves over), which were fixed afterwards
(gpukit/simulator/prediction/mix.py): predicting again writes what the fixed model says, and that model has seen the set.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from gpukit.validation import counters, times, traffic

SET = "third"
RAW, COUNTERS = "third_raw.csv", "third_counters.json"
NOTHING = (
    "THIRD SET, kernels that nobody has predicted: nothing is measured of them yet; on a machine with an NVIDIA GPU and "
    "Nsight Compute run: gpukit validate --measure"
)
# What is kept of what ncu says: names, and the counters that are shown.
_KEPT = ("kernel", *dict.fromkeys(name for names in counters.JUDGED.values() for name in names))


def measure(seconds: float = 150) -> int:
    """Time and count the set on this machine's GPU, each for at most so many seconds. 0 if all was measured, 1 if not all, 2
    if nothing: there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        print("--measure needs an NVIDIA GPU, and PyTorch sees none", file=sys.stderr)
        return 2
    facts = counters.facts()
    folder = times.RESULTS / facts["gpu"]
    failed = times.measure(folder / RAW, "", _workers(), seconds, SET)  # compiles all of it into Triton's cache
    try:
        runs = counters.measure(list(times.cases(SET)), print, seconds, traffic.KERNELS[SET][0])
    except RuntimeError as error:
        print(f"no counters: {error}", file=sys.stderr)
        return 1
    return max(failed, keep(folder, facts, runs))


def keep(folder: Path, facts: dict, runs: list[dict]) -> int:
    """Write what is shown of the counters that `counters.measure` returned. 0, or 1 where ncu saw no kernel."""
    kept = [
        {"log": run["log"], "rows": [{name: row[name] for name in _KEPT if name in row} for row in run["rows"]]}
        for run in runs
    ]
    (folder / COUNTERS).write_text(json.dumps({"facts": facts, "runs": kept}, indent=1) + "\n")
    return int(not any(run["rows"] for run in kept))


def predict() -> int:
    """Predict what was measured, for each GPU of which there are measurements. 0, 1 where something could not be predicted or
    is outside its bar, 2 where nothing is measured."""
    from gpukit.validation import __main__ as command

    found = sorted(path.parent for path in times.RESULTS.glob(f"*/{RAW}"))
    if not found:
        print(NOTHING, file=sys.stderr)
        return 2
    wrong = 0
    for folder in found:
        wrong |= times.again(folder / RAW, "", _workers(), SET)
        if (folder / COUNTERS).exists():
            args = argparse.Namespace(kernels=SET, only="", misses=False, workers=_workers(), gpu=folder.name)
            wrong |= command.compare_kept(folder / COUNTERS, args)
    return wrong


def state(gpus: list[str]) -> list[str]:
    """What is missing, a line each; empty where all that was measured is predicted."""
    measured = [gpu for gpu in gpus if (times.RESULTS / gpu / RAW).exists()]
    waiting = [gpu for gpu in measured if not (times.RESULTS / gpu / times.KERNELS[SET][1]).exists()]
    if not measured and not any((times.RESULTS / gpu / times.KERNELS[SET][1]).exists() for gpu in gpus):
        return [NOTHING]
    return [f"THIRD SET, measured on {gpu} and not predicted yet: gpukit validate --predict" for gpu in waiting]


def _workers() -> int:
    return max(1, min(12, (os.cpu_count() or 2) - 2))
