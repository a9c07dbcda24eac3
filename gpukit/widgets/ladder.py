"""The ladder of notebook 17 as pictures: how fast a training step is after each change, and the losses of all of them.

from gpukit.widgets.ladder import losses, steps

steps("gpt2")
losses("gpt2")

Both read what `gpukit train --ladder` recorded: gpukit/results/<gpu>/ladder-<preset>.csv, or a folder of one's own.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from gpukit import benchmark
from gpukit.widgets import style
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.versus import Missing

_COLOURS = (style.YOURS, style.PEER, style.COMPUTE, style.WASTE, style.READS, style.WRITES)


def rows(preset: str, folder: Path | str = "h200") -> list[dict[str, str]]:
    """The recorded rungs of a preset, as gpukit.train.ladder.COLUMNS names their values; [] where there are none.

    folder  the key of a GPU, such as "h200", or a folder that `gpukit train --ladder --run` wrote
    """
    return _read(folder, f"ladder-{preset}.csv")


def _read(folder: Path | str, name: str) -> list[dict[str, str]]:
    known = benchmark.RESULTS / str(folder)
    path = (known if known.is_dir() else Path(folder)) / name
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def steps(preset: str, folder: Path | str = "h200") -> Picture | Missing:
    """A bar for each rung: measured tokens per second, with what was modelled before as a mark."""
    found = [row for row in rows(preset, folder) if row["step_ms"]]
    if not found:
        return Missing(f"No ladder of {preset} is recorded there yet: gpukit train --preset {preset} --ladder")
    measured = [float(row["tokens_per_s"]) for row in found]
    with style.use():
        fig, ax = style.figure(height=0.9 + 0.33 * len(found))
        places = range(len(found), 0, -1)
        colours = [style.PEER if row["rung"].startswith("PyTorch") else style.YOURS for row in found]
        ax.barh(places, measured, color=colours, height=0.7)
        tokens = int(found[0]["batch"]) * int(found[0]["seq"])
        modelled = [tokens / float(row["predicted_ms"]) * 1e3 if row["predicted_ms"] else 0.0 for row in found]
        edge = 1.03 * max(*measured, *modelled)  # of the text, which the dashed lines must not cross
        for place, row, value, expected in zip(places, found, measured, modelled, strict=True):
            share = f"   MFU {float(row['mfu']):.0%}" if row["mfu"] else ""
            style.label(ax, edge, place, f"{value:,.0f}{share}", va="center")
            if expected:
                ax.plot([expected, expected], [place - 0.4, place + 0.4], color=style.BOUND, ls="--", lw=1.5)
        ax.set_yticks(places, [row["rung"] for row in found])
        ax.set_xlim(0, 1.3 * edge)
        ax.xaxis.set_major_formatter("{x:,.0f}")
        style.axes(ax, x="tokens per second", grid="x")
        ax.set_title("Measured (bars), and modelled before (dashed)")
    words = "; ".join(f"{row['rung']} {value:,.0f}" for row, value in zip(found, measured, strict=True))
    return style.picture(fig, alt=f"Tokens per second of each rung. {words}.")


def losses(preset: str, folder: Path | str = "h200") -> Picture | Missing:
    """The loss of every step of the recorded rungs, which differ by rounding alone."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in _read(folder, f"ladder-{preset}-losses.csv"):
        curves.setdefault(row["rung"], []).append((int(row["step"]), float(row["loss"])))
    if not curves:
        return Missing(f"No losses of {preset}'s ladder are recorded there yet.")
    with style.use():
        fig, ax = style.figure(height=3.8)
        for (name, points), colour in zip(curves.items(), _COLOURS * len(curves), strict=False):
            ax.plot(*zip(*points, strict=True), color=colour, lw=1.2, label=name)
        ax.legend(frameon=False)  # the curves end in one place, where names would cover each other
        style.axes(ax, x="step", y="loss (nats per token)", grid="y")
        ax.set_title("The loss of each step")
    ends = "; ".join(f"{name} ends at {points[-1][1]:.2f}" for name, points in curves.items())
    return style.picture(fig, alt=f"Loss by step. {ends}.")


def table(preset: str, folder: Path | str = "h200") -> Table:
    """Every rung with what it starts from, its time, MFU, memory and kernels: measured, and modelled before it ran."""
    lines = []
    for row in rows(preset, folder):
        value = lambda name, scale=1.0, row=row: float(row[name]) / scale if row[name] else None  # noqa: E731
        lines.append([
            row["rung"], value("step_ms"), value("predicted_ms"), value("tokens_per_s"), value("mfu", 0.01),
            value("peak_bytes", 1e9), value("predicted_bytes", 1e9), value("kernels"),
        ])  # fmt: skip
    columns = {
        "rung": "", "step": "ms", "step, modelled": "ms", "tokens": "1/s", "MFU": "%", "memory": "GB",
        "memory, modelled": "GB", "kernels": "",
    }  # fmt: skip
    return style.table(columns, lines)


def kernels(preset: str, rung: str, folder: Path | str = "h200", top: int = 10) -> Table:
    """The kernels in which a step of the rung spent the most time, as a profiler recorded them."""
    found = [row for row in _read(folder, f"ladder-{preset}-kernels.csv") if row["rung"] == rung][:top]
    lines = [[_short(row["kernel"]), int(row["launches"]), float(row["us"]) / 1e3] for row in found]
    return style.table({"kernel": "", "launches": "", "time": "ms"}, lines)


def _short(name: str) -> str:
    """A C++ kernel's name without its parameters and the namespaces around it."""
    name = re.sub(r"^void |\(anonymous namespace\)::|cutlass::Kernel2<|at::native::", "", name)
    return re.split(r"[>(]", name)[0][:70]
