"""The loss curves of training runs, from the metrics.csv in each run's folder.

from gpukit.widgets.training_run import loss_curves

loss_curves("runs/tiny")
"""

from __future__ import annotations

import csv
from pathlib import Path

from gpukit.widgets import style
from gpukit.widgets.style import Picture
from gpukit.widgets.versus import Missing

_COLOURS = (style.YOURS, style.PEER, style.COMPUTE, style.WASTE, style.READS, style.WRITES)


def loss_curves(*folders: Path | str, x: str = "tokens") -> Picture | Missing:
    """The loss of each run as a thin line, and its validation loss as dots joined by a thick one.

    folders   of the runs; a run is named after its folder
    x         "tokens" (trained on), "step" or "seconds"
    A sentence instead of a picture where nothing is recorded yet. Raises ValueError for another `x`.
    """
    if x not in ("tokens", "step", "seconds"):
        raise ValueError(f"loss_curves: x must be tokens, step or seconds, got {x!r}")
    runs = {Path(folder).name: _rows(Path(folder)) for folder in folders}
    runs = {name: rows for name, rows in runs.items() if rows}
    if not runs:
        return Missing("No training run is recorded there yet.")
    with style.use():
        fig, ax = style.figure(height=3.8)
        ends, words = [], []
        for (name, rows), colour in zip(runs.items(), _COLOURS, strict=False):
            loss, validation = ([(float(r[x]), float(r[c])) for r in rows if r[c]] for c in ("loss", "validation_loss"))
            ax.plot(*zip(*loss, strict=True), color=colour, lw=1, alpha=0.5)
            text = f"{name}: the loss goes from {loss[0][1]:.2f} to {loss[-1][1]:.2f}"
            if validation:
                ax.plot(*zip(*validation, strict=True), color=colour, marker="o", ms=4)
                text += f", the validation loss to {validation[-1][1]:.2f}"
            ends.append(((validation or loss)[-1], name))
            words.append(text)
        style.axes(ax, x=f"{x} (s)" if x == "seconds" else x, y="loss (nats per token)", grid="y", whole="x")
        style.names(ax, ends)
        ax.set_title("Loss of each batch (thin) and on the validation text (dots)")
    return style.picture(fig, alt=f"Loss by {x}. {'; '.join(words)}.")


def _rows(folder: Path) -> list[dict[str, str]]:
    """The complete rows of the run's metrics.csv; none where there is no such file."""
    try:
        text = (folder / "metrics.csv").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
