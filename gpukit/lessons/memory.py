"""What notebook 02 shows: a Llama layer and what training keeps of it, ZeRO, an allocator's holes, the KV cache."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from IPython.display import Markdown
from torch import nn

from gpukit import benchmark, hardware, live
from gpukit.accounting import memory, models
from gpukit.lessons import diagram
from gpukit.lessons.course_map import course_map as _map
from gpukit.simulator.allocator import MIB, Allocator
from gpukit.widgets import memory_charts, style
from gpukit.widgets.predict import Reveal, reveal
from gpukit.widgets.style import Picture, Table

LLAMA = models.preset("llama3-8b")
BATCH, TOKENS = 4, 4096  # what the layer's budget is made for, here, in 03 and in 04
THESE = "four sequences of 4,096 tokens"
H100 = hardware.gpu("h100")
_PARTS = memory_charts.PARTS | {"activations": style.YOURS, "working": style.COMPUTE}


def course_map() -> Picture:
    return _map("memory")


# ---- the layer -------------------------------------------------------------------------------------------------------

_STEPS = ("norm", "q k v", "attention", "output", "+", "norm", "gate, up", "SwiGLU", "down", "+")
_KINDS = {"norm": style.PEER, "attention": style.WRITES, "SwiGLU": style.WRITES, "+": diagram.PALE}  # matrices: READS


def _layer(ax: Any, y: float) -> list[float]:
    """A Llama layer from left to right above the line of the residual stream; the middle of each step's box."""
    diagram.arrow(ax, (0.2, y + 2.2), (19.8, y + 2.2), colour=style.BOUND, width=3)
    x, middles = 1.0, []
    for i, step in enumerate(_STEPS):
        width = 0.9 if step == "+" else 2.0
        middle = x + width / 2
        if step == "+":
            diagram.arrow(ax, (x - 0.1, y + 0.6), (middle, y + 1.95), width=1.5)
            diagram.box(ax, x, y + 1.75, width, 0.9, "+", _KINDS[step], size=13, bold=True)
        else:
            diagram.box(ax, x, y, width, 1.2, step, _KINDS.get(step, style.READS), bold=True)
            if step == "norm":
                diagram.arrow(ax, (middle, y + 2.2), (middle, y + 1.2), width=1.5)
            elif i:
                diagram.arrow(ax, (x - 0.2, y + 0.6), (x + 0.06, y + 0.6), width=1.5)
        middles.append(middle)
        x += width + 0.1
    return middles


def block() -> Picture:
    """A layer of Llama as boxes above the residual stream."""
    with diagram.canvas(20, 4.6) as ax:
        _layer(ax, 0.9)
        diagram.text(ax, 5.0, 0.5, "first half: attention", bold=True)
        diagram.text(ax, 14.6, 0.5, "second half: MLP", bold=True)
        keys = {"matrices of weights": style.READS, "one vector of weights": style.PEER, "no weights": style.WRITES}
        for i, (name, colour) in enumerate(keys.items()):
            diagram.box(ax, 3.3 + 5 * i, 3.85, 0.6, 0.5, "", colour)
            diagram.text(ax, 4.1 + 5 * i, 4.1, name, align="left", size=9.5)
    return diagram.picture(
        ax, alt="A layer from left to right. First half: norm, q k v, attention, output, added to the residual stream. "
        "Second half: norm, gate and up, SwiGLU, down, added to the residual stream.",
    )  # fmt: skip


def lifetimes() -> Picture:
    """What is in memory at each moment of a training step, as a stack of areas."""
    half = 0.5  # of a step: forward, then backward; the optimizer's step comes last
    rows = {
        "weights": ([0, 2.6], [1, 1]),
        "optimizer": ([0, 2.6], [2, 2]),
        "gradients": ([0, 1, 2, 2.6], [0, 0, 1, 1]),
        "activations": ([0, 1, 2, 2.6], [0, 2.6, 0, 0]),
    }
    at = [0, 1 - 1e-9, 1, 1 + 0.12, 2, 2.6]
    with style.use():
        fig, ax = style.figure(width=9, height=3.4)
        below = [0.0] * len(at)
        for name, (xs, ys) in rows.items():
            level = [_between(x, xs, ys) for x in at]
            above = [a + b for a, b in zip(below, level, strict=True)]
            ax.fill_between(at, below, above, color=_PARTS[name], alpha=0.9, lw=0)
            below = above
        spike = [1, 1.06, 1.12]
        top = [_between(x, at, below) for x in spike]
        ax.fill_between(spike, top, [top[0], top[1] + 1.5, top[2]], color=_PARTS["working"], lw=0)
        for x, y, name in ((0.05, 0.45, "weights"), (0.05, 1.95, "optimizer states"), (1.9, 3.22, "gradients")):
            ax.text(
                x, y, name, color="white" if name != "optimizer states" else style.INK, fontweight="bold", va="center"
            )
        ax.text(0.98, 4.0, "activations", color="white", fontweight="bold", ha="right", va="center")
        ax.annotate("working memory\n(loss and logits)", (1.07, 6.6), (1.35, 6.4), va="center",
                    arrowprops={"arrowstyle": "-", "color": style.INK})  # fmt: skip
        for x in (1.06, 2):
            ax.axvline(x, color=style.BOUND, ls="--", lw=1)
        for x, name in ((half, "forward pass"), (1.53, "backward pass"), (2.3, "optimizer step")):
            ax.text(x, 7.6, name, ha="center", fontweight="bold")
        ax.set(xlim=(0, 2.6), ylim=(0, 8.1), xticks=[], yticks=[])
        style.axes(ax, x="time within a training step", y="memory (not to scale)")
    return style.picture(
        fig, alt="Memory during a training step. Weights and optimizer states are there throughout. Activations grow in "
            "the "
        "forward pass and shrink in the backward pass, while gradients grow. The peak lies where the two passes meet.",
    )  # fmt: skip


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """The height at x of the line through (xs, ys)."""
    for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return ys[-1]


