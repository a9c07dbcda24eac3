"""What notebook 15 shows: what a loss moves and keeps, log-sum-exps that join, gradients, memory, and measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from IPython.display import Markdown
from torch import Tensor

import gpukit
from gpukit import benchmark, live
from gpukit.hardware import gpu
from gpukit.kernels.cross_entropy import cross_entropy_fwd
from gpukit.kernels.linear_cross_entropy import chunk_tokens
from gpukit.lessons import diagram, layer, results
from gpukit.lessons.course_map import course_map as _map
from gpukit.simulator.trace.tracer import Trace
from gpukit.widgets import memory_charts, style
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.versus import NAMES as PROVIDERS
from gpukit.widgets.versus import by

SHAPE = M, V = 4096, 128_256  # tokens of the promise, and Llama 3's vocabulary
LINEAR = (8192, 4096, V)  # tokens, width and vocabulary of the last layer
CHUNK = 1024  # tokens at a time
KL_SHAPE = (M, 32_768)
GIB = 2**30

NAMES = {
    "torch": "single operations",
    "library": "PyTorch",
    "compile": "torch.compile",
    "liger-triton": "Liger in Triton",
    "gpukit": "this course, two launches",
    "gpukit-inplace": "this course, in place",
}
_COLOURS = (style.NEUTRAL, style.PEER, style.WASTE, style.COMPUTE, style.READS, style.WRITES)
SHORT = (M, 32_000)  # Llama 2's vocabulary

# A row of logits, small enough for pictures: what follows "the cat sat on the ..."
WORDS = ("mat", "moon", "floor", "of", "chair")
LOGITS = torch.tensor([2.4, -0.6, 1.5, -1.2, 0.8], dtype=torch.float64)
TARGET = 2


def course_map() -> Picture:
    return _map("losses")


# ---- recorded times --------------------------------------------------------------------------------------------------

_NOTHING = Markdown("No run is recorded: `gpukit bench cross_entropy` makes one where there is a GPU.")


def took(op: str, mode: str, shape: tuple[int, ...], dtype: str = "bfloat16") -> dict[str, benchmark.Row]:
    """The recorded rows of one operation, mode, shape and dtype, by provider; {} without a record."""
    key = op, mode, shape, dtype
    return {row.provider: row for row in results.rows(op) if (row.op, row.mode, row.shape, row.dtype) == key}


def both(shape: tuple[int, int] = SHAPE) -> dict[str, benchmark.Row]:
    """Loss and gradient of logits of this shape, by provider; {} unless all of NAMES are recorded."""
    rows = took("cross_entropy", "fwd+bwd", shape)
    return rows if rows.keys() >= NAMES.keys() else {}


def linear_rows() -> dict[str, benchmark.Row]:
    """The last layer with its loss and all gradients, by provider; {} unless all four are recorded."""
    rows = took("linear_cross_entropy", "fwd+bwd", LINEAR)
    return rows if rows.keys() >= {"library", "compile", "liger-triton", "gpukit"} else {}


def kl_rows() -> tuple[dict[str, benchmark.Row], dict[str, benchmark.Row]]:
    """The divergence and its gradient by provider, in float32 and in bfloat16; two {} unless both are recorded."""
    found = tuple(took("kl_div", "fwd+bwd", KL_SHAPE, dtype) for dtype in ("float32", "bfloat16"))
    return found if all(rows.keys() >= {"library", "compile", "gpukit"} for rows in found) else ({}, {})


def us(row: benchmark.Row) -> float:
    return row.median_ms * 1e3


def pass_us(shape: tuple[int, int] = SHAPE) -> float:
    """One pass over bfloat16 logits at the rate of a copy."""
    return results.copy_us("cross_entropy", 2 * math.prod(shape))


def promise() -> Markdown:
    """The result at the head of the notebook."""
    rows = both()
    if not rows:
        return _NOTHING
    theirs, ours = rows["library"], rows["gpukit-inplace"]
    return Markdown(
        f"For {M:,} tokens and the vocabulary of Llama 3, {V:,} entries, the logits take {2 * M * V / 1e9:.2f} GB in "
        f"bfloat16. PyTorch computes their loss and its gradient in **{us(theirs):,.0f} µs** on an H200. The kernel of this "
        f"course takes **{us(ours):,.0f} µs** (measured, {benchmark.when((theirs, ours))}) and leaves the gradient where the logits were, so that "
        "it needs no other tensor of that size. You will write kernels of the same form."
    )


# ---- the loss of one row ---------------------------------------------------------------------------------------------


def _bars(ax, values: Sequence[float], *, colour: str, title: str, form: str = ".2f") -> None:
    """A bar for each word, the target's in another color, with its number."""
    for i, value in enumerate(values):
        ax.bar(i, value, 0.72, color=style.YOURS if i == TARGET else colour)
        style.label(ax, i, value, f"{value:{form}}", dx=0, dy=3 if value >= 0 else -3, ha="center", fontsize=9.5)
    ax.set_xticks(range(len(WORDS)), WORDS)
    ax.tick_params(axis="x", length=0)
    ax.axhline(0, color=style.INK, lw=0.8)
    ax.set_yticks([])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.set_title(title)
    ax.margins(y=0.18)


def probabilities() -> list[float]:
    """Of the words in the pictures."""
    return torch.softmax(LOGITS, 0).tolist()


def loss_of_the_row() -> float:
    return float(F.cross_entropy(LOGITS[None], torch.tensor([TARGET])))


