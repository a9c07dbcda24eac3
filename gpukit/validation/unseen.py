"""Sets of kernels that are measured first and predicted afterwards, by two commands. They are about the newest set, or with
--set about an older one.

gpukit validate --measure    on a GPU: the times of the set's kernels, and Nsight Compute's counters of them
gpukit validate --predict    afterwards, on any machine: the model's times and traffic beside these

Of the twelfth set, the first writes twelfth_raw.csv and twelfth_counters.json into gpukit/results/<gpu>/, and the second
twelfth.csv and twelfth_traffic.csv. `gpukit validate` shows these sets before all else, the newest first.

The third set's rows of the H100 were predicted once it was measured (2026-11-27), and are kept as they were. They showed two
mistakes in how often instructions of a loop run (those of tl.max, and those for what an inner loop leaves over), which were
fixed afterwards (gpukit/simulator/prediction/mix.py): predicting again writes what the fixed model says, and that model has
seen the set.

The fourth set's rows are those of the day on which it was measured, too (2026-11-28). What samples of both sets took to be read
from DRAM again, or to be stored in places of its own, was fixed afterwards (gpukit/simulator/trace/waves.py), and so was how
long loads are waited for, and what takes its turn beside a loop whose loads run ahead (gpukit/simulator/prediction/).

The fifth set tested the model as it was after these fixes, on both GPUs. It showed that what a sine does with large numbers
was counted as run, a function's calls in a loop as turns of it, and answers of L2 to atomics that the compiler had made
reductions, which was fixed afterwards (gpukit/simulator/prediction/mix.py, gpukit/simulator/trace/contention.py). So was how
often loads are waited for that L1 lacks, that few warps do not keep the units of an SM busy (gpukit/simulator/prediction/), what
it takes to read halves of lines from DRAM, and which lanes meet in L1 (gpukit/simulator/trace/).

The rows of the third and the fourth set on an H200 are of 2026-11-28, too: predicted after they were measured, by a model that
had been fixed after both sets had been seen on an H100.

The sixth set tested the model as it was after what the fifth set showed had been fixed. Its rows of an H200 are those that were
predicted first, on the day on which it was measured (2026-11-28): off by 15.9% in the median and 70.7% at worst, with 36 of 42
times within 35%, and 144 of 192 rows of traffic inside their bars. It showed that words which a loop spills were counted once,
that L1 was taken to be larger than it is beside much shared memory, that copies were never waited for, and that two programs
stood for all where these differ, which was fixed afterwards.

The seventh set tested the model as it was after what the sixth set showed had been fixed. Its rows of an H200 are those that were
predicted first, on the day on which it was measured (2026-11-28): off by 12.5% in the median and 177% at worst, with 39 of 45
times within 35%. (One of its 46 kernels, a product with the norm of its rows inside, computes something else on a GPU, compiled by
Triton 3.6, than in the interpreter. The 12 steps between two halves were first timed with the host's launches, at 316 µs.) It
showed that parts of sectors cost more on their way into L2 and between its halves, that L2 looks for each line it is asked for,
that copies wait for the copies of others, and that what the first programs of a sample read says little of the others where these
have less to do, which was fixed afterwards (gpukit/simulator/prediction/, gpukit/simulator/trace/).

The eighth set tested the model as it was after what the seventh set showed had been fixed. Its rows of an H200 are those that were
predicted first, on the day on which it was measured (2026-11-28): off by 7.6% in the median and 79.7% at worst, with 28 of 34
times within 35%, and 124 of 150 rows of traffic inside their bars. Two kernels are refused, whose addresses or masks depend on
numbers. It showed that L1 moves wide loads for a few lanes at a time, and looks for what narrow copies to shared memory ask for,
which was fixed afterwards (gpukit/simulator/trace/instructions.py, gpukit/simulator/prediction/predict.py).

The ninth set tested the model as it was after that, after the rest of what the eighth set showed had been fixed (which lanes meet
in shared memory, and atomics in one slice of L2), and after kernels that do one thing only had been measured. It was written without
looking at the model. Its rows of an H200 are those that were predicted first, on the day on which it was measured (2026-11-28):
off by 8.0% in the median and 75.1% at worst, with 32 of 34 times within 35%, and 107 of 151 rows of traffic inside their bars. Two
kernels are refused, whose addresses depend on numbers. It showed that two programs which go by integers in memory may be alike by
chance, which was fixed afterwards (gpukit/simulator/interpreter/executor.py).

The tenth set tested the model as it was after what the ninth set showed had been fixed, and after it had begun to follow all warps of
an SM (gpukit/simulator/prediction/scoreboard.py). It was written without looking at the model. Its rows of an H200 are those that
were predicted first, on the day on which it was measured (2026-11-29): off by 5.5% in the median and 72.9% at worst, with 36 of 38
times within 35%, and 114 of 160 rows of traffic inside their bars. Two kernels are refused, whose addresses depend on numbers. It
showed that what one load of a row brings is there for the next, and that stores of several statements to one sector meet, which was
fixed afterwards (gpukit/simulator/trace/places.py, waves.py, caches.py).

The eleventh set tests the model as it is after that, and after machine code and kernels that do one thing only had shown what a warp
waits for (gpukit/simulator/prediction/scoreboard.py, between.py). It was written without looking at the model; to wire it, its author
read this docstring. Its rows of an H200 are those that were predicted first, on the day on which it was measured (2026-11-29): off by
7.3% in the median and 100% at worst, with 34 of 37 times within 35%, and 124 of 165 rows of traffic inside their bars. One kernel is
refused, whose addresses depend on numbers. Two have no time: Triton 3.6 computes something else for one (a chain of products whose rows
stay in registers), and the reference of the other rounded a logarithm, which was fixed afterwards.
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
