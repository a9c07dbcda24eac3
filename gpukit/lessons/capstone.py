"""What notebook 17 shows: the model, the tokenizer, a training run and its costs, in tables and figures."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from IPython.display import Markdown

from gpukit import benchmark
from gpukit.accounting import collectives
from gpukit.accounting.models import parameters
from gpukit.accounting.training import Schedule
from gpukit.hardware import gpu
from gpukit.lessons.course_map import course_map as _map
from gpukit.train import data, plan, tokenizer
from gpukit.train import ladder as train_ladder
from gpukit.train.model import GPT, GPTConfig, Operations
from gpukit.train.presets import PRESETS, Settings
from gpukit.widgets import ladder as view
from gpukit.widgets import style
from gpukit.widgets.predict import Reveal, reveal
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.versus import Missing


def course_map() -> Picture:
    return _map("capstone")


# ---- the model -------------------------------------------------------------------------------------------------------


_WORK = {  # what bounds a part of the model, by color
    "table": style.NEUTRAL,
    "matrix product": style.COMPUTE,
    "norm or elementwise operator": style.READS,
    "products and a softmax": style.WRITES,
}


def block() -> Picture:
    """The parts of the model from top to bottom beside the residual stream, each with the notebook that is about it; arrows say
    which parts read the stream and which add to it."""
    parts = (
        ("embedding: one row of a table per token", "", "table", "adds"),
        ("norm", "11", "norm or elementwise operator", "reads"),
        ("q, k, v in one product", "12", "matrix product", ""),
        ("RoPE turns q and k", "11", "norm or elementwise operator", ""),
        ("attention", "13", "products and a softmax", ""),
        ("output product, added to the stream", "12", "matrix product", "adds"),
        ("norm", "11", "norm or elementwise operator", "reads"),
        ("gate and up in one product", "12", "matrix product", ""),
        ("SwiGLU", "10", "norm or elementwise operator", ""),
        ("down product, added to the stream", "12", "matrix product", "adds"),
        ("norm", "11", "norm or elementwise operator", "reads"),
        ("head and loss", "15", "products and a softmax", ""),
    )
    stream, left = 0.3, 0.9
    with style.use():
        fig, ax = style.figure(width=7.5, height=5.6)
        down = {"arrowstyle": "-|>", "lw": 3, "color": style.BOUND, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (stream, -0.1), (stream, len(parts) - 0.6), arrowprops=down)
        ax.text(0.12, len(parts) / 2, "residual stream", rotation=90, va="center", ha="center", color=style.BOUND)
        for i, (name, notebook, work, touches) in enumerate(parts):
            y = len(parts) - 1 - i
            ax.barh(y, 4.2, 0.72, left=left, color=_WORK[work], alpha=0.85)
            ink = style.INK if work == "table" else "white"
            ax.text(1.05, y, name, va="center", color=ink, fontweight="bold")
            if notebook:
                ax.text(5.25, y, f"notebook {notebook}", va="center", color=style.INK)
            if touches:
                ends = (left, stream) if touches == "reads" else (stream, left)
                ax.annotate("", (ends[0], y), (ends[1], y), arrowprops={**down, "lw": 1.5})
        ax.plot([6.35, 6.35], [1.7, 10.3], color=style.INK, lw=1.5)
        ax.text(6.47, 6, "one block, repeated", rotation=270, va="center", ha="center", fontsize=9)
        ax.set_xlim(0, 6.6)
        ax.set_ylim(-0.8, len(parts) - 0.2)
        ax.axis("off")
        named = [ax.barh(0, 0, color=color, alpha=0.85) for color in _WORK.values()]
        fig.legend(named, _WORK, loc="outside lower center", ncols=2, frameon=False, fontsize=9.5)
    names = ", ".join(f"{name} ({notebook})" if notebook else name for name, notebook, *_ in parts)
    return style.picture(
        fig, alt=f"A GPT from top to bottom, with the notebook of each part in brackets: {names}. Norms read the residual stream; "
        "the embedding, the output product and the down product add to it.",
    )  # fmt: skip


def parameter_table(model: GPT) -> Table:
    """Where the parameters of a model are."""
    counts: dict[str, int] = {}
    for name, tensor in model.named_parameters():
        part = name.removeprefix("blocks.").split(".", 1)[-1] if name.startswith("blocks.") else name
        counts[part] = counts.get(part, 0) + tensor.numel()
    total = sum(counts.values())
    rows = [(part, count, count / total) for part, count in counts.items()] + [("all", total, 1.0)]
    caption = "counted in the model; the parts of all blocks together"
    return style.table({"part": "", "parameters": "", "share": ""}, rows, caption=caption, formats={"share": ".1%"})


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def equal_guesses(vocab_size: int) -> str:
    return f"ln {vocab_size:,} is {math.log(vocab_size):.3f}."


def joins(text: str, word: str, count: int) -> Picture:
    """How `word` is written in tokens after 0, 1, 2, ... joins that were learned from `text`."""
    vocabularies = [tokenizer.train([text], 257 + n) for n in range(count + 1)]
    with style.use():
        fig, ax = style.figure(width=8.0, height=0.42 * (count + 1) + 0.5)
        for row, learned in enumerate(vocabularies):
            at = 0
            for i in learned.encode(word):
                token = learned.decode([i])
                colour = style.NEUTRAL if i < 256 else style.YOURS
                ax.barh(row, len(token) - 0.12, 0.72, left=at + 0.06, color=colour, alpha=0.9)
                ax.text(
                    at + len(token) / 2, row, token.replace(" ", "\u2423"), ha="center", va="center", family="monospace"
                )
                at += len(token)
            newest = f"new: {learned.decode([256 + row - 1])!r}" if row else "single bytes"
            ax.text(len(word) + 0.4, row, f"{row} join{'s' * (row != 1)}, {newest}", va="center", fontsize=9.5)
        ax.set_xlim(0, len(word) * 1.55)
        ax.set_ylim(count + 0.5, -0.5)
        ax.axis("off")
    last = [vocabularies[-1].decode([i]) for i in vocabularies[-1].encode(word)]
    return style.picture(
        fig, alt=f"{word!r} begins as {len(word)} single bytes and is {len(last)} tokens after {count} joins: {last}."
    )


# ---- a run -----------------------------------------------------------------------------------------------------------


def schedule(settings: Settings) -> Picture:
    """The learning rate of each step of a run."""
    rates = Schedule(settings.steps, settings.warmup, settings.rate, settings.final_rate)
    steps = range(settings.steps + 1)
    with style.use():
        fig, ax = style.figure(height=2.8)
        ax.plot(steps, [rates.rate(step) for step in steps], color=style.COMPUTE)
        ax.axvline(settings.warmup, color=style.BOUND, ls="--", lw=1)
        style.label(ax, settings.warmup, settings.rate * 0.15, f"warm-up ends: step {settings.warmup}")
        style.axes(ax, x="step", y="learning rate", grid="y")
        ax.set_ylim(0)
    return style.picture(
        fig, alt=f"The learning rate rises in a line to {settings.rate:g} at step {settings.warmup} and falls along half a "
        f"cosine to {settings.rate * settings.final_rate:g} at step {settings.steps}.",
    )  # fmt: skip


def costs() -> Table:
    """What a trained token costs in FLOPs, and the logits of a step in bytes, for the presets."""
    rows = []
    for name, preset in PRESETS.items():
        s, c = preset.settings, plan.accounting_config(name, preset.settings.model)
        attention = 12 * c.layers * c.heads * c.head_size * s.seq
        each = plan.flops_per_token(c, s.seq)
        logits = 4 * s.batch // s.micro_batches * s.seq * c.vocab_size
        rows.append((name, plan.multiplied_parameters(c) / 1e6, each / 1e6, attention / each, logits / 1e9))
    columns = {
        "preset": "", "N": "million", "FLOPs per token": "million", "attention's share": "", "logits of a micro-batch": "GB",
    }  # fmt: skip
    return style.table(
        columns, rows, caption="computed; the logits in float32", formats={"attention's share": ".0%", "N": ",.1f"}
    )


# MFU that others report, with the page of the project. Each counts FLOPs in its own way, within some percent of ours.
_REPORTED = (
    ("llm.c, GPT-2 124M", "8 x H100", "about 41%", "https://github.com/karpathy/llm.c"),
    ("PyTorch baseline of the same", "8 x H100", "about 29%", "https://github.com/karpathy/llm.c"),
    ("nanochat d12", "8 x H100", "41%", "https://github.com/karpathy/nanochat"),
    ("nanochat d24", "8 x H100", "50%", "https://github.com/karpathy/nanochat"),
    ("llm-foundry, 760M", "H100", "35%", "https://github.com/mosaicml/llm-foundry"),
    ("llm-foundry, 1.3B", "H100", "42%", "https://github.com/mosaicml/llm-foundry"),
)


def reported_mfu() -> Table:
    """What other projects say of themselves, against 989 TFLOP/s, the dense bf16 peak of an H100."""
    return style.table(
        {"project": "", "hardware": "", "MFU": ""},
        [row[:3] for row in _REPORTED],
        caption="reported by the projects, of 989 TFLOP/s (bf16, dense); not measured here",
        links={"project": [row[3] for row in _REPORTED]},
    )


def ladder() -> Reveal:
    """The rungs of the ladder for GPT-2 on an H200, beside the prediction: what a step should take (modelled) and what it took
    (measured)."""
    times = [ms for ms, _ in _steps().values()]
    caption = "gpt2, measured on an H200, apart from the columns that are modelled; empty: not measured"
    also = [view.table("gpt2", caption=caption), _what_the_ladder_says()]
    return reveal("ladder", {"times as fast": times[0] / min(times)}, "measured", also=also)


def rungs() -> Picture | Missing:
    return view.steps("gpt2")


def rung_losses() -> Picture | Missing:
    return view.losses("gpt2")


def profile(rung: str) -> Table:
    """The eight kernels in which a step of GPT-2's ladder spent the most time at that rung."""
    caption = f"the longest kernels of a step of gpt2 at the rung {rung}, recorded on an H200"
    return view.kernels("gpt2", rung, top=8, caption=caption)


