"""What notebook 10 shows: activations and their formulas, what a fused kernel saves, and what was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from IPython.display import Markdown

import gpukit
from gpukit import benchmark, live
from gpukit.accounting.models import preset
from gpukit.hardware import gpu
from gpukit.lessons import diagram, results
from gpukit.lessons import layer as llama
from gpukit.lessons.course_map import course_map as _map
from gpukit.reference import gelu
from gpukit.widgets import gelu as view
from gpukit.widgets import style
from gpukit.widgets.style import Picture, Table

SHAPE = M, N = 16384, 4096  # of most tables here


def course_map() -> Picture:
    return _map("gelu")


def _rows(op: str, mode: str, shape: tuple[int, int] = SHAPE) -> dict[str, float]:
    """µs by provider, measured on an H200."""
    return {r.provider: r.median_ms * 1e3 for r in benchmark.rows(op, "h200") if (r.mode, r.shape) == (mode, shape)}


# ---- the functions ---------------------------------------------------------------------------------------------------


def where() -> Picture:
    """The MLP of GPT-2 and that of Llama, with the activation of each."""
    with diagram.canvas(19, 7.2) as ax:
        diagram.text(ax, 0.2, 0.4, "GPT-2", bold=True, align="left", size=11)
        steps = (
            ("x", diagram.PALE, 1.4),
            ("product with W1", style.READS, 3.2),
            ("+ bias", style.WRITES, 2.2),
            ("GELU", style.WRITES, 2.2),
            ("product with W2", style.READS, 3.2),
            ("+ bias", diagram.PALE, 2.2),
        )
        at = 0.2
        for i, (words, colour, width) in enumerate(steps):
            diagram.box(ax, at, 0.8, width, 1.2, words, colour, size=9.5)
            at += width
            if i < len(steps) - 1:
                diagram.arrow(ax, (at, 1.4), (at + 0.7, 1.4))
            at += 0.7
        diagram.text(ax, 0.2, 3.1, "Llama", bold=True, align="left", size=11)
        diagram.box(ax, 0.2, 4.1, 1.4, 1.2, "x", diagram.PALE, size=9.5)
        for y, name in ((3.5, "product with Wgate"), (5.0, "product with Wup")):
            diagram.arrow(ax, (1.6, 4.7), (2.4, y + 0.55))
            diagram.box(ax, 2.4, y, 4.0, 1.1, name, style.READS, size=9.5)
        diagram.arrow(ax, (6.4, 4.05), (7.5, 4.05), "gate")
        diagram.box(ax, 7.5, 3.5, 2.4, 1.1, "SiLU", style.WRITES, size=9.5)
        diagram.arrow(ax, (9.9, 4.05), (10.6, 4.5))
        diagram.arrow(ax, (6.4, 5.55), (10.6, 4.95), "up")
        diagram.box(ax, 10.6, 4.1, 2.4, 1.2, "multiply", style.WRITES, size=9.5)
        diagram.arrow(ax, (13.0, 4.7), (13.8, 4.7))
        diagram.box(ax, 13.8, 4.1, 4.0, 1.2, "product with Wdown", style.READS, size=9.5)
        keys = (
            (style.WRITES, "what the kernels of this notebook compute"),
            (style.READS, "matrix products: notebook 12"),
        )
        for x, (colour, words) in zip((0.2, 9.0), keys, strict=True):
            diagram.box(ax, x, 6.5, 0.6, 0.6, "", colour)
            diagram.text(ax, x + 0.8, 6.8, words, align="left", size=9)
    return diagram.picture(
        ax, alt="The MLP of GPT-2: a matrix product, a bias, GELU, another product and bias. That of Llama: two products, "
            "SiLU of "
        "one of them times the other, and a third product. Bias and GELU, and SiLU and the multiplication, are this "
        "notebook's.",
    )  # fmt: skip


def curves() -> Picture:
    """GELU, ReLU and SiLU with their slopes."""
    x = torch.linspace(-4, 3, 141, dtype=torch.float64, requires_grad=True)
    values, slopes = {}, {}
    for name, function in (("GELU", F.gelu), ("ReLU", torch.relu), ("SiLU", F.silu)):
        y = function(x)
        values[name] = y.tolist()
        slopes[name] = torch.autograd.grad(y.sum(), x)[0].tolist()
    return view.activations(x.tolist(), values, slopes)


def same_in_16_bits(count: int = 1 << 16) -> float:
    """The share of normal random numbers in bfloat16 for which both forms give the same result."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return (F.gelu(x) == F.gelu(x, approximate="tanh")).double().mean().item()


