"""What notebook 03 shows: FLOPs of products, layers and models; what a training run costs; the roofline; decoding."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from IPython.display import Markdown
from torch.utils.flop_counter import FlopCounterMode

from gpukit import benchmark, hardware
from gpukit.accounting import flops, memory, models, roofline, training
from gpukit.lessons import diagram
from gpukit.lessons.course_map import course_map as _map
from gpukit.lessons.memory import BATCH, LLAMA, THESE, TOKENS, layer_parameters
from gpukit.widgets import style
from gpukit.widgets.predict import Reveal, reveal
from gpukit.widgets.style import Picture, Table

H100, H200 = hardware.gpu("h100"), hardware.gpu("h200")


def course_map() -> Picture:
    return _map("flops")


def counted(function: Callable, *args: Any) -> int:
    """What PyTorch's own counter says of a call."""
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()


# ---- one product -----------------------------------------------------------------------------------------------------


def product() -> Picture:
    """C = A B: the row and the column that make one element."""
    with diagram.canvas(18, 5.4) as ax:
        for x, y, wide, tall, name, below in (
            (0.5, 2.4, 4.5, 2, "A", "[M, K]"), (6.0, 0.4, 3.6, 4, "B", "[K, N]"), (11.4, 2.4, 3.6, 2, "C = A B", "[M, N]"),
        ):  # fmt: skip
            diagram.box(ax, x, y, wide, tall, "", diagram.PALE)
            diagram.text(ax, x + wide / 2, y + tall + 0.3, f"{name}  {below}", bold=True)
        diagram.box(ax, 0.5, 3.1, 4.5, 0.5, "a row: K numbers", style.READS, size=9)
        diagram.box(ax, 7.4, 0.4, 0.6, 4, "", style.WRITES)
        diagram.text(ax, 8.15, 0.8, "a column:", align="left", size=8)
        diagram.text(ax, 8.15, 1.25, "K numbers", align="left", size=8)
        diagram.box(ax, 12.8, 3.1, 0.6, 0.5, "", style.COMPUTE)
        diagram.text(ax, 15.3, 3.1, "an element:", align="left", size=9)
        diagram.text(ax, 15.3, 3.55, "K multiplications", align="left", size=9)
        diagram.text(ax, 15.3, 4.0, "and K additions", align="left", size=9)
        diagram.text(ax, 5.5, 3.35, "x", bold=True)
        diagram.text(ax, 10.5, 3.35, "=", bold=True)
    return diagram.picture(
        ax, alt="A matrix A of M by K times a matrix B of K by N. One element of the M by N result takes a row of A and "
        "a column of B: K multiplications and K additions.",
    )  # fmt: skip


EINSUM_SIZES = {"...": 512, "m": 1024, "n": 256, "k": 64, "b": 4, "h": 12, "q": 128, "d": 32}
_EINSUMS = (
    "m n, m n -> m n", "m n, m k -> n k", "m n, n k -> m k", "n, k n -> k", "n, n k -> k", "k n, k n ->",
    "m n, n -> m", "... n, k n -> ... k", "b h q d, b h k d -> b h q k", "k, n -> k n",
)  # fmt: skip


def einsums() -> Table:
    """Expressions with their result's shape, their FLOPs, and what PyTorch's counter says."""
    rows = []
    for line in _EINSUMS:
        operands = [part.split() for part in line.split("->")[0].split(",")]
        tensors = [torch.zeros([EINSUM_SIZES[name] for name in part]) for part in operands]
        shape = str(list(einsum(*tensors, line).shape))
        rows.append((line, shape, flops.einsum_flops(line, EINSUM_SIZES), counted(einsum, *tensors, line)))
    caption = ", ".join(f"{name} = {size}" for name, size in EINSUM_SIZES.items())
    return style.table({"einsum": "", "result": "", "FLOPs": "", "PyTorch's counter": ""}, rows, caption=caption)


# ---- backward --------------------------------------------------------------------------------------------------------


def three_products() -> Picture:
    """A product and the two of its backward pass."""
    rows = (
        ("forward", "y = x W", "[B, in] x [in, out]", style.READS),
        ("backward", "dx = dy Wᵀ", "[B, out] x [out, in]", style.WRITES),
        ("", "dW = xᵀ dy", "[in, B] x [B, out]", style.WRITES),
    )
    with diagram.canvas(17, 4.2) as ax:
        for i, (when, what, shapes, colour) in enumerate(rows):
            y = 0.3 + 1.3 * i
            diagram.text(ax, 0.3, y + 0.5, when, align="left", bold=True)
            diagram.box(ax, 3, y, 4.2, 1, what, colour, bold=True)
            diagram.text(ax, 7.6, y + 0.5, shapes, align="left")
            diagram.text(ax, 13, y + 0.5, "2 x B x in x out FLOPs", align="left")
    return diagram.picture(
        ax, alt="A linear layer: the forward product y = x W, and in the backward pass dx = dy times W transposed and dW "
        "= x transposed times dy. Each takes 2 x B x in x out FLOPs.",
    )  # fmt: skip


def backward_products(samples: int, d0: int, d1: int, d2: int) -> Table:
    """The products of two linear layers and their backward pass, x being data."""
    rows: list[tuple] = [("forward, W1", samples, d1, d0), ("forward, W2", samples, d2, d1)]
    rows += [("gradient of W2", d1, d2, samples), ("gradient of h = x W1", samples, d1, d2)]
    rows += [("gradient of W1", d0, d1, samples)]
    rows = [(*row, flops.matmul_flops(*row[1:])) for row in rows]
    rows.append(("gradient of x, which is not needed", "", "", "", 0))
    return style.table(dict.fromkeys(("product", "M", "N", "K", "FLOPs"), ""), rows)


# ---- a layer and a model ---------------------------------------------------------------------------------------------


