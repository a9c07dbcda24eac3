"""What notebook 00 shows: a GPU and the four kinds of numbers as diagrams, traffic and least times, the course and its hours."""

from __future__ import annotations

from IPython.display import Markdown

from gpukit import benchmark
from gpukit.accounting import models
from gpukit.grading.registry import catalog
from gpukit.hardware import GPUS, gpu
from gpukit.lessons import diagram, results
from gpukit.lessons.course_map import course_map as _map
from gpukit.validation import halves, unseen
from gpukit.widgets import style
from gpukit.widgets.style import Picture, Table

H200 = gpu("h200")
ROWS = COLUMNS = 4096
BLOCK = 16_384  # elements of a program of the notebook's ReLU kernel


def course_map() -> Picture:
    return _map("start")


# ---- the GPU ---------------------------------------------------------------------------------------------------------


def inside_a_gpu() -> Picture:
    """The memories of an H200 and what computes, from the CPU on the left to the registers on the right."""
    registers = H200.registers_per_sm * 4 // 1024
    with diagram.canvas(20, 8.4) as ax:
        diagram.box(ax, 0, 3.2, 2.5, 2.2, "CPU\nruns Python,\nlaunches\nkernels")
        diagram.arrow(ax, (2.5, 4.3), (3.9, 4.3), "launch")
        diagram.box(ax, 3.9, 0.2, 16.0, 8.0, "", "none", dashed=True)
        diagram.text(ax, 4.2, 0.65, f"GPU ({H200.name})", align="left", bold=True)
        diagram.box(
            ax, 4.3, 1.2, 3.0, 6.6, f"HBM\nmain memory\n\n{H200.hbm_bytes / 1e9:.0f} GB", style.READS, bold=True
        )
        diagram.arrow(ax, (7.3, 4.5), (9.9, 4.5), both=True, width=4, colour=style.READS)
        diagram.text(ax, 8.6, 3.95, f"{H200.hbm_gbps:,} GB/s", size=9)
        diagram.text(ax, 8.6, 5.05, "the slow part", size=9)
        diagram.box(ax, 9.9, 1.2, 2.2, 6.6, f"L2 cache\n\n{H200.l2_bytes / 2**20:.0f} MiB", style.PEER, bold=True)
        for y in (1.2, 3.3, 5.4):
            diagram.arrow(ax, (12.1, y + 0.9), (13.0, y + 0.9), both=True)
            diagram.box(ax, 13.0, y, 6.6, 1.9)
            diagram.text(ax, 13.35, y + 0.95, "SM", bold=True)
            diagram.box(
                ax,
                13.75,
                y + 0.15,
                2.0,
                1.6,
                f"shared\nmemory\n{H200.smem_per_sm_bytes // 1024} KiB",
                style.PEER,
                size=8,
            )
            diagram.box(ax, 15.7, y + 0.15, 1.8, 1.6, f"registers\n{registers} KiB", style.YOURS, size=8)
            diagram.box(ax, 17.45, y + 0.15, 2.0, 1.6, "arithmetic,\ntensor\ncores", style.COMPUTE, size=8)
        diagram.text(ax, 16.3, 7.6, f"... {H200.sms} SMs in all", size=9)
    return diagram.picture(
        ax, alt=f"The CPU launches kernels on the GPU. In an H200, HBM ({H200.hbm_bytes / 1e9:.0f} GB) is joined at "
        f"{H200.hbm_gbps:,} GB/s to an L2 cache of {H200.l2_bytes / 2**20:.0f} MiB, and that to {H200.sms} SMs. Each SM "
        "has "
        f"{H200.smem_per_sm_bytes // 1024} KiB of shared memory, {registers} KiB of registers, and the units that compute.",
    )  # fmt: skip


