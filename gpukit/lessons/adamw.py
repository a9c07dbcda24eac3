"""What notebook 16 shows: what an update moves, how work is shared out, rounding at random, and recorded times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from IPython.display import Markdown
from torch import Tensor

import gpukit
from gpukit.accounting.flops import six_nd
from gpukit.hardware import gpu
from gpukit.kernels import AdamW
from gpukit.lessons import diagram, results
from gpukit.lessons.course_map import course_map as _map
from gpukit.lessons.memory import TOKENS, layer_parameters
from gpukit.reference import adamw
from gpukit.simulator.trace.tracer import Trace
from gpukit.widgets import style
from gpukit.widgets.predict import Reveal, reveal
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.versus import Missing, Versus, versus

GPT2 = next(shape for shape in adamw.OP.bench_shapes if shape[0] == len(adamw.GPT2_SMALL))  # (tensors, weights)
NAMES = {"torch": "line by line", "library": "fused"}
LINES = {  # of PyTorch, each with the arrays of n numbers that it reads and writes
    "p.mul_": (1, 1),
    "m.lerp_": (2, 1),
    "v.mul_": (1, 1),
    "v.addcmul_": (2, 1),
    "v / number": (1, 1),
    "sqrt": (1, 1),
    "+ eps": (1, 1),
    "p.addcdiv_": (3, 1),
}


def course_map() -> Picture:
    return _map("adamw")


# ---- recorded times --------------------------------------------------------------------------------------------------


rows = partial(results.rows, "adamw")
us = partial(results.copy_us, "adamw")


def took(mode: str = "wall") -> dict[tuple[str, tuple[int, ...]], float]:
    """Microseconds of a step in float32, by provider and (tensors, weights)."""
    return {
        (row.provider, row.shape): row.median_ms * 1e3
        for row in rows()
        if (row.op, row.mode, row.dtype) == ("adamw", mode, "float32")
    }


def promise() -> Markdown:
    """The result at the head of the notebook."""
    times = took()
    if not times:
        return Markdown("No run is recorded: `gpukit bench adamw` makes one where there is a GPU.")
    lines, fused, ours = (times[name, GPT2] for name in ("torch", "library", "gpukit"))
    days = results.days(lambda row: row.shape == GPT2 and row.mode == "wall", "adamw")
    return Markdown(
        f"GPT-2 small has {GPT2[1]:,} weights in {GPT2[0]} tensors. One update of all of them, written as the formula "
        "reads, "
        f"takes **{lines / 1e3:.1f} ms** on an H200. PyTorch's fastest AdamW takes **{fused / 1e3:.1f} ms**. One kernel "
        "that "
        f"updates every tensor in a single launch takes **{ours / 1e3:.2f} ms** (measured, {days}), and that is "
        "nearly the time in which the memory can deliver the numbers. You will write this kernel."
    )


# ---- the algorithm ---------------------------------------------------------------------------------------------------


def one_step() -> Picture:
    """How the gradient of a weight becomes a step."""
    with diagram.canvas(18, 5.6) as ax:
        diagram.box(ax, 0, 2.1, 2.4, 1.2, "gradient g", style.READS)
        diagram.box(ax, 4.6, 0.4, 3.6, 1.2, "m: average of g", style.WRITES)
        diagram.box(ax, 4.6, 3.8, 3.6, 1.2, "v: average of g²", style.WRITES)
        diagram.arrow(ax, (2.4, 2.4), (4.6, 1.1), "")
        diagram.arrow(ax, (2.4, 3.0), (4.6, 4.3), "")
        diagram.text(ax, 3.0, 1.25, "direction", size=9)
        diagram.text(ax, 3.0, 4.25, "size", size=9)
        diagram.box(ax, 10.4, 2.1, 3.2, 1.2, "m / √v", style.COMPUTE)
        diagram.arrow(ax, (8.2, 1.1), (10.4, 2.4))
        diagram.arrow(ax, (8.2, 4.3), (10.4, 3.0))
        diagram.box(ax, 15.4, 2.1, 2.6, 1.2, "weight p", style.WRITES)
        diagram.arrow(ax, (13.6, 2.7), (15.4, 2.7), "x -η")
        diagram.text(ax, 6.4, 2.7, "kept from step to step", size=9, color=style.WRITES)
    return diagram.picture(
        ax, alt="The gradient of a weight feeds two averages that are kept from step to step: m of the gradient and v of "
            "its "
        "square. The weight moves by minus the learning rate times m divided by the root of v.",
    )  # fmt: skip


def step_lengths(averages: Mapping[str, tuple[float, float]]) -> Table:
    """(m, v) after many steps, by the kind of gradient, and the step that they lead to."""
    found = [(name, m, math.sqrt(v), m / math.sqrt(v)) for name, (m, v) in averages.items()]
    columns = {"gradients": "", "m": "", "root of v": "", "length of a step": "learning rates"}
    formats = {"m": ",.5g", "root of v": ",.5g", "length of a step": ".3f"}
    return style.table(columns, found, caption="after 10,000 steps, computed", formats=formats)


def step_length(t: int) -> float:
    """Of step t without correction, in learning rates, if all gradients are equal."""
    return (1 - 0.9**t) / math.sqrt(1 - 0.999**t)


def first_steps() -> Picture:
    steps = range(1, 3001)
    longest = max(steps, key=step_length)
    with style.use():
        fig, ax = style.figure(height=2.8)
        ax.plot(steps, [step_length(t) for t in steps], color=style.WASTE)
        ax.axhline(1, color=style.COMPUTE)
        style.label(ax, 1, step_length(1), f"first step: {step_length(1):.2f}", dx=8, dy=-6)
        style.label(
            ax, longest, step_length(longest), f"step {longest}: {step_length(longest):.1f}", dx=0, dy=6, ha="center"
        )
        style.label(ax, 1, 1, "with correction: 1", dx=0, dy=3)
        style.axes(ax, x="step", y="length (learning rates)", log="x")
        ax.set_ylim(0, 1.15 * step_length(longest))
    return style.picture(
        fig, alt=f"Without correction the first step is {step_length(1):.2f} learning rates long, step {longest} is "
        f"{step_length(longest):.1f}, and after some thousand steps the length is 1. With correction it is 1 from the "
        "start.",
    )  # fmt: skip


def decay(left: Mapping[str, Sequence[float]]) -> Table:
    """What two weights that began at 1 have become, by optimizer."""
    caption = f"what is left of 1.0 after 1,000 steps, computed; decay alone would leave {(1 - 1e-4) ** 1000:.3f}"
    columns = {"optimizer": "", "gradients ±0.01": "", "gradients ±10": ""}
    return style.table(
        columns, [(name, *p) for name, p in left.items()], caption=caption, formats=dict.fromkeys(columns, ".3f")
    )


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bytes_reveal(lines: Trace, n: int) -> Reveal:
    """The prediction of the bytes of five lines beside what was counted, each operation in a table."""
    one = adamw.cost((1, n), torch.float32)
    each = [(op.name.removeprefix("aten."), op.read_bytes // n, op.write_bytes // n) for op in lines.torch_ops]
    each.append(("all of them", *(sum(row[i] for row in each) for i in (1, 2))))
    each.append(("one kernel", one.read_bytes // n, one.write_bytes // n))
    columns = {"operation": "", "reads": "bytes per weight", "writes": "bytes per weight"}
    told = (
        "**What you saw.** The five lines are eight operations, and each reads its inputs from memory and writes its "
        "result "
        f"back. Together they move {lines.bytes / n:.0f} bytes per weight. One kernel needs each of p, g, m and v once and "
        f"writes p, m and v once: {one.bytes / n:.0f} bytes. GPT-2's {GPT2[1]:,} weights are "
        f"{lines.bytes / n * GPT2[1] / 1e9:.1f} "
        f"GB line by line and {one.bytes / n * GPT2[1] / 1e9:.1f} GB in one kernel: {us(lines.bytes / n * GPT2[1]) / 1e3:.1f} "
        "and "
        f"{us(one.bytes / n * GPT2[1]) / 1e3:.2f} ms at the rate of a copy (computed). For a GPU, about 14 FLOPs per "
        "weight are next to nothing beside that: this update is memory-bound."
    )
    fields = {"line by line": lines.bytes / n, "one kernel": one.bytes / n}
    return reveal("adamw-bytes", fields, also=[style.table(columns, each, caption="counted"), told])


def trips() -> Picture:
    """The operations of five lines, and one kernel, between memory and the chip."""
    reads, writes = (4 * sum(line[i] for line in LINES.values()) for i in (0, 1))
    with diagram.canvas(19, 7.0) as ax:
        for y, name in ((0.9, "GPU memory"), (4.7, "GPU memory")):
            diagram.box(ax, 0.1, y, 2.2, 1.5, name, style.BOUND, size=9)
        for i, (name, (read, write)) in enumerate(LINES.items()):
            x = 2.6 + 2.05 * i
            diagram.box(ax, x, 0.9, 1.95, 0.9, name, style.PEER, size=8.5)
            diagram.text(ax, x + 1, 2.1, f"{4 * read} in", size=9, color=style.READS, bold=True)
            diagram.text(ax, x + 1, 2.6, f"{4 * write} out", size=9, color=style.WRITES, bold=True)
        diagram.text(ax, 0.1, 0.35, "line by line: eight kernels, bytes per weight", align="left", bold=True)
        diagram.text(ax, 0.1, 3.2, f"together {reads} in and {writes} out", align="left", bold=True)
        diagram.text(ax, 0.1, 4.2, "one kernel", align="left", bold=True)
        diagram.box(ax, 7.0, 4.7, 7.0, 1.5, "m, v and p computed in registers", style.COMPUTE)
        diagram.arrow(ax, (2.3, 5.1), (7.0, 5.1), "p, g, m, v: 16 in", style.READS)
        diagram.arrow(ax, (7.0, 5.8), (2.3, 5.8), "", style.WRITES)
        diagram.text(ax, 4.65, 6.15, "p, m, v: 12 out", size=9, color=style.WRITES)
    return diagram.picture(
        ax, alt=f"Eight operations, each from memory to the chip and back: {reads} bytes in and {writes} out per weight. "
            "One "
        "kernel reads p, g, m and v, 16 bytes, and writes p, m and v, 12 bytes.",
    )  # fmt: skip


def clip_reveal(apart: float, together: float) -> Reveal:
    told = (
        f"**What you saw.** The factor saves {apart - together:.0f} bytes per weight: the 4 that `clip_grad_norm_` reads a "
        "second "
        "time to scale the gradient, and the 4 of the scaled gradient that it writes. Four bytes remain on top of the "
        "update's own 28: each gradient is read once for the norm. The remaining 0.1 bytes are what each program looks up in small "
        "tables. (`foreach=True` is the form that PyTorch uses on a GPU.)"
    )
    fields = {"clip_grad_norm_, then the update": apart, "a factor for the update": together}
    return reveal("adamw-clip", fields, also=[told])


# ---- many tensors ----------------------------------------------------------------------------------------------------


def gpt2_tensors() -> Table:
    """The shapes of GPT-2 small, how many tensors have each, and how many blocks of 1,024 elements one of them is."""
    shapes = sorted(set(adamw.GPT2_SMALL), key=math.prod)
    found = [(str(list(s)), adamw.GPT2_SMALL.count(s), math.prod(s), -(-math.prod(s) // 1024)) for s in shapes]
    columns = {"shape": "", "tensors": "", "weights of one": "", "blocks of 1,024 in one": ""}
    return style.table(columns, found, caption="GPT-2 small, counted")


def launches_reveal(lines: Trace) -> Reveal:
    blocks = [-(-math.prod(s) // 1024) for s in adamw.GPT2_SMALL]
    told = (
        f"**What you saw.** There are eight operations for each of {GPT2[0]} tensors, and each is a launch. Even at 2 µs each, the launches alone take "
        "longer "
        f"than the memory needs for all bytes of the one-kernel update. A grid of {GPT2[0]} tensors times the "
        f"{max(blocks):,} "
        f"blocks of the largest one would start {GPT2[0] * max(blocks):,} programs, of which {sum(blocks):,} have "
        "something "
        f"to do, {sum(blocks) / (GPT2[0] * max(blocks)):.0%}."
    )
    return reveal("adamw-launches", {"launches": GPT2[0] * len(lines.torch_ops)}, also=[told])


def blocks(sizes: Sequence[int] = (300, 40, 500), block: int = 128) -> Picture:
    """Blocks of three tensors, each with the number of its program."""
    program, told = 0, []
    with style.use():
        fig, ax = style.figure(height=2.8)
        for row, size in enumerate(sizes):
            first = program
            for start in range(0, size, block):
                part = min(block, size - start)
                ax.barh(row, part, left=start, color=style.READS, edgecolor="white")
                ax.barh(row, block - part, left=start + part, color=style.WASTE)
                ax.text(start + 20, row, str(program), color="white", va="center", ha="center")
                program += 1
            told.append(f"tensor {row} has the programs {first} to {program - 1}")
        ax.barh(0, 0, color=style.READS, label="elements of the tensor")
        ax.barh(0, 0, color=style.WASTE, label="lanes past its end")
        ax.set_yticks(range(len(sizes)), [f"tensor {i}: {size}" for i, size in enumerate(sizes)])
        ax.invert_yaxis()
        style.axes(ax, x="element of the tensor")
        ax.legend(loc="center right", bbox_to_anchor=(1.0, 0.5))
        ax.set_xlim(0, 1.35 * max(sizes))
    return style.picture(fig, alt=f"Blocks of {block} elements, numbered in one row: {'; '.join(told)}.")


# ---- 16 bits ---------------------------------------------------------------------------------------------------------


def walks(paths: Mapping[str, Sequence[float]]) -> Picture:
    """The mean of many weights after each update, by the way in which they are kept."""
    with style.use():
        fig, ax = style.figure(height=3.0)
        ends = []
        for (name, path), colour in zip(paths.items(), (style.WASTE, style.PEER, style.COMPUTE), strict=True):
            ax.plot(path, color=colour)
            ends.append(((len(path) - 1, path[-1]), f"{name}: {path[-1]:.4f}"))
        style.axes(ax, x="update", y="mean of 512 weights")
        ax.set_ylim(0.9963, 1.0004)
        style.names(ax, ends)
    told = ", ".join(f"{name} {path[-1]:.4f}" for name, path in paths.items())
    return style.picture(fig, alt=f"Weights of 1 after 30 updates of -0.0001: {told}.")


def bf16_gap(x: float) -> tuple[float, float]:
    """The bfloat16 numbers below and above x > 0."""
    bits = torch.tensor(x).view(torch.int32) & ~0xFFFF
    low = bits.view(torch.float32)
    return float(low), float((bits + 0x10000).view(torch.float32))


def rounding_line(x: float = 0.9971) -> Picture:
    """x between two bfloat16 numbers, and how often rounding at random chooses each."""
    low, high = bf16_gap(x)
    up = (x - low) / (high - low)

    def place(value: float) -> float:
        return 2.5 + 13 * (value - low) / (high - low)

    with diagram.canvas(18, 4.2) as ax:
        ax.plot([place(low), place(high)], [2, 2], color=style.INK, lw=2)
        for value, share in ((low, 1 - up), (high, up)):
            ax.plot(place(value), 2, "o", color=style.READS, ms=12)
            diagram.text(ax, place(value), 2.8, f"{value:g}", size=10)
            diagram.text(ax, place(value), 3.4, f"chosen in {share:.0%} of cases", size=9, color=style.READS)
        ax.plot(place(x), 2, "o", color=style.YOURS, ms=10)
        diagram.text(ax, place(x), 1.05, f"x = {x:g}", size=10, color=style.YOURS, bold=True)
        diagram.text(ax, (place(low) + place(x)) / 2, 1.65, f"{up:.0%} of the way", size=9)
    mean = low * (1 - up) + high * up
    return diagram.picture(
        ax, alt=f"{x:g} lies between the bfloat16 numbers {low:g} and {high:g}, at {up:.0%} of the way. Rounding at random "
        f"gives the upper one in {up:.0%} of cases, so the mean of the results is {mean:.4f}.",
    )  # fmt: skip


RECIPES = {
    "float32": (torch.float32, {}),
    "bfloat16, nothing else": (torch.bfloat16, {}),
    "bfloat16, float32 copy": (torch.bfloat16, {"master_weights": True}),
    "bfloat16, at random": (torch.bfloat16, {"stochastic_rounding": True}),
}


def recipe_bytes(n: int = 8192) -> dict[str, tuple[float, float]]:
    """What a step of this course's AdamW moves, and what it holds with the gradients, in bytes per weight, by recipe."""
    found = {}
    for name, (dtype, options) in RECIPES.items():
        p = torch.ones(n, device="cuda" if torch.cuda.is_available() else "cpu", dtype=dtype).requires_grad_()
        p.grad = torch.ones_like(p)
        optimizer = AdamW([p], **options)
        optimizer.step()  # makes the states
        with gpukit.trace() as t:
            optimizer.step()
        found[name] = t.bytes / n, sum(x.nbytes for x in (p, p.grad, *optimizer.state[p].values())) / n
    return found


