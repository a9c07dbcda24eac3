"""The exercises of notebook 10: cases, bounds, and what each wrong idea computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from gpukit.grading import ideas
from gpukit.grading.exercise import Case, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only, only_rows
from gpukit.grading.inputs import Inputs, far, listed, nbytes, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence, Outcome


# --------------------------------------------------------------------------------------- what the exercises compute
def _u(x: Tensor) -> Tensor:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """PyTorch's own: gpukit.reference's rounds in 16 bits after each of its steps, which would allow a kernel more."""
    import torch

    return torch.nn.functional.gelu(x, approximate=approximate)


def _gelu_tanh(x: Tensor) -> Tensor:
    return _gelu(x, "tanh")


# PyTorch's GELU in float32 is 0 below -5.5.
_bias_gelu = ideas.in_float32(ideas.reference("gelu.bias_gelu_library", 2), "double")
_swiglu = ideas.in_float32(ideas.reference("gelu.swiglu"))


def _cumulative(h: Tensor) -> Tensor:
    return 0.5 * (1 + (h * math.sqrt(0.5)).erf())


def _density(h: Tensor) -> Tensor:
    return (-0.5 * h * h).exp() / math.sqrt(2 * math.pi)


def _slope_of(h: Tensor) -> Tensor:
    return _cumulative(h) + h * _density(h)


# ------------------------------------------------------------------------------------------------------------ inputs
class _Inputs(Inputs):
    def line(self, low: float, high: float, n: int) -> Tensor:
        """Every height between them; by chance a little shifted."""
        return self.torch.linspace(low, high, n) + 0.01 * float(self.normal(1))


def _tanh_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)
    normal = make.normal
    both = normal(300)
    both[::2] += 40
    idle = normal(1100)
    idle[:1024] = 0
    return [
        tensor_case(normal(1).abs() + 1),  # one below 0 would be all tail, where 1 + tanh cancels: right answers failed
        tensor_case(normal(64)),
        tensor_case(normal(781, dtype="float16"), tags="once"),
        tensor_case(normal(6, 100, dtype="bfloat16"), tags="leading once"),
        # Here x^3, rounded to 16 bits, changes y by more than the tolerance of float32.
        tensor_case((normal(300, scale=0.15) - 2).bfloat16(), tags="once", note="around -2"),
        tensor_case(make.line(-6, 6, 1025), tags="blocks", note="from -6 to 6"),
        tensor_case(normal(200) + 300, tags="large", note="around 300"),
        tensor_case(both, tags="large", note="around 0 and 40"),
        tensor_case(idle, tags="blocks", note="a block of zeros"),
        tensor_case(normal(128, dtype="float16") + 100, tags="large", note="around 100"),
        tensor_case(normal(200) - 300, tags="below", note="around -300"),
        tensor_case(normal(90, dtype="bfloat16") - 50, tags="below", note="around -50"),
        tensor_case(make.rows(97), tags="large", note="hard rows"),
        tensor_case(make.rows(64, "float16"), tags="large", note="hard rows"),
    ]


def _steep(make: _Inputs, h: float) -> tuple[Tensor, Tensor]:
    """x and bias whose sum, about h, has more digits than bfloat16; so far below 0 GELU changes by 1% where h does by 0.1%."""
    x, bias = make.normal(6, 90, scale=0.1) + h, make.normal(90, scale=0.05)
    return x.to(make.torch.bfloat16), bias.to(make.torch.bfloat16)


def _steep_slope(make: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """x, bias and dy. The first column, from which no gradient comes, gives the rows of y their size."""
    x, bias = _steep(make, -9.2)
    dy = make.like(x).sign()
    x[:, 0], dy[:, 0] = 4, 0
    return x, bias, dy


def _empty_tiles(make: _Inputs) -> tuple[Tensor, Tensor]:
    """x [8, 96] and bias [96]: in the first 32 columns a tile of x is all zeros, in the next 32 the bias is, and in the last 32
    a tile of x + bias."""
    x, bias = make.normal(8, 96), make.normal(96)
    x[:4, :32], bias[32:64] = 0, 0
    x[:4, 64:] = -bias[64:]
    return x, bias


def _bias_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)
    normal = make.normal

    def tiled(x: Tensor, bias: Tensor, BLOCK_M: int, BLOCK_N: int, tags: str = "", note: str = "") -> Case:
        M, N = x.shape
        ends = "partial" if M % BLOCK_M or N % BLOCK_N else ""
        note = listed(f"tiles of {BLOCK_M} x {BLOCK_N}", note)
        return tensor_case(x, bias, BLOCK_M, BLOCK_N, tags=f"{tags} {ends}", note=note)

    def case(x: Tensor, *blocks: int, tags: str = "", note: str = "") -> Case:
        return tiled(x, make.like(x, x.shape[1]), *blocks, tags=tags, note=note)

    heights = make.normal(4, 96)
    heights[0] += 300
    heights[1] -= 300
    return [
        # Not in the tail, where 1 + erf cancels and no larger element is beside it.
        case(normal(1, 1).abs() + 4, 1, 16),
        case(normal(3, 64), 4, 32),
        case(normal(4, 256), 2, 64),
        case(normal(5, 781), 4, 256),
        case(normal(7, 250, dtype="float16"), 8, 64, tags="once"),
        case(normal(33, 100, dtype="bfloat16"), 16, 64, tags="once"),
        tiled(*_empty_tiles(make), 4, 32, tags="zeros", note="tiles of zeros in x and in x + bias, 32 zeros in bias"),
        case(make.line(-6, 6, 3 * 200).view(200, 3).t().contiguous(), 2, 128, note="from -6 to 6"),
        case(heights, 2, 32, tags="large", note="rows around 300 and -300"),
        case(make.rows(97), 8, 64, tags="large", note="hard rows"),
        case(make.rows(130, "float16"), 16, 32, tags="large", note="hard rows"),
        tiled(*_steep(make, -4.2), 8, 64, tags="digits", note="x + bias around -4.2"),
        # Here an error of 1 / sqrt(2) shows most, and nothing in the row is much larger.
        tiled(
            normal(5, 60, scale=0.05) + 1, normal(60, scale=0.05) + 0.4, 4, 32, tags="turn", note="x + bias around 1.4"
        ),
        case(normal(64, 256), 32, 128),
        case(make.stained(normal(4, 40)), 2, 32, tags="special", note="with a NaN"),
    ]


def _idle(make: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """x, bias and dy in tiles of 16 x 128: the first tile of dy is all zeros, the one beside it has x + bias = 0."""
    x, bias, dy = make.normal(20, 200), make.normal(200), make.normal(20, 200)
    dy[:16, :128] = 0
    x[:16, 128:] = -bias[128:]
    return x, bias, dy


def _cancelling(make: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """x, bias and dy in float16; dy of each row but for a little the opposite of the row before."""
    x = make.normal(1, 48).abs().expand(20, 48) + 1
    dy = make.normal(20, 48)
    dy[::2] += 1000
    dy[1::2] -= 1000
    return x.half(), make.normal(48).half(), dy.half()


def _backward_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)
    normal = make.normal

    def case(x: Tensor, upstream: int | None = None, tags: str = "", note: str = "") -> Case:
        """upstream: which of the corners dy is; None: noise"""
        shown, dy = ("", make.like(x)) if upstream is None else make.upstream(x)[upstream]
        tags += " strided-dy" * (not dy.is_contiguous())
        note = listed(note, f"dy {shown}" if shown else "")
        return tensor_case(x, make.like(x, x.shape[1]), dy, tags=tags, note=note)

    heights = make.normal(4, 96)
    heights[0] += 300
    heights[1] -= 300
    return [
        case(normal(1, 1).abs() + 4),
        case(normal(3, 64)),
        case(normal(16, 128)),
        case(normal(20, 100), tags="blocks"),
        case(normal(33, 130), tags="blocks"),
        case(normal(17, 64, dtype="float16"), tags="blocks once"),
        case(normal(5, 250, dtype="bfloat16"), 1, tags="once"),
        case(heights, tags="large", note="rows around 300 and -300"),
        case(normal(7, 97), 0),
        case(normal(18, 40, dtype="float16"), 2, tags="blocks"),
        case(normal(9, 33), 3),
        case(normal(5, 64), 4),
        case(normal(19, 50), 5, tags="blocks"),
        tensor_case(*_cancelling(make), tags="blocks cancel", note="gradients that all but cancel in a column"),
        tensor_case(*_steep_slope(make), tags="digits", note="x + bias around -9.2"),
        case(normal(64, 256), tags="blocks"),
        tensor_case(*_idle(make), tags="blocks", note="a tile of zeros in dy, and one in x + bias"),
        case(make.stained(normal(20, 40)), tags="blocks special", note="with a NaN"),
    ]


def _zero_rows(make: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and dy [4, 40], of which each has a row of zeros of its own."""
    tensors = make.normal(4, 40), make.normal(4, 40), make.normal(4, 40)
    for i, x in enumerate(tensors):
        x[i] = 0
    return tensors


