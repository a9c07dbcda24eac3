"""Pictures of number formats: range against precision, where the numbers lie, and what rounding does to sums, weights,
gradients and blocks. Numbers go in, a picture comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpukit.accounting.dtypes import Format
from gpukit.widgets import style

_HIGHLIGHT = {"fp16": style.YOURS, "bf16": style.READS}


def _colour(name: str) -> str:
    return _HIGHLIGHT.get(name, style.BOUND)


def range_and_precision(formats: Sequence[Format], low: float = 1e-46, high: float = 1e42) -> style.Picture:
    """One line a format: where it starts and ends (x), and how many significant bits its numbers have there (y)."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    with style.use():
        fig, ax = style.figure(height=4.4)
        style.axes(ax, x="value", y="precision (significant bits)", log="xy", grid="x")
        for fmt in formats:
            colour, front = _colour(fmt.name), fmt.name in _HIGHLIGHT
            bits = range(1, fmt.mantissa_bits + 2)  # below the smallest normal number one is lost at every halving
            smallest, normal, largest = fmt.smallest_subnormal, fmt.smallest_normal, min(fmt.max, high * 1e20)
            ax.plot([smallest * 2.0 ** (n - 1) for n in bits], bits, color=colour, lw=1.2, ls=":")
            width, front_order = (4.5, 3) if front else (2.4, 2)
            ax.plot([normal, largest], [bits[-1]] * 2, color=colour, lw=width, zorder=front_order)
            inside = any(f.mantissa_bits == fmt.mantissa_bits and f.max > fmt.max for f in formats)
            beside = not inside and fmt.max < high
            options = {"color": colour if front else style.INK, "fontweight": "bold" if front else "normal"}
            text = (
                f"{fmt.name}  1 in {2**fmt.mantissa_bits:,}"
                if fmt.mantissa_bits < 30
                else f"{fmt.name}  from 1e-308 to 1e308"
            )
            x = fmt.max if beside else 1.0 if inside else 1e23
            style.label(ax, x, bits[-1], text, dx=8 if beside else 0, dy=0 if beside else 7, **options)
        ax.set_xlim(low, high * 1e12)
        ax.set_xticks([10.0**n for n in range(-40, 41, 10)])
        ax.set_ylim(0.9, 80)
        ax.yaxis.set_major_locator(LogLocator(2))
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.minorticks_off()
    lines = "; ".join(
        f"{f.name} {f.smallest_subnormal:.1e} to {f.max:.1e} with {f.mantissa_bits + 1} bits" for f in formats
    )
    return style.picture(fig, alt=f"Range and significant bits of each format: {lines}.")


def number_lines(formats: Sequence[Format], high: float) -> style.Picture:
    """Every number of each format from 0 to `high`, as a mark on a line."""
    counts = []
    with style.use():
        fig, axes = style.figure(len(formats), 1, height=0.4 + 0.62 * len(formats), sharex=True, squeeze=False)
        for ax, fmt in zip(axes[:, 0], formats, strict=True):
            numbers = [value for bits in range(fmt.max_bits + 1) if (value := fmt.decode(bits)) <= high]
            counts.append(f"{fmt.name} has {len(numbers)}")
            ax.vlines(numbers, 0, 1, color=style.READS, lw=1.2)
            ax.set_yticks([])
            ax.spines["left"].set_visible(False)
            ax.set_ylabel(fmt.name, rotation=0, ha="right", va="center")
        axes[-1, 0].set_xlim(-high / 100, high * 1.01)
        axes[-1, 0].set_xlabel("value")
    return style.picture(fig, alt=f"The numbers from 0 to {high:g}: {', '.join(counts)}; gaps double at powers of two.")


