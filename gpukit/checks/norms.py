"""The exercises of notebook 11: cases, bounds, and what each wrong idea computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading import compare, ideas
from gpukit.grading.exercise import Case, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only, padding
from gpukit.grading.inputs import Inputs, far, listed, nbytes, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence, Outcome
    from gpukit.grading.messages import LaunchFacts

RMS_EPS = 1e-6
LAYER_EPS = 1e-5


# --------------------------------------------------------------------------------------- what the exercises compute
def _wide(x: Tensor) -> Tensor:
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))


def _mean(terms: Tensor) -> Tensor:
    return terms.mean(-1, keepdim=True)


def _rms_norm(x: Tensor, weight: Tensor, eps: float = RMS_EPS) -> tuple[Tensor, Tensor]:
    """With rstd, which the exercise keeps for the backward pass."""
    y = ideas.reference("norms.rms_norm")(x, weight, eps)
    return y, (_mean(_wide(x).square()) + eps).rsqrt().squeeze(-1)


def _normalized(x: Tensor, eps: float = LAYER_EPS) -> Tensor:
    wide = _wide(x)
    centered = wide - _mean(wide)
    return centered * (_mean(centered.square()) + eps).rsqrt()


def _layer_norm_long(x: Tensor, BLOCK_N: int, eps: float = LAYER_EPS) -> Tensor:
    """Unlike gpukit.reference's without weight and bias."""
    return _normalized(x, eps).to(x.dtype)


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
_case = partial(tensor_case, tail=True)