def from_logits() -> Picture:
    """A row of logits and the probabilities that softmax makes of it, with the loss of the right word."""
    p = probabilities()
    with style.use():
        fig, (left, right) = style.figure(1, 2, width=9.5, height=3.3, sharey=False)
        _bars(left, LOGITS.tolist(), colour=style.PEER, title="logits, from the model", form=".1f")
        _bars(right, p, colour=style.COMPUTE, title="probabilities, by softmax")
        right.text(
            4.45, 0.85 * max(p), f"the right word: {WORDS[TARGET]}\nloss = -log {p[TARGET]:.2f} = {loss_of_the_row():.2f}",
            ha="right", va="center",
        )  # fmt: skip
    pairs = ", ".join(f"{word} {x:.1f}" for word, x in zip(WORDS, LOGITS.tolist(), strict=True))
    return style.picture(
        fig, alt=f"Five words with their logits: {pairs}. Softmax gives the right word, {WORDS[TARGET]}, the probability "
            f"{p[TARGET]:.2f}, so the loss is {loss_of_the_row():.2f}.",
    )  # fmt: skip


def as_a_distance() -> Picture:
    """The same row: its log-sum-exp as a line above the bars, and the loss as the distance of the right word's bar."""
    lse = float(LOGITS.logsumexp(0))
    with style.use():
        fig, ax = style.figure(width=8.5, height=3.4)
        _bars(ax, LOGITS.tolist(), colour=style.PEER, title="", form=".1f")
        ax.axhline(lse, color=style.BOUND, ls="--")
        style.label(ax, 4.4, lse, f"log-sum-exp: {lse:.2f}", dx=0, dy=4, ha="right")
        x = float(LOGITS[TARGET])
        ax.annotate("", (TARGET + 0.2, lse), (TARGET + 0.2, x), arrowprops={"arrowstyle": "<|-|>", "color": style.INK})
        style.label(ax, TARGET + 0.25, (x + lse) / 2, f"loss: {lse - x:.2f}")
        ax.set_ylim(-1.8, 3.5)
    return style.picture(
        fig, alt=f"The logits of five words as bars. The log-sum-exp, {lse:.2f}, is a line a little above the largest of them. "
            f"The loss, {lse - x:.2f}, is the distance from the top of the right word's bar to that line.",
    )  # fmt: skip


def pulls() -> Picture:
    """The gradient of the same row: probabilities, less 1 at the right word."""
    dx = gradient()
    with style.use():
        fig, ax = style.figure(width=8.5, height=3.2)
        _bars(ax, dx, colour=style.WRITES, title="gradient of the loss with respect to each logit")
    pairs = ", ".join(f"{word} {x:+.2f}" for word, x in zip(WORDS, dx, strict=True))
    return style.picture(
        fig, alt=f"The gradient of the loss with respect to each logit: {pairs}. Only the right word has a negative one.",
    )  # fmt: skip


def gradient() -> list[float]:
    """Of the loss of the words in the pictures, with respect to each logit."""
    hot = torch.arange(len(WORDS)) == TARGET
    return (torch.softmax(LOGITS, 0) - hot.double()).tolist()


def smoothed_targets(s: float = 0.1) -> Picture:
    """The distribution that the loss compares with: all of it at the right word, and with a share s spread evenly."""
    hot = [float(i == TARGET) for i in range(len(WORDS))]
    soft = [(1 - s) * h + s / len(WORDS) for h in hot]
    with style.use():
        fig, (left, right) = style.figure(1, 2, width=9.5, height=2.8)
        _bars(left, hot, colour=style.PEER, title="target", form="g")
        _bars(right, soft, colour=style.PEER, title=f"smoothed target, s = {s:g}")
    return style.picture(
        fig, alt=f"Left, the target: 1 for the right word, {WORDS[TARGET]}, and 0 for the others. Right, smoothed with s = "
            f"{s:g}: {soft[TARGET]:.2f} for the right word and {soft[0]:.2f} for each of the others.",
    )  # fmt: skip


TEACHER = torch.tensor([0.55, 0.0, 0.3, 0.0, 0.15], dtype=torch.float64)


def terms() -> list[float]:
    """t (log t - x) of each word: the teacher's probabilities t, the student's log-probabilities x."""
    x = torch.log_softmax(LOGITS, 0)
    return (torch.xlogy(TEACHER, TEACHER) - TEACHER * x).tolist()


def two_distributions() -> Picture:
    """A teacher's and a student's probabilities, and the term of each word in the divergence."""
    p, each = probabilities(), terms()
    with style.use():
        fig, (left, right) = style.figure(1, 2, width=9.5, height=3.2, sharey=False)
        for shift, values, name, colour in (
            (-0.2, TEACHER.tolist(), "teacher", style.WASTE), (0.2, p, "student", style.COMPUTE),
        ):  # fmt: skip
            places = [i + shift for i in range(len(WORDS))]
            left.bar(places, values, 0.38, color=colour, label=name)
            for at, value in zip(places, values, strict=True):
                style.label(left, at, value, f"{value:.2f}", dx=0, dy=3, ha="center", fontsize=8.5)
        left.legend(loc="upper right")
        left.set_title("probabilities")
        for i, value in enumerate(each):
            right.bar(i, value, 0.72, color=style.WASTE)
            style.label(right, i, value, f"{value:.2f}", dx=0, dy=3 if value >= 0 else -3, ha="center", fontsize=9.5)
        right.set_title(f"t · (log t - log of the student's), sum {sum(each):.3f}")
        for ax in (left, right):
            ax.set_xticks(range(len(WORDS)), WORDS)
            ax.set_yticks([])
            ax.spines[["left", "bottom"]].set_visible(False)
            ax.axhline(0, color=style.INK, lw=0.8)
            ax.tick_params(axis="x", length=0)
            ax.margins(y=0.2)
    return style.picture(
        fig, alt="Probabilities of five words by a teacher and by a student, and each word's term of the divergence: "
            + ", ".join(f"{word} {value:.2f}" for word, value in zip(WORDS, each, strict=True))
            + f". The terms add up to {sum(each):.3f}.",
    )  # fmt: skip


