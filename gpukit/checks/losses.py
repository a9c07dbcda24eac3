"""The exercises of notebook 15: cases, bounds on traffic and memory, and what each wrong idea computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.accounting.tiling import cdiv
from gpukit.grading import ideas
from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only, padding
from gpukit.grading.inputs import Inputs, case, far, listed, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence

IGNORE = -100


# ------------------------------------------------------------------------------------------------------------ inputs
class _Inputs(Inputs):
    def target(self, M: int, V: int, ignored: Iterable[int] = (), index: int = IGNORE) -> Tensor:
        target = self.integers(0, V, M)
        target[list(ignored)] = index
        return target

    def large(self, M: int, V: int) -> tuple[Tensor, Tensor]:
        """Logits around 300 and -300, where exp is too much or nothing; the first target is far below its row, so its
        loss is as large as the logits and allows all rows the rounding of such numbers."""
        x, target = self.normal(M, V), self.target(M, V)
        x[: M // 2] += 300
        x[M // 2 :] -= 300
        x[0, target[0]] = 0
        return x, target

    def few(self, M: int, V: int) -> tuple[Tensor, Tensor]:
        """Few classes; each target is the least likely, the first by far: a loss or gradient of almost nothing would allow
        no rounding at all."""
        x = self.normal(M, V)
        target = x.argmin(-1)
        x[0, target[0]] -= 16
        return x, target

    def masked(self, M: int, V: int, first: int) -> tuple[Tensor, Tensor]:
        """Rows that begin with `first` logits of -inf."""
        x, target = self.normal(M, V), self.target(M, V).clamp_(min=first)
        x[:, :first] = -float("inf")
        return x, target


def _in_blocks(x: Tensor, *rest: Any, block: int, tags: str = "", note: str = "") -> Case:
    tags += " long" * (x.shape[-1] > block) + " partial" * (x.shape[-1] % block > 0)
    return tensor_case(x, *rest, tags=tags, note=listed(f"BLOCK_V {block}", note), tail=True)


# -------------------------------------------------------------------------------------------------------- references
def _wide(x: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32."""
    return x if x.dtype.itemsize == 8 else x.float()


