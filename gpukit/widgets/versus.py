"""Ours against the peers, from recorded rows, in one line of a notebook.

from gpukit.widgets.versus import versus

versus("softmax")  # a table of times, a picture of rates, a sentence
versus("softmax", yours="softmax.fused")  # and, once your answer passes, what it is predicted to take
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpukit import benchmark, course, hardware
from gpukit.benchmark import Row, counts_flops, when
from gpukit.grading import example, registry
from gpukit.grading.report import recorded as checked
from gpukit.widgets import style

NAMES = {
    "torch": "eager",
    "compile": "torch.compile",
    "library": "PyTorch",
    "liger-triton": "Liger in Triton",
    "liger-cutedsl": "Liger in CuTe",
    "quack": "QuACK",
    "quack-inplace": "QuACK in place",
    "fa4": "FlashAttention 4",
    "formula": "the formula",
    "gpukit": "this course",
}
_COLOURS = {
    "torch": style.NEUTRAL,
    "compile": style.WASTE,
    "library": style.PEER,
    "liger-triton": style.COMPUTE,
    "liger-cutedsl": style.WRITES,
    "quack": style.READS,
    "fa4": style.COMPUTE,
    "formula": style.NEUTRAL,
    "gpukit": style.YOURS,
}
_SPARE = (style.READS, style.WRITES, style.BOUND)  # for an operation's own peers
MODES = {
    "fwd": "forward",
    "bwd": "backward",
    "fwd+bwd": "forward and backward",
    "wall": "back to back, with the host's time",
    "fwd-graph": "forward, in a CUDA graph",
    "bwd-graph": "backward, in a CUDA graph",
}


def colour(provider: str, others: Sequence[str]) -> str:
    if "yours" in others and provider in ("yours", "gpukit"):  # purple is the learner's
        return style.YOURS if provider == "yours" else style.WRITES
    spare = [name for name in others if name not in _COLOURS]
    return _COLOURS.get(provider) or _SPARE[spare.index(provider) % len(_SPARE)]


def order(providers: Iterable[str]) -> list[str]:
    """Eager first, ours last, and then the learner's."""
    known = [*NAMES]
    place = {"gpukit": 1, "yours": 2}
    return sorted(set(providers), key=lambda p: (place.get(p, 0), known.index(p) if p in known else len(known), p))


def by(shape: Sequence[int]) -> str:
    return " x ".join(f"{n:,}" for n in shape)


def _dates(called: str, graphed: str) -> str:
    """When calls and CUDA graphs were measured: once where it was on the same days."""
    return f"calls {called}, CUDA graphs {graphed}" if graphed and graphed != called else called


