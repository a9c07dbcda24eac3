"""The ladder of notebook 17 as pictures: how fast a training step is after each change, and the losses of all of them.

from gpukit.widgets.ladder import losses, steps

steps("gpt2")
losses("gpt2")

Both read what `gpukit train --ladder` recorded: gpukit/results/<gpu>/ladder-<preset>.csv, or a folder of one's own.
`python -m gpukit.widgets.ladder docs/ladder.svg` draws the picture at the head of README.md anew.
"""

from __future__ import annotations

import csv
import html
import re
import sys
from pathlib import Path

from gpukit import benchmark
from gpukit.widgets import style
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.versus import Missing

_COLOURS = (style.YOURS, style.PEER, style.COMPUTE, style.WASTE, style.READS, style.WRITES)


# The rungs of GPT-2's ladder that the README shows, in words of somebody who has not met them yet.
_FRONT = {
    "naive": "a plain PyTorch loop, float32",
    "bf16": "matrix products in bf16",
    "FlashAttention": "FlashAttention",
    "padded vocabulary": "a vocabulary with aligned rows",
    "torch.compile": "torch.compile",
    "one pass": "the loss in chunks, one pass per batch",
    "bf16 weights": "gpukit's kernels, weights in bf16",
    "fp8": "the blocks' products in fp8",
}
_FRONT_STYLE = """
text { font: 15px system-ui, sans-serif; fill: #262626 } .head { font-weight: 600; font-size: 17px } .small { font-size: 13px }
rect { animation: grow 1.1s ease-out backwards; transform-box: fill-box } .value { animation: show .5s backwards }
@keyframes grow { from { transform: scaleX(0) } } @keyframes show { from { opacity: 0 } }
@media (prefers-color-scheme: dark) { text { fill: #E6E6E6 } }
@media (prefers-reduced-motion: reduce) { rect, .value { animation: none } }
"""


def rows(preset: str, folder: Path | str = "h200") -> list[dict[str, str]]:
    """The recorded rungs of a preset, as gpukit.train.ladder.COLUMNS names their values; [] where there are none.

    folder  the key of a GPU, such as "h200", or a folder that `gpukit train --ladder --run` wrote
    """
    return read(folder, f"ladder-{preset}.csv")


def read(folder: Path | str, name: str) -> list[dict[str, str]]:
    """The rows of a file of a folder of results, by its short name or its path; none where there is no file."""
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
            style.label(ax, edge, place, f"{value:,.0f}{share}", va="center", bbox=style.CLEAR)
            if expected:
                ax.plot([expected, expected], [place - 0.4, place + 0.4], color=style.BOUND, ls="--", lw=1.5)
        ax.set_yticks(places, [row["rung"] for row in found])
        ax.set_xlim(0, 1.3 * edge)
        ax.xaxis.set_major_formatter("{x:,.0f}")
        style.axes(ax, x="tokens per second", grid="x")
        ax.set_title("Measured (bars), and modelled beforehand (dashed)")
    words = "; ".join(f"{row['rung']} {value:,.0f}" for row, value in zip(found, measured, strict=True))
    return style.picture(fig, alt=f"Tokens per second of each rung. {words}.")


