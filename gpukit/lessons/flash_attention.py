"""What notebook 13 shows: what the formula moves, states that merge, the walk over blocks, masks, gradients, and times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache

import torch
from IPython.display import Markdown
from torch import Tensor

import gpukit
from gpukit import benchmark, live
from gpukit.accounting.attention import Blocks
from gpukit.accounting.models import preset
from gpukit.hardware import gpu
from gpukit.kernels.flash_attention import UNLIMITED, Config, flash_attention_fwd
from gpukit.lessons import diagram, results
from gpukit.lessons.course_map import course_map as _map
from gpukit.reference import flash_attention as reference
from gpukit.simulator.prediction.machine import machine
from gpukit.simulator.prediction.predict import TURNS, Prediction
from gpukit.simulator.trace.tracer import Trace
from gpukit.trace_report import predict_op
from gpukit.widgets import style
from gpukit.widgets.predict import Reveal, reveal
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.versus import Missing, Versus, versus

HEADS, TOKENS, HEAD_SIZE = 16, 16_384, 128
SHAPE = (1, HEADS, TOKENS, HEAD_SIZE)  # of the promise and of the first prediction
LEAST = reference.cost(SHAPE, torch.bfloat16)  # q, k and v read once, o written once; two products
H200 = gpu("h200")
PEAK = H200.peak("bf16")
STORY_TOKENS = 8192  # of the sequence in the running story: Llama 3's context
Key = tuple[str, str, int]  # provider, mode, tokens of a sequence


def course_map() -> Picture:
    return _map("flash_attention")


# ---- recorded times --------------------------------------------------------------------------------------------------


def by_length() -> dict[Key, benchmark.Row]:
    """16,384 tokens in sequences of several lengths on an H200, by (provider, mode, length); {} without a record."""
    return {(row.provider, row.mode, row.shape[2]): row for row in results.rows("attention_by_length")}


def by_hand(op: str) -> dict[str, benchmark.Row]:
    """What `lessons.measured attention_by_hand` recorded of an operation, by provider; {} without a record."""
    return {row.provider: row for row in results.anywhere("attention_by_hand") if row.op == op}


def ms(moved: float) -> float:
    """The time of a copy that moves so many bytes."""
    return results.copy_us("softmax", moved) / 1e3


_NOTHING = Markdown("No run is recorded: `python -m gpukit.lessons.measured` makes one where there is a GPU.")


def promise() -> Markdown:
    """The result at the head of the notebook."""
    rows = by_length()
    if not rows:
        return _NOTHING
    lines, ours = rows["formula", "fwd", TOKENS], rows["gpukit", "fwd", TOKENS]
    return Markdown(
        f"Attention written as three lines of PyTorch takes **{lines.median_ms:.1f} ms** on an H200 for {HEADS} heads of "
        f"{TOKENS:,} tokens, and **{lines.peak_bytes / 1e9:.1f} GB** of memory in addition to its inputs. A FlashAttention kernel "
        f"computes the same result in **{ours.median_ms:.1f} ms** and **{ours.peak_bytes / 1e9:.2f} GB** (measured, "
        f"{benchmark.when((lines, ours))}; bfloat16, head size {HEAD_SIZE}). By the end of this notebook you will have written a "
        "kernel that computes in the same way, and you will be able to say where the difference comes from."
    )


# ---- the formula -----------------------------------------------------------------------------------------------------


def formula_traffic() -> Picture:
    """Three kernels, and what each reads from memory and writes to it."""
    with diagram.canvas(19, 7.2) as ax:
        diagram.text(ax, 0.1, 0.4, "memory (HBM)", align="left", bold=True)
        diagram.text(ax, 0.1, 6.8, "kernels, on the chip", align="left", bold=True)
        places = {
            "q": (0.4, 0.5),
            "k": (1.3, 0.5),
            "S": (4.4, 2.4),
            "P": (9.2, 2.4),
            "v": (13.6, 0.5),
            "o": (16.6, 0.5),
        }
        for name, (x, width) in places.items():
            square = name in "SP"
            colour = style.WASTE if square else style.READS if name != "o" else style.WRITES
            diagram.box(ax, x, 0.9, width, 2.4, f"{name}\nT x T" if square else name, colour, size=12 if square else 10)
        for x, width, words in (
            (0.4, 3.4, "S = q kᵀ / √D"), (6.0, 3.4, "P = softmax(S)"), (11.8, 4.2, "o = P v"),
        ):  # fmt: skip
            diagram.box(ax, x, 5.2, width, 1.0, words, "none", bold=True)
        for start, end in (((0.65, 3.3), (1.2, 5.2)), ((1.55, 3.3), (1.7, 5.2)), ((6.2, 3.3), (6.9, 5.2)),
                           ((11.0, 3.3), (12.6, 5.2)), ((13.85, 3.3), (13.9, 5.2))):  # fmt: skip
            diagram.arrow(ax, start, end, colour=style.READS)
        for start, end in (((3.2, 5.2), (4.9, 3.3)), ((8.6, 5.2), (9.8, 3.3)), ((15.4, 5.2), (16.8, 3.3))):
            diagram.arrow(ax, start, end, colour=style.WRITES)
        diagram.text(ax, 18.9, 5.6, "blue: read\nvermillion: written", align="right", size=9)
    scores = 2 * HEADS * TOKENS**2 / 1e9
    return diagram.picture(
        ax, alt="Three kernels. The first reads q and k and writes S; the second reads S and writes P; the third reads P "
            "and v and "
        f"writes o. S and P have T x T numbers for each head; for {HEADS} heads of {TOKENS:,} tokens each is {scores:.1f} "
        "GB.",
    )  # fmt: skip


def lines_table(three_lines: Trace) -> Table:
    """What each of the three lines costs: its bytes at the rate of a copy, and its product at the peak."""
    ops = [op for op in three_lines.torch_ops if op.bytes]
    product = LEAST.flops / 2 / PEAK * 1e3
    named = zip(("S = q kᵀ", "P = softmax(S)", "o = P v"), ops, (1, 0, 1), strict=True)
    rows = [(name, op.bytes / 1e9, ms(op.bytes), product * count) for name, op, count in named]
    rows.append(("together", *(sum(row[i] for row in rows) for i in (1, 2, 3))))
    columns = {"line": "", "moves": "GB", "its bytes at a copy's rate": "ms", "its product at the peak": "ms"}
    formats = dict.fromkeys(list(columns)[1:], ".2f")
    return style.table(columns, rows, caption="bytes counted, times computed for an H200", formats=formats)


def what_the_lines_say(three_lines: Trace) -> str:
    moved = three_lines.bytes
    return (
        f"**What you saw.** The three lines move {moved / 1e9:.1f} GB, {moved / LEAST.bytes:.0f} times the "
        f"{LEAST.bytes / 1e9:.2f} GB of a single kernel that reads q, k and v once and writes o once. At the rate of a copy the "
        f"{moved / 1e9:.1f} GB take {ms(moved):.1f} ms, and the two products need {LEAST.flops / PEAK * 1e3:.1f} ms at the "
        "peak "
        "of the tensor cores. So attention in three lines is *memory-bound*: the arithmetic waits for S and P to travel. "
        "The measured "
        "time at the head of this notebook is twice as long. There S is divided by √D in a kernel of its own, which adds "
        "two trips of S, and the kernels move their bytes more slowly than a copy does."
    )


def growing() -> Reveal | Markdown:
    """How many times as fast as the formula FlashAttention is, at the shortest length and at half of the longest."""
    rows = by_length()
    if not rows:
        return _NOTHING
    gains = {
        f"{n:,} tokens": rows["formula", "fwd", n].median_ms / rows["gpukit", "fwd", n].median_ms
        for n in (512, TOKENS // 2)
    }
    return reveal(
        "by-length",
        gains,
        how="measured",
        also=[_by_length_table(rows), _by_length_picture(rows), _by_length_said(rows)],
    )


def _lengths(rows: Mapping[Key, benchmark.Row]) -> list[int]:
    return sorted({length for _, _, length in rows})


def _by_length_table(rows: Mapping[Key, benchmark.Row]) -> Table:
    table = []
    for n in _lengths(rows):
        lines, cudnn, ours = (rows[name, "fwd", n] for name in ("formula", "sdpa-cudnn", "gpukit"))
        both = rows["formula", "fwd+bwd", n].median_ms / rows["gpukit", "fwd+bwd", n].median_ms
        table.append(
            (f"{n:,}", lines.median_ms, cudnn.median_ms, ours.median_ms, lines.median_ms / ours.median_ms, both,
             lines.peak_bytes / 1e9, ours.peak_bytes / 1e9)
        )  # fmt: skip
    columns = {
        "T": "", "three lines": "ms", "cuDNN": "ms", "this course": "ms", "times as fast": "", "both passes": "",
        "three lines hold": "GB", "kernel holds": "GB",
    }  # fmt: skip
    formats = dict.fromkeys(("three lines", "cuDNN", "this course"), ".2f") | dict.fromkeys(
        ("times as fast", "both passes"), ".1f"
    )
    formats |= dict.fromkeys(("three lines hold", "kernel holds"), ".2f")
    first = rows["gpukit", "fwd", TOKENS]
    caption = (
        f"measured on an {first.gpu}, {benchmark.when(rows.values())}: forward, {HEADS} heads, D = {HEAD_SIZE}, {TOKENS:,} tokens in all, no mask; "
        "both passes: times as fast, forward and backward together"
    )
    return style.table(columns, table, caption=caption, formats=formats)


def _by_length_picture(rows: Mapping[Key, benchmark.Row]) -> Picture:
    lengths = _lengths(rows)
    kinds = (
        ("formula", "three lines", style.NEUTRAL),
        ("sdpa-cudnn", "cuDNN", style.PEER),
        ("gpukit", "this course", style.COMPUTE),
    )
    with style.use():
        fig, ax = style.figure(height=3.2)
        for i, (name, _, colour) in enumerate(kinds):
            for at, n in enumerate(lengths):
                ax.bar(at + (i - 1) * 0.27, rows[name, "fwd", n].median_ms, 0.25, color=colour)
        handles = [ax.bar(0, 0, color=colour, label=said) for _, said, colour in kinds]
        ax.legend(handles=handles, loc="upper left")
        ax.set_xticks(range(len(lengths)), [f"{TOKENS // n} x {n:,}" for n in lengths])
        style.axes(ax, x="texts x tokens", y="time (ms)", grid="y")
    said = "; ".join(
        f"{n:,} tokens: " + ", ".join(f"{say} {rows[p, 'fwd', n].median_ms:.2f} ms" for p, say, _ in kinds)
        for n in lengths
    )
    return style.picture(fig, alt=f"Time of attention over 16,384 tokens by length of a text. {said}.")


def _lines_rate(row: benchmark.Row) -> float:
    """TB/s of the three lines: S / √D is a kernel too, so S and P make six trips; q, k, v and o make one each."""
    square = 2 * HEADS * TOKENS * row.shape[2]  # bytes of S, of all texts
    return (6 * square + LEAST.bytes) / row.median_ms / 1e9


def _by_length_said(rows: Mapping[Key, benchmark.Row]) -> str:
    gains = {n: rows["formula", "fwd", n].median_ms / rows["gpukit", "fwd", n].median_ms for n in _lengths(rows)}
    best = max(gains, key=gains.get)
    longest = max(gains)
    rate = {n: _lines_rate(rows["formula", "fwd", n]) for n in (512, best, longest)}
    growth = {
        name: rows[name, "fwd", best].median_ms / rows[name, "fwd", 512].median_ms for name in ("formula", "gpukit")
    }
    fixed = ms(LEAST.bytes)
    text = (
        f"**What you saw.** At 512 tokens the three lines take {gains[512]:.1f} times as long as this course's kernel, and at "
        f"{best:,} tokens "
        f"{gains[best]:.1f} times. The longer texts have 16 times as many scores. The kernel takes "
        f"{growth['gpukit']:.0f} times as long and not 16 times, because a part of its work does not grow with the length of a text: reading q, k "
        f"and v and writing o. At the rate of a copy that takes {fixed:.2f} ms, a large part of the kernel's "
        f"{rows['gpukit', 'fwd', 512].median_ms:.2f} ms at 512 tokens.\n\nThe three lines take {growth['formula']:.0f} times as long. They send S and P "
        "through memory in six trips, counting those of the division by √D, and the bytes of these trips grow 16 times "
        f"as well. But the kernels move them more slowly, too: at {rate[512]:.1f} TB/s for 512 tokens and at "
        f"{rate[best]:.1f} TB/s for {best:,} (bytes computed, times measured). "
    )
    if best != longest:
        text += (
            f"At {longest:,} tokens the kernel's lead is smaller again ({gains[longest]:.1f} times), since there the "
            f"three lines move {rate[longest]:.1f} TB/s. The times alone do not say why. PyTorch chooses its kernels for "
            "products and softmax by the shape; a profile as in [04 Benchmarking](04_benchmarking.ipynb) would show "
            "which ones it takes. "
        )
    return text + (
        "\n\nThe memory tells the same story. With backward the three lines hold "
        f"{rows['formula', 'fwd+bwd', TOKENS].peak_bytes / 1e9:.0f} "
        f"GB at {TOKENS:,} tokens, the kernel {rows['gpukit', 'fwd+bwd', TOKENS].peak_bytes / 1e9:.2f}. cuDNN is NVIDIA's "
        "library of kernels; "
        "its attention is a FlashAttention too. At 512 tokens it is faster than this course's."
    )


def rounding_errors() -> tuple[float, float]:
    """How far o of three lines and of a kernel is off in bfloat16, relative to o, as root mean squares: each rounding is
    written out, and all else is float64. One head of 512 tokens."""

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    generator, scale = torch.Generator().manual_seed(0), 1 / math.sqrt(HEAD_SIZE)
    q, k, v = rounded(torch.randn(3, 512, HEAD_SIZE, dtype=torch.float64, generator=generator))
    s = q @ k.T
    exact = torch.softmax(s * scale, -1) @ v
    lines = rounded(rounded(torch.softmax(rounded(rounded(s) * scale), -1)) @ v)
    p = torch.exp((s - s.amax(-1, keepdim=True)) * scale)
    kernel = rounded(rounded(p) @ v / p.sum(-1, keepdim=True))
    return tuple(float((o - exact).norm() / exact.norm()) for o in (lines, kernel))


def what_rounding_costs() -> Markdown:
    lines, kernel = rounding_errors()
    return Markdown(
        "The three lines are less accurate, too. They store S, S / √D and P in bfloat16, so every score is rounded twice "
        "and every weight once. The kernel keeps its scores in float32. Besides o it rounds only the exponentials, for the product "
        f"with v. For one head of 512 tokens o is off by {lines:.2%} with the three lines and by {kernel:.2%} with the "
        "kernel (root mean square, computed with each rounding written out)."
    )


# ---- states ----------------------------------------------------------------------------------------------------------

LEFT, RIGHT = (1.0, 3.0), (2.0, 5.0)  # scores of two keys each, of the picture


def merging() -> Picture:
    """Two sums of exponentials relative to different maxima, brought to the larger one and stacked."""
    low, high = max(LEFT), max(RIGHT)
    factor = math.exp(low - high)
    own = [math.exp(s - low) for s in LEFT]
    other = [math.exp(s - high) for s in RIGHT]
    with style.use():
        fig, ax = style.figure(width=9.0, height=3.6)
        bars = (
            (0, own, style.READS, f"keys 1 and 2\nrelative to {low:g}"),
            (1, other, style.WRITES, f"keys 3 and 4\nrelative to {high:g}"),
            (2.6, [x * factor for x in own], style.READS, f"keys 1 and 2\nrelative to {high:g}"),
        )
        for x, parts, colour, words in bars:
            _stack(ax, x, parts, colour)
            ax.text(x, -0.1, words, ha="center", va="top")
        _stack(ax, 3.6, [x * factor for x in own], style.READS)
        _stack(ax, 3.6, other, style.WRITES, bottom=factor * sum(own))
        tops = ((0, sum(own)), (1, sum(other)), (2.6, factor * sum(own)), (3.6, factor * sum(own) + sum(other)))
        for x, top in tops:
            ax.text(x, top + 0.03, f"l = {top:.3f}", ha="center", va="bottom", weight="bold")
        ax.text(3.6, -0.1, f"all four keys\nrelative to {high:g}", ha="center", va="top")
        ax.annotate("", (2.2, 0.6), (1.45, 0.6), arrowprops={"arrowstyle": "-|>", "lw": 2, "color": style.INK})
        ax.text(1.82, 0.7, f"times e^({low:g} - {high:g})\n= {factor:.3f}", ha="center", va="bottom")
        ax.set_xlim(-0.6, 4.2)
        ax.set_ylim(-0.35, 1.6)
        ax.axis("off")
    total = sum(other) + factor * sum(own)
    return style.picture(
        fig, alt=f"The sum of keys 1 and 2, {sum(own):.3f} relative to their maximum {low:g}, shrinks by e^({low:g} - "
            f"{high:g}) to "
        f"{factor * sum(own):.3f}. Then it stands on the same scale as the sum of keys 3 and 4, {sum(other):.3f} relative "
        f"to {high:g}, "
        f"and both stack to {total:.3f}.",
    )  # fmt: skip


def _stack(ax, x: float, parts: Iterable[float], colour: str, bottom: float = 0.0) -> None:
    for part in parts:
        ax.bar(x, part, 0.62, bottom=bottom, color=colour, edgecolor="white", linewidth=1.5)
        if part > 0.12:
            ax.text(x, bottom + part / 2, f"{part:.3f}", ha="center", va="center", color="white")
        bottom += part


def merged(found: Mapping[str, tuple[float, float, float]], softmax: float) -> Table:
    """States of the same keys, and what follows from each: o and LSE. softmax: what PyTorch says o is."""
    rows = [(name, m, l, acc, acc / l, m + math.log(l)) for name, (m, l, acc) in found.items()]
    columns = dict.fromkeys(("order", "m", "l", "acc", "o = acc / l", "LSE"), "")
    caption = f"computed; torch.softmax gives o = {softmax:.6f}"
    return style.table(columns, rows, caption=caption, formats=dict.fromkeys(columns, ".6f") | {"order": ""})


# ---- block by block --------------------------------------------------------------------------------------------------


def walk() -> Picture:
    """One program: its queries and their states stay on the chip, blocks of keys and values come one after the other."""
    with diagram.canvas(18, 7.4) as ax:
        diagram.text(ax, 0.2, 0.4, "memory (HBM)", align="left", bold=True)
        for row, name in enumerate(("k", "v")):
            for j in range(6):
                colour = style.READS if j == 2 else diagram.PALE
                diagram.box(ax, 0.4 + 1.5 * j, 0.8 + 1.1 * row, 1.5, 1.0, f"{name}, block {j}", colour, size=8.5)
        diagram.box(ax, 11.4, 0.8, 2.6, 2.1, "q\nall blocks", diagram.PALE)
        diagram.box(ax, 14.6, 0.8, 2.6, 2.1, "o and LSE", diagram.PALE)
        diagram.box(ax, 0.2, 4.2, 17.4, 3.0, "", "none")
        diagram.text(ax, 4.6, 4.6, "one program, on an SM", align="left", bold=True)
        diagram.box(ax, 0.8, 5.2, 3.2, 1.5, "block of k and v,\nnow block 2", style.READS)
        diagram.box(ax, 4.6, 5.2, 3.6, 1.5, "scores\nBLOCK_M x BLOCK_N", style.WASTE)
        diagram.box(ax, 8.8, 5.2, 3.2, 1.5, "its block\nof q", diagram.PALE)
        diagram.box(ax, 13.0, 5.2, 4.0, 1.5, "m, l and acc\nof its queries", style.COMPUTE)
        diagram.arrow(ax, (4.1, 2.95), (2.6, 5.2), "", style.READS)
        diagram.text(ax, 4.0, 3.6, "block after block", align="left", size=9, color=style.READS)
        diagram.arrow(ax, (12.4, 2.95), (10.6, 5.2))
        diagram.text(ax, 11.3, 3.6, "once", align="right", size=9)
        diagram.arrow(ax, (15.0, 5.2), (15.9, 2.95), "", style.WRITES)
        diagram.text(ax, 15.2, 3.6, "once, at the end", align="right", size=9, color=style.WRITES)
    return diagram.picture(
        ax, alt="A program loads its block of q once. It loads the blocks of k and v one after the other, computes one "
            "block of scores, "
        "and updates m, l and acc of its queries. At the end it writes o and LSE once. Scores never go to memory.",
    )  # fmt: skip


def peak_memory(flash: object) -> Table:
    """What three lines and the function `flash` hold beside q, k and v, at three lengths; counted."""
    rows = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for tokens in (64, 128, 256):
        q, k, v = (torch.randn(1, 2, tokens, 64, device=device) for _ in range(3))
        with live.watch() as lines:
            torch.softmax(q @ k.mT / 8, -1) @ v
        with live.watch() as ours:
            flash(q, k, v)
        rows.append((tokens, lines.peak_bytes, ours.peak_bytes))
    columns = {"T": "", "three lines": "bytes", "this course": "bytes"}
    return style.table(columns, rows, caption="counted: memory besides q, k and v; 2 heads, D = 64, float32")


_BY_HAND = {"blocks": "attention_tiles, blocks of 128", "formula": "three lines", "gpukit": "this course"}


def in_blocks() -> Table | Markdown:
    """One head in float32 by the solution of flash_attention.tiles, by three lines and by the course's kernel, as it was measured."""
    rows = by_hand("attention_in_blocks")
    if not rows:
        return _NOTHING
    lines = [(name, rows[each].median_ms, rows[each].peak_bytes / 1e6) for each, name in _BY_HAND.items()]
    caption = f"measured on an {results.short(rows['blocks'])}: one head of 4,096 tokens in float32, D = 128; memory besides q, k and v"
    return style.table(
        {"": "", "time": "ms", "memory": "MB"}, lines, caption=caption, formats={"time": ".2f", "memory": ".1f"}
    )


