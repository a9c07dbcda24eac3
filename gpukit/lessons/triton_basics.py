"""What notebook 05 shows: programs and their blocks, tiles, accumulators, atomics, and what they take on an H200."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.display import Markdown

from gpukit import benchmark
from gpukit.benchmark import Row
from gpukit.hardware import gpu
from gpukit.lessons import diagram, layer
from gpukit.lessons.course_map import course_map as _map
from gpukit.simulator.trace.torch_ops import TorchOp
from gpukit.widgets import style
from gpukit.widgets.predict import Reveal, reveal
from gpukit.widgets.style import Picture, Table

TOKENS, HIDDEN = 16_384, 4_096  # of the residual addition: Llama 3 8B's width
_LANE = 0.62  # the width of a lane in a diagram, in its units


def course_map() -> Picture:
    return _map("triton_basics")


def _measured(op: str) -> dict[str, Row]:
    """The recorded rows of one operation, by what computed it."""
    return {row.provider: row for row in benchmark.rows("triton_basics") if row.op == op}


def _us(row: Row) -> float:
    return row.median_ms * 1e3


# ---- programs and blocks ---------------------------------------------------------------------------------------------


def _lanes(ax, x: float, y: float, words, colours, size: float = 9) -> None:
    """A row of lanes, each a small box."""
    for i, (word, colour) in enumerate(zip(words, colours, strict=True)):
        diagram.box(ax, x + i * _LANE, y, _LANE, 0.7, str(word), colour, size=size)


def launch(n: int = 13, block: int = 4) -> Picture:
    """A launch: host code on the left, the programs that it starts, and the elements that they store to."""
    programs = -(-n // block)
    with diagram.canvas(18, 5.9) as ax:
        diagram.text(ax, 2.2, 0.4, "CPU: host code", bold=True)
        diagram.box(ax, 0, 0.9, 4.4, 1.5)
        diagram.text(ax, 2.2, 1.4, "owner_kernel[(4,)](", size=9, code=True)
        diagram.text(ax, 2.2, 1.9, "y, 13, BLOCK=4)", size=9, code=True)
        diagram.arrow(ax, (4.5, 1.65), (6.0, 1.65), "launch")
        diagram.text(ax, 12, 0.4, "GPU: the same function, four programs at the same time", bold=True)
        for pid in range(programs):
            left, inside = 6.1 + 3.0 * pid, min(block, n - pid * block)
            diagram.box(ax, left, 0.9, 2.8, 1.5, "", style.PEER, alpha=0.45)
            diagram.text(ax, left + 1.4, 1.25, f"program_id = {pid}", size=9, bold=True)
            colours = [style.READS] * inside + [style.WASTE] * (block - inside)
            _lanes(ax, left + 0.16, 1.55, range(block), colours)
            for lane in range(inside):
                start = left + 0.16 + (lane + 0.5) * _LANE
                diagram.arrow(ax, (start, 2.3), (6.1 + 0.3 + (pid * block + lane + 0.5) * 0.8, 3.75), width=1)
        for i in range(n):
            diagram.box(ax, 6.4 + 0.8 * i, 3.8, 0.8, 0.8, str(i), style.WRITES, size=9)
        diagram.text(ax, 6.2, 4.2, "memory: y[0] to y[12]", align="right", bold=True, size=9.5)
        diagram.box(ax, 6.4, 5.1, 0.62, 0.6, "", style.READS)
        diagram.text(ax, 7.2, 5.4, "lane with an element", align="left", size=9)
        diagram.box(ax, 11.4, 5.1, 0.62, 0.6, "", style.WASTE)
        diagram.text(ax, 12.2, 5.4, "lane without an element", align="left", size=9)
    return diagram.picture(
        ax,
        alt=f"The host launches {programs} programs. Each has {block} lanes and stores to its own {block} elements "
        f"of y; {programs * block - n} lanes of the last program have no element, because they lie past the end of y.",
    )


def block_of_pointers(pid: int = 3, n: int = 13, block: int = 4) -> Picture:
    """What one program computes before it stores: lanes, offsets, mask, addresses."""
    here = [pid * block + lane for lane in range(block)]
    lines = (
        ("lanes = tl.arange(0, BLOCK)", [str(i) for i in range(block)]),
        ("here = pid * BLOCK + lanes", [str(i) for i in here]),
        ("mask = here < n", [str(i < n) for i in here]),
        ("y_ptr + here", [f"&y[{i}]" if i < n else "outside" for i in here]),
        ("tl.store(...)", [f"y[{i}] = {pid}" if i < n else "nothing" for i in here]),
    )
    with diagram.canvas(16, 5.2) as ax:
        diagram.text(ax, 3.0, 0.4, "line of the kernel", bold=True)
        diagram.text(ax, 11.0, 0.4, f"its {block} lanes in program {pid}", bold=True)
        for row, (code, words) in enumerate(lines):
            y = 0.8 + row * 0.85
            diagram.text(ax, 0.1, y + 0.4, code, align="left", size=9.5, code=True)
            for lane, word in enumerate(words):
                colour = style.READS if here[lane] < n else style.WASTE
                diagram.box(ax, 6.4 + 2.35 * lane, y, 2.3, 0.8, word, colour, size=9)
    alive = sum(i < n for i in here)
    return diagram.picture(
        ax,
        alt=f"Program {pid} with BLOCK = {block} and n = {n}: offsets {here[0]} to {here[-1]}, of which {alive} lies "
        "inside y. "
        "The other lanes are masked off and store nothing.",
    )


# ---- the size of a block ---------------------------------------------------------------------------------------------


def block_sizes() -> Table:
    """The residual addition with blocks of each size, as it was measured."""
    rows = []
    for name, row in sorted(_measured("residual_add").items(), key=lambda item: item[0]):
        if name.startswith("block "):
            block = int(name.removeprefix("block "))
            rows.append((block, TOKENS * HIDDEN // block, _us(row), row.gbps))
    columns = {"BLOCK": "", "programs": "", "time": "µs", "rate": "GB/s"}
    caption = f"measured: z = x + y, {TOKENS:,} x {HIDDEN:,} in bfloat16 on an H200, 4 warps per program"
    return style.table(columns, sorted(rows), caption=caption, formats={"time": ",.1f", "rate": ",.0f"})


def block_size_factor() -> float:
    """How many times as long the smallest block takes as the best one."""
    times = [_us(row) for name, row in _measured("residual_add").items() if name.startswith("block ")]
    return _us(_measured("residual_add")["block 64"]) / min(times)


def reveal_block_size() -> Reveal:
    return reveal("block-size", {"takes": block_size_factor()}, how="measured", also=[block_sizes()])


# ---- two dimensions --------------------------------------------------------------------------------------------------


def broadcast(rows: int = 3, columns: int = 5, N: int = 10) -> Picture:
    """A column of row numbers and a row of column numbers make a tile of offsets."""
    with diagram.canvas(17, 5.6) as ax:
        diagram.text(ax, 1.5, 0.4, "offs_m[:, None]", code=True, size=9.5)
        diagram.text(ax, 1.5, 0.9, f"[{rows}, 1]", size=9, color=style.BOUND)
        diagram.text(ax, 6.2, 0.4, "offs_n[None, :]", code=True, size=9.5)
        diagram.text(ax, 6.2, 0.9, f"[1, {columns}]", size=9, color=style.BOUND)
        diagram.text(ax, 13.5, 0.4, "offs_m[:, None] * N + offs_n[None, :]", code=True, size=9.5)
        diagram.text(ax, 13.5, 0.9, f"[{rows}, {columns}], with N = {N}", size=9, color=style.BOUND)
        for m in range(rows):
            diagram.box(ax, 1.0, 1.4 + m, 1, 1, str(m), style.WRITES)
            for n in range(columns):
                diagram.box(ax, 11.0 + n, 1.4 + m, 1, 1, str(m * N + n), style.READS)
        for n in range(columns):
            diagram.box(ax, 3.7 + n, 2.4, 1, 1, str(n), style.COMPUTE)
        diagram.text(ax, 2.85, 2.9, "and", size=11)
        diagram.arrow(ax, (8.9, 2.9), (10.8, 2.9), "broadcast")
        diagram.text(
            ax, 8.5, 5.0, "Every row number meets every column number: one offset per lane of the tile.", size=10
        )
    return diagram.picture(
        ax,
        alt=f"A column of {rows} row numbers and a row of {columns} column numbers broadcast to a tile of {rows} x "
        f"{columns} "
        f"offsets; element [1, 2] lies {N + 2} elements after the first.",
    )


def strides() -> Picture:
    """Six numbers in memory, seen as a matrix and as its transpose."""
    values, views = "abcdef", (("x", 2, 3, 3, 1), ("x.T", 3, 2, 1, 3))
    with diagram.canvas(17, 6.0) as ax:
        diagram.text(ax, 4.2, 0.7, "memory", bold=True, align="right")
        for i, value in enumerate(values):
            diagram.box(ax, 4.6 + i * 1.2, 0.3, 1.2, 0.8, value, style.READS)
            diagram.text(ax, 5.2 + i * 1.2, 1.35, str(i), size=8, color=style.BOUND)
        for left, (name, M, N, sm, sn) in zip((1.5, 10.5), views, strict=True):
            diagram.text(ax, left + 2.2, 2.3, f"{name}  [{M}, {N}]", bold=True)
            diagram.text(ax, left + 2.2, 2.8, f"strides ({sm}, {sn}): [m, n] is at {sm} m + {sn} n", size=9)
            for m in range(M):
                for n in range(N):
                    word = f"{values[m * sm + n * sn]}  ({m * sm + n * sn})"
                    diagram.box(
                        ax,
                        left + 0.4 + n * 1.2 + (1.2 if N == 2 else 0.6) * 0.5,
                        3.1 + m * 0.85,
                        1.2,
                        0.8,
                        word,
                        size=9,
                    )
    return diagram.picture(
        ax,
        alt="Six numbers a to f in memory. As x [2, 3] with strides (3, 1) they are two rows, abc and def; as x.T [3, 2] "
        "with "
        "strides (1, 3) they are three rows, ad, be and cf. Nothing in memory moves.",
    )


def two_kernels(ops: Sequence[TorchOp], fused: int) -> Table:
    """What PyTorch's kernels move, and one kernel in their place."""
    rows = [(op.name.removeprefix("aten."), op.read_bytes, op.write_bytes) for op in ops]
    written = ops[-1].write_bytes
    columns = {"kernel": "", "reads": "bytes", "writes": "bytes"}
    return style.table(
        columns, [*rows, ("one kernel", fused - written, written)], caption="counted; the last row computed"
    )