def gpt_step(
    layers: int, d_model: int, d_ff: int, vocab: int, positions: int, tied: bool, B: int, T: int, heads: int = 4,
    device: str = "meta",
) -> None:  # fmt: skip
    """A training step of the smallest GPT that has everything: forward and backward, no norms and no biases."""

    def weight(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device, requires_grad=True)

    table = weight(vocab, d_model)
    head = table if tied else weight(vocab, d_model)
    x = F.embedding(torch.zeros(B, T, dtype=torch.int64, device=device), table)
    x = x + weight(positions, d_model)[:T] if positions else x
    for _ in range(layers):
        parts = (x @ weight(d_model, d_model) for _ in "qkv")
        q, k, v = (rearrange(part, "b t (h d) -> b h t d", h=heads) for part in parts)
        y = torch.softmax(einsum(q, k, "b h t d, b h s d -> b h t s"), -1) @ v
        x = x + rearrange(y, "b h t d -> b t (h d)") @ weight(d_model, d_model)
        x = x + F.gelu(x @ weight(d_model, d_ff)) @ weight(d_ff, d_model)
    (x @ head.T).sum().backward()


_TINY = models.Config("tiny", 1000, hidden=64, layers=2, heads=4, positions=64, max_context=64)
_MODELS = ("gpt2", "gpt2-xl", "llama3-8b", "llama3-405b", "mixtral-8x7b", "deepseek-v3")


@cache
def model_counts() -> Table:
    """A step of real models: the exact count, PyTorch's where the model is plain enough, and the rule of 6."""
    rows = []
    for c in (_TINY, *map(models.preset, _MODELS)):
        T, n, seen = min(c.max_context, 8192), models.parameters(c), None
        if c.positions:  # the plan of gpt_step; tiny really runs, the others have shapes only
            sizes = c.layers, c.hidden, c.intermediate, c.vocab_size, c.positions, c.tied_embeddings
            seen = counted(gpt_step, *sizes, 1, T, c.heads, "cpu" if c is _TINY else "meta")
        exact = flops.step_flops(c, 1, T, causal=False).model
        billions = [count / 1e9 for count in (n.total, n.active, flops.matmul_parameters(c))]
        rows.append((c.name, T, seen and seen / 1e12, exact / 1e12, *billions, 6 * n.total * T / exact))
    columns = {"a step of": "", "T": "", "PyTorch": "TFLOP", "computed": "TFLOP", "N": "10^9", "active": "10^9"}
    columns |= {"multiply": "10^9", "6 N T / computed": ""}
    return style.table(columns, rows, caption="one sequence of T tokens, without a mask")


def what_the_models_say() -> Markdown:
    table = model_counts().rows
    ratio = {row[0]: row[-1] for row in table}
    dense = [row[-1] for row in table if row[4] == row[5]]  # all parameters are active
    agree = sum(row[2] is not None for row in table)
    return Markdown(
        f"**What you saw.** PyTorch's counter and the formulas agree to the last FLOP for the {agree} models that it "
        f"counted. The rule of 6 is off in both directions. For the models without experts it is {1 - max(dense):.0%} to "
        f"{1 - min(dense):.0%} too low, because attention's own two products have no parameters. For mixtures of experts "
        f"it gives {ratio['mixtral-8x7b']:.1f} and {ratio['deepseek-v3']:.1f} times the exact count, because N counts all "
        f"experts and a token meets only a few. With the active parameters the rule is usable again. The column *multiply* holds "
        f"the parameters that take part in products, without the tables that are only looked up. With these as N, 6 N T is "
        f"exact except for attention."
    )


