"""The exercises of notebook 09: cases, bounds, and what each wrong idea computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    from gpukit.grading.messages import LaunchFacts


# ------------------------------------------------------------------------------------------------------------ inputs
_case = partial(tensor_case, tail=True)


def _named(argument: str, cases: list[Case]) -> list[Case]:
    """Cases that say their second argument too; for a single element it makes no difference."""
    return [
        case if case.args[0].numel() == 1 else replace(case, name=f"{case.name}, {argument} {case.args[1]}")
        for case in cases
    ]


def _far_below(make: Inputs) -> Tensor:
    """Rows below every number that one might take for -inf."""
    x = make.torch.full((2, 97), -2e38)
    x[1, 50] /= 2
    return x


def _fused_cases(rng: Random) -> list[Case]:
    make = Inputs(rng, scale=2)
    shifts = make.torch.tensor([[1e4], [300.0], [-1e4]])
    masked = make.normal(3, 100)
    masked[0, ::2] = masked[1, :99] = masked[2, 0] = -float("inf")
    return [
        _case(make.normal(1, 1)),
        _case(make.normal(1, 781)),
        _case(make.normal(3, 64)),
        _case(make.normal(2, 1024, dtype="float16"), tags="once"),
        _short(make),
        _case(make.normal(2, 1025, dtype="bfloat16"), tags="long once"),
        _case(make.normal(3, 128) + shifts, tags="large", note="rows around 1e4, 300 and -1e4"),
        _case(make.logits(97), tags="large", note="hard rows"),
        _case(_far_below(make), tags="below", note="around -1e38"),
        _case(make.normal(2, 1000)),
        _case(masked, tags="masked", note="with -inf"),
        _case(make.logits(130, "float16"), tags="large", note="hard rows"),
        _case(make.logits(64, "bfloat16"), tags="large", note="hard rows"),
        _constant(make),
        _alike(make),
        _steep(make),
        _nothing(make),
        _unknown(make),
    ]


def _short(make: Inputs, *rest: Any, tags: str = "") -> Case:
    """Half of them rise behind the first four."""
    x = make.torch.cat([make.normal(16, 7, dtype="bfloat16"), make.late(16, 7, 4)])
    return _case(x, *rest, tags=f"once {tags}")


def _nothing(make: Inputs, *rest: Any) -> Case:
    """A row that has nothing to share, beside one that has."""
    x = make.normal(2, 40)
    x[0] = -float("inf")
    return _case(x, *rest, tags="all-masked", note="a row of -inf")


def _unknown(make: Inputs, *rest: Any) -> Case:
    """Rows of which a NaN is the middle, and the end, and none."""
    x = make.normal(3, 50)
    x[0, 20] = x[1, -1] = float("nan")
    return _case(x, *rest, tags="special", note="with NaN")


def _constant(make: Inputs, *rest: Any) -> Case:
    """One row whose exponentials add up to more than float16 can hold, and to more ones than bfloat16 can count."""
    return _case(make.torch.full((1, 65536), 3.0).half(), *rest, tags="long constant", note="constant")


def _steep(make: Inputs, *rest: Any) -> Case:
    """A row whose differences from its maximum, 8.00390625, float16 rounds to 8: thirty thousand times the same error."""
    x = make.torch.full((1, 30_000), -4.00390625)
    x[0, 0] = 4
    return _case(x.half(), *rest, tags="long steep", note="4, and -4.0039 thirty thousand times")


def _alike(make: Inputs, *rest: Any, tags: str = "") -> Case:
    """A row whose exponentials, 256 times exp(-1.359375), bfloat16 rounds by 0.37%, and their sum with them."""
    x = make.torch.full((1, 257), -1.359375)
    x[0, 0] = 0
    return _case(x.bfloat16(), *rest, tags=f"once {tags}", note="0, and -1.359375 many times")


def _strided_cases(rng: Random) -> list[Case]:
    """Permuted tensors without gaps first: wrong strides then give wrong values, which say more than a fault would."""
    make = Inputs(rng, scale=2)
    normal = make.normal
    heads = normal(2, 5, 3, 24).transpose(1, 2)
    channels = normal(2, 40, 3, dtype="float16").transpose(1, 2)
    last_first = normal(33, 2, 3, 2).permute(1, 2, 3, 0)
    large = normal(2, 1024, 2).transpose(1, 2) + 1e4
    hard, gap = make.layouts(make.logits(97))[0][1], make.layouts(make.logits(64, "bfloat16"))[1][1]
    second = make.layouts(make.logits(40, "float16"))[-1][1]
    return [
        _case(normal(1, 1)),
        _case(normal(781), note="one dimension"),
        _case(normal(3, 64)),
        _case(normal(6, 6).t(), tags="strided", note="transposed"),
        _case(normal(97, 5).t(), tags="strided", note="transposed"),
        _case(normal(2, 3, 40, dtype="bfloat16"), tags="leading once"),
        _short(make),
        _case(_far_below(make), tags="below", note="around -1e38"),
        _case(heads, tags="strided leading", note="[B, T, H, D] seen as [B, H, T, D]"),
        _case(channels, tags="strided leading once", note="[B, N, C] seen as [B, C, N]"),
        _case(last_first, tags="strided leading", note="its last dimension outermost in memory"),
        _case(large, tags="strided leading large", note="transposed, around 1e4"),
        _case(hard, tags="strided large", note="hard rows, transposed"),
        _constant(make),
        _steep(make),
        _nothing(make),
        _unknown(make),
        _case(gap, tags="strided gaps large", note="hard rows, with a gap behind each"),
        _case(second, tags="strided gaps large", note="hard rows, every second element of wider ones"),
        _case(normal(2, 1, 33).expand(2, 3, 33), tags="strided gaps leading", note="expanded: stride 0"),
    ]


def _online_cases(rng: Random) -> list[Case]:
    make = Inputs(rng, scale=2)
    normal = make.normal
    steps = make.torch.arange(512.0) // 64 * 40
    masked = normal(3, 300)
    masked[0, :130] = masked[1, 64:] = masked[2, :299] = -float("inf")
    low = normal(2, 256) - 200  # full blocks: a maximum of 0 comes from no padding lane
    low[0, :128] = -float("inf")
    rising = -normal(2, 512).abs() - 0.01
    rising[:, ::64] = 0
    rising += make.torch.arange(512.0) // 64 * 0.0009
    faint = make.torch.zeros(4, 8192)
    faint[0, 0] = faint[1, -1] = 16
    faint[2, 0] = faint[3, -1] = 20
    zeros = normal(2, 256)
    zeros[:, 64:128] = 0
    cases = [
        _case(normal(1, 1), 64),
        _case(normal(3, 64), 64),
        _case(normal(2, 1024, dtype="float16"), 128, tags="long once"),
        _case(normal(2, 512) + 1e4, 128, tags="long large", note="around 1e4"),
        _case(normal(2, 512) + steps, 64, tags="long", note="rising by 40 a block"),
        _case(normal(2, 512) - steps, 64, tags="long", note="falling by 40 a block"),
        _case(normal(2, 1000, dtype="bfloat16"), 256, tags="long once"),
        _short(make, 4, tags="long"),
        _case(normal(2, 1025), 256, tags="long", note="one element in the last block"),
        _case(normal(5, 781), 128, tags="long"),
        _case(masked, 64, tags="long masked", note="with blocks of -inf"),
        _case(low, 64, tags="long masked low", note="around -200, with blocks of -inf"),
        _case(_far_below(make), 64, tags="long below", note="around -1e38"),
        _case(make.logits(97), 32, tags="long masked large", note="hard rows"),
        _case(make.logits(65, "float16"), 64, tags="long masked large", note="hard rows"),
        _case(make.logits(63, "bfloat16"), 16, tags="long masked large", note="hard rows"),
        _alike(make, 64, tags="long"),
        _constant(make, 16384),
        _steep(make, 16384),
        _nothing(make, 16),
        _unknown(make, 16),
        _case(rising, 64, tags="long rising", note="rising by 0.0009 a block"),
        _case(faint, 1024, tags="long faint", note="one element 16 or 20 above zeros, first and last"),
        _case(zeros, 64, tags="long zeros", note="with a block of zeros"),
    ]
    cases = [replace(case, tags=case.tags | {"partial"}) if _block_padding(*case.args) else case for case in cases]
    return _named("BLOCK_N", cases)


def _backward_cases(rng: Random) -> list[Case]:
    make = Inputs(rng, scale=2)
    normal = make.normal

    def case(x: Tensor, upstream: int | None = None, note: str = "", tags: str = "") -> Case:
        """upstream: which of the corners dy is; None: noise"""
        shown, dy = ("", make.like(x)) if upstream is None else make.upstream(x)[upstream]
        tags += " strided" * (not dy.is_contiguous())
        return _case(x, dy, tags=tags, note=listed(note, f"dy {shown}" if shown else ""))

    # The gradient of a sum is 0, as y adds up to 1: with powers of two also in float32, whatever comes first.
    alike = make.torch.full((3, 64), 3.0)
    alike[0, ::2] = alike[1, 1:] = -float("inf")
    # Beyond float16 is the difference of dy and the row's sum, but not its product with a small y.
    low = normal(3, 200, scale=0.5)
    low[:, ::2] -= 5
    far_apart = make.torch.full((3, 200), -50_000.0)
    far_apart[:, ::2] = 50_000
    # Of y dy, 4095 times 9e-8, float16 holds one digit, and of its sum, which is beside a y of one half, all.
    tiny, dy = make.torch.zeros(2, 2, 4096).half()
    tiny[:, 0], dy[:, 1:] = 8.3125, 0.00073
    # A y of 1/64 is exact, and the sum of y dy, 1000.16, is none of float16's.
    near = 1000 + 0.5 * (make.normal(64).argsort() < 20).half().expand(2, 64)
    return [
        case(normal(1, 1)),
        case(normal(3, 64)),
        case(normal(2, 1024, dtype="float16")),
        case(normal(5, 781)),
        case(normal(2, 1000, dtype="bfloat16")),
        case(normal(2, 1025, scale=0.5), 5),  # no y near 1: where dy is 5 everywhere, y times 5 would lose what dx is
        case(normal(3, 50), 1),
        case(normal(3, 50), 2),
        case(make.logits(97), tags="large masked", note="hard rows"),
        case(make.logits(130, "float16"), 4, tags="large masked", note="hard rows"),
        case(make.logits(64, "bfloat16"), 3, tags="large masked", note="hard rows"),
        case(alike, 0, tags="masked", note="numbers alike and -inf"),
        _case(low.half(), far_apart.half(), tags="far", note="dy 50000 and -50000"),
        _case(tiny, dy, tags="tiny", note="dy around 0.0007"),
        _case(make.torch.zeros(2, 64).half(), near, tags="digits", note="zeros, dy around 1000"),
    ]


def _persistent_cases(rng: Random) -> list[Case]:
    make = Inputs(rng, scale=2)

    def case(x: Tensor, max_programs: int, tags: str = "", note: str = "") -> Case:
        tags += " many-rows" if len(x) > max_programs else " few-rows"
        tags += " remainder" * (len(x) > max_programs and len(x) % max_programs > 0)
        return _case(x, max_programs, tags=tags, note=note)

    cases = [
        case(make.normal(1, 1), 8),
        case(make.normal(3, 64), 8),
        case(make.normal(8, 64), 4),
        case(make.normal(12, 1024, dtype="float16"), 4, tags="once"),
        case(make.normal(37, 781), 8),
        case(make.normal(7, 1000), 4),
        case(make.normal(5, 1025, dtype="bfloat16"), 3, tags="once"),
        _short(make, 5, tags="many-rows remainder"),
        case(make.logits(97), 8, tags="large masked", note="hard rows"),
        case(_far_below(make), 8, tags="below", note="around -1e38"),
        case(make.logits(130, "float16"), 3, tags="large masked", note="hard rows"),
        case(make.logits(64, "bfloat16"), 2, tags="large masked", note="hard rows"),
        case(make.normal(6, 33), 1, note="one program"),
        _constant(make, 8),
        _alike(make, 8),
        _steep(make, 8),
        _nothing(make, 8),
        _unknown(make, 8),
        case(make.normal(140, 3), 140, note="many programs"),  # more than any GPU has SMs but the largest
    ]
    return _named("max_programs", cases)


# ------------------------------------------------------- what a wrong idea computes, in float32, from float64 inputs
def _row_padding(x: Tensor, *_: Any) -> int:
    return padding(x.shape[-1])


def _block_padding(x: Tensor, BLOCK_N: int) -> int:
    return padding(x.shape[-1], BLOCK_N)


def _no_maximum(x: Tensor, *_: Any) -> Tensor:
    e = x.float().exp()
    return e / e.sum(-1, keepdim=True)


def _not_normalized(x: Tensor, *_: Any) -> Tensor:
    return (x.float() - x.float().amax(-1, keepdim=True)).exp()


def _scaled_before_subtracting(x: Tensor, *_: Any) -> Tensor:
    scaled = x.float() * 1.4426950408889634
    e = (scaled - scaled.amax(-1, keepdim=True)).exp2()
    return e / e.sum(-1, keepdim=True)


_as_if_contiguous = ideas.On(lambda x, *rest: (ideas.as_if_contiguous(x), *rest), lambda x, *_: x.softmax(-1))


def _as_if_unit_stride(x: Tensor, *_: Any) -> Tensor:
    return x.as_strided(x.shape, (*x.stride()[:-1], 1)).softmax(-1)


def _first_index_fastest(x: Tensor, *_: Any) -> Tensor:
    """The last two leading indices unraveled with the first of them moving fastest."""
    y = x.softmax(-1)
    return y.transpose(-3, -2).reshape(x.shape) if x.ndim > 2 else y


def _blocks(x: Tensor, BLOCK_N: int) -> list[Tensor]:
    return list(x.float().split(BLOCK_N, -1))


def _online(x: Tensor, BLOCK_N: int, rescale: bool, keep: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """The running maximum and sum over blocks of x."""
    import torch

    m = torch.full((*x.shape[:-1], 1), -float("inf"))
    total = torch.zeros_like(m)
    for block in _blocks(x, BLOCK_N)[keep]:
        m_new = torch.maximum(m, block.amax(-1, keepdim=True))
        shift = torch.where(m_new.isinf(), 0.0, m_new)
        if rescale:
            total = total * (m - shift).exp()
        total = total + _row((block - shift).exp())
        m = m_new
    return m, total


def _no_rescale(x: Tensor, BLOCK_N: int) -> Tensor:
    m, total = _online(x, BLOCK_N, rescale=False)
    return (x.float() - m).exp() / total


def _new_terms_scaled(x: Tensor, BLOCK_N: int) -> Tensor:
    """The factor of the older terms multiplies the sum with those of the block in it: after the first block it is 0."""
    import torch

    m = torch.full((*x.shape[:-1], 1), -float("inf"))
    total = torch.zeros_like(m)
    for block in _blocks(x, BLOCK_N):
        m_new = torch.maximum(m, block.amax(-1, keepdim=True))
        shift = torch.where(m_new.isinf(), 0.0, m_new)
        total = (total + _row((block - shift).exp())) * (m - shift).exp()
        m = m_new
    return (x.float() - m).exp() / total


def _last_block_not_counted(x: Tensor, BLOCK_N: int) -> Tensor:
    m, total = _online(x, BLOCK_N, rescale=True, keep=slice(x.shape[-1] // BLOCK_N))
    return (x.float() - m).exp() / total


def _each_block_alone(x: Tensor, BLOCK_N: int) -> Tensor:
    return ideas.each_block(lambda block: block.softmax(-1), x.float(), BLOCK_N)


def _last_maximum(x: Tensor, BLOCK_N: int) -> Tensor:
    """The sum is right, but the second pass subtracts each block's own maximum."""
    _, total = _online(x, BLOCK_N, rescale=True)
    return ideas.each_block(_not_normalized, x, BLOCK_N) / total