# ---- parameters ------------------------------------------------------------------------------------------------------


def gpt2_parameters() -> int:
    """GPT-2 small's parameters, taken from PyTorch's own modules."""
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(768, nhead=12, dim_feedforward=4 * 768)
        rest = nn.ModuleList([nn.Embedding(50257, 768), nn.Embedding(1024, 768), nn.LayerNorm(768)])
    each, others = (sum(p.numel() for p in module.parameters()) for module in (block, rest))
    return 12 * each + others


def matrices(name: str) -> Picture:
    """The weight matrices of one layer to scale, widths and heights in units of h."""
    c = models.preset(name)
    h = c.hidden
    shapes = [
        ("q", c.heads * c.head_size),
        ("k", c.kv_heads * c.head_size),
        ("v", c.kv_heads * c.head_size),
        ("output", h),
    ]
    shapes += [(part, c.intermediate) for part in (("gate", "up", "down") if c.glu else ("up", "down"))]
    unit = 1.05
    with diagram.canvas(18, 2.6) as ax:
        x = 0.3
        for part, width in shapes:
            wide = unit * width / h
            colour = style.WRITES if part in ("gate", "up", "down") else style.READS
            diagram.box(ax, x, 0.8, wide + 0.12, unit + 0.12, part if wide > 0.8 else "", colour, bold=True, size=8)
            if wide <= 0.8:
                diagram.text(ax, x + wide / 2 + 0.06, 0.5, part, size=9, bold=True)
            diagram.text(ax, x + wide / 2 + 0.06, 2.3, _in_h(width / h), size=9)
            x += max(wide, 0.9) + 0.4
    total = (models.attention_weights(c) + models.mlp_weights(c)) / h**2
    parts = ", ".join(f"{part} {width / h:g} h²" for part, width in shapes)
    return diagram.picture(
        ax, alt=f"The weight matrices of a layer of {name}, to scale: {parts}. Together {total:g} h²."
    )


def _in_h(share: float) -> str:
    return "h²" if share == 1 else f"{share:g} h²"


def formula() -> Markdown:
    """What the formula as it is often printed gives for GPT-2 small, beside PyTorch's modules."""
    h, v, n = 768, 50257, 12
    printed, counted = h * v + n * (12 * h**2 + 13 * h) + 2 * h, gpt2_parameters()
    return Markdown(
        f"For GPT-2 small the formula gives **{printed:,}**. PyTorch's modules hold **{counted:,}** parameters "
        f"(computed), the {counted / 1e6:.2f} million that GPT-2 small is known for. The formula is "
        f"**{counted - printed:,}** short."
    )