def kinds_of_numbers() -> Picture:
    """Where the four kinds of numbers come from, one line each."""
    lines = (
        ("shapes, formats,\ndata sheets", "arithmetic", "computed", style.NEUTRAL, "exact; nothing runs"),
        ("your kernel\non the CPU", "interpreter, traced", "counted", style.READS, "exact; the same everywhere"),
        ("counts and\ndata sheets", "simulator of a GPU", "modelled", style.WASTE, "an estimate; no GPU needed"),
        (
            "your kernel\non a named GPU",
            "clock, counters",
            "measured",
            style.COMPUTE,
            "varies a little from run to run",
        ),
    )
    with diagram.canvas(19, 6.4) as ax:
        for i, (source, how, name, colour, remark) in enumerate(lines):
            y = 0.2 + 1.55 * i
            diagram.box(ax, 0, y, 4.0, 1.3, source)
            diagram.arrow(ax, (4.1, y + 0.65), (8.6, y + 0.65), how)
            diagram.box(ax, 8.7, y, 3.2, 1.3, name, colour, bold=True)
            diagram.text(ax, 12.2, y + 0.65, remark, align="left")
    return diagram.picture(
        ax, alt="Computed: from shapes, formats and data sheets by arithmetic. Counted: your kernel runs in the "
            "interpreter on "
        "the CPU and is traced. Modelled: from counts and data sheets by a simulator. Measured: by a clock on a named GPU.",
    )  # fmt: skip


def programs() -> Picture:
    """How the programs of a launch share the elements of x, the last of which is not full."""
    widths = (3.0, 3.0, 3.0, 3.0, 1.6)
    with diagram.canvas(18, 5.6) as ax:
        at = 1.6
        for name, y in (("x", 0.3), ("y", 4.3)):
            diagram.text(ax, 1.2, y + 0.5, name, bold=True, code=True)
        for i, width in enumerate(widths):
            name = ("program 0", "program 1", "program 2", "...", "last program")[i]
            diagram.box(
                ax, at, 0.3, width, 1.0, f"{BLOCK:,}" if i < 3 else "..." if i == 3 else "rest", style.READS, size=9
            )
            diagram.box(ax, at, 2.3, 3.0, 1.0, name, style.YOURS)
            diagram.box(
                ax, at, 4.3, width, 1.0, f"{BLOCK:,}" if i < 3 else "..." if i == 3 else "rest", style.WRITES, size=9
            )
            middle = at + width / 2
            diagram.arrow(ax, (middle, 1.3), (middle, 2.3), "load" if i == 0 else "", style.READS)
            diagram.arrow(ax, (middle, 3.3), (middle, 4.3), "store" if i == 0 else "", style.WRITES)
            if i == 4:
                diagram.box(ax, at + width, 0.3, 3.0 - width, 1.0, "masked", dashed=True, size=8)
                diagram.box(ax, at + width, 4.3, 3.0 - width, 1.0, "masked", dashed=True, size=8)
            at += 3.1
    return diagram.picture(
        ax, alt=f"x is cut into blocks of {BLOCK:,} elements. Program 0 loads the first block and stores its result into "
            "the same "
        "place of y, program 1 the second, and so on. The last program has fewer elements; its other places are masked.",
    )  # fmt: skip


# ---- bytes and times -------------------------------------------------------------------------------------------------


def _softmax_us() -> dict[str, float]:
    """Measured on an H200, x [4096, 4096] in float32, by provider."""
    shape = (ROWS, COLUMNS)
    found = benchmark.rows("softmax")
    return {r.provider: 1e3 * r.median_ms for r in found if (r.mode, r.dtype, r.shape) == ("fwd", "float32", shape)}


def promise() -> Markdown:
    us = _softmax_us()
    return Markdown(
        f"*Softmax* turns each row of a matrix into positive numbers that sum to one. Written as five lines of PyTorch, it "
        f"takes **{us['torch']:.0f} µs** (millionths of a second) on an H200, a GPU for data centers, for {ROWS:,} rows of "
        f"{COLUMNS:,} numbers in float32. PyTorch's own `torch.softmax` takes **{us['library']:.0f} µs**. The kernel that "
        "you "
        f"will write in [notebook 09](09_softmax.ipynb) takes **{us['gpukit']:.0f} µs** (all three measured). The "
        "arithmetic is "
        "the same in all of them. By the end of this notebook you can say where the five lines lose most of their time."
    )