def _swiglu_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)
    normal = make.normal

    def named(gate: Tensor, up: Tensor, dy: Tensor, tags: str, note: str) -> Case:
        return tensor_case(gate, up, dy, shown=f"gate {list(gate.shape)}", tags=tags, note=note)

    def case(gate: Tensor, up: Tensor, upstream: int | None = None, tags: str = "", note: str = "") -> Case:
        """upstream: which of the corners dy is; None: noise"""
        shown, dy = ("", make.like(gate)) if upstream is None else make.upstream(gate)[upstream]
        tags += " strided-dy" * (not dy.is_contiguous())
        return named(gate, up, dy, tags=tags, note=listed(note, f"dy {shown}" if shown else ""))

    def halves(M: int, N: int, dtype: str = "float32") -> Case:
        gate, up = normal(M, 2 * N, dtype=dtype).chunk(2, -1)
        return case(gate, up, tags="strided", note="half of a matmul's result")

    # dy times up is beyond float16, and their product with the slope is not.
    low, high = normal(3, 70, scale=0.2) - 6, normal(3, 70) + 1000
    far_up = named(low.half(), high.half(), normal(3, 70).half() + 100, tags="far", note="up around 1000, dy 100")
    # Here sigmoid(gate) and silu(gate) are next to nothing in float16, and their products with up are not.
    opens = named(
        (low - 10).half(), (high * 30).half(), normal(3, 70).half() + 30, tags="far", note="gate around -16, up 30000"
    )

    return [
        case(normal(1, 1, scale=0.25).abs() + 0.5, normal(1, 1)),
        case(normal(3, 64), normal(3, 64)),
        case(normal(2, 781), normal(2, 781)),
        case(normal(5, 250, dtype="float16"), normal(5, 250, dtype="float16"), tags="once"),
        case(normal(4, 200)[:, :100], normal(4, 100), tags="strided", note="gate half of a wider row"),
        halves(3, 300, dtype="bfloat16"),
        case(normal(2, 90) + 200, normal(2, 90), tags="large", note="gate around 200"),
        case(normal(2, 70) - 200, normal(2, 70), tags="below", note="gate around -200"),
        case(normal(5, 97), normal(5, 97), 0),
        case(normal(4, 300, dtype="bfloat16"), normal(4, 300, dtype="bfloat16"), 1, tags="once"),
        case(normal(6, 64), normal(6, 64), 2),
        case(normal(3, 257, dtype="float16"), normal(3, 257, dtype="float16"), 3),
        case(normal(3, 50), normal(3, 50), 4),
        case(normal(3, 255), normal(3, 255), 5),
        case(normal(4, 100), normal(4, 200)[:, 100:], tags="strided", note="up half of a wider row"),
        named(*_zero_rows(make), tags="zeros", note="rows of zeros in gate, in up and in dy"),
        far_up,
        opens,
        halves(8, 512),  # the largest, whose bytes are counted: who copies the halves first must be seen
        case(make.stained(normal(4, 40)), normal(4, 40), tags="special", note="with a NaN"),
    ]