def shared_heads() -> Picture:
    """Which heads of queries look at which heads of keys and values: one each, and grouped."""
    with diagram.canvas(19, 4.2) as ax:
        for left, kv, title in ((0.3, 8, "multi-head attention"), (10.0, 2, "grouped-query attention")):
            diagram.text(ax, left + 4.3, 0.35, title, bold=True)
            diagram.text(ax, left + 4.3, 0.95, f"8 heads of queries, {kv} of keys and values", size=9)
            for head in range(8):
                diagram.box(ax, left + 1.08 * head, 1.3, 1.0, 0.8, f"q{head}", style.READS, size=9)
                wide = 8 / kv
                middle = left + 1.08 * (head // wide * wide + wide / 2) - 0.04
                diagram.arrow(ax, (left + 1.08 * head + 0.5, 2.1), (middle, 3.1), width=1)
            for head in range(kv):
                wide = 1.08 * 8 / kv
                diagram.box(
                    ax, left + wide * (head + 0.5) - 0.54, 3.1, 1.0, 0.8, f"k{head} v{head}", style.WRITES, size=8
                )
    return diagram.picture(
        ax, alt="Left, multi-head attention: 8 heads of queries, each with its own head of keys and values. Right, "
        "grouped-query attention: 8 heads of queries share 2 heads of keys and values, four each.",
    )  # fmt: skip


def rules_of_thumb() -> Table:
    """The matrices of a layer in units of h², for models with and without a gate."""
    gpt = models.preset("gpt2")
    shown = {"GPT-2": gpt, "GPT-2 with a gate": replace(gpt, glu=True)}
    shown["GPT-2 with a gate, 8/3 h wide"] = replace(gpt, glu=True, intermediate=8 * 768 // 3)
    shown |= {name: models.preset(name) for name in ("mistral-7b", "qwen2.5-7b", "llama3-8b", "llama3-405b")}
    rows = []
    for name, c in shown.items():
        parts = [size(c) / c.hidden**2 for size in (models.attention_weights, models.mlp_weights)]
        rows.append((name, *parts, sum(parts), models.parameters(c).total / 1e9))
    columns = {"matrices of a layer": "", "attention": "h²", "MLP": "h²", "layer": "h²", "whole model": "billion"}
    return style.table(columns, rows, formats={"whole model": ",.2f"}, caption="computed from the published shapes")


def what_the_layers_say() -> Markdown:
    rows = {row[0]: row for row in rules_of_thumb().rows}
    d = 12_000
    real = [rows[name][3] for name in ("mistral-7b", "qwen2.5-7b", "llama3-8b", "llama3-405b")]
    return Markdown(
        f"**What you saw.** A layer of GPT-2 has {rows['GPT-2'][3]:.0f} h² weights in its matrices. A gate adds a third "
        f"matrix to the MLP: at the same inner width of 4 h the layer has {rows['GPT-2 with a gate'][3]:.0f} h². If the "
        f"inner width is cut to 8/3 h, it is {rows['GPT-2 with a gate, 8/3 h wide'][3]:.0f} h² again, which is why the "
        f"first gated models had that width. Real models follow neither rule exactly: these four have between {min(real):.1f} and "
        f"{max(real):.1f} h², because grouped queries make attention smaller and wider MLPs make up for it. For a real "
        f"model, compute from its shapes.\n\nMatrices grow with the square of the width. A single linear layer from d to "
        f"4 d with d = {d:,}, about the width of GPT-3, has {4 * d * d:,} weights, which take {16 * d * d:,} bytes in fp32."
    )


def layer_parameters() -> int:
    """Of one layer of Llama 3 8B."""
    return models.attention_weights(LLAMA) + models.mlp_weights(LLAMA) + models.norm_parameters(LLAMA)


def llama_parameters() -> Markdown:
    n, layer = models.parameters(LLAMA), layer_parameters()
    tables = n.embedding + n.head
    return Markdown(
        f"**The layer's budget, first line.** One layer of Llama 3 8B has {models.attention_weights(LLAMA):,} weights in "
        f"attention, {models.mlp_weights(LLAMA):,} in the MLP and {models.norm_parameters(LLAMA):,} in its norms: "
        f"**{layer:,}** parameters (computed). {LLAMA.layers} such layers hold {LLAMA.layers * layer / n.total:.0%} of "
        f"the model's {n.total:,}. The other {tables / n.total:.0%} are the embedding table and the head, which are two "
        f"separate matrices in this model."
    )


# ---- bytes per parameter, and ZeRO -----------------------------------------------------------------------------------

_LARGEST = {"everything in fp32": "fp32-adamw", "bf16 with an fp32 copy": "bf16-adamw"}


def largest() -> Reveal:
    """The largest model on eight H100s, beside the prediction."""
    found = {
        asked: memory.largest_model(H100.hbm_bytes, 8, memory.recipe_named(recipe).bytes_per_parameter)
        for asked, recipe in _LARGEST.items()
    }
    fp32, mixed = (memory.recipe_named(name) for name in _LARGEST.values())
    billion = found["everything in fp32"] / 1e9
    text = (
        f"**{billion:.1f} B** either way. In fp32 each parameter takes 4 bytes for the weight, 4 for the gradient and 8 "
        f"for AdamW's two averages: {fp32.bytes_per_parameter:.0f}. In bf16 the weight and the gradient take 2 bytes "
        f"each, and the optimizer 12, because it keeps the fp32 copy besides the two averages: "
        f"{mixed.bytes_per_parameter:.0f} again. Mixed precision does not save memory here. It makes the arithmetic "
        f"faster and the activations smaller."
    )
    return reveal("largest", found, how="computed", also=[text, recipes()])


def recipes() -> Table:
    """Bytes per parameter of the recipes."""
    n, rows = 1 << 20, []
    for recipe in memory.RECIPES.values():
        s = memory.model_states(n, recipe)
        parts = [size / n for size in (s.weights_bytes, s.gradients_bytes, s.optimizer_bytes)]
        rows.append((recipe.title, *parts, sum(parts)))
    columns = {"bytes per parameter": "", "weights": "", "gradients": "", "optimizer": "", "all": ""}
    return style.table(columns, rows, caption="computed")


_SHARDED = {0: (), 1: ("optimizer",), 2: ("gradients", "optimizer"), 3: ("weights", "gradients", "optimizer")}


def zero() -> Picture:
    """What each of eight GPUs keeps at each stage of ZeRO: eight columns, three colors."""
    heights = {"weights": 0.9, "gradients": 0.9, "optimizer": 3.2}
    with diagram.canvas(20, 6.9) as ax:
        for stage, sharded in _SHARDED.items():
            left = 0.3 + 4.95 * stage
            diagram.text(ax, left + 2.2, 0.3, f"stage {stage}", bold=True)
            for gpu in range(8):
                x, y = left + 0.55 * gpu, 0.7
                for part, height in heights.items():
                    if part in sharded:
                        diagram.box(ax, x, y, 0.56, height, "", diagram.PALE)
                        share = (height - 0.12) / 8
                        ax.barh(y + 0.06 + share * (gpu + 0.5), 0.44, share, left=x + 0.06, color=_PARTS[part])
                    else:
                        diagram.box(ax, x, y, 0.56, height, "", _PARTS[part])
                    y += height
                diagram.text(ax, x + 0.28, y + 0.25, str(gpu), size=8)
        keys = ("weights", "gradients", "optimizer states", "kept by other GPUs")
        for i, name in enumerate(keys):
            diagram.box(ax, 2.2 + 4.2 * i, 6.25, 0.6, 0.5, "", _PARTS.get(name.split()[0], diagram.PALE))
            diagram.text(ax, 2.95 + 4.2 * i, 6.5, name, align="left")
    return diagram.picture(
        ax, alt="Eight GPUs as columns. Stage 0: each keeps all weights, gradients and optimizer states. Stage 1: each "
        "keeps one eighth of the optimizer states. Stage 2: one eighth of the gradients too. Stage 3: one eighth of "
        "everything.",
    )  # fmt: skip


def zero_shares() -> dict[int, memory.States]:
    """Llama 3 8B in bf16 with fp32 optimizer on each of 8 GPUs, by stage."""
    count = models.parameters(LLAMA).total
    return {stage: memory.zero_states(count, "bf16-adamw", data=8, zero=stage) for stage in range(4)}


def zero_reveal() -> Reveal:
    found = {f"stage {stage}": s.total_bytes / 1e9 for stage, s in zero_shares().items()}
    return reveal("zero", {name: found[name] for name in ("stage 1", "stage 3")}, how="computed")


def zero_chart() -> Picture:
    stages = {
        f"stage {stage}": {"weights": s.weights_bytes, "gradients": s.gradients_bytes, "optimizer": s.optimizer_bytes}
        for stage, s in zero_shares().items()
    }
    return memory_charts.shares(stages, H100.hbm_bytes, x="Llama 3 8B in bf16, on each of 8 GPUs")


def what_zero_says() -> Markdown:
    s = {stage: shares.total_bytes / 1e9 for stage, shares in zero_shares().items()}
    return Markdown(
        f"**What you saw.** Without ZeRO each GPU would need {s[0]:.0f} GB for the states alone, and an H100 has "
        f"{H100.hbm_bytes / 1e9:.0f}. Stage 1 brings it to {s[1]:.0f} GB, because three quarters of the bytes are "
        f"optimizer states. Stage 2 removes {s[1] - s[2]:.0f} GB more, and stage 3 another {s[2] - s[3]:.0f}. Now "
        f"everything is divided by eight, which leaves {s[3]:.0f} GB. Stage 1 saves the most and adds no communication, which is why "
        f"it comes first."
    )


# ---- activations -----------------------------------------------------------------------------------------------------


def saved_by_a_product() -> Picture:
    """What y = x W keeps, and what its two gradients read."""
    with diagram.canvas(18, 5.2) as ax:
        diagram.text(ax, 0.2, 0.9, "forward", align="left", bold=True)
        diagram.box(ax, 3, 0.4, 2, 1, "x", style.YOURS, bold=True)
        diagram.arrow(ax, (5, 0.9), (8, 0.9))
        diagram.box(ax, 8, 0.4, 3, 1, "y = x W", style.READS, bold=True)
        diagram.arrow(ax, (11, 0.9), (14.5, 0.9), "y")
        diagram.arrow(ax, (4, 1.4), (4, 2.6), "kept by autograd", style.YOURS)
        diagram.text(ax, 0.2, 4.1, "backward", align="left", bold=True)
        diagram.box(ax, 3, 2.6, 2, 0.9, "x", style.YOURS, bold=True)
        diagram.box(ax, 7.5, 2.4, 4, 1, "dW = xᵀ dy", style.WRITES, bold=True)
        diagram.box(ax, 7.5, 4.0, 4, 1, "dx = dy Wᵀ", style.WRITES, bold=True)
        diagram.arrow(ax, (5, 2.95), (7.5, 2.95))
        diagram.arrow(ax, (14.5, 3.7), (11.5, 3.0))
        diagram.arrow(ax, (14.5, 3.8), (11.5, 4.5))
        diagram.text(ax, 14.7, 3.75, "dy", align="left", bold=True)
        diagram.arrow(ax, (7.5, 4.5), (5.2, 4.5), "dx")
    return diagram.picture(
        ax, alt="Forward: y = x W, and autograd keeps x. Backward: dW = x transposed times dy reads the kept x; dx = dy "
        "times W transposed reads the weights, which are in memory anyway.",
    )  # fmt: skip


class SavedByBlock:
    """One block of GPT-2's plan, run operation by operation in fp32; what autograd kept after each.

    rows      (operation, shapes, size in hidden states)
    bytes     all that was kept;  computed: the formula's
    """

    B, T, h, heads = 2, 256, 256, 8

    def __init__(self) -> None:
        B, T, h, H = self.B, self.T, self.h, self.heads
        norm1, qkv, out = nn.LayerNorm(h), nn.Linear(h, 3 * h), nn.Linear(h, h)
        norm2, up, down = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

        def attention(x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.view(B, T, H, h // H).transpose(1, 2) for part in x.split(h, -1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return y.transpose(1, 2).reshape(B, T, h)

        operations = {"norm": norm1, "q k v": qkv, "attention": attention, "output": out}
        operations |= {"second norm": norm2, "up": up, "GELU": nn.GELU(), "down": down}
        x, unit = torch.randn(B, T, h, requires_grad=True), 4 * B * T * h
        self.rows: list[tuple[str, str, float]] = []
        with live.saved(nn.ModuleList([norm1, qkv, out, norm2, up, down]).parameters()) as kept:
            for name, operation in operations.items():
                before, x = len(kept), operation(x)
                shapes = ", ".join(str(list(tensor.shape)) for tensor in kept[before:]) or "nothing new"
                self.rows.append((name, shapes, sum(tensor.bytes for tensor in kept[before:]) / unit))
        self.bytes, self.unit = sum(tensor.bytes for tensor in kept), unit
        config = models.Config("block", vocab_size=1, hidden=h, layers=1, heads=H, biases="all")
        self.computed = sum(memory.block_activations(config, B, T, memory.Run("fp32")).values())

    def reveal(self) -> Reveal:
        B, T, h = self.B, self.T, self.h
        caption = f"A GPT block on a hidden state of [{B}, {T}, {h}], counted; [{B * T}, {h}] is the same, flattened"
        table = style.table(
            {"operation": "", "what it keeps in addition": "", "size": "hidden states"}, self.rows, caption=caption,
            formats={"size": ".3f"},
        )  # fmt: skip
        also = f"Together {self.bytes:,} bytes, counted; the formula of gpukit.accounting says {self.computed:,}."
        return reveal("kept", {"hidden states": self.bytes / self.unit}, how="counted", also=[table, also])


def _saved_steps() -> dict[int, int]:
    """Index of a step of the layer's picture -> bytes that autograd keeps there."""
    b = memory.block_activations(LLAMA, BATCH, TOKENS)
    hidden, inner = 2 * BATCH * TOKENS * LLAMA.hidden, 2 * BATCH * TOKENS * LLAMA.intermediate
    return {
        0: b["attention norm"], 1: b["qkv projection"], 2: b["attention"], 3: 0, 5: b["mlp norm"], 6: hidden,
        7: 3 * inner, 8: b["mlp"] - hidden - 3 * inner,
    }  # fmt: skip


def layer_activations(run: memory.Run | None = None) -> int:
    """Bytes that one layer of Llama 3 8B keeps; by default with FlashAttention, nothing recomputed."""
    return memory.kept_activations(LLAMA, BATCH, TOKENS, run or memory.Run())


def saved_in_layer() -> Picture:
    """The Llama layer with what autograd keeps at each operation, as bars to scale."""
    saved = _saved_steps()
    what = (
        "its input",
        "its input",
        "q, k, v,\noutput",
        "nothing new",
        "",
        "its input",
        "its input",
        "gate, up,\nsilu(gate)",
    )
    what += ("its input", "")
    with diagram.canvas(20, 8.9) as ax:
        middles = _layer(ax, 0.3)
        for i, size in saved.items():
            tall = 3.3 * size / max(saved.values())
            if size:
                ax.bar(middles[i], -tall, 1.5, bottom=4.6 + tall, color=style.YOURS)
            diagram.text(
                ax, middles[i], 4.6 + tall + 0.35, f"{size / 1e6:,.0f} MB" if size else "0", bold=True, size=9.5
            )
            diagram.text(ax, middles[i], 3.85, what[i], size=8.5)
        diagram.text(ax, 10, 8.65, f"kept for the backward pass, bf16, {THESE} (computed)", size=9.5)
    parts = ", ".join(f"{_STEPS[i]} {size / 1e6:,.0f} MB" for i, size in saved.items())
    return diagram.picture(ax, alt=f"What autograd keeps in a layer of Llama 3 8B, {THESE} in bf16: {parts}.")


def what_the_layer_keeps() -> Markdown:
    saved, total = _saved_steps(), layer_activations()
    mlp = saved[6] + saved[7] + saved[8]
    return Markdown(
        f"**The layer's budget, activations.** One layer of Llama 3 8B keeps **{total / 1e9:.2f} GB** for {THESE} "
        f"(computed, bf16). The MLP keeps {mlp / total:.0%} of it: its inner tensors are "
        f"{LLAMA.intermediate / LLAMA.hidden:g} times as wide as a hidden state, and there are four of them. The output "
        f"matrix adds nothing, because its input is attention's output, which attention keeps already. All {LLAMA.layers} "
        f"layers together keep {LLAMA.layers * total / 1e9:.0f} GB."
    )


_RUNS = {
    "scores kept": memory.Run(attention="eager"),
    "FlashAttention": memory.Run(),
    "recomputed": memory.Run(recompute="full"),
}


def _growth() -> tuple[list[int], dict[str, list[int]], int]:
    lengths = [1 << k for k in range(9, 18)]
    grown = {name: [memory.activations_bytes(LLAMA, 1, T, run) for T in lengths] for name, run in _RUNS.items()}
    return lengths, grown, memory.model_states(models.parameters(LLAMA).total).total_bytes


def growth() -> Picture:
    lengths, grown, states = _growth()
    return memory_charts.growth(lengths, grown, ("weights, gradients, optimizer", states))


def what_growth_says() -> Markdown:
    lengths, grown, states = _growth()
    at = {T: i for i, T in enumerate(lengths)}
    eager, flash, again = grown.values()
    return Markdown(
        f"**What you saw.** Both axes are logarithmic, so a straight line of slope 1 means growth in proportion to T. The two "
        f"lower lines are straight, because every tensor behind them has one row per token. The upper line bends: a "
        f"head has T x T scores, and each doubling of T multiplies them by four. So with the scores kept, the "
        f"activations of one sequence overtake weights, gradients and optimizer states together between 4,096 and 8,192 "
        f"tokens; they are {eager[at[8192]] / states:.1f} times as large at 8,192 tokens and "
        f"{eager[at[16384]] / states:.1f} times at 16,384. With FlashAttention they are only "
        f"{flash[at[8192]] / states:.2f} and {flash[at[16384]] / states:.2f} times as large. The lowest line is the "
        f"subject of the next section: {again[at[8192]] / 1e9:.1f} GB at 8,192 tokens (all computed, in bf16)."
    )


def checkpoints() -> Picture:
    """Which tensors the forward pass keeps with and without recomputation: eight blocks, segments of two."""
    with diagram.canvas(20, 4.6) as ax:
        for y, title, every in ((0.5, "everything kept", 0), (2.6, "recomputation, segments of two blocks", 2)):
            diagram.text(ax, 0.2, y, title, align="left", bold=True)
            for i in range(8):
                x = 0.5 + 2.4 * i
                first = every and i % every == 0
                diagram.box(
                    ax, x, y + 0.4, 0.55, 1.2, "x", style.YOURS if first or not every else diagram.PALE, bold=True
                )
                diagram.box(
                    ax, x + 0.6, y + 0.4, 1.6, 1.2, f"block {i}", diagram.PALE if every else style.YOURS, size=9
                )
        diagram.text(
            ax, 10, 4.4, "purple: kept until the backward pass; grey: dropped as soon as the next block has read it"
        )
    return diagram.picture(
        ax, alt="Eight blocks. Above, every block's input and inner tensors are kept. Below, only the inputs of blocks "
        "0, 2, 4 and 6 are kept; everything else is dropped and computed again.",
    )  # fmt: skip


def timelines(kept: Sequence[live.Moment], again: Sequence[live.Moment]) -> Picture:
    return memory_charts.timelines({"everything kept": kept, "each block run again": again})


# ---- letting go, and holes -------------------------------------------------------------------------------------------


def logits_alive() -> Picture:
    """Which tensors as large as the logits are alive at the worst moment of the loss."""
    rows = (("logits", "while a name holds them", style.YOURS), ("log-softmax", "kept by the loss", style.YOURS))
    rows += (
        ("gradient of log-softmax", "just computed", style.WRITES),
        ("gradient of the logits", "being written", style.WRITES),
    )
    with diagram.canvas(16, 4.6) as ax:
        for i, (name, why, colour) in enumerate(rows):
            diagram.box(ax, 0.4, 0.2 + 1.05 * i, 7.2, 1, name, colour, bold=True)
            diagram.text(ax, 8.0, 0.7 + 1.05 * i, why, align="left")
    return diagram.picture(
        ax, alt="Four tensors of the logits' size: the logits, if a name holds them; their log-softmax, kept by the "
        "loss; the gradient of the log-softmax; the gradient of the logits.",
    )  # fmt: skip


def holes() -> Picture:
    """The detective's 900 MiB at three moments."""
    gpu, moments = Allocator(900 * MIB), {}
    gpu.malloc("one tensor", 768 * MIB)
    moments["a large tensor takes a segment of its own"] = gpu.map()
    gpu.free("one tensor")
    for i in range(8):
        gpu.malloc(str(i), 96 * MIB)
    moments["it is freed, and eight smaller tensors are cut from its segment"] = gpu.map()
    for i in range(0, 8, 2):
        gpu.free(str(i))
    moments["every second one is freed"] = gpu.map()
    return memory_charts.memory_map(moments, gpu.capacity_bytes)


def growing_cache() -> Reveal:
    """Eight caches that grow by torch.cat from 512 to 1,024 tokens, in the allocator's model."""
    gpu, count = Allocator(H100.hbm_bytes), 8
    token_bytes = 32 * 8 * 128 * 2  # batch x heads x head size x bytes
    for i in range(count):
        gpu.malloc(f"{i} at 512", 512 * token_bytes)
    for T in range(513, 1025):  # torch.cat makes the longer tensor first; then the shorter one is freed
        for i in range(count):
            gpu.malloc(f"{i} at {T}", T * token_bytes)
            gpu.free(f"{i} at {T - 1}")
    ready = count * 1024 * token_bytes / MIB
    text = (
        f"Each new tensor is a little larger than every hole that an older one left, so PyTorch asks the GPU for segment "
        f"after segment. A cache that is allocated once with room for all tokens, [B, T_max, H, D], takes {ready:,.0f} "
        f"MiB and no more. This is why caches are laid out that way."
    )
    found = {"reserved": gpu.reserved_bytes / MIB}
    return reveal("cache", found, how="modelled", also=[text])


def recorded(name: str) -> list[dict[str, str]]:
    """The recorded rows of an H200, by the file's name."""
    with (benchmark.RESULTS / "h200" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def allocator_measured() -> Table:
    """What PyTorch's allocator did on an H200 in the cases of this section."""
    rows = [
        (row["study"], row["case"], row["quantity"], int(row["bytes"]) / MIB)
        for row in recorded("allocator")
        if row["study"] in ("holes", "cache") and row["quantity"] != "fits"
    ]
    columns = {"study": "", "case": "", "quantity": "", "measured": "MiB"}
    caption = f"Measured on an H200, {recorded('allocator')[0]['date']}"
    return style.table(columns, rows, formats={"measured": ",.0f"}, caption=caption)


def in_eight_parts(times: float) -> str:
    return f"In eight parts, one by one: {times:.2f} times the whole logits."


def freeing_measured() -> Markdown:
    found = {row["case"]: int(row["bytes"]) for row in recorded("allocator") if row["study"] == "freeing"}
    one = found["one copy of the logits"]
    named, free, parts = (
        found[case] / one for case in ("a name holds the logits", "nobody holds the logits", "8 parts")
    )
    return Markdown(
        f"On an H200 the same three ways took {named:.2f}, {free:.2f} and {parts:.2f} times the {one / 1e9:.2f} GB of one "
        f"tensor of logits (measured). In eight parts the logits no longer decide: what is left is mostly the gradient of "
        f"the head's weights, which every way needs."
    )


# ---- serving ---------------------------------------------------------------------------------------------------------


def pages() -> Picture:
    """Keys and values of two sequences in pages of four tokens."""
    with diagram.canvas(19, 4.4) as ax:
        for row, (tokens, count) in enumerate(((10, 3), (5, 2))):
            y = 0.7 + 1.9 * row
            diagram.text(ax, 0.2, y + 0.5, f"sequence {row}", align="left", bold=True)
            for i in range(4 * count):
                x = 3.4 + 1.02 * i + 0.4 * (i // 4)
                diagram.box(
                    ax,
                    x,
                    y,
                    1,
                    1,
                    f"k{i} v{i}" if i < tokens else "",
                    style.YOURS if i < tokens else diagram.PALE,
                    size=8,
                )
            for page in range(count):
                diagram.box(ax, 3.35 + 4.48 * page, y - 0.12, 4.2, 1.24, "", "none")
        diagram.text(ax, 9.5, 4.2, "outlined: a page with room for four tokens; purple: filled", size=9.5)
    return diagram.picture(
        ax, alt="Two sequences of 10 and 5 tokens. Their keys and values lie in pages with room for four tokens: three "
        "pages and two, of which the last is not full.",
    )  # fmt: skip


_SERVED = {"mistral-7b": 1, "llama3-8b": 1, "qwen2.5-7b": 1, "llama3-70b": 4, "llama3-405b": 16, "deepseek-v3": 32}


def kv_cache() -> Table:
    rows = []
    for name, count in _SERVED.items():
        c = models.preset(name)
        token = memory.kv_cache_bytes(c, 1, 1)
        full = 4 * c.layers * c.heads * c.value_size  # each head of queries with its own keys and values
        free = count * H100.hbm_bytes - 2 * models.parameters(c).total
        long, fit = memory.kv_cache_bytes(c, 1, 131072) / 1e9, free // memory.kv_cache_bytes(c, 1, 8192)
        rows.append((name, c.attention, token, full / token, long, count, fit))
    columns = {"model": "", "attention": "", "per token": "bytes", "saves": "times", "131,072 tokens": "GB"}
    columns |= {"H100s": "", "sequences of 8,192": "that fit"}
    caption = (
        "KV cache in bf16, computed. saves: how many times smaller it is than with keys and values for every head of "
        "queries; H100s: on how many GPUs of 80 GB we put the model; that fit: beside its weights in bf16"
    )
    return style.table(columns, rows, caption=caption, formats={"saves": ".1f", "131,072 tokens": ".1f"})


def what_the_cache_says() -> Markdown:
    rows = {row[0]: row for row in kv_cache().rows}
    layer = memory.kv_cache_bytes(LLAMA, BATCH, TOKENS) / LLAMA.layers
    return Markdown(
        f"**What you saw.** Llama 3 8B keeps {rows['llama3-8b'][2]:,} bytes per token, and a single conversation of "
        f"131,072 tokens takes {rows['llama3-8b'][4]:.1f} GB, more than the weights. Grouped heads make the cache 4 to 16 "
        f"times smaller in these models. DeepSeek-V3 goes further with *multi-head latent attention* (MLA): it caches one "
        f"short vector per token, from which all heads compute their keys and values. That is "
        f"{rows['deepseek-v3'][3]:.0f} times less than keys and values for every head.\n\n**The layer's budget, serving.** One layer of Llama 3 8B "
        f"keeps {layer / 1e6:.1f} MB of keys and values for {THESE} (computed)."
    )


# ---- all of it -------------------------------------------------------------------------------------------------------


def what_fits() -> Markdown:
    """The answer to the calculator's question."""

    def held(zero: int, recompute: str) -> memory.Memory:
        layout, run = memory.Parallel(data=8, zero=zero), memory.Run(recompute=recompute)
        return memory.training_memory(LLAMA, 8, 32768, parallel=layout, run=run)

    only_zero, both = held(3, "none"), held(3, "full")
    less = [held(zero, "full").total_bytes / 1e9 for zero in (1, 2)]
    logits = 4 * 32768 * LLAMA.vocab_size
    return Markdown(
        f"<details><summary>Which switches did you need, and what is the largest piece then?</summary>\n\nYou need both, "
        f"and ZeRO in its last stage. ZeRO 3 alone leaves {only_zero.total_bytes / 1e9:.0f} GB per GPU, most of it "
        f"activations. Full recomputation leaves {less[0]:.0f} GB with ZeRO 1 and {less[1]:.0f} GB with ZeRO 2. With ZeRO "
        f"3 it leaves {both.total_bytes / 1e9:.1f} GB, which just fits. The largest piece is then the working memory, "
        f"{both.parts['working'] / 1e9:.1f} GB. Of these, {3 * logits / 1e9:.1f} GB are three tensors of 32,768 x "
        f"{LLAMA.vocab_size:,} logits in fp32, {logits / 1e9:.1f} GB each. Notebook 15 writes a loss that never holds "
        f"them.\n</details>"
    )


def measured() -> Table:
    """Peaks of whole training steps, predicted by the formulas and measured."""
    rows = []
    for r in recorded("memory"):
        how = [r["attention"], f"{r['logits']} logits"]
        how += ["dropout"] * int(r["dropout"]) + [f"recompute {r['recompute']}"] * (r["recompute"] != "none")
        predicted, taken = int(r["predicted_bytes"]) / 1e9, int(r["measured_bytes"]) / 1e9
        name = "Llama 3 8B, 4 layers" if r["model"] == "wide-block" else r["model"]
        batch = f"{r['batch']} x {int(r['tokens']):,}"
        rows.append((name, r["recipe"], ", ".join(how), batch, predicted, taken, predicted / taken - 1))
    columns = {"model": "", "recipe": "", "how": "", "batch": "", "computed": "GB", "measured": "GB", "difference": ""}
    formats = {"computed": ".2f", "measured": ".2f", "difference": "+.2%"}
    first = recorded("memory")[0]
    return style.table(
        columns, rows, formats=formats, caption=f"Peaks of whole steps, measured on an {first['gpu']}, {first['date']}"
    )


def what_measuring_says() -> Markdown:
    off = [abs(row[-1]) for row in measured().rows]
    close = sum(each < 0.001 for each in off)
    return Markdown(
        f"**What you saw.** In {close} of {len(off)} runs the formulas are within 0.1% of what PyTorch reported as its "
        f"peak. The exception is {max(off):.1%} off: there attention is eager and recomputed, and the peak lies inside "
        f"attention's backward pass, where PyTorch holds more short-lived copies than the formula knows. Everywhere else "
        f"the peak lies in the loss or in an MLP, which the formula knows exactly."
    )


def budget() -> Table:
    """The lines of the budget of one layer of Llama 3 8B that are about memory."""
    s = memory.model_states(layer_parameters())
    cache = memory.kv_cache_bytes(LLAMA, BATCH, TOKENS) // LLAMA.layers
    scores, again = (layer_activations(_RUNS[name]) for name in ("scores kept", "recomputed"))
    rows = [
        ("weights, bf16", s.weights_bytes / 1e6, "parameters", "12, in 8 or 4 bits"),
        ("gradients, bf16", s.gradients_bytes / 1e6, "parameters", ""),
        ("AdamW: fp32 copy and two averages", s.optimizer_bytes / 1e6, "parameters", "16"),
        ("activations, attention's scores kept", scores / 1e6, "tokens, and tokens squared", "13"),
        ("activations, FlashAttention", layer_activations() / 1e6, "tokens", "10 and 11"),
        ("activations, recomputed", again / 1e6, "tokens", "02"),
        ("KV cache, when serving", cache / 1e6, "tokens", "14"),
    ]
    columns = {"one layer of Llama 3 8B": "", "memory": "MB", "grows with": "", "notebook that works on it": ""}
    return style.table(columns, rows, caption=f"computed; {THESE}", formats={"memory": ",.0f"})


def what_the_budget_says() -> Markdown:
    states = memory.model_states(layer_parameters()).total_bytes
    kept, again = layer_activations(), layer_activations(_RUNS["recomputed"])
    return Markdown(
        f"**The line that this notebook improved.** The states of a layer take {states / 1e9:.2f} GB, however much it reads. "
        f"{THESE.capitalize()} add {kept / 1e9:.2f} GB of activations. With recomputation "
        f"{again / 1e6:.0f} MB of them are left, except while the backward pass is in that layer. The price is "
        f"about a third more arithmetic (computed)."
    )


def promise() -> Markdown:
    """The result at the head of the notebook."""
    row: Mapping[str, str] = next(
        r for r in recorded("memory") if r["model"] == "wide-block" and r["recompute"] == "none"
    )
    predicted, taken = (int(row[key]) / 1e9 for key in ("predicted_bytes", "measured_bytes"))
    return Markdown(
        f"One result in advance: four layers of Llama 3 8B with a small vocabulary, trained in bf16 on {row['batch']} "
        f"sequences of {int(row['tokens']):,} tokens, took **{taken:.2f} GB** at the worst moment of a step (measured on an H200). "
        f"The formulas of this notebook say **{predicted:.2f} GB**, and they need nothing but the shapes and the number formats."
    )
