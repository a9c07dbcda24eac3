"""What notebook 12 shows: views of a weight, formats and their errors, orders, tiles, shares of K, epilogues, small weights, times."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from IPython.display import Markdown
from torch import Tensor

import gpukit
from gpukit import benchmark
from gpukit.accounting.tiling import Tiling, matmul_reads, program_order
from gpukit.benchmark import Row
from gpukit.course import CourseError
from gpukit.hardware import gpu
from gpukit.lessons import diagram, layer, results
from gpukit.lessons.course_map import course_map as _map
from gpukit.simulator.compiler.compile import compile
from gpukit.simulator.interpreter import numerics
from gpukit.validation import counted_kernels
from gpukit.validation import times as timed
from gpukit.widgets import style, times
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.versus import Versus, by, versus

N = 8192  # of the square product that the notebook follows, in bfloat16
TILE = {"BM": 128, "BN": 256, "BK": 64, "SPLIT_K": 1, "num_warps": 8, "num_stages": 3}
TILES = (N // 128, N // 256)  # rows and columns of tiles
H200 = gpu("h200")
PEAK = H200.peak("bf16")
# FLOPs of one SM in one cycle, 16 bits: four tensor cores with 512 multiply-adds each (NVIDIA H100 white paper).
PER_CYCLE = 4 * 512 * 2
NAMES = {"gpukit-pointers": "pointers", "gpukit": "this course", "library": "cuBLAS", "compile": "torch.compile"}
_COLOURS = {
    "gpukit-pointers": style.WRITES, "gpukit": style.YOURS, "library": style.PEER, "compile": style.WASTE,
}  # fmt: skip


def course_map() -> Picture:
    return _map("matmul")


# ---- recorded times --------------------------------------------------------------------------------------------------


def row(
    op: str, shape: tuple[int, ...], provider: str, mode: str = "fwd", dtype: str = "bfloat16", file: str = ""
) -> Row:  # fmt: skip
    """A recorded row of the H200; file: where it is, if not in the operation's own. Raises StopIteration without one."""
    key = (op, shape, provider, mode, dtype)
    return next(r for r in results.rows(file or op) if (r.op, r.shape, r.provider, r.mode, r.dtype) == key)


def cublas(provider: str = "library", dtype: str = "bfloat16") -> Row:
    """cuBLAS at 8,192, as notebook 04 measured it in several dtypes."""
    return row("matmul", (N, N, N), provider, dtype=dtype, file="benchmarking")


def judged(op: str, shape: tuple[int, ...], provider: str) -> Row:
    """The row in a CUDA graph where there is one, else the row of a call: without the CPU's time for small products."""
    try:
        return row(op, shape, provider, "fwd-graph")
    except StopIteration:
        return row(op, shape, provider)


def us(found: Row) -> float:
    return 1e3 * found.median_ms


def share(found: Row) -> float:
    """Of the data sheet's peak in 16 bits."""
    return found.tflops * 1e12 / PEAK


def promise() -> Markdown:
    """The result at the head of the notebook."""
    library, yours, ours = (row("matmul", (N, N, N), name) for name in ("library", "gpukit-pointers", "gpukit"))
    return Markdown(
        f"A product of {N:,} x {N:,} matrices in bfloat16 is {2 * N**3 / 1e12:.2f} TFLOP. cuBLAS, NVIDIA's library, "
        f"takes **{us(library):,.0f} µs** for it on an H200. A Triton kernel of the kind that you will write takes "
        f"**{us(yours):,.0f} µs**, and the best kernel of this course **{us(ours):,.0f} µs** (measured, {benchmark.when((library, yours, ours))}). At "
        f"the peak of the tensor cores it would be {2 * N**3 / PEAK * 1e6:,.0f} µs (computed). At the end you can say "
        "what lies between these four numbers."
    )


# ---- tiles and strides -----------------------------------------------------------------------------------------------


def walk(tiles: int = 4, step: int = 1) -> Picture:
    """One tile of c, and the pieces of a and b that meet in one step along K."""
    cell, left, top = 0.9, (0.9, 7.2, 13.5), 1.4
    with diagram.canvas(18, 6.6) as ax:
        for x, name in zip(left, ("a [M, K]", "b [K, N]", "c [M, N]"), strict=True):
            diagram.text(ax, x + tiles * cell / 2, 0.9, name, bold=True)
            for i in range(tiles):
                for j in range(tiles):
                    diagram.box(ax, x + j * cell, top + i * cell, cell, cell, "", diagram.PALE)
        for k in range(tiles):
            now = k == step
            look = {"alpha": 1.0 if now else 0.35, "bold": now}
            diagram.box(ax, left[0] + k * cell, top + 2 * cell, cell, cell, f"k{k}", style.READS, **look)
            diagram.box(ax, left[1] + 1 * cell, top + k * cell, cell, cell, f"k{k}", style.COMPUTE, **look)
        diagram.box(ax, left[2] + 1 * cell, top + 2 * cell, cell, cell, "sum", style.WRITES, bold=True)
        diagram.text(ax, 6.0, top + 2 * cell, "x", size=14)
        diagram.text(ax, 12.3, top + 2 * cell, "adds to", size=10)
        diagram.text(ax, 9, 5.6, f"step k{step} of {tiles}: two tiles are loaded, multiplied, and forgotten")
        diagram.text(ax, 9, 6.15, "the sums stay, in float32, until the walk along K is over")
    return diagram.picture(
        ax,
        alt=f"One tile of c is the sum of {tiles} products: a tile of a in the same row times a tile of b in the same "
        f"column, for each step along K. Step {step} is at work.",
    )


def views() -> Picture:
    """A weight and its transpose: the same tile of numbers in memory, with the strides exchanged."""
    rows, columns, tile = 4, 6, {(i, j) for i in (1, 2) for j in (3, 4, 5)}
    cell = 0.62
    with diagram.canvas(18, 6.6) as ax:
        diagram.text(ax, 3.2, 0.4, f"W [{rows}, {columns}], strides ({columns}, 1)", bold=True)
        diagram.text(ax, 14.2, 0.4, f"W.T [{columns}, {rows}], strides (1, {columns})", bold=True)
        for i in range(rows):
            for j in range(columns):
                number = i * columns + j
                colour = style.READS if (i, j) in tile else diagram.PALE
                diagram.box(ax, 1.3 + j * cell, 0.9 + i * cell, cell, cell, str(number), colour, size=8.5)
                diagram.box(ax, 13.0 + i * cell, 0.9 + j * cell, cell, cell, str(number), colour, size=8.5)
                diagram.box(ax, 1.6 + number * cell, 5.4, cell, cell, str(number), colour, size=8.5)
        diagram.text(
            ax,
            8.9,
            2.2,
            "the same tile in both:\nleft, two rows of three columns;\nright, three rows of two columns",
            size=9.5,
        )
        diagram.text(ax, 9.0, 5.0, "memory, for both of them", bold=True)
        diagram.text(ax, 9.0, 6.3, "element (i, j) lies at i · stride of rows + j · stride of columns", size=9.5)
    return diagram.picture(
        ax,
        alt=f"W [{rows}, {columns}] with strides ({columns}, 1) and W.T [{columns}, {rows}] with strides (1, {columns}) "
        "are the same 24 numbers in memory. A tile of two rows and three columns of W is a tile of three rows and two "
        "columns of W.T, and the same six numbers.",
    )