def _steps() -> dict[str, tuple[float, str]]:
    """The time of a step of each recorded rung in ms, and the rung that it starts from."""
    return {row["rung"]: (float(row["step_ms"]), row["starts_from"]) for row in view.rows("gpt2") if row["step_ms"]}


def _gains() -> dict[str, float]:
    """How many times as fast each recorded rung is as the one that it starts from."""
    steps = _steps()
    return {name: steps[start][0] / ms for name, (ms, start) in steps.items() if start in steps}


def _row(rung: str, preset: str = "gpt2") -> dict[str, str]:
    return next(row for row in view.rows(preset) if row["rung"] == rung)


def _gb(row: dict[str, str], name: str = "peak_bytes") -> str:
    return f"{float(row[name]) / 1e9:.1f}"


def what_a_step_is() -> Markdown:
    """Said before the ladder: how large a step is, and into how many micro-batches the first rungs split it."""
    row = _row("naive")
    batch, seq, parts = (int(row[name]) for name in ("batch", "seq", "passes"))
    way = train_ladder.how(passes=parts)["naive"][2]
    _, whole = train_ladder.predict(PRESETS["gpt2"].settings.replace(batch=batch), replace(way, passes=1), gpu("h200"))
    return Markdown(
        f"A step of GPT-2 trains on {batch} sequences of {seq:,} tokens. Up to the rung chunked loss, a step splits them into "
        f"{parts} micro-batches of {batch // parts} sequences. For all {batch} sequences at once the naive loop would need "
        f"{whole / 1e9:.0f} GB (modelled). That is more than an H100 of {gpu('h100').hbm_bytes / 1e9:.0f} GB has, and most of an "
        f"H200's {gpu('h200').hbm_bytes / 1e9:.0f} GB. With {parts} micro-batches it needs {_gb(row)} GB (measured), so the first "
        "rungs fit smaller cards too."
    )


def _what_the_ladder_says() -> str:
    gains, steps = _gains(), _steps()
    best = sorted(gains, key=lambda name: -gains[name])[:5]
    slower = [name for name in gains if gains[name] < 0.99]
    fastest = min(steps, key=lambda name: steps[name][0])
    said = lambda names: ", ".join(f"{name} ({gains[name]:.2f})" for name in names)  # noqa: E731
    ms = lambda rung: f"{steps[rung][0]:,.0f} ms"  # noqa: E731
    chunks, whole, theirs = _row("chunked loss"), _row("one pass"), _row("PyTorch's best")
    again, bf16 = _row("recomputation"), _row("bf16")
    return (
        f"**What you saw.** The fastest rung is {fastest}. The rungs worth most are {said(best)}. The number in brackets says how many times "
        "as fast a rung is as the one that it starts from. In one pass a step launches "
        f"{int(whole['kernels']):,} kernels where {chunks['passes']} micro-batches launch {int(chunks['kernels']):,}, and each of "
        f"the {int(whole['kernels']):,} has more to do.\n\n"
        f"Some rungs take longer than the one that they start from: {said(slower)}. Each has its own reason.\n\n"
        f"The **chunked loss** costs time as long as there are {chunks['passes']} micro-batches. In one pass it saves some: PyTorch's "
        f"best takes the whole batch without it, in {ms(theirs['rung'])} and {_gb(theirs)} GB, and the "
        f"rung one pass takes {ms('one pass')} and {_gb(whole)} GB. Apart from the loss the two are the same. So an H200 can "
        "take the whole batch at once without chunks; with them it needs less memory and a little less time.\n\n"
        "**gpukit norms**: torch.compile fuses a norm with the operators around it. It cannot do that with a kernel that is "
        f"written by hand, so the step makes extra trips to memory and becomes {1 / gains['gpukit norms'] - 1:.0%} slower.\n\n"
        "**CUDA graphs** save the CPU's time for launches. The GPU was busy all the time already, so that gains nothing here.\n\n"
        f"**Recomputation** spends time to save memory: {_gb(again)} GB instead of {_gb(_row('bf16 weights'))}.\n\n"
        "**Memory.** The model knows the tensors of each operator, but not what autocast and the compiler do with them. For bf16 "
        f"it says {_gb(bf16, 'predicted_bytes')} GB where {_gb(bf16)} were measured: autocast computes the softmax in float32, "
        "and the model counts 2 bytes for each of its numbers. For PyTorch's best it says "
        f"{_gb(theirs, 'predicted_bytes')} GB where {_gb(theirs)} were measured: it counts every tensor that the single operators "
        "would make, among them several as large as all logits, and the compiler fuses most of them away.\n\n"
        "The modelled values come from gpukit/train/ladder.py and were computed before anything ran. The MFU of every rung is a "
        "share of the bf16 peak, also that of fp8, so that all rungs can be compared."
    )


def what_the_model_takes() -> Markdown:
    """Said below the bars: what the modelled times are made of, and where they are far from the measured ones."""
    m = train_ladder
    rungs = ("bf16", "FlashAttention", "fused AdamW")
    times = [float(_row(rung)["step_ms"]) / float(_row(rung)["predicted_ms"]) for rung in rungs]
    return Markdown(
        "**What you saw.** The model counts FLOPs and bytes. It assumes that the products of the weights run at "
        f"{m.PRODUCT_SHARE:.0%} of the GPU's peak, FlashAttention at {m.ATTENTION_SHARE:.0%}, and everything else at "
        f"{m.STREAM_SHARE:.0%} of the memory's bandwidth, and that a step takes {m.LAUNCH_US} µs per launch at least. From bf16 to "
        f"fused AdamW the measured step takes {min(times):.1f} to {max(times):.1f} times the modelled time. The model also gives "
        "the padded vocabulary no gain at all, and yet this rung is one of those that are worth most. When a measurement and a "
        "model disagree, look for the reason of the difference; the detective below does."
    )