def forms_said(at: float) -> str:
    return (
        f"The largest distance is at x = ±{at:.2f}. Of normal random numbers in bfloat16, **{same_in_16_bits():.0%}** give "
        "the "
        "same result in both forms."
    )


def limits() -> Picture:
    """What becomes of two quotients when an exponential in them is infinite."""
    with diagram.canvas(18, 3.6) as ax:
        for y, top, bottom, becomes, colour, words in (
            (0.3, "e - 1", "e + 1", "inf / inf", style.WRITES, "NaN, although the limit is 1"),
            (1.9, "1", "1 + e", "1 / inf", style.COMPUTE, "0, which is the limit"),
        ):
            diagram.text(ax, 1.6, y + 0.35, top, code=True, size=12)
            ax.plot([0.6, 2.6], [y + 0.68, y + 0.68], color=style.INK, lw=1.3)
            diagram.text(ax, 1.6, y + 1.0, bottom, code=True, size=12)
            diagram.arrow(ax, (3.2, y + 0.68), (6.6, y + 0.68), "e becomes infinite")
            diagram.box(ax, 6.8, y + 0.2, 3.0, 1.0, becomes, colour)
            diagram.text(ax, 10.2, y + 0.68, f"= {words}", align="left")
    return diagram.picture(
        ax, alt="With an infinite e, (e - 1) / (e + 1) is infinity over infinity, which is NaN. 1 / (1 + e) is one over "
            "infinity, "
        "which is 0, the right limit.",
    )  # fmt: skip


def exp_ends() -> Table:
    """How large x may be before an exponential is infinite, by dtype."""
    rows = []
    x = torch.linspace(0, 40, 400_001, dtype=torch.float64)
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        last = math.log(torch.finfo(dtype).max)
        rows.append((str(dtype)[6:], torch.finfo(dtype).max, last, float(x[(2 * u > last).int().argmax()])))
    columns = {
        "dtype": "",
        "largest number": "",
        "exp(x) is infinite from x =": "",
        "exp(2 u) is infinite from x =": "",
    }
    formats = {"largest number": ".2e"} | dict.fromkeys(list(columns)[2:], ".2f")
    return style.table(columns, rows, caption="computed", formats=formats)


def _in_float32(function: Callable, v: torch.Tensor) -> torch.Tensor:
    """Rounded once to float32: PyTorch's own differ by the machine."""
    return function(v.double()).float()


def _formulas(x: torch.Tensor) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
    """Three formulas in float32, each beside what it should be, in float64."""
    x32 = x.float()
    u, u64 = (math.sqrt(2 / math.pi) * (v + 0.044715 * v**3) for v in (x32, x))
    erf64, tanh64 = 0.5 * x * torch.erfc(-x / math.sqrt(2)), x * torch.sigmoid(2 * u64)
    return {
        "x (1 + erf) / 2": (0.5 * x32 * (1 + _in_float32(torch.erf, x32 / math.sqrt(2))), erf64),
        "x (1 + tanh) / 2": (0.5 * x32 * (1 + _in_float32(torch.tanh, u)), tanh64),
        "x sigmoid": (x32 * _in_float32(torch.sigmoid, 2 * u), tanh64),
    }


def digits(at: float = -5.0) -> float:
    """How many decimal digits of x (1 + erf) / 2 are right in float32 near x: the worst of a hundred neighbors."""
    x = torch.linspace(at - 0.05, at + 0.05, 100, dtype=torch.float64)
    y, truth = _formulas(x)["x (1 + erf) / 2"]
    return -math.log10(((y.double() - truth) / truth).abs().max().item())


def tails() -> Picture:
    """The relative error of three formulas in float32, far below 0."""
    x = torch.linspace(-0.5, -9, 800, dtype=torch.float64)
    errors = {name: ((y.double() - truth) / truth).abs() for name, (y, truth) in _formulas(x).items()}
    worst = {name: e.view(40, 20).amax(1).tolist() for name, e in errors.items()}  # of 20 neighbors
    return view.tails(x.view(40, 20)[:, 10].tolist(), worst)


# ---- the kernels -----------------------------------------------------------------------------------------------------