def _forgets_the_maximum(x: Tensor, BLOCK_N: int) -> Tensor:
    """Each block's maximum takes the place of the one before, and the sum is rescaled by their difference."""
    m, total = float("-inf"), 0.0
    for block in _blocks(x, BLOCK_N):
        m_new = block.amax(-1, keepdim=True)
        shift = m_new.where(~m_new.isinf(), m_new.new_zeros(()))
        total = total * (m - shift).exp() + (block - shift).exp().sum(-1, keepdim=True)
        m = m_new
    return (x.float() - m).exp() / total


def _log_sum_exp(x: Tensor, BLOCK_N: int) -> Tensor:
    m, total = _online(x, BLOCK_N, rescale=True)
    return (x.float() - (m + total.log())).exp()


def _keeps_the_shift(x: Tensor, BLOCK_N: int) -> Tensor:
    """The 0 that is subtracted while there is no number yet is carried on as the maximum."""
    m = x.float().amax(-1, keepdim=True)
    hidden = x[..., :BLOCK_N].isinf().all(-1, keepdim=True)
    e = (x.float() - m.clamp_min(0).where(hidden, m)).exp()
    return e / _row(e)


def _with(tag: str, *others: str) -> Callable[[Evidence], bool]:
    """A case with the tag failed, and of the others those with one of `others` alone, if any."""
    return lambda evidence: (
        evidence.kind == "values" and any(tag in case.tags for case in evidence.failed) and only(tag, *others)(evidence)
    )


