"""The exercises of notebook 10: cases, traffic bounds, hints, and the wrong answers that each check must recognise."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, KernelExercise, Label, Misconception, Traffic, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence
    from gpukit.grading.messages import LaunchFacts

NOTEBOOK = "10_gelu"


# --------------------------------------------------------------------------------------- what the exercises compute
def _u(x: Tensor) -> Tensor:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def _gelu_tanh(x: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.gelu(x, approximate="tanh")


def _gelu(h: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.gelu(h)


def _bias_gelu(x: Tensor, bias: Tensor, *_: Any) -> Tensor:
    return _gelu(x + bias)


def _cumulative(h: Tensor) -> Tensor:
    return 0.5 * (1 + (h * math.sqrt(0.5)).erf())


def _density(h: Tensor) -> Tensor:
    return (-0.5 * h * h).exp() / math.sqrt(2 * math.pi)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * gate.sigmoid() * up


# ------------------------------------------------------------------------------------------------------------ inputs
class _Inputs:
    """Seeded tensors and cases named after them."""

    def __init__(self, rng: Random):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def normal(self, *shape: int, dtype: str = "float32") -> Tensor:
        return self.torch.randn(shape, generator=self.generator).mul_(2).to(getattr(self.torch, dtype))

    def like(self, x: Tensor, *shape: int) -> Tensor:
        return self.torch.randn(shape or x.shape, generator=self.generator).to(x.dtype)

    def line(self, low: float, high: float, n: int) -> Tensor:
        """Every height between them; by chance a little shifted."""
        return self.torch.linspace(low, high, n) + 0.01 * float(self.normal(1))

    def case(self, x: Tensor, *rest: Any, tags: str = "", note: str = "") -> Case:
        dtype = str(x.dtype).removeprefix("torch.")
        name = f"x {list(x.shape)} {dtype}" + (f", {note}" if note else "")
        return Case(name, (x, *rest), frozenset({dtype, *tags.split()}))


def _tanh_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal
    both = normal(300)
    both[::2] += 40
    return [
        make.case(normal(1).abs() + 1),  # one below 0 would be all tail, where 1 + tanh cancels: right answers failed
        make.case(normal(64)),
        make.case(normal(781, dtype="float16")),
        make.case(normal(6, 100, dtype="bfloat16"), tags="leading"),
        make.case(make.line(-6, 6, 1025), tags="blocks", note="from -6 to 6"),
        make.case(normal(200) + 300, tags="large", note="around 300"),
        make.case(both, tags="large", note="around 0 and 40"),
        make.case(normal(128, dtype="float16") + 100, tags="large", note="around 100"),
        make.case(normal(200) - 300, tags="below", note="around -300"),
        make.case(normal(90, dtype="bfloat16") - 50, tags="below", note="around -50"),
    ]


def _bias_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal

    def case(x: Tensor, BLOCK_M: int, BLOCK_N: int, tags: str = "", note: str = "") -> Case:
        M, N = x.shape
        tail = "tail" if M % BLOCK_M or N % BLOCK_N else ""
        note = f"tiles of {BLOCK_M} x {BLOCK_N}" + (f", {note}" if note else "")
        return make.case(x, make.like(x, N), BLOCK_M, BLOCK_N, tags=f"{tags} {tail}", note=note)

    heights = make.normal(4, 96)
    heights[0] += 300
    heights[1] -= 300
    return [
        case(
            normal(1, 1).abs() + 4, 1, 16
        ),  # not in the tail, where 1 + erf cancels and no larger element is beside it
        case(normal(3, 64), 4, 32),
        case(normal(4, 256), 2, 64),
        case(normal(5, 781), 4, 256),
        case(normal(7, 250, dtype="float16"), 8, 64),
        case(normal(33, 100, dtype="bfloat16"), 16, 64),
        case(make.line(-6, 6, 3 * 200).view(200, 3).t().contiguous(), 2, 128, note="from -6 to 6"),
        case(heights, 2, 32, tags="large", note="rows around 300 and -300"),
        case(normal(64, 256), 32, 128),
    ]


def _backward_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal

    def case(x: Tensor, tags: str = "", note: str = "") -> Case:
        return make.case(x, make.like(x, x.shape[1]), make.like(x), tags=tags, note=note)

    heights = make.normal(4, 96)
    heights[0] += 300
    heights[1] -= 300
    return [
        case(normal(1, 1).abs() + 4),
        case(normal(3, 64)),
        case(normal(16, 128)),
        case(normal(20, 100), tags="blocks"),
        case(normal(33, 130), tags="blocks"),
        case(normal(17, 64, dtype="float16"), tags="blocks"),
        case(normal(5, 250, dtype="bfloat16")),
        case(heights, tags="large", note="rows around 300 and -300"),
        case(normal(64, 256), tags="blocks"),
    ]


def _swiglu_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal

    def case(gate: Tensor, up: Tensor, tags: str = "", note: str = "") -> Case:
        return make.case(gate, up, make.like(gate), tags=tags, note=note)

    def halves(M: int, N: int, dtype: str = "float32") -> Case:
        gate, up = normal(M, 2 * N, dtype=dtype).chunk(2, -1)
        return case(gate, up, tags="strided", note="half of a matmul's result")

    return [
        case(normal(1, 1).abs(), normal(1, 1)),
        case(normal(3, 64), normal(3, 64)),
        case(normal(2, 781), normal(2, 781)),
        case(normal(5, 250, dtype="float16"), normal(5, 250, dtype="float16")),
        case(
            normal(4, 200)[:, :100],
            normal(4, 100),
            tags="strided",
            note="gate half of a wider row",
        ),
        halves(3, 300, dtype="bfloat16"),
        case(normal(2, 90) + 200, normal(2, 90), tags="large", note="gate around 200"),
        case(normal(2, 70) - 200, normal(2, 70), tags="below", note="gate around -200"),
        halves(8, 512),  # the largest, whose bytes are counted: who copies the halves first must be seen
    ]


# -------------------------------------------------------------------------------------------------- shared wrong ideas
def _only(tag: str, kind: str) -> Callable[[Evidence], bool]:
    return lambda evidence: evidence.kind == kind and all(tag in case.tags for case in evidence.failed)


def _no_atomics(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    if not any(launch.atomic_bytes for launch in launches):
        return None
    return "atomics", (
        "with atomics: which program comes first changes from run to run, and with the order of the additions the last "
        "digits of dbias. Where could each program leave a sum that nobody else touches?"
    )


# -------------------------------------------------------------------------------------------------- gelu.detective
_D_COMMENT = (
    "    # 0.5 (1 + tanh u) is 1 / (1 + exp(-2 u)): where the exponential overflows, this is 0, as it should be.\n"
)
_D_Y = "    y = x / (1 + tl.exp(-2 * u))\n"
_D_BODY = _D_COMMENT + _D_Y
_D_STUB = "    e = tl.exp(2 * u)\n    y = 0.5 * x * (1 + (e - 1) / (e + 1))\n"
_D_LAUNCH = "    gelu_tanh_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)\n"


def _d(name: str, new: str, diagnosis: str | None) -> Variant:
    return Variant(name, ((_D_BODY, new),), diagnosis=diagnosis)


DETECTIVE = KernelExercise(
    id="gelu.detective",
    title="Detective: a GELU that small numbers like",
    notebook=NOTEBOOK,
    function="gelu_tanh",
    label=Label(1, 10, "overflow of exp; a form whose limits are right"),
    hints=(
        "Run the check: for which x does it fail, and with what? Then put x = 12 into the lines of the kernel by hand: how "
        "large is u, and what is the exponential of 2 u in a float32?",
        "Infinity over infinity is NaN, one over infinity is 0. Of the exponentials of 2 u and -2 u one always overflows "
        "far from 0, and which one depends on the sign. In which quotient is an infinity harmless?",
        "One half of (1 plus tanh u) is the sigmoid of 2 u: one over (one plus the exponential of minus 2 u). It goes to 1 "
        "above and to 0 below, with no infinity in a numerator. y is x times that.",
    ),
    cases=_tanh_cases,
    reference=_gelu_tanh,
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception(
            "nan-hidden",
            "where there was NaN there is 0 now. What is GELU of 40?",
            gives=lambda x: _gelu_tanh(x).where(2 * _u(x) < 88.73, x.new_zeros(())),
        ),
        Misconception(
            "clamped",
            "x was cut off, and with it the result: GELU of 300 is 300. Which number may be cut off without harm?",
            when=lambda evidence: (
                evidence.kind == "values"
                and all("large" in case.tags for case in evidence.failed)
                and bool((evidence.outputs.double() <= evidence.outputs.double().max() + 1e-3).all())
                and float(evidence.outputs.double().max()) < 30
            ),
        ),
        Misconception(
            "overflow",
            "all is well until x is about 10; there the exponential of 2 u passes the largest float32, and infinity over "
            "infinity is NaN. In which quotient would an infinity give the right limit?",
            when=_only("large", "nan"),
        ),
        Misconception(
            "overflow-below",
            "large x is mended, and now very negative x is NaN: there the exponential of -2 u overflows, above and below "
            "the line. Where may an infinity stand, and where not?",
            when=_only("below", "nan"),
        ),
        Misconception(
            "erf-form",
            "this is the other GELU, the one with erf: up to 0.0005 away. Which one does the docstring give?",
            gives=_gelu,
        ),
        Misconception(
            "half-argument",
            "this is x sigmoid(u). A tanh is a sigmoid stretched and moved: by which factor does its argument grow?",
            gives=lambda x: x * _u(x).sigmoid(),
        ),
        Misconception(
            "rough-form",
            "this is x sigmoid(1.702 x), a rougher approximation, up to 0.02 away.",
            gives=lambda x: x * (1.702 * x).sigmoid(),
        ),
        Misconception(
            "relu",
            "this is max(x, 0). What is GELU of -1?",
            gives=lambda x: x.clamp_min(0),
        ),
    ),
    wrong=(
        _d("unmended", _D_STUB, "overflow"),
        _d("float64", "    e = tl.exp(2 * u.to(tl.float64))\n    y = 0.5 * x * (1 + (e - 1) / (e + 1))\n", "overflow"),
        _d(
            "minus-in-the-exponent",
            "    e = tl.exp(-2 * u)\n    y = 0.5 * x * (1 + (1 - e) / (1 + e))\n",
            "overflow-below",
        ),
        _d("hides-the-nan", _D_STUB + "    y = tl.where(y == y, y, 0.0)\n", "nan-hidden"),
        _d(
            "cuts-x-off",
            "    x = tl.minimum(x, 10.0)\n    u = tl.minimum(u, 40.0)\n" + _D_STUB,
            "clamped",
        ),
        _d("erf", "    y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))\n", "erf-form"),
        _d("sigmoid-of-u", "    y = x / (1 + tl.exp(-u))\n", "half-argument"),
        _d("rough-sigmoid", "    y = x * tl.sigmoid(1.702 * x)\n", "rough-form"),
        _d("relu", "    y = tl.maximum(x, 0.0)\n", "relu"),
        Variant(
            "calls-torch",
            ((_D_LAUNCH, '    return torch.nn.functional.gelu(x, approximate="tanh")\n'),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        _d("sigmoid", "    y = x * tl.sigmoid(2 * u)\n", None),
        _d("cuts-u-off", "    u = tl.minimum(u, 40.0)\n" + _D_STUB, None),
        _d("one-minus", "    y = 0.5 * x * (2 - 2 / (tl.exp(2 * u) + 1))\n", None),
        _d(
            "absolute-value-and-sign",
            "    e = tl.exp(-2 * tl.abs(u))\n"
            "    t = (1 - e) / (1 + e)\n"
            "    y = 0.5 * x * (1 + tl.where(u < 0, -t, t))\n",
            None,
        ),
        _d("x-itself-from-ten-on", _D_STUB + "    y = tl.where(x > 10, x, y)\n", None),
    ),
)


# ------------------------------------------------------------------------------------------------------- gelu.bias
_B_BIAS = "    bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)\n"
_B_H = "    h = tl.load(x_ptr + offs_m * N + offs_n, mask=mask, other=0.0).to(tl.float32) + bias\n"
_B_Y = "    y = 0.5 * h * (1 + tl.erf(h * 0.7071067811865476))\n"
_B_STORE = "    tl.store(y_ptr + offs_m * N + offs_n, y, mask=mask)\n"
_B_ROWS = (
    "    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]\n"
    "    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]\n"
    "    mask = (offs_m < M) & (offs_n < N)\n"
)
_B_COMMENT = "    # One row of bias for the whole tile: it broadcasts.\n"
_B_BODY = _B_ROWS + _B_COMMENT + _B_BIAS + _B_H + _B_Y + _B_STORE
_B_LAUNCH = "    bias_gelu_kernel[grid](x, bias, y, M, N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)\n"


def _b(name: str, old: str, new: str, diagnosis: str | None) -> Variant:
    assert old in _B_BODY, old
    return Variant(name, ((_B_BODY, _B_BODY.replace(old, new)),), diagnosis=diagnosis)


def _of_h(formula: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, bias, *blocks: formula(x + bias)


BIAS = KernelExercise(
    id="gelu.bias",
    title="Bias and GELU in one read and one write",
    notebook=NOTEBOOK,
    function="bias_gelu",
    label=Label(2, 20, "tiles of two dimensions; a row that a tile shares; erf"),
    hints=(
        "A tile of 32 x 128 elements needs how many numbers of bias? And which of the tile's two axes do they lie along?",
        "A block of column numbers [1, BLOCK_N] loads one row of bias; added to a block [BLOCK_M, BLOCK_N] it broadcasts. "
        "The sum stays in float32 and never meets memory. tl.erf exists.",
        "Row numbers from the first program id as a column, column numbers from the second as a row; the mask compares both. "
        "Load bias along the columns, load x, add. y is half of h times (one plus the erf of h over the root of 2); store "
        "it with the mask.",
    ),
    cases=_bias_cases,
    reference=_bias_gelu,
    traffic=Traffic(reads=1.05, writes=1),  # tiles of 32 rows load a row of bias each
    misconceptions=(
        Misconception(
            "tanh-form",
            "this is the tanh form, up to 0.0005 away. Which one does the docstring give?",
            gives=_of_h(_gelu_tanh),
        ),
        Misconception(
            "bias-forgotten",
            "this is the GELU of x alone. What happened to bias?",
            gives=lambda x, bias, *blocks: _gelu(x),
        ),
        Misconception(
            "bias-after",
            "bias was added to the result. What does GELU get as its argument?",
            gives=lambda x, bias, *blocks: _gelu(x) + bias,
        ),
        Misconception(
            "bias-per-row",
            "each row got one number out of bias. bias has N elements: which index do they belong to?",
            gives=lambda x, bias, *blocks: _gelu(x + bias[: len(x), None]),
        ),
        Misconception(
            "erf-scale",
            "the erf was taken of h itself. Phi is the distribution of a normal number with variance 1; erf belongs to one "
            "with variance one half.",
            gives=_of_h(lambda h: 0.5 * h * (1 + h.erf())),
        ),
        Misconception(
            "no-half",
            "everything is twice as large: 1 + erf goes from 0 to 2. How far does a probability go?",
            gives=_of_h(lambda h: 2 * _gelu(h)),
        ),
        Misconception(
            "cumulative-only",
            "these are the probabilities Phi(h). What does GELU multiply by them?",
            gives=_of_h(_cumulative),
        ),
        Misconception(
            "out-of-bounds",
            "a tile may hang over the right edge and over the lower one: what does the mask compare with what?",
        ),
        Misconception("race", "each tile belongs to one program: do two axes of the grid make two different offsets?"),
        Misconception(
            "traffic", "a tile needs one row of bias, whatever its height: what shape has the block you load?"
        ),
    ),
    wrong=(
        _b(
            "tanh-form",
            _B_Y,
            "    y = h * tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))\n",
            "tanh-form",
        ),
        _b("no-bias", ".to(tl.float32) + bias\n", ".to(tl.float32)\n", "bias-forgotten"),
        _b("bias-after", _B_H + _B_Y, _B_H.replace(" + bias", "") + _B_Y + "    y += bias\n", "bias-after"),
        _b(
            "bias-of-the-row",
            "bias_ptr + offs_n, mask=offs_n < N",
            "bias_ptr + offs_m, mask=offs_m < M",
            "bias-per-row",
        ),
        _b("erf-of-h", "h * 0.7071067811865476", "h", "erf-scale"),
        _b("no-half", "0.5 * h * (", "h * (", "no-half"),
        _b("no-h", "0.5 * h * (", "0.5 * (", "cumulative-only"),
        _b("no-mask", _B_STORE, _B_STORE.replace(", mask=mask", ""), "out-of-bounds"),
        _b("rows-only", "(offs_m < M) & (offs_n < N)", "offs_m < M", "out-of-bounds"),
        _b("rows-as-wide-as-a-tile", "y_ptr + offs_m * N", "y_ptr + offs_m * BLOCK_N", "race"),
        _b(
            "bias-for-each-element",
            "bias_ptr + offs_n, mask=offs_n < N",
            "bias_ptr + offs_n + 0 * offs_m, mask=mask",
            "traffic",
        ),
        Variant(
            "adds-in-torch",
            ((_B_LAUNCH, _B_LAUNCH.replace("(x, bias", "(x + bias, bias")), (_B_H, _B_H.replace(" + bias", ""))),
            diagnosis="not-your-kernel",
        ),
        Variant(
            "calls-torch",
            ((_B_LAUNCH, "    return torch.nn.functional.gelu(x + bias)\n"),),
            diagnosis="not-your-kernel",
        ),
        Variant("writes-over-x", ((_B_LAUNCH, _B_LAUNCH.replace("bias, y", "bias, x")),), diagnosis="input-changed"),
    ),
    right=(
        _b(
            "a-row-at-a-time",
            _B_BODY,
            "    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)\n"
            "    inside = columns < N\n"
            "    b = tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32)\n"
            "    for m in range(pid_m * BLOCK_M, min(M, pid_m * BLOCK_M + BLOCK_M)):\n"
            "        h = tl.load(x_ptr + m * N + columns, inside, 0.0).to(tl.float32) + b\n"
            "        phi = 0.5 + 0.5 * tl.erf(h / tl.sqrt(2.0))\n"
            "        tl.store(y_ptr + m * N + columns, h * phi, inside)\n",
            None,
        ),
        _b(
            "both-tails-alike",  # erf is odd: one half of it, for |h|, and the rest by symmetry
            _B_Y,
            "    half = 0.5 * tl.erf(tl.abs(h) * 0.7071067811865476)\n    y = 0.5 * h + tl.abs(h) * half\n",
            None,
        ),
        _b("sum-rounded-first", _B_Y, "    h = h.to(x_ptr.dtype.element_ty).to(tl.float32)\n" + _B_Y, None),
    ),
)


# --------------------------------------------------------------------------------------------------- gelu.backward
_G_H = "    h = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)\n"
_G_BIAS = "    h += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)\n"
_G_SLOPE = (
    "    cumulative = 0.5 + 0.5 * tl.erf(h * 0.7071067811865476)\n"
    "    density = 0.3989422804014327 * tl.exp(-0.5 * h * h)\n"
    "    dx = dy * (cumulative + h * density)\n"
)
_G_STORE = "    tl.store(dx_ptr + offs, dx, mask=mask)\n"
_G_PARTIAL = "    tl.store(partial_ptr + pid_m * N + offs_n, tl.sum(dx, axis=0, keep_dims=True), mask=offs_n < N)\n"
_G_SAVE = "        ctx.save_for_backward(x, bias)\n        return bias_gelu(x, bias)\n"
_G_BACK = "        x, bias = ctx.saved_tensors\n        return bias_gelu_backward(dy.contiguous(), x, bias)\n"
_G_HOST = "    partial = torch.empty((grid[0], N), dtype=torch.float32, device=x.device)\n"
_G_SUM = (
    "    column_sums_kernel[(triton.cdiv(N, 64),)](\n"
    "        partial, dbias, grid[0], N, BLOCK_P=triton.next_power_of_2(grid[0]), BLOCK_N=64\n    )\n"
)
_G_ONE_ROW = (
    (_G_HOST, _G_HOST.replace("torch.empty((grid[0], N)", "torch.zeros((1, N)")),
    (_G_SUM, _G_SUM.replace("grid[0], N, BLOCK_P=triton.next_power_of_2(grid[0])", "1, N, BLOCK_P=1")),
)


def _g(name: str, old: str, new: str, diagnosis: str | None) -> Variant:
    text = _G_SLOPE + _G_STORE + _G_PARTIAL
    assert old in text, old
    return Variant(name, ((text, text.replace(old, new)),), diagnosis=diagnosis)


def _slope(formula: Callable[[Tensor], Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What dx is where GELU's slope is `formula` of h."""
    return lambda x, bias, dy: {"dx": dy * formula(x + bias)}


