"""What notebook 09 shows: where exp ends, what five lines move, online softmax as bars, a gradient, and measured times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from IPython.display import Markdown
from torch import Tensor

import gpukit
from gpukit import benchmark
from gpukit.course import CourseError
from gpukit.kernels import _rows_shared
from gpukit.lessons import diagram, layer, results
from gpukit.lessons.course_map import course_map as _map
from gpukit.reference import softmax
from gpukit.simulator.trace.tracer import Trace
from gpukit.testing import error_bound
from gpukit.widgets import style
from gpukit.widgets.access import AccessView, access
from gpukit.widgets.predict import Reveal, reveal
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.versus import Missing, Versus, versus

SHAPE = (4096, 4096)  # of the promise and of the first prediction
LEAST = softmax.cost(SHAPE, torch.bfloat16).bytes  # x read once, y written once
HEADS = 32  # of Llama 3 8B's queries
LONG = 131072  # numbers of the longest rows
LOSS = 128256  # logits of a row in the largest loss


def course_map() -> Picture:
    return _map("softmax")


# ---- recorded times --------------------------------------------------------------------------------------------------


rows = partial(results.rows, "softmax")
copy_gbps = partial(results.copy_gbps, "softmax")
us = partial(results.copy_us, "softmax")


def took(mode: str = "fwd") -> dict[tuple[str, tuple[int, ...]], float]:
    """Microseconds of the forward pass in bfloat16, by provider and shape. `mode` fwd-graph: in a CUDA graph."""
    forward = [row for row in rows() if (row.op, row.mode, row.dtype) == ("softmax", mode, "bfloat16")]
    return {(row.provider, row.shape): row.median_ms * 1e3 for row in forward}


def promise() -> Markdown:
    """The result at the head of the notebook."""
    times = took()
    if not times:
        return Markdown("No run is recorded: `gpukit bench softmax` makes one where there is a GPU.")
    five, library, ours = (times[name, SHAPE] for name in ("torch", "library", "gpukit"))
    days = benchmark.when(row for row in rows() if row.shape == SHAPE and row.mode == "fwd")
    return Markdown(
        f"Softmax of a matrix of 4096 x 4096 numbers in bfloat16, written as five lines of PyTorch, takes **{five:.0f} "
        f"µs** on an H200. `torch.softmax` takes **{library:.0f} µs**. A Triton kernel of six lines, launched with a "
        f"suitable number of warps (groups of 32 threads), takes **{ours:.0f} µs** (all three measured, {days}). You will "
        "write those six lines, and by the end you can say where the microseconds go."
    )


# ---- the maximum -----------------------------------------------------------------------------------------------------


def where_exp_works() -> Picture:
    """The numbers whose exponential float32 can hold, and the two rows of the lesson on that line."""
    with diagram.canvas(19, 4.6) as ax:
        ends = (0.5, 5.5, 12.5, 18.5)
        names = ("exp(x) is rounded to 0", "exp(x) is a float32", "exp(x) is rounded to infinity")
        for left, right, name, colour in zip(
            ends[:-1], ends[1:], names, (diagram.PALE, style.COMPUTE, style.WRITES), strict=True
        ):
            diagram.box(ax, left, 1.7, right - left, 0.8, name, colour)
        for x, bound in ((5.5, "-104"), (12.5, "88.7")):
            diagram.text(ax, x, 1.4, f"x = {bound}", size=9)
        marks = ((9.3, 1.0, "first row: 1, 2, 3, 4"), (15.5, 1.0, "second row: 1001 ... 1004"))
        for x, y, words in marks:
            diagram.text(ax, x, y - 0.4, words, size=10, bold=True)
            diagram.arrow(ax, (x, y - 0.1), (x, 1.65))
        diagram.text(ax, 9, 3.75, "both rows minus their maximum: -3, -2, -1, 0", color=style.YOURS, bold=True)
        diagram.arrow(ax, (9, 3.5), (9, 2.55), colour=style.YOURS)
    return diagram.picture(
        ax, alt="The line of numbers x. Below -104 float32 rounds exp(x) to 0, above 88.7 to infinity. The row 1 to 4 lies "
        "between, the row 1001 to 1004 far above. Minus their maximum, both rows are -3, -2, -1, 0 and lie between.",
    )  # fmt: skip


# ---- what five lines move --------------------------------------------------------------------------------------------


def one_line() -> Picture:
    """The way of a tensor through a GPU in one line of PyTorch."""
    with diagram.canvas(18, 4.4) as ax:
        diagram.box(ax, 0.3, 0.6, 4.2, 3.4, "memory (HBM)\n\nx and m lie here", diagram.PALE, bold=True)
        diagram.box(ax, 7, 0.6, 4.2, 3.4, "an SM\n\nregisters:\nx - m is computed", style.COMPUTE, bold=True)
        diagram.box(ax, 13.5, 0.6, 4.2, 3.4, "memory (HBM)\n\nz lies here,\nfor the next line", diagram.PALE, bold=True)
        diagram.arrow(ax, (4.6, 2.3), (6.95, 2.3), "reads", style.READS, width=4, size=11)
        diagram.arrow(ax, (11.3, 2.3), (13.45, 2.3), "writes", style.WRITES, width=4, size=11)
    return diagram.picture(
        ax, alt="One line of PyTorch, z = x - m: a kernel reads x and m from memory into the registers of an SM, computes "
        "there, and writes z to memory, where the next line finds it.",
    )  # fmt: skip


def counted(trace: Trace) -> list[tuple[str, int, int]]:
    """What each of the five lines reads and writes, in elements of two bytes."""
    lines = ("m = maximum", "z = x - m", "e = exp(z)", "s = sum", "y = e / s")
    return [(line, op.read_bytes // 2, op.write_bytes // 2) for line, op in zip(lines, trace.torch_ops, strict=True)]


def traffic_table(trace: Trace) -> Table:
    lines = counted(trace)
    total = ("together", *(sum(line[i] for line in lines) for i in (1, 2)))
    columns = {"line": "", "reads": "elements", "writes": "elements"}
    return style.table(columns, [*lines, total], caption="counted for x [4096, 4096]")


def what_the_traffic_says(trace: Trace) -> str:
    """Said below the table of the five lines."""
    M, N = SHAPE
    reads, writes = (sum(line[i] for line in counted(trace)) for i in (1, 2))
    assert (reads, writes) == (5 * M * N + 2 * M, 3 * M * N + 2 * M)
    said = (
        "**What you saw.** The five lines read 5 M N + 2 M elements and write 3 M N + 2 M. Every line reads a full matrix: "
        "the first two read x, the third reads z, and the last two read e. Three lines also write one. Together that is "
        f"{(reads + writes) / (2 * M * N):.1f} times what one kernel moves. At the rate at which an H200 copies memory, "
        f"{copy_gbps():,.0f} GB/s (measured), the bytes of the five lines would take {us(trace.bytes):.0f} µs, and "
        f"those of one kernel {us(LEAST):.0f} µs (computed)."
    )
    five = took().get(("torch", SHAPE))
    if five is None:
        return said
    rate = trace.bytes / five / 1e3  # GB/s
    return said + (
        f" In fact the five lines took {five:.0f} µs (measured). So they lose time in a second way as well: on average they "
        f"move {rate:,.0f} GB/s, which is {rate / copy_gbps():.0%} of the rate of a copy."
    )


def trips() -> Picture:
    """The matrices that cross between memory and the SMs in five kernels, and in one."""
    flows = (("maximum", 1, 0), ("x - m", 1, 1), ("exp", 1, 1), ("sum", 1, 0), ("e / s", 1, 1))
    with diagram.canvas(19, 5.2) as ax:
        diagram.box(ax, 0.2, 4.1, 18.6, 0.8, "memory (HBM)", diagram.PALE, bold=True)
        for i, (name, reads, writes) in enumerate(flows):
            _trip(ax, 0.2 + 2.75 * i, 2.5, name, reads, writes)
        _trip(ax, 15.3, 3.5, "all of it, in\nregisters", 1, 1)
        diagram.text(ax, 6.9, 0.45, "five kernels: 5 matrices in, 3 out", bold=True)
        diagram.text(ax, 17.05, 0.45, "one kernel: 1 in, 1 out", bold=True)
        ax.plot([14.6, 14.6], [0.2, 3.9], color=style.NEUTRAL, lw=1)
    return diagram.picture(
        ax, alt="Five kernels read a matrix each from memory, and three of them write one back: eight trips of a whole "
            "matrix. "
        "One kernel reads x once and writes y once: two trips.",
    )  # fmt: skip


def _trip(ax, x: float, width: float, name: str, reads: int, writes: int) -> None:
    diagram.box(ax, x, 0.9, width, 1.3, name, style.COMPUTE)
    if reads:
        diagram.arrow(ax, (x + 0.3 * width, 4.05), (x + 0.3 * width, 2.3), "M N", style.READS, width=3)
    if writes:
        diagram.arrow(ax, (x + 0.66 * width, 2.25), (x + 0.66 * width, 4.05), "M N", style.WRITES, width=3)


# ---- one program, one row --------------------------------------------------------------------------------------------


def program_and_row() -> Picture:
    """Rows of 13 elements in memory, and the 16 lanes of the program that has row 1."""
    with diagram.canvas(19, 6.3) as ax:
        diagram.text(
            ax, 0.3, 0.45, "x [4, 13] in memory: four rows of 13 elements, one after another", align="left", bold=True
        )
        colours = (diagram.PALE, style.READS, diagram.PALE, diagram.PALE)
        for row, colour in enumerate(colours):
            words = "row 1, of program 1" if row == 1 else f"row {row}"
            diagram.box(ax, 0.3 + 4.6 * row, 0.9, 4.6, 0.8, words, colour, size=9)
        for start, end in ((4.95, 0.35), (9.45, 12.9)):
            ax.plot([start, end], [1.7, 2.75], color=style.READS, lw=1, ls=":")
        for lane in range(16):
            inside = lane < 13
            diagram.box(
                ax, 0.3 + 0.97 * lane, 2.8, 0.97, 0.8, f"{lane}", style.READS if inside else style.WASTE, size=9
            )
        diagram.text(ax, 16.0, 3.2, "16 lanes", align="left", bold=True)
        diagram.text(ax, 6.6, 4.0, "mask on: loaded from memory", color=style.READS)
        diagram.text(ax, 14.4, 4.0, "mask off: hold PAD", color=style.INK)
        diagram.box(ax, 0.3, 4.9, 15.5, 0.9, "tl.sum adds up all 16 lanes, whatever they hold", style.COMPUTE)
        for x in (3, 8, 14.4):
            diagram.arrow(ax, (x, 4.3), (x, 4.85))
    return diagram.picture(
        ax, alt="A row of 13 elements sits in a block of 16 lanes. 13 lanes are loaded from memory; the mask switches 3 "
            "lanes "
        "off, and these hold the value PAD. tl.sum adds up all 16 lanes.",
    )  # fmt: skip


def tolerance() -> Table:
    """For one row of 1,000 numbers in each dtype: PyTorch's error, and the error that a check allows."""
    x = torch.randn(1, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lines = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        given = x.to(dtype)
        truth, native = torch.softmax(given.double(), -1), torch.softmax(given, -1)
        error, allowed = (native.double() - truth).abs().max(), error_bound(truth, native).max()
        lines.append((str(dtype).removeprefix("torch."), float(truth.max()), float(error), float(allowed)))
    columns = {"dtype": "", "largest result": "", "error of torch.softmax": "", "allowed error": ""}
    formats = {"error of torch.softmax": ".1e", "allowed error": ".1e"}
    return style.table(columns, lines, caption="computed here, for one row of 1,000 random numbers", formats=formats)


# ---- strides ---------------------------------------------------------------------------------------------------------


def row_two(views: Mapping[str, Tensor]) -> Picture:
    """The memory of a tensor of 12 elements once for each of its views, with the elements of row 2 marked."""
    with diagram.canvas(19, 1.25 * len(views) + 0.8) as ax:
        for line, (name, view) in enumerate(views.items()):
            y = 0.3 + 1.25 * line
            diagram.text(ax, 4.9, y + 0.4, name, align="right", code=True, size=9.5)
            marked = view[2].flatten().long().tolist()
            for i in range(12):
                chosen = i in marked
                diagram.box(ax, 5.1 + 0.72 * i, y, 0.72, 0.8, str(i), style.READS if chosen else diagram.PALE, size=9)
            words = f"strides {view.stride()}; begins at 2 x {view.stride(0)} = {2 * view.stride(0)}"
            diagram.text(ax, 14.0, y + 0.4, words, align="left", size=9.5)
        diagram.text(ax, 9.4, 1.25 * len(views) + 0.4, "blue: the elements of row 2", color=style.READS)
    said = ", ".join(
        f"{name} begins at {2 * view.stride(0)} and steps by {view.stride(1)}" for name, view in views.items()
    )
    return diagram.picture(ax, alt=f"Where row 2 of each view lies among the twelve elements in memory: {said}.")


# ---- online softmax --------------------------------------------------------------------------------------------------


def states(blocks: Sequence[Sequence[float]]) -> list[tuple[float, list[float]]]:
    """After each block: the maximum of what was seen, and the terms e^(x - m) of which the running sum is made."""
    found = []
    for seen in itertools.accumulate(blocks, lambda before, block: [*before, *block]):
        m = max(seen)
        found.append((m, [math.exp(x - m) for x in seen]))
    return found


def rescaled(blocks: Sequence[Sequence[float]]) -> Picture:
    """The running sum as a bar of stacked terms: block by block it is rescaled to the new maximum, then the block joins."""
    colours = (style.READS, style.WASTE, style.COMPUTE)
    after = states(blocks)
    with style.use():
        fig, ax = style.figure(width=10.0, height=4.6)
        x, ticks = 0.0, []
        old: list[tuple[list[float], str]] = []  # the terms of each block so far, with the block's colour
        for i, (block, (m, _)) in enumerate(zip(blocks, after, strict=True)):
            new = ([math.exp(v - m) for v in block], colours[i % len(colours)])
            if i:
                before = after[i - 1][0]
                factor = math.exp(before - m)
                ax.annotate("", (x + 1.3, 0.62), (x - 0.15, 0.62), arrowprops={"arrowstyle": "-|>", "color": style.INK})
                ax.text(x + 0.55, 0.68, f"times\n$e^{{{before:g}-{m:g}}}$\n= {factor:.3g}", ha="center", fontsize=10)
                old = [([term * factor for term in terms], colour) for terms, colour in old]
                x += 1.75
                height = _stack(ax, x, old)
                ticks.append((x, f"the past,\nrescaled\nl = {height:.3f}"))
                ax.text(x + 0.65, 0.62, "+", ha="center", va="center", fontsize=16)
                x += 1.3
                height = _stack(ax, x, [new])
                ticks.append((x, f"block {i}:\n{', '.join(f'{v:g}' for v in block)}\nsum = {height:.3f}"))
                ax.text(x + 0.65, 0.62, "=", ha="center", va="center", fontsize=16)
                x += 1.3
            old = [*old, new]
            height = _stack(ax, x, old)
            seen = f"blocks 0 to {i}" if i else f"block 0: {', '.join(f'{v:g}' for v in block)}"
            ticks.append((x, f"{seen}\nm = {m:g}\nl = {height:.3f}"))
            x += 0.6
        ax.set_xticks([at for at, _ in ticks], [words for _, words in ticks], fontsize=9.5)
        ax.tick_params(axis="x", length=0)
        style.axes(ax, y="sum of the terms $e^{x - m}$", grid="y")
        ax.set_ylim(0, 1.75)
        ax.set_xlim(-0.6, x)
    said = "; ".join(f"after block {i} m is {m:g} and l is {sum(terms):.3f}" for i, (m, terms) in enumerate(after))
    return style.picture(
        fig, alt=f"The running sum as a bar of stacked terms. When a larger maximum arrives, the whole bar shrinks by one "
        f"factor, and then the new block's bar is put on top: {said}.",
    )  # fmt: skip


def _stack(ax, x: float, parts: Sequence[tuple[list[float], str]]) -> float:
    """One bar of stacked terms; returns its height."""
    height = 0.0
    for terms, colour in parts:
        for term in terms:
            ax.bar(x, term, 0.75, bottom=height, color=colour, edgecolor="white", linewidth=1.2)
            if term > 0.09:
                ink = style.INK if colour == style.WASTE else "white"
                ax.text(x, height + term / 2, f"{term:.3g}", ha="center", va="center", color=ink, fontsize=9.5)
            height += term
    return height


def what_the_second_block_does() -> str:
    """Said below the answer for the row 1.5, 3, 2, 5."""
    (_, first), (_, second) = states([[1.5, 3], [2, 5]])
    return (
        f"**What you saw.** Two positive terms were added, and the sum fell from {sum(first):.4f} to {sum(second):.4f}. "
        f"The reason is the new maximum. The terms of the first block were {first[0]:.3f} and {first[1]:.0f}, relative to the "
        f"maximum 3. Relative to 5 they are {second[0]:.3f} and {second[1]:.3f}."
    )


# ---- the gradient ----------------------------------------------------------------------------------------------------


def nudge(x: Sequence[float], at: int, by: float) -> Picture:
    """The softmax of a row before and after one of its numbers is raised."""
    before = torch.softmax(torch.tensor(x, dtype=torch.float64), -1).tolist()
    raised = torch.tensor(x, dtype=torch.float64)
    raised[at] += by
    after = torch.softmax(raised, -1).tolist()
    with style.use():
        fig, ax = style.figure(width=7.5, height=3.3)
        for i in range(len(x)):
            ax.bar(i - 0.2, before[i], 0.36, color=style.NEUTRAL, label="before" if i == 0 else None)
            ax.bar(i + 0.2, after[i], 0.36, color=style.YOURS, label="after" if i == 0 else None)
            change = after[i] - before[i]
            ax.text(i, max(before[i], after[i]) + 0.02, f"{change:+.3f}", ha="center", fontsize=10)
        ax.set_xticks(range(len(x)), [f"$x_{i}$ = {v:g}" + (f" + {by:g}" if i == at else "") for i, v in enumerate(x)])
        style.axes(ax, y="y (a share of 1)")
        ax.set_ylim(0, 1)
        ax.legend(loc="upper left")
    changes = ", ".join(f"{b - a:+.3f}" for a, b in zip(before, after, strict=True))
    return style.picture(
        fig, alt=f"The softmax of {list(x)} before and after x[{at}] is raised by {by:g}: the results change by {changes}, "
        "together by 0.",
    )  # fmt: skip


# ---- persistent programs ---------------------------------------------------------------------------------------------


def overlap() -> Picture:
    """The rows of one program in time: one after another, and with the next row's load begun early."""
    load, compute = 3.0, 2.2
    with diagram.canvas(19, 5.6) as ax:
        diagram.text(ax, 0.3, 0.45, "one row after another", align="left", bold=True)
        x = 0.3
        for row in range(3):
            diagram.box(ax, x, 0.8, load, 0.7, f"load row {row}", style.READS, size=9)
            diagram.box(ax, x + load, 0.8, compute, 0.7, "compute, store", style.COMPUTE, size=9)
            x += load + compute
        ends = [x]
        diagram.text(
            ax,
            0.3,
            2.35,
            "the next row is on its way while this one is computed (num_stages=2)",
            align="left",
            bold=True,
        )
        x = 0.3
        for row in range(3):
            diagram.box(ax, x, 2.7, load, 0.7, f"load row {row}", style.READS, size=9)
            diagram.box(ax, x + load, 3.45, compute, 0.7, "compute, store", style.COMPUTE, size=9)
            x += load
        ends.append(x + compute)
        for end, y in zip(ends, (1.15, 3.8), strict=True):
            diagram.text(ax, end + 0.15, y, "done", align="left", size=9)
        diagram.arrow(ax, (0.3, 5.0), (18.5, 5.0), "time", style.BOUND)
    return diagram.picture(
        ax, alt="A program with three rows. Without overlap it loads a row, computes and stores it, and only then loads "
            "the "
        "next. With two stages it loads row 1 while it computes row 0, and is done earlier.",
    )  # fmt: skip


def persistent_us() -> dict[tuple[str, tuple[int, ...]], float]:
    """Recorded microseconds of the solutions and of the course's kernel in CUDA graphs, by way and shape."""
    try:
        return {(row.provider, row.shape): row.median_ms * 1e3 for row in benchmark.rows("softmax_persistent", "h200")}
    except FileNotFoundError:
        return {}


def ask_few_programs() -> Markdown:
    """The question about persistent programs, with the time of the kernel that it is compared with."""
    plain = persistent_us().get(("fused", (65536, 128)))
    known = f"took {plain:.1f} µs on an H200 (measured in a CUDA graph," if plain else "has no recorded time ("
    return Markdown(
        f"**Predict.** Softmax of 65,536 rows of 128 numbers in bfloat16, with one program per row, {known} with the "
        "solution of the first exercise). How long does the persistent kernel take with 132 programs, one "
        "per SM? And with 2,112, as many as fit?"
    )


def few_programs() -> Reveal | Missing:
    """What a persistent kernel takes by the number of its programs, beside the learner's prediction."""
    times = persistent_us()
    if not times:
        return Missing("No times of softmax.persistent are recorded.")
    short = (65536, 128)
    actual = {"132 programs": times["programs-132", short], "2,112 programs": times["programs-2112", short]}
    ways = {
        "fused": "one program per row", **{f"programs-{n}": f"{n:,} programs" for n in (132, 528, 1056, 2112)},
        "gpukit": "this course",
    }  # fmt: skip
    shapes = sorted({shape for _, shape in times}, key=lambda shape: shape[1])
    lines = [(" x ".join(f"{n:,}" for n in shape), *(times[way, shape] for way in ways)) for shape in shapes]
    columns = dict.fromkeys(["shape", *ways.values()], "")
    caption = "measured on an NVIDIA H200 in CUDA graphs, times in µs: your kernels as the solutions write them"
    table = style.table(
        columns, lines, caption=caption, formats=dict.fromkeys(ways.values(), ".1f"), whole=("shape",),
    )  # fmt: skip
    return reveal("softmax-persistent", actual, "measured", also=[table, _what_few_programs_say(times, short)])


def _what_few_programs_say(times: Mapping[tuple[str, tuple[int, ...]], float], shape: tuple[int, int]) -> str:
    per_row = times["programs-132", shape] / (shape[0] / 132)
    slower = times["programs-132", shape] / times["fused", shape]
    gain = times["fused", shape] / times["gpukit", shape]
    return (
        f"**What you saw.** With one program per SM the kernel takes {slower:.0f} times as long as with one program per "
        f"row. Each row takes a program {per_row:.2f} µs, because every step waits for the one before: the load, the maximum, the "
        "exponentials, the sum, the store. One program per SM leaves nothing else to do in that time. With 2,112 programs, "
        "sixteen on each SM, the waiting of one is covered by the work of the others, and the persistent kernel is about "
        "as fast as the plain one, whose programs the GPU also runs sixteen at a time on each SM. What short rows really need is more work per "
        f"program: this course's kernel gives each program several rows at once, as a block of two dimensions, and is "
        f"{gain:.1f} times as fast as one row per program at {shape[0]:,} x {shape[1]}."
    )


# ---- what it costs ---------------------------------------------------------------------------------------------------


def measured() -> Versus | Missing:
    return versus("softmax", names={"torch": "five lines"})


def where_the_time_goes() -> Markdown:
    """Said below the measured times."""
    times, in_graph = took(), took("fwd-graph")
    ours = {shape[1]: time for (name, shape), time in times.items() if name == "gpukit" and shape[0] == 4096}
    if not ours:
        return Markdown("No run is recorded yet. With a GPU, `gpukit bench softmax` in a terminal makes one.")
    least = {n: us(softmax.cost((4096, n), torch.bfloat16).bytes) for n in ours}
    share = {n: least[n] / ours[n] for n in ours}
    best = max(share, key=share.get)
    short, five, graph = (4096, 1024), times["torch", (4096, 1024)], in_graph["gpukit", SHAPE]
    launch = ours[1024] - in_graph["gpukit", short]
    return Markdown(
        f"**What you saw.** Among the calls, this course's kernel comes closest to the model at N = {best:,}, where it reaches "
        f"**{share[best]:.0%}** of the rate of a copy: there memory is almost the only limit. It is furthest off at N = "
        f"1,024 ({share[1024]:.0%}), where the bytes take {least[1024]:.1f} µs and the call {ours[1024]:.1f}. None of the "
        "times is mostly the time for launches. A CUDA graph takes the launch off the CPU, and at N = 1,024 that saves this course's "
        f"kernel {launch:.1f} of {ours[1024]:.1f} µs, and the five lines, with five launches, "
        f"{five - in_graph['torch', short]:.1f} of {five:.1f}. For this course's kernel the rest of the difference is its "
        "beginning and its end: the first loads, for which every program waits, and the last programs, during which most SMs "
        f"have nothing to do. At N = 4,096, the size at the top of this notebook, {ours[4096]:.1f} µs become {graph:.1f} in a graph, "
        f"and the bytes take {least[4096]:.1f}.\n\n"
        "Rows of 65,536 numbers do not fit into the registers of one program. Most GPUs read them a second time, partly from the "
        "L2 cache, which all SMs share. On an H200 this course's kernel reads them only once. Its calls reach "
        f"{share[65536]:.0%} of the rate of a copy there, and {share[131072]:.0%} at N = 131,072. The next section shows how. No time of "
        "Liger is recorded for the longest rows."
    )


# ---- long rows that are read only once ------------------------------------------------------------------------------


def shared_row() -> Picture:
    """How programs share a long row: each keeps its part in registers, and they exchange a word each."""
    part = _rows_shared.PART
    parts, wide = LONG // part, 4.6
    with diagram.canvas(19, 9.6) as ax:
        diagram.text(ax, 0.3, 0.45, f"x in memory: a row of {LONG:,} numbers in {parts} parts", align="left", bold=True)
        diagram.text(ax, 0.3, 7.15, f"{parts} words in", align="left", bold=True)
        diagram.text(ax, 0.3, 7.55, "memory, read by all", align="left", bold=True)
        diagram.text(ax, 0.3, 8.15, "y in memory", align="left", bold=True)
        for left, i in zip((0.3, 5.6, 14.1), (0, 1, parts - 1), strict=True):
            diagram.box(ax, left, 0.85, wide, 0.8, f"part {i}", diagram.PALE)
            diagram.arrow(ax, (left + wide / 2, 1.7), (left + wide / 2, 2.4), colour=style.READS, width=3)
            diagram.box(ax, left, 2.45, wide, 2.0, "", "none")
            diagram.text(ax, left + 0.25, 2.9, f"program {i}", align="left", bold=True)
            diagram.box(ax, left + 0.25, 3.3, wide - 0.5, 0.9, f"part {i} in registers", style.COMPUTE)
            diagram.arrow(ax, (left + 0.9, 4.5), (left + 0.9, 5.95), colour=style.WRITES, width=2)
            diagram.arrow(ax, (left + 1.9, 5.95), (left + 1.9, 4.5), colour=style.READS, width=2)
            diagram.box(ax, left, 6.0, 2.8, 0.8, f"m{i}, l{i}", style.PEER)
            diagram.arrow(ax, (left + wide - 0.8, 4.5), (left + wide - 0.8, 8.4), colour=style.WRITES, width=3)
            diagram.box(ax, left, 8.45, wide, 0.8, f"part {i}", style.WRITES)
        for y in (1.25, 3.45, 6.4, 8.85):
            diagram.text(ax, 12.15, y, "...", bold=True)
    return diagram.picture(
        ax, alt=f"A row of {LONG:,} numbers in {parts} parts of {part:,}. Each of {parts} programs reads its part once and keeps it in "
        "registers. It writes the maximum m and the sum l of its part as one word of 8 bytes, reads the words of "
        "all programs, and writes its part of y.",
    )  # fmt: skip


def what_sharing_gains() -> Markdown:
    """Said below the picture of a row that programs share."""
    there, gradients = results.long_rows("h200"), results.long_rows()
    if not there or not gradients:
        return Markdown("No times of rows that are shared are recorded.")
    shorter, gradient = there["softmax", (4096, LONG // 2)], gradients["softmax backward", (4096, LONG)]
    least = results.copy_us("softmax", 2 * 2 * 4096 * LONG // 2)
    return Markdown(
        f"**What you saw.** For 4,096 rows of {LONG // 2:,} numbers on an H200, programs that share the rows take "
        f"**{shorter.kept:.0f} µs**, and the kernel that reads each row twice takes {shorter.others:.0f} (measured). These times and "
        f"the table's are from different runs. A copy of as many bytes would take {least:.0f} (computed, at the rate of a copy in "
        "the table's run). The L2 cache had answered most of the second read already, so the gain is "
        f"{1 - shorter.kept / shorter.others:.0%} and not a third.\n\n"
        f"The gradient of softmax needs a row of y and one of dy. For rows of {LONG:,} numbers on an H100 it takes "
        f"{gradient.kept:,.0f} µs when the programs share them, instead of {gradient.others:,.0f} µs. What these programs exchange "
        "is their part of the sum of y dy."
    )


def what_sharing_gains_the_loss() -> Markdown:
    """Said below what is new where a shared row is overwritten."""
    there, times = results.long_rows("h200"), results.long_rows()
    if not there or not times:
        return Markdown("No times of losses in place are recorded.")
    loss, norm = there["cross-entropy in place", (4096, LOSS)], times["layer norm backward", (4096, 16384)]
    least = results.copy_us("cross_entropy", 2 * 2 * 4096 * LOSS)
    return Markdown(
        f"On an H200 the loss of 4,096 rows of {LOSS:,} logits and its gradient, in place, take **{loss.kept:.0f} µs** when programs "
        f"share the rows (measured). A copy of as many bytes would take {least:.0f} µs (computed).\n\n"
        "A shorter row can also stay on one SM if the SM's *shared memory* ([07 Tiling](07_tiling.ipynb)) is used besides its "
        "registers; these GPUs have 228 KiB of it per SM. LayerNorm's gradients for rows of 16,384 numbers "
        f"([11 Norms](11_norms.ipynb)) take {norm.kept:.0f} µs that way on an H100, instead of {norm.others:.0f} µs (measured). The "
        "course uses both kinds of kernels only for lengths at which they were measured to be faster, and for longer rows."
    )


def yours() -> AccessView | Markdown:
    """The learner's softmax_fused on four rows of 13, access by access."""
    x = torch.randn(4, 13, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        with gpukit.trace(detail=True) as t:
            gpukit.exercise("softmax").softmax_fused(x)
        return access(t.launches[0], {"x_ptr": x.shape, "y_ptr": x.shape}, still=3)
    except Exception as error:
        return Markdown(
            f"`softmax_fused` does not run yet ({type(error).__name__}): fill its gap, then run this cell again."
        )


def yours_in_the_chart() -> Picture | Markdown:
    """The chart of the shapes that softmax.fused is made for, with the learner's kernel in it once it passes."""
    shapes = [(4096, 1024), (4096, 4096), (4096, 16384)]
    try:
        chart = versus("softmax", names={"torch": "five lines"}, shapes=shapes, yours="softmax.fused")
    except CourseError as error:
        return Markdown(str(error))
    if isinstance(chart, Versus) and "yours" in chart.providers:
        return chart.picture
    return Markdown("`softmax.fused` does not pass its check yet. When it does, run this cell again.")


# ---- the running story -----------------------------------------------------------------------------------------------


def layer_bytes() -> tuple[int, int]:
    """What softmax of one layer's scores moves in bfloat16, in sequences of 4,096 tokens: five lines, one kernel."""
    n = 4096
    rows_ = layer.TOKENS * HEADS
    return 2 * (8 * rows_ * n + 4 * rows_), softmax.cost((rows_, n), torch.bfloat16).bytes


def layer_line() -> Markdown:
    """The line of the layer's budget that this notebook improves."""
    five, one = layer_bytes()
    products = layer.products_us()
    return Markdown(
        f"One layer of Llama 3 8B, forward, {layer.TOKENS:,} tokens in four sequences of 4,096, bfloat16. Attention that "
        f"writes its scores to memory writes {4 * HEADS} matrices of 4,096 x 4,096 scores. Softmax in five lines moves "
        f"**{five / 1e9:.1f} GB**, which takes **{us(five) / 1e3:.1f} ms** at the rate of a copy. One kernel moves "
        f"**{one / 1e9:.1f} GB**, in **{us(one) / 1e3:.1f} ms** (computed). For comparison: the seven matrix products "
        f"of the layer take {products / 1e3:.1f} ms (from measured times), so the five lines would add "
        f"{us(five) / products:.0%} to them, and one kernel adds {us(one) / products:.0%}."
    )
