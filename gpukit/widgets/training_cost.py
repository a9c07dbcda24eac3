"""How long a training run takes, and what it would take on other GPUs.

    from gpukit.widgets.training_cost import training_cost

    training_cost("70B", tokens="15T", gpus="1024xh100", mfu=0.5)

Numbers come from gpukit.accounting.training; this draws them.
"""

from __future__ import annotations

import traitlets

from gpukit import hardware
from gpukit.accounting import models, pencil, training
from gpukit.widgets import board, calculator, style
from gpukit.widgets.board import Drawing
from gpukit.widgets.calculator import Bar, Calculator
from gpukit.widgets.view import field

_OTHERS = ("a100-80gb", "h100-sxm", "h200", "b200")


class TrainingCost(Calculator):
    """Traits, all text: model (a preset or "70B"), tokens ("15T"), gpus ("1024xh100"), mfu, price (of a GPU-hour)."""

    title = "training cost"
    model = traitlets.CUnicode()
    tokens = traitlets.CUnicode()
    gpus = traitlets.Unicode()
    mfu = traitlets.CUnicode()
    price = traitlets.CUnicode()

    def __init__(self, **start):
        fields = {
            "model": field("model", 180),
            "tokens": field("tokens", 130),
            "gpus": field("GPUs", 160),
            "mfu": field("MFU", 100),
            "price": field("price per GPU-hour", 180),
        }
        super().__init__(fields, **start)

    def answer(self, **values: str) -> Drawing:
        number, gpu = pencil.gpus(values["gpus"])
        tokens = pencil.count(values["tokens"], "tokens")
        share, price = pencil.real(values["mfu"], "mfu"), pencil.real(values["price"] or "0", "price")
        name = values["model"]
        n = models.parameters(models.preset(name)).active if name[:1].isalpha() else pencil.count(name, "model")

        def run(on: hardware.Gpu, **options) -> training.Cost:
            return training.training_cost(n, tokens, on, number, share, **options)

        cost = run(gpu, price_per_gpu_hour=price or None)
        trap = run(gpu, sparse_peak=True)
        others = [on for on in map(hardware.gpu, _OTHERS) if on != gpu]
        rows = [
            Bar(gpu.name, [("this run", cost.days, style.COMPUTE)], pencil.days(cost.days), True),
            Bar("with sparsity", [("promised", trap.days, style.WASTE)], f"{pencil.days(trap.days)}, not reached"),
            *(Bar(on.name, [(on.name, run(on).days, style.PEER)], pencil.days(run(on).days)) for on in others),
        ]
        head = f"{name} on {pencil.big(tokens)} tokens, {number:,} {gpu.name}: {pencil.days(cost.days)}"
        peak = gpu.peak("bf16") / 1e12
        lines = [
            f"6 N D = 6 x {pencil.big(n)} x {pencil.big(tokens)} = {cost.flops:.3g} FLOPs",
            f"{number:,} GPUs x {peak:,.4g} TFLOP/s (bf16, dense) x {share:g} = {cost.flops_per_s:.3g} FLOP/s",
            f"{pencil.big(cost.gpu_hours)} GPU-hours"
            + (f", {pencil.big(cost.money)} at {price:g} each" if cost.money is not None else "")
            + f"; {tokens / n:,.3g} tokens per parameter, where 20 is Chinchilla's rule",
        ]
        longest = max(row.total for row in rows)
        drawn, bottom = calculator.bars(rows, 106, most=longest * 1.02, unit=pencil.days, left=130)
        trapped = f"A datasheet's peak with sparsity would promise {pencil.days(trap.days)}."
        also = "; ".join(f"{row.label} {row.text}" for row in rows[2:])
        words = f"{head}, modelled. {'. '.join(lines)}. {trapped} As many GPUs of other kinds: {also}."
        return Drawing([*board.heading(head, *lines), *drawn], bottom + 6, words)


def training_cost(
    model: str = "70B",
    tokens: int | str = "15T",
    gpus: str = "1024xh100",
    mfu: float | str = 0.4,
    price: float | str = "",
) -> TrainingCost:
    """Show days and GPU-hours of a run of 6 N D FLOPs, and of the same run on as many other GPUs.

    model  a preset or a number of parameters; with experts, those that a token uses
    Raises ValueError for what cannot be calculated.
    """
    start = {"model": str(model), "tokens": str(tokens), "gpus": gpus, "mfu": str(mfu), "price": str(price)}
    return TrainingCost(**start)
