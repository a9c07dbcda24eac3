"""The pictures of notebook 10: activation functions with their slopes, and what their formulas lose far below 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpukit.widgets import style

_COLOURS = (style.YOURS, style.NEUTRAL, style.PEER)


def activations(
    x: Sequence[float], values: Mapping[str, Sequence[float]], slopes: Mapping[str, Sequence[float]]
) -> style.Picture:
    """Functions of x on the left, their slopes on the right: name -> a number for each of x, the same names in both."""
    with style.use():
        fig, axes = style.figure(1, 2, height=3.4)
        for ax, curves, what in zip(axes, (values, slopes), ("y", "slope"), strict=True):
            style.axes(ax, x="x", y=what, grid="y")
            for (name, numbers), colour in zip(curves.items(), _COLOURS, strict=False):
                ax.plot(x, numbers, color=colour, label=name)
            ax.legend(loc="upper left")
    lowest = ", ".join(f"{name} {min(numbers):.3f}" for name, numbers in values.items())
    steepest = ", ".join(f"{name} {max(numbers):.3f}" for name, numbers in slopes.items())
    return style.picture(fig, alt=f"Lowest values: {lowest}. Steepest slopes: {steepest}.")


def tails(x: Sequence[float], errors: Mapping[str, Sequence[float]], floor: float = 1e-9) -> style.Picture:
    """Relative errors of formulas at each x, by name, for x that falls from left to right.

    An error below `floor`, 0 for instance, is drawn there.
    """
    colours = (style.WASTE, style.READS, style.YOURS)
    with style.use():
        fig, ax = style.figure(height=3.6)
        style.axes(ax, x="x", y="relative error", log="y")
        for (name, numbers), colour in zip(errors.items(), colours, strict=False):
            ax.plot(x, [max(number, floor) for number in numbers], color=colour, label=name)
        ax.set_xlim(x[0], x[-1])
        ax.set_xticks(range(int(x[0] - 1), int(x[-1]) - 1, -1))
        ax.set_ylim(floor, 30)
        ax.legend(loc="upper left")
    worst = "; ".join(f"{name} up to {max(numbers):.0e}" for name, numbers in errors.items())
    return style.picture(fig, alt=f"Relative error for x from {x[0]:g} to {x[-1]:g}: {worst}.")
