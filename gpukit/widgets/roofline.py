"""Kernels below the roof of a GPU: FLOP/s against FLOPs per byte. Rows go in, the figure comes out.

    from gpukit.accounting.roofline import Point
    from gpukit.widgets.roofline import roofline

    roofline([Point("copy", flops=1, bytes=4), Point("matmul", 2 * n**3, 6 * n**2, time_us=190)], gpu="h200", dtype="bf16")

A point with a time is a full dot where it lies; one without is a ring on the roof, the best that it could do.
`model_roofline("llama3-8b", tokens=4096, phase="decode")` places the operations of a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import traitlets

from gpukit import hardware
from gpukit.accounting import models, pencil
from gpukit.accounting.arguments import whole
from gpukit.accounting.roofline import Point, attainable, least_us, limit, model_points
from gpukit.widgets import board, style
from gpukit.widgets.board import Box, Dot, Drawing, Line, Shape, Words
from gpukit.widgets.calculator import Calculator
from gpukit.widgets.view import View, field, menu

MAX_POINTS = 12
_HEIGHT = 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 780, 50, 390  # of the axes


class RooflineView(View):
    """`gpu` and `dtype` are traits."""

    gpu = traitlets.Unicode("h200")
    dtype = traitlets.Unicode("bf16")

    def __init__(self, points: Sequence[Point], gpu: str, dtype: str):
        self.points = tuple(points)
        controls = {
            "gpu": menu("GPU", [(g.name, g.key) for g in hardware.GPUS], 200),
            "dtype": menu("dtype", hardware.gpu(gpu).peak_flops, 130),
        }
        super().__init__(controls, {"gpu": hardware.gpu(gpu).key, "dtype": dtype})

    def adapt(self) -> None:
        """Another GPU may have no rate for the dtype; then the one that it has most of."""
        rates, asked = list(hardware.gpu(self.gpu).peak_flops), self.controls["dtype"]
        if rates != list(asked.options):
            wanted = self.dtype if self.dtype in rates else "fp16"
            asked.options = rates
            self.dtype = wanted

    @traitlets.validate("dtype")
    def _dtype_valid(self, proposal) -> str:
        rates = hardware.gpu(self.gpu).peak_flops
        if proposal["value"] not in rates:
            raise traitlets.TraitError(f"dtype must be one of {', '.join(rates)}, got {proposal['value']!r}")
        return proposal["value"]

    def drawing(self, gpu: str, dtype: str) -> Drawing:
        return Drawing(_shapes(self.points, gpu, dtype), _HEIGHT, _sentence(self.points, gpu, dtype))

    def __repr__(self) -> str:
        names = ", ".join(point.name for point in self.points)
        return f"roofline of an {hardware.gpu(self._start['gpu']).name} in {self._start['dtype']}: {names}"


def roofline(points: Sequence[Point], gpu: str = "h200", dtype: str = "bf16") -> RooflineView:
    """Place kernels under the roof of `gpu`. Raises ValueError for none or more than 12 points, an unknown GPU, or a
    dtype that it has no rate for."""
    if not 1 <= len(points) <= MAX_POINTS:
        raise ValueError(f"roofline: points must be 1 to {MAX_POINTS} kernels, got {len(points)}")
    hardware.gpu(gpu).peak(dtype)
    return RooflineView(points, gpu, dtype)


PHASES = ("prefill", "decode")


class ModelRoofline(Calculator):
    """A model's operations below a GPU's roof. Traits, all text: model, phase, batch, tokens, gpu, dtype."""

    title = "roofline of a model"
    model = traitlets.Unicode()
    phase = traitlets.Unicode()
    batch = traitlets.CUnicode()
    tokens = traitlets.CUnicode()
    gpu = traitlets.Unicode()
    dtype = traitlets.Unicode()

    def __init__(self, **start):
        fields = {
            "model": menu("model", models.PRESETS, 170),
            "phase": menu("phase", PHASES, 130),
            "batch": field("batch", 110),
            "tokens": field("tokens", 120),
            "gpu": menu("GPU", [g.key for g in hardware.GPUS], 150),
            "dtype": menu("dtype", ("bf16", "fp16", "fp8"), 110),
        }
        super().__init__(fields, **start)

    def answer(self, **values: str) -> Drawing:
        batch, tokens = pencil.count(values["batch"], "batch"), pencil.count(values["tokens"], "tokens")
        gpu, dtype, decode = hardware.gpu(values["gpu"]), values["dtype"], values["phase"] == "decode"
        gpu.peak(dtype)
        new, past = (1, whole("roofline", "tokens", tokens, 1, 10**12) - 1) if decode else (tokens, 0)
        points = model_points(values["model"], batch, new, past=past, dtype=dtype, together=True)
        took = least_us(points, gpu, dtype)
        rate = style.number(batch * new / took * 1e6)
        longest = max(points, key=lambda point: point.least_us(gpu, dtype))
        share = longest.least_us(gpu, dtype) / took
        head = f"{values['model']}, {values['phase']}, {batch:,} x {tokens:,} tokens"
        total = f"at least {style.number(took / 1e3)} ms, at most {rate} tokens/s; {share:.0%} of it {longest.name}"
        shapes = [*_shapes(points, gpu.key, dtype), Words(_RIGHT, 16, head, "right"), Words(_RIGHT, 36, total, "right")]
        return Drawing(shapes, _HEIGHT, f"{head}, modelled: {total}. {_sentence(points, gpu.key, dtype)}")


def model_roofline(
    model: str = "llama3-8b", batch: int | str = 1, tokens: int | str = 4096, phase: str = "prefill", gpu: str = "h200",
    dtype: str = "bf16",
) -> ModelRoofline:  # fmt: skip
    """Place a model's operations under the roof of `gpu`, all layers together: a prefill of `tokens`, or a decode step with
    that many, the new one included. Raises ValueError for what cannot be calculated."""
    if phase not in PHASES:
        raise ValueError(f"model_roofline: phase must be one of {', '.join(PHASES)}, got {phase!r}")
    start = {
        "model": models.preset(model).name, "phase": phase, "batch": str(batch), "tokens": str(tokens),
        "gpu": hardware.gpu(gpu).key, "dtype": dtype,
    }  # fmt: skip
    return ModelRoofline(**start)


def _sentence(points: Sequence[Point], key: str, dtype: str) -> str:
    gpu = hardware.gpu(key)
    parts = []
    for p in points:
        text = f"{p.name}: {style.number(p.intensity)} FLOPs per byte, {_rate(p.flops_per_s(gpu, dtype))}"
        if p.time_us is None:
            parts.append(f"{text} at most, limited by {limit(gpu, dtype, p.intensity)}")
        else:
            share = p.flops_per_s(gpu, dtype) / attainable(gpu, dtype, p.intensity)
            parts.append(f"{text} {p.how}, {share:.0%} of the roof there")
    roof = (
        f"{_rate(gpu.peak(dtype))} from {gpu.ridge(dtype):.0f} FLOPs per byte on, {gpu.hbm_gbps:,.0f} GB/s below that"
    )
    return f"{gpu.name}, {dtype}: {roof}. {'; '.join(parts)}."


def _rate(flops_per_s: float) -> str:
    return f"{style.number(flops_per_s / 1e12)} TFLOP/s"


# ---- the picture -----------------------------------------------------------------------------------------------------


def _shapes(points: Sequence[Point], key: str, dtype: str) -> list[Shape]:
    gpu = hardware.gpu(key)
    peak, ridge = gpu.peak(dtype), gpu.ridge(dtype)
    rates = [point.flops_per_s(gpu, dtype) for point in points]
    low = 10 ** math.floor(math.log10(min(ridge / 10, *(p.intensity for p in points)) * 0.99))
    high = 10 ** math.ceil(math.log10(max(ridge * 10, *(p.intensity for p in points)) * 1.01))
    floor = 10 ** math.floor(math.log10(min([attainable(gpu, dtype, low), *rates]) * 0.99))
    ceiling = peak * 2

    def x(value: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * math.log10(value / low) / math.log10(high / low)

    def y(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * math.log10(value / floor) / math.log10(ceiling / floor)

    shapes: list[Shape] = [
        Words(10, 16, f"{gpu.name}, {dtype}: {_rate(peak)} (dense), {gpu.hbm_gbps:,.0f} GB/s", size=13, bold=True)
    ]
    for power in _powers(low, high):
        shapes.append(Line(((x(power), _TOP), (x(power), _BOTTOM))))
        shapes.append(Words(x(power), _BOTTOM + 14, f"{power:,g}", "center", 11))
    for power in _powers(floor, ceiling):
        shapes.append(Line(((_LEFT, y(power)), (_RIGHT, y(power)))))
        shapes.append(Words(_LEFT - 8, y(power), f"{power / 1e12:,g}", "right", 11))
    shapes.append(Words((_LEFT + _RIGHT) / 2, _BOTTOM + 38, "FLOPs per byte of memory traffic (log scale)", "center"))
    shapes.append(Words(10, 38, "TFLOP/s (log scale)"))
    corner = x(ridge), y(peak)
    roof = ((x(low), y(attainable(gpu, dtype, low))), corner, (_RIGHT, y(peak)))
    shapes.append(Line(roof, style.BOUND, 3))
    shapes.append(Line((corner, (corner[0], _BOTTOM)), style.BOUND, 1, dashed=True))
    shapes.append(Words(corner[0] - 6, _BOTTOM - 12, f"memory limits  {ridge:.0f}", "right", 11))
    shapes.append(Words(corner[0] + 6, _BOTTOM - 12, "compute limits", "left", 11))

    taken: list[tuple[float, float, float]] = []  # left, right, height of the names so far
    for point, rate in sorted(zip(points, rates, strict=True), key=lambda pair: -pair[1]):
        at = x(point.intensity), y(rate)
        timed = point.time_us is not None
        fill = (style.YOURS if point.how == "measured" else style.PEER) if timed else "none"
        title = f"{point.name}: {style.number(point.intensity)} FLOPs per byte, {_rate(rate)}"
        shapes.append(Dot(*at, 6, fill, board.INK if timed else style.YOURS, title))
        width = 7.0 * len(point.name)
        right = at[0] + 12 + width > _RIGHT
        begin = at[0] - 12 - width if right else at[0] + 12
        if not right and begin < corner[0] + 4 < begin + width + 8:  # the dashed line would go through the name
            begin = corner[0] + 8
        height = at[1] + 16
        while any(begin < b and a < begin + width and abs(height - h) < 15 for a, b, h in taken):
            height += 15
        taken.append((begin, begin + width, height))
        if height - at[1] > 24 or begin - at[0] > 24:  # far from its dot: a line leads there
            shapes.append(Line((at, (begin - 3, height)), board.INK, 0.7))
        shapes.append(Words(begin, height, point.name))
    shapes.append(Box(_LEFT, _TOP, _RIGHT - _LEFT, _BOTTOM - _TOP, edge=board.LINE))
    return shapes


def _powers(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**n for n in range(first, last + 1)]