# -------------------------------------------------------------------------------------------------- gelu.detective
def _far_below(x: Tensor) -> Tensor:
    """Where e to the power of -2u, u = sqrt(2 / pi) (x + 0.044715 x^3), is beyond float32: rows, or elements of a vector."""
    below = x < -9
    return below.any(-1) if x.ndim > 1 else below


def _u_cut_below(evidence: Evidence) -> bool:
    """Whether y is x / (1 + exp(-2u)) with u cut off below at one number, which the first wrong case tells, and perhaps above
    at the same distance."""
    import torch

    first = evidence.first
    x, y = first.case.args[0].double().flatten(), first.reply.outputs["y"].double().flatten()
    share = float(y[x.argmin()] / x.min())
    if not 0 < share < 0.5:
        return False
    cut = math.log(1 / share - 1) / 2

    def explains(outcome: Outcome, most: float) -> bool:
        x, y = outcome.case.args[0].double(), outcome.reply.outputs["y"]
        eps = 8 * torch.finfo(y.dtype).eps
        guess = x * (2 * _u(x).clamp(-cut, most)).sigmoid()
        return torch.allclose(y.double(), guess, rtol=max(eps, 1e-4), atol=eps)

    failed = [outcome for outcome in evidence.outcomes if outcome.wrong]
    return any(all(explains(outcome, most) for outcome in failed) for most in (cut, math.inf))