def tile() -> Picture:
    """One program's tile of x, and the row of bias that it needs."""
    with diagram.canvas(18, 5.6) as ax:
        diagram.text(ax, 0.3, 0.4, "bias [N]", align="left", bold=True)
        diagram.text(ax, 0.3, 2.0, "x [M, N]", align="left", bold=True)
        for column in range(9):
            chosen = 3 <= column < 6
            diagram.box(ax, 3.0 + 1.1 * column, 0.1, 1.1, 0.65, "", style.WRITES if chosen else diagram.PALE)
            for row in range(6):
                mine = chosen and 2 <= row < 4
                diagram.box(
                    ax, 3.0 + 1.1 * column, 1.4 + 0.66 * row, 1.1, 0.66, "", style.READS if mine else diagram.PALE
                )
        diagram.arrow(ax, (7.95, 0.8), (7.95, 2.7), colour=style.WRITES)
        diagram.text(ax, 13.4, 0.45, "one row of bias,\nloaded once", align="left", size=9.5)
        diagram.text(ax, 13.4, 3.4, "one program's tile:\nBLOCK_M x BLOCK_N elements", align="left", size=9.5)
    return diagram.picture(
        ax, alt="A tile of x is several rows high and several columns wide. It needs only as many numbers of bias as it "
            "has columns; "
        "all its rows share them.",
    )  # fmt: skip


def bytes_said(two: gpukit.Trace, many: gpukit.Trace, least: int) -> str:
    return (
        f"**{len(two.torch_ops)} kernels** move {two.bytes / least:.1f} times the least, and **{len(many.torch_ops)} "
        "kernels** "
        f"{many.bytes / least:.1f} times."
    )


def kept() -> Table:
    """What autograd keeps of bias + GELU, beside x and bias, by how it is written."""
    x, bias = torch.randn(64, 256, requires_grad=True), torch.randn(256, requires_grad=True)
    rows = []
    for name, call in (
        ("F.gelu(x + bias)", lambda: F.gelu(x + bias)),
        ("written out", lambda: gelu.bias_gelu(x, bias)),
    ):
        with live.saved(known=(x, bias)) as found:
            call()
        size = sum(s.bytes for s in found) / (x.numel() * x.element_size())
        tensors = Counter(s.op for s in found)
        rows.append((name, ", ".join(op if n == 1 else f"{op} ({n} tensors)" for op, n in tensors.items()), size))
    columns = {"forward": "", "operations that keep something": "", "kept, besides x and bias": "times x"}
    return style.table(columns, rows, caption="counted", formats={"kept, besides x and bias": ".0f"})


def column_of_tiles() -> Picture:
    """How the gradient of the bias is summed: each tile its own rows, then all tiles."""
    colours = (style.READS, style.COMPUTE, style.YOURS)
    with diagram.canvas(20, 6.2) as ax:
        for x, words in (
            (2.9, "dx, three tiles above each other"),
            (10.4, "partial: one row per tile"),
            (16.8, "dbias"),
        ):
            diagram.text(ax, x, 0.4, words, bold=True)
        for t, colour in enumerate(colours):
            for row in range(3):
                for column in range(6):
                    diagram.box(ax, 0.3 + 0.87 * column, 0.9 + 1.7 * t + 0.5 * row, 0.87, 0.5, "", colour, alpha=0.9)
            for column in range(6):
                diagram.box(ax, 7.8 + 0.87 * column, 1.4 + 1.7 * t, 0.87, 0.5, "", colour)
            diagram.arrow(ax, (5.6, 1.65 + 1.7 * t), (7.7, 1.65 + 1.7 * t), "sum of rows" if t == 0 else "")
            diagram.arrow(ax, (13.1, 1.65 + 1.7 * t), (14.2, 3.2))
        for column in range(6):
            diagram.box(ax, 14.3 + 0.87 * column, 3.1, 0.87, 0.5, "", style.WRITES)
        diagram.text(ax, 16.9, 4.3, "second kernel: sums of\nthe rows of partial,\nalways in the same order", size=9.5)
    return diagram.picture(
        ax, alt="Three tiles of dx lie above each other. Each program sums the rows of its tile into one row of partial. A "
            "second "
        "kernel adds up the rows of partial and gets dbias.",
    )  # fmt: skip