def accuracy() -> Markdown:
    """How far modelled times are from measured ones."""
    judged = [row for row in unseen.rows("h100-sxm") if row.judged]
    median, most, worst = halves.deviations(judged).values()
    return Markdown(
        f"How good is the simulator? {len(judged)} kernels that were new to it were measured on an H100, and modelled only "
        f"afterwards. Half of the modelled times are within {median:.0%} of the measured ones, nine of ten are within "
        f"{most:.0%}, and the worst is off by {worst:.0%}. So wherever a measured number exists, you will see it beside the "
        "modelled one."
    )


def least_us(nbytes: float, name: str = "h200") -> float:
    """nbytes at the data sheet's rate."""
    return nbytes / gpu(name).hbm_gbps / 1e3


def least_times(nbytes: int) -> Picture:
    """The least time of a kernel that moves nbytes, for each GPU of the table."""
    found = sorted(GPUS, key=lambda each: each.hbm_gbps)
    least = [least_us(nbytes, each.key) for each in found]
    with style.use():
        fig, ax = style.figure(height=3.8)
        ax.barh([each.name for each in found], least, color=style.BOUND)
        for row, (each, us) in enumerate(zip(found, least, strict=True)):
            style.label(ax, us, row, f"{us:.0f} µs at {each.hbm_gbps:,} GB/s")
        style.axes(ax, x=f"least time for {nbytes:,} bytes, computed (µs)")
        ax.set_xlim(0, 1.35 * least[0])
    return style.picture(
        fig,
        alt=f"{nbytes:,} bytes take at least {least[0]:.0f} µs on an {found[0].name} and {least[-1]:.0f} µs on a "
        f"{found[-1].name}.",
    )


def what_the_times_say() -> Markdown:
    nbytes = 2 * ROWS * COLUMNS * 4
    copy, us = results.copy_gbps("softmax"), _softmax_us()["gpukit"]
    return Markdown(
        f"**What you saw.** The same bytes take at least {least_us(nbytes, 'l4'):.0f} µs on an L4 and "
        f"{least_us(nbytes, 'b200'):.0f} µs on a B200. A real kernel takes longer than its least time, because none "
        "reaches the "
        f"bandwidth of the data sheet. On the H200, whose data sheet says {H200.hbm_gbps:,} GB/s, a plain copy of a large "
        f"tensor reached {copy:,.0f} GB/s (measured), and at that rate the bytes take {nbytes / copy / 1e3:.0f} µs. The "
        "softmax "
        f"of notebook 09 moves exactly as many bytes and took {us:.0f} µs (measured). Later notebooks say which bandwidth "
        "they "
        f"use: the data sheet's, or the one that a copy reaches."
    )


_LINES = {
    "amax": "x.amax(...)", "sub": "x - maximum", "exp": "torch.exp(shifted)", "sum": "numerator.sum(...)",
    "div": "numerator / denominator",
}  # fmt: skip


def five_lines(counted) -> Picture:
    """What each line of the softmax by hand reads and writes, of its trace."""
    least = 2 * ROWS * COLUMNS * 4
    steps = [
        (op.name.removeprefix("aten.").partition(".")[0], op.read_bytes, op.write_bytes) for op in counted.torch_ops
    ]
    steps = [(_LINES.get(name, name), read, write) for name, read, write in steps]
    steps.append(("one kernel", least / 2, least / 2))
    with style.use():
        fig, ax = style.figure(height=3.4)
        for row, (_, read, write) in enumerate(steps):
            first = row == 0
            ax.barh(row, read / 1e6, color=style.READS, label="read" if first else None)
            ax.barh(row, write / 1e6, left=read / 1e6, color=style.WRITES, label="written" if first else None)
        ax.set_yticks(range(len(steps)), [name for name, *_ in steps])
        ax.invert_yaxis()
        ax.axhline(len(steps) - 1.5, color=style.BOUND, lw=1, ls="--")
        style.axes(ax, x="memory traffic, counted (MB)")
        ax.set_xlim(0, 1.35 * least / 1e6)
        ax.legend(loc="center right")
    said = "; ".join(f"{name} reads {read / 1e6:.0f} MB and writes {write / 1e6:.0f}" for name, read, write in steps)
    return style.picture(fig, alt=f"Traffic of each line: {said}.")