def recipes_reveal() -> Reveal:
    counted = recipe_bytes()
    found = [(name, moved, held, us(moved * GPT2[1])) for name, (moved, held) in counted.items()]
    columns = {"weights": "", "moves": "bytes per weight", "holds": "bytes per weight", "GPT-2 small": "µs, computed"}
    table = style.table(columns, found, caption="counted", formats=dict.fromkeys(columns, ".0f"))
    copy, chance = (counted[name][0] for name in ("bfloat16, float32 copy", "bfloat16, at random"))
    told = (
        f"**What you saw.** With a float32 copy a step moves {copy:.0f} bytes per weight, as much as with everything in float32. The copy is "
        "read and written in the place of the float32 weight. Reading the gradient takes 2 bytes less. Writing the bfloat16 weight, "
        f"which the model needs, takes 2 bytes more. Rounding at random needs no copy and moves {chance:.0f} bytes. So 16-bit "
        "weights make the forward and the backward pass faster, but they help the update only if there is no copy. The "
        "second row, where m and v are in bfloat16 as well, moves the fewest bytes, but its weights stop learning."
    )
    return reveal("adamw-16", {"float32 copy": copy, "at random": chance}, also=[table, told])


# ---- resuming --------------------------------------------------------------------------------------------------------


def parity(theirs: Tensor, ours: Tensor, both: Tensor) -> Markdown:
    """How far apart weights end that the same gradients have trained."""
    alone, changed = ((each - theirs).abs().max().item() for each in (ours, both))
    return Markdown(
        f"The weights lie between -1 and 1. The largest difference from PyTorch's is **{alone:.0e}** where this course's "
        f"optimizer took all steps, and **{changed:.0e}** where it took over from PyTorch's in the middle (computed here)."
    )


