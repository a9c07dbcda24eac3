"""The ladder: one training step of a GPT, made fast by one change at a time; `gpukit train --preset gpt2 --ladder`.

The first rung is the loop that one writes without thinking of the hardware: float32, attention as three operations, a kernel
for every operator, an optimizer that walks over the tensors. Each later rung changes one thing of the rung it starts from.
All train the same model on the same sequences in the same order, so that their losses can be laid over each other.

For each rung, `predict` says before anything runs what the step will take, from the model's shape and the GPU's peaks; `measure`
runs it. The rows go to gpukit/results/<gpu>/ladder-<preset>.csv (COLUMNS), the losses of every step beside them.
"""

from __future__ import annotations

import csv
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukit import benchmark, hardware
from gpukit.accounting import memory, models
from gpukit.accounting.arguments import choice, divides, whole
from gpukit.accounting.training import Schedule
from gpukit.train import plan
from gpukit.train.compiled import Miscompiled, check_first
from gpukit.train.presets import Settings

if TYPE_CHECKING:
    import torch

    from gpukit.train import data

PRECISIONS = ("fp32", "tf32", "autocast", "bf16", "fp8")
ATTENTIONS = ("explicit", "pytorch", "gpukit")
OPTIMIZERS = ("loop", "fused", "gpukit")
COLUMNS = (
    "preset",
    "rung",
    "starts_from",  # the rung that it changes; empty for the first one
    "batch",  # sequences of an optimizer step
    "seq",  # tokens of each
    "passes",  # of forward and backward in a step, one per micro-batch
    "steps",  # that were trained, with a schedule of so many; losses of different numbers cannot be compared
    "step_ms",  # measured, the mean over the steps after the first ones
    "tokens_per_s",
    "mfu",  # of the dense bf16 peak, for all rungs, so that they can be compared
    "peak_bytes",  # the most that PyTorch had allocated
    "kernels",  # launched by one step
    "kernels_ms",  # the sum of their times; where step_ms is much more, the GPU waits for the host
    "loss",  # of the last step, nats per token
    "predicted_ms",  # modelled before the run
    "predicted_bytes",
    "gpu",
    "torch",
    "triton",
    "commit",
    "date",
)


@dataclass(frozen=True)
class How:
    """How a step is computed. Nothing of it changes what is computed, up to rounding.

    precision   "fp32"; "tf32" (float32 products that round their inputs to 10 bits of mantissa); "autocast" (products in bf16,
                weights and residual stream in float32); "bf16" (all in bf16 but for a float32 copy of the weights in the
                optimizer); "fp8" (that, and the products of the blocks in 8 bits)
    attention   "explicit" (scores, softmax and product, each written to memory), "pytorch" (scaled_dot_product_attention: a
                FlashAttention kernel) or "gpukit"
    loss        "logits" (all of them in memory) or "chunked" (gpukit's linear_cross_entropy)
    optimizer   "loop" (a kernel for each operator and tensor), "fused" (PyTorch's) or "gpukit"
    padded      whether the vocabulary is rounded up to a multiple of 128
    compiled    whether torch.compile fuses the model's operators
    graphs      whether the compiled step is replayed as CUDA graphs
    kernels     whether norms and activations are gpukit's kernels
    recompute   what of a block is computed again in the backward pass: "none"; "cheap" (all but the results of products and
                of attention, under torch.compile); "blocks" (all but the block's input)
    passes      forward and backward passes of a step: its micro-batches
    """

    precision: str = "fp32"
    attention: str = "explicit"
    loss: str = "logits"
    optimizer: str = "loop"
    padded: bool = False
    compiled: bool = False
    graphs: bool = False
    kernels: bool = False
    recompute: str = "none"
    passes: int = 1

    def __post_init__(self) -> None:
        choice("ladder", "precision", self.precision, PRECISIONS)
        choice("ladder", "attention", self.attention, ATTENTIONS)
        choice("ladder", "loss", self.loss, ("logits", "chunked"))
        choice("ladder", "optimizer", self.optimizer, OPTIMIZERS)
        choice("ladder", "recompute", self.recompute, ("none", "cheap", "blocks"))


@dataclass(frozen=True)
class Rung:
    """One change. `starts_from` names the rung that `changes` are made to; "" is the rung before."""

    name: str
    about: str
    changes: dict[str, Any] = field(hash=False)
    starts_from: str = ""


