"""The exercises of notebook 15: cases, traffic and memory bounds, hints, and the wrong answers that each check must
recognise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Label, Misconception, Traffic, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence

NOTEBOOK = "15_losses"
IGNORE = -100


# ------------------------------------------------------------------------------------------------------------ inputs
class _Inputs:
    """Seeded tensors and cases named after them."""

    def __init__(self, rng: Random):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def logits(self, *shape: int, dtype: str = "float32") -> Tensor:
        return self.torch.randn(shape, generator=self.generator).mul_(2).to(getattr(self.torch, dtype))

    def target(self, M: int, V: int, ignored: Iterable[int] = (), index: int = IGNORE) -> Tensor:
        target = self.torch.randint(0, V, (M,), generator=self.generator)
        target[list(ignored)] = index
        return target

    def large(self, M: int, V: int) -> tuple[Tensor, Tensor]:
        """Logits around 300 and -300, where exp is too much or nothing; the first target is far below its row, so its
        loss is as large as the logits and allows all rows the rounding of such numbers."""
        x, target = self.logits(M, V), self.target(M, V)
        x[: M // 2] += 300
        x[M // 2 :] -= 300
        x[0, target[0]] = 0
        return x, target

    def few(self, M: int, V: int) -> tuple[Tensor, Tensor]:
        """Few classes; each target is the least likely, the first by far: a loss or gradient of almost nothing would allow
        no rounding at all."""
        x = self.logits(M, V)
        target = x.argmin(-1)
        x[0, target[0]] -= 16
        return x, target

    def masked(self, M: int, V: int, first: int) -> tuple[Tensor, Tensor]:
        """Rows that begin with `first` logits of -inf."""
        x, target = self.logits(M, V), self.target(M, V).clamp_(min=first)
        x[:, :first] = -float("inf")
        return x, target


def _case(x: Tensor, *rest: Any, tags: str = "", note: str = "") -> Case:
    dtype = str(x.dtype).removeprefix("torch.")
    name = f"x {list(x.shape)} {dtype}" + (f", {note}" if note else "")
    found = {dtype, *tags.split()}
    if x.shape[-1] & (x.shape[-1] - 1):
        found.add("tail")
    return Case(name, (x, *rest), frozenset(found))


def _in_blocks(x: Tensor, *rest: Any, block: int, tags: str = "", note: str = "") -> Case:
    tags += " long" * (x.shape[-1] > block) + " partial" * (x.shape[-1] % block > 0)
    return _case(x, *rest, tags=tags, note=f"BLOCK_V {block}" + (f", {note}" if note else ""))


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
    """Loss and log-sum-exp; `lse` is what a wrong idea takes for it."""
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


def _weighted_targets(x: Tensor, target: Tensor, smoothing: float) -> Tensor:
    return (1 - smoothing) * _one_hot(x, target) + smoothing / x.shape[-1]


def _smoothed(x: Tensor, target: Tensor, smoothing: float, z_loss: float) -> Tensor:
    wide = _wide(x)
    lse = wide.logsumexp(-1)
    return lse - (_weighted_targets(wide, target, smoothing) * wide).sum(-1) + z_loss * lse**2


def _kl(x: Tensor, t: Tensor, BLOCK_V: int = 0) -> Tensor:
    import torch

    x, t = _wide(x), _wide(t)
    return (torch.xlogy(t, t) - t * x).sum(-1)


# ------------------------------------------------------------------------------------------------------------- cases
def _cross_entropy_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(M: int, V: int, block: int, *rest: int, dtype: str = "float32", ignored=(), index: int = IGNORE, note=""):
        x, target = make.logits(M, V, dtype=dtype), make.target(M, V, ignored, index)
        return _in_blocks(x, target, block, *rest, block=block, tags="ignored" if ignored else "", note=note)

    # To 840: where the maximum is not taken off, the exponential is infinite in float64 as well. The targets are in the
    # first block: in the last one little of lse - x[target] would be left, and chance would refuse right answers.
    rising = make.logits(2, 512) + make.torch.arange(512.0) // 64 * 120
    far = make.logits(2, 300), make.target(2, 300)
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
        _in_blocks(*far, 64, block=64, tags="far", note="targets 200 below the rest"),
        case(4, 256, 64, ignored=(2,), note="one ignored"),
        case(4, 100, 64, 7, ignored=(1,), index=7, note="ignore_index 7"),
        case(3, 90, 128, ignored=(0, 1, 2), note="all ignored"),
    ]


def _in_place_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(
        x: Tensor, target: Tensor, block: int, dloss: Tensor | None = None, tags: str = "", note: str = ""
    ) -> Case:
        _, lse = _cross_entropy(x, target)
        dloss = make.logits(len(x)) if dloss is None else dloss
        return _in_blocks(x, target, lse, dloss, block, block=block, tags=tags, note=note)

    def plain(M: int, V: int, block: int, dtype: str = "float32", **more: Any) -> Case:
        return case(make.logits(M, V, dtype=dtype), make.target(M, V), block, **more)

    mean = make.torch.tensor(0.2).expand(5)
    hot = make.logits(3, 96) + 200
    return [
        plain(1, 1, 64),
        plain(3, 64, 64),
        plain(2, 512, 128),
        plain(5, 781, 128),
        plain(2, 1024, 256, dtype="float16"),
        plain(2, 1025, 256, dtype="bfloat16"),
        case(*make.large(4, 200), 64, tags="large", note="around 300 and -300"),
        case(*make.masked(2, 200, 70), 64, tags="masked", note="-inf at first"),
        plain(5, 96, 64, dloss=make.logits(10)[::2], tags="strided", note="dloss with stride 2"),
        plain(5, 96, 64, dloss=mean, tags="strided", note="dloss expanded: stride 0"),
        case(make.logits(4, 128), make.target(4, 128, (1,)), 64, tags="ignored", note="one ignored"),
        case(hot, make.target(3, 96, (0, 2)), 32, tags="ignored hot", note="two ignored, around 200"),
    ]


def _one_launch_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(x: Tensor, target: Tensor, tags: str = "", note: str = "") -> Case:
        scale = 1 / (target != IGNORE).sum().clamp(min=1)
        return _case(x, target, scale.float(), tags=tags, note=note)

    def plain(M: int, V: int, dtype: str = "float32") -> Case:
        return case(make.logits(M, V, dtype=dtype), make.target(M, V))

    far = make.logits(2, 128), make.target(2, 128)
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
        case(*far, tags="far", note="targets 200 below the rest"),
        case(make.logits(4, 100), make.target(4, 100, (0, 2)), tags="ignored", note="two ignored"),
    ]


def _smoothing_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(M: int, V: int, smoothing: float, z_loss: float, dtype="float32", tags="", dloss=None, shift=0.0) -> Case:
        x, target = make.few(M, V)
        x = (x + shift).to(getattr(make.torch, dtype))
        dloss = make.logits(M) if dloss is None else dloss
        note = f"smoothing {smoothing:g}, z {z_loss:g}" + (", dloss expanded: stride 0" if "strided" in tags else "")
        tags += " smooth" * (smoothing > 0) + " z" * (z_loss > 0)
        return _case(x, target, smoothing, z_loss, dloss, tags=tags, note=note)

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
    make = _Inputs(rng)

    def case(M: int, D: int, V: int, chunk: int) -> Case:
        x, weight = make.logits(M, D).double(), make.logits(V, D).double() / D**0.5
        args = x, weight, make.target(M, V), rng.randrange(V), chunk
        tags = {"remainder"} if M % chunk else set()
        return Case(f"{M} tokens, {V} classes, {chunk} tokens at a time", args, frozenset(tags))

    return [case(64, 8, 500, 4), case(60, 8, 400, 4), case(41, 4, 600, 4), case(100, 8, 300, 5), case(6, 8, 100, 8)]


def _chunked_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(M: int, D: int, V: int, chunk: int, ignored: Iterable[int] = ()) -> Case:
        x, weight = make.logits(M, D).double(), make.logits(V, D).double() / D**0.5
        name = f"{M} tokens, {V} classes, {chunk} at a time" + (", some ignored" if ignored else "")
        tags = ({"remainder"} if M % chunk else set()) | ({"ignored"} if ignored else set())
        return Case(name, (x, weight, make.target(M, V, ignored), chunk), frozenset(tags))

    return [
        case(4, 8, 120, 4),
        case(96, 4, 400, 4),
        case(90, 4, 400, 4),
        case(96, 4, 300, 4, ignored=range(0, 40, 3)),
        case(101, 6, 300, 4, ignored=(1, 2, 3, 100)),
        case(96, 4, 400, 4, ignored=(0, 1, 2, 3)),  # a chunk of which nothing counts
    ]


def _kl_cases(rng: Random) -> list[Case]:
    make = _Inputs(rng)

    def case(M: int, V: int, block: int, dtype="float32", zeros=0, dloss=None, tags="", note="") -> Case:
        x, t = make.logits(M, V).log_softmax(-1), make.logits(M, V)
        if zeros:
            t[:, ::zeros] = -float("inf")
            tags += " zero"
        x, t = (each.to(getattr(make.torch, dtype)) for each in (x, t.softmax(-1)))
        dloss = make.logits(M) if dloss is None else dloss
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
        case(6, 96, 64, dloss=make.logits(12)[::2], tags="strided", note="dloss with stride 2"),
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

    return pad(x, (0, -x.shape[-1] % BLOCK_V)).logsumexp(-1)


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
    import torch

    return (torch.cat([block.softmax(-1) for block in x.split(BLOCK_V, -1)], -1) - one_hot) * dloss


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
    return (1 - smoothing) * one_hot + smoothing / (1 << (V - 1).bit_length())


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
    chunks = -(-len(x) // chunk)
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
    held = f"it held {peak_bytes / 1024:,.0f} KiB at once; a chunk of logits is {a_chunk / 1024:,.0f}, all of them {logits / 1024:,.0f}"
    if peak_bytes > 1.5 * logits:
        return "all-at-once", f"{held}. What keeps the first chunk, or its graph, alive while the last one is made?"
    return (
        "something-kept",
        f"{held}. Every chunk is still there: which of your names refers to its memory, whatever its shape is?",
    )


# -------------------------------------------------------------------------------------------------- shared wrong ideas
_OUTSIDE_TARGET = Misconception(
    "out-of-bounds", "ignore_index is not a class: what is read at the row's beginning minus 100?"
)
_IGNORED = "only rows that do not count are wrong. What is their {what}, and where is that decided?"


# ---------------------------------------------------------------------------------------------- losses.cross_entropy
_C_ROW = "    counts = target != ignore_index\n    x_row = x_ptr + pid_m * V\n    m_i"
_C_FOR = "    for start in range(0, V, BLOCK_V):\n        x = tl.load(x_row + start"
_C_LOAD = '        x = tl.load(x_row + start + offs_v, mask=start + offs_v < V, other=-float("inf")).to(tl.float32)\n'
_C_NEW = "        m_new = tl.maximum(m_i, tl.max(x, axis=0))\n"
_C_SHIFT = '        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # -inf - (-inf) would be NaN\n'
_C_ADD = "        l_i = l_i * tl.exp(m_i - shift) + tl.sum(tl.exp(x - shift), axis=0)\n"
_C_MOVE = "        m_i = m_new\n"
_C_LSE = "    lse = m_i + tl.log(l_i)\n"
_C_TARGET = "    x_target = tl.load(x_row + target, mask=counts, other=0.0).to(tl.float32)\n    tl.store(loss_ptr"
_C_LOSS = "    tl.store(loss_ptr + pid_m, tl.where(counts, lse - x_target, 0.0))\n    tl.store(lse_ptr"
_C_STORE_LSE = "    tl.store(lse_ptr + pid_m, tl.where(counts, lse, 0.0))\n"
_C_INIT = '    m_i = tl.full((), -float("inf"), tl.float32)  # maximum of the logits seen so far\n'
_C_ZERO = "    l_i = tl.zeros((), tl.float32)  # sum of exp(x - m_i) over them\n"
_C_ALLOCATE = "    loss, lse = (torch.empty(M, dtype=torch.float32, device=x.device) for _ in range(2))\n    cross"

CROSS_ENTROPY = KernelExercise(
    id="losses.cross_entropy",
    title="Cross-entropy in one pass over the logits",
    notebook=NOTEBOOK,
    function="cross_entropy",
    returns=("loss", "lse"),
    label=Label(3, 30, "log-sum-exp in one pass, one element out of a row, rows that do not count"),
    hints=(
        "The loss of a row is its log-sum-exp minus one of its logits. Which of the two needs the whole row, and does "
        "anything have to be kept of a block once it has been added up?",
        "Carry a maximum and a sum over the blocks, as in softmax.online; there is no second pass, since nothing of the "
        "row's length is written. The target's logit is one number at an address that you can compute; its load takes a "
        "mask as well.",
        "Load the target and compare it with ignore_index. For each block: the new maximum, the old sum rescaled, the "
        "block's terms added, with 0 subtracted while the maximum is -inf. After the loop add the sum's logarithm to the "
        "maximum; load the one logit under the comparison as a mask; store difference and log-sum-exp, or zeros.",
    ),
    cases=_cross_entropy_cases,
    reference=_cross_entropy,
    traffic=Traffic(reads=1, writes=0.01),
    misconceptions=(
        Misconception(
            "tail-mask",
            "the lanes past the end of the row are counted as if their logit were 0. Of which number does exp make 0?",
            gives=_with_lse(_padded_with_zeros),
        ),
        Misconception(
            "no-max-subtraction",
            "exp overflows above 88.7 in float32, and below -104 it gives 0, of which the logarithm is -inf. What may be "
            "subtracted from a row, if it is added to the logarithm again?",
            gives=_with_lse(lambda x, _: x.exp().sum(-1).log()),
        ),
        Misconception(
            "no-rescale",
            "the sum of the earlier blocks was made with an older, smaller maximum and added as it is. By which factor "
            "is it too large?",
            gives=_with_lse(_no_rescale),
        ),
        Misconception(
            "tail-block",
            "the last block of a row is missing where it is not full. How many blocks does it take to cover V?",
            gives=_with_lse(_first_blocks),
        ),
        Misconception(
            "first-block-only",
            "this is the log-sum-exp of the first block of each row. Where is a row's next block?",
            gives=_with_lse(lambda x, BLOCK_V: x[:, :BLOCK_V].logsumexp(-1)),
        ),
        Misconception(
            "maximum-left-out",
            "the log-sum-exp is that of x minus its maximum. What was subtracted under the logarithm, and where does it "
            "come back?",
            gives=_with_lse(lambda x, _: (x - x.amax(-1, keepdim=True)).logsumexp(-1)),
        ),
        Misconception(
            "probability-first",
            "a probability that is too small for float32 is 0, and its logarithm -inf, so the loss of a target far below "
            "the rest is infinite. Which logarithm is never taken if the loss is written as a difference?",
            when=_infinite_loss,
        ),
        Misconception(
            "sign",
            "every loss has the wrong sign. Where the target is almost certain, which is larger, its logit or the "
            "log-sum-exp?",
            gives=_loss_only(lambda x, target, ignore: _at_target(x, target, ignore) - x.logsumexp(-1)),
        ),
        Misconception(
            "inf-minus-inf",
            "only rows that begin with -inf are NaN: the maximum is still -inf, and -inf - (-inf) is NaN. What else could "
            "be subtracted until a number turns up?",
            when=lambda evidence: evidence.kind == "nan" and evidence.tag("masked"),
        ),
        Misconception(
            "ignored-rows",
            "only rows whose target is ignore_index are wrong. Which loss and which log-sum-exp does the docstring give "
            "them?",
            when=lambda evidence: all("ignored" in case.tags for case in evidence.failed),
        ),
        _OUTSIDE_TARGET,
        Misconception("traffic", "a maximum and a sum that are carried together need every logit once"),
    ),
    wrong=(
        Variant("pads-with-zero", ((_C_LOAD, _C_LOAD.replace('-float("inf")', "0.0")),), diagnosis="tail-mask"),
        Variant(
            "no-maximum",
            (
                (_C_NEW + _C_SHIFT + _C_ADD + _C_MOVE, "        l_i += tl.sum(tl.exp(x), axis=0)\n"),
                (_C_LSE, "    lse = tl.log(l_i)\n"),
            ),
            diagnosis="no-max-subtraction",
        ),
        Variant(
            "no-max-subtraction-in-float64",
            (
                (_C_ADD, "        l_i += tl.sum(tl.exp(x.to(tl.float64)), axis=0)\n"),
                (_C_ZERO, "    l_i = tl.zeros((), tl.float64)\n"),
                (_C_LSE, "    lse = tl.log(l_i).to(tl.float32)\n"),
            ),
            diagnosis="no-max-subtraction",
        ),
        Variant("no-rescale", ((_C_ADD, _C_ADD.replace(" * tl.exp(m_i - shift)", "")),), diagnosis="no-rescale"),
        Variant(
            "one-block",
            ((_C_FOR, _C_FOR.replace("range(0, V, BLOCK_V)", "range(0, 1)")),),
            diagnosis="first-block-only",
        ),
        Variant(
            "last-block-dropped",
            ((_C_FOR, _C_FOR.replace("range(0, V, BLOCK_V)", "range(0, tl.maximum(V - BLOCK_V, 0) + 1, BLOCK_V)")),),
            diagnosis="tail-block",
        ),
        Variant("forgets-to-add-the-maximum", ((_C_LSE, "    lse = tl.log(l_i)\n"),), diagnosis="maximum-left-out"),
        Variant(
            "logarithm-of-the-probability",
            ((_C_LOSS, _C_LOSS.replace("lse - x_target", "-tl.log(tl.exp(x_target - m_i) / l_i)")),),
            diagnosis="probability-first",
        ),
        Variant("wrong-sign", ((_C_LOSS, _C_LOSS.replace("lse - x_target", "x_target - lse")),), diagnosis="sign"),
        Variant("subtracts-infinity", ((_C_SHIFT, "        shift = m_new\n"),), diagnosis="inf-minus-inf"),
        Variant(
            "keeps-the-log-sum-exp-of-ignored-rows",
            ((_C_STORE_LSE, "    tl.store(lse_ptr + pid_m, lse)\n"),),
            diagnosis="ignored-rows",
        ),
        Variant(
            "knows-minus-100-only",
            ((_C_ROW, _C_ROW.replace("target != ignore_index", "target != -100")),),
            diagnosis="ignored-rows",
        ),
        Variant(
            "reads-where-no-class-is",
            ((_C_TARGET, _C_TARGET.replace(", mask=counts, other=0.0", "")),),
            diagnosis="out-of-bounds",
        ),
        Variant(
            "two-passes",
            (
                (
                    _C_NEW + _C_SHIFT + _C_ADD + _C_MOVE,
                    "        m_i = tl.maximum(m_i, tl.max(x, axis=0))\n    for start in range(0, V, BLOCK_V):\n"
                    + _C_LOAD
                    + "        l_i += tl.sum(tl.exp(x - m_i), axis=0)\n",
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "calls-torch",
            (
                (
                    _C_ALLOCATE,
                    "    lse = torch.logsumexp(x.float(), -1)\n"
                    "    loss = F.cross_entropy(x.float(), target, ignore_index=ignore_index, reduction='none')\n"
                    "    return loss, torch.where(target == ignore_index, 0.0, lse)\n" + _C_ALLOCATE,
                ),
            ),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "finds-the-target-on-the-way",
            (
                (_C_INIT, "    x_target = tl.zeros((), tl.float32)\n" + _C_INIT),
                (_C_NEW, "        x_target += tl.sum(tl.where(start + offs_v == target, x, 0.0), axis=0)\n" + _C_NEW),
                (_C_TARGET, "    tl.store(loss_ptr"),
            ),
        ),
        Variant(
            "a-maximum-and-a-sum-in-every-lane",
            (
                (_C_INIT, "    m_i = tl.full((BLOCK_V,), -3.0e38, tl.float32)\n"),
                (_C_ZERO, "    l_i = tl.zeros((BLOCK_V,), tl.float32)\n"),
                (
                    _C_NEW + _C_SHIFT + _C_ADD,
                    "        m_new = tl.maximum(m_i, x)\n        l_i = l_i * tl.exp(m_i - m_new) + tl.exp(x - m_new)\n",
                ),
                (
                    _C_LSE,
                    "    m = tl.max(m_i, axis=0)\n    lse = m + tl.log(tl.sum(l_i * tl.exp(m_i - m), axis=0))\n",
                ),
            ),
        ),
        Variant(
            "carries-the-log-sum-exp-itself",
            (
                (_C_INIT + _C_ZERO, "    lse = tl.full((), -3.0e38, tl.float32)\n"),
                (
                    _C_NEW + _C_SHIFT + _C_ADD + _C_MOVE,
                    "        m = tl.maximum(lse, tl.max(x, axis=0))\n"
                    "        lse = m + tl.log(tl.exp(lse - m) + tl.sum(tl.exp(x - m), axis=0))\n",
                ),
                (_C_LSE, ""),
            ),
        ),
        Variant(
            "skips-rows-that-do-not-count",
            (
                (
                    _C_FOR,
                    _C_FOR.replace("range(0, V, BLOCK_V)", "range(0, tl.where(counts, V, 0), BLOCK_V)"),
                ),
                (_C_LSE, "    lse = tl.where(counts, m_i + tl.log(l_i), 0.0)\n"),
            ),
        ),
    ),
)


# --------------------------------------------------------------------------------------------------- losses.in_place
_G_PID = "    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)\n    mask_v = offs_v < V\n    target"
_G_LOAD = "    x = tl.load(x_ptr + pid_m * V + offs_v, mask=mask_v, other=0.0).to(tl.float32)\n    p = tl.exp"
_G_P = "    p = tl.exp(x - tl.load(lse_ptr + pid_m))\n"
_G_DX = "    dx = tl.where(offs_v == target, p - 1, p) * tl.load(dloss_ptr + pid_m * stride_dloss)\n"
_G_STORE = "    tl.store(x_ptr + pid_m * V + offs_v, tl.where(target == ignore_index, 0.0, dx), mask=mask_v)\n"
_G_GRID = "    grid = (M, triton.cdiv(V, BLOCK_V))\n"
_G_LAUNCH = "    cross_entropy_backward_kernel[grid](\n        x, target"


def _in_place_dx(old: str, new: str, name: str, diagnosis: str) -> Variant:
    return Variant(name, ((_G_DX, _G_DX.replace(old, new)),), diagnosis=diagnosis)


IN_PLACE = KernelExercise(
    id="losses.in_place",
    title="The gradient where the logits were",
    notebook=NOTEBOOK,
    function="cross_entropy_backward_",
    label=Label(3, 25, "a gradient from one saved number a row; writing over what was read"),
    hints=(
        "Given its log-sum-exp, what else of a row must be known for the gradient of one of its logits? So how many "
        "programs can work on one row at a time?",
        "The gradient is the probability, less 1 at the target, times the row's dloss; the probability is one exponential "
        "of the logit minus the saved number. Nothing has to be added up, so a block of a row is a piece of work by "
        "itself. An ignored row has no log-sum-exp: do not trust what the formula makes of its 0.",
        "Grid: rows by blocks of a row. Kernel: which row and which classes; target, log-sum-exp and dloss of the row, the "
        "last with its stride; the block's logits; the exponential of the difference; 1 less where the class is the "
        "target; times dloss; a choice of 0 where the row is ignored; the store, to where the load was.",
    ),
    cases=_in_place_cases,
    reference=_gradient,
    in_place=(0,),
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception(
            "class-number",
            "1 was taken away in every block of the row, or in the wrong one. Which class is lane 3 of block 2?",
            gives=_in_place_gives(_lane_for_class),
        ),
        Misconception(
            "no-one-hot",
            "these are the probabilities times dloss. What does the loss take away from the log-sum-exp, and what is that "
            "one's derivative?",
            gives=_in_place_gives(lambda x, target, p, one_hot, dloss, _: p * dloss),
        ),
        Misconception(
            "sign",
            "every element has the wrong sign. When the target's logit rises, should the loss rise or fall?",
            gives=_in_place_gives(lambda x, target, p, one_hot, dloss, _: (one_hot - p) * dloss),
        ),
        Misconception(
            "upstream",
            "this is the gradient of a plain sum of the losses. How much does each row's loss matter to whoever called "
            "backward?",
            gives=_in_place_gives(lambda x, target, p, one_hot, dloss, _: p - one_hot),
        ),
        Misconception(
            "one-hot-outside",
            "dloss was multiplied with the probability alone, and then 1 was taken away. Which part of the derivative does "
            "the chain rule scale?",
            gives=_in_place_gives(lambda x, target, p, one_hot, dloss, _: p * dloss - one_hot),
        ),
        Misconception(
            "block-alone",
            "the probabilities of each block add up to 1 by themselves. Which number of the whole row is there already?",
            gives=_in_place_gives(_blocks_alone),
        ),
        Misconception(
            "blocks-left-over",
            "only the first block of each row became a gradient; the rest still holds logits. How many programs does a row "
            "need?",
            gives=_in_place_gives(_some_blocks(lambda V, block: 1)),
        ),
        Misconception(
            "blocks-left-over",
            "the last block of a row still holds logits where it is not full. How many blocks cover V?",
            gives=_in_place_gives(_some_blocks(lambda V, block: V // block)),
        ),
        Misconception(
            "exp-of-a-logit",
            "where the logits are large, exp is infinite or 0 before anything is divided. Which difference is never above "
            "0, and what is its exp?",
            when=lambda evidence: evidence.kind == "nan" and "large" in evidence.case.tags,
        ),
        Misconception(
            "infinity-times-zero",
            "an ignored row is NaN. Its log-sum-exp is not known, so its exp may be infinite, and infinity times 0 is NaN. "
            "Can the 0 be chosen in place of computed?",
            when=lambda evidence: evidence.kind == "nan" and evidence.tag("hot"),
        ),
        Misconception(
            "ignored-rows",
            "an ignored row still holds its logits, and the next kernel will take them for a gradient. What must be there?",
            gives=_left_in_place,
        ),
        Misconception(
            "ignored-rows",
            "only rows that do not count are wrong. What is their gradient, whatever the formula says?",
            when=lambda evidence: evidence.tag("ignored"),
        ),
        Misconception(
            "out-of-bounds",
            "a row's last block hangs over the end of the row; and two numbers of dloss may lie 2 apart, or 0",
        ),
        Misconception("race", "rows follow each other without a gap: does a row's last block write into the next one?"),
        Misconception(
            "traffic", "each element is loaded, changed and stored by one program: nothing needs a second trip"
        ),
    ),
    wrong=(
        _in_place_dx("tl.where(offs_v == target, p - 1, p)", "p", "no-one-hot", "no-one-hot"),
        _in_place_dx("p - 1, p)", "1 - p, -p)", "wrong-sign", "sign"),
        _in_place_dx(" * tl.load(dloss_ptr + pid_m * stride_dloss)", "", "dloss-forgotten", "upstream"),
        Variant(
            "scales-the-probability-alone",
            (
                (
                    _G_DX,
                    "    dx = p * tl.load(dloss_ptr + pid_m * stride_dloss)\n"
                    "    dx = tl.where(offs_v == target, dx - 1, dx)\n",
                ),
            ),
            diagnosis="one-hot-outside",
        ),
        Variant(
            "softmax-of-a-block",
            (
                (
                    _G_LOAD + _G_P[len("    p = tl.exp") :],
                    _G_LOAD.replace("other=0.0", 'other=-float("inf")')[: -len("    p = tl.exp")]
                    + "    p = tl.exp(x - tl.max(x, axis=0))\n    p = p / tl.sum(p, axis=0)\n",
                ),
            ),
            diagnosis="block-alone",
        ),
        _in_place_dx("offs_v == target", "tl.arange(0, BLOCK_V) == target", "lane-for-class", "class-number"),
        Variant("one-block-a-row", ((_G_GRID, "    grid = (M, 1)\n"),), diagnosis="blocks-left-over"),
        Variant(
            "whole-blocks-only",
            ((_G_GRID, "    grid = (M, max(1, V // BLOCK_V))\n"),),
            diagnosis="blocks-left-over",
        ),
        Variant(
            "quotient-of-exponentials",
            ((_G_P, "    p = tl.exp(x) / tl.exp(tl.load(lse_ptr + pid_m))\n"),),
            diagnosis="exp-of-a-logit",
        ),
        Variant(
            "multiplies-by-zero",
            (
                (
                    _G_STORE,
                    _G_STORE.replace("tl.where(target == ignore_index, 0.0, dx)", "dx * (target != ignore_index)"),
                ),
            ),
            diagnosis="infinity-times-zero",
        ),
        Variant(
            "leaves-ignored-rows",
            (
                (
                    _G_STORE,
                    _G_STORE.replace("tl.where(target == ignore_index, 0.0, dx)", "dx").replace(
                        "mask=mask_v", "mask=mask_v & (target != ignore_index)"
                    ),
                ),
            ),
            diagnosis="ignored-rows",
        ),
        Variant(
            "ignored-rows-have-a-softmax",
            ((_G_STORE, _G_STORE.replace("tl.where(target == ignore_index, 0.0, dx)", "dx")),),
            diagnosis="ignored-rows",
        ),
        _in_place_dx("pid_m * stride_dloss", "pid_m", "assumes-contiguous-dloss", "out-of-bounds"),
        Variant("no-store-mask", ((_G_STORE, _G_STORE.replace(", mask=mask_v", "")),), diagnosis="out-of-bounds"),
        Variant(
            "second-tensor",
            (
                (_G_LAUNCH, "    logits, x = x, x.clone()\n" + _G_LAUNCH),
                (
                    "(BLOCK_V)\n    )\n\n\n# ------------------------------------------------------------------------------------------------- losses.one_launch",
                    "(BLOCK_V)\n    )\n    logits.copy_(x)\n\n\n# ------------------------------------------------------------------------------------------------- losses.one_launch",
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "computed-with-torch",
            (
                (
                    _G_LAUNCH,
                    "    p = (x.float() - lse[:, None]).exp()\n"
                    "    p = (p - (torch.arange(V) == target[:, None]).float()) * dloss[:, None]\n"
                    "    x.copy_(torch.where((target == ignore_index)[:, None], 0.0, p))\n    return\n" + _G_LAUNCH,
                ),
            ),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "one-program-a-row",
            (
                (_G_GRID, "    grid = (M,)\n"),
                (
                    _G_PID
                    + " = tl.load(target_ptr + pid_m)\n"
                    + _G_LOAD
                    + _G_P[len("    p = tl.exp") :]
                    + _G_DX
                    + "    # Chosen, not multiplied by 0: an ignored row has no log-sum-exp, and its p may be infinite.\n"
                    + _G_STORE,
                    "    target = tl.load(target_ptr + pid_m)\n"
                    "    lse = tl.load(lse_ptr + pid_m)\n"
                    "    scale = tl.load(dloss_ptr + pid_m * stride_dloss)\n"
                    "    for start in range(0, V, BLOCK_V):\n"
                    "        offs_v = start + tl.arange(0, BLOCK_V)\n"
                    "        x = tl.load(x_ptr + pid_m * V + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)\n"
                    "        dx = (tl.exp(x - lse) - tl.where(offs_v == target, 1.0, 0.0)) * scale\n"
                    "        dx = tl.where(target == ignore_index, 0.0, dx)\n"
                    "        tl.store(x_ptr + pid_m * V + offs_v, dx, mask=offs_v < V)\n",
                ),
            ),
        ),
        Variant(
            "grid-of-one-dimension",
            (
                (_G_GRID, "    grid = (M * triton.cdiv(V, BLOCK_V),)\n"),
                (
                    "    pid_m = tl.program_id(0).to(tl.int64)\n" + _G_PID,
                    "    blocks = tl.cdiv(V, BLOCK_V)\n    pid_m = (tl.program_id(0) // blocks).to(tl.int64)\n"
                    + _G_PID.replace("tl.program_id(1)", "tl.program_id(0) % blocks"),
                ),
            ),
        ),
        Variant(
            "ignored-rows-get-an-infinite-lse",
            (
                (
                    _G_P,
                    '    lse = tl.where(target == ignore_index, float("inf"), tl.load(lse_ptr + pid_m))\n'
                    "    p = tl.exp2((x - lse) * 1.4426950408889634)\n",
                ),
                (_G_STORE, _G_STORE.replace("tl.where(target == ignore_index, 0.0, dx)", "dx")),
            ),
        ),
    ),
)


# ------------------------------------------------------------------------------------------------- losses.one_launch
_O_LOAD = (
    '    x = tl.load(x_row + offs_v, mask=mask_v, other=-float("inf")).to(tl.float32)\n    m = tl.max(x, axis=0)\n'
)
_O_LSE = "    lse = m + tl.log(tl.sum(tl.exp(x - m), axis=0))\n    p = tl.exp(x - lse)\n"
_O_DX = "    dx = tl.where(offs_v == target, p - 1, p) * tl.load(scale_ptr)\n"
_O_TARGET = "    x_target = tl.sum(tl.where(offs_v == target, x, 0.0), axis=0)\n"
_O_STORE = "    tl.store(x_row + offs_v, tl.where(counts, dx, 0.0), mask=mask_v)\n"
_O_LOSS = "    tl.store(loss_ptr + pid_m, tl.where(counts, lse - x_target, 0.0))\n    # END"
_O_HOST = "    BLOCK_V = triton.next_power_of_2(V)\n    loss_and"
_O_FROM_MEMORY = "    x_target = tl.load(x_row + target, mask=counts, other=0.0).to(tl.float32)\n"
# The register's line and the store stand together: the line alone occurs in another exercise too.
_O_BOTH = _O_TARGET + _O_STORE

ONE_LAUNCH = KernelExercise(
    id="losses.one_launch",
    title="A detective: the loss that is wrong in place",
    notebook=NOTEBOOK,
    function="loss_and_gradient_",
    returns=("loss",),
    label=Label(2, 15, "what «in place» means inside a kernel"),
    hints=(
        "The gradients are right and so is the log-sum-exp. What is the other part of the loss, and what stands at its "
        "address when it is read?",
        "In place means that every read of x must be over before the first write to that element. On a GPU another warp of "
        "the same program may be ahead, so that «the line before» is late too; the block in registers, on the other hand, "
        "never changes.",
        "Delete the load that follows the store. The row is in registers: choose the lane whose class is the target, 0 in "
        "all others, and add up.",
    ),
    cases=_one_launch_cases,
    reference=_loss_and_gradient,
    in_place=(0,),
    traffic=Traffic(reads=1, writes=1),
    misconceptions=(
        Misconception(
            "scaled-loss",
            "each loss is too small by one factor: scale belongs to the gradient. Which of the two is multiplied by it?",
            gives=_loss_gives(lambda x, target, scale: _cross_entropy(x, target)[0] * scale),
        ),
        Misconception(
            "probability-first",
            "the loss of a target far below the rest is infinite: its probability is 0 in float32. Which difference says "
            "the same without a probability?",
            when=_infinite_loss,
        ),
        Misconception(
            "read-after-write",
            "the losses are as if the target's logit were a small number between -1 and 0. What stands in x where the logit "
            "was?",
            gives=_loss_gives(_reads_its_gradient),
        ),
        Misconception(
            "read-after-write",
            "the losses are wrong and the gradients right. From which line on does x not hold logits any more?",
            when=lambda evidence: evidence.output == "y" and evidence.kind == "values" and len(evidence.failed) > 5,
        ),
        Misconception(
            "no-one-hot",
            "x holds probabilities. What is different at the target?",
            gives=lambda x, target, scale: {"x": _zero_if_ignored(x.softmax(-1) * scale, target)},
        ),
        Misconception(
            "tail-mask",
            "the lanes past the end of the row are counted. Of which number does exp make 0?",
            when=lambda evidence: evidence.tag("tail"),
        ),
        Misconception(
            "ignored-rows",
            "only rows that do not count are wrong. Their loss is 0 and their gradient is 0: are both?",
            when=lambda evidence: evidence.tag("ignored"),
        ),
        _OUTSIDE_TARGET,
        Misconception("traffic", "the row stays in registers from its load to its store: what else has to move?"),
    ),
    wrong=(
        Variant("reads-after-writing", ((_O_BOTH, _O_STORE + _O_FROM_MEMORY),), diagnosis="read-after-write"),
        Variant(
            "reads-the-row-again",
            (
                (
                    _O_BOTH,
                    _O_STORE + "    x = tl.load(x_row + offs_v, mask=mask_v, other=0.0).to(tl.float32)\n" + _O_TARGET,
                ),
            ),
            diagnosis="read-after-write",
        ),
        Variant(
            "loss-from-the-probability",
            (
                (_O_BOTH, "    p_target = tl.sum(tl.where(offs_v == target, p, 0.0), axis=0)\n" + _O_STORE),
                (_O_LOSS, _O_LOSS.replace("lse - x_target", "-tl.log(p_target)")),
            ),
            diagnosis="probability-first",
        ),
        Variant(
            "scales-the-loss",
            ((_O_LOSS, _O_LOSS.replace("lse - x_target", "(lse - x_target) * tl.load(scale_ptr)")),),
            diagnosis="scaled-loss",
        ),
        Variant(
            "no-one-hot", ((_O_DX, _O_DX.replace("tl.where(offs_v == target, p - 1, p)", "p")),), diagnosis="no-one-hot"
        ),
        Variant("pads-with-zero", ((_O_LOAD, _O_LOAD.replace('-float("inf")', "0.0")),), diagnosis="tail-mask"),
        Variant(
            "ignored-rows-keep-a-gradient",
            ((_O_STORE, _O_STORE.replace("tl.where(counts, dx, 0.0)", "dx")),),
            diagnosis="ignored-rows",
        ),
        Variant(
            "target-without-a-mask",
            ((_O_BOTH, _O_FROM_MEMORY.replace(", mask=counts, other=0.0", "") + _O_STORE),),
            diagnosis="out-of-bounds",
        ),
        Variant(
            "works-on-a-copy",
            (
                (_O_HOST, "    copy = x.clone()\n" + _O_HOST),
                ("def loss_and_gradient_kernel(x_ptr, ", "def loss_and_gradient_kernel(copy_ptr, x_ptr, "),
                (
                    "    loss_and_gradient_kernel[(M,)](\n        x, ",
                    "    loss_and_gradient_kernel[(M,)](\n        copy, x, ",
                ),
                (_O_BOTH, _O_STORE + _O_FROM_MEMORY.replace("x_row", "copy_ptr + pid_m * V")),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "calls-torch",
            (
                (
                    _O_HOST,
                    "    p = torch.softmax(x.float(), -1)\n"
                    "    loss = F.cross_entropy(x.float(), target, reduction='none')\n"
                    "    p = (p - (torch.arange(V) == target[:, None]).float()) * scale\n"
                    "    x.copy_(torch.where((target == ignore_index)[:, None], 0.0, p))\n    return loss\n" + _O_HOST,
                ),
            ),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant("from-memory-before-anything", ((_O_BOTH, _O_STORE), (_O_LOAD, _O_FROM_MEMORY + _O_LOAD))),
        Variant(
            "loss-before-the-gradient",
            (
                (
                    _O_BOTH + _O_LOSS,
                    "    row = tl.sum(tl.where(offs_v == target, lse - x, 0.0), axis=0)\n"
                    "    tl.store(loss_ptr + pid_m, row)\n" + _O_STORE + "    # END",
                ),
            ),
        ),
        Variant(
            "quotient-for-the-probability",
            (
                (
                    _O_LSE,
                    "    e = tl.exp(x - m)\n    total = tl.sum(e, axis=0)\n    lse = m + tl.log(total)\n    p = e / total\n",
                ),
                (_O_DX, "    dx = (p - tl.where(offs_v == target, 1.0, 0.0)) * tl.load(scale_ptr)\n"),
            ),
        ),
    ),
)


# -------------------------------------------------------------------------------------------------- losses.smoothing
_S_TARGET = "    x_target = tl.sum(tl.where(offs_v == target, x, 0.0), axis=0)\n    x_mean"
_S_MEAN = "    x_mean = tl.sum(tl.where(mask_v, x, 0.0), axis=0) / V  # the padding is -inf\n"
_S_LOSS = "    loss = lse - (1 - smoothing) * x_target - smoothing * x_mean + z_loss * lse * lse\n"
_S_SOFTMAX = "    dx = tl.exp(x - lse) * (1 + 2 * z_loss * lse) - smoothing / V\n"
_S_DX = "    dx = tl.where(offs_v == target, dx - (1 - smoothing), dx) * dloss\n"
_S_CALL = "    return SmoothedFunction.apply(x, target, smoothing, z_loss)\n"

SMOOTHING = KernelExercise(
    id="losses.smoothing",
    title="Smoothed targets, and a loss on the log-sum-exp",
    notebook=NOTEBOOK,
    function="smoothed_cross_entropy",
    label=Label(3, 30, "a loss derived by hand, forward and backward; padding in a mean"),
    hints=(
        "Cross-entropy with any target distribution is the log-sum-exp minus the mean of the logits under it. What weight "
        "does the smoothed distribution give to the right class, and to each of the others?",
        "The mean under it is a mix of two numbers: the target's logit and the plain mean of the row, whose padding lanes "
        "hold -inf. In the gradient, the log-sum-exp gives the probabilities, its square twice the log-sum-exp times them, "
        "and the mean gives its weights.",
        "Forward: pick the target's logit; add up the row with 0 in the padding lanes and divide by V; log-sum-exp, less "
        "both in their shares, plus z times its square. Backward: the probability times one plus 2 z lse; less smoothing "
        "over V everywhere; less what is left of 1 at the target; times dloss.",
    ),
    cases=_smoothing_cases,
    reference=_smoothed,
    gradients=1,
    traffic=Traffic(reads=2, writes=1, launches=2),
    misconceptions=(
        Misconception(
            "spread-over-the-others",
            "the smoothed share went to the wrong classes alone. By the docstring, over how many classes is it spread?",
            gives=_smoothed_gives(_loss_of(_spread_over_others)),
        ),
        Misconception(
            "weights-add-up",
            "the right class kept its whole weight, so the weights add up to more than 1. Where does the smoothed share "
            "come from?",
            gives=_smoothed_gives(_loss_of(_too_heavy)),
        ),
        Misconception(
            "mean-over-padding",
            "the mean was taken over the lanes of the block. How many classes does the row have?",
            gives=_smoothed_gives(_loss_of(_padded_mean)),
        ),
        Misconception(
            "no-smoothing",
            "this is the loss without smoothing, z-loss aside. What share does each class get?",
            gives=_smoothed_gives(_loss_of(lambda one_hot, smoothing, V: one_hot)),
        ),
        Misconception(
            "z-of-the-wrong-thing",
            "log-sum-exp was added, and not its square, or not at all. What is the z-loss of a row whose probabilities are "
            "normalised already?",
            gives=_smoothed_gives(lambda x, lse, hot, s, z: _loss_of(_weights)(x, lse, hot, s, 0) + z * lse),
        ),
        Misconception(
            "z-of-the-wrong-thing",
            "the z-loss is missing: z_loss times the square of the log-sum-exp.",
            gives=_smoothed_gives(lambda x, lse, hot, s, z: _loss_of(_weights)(x, lse, hot, s, 0)),
        ),
        Misconception(
            "padding-inf",
            "rows shorter than their block are lost: their padding lanes hold -inf, right for exp and a maximum. What do "
            "they do to a plain sum?",
            when=lambda evidence: evidence.output == "y" and "tail" in evidence.case.tags and not evidence.tag("z"),
        ),
        Misconception(
            "z-gradient",
            "the z-loss is missing in the gradient. What does its square become, and what is the derivative of the "
            "log-sum-exp itself?",
            gives=_smoothed_gives(dx=lambda x, lse, hot, s, z: _dx_of(_weights)(x, lse, hot, s, 0)),
        ),
        Misconception(
            "z-gradient",
            "the derivative of a square has a 2 in it.",
            gives=_smoothed_gives(dx=lambda x, lse, hot, s, z: _dx_of(_weights)(x, lse, hot, s, z / 2)),
        ),
        Misconception(
            "z-gradient",
            "2 z lse was added to every element as it is. How much does the log-sum-exp rise when one logit does?",
            gives=_smoothed_gives(
                dx=lambda x, lse, hot, s, z: _dx_of(_weights)(x, lse, hot, s, 0) + 2 * z * lse[:, None]
            ),
        ),
        Misconception(
            "hard-gradient",
            "the loss is smoothed and its gradient is not: 1 was taken away at the target, and nothing elsewhere.",
            gives=_smoothed_gives(dx=_dx_of(lambda one_hot, smoothing, V: one_hot)),
        ),
        Misconception(
            "weights-add-up",
            "the right class lost more than its share, or the others nothing. What do the weights of the logits add up to, "
            "and so the elements of a row of dx?",
            gives=_smoothed_gives(dx=_dx_of(_too_heavy)),
        ),
        Misconception(
            "weights-add-up",
            "the gradient takes the target's share away and leaves that of the others. What do a row's elements add up to?",
            gives=_smoothed_gives(dx=_dx_of(lambda one_hot, smoothing, V: (1 - smoothing) * one_hot)),
        ),
        Misconception(
            "upstream",
            "dloss is missing, or it scales a part of the gradient only. How much does this row's loss matter?",
            gives=lambda x, target, s, z, dy: {"dx": _dx_of(_weights)(x, x.logsumexp(-1), _one_hot(x, target), s, z)},
        ),
        Misconception("traffic", "the row is in registers in both kernels: everything can be made of it there"),
    ),
    wrong=(
        Variant("adds-up-the-padding", ((_S_MEAN, "    x_mean = tl.sum(x, axis=0) / V\n"),), diagnosis="padding-inf"),
        Variant(
            "divides-by-the-block", ((_S_MEAN, _S_MEAN.replace("/ V", "/ BLOCK_V")),), diagnosis="mean-over-padding"
        ),
        Variant(
            "spreads-over-the-others",
            (
                (
                    _S_LOSS,
                    "    x_mean = (x_mean * V - x_target) / tl.maximum(V - 1, 1)\n" + _S_LOSS,
                ),
            ),
            diagnosis="spread-over-the-others",
        ),
        Variant(
            "target-keeps-its-weight",
            ((_S_LOSS, _S_LOSS.replace("(1 - smoothing) * x_target", "x_target")),),
            diagnosis="weights-add-up",
        ),
        Variant(
            "never-smoothed",
            (
                (_S_LOSS, "    loss = lse - x_target + z_loss * lse * lse\n"),
                (_S_SOFTMAX, "    dx = tl.exp(x - lse) * (1 + 2 * z_loss * lse)\n"),
                (_S_DX, "    dx = tl.where(offs_v == target, dx - 1, dx) * dloss\n"),
            ),
            diagnosis="no-smoothing",
        ),
        Variant("z-not-squared", ((_S_LOSS, _S_LOSS.replace("lse * lse", "lse")),), diagnosis="z-of-the-wrong-thing"),
        Variant(
            "z-forgotten", ((_S_LOSS, _S_LOSS.replace(" + z_loss * lse * lse", "")),), diagnosis="z-of-the-wrong-thing"
        ),
        Variant(
            "no-z-in-dx", ((_S_SOFTMAX, _S_SOFTMAX.replace(" * (1 + 2 * z_loss * lse)", "")),), diagnosis="z-gradient"
        ),
        Variant("no-2-in-dx", ((_S_SOFTMAX, _S_SOFTMAX.replace("2 * ", "")),), diagnosis="z-gradient"),
        Variant(
            "z-added-to-every-element",
            ((_S_SOFTMAX, _S_SOFTMAX.replace(" * (1 + 2 * z_loss * lse)", " + 2 * z_loss * lse")),),
            diagnosis="z-gradient",
        ),
        Variant(
            "gradient-not-smoothed",
            (
                (_S_SOFTMAX, _S_SOFTMAX.replace(" - smoothing / V", "")),
                (_S_DX, _S_DX.replace("(1 - smoothing)", "1")),
            ),
            diagnosis="hard-gradient",
        ),
        Variant(
            "one-less-at-the-target", ((_S_DX, _S_DX.replace("(1 - smoothing)", "1")),), diagnosis="weights-add-up"
        ),
        Variant(
            "others-lose-nothing",
            ((_S_SOFTMAX, _S_SOFTMAX.replace(" - smoothing / V", "")),),
            diagnosis="weights-add-up",
        ),
        Variant("dloss-forgotten", ((_S_DX, _S_DX.replace(" * dloss", "")),), diagnosis="upstream"),
        Variant(
            "autograd-of-torch",
            (
                (
                    _S_CALL,
                    "    lse = torch.logsumexp(x.float(), -1)\n"
                    "    loss = F.cross_entropy(x.float(), target, label_smoothing=smoothing, reduction='none')\n"
                    "    return loss + z_loss * lse**2\n",
                ),
            ),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "a-weight-for-each-class",
            (
                (
                    _S_TARGET[: -len("    x_mean")] + _S_MEAN + _S_LOSS,
                    "    weight = tl.where(offs_v == target, 1 - smoothing + smoothing / V, smoothing / V)\n"
                    "    loss = tl.sum(tl.where(mask_v, weight * (lse - x), 0.0), axis=0) + z_loss * lse * lse\n",
                ),
                (
                    _S_SOFTMAX + _S_DX,
                    "    weight = tl.where(offs_v == target, 1 - smoothing + smoothing / V, smoothing / V)\n"
                    "    p = tl.exp(x - lse)\n"
                    "    dx = dloss * (p - weight + 2 * z_loss * lse * p)\n",
                ),
            ),
        ),
        Variant(
            "target-from-memory",
            (
                (
                    _S_TARGET,
                    "    x_target = tl.load(x_ptr + pid_m * V + target).to(tl.float32)\n    x_mean",
                ),
                (
                    _S_DX,
                    "    share = (offs_v == target).to(tl.float32) * (smoothing - 1)\n    dx = (dx + share) * dloss\n",
                ),
            ),
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------- losses.column
_K_LOOP = "    for first in range(0, len(x), chunk):\n        rows = slice(first, first + chunk)\n        logits = x[rows] @ weight.T\n        # BEGIN"
_K_TOTAL = '        total = total + F.cross_entropy(logits, target[rows], reduction="sum").item()\n'
_K_KEEP = "        watched.append(logits[:, column].clone())  # a view would keep the whole chunk\n"
_K_RETURN = "    return [total / len(x), watched.mean().item(), watched.max().item()]\n"

COLUMN = FunctionExercise(
    id="losses.column",
    title="A detective: the log entry that holds the logits",
    notebook=NOTEBOOK,
    function="evaluate",
    label=Label(2, 15, "views share memory; when memory is freed"),
    hints=(
        "All numbers are right. What of a chunk is still needed when the next one begins, and how many bytes should that "
        "be?",
        "Indexing with a number or a slice gives a view: a small tensor that refers to the large one's memory, which lives "
        "as long as anybody refers to it. Deleting the name `logits` changes nothing about that.",
        "Keep a copy of the column, not a view of it: one call more where it is appended. Or keep two running numbers, "
        "since nobody asks for the column itself.",
    ),
    cases=_column_cases,
    expected=_evaluated,
    tolerance=1e-6,
    memory_rule=_memory_rule,
    misconceptions=(
        Misconception(
            "mean-of-means",
            "the chunks' means were averaged, as if all chunks were equally long. How much should a last chunk of one row "
            "weigh?",
            gives=lambda *args: _evaluated(*args, combine="means"),
        ),
        Misconception(
            "last-chunk",
            "the rows behind the last full chunk are missing. How long may the last chunk be?",
            gives=_without_the_remainder,
        ),
        Misconception(
            "no-mean",
            "the losses were added up and not divided by their number.",
            gives=lambda *args: _evaluated(*args, combine="total"),
        ),
    ),
    wrong=(
        Variant("keeps-views", ((_K_KEEP, "        watched.append(logits[:, column])\n"),), diagnosis="something-kept"),
        Variant(
            "deletes-the-name",
            ((_K_KEEP, "        watched.append(logits[:, column])\n        del logits\n"),),
            diagnosis="something-kept",
        ),
        Variant(
            "detaches", ((_K_KEEP, "        watched.append(logits[:, column].detach())\n"),), diagnosis="something-kept"
        ),
        Variant(
            "keeps-the-chunks",
            (
                (_K_KEEP, "        watched.append(logits)\n"),
                (
                    "    watched = torch.cat(watched)\n",
                    "    watched = torch.cat([part[:, column] for part in watched])\n",
                ),
            ),
            diagnosis="something-kept",
        ),
        Variant(
            "all-at-once",
            (
                (
                    _K_LOOP,
                    "    for first in range(1):\n        rows = slice(0, len(x))\n"
                    "        logits = x[rows] @ weight.T\n        # BEGIN",
                ),
            ),
            diagnosis="all-at-once",
        ),
        Variant(
            "averages-means",
            (
                (_K_TOTAL, _K_TOTAL.replace(', reduction="sum"', "")),
                (_K_RETURN, _K_RETURN.replace("total / len(x)", "total / -(-len(x) // chunk)")),
            ),
            diagnosis="mean-of-means",
        ),
        Variant(
            "drops-the-last-rows",
            ((_K_LOOP, _K_LOOP.replace("range(0, len(x), chunk)", "range(0, len(x) - chunk + 1, chunk) or [0]")),),
            diagnosis="last-chunk",
        ),
        Variant("adds-up-only", ((_K_RETURN, _K_RETURN.replace("total / len(x)", "total")),), diagnosis="no-mean"),
    ),
    right=(
        Variant(
            "running-numbers",
            (
                ("    total, watched = 0.0, []\n    for", "    total, s, top = 0.0, 0.0, -math.inf\n    for"),
                ("import torch\nimport triton\n", "import math\n\nimport torch\nimport triton\n"),
                (
                    _K_KEEP,
                    "        s += logits[:, column].sum().item()\n        top = max(top, logits[:, column].max().item())\n",
                ),
                ("    watched = torch.cat(watched)\n" + _K_RETURN, "    return [total / len(x), s / len(x), top]\n"),
            ),
        ),
        Variant("index-with-a-list", ((_K_KEEP, "        watched.append(logits[:, [column]])\n"),)),
        Variant("its-own-product", ((_K_KEEP, "        watched.append(x[rows] @ weight[column])\n"),)),
        Variant(
            "split",
            (
                (
                    _K_LOOP,
                    "    for part, wanted in zip(x.split(chunk), target.split(chunk)):\n"
                    "        logits = torch.mm(part, weight.mT)\n        # BEGIN",
                ),
                (
                    _K_TOTAL,
                    "        log_p = logits.log_softmax(-1)\n"
                    "        total -= log_p.gather(1, wanted[:, None]).sum().item()\n",
                ),
                (_K_KEEP, "        watched.append(logits[:, column].contiguous())\n"),
            ),
        ),
    ),
)


# ---------------------------------------------------------------------------------------------------- losses.chunked
_L_COUNT = "    count = (target != ignore_index).sum()  # of all chunks: the gradient of each needs it\n"
_L_ZERO = "    loss = torch.zeros((), dtype=x.dtype, device=x.device)\n"
_L_OUT = "    dx, dweight = torch.empty_like(x), torch.zeros_like(weight)\n"
_L_LOOP = "    for start in range(0, len(x), chunk):\n        rows = slice(start, start + chunk)\n        logits = x[rows] @ weight.T\n        loss"
_L_LOSS = '        loss += F.cross_entropy(logits, target[rows], ignore_index=ignore_index, reduction="sum") / count\n'
_L_SOFTMAX = "        dlogits = torch.softmax(logits, -1)\n"
_L_VALID = "        valid = target[rows] != ignore_index\n"
_L_HOT = "        dlogits[valid.nonzero()[:, 0], target[rows][valid]] -= 1\n"
_L_ZEROS = "        dlogits *= valid[:, None]\n"
_L_SCALE = "        dlogits /= count\n"
_L_DX = "        dx[rows] = dlogits @ weight\n"
_L_DW = "        dweight += dlogits.T @ x[rows]\n"
_L_BODY = _L_LOSS + _L_SOFTMAX + _L_VALID + _L_HOT + _L_ZEROS + _L_SCALE + _L_DX + _L_DW
_L_ALL = _L_COUNT + _L_ZERO + _L_OUT + _L_LOOP[: -len("        loss")] + _L_BODY + "    return loss, dx, dweight\n"
_L_AUTOGRAD = (
    "    count = (target != ignore_index).sum()\n"
    "    w, total, dxs = weight.detach().requires_grad_(), 0.0, []\n"
    "    for part, wanted in zip(x.split(chunk), target.split(chunk)):\n"
    "        part = part.detach().requires_grad_()\n"
    "        loss = F.cross_entropy(part @ w.T, wanted, ignore_index=ignore_index, reduction='sum') / count\n"
    "        loss.backward()\n"
    "        total += loss.item()\n"
    "        dxs.append(part.grad)\n"
    "    return torch.tensor(total), torch.cat(dxs), w.grad\n"
)

CHUNKED = FunctionExercise(
    id="losses.chunked",
    title="The loss of a linear layer, without its logits",
    notebook=NOTEBOOK,
    function="linear_cross_entropy",
    label=Label(4, 40, "gradients in the forward pass; memory that does not grow with the tokens"),
    hints=(
        "A chunk's logits are needed for its loss and for its gradient. If both are made while the logits are there, what "
        "has to be kept for the backward pass?",
        "For one chunk: logits, their gradient by softmax minus one-hot, a row of dx for each token, and a part of dweight, "
        "which is a sum over all tokens. The mean's divisor belongs to all chunks and is known before the first. With "
        "autograd, call backward inside the loop.",
        "Count the targets that matter. For each slice of rows: the product; its summed loss over that count; softmax, 1 "
        "less at each target that counts; rows that do not count set to 0; over the count; times weight for the slice of "
        "dx; transposed, times the slice of x, added to dweight. Nothing of the chunk is kept in a list.",
    ),
    cases=_chunked_cases,
    expected=_linear,
    tolerance=1e-6,
    memory_rule=_memory_rule,
    misconceptions=(
        Misconception(
            "mean-of-means",
            "the chunks' means were averaged. A chunk in which few targets count then weighs as much as a full one: what is "
            "the mean over?",
            gives=_linear_gives(divisor="means"),
        ),
        Misconception(
            "chunk-mean",
            "each chunk was divided by what counts in that chunk, so the sum is as many times too large as there are "
            "chunks. What is the mean over?",
            gives=_linear_gives(divisor="chunk"),
        ),
        Misconception(
            "ignored-in-the-mean",
            "the sum was divided by all tokens. Which of them does the mean count?",
            gives=_linear_gives(divisor="tokens"),
        ),
        Misconception(
            "ignored-rows",
            "ignored tokens still have their softmax as a gradient. What is the derivative of a loss that they are not in?",
            gives=_linear_gives(ignored="softmax"),
        ),
        Misconception(
            "ignored-index",
            "the gradient of ignored tokens is wrong at one class: an index of -100 counts from the end. Which rows may "
            "have 1 taken away?",
            gives=_linear_gives(ignored="wraps"),
        ),
        Misconception(
            "last-one-only",
            "dweight is that of the last chunk alone. Every token adds to it: what happened to the earlier parts?",
            gives=_linear_gives(keep="last"),
        ),
        Misconception(
            "empty-chunk",
            "a chunk in which nothing counts has 0 losses, and 0 / 0 is NaN. Which divisor is never 0 here?",
            when=lambda evidence: any("nan" in repr(part) for part in evidence.outputs),
        ),
    ),
    wrong=(
        Variant(
            "averages-means",
            (
                (_L_COUNT, "    chunks = -(-len(x) // chunk)\n"),
                (
                    _L_LOOP,
                    _L_LOOP.replace(
                        "        loss",
                        "        count = (target[rows] != ignore_index).sum().clamp(min=1) * chunks\n        loss",
                    ),
                ),
            ),
            diagnosis="mean-of-means",
        ),
        Variant(
            "adds-means",
            (
                (_L_COUNT, ""),
                (
                    _L_LOOP,
                    _L_LOOP.replace(
                        "        loss",
                        "        count = (target[rows] != ignore_index).sum().clamp(min=1)\n        loss",
                    ),
                ),
            ),
            diagnosis="chunk-mean",
        ),
        Variant(
            "divides-an-empty-chunk",
            (
                (
                    _L_LOSS,
                    "        loss += F.cross_entropy(logits, target[rows]) * (target[rows] != -100).sum() / count\n",
                ),
            ),
            diagnosis="empty-chunk",
        ),
        Variant("divides-by-all-tokens", ((_L_COUNT, "    count = len(x)\n"),), diagnosis="ignored-in-the-mean"),
        Variant("ignored-rows-have-a-softmax", ((_L_ZEROS, ""),), diagnosis="ignored-rows"),
        Variant(
            "index-minus-100",
            (
                (_L_HOT, "        dlogits[torch.arange(len(dlogits)), target[rows]] -= 1\n"),
                (_L_ZEROS, ""),
            ),
            diagnosis="ignored-index",
        ),
        Variant("overwrites-dweight", ((_L_DW, _L_DW.replace("+=", "=")),), diagnosis="last-one-only"),
        Variant(
            "all-at-once",
            (
                (
                    _L_LOOP,
                    _L_LOOP.replace("range(0, len(x), chunk)", "range(0, len(x), len(x))").replace(
                        "+ chunk", "+ len(x)"
                    ),
                ),
            ),
            diagnosis="all-at-once",
        ),
        Variant(
            "backward-at-the-end",
            (
                (
                    _L_ALL,
                    "    count = (target != ignore_index).sum()\n"
                    "    x, weight, loss = x.detach().requires_grad_(), weight.detach().requires_grad_(), 0.0\n"
                    "    for part, wanted in zip(x.split(chunk), target.split(chunk)):\n"
                    "        logits = part @ weight.T\n"
                    "        loss = loss + F.cross_entropy(logits, wanted, ignore_index=ignore_index, reduction='sum')\n"
                    "    loss = loss / count\n    loss.backward()\n"
                    "    return loss.detach(), x.grad, weight.grad\n",
                ),
            ),
            diagnosis="something-kept",
        ),
        Variant(
            "keeps-the-gradients",
            (
                (_L_OUT, "    kept, dweight = [], torch.zeros_like(weight)\n"),
                (_L_DX, "        kept.append(dlogits)\n"),
                ("    return loss, dx, dweight\n", "    return loss, torch.cat([d @ weight for d in kept]), dweight\n"),
            ),
            diagnosis="something-kept",
        ),
    ),
    right=(
        Variant("autograd-in-the-loop", ((_L_ALL, _L_AUTOGRAD),)),
        Variant(
            "one-hot-and-lists",
            (
                (
                    _L_ALL,
                    "    counts = (target != ignore_index).to(x.dtype)\n"
                    "    total, dxs, dweight = torch.zeros((), dtype=x.dtype), [], torch.zeros_like(weight)\n"
                    "    for part, wanted, c in zip(x.split(chunk), target.split(chunk), counts.split(chunk)):\n"
                    "        logits = part @ weight.mT\n"
                    "        lse = logits.logsumexp(-1, keepdim=True)\n"
                    "        hot = F.one_hot(wanted.clamp(min=0), len(weight)).to(x.dtype)\n"
                    "        total += (c * (lse[:, 0] - (hot * logits).sum(-1))).sum()\n"
                    "        d = ((logits - lse).exp() - hot) * c[:, None] / counts.sum()\n"
                    "        dxs.append(d @ weight)\n"
                    "        dweight.addmm_(d.mT, part)\n"
                    "    return total / counts.sum(), torch.cat(dxs), dweight\n",
                ),
            ),
        ),
        Variant(
            "divides-at-the-end",
            (
                (_L_LOSS, _L_LOSS.replace(" / count", "")),
                (_L_ZEROS + _L_SCALE, "        dlogits[~valid] = 0\n"),
                ("    return loss, dx, dweight\n", "    return loss / count, dx.div_(count), dweight.div_(count)\n"),
            ),
        ),
    ),
)


# --------------------------------------------------------------------------------------------------------- losses.kl
_D_LOADS = (
    "        x = tl.load(x_ptr + pid_m * V + start + offs_v, mask=mask_v, other=0.0).to(tl.float32)\n"
    "        t = tl.load(t_ptr + pid_m * V + start + offs_v, mask=mask_v, other=0.0).to(tl.float32)\n"
)
_D_NOTE = "        # 0 log 0 is 0 here, whatever x is, and the padding is 0 too\n"
_D_ADD = "        acc += tl.where(t > 0, t * (tl.log(tl.where(t > 0, t, 1.0)) - x), 0.0)\n"
_D_SUM = "    tl.store(loss_ptr + pid_m, tl.sum(acc, axis=0))\n"
_D_SCALE = "    dloss = tl.load(dloss_ptr + pid_m * stride_dloss)\n    for start"
_D_DX = "        tl.store(dx_ptr + pid_m * V + start + offs_v, -t * dloss, mask=mask_v)\n"
_D_SAVE = "        ctx.save_for_backward(t)\n"
_D_BACK = "        (t,) = ctx.saved_tensors\n        return kl_bwd(t, dloss, ctx.BLOCK_V), None, None\n"
_D_CALL = "    return KLFunction.apply(x, t, BLOCK_V)\n"


def _kl_term(old: str, new: str, name: str, diagnosis: str) -> Variant:
    return Variant(name, ((_D_ADD, _D_ADD.replace(old, new)),), diagnosis=diagnosis)


def _kl_dx(new: str, name: str, diagnosis: str) -> Variant:
    return Variant(name, ((_D_DX, _D_DX.replace("-t * dloss", new)),), diagnosis=diagnosis)


KL = KernelExercise(
    id="losses.kl",
    title="KL divergence, forward, backward and known to autograd",
    notebook=NOTEBOOK,
    function="kl_div",
    label=Label(3, 30, "an autograd.Function with two kernels; what a limit makes of 0 log 0"),
    hints=(
        "What is t log t when t goes to 0, and what do tl.log and the product make of it? And of x and t, which does the "
        "gradient by x depend on?",
        "The limit is 0 and has to be chosen, on the load's padding too. x appears in the loss once, linearly: its gradient "
        "is minus t times the row's dloss. So save t, not x. A Function gives back one value for each argument of forward.",
        "Forward kernel: for each block load both, take the logarithm of t where it is positive and of 1 elsewhere, add t "
        "times the difference to an accumulator; sum up and store. Backward kernel: the row's dloss by its stride; for each "
        "block load t and store minus the product. Function: save t and the block size; return dx and two times None.",
    ),
    cases=_kl_cases,
    reference=_kl,
    gradients=1,
    traffic=Traffic(reads=3, writes=1, launches=2),
    misconceptions=(
        Misconception(
            "zero-log-zero",
            "rows with a t of 0 are NaN: log 0 is -inf, and 0 times -inf is NaN. Which value must such a term have, and "
            "can it be chosen before the logarithm is taken?",
            when=lambda evidence: evidence.kind == "nan" and evidence.output == "y" and evidence.tag("zero"),
        ),
        Misconception(
            "padding-log",
            "rows that do not fill their last block are NaN. What does a lane past the end contribute?",
            when=lambda evidence: evidence.kind == "nan" and evidence.output == "y",
        ),
        Misconception(
            "swapped",
            "this is the divergence of the other from the one: x's probabilities weigh the difference. Which of the two "
            "does the definition average over?",
            gives=_kl_gives(lambda x, t: (x.exp() * (x - t.log())).sum(-1)),
        ),
        Misconception(
            "no-entropy",
            "this is the cross-entropy, minus the sum of t x. By how much does it differ from the divergence, which is 0 "
            "where both agree?",
            gives=_kl_gives(lambda x, t: -(t * x).sum(-1)),
        ),
        Misconception(
            "log-of-a-logarithm",
            "x holds log-probabilities already. What does a logarithm, or an exponential, do to it?",
            gives=_kl_gives(lambda x, t: (t.xlogy(t) - t * x.exp()).sum(-1)),
        ),
        Misconception(
            "log-of-a-logarithm",
            "x holds log-probabilities already. What does a logarithm, or an exponential, do to it?",
            gives=_kl_gives(lambda x, t: (t * (t.log() - x.log())).where(t > 0, t).sum(-1)),
        ),
        Misconception(
            "mean-for-sum",
            "the terms were averaged over the classes. The divergence of a row is their sum: which of the two does PyTorch "
            "call mean?",
            gives=_kl_gives(lambda x, t: _kl(x, t) / x.shape[-1]),
        ),
        Misconception(
            "epsilon",
            "a small number was added under the logarithm, which moves every term. Is there a way for t = 0 that leaves the "
            "others alone?",
            when=lambda evidence: (
                evidence.kind == "values"
                and evidence.output == "y"
                and bool(((evidence.outputs - evidence.expected).abs() < 1e-2).all())
            ),
        ),
        Misconception(
            "sign",
            "every element of dx has the wrong sign. If x rises where t is large, does the divergence rise?",
            gives=_kl_gives(dx=lambda x, t: t),
        ),
        Misconception(
            "softmax-gradient",
            "softmax minus target is the gradient by logits. x is not a logit but a log-probability: how does it enter "
            "the loss?",
            gives=_kl_gives(dx=lambda x, t: x.exp() - t),
        ),
        Misconception(
            "upstream",
            "dloss is missing. How much does each row's loss matter to whoever called backward?",
            gives=lambda x, t, BLOCK_V, dy: {"dx": -t},
        ),
        Misconception("out-of-bounds", "two numbers of dloss may lie 2 apart in memory, or 0: who knows how far?"),
        Misconception("traffic", "x and t once for the loss, t once for the gradient: what else was fetched?"),
    ),
    wrong=(
        Variant(
            "takes-the-logarithm-of-0",
            (
                (
                    _D_LOADS,
                    _D_LOADS[: _D_LOADS.rindex("other=0.0")]
                    + "other=1.0"
                    + _D_LOADS[_D_LOADS.rindex("other=0.0") + 9 :],
                ),
                (_D_ADD, "        acc += t * (tl.log(t) - x)\n"),
            ),
            diagnosis="zero-log-zero",
        ),
        Variant(
            "padding-has-a-logarithm", ((_D_ADD, "        acc += t * (tl.log(t) - x)\n"),), diagnosis="padding-log"
        ),
        Variant(
            "swapped",
            ((_D_ADD, "        acc += tl.where(mask_v, tl.exp(x) * (x - tl.log(t)), 0.0)\n"),),
            diagnosis="swapped",
        ),
        Variant("cross-entropy", ((_D_ADD, "        acc -= t * x\n"),), diagnosis="no-entropy"),
        _kl_term("- x)", "- tl.exp(x))", "exponentiates-x", "log-of-a-logarithm"),
        _kl_term("- x)", "- tl.log(x))", "takes-the-logarithm-of-x", "log-of-a-logarithm"),
        Variant("mean-of-the-row", ((_D_SUM, _D_SUM.replace("axis=0)", "axis=0) / V")),), diagnosis="mean-for-sum"),
        Variant("epsilon", ((_D_ADD, "        acc += t * (tl.log(t + 1e-6) - x)\n"),), diagnosis="epsilon"),
        _kl_dx("t * dloss", "wrong-sign", "sign"),
        _kl_dx("-t", "dloss-forgotten", "upstream"),
        Variant(
            "softmax-minus-target",
            (
                ("def kl_bwd_kernel(t_ptr, ", "def kl_bwd_kernel(x_ptr, t_ptr, "),
                ("def kl_bwd(t: Tensor, ", "def kl_bwd(x: Tensor, t: Tensor, "),
                ("    kl_bwd_kernel[(len(t),)](t, ", "    kl_bwd_kernel[(len(t),)](x, t, "),
                (_D_SAVE, "        ctx.save_for_backward(x, t)\n"),
                (_D_BACK, _D_BACK.replace("(t,)", "x, t").replace("kl_bwd(t,", "kl_bwd(x, t,")),
                (
                    _D_DX,
                    "        x = tl.load(x_ptr + pid_m * V + start + offs_v, mask=mask_v).to(tl.float32)\n"
                    + _D_DX.replace("-t * dloss", "(tl.exp(x) - t) * dloss"),
                ),
            ),
            diagnosis="softmax-gradient",
        ),
        Variant(
            "assumes-contiguous-dloss",
            ((_D_SCALE, _D_SCALE.replace("pid_m * stride_dloss", "pid_m")),),
            diagnosis="out-of-bounds",
        ),
        Variant(
            "loads-x-in-the-backward-pass",
            (
                ("def kl_bwd_kernel(t_ptr, ", "def kl_bwd_kernel(x_ptr, t_ptr, "),
                ("def kl_bwd(t: Tensor, ", "def kl_bwd(x: Tensor, t: Tensor, "),
                ("    kl_bwd_kernel[(len(t),)](t, ", "    kl_bwd_kernel[(len(t),)](x, t, "),
                (_D_SAVE, "        ctx.save_for_backward(x, t)\n"),
                (_D_BACK, _D_BACK.replace("(t,)", "x, t").replace("kl_bwd(t,", "kl_bwd(x, t,")),
                (
                    _D_DX,
                    "        x = tl.load(x_ptr + pid_m * V + start + offs_v, mask=mask_v, other=0.0).to(tl.float32)\n"
                    + _D_DX.replace("-t * dloss", "(x - x - t) * dloss"),
                ),
            ),
            diagnosis="traffic",
        ),
        Variant(
            "backward-in-torch",
            ((_D_BACK, _D_BACK.replace("kl_bwd(t, dloss, ctx.BLOCK_V)", "-t * dloss[:, None].to(t.dtype)")),),
            diagnosis="not-your-kernel",
        ),
        Variant(
            "autograd-of-torch",
            ((_D_CALL, "    return F.kl_div(x.float(), t.float(), reduction='none').sum(-1)\n"),),
            diagnosis="not-your-kernel",
        ),
    ),
    right=(
        Variant(
            "one-sum-a-block",
            (
                ("    acc = tl.zeros((BLOCK_V,), tl.float32)\n", "    acc = tl.zeros((), tl.float32)\n"),
                (
                    _D_ADD,
                    "        log_t = tl.log(tl.maximum(t, 1e-37))\n        acc += tl.sum(t * log_t - t * x, axis=0)\n",
                ),
                (_D_SUM, "    tl.store(loss_ptr + pid_m, acc)\n"),
            ),
        ),
        Variant(
            "base-2-and-backwards",
            (
                (
                    _D_ADD,
                    "        log_t = tl.where(t == 0.0, 0.0, tl.log2(tl.where(t == 0.0, 1.0, t)) * 0.6931471805599453)\n"
                    "        acc += t * (log_t - x)\n",
                ),
                (
                    _D_SCALE + " in range(0, V, BLOCK_V):\n",
                    "    minus = -tl.load(dloss_ptr + pid_m * stride_dloss)\n"
                    "    for block in range(tl.cdiv(V, BLOCK_V)):\n"
                    "        start = (tl.cdiv(V, BLOCK_V) - 1 - block) * BLOCK_V\n",
                ),
                (_D_DX, _D_DX.replace("-t * dloss", "t * minus")),
            ),
        ),
        Variant(
            "saves-both",
            (
                (_D_SAVE, "        ctx.save_for_backward(x, t)\n"),
                (_D_BACK, _D_BACK.replace("(t,)", "_, t")),
            ),
        ),
    ),
)


EXERCISES = (CROSS_ENTROPY, IN_PLACE, ONE_LAUNCH, SMOOTHING, COLUMN, CHUNKED, KL)