# ---- what it costs ---------------------------------------------------------------------------------------------------


def measured() -> Versus | Missing:
    """Steps back to back with the host's time in them, as in training."""
    return versus("adamw", mode="wall", dtype="float32", names=NAMES)


def what_measuring_says() -> Markdown:
    times = took()
    ours = {shape: time for (name, shape), time in times.items() if name == "gpukit"}
    if not ours:
        return Markdown("No run is recorded yet. With a GPU, `gpukit bench adamw` in a terminal makes one.")
    need = {shape: us(adamw.cost(shape, torch.float32).bytes) for shape in ours}
    large = max(ours, key=lambda shape: need[shape] / ours[shape])
    small = min(ours, key=lambda shape: need[shape] / ours[shape])
    single = sorted(shape for shape in ours if shape[0] == 1)
    compiled = {shape: ours[shape] / times["compile", shape] for shape in single if ("compile", shape) in times}
    gained = {shape: times["library", shape] / ours[shape] for shape in (GPT2, small)}
    return Markdown(
        f"**What you saw.** A single tensor of {large[1]:,} weights runs at {need[large] / ours[large]:.0%} of the rate of "
        "a copy. "
        "Memory is the limit there, and only fewer bytes would be faster. With many tensors the CPU decides: the "
        "bytes of "
        f"{small[0]:,} tensors with {small[1]:,} weights in all take {need[small]:.0f} µs, and the step takes "
        f"{ours[small]:,.0f}, because "
        "the CPU looks at the address of each gradient. One launch for all tensors still gains most where there are many: "
        "it is "
        f"{gained[small]:.1f} times as fast as PyTorch's fused step there, and {gained[GPT2]:.1f} times for GPT-2. For a "
        "single "
        f"tensor `torch.compile` makes the same kind of kernel out of the five lines, and its step is faster than this "
        f"course's at all {len(compiled)} sizes: by {min(compiled.values()) - 1:.0%} at the largest and "
        f"{max(compiled.values()) - 1:.0%} at the smallest, where the CPU's time for a call decides. It was not measured "
        f"with {GPT2[0]} or more tensors, where compiling takes minutes."
    )