class Versus:
    """Times of one operation, mode and dtype side by side: `table`, `picture` and `sentence`. A cell shows all three."""

    def __init__(self, rows: Sequence[Row], mode: str, names: Mapping[str, str]):
        self.rows, self.mode, self.names = [row for row in rows if row.op != "copy"], mode, {**NAMES, **names}
        self.took = {(row.shape, row.provider): row for row in self.rows if row.mode == mode}
        self.graph = {(row.shape, row.provider): row for row in self.rows if row.mode == f"{mode}-graph"}
        first = next(iter(self.took.values()))
        self.gpu, self.dtype, self.op = first.gpu, first.dtype, first.op
        self.flops = counts_flops(first)
        self.copy = next((row.gbps for row in rows if row.op == "copy"), None)
        self.providers = order(provider for _, provider in self.took)
        self.shapes = sorted({shape for shape, _ in self.took}, key=lambda s: (math.prod(s), s))
        graphed = when(row for row in self.graph.values() if row.shape in self.shapes)
        self.date = _dates(when(self.took.values()), graphed)

    def _name(self, provider: str) -> str:
        return self.names.get(provider, provider)

    @property
    def bound(self) -> tuple[float, str]:
        """The rate that nothing here can beat, in GB/s or TFLOP/s, and what it is."""
        gpu = hardware.gpu(self.gpu)
        if self.flops:
            dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "tf32"}.get(self.dtype, "bf16")
            return gpu.peak(dtype) / 1e12, "data sheet"
        return (self.copy, "copy, measured") if self.copy else (gpu.hbm_gbps, "data sheet")

    def _judged(self, shape: tuple[int, ...]) -> dict:
        """The rows that kernels of this shape are judged by: those in a CUDA graph, where the CPU was the limit, unless some
        of the others cannot be captured."""
        graphed = all((shape, p) in self.graph for p in self.providers if (shape, p) in self.took and p != "yours")
        return self.graph if graphed else self.took

    def _rate(self, row: Row) -> float:
        return row.tflops if self.flops else row.gbps

    def _least_us(self, row: Row) -> float:
        rate, _ = self.bound
        return row.flops / rate / 1e6 if self.flops else row.bytes / rate / 1e3

    @property
    def title(self) -> str:
        return f"{self.op}, {MODES[self.mode]}, {self.dtype}: recorded on an {self.gpu}, {self.date}"

    @property
    def table(self) -> style.Table:
        """A row for each shape and way of timing, in µs. The ways have a column where there is more than one."""
        ways = {"call": self.took, "CUDA graph": self.graph}
        timed = {"timed": ""} if self.graph else {}
        lines = []
        for way, took in ways.items():
            for shape in self.shapes:
                there = {p: took[shape, p] for p in self.providers if (shape, p) in took}
                if there:
                    times = (there[p].median_ms * 1e3 if p in there else None for p in self.providers)
                    what = (by(shape), way) if timed else (by(shape),)
                    lines.append((*what, self._least_us(next(iter(there.values()))), *times))
        named = ["model", *map(self._name, self.providers)]
        columns = {"shape": "", **timed, **dict.fromkeys(named, "")}  # the unit is in the caption: headers stay short
        caption = f"{self.title}; times in µs"
        return style.table(
            columns, lines, caption=caption, formats=dict.fromkeys(named, ",.1f"), whole=("shape", "timed")
        )

    def _along(self) -> tuple[int, list[tuple[int, ...]]]:
        """(dimension, shapes) if most shapes differ in one dimension alone, or are cubes; else (-1, all shapes)."""
        if all(len(set(shape)) == 1 for shape in self.shapes):
            return 0, self.shapes
        best = (-1, self.shapes)
        for axis in range(len(self.shapes[0])):
            rest = Counter(shape[:axis] + shape[axis + 1 :] for shape in self.shapes)
            common, count = rest.most_common(1)[0]
            if count >= 3 and count > len(self.shapes) / 2:
                best = axis, [s for s in self.shapes if s[:axis] + s[axis + 1 :] == common]
        return best

    @property
    def picture(self) -> style.Picture:
        """Rates as lines along the size in which the shapes differ; as bars where they differ in more than one."""
        axis, shapes = self._along()
        return self._bars(shapes) if axis < 0 else self._lines(axis, shapes)

    def _bars(self, shapes: Sequence[tuple[int, ...]]) -> style.Picture:
        bound, what = self.bound
        unit, rate = ("TFLOP/s", "FLOPs / time") if self.flops else ("GB/s", "least bytes / time")
        thick = 0.8 / len(self.providers)
        with style.use():
            fig, ax = style.figure(height=1.1 + len(shapes) * (0.15 + 0.14 * len(self.providers)))
            for i, p in enumerate(self.providers):
                there = [(at, self.took[s, p]) for at, s in enumerate(shapes) if (s, p) in self.took]
                places = [at + (i - (len(self.providers) - 1) / 2) * thick for at, _ in there]
                rates = [self._rate(row) for _, row in there]
                ax.barh(places, rates, 0.9 * thick, color=colour(p, self.providers), label=self._name(p))
            ax.axvline(bound, color=style.BOUND, ls="--", label=f"{what}: {bound:,.0f}")
            style.axes(ax, x=f"{rate} ({unit})")
            ax.set_yticks(range(len(shapes)), [by(s) for s in shapes])
            ax.set(xlim=(0, 1.08 * bound), ylim=(len(shapes) - 0.5, -0.5))
            ax.tick_params(axis="y", length=0)
            fig.legend(loc="outside upper left", ncols=6, columnspacing=1.2, handlelength=1.5)
        return style.picture(fig, alt=f"{self.title}. {self.sentence}")

    def _lines(self, axis: int, shapes: Sequence[tuple[int, ...]]) -> style.Picture:
        bound, what = self.bound
        top, unit = 1.15 * bound, "TFLOP/s" if self.flops else "GB/s"
        x = {shape: shape[axis] for shape in shapes}
        with style.use():
            fig, ax = style.figure(height=3.6)
            ax.axhline(bound, color=style.BOUND, ls="--")
            style.label(ax, min(x.values()), bound, f"{what}: {bound:,.0f}", dx=0, dy=4, ha="left")
            ends = []
            for p in self.providers:
                points = [(x[s], self._rate(self.took[s, p])) for s in shapes if (s, p) in self.took]
                if points:
                    line = {"lw": 3, "ls": ":", "ms": 9, "zorder": 4} if p == "yours" else {}
                    ax.plot(*zip(*points, strict=True), marker="o", color=colour(p, self.providers), **line)
                    last_x, last_y = points[-1]
                    ends.append(((last_x, min(last_y, top)), self._name(p)))
            rate = "FLOPs / time" if self.flops else "least bytes / time"
            style.axes(ax, x=_x_label(axis, shapes), y=f"{rate} ({unit})", log="x")
            ax.set_xticks([*x.values()], [f"{v:,}" for v in x.values()], minor=False)
            ax.minorticks_off()
            ax.set_ylim(0, top)
            style.names(ax, ends, bbox=style.CLEAR)
        return style.picture(fig, alt=f"{self.title}. {self.sentence}")

    @property
    def sentence(self) -> str:
        """Ours against the best of the others, where it is furthest ahead and where it is least so; share of the bound."""
        bound, _ = self.bound
        ratios, best = {}, {}
        for shape in self.shapes:
            took = self._judged(shape)
            ours = took.get((shape, "gpukit"))
            peer = benchmark.best_peer(took[shape, p] for p in self.providers if (shape, p) in took)
            if ours and peer:
                best[shape] = peer
                ratios[shape] = best[shape].median_ms / ours.median_ms
        if not ratios:
            return f"{len(self.providers)} providers at {len(self.shapes)} shapes."
        high, low = max(ratios, key=ratios.get), min(ratios, key=ratios.get)
        share = {shape: self._rate(self._judged(shape)[shape, "gpukit"]) / bound for shape in ratios}
        top = max(share, key=share.get)
        of = "the peak" if self.flops else "the rate of a copy" if self.copy else "the data sheet's bandwidth"
        text = f"This course's kernel is {ratios[high]:.2f} times as fast as the best of the others"
        text += f" ({self._name(best[high].provider)}) at {by(high)}"
        if low != high:
            text += f" and {ratios[low]:.2f} times ({self._name(best[low].provider)}) at {by(low)}"
        if any(self._judged(shape) is self.graph for shape in ratios):
            text += " (by the times in CUDA graphs where the table has them)"
        return f"{text}; it reaches {share[top]:.0%} of {of} at {by(top)} (measured)."

    def __repr__(self) -> str:
        return f"{self.table}\n{self.sentence}"

    def _ipython_display_(self) -> None:
        from IPython.display import Markdown, display

        display(self.table, self.picture, Markdown(self.sentence))


