"""The exercises of notebook 14: cases, bounds on traffic and on the longest program, hints, and the wrong answers that each
check must recognise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Label, Misconception, Traffic, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence, Outcome
    from gpukit.grading.messages import LaunchFacts

NOTEBOOK = "14_kv_cache"
BLOCK = 32  # tokens in a block, of all kernels


def _up(a: int, b: int) -> int:
    return -(-a // b)


# ------------------------------------------------------------------------------------------------------------- inputs
class _Caches:
    """Seeded queries and caches. What lies behind a sequence's tokens is NaN, or with stale=True numbers of somebody else."""

    def __init__(self, rng: Random):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def normal(self, *shape: int, dtype: str = "float32") -> Tensor:
        return self.torch.randn(shape, generator=self.generator).to(getattr(self.torch, dtype))

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
    q, k, lengths = args[0], args[1], args[3]
    dtype = str(q.dtype).removeprefix("torch.")
    name = f"q {list(q.shape)}, cache {list(k.shape)} {dtype}, lengths {lengths.tolist()}" + (
        f", {note}" if note else ""
    )
    return Case(name, args, frozenset({dtype, *tags.split()}))


# --------------------------------------------------------------------------------------------- what somebody computes
def _reference(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *_: Any) -> Tensor:
    from gpukit.reference.decode_attention import decode_attention

    n = int(lengths.max())  # what lies behind is not looked at, and may be much
    return decode_attention(q, k[:, :n], v[:, :n], lengths)


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


def _nan_only(tag: str) -> Callable[[Evidence], bool]:
    return lambda evidence: evidence.kind == "nan" and all(tag in case.tags for case in evidence.failed)


def _only(*tags: str) -> Callable[[Evidence], bool]:
    """Every case that failed has one of the tags."""
    return lambda evidence: all(case.tags.intersection(tags) for case in evidence.failed)


def _nearly(evidence: Evidence) -> bool:
    """Off by about what tf32 cuts off, and not by more."""
    y, right = evidence.outputs.double(), evidence.expected.double()
    return bool((y - right).abs().max() < 5e-3 * right.abs().max())


_NOT_LOW_ENOUGH = (
    "where all scores are far below 0, something counts that is no token's: a maximum that begins above them, or a slot behind the "
    "length. Which number is below every score?"
)
_NO_MAXIMUM = (
    "scores far above 0 overflow in the exponential, and infinity over infinity is NaN. What may be taken from all scores without "
    "changing the weights?"
)
_ONE_BLOCK = (
    "a sequence that is longer than your block loses its other tokens, or its first ones. A text that is long enough fits no block: "
    "what comes after the first?"
)


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
        tags = {"filled" if length else "prompt", *(["several"] if T > 1 else []), *(["gqa"] if H > H_kv else [])}
        cases.append(Case(name, (q, k, v, *caches, length), frozenset(tags)))
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


_A_SEEN = "    seen = torch.arange(end) <= length + torch.arange(q.shape[2])[:, None]\n"
_A_O = "    o = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)\n"
_A_VIEWS = "(x.transpose(1, 2) for x in (q, k_cache[:, :end], v_cache[:, :end]))"
_A_STUB = "    o = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)\n"
_A_APPEND = "    k_cache[:, length:end] = k\n    v_cache[:, length:end] = v\n"