def _starts_at_zero(evidence: Evidence) -> bool:
    """The rows far below 0 are wrong, also where no padding lane could hold the 0."""
    far_below = ideas.only_rows(lambda x, BLOCK_N: x.amax(-1) < -80)
    return any("low" in case.tags for case in evidence.failed) and far_below(evidence)


def _infinity_minus_infinity(x: Tensor, BLOCK_N: int) -> Tensor:
    """NaN in every row whose first block is all -inf."""
    import torch

    lost = x[..., :BLOCK_N].isinf().all(-1, keepdim=True)
    return torch.where(lost, float("nan"), x.softmax(-1))


def _only_row_0(evidence: Evidence) -> bool:
    y = evidence.outputs
    return y.ndim == 2 and not bool(y[0].isnan().any()) and bool(y[1:].isnan().all()) and len(y) > 1


def _gradient(formula: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """What a backward pass gives that computes dx as `formula` of y, dy and x."""
    return lambda x, dy: {"dx": formula(x.softmax(-1), dy, x)}


def _overwrites_y(x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    y = x.softmax(-1)
    dx = y * (dy - _row(y * dy))
    return {"y": dx, "dx": dx}


def _row(terms: Tensor) -> Tensor:
    return terms.sum(-1, keepdim=True)


# ------------------------------------------------------------------------------------------------ shared wrong ideas


def _common(lanes: Callable[..., int]) -> tuple[Misconception, ...]:
    """`lanes(*args)`: how many lanes of the row's last block lie past its end."""

    def padded_maximum(x: Tensor, *rest: Any) -> Tensor:
        m = x.float().amax(-1, keepdim=True)
        return m.clamp_min(0) if lanes(x, *rest) else m

    def pads_with_zero(x: Tensor, *rest: Any) -> Tensor:
        m = padded_maximum(x, *rest)
        e = (x.float() - m).exp()
        return e / (_row(e) + lanes(x, *rest) * (-m).exp())

    def masks_only_the_sum(x: Tensor, *rest: Any) -> Tensor:
        e = (x.float() - padded_maximum(x, *rest)).exp()
        return e / _row(e)

    return (
        Misconception("shares-nothing", when=only("all-masked")),
        Misconception("not-the-lowest", when=only("below", "all-masked")),
        Misconception("tail-mask", gives=pads_with_zero, fill=lambda evidence: {"lanes": lanes(*evidence.case.args)}),
        Misconception("max-over-padding", gives=masks_only_the_sum),
        Misconception("no-max-subtraction", gives=_no_maximum),
        Misconception("no-normalisation", gives=_not_normalized),
        Misconception("low-precision", gives=lambda x, *_: x.half().float().softmax(-1)),
        Misconception("low-precision-sum", when=only("constant", "steep")),
    )


# ----------------------------------------------------------------------------------------------------- softmax.fused
FUSED = KernelExercise(
    id="softmax.fused",
    function="softmax_fused",
    cases=_fused_cases,
    reference=ideas.reference("softmax.library", 1),
    huge=lambda: (far(81920, 65536),),
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        *_common(_row_padding),
        Misconception("lost-digits", gives=_scaled_before_subtracting),
        Misconception("program-id", when=_only_row_0),
        Misconception("first-row", gives=lambda x: x[:1].softmax(-1).expand_as(x)),
        Misconception("block-too-small", when=lambda evidence: evidence.tag("long")),
        ideas.NOT_FINITE,
    ),
)


# --------------------------------------------------------------------------------------------------- softmax.strided
STRIDED = KernelExercise(
    id="softmax.strided",
    function="softmax_strided",
    cases=_strided_cases,
    contiguous=True,
    reference=ideas.reference("softmax.library", 1),
    # Each offset alone is beyond 2^32: that of a column, of c, of b, of a. A stride that is itself beyond comes in 64 bits.
    huge=lambda: [
        (far(2, 81920, 65536, transposed=True),),
        *((far(*shape, 65536),) for shape in ((1, 1, 81920), (1, 49152, 2), (49152, 2, 1))),
    ],
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception("contiguous-assumed", gives=_as_if_contiguous),
        Misconception("unit-stride-assumed", gives=_as_if_unit_stride),
        Misconception("output-strides", gives=lambda x: ideas.stored_like(x, x.softmax(-1))),
        Misconception("leading-order", gives=_first_index_fastest),
        *_common(_row_padding),
        ideas.NOT_FINITE,
    ),
)