def strided(launches: Mapping[str, object]) -> Table:
    """What each product of 128 x 128 x 128 loads, and how wide a thread's load of a and of b is on an H200."""
    lines = []
    for name, launch in launches.items():
        a, b = compile(launch, gpu="h200").loads[:2]
        lines.append((name, launch.load_bytes, launch.load_sectors, a.bits // 8, b.bits // 8))
    columns = {"product": "", "loaded": "bytes", "sectors": "", "a load of a": "bytes", "a load of b": "bytes"}
    caption = "bytes and sectors counted; one thread's loads as compiled for an H200"
    return style.table(columns, lines, caption=caption)


def what_strides_cost() -> Markdown:
    """The exception: the same bytes, and another time."""
    took = {r.case: r.measured_us for r in timed.read("h200")}
    plain, other = (took[f"matmul 4096 {name}, 128x128x64"] for name in ("bf16", "fp16, a @ b.T"))
    return Markdown(
        "The same bytes need not take the same time. At 4,096 this kernel took "
        f"{plain:.0f} µs for `a @ b` in bfloat16 and {other:.0f} µs for `a @ b.T` in float16, both in tiles of 128 x 128 "
        "(measured on an H200). Bytes, sectors and widths do not show the reason. It may be the way in which a tile lies in "
        "shared memory, or the dtype; the two runs differ in both."
    )


# ---- precision -------------------------------------------------------------------------------------------------------

SIGNS = ("random signs", "all positive")
_BITS = {"fp32": 23, "tf32": 10, "fp16": 10, "bf16": 7, "fp8": 3}
# What a tensor core takes from each float32 number of an operand.
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp32": lambda x: x,
    "tf32": lambda x: torch.from_numpy(numerics.tf32(x.numpy())),
    "fp16": lambda x: x.half().float(),
    "bf16": lambda x: x.bfloat16().float(),
    "fp8": lambda x: x.to(torch.float8_e4m3fn).float(),
}


@cache
def operands(signs: str) -> tuple[Tensor, Tensor]:
    """a [64, 4096] and b [4096, 64] in float32, the same on every machine."""
    a, b = torch.randn(2, 64, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float()
    return (a, b.T) if signs == SIGNS[0] else (a.abs(), b.T.abs())


def error(name: str, a: Tensor, b: Tensor) -> float:
    """The largest error that reading both operands in a format makes, over the sum of the terms' sizes."""
    read = READS[name]
    exact, terms = a.double() @ b.double(), a.abs().double() @ b.abs().double()
    return float(((read(a).double() @ read(b).double() - exact).abs() / terms).max())


def formats() -> Picture:
    """The bits of each format."""
    bits = {"fp32": (1, 8, 23), "tf32": (1, 8, 10), "fp16": (1, 5, 10), "bf16": (1, 8, 7), "fp8": (1, 4, 3)}
    width = 0.46
    with diagram.canvas(18, 4.4) as ax:
        for y, (name, (sign, exponent, mantissa)) in enumerate(bits.items()):
            top = 0.2 + 0.72 * y
            diagram.text(ax, 0.2, top + 0.3, name, align="left", code=True)
            x = 1.7
            for count, colour in ((sign, style.NEUTRAL), (exponent, style.PEER), (mantissa, style.READS)):
                for _ in range(count):
                    diagram.box(ax, x, top, width, 0.6, "", colour)
                    x += width
            if name == "tf32":
                for _ in range(13):
                    diagram.box(ax, x, top, width, 0.6, "", "none", dashed=True)
                    x += width
                diagram.text(ax, x + 0.2, top + 0.3, "13 bits: ignored", align="left", size=9)
        for x, colour, words in (
            (1.7, style.NEUTRAL, "sign"),
            (4.0, style.PEER, "exponent"),
            (7.2, style.READS, "mantissa"),
        ):
            diagram.box(ax, x, 3.9, width, 0.45, "", colour)
            diagram.text(ax, x + 0.6, 4.12, words, align="left", size=9)
    listed = "; ".join(f"{name}: {e} and {m}" for name, (_, e, m) in bits.items())
    return diagram.picture(
        ax,
        alt=f"Exponent and mantissa bits of each format. {listed}. tf32 lies in memory as fp32, and the last 13 bits are "
        "ignored.",
    )


def errors_by_format() -> Table:
    lines = []
    for name, mantissa in _BITS.items():
        found = [1e6 * error(name, *operands(signs)) for signs in SIGNS]
        lines.append((name, mantissa, H200.peak(name) / 1e12, *(value if value else "none" for value in found)))
    columns = {"operands": "", "mantissa": "bits", "peak": "TFLOP/s"} | dict.fromkeys(SIGNS, "millionths")
    caption = "largest error over the sum of the terms' absolute values, K = 4,096, exact sums (computed); peak: data sheet of an H200"
    return style.table(columns, lines, caption=caption, formats={"peak": ",.0f"} | dict.fromkeys(SIGNS, ",.0f"))


def errors_by_length() -> Picture:
    """The error of tf32 and bf16 operands by K, for both kinds of signs."""
    lengths = [4**i for i in range(7)]
    lines = {}
    for name in ("tf32", "bf16"):
        for signs in SIGNS:
            a, b = operands(signs)
            lines[f"{name}, {signs}"] = [(K, error(name, a[:, :K], b[:K])) for K in lengths]
    return times.curve(lines, x="K", y="error / sum of |terms|", title="Only operands rounded (computed)", log="xy")


def cut_or_rounded() -> Picture:
    """The error of each number when bits are rounded, and when they are cut off."""
    x = torch.randn(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).abs().float()
    with style.use():
        fig, panels = style.figure(1, 2, width=9.0, height=2.9, sharey=False)
        for ax, name, words in zip(
            panels, ("fp16", "tf32"), ("rounded to 10 bits: fp16", "cut to 10 bits: tf32"), strict=True
        ):
            off = 1e3 * (READS[name](x).double() - x.double()) / x.double()
            ax.hist(off.numpy(), bins=60, range=(-1.05, 1.05), color=style.READS if name == "fp16" else style.WASTE)
            ax.axvline(float(off.mean()), color=style.INK, ls="--", lw=1.5)
            ax.set_title(words)
            ax.set_yticks([])
            style.axes(ax, x="error of a number (thousandths of it)", y="how many numbers" if name == "fp16" else "")
    mean = {name: 1e3 * float(((READS[name](x).double() - x) / x).mean()) for name in ("fp16", "tf32")}
    return style.picture(
        fig,
        alt="Errors of 20,000 positive numbers in thousandths. Rounded to 10 bits of mantissa they lie on both sides of 0, "
        f"with a mean of {mean['fp16']:.4f}; cut off after 10 bits none is above 0, and the mean is {mean['tf32']:.2f}.",
    )


def what_precision_says() -> Markdown:
    fp32, tf32, bf16 = cublas(dtype="float32"), cublas("library-tf32", "float32"), cublas()
    took = {r.case: r.measured_us for r in timed.read("h200")}
    fp8 = 2 * 4096**3 / took["matmul 4096 fp8, 128x128x128"] / 1e6
    return Markdown(
        f"Fewer bits buy speed. cuBLAS, measured at {N:,}, reaches {fp32.tflops:,.0f} TFLOP/s in fp32, {tf32.tflops:,.0f} in tf32 and "
        f"{bf16.tflops:,.0f} in bf16. A Triton kernel with fp8 operands reached {fp8:,.0f} TFLOP/s at 4,096."
    )


# ---- order -----------------------------------------------------------------------------------------------------------


def strips(GROUP_M: int, wave: int = 0) -> tuple[int, int]:
    """(strips of a, strips of b) that the 132 programs of one wave read together."""
    first = wave * H200.sms
    tiles = program_order(*TILES, GROUP_M)[first : first + H200.sms]
    return len({m for m, _ in tiles}), len({n for _, n in tiles})


def strips_gib(GROUP_M: int) -> float:
    """GiB of all strips of all waves, if nothing is left in L2 from one wave to the next."""
    found = [strips(GROUP_M, wave) for wave in range(math.ceil(math.prod(TILES) / H200.sms))]
    return sum(128 * a + 256 * b for a, b in found) * N * 2 / 2**30


def waves_of_tiles() -> Picture:
    """The first wave of each order on the grid of c's tiles."""
    with style.use():
        fig, panels = style.figure(1, 2, width=9.5, height=4.6, sharey=False)
        for ax, group in zip(panels, (1, 8), strict=True):
            grid = torch.zeros(TILES)
            for m, n in program_order(*TILES, group)[: H200.sms]:
                grid[m, n] = 1
            for m in range(24):
                for n in range(TILES[1]):
                    colour = style.COMPUTE if grid[m, n] else diagram.PALE
                    ax.add_patch(_cell(n, m, colour))
            a, b = strips(group)
            ax.set_title(f"GROUP_M = {group}: {a} strips of a, {b} of b", fontsize=11)
            ax.set_xlim(0, TILES[1])
            ax.set_ylim(24, 0)
            ax.set_aspect(0.6)
            style.axes(ax, x="columns of tiles", y="rows of tiles (first 24 of 64)")
    (a1, b1), (a8, b8) = strips(1), strips(8)
    return style.picture(
        fig,
        alt=f"The first 132 tiles of c, {TILES[0]} by {TILES[1]} tiles. Row by row they touch {a1} rows and {b1} columns of "
        f"tiles; in groups of 8 rows they touch {a8} rows and {b8} columns.",
    )


def _cell(x: float, y: float, colour: str):
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.06, y + 0.06), 0.88, 0.88, facecolor=colour, edgecolor="none")


