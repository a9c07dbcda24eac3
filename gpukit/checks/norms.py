"""The exercises of notebook 11: cases, bounds, and what each wrong idea computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading import ideas
from gpukit.grading.exercise import Case, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only, padding
from gpukit.grading.inputs import Inputs, far, listed, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence

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


def _layer_norm_long(x: Tensor, BLOCK_N: int) -> Tensor:
    """Unlike gpukit.reference's without weight and bias."""
    return _normalized(x).to(x.dtype)


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

    def vector(self, x: Tensor) -> Tensor:
        """As long as a row of x, as a weight is."""
        return self.like(x, x.shape[-1])


def _rms_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)
    normal, tiny = make.normal, make.normal(3, 96) * 1e-3
    tiny[1] = 0

    def case(x: Tensor, tags: str = "", note: str = "") -> Case:
        return _case(x, make.vector(x), RMS_EPS, tags=tags, note=note)

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
        return _case(x, make.vector(x), make.vector(x), tags=tags, note=note)

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
        ends = "partial" if x.shape[-1] % BLOCK_N else ""
        return _case(x, BLOCK_N, tags=f"{tags} {ends}", note=listed(f"BLOCK_N {BLOCK_N}", note))

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
        note = listed(f"{programs} programs", note)
        dy = make.like(x)
        return _case(x, make.vector(x), programs, dy, tags=f"{rows} {remainder} {tags}", note=note)

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
        residual, dy, du = (make.like(x) for _ in range(3))
        return _case(x, residual, make.vector(x), dy, du, tags=tags, note=note)

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
        return _case(x, cos, sin, dy, tags=tags, note=note)

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
_all_far = only("far")  # if not in every such case: by chance a digit that is lost may not show


def _missing(name: str) -> Callable[[Evidence], bool]:
    return lambda evidence: evidence.kind == "nan" and evidence.output == name