# ---------------------------------------------------------------------------------------------------- softmax.online
ONLINE = KernelExercise(
    id="softmax.online",
    function="softmax_online",
    cases=_online_cases,
    reference=ideas.reference("softmax.library", 1),
    huge=lambda: (far(81920, 65536), 8192),
    traffic=Traffic(reads=2, writes=1),
    misconceptions=(
        Misconception("no-rescale", gives=_no_rescale),
        Misconception("new-terms-scaled", gives=_new_terms_scaled),
        Misconception(
            "rescale-sign",
            when=lambda evidence: evidence.kind == "nan" and not evidence.passed and evidence.first.reply.stored,
        ),
        Misconception("tail-block", gives=_last_block_not_counted),
        Misconception("tail-block/2", when=lambda evidence: evidence.kind == "nan" and evidence.tag("partial")),
        Misconception("block-alone", gives=_each_block_alone),
        Misconception("block-maximum", gives=_last_maximum),
        Misconception("maximum-forgotten", gives=_forgets_the_maximum),
        Misconception("stays-at-zero", gives=_keeps_the_shift),
        Misconception("starts-at-zero", when=_starts_at_zero),
        Misconception("inf-minus-inf", gives=_infinity_minus_infinity),
        Misconception("lost-digits", gives=_log_sum_exp),
        Misconception("small-rise", when=_with("rising", "large")),
        Misconception("left-out", when=_with("faint", "below", "large")),
        Misconception("zeros-left-out", when=_with("zeros", "faint", "all-masked", "large")),
        *_common(_block_padding),
        Misconception(
            "lost-digits/2",  # the same idea, where another order of rounding hides the formula
            when=only("large", kind="values"),
        ),
        ideas.NOT_FINITE,
    ),
)