# ---- passes over the logits ------------------------------------------------------------------------------------------


def counted(trace: Trace, x: Tensor) -> list[tuple[str, int, int]]:
    """The operations that go over tensors of x's size, with how many times each reads and writes so many numbers."""
    large = [op for op in trace.torch_ops if op.bytes > x.nbytes / 2]
    # nll_loss picks one element of each row; its argument is the whole tensor all the same.
    reads = [0 if "nll_loss" in op.name else round(op.read_bytes / x.nbytes) for op in large]
    writes = [round(op.write_bytes / x.nbytes) for op in large]
    return [(op.name.removeprefix("aten."), r, w) for op, r, w in zip(large, reads, writes, strict=True)]


def passes(trace: Trace, x: Tensor) -> dict[str, int]:
    """What the prediction asks for."""
    _, reads, writes = zip(*counted(trace, x), strict=True)
    return {"PyTorch reads": sum(reads), "PyTorch writes": sum(writes), "least, both": 2}


RESULTS = {
    "_log_softmax": "logarithms of all probabilities",
    "nll_loss_forward": "one of them per row",
    "nll_loss_backward": "zeros, and one number per row",
    "_log_softmax_backward_data": "gradient of the logits",
}


def passes_table(trace: Trace, x: Tensor) -> Table:
    rows = [(name, RESULTS.get(name, ""), reads, writes) for name, reads, writes in counted(trace, x)]
    columns = {"operation": "", "its result": "", "reads": "passes", "writes": "passes"}
    return style.table(columns, rows, caption="counted")


def what_the_passes_say(trace: Trace, x: Tensor) -> str:
    found = passes(trace, x)
    six = found["PyTorch reads"] + found["PyTorch writes"]
    least = found["least, both"]
    return (
        f"**What you saw.** PyTorch makes {six} passes, {found['PyTorch reads']} reads and {found['PyTorch writes']} writes. "
        f"The least is {least}: every logit must be read once, and every number of the gradient must be written once. At the "
        f"rate at which an H200 copies memory, {six} passes take {six * pass_us():,.0f} µs and {least} take "
        f"{least * pass_us():,.0f} µs (computed). In PyTorch's names, `nll` stands for negative log-likelihood, minus the "
        "logarithm of a probability. Its backward pass is the strangest of the four operations: it writes a whole tensor of "
        "zeros with a single number in each row."
    )


def four_operations() -> Picture:
    """PyTorch's four operations, and which tensors of M x V numbers each reads from memory and writes to it."""
    with diagram.canvas(19, 6.6) as ax:
        diagram.text(ax, 0.1, 0.4, "memory (HBM): M x V numbers each", align="left", bold=True)
        diagram.text(ax, 0.1, 6.2, "kernels, on the chip", align="left", bold=True)
        boxes = ((0.6, "logits x", style.READS), (5.2, "log p", style.WASTE), (10.2, "zeros and\none number\nper row", style.WASTE),
                 (15.2, "dx", style.WRITES))  # fmt: skip
        for x, words, colour in boxes:
            diagram.box(ax, x, 0.9, 3.0, 2.0, words, colour)
        kernels = (
            (1.6, "log_softmax"),
            (6.0, "nll_loss"),
            (10.0, "nll_loss,\nbackward"),
            (14.6, "log_softmax,\nbackward"),
        )
        for x, words in kernels:
            diagram.box(ax, x, 4.7, 3.4, 1.1, words, "none", bold=True, size=9.5)
        for start, end in (((1.8, 2.9), (2.8, 4.7)), ((12.4, 2.9), (15.2, 4.7))):
            diagram.arrow(ax, start, end, colour=style.READS)
        diagram.arrow(ax, (7.6, 2.9), (14.6, 4.75), colour=style.READS)
        diagram.arrow(ax, (6.8, 2.9), (7.2, 4.7), colour=style.READS, width=1)
        diagram.text(ax, 6.8, 3.9, "one per row", align="right", size=8.5)
        for start, end in (((4.2, 4.7), (5.9, 2.9)), ((11.3, 4.7), (11.3, 2.9)), ((17.0, 4.7), (17.0, 2.9))):
            diagram.arrow(ax, start, end, colour=style.WRITES)
        diagram.text(ax, 18.9, 6.2, "blue: read, vermillion: written", align="right", size=9)
    return diagram.picture(
        ax, alt="log_softmax reads the logits and writes log p. nll_loss reads one number per row. Its backward pass writes "
            "zeros with one number per row. The backward pass of log_softmax reads these and log p and writes dx.",
    )  # fmt: skip


