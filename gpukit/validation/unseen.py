"""Sets of kernels that are measured first and predicted afterwards, by two commands. They are about the newest set, or with
--set about an older one.

gpukit validate --measure    on a GPU: the times of the set's kernels, and Nsight Compute's counters of them
gpukit validate --predict    afterwards, on any machine: the model's times and traffic beside these

Of the twelfth set, the first writes twelfth_raw.csv and twelfth_counters.json into gpukit/results/<gpu>/, and the second
twelfth.csv and twelfth_traffic.csv. `gpukit validate` shows these sets before all else, the newest first.

A set's rows are those that were predicted first, by a model that had not seen its kernels on any GPU (the third's and the fourth's of an
H200: by one that had seen them on an H100). What each set showed is not told here but in design/validation.md, so that the author of the
next set can read this without knowing what the model gets wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from gpukit.validation import counters, times, traffic

# The newest first.
SETS = ("twelfth", "eleventh", "tenth", "ninth", "eighth", "seventh", "sixth", "fifth", "fourth", "third")
NEWEST = SETS[0]
# What is kept of what ncu says: names, and the counters that are shown.
_KEPT = ("kernel", *dict.fromkeys(name for names in counters.JUDGED.values() for name in names))


def raw(name: str) -> str:
    """The file with the measured times of a set."""
    return f"{name}_raw.csv"


def counted(name: str) -> str:
    """The file with its counters."""
    return f"{name}_counters.json"


def nothing(name: str) -> str:
    """What is said of a set of which nothing is measured."""
    return (
        f"{name.upper()} SET, kernels to be measured before they are predicted: nothing is measured of them yet; on a machine "
        f"with an NVIDIA GPU and Nsight Compute run: {_command('measure', name)}"
    )


def rows(gpu: str) -> list[times.Row]:
    """The times of the newest set that has been predicted for a GPU. Raises FileNotFoundError where none has."""
    found = [name for name in SETS if (times.RESULTS / gpu / times.KERNELS[name][1]).exists()]
    return times.read(gpu, found[0] if found else NEWEST)


def measure(name: str = NEWEST, seconds: float = 150) -> int:
    """Time and count a set on this machine's GPU, each for at most so many seconds. 0 if all was measured, 1 if not all, 2
    if nothing: there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        print("--measure needs an NVIDIA GPU, and PyTorch sees none", file=sys.stderr)
        return 2
    facts = counters.facts()
    folder = times.RESULTS / facts["gpu"]
    failed = times.measure(folder / raw(name), "", _workers(), seconds, name)  # compiles all of it into Triton's cache
    try:
        runs = counters.measure(list(times.cases(name)), print, seconds, traffic.KERNELS[name][0])
    except RuntimeError as error:
        print(f"no counters: {error}", file=sys.stderr)
        return 1
    return max(failed, keep(folder / counted(name), facts, runs))


def keep(path: Path, facts: dict, runs: list[dict]) -> int:
    """Write what is shown of the counters that `counters.measure` returned. 0, or 1 where ncu saw no kernel."""
    kept = [
        {"log": run["log"], "rows": [{name: row[name] for name in _KEPT if name in row} for row in run["rows"]]}
        for run in runs
    ]
    path.write_text(json.dumps({"facts": facts, "runs": kept}, indent=1) + "\n")
    return int(not any(run["rows"] for run in kept))


def predict(name: str = NEWEST) -> int:
    """Predict what was measured of a set, for each GPU of which there are measurements. 0, 1 where something could not be
    predicted or is outside its bar, 2 where nothing is measured."""
    from gpukit.validation import __main__ as command

    found = sorted(path.parent for path in times.RESULTS.glob(f"*/{raw(name)}"))
    if not found:
        print(nothing(name), file=sys.stderr)
        return 2
    wrong = 0
    for folder in found:
        wrong |= times.again(folder / raw(name), "", _workers(), name)
        if (folder / counted(name)).exists():
            args = argparse.Namespace(kernels=name, only="", misses=False, workers=_workers(), gpu=folder.name)
            wrong |= command.compare_kept(folder / counted(name), args)
    return wrong


def state(gpus: list[str], name: str = NEWEST) -> list[str]:
    """What is missing of a set, a line each; empty where all that was measured is predicted."""
    predicted = [gpu for gpu in gpus if (times.RESULTS / gpu / times.KERNELS[name][1]).exists()]
    waiting = [gpu for gpu in gpus if gpu not in predicted and (times.RESULTS / gpu / raw(name)).exists()]
    if not predicted and not waiting:
        return [nothing(name)]
    end = f"and not predicted yet: {_command('predict', name)}"
    return [f"{name.upper()} SET, measured on {gpu} {end}" for gpu in waiting]


def _command(what: str, name: str) -> str:
    return f"gpukit validate --{what}" + ("" if name == NEWEST else f" --set {name}")


def _workers() -> int:
    return max(1, min(12, (os.cpu_count() or 2) - 2))
