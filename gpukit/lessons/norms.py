"""What notebook 11 shows: bytes of the lines, digits that cancel, groups that merge, sums of programs, and measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from IPython.display import Markdown
from torch import Tensor

import gpukit
from gpukit import benchmark
from gpukit.course import CourseError
from gpukit.lessons import diagram, layer, results
from gpukit.lessons.course_map import course_map as _map
from gpukit.reference import norms
from gpukit.simulator.trace.tracer import Trace
from gpukit.widgets import style
from gpukit.widgets.norms import cancellation as _cancellation
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.versus import NAMES as PROVIDERS
from gpukit.widgets.versus import Missing, Versus, by, versus

SHAPE = (16384, 4096)  # tokens and width of the layer in the running story
NAMES = {
    "torch": "line by line",
    "compile": "torch.compile",
    "library": "PyTorch",
    "liger-triton": "Liger in Triton",
    "gpukit": "this course",
}


def named(row: benchmark.Row) -> str:
    """What this lesson calls the row's provider."""
    return NAMES.get(row.provider) or PROVIDERS[row.provider]


def course_map() -> Picture:
    return _map("norms")


# ---- recorded times --------------------------------------------------------------------------------------------------


us = partial(results.copy_us, "rms_norm")


def judged(op: str, mode: str, shape: tuple[int, ...]) -> tuple[dict[str, benchmark.Row], bool]:
    """The rows of one shape by provider: those in a CUDA graph, where all that were called have one, and whether they are that."""
    there = [row for row in results.rows(op) if (row.op, row.dtype, row.shape) == (op, "bfloat16", shape)]
    calls = {row.provider: row for row in there if row.mode == mode}
    graphs = {row.provider: row for row in there if row.mode == f"{mode}-graph"}
    return (graphs, True) if calls and calls.keys() <= graphs.keys() else (calls, False)


def micros(op: str, mode: str, shape: tuple[int, ...], provider: str) -> float:
    """The recorded microseconds of one call, from launch to end."""
    found = (
        row for row in results.rows(op) if (row.op, row.mode, row.shape, row.provider) == (op, mode, shape, provider)
    )
    return next(found).median_ms * 1e3


def promise() -> Markdown:
    """The result at the head of the notebook."""
    if not results.rows("rms_norm"):
        return Markdown("No run is recorded: `gpukit bench rms_norm` makes one where there is a GPU.")
    a, b, c, d = (micros("rms_norm", mode, SHAPE, name) for name in ("torch", "gpukit") for mode in ("fwd", "bwd"))
    days = results.days(lambda row: row.shape == SHAPE and row.mode in ("fwd", "bwd"), "rms_norm")
    return Markdown(
        f"RMSNorm of 16,384 rows of 4,096 numbers in bfloat16, written in four lines of PyTorch, takes **{a:.0f} µs** on "
        "an H200 "
        f"and its gradients **{b:,.0f} µs**. The kernels of this course take **{c:.0f} µs** and **{d:.0f} µs** (measured, "
        f"{days}). You will write kernels of the same form. At the end you can say why the "
        "gradients are further from "
        "the speed of a copy than the forward pass."
    )


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------


def same_size() -> Picture:
    """Three rows that differ in size, and what RMSNorm makes of them."""
    row = torch.tensor([0.5, -1.0, 2.0, 0.3, -0.7, 1.4], dtype=torch.float64)
    scales = (0.2, 1.0, 4.0)
    with style.use():
        fig, panels = style.figure(1, 2, width=9.0, height=3.0, sharey=False)
        for i, scale in enumerate(scales):
            before = scale * row
            after = before / before.square().mean().sqrt()
            for ax, values in zip(panels, (before.tolist(), after.tolist()), strict=True):
                places = [7.5 * i + j for j in range(len(values))]
                ax.bar(places, values, 0.8, color=(style.PEER, style.READS, style.COMPUTE)[i])
        for ax, title in zip(panels, ("three rows x", "each divided by its root mean square"), strict=True):
            ax.set_title(title)
            ax.axhline(0, color=style.INK, lw=0.8)
            ax.set_xticks([2.5, 10, 17.5], ["row 0", "row 1", "row 2"])
            ax.tick_params(axis="x", length=0)
    return style.picture(
        fig, alt="Left, three rows of the same shape: row 2 is 20 times as large as row 0. Right, after RMSNorm: all three "
            "have "
        "the same size.",
    )  # fmt: skip