def yours() -> Versus | Missing:
    """The times without those between steps, and the learner's adamw_many among them once it passes."""
    shapes = [(1, 1_000_000), (1, 10_000_000), (1, 50_000_000), GPT2]  # a prediction takes seconds for each
    return versus("adamw", mode="fwd", dtype="float32", names=NAMES, shapes=shapes, yours="adamw.many")


# ---- the running story -----------------------------------------------------------------------------------------------


def layer_line() -> Markdown:
    """The line of the layer's budget that this notebook improves."""
    n = layer_parameters()
    lines, one = (us(size * n) / 1e3 for size in (4 * sum(map(sum, LINES.values())), 28))
    products = six_nd(n, TOKENS) / gpu("h200").peak("bf16") * 1e3
    return Markdown(
        f"One layer of Llama 3 8B has {n / 1e6:.0f} million weights. Its update takes **{lines:.1f} ms** line by line and "
        f"**{one:.2f} ms** in one kernel ({4 * sum(map(sum, LINES.values()))} and 28 bytes per weight at the rate of a "
        "copy, "
        f"computed). Forward and backward pass of one sequence of {TOKENS:,} tokens need {products:.1f} ms at the peak of "
        "the "
        f"tensor cores (computed). The update does not depend on the number of tokens: with one sequence per step it is "
        f"{one / (one + products):.0%} of the step, line by line {lines / (lines + products):.0%}, and with sixteen "
        "sequences "
        f"{one / (one + 16 * products):.1%}."
    )
