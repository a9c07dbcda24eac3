"""The exercises of notebook 14: cases, bounds on traffic and on the longest program, and what each wrong idea computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.accounting.tiling import cdiv
from gpukit.grading import ideas
from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only
from gpukit.grading.inputs import Inputs, case, far, listed, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Outcome
    from gpukit.grading.messages import LaunchFacts

BLOCK = 32  # tokens in a block, of all kernels


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
        return self.normal(B, H, D, dtype=dtype), k, v + 1, self.torch.tensor(lengths, dtype=self.torch.int32)


def _scored(args: tuple, score: int) -> tuple:
    """The same values with scores that are all the same, exactly. D is 16."""
    q, k, v, lengths = args
    q, seen = q * 0, ~k.isnan()
    q[..., 0] = 16
    k = (k * 0).where(seen, k)
    k[..., 0] += score / 4
    return q, k, v, lengths


def _case(args: tuple, tags: str = "", note: str = "") -> Case:
    q, k, _, lengths, *_ = args
    shown = f"q {list(q.shape)}, cache {list(k.shape)}"
    return tensor_case(*args, shown=shown, note=listed(f"lengths {lengths.tolist()}", note), tags=tags)


# --------------------------------------------------------------------------------------------- what somebody computes
def _reference(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *_: Any) -> Tensor:
    n = int(lengths.max())  # what lies behind is not looked at, and may be much
    return ideas.reference("decode_attention.decode_attention")(q, k[:, :n], v[:, :n], lengths)


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
    rescale_sum: bool = True, rescale_acc: bool = True, padding: int = 0, only: slice | None = None
) -> Callable[..., Tensor]:
    """The running softmax over blocks of 32 tokens, as somebody carries it on. padding: how many slots behind the last token
    count, as far as the last block has them."""

    def gives(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *_: Any) -> Tensor:
        import torch

        rows = []
        for s, values in _tokens(q, k, v, lengths):
            blocks = list(zip(s.split(BLOCK, 1), values.split(BLOCK, 1), strict=True))[only or slice(None)]
            m, total, acc = s.new_full(s.shape[:1], -3e38), s.new_zeros(s.shape[:1]), values[:, :0].sum(1)
            for part, value in blocks:
                m_new = torch.maximum(m, part.amax(1)) if part.shape[1] else m
                if padding and part.shape[1] < BLOCK:  # scores of 0, and values of 0
                    m_new = m_new.clamp_min(0)
                shrink = torch.exp(m - m_new)
                p = torch.exp(part - m_new[:, None])
                total = (total * shrink if rescale_sum else total) + p.sum(1)
                if padding:
                    total = total + min(BLOCK - part.shape[1], padding) * torch.exp(-m_new)
                acc = (acc * shrink[:, None] if rescale_acc else acc) + (p[:, :, None] * value).sum(1)
                m = m_new
            rows.append(acc / torch.where(total == 0, 1, total)[:, None])
        return torch.stack(rows)

    return gives


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
    ):
        q, k, v = make.normal(B, T, H, D), make.normal(B, T, H_kv, D), make.normal(B, T, H_kv, D)
        caches = (make.cache(B, T_max, H_kv, D, [length] * B, "float32", False) for _ in range(2))
        name = f"{T} new token{'s' * (T > 1)} after {length}, {H} heads, {H_kv} in the cache, T_max {T_max}"
        tags = ("filled" if length else "prompt") + " new-tokens" * (T > 1) + " gqa" * (H > H_kv)
        cases.append(case(name, q, k, v, *caches, length, tags=tags))
    return cases


def _attended(
    seen: Callable[[Tensor, Tensor, int], Tensor] = lambda t, n, length: n <= length + t,
    place: int = 0,
    heads: str = "in a row",
    new_only: bool = False,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """o and both caches, as somebody appends and masks. t: the new tokens, n: the cached ones, both from 0."""

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
        s = (q.double().transpose(1, 2) @ keys.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
        weights = torch.softmax(s, -1).nan_to_num(0)  # PyTorch gives 0 where nothing is seen
        return (weights @ values).transpose(1, 2).float(), k_cache, v_cache

    return gives


ATTEND = FunctionExercise(
    id="kv_cache.attend",
    function="attend",
    cases=_attend_cases,
    expected=_attended(),
    tolerance=1e-5,
    misconceptions=(
        Misconception("first-tokens-only", gives=_attended(lambda t, n, length: n <= t)),
        Misconception("first-tokens-only/2", gives=_attended(lambda t, n, length: (n <= t) | (len(t) == 1))),
        Misconception("sees-the-future", gives=_attended(lambda t, n, length: n >= 0)),
        Misconception("sees-the-future/2", gives=_attended(lambda t, n, length: (n <= t) | (length > 0))),
        Misconception("not-itself", gives=_attended(lambda t, n, length: n < length + t)),
        Misconception("one-too-many", gives=_attended(lambda t, n, length: n <= length + t + 1)),
        Misconception("turned-round", gives=_attended(lambda t, n, length: n > length + t)),
        Misconception("one-row-for-all", gives=_attended(lambda t, n, length: n <= length + 0 * t)),
        Misconception("cache-unused", gives=_attended(new_only=True)),
        Misconception("wrong-heads", gives=_attended(heads="in turn")),
        Misconception("unwritten-slots", when=lambda evidence: bool(evidence.outputs[0].isnan().any())),
        Misconception(
            "wrong-place",
            when=lambda evidence: (
                evidence.kind == "values" and "value 1" in str(evidence.first.wrong.text + evidence.first.wrong.kind)
            ),
        ),
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


def _counts(**changed: Any) -> Callable[..., float]:
    return lambda *args: _rate(*args, **changed)


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
    ):
        new = 1 if "single" in name else rng.randrange(900, 4000) if tags == "long-run" else rng.randrange(20, 400)
        args = (
            rng.randrange(10**8, 10**10),
            4 if "weights of 4" in name else 16,
            rng.randrange(12, 80),
            1 if "one key" in name else rng.choice((2, 4, 8)),
            rng.choice((64, 96, 128)),
            8 if "int8" in tags else 32 if "32 bits" in name else 16,
            rng.randint(low, high),
            rng.randrange(1, 60) if tags == "long-run" else rng.randrange(500, 30_000),
            new,
            float(rng.randrange(900, 8000)),
        )
        cases.append(case(name, *args, tags=tags))
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
        Misconception("half-a-token", gives=_counts(tokens="half")),
        Misconception("binary-units", gives=lambda *args: _rate(*args[:-1], args[-1] * 2**30 / 1e9)),
        Misconception("no-scales", gives=_counts(scales="none")),
        Misconception("no-scales/2", gives=_counts(scales="one for both")),
    ),
)


# ----------------------------------------------------------------------------------------------------- kv_cache.decode
def _decode_cases(rng: Random) -> list[Case]:
    make = _Caches(rng)
    torch = make.torch
    cases = [
        _case(make.args(1, 16, 16, [16], "float32")),
        _case(make.args(2, 32, 64, [64], "float32"), "blocks"),
        _case(make.args(3, 32, 80, [45, 7], "float32", stale=True), "blocks stale", "old numbers behind them"),
        _case(make.args(2, 40, 64, [33, 64], "float16", stale=True), "blocks stale", "old numbers behind them"),
    ]
    q, k, v, lengths = make.args(2, 16, 40, [40, 21], "float32", stale=True)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    cases.append(_case((q, k, v, lengths), "blocks strides stale", "both stored as [B, H, T, D]"))
    q, k, v, lengths = make.args(2, 32, 48, [20, 48], "bfloat16", stale=True)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    cases.append(_case((q, k, v, lengths), "blocks strides stale", "values stored as [B, H, T, D]"))
    q, k, v, lengths = make.args(2, 16, 40, [40, 21], "float32", stale=True)
    k, v = torch.stack((k, v), 2).unbind(2)
    cases.append(_case((q, k, v, lengths), "blocks strides stale", "k and v side by side in one tensor"))
    cases.append(_case(make.args(1, 16, 64, [0, 40], "float32"), "blocks empty", "NaN behind them"))
    cases.append(_case(make.args(1, 64, 16_400, [40], "float16"), "blocks", "a cache that no block can hold"))
    q, k, v, lengths = make.args(2, 16, 64, [64, 50], "float32")
    for b, h, token in ((0, 0, 40), (0, 1, 3), (1, 0, 20), (1, 1, 45)):  # one far above the rest: no rounding shows
        k[b, token, h] *= 3
        q[b, h] = 8 * k[b, token, h]
    cases.append(_case((q, k, v, lengths), "blocks large", "scores beyond the range of exp"))
    cases.append(_case(make.args(4, 64, 96, [96, 37], "float16"), "blocks", "NaN behind them"))
    cases.append(_case(_scored(make.args(1, 16, 48, [45], "float32"), -128), "low", "scores of -128"))
    cases.append(_case(make.args(1, 16, 720, [700], "float32"), "blocks many-blocks", "NaN behind them"))
    return cases


def _twice_scaled(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *rest: Any) -> Tensor:
    return _reference(q / math.sqrt(q.shape[-1]), k, v, lengths, *rest)


def _huge_decode() -> tuple:
    import torch

    return far(48, 128, 128), *(far(48, 4096, 128, 128),) * 2, torch.full((48,), 64, dtype=torch.int32)


DECODE = KernelExercise(
    id="kv_cache.decode",
    function="decode",
    cases=_decode_cases,
    returns=("o",),
    reference=_reference,
    huge=_huge_decode,
    # The case with the largest q, [2, 4, 64]: 133 tokens' keys and values, a quarter of q's size each; 8 lengths of 4 bytes.
    traffic=Traffic(reads=1 + 2 * 133 / 2 + 8 * 4 / 1024, writes=1),
    misconceptions=(
        Misconception("stale-slots", gives=_all_slots),
        Misconception("padding-counts", gives=_blockwise(padding=BLOCK)),
        Misconception("one-slot-too-many", gives=_blockwise(padding=1)),
        Misconception("scale-twice", gives=_twice_scaled),
        Misconception(
            "first-sequence",
            gives=lambda q, k, v, lengths: _reference(q, k[:1].expand_as(k), v[:1].expand_as(v), lengths),
        ),
        Misconception("first-sequence/2", gives=lambda q, k, v, lengths: _reference(q, k[:1].expand_as(k), v, lengths)),
        Misconception("first-sequence/3", gives=lambda q, k, v, lengths: _reference(q, k, v[:1].expand_as(v), lengths)),
        Misconception("first-block-only", gives=_blockwise(only=slice(1))),
        Misconception("last-block-wins", gives=_blockwise(only=slice(-1, None))),
        Misconception("sums-not-rescaled", gives=_blockwise(rescale_sum=False, rescale_acc=False)),
        Misconception("sums-not-rescaled/2", gives=_blockwise(rescale_sum=False)),
        Misconception("sums-not-rescaled/3", gives=_blockwise(rescale_acc=False)),
        Misconception(
            "k-strides-for-v",
            gives=lambda q, k, v, lengths: _reference(q, k, v.as_strided(v.shape, k.stride()), lengths),
        ),
        Misconception(
            "contiguous", gives=lambda q, k, v, lengths: _reference(q, k, ideas.as_if_contiguous(v), lengths)
        ),
        Misconception(
            "contiguous/2",
            gives=lambda q, k, v, lengths: _reference(q, ideas.as_if_contiguous(k), ideas.as_if_contiguous(v), lengths),
        ),
        Misconception(
            "maximum-not-carried",
            when=lambda evidence: (
                only("large", kind="nan")(evidence) and bool(evidence.outputs.flatten(0, 1)[[0, -1]].isfinite().all())
            ),
        ),
        Misconception("no-maximum", when=only("large", "low", kind="nan")),
        Misconception("not-low-enough", when=only("low")),
        Misconception("one-block", when=only("many-blocks")),
        Misconception("empty-sequence", when=only("empty", kind="nan")),
        Misconception(
            "zero-times-nan",
            when=lambda evidence: evidence.kind == "nan" and not any("stale" in case.tags for case in evidence.failed),
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------- kv_cache.packed
def _packed_cases(rng: Random) -> list[Case]:
    make, cases = _Caches(rng), []
    for H, H_kv, D, T_max, lengths, dtype, stale in (
        (1, 1, 16, 32, [32], "float32", False),
        (4, 2, 16, 40, [40, 21], "float32", True),
        (6, 2, 32, 64, [64, 5], "float32", True),
        (3, 1, 16, 33, [33], "bfloat16", False),
        (14, 2, 16, 40, [39], "float16", False),
        (20, 1, 16, 48, [20], "float32", False),
        (32, 4, 64, 96, [96], "float16", False),
    ):
        tags = "groups" * (H > H_kv > 1) + " stale" * stale
        note = "old numbers behind them" if stale else ""
        cases.append(_case(make.args(H, D, T_max, lengths, dtype, H_kv, stale), tags, note))
    cases.append(_case(make.args(2, 64, 16_400, [40], "float16", 1), "", "a cache that no block can hold"))
    q, k, v, lengths = make.args(4, 16, 40, [40], "float32", 1)
    q[:, 1:] *= 1e-3
    q[:, 0], q[:, 0, 0], k[..., 0] = 0, 800, 1  # all its scores are 200, in every order of adding
    cases.append(_case((q, k, v, lengths), "spread", "one head's scores far above the others'"))
    cases.append(_case(_scored(make.args(16, 16, 48, [45], "float32", 1, True), -128), "low", "scores of -128"))
    cases.append(_case(make.args(2, 16, 720, [700], "float32", 1), "many-blocks", "NaN behind them"))
    # 32 x 1.8125 again and again: what rounding to bfloat16 takes away goes one way.
    q, k, v, lengths = make.args(1, 16, 512, [512], "bfloat16")
    cases.append(_case((q * 0, k, v * 0 + 1.8125, lengths), "alike", "all weights and all values alike"))
    return cases


def _regrouped(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Query head h with head h % H_kv of the cache."""
    B, H, D = q.shape
    H_kv = k.shape[2]
    dealt = q.view(B, H // H_kv, H_kv, D).transpose(1, 2).reshape(B, H, D)
    o = _reference(dealt, k, v, lengths)
    return o.view(B, H_kv, H // H_kv, D).transpose(1, 2).reshape(B, H, D)


def _first_of_group(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[2]
    return _reference(q[:, ::groups].repeat_interleave(groups, 1), k, v, lengths)


def _huge_packed() -> tuple:
    import torch

    return far(48, 256, 128), *(far(48, 4096, 128, 128),) * 2, torch.full((48,), 64, dtype=torch.int32)


PACKED = KernelExercise(
    id="kv_cache.packed",
    function="decode_packed",
    cases=_packed_cases,
    returns=("o",),
    reference=_reference,
    huge=_huge_packed,
    # The largest case, q [1, 32, 64]: keys and values of 96 tokens and 4 heads; 4 lengths of 4 bytes.
    traffic=Traffic(reads=1 + 2 * 96 * 4 / 32 + 4 * 4 / 4096, writes=1),
    misconceptions=(
        Misconception("low-precision-sums", when=only("alike")),
        Misconception("wrong-heads", gives=_regrouped),
        Misconception("one-query", gives=_first_of_group),
        Misconception("stale-slots", gives=_all_slots),
        Misconception("padding-counts", gives=_blockwise(padding=BLOCK)),
        Misconception("sums-not-rescaled", gives=_blockwise(rescale_sum=False, rescale_acc=False)),
        Misconception("sums-not-rescaled/2", gives=_blockwise(rescale_sum=False)),
        Misconception("last-block-wins", gives=_blockwise(only=slice(-1, None))),
        Misconception("one-slot-too-many", gives=_blockwise(padding=1)),
        Misconception("sums-not-rescaled/3", gives=_blockwise(rescale_acc=False)),
        Misconception("no-scale", gives=lambda q, k, v, lengths: _reference(q * math.sqrt(q.shape[-1]), k, v, lengths)),
        Misconception("one-maximum", when=only("spread")),
        Misconception("not-low-enough", when=only("low")),
        Misconception("one-block", when=only("many-blocks")),
        Misconception("tf32", when=lambda evidence: only("float32")(evidence) and evidence.near(5e-3)),
    ),
)


# ------------------------------------------------------------------------------------------------------ kv_cache.split
def _split_cases(rng: Random) -> list[Case]:
    make, cases = _Caches(rng), []

    def add(args: tuple, SPLITS: int, tags: str = "", note: str = "") -> None:
        uneven = any(cdiv(n, BLOCK) % SPLITS for n in args[3].tolist())
        empty = any(cdiv(n, BLOCK) < SPLITS for n in args[3].tolist())
        tags += " uneven" * uneven + " empty" * empty
        cases.append(_case((*args, SPLITS), tags, listed(f"{SPLITS} splits", note)))

    q, k, v, lengths = make.args(2, 16, 64, [64], "float32")
    add((q * 0, k, v, lengths), 2, "flat", "all scores 0")
    add(make.args(1, 16, 32, [32], "float32"), 1)
    add(make.args(2, 16, 96, [96, 96], "float32"), 3)
    q, k, v, lengths = make.args(1, 16, 128, [128], "float32")
    add((q * 2, k, v, lengths), 4, "steep", "scores far apart")
    add(make.args(2, 16, 160, [150, 70], "bfloat16"), 3)
    add(make.args(1, 16, 128, [100, 9], "float32"), 4)
    q, k, v, lengths = make.args(1, 16, 2304, [2304], "float16")
    add((q * 0, k, v + 60, lengths), 2, "large-sums", "parts beyond 65,504")
    add(make.args(1, 16, 4096, [512], "float32"), 8, "", "most slots unused")
    add(make.args(4, 64, 128, [128, 100], "float16"), 4)
    add(_scored(make.args(1, 16, 64, [64], "float32"), -128), 2, "low", "scores of -128")
    add(_scored(make.args(1, 16, 64, [64], "float32"), 128), 2, "large", "scores of 128")
    return cases


def _bounds(n: int, SPLITS: int) -> list[tuple[int, int]]:
    blocks = cdiv(n, BLOCK)
    return [(blocks * i // SPLITS * BLOCK, min(blocks * (i + 1) // SPLITS * BLOCK, n)) for i in range(SPLITS)]


def _joined(acc: str = "weighted", total: str = "weighted", bounds: Callable = _bounds) -> Callable[..., Tensor]:
    """Parts as somebody joins them: sums "weighted" by e to the difference of maxima, "plain", or "mean" of the results; or
    weighted, but "divided" by the part's own sum already."""

    def gives(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, SPLITS: int) -> Tensor:
        import torch

        rows = []
        for s, values in _tokens(q, k, v, lengths):
            parts = []
            for first, end in bounds(s.shape[1], SPLITS):
                if end <= first:
                    continue
                m = s[:, first:end].amax(1)
                p = torch.exp(s[:, first:end] - m[:, None])
                parts.append((m, p.sum(1), (p[:, :, None] * values[:, first:end]).sum(1)))
            if not parts:  # 0 / 0
                rows.append(values.sum(1) * math.nan)
                continue
            m, l, sums = (torch.stack(x) for x in zip(*parts, strict=True))
            weight = torch.exp(m - m.amax(0))
            if acc == "mean":
                rows.append((sums / l[..., None]).mean(0))
                continue
            if acc == "divided":
                rows.append((sums / l[..., None] * weight[..., None]).sum(0) / (l * weight).sum(0)[:, None])
                continue
            top = (sums * weight[..., None] if acc == "weighted" else sums).sum(0)
            below = (l * weight if total == "weighted" else l).sum(0)
            rows.append(top / below[:, None])
        return torch.stack(rows)

    return gives


def _split_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    lengths, SPLITS = case.args[3], case.args[4]
    blocks = cdiv(int(lengths.max()), BLOCK)
    # q, the length and three stores; keys and values of each block of the share.
    enough = 5 + 2 * cdiv(blocks, SPLITS)
    longest = launches[0].longest if launches else 0
    if longest > 2 * enough:
        return (
            "not-shared",
            f"one program makes {longest} loads and stores, where {enough} do if {SPLITS} programs share the tokens of the "
            "longest sequence. Which tokens are part 1's, and of which number are they a share?",
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
        "atomics add in whatever order the programs arrive, and another order rounds otherwise: two runs do not agree. Where "
        "can each part leave its sums?",
    )


def _huge_split() -> tuple:
    import torch

    return far(48, 128, 128), *(far(48, 4096, 128, 128),) * 2, torch.full((48,), 64, dtype=torch.int32), 2


SPLIT = KernelExercise(
    id="kv_cache.split",
    function="decode_split",
    cases=_split_cases,
    returns=("o",),
    reference=_reference,
    huge=_huge_split,
    # The largest case, q [2, 4, 64] in 1 KiB, 4 splits: q 4 times; keys and values of 228 tokens, a quarter of q each; 32 lengths;
    # 32 parts of D + 2 float32 stored, and loaded with m once more.
    traffic=Traffic(reads=4 + 2 * 228 / 2 + 32 * (4 + 4 * 67) / 1024, writes=1 + 32 * 4 * 66 / 1024, launches=2),
    launch_rule=_split_rule,
    misconceptions=(
        Misconception("parts-not-rescaled", gives=_joined("plain", "plain")),
        Misconception("parts-not-rescaled/2", gives=_joined("weighted", "plain")),
        Misconception("parts-not-rescaled/3", gives=_joined("plain", "weighted")),
        Misconception("parts-averaged", gives=_joined("mean")),
        Misconception("one-part-only", gives=_joined(bounds=lambda n, SPLITS: _bounds(n, SPLITS)[:1])),
        Misconception("one-part-only/2", gives=_joined(bounds=lambda n, SPLITS: _bounds(n, SPLITS)[-1:])),
        Misconception("not-low-enough", when=only("low")),
        Misconception("no-maximum", when=only("large", "low", kind="nan")),
        Misconception("empty-part", when=only("empty", kind="nan")),
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
        Misconception("divided-too-early", gives=_joined("divided")),
        Misconception("scale-twice", gives=_twice_scaled),
        Misconception("low-precision-parts", when=only("large-sums")),
    ),
)


# ------------------------------------------------------------------------------------------------------- kv_cache.int8
def _int8_cases(rng: Random) -> list[Case]:
    make, cases = _Caches(rng), []
    torch = make.torch

    def rows(*shape: int, dtype: str, steps: str = "various") -> Tensor:
        """Near whole steps of a power of two, the largest at 127 or -127: every way of rounding to nearest agrees on them."""
        q = make.integers(-126, 127, *shape, dtype="float32")
        at = make.integers(0, shape[-1], *shape[:-1], 1)
        q.scatter_(-1, at, 254.0 * make.integers(0, 2, *at.shape) - 127)
        off = torch.rand(shape, generator=make.generator) * 0.4 - 0.2
        off.scatter_(-1, at, 0.0)
        powers = make.integers(-9, -5, *shape[:-1], 1) if steps == "various" else -6
        return ((q + off) * 2.0**powers).to(getattr(torch, dtype))

    for H, D, T_max, lengths, dtype, tags in (
        (1, 16, 8, [0], "float32", "first"),
        (2, 16, 16, [15, 4], "float32", ""),
        (3, 64, 20, [10, 19], "float32", ""),
        (2, 16, 24, [7, 7], "bfloat16", ""),
        (1, 64, 16, [9, 0], "float16", "first"),
        (2, 16, 16, [6, 6], "float32", "zero"),
        (4, 64, 64, [50, 31], "float16", ""),
        (2, 16, 24, [20, 23], "float16", "large"),
    ):
        B = len(lengths)
        # Eighths: scores are exact in float32, even those of bare integers.
        q = ((make.normal(B, H, D) * 8).round() / 8).to(getattr(torch, dtype)) * (256 if "large" in tags else 1)
        k, v = rows(B, H, D, dtype=dtype), rows(B, H, D, dtype=dtype)
        if "zero" in tags:
            k[:, 0], v[:, 1] = 0, 0
        k_cache, v_cache = (make.integers(-127, 128, B, T_max, H, D, dtype="int8") for _ in range(2))
        k_scales, v_scales = (2.0 ** make.integers(-9, -5, B, T_max, H, dtype="float32") for _ in range(2))
        for b, n in enumerate(lengths):
            k_scales[b, n:], v_scales[b, n:] = math.nan, math.nan
        note = {"zero": "a head of zeros", "large": "scores of some hundreds"}.get(tags, "")
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
                    cache[b, n + place] = x[b].clamp(-128, 127).to(torch.int8)
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


def _int8_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    B, H, D = case.args[0].shape
    tokens = int((case.args[7] + 1).sum())
    new = 2 * B * H * D * case.args[0].element_size()
    # The new token in and out, in elements and scales; then each slot in use once. Lengths: 4 bytes a program and launch.
    enough = new + 2 * H * tokens * (D + 4) + B * H * (8 + D * case.args[0].element_size())
    loaded = sum(launch.load_bytes for launch in launches)
    if loaded <= 1.05 * enough:
        return None
    return (
        "beyond-the-length",
        f"{loaded:,} bytes are loaded where {enough:,} do: one byte for each element and 4 for each scale within the lengths",
    )


INT8 = KernelExercise(
    id="kv_cache.int8",
    function="decode_int8",
    cases=_int8_cases,
    returns=("o",),
    reference=_int8(),
    in_place=(3, 4, 5, 6),
    # The largest case, q [2, 4, 64] in 1 KiB: q, k and v; 83 tokens of 4 heads with 2 (64 + 4) bytes; lengths twice. o, and the new
    # token's 2 x 8 rows.
    traffic=Traffic(reads=3 + (83 * 4 * 2 * 68 + 64) / 1024, writes=1 + 16 * 68 / 1024, launches=2),
    launch_rule=_int8_rule,
    misconceptions=(
        Misconception("no-maximum", when=only("large", kind="nan")),
        Misconception("cut-off", gives=_int8_all(rounding="cut")),
        Misconception("cut-off/2", gives=_int8_all(rounding="floor")),
        Misconception("128-steps", gives=_int8_all(most=128)),
        Misconception(
            "sign", when=lambda evidence: all(map(_scaled_by_the_maximum, (o for o in evidence.outcomes if o.wrong)))
        ),
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