def launches() -> Picture:
    """A row's way through two launches, and through one."""
    with diagram.canvas(19, 5.6) as ax:
        for y, words in ((0.4, "two launches: three passes"), (3.5, "one launch: two passes")):
            diagram.text(ax, 0.2, y, words, align="left", bold=True)
        for x, words, colour in ((0.3, "row of x", style.READS), (9.0, "row of x", style.READS),
                                 (16.2, "dx, in its\nplace", style.WRITES)):  # fmt: skip
            diagram.box(ax, x, 0.9, 2.6, 1.3, words, colour)
        diagram.box(ax, 4.2, 0.9, 3.4, 1.3, "forward:\nloss and lse", "none")
        diagram.box(ax, 12.2, 0.9, 3.0, 1.3, "backward", "none")
        diagram.box(ax, 4.2, 4.0, 9.2, 1.3, "row in registers:\nlse, then loss and gradient", style.COMPUTE)
        diagram.box(ax, 0.3, 4.0, 2.6, 1.3, "row of x", style.READS)
        diagram.box(ax, 14.6, 4.0, 4.2, 1.3, "dx, in its place", style.WRITES)
        for y, pairs in ((1.55, ((2.9, 4.2), (11.6, 12.2))), (4.65, ((2.9, 4.2),))):
            for start, end in pairs:
                diagram.arrow(ax, (start, y), (end, y), colour=style.READS)
        for y, start, end in ((1.55, 15.2, 16.2), (4.65, 13.4, 14.6)):
            diagram.arrow(ax, (start, y), (end, y), colour=style.WRITES)
    return diagram.picture(
        ax, alt="Two launches: forward reads a row for its loss and log-sum-exp; backward reads it again and writes the "
            "gradient in its place. One launch: the row is read into registers once, gives its loss and its gradient, and "
            "the gradient is written in its place.",
    )  # fmt: skip


def joined(row: Tensor, target: int, ways: Mapping[str, tuple[Tensor, Tensor]]) -> Table:
    """States of one row by the order in which they were joined, and the loss that each gives; below them PyTorch's."""
    lines = [(name, float(m), float(l), float(m + torch.log(l) - row[target])) for name, (m, l) in ways.items()]
    p = torch.exp(row[target]) / torch.exp(row).sum()
    lines.append(("F.cross_entropy", None, None, float(F.cross_entropy(row, torch.tensor(target)))))
    lines.append(("-log of the probability", None, None, float(-torch.log(p))))
    columns = {"how": "", "m": "", "l": "", "loss": ""}
    return style.table(columns, lines, formats={"l": ".4f", "loss": ".4f"}, caption="computed here, in float32")


def shifted(x: Sequence[float], target: int, by: Sequence[float], s: float = 0.1, z: float = 1e-4) -> Table:
    """A row's losses after a number was added to all of its logits, in float64, and with the logits stored in bfloat16."""
    row, at = torch.tensor([x], dtype=torch.float64), torch.tensor([target])
    lines = []
    for shift in by:
        moved = row + shift
        plain, soft = (float(F.cross_entropy(moved, at, label_smoothing=share)) for share in (0.0, s))
        stored = float(F.cross_entropy(moved.bfloat16().double(), at))
        lines.append((shift, plain, soft, z * float(moved.logsumexp(-1)) ** 2, stored))
    columns = {
        "added": "", "loss": "", f"smoothed, s = {s:g}": "", f"z-loss, z = {z:g}": "", "loss of logits in bfloat16": "",
    }  # fmt: skip
    return style.table(columns, lines, formats=dict.fromkeys(list(columns)[1:], ".4f"), caption="computed here")


# ---- memory ----------------------------------------------------------------------------------------------------------


def last_layer() -> Picture:
    """x, weight and logits of the last layer, drawn to scale."""
    tokens, width, vocabulary = LINEAR
    unit = vocabulary / 15.5
    height, depth = 1.4 * tokens / unit, 1.4 * width / unit  # 1.4 times as high as wide, for the words in them
    sizes = [2 * a * b / GIB for a, b in ((tokens, width), (vocabulary, width), (tokens, vocabulary))]
    with diagram.canvas(19, 5.0) as ax:
        diagram.box(ax, 3.0, 1.0, 15.5, depth, f"weight, transposed: D x V, {sizes[1]:.2f} GiB", style.PEER)
        diagram.box(ax, 2.0, 2.4, depth, height, "", style.READS)
        diagram.text(ax, 1.8, 2.4 + height / 2, f"x: M x D\n{sizes[0]:.2f} GiB", align="right")
        diagram.box(ax, 3.0, 2.4, 15.5, height, f"logits: M x V, {sizes[2]:.2f} GiB", style.WASTE, size=12)
        diagram.text(
            ax, 10.75, 4.5, f"M = {tokens:,} tokens, D = {width:,}, V = {vocabulary:,}, bfloat16", size=9.5,
        )  # fmt: skip
        diagram.text(ax, 10.75, 0.5, "logits = x · weight, transposed", bold=True)
    return diagram.picture(
        ax, alt=f"The last layer drawn to scale: x takes {sizes[0]:.2f} GiB, the weight {sizes[1]:.2f} GiB, and the logits, their "
            f"product, {sizes[2]:.2f} GiB.",
    )  # fmt: skip


