"""The exercises of notebook 15: cases, bounds on traffic and memory, and what each wrong idea computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.accounting.tiling import cdiv
from gpukit.grading import ideas
from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only, only_rows, padding
from gpukit.grading.inputs import Inputs, case, far, listed, nbytes, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence
    from gpukit.grading.wire import Imaginary

IGNORE = -100


# ------------------------------------------------------------------------------------------------------------ inputs
class _Inputs(Inputs):
    def target(self, M: int, V: int, ignored: Iterable[int] = (), index: int = IGNORE) -> Tensor:
        target = self.integers(0, V, M)
        target[list(ignored)] = index
        return target

    def few(self, M: int, V: int) -> tuple[Tensor, Tensor]:
        """Few classes; each target is the least likely, the first by far: a loss or gradient of almost nothing would allow
        no rounding at all."""
        x = self.normal(M, V)
        target = x.argmin(-1)
        x[0, target[0]] -= 16
        return x, target

    def unknown(self, V: int) -> tuple[Tensor, Tensor]:
        """Rows [3, V] as in `few`, of which one that counts has a NaN."""
        x, target = self.few(3, V)
        return self.stained(x), target

    def blank(self, V: int, index: int = IGNORE) -> tuple[Tensor, Tensor]:
        """Rows [5, V] of which three are ignored: all NaN, all -inf, and with one infinity. What fills up a batch may hold
        anything."""
        x, target = self.normal(5, V), self.target(5, V, (0, 2, 3), index)
        x[0], x[2], x[3, V // 2] = math.nan, -math.inf, math.inf
        return x, target

    def hard(self, V: int, dtype: str = "float32", masked: bool = True) -> tuple[Tensor, Tensor]:
        """The hard rows, with -inf if `masked`, and targets with finite logits: first and last, repeated, and far below the
        rest, which makes a loss as large as the logits and allows all rows the rounding of such numbers."""
        x = self.logits(V, dtype) if masked else self.rows(V, dtype)
        target = self.indices(V, len(x))
        target[4], target[5] = V - 1, 0
        target[[7, 10]] = x[[7, 10]].argmin(-1)
        if masked:
            target[12:] = self.torch.tensor([2 * ((V - 1) // 2), V - 1, 0, 0, V - 1])
        return x, target

    def low(self, V: int) -> tuple[Tensor, Tensor]:
        """Rows [4, V] of numbers around -164,000: no number that a maximum starts from, and none that pads a block, may lie above
        them. One element has all the weight, so that the log-sum-exp is that element, whatever is added up how."""
        x = self.torch.full((4, V), -172032.0)
        at = self.indices(V, 4)
        x[range(4), at] = -163840
        return x, at.where(self.torch.arange(4) % 2 > 0, (at + 1) % V)


def _in_blocks(x: Tensor, *rest: Any, block: int, tags: str = "", note: str = "") -> Case:
    tags += " long" * (x.shape[-1] > block) + " partial" * (x.shape[-1] % block > 0)
    return tensor_case(x, *rest, tags=tags, note=listed(f"BLOCK_V {block}", note), tail=True)


# -------------------------------------------------------------------------------------------------------- references
def _wide(x: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32."""
    return x if x.dtype.itemsize == 8 else x.float()


