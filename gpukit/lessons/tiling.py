"""What notebook 07 shows: tiles and what they read, tensor cores, waves, alignment, order, occupancy, and measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from IPython.display import Markdown, display

from gpukit import benchmark
from gpukit.accounting import tiling
from gpukit.accounting.roofline import Point
from gpukit.accounting.tiling import Tiling
from gpukit.benchmark import Row
from gpukit.hardware import GPUS, gpu
from gpukit.lessons import diagram, layer, results
from gpukit.lessons.course_map import course_map as _map
from gpukit.simulator.compiler.compile import Compiled
from gpukit.simulator.compiler.occupancy import reserved_shared_bytes
from gpukit.simulator.trace.launch import Launch
from gpukit.validation import times as timed
from gpukit.widgets import style
from gpukit.widgets.roofline import RooflineView, roofline
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.waves import efficiency

N = 4096  # of the product that the notebook follows, in bfloat16
FLOPS = 2 * N**3


def course_map() -> Picture:
    return _map("tiling")


def _tiles() -> dict[str, Row]:
    """Measured: the kernel of tiling.matmul with each tile, and cuBLAS ("library")."""
    return {row.provider: row for row in benchmark.rows("tiling") if row.op == "tiles"}


def _aligned() -> dict[tuple[str, int], Row]:
    return {(row.provider, row.shape[0]): row for row in benchmark.rows("tiling") if row.op == "alignment"}


def _us(row: Row) -> float:
    return row.median_ms * 1e3


# ---- reuse -----------------------------------------------------------------------------------------------------------


def one_element() -> Picture:
    """A row of A, a column of B, one element of C."""
    return _product(8, 1, "one program: one element of C", "8 + 8 elements are loaded for 8 multiply-adds")


def one_tile(T: int = 4) -> Picture:
    """T rows of A, T columns of B, a tile of C."""
    words = f"{8 * T} + {8 * T} elements are loaded for {8 * T * T} multiply-adds"
    return _product(8, T, f"one program: a tile of {T} x {T} elements of C", words)


def _product(n: int, T: int, title: str, words: str) -> Picture:
    cell, at = 0.5, 2  # where the tile begins, in tiles
    first = at * T if at * T < n else n - T
    with diagram.canvas(17, 6.2) as ax:
        diagram.text(ax, 8.5, 0.4, title, bold=True)
        for name, left, chosen, colour in (
            ("A", 0.6, lambda i, j: first <= i < first + T, style.READS),
            ("B", 6.2, lambda i, j: first <= j < first + T, style.COMPUTE),
            ("C", 11.8, lambda i, j: first <= i < first + T and first <= j < first + T, style.WRITES),
        ):
            diagram.text(ax, left + n * cell / 2, 0.95, name, bold=True)
            for i in range(n):
                for j in range(n):
                    colour_here = colour if chosen(i, j) else diagram.PALE
                    diagram.box(ax, left + j * cell, 1.2 + i * cell, cell, cell, "", colour_here)
        diagram.text(ax, 5.4, 3.2, "x", size=14)
        diagram.text(ax, 11.0, 3.2, "=", size=14)
        diagram.text(ax, 8.5, 5.7, words)
    return diagram.picture(ax, alt=f"{n} x {n} matrices; {title}. {words}.")


def traced_tiles(launches: Mapping[int, Launch]) -> Table:
    """What a product of 128 x 128 x 128 loads in tiles of T x T."""
    rows = [
        (T, launch.programs, launch.load_bytes // 1024, 128 // T, launch.flops / launch.load_bytes)
        for T, launch in launches.items()
    ]
    columns = {"T": "", "programs": "", "loaded": "KiB", "each input": "times", "intensity": "FLOPs per byte"}
    return style.table(columns, rows, caption="counted: 128 x 128 x 128 in float16", formats={"intensity": ".1f"})


def points() -> list[Point]:
    """The product in tiles of several sizes, for the roofline: everything that programs load, and C once."""
    stored, found = N * N * 2, []
    for BM, BN in ((1, 1), (16, 16), (32, 32), (64, 64), (128, 128), (128, 256)):
        found.append(Point(f"{BM} x {BN}", FLOPS, tiling.matmul_reads(N, N, N, BM, BN, 2) + stored))
    return [*found, Point("everything once", FLOPS, 3 * stored)]


def roof() -> RooflineView:
    return roofline(points(), gpu="h200", dtype="bf16")


def ridges() -> Table:
    """The ridge of each GPU for 16-bit products, and whether a tile alone reaches it."""
    intensity = {point.name: point.flops / point.bytes for point in points()}
    rows = []
    for g in sorted(GPUS, key=lambda g: g.ridge(_short(g))):
        reach = [name for name in ("64 x 64", "128 x 128", "128 x 256") if intensity[name] >= g.ridge(_short(g))]
        rows.append((g.name, _short(g), g.ridge(_short(g)), reach[0] if reach else "none of them"))
    columns = {"GPU": "", "dtype": "", "ridge": "FLOPs per byte", "smallest tile that reaches it": ""}
    caption = "computed from data sheets; with the bytes of C, 64 x 64 has {:.0f} FLOPs per byte, 128 x 128 {:.0f}, 128 x 256 {:.0f}".format(
        *(intensity[name] for name in ("64 x 64", "128 x 128", "128 x 256"))
    )
    return style.table(columns, rows, caption=caption, formats={"ridge": ".0f"})


def _short(g) -> str:
    return "bf16" if "bf16" in g.peak_flops else "fp16"


# ---- where a tile lives ----------------------------------------------------------------------------------------------


def where_a_tile_lives() -> Picture:
    """From device memory to the tensor cores."""
    with diagram.canvas(19, 6.0) as ax:
        diagram.box(ax, 0, 1.6, 3.2, 2.6, "device memory\nA, B, C", style.NEUTRAL)
        diagram.arrow(ax, (3.2, 2.9), (4.4, 2.9), both=True)
        diagram.box(ax, 4.4, 1.6, 2.6, 2.6, "L2 cache\nfor all SMs", style.PEER)
        diagram.box(ax, 8.3, 0.2, 10.6, 5.4, "", "none")
        diagram.text(ax, 13.6, 0.6, "one SM, one program", bold=True)
        diagram.arrow(ax, (7.0, 2.9), (8.7, 2.9))
        diagram.text(ax, 10.6, 1.35, "shared memory", size=9.5)
        for i in range(3):
            diagram.box(ax, 8.8, 1.7 + i * 0.95, 3.6, 0.9, f"step {i}: piece of A, of B", style.READS, size=8.5)
        diagram.text(ax, 10.6, 4.85, "num_stages = 3", size=9, code=True)
        diagram.arrow(ax, (12.4, 2.9), (13.6, 2.9))
        diagram.box(ax, 13.6, 1.7, 2.2, 2.4, "tensor\ncores", style.COMPUTE)
        diagram.arrow(ax, (15.8, 2.9), (16.6, 2.9), both=True)
        diagram.box(ax, 16.6, 1.7, 2.1, 2.4, "registers:\nthe sums\nof C's tile", style.WRITES, size=9)
    return diagram.picture(
        ax,
        alt="Pieces of A and B go from device memory through L2 into the shared memory of an SM, several steps along K at "
        "a time. "
        "Tensor cores multiply them and add to the sums, which stay in registers until the tile of C is stored.",
    )


def what_a_tile_takes(built: Compiled) -> Markdown:
    """Shared memory and registers of a tile of 128 x 256 in steps of 64."""
    pieces = tiling.tile_shared_bytes(128, 256, 64, num_stages=3, itemsize=2)
    sums = 128 * 256 // built.threads
    return Markdown(
        f"**What you saw.** Three pieces of A and of B are 3 x (128 + 256) x 64 x 2 = {pieces:,} bytes. The compiler took "
        f"{built.shared_bytes:,}. A program may have {gpu('h200').smem_per_block_bytes:,}, all of the SM's shared memory but "
        "1 KiB. The sums are 128 x 256 "
        f"float32 over {built.threads} threads: {sums} of the {built.registers} registers of each thread. A thread may "
        "have 255 at "
        f"most, so a tile of twice this size does not fit into the registers of these threads."
    )


def tensor_core(m: int = 16, n: int = 8, k: int = 16) -> Picture:
    """One mma instruction: the shapes of its operands."""
    with diagram.canvas(17, 5.6) as ax:
        diagram.text(ax, 3.4, 0.4, "one warp, one fused multiply-add", bold=True, size=9.5)
        for i in range(32):
            diagram.box(ax, 1.4 + (i % 8) * 0.5, 1.0 + (i // 8) * 0.5, 0.5, 0.5, "", style.PEER)
        diagram.text(ax, 3.4, 3.4, "32 products", size=9.5)
        diagram.text(ax, 3.4, 3.9, f"{2 * 32} FLOPs", size=9.5, bold=True)
        diagram.text(ax, 11.8, 0.4, f"one warp, one tensor-core instruction: mma {m}x{n}x{k}", bold=True, size=9.5)
        diagram.box(ax, 7.2, 1.0, 3.2, 3.2, f"A\n{m} x {k}", style.READS)
        diagram.text(ax, 10.8, 2.6, "x", size=13)
        diagram.box(ax, 11.2, 1.0, 1.6, 3.2, f"B\n{k} x {n}", style.COMPUTE)
        diagram.text(ax, 13.2, 2.6, "=", size=13)
        diagram.box(ax, 13.6, 1.0, 1.6, 3.2, f"sums\n{m} x {n}", style.WRITES)
        diagram.text(ax, 11.2, 4.6, f"{m * n * k:,} products", size=9.5)
        diagram.text(ax, 11.2, 5.1, f"{2 * m * n * k:,} FLOPs", size=9.5, bold=True)
    return diagram.picture(
        ax,
        alt=f"A warp's ordinary multiply-add does 64 FLOPs. A tensor-core instruction multiplies {m} x {k} by {k} x {n} "
        "and does "
        f"{2 * m * n * k:,} FLOPs.",
    )


def instructions(built: Mapping[str, Compiled]) -> Table:
    """The tensor-core instruction of one kernel on several GPUs."""
    rows = []
    for name, compiled in built.items():
        (use,) = compiled.tensor_core
        rows.append((gpu(name).name, use.instruction, f"{use.m} x {use.n} x {use.k}", use.flops, use.count))
    columns = {"GPU": "", "instruction": "", "M x N x K": "", "FLOPs": "per instruction", "in the code": "times"}
    return style.table(columns, rows, caption="compiled: the course's matmul, tiles of 128 x 128, 8 warps, bfloat16")


def what_tensor_cores_reach() -> Markdown:
    reached, peak = timed.machine("h200"), gpu("h200").peak("bf16") / 1e12
    return Markdown(
        "**What you saw.** The instructions have grown with the GPUs. On an A100 each warp issues its own `mma` and takes "
        "both "
        "operands from registers. On a Hopper GPU (H100, H200) four warps issue a `wgmma` together, and its operands come directly from "
        "shared "
        "memory. On a Blackwell GPU (B200) one thread starts a `tcgen05.mma` for the whole program, and the sums lie in a memory "
        "of "
        "their own. An H200 still runs the old `mma`, but a kernel that does nothing else reached "
        f"{reached['mma bf16'].value:.0f} "
        f"TFLOP/s with it and {reached['wgmma bf16'].value:.0f} with `wgmma` (measured; the data sheet says {peak:.0f}). "
        "Triton "
        "uses `wgmma` if a program has a multiple of 4 warps and its tile has at least 64 rows. So a tile that is too "
        "small "
        f"costs twice: it reads more, and it computes with the slower instruction."
    )


# ---- waves -----------------------------------------------------------------------------------------------------------


def saw() -> Table:
    """The share of an A100 that is used, by size; shown with what 1,792 and 1,793 are on each GPU."""
    a100 = gpu("a100")
    share = [(size, Tiling(size, size, 256, 128, a100.sms).efficiency) for size in range(1024, 4097)]
    display(efficiency(share, mark=(1792, 1793), name="A100, tiles of 256 x 128"))
    rows = []
    for g in GPUS:
        pair = [Tiling(size, size, 256, 128, g.sms) for size in (1792, 1793)]
        shares = [100 * p.efficiency for p in pair]
        rows.append((g.name, g.sms, *(p.waves for p in pair), *shares, pair[1].waves / pair[0].waves))
    columns = {"GPU": "", "SMs": "", "waves at 1,792": "", "at 1,793": "", "used at 1,792": "%", "used at 1,793": "%"}
    columns |= {"takes": "times as long"}
    formats = {"takes": ".2f", "used at 1,792": ".0f", "used at 1,793": ".0f"}
    return style.table(
        columns, rows, caption="computed: 98 tiles, then 120; all waves last equally long", formats=formats
    )


# ---- alignment -------------------------------------------------------------------------------------------------------


def widths(built: Mapping[int, Compiled]) -> Table:
    """The loads of one kernel for rows of several lengths."""
    rows = []
    for size, k in built.items():
        widest, _ = tiling.align_rows(size, 2, 16)
        load = k.loads[0]
        code = (len(k.instructions), k.registers, k.occupancy.programs)
        rows.append((size, widest, load.instruction, load.bits // 8, *code))
    columns = {"row": "elements", "aligned to": "bytes", "load": "", "width": "bytes"}
    columns |= {"instructions": "", "registers": "", "programs": "per SM"}
    caption = "compiled for an H200: one kernel, tiles of 128 x 128, bfloat16; registers per thread"
    return style.table(columns, rows, caption=caption)


def alignment() -> Table:
    """Square products of 1,791 to 1,808, as they were measured."""
    rows = _aligned()
    lines = [
        (size, tiling.align_rows(size, 2, 16)[0], _us(rows["library", size]), _us(rows["tile", size]))
        for size in sorted({size for _, size in rows})
    ]
    columns = {"M = N = K": "", "rows aligned to": "bytes", "cuBLAS": "µs", "the kernel above": "µs"}
    caption = "measured on an H200, bfloat16; alignment computed, at most 16 bytes"
    return style.table(columns, lines, caption=caption, formats={"cuBLAS": ".1f", "the kernel above": ".1f"})


def alignment_factor() -> float:
    rows = _aligned()
    return _us(rows["library", 1793]) / _us(rows["library", 1792])


def what_alignment_says() -> Markdown:
    rows = _aligned()
    return Markdown(
        f"**What you saw.** On an H200, cuBLAS takes {_us(rows['library', 1792]):.0f} µs for 1,792 and "
        f"{_us(rows['library', 1793]):.0f} µs for 1,793, {alignment_factor():.1f} times as long. Waves cannot be the "
        "reason, because "
        "both sizes take one wave there. 1,791 is as slow, although it is smaller. 1,800 is fast again with cuBLAS: its "
        "rows begin "
        "at multiples of 16 bytes. But the Triton kernel is slow at 1,800. Triton knows of an integer only "
        "whether 16 "
        f"divides it, and 1,800 = 16 x 112.5, so the compiler cannot prove that these rows are aligned. At 1,808 = 16 x 113 it can."
    )


def by_size() -> Picture:
    """cuBLAS's rate for multiples of 64, and for one more than each."""
    even, odd = _by_size(0), _by_size(1)
    with style.use():
        fig, ax = style.figure(height=3.4)
        ax.plot(list(even), list(even.values()), color=style.COMPUTE, marker="o", ms=4)
        ax.plot(list(odd), list(odd.values()), color=style.WASTE, marker="o", ms=4)
        style.axes(ax, x="M = N = K (elements)", y="cuBLAS (TFLOP/s)", grid="y", whole="x")
        ax.set_ylim(0)
        ends = [((max(even), even[max(even)]), "multiples of 64"), ((max(odd), odd[max(odd)]), "one more")]
        style.names(ax, ends)
    return style.picture(
        fig,
        alt=f"Square products in bfloat16 by size, measured on an H200. Multiples of 64 rise from {min(even.values()):.0f} "
        "to "
        f"{max(even.values()):.0f} TFLOP/s with small teeth; sizes larger by one stay between {min(odd.values()):.0f} and "
        f"{max(odd.values()):.0f}.",
    )