def _layer_operations(causal: bool = True) -> dict[str, int]:
    """FLOPs of the products of one layer of Llama 3 8B, forward."""
    every = flops.forward_flops(LLAMA, BATCH, TOKENS, causal=causal, logits="none").operations
    return {name: count // LLAMA.layers for name, count in every.items()}


def layer() -> Table:
    """The products of one layer of Llama 3 8B: FLOPs, and the least time at an H200's dense peak."""
    rows = []
    for name, count in _layer_operations().items():
        rows.append((name, count / 1e9, 3 * count / 1e9, 3 * count / H200.peak("bf16") * 1e3))
    total = [sum(row[i] for row in rows) for i in (1, 2, 3)]
    columns = {"one layer of Llama 3 8B": "", "forward": "GFLOP", "with backward": "GFLOP", "least time": "ms"}
    caption = f"computed; {THESE}, causal; time at the dense bf16 peak of an H200"
    formats = {"forward": ",.0f", "with backward": ",.0f", "least time": ".2f"}
    return style.table(columns, [*rows, ("all", *total)], caption=caption, formats=formats)


def what_the_layer_says() -> Markdown:
    parts = _layer_operations()
    total = sum(parts.values())
    attention = parts["attention scores"] + parts["attention values"]
    pencil = 2 * layer_parameters() * BATCH * TOKENS
    return Markdown(
        f"**The layer's budget, arithmetic.** One layer of Llama 3 8B computes **{total / 1e12:.2f} TFLOP** forward for "
        f"{THESE}, and three times that in a training step. The MLP takes {parts['mlp'] / total:.0%} of it, the "
        f"projections {(total - attention - parts['mlp']) / total:.0%}, and attention's own two products "
        f"{attention / total:.0%}. The rule 2 N D gives {pencil / 1e12:.2f} TFLOP: it misses attention's products."
    )


# ---- attention's square ----------------------------------------------------------------------------------------------

_CURVES = {
    "GPT-2": ("gpt2", style.PEER),
    "Llama 3 8B": ("llama3-8b", style.COMPUTE),
    "405B": ("llama3-405b", style.READS),
}


def _half(name: str) -> int:
    """The context length at which attention's products take half of a forward pass."""
    return bisect_left(range(1, 10**7), 0.5, key=lambda T: flops.attention_share(name, T)) + 1


def quadratic_reveal() -> Reveal:
    found = {shown: _half(name) for shown, (name, _) in _CURVES.items() if shown != "405B"}
    return reveal("quadratic", found, how="computed", also=[_why_not_twelve()])


def _why_not_twelve() -> str:
    gpt, llama = models.preset("gpt2"), LLAMA
    per = {c.name: flops.matmul_parameters(c) / c.layers / c.hidden**2 for c in (gpt, llama)}
    return (
        f"The estimate of 12 h gives {12 * gpt.hidden:,} and {12 * llama.hidden:,} tokens. The true numbers are larger, "
        f"because the head multiplies as well. GPT-2's layer has 12 h² weights, but its head has "
        f"{gpt.vocab_size:,} x h more; shared out over {gpt.layers} layers that makes {per['gpt2']:.1f} h² per layer, so "
        f"half is reached at {per['gpt2']:.1f} h. Llama's layer has 13 h², with its share of the head "
        f"{per['llama3-8b']:.1f} h²."
    )


def quadratic() -> Picture:
    lengths = [round(2 ** (k / 4)) for k in range(36, 81)]
    halves = {shown: _half(name) for shown, (name, _) in _CURVES.items()}
    with style.use():
        fig, ax = style.figure()
        for shown, (name, colour) in _CURVES.items():
            half = halves[shown]
            ax.plot(lengths, [100 * flops.attention_share(name, T) for T in lengths], color=colour)
            ax.plot([half, half], [0, 50], color=style.BOUND, ls="--", lw=1)
            style.label(ax, half, 2, f"{half:,}", dx=4)
            style.label(ax, half, 50, shown, dx=-8, dy=4)
        style.axes(ax, x="context length (tokens)", y="attention's products (%)", log="x", grid="y")
    ends = ", ".join(f"{name} {half:,}" for name, half in halves.items())
    return style.picture(
        fig, alt=f"Share of attention's products in a forward pass, by context length. One half at: {ends}."
    )


# ---- the detective ---------------------------------------------------------------------------------------------------

_BASE = {"layers": 2, "d_model": 128, "d_ff": 512, "vocab": 5000, "positions": 0, "tied": True, "B": 2, "T": 256}
_CHANGES = (
    {}, {"layers": 4}, {"T": 512}, {"d_ff": 1024}, {"positions": 4096}, {"tied": False}, {"tied": False, "vocab": 10_000},
)  # fmt: skip


def evidence(step_flops: Callable[..., int]) -> Table:
    """A counting function beside PyTorch's counter, on models that differ in one thing each."""
    rows = []
    for change in _CHANGES:
        sizes, what = _BASE | change, ", ".join(f"{name} = {value}" for name, value in change.items()) or "as it is"
        real = counted(lambda s=sizes: gpt_step(**s))
        try:
            said = step_flops(**sizes)
            rows.append((what, real, said, said - real))
        except Exception as error:
            rows.append((what, real, type(error).__name__, ""))
    columns = {"model": "", "PyTorch's counter": "", "step_flops": "", "excess": ""}
    return style.table(columns, rows, caption=", ".join(f"{name} = {value}" for name, value in _BASE.items()))


# ---- how much of the GPU ---------------------------------------------------------------------------------------------

# Of Llama 3 405B: TFLOP/s per GPU and MFU by table 4 of https://arxiv.org/abs/2407.21783, GPU-hours by the model's page.
_RUNS = {"8,192 GPUs": (430, 43), "16,384 GPUs": (400, 41), "16,384 GPUs, T = 131,072": (380, 38)}
_HOURS, _TRAINED_ON = 30.84e6, 15.6e12


def _work_405b() -> float:
    """FLOPs of the whole training of Llama 3 405B."""
    return flops.step_flops("llama3-405b", 1, 8192).model / 8192 * _TRAINED_ON


def _scientific(number: float) -> str:
    power = math.floor(math.log10(number))
    return f"{number / 10**power:.1f} x 10^{power}"


def promise() -> Markdown:
    """The result at the head of the notebook."""
    rate, hours = _RUNS["16,384 GPUs"][0], _work_405b() / (_RUNS["16,384 GPUs"][0] * 1e12) / 3600
    return Markdown(
        f"One result in advance: the makers of Llama 3 405B report {_HOURS / 1e6:.1f} million H100 hours of training. "
        f"From the model's shapes, its {_TRAINED_ON / 1e12:.1f} trillion tokens and the {rate} TFLOP/s per GPU that they "
        f"report, the formulas of this notebook give **{hours / 1e6:.1f} million** (computed). The formulas "
        f"leave out failures and restarts, which take hours as well."
    )


def shares_of_peak() -> Picture:
    """From the headline of the data sheet to the useful work of Llama 3 405B's training, per GPU."""
    dense, reached = H100.peak("bf16") / 1e12, _RUNS["16,384 GPUs"][0]
    rows = (
        ("headline, with sparsity", 2 * dense, style.WASTE), ("dense peak", dense, style.BOUND),
        ("useful work, reported", reached, style.COMPUTE),
    )  # fmt: skip
    with style.use():
        fig, ax = style.figure(height=2.2)
        for i, (_, rate, colour) in enumerate(rows):
            ax.barh(i, rate, 0.62, color=colour)
            style.label(ax, rate, i, f"{rate:,.0f}", dx=6)
        ax.set_yticks(range(len(rows)), [row[0] for row in rows])
        ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, 2.2 * dense))
        style.axes(ax, x="H100, bf16 (TFLOP/s)", whole="x")
    return style.picture(
        fig, alt=f"An H100 in bf16: {2 * dense:,.0f} TFLOP/s on the data sheet with sparsity, {dense:,.0f} dense, "
        f"{reached} reached in the training of Llama 3 405B.",
    )  # fmt: skip