def counted(trace: Trace, elements: int) -> list[tuple[str, float, float]]:
    """The operations that go over all elements, with what each reads and writes in bytes per element."""
    each = [(op.name.removeprefix("aten."), op.read_bytes, op.write_bytes) for op in trace.torch_ops]
    names = {"_to_copy": "convert", "pow": "square", "mul": "multiply"}
    return [(names.get(name, name), r / elements, w / elements) for name, r, w in each if r + w > elements]


def bytes_table(trace: Trace, elements: int) -> Table:
    columns = {"operation": "", "reads": "bytes per element", "writes": "bytes per element"}
    formats = dict.fromkeys(("reads", "writes"), ".1f")
    caption = "counted; operations on one number per row are left out"
    return style.table(columns, counted(trace, elements), formats=formats, caption=caption)


def what_the_bytes_say(trace: Trace, one: int) -> str:
    return (
        f"**What you saw.** The lines move {trace.bytes / one:.1f} times as many bytes as one kernel. Between the first "
        "conversion and the last, everything is float32, four bytes per element, and every line writes it to memory for "
        "the "
        "next line to read. A kernel converts in registers, and that costs no traffic."
    )


def bytes_bars(trace: Trace, elements: int) -> Picture:
    """Bytes per element of each operation, and of one kernel, as bars."""
    lines = [*counted(trace, elements), ("one kernel", 2.0, 2.0)]
    with style.use():
        fig, ax = style.figure(width=8.0, height=3.2)
        for y, (_, reads, writes) in enumerate(lines):
            ax.barh(y, reads, 0.7, color=style.READS, label="reads" if y == 0 else None)
            ax.barh(y, writes, 0.7, left=reads, color=style.WRITES, label="writes" if y == 0 else None)
        ax.set_yticks(range(len(lines)), [name for name, _, _ in lines])
        ax.invert_yaxis()
        style.axes(ax, x="bytes per element", grid="x")
        ax.legend(loc="lower right", ncols=2)
        ax.set_xlim(0, 11)
    total = sum(r + w for _, r, w in lines[:-1])
    return style.picture(
        fig, alt=f"Bytes per element of each operation of the four lines, {total:.0f} together, and of one kernel, 2 read "
            "and 2 "
        "written.",
    )  # fmt: skip


# ---- variance --------------------------------------------------------------------------------------------------------


def digits() -> Picture:
    """The two terms of mean(x^2) - mean(x)^2 for the row 2000, 2001, 2002, with the digits that float32 keeps."""
    row = torch.tensor([2000.0, 2001.0, 2002.0], dtype=torch.float64)
    exact = (float(row.square().mean()), float(row.mean().square()))
    kept = [float(torch.tensor(value, dtype=torch.float32)) for value in exact]
    lines = (
        ("mean(x^2)", f"{exact[0]:.4f}", f"{kept[0]:.2f}"),
        ("mean(x)^2", f"{exact[1]:.4f}", f"{kept[1]:.2f}"),
        ("difference", f"{exact[0] - exact[1]:.4f}", f"{kept[0] - kept[1]:.2f}"),
    )
    with diagram.canvas(19, 5.2) as ax:
        for x, words in ((7.2, "exact"), (15.0, "rounded to float32")):
            diagram.text(ax, x, 0.5, words, bold=True)
        for i, (name, true, rounded) in enumerate(lines):
            y = 1.0 + 1.3 * i + 0.2 * (i == 2)
            diagram.text(ax, 0.3, y + 0.4, name, align="left", code=True, size=11)
            for right, number in ((10.9, true), (18.5, rounded)):
                whole = number.index(".")
                for j, digit in enumerate(reversed(number)):
                    place = len(number) - 1 - j
                    agrees = i < 2 and place < whole
                    colour = diagram.PALE if agrees else style.YOURS if i == 2 else style.READS
                    diagram.box(ax, right - 0.66 * (j + 1), y, 0.66, 0.85, digit, colour, size=11)
        ax.plot([0.3, 18.6], [3.6, 3.6], color=style.INK, lw=1)
    return diagram.picture(
        ax, alt=f"Variance of 2000, 2001, 2002 as a difference. Exact: {lines[0][1]} - {lines[1][1]} = {lines[2][1]}. The "
            "two "
        f"terms agree in seven digits. In float32, which keeps about seven, {lines[0][2]} - {lines[1][2]} = {lines[2][2]}.",
    )  # fmt: skip