def _forward(rstd: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """What rms_norm gives where 1 / sqrt(...) is `rstd` of x and eps."""
    return lambda x, weight, eps: {"y[0]": x * rstd(x, eps) * weight, "y[1]": rstd(x, eps).squeeze(-1)}


def _weights(gives: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """What layer_norm gives where the normalized x is `gives`."""
    return lambda x, weight, bias: gives(x) * weight + bias


# -------------------------------------------------------------------------------------------------- norms.rms_norm
RMS_NORM = KernelExercise(
    id="norms.rms_norm",
    function="rms_norm",
    returns=("y", "rstd"),
    cases=_rms_cases,
    reference=_rms_norm,
    huge=lambda: (far(196608, 16384), far(16384), 1e-6),
    traffic=Traffic(reads=2, writes=1),
    misconceptions=(
        Misconception("no-weight", gives=lambda x, weight, eps: x * (_mean(x * x) + eps).rsqrt()),
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
        Misconception("no-eps", gives=_forward(lambda x, eps: _mean(x * x).rsqrt())),
        Misconception("centred", gives=lambda x, weight, eps: _normalized(x, eps) * weight),
        Misconception("low-precision-squares", when=only("float16", "bfloat16")),
        Misconception("rstd-inverted", gives=lambda x, weight, eps: {"y[1]": (_mean(x * x) + eps).sqrt().squeeze(-1)}),
        Misconception("rstd-missing", when=_missing("y[1]")),
    ),
)


# ------------------------------------------------------------------------------------------------- norms.detective
def _padded_variance(x: Tensor) -> Tensor:
    mean = _mean(x)
    total = (x - mean).square().sum(-1, keepdim=True) + padding(x.shape[-1]) * mean.square()
    return (x - mean) * (total / x.shape[-1] + LAYER_EPS).rsqrt()


DETECTIVE = KernelExercise(
    id="norms.detective",
    function="layer_norm",
    cases=_layer_cases,
    reference=ideas.reference("norms.layer_norm"),
    huge=lambda: (far(196608, 16384), far(16384), far(16384)),
    traffic=Traffic(reads=3, writes=1),
    misconceptions=(
        Misconception("cancellation", when=_all_far),
        Misconception("padding-in-variance", gives=_weights(_padded_variance)),
        Misconception(
            "not-centred",
            gives=_weights(lambda x: x * ((x - _mean(x)).square().mean(-1, keepdim=True) + LAYER_EPS).rsqrt()),
        ),
        Misconception(
            "sample-variance",
            gives=_weights(
                lambda x: (
                    (x - _mean(x))
                    * ((x - _mean(x)).square().sum(-1, keepdim=True) / (x.shape[-1] - 1) + LAYER_EPS).rsqrt()
                )
            ),
        ),
        Misconception(
            "eps-outside",
            gives=_weights(
                lambda x: (x - _mean(x)) / ((x - _mean(x)).square().mean(-1, keepdim=True).sqrt() + LAYER_EPS)
            ),
        ),
    ),
)


# --------------------------------------------------------------------------------------------------- norms.welford
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


WELFORD = KernelExercise(
    id="norms.welford",
    function="layer_norm_long",
    cases=_welford_cases,
    reference=_layer_norm_long,
    huge=lambda: (far(49152, 65536), 8192, 1e-5),
    traffic=Traffic(reads=2, writes=1),
    misconceptions=(
        Misconception("block-alone", gives=partial(ideas.each_block, _normalized)),
        Misconception("between-blocks", gives=_merged(_within_only)),
        Misconception("delta-weight", gives=_merged(_unweighted_delta)),
        Misconception("mean-moved-first", gives=_merged(_mean_moved_first)),
        Misconception("count-moved-first", gives=_merged(_count_moved_first)),
        Misconception("sample-variance", gives=_merged(_right, less=1)),
        Misconception("block-weight", gives=_merged(_full_blocks)),
        Misconception("block-weight/2", gives=_merged(_mean_of_means)),
        Misconception("padding-in-variance", gives=_merged(_padding_spreads)),
        Misconception("tail-block", gives=_merged(_right, keep=lambda here, BLOCK_N: here == BLOCK_N)),
        Misconception("tail-block/2", when=lambda evidence: evidence.kind == "nan" and evidence.tag("partial")),
        Misconception("cancellation", when=_all_far),
    ),
)


# -------------------------------------------------------------------------------------------------- norms.backward
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


BACKWARD = KernelExercise(
    id="norms.backward",
    function="rms_norm_trained",
    cases=_backward_cases,
    reference=ideas.reference("norms.rms_norm", 2),
    huge=lambda: (far(196608, 16384), far(16384), 2048, far(196608, 16384)),
    gradients=2,
    traffic=Traffic(reads=4.15, writes=2.15, launches=3),  # forward: x, weight, y; backward: x, dy, dx; sums
    launch_rule=ideas.no_atomics(
        "with atomics: which program comes first changes from run to run, and with the order of the additions the last "
        "digits of dweight. Where could each program keep a sum that nobody else touches?"
    ),
    misconceptions=(
        Misconception("forward-first", when=lambda evidence: evidence.output == "y"),
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
            "layer-norm-gradient",
            gives=_gradients(
                dx=lambda x_hat, rstd, weight, dy: (
                    rstd * (dy * weight - _mean(dy * weight) - x_hat * _mean(dy * weight * x_hat))
                )
            ),
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


def _along(u_hat: Tensor, g: Tensor) -> Tensor:
    return u_hat * _mean(g * u_hat)


RESIDUAL = KernelExercise(
    id="norms.residual",
    function="residual_rms_norm_both_ways",
    returns=("y", "u", "dx"),
    cases=_residual_cases,
    reference=_both_ways,
    huge=lambda: (*(far(196608, 16384),) * 2, far(16384), *(far(196608, 16384),) * 2),
    traffic=Traffic(reads=7, writes=3, launches=2),  # weight is loaded for each row in either kernel
    misconceptions=(
        Misconception("norm-of-x", gives=lambda x, residual, weight, dy, du: {"y[0]": _rms_norm(x, weight)[0]}),
        Misconception(
            "u-is-x",
            gives=lambda x, residual, weight, dy, du: {"y[0]": _rms_norm(x + residual, weight)[0], "y[1]": residual},
        ),
        Misconception(
            "u-normalised",
            gives=lambda x, residual, weight, dy, du: {"y[1]": _rms_norm(x + residual, weight.new_ones(()))[0]},
        ),
        Misconception("u-missing", when=_missing("y[1]")),
        Misconception(
            "du-forgotten",
            gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * (dy * weight - _along(u_hat, dy * weight))),
        ),
        Misconception(
            "du-through-norm",
            gives=_dx(lambda u_hat, rstd, weight, dy, du: rstd * (dy * weight + du - _along(u_hat, dy * weight + du))),
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
def _as_if_contiguous(x: Tensor, cos: Tensor, sin: Tensor, dy: Tensor) -> Tensor:
    return _rope(ideas.as_if_contiguous(x), cos, sin)


def _stored_like_x(x: Tensor, cos: Tensor, sin: Tensor, dy: Tensor) -> Tensor:
    return ideas.stored_like(x, _rope(x, cos, sin))


def _neighbors(x: Tensor, cos: Tensor, sin: Tensor, dy: Tensor) -> Tensor:
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
    function="rope",
    cases=_rope_cases,
    reference=_rope,
    huge=lambda: (far(3, 64, 131072, 128), far(131072, 64), far(131072, 64), far(3, 64, 131072, 128)),
    gradients=1,
    traffic=Traffic(reads=2.25, writes=2, launches=2),  # eight heads share the tables
    misconceptions=(
        Misconception("direction", gives=lambda x, cos, sin, dy: {"y": _rope(x, cos, -sin)}),
        Misconception("neighbours", gives=_neighbors),
        Misconception("reflection", gives=_reflected),
        Misconception("used-after-change", gives=_first_half_used_twice),
        Misconception("contiguous-assumed", gives=_as_if_contiguous),
        Misconception("output-strides", gives=_stored_like_x),
        Misconception("gradient-direction", gives=lambda x, cos, sin, dy: {"dx": _rope(dy, cos, sin)}),
        Misconception("gradient-not-turned", gives=lambda x, cos, sin, dy: {"dx": dy}),
        Misconception("heads-missing", when=lambda evidence: evidence.kind == "nan" and evidence.tag("heads")),
    ),
)

EXERCISES = [RMS_NORM, DETECTIVE, WELFORD, BACKWARD, RESIDUAL, ROPE]