# -------------------------------------------------------------------------------------------------- softmax.backward
BACKWARD = KernelExercise(
    id="softmax.backward",
    function="softmax",
    cases=_backward_cases,
    reference=ideas.reference("softmax.library", 1),
    huge=lambda: [(far(81920, 65536), far(81920, 65536, transposed=way)) for way in (False, True)],
    gradients=1,
    traffic=Traffic(reads=3, writes=2, launches=2, saved=1),  # forward: x, y; backward: y and dy, dx
    misconceptions=(
        Misconception("overwrites-y", gives=_overwrites_y),
        Misconception("forward-first", when=lambda evidence: evidence.output == "y"),
        Misconception("missing-row-sum", gives=_gradient(lambda y, dy, x: y * dy)),
        Misconception("diagonal-only", gives=_gradient(lambda y, dy, x: y * (1 - y) * dy)),
        Misconception("sum-of-dy", gives=_gradient(lambda y, dy, x: y * (dy - _row(dy)))),
        Misconception("mean-of-dy", gives=_gradient(lambda y, dy, x: y * (dy - _row(y * dy) / y.shape[-1]))),
        Misconception("saved-x", gives=_gradient(lambda y, dy, x: x * (dy - _row(x * dy)))),
        Misconception("sign", gives=_gradient(lambda y, dy, x: y * (_row(y * dy) - dy))),
        Misconception("low-precision/2", when=only("tiny", "digits")),
        Misconception("low-precision", when=only("far", "tiny", "digits")),
        Misconception("padding-inf", when=lambda evidence: evidence.tag("tail")),
    ),
)