def order_us(name: str) -> float:
    """Measured: "rows" or "groups" of 8 rows."""
    return next(r.measured_us for r in timed.read("h200") if r.case == f"matmul {N} bf16, {name} of 128x256x64")


def _abc(n: int) -> tuple[Tensor, ...]:
    """Three square matrices: shapes and addresses, no memory. One tensor for all three would be found in L2 too often."""
    return tuple(torch.empty(n, n, dtype=torch.bfloat16, device="meta") for _ in range(3))


@cache
def _cached(GROUP_M: int):
    """The kernel's sampled accesses, sent through a model of an H200's caches."""
    with gpukit.trace(sample=1) as t:
        counted_kernels.matmul[(math.prod(TILES), 1)](*_abc(N), N, N, N, N, 1, N, 1, GROUP_M=GROUP_M, **TILE)
    return t.launches[0].traffic("h200", compiled=False)


def orders() -> Table:
    """Both orders: strips, what the model of the caches reads from memory, and measured times."""
    lines = []
    for name, group in (("rows", 1), ("groups", 8)):
        found = _cached(group)
        read, hit = found.dram_read_bytes / 2**30, 100 * found.l2_hit_rate
        lines.append((group, strips_gib(group), read, hit, order_us(name)))
    columns = {"GROUP_M": "", "strips of all waves": "GiB", "from memory": "GiB", "found in L2": "%", "time": "µs"}
    formats = {"strips of all waves": ".2f", "from memory": ".2f", "found in L2": ".1f", "time": ",.0f"}
    caption = f"{N:,} x {N:,} x {N:,}, bfloat16, H200: strips computed; memory and L2 modelled from sampled accesses; time measured"
    return style.table(columns, lines, caption=caption, formats=formats)


def what_orders_say() -> Markdown:
    rows, groups = (_cached(group).dram_read_bytes / 2**30 for group in (1, 8))
    slow, fast = order_us("rows"), order_us("groups")
    return Markdown(
        f"**What you saw.** Grouping saves {1 - groups / rows:.0%} of what is read from memory: {groups:.2f} GiB are read "
        f"instead of {rows:.2f}. The bytes of the strips, which you can count by hand, are close to what the model of the caches "
        f"says. In time grouping saves {1 - fast / slow:.0%}: {fast:,.0f} µs instead of {slow:,.0f}. The time falls by less than "
        "the traffic because memory is read while the tensor cores work. Only the time in which they have to wait for memory "
        "can be saved."
    )


# ---- which tile ------------------------------------------------------------------------------------------------------


def tile_case(name: str):
    return next(r for r in timed.read("h200") if r.case == f"matmul {name}")


