"""What notebook 08 shows: trips to memory, what compilers write, and what fusing gained on an H200."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from IPython.display import Markdown
from torch import Tensor

import gpukit
from gpukit import benchmark
from gpukit.accounting import fusion as graphs
from gpukit.accounting.fusion import Graph, Op
from gpukit.hardware import gpu as spec
from gpukit.lessons import diagram, layer, results
from gpukit.lessons.course_map import course_map as _map
from gpukit.simulator.compiler import assembly
from gpukit.timing import time_ms
from gpukit.validation.times import machine
from gpukit.widgets import style
from gpukit.widgets.predict import Reveal, reveal
from gpukit.widgets.style import Picture, Table

M, N = 16_384, 4_096  # of the tensors that were measured
CUDA_FILE = Path(gpukit.__file__).parent / "kernels" / "fusion.cu"
VECTOR = "CUDA C++, 16 bytes per thread"


def course_map() -> Picture:
    return _map("fusion")


copy_gbps = partial(results.copy_gbps, "fusion")


def took_us(op: str, provider: str, dtype: str = "bfloat16") -> float | None:
    """Recorded on an H200; None where it was not measured."""
    found = [
        row
        for row in (*results.rows("fusion"), *results.rows("gelu_in_cuda"))
        if (row.op, row.provider, row.dtype) == (op, provider, dtype)
    ]
    return found[0].median_ms * 1e3 if found else None


def recorded(name: str) -> str:
    """A text in gpukit/results/h200, such as what a compiler wrote."""
    return (benchmark.RESULTS / "h200" / name).read_text(encoding="utf-8")


def promise() -> Markdown:
    apart, together = took_us("gelu_tanh", "torch"), took_us("gelu_tanh", "triton")
    days = results.days(lambda row: row.op == "gelu_tanh", "fusion")
    return Markdown(
        f"GELU, written in PyTorch as its formula says it, takes an H200 **{apart:.0f} µs** for {M:,} x {N:,} numbers in "
        f"bfloat16. The same arithmetic in one kernel of five lines, which you will read below, takes **{together:.0f} "
        "µs** "
        f"(measured, {days}). No operation was made faster. The numbers stay on the chip between "
        "the operations."
    )


# ---- chains ----------------------------------------------------------------------------------------------------------


def trips() -> Picture:
    """Two operations as two kernels and as one: what crosses between memory and chip."""
    with diagram.canvas(20, 6) as ax:
        for left, title in ((0, "two kernels: four trips"), (11, "one kernel: two trips")):
            diagram.text(ax, left + 4.5, 0.4, title, bold=True, size=11)
            diagram.box(ax, left, 4.5, 9, 1.2, "device memory (HBM)", style.NEUTRAL, bold=True)
        for left, name, read, written in ((0.6, "sin", "x", "s"), (5.0, "square", "s", "y")):
            diagram.box(ax, left, 1.2, 3.4, 1.2, name, style.COMPUTE, bold=True)
            diagram.arrow(ax, (left + 0.7, 4.5), (left + 0.7, 2.4), f"read {read}", style.READS)
            diagram.arrow(ax, (left + 2.6, 2.4), (left + 2.6, 4.5), f"write {written}", style.WRITES)
        diagram.box(ax, 11.6, 1.2, 7.8, 1.2, "", style.COMPUTE, alpha=0.35)
        diagram.box(ax, 12, 1.35, 2.2, 0.9, "sin", style.COMPUTE, bold=True)
        diagram.box(ax, 16.6, 1.35, 2.4, 0.9, "square", style.COMPUTE, bold=True)
        diagram.arrow(ax, (14.2, 1.8), (16.6, 1.8), "s in registers")
        diagram.arrow(ax, (13.1, 4.5), (13.1, 2.4), "read x", style.READS)
        diagram.arrow(ax, (17.8, 2.4), (17.8, 4.5), "write y", style.WRITES)
    return diagram.picture(
        ax, alt="sin and square as two kernels: read x, write s, read s, write y. As one kernel: read x, write y; s stays "
            "in "
        "registers.",
    )  # fmt: skip


def chain(traced) -> Reveal:
    """What the five kernels of sin² + cos² move, beside the prediction."""
    kernels = [op for op in traced.torch_ops if op.bytes]
    tensor = M * N * 4
    rows = [(op.name, op.read_bytes // tensor, op.write_bytes // tensor) for op in kernels]
    columns = {"kernel": "", "reads": "tensors", "writes": "tensors"}
    moved = style.table(columns, rows, caption="counted: what each kernel of the chain moves")
    actual = {"kernels": len(kernels), "bytes moved": traced.bytes, "bytes in one kernel": 2 * tensor}
    return reveal("chain", actual, also=[moved])


def gate_graph(rows: int = 4096, columns: int = 1024) -> Graph:
    """sigmoid(x), divided by the sum of its row, as three lines of PyTorch."""
    ops = (Op("sigmoid", ("x",), "s"), Op("sum of the row", ("s",), "total"), Op("divide", ("s", "total"), "y"))
    full = rows * columns
    return Graph("sigmoid gate", ops, {"x": full, "s": full, "total": rows, "y": full}, ("y",))


def reduction() -> Picture:
    """Where programs may cut a tensor: anywhere for an elementwise operation, between rows for a sum over rows."""
    with diagram.canvas(20, 5.4) as ax:
        diagram.text(ax, 4.3, 0.4, "elementwise: any cut will do", bold=True)
        diagram.text(ax, 15, 0.4, "sum over a row: one program, one row", bold=True)
        colours = (style.PEER, style.WASTE, style.COMPUTE)
        for i in range(12):
            diagram.box(
                ax,
                0.2 + 2.1 * (i % 4),
                0.9 + 1.2 * (i // 4),
                2.1,
                1.1,
                f"program {i // 2}",
                colours[i // 2 % 3],
                size=8,
            )
        for i in range(3):
            diagram.box(
                ax, 9.6, 0.9 + 1.2 * i, 7.4, 1.1, f"program {i}: the whole row in registers", colours[i], size=9
            )
            diagram.arrow(ax, (17, 1.45 + 1.2 * i), (18.1, 1.45 + 1.2 * i))
            diagram.box(ax, 18.1, 0.95 + 1.2 * i, 1.6, 1.0, "sum", colours[i], size=9)
        diagram.text(ax, 4.4, 4.9, "no element needs another one", size=9)
        diagram.text(ax, 14.6, 4.9, "every element is divided by the sum, so all wait for it", size=9)
    return diagram.picture(
        ax, alt="Left: an elementwise operation; blocks of any place in the tensor go to any program. Right: a sum over "
            "rows; "
        "each program holds a whole row, because each element needs the row's sum.",
    )  # fmt: skip


# ---- GELU ------------------------------------------------------------------------------------------------------------

# One call each: what the lecture's profile says (kernel, launches, tensors that each moves, ms together).
_PUBLISHED = (
    ("mul of two tensors", 3, 3, 7.039), ("mul by a number", 3, 2, 4.647), ("add of two tensors", 1, 3, 2.343),
    ("add of a number", 1, 2, 1.553), ("tanh", 1, 2, 1.545), ("F.gelu: all of it", 1, 2, 1.545),
)  # fmt: skip


def published_profile() -> Table:
    """A profile of GELU by hand and of F.gelu that somebody else made, per kernel and per tensor moved."""
    rows = [(name, calls, calls * each, ms, ms / calls / each) for name, calls, each, ms in _PUBLISHED]
    columns = {"kernel": "", "launches": "", "tensors moved": "", "time": "ms", "per tensor moved": "ms"}
    formats = {"time": ".3f", "per tensor moved": ".3f"}
    caption = "Published in lecture 6 of Stanford's CS336 (2025): time measured there, tensors moved counted here"
    return style.table(columns, rows, formats=formats, caption=caption)


def what_the_profile_says() -> Markdown:
    launches, moved, ms = (sum(row[i] * (row[1] if i == 2 else 1) for row in _PUBLISHED[:-1]) for i in (1, 2, 3))
    fused = _PUBLISHED[-1][3]
    return Markdown(
        "**What you saw.** Whatever a kernel computes, a product, a sum or a hyperbolic tangent, moving one tensor takes "
        "the "
        f"same time. By hand the {launches} kernels take {ms:.3f} ms and move {moved} tensors; `F.gelu` takes {fused} ms "
        "and "
        f"moves two: **{ms / fused:.1f}** times the time, for **{moved / 2:.0f}** times the trips."
    )


def compiled(function: Callable[[Tensor], Tensor]) -> Markdown:
    """The kernel that torch.compile writes: here, where there is a GPU, or recorded on an H200."""
    text, where = recorded("fusion-gelu-compile.txt"), "recorded on an H200"
    if torch.cuda.is_available():
        from torch._inductor.utils import run_and_get_code

        try:
            x = torch.randn(M, N, dtype=torch.bfloat16, device="cuda")
            _, (file, *_) = run_and_get_code(torch.compile(function, dynamic=False), x)
            text, where = file[file.index("@triton.jit") :].partition("'''")[0], "written here"
        except Exception as error:  # no C compiler, or a GPU that Triton does not know
            where += f"; torch.compile does not work here: {error}".partition("\n")[0]
    loads, stores = text.count("tl.load("), text.count("tl.store(")
    return Markdown(f"```python\n{text.strip()}\n```\n\nLoads in this text ({where}): {loads}. Stores: {stores}.")


def cuda_source(name: str) -> Markdown:
    """One kernel of gpukit/kernels/fusion.cu; with the first one, the formula that both use."""
    source = CUDA_FILE.read_text(encoding="utf-8")
    formula = re.search(r"__device__ float gelu.*?^}", source, re.DOTALL | re.MULTILINE)[0]
    kernel = re.search(rf"template <typename T>\n__global__ void {name}\(.*?^}}", source, re.DOTALL | re.MULTILINE)[0]
    shown = kernel if "vector" in name else f"{formula}\n\n{kernel}"
    return Markdown(f"```cpp\n{shown}\n```")


def instructions(triton_kernel) -> Table:
    """Loads and stores in the PTX of the three kernels for bfloat16, and what one of them brings a thread."""
    meta = torch.empty(M, N, dtype=torch.bfloat16, device="meta")
    built = gpukit.compile(triton_kernel, meta, meta, M * N, BLOCK=1024, gpu="h200")
    listed = [("Triton", a) for a in built.accesses]
    for kernel in recorded("fusion-gelu-cuda.ptx").split(".visible .entry ")[1:]:
        name = kernel.partition("(")[0]
        if "bfloat16" in name:
            called = VECTOR if "vector" in name else "CUDA C++, one element per thread"
            found = [a for a in assembly.memory_accesses(assembly.ptx(kernel)) if a.bits == 128 or "vector" not in name]
            listed += [(called, a) for a in found]
    rows = [(name, a.kind, a.instruction, a.bits // 8) for name, a in listed]
    columns = {"kernel": "", "access": "", "PTX": "", "moves": "bytes per thread"}
    return style.table(columns, rows, caption="bfloat16, compiled for an H200; nvcc's PTX is recorded")


def blocks(per_block: int) -> int:
    return -(-M * N // per_block)


def start_us(per_block: int) -> float:
    """How long an H200 needs to start that many blocks, if they do nothing: measured rate."""
    return blocks(per_block) / machine()["empty programs"].value


def what_starting_costs() -> Markdown:
    rate = machine()["empty programs"].value
    return Markdown(
        f"With one element per thread and 256 threads per block, the kernel needs {blocks(256):,} blocks. An H200 starts "
        "at most "
        f"{rate:,.0f} blocks per µs, even if they do nothing (measured with empty programs), so all of them take at least "
        f"**{start_us(256):.0f} µs**. Blocks start while others run, so this time is not added to the time for the bytes: "
        "the "
        "kernel takes at least the larger of the two. With 16 bytes per thread there are "
        f"{blocks(2048):,} blocks, which start in {start_us(2048):.0f} µs."
    )


_WAYS = {  # how a row is called -> its provider in the recorded rows
    "op by op": "torch",
    "torch.compile": "compile",
    "F.gelu": "library",
    "Triton": "triton",
    "CUDA C++, one element per thread": "cuda",
    VECTOR: "cuda-vector",
}


def gelu_times(ways: Mapping[str, Callable[[Tensor], Tensor]]) -> Table:
    """GELU in each way, in bfloat16 and float32: measured here where there is a GPU, else recorded on an H200."""
    here = _measure(ways) if torch.cuda.is_available() else {}
    rows = []
    for name, provider in _WAYS.items():
        row: list[str | float] = [name + " (measured here)" * ((name, "bfloat16") in here)]
        for dtype, short in (("bfloat16", "bf16"), ("float32", "fp32")):
            graph = graphs.gelu(M * N, short)
            plan = graph.plan(None if provider == "torch" else graph.fusible)
            us = here.get((name, dtype)) or took_us("gelu_tanh", provider, dtype)
            row += [plan.bytes / copy_gbps() / 1e3, us or ""]
        rows.append(tuple(row))
    columns = dict.fromkeys(("bf16, model", "bf16, measured", "fp32, model", "fp32, measured"), "µs")
    caption = (
        f"GELU of {M:,} x {N:,}, each call launched from Python, H200; model: bytes at {copy_gbps():,.0f} GB/s, the rate "
        "of a copy"
    )
    if any("" in row for row in rows):
        caption += "; empty: not measured on an H200"
    return style.table({"": ""} | columns, rows, caption=caption, formats=dict.fromkeys(columns, ",.0f"))


def _measure(ways: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[tuple[str, str], float]:
    found = {}
    for name, call in ways.items():
        for dtype in (torch.bfloat16, torch.float32):
            try:
                x = torch.randn(M, N, dtype=dtype, device="cuda")
                torch.testing.assert_close(call(x)[:64], F.gelu(x[:64], approximate="tanh"), atol=0.05, rtol=0.02)
                found[name, str(dtype)[6:]] = time_ms(call, x).median_ms * 1e3
            except Exception as error:  # no nvcc, for instance: the other ways can be measured all the same
                print(f"{name}, {dtype}: not measured here: {error}".partition("\n")[0])
    return found


def what_the_times_say() -> Markdown:
    us = {name: took_us("gelu_tanh", provider) for name, provider in _WAYS.items()}
    graph = graphs.gelu(M * N, "bf16")
    apart_us, fused_us = (graph.plan(fused).bytes / copy_gbps() / 1e3 for fused in (None, graph.fusible))
    cuda, vector = us["CUDA C++, one element per thread"], us[VECTOR]
    text = (
        f"**What you saw.** Op by op takes {us['op by op']:.0f} µs, and the bytes alone explain it: "
        f"{apart_us:.0f} µs at the rate of a copy. Every fused kernel moves the same bytes, for which a copy takes "
        f"{fused_us:.0f} µs, and Triton's takes {us['Triton']:.0f} µs. The CUDA kernel with one element per thread takes {cuda:.0f} µs. It "
        f"moves no more bytes, but starting its {blocks(256):,} blocks alone takes {start_us(256):.0f} µs, so in bfloat16 the "
        "bytes do not decide its time."
    )
    text += f" With 16 bytes per thread the same C++ takes {vector:.0f} µs."
    h100 = {(row.provider, row.dtype): row.median_ms * 1e3 for row in results.rows("gelu_in_cuda", "h100-sxm")}
    one, wide, library = (h100[each, "float32"] for each in ("cuda", "cuda-vector", "library"))
    return Markdown(
        f"{text}\n\nIn float32 there are twice the bytes and, with one element per thread, as many blocks as before. So the bytes "
        "take longer, and starting the blocks hides behind them for the most part. On an H100, whose memory is slower than an "
        f"H200's, three ways were measured in one run. In float32 one element per thread takes {one:.0f} µs, 16 bytes per thread "
        f"take {wide:.0f} and `F.gelu` {library:.0f}; in bfloat16 it is {h100['cuda', 'bfloat16']:.0f}, "
        f"{h100['cuda-vector', 'bfloat16']:.0f} and {h100['library', 'bfloat16']:.0f} µs."
    )


def grid_stride() -> Picture:
    """Which thread of a small grid takes which piece of an array, round by round, and what is left at the end."""
    threads, pieces, left = 4, 10, 3
    colors = (style.READS, style.COMPUTE, style.WRITES, style.NEUTRAL)
    with diagram.canvas(20, 4.4) as ax:
        for i in range(pieces):
            x = 0.2 + 1.7 * i
            diagram.box(ax, x, 1.4, 1.7, 1.2, f"thread {i % threads}", colors[i % threads], size=9, bold=True)
            diagram.text(ax, x + 0.85, 3.0, f"piece {i}", size=9)
            if i % threads == 0:
                diagram.text(ax, x, 0.8, f"round {i // threads + 1}", align="left", bold=True)
        for i in range(left):
            x = 0.2 + 1.7 * pieces + 0.5 * i
            diagram.box(ax, x, 1.4, 0.5, 1.2, str(i % threads), colors[i % threads], size=9, bold=True)
        diagram.text(ax, 0.2 + 1.7 * pieces + 0.25 * left, 3.0, "left over", size=9)
        diagram.text(ax, 10, 3.9, "one array of 43 floats in memory; a piece is 16 bytes, 4 floats", size=10)
    return diagram.picture(
        ax, alt="43 floats as ten pieces of four and three that are left over. Four threads: in round 1 they take pieces 0 to "
        "3, in round 2 pieces 4 to 7, in round 3 threads 0 and 1 take pieces 8 and 9. Threads 0, 1 and 2 take one float each "
        "of those that are left over.",
    )  # fmt: skip


def sin_cos_times() -> Table:
    rows = []
    for name, provider in (("op by op", "torch"), ("torch.compile", "compile"), ("Triton", "triton")):
        row: list[str | float] = [name]
        for dtype, short in (("bfloat16", "bf16"), ("float32", "fp32")):
            graph = graphs.sin_cos(M * N, short)
            plan = graph.plan(None if provider == "torch" else graph.fusible)
            row += [plan.bytes / copy_gbps() / 1e3, took_us("sin_cos", provider, dtype)]
        rows.append(tuple(row))
    columns = dict.fromkeys(("bf16, model", "bf16, measured", "fp32, model", "fp32, measured"), "µs")
    caption = f"sin(x)**2 + cos(x)**2 of {M:,} x {N:,}, each call launched from Python, H200; model: bytes at the rate of a copy"
    return style.table({"": ""} | columns, rows, caption=caption, formats=dict.fromkeys(columns, ",.0f"))


# ---- recomputation ---------------------------------------------------------------------------------------------------

_KEPT = (  # (what is said of it, what the forward pass keeps, whether operations share kernels, recorded provider)
    ("PyTorch, op by op", "s1 s2 y", False, "torch"),
    ("compute again, op by op", "", False, ""),
    ("keep all, two fused kernels", "s1 s2 y", True, ""),
    ("keep s1 and s2, fused", "s1 s2", True, ""),
    ("keep x and y, fused: torch.compile", "y", True, "compile"),
    ("keep nothing but x, fused", "", True, "triton"),
)


def sigmoid_graphs() -> list[Graph]:
    """Three sigmoids and their gradient, for each choice of what is kept."""
    return [graphs.sigmoids(M * N, keep) for keep in ("s1 s2 y", "s1 s2", "y", "")]


def recomputation() -> Table:
    """Accesses of both passes for each choice, and times in float32."""
    rows = []
    for name, keep, fused, provider in _KEPT:
        graph = graphs.sigmoids(M * N, keep)
        plan = graph.plan(graph.fusible if fused else None)
        us = took_us("three_sigmoids", provider, "float32") if provider else None
        kept = keep if "s1" in keep else f"x {keep}"  # without s1 everything is computed again from x
        rows.append((name, kept.strip(), plan.accesses, plan.bytes / copy_gbps() / 1e3, us))
    columns = {"": "", "kept": "", "trips": "", "model": "µs", "measured": "µs"}
    caption = f"Three sigmoids of {M:,} x {N:,} in float32, forward and backward, H200; model: bytes at a copy's rate"
    formats = {"model": ",.0f", "measured": ",.0f"}
    return style.table(columns, rows, caption=caption, formats=formats)


def what_recomputation_says() -> Markdown:
    us = {
        (p, d): took_us("three_sigmoids", p, d) for p in ("torch", "triton", "compile") for d in ("float32", "bfloat16")
    }
    return Markdown(
        "**What you saw.** PyTorch makes 15 trips, because each of its six operations goes to memory for itself. Two fused "
        "kernels that keep only x make 5: forward reads x and writes y, backward reads x and dy and writes dx. Measured in "
        f"float32: {us['torch', 'float32']:.0f} µs against {us['triton', 'float32']:.0f}. Computing again without fusing "
        "is the "
        "worst choice of all, with 21 trips: what is computed again then travels through memory once more.\n\n"
        "`torch.compile` finds a choice of its own: it keeps x and also y. y must be written anyway, because it is the "
        f"result, so keeping it costs the backward pass one read and nothing more. But it takes {us['compile', 'float32']:.0f} µs, much longer than "
        f"its bytes, and in bfloat16, with half of the bytes, it takes {us['compile', 'bfloat16']:.0f} µs, which is no less. So the limit is not the "
        "memory. "
        "The likely reason is that the GPU waits between the two launches while Python runs autograd's and the compiler's "
        "code ([04 Benchmarking](04_benchmarking.ipynb) shows how to see that)."
    )


def lives() -> Picture:
    """Which tensors lie in memory between forward and backward, kept and computed again."""
    with diagram.canvas(20, 6.2) as ax:
        diagram.text(ax, 4.9, 0.4, "forward", bold=True)
        diagram.text(ax, 10.4, 0.4, "the rest of the model", bold=True)
        diagram.text(ax, 16.2, 0.4, "backward", bold=True)
        for x in (7.2, 13.6):
            ax.plot([x, x], [0.1, 6.1], color=style.BOUND, ls="--", lw=1)
        diagram.text(ax, 2.5, 1.9, "keep the results", bold=True, align="right", size=9)
        for i, (name, start) in enumerate((("s1", 4.0), ("s2", 5.0), ("y", 6.0))):
            diagram.box(
                ax, start, 0.8 + 0.75 * i, 17.6 - start - 0.8 * i, 0.7, f"{name} in memory", style.WASTE, size=9
            )
        diagram.text(ax, 2.5, 4.7, "compute again", bold=True, align="right", size=9)
        diagram.box(ax, 2.8, 3.6, 14.4, 0.7, "x in memory (it was there anyway)", style.NEUTRAL, size=9)
        for i, (name, start) in enumerate((("s1", 3.9), ("s2", 5.0), ("y", 6.1))):
            diagram.box(ax, start, 4.5, 1.0, 0.7, name, style.COMPUTE, size=9)
            diagram.box(ax, 13.8 + 1.1 * i, 4.5, 1.0, 0.7, name, style.COMPUTE, size=9)
        diagram.text(ax, 10.4, 5.7, "green: in registers, gone when the kernel ends", size=8)
    return diagram.picture(
        ax, alt="Above: s1, s2 and y lie in memory from the forward pass until the backward pass has used them. Below: "
            "only x "
        "lies there; s1, s2 and y are computed in registers in the forward pass and again in the backward pass.",
    )  # fmt: skip


# ---- free arithmetic ---------------------------------------------------------------------------------------------------


def relu(traced: Mapping[str, tuple]) -> Table:
    """traced: dtype -> (trace of the kernel that writes only where x < 0, bytes of x)."""
    rows = []
    for name, (trace, nbytes) in traced.items():
        plan = graphs.relu(nbytes, name).plan()
        size = graphs.ITEMSIZE[name]
        sectors = 32 * trace.launches[0].store_sectors
        free = graphs.free_flops(spec("h200"), size)
        rows.append((name, plan.bytes_per_flop, free, 100 * trace.write_bytes / nbytes, 100 * sectors / nbytes))
    columns = {"ReLU": "", "needs": "bytes per FLOP", "free on an H200": "FLOPs per element"}
    columns |= {"elements written": "%", "sectors written": "%"}
    return style.table(columns, rows, caption="first two columns computed; elements and sectors counted")


# ---- epilogues -------------------------------------------------------------------------------------------------------

# The project's README: shape [B, T, O] in 16 bits, ms of two kernels, ms of one, "speedup", GB/s of the one.
_CLAIMS = (
    ((2, 256, 4096), 0.333, 0.054, 6.21, 156.3), ((2, 512, 4096), 1.073, 0.102, 10.55, 164.9),
    ((2, 1024, 4096), 2.865, 0.200, 14.36, 168.2), ((2, 1024, 16384), 11.458, 0.782, 14.65, 171.7),
)  # fmt: skip


def claims() -> Table:
    """What a project reports for fusing bias and GELU, beside what the trips allow and the rates that its times imply."""
    rows = []
    for (B, T, O), apart_ms, one_ms, times, _ in _CLAIMS:
        graph = graphs.bias_gelu(B * T, O, "fp16")
        apart, one = graph.plan().bytes, graph.plan(graph.fusible).bytes
        rows.append((f"{B * T:,} x {O:,}", times, apart / one, one / one_ms / 1e6, apart / apart_ms / 1e6))
    columns = {
        "x": "",
        "reported": "times as fast",
        "by trips": "times as fast",
        "one kernel": "GB/s",
        "two kernels": "GB/s",
    }
    caption = "bias + GELU in 16 bits: speed-up reported by the project; the other columns computed from its times"
    return style.table(columns, rows, formats={"reported": ".2f"}, caption=caption)


def epilogue() -> Picture:
    """A tile of the product on its way to memory, with and without an epilogue."""
    with diagram.canvas(20, 5.6) as ax:
        diagram.text(ax, 4.6, 0.4, "four kernels", bold=True)
        diagram.text(ax, 15, 0.4, "one kernel with an epilogue", bold=True)
        for i, name in enumerate(("matmul", "x scale", "+ residual", "ReLU")):
            x = 0.1 + 2.35 * i
            diagram.box(ax, x, 1.0, 2.2, 1.0, name, style.COMPUTE, size=9, bold=True)
            diagram.arrow(ax, (x + 0.7, 4.2), (x + 0.7, 2.0), "", style.READS)
            diagram.arrow(ax, (x + 1.5, 2.0), (x + 1.5, 4.2), "", style.WRITES)
        diagram.box(ax, 0.1, 4.2, 9.3, 1.1, "device memory", style.NEUTRAL, bold=True)
        diagram.box(ax, 10.8, 0.9, 9.1, 1.5, "", style.COMPUTE, alpha=0.35)
        for i, name in enumerate(("matmul", "x scale", "+ resid.", "ReLU")):
            diagram.box(ax, 10.95 + 2.25 * i, 1.15, 2.0, 1.0, name, style.COMPUTE, size=9, bold=True)
            if i:
                diagram.arrow(ax, (10.95 + 2.25 * i - 0.3, 1.65), (10.95 + 2.25 * i + 0.05, 1.65), width=1.5)
        diagram.arrow(ax, (11.8, 4.2), (11.8, 2.4), "a, b", style.READS)
        diagram.arrow(ax, (16.3, 4.2), (16.3, 2.4), "residual", style.READS)
        diagram.arrow(ax, (18.8, 2.4), (18.8, 4.2), "y", style.WRITES)
        diagram.box(ax, 10.8, 4.2, 9.1, 1.1, "device memory", style.NEUTRAL, bold=True)
        diagram.text(ax, 14.2, 2.75, "acc in registers", size=9)
    return diagram.picture(
        ax, alt="Left: matmul, scale, residual and ReLU as four kernels, each of which reads from and writes to memory. "
            "Right: "
        "one kernel; the accumulator stays in registers, a, b and the residual are read and y is written once.",
    )  # fmt: skip


# ---- all of it -------------------------------------------------------------------------------------------------------


def five_tricks() -> Table:
    """What makes kernels fast, what each trick saves, and one number of this course for each."""
    gelu = graphs.gelu(M * N, "bf16")
    sigmoids = {keep: graphs.sigmoids(M * N, keep) for keep in ("s1 s2 y", "")}
    apart, again = (graph.plan(graph.fusible).accesses for graph in sigmoids.values())
    rows = (
        ("lower precision", "half the bytes per number", "2 bytes per number instead of 4 (computed)", "01"),
        ("fusion", "trips of intermediate results",
         f"GELU: {gelu.plan().accesses} trips become {gelu.plan(gelu.fusible).accesses} (counted)", "08"),
        ("recomputation", "trips and memory of kept results", f"three sigmoids: {apart} trips become {again} (computed)", "08"),
        ("coalescing", "bytes of sectors that nobody asked for", "4 useful bytes per sector of 32, or all 32 (counted)", "06"),
        ("tiling", "repeated reads of the same data", "a tile of T x T: the reads divided by T (computed)", "07"),
    )  # fmt: skip
    columns = {"trick": "", "what it saves": "", "a number": "", "notebook": ""}
    return style.table(columns, rows, caption="Five tricks of fast kernels")


def when_to_optimize() -> Table:
    rows = (
        ("the GPU is idle between kernels", "fewer launches: fuse, or a CUDA graph", "04, 08"),
        ("a chain of small operations, each at a copy's rate", "fuse them; try torch.compile first", "08"),
        ("a kernel far below a copy's rate", "its accesses: coalescing, width, blocks", "06, 08"),
        ("a matmul near its peak rate", "leave it; work on what surrounds it", "07, 12"),
        ("a kernel that takes 1% of the step", "leave it", "04"),
    )
    columns = {"the profile says": "", "what to do": "", "notebook": ""}
    return style.table(columns, rows, caption="What to work on, and what to leave")


def swiglu_line() -> Markdown:
    """The line of the layer's budget that fusing shortens."""
    part = next(part for part in layer.PARTS if part.operation == "swiglu")
    eager, library, ours = (part.us(provider) for provider in ("torch", "library", "gpukit"))
    pytorch = layer.totals_us()[0]
    return Markdown(
        f"In the layer of Llama 3 8B that notebook 04 timed ({pytorch / 1e3:.1f} ms), the clearest case for fusion is "
        "SwiGLU, an "
        f"activation function of two tensors ([02](02_memory.ipynb)). Written with a sigmoid and two products it takes {eager:.0f} µs. "
        "With PyTorch's own function for one "
        f"of its two steps it takes {library:.0f} µs, which is the line of that table. As one kernel it takes "
        f"**{ours:.0f} µs** "
        "(sums of measured times, 16,384 tokens). [10 GELU](10_gelu.ipynb) writes that kernel, and "
        "[11 Norms](11_norms.ipynb) does the same for the norm "
        "and the residual addition before it."
    )