def reported_mfu() -> Table:
    """What the makers of Llama 3 405B report, and what each peak makes of it."""
    peak, hours = H100.peak("bf16") / 1e12, _work_405b() / (_HOURS * 3600) / 1e12
    runs: Mapping[str, tuple] = _RUNS | {"all H100 hours of the run": (hours, None)}
    rows = [(name, rate, mfu, 100 * rate / peak, 50 * rate / peak) for name, (rate, mfu) in runs.items()]
    columns = {"Llama 3 405B": "", "reached": "TFLOP/s per GPU", "MFU, reported": "%", "of the dense peak": "%"}
    columns |= {"of the headline": "%"}
    caption = f"H100, bf16: {peak} TFLOP/s dense; the data sheet's headline, with sparsity: {2 * peak:,.0f}"
    return style.table(columns, rows, caption=caption, formats=dict.fromkeys([*columns][1:], ".0f"))


def what_mfu_says() -> Markdown:
    rows = {row[0]: row for row in reported_mfu().rows}
    first = rows["16,384 GPUs"]
    return Markdown(
        f"**What you saw.** The makers divided by the dense peak: {first[1]} of {H100.peak('bf16') / 1e12:.0f} TFLOP/s "
        f"are {first[3]:.0f}%, about the {first[2]}% that they report. With the headline the same run would have an MFU "
        f"of {first[4]:.0f}%. And a plan that takes its days from the headline would be finished in half the time, on "
        f"paper only. The last row divides the work of the whole training ({_scientific(_work_405b())} FLOPs, computed) "
        f"by all hours that the makers report: {rows['all H100 hours of the run'][3]:.0f}%. That is less than in any of the "
        f"three phases, because an hour in which a GPU waits, for instance for a restart, is an hour too."
    )


_GAINS = {
    "number formats": (16, "fp32, then fp16 and bf16, then 8 bits: a narrow multiplier takes much less of the chip"),
    "instructions": (12.5, "an instruction does more: DP4A four products, HMMA and IMMA a small matrix product"),
    "process": (2.5, "smaller transistors, from 28 nm to 5 nm"),
    "sparsity": (2, "two in four elements are zero and are skipped"),
}


def thousand() -> Table:
    """Where NVIDIA's factor of 1,000 in ten years comes from: https://spectrum.ieee.org/nvidia-gpu."""
    rows = [(name, gain, what) for name, (gain, what) in _GAINS.items()]
    together = prod(gain for gain, _ in _GAINS.values())
    rows += [("all of it", together, ""), ("all of it, dense", together / _GAINS["sparsity"][0], "")]
    caption = "reported by NVIDIA's chief scientist, Bill Dally, in 2023: inference on one GPU in ten years"
    return style.table(
        {"gain from": "", "times": "", "what changed": ""}, rows, caption=caption, formats={"times": ",g"}
    )


# ---- a training run --------------------------------------------------------------------------------------------------

RUN = {"gpu": "h100", "gpus": 1024, "mfu": 0.5}


def days_reveal() -> Reveal:
    plan, headline = (
        training.training_cost(70e9, 15e12, **RUN),
        training.training_cost(70e9, 15e12, **RUN, sparse_peak=True),
    )
    return reveal("days", {"days": plan.days, "days promised by the headline": headline.days}, how="computed")


