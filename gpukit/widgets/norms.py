"""The picture of notebook 11: what a variance loses, by how it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpukit.widgets import style

EXACT = 1e-9  # where an error of 0 is drawn, below anything that float32 can show


def cancellation(ratios: Sequence[float], errors: Mapping[str, Sequence[float]], digits: float = 1.0) -> style.Picture:
    """Relative errors of a variance over how far from 0 the numbers lie, in units of their spread: a line for each way.

    errors  name of the way -> an error for each of `ratios`; the first way is drawn as waste
    digits  the error from which no digit is right: a dashed line
    """
    colours = (style.WASTE, style.YOURS, style.PEER)
    with style.use():
        fig, ax = style.figure(height=4.0)
        style.axes(ax, x="mean / spread", y="relative error of variance", log="xy")
        ax.plot((ratios[0], ratios[-1]), (digits, digits), color=style.BOUND, ls="--")
        style.label(ax, ratios[0], digits, "no digit is right", dx=0, dy=4, ha="left")
        ends = []
        for (name, values), colour in zip(errors.items(), colours, strict=False):
            drawn = [max(value, EXACT) for value in values]
            ax.plot(ratios, drawn, marker="o", color=colour)
            ends.append(((ratios[-1], drawn[-1]), name))
        ax.set_xlim(ratios[0] / 1.3, ratios[-1] * 40)
        ax.set_ylim(EXACT / 2, max(digits, *(max(values) for values in errors.values())) * 20)
        style.names(ax, ends)
    worst = "; ".join(f"{name} up to {max(values):.0e}" for name, values in errors.items())
    return style.picture(fig, alt=f"Relative error of the variance, mean {ratios[-1]:,.0f} times the spread: {worst}.")