@cache
def tile_at_1024(BM: int, BN: int):
    """The prediction for a product of 1,024 in tiles of BM x BN."""
    n = 1024
    tile = {
        "BM": BM,
        "BN": BN,
        "BK": 64,
        "GROUP_M": 8,
        "SPLIT_K": 1,
        "num_stages": 3,
        "num_warps": max(BM * BN // 4096, 4),
    }
    grid = (math.ceil(n / BM) * math.ceil(n / BN), 1)
    return gpukit.predict(partial(counted_kernels.matmul[grid], *_abc(n), n, n, n, n, 1, n, 1, **tile), gpu="h200")


def tile_gain() -> tuple[float, float]:
    """How many times as fast 128 x 256 is as 64 x 64: (at 4,096, measured; at 1,024, modelled)."""
    large = tile_case("4096 bf16, 64x64x32").measured_us / tile_case("4096 bf16, 128x256x64").measured_us
    return large, tile_at_1024(64, 64).time_us / tile_at_1024(128, 256).time_us


def tiles_large() -> Table:
    """Tiles and orders that were timed, with what the model predicts."""
    named = {
        "4,096: 64 x 64 x 32": "4096 bf16, 64x64x32",
        "4,096: 128 x 128 x 64, 1 stage": "4096 bf16, 128x128x64, 1 stage",
        "4,096: 128 x 128 x 64": "4096 bf16, 128x128x64",
        "4,096: 128 x 256 x 64": "4096 bf16, 128x256x64",
        "8,192: 128 x 256 x 64, rows": f"{N} bf16, rows of 128x256x64",
        "8,192: 128 x 256 x 64, groups": f"{N} bf16, groups of 128x256x64",
        "8,192: descriptors, persistent": f"{N} bf16, descriptors, persistent",
    }
    lines = []
    for name, case in named.items():
        found = tile_case(case)
        flops = 2 * int(case.partition(" ")[0]) ** 3
        lines.append((name, found.predicted_us, found.measured_us, found.limit, 1e8 * flops / found.measured_us / PEAK))
    columns = {"size: tile": "", "modelled": "µs", "measured": "µs", "limit (modelled)": "", "of the peak": "%"}
    formats = {"of the peak": ".0f", "modelled": ",.0f", "measured": ",.0f"}
    return style.table(columns, lines, caption=f"bfloat16 on an H200, {found.date}", formats=formats)


def tiles_small() -> Table:
    lines = []
    for BM, BN in ((64, 64), (128, 256)):
        found, tiling = tile_at_1024(BM, BN), Tiling(1024, 1024, BM, BN, H200.sms)
        lines.append((f"{BM} x {BN}", tiling.tiles, 100 * tiling.efficiency, found.time_us, found.limit))
    columns = {"1,024: tile": "", "tiles": "", "places used": "%", "modelled": "µs", "limit": ""}
    formats = {"places used": ".0f", "modelled": ".1f"}
    return style.table(
        columns,
        lines,
        caption="tiles and places computed, a place is room for a tile in a wave; times modelled for an H200",
        formats=formats,
    )


def what_tiles_say() -> str:
    """Said below the two tables of tiles."""
    cases = [tile_case(f"4096 bf16, {name}") for name in ("128x128x64", "128x256x64", "128x128x64, 1 stage")]
    middle, _large, single = cases
    rows, groups = (tile_case(f"8192 bf16, {name}") for name in ("rows of 128x256x64", "groups of 128x256x64"))
    small, few = (tile_at_1024(*tile).time_us for tile in ((64, 64), (128, 256)))
    tiles = Tiling(1024, 1024, 128, 256, H200.sms).tiles
    return (
        f"**What you saw.** At 4,096 the large tile wins: it loads less, and the limit moves from L2 to the tensor cores. At "
        f"1,024 it loses, {few:.1f} against {small:.1f} µs: it has {tiles} tiles, and 100 of the 132 SMs have nothing to do. "
        "The number of *stages*, the steps of a walk whose tiles are in shared memory at the same time ([07](07_tiling.ipynb)), matters "
        f"as much as the tile: with one stage a tile of 128 x 128 takes {single.measured_us:.0f} µs, with three "
        f"{middle.measured_us:.0f}. The model ranks these tiles as the clock does. It is not always right: it gives both orders of "
        f"8,192 the same time, {rows.predicted_us:,.0f} µs, and the clock says {rows.measured_us:,.0f} and "
        f"{groups.measured_us:,.0f}. A model tells you what to try; a measurement decides."
    )


def descriptor_kernel() -> Markdown:
    """The source of matmul_descriptors, without its decorator."""
    source = inspect.getsource(counted_kernels.matmul_descriptors.fn).replace(", BM: tl", ",\n    BM: tl", 1)
    return Markdown(f"```python\n{source.rstrip()}\n```")


def overlap() -> Picture:
    """Two tiles of one SM in time: a program for each, and one program for both."""
    with diagram.canvas(18, 5.2) as ax:

        def bar(x: float, y: float, width: float, words: str, colour: str) -> None:
            diagram.box(ax, x, y, width, 0.7, words, colour, size=9)

        diagram.text(ax, 0.2, 0.35, "a program for each tile", align="left", bold=True)
        for x, name in ((0.3, "0"), (7.9, "1")):
            bar(x, 0.75, 1.7, "first loads", style.READS)
            bar(x + 1.7, 0.75, 4.2, f"tile {name}: load, multiply, add", style.COMPUTE)
            bar(x + 5.9, 0.75, 1.6, "store", style.WRITES)
        diagram.text(ax, 0.2, 2.35, "one persistent program for both", align="left", bold=True)
        bar(0.3, 2.75, 1.7, "first loads", style.READS)
        bar(2.0, 2.75, 4.2, "tile 0: load, multiply, add", style.COMPUTE)
        bar(6.2, 2.75, 4.2, "tile 1: load, multiply, add", style.COMPUTE)
        bar(4.6, 3.55, 1.6, "first loads", style.READS)
        bar(6.2, 3.55, 1.6, "store", style.WRITES)
        bar(10.4, 2.75, 1.6, "store", style.WRITES)
        diagram.arrow(ax, (0.3, 4.75), (17.0, 4.75), "time")
    return diagram.picture(
        ax,
        alt="With a program for each tile, the tensor cores wait while a tile is stored and while the first loads of the next "
        "one arrive. A persistent program loads for the next tile while it still multiplies, and stores beside the next "
        "tile's products.",
    )


# ---- shares of K -----------------------------------------------------------------------------------------------------


def shares(number: int = 3) -> Picture:
    """One tile of c whose K is shared among programs, and the kernel that adds."""
    colours = (style.READS, style.COMPUTE, style.WASTE)
    with diagram.canvas(18, 6.0) as ax:
        diagram.text(ax, 2.9, 0.4, "a: 16 rows, K columns", bold=True)
        diagram.text(ax, 7.6, 0.4, "b: K rows", bold=True)
        diagram.text(ax, 12.1, 0.4, "partial sums, float32", bold=True)
        diagram.text(ax, 16.2, 0.4, "c", bold=True)
        for i in range(number):
            y = 0.9 + 1.55 * i
            diagram.box(ax, 0.2 + 1.8 * i, 2.5, 1.8, 0.9, f"share {i}", colours[i], size=9)
            diagram.box(ax, 7.0, y, 1.2, 1.45, f"share\n{i}", colours[i], size=9)
            diagram.arrow(ax, (8.3, y + 0.7), (10.3, y + 0.7), f"program {i}", size=8.5)
            diagram.box(ax, 10.4, y + 0.25, 3.4, 0.9, f"sums of share {i}", colours[i], size=9)
            diagram.arrow(ax, (13.9, y + 0.7), (15.3, 3.0 + 0.25 * (i - 1)))
        diagram.box(ax, 15.4, 2.5, 1.6, 1.0, "tile", style.WRITES, bold=True)
        diagram.text(ax, 16.2, 4.1, "second kernel:\nadds the shares,\n0 first, then 1, 2", size=9)
    return diagram.picture(
        ax,
        alt=f"K is cut into {number} shares. For one tile of c, each of {number} programs multiplies its share of a's columns "
        "by its share of b's rows and stores its sums. A second kernel adds these sums in the order of the shares.",
    )


# ---- epilogue --------------------------------------------------------------------------------------------------------


def epilogue() -> Picture:
    """A product, a bias and GELU as three kernels, and as one."""
    with diagram.canvas(19, 5.6) as ax:
        diagram.text(ax, 0.2, 0.35, "three kernels", align="left", bold=True)
        diagram.box(ax, 0.2, 2.1, 18.6, 0.8, "device memory", style.NEUTRAL)
        for x, words in ((1.0, "product"), (6.2, "+ bias"), (11.4, "GELU")):
            diagram.box(ax, x, 0.7, 3.0, 0.8, words, style.COMPUTE)
            diagram.arrow(ax, (x + 0.7, 2.1), (x + 0.7, 1.5), colour=style.READS)
            diagram.arrow(ax, (x + 2.3, 1.5), (x + 2.3, 2.1), colour=style.WRITES)
        diagram.text(ax, 0.2, 3.35, "one kernel", align="left", bold=True)
        diagram.box(ax, 1.0, 3.6, 9.6, 0.8, "product, then + bias and GELU on the sums in registers", style.COMPUTE)
        diagram.arrow(ax, (1.7, 4.95), (1.7, 4.4), colour=style.READS)
        diagram.arrow(ax, (9.9, 4.4), (9.9, 4.95), colour=style.WRITES)
        diagram.box(ax, 0.2, 4.95, 18.6, 0.6, "device memory", style.NEUTRAL)
    return diagram.picture(
        ax,
        alt="As three kernels, the product, the bias and GELU each read their input from device memory and write their result "
        "to it. As one kernel, bias and GELU are applied to the sums in registers, and the result is written once.",
    )


def after_the_product(K: int) -> tuple[int, float, float]:
    """([N, K] @ [K, N], then bias and GELU: bytes of the two, their time and the product's time in µs, computed)."""
    x, w, bias = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((N, K), (K, N), (N,)))
    with gpukit.trace() as t:
        F.gelu(x @ w + bias)
    _, *after = t.torch_ops
    moved = sum(op.bytes for op in after)
    return moved, results.copy_us("softmax", moved), 2 * N * N * K / PEAK * 1e6