def what_blocks_cost() -> Markdown:
    rows = by_hand("attention_in_blocks")
    if not rows:
        return _NOTHING
    blocks, lines, kernel = (rows[each] for each in _BY_HAND)
    pairs = (4096 // 128) ** 2
    return Markdown(
        "**What you saw.** Holding fewer bytes does not save time by itself. The walk over blocks holds "
        f"{blocks.peak_bytes / 1e6:.1f} MB where the three lines hold {lines.peak_bytes / 1e6:.0f}, and it takes "
        f"{blocks.median_ms / lines.median_ms:.0f} times as long. There are 32 blocks of queries and 32 of keys, {pairs:,} pairs, "
        "and each step for a pair is a small kernel of its own: about a dozen launches and "
        f"{1e3 * blocks.median_ms / pairs:.0f} µs per pair. Every one of these kernels reads from memory and writes to it again, "
        "and most of the time the GPU probably waits for the next launch.\n\n"
        f"The course's kernel takes the whole walk in one launch, in {kernel.median_ms:.2f} ms. Here the three lines are still faster: in "
        "float32 there are no tensor cores for the products, the course's blocks then have only 16 queries, and cuBLAS multiplies "
        "better. In bfloat16 the kernel wins, as the head of this notebook says."
    )


def reuse() -> Table:
    """The course's kernel for one head of 4,096 tokens with blocks of queries of several sizes: what it loads, and from where."""
    q, k, v = torch.empty(3, 1, 1, 4096, 128, dtype=torch.bfloat16, device="meta")
    rows = []
    for size in (32, 64, 128):
        with gpukit.trace(sample=2) as trace:
            flash_attention_fwd(
                q, k, v, UNLIMITED, UNLIMITED, 1.0, "ieee", config=Config(size, 64, num_warps=8, num_stages=2)
            )
        launch = trace.launches[0]
        read = launch.traffic("h200", compiled=False).dram_read_bytes
        rows.append((size, launch.load_bytes / 2**20, read / 2**20, launch.flops / launch.load_bytes))
    columns = {"BLOCK_M": "", "loaded by programs": "MiB", "from memory": "MiB", "FLOPs per byte loaded": ""}
    return style.table(
        columns, rows, caption="loads counted, memory modelled for an H200; one head of 4,096 tokens, D = 128, bfloat16"
    )


def what_reuse_says() -> Markdown:
    l2 = machine(H200).l2_gbps
    return Markdown(
        "**What you saw.** A block of queries that is twice as large halves the loads, because each key that is loaded "
        "serves twice "
        "as many queries: with 32 queries per program 4,096 / 32 = 128 programs load each key, with 128 queries only 32 "
        "do. "
        "From memory each byte comes only once in all three cases: k and v of a head are 2 MiB, and they "
        "stay in "
        f"the L2 cache while the programs of the head run. So the question is how fast L2 is. It delivers {l2:,.0f} GB/s "
        "on an "
        f"H200 (measured), and the tensor cores do {PEAK / 1e12:.0f} TFLOP/s at their peak. To keep them busy a program "
        "must do at "
        f"least {PEAK / 1e12:.0f} / {l2 / 1e3:.1f} = {PEAK / l2 / 1e9:.0f} FLOPs per byte. Only the blocks of 128 queries "
        "do. That is why "
        "FlashAttention kernels for this GPU hold 128 queries or more."
    )


# ---- masks -----------------------------------------------------------------------------------------------------------

_KINDS = {
    "full": ("no mask needed", style.COMPUTE),
    "cut": ("mask needed", style.WASTE),
    "none": ("left out", diagram.PALE),
}


def block_kinds() -> Picture:
    """Which blocks of scores are whole, cut or left out, for three rules."""
    views = (
        ("causal", Blocks(16, 16, 4, 2, causal=True)),
        ("causal, 8 queries, 16 keys", Blocks(8, 16, 4, 2, causal=True)),
        ("causal, window of 6", Blocks(16, 16, 4, 2, causal=True, window=6)),
    )
    counts = []
    with style.use():
        fig, panels = style.figure(1, 3, width=10.0, height=3.6)
        for ax, (name, blocks) in zip(panels, views, strict=True):
            blocks_of = blocks.count()
            counts.append(f"{name}: {blocks_of['full']} whole, {blocks_of['cut']} cut, {blocks_of['none']} left out")
            for i in range(blocks.rows):
                for j in range(blocks.columns):
                    colour = _KINDS[blocks.kind(i, j)][1]
                    ax.bar(2 * j + 1, 3.7, 1.8, bottom=4 * i + 0.15, color=colour)
            for query in range(blocks.T_q):
                keys = blocks.keys(query)
                ax.plot([keys.start, keys.stop], [query + 0.5] * 2, color=style.INK, lw=0.8)
            ax.set_title(name, fontsize=10)
            ax.set_xlim(-0.3, 16.3)
            ax.set_ylim(16.3, -0.3)
            ax.set_aspect("equal")
            ax.set_xticks(range(0, 17, 4))
            ax.set_yticks(range(0, 17, 4))
            style.axes(ax, x="key", y="query" if ax is panels[0] else "")
        handles = [panels[0].bar(0, 0, color=colour, label=said) for said, colour in _KINDS.values()]
        fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return style.picture(
        fig,
        alt="Blocks of 4 queries and 2 keys; thin lines show the keys that each query sees. " + "; ".join(counts) + ".",
    )


@cache
def causal_counted() -> Table:
    """What part of the scores is computed where blocks in which nothing is seen are left out."""
    rows = []
    for tokens in (256, 1024, 4096):
        for window in (None, 512):
            blocks = Blocks(tokens, tokens, 128, 64, causal=True, window=window)
            count = blocks.count()
            done = (count["full"] + count["cut"]) * 128 * 64
            needed = reference.pairs(tokens, tokens, True, window)
            rows.append((f"{tokens:,}", window or "none", *count.values(), done / tokens**2, done / needed))
    columns = {
        "T": "",
        "window": "",
        "whole": "",
        "cut": "",
        "left out": "",
        "scores computed": "",
        "computed / needed": "",
    }
    formats = {"scores computed": ".0%", "computed / needed": ".2f"}
    return style.table(
        columns, rows, caption="computed from the shapes: blocks of 128 queries and 64 keys, causal", formats=formats
    )


def what_the_masks_say() -> Markdown:
    found = {(row[0], row[1]): row[-2:] for row in causal_counted().rows}
    (short, _), (long, _), (window, surplus) = found["256", "none"], found["4,096", "none"], found["4,096", 512]
    return Markdown(
        f"**What you saw.** At T = 256, {short:.0%} of the scores are computed, where about half would do. At 4,096 it is "
        f"{long:.0%}, nearly the half that is needed. With a window of 512 at 4,096 tokens, {window:.0%} of the scores are "
        f"computed. They are {surplus:.2f} times as many as needed, because a window has two edges that cut blocks. So "
        f"{1 - 1 / surplus:.0%} of what is computed is thrown away."
    )


# ---- several texts ---------------------------------------------------------------------------------------------------

LENGTHS = (8192, 4000, 2300, 1700, 900, 700, 333, 75)


def packed() -> Picture:
    """Three texts in a padded batch and one after the other."""
    lengths, colours = (8, 5, 2), (style.READS, style.COMPUTE, style.WRITES)
    with diagram.canvas(17, 5.6) as ax:
        diagram.text(ax, 0.2, 0.4, "padded: every text takes as much room as the longest", align="left", bold=True)
        for row, (length, colour) in enumerate(zip(lengths, colours, strict=True)):
            for t in range(max(lengths)):
                real = t < length
                diagram.box(
                    ax,
                    0.2 + t,
                    0.8 + 0.8 * row,
                    1,
                    0.75,
                    "" if real else "pad",
                    colour if real else diagram.PALE,
                    size=8,
                )
        diagram.text(ax, 0.2, 3.8, "packed: one text after the other", align="left", bold=True)
        at = 0
        for length, colour in zip(lengths, colours, strict=True):
            diagram.text(ax, 0.2 + at, 5.3, f"{at}", size=9)
            for _ in range(length):
                diagram.box(ax, 0.2 + at, 4.2, 1, 0.75, "", colour)
                at += 1
        diagram.text(ax, 0.2 + at, 5.3, f"{at}", size=9)
        diagram.text(ax, 10.2, 1.6, "cu_seqlens = [0, 8, 13, 15]", align="left", code=True)
    return diagram.picture(
        ax, alt="Texts of 8, 5 and 2 tokens. Padded they take 3 x 8 places, of which 9 are padding. Packed they take 15; "
        "cu_seqlens = [0, 8, 13, 15] says where each begins.",
    )  # fmt: skip


def texts() -> dict[str, float]:
    """The share of a padded batch's scores that is real, and how many times as many bytes copies of shared heads cost."""
    real = sum(n * n for n in LENGTHS) / (len(LENGTHS) * max(LENGTHS) ** 2)
    k = torch.empty(1, 8, 8192, 128, dtype=torch.bfloat16, device="meta")
    with gpukit.trace() as repeated:
        k.repeat_interleave(4, dim=1), k.repeat_interleave(4, dim=1)  # k, and v
    once = 2 * k.numel() * 2
    return {"real scores": real, "copies": (repeated.bytes + 4 * once) / once}


def what_texts_say() -> str:
    found = texts()
    return (
        f"**What you saw.** Only {found['real scores']:.0%} of the padded batch's scores belong to real pairs of tokens; "
        "the rest is "
        f"padding compared with something. Copies of the shared heads cost {found['copies']:.0f} times the bytes of "
        "reading k and v once: "
        "each copy is written (4), the original is read for it (1), and attention then reads the copies (4). Both costs "
        "vanish with the "
        "right addresses, and that is what the exercise is about."
    )


# ---- backward --------------------------------------------------------------------------------------------------------


def backward_walk() -> Picture:
    """Which blocks of scores add to which gradient: a row of them to dq, a column to dk and dv."""
    n = 4
    with diagram.canvas(15, 7.2) as ax:
        for i in range(n):
            for j in range(n):
                colour = style.COMPUTE if j == 2 else style.READS if i == 1 else diagram.PALE
                diagram.box(ax, 4 + 1.6 * j, 1.2 + 1.1 * i, 1.6, 1.1, f"{i}, {j}", colour, size=9)
        for i in range(n):
            diagram.box(ax, 0.4, 1.2 + 1.1 * i, 2.4, 1.1, f"queries {i}", diagram.PALE, size=9)
            diagram.box(ax, 4 + 1.6 * i, 0.1, 1.6, 0.9, f"keys {i}", diagram.PALE, size=9)
        diagram.box(ax, 12.2, 2.3, 2.6, 1.1, "dq of queries 1", style.READS, size=9)
        diagram.box(ax, 6.4, 6.3, 3.2, 0.8, "dk, dv of keys 2", style.COMPUTE, size=9)
        diagram.arrow(ax, (10.5, 2.85), (12.2, 2.85), "", style.READS)
        diagram.arrow(ax, (8.0, 5.65), (8.0, 6.3), "", style.COMPUTE)
    return diagram.picture(
        ax, alt="Four blocks of queries by four blocks of keys. dq of a block of queries is a sum over its row of blocks; "
            "dk and dv of a "
        "block of keys are sums over its column.",
    )  # fmt: skip


def derivation(left: Tensor, right: Tensor) -> Table:
    """Two sides of an equation, query by query."""
    rows = [(i, float(a), float(b)) for i, (a, b) in enumerate(zip(left, right, strict=True))]
    columns = {"query": "", "sum of P dP over the keys": "", "sum of o do over D": ""}
    formats = dict.fromkeys(list(columns)[1:], ".9f")
    return style.table(columns, rows, caption="computed in float64", formats=formats)


def what_is_kept() -> Markdown:
    p, lse = 2 * HEADS * TOKENS**2 / 1e9, 4 * HEADS * TOKENS / 1e9
    return Markdown(
        f"**What you saw.** Both sums agree in all digits shown. For {HEADS} heads of {TOKENS:,} tokens the matrix P would be "
        f"{p:.1f} GB in "
        f"bfloat16. LSE, one float32 number per query, is {lse:.3f} GB, and it is all that forward has to keep besides q, "
        "k, v and o "
        "(computed)."
    )


# ---- what it costs ---------------------------------------------------------------------------------------------------

_NAMES = {"library": "SDPA", "gpukit": "this course", "sdpa-flash": "flash", "sdpa-cudnn": "cuDNN", "flex": "Flex"}


def measured(mode: str = "fwd", causal: bool = False) -> Versus | Missing:
    """This course's kernel beside PyTorch's and FlexAttention. mode: "fwd" or "bwd"."""
    return versus("flash_attention_causal" if causal else "flash_attention", mode=mode, dtype="bfloat16", names=_NAMES)


def _took(op: str, mode: str, shape: tuple[int, ...]) -> dict[str, benchmark.Row]:
    found = benchmark.rows(op)
    return {
        row.provider: row for row in found if (row.op, row.mode, row.dtype, row.shape) == (op, mode, "bfloat16", shape)
    }


def _older(back: Mapping[str, benchmark.Row]) -> str:
    """Said of the backward pass where its rows in CUDA graphs were measured before that of the call."""
    call, graph = back["gpukit"], _took("flash_attention", "bwd-graph", back["gpukit"].shape).get("gpukit")
    if graph is None or graph.date >= call.date:
        return ""
    return (
        f" (The rows in CUDA graphs are older. On {graph.date} the course's kernel for D = 128 had blocks of 32 queries and took "
        f"{graph.median_ms * 1e3:,.0f} µs for 4,096 tokens, where the call of {call.date} takes {call.median_ms * 1e3:,.0f}. So "
        "compare rows in graphs with rows in graphs, and calls with calls.)"
    )


def what_the_times_say() -> Markdown:
    """Said below the tables."""
    try:
        wide, narrow = ((4, 16, 4096, size) for size in (128, 64))
        full, causal = (_took(op, "fwd", wide)["gpukit"] for op in ("flash_attention", "flash_attention_causal"))
        small = _took("flash_attention", "fwd", narrow)["gpukit"]
        back, small_back = (_took("flash_attention", "bwd", shape) for shape in (wide, narrow))
    except (FileNotFoundError, KeyError):
        return _NOTHING
    again, before = by_length()["gpukit", "fwd", TOKENS], _took("flash_attention", "fwd", SHAPE)["gpukit"]
    peers, small_peers = (benchmark.best_peer(rows.values()) for rows in (back, small_back))
    share = {
        name: row.flops / row.median_ms / 1e-3 / PEAK
        for name, row in (("wide", full), ("narrow", small), ("back", back["gpukit"]))
    }
    return Markdown(
        f"**What you saw.** Forward, this course's kernel reaches {share['wide']:.0%} of the peak for D = 128 and 4,096 tokens. Causal attention has "
        "half of the "
        f"pairs and takes {causal.median_ms / full.median_ms:.0%} of the time, not 50%. Blocks at the diagonal are "
        "computed whole, and half "
        "of each is thrown away; besides, programs have walks of different lengths, and some SMs have nothing to do at "
        f"the end. D = 64 reaches only {share['narrow']:.0%}: every score costs one exponential, whatever D is, and "
        "with D = 64 there are half as many FLOPs of products to hide it behind.\n\nBackward, it reaches "
        f"{share['back']:.0%} of the peak at the same shape and takes {back['gpukit'].median_ms / peers.median_ms:.2f} times as long "
        f"as the best of the others; for D = 64, {small_back['gpukit'].median_ms / small_peers.median_ms:.2f} times. It computes "
        "the five products that are needed: a program has a block of keys, and adds the part of dq that comes from its keys to sums in "
        "memory, by atomic additions. For D = 128 its blocks have 64 queries, as many as registers allow. With fewer the tensor cores "
        f"would wait for shared memory, from which they fetch their operands.{_older(back)}\n\nKernels without atomics, yours among them, compute seven products, since the one for dq and the one for "
        "dk and dv each compute the scores and dP for themselves: at the same rate per product they take 1.4 times as long. "
        "Atomic additions come in another order each time, and a floating-point sum depends on the order. With "
        "`torch.use_deterministic_algorithms(True)`, and for short sequences, the course's kernels compute seven products too.\n\nSDPA takes nearly the same "
        "times as cuDNN, which is the kernel that PyTorch chooses here. Compare only times of one table. In the table by length, "
        f"measured on another day, this course's kernel takes {again.median_ms:.2f} ms for one text of {TOKENS:,} tokens and not "
        f"{before.median_ms:.2f}, and cuDNN is slower by about the same share."
    )


@cache
def _predicted() -> Prediction:
    """What the simulator says about the course's pointer kernel: causal, the size of the promise."""
    return predict_op(benchmark.operation("flash_attention_causal"), SHAPE, torch.bfloat16, H200)


def pointer_kernel() -> str:
    """The simulator's report on the course's pointer kernel."""
    return _predicted().report()


def what_limits_it() -> Markdown:
    """Said below the model's report: what the clock says beside it."""
    found = _predicted()
    least = reference.cost(SHAPE, torch.bfloat16, True).flops / PEAK * 1e3
    text = (
        f"**What you saw.** At the peak of the tensor cores the products take {least:.2f} ms. The model says "
        f"{found.time_us / 1e3:.2f} ms "
        f"for the kernel with pointers, which is built like yours. Its limit is the {found.limit}. *Taking "
        "turns* is the time in "
        "which one unit waits for another: a warp that computes exponentials does not start products at the same moment. "
        "The limit, *taking turns* and the launch add up to the whole time. "
    )
    rows = by_hand("attention_causal")
    if not rows:
        return Markdown(text)
    pointers, gluon = rows["pointers"], rows["gpukit"]
    busy_ms, turns_ms = (found.resources.get(name, 0.0) / 1e3 for name in (found.limit, TURNS))
    return Markdown(
        text
        + f"\n\n**And the clock?** On an {results.short(pointers)} the kernel with pointers takes {pointers.median_ms:.2f} ms, "
        f"and the kernel in Gluon {gluon.median_ms:.2f} ms in the same run (measured; an H100 has the SMs of an H200). The model's time "
        f"is {found.time_us / 1e3 / pointers.median_ms:.2f} times the measured one. If the {found.limit} really are busy for "
        f"{busy_ms:.2f} ms, as in the model, then at most {pointers.median_ms - busy_ms:.2f} ms of the measured time are left for "
        f"taking turns, where the report says {turns_ms:.2f} ms. The kernel in Gluon removes most of this waiting: one warp fetches, and two groups of "
        "warps take turns on purpose, so that the exponentials of one run beside the products of the other."
    )


def yours() -> Markdown:
    """How often the learner's kernel reads k and v, and its time where there is a GPU."""
    from gpukit.kernels import flash_attention
    from gpukit.timing import time_ms

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mine, x = gpukit.exercise("flash_attention"), torch.randn(2, 96, 64).half().to(device)
    try:
        with gpukit.trace() as trace:
            mine.attention(x, x, x)
        times = (trace.launches[0].load_bytes - x.nbytes) / (2 * x.nbytes)
        text = f"Your kernel reads k and v **{times:g} times** for 96 queries, once per block of 32 (counted)."
        if device == "cuda":
            x = torch.randn(16, 4096, 128, dtype=torch.bfloat16, device=device)
            text += f" 16 heads, 4,096 tokens, measured here: {time_ms(mine.attention, x, x, x)}; "
            text += f"the course's: {time_ms(flash_attention, x[None], x[None], x[None])}."
    except Exception as error:
        text = f"Your kernel does not run yet ({type(error).__name__}): fill the gaps, then run this cell again."
    return Markdown(text)


# ---- the running story -----------------------------------------------------------------------------------------------


def layer_bytes() -> tuple[float, float]:
    """What attention of one layer of Llama 3 8B moves for one sequence in bfloat16: three lines, one kernel."""
    c, t = preset("llama3-8b"), STORY_TOKENS
    own = 2 * t * c.head_size * (2 * c.heads + 2 * c.kv_heads)  # q and o, k and v
    return own + 4 * 2 * c.heads * t * t, own


def layer_line() -> Markdown:
    """The line of the layer's budget that this notebook improves."""
    lines, kernel = layer_bytes()
    c, t = preset("llama3-8b"), STORY_TOKENS
    products = 4 * c.heads * reference.pairs(t, t, True) * c.head_size / PEAK * 1e3
    return Markdown(
        f"One layer of Llama 3 8B, one sequence of {t:,} tokens, in bfloat16: attention in three lines moves "
        f"**{lines / 1e9:.1f} GB**, "
        f"which takes **{ms(lines):.1f} ms** at the rate of a copy. One kernel moves **{kernel / 1e9:.2f} GB**, which "
        "takes "
        f"**{ms(kernel):.2f} ms**, less than the {products:.1f} ms that its causal products need at the peak (all "
        "computed). With one kernel, memory no longer limits attention."
    )