def days() -> Table:
    """70 B parameters and 15 T tokens on 1,024 H100, and what the rule of 6 leaves out."""
    c, D = models.preset("llama3-70b"), 15 * 10**12
    n, T = models.parameters(c).total, 8192
    plan, full = flops.step_flops(c, 1, T), flops.step_flops(c, 1, T, recompute="full")
    rows = [
        ("N = 70 B, headline rate", training.training_cost(70e9, D, **RUN, sparse_peak=True)),
        ("N = 70 B, dense rate", training.training_cost(70e9, D, **RUN)),
        (f"Llama 3 70B, N = {n / 1e9:.2f} B", training.training_cost(n, D, **RUN)),
        (f"all its products, T = {T:,}", training.training_cost(n, D, **RUN, flops=plan.model * D // T)),
        ("all that runs with full recomputation", training.training_cost(n, D, **RUN, flops=full.hardware * D // T)),
    ]
    rows = [(what, cost.flops / 1e24, cost.gpu_hours / 1e6, cost.days) for what, cost in rows]
    columns = {"1,024 H100, half of the peak": "", "work": "10^24 FLOPs", "H100 hours": "millions", "takes": "days"}
    return style.table(columns, rows, caption="computed")


def what_the_days_say() -> Markdown:
    takes = [row[-1] for row in days().rows]
    return Markdown(
        f"**What you saw.** The rule of 6 gives {takes[1]:.0f} days. The headline rate promises half of that, "
        f"{takes[0]:.0f}, and no training with dense matrices will keep the promise. Attention's products add {takes[3] - takes[2]:.0f} "
        f"days for sequences of 8,192 tokens. The last row is a run in which every layer is recomputed and the GPUs "
        f"*execute* half of their peak: it takes {takes[4]:.0f} days, {takes[4] / takes[3] - 1:.0%} more than its useful "
        f"work would. A whole second forward pass would add a third. It is less, because neither the logits nor the last "
        f"product of each layer is computed again: no gradient needs their results."
    )


# ---- how large, how many tokens --------------------------------------------------------------------------------------

# (parameters, tokens) as the makers report them: https://arxiv.org/abs/2005.14165, 2112.11446, 2203.15556, 2407.21783.
_TRAINED = {
    "GPT-3": (175e9, 300e9), "Gopher": (280e9, 300e9), "Chinchilla": (70e9, 1.4e12), "Llama 3 8B": (8.03e9, 15e12),
    "Llama 3 70B": (70.6e9, 15e12), "Llama 3 405B": (405.9e9, 15.6e12),
}  # fmt: skip


def trained() -> Picture:
    """Models by parameters and tokens, with lines of equal FLOPs and the line of 20 tokens per parameter."""
    with style.use():
        fig, ax = style.figure(height=4.2)
        sizes = [2e9, 1e12]
        for power in (23, 24, 25):
            ax.plot(sizes, [10**power / 6 / n for n in sizes], color=style.NEUTRAL, ls=":", lw=1.5)
            n = min(sizes[1], 10**power / 6 / 7e10)  # where the line leaves the picture
            style.label(
                ax, n, 10**power / 6 / n, f"$10^{{{power}}}$ FLOPs", dx=4, dy=4 if n < sizes[1] else 0, fontsize=9
            )
        ax.plot(sizes, [training.CHINCHILLA * n for n in sizes], color=style.BOUND, ls="--")
        style.label(ax, 5e9, training.CHINCHILLA * 5e9, "20 tokens per parameter", dx=10, dy=-2, fontsize=9)
        for name, (n, tokens) in _TRAINED.items():
            ax.plot(n, tokens, "o", color=style.COMPUTE)
            style.label(ax, n, tokens, name, dx=8 if name == "Gopher" else -8, dy=2)
        ax.set_xlim(*sizes)
        ax.set_ylim(5e10, 1e14)
        style.axes(ax, x="parameters", y="tokens", log="xy")
    points = ", ".join(f"{name} {n / 1e9:.0f} B and {tokens / 1e12:.1f} T" for name, (n, tokens) in _TRAINED.items())
    return style.picture(
        fig, alt=f"Models by parameters and tokens (reported): {points}; a line at 20 tokens per parameter."
    )


def chinchilla_reveal() -> Reveal:
    n = training.chinchilla_parameters(10**24)
    both = {"parameters": n, "tokens": training.chinchilla_tokens(n)}
    return reveal("chinchilla", {name: float(f"{count:.2e}") for name, count in both.items()}, how="computed")


def what_chinchilla_says() -> Markdown:
    each = {name: tokens / n for name, (n, tokens) in _TRAINED.items()}
    budget = 6 * _TRAINED["Llama 3 8B"][0] * _TRAINED["Llama 3 8B"][1]
    best = training.chinchilla_parameters(budget)
    return Markdown(
        f"**What you saw.** GPT-3 was trained on {each['GPT-3']:.1f} tokens per parameter and Gopher on "
        f"{each['Gopher']:.1f}: both lie far below the line. Chinchilla spent about Gopher's FLOPs on a model a quarter "
        f"as large, on four times the tokens, and was better. Llama 3 8B lies far above the line, at "
        f"{each['Llama 3 8B']:,.0f} tokens per parameter. Its {_scientific(budget)} FLOPs would have been compute-optimal "
        f"for about {best / 1e9:.0f} billion parameters. Its makers wanted the best *small* model, because a small model "
        f"is cheap each time it answers."
    )


# ---- the schedule ----------------------------------------------------------------------------------------------------

_STEP_TOKENS = 15 * 10**6  # tokens per step
_FINAL = 0.1
_WARMUP = 8000


def _plan(trillions: int) -> training.Schedule:
    return training.Schedule(trillions * 10**12 // _STEP_TOKENS, _WARMUP, final=_FINAL)


def warmup() -> Picture:
    """The first steps of a run: the rate rises in a line."""
    plan = _plan(15)
    steps = range(0, 3 * _WARMUP, 100)
    with style.use():
        fig, ax = style.figure(height=2.6)
        ax.plot(steps, [plan.rate(s) for s in steps], color=style.COMPUTE)
        ax.axvline(_WARMUP, color=style.BOUND, ls="--", lw=1)
        style.label(ax, _WARMUP, 0.25, f"warm-up ends: step {_WARMUP:,}", dx=8)
        style.axes(ax, x="step", y="rate (share of peak)", grid="y", whole="x")
        ax.set_ylim(0, 1.1)
    return style.picture(
        fig, alt=f"The learning rate rises in a line to its peak at step {_WARMUP:,}, then begins to fall slowly."
    )


def schedule_reveal() -> Reveal:
    plan = _plan(15)
    return reveal("schedule", {"below half of the peak": 100 * plan.share_below(0.5, samples=10_000)}, how="computed")


def _parting() -> float:
    """Trillions of tokens after which the cosines for 15 and for 18 trillion are 5% apart."""
    short, long = _plan(15), _plan(18)
    step = bisect_left(range(short.steps), 0.05, key=lambda s: 1 - short.rate(s) / long.rate(s))
    return _STEP_TOKENS * step / 1e12


def schedules() -> Picture:
    """The cosines of a run planned for 15 and for 18 trillion tokens."""
    apart = _parting()
    with style.use():
        fig, ax = style.figure(height=3)
        for trillions, colour, dx, dy in ((15, style.YOURS, -8, -4), (18, style.PEER, 8, 4)):
            plan = _plan(trillions)
            seen = range(0, plan.steps + 1, 2000)
            ax.plot([_STEP_TOKENS * s / 1e12 for s in seen], [plan.rate(s) for s in seen], color=colour)
            style.label(ax, 0.6 * trillions, plan.rate(plan.steps * 3 // 5), f"for {trillions} T", dx=dx, dy=dy)
        ax.axvline(apart, color=style.BOUND, ls="--")
        style.label(ax, apart, 0.15, f"5% apart from {apart:.1f} T on", dx=8)
        style.axes(ax, x="tokens (trillions)", y="rate (share of peak)")
    return style.picture(fig, alt=f"Cosines for 15 and for 18 T tokens, 5% apart from {apart:.1f} T on.")


def bands() -> Table:
    """Tokens and days of the run by the height of the learning rate."""
    plan, takes = _plan(15), training.training_cost(70e9, 15e12, **RUN).days
    rates = 1.0, 0.9, 0.5, 0.2, _FINAL
    below = 1.0, *(plan.share_below(rate, samples=10_000) for rate in rates[1:-1]), 0.0
    rows = []
    for high, low, p, q in zip(rates, rates[1:], below, below[1:], strict=False):
        rows.append((f"{100 * high:.0f} to {100 * low:.0f}%", 100 * (p - q), takes * (p - q)))
    columns = {"rate, of its peak": "", "tokens": "%", "takes": "days"}
    return style.table(columns, rows, formats={"takes": ".1f", "tokens": ".0f"}, caption="computed; 15 T tokens")


def going_on() -> Table:
    """Ways to make 18 trillion tokens of a run that was planned for 15."""
    apart, takes = _parting(), training.training_cost(70e9, 15e12, **RUN).days
    ways = {"start again, planned for 18 T": 0.0, "go back to where both cosines are 5% apart": apart}
    ways["constant rate with a decay in the last fifth: go back to before the decay"] = 0.8 * 15
    ways["go on at a tenth of the peak"] = 15.0
    rows = [(what, 18 - at, 15 - at, takes * (18 - at) / 15) for what, at in ways.items()]
    columns = {"how to make 18 T of 15 T": "", "to train": "T", "a second time": "T", "takes": "days"}
    return style.table(columns, rows, formats=dict.fromkeys([*columns][1:], ".1f"), caption="computed")


def what_the_schedule_says() -> Markdown:
    rows = going_on().rows
    return Markdown(
        f"**What you saw.** {_plan(15).share_below(0.5, samples=10_000):.1%} of the tokens, and of the money, are spent "
        f"below half of the peak. That is not waste: while the rate falls, the weights settle, and the loss falls with it. But "
        f"it makes a finished run hard to continue. The 3 T further tokens would take {rows[3][3]:.0f} days at a tenth of "
        f"the peak rate, where they teach little. To train them at a useful rate you must go back to where the two "
        f"cosines part, after {_parting():.1f} T tokens, and train {rows[1][2]:.1f} T a second time. A schedule that "
        f"keeps its rate constant and falls only at the end loses {rows[2][2]:.0f} T instead. This is why many recent "
        f"runs use one."
    )


# ---- the roofline ----------------------------------------------------------------------------------------------------


def roof() -> Picture:
    """The shape of a roofline, without numbers."""
    with style.use():
        fig, ax = style.figure(height=3.4)
        ax.plot([0, 5], [0, 5], color=style.READS, lw=3)
        ax.plot([5, 10], [5, 5], color=style.COMPUTE, lw=3)
        ax.plot([5, 5], [0, 5], color=style.BOUND, ls="--", lw=1)
        style.label(ax, 0.2, 4.3, "memory-bound:\nbytes / bandwidth decides", dx=0, color=style.READS)
        style.label(ax, 5.1, 5, "compute-bound: FLOPs / peak decides", dx=0, dy=6, color=style.COMPUTE)
        style.label(ax, 5, 0.6, "ridge: peak / bandwidth", dx=6)
        ax.set(xlim=(0, 10), ylim=(0, 6.3), xticks=[], yticks=[])
        style.axes(ax, x="intensity (FLOPs per byte, log scale)", y="speed (FLOP/s, log scale)")
    return style.picture(
        fig, alt="A roofline. Up to the ridge the speed that can be reached grows with the intensity: memory decides. "
        "From the ridge on it is flat: the peak decides.",
    )  # fmt: skip


def ridge_reveal() -> Reveal:
    relu = roofline.elementwise_point("ReLU", 2**20, "fp32").intensity
    return reveal("ridge", {"ReLU in fp32": relu, "ridge of an H100": H100.ridge("bf16")}, how="computed")


def ridges() -> Table:
    """Dense peaks, bandwidth and ridge of the course's GPUs."""
    rows = []
    for g in hardware.GPUS:
        dtype = "bf16" if "bf16" in g.peak_flops else "fp16"
        lanes, tensor = g.sms * g.fp32_lanes_per_sm * 2 * g.boost_mhz * 1e6, g.peak(dtype)
        rates = [rate / 1e12 for rate in (lanes, g.peak("fp32"), tensor)]
        rows.append((g.name, *rates, g.hbm_gbps, g.ridge("fp32"), g.ridge(dtype)))
    columns = {"dense peaks": "", "lanes x 2 x clock": "TFLOP/s", "fp32": "TFLOP/s", "16 bits": "TFLOP/s"}
    columns |= {"memory": "GB/s", "ridge, fp32": "", "ridge, 16 bits": ""}
    formats = dict.fromkeys([*columns][1:4], ",.1f") | dict.fromkeys([*columns][4:], ",.0f")
    caption = "from data sheets; 16 bits: bf16 on tensor cores (T4: fp16); ridges in FLOPs per byte (computed)"
    return style.table(columns, rows, caption=caption, formats=formats)


def what_the_ridges_say() -> Markdown:
    old, new = hardware.gpu("a100-40gb"), hardware.gpu("b200")
    grown = new.peak("bf16") / old.peak("bf16"), new.hbm_gbps / old.hbm_gbps
    ridge = {g.name: g.ridge("bf16") for g in (old, hardware.gpu("a100-80gb"), H100, H200, new)}
    course = ", ".join(f"{name} {value:,.0f}" for name, value in ridge.items())
    relu = roofline.elementwise_point("ReLU", 2**20, "fp32").intensity
    return Markdown(
        f"**What you saw.** ReLU has {relu:g} FLOPs per byte, and the ridge of an H100 is {H100.ridge('bf16'):.0f}: only "
        f"memory decides. The ridge does not move in one direction: {course}. A new generation brings faster tensor "
        f"cores, which raises it, and sometimes the same chip gets faster memory, which lowers it. From the {old.name} to "
        f"the {new.name}, tensor cores became {grown[0]:.1f} times as fast and memory {grown[1]:.1f} times.\n\nTwo "
        f"columns need a word. The ordinary *lanes* are the units that compute single numbers; each does one multiply-add "
        f"per clock cycle, and the first column multiplies that out. It agrees with the fp32 peak of the data sheets. The "
        f"ridge in fp32 is low because these lanes are so much slower than tensor cores. All peaks and bandwidths are the "
        f"data sheets' here; notebook 04 measures how much of them a copy and a product reach."
    )


_ROWS, _D, _FF, _VOCAB = 8192, 4096, 14336, 128256  # tokens, and the widths of Llama 3 8B


def points() -> list[roofline.Point]:
    """Operations of a Llama layer, of its loss and of its optimizer, as points under a roof."""
    n, d, ff = _ROWS, _D, _FF
    point, each = roofline.elementwise_point, {"dtype": "bf16"}
    return [
        point("ReLU in fp32", n * ff, "fp32"),
        point("ReLU", n * ff, **each),
        point("residual add", n * d, reads=2, **each),
        point("GELU", n * ff, flops=8, **each),
        point("SwiGLU", n * ff, reads=2, flops=6, **each),
        point("RMSNorm", n * d, flops=4, **each),
        point("softmax", 4096 * 4096, flops=5, **each),
        point("RoPE", n * d, flops=3, **each),
        point("cross-entropy", n * _VOCAB, reads=2, flops=8, **each),
        point("AdamW", 8 * 10**9, "fp32", reads=4, writes=3, flops=14),
        *(roofline.matmul_point(f"linear, M = {M:,}", M, ff, d) for M in (n, 64, 1)),
        roofline.attention_point("attention, prefill", 1, 32, 8, n, n, 128, causal=True),
        roofline.attention_point("attention, decode", 1, 32, 8, 1, n, 128),
    ]


def operations() -> Table:
    rows = []
    for p in points():
        dtype = "bf16" if "linear" in p.name or "attention" in p.name else "fp32"  # tensor cores, or ordinary lanes
        us = p.least_us(H100, dtype)
        rows.append(
            (p.name, f"{p.flops:.1e}", f"{p.bytes:.1e}", p.intensity, us, roofline.limit(H100, dtype, p.intensity))
        )
    columns = {"H100": "", "FLOPs": "", "bytes": "", "intensity": "FLOPs per byte", "least time": "µs", "limit": ""}
    return style.table(columns, rows, caption="computed")


def roofline_points() -> list[roofline.Point]:
    """Some of the operations for the widget, and softmax as it was measured on an H200."""
    shown = ("ReLU", "AdamW", "GELU", "attention, decode", "linear, M = 64", "linear, M = 8,192")
    chosen = [p for p in points() if p.name in shown]
    for row in benchmark.rows("softmax", "h200"):
        if (row.provider, row.mode, row.dtype, row.shape) == ("gpukit", "fwd", "bfloat16", (4096, 4096)):
            return [roofline.Point("softmax, measured", row.flops, row.bytes, row.median_ms * 1e3), *chosen]
    return chosen


def _prefill() -> dict[str, float]:
    """Least µs of the operations of a prefill of Llama 3 8B on an H100, 2,048 tokens."""
    return {p.name: p.least_us(H100, "bf16") for p in roofline.model_points(LLAMA, 1, 2048)}


def what_the_hundredth_costs() -> Markdown:
    parts = roofline.model_points(LLAMA, 1, 2048)
    small = [p for p in parts if p.name in ("norms", "activation", "residual adds")]
    time, work = _prefill(), sum(p.flops for p in parts)
    share = sum(time[p.name] for p in small) / sum(time.values())
    return Markdown(
        f"<details><summary>Norms, activations and additions are less than a hundredth of the FLOPs. How much of the time "
        f"do they take?</summary>\n\nIn a prefill of Llama 3 8B with 2,048 tokens on an H100 they compute "
        f"{sum(p.flops for p in small) / work:.2%} of the FLOPs and take {share:.0%} of the time, if every kernel reaches "
        f"its roof and none is fused (computed). All of them lie far left of the ridge. That is why fusing them pays: "
        f"[notebook 08](08_fusion.ipynb).\n</details>"
    )


# ---- prefill and decode ----------------------------------------------------------------------------------------------


def critical_reveal() -> Reveal:
    batches = {w: roofline.critical_batch(H100, "bf16", w) for w in ("bf16", "fp8", "int4")}
    text = ", ".join(f"{batch:.0f} with {name} weights" for name, batch in batches.items())
    also = f"The critical batch of an H100 is {text}, for a model of any size: the number of weights cancels."
    return reveal("critical", {"batch": batches["bf16"]}, how="computed", also=[also])


def decode() -> Table:
    """Llama 3 8B on an H100: a prefill, and decode steps of growing batches."""
    rows = []
    for what, B, T, past in ("prefill", 1, 2048, 0), *(("decode", 4**k, 1, 2048) for k in range(6)):
        parts = roofline.model_points(LLAMA, B, T, past=past)
        us = roofline.least_us(parts, H100, "bf16")
        work, moved = sum(p.flops for p in parts), sum(p.bytes for p in parts)
        held = memory.inference_memory(LLAMA, B, 2048, prefill=T)
        fits = "yes" if held.fits(H100) else "no"
        mfu = 100 * work / us * 1e6 / H100.peak("bf16")
        rows.append((what, B, work / moved, us / 1e3, B * T / us * 1e6, mfu, held.total_bytes / 1e9, fits))
    columns = {"2,048 tokens": "", "batch": "", "intensity": "", "least time": "ms", "speed": "tokens/s"}
    columns |= {"of the peak": "%", "memory": "GB", "fits": ""}
    formats = dict.fromkeys(("intensity", "least time", "of the peak", "memory"), ".1f") | {"speed": ",.0f"}
    caption = "Llama 3 8B on one H100 of 80 GB, bf16, computed; intensity in FLOPs per byte"
    return style.table(columns, rows, caption=caption, formats=formats)


def what_decoding_says() -> Markdown:
    rows = {(row[0], row[1]): row for row in decode().rows}
    one, most = rows["decode", 1], max(row for row in rows.values() if row[0] == "decode" and row[-1] == "yes")
    return Markdown(
        f"**What you saw.** The prefill reaches {rows['prefill', 1][5]:.0f}% of the peak. A decode step of a single "
        f"sequence reaches {one[5]:.1f}%: it takes {one[3]:.1f} ms, the time to read all weights once, and makes one "
        f"token. With {most[1]} sequences the same reading serves {most[1]} tokens, and the speed is "
        f"{most[4] / one[4]:.0f} times as high. Larger batches would gain less and less, since every sequence brings a "
        f"cache of its own. They do not fit on one H100 anyway: the rows marked *no* show what the formula says, not "
        f"what you could run."
    )


def decode_picture() -> Picture:
    sizes = [2**k for k in range(13)]
    with style.use():
        fig, ax = style.figure()
        ends = []
        for past, colour in ((0, style.PEER), (2048, style.READS), (32768, style.WRITES)):
            steps = [roofline.model_points(LLAMA, B, 1, past=past) for B in sizes]
            fetch = [sum(p.bytes for p in parts) / H100.hbm_gbps / 1e6 for parts in steps]
            compute = [sum(p.flops for p in parts) / H100.peak("bf16") * 1e3 for parts in steps]
            ax.plot(sizes, fetch, color=colour)
            ax.plot(sizes, compute, color=colour, ls=":")
            ends.append(((sizes[-1], fetch[-1]), f"read, {past:,} cached"))
            ends.append(((sizes[-1], compute[-1]), f"compute, {past:,} cached"))
        style.axes(ax, x="batch (sequences)", y="decode step (ms)", log="xy")
        style.names(ax, ends, fontsize=9)
    return style.picture(
        fig, alt="Time to read and time to compute in a decode step, by batch. Without a cache the two lines cross; with "
        "2,048 or 32,768 cached tokens reading stays above computing for every batch.",
    )  # fmt: skip


# ---- computed and measured -------------------------------------------------------------------------------------------


def _linear() -> tuple[dict[int, float], dict[int, float]]:
    """(least µs by the roof, measured µs) of a linear layer of Llama 3 8B on an H200, by tokens."""
    took = {row.shape[0]: row.median_ms * 1e3 for row in benchmark.rows("linear", "h200")}
    return {M: roofline.matmul_point("", M, _FF, _D).least_us(H200, "bf16") for M in took}, took


def _flat(took: Mapping[int, float]) -> int:
    """The most tokens that take less than a quarter longer than one."""
    return max(M for M in took if took[M] < 1.25 * took[1])


def flat_reveal() -> Reveal:
    return reveal("flat", {"tokens": _flat(_linear()[1])}, how="measured")


def measured() -> Picture:
    least, took = _linear()
    with style.use():
        fig, ax = style.figure()
        ax.plot(least.keys(), least.values(), color=style.BOUND, ls="--")
        ax.plot(took.keys(), took.values(), color=style.PEER, marker="o")
        ax.axvline(roofline.critical_batch(H200), color=style.BOUND, lw=1, ls=":")
        style.label(ax, 8, took[8], "measured", dx=0, dy=8, ha="center")
        style.label(ax, 1024, least[1024], "the roof", dx=10, dy=-4)
        style.label(ax, roofline.critical_batch(H200), max(took.values()), "critical batch", dx=-6, va="top")
        ax.set_ylim(15, 1.5 * max(took.values()))
        style.axes(ax, x="tokens", y="time (µs)", log="xy")
    return style.picture(
        fig, alt=f"Time of a linear layer by tokens on an H200: {len(took)} sizes measured, and the roof below them."
    )


def what_measuring_says() -> Markdown:
    least, took = _linear()
    share = {M: least[M] / took[M] for M in took}
    best, worst = max(share, key=share.get), min(share, key=share.get)
    return Markdown(
        f"**What you saw.** Up to {_flat(took)} tokens take less than a quarter longer than one token (measured), and the "
        f"roof's corner lies at {roofline.critical_batch(H200):.0f} (computed). So the roof tells correctly from where on "
        f"more tokens cost more time. It does not tell the time itself: at {best:,} tokens the layer comes nearest to the "
        f"roof, with {share[best]:.0%} of it, and at {worst:,} tokens it is furthest away, with {share[worst]:.0%}. "
        f"There, at the corner, reading and computing would both have to run at their full rate at the same time. No GPU "
        f"reaches its data sheet's numbers; notebooks 04 and 12 show what it does reach."
    )


def budget() -> Table:
    """The lines of the layer's budget that are about arithmetic, training and decoding."""
    parts, square = _layer_operations(), _layer_operations(causal=False)
    forward, weights = sum(parts.values()), 2 * layer_parameters()
    one = 2 * layer_parameters()
    rows = [
        (
            "forward, the whole square of scores",
            sum(square.values()) / 1e9,
            sum(square.values()) / H200.peak("bf16") * 1e6,
        ),
        ("forward, only the scores that are used", forward / 1e9, forward / H200.peak("bf16") * 1e6),
        ("forward and backward", 3 * forward / 1e9, 3 * forward / H200.peak("bf16") * 1e6),
        ("decode, one token: reading the weights", one / 1e9, weights / H200.hbm_gbps / 1e3),
    ]
    columns = {"one layer of Llama 3 8B": "", "work": "GFLOP", "least time": "µs"}
    caption = f"computed; forward and backward for {THESE}; an H200 by its data sheet"
    return style.table(columns, rows, caption=caption, formats={"work": ",.1f", "least time": ",.0f"})


def what_the_budget_says() -> Markdown:
    square, used = (sum(_layer_operations(causal).values()) for causal in (False, True))
    return Markdown(
        f"**The line that this notebook improved.** A causal mask hides nearly half of all scores. A kernel that does not "
        f"compute them needs {used / 1e12:.2f} instead of {square / 1e12:.2f} TFLOP for the layer's forward pass, "
        f"{1 - used / square:.0%} less (computed). The times above are the least possible; notebook 04 measures the same "
        f"layer on the same batch."
    )