def what_the_losses_say() -> Markdown:
    """Said below the losses of the rungs: how far apart they are, and where."""
    curves = {name: [loss for _, loss in points] for name, points in view.loss_curves("gpt2").items()}
    wide, narrow = ("gpukit attention", "gpukit AdamW"), ("bf16 weights", "fp8")
    close = max(abs(a - b) for a, b in zip(*(curves[name] for name in wide), strict=True))
    apart = [max(abs(curves[name][i] - curves[wide[1]][i]) for name in narrow) for i in range(len(curves[wide[1]]))]
    end = curves[wide[1]][-1] - max(curves[name][-1] for name in narrow)
    means = [sum(curve) / len(curve) for curve in (curves[name] for name in (*wide, *narrow))]
    return Markdown(
        f"**What you saw.** The two rungs with float32 weights agree to {close:.3f} nats at every step. The two with weights in "
        f"16 bits differ from them by up to {max(apart):.2f} nats, at step {apart.index(max(apart)) + 1}, and end {end:.2f} nats "
        f"lower, at step {len(apart)}. What distinguishes the runs is rounding: the two round more tensors, every rounding moves the "
        "weights a little, and the next step starts from these weights. So the losses of single steps differ, and you compare "
        f"means over many steps: over all {len(apart)} steps the means of the four runs are within {max(means) - min(means):.3f} "
        "nats of each other. A wrong kernel usually shows as a gap that stays or grows."
    )


_PARTS = {
    "matrix products": style.COMPUTE,
    "attention": style.YOURS,
    "loss": style.WRITES,
    "everything else": style.READS,
}

_BINS = 1200  # parts of a picture's time, for each of which the share of a kind of kernels is drawn

# By what kernels are part of: start, length and the kernels' own time of each stretch, in ms.
Stretches = dict[str, list[tuple[float, float, float]]]


def _timeline() -> dict[str, Stretches]:
    """The recorded steps by their rung."""
    found: dict[str, Stretches] = {}
    for row in view.read(RANKS, "ladder-timeline.csv"):
        parts = found.setdefault(row["rung"], {part: [] for part in _PARTS})
        parts[row["what"]].append(tuple(float(row[name]) for name in ("start_ms", "ms", "kernels_ms")))
    return found


def _end(parts: Stretches) -> float:
    return max(start + ms for stretches in parts.values() for start, ms, _ in stretches)


def _busy_ms(parts: Stretches, part: str) -> float:
    return sum(ms for *_, ms in parts[part])


def _shares(stretches: list[tuple[float, float, float]], shown_ms: float) -> list[float]:
    """In each of _BINS equal parts of a picture's time, the share in which kernels of one kind ran. Within a stretch, which holds
    short gaps as well, the kernels' time is spread evenly."""
    width = shown_ms / _BINS
    busy = [0.0] * (_BINS + 1)  # the last one for what ends with the picture
    for start, ms, kernels_ms in stretches:
        for i in range(int(start / width), int((start + ms) / width) + 1):
            inside = min(start + ms, (i + 1) * width) - max(start, i * width)
            busy[i] += kernels_ms * (inside / ms if ms else 1.0)
    return [min(1.0, ms / width) for ms in busy[:_BINS]]


def before_and_after() -> Picture:
    """When the kernels of a step of GPT-2 ran at the first rung and at the fastest in 16 bits; the latter also enlarged."""
    found = _timeline()
    before, after = found.values()
    names = [*found, f"{[*found][1]}, the same step enlarged"]
    with style.use():
        fig, panels = style.figure(3, 1, width=8.5, height=7.2, squeeze=False)
        said = []
        for ax, name, parts in zip(panels[:, 0], names, (before, after, after), strict=True):
            shown_ms = _end(before if ax is not panels[-1, 0] else after)
            edges = [shown_ms * i / _BINS for i in range(_BINS + 1)]
            for lane, (part, color) in enumerate(_PARTS.items()):
                tops = [0.85 * share - lane for share in _shares(parts[part], shown_ms)]
                ax.axhline(-lane, color="#E2E2E2", lw=0.8)
                ax.fill_between(edges, -lane, [*tops, tops[-1]], step="post", color=color, lw=0)
            took = [f"{_busy_ms(parts, part):,.0f} ms" for part in parts]
            names_of_lanes = [f"{part}, {ms}" for part, ms in zip(parts, took, strict=True)]
            ax.set_yticks([0.4 - lane for lane in range(len(parts))], names_of_lanes)
            ax.tick_params(axis="y", length=0)
            ax.set_title(f"{name}: {_end(parts):,.0f} ms")
            ax.set_xlim(0, shown_ms)
            ax.set_ylim(0.9 - len(parts), 1)
            style.axes(ax, x="time (ms)")
            total = ", ".join(f"{part} {ms}" for part, ms in zip(parts, took, strict=True))
            said.append(f"{name}: {_end(parts):,.0f} ms, of it {total}")
    return style.picture(fig, alt=f"When the kernels of a step of GPT-2 ran. {'; '.join(said[:2])}.")


def what_the_timeline_says() -> Markdown:
    """Said below the timeline: how to read it, and what became shorter, by how much."""
    before, after = _timeline().values()
    ms = lambda parts, *of: sum(_busy_ms(parts, part) for part in of)  # noqa: E731
    last = lambda parts, part: max(start + length for start, length, _ in parts[part])  # noqa: E731
    tail = {
        name: _end(parts) - last(parts, "matrix products") for name, parts in (("before", before), ("after", after))
    }
    # A micro-batch runs from one loss to the next: back from its own, forward to the next one.
    losses = sorted(before["loss"])
    forward, period = losses[0][0], (losses[-1][0] - losses[0][0]) / (len(losses) - 1)
    head = min(start for start, *_ in after["loss"])
    chunks_end = last(after, "loss")
    head_end = min(start + length for start, length, _ in after["matrix products"] if start + length > chunks_end)
    config = plan.accounting_config("gpt2", PRESETS["gpt2"].settings.model)
    flops = 6 * config.vocab_size * config.hidden / plan.flops_per_token(config, PRESETS["gpt2"].settings.seq)
    both = [ms(parts, "matrix products", "attention") for parts in (before, after)]
    peak = gpu("h100").peak
    share = lambda parts: ms(parts, "matrix products") / _end(parts)  # noqa: E731
    naive, fast = _row("naive"), _row("bf16 weights")
    apart = max(abs(_end(parts) / float(row["step_ms"]) - 1) for parts, row in ((before, naive), (after, fast)))
    masks = sum(
        float(row["us"])
        for row in view.read("h200", "ladder-gpt2-kernels.csv")
        if row["rung"] == "naive" and "masked_fill" in row["kernel"]
    )
    return Markdown(
        f"**What you saw.** The upper picture has {len(losses)} orange bars, one for the loss of each micro-batch. Such a bar ends "
        f"a forward pass. The first comes about {round(forward, -1):.0f} ms after the start. The backward pass takes about "
        f"{round(period - forward, -1):.0f} ms, and then the next micro-batch begins.\n\n"
        f"The lower pictures show the same work in one pass, {_end(before) / _end(after):.0f} times as fast. Enlarged, it can be "
        f"read like the model. Until {head:.0f} ms the twelve blocks run forward, each with a pink bar. From {head:.0f} to "
        f"{head_end:.0f} ms the head computes logits, loss and both gradients for one chunk of the tokens after the other: "
        f"{(head_end - head) / _end(after):.0%} of the step for a single layer, whose products are {flops:.0%} of the step's FLOPs. Then "
        "the twelve blocks run backward, and the last blue bar ends with the optimizer.\n\n"
        "What became faster?\n\n"
        f"- **Matrix products and attention** together take {both[1]:,.0f} ms instead of {both[0]:,.0f}, so they are "
        f"{both[0] / both[1]:.0f} times as fast. (Only together can they be compared, because the products inside attention have "
        "moved from the first lane to the second.) The tensor cores are the main reason: the data sheet has "
        f"{peak('bf16') / 1e12:,.0f} TFLOP/s for them in bf16, and {peak('fp32') / 1e12:.0f} for float32 without them. "
        "FlashAttention also skips the blocks of scores that the causal mask removes.\n"
        f"- **The loss** takes {ms(after, 'loss'):.0f} ms instead of {ms(before, 'loss'):.0f}. One kernel reads the logits of a "
        "chunk, 2 bytes each, and writes their gradient over them; in the naive loop forward and backward pass are separate "
        "kernels, and a logit has 4 bytes.\n"
        f"- **Everything else** takes {ms(after, 'everything else'):.0f} ms instead of {ms(before, 'everything else'):.0f}: "
        f"{ms(before, 'everything else') / ms(after, 'everything else'):.0f} times as fast, without any tensor core. Tensors of 16 "
        "bits have half the bytes, which explains a factor of 2. The rest is work that is no longer done. FlashAttention scales and masks "
        "the scores itself, and they never reach memory (on the H200 the kernels `masked_fill` alone took "
        f"{masks / 1e3:.0f} ms of the naive step). Fused operators do not write the results between them. What follows the last matrix "
        f"product, such as the optimizer, takes {tail['after']:.1f} ms instead of {tail['before']:.1f}. A whole step launches "
        f"{int(fast['kernels']):,} kernels instead of {int(naive['kernels']):,}.\n\n"
        f"Both had to become faster. Products took {share(before):.0%} of the naive step, so faster products alone could not have "
        f"made it more than {1 / (1 - share(before)):.1f} times as fast. Now they take {share(after):.0%}.\n\n"
        f"The times differ from those in the table by up to {apart:.0%}: these are single steps on an H100, recorded by the "
        "profiler, and the table has means over the steps of a run on an H200."
    )