ATTEND = FunctionExercise(
    id="kv_cache.attend",
    title="Right for the prompt, wrong ever after",
    notebook=NOTEBOOK,
    function="attend",
    label=Label(2, 20, "detective: which tokens a query sees when the cache is not empty"),
    hints=(
        "The prompt comes out right and every later token wrong. What differs between the two calls, besides the numbers?",
        "A causal mask compares the place of a query with the place of a key. Keys are counted from the beginning of the "
        "sequence. From where does PyTorch count the queries, if it is told no more than their number?",
        "The new query t is token number length plus t. It may see the keys whose number is at most that. Give attention a "
        "mask of T rows and as many columns as there are tokens, true where a key is seen.",
    ),
    cases=_attend_cases,
    expected=_attended(),
    tolerance=1e-5,
    misconceptions=(
        Misconception(
            "first-tokens-only",
            "each query sees the tokens at the beginning of the cache, as if it were a token of the prompt: one new token "
            "sees the very first alone. Which number has new query t in its sequence?",
            gives=_attended(lambda t, n, length: n <= t),
        ),
        Misconception(
            "first-tokens-only",
            "the prompt and single tokens are right; several tokens behind others, a second prompt, are masked as if they were "
            "the first. Which number has new query t in its sequence?",
            gives=_attended(lambda t, n, length: (n <= t) | (len(t) == 1)),
        ),
        Misconception(
            "sees-the-future",
            "every new token sees all tokens, those after it too. That is right for a single one. What about several?",
            gives=_attended(lambda t, n, length: n >= 0),
        ),
        Misconception(
            "sees-the-future",
            "the prompt is right, and of several new tokens later on each sees those after it too. A single one may see all. "
            "What about several?",
            gives=_attended(lambda t, n, length: (n <= t) | (length > 0)),
        ),
        Misconception(
            "not-itself",
            "each token sees those before it and not itself. Compare its own number with the last that it may see",
            gives=_attended(lambda t, n, length: n < length + t),
        ),
        Misconception(
            "one-too-many",
            "each token sees the one after it as well. Compare its own number with the last that it may see",
            gives=_attended(lambda t, n, length: n <= length + t + 1),
        ),
        Misconception(
            "turned-round",
            "each new token sees those after it and none before it. Which of the two numbers may be the larger one?",
            gives=_attended(lambda t, n, length: n > length + t),
        ),
        Misconception(
            "one-row-for-all",
            "all new tokens see as much as the first of them, and not themselves. Has every one of them the number `length`?",
            gives=_attended(lambda t, n, length: n <= length + 0 * t),
        ),
        Misconception(
            "cache-unused",
            "the new tokens see each other and nothing of what is in the cache. What was it kept for?",
            gives=_attended(new_only=True),
        ),
        Misconception(
            "wrong-heads",
            "the heads of the cache are dealt out in turn: query heads 0, 1, 2, … read heads 0, 1, 0, …. Which query heads "
            "does the docstring give to one head?",
            gives=_attended(heads="in turn"),
        ),
        Misconception(
            "unwritten-slots",
            "the result holds NaN: slots that nobody has written took part. A weight of 0 does not help, for 0 times NaN is "
            "NaN. How many slots are in use?",
            when=lambda evidence: bool(evidence.outputs[0].isnan().any()),
        ),
        Misconception(
            "wrong-place",
            "the caches do not hold what they should: the new tokens belong behind those that are there, in order, and "
            "nothing else may change",
            when=lambda evidence: (
                evidence.kind == "values" and "value 1" in str(evidence.first.wrong.text + evidence.first.wrong.kind)
            ),
        ),
    ),
    wrong=(
        Variant("as it was", ((_A_SEEN, ""), (_A_O, _A_STUB)), diagnosis="first-tokens-only"),
        Variant("causal for several", ((_A_SEEN, ""), (_A_O, _A_O.replace("attn_mask=seen", "is_causal=q.shape[2] > 1"))), diagnosis="first-tokens-only"),
        Variant("no mask", ((_A_SEEN, ""), (_A_O, _A_O.replace("attn_mask=seen, ", ""))), diagnosis="sees-the-future"),
        Variant(
            "causal for the prompt alone",
            ((_A_SEEN, ""), (_A_O, _A_O.replace("attn_mask=seen", "is_causal=length == 0"))),
            diagnosis="sees-the-future",
        ),
        Variant("less than", ((_A_SEEN, _A_SEEN.replace("<=", "<")),), diagnosis="not-itself"),
        Variant("counted from one", ((_A_SEEN, _A_SEEN.replace("<= length", "<= 1 + length")),), diagnosis="one-too-many"),
        Variant("turned round", ((_A_SEEN, _A_SEEN.replace("<=", ">")),), diagnosis="turned-round"),
        Variant("the first one's row", ((_A_SEEN, _A_SEEN.replace("[:, None]", "[:, None] * 0")),), diagnosis="one-row-for-all"),
        Variant(
            "new tokens alone",
            ((_A_VIEWS, "(x.transpose(1, 2) for x in (q, k, v))"), (_A_SEEN, ""), (_A_O, _A_STUB)),
            diagnosis="cache-unused",
        ),
        Variant(
            "heads repeated",
            (
                (_A_O, "    n = q.shape[1] // keys.shape[1]\n    keys, values = keys.repeat(1, n, 1, 1), values.repeat(1, n, 1, 1)\n" + _A_O),
            ),
            diagnosis="wrong-heads",
        ),
        Variant(
            "all slots, masked",
            (
                (_A_VIEWS, "(x.transpose(1, 2) for x in (q, k_cache, v_cache))"),
                (_A_SEEN, _A_SEEN.replace("arange(end)", "arange(k_cache.shape[1])")),
            ),
            diagnosis="unwritten-slots",
        ),
        Variant(
            "appended after attention",
            (
                (_A_APPEND, "    old, (k_cache, v_cache) = (k_cache, v_cache), (torch.cat((c[:, :length], x), 1) for c, x in ((k_cache, k), (v_cache, v)))\n"),
                ("    return o.transpose(1, 2), k_cache, v_cache\n", "    return o.transpose(1, 2), *old\n"),
            ),
            diagnosis="wrong-place",
        ),
    ),
    right=(
        Variant(
            "aligned at the end",
            ((_A_SEEN, "    seen = torch.ones(q.shape[2], end, dtype=torch.bool).tril(end - q.shape[2])\n"),),
        ),
        Variant(
            "by hand",
            source="""import math
import torch


def attend(q, k, v, k_cache, v_cache, length):
    B, T, H, D = q.shape
    for t in range(T):
        k_cache[:, length + t], v_cache[:, length + t] = k[:, t], v[:, t]
    o = torch.empty_like(q)
    share = H // k.shape[2]
    for t in range(T):
        n = length + t + 1
        for h in range(H):
            s = torch.einsum("bd,bnd->bn", q[:, t, h], k_cache[:, :n, h // share]) / math.sqrt(D)
            o[:, t, h] = torch.einsum("bn,bnd->bd", s.softmax(-1), v_cache[:, :n, h // share])
    return o, k_cache, v_cache
""",
        ),
        Variant(
            "minus infinity added",
            (
                (_A_SEEN, "    n = torch.arange(end)\n    seen = torch.where(n[None, :] > n[length:, None], -torch.inf, 0.0)\n"),
            ),
        ),
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ kv_cache.speed
def _rate(
    weights: int, weight_bits: int, layers: int, kv_heads: int, head_size: int, cache_bits: int, batch: int, prompt: int,
    new: int, hbm_gbps: float, *, twice: int = 2, scales: str = "bytes", read: str = "each", tokens: str = "grow",
    gained: str = "batch", cached: str = "layers",
) -> float:  # fmt: skip
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
        cases.append(Case(name, args, frozenset(tags.split())))
    return cases


_S_SCALE = "    scale_bytes = 4 if cache_bits == 8 else 0\n"
_S_TOKEN = "    token_bytes = 2 * layers * kv_heads * (head_size * cache_bits / 8 + scale_bytes)\n"
_S_CACHED = "    cached = new * prompt + new * (new + 1) // 2  # of one sequence, summed over the steps\n"
_S_STEP = "    step_bytes = weights * weight_bits / 8 + batch * token_bytes * cached / new\n"
_S_RETURN = "    return batch * hbm_gbps * 1e9 / step_bytes\n"

SPEED = FunctionExercise(
    id="kv_cache.speed",
    title="Tokens a second from bytes a token",
    notebook=NOTEBOOK,
    function="tokens_per_second",
    label=Label(2, 20, "what a step reads once for the batch, and what once for each sequence; a cache that grows"),
    hints=(
        "Two kinds of bytes come from memory in a step. Which of them does a second sequence add to, and which does it share?",
        "A token in the cache has keys and values in each layer, for each head of the cache. In step number i, counted from "
        "one, a sequence has its prompt and i more tokens; over all steps these form an arithmetic series.",
        "Bytes of a cached token: two, times layers, times heads, times the bytes of a head with its scale. Cached tokens over "
        "all steps: steps times prompt plus half of steps times steps plus one. Bytes of all steps: steps times the weights, "
        "plus batch times the bytes of a token times these. Divide the tokens gained by the time of the bytes.",
    ),
    cases=_speed_cases,
    expected=_rate,
    tolerance=1e-6,
    unit="tokens/s",
    misconceptions=(
        Misconception(
            "weights-for-each-sequence",
            "the weights were read again for every sequence of the batch. Who else uses them while they are there?",
            gives=_counts(read="each sequence"),
        ),
        Misconception(
            "cache-shared",
            "the cache of one sequence was read for the whole batch. Whose keys does a sequence need?",
            gives=_counts(cached="shared"),
        ),
        Misconception(
            "one-sequence",
            "those are the tokens that one sequence gains. How many does the batch gain in a step?",
            gives=_counts(gained="one"),
        ),
        *(
            Misconception(
                "keys-only", "keys without values: attention reads both", gives=_counts(twice=1, scales=scales)
            )
            for scales in ("bytes", "of both")
        ),
        Misconception(
            "one-layer", "that is the cache of one layer. How many layers have one?", gives=_counts(cached="one layer")
        ),
        Misconception(
            "cache-stands-still",
            "the cache stayed as long as the prompt. What does each step add to it?",
            gives=_counts(tokens="prompt"),
        ),
        Misconception(
            "full-from-the-start",
            "every step read the cache of the last one. How long is it in the first step?",
            gives=_counts(tokens="end"),
        ),
        Misconception(
            "not-itself",
            "each step left out the token that it appends itself. What does the docstring say of it?",
            gives=_counts(tokens="before"),
        ),
        Misconception(
            "half-a-token",
            "half a token is missing in every step: what is the mean of the numbers 1 to n?",
            gives=_counts(tokens="half"),
        ),
        Misconception(
            "binary-units",
            "the bandwidth is counted in units of 2^30 bytes. What does the docstring say of hbm_gbps?",
            gives=lambda *args: _rate(*args[:-1], args[-1] * 2**30 / 1e9),
        ),
        Misconception(
            "no-scales",
            "8 bits are not all: what besides does each head of each token have?",
            gives=_counts(scales="none"),
        ),
        Misconception(
            "no-scales",
            "one scale for each head of each token: its keys have one, and its values?",
            gives=_counts(scales="one for both"),
        ),
    ),
    wrong=(
        Variant(
            "weights for each",
            ((_S_STEP, _S_STEP.replace("weights * weight", "batch * weights * weight")),),
            diagnosis="weights-for-each-sequence",
        ),
        Variant("cache shared", ((_S_STEP, _S_STEP.replace("batch * ", "")),), diagnosis="cache-shared"),
        Variant("of one sequence", ((_S_RETURN, _S_RETURN.replace("batch * ", "")),), diagnosis="one-sequence"),
        Variant("keys", ((_S_TOKEN, _S_TOKEN.replace("2 * ", "")),), diagnosis="keys-only"),
        Variant("one layer", ((_S_TOKEN, _S_TOKEN.replace("layers * ", "")),), diagnosis="one-layer"),
        Variant("prompt alone", ((_S_CACHED, "    cached = new * prompt\n"),), diagnosis="cache-stands-still"),
        Variant("at the end", ((_S_CACHED, "    cached = new * (prompt + new)\n"),), diagnosis="full-from-the-start"),
        Variant("range(new)", ((_S_CACHED, _S_CACHED.replace("new + 1", "new - 1")),), diagnosis="not-itself"),
        Variant(
            "the middle of prompt and end",
            ((_S_CACHED, "    cached = new * (prompt + new / 2)\n"),),
            diagnosis="half-a-token",
        ),
        Variant("2^30", ((_S_RETURN, _S_RETURN.replace("1e9", "2**30")),), diagnosis="binary-units"),
        Variant(
            "keys, with both scales",
            ((_S_TOKEN, "    token_bytes = layers * kv_heads * (head_size * cache_bits / 8 + 2 * scale_bytes)\n"),),
            diagnosis="keys-only",
        ),
        Variant("one scale", ((_S_SCALE, _S_SCALE.replace("4 if", "2 if")),), diagnosis="no-scales"),
        Variant("8 bits", ((_S_SCALE, "    scale_bytes = 0\n"),), diagnosis="no-scales"),
        Variant("bits as bytes", ((_S_STEP, _S_STEP.replace(" / 8", "")),), diagnosis="values"),
    ),
    right=(
        Variant(
            "step by step",
            source="""def tokens_per_second(
    weights, weight_bits, layers, kv_heads, head_size, cache_bits, batch, prompt, new, hbm_gbps
):
    seconds = 0.0
    head = head_size * cache_bits / 8
    if cache_bits == 8:
        head += 4
    for step in range(new):
        tokens = prompt + step + 1
        moved = weights * weight_bits / 8
        moved += batch * tokens * layers * kv_heads * (head + head)
        seconds += moved / (hbm_gbps * 1e9)
    return batch * new / seconds
""",
        ),
        Variant(
            "the mean length",
            source="""def tokens_per_second(
    weights, weight_bits, layers, kv_heads, head_size, cache_bits, batch, prompt, new, hbm_gbps
):
    mean = prompt + (1 + new) / 2
    bits = head_size * cache_bits + 32 * (cache_bits == 8)
    each = weights * weight_bits / batch + mean * layers * kv_heads * 2 * bits
    return 8e9 * hbm_gbps / each
""",
        ),
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
    for b, h, token in (
        (0, 0, 40),
        (0, 1, 3),
        (1, 0, 20),
        (1, 1, 45),
    ):  # one token far above the rest: no rounding shows
        k[b, token, h] *= 3
        q[b, h] = 8 * k[b, token, h]
    cases.append(_case((q, k, v, lengths), "blocks large", "scores beyond the range of exp"))
    cases.append(_case(make.args(4, 64, 96, [96, 37], "float16"), "blocks", "NaN behind them"))
    cases.append(_case(_scored(make.args(1, 16, 48, [45], "float32"), -128), "low", "scores of -128"))
    cases.append(_case(make.args(1, 16, 720, [700], "float32"), "blocks many-blocks", "NaN behind them"))
    return cases


def _flat(x: Tensor) -> Tensor:
    """What a kernel reads that takes x for contiguous."""
    return x.as_strided(x.shape, x.contiguous().stride())


def _twice_scaled(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *rest: Any) -> Tensor:
    return _reference(q / math.sqrt(q.shape[-1]), k, v, lengths, *rest)


_SCALE_TWICE = "the scores are too small by sqrt(D). The stub has multiplied q by the scale: who did so again?"
_D_K = "    k_ptrs = k_ptr + b * stride_kb + h * stride_kh + offs_d[None, :] * stride_kd\n"
_D_V = "    v_ptrs = v_ptr + b * stride_vb + h * stride_vh + offs_d[None, :] * stride_vd\n"
_D_FOR = "    for start in range(0, length, BLOCK_T):\n        offs_t = start + tl.arange(0, BLOCK_T).to(tl.int64)\n"
_D_MASK = "        mask = (offs_t < length)[:, None] & mask_d[None, :]\n"
_D_LOAD_K = "        k = tl.load(k_ptrs + offs_t[:, None] * stride_kt, mask=mask, other=0.0).to(tl.float32)\n"
_D_LOAD_V = "        v = tl.load(v_ptrs + offs_t[:, None] * stride_vt, mask=mask, other=0.0).to(tl.float32)\n"
_D_S = '        s = tl.where(offs_t < length, tl.sum(q[None, :] * k, axis=1), -float("inf"))\n'
_D_P = "        p, shrink = tl.exp(s - m_new), tl.exp(m - m_new)\n"
_D_INIT = "    m, l, acc = -3.0e38, 0.0, tl.zeros((BLOCK_D,), tl.float32)  # finite, so that -inf - m is never NaN\n"
_D_MAX = _D_S + "        m_new = tl.maximum(m, tl.max(s, axis=0))\n" + _D_P
_D_SUM = "        l = l * shrink + tl.sum(p, axis=0)\n        acc = acc * shrink + tl.sum(p[:, None] * v, axis=0)\n        m = m_new\n    tl.store(o_ptr + row * D + offs_d, acc / tl.where(l == 0, 1.0, l), mask=mask_d)\n"
_D_CALL = "    decode_kernel[(B * H,)](\n"
_D_LOOP = _D_FOR + _D_MASK + _D_LOAD_K + _D_LOAD_V + _D_MAX + _D_SUM


DECODE = KernelExercise(
    id="kv_cache.decode",
    title="One token's attention over the cache",
    notebook=NOTEBOOK,
    function="decode",
    label=Label(3, 35, "a running softmax over what is cached; lengths that only the GPU knows; strides of a cache"),
    hints=(
        "The program has one query and a sequence whose length it has just loaded. Which sums must it carry from one block of "
        "tokens to the next, and how many blocks are there?",
        "A running softmax: the largest score so far, the sum of the weights, the weighted sum of the values. When a block "
        "brings a larger maximum, both sums shrink by the same factor. Slots behind the length have a score of minus infinity, "
        "and what lies there must not be read at all.",
        "For each block of tokens up to the length: load keys and values where token and dimension are inside, zeros elsewhere. "
        "Scores are sums over the dimension, minus infinity behind the length. New maximum; weights are the exponentials of "
        "scores minus it; old sums times the exponential of the old maximum minus the new one, plus the block's. After the "
        "loop the values' sum over the weights' sum, and zeros where that is zero.",
    ),
    cases=_decode_cases,
    returns=("o",),
    reference=_reference,
    # The case with the largest q, [2, 4, 64]: 133 tokens' keys and values, a quarter of q's size each; 8 lengths of 4 bytes.
    traffic=Traffic(reads=1 + 2 * 133 / 2 + 8 * 4 / 1024, writes=1),
    misconceptions=(
        Misconception(
            "stale-slots",
            "all slots of the cache took part, whatever the lengths are. Which number says how many tokens a sequence has?",
            gives=_all_slots,
        ),
        Misconception(
            "padding-counts",
            "slots of a block behind the length have the score 0 in yours, and so a weight. Which score has the weight 0?",
            gives=_blockwise(padding=BLOCK),
        ),
        Misconception(
            "one-slot-too-many",
            "one slot behind the last token has the score 0 in yours, and so a weight. A sequence of `length` tokens has the "
            "slots 0 to length - 1: which is the first that does not count?",
            gives=_blockwise(padding=1),
        ),
        Misconception("scale-twice", _SCALE_TWICE, gives=_twice_scaled),
        Misconception(
            "first-sequence",
            "every sequence reads the cache of the first. How far apart are two of them?",
            gives=lambda q, k, v, lengths: _reference(q, k[:1].expand_as(k), v[:1].expand_as(v), lengths),
        ),
        Misconception(
            "first-sequence",
            "every sequence reads the keys of the first. How far apart are two of them?",
            gives=lambda q, k, v, lengths: _reference(q, k[:1].expand_as(k), v, lengths),
        ),
        Misconception(
            "first-sequence",
            "every sequence reads the values of the first. How far apart are two of them?",
            gives=lambda q, k, v, lengths: _reference(q, k, v[:1].expand_as(v), lengths),
        ),
        Misconception(
            "first-block-only",
            "those are the first 32 tokens. How do the others get into the sums?",
            gives=_blockwise(only=slice(1)),
        ),
        Misconception(
            "last-block-wins",
            "those are the tokens of the last block alone: what should its sums do to those before?",
            gives=_blockwise(only=slice(-1, None)),
        ),
        Misconception(
            "sums-not-rescaled",
            "when a block brings a larger maximum, sums made with the old one are in another scale, and yours stay as they "
            "are. What happened to the exponents?",
            gives=_blockwise(rescale_sum=False, rescale_acc=False),
        ),
        Misconception(
            "sums-not-rescaled",
            "the values' sum is brought to the new maximum, and the weights' sum is not. What happened to its exponents?",
            gives=_blockwise(rescale_sum=False),
        ),
        Misconception(
            "sums-not-rescaled",
            "the weights' sum is brought to the new maximum, and the values' sum is not. What happened to its exponents?",
            gives=_blockwise(rescale_acc=False),
        ),
        Misconception(
            "k-strides-for-v",
            "the values are read with the strides of the keys. Each cache has its own",
            gives=lambda q, k, v, lengths: _reference(q, k, v.as_strided(v.shape, k.stride()), lengths),
        ),
        Misconception(
            "contiguous",
            "the values are read as if they were stored like [B, T, H, D] without gaps. Which four numbers say where one lies?",
            gives=lambda q, k, v, lengths: _reference(q, k, _flat(v), lengths),
        ),
        Misconception(
            "contiguous",
            "the caches are read as if they were stored like [B, T, H, D] without gaps. Which four numbers say where an "
            "element lies?",
            gives=lambda q, k, v, lengths: _reference(q, _flat(k), _flat(v), lengths),
        ),
        Misconception(
            "maximum-not-carried",
            "where a later block's scores are all far lower, the factor of the older sums overflows: the largest score so far "
            "is not the largest of the new block. Is every exponent 0 or less?",
            # Of the first and the last head the largest score is in the last block.
            when=lambda evidence: (
                _nan_only("large")(evidence) and bool(evidence.outputs.flatten(0, 1)[[0, -1]].isfinite().all())
            ),
        ),
        Misconception(
            "no-maximum", _NO_MAXIMUM, when=lambda evidence: evidence.kind == "nan" and _only("large", "low")(evidence)
        ),
        Misconception("not-low-enough", _NOT_LOW_ENOUGH, when=_only("low")),
        Misconception("one-block", _ONE_BLOCK, when=_only("many-blocks")),
        Misconception(
            "empty-sequence",
            "a sequence without tokens has no weights, and 0 / 0 is NaN. What does the docstring ask for?",
            when=_nan_only("empty"),
        ),
        Misconception(
            "zero-times-nan",
            "slots behind the length were loaded: their weight is 0, but 0 times NaN is NaN. Nobody has written them: what "
            "should a load give there?",
            when=lambda evidence: evidence.kind == "nan" and not any("stale" in case.tags for case in evidence.failed),
        ),
        Misconception("out-of-bounds", "the last block of a sequence may reach beyond the cache, and each cache has strides of its own: what may be loaded?"),
        Misconception(
            "traffic",
            "each key and value within the length is loaded once: what is carried from block to block makes a second look "
            "unnecessary, and strides describe any layout",
        ),
    ),
    wrong=(
        Variant(
            "to the end of the cache",
            ((_D_LOOP, _D_LOOP.replace("offs_t < length", "offs_t < T_max").replace("0, length,", "0, T_max,")),
             ("    H, scale,\n    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D", "    H, scale, T_max,\n    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D"),
             ("*v_cache.stride(), H, D**-0.5,\n", "*v_cache.stride(), H, D**-0.5, k_cache.shape[1],\n")),
            diagnosis="stale-slots",
        ),
        Variant("padding at 0", ((_D_S, "        s = tl.sum(q[None, :] * k, axis=1)\n"),), diagnosis="padding-counts"),
        Variant("one block", ((_D_FOR, _D_FOR.replace("0, length,", "0, tl.minimum(length, BLOCK_T),")),), diagnosis="first-block-only"),
        Variant(
            "the last block",
            ((_D_SUM, _D_SUM.replace("l * shrink + ", "").replace("acc * shrink + ", "").replace("acc / tl.where", "acc / tl.where")),
             (_D_MAX, _D_MAX.replace("tl.maximum(m, tl.max(s, axis=0))", "tl.max(s, axis=0)"))),
            diagnosis="last-block-wins",
        ),
        Variant("up to the length", ((_D_S, _D_S.replace("offs_t < length", "offs_t <= length")),), diagnosis="one-slot-too-many"),
        Variant("scaled once more", ((_D_S, _D_S.replace("axis=1)", "axis=1) * scale")),), diagnosis="scale-twice"),
        Variant("one cache for all", ((_D_K, _D_K.replace("b * stride_kb + ", "")), (_D_V, _D_V.replace("b * stride_vb + ", ""))), diagnosis="first-sequence"),
        Variant("maximum of the block alone", ((_D_MAX, _D_MAX.replace("tl.maximum(m, tl.max(s, axis=0))", "tl.max(s, axis=0)")),), diagnosis="maximum-not-carried"),
        Variant("nothing shrinks", ((_D_SUM, _D_SUM.replace(" * shrink", "")),), diagnosis="sums-not-rescaled"),
        Variant("l does not shrink", ((_D_SUM, _D_SUM.replace("l * shrink", "l")),), diagnosis="sums-not-rescaled"),
        Variant("acc does not shrink", ((_D_SUM, _D_SUM.replace("acc * shrink", "acc")),), diagnosis="sums-not-rescaled"),
        Variant(
            "strides taken for granted",
            ((_D_V, "    v_ptrs = v_ptr + b * stride_vb + h * D + offs_d[None, :]\n"),
             (_D_LOAD_V, _D_LOAD_V.replace("stride_vt", "H * D"))),
            diagnosis="contiguous",
        ),
        Variant(
            "strides of k",
            ((_D_V, _D_V.replace("stride_v", "stride_k")), (_D_LOAD_V, _D_LOAD_V.replace("stride_v", "stride_k"))),
            diagnosis="k-strides-for-v",
        ),
        Variant(
            "no maximum",
            ((_D_MAX, _D_MAX.replace("m_new = tl.maximum(m, tl.max(s, axis=0))", "m_new = 0.0").replace("tl.exp(m - m_new)", "1.0")),
             (_D_INIT, _D_INIT.replace("-3.0e38", "0.0"))),
            diagnosis="no-maximum",
        ),
        Variant("a maximum from 0 on", ((_D_INIT, _D_INIT.replace("-3.0e38", "0.0")),), diagnosis="not-low-enough"),
        Variant("a score of -30 behind the length", ((_D_S, _D_S.replace('-float("inf")', "-30.0")),), diagnosis="not-low-enough"),
        Variant(
            "one block of 128",
            ((_D_FOR, _D_FOR.replace("0, length,", "0, tl.minimum(length, 1),").replace("BLOCK_T)", "128)")),),
            diagnosis="one-block",
        ),
        Variant("zero over zero", ((_D_SUM, _D_SUM.replace("tl.where(l == 0, 1.0, l)", "l")),), diagnosis="empty-sequence"),
        Variant("loads by dimension alone", ((_D_MASK, "        mask = (offs_t < 16 * BLOCK_T)[:, None] & mask_d[None, :]\n"),),
                diagnosis="out-of-bounds"),
        Variant(
            "weights of 0 for what was loaded",
            ((_D_MASK, "        mask = (offs_t < stride_kb // stride_kt)[:, None] & mask_d[None, :]\n"),),
            diagnosis="zero-times-nan",
        ),
        Variant("keys loaded twice", ((_D_LOAD_K, _D_LOAD_K + _D_LOAD_K),), diagnosis="traffic"),
        Variant("copies first", ((_D_CALL, "    k_cache, v_cache = k_cache.contiguous(), v_cache.clone()\n" + _D_CALL),), diagnosis="traffic"),
        Variant("by torch", ((_D_CALL, "    return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k_cache.transpose(1, 2).nan_to_num(), v_cache.transpose(1, 2).nan_to_num())[:, :, 0]\n" + _D_CALL),),
                diagnosis="stale-slots"),
    ),
    right=(
        Variant(
            "a maximum and sums for each lane",
            ((_D_INIT, "    m = tl.full((BLOCK_T,), -1e30, tl.float32)\n    l = tl.zeros((BLOCK_T,), tl.float32)\n"
                       "    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)\n"),
             (_D_MAX, '        s = tl.where(offs_t < length, tl.sum(q[None, :] * k, axis=1), float("-inf"))\n'
                      "        m_new = tl.maximum(m, s)\n        p, shrink = tl.exp(s - m_new), tl.exp(m - m_new)\n"),
             (_D_SUM, "        l = l * shrink + p\n        acc = acc * shrink[:, None] + p[:, None] * v\n        m = m_new\n"
                      "    weight = tl.exp(m - tl.max(m, axis=0))\n    total = tl.sum(l * weight, axis=0)\n"
                      "    o = tl.sum(acc * weight[:, None], axis=0) / (total + (total == 0))\n"
                      "    tl.store(o_ptr + row * D + offs_d, o, mask=mask_d)\n")),
        ),
        Variant(
            "exp2, a while loop, pointers that move",
            ((_D_K + _D_V, "    q *= 1.4426950408889634\n    offs_t = tl.arange(0, BLOCK_T).to(tl.int64)\n"
                           "    k_ptrs = k_ptr + b * stride_kb + h * stride_kh + offs_t[:, None] * stride_kt + offs_d[None, :] * stride_kd\n"
                           "    v_ptrs = v_ptr + b * stride_vb + h * stride_vh + offs_t[:, None] * stride_vt + offs_d[None, :] * stride_vd\n"
                           "    left = length\n"),
             (_D_LOOP, "    while left > 0:\n"
                       "        mask = (tl.arange(0, BLOCK_T) < left)[:, None] & mask_d[None, :]\n"
                       "        k = tl.load(k_ptrs, mask, 0.0).to(tl.float32)\n"
                       "        s = tl.sum(q[None, :] * k, axis=1) + tl.where(tl.arange(0, BLOCK_T) < left, 0.0, -float('inf'))\n"
                       "        m_new = tl.maximum(m, tl.max(s, axis=0))\n"
                       "        p = tl.math.exp2(s - m_new)\n"
                       "        shrink = tl.math.exp2(m - m_new)\n"
                       "        v = tl.load(v_ptrs, mask, 0.0).to(tl.float32)\n"
                       "        l = l * shrink + tl.sum(p, axis=0)\n"
                       "        acc = acc * shrink + tl.sum(p[:, None] * v, axis=0)\n"
                       "        m = m_new\n        left -= BLOCK_T\n"
                       "        k_ptrs += BLOCK_T * stride_kt\n        v_ptrs += BLOCK_T * stride_vt\n"
                       "    if length == 0:\n        l = 1.0\n"
                       "    tl.store(o_ptr + row * D + offs_d, acc / l, mask=mask_d)\n")),
        ),
        Variant("from -inf on", ((_D_INIT, '    m, l, acc = -float("inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32)\n'),)),
        Variant("blocks of 64", ((_D_FOR, _D_FOR.replace("length, BLOCK_T", "length, 64").replace("BLOCK_T)", "64)")),)),
        Variant(
            "divided as it goes",
            ((_D_SUM, "        l_new = l * shrink + tl.sum(p, axis=0)\n"
                      "        acc = acc * (l * shrink / l_new) + tl.sum((p / l_new)[:, None] * v, axis=0)\n"
                      "        m, l = m_new, l_new\n    tl.store(o_ptr + row * D + offs_d, acc, mask=mask_d)\n"),),
        ),
    ),
)  # fmt: skip


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
        tags = " ".join((*(["groups"] if H > H_kv > 1 else []), *(["stale"] if stale else [])))
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


_P_AT = "    at = (row * GROUP + offs_g) * D + offs_d[None, :]  # a group's query heads follow one another\n"
_P_Q = "    q = tl.load(q_ptr + at, mask=offs_g < GROUP, other=0.0)\n"
_P_INIT = (
    "    m, l = tl.full((BLOCK_G,), -3.0e38, tl.float32), tl.zeros((BLOCK_G,), tl.float32)\n"
    "    acc = tl.zeros((BLOCK_G, D), tl.float32)\n"
)
_P_FOR = "    for start in range(0, length, BLOCK_T):\n        offs_t = start + tl.arange(0, BLOCK_T)\n        tokens"
_P_TOKENS = "        tokens = ((b * T_max + offs_t) * H_kv + h)[:, None] * D + offs_d[None, :]\n"
_P_K = "        k = tl.load(k_ptr + tokens, mask=offs_t[:, None] < length, other=0.0)\n"
_P_V = "        v = tl.load(v_ptr + tokens, mask=offs_t[:, None] < length, other=0.0)\n"
_P_S = '        s = tl.dot(q, k.T, input_precision="ieee") * scale\n'
_P_WHERE = '        s = tl.where(offs_t[None, :] < length, s, -float("inf"))\n'
_P_MAX = _P_WHERE + "        m_new = tl.maximum(m, tl.max(s, axis=1))\n"
_P_P = "        p, shrink = tl.exp(s - m_new[:, None]), tl.exp(m - m_new)\n"
_P_L = "        l = l * shrink + tl.sum(p, axis=1)\n"
_P_ACC = '        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")\n'
_P_OUT = "    tl.store(o_ptr + at, acc / l[:, None], mask=offs_g < GROUP)\n"
_P_CALL = "    packed_kernel[(B * H_kv,)](\n"

PACKED = KernelExercise(
    id="kv_cache.packed",
    title="A group of heads, one look at the cache",
    notebook=NOTEBOOK,
    function="decode_packed",
    label=Label(3, 30, "grouped heads as the rows of one product, so that the cache is read once"),
    hints=(
        "GROUP queries need the same keys. If one program holds them all, which shapes have its queries, its scores, and its "
        "sums?",
        "The queries of a group are the rows of a matrix, and a block of keys, turned round, is what they are multiplied with: "
        "one product gives all scores, a second one all weighted sums. Maximum and sums are lists, one number for each query. "
        "Tensor cores want 16 rows at least: those beyond GROUP are nobody's.",
        "Load the group's queries as BLOCK_G rows, zeros beyond GROUP; they lie in a row, after those of all groups before. For "
        "each block of tokens: keys and values, zeros behind the length; scores by one product, minus infinity behind the "
        "length; maximum, weights and sums for each row; the second product in the dtype of the values. Store GROUP rows.",
    ),
    cases=_packed_cases,
    returns=("o",),
    reference=_reference,
    # The largest case, q [1, 32, 64]: keys and values of 96 tokens and 4 heads; 4 lengths of 4 bytes.
    traffic=Traffic(reads=1 + 2 * 96 * 4 / 32 + 4 * 4 / 4096, writes=1),
    misconceptions=(
        Misconception(
            "low-precision-sums",
            "wrong only after many blocks: sums that are rounded to 16 bits again and again lose what is added to them. Of which "
            "dtype is acc?",
            when=_only("alike"),
        ),
        Misconception(
            "wrong-heads",
            "query head h was given head h % H_kv of the cache. Which query heads does the docstring put into one group?",
            gives=_regrouped,
        ),
        Misconception(
            "one-query",
            "all heads of a group have the result of its first. Which query is row g's?",
            gives=_first_of_group,
        ),
        Misconception(
            "stale-slots",
            "all slots of the cache took part, whatever the lengths are. Which number says how many tokens a sequence has?",
            gives=_all_slots,
        ),
        Misconception(
            "padding-counts",
            "slots of a block behind the length have the score 0 in yours, and so a weight. Which score has the weight 0?",
            gives=_blockwise(padding=BLOCK),
        ),
        Misconception(
            "sums-not-rescaled",
            "a block that brings a larger maximum changes the scale, and sums made before must follow. Which one stayed?",
            gives=_blockwise(rescale_sum=False, rescale_acc=False),
        ),
        Misconception(
            "sums-not-rescaled",
            "the values' sum is brought to the new maximum, and the weights' sum is not. What happened to its exponents?",
            gives=_blockwise(rescale_sum=False),
        ),
        Misconception(
            "last-block-wins",
            "those are the tokens of the last block alone: what should its sums do to those before?",
            gives=_blockwise(only=slice(-1, None)),
        ),
        Misconception(
            "one-slot-too-many",
            "one slot behind the last token has the score 0 in yours, and so a weight. A sequence of `length` tokens has the "
            "slots 0 to length - 1: which is the first that does not count?",
            gives=_blockwise(padding=1),
        ),
        Misconception(
            "sums-not-rescaled",
            "the weights' sum is brought to the new maximum, and the values' sum is not. What happened to its exponents?",
            gives=_blockwise(rescale_acc=False),
        ),
        Misconception(
            "no-scale", "the scores were not multiplied by the scale, 1 / sqrt(D)",
            gives=lambda q, k, v, lengths: _reference(q * math.sqrt(q.shape[-1]), k, v, lengths),
        ),
        Misconception(
            "one-maximum",
            "the heads of a group share one maximum: where one head's scores are far above the others', the others' weights "
            "vanish. Whose maximum belongs to a row?",
            when=_only("spread"),
        ),
        Misconception("not-low-enough", _NOT_LOW_ENOUGH, when=_only("low")),
        Misconception("one-block", _ONE_BLOCK, when=_only("many-blocks")),
        Misconception(
            "tf32",
            "float32 operands were cut to 10 bits of mantissa. Which argument of tl.dot says that float32 means float32?",
            when=lambda evidence: _only("float32")(evidence) and _nearly(evidence),
        ),
        Misconception(
            "race", "two groups store the same rows of o: how many query heads has a sequence, and where does a group begin?"
        ),
        Misconception("out-of-bounds", "rows beyond GROUP belong to nobody, and the last block may reach beyond the cache"),
        Misconception("traffic", "a key that has been loaded serves all query heads of its group: how many programs load it?"),
    ),
    wrong=(
        Variant("dealt in turn", ((_P_AT, "    at = ((b * GROUP + offs_g) * H_kv + h) * D + offs_d[None, :]\n"),), diagnosis="wrong-heads"),
        Variant("the first query", ((_P_Q, "    q = tl.load(q_ptr + row * GROUP * D + offs_g * 0 + offs_d[None, :])\n"),), diagnosis="one-query"),
        Variant(
            "to the end of the cache",
            ((_P_FOR, _P_FOR.replace("range(0, length,", "range(0, T_max,")),
             (_P_K + _P_V, (_P_K + _P_V).replace("< length", "< T_max")),
             (_P_WHERE, _P_WHERE.replace("< length", "< T_max"))),
            diagnosis="stale-slots",
        ),
        Variant("padding at 0", ((_P_WHERE, ""),), diagnosis="padding-counts"),
        Variant("nothing shrinks", ((_P_L, _P_L.replace(" * shrink", "")), (_P_ACC, _P_ACC.replace(" * shrink[:, None]", ""))),
                diagnosis="sums-not-rescaled"),
        Variant("acc does not shrink", ((_P_ACC, _P_ACC.replace(" * shrink[:, None]", "")),), diagnosis="sums-not-rescaled"),
        Variant("no scale", ((_P_S, _P_S.replace(" * scale", "")),), diagnosis="no-scale"),
        Variant("l does not shrink", ((_P_L, _P_L.replace(" * shrink", "")),), diagnosis="sums-not-rescaled"),
        Variant("the last block", ((_P_L, _P_L.replace("l * shrink + ", "")), (_P_ACC, _P_ACC.replace("acc * shrink[:, None], ", "")),
                                   (_P_MAX, _P_WHERE + "        m_new = tl.max(s, axis=1)\n")), diagnosis="last-block-wins"),
        Variant("up to the length", ((_P_WHERE, _P_WHERE.replace("< length", "<= length")),), diagnosis="one-slot-too-many"),
        Variant("a maximum from 0 on", ((_P_INIT, _P_INIT.replace("tl.full((BLOCK_G,), -3.0e38, tl.float32)", "tl.zeros((BLOCK_G,), tl.float32)")),),
                diagnosis="not-low-enough"),
        Variant("one block of 128", ((_P_FOR, _P_FOR.replace("0, length,", "0, 1,").replace("BLOCK_T)", "128)")),), diagnosis="one-block"),
        Variant("sums in 16 bits", ((_P_ACC, _P_ACC + "        acc = acc.to(v.dtype).to(tl.float32)\n"),), diagnosis="low-precision-sums"),
        Variant("tf32 products", ((_P_S, _P_S.replace(', input_precision="ieee"', "")),), diagnosis="tf32"),
        Variant("sequences GROUP apart", ((_P_AT, "    at = (b * GROUP + h * GROUP + offs_g) * D + offs_d[None, :]\n"),), diagnosis="race"),
        Variant("one maximum", ((_P_MAX, _P_WHERE + "        m_new = tl.maximum(m, tl.max(s))\n"),), diagnosis="one-maximum"),
        Variant("all rows stored", ((_P_OUT, _P_OUT.replace(", mask=offs_g < GROUP", "")),), diagnosis="out-of-bounds"),
        Variant(
            "a program for each query head",
            ((_P_CALL, "    k_cache, v_cache = (x.repeat_interleave(GROUP, 2) for x in (k_cache, v_cache))\n    H_kv, GROUP = H, 1\n" + _P_CALL),),
            diagnosis="traffic",
        ),
        Variant(
            "a program for each query head, strided",
            ((_P_CALL, "    packed_kernel[(B * H,)](\n"),
             ("    row = tl.program_id(0).to(tl.int64)\n    b, h = row // H_kv, row % H_kv\n    offs_d = tl.arange(0, D)\n",
              "    mine = tl.program_id(0).to(tl.int64)\n    row = mine // GROUP\n    b, h = row // H_kv, row % H_kv\n    offs_d = tl.arange(0, D)\n"),
             (_P_AT, "    at = (mine + offs_g * 0) * D + offs_d[None, :]\n"),
             (_P_Q, "    q = tl.load(q_ptr + at, mask=offs_g == 0, other=0.0)\n"),
             (_P_OUT, _P_OUT.replace("offs_g < GROUP", "offs_g == 0"))),
            diagnosis="traffic",
        ),
        Variant("keys again for the values", ((_P_V, _P_K + _P_V),), diagnosis="traffic"),
    ),
    right=(
        Variant(
            "sums in place of products",
            ((_P_S, "        s = tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32)[None, :, :], axis=2) * scale\n"),
             (_P_ACC, "        acc = acc * shrink[:, None]\n        acc += tl.sum(p[:, :, None] * v.to(tl.float32)[None, :, :], axis=1)\n")),
        ),
        Variant(
            "from -inf on, blocks of 64",
            ((_P_INIT, _P_INIT.replace("-3.0e38", '-float("inf")')),
             (_P_FOR, _P_FOR.replace("length, BLOCK_T", "length, 64").replace("BLOCK_T)", "64)"))),
        ),
        Variant(
            "keys as rows",
            ((_P_S, '        s = tl.trans(tl.dot(k, tl.trans(q), input_precision="ieee")) * scale\n'),
             (_P_ACC, '        acc *= shrink[:, None]\n        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")\n')),
        ),
        Variant(
            "scaled queries, exp2",
            ((_P_Q, "    queries = tl.load(q_ptr + at, mask=offs_g < GROUP, other=0.0).to(tl.float32) * (scale * 1.4426950408889634)\n"),
             (_P_S, '        s = tl.dot(queries, tl.trans(k.to(tl.float32)), input_precision="ieee")\n'),
             (_P_P, "        p, shrink = tl.exp2(s - m_new[:, None]), tl.exp2(m - m_new)\n"),
             (_P_ACC, '        acc = acc * shrink[:, None] + tl.dot(p, v.to(tl.float32), input_precision="ieee")\n')),
        ),
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ kv_cache.split
def _split_cases(rng: Random) -> list[Case]:
    make, cases = _Caches(rng), []

    def add(args: tuple, SPLITS: int, tags: str = "", note: str = "") -> None:
        uneven = any(_up(n, BLOCK) % SPLITS for n in args[3].tolist())
        empty = any(_up(n, BLOCK) < SPLITS for n in args[3].tolist())
        tags += " uneven" * uneven + " empty" * empty
        case = _case(args, tags, f"{SPLITS} splits" + (f", {note}" if note else ""))
        cases.append(Case(case.name, (*args, SPLITS), case.tags))

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
    blocks = _up(n, BLOCK)
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
    blocks = _up(int(lengths.max()), BLOCK)
    # q, the length and three stores; keys and values of each block of the share.
    enough = 5 + 2 * _up(blocks, SPLITS)
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
        if stored >= parts or any(_up(n, BLOCK) < SPLITS for n in lengths.tolist()):
            return None
        return (
            "not-shared",
            f"{stored:,} bytes are stored, where the sums of {SPLITS} parts of each head are {parts:,}: fewer than SPLITS programs "
            "share its tokens",
        )
    return (
        "atomics",
        "atomics add in whatever order the programs arrive, and another order rounds otherwise: two runs do not agree. Where "
        "can each part leave its sums?",
    )


_X_RANGE = "    first, end = blocks * split // SPLITS * BLOCK_T, tl.minimum(blocks * (split + 1) // SPLITS * BLOCK_T, length)\n"
_X_BLOCKS = "    blocks = tl.cdiv(length, BLOCK_T)\n"
_X_INIT = "    m, l, acc = -3.0e38, 0.0, tl.zeros((D,), tl.float32)  # what a part without tokens leaves\n"
_X_ENDS = (
    "        k = tl.load(k_ptr + at, mask=offs_t[:, None] < end, other=0.0).to(tl.float32)\n        v = ",
    "        v = tl.load(v_ptr + at, mask=offs_t[:, None] < end, other=0.0).to(tl.float32)\n        s = ",
    "        s = tl.where(offs_t < end,",
)
_X_FOR = "    for start in range(first, end, BLOCK_T):\n"
_X_STORE = (
    "    tl.store(acc_ptr + (row * SPLITS + split) * D + offs_d, acc)\n"
    "    tl.store(m_ptr + row * SPLITS + split, m)\n"
    "    tl.store(l_ptr + row * SPLITS + split, l)\n"
)
_X_MAX = "    M = -3.0e38\n    for split in range(SPLITS):\n        M = tl.maximum(M, tl.load(m_ptr + row * SPLITS + split))\n"
_X_LOOP = "    for split in range(SPLITS):  # always in this order, so that two runs agree to the bit\n"
_X_WEIGHT = "        weight = tl.exp(tl.load(m_ptr + row * SPLITS + split) - M)\n"
_X_TOTAL = "        total += weight * tl.load(l_ptr + row * SPLITS + split)\n"
_X_O = "        o += weight * tl.load(acc_ptr + (row * SPLITS + split) * D + offs_d)\n"
_X_OUT = "    tl.store(o_ptr + row * D + offs_d, o / total)\n"
_X_HOST = (
    "    acc = torch.empty(B * H, SPLITS, D, dtype=torch.float32, device=q.device)\n"
    "    m, l = (torch.empty(B * H, SPLITS, dtype=torch.float32, device=q.device) for _ in range(2))\n"
)
_X_PARTS = "    part_kernel[(B * H, SPLITS)](\n"
_X_CALL = "    combine_kernel[(B * H,)](acc, m, l, o, SPLITS=SPLITS, D=D)\n"

SPLIT = KernelExercise(
    id="kv_cache.split",
    title="Many programs for one head",
    notebook=NOTEBOOK,
    function="decode_split",
    label=Label(4, 40, "splits of each sequence's own length, empty ones too; joining softmaxes whose maxima differ"),
    hints=(
        "A part knows its own largest score, not that of the others. Which three things must it leave behind, so that somebody "
        "who has them all can find the whole softmax?",
        "Weights made with a part's maximum m are exp(M - m) times as large as with the common one, M; both sums of the part are "
        "off by that factor. A part is some whole blocks of its own sequence. One that has none leaves sums of 0, and a "
        "maximum that neither wins nor gives NaN.",
        "Blocks of the sequence, times the split's number, divided by SPLITS, is the block where the split begins; with the next "
        "number, where it ends. Between these, the loop of one program as before. Store its weighted sum, its maximum and its "
        "sum of weights in float32. Then, for each row: the largest maximum; each part's two sums times the exponential of "
        "its maximum minus that; added in order, the one divided by the other.",
    ),
    cases=_split_cases,
    returns=("o",),
    reference=_reference,
    # The largest case, q [2, 4, 64] in 1 KiB, 4 splits: q 4 times; keys and values of 228 tokens, a quarter of q each; 32 lengths;
    # 32 parts of D + 2 float32 stored, and loaded with m once more.
    traffic=Traffic(reads=4 + 2 * 228 / 2 + 32 * (4 + 4 * 67) / 1024, writes=1 + 32 * 4 * 66 / 1024, launches=2),
    launch_rule=_split_rule,
    misconceptions=(
        Misconception(
            "parts-not-rescaled",
            "the parts' sums are added as they are. That is right as long as all parts have one maximum. In which scale is each "
            "part's sum?",
            gives=_joined("plain", "plain"),
        ),
        Misconception(
            "parts-not-rescaled",
            "the parts' values are brought to the common maximum, and their sums of weights are not",
            gives=_joined("weighted", "plain"),
        ),
        Misconception(
            "parts-not-rescaled",
            "the parts' sums of weights are brought to the common maximum, and their values are not",
            gives=_joined("plain", "weighted"),
        ),
        Misconception(
            "parts-averaged",
            "that is the mean of the parts' results: a part with small weights counts as much as one with large ones. What is "
            "each part worth?",
            gives=_joined("mean"),
        ),
        Misconception(
            "one-part-only",
            "that is the first part alone. Who joins the others?",
            gives=_joined(bounds=lambda n, SPLITS: _bounds(n, SPLITS)[:1]),
        ),
        Misconception(
            "one-part-only",
            "that is the last part alone. Who joins the others?",
            gives=_joined(bounds=lambda n, SPLITS: _bounds(n, SPLITS)[-1:]),
        ),
        Misconception("not-low-enough", _NOT_LOW_ENOUGH, when=_only("low")),
        Misconception(
            "no-maximum",
            _NO_MAXIMUM,
            when=lambda evidence: evidence.kind == "nan" and _only("large", "low")(evidence),
        ),
        Misconception(
            "empty-part",
            "where a sequence has fewer blocks than there are splits, some parts have no token: what they leave, or do not "
            "leave, is NaN in the end. Which three numbers stand for nothing?",
            when=_nan_only("empty"),
        ),
        Misconception(
            "tail-dropped",
            "the last blocks of a sequence, those that are left when they are dealt out evenly, are in no part",
            gives=_joined(
                bounds=lambda n, SPLITS: [
                    (i * (_up(n, BLOCK) // SPLITS) * BLOCK, min((i + 1) * (_up(n, BLOCK) // SPLITS) * BLOCK, n))
                    for i in range(SPLITS)
                ]
            ),
        ),
        Misconception(
            "parts-overlap",
            "blocks count in several parts: each begins where it should and ends at the end of the sequence. Where does it end?",
            gives=_joined(bounds=lambda n, SPLITS: [(first, n) for first, _ in _bounds(n, SPLITS)]),
        ),
        Misconception(
            "parts-overlap",
            "the last block of a part reaches into the next part, and those tokens count twice. Where does a part end, and where "
            "may a block read?",
            gives=_joined(
                bounds=lambda n, SPLITS: [
                    (first, min(first + _up(_up(n, SPLITS), BLOCK) * BLOCK, n)) for first in range(0, n, _up(n, SPLITS))
                ]
            ),
        ),
        Misconception(
            "divided-too-early",
            "the parts' values are divided by their own sums, and in the end by the sum of all. Which division is one too many?",
            gives=_joined("divided"),
        ),
        Misconception("scale-twice", _SCALE_TWICE, gives=_twice_scaled),
        Misconception(
            "low-precision-parts",
            "the parts were rounded to 16 bits. float16 ends at 65,504, and a sum over many tokens does not. What may they be "
            "stored as?",
            when=_only("large-sums"),
        ),
        Misconception("race", "two parts may not store to one place: where does each leave its sums?"),
        Misconception("traffic", "a part reads its own tokens once, and its three results are stored and loaded once"),
        Misconception("out-of-bounds", "does every part have its place in the buffers, and does the last block end with the sequence?"),
    ),
    wrong=(
        Variant("added up", ((_X_TOTAL, _X_TOTAL.replace("weight * ", "")), (_X_O, _X_O.replace("weight * ", ""))), diagnosis="parts-not-rescaled"),
        Variant("total not rescaled", ((_X_TOTAL, _X_TOTAL.replace("weight * ", "")),), diagnosis="parts-not-rescaled"),
        Variant("values not rescaled", ((_X_O, _X_O.replace("weight * ", "")),), diagnosis="parts-not-rescaled"),
        Variant(
            "averaged",
            ((_X_WEIGHT, "        weight = tl.load(l_ptr + row * SPLITS + split)\n        weight = tl.where(weight == 0, 0.0, 1 / tl.where(weight == 0, 1.0, weight))\n"),
             (_X_TOTAL, "        total += tl.where(weight == 0, 0.0, 1.0)\n")),
            diagnosis="parts-averaged",
        ),
        Variant(
            "parts of tokens",
            ((_X_RANGE, "    each = tl.cdiv(length, SPLITS)\n    first, end = each * split, tl.minimum(each * (split + 1), length)\n"),
             *((old, old.replace("< end", "< length")) for old in _X_ENDS)),
            diagnosis="parts-overlap",
        ),
        Variant("scaled once more", ((_X_ENDS[2] + " tl.sum(q[None, :] * k, axis=1)", _X_ENDS[2] + " tl.sum(q[None, :] * k, axis=1) * scale"),), diagnosis="scale-twice"),
        Variant("parts divided", ((_X_STORE, _X_STORE.replace("offs_d, acc)", "offs_d, acc / tl.where(l > 0, l, 1.0))")),), diagnosis="divided-too-early"),
        Variant("the first part", ((_X_LOOP, "    for split in range(1):\n"),), diagnosis="one-part-only"),
        Variant("the last part", ((_X_LOOP, "    for split in range(SPLITS - 1, SPLITS):\n"),), diagnosis="one-part-only"),
        Variant("a common maximum from 0 on", ((_X_MAX, _X_MAX.replace("-3.0e38", "0.0")),), diagnosis="not-low-enough"),
        Variant("the parts' maxima from 0 on", ((_X_INIT, _X_INIT.replace("-3.0e38", "0.0")),), diagnosis="not-low-enough"),
        Variant("joined without a maximum", ((_X_WEIGHT, _X_WEIGHT.replace(" - M", "")),), diagnosis="no-maximum"),
        Variant("half as many parts", ((_X_PARTS, "    SPLITS = max(1, SPLITS // 2)\n" + _X_PARTS),), diagnosis="not-shared"),
        Variant("rounded down", ((_X_RANGE, "    share = blocks // SPLITS * BLOCK_T\n    first, end = share * split, tl.minimum(share * (split + 1), length)\n"),),
                diagnosis="tail-dropped"),
        Variant("no end", ((_X_RANGE, "    first, end = blocks * split // SPLITS * BLOCK_T, length\n"),), diagnosis="parts-overlap"),
        Variant("empty parts at minus infinity", ((_X_INIT, _X_INIT.replace("-3.0e38", '-float("inf")')), (_X_FOR, "    if first >= end:\n        m = float('nan')\n" + _X_FOR)),
                diagnosis="empty-part"),
        Variant("empty parts leave nothing", ((_X_INIT, "    if first >= end:\n        return\n" + _X_INIT),), diagnosis="empty-part"),
        Variant("parts in 16 bits", ((_X_HOST, _X_HOST.replace("D, dtype=torch.float32", "D, dtype=q.dtype")),), diagnosis="low-precision-parts"),
        Variant("shares of T_max", ((_X_BLOCKS, "    blocks = tl.cdiv(T_max, BLOCK_T)\n"),), diagnosis="not-shared"),
        Variant("the first part does it all", ((_X_RANGE, "    first, end = split * length, length\n"),), diagnosis="not-shared"),
        Variant("one place for all", ((_X_STORE, _X_STORE.replace("row * SPLITS + split", "row * SPLITS")),), diagnosis="race"),
        Variant(
            "joined by torch",
            ((_X_CALL, "    w = (m - m.amax(1, keepdim=True)).exp()\n"
                       "    o.copy_(((acc * w[..., None]).sum(1) / (l * w).sum(1, keepdim=True)).view(B, H, D))\n"),),
            diagnosis="not-your-kernel",
        ),
        Variant("loaded again", ((_X_FOR, _X_FOR + "        tl.load(k_ptr + (b * T_max + start) * H * D + tl.arange(0, 1024) % D * 0 + offs_d[:1] if False else k_ptr + ((b * T_max + start + tl.arange(0, BLOCK_T)) * H + h)[:, None] * D + offs_d[None, :], mask=(start + tl.arange(0, BLOCK_T))[:, None] < end, other=0.0)\n"),),
                diagnosis="traffic"),
    ),
    right=(
        Variant(
            "results and the logarithm of the sum",
            ((_X_STORE, "    tl.store(acc_ptr + (row * SPLITS + split) * D + offs_d, acc / tl.where(l > 0, l, 1.0))\n"
                        "    tl.store(m_ptr + row * SPLITS + split, tl.where(l > 0, m + tl.log(tl.where(l > 0, l, 1.0)), -1e30))\n"),
             (_X_TOTAL, "        total += weight\n")),
        ),
        Variant("nothing is -inf", ((_X_INIT, _X_INIT.replace("-3.0e38", '-float("inf")')),)),
        Variant(
            "joined as it goes, blocks in turn",
            ((_X_RANGE, "    first, end = split * BLOCK_T, length\n"),
             (_X_FOR, "    for start in range(first, end, BLOCK_T * SPLITS):\n"),
             (_X_MAX, "    M = -1e38\n"),
             (_X_WEIGHT + _X_TOTAL + _X_O,
              "        m = tl.load(m_ptr + row * SPLITS + split)\n        M_new = tl.maximum(M, m)\n"
              "        old, new = tl.exp(M - M_new), tl.exp(m - M_new)\n"
              "        total = total * old + new * tl.load(l_ptr + row * SPLITS + split)\n"
              "        o = o * old + new * tl.load(acc_ptr + (row * SPLITS + split) * D + offs_d)\n        M = M_new\n")),
        ),
        Variant(
            "all parts as a block, splits outermost",
            ((_X_STORE, "    rows = tl.num_programs(0)\n    tl.store(acc_ptr + (split * rows + row) * D + offs_d, acc)\n"
                        "    tl.store(m_ptr + split * rows + row, m)\n    tl.store(l_ptr + split * rows + row, l)\n"),
             (_X_HOST, "    acc = q.new_empty((SPLITS, B * H, D), dtype=torch.float32)\n"
                       "    m = torch.empty((SPLITS, B * H), device=q.device)\n    l = torch.empty_like(m)\n"),
             (_X_MAX, "    rows, offs_s = tl.num_programs(0), tl.arange(0, 16)\n    there = offs_s < SPLITS\n"
                      '    m = tl.load(m_ptr + offs_s * rows + row, there, -float("inf"))\n'
                      "    w = tl.exp(m - tl.max(m, axis=0))\n"
                      "    l = tl.load(l_ptr + offs_s * rows + row, there, 0.0)\n"
                      "    sums = tl.load(acc_ptr + (offs_s * rows + row)[:, None] * D + offs_d[None, :], there[:, None], 0.0)\n"),
             ("    total, o = 0.0, tl.zeros((D,), tl.float32)\n" + _X_LOOP + _X_WEIGHT + _X_TOTAL + _X_O,
              "    total, o = tl.sum(w * l, axis=0), tl.sum(w[:, None] * sums, axis=0)\n")),
        ),
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- kv_cache.int8
def _int8_cases(rng: Random) -> list[Case]:
    make, cases = _Caches(rng), []
    torch = make.torch

    def rows(*shape: int, dtype: str, steps: str = "various") -> Tensor:
        """Near whole steps of a power of two, the largest at 127 or -127: every way of rounding to nearest agrees on them."""
        q = torch.randint(-126, 127, shape, generator=make.generator).float()
        at = torch.randint(0, shape[-1], (*shape[:-1], 1), generator=make.generator)
        q.scatter_(-1, at, 254.0 * torch.randint(0, 2, at.shape, generator=make.generator) - 127)
        off = torch.rand(shape, generator=make.generator) * 0.4 - 0.2
        off.scatter_(-1, at, 0.0)
        powers = torch.randint(-9, -5, (*shape[:-1], 1), generator=make.generator) if steps == "various" else -6
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
        k_cache, v_cache = (
            torch.randint(-127, 128, (B, T_max, H, D), generator=make.generator, dtype=torch.int8) for _ in range(2)
        )
        k_scales, v_scales = (
            2.0 ** torch.randint(-9, -5, (B, T_max, H), generator=make.generator).float() for _ in range(2)
        )
        for b, n in enumerate(lengths):
            k_scales[b, n:], v_scales[b, n:] = math.nan, math.nan
        name = f"k [{B}, {H}, {D}] {dtype}, caches of {T_max} slots, {lengths} in use" + ", a head of zeros" * (
            tags == "zero"
        )
        name += ", scores of some hundreds" * (tags == "large")
        lengths = torch.tensor(lengths, dtype=torch.int32)
        args = (q, k, v, k_cache, v_cache, k_scales, v_scales, lengths)
        cases.append(Case(name, args, frozenset({dtype, *tags.split()})))
    return cases


def _int8(
    most: float = 127, rounding: str = "nearest", place: int = 0, itself: bool = True, of_k: str = "own", of_v: str = "own",
    in_sum: bool = False,
) -> Callable[..., tuple[Tensor, ...]]:  # fmt: skip
    """o, the caches and the scales, as somebody quantises, appends and multiplies scales in."""

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


_I_X = "    x = tl.load(x_ptr + offs_d).to(tl.float32)\n"
_I_SCALE = "    scale = tl.max(tl.abs(x), axis=0) / 127\n"
_I_Q = "    q = tl.floor(x / tl.where(scale == 0, 1.0, scale) + 0.5)  # a cast alone would cut off what is behind the point\n"
_I_OUT = "    tl.store(cache_ptr + offs_d, q.to(tl.int8))\n    tl.store(scale_ptr, scale)\n"
_I_SEEN = "    seen = offs_t < length\n"
_I_K = "    k = tl.load(k_ptr + slots[:, None] * D + offs_d[None, :], mask=seen[:, None], other=0).to(tl.float32)\n"
_I_V = "    v = tl.load(v_ptr + slots[:, None] * D + offs_d[None, :], mask=seen[:, None], other=0).to(tl.float32)\n"
_I_KS = "    k_scale = tl.load(k_scales_ptr + slots, mask=seen, other=0.0)\n"
_I_VS = "    v_scale = tl.load(v_scales_ptr + slots, mask=seen, other=0.0)\n"
_I_S = '    s = tl.where(seen, tl.sum(q[None, :] * k, axis=1) * k_scale, -float("inf"))\n'
_I_P = "    p = tl.exp(s - tl.max(s, axis=0))\n"
_I_O = "    o = tl.sum((p * v_scale)[:, None] * v, axis=0) / tl.sum(p, axis=0)\n"
_I_NOTE = "    # A scale belongs to a token: it multiplies one score and one weight, not D elements.\n"
_I_CALL = "    int8_kernel[(B * H,)](\n"

INT8 = KernelExercise(
    id="kv_cache.int8",
    title="A cache of 8 bits",
    notebook=NOTEBOOK,
    function="decode_int8",
    label=Label(3, 30, "quantising a row where it is appended; where its scale comes back in"),
    hints=(
        "A row of D numbers is to become integers that end at 127. Which number of the row decides how large a step is? And "
        "later: how many elements share that step?",
        "The step is the row's largest absolute value over 127; a row of zeros has none, and must not divide by it. A cast to "
        "an integer cuts off. All D products of a score carry the same factor, so the sum does; in the result a value's factor "
        "can go to its weight, but not into what the weights add up to.",
        "Append: load the row in float32, its largest absolute value over 127 is the scale; the row over the scale, or over one "
        "where that is zero, plus a half, rounded down, stored as int8; then the scale. Attend: keys, values and both scales "
        "where the token is inside; scores are the sums times the keys' scale; softmax as always; the weights times the "
        "values' scale for the sum of the values alone.",
    ),
    cases=_int8_cases,
    returns=("o",),
    reference=_int8(),
    in_place=(3, 4, 5, 6),
    # The largest case, q [2, 4, 64] in 1 KiB: q, k and v; 83 tokens of 4 heads with 2 (64 + 4) bytes; lengths twice. o, and the new
    # token's 2 x 8 rows.
    traffic=Traffic(reads=3 + (83 * 4 * 2 * 68 + 64) / 1024, writes=1 + 16 * 68 / 1024, launches=2),
    launch_rule=_int8_rule,
    misconceptions=(
        Misconception("no-maximum", _NO_MAXIMUM, when=_nan_only("large")),
        Misconception(
            "cut-off",
            "the integers are cut off towards 0, not rounded to nearest. What is left of 3.9?",
            gives=_int8_all(rounding="cut"),
        ),
        Misconception(
            "cut-off",
            "the integers are rounded down, not to nearest. What is left of 3.9?",
            gives=_int8_all(rounding="floor"),
        ),
        Misconception(
            "128-steps",
            "the largest number of a row becomes 128, and int8 ends at 127: what is beyond is cut off, or begins again at "
            "-128. Of how many steps may the largest be?",
            gives=_int8_all(most=128),
        ),
        Misconception(
            "sign",
            "rows whose largest number is negative have a scale that is too small. Largest in which sense?",
            when=lambda evidence: all(map(_scaled_by_the_maximum, (o for o in evidence.outcomes if o.wrong))),
        ),
        Misconception(
            "scale-in-the-sum",
            "the values' scales are in the sum of the weights too. Which of the two sums holds values?",
            gives=_int8_o(in_sum=True),
        ),
        Misconception("no-k-scale", "the scores are those of bare integers. What is one worth?", gives=_int8_o(of_k="none")),
        Misconception("no-v-scale", "those are sums of bare integers. What is one worth?", gives=_int8_o(of_v="none")),
        Misconception(
            "one-scale-for-all",
            "every token is multiplied by the scale of the newest. Whose is it?",
            gives=_int8_o(of_k="newest", of_v="newest"),
        ),
        Misconception(
            "one-scale-for-all",
            "every token is multiplied by the scale of the first. Whose is it?",
            gives=_int8_o(of_k="first", of_v="first"),
        ),
        Misconception(
            "not-itself",
            "the newest token does not see itself: length counts it already",
            gives=_int8_o(itself=False),
        ),
        Misconception(
            "unwritten-scales",
            "NaN came from slots that nobody has written: their scales are anything. Which slots may be loaded?",
            when=lambda evidence: evidence.kind == "nan" and evidence.output == "y",
        ),
        Misconception("traffic", "each element and each scale within the length is loaded once, as it is stored"),
    ),
    wrong=(
        Variant("cast alone", ((_I_Q, _I_Q.replace("tl.floor(", "(").replace(" + 0.5", "")),), diagnosis="cut-off"),
        Variant("rounded down", ((_I_Q, _I_Q.replace(" + 0.5", "")),), diagnosis="cut-off"),
        Variant("largest, with its sign", ((_I_SCALE, _I_SCALE.replace("tl.abs(x)", "x")),), diagnosis="sign"),
        Variant("128 steps", ((_I_SCALE, _I_SCALE.replace("127", "128")),), diagnosis="128-steps"),
        Variant("scaled weights", ((_I_P, _I_P + "    p *= v_scale\n"), (_I_O, _I_O.replace("(p * v_scale)", "p"))), diagnosis="scale-in-the-sum"),
        Variant("no maximum", ((_I_P, "    p = tl.exp(s)\n"),), diagnosis="no-maximum"),
        Variant("no scale of k", ((_I_S, _I_S.replace(" * k_scale", "")),), diagnosis="no-k-scale"),
        Variant("no scale of v", ((_I_O, _I_O.replace(" * v_scale", "")),), diagnosis="no-v-scale"),
        Variant(
            "the newest scale",
            ((_I_KS + _I_VS, (_I_KS + _I_VS).replace("+ slots, mask=seen, other=0.0", "+ (row // H * T_max + length - 1) * H + row % H")),),
            diagnosis="one-scale-for-all",
        ),
        Variant(
            "the first scale",
            ((_I_KS + _I_VS, (_I_KS + _I_VS).replace("+ slots, mask=seen, other=0.0", "+ row // H * T_max * H + row % H")),),
            diagnosis="one-scale-for-all",
        ),
        Variant("without itself", ((_I_SEEN, "    seen = offs_t < length - 1\n"),), diagnosis="not-itself"),
        Variant(
            "scales of all slots",
            ((_I_KS + _I_VS, (_I_KS + _I_VS).replace("mask=seen", "mask=offs_t < T_max")),),
            diagnosis="unwritten-scales",
        ),
        Variant("loaded twice", ((_I_V, _I_V + _I_V),), diagnosis="beyond-the-length"),
        Variant("all slots loaded", ((_I_K + _I_V, (_I_K + _I_V).replace("mask=seen[:, None]", "mask=offs_t[:, None] < T_max")),), diagnosis="beyond-the-length"),
        Variant("dequantised by torch", ((_I_CALL, "    k_cache.float() * 1.0\n" + _I_CALL),), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant(
            "dequantised first",
            ((_I_K, _I_K.replace("    k =", "    k_int =")), (_I_V, _I_V.replace("    v =", "    v_int =")),
             (_I_KS, "    k = k_int * tl.load(k_scales_ptr + slots[:, None], mask=seen[:, None], other=0.0)\n"),
             (_I_VS, "    v = v_int * tl.load(v_scales_ptr + slots[:, None], mask=seen[:, None], other=0.0)\n"),
             (_I_S, _I_S.replace(" * k_scale", "")), (_I_O, _I_O.replace(" * v_scale", ""))),
        ),
        Variant(
            "half away from zero",
            ((_I_SCALE, "    largest = tl.max(tl.maximum(x, -x), axis=0)\n    scale = largest * (1 / 127)\n"),
             (_I_Q, "    x *= tl.where(largest > 0, 127 / tl.maximum(largest, 1e-30), 0.0)\n    q = tl.where(x < 0, x - 0.5, x + 0.5)\n")),
        ),
        Variant(
            "weights normalised first",
            ((_I_P, "    e = tl.exp(s - tl.max(s))\n    p = e / tl.sum(e)\n"),
             (_I_O, "    o = tl.sum(v * (p * v_scale)[:, None], axis=0)\n")),
        ),
    ),
)  # fmt: skip

EXERCISES = [ATTEND, SPEED, DECODE, PACKED, SPLIT, INT8]
