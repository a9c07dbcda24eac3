"""The exercises of notebook 11: cases, traffic bounds, hints, and the wrong answers that each check must recognise."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, KernelExercise, Label, Misconception, Traffic, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence
    from gpukit.grading.messages import LaunchFacts

NOTEBOOK = "11_norms"
RMS_EPS = 1e-6
LAYER_EPS = 1e-5


# --------------------------------------------------------------------------------------- what the exercises compute
def _wide(x: Tensor) -> Tensor:
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))


def _mean(terms: Tensor) -> Tensor:
    return terms.mean(-1, keepdim=True)


def _rms_norm(x: Tensor, weight: Tensor, eps: float = RMS_EPS) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    rstd = (_mean(wide.square()) + eps).rsqrt()
    return (wide * rstd * _wide(weight)).to(x.dtype), rstd.squeeze(-1)


def _normalised(x: Tensor, eps: float = LAYER_EPS) -> Tensor:
    wide = _wide(x)
    centred = wide - _mean(wide)
    return centred * (_mean(centred.square()) + eps).rsqrt()


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (_normalised(x) * _wide(weight) + _wide(bias)).to(x.dtype)


def _layer_norm_long(x: Tensor, BLOCK_N: int) -> Tensor:
    return _normalised(x).to(x.dtype)


def _trained(x: Tensor, weight: Tensor, programs: int) -> Tensor:
    return _rms_norm(x, weight)[0]


def _both_ways(x: Tensor, residual: Tensor, weight: Tensor, dy: Tensor, du: Tensor) -> tuple[Tensor, ...]:
    u = x + residual
    y, rstd = _rms_norm(u, weight)
    dx = _through_norm(u, _wide(dy) * _wide(weight), rstd) + _wide(du)
    return y, u, dx.to(x.dtype)


def _through_norm(x: Tensor, g: Tensor, rstd: Tensor) -> Tensor:
    """The gradient by x of a sum of g x_hat."""
    rstd = rstd.unsqueeze(-1)
    x_hat = _wide(x) * rstd
    return rstd * (g - x_hat * _mean(g * x_hat))


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from gpukit.reference.rope import rotate

    return rotate(x, cos, sin).to(x.dtype)


# ------------------------------------------------------------------------------------------------------------ inputs
class _Inputs:
    """Seeded tensors and cases named after them."""

    def __init__(self, rng: Random):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def normal(self, *shape: int, dtype: str = "float32") -> Tensor:
        return self.torch.randn(shape, generator=self.generator).to(getattr(self.torch, dtype))

    def far(self, *shape: int, mean: float) -> Tensor:
        """float16, a thousand times as far from 0 as spread about it: float32 has the digits that its result needs, and a
        variance made of large squares has not."""
        return (self.normal(*shape) * 0.7 + mean).half()

    def vector(self, like: Tensor) -> Tensor:
        return self.normal(like.shape[-1]).to(like.dtype)

    def case(self, x: Tensor, *rest: Any, tags: str = "", note: str = "") -> Case:
        dtype = str(x.dtype).removeprefix("torch.")
        name = f"x {list(x.shape)} {dtype}" + (f", {note}" if note else "")
        found = {dtype, *tags.split()}
        if x.shape[-1] & (x.shape[-1] - 1):
            found.add("tail")  # the row is shorter than the power of two that holds it
        return Case(name, (x, *rest), frozenset(found))


def _rms_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal, tiny = make.normal, make.normal(3, 96) * 1e-3
    tiny[1] = 0

    def case(x: Tensor, tags: str = "", note: str = "") -> Case:
        return make.case(x, make.vector(x), RMS_EPS, tags=tags, note=note)

    return [
        case(normal(1, 1) + 3),
        case(normal(3, 64)),
        case(normal(2, 1024, dtype="float16")),
        case(normal(2, 1000, dtype="bfloat16")),
        case(normal(2, 1025)),
        case(normal(5, 781)),
        case(normal(2, 128, dtype="float16") * 1000, tags="large", note="around 1000"),
        case(normal(2, 128) + 100, tags="far", note="around 100"),
        case(tiny, tags="tiny", note="around 0.001, and a row of zeros"),
    ]


def _layer_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal

    def case(x: Tensor, tags: str = "", note: str = "") -> Case:
        return make.case(x, make.vector(x), make.vector(x), tags=tags, note=note)

    tiny = normal(3, 96) * 1e-3
    tiny[1] = 0
    return [
        case(normal(1, 1) + 3),
        case(normal(3, 64)),
        case(normal(2, 1024, dtype="float16")),
        case(normal(2, 1000, dtype="bfloat16")),
        case(normal(5, 781) + 1),
        case(tiny, tags="tiny", note="around 0.001, and a row of zeros"),
        case(make.far(4, 256, mean=1000), tags="far large", note="around 1000"),
        case(make.far(4, 300, mean=-900), tags="far large", note="around -900"),
        case(make.far(4, 100, mean=800), tags="far large", note="around 800"),
    ]


def _welford_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal = make.normal
    steps = make.torch.arange(512.0) // 64

    def case(x: Tensor, BLOCK_N: int, tags: str = "", note: str = "") -> Case:
        partial = "partial" if x.shape[-1] % BLOCK_N else ""
        note = f"BLOCK_N {BLOCK_N}" + (f", {note}" if note else "")
        return make.case(x, BLOCK_N, tags=f"{tags} {partial}", note=note)

    return [
        case(normal(1, 1) + 3, 64),
        case(normal(3, 64), 64),
        case(normal(2, 1024, dtype="float16"), 256, tags="long"),
        case(normal(3, 512) + 3 * steps, 64, tags="long drift", note="rising by 3 a block"),
        case(normal(2, 1000, dtype="bfloat16") + 1, 256, tags="long"),
        case(normal(2, 1025, dtype="float16") + 2, 256, tags="long", note="one element in the last block"),
        case(normal(3, 781, dtype="float16") - 1, 128, tags="long"),
        case(make.far(4, 512, mean=1000), 128, tags="long far large", note="around 1000"),
        case(make.far(4, 300, mean=-900), 64, tags="long far large", note="around -900"),
    ]


def _backward_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(x: Tensor, programs: int, note: str = "", tags: str = "") -> Case:
        rows = "few-rows" if len(x) < programs else "many-rows" if len(x) > programs else ""
        remainder = "remainder" if len(x) % programs else ""
        note = f"{programs} programs" + (f", {note}" if note else "")
        dy = make.normal(*x.shape).to(x.dtype)
        return make.case(x, make.vector(x), programs, dy, tags=f"{rows} {remainder} {tags}", note=note)

    normal = make.normal
    return [
        case(normal(1, 1) * 1e-3, 1, note="around 0.001"),
        case(normal(4, 64), 4),
        case(normal(4, 781), 2),
        case(normal(7, 100), 3),
        case(normal(6, 1000, dtype="bfloat16"), 2),
        case(normal(5, 128, dtype="float16") * 500, 2, note="around 500", tags="large"),
        case(normal(3, 1025), 2),
        case(normal(32, 256), 2),
        case(normal(3, 96), 8, note="more programs than rows"),
    ]


def _residual_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(x: Tensor, note: str = "", tags: str = "") -> Case:
        residual, dy, du = (make.normal(*x.shape).to(x.dtype) for _ in range(3))
        return make.case(x, residual, make.vector(x), dy, du, tags=tags, note=note)

    normal = make.normal
    return [
        case(normal(1, 2) + 3),
        case(normal(3, 64)),
        case(normal(5, 781)),
        case(normal(2, 1000, dtype="bfloat16")),
        case(normal(2, 1025)),
        case(normal(2, 1024, dtype="float16")),
        case(normal(3, 128, dtype="float16") * 500, note="around 500", tags="large"),
        case(normal(12, 256)),
    ]


def _rope_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(B: int, H: int, T: int, D: int, dtype: str = "float32", layout: str = "", note: str = "") -> Case:
        from gpukit.reference.rope import tables

        dy = make.normal(B, H, T, D, dtype=dtype)
        if layout == "BTHD":  # what a projection gives, seen with its heads first
            x = make.normal(B, T, H, D, dtype=dtype).transpose(1, 2)
        else:
            x = make.normal(B, H, T, D, dtype=dtype)
        if layout == "expanded":
            dy = make.normal(1, 1, 1, D, dtype=dtype).expand(B, H, T, D)
        if note == "large":
            x = x * 1000
        cos, sin = (table.float() for table in tables(T, D))
        note = {"BTHD": "[B, T, H, D] seen as [B, H, T, D]", "expanded": "dy expanded: stride 0"}.get(layout, note)
        tags = " ".join(["strided" * bool(layout), "leading", "large" * (note == "large"), "heads" * (H > 1)])
        return make.case(x, cos, sin, dy, tags=tags, note=note)

    return [
        case(1, 1, 1, 2),
        case(1, 1, 5, 64),
        case(2, 3, 4, 16),
        case(1, 4, 6, 62),
        case(2, 5, 3, 20, layout="BTHD"),
        case(1, 2, 7, 128, dtype="bfloat16", layout="BTHD"),
        case(1, 3, 4, 32, dtype="float16", note="large"),
        case(1, 2, 3, 64, layout="expanded"),
        case(1, 8, 8, 64, layout="BTHD"),  # the largest, whose bytes are counted: who copies it first must be seen
    ]


# -------------------------------------------------------------------------------------------------- shared wrong ideas
def _padding(N: int, BLOCK_N: int = 0) -> int:
    """Lanes past the end of a row, in its only block or in the last one of BLOCK_N."""
    return -N % BLOCK_N if BLOCK_N else (1 << (N - 1).bit_length()) - N


def _all_far(evidence: Evidence) -> bool:
    """Only rows far from 0 fail, if not all of them: by chance a digit that is lost may not show."""
    return all("far" in case.tags for case in evidence.failed)


def _missing(name: str) -> Callable[[Evidence], bool]:
    return lambda evidence: evidence.kind == "nan" and evidence.output == name


def _forward(rstd: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What rms_norm gives where 1 / sqrt(...) is `rstd` of x and eps."""
    return lambda x, weight, eps: {"y[0]": x * rstd(x, eps) * weight, "y[1]": rstd(x, eps).squeeze(-1)}