def what_five_lines_say(counted) -> Markdown:
    least, us = 2 * ROWS * COLUMNS * 4, _softmax_us()
    ratio, slower = counted.bytes / least, us["torch"] / us["gpukit"]
    return Markdown(
        "**What you saw.** Each line is a kernel of its own. Together the five lines read five whole matrices and write "
        "three, "
        f"{counted.bytes / 1e6:,.0f} MB. One kernel that keeps its row on the chip reads one matrix and writes one, "
        f"{least / 1e6:,.0f} MB. So the five lines move **{ratio:.1f} times** as many bytes (counted). The bars of `amax` and "
        f"`sum` show nothing written, since one number per row is too little to see. Measured, the five lines take {slower:.1f} times as long as the one "
        f"kernel. So the bytes explain most of the difference, but not all of it: the five kernels together also move "
        f"fewer bytes per second, {counted.bytes / us['torch'] / 1e3:,.0f} GB/s where a copy reaches "
        f"{results.copy_gbps('softmax'):,.0f}. [Notebook 04](04_benchmarking.ipynb) shows how to measure such things."
    )


# ---- the course ------------------------------------------------------------------------------------------------------

_PARTS = (
    ("00 to 04: what things cost", 0, 4, "number formats, memory, FLOPs, measuring"),
    ("05 to 08: how a GPU works", 5, 8, "Triton, memory access, tiles, fusion"),
    ("09 to 16: kernels", 9, 16, "softmax to FlashAttention, losses, AdamW"),
    ("17: all of it", 17, 99, "a GPT that trains with your kernels"),
)


def exercise_minutes() -> dict[int, list[int]]:
    """The minutes of each exercise's label, by the notebook's number."""
    found: dict[int, list[int]] = {}
    for item in catalog().values():
        found.setdefault(int(item.notebook[:2]), []).append(item.label.minutes)
    return found


def hours() -> Table:
    """The parts of the course, with the hours of their exercises as their labels have them."""
    minutes = exercise_minutes()
    rows = []
    for name, first, last, subject in _PARTS:
        labels = [m for number, each in minutes.items() if first <= number <= last for m in each]
        rows.append((name, subject, len(labels), sum(labels) / 60))
    rows.append(("the whole course", "", sum(row[2] for row in rows), sum(row[3] for row in rows)))
    columns = {"part": "", "subject": "", "exercises": "", "their time": "hours"}
    return style.table(
        columns, rows, caption="computed: the sum of the exercises' labels", formats={"their time": ".1f"}
    )


def what_the_hours_say() -> Markdown:
    total = sum(map(sum, exercise_minutes().values())) / 60
    return Markdown(
        f"The exercises take about **{total:.0f} hours** together. Reading and predicting take about as long again, so "
        "plan "
        f"about **{round(2 * total, -1):.0f} hours** for the whole course, or two months of evenings. Each opening cell "
        "says "
        f"how long its notebook takes."
    )


def story() -> Markdown:
    """The layer that the course makes faster, and what it costs to read it once."""
    config = models.preset("llama3-8b")
    weights = models.parameters(config)
    layer = (weights.attention + weights.mlp) // config.layers
    each_token = 2 * (weights.total - weights.embedding)
    return Markdown(
        f"Meta's Llama 3 8B has {config.layers} layers of the same shape, and each holds {layer / 1e6:.0f} million weights. "
        f"In bfloat16, 2 bytes per weight, a layer is {2 * layer / 1e6:.0f} MB. An H200 needs at least "
        f"**{least_us(2 * layer):.0f} µs** to read it once (computed, at the data sheet's {H200.hbm_gbps:,} GB/s). A model writes a text "
        "token by token, and a token is a word or a piece of one. For each new token of a text it reads the weights of all "
        "layers, and those of the last matrix, which turns the layers' result into a score for every possible token. "
        f"Together they are {each_token / 1e9:.1f} GB, so a model that writes a single text cannot write more than "
        f"**{1e6 / least_us(each_token):,.0f} tokens per second** (computed)."
    )
