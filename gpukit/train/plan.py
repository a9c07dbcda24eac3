"""What a run will take, said before it starts: parameters, memory, FLOPs, time. All of it is computed by gpukit.accounting from
the model's shape; nothing is run but, on a CPU, one matrix product that says how fast this machine is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gpukit import hardware
from gpukit.accounting import collectives, memory, models, pencil
from gpukit.accounting.arguments import divides
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


def chunked_loss_bytes(config: models.Config, tokens: int) -> int:
    """What gpukit's linear_cross_entropy needs beside its inputs: the logits of a chunk, and both gradients, in 16 bits."""
    from gpukit.kernels.linear_cross_entropy import chunk_logits

    logits = min(chunk_logits(config.vocab_size, config.hidden), tokens * config.vocab_size)
    return 2 * logits + 2 * (tokens + config.vocab_size) * config.hidden


def step_memory(config: models.Config, settings: Settings, world: int = 1, *, on_cpu: bool = False) -> memory.Memory:
    """What each process holds at the worst moment of a step, modelled, on a GPU unless `on_cpu`. Raises ValueError where the batch
    cannot be shared out.

    Weights, gradients and AdamW's two moments are float32, and so is the residual stream; the rest of the activations is in the
    run's dtype. Gradients are freed after the update, unless DDP keeps them or an earlier pass of the step has added some. So the
    worst moment is at the loss, where all activations are there, or at one of the two ends of the backward pass.
    """
    c, s, bf16 = config, settings, settings.dtype == "bf16"
    divides("train", "processes x micro_batches", world * s.micro_batches, "batch", s.batch)
    sequences, run = s.batch // (world * s.micro_batches), memory.Run(s.dtype, recompute=s.recompute)
    fsdp = world > 1 and s.sharding == "fsdp"
    counted = models.parameters(c)
    share = -(-counted.total // world) if fsdp else counted.total
    block = (counted.total - counted.embedding - counted.positions - counted.head) // c.layers
    outside = counted.total - c.layers * block
    head = c.vocab_size * c.hidden

    stream = (2 if bf16 else 0) * sequences * s.seq * c.hidden  # what one float32 tensor of it takes more than counted
    kept = memory.kept_activations(c, sequences, s.seq, run) + (1 if s.recompute == "full" else 2) * stream
    if not c.positions and s.recompute == "none":
        # RoPE's results are kept; v, a part of the product that they were computed from, keeps that alive as well. And attention's
        # result is copied into another order of dimensions, that of q being another one than without RoPE.
        kept += memory.tensor_bytes(sequences * s.seq * (2 * c.heads + c.kv_heads) * c.qk_size, s.dtype)
    working = memory.working_memory(c, sequences, s.seq, run)
    logits = (2 if bf16 else 0) * sequences * s.seq * c.vocab_size
    if (
        not on_cpu
    ):  # CUDA's autocast leaves the log-softmax inside cross_entropy in bf16, and the CPU's makes it float32
        working["loss"] -= logits
    if s.kernels == "gpukit":
        working["loss"], logits = chunked_loss_bytes(c, sequences * s.seq), 0
    # FSDP gathers the tables and the last norm in float32 for the whole pass, and one block; in the backward pass the next one
    # as well, with gradients of the head and of the block, and after the first block what is being sent of the one before.
    width = 2 if bf16 else 4
    loss = 4 * outside + width * block
    first = 4 * outside + 3 * width * block + 4 * head
    # What autocast turns into bf16 it keeps until the loss is there, and autograd until it is used.
    copies = 2 * (head if fsdp else counted.total) if bf16 else 0
    before = 4 * share if s.micro_batches > 1 or (world > 1 and not fsdp) else 0
    after = max(before, 4 * (c.layers - 1) * block // world if fsdp else 4 * share)

    def at(moment: str, gradients: int, activations: int, working: int, gathered: int, copies: int) -> memory.Memory:
        parts = {"weights": 4 * share, "gradients": gradients, "optimizer": 8 * share, "activations": activations}
        parts |= {"working": working, "gathered": gathered if fsdp else 0, "bf16 weights": copies}
        return memory.Memory(parts, moment)

    all_kept = c.layers * kept + stream
    moments = [
        at("loss", before, all_kept, working["loss"], loss, copies),
        at("backward", before, all_kept, working["backward"], first, 0 if s.recompute == "full" else copies),
        at("backward", after, kept, working["backward"], first + 4 * block, 0),
    ]
    if s.recompute == "full" and bf16:  # the copies are gone before the logits' gradient comes
        moments[0] = at("loss", before, all_kept, working["loss"] - logits, loss, copies)
        moments.append(at("loss", before, all_kept, working["loss"], loss, 2 * head))
    return max(moments, key=lambda found: found.total_bytes)


def traffic(config: models.Config, settings: Settings, world: int) -> collectives.Step:
    """What each of `world` GPUs sends in one step, computed. Raises ValueError.

    FSDP gathers a block's weights in the products' dtype, for the forward and again for the backward pass, and what lies outside
    of the blocks (tables, last norm, head) in float32, once per pass over a micro-batch. Gradients are float32 everywhere.
    """
    counted, micro_batches = models.parameters(config), settings.micro_batches
    if settings.sharding == "ddp":
        return collectives.step("ddp", counted.total, world, micro_batches=micro_batches)
    last_norm = counted.norms // (2 * config.layers + 1)
    outside = counted.embedding + counted.positions + counted.head + last_norm
    blocks = collectives.step(
        "fsdp",
        counted.total - outside,
        world,
        micro_batches=micro_batches,
        weight_bytes=2 if settings.dtype == "bf16" else 4,
    )
    rest = collectives.step("fsdp", outside, world, micro_batches=micro_batches, weight_bytes=4, reshard=False)
    return collectives.Step(
        all_gather=blocks.all_gather + rest.all_gather, reduce_scatter=blocks.reduce_scatter + rest.reduce_scatter
    )


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
    needed = step_memory(c, settings, world, on_cpu=gpu is None)
    flops = flops_per_token(c, settings.seq) * settings.tokens_per_step * settings.steps
    parted = f" in {settings.micro_batches} micro-batches" if settings.micro_batches > 1 else ""
    held = {"ddp": "each with a copy of the model", "fsdp": "each with a share of the model"}[settings.sharding]
    shared = f" over {world:,} processes, {held}" if world > 1 else ""
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
        f"step: {settings.batch:,} sequences x {settings.seq:,} tokens = {settings.tokens_per_step:,} tokens{parted}{shared}; "
        f"{settings.steps:,} steps = {pencil.big(tokens)} tokens",
        f"memory, modelled: {pencil.size(needed.total_bytes)} ({parts}){room}",
        f"FLOPs, computed: {pencil.big(flops_per_token(c, settings.seq))} per token, {flops:.3g} in all",
        f"time, modelled: {_duration(flops / rate)} at {_speed(rate)}, which is {how}",
    ]


def _speed(flops_per_s: float) -> str:
    """0.00537 TFLOP/s of a CPU are easier to read as 5.37 GFLOP/s."""
    scale, unit = (1e12, "TFLOP/s") if flops_per_s >= 1e12 else (1e9, "GFLOP/s")
    return f"{flops_per_s / scale:,.3g} {unit}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} minutes" if seconds < 7200 else pencil.days(seconds / 86_400)