class _Inputs(Inputs):
    def far(self, *shape: int, mean: float) -> Tensor:
        """float16, a thousand times as far from 0 as spread about it: float32 has the digits that its result needs, and a
        variance made of large squares has not."""
        return (self.normal(*shape) * 0.7 + mean).half()

    def pairs(self, M: int, times: int = 1) -> Tensor:
        """float32 rows of two numbers around 1024, both `times` times, a power of 2. Their mean, and their distances from it, have so
        few digits that float32 holds them in whatever order they are computed, PyTorch's too. Their squares have more: who
        takes the variance from squares that were rounded to float32 is wrong, also where the sums are in float64."""
        return ((self.normal(M, 2) * 64).round() / 64 + 1024).repeat(1, times)

    def about_zero(self, n: int) -> Tensor:
        """The hard rows in float32 whose mean is near 0, and one whose numbers are all alike. Far from 0 a mean in float32 has
        an error of its own, which PyTorch's may escape by chance: such rows are in 16 bits. So is the one of threes, whose sum
        a GPU does not divide by n to 3 exactly, and the one that begins with an outlier, from which some take the distances of
        all others."""
        x = self.rows(n)[[0, 1, 5, 6, 7, 10, 11]]
        x[1] = 2.0**-10  # two units of rounding of this mean are far less than the root of eps
        return x

    def cancelling(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, weight and dy in float16; of each two rows the normalized x is nearly the same, and dy nearly the opposite."""
        x, dy = self.normal(20, 48), self.normal(20, 48)
        x[1::2] = x[::2] * 1.37
        dy[::2] += 1000
        dy[1::2] -= 1000
        return x.half(), self.normal(48).half(), dy.half()

    def vector(self, x: Tensor) -> Tensor:
        """As long as a row of x, as a weight is."""
        return self.like(x, x.shape[-1])


def _rms_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal, rows = make.normal, make.rows

    def case(x: Tensor, eps: float = RMS_EPS, note: str = "") -> Case:
        tags = "large" if note else "once"
        tags += " eps" * (eps != RMS_EPS)
        return _case(x, make.vector(x), eps, tags=tags, note=listed(note, f"eps {eps:g}" if eps != RMS_EPS else ""))

    return [
        case(normal(1, 1) + 3),
        case(make.about_zero(97), note="hard rows"),
        case(rows(130, "float16"), note="hard rows"),
        case(rows(64, "bfloat16"), note="hard rows"),
        case(normal(2, 1024, dtype="float16")),
        case(normal(2, 1000, dtype="bfloat16")),
        case(normal(2, 1025)),
        case(normal(5, 781), eps=0.1),
        _case(normal(2, 40), make.torch.zeros(40), RMS_EPS, tags="zeros", note="weights of 0"),
        _case(make.stained(normal(4, 50)), make.normal(50), RMS_EPS, tags="special", note="with a NaN"),
    ]


def _layer_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal, rows = make.normal, make.rows

    def case(x: Tensor, *eps: float, tags: str = "", note: str = "") -> Case:
        note = listed(note, *(f"eps {value:g}" for value in eps))
        return _case(x, make.vector(x), make.vector(x), *eps, tags=f"{tags} {'eps' * len(eps)}", note=note)

    return [
        case(normal(1, 1) + 3),
        case(normal(3, 64)),
        case(make.about_zero(96), note="hard rows"),
        case(normal(2, 1024, dtype="float16"), tags="once"),
        case(normal(32, 7, dtype="bfloat16"), tags="once"),
        case(normal(5, 781) + 1, 0.1),
        case(rows(97, "float16"), tags="far large", note="hard rows"),
        case(rows(128, "bfloat16"), tags="far large", note="hard rows"),
        case(make.far(4, 256, mean=1000), tags="far large", note="around 1000"),
        case(make.far(4, 300, mean=-900), tags="far large", note="around -900"),
        case(_outlier(normal(2, 512), 1), tags="outlier", note="the first one far above the others"),
        case(make.pairs(16), tags="far", note="two numbers around 1024, of few digits"),
        case(make.stained(normal(4, 50)), tags="special", note="with a NaN"),
    ]


def _outlier(x: Tensor, n: int) -> Tensor:
    """The first n elements of each row far above the others. What is shifted by one of them, or by their mean, is large, and a
    difference of its squares has no digits."""
    x[:, :n] += 3000
    return x


def _welford_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal, rows = make.normal, make.rows
    steps = make.torch.arange(512.0) // 64

    def case(x: Tensor, BLOCK_N: int, *eps: float, tags: str = "", note: str = "") -> Case:
        tags += f"{' long' * (x.shape[-1] > BLOCK_N)}{' partial' * (x.shape[-1] % BLOCK_N > 0)}"
        note = listed(f"BLOCK_N {BLOCK_N}", note, *(f"eps {value:g}" for value in eps))
        return _case(x, BLOCK_N, *eps, tags=f"{tags} {'eps' * len(eps)}", note=note)

    # Of rows of 96, in blocks of 32 or 64, the one that is all alike has an exact mean, however it is computed.
    return [
        case(normal(1, 1) + 3, 64),
        case(normal(3, 64), 64),
        case(make.about_zero(96), 32, note="hard rows"),
        case(rows(96, "float16"), 64, tags="far large", note="hard rows"),
        case(rows(96, "bfloat16"), 128, tags="far large", note="hard rows"),
        case(normal(3, 512) + 3 * steps, 64, tags="drift", note="rising by 3 a block"),
        case(normal(2, 1025, dtype="float16") + 2, 256, tags="once", note="one element in the last block"),
        case(normal(3, 811, dtype="bfloat16") + 4 * (make.torch.arange(811) // 512), 512, tags="once"),
        case(normal(24, 7, dtype="bfloat16"), 4, tags="once"),
        case(normal(3, 781, dtype="float16") - 1, 128, 0.1),
        case(normal(1, 3001) + 2, 4096, note="more elements than float16 can count"),
        case(make.far(4, 512, mean=1000), 128, tags="far large", note="around 1000"),
        case(_outlier(normal(2, 2048), 1), 256, tags="outlier", note="the first one far above the others"),
        case(_outlier(normal(2, 2048), 32), 32, tags="outlier", note="the first block far above the others"),
        case(make.pairs(16, 2), 2, tags="far", note="blocks of two numbers around 1024, all alike and of few digits"),
        # 65,536 elements before a block of 32,768: the product of the two is no int32.
        case(
            normal(1, 3 << 15, dtype="float16") + (make.torch.arange(3 << 15) >> 16),
            1 << 16,
            tags="counts",
            note="two long blocks",
        ),
        case(make.stained(normal(4, 50)), 16, tags="special", note="with a NaN"),
    ]


def _backward_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(x: Tensor, programs: int, upstream: int | None = None, note: str = "", tags: str = "") -> Case:
        """upstream: which of the corners dy is; None: noise"""
        shown, dy = ("", make.like(x)) if upstream is None else make.upstream(x)[upstream]
        rows = "few-rows" if len(x) < programs else "many-rows" if len(x) > programs else ""
        tags += " remainder" * (len(x) % programs > 0) + " strided-dy" * (not dy.is_contiguous())
        note = listed(f"{programs} programs", note, f"dy {shown}" if shown else "")
        return _case(x, make.vector(x), programs, dy, tags=f"{rows} {tags}", note=note)

    normal, rows = make.normal, make.rows
    x, weight, dy = make.cancelling()
    return [
        case(normal(1, 1) * 1e-3, 2, note="around 0.001"),
        case(rows(97), 5, 0, note="hard rows"),
        case(rows(64, "float16"), 4, 1, note="hard rows", tags="large"),
        case(rows(40, "bfloat16"), 3, 2, note="hard rows", tags="large"),
        case(normal(4, 781), 2, 3),
        case(normal(7, 100), 4, 4),
        case(normal(15, 70), 8, 5),
        case(normal(3, 1025), 3),
        case(normal(3, 96), 8, note="more programs than rows"),
        case(normal(21, 9), 20, tags="many-programs"),
        case(normal(301, 5), 300, tags="many-programs", note="more programs than a GPU has SMs"),
        case(normal(9, 30, dtype="float16"), 4, tags="once"),
        case(normal(24, 7, dtype="bfloat16"), 5, tags="once"),
        _case(x, weight, 4, dy, tags="many-rows cancel", note="4 programs, terms of dweight that all but cancel"),
        case(make.stained(normal(5, 40)), 3, note="with a NaN", tags="special"),
    ]


def _residual_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(x: Tensor, note: str = "", tags: str = "") -> Case:
        # Half of the row turned around: of zeros, of tiny, large and equal numbers the sum is such a row again.
        residual = x.flip(-1) if tags == "once" else x.flip(-1) / 2 if note else make.like(x)
        du = 4 * make.apart(*x.shape) if x.numel() < 5 else make.like(x)  # not what the norm's gradient takes away
        return _case(x, residual, make.vector(x), make.like(x), du, tags=tags, note=note)

    def idle() -> Case:
        """Rows without a gradient of y, of u, and of both."""
        x, dy, du = make.normal(4, 50), make.normal(4, 50), make.normal(4, 50)
        dy[1::2], du[2:] = 0, 0
        return _case(x, make.like(x), make.vector(x), dy, du, tags="zeros", note="rows of zeros in dy and in du")

    normal, rows = make.normal, make.rows
    return [
        case(normal(1, 2) + 3),
        idle(),
        case(rows(97), note="hard rows", tags="large"),
        case(rows(64, "float16"), note="hard rows", tags="large"),
        case(rows(130, "bfloat16"), note="hard rows", tags="large"),
        case(normal(5, 781)),
        case(normal(2, 1025)),
        case(normal(2, 1024, dtype="float16")),
        case(normal(2, 1000, dtype="bfloat16")),
        case(make.coarse(16, 8, dtype="float16", bits=6), note="x + residual exact", tags="once"),
        case(make.coarse(24, 10, dtype="bfloat16", bits=6), note="x + residual exact", tags="once"),
        case(make.stained(normal(4, 50)), note="with a NaN", tags="special"),
    ]


def _rope_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def laid_out(x: Tensor, layout: str) -> Tensor:
        if layout == "[B, T, H, D]":  # what a projection gives, seen with its heads first
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        return dict(make.layouts(x), **dict(make.upstream(x))).get(layout, x)

    def case(
        *shape: int, dtype: str = "float32", x: str = "", dy: str = "", scale: float = 1.0, nan: bool = False
    ) -> Case:
        from gpukit.reference.rope import tables

        cos, sin = (table.float() for table in tables(*shape[2:]))
        given = [
            laid_out(make.normal(*shape, dtype=dtype, scale=scale), x),
            laid_out(make.normal(*shape, dtype=dtype), dy),
        ]
        if nan:
            given[0] = make.stained(given[0])
        note = listed(f"around {scale:g}" if scale > 1 else "", f"x {x}" if x else "", f"dy {dy}" if dy else "")
        note = listed(note, "with a NaN" * nan)
        tags = f"leading once{' strided' * bool(x or dy)}{' large' * (scale > 1)}{' heads' * (shape[1] > 1)}{' special' * nan}"
        return _case(given[0], cos, sin, given[1], tags=tags, note=note)

    sparse, gap = "every second element of a row", "with a gap behind each row"
    return [
        case(1, 1, 1, 2),
        case(1, 1, 5, 64),
        case(1, 2, 7, 128, dtype="bfloat16", x="[B, T, H, D]", dy="[B, T, H, D]"),
        case(2, 5, 3, 20, x="[B, T, H, D]", dy="transposed"),
        case(2, 3, 4, 16, x="transposed", dy="of a sum: stride 0"),
        case(1, 4, 6, 62, x=gap, dy="one row expanded"),
        case(1, 3, 4, 32, dtype="float16", dy=gap, scale=1000),
        case(3, 2, 3, 64, x=sparse, dy=sparse),
        case(1, 8, 8, 64, x="[B, T, H, D]", dy="around 5, half of it 0"),
        case(1, 1, 3, 20, nan=True),
    ]


# -------------------------------------------------------------------------------------------------- shared wrong ideas
def _far_from_zero(evidence: Evidence) -> bool:
    """Every row that is wrong lies far from 0, or is all alike: there a difference of large squares has no digits."""
    import torch

    for outcome in evidence.outcomes:
        if outcome.wrong:
            x, yours, right = (t.double() for t in (outcome.case.args[0], outcome.wrong.actual, outcome.wrong.expected))
            allowed = 16 * torch.finfo(outcome.wrong.actual.dtype).eps * right.abs().amax(-1)
            wrong = ~((yours - right).abs().amax(-1) <= allowed)
            near = _mean(x).square() <= 64 * _mean((x - _mean(x)).square())
            if bool((wrong & near[:, 0]).any()):
                return False
    return True


def _overflowing_squares(evidence: Evidence) -> bool:
    """Only cases in 16 bits fail, among them that in float16 with squares beyond it."""
    return only("float16", "bfloat16")(evidence) and any({"float16", "large"} <= case.tags for case in evidence.failed)


def _rounded_rstd(evidence: Evidence) -> bool:
    """Only rstd is wrong, beside tensors in 16 bits, by no more than a rounding to them, and none has more digits than they have."""
    wrong = [outcome for outcome in evidence.outcomes if outcome.wrong]
    return only("float16", "bfloat16")(evidence) and all(
        (outcome.wrong.output, outcome.wrong.kind) == ("y[1]", "values")
        and bool((outcome.wrong.actual / outcome.wrong.expected - 1).abs().max() < 2**-7)
        and bool((outcome.wrong.actual == outcome.wrong.actual.to(outcome.case.args[0].dtype)).all())
        for outcome in wrong
    )


def _missing(name: str) -> Callable[[Evidence], bool]:
    return lambda evidence: evidence.kind == "nan" and evidence.output == name


def _forward(rstd: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What rms_norm gives where 1 / sqrt(...) is `rstd` of x and eps."""
    return lambda x, weight, eps: {"y[0]": x * rstd(x, eps) * weight, "y[1]": rstd(x, eps).squeeze(-1)}


def _weights(gives: Callable[[Tensor, float], Tensor]) -> Callable[..., Tensor]:
    """What layer_norm gives where the normalized x is `gives` of x and eps."""
    return lambda x, weight, bias, eps=LAYER_EPS: gives(x, eps) * weight + bias


def _layer_norm_and_rstd(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    centered = x - _mean(x)
    return _normalized(x, eps) * weight, (_mean(centered.square()) + eps).rsqrt().squeeze(-1)


# -------------------------------------------------------------------------------------------------- norms.rms_norm
RMS_NORM = KernelExercise(
    id="norms.rms_norm",
    function="rms_norm",
    returns=("y", "rstd"),
    cases=_rms_cases,
    reference=_rms_norm,
    huge=lambda: (far(327680, 16384), far(16384), 1e-6),
    traffic=Traffic(
        reads=lambda x, weight, eps: nbytes(x) + len(x) * nbytes(weight),
        writes=lambda x, weight, eps: nbytes(x) + 4 * len(x),
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("no-weight", gives=ideas.On(lambda x, weight, eps: (x, 0 * weight + 1, eps), _rms_norm)),
        Misconception(
            "weight-per-row",
            gives=lambda x, weight, eps: _rms_norm(x, weight.new_ones(()), eps)[0] * weight[: len(x), None],
        ),
        Misconception(
            "padded-mean",
            gives=_forward(
                lambda x, eps: ((x * x).sum(-1, keepdim=True) / (x.shape[-1] + padding(x.shape[-1])) + eps).rsqrt()
            ),
        ),
        Misconception("sum-not-mean", gives=_forward(lambda x, eps: ((x * x).sum(-1, keepdim=True) + eps).rsqrt())),
        Misconception("eps-outside", gives=_forward(lambda x, eps: 1 / (_mean(x * x).sqrt() + eps))),
        Misconception("eps-outside", gives=_forward(lambda x, eps: _mean(x * x).rsqrt() + eps)),
        Misconception("eps-fixed", when=only("eps")),
        Misconception("no-eps", gives=ideas.On(lambda x, weight, eps: (x, weight, 0.0), _rms_norm)),
        Misconception(
            "eps-in-the-sum", gives=ideas.On(lambda x, weight, eps: (x, weight, eps / x.shape[-1]), _rms_norm)
        ),
        Misconception("centred", gives=_layer_norm_and_rstd),
        Misconception("rstd-in-16-bits", when=_rounded_rstd),
        Misconception("low-precision-squares", when=_overflowing_squares),
        Misconception(
            "multiplied-by-the-root",
            gives=lambda x, weight, eps: {"y[0]": x * (_mean(x * x) + eps).sqrt() * weight},
        ),
        Misconception("rstd-inverted", gives=lambda x, weight, eps: {"y[1]": (_mean(x * x) + eps).sqrt().squeeze(-1)}),
        Misconception("rstd-missing", when=_missing("y[1]")),
    ),
)


# ------------------------------------------------------------------------------------------------- norms.detective
def _padded_variance(x: Tensor, eps: float) -> Tensor:
    mean = _mean(x)
    total = (x - mean).square().sum(-1, keepdim=True) + padding(x.shape[-1]) * mean.square()
    return (x - mean) * (total / x.shape[-1] + eps).rsqrt()


DETECTIVE = KernelExercise(
    id="norms.detective",
    function="layer_norm",
    cases=_layer_cases,
    reference=ideas.reference("norms.layer_norm"),
    huge=lambda: (far(327680, 16384), far(16384), far(16384)),
    traffic=Traffic(
        reads=lambda x, weight, bias, *eps: nbytes(x) + len(x) * nbytes(weight, bias), writes=lambda x, *_: nbytes(x)
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("cancellation", when=_far_from_zero),
        Misconception("cancellation/2", when=only("outlier")),
        Misconception("padding-in-variance", gives=_weights(_padded_variance)),
        Misconception(
            "not-centred",
            gives=_weights(lambda x, eps: x * ((x - _mean(x)).square().mean(-1, keepdim=True) + eps).rsqrt()),
        ),
        Misconception(
            "sample-variance",
            gives=_weights(
                lambda x, eps: (
                    (x - _mean(x))
                    * ((x - _mean(x)).square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1) + eps).rsqrt()
                )
            ),
        ),
        Misconception(
            "sample-variance",
            gives=_weights(lambda x, eps: (x - _mean(x)) * (x.var(-1, keepdim=True) + eps).rsqrt()),
        ),
        Misconception(
            "eps-outside",
            gives=_weights(
                lambda x, eps: (x - _mean(x)) / ((x - _mean(x)).square().mean(-1, keepdim=True).sqrt() + eps)
            ),
        ),
    ),
)


# --------------------------------------------------------------------------------------------------- norms.welford
def _eps_over_n(x: Tensor, BLOCK_N: int, eps: float = LAYER_EPS) -> tuple:
    return x, BLOCK_N, eps / x.shape[-1]


def _merged(
    step: Callable[..., tuple[Any, Any]],
    keep: Callable[[int, int], bool] = lambda here, BLOCK_N: True,
    less: int = 0,
):
    """What the two passes give where a block changes (mean, m2) by `step` of them, start, the block and BLOCK_N.
    The variance is m2 over N - less."""

    def gives(x: Tensor, BLOCK_N: int, eps: float = LAYER_EPS) -> Tensor:
        mean = m2 = x.new_zeros(len(x), 1)
        start = 0
        for block in x.split(BLOCK_N, -1):
            if keep(block.shape[-1], BLOCK_N):
                mean, m2 = step(mean, m2, start, block, BLOCK_N)
            start += block.shape[-1]
        return (x - mean) * (m2 / x.new_tensor(start - less) + eps).rsqrt()

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


def _share_of_the_row(x: Tensor, BLOCK_N: int, eps: float = LAYER_EPS) -> Tensor:
    def step(mean, m2, start, block, BLOCK_N):
        share, delta = block.shape[-1] / x.shape[-1], _mean(block) - mean
        return mean + delta * share, m2 + _spread(block) + delta.square() * start * share

    return _merged(step)(x, BLOCK_N, eps)


def _count_moved_first(mean, m2, start, block, BLOCK_N):
    return _right(mean, m2, start, block, BLOCK_N)[0], m2 + _spread(block) + (
        _mean(block) - mean
    ).square() * block.shape[-1]


def _padding_spreads(mean, m2, start, block, BLOCK_N):
    lanes = BLOCK_N - block.shape[-1]
    mean, m2 = _right(mean, m2, start, block, BLOCK_N)
    return mean, m2 + lanes * _mean(block).square()


WELFORD = KernelExercise(
    id="norms.welford",
    function="layer_norm_long",
    cases=_welford_cases,
    reference=_layer_norm_long,
    huge=lambda: (far(81920, 65536), 8192, 1e-5),
    traffic=Traffic(reads=lambda x, *_: 2 * nbytes(x) + 32 * len(x), writes=1),  # and a number or two for each row
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception(
            "block-alone",
            gives=lambda x, BLOCK_N, eps=LAYER_EPS: ideas.each_block(lambda block: _normalized(block, eps), x, BLOCK_N),
        ),
        Misconception("block-weight/2", gives=_merged(_mean_of_means)),
        Misconception("between-blocks", gives=_merged(_within_only)),
        Misconception("delta-weight", gives=_merged(_unweighted_delta)),
        Misconception("share-of-the-row", gives=_share_of_the_row),
        Misconception("mean-moved-first", gives=_merged(_mean_moved_first)),
        Misconception("count-moved-first", gives=_merged(_count_moved_first)),
        Misconception("sample-variance", gives=_merged(_right, less=1)),
        Misconception("block-weight", gives=_merged(_full_blocks)),
        Misconception("padding-in-variance", gives=_merged(_padding_spreads)),
        Misconception("tail-block", gives=_merged(_right, keep=lambda here, BLOCK_N: here == BLOCK_N)),
        Misconception("tail-block/2", when=lambda evidence: evidence.kind == "nan" and evidence.tag("partial")),
        Misconception("count-in-32-bits", when=only("counts")),
        Misconception("eps-fixed", when=only("eps")),
        Misconception("eps-in-the-sum", gives=ideas.On(_eps_over_n, _layer_norm_long)),
        Misconception("cancellation", when=_far_from_zero),
        Misconception("cancellation/2", when=only("outlier")),
    ),
)


