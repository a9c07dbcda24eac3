"""Tokens per second from bytes per token: what a step of decoding reads, by batch, and which SMs read it.

    from gpukit.widgets.decoding import busy, decoding

    decoding("llama3-8b", gpu="h200", batch=16, tokens=8192)
    busy(32_768, heads=8, splits=(1, 4, 16), sms=132)

Numbers come from gpukit.accounting.decoding; this draws them.
"""

from __future__ import annotations

from collections.abc import Sequence

import traitlets

from gpukit import hardware
from gpukit.accounting import models, pencil
from gpukit.accounting.decoding import decode_step, tokens_of_sms
from gpukit.widgets import board, calculator, style
from gpukit.widgets.board import Drawing
from gpukit.widgets.calculator import Bar, Calculator
from gpukit.widgets.view import field, menu

WEIGHTS = ("bf16", "fp8", "int4")
CACHES = ("bf16", "int8")
_BATCHES = (1, 4, 16, 64, 256)


class Decoding(Calculator):
    """Traits, all text: model, gpu, batch, tokens (in each sequence's cache), weights and cache (their dtypes)."""

    title = "decoding"
    model = traitlets.Unicode()
    gpu = traitlets.Unicode()
    batch = traitlets.CUnicode()
    tokens = traitlets.CUnicode()
    weights = traitlets.Unicode()
    cache = traitlets.Unicode()

    def __init__(self, **start):
        fields = {
            "model": menu("model", models.PRESETS, 190),
            "gpu": menu("GPU", [gpu.key for gpu in hardware.GPUS], 160),
            "batch": field("batch", 110),
            "tokens": field("tokens each", 150),
            "weights": menu("weights", WEIGHTS, 130),
            "cache": menu("cache", CACHES, 120),
        }
        super().__init__(fields, **start)

    def answer(self, **values: str) -> Drawing:
        model, gpu = models.preset(values["model"]), hardware.gpu(values["gpu"])
        batch, tokens = (pencil.count(values[name], name) for name in ("batch", "tokens"))
        steps = {
            n: decode_step(model, n, tokens, values["weights"], values["cache"]) for n in sorted({*_BATCHES, batch})
        }
        rows = []
        for n, step in steps.items():
            read = step.ms(gpu)
            parts = [
                ("weights", read * step.weights_bytes / step.total_bytes, style.READS),
                ("cache", read * step.cache_bytes / step.total_bytes, style.PEER),
            ]
            text = f"{step.tokens_per_s(gpu):,.0f} tokens/s" if step.fits(gpu) else "does not fit"
            rows.append(Bar(f"batch {n:,}", parts, text, n == batch))
        now = steps[batch]
        head = f"{model.name}, {tokens:,} tokens in each of {calculator.number_of(batch, 'cache')}, {gpu.name}: "
        head += f"{now.tokens_per_s(gpu):,.0f} tokens/s" if now.fits(gpu) else "does not fit"
        lines = [
            f"a step reads {now.weights_bytes / 1e9:,.2f} GB of weights and {now.cache_bytes / 1e9:,.2f} GB of cache: at "
            f"{gpu.hbm_gbps:,.0f} GB/s {now.ms(gpu):,.2f} ms",
            f"each sequence gets {1e3 / now.ms(gpu):,.1f} tokens per second; memory holds {now.held_bytes / 1e9:,.1f} of "
            f"{gpu.hbm_bytes / 1e9:,.0f} GB",
        ]
        unit = "{:,.2f} ms".format
        fitting = [row.total for n, row in zip(steps, rows, strict=True) if steps[n].fits(gpu) or n == batch]
        most = max(fitting, default=rows[0].total)
        drawn, bottom = calculator.bars(rows, 88, most=most * 1.02, unit=unit, left=90)
        keys, bottom = calculator.keys([("weights", style.READS), ("cache", style.PEER)], bottom + 8)
        others = "; ".join(f"{row.label} {row.text}" for row in rows if not row.now)
        return Drawing(
            [*board.heading(head, *lines), *drawn, *keys],
            bottom,
            f"{head}, modelled. {'. '.join(lines)}. Others: {others}.",
        )


def decoding(
    model: str = "llama3-8b",
    gpu: str = "h200",
    batch: int | str = 1,
    tokens: int | str = 8192,
    weights: str = "bf16",
    cache: str = "bf16",
) -> Decoding:
    """Show the bytes and the least time of a step of decoding for several batches, weights and cache apart.

    tokens  in each sequence's cache
    Raises ValueError for what cannot be calculated.
    """
    name, key = models.preset(model).name, hardware.gpu(gpu).key
    for argument, value, allowed in (("weights", weights, WEIGHTS), ("cache", cache, CACHES)):
        if value not in allowed:
            raise ValueError(f"decoding: {argument} must be one of {', '.join(allowed)}, got {value!r}")
    start = {"model": name, "gpu": key, "batch": str(batch), "tokens": str(tokens), "weights": weights, "cache": cache}
    return Decoding(**start)


def busy(tokens: int, heads: int, splits: Sequence[int], sms: int) -> style.Picture:
    """Which SMs read how many tokens of one sequence, for several numbers of parts of each head: the area is the same work,
    the highest bar is how long it takes. Raises ValueError."""
    by_parts = {parts: tokens_of_sms(tokens, heads, parts, sms) for parts in splits}
    with style.use():
        fig, axes = style.figure(1, len(by_parts), height=2.9, sharey=True, squeeze=False)
        said = []
        for ax, (parts, programs) in zip(axes[0], by_parts.items(), strict=True):
            for turn in range(max(map(len, programs))):
                below = [sum(own[:turn]) for own in programs]
                here = [own[turn] if turn < len(own) else 0 for own in programs]
                colour = style.PEER if turn % 2 else style.READS
                top = [low + own for low, own in zip(below, here, strict=True)]
                edges = [sm - 0.5 for sm in range(sms + 1)]  # stairs: one shape, and not one for each SM
                ax.stairs(top, edges, baseline=below, fill=True, color=colour, linewidth=0)
            at_work = sum(bool(own) for own in programs)
            highest = max(map(sum, programs))
            ax.set_title(calculator.number_of(parts, "part"))
            ax.text(
                0.97, 0.96, f"{at_work} of {sms} SMs\n{highest:,} tokens", transform=ax.transAxes, ha="right", va="top"
            )
            ax.set_xlim(-0.5, sms - 0.5)
            style.axes(ax, x="SM")
            said.append(f"{parts}: {at_work} of {sms} SMs at work, at most {highest:,} tokens each")
        axes[0][0].yaxis.set_major_formatter("{x:,.0f}")
        style.axes(axes[0][0], y="tokens that it reads")
    return style.picture(fig, alt=f"{tokens:,} tokens, {heads} heads, by parts of a head. {'; '.join(said)}.")
