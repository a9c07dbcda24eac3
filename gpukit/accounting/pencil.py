"""The calculators' answers as text, the pencil's formula with its numbers filled in: what `gpukit memory` and `gpukit
flops` print."""

from __future__ import annotations

import re

from gpukit import hardware
from gpukit.accounting import memory, models
from gpukit.accounting.arguments import whole
from gpukit.accounting.flops import forward_flops, matmul_parameters
from gpukit.accounting.models import Config
from gpukit.accounting.training import SPARSE_FACTOR, chinchilla_tokens, training_cost

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def count(text: str, name: str = "count") -> int:
    """ "15T" -> 15,000,000,000,000; also 8192, "1.5B", "70b", "8,192". Raises ValueError naming `name`."""
    found = re.fullmatch(
        r"(\d{1,40}(?:\.\d{1,20})?)\s*([KMBT]?)", str(text).strip().upper().replace(",", "").replace("_", "")
    )
    if not found:
        raise ValueError(f"{name} must be a number such as 8192, 1.5B or 15T, got {text!r}")
    whole_part, _, fraction = found[1].partition(".")
    scaled = int(whole_part + fraction) * _SUFFIXES[found[2]]
    if scaled % 10 ** len(fraction):
        raise ValueError(f"{name} must be a whole number, got {text!r}")
    return scaled // 10 ** len(fraction)


def real(text: str, name: str) -> float:
    """A number, perhaps with a fraction. Raises ValueError naming `name`."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None


def gpus(text: str) -> tuple[int, hardware.Gpu]:
    """ "8xh100" -> (8, H100 SXM); "h100" is one. Raises ValueError."""
    found = re.fullmatch(r"\s*(?:([\d,]{1,20})\s*[xX*]\s*)?(\D.*)", str(text))
    if not found:
        raise ValueError(f"gpus must be written as 8xh100, got {text!r}")
    return whole("gpus", "their number", int((found[1] or "1").replace(",", ""))), hardware.gpu(found[2].strip())


def usual_length(config: Config) -> int:
    """4,096 tokens, or what the model was made for if that is less."""
    return min(4096, config.max_context or 4096)


def big(value: float) -> str:
    """Four digits and a word's letter: 8.030 B, 15.00 T."""
    for letter, unit in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if unit <= value < 1e16:
            return f"{value / unit:.4g} {letter}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.4g}"


def days(number: float) -> str:
    """143.9 days; below one, hours; above a few thousand, years."""
    if number >= 5000:
        return f"{number / 365.25:,.4g} years"
    return f"{number:,.1f} days" if number >= 1 else f"{number * 24:,.3g} hours"


def size(n_bytes: float) -> str:
    """1.23 GB, with units of 1,000."""
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= step:
            return f"{n_bytes / step:,.4g} {unit}"
    return f"{n_bytes:,.0f} bytes"