def _at_target(x: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Tensor:
    return x.gather(-1, target.where(target != ignore_index, target.new_zeros(()))[:, None])[:, 0]


def _one_hot(x: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Tensor:
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


def _gradient(x: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, BLOCK_V: int = 0) -> Tensor:
    wide = _wide(x)
    dx = ((wide - lse[:, None]).exp() - _one_hot(wide, target)) * dloss[:, None]
    return _zero_if_ignored(dx, target).to(x.dtype)


def _loss_and_gradient(x: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    loss, _ = _cross_entropy(x, target)
    return loss, _gradient(x, target, _wide(x).logsumexp(-1), scale.expand(len(x)))


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

    def case(M: int, V: int, block: int, *rest: int, dtype: str = "float32", ignored=(), index: int = IGNORE, note=""):
        x, target = make.normal(M, V, dtype=dtype), make.target(M, V, ignored, index)
        return _in_blocks(x, target, block, *rest, block=block, tags="ignored" if ignored else "", note=note)

    # To 840: where the maximum is not taken off, the exponential is infinite in float64 as well. The targets are in the
    # first block: in the last one little of lse - x[target] would be left, and chance would refuse right answers.
    rising = make.normal(2, 512) + make.torch.arange(512.0) // 64 * 120
    far = make.normal(2, 300), make.target(2, 300)
    far[0][[0, 1], far[1]] = -200
    return [
        _in_blocks(*make.few(3, 2), 64, block=64),
        case(3, 64, 64),
        case(5, 781, 128),
        case(2, 1024, 256, dtype="float16"),
        case(2, 1025, 256, dtype="bfloat16"),
        _in_blocks(*make.large(8, 200), 64, block=64, tags="large", note="around 300 and -300"),
        _in_blocks(rising, make.target(2, 64), 64, block=64, note="rising by 120 a block"),
        _in_blocks(*make.masked(3, 300, 130), 64, block=64, tags="masked", note="-inf at first"),
        _in_blocks(*far, 64, block=64, tags="far-target", note="targets 200 below the rest"),
        case(4, 256, 64, ignored=(2,), note="one ignored"),
        case(4, 100, 64, 7, ignored=(1,), index=7, note="ignore_index 7"),
        case(3, 90, 128, ignored=(0, 1, 2), note="all ignored"),
    ]


def _in_place_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def case(
        x: Tensor, target: Tensor, block: int, dloss: Tensor | None = None, tags: str = "", note: str = ""
    ) -> Case:
        _, lse = _cross_entropy(x, target)
        dloss = make.normal(len(x)) if dloss is None else dloss
        return _in_blocks(x, target, lse, dloss, block, block=block, tags=tags, note=note)

    def plain(M: int, V: int, block: int, dtype: str = "float32", **more: Any) -> Case:
        return case(make.normal(M, V, dtype=dtype), make.target(M, V), block, **more)

    mean = make.torch.tensor(0.2).expand(5)
    hot = make.normal(3, 96) + 200
    return [
        plain(1, 1, 64),
        plain(3, 64, 64),
        plain(2, 512, 128),
        plain(5, 781, 128),
        plain(2, 1024, 256, dtype="float16"),
        plain(2, 1025, 256, dtype="bfloat16"),
        case(*make.large(4, 200), 64, tags="large", note="around 300 and -300"),
        case(*make.masked(2, 200, 70), 64, tags="masked", note="-inf at first"),
        plain(5, 96, 64, dloss=make.normal(10)[::2], tags="strided", note="dloss with stride 2"),
        plain(5, 96, 64, dloss=mean, tags="strided", note="dloss expanded: stride 0"),
        case(make.normal(4, 128), make.target(4, 128, (1,)), 64, tags="ignored", note="one ignored"),
        case(hot, make.target(3, 96, (0, 2)), 32, tags="ignored hot", note="two ignored, around 200"),
    ]


def _one_launch_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def case(x: Tensor, target: Tensor, tags: str = "", note: str = "") -> Case:
        scale = 1 / (target != IGNORE).sum().clamp(min=1)
        return tensor_case(x, target, scale.float(), tags=tags, note=note, tail=True)

    def plain(M: int, V: int, dtype: str = "float32") -> Case:
        return case(make.normal(M, V, dtype=dtype), make.target(M, V))

    far = make.normal(2, 128), make.target(2, 128)
    far[0][[0, 1], far[1]] = -200
    return [
        case(*make.few(3, 2)),
        plain(3, 64),
        plain(5, 781),
        plain(2, 1024, "float16"),
        plain(2, 1025, "bfloat16"),
        plain(2, 4096),
        case(*make.large(4, 200), tags="large", note="around 300 and -300"),
        case(*make.masked(2, 200, 70), tags="masked", note="-inf at first"),
        case(*far, tags="far-target", note="targets 200 below the rest"),
        case(make.normal(4, 100), make.target(4, 100, (0, 2)), tags="ignored", note="two ignored"),
    ]


def _smoothing_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def case(M: int, V: int, smoothing: float, z_loss: float, dtype="float32", tags="", dloss=None, shift=0.0) -> Case:
        x, target = make.few(M, V)
        x = (x + shift).to(getattr(make.torch, dtype))
        dloss = make.normal(M) if dloss is None else dloss
        note = listed(f"smoothing {smoothing:g}, z {z_loss:g}", "dloss expanded: stride 0" if "strided" in tags else "")
        tags += " smooth" * (smoothing > 0) + " z" * (z_loss > 0)
        return tensor_case(x, target, smoothing, z_loss, dloss, tags=tags, note=note, tail=True)

    quarter = make.torch.tensor(0.25).expand(4)
    return [
        case(3, 2, 0.1, 0.0),
        case(3, 64, 0.0, 0.0),
        case(3, 64, 0.1, 0.0),
        case(5, 781, 0.1, 0.0),
        case(3, 64, 0.0, 0.01),
        case(4, 100, 0.2, 0.01),
        case(2, 1024, 0.1, 0.01, dtype="float16"),
        case(2, 1025, 0.2, 0.001, dtype="bfloat16"),
        case(2, 90, 0.1, 0.0, tags="large", shift=200.0),
        case(4, 50, 1.0, 0.0, dloss=quarter, tags="strided"),
    ]


def _column_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def tokens(M: int, D: int, V: int, chunk: int) -> Case:
        x, weight = make.normal(M, D).double(), make.normal(V, D).double() / D**0.5
        name, short = f"{M} tokens, {V} classes, {chunk} tokens at a time", "short-chunk" if M % chunk else ""
        return case(name, x, weight, make.target(M, V), rng.randrange(V), chunk, tags=short)

    return [
        tokens(64, 8, 500, 4),
        tokens(60, 8, 400, 4),
        tokens(41, 4, 600, 4),
        tokens(100, 8, 300, 5),
        tokens(6, 8, 100, 8),
    ]


def _chunked_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def tokens(M: int, D: int, V: int, chunk: int, ignored: Iterable[int] = ()) -> Case:
        x, weight = make.normal(M, D).double(), make.normal(V, D).double() / D**0.5
        name = listed(f"{M} tokens, {V} classes, {chunk} at a time", "some ignored" if ignored else "")
        tags = f"{'short-chunk' if M % chunk else ''} {'ignored' if ignored else ''}"
        return case(name, x, weight, make.target(M, V, ignored), chunk, tags=tags)

    return [
        tokens(4, 8, 120, 4),
        tokens(96, 4, 400, 4),
        tokens(90, 4, 400, 4),
        tokens(96, 4, 300, 4, ignored=range(0, 40, 3)),
        tokens(101, 6, 300, 4, ignored=(1, 2, 3, 100)),
        tokens(96, 4, 400, 4, ignored=(0, 1, 2, 3)),  # a chunk of which nothing counts
    ]


def _kl_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng, scale=2)

    def case(M: int, V: int, block: int, dtype="float32", zeros=0, dloss=None, tags="", note="") -> Case:
        x, t = make.normal(M, V).log_softmax(-1), make.normal(M, V)
        if zeros:
            t[:, ::zeros] = -float("inf")
            tags += " zero"
        x, t = (each.to(getattr(make.torch, dtype)) for each in (x, t.softmax(-1)))
        dloss = make.normal(M) if dloss is None else dloss
        return _in_blocks(x, t, block, dloss, block=block, tags=tags, note=note)

    third = make.torch.tensor(1 / 3).expand(3)
    return [
        case(1, 1, 64),
        case(3, 64, 64),
        case(2, 512, 128),
        case(5, 781, 128),
        case(2, 1024, 256, dtype="float16"),
        case(2, 1025, 256, dtype="bfloat16"),
        case(3, 300, 64, zeros=2, note="every second t is 0"),
        case(2, 100, 128, zeros=3, note="every third t is 0"),
        case(6, 96, 64, dloss=make.normal(12)[::2], tags="strided", note="dloss with stride 2"),
        case(3, 96, 64, dloss=third, tags="strided", note="dloss expanded: stride 0"),
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


def _loss_only(of: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    def gives(x: Tensor, target: Tensor, BLOCK_V: int, ignore_index: int = IGNORE) -> dict[str, Tensor]:
        wrong = _zero_if_ignored(of(x.float(), target, ignore_index), target, ignore_index)
        return {"y[0]": wrong, "y[1]": _cross_entropy(x, target, BLOCK_V, ignore_index)[1]}

    return gives


def _infinite_loss(evidence: Evidence) -> bool:
    return evidence.output in ("y", "y[0]") and bool(evidence.outputs.isposinf().any())


def _in_place_gives(of: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """`of(x, target, p, one_hot, dloss, BLOCK_V)` is what is in x afterwards where a row counts."""

    def gives(x: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, BLOCK_V: int) -> dict[str, Tensor]:
        p = (x - lse[:, None]).exp()
        return {"x": _zero_if_ignored(of(x, target, p, _one_hot(x, target), dloss[:, None], BLOCK_V), target)}

    return gives


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


def _left_in_place(x: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, BLOCK_V: int) -> dict[str, Tensor]:
    counts = (target != IGNORE)[:, None]
    return {"x": _gradient(x, target, lse, dloss).where(counts, x)}


def _loss_gives(of: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """The right gradient in x, and `of(x, target, scale)` for the losses of the rows that count."""

    def gives(x: Tensor, target: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"y": _zero_if_ignored(of(x, target, scale), target), "x": _loss_and_gradient(x, target, scale)[1]}

    return gives


def _reads_its_gradient(x: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    _, dx = _loss_and_gradient(x, target, scale)
    return x.logsumexp(-1) - _at_target(dx, target)


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


def _padded_mean(one_hot: Tensor, smoothing: float, V: int) -> Tensor:
    return (1 - smoothing) * one_hot + smoothing / (V + padding(V))


def _evaluated(
    x: Tensor, weight: Tensor, target: Tensor, column: int, chunk: int, *, combine: str = "sum", rows: int | None = None
) -> list[float]:
    """The right numbers, or those of a wrong idea: the loss as a mean of the chunks' means, or of some rows alone."""
    from torch.nn.functional import cross_entropy

    x, target = x[:rows], target[:rows]
    logits = x @ weight.T
    losses = cross_entropy(logits, target, reduction="none")
    if combine == "means":
        means = [part.mean().item() for part in losses.split(chunk)]
        loss = sum(means) / len(means)
    else:
        loss = losses.sum().item() / (len(losses) if combine == "sum" else 1)
    return [loss, logits[:, column].mean().item(), logits[:, column].max().item()]


def _without_the_remainder(x: Tensor, weight: Tensor, target: Tensor, column: int, chunk: int) -> list[float]:
    rows = len(x) // chunk * chunk or len(x)
    loss, mean, largest = _evaluated(x, weight, target, column, chunk, rows=rows)
    return [loss * rows / len(x), mean, largest]


def _linear(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    chunk: int,
    *,
    divisor: str = "count",
    ignored: str = "nothing",
    keep="sum",
) -> list[Any]:
    """Loss, dx and dweight, or those of a wrong idea.

    divisor  "count": all that counts; "tokens": all rows; "chunk": what counts in a chunk; "means": that, and the chunks
    ignored  what an ignored row's gradient is: "nothing", "softmax", or "wraps", where -100 counts from the end
    keep     "sum" of the chunks' dweight, or the "last"
    """
    import torch

    loss, dxs, dweight = 0.0, [], torch.zeros_like(weight)
    chunks = cdiv(len(x), chunk)
    for part, wanted in zip(x.split(chunk), target.split(chunk), strict=True):
        counts = wanted != IGNORE
        among = max(1, int((target != IGNORE).sum() if divisor == "count" else counts.sum()))
        by = {"tokens": len(x), "means": among * chunks}.get(divisor, among)
        logits = part @ weight.T
        losses = _zero_if_ignored(logits.logsumexp(-1) - _at_target(logits, wanted), wanted)
        dlogits = logits.softmax(-1)
        hot = _one_hot(logits, wanted % logits.shape[-1] if ignored == "wraps" else wanted)
        dlogits = (dlogits - hot) / by
        if ignored == "nothing":
            dlogits = dlogits * counts[:, None]
        loss += losses.sum().item() / by
        dxs.append(dlogits @ weight)
        dweight = dlogits.T @ part + (dweight if keep == "sum" else 0)
    return [loss, torch.cat(dxs), dweight]


def _linear_gives(**idea: str) -> Callable[..., list[Any]]:
    return lambda x, weight, target, chunk: _linear(x, weight, target, chunk, **idea)


def _kl_gives(loss: Callable[..., Tensor] | None = None, dx: Callable[..., Tensor] | None = None):
    """What y and dx are when `loss` or `dx` of (x, t) take the place of the right ones."""

    def gives(x: Tensor, t: Tensor, BLOCK_V: int, dy: Tensor) -> dict[str, Tensor]:
        found = {} if loss is None else {"y": loss(x, t)}
        return found if dx is None else found | {"dx": dx(x, t) * dy[:, None]}

    return gives


# ----------------------------------------------------------------------------------------------------- memory that is held
def _memory_rule(case: Case, peak_bytes: int) -> tuple[str, str] | None:
    """Some chunks of logits, some of the tensors that have no tokens in them, twice what has tokens but no classes."""
    x, weight, *_ = case.args
    chunk = case.args[-1]
    a_chunk = min(chunk, len(x)) * len(weight) * x.element_size()
    allowed = 7 * a_chunk + 3 * weight.nbytes + 3 * x.nbytes
    if peak_bytes <= allowed:
        return None
    logits = len(x) * len(weight) * x.element_size()
    held = f"it held {peak_bytes / 1024:,.0f} KiB at once; a chunk of logits is {a_chunk / 1024:,.0f}, "
    held += f"all of them {logits / 1024:,.0f}"
    if peak_bytes > 1.5 * logits:
        return "all-at-once", f"{held}. What keeps the first chunk, or its graph, alive while the last one is made?"
    return (
        "something-kept",
        f"{held}. Every chunk is still there: which of your names refers to its memory, whatever its shape is?",
    )


# ---------------------------------------------------------------------------------------------- losses.cross_entropy
def _huge_cross_entropy() -> tuple:
    import torch

    return far(49152, 65536), torch.zeros(49152, dtype=torch.int64), 8192


CROSS_ENTROPY = KernelExercise(
    id="losses.cross_entropy",
    function="cross_entropy",
    returns=("loss", "lse"),
    cases=_cross_entropy_cases,
    reference=_cross_entropy,
    huge=_huge_cross_entropy,
    traffic=Traffic(reads=1, writes=0.01),
    misconceptions=(
        Misconception("tail-mask", gives=_with_lse(_padded_with_zeros)),
        Misconception("no-max-subtraction", gives=_with_lse(lambda x, _: x.exp().sum(-1).log())),
        Misconception("no-rescale", gives=_with_lse(_no_rescale)),
        Misconception("tail-block", gives=_with_lse(_first_blocks)),
        Misconception("first-block-only", gives=_with_lse(lambda x, BLOCK_V: x[:, :BLOCK_V].logsumexp(-1))),
        Misconception("maximum-left-out", gives=_with_lse(lambda x, _: (x - x.amax(-1, keepdim=True)).logsumexp(-1))),
        Misconception("probability-first", when=_infinite_loss),
        Misconception(
            "sign", gives=_loss_only(lambda x, target, ignore: _at_target(x, target, ignore) - x.logsumexp(-1))
        ),
        Misconception("inf-minus-inf", when=lambda evidence: evidence.kind == "nan" and evidence.tag("masked")),
        Misconception("ignored-rows", when=only("ignored")),
    ),
)


# --------------------------------------------------------------------------------------------------- losses.in_place
def _huge_in_place() -> tuple:
    import torch

    return far(49152, 65536), torch.zeros(49152, dtype=torch.int64), *(far(49152, dtype="float32"),) * 2, 8192


IN_PLACE = KernelExercise(
    id="losses.in_place",
    function="cross_entropy_backward_",
    cases=_in_place_cases,
    reference=_gradient,
    huge=_huge_in_place,
    in_place=(0,),
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception("class-number", gives=_in_place_gives(_lane_for_class)),
        Misconception("no-one-hot", gives=_in_place_gives(lambda x, target, p, one_hot, dloss, _: p * dloss)),
        Misconception("sign", gives=_in_place_gives(lambda x, target, p, one_hot, dloss, _: (one_hot - p) * dloss)),
        Misconception("upstream", gives=_in_place_gives(lambda x, target, p, one_hot, dloss, _: p - one_hot)),
        Misconception(
            "one-hot-outside", gives=_in_place_gives(lambda x, target, p, one_hot, dloss, _: p * dloss - one_hot)
        ),
        Misconception("block-alone", gives=_in_place_gives(_blocks_alone)),
        Misconception("blocks-left-over", gives=_in_place_gives(_some_blocks(lambda V, block: 1))),
        Misconception("blocks-left-over/2", gives=_in_place_gives(_some_blocks(lambda V, block: V // block))),
        Misconception("exp-of-a-logit", when=lambda evidence: evidence.kind == "nan" and "large" in evidence.case.tags),
        Misconception("infinity-times-zero", when=lambda evidence: evidence.kind == "nan" and evidence.tag("hot")),
        Misconception("ignored-rows", gives=_left_in_place),
        Misconception("ignored-rows/2", when=lambda evidence: evidence.tag("ignored")),
    ),
)


# ------------------------------------------------------------------------------------------------- losses.one_launch
def _huge_one_launch() -> tuple:
    import torch

    return far(49152, 65536), torch.zeros(49152, dtype=torch.int64), torch.ones(())


ONE_LAUNCH = KernelExercise(
    id="losses.one_launch",
    function="loss_and_gradient_",
    returns=("loss",),
    cases=_one_launch_cases,
    reference=_loss_and_gradient,
    huge=_huge_one_launch,
    in_place=(0,),
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception("scaled-loss", gives=_loss_gives(lambda x, target, scale: _cross_entropy(x, target)[0] * scale)),
        Misconception("probability-first", when=_infinite_loss),
        Misconception("read-after-write", gives=_loss_gives(_reads_its_gradient)),
        Misconception(
            "read-after-write/2",
            when=lambda evidence: evidence.output == "y" and evidence.kind == "values" and len(evidence.failed) > 5,
        ),
        Misconception(
            "no-one-hot", gives=lambda x, target, scale: {"x": _zero_if_ignored(x.softmax(-1) * scale, target)}
        ),
        Misconception("tail-mask", when=lambda evidence: evidence.tag("tail")),
        Misconception("ignored-rows", when=lambda evidence: evidence.tag("ignored")),
    ),
)


# -------------------------------------------------------------------------------------------------- losses.smoothing
def _huge_smoothing() -> tuple:
    import torch

    return far(49152, 65536), torch.zeros(49152, dtype=torch.int64), 0.1, 0.0, far(49152, dtype="float32")


SMOOTHING = KernelExercise(
    id="losses.smoothing",
    function="smoothed_cross_entropy",
    cases=_smoothing_cases,
    reference=_smoothed,
    huge=_huge_smoothing,
    gradients=1,
    traffic=Traffic(reads=2, writes=1, launches=2),
    misconceptions=(
        Misconception("spread-over-the-others", gives=_smoothed_gives(_loss_of(_spread_over_others))),
        Misconception("weights-add-up", gives=_smoothed_gives(_loss_of(_too_heavy))),
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
            when=lambda evidence: evidence.output == "y" and "tail" in evidence.case.tags and not evidence.tag("z"),
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
        Misconception(
            "weights-add-up/3",
            gives=_smoothed_gives(dx=_dx_of(lambda one_hot, smoothing, V: (1 - smoothing) * one_hot)),
        ),
        Misconception(
            "upstream",
            gives=lambda x, target, s, z, dy: {"dx": _dx_of(_weights)(x, x.logsumexp(-1), _one_hot(x, target), s, z)},
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------- losses.column
COLUMN = FunctionExercise(
    id="losses.column",
    function="evaluate",
    cases=_column_cases,
    expected=_evaluated,
    tolerance=1e-6,
    memory_rule=_memory_rule,
    misconceptions=(
        Misconception("mean-of-means", gives=lambda *args: _evaluated(*args, combine="means")),
        Misconception("last-chunk", gives=_without_the_remainder),
        Misconception("no-mean", gives=lambda *args: _evaluated(*args, combine="total")),
    ),
)


# ---------------------------------------------------------------------------------------------------- losses.chunked
CHUNKED = FunctionExercise(
    id="losses.chunked",
    function="linear_cross_entropy",
    cases=_chunked_cases,
    expected=_linear,
    tolerance=1e-6,
    memory_rule=_memory_rule,
    misconceptions=(
        Misconception("mean-of-means", gives=_linear_gives(divisor="means")),
        Misconception("chunk-mean", gives=_linear_gives(divisor="chunk")),
        Misconception("ignored-in-the-mean", gives=_linear_gives(divisor="tokens")),
        Misconception("ignored-rows", gives=_linear_gives(ignored="softmax")),
        Misconception("ignored-index", gives=_linear_gives(ignored="wraps")),
        Misconception("last-one-only", gives=_linear_gives(keep="last")),
        Misconception("empty-chunk", when=lambda evidence: any("nan" in repr(part) for part in evidence.outputs)),
    ),
)


# --------------------------------------------------------------------------------------------------------- losses.kl
KL = KernelExercise(
    id="losses.kl",
    function="kl_div",
    cases=_kl_cases,
    reference=_kl,
    huge=lambda: (far(49152, 65536), far(49152, 65536), 8192, far(49152, dtype="float32")),
    gradients=1,
    traffic=Traffic(reads=3, writes=1, launches=2),
    misconceptions=(
        Misconception(
            "zero-log-zero",
            when=lambda evidence: evidence.kind == "nan" and evidence.output == "y" and evidence.tag("zero"),
        ),
        Misconception("padding-log", when=lambda evidence: evidence.kind == "nan" and evidence.output == "y"),
        Misconception("swapped", gives=_kl_gives(lambda x, t: (x.exp() * (x - t.log())).sum(-1))),
        Misconception("no-entropy", gives=_kl_gives(lambda x, t: -(t * x).sum(-1))),
        Misconception("log-of-a-logarithm", gives=_kl_gives(lambda x, t: (t.xlogy(t) - t * x.exp()).sum(-1))),
        Misconception(
            "log-of-a-logarithm", gives=_kl_gives(lambda x, t: (t * (t.log() - x.log())).where(t > 0, t).sum(-1))
        ),
        Misconception("mean-for-sum", gives=_kl_gives(lambda x, t: _kl(x, t) / x.shape[-1])),
        Misconception(
            "epsilon",
            when=lambda evidence: (
                evidence.kind == "values"
                and evidence.output == "y"
                and bool(((evidence.outputs - evidence.expected).abs() < 1e-2).all())
            ),
        ),
        Misconception("sign", gives=_kl_gives(dx=lambda x, t: t)),
        Misconception("softmax-gradient", gives=_kl_gives(dx=lambda x, t: x.exp() - t)),
        Misconception("upstream", gives=lambda x, t, BLOCK_V, dy: {"dx": -t}),
    ),
)


EXERCISES = (CROSS_ENTROPY, IN_PLACE, ONE_LAUNCH, SMOOTHING, COLUMN, CHUNKED, KL)