def larger_models() -> Reveal:
    """The rungs that were measured for the two larger presets, beside what was predicted for fp8."""
    found = {name: {row["rung"]: row for row in view.rows(name)} for name in ("gpt2", "gpt-1.3b", "llama-1b")}
    time = lambda model, rung: float(found[model][rung]["step_ms"])  # noqa: E731
    fp8 = {name: time(name, "bf16 weights") / time(name, "fp8") for name in found}
    best = {name: time(name, "PyTorch's best") / time(name, "bf16 weights") for name in found}
    alone = {name: time(name, "PyTorch's best") / time(name, "gpukit AdamW") for name in ("gpt2", "gpt-1.3b")}
    busy = {name: sum(_busy(name)) / time(name, "bf16 weights") for name in found}
    bf16 = found["gpt-1.3b"]["bf16 weights"]
    saved, slower = {}, {}
    for rung in ("cheap recomputation", "recomputation"):
        row = found["gpt-1.3b"][rung]
        saved[rung] = 1 - float(row["peak_bytes"]) / float(bf16["peak_bytes"])
        slower[rung] = float(row["step_ms"]) / float(bf16["step_ms"]) - 1
    cheap = found["gpt-1.3b"]["cheap recomputation"]
    said = (
        f"**What you saw.** fp8 gains more: {fp8['gpt-1.3b']:.2f} for gpt-1.3b and {fp8['llama-1b']:.2f} for llama-1b, where "
        f"it was {fp8['gpt2']:.2f} for GPT-2. Only the products of the blocks are faster in 8 bits. Converting their inputs "
        "costs time per element, and the wider a matrix is, the more FLOPs each converted element takes part in. The course's "
        f"kernels and 16-bit weights gain less: bf16 weights is {best['gpt2']:.2f} times as fast as PyTorch's best for GPT-2, "
        f"{best['gpt-1.3b']:.2f} times for gpt-1.3b and {best['llama-1b']:.2f} times for llama-1b. The kernels alone, with "
        f"float32 weights as in PyTorch's best, make the step {alone['gpt2']:.2f} times as fast for GPT-2 and "
        f"{alone['gpt-1.3b']:.2f} times for gpt-1.3b (the rung gpukit AdamW). Matrix products and "
        f"attention take {busy['gpt-1.3b']:.0%} of gpt-1.3b's step and {busy['gpt2']:.0%} of GPT-2's, and for these PyTorch has "
        f"fast kernels as well.\n\nRecomputation saves {saved['recomputation']:.0%} of gpt-1.3b's memory for "
        f"{slower['recomputation']:.0%} more time. Cheap recomputation saves {saved['cheap recomputation']:.0%} for "
        f"{slower['cheap recomputation']:.0%} more time, so try it first. The model does not know this rung: its "
        f"{float(cheap['predicted_ms']):.0f} ms and {_gb(cheap, 'predicted_bytes')} GB are those of bf16 weights."
    )
    said += _days({name: found[name] for name in ("gpt-1.3b", "llama-1b")})
    measured = "measured on an H200, apart from the columns that are modelled"
    tables = [view.table(name, caption=f"{name}, {measured}") for name in ("gpt-1.3b", "llama-1b")]
    return reveal("larger", {"times as fast": fp8["gpt-1.3b"]}, "measured", also=[*tables, said])


def _days(found: dict[str, dict[str, dict[str, str]]]) -> str:
    """Which rows were not measured on the day of the others of their table, and what may be read from them; "" where all were."""
    days = {name: sorted({row["date"] for row in rows.values()}) for name, rows in found.items()}
    if all(len(of_table) == 1 for of_table in days.values()):
        return ""
    groups = []
    for name, rows in found.items():
        *later, last = (rung for rung, row in rows.items() if row["date"] == days[name][-1])
        later = f"{', '.join(later)} and {last}" if later else last
        groups.append(f"of {name}, {later} were measured on {days[name][-1]}, and the other rows before")
    return (
        f"\n\nThe rows of a table are not all of one day: {'; '.join(groups)}. Between the days the gradients of the course's "
        "attention became faster, and a rung may have run on another card of the same kind. How far two measurements of one rung "
        "lie apart was not recorded. So read a ratio as close to 1 as 0.99 as no difference, and take ratios between rows of "
        "different days, such as those of fp8, as less certain than the others."
    )


def _busy(preset: str) -> tuple[float, float]:
    """Milliseconds of a step that matrix products and attention take at the rung "bf16 weights"."""
    products = attention = 0.0
    for name, _, ms in view.kernels(preset, "bf16 weights", top=25).rows:
        if "nvjet" in name or "splitKreduce" in name:
            products += ms
        elif "attention" in name or "dq_from_sums" in name:
            attention += ms
    return products, attention


def what_is_left() -> Markdown:
    """Where the time of a step goes at the rung "bf16 weights"."""
    (row,) = (row for row in view.rows("gpt2") if row["rung"] == "bf16 weights")
    step, (products, attention) = float(row["step_ms"]), _busy("gpt2")
    tokens = int(row["batch"]) * int(row["seq"])
    flops = 6 * plan.multiplied_parameters(plan.accounting_config("gpt2", PRESETS["gpt2"].settings.model)) * tokens
    return Markdown(
        f'**What is left?** At the rung "bf16 weights" on the H200 the times of all kernels add up to {float(row["kernels_ms"]) / step:.0%} '
        f"of the step's {step:.0f} ms (measured by PyTorch's profiler), so the GPU hardly ever waits for the CPU. Matrix "
        f"products take {products / step:.0%} of the step and reach {flops / products / 1e9:.0f} TFLOP/s; "
        f"attention takes {attention / step:.0%}. Norms, GELU, residual sums, the loss and the optimizer share the "
        "rest, and memory is their limit."
    )


# ---- several GPUs ----------------------------------------------------------------------------------------------------


