"""The exercises of notebook 14: cases, bounds on traffic and on the longest program, and what each wrong idea computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.accounting.tiling import cdiv
from gpukit.grading import compare, ideas
from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only
from gpukit.grading.inputs import Inputs, case, far, listed, nbytes, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence, Outcome
    from gpukit.grading.messages import LaunchFacts

BLOCK = 32  # tokens in a block, of all kernels
_NUMBERS = 64  # bytes that a call may allocate beside its results and what the docstring names: single numbers


# ------------------------------------------------------------------------------------------------------------- inputs
class _Caches(Inputs):
    """Queries and caches. What lies behind a sequence's tokens is NaN, or with stale=True numbers of somebody else."""

    def cache(self, B: int, T_max: int, H: int, D: int, lengths: Sequence[int], dtype: str, stale: bool) -> Tensor:
        x = self.normal(B, T_max, H, D, dtype=dtype)
        if not stale:
            for b, n in enumerate(lengths):
                x[b, n:] = math.nan
        return x

    def args(
        self, H: int, D: int, T_max: int, lengths: Sequence[int], dtype: str, H_kv: int = 0, stale: bool = False
    ) -> tuple[Tensor, ...]:
        """q [B, H, D], the caches [B, T_max, H_kv, D], values around 1, and lengths."""
        B = len(lengths)
        k, v = (self.cache(B, T_max, H_kv or H, D, lengths, dtype, stale) for _ in range(2))
        q = self.normal(B, H, D, dtype=dtype)
        if D < 5:  # in results of few numbers no values may cancel, and scores are exact
            q, k, v = (q * 8).round() / 8, (k * 8).round() / 8, v.abs()
        return q, k, v + 1, self.torch.tensor(lengths, dtype=self.torch.int32)

    def corners(
        self, H_kv: int, T_max: int, lengths: Sequence[int], dtype: str = "float32", stale: bool = False
    ) -> tuple[Tensor, ...]:
        """Twelve query heads of size 16 on H_kv heads of a cache, with scores that are exact in every dtype.

        The first six: all scores 0, of no terms and of terms beyond float16 that cancel; that rise and fall by 1/2 from token to
        token; the first token's and the last one's 4 above all others. The last six: all 200; all -200; that rise and fall by
        20; the first one's and the last one's 1,600 above all others. In float16 the values of theirs have sums beyond 65,504.
        """
        q, k, v, at = self.args(12, 16, T_max, lengths, dtype, H_kv, stale)
        q.zero_()
        q[:, 1, :2], q[:, 2, 2], q[:, 3, 3], q[:, 4, 5], q[:, 5, 6] = 300, 2, -2, 16, 16
        q[:, 6, 4], q[:, 7, 4], q[:, 8, 3], q[:, 9, 3], q[:, 10, 5], q[:, 11, 6] = 800, -800, 80, -80, 6400, 6400
        for x, n in zip(k, lengths, strict=True):
            tokens = self.torch.arange(n)[:, None]
            x[:n] = 0
            x[:n, :, 0], x[:n, :, 1], x[:n, :, 2], x[:n, :, 3], x[:n, :, 4] = 256, -256, tokens - (n - 1), tokens, 1
            x[:1, :, 5], x[n - 1, :, 6] = 1, 1
        if dtype == "float16":
            v[:, :, H_kv // 2 :] = v[:, :, H_kv // 2 :] * 1000 + 50_000
        return q, k, v, at

    def far(self) -> tuple[Tensor, ...]:
        """Two heads of 21 tokens, whose scores are all -163,840: no number that a maximum starts from, and none that stands for "no
        token", may lie above them. They are equal, since powers of 2 would have few digits left for a difference."""
        q, k, v, lengths = self.args(2, 16, 40, [21], "float32")
        q.zero_()
        k[:, :21] = 0
        q[..., 0], k[:, :21, :, 0] = -655_360, 1
        return q, k, v, lengths

    def unknown(self, H: int, H_kv: int = 0) -> tuple[Tensor, ...]:
        """Two heads of a cache in float32, of which the first has a NaN in its first token's keys. Not where a sequence, or a
        part of one, may be empty: there it is right to divide only where the sum of weights is above 0, which makes 0 of a
        NaN."""
        q, k, v, lengths = self.args(H, 16, 40, [37], "float32", H_kv)
        k[0, 0, 0, 3] = math.nan
        return q, k, v, lengths

    def fine(self) -> tuple[Tensor, ...]:
        """Two heads of 40 tokens in bfloat16. The scores of the first are 99.7 and, in every second token, 0.27 more; those of the
        second are 0 and 0.35, a difference of terms around 71. Which tokens have values of 0 says how much of the weight the
        others have: a score, or a query times the scale, that was rounded to 16 bits changes that by more than a unit."""
        q, k, v, lengths = self.args(2, 32, 48, [40], "bfloat16")
        q[:], k[:, :40] = 0, 0
        q[:, 0, 0], q[:, 0, 1], q[:, 1, 0], q[:, 1, 1] = 564, 1.5, 100.5, 100
        k[:, :40, 0, 0], k[:, 1:40:2, 0, 1], k[:, 1:40:2, 1, 0], k[:, 1:40:2, 1, 1] = 1, 1, 4, -4
        v[:, :40:2] = 0
        return q, k, v, lengths

    def rising(self) -> tuple[Tensor, ...]:
        """A head of 1,024 tokens in bfloat16: each block of 32 has one score, 3/16 above that of the block before, and the factor
        exp(-3/16) has more digits than 16 bits hold. Rounded, it is wrong by as much block after block, always the same way."""
        q, k, v, lengths = self.args(1, 16, 1024, [1024], "bfloat16")
        q[:], k[:], v[:] = 0, 0, 0
        q[..., 0], k[0, :, 0, 0], v[:, :512] = 4, self.torch.arange(1024) // 32 * 3 / 16, 1
        return q, k, v, lengths

    def faint(self) -> tuple[Tensor, ...]:
        """That of `Inputs` as a cache of one head."""
        q, k, v = super().faint(1, 512)
        return q, k.unsqueeze(2), v.unsqueeze(2), self.torch.tensor([512], dtype=self.torch.int32)

    def buried(self) -> tuple[Tensor, ...]:
        """That of `Inputs` as a cache of one head."""
        q, k, v = super().buried(1)
        return q, k.unsqueeze(2), v.unsqueeze(2), self.torch.tensor([256], dtype=self.torch.int32)

    def stale(self) -> tuple[Tensor, ...]:
        """That of `Inputs` as a cache of one head."""
        q, k, v = super().stale(1)
        return q, k.unsqueeze(2), v.unsqueeze(2), self.torch.tensor([48], dtype=self.torch.int32)

    def creeping(self, parts: int = 1) -> tuple[Tensor, ...]:
        """A head of 512 tokens in float32: the scores of each block of 32 are 1/4096 above those of the block before, so that a
        factor of sums is nearly 1, and a shortcut leaves it out. Of each of the parts that are looked at apart, the first half
        has values of 1, the second of 0."""
        q, k, v, lengths = self.args(1, 16, 512, [512], "float32")
        q[:], k[:], v[:] = 0, 0, 0
        q[..., 0], k[0, :, 0, 0], v[:] = 4, self.torch.arange(512) // 32 / 4096, 0
        v.unflatten(1, (parts, 2, -1))[:, :, 0] = 1
        return q, k, v, lengths

    def stalling(self) -> tuple[Tensor, ...]:
        """Two heads of 512 tokens, in which sums in bfloat16 go wrong by more than rounding: 32 x 1.8125 again and again, where
        what is rounded away goes one way; and a token that has nearly all the weight before many that have each so little that a
        block of them is rounded away."""
        q, k, v, lengths = self.args(2, 16, 512, [512], "bfloat16")
        q[:], k[:], v[:] = 0, 0, 3
        q[:, 1, 0], k[:, 1:, 1, 0], v[:, :, 0], v[:, 0, 1] = 4, -9.125, 1.8125, 1
        return q, k, v, lengths


def _case(args: tuple, tags: str = "", note: str = "") -> Case:
    q, k, _, lengths, *_ = args
    shown = f"q {list(q.shape)}, cache {list(k.shape)}"
    return tensor_case(*args, shown=shown, note=listed(f"lengths {lengths.tolist()}", note), tags=tags)


# --------------------------------------------------------------------------------------------- what somebody computes
def _reference(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *_: Any) -> Tensor:
    """In 16 bits the result alone is rounded. PyTorch would round the scores, and so might the learner."""
    n = int(lengths.max())  # what lies behind is not looked at, and may be much
    wide = (x.float() if x.element_size() == 2 else x for x in (q, k[:, :n], v[:, :n]))
    return ideas.reference("decode_attention.decode_attention")(*wide, lengths).to(q.dtype)


def _all_slots(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *_: Any) -> Tensor:
    """Whatever the lengths are."""
    import torch

    groups = q.shape[1] // k.shape[2]
    k, v = (x.transpose(1, 2).repeat_interleave(groups, 1) for x in (k, v))
    s = (q[:, :, None] @ k.mT) / math.sqrt(q.shape[-1])
    return (torch.softmax(s, -1) @ v)[:, :, 0]


def _tokens(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of each sequence its scores [H, n], scaled, and its values [H, n, D]."""
    groups, found = q.shape[1] // k.shape[2], []
    for b, n in enumerate(lengths.tolist()):
        keys, values = (x[b, :n].transpose(0, 1).repeat_interleave(groups, 0) for x in (k, v))
        found.append(((keys @ q[b, :, :, None])[..., 0] / math.sqrt(q.shape[-1]), values))
    return found


def _blockwise(
    fault: str = "",
    padding: int = 0,
    only: slice | None = None,
    guarded: bool = True,
    divided: bool = True,
    whole_blocks: bool = False,
) -> Callable[..., Tensor]:
    """The running softmax over blocks of 32 tokens, as somebody carries it on.

    fault    of ideas.online_softmax
    padding  how many slots behind the last token count, as far as the last block has them
    only     the tokens that take part
    guarded  whether a sum of no weights is divided by 1
    divided  whether the sum of the values is divided by that of the weights
    whole_blocks  whether a last block that is not full is left out
    """

    def gives(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *_: Any) -> Tensor:
        import torch

        lengths = lengths // BLOCK * BLOCK if whole_blocks else lengths
        rows = []
        for s, values in _tokens(q, k, v, lengths):
            s, values = s[:, only or slice(None)], values[:, only or slice(None)]
            behind = min(-s.shape[1] % BLOCK, padding)  # scores of 0, and values of 0
            s, values = torch.nn.functional.pad(s, (0, behind)), torch.nn.functional.pad(values, (0, 0, 0, behind))
            if not s.shape[1]:
                rows.append(values.sum(1) if guarded else values.sum(1) * math.nan)
                continue
            share = len(s) // k.shape[2] if fault == "one maximum" else 1  # query heads of one program
            s, values = s.view(-1, share, s.shape[1]), values[::share]
            _, total, acc = ideas.online_softmax(s, values, BLOCK, fault, share)
            below = torch.where((total == 0) & guarded, 1, total) if divided else 1
            rows.append((acc / below).flatten(0, 1))
        return torch.stack(rows)

    return gives


# What somebody does wrong who carries it on: the diagnosis and the fault.
_CARRIED = (
    ("last-block-wins", "last"),
    ("last-block-wins", "m stays"),
    ("sums-not-rescaled", "both"),
    ("sums-not-rescaled/2", "l"),
    ("sums-not-rescaled/3", "acc"),
    ("factor", "inverted"),
    ("maximum-not-carried", "of the block"),
    ("not-low-enough", "from 0 on"),
    ("no-maximum", "no maximum"),
)


def _carried(guards: Sequence[bool]) -> list[Misconception]:
    return [
        *(
            Misconception(name, gives=_blockwise(fault, guarded=guarded))
            for name, fault in _CARRIED
            for guarded in guards
        ),
        *(
            Misconception("last-block-dropped", gives=_blockwise(whole_blocks=True, guarded=guarded))
            for guarded in guards
        ),
        Misconception("not-divided", gives=_blockwise(divided=False)),
    ]


# What is left out because it is small: a token's weight, or the change of a factor.
_SHORTCUTS = (
    Misconception("faint-tokens", when=ideas.faint),
    Misconception("factor-left-out", when=ideas.creeping),
    Misconception("buried-tokens", when=only("buried", "special")),
)
_BURIED = "scores of 0, and of 100 between them"


def _all_nan(evidence: Evidence) -> bool:
    return not evidence.passed and all(bool(o.wrong.actual.isnan().any()) for o in evidence.outcomes)


def _longest_fail(evidence: Evidence) -> bool:
    long = only("many-tokens", "many-blocks", "faint", "buried", "creeping")
    return long(evidence) and any("many-tokens" in case.tags for case in evidence.failed)


def _only_16_bits(evidence: Evidence) -> bool:
    """What is added up loses it in 16 bits alone, and there where most is to be lost."""
    return only("float16", "bfloat16")(evidence) and any("many-blocks" in case.tags for case in evidence.failed)


# ----------------------------------------------------------------------------------------------------- kv_cache.attend
def _attend_cases(rng: Random) -> list[Case]:
    make, cases = _Caches(rng), []
    for B, T, H, H_kv, D, T_max, length in (
        (2, 7, 2, 2, 8, 16, 0),
        (1, 5, 4, 2, 8, 5, 0),
        (1, 1, 1, 1, 8, 4, 0),
        (2, 1, 2, 2, 8, 16, 9),
        (1, 4, 2, 2, 16, 24, 11),
        (2, 3, 6, 2, 8, 20, 17),
        (1, 1, 4, 1, 8, 12, 11),
        (1, 1, 1, 1, 1, 1, 0),
        (2, 13, 6, 3, 5, 14, 1),
    ):
        q, k, v = make.normal(B, T, H, D), make.normal(B, T, H_kv, D), make.normal(B, T, H_kv, D)
        caches = (make.cache(B, T_max, H_kv, D, [length] * B, "float32", False) for _ in range(2))
        name = f"{T} new token{'s' * (T > 1)} after {length}, {H} heads, {H_kv} in the cache, T_max {T_max}"
        tags = ("filled" if length else "prompt") + " new-tokens" * (T > 1) + " gqa" * (H > H_kv)
        cases.append(case(name, q, k, v, *caches, length, tags=tags))
    # As one projection makes them, and with caches stored as [B, H, T, D]; scores of some hundreds, all of them exact.
    q, k, v = (make.normal(2, 5, 3, 4, 16) * 8).round().div_(8).unbind(2)
    q[..., 1:] = 0
    q[..., 0] *= 256
    caches = (make.cache(2, 30, 4, 16, [21, 21], "float32", False).transpose(1, 2) for _ in range(2))
    k_cache, v_cache = (x.contiguous().transpose(1, 2) for x in caches)
    k_cache[:, :21] = (k_cache[:, :21] * 8).round() / 8
    name = "5 new tokens after 21, slices of one tensor, caches stored as [B, H, T, D], scores of some hundreds"
    cases.append(case(name, q, k, v, k_cache, v_cache, 21, tags="filled new-tokens"))
    # What a token sees has a score of -163,840, and what it does not see one of 0: no finite number hides that.
    torch = make.torch
    q, k, v = torch.zeros(1, 5, 1, 16), torch.zeros(1, 5, 1, 16), make.normal(1, 5, 1, 16)
    k_cache, v_cache = (make.cache(1, 13, 1, 16, [6], "float32", False) for _ in range(2))
    q[..., 0], k[..., 0], k_cache[:, :6] = -655_360, 1, 0
    k_cache[:, :6, :, 0] = 1
    for i in range(5):
        q[:, i, :, 1 + i], k[:, i + 1 :, :, 1 + i] = 655_360, 1
    name = "5 new tokens after 6, what is seen scores -163,840, and what is not 0"
    cases.append(case(name, q, k, v, k_cache, v_cache, 6, tags="filled new-tokens low"))
    return cases


def _attended(
    seen: Callable[[Tensor, Tensor, int], Tensor] = lambda t, n, length: n <= length + t,
    place: int = 0,
    heads: str = "in a row",
    new_only: bool = False,
    added: bool = False,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """o and both caches, as somebody appends and masks. t: the new tokens, n: the cached ones, both from 0. added: the mask
    is numbers, which are added to the scores."""

    def gives(
        q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, length: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        k_cache, v_cache = k_cache.clone(), v_cache.clone()
        T, groups = q.shape[1], q.shape[2] // k.shape[2]
        first, end = length + place, length + T
        k_cache[:, first : first + T], v_cache[:, first : first + T] = k, v
        begin = length if new_only else 0
        keys, values = (x[:, begin:end].double().transpose(1, 2) for x in (k_cache, v_cache))
        if heads == "in a row":
            keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        else:
            keys, values = (x.repeat(1, groups, 1, 1) for x in (keys, values))
        mask = seen(torch.arange(T)[:, None], torch.arange(begin, end)[None, :], length)
        s = q.double().transpose(1, 2) @ keys.mT / math.sqrt(q.shape[-1])
        s = s + mask.double() if added else s.masked_fill(~mask, -math.inf)
        weights = torch.softmax(s, -1).nan_to_num(0)  # PyTorch gives 0 where nothing is seen
        return (weights @ values).transpose(1, 2).float(), k_cache, v_cache

    return gives


def _caches_alone(evidence: Evidence) -> bool:
    """The results are right, and what the caches hold is not."""
    return all(
        compare.plain(o.reply.output[0], o.wrong.expected[0], ATTEND.tolerance) is None
        for o in evidence.outcomes
        if o.wrong and o.wrong.kind == "values"
    )


ATTEND = FunctionExercise(
    id="kv_cache.attend",
    function="attend",
    returns=("o", "k_cache", "v_cache"),
    in_place=(3, 4),
    cases=_attend_cases,
    expected=_attended(),
    tolerance=1e-5,
    misconceptions=(
        Misconception("not-low-enough", when=only("low")),
        Misconception("first-tokens-only", gives=_attended(lambda t, n, length: n <= t)),
        Misconception("first-tokens-only/2", gives=_attended(lambda t, n, length: (n <= t) | (len(t) == 1))),
        Misconception("sees-the-future", gives=_attended(lambda t, n, length: n >= 0)),
        Misconception("sees-the-future/2", gives=_attended(lambda t, n, length: (n <= t) | (length > 0))),
        Misconception("not-itself", gives=_attended(lambda t, n, length: n < length + t)),
        Misconception("one-too-many", gives=_attended(lambda t, n, length: n <= length + t + 1)),
        Misconception("turned-round", gives=_attended(lambda t, n, length: n > length + t)),
        Misconception("turned-round/2", gives=_attended(lambda t, n, length: n >= length + t)),
        Misconception("mask-of-numbers", gives=_attended(added=True)),
        Misconception("mask-of-numbers", gives=_attended(lambda t, n, length: n <= t, added=True)),
        Misconception("one-row-for-all", gives=_attended(lambda t, n, length: n <= length + 0 * t)),
        Misconception("cache-unused", gives=_attended(new_only=True)),
        Misconception("wrong-heads", gives=_attended(heads="in turn")),
        Misconception("unwritten-slots", when=lambda evidence: bool(evidence.outputs[0].isnan().any())),
        Misconception("wrong-place", when=_caches_alone),
    ),
)


# ------------------------------------------------------------------------------------------------------ kv_cache.speed
def _rate(
    weights: int,
    weight_bits: int,
    layers: int,
    kv_heads: int,
    head_size: int,
    cache_bits: int,
    batch: int,
    prompt: int,
    new: int,
    hbm_gbps: float,
    *,
    twice: int = 2,
    scales: str = "bytes",
    read: str = "each",
    tokens: str = "grow",
    gained: str = "batch",
    cached: str = "layers",
) -> float:
    """By bytes, as somebody counts: tokens "grow", "prompt" (nothing new), "end" (the final length), "before" (without the
    token itself); weights read for "each" step, or for "each sequence"."""
    scale = {"bytes": 4, "none": 0, "bits": 0.5, "one for both": 2, "of both": 8}[scales] if cache_bits == 8 else 0
    token_bytes = twice * (1 if cached == "one layer" else layers) * kv_heads * (head_size * cache_bits / 8 + scale)
    steps = {
        "grow": new * prompt + new * (new + 1) / 2,
        "before": new * prompt + new * (new - 1) / 2,
        "prompt": new * prompt,
        "end": new * (prompt + new),
        "half": new * prompt + new * new / 2,
    }[tokens]
    weight_bytes = weights * weight_bits / 8 * (batch if read == "each sequence" else 1)
    total = new * weight_bytes + (1 if cached == "shared" else batch) * token_bytes * steps
    return (batch if gained == "batch" else 1) * new * hbm_gbps * 1e9 / total


def _mean_rate(*args: Any) -> float:
    """The mean of the rates of the steps."""
    *setup, prompt, new, hbm_gbps = args
    return math.fsum(_rate(*setup, prompt + i, 1, hbm_gbps) for i in range(new)) / new


def _counts(**changed: Any) -> Callable[..., float]:
    return lambda *args: _rate(*args, **changed)


# Of a cached number, by the words of a case's name.
_CACHE_BITS = {"a cache of 4 bits": 4, "a cache of 5 bits": 5, "a cache of 8 bits": 8, "a cache of 32 bits": 32}


def _speed_cases(rng: Random) -> list[Case]:
    cases = []
    for name, tags, low, high in (
        ("one sequence, 16 bits", "", 1, 1),
        ("a batch, 16 bits", "batch", 8, 64),
        ("a batch, weights of 4 bits", "batch", 8, 64),
        ("a batch, a cache of 8 bits", "batch int8", 8, 64),
        ("short prompt, many new tokens", "long-run", 1, 4),
        ("a single step", "", 2, 16),
        ("one key head", "batch", 4, 32),
        ("a cache of 32 bits", "batch", 2, 8),
        ("a cache of 4 bits, weights of 8", "batch", 2, 8),
        ("no prompt", "long-run", 1, 1),
        ("a cache of 5 bits, heads of 20", "batch", 2, 8),
    ):
        new = 1 if "single" in name else rng.randrange(900, 4000) if tags == "long-run" else rng.randrange(20, 400)
        args = (
            rng.randrange(10**8, 10**10),
            4 if "weights of 4" in name else 8 if "weights of 8" in name else 16,
            rng.randrange(12, 80),
            1 if "one key" in name else rng.choice((2, 4, 8)),
            20 if "heads of 20" in name else rng.choice((64, 96, 128)),
            next((bits for said, bits in _CACHE_BITS.items() if said in name), 16),
            rng.randint(low, high),
            0 if "no prompt" in name else rng.randrange(1, 60) if tags == "long-run" else rng.randrange(500, 30_000),
            new,
            float(rng.randrange(900, 8000)),
        )
        cases.append(case(name, *args, tags=tags))
    cases.append(case("one layer, one head of size 1, one token", 10**6, 16, 1, 1, 1, 16, 1, 0, 1, 1000.0))
    return cases


SPEED = FunctionExercise(
    id="kv_cache.speed",
    function="tokens_per_second",
    cases=_speed_cases,
    expected=_rate,
    tolerance=1e-6,
    unit="tokens/s",
    misconceptions=(
        Misconception("weights-for-each-sequence", gives=_counts(read="each sequence")),
        Misconception("cache-shared", gives=_counts(cached="shared")),
        Misconception("one-sequence", gives=_counts(gained="one")),
        *(Misconception("keys-only", gives=_counts(twice=1, scales=scales)) for scales in ("bytes", "of both")),
        Misconception("one-layer", gives=_counts(cached="one layer")),
        Misconception("cache-stands-still", gives=_counts(tokens="prompt")),
        Misconception("full-from-the-start", gives=_counts(tokens="end")),
        Misconception("not-itself", gives=_counts(tokens="before")),
        Misconception("mean-of-rates", gives=_mean_rate),
        Misconception("half-a-token", gives=_counts(tokens="half")),
        Misconception("binary-units", gives=lambda *args: _rate(*args[:-1], args[-1] * 2**30 / 1e9)),
        Misconception("bytes-per-second", gives=lambda *args: _rate(*args[:-1], args[-1] / 1e9)),
        Misconception("no-scales", gives=_counts(scales="none")),
        Misconception("no-scales/2", gives=_counts(scales="one for both")),
    ),
)


# ----------------------------------------------------------------------------------------------------- kv_cache.decode
def _stored(x: Tensor, heads_first: bool = True) -> Tensor:
    """As [B, H, T, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _decode_cases(rng: Random) -> list[Case]:
    make = _Caches(rng)
    torch = make.torch
    exact = "scores from -720 to 1,600"
    cases = [
        _case(make.corners(12, 48, [37, 33], stale=True), "blocks stale", exact),
        _case(make.args(3, 80, 80, [65, 7], "float32"), "blocks", "NaN behind them"),
    ]
    q, k, v, lengths = make.corners(12, 40, [37], "float16", True)
    cases.append(
        _case((q, _stored(k), _stored(v), lengths), "blocks strides stale", f"both stored as [B, H, T, D], {exact}")
    )
    q, k, v, lengths = make.corners(12, 33, [33], "bfloat16", True)
    cases.append(_case((q, k, _stored(v), lengths), "blocks strides stale", f"values stored as [B, H, T, D], {exact}"))
    cases.append(_case(make.stalling(), "blocks many-blocks", "what a block adds is small"))
    cases.append(_case(make.fine(), "blocks fine", "scores of more digits than 16 bits"))
    cases.append(_case(make.far(), "blocks low", "scores around -163,840"))
    q, k, v, lengths = make.args(3, 20, 40, [0, 40, 1], "float32", stale=True)
    (*_, (_, k)), ((_, v), *_) = (make.layouts(torch.cat((x, x[:1]))) for x in (k, v))
    cases.append(
        _case((q, k[:3], v[:3], lengths), "blocks strides no-token stale", "k every second element, v transposed")
    )
    q, k, v, lengths = make.args(3, 16, 40, [40, 21], "float32", stale=True)
    v[:, :, 1] = 0  # a result of zeros is one, too
    k, v = torch.stack((k, v), 2).unbind(2)
    cases.append(_case((q, k, v, lengths), "blocks strides stale", "k and v side by side in one tensor"))
    q, k, v, lengths = make.args(1, 1, 40, [31, 32, 13, 0], "float32")
    v = torch.cat((v, v), 1)[:, :40]
    cases.append(_case((q, k, v, lengths), "strides no-token", "a gap behind each sequence's values"))
    cases.append(_case(make.args(1, 128, 16_400, [40], "float16"), "blocks", "a cache that no block can hold"))
    cases.append(_case(make.args(1, 16, 720, [700], "float32"), "blocks many-tokens", "NaN behind them"))
    cases.append(_case(make.faint(), "blocks faint", "one score 20 above the others"))
    cases.append(_case(make.buried(), "blocks buried", _BURIED))
    cases.append(_case(make.creeping(), "blocks creeping", "scores that rise by 1/4096 from block to block"))
    return cases


def _twice_scaled(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *rest: Any) -> Tensor:
    return _reference(q / math.sqrt(q.shape[-1]), k, v, lengths, *rest)


def _huge_decode() -> list[tuple]:
    """The offset of a token, of a batch element, of a head and of a column alone is beyond 2^32."""
    import torch

    def given(B: int, H: int, T: int, order: tuple[int, ...] = ()) -> tuple:
        return far(B, H, 128), *(far(B, T, H, 128, order=order),) * 2, torch.full((B,), T, dtype=torch.int32)

    return [
        given(1, 1 << 18, 160),
        given(4096, 64, 160),
        given(1, 1 << 18, 160, (0, 2, 1, 3)),
        given(4096, 64, 160, (3, 0, 1, 2)),
    ]


def _cached_bytes(k: Tensor, lengths: Tensor) -> int:
    """Keys and values within the lengths."""
    return 2 * int(lengths.sum()) * k.shape[2] * k.shape[3] * k.element_size()


def _same(x: Tensor) -> Tensor:
    return x


def _turned(x: Tensor) -> Tensor:
    """x with the strides of tokens and heads exchanged."""
    b, t, h, d = x.stride()
    return x.as_strided(x.shape, (b, h, t, d))


def _nan_of_slots(evidence: Evidence) -> bool:
    """Slots behind the lengths, in the last block of a sequence, do no harm unless they hold NaN."""

    def behind(case: Case) -> bool:
        _, k, _, lengths, *_ = case.args
        return any(n % BLOCK and n < k.shape[1] for n in lengths.tolist())

    return (
        evidence.kind == "nan"
        and all(map(behind, evidence.failed))
        and not any("stale" in case.tags for case in evidence.failed)
        and any("stale" in case.tags and behind(case) for case in evidence.passed)
    )


def _nan_of_columns(evidence: Evidence) -> bool:
    """NaN comes where D is no power of two alone, although other slots behind a length hold NaN too."""

    def ragged(case: Case) -> bool:
        return ideas.padding(case.args[0].shape[-1]) > 0

    return (
        evidence.kind == "nan"
        and all(map(ragged, evidence.failed))
        and any(not ragged(case) and "many-tokens" in case.tags for case in evidence.passed)
    )


DECODE = KernelExercise(
    id="kv_cache.decode",
    function="decode",
    cases=_decode_cases,
    returns=("o",),
    reference=_reference,
    huge=_huge_decode,
    traffic=Traffic(
        reads=lambda q, k, v, lengths: nbytes(q) + _cached_bytes(k, lengths) + 4 * q.shape[0] * q.shape[1],
        writes=1,
        memory=lambda q, *_: nbytes(q) + _NUMBERS,
    ),
    misconceptions=(
        Misconception("empty-sequence", when=only("no-token", kind="nan")),
        Misconception("not-low-enough", when=only("low")),
        *_SHORTCUTS,
        Misconception("columns-beyond-d", when=_nan_of_columns),
        Misconception("zero-times-nan", when=_nan_of_slots),
        Misconception("stale-slots", gives=_all_slots),
        Misconception("padding-counts", gives=_blockwise(padding=BLOCK)),
        Misconception("one-slot-too-many", gives=_blockwise(padding=1)),
        Misconception("low-precision-scores", when=lambda evidence: evidence.tag("fine")),
        Misconception("scale-twice", gives=_twice_scaled),
        Misconception(
            "first-sequence",
            gives=lambda q, k, v, lengths: _reference(q, k[:1].expand_as(k), v[:1].expand_as(v), lengths),
        ),
        Misconception("first-sequence/2", gives=lambda q, k, v, lengths: _reference(q, k[:1].expand_as(k), v, lengths)),
        Misconception("first-sequence/3", gives=lambda q, k, v, lengths: _reference(q, k, v[:1].expand_as(v), lengths)),
        Misconception("first-block-only", gives=_blockwise(only=slice(BLOCK))),
        *_carried((True, False)),
        *(
            Misconception(name, gives=lambda q, k, v, lengths, of=of: _reference(q, of[0](k), of[1](v), lengths))
            for name, of in (
                ("strides-exchanged", (_turned, _turned)),
                ("strides-exchanged/2", (_turned, _same)),
                ("strides-exchanged/2", (_same, _turned)),
            )
        ),
        Misconception(
            "k-strides-for-v",
            gives=lambda q, k, v, lengths: _reference(q, k, v.as_strided(v.shape, k.stride()), lengths),
        ),
        Misconception(
            "contiguous",
            gives=ideas.On(lambda q, k, v, lengths: (q, k, ideas.as_if_contiguous(v), lengths), _reference),
        ),
        Misconception(
            "contiguous/2",
            gives=ideas.On(
                lambda q, k, v, lengths: (q, ideas.as_if_contiguous(k), ideas.as_if_contiguous(v), lengths), _reference
            ),
        ),
        Misconception("one-block", when=_longest_fail),
        Misconception("low-precision-sums", when=_only_16_bits),
        Misconception("factor/2", when=_all_nan),
    ),
)


# ----------------------------------------------------------------------------------------------------- kv_cache.packed
def _packed_cases(rng: Random) -> list[Case]:
    make, cases = _Caches(rng), []
    exact = "scores from -720 to 1,600"
    cases.append(_case(make.corners(2, 48, [37, 33]), "groups", exact))
    cases.append(_case(make.corners(2, 40, [37], "float16", True), "groups stale", exact))
    cases.append(_case(make.corners(2, 33, [33], "bfloat16"), "groups", exact))
    cases.append(_case(make.stalling(), "many-blocks", "what a block adds is small"))
    cases.append(_case(make.rising(), "many-blocks", "scores that rise a little from block to block"))
    q, k, v, at = make.far()
    args = q[:, :1].repeat(1, 16, 1), k[:, :, :1].contiguous(), v[:, :, :1].contiguous(), at
    cases.append(_case(args, "low", "scores around -163,840"))
    cases.append(_case(make.fine(), "fine", "scores of more digits than 16 bits"))
    for H, H_kv, D, T_max, lengths, dtype, stale in (
        (1, 1, 16, 32, [32], "float32", False),
        (4, 2, 16, 40, [40, 1], "float32", True),
        (6, 2, 32, 70, [65, 13], "float32", True),
        (3, 1, 16, 33, [31], "bfloat16", False),
        (14, 2, 128, 40, [39], "float16", False),
        (20, 1, 16, 48, [20], "float32", False),
        (64, 1, 16, 33, [33], "float16", False),
    ):
        tags = "groups" * (H > H_kv > 1) + " stale" * stale
        note = "old numbers behind them" if stale else ""
        cases.append(_case(make.args(H, D, T_max, lengths, dtype, H_kv, stale), tags, note))
    cases.append(_case(make.args(2, 64, 16_400, [40], "float16", 1), "", "a cache that no block can hold"))
    cases.append(_case(make.args(2, 16, 720, [700], "float32", 1), "many-tokens", "NaN behind them"))
    cases.append(_case(make.faint(), "faint", "one score 20 above the others"))
    cases.append(_case(make.buried(), "buried", _BURIED))
    cases.append(_case(make.stale(), "late-rise", "scores of 0, and of 11 behind them"))
    cases.append(_case(make.creeping(), "creeping", "scores that rise by 1/4096 from block to block"))
    cases.append(_case(make.unknown(4, 2), "groups special", "a key with a NaN"))
    return cases


def _regrouped(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Query head h with head h % H_kv of the cache."""
    B, H, D = q.shape
    H_kv = k.shape[2]
    dealt = q.view(B, H // H_kv, H_kv, D).transpose(1, 2).reshape(B, H, D)
    o = _reference(dealt, k, v, lengths)
    return o.view(B, H_kv, H // H_kv, D).transpose(1, 2).reshape(B, H, D)


def _rows(queries: int) -> int:
    """That hold a group's queries in a product: a power of two, 16 at least."""
    return max(16, queries + ideas.padding(queries))


def _first_of_group(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[2]
    return _reference(q[:, ::groups].repeat_interleave(groups, 1), k, v, lengths)


def _huge_packed() -> tuple:
    import torch

    return far(80, 256, 128), *(far(80, 4096, 128, 128),) * 2, torch.full((80,), 64, dtype=torch.int32)


PACKED = KernelExercise(
    id="kv_cache.packed",
    function="decode_packed",
    cases=_packed_cases,
    returns=("o",),
    reference=_reference,
    huge=_huge_packed,
    traffic=Traffic(
        reads=lambda q, k, v, lengths: nbytes(q) + _cached_bytes(k, lengths) + 4 * k.shape[0] * k.shape[2],
        writes=1,
        memory=lambda q, *_: nbytes(q) + _NUMBERS,
        flops=lambda q, k, v, lengths: sum(
            4 * 64 * cdiv(n, 64) * k.shape[2] * _rows(q.shape[1] // k.shape[2]) * q.shape[2] for n in lengths.tolist()
        ),
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("not-low-enough", when=only("low")),
        *_SHORTCUTS,
        Misconception("stale-maximum", when=only("late-rise")),
        Misconception("wrong-heads", gives=_regrouped),
        Misconception("one-query", gives=_first_of_group),
        Misconception("zero-times-nan", when=_nan_of_slots),
        Misconception("stale-slots", gives=_all_slots),
        Misconception("padding-counts", gives=_blockwise(padding=BLOCK)),
        Misconception("one-slot-too-many", gives=_blockwise(padding=1)),
        *_carried((False,)),
        Misconception("low-precision-scores", when=lambda evidence: evidence.tag("fine")),
        Misconception("no-scale", gives=ideas.On(lambda q, *rest: (q * math.sqrt(q.shape[-1]), *rest), _reference)),
        Misconception("one-maximum", gives=_blockwise("one maximum", guarded=False)),
        Misconception("one-block", when=_longest_fail),
        Misconception("low-precision-sums", when=_only_16_bits),
        Misconception("factor/2", when=_all_nan),
        Misconception("tf32", when=lambda evidence: only("float32")(evidence) and evidence.near(5e-3)),
    ),
)


# ------------------------------------------------------------------------------------------------------ kv_cache.split
def _split_cases(rng: Random) -> list[Case]:
    make, cases = _Caches(rng), []

    def add(args: tuple, SPLITS: int, tags: str = "", note: str = "") -> None:
        uneven = any(cdiv(n, BLOCK) % SPLITS for n in args[3].tolist())
        # Where parts are equally long but for the last ones, these may be empty although there are enough blocks.
        empty = any(cdiv(cdiv(n, BLOCK), SPLITS) * (SPLITS - 1) >= cdiv(n, BLOCK) for n in args[3].tolist())
        tags += " uneven" * uneven + " empty" * empty
        cases.append(_case((*args, SPLITS), tags, listed(f"{SPLITS} splits", note)))

    exact = "scores from -2,980 to 2,980"
    q, k, v, lengths = make.corners(12, 152, [150])
    # Parts may be joined by the logarithms of their sums. Near 200 a logarithm has 2e-5 of rounding, which equal values hide.
    v[:, :150, 6:8] = v[:, :1, 6:8]
    add((q, k, v, lengths), 3, "", exact)
    add(make.corners(12, 100, [100], "float16"), 4, "large-sums", f"{exact}, parts beyond 65,504")
    add(make.corners(12, 52, [51], "bfloat16", True), 2, "stale", exact)
    add(make.stalling(), 1, "many-blocks", "what a block adds is small")
    add(make.far(), 2, "low", "scores around -163,840")
    add(make.fine(), 2, "fine", "scores of more digits than 16 bits")
    add(make.args(1, 1, 3, [1, 3], "float32"), 2)
    add(make.args(2, 16, 96, [96, 96], "float32"), 3)
    add(make.args(1, 16, 352, [340], "float32", stale=True), 4, "stale", "old numbers behind them")
    add(make.args(1, 64, 224, [193], "bfloat16"), 4)
    add(make.args(1, 16, 128, [95, 33, 70], "float32"), 4)
    add(make.args(3, 128, 160, [97], "float16", stale=True), 3, "stale", "old numbers behind them")
    add(make.args(1, 16, 4096, [512], "float32"), 8, "unused", "most slots unused")
    add(make.faint(), 4, "faint", "one score 20 above the others")
    add(make.buried(), 4, "buried", _BURIED)
    add(make.creeping(4), 4, "creeping", "scores that rise by 1/4096 from block to block")
    return cases


def _bounds(n: int, SPLITS: int) -> list[tuple[int, int]]:
    blocks = cdiv(n, BLOCK)
    return [(blocks * i // SPLITS * BLOCK, min(blocks * (i + 1) // SPLITS * BLOCK, n)) for i in range(SPLITS)]


def _long_first(n: int, SPLITS: int) -> list[tuple[int, int]]:
    """The other division into whole blocks: parts of the same length, rounded up, and what is left for the last ones."""
    step = cdiv(cdiv(n, BLOCK), SPLITS) * BLOCK
    return [(min(step * i, n), min(step * (i + 1), n)) for i in range(SPLITS)]


def _joined(
    acc: str = "weighted",
    total: str = "weighted",
    bounds: Callable = _bounds,
    fault: str = "",
    top: str = "maximum",
    added: slice | None = None,
) -> Callable[..., Tensor]:
    """Parts as somebody joins them: sums "weighted" by e to the difference of maxima, or to that of the other sign, "inverted";
    "plain", or "mean" of the results; or weighted, but "divided" by the part's own sum already. total: likewise, or "nothing" to
    divide by. fault: of a part's softmax; top: what is taken from its maxima; added: the parts that are added up in the end."""

    def gives(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, SPLITS: int) -> Tensor:
        import torch

        rows = []
        for s, values in _tokens(q, k, v, lengths):
            nothing = s.new_full((len(s), 1, 1), -3e38), s.new_zeros(len(s), 1, 1), values[:, :1] * 0
            parts = [
                ideas.online_softmax(s[:, None, first:end], values[:, first:end], BLOCK, fault)
                if end > first
                else nothing
                for first, end in bounds(s.shape[1], SPLITS)
            ]
            m, l, sums = (torch.stack(x)[..., 0, :] for x in zip(*parts, strict=True))
            m = torch.where(m.isneginf(), 0, m)  # a maximum that never moves is the same number in all parts
            most = {"maximum": m.amax(0), "from 0 on": m.amax(0).clamp_min(0), "none": 0 * m[0]}[top]
            weight = ideas.exp_of_float32(most - m if acc == "inverted" else m - most)
            weight, l, sums = (x[added or slice(None)] for x in (weight, l, sums))
            results = sums / torch.where(l == 0, 1, l)
            if acc == "mean":
                rows.append(results.sum(0) / (l > 0).sum(0))
                continue
            if acc == "divided":
                rows.append((results * weight).sum(0) / (l * weight).sum(0))
                continue
            above = (sums if acc == "plain" else sums * weight).sum(0)
            below = (l if total == "plain" else l * weight).sum(0)
            rows.append(above if total == "nothing" else above / below)
        return torch.stack(rows)

    return gives


def _split_reads(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, SPLITS: int) -> int:
    """q and a length for each part, the cache once, and the parts, m of them twice."""
    each = SPLITS * (nbytes(q) + 4 * q.shape[0] * q.shape[1])
    return each + _cached_bytes(k, lengths) + _part_bytes(q, SPLITS, numbers=3)


def _split_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    lengths, SPLITS = case.args[3], case.args[4]
    blocks = cdiv(int(lengths.max()), BLOCK)
    enough = 5 + 2 * cdiv(blocks, SPLITS)  # q, the length and three stores; keys and values of each block of the share
    longest = launches[0].longest if launches else 0
    if sum(launch.load_bytes for launch in launches) > 1.05 * _split_reads(*case.args):
        return None  # more is loaded than parts have, which the bound on traffic says
    if longest > enough + 1:
        return (
            "not-shared",
            f"one program makes {longest} loads and stores, where {enough} are enough if {SPLITS} programs share the tokens of "
            "the longest sequence. Which tokens belong to part 1, and of which length are they a share?",
        )
    if not any(launch.atomic_bytes for launch in launches):
        q, stored = case.args[0], sum(launch.store_bytes for launch in launches)
        parts = 4 * SPLITS * q.numel()
        if stored >= parts or any(cdiv(n, BLOCK) < SPLITS for n in lengths.tolist()):
            return None
        return (
            "not-shared",
            f"{stored:,} bytes are stored, where the sums of {SPLITS} parts of each head are {parts:,}: fewer than SPLITS "
            "programs share its tokens",
        )
    return (
        "atomics",
        "atomics add in the order in which programs arrive. Another order rounds differently, so two runs do not agree. Where "
        "can each part leave its sums?",
    )


def _part_bytes(q: Tensor, SPLITS: int, numbers: int = 2) -> int:
    """Of float32: D and a few numbers for each part."""
    return 4 * SPLITS * q.shape[0] * q.shape[1] * (q.shape[2] + numbers)


def _huge_split() -> list[tuple]:
    """The offset of a token, and that of a part among the sums of all, is beyond 2^32."""
    import torch

    def given(B: int, T: int, splits: int) -> tuple:
        return far(B, 128, 128), *(far(B, T, 128, 128),) * 2, torch.full((B,), 64, dtype=torch.int32), splits

    return [given(80, 4096, 2), given(4096, 64, 80)]


SPLIT = KernelExercise(
    id="kv_cache.split",
    function="decode_split",
    cases=_split_cases,
    returns=("o",),
    reference=_reference,
    huge=_huge_split,
    traffic=Traffic(
        reads=_split_reads,
        writes=lambda q, k, v, lengths, SPLITS: nbytes(q) + _part_bytes(q, SPLITS),
        launches=2,
        memory=lambda q, k, v, lengths, SPLITS: nbytes(q) + _part_bytes(q, SPLITS) + _NUMBERS,
    ),
    launch_rule=_split_rule,
    misconceptions=(
        Misconception("not-low-enough", when=only("low")),
        *_SHORTCUTS,
        Misconception("empty-part", when=only("empty", kind="nan")),
        Misconception("empty-part/2", when=only("empty", "unused", kind="nan")),
        Misconception("zero-times-nan", when=_nan_of_slots),
        Misconception("low-precision-scores", when=lambda evidence: evidence.tag("fine")),
        *(
            Misconception(name, gives=_joined(bounds=bounds, **fault))
            for name, fault in (
                ("parts-not-rescaled", {"acc": "plain", "total": "plain"}),
                ("parts-not-rescaled/2", {"total": "plain"}),
                ("parts-not-rescaled/3", {"acc": "plain"}),
                ("parts-averaged", {"acc": "mean"}),
                ("one-part-only", {"added": slice(1)}),
                ("one-part-only/2", {"added": slice(-1, None)}),
                ("divided-too-early", {"acc": "divided"}),
                ("not-divided", {"total": "nothing"}),
                ("factor/3", {"acc": "inverted"}),
            )
            for bounds in (_bounds, _long_first)
        ),
        Misconception("not-low-enough", gives=_joined(top="from 0 on")),
        Misconception("not-low-enough", gives=_joined(fault="from 0 on")),
        Misconception("no-maximum", gives=_joined(top="none")),
        Misconception("no-maximum", gives=_joined(fault="no maximum")),
        *(
            Misconception(name, gives=_joined(fault=fault))
            for name, fault in (
                ("sums-not-rescaled", "both"),
                ("sums-not-rescaled", "l"),
                ("sums-not-rescaled", "acc"),
                ("maximum-not-carried", "of the block"),
                ("last-block-wins", "m stays"),
                ("last-block-wins", "last"),
            )
        ),
        Misconception(
            "tail-dropped",
            gives=_joined(
                bounds=lambda n, SPLITS: [
                    (i * (cdiv(n, BLOCK) // SPLITS) * BLOCK, min((i + 1) * (cdiv(n, BLOCK) // SPLITS) * BLOCK, n))
                    for i in range(SPLITS)
                ]
            ),
        ),
        Misconception(
            "parts-overlap", gives=_joined(bounds=lambda n, SPLITS: [(first, n) for first, _ in _bounds(n, SPLITS)])
        ),
        Misconception(
            "parts-overlap/2",
            gives=_joined(
                bounds=lambda n, SPLITS: [
                    (first, min(first + cdiv(cdiv(n, SPLITS), BLOCK) * BLOCK, n))
                    for first in range(0, n, cdiv(n, SPLITS))
                ]
            ),
        ),
        Misconception("scale-twice", gives=_twice_scaled),
        Misconception("low-precision-parts", when=only("large-sums")),
        Misconception("low-precision-sums", when=_only_16_bits),
    ),
)


# ------------------------------------------------------------------------------------------------------- kv_cache.int8
def _int8_cases(rng: Random) -> list[Case]:
    make, cases = _Caches(rng), []
    torch = make.torch

    def rows(*shape: int, dtype: str, any_step: bool = False) -> Tensor:
        """Whole steps and up to half a step beside them, the largest at 127 or -127. None is nearer to the middle between two
        integers than float32 can tell in every way of rounding to nearest, one of 8,000 parts of a step; of those in float32
        two of each row are 5,000th parts away, on either side. A step is a power of two, or any number, in float32 also one
        that float16 cannot hold."""
        q = make.integers(-126, 127, *shape, dtype="float32")
        at = make.integers(0, shape[-1], *shape[:-1], 1)
        q.scatter_(-1, at, 254.0 * make.integers(0, 2, *at.shape) - 127)
        off = torch.rand(shape, generator=make.generator) - 0.5
        near = (at + torch.tensor([1, 2, 3, 4])) % shape[-1]
        off.scatter_(-1, near, torch.tensor([0.4998, -0.4998, 0.49, -0.49]).expand(near.shape))
        off.scatter_(-1, at, 0.0)
        powers = make.integers(-9, -5, *at.shape, dtype="float32")
        if any_step:
            powers = torch.rand(at.shape, generator=make.generator) * (100 if dtype == "float32" else 4) - 9
        x = ((q + off) * 2.0**powers).to(getattr(torch, dtype))
        steps = x.double() * 127 / x.double().abs().amax(-1, keepdim=True)
        return x.masked_fill((steps - steps.floor() - 0.5).abs() < 1 / 8000, 0)

    for H, D, T_max, lengths, dtype, tags in (
        (1, 16, 8, [0], "float32", "first"),
        (2, 16, 16, [15, 4], "float32", ""),
        (3, 64, 20, [10, 19], "float32", ""),
        (2, 16, 24, [7, 7], "bfloat16", ""),
        (1, 64, 16, [9, 0], "float16", "first"),
        (2, 16, 16, [6, 6], "float32", "zero"),
        (2, 16, 16, [5, 6], "float32", "tiny"),
        (4, 64, 64, [50, 31], "float16", ""),
        (2, 16, 24, [20, 23], "float16", "large"),
        (2, 16, 16, [4, 9], "float32", "low"),
        (3, 64, 4, [0, 0], "float32", "any-step"),
        (3, 64, 4, [0, 0], "float16", "any-step"),
    ):
        B, any_step = len(lengths), "any-step" in tags
        # Eighths: scores are exact in float32, even those of bare integers. With any step they are 0.
        q = (make.normal(B, H, D) * 8).round() / 8 * (256 if "large" in tags else 0 if any_step else 1)
        q = q.to(getattr(torch, dtype))
        k, v = (rows(B, H, D, dtype=dtype, any_step=any_step) for _ in range(2))
        if "zero" in tags:
            k[:, 0], v[:, 1] = 0, 0
        if "tiny" in tags:  # for what is added, or taken at least, so that nothing is divided by 0
            k, v = k * 2.0**-114, v * 2.0**-114
        k_cache, v_cache = (make.integers(-127, 128, B, T_max, H, D, dtype="int8") for _ in range(2))
        k_scales, v_scales = (2.0 ** make.integers(-9, -5, B, T_max, H, dtype="float32") for _ in range(2))
        if "low" in tags:  # -162,560 everywhere, exactly: as in far
            for x, first in ((q, -655_360), (k, 127 / 128), (k_cache, 127)):
                x.zero_()[..., 0] = first
            k_scales.fill_(2.0**-7)
        for b, n in enumerate(lengths):
            k_scales[b, n:], v_scales[b, n:] = math.nan, math.nan
        notes = {
            "zero": "a head of zeros",
            "tiny": "a token of tiny numbers",
            "large": "scores of some hundreds",
            "low": "scores around -160,000",
            "any-step": "scales of any size, q 0",
        }
        note = notes.get(tags, "")
        note = listed(f"caches of {T_max} slots, {lengths} in use", note)
        args = (q, k, v, k_cache, v_cache, k_scales, v_scales, torch.tensor(lengths, dtype=torch.int32))
        cases.append(tensor_case(*args, shown=f"k [{B}, {H}, {D}]", note=note, tags=tags))
    return cases


def _int8(
    most: float = 127,
    rounding: str = "nearest",
    place: int = 0,
    itself: bool = True,
    of_k: str = "own",
    of_v: str = "own",
    in_sum: bool = False,
) -> Callable[..., tuple[Tensor, ...]]:
    """o, the caches and the scales, as somebody quantizes, appends and multiplies scales in; gpukit.reference's functions do
    one of the three each."""

    def gives(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k_scales: Tensor,
        v_scales: Tensor,
        lengths: Tensor,
    ) -> tuple[Tensor, ...]:
        import torch

        caches, scales = [k_cache.clone(), v_cache.clone()], [k_scales.clone(), v_scales.clone()]
        for new, cache, scale in zip((k, v), caches, scales, strict=True):
            step = new.double().abs().amax(-1) / most
            x = new.double() / torch.where(step == 0, 1, step)[..., None]
            x = x.trunc() if rounding == "cut" else x.floor() if rounding == "floor" else (x + 0.5).floor()
            for b, n in enumerate(lengths.tolist()):
                if 0 <= n + place < cache.shape[1]:
                    cache[b, n + place] = x[b].to(torch.int16).to(torch.int8)  # 128 becomes -128, as on a GPU
                    scale[b, n + place] = step[b].to(scale.dtype)
        outputs = []
        for b, n in enumerate(lengths.tolist()):
            end = n + 1 if itself else n
            keys, values = (x[b, :end].to(q.dtype).transpose(0, 1) for x in caches)
            ks, vs = (x[b, :end].to(q.dtype).transpose(0, 1) for x in scales)
            ks, vs = (
                {
                    "own": x,
                    "none": torch.ones_like(x),
                    "newest": x[:, -1:].expand_as(x),
                    "first": x[:, :1].expand_as(x),
                }[how]
                for x, how in ((ks, of_k), (vs, of_v))
            )
            s = (keys @ q[b, :, :, None])[..., 0] * ks / math.sqrt(q.shape[-1])
            p = torch.softmax(s, -1)
            o = ((p * vs)[..., None] * values).sum(1) + (0 if end else math.nan)
            outputs.append(o / (p * vs).sum(1, keepdim=True) if in_sum else o)
        return torch.stack(outputs), *caches, *scales

    return gives


def _int8_o(**changed: Any) -> Callable[..., dict[str, Tensor]]:
    """Only o is wrong."""
    return lambda *args: {"y": _int8(**changed)(*args)[0]}


def _int8_all(**changed: Any) -> Callable[..., dict[str, Tensor]]:
    names = ("y", "k_cache", "v_cache", "k_scales", "v_scales")
    return lambda *args: dict(zip(names, _int8(**changed)(*args), strict=True))


def _scaled_by_the_maximum(outcome: Outcome) -> bool:
    """Whether the newest tokens' scales are their largest numbers, not their largest sizes, over 127."""
    _, k, _, _, _, _, _, lengths = outcome.case.args
    scales, largest = outcome.reply.outputs["k_scales"], k.float().amax(-1)
    new = [scales[b, n] for b, n in enumerate(lengths.tolist())]
    return all(bool(((x * 127 - y).abs() <= 1e-5 * y.abs()).all()) for x, y in zip(new, largest, strict=True))


def _inverse_scales(evidence: Evidence) -> bool:
    """Whether the newest tokens' scales are 127 over their largest sizes, where these are not tiny."""
    off = []
    for outcome in evidence.outcomes:
        _, k, _, _, _, _, _, lengths = outcome.case.args
        scales, step = outcome.reply.outputs["k_scales"].double(), k.double().abs().amax(-1) / 127
        off += [(scales[b, n] * step[b] - 1).abs()[step[b] > 1e-30] for b, n in enumerate(lengths.tolist())]
    return all(bool((x < 1e-3).all()) for x in off)


def _off_near_half(outcome: Outcome) -> bool:
    """Whether all new integers that are wrong are the neighbors of the right ones, of numbers nearly midway between two."""
    found = []
    for new, name in ((outcome.case.args[1], "k_cache"), (outcome.case.args[2], "v_cache")):
        step = new.double().abs().amax(-1, keepdim=True) / 127
        x = new.double() / step.where(step > 0, step + 1)
        cache = outcome.reply.outputs[name]
        for b, n in enumerate(outcome.case.args[-1].tolist()):
            wrong = cache[b, n].double() != (x[b] + 0.5).floor()
            found.append(((cache[b, n].double() - x[b]).abs() - 0.5)[wrong])
    return any(len(x) for x in found) and all(bool((x.abs() < 0.02).all()) for x in found)


def _int8_bytes(q: Tensor, *args: Tensor) -> int:
    """The new token in, then each slot in use once, q, and a length in each program of each launch."""
    (B, H, D), lengths = q.shape, args[-1]
    return 3 * nbytes(q) + 2 * H * int((lengths + 1).sum()) * (D + 4) + 8 * B * H


def _int8_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    enough, loaded = _int8_bytes(*case.args), sum(launch.load_bytes for launch in launches)
    if loaded <= 1.05 * enough:
        return None
    return (
        "beyond-the-length",
        f"{loaded:,} bytes are loaded where {enough:,} are enough: one byte for each element and 4 for each scale within the lengths",
    )


def _huge_int8() -> tuple:
    import torch

    B, T_max, H, D = 5120, 64, 128, 128
    caches, scales = (far(B, T_max, H, D, dtype="int8"),) * 2, (far(B, T_max, H, dtype="float32"),) * 2
    return *(far(B, H, D),) * 3, *caches, *scales, torch.full((B,), T_max - 1, dtype=torch.int32)


INT8 = KernelExercise(
    id="kv_cache.int8",
    function="decode_int8",
    cases=_int8_cases,
    returns=("o",),
    reference=_int8(),
    in_place=(3, 4, 5, 6),
    huge=_huge_int8,
    traffic=Traffic(
        reads=lambda *args: _int8_bytes(*args),
        writes=lambda q, *_: nbytes(q) + 2 * q.shape[0] * q.shape[1] * (q.shape[2] + 4),
        launches=2,
        memory=lambda q, *_: nbytes(q) + _NUMBERS,
    ),
    launch_rule=_int8_rule,
    misconceptions=(
        Misconception("not-low-enough", when=only("low")),
        Misconception("no-maximum", when=only("large", "low", kind="nan")),
        Misconception("cut-off", gives=_int8_all(rounding="cut")),
        Misconception("cut-off/2", gives=_int8_all(rounding="floor")),
        Misconception("128-steps", gives=_int8_all(most=128)),
        Misconception(
            "sign", when=lambda evidence: all(map(_scaled_by_the_maximum, (o for o in evidence.outcomes if o.wrong)))
        ),
        Misconception(
            "not-nearest", when=lambda evidence: all(_off_near_half(o) for o in evidence.outcomes if o.wrong)
        ),
        Misconception("inverse-scale", when=_inverse_scales),
        Misconception("scale-in-the-sum", gives=_int8_o(in_sum=True)),
        Misconception("no-k-scale", gives=_int8_o(of_k="none")),
        Misconception("no-v-scale", gives=_int8_o(of_v="none")),
        Misconception("one-scale-for-all", gives=_int8_o(of_k="newest", of_v="newest")),
        Misconception("one-scale-for-all/2", gives=_int8_o(of_k="first", of_v="first")),
        Misconception("not-itself", gives=_int8_o(itself=False)),
        Misconception("unwritten-scales", when=lambda evidence: evidence.kind == "nan" and evidence.output == "y"),
    ),
)

EXERCISES = [ATTEND, SPEED, DECODE, PACKED, SPLIT, INT8]