def front() -> str:
    """The ladder of GPT-2 as an SVG whose bars grow, for the README: measured tokens per second after each change."""
    found = {row["rung"]: row for row in rows("gpt2") if row["rung"] in _FRONT}
    most, left, widest, step = max(float(row["tokens_per_s"]) for row in found.values()), 330, 330, 34
    naive, best = (float(found[rung]["tokens_per_s"]) for rung in ("naive", "fp8"))
    head = f"GPT-2 (124 M) on one H200: {best / naive:.1f} times the tokens per second, one change at a time"
    parts = [f'<text class="head" x="16" y="30">{head}</text>']
    for n, (rung, words) in enumerate(_FRONT.items()):
        speed, y = float(found[rung]["tokens_per_s"]), 58 + step * n
        wide, wait = widest * speed / most, f'style="animation-delay: {0.5 * n:.1f}s"'
        value = f"{speed:,.0f} tokens/s, {float(found[rung]['mfu']):.1%} MFU"
        parts += [
            f'<text x="{left - 12}" y="{y + 16}" text-anchor="end">{html.escape(words)}</text>',
            f'<rect x="{left}" y="{y}" width="{wide:.1f}" height="22" rx="3" fill="{style.YOURS}" {wait}/>',
            f'<text class="value small" x="{left + wide + 10:.1f}" y="{y + 16}" {wait}>{value}</text>',
        ]
    low = 58 + step * len(_FRONT) + 14
    row = found["fp8"]
    note = f"Measured, torch {row['torch']}. MFU: the share of the H200's 989 TFLOP/s in bf16."
    parts.append(f'<text class="small" x="16" y="{low}">{note}</text>')
    title = "Bars that grow: " + "; ".join(f"{w}, {float(found[r]['tokens_per_s']):,.0f}" for r, w in _FRONT.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {low + 16}" width="880" role="img">\n'
        f"<title>{html.escape(title)} tokens per second.</title>\n<style>{_FRONT_STYLE}</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def loss_curves(preset: str, folder: Path | str = "h200") -> dict[str, list[tuple[int, float]]]:
    """(step, loss) of every step of the rungs whose losses are recorded."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in read(folder, f"ladder-{preset}-losses.csv"):
        curves.setdefault(row["rung"], []).append((int(row["step"]), float(row["loss"])))
    return curves


def losses(preset: str, folder: Path | str = "h200") -> Picture | Missing:
    """The loss of every step of the recorded rungs, which differ by rounding alone."""
    curves = loss_curves(preset, folder)
    if not curves:
        return Missing(f"No losses of {preset}'s ladder are recorded there yet.")
    with style.use():
        fig, ax = style.figure(height=3.8)
        for n, ((name, points), colour) in enumerate(zip(curves.items(), _COLOURS * len(curves), strict=False)):
            width = 1.2 + 1.8 * (len(curves) - 1 - n)  # the later lines are thinner: what they lie on can still be seen
            ax.plot(*zip(*points, strict=True), color=colour, lw=width, label=name)
        ax.legend(frameon=False)  # the curves end in one place, where names would cover each other
        style.axes(ax, x="step", y="loss (nats per token)", grid="y")
        ax.set_title("The loss of each step")
    ends = "; ".join(f"{name} ends at {points[-1][1]:.2f}" for name, points in curves.items())
    return style.picture(fig, alt=f"Loss by step. {ends}.")


def table(preset: str, folder: Path | str = "h200", caption: str = "") -> Table:
    """Every rung with what it starts from, its time, MFU, memory and kernels: measured, and modelled before it ran."""
    lines = []
    for row in rows(preset, folder):
        value = lambda name, scale=1.0, row=row: float(row[name]) / scale if row[name] else None  # noqa: E731
        lines.append([
            row["rung"], row["starts_from"], value("step_ms"), value("predicted_ms"), value("tokens_per_s"), value("mfu", 0.01),
            value("peak_bytes", 1e9), value("predicted_bytes", 1e9), value("kernels"),
        ])  # fmt: skip
    columns = {
        "rung": "", "starts from": "", "step": "ms", "modelled (ms)": "", "tokens/s": "", "MFU": "%", "memory": "GB",
        "modelled (GB)": "", "kernels": "",
    }  # fmt: skip
    formats = {"MFU": ".1f", "memory": ".1f", "modelled (GB)": ".1f"}
    return style.table(columns, lines, caption=caption, formats=formats, whole=("rung", "starts from"))


def kernels(preset: str, rung: str, folder: Path | str = "h200", top: int = 10, caption: str = "") -> Table:
    """The kernels in which a step of the rung spent the most time, as a profiler recorded them."""
    found = [row for row in read(folder, f"ladder-{preset}-kernels.csv") if row["rung"] == rung][:top]
    lines = [[_short(row["kernel"]), int(row["launches"]), float(row["us"]) / 1e3] for row in found]
    return style.table({"kernel": "", "launches": "", "time": "ms"}, lines, caption=caption)


def _short(name: str) -> str:
    """A C++ kernel's name without its parameters and the namespaces around it."""
    name = re.sub(r"^void |\(anonymous namespace\)::|cutlass::Kernel2<|at::native::", "", name)
    name = re.split(r"[>(]", name)[0]
    return name if len(name) <= 70 else f"{name[:69]}…"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(front(), encoding="utf-8")