def what_memory_says(once: live.watch, chunked: live.watch) -> str:
    """Said beside the two peaks."""
    tokens, width, _ = LINEAR
    logits = 2 * tokens * V
    text = (
        f"**What you saw.** With all logits at once, {once.peak_bytes / GIB:.2f} GiB: {once.peak_bytes / logits:.0f} tensors as "
        "large as the logits. When backward begins, the log-probabilities are in memory, because the loss keeps them. Then the "
        "gradients of the log-probabilities and of the logits are made. The logits themselves are gone by then, because "
        "no name refers to them. The gradients of x and of the weight come after these, when the first two of the three have "
        f"been freed. In chunks of {CHUNK:,} tokens, {chunked.peak_bytes / GIB:.2f} GiB, of which {2 * V * width / GIB:.2f} are "
        "the weight's gradient; the rest is the buffer and the gradient of x (counted)."
    )
    rows = linear_rows()
    if rows:
        theirs, ours = (rows[name].peak_bytes / GIB for name in ("library", "gpukit"))
        taken = chunk_tokens(tokens, V, width)
        text += (
            f" On an H200, PyTorch's allocator reported {theirs:.2f} GiB for all logits at once, and {ours:.2f} GiB for this course's "
            f"kernel, whose chunks have {taken:,} tokens (measured)."
        )
    return text


def view_picture() -> Picture:
    """A storage, the tensor that was made with it, and a view of one element."""
    with diagram.canvas(18, 5.6) as ax:
        diagram.text(ax, 0.3, 0.5, "tensors", align="left", bold=True)
        diagram.text(ax, 0.3, 5.1, "their memory", align="left", bold=True)
        diagram.box(ax, 4.0, 0.4, 3.6, 1.3, "big\n262,144 numbers", style.READS)
        diagram.box(ax, 9.2, 0.4, 3.0, 1.3, "big[0]\n1 number", style.WRITES)
        diagram.box(ax, 14.6, 0.4, 3.0, 1.3, "its copy\n1 number", style.COMPUTE)
        diagram.box(ax, 0.3, 3.6, 13.2, 1.1, "1 MiB", diagram.PALE)
        diagram.box(ax, 0.3, 3.6, 0.5, 1.1, "", style.WRITES)
        diagram.box(ax, 15.8, 3.6, 0.6, 1.1, "", style.COMPUTE)
        diagram.arrow(ax, (5.8, 1.75), (5.8, 3.55), colour=style.READS)
        diagram.arrow(ax, (9.8, 1.75), (0.85, 3.6), colour=style.WRITES)
        diagram.arrow(ax, (16.1, 1.75), (16.1, 3.55), colour=style.COMPUTE)
    return diagram.picture(
        ax, alt="big refers to 1 MiB of memory. big[0] has one number and refers to the same memory. A copy of it has memory of "
            "its own, four bytes.",
    )  # fmt: skip


def held(keeps: Mapping[str, Callable[[Tensor], object]], times: int = 8) -> Table:
    """Tensors of 1 MiB, made one after the other, of each of which `keep` keeps something: the memory that is not freed."""
    lines = []
    for name, keep in keeps.items():
        with live.watch() as memory:
            kept = [keep(torch.zeros(2**18)) for _ in range(times)]
        lines.append((name, memory.bytes / 2**20, memory.peak_bytes / 2**20))
        del kept
    columns = {"kept": "", "held at the end": "MiB", "held at most": "MiB"}
    return style.table(columns, lines, formats=dict.fromkeys(list(columns)[1:], ".2f"), caption="counted")


Runs = Mapping[str, live.watch]


def watched(ways: Mapping[str, Callable[[], Tensor]]) -> Runs:
    """Each way to compute a loss, run with its backward pass: the bytes that are alive after each operation."""
    runs = {name: live.watch() for name in ways}
    for name, way in ways.items():
        with runs[name] as memory:
            loss = way()
            memory.phase("backward")
            loss.backward()
        del loss
    return runs


def timelines(runs: Runs) -> Picture:
    return memory_charts.timelines({name: memory.timeline for name, memory in runs.items()})


def what_the_parts_say(runs: Runs, x: Tensor, weight: Tensor) -> Markdown:
    """Said below the timeline of a loss in parts with one backward pass."""
    (_, once), (_, parts) = runs.items()
    forward = next(i for i, moment in enumerate(parts.timeline) if moment.phase == "backward") - 1
    logits = x.itemsize * len(x) * len(weight)
    return Markdown(
        f"**What you saw.** The peak falls from {once.peak_bytes / 2**20:.1f} to {parts.peak_bytes / 2**20:.1f} MiB, because the "
        "backward pass needs the two gradients of only one part at a time. But the forward pass climbs step by step to "
        f"{parts.timeline[forward].bytes / 2**20:.1f} MiB, as much as one tensor of all logits ({logits / 2**20:.0f} MiB). "
        "Each part's log-probabilities stay, because the backward pass will need them, and the backward pass begins when the "
        "last part is done. With twice as many tokens this level is twice as high (counted)."
    )


def what_chunks_say(runs: Runs, x: Tensor, weight: Tensor) -> Markdown:
    """Said below the timeline of a loss whose gradients are made with each chunk."""
    (_, once), (_, chunks) = runs.items()
    fixed = x.nbytes + weight.nbytes
    return Markdown(
        f"**What you saw.** The peak is {chunks.peak_bytes / 2**20:.1f} MiB, where all logits at once need "
        f"{once.peak_bytes / 2**20:.1f}. Of the {chunks.peak_bytes / 2**20:.1f}, {fixed / 2**20:.1f} MiB are the gradients of x and weight, which are the "
        "result. What remains is one buffer, which each chunk overwrites. The forward pass no longer climbs step by step, and the "
        "backward pass has almost nothing to do: the gradients exist already and are only multiplied by the gradient of the "
        "loss (counted)."
    )


