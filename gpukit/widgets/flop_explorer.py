"""Where a model's FLOPs go, by operation, for one token at shorter and longer contexts.

    from gpukit.widgets.flop_explorer import flop_explorer

    flop_explorer("gpt2", tokens=1024)

Numbers come from gpukit.accounting.flops; this draws them.
"""

from __future__ import annotations

from collections.abc import Mapping

import traitlets

from gpukit.accounting import flops, models, pencil
from gpukit.widgets import board, calculator, style
from gpukit.widgets.board import Drawing
from gpukit.widgets.calculator import Bar, Calculator
from gpukit.widgets.view import field, menu

PHASES = {"forward": "a forward pass", "training": "a training step", "decode": "one new token"}
_SQUARE = "attention's square"  # q k^T and weights v: what grows with the square of the length
_GROUPS = {"mlp": "MLP", "experts": "MLP", "router": "MLP", "logits": "logits"}
_GROUPS |= dict.fromkeys(("attention scores", "attention values"), _SQUARE)
_COLOURS = {
    "projections": style.READS,
    _SQUARE: style.YOURS,
    "MLP": style.COMPUTE,
    "logits": style.PEER,
    "computed again": style.WASTE,
}
_LEGEND = {_SQUARE: f"{_SQUARE} (its share behind each bar)"}
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
        counted = {length: _groups(c, length, phase, values["recompute"]) for length in lengths}
        now = counted[tokens]
        total = sum(now.values())
        rows = [
            Bar(
                f"{length:,} tokens",
                [(name, part, _COLOURS[name]) for name, part in groups.items()],
                f"{rate(sum(groups.values()))} ({groups[_SQUARE] / sum(groups.values()):.0%})",
                length == tokens,
            )
            for length, groups in counted.items()
        ]
        factor, rule = (6, "6 N") if phase == "training" else (2, "2 N")
        n = models.parameters(c).active
        head = f"{c.name}, {PHASES[phase]} at {tokens:,} tokens: {rate(total)} a token"
        squared = f"{now[_SQUARE] / total:.1%} of it is attention's square"
        more = f"{abs(total / (factor * n) - 1):.1%} {'more' if total > factor * n else 'less'}"
        compare = f"{more} than {rule} = {factor} x {pencil.big(n)} = {rate(factor * n)}"
        drawn, bottom = calculator.bars(
            rows, 62, most=max(row.total for row in rows) * 1.02, unit=rate, bound=factor * n, bound_text=rule
        )
        legend, bottom = calculator.keys([(_LEGEND.get(name, name), _COLOURS[name]) for name in now], bottom + 14)
        words = board.heading(head, f"{squared}; {compare}")
        parts = ", ".join(f"{name} {rate(part)}" for name, part in now.items())
        return Drawing([*words, *drawn, *legend], bottom, f"{head}, modelled. {parts}. {squared}; {compare}.")


def _groups(c: models.Config, tokens: int, phase: str, recompute: str) -> Mapping[str, float]:
    """FLOPs of one token, by group. Causal: the average token sees half of the context, a new one all of it."""
    if phase == "decode":
        counted, n, factor = flops.forward_flops(c, 1, 1, past=tokens - 1, logits="last"), 1, 1
    else:
        counted, n, factor = flops.forward_flops(c, 1, tokens), tokens, 3 if phase == "training" else 1
    groups = dict.fromkeys(("projections", _SQUARE, "MLP", "logits"), 0.0)
    for name, part in counted.operations.items():
        groups[_GROUPS.get(name, "projections")] += factor * part / n
    if phase == "training" and recompute != "none":
        groups["computed again"] = flops.step_flops(c, 1, tokens, recompute=recompute, flash=False).recomputed / n
    return groups


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