def ring(gpus: int = 4) -> Picture:
    """An all-reduce on a ring, round by round: how many GPUs' values are in each share that each GPU holds."""
    held = [[1] * gpus for _ in range(gpus)]  # by share, then by GPU
    states = [("start", [row[:] for row in held])]
    for r in range(2 * gpus - 2):
        gathering = r >= gpus - 1
        before = [row[:] for row in held]
        for to in range(gpus):
            share = (to - 1 + gathering - r % (gpus - 1)) % gpus
            held[share][to] = gpus if gathering else before[share][(to - 1) % gpus] + 1
        states.append((f"round {r + 1}", [row[:] for row in held]))
    with style.use():
        fig, panels = style.figure(1, len(states), width=10.0, height=2.6)
        for ax, (name, state) in zip(panels, states, strict=True):
            for share in range(gpus):
                for each in range(gpus):
                    n = state[share][each]
                    # Blues pale enough for dark digits.
                    colour, alpha, ink = style.READS, 0.15 + 0.5 * n / gpus, style.INK
                    if n == gpus:
                        colour, alpha, ink = style.COMPUTE, 1.0, "white"
                    ax.barh(share, 0.9, 0.9, left=each + 0.05, color=colour, alpha=alpha)
                    ax.text(each + 0.5, share, n, ha="center", va="center", color=ink, fontsize=9)
            ax.set_title(name, fontsize=9)
            ax.set_xticks([i + 0.5 for i in range(gpus)], range(gpus), fontsize=8)
            ax.set_yticks(range(gpus), range(gpus), fontsize=8)
            ax.invert_yaxis()
            ax.tick_params(length=0)
            for side in ax.spines.values():
                side.set_visible(False)
        panels[0].set_ylabel("share")
        panels[0].set_xlabel("GPU")
    return style.picture(
        fig, alt=f"An all-reduce on a ring of {gpus} GPUs. After {gpus - 1} rounds each GPU has the whole sum of one "
            "share; "
        f"after {gpus - 1} more it has the sums of all shares.",
    )  # fmt: skip


NVLINK_GBPS = 450  # of an H200 in one direction; NVIDIA's data sheet says 900 for both together


def traffic(gpus: int = 8) -> Table:
    """What each GPU sends in one step of the presets, by operation, and how long that takes at the links' full speed."""
    rows = []
    for name in ("gpt2", "gpt-1.3b", "llama-1b"):
        s = PRESETS[name].settings
        n = parameters(plan.accounting_config(name, s.model)).total
        for engine in collectives.ENGINES:
            sent = collectives.step(engine, n, gpus, micro_batches=s.micro_batches)
            each = (sent.all_reduce / 1e9, sent.all_gather / 1e9, sent.reduce_scatter / 1e9)
            rows.append((name, s.micro_batches, engine, *each, sent.total / NVLINK_GBPS / 1e6))
    columns = {"preset": "", "micro-batches": "", "engine": "", "all-reduce": "GB", "all-gather": "GB"}
    columns |= {"reduce-scatter": "GB", "at full link speed": "ms"}
    caption = (
        f"computed: what each of {gpus} GPUs sends in a step in which it runs that many micro-batches; weights in "
    )
    caption += "bfloat16, gradients in float32, "
    caption += f"links of {NVLINK_GBPS} GB/s in each direction (data sheet)"
    formats = dict.fromkeys(("all-reduce", "all-gather", "reduce-scatter"), ".2f") | {"at full link speed": ".1f"}
    return style.table(columns, rows, caption=caption, formats=formats)


def _power(value: float) -> str:
    return f"{value:.1e}".replace("e+", "e")


def traffic_and_time(gpus: int = 8) -> Markdown:
    """The answer to a question of the notebook: the time of the FLOPs of a step of gpt-1.3b beside that of its traffic."""
    s = PRESETS["gpt-1.3b"].settings
    config = plan.accounting_config("gpt-1.3b", s.model)
    each, n = plan.flops_per_token(config, s.seq), parameters(config).total
    flops = s.batch * s.seq * each
    rate = 0.4 * gpu("h200").peak("bf16")
    fsdp, ddp = (
        collectives.step(e, n, gpus, micro_batches=s.micro_batches).total / NVLINK_GBPS / 1e6 for e in ("fsdp", "ddp")
    )
    return Markdown(
        "<details><summary>Answer</summary>\n\n"
        f"Each GPU computes {s.batch} sequences x {s.seq:,} tokens x {each / 1e9:.1f} billion FLOPs per token = {_power(flops)} FLOPs. "
        f"At 40% of 989 TFLOP/s it does {_power(rate)} per second: {flops / rate:.1f} s. FSDP's {fsdp:.0f} ms are "
        f"{fsdp / 1e3 / (flops / rate):.0%} of that and DDP's {ddp:.0f} ms {ddp / 1e3 / (flops / rate):.0%}, so both can hide "
        f"behind it. Suppose that the links between two machines had a twentieth of this speed: FSDP would send for {fsdp / 50:.1f} s, and "
        "hardly all of it could hide.\n</details>"
    )


RANKS = "h100-sxm"  # whose rows and records the section about several GPUs shows
_NAMES = {"one": "one GPU", "ddp": "DDP", "fsdp": "FSDP", "fsdp+recompute": "FSDP, recomputation"}


def _ranks(*engines: str) -> list[dict[str, str]]:
    """The rows of gpukit/results/<gpu>/ranks.csv, as tests/train/scaling.py names their values; of these engines, or all."""
    return [row for row in view.read(RANKS, "ranks.csv") if not engines or row["engine"] in engines]


def _ran(row: dict[str, str]) -> tuple[str, int, str]:
    return row["preset"], int(row["gpus"]), _NAMES[row["engine"]]


_RAN = {"preset": "", "GPUs": "", "engine": ""}


def sent() -> Table:
    """What each GPU sent in a step: computed, by the calls of NCCL, and by the counters of its links."""
    rows = []
    for row in _ranks("ddp", "fsdp"):
        recorded = sum(int(row[name]) for name in ("all_reduce_bytes", "all_gather_bytes", "reduce_scatter_bytes"))
        rows.append(
            (
                *_ran(row),
                int(row["calls"]),
                *(n / 1e9 for n in (int(row["sent_bytes"]), recorded, int(row["link_bytes"]))),
            )
        )
    columns = {**_RAN, "calls of NCCL": "", "computed": "GB", "in the calls": "GB", "counted on the links": "GB"}
    caption = (
        "what each GPU sent in a step; computed from the shape, recorded by PyTorch's profiler in each call of NCCL, and "
        "counted by the GPU's links; measured on H100s of one machine"
    )
    formats = dict.fromkeys(("computed", "in the calls", "counted on the links"), ".4f")
    return style.table(columns, rows, caption=caption, formats=formats)


def what_was_sent() -> Markdown:
    """Said below that table."""
    rows = _ranks("ddp", "fsdp")
    worst = max(abs(int(row["link_bytes"]) / int(row["sent_bytes"]) - 1) for row in rows)
    calls = {(row["preset"], row["engine"], row["gpus"]): int(row["calls"]) for row in rows}
    big = PRESETS["gpt-1.3b"].settings
    return Markdown(
        f"**What you saw.** Three ways lead to the same number: what the links counted is within {_percent(worst)} of what was "
        "computed, with two GPUs and with four. So nothing else travels in a step, and NCCL adds next to nothing of its own. "
        "DDP collects gradients in buffers of about 25 MiB, or of one tensor where that is larger, and sends a buffer as soon as "
        f"it is complete: {calls['gpt2', 'ddp', '2']} calls for GPT-2. FSDP gathers a block's weights twice and "
        f"reduce-scatters its gradients, so {big.model['layers']} blocks in {big.micro_batches} micro-batches are "
        f"{3 * big.model['layers'] * big.micro_batches} of gpt-1.3b's {calls['gpt-1.3b', 'fsdp', '2']} calls. The others belong "
        "to the tables, which it gathers once per micro-batch, and to the norm of the gradients."
    )


def _percent(share: float) -> str:
    return f"{share:.2%}"


def scaling() -> Reveal:
    """How many times as fast two GPUs train gpt-1.3b as one, and the rows of all runs."""
    rows = []
    for row in _ranks():
        values = [float(row[name]) if row[name] else None for name in ("mfu", "scaling")]
        times = [float(row["computation_ms"])]
        times += [float(row[name]) if row["engine"] != "one" else None for name in ("communication_ms", "exposed_ms")]
        step = int(row["batch"]) * int(row["seq"]) / int(row["tokens_per_s"]) * 1e3
        rows.append((*_ran(row), int(row["tokens_per_s"]), *values, step, *times))
    columns = {**_RAN, "speed": "tokens/s", "MFU": "", "scaling": "", "step": "ms", "computation": "ms"}
    columns |= {"NCCL": "ms", "NCCL exposed": "ms"}
    caption = (
        "measured on H100s of one machine; scaling: the speed per GPU divided by that of one GPU alone; computation and NCCL: how "
        "long these kernels ran in a recorded step, which takes longer than the others; NCCL exposed: the part in which only NCCL's ran"
    )
    formats = {
        "MFU": ".1%",
        "scaling": ".1%",
        "step": ",.0f",
        "computation": ",.0f",
        "NCCL": ".1f",
        "NCCL exposed": ".1f",
    }
    shown = style.table(columns, rows, caption=caption, formats=formats)
    speed = {(row["preset"], row["engine"], int(row["gpus"])): int(row["tokens_per_s"]) for row in _ranks()}
    alone = speed["gpt-1.3b", "one", 1]
    times = {_NAMES[engine]: speed["gpt-1.3b", engine, 2] / alone for engine in ("ddp", "fsdp")}
    return reveal("scaling", times, "measured", also=[shown, _what_scaling_says()])


