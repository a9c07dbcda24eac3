"""What notebook 17 shows: the model, the tokenizer, a training run and its costs, in tables and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def block() -> Picture:
    """One block of the model as boxes beside the residual stream, each with the notebook that is about it."""
    parts = (
        ("embedding: one row of a table per token", "", "NEUTRAL"),
        ("norm", "11", "READS"),
        ("q, k, v in one product", "12", "COMPUTE"),
        ("RoPE turns q and k", "11", "READS"),
        ("attention", "13", "WRITES"),
        ("output product, added to the stream", "12", "COMPUTE"),
        ("norm", "11", "READS"),
        ("gate and up in one product", "12", "COMPUTE"),
        ("SwiGLU", "10", "WRITES"),
        ("down product, added to the stream", "12", "COMPUTE"),
        ("norm", "11", "READS"),
        ("head and loss", "15", "WRITES"),
    )
    with style.use():
        fig, ax = style.figure(width=7.5, height=5.2)
        ax.annotate(
            "", (0.3, -0.7), (0.3, len(parts) - 0.4), arrowprops={"arrowstyle": "-|>", "lw": 3, "color": style.BOUND}
        )
        ax.text(0.12, len(parts) / 2, "residual stream", rotation=90, va="center", ha="center", color=style.BOUND)
        for i, (name, notebook, colour) in enumerate(parts):
            y = len(parts) - 1 - i
            ax.barh(y, 4.2, 0.72, left=0.9, color=style.COLOURS[colour.lower()], alpha=0.85)
            ink = style.INK if colour == "NEUTRAL" else "white"
            ax.text(1.05, y, name, va="center", color=ink, fontweight="bold")
            if notebook:
                ax.text(5.25, y, f"notebook {notebook}", va="center", color=style.INK)
        ax.plot([0.72, 0.72], [1.7, 10.3], color=style.INK, lw=1.5)
        ax.text(0.62, 6, "one block, repeated", rotation=90, va="center", ha="center", fontsize=9)
        ax.set_xlim(0, 6.6)
        ax.set_ylim(-0.8, len(parts) - 0.2)
        ax.axis("off")
    names = ", ".join(f"{name} ({notebook})" if notebook else name for name, notebook, _ in parts)
    return style.picture(fig, alt=f"A GPT from top to bottom, with the notebook of each part in brackets: {names}.")


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
        "preset": "", "N": "million", "FLOPs per token": "million", "of it attention": "", "logits of a micro-batch": "GB",
    }  # fmt: skip
    return style.table(
        columns, rows, caption="computed; the logits in float32", formats={"of it attention": ".0%", "N": ",.1f"}
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
    return view.kernels("gpt2", rung, top=8)


def _steps() -> dict[str, tuple[float, str]]:
    """The time of a step of each recorded rung in ms, and the rung that it starts from."""
    return {row["rung"]: (float(row["step_ms"]), row["starts_from"]) for row in view.rows("gpt2") if row["step_ms"]}


def _gains() -> dict[str, float]:
    """How many times as fast each recorded rung is as the one that it starts from."""
    steps = _steps()
    return {name: steps[start][0] / ms for name, (ms, start) in steps.items() if start in steps}


def _what_the_ladder_says() -> str:
    gains, steps = _gains(), _steps()
    best = sorted(gains, key=lambda name: -gains[name])[:4]
    slower = [name for name in gains if gains[name] < 0.99]
    fastest = min(steps, key=lambda name: steps[name][0])
    said = ", ".join(f"{name} ({gains[name]:.2f})" for name in best)
    text = (
        f"**What you saw.** The fastest rung is {fastest}. The rungs worth most are {said}. The number says how many times "
        "as fast a rung is as the one that it starts from. "
    )
    if slower:
        said = ", ".join(f"{name} ({gains[name]:.2f})" for name in slower)
        text += f"Some take longer than the rung that they start from: {said}. "
    if {"chunked loss", "one pass"} <= gains.keys():
        text += (
            "The loss in chunks takes longer and frees memory, and the next rung spends that memory: it computes the whole "
            "batch in one pass instead of eight. Recomputation also spends time to save memory. The compiler cannot "
            "fuse anything into a kernel that it cannot look into, so the course's norms cost more than they gain. And CUDA "
            "graphs cannot help where the GPU is busy all the time. "
        )
    best_gb = {
        row["rung"]: [float(row[name]) / 1e9 for name in ("predicted_bytes", "peak_bytes")]
        for row in view.rows("gpt2")
        if row["peak_bytes"] and row["predicted_bytes"]
    }.get("PyTorch's best")
    if best_gb:
        text += (
            "The modelled memory does not know what the compiler fuses. For PyTorch's best it says "
            f"{best_gb[0]:.1f} GB where {best_gb[1]:.1f} were measured, because it counts every tensor that the single "
            "operators would make, among them several as large as all logits. "
        )
    return text + (
        "The modelled times come from gpukit/train/ladder.py and were computed before anything ran. The MFU of every rung is "
        "a share of the bf16 peak, also that of fp8, so that all rungs can be compared."
    )


def what_the_losses_say() -> Markdown:
    """Said below the losses of the rungs: how far apart they are, and where."""
    curves = {name: [loss for _, loss in points] for name, points in view.loss_curves("gpt2").items()}
    wide, narrow = ("gpukit attention", "gpukit AdamW"), ("bf16 weights", "fp8")
    close = max(abs(a - b) for a, b in zip(*(curves[name] for name in wide), strict=True))
    apart = [max(abs(curves[name][i] - curves[wide[1]][i]) for name in narrow) for i in range(len(curves[wide[1]]))]
    end = curves[wide[1]][-1] - max(curves[name][-1] for name in narrow)
    return Markdown(
        f"**What you saw.** The curves are nearly one, but not up to the last digit. The two rungs with float32 weights agree "
        f"to {close:.3f} nats at every step. The two with weights in 16 bits differ from them by up to {max(apart):.2f} nats, "
        f"at step {apart.index(max(apart)) + 1}, and end {end:.2f} nats lower. They round more tensors, every rounding moves "
        "the weights a little, and the steps after that start from other weights. A difference that keeps growing would be an "
        "error. A fast step that learns something else is worth nothing."
    )


_PARTS = {
    "matrix products": style.COMPUTE,
    "attention": style.YOURS,
    "loss": style.WRITES,
    "everything else": style.READS,
}

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


def before_and_after() -> Picture:
    """When the kernels of a step of GPT-2 ran at the first rung and at the fastest in 16 bits; the latter also enlarged."""
    found = _timeline()
    before, after = found.values()
    names = [*found, f"{[*found][1]}, the same step enlarged"]
    with style.use():
        fig, panels = style.figure(3, 1, width=8.5, height=5.2, squeeze=False)
        said, labels = [], {}
        for ax, name, parts in zip(panels[:, 0], names, (before, after, after), strict=True):
            for lane, (part, color) in enumerate(_PARTS.items()):
                bars = [stretch[:2] for stretch in parts[part]]
                labels[part] = ax.broken_barh(bars, (-lane - 0.4, 0.8), facecolors=color)
            ax.set_yticks([])
            ax.set_title(f"{name}: {_end(parts):,.0f} ms")
            ax.set_xlim(0, _end(before if ax is not panels[-1, 0] else after))
            total = ", ".join(f"{part} {_busy_ms(parts, part):,.0f} ms" for part in parts)
            said.append(f"{name}: {_end(parts):,.0f} ms, of it {total}")
        style.axes(panels[-1, 0], x="ms since the first matrix product of the step")
        fig.legend(labels.values(), labels, loc="outside lower center", ncols=4, frameon=False)
    return style.picture(fig, alt=f"When the kernels of a step of GPT-2 ran. {'; '.join(said[:2])}.")


def what_the_timeline_says() -> Markdown:
    """Said below the timeline: what became shorter, and by how much."""
    before, after = _timeline().values()
    times = {part: _busy_ms(before, part) / _busy_ms(after, part) for part in _PARTS}
    share = lambda parts: _busy_ms(parts, "matrix products") / _end(parts)  # noqa: E731
    return Markdown(
        "**What you saw.** The pattern in the upper picture comes eight times, because the naive loop has memory for an eighth "
        "of the batch. Each pass runs forward through the blocks, computes the logits and the loss, and runs back. The lower "
        f"pictures show the same work in one pass, {_end(before) / _end(after):.0f} times as fast. Enlarged, it can be read like the "
        "model: twelve blocks forward, a long part in which logits and loss alternate chunk by chunk, twelve blocks back, and the "
        "optimizer as the last blue bar.\n\nMatrix products are "
        f"{times['matrix products']:.0f} times as fast, because tensor cores compute them. Everything else is "
        f"{times['everything else']:.0f} times as fast without any tensor core: it moves fewer bytes, since 16 bits halve a "
        f"tensor and fusion saves a round trip. Both had to become faster. Products took {share(before):.0%} of the naive step, so "
        f"tensor cores alone could not have made it more than {1 / (1 - share(before)):.1f} times as fast. Now they take "
        f"{share(after):.0%}."
    )


def larger_models() -> Reveal:
    """The rungs that were measured for the two larger presets, beside what was predicted for fp8."""
    found = {name: {row["rung"]: row for row in view.rows(name)} for name in ("gpt2", "gpt-1.3b", "llama-1b")}
    time = lambda model, rung: float(found[model][rung]["step_ms"])  # noqa: E731
    fp8 = {name: time(name, "bf16 weights") / time(name, "fp8") for name in found}
    best = {name: time(name, "PyTorch's best") / time(name, "bf16 weights") for name in found}
    alone = {name: time(name, "PyTorch's best") / time(name, "gpukit AdamW") for name in ("gpt2", "gpt-1.3b")}
    busy = {name: sum(_busy(name)) / time(name, "bf16 weights") for name in found}
    bf16, less = found["gpt-1.3b"]["bf16 weights"], found["gpt-1.3b"]["recomputation"]
    saved = 1 - float(less["peak_bytes"]) / float(bf16["peak_bytes"])
    slower = float(less["step_ms"]) / float(bf16["step_ms"]) - 1
    said = (
        f"**What you saw.** fp8 gains more: {fp8['gpt-1.3b']:.2f} for gpt-1.3b and {fp8['llama-1b']:.2f} for llama-1b, where "
        f"it was {fp8['gpt2']:.2f} for GPT-2. Only the products of the blocks are faster in 8 bits. Converting their inputs "
        "costs time per element, and the wider a matrix is, the more FLOPs each converted element takes part in. The course's "
        f"kernels and 16-bit weights gain less: bf16 weights is {best['gpt2']:.2f} times as fast as PyTorch's best for GPT-2, "
        f"{best['gpt-1.3b']:.2f} times for gpt-1.3b and {best['llama-1b']:.2f} times for llama-1b. The kernels alone, with "
        f"float32 weights as in PyTorch's best, make it {alone['gpt2']:.2f} times for GPT-2 and {alone['gpt-1.3b']:.2f} times "
        "for gpt-1.3b (the rung gpukit AdamW). Matrix products and "
        f"attention take {busy['gpt-1.3b']:.0%} of gpt-1.3b's step and {busy['gpt2']:.0%} of GPT-2's, and for these PyTorch has "
        f"fast kernels as well. Recomputation saves {saved:.0%} of gpt-1.3b's memory for "
        f"{slower:.0%} more time."
    )
    days = {row["date"] for name in ("gpt-1.3b", "llama-1b") for row in found[name].values()}
    if len(days) > 1:
        said += (
            f" The rungs were measured on {len(days)} days, {min(days)} to {max(days)}; between, attention's gradients became "
            "faster (one kernel in place of two), and cards of one kind differ by some percent too. Ratios between rungs of two "
            "days are that uncertain."
        )
    tables = [view.table(name, caption=f"{name}, measured on an H200") for name in ("gpt-1.3b", "llama-1b")]
    return reveal("larger", {"times as fast": fp8["gpt-1.3b"]}, "measured", also=[*tables, said])


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
        f'**What is left?** At the rung "bf16 weights" the times of all kernels add up to {float(row["kernels_ms"]) / step:.0%} '
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
        f"behind it. Between two machines, with links of a twentieth of the speed, FSDP would send for {fsdp / 50:.1f} s, and "
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
        f"**What you saw.** Three ways to the same number: what the links counted is within {_percent(worst)} of what was "
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
    columns |= {"NCCL": "ms", "of it exposed": "ms"}
    caption = (
        "measured on H100s of one machine; scaling: the speed per GPU divided by that of one GPU alone; computation and NCCL: how "
        "long these kernels ran in a recorded step, which takes longer than the others; exposed: the part in which only NCCL's ran"
    )
    formats = {
        "MFU": ".1%",
        "scaling": ".1%",
        "step": ",.0f",
        "computation": ",.0f",
        "NCCL": ".1f",
        "of it exposed": ".1f",
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
    means: dict[str, list[float]] = {}
    for row in rows.values():
        means.setdefault(row["commit"], []).append(float(row["mean_loss"]))
    apart = f"{max(max(of_one) / min(of_one) - 1 for of_one in means.values()):.0e}".replace("e-0", "e-")
    return (
        f"**What you saw.** With DDP a GPU keeps {share('ddp', 2)} of its speed among two and {share('ddp', 4)} among four. What "
        f"travels is not the reason: on two GPUs all but {value('exposed_ms', 'ddp', 2):.1f} of NCCL's "
        f"{value('communication_ms', 'ddp', 2):.0f} ms are hidden behind the backward pass. The computation itself takes "
        f"{value('computation_ms', 'ddp', 2):.0f} ms, where half of one GPU's would be {value('computation_ms', 'one', 1) / 2:.0f}. The "
        "batch is shared out, but every GPU still converts all weights to bfloat16 in each micro-batch and updates all of "
        "them, and with fewer sequences the matrix products are smaller.\n\n"
        f"FSDP keeps {share('fsdp', 2)} and {share('fsdp', 4)}. On four GPUs its NCCL kernels ran for "
        f"{value('communication_ms', 'fsdp', 4):.0f} ms of a recorded step, and for {value('exposed_ms', 'fsdp', 4):.0f} of them nothing "
        f"else ran, although the links could carry the data in {link_ms:.0f} ms. The rest is waiting: a kernel of NCCL starts on "
        "the GPU that comes first, and it cannot end before the last GPU has come. Why does one come late? A step takes "
        f"{step_ms(2):.0f} ms on two GPUs and {step_ms(4):.0f} on four, although the GPUs compute for "
        f"{value('computation_ms', 'fsdp', 2):.0f} and {value('computation_ms', 'fsdp', 4):.0f} of them. So what sets its length is not "
        "shared out, and that is the CPU: every process launches all kernels and all collectives, however many GPUs there are. On "
        "four GPUs a pass has a single sequence, a block computes for a few milliseconds, and the launches of the next block "
        "take longer than that.\n\n"
        "The losses do not depend on the number of GPUs. The runs are of two sessions, with learning rates that differed; within "
        f"a session the means over gpt-1.3b's first {value('step', 'ddp', 2):.0f} steps are within {apart} of each other."
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
        "In **run B** the gradients are never set to zero. Each backward pass adds to what clipping has left of all the earlier "
        "ones, so the norm before clipping stays above that of the healthy run, and each update follows old gradients of older "
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
    curves = {"one start": right, "another start": [(int(row["step"]), float(row["loss"])) for row in wrong]}
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
    alt = "; ".join(f"{name} begins at {first[name]:.2f} and ends at {last[name]:.2f}" for name in curves)
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
    loss, _, how = tiny.measured.partition(" after ")
    return Markdown(
        f"The smallest GPT of this course has **{n / 1e6:.2f} million** parameters. It begins with random weights and "
        "reads the "
        f"source code of Python's standard library. Measured: **{loss}** after {how}. The *loss*, in *nats*, says how badly "
        "it predicts the "
        "next token; less is better. What the numbers mean, and which loss a model has that knows nothing, comes below."
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
    return Markdown(
        f"**What you saw.** For the Llama, patching makes a step {torch_row.median_ms / ours.median_ms:.2f} times as fast "
        "and "
        f"takes {ours.peak_bytes / 1e9:.1f} GB where the original takes {torch_row.peak_bytes / 1e9:.1f} GB. Most of the "
        "memory "
        f"was the logits: 16,384 tokens times 128,256 entries of the vocabulary, several times over. Liger's kernels reach "
        f"nearly the same ({liger.median_ms:.1f} ms against {ours.median_ms:.1f} ms). In GPT-2 Liger replaces nothing, so its row "
        "is the original's. There torch.compile gains more time than any kernels do, because it fuses what stands between "
        "them, and both together gain the most time, but need more memory than the patched model alone. For the Llama the compiler alone makes a step slower "
        f"({torch_row.median_ms / compiled.median_ms:.2f} times as fast). The Qwen3 was not measured with the compiler."
    )


def spread(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference of two rows of numbers."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))
