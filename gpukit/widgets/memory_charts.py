"""Pictures of memory: who keeps what, how it grows, what lies in an allocator's segments, what is alive during a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpukit.widgets import style

_MIB = 1 << 20


def memory_map(moments: Mapping[str, Sequence[Sequence[tuple[str | None, int]]]], capacity_bytes: int) -> style.Picture:
    """One line a moment, from address 0 to the GPU's end. moments: title -> segments of (tensor or None, bytes), as
    gpukit.simulator.allocator.Allocator.map returns them."""
    with style.use():
        fig, ax = style.figure(height=0.85 + 0.78 * len(moments))
        for row, segments in enumerate(moments.values()):
            _line(ax, row, segments)
        capacity = capacity_bytes / _MIB
        ax.axvline(capacity, color=style.BOUND, ls="--", lw=1.5)
        ax.set(xlim=(0, 1.02 * capacity), ylim=(len(moments) - 0.45, -0.75))
        ax.set_yticks([])
        for side in ("left", "top", "right"):
            ax.spines[side].set_visible(False)
        for row, title in enumerate(moments):
            style.label(ax, 0, row - 0.36, title, dx=0, dy=1, ha="left", fontsize=10)
        style.axes(
            ax, x="memory (MiB); grey: a tensor, orange: reserved and unused, empty: not asked for, dashed: the end"
        )
        ax.xaxis.label.set_fontsize(10)
    return style.picture(fig, alt=_alt(moments, capacity_bytes))


def _line(ax: Any, row: int, segments: Sequence[Sequence[tuple[str | None, int]]]) -> None:
    at = 0.0
    for segment in segments:
        first = at
        for name, size in segment:
            width = size / _MIB
            colour = style.WASTE if name is None else style.NEUTRAL
            ax.barh(row, width, 0.56, left=at, color=colour, edgecolor="white", linewidth=1)
            if name is not None:
                ax.text(at + width / 2, row, name, ha="center", va="center", fontsize=9)
            at += width
        ax.barh(row, at - first, 0.62, left=first, fill=False, edgecolor=style.INK, linewidth=1.2)


def _alt(moments: Mapping, capacity_bytes: int) -> str:
    parts = []
    for title, segments in moments.items():
        blocks = [block for segment in segments for block in segment]
        used = sum(size for name, size in blocks if name is not None) / _MIB
        idle = sum(size for name, size in blocks if name is None) / _MIB
        parts.append(f"{title}: {used:,.0f} MiB in tensors, {idle:,.0f} MiB reserved and unused")
    return f"Memory of {capacity_bytes / _MIB:,.0f} MiB. " + "; ".join(parts) + "."


def timelines(runs: Mapping[str, Sequence[Any]], unit: str = "MiB") -> style.Picture:
    """Bytes alive after each operation, one line a run. runs: name -> moments with .bytes and .phase, as
    gpukit.live.watch records them. The longest run gives the axis its length."""
    size = {"KiB": 1 << 10, "MiB": _MIB, "GiB": 1 << 30}[unit]
    colours = (style.PEER, style.COMPUTE, style.READS, style.WRITES)
    with style.use():
        fig, ax = style.figure(height=3.6)
        peaks, highest = [], max(moment.bytes for run in runs.values() for moment in run) / size
        for (name, moments), colour in zip(runs.items(), colours, strict=False):
            alive = [moment.bytes / size for moment in moments]
            ax.step(range(1, len(alive) + 1), alive, where="post", color=colour)
            peak = max(alive)
            at = alive.index(peak) + 1
            ax.plot(at, peak, "o", color=colour)
            # The highest is named at its peak, the others at their right end, where the highest has come down.
            x, side = (at, "left") if peak == highest else (len(alive), "right")
            style.label(ax, x, peak, f"{name}: {peak:,.1f} {unit}", dx=0, dy=7, ha=side)
            turn = next((i for i, moment in enumerate(moments) if moment.phase != "forward"), None)
            if turn is not None:
                ax.plot([turn + 0.5] * 2, [0, alive[turn]], color=colour, ls=":", lw=1.2)
            peaks.append(f"{name} {peak:,.1f} {unit}")
        style.axes(ax, x="operations so far (dotted: the backward pass begins)", y=f"alive ({unit})")
        ax.set(xlim=(0, None), ylim=(0, 1.18 * highest))
    return style.picture(fig, alt=f"Bytes alive in the course of a step; peaks: {', '.join(peaks)}.")


PARTS = {"weights": style.READS, "gradients": style.WRITES, "optimizer": style.PEER}  # as in the memory calculator


def shares(rows: Mapping[str, Mapping[str, int]], capacity_bytes: int, *, x: str) -> style.Picture:
    """A stacked bar a row, in GB. rows: name -> part (a key of PARTS) -> bytes; x: what the axis shows, "on each GPU"."""
    totals = {name: sum(parts.values()) / 1e9 for name, parts in rows.items()}
    with style.use():
        fig, ax = style.figure(height=1.25 + 0.42 * len(rows))
        for line, parts in enumerate(rows.values()):
            at = 0.0
            for part, size in parts.items():
                ax.barh(line, size / 1e9, 0.62, left=at, color=PARTS[part], edgecolor="white", linewidth=1)
                if line == 0:
                    style.label(ax, at, -0.36, part, dx=0, dy=2, ha="left", fontsize=10)
                at += size / 1e9
        ax.axvline(capacity_bytes / 1e9, color=style.BOUND, ls="--", lw=1.5)
        ax.set_yticks(range(len(rows)), [f"{name}: {total:,.0f} GB" for name, total in totals.items()])
        ax.set(ylim=(len(rows) - 0.5, -0.9))
        style.axes(ax, x=f"{x}; dashed: all the memory of one (GB)")
    return style.picture(fig, alt=f"{x}: " + ", ".join(f"{name} {total:,.0f} GB" for name, total in totals.items()))


def growth(lengths: Sequence[int], series: Mapping[str, Sequence[int]], level: tuple[str, int]) -> style.Picture:
    """Bytes by context length, in GB on two log axes: one line a series, and a level to compare them with."""
    colours = (style.WASTE, style.PEER, style.COMPUTE)
    name, size = level
    with style.use():
        fig, ax = style.figure(height=3.4)
        ax.axhline(size / 1e9, color=style.BOUND, ls="--", lw=1.5)
        style.label(ax, lengths[0], size / 1e9, f"{name}:\n{size / 1e9:,.0f} GB", dx=0, dy=4, ha="left")
        for (line, sizes), colour in zip(series.items(), colours, strict=False):
            ax.plot(lengths, [each / 1e9 for each in sizes], color=colour)
            style.label(ax, lengths[-1], sizes[-1] / 1e9, line)
        style.axes(ax, x="context (tokens)", y="activations (GB)", log="xy", grid="y")
        ax.set_xticks(lengths[::2], [f"{length:,}" for length in lengths[::2]], minor=False)
        ax.minorticks_off()
    ends = ", ".join(f"{line} {sizes[-1] / 1e9:,.0f} GB" for line, sizes in series.items())
    return style.picture(fig, alt=f"Activations at {lengths[-1]:,} tokens: {ends}; {name} {size / 1e9:,.0f} GB.")