# -------------------------------------------------------------------------------------------------- norms.backward
def _gradients(**formulas: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What a backward pass gives whose dx or dweight is a formula of x_hat, rstd, weight and dy."""

    def gives(x: Tensor, weight: Tensor, programs: int, dy: Tensor) -> dict[str, Tensor]:
        rstd = _rms_norm(x, weight)[1].unsqueeze(-1)
        return {name: formula(x * rstd, rstd, weight, dy) for name, formula in formulas.items()}

    return gives


def _along(x_hat: Tensor, g: Tensor, padded: bool = False) -> Tensor:
    """The part of g that lies along x_hat; `padded`: divided by the lanes of the block."""
    N = x_hat.shape[-1]
    return x_hat * (g * x_hat).sum(-1, keepdim=True) / (N + padding(N) * padded)


def _gradients_wrong_in_every_case(evidence: Evidence) -> bool:
    """y is right, and nowhere is dx or dweight: both are computed from rstd."""
    right = _gradients(
        dx=lambda x_hat, rstd, weight, dy: rstd * (dy * weight - _along(x_hat, dy * weight)),
        dweight=lambda x_hat, rstd, weight, dy: (dy * x_hat).sum(0),
    )

    def wrong(outcome: Outcome) -> bool:
        outputs = outcome.reply.outputs
        expected = right(*compare.doubled(outcome.case.args))
        near = [bool((outputs[name] - e).abs().max() <= 0.01 * e.abs().max()) for name, e in expected.items()]
        return not any(near)  # what is NaN is near to nothing

    return evidence.output == "dx" and all(wrong(o) for o in evidence.outcomes if "special" not in o.case.tags)


def _adds_to_nothing(evidence: Evidence) -> bool:
    return evidence.kind == "nan" and any(launch.atomic_bytes for launch in evidence.first.reply.launches)


def _of_rows(pick: Callable[[int, int], slice]) -> Callable[..., dict[str, Tensor]]:
    """What dweight is where only some rows count: `pick` of M and the number of programs."""

    def gives(x: Tensor, weight: Tensor, programs: int, dy: Tensor) -> dict[str, Tensor]:
        rows = pick(len(x), programs)
        x_hat = x * _rms_norm(x, weight)[1].unsqueeze(-1)
        return {"dweight": (dy * x_hat)[rows].sum(0)}

    return gives


def _backward_traffic(x: Tensor, weight: Tensor, programs: int, dy: Tensor) -> tuple[int, int]:
    """Reads and writes: forward x, weight and y; backward x, dy, weight and dx; rstd and the sums there and back. A dy with
    strides is copied first, by code that is not the learner's."""
    copied = 0 if dy.is_contiguous() else nbytes(dy)
    between = 4 * len(x) + 4 * programs * len(weight)
    weights = (len(x) + programs) * nbytes(weight)
    return 2 * nbytes(x) + nbytes(dy) + weights + between + copied, 2 * nbytes(x) + between + nbytes(weight) + copied


def _backward_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    """No atomics, and no program with much more than its share of the rows. The second of three launches makes dx."""
    x, _, programs, _ = case.args
    share = -(-len(x) // programs)
    if len(launches) == 3 and launches[1].longest > 4 + 7 * share:
        return "uneven", (
            f"one program does most of the work: {len(x)} rows are {share} for each of {programs} programs at most, "
            f"and the busiest loads and stores {launches[1].longest} times. Who takes what a division leaves over?"
        )
    return _no_atomics(case, launches)


_no_atomics = ideas.no_atomics(
    "with atomics: which program comes first changes from run to run, and with the order of the additions the last "
    "digits of dweight. Where could each program keep a sum that nobody else touches?"
)

BACKWARD = KernelExercise(
    id="norms.backward",
    function="rms_norm_trained",
    cases=_backward_cases,
    reference=ideas.in_float32(ideas.reference("norms.rms_norm", 2)),
    huge=lambda: (far(300000, 16384), far(16384), 512, far(300000, 16384)),
    gradients=2,
    traffic=Traffic(
        reads=lambda *args: _backward_traffic(*args)[0],
        writes=lambda *args: _backward_traffic(*args)[1],
        launches=3,
        saved=lambda x, weight, *_: nbytes(x, weight) + 4 * len(x),
    ),
    launch_rule=_backward_rule,
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("forward-first", when=lambda evidence: evidence.output == "y"),
        Misconception("unset-sums", when=_adds_to_nothing),
        Misconception("some-partials", when=only("many-programs", kind="values")),
        Misconception("missing-row-sum", gives=_gradients(dx=lambda x_hat, rstd, weight, dy: rstd * dy * weight)),
        Misconception(
            "weight-forgotten",
            gives=_gradients(dx=lambda x_hat, rstd, weight, dy: rstd * (dy - x_hat * _mean(dy * x_hat))),
        ),
        Misconception(
            "sum-not-mean",
            gives=_gradients(
                dx=lambda x_hat, rstd, weight, dy: (
                    rstd * (dy * weight - x_hat * (dy * weight * x_hat).sum(-1, keepdim=True))
                )
            ),
        ),
        Misconception(
            "padded-mean",
            gives=_gradients(
                dx=lambda x_hat, rstd, weight, dy: rstd * (dy * weight - _along(x_hat, dy * weight, padded=True))
            ),
        ),
        Misconception(
            "layer-norm-gradient",
            gives=_gradients(
                dx=lambda x_hat, rstd, weight, dy: (
                    rstd * (dy * weight - _mean(dy * weight) - x_hat * _mean(dy * weight * x_hat))
                )
            ),
        ),
        Misconception(
            "weight-in-one-term",
            gives=_gradients(dx=lambda x_hat, rstd, weight, dy: rstd * (dy * weight - x_hat * _mean(dy * x_hat))),
        ),
        Misconception(
            "rstd-in-one-term",
            gives=_gradients(dx=lambda x_hat, rstd, weight, dy: rstd * dy * weight - _along(x_hat, dy * weight)),
        ),
        Misconception(
            "no-rstd",
            gives=_gradients(dx=lambda x_hat, rstd, weight, dy: dy * weight - x_hat * _mean(dy * weight * x_hat)),
        ),
        Misconception(
            "weight-in-dweight", gives=_gradients(dweight=lambda x_hat, rstd, weight, dy: (dy * weight * x_hat).sum(0))
        ),
        Misconception(
            "not-normalised", gives=_gradients(dweight=lambda x_hat, rstd, weight, dy: (dy * x_hat / rstd).sum(0))
        ),
        Misconception("bias-gradient", gives=_gradients(dweight=lambda x_hat, rstd, weight, dy: dy.sum(0))),
        Misconception("low-precision", when=only("cancel", kind="values")),
        Misconception("forward-first/2", when=_gradients_wrong_in_every_case),
        Misconception("last-row-only", gives=_of_rows(lambda M, programs: slice(max(0, M - programs), M))),
        Misconception("one-partial", gives=_of_rows(lambda M, programs: slice(0, M, programs))),
        Misconception(
            "idle-programs",
            when=lambda evidence: evidence.kind == "nan" and evidence.output == "dweight" and evidence.tag("few-rows"),
        ),
        Misconception("rows-left-over", when=lambda evidence: evidence.kind == "nan" and evidence.output == "dx"),
    ),
)


# -------------------------------------------------------------------------------------------------- norms.residual
def _dx(formula: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What dx is as a formula of u_hat, rstd, weight, dy and du."""

    def gives(x: Tensor, residual: Tensor, weight: Tensor, dy: Tensor, du: Tensor) -> dict[str, Tensor]:
        u = x + residual
        rstd = _rms_norm(u, weight)[1].unsqueeze(-1)
        return {"y[2]": formula(u * rstd, rstd, weight, dy, du)}

    return gives


def _handed_on(forward: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """What y, rstd and u are where one of them is wrong, and the dx of the backward pass, which works on the last two."""

    def gives(x: Tensor, residual: Tensor, weight: Tensor, dy: Tensor, du: Tensor) -> dict[str, Tensor]:
        y, rstd, u = forward(x, residual, weight)
        return {"y[0]": y, "y[1]": u, "y[2]": _through_norm(u, dy * weight, rstd) + du}

    return gives


def _normed_by(rstd_of: Callable[[Tensor], Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What the results are where `rstd_of` u takes the place of 1 / sqrt(...)."""

    def forward(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u = x + residual
        return u * rstd_of(u)[:, None] * weight, rstd_of(u), u

    return _handed_on(forward)


RESIDUAL = KernelExercise(
    id="norms.residual",
    function="residual_rms_norm_both_ways",
    returns=("y", "u", "dx"),
    cases=_residual_cases,
    reference=_both_ways,
    huge=lambda: (*(far(327680, 16384),) * 2, far(16384), *(far(327680, 16384),) * 2),
    traffic=Traffic(
        reads=lambda x, residual, weight, dy, du: 5 * nbytes(x) + 2 * len(x) * nbytes(weight) + 4 * len(x),
        writes=lambda x, *_: 3 * nbytes(x) + 4 * len(x),
        launches=2,
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("norm-of-x", gives=_handed_on(lambda x, residual, weight: (*_rms_norm(x, weight), x + residual))),
        Misconception(
            "u-is-x", gives=_handed_on(lambda x, residual, weight: (*_rms_norm(x + residual, weight), residual))
        ),
        Misconception(
            "u-normalised",
            gives=_handed_on(
                lambda x, residual, weight: (
                    *_rms_norm(x + residual, weight),
                    _rms_norm(x + residual, weight.new_ones(()))[0],
                )
            ),
        ),
        Misconception("u-missing", when=_missing("y[1]")),
        Misconception(
            "padded-mean",
            gives=_normed_by(lambda u: (u.square().sum(-1) / (u.shape[-1] + padding(u.shape[-1])) + RMS_EPS).rsqrt()),
        ),
        Misconception("sum-not-mean", gives=_normed_by(lambda u: (u.square().sum(-1) + RMS_EPS).rsqrt())),
        Misconception("no-eps", gives=_normed_by(lambda u: u.square().mean(-1).rsqrt())),
        Misconception("eps-outside", gives=_normed_by(lambda u: 1 / (u.square().mean(-1).sqrt() + RMS_EPS))),
        Misconception(
            "padded-mean",
            gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * (dy * weight - _along(u_hat, dy * weight, True)) + du),
        ),
        Misconception(
            "sum-not-mean/2",
            gives=_dx(
                lambda u_hat, rstd, weight, dy, du: (
                    rstd * (dy * weight - u_hat.shape[-1] * _along(u_hat, dy * weight)) + du
                )
            ),
        ),
        Misconception(
            "du-forgotten",
            gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * (dy * weight - _along(u_hat, dy * weight))),
        ),
        Misconception(
            "du-through-norm",
            gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * (dy * weight + du - _along(u_hat, dy * weight + du))),
        ),
        Misconception(
            "du-twice",
            gives=_dx(
                lambda u_hat, rstd, weight, dy, du: rstd * (dy * weight + du - _along(u_hat, dy * weight + du)) + du
            ),
        ),
        Misconception(
            "du-in-dy",
            gives=_dx(
                lambda u_hat, rstd, weight, dy, du: rstd * ((dy + du) * weight - _along(u_hat, (dy + du) * weight))
            ),
        ),
        Misconception(
            "du-scaled",
            gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * (dy * weight - _along(u_hat, dy * weight) + du)),
        ),
        Misconception("missing-row-sum", gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * dy * weight + du)),
        Misconception(
            "weight-forgotten", gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * (dy - _along(u_hat, dy)) + du)
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------ norms.rope
def _stored_like_x(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return ideas.stored_like(x, _rope(x, cos, sin))


def _neighbors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    import torch

    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)