def _by_size(more: int) -> dict[int, float]:
    rows = {r.shape[0]: r.tflops for r in benchmark.rows("matmul_by_size") if r.provider == "library"}
    return {size: rows[size] for size in sorted(rows) if size % 64 == more}


def what_sizes_say() -> Markdown:
    even, odd = _by_size(0), _by_size(1)
    ratio = [even[size] / odd[size + 1] for size in even]
    return Markdown(
        f"**What you saw.** 1,793 is no special case. At all these sizes, one element more per row makes cuBLAS "
        f"{min(ratio):.1f} to {max(ratio):.1f} times as slow (measured on an H200, bfloat16). These times were taken in a CUDA "
        f"graph, where no launch is included, so the factor at 1,793 is {even[1792] / odd[1793]:.1f} here and not {alignment_factor():.1f}. The upper line has "
        f"teeth: 1,728 reaches {even[1728]:.0f} TFLOP/s and 1,792 only {even[1792]:.0f}. Waves and changes of the tile are "
        "the "
        f"likely reasons, but times alone do not say which tile cuBLAS took. Compared with the effect of alignment these teeth are small."
    )


# ---- order -----------------------------------------------------------------------------------------------------------


def orders(size: int = 16_384, chunk: int = 1024) -> Table:
    """What a product reads from device memory in groups of each height: tiles of 128 x 128, two programs per SM."""
    h200, grid, piece = gpu("h200"), size // 128, 128 * chunk * 2
    l2 = {"slots": 2 * h200.sms, "capacity": h200.l2_bytes // piece}
    rows = []
    for group in (1, 2, 4, 8, 16, 32, 128):
        steps = tiling.play(grid, grid, size // chunk, group_m=group, **l2, keep=False)
        read = sum(len(step.missed) for step in steps) * piece
        rows.append((group, read / 2**30, 100 * tiling.hit_rate(steps), read / h200.hbm_gbps / 1e6))
    peak_ms = 2 * size**3 / h200.peak("bf16") * 1e3
    columns = {"GROUP_M": "", "from memory": "GiB", "found in L2": "%", "reading takes": "ms"}
    caption = (
        f"modelled: {size:,} x {size:,} x {size:,} in bfloat16 on an H200, tiles of 128 x 128; computing takes {peak_ms:.1f} ms at its "
        "peak"
    )
    return style.table(columns, rows, caption=caption, formats=dict.fromkeys([*columns][1:], ".1f"))


def what_orders_say() -> Markdown:
    took = {row.case: row.measured_us for row in timed.read("h200")}
    rows, groups = (took[f"matmul 8192 bf16, {name} of 128x256x64"] for name in ("rows", "groups"))
    return Markdown(
        "**What you saw.** Row by row (GROUP_M = 1), memory is busy nearly as long as the tensor cores, and not all of "
        "this time can be hidden behind their work. "
        f" The best group makes a wave nearly square: 264 programs run at a time, which is about 16 x 16. "
        "GROUP_M = 2 gains nothing: C has 128 columns of tiles, so 264 programs are two rows of tiles in either order. "
        "GROUP_M = 128 is column by column, with A and B exchanged. Measured on an H200, 8,192 x 8,192 x 8,192 with the "
        "course's "
        f"kernel in tiles of 128 x 256: {rows:,.0f} µs row by row and {groups:,.0f} µs in groups of 8."
    )


# ---- occupancy -------------------------------------------------------------------------------------------------------


def occupancies(built: Sequence[tuple[int, int, Compiled]]) -> Table:
    """What tiles of several sizes need, and how many programs fit an SM."""
    rows = []
    for BM, BN, k in built:
        fits, intensity = k.occupancy, FLOPS / tiling.matmul_reads(N, N, N, BM, BN, 2)
        needs = (k.threads // 32, k.registers, k.shared_bytes / 1024)
        rows.append((f"{BM} x {BN}", *needs, fits.limit, fits.programs, f"{fits.warps} of {fits.max_warps}", intensity))
    columns = {"tile": "", "warps": "", "registers": "", "shared": "KiB", "limited by": "", "programs": "per SM"}
    columns |= {"warps in use": "", "intensity": "FLOPs per loaded byte"}
    formats = {"shared": ".0f", "intensity": ".0f"}
    caption = "compiled for an H200, three stages; registers per thread"
    return style.table(columns, rows, caption=caption, formats=formats)


# ---- which tile ------------------------------------------------------------------------------------------------------


def sweep() -> Table:
    """The kernel of tiling.matmul with each tile, as it was measured."""
    rows = []
    for name, row in sorted(_tiles().items(), key=lambda item: -item[1].median_ms):
        tile, _, warps = name.partition(", ")
        shown = ("cuBLAS", "") if name == "library" else (tile, warps.removesuffix(" warps"))
        rows.append((*shown, _us(row), row.tflops, 100 * row.tflops * 1e12 / gpu("h200").peak("bf16")))
    columns = {"tile": "", "warps": "", "time": "µs", "rate": "TFLOP/s", "of the peak": "%"}
    caption = f"measured on an H200: {N:,} x {N:,} x {N:,} in bfloat16, the solution of tiling.matmul, BLOCK_K = 64"
    return style.table(columns, rows, caption=caption, formats=dict.fromkeys([*columns][2:], ",.0f"))


def warps_factor() -> float:
    """A tile of 128 x 256 with 4 warps against 8."""
    rows = _tiles()
    return _us(rows["128 x 256, 4 warps"]) / _us(rows["128 x 256, 8 warps"])


def what_the_sweep_says() -> Markdown:
    rows = _tiles()
    best, few = rows["128 x 256, 8 warps"], rows["128 x 256, 4 warps"]
    return Markdown(
        f"**What you saw.** Larger tiles are faster, as their traffic says, up to 128 x 256 with 8 warps: {_us(best):.0f} "
        "µs, where "
        f"cuBLAS takes {_us(rows['library']):.0f}. The same tile with 4 warps takes {_us(few):,.0f} µs, "
        f"{warps_factor():.0f} times as long. Its sums alone are 128 x 256 / 128 = 256 per thread, more than the "
        "255 registers that a thread can have. What does not fit is *spilled*: stored to memory and loaded again, in "
        "every step. "
        "Between 128 x 128 with 4 and with 8 warps there is hardly a difference. No rule of thumb tells you all of this "
        "before "
        f"you measure, which is why libraries measure."
    )


def _stages() -> dict[tuple[int, int], Row]:
    """Measured: the kernel of tiling.matmul in tiles of 128 rows, by their columns and the number of stages."""
    found = {}
    for row in results.anywhere("tiling_stages"):
        tile, _, stages = row.provider.partition(", ")
        found[int(tile.rpartition(" ")[2]), int(stages.split()[0])] = row
    return found


def stages_factor() -> float:
    """A tile of 128 x 256 with one stage against three."""
    rows = _stages()
    return _us(rows[256, 1]) / _us(rows[256, 3])


def _stage_programs(columns: int, stages: int) -> tuple[float, int]:
    """KiB of shared memory that a program takes, and for how many programs that of an H100's or H200's SM is enough."""
    h200 = gpu("h200")
    taken = tiling.tile_shared_bytes(128, columns, 64, num_stages=stages, itemsize=2)
    return taken / 1024, h200.smem_per_sm_bytes // (taken + reserved_shared_bytes(h200))


def stages() -> Table:
    """The same kernel with each number of stages, as it was measured."""
    rows = _stages()
    lines = [(f"128 x {n}", s, _stage_programs(n, s)[0], _us(row), row.tflops) for (n, s), row in sorted(rows.items())]
    columns = {"tile": "", "stages": "", "shared memory": "KiB", "time": "µs", "rate": "TFLOP/s"}
    caption = (
        f"measured on an {results.short(rows[256, 1])}: {N:,} x {N:,} x {N:,} in bfloat16, the solution of tiling.matmul, "
        "BLOCK_K = 64, 8 warps; shared memory of a program, computed"
    )
    return style.table(columns, lines, caption=caption, formats=dict.fromkeys([*columns][2:], ",.0f"))


def what_stages_say() -> Markdown:
    rows = _stages()
    us = {at: _us(row) for at, row in rows.items()}
    (few, two), (many, one) = (_stage_programs(128, s) for s in (3, 4))
    return Markdown(
        f"**What you saw.** With a single stage a tile of 128 x 256 takes {us[256, 1]:.0f} µs and with three "
        f"{us[256, 3]:.0f}: {stages_factor():.1f} times as long. A program with one stage loads, waits, multiplies, and loads "
        "again. With three, the loads of the next two steps are under way while it multiplies. A fourth stage gains nothing "
        f"({us[256, 4]:.0f} µs), because three are enough to hide the wait. With tiles of 128 x 128 it even costs time: "
        f"{us[128, 3]:.0f} µs with three stages and {us[128, 4]:.0f} with four. Three stages take {few:.0f} KiB of shared "
        f"memory, so an SM holds {two} programs; four take {many:.0f}, and it holds {one}."
    )


def what_persistence_says() -> Markdown:
    took = {row.case: row.measured_us for row in timed.read("h200")}
    small = took["matmul 4096 bf16, 128x256x64"], took["matmul 4096 bf16, descriptors, persistent"]
    large = took["matmul 8192 bf16, groups of 128x256x64"], took["matmul 8192 bf16, descriptors, persistent"]
    return Markdown(
        "**What you saw.** Program 0 computes tiles 0, 6 and 12, program 4 only tiles 4 and 10. Tile 15 belongs to program 15 mod 6 = 3. The last round is not "
        "full, just like a last wave: a persistent grid does not remove that waste. It saves the starts of programs, and it can overlap "
        "two tiles, "
        "because the loads of the next tile may begin while this one is stored. Measured on an H200 with the course's "
        "kernels at "
        f"8,192: {large[0]:,.0f} µs with one tile per program, and {large[1]:,.0f} µs persistent, with hardware that "
        "copies whole "
        f"tiles. At 4,096 the persistent kernel is slower: {small[1]:.0f} µs instead of {small[0]:.0f}. [12 Matmul](12_matmul.ipynb) has "
        "that kernel."
    )


# ---- sentences and the budget ----------------------------------------------------------------------------------------


def promise() -> Markdown:
    """The result at the head of the notebook."""
    rows = _tiles()
    small = rows["16 x 16, 1 warps"]
    best = min((row for name, row in rows.items() if name != "library"), key=lambda row: row.median_ms)
    return Markdown(
        f"The kernel that you will write multiplies two {N:,} x {N:,} matrices in bfloat16 on an H200 in "
        f"**{_us(small):,.0f} µs** "
        f"with the smallest tiles of this notebook, and in **{_us(best):,.0f} µs** with the best ones: "
        f"{small.median_ms / best.median_ms:.0f} times as fast with the same lines of code and the same FLOPs. NVIDIA's "
        "library, "
        f"cuBLAS, takes {_us(rows['library']):,.0f} µs (all measured)."
    )


def what_tiles_save() -> Markdown:
    h200, least = gpu("h200"), 2 * N * N * 2
    single, tiled = (tiling.matmul_reads(N, N, N, T, T, 2) for T in (1, 128))
    return Markdown(
        f"**What you saw.** Element by element, every multiply-add loads 4 bytes: {single / 1e9:.0f} GB in all, for two "
        "matrices "
        f"of {least / 1e6:.0f} MB together. At the full bandwidth of an H200's memory that would take "
        f"{single / h200.hbm_gbps / 1e6:.0f} ms, while its tensor cores need {FLOPS / h200.peak('bf16') * 1e3:.2f} ms for "
        "the "
        f"arithmetic (computed). Tiles of 128 x 128 divide the traffic by {single // tiled}. What remains is "
        f"{tiled // least} times "
        f"the size of the matrices, because A is loaded once for every column of tiles, and B once for every row of tiles."
    )


def budget() -> Table:
    """The seven matrix products of the layer at the rate that each kernel reached at 4,096."""
    rows, flops = _tiles(), 2 * layer.TOKENS * layer.weights()
    names = ("16 x 16, 1 warps", "64 x 64, 4 warps", "128 x 256, 8 warps", "library")
    lines = []
    for name in names:
        shown = "cuBLAS" if name == "library" else "your kernel, tiles of " + name.partition(",")[0]
        lines.append((shown, rows[name].tflops, flops / rows[name].tflops / 1e9))
    columns = {"matrix products by": "", "measured at 4,096": "TFLOP/s", "seven products of a layer": "ms"}
    caption = (
        f"Llama 3 8B, forward, {layer.TOKENS:,} tokens: {flops / 1e12:.2f} TFLOP; times computed from the rates; "
        f"the whole layer takes {layer.totals_us()[0] / 1e3:.1f} ms with PyTorch (04)"
    )
    formats = {"measured at 4,096": ".0f", "seven products of a layer": ".1f"}
    return style.table(columns, lines, caption=caption, formats=formats)