def _weights(gives: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """What layer_norm gives where the normalised x is `gives`."""
    return lambda x, weight, bias: gives(x) * weight + bias


_CANCELLATION = (
    "only rows far from 0 are wrong: there mean(x^2) and mean(x)^2 agree in almost all of their seven digits, and the "
    "difference is what rounding left. How large are the numbers if the mean is taken off before they are squared?"
)
_SAMPLE_VARIANCE = (
    "the squares are divided by N - 1. That estimates the variance of what a sample was drawn from; a norm wants the mean "
    "over the row itself."
)
_PADDED_VARIANCE = (
    "the padding lanes were 0 and are 0 - mean once the mean is taken off: their squares are in the variance. "
    "When must a lane be masked again?"
)


# -------------------------------------------------------------------------------------------------- norms.rms_norm
_F_HEAD = "    mask_n = offs_n < N\n    x = tl.load(x_ptr + row * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)\n"
_F_WEIGHT = (
    "    weight = tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)\n"
    "    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)\n    tl.store(rstd_ptr + row, rstd)\n"
)
_F_STORE = "    tl.store(y_ptr + row * N + offs_n, x * rstd * weight, mask=mask_n)\n"
_F_BODY = _F_HEAD + _F_WEIGHT + _F_STORE
_F_LAUNCH = "    rms_norm_kernel[(M,)](x, weight, y, rstd, N, eps, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N))\n"


def _f(name: str, old: str, new: str, diagnosis: str | None) -> Variant:
    assert old in _F_BODY, old
    return Variant(name, ((_F_BODY, _F_BODY.replace(old, new)),), diagnosis=diagnosis)


RMS_NORM = KernelExercise(
    id="norms.rms_norm",
    title="RMSNorm in one read and one write",
    notebook=NOTEBOOK,
    function="rms_norm",
    returns=("y", "rstd"),
    label=Label(2, 20, "a row statistic in float32; what the backward pass will want"),
    hints=(
        "One number a row says how large the row is. From how many elements is it made, and from which dtype? A float16 "
        "ends at 65504: what is the largest element whose square it can hold?",
        "Convert to float32 as soon as the row is loaded; masked-off lanes that hold 0 add nothing to a sum of squares. "
        "Divide by N, not by the lanes of the block. eps stands under the root, beside the mean.",
        "Six lines: the mask; the row in float32; the weight in float32; one over the root of the sum of squares divided by "
        "N, plus eps; the store of that number at this program's place in rstd; the store of the product of all three.",
    ),
    cases=_rms_cases,
    reference=_rms_norm,
    traffic=Traffic(reads=2, writes=1),
    misconceptions=(
        Misconception(
            "no-weight",
            "these are the normalised rows: every column is off by a factor of its own. Who multiplies by it?",
            gives=lambda x, weight, eps: x * (_mean(x * x) + eps).rsqrt(),
        ),
        Misconception(
            "weight-per-row",
            "each row is multiplied by one number out of weight. weight has N elements: what do they belong to?",
            gives=lambda x, weight, eps: _rms_norm(x, weight.new_ones(()), eps)[0] * weight[: len(x), None],
        ),
        Misconception(
            "padded-mean",
            "the sum is right and was divided by the lanes of the block. How many elements has the row?",
            gives=_forward(
                lambda x, eps: ((x * x).sum(-1, keepdim=True) / (x.shape[-1] + _padding(x.shape[-1])) + eps).rsqrt()
            ),
        ),
        Misconception(
            "sum-not-mean",
            "each row is too small by sqrt(N): what is under the root is the sum of the squares. The M of RMS stands for?",
            gives=_forward(lambda x, eps: ((x * x).sum(-1, keepdim=True) + eps).rsqrt()),
        ),
        Misconception(
            "eps-outside",
            "only tiny rows are wrong: eps was added to the root. By how much does eps move a mean of 1e-6, and by how "
            "much a root of 1e-3?",
            gives=_forward(lambda x, eps: 1 / (_mean(x * x).sqrt() + eps)),
        ),
        Misconception(
            "no-eps",
            "a row of zeros gives 0 / 0. What keeps a mean of squares away from 0?",
            gives=_forward(lambda x, eps: _mean(x * x).rsqrt()),
        ),
        Misconception(
            "centred",
            "the mean was taken off first. That is LayerNorm: what does RMSNorm leave out?",
            gives=lambda x, weight, eps: _normalised(x, eps) * weight,
        ),
        Misconception(
            "low-precision-squares",
            "all is well in float32, and rows of 16 bits are wrong: their squares were rounded, and 300 squared is no float16 "
            "at all. Where does the kernel go over to float32?",
            when=lambda evidence: all(case.tags & {"float16", "bfloat16"} for case in evidence.failed),
        ),
        Misconception(
            "rstd-inverted",
            "y is right; rstd holds the root itself. The backward pass multiplies by rstd: what must it hold?",
            gives=lambda x, weight, eps: {"y[1]": (_mean(x * x) + eps).sqrt().squeeze(-1)},
        ),
        Misconception(
            "rstd-missing",
            "y is right; rstd was never written. The backward pass needs one number of each row.",
            when=_missing("y[1]"),
        ),
        Misconception("traffic", "one load is enough if the row stays in registers between the sum and the store"),
    ),
    wrong=(
        _f("no-weight", "x * rstd * weight", "x * rstd", "no-weight"),
        _f(
            "weight-of-the-row",
            "tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0)",
            "tl.load(weight_ptr + row % N)",
            "weight-per-row",
        ),
        _f("divides-by-the-block", "axis=0) / N", "axis=0) / BLOCK_N", "padded-mean"),
        _f("no-division", "axis=0) / N", "axis=0)", "sum-not-mean"),
        _f(
            "eps-beside-the-root",
            "tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)",
            "1 / (tl.sqrt(tl.sum(x * x, axis=0) / N) + eps)",
            "eps-outside",
        ),
        _f("no-eps", " / N + eps", " / N", "no-eps"),
        _f(
            "layer-norm",
            "    rstd = ",
            "    x = tl.where(mask_n, x - tl.sum(x, axis=0) / N, 0.0)\n    rstd = ",
            "centred",
        ),
        Variant(
            "squares-in-own-dtype",
            (
                (
                    _F_BODY,
                    _F_BODY.replace("other=0.0).to(tl.float32)\n    weight", "other=0.0)\n    weight").replace(
                        "tl.sum(x * x, axis=0)", "tl.sum((x * x).to(tl.float32), axis=0)"
                    ),
                ),
            ),
            diagnosis="low-precision-squares",
        ),
        _f("stores-the-root", "rstd_ptr + row, rstd)", "rstd_ptr + row, 1 / rstd)", "rstd-inverted"),
        _f("no-rstd", "    tl.store(rstd_ptr + row, rstd)\n", "", "rstd-missing"),
        _f("no-store-mask", "weight, mask=mask_n)", "weight)", "out-of-bounds"),
        _f(
            "no-load-mask",
            "x_ptr + row * N + offs_n, mask=mask_n, other=0.0",
            "x_ptr + row * N + offs_n",
            "out-of-bounds",
        ),
        _f(
            "loads-twice",
            "x * rstd * weight",
            "tl.load(x_ptr + row * N + offs_n, mask=mask_n, other=0.0) * rstd * weight",
            "traffic",
        ),
        Variant(
            "calls-torch",
            (
                (
                    _F_LAUNCH,
                    _F_LAUNCH + "    return torch.nn.functional.rms_norm(x, (N,), weight, eps), rstd\n",
                ),
            ),
            diagnosis="not-your-kernel",
        ),
        Variant(
            "writes-over-x", ((_F_LAUNCH, _F_LAUNCH.replace("weight, y,", "weight, x,")),), diagnosis="input-changed"
        ),
    ),
    right=(
        _f(
            "mean-of-squares-and-a-division",
            "tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)",
            "1.0 / tl.sqrt(tl.sum(x * x / N, axis=0) + eps)",
            None,
        ),
        _f(
            "rounds-before-the-weight",  # as LLaMA's code does
            "x * rstd * weight",
            "(x * rstd).to(y_ptr.dtype.element_ty).to(tl.float32) * weight",
            None,
        ),
        Variant(
            "rows-that-share-a-weight",
            (
                (
                    "def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, rstd_ptr, N, eps",
                    "def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, rstd_ptr, M, N, eps",
                ),
                (
                    _F_BODY,
                    "    columns = offs_n[None, :]\n"
                    "    rows = (tl.program_id(0) * 4 + tl.arange(0, 4))[:, None].to(tl.int64)\n"
                    "    inside = (rows < M) & (columns < N)\n"
                    "    x = tl.load(x_ptr + rows * N + columns, inside, 0.0).to(tl.float32)\n"
                    "    mean = tl.sum(x * x, axis=1, keep_dims=True) / N\n"
                    "    rstd = 1.0 / tl.sqrt(mean + eps)\n"
                    "    tl.store(rstd_ptr + rows, rstd, rows < M)\n"
                    "    weight = tl.load(weight_ptr + columns, columns < N, 0.0)\n"
                    "    tl.store(y_ptr + rows * N + columns, x * (rstd * weight), inside)\n",
                ),
                (_F_LAUNCH, _F_LAUNCH.replace("(M,)", "(triton.cdiv(M, 4),)").replace("rstd, N", "rstd, M, N")),
            ),
        ),
    ),
)


# ------------------------------------------------------------------------------------------------- norms.detective
_D_CENTRED = (
    "    # A padding lane would hold -mean, and its square would count.\n"
    "    centred = tl.where(inside, x - tl.sum(x, axis=0) / N, 0.0)\n"
)
_D_VARIANCE = "    variance = tl.sum(centred * centred, axis=0) / N\n"
_D_Y = "    y = centred * tl.rsqrt(variance + eps) * weight + bias\n"
_D_BODY = _D_CENTRED + _D_VARIANCE + _D_Y
_D_LAUNCH = (
    "    layer_norm_kernel[(M,)](x, weight, bias, y, N, eps, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N))\n"
)
_D_STUB = (
    "    mean = tl.sum(x, axis=0) / N\n"
    "    variance = tl.sum(x * x, axis=0) / N - mean * mean\n"
    "    y = (x - mean) * tl.rsqrt(variance + eps) * weight + bias\n"
)


def _padded_variance(x: Tensor) -> Tensor:
    mean = _mean(x)
    total = (x - mean).square().sum(-1, keepdim=True) + _padding(x.shape[-1]) * mean.square()
    return (x - mean) * (total / x.shape[-1] + LAYER_EPS).rsqrt()


DETECTIVE = KernelExercise(
    id="norms.detective",
    title="Detective: a LayerNorm that most tests pass",
    notebook=NOTEBOOK,
    function="layer_norm",
    label=Label(2, 15, "what tests with numbers around 0 do not see"),
    hints=(
        "Run the check: which rows are wrong, and what have they in common? Then put 2000, 2001 and 2002 into the formula "
        "for the variance by hand, with seven digits at each step.",
        "Two numbers near four million are subtracted to get one near one. float32 keeps about seven digits of each. The "
        "row is in registers: how much does it cost to go over it once more, after its mean is known?",
        "Take the mean off first, make the lanes past the end 0 again, and take the mean of the squares of that.",
    ),
    cases=_layer_cases,
    reference=_layer_norm,
    traffic=Traffic(reads=3, writes=1),
    misconceptions=(
        Misconception("cancellation", _CANCELLATION, when=_all_far),
        Misconception("padding-in-variance", _PADDED_VARIANCE, gives=_weights(_padded_variance)),
        Misconception(
            "not-centred",
            "the variance is right, but what it divides is x itself. What has a normalised row for a mean?",
            gives=_weights(lambda x: x * ((x - _mean(x)).square().mean(-1, keepdim=True) + LAYER_EPS).rsqrt()),
        ),
        Misconception(
            "sample-variance",
            _SAMPLE_VARIANCE,
            gives=_weights(
                lambda x: (
                    (x - _mean(x))
                    * ((x - _mean(x)).square().sum(-1, keepdim=True) / (x.shape[-1] - 1) + LAYER_EPS).rsqrt()
                )
            ),
        ),
        Misconception(
            "eps-outside",
            "eps was added to the root. It stands under it, beside the variance.",
            gives=_weights(
                lambda x: (x - _mean(x)) / ((x - _mean(x)).square().mean(-1, keepdim=True).sqrt() + LAYER_EPS)
            ),
        ),
        Misconception(
            "traffic",
            "the row is in registers already: a second look at it needs no second load",
        ),
    ),
    wrong=(
        Variant("unmended", ((_D_BODY, _D_STUB),), diagnosis="cancellation"),
        Variant(
            "never-below-zero",
            (
                (
                    _D_BODY,
                    _D_STUB.replace(
                        "tl.sum(x * x, axis=0) / N - mean * mean",
                        "tl.maximum(tl.sum(x * x, axis=0) / N - mean * mean, 0.0)",
                    ),
                ),
            ),
            diagnosis="cancellation",
        ),
        Variant(
            "larger-eps",
            ((_D_BODY, _D_STUB.replace("variance + eps", "tl.abs(variance) + eps")),),
            diagnosis="cancellation",
        ),
        Variant(
            "mean-of-products",  # x (x - mean) is as large as x times the spread: better, and not enough
            (
                (
                    _D_BODY,
                    _D_STUB.replace("tl.sum(x * x, axis=0) / N - mean * mean", "tl.sum(x * (x - mean), axis=0) / N"),
                ),
            ),
            diagnosis="cancellation",
        ),
        Variant(
            "padding-counts",
            (
                (
                    _D_BODY,
                    _D_BODY.replace("tl.where(inside, x - tl.sum(x, axis=0) / N, 0.0)", "x - tl.sum(x, axis=0) / N"),
                ),
            ),
            diagnosis="padding-in-variance",
        ),
        Variant("divides-what-is-not-centred", ((_D_Y, _D_Y.replace("centred *", "x *")),), diagnosis="not-centred"),
        Variant(
            "n-minus-one",
            ((_D_VARIANCE, _D_VARIANCE.replace("/ N", "/ tl.maximum(N - 1, 1)")),),
            diagnosis="sample-variance",
        ),
        Variant(
            "eps-beside-the-root",
            ((_D_Y, _D_Y.replace("centred * tl.rsqrt(variance + eps)", "centred / (tl.sqrt(variance) + eps)")),),
            diagnosis="eps-outside",
        ),
        Variant(
            "loads-again",
            (
                (
                    _D_VARIANCE,
                    "    again = tl.load(x_ptr + row * N + offs_n, mask=inside, other=0.0).to(tl.float32)\n"
                    "    centred = tl.where(inside, again - tl.sum(x, axis=0) / N, 0.0)\n" + _D_VARIANCE,
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "calls-torch",
            ((_D_LAUNCH, _D_LAUNCH + "    return torch.nn.functional.layer_norm(x, (N,), weight, bias, eps)\n"),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "takes-off-the-first-element",  # any number near the row will do, if the mean of the rest is corrected for
            (
                (
                    _D_BODY,
                    "    near = tl.where(inside, x - tl.sum(tl.where(offs_n == 0, x, 0.0), axis=0), 0.0)\n"
                    "    mean = tl.sum(near, axis=0) / N\n"
                    "    variance = tl.sum(near * near, axis=0) / N - mean * mean\n"
                    "    y = (near - mean) * tl.rsqrt(variance + eps) * weight + bias\n",
                ),
            ),
        ),
        Variant(
            "float64-for-the-sums",
            (
                (
                    _D_BODY,
                    "    mean = tl.sum(x.to(tl.float64), axis=0) / N\n"
                    "    centred = x.to(tl.float64) - mean\n"
                    "    variance = tl.sum(centred * centred * inside, axis=0) / N\n"
                    "    y = centred / tl.sqrt(variance + eps) * weight + bias\n",
                ),
            ),
        ),
        Variant(
            "takes-the-padding-out-again",
            (
                (
                    _D_BODY,
                    "    mean = tl.sum(x, axis=0) / N\n"
                    "    real = inside.to(tl.float32)\n"
                    "    d = real * (x - mean)\n"
                    "    y = d / tl.sqrt(tl.sum(d * d, axis=0) / N + eps)\n"
                    "    y = weight * y + bias\n",
                ),
            ),
        ),
    ),
)


# --------------------------------------------------------------------------------------------------- norms.welford
_W_MASK = "        mask_n = start + offs_n < N\n"
_W_LOAD = "        x = tl.load(x_ptr + row + start + offs_n, mask=mask_n, other=0.0).to(tl.float32)\n"
_W_START = (
    "    mean = tl.zeros((), tl.float32)  # of the elements seen so far\n"
    "    m2 = tl.zeros((), tl.float32)  # the sum of their (x - mean)^2\n"
)
_W_FOR = "    for start in range(0, N, BLOCK_N):\n"
_W_HERE = (
    "        here = tl.sum(mask_n.to(tl.float32), axis=0)  # elements in this block; start elements came before it\n"
)
_W_BLOCK = "        block_mean = tl.sum(x, axis=0) / here\n        centred = tl.where(mask_n, x - block_mean, 0.0)\n"
_W_MERGE = (
    "        share = here / (start + here)\n"
    "        delta = block_mean - mean\n"
    "        mean += delta * share\n"
    "        # Two groups spread about their own means, and the means about the common one.\n"
    "        m2 += tl.sum(centred * centred, axis=0) + delta * delta * start * share\n"
)
_W_RSTD = "    rstd = tl.rsqrt(m2 / N + eps)\n"
_W_STORE = "        tl.store(y_ptr + row + start + offs_n, (x - mean) * rstd, mask=mask_n)\n"
_W_FIRST = _W_START + _W_FOR + _W_MASK + _W_LOAD + _W_HERE + _W_BLOCK + _W_MERGE
_W_SECOND = _W_RSTD + _W_FOR + _W_MASK + _W_LOAD + _W_STORE
_W_SHORT = "    for start in range(0, N - BLOCK_N + 1, BLOCK_N):\n"


def _w(name: str, old: str, new: str, diagnosis: str | None) -> Variant:
    assert old in _W_FIRST, old
    return Variant(name, ((_W_FIRST, _W_FIRST.replace(old, new)),), diagnosis=diagnosis)


def _merged(
    step: Callable[..., tuple[Any, Any]],
    keep: Callable[[int, int], bool] = lambda here, BLOCK_N: True,
    less: int = 0,
):
    """What the two passes give where a block changes (mean, m2) by `step` of them, start, the block and BLOCK_N.
    The variance is m2 over N - less."""

    def gives(x: Tensor, BLOCK_N: int) -> Tensor:
        mean = m2 = x.new_zeros(len(x), 1)
        start = 0
        for block in x.split(BLOCK_N, -1):
            if keep(block.shape[-1], BLOCK_N):
                mean, m2 = step(mean, m2, start, block, BLOCK_N)
            start += block.shape[-1]
        return (x - mean) * (m2 / x.new_tensor(start - less) + LAYER_EPS).rsqrt()

    return gives


def _spread(block: Tensor) -> Tensor:
    return (block - _mean(block)).square().sum(-1, keepdim=True)


def _right(mean, m2, start, block, BLOCK_N):
    here, delta = block.shape[-1], _mean(block) - mean
    share = here / (start + here)
    return mean + delta * share, m2 + _spread(block) + delta.square() * start * share


def _full_blocks(mean, m2, start, block, BLOCK_N):
    block_mean = block.sum(-1, keepdim=True) / BLOCK_N
    delta, share = block_mean - mean, BLOCK_N / (start + BLOCK_N)
    spread = (block - block_mean).square().sum(-1, keepdim=True)
    return mean + delta * share, m2 + spread + delta.square() * start * share


def _mean_of_means(mean, m2, start, block, BLOCK_N):
    delta = _mean(block) - mean
    _, m2 = _right(mean, m2, start, block, BLOCK_N)
    return mean + delta / (start // BLOCK_N + 1), m2


def _within_only(mean, m2, start, block, BLOCK_N):
    return _right(mean, m2, start, block, BLOCK_N)[0], m2 + _spread(block)


def _unweighted_delta(mean, m2, start, block, BLOCK_N):
    delta = _mean(block) - mean
    return _right(mean, m2, start, block, BLOCK_N)[0], m2 + _spread(block) + delta.square()


def _mean_moved_first(mean, m2, start, block, BLOCK_N):
    here = block.shape[-1]
    mean, _ = _right(mean, m2, start, block, BLOCK_N)
    return mean, m2 + _spread(block) + (_mean(block) - mean).square() * start * (here / (start + here))


def _count_moved_first(mean, m2, start, block, BLOCK_N):
    return _right(mean, m2, start, block, BLOCK_N)[0], m2 + _spread(block) + (
        _mean(block) - mean
    ).square() * block.shape[-1]


def _padding_spreads(mean, m2, start, block, BLOCK_N):
    lanes = BLOCK_N - block.shape[-1]
    mean, m2 = _right(mean, m2, start, block, BLOCK_N)
    return mean, m2 + lanes * _mean(block).square()


def _each_block_alone(x: Tensor, BLOCK_N: int) -> Tensor:
    import torch

    return torch.cat([_normalised(block) for block in x.split(BLOCK_N, -1)], -1)


WELFORD = KernelExercise(
    id="norms.welford",
    title="Mean and variance of a long row in one pass",
    notebook=NOTEBOOK,
    function="layer_norm_long",
    label=Label(4, 40, "merging mean and spread of two groups (Welford, Chan); counts of unequal blocks"),
    hints=(
        "Group A has 300 elements with mean 2, group B has 100 with mean 6. What is the mean of all? And if every element "
        "of a group equals its mean, what is the variance of all: 0?",
        "Carry a count, a mean and the sum of squared distances from that mean. When a block joins, the mean moves by the "
        "block's share of the whole. The distances grow by a term of their own: both groups now lie around a common mean "
        "that is neither's.",
        "For each block: its mean over the elements that exist; its squared distances from that mean, padding taken out; the "
        "difference delta of the two means; then the sum grows by the block's, plus delta squared times the elements before "
        "times the block's share of all, and the mean by delta times that share. Pass two subtracts and divides.",
    ),
    cases=_welford_cases,
    reference=_layer_norm_long,
    traffic=Traffic(reads=2, writes=1),
    misconceptions=(
        Misconception(
            "block-alone",
            "each block has mean 0 and variance 1 by itself. Which statistics belong to the row, and when are they known?",
            gives=_each_block_alone,
        ),
        Misconception(
            "between-blocks",
            "the blocks' own spreads add up, and that their means differ is forgotten: where the rows rise from block to "
            "block the variance is far too small. How far is each group from the common mean?",
            gives=_merged(_within_only),
        ),
        Misconception(
            "delta-weight",
            "the squared difference of the means is added once. How many elements lie that far from the common mean, and "
            "how far do those of the other group?",
            gives=_merged(_unweighted_delta),
        ),
        Misconception(
            "mean-moved-first",
            "the difference of the means was taken after the mean had moved, so it is too small. Which of the two lines "
            "comes first?",
            gives=_merged(_mean_moved_first),
        ),
        Misconception(
            "count-moved-first",
            "the difference of the means was weighted with a count that holds the new block already: even the first block's "
            "distance from nothing is in the variance. Which count came before the block?",
            gives=_merged(_count_moved_first),
        ),
        Misconception("sample-variance", _SAMPLE_VARIANCE, gives=_merged(_right, less=1)),
        Misconception(
            "block-weight",
            "every block counts as a full one, and the last is not. How many of its lanes are elements?",
            gives=_merged(_full_blocks),
        ),
        Misconception(
            "block-weight",
            "the mean is the mean of the blocks' means, though the last block is shorter. What is its share of the row?",
            gives=_merged(_mean_of_means),
        ),
        Misconception("padding-in-variance", _PADDED_VARIANCE, gives=_merged(_padding_spreads)),
        Misconception(
            "tail-block",
            "the statistics lack the last block of a row where that block is not full. How many blocks does it take to "
            "cover N?",
            gives=_merged(_right, keep=lambda here, BLOCK_N: here == BLOCK_N),
        ),
        Misconception(
            "tail-block",
            "the last block of a row was not written where it is not full. How many blocks does it take to cover N?",
            when=lambda evidence: evidence.kind == "nan" and evidence.tag("partial"),
        ),
        Misconception("cancellation", _CANCELLATION, when=_all_far),
        Misconception(
            "traffic",
            "a pass for the mean and one for the variance is a pass too many: what must be carried so that one yields both?",
        ),
    ),
    wrong=(
        Variant(
            "sums-and-squares",
            (
                (
                    _W_FIRST + _W_RSTD,
                    _W_START
                    + _W_FOR
                    + _W_MASK
                    + _W_LOAD
                    + "        mean += tl.sum(x, axis=0) / N\n        m2 += tl.sum(x * x, axis=0)\n"
                    + "    m2 -= N * mean * mean\n"
                    + _W_RSTD,
                ),
            ),
            diagnosis="cancellation",
        ),
        _w("no-term-between-blocks", " + delta * delta * start * share", "", "between-blocks"),
        _w("delta-once", "delta * delta * start * share", "delta * delta", "delta-weight"),
        _w(
            "delta-from-the-new-mean",
            "+ delta * delta * start",
            "+ (block_mean - mean) * (block_mean - mean) * start",
            "mean-moved-first",
        ),
        _w("count-with-the-block", "delta * delta * start * share", "delta * delta * here", "count-moved-first"),
        Variant(
            "sample-variance", ((_W_RSTD, _W_RSTD.replace("m2 / N", "m2 / (N - 1)")),), diagnosis="sample-variance"
        ),
        _w("full-blocks", _W_HERE, "        here = BLOCK_N + 0.0\n", "block-weight"),
        _w("mean-of-means", "mean += delta * share", "mean += delta / (start // BLOCK_N + 1)", "block-weight"),
        _w("padding-counts", "tl.where(mask_n, x - block_mean, 0.0)", "x - block_mean", "padding-in-variance"),
        Variant("last-block-not-counted", ((_W_START + _W_FOR, _W_START + _W_SHORT),), diagnosis="tail-block"),
        Variant(
            "last-block-dropped",
            ((_W_START + _W_FOR, _W_START + _W_SHORT), (_W_RSTD + _W_FOR, _W_RSTD + _W_SHORT)),
            diagnosis="tail-block",
        ),
        Variant(
            "each-block-alone",
            (
                (
                    _W_STORE,
                    "        here = tl.minimum(N - start, BLOCK_N)\n"
                    "        mean = tl.sum(x, axis=0) / here\n"
                    "        d = tl.where(mask_n, x - mean, 0.0)\n"
                    "        rstd = tl.rsqrt(tl.sum(d * d, axis=0) / here + eps)\n" + _W_STORE,
                ),
            ),
            diagnosis="block-alone",
        ),
        Variant(
            "three-passes",
            (
                (
                    _W_FIRST,
                    _W_START
                    + _W_FOR
                    + _W_MASK
                    + _W_LOAD
                    + "        mean += tl.sum(x, axis=0) / N\n"
                    + _W_FOR
                    + _W_MASK
                    + _W_LOAD
                    + "        d = tl.where(mask_n, x - mean, 0.0)\n        m2 += tl.sum(d * d, axis=0)\n",
                ),
            ),
            diagnosis="traffic",
        ),
        Variant("no-store-mask", ((_W_STORE, _W_STORE.replace(", mask=mask_n", "")),), diagnosis="out-of-bounds"),
    ),
    right=(
        Variant(
            "a-mean-and-a-spread-in-every-lane",
            (
                (
                    _W_FIRST,
                    "    count = tl.zeros([BLOCK_N], tl.float32)\n"
                    "    means = tl.zeros([BLOCK_N], tl.float32)\n"
                    "    spread = tl.zeros([BLOCK_N], tl.float32)\n"
                    + _W_FOR
                    + _W_MASK
                    + _W_LOAD
                    + "        count += mask_n.to(tl.float32)\n"
                    "        delta = tl.where(mask_n, x - means, 0.0)\n"
                    "        means += delta / tl.maximum(count, 1.0)\n"
                    "        spread += delta * (x - means)\n"
                    "    mean = tl.sum(count * means, axis=0) / N\n"
                    "    m2 = tl.sum(spread + count * (means - mean) * (means - mean), axis=0)\n",
                ),
            ),
        ),
        Variant(
            "sums-about-the-first-element",
            (
                (
                    _W_FIRST + _W_SECOND,
                    "    near = tl.load(x_ptr + row).to(tl.float32)\n"
                    + _W_START
                    + _W_FOR
                    + _W_MASK
                    + _W_LOAD
                    + "        d = tl.where(mask_n, x - near, 0.0)\n"
                    "        mean += tl.sum(d, axis=0)\n"
                    "        m2 += tl.sum(d * d, axis=0)\n"
                    "    mean = mean / N\n"
                    "    m2 -= N * mean * mean\n" + _W_SECOND.replace("x - mean", "x - near - mean"),
                ),
            ),
        ),
        _w(
            "counts-written-out",
            _W_MERGE,
            "        before = start * 1.0\n"
            "        after = before + here\n"
            "        delta = mean - block_mean\n"
            "        m2 = m2 + tl.sum(centred * centred, axis=0) + before * here / after * delta * delta\n"
            "        mean = (before * mean + here * block_mean) / after\n",
            None,
        ),
    ),
)


# -------------------------------------------------------------------------------------------------- norms.backward
_B_WEIGHT = "    weight = tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)\n    dweight = tl.zeros"
_B_FOR = "    for start in tl.range(pid, M, tl.num_programs(0)):\n        row = tl.cast(start, tl.int64)\n"
_B_DX = (
    "        x_hat = x * rstd\n"
    "        g = dy * weight\n"
    "        dx = rstd * (g - x_hat * (tl.sum(g * x_hat, axis=0) / N))\n"
)
_B_STORE = "        tl.store(dx_ptr + row * N + offs_n, dx, mask=mask_n)\n"
_B_ADD = "        dweight += dy * x_hat\n"
_B_PARTIAL = (
    "    # After the loop, so that a program without rows leaves zeros.\n"
    "    tl.store(partial_ptr + pid * N + offs_n, dweight, mask=mask_n)\n"
)
_B_TOTAL = "    for p in range(P):\n"
_B_HOST = "    partial = torch.empty((programs, N), dtype=torch.float32, device=x.device)\n"
_B_SUM = "    sum_rows_kernel[(triton.cdiv(N, 64),)](partial, dweight, programs, N, BLOCK_N=64)\n"
_B_BACK = "        return *rms_norm_backward(dy.contiguous(), x, weight, rstd, ctx.programs), None\n"


def _b(name: str, old: str, new: str, diagnosis: str | None) -> Variant:
    text = _B_DX + _B_STORE + _B_ADD
    assert old in text, old
    return Variant(name, ((text, text.replace(old, new)),), diagnosis=diagnosis)


def _gradients(**formulas: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What a backward pass gives whose dx or dweight is a formula of x_hat, rstd, weight and dy."""

    def gives(x: Tensor, weight: Tensor, programs: int, dy: Tensor) -> dict[str, Tensor]:
        rstd = _rms_norm(x, weight)[1].unsqueeze(-1)
        return {name: formula(x * rstd, rstd, weight, dy) for name, formula in formulas.items()}

    return gives


def _of_rows(pick: Callable[[int, int], slice]) -> Callable[..., dict[str, Tensor]]:
    """What dweight is where only some rows count: `pick` of M and the number of programs."""

    def gives(x: Tensor, weight: Tensor, programs: int, dy: Tensor) -> dict[str, Tensor]:
        rows = pick(len(x), programs)
        x_hat = x * _rms_norm(x, weight)[1].unsqueeze(-1)
        return {"dweight": (dy * x_hat)[rows].sum(0)}

    return gives


def _no_atomics(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    if not any(launch.atomic_bytes for launch in launches):
        return None
    return "atomics", (
        "with atomics: which program comes first changes from run to run, and with the order of the additions the last "
        "digits of dweight. Where could each program keep a sum that nobody else touches?"
    )


BACKWARD = KernelExercise(
    id="norms.backward",
    title="The gradients, with dweight but without locks",
    notebook=NOTEBOOK,
    function="rms_norm_trained",
    label=Label(4, 40, "a gradient that sums over all rows: partial sums, and what idle programs owe"),
    hints=(
        "dx needs one row, dweight needs all of them. If 4 programs share 64 rows, how many rows of partial sums must "
        "meet memory? And if they share 3?",
        "Stretching a row changes none of its normalised numbers, so the part of the gradient that lies along x_hat "
        "must go: one sum a row. For dweight each program keeps a block of float32 sums in registers while it walks over "
        "its rows, and stores it once, into a row of its own.",
        "Before the loop: load weight, begin the sums at 0. For each row: x_hat is x times rstd, g is dy times weight; dx is "
        "rstd times (g minus x_hat times the mean of g times x_hat); the sums grow by dy times x_hat. After the loop: "
        "store them at this program's row of partial. The second kernel adds its columns over the P rows.",
    ),
    cases=_backward_cases,
    reference=_trained,
    gradients=2,
    traffic=Traffic(reads=4.15, writes=2.15, launches=3),  # forward: x, weight, y; backward: x, dy, dx; sums
    launch_rule=_no_atomics,
    misconceptions=(
        Misconception(
            "forward-first",
            "it is y that is wrong, before any gradient: norms.rms_norm must pass first.",
            when=lambda evidence: evidence.output == "y",
        ),
        Misconception(
            "missing-row-sum",
            "this is how each x moves its own y. It also moves rstd, and so every other y of its row. By how much in all?",
            gives=_gradients(dx=lambda x_hat, rstd, weight, dy: rstd * dy * weight),
        ),
        Misconception(
            "weight-forgotten",
            "this dx would be right if weight were 1. What multiplied x_hat on the way to y?",
            gives=_gradients(dx=lambda x_hat, rstd, weight, dy: rstd * (dy - x_hat * _mean(dy * x_hat))),
        ),
        Misconception(
            "sum-not-mean",
            "the sum over the row is not divided by N. Where does 1 / N come from in rstd?",
            gives=_gradients(
                dx=lambda x_hat, rstd, weight, dy: (
                    rstd * (dy * weight - x_hat * (dy * weight * x_hat).sum(-1, keepdim=True))
                )
            ),
        ),
        Misconception(
            "layer-norm-gradient",
            "the mean of g was taken off as well. That belongs to LayerNorm, which takes the mean off x.",
            gives=_gradients(
                dx=lambda x_hat, rstd, weight, dy: (
                    rstd * (dy * weight - _mean(dy * weight) - x_hat * _mean(dy * weight * x_hat))
                )
            ),
        ),
        Misconception(
            "no-rstd",
            "every row of dx lacks a factor of its own. y is x times rstd: what multiplies a small change of x?",
            gives=_gradients(dx=lambda x_hat, rstd, weight, dy: dy * weight - x_hat * _mean(dy * weight * x_hat)),
        ),
        Misconception(
            "weight-in-dweight",
            "dx is right. In dweight each column is off by its weight: how does y change when weight does?",
            gives=_gradients(dweight=lambda x_hat, rstd, weight, dy: (dy * weight * x_hat).sum(0)),
        ),
        Misconception(
            "not-normalised",
            "dx is right. dweight is made of x itself. What did weight multiply in the forward pass?",
            gives=_gradients(dweight=lambda x_hat, rstd, weight, dy: (dy * x_hat / rstd).sum(0)),
        ),
        Misconception(
            "bias-gradient",
            "this is the sum of dy, the gradient of a bias. What did weight multiply?",
            gives=_gradients(dweight=lambda x_hat, rstd, weight, dy: dy.sum(0)),
        ),
        Misconception(
            "last-row-only",
            "dweight holds only the last row of each program. What happens to the sum when the next row comes?",
            gives=_of_rows(lambda M, programs: slice(max(0, M - programs), M)),
        ),
        Misconception(
            "one-partial",
            "dweight holds only what program 0 has added up. How many rows has partial?",
            gives=_of_rows(lambda M, programs: slice(0, M, programs)),
        ),
        Misconception(
            "idle-programs",
            "it goes wrong exactly where there are more programs than rows. What lies in the row of partial of a program "
            "that had nothing to do, and who put it there?",
            when=lambda evidence: evidence.kind == "nan" and evidence.output == "dweight" and evidence.tag("few-rows"),
        ),
        Misconception(
            "rows-left-over",
            "rows of dx stay unwritten exactly where M is not a multiple of the number of programs. Who takes the remainder?",
            when=lambda evidence: evidence.kind == "nan" and evidence.output == "dx",
        ),
        Misconception(
            "race", "each program needs a place of its own for its sums: which row of partial is nobody else's?"
        ),
        Misconception(
            "traffic",
            "x and dy come in once, and both gradients can be made of them then; weight and the sums can stay in "
            "registers from row to row",
        ),
        Misconception("launches", "one launch makes dx and the partial sums, one adds those up"),
    ),
    wrong=(
        _b("no-row-sum", "(g - x_hat * (tl.sum(g * x_hat, axis=0) / N))", "g", "missing-row-sum"),
        _b("no-weight", "g = dy * weight", "g = dy", "weight-forgotten"),
        _b("no-division", "axis=0) / N))", "axis=0)))", "sum-not-mean"),
        _b("takes-the-mean-off", "rstd * (g -", "rstd * (g - tl.sum(g, axis=0) / N -", "layer-norm-gradient"),
        _b("no-rstd", "dx = rstd * (", "dx = (", "no-rstd"),
        _b("weighted-dweight", "dweight += dy * x_hat", "dweight += g * x_hat", "weight-in-dweight"),
        _b("dweight-of-x", "dweight += dy * x_hat", "dweight += dy * x", "not-normalised"),
        _b("sum-of-dy", "dweight += dy * x_hat", "dweight += dy", "bias-gradient"),
        _b("forgets-the-rows-before", "dweight += dy * x_hat", "dweight = dy * x_hat", "last-row-only"),
        Variant("adds-one-partial", ((_B_TOTAL, "    for p in range(1):\n"),), diagnosis="one-partial"),
        Variant(
            "stores-in-the-loop",
            (
                (_B_ADD, _B_ADD + "        tl.store(partial_ptr + pid * N + offs_n, dweight, mask=mask_n)\n"),
                (_B_PARTIAL, ""),
            ),
            diagnosis="idle-programs",
        ),
        Variant(
            "drops-the-remainder",
            (
                (
                    _B_FOR,
                    "    share = M // tl.num_programs(0)\n"
                    "    for start in tl.range(pid * share, pid * share + share):\n"
                    "        row = tl.cast(start, tl.int64)\n",
                ),
            ),
            diagnosis="rows-left-over",
        ),
        Variant(
            "atomics",
            (
                (_B_PARTIAL, "    tl.atomic_add(partial_ptr + offs_n, dweight, mask=mask_n)\n"),
                (_B_HOST, "    partial = torch.zeros((1, N), dtype=torch.float32, device=x.device)\n"),
                (_B_SUM, _B_SUM.replace("programs, N", "1, N")),
            ),
            diagnosis="atomics",
        ),
        Variant(
            "all-in-one-row",
            (
                (
                    _B_PARTIAL,
                    "    dweight += tl.load(partial_ptr + offs_n, mask=mask_n, other=0.0)\n"
                    "    tl.store(partial_ptr + offs_n, dweight, mask=mask_n)\n",
                ),
                (_B_HOST, "    partial = torch.zeros((1, N), dtype=torch.float32, device=x.device)\n"),
                (_B_SUM, _B_SUM.replace("programs, N", "1, N")),
            ),
            diagnosis="race",
        ),
        _b(
            "weight-for-each-row",
            "g = dy * weight",
            "g = dy * tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)",
            "traffic",
        ),
        Variant(
            "sums-in-memory",
            (
                (
                    _B_ADD,
                    "        sums = tl.load(partial_ptr + pid * N + offs_n, mask=mask_n, other=0.0)\n"
                    "        tl.store(partial_ptr + pid * N + offs_n, sums + dy * x_hat, mask=mask_n)\n",
                ),
                (_B_PARTIAL, ""),
                (_B_HOST, _B_HOST.replace("torch.empty", "torch.zeros")),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "dweight-in-torch",
            ((_B_SUM, "    dweight = partial.sum(0).to(weight.dtype)\n"),),
            diagnosis="not-your-kernel",
        ),
        Variant(
            "autograd-of-torch",
            (
                (
                    "    return RmsNormFunction.apply(x, weight, programs)\n",
                    "    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)\n",
                ),
            ),
            diagnosis="not-your-kernel",
        ),
        Variant(
            "a-launch-for-each-column-block",
            (
                (
                    _B_SUM,
                    "    for i in range(0, N, 64):\n"
                    "        sum_rows_kernel[(1,)](partial[:, i:], dweight[i:], programs, N, BLOCK_N=64)\n",
                ),
                (
                    "total += tl.load(partial_ptr + p * N + offs_n, mask=offs_n < N, other=0.0)",
                    "total += tl.load(partial_ptr + p * N + offs_n, mask=offs_n < N % 64, other=0.0)",
                ),
                ("dweight_ptr + offs_n, total, mask=offs_n < N)", "dweight_ptr + offs_n, total, mask=offs_n < N % 64)"),
            ),
            diagnosis="nan",
        ),
    ),
    right=(
        Variant(
            "a-run-of-rows-each",
            (
                (
                    _B_FOR,
                    "    share = tl.cdiv(M, tl.num_programs(0))\n"
                    "    for start in tl.range(pid * share, tl.minimum(pid * share + share, M)):\n"
                    "        row = tl.cast(start, tl.int64)\n",
                ),
                (
                    _B_DX,
                    "        x_hat = x * rstd\n"
                    "        g = dy * weight\n"
                    "        dx = rstd * g - x * rstd * rstd * rstd * (tl.sum(g * x, axis=0) / N)\n",
                ),
            ),
        ),
        Variant(
            "two-rows-at-a-time",
            (
                (
                    "    dweight = tl.zeros([BLOCK_N], tl.float32)\n" + _B_FOR,
                    "    dweight = tl.zeros([2, BLOCK_N], tl.float32)\n"
                    "    for start in tl.range(2 * pid, M, 2 * tl.num_programs(0)):\n"
                    "        row = (start + tl.arange(0, 2))[:, None].to(tl.int64)\n"
                    "        both = (row < M) & mask_n[None, :]\n",
                ),
                (
                    "        x = tl.load(x_ptr + row * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)\n"
                    "        dy = tl.load(dy_ptr + row * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)\n"
                    "        rstd = tl.load(rstd_ptr + row)\n",
                    "        x = tl.load(x_ptr + row * N + offs_n[None, :], mask=both, other=0.0).to(tl.float32)\n"
                    "        dy = tl.load(dy_ptr + row * N + offs_n[None, :], mask=both, other=0.0).to(tl.float32)\n"
                    "        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)\n",
                ),
                (
                    _B_DX + _B_STORE,
                    (_B_DX + _B_STORE)
                    .replace("g * x_hat, axis=0)", "g * x_hat, axis=1, keep_dims=True)")
                    .replace("offs_n, dx, mask=mask_n", "offs_n[None, :], dx, mask=both"),
                ),
                (_B_PARTIAL, _B_PARTIAL.replace("dweight, mask", "tl.sum(dweight, axis=0), mask")),
                (
                    "    for p in range(P):\n"
                    "        total += tl.load(partial_ptr + p * N + offs_n, mask=offs_n < N, other=0.0)\n",
                    "    for p in range(0, P, 4):\n"
                    "        offs_p = p + tl.arange(0, 4)[:, None]\n"
                    "        inside = (offs_p < P) & (offs_n[None, :] < N)\n"
                    "        part = tl.load(partial_ptr + offs_p * N + offs_n[None, :], mask=inside, other=0.0)\n"
                    "        total += tl.sum(part, axis=0)\n",
                ),
            ),
        ),
    ),
)


# -------------------------------------------------------------------------------------------------- norms.residual
_R_ROUND = (
    "    # The next block gets u as it is rounded; y is to be the norm of that u.\n"
    "    u = u.to(u_ptr.dtype.element_ty).to(tl.float32)\n"
)
_R_STORE_U = "    tl.store(u_ptr + offs, u, mask=mask_n)\n"
_R_RSTD = "    rstd = tl.rsqrt(tl.sum(u * u, axis=0) / N + eps)\n    tl.store(rstd_ptr + row, rstd)\n"
_R_STORE_Y = "    tl.store(y_ptr + offs, u * rstd * weight, mask=mask_n)\n"
_R_U = (
    "    u = tl.load(u_ptr + offs, mask=mask_n, other=0.0).to(tl.float32)\n"
    "    weight = tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)\n"
    "    rstd = tl.load(rstd_ptr + row)\n"
)
_R_DX = (
    "    u_hat = u * rstd\n    g = dy * weight\n"
    "    dx = rstd * (g - u_hat * (tl.sum(g * u_hat, axis=0) / N)) + du\n"
    "    tl.store(dx_ptr + offs, dx, mask=mask_n)\n"
)
_R_CALL = "    y, u, rstd = residual_rms_norm(x, residual, weight)\n"
_R_EMPTY = "    y, u = torch.empty_like(x), torch.empty_like(x)\n"
_R_LAUNCH = "        x, residual, weight, y, u, rstd, N, eps, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N)\n"
_R_BACK = (
    "    residual_rms_norm_backward_kernel[(M,)](\n"
    "        dy, du, u, weight, rstd, dx, N, BLOCK_N=BLOCK_N, num_warps=num_warps_for(BLOCK_N)\n    )\n"
)


def _r(name: str, old: str, new: str, diagnosis: str | None) -> Variant:
    assert old in _R_DX, old
    return Variant(name, ((_R_DX, _R_DX.replace(old, new)),), diagnosis=diagnosis)


def _dx(formula: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What dx is as a formula of u_hat, rstd, weight, dy and du."""

    def gives(x: Tensor, residual: Tensor, weight: Tensor, dy: Tensor, du: Tensor) -> dict[str, Tensor]:
        u = x + residual
        rstd = _rms_norm(u, weight)[1].unsqueeze(-1)
        return {"y[2]": formula(u * rstd, rstd, weight, dy, du)}

    return gives


def _along(u_hat: Tensor, g: Tensor) -> Tensor:
    return u_hat * _mean(g * u_hat)


RESIDUAL = KernelExercise(
    id="norms.residual",
    title="A block's sum and its norm in one pass, and back",
    notebook=NOTEBOOK,
    function="residual_rms_norm_both_ways",
    returns=("y", "u", "dx"),
    label=Label(3, 30, "two results of one pass; a tensor that is used twice has two gradients"),
    hints=(
        "u goes two ways: through the norm to y, and past it into the rest of the model. dy and du are what comes back on "
        "either. How do the gradients of two ways add up, and which of them passes the norm?",
        "Forward: the sum is there in registers, so storing it costs one write and no read. Backward: the norm's gradient "
        "of dy, made from u and rstd as in norms.backward, and du added to that, untouched. x and residual enter u with "
        "factor 1 each.",
        "Forward: load both and add them in float32; store that as u, then its norm times weight as y, and rstd. "
        "Backward: load dy, du and u; u_hat and g as x_hat and g before; dx is rstd times (g minus u_hat times the mean "
        "of their product), plus du.",
    ),
    cases=_residual_cases,
    reference=_both_ways,
    traffic=Traffic(reads=7, writes=3, launches=2),  # weight is loaded for each row in either kernel
    misconceptions=(
        Misconception(
            "norm-of-x",
            "y is the norm of x alone. What goes through the norm, and on to the next block: x, or the sum?",
            gives=lambda x, residual, weight, dy, du: {"y[0]": _rms_norm(x, weight)[0]},
        ),
        Misconception(
            "u-is-x",
            "y is right, and u holds one of its summands. What does the next block add to?",
            gives=lambda x, residual, weight, dy, du: {"y[0]": _rms_norm(x + residual, weight)[0], "y[1]": residual},
        ),
        Misconception(
            "u-normalised",
            "y is right, and u holds the normalised sum. The way past the norm is there so that nothing scales it: what "
            "should it carry?",
            gives=lambda x, residual, weight, dy, du: {"y[1]": _rms_norm(x + residual, weight.new_ones(()))[0]},
        ),
        Misconception(
            "u-missing",
            "y is right, and u was never written. The next block begins with it.",
            when=_missing("y[1]"),
        ),
        Misconception(
            "du-forgotten",
            "y and u are right. dx holds what comes back through the norm alone: which other way does u take?",
            gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * (dy * weight - _along(u_hat, dy * weight))),
        ),
        Misconception(
            "du-through-norm",
            "y and u are right. du was sent through the norm together with dy. Where does u branch off: before the norm, "
            "or behind it?",
            gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * (dy * weight + du - _along(u_hat, dy * weight + du))),
        ),
        Misconception(
            "du-in-dy",
            "y and u are right. du was added to dy, and went through weight and norm. Which of the two ways has a weight?",
            gives=_dx(
                lambda u_hat, rstd, weight, dy, du: rstd * ((dy + du) * weight - _along(u_hat, (dy + du) * weight))
            ),
        ),
        Misconception(
            "du-scaled",
            "y and u are right. du was multiplied by rstd, which belongs to the norm. What scales u on its way past it?",
            gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * (dy * weight - _along(u_hat, dy * weight) + du)),
        ),
        Misconception(
            "missing-row-sum",
            "y and u are right. Each u also moves rstd, and so every other y of its row. By how much in all?",
            gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * dy * weight + du),
        ),
        Misconception(
            "weight-forgotten",
            "y and u are right. This dx would be too if weight were 1. What multiplied the norm on the way to y?",
            gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * (dy - _along(u_hat, dy)) + du),
        ),
        Misconception(
            "traffic",
            "the forward pass has the sum in registers and writes it once: does anybody have to add x and residual again?",
        ),
    ),
    wrong=(
        Variant(
            "norm-of-x",
            (
                ("    u += tl.load(residual_ptr + offs, mask=mask_n, other=0.0).to(tl.float32)\n", ""),
                (
                    _R_STORE_U,
                    "    both = u + tl.load(residual_ptr + offs, mask=mask_n, other=0.0).to(tl.float32)\n"
                    "    tl.store(u_ptr + offs, both, mask=mask_n)\n",
                ),
            ),
            diagnosis="norm-of-x",
        ),
        Variant(
            "hands-on-the-residual",
            (
                (
                    _R_STORE_U,
                    "    tl.store(u_ptr + offs, tl.load(residual_ptr + offs, mask=mask_n), mask=mask_n)\n",
                ),
            ),
            diagnosis="u-is-x",
        ),
        Variant(
            "hands-on-the-normalised",
            ((_R_STORE_U, ""), (_R_STORE_Y, "    tl.store(u_ptr + offs, u * rstd, mask=mask_n)\n" + _R_STORE_Y)),
            diagnosis="u-normalised",
        ),
        Variant("no-u", ((_R_STORE_U, ""),), diagnosis="u-missing"),
        _r("no-du", " / N)) + du", " / N))", "du-forgotten"),
        _r("du-through-the-norm", "g = dy * weight\n", "g = dy * weight + du\n    du = 0.0\n", "du-through-norm"),
        _r("du-with-dy", "g = dy * weight\n", "g = (dy + du) * weight\n    du = 0.0\n", "du-in-dy"),
        _r("du-times-rstd", " / N)) + du", " / N) + du)", "du-scaled"),
        _r("no-row-sum", "(g - u_hat * (tl.sum(g * u_hat, axis=0) / N))", "g", "missing-row-sum"),
        _r("no-weight", "g = dy * weight", "g = dy", "weight-forgotten"),
        _r("no-store-mask", "dx, mask=mask_n)", "dx)", "out-of-bounds"),
        Variant(
            "adds-again",
            (
                (
                    "def residual_rms_norm_backward_kernel(dy_ptr, du_ptr, u_ptr,",
                    "def residual_rms_norm_backward_kernel(dy_ptr, du_ptr, x_ptr, residual_ptr,",
                ),
                (
                    _R_U,
                    _R_U.replace(
                        "tl.load(u_ptr + offs, mask=mask_n, other=0.0)",
                        "tl.load(x_ptr + offs, mask=mask_n, other=0.0)",
                    )
                    + "    u += tl.load(residual_ptr + offs, mask=mask_n, other=0.0)\n",
                ),
                (_R_BACK, _R_BACK.replace("du, u,", "du, x, residual,")),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "writes-over-the-residual",
            (
                (_R_LAUNCH, _R_LAUNCH.replace("y, u,", "y, residual,")),
                (_R_EMPTY, "    y, u = torch.empty_like(x), residual\n"),
            ),
            diagnosis="input-changed",
        ),
        Variant(
            "sum-in-float32",
            ((_R_EMPTY, "    y, u = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)\n"),),
            diagnosis="dtype",
        ),
        Variant(
            "adds-in-torch",
            (
                (_R_CALL, "    y, u, rstd = residual_rms_norm(x + residual, residual, weight)\n"),
                ("    u += tl.load(residual_ptr + offs, mask=mask_n, other=0.0).to(tl.float32)\n", ""),
            ),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant("norm-of-the-unrounded-sum", ((_R_ROUND, ""),)),
        Variant(
            "weight-folded-into-one-sum",
            (
                (
                    _R_DX,
                    "    c = tl.sum(dy * weight * u, axis=0) * rstd * rstd / N\n"
                    "    tl.store(dx_ptr + offs, du + (dy * weight - u * c) * rstd, mask=mask_n)\n",
                ),
            ),
        ),
        Variant(
            "recomputes-rstd",
            (
                (
                    _R_U,
                    _R_U.replace("tl.load(rstd_ptr + row)", "1.0 / tl.sqrt(tl.sum(u * u, axis=0) / N + 1e-6)"),
                ),
                (_R_RSTD, _R_RSTD.replace("    tl.store(rstd_ptr + row, rstd)\n", "")),
            ),
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------ norms.rope
_P_TABLES = (
    "    cos = tl.load(cos_ptr + t * HALF + offs_d, mask=offs_d < HALF, other=0.0).to(tl.float32)\n"
    "    sin = tl.load(sin_ptr + t * HALF + offs_d, mask=offs_d < HALF, other=0.0).to(tl.float32)\n"
)
_P_SIGN = "    if BACKWARDS:\n        sin = -sin\n"
_P_X = "    x_ptrs = x_ptr + b * stride_xb + t * stride_xt + offs_h * stride_xh + offs_d * stride_xd\n"
_P_X2 = "    x2 = tl.load(x_ptrs + HALF * stride_xd, mask=mask, other=0.0).to(tl.float32)\n"
_P_Y = "    y_ptrs = y_ptr + ((b * H + offs_h) * T + t) * (2 * HALF) + offs_d\n"
_P_STORE = (
    "    tl.store(y_ptrs, x1 * cos - x2 * sin, mask=mask)\n"
    "    tl.store(y_ptrs + HALF, x2 * cos + x1 * sin, mask=mask)\n"
)
_P_BACK = "        dx = turn(dy, cos, sin, True)\n"
_P_MASK = "    mask = (offs_h < H) & (offs_d < HALF)\n"


def _as_if_contiguous(x: Tensor, cos: Tensor, sin: Tensor, dy: Tensor) -> Tensor:
    return _rope(x.as_strided(x.shape, _contiguous_strides(x)), cos, sin)


def _contiguous_strides(x: Tensor) -> tuple[int, ...]:
    _, H, T, D = x.shape
    return (H * T * D, T * D, D, 1)


def _stored_like_x(x: Tensor, cos: Tensor, sin: Tensor, dy: Tensor) -> Tensor:
    import torch

    memory = torch.empty(x.numel(), dtype=x.dtype)
    memory.as_strided(x.shape, x.stride()).copy_(_rope(x, cos, sin))
    return memory.view(x.shape)


def _neighbours(x: Tensor, cos: Tensor, sin: Tensor, dy: Tensor) -> Tensor:
    import torch

    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)


def _reflected(x: Tensor, cos: Tensor, sin: Tensor, dy: Tensor) -> Tensor:
    import torch

    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos - x1 * sin), -1)


def _first_half_used_twice(x: Tensor, cos: Tensor, sin: Tensor, dy: Tensor) -> Tensor:
    import torch

    x1, x2 = x.chunk(2, -1)
    x1 = x1 * cos - x2 * sin
    return torch.cat((x1, x2 * cos + x1 * sin), -1)


ROPE = KernelExercise(
    id="norms.rope",
    title="Rotary position embedding, and the turn back",
    notebook=NOTEBOOK,
    function="rope",
    label=Label(3, 30, "strides of four dimensions; a table that many heads share; an inverse for a gradient"),
    hints=(
        "A head of 128 numbers is 64 points in a plane. Which two numbers make point 0? Which angle do all heads of one "
        "token share, and how often must it then be fetched?",
        "Load the token's cosines and sines once, as one row; against a block [heads, half] it broadcasts. The two halves of "
        "the heads are two loads, half a head apart, with x's strides. The gradient of a turn by an angle is the turn by "
        "minus that angle.",
        "Tables at t times HALF; the sine changes its sign for the way back. First half at b, t, head and lane times their "
        "strides, second half HALF elements further. Stores: x1 cos minus x2 sin, and HALF further x2 cos plus x1 sin. "
        "backward: launch on dy with the same tables, backwards.",
    ),
    cases=_rope_cases,
    reference=lambda x, cos, sin: _rope(x, cos, sin),
    gradients=1,
    traffic=Traffic(reads=2.25, writes=2, launches=2),  # eight heads share the tables
    misconceptions=(
        Misconception(
            "direction",
            "each point is turned by its angle, the other way round. The y axis lies ahead of the x axis: what does a "
            "point (1, 0) become?",
            gives=lambda x, cos, sin, dy: {"y": _rope(x, cos, -sin)},
        ),
        Misconception(
            "neighbours",
            "elements 0 and 1 were taken for a point, 2 and 3 for the next, as GPT-J does. Which two does the docstring name?",
            gives=_neighbours,
        ),
        Misconception(
            "reflection",
            "lengths do not survive: both results subtract the sine. A turn has one minus sign. Where?",
            gives=_reflected,
        ),
        Misconception(
            "used-after-change",
            "the first half is right, and the second was made from a first half that had been turned already.",
            gives=_first_half_used_twice,
        ),
        Misconception(
            "contiguous-assumed",
            "these are the numbers of a contiguous tensor that begins at the same place. How far apart do x's strides say "
            "the tokens are?",
            gives=_as_if_contiguous,
        ),
        Misconception(
            "output-strides",
            "every value is right and lies in the wrong place: y was written with the strides of x. How does y lie?",
            gives=_stored_like_x,
        ),
        Misconception(
            "gradient-direction",
            "y is right. dy was turned forwards once more. The gradient of a turn is its transpose: which way does that turn?",
            gives=lambda x, cos, sin, dy: {"dx": _rope(dy, cos, sin)},
        ),
        Misconception(
            "gradient-not-turned",
            "y is right. dx is dy as it came. A turn keeps lengths, not directions.",
            gives=lambda x, cos, sin, dy: {"dx": dy},
        ),
        Misconception(
            "heads-missing",
            "with more than one head, some were never written. A program is responsible for which part of x?",
            when=lambda evidence: evidence.kind == "nan" and evidence.tag("heads"),
        ),
        Misconception(
            "out-of-bounds",
            "an offset is the sum of index times stride, each index with its own: which of them went astray here? The "
            "tables know tokens only.",
        ),
        Misconception(
            "traffic",
            "all heads of a token turn by the same angles: how often does a program have to fetch them?",
        ),
    ),
    wrong=(
        Variant(
            "turns-the-other-way", ((_P_SIGN, "    if not BACKWARDS:\n        sin = -sin\n"),), diagnosis="direction"
        ),
        Variant(
            "pairs-of-neighbours",
            (
                (_P_X, _P_X.replace("offs_d * stride_xd", "2 * offs_d * stride_xd")),
                (_P_X2, _P_X2.replace("HALF * ", "")),
                (_P_Y, _P_Y.replace("+ offs_d", "+ 2 * offs_d")),
                (_P_STORE, _P_STORE.replace("y_ptrs + HALF", "y_ptrs + 1")),
            ),
            diagnosis="neighbours",
        ),
        Variant("two-minus-signs", ((_P_STORE, _P_STORE.replace("+ x1 * sin", "- x1 * sin")),), diagnosis="reflection"),
        Variant(
            "turns-the-first-half-first",
            (
                (
                    _P_STORE,
                    "    x1 = x1 * cos - x2 * sin\n    tl.store(y_ptrs, x1, mask=mask)\n"
                    "    tl.store(y_ptrs + HALF, x2 * cos + x1 * sin, mask=mask)\n",
                ),
            ),
            diagnosis="used-after-change",
        ),
        Variant(
            "assumes-contiguous",
            (
                (_P_X, "    x_ptrs = x_ptr + ((b * H + offs_h) * T + t) * (2 * HALF) + offs_d\n"),
                (_P_X2, _P_X2.replace(" * stride_xd", "")),
            ),
            diagnosis="contiguous-assumed",
        ),
        Variant(
            "stores-with-strides-of-x",
            ((_P_Y, _P_X.replace("x_ptrs = x_ptr", "y_ptrs = y_ptr")),),
            diagnosis="output-strides",
        ),
        Variant("forwards-twice", ((_P_BACK, _P_BACK.replace("True", "False")),), diagnosis="gradient-direction"),
        Variant("ignores-backwards", ((_P_SIGN, ""),), diagnosis="gradient-direction"),
        Variant(
            "first-head-only", ((_P_MASK, _P_MASK.replace("offs_h < H", "offs_h < 1")),), diagnosis="heads-missing"
        ),
        Variant(
            "table-row-of-the-program",
            ((_P_TABLES, _P_TABLES.replace("t * HALF", "tl.program_id(0) * HALF")),),
            diagnosis="out-of-bounds",
        ),
        Variant(
            "no-mask-in-the-half",
            ((_P_MASK, "    mask = (offs_h < H) & (offs_d < BLOCK_D)\n"),),
            diagnosis="out-of-bounds",
        ),
        Variant(
            "tables-for-each-head",
            ((_P_TABLES, _P_TABLES.replace("+ offs_d, mask=offs_d < HALF", "+ offs_d + 0 * offs_h, mask=mask")),),
            diagnosis="traffic",
        ),
        Variant(
            "copies-first",
            (
                (
                    "    B, H, T, D = x.shape\n    y = torch.empty((B, H, T, D)",
                    "    x = x.clone()\n    B, H, T, D = x.shape\n    y = torch.empty((B, H, T, D)",
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "makes-it-contiguous-first",
            (
                (
                    "    B, H, T, D = x.shape\n    y = torch.empty((B, H, T, D)",
                    "    x = x.contiguous()\n    B, H, T, D = x.shape\n    y = torch.empty((B, H, T, D)",
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "turns-in-torch",
            (
                (
                    _P_BACK,
                    "        d1, d2 = dy.chunk(2, -1)\n        dx = torch.cat((d1 * cos + d2 * sin, d2 * cos - d1 * sin), -1).to(dy.dtype)\n",
                ),
            ),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "a-head-at-a-time",
            (
                (
                    _P_MASK + _P_TABLES,
                    "    d = tl.arange(0, BLOCK_D)\n    inside = d < HALF\n"
                    "    cos = tl.load(cos_ptr + t * HALF + d, inside, 0.0).to(tl.float32)\n"
                    "    sin = tl.load(sin_ptr + t * HALF + d, inside, 0.0).to(tl.float32)\n",
                ),
                (_P_SIGN, "    sin = tl.where(BACKWARDS, -sin, sin)\n    for h in range(H):\n"),
                (_P_X, "        x_ptrs = x_ptr + b * stride_xb + t * stride_xt + h * stride_xh + d * stride_xd\n"),
                (
                    "    x1 = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)\n" + _P_X2,
                    "        x1 = tl.load(x_ptrs, inside, 0.0).to(tl.float32)\n"
                    "        x2 = tl.load(x_ptrs + HALF * stride_xd, inside, 0.0).to(tl.float32)\n",
                ),
                (
                    _P_Y + _P_STORE,
                    "        y_ptrs = y_ptr + ((b * H + h) * T + t) * 2 * HALF + d\n"
                    "        tl.store(y_ptrs, x1 * cos - x2 * sin, inside)\n"
                    "        tl.store(y_ptrs + HALF, x1 * sin + x2 * cos, inside)\n",
                ),
            ),
        ),
        Variant(
            "a-sign-and-two-directions-of-one-formula",
            (
                (_P_SIGN, "    sin *= 1 - 2 * BACKWARDS\n"),
                (
                    _P_STORE,
                    "    first = x1 * cos\n    first -= x2 * sin\n"
                    "    second = x1 * sin\n    second += x2 * cos\n"
                    "    tl.store(y_ptrs + HALF, second, mask)\n    tl.store(y_ptrs, first, mask)\n",
                ),
            ),
        ),
    ),
)

EXERCISES = [RMS_NORM, DETECTIVE, WELFORD, BACKWARD, RESIDUAL, ROPE]
