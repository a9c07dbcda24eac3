"""What a training run takes: FLOPs, days, GPU-hours, energy and money; and the learning-rate schedule it is planned with.

    days = 6 N D / (GPUs x dense peak x MFU) / 86,400

MFU, model FLOPs utilization, is the share of the peak that the model's own FLOPs reach: Chowdhery et al. 2022,
https://arxiv.org/abs/2204.02311, appendix B. The peak is the dense one. A datasheet's "with sparsity" is twice that, and
a run planned with it takes twice as long as planned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpukit import hardware
from gpukit.accounting.arguments import MOST_PARAMETERS, MOST_TOKENS, choice, positive, whole
from gpukit.accounting.flops import six_nd

DAY_S = 86_400
SPARSE_FACTOR = 2  # what 2:4 sparsity adds on a datasheet, Ampere and later; no dense matmul gets it
CHINCHILLA = 20  # tokens a parameter: Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556


@dataclass(frozen=True)
class Cost:
    """Of one run. energy_kwh is None where no power was given, money where no price was."""

    flops: int
    gpus: int
    flops_per_s: float  # that all GPUs together reach
    energy_kwh: float | None = None
    money: float | None = None

    @property
    def seconds(self) -> float:
        return self.flops / self.flops_per_s

    @property
    def days(self) -> float:
        return self.seconds / DAY_S

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.seconds / 3600


def training_cost(
    parameters: int, tokens: int, gpu: hardware.Gpu | str, gpus: int = 1, mfu: float = 0.4, *, dtype: str = "bf16",
    flops: int | None = None, sparse_peak: bool = False, watts: float | None = None, price_per_gpu_hour: float | None = None,
) -> Cost:  # fmt: skip
    """A run of 6 N D FLOPs, or of `flops` where they are known better.

    parameters   N; with experts what a token uses
    mfu          above 0 and at most 1, of the dense peak in `dtype`
    sparse_peak  plan with twice the dense peak, as a datasheet's headline tempts to: for showing what that does
    watts        of one GPU with its share of everything around it;  price_per_gpu_hour: in any currency
    Raises ValueError naming the argument and the rule.
    """
    where = "training_cost"
    gpu = _gpu(gpu)
    gpus = whole(where, "gpus", gpus, 1, 10**7)
    share = positive(where, "mfu", mfu, 1)
    work = six_nd(parameters, tokens) if flops is None else whole(where, "flops", flops, 1, 10**36)
    rate = gpus * gpu.peak(dtype) * (SPARSE_FACTOR if sparse_peak else 1) * share
    gpu_hours = gpus * work / rate / 3600
    energy = None if watts is None else positive(where, "watts", watts, 10**5) * gpu_hours / 1000
    money = (
        None
        if price_per_gpu_hour is None
        else positive(where, "price_per_gpu_hour", price_per_gpu_hour, 1e6) * gpu_hours
    )
    return Cost(work, gpus, rate, energy, money)


def mfu(
    tokens_per_s: float, flops_per_token: float, gpu: hardware.Gpu | str, gpus: int = 1, dtype: str = "bf16"
) -> float:
    """The share of the dense peak that a run of `tokens_per_s` over all GPUs reaches.

    flops_per_token  6 N, or a step's model FLOPs by its tokens. Raises ValueError where the result would be above 1: no
    GPU exceeds its peak, so one of the numbers is wrong.
    """
    gpu = _gpu(gpu)
    rate = positive("mfu", "tokens_per_s", tokens_per_s, 1e15) * positive("mfu", "flops_per_token", flops_per_token)
    share = rate / (whole("mfu", "gpus", gpus, 1, 10**7) * gpu.peak(dtype))
    if share > 1:
        raise ValueError(
            f"mfu: {tokens_per_s:,.6g} tokens/s of {flops_per_token:.3g} FLOPs are {share:.3g} times the dense peak of "
            f"{gpus} {gpu.name} in {dtype}; at most 1 is possible"
        )
    return share


def tokens_per_s(
    parameters: int, gpu: hardware.Gpu | str, gpus: int = 1, mfu: float = 0.4, dtype: str = "bf16"
) -> float:
    """Training tokens per second at that MFU, with 6 N FLOPs per token. Raises ValueError."""
    return 1 / training_cost(parameters, 1, gpu, gpus, mfu, dtype=dtype).seconds


def tokens_from_budget(
    parameters: int, gpu: hardware.Gpu | str, gpus: int, days: float, mfu: float = 0.4, dtype: str = "bf16"
) -> int:
    """How many tokens a model sees in that many days. Raises ValueError."""
    rate = tokens_per_s(parameters, gpu, gpus, mfu, dtype)
    return int(rate * positive("tokens_from_budget", "days", days, 1e6) * DAY_S)


def chinchilla_tokens(parameters: int) -> int:
    """20 tokens per parameter: about the best use of a fixed number of FLOPs, where the model's later use costs nothing."""
    return CHINCHILLA * whole("chinchilla_tokens", "parameters", parameters, 1, MOST_PARAMETERS)


def chinchilla_parameters(flops: float) -> int:
    """The model for which 6 N D = `flops` with D = 20 N. Raises ValueError."""
    return math.isqrt(whole("chinchilla_parameters", "flops", flops, 120, 10**36) // (6 * CHINCHILLA))


def _gpu(gpu: hardware.Gpu | str) -> hardware.Gpu:
    return gpu if isinstance(gpu, hardware.Gpu) else hardware.gpu(gpu)


# ---- the schedule ----------------------------------------------------------------------------------------------------

SHAPES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step: up in a line for `warmup` steps, then down to `final` x peak at step `steps`.

    Step 0 of a warm-up takes peak / warmup, not 0, which would be a step that learns nothing. Raises ValueError.
    """

    steps: int
    warmup: int = 0
    peak: float = 1.0
    final: float = 0.1
    shape: str = "cosine"

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole("schedule", "steps", self.steps, 1, MOST_TOKENS))
        object.__setattr__(self, "warmup", whole("schedule", "warmup", self.warmup, 0, self.steps))
        positive("schedule", "peak", self.peak, 1e6)
        if self.final:
            positive("schedule", "final", self.final, 1)
        choice("schedule", "shape", self.shape, SHAPES)

    def rate(self, step: int) -> float:
        """The learning rate of `step`, counted from 0; after the last step it stays at the last one's."""
        step = whole("schedule", "step", step, 0, MOST_TOKENS)
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        way = 1.0 if step >= self.steps else (step - self.warmup) / (self.steps - self.warmup)
        fall = {"cosine": (1 + math.cos(math.pi * way)) / 2, "linear": 1 - way, "constant": 1.0}[self.shape]
        return self.peak * (self.final + (1 - self.final) * fall)

    def mean_rate(self, samples: int = 1000) -> float:
        """The average over the run, as a share of the peak: what the same number of steps would sum up to at once."""
        last = self.steps - 1
        picked = (
            [round(last * i / max(samples - 1, 1)) for i in range(samples)]
            if self.steps > samples
            else range(self.steps)
        )
        rates = [self.rate(step) for step in picked]
        return sum(rates) / len(rates) / self.peak

    def share_below(self, fraction: float, samples: int = 1000) -> float:
        """The share of the run, hence of its cost, that is spent at less than `fraction` of the peak rate."""
        positive("schedule", "fraction", fraction, 1)
        picked = range(self.steps) if self.steps <= samples else [self.steps * i // samples for i in range(samples)]
        return sum(self.rate(step) < fraction * self.peak for step in picked) / len(picked)