def epilogue_more(K: int) -> float:
    """How many percent the two operations add to the product."""
    _, rest, product = after_the_product(K)
    return 100 * rest / product


def epilogue_table() -> Table:
    lines = [
        (K, moved / 1e6, product, rest, 100 * rest / product)
        for K, (moved, rest, product) in ((K, after_the_product(K)) for K in (512, N))
    ]
    columns = {"K": "", "bias and GELU move": "MB", "the product": "µs", "bias and GELU": "µs", "more": "%"}
    caption = (
        f"[{N:,}, K] @ [K, {N:,}]: bytes counted; times computed, the product at the peak, the rest at a copy's rate"
    )
    return style.table(columns, lines, caption=caption, formats=dict.fromkeys([*columns][1:-1], ",.0f"))


def what_an_epilogue_saves() -> str:
    cube = (N, N, N)
    eager, ours = (us(row("matmul_bias_gelu", cube, name)) for name in ("torch", "gpukit"))
    alone, theirs = (us(row("matmul", cube, name)) for name in ("gpukit", "library"))
    _, computed, _ = after_the_product(N)
    return (
        "**What you saw.** The product takes longer with a longer K. The bias and GELU do not: they read and write tensors of c's "
        "size, whatever K is. So the shorter K is, the larger is the share of the time that an epilogue saves. At K = 512 the bias and GELU take longer than the product itself. "
        f"At K = {N:,}, measured on an H200, three operations of PyTorch take {eager:,.0f} µs, and one kernel with an "
        f"epilogue takes {ours:,.0f} µs, where the product alone takes {alone:,.0f}. So the epilogue costs next to nothing. "
        f"PyTorch's bias and GELU cost {eager - theirs:.0f} µs on top of cuBLAS's product alone ({theirs:,.0f} µs), more than the "
        f"computed {computed:.0f}; the recorded times do not say why."
    )


# ---- few bits --------------------------------------------------------------------------------------------------------

WEIGHT = (14_336, 4096)  # of Llama 3 8B's last matrix of the MLP, K x N
UNPACKING = 2.9  # instructions per weight of 4 bits, counted in the compiled kernel: gpukit/kernels/quantized_matmul.py