class Missing:
    """What a cell shows where no run is recorded."""

    def __init__(self, sentence: str):
        self.sentence = sentence

    def __repr__(self) -> str:
        return self.sentence

    def _repr_markdown_(self) -> str:
        return self.sentence


def versus(
    op: str,
    gpu: str = "h200",
    mode: str = "fwd",
    dtype: str = "",
    names: Mapping[str, str] | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
    yours: str = "",
) -> Versus | Missing:
    """Ours against the peers, from the recorded rows: a table of times, a picture of rates, a sentence.

    mode    "fwd", "bwd", "fwd+bwd", "wall"
    dtype   default: the one with most rows
    names   provider -> what the lesson calls it, {"torch": "five lines"}
    shapes  default: all that are recorded
    yours   an exercise, "softmax.fused": once it passes, your kernel is one line more, in purple, measured where this
            machine has the GPU of the rows and else predicted for it. A cell that asks for it is tagged `answers`
    Where nothing of the kind is recorded, a sentence that says so. Raises ValueError for an unknown GPU or mode.
    """
    if mode not in benchmark.MODES:
        raise ValueError(f"mode must be one of {', '.join(benchmark.MODES)}, got {mode!r}")
    try:
        recorded = benchmark.rows(op, gpu)
    except FileNotFoundError:
        recorded = []
    own = [row for row in recorded if row.op == op and row.mode == mode and (shapes is None or row.shape in shapes)]
    if not own:
        key = hardware.gpu(gpu).name
        return Missing(
            f"No times of {op} ({MODES.get(mode, mode)}) are recorded for the {key} yet: `gpukit bench {op}` makes them."
        )
    dtype = dtype or Counter(row.dtype for row in own).most_common(1)[0][0]
    kept = [
        r
        for r in recorded
        if r.op == "copy" or ((r.op, r.dtype) == (op, dtype) and (shapes is None or r.shape in shapes))
    ]
    names = dict(names or {})
    if yours:
        took, names["yours"] = _yours(yours, gpu, [r for r in kept if r.op == op and r.mode == mode])
        kept += took
    return Versus(kept, mode, names)