def _slope_of_tanh_form(h: Tensor) -> Tensor:
    s = (2 * _u(h)).sigmoid()
    return s + h * s * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * h * h)


BACKWARD = KernelExercise(
    id="gelu.backward",
    title="The gradient of x, and of the bias",
    notebook=NOTEBOOK,
    function="bias_gelu_trained",
    label=Label(3, 30, "recomputing instead of saving; a gradient that sums over rows"),
    hints=(
        "y is h times Phi(h), a product. What is the derivative of a product, and which famous curve is the derivative of "
        "Phi? As for bias: if one number is added to 64 rows, how many gradients reach it?",
        "The slope is Phi(h) plus h times the normal density. h can be added up again from x and bias, which exist anyway. "
        "A tile's share of dbias is the sum of its dx over its rows: one number a column, stored into the tile row's own "
        "row of partial.",
        "Load x, bias and dy, which is 0 where there is no element. cumulative: one half plus half the erf of h over root "
        "2. density: one over the root of 2 pi, times the exponential of minus h squared over 2. dx: dy times (cumulative "
        "plus h times density). Store it, and its sum over axis 0. forward saves x and bias, backward hands them on.",
    ),
    cases=_backward_cases,
    reference=_bias_gelu,
    gradients=2,
    traffic=Traffic(reads=3.2, writes=2.07, launches=3),  # four rows of tiles: bias twice, sums once
    launch_rule=_no_atomics,
    misconceptions=(
        Misconception(
            "forward-first",
            "it is y that is wrong, before any gradient: gelu.bias must pass first.",
            when=lambda evidence: evidence.output == "y",
        ),
        Misconception(
            "first-term-only",
            "dx is dy Phi(h): as if Phi were a constant. What else in h Phi(h) moves when h does?",
            gives=_slope(_cumulative),
        ),
        Misconception(
            "second-term-only",
            "dx is dy h times the density: that is how Phi moves. What of the h before it?",
            gives=_slope(lambda h: h * _density(h)),
        ),
        Misconception(
            "density-scale",
            "the density lacks its factor. What must the area under it be?",
            gives=_slope(lambda h: _cumulative(h) + h * (-0.5 * h * h).exp()),
        ),
        Misconception(
            "density-width",
            "the exponent is h squared, without the half: the density of another distribution.",
            gives=_slope(lambda h: _cumulative(h) + h * (-h * h).exp() / math.sqrt(2 * math.pi)),
        ),
        Misconception(
            "no-h",
            "the density stands alone. In h Phi(h), what multiplies the derivative of Phi?",
            gives=_slope(lambda h: _cumulative(h) + _density(h)),
        ),
        Misconception(
            "tanh-form",
            "this is the slope of the tanh form, and the forward pass has the other one.",
            gives=_slope(_slope_of_tanh_form),
        ),
        Misconception(
            "bias-forgotten",
            "this is the slope at x. Where did the forward pass take GELU?",
            gives=lambda x, bias, dy: {
                "dx": dy * (_cumulative(x) + x * _density(x)),
            },
        ),
        Misconception(
            "saved-y",
            "the slope was taken at y + bias. Of which tensor does the formula speak: was it saved?",
            gives=lambda x, bias, dy: {
                "dx": dy * (_cumulative(y := _gelu(x + bias) + bias) + y * _density(y)),
            },
        ),
        Misconception(
            "sum-of-dy",
            "dx is right. dbias is the sum of dy, the gradient of a bias behind GELU. This one stands before it: what comes "
            "back through GELU?",
            gives=lambda x, bias, dy: {"dbias": dy.sum(0)},
        ),
        Misconception(
            "partial-missing",
            "dx is right. dbias is made of sums that nobody stored. Which row of partial belongs to a program?",
            when=lambda evidence: evidence.kind == "nan" and evidence.output == "dbias",
        ),
        Misconception(
            "out-of-bounds",
            "a tile may hang over both edges. dx has its rows and columns; partial has N columns too, but one row for each row "
            "of tiles",
        ),
        Misconception("race", "tiles above each other share their columns: which row of partial is nobody else's?"),
        Misconception("traffic", "x and bias are enough for both passes, and a tile needs one row of bias"),
    ),
    wrong=(
        _g("no-density", "cumulative + h * density", "cumulative", "first-term-only"),
        _g("density-alone", "cumulative + h * density", "h * density", "second-term-only"),
        _g("no-root-of-2-pi", "0.3989422804014327 * tl.exp", "tl.exp", "density-scale"),
        _g("no-half-in-the-exponent", "tl.exp(-0.5 * h * h)", "tl.exp(-h * h)", "density-width"),
        _g("density-without-h", "cumulative + h * density", "cumulative + density", "no-h"),
        _g(
            "slope-of-the-tanh-form",
            _G_SLOPE,
            "    s = tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))\n"
            "    dx = dy * (s + h * s * (1 - s) * (1.5957691216057308 + 0.2140644488178008 * h * h))\n",
            "tanh-form",
        ),
        Variant("no-bias", ((_G_BIAS, ""),), diagnosis="bias-forgotten"),
        Variant(
            "saves-y",
            (
                (
                    _G_SAVE,
                    "        y = bias_gelu(x, bias)\n        ctx.save_for_backward(y, bias)\n        return y\n",
                ),
            ),
            diagnosis="saved-y",
        ),
        _g("sums-dy", "tl.sum(dx, axis=0", "tl.sum(dy, axis=0", "sum-of-dy"),
        Variant("no-sums", ((_G_PARTIAL, ""),), diagnosis="partial-missing"),
        Variant(
            "sums-past-the-edge",
            ((_G_PARTIAL, _G_PARTIAL.replace(", mask=offs_n < N", "")),),
            diagnosis="out-of-bounds",
        ),
        _g("all-in-row-0", "partial_ptr + pid_m * N + offs_n", "partial_ptr + offs_n", "race"),
        Variant(
            "one-row-for-all",
            (
                (
                    _G_PARTIAL,
                    "    sums = tl.load(partial_ptr + offs_n, mask=offs_n < N, other=0.0)\n"
                    "    sums += tl.sum(dx, axis=0, keep_dims=True)\n"
                    "    tl.store(partial_ptr + offs_n, sums, mask=offs_n < N)\n",
                ),
                *_G_ONE_ROW,
            ),
            diagnosis="race",
        ),
        Variant(
            "atomics",
            (
                (
                    _G_PARTIAL,
                    "    tl.atomic_add(partial_ptr + offs_n, tl.sum(dx, axis=0, keep_dims=True), mask=offs_n < N)\n",
                ),
                *_G_ONE_ROW,
            ),
            diagnosis="atomics",
        ),
        Variant(
            "bias-for-each-element",
            ((_G_BIAS, _G_BIAS.replace("offs_n, mask=offs_n < N", "offs_n + 0 * offs_m, mask=mask")),),
            diagnosis="traffic",
        ),
        Variant(
            "sums-in-torch",
            ((_G_SUM, "    dbias = partial.sum(0).to(bias.dtype)\n"),),
            diagnosis="not-your-kernel",
        ),
        Variant(
            "saves-the-sum",
            (
                (
                    _G_SAVE,
                    "        ctx.save_for_backward(x + bias, torch.zeros_like(bias))\n        return bias_gelu(x, bias)\n",
                ),
            ),
            diagnosis="not-your-kernel",
        ),
        Variant(
            "autograd-of-torch",
            (
                (
                    "    return BiasGeluFunction.apply(x, bias)\n",
                    "    return torch.nn.functional.gelu(x + bias)\n",
                ),
            ),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        _g(
            "slope-from-one-exponential",
            _G_SLOPE,
            "    density = tl.exp2(h * h * -0.7213475204444817) * 0.3989422804014327\n"
            "    slope = h * density + (1 + tl.erf(h / tl.sqrt(2.0))) / 2\n"
            "    dx = slope * dy\n",
            None,
        ),
        Variant(
            "rows-in-a-loop",
            (
                (
                    _G_SLOPE + _G_STORE + _G_PARTIAL,
                    "    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)\n"
                    "    inside = columns < N\n"
                    "    b = tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32)\n"
                    "    sums = tl.zeros([BLOCK_N], tl.float32)\n"
                    "    for m in range(pid_m * BLOCK_M, min(M, pid_m * BLOCK_M + BLOCK_M)):\n"
                    "        h = tl.load(x_ptr + m * N + columns, inside, 0.0).to(tl.float32) + b\n"
                    "        d = tl.load(dy_ptr + m * N + columns, inside, 0.0).to(tl.float32)\n"
                    "        d *= 0.5 + 0.5 * tl.erf(h * 0.7071067811865476) + h * tl.exp(-h * h / 2) * 0.3989422804\n"
                    "        sums += d\n"
                    "        tl.store(dx_ptr + m * N + columns, d, inside)\n"
                    "    tl.store(partial_ptr + pid_m * N + columns, sums, inside)\n",
                ),
                (_G_H + _G_BIAS, ""),
                (
                    "    # dy is 0 in the rows past the end, so they add nothing to the sums.\n    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)\n",
                    "",
                ),
            ),
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------- gelu.swiglu
_S_STORE = "    tl.store(y_ptr + row * N + offs_n, gate / (1 + tl.exp(-gate)) * up, mask=mask_n)\n"
_S_MATHS = (
    "    s = 1 / (1 + tl.exp(-gate))\n"
    "    silu = gate * s\n"
    "    tl.store(dgate_ptr + row * N + offs_n, dy * up * (s + silu * (1 - s)), mask=mask_n)\n"
    "    tl.store(dup_ptr + row * N + offs_n, dy * silu, mask=mask_n)\n"
)
_S_DY = "    dy = tl.load(dy_ptr + row * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)\n"
_S_SAVE = "        ctx.save_for_backward(gate, up)\n        return swiglu_forward(gate, up)\n"
_S_BACK = "        gate, up = ctx.saved_tensors\n        return swiglu_backward(dy.contiguous(), gate, up)\n"
_S_CALL = "    swiglu_kernel[(M, triton.cdiv(N, 256))](gate, up, y, gate.stride(0), up.stride(0), N, BLOCK_N=256)\n"
_S_EMPTY = "    dgate, dup = torch.empty_like(dy), torch.empty_like(dy)\n"
_S_BWD_CALL = (
    "    swiglu_backward_kernel[(M, triton.cdiv(N, 256))](\n"
    "        dy, gate, up, dgate, dup, gate.stride(0), up.stride(0), N, BLOCK_N=256\n    )\n"
)


def _s(name: str, old: str, new: str, diagnosis: str | None) -> Variant:
    assert old in _S_MATHS, old
    return Variant(name, ((_S_MATHS, _S_MATHS.replace(old, new)),), diagnosis=diagnosis)


def _halves(dgate: Callable[..., Tensor] | None = None, dup: Callable[..., Tensor] | None = None):
    """What the gradients are as formulas of gate, its sigmoid, up and dy."""

    def gives(gate: Tensor, up: Tensor, dy: Tensor) -> dict[str, Tensor]:
        s = gate.sigmoid()
        formulas = {"dgate": dgate, "dup": dup}
        return {name: formula(gate, s, up, dy) for name, formula in formulas.items() if formula}

    return gives


SWIGLU = KernelExercise(
    id="gelu.swiglu",
    title="SwiGLU, and nothing kept but its inputs",
    notebook=NOTEBOOK,
    function="swiglu",
    label=Label(3, 30, "two gradients in one pass; recomputation instead of a saved sigmoid; rows that lie apart"),
    hints=(
        "y is a product of silu(gate) and up. Which of the two does the gradient of up need, and which the gradient of gate? "
        "What would it cost to keep the sigmoid, and what to compute it again?",
        "With s the sigmoid: silu is gate times s, and the derivative of s is s times (1 minus s). One load of dy, gate and "
        "up is enough for both gradients. gate and up may be halves of one tensor: their rows are a stride apart, those of "
        "y, dy, dgate and dup are N.",
        "Forward: load both with their strides; gate over (one plus the exponential of minus gate), times up. Save gate and "
        "up. Backward: s again; dup is dy times gate times s; dgate is dy times up times (s plus gate times s times (1 "
        "minus s)).",
    ),
    cases=_swiglu_cases,
    reference=_swiglu,
    gradients=2,
    traffic=Traffic(reads=5, writes=3, launches=2),  # forward: gate, up, y; backward: dy, gate, up, dgate, dup
    misconceptions=(
        Misconception(
            "swapped",
            "up went through the sigmoid, and gate did not. Which of the two opens and closes?",
            gives=lambda gate, up, dy: {"y": _swiglu(up, gate)},
        ),
        Misconception(
            "sigmoid-only",
            "this is sigmoid(gate) up, the first GLU. SwiGLU's gate also multiplies: what is silu?",
            gives=lambda gate, up, dy: {"y": gate.sigmoid() * up},
        ),
        Misconception(
            "overflow",
            "only large gates are NaN: exp(gate) overflows above 88.7, and infinity over infinity is NaN. Which sign in the "
            "exponent turns infinity into a harmless 0?",
            when=_only("large", "nan"),
        ),
        Misconception(
            "contiguous-assumed",
            "halves of one tensor are wrong, all else is right: these are the numbers that would lie there if rows were N "
            "apart. What do gate.stride(0) and up.stride(0) say?",
            when=lambda evidence: evidence.tag("strided"),
        ),
        Misconception(
            "sigmoid-constant",
            "y is right. dgate is dy up s: as if the sigmoid did not move with gate.",
            gives=_halves(lambda gate, s, up, dy: dy * up * s),
        ),
        Misconception(
            "gate-constant",
            "y is right. dgate holds only how the sigmoid moves. silu is gate times sigmoid: what of the gate before it?",
            gives=_halves(lambda gate, s, up, dy: dy * up * gate * s * (1 - s)),
        ),
        Misconception(
            "one-minus-silu",
            "y is right. The derivative of s is s (1 - s): what stands in yours in the place of the second s?",
            gives=_halves(lambda gate, s, up, dy: dy * up * (s + gate * s * (1 - gate * s))),
        ),
        Misconception(
            "no-up",
            "y is right. dgate lacks a factor: what multiplies silu(gate) in y?",
            gives=_halves(lambda gate, s, up, dy: dy * (s + gate * s * (1 - s))),
        ),
        Misconception(
            "gate-itself",
            "y and dgate are right. dup is dy times gate: through what does gate go before it meets up?",
            gives=_halves(dup=lambda gate, s, up, dy: dy * gate),
        ),
        Misconception(
            "exchanged",
            "y is right. The two gradients have changed places.",
            gives=_halves(
                lambda gate, s, up, dy: dy * gate * s, lambda gate, s, up, dy: dy * up * (s + gate * s * (1 - s))
            ),
        ),
        Misconception(
            "out-of-bounds",
            "a row's last block may hang over its end; and rows of gate and up are a stride apart, those of y, dy, dgate and dup "
            "are N: which of the two was forgotten here?",
        ),
        Misconception(
            "traffic",
            "a sigmoid is a few instructions, a saved tensor is a write now and a read later: what do the inputs tell you?",
        ),
        Misconception("launches", "one launch can load dy, gate and up and make both gradients of them"),
    ),
    wrong=(
        Variant(
            "gate-and-up-swapped",
            ((_S_STORE, _S_STORE.replace("gate / (1 + tl.exp(-gate)) * up", "up / (1 + tl.exp(-up)) * gate")),),
            diagnosis="swapped",
        ),
        Variant(
            "glu",
            ((_S_STORE, _S_STORE.replace("gate / (", "1 / (")),),
            diagnosis="sigmoid-only",
        ),
        Variant(
            "exp-of-plus-gate",
            (
                (
                    _S_STORE,
                    _S_STORE.replace("gate / (1 + tl.exp(-gate))", "gate * tl.exp(gate) / (1 + tl.exp(gate))"),
                ),
            ),
            diagnosis="overflow",
        ),
        Variant(
            "assumes-contiguous",
            (
                (
                    _S_CALL,
                    _S_CALL.replace("gate.stride(0), up.stride(0)", "N, N"),
                ),
            ),
            diagnosis="out-of-bounds",
        ),
        _s("sigmoid-stands-still", "(s + silu * (1 - s))", "s", "sigmoid-constant"),
        _s("gate-stands-still", "(s + silu * (1 - s))", "silu * (1 - s)", "gate-constant"),
        _s("one-minus-silu", "silu * (1 - s)", "silu * (1 - silu)", "one-minus-silu"),
        _s("no-up", "dy * up * (s", "dy * (s", "no-up"),
        _s(
            "gate-for-silu",
            "dup_ptr + row * N + offs_n, dy * silu",
            "dup_ptr + row * N + offs_n, dy * gate",
            "gate-itself",
        ),
        Variant(
            "returns-them-the-wrong-way-round",
            (("    return dgate, dup\n", "    return dup, dgate\n"),),
            diagnosis="exchanged",
        ),
        Variant(
            "keeps-the-sigmoid",
            (
                ("def swiglu_kernel(gate_ptr, up_ptr, y_ptr,", "def swiglu_kernel(gate_ptr, up_ptr, y_ptr, s_ptr,"),
                (_S_STORE, _S_STORE + "    tl.store(s_ptr + row * N + offs_n, 1 / (1 + tl.exp(-gate)), mask=mask_n)\n"),
                (_S_CALL, "    s = torch.empty_like(y)\n" + _S_CALL.replace("y, gate", "y, s, gate")),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "a-launch-for-each-gradient",
            ((_S_BWD_CALL, _S_BWD_CALL + _S_BWD_CALL),),
            diagnosis="launches",
        ),
        Variant(
            "copies-the-halves",
            ((_S_BACK, _S_BACK.replace("gate, up)", "gate.clone(), up.clone())")),),
            diagnosis="traffic",
        ),
        Variant(
            "silu-of-torch",
            (
                (
                    _S_SAVE,
                    "        ctx.save_for_backward(gate, up)\n        return torch.nn.functional.silu(gate) * up\n",
                ),
            ),
            diagnosis="not-your-kernel",
        ),
        Variant(
            "copies-the-halves-first",
            ((_S_SAVE, "        gate, up = gate.contiguous(), up.contiguous()\n" + _S_SAVE),),
            diagnosis="traffic",
        ),
        Variant(
            "one-stride-for-both",
            ((_S_CALL, _S_CALL.replace("up.stride(0)", "gate.stride(0)")),),
            diagnosis="out-of-bounds",
        ),
        Variant(
            "writes-over-dy", ((_S_EMPTY, "    dgate, dup = torch.empty_like(dy), dy\n"),), diagnosis="input-changed"
        ),
    ),
    right=(
        _s(
            "slope-multiplied-out",
            _S_MATHS,
            "    s = tl.sigmoid(gate)\n"
            "    tl.store(dup_ptr + row * N + offs_n, dy * gate * s, mask=mask_n)\n"
            "    slope = s * (1 + gate * (1 - s))\n"
            "    tl.store(dgate_ptr + row * N + offs_n, dy * slope * up, mask=mask_n)\n",
            None,
        ),
        Variant(
            "both-signs-of-the-exponent",
            (
                (
                    _S_STORE,
                    "    e = tl.exp(-tl.abs(gate))\n"
                    "    s = tl.where(gate < 0, e, 1.0) / (1 + e)\n"
                    "    tl.store(y_ptr + row * N + offs_n, up * (s * gate), mask=mask_n)\n",
                ),
                (_S_MATHS, "    s = 0.5 + 0.5 * (2 * tl.sigmoid(gate) - 1)\n" + _S_MATHS.partition("\n")[2]),
            ),
        ),
    ),
)

EXERCISES = [DETECTIVE, BIAS, BACKWARD, SWIGLU]