DETECTIVE = KernelExercise(
    id="gelu.detective",
    function="gelu_tanh",
    cases=_tanh_cases,
    reference=_gelu_tanh,
    huge=lambda: (far(5 << 30),),
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception("nan-hidden", gives=lambda x: _gelu_tanh(x).where(2 * _u(x) < 88.73, x.new_zeros(()))),
        Misconception(
            "clamped",
            when=lambda evidence: (
                only("large", kind="values")(evidence)
                and bool((evidence.outputs.double() <= evidence.outputs.double().max() + 1e-3).all())
                and float(evidence.outputs.double().max()) < 30
            ),
        ),
        Misconception("clamped/2", when=_u_cut_below),
        Misconception("overflow", when=only("large", kind="nan")),
        Misconception("overflow-below", when=only_rows(_far_below, kind="nan")),
        Misconception("erf-form", gives=_gelu),
        Misconception("half-argument", gives=lambda x: x * _u(x).sigmoid()),
        Misconception("rough-form", gives=lambda x: x * (1.702 * x).sigmoid()),
        Misconception("relu", gives=lambda x: x.clamp_min(0)),
    ),
)


# ------------------------------------------------------------------------------------------------------- gelu.bias
def _of_h(formula: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, bias, *blocks: formula(x + bias)


def _tanh_in_16_bits(evidence: Evidence) -> bool:
    """What is wrong is the tanh form, in 16 bits alone: an idea that is wrong in float32, too, where the kernel is right."""
    failed = [outcome for outcome in evidence.outcomes if outcome.wrong]
    narrow = all(outcome.case.args[0].dtype.itemsize == 2 for outcome in failed)
    return narrow and all(BIAS.fits(BIAS.predicts(_of_h(_gelu_tanh), outcome), outcome) for outcome in failed)


def _rounded_on_the_way(x: Tensor, bias: Tensor, *_: object) -> dict[str, tuple[Tensor, Tensor]]:
    h = x + bias
    return {"y": (_gelu(h), (h * _slope_of(h)).abs() + _gelu(h).abs())}


BIAS = KernelExercise(
    id="gelu.bias",
    function="bias_gelu",
    cases=_bias_cases,
    reference=_bias_gelu,
    huge=lambda: (far(81920, 65536), far(65536), 16, 128),
    traffic=Traffic(
        reads=lambda x, bias, BLOCK_M, BLOCK_N: nbytes(x) + -(-len(x) // BLOCK_M) * nbytes(bias),
        writes=1,
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("tanh-form", gives=_of_h(_gelu_tanh)),
        Misconception("tanh-form", when=_tanh_in_16_bits),
        Misconception("bias-forgotten", gives=ideas.On(lambda x, bias, *blocks: (x, 0 * bias, *blocks), _of_h(_gelu))),
        Misconception("bias-after", gives=lambda x, bias, *blocks: _gelu(x) + bias),
        Misconception("bias-per-row", gives=lambda x, bias, *blocks: _gelu(x + bias[: len(x), None])),
        Misconception("erf-scale", gives=_of_h(lambda h: 0.5 * h * (1 + h.erf()))),
        *(
            Misconception("erf-scale/2", gives=_of_h(lambda h, factor=factor: 0.5 * h * (1 + (factor * h).erf())))
            for factor in (0.5, math.sqrt(2))
        ),
        Misconception("no-half", gives=_of_h(lambda h: 2 * _gelu(h))),
        Misconception("low-precision", when=ideas.few_roundings(_rounded_on_the_way)),
        Misconception("short-constant", gives=_of_h(lambda h: 0.5 * h * (1 + (0.7071 * h).erf()))),
        Misconception("cumulative-only", gives=_of_h(_cumulative)),
    ),
)


# --------------------------------------------------------------------------------------------------- gelu.backward
def _slope(formula: Callable[[Tensor], Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What dx is where GELU's slope is `formula` of h."""
    return lambda x, bias, dy: _with_dbias(dy * formula(x + bias))


def _with_dbias(dx: Tensor) -> dict[str, Tensor]:
    return {"dx": dx, "dbias": dx.sum(0)}


def _rounded_backward(x: Tensor, bias: Tensor, dy: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    h = x + bias
    right, changes = dy * _slope_of(h), dy.abs() * ((h * (2 - h * h) * _density(h)).abs() + _slope_of(h).abs())
    return {"dx": (right, changes), "dbias": (right.sum(0), changes.sum(0))}


def _slope_of_tanh_form(h: Tensor) -> Tensor:
    s = (2 * _u(h)).sigmoid()
    return s + h * s * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * h * h)


def _backward_traffic(x: Tensor, bias: Tensor, dy: Tensor) -> tuple[int, int]:
    """Reads and writes: forward x, bias and y; backward dy, x, bias and dx, and the sums there and back; tiles of 16 rows. A dy
    that is not contiguous is copied first."""
    tiles = -(-len(x) // 16)
    copied, sums = 0 if dy.is_contiguous() else nbytes(dy), tiles * 4 * len(bias)
    return (
        2 * nbytes(x) + nbytes(dy) + copied + 2 * tiles * nbytes(bias) + sums,
        2 * nbytes(x) + copied + sums + nbytes(bias),
    )


BACKWARD = KernelExercise(
    id="gelu.backward",
    function="bias_gelu_trained",
    cases=_backward_cases,
    reference=_bias_gelu,
    huge=lambda: [  # beyond 2^32 elements begins a row of x, and one of the sums
        (far(81920, 65536), far(65536), far(81920, 65536)),
        (far(16640, 1 << 22), far(1 << 22), far(16640, 1 << 22)),
    ],
    gradients=2,
    traffic=Traffic(
        reads=lambda *args: _backward_traffic(*args)[0],
        writes=lambda *args: _backward_traffic(*args)[1],
        launches=3,
        saved=lambda x, bias, dy: nbytes(x, bias),
    ),
    launch_rule=ideas.no_atomics(
        "with atomics: which program comes first changes from run to run, and with the order of the additions the last "
        "digits of dbias. Where could each program leave a sum that nobody else touches?"
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("forward-first", when=lambda evidence: evidence.output == "y"),
        Misconception("first-term-only", gives=_slope(_cumulative)),
        Misconception("second-term-only", gives=_slope(lambda h: h * _density(h))),
        Misconception("density-scale", gives=_slope(lambda h: _cumulative(h) + h * (-0.5 * h * h).exp())),
        Misconception(
            "density-width", gives=_slope(lambda h: _cumulative(h) + h * (-h * h).exp() / math.sqrt(2 * math.pi))
        ),
        Misconception(
            "density-grows",
            gives=_slope(lambda h: _cumulative(h) + h * (0.5 * h * h).exp() / math.sqrt(2 * math.pi)),
        ),
        Misconception("no-h", gives=_slope(lambda h: _cumulative(h) + _density(h))),
        Misconception("tanh-form", gives=_slope(_slope_of_tanh_form)),
        Misconception(
            "bias-forgotten",
            gives=ideas.On(lambda x, bias, dy: (x, 0 * bias, dy), _slope(_slope_of)),
        ),
        Misconception(
            "saved-y",
            gives=lambda x, bias, dy: _with_dbias(dy * (_cumulative(y := _gelu(x + bias) + bias) + y * _density(y))),
        ),
        Misconception("sum-of-dy", gives=lambda x, bias, dy: {"dbias": dy.sum(0)}),
        Misconception(
            "dy-strides", gives=ideas.On(lambda x, bias, dy: (x, bias, ideas.as_if_contiguous(dy)), _slope(_slope_of))
        ),
        Misconception("low-precision", when=ideas.few_roundings(_rounded_backward)),
        Misconception("partial-missing", when=lambda evidence: evidence.kind == "nan" and evidence.output == "dbias"),
    ),
)


# ----------------------------------------------------------------------------------------------------- gelu.swiglu
def _halves(dgate: Callable[..., Tensor] | None = None, dup: Callable[..., Tensor] | None = None):
    """What the gradients are as formulas of gate, its sigmoid, up and dy."""

    def gives(gate: Tensor, up: Tensor, dy: Tensor) -> dict[str, Tensor]:
        s = gate.sigmoid()
        formulas = {"dgate": dgate, "dup": dup}
        return {name: formula(gate, s, up, dy) for name, formula in formulas.items() if formula}

    return gives


SWIGLU = KernelExercise(
    id="gelu.swiglu",
    function="swiglu",
    cases=_swiglu_cases,
    contiguous=True,
    reference=_swiglu,
    huge=lambda: (far(81920, 65536), far(81920, 65536), far(81920, 65536)),
    gradients=2,
    # Forward: gate, up, y; backward: dy, gate, up, dgate, dup. A dy that is not contiguous is copied first.
    traffic=Traffic(
        reads=lambda gate, up, dy: nbytes(gate) * (5 if dy.is_contiguous() else 6),
        writes=lambda gate, up, dy: nbytes(gate) * (3 if dy.is_contiguous() else 4),
        launches=2,
        saved=lambda gate, up, dy: nbytes(gate, up),
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("swapped", gives=lambda gate, up, dy: {"y": _swiglu(up, gate)}),
        Misconception("sigmoid-only", gives=lambda gate, up, dy: {"y": gate.sigmoid() * up}),
        Misconception("overflow", when=only("large", kind="nan")),
        Misconception("contiguous-assumed", when=lambda evidence: evidence.tag("strided")),
        Misconception("sigmoid-constant", gives=_halves(lambda gate, s, up, dy: dy * up * s)),
        Misconception("sigmoid-slope", gives=_halves(lambda gate, s, up, dy: dy * up * s * (1 - s))),
        Misconception("gate-missing", gives=_halves(lambda gate, s, up, dy: dy * up * (s + s * (1 - s)))),
        Misconception("gate-constant", gives=_halves(lambda gate, s, up, dy: dy * up * gate * s * (1 - s))),
        Misconception(
            "one-minus-silu", gives=_halves(lambda gate, s, up, dy: dy * up * (s + gate * s * (1 - gate * s)))
        ),
        Misconception("no-up", gives=_halves(lambda gate, s, up, dy: dy * (s + gate * s * (1 - s)))),
        Misconception("gate-itself", gives=_halves(dup=lambda gate, s, up, dy: dy * gate)),
        Misconception("sigmoid-for-silu", gives=_halves(dup=lambda gate, s, up, dy: dy * s)),
        Misconception("low-precision", when=only("far", kind="values")),
        Misconception(
            "exchanged",
            gives=_halves(
                lambda gate, s, up, dy: dy * gate * s, lambda gate, s, up, dy: dy * up * (s + gate * s * (1 - s))
            ),
        ),
    ),
)

EXERCISES = [DETECTIVE, BIAS, BACKWARD, SWIGLU]