def _yours(exercise_id: str, gpu: str, rows: Sequence[Row]) -> tuple[list[Row], str]:
    """A row for the learner's kernel at each shape of the recorded ones, and what to call it; none before it passes.

    Raises CourseError with what goes wrong in it.
    """
    exercise = registry.exercise(exercise_id)
    root = course.root()
    last = checked(root).get(exercise.id, {"state": "", "edited": True})
    if last["state"] != "pass" or last["edited"]:
        return [], "yours"
    measured = _here(gpu)
    one_each = list({row.shape: row for row in rows}.values())
    path = course.exercise_file(exercise.concept, root, "exercises")
    found = example.weigh(exercise.id, path, gpu, [(row.dtype, row.shape) for row in one_each], measured)
    took = [
        replace(row, provider="yours", median_ms=us * 1e-3, p20_ms=us * 1e-3, p80_ms=us * 1e-3, note="")
        for row, us in zip(one_each, (each["time_us"] for each in found), strict=True)
    ]
    return took, "yours, measured here" if measured else "yours, predicted"


def _here(gpu: str) -> bool:
    """Whether this machine has the GPU of that name."""
    import torch

    try:
        there = hardware.gpu(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    except ValueError:
        return False
    return there is not None and there.key == hardware.gpu(gpu).key


def _x_label(axis: int, shapes: Sequence[tuple[int, ...]]) -> str:
    rank = len(shapes[0])
    if rank > 1 and len(set(shapes[0])) == 1:
        return f"{' = '.join('MNK'[:rank])} (elements)"
    return f"{' x '.join('n' if i == axis else f'{size:,}' for i, size in enumerate(shapes[0]))}, n (elements)"


def show_recorded(ops: Sequence[str], gpu: str, modes: Sequence[str] | None, out: Path | None) -> None:
    """`gpukit bench --show`: print the recorded rows of each operation and, with a folder `out`, draw them as PNG files there.

    Raises FileNotFoundError where nothing is recorded, ValueError for an unknown GPU.
    """
    gpu = hardware.gpu(gpu).key
    if list(ops) == ["all"]:
        ops = sorted(p.stem for p in (benchmark.RESULTS / gpu).glob("*.csv") if benchmark.holds_times(p))
    for op in ops:
        recorded = benchmark.rows(op, gpu)
        print(*map(benchmark.line, recorded), benchmark.summary(recorded), sep="\n")
        drawn = modes or dict.fromkeys(row.mode for row in recorded if row.op == op and row.mode in benchmark.MODES)
        for mode in drawn if out else ():
            view = versus(op, gpu, mode)
            if isinstance(view, Versus):
                out.mkdir(parents=True, exist_ok=True)
                path = out / f"{op}-{mode.replace('+', '-')}-{gpu}.png"
                path.write_bytes(view.picture.data)
                print(f"picture: {path}")
