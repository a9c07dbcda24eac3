"""Pictures of measured times: the first calls, the spread of many, rates by size, scaling. Numbers in, figure out.

Each takes what was measured, live or recorded; where that is empty it gives a sentence that says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from gpukit.widgets import style
from gpukit.widgets.style import Picture
from gpukit.widgets.versus import Missing

_COLOURS = (style.YOURS, style.PEER, style.COMPUTE, style.WASTE, style.READS, style.WRITES)


def _missing() -> Missing:
    return Missing("Nothing of the kind is recorded yet.")


def first_calls(calls_us: Mapping[str, Sequence[float]], where: str) -> Picture | Missing:
    """How long call 1, 2, 3, ... took. calls_us: name -> microseconds in the order of the calls."""
    if not calls_us:
        return _missing()
    with style.use():
        fig, ax = style.figure(height=3.4)
        ends = []
        for (name, times), colour in zip(calls_us.items(), _COLOURS, strict=False):
            ax.plot(range(1, len(times) + 1), times, color=colour, marker="o", ms=3)
            ends.append(((len(times), statistics.median(times[len(times) // 2 :])), name))
            style.label(ax, 1, times[0], _time(times[0]), dx=13, dy=0)  # right of the fall
        style.axes(ax, x="call", y="time (µs)", log="y", grid="y")
        style.names(ax, ends)
        ax.set_title(f"Call by call, host clock and a wait after each, {where}")
    parts = [
        f"{name} {_time(times[0])} at first, {_time(statistics.median(times))} in the middle"
        for name, times in calls_us.items()
    ]
    return style.picture(fig, alt=f"First calls, {where}: {'; '.join(parts)}.")


def spread(runs_us: Mapping[str, Sequence[float]], where: str) -> Picture | Missing:
    """Every single run as a dot, with the median and what 20 and 80 percent stay below. runs_us: name -> microseconds."""
    if not runs_us:
        return _missing()
    fifths = {name: statistics.quantiles(times, n=5, method="inclusive") for name, times in runs_us.items()}
    right = 1.25 * max(four[3] for four in fifths.values())
    with style.use():
        fig, ax = style.figure(height=0.9 + 0.75 * len(runs_us))
        parts = []
        for line, ((name, times), colour) in enumerate(zip(runs_us.items(), _COLOURS, strict=False)):
            heights = [
                line + 0.5 * ((i * 0.618034) % 1 - 0.5) for i in range(len(times))
            ]  # so that dots do not hide dots
            ax.plot(times, heights, "o", ms=2.5, alpha=0.35, color=colour, markeredgewidth=0)
            low, middle, high = fifths[name][0], statistics.median(times), fifths[name][3]
            ax.plot([low, high], [line, line], color=style.INK, lw=1.5)
            ax.plot([middle], [line], "|", ms=22, color=style.INK, mew=2)
            style.label(ax, middle, line - 0.26, f"median {_time(middle)}", dx=0, dy=1, ha="center", size=10)
            beyond = sum(time > right for time in times)
            if beyond:
                text = f"{beyond} more, up to {_time(max(times))}"
                style.label(ax, right, line - 0.26, text, dx=-2, dy=1, ha="right", size=10)  # above the dots
            mean = _time(statistics.fmean(times))
            parts.append(f"{name}: median {_time(middle)}, mean {mean}, {_time(low)} to {_time(high)}, {beyond} beyond")
        ax.set_yticks(range(len(runs_us)), list(runs_us))
        ax.set(ylim=(len(runs_us) - 0.5, -0.75), xlim=(0.93 * min(map(min, runs_us.values())), right))
        style.axes(ax, x="time of one run (µs)")
        ax.set_title(f"Single runs, {where}")
    return style.picture(fig, alt=f"Single runs, {where}. {'; '.join(parts)}.")


def curve(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    title: str,
    bounds: Mapping[str, float] | None = None,
    log: str = "x",
) -> Picture | Missing:
    """Lines with their names at their ends. series: name -> (x, y) in order; bounds: name -> a height that nothing beats."""
    series = {name: points for name, points in series.items() if points}
    if not series:
        return _missing()
    xs = sorted({point[0] for points in series.values() for point in points})
    with style.use():
        fig, ax = style.figure(height=3.8)
        for name, height in (bounds or {}).items():
            ax.axhline(height, color=style.BOUND, ls="--", lw=1.5)
            style.label(ax, xs[0], height, f"{name}: {height:,.0f}", dx=0, dy=-3, ha="left", size=10)
        for points, colour in zip(series.values(), _COLOURS, strict=False):
            ax.plot(*zip(*points, strict=True), color=colour, marker="o", ms=4)
        style.axes(ax, x=x, y=y, log=log)
        if "x" in log:
            shown = [value for value in xs if math.log2(value).is_integer()] or xs
            shown = shown[:: -(-len(shown) // 9)]
            ax.set_xticks(shown, [f"{value:,.0f}" for value in shown], minor=False)
            ax.minorticks_off()
        heights = [point[1] for points in series.values() for point in points]
        if "y" in log and max(heights) < 100 * min(heights):  # powers of ten alone would be one tick or two
            steps = [m * 10.0**e for e in range(-6, 9) for m in (1, 2, 5)]
            shown = [step for step in steps if 0.9 * min(heights) <= step <= 1.1 * max(heights)]
            ax.set_yticks(shown, [f"{value:,g}" for value in shown], minor=False)
            ax.minorticks_off()
        if "y" not in log:
            ax.set_ylim(0, 1.1 * max([*(bounds or {}).values(), *heights]))
        style.names(ax, [(points[-1], name) for name, points in series.items()])
        ax.set_title(title)
    best = "; ".join(f"{name} reaches {style.number(max(p[1] for p in points))}" for name, points in series.items())
    return style.picture(fig, alt=f"{title}: {y} by {x}. {best}.")


def clocks(samples: Sequence[Sequence[float]], where: str) -> Picture | Missing:
    """The SMs' clock and the rate of one kernel over time. samples: (seconds, MHz, TFLOP/s), the first at rest."""
    if not samples:
        return _missing()
    seconds, mhz, rate = zip(*samples, strict=True)
    with style.use():
        fig, (above, below) = style.figure(2, 1, height=3.8, sharex=True)
        above.plot(seconds, mhz, color=style.PEER)
        style.axes(above, y="SM clock (MHz)", grid="y")
        below.plot(seconds[1:], rate[1:], color=style.YOURS)
        style.axes(below, x="time under load (s)", y="TFLOP/s", grid="y")
        above.set_title(f"One matmul again and again, {where}")
    alt = f"{where}: the clock goes from {max(mhz):,} to {mhz[-1]:,} MHz, the rate from {max(rate):,.0f} to {rate[-1]:,.0f} TFLOP/s"
    return style.picture(fig, alt=alt)


def _time(us: float) -> str:
    if us >= 1e6:
        return f"{us / 1e6:,.3g} s"
    return f"{us / 1e3:,.3g} ms" if us >= 1000 else f"{us:,.3g} µs"