# ---- KL divergence ---------------------------------------------------------------------------------------------------


def gives(lines: Mapping[str, Tensor]) -> Table:
    rows = [(name, float(value)) for name, value in lines.items()]
    return style.table({"line": "", "gives": ""}, rows, formats={"gives": ".4f"}, caption="computed here")


# ---- what it costs ---------------------------------------------------------------------------------------------------


def measured() -> Table | Markdown:
    """Loss and gradient by provider: time at two vocabularies, and at the larger one the passes it is worth and the memory."""
    long, short = both(), both(SHORT)
    if not (long and short):
        return _NOTHING
    rows = [("model: one read, one write", 2 * pass_us(SHORT), 2 * pass_us(), 2.0, 0.0)]
    for name, said in NAMES.items():
        row = long[name]
        rows.append((said, us(short[name]), us(row), us(row) / pass_us(), row.peak_bytes / 1e9))
    columns = {
        "provider": "", f"V = {SHORT[1]:,}": "µs", f"V = {V:,}": "µs", "worth": "passes", "memory besides the logits": "GB",
    }  # fmt: skip
    formats = dict(zip(list(columns)[1:], (",.0f", ",.0f", ".1f", ".2f"), strict=True))
    days = benchmark.when(found[name] for found in (long, short) for name in NAMES)
    caption = f"measured on an NVIDIA H200, {days}: loss and gradient of {M:,} rows in bfloat16"
    return style.table(columns, rows, formats=formats, caption=caption)


def measured_bars() -> Picture | Markdown:
    """The times of the larger vocabulary as bars, with two passes as the bound."""
    rows = both()
    if not rows:
        return _NOTHING
    bound = 2 * pass_us()
    with style.use():
        fig, ax = style.figure(width=9.0, height=3.5)
        for y, (name, colour) in enumerate(zip(NAMES, _COLOURS, strict=True)):
            ax.barh(y, us(rows[name]), 0.7, color=colour)
            style.label(ax, us(rows[name]), y, f"{us(rows[name]):,.0f}")
        ax.axvline(bound, color=style.BOUND, ls="--")
        style.label(ax, bound, -0.62, f"two passes: {bound:,.0f}", dx=4)
        ax.set_yticks(range(len(NAMES)), NAMES.values())
        ax.set_ylim(len(NAMES) - 0.5, -1.0)
        style.axes(ax, x="time (µs)", grid="x")
        ax.margins(x=0.1)
    said = ", ".join(f"{name} {us(rows[key]):,.0f}" for key, name in NAMES.items())
    return style.picture(
        fig,
        alt=f"Loss and gradient of {by(SHAPE)} logits, in µs: {said}; two passes at the rate of a copy {bound:,.0f}.",
    )


def what_was_measured() -> Markdown:
    """Said below the table and the bars."""
    rows, forward = both(), took("cross_entropy", "fwd", SHAPE)
    if not rows:
        return _NOTHING
    tensor = 2 * M * V
    compiled, loss = us(forward["compile"]) / pass_us(), us(forward["gpukit"])
    apart, place = rows["gpukit"], rows["gpukit-inplace"]
    best = benchmark.best_peer(rows.values())
    other = NAMES.get(best.provider) or (
        f"{PROVIDERS[best.provider]}, {us(best):.0f} µs; the table leaves out this library, which has no time for V = {SHORT[1]:,}"
    )
    gain = us(best) / us(apart)
    beside = f"That is {gain:.2f} times as fast as the best of the others ({other})"
    if gain < 1:
        beside = f"The best of the other libraries is {1 / gain:.2f} times as fast ({other})"
    return Markdown(
        f"**What you saw.** The single operations take the time of {us(rows['torch']) / pass_us():.1f} passes and hold "
        f"{rows['torch'].peak_bytes / tensor:.0f} tensors besides the logits: each small step of the formula and of its gradient "
        f"reads its input from memory and writes its result back. PyTorch's six passes take {us(rows['library']):,.0f} µs, the time of "
        f"{us(rows['library']) / pass_us():.1f} passes at the rate of a copy. The count of six takes each input of an operation "
        "once. A kernel that goes over a long row several times moves more than that, and the time suggests that PyTorch's "
        f"kernels do. PyTorch holds {rows['library'].peak_bytes / tensor:.0f} tensors besides the logits. "
        f"`torch.compile` saves tensors and passes. It holds {rows['compile'].peak_bytes / tensor:.0f} tensor, the gradient, "
        f"and its loss alone takes the time of {compiled:.1f} passes, where PyTorch's takes "
        f"{us(forward['library']) / pass_us():.1f}. With an online sum one pass is enough: this course's loss alone takes "
        f"{loss:.0f} µs, {loss / pass_us():.1f} passes. Loss and gradient in two launches take "
        f"the time of {us(apart) / pass_us():.1f} passes, where three are counted. {beside}.\n\n"
        f"**And in place?** In place saves memory: {place.peak_bytes / 1e6:.2f} MB besides the logits instead of "
        f"{apart.peak_bytes / 1e9:.2f} GB. It also saves {1 - us(place) / us(apart):.0%} of the time: two passes are the least, where "
        f"two launches need three, and it takes the time of {us(place) / pass_us():.1f}. The next table counts its passes."
    )