def _what_scaling_says() -> str:
    rows = {(row["engine"], int(row["gpus"])): row for row in _ranks() if row["preset"] == "gpt-1.3b"}
    value = lambda name, engine, gpus: float(rows[engine, gpus][name])  # noqa: E731
    share = lambda engine, gpus: f"{value('scaling', engine, gpus):.0%}"  # noqa: E731
    link_ms = value("sent_bytes", "fsdp", 4) / NVLINK_GBPS / 1e6
    tokens = value("batch", "fsdp", 2) * value("seq", "fsdp", 2)  # of a step, on any number of GPUs
    step_ms = lambda gpus: tokens / value("tokens_per_s", "fsdp", gpus) * 1e3  # noqa: E731
    idle_ms = step_ms(4) - value("computation_ms", "fsdp", 4) - value("exposed_ms", "fsdp", 4)
    small = next(row for row in _ranks("fsdp") if (row["preset"], row["gpus"]) == ("gpt2", "4"))
    small_ms = int(small["batch"]) * int(small["seq"]) / float(small["tokens_per_s"]) * 1e3
    small_busy, small_waits = float(small["computation_ms"]), float(small["exposed_ms"])
    of_commit: dict[str, list[float]] = {}
    for row in rows.values():
        of_commit.setdefault(row["commit"], []).append(float(row["mean_loss"]))
    apart = max(max(means) - min(means) for means in of_commit.values())
    sizes = " and ".join(str(len(means)) for means in of_commit.values())
    return (
        f"**What you saw.** With DDP a GPU keeps {share('ddp', 2)} of its speed among two and {share('ddp', 4)} among four. What "
        f"travels is not the reason: on two GPUs all but {value('exposed_ms', 'ddp', 2):.1f} of NCCL's "
        f"{value('communication_ms', 'ddp', 2):.0f} ms are hidden behind the backward pass. The computation itself takes "
        f"{value('computation_ms', 'ddp', 2):.0f} ms, where half of one GPU's would be {value('computation_ms', 'one', 1) / 2:.0f}. The "
        "batch is shared out, but every GPU still converts all weights to bfloat16 in each micro-batch and updates all of "
        "them, and with fewer sequences the matrix products are smaller.\n\n"
        f"FSDP keeps {share('fsdp', 2)} and {share('fsdp', 4)}. On two GPUs the computation sets the pace: it takes "
        f"{value('computation_ms', 'fsdp', 2):.0f} of the step's {step_ms(2):.0f} ms, and a part of NCCL's time is not hidden. (Added "
        "up, the two are longer than the step, because they come from recorded steps, which take longer.) On four GPUs the "
        f"computation takes {value('computation_ms', 'fsdp', 4):.0f} ms, and yet a step takes {step_ms(4):.0f}. Where does the rest go?\n\n"
        f"For {value('exposed_ms', 'fsdp', 4):.0f} ms only NCCL's kernels ran, although the links could carry all the data in "
        f"{link_ms:.0f} ms. Such a kernel starts as soon as its own GPU comes to it, but it cannot end before the last GPU has "
        "come to it too. So most of this time is waiting for another GPU.\n\n"
        f"For at least {idle_ms:.0f} ms nothing ran at all. With GPT-2 nearly the whole rest is of this kind: of a step's "
        f"{small_ms:.0f} ms on four GPUs, {small_busy:.0f} are computation, {small_waits:.0f} are NCCL's alone, and in the other "
        f"{small_ms - small_busy - small_waits:.0f} nothing runs.\n\n"
        "When nothing runs on a GPU, its next kernel has not been launched yet: the GPU waits for its CPU. More GPUs do not shorten "
        "this, because every process launches the kernels of all blocks, and every call of NCCL, however many GPUs there are. On four GPUs a micro-batch has a "
        "single sequence per GPU, so there is little computation behind which the launches could hide. A CPU that is late "
        "is probably also why one GPU comes to NCCL's kernels later than another. How long the launches alone take was not "
        f"measured.\n\nDDP has far less to launch for NCCL, {rows['ddp', 4]['calls']} calls per step where FSDP has "
        f"{rows['fsdp', 4]['calls']}, and it does not gather and free the weights of each block: on four GPUs its computation fills "
        f"{value('computation_ms', 'ddp', 4):.0f} of the step's {tokens / value('tokens_per_s', 'ddp', 4) * 1e3:.0f} ms.\n\n"
        f"The losses do not depend on the number of GPUs. Of gpt-1.3b's {len(rows)} runs, {sizes} had the same learning "
        f"rate. Among those, the mean losses of the first {value('step', 'ddp', 2):.0f} steps differ by at most {apart:.5f} nats."
    )


_KINDS = {
    "computation": style.COMPUTE,
    "all-reduce": style.WRITES,
    "all-gather": style.READS,
    "reduce-scatter": style.YOURS,
}


def what_travels_when(preset: str = "gpt-1.3b", gpus: int = 2) -> Picture | Missing:
    """When the kernels of a recorded step ran on a GPU, with DDP and with FSDP: what computes above, what travels below."""
    found = [r for r in view.read(RANKS, "ranks-steps.csv") if (r["preset"], int(r["gpus"])) == (preset, gpus)]
    if not found:
        return Missing(f"No step of {preset} on {gpus} GPUs is recorded there yet: tests/train/scaling.py")
    engines = [engine for engine in ("ddp", "fsdp") if any(row["engine"] == engine for row in found)]
    with style.use():
        fig, panels = style.figure(len(engines), 1, width=8.5, height=3.9, sharex=True, squeeze=False)
        said, labels = [], {}
        for ax, engine in zip(panels[:, 0], engines, strict=True):
            for what, color in _KINDS.items():
                bars = [
                    (float(r["start_ms"]), float(r["ms"])) for r in found if (r["engine"], r["what"]) == (engine, what)
                ]
                if bars:
                    place = (0.55, 0.8) if what == "computation" else (-0.4, 0.8)
                    labels[what] = ax.broken_barh(bars, place, facecolors=color)
                    said.append(f"{_NAMES[engine]}, {what} from {bars[0][0]:.0f} to {sum(bars[-1]):.0f} ms")
            ax.set_yticks([0, 0.95], ["NCCL's kernels", "other kernels"])
            ax.set_title(f"{_NAMES[engine]}, one of {gpus} GPUs")
            ax.set_ylim(-0.6, 1.6)
            ax.tick_params(length=0)
        style.axes(panels[-1, 0], x="ms since the first kernel of the step")
        fig.legend(labels.values(), labels, loc="outside lower center", ncols=4, frameon=False)
    return style.picture(fig, alt=f"When the kernels of a step of {preset} ran. {'; '.join(said)}.")


