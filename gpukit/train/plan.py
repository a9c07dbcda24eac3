"""What a run will take, said before it starts: parameters, memory, FLOPs, time. All of it is computed by gpukit.accounting from
the model's shape; nothing is run but, on a CPU, one matrix product that says how fast this machine is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gpukit import hardware
from gpukit.accounting import memory, models, pencil
from gpukit.train.presets import Settings

EXPECTED_MFU = 0.4  # what a plan counts on; what is reached is printed in each line of progress


def accounting_config(name: str, model: Mapping[str, Any]) -> models.Config:
    """The arguments of a GPTConfig as the accounting's Config, which counts the same model."""
    learned = model.get("positions", "learned") == "learned"
    return models.Config(
        name,
        vocab_size=model["vocab_size"],
        hidden=model["hidden"],
        layers=model["layers"],
        heads=model["heads"],
        kv_heads=model.get("kv_heads"),
        intermediate=model.get("intermediate"),
        glu=model.get("mlp", "gelu") == "swiglu",
        positions=model["context"] if learned else 0,
        tied_embeddings=model.get("tied_embeddings", True),
        biases="all" if model.get("biases", True) else "none",
        norm={"layer": "layernorm", "rms": "rmsnorm"}[model.get("norm", "layer")],
        max_context=model["context"],
    )


def multiplied_parameters(config: models.Config) -> int:
    """N of the 6 N: all parameters without tables that are only looked up. The position table is one; the embedding table too,
    unless it is the output head as well."""
    counted = models.parameters(config)
    return counted.total - counted.positions - (0 if config.tied_embeddings else counted.embedding)


def flops_per_token(config: models.Config, tokens: int) -> int:
    """6 N + 12 L h T: model FLOPs per trained token in sequences of T tokens, the number that MFU is based on.

    6 N are the matrix products, forward and backward. 12 L h T are the two products of attention in L layers of width h, counted
    over the full square of T x T as is customary, although a causal kernel computes half of it.
    """
    return 6 * multiplied_parameters(config) + 12 * config.layers * config.heads * config.head_size * tokens


def mfu_formula(config: models.Config, settings: Settings, gpu: hardware.Gpu | None, world: int, where: str) -> str:
    """How MFU, the share of the hardware's peak, is worked out in this run; or why it is not given."""
    if gpu is None:
        return f"MFU not given: no peak of {where} is known"
    c, n = config, multiplied_parameters(config)
    products = f"6 x {n:,} + 12 x {c.layers} x {c.heads * c.head_size:,} x {settings.seq:,}"
    peak = f"{world:,} x " if world > 1 else ""
    return (
        f"MFU = tokens/s x (6 N + 12 L h T) / peak = tokens/s x ({products}) / ({peak}{gpu.peak(settings.dtype) / 1e12:,.4g} "
        f"TFLOP/s, {gpu.name}, {settings.dtype}, dense); N is without tables that are only looked up"
    )


def step_memory(config: models.Config, settings: Settings, world: int = 1) -> memory.Memory:
    """What each process holds at the worst moment of a step, modelled: float32 weights, gradients and AdamW's two moments, and
    activations in the run's dtype. Under autocast the bf16 copies of the weights come on top. Raises ValueError where the
    batch cannot be shared out over the processes."""
    found = memory.training_memory(
        config, settings.batch, settings.seq, recipe="fp32-adamw", parallel=memory.Parallel(data=world),
        run=memory.Run(settings.dtype), micro_batches=settings.micro_batches,
    )  # fmt: skip
    if settings.dtype == "bf16":
        copies = memory.tensor_bytes(models.parameters(config).total, "bf16")
        found = memory.Memory({**found.parts, "bf16 weights": copies}, found.moment, found.stage)
    return found


def measured_flops_per_s() -> float:
    """FLOP/s of a float32 matrix product on this CPU, the best of five."""
    import torch

    size, best = 768, float("inf")
    a = torch.ones(size, size)
    for _ in range(5):
        begin = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def lines(settings: Settings, gpu: hardware.Gpu | None, world: int = 1) -> list[str]:
    """The plan, to be printed; gpu None is this CPU. Raises ValueError for a run that cannot be laid out."""
    c = accounting_config(settings.preset, settings.model)
    needed = step_memory(c, settings, world)
    flops = flops_per_token(c, settings.seq) * settings.tokens_per_step * settings.steps
    passes = f" in {settings.micro_batches} passes" if settings.micro_batches > 1 else ""
    shared = f" over {world:,} processes" if world > 1 else ""
    parts = ", ".join(f"{name} {pencil.size(part)}" for name, part in needed.parts.items() if part)
    if gpu is None:
        rate = EXPECTED_MFU * measured_flops_per_s()
        how = f"{EXPECTED_MFU:.0%} of what a matrix product reaches here"
        room = ""
    else:
        rate = EXPECTED_MFU * world * gpu.peak(settings.dtype)
        how = f"{EXPECTED_MFU:.0%} of the peak of {f'{world:,} ' if world > 1 else ''}{gpu.name}"
        room = f"; {needed.reason(gpu)}"
    tokens = settings.tokens_per_step * settings.steps
    return [
        f"{c.name}: {models.parameters(c).total:,} parameters, {c.layers} layers, hidden {c.hidden:,}, {c.attention}",
        pencil.formula(c),
        f"step: {settings.batch:,} sequences x {settings.seq:,} tokens = {settings.tokens_per_step:,} tokens{passes}{shared}; "
        f"{settings.steps:,} steps = {pencil.big(tokens)} tokens",
        f"memory, modelled: {pencil.size(needed.total_bytes)} ({parts}){room}",
        f"FLOPs, computed: {pencil.big(flops_per_token(c, settings.seq))} per token, {flops:.3g} in all",
        f"time, modelled: {_duration(flops / rate)} at {how}, {rate / 1e12:,.3g} TFLOP/s",
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} minutes" if seconds < 7200 else pencil.days(seconds / 86_400)
