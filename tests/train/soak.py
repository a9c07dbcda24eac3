"""The soak: thousands of training steps with gpukit's kernels in one process, compared with PyTorch's step by step.

    make soak ARGS="--seconds 540"

`make test-gpu` shows that a kernel is right once. This is its longer sister, for what shows once in thousands of steps: a launch
table that mixes up two models, a counter that one launch leaves behind for another, an optimizer whose addresses are out of date,
memory that is taken from under a kernel. Many configurations run in turns in one process, compiled and not, large and small, and
the host never waits within a run. Before each round the cache of PyTorch's allocator is emptied or left, by turns, so that
addresses come again and do not.

- The losses of each run are compared with those of PyTorch's own parts on the same tokens, step by step. Rounding moves the loss
  of a single step by percents once the models have drifted apart, and the mean over the steps of a run far less. How far is
  measured: PyTorch's parts train again, from weights that differ by less than bfloat16 resolves. The mean distance of a run may
  be NOISES times theirs, or MEAN_BOUND if that is more, and no step may be off by STEP_BOUND; a run that went wrong is off by
  orders of magnitude. The weights must be finite.
- Runs of one configuration do the same work in other memory: the table says how many repeat the first one's losses bit for bit.
- AdamW alone takes ADAMW_STEPS steps beside PyTorch's on gradients that move to another place in each step.

It writes gpukit/results/<gpu>/soak.csv, a row for each configuration, and ends with status 1 where anything was out of bounds.
"""

from __future__ import annotations

import argparse
import csv
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import mean

import torch

from gpukit import benchmark
from gpukit.train import data, ladder, presets
from gpukit.train.compiled import Miscompiled
from gpukit.train.presets import Settings

MEAN_BOUND, STEP_BOUND = 0.005, 0.25  # parts of the loss
NOISES = 4
MOVED = 2.0**-10  # of a weight: half of what bfloat16 resolves below a power of two
ADAMW_STEPS = 2000
COLUMNS = (
    "preset",
    "batch",
    "seq",
    "way",
    "runs",
    "steps",
    "repeated",
    "mean_distance",
    "allowed",
    "largest",
    "at_step",
    "gpu",
    "torch",
    "triton",
    "commit",
    "date",
)

REFERENCE = ladder.How("autocast", "pytorch", optimizer="fused", padded=True)
WAYS = {
    "attention": {"attention": "gpukit"},
    "loss": {"loss": "chunked"},
    "AdamW": {"optimizer": "gpukit"},
    "attention, loss, AdamW": {"attention": "gpukit", "loss": "chunked", "optimizer": "gpukit"},
    "all": {"attention": "gpukit", "loss": "chunked", "optimizer": "gpukit", "kernels": True},
}


def configurations(chosen: list[str]) -> Iterator[tuple[str, Settings]]:
    """Large and small by turns."""
    for name, batch, seq, steps in (
        ("gpt2", 16, 1024, 40),
        ("gpt-1.3b", 4, 4096, 10),
        ("gpt2", 3, 777, 80),
        ("llama-1b", 2, 2048, 10),
        ("tiny", 8, 128, 300),
    ):
        if name in chosen:
            yield name, presets.preset(name).settings.replace(batch=batch, seq=seq, steps=steps, micro_batches=1)


def losses(
    settings: Settings, way: ladder.How, corpus: data.Corpus, device: torch.device, moved: int | None = None
) -> list[float]:
    """The loss of every step; NaN at the end if a weight is not finite. The host waits once, at the end. `moved` is the seed of
    small changes to the weights before the first step (default: none)."""
    trained = ladder.Trained(settings, way, corpus, device)
    if moved is not None:
        generator = torch.Generator(device).manual_seed(moved)
        for weight in trained.model.parameters():
            noise = torch.rand(weight.shape, generator=generator, device=device)
            weight.data.mul_(1 + MOVED * (2 * noise - 1))
    found = [trained.step() for _ in range(settings.steps)]
    finite = torch.stack([parameter.isfinite().all() for parameter in trained.model.parameters()]).all()
    values = torch.stack(found).tolist()
    return values if finite.item() else [*values, float("nan")]


def distances(found: list[float], expected: list[float]) -> list[float]:
    """How far each loss is from the expected one, in parts of that; infinitely far where the run ended with NaN."""
    if len(found) != len(expected):
        return [float("inf")] * len(expected)
    return [abs(a - b) / abs(b) if a == a else float("inf") for a, b in zip(found, expected, strict=True)]


def allowed(losses: list[float], others: list[list[float]]) -> float:
    """How far from `losses` a run may be in the mean; `others` are of runs that differ by rounding."""
    return max(MEAN_BOUND, NOISES * max(mean(distances(other, losses)) for other in others))


@dataclass
class Row:
    """What the runs of one configuration did.

    expected       PyTorch's losses
    allowed        the mean distance from them that rounding explains
    runs, steps    so far
    repeated       runs after the first whose losses equal the first one's in every bit
    mean_distance  from PyTorch's losses, of the run that was farthest
    largest, step  the distance of a single step, and its number, counted from 1
    """

    expected: list[float]
    allowed: float
    first: list[float] = field(default_factory=list)
    runs: int = 0
    steps: int = 0
    repeated: int = 0
    mean_distance: float = 0.0
    largest: float = 0.0
    step: int = 0

    def note(self, found: list[float]) -> bool:
        """Whether this run was within bounds."""
        apart = distances(found, self.expected)
        self.repeated += found == self.first
        self.first = self.first or found
        self.runs, self.steps = self.runs + 1, self.steps + len(apart)
        self.mean_distance = max(self.mean_distance, mean(apart))
        self.largest, self.step = max((self.largest, self.step), *zip(apart, count(1), strict=False))
        return mean(apart) <= self.allowed and max(apart) <= STEP_BOUND

    @property
    def failed(self) -> bool:
        return not (self.mean_distance <= self.allowed and self.largest <= STEP_BOUND)