def what_the_lanes_say(preset: str = "gpt-1.3b", gpus: int = 2) -> Markdown:
    """Said below that picture: where the micro-batches of FSDP are, and what hides."""
    settings = PRESETS[preset].settings
    found = [r for r in view.read(RANKS, "ranks-steps.csv") if (r["preset"], int(r["gpus"])) == (preset, gpus)]
    recorded = max(float(r["start_ms"]) + float(r["ms"]) for r in found if r["engine"] == "fsdp")
    row = next(r for r in _ranks("fsdp") if (r["preset"], int(r["gpus"])) == (preset, gpus))
    timed = settings.tokens_per_step / int(row["tokens_per_s"]) * 1e3
    # Gradients leave in backward passes alone, so the longest times without a reduce-scatter are forward passes.
    sent = sorted(
        (float(r["start_ms"]), float(r["ms"])) for r in found if (r["engine"], r["what"]) == ("fsdp", "reduce-scatter")
    )
    pauses = sorted((after[0] - sum(before), sum(before)) for before, after in pairwise(sent))
    begins = sorted(begin for _, begin in pauses[1 - settings.micro_batches :])
    *others, last = (f"{round(begin, -1):.0f}" for begin in begins)
    return Markdown(
        "**What you saw.** With DDP nothing travels until the backward pass of the last micro-batch. Then a buffer of gradients "
        "leaves whenever it is complete, while earlier layers still compute, so nearly all of it is hidden. The update at the end "
        "waits for the last buffer only.\n\n"
        "With FSDP something travels all the time: all-gathers in each forward pass, all-gathers and reduce-scatters in each "
        f"backward pass. So a forward pass is a stretch without any pink: the micro-batches begin at about 0, {', '.join(others)} and "
        f"{last} ms, and each of the last {settings.micro_batches - 1} soon has a dense blue stretch. Where the blue is solid, a GPU "
        "already waits in the next all-gather. The gaps in the lane above it show what that costs: without its weights a block "
        "cannot begin. The thin lines are all-gathers that were done before their weights were needed.\n\n"
        f"The recorded step of FSDP takes {recorded:.0f} ms, and a step without the profiler {timed:.0f} ms."
    )


def memory_per_gpu() -> Table:
    """The most that a GPU had allocated in a step, and what the plan says before the run."""
    rows = []
    for row in _ranks():
        measured, planned = int(row["memory_bytes"]), int(row["predicted_bytes"])
        rows.append((*_ran(row), planned / 1e9, measured / 1e9, planned / measured))
    columns = {**_RAN, "modelled": "GB", "measured": "GB", "ratio": ""}
    caption = (
        "memory per GPU; modelled from the shape before the run (gpukit train --dry-run), measured as the most that PyTorch "
        "had allocated on the GPU that had most"
    )
    return style.table(columns, rows, caption=caption, formats={"modelled": ".1f", "measured": ".1f", "ratio": ".3f"})


def what_the_memory_says() -> Markdown:
    """Said below the table of memory."""
    rows = {(row["preset"], row["engine"], int(row["gpus"])): row for row in _ranks()}
    worst = max(abs(int(row["predicted_bytes"]) / int(row["memory_bytes"]) - 1) for row in rows.values())
    used = {key: int(row["memory_bytes"]) / 1e9 for key, row in rows.items()}
    big = PRESETS["gpt-1.3b"].settings
    copies = 16 * parameters(plan.accounting_config("gpt-1.3b", big.model)).total / 1e9
    return Markdown(
        f"**What you saw.** The plan is within {worst:.1%} of what was measured, in all runs. DDP's copies do not get smaller: weights, "
        f"gradients and AdamW's two moments take {copies:.1f} GB on each GPU (computed: 16 bytes per parameter), and only the "
        f"activations shrink with the share of the batch. FSDP shares everything out: gpt-1.3b needs "
        f"{used['gpt-1.3b', 'fsdp', 2]:.1f} GB on each of two GPUs and {used['gpt-1.3b', 'fsdp', 4]:.1f} GB on each of four, where DDP "
        f"needs {used['gpt-1.3b', 'ddp', 2]:.1f} and {used['gpt-1.3b', 'ddp', 4]:.1f} GB."
    )


# ---- the detective ---------------------------------------------------------------------------------------------------

_CONTEXT, _STEPS = 64, 100


class Suspects:
    """Four small models, trained on the bytes of Python's library: a healthy one, and three with a fault each.

    curves     the loss of each step, by run; smooth: each a mean over the last five
    norms      the gradient's norm before clipping, by run
    leaks      by how much the logits of earlier tokens change when only the last token changes
    """

    def __init__(self) -> None:
        text = b"".join(path.read_bytes() for path in data.source_files(data.standard_library())[:40])
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.curves: dict[str, list[float]] = {}
        self.norms: dict[str, list[float]] = {}
        self.leaks: dict[str, float] = {}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # matrices this small are slower with more
        try:
            self._train("healthy")
            self._train("run A", causal=False)
            self._train("run B", clear=False)
            self._train("run C", shift=0)
        finally:
            torch.set_num_threads(threads)

    def _train(self, name: str, causal: bool = True, clear: bool = True, shift: int = 1) -> None:
        torch.manual_seed(0)
        draw = torch.Generator().manual_seed(1)

        def attention(q, k, v, **_):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        config = GPTConfig(
            256, _CONTEXT, 2, 4, 64, intermediate=192, norm="rms", positions="rope", mlp="swiglu", biases=False
        )
        model = GPT(config, Operations(attention=attention))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        self.curves[name], self.norms[name] = [], []
        for step in range(_STEPS):
            starts = torch.randint(len(self.text) - _CONTEXT - 1, (16,), generator=draw)
            rows = torch.stack([self.text[start : start + _CONTEXT + 1] for start in starts])
            loss = model(rows[:, :-1], rows[:, shift : _CONTEXT + shift])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 10)
            optimizer.step()
            if clear:
                optimizer.zero_grad()
            self.curves[name].append(loss.item())
            self.norms[name].append(norm.item())
        tokens = self.text[None, :_CONTEXT].clone()
        with torch.no_grad():
            before = model(tokens)
            tokens[0, -1] = (tokens[0, -1] + 1) % 256
            self.leaks[name] = (model(tokens) - before)[0, :-1].abs().max().item()

    @property
    def smooth(self) -> dict[str, list[float]]:
        means = {}
        for name, curve in self.curves.items():
            windows = [curve[max(0, i - 4) : i + 1] for i in range(len(curve))]
            means[name] = [sum(window) / len(window) for window in windows]
        return means

    def picture(self) -> Picture:
        colours = (style.BOUND, style.READS, style.WRITES, style.COMPUTE)
        with style.use():
            fig, ax = style.figure(height=3.6)
            ends = []
            for (name, smooth), colour in zip(self.smooth.items(), colours, strict=True):
                ax.plot(smooth, color=colour, ls="--" if name == "healthy" else "-")
                ends.append(((_STEPS - 1, smooth[-1]), name))
            style.axes(ax, x="step", y="training loss (nats per byte)", grid="y")
            ax.set_title("Each point is the mean loss of five steps")
            ax.set_ylim(-0.3)
            ax.set_xlim(right=_STEPS - 1)  # names beyond it, off the axis
            style.names(ax, ends)
        last = ", ".join(f"{name} ends at {smooth[-1]:.2f}" for name, smooth in self.smooth.items())
        return style.picture(fig, alt=f"Loss of four runs over {_STEPS} steps, each a mean over five: {last}.")

    def table(self) -> Table:
        rows = [
            (name, self.curves[name][0], smooth[-1], self.norms[name][-1], self.leaks[name])
            for name, smooth in self.smooth.items()
        ]
        columns = {"run": "", "first loss": "nats", "last loss": "nats", "last gradient norm": ""}
        columns |= {"change of earlier logits": ""}
        caption = (
            "computed here, just now; the last loss is the mean of five steps, the norm is the one before clipping"
        )
        return style.table(columns, rows, caption=caption)


def verdict() -> Reveal:
    """What is wrong with the three runs, beside the learner's suspects."""
    because = (
        "In **run A** the causal mask is missing: a change of the last token reaches the earlier ones, so each token sees the "
        "one that it is asked to predict. The loss becomes small as soon as attention has learned to look one place ahead.",
        "In **run B** the gradients are never set to zero. Each backward pass adds to the clipped sum of all earlier "
        "gradients, so the norm before clipping stays above that of the healthy run, and each update follows old gradients of older "
        "weights as much as the new one. The model still learns, only worse, and so this mistake is found late. Without the "
        "clipping in place the norm would grow from step to step.",
        "In **run C** the targets are the inputs: the model has to repeat what it reads, and for that it needs no attention. A "
        "loss near 0 is never good news.",
        "Suspects 1 and 5 are not among the runs. A learning rate that is far too small gives a curve that falls slowly and "
        "smoothly. Validation text that was trained on does not change the training loss at all.",
        "Two of the three runs look better than the healthy one. The first losses say something too: ln 256 is 5.55, and the "
        "healthy run begins a little below it, because the output head is the embedding table and so favors the byte that was "
        "just read, and text repeats itself. Run C, which is asked for that very byte, begins far below.",
    )
    return reveal("detective", {"run A": 2, "run B": 3, "run C": 4}, how="planted", also=because, exact=True)