def _reflected(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    import torch

    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos - x1 * sin), -1)


def _halves_exchanged(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    import torch

    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x1 * cos + x2 * sin), -1)


def _first_half_used_twice(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    import torch

    x1, x2 = x.chunk(2, -1)
    x1 = x1 * cos - x2 * sin
    return torch.cat((x1, x2 * cos + x1 * sin), -1)


def _either_way(turn: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What one kernel gives for both passes: backward turns the other way."""
    return lambda x, cos, sin, dy: {"y": turn(x, cos, sin), "dx": turn(dy, cos, -sin)}


_both_contiguous = ideas.On(
    lambda x, cos, sin, dy: (ideas.as_if_contiguous(x), cos, sin, ideas.as_if_contiguous(dy)),
    _either_way(lambda x, cos, sin: _rope(x, cos, sin)),
)

ROPE = KernelExercise(
    id="norms.rope",
    function="rope",
    cases=_rope_cases,
    contiguous=True,
    reference=_rope,
    huge=lambda: [  # the offset of h, of b, of t and of a column alone is beyond 2^32
        (x, far(x.shape[2], 64), far(x.shape[2], 64), x)
        for x in (
            far(2, 320, 131072, 128),
            far(1 << 18, 160, 1, 128),
            far(1, 160, 1 << 18, 128, order=(0, 2, 1, 3)),
            far(1, 1, 5 << 24, 128, transposed=True),
        )
    ],
    gradients=1,
    traffic=Traffic(  # the tables once for each token and pass
        reads=lambda x, cos, sin, dy: nbytes(x, dy) + 2 * len(x) * nbytes(cos, sin),
        writes=lambda x, cos, sin, dy: nbytes(x, dy),
        launches=2,
        saved=lambda x, cos, sin, dy: nbytes(cos, sin),
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("direction", gives=lambda x, cos, sin, dy: {"y": _rope(x, cos, -sin)}),
        Misconception("neighbours", gives=_either_way(_neighbors)),
        Misconception("reflection", gives=_either_way(_reflected)),
        Misconception("halves-exchanged", gives=_either_way(_halves_exchanged)),
        Misconception("used-after-change", gives=_either_way(_first_half_used_twice)),
        Misconception("contiguous-assumed", gives=_both_contiguous),
        Misconception("output-strides", gives=_either_way(_stored_like_x)),
        Misconception("gradient-direction", gives=lambda x, cos, sin, dy: {"dx": _rope(dy, cos, sin)}),
        Misconception("gradient-not-turned", gives=lambda x, cos, sin, dy: {"dx": dy}),
        Misconception("heads-missing", when=lambda evidence: evidence.kind == "nan" and evidence.tag("heads")),
    ),
)

EXERCISES = [RMS_NORM, DETECTIVE, WELFORD, BACKWARD, RESIDUAL, ROPE]