class Soak:
    """Rounds over all configurations until the time is over. `rows` are by (preset, batch, seq, way)."""

    def __init__(self, device: torch.device, corpus: data.Corpus, say: Callable[[str], None] = print):
        self.device, self.corpus, self.say = device, corpus, say
        self.rows: dict[tuple, Row] = {}
        self.expected: dict[tuple, tuple[list[float], float]] = {}

    def round(self, chosen: list[str], compiled: bool, until: float) -> bool:
        """One round; False where its time was over before its end."""
        for name, settings in configurations(chosen):
            key = name, settings.batch, settings.seq
            if key not in self.expected:
                first, *others = (losses(settings, REFERENCE, self.corpus, self.device, seed) for seed in (None, 1, 2))
                self.expected[key] = first, allowed(first, others)
            for way, changes in WAYS.items():
                if time.monotonic() > until:
                    return False
                how = replace(REFERENCE, compiled=compiled, **changes)
                try:
                    found = losses(settings, how, self.corpus, self.device)
                except Miscompiled as error:  # PyTorch's, and found out: no run
                    self.say(f"{key} {way}: {error}")
                    continue
                row = self.rows.setdefault((*key, way + (", compiled" if compiled else "")), Row(*self.expected[key]))
                if not row.note(found):
                    self.say(f"OUT OF BOUNDS: {key} {how}: {found} instead of {row.expected}")
                self.tidy()
        return True

    @property
    def steps(self) -> int:
        return sum(row.steps for row in self.rows.values())

    def tidy(self) -> None:
        gc.collect()
        torch.compiler.reset()
        if self.device.type == "cuda" and len(self.rows) % 2:
            torch.cuda.empty_cache()

    @property
    def failed(self) -> bool:
        return any(row.failed for row in self.rows.values())


def adamw(device: torch.device, steps: int = ADAMW_STEPS, copies: int = 8) -> tuple[float, int]:
    """gpukit's AdamW beside PyTorch's, float32, on gradients in a new place in each step, some of which are kept alive: the
    largest distance of a weight in parts of the learning rate's sum so far, and its step."""
    from gpukit.kernels import AdamW

    generator = torch.Generator(device).manual_seed(0)
    shapes = [(64, 257), (1,), (1000, 33), (17,), (4096,), (3, 5, 7)] * copies
    ours, theirs = (
        [torch.randn(s, device=device, generator=generator).requires_grad_() for s in shapes] for _ in range(2)
    )
    for a, b in zip(ours, theirs, strict=True):
        b.data.copy_(a.data)
    optimizers = AdamW(ours, lr=1e-3), torch.optim.AdamW(theirs, lr=1e-3)
    kept: list[torch.Tensor] = []
    largest = 0.0, 0
    for step in range(1, steps + 1):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, device=device, generator=generator)
            b.grad = a.grad.clone()
        kept = [*kept, ours[step % len(ours)].grad][-13:]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps:
            distance = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) / (1e-3 * step)
            largest = max(largest, (distance if distance == distance else float("inf"), step))
    return largest


ADAMW_BOUND = 1e-3  # of the way that a weight can have gone


def write(soak: Soak, name: str) -> Path:
    path = benchmark.RESULTS / benchmark.gpu_key(name) / "soak.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    same = benchmark.identity(name)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for key, row in soak.rows.items():
            told = (
                row.runs,
                row.steps,
                row.repeated,
                *(f"{x:.2e}" for x in (row.mean_distance, row.allowed, row.largest)),
            )
            table.writerow([*key, *told, row.step, *(same[c] for c in COLUMNS[-5:])])
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.train.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=540, help="after which no run begins (default: 540)")
    parser.add_argument("--presets", nargs="+", default=["gpt2", "gpt-1.3b", "llama-1b", "tiny"])
    parser.add_argument(
        "--compiled-every", type=int, default=4, metavar="N",
        help="compile in every N-th round (default: 4, since compiling takes longer than training); 1: always",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    if args.compiled_every < 1:
        parser.error(f"--compiled-every must be 1 or more, got {args.compiled_every}")
    until = time.monotonic() + args.seconds
    device = torch.device(args.device)
    distance, step = adamw(device)
    print(f"AdamW beside PyTorch's, {ADAMW_STEPS:,} steps: at most {distance:.1e} of the way, at step {step}")
    # A text of few tokens, which every model knows: a vocabulary of 50,257 takes a minute to learn.
    soak = Soak(device, data.prepare(min(presets.preset(name).settings.model["vocab_size"] for name in args.presets)))
    number = 0
    every = args.compiled_every
    while soak.round(args.presets, number % every == every - 1, until):
        number += 1
        print(f"round {number}: {soak.steps:,} steps", flush=True)
    for key, row in soak.rows.items():
        again = f"{row.repeated} of {row.runs - 1} repeated" if row.runs > 1 else "one run"
        print(*key, f"{row.steps} steps, {again}", sep="  ", end="  ")
        print(f"mean {row.mean_distance:.1e} ({row.allowed:.1e} allowed), largest {row.largest:.1e} at step {row.step}")
    print(f"{soak.steps:,} steps")
    if device.type == "cuda":
        print(write(soak, torch.cuda.get_device_name()))
    return int(soak.failed or distance > ADAMW_BOUND)


if __name__ == "__main__":
    sys.exit(main())
