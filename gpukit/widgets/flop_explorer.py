"""Where a model's FLOPs go, by operation, for one token at shorter and longer contexts.

    from gpukit.widgets.flop_explorer import flop_explorer

    flop_explorer("gpt2", tokens=1024)

Numbers come from gpukit.accounting.flops; this draws them.
"""

from __future__ import annotations

import traitlets

from gpukit.accounting import flops, models, pencil
from gpukit.accounting.flops import SQUARE
from gpukit.widgets import board, calculator, style
from gpukit.widgets.board import Drawing
from gpukit.widgets.calculator import Bar, Calculator
from gpukit.widgets.view import field, menu

PHASES = {"forward": "a forward pass", "training": "a training step", "decode": "one new token"}
_COLOURS = {
    "projections": style.READS,
    SQUARE: style.YOURS,
    "MLP": style.COMPUTE,
    "logits": style.PEER,
    flops.AGAIN: style.WASTE,
}
_LEGEND = {SQUARE: f"{SQUARE} (its share behind each bar)"}
_FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)


class FlopExplorer(Calculator):
    """Traits, all text: model, tokens, phase ("forward", "training", "decode"), recompute."""

    title = "FLOP explorer"
    model = traitlets.Unicode()
    tokens = traitlets.CUnicode()
    phase = traitlets.Unicode()
    recompute = traitlets.Unicode()

    def __init__(self, **start):
        fields = {
            "model": menu("model", models.PRESETS, 170),
            "tokens": field("tokens", 130),
            "phase": menu("of", PHASES, 130),
            "recompute": menu("recompute", ("none", "selective", "full"), 160),
        }
        super().__init__(fields, **start)

    def adapt(self) -> None:
        self.controls["recompute"].disabled = self.phase != "training"

    def answer(self, **values: str) -> Drawing:
        tokens, phase = pencil.count(values["tokens"], "tokens"), values["phase"]
        c = models.preset(values["model"])
        if not 1 <= tokens <= 10**10:
            raise ValueError(f"tokens must be a whole number from 1 to 10^10, got {tokens}")
        lengths = sorted({max(1, int(tokens * factor)) for factor in _FACTORS})
        counted = {length: flops.token_flops(c, length, phase, values["recompute"]) for length in lengths}
        now = counted[tokens]
        total = sum(now.values())
        rows = [
            Bar(
                f"{length:,} tokens",
                [(name, part, _COLOURS[name]) for name, part in groups.items()],
                f"{rate(sum(groups.values()))} ({groups[SQUARE] / sum(groups.values()):.0%})",
                length == tokens,
            )
            for length, groups in counted.items()
        ]
        factor, rule = (6, "6 N") if phase == "training" else (2, "2 N")
        n = models.parameters(c).active
        head = f"{c.name}, {PHASES[phase]} at {tokens:,} tokens: {rate(total)} per token"
        squared = f"{now[SQUARE] / total:.1%} for attention's square"
        more = f"together {abs(total / (factor * n) - 1):.1%} {'more' if total > factor * n else 'less'}"
        compare = f"{more} than {rule} = {factor} x {pencil.big(n)} = {rate(factor * n)}"
        drawn, bottom = calculator.bars(
            rows, 62, most=max(row.total for row in rows) * 1.02, unit=rate, bound=factor * n, bound_text=rule
        )
        legend, bottom = calculator.keys([(_LEGEND.get(name, name), _COLOURS[name]) for name in now], bottom + 14)
        words = board.heading(head, f"{squared}; {compare}")
        parts = ", ".join(f"{name} {rate(part)}" for name, part in now.items())
        return Drawing([*words, *drawn, *legend], bottom, f"{head}, modelled. {parts}. {squared}; {compare}.")


def rate(value: float) -> str:
    """FLOPs as people say them."""
    for unit, step in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if value >= step:
            return f"{value / step:,.3g} {unit}"
    return f"{value:,.0f} FLOP"


def flop_explorer(
    model: str = "gpt2", tokens: int | str = 1024, phase: str = "forward", recompute: str = "none"
) -> FlopExplorer:
    """Show the matmuls' FLOPs for one token of a sequence of `tokens`, and of shorter and longer ones.

    phase      "forward"; "training": forward and backward; "decode": one new token after tokens - 1 in the cache
    recompute  what a training step computes again: "none", "selective", "full"
    Raises ValueError for what cannot be calculated.
    """
    if phase not in PHASES:
        raise ValueError(f"flop_explorer: phase must be one of {', '.join(PHASES)}, got {phase!r}")
    flops.step_flops(model, 1, 1, recompute=recompute)
    start = {"model": models.preset(model).name, "tokens": str(tokens), "phase": phase, "recompute": recompute}
    return FlopExplorer(**start)