def _at_target(x: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Tensor:
    return x.gather(-1, target.where(target != ignore_index, target.new_zeros(()))[:, None])[:, 0]


def _one_hot(x: Tensor, target: Tensor) -> Tensor:
    import torch

    return (torch.arange(x.shape[-1]) == target[:, None]).to(x.dtype)


def _zero_if_ignored(values: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Tensor:
    counts = target != ignore_index
    return values.where(counts.view(-1, *[1] * (values.ndim - 1)), values.new_zeros(()))


def _cross_entropy(
    x: Tensor, target: Tensor, BLOCK_V: int = 0, ignore_index: int = IGNORE, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp, which gpukit.reference's keeps to itself; `lse` is what a wrong idea takes for it."""
    lse = _wide(x).logsumexp(-1) if lse is None else lse
    loss = lse - _at_target(_wide(x), target, ignore_index)
    return _zero_if_ignored(loss, target, ignore_index), _zero_if_ignored(lse, target, ignore_index)


def _gradient(
    x: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, BLOCK_V: int = 0, ignore_index: int = IGNORE
) -> Tensor:
    wide = _wide(x)
    dx = ((wide - lse[:, None]).exp() - _one_hot(wide, target)) * dloss[:, None]
    return _zero_if_ignored(dx, target, ignore_index).to(x.dtype)


def _loss_and_gradient(x: Tensor, target: Tensor, scale: Tensor, ignore_index: int = IGNORE) -> tuple[Tensor, Tensor]:
    loss, _ = _cross_entropy(x, target, 0, ignore_index)
    return loss, _gradient(x, target, _wide(x).logsumexp(-1), scale.expand(len(x)), 0, ignore_index)


def _smoothed(x: Tensor, target: Tensor, smoothing: float, z_loss: float) -> Tensor:
    """gpukit.reference's but for rounding: in terms of the weights of the classes, which wrong ideas change."""
    wide = _wide(x)
    return _loss_of(_weights)(wide, wide.logsumexp(-1), _one_hot(wide, target), smoothing, z_loss)


def _kl(x: Tensor, t: Tensor, BLOCK_V: int = 0) -> Tensor:
    from gpukit.reference.kl_div import kl_div

    return kl_div(_wide(x), _wide(t), reduction="none").sum(-1)


# ------------------------------------------------------------------------------------------------------------- cases
def _cross_entropy_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def case(
        M: int, V: int, block: int, *index: int, dtype: str = "float32", ignored: Iterable[int] = (), note=""
    ) -> Case:
        x, target = make.normal(M, V, dtype=dtype), make.target(M, V, ignored, *index)
        note = listed(note, *(f"ignore_index {value}" for value in index))
        return _in_blocks(x, target, block, *index, block=block, tags="ignored" if ignored else "", note=note)

    def hard(V: int, block: int, dtype: str = "float32") -> Case:
        return _in_blocks(*make.hard(V, dtype), block, block=block, tags="masked large far-target", note="hard rows")

    # To 840: where the maximum is not taken off, the exponential is infinite in float64 as well. The targets are in the
    # first block: in the last one little of lse - x[target] would be left, and chance would refuse right answers.
    faint = make.torch.zeros(2, 1 << 16)  # one logit has nearly all the weight, and together the others count
    faint[:, 0] = 20
    rising = make.normal(2, 512) + make.torch.arange(512.0) // 64 * 120
    return [
        _in_blocks(*make.few(3, 2), 64, block=64),
        case(1, 64, 64),
        case(5, 781, 128),
        case(2, 1024, 256, dtype="float16"),
        case(2, 1025, 256, dtype="bfloat16"),
        _in_blocks(make.late(8, 13, 4), make.target(8, 13), 4, block=4),
        hard(131, 64),
        hard(131, 32, "float16"),
        hard(96, 128, "bfloat16"),
        _in_blocks(rising, make.target(2, 64), 64, block=64, note="rising by 120 a block"),
        _in_blocks(*make.low(70), 64, block=64, tags="low large far-target", note="around -164,000"),
        _in_blocks(faint, make.torch.tensor([99, 100]), 4096, block=4096, tags="faint", note="one 20 above the others"),
        case(4, 256, 64, ignored=(2,), note="one ignored"),
        _in_blocks(*make.blank(130), 64, block=64, tags="ignored", note="three ignored, of NaN and infinities"),
        case(4, 100, 64, 7, ignored=(1, 3)),
        case(4, 70, 64, 2**40, ignored=(0, 2)),  # a target is int64
        case(3, 90, 128, -1, ignored=(0, 1, 2), note="all ignored"),
        _in_blocks(*make.unknown(70), 32, block=32, tags="special", note="with a NaN"),
    ]


def _in_place_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def case(
        x: Tensor, target: Tensor, block: int, *index: int, dloss: Tensor | None = None, tags: str = "", note: str = ""
    ) -> Case:
        _, lse = _cross_entropy(x, target, 0, *index)
        dloss = make.normal(len(x)) if dloss is None else dloss
        note = listed(note, *(f"ignore_index {value}" for value in index))
        return _in_blocks(x, target, lse, dloss, block, *index, block=block, tags=tags, note=note)

    def plain(
        M: int, V: int, block: int, *index: int, dtype: str = "float32", ignored: Iterable[int] = (), **more: Any
    ):
        tags = f"{more.pop('tags', '')}{' ignored' * bool(ignored)}"
        return case(
            make.normal(M, V, dtype=dtype), make.target(M, V, ignored, *index), block, *index, tags=tags, **more
        )

    def hard(V: int, block: int, dtype: str, upstream: int) -> Case:
        """upstream: which of the corners dloss is"""
        shown, dloss = make.upstream(make.torch.empty(17))[upstream]
        tags = "masked large strided" if upstream < 2 else "masked large"
        return case(*make.hard(V, dtype), block, dloss=dloss, tags=tags, note=f"hard rows, dloss {shown}")

    hot = make.normal(3, 96) + 200
    # A log-sum-exp that is 0, and not because the row is ignored.
    sure = make.normal(3, 70) - 200
    sure[make.torch.arange(3), make.torch.tensor([69, 0, 5])] = 0
    return [
        plain(1, 1, 64),
        plain(3, 64, 64),
        plain(5, 781, 128),
        plain(2, 1024, 256, dtype="float16"),
        plain(2, 1025, 256, dtype="bfloat16"),
        plain(24, 5, 32, dtype="bfloat16", tags="once"),
        hard(131, 64, "float32", 0),
        hard(131, 32, "float16", 1),
        hard(96, 128, "bfloat16", 2),
        plain(5, 96, 64, dloss=make.torch.tensor(0.2).expand(5), tags="strided", note="dloss expanded: stride 0"),
        plain(4, 128, 64, ignored=(1,), note="one ignored"),
        plain(4, 70, 64, 2**40, ignored=(0, 2)),
        plain(6, 65, 32, 65, ignored=(0, 4), dloss=make.normal(12)[::2], tags="strided", note="dloss with stride 2"),
        case(hot, make.target(3, 96, (0, 2), -1), 32, -1, tags="ignored hot", note="two ignored, around 200"),
        case(sure, make.torch.tensor([1, 2, IGNORE]), 64, tags="ignored sure", note="one ignored, lse 0 in all rows"),
        case(*make.unknown(70), 32, tags="special", note="with a NaN"),
    ]


def _one_launch_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def case(x: Tensor, target: Tensor, *index: int, tags: str = "", note: str = "") -> Case:
        scale = 1 / (target != (*index, IGNORE)[0]).sum().clamp(min=1)
        if note == "scale 0":
            scale = 0 * scale
        note = listed(note, *(f"ignore_index {value}" for value in index))
        return tensor_case(x, target, scale.float(), *index, tags=tags, note=note, tail=True)

    def plain(
        M: int, V: int, *index: int, dtype: str = "float32", ignored: Iterable[int] = (), tags: str = "", note: str = ""
    ) -> Case:
        tags = "ignored" if ignored else tags
        return case(make.normal(M, V, dtype=dtype), make.target(M, V, ignored, *index), *index, tags=tags, note=note)

    def hard(V: int, dtype: str = "float32") -> Case:
        return case(*make.hard(V, dtype), tags="masked large far-target", note="hard rows")

    return [
        case(*make.few(3, 2)),
        plain(1, 64),
        plain(5, 781),
        plain(2, 1024, dtype="float16"),
        plain(2, 1025, dtype="bfloat16"),
        plain(12, 5, dtype="bfloat16", tags="once"),
        hard(131),
        hard(97, "float16"),
        hard(64, "bfloat16"),
        plain(4, 100, ignored=(0, 2), note="two ignored"),
        plain(5, 37, -1, ignored=(1, 4), note="two ignored"),
        case(*make.blank(70), tags="ignored", note="three ignored, of NaN and infinities"),
        plain(4, 70, 2**40, ignored=(0, 2)),
        plain(2, 48, note="scale 0"),
        case(*make.unknown(50), tags="special", note="with a NaN"),
    ]


def _smoothing_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def case(
        x: Tensor, target: Tensor, smoothing: float, z_loss: float, *, upstream: int | None = None, tags="", note=""
    ) -> Case:
        """upstream: which of the corners dloss is; None: noise"""
        shown, dloss = (
            ("", make.normal(len(x))) if upstream is None else make.upstream(make.torch.empty(len(x)))[upstream]
        )
        note = listed(f"smoothing {smoothing:g}, z {z_loss:g}", note, f"dloss {shown}" if shown else "")
        tags += " smooth" * (smoothing > 0) + " z" * (z_loss > 0) + " strided" * (upstream in (0, 1))
        return tensor_case(x, target, smoothing, z_loss, dloss, tags=tags, note=note, tail=True)

    def plain(M: int, V: int, smoothing: float, z_loss: float, dtype: str = "float32", **more: Any) -> Case:
        x, target = make.few(M, V)
        return case(x.to(getattr(make.torch, dtype)), target, smoothing, z_loss, **more)

    def hard(V: int, dtype: str, *rest: float, **more: Any) -> Case:
        return case(*make.hard(V, dtype, masked=False), *rest, tags="large", note="hard rows", **more)

    return [
        plain(3, 2, 0.1, 0.0),
        plain(3, 64, 0.0, 0.0),
        plain(1, 64, 0.1, 0.0),
        plain(5, 781, 0.1, 0.0),
        plain(3, 64, 0.0, 0.01),
        plain(4, 100, 0.2, 0.01, upstream=2),
        plain(2, 1024, 0.1, 0.01, "float16"),
        plain(2, 1025, 0.2, 0.001, "bfloat16"),
        plain(12, 3, 0.9, 0.01, "bfloat16", tags="once"),
        hard(131, "float32", 0.1, 0.0, upstream=0),
        hard(97, "float16", 0.2, 0.01, upstream=1),
        hard(64, "bfloat16", 0.0, 0.0),
        plain(4, 50, 1.0, 0.0, upstream=0),
        case(*make.unknown(50), 0.1, 0.01, tags="special", note="with a NaN"),
    ]


def _column_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def tokens(
        M: int, D: int, V: int, chunk: int, scale: float = 1.0, note: str = "", dtype: str = "float64", column: int = -1
    ) -> Case:
        x, weight = make.normal(M, D).double() * scale, make.normal(V, D).double() / D**0.5
        column = rng.randrange(V) if column < 0 else column
        if note == "a class of negative logits":
            x, weight[column] = x.abs() + 1, -1 - weight[column].abs()
        x, weight = (tensor.to(getattr(make.torch, dtype)) for tensor in (x, weight))
        name = listed(f"{M} tokens, {V} classes, {chunk} tokens at a time", note, dtype * (dtype != "float64"))
        tags = "short-chunk" if M % chunk else ""
        return case(name, x, weight, make.indices(V, M), column, chunk, tags=tags)

    return [
        tokens(64, 8, 500, 4),
        tokens(60, 8, 400, 4, note="a class of negative logits"),
        tokens(41, 4, 600, 4),
        tokens(103, 8, 300, 5),
        tokens(63, 8, 300, 4, scale=500, note="large logits"),
        tokens(6, 8, 100, 8, note="the first class", column=0),
        tokens(1, 8, 100, 1, note="the last class", column=99),
        tokens(60, 4, 400, 1),  # a column of one row is contiguous, so that not every way to copy copies it
        tokens(60, 4, 400, 4, note="a class of negative logits", dtype="float32"),  # here .float() copies nothing
    ]


def _chunked_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def tokens(
        M: int, D: int, V: int, chunk: int, *index: int, ignored: Iterable[int] = (), scale: float = 1.0
    ) -> Case:
        x, weight = make.normal(M, D).double() * scale, make.normal(V, D).double() / D**0.5
        # Large logits of which two are nearly alike have no digits left to say by how much.
        while scale > 1 and bool((close := (x @ weight.T).topk(2).values.diff(dim=-1)[:, 0] > -40).any()):
            x[close] = make.normal(int(close.sum()), D).double() * scale
        target = make.indices(V, M)
        if index:
            target[target == index[0]] = (index[0] + 1) % V
        target[list(ignored)] = (*index, IGNORE)[0]
        shown = (f"ignore_index {value}" for value in index)
        name = listed(f"{M} tokens, {V} classes, {chunk} at a time", "some ignored" if ignored else "", *shown)
        tags = f"{'short-chunk' if M % chunk else ''} {'ignored' if ignored else ''}"
        tags += " large" * (scale > 1)
        return case(name, x, weight, target, chunk, *index, tags=tags)

    return [
        tokens(4, 8, 120, 4),
        tokens(60, 4, 400, 4),
        tokens(58, 4, 400, 4),
        tokens(60, 4, 300, 4, ignored=range(0, 40, 3)),
        tokens(65, 6, 300, 4, ignored=(1, 2, 3, 64)),
        tokens(60, 4, 400, 4, ignored=(0, 1, 2, 3)),  # a chunk of which nothing counts
        tokens(61, 4, 300, 4, 7, ignored=(5, 6, 40, 59)),
        tokens(30, 8, 300, 1, 299, ignored=(0, 29), scale=500),
        tokens(5, 6, 50, 8, ignored=(2,)),
        tokens(62, 4, 300, 4, 0, ignored=(3, 4, 5, 61)),
        tokens(96, 64, 6, 3),  # dx is larger than everything else that is needed
    ]


def _kl_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def case(
        x: Tensor, block: int, dtype: str = "float32", zeros: int = 0, upstream: int | None = None, note: str = ""
    ) -> Case:
        """zeros: every how many-th t is 0, or -1: all but one; upstream: which of the corners dloss is; None: noise"""
        x, t = x.log_softmax(-1), make.normal(*x.shape)
        if zeros > 0:
            t[:, ::zeros] = -float("inf")
        x, t = (each.to(getattr(make.torch, dtype)) for each in (x, t.softmax(-1)))
        if zeros < 0:
            t.zero_()[make.torch.arange(len(t)), make.indices(t.shape[-1], len(t))] = 1
        shown, dloss = (
            ("", make.normal(len(x))) if upstream is None else make.upstream(make.torch.empty(len(x)))[upstream]
        )
        tags = f"{'zero' if zeros else ''} {'strided' if upstream in (0, 1) else ''} {'once' if len(x) > 17 else ''}"
        tags += " special" * note.endswith("NaN")
        return _in_blocks(
            x, t, block, dloss, block=block, tags=tags, note=listed(note, f"dloss {shown}" if shown else "")
        )

    def faint() -> Case:
        """One class has nearly all of t, the others 1e-9 each: together they are a ten-thousandth of the loss."""
        x, t = make.torch.full((2, 4096), -8.0), make.torch.full((2, 4096), 2.0**-30)
        x[:, 1000], t[:, 1000] = -0.5, 1 - 4095 * 2.0**-30
        return _in_blocks(x, t, 1024, make.normal(2), block=1024, tags="faint", note="nearly all of t in one class")

    normal, rows = make.normal, make.rows
    return [
        case(normal(1, 1), 64),
        case(normal(3, 64), 64),
        case(normal(5, 781), 128),
        case(normal(2, 1024), 256, "float16"),
        case(normal(2, 1025), 256, "bfloat16"),
        case(normal(24, 5), 8, "bfloat16"),
        case(normal(3, 300), 64, zeros=2, note="every second t is 0"),
        case(normal(2, 100), 128, zeros=3, upstream=1, note="every third t is 0"),
        case(normal(4, 65), 32, zeros=-1, upstream=0, note="one t is 1"),
        case(rows(131), 64, zeros=2, upstream=0, note="hard rows"),
        case(rows(96), 128, "float16", zeros=3, upstream=2, note="hard rows"),
        faint(),
        case(make.stained(normal(3, 40)), 16, note="a row of NaN"),
    ]


# ----------------------------------------------------------------------- what a wrong idea computes, from float64 inputs
def _with_lse(of: Callable[[Tensor, int], Tensor]) -> Callable[..., tuple]:
    """What losses.cross_entropy gives when `of(x, BLOCK_V)` is taken for the log-sum-exp."""

    def gives(x: Tensor, target: Tensor, BLOCK_V: int, ignore_index: int = IGNORE) -> dict[str, Tensor]:
        loss, lse = _cross_entropy(x, target, BLOCK_V, ignore_index, of(x.float(), BLOCK_V))
        return {"y[0]": loss, "y[1]": lse}

    return gives


def _padded_with_zeros(x: Tensor, BLOCK_V: int) -> Tensor:
    from torch.nn.functional import pad

    return pad(x, (0, padding(x.shape[-1], BLOCK_V))).logsumexp(-1)


def _no_rescale(x: Tensor, BLOCK_V: int) -> Tensor:
    import torch

    m = torch.full((len(x),), -float("inf"))
    total = torch.zeros(len(x))
    for block in x.split(BLOCK_V, -1):
        m = torch.maximum(m, block.amax(-1))
        total += (block - m.where(m.isfinite(), m.new_zeros(()))[:, None]).exp().sum(-1)
    return m + total.log()


def _first_blocks(x: Tensor, BLOCK_V: int) -> Tensor:
    whole = x.shape[-1] // BLOCK_V * BLOCK_V
    if not whole:
        raise ValueError("no whole block")
    return x[:, :whole].logsumexp(-1)


def _first_blocks_or_none(x: Tensor, BLOCK_V: int) -> Tensor:
    """-inf where there is no whole block, the logarithm of a sum of nothing."""
    return x[:, : x.shape[-1] // BLOCK_V * BLOCK_V].logsumexp(-1)


def _loss_only(of: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    def gives(x: Tensor, target: Tensor, BLOCK_V: int, ignore_index: int = IGNORE) -> dict[str, Tensor]:
        wrong = _zero_if_ignored(of(x.float(), target, ignore_index), target, ignore_index)
        return {"y[0]": wrong, "y[1]": _cross_entropy(x, target, BLOCK_V, ignore_index)[1]}

    return gives


def _begins_with_minus_infinity(x: Tensor, target: Tensor, BLOCK_V: int, *_: int) -> Tensor:
    return x[:, :BLOCK_V].amax(-1) == -float("inf")


def _does_not_count(at: int) -> Callable[..., Tensor]:
    """Which rows are ignored; argument number `at`, if there is one, is ignore_index."""
    return lambda *args: args[1] == (args[at] if len(args) > at else IGNORE)


def _infinite_loss(evidence: Evidence) -> bool:
    return evidence.output in ("y", "y[0]") and bool(evidence.outputs.isposinf().any())


def _in_place_gives(of: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """`of(x, target, p, one_hot, dloss, BLOCK_V)` is what is in x afterwards where a row counts."""

    def gives(x: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, BLOCK_V: int, index: int = IGNORE):
        p = (x - lse[:, None]).exp()
        return {"x": _zero_if_ignored(of(x, target, p, _one_hot(x, target), dloss[:, None], BLOCK_V), target, index)}

    return gives


def _without_dloss(x: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, *rest: Any) -> tuple:
    return x, target, lse, 0 * dloss + 1, *rest


def _gradient_in_place(*args: Any) -> dict[str, Tensor]:
    return {"x": _gradient(*args)}


def _blocks_alone(x: Tensor, target: Tensor, p: Tensor, one_hot: Tensor, dloss: Tensor, BLOCK_V: int) -> Tensor:
    return (ideas.each_block(lambda block: block.softmax(-1), x, BLOCK_V) - one_hot) * dloss


def _lane_for_class(x: Tensor, target: Tensor, p: Tensor, one_hot: Tensor, dloss: Tensor, BLOCK_V: int) -> Tensor:
    import torch

    return (p - (torch.arange(x.shape[-1]) % BLOCK_V == target[:, None]).double()) * dloss


def _some_blocks(count: Callable[[int, int], int]) -> Callable[..., Tensor]:
    """The first `count(V, BLOCK_V)` blocks of a row become gradient, the rest stays."""

    def of(x: Tensor, target: Tensor, p: Tensor, one_hot: Tensor, dloss: Tensor, BLOCK_V: int) -> Tensor:
        done = count(x.shape[-1], BLOCK_V) * BLOCK_V
        out = x.clone()
        out[:, :done] = ((p - one_hot) * dloss)[:, :done]
        return out

    return of


def _left_in_place(
    x: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, BLOCK_V: int, ignore_index: int = IGNORE
) -> dict[str, Tensor]:
    counts = (target != ignore_index)[:, None]
    return {"x": _gradient(x, target, lse, dloss, BLOCK_V, ignore_index).where(counts, x)}


def _loss_gives(of: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """The right gradient in x, and `of(x, target, scale)` for the losses of the rows that count."""

    def gives(x: Tensor, target: Tensor, scale: Tensor, index: int = IGNORE) -> dict[str, Tensor]:
        loss = _zero_if_ignored(of(x, target, scale, index), target, index)
        return {"y": loss, "x": _loss_and_gradient(x, target, scale, index)[1]}

    return gives


def _gradient_is_right(evidence: Evidence) -> bool:
    """Of a loss that is wrong."""
    import torch

    _, right = _loss_and_gradient(*(x.double() if i in (0, 2) else x for i, x in enumerate(evidence.case.args)))
    yours = evidence.first.reply.outputs["x"].double()
    return bool(torch.allclose(yours, right, rtol=0.01, atol=0.01 * float(right.nan_to_num().abs().max())))


def _reads_its_gradient(x: Tensor, target: Tensor, scale: Tensor, ignore_index: int) -> Tensor:
    _, dx = _loss_and_gradient(x, target, scale, ignore_index)
    return x.logsumexp(-1) - _at_target(dx, target, ignore_index)


def _smoothed_gives(
    loss: Callable[..., Tensor] | None = None, dx: Callable[..., Tensor] | None = None
) -> Callable[..., dict[str, Tensor]]:
    """What y and dx are when `loss` or `dx` of (x, lse, one_hot, smoothing, z_loss) take the place of the right ones."""

    def gives(x: Tensor, target: Tensor, smoothing: float, z_loss: float, dy: Tensor) -> dict[str, Tensor]:
        about = x, x.logsumexp(-1), _one_hot(x, target), smoothing, z_loss
        found = {}
        if loss is not None:
            found["y"] = loss(*about)
            if found["y"].allclose(_smoothed(x, target, smoothing, z_loss), rtol=1e-6):
                raise ValueError("here the wrong idea makes no difference")
        if dx is not None:
            found["dx"] = dx(*about) * dy[:, None]
        return found

    return gives


def _softmax_part(x: Tensor, lse: Tensor, z_loss: float) -> Tensor:
    return x.softmax(-1) * (1 + 2 * z_loss * lse[:, None])


def _loss_of(weights: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(x: Tensor, lse: Tensor, one_hot: Tensor, smoothing: float, z_loss: float) -> Tensor:
        return lse - (weights(one_hot, smoothing, x.shape[-1]) * x).sum(-1) + z_loss * lse**2

    return loss


def _dx_of(weights: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def dx(x: Tensor, lse: Tensor, one_hot: Tensor, smoothing: float, z_loss: float) -> Tensor:
        return _softmax_part(x, lse, z_loss) - weights(one_hot, smoothing, x.shape[-1])

    return dx


def _weights(one_hot: Tensor, smoothing: float, V: int) -> Tensor:
    return (1 - smoothing) * one_hot + smoothing / V


def _spread_over_others(one_hot: Tensor, smoothing: float, V: int) -> Tensor:
    return (1 - smoothing) * one_hot + smoothing / max(V - 1, 1) * (1 - one_hot)


def _too_heavy(one_hot: Tensor, smoothing: float, V: int) -> Tensor:
    return one_hot + smoothing / V


def _without_the_targets_share(one_hot: Tensor, smoothing: float, V: int) -> Tensor:
    return (1 - smoothing) * one_hot + smoothing / V * (1 - one_hot)


def _padded_mean(one_hot: Tensor, smoothing: float, V: int) -> Tensor:
    return (1 - smoothing) * one_hot + smoothing / (V + padding(V))


def _evaluated(
    x: Tensor, weight: Tensor, target: Tensor, column: int, chunk: int, *, combine: str = "sum", rows: int | None = None
) -> list[float]:
    """The right numbers, or those of a wrong idea.

    combine  "means": the loss is the mean of the chunks' means; "watched": the class's mean is; "total": the loss is a sum;
             "from zero": the largest logit is never below 0; "of means": the class's numbers are those of the chunks' means
    rows     how many of them count
    """
    from torch.nn.functional import cross_entropy

    x, target = x[:rows], target[:rows]
    logits = x @ weight.T
    losses = cross_entropy(logits, target, reduction="none")
    if combine == "means":
        means = [part.mean().item() for part in losses.split(chunk)]
        loss = sum(means) / len(means)
    else:
        loss = losses.sum().item() / (1 if combine == "total" else len(losses))
    watched = logits[:, column]
    means = [part.mean().item() for part in watched.split(chunk)]
    if combine == "of means":
        return [loss, sum(means) / len(means), max(means)]
    mean = sum(means) / len(means) if combine == "watched" else 0
    largest = max(0.0, watched.max().item()) if combine == "from zero" else watched.max().item()
    return [loss, mean or watched.mean().item(), largest]


def _without_the_remainder(x: Tensor, weight: Tensor, target: Tensor, column: int, chunk: int) -> list[float]:
    rows = len(x) // chunk * chunk or len(x)
    loss, mean, largest = _evaluated(x, weight, target, column, chunk, rows=rows)
    return [loss * rows / len(x), mean, largest]


def _linear(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    chunk: int,
    ignore_index: int = IGNORE,
    *,
    divisor: str = "count",
    gradients: str = "",
    empty: tuple[int, int] = (1, 1),
    ignored: str = "nothing",
    keep: str = "sum",
    index: str = "given",
) -> list[Any]:
    """Loss, dx and dweight, or those of a wrong idea.

    divisor  "count": all that counts; "tokens": all rows; "chunk": what counts in a chunk; "means": that, and the chunks;
             "rows": that, and its share of the rows; "none": nothing
    gradients  the divisor of the gradients, where it is another
    empty    what is counted in a chunk of which nothing counts, for its loss and for its gradients; 0 makes NaN of them.
             PyTorch's mean makes NaN of the loss and 0 of the gradients.
    ignored  what an ignored row's gradient is: "nothing", "softmax", or "wraps", where a negative index counts from the end
    keep     "sum" of the chunks' dweight, or the "last"
    index    which ignore_index counts: the "given" one, or -100 "always"
    """
    import torch

    if index == "always":
        ignore_index = IGNORE

    def count(counts: Tensor, divisor: str, least: int) -> float:
        among = max(least, int(counts.sum()))
        return {
            "count": int((target != ignore_index).sum()),
            "tokens": len(x),
            "chunk": among,
            "means": among * cdiv(len(x), chunk),
            "rows": among * len(x) / len(counts),
            "none": 1,
        }[divisor]

    loss, dxs, dweight = 0.0, [], torch.zeros_like(weight)
    for part, wanted in zip(x.split(chunk), target.split(chunk), strict=True):
        counts = wanted != ignore_index
        logits = part @ weight.T
        losses = _zero_if_ignored(logits.logsumexp(-1) - _at_target(logits, wanted, ignore_index), wanted, ignore_index)
        dlogits = logits.softmax(-1)
        hot = _one_hot(logits, wanted % logits.shape[-1]) * (1 if ignored == "wraps" else counts[:, None])
        dlogits = (dlogits - hot) * (counts[:, None] if ignored == "nothing" else 1)
        dlogits /= count(counts, gradients or divisor, empty[1])
        loss += (losses.sum() / count(counts, divisor, empty[0])).item()
        dxs.append(dlogits @ weight)
        dweight = dlogits.T @ part + (dweight if keep == "sum" else 0)
    return [loss, torch.cat(dxs), dweight]


def _linear_gives(**idea: Any) -> Callable[..., list[Any]]:
    return lambda *args: _linear(*args, **idea)


def _remainder_lost(evidence: Evidence) -> bool:
    """The loss lacks the last chunk wherever that is shorter, and is right elsewhere."""

    def short(x: Tensor, weight: Tensor, target: Tensor, chunk: int, index: int = IGNORE) -> float:
        rows, count = len(x) // chunk * chunk, (target != index).sum().item()
        kept = (target[:rows] != index).sum().item()
        return _linear(x[:rows], weight, target[:rows], chunk, index)[0] * kept / count if kept else 0.0

    losses = [(outcome.reply.output[0], short(*outcome.case.args)) for outcome in evidence.outcomes]
    return only("short-chunk")(evidence) and all(abs(got - gives) <= 1e-6 * abs(gives) for got, gives in losses)


def _kl_gives(loss: Callable[..., Tensor] | None = None, dx: Callable[..., Tensor] | None = None):
    """What y and dx are when `loss` or `dx` of (x, t) take the place of the right ones."""

    def gives(x: Tensor, t: Tensor, BLOCK_V: int, dy: Tensor) -> dict[str, Tensor]:
        found = {} if loss is None else {"y": loss(x, t)}
        return found if dx is None else found | {"dx": dx(x, t) * dy[:, None]}

    return gives


def _kl_from(least: float, x: Tensor, t: Tensor) -> Tensor:
    """The divergence without the terms of probabilities up to `least`."""
    return (t.xlogy(t) - t * x).where(t > least, 0 * t).sum(-1)


# ----------------------------------------------------------------------------------------------------- memory that is held
_CHUNKS = 7  # of logits and their gradients, at any time


def _chunk(case: Case, chunk_at: int) -> int:
    """Tokens. chunk_at: which argument says how many."""
    return min(case.args[chunk_at], len(case.args[0]))


def _memory_rule(case: Case, peak_bytes: int, chunk_at: int, beside: Callable[[Case], int]) -> tuple[str, str] | None:
    """Some chunks of logits, and `beside` bytes of other tensors."""
    x, weight, *_ = case.args
    a_token = len(weight) * x.element_size()
    a_chunk, logits = _chunk(case, chunk_at) * a_token, len(x) * a_token
    more = peak_bytes - beside(case)
    if more <= _CHUNKS * a_chunk:
        return None
    if x.nbytes > 4 * logits:  # more than all that could be made of them
        return "dx-twice", (
            f"it held {peak_bytes / 1024:,.1f} KiB at once. x takes {x.nbytes / 1024:,.1f} KiB, dx as much, and all logits "
            f"together {logits / 1024:,.1f}. What do you hold beside dx that grows with x: a copy of x, the parts of dx while "
            "they are put together, or the gradient of a slice of x, which is as large as x?"
        )
    held = f"it held {peak_bytes / 1024:,.0f} KiB at once. A chunk of logits takes {a_chunk / 1024:,.0f} KiB, "
    held += f"all logits take {logits / 1024:,.0f}"
    if more > 1.5 * logits:
        return "all-at-once", f"{held}. What keeps the first chunk, or its graph, alive while the last one is made?"
    return (
        "something-kept",
        f"{held}. Beside what other tensors may take, that is {more / a_chunk:.0f} chunks, and {_CHUNKS} are allowed. What keeps "
        "earlier chunks alive: a name, a list, a view, a graph that waits for backward? Or which tensor exists more often "
        "than it has to?",
    )


def _beside_watched(case: Case) -> int:
    """Some of the tensors that have no tokens in them, and of those that have tokens but no classes."""
    x, weight, *_ = case.args
    return 3 * weight.nbytes + 3 * x.nbytes


def _beside_dx(case: Case) -> int:
    """dx, tensors as large as weight, chunks of x, numbers per token."""
    x, weight, *_ = case.args
    return x.nbytes + 4 * weight.nbytes + (4 * _chunk(case, 3) * x.shape[1] + 2 * len(x)) * x.element_size()


def _largest_rule(case: Case, largest_bytes: int) -> tuple[str, str] | None:
    """No tensor of much more than a chunk of logits, but for those that have no tokens or no classes."""
    x, weight, *_ = case.args
    a_chunk = _chunk(case, 3) * len(weight) * x.element_size()
    if largest_bytes <= 1.5 * max(a_chunk, x.nbytes, weight.nbytes):
        return None
    return "chunk-too-large", (
        f"its largest tensor has {largest_bytes / 1024:,.1f} KiB; the logits of `chunk` tokens are {a_chunk / 1024:,.1f}. How many "
        "tokens does one chunk hold?"
    )


def _far_dloss(M: int) -> Imaginary:
    """A column of a matrix [M, 65536]: its last numbers, too, lie beyond 2^31 elements."""
    return far(M, dtype="float32", gap=65536)


# ---------------------------------------------------------------------------------------------- losses.cross_entropy
def _huge_cross_entropy() -> tuple:
    import torch

    return far(81920, 65536), torch.zeros(81920, dtype=torch.int64), 8192


CROSS_ENTROPY = KernelExercise(
    id="losses.cross_entropy",
    function="cross_entropy",
    returns=("loss", "lse"),
    cases=_cross_entropy_cases,
    reference=_cross_entropy,
    huge=_huge_cross_entropy,
    traffic=Traffic(  # of a row its target, and one logit once more
        reads=lambda x, *_: nbytes(x) + 16 * len(x), writes=lambda x, *_: 8 * len(x), memory=lambda x, *_: 8 * len(x)
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("faint-logits", when=only("faint")),
        Misconception("not-low-enough", when=only("low")),
        Misconception("tail-mask", gives=_with_lse(_padded_with_zeros)),
        Misconception("no-max-subtraction", gives=_with_lse(lambda x, _: x.exp().sum(-1).log())),
        Misconception("no-max-subtraction", gives=_with_lse(lambda x, _: x.double().exp().sum(-1).log().float())),
        Misconception("no-rescale", gives=_with_lse(_no_rescale)),
        Misconception("tail-block", gives=_with_lse(_first_blocks)),
        Misconception("tail-block", gives=_with_lse(_first_blocks_or_none)),
        Misconception("factor", when=lambda evidence: evidence.kind == "nan" and len(evidence.passed) < 2),
        Misconception("first-block-only", gives=_with_lse(lambda x, BLOCK_V: x[:, :BLOCK_V].logsumexp(-1))),
        Misconception("maximum-left-out", gives=_with_lse(lambda x, _: (x - x.amax(-1, keepdim=True)).logsumexp(-1))),
        Misconception("probability-first", when=_infinite_loss),
        Misconception(
            "sign", gives=_loss_only(lambda x, target, ignore: _at_target(x, target, ignore) - x.logsumexp(-1))
        ),
        Misconception("times-zero", when=only_rows(_does_not_count(3), "nan")),
        Misconception("inf-minus-inf", when=only_rows(_begins_with_minus_infinity, "nan")),
        Misconception("ignored-rows", when=only_rows(_does_not_count(3))),
    ),
)


# --------------------------------------------------------------------------------------------------- losses.in_place
def _huge_in_place() -> tuple:
    import torch

    # More rows than one axis of a grid may have.
    return (
        far(70_000, 65536),
        torch.zeros(70_000, dtype=torch.int64),
        far(70_000, dtype="float32"),
        _far_dloss(70_000),
        8192,
    )


IN_PLACE = KernelExercise(
    id="losses.in_place",
    function="cross_entropy_backward_",
    cases=_in_place_cases,
    reference=_gradient,
    huge=_huge_in_place,
    in_place=(0,),
    traffic=Traffic(  # target, log-sum-exp and dloss once for each program
        reads=lambda x, target, lse, dloss, BLOCK_V, *_: nbytes(x) + 16 * len(x) * cdiv(x.shape[-1], BLOCK_V),
        writes=1,
        memory=0,
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("class-number", gives=_in_place_gives(_lane_for_class)),
        Misconception("no-one-hot", gives=_in_place_gives(lambda x, target, p, one_hot, dloss, _: p * dloss)),
        Misconception("sign", gives=_in_place_gives(lambda x, target, p, one_hot, dloss, _: (one_hot - p) * dloss)),
        Misconception("upstream", gives=ideas.On(_without_dloss, _gradient_in_place)),
        Misconception(
            "one-hot-outside", gives=_in_place_gives(lambda x, target, p, one_hot, dloss, _: p * dloss - one_hot)
        ),
        Misconception("block-alone", gives=_in_place_gives(_blocks_alone)),
        Misconception("blocks-left-over", gives=_in_place_gives(_some_blocks(lambda V, block: 1))),
        Misconception("blocks-left-over/2", gives=_in_place_gives(_some_blocks(lambda V, block: V // block))),
        Misconception("infinity-times-zero", when=only_rows(_does_not_count(5), "nan")),
        Misconception("exp-of-a-logit", when=only_rows(lambda x, target, lse, *_: lse.abs() > 80, "nan")),
        Misconception("counted-by-lse", when=lambda evidence: evidence.tag("sure")),
        Misconception("ignored-rows", gives=_left_in_place),
        Misconception("ignored-rows/2", when=only_rows(_does_not_count(5))),
    ),
)


# ------------------------------------------------------------------------------------------------- losses.one_launch
def _huge_one_launch() -> tuple:
    import torch

    return far(81920, 65536), torch.zeros(81920, dtype=torch.int64), torch.ones(())


def _minus_infinity(x: Tensor, *_: Any) -> Tensor:
    """Of each row whether a lane holds -inf, past its end or within."""
    return x.isneginf().any(-1) | (ideas.padding(x.shape[-1]) > 0)


ONE_LAUNCH = KernelExercise(
    id="losses.one_launch",
    function="loss_and_gradient_",
    returns=("loss",),
    cases=_one_launch_cases,
    reference=_loss_and_gradient,
    huge=_huge_one_launch,
    in_place=(0,),
    traffic=Traffic(  # of a row its target, the scale, and one logit once more
        reads=lambda x, *_: nbytes(x) + 20 * len(x),
        writes=lambda x, *_: nbytes(x) + 4 * len(x),
        memory=lambda x, *_: 4 * len(x),
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception(
            "scaled-loss",
            gives=_loss_gives(lambda x, target, scale, index: _cross_entropy(x, target, 0, index)[0] * scale),
        ),
        Misconception("probability-first", when=_infinite_loss),
        Misconception("read-after-write", gives=_loss_gives(_reads_its_gradient)),
        Misconception("tail-mask", when=lambda evidence: evidence.tag("tail")),
        Misconception(
            "read-after-write/2",
            when=lambda evidence: (
                evidence.output == "y"
                and evidence.kind == "values"
                and len(evidence.failed) > 5
                and _gradient_is_right(evidence)
            ),
        ),
        Misconception("times-zero", when=only_rows(_does_not_count(3), "nan")),
        Misconception("infinity-times-zero", when=only_rows(_minus_infinity, "nan")),
        Misconception(
            "no-one-hot",
            gives=lambda x, target, scale, index=IGNORE: {"x": _zero_if_ignored(x.softmax(-1) * scale, target, index)},
        ),
        Misconception("ignored-rows", when=only_rows(_does_not_count(3))),
    ),
)


# -------------------------------------------------------------------------------------------------- losses.smoothing
def _huge_smoothing() -> tuple:
    import torch

    return far(81920, 65536), torch.zeros(81920, dtype=torch.int64), 0.1, 0.0, _far_dloss(81920)


def _z_without_dloss(x: Tensor, target: Tensor, smoothing: float, z_loss: float, dy: Tensor) -> dict[str, Tensor]:
    """The gradient of the z-loss, added after the rest was multiplied by dloss."""
    lse, one_hot = x.logsumexp(-1), _one_hot(x, target)
    plain = _dx_of(_weights)(x, lse, one_hot, smoothing, 0) * dy[:, None]
    return {"dx": plain + 2 * z_loss * lse[:, None] * x.softmax(-1)}


SMOOTHING = KernelExercise(
    id="losses.smoothing",
    function="smoothed_cross_entropy",
    cases=_smoothing_cases,
    reference=_smoothed,
    huge=_huge_smoothing,
    gradients=1,
    traffic=Traffic(  # of a row and pass its target and one logit once more; log-sum-exp there and back, dloss
        reads=lambda x, *_: 2 * nbytes(x) + 40 * len(x),
        writes=lambda x, *_: nbytes(x) + 8 * len(x),
        launches=2,
        saved=lambda x, target, *_: nbytes(x, target) + 4 * len(x),
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("spread-over-the-others", gives=_smoothed_gives(_loss_of(_spread_over_others))),
        Misconception("weights-add-up", gives=_smoothed_gives(_loss_of(_too_heavy))),
        Misconception("weights-add-up/4", gives=_smoothed_gives(_loss_of(_without_the_targets_share))),
        Misconception("mean-over-padding", gives=_smoothed_gives(_loss_of(_padded_mean))),
        Misconception("no-smoothing", gives=_smoothed_gives(_loss_of(lambda one_hot, smoothing, V: one_hot))),
        Misconception(
            "z-of-the-wrong-thing",
            gives=_smoothed_gives(lambda x, lse, hot, s, z: _loss_of(_weights)(x, lse, hot, s, 0) + z * lse),
        ),
        Misconception(
            "z-of-the-wrong-thing/2",
            gives=_smoothed_gives(lambda x, lse, hot, s, z: _loss_of(_weights)(x, lse, hot, s, 0)),
        ),
        Misconception(
            "padding-inf",
            when=lambda evidence: (
                evidence.output == "y" and only("tail")(evidence) and not bool(evidence.outputs.isfinite().any())
            ),
        ),
        Misconception(
            "z-gradient", gives=_smoothed_gives(dx=lambda x, lse, hot, s, z: _dx_of(_weights)(x, lse, hot, s, 0))
        ),
        Misconception(
            "z-gradient/2", gives=_smoothed_gives(dx=lambda x, lse, hot, s, z: _dx_of(_weights)(x, lse, hot, s, z / 2))
        ),
        Misconception(
            "z-gradient/3",
            gives=_smoothed_gives(
                dx=lambda x, lse, hot, s, z: _dx_of(_weights)(x, lse, hot, s, 0) + 2 * z * lse[:, None]
            ),
        ),
        Misconception("hard-gradient", gives=_smoothed_gives(dx=_dx_of(lambda one_hot, smoothing, V: one_hot))),
        Misconception("weights-add-up/2", gives=_smoothed_gives(dx=_dx_of(_too_heavy))),
        Misconception("weights-add-up/2", gives=_smoothed_gives(dx=_dx_of(_without_the_targets_share))),
        Misconception(
            "weights-add-up/3",
            gives=_smoothed_gives(dx=_dx_of(lambda one_hot, smoothing, V: (1 - smoothing) * one_hot)),
        ),
        Misconception(
            "upstream",
            gives=lambda x, target, s, z, dy: {"dx": _dx_of(_weights)(x, x.logsumexp(-1), _one_hot(x, target), s, z)},
        ),
        Misconception("upstream", gives=_z_without_dloss),
    ),
)


# ----------------------------------------------------------------------------------------------------- losses.column
COLUMN = FunctionExercise(
    id="losses.column",
    function="evaluate",
    cases=_column_cases,
    expected=_evaluated,
    returns=("the mean loss", "the mean logit", "the largest logit"),
    tolerance=1e-6,
    memory_rule=partial(_memory_rule, chunk_at=4, beside=_beside_watched),
    misconceptions=(
        Misconception("mean-of-means", gives=lambda *args: _evaluated(*args, combine="means")),
        Misconception("last-chunk", gives=_without_the_remainder),
        Misconception("no-mean", gives=lambda *args: _evaluated(*args, combine="total")),
        Misconception("mean-of-means/2", gives=lambda *args: _evaluated(*args, combine="watched")),
        Misconception("from-zero", gives=lambda *args: _evaluated(*args, combine="from zero")),
        Misconception("largest-of-means", gives=lambda *args: _evaluated(*args, combine="of means")),
    ),
)


# ---------------------------------------------------------------------------------------------------- losses.chunked
CHUNKED = FunctionExercise(
    id="losses.chunked",
    function="linear_cross_entropy",
    cases=_chunked_cases,
    expected=_linear,
    returns=("loss", "dx", "dweight"),
    tolerance=1e-6,
    memory_rule=partial(_memory_rule, chunk_at=3, beside=_beside_dx),
    largest_rule=_largest_rule,
    misconceptions=(
        Misconception("last-chunk", when=_remainder_lost),
        *(
            Misconception(label, gives=_linear_gives(divisor=divisor, empty=empty))
            for label, divisor in (("mean-of-means", "means"), ("mean-of-means", "rows"), ("chunk-mean", "chunk"))
            for empty in ((1, 1), (0, 0), (0, 1))
        ),
        Misconception("no-mean", gives=_linear_gives(divisor="none")),
        Misconception("sum-gradient", gives=_linear_gives(gradients="none")),
        Misconception("minus-100-only", gives=_linear_gives(index="always")),
        Misconception("ignored-in-the-mean", gives=_linear_gives(divisor="tokens")),
        Misconception("ignored-rows", gives=_linear_gives(ignored="softmax")),
        Misconception("ignored-index", gives=_linear_gives(ignored="wraps")),
        Misconception("last-one-only", gives=_linear_gives(keep="last")),
        Misconception("overflow", when=lambda evidence: evidence.tag("large")),
        Misconception("empty-chunk", when=lambda evidence: any("nan" in repr(part) for part in evidence.outputs)),
    ),
)


# --------------------------------------------------------------------------------------------------------- losses.kl
KL = KernelExercise(
    id="losses.kl",
    function="kl_div",
    cases=_kl_cases,
    reference=_kl,
    huge=lambda: (far(81920, 65536), far(81920, 65536), 8192, _far_dloss(81920)),
    gradients=1,
    traffic=Traffic(
        reads=lambda x, *_: 3 * nbytes(x) + 4 * len(x),
        writes=lambda x, *_: nbytes(x) + 4 * len(x),
        launches=2,
        saved=1,
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("zero-log-zero", when=only_rows(lambda x, t, *_: (t == 0).any(-1), "nan")),
        Misconception(
            "padding-log",
            when=lambda evidence: evidence.kind == "nan" and evidence.output == "y" and bool(evidence.passed),
        ),
        Misconception("log-of-a-logarithm", when=lambda evidence: evidence.kind == "nan" and evidence.output == "y"),
        Misconception("swapped", gives=_kl_gives(lambda x, t: (x.exp() * (x - t.log())).sum(-1))),
        Misconception("no-entropy", gives=_kl_gives(lambda x, t: -(t * x).sum(-1))),
        Misconception("log-of-a-logarithm", gives=_kl_gives(lambda x, t: (t.xlogy(t) - t * x.exp()).sum(-1))),
        Misconception(
            "log-of-a-logarithm", gives=_kl_gives(lambda x, t: (t * (t.log() - x.log())).where(t > 0, t).sum(-1))
        ),
        Misconception("mean-for-sum", gives=_kl_gives(lambda x, t: _kl(x, t) / x.shape[-1])),
        *(  # 1 + eps as float32 has it
            Misconception(
                "epsilon",
                gives=_kl_gives(lambda x, t, eps=10.0**-k: (t * ((t + eps).float().log().double() - x)).sum(-1)),
            )
            for k in range(2, 13)
        ),
        *(
            Misconception("threshold", gives=_kl_gives(lambda x, t, least=10.0**-k: _kl_from(least, x, t)))
            for k in range(1, 9)
        ),
        Misconception("threshold", when=only("faint")),
        Misconception("sign", gives=_kl_gives(dx=lambda x, t: t)),
        Misconception("softmax-gradient", gives=_kl_gives(dx=lambda x, t: x.exp() - t)),
        Misconception("upstream", gives=lambda x, t, BLOCK_V, dy: {"dx": -t}),
    ),
)


EXERCISES = (CROSS_ENTROPY, IN_PLACE, ONE_LAUNCH, SMOOTHING, COLUMN, CHUNKED, KL)