def running_sums(sums: Mapping[str, Sequence[float]], step: float) -> style.Picture:
    """Running sums after 1, 2, 3, … additions of `step`, one line a format."""
    with style.use():
        fig, ax = style.figure()
        style.axes(ax, x="additions", y="running sum", log="xy")
        for name, values in sums.items():
            front = name in _HIGHLIGHT
            colour = _colour(name)
            ax.plot(range(1, len(values) + 1), values, color=colour, lw=3 if front else 1.6, zorder=2 + front)
            style.label(ax, len(values), values[-1], f"{name}: {style.number(values[-1])}", color=style.INK)
        longest = max(len(values) for values in sums.values())
        first = max(1, longest // 2000)
        ax.set_xlim(first, longest * 6)
        ax.set_ylim(bottom=first * step)
    ends = ", ".join(f"{name} ends at {style.number(values[-1])}" for name, values in sums.items())
    return style.picture(fig, alt=f"Running sums of {step:g} over {longest:,} additions: {ends}.")


def trajectories(exact: Sequence[float], nearest: Sequence[float], draws: Sequence[Sequence[float]]) -> style.Picture:
    """A weight over its updates: exactly, rounded to nearest, and several times rounded stochastically."""
    with style.use():
        fig, ax = style.figure()
        style.axes(ax, x="update", y="weight")
        steps = range(len(exact))
        for draw in draws:
            ax.plot(steps, draw, color=style.YOURS, lw=1.0, alpha=0.8)
        ax.plot(steps, exact, color=style.BOUND, lw=1.6, ls="--")
        ax.plot(steps, nearest, color=style.WASTE, lw=3)
        last = [draw[-1] for draw in draws]
        style.label(ax, steps[-1], exact[-1], f"exact: {exact[-1]:.4g}", dy=10)
        style.label(ax, steps[-1], nearest[-1], f"nearest: {nearest[-1]:.4g}")
        style.label(ax, steps[-1], sum(last) / len(last), f"stochastic: {min(last):.4g} to {max(last):.4g}", dy=-10)
        ax.set_xlim(0, len(exact) * 1.32)
        ax.set_xticks([steps[-1] * i // 4 for i in range(5)])
    return style.picture(
        fig,
        alt=f"After {len(exact) - 1:,} updates the weight should be {exact[-1]:.4g}; rounded to nearest it is "
        f"{nearest[-1]:.4g}, rounded stochastically {min(last):.4g} to {max(last):.4g}.",
    )


def gradients_in_range(exponents: Sequence[float], scales: Sequence[int], fmt: Format) -> style.Picture:
    """Histograms of gradient magnitudes (base-2 exponents) for several loss scales 2^s, over the range of `fmt`."""
    from math import log2

    import numpy as np

    exponents = np.asarray(exponents)
    zero, normal, top = log2(fmt.smallest_subnormal) - 1, log2(fmt.smallest_normal), log2(fmt.max)
    low, high = exponents.min() - 1, top + 6
    parts = []
    with style.use():
        fig, axes = style.figure(len(scales), 1, height=0.6 + 1.15 * len(scales), sharex=True, squeeze=False)
        for ax, scale in zip(axes[:, 0], scales, strict=True):
            scaled = exponents + scale
            lost, over = (scaled <= zero).mean(), (scaled >= top).sum()
            ax.axvspan(low, zero, color=style.WASTE, alpha=0.35, lw=0)
            ax.axvspan(zero, normal, color=style.WASTE, alpha=0.15, lw=0)
            ax.axvspan(top, high, color=style.WRITES, alpha=0.2, lw=0)
            ax.hist(scaled, bins=range(int(low) - 1, int(high) + 2), color=style.READS)
            ax.set_yticks([])
            ax.spines["left"].set_visible(False)
            ax.set_ylabel(f"scale\n2^{scale}", rotation=0, ha="right", va="center")
            text = f"{lost:.1%} become 0" + (f", {over:,} overflow" if over else "")
            ax.text(0.01, 0.92, text, transform=ax.transAxes, va="top")
            parts.append(f"with scale 2^{scale} {text}")
        for left, right, name in (
            (low, zero, "zero"),
            (zero, normal, "subnormal"),
            (normal, top, "normal"),
            (top, high, "infinity"),
        ):
            axes[0, 0].annotate(name, ((left + right) / 2, 1.04), xycoords=("data", "axes fraction"), ha="center")
        axes[-1, 0].set_xlim(low, high)
        axes[-1, 0].set_xlabel(f"magnitude of the scaled gradient in {fmt.name} (powers of two)")
    return style.picture(fig, alt=f"Gradients in {fmt.name}: {'; '.join(parts)}.")


def blocks(values: Sequence[float], stored: Mapping[str, Sequence[float]], block: int) -> style.Picture:
    """Numbers (grey) and what is left of them (colored) under several ways to scale them; lines separate blocks."""
    parts = []
    with style.use():
        fig, axes = style.figure(
            len(stored), 1, height=0.4 + 1.7 * len(stored), sharex=True, sharey=True, squeeze=False
        )
        for ax, (name, kept) in zip(axes[:, 0], stored.items(), strict=True):
            ax.bar(range(len(values)), values, color=style.NEUTRAL, width=1.0, label="number")
            ax.bar(range(len(kept)), kept, color=style.YOURS, width=0.5, label="what is stored")
            for edge in range(block, len(values), block):
                ax.axvline(edge - 0.5, color=style.BOUND, lw=0.8, ls=":")
            zeros = sum(k == 0 for k, v in zip(kept, values, strict=True) if v != 0)
            text = f"{name}: {zeros} of {len(values)} become 0"
            ax.set_title(text, fontsize=11)
            ax.set_yscale("symlog", linthresh=0.5)
            ax.set_yticks([-10, -1, 0, 1, 10], ["-10", "-1", "0", "1", "10"])
            ax.minorticks_off()
            parts.append(text)
            style.axes(ax, y="value (log scale\nbeyond 0.5)")
        axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncol=2, fontsize=9)
        axes[-1, 0].set_xlabel("element")
        axes[-1, 0].set_xlim(-1, len(values))
    return style.picture(fig, alt=f"{len(values)} numbers in blocks of {block}. {'; '.join(parts)}.")