def two_weights() -> Picture:
    """A byte with two weights, and the columns of x that they meet."""
    with diagram.canvas(18, 5.6) as ax:
        diagram.text(ax, 5.0, 0.4, "byte j of a column of packed", bold=True)
        for i in range(8):
            high = i < 4
            diagram.box(ax, 1.0 + i, 0.8, 1.0, 0.9, f"bit {7 - i}", style.WRITES if high else style.READS, size=9)
        diagram.arrow(ax, (3.0, 1.8), (3.0, 2.7))
        diagram.arrow(ax, (7.0, 1.8), (7.0, 2.7))
        diagram.box(ax, 1.0, 2.8, 3.9, 0.9, "q + 8 of row 2 j + 1", style.WRITES)
        diagram.box(ax, 5.1, 2.8, 3.9, 0.9, "q + 8 of row 2 j", style.READS)
        diagram.text(ax, 13.4, 0.4, "a row of x", bold=True)
        for i in range(8):
            diagram.box(ax, 9.8 + 0.95 * i, 0.8, 0.95, 0.9, str(i), style.WRITES if i % 2 else style.READS)
        diagram.text(ax, 13.6, 2.3, "even columns of x meet even rows,\nodd columns meet odd rows", size=9.5)
        diagram.box(ax, 1.0, 4.3, 8.0, 0.9, "one scale for GROUP rows of a column", style.COMPUTE)
        diagram.text(ax, 13.6, 4.75, "weight = q x scale of its group, q from -8 to 7", size=9.5)
    return diagram.picture(
        ax,
        alt="A byte of packed holds two weights of one column: row 2 j in its low four bits and row 2 j + 1 in its high four, "
        "each as q + 8. Even columns of x meet the even rows of the weight and odd columns the odd rows. GROUP rows of a "
        "column share one scale.",
    )