def counted(number: int, thing: str) -> str:
    """1 sequence, 8 sequences."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _most(sequences: int, tokens: int, batch: int, longest: int) -> str:
    """The largest batch of this context, and the largest context of this batch, that fit."""
    fits = f"{counted(sequences, 'sequence')} of {counted(tokens, 'token')}" if sequences else ""
    longer = f"{batch:,} of {longest:,}" if longest else ""
    if not (fits or longer):
        return "The most that fits: nothing, not even one token of one sequence"
    return f"The most that fits: {', or '.join(filter(None, (fits, longer)))}"


def formula(config: Config) -> str:
    """How the parameters come about: N = ... with the model's numbers."""
    c, counted = config, models.parameters(config)
    parts = [f"{c.vocab_size:,} x {c.hidden:,} (embedding)"]
    if c.positions:
        parts.append(f"{c.positions:,} x {c.hidden:,} (positions)")
    each = models.attention_weights(c) + models.attention_biases(c)
    for moe, layers in ((False, c.layers - c.moe_layers), (True, c.moe_layers)):
        if layers:
            mlp = models.mlp_weights(c, moe) + models.mlp_biases(c)
            words = f"attention {each:,} + {'experts' if moe else 'MLP'} {mlp:,} + norms {models.norm_parameters(c):,}"
            parts.append(f"{layers} layers x ({words})")
    parts.append(f"{models.NORMS[c.norm] * c.hidden:,} (last norm)")
    if counted.head:
        parts.append(f"{counted.head:,} (head)")
    return f"N = {' + '.join(parts)} = {counted.total:,}"


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_lines(
    model: str, batch: int, tokens: int, where: str, *, recipe: str = "bf16-adamw", zero: int = 0, tensor: int = 1,
    pipeline: int = 1, sequence_parallel: bool = False, micro_batches: int = 1, attention: str = "flash",
    recompute: str = "none", dropout: bool = False,
) -> list[str]:  # fmt: skip
    """What a training step holds on each of `where`, "8xh100". Raises ValueError."""
    c, how = models.preset(model), memory.recipe_named(recipe)
    number, gpu = gpus(where)
    rest = whole("memory", "tensor", tensor) * whole("memory", "pipeline", pipeline)
    if number % rest:
        raise ValueError(f"--tensor x --pipeline must divide the number of GPUs, and {rest} does not divide {number}")
    parallel = memory.Parallel(number // rest, tensor, pipeline, zero, sequence_parallel)
    passes = parallel.data * whole("memory", "micro_batches", micro_batches)
    if batch % passes:
        raise ValueError(
            f"--batch counts the sequences of one step over all GPUs: {parallel.data:,} copies of the model with "
            f"{micro_batches:,} micro-batch{'es' * (micro_batches != 1)} each need a multiple of {passes:,}, got {batch:,}"
        )
    run = memory.Run(how.weights, attention, recompute, dropout)

    def step(sequences: int, length: int = tokens) -> memory.Memory:
        return memory.training_memory(
            c, sequences, length, recipe=how, parallel=parallel, run=run, micro_batches=micro_batches
        )

    found = step(batch)
    each = batch // parallel.data // micro_batches
    held = memory.gpu_parameters(c, parallel, found.stage)
    states = memory.model_states(held, how)
    per = {"weights": states.weights_bytes, "gradients": states.gradients_bytes, "optimizer": states.optimizer_bytes}
    since = {"weights": 3, "gradients": 2, "optimizer": 1}
    why = {
        name: f"{big(held)} parameters x {per[name] / held:.4g} bytes"
        + (f" / {parallel.data} (ZeRO {zero})" if parallel.data > 1 and zero >= since[name] else "")
        for name in since
    }
    layers = len(parallel.stage_layers(c, found.stage))
    in_flight = min(pipeline - found.stage, micro_batches)
    a_token = found.parts["activations"] / (layers * each * tokens * in_flight)
    why["activations"] = f"{layers} layers x {each * in_flight:,} x {tokens:,} tokens x {a_token:,.0f} bytes"
    why["working"] = {
        "loss": f"logits of {each:,} x {tokens:,} tokens x {-(-c.vocab_size // tensor):,}: log-softmax and 2 gradients, {run.logits}",
        "backward": "gradients inside one block" + ("" if recompute == "none" else ", and what it computes again"),
    }[found.moment]
    if zero == 3 and parallel.data > 1:
        why["working"] += "; gathered weights"
    share = f"{each:,} at a time on each replica" if parallel.data > 1 or micro_batches > 1 else "all at once"
    lines = [
        f"{c.name}: {models.parameters(c).total:,} parameters, {c.layers} layers, {c.attention}",
        formula(c),
        "",
        f"A training step of {counted(batch, 'sequence')} of {counted(tokens, 'token')} on {number:,} {gpu.name} ({share}), modelled:",
        f"{how.name} ({how.title}), ZeRO {zero}, {attention} attention, recompute {recompute}",
        "",
        *(f"  {name:12}{part / 1e9:10.2f} GB   {why[name]}" for name, part in found.parts.items()),
        f"  {'total':12}{found.total_bytes / 1e9:10.2f} GB   {found.reason(gpu)}",
        "",
    ]
    if recompute != "full":
        moe = bool(c.moe_layers)
        split = {"moe": moe, "tensor": tensor, "sequence_parallel": sequence_parallel}
        block = memory.block_activations(c, each, tokens, run, **split)
        lines.append(
            "One layer keeps for the backward pass" + (", if all of it is kept:" if recompute != "none" else ":")
        )
        lines += [f"  {name:18}{part / 1e6:10.1f} MB" for name, part in block.items()]
        lines.append("")
    most = memory.largest_batch(step, gpu, parallel.data * micro_batches)
    longest = memory.largest_context(lambda length: step(batch, length), gpu)
    lines.append(_most(most, tokens, batch, longest))
    naive = memory.largest_model(gpu.hbm_bytes, number, how.bytes_per_parameter)
    lines.append(
        f"Pencil: {gpu.hbm_bytes / 1e9:g} GB x {number:,} / {how.bytes_per_parameter:.4g} bytes per parameter = "
        f"{big(naive)} parameters at most, before any activation"
    )
    return lines


def inference_lines(
    model: str, batch: int, tokens: int, where: str, *, weights: str = "bf16", cache: str = "bf16", tensor: int | None = None,
    pipeline: int = 1,
) -> list[str]:  # fmt: skip
    """What serving `batch` sequences holds on each of `where`; all GPUs together hold one copy. Raises ValueError."""
    c = models.preset(model)
    number, gpu = gpus(where)
    tensor = number // pipeline if tensor is None else tensor
    if tensor * pipeline != number:
        raise ValueError(f"--tensor x --pipeline must be the number of GPUs, {number}, got {tensor} x {pipeline}")

    def serve(sequences: int, length: int = tokens) -> memory.Memory:
        return memory.inference_memory(
            c, sequences, length, weights=weights, cache=cache, tensor=tensor, pipeline=pipeline
        )

    found = serve(batch)
    a_token = memory.kv_cache_bytes(c, 1, 1, cache)
    why = {
        "weights": f"{big(models.parameters(c).total)} parameters x {memory.DTYPE_BITS[weights] / 8:g} bytes over {number:,}",
        "kv cache": f"{batch:,} x {tokens:,} tokens x {a_token:,} bytes ({c.attention}, {cache}) over {number:,}",
        "working": "one token of each sequence in the widest place, and its logits",
    }
    return [
        f"{c.name}: {models.parameters(c).total:,} parameters, {c.layers} layers, {c.attention}",
        "",
        f"Serving {counted(batch, 'sequence')} of at most {counted(tokens, 'token')} on {number:,} {gpu.name}, modelled:",
        "",
        *(f"  {name:12}{part / 1e9:10.2f} GB   {why[name]}" for name, part in found.parts.items()),
        f"  {'total':12}{found.total_bytes / 1e9:10.2f} GB   {found.reason(gpu)}",
        "",
        _most(
            memory.largest_batch(serve, gpu),
            tokens,
            batch,
            memory.largest_context(lambda length: serve(batch, length), gpu),
        ),
    ]


# ---- FLOPs -----------------------------------------------------------------------------------------------------------


def flops_lines(
    model: str, tokens: int, where: str, *, mfu: float = 0.4, seq: int | None = None, dtype: str = "bf16",
    watts: float | None = None, price: float | None = None,
) -> list[str]:  # fmt: skip
    """What a training run takes on `where`, "1024xh100". `model` is a preset or a number of parameters, "70B". Raises
    ValueError."""
    number, gpu = gpus(where)
    config = models.preset(model) if str(model)[:1].isalpha() else None
    n = models.parameters(config).active if config else count(model, "model")
    cost = training_cost(n, tokens, gpu, number, mfu, dtype=dtype, watts=watts, price_per_gpu_hour=price)
    peak = gpu.peak(dtype) / 1e12
    lines = []
    if config:
        used = ", of which a token uses" if config.experts else ""
        lines += [
            f"{config.name}: {models.parameters(config).total:,} parameters{used}" + (f" {n:,}" if used else ""),
            "",
        ]
    lines += [
        "Pencil, modelled:",
        f"  FLOPs = 6 N D = 6 x {n:,} x {tokens:,} = {cost.flops:.4g}",
        f"  FLOP/s = {number:,} x {peak:,.4g} T ({gpu.name}, {dtype}, dense) x MFU {mfu:g} = {cost.flops_per_s:.4g}",
        f"  time = {cost.flops:.4g} / {cost.flops_per_s:.4g} = {cost.seconds:.4g} s = {days(cost.days)}",
        f"  GPU-hours = {number:,} x {cost.seconds / 3600:,.4g} h = {big(cost.gpu_hours)}",
    ]
    if cost.energy_kwh is not None:
        lines.append(f"  energy = {big(cost.gpu_hours)} GPU-hours x {watts:g} W = {cost.energy_kwh:,.0f} kWh")
    if cost.money is not None:
        lines.append(f"  price = {big(cost.gpu_hours)} GPU-hours x {price:g} = {cost.money:,.0f}")
    lines += [
        "",
        f"The trap: a datasheet's {SPARSE_FACTOR * peak:,.4g} T «with sparsity» would promise {days(cost.days / SPARSE_FACTOR)}",
        f"20 tokens per parameter would be {big(chinchilla_tokens(n))}; this run has {tokens / n:,.4g} per parameter",
    ]
    if config:
        seq = usual_length(config) if seq is None else seq
        forward = forward_flops(config, 1, seq)
        exact = 3 * forward.total / seq * tokens
        lines += ["", f"By operation, forward, a sequence of {seq:,} tokens, causal:", ""]
        lines += [
            f"  {name:20}{part / 1e9:14,.1f} GFLOP {part / forward.total:7.1%}"
            for name, part in forward.operations.items()
        ]
        rest = n - matmul_parameters(config)
        lines += [
            f"  {'total':20}{forward.total / 1e9:14,.1f} GFLOP",
            "",
            f"3 x forward x {big(tokens)} / {seq:,} = {exact:.4g} FLOPs, {exact / cost.flops - 1:+.1%} against 6 N D:",
            f"attention's square comes on top; {big(abs(rest))} parameters "
            + (
                "are looked up or added, not multiplied by"
                if rest > 0
                else "more multiply than N has: the head is the table"
            ),
        ]
    return lines