RATIOS = tuple(10**k for k in range(6))


def errors(ways: Sequence[Callable[[Tensor], Tensor]]) -> list[list[float]]:
    """The relative error of each way to compute a variance, for 4,096 numbers of spread 1 ever further from 0."""
    noise = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float()
    found: list[list[float]] = [[] for _ in ways]
    for ratio in RATIOS:
        row = noise + ratio
        true = row.double().var(correction=0)
        for values, way in zip(found, ways, strict=True):
            values.append(abs(float(way(row) / true) - 1))
    return found


def cancellation(squares_first: Callable, mean_first: Callable) -> Picture:
    found = errors((squares_first, mean_first))
    return _cancellation(RATIOS, dict(zip(("mean of squares", "mean subtracted first"), found, strict=True)))


def what_cancels(squares_first: Callable, mean_first: Callable) -> Markdown:
    """Said below the picture of the errors."""
    (squares, _) = errors((squares_first, mean_first))
    at = RATIOS.index(1000)
    return Markdown(
        f"**What you saw.** At a mean of 1,000 the formula with the squares is off by {squares[at]:.1%} (computed here), "
        "so hardly one digit is right, and at 10,000 none is. The other formula keeps its digits much longer. It suffers "
        "as well, but only near 100,000, "
        f"and for another reason: there neighboring float32 numbers are {2**-7:.3f} apart, so that the mean itself is "
        "rounded."
    )


# ---- merging ---------------------------------------------------------------------------------------------------------


def groups_table(a: Tensor, b: Tensor) -> Table:
    """Size, mean and sum of squared distances of two groups, and of both together."""
    both = torch.cat((a, b))
    lines = [
        (name, str(x.tolist()), len(x), float(x.mean()), float((x - x.mean()).square().sum()))
        for name, x in (("a", a), ("b", b), ("all", both))
    ]
    columns = {"group": "", "elements": "", "n": "", "mean": "", "m2": ""}
    return style.table(columns, lines, formats={"mean": ".3f", "m2": ".3f"}, caption="computed here")


def two_groups(a: Sequence[float], b: Sequence[float]) -> Picture:
    """Two groups of numbers on a line, their means and the mean of all, with the distances that m2 grows by."""
    means = [sum(x) / len(x) for x in (a, b)]
    both = (sum(a) + sum(b)) / (len(a) + len(b))
    with style.use():
        fig, ax = style.figure(width=9.0, height=3.0)
        for name, values, mean, colour in zip("ab", (a, b), means, (style.READS, style.WRITES), strict=True):
            seen: dict[float, int] = {}
            for value in values:
                ax.plot(value, 0.12 * seen.get(value, 0), "o", color=colour, ms=11)
                seen[value] = seen.get(value, 0) + 1
            ax.plot([mean, mean], [-0.15, 0.55], color=colour, lw=2)
            ax.text(mean, 0.6, f"mean of {name}: {mean:g}", ha="center", color=colour)
            ax.annotate("", (both, -0.3), (mean, -0.3), arrowprops={"arrowstyle": "<|-|>", "color": style.INK})
            ax.text((mean + both) / 2, -0.42, f"{abs(mean - both):.3f}", ha="center", va="top")
        ax.plot([both, both], [-0.5, 0.85], color=style.INK, lw=2, ls="--")
        ax.text(both, 0.9, f"mean of all: {both:.3f}", ha="center", fontweight="bold")
        ax.set_ylim(-0.75, 1.1)
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
    return style.picture(
        fig, alt=f"Group a, {list(a)}, lies around {means[0]:g} and group b, {list(b)}, around {means[1]:g}. The mean of "
            "all, "
        f"{both:.3f}, is {abs(means[0] - both):.3f} from the one and {abs(means[1] - both):.3f} from the other.",
    )  # fmt: skip