def in_place_passes(vocabularies: Sequence[int] = (4096, *(shape[1] for shape in (SHORT, SHAPE)))) -> dict[int, float]:
    """Passes that this course's kernel makes in place, reads and writes together, by the length of a row: counted on one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, scale = torch.zeros(1, dtype=torch.int64, device=device), torch.ones((), device=device)
    found = {}
    for classes in vocabularies:
        x = torch.zeros(1, classes, dtype=torch.bfloat16, device=device)
        with gpukit.trace() as trace:
            cross_entropy_fwd(x, target, -100, 0.0, 0.0, scale=scale)
        (launch,) = trace.launches  # without what the CPU looks at before, which is not done where there is a GPU
        found[classes] = (launch.load_bytes + launch.store_bytes) / x.nbytes
    return found


def in_place_table(found: Mapping[int, float]) -> Table:
    rows = []
    for classes, passes in found.items():
        there = took("cross_entropy", "fwd", (M, classes)).get("gpukit-inplace")
        worth = us(there) / pass_us((M, classes)) if there else None
        rows.append((f"{classes:,}", passes, us(there) if there else None, worth))
    columns = {"V": "", "counted": "passes", "measured": "µs", "worth": "passes"}
    formats = {"counted": ".2f", "measured": ",.0f", "worth": ".1f"}
    caption = f"this course in place, {M:,} rows: the launch that computes loss and gradient"
    return style.table(columns, rows, formats=formats, caption=caption)


def what_in_place_does(found: Mapping[int, float]) -> Markdown:
    """Said below the table of passes by length."""
    short, long = both(SHORT), took("cross_entropy", "fwd", SHAPE)
    if not short:
        return _NOTHING
    launch, kept = (
        took("cross_entropy", "fwd", SHORT)["gpukit-inplace"],
        results.long_rows("h200")["cross-entropy in place", SHAPE],
    )
    return Markdown(
        f"**What you saw.** Two passes are what a row of 4,096 logits takes: it stays in registers between its loss and its "
        f"gradient, as in your `loss_and_gradient_kernel`. A row of {V:,} does not fit. The kernel for every GPU, which was counted "
        "here, reads it once for the log-sum-exp and a second time for the gradient; only the block that it read last is still in "
        f"registers. So {found[V]:.2f} passes are counted. It reads the row backwards the second time, so that what was read last "
        "is needed first and may still be in the L2 cache.\n\n"
        f"For rows of {V:,} another kernel was timed, which the course runs on an H200. Several programs share a row, "
        "and each keeps its part ([09 Softmax](09_softmax.ipynb) has a picture of that), so that two passes are enough. The fastest "
        f"kernel of this kind takes {kept.kept:.0f} µs there (measured). The course's takes {us(long['gpukit-inplace']):.0f} µs in the table, "
        f"the time of {us(long['gpukit-inplace']) / pass_us():.1f} passes at the rate of a copy; it also has to compute two "
        "exponentials per logit.\n\n"
        f"For {SHORT[1]:,} classes the first table shows another limit. There the call in place takes "
        f"{us(short['gpukit-inplace']):.0f} µs and two launches {us(short['gpukit']):.0f}, but the launch in place takes "
        f"{us(launch):.0f}. The rest is the CPU's time: the benchmark marked the call *{short['gpukit-inplace'].note}*, which "
        "means that the GPU waited for the CPU ([04 Benchmarking](04_benchmarking.ipynb))."
    )


def linear() -> Table | Markdown:
    """The last layer with its loss and all gradients, by provider: time and memory."""
    rows = linear_rows()
    if not rows:
        return Markdown("No run is recorded: `gpukit bench linear_cross_entropy` makes one where there is a GPU.")
    named = {
        "library": "PyTorch",
        "compile": "torch.compile",
        "liger-triton": "Liger in Triton",
        "gpukit": "this course",
    }
    lines = [(said, rows[name].median_ms, rows[name].peak_bytes / GIB) for name, said in named.items()]
    columns = {"provider": "", "time": "ms", "most memory": "GiB"}
    caption = f"measured on an NVIDIA H200, {benchmark.when(rows[name] for name in named)}: last layer and loss with gradients, {by(LINEAR)}, bfloat16"
    return style.table(columns, lines, formats={"time": ".1f", "most memory": ".2f"}, caption=caption)


def chunk_ms(tokens: int) -> float:
    """The sum over chunks of so many tokens of dweight: read and written once per chunk, at the rate of a copy."""
    total, width, _ = LINEAR
    return results.copy_us("linear_cross_entropy", 2 * 2 * V * width * (total // tokens)) / 1e3


def what_linear_says() -> Markdown:
    rows = linear_rows()
    if not rows:
        return Markdown("")
    theirs, ours = rows["library"], rows["gpukit"]
    products = ours.flops / gpu("h200").peak("bf16") * 1e3
    taken = chunk_tokens(LINEAR[0], V, LINEAR[1])
    return Markdown(
        f"**What you saw.** Chunks save memory: they hold {ours.peak_bytes / GIB:.2f} GiB instead of {theirs.peak_bytes / GIB:.2f}. This course takes "
        f"{ours.median_ms:.1f} ms, PyTorch {theirs.median_ms:.1f} and `torch.compile` {rows['compile'].median_ms:.1f}. The three products need {products:.1f} ms at the peak of the tensor cores (computed) "
        "whichever way you go, so the loss is a small part of this. What chunks add is traffic: the weight's gradient is a "
        f"sum over all chunks, so it is read and written once per chunk. With {CHUNK:,} tokens in a chunk this traffic takes "
        f"{chunk_ms(CHUNK):.1f} ms at the rate of a copy (computed) unless it overlaps with the products. So this course takes "
        f"{taken:,} tokens at a time, whose logits take as much memory as that gradient, and the traffic takes "
        f"{chunk_ms(taken):.1f} ms. Liger holds the least, {rows['liger-triton'].peak_bytes / GIB:.2f} GiB, and "
        f"takes longest. Whether "
        "the trade pays depends on what you do with the memory, such as a larger batch; [17 Capstone](17_capstone.ipynb) "
        "measures it."
    )


def kl() -> Table | Markdown:
    """KL divergence and its gradient, by provider, in two dtypes."""
    wide, narrow = kl_rows()
    if not wide:
        return Markdown("No run is recorded: `gpukit bench kl_div` makes one where there is a GPU.")
    named = {name: said for name, said in NAMES.items() if name in wide}
    named["gpukit"] = "this course"
    least = (results.copy_us("kl_div", next(iter(rows.values())).bytes) for rows in (wide, narrow))
    lines = [("model: three reads, one write", *least)]
    lines += [(said, us(wide[name]), us(narrow[name]) if name in narrow else None) for name, said in named.items()]
    days = benchmark.when([*wide.values(), *narrow.values()])
    caption = f"measured on an NVIDIA H200, {days}: divergence and gradient, {by(KL_SHAPE)}"
    return style.table(
        {"provider": "", "float32": "µs", "bfloat16": "µs"}, lines, caption=caption,
        formats=dict.fromkeys(("float32", "bfloat16"), ",.0f"),
    )  # fmt: skip


def what_kl_says() -> Markdown:
    wide, narrow = kl_rows()
    if not wide:
        return Markdown("")
    share = {
        name: results.copy_us("kl_div", rows["gpukit"].bytes) / us(rows["gpukit"])
        for name, rows in (("wide", wide), ("narrow", narrow))
    }
    forward = took("kl_div", "fwd", KL_SHAPE)["gpukit"]
    backward = us(narrow["gpukit"]) - us(forward)
    return Markdown(
        f"**What you saw.** Three reads and one write are all that this course's kernels need, and in float32 they run at "
        f"{share['wide']:.0%} of the rate of a copy. PyTorch takes {us(wide['library']) / us(wide['gpukit']):.1f} times as long, "
        f"and holds {wide['library'].peak_bytes / (4 * math.prod(KL_SHAPE)):.0f} tensors of that size on the way; `torch.compile` "
        f"takes {us(wide['compile']) / us(wide['gpukit']):.2f} times as long. The exception is bfloat16: half the bytes do not take half "
        f"the time, and the share of a copy's rate is {share['narrow']:.0%}. The time is lost in the forward pass. It takes "
        f"{us(forward):.0f} µs, where its bytes take {results.copy_us('kl_div', forward.bytes):.0f}; the other {backward:.0f} µs "
        "are the backward pass, which runs at the speed of a copy. A likely reason is the logarithm of each element, which only "
        "the forward pass computes and which costs the same whatever an element's size is; no row here measures it by itself."
    )


def yours() -> Markdown:
    """What the learner's two launches move, in passes over x."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mine = gpukit.exercise("losses")
    x, target = torch.randn(8, 1000, device=device), torch.arange(8, device=device)
    try:
        with gpukit.trace() as trace:
            loss, lse = mine.cross_entropy(x, target, BLOCK_V=256)
            mine.cross_entropy_backward_(x, target, lse, torch.ones_like(loss), BLOCK_V=256)
    except Exception as error:
        return Markdown(
            f"Your kernels do not run yet ({type(error).__name__}): fill the gaps, then run this cell again."
        )
    return Markdown(
        f"Your two launches make **{trace.bytes / x.nbytes:.2f} passes** over x (counted); a pass over {by(SHAPE)} logits takes "
        f"{pass_us():.0f} µs at the rate of a copy (computed)."
    )