# ---- a run that went wrong by itself -----------------------------------------------------------------------------------


def unplanned() -> Picture:
    """The losses of two starts of one rung, one of which torch.compile got wrong."""
    right = view.loss_curves("gpt-1.3b")["one pass"]
    wrong = view.read("h200", "miscompiled-losses.csv")
    curves = {"right": right, "wrong": [(int(row["step"]), float(row["loss"])) for row in wrong]}
    with style.use():
        fig, ax = style.figure(height=3.4)
        ends = []
        for (name, points), colour in zip(curves.items(), (style.READS, style.BOUND), strict=True):
            ax.plot(*zip(*points, strict=True), color=colour)
            ends.append((points[-1], name))
        style.axes(ax, x="step", y="training loss (nats per token)", grid="y")
        ax.set_title('gpt-1.3b, the rung "one pass", started twice')
        ax.set_ylim(0)
        ax.set_xlim(right=right[-1][0])
        style.names(ax, ends)
    first, last = ({name: points[i][1] for name, points in curves.items()} for i in (0, -1))
    alt = "; ".join(f"the {name} one begins at {first[name]:.2f} and ends at {last[name]:.2f}" for name in curves)
    return style.picture(fig, alt=f"Losses of two runs. {alt}.")


def block_sizes() -> Table:
    """What share of a norm's results is wrong, by the size of the blocks."""
    rows = [
        (f"{row['rows']} x {int(row['columns']):,}", int(row["warps"]), 100 * float(row["wrong_share"]))
        for row in view.read("h200", "miscompiled.csv")
    ]
    columns = {"rows x columns of a block": "", "warps": "", "wrong results": "%"}
    return style.table(columns, rows, caption="16,384 rows of 2,048, measured on an H200 with PyTorch 2.11")


# ---- sentences with numbers ------------------------------------------------------------------------------------------


def promise() -> Markdown:
    """The result at the head of the notebook."""
    tiny = PRESETS["tiny"]
    n = parameters(plan.accounting_config("tiny", tiny.settings.model)).total
    loss, steps, seconds, where = re.fullmatch(r"(.+) after (.+) steps in (\d+) s, (.+)", tiny.measured).groups()
    rate = tiny.settings.steps * tiny.settings.tokens_per_step / float(seconds)
    return Markdown(
        f"The smallest GPT of this course has **{n / 1e6:.2f} million** parameters. It begins with random weights and "
        "reads the "
        f"source code of Python's standard library. After {steps} steps, which took {seconds} s, its loss on text that it has not "
        f"read is **{loss}** (measured {where}). It read {style.number(round(rate, -2))} tokens per second. The *loss*, in *nats*, "
        "says how badly it predicts the next token; less is better. What the numbers mean, and which loss an untrained model has, "
        "comes below."
    )


def what_the_table_says(model: GPT) -> str:
    """Said below the table of parameters."""
    total = sum(p.numel() for p in model.parameters())
    table, c = model.embedding.weight.numel(), model.config
    blocks = sum(p.numel() for p in model.blocks.parameters())
    return (
        f"**What you saw.** The embedding table holds {c.vocab_size:,} rows of {c.hidden} numbers, {table / total:.0%} of "
        "the "
        f"model, and it is the output head as well (`tied_embeddings`). The blocks hold {blocks / total:.0%}, most of it "
        "in the "
        "three matrices of the MLP (`mlp.up` holds two of them, gate and up). In larger models the blocks grow with "
        "layers times the square of the width, and the "
        f"table with the width alone, so its share shrinks."
    )


_PATCHED = {"gpt2": "GPT-2, 124M", "llama-1b": "Llama, 1.2B", "qwen3-0.6b": "Qwen3, 0.6B"}
_WAYS = {
    "torch": "as transformers makes it", "compile": "torch.compile", "liger": "Liger's kernels",
    "gpukit": "gpukit.patch", "gpukit-compile": "gpukit.patch and torch.compile",
}  # fmt: skip


def patched() -> Table:
    """A training step of transformers' models on an H200, as they are and with other kernels."""
    rows = []
    for model, name in _PATCHED.items():
        found = {row.provider: row for row in benchmark.rows(f"patch-{model}") if row.mode == "fwd+bwd"}
        for provider, way in _WAYS.items():
            if row := found.get(provider):
                batch = f"{row.shape[0]} x {row.shape[1]:,}"
                rows.append(
                    (name, batch, way, row.median_ms, row.peak_bytes / 1e9, found["torch"].median_ms / row.median_ms)
                )
    columns = {
        "model": "",
        "tokens": "",
        "kernels": "",
        "forward and backward": "ms",
        "memory": "GB",
        "times as fast": "",
    }
    caption = "measured on an H200, bf16 weights, without the optimizer; memory beyond the weights"
    formats = {"forward and backward": ".1f", "memory": ".1f", "times as fast": ".2f"}
    return style.table(columns, rows, caption=caption, formats=formats)


def what_patching_gains() -> Markdown:
    """Said below the table of patched models."""
    found = {row.provider: row for row in benchmark.rows("patch-llama-1b") if row.mode == "fwd+bwd"}
    torch_row, ours, liger, compiled = (found[name] for name in ("torch", "gpukit", "liger", "compile"))
    small = {row.provider: row for row in benchmark.rows("patch-gpt2") if row.mode == "fwd+bwd"}
    alone, both = small["gpukit"], small["gpukit-compile"]
    return Markdown(
        f"**What you saw.** For the Llama, patching makes a step {torch_row.median_ms / ours.median_ms:.2f} times as fast "
        "and "
        f"takes {ours.peak_bytes / 1e9:.1f} GB where the original takes {torch_row.peak_bytes / 1e9:.1f} GB. Most of the "
        "memory "
        f"was the logits: 16,384 tokens times 128,256 entries of the vocabulary, several times over. Liger's kernels reach "
        f"nearly the same ({liger.median_ms:.1f} ms against {ours.median_ms:.1f} ms). In GPT-2 Liger replaces nothing, so its row "
        "is the original's. There torch.compile gains more time than the patch does, because it fuses the operators between "
        f"the kernels. Both together gain the most time, but they need more memory than the patched model alone: {both.peak_bytes / 1e9:.1f} GB instead of "
        f"{alone.peak_bytes / 1e9:.1f}. For the Llama the compiler alone makes a step slower "
        f"({torch_row.median_ms / compiled.median_ms:.2f} times as fast). We did not find out why both together need more memory, and why "
        "the compiled Llama is slower. The Qwen3 was not measured with the compiler."
    )


def what_a_cache_copies(tokens: int = 4096) -> Markdown:
    """What a new token moves in a cache that concatenates, and in one that appends, for the preset llama-1b."""
    c = plan.accounting_config("llama-1b", PRESETS["llama-1b"].settings.model)
    row = 2 * 2 * c.layers * c.kv_heads * c.head_size
    return Markdown(
        "With long texts the cache matters too. The cache of `transformers` concatenates: for each new token it copies all keys and "
        f"values before it. For llama-1b's shape with {tokens:,} tokens in bfloat16 the cache holds {row * tokens / 1e6:,.0f} MB, so "
        f"each new token reads and writes {2 * row * tokens / 1e6:,.0f} MB for the copy (computed). `GrowingCache` in "
        "[gpukit/huggingface/cache.py](../gpukit/huggingface/cache.py) appends in place, and a new token writes "
        f"{row:,} bytes: `model.generate(ids, past_key_values=GrowingCache())`. What that gains in time was not measured here."
    )


def spread(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference of two rows of numbers."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))