# ---- reductions, products, scans -------------------------------------------------------------------------------------


def accumulator(N: int = 10, block: int = 4) -> Picture:
    """A row that is longer than a block, added up lane by lane and then across the lanes."""
    steps = -(-N // block)
    with diagram.canvas(17, 6.4) as ax:
        diagram.text(ax, 2.6, 0.6, f"a row of {N} elements", align="right", bold=True, size=9.5)
        for i in range(N):
            diagram.box(ax, 2.8 + i * 0.9, 0.25, 0.9, 0.7, f"x{i}", style.READS, size=9)
        for step in range(steps):
            y = 1.6 + step * 0.85
            diagram.text(ax, 2.6, y + 0.35, f"start = {step * block}", align="right", size=9.5, code=True)
            for lane in range(block):
                i = step * block + lane
                colour = style.READS if i < N else style.WASTE
                diagram.box(ax, 2.8 + lane * 1.3, y, 1.3, 0.75, f"x{i}" if i < N else "?", colour, size=9)
        diagram.text(
            ax, 8.4, 2.85, "each iteration adds one block to the\naccumulator, lane by lane", align="left", size=9.5
        )
        y = 1.7 + steps * 0.85 + 0.6
        diagram.arrow(ax, (5.4, y - 0.6), (5.4, y - 0.05))
        diagram.text(ax, 2.6, y + 0.35, "accumulator", align="right", size=9.5, code=True)
        for lane in range(block):
            terms = "+".join(f"x{i}" for i in range(lane, N, block))
            diagram.box(ax, 2.8 + lane * 1.9, y, 1.9, 0.75, terms, style.COMPUTE, size=8)
        diagram.arrow(ax, (10.5, y + 0.38), (12.6, y + 0.38), "tl.sum")
        diagram.box(ax, 12.7, y, 2.6, 0.75, "one number", style.WRITES, size=9)
        diagram.text(ax, 2.8, y + 1.25, "?", size=10, bold=True, color=style.WASTE)
        diagram.text(ax, 3.1, y + 1.25, "lanes past the end of the row: what must they hold?", align="left", size=9.5)
    return diagram.picture(
        ax,
        alt=f"A row of {N} elements is loaded in {steps} blocks of {block}. Each block is added to an accumulator of "
        f"{block} lanes; "
        f"after the loop tl.sum adds the {block} lanes to one number. {steps * block - N} lanes of the last block lie past "
        "the end.",
    )


def dot(M: int = 16, K: int = 32, N: int = 16) -> Picture:
    """The shapes of tl.dot."""
    with diagram.canvas(16, 4.8) as ax:
        diagram.box(ax, 0.4, 1.2, 4.8, 2.4, f"a  [{M}, {K}]", style.READS, bold=True)
        diagram.text(ax, 5.75, 2.4, "@", bold=True, size=14)
        diagram.box(ax, 6.3, 0.1, 2.4, 4.6, f"b  [{K}, {N}]", style.READS, bold=True)
        diagram.text(ax, 9.3, 2.4, "=", bold=True, size=14)
        diagram.box(ax, 9.9, 1.2, 2.4, 2.4, f"[{M}, {N}]", style.COMPUTE, bold=True)
        diagram.text(ax, 12.6, 1.9, "each element: a sum of", align="left", size=9.5)
        diagram.text(ax, 12.6, 2.4, f"{K} products, in float32", align="left", size=9.5)
        diagram.text(ax, 2.8, 0.8, "one row per row of the result", size=9, color=style.BOUND)
    return diagram.picture(
        ax,
        alt=f"tl.dot multiplies a block a [{M}, {K}] by a block b [{K}, {N}]; the result [{M}, {N}] holds sums of {K} "
        "products.",
    )


def lost_update() -> Picture:
    """Two programs that load, add and store one number, side by side in time."""
    turns = (
        (("load: 5", 0, style.READS), ("add: 6", 1, style.COMPUTE), ("store 6", 2, style.WRITES)),
        (("load: 5", 1, style.READS), ("add: 6", 2, style.COMPUTE), ("store 6", 3, style.WRITES)),
    )
    with diagram.canvas(16, 4.6) as ax:
        for row, steps in enumerate(turns):
            diagram.text(ax, 2.6, 0.75 + row * 1.2, f"program {row}", bold=True, align="right")
            for words, at, colour in steps:
                diagram.box(ax, 3.0 + at * 2.9, 0.3 + row * 1.2, 2.8, 0.9, words, colour)
        diagram.text(ax, 2.6, 3.25, "memory", bold=True, align="right")
        for at, value in enumerate((5, 5, 6, 6)):
            diagram.box(ax, 3.0 + at * 2.9, 2.8, 2.8, 0.9, str(value))
        diagram.arrow(ax, (3.0, 4.1), (14.6, 4.1), width=1.5)
        diagram.text(ax, 14.8, 4.1, "time", align="left", size=9)
    return diagram.picture(
        ax,
        alt="Program 0 and program 1 both load 5 before either has stored. Both add 1 and store 6: two additions, and the "
        "number "
        "in memory has grown by one.",
    )


def scan(numbers: tuple[int, ...] = (3, 1, 4, 1, 5, 9, 2, 6)) -> Picture:
    """Running sums of a block in log2(BLOCK) steps: each lane adds the lane 1, 2, 4 places before it."""
    lines, apart = [("block", list(numbers))], 1
    while apart < len(numbers):
        last = lines[-1][1]
        lines.append(
            (f"add the lane {apart} before", [v + (last[i - apart] if i >= apart else 0) for i, v in enumerate(last)])
        )
        apart *= 2
    with diagram.canvas(16, 1.35 * len(lines) + 0.2) as ax:
        for row, (words, values) in enumerate(lines):
            y = 0.2 + row * 1.35
            diagram.text(ax, 5.0, y + 0.4, words, align="right", size=9.5)
            done = 2**row
            for i, value in enumerate(values):
                diagram.box(ax, 5.4 + i * 1.25, y, 1.15, 0.8, str(value), style.COMPUTE if i < done else style.READS)
                if row and i >= done // 2:
                    diagram.arrow(ax, (5.95 + (i - done // 2) * 1.25, y - 0.55), (5.85 + i * 1.25, y - 0.02), width=0.8)
    return diagram.picture(
        ax,
        alt=f"The running sums of {len(numbers)} numbers in {len(lines) - 1} steps. In each step every lane adds the lane "
        "1, 2, 4 "
        f"places before it; finished lanes are green. The last sum is {lines[-1][1][-1]}.",
    )


# ---- atomics ---------------------------------------------------------------------------------------------------------


def histograms() -> Table:
    """Histograms of as many elements into more and more bins: an atomic per element, or counted in the block first."""
    rows = _histograms()
    lines = [
        (bins, _us(rows["atomics", bins]), _us(rows["blocks first", bins]) if ("blocks first", bins) in rows else "")
        for provider, bins in sorted(rows)
        if provider == "atomics"
    ]
    columns = {"bins": "", "an atomic per element": "µs", "tl.histogram, then an atomic per bin": "µs"}
    caption = f"measured on an H200: {2**24:,} random elements in blocks of 1,024"
    return style.table(columns, lines, caption=caption, formats=dict.fromkeys([*columns][1:], ",.0f"))


def reveal_atomics() -> Reveal:
    rows = _histograms()
    most = max(bins for _, bins in rows)
    factor = _us(rows["atomics", 1]) / _us(rows["atomics", most])
    return reveal("atomics", {"takes": factor}, how="measured", also=[histograms()])


def _histograms() -> dict[tuple[str, int], Row]:
    found = [row for row in benchmark.rows("triton_basics") if row.op == "histogram"]
    return {(row.provider, row.shape[1]): row for row in found}


# ---- threads ---------------------------------------------------------------------------------------------------------


def threads(block: int = 1024, warps: int = 4, wide: int = 4) -> Picture:
    """Who loads what of a block: passes, warps, threads, neighboring lanes."""
    each_pass = warps * 32 * wide
    passes = block // each_pass
    with diagram.canvas(18, 6.0) as ax:
        diagram.text(ax, 9.0, 0.3, f"one program, BLOCK = {block:,} lanes of float32, {warps} warps", bold=True)
        width = 16.0 / (passes * warps)
        colours = (style.READS, style.PEER, style.COMPUTE, style.YOURS)
        for i in range(passes * warps):
            diagram.box(ax, 1.0 + i * width, 0.7, width, 1.0, f"warp {i % warps}", colours[i % warps])
            diagram.text(ax, 1.05 + i * width, 2.0, f"{i * 32 * wide}", align="left", size=8, color=style.BOUND)
        for i in range(passes):
            middle = 1.0 + (i + 0.5) * 16.0 / passes
            diagram.text(ax, middle, 2.45, f"load instruction {i + 1}", size=9.5)
        diagram.arrow(ax, (1.0 + width / 2, 2.75), (1.0 + width / 2, 3.5))
        diagram.text(ax, 1.4 + width / 2, 3.15, "one warp: 32 threads", align="left", size=9.5)
        for t in range(8):
            diagram.box(ax, 1.0 + t * 1.9, 3.6, 1.85, 0.9, f"thread {t}" if t < 7 else "... 31", colours[0])
            diagram.text(
                ax,
                1.9 + t * 1.9,
                4.85,
                f"{t * wide} to {t * wide + wide - 1}" if t < 7 else f"to {32 * wide - 1}",
                size=8.5,
            )
        diagram.text(
            ax, 9.0, 5.5, f"{wide} neighboring lanes per thread = {wide * 4} bytes: one wide load", size=9.5
        )  # fmt: skip
    return diagram.picture(
        ax,
        alt=f"A block of {block:,} lanes is covered by {passes} load instructions. In each, {warps} warps of 32 threads "
        f"load {wide} "
        f"neighboring lanes per thread, {wide * 4} bytes at once.",
    )


# ---- sentences with numbers ------------------------------------------------------------------------------------------


def promise() -> Markdown:
    """The result at the head of the notebook."""
    torch, ours = _measured("residual_add")["torch"], _measured("residual_add")["block 1024"]
    least = torch.bytes / gpu("h200").hbm_gbps / 1e3
    return Markdown(
        f"A layer of Llama 3 8B adds its input to what attention computed: two tensors of {TOKENS:,} tokens x {HIDDEN:,} "
        "numbers "
        f"in bfloat16. PyTorch's addition takes **{_us(torch):.1f} µs** on an H200 (measured). The Triton kernel of four "
        "lines "
        f"that you write in the second exercise takes **{_us(ours):.1f} µs** (measured). No kernel can be much faster: at "
        "the "
        f"data sheet's memory bandwidth, moving the {torch.bytes / 1e6:,.0f} MB alone takes {least:.0f} µs (computed)."
    )


def what_block_sizes_say() -> Markdown:
    rows = _measured("residual_add")
    small, programs = rows["block 64"], TOKENS * HIDDEN // 64
    return Markdown(
        f"**What you saw.** With blocks of 64 the addition takes {_us(small):,.0f} µs, {block_size_factor():.1f} times as "
        "long as with the best block size. Both move the same bytes. But a GPU starts only so many programs per µs, about "
        f"{round(programs / _us(small), -1):,.0f} here, and {programs:,} of them take longer to start than their bytes take to travel. "
        "The time halves when the block doubles, until memory is the limit; from 512 on the size hardly matters. So give a "
        "program enough work: a block of 1,024 is a good first choice for a kernel that only loads, computes a little and "
        "stores."
    )


def what_fusion_gained() -> Markdown:
    """Two kernels of PyTorch against one, as they were measured."""
    rows, mul, relu = _measured("mul_relu"), _measured("mul"), _measured("relu")["torch"]
    return Markdown(
        "**What you saw.** PyTorch's two kernels move twice the bytes of yours, because the product is written to memory "
        "and read "
        f"again. On {TOKENS:,} x {HIDDEN:,} numbers in bfloat16 they take {_us(rows['torch']):.0f} µs on an H200, and the "
        "kernel "
        f"of this exercise takes {_us(rows['fused']):.0f} µs (measured). The bytes alone do not explain a factor of "
        f"{_us(rows['torch']) / _us(rows['fused']):.1f}. The rest comes from the multiplication, which is slow in PyTorch "
        f"when it broadcasts a vector: it takes {_us(mul['torch, broadcast']):.0f} µs, where ReLU, which moves almost the "
        f"same bytes, takes {_us(relu):.0f} µs. `torch.compile` fuses the two operations as well and takes "
        f"{_us(rows['compile']):.0f} µs. [08 Fusion](08_fusion.ipynb) is about when you can leave that to it."
    )


def what_histograms_say() -> Markdown:
    rows = _histograms()
    one, most = rows["atomics", 1], max(bins for _, bins in rows)
    few, many = (rows["atomics", 16], rows["blocks first", 16]), (rows["atomics", 4096], rows["blocks first", 4096])
    return Markdown(
        f"**What you saw.** With a single bin, {2**24:,} atomics take {one.median_ms:.1f} ms, "
        f"{one.shape[0] / _us(one):,.0f} per µs: "
        f"they queue up at one address. With {most:,} bins they rarely meet, and they take "
        f"{_us(rows['atomics', most]):,.0f} "
        "µs. Counting inside each block first, with `tl.histogram`, and then adding once per bin is "
        f"{few[0].median_ms / few[1].median_ms:.0f} times as fast with 16 bins. "
        f"With 4,096 bins it is {many[1].median_ms / many[0].median_ms:.1f} times as slow: each block of 1,024 elements "
        "then "
        "sends 4,096 atomics, most of which add 0. `gpukit.predict` counts how many atomics meet at one address. It "
        "therefore needs indices that exist, and refuses an `x` on the `meta` device. Where a few dozen to a few "
        "thousand addresses are shared, measure all the same: it is not known which part of the L2 cache serves an "
        "address, and the predictions can be off by 40%."
    )


def budget() -> Table:
    """The line of the layer's budget that this notebook is about."""
    rows = _measured("residual_add")
    line = [
        (name, rows[key].bytes / 1e6, _us(rows[key]), 2 * _us(rows[key]), 64 * _us(rows[key]) / 1e3)
        for name, key in (("PyTorch", "torch"), ("the kernel of triton_basics.vector_add", "block 1024"))
    ]
    columns = {"residual addition by": "", "moves": "MB", "one": "µs", "a layer's two": "µs", "all 32 layers": "ms"}
    caption = (
        f"Llama 3 8B, forward, {TOKENS:,} tokens in bfloat16, measured on an H200; the times of 2 and of 64 additions are computed from one; "
        f"the whole layer takes {layer.totals_us()[0]:,.0f} µs with PyTorch"
    )
    return style.table(columns, line, caption=caption, formats=dict.fromkeys([*columns][1:], ",.1f"))