RUNGS = (
    Rung("naive", "float32, explicit attention, one kernel per operator, AdamW as a loop over tensors", {}),
    Rung("TF32", "float32 products on the tensor cores, with 10 bits of mantissa", {"precision": "tf32"}),
    Rung("bf16", "products in bfloat16 (autocast)", {"precision": "autocast"}),
    Rung("FlashAttention", "scores never written to memory (PyTorch's kernel)", {"attention": "pytorch"}),
    Rung("fused AdamW", "one kernel for the tensors of a group (PyTorch's)", {"optimizer": "fused"}),
    Rung("padded vocabulary", "rounded up to a multiple of 128, so that rows of logits are aligned", {"padded": True}),
    Rung("torch.compile", "neighboring operators fused", {"compiled": True}),
    Rung("chunked loss", "no tensor of all logits (gpukit's linear_cross_entropy)", {"loss": "chunked"}),
    Rung("one pass", "the whole batch at once", {"passes": 1}),
    Rung("gpukit attention", "gpukit's FlashAttention", {"attention": "gpukit"}),
    Rung("gpukit AdamW", "gpukit's, which clips on the way", {"optimizer": "gpukit"}),
    Rung("bf16 weights", "bf16 throughout, with float32 copies of the weights in AdamW", {"precision": "bf16"}),
    Rung("gpukit norms", "norms and activations as kernels that the compiler cannot look into", {"kernels": True}),
    Rung("CUDA graphs", "the step's launches replayed at once", {"graphs": True}, "bf16 weights"),
    Rung("cheap recomputation", "norms and activations computed twice, for memory", {"recompute": "cheap"}, "bf16 weights"),
    Rung("recomputation", "whole blocks computed twice, for memory", {"recompute": "blocks"}, "bf16 weights"),
    Rung("fp8", "the products of the blocks in 8 bits", {"precision": "fp8"}, "bf16 weights"),
    # What the capstone is held against: PyTorch's parts, all of them, and the whole batch at once.
    Rung("PyTorch's best", "torch.compile, FlashAttention and fused AdamW, in one pass", {"passes": 1}, "torch.compile"),
)  # fmt: skip


# Of these a CPU gets faster as well.
CPU_RUNGS = (*(r for r in RUNGS if r.name in ("naive", "FlashAttention", "fused AdamW")), Rung(
    "one pass", "the whole batch at once", {"passes": 1}
))  # fmt: skip


@dataclass(frozen=True)
class Size:
    """What is measured of a preset: sequences of a step, the first rungs' passes, steps."""

    batch: int
    passes: int
    steps: int


SIZES = {"tiny": Size(8, 4, 16), "gpt2": Size(64, 8, 60), "gpt-1.3b": Size(4, 4, 24), "llama-1b": Size(4, 4, 24)}


def how(names: Sequence[str] = (), passes: int = 1, rungs: Sequence[Rung] = RUNGS) -> dict[str, tuple[Rung, str, How]]:
    """For each rung (or those named): the rung, which one it starts from, and how its steps are computed. `passes` is of the
    first rungs: into how many micro-batches they split the batch, whose activations need much memory there. Raises ValueError for an unknown name."""
    found: dict[str, tuple[Rung, str, How]] = {}
    before = ""
    for rung in rungs:
        start = rung.starts_from or before
        base = found[start][2] if start else How(passes=passes)
        found[rung.name] = rung, start, replace(base, **rung.changes)
        before = rung.name
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"ladder: no rung is called {unknown[0]!r}  (all of them: {', '.join(found)})")
    return {name: found[name] for name in names} if names else found


# ---- before: what the step should take -------------------------------------------------------------------------------


# Of a peak, what large products and streaming kernels reach on the H200 (gpukit/results/h200/matmul.csv, times.csv).
PRODUCT_SHARE, STREAM_SHARE, ATTENTION_SHARE = 0.75, 0.85, 0.5
LAUNCH_US = 6  # the host's time for a launch through PyTorch