# ------------------------------------------------------------------------------------------------ softmax.persistent
def _evenly_shared(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    """At most max_programs, and no program with more than its share of the rows, a load and a store for each."""
    (x, max_programs), programs, longest = case.args, launches[0].programs, launches[0].longest
    if programs > max_programs:
        return "programs", (
            f"{programs} programs for {len(x)} rows, where the GPU holds {max_programs} at a time: "
            "who takes the rows that are left over?"
        )
    share = -(-len(x) // max_programs)
    again = launches[0].load_bytes > x.numel() * x.element_size()  # rows that two programs take: Traffic says so
    if longest > 2 * share + 1 and not again:
        return "uneven", (
            f"one program does more than its share: {len(x)} rows are {share} at most for each of {max_programs} programs, "
            f"and the busiest loads and stores {longest} times. Who waits for whom?"
        )
    return None


PERSISTENT = KernelExercise(
    id="softmax.persistent",
    function="softmax_persistent",
    cases=_persistent_cases,
    reference=ideas.reference("softmax.library", 1),
    huge=lambda: (far(81920, 65536), 16384),
    traffic=Traffic(reads=1, writes=1),
    launch_rule=_evenly_shared,
    misconceptions=(
        Misconception("rows-left-over", when=lambda evidence: evidence.tag("remainder")),
        Misconception("program-id", when=_only_row_0),
        Misconception("rows-skipped", when=lambda evidence: evidence.tag("many-rows")),
        *_common(_row_padding),
        ideas.NOT_FINITE,
    ),
)

EXERCISES = [FUSED, STRIDED, ONLINE, BACKWARD, PERSISTENT]