# ---- the running story -----------------------------------------------------------------------------------------------


def layer_line() -> Markdown:
    """The loss after the last layer, beside one layer's forward pass."""
    rows = both()
    held = linear_rows()
    if not (rows and held):
        return _NOTHING
    times = layer.TOKENS // M
    theirs, ours = (times * rows[name].median_ms for name in ("library", "gpukit-inplace"))
    whole = layer.totals_us()[1] / 1e3
    return Markdown(
        f"Llama 3 8B, {layer.TOKENS:,} tokens in bfloat16 on an H200: the loss of the logits and their gradient take "
        f"**{theirs:.1f} ms** with PyTorch and **{ours:.1f} ms** in place ({times} times the measured time of {M:,} tokens). The "
        f"forward pass of one of its 32 layers takes {whole:.1f} ms with the kernels of this course (a sum of measured times). "
        f"So the loss costs {theirs / whole:.0%} of a layer's forward pass with PyTorch, and {ours / whole:.0%} in place. Memory is "
        f"the larger gain: for {LINEAR[0]:,} tokens the last layer and its loss hold **{held['library'].peak_bytes / GIB:.2f} GiB** with PyTorch and "
        f"**{held['gpukit'].peak_bytes / GIB:.2f} GiB** in chunks (measured)."
    )
