"""When the kernels of a step of GPT-2's ladder run: `python -m tests.train.timeline` on a machine with a GPU.

Writes gpukit/results/<gpu>/ladder-timeline.csv: for the rungs RUNGS, recorded by PyTorch's profiler, stretches of a step in which
kernels of one kind ran, one soon after the other: rung, what, start_ms, ms, and kernels_ms, how long its kernels took. A step
begins at its first matrix product: before it the profiler starts, and a batch is copied to the GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from gpukit import benchmark, profiling
from gpukit.train import data, ladder, presets
from tests.train.scaling import grouped, stretches, write

RUNGS = {"naive": 8, "bf16 weights": 1}  # and the passes that the batch takes
KINDS = {
    "attention": r"flash_attention|sdpa|softmax_warp",  # the naive one's softmax; its products are among the products
    "loss": r"cross_entropy|cunn_SoftMax|nll_loss",
    "matrix products": r"gemm|nvjet|cutlass|splitK",
}
COLUMNS = ("rung", "what", "start_ms", "ms", "kernels_ms")


def kind(name: str) -> str:
    """What a kernel of this name is part of."""
    return next((what for what, pattern in KINDS.items() if re.search(pattern, name)), "everything else")


def rows(rung: str, record: profiling.Profile) -> list[dict]:
    """The stretches of a step from its first product on. Gaps that no picture could show are bridged."""
    kernels = sorted(record.kernels, key=lambda span: span.start_us)
    first = next(i for i, span in enumerate(kernels) if kind(span.name) == "matrix products")
    step = dataclasses.replace(record, spans=tuple(kernels[first:]))
    groups = grouped(step, kind, bridged_us=step.span_us / 2000)
    took = [sum(span.duration_us for span in stretch) for of_kind in groups.values() for stretch in of_kind]
    return [
        {"rung": rung, **row, "kernels_ms": f"{us / 1e3:.2f}"} for row, us in zip(stretches(groups), took, strict=True)
    ]


def recorded(rung: str, passes: int) -> profiling.Profile:
    settings = presets.preset("gpt2").settings.replace(batch=64, micro_batches=1, steps=20)
    _, _, way = ladder.how([rung], passes)[rung]
    trained = ladder.Trained(
        settings, dataclasses.replace(way, passes=passes), data.prepare(8192), torch.device("cuda")
    )
    for _ in range(5):
        trained.step()
    for _ in range(2):  # the first start of the profiler takes long
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
            trained.step()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return profiling.load(f"{folder}/trace.json")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", nargs="+", metavar="RUNG=FILE", help="of these records, and measure nothing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there instead of gpukit/results/<gpu>/")
    args = parser.parse_args(argv)
    if args.draw:
        records = {rung: profiling.load(file) for rung, file in (pair.split("=", 1) for pair in args.draw)}
    elif torch.cuda.is_available():
        records = {rung: recorded(rung, passes) for rung, passes in RUNGS.items()}
    else:
        print("needs a GPU", file=sys.stderr)
        return 2
    out = args.out or benchmark.RESULTS / benchmark.gpu_key(torch.cuda.get_device_name()) / "ladder-timeline.csv"
    write(out, [row for rung, record in records.items() for row in rows(rung, record)], COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