@cache
def _weights() -> Tensor:
    w = torch.randn(4096, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 64
    w[::500] *= 8  # a few outliers
    return w


def quantized_error(bits: int, group: int) -> float:
    """The size of the error of weights in `bits` bits, with a scale for each `group` rows, over the size of the weights."""
    w = _weights()
    parts = w.view(-1, group, w.shape[1])
    scale = parts.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return float(((parts / scale).round() * scale - parts).norm() / w.norm())


def bits_per_weight(bits: int, group: int) -> float:
    """With a scale of 16 bits for each group."""
    return bits + 16 / group


def weights_table() -> Table:
    K, columns_of = WEIGHT
    lines = []
    for bits, group in ((8, 4096), (8, 128), (8, 32), (4, 4096), (4, 128), (4, 32)):
        each = bits_per_weight(bits, group)
        comes = results.copy_us("int4_matmul", each / 8 * K * columns_of)
        lines.append((bits, group, each, 100 * quantized_error(bits, group), comes))
    columns = {"bits": "", "group": "rows", "with scales": "bits", "error": "%", "read from memory in": "µs"}
    sixteen = results.copy_us("int4_matmul", 2 * K * columns_of)
    caption = (
        "errors computed for 4,096 x 256 random weights with outliers; times computed for "
        f"{by(WEIGHT)} at a copy's rate ({sixteen:.1f} µs in 16 bits)"
    )
    formats = {"with scales": ".2f", "error": ".1f", "read from memory in": ".1f"}
    return style.table(columns, lines, caption=caption, formats=formats)


def what_groups_say() -> str:
    whole, small = quantized_error(4, 4096), quantized_error(4, 32)
    return (
        "**What you saw.** With 8 bits a weight is one of 255 numbers, with 4 bits one of 15, from -7 to 7. The step between two of them is "
        f"127 / 7 = {127 / 7:.0f} times as large, and so is the error. One outlier stretches the scale of its whole group. "
        f"With one scale for a column of 4,096 rows the error is {whole:.0%} of the weights, and with groups of 32 rows "
        f"{small:.0%}, because an outlier then spoils 32 weights and not 4,096. The price is half a bit per weight."
    )


# ---- what it takes ---------------------------------------------------------------------------------------------------


@cache
def _shapes() -> list[tuple[int, ...]]:
    return sorted(
        {r.shape for r in results.rows("matmul") if r.op == "matmul"}, key=lambda shape: (math.prod(shape), shape)
    )


def squares() -> Picture:
    """The share of the peak that each library reaches at each recorded shape, as bars."""
    shapes = _shapes()
    with style.use():
        fig, ax = style.figure(width=9.5, height=3.8)
        for i, (name, words) in enumerate(NAMES.items()):
            heights = [100 * share(judged("matmul", shape, name)) for shape in shapes]
            ax.bar([x + 0.2 * (i - 1.5) for x in range(len(shapes))], heights, 0.19, color=_COLOURS[name], label=words)
        ax.axhline(100, color=style.BOUND, ls="--", lw=1.5)
        labels = [f"{shape[0]:,}" if len(set(shape)) == 1 else by(shape).replace(" x ", "\nx ") for shape in shapes]
        ax.set_xticks(range(len(shapes)), labels)
        style.axes(ax, x="M = N = K, or the shape", y="% of the peak", grid="y")
        ax.set_ylim(0, 122)
        ax.legend(loc="upper center", ncols=4)
    told = "; ".join(
        f"{by(shape)}: "
        + ", ".join(f"{words} {100 * share(judged('matmul', shape, name)):.0f}" for name, words in NAMES.items())
        for shape in shapes
    )
    return style.picture(fig, alt=f"Percent of the data sheet's peak in bfloat16, measured on an H200. {told}.")


def squares_table() -> Table:
    lines, shown = [], []
    for shape in _shapes():
        found = {name: judged("matmul", shape, name) for name in NAMES}
        shown += found.values()
        note = "graph" if found["library"].mode == "fwd-graph" else "call"
        least = 2 * math.prod(shape) / PEAK * 1e6
        lines.append((by(shape), note, least, *(us(r) for r in found.values()), found["gpukit"].sm_mhz))
    columns = {**dict.fromkeys(["shape", "timed", "at the peak", *NAMES.values()], ""), "clock": "MHz"}
    formats = dict.fromkeys(["at the peak", *NAMES.values()], ",.1f")
    caption = (
        f"measured on an NVIDIA H200 in bfloat16, {benchmark.when(shown)}; times in µs; clock: of this course's kernel"
    )
    return style.table(columns, lines, caption=caption, formats=formats, whole=("shape", "timed"))


def cublas_share(n: int) -> float:
    """Percent of the peak for a square product."""
    return 100 * share(judged("matmul", (n, n, n), "library"))


def what_was_measured() -> str:
    """Said below the bars."""
    cube = (N, N, N)
    ours, pointers = row("matmul", cube, "gpukit"), row("matmul", cube, "gpukit-pointers")
    small, graph = row("matmul", (1024,) * 3, "library"), row("matmul", (1024,) * 3, "library", "fwd-graph")
    (other_run,) = (r for r in results.rows("tiling") if (r.op, r.provider) == ("tiles", "library"))
    per_mhz = H200.sms * PER_CYCLE * 1e6
    clock = per_mhz * ours.sm_mhz
    return (
        f"**What you saw.** Small products have too few tiles: at 1,024 a call of cuBLAS takes {us(small):.1f} µs, and even in "
        f"a CUDA graph, without the CPU's time, {us(graph):.1f}, where {2 * 1024**3 / PEAK * 1e6:.1f} would do at the peak. "
        "Large products reach another limit, the power that the board may draw: the GPU lowers its clock. The peak of the data "
        f"sheet belongs to {PEAK / per_mhz:,.0f} MHz (computed); during the product of {N:,} the clock was {ours.sm_mhz:,} MHz. "
        f"At that clock the peak is {clock / 1e12:,.0f} TFLOP/s, and this course's kernel reaches {ours.tflops:,.0f}, "
        f"{ours.tflops * 1e12 / clock:.0%} of it. The pointer kernel takes {us(pointers) / us(ours):.2f} times as long: "
        "that is what descriptors, a persistent grid and warps that only fetch are worth together. The exception is 1,793, "
        "where cuBLAS and the pointer kernel do not even reach a tenth of the peak, and torch.compile is ahead of all with "
        f"{share(judged('matmul', (1793,) * 3, 'compile')):.0%}. The next figure is about such sizes. (In [07](07_tiling.ipynb) "
        f"cuBLAS took {us(other_run):.0f} µs at 4,096. That was another run: compare only times of one table.)"
    )


def _by_size(provider: str, more: int) -> dict[int, Row]:
    found = {r.shape[0]: r for r in benchmark.rows("matmul_by_size") if r.provider == provider}
    return {size: found[size] for size in sorted(found) if size % 64 == more}


def by_size() -> Picture:
    """Multiples of 64 and one more than each, with cuBLAS and with this course's kernel."""
    with style.use():
        fig, ax = style.figure(width=9.0, height=3.8)
        ends = []
        for provider, name in (("library", "cuBLAS"), ("gpukit", "this course")):
            for more, look in ((0, "-"), (1, ":")):
                line = _by_size(provider, more)
                points = [(size, found.tflops) for size, found in line.items()]
                ax.plot(*zip(*points, strict=True), look, color=_COLOURS[provider], marker="o", ms=4)
                ends.append((points[-1], f"{name}, {'one more' if more else 'multiples of 64'}"))
        style.axes(ax, x="M = N = K (elements)", y="TFLOP/s", grid="y", whole="x")
        ax.set_ylim(0)
        style.names(ax, ends)
    told = "; ".join(
        f"{name}, {words}: {line[min(line)].tflops:.0f} to {line[max(line)].tflops:.0f}"
        for provider, name in (("library", "cuBLAS"), ("gpukit", "this course"))
        for words, line in (("multiples of 64", _by_size(provider, 0)), ("one more", _by_size(provider, 1)))
    )
    return style.picture(
        fig, alt=f"Square products in bfloat16 by size, 1,024 to 2,561, in TFLOP/s, measured on an H200. {told}."
    )


def odd_factors(provider: str) -> list[float]:
    """How many times as slow one element more is, at each size."""
    even, odd = _by_size(provider, 0), _by_size(provider, 1)
    return [even[size].tflops / odd[size + 1].tflops for size in even]


def copies_from() -> int:
    """The smallest odd size at which this course's kernel took memory for copies of both matrices."""
    return next(size for size, found in _by_size("gpukit", 1).items() if found.peak_bytes > 2 * found.shape[0] ** 2 * 2)


def what_sizes_say() -> Markdown:
    theirs, ours, first = odd_factors("library"), odd_factors("gpukit"), copies_from()
    even, odd, cublas = _by_size("gpukit", 0), _by_size("gpukit", 1), _by_size("library", 1)
    before = first - 64
    ahead = sum(us(found) < us(even[size]) for size, found in _by_size("library", 0).items())
    slots = 2 * H200.sms
    tiles = {n: Tiling(n, n, 128, 128, H200.sms).tiles for n in (2048, 2112)}
    return Markdown(
        f"**What you saw.** One element more per row costs cuBLAS a factor of {min(theirs):.1f} to {max(theirs):.1f}, and this "
        f"course's kernel {min(ours):.1f} to {max(ours):.1f}. Rows of an odd length do not begin at multiples of 16 bytes: no wide "
        "loads and no tensor descriptors ([07](07_tiling.ipynb)). The course's line of odd sizes jumps up between "
        f"{before:,} and {first:,}, where the time falls from {us(odd[before]):.0f} to {us(odd[first]):.0f} µs. From there on the kernel first copies "
        "both matrices into longer, aligned rows, and the copies cost less than the narrow loads: at "
        f"{max(odd):,} it takes {us(odd[max(odd)]):.0f} µs and cuBLAS {us(cublas[max(cublas)]):.0f}. Below that size it does "
        "not copy, because two more launches would cost a small product more than they save.\n\nAt multiples of 64 cuBLAS is "
        f"ahead at {'all' if ahead == len(even) else f'{ahead} of the'} {len(even)} sizes. "
        f"The course's kernel goes from {us(even[2048]):.0f} to {us(even[2112]):.0f} µs when the size goes from 2,048 to 2,112. With "
        f"tiles of 128 x 128 and two programs per SM there are {slots} places; 2,048 needs {tiles[2048]} of them, and 2,112 "
        f"needs {tiles[2112]}: a second wave."
    )


def few_bits() -> Table:
    """Products with weights of 16, 8 and 4 bits for a few rows."""
    lines = []
    for op, bits in (("int8_matmul", 8), ("int4_matmul", 4)):
        for shape in sorted({r.shape for r in results.rows(op) if r.op == op}):
            found = {name: row(op, shape, name) for name in ("torch", "compile", "cublas", "gpukit")}
            least = results.copy_us(op, found["gpukit"].bytes)
            graph = [us(r) for r in results.rows(op) if (r.shape, r.provider, r.mode) == (shape, "gpukit", "fwd-graph")]
            lines.append((bits, shape[0], least, *map(us, found.values()), graph[0] if graph else None))
    columns = {"bits": "", "rows of x": "", "model": "µs", "eager": "µs", "torch.compile": "µs"}
    columns |= {"cuBLAS, 16 bits": "µs", "this course": "µs", "in a graph": "µs"}
    caption = (
        f"x times weights of {by(WEIGHT)}, measured on an H200; model: the bytes at a copy's rate; empty: not measured"
    )
    return style.table(columns, lines, caption=caption, formats=dict.fromkeys([*columns][2:], ",.1f"))


def int4_parts() -> dict[str, float]:
    """µs of an int4 product for one row in a CUDA graph, and what can be said of it: its bytes at a copy's rate, and the
    instructions that unpack the weights at the measured rate of the SMs."""
    ours = row("int4_matmul", (1, *WEIGHT), "gpukit", "fwd-graph")
    rate = timed.machine("h200")["multiply-add, one SM"].value * H200.sms  # lanes per µs
    wide = row("int4_matmul", (1, *WEIGHT), "cublas", "fwd-graph")
    return {
        "int4": us(ours), "bytes": results.copy_us("int4_matmul", ours.bytes), "unpacking": UNPACKING * math.prod(WEIGHT) / rate,
        "16 bits": us(wide), "bytes in 16 bits": results.copy_us("int4_matmul", 2 * math.prod(WEIGHT)),
    }  # fmt: skip


def what_few_bits_say() -> Markdown:
    part = int4_parts()
    eager = us(row("int4_matmul", (1, *WEIGHT), "torch"))
    return Markdown(
        f"**What you saw.** Eager takes {eager:,.0f} µs, because it first makes a weight of 16 bits in memory, in several "
        "operations that each read and write a large tensor. With 4 bits this course's kernel is "
        f"{part['16 bits'] / part['int4']:.1f} times as fast as cuBLAS in 16 bits, and not 4 times: in a CUDA graph they take "
        f"{part['int4']:.1f} and {part['16 bits']:.1f} µs. Its bytes alone need {part['bytes']:.1f} µs, so it reaches "
        f"{part['bytes'] / part['int4']:.0%} of the rate of a copy, where cuBLAS in 16 bits reaches "
        f"{part['bytes in 16 bits'] / part['16 bits']:.0%}.\n\nTwo things do not shrink with the bits. One is the work: a weight "
        f"takes {UNPACKING} instructions to unpack (counted), and for {math.prod(WEIGHT) / 1e6:.0f} million weights these "
        f"instructions keep all SMs busy for {part['unpacking']:.1f} µs (computed from the measured rate of multiply-adds). The other is what "
        "every launch pays before and after the stream of bytes: starting the programs, waiting for the first loads, adding "
        "the shares of K. Part of all this happens while the bytes arrive. How large the rest is was not measured.\n\nThere is an exception in "
        f"the table: with 8 bits a single row takes {us(row('int8_matmul', (1, *WEIGHT), 'gpukit')):.1f} µs and four rows "
        f"{us(row('int8_matmul', (4, *WEIGHT), 'gpukit')):.1f}, although the bytes are the same. The recorded times do not say why."
    )


def yours() -> Markdown:
    """What the learner's matmul loads."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(1, 128, 128, device=device).half()
    try:
        with gpukit.trace() as t:
            gpukit.exercise("matmul").matmul(x, x.mT, 64)
    except Exception as problem:
        return Markdown(
            f"`matmul` does not run yet ({type(problem).__name__}): fill its gap, then run this cell again."
        )
    loaded, least = t.launches[0].load_bytes, matmul_reads(128, 128, 128, 64, 64, 2)
    return Markdown(f"Your kernel loads **{loaded:,} bytes** (counted); tiles of 64 x 64 need {least:,}.")


def yours_in_the_chart() -> Picture | Markdown:
    """The chart of square products, with the learner's kernel in it once it passes."""
    shapes = [(n, n, n) for n in (1024, 4096)]
    names = {"library": "cuBLAS", "torch": "eager", "gpukit-pointers": "pointers"}
    try:
        chart = versus("matmul", names=names, shapes=shapes, yours="matmul.strides")
    except CourseError as problem:
        return Markdown(str(problem))
    if isinstance(chart, Versus) and "yours" in chart.providers:
        return chart.picture
    return Markdown("`matmul.strides` does not pass its check yet. When it does, run this cell again.")


# ---- the running story -----------------------------------------------------------------------------------------------


LONG = (8192, 28_672, 8192)  # 8,192 tokens times a matrix of the MLP of Llama 3 70B


def layer_products() -> Table:
    """The seven products of the layer at the rate that each kernel was measured at."""
    flops = 2 * layer.TOKENS * layer.weights()
    named: Sequence[tuple[str, Row]] = (
        ("cuBLAS, fp32", cublas(dtype="float32")),
        ("cuBLAS, tf32", cublas("library-tf32", "float32")),
        ("pointers, bf16", row("matmul", LONG, "gpukit-pointers")),
        ("cuBLAS, bf16", row("matmul", LONG, "library")),
        ("this course, bf16", row("matmul", LONG, "gpukit")),
    )
    lines = [(name, by(r.shape), r.tflops, flops / r.tflops / 1e9) for name, r in named]
    columns = {"products by": "", "measured at": "", "rate": "TFLOP/s", "seven products": "ms"}
    caption = (
        f"One layer of Llama 3 8B, forward, {layer.TOKENS:,} tokens: {flops / 1e12:.2f} TFLOP, computed at a measured rate; "
        f"the whole layer takes {layer.totals_us()[0] / 1e3:.1f} ms with PyTorch"
    )
    return style.table(columns, lines, caption=caption, formats={"rate": ",.0f", "seven products": ".1f"})


def layer_line() -> Markdown:
    """The line of the layer's budget that this notebook is about, for many tokens and for four."""
    products, (whole, _) = layer.products_us(), layer.totals_us()
    rate = 2 * layer.TOKENS * layer.weights() / products / 1e6
    slow, theirs, fast = (row("matmul", LONG, name).tflops for name in ("gpukit-pointers", "library", "gpukit"))
    full = cublas(dtype="float32").tflops
    few = {
        bits: us(row(op, (4, *WEIGHT), name)) * layer.weights() / math.prod(WEIGHT)
        for bits, op, name in (
            (16, "int4_matmul", "cublas"),
            (8, "int8_matmul", "gpukit"),
            (4, "int4_matmul", "gpukit"),
        )
    }
    return Markdown(
        f"**What you saw.** The seven matrix products are {products / whole:.0%} of the layer's {whole:,.0f} µs with PyTorch "
        "(sums of measured times). That sum takes all seven at the rate that was measured for the largest of them, "
        f"{rate:,.0f} TFLOP/s; the table has rates that were measured at other sizes. In bf16 cuBLAS is "
        f"{theirs / full:.0f} times as fast as in fp32. After that a better kernel gains little: of the three in bf16 the fastest "
        f"takes {1 - slow / fast:.0%} less time than the slowest. For four tokens, as in decoding, the same seven products take "
        f"{few[16]:.0f} µs in 16 bits with cuBLAS, {few[8]:.0f} µs with weights of 8 bits, and {few[4]:.0f} µs with weights of "
        f"4 bits (computed from the measured times of {by(WEIGHT)})."
    )
