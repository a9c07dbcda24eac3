"""What a training step, or serving, holds on each GPU, and whether it fits: bars over the context length.

    from gpukit.widgets.memory_calculator import memory_calculator

    memory_calculator("llama3-8b", batch=1, tokens=8192, gpus="8xh100", zero=3)

Numbers come from gpukit.accounting.memory; this draws them.
"""

from __future__ import annotations

import traitlets

from gpukit.accounting import memory, models, pencil
from gpukit.accounting.memory import Memory
from gpukit.hardware import Gpu
from gpukit.widgets import calculator, style
from gpukit.widgets.board import Drawing, Words
from gpukit.widgets.calculator import Bar, Calculator
from gpukit.widgets.view import field, menu

_COLOURS = {
    "weights": style.READS,
    "gradients": style.WRITES,
    "optimizer": style.PEER,
    "activations": style.YOURS,
    "kv cache": style.YOURS,
    "working": style.COMPUTE,
}
_FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)


class MemoryCalculator(Calculator):
    """Traits, all text: model, batch (sequences on each replica), tokens, gpus ("8xh100"), what ("training" or
    "serving"), zero, recipe, recompute, attention."""

    title = "memory calculator"
    model = traitlets.Unicode()
    batch = traitlets.CUnicode()
    tokens = traitlets.CUnicode()
    gpus = traitlets.Unicode()
    what = traitlets.Unicode()
    zero = traitlets.CUnicode()
    recipe = traitlets.Unicode()
    recompute = traitlets.Unicode()
    attention = traitlets.Unicode()

    def __init__(self, **start):
        fields = {
            "model": menu("model", models.PRESETS, 170),
            "what": menu("for", ("training", "serving"), 110),
            "batch": field("sequences a replica", 195),
            "tokens": field("tokens", 120),
            "gpus": field("GPUs", 120),
            "zero": menu("ZeRO", ("0", "1", "2", "3"), 90),
            "recipe": menu("recipe", memory.RECIPES, 210),
            "recompute": menu("recompute", memory.RECOMPUTE, 160),
            "attention": menu("attention", memory.ATTENTIONS, 140),
        }
        super().__init__(fields, **start)

    def adapt(self) -> None:
        for name in ("zero", "recipe", "recompute", "attention"):
            self.controls[name].disabled = self.what == "serving"

    def answer(self, **values: str) -> Drawing:
        batch, tokens = pencil.count(values["batch"], "batch"), pencil.count(values["tokens"], "tokens")
        number, gpu = pencil.gpus(values["gpus"])
        c = models.preset(values["model"])

        def holds(length: int) -> Memory:
            if values["what"] == "serving":
                return memory.inference_memory(c, batch, length, tensor=number)
            how = memory.recipe_named(values["recipe"])
            run = memory.Run(how.weights, values["attention"], values["recompute"])
            layout = memory.Parallel(data=number, zero=int(values["zero"]))
            return memory.training_memory(c, batch * number, length, recipe=how, parallel=layout, run=run)

        now = holds(tokens)
        lengths = sorted({max(1, int(tokens * factor)) for factor in _FACTORS})
        rows = [_bar(length, holds(length), gpu, length == tokens) for length in lengths]
        capacity = gpu.hbm_bytes
        most = max(1.15 * capacity, min(now.total_bytes * 1.02, 4 * capacity))
        moment = {"loss": "during the loss", "backward": "in a block's backward pass"}.get(now.moment, "while decoding")
        reason = f"It {now.reason(gpu)}."
        where, sequences = f"{number:,} {gpu.name}", calculator.number_of(batch, "sequence")
        if values["what"] == "serving":
            head = f"Serving {c.name}: {sequences} of at most {tokens:,} tokens on {where}"
        else:
            head = f"Training {c.name}: {sequences} of {tokens:,} tokens on each of {where}"
        longest = memory.largest_context(holds, gpu)
        fits = (
            f"The longest sequence that fits: {calculator.number_of(longest, 'token')}."
            if longest
            else "No sequence fits."
        )
        fits = f"The worst moment is {moment}. {fits}"
        drawn, bottom = calculator.bars(
            rows, 74, most=most, unit=pencil.size, bound=capacity, bound_text=f"{capacity / 1e9:g} GB"
        )
        legend, bottom = calculator.keys([(name, _COLOURS[name]) for name in now.parts], bottom + 14)
        words = [Words(10, 16, head, size=13, bold=True), Words(10, 38, reason), Words(10, 57, fits)]
        parts = ", ".join(f"{name} {pencil.size(part)}" for name, part in now.parts.items())
        return Drawing([*words, *drawn, *legend], bottom, f"{head}, modelled. {reason} {parts}. {fits}")


def _bar(length: int, held: Memory, gpu: Gpu, now: bool) -> Bar:
    parts = [(name, part, _COLOURS[name]) for name, part in held.parts.items()]
    mark = "" if held.fits(gpu) else " ✗"
    return Bar(f"{length:,} tokens", parts, f"{pencil.size(held.total_bytes)}{mark}", now)


def memory_calculator(
    model: str = "llama3-8b", batch: int | str = 1, tokens: int | str = 8192, gpus: str = "8xh100", *, zero: int = 3,
    recipe: str = "bf16-adamw", recompute: str = "none", attention: str = "flash", serving: bool = False,
) -> MemoryCalculator:  # fmt: skip
    """Show what each GPU holds, and what it would hold at shorter and longer contexts.

    batch    sequences on each replica: every GPU is one while training; while serving all GPUs together are one
    tokens   of each sequence
    gpus     "8xh100"
    Raises ValueError for what cannot be calculated.
    """
    start = {
        "model": models.preset(model).name, "what": "serving" if serving else "training", "batch": str(batch),
        "tokens": str(tokens), "gpus": gpus, "zero": str(zero), "recipe": memory.recipe_named(recipe).name,
        "recompute": memory.Run(recompute=recompute).recompute, "attention": memory.Run(attention=attention).attention,
    }  # fmt: skip
    memory.Parallel(zero=zero)
    return MemoryCalculator(**start)