# ---- gradients -------------------------------------------------------------------------------------------------------


def projection() -> Picture:
    """A row of two numbers as an arrow: the gradient's part along it changes nothing."""
    angle, length = math.radians(35), 1.15
    hat = (math.cos(angle), math.sin(angle))
    g = (0.25, 1.05)
    along = g[0] * hat[0] + g[1] * hat[1]
    part = (along * hat[0], along * hat[1])
    with style.use():
        fig, ax = style.figure(width=6.5, height=4.2)
        turn = [math.radians(d) for d in range(-10, 111)]
        ax.plot([math.cos(t) for t in turn], [math.sin(t) for t in turn], color=style.NEUTRAL, lw=1.5)
        ax.text(1.06, 0.1, "all rows of\nthis size", ha="left", color=style.BOUND, fontsize=9.5)
        look = {"arrowstyle": "-|>", "lw": 2.5, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", hat, (0, 0), arrowprops={**look, "color": style.READS})
        ax.plot([hat[0], length * 1.35 * hat[0]], [hat[1], length * 1.35 * hat[1]], color=style.READS, lw=1, ls=":")
        ax.text(hat[0] + 0.12, hat[1] - 0.04, "x, normalized", color=style.READS)
        ax.annotate("", g, (0, 0), arrowprops={**look, "color": style.INK})
        ax.text(g[0] - 0.05, g[1] + 0.04, "g", ha="right")
        ax.annotate("", part, (0, 0), arrowprops={**look, "color": style.WASTE})
        ax.text(0.42, 0.1, "part along x:\nremoved", color=style.INK, ha="left", fontsize=9.5)
        ax.annotate("", g, part, arrowprops={**look, "color": style.YOURS})
        ax.text(0.72, 1.02, "what is left: dx / rstd", color=style.YOURS)
        ax.plot([0.44, 0.7], [0.82, 1.02], color=style.YOURS, lw=0.8)
        ax.set_aspect("equal")
        ax.set_xlim(-0.25, 1.75)
        ax.set_ylim(-0.2, 1.2)
        ax.axis("off")
    return style.picture(
        fig, alt="A row of two numbers as an arrow. The gradient g is the sum of a part along the row and a part at right "
            "angles "
        "to it. The part along the row is removed, because making the row longer does not change the result.",
    )  # fmt: skip


def partial_sums() -> Picture:
    """Rows that few programs share, the sums that each keeps, and the second kernel."""
    with diagram.canvas(19, 6.4) as ax:
        for x, words in ((2.3, "memory"), (8.0, "registers of the programs"), (13.6, "memory"), (17.4, "result")):
            diagram.text(ax, x, 0.4, words, bold=True)
        diagram.box(ax, 0.3, 0.9, 4.0, 4.9, "dy and x:\nM rows,\neach read once", style.READS)
        for i in range(3):
            y = 0.9 + 1.65 * i
            diagram.box(ax, 6.0, y, 4.0, 1.5, f"program {i}: sums of\nits own rows", style.COMPUTE)
            diagram.arrow(ax, (4.35, y + 0.75), (5.95, y + 0.75), colour=style.READS)
            diagram.box(ax, 11.7, y + 0.25, 3.8, 1.0, f"partial, row {i}", style.WRITES)
            diagram.arrow(ax, (10.05, y + 0.75), (11.65, y + 0.75), colour=style.WRITES)
            diagram.arrow(ax, (15.55, y + 0.75), (16.25, 3.35 + 0.3 * (i - 1)), colour=style.READS)
        diagram.box(ax, 16.3, 2.6, 2.4, 1.5, "dweight", style.YOURS, bold=True)
        diagram.text(ax, 10.9, 6.1, "stored once, at the end", size=9)
        diagram.text(ax, 17.4, 4.5, "second kernel:\nadds the columns", size=9)
    return diagram.picture(
        ax, alt="Three programs share the rows of dy and x. Each adds up its own rows in registers and stores one row of "
            "partial "
        "sums at the end. A second kernel adds the columns of these three rows: dweight.",
    )  # fmt: skip


def partial_bytes(programs: int, N: int = SHAPE[1]) -> int:
    """Rows of float32, one per program, written once and read once."""
    return 2 * programs * N * 4


def partial_table() -> Table:
    back = norms.rms_norm_cost_bwd(SHAPE, torch.bfloat16).bytes
    ways = {132: "one program per SM", 528: "four programs per SM", SHAPE[0]: "one program per row"}
    lines = [(words, p, partial_bytes(p), 100 * partial_bytes(p) / back) for p, words in ways.items()]
    columns = {"on an H200": "", "programs": "", "partial sums": "bytes", "on top of the least": "%"}
    caption = "computed; the least is dy and x read once and dx written once"
    return style.table(columns, lines, formats={"on top of the least": "+.0f", "programs": ",d"}, caption=caption)


# ---- residual and RoPE -----------------------------------------------------------------------------------------------


def stream() -> Picture:
    """The forward pass around a norm: the sum goes two ways."""
    with diagram.canvas(19, 4.6) as ax:
        diagram.box(ax, 0.2, 0.5, 3.4, 1.1, "residual", diagram.PALE)
        diagram.box(ax, 0.2, 2.9, 3.4, 1.1, "x, from the\nlast block", diagram.PALE, size=9)
        diagram.box(ax, 5.0, 0.5, 1.3, 1.1, "+", style.COMPUTE, bold=True, size=14)
        diagram.arrow(ax, (3.65, 1.05), (4.95, 1.05))
        diagram.arrow(ax, (3.65, 3.45), (5.65, 1.7))
        diagram.arrow(
            ax, (6.35, 1.05), (18.6, 1.05), "u, past the norm: the residual stream", style.BOUND, width=3, size=10
        )
        diagram.arrow(ax, (7.6, 1.1), (8.9, 3.4), width=2)
        diagram.box(ax, 9.0, 2.9, 4.2, 1.1, "norm, times weight", style.COMPUTE)
        diagram.arrow(ax, (13.25, 3.45), (14.6, 3.45), "y")
        diagram.box(ax, 14.7, 2.9, 3.9, 1.1, "next block", diagram.PALE)
    return diagram.picture(
        ax, alt="x from the last block and the residual are added: u. u goes two ways: past the norm along the residual "
            "stream, "
        "and through the norm and the weight as y into the next block.",
    )  # fmt: skip


def turning(D: int = 64) -> Picture:
    """Points of one head on their circles for the first tokens: the first turns fast, later ones slowly."""
    points, tokens = (0, 4, 8, 16), range(5)
    with style.use():
        fig, panels = style.figure(1, len(points), width=9.5, height=2.9)
        for ax, i in zip(panels, points, strict=True):
            theta = 10_000.0 ** (-2 * i / D)
            circle = [math.radians(d) for d in range(361)]
            ax.plot([math.cos(t) for t in circle], [math.sin(t) for t in circle], color=style.NEUTRAL, lw=1)
            for t in tokens:
                x, y = math.cos(t * theta), math.sin(t * theta)
                ax.plot([0, x], [0, y], color=style.READS, lw=1.5, alpha=0.35 + 0.13 * t)
                if i < 8:
                    ax.text(1.22 * x, 1.22 * y, t, ha="center", va="center", fontsize=9)
            if i >= 8:
                ax.text(1.12, 0.25 * (i == 8), "0 to 4", va="center", fontsize=9)
            ax.set_title(f"point {i}: {theta:.2g} per token", fontsize=10)
            ax.set_aspect("equal")
            ax.set_xlim(-1.4, 1.9)
            ax.set_ylim(-1.4, 1.4)
            ax.axis("off")
    angles = ", ".join(f"point {i} by {10_000.0 ** (-2 * i / D):.2g}" for i in points)
    return style.picture(
        fig, alt=f"Four points of a head of {D} numbers for the tokens 0 to 4. From token to token they turn by these "
            "angles in "
        f"radians: {angles}.",
    )  # fmt: skip


def fused_sum() -> Markdown:
    """The sum and the norm as two kernels, and as one."""
    M, N = SHAPE
    two = 2 * M * N * (3 + 2)  # the sum reads two and writes one; the norm reads one and writes one
    one = norms.residual_rms_norm_cost(SHAPE, torch.bfloat16).bytes
    return Markdown(
        f"Forward, for {M:,} rows of {N:,} on an H200: **{us(two):.0f} µs** as two kernels and **{us(one):.0f} µs** as one "
        "(computed: their bytes at the rate of a copy)."
    )


# ---- what it costs ---------------------------------------------------------------------------------------------------


def measured(mode: str) -> Versus | Missing:
    return versus("rms_norm", mode=mode, names={"torch": "line by line"})


def what_was_measured() -> Markdown:
    """Said below the two charts of RMSNorm."""
    if not results.rows("rms_norm"):
        return Markdown("No run is recorded yet. With a GPU, `gpukit bench rms_norm` in a terminal makes one.")
    share, gain, best = {}, {}, {}
    for mode, cost in (("fwd", norms.rms_norm_cost), ("bwd", norms.rms_norm_cost_bwd)):
        took, _ = judged("rms_norm", mode, SHAPE)
        ours = took["gpukit"].median_ms * 1e3
        share[mode] = us(cost(SHAPE, torch.bfloat16).bytes) / ours
        best[mode] = benchmark.best_peer(took.values())
        gain[mode] = best[mode].median_ms * 1e3 / ours
    small = (4096, 1024)
    call, graph = micros("rms_norm", "bwd", small, "gpukit"), micros("rms_norm", "bwd-graph", small, "gpukit")
    return Markdown(
        f"**What you saw.** At 16,384 x 4,096 this course's kernel reaches {share['fwd']:.0%} of the rate of a copy "
        "forward. The "
        f"fastest of the others ({named(best['fwd'])}) takes {gain['fwd']:.2f} times as long: where one read and one write "
        "are "
        f"all there is, little is left to win. Backward it reaches {share['bwd']:.0%}, and the fastest of the others "
        f"({named(best['bwd'])}) takes "
        f"{gain['bwd']:.2f} times as long. That is where the kernels differ: two reads, a write, sums that a program "
        "carries "
        "from row to row, and a second launch to add them. The smallest shape is too small to tell: backward, a call of "
        "this course's kernels "
        f"takes {call:.0f} µs, but {graph:.0f} µs in a CUDA graph. The difference is the CPU's time for autograd and the "
        "launches."
    )


def others() -> Table | Missing:
    """LayerNorm, residual + RMSNorm and RoPE at their two largest shapes."""
    lines = []
    for op in ("layer_norm", "residual_rms_norm", "rope"):
        for mode, words in (("fwd", "forward"), ("bwd", "backward")):
            shapes = {row.shape for row in results.rows(op) if (row.op, row.mode) == (op, mode)}
            for shape in sorted(shapes, key=lambda shape: (shape[0] * shape[1] * shape[-1], shape))[-2:]:
                took, graph = judged(op, mode, shape)
                times = (took[name].median_ms * 1e3 if name in took else None for name in NAMES)
                least = us(next(iter(took.values())).bytes)
                lines.append((f"{op} {words}", by(shape), "graph" if graph else "call", least, *times))
    if not lines:
        return Missing("No run of layer_norm, residual_rms_norm and rope is recorded yet.")
    named = ["model", *(NAMES | {"liger-triton": "Liger"}).values()]  # there is no room for units and longer names
    columns, formats = dict.fromkeys(["operation", "shape", "timed", *named], ""), dict.fromkeys(named, ",.0f")
    caption = "measured on an NVIDIA H200 in bfloat16; times in µs"
    return style.table(columns, lines, formats=formats, caption=caption, whole=("operation", "shape"))


def what_the_others_say() -> Markdown:
    """Where fusing gains most, and where this course's kernels are not the fastest, in the table above."""
    slower, gains = [], {}
    for op in ("layer_norm", "residual_rms_norm", "rope"):
        for mode, words in (("fwd", "forward"), ("bwd", "backward")):
            for shape in sorted(
                {row.shape for row in results.rows(op) if row.op == op and math.prod(row.shape) >= 1 << 26}
            ):
                took, _ = judged(op, mode, shape)
                gains[f"{op} {words}"] = max(
                    took["torch"].median_ms / took["gpukit"].median_ms, gains.get(f"{op} {words}", 0)
                )
                ahead = [name for name in took if took[name].median_ms < 0.995 * took["gpukit"].median_ms]
                if ahead:
                    who = " and ".join(f"{named(took[name])} {took[name].median_ms * 1e3:.1f}" for name in ahead)
                    slower.append(
                        f"{op} {words} at {by(shape)} ({who}, this course {took['gpukit'].median_ms * 1e3:.1f} µs)"
                    )
    if not gains:
        return Markdown("")
    most = max(gains, key=gains.__getitem__)
    small = (8, 16, 16, 2048, 64)
    call, graph = micros("rope", "bwd", small, "gpukit"), micros("rope", "bwd-graph", small, "gpukit")
    kept = results.long_rows()["layer norm backward", (4096, 16384)]
    place = (
        f"This course is not the fastest at {'; '.join(slower)}." if slower else "At these shapes no other is faster."
    )
    return Markdown(
        f"**What you saw.** Fusing gains most in {most}, where the single lines take up to {gains[most]:.0f} times as long "
        f"as the fused kernels. {place} A row of 16,384 numbers is where registers run short: in LayerNorm's "
        "backward pass "
        "a program would hold x, dy and the sums for two gradients, dweight and dbias, at once. On Hopper GPUs, such as the H200 of "
        "this table, the course's kernel for such rows keeps x and dy in shared memory, and the next row arrives there meanwhile: "
        f"on an H100 these gradients take {kept.kept:.0f} µs with it and {kept.others:.0f} without.\n\nRoPE's backward pass does the "
        "same work as its forward pass. It looks slower at the larger shape because a call includes the CPU's time for "
        "autograd: "
        f"at the smaller shape a call of this course's kernel takes {call:.0f} µs, and {graph:.0f} µs in a CUDA graph."
    )


def yours() -> Markdown:
    """What the learner's rms_norm moves, in units of x."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = torch.randn(64, 512, device=device).bfloat16(), torch.randn(512, device=device).bfloat16()
    try:
        with gpukit.trace() as t:
            gpukit.exercise("norms").rms_norm(x, w)
    except Exception as error:
        return Markdown(
            f"`rms_norm` does not run yet ({type(error).__name__}): fill its gap, then run this cell again."
        )
    moved = ", ".join(f"{a.tensor} {a.bytes / x.nbytes:.2f}" for a in t.launches[0].accesses)
    return Markdown(f"Your `rms_norm` moves, in units of x (counted): {moved}.")


def yours_in_the_chart() -> Picture | Markdown:
    """The chart of the forward pass, with the learner's kernel in it once it passes."""
    try:
        chart = versus("rms_norm", names={"torch": "line by line"}, yours="norms.rms_norm")
    except CourseError as error:
        return Markdown(str(error))
    if isinstance(chart, Versus) and "yours" in chart.providers:
        return chart.picture
    return Markdown("`norms.rms_norm` does not pass its check yet. When it does, run this cell again.")


# ---- the running story -----------------------------------------------------------------------------------------------


def layer_line() -> Markdown:
    """The lines of the layer's budget that this notebook improves."""
    if not (results.rows("residual_rms_norm") and results.rows("rope")):
        return Markdown("No run of residual_rms_norm and rope is recorded yet.")
    parts = [part for part in layer.PARTS if part.notebook == "11"]
    by_hand, pytorch, ours = (sum(part.us(name) for part in parts) for name in ("torch", "library", "gpukit"))
    products = layer.products_us()
    return Markdown(
        f"One layer of Llama 3 8B, forward, {layer.TOKENS:,} tokens in bfloat16 on an H200 (sums of measured times): two "
        "residual "
        f"sums with their norms, and RoPE, take **{by_hand:,.0f} µs** line by line, **{pytorch:,.0f} µs** with PyTorch's "
        f"functions, and **{ours:,.0f} µs** with the kernels of this course. The seven matrix products of the layer take "
        f"{products:,.0f} µs. So operations with hardly any arithmetic take {by_hand / products:.0%} of the products' "
        f"time line by line, and {ours / products:.0%} when they are fused."
    )