def partial_sums() -> Table:
    """What the partial sums add to the traffic of the gradients, by the height of a tile."""
    least = gelu.bias_gelu_cost_bwd(SHAPE, torch.bfloat16).bytes
    rows = []
    for block_m in (1, 4, 16, 64, 256):
        sums = 2 * (M // block_m) * N * 4  # float32, written and read
        rows.append((block_m, M // block_m, sums / 1e6, sums / least))
    columns = {
        "BLOCK_M": "rows",
        "tiles in a column": "",
        "partial sums, written and read": "MB",
        "added to the least traffic": "",
    }
    formats = {"added to the least traffic": ".1%", "tiles in a column": ",d", "partial sums, written and read": ".1f"}
    return style.table(columns, rows, caption=f"computed, for {M:,} x {N:,} in bfloat16", formats=formats)


def halves() -> Picture:
    """gate and up as the two halves of one product's result."""
    with diagram.canvas(18, 4.6) as ax:
        for row in range(4):
            diagram.box(ax, 2.0, 0.9 + 0.7 * row, 5.0, 0.7, "gate" if row == 0 else "", style.WRITES)
            diagram.box(ax, 7.0, 0.9 + 0.7 * row, 5.0, 0.7, "up" if row == 0 else "", style.READS)
            diagram.text(ax, 1.7, 1.25 + 0.7 * row, f"row {row}", align="right", size=9)
        diagram.text(ax, 4.5, 0.45, "N", bold=True)
        diagram.text(ax, 9.5, 0.45, "N", bold=True)
        diagram.arrow(ax, (2.0, 4.1), (12.0, 4.1), both=True)
        diagram.text(ax, 12.3, 4.1, "stride of a row: 2 N elements", align="left", size=9.5)
    return diagram.picture(
        ax, alt="One matrix [M, 2 N]. Its left half is gate and its right half is up. A row of gate has N elements, and "
            "the next row "
        "begins 2 N elements after it.",
    )  # fmt: skip


def kept_said() -> str:
    """What silu(gate) costs if it is kept, in a layer of Llama 3 8B."""
    c = preset("llama3-8b")
    wide = llama.TOKENS * c.intermediate * 2
    return (
        f"gate and up exist anyway. The third matrix is silu(gate): **{wide / 1e6:.0f} MB** per layer of Llama 3 8B at "
        f"{llama.TOKENS:,} tokens in bfloat16 (computed)."
    )


# ---- instructions and times ------------------------------------------------------------------------------------------


def instruction_budget(itemsize: int = 2) -> float:
    """Instructions per element that an H200 can issue while memory delivers the element and takes one back."""
    h200 = gpu("h200")
    return h200.sms * 128 * h200.boost_mhz * 1e6 / (h200.hbm_gbps * 1e9 / (2 * itemsize))


def instructions(kernel, forms: tuple[str, ...]) -> Table:
    """Instructions per element of the kernel's forms, compiled for an H200: 1,024 elements, 128 threads."""
    x = torch.empty(1, device="meta", dtype=torch.bfloat16)
    rows = []
    for form in forms:
        made = gpukit.compile(kernel, x, x, FORM=form, BLOCK=1024, gpu="h200")
        rows.append((form, len(made.instructions) / 8))
    rows.append(("what memory's time allows", instruction_budget()))
    columns = {"kernel": "", "instructions per element": ""}
    return style.table(
        columns,
        rows,
        caption="counted in the machine code; the last row is computed",
        formats={"instructions per element": ".1f"},
    )


_NAMES = {
    "torch": "by hand",
    "compile": "torch.compile",
    "library": "PyTorch",
    "liger-triton": "Liger in Triton",
    "gpukit": "this course",
}
_MODES = {"fwd": "forward", "bwd": "backward", "fwd-graph": "forward, graph", "bwd-graph": "backward, graph"}


def times(op: str, shape: tuple[int, int] = SHAPE) -> Table:
    """One shape of `op` on an H200: calls one by one, and in a CUDA graph where that was measured."""
    rates = results.copy_gbps(op)
    cost = {"fwd": getattr(gelu, f"{op}_cost"), "bwd": getattr(gelu, f"{op}_cost_bwd")}
    found = {mode: _rows(op, mode, shape) for mode in _MODES}
    providers = [p for p in _NAMES if any(p in took for took in found.values())]
    rows = []
    for mode, took in found.items():
        if took:
            least = cost[mode[:3]](shape, torch.bfloat16).bytes / rates / 1e3
            rows.append((_MODES[mode], least, *(took.get(p) for p in providers)))
    columns = dict.fromkeys(["", "bytes over a copy's rate", *(_NAMES[p] for p in providers)], "")
    caption = f"{op}, {shape[0]:,} x {shape[1]:,}, bfloat16, measured on an H200; times in µs"
    return style.table(columns, rows, caption=caption, formats=dict.fromkeys(list(columns)[1:], ".0f"), whole=("",))


def bars(op: str, shape: tuple[int, int] = SHAPE) -> Picture:
    """The rows of `times` that the GPU alone decides: in a CUDA graph if there is one."""
    modes = [m if _rows(op, m, shape) else m[:3] for m in ("fwd-graph", "bwd-graph")]
    colours = {"torch": style.NEUTRAL, "compile": style.WASTE, "library": style.PEER, "liger-triton": style.COMPUTE}
    with style.use():
        fig, panels = style.figure(1, 2, width=9.5, height=2.7)
        said = []
        for ax, mode in zip(panels, modes, strict=True):
            took = _rows(op, mode, shape)
            names = [p for p in _NAMES if p in took]
            for row, p in enumerate(names):
                ax.barh(row, took[p], 0.65, color=colours.get(p, style.YOURS))
                style.label(ax, took[p], row, f"{took[p]:.0f}", bbox=style.CLEAR)
            ax.set_yticks(range(len(names)), [_NAMES[p] for p in names])
            ax.set(xlim=(0, 1.18 * max(took.values())), ylim=(len(names) - 0.4, -0.6))
            ax.set_title(_MODES[mode], fontsize=10)
            style.axes(ax, x="time (µs)", grid="x")
            said.append(_MODES[mode] + ": " + ", ".join(f"{_NAMES[p]} {took[p]:.0f} µs" for p in names))
    return style.picture(fig, alt=f"{op}, {shape[0]:,} x {shape[1]:,}, measured on an H200. {'; '.join(said)}.")


def times_said() -> Markdown:
    """Said below the times of bias and GELU."""
    fwd, bwd, graph = (_rows("bias_gelu", mode) for mode in ("fwd", "bwd", "bwd-graph"))
    alone = _rows("gelu", "fwd")["library"]
    return Markdown(
        f"**What you saw.** Forward, PyTorch takes {fwd['library'] / fwd['gpukit']:.1f} times as long as the fused kernel, "
        "and "
        f"bytes explain a factor of two. The rest is in the addition of bias: `F.gelu` alone takes {alone:.0f} µs, so the addition "
        f"takes {fwd['library'] - alone:.0f} µs for the same number of bytes. Backward, the two look alike "
        "when "
        f"calls are timed one by one: {bwd['library']:.0f} and {bwd['gpukit']:.0f} µs. In a CUDA graph they take "
        f"{graph['library']:.0f} and **{graph['gpukit']:.0f} µs**. So {bwd['gpukit'] - graph['gpukit']:.0f} "
        "µs of a call of this course's kernels are time in which the GPU waits for the CPU to go through autograd and launch both of them. A model that is limited by "
        "launches would not notice this course's kernel."
    )


_SWIGLU = next(part for part in llama.PARTS if part.operation == "swiglu")


def _layer_us(provider: str, mode: str) -> float:
    """SwiGLU of a layer: as many calls of the measured shape as its tokens need."""
    return _SWIGLU.times * _rows("swiglu", mode, _SWIGLU.shape)[provider]


def budget() -> Table:
    """The SwiGLU of a layer of Llama 3 8B, forward and backward."""
    rows = []
    for p in ("torch", "library", "liger-triton", "compile", "gpukit"):
        fwd, bwd = (_layer_us(p, mode) for mode in ("fwd", "bwd"))
        rows.append((_NAMES[p], fwd, bwd, fwd + bwd))
    columns = {"SwiGLU": "", "forward": "µs", "backward": "µs", "together": "µs"}
    caption = (
        f"one layer of Llama 3 8B, {llama.TOKENS:,} tokens x {llama.INTERMEDIATE:,} in bfloat16: "
        f"{_SWIGLU.times} calls of {_SWIGLU.shape[0]:,} rows, measured on an H200"
    )
    return style.table(columns, rows, caption=caption, formats=dict.fromkeys(list(columns)[1:], ",.0f"))


def budget_said() -> Markdown:
    theirs, ours = (sum(_layer_us(p, mode) for mode in ("fwd", "bwd")) for p in ("library", "gpukit"))
    return Markdown(
        f"**What you saw.** The line of the budget now reads: **SwiGLU of {llama.TOKENS:,} tokens, forward and backward: "
        f"{ours:,.0f} µs** per layer instead of {theirs:,.0f} with PyTorch's functions (measured). torch.compile and Liger "
        "reach "
        "the same. All three move the least possible number of bytes, so nothing is left to gain by moving fewer."
    )


# ---- sentences with numbers ------------------------------------------------------------------------------------------


def promise() -> Markdown:
    """The result at the head of the notebook."""
    took = _rows("bias_gelu", "fwd")
    least = gelu.bias_gelu_cost(SHAPE, torch.bfloat16).bytes / results.copy_gbps("bias_gelu") / 1e3
    return Markdown(
        f"On an H200, PyTorch takes **{took['library']:.0f} µs** to add a bias to a matrix of {M:,} x {N:,} bfloat16 "
        "numbers "
        f"and apply GELU. One fused kernel takes **{took['gpukit']:.0f} µs** (both measured, forward, calls one by one). A "
        "plain "
        f"copy of the matrix would take {least:.0f} µs (computed from the measured rate of a copy)."
    )
