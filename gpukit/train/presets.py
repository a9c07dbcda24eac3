"""What can be trained by name: `gpukit train --preset tiny`. Data only; nothing here loads torch."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpukit.accounting.arguments import choice, divides, whole
from gpukit.nearest import did_you_mean

DTYPES = ("fp32", "bf16")
OPTIMIZERS = ("torch", "gpukit")
KERNELS = ("torch", "gpukit")
SHARDINGS = ("ddp", "fsdp")
RECOMPUTE = ("none", "full")


@dataclass(frozen=True)
class Settings:
    """One training run, as config.json of its folder keeps it.

    preset            the name it began with
    model             the arguments of gpukit.train.model.GPTConfig; its vocabulary is the tokenizer's as well
    seq               tokens in each sequence, at most the model's context
    batch             sequences per step, over all processes
    micro_batches     into how many parts a step splits the batch: only the activations of one are held, the gradients add up
    steps             optimizer steps of the whole run, after which the learning rate has come down
    rate, final_rate  the highest learning rate, and the share of it that is left at the end
    warmup            steps in which the learning rate rises
    weight_decay, betas, clip   of AdamW; gradients are scaled down to the norm `clip` where theirs is larger
    dtype             "fp32", or "bf16": matrix products in bf16 (autocast), weights and optimizer in fp32
    optimizer         "torch" or "gpukit": whose AdamW
    kernels           whose attention and loss the model calls: "torch", or "gpukit" (FlashAttention and a loss without logits)
    compile           whether torch.compile fuses the model's other operators
    sharding          of several processes each holds the whole model ("ddp") or an equal share of it ("fsdp")
    recompute         "full": blocks keep only their inputs for the backward pass, which computes the rest again
    text              folder whose Python files are trained on; "" for Python's standard library
    seed              of the weights, of the order of sequences and of the samples
    *_every           steps between two lines of progress, evaluations and checkpoints
    eval_sequences    sequences of an evaluation
    sample            tokens that are generated after an evaluation, to be read

    Raises ValueError naming the argument, what was given and what is allowed.
    """

    preset: str
    model: Mapping[str, Any] = field(hash=False)
    seq: int
    batch: int
    steps: int
    rate: float
    micro_batches: int = 1
    warmup: int = 0
    final_rate: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    dtype: str = "bf16"
    optimizer: str = "torch"
    kernels: str = "torch"
    compile: bool = False
    sharding: str = "ddp"
    recompute: str = "none"
    text: str = ""
    seed: int = 0
    log_every: int = 10
    eval_every: int = 250
    checkpoint_every: int = 250
    eval_sequences: int = 160
    sample: int = 100

    def __post_init__(self) -> None:
        for name in ("seq", "batch", "micro_batches", "steps", "log_every", "eval_every", "checkpoint_every"):
            whole("train", name, getattr(self, name))
        whole("train", "eval_sequences", self.eval_sequences)
        whole("train", "sample", self.sample, 0)
        whole("train", "seed", self.seed, 0, 2**63 - 1)
        # A run of few steps is warmed up in half of them.
        object.__setattr__(self, "warmup", whole("train", "warmup", min(self.warmup, self.steps // 2), 0))
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON makes lists of tuples
        divides("train", "micro_batches", self.micro_batches, "batch", self.batch)
        for name in ("rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"train: {name} must be a number above 0, got {getattr(self, name)!r}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"train: weight_decay must be 0 or more, got {self.weight_decay!r}")
        choice("train", "dtype", self.dtype, DTYPES)
        choice("train", "optimizer", self.optimizer, OPTIMIZERS)
        choice("train", "kernels", self.kernels, KERNELS)
        choice("train", "sharding", self.sharding, SHARDINGS)
        choice("train", "recompute", self.recompute, RECOMPUTE)
        if self.sharding == "fsdp" and self.optimizer == "gpukit":
            raise ValueError(
                "train: sharding fsdp needs optimizer torch: gpukit's AdamW computes the norm of the gradients that it clips in its "
                "own kernel, from one process's share alone"
            )
        if self.sharding == "fsdp" and self.compile:
            raise ValueError(
                "train: sharding fsdp needs compile off: its blocks gather their weights between the operators"
            )
        context = self.model["context"]
        if self.seq > context:
            raise ValueError(
                f"train: seq must be at most {context:,}, the context that the model {self.preset} is built for, got "
                f"{self.seq:,}"
            )

    @property
    def shape(self) -> dict[str, Any]:
        """The model as it is built: its table of tokens rounded up by `padded`."""
        return {**self.model, "vocab_size": padded(self.model["vocab_size"])}

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    def replace(self, **changes: Any) -> Settings:
        """These settings with some of them changed."""
        return dataclasses.replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        """Plain values by name; `Settings(**settings.as_json())` equals the settings."""
        return {**dataclasses.asdict(self), "model": dict(self.model), "betas": list(self.betas)}


def padded(vocab_size: int) -> int:
    """The next multiple of 128, where that is less than 1% more: rows of logits then begin where wide loads may, and GPT-2
    trains 1.5 times as fast (gpukit/results/h200/ladder-gpt2.csv). The rows beyond the vocabulary are trained to be unlikely.
    """
    rounded = -(-vocab_size // 128) * 128
    return rounded if rounded < 1.01 * vocab_size else vocab_size


@dataclass(frozen=True)
class Preset:
    """about: a line for --help. needs_gpu: on a CPU a run would take days.

    reaches   the validation loss, in nats per token, that a whole run ends below; None where nothing was measured
    measured  how that was measured
    """

    about: str
    settings: Settings
    needs_gpu: bool = True
    reaches: float | None = None
    measured: str = ""


_LLAMA = {"norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": False}

_ALL = (
    Preset(
        "a GPT for a CPU, with Llama's parts: about three minutes on one core",
        Settings(
            "tiny",
            dict(
                vocab_size=2048, context=128, layers=4, heads=4, kv_heads=2, hidden=128, intermediate=384, **_LLAMA
            ),
            seq=128, batch=8, steps=1000, rate=4e-3, warmup=50, dtype="fp32", log_every=20, eval_every=200,
            checkpoint_every=200, eval_sequences=320,
        ),
        needs_gpu=False,
        reaches=4.3,
        measured="4.15 nats per token after 1,000 steps in 177 s, with one thread of a shared AMD EPYC machine with 2 cores, "
        "Python 3.11's library, seed 0",
    ),
    Preset(
        "GPT-2, 124 M parameters, sequences of 1,024 tokens",
        Settings(
            "gpt2", dict(vocab_size=50257, context=1024, layers=12, heads=12, hidden=768),
            seq=1024, batch=64, steps=2000, rate=6e-4, warmup=200,
        ),
    ),
    Preset(
        "GPT-3 XL's shape, 1.3 B parameters, sequences of 4,096 tokens",
        Settings(
            "gpt-1.3b", dict(vocab_size=50257, context=4096, layers=24, heads=16, hidden=2048),
            seq=4096, batch=16, micro_batches=4, steps=2000, rate=2e-4, warmup=200,
        ),
    ),
    Preset(
        "Llama 3.2 1B's shape, 1.2 B parameters, sequences of 4,096 tokens",
        Settings(
            "llama-1b",
            dict(
                vocab_size=128256, context=8192, layers=16, heads=32, kv_heads=8, hidden=2048, intermediate=8192,
                rope_base=500_000.0, **_LLAMA,
            ),
            seq=4096, batch=16, micro_batches=4, steps=2000, rate=3e-4, warmup=200,
        ),
    ),
)  # fmt: skip
PRESETS: Mapping[str, Preset] = {preset.settings.preset: preset for preset in _ALL}


def preset(name: str) -> Preset:
    """The preset called `name`. Raises ValueError naming the nearest and all."""
    if name in PRESETS:
        return PRESETS[name]
    raise ValueError(
        f"train: no preset is called {name!r}{did_you_mean(name, PRESETS)}  (all of them: {', '.join(PRESETS)})"
    )


def threads(settings: Settings, there: int) -> int:
    """How many of `there` threads a run on a CPU uses. With the operations of a small model two threads mostly wait for each
    other: on a busy machine with 2 cores tiny reached 3,000 to 5,200 tokens/s with one thread, 330 to 1,900 with two. Where
    OMP_NUM_THREADS is set, that decides."""
    return 1 if settings.model["hidden"] <= 256 and "OMP_NUM_THREADS" not in os.environ else there