def predict(settings: Settings, way: How, gpu: hardware.Gpu) -> tuple[float, int]:
    """(seconds, peak bytes) of one optimizer step, modelled: products at their share of the peak, and every other operator
    at the rate of memory with the bytes that it reads and writes. Fused, operators between two products count once."""
    c = plan.accounting_config(settings.preset, settings.model)
    tokens = settings.tokens_per_step
    h, inner, layers, seq = c.hidden, c.intermediate, c.layers, settings.seq
    parameters = models.parameters(c).total
    rate = {"fp32": "fp32", "tf32": "tf32"}.get(way.precision, "bf16")
    product = gpu.peak(rate) * PRODUCT_SHARE
    stream = gpu.hbm_gbps * 1e9 * STREAM_SHARE
    narrow = 4 if rate != "bf16" else 2  # bytes of what products read and write
    wide = 2 if way.precision in ("bf16", "fp8") else 4  # bytes of the residual stream

    head = 6 * c.vocab_size * h * tokens
    blocks = 6 * (plan.multiplied_parameters(c) - c.vocab_size * h) * tokens
    factor = 4 / 3 if way.recompute == "blocks" else 1
    seconds = head / product + factor * blocks / (product * (1.6 if way.precision == "fp8" else 1))
    # Attention: two products forward and four backward (five where scores are computed again), causal kernels half of each.
    square = 2 * layers * c.heads * c.head_size * seq * tokens
    if way.attention == "explicit":
        scores = layers * c.heads * seq * tokens
        # Written, masked, softmax (2), read by the product; backward as much again, and once more to convert.
        seconds += 6 * square / product + scores * narrow * 16 / stream
    else:
        seconds += 7 * square / 2 / (gpu.peak("bf16" if rate == "bf16" else rate) * ATTENTION_SHARE)
    # Norms, residual sums and activations, forward and backward: elements that are moved for each token.
    eager = layers * (h * (24 * wide + 14 * narrow) + inner * (8 if not c.glu else 14) * narrow)
    fused = layers * (h * (12 * wide + 8 * narrow) + inner * (5 if not c.glu else 8) * narrow)
    seconds += factor * tokens * (fused if way.compiled else eager) / stream
    logits = {"logits": 4 * narrow + 16, "chunked": 2 * narrow + 2 * narrow}[way.loss]
    seconds += tokens * c.vocab_size * logits / stream
    # The optimizer reads and writes weights and two moments, and clips the gradients; a loop does each operator by itself.
    seconds += parameters * {"loop": 80, "fused": 40, "gpukit": 32}[way.optimizer] / stream
    if way.precision == "autocast":
        seconds += way.passes * parameters * 6 / stream  # float32 weights are read and bf16 ones written
    launches = (layers * (90 if not way.compiled else 22) + 20) * way.passes
    launches += {"loop": 14 * 12 * layers, "fused": 40, "gpukit": 8}[way.optimizer]
    seconds = max(seconds, launches * LAUNCH_US / 1e6)

    run = memory.Run(
        "fp32" if rate != "bf16" else "bf16",
        attention="eager" if way.attention == "explicit" else "flash",
        recompute="full" if way.recompute == "blocks" else "none",
    )
    recipe = "bf16-adamw" if way.precision in ("bf16", "fp8") else "fp32-adamw"
    needed = memory.training_memory(c, settings.batch, seq, recipe=recipe, run=run, micro_batches=way.passes)
    parts = dict(needed.parts)
    if way.loss == "chunked":
        parts["working"] = plan.chunked_loss_bytes(c, tokens // way.passes)
    if way.precision == "autocast":
        parts["bf16 weights"] = 2 * parameters
    return seconds, sum(parts.values())


# ---- the parts that a rung chooses -----------------------------------------------------------------------------------


def explicit_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention as its formula says it: q [B, H, T, D], k and v [B, H_kv, T, D] -> [B, H, T, D]; scores [B, H, T, T]."""
    import torch

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def operations(way: How):
    """What the model calls. gpukit's kernels are imported here, since Triton is not on every system."""
    from gpukit.train import model

    chosen: dict[str, Callable] = {}
    if way.attention == "explicit":
        chosen["attention"] = explicit_attention
    if way.attention == "gpukit" or way.loss == "chunked" or way.kernels:
        from gpukit import kernels
    if way.attention == "gpukit":
        chosen["attention"] = kernels.flash_attention
    if way.loss == "chunked":
        chosen["loss"] = kernels.linear_cross_entropy
    if way.kernels:
        for name in ("layer_norm", "rms_norm", "rope", "gelu", "swiglu"):
            chosen[name] = getattr(kernels, name)
    return model.Operations(**chosen)


def _kept(_, operator, *arguments, **named):
    """What recomputation leaves alone: results of products and of gpukit's kernels, which take long to compute again."""
    from torch.utils.checkpoint import CheckpointPolicy

    expensive = operator.namespace == "gpukit" or operator._opname in ("mm", "addmm", "bmm", "_scaled_mm")
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """torch.set_float32_matmul_precision for a while: it is the process's, and what the caller does later must not round."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Trained:
    """A model, its optimizer and the sequences, as a rung has them: `step()` trains once and returns the loss."""

    def __init__(self, settings: Settings, way: How, corpus: data.Corpus, device: torch.device):
        import torch
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        from gpukit.train import data, optimizer
        from gpukit.train.model import GPT, GPTConfig

        shape = settings.shape if way.padded else settings.model
        self.settings = settings.replace(optimizer="gpukit" if way.optimizer == "gpukit" else "torch")
        self.way, self.device, self.number, self.checked = way, device, 0, not way.compiled
        self.schedule = Schedule(settings.steps, settings.warmup, settings.rate, settings.final_rate)
        torch.manual_seed(settings.seed)
        with device:
            self.model = GPT(GPTConfig(**shape), operations(way))
        if way.precision in ("bf16", "fp8"):
            for parameter in self.model.parameters():  # and no buffers: RoPE's angles stay exact
                parameter.data = parameter.data.bfloat16()
        if way.precision == "fp8":
            from gpukit.train.fp8 import to_fp8

            to_fp8(self.model)
        self.model.recompute = way.recompute == "blocks"
        if way.recompute == "cheap":
            contexts = partial(create_selective_checkpoint_contexts, _kept)
            for block in self.model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
        mode = "reduce-overhead" if way.graphs else None
        self.called = torch.compile(self.model, mode=mode) if way.compiled else self.model
        self.optimizer = optimizer.adamw(
            self.model, self.settings, fused=way.optimizer != "loop", master_weights=way.precision in ("bf16", "fp8")
        )
        self.update = optimizer.update
        self.batches = data.Batches(corpus.train, settings.batch // way.passes, settings.seq, seed=settings.seed)

    def step(self) -> torch.Tensor:
        """One optimizer step. Returns the mean loss, nats per token, on the device. Raises Miscompiled at the first one where the
        compiled model is not the model."""
        import torch

        from gpukit.train.data import to_device

        total = torch.zeros((), device=self.device)
        # "high" lets float32 products round to TF32; bf16 products are the same either way.
        with float32_products("highest" if self.way.precision == "fp32" else "high"):
            for _ in range(self.way.passes):
                inputs, targets = (to_device(tensor, self.device) for tensor in next(self.batches))
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.way.precision == "autocast"):
                    loss = self.called(inputs, targets)
                    if not self.checked:
                        check_first(loss, lambda: self.model(inputs, targets))  # noqa: B023
                        self.checked = True
                    loss = loss / self.way.passes
                loss.backward()
                total += loss.detach()
            self.update(self.optimizer, self.schedule.rate(self.number), self.settings, norm_wanted=False)
        self.number += 1
        return total


# ---- measured --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What a rung took. losses: of every step, nats per token. top: the kernels of one step, (name, launches, us), the longest
    first; empty on a CPU."""

    step_ms: float
    peak_bytes: int
    losses: tuple[float, ...]
    top: tuple[tuple[str, int, float], ...] = ()


WARM_STEPS = 4  # in which torch.compile compiles, and which are not timed
MOST_TOKENIZED = 50_257  # the largest vocabulary that the standard library's text is worth
TOP = 25  # kernels of a rung that are written down


def measure(settings: Settings, way: How, corpus: data.Corpus, device: torch.device) -> Measured:
    """Train `settings.steps` steps, of which the first WARM_STEPS are not timed. The host waits for the GPU only at the ends,
    as in training. Raises torch.OutOfMemoryError."""
    import torch

    gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if gpu else lambda: None
    trained = Trained(settings, way, corpus, device)
    losses = [trained.step() for _ in range(WARM_STEPS)]
    wait()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    losses += [trained.step() for _ in range(settings.steps - WARM_STEPS)]
    wait()
    step_ms = (time.perf_counter() - begin) / (settings.steps - WARM_STEPS) * 1e3
    # The memory of CUDA graphs is reserved for good, and counts as allocated only while they are captured.
    peak = 0 if not gpu or way.graphs else torch.cuda.max_memory_allocated()
    top = _kernels(trained) if gpu else ()
    values = tuple(torch.stack(losses).tolist())
    return Measured(step_ms, peak, values, top)


def _kernels(trained: Trained) -> tuple[tuple[str, int, float], ...]:
    """What one step launches, the longest first: (name, launches, us in all)."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        trained.step()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset")):
            count, us = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, us + event.time_range.elapsed_us()
    return tuple(sorted(((name, *sums) for name, sums in found.items()), key=lambda row: -row[2]))


def climb(
    settings: Settings,
    names: Sequence[str] = (),
    *,
    passes: int = 1,
    device: str = "cuda",
    folder: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measure the rungs (all of them, or those in `names`) one after the other, and return their rows. A rung for which there
    is not enough memory, or which torch.compile got wrong, gets a row without measured values.

    passes  forward and backward passes of the first rungs' steps
    folder  where ladder-<preset>.csv, its losses and its kernels are written; None: nowhere
    Raises ValueError for an unknown rung, too few steps, or a batch that does not divide into the passes.
    """
    import torch

    from gpukit.train import data

    found = how(names, passes, RUNGS if device == "cuda" else CPU_RUNGS)
    divides("ladder", "passes", passes, "batch", settings.batch)
    whole("ladder", "steps", settings.steps, WARM_STEPS + 1)
    where = torch.device(device)
    name = torch.cuda.get_device_name() if where.type == "cuda" else "cpu"
    gpu = hardware.gpu(name) if where.type == "cuda" else None
    corpus = data.prepare(min(settings.model["vocab_size"], MOST_TOKENIZED), None, say=say)
    same = benchmark.identity(name)
    flops = plan.flops_per_token(plan.accounting_config(settings.preset, settings.model), settings.seq)
    rows = []
    for rung, start, way in found.values():
        row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
        row |= {"preset": settings.preset, "rung": rung.name, "starts_from": start, "batch": settings.batch}
        row |= {"seq": settings.seq, "passes": way.passes, "steps": settings.steps, **same}
        modelled = ""
        if gpu is not None:
            seconds, needed = predict(settings, way, gpu)
            row |= {"predicted_ms": round(seconds * 1e3, 2), "predicted_bytes": needed}
            modelled = f" (modelled: {seconds * 1e3:,.0f} ms, {needed / 1e9:.1f} GB)"
        say(f"{rung.name}: {rung.about}{modelled}")
        losses, kernels = [], []
        try:
            measured = measure(settings, way, corpus, where)
        except torch.OutOfMemoryError:
            say("    not enough memory")
        except Miscompiled as error:
            say(f"    not measured: {error}")
        else:
            tokens_per_s = settings.tokens_per_step / measured.step_ms * 1e3
            row |= {"step_ms": round(measured.step_ms, 2), "tokens_per_s": round(tokens_per_s)}
            row |= {"peak_bytes": measured.peak_bytes or "", "loss": round(measured.losses[-1], 4)}
            if gpu is not None:
                row["kernels"] = sum(launches for _, launches, _ in measured.top)
                row["kernels_ms"] = round(sum(us for _, _, us in measured.top) / 1e3, 2)
                row["mfu"] = round(tokens_per_s * flops / gpu.peak("bf16"), 4)
            losses = [(rung.name, step, f"{loss:.5f}") for step, loss in enumerate(measured.losses, 1)]
            kernels = [(rung.name, kernel[:160], n, round(us, 1)) for kernel, n, us in measured.top[:TOP]]
            say(line(row))
        rows.append(row)
        if folder is not None:
            path = folder / f"ladder-{settings.preset}"
            _merge(Path(f"{path}.csv"), COLUMNS, rung.name, [[*row.values()]])
            _merge(Path(f"{path}-losses.csv"), ("rung", "step", "loss"), rung.name, losses)
            _merge(Path(f"{path}-kernels.csv"), ("rung", "kernel", "launches", "us"), rung.name, kernels)
        gc.collect()
        torch.compiler.reset()
        if where.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def line(row: dict[str, Any]) -> str:
    """The measured values of a row, to be printed."""
    values = [f"{row['step_ms']:>10,.1f} ms", f"{row['tokens_per_s']:>9,} tokens/s"]
    values += [f"MFU {row['mfu']:.1%}"] if row["mfu"] != "" else []
    values += [f"{row['peak_bytes'] / 1e9:.1f} GB"] if row["peak_bytes"] else []
    return "   ".join((*values, f"loss {row['loss']:.4f}"))


def _merge(path: Path, columns: Sequence[str], rung: str, rows: Sequence[Sequence]) -> None:
    """Write the rows of a rung to the file in place of what it holds of that rung; rungs stay in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = columns.index("rung")
    kept = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in list(csv.reader(file))[1:] if row[key] != rung]
    order = {rung.name: number for number, rung in enumerate(RUNGS)}
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows(sorted((*kept, *rows), key=lambda row: order.get(row[key], len(order))))
