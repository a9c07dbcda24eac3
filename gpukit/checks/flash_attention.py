"""The exercises of notebook 13: cases, bounds on traffic and memory, and what each wrong idea computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.accounting.tiling import cdiv
from gpukit.grading import ideas
from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only
from gpukit.grading.inputs import Inputs, case, far, listed, nbytes, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence, Outcome
    from gpukit.grading.messages import LaunchFacts


# ------------------------------------------------------------------------------------------------------------ inputs
class _Heads(Inputs):
    def qkv(self, H: int, T_q: int, T_k: int, D: int, dtype: str = "float32", slope: float = 0.0) -> tuple:
        """v is around 1, so that a row's sum matters. slope: by how much the scores rise from key to key, up to about 0; from
        slope 20 on they begin at 0, so that their exponentials overflow, and the last key has all the weight."""
        q, k, v = self.normal(H, T_q, D), self.normal(H, T_k, D), self.normal(H, T_k, D) + 1
        if T_k == 1:  # its score is the LSE, so small that an eps beside the sum shows; of terms that do not cancel
            q, k = q.abs() / 4, k.abs() / 4
        if slope:
            q[..., 0] = 2
            steps = self.torch.arange(T_k) - (T_k - 1 if 0 < slope < 20 else 0)
            k[..., 0] = steps * slope * math.sqrt(D) / 2
        return tuple(x.to(getattr(self.torch, dtype)) for x in (q, k, v))

    def corners(self, T_k: int, dtype: str = "float32") -> tuple:
        """q [2, 6, 16], k and v [2, T_k, 16], scores that are exact in every dtype, so that no rounding hides what is wrong.

        Head 0: all scores 0, of no terms and of terms beyond float16 that cancel; that rise and fall by 1/2 from key to key; the
        first key's and the last one's 4 above all others. Head 1: all 200; all -200; that rise and fall by 20; the first one's
        and the last one's 1,600 above all others. In float16 its values have sums beyond 65,504.
        """
        q, k = self.torch.zeros(2, 6, 16), self.torch.zeros(2, T_k, 16)
        keys = self.torch.arange(T_k)
        k[..., 0], k[..., 1], k[..., 2], k[..., 3], k[..., 4] = 256, -256, keys - (T_k - 1), keys, 1
        k[:, 0, 5] = k[:, -1, 6] = 1
        q[0, 1, :2], q[0, 2, 2], q[0, 3, 3], q[0, 4, 5], q[0, 5, 6] = 300, 2, -2, 16, 16
        q[1, 0, 4], q[1, 1, 4], q[1, 2, 3], q[1, 3, 3], q[1, 4, 5], q[1, 5, 6] = 800, -800, 80, -80, 6400, 6400
        v = self.normal(2, T_k, 16) + 1
        if dtype == "float16":
            v[1] = v[1] * 1000 + 50_000
        return tuple(x.to(getattr(self.torch, dtype)) for x in (q, k, v))

    def far(self, T_k: int) -> tuple:
        """q [1, 32, 16], k and v [1, T_k, 16]: scores that are all -163,840: no number that stands for "no key", and none that a
        maximum starts from, may lie above them. They are equal, since powers of 2 would have few digits left for a difference."""
        q, k, v = self.torch.zeros(1, 32, 16), self.torch.zeros(1, T_k, 16), self.normal(1, T_k, 16) + 1
        q[..., 0], k[..., 0] = -655_360, 1
        return q, k, v

    def unknown(self, T_q: int, T_k: int) -> tuple:
        """Two heads in float32, of which the first has a NaN in its first key. Not for queries that may see no key: there it is
        right to divide only where the sum of weights is above 0, which makes 0 of a NaN."""
        q, k, v = self.qkv(2, T_q, T_k, 16)
        k[0, 0, 3] = math.nan
        return q, k, v

    def rising(self) -> tuple:
        """A query and 1,024 keys in bfloat16: each block of 16 has one score, 1/16 above that of the block before, so that the
        first of its p is 1 and the factor exp(-1/16) has more digits than 16 bits hold. Rounded, it shrinks what the first
        half has added by a tenth too much, block by block; in the result no sum of many roundings makes up for that."""
        q, k, v = (self.torch.zeros(1, n, 16) for n in (1, 1024, 1024))
        q[..., 0], k[0, :, 0], v[:, :512] = 4, self.torch.arange(1024) // 16 / 16, 1
        return tuple(x.bfloat16() for x in (q, k, v))

    def creeping(self, T_q: int, T_k: int = 256) -> tuple:
        """T_q queries, all alike, and T_k keys in float32: the scores of each block of 16 are 1/4096 above those of the block
        before, so that a factor of sums is nearly 1, and a shortcut leaves it out. The first half has values of 1, the second
        of 0."""
        q, k, v = (self.torch.zeros(1, n, 16) for n in (T_q, T_k, T_k))
        q[..., 0], k[0, :, 0], v[:, : T_k // 2] = 4, self.torch.arange(T_k) // 16 / 4096, 1
        return q, k, v

    def stalling(self) -> tuple:
        """Two heads of a query and 256 keys, in which sums in bfloat16 go wrong by more than rounding: 16 x 1.8125 again and
        again, where what is rounded away goes one way; and a key that has nearly all the weight before many that have each so
        little that a block of them is rounded away."""
        q, k, v = (self.torch.zeros(2, n, 16) for n in (1, 256, 256))
        q[1, 0, 0], k[1, 1:, 0], v[0], v[1], v[1, 0] = 4, -8.375, 1.8125, 3, 1
        return tuple(x.bfloat16() for x in (q, k, v))


def _case(q: Tensor, k: Tensor, v: Tensor, *rest: Any, tags: str = "", note: str = "") -> Case:
    heads = f"H {q.shape[0]}" if q.ndim == 3 else ""
    shown = listed(heads, f"T_q {q.shape[-2]}, T_k {k.shape[-2]}, D {q.shape[-1]},")
    tags += " partial" * (k.shape[-2] % 16 > 0) + " blocks" * (k.shape[-2] > 16)
    return tensor_case(q, k, v, *rest, shown=shown, note=note, tags=tags)


_FAINT = "one score 20 above the others"
_BURIED = "scores of 0, and of 100 between them"
_STALE = "scores of 0, and of 11 behind them"
_CREEPING = "scores that rise by 1/4096 from block to block"
_NAN = "a key with a NaN"
_TAGS = {_FAINT: " faint", _BURIED: " buried", _STALE: " late-rise", _CREEPING: " creeping"}
_FAR = 1 << 24  # rows of three times 128 numbers, which are more than 2^32 elements
# Heads of which all k have more than 2^32 elements, and all LSE too; no program walks over many keys.
_MANY_KEYS, _MANY_QUERIES = (65_000, 320, 256), (65_000, 98_304, 256)
_NUMBERS = 64  # bytes that a call may allocate beside its results: single numbers


def _wide(D: int) -> int:
    """D as a block holds it."""
    return max(16, D + ideas.padding(D))


# Attention of the exercises: heads without a batch, or a single one, and the LSE beside it, neither of which gpukit.reference
# has; as formulas, since wrong ideas change parts of them.
def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return _scores(q, k).softmax(-1) @ v


def _lse(s: Tensor) -> Tensor:
    """In float32 of scores in any dtype."""
    import torch

    return s.to(torch.float64 if s.dtype == torch.float64 else torch.float32).logsumexp(-1)


def _walk(q: Tensor, k: Tensor, v: Tensor, step: int = 16, fault: str = "", rows: int = 32) -> tuple[Tensor, Tensor]:
    """o and LSE of a walk over the keys with a fault in it."""
    import torch

    m, l, acc = ideas.online_softmax(_scores(q, k), v, step, fault, rows)
    return (acc if fault in ("not divided", "divided") else acc / l), (m + torch.log(l))[..., 0]


# ----------------------------------------------------------------------------------------------- flash_attention.merge
def _state(keys: list[tuple[float, float]]) -> tuple[float, float, float]:
    m = max((s for s, _ in keys), default=-math.inf)
    weights = [math.exp(s - m) for s, _ in keys]
    return m, math.fsum(weights), math.fsum(w * v for w, (_, v) in zip(weights, keys, strict=True))


def _merge_cases(rng: Random) -> list[Case]:
    def keys(count: int, about: float = 0.0) -> list[tuple[float, float]]:
        # All v above 0: a sum that cancels would be as uncertain as the tolerance allows.
        return [(about + rng.gauss(0, 2), rng.uniform(0.5, 2)) for _ in range(count)]

    def pair(name: str, a: list, b: list, tags: str) -> Case:
        return case(name, _state(a), _state(b), tags=tags)

    same = keys(4)
    return [
        pair("equal maxima", same, [(s, rng.uniform(0.5, 2)) for s, _ in same], "equal"),
        pair("the second maximum is larger", keys(3), keys(5, 12), "rises"),
        pair("the first maximum is larger", keys(3, 12), keys(5), "falls"),
        pair("a single key", keys(6, 10), keys(1), "falls"),
        pair("a single key in each, v below 0", [(0.25, -2.0)], [(-0.5, -1.0)], "falls"),
        pair("maxima of 0 and just below", [(0.0, 1.5)], [(-0.125, 1.0), (-3.0, 2.0)], "falls"),
        pair("scores around 1,000", keys(3, 1000), keys(3, 1010), "rises large"),
        pair("scores around -1,000", keys(3, -990), keys(3, -1010), "falls large"),
        pair("2,000 apart", keys(3, 1000), keys(3, -1000), "falls large"),
        pair("2,000 apart, the other way round", keys(3, -1000), keys(3, 1000), "rises large"),
        # One key of little weight, and of a value that makes up for it.
        pair("a large value 300 below", [(300.0, 1.0), (298.0, -2.0)], [(0.0, 1e140)], "faint"),
        pair("a large value 300 below, the other way round", [(0.0, 1e140)], [(300.0, 1.0), (298.0, -2.0)], "faint"),
        pair("the largest float beside the smallest", [(1.7e308, 1.0)], [(-1.7e308, 1.0)], "falls large"),
        # As low as floats go: a state of such keys is not one without keys.
        pair("scores around -1e300, then higher", keys(2, -2e300), keys(2, -1e300), "rises large"),
        pair("scores of -1e38 in both", [(-1e38, 1.5), (-1e38, 0.5)], [(-1e38, 2.0)], "equal large"),
        pair("no keys in the first", [], keys(4), "empty"),
        pair("no keys in the second", keys(4), [], "empty"),
        pair("no keys in either", [], [], "empty none"),
    ]


def _merged(a: tuple, b: tuple, shrink_l: tuple = (True, True), shrink_acc: tuple = (True, True)) -> tuple:
    m = max(a[0], b[0])
    by = [math.exp(x[0] - m) if x[0] > -math.inf else 0.0 for x in (a, b)]
    l = sum(x[1] * (f if on else 1) for x, f, on in zip((a, b), by, shrink_l, strict=True))
    return m, l, sum(x[2] * (f if on else 1) for x, f, on in zip((a, b), by, shrink_acc, strict=True))


def _inverted(a: tuple, b: tuple) -> tuple:
    """Each factor the exponential of the common maximum minus the state's own."""
    m = max(a[0], b[0])
    by = [math.exp(m - x[0]) for x in (a, b)]
    return m, *(sum(x[i] * f for x, f in zip((a, b), by, strict=True)) for i in (1, 2))


def _averaged(a: tuple, b: tuple) -> tuple:
    m, l, _ = _merged(a, b)
    by = [x[1] * math.exp(x[0] - m) if x[0] > -math.inf else 0.0 for x in (a, b)]
    return m, l, sum(x[2] * f for x, f in zip((a, b), by, strict=True)) / (l or 1)


MERGE = FunctionExercise(
    id="flash_attention.merge",
    function="merge",
    returns=("m", "l", "acc"),
    cases=_merge_cases,
    expected=lambda a, b: _merged(a, b),
    tolerance=1e-12,
    misconceptions=(
        Misconception("sums-added", gives=lambda a, b: _merged(a, b, (False, False), (False, False))),
        Misconception("inverted-factor", gives=_inverted),
        Misconception("acc-not-rescaled", gives=lambda a, b: _merged(a, b, (True, True), (False, False))),
        Misconception("l-not-rescaled", gives=lambda a, b: _merged(a, b, (False, False), (True, True))),
        Misconception("one-side", gives=lambda a, b: _merged(a, b, (True, False), (True, False))),
        Misconception("averaged", gives=_averaged),
        Misconception("divided", gives=lambda a, b: (*_merged(a, b)[:2], _merged(a, b)[2] / (_merged(a, b)[1] or 1))),
        Misconception("faint-keys", when=only("faint")),
        Misconception("empty", when=only("empty")),
        Misconception("overflow", when=only("large")),
    ),
)


# ----------------------------------------------------------------------------------------------- flash_attention.tiles
def _tiles_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)

    def case(T_q: int, T_k: int, D: int, BLOCK: int = 16, slope: float = 0.0, tags: str = "", note: str = "") -> Case:
        q, k, v = (x[0] for x in make.qkv(1, T_q, T_k, D, slope=slope))
        return _case(q, k, v, BLOCK, tags=tags, note=listed(f"BLOCK {BLOCK}", note))

    def strided(T_q: int, T_k: int, D: int, BLOCK: int, turn: int = 0) -> Case:
        """The last dimension of v is not contiguous: the library's own kernel, which has no scores either, does not take it.
        turn: 1 where q is the one that is transposed in memory, as torch.zeros_like(q) then is too."""
        q, k, v = case(T_q, T_k, D).args[:3]
        (_, v), (_, q), (_, k) = (make.layouts(x)[i - turn] for i, x in enumerate((v, q, k)))
        return _case(q, k, v, BLOCK, tags="late", note=f"BLOCK {BLOCK}, none of them contiguous")

    (q, k, v), (far_q, far_k, far_v) = make.corners(37), make.far(37)
    far_k[:, 20, 0] = 0.5  # all the weight for one key: the log-sum-exp is its score, and no sum rounds it
    return [
        _case(q.flatten(0, 1), k[0], v[0], 16, tags="late", note="BLOCK 16, scores from -720 to 1,600"),
        _case(far_q[0, :5], far_k[0], far_v[0], 16, tags="late low", note="BLOCK 16, scores below -80,000"),
        case(1, 1, 1),
        case(13, 13, 3),
        case(16, 16, 8),
        case(15, 17, 16, slope=-0.5, note="scores that fall"),
        case(20, 64, 16, slope=0.5, tags="late", note="scores that rise"),
        case(50, 37, 40, tags="late"),
        strided(33, 69, 24, 32, turn=1),
        strided(16, 140, 4, 8),  # the scores of a block of queries are more than 16 blocks,
        strided(240, 9, 8, 8),  # those of a block of keys, and q itself,
        strided(3, 330, 4, 4),  # those of one query, and k itself
        *(
            _case(*(x[0] for x in rows), 16, tags=f"late {tag}", note=f"BLOCK 16, {note}")
            for rows, tag, note in (
                (make.faint(3), "faint", _FAINT),
                (make.buried(3), "buried", _BURIED),
                (make.creeping(3), "creeping", _CREEPING),
            )
        ),
    ]


def _held(case: Case, peak_bytes: int, results: int, extra: int, allowed: str) -> tuple[str, str] | None:
    """results, extra: numbers that the results are, and that may be held besides them and 16 blocks."""
    q, BLOCK = case.args[0], case.args[-1]
    beyond, most = peak_bytes - 4 * results, 4 * (16 * BLOCK * max(BLOCK, q.shape[1]) + extra)
    if beyond <= most:
        return None
    return (
        "memory",
        f"{beyond:,} bytes were held at once besides the results, where {most:,} are allowed: 16 blocks{allowed}. Which of "
        "your tensors grows with the lengths? A copy of a whole argument, as .contiguous() makes, counts too",
    )


def _tiles_memory(case: Case, peak_bytes: int) -> tuple[str, str] | None:
    q = case.args[0]
    return _held(case, peak_bytes, q.numel(), 2 * len(q), " and two numbers per query")


def _tiles_largest(case: Case, largest_bytes: int) -> tuple[str, str] | None:
    """A block's numbers may be float64, and two of them belong to each query."""
    (T_q, D), BLOCK = case.args[0].shape, case.args[-1]
    if largest_bytes <= 8 * max(T_q * D, 2 * T_q, BLOCK * max(BLOCK, D)):
        return None
    return (
        "memory",
        f"one tensor has {largest_bytes:,} bytes; a block of {BLOCK} x {max(BLOCK, D)} numbers has {4 * BLOCK * max(BLOCK, D):,}. "
        "How many keys does one turn of your loop take, and is an argument copied as a whole, as by .contiguous()?",
    )


def _walked(fault: str) -> Callable[..., Tensor]:
    """The o that a fault in the walk gives, in blocks of 16 or of the case's own size, in float32 as the learner's."""
    return lambda q, k, v, BLOCK=16: _walk(q.double(), k.double(), v.double(), BLOCK, fault, BLOCK)[0].to(q.dtype)


def _all_nan(evidence: Evidence) -> bool:
    """Every result in every case."""
    results = [x for o in evidence.outcomes for x in o.reply.outputs.values() or [o.reply.output]]
    return all(bool(x.isnan().all()) for x in results)


def _only_16_bits(evidence: Evidence) -> bool:
    """What is added up loses it in 16 bits alone, and there where most is to be lost."""
    return only("float16", "bfloat16")(evidence) and any("many-blocks" in case.tags for case in evidence.failed)


# What is left out because it is small: a key's weight, or the change of a factor.
_SHORTCUTS = (
    Misconception("faint-keys", when=ideas.faint),
    Misconception("factor-left-out", when=ideas.creeping),
    Misconception("buried-keys", when=only("buried", "special")),
)
_STALE_MAXIMUM = Misconception("stale-maximum", when=only("late-rise"))

# What the walk over the keys does wrong, whoever walks: the diagnosis and the fault.
_WALKS = (
    ("acc-not-rescaled", "acc"),
    ("l-not-rescaled", "l"),
    ("not-rescaled", "both"),
    ("factor", "inverted"),
    ("maximum-not-carried", "of the block"),
    ("last-block-wins", "last"),
    ("last-block-wins", "m stays"),
    ("not-low-enough", "from 0 on"),
    ("overflow", "no maximum"),
)


def _scaled(factor: Callable[[int], float], function: Callable[..., Any]) -> ideas.On:
    """`function` where the scores are `factor` of the head size times what they should be."""
    return ideas.On(lambda q, k, v, *rest: (q * factor(q.shape[-1]), k, v, *rest), function)


def _attention_of_tiles(q: Tensor, k: Tensor, v: Tensor, BLOCK: int) -> Tensor:
    return _attention(q, k, v)


TILES = FunctionExercise(
    id="flash_attention.tiles",
    function="attention_tiles",
    cases=_tiles_cases,
    expected=lambda q, k, v, BLOCK: _attention(q.double(), k.double(), v.double()).float(),
    tolerance=1e-5,
    memory_rule=_tiles_memory,
    largest_rule=_tiles_largest,
    misconceptions=(
        *_SHORTCUTS,
        *(Misconception(name, gives=_walked(fault)) for name, fault in _WALKS),
        Misconception("not-low-enough", when=only("low")),
        Misconception("not-divided", gives=_walked("not divided")),
        Misconception("no-scale", gives=_scaled(lambda D: math.sqrt(D), _attention_of_tiles)),
        Misconception(
            "mean-of-blocks",
            gives=lambda q, k, v, BLOCK: (
                sum(_attention(q, *part) for part in zip(k.split(BLOCK), v.split(BLOCK), strict=True))
                / cdiv(len(k), BLOCK)
            ),
        ),
        Misconception("scale-of-d", gives=_scaled(lambda D: 1 / math.sqrt(D), _attention_of_tiles)),
        *(
            Misconception("divided-too-often", gives=_walked(fault))
            for fault in ("divided", "divided, also in the end")
        ),
        Misconception("one-maximum", gives=_walked("one maximum")),
        Misconception("factor/2", when=_all_nan),
    ),
)


# ------------------------------------------------------------------------------------------------ flash_attention.late
def _late_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)
    qkv, (far_q, far_k, far_v) = make.qkv, make.far(37)
    return [
        _case(*make.corners(37), tags="late", note="scores from -720 to 1,600"),
        _case(*make.corners(37, "float16"), tags="late", note="scores from -720 to 1,600"),
        _case(*make.corners(33, "bfloat16"), tags="late", note="scores from -640 to 1,600"),
        _case(far_q[:, :4], far_k, far_v, tags="low", note="scores around -163,840"),
        _case(*make.stalling(), tags="many-blocks", note="what a block adds is small"),
        _case(*qkv(1, 1, 1, 1)),
        _case(*qkv(2, 4, 16, 16, "float16")),
        _case(*qkv(1, 5, 13, 20)),
        _case(*qkv(1, 4, 31, 16, slope=-1), note="scores that fall"),
        _case(*qkv(2, 3, 17, 33, "bfloat16", slope=-1), note="scores that fall"),
        _case(*qkv(2, 7, 50, 24, slope=0.2), tags="late", note="scores that rise slowly"),
        _case(*make.faint(1), tags="faint", note=_FAINT),
        _case(*make.buried(1), tags="late buried", note=_BURIED),
        _case(*make.creeping(1, 128), tags="late creeping", note=_CREEPING),
        _case(*make.unknown(3, 13), tags="special", note=_NAN),
    ]


def _of_queries(q: Tensor) -> int:
    """The bytes of o and LSE."""
    return nbytes(q) + 4 * q.shape[0] * q.shape[1]


def _all_keys_at_once(T_k: int, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    """A block that holds all keys leaves nothing to carry from block to block."""
    if T_k <= 32 or max((launch.longest for launch in launches), default=0) >= 6:  # q, k and v twice, o
        return None
    return (
        "one-block",
        f"no program loads a second block: all {T_k} keys are in one. A long text does not fit into one block. What does "
        "a program know about the earlier keys when it comes to the next 16?",
    )


def _late_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    return _all_keys_at_once(case.args[1].shape[1], launches)


LATE = KernelExercise(
    id="flash_attention.late",
    function="attention_by_query",
    cases=_late_cases,
    returns=("o",),
    reference=_attention,
    huge=lambda: (far(*_MANY_QUERIES), *(far(*_MANY_KEYS),) * 2),
    traffic=Traffic(
        reads=lambda q, k, v: nbytes(q) + q.shape[1] * nbytes(k, v),
        writes=1,
        memory=lambda q, k, v: nbytes(q) + _NUMBERS,
    ),
    launch_rule=_late_rule,
    misconceptions=(
        ideas.NOT_FINITE,
        *_SHORTCUTS,
        *(Misconception(name, gives=_walked(fault)) for name, fault in _WALKS),
        Misconception("not-low-enough", when=only("low")),
        Misconception("low-precision-sums", when=_only_16_bits),
        Misconception("factor/2", when=_all_nan),
        Misconception("factor/3", when=lambda evidence: evidence.tag("late")),
    ),
)


# --------------------------------------------------------------------------------------------- flash_attention.forward
def _forward_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)
    qkv = make.qkv
    return [
        _case(*make.corners(37), tags="late", note="scores from -720 to 1,600"),
        _case(*make.corners(37, "float16"), tags="late", note="scores from -720 to 1,600"),
        _case(*make.corners(33, "bfloat16"), tags="late", note="scores from -640 to 1,600"),
        _case(*make.stalling(), tags="many-blocks", note="what a block adds is small"),
        _case(*make.rising(), tags="late many-blocks", note="scores that rise a little from block to block"),
        _case(*make.far(37), tags="late low", note="scores around -163,840"),
        _case(*qkv(1, 1, 1, 1)),
        _case(*qkv(1, 32, 48, 16, slope=-0.5), note="scores that fall"),
        _case(*qkv(2, 33, 13, 20)),
        _case(*qkv(1, 31, 17, 33, "float16", slope=0.2), tags="late"),
        _case(*qkv(2, 13, 31, 80, "bfloat16"), tags="late"),
        _case(*qkv(1, 3, 7, 256, "float16"), note="the largest head"),
        _case(*qkv(2, 65, 64, 64, "float16"), tags="late"),
        _case(*make.faint(32), tags="faint", note=_FAINT),
        _case(*make.buried(3), tags="late buried", note=_BURIED),
        _case(*make.stale(3), tags="late late-rise", note=_STALE),
        _case(*make.creeping(3), tags="late creeping", note=_CREEPING),
        _case(*make.unknown(3, 13), tags="special", note=_NAN),
    ]


def _in_float32(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """o, rounded once, and LSE of tensors in 16 bits. PyTorch would round the scores, and so might the learner."""

    def wide(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if q.element_size() > 2:
            return function(q, k, v, *rest)
        o, lse = function(q.float(), k.float(), v.float(), *rest)
        return o.to(q.dtype), lse

    return wide


def _with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = _scores(q, k)
    return s.softmax(-1) @ v, _lse(s)


def _padded(q: Tensor, k: Tensor, v: Tensor, most: int = 16, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """The rows that fill the last block, or the first `most` of them, count as keys of score `floor`."""
    T_k = k.shape[-2]
    k, v = (_with_zeros(x, min(-T_k % 16, most)) for x in (k, v))
    s = _scores(q, k)
    s[..., T_k:] = floor
    return s.softmax(-1) @ v, _lse(s)


def _all_but_the_last(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Without the last key; NaN where it is the only one."""
    o, lse = _with_lse(q, k[..., :-1, :], v[..., :-1, :])
    return (o, lse) if k.shape[-2] > 1 else (q * math.nan, lse)


def _with_zeros(x: Tensor, rows: int) -> Tensor:
    import torch

    return torch.cat((x, x.new_zeros(*x.shape[:-2], rows, x.shape[-1])), dim=-2)


def _walk_with(fault: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda q, k, v: _walk(q, k, v, fault=fault)


def _rounded_scores(evidence: Evidence, causal: bool = False) -> bool:
    """Whether every wrong result is an LSE, and one of scores that are rounded to 16 bits: after the scale, before it, or in
    the q that is scaled."""

    def lse(outcome: Outcome, way: str) -> Tensor:
        q, k, _, *window = outcome.case.args
        scale = 1 / math.sqrt(q.shape[-1])
        first = (q * scale).double() if way == "q" else q.double()
        s = first @ k.double().mT
        s = {"q": s, "before": s.to(q.dtype).double() * scale, "after": (s * scale).to(q.dtype).double()}[way]
        hidden = ~_seen(q, k, None, *window) if causal else s.isnan()
        return s.masked_fill(hidden, -math.inf).logsumexp(-1)

    def explains(outcome: Outcome, way: str) -> bool:
        """Nothing but the order of sums in float32 is left, which may round a few scores another way."""
        yours, right, guess = (x.double() for x in (outcome.wrong.actual, outcome.wrong.expected, lse(outcome, way)))
        finite = right.isfinite()
        left, off = ((yours - x)[finite].abs().mean() for x in (guess, right))
        return bool(left < off / 10)

    failed = [outcome for outcome in evidence.outcomes if outcome.wrong]
    return _only_lse_in_16_bits(evidence) and any(
        all(explains(o, way) for o in failed) for way in ("after", "before", "q")
    )


def _only_lse_in_16_bits(evidence: Evidence) -> bool:
    return all(
        (o.wrong.output, o.wrong.kind) == ("y[1]", "values") and o.case.args[0].element_size() == 2
        for o in evidence.outcomes
        if o.wrong
    )


def _lse_in_16_bits(causal: bool) -> tuple[Misconception, ...]:
    return (
        Misconception("low-precision-sums/2", when=partial(_rounded_scores, causal=causal)),
        Misconception("low-precision-sums/3", when=_only_lse_in_16_bits),
    )


def _only_lse(q: Tensor, k: Tensor, wrong: Callable[[Tensor], Tensor]) -> dict:
    return {"y[1]": wrong(_scores(q, k))}


FORWARD = KernelExercise(
    id="flash_attention.forward",
    function="attention",
    cases=_forward_cases,
    returns=("o", "LSE"),
    reference=_in_float32(_with_lse),
    huge=lambda: [  # the offset of a head, or of a row in its head, is beyond 2^32
        (far(*_MANY_QUERIES), *(far(*_MANY_KEYS),) * 2),
        (far(1, 3 * _FAR, 128), *(far(1, 64, 128),) * 2),
    ],
    traffic=Traffic(
        reads=lambda q, k, v: nbytes(q) + cdiv(q.shape[1], 32) * nbytes(k, v),
        writes=lambda q, k, v: _of_queries(q),
        flops=lambda q, k, v: (
            4 * q.shape[0] * 32 * cdiv(q.shape[1], 32) * 32 * cdiv(k.shape[1], 32) * _wide(q.shape[2])
        ),
        memory=lambda q, k, v: _of_queries(q) + _NUMBERS,
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        *_SHORTCUTS,
        _STALE_MAXIMUM,
        Misconception("padding-counts", gives=_padded),
        # The mask of the first block is right for those who have no other.
        Misconception("padding-counts", gives=lambda q, k, v: (_padded if k.shape[-2] > 16 else _with_lse)(q, k, v)),
        Misconception("one-key-too-many", gives=lambda q, k, v: _padded(q, k, v, most=1)),
        Misconception("last-key-missing", gives=_all_but_the_last),
        *(Misconception(name, gives=_walk_with(fault)) for name, fault in _WALKS),
        Misconception("not-low-enough", when=only("low")),
        *(Misconception("not-low-enough/2", gives=partial(_padded, floor=floor)) for floor in (-100.0, -1000.0)),
        Misconception("last-block-wins/2", gives=_walk_with("last acc")),
        Misconception("no-scale", gives=_scaled(lambda D: math.sqrt(D), _with_lse)),
        Misconception("scale-of-d", gives=_scaled(lambda D: 1 / math.sqrt(D), _with_lse)),
        Misconception("scale-of-the-block", gives=_scaled(lambda D: math.sqrt(D / _wide(D)), _with_lse)),
        Misconception("not-divided", gives=_walk_with("not divided")),
        Misconception("lse", gives=lambda q, k, v: _only_lse(q, k, lambda s: s.amax(-1))),
        Misconception("lse/2", gives=lambda q, k, v: _only_lse(q, k, lambda s: s.logsumexp(-1) - s.amax(-1))),
        Misconception("lse-base-2", gives=lambda q, k, v: _only_lse(q, k, lambda s: s.logsumexp(-1) / math.log(2))),
        Misconception(
            "lse-base-2/2",
            gives=lambda q, k, v: _only_lse(q, k, lambda s: s.amax(-1) + (s.logsumexp(-1) - s.amax(-1)) / math.log(2)),
        ),
        *_lse_in_16_bits(causal=False),
        Misconception(
            "lse/3",
            when=lambda evidence: all(
                (o.wrong.output, o.wrong.kind) == ("y[1]", "values") for o in evidence.outcomes if o.wrong
            ),
        ),
        *(
            Misconception("divided-too-often", gives=_walk_with(fault))
            for fault in ("divided", "divided, also in the end")
        ),
        Misconception("one-maximum", gives=_walk_with("one maximum")),
        Misconception("low-precision-sums", when=_only_16_bits),
        Misconception("factor/2", when=_all_nan),
        Misconception("factor/3", when=lambda evidence: evidence.tag("late")),
        Misconception("tf32", when=lambda evidence: only("float32")(evidence) and evidence.near(5e-3)),
    ),
)


# ---------------------------------------------------------------------------------------------- flash_attention.causal
def _seen(q: Tensor, k: Tensor, shift: int | None = None, window: int | None = None) -> Tensor:
    """[T_q, T_k] of bool: query i sees the keys up to i + shift, T_k - T_q unless said; the last `window` of them."""
    import torch

    T_q, T_k = q.shape[-2], k.shape[-2]
    shift = T_k - T_q if shift is None else shift
    after = torch.arange(T_k) - torch.arange(T_q)[:, None] - shift
    return (after <= 0) & (after > -(window or T_q + T_k))


def _masked(
    q: Tensor, k: Tensor, v: Tensor, shift: int | None = None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    import torch

    s = _scores(q, k).masked_fill(~_seen(q, k, shift, window), -math.inf)
    lse = _lse(s)
    p = torch.where(s.isneginf(), 0, torch.exp(s - torch.nan_to_num(lse, neginf=0).to(s.dtype)[..., None]))
    return p @ v, lse


def _causal_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)

    def case(q: Tensor, k: Tensor, v: Tensor, note: str = "") -> Case:
        T_q, T_k = q.shape[1], k.shape[1]
        tags = " unequal" * (T_q != T_k) + " unseen" * (T_q > T_k) + " many-blocks" * (T_k > 1000)
        tags += " low" * note.endswith("-163,840") + _TAGS.get(note, "")
        return _case(q, k, v, tags=tags, note=note)

    qkv = make.qkv
    return [
        case(*make.corners(37), note="scores from -720 to 1,600"),
        case(*make.corners(37, "float16"), note="scores from -720 to 1,600"),
        case(*make.far(37), note="scores around -163,840"),
        case(*make.rising(), note="scores that rise a little from block to block"),
        case(*qkv(1, 1, 1, 1)),
        case(*qkv(1, 16, 16, 16)),
        case(*qkv(2, 33, 33, 20, slope=0.3)),
        case(*qkv(1, 19, 19, 33, "float16")),
        case(*qkv(1, 1, 31, 16)),
        case(*qkv(1, 20, 53, 16, "bfloat16")),
        case(*qkv(1, 15, 63, 32)),
        case(*qkv(1, 37, 20, 16)),
        case(*qkv(2, 40, 5, 16, "float16")),
        case(*qkv(1, 17, 1, 24)),
        case(*qkv(1, 80, 80, 16, slope=0.1)),
        case(*make.faint(16), note=_FAINT),
        case(*make.buried(3), note=_BURIED),
        case(*make.stale(3), note=_STALE),
        case(*make.creeping(3), note=_CREEPING),
    ]


def _visible_bytes(q: Tensor, k: Tensor, rows: int = 16, window: int | None = None) -> int:
    """Of k and v together: for each `rows` queries all blocks of 16 keys of which one is seen."""
    (H, T_q, D), T_k, found = q.shape, k.shape[1], 0
    for first in range(0, T_q, rows):
        behind = max(min(first + rows, T_q) + T_k - T_q, 0)  # behind the last key that is seen
        begin = max(first + T_k - T_q - (window or T_q + T_k) + 1, 0) // 16 * 16
        found += min(cdiv(behind, 16) * 16, T_k) - begin
    return 2 * H * found * D * q.element_size()


def _blocks_rule(question: str, rows: int = 16) -> Callable[..., tuple[str, str] | None]:
    """A program that holds `rows` queries loads no block of 16 keys of which they see none, and not all keys as one block."""

    def rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
        q, k, _, *window = case.args
        T_k = k.shape[1]
        read = sum(launch.load_bytes for launch in launches) - nbytes(q)
        enough = _visible_bytes(q, k, rows, *window)
        if read <= 1.02 * enough:
            return _all_keys_at_once(min(T_k, *(w + rows for w in window)) if window else T_k, launches)
        every = cdiv(q.shape[1], rows) * nbytes(k, k)
        twice = "So some block is loaded more than once by one program. Which line loads k or v again?"
        return (
            "blocks",
            f"{read:,} bytes of k and v are loaded where {enough:,} are enough; all blocks for all queries are "
            f"{every:,}. {twice if read > 1.02 * every else question}",
        )

    return rule


def _walked_to(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    *,
    rows: int = 16,
    past: int = 0,
    before: int = 0,
    shift: int | None = None,
    begin: str = "right",
    end: str = "right",
    floor: float = -math.inf,
    added: bool = False,
) -> Tensor:
    """o of a walk in blocks of `rows` queries and 16 keys, with a mistake in it.

    past    how many keys each query sees behind its own, rows of zeros behind the last key among them
    before  how many it sees in front of its window
    shift   query i has the key i + shift for its own; T_k - T_q unless said
    begin   the walk begins with the first block that a query sees, with the first of which the first query sees all keys
            ("whole"), or with the first key ("last") or block ("last block") that the last query sees
    end     it ends with the last block that a query sees, with the last of which all see all keys ("whole"), or before the
            block of the first query's own key ("first")
    floor   the score of a key that is loaded and not seen; `added`: what is added to its score
    """
    import torch

    T_q, T_k = q.shape[-2], k.shape[-2]
    ahead, window = T_k - T_q, T_q + T_k if window is None else window
    k, v = (_with_zeros(x, -T_k % 16) for x in (k, v))
    first, keys = torch.arange(T_q) // rows * rows, torch.arange(k.shape[-2])
    last = (first + rows).clamp(max=T_q) + ahead
    stop = {"right": cdiv(last, 16) * 16, "whole": last // 16 * 16, "first": cdiv(first + ahead, 16) * 16}[end]
    front, late = ((x - window + 1).clamp(min=0) for x in (first + ahead, first + rows - 1 + ahead))
    from_key = {"right": front // 16 * 16, "whole": cdiv(front, 16) * 16, "last": late, "last block": late // 16 * 16}
    after = keys - torch.arange(T_q)[:, None] - (ahead if shift is None else shift)
    walked = (keys < stop[:, None]) & (keys >= from_key[begin][:, None])
    seen = (after <= past) & (after > -window - before)
    s = _scores(q, k)
    s = torch.where(seen, s, s + floor if added else floor).masked_fill(~walked, -math.inf)
    return torch.nan_to_num(s.softmax(-1)) @ v


def _or_nan(gives: Callable[..., Tensor]) -> Callable[[Evidence], bool]:
    """Whether an idea explains o where there are more keys than queries, or as many; where it lets a query see nothing, the
    learner's NaN is as good as 0."""

    def when(evidence: Evidence) -> bool:
        import torch

        checked = [o for o in evidence.outcomes if o.wrong and o.case.args[0].shape[1] <= o.case.args[1].shape[1]]
        if all(outcome.wrong.output != "y[0]" for outcome in checked):
            return False  # LSE alone is wrong, and any idea that changes little would explain o
        for outcome in checked:
            y = outcome.reply.outputs["y[0]"]
            q, k, v, *window = outcome.case.args
            eps, wrong = torch.finfo(y.dtype).eps, gives(q.double(), k.double(), v.double(), *window)
            if not torch.allclose(
                y.nan_to_num(0).double(), wrong, rtol=16 * eps, atol=16 * eps * float(wrong.abs().max())
            ):
                return False
        return bool(checked)

    return when


def _masked_scores(q: Tensor, k: Tensor, v: Tensor, *window: int) -> Tensor:
    return _scores(q, k).masked_fill(~_seen(q, k, None, *window), -math.inf)


def _finite(rows: int) -> tuple[Misconception, ...]:
    """A finite number in place of -inf, in blocks of `rows` queries. All floors between the lowest score of most cases and that
    of the case far below 0 give one o; a lower one shows in rows that see no key alone, and is "unseen-rows"."""
    return (
        Misconception("not-low-enough/2", when=only("low")),
        *(
            Misconception("not-low-enough/3", when=_or_nan(partial(_walked_to, rows=rows, floor=floor, added=added)))
            for floor in (-1e4, -100.0, 0.0)
            for added in (False, True)
            if floor or not added
        ),
    )


def _of_window(q: Tensor, k: Tensor, v: Tensor, *window: int) -> tuple[Tensor, Tensor]:
    return _masked(q, k, v, None, *window)


def _log_of_sum(*args: Any) -> Tensor:
    """Of exponentials made after the maximum was subtracted."""
    import torch

    s = _masked_scores(*args)
    return torch.nan_to_num(_lse(s) - s.amax(-1), nan=-math.inf, neginf=-math.inf)


# What the lines around the mask do wrong.
_AROUND = (
    *(
        Misconception(name, gives=_scaled(factor, _of_window))
        for name, factor in (
            ("no-scale", lambda D: math.sqrt(D)),
            ("scale-of-d", lambda D: 1 / math.sqrt(D)),
            ("scale-of-the-block", lambda D: math.sqrt(D / _wide(D))),
        )
    ),
    Misconception("lse", gives=lambda *args: {"y[1]": _masked_scores(*args).amax(-1)}),
    Misconception("lse/2", gives=lambda *args: {"y[1]": _log_of_sum(*args)}),
    Misconception(
        "not-divided",
        gives=lambda *args: {"y[0]": _masked(*args[:3], None, *args[3:])[0] * _log_of_sum(*args).exp()[..., None]},
    ),
    *_lse_in_16_bits(causal=True),
)


CAUSAL = KernelExercise(
    id="flash_attention.causal",
    function="attention_causal",
    cases=_causal_cases,
    returns=("o", "LSE"),
    reference=_in_float32(_masked),
    huge=lambda: [  # the offset of a head in q, or in k, is beyond 2^32; of more queries than keys the first see none
        (far(*_MANY_QUERIES), *(far(*_MANY_KEYS),) * 2),
        (far(*_MANY_KEYS),) * 3,
    ],
    traffic=Traffic(
        reads=lambda q, k, v: nbytes(q) + _visible_bytes(q, k),
        writes=lambda q, k, v: _of_queries(q),
        memory=lambda q, k, v: _of_queries(q) + _NUMBERS,
    ),
    launch_rule=_blocks_rule("Which is the last key that the last query of a block sees?"),
    misconceptions=(
        # What 16 bits allow is so much that other ideas would explain this case, too.
        Misconception("low-precision-sums", when=lambda evidence: evidence.tag("many-blocks")),
        *_SHORTCUTS,
        _STALE_MAXIMUM,
        Misconception("top-left", gives=lambda q, k, v: _masked(q, k, v, 0)),
        Misconception("not-itself", when=_or_nan(lambda q, k, v: _masked(q, k, v, k.shape[-2] - q.shape[-2] - 1)[0])),
        Misconception("one-too-many", when=_or_nan(partial(_walked_to, past=1))),
        Misconception("top-left/2", when=_or_nan(lambda q, k, v: _masked(q, k, v, 0)[0])),
        Misconception("wrong-sign", when=_or_nan(lambda q, k, v: _masked(q, k, v, q.shape[-2] - k.shape[-2])[0])),
        Misconception("nothing-masked", gives=_with_lse),
        *(Misconception("diagonal-block", when=_or_nan(partial(_walked_to, end=end))) for end in ("whole", "first")),
        *_AROUND,
        *_finite(16),
        Misconception("unseen-rows", when=only("unseen", kind="nan")),
        Misconception("unseen-rows/2", when=only("unseen")),
    ),
)


# ---------------------------------------------------------------------------------------------- flash_attention.window
def _window_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)

    def case(q: Tensor, k: Tensor, v: Tensor, window: int, note: str = "") -> Case:
        T_q, T_k = q.shape[1], k.shape[1]
        tags = " unequal" * (T_q != T_k) + " unseen" * (T_q > T_k) + " many-blocks" * (T_k > 1000)
        tags += " low" * note.endswith("-163,840") + _TAGS.get(note, "") + " endless" * (window > 2**30)
        front = [max(i + T_k - T_q - window + 1, 0) for i in range(T_q)]  # the first key that each query sees
        tags += " first-block" * any(front[i] // 16 > front[i // 32 * 32] // 16 for i in range(T_q))
        return _case(q, k, v, window, tags=tags, note=listed(f"window {window}", note))

    qkv = make.qkv
    return [
        case(*make.corners(37), 20, note="scores from -720 to 1,600"),
        case(*make.corners(37, "float16"), 40, note="scores from -720 to 1,600"),
        case(*make.far(37), 9, note="scores around -163,840"),
        case(*make.rising(), 1024, note="scores that rise a little from block to block"),
        case(*qkv(1, 1, 1, 1), 1),
        case(*qkv(1, 48, 48, 16), 16),
        case(*qkv(2, 33, 33, 20), 5),
        case(*qkv(1, 19, 19, 33, "float16"), 1),
        case(*qkv(1, 1, 31, 16), 17),
        case(*qkv(1, 20, 53, 16, "bfloat16"), 10),
        case(*qkv(1, 15, 63, 32), 30),
        case(*qkv(1, 20, 53, 16), 2**31 - 1),  # no window at all; a sum with it wraps around
        case(*qkv(1, 70, 50, 16), 7),
        case(*qkv(2, 40, 5, 16, "float16"), 3),
        case(*qkv(1, 80, 80, 16), 33),
        case(*qkv(1, 64, 64, 16), 18, note="a walk that begins with the last key of a block"),
        case(*make.faint(32), 256, note=_FAINT),
        case(*make.buried(3), 256, note=_BURIED),
        case(*make.stale(3), 48, note=_STALE),
        case(*make.creeping(3), 256, note=_CREEPING),
    ]


def _one_off(more: int) -> tuple[Misconception, ...]:
    """A window that is one key longer or shorter, in the mask alone and where the walk begins as well."""
    name = "one-too-many" if more > 0 else "one-too-few"
    return (
        Misconception(name, when=_or_nan(partial(_walked_to, rows=32, before=more))),
        Misconception(name, when=_or_nan(lambda q, k, v, w: _walked_to(q, k, v, w + more, rows=32))),
    )


WINDOW = KernelExercise(
    id="flash_attention.window",
    function="attention_window",
    cases=_window_cases,
    returns=("o", "LSE"),
    reference=_in_float32(lambda q, k, v, window: _masked(q, k, v, None, window)),
    huge=lambda: [  # the offset of a head, or of a row in its head, is beyond 2^32
        (*(far(*shape),) * 3, 40) for shape in (_MANY_QUERIES, (1, 3 * _FAR, 128))
    ],
    traffic=Traffic(
        reads=lambda q, k, v, window: nbytes(q) + _visible_bytes(q, k, 32, window),
        writes=lambda q, k, v, window: _of_queries(q),
        memory=lambda q, k, v, window: _of_queries(q) + _NUMBERS,
    ),
    launch_rule=_blocks_rule(
        "Which is the first key that the first query of a block sees, and which the last that its last query sees?", 32
    ),
    misconceptions=(
        *_SHORTCUTS,
        _STALE_MAXIMUM,
        Misconception("window-wraps", when=only("endless")),
        Misconception("no-window", gives=lambda q, k, v, w: _masked(q, k, v)),
        *_finite(32),
        *_one_off(1),
        *_one_off(-1),
        Misconception("block-edge", when=_or_nan(partial(_walked_to, rows=32, before=_FAR))),
        Misconception("future", when=_or_nan(partial(_walked_to, rows=32, past=_FAR))),
        Misconception("future", when=_or_nan(lambda q, k, v, w: _walked_to(q, k, v, w, rows=32, past=w - 1))),
        *(
            Misconception("begins-late", when=_or_nan(partial(_walked_to, rows=32, begin=at)))
            for at in ("last", "last block", "whole")
        ),
        Misconception("top-left/2", when=_or_nan(lambda q, k, v, w: _masked(q, k, v, 0, w)[0])),
        Misconception("top-left/2", when=_or_nan(partial(_walked_to, rows=32, shift=0))),
        *_AROUND,
        Misconception("unseen-rows", when=only("unseen", kind="nan")),
        Misconception("unseen-rows/2", when=only("unseen")),
        Misconception("first-block", when=only("unseen", "first-block", kind="nan")),
    ),
)


# ---------------------------------------------------------------------------------------------- flash_attention.packed
def _packed_case(
    make: _Heads, lengths: list[tuple[int, int]], H: int, H_kv: int, D: int, dtype: str = "float32", nan: bool = False
) -> Case:
    """nan: in the first key of the first sequence and the first head"""
    total_q, total_k = (sum(pair[i] for pair in lengths) for i in (0, 1))
    q, k, v = make.normal(total_q, H, D), make.normal(total_k, H_kv, D), make.normal(total_k, H_kv, D) + 1
    q, k, v = (x.to(getattr(make.torch, dtype)) for x in (q, k, v))
    cu = [make.torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0).int() for i in (0, 1)]
    tags = "gqa" * (H_kv != H) + " sequences" * (len(lengths) > 1)
    tags += " unequal" * any(a != b for a, b in lengths) + " no-query" * any(a == 0 for a, _ in lengths)
    if nan:
        k[0, 0, 3] = math.nan
        tags += " special"
    shown = f"queries/keys {listed(*(f'{a}/{b}' for a, b in lengths))}; {H} heads on {H_kv}, D {D},"
    return tensor_case(q, k, v, *cu, max(a for a, _ in lengths), shown=shown, note=_NAN * nan, tags=tags)


def _packed_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)
    return [
        _packed_case(make, [(1, 1)], 1, 1, 1),
        _packed_case(make, [(21, 21)], 2, 2, 20),
        _packed_case(make, [(32, 32)], 4, 2, 16),
        _packed_case(make, [(5, 5), (19, 19)], 1, 1, 16),
        _packed_case(make, [(16, 16), (16, 16)], 2, 2, 16, "float16"),
        _packed_case(make, [(13, 15), (16, 31)], 6, 3, 33),
        _packed_case(make, [(4, 7), (0, 5), (17, 6)], 6, 2, 16, "bfloat16"),
        _packed_case(make, [(0, 3), (3, 20), (1, 9), (18, 17), (0, 1)], 2, 1, 16),
        _packed_case(make, [(48, 48), (16, 33), (7, 16)], 4, 2, 32),
        _packed_case(make, [(5, 5), (4, 4)], 2, 2, 16, nan=True),
    ]


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest: int,
    heads: Callable[[int, int, int], int] | None = None,
    spans: Callable | None = None,
) -> Tensor:
    """heads(h, H, H_kv): the head of k that query head h uses; spans(i, cu_q, cu_k): the keys of sequence i."""
    import torch

    H, H_kv = q.shape[1], k.shape[1]
    heads = heads or (lambda h, H, H_kv: h // (H // H_kv))
    spans = spans or (lambda i, cu_q, cu_k: (cu_k[i], cu_k[i + 1]))
    use = [heads(h, H, H_kv) for h in range(H)]
    parts = []
    for i in range(len(cu_q) - 1):
        first, end = spans(i, cu_q.tolist(), cu_k.tolist())
        rows = q[cu_q[i] : cu_q[i + 1]].transpose(0, 1)
        parts.append(_attention(rows, *(x[first:end, use].transpose(0, 1) for x in (k, v))).transpose(0, 1))
    return torch.cat(parts)


def _packed_reads(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int) -> int:
    """q once, keys and values for each block of 16 queries of each head, four of the numbers in each program."""
    H, D = q.shape[1:]
    keys = sum(cdiv(a, 16) * b for a, b in zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True))
    programs = (len(cu_q) - 1) * H * cdiv(longest, 16)
    return nbytes(q) + 2 * keys * H * D * q.element_size() + 4 * 4 * programs


def _huge_packed() -> tuple:
    """A sequence of many keys without a query, then two of many queries: the last one begins far from the beginning in q and in
    k, and no program walks over many keys."""
    import torch

    cu_q, cu_k = (torch.tensor([0, *n], dtype=torch.int32).cumsum(0).int() for n in ((0, _FAR, _FAR), (_FAR, 64, 64)))
    kv = far(int(cu_k[-1]), 3, 128)
    return far(2 * _FAR, 3, 128), kv, kv, cu_q, cu_k, _FAR


PACKED = KernelExercise(
    id="flash_attention.packed",
    function="attention_packed",
    cases=_packed_cases,
    returns=("o",),
    reference=_packed,
    huge=_huge_packed,
    traffic=Traffic(reads=_packed_reads, writes=1, memory=lambda q, *_: nbytes(q) + _NUMBERS, slack=0.02),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("heads-interleaved", gives=lambda *args: _packed(*args, heads=lambda h, H, H_kv: h % H_kv)),
        Misconception(
            "wrong-group", gives=lambda *args: _packed(*args, heads=lambda h, H, H_kv: min(h // H_kv, H_kv - 1))
        ),
        Misconception("first-head", gives=lambda *args: _packed(*args, heads=lambda h, H, H_kv: 0)),
        Misconception("other-sequences", gives=lambda *args: _packed(*args, spans=lambda i, cu_q, cu_k: (0, cu_k[-1]))),
        Misconception(
            "other-sequences/2", gives=lambda *args: _packed(*args, spans=lambda i, cu_q, cu_k: (cu_k[i], cu_k[-1]))
        ),
        Misconception(
            "other-sequences/3", gives=lambda *args: _packed(*args, spans=lambda i, cu_q, cu_k: (0, cu_k[i + 1]))
        ),
        Misconception(
            "first-sequence", gives=lambda *args: _packed(*args, spans=lambda i, cu_q, cu_k: (0, cu_k[i + 1] - cu_k[i]))
        ),
        Misconception("lengths-of-q", when=lambda evidence: evidence.tag("unequal")),
    ),
)


# ------------------------------------------------------------------------------------------- flash_attention.recompute
def _gradients(q, k, v, o, lse, do, *_, fault: str = "", step: int = 16) -> tuple:
    """dq, dk and dv from what forward kept, with whole matrices; `fault` is a mistake in it."""
    import torch

    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.exp(_scores(q, k) - lse.to(q.dtype)[..., None])
    if fault == "p without scale":
        p = torch.exp(q @ k.mT - lse.to(q.dtype)[..., None])
    if fault == "p of a block":
        p = ideas.each_block(lambda s: s.softmax(-1), _scores(q, k), step)
    dp = do @ v.mT
    delta = (o * do).sum(-1, keepdim=True)
    if fault == "no delta":
        delta = delta * 0
    if fault == "delta of a block":
        delta = ideas.each_block(lambda terms: terms.sum(-1, keepdim=True).expand_as(terms), p * dp, step)
    if fault == "delta without o":
        delta = do.sum(-1, keepdim=True)
    ds = p * (dp - delta)
    if fault == "no p":
        ds = dp - delta
    if fault == "no scale":
        scale = 1.0
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ do


def _recompute_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)

    def case(
        T_q: int, T_k: int, D: int, BLOCK: int = 16, slope: float = 0.0, upstream: str = "", strided: bool = False
    ) -> Case:
        q, k, v = (x[0].double() for x in make.qkv(1, T_q, T_k, D, slope=slope))
        do = make.normal(T_q, D) + 0.5
        if T_q == 1:  # as in gradients: a single weight near 1 leaves differences of nearly equal numbers
            q, do = q / 4, do - do.mean(-1, keepdim=True)
        if upstream:
            do = dict(make.upstream(do))[upstream]
        o, lse = _with_lse(q, k, v)
        q, k, v, o, lse = (x.float() for x in (q, k, v, o, lse))
        note = listed(f"BLOCK {BLOCK}", f"do {upstream}" * bool(upstream), "none of q, k, v and o contiguous" * strided)
        if strided:  # the library's own backward pass has no scores either, but not for such a v
            (_, v), (_, q), (_, k), (_, o) = (
                make.layouts(x)[i] for i, x in zip((0, 1 if T_q < 200 else 0, 2, 2), (v, q, k, o), strict=True)
            )
        return _case(q, k, v, o, lse, do, BLOCK, note=note)

    return [
        case(1, 5, 8),
        case(16, 16, 16, upstream="of a sum: stride 0"),
        case(15, 17, 1, upstream="around 5, half of it 0"),
        case(20, 33, 16),
        case(33, 20, 24, 32, upstream="one row expanded"),
        case(13, 70, 40, slope=0.3, upstream="transposed"),
        case(33, 32, 16, strided=True, upstream="every second element of a row"),
        # q, o and do are more than the 16 blocks and the one tensor,
        case(200, 8, 4, 4, strided=True, upstream="transposed"),
        case(352, 16, 2, strided=True),  # so many queries that the scores of a block of keys are more than 16 blocks,
        case(2, 80, 2, 2, strided=True),  # so many keys that one query's are
    ]


def _recompute_memory(case: Case, peak_bytes: int) -> tuple[str, str] | None:
    q, k = case.args[:2]
    allowed = ", a tensor as large as q, and two numbers per query"
    return _held(case, peak_bytes, q.numel() + 2 * k.numel(), q.numel() + 2 * len(q), allowed)


def _faulty(fault: str) -> Callable[..., tuple]:
    def gives(*args: Any) -> tuple:
        *tensors, BLOCK = args
        return tuple(x.float() for x in _gradients(*(x.double() for x in tensors), fault=fault, step=BLOCK))

    return gives


RECOMPUTE = FunctionExercise(
    id="flash_attention.recompute",
    function="gradient_tiles",
    returns=("dq", "dk", "dv"),
    cases=_recompute_cases,
    expected=lambda *args: _faulty("")(*args),
    tolerance=1e-5,
    memory_rule=_recompute_memory,
    misconceptions=(
        Misconception("no-delta", gives=_faulty("no delta")),
        Misconception("delta-of-a-block", gives=_faulty("delta of a block")),
        Misconception("delta-without-o", gives=_faulty("delta without o")),
        Misconception("no-scale", gives=_faulty("no scale")),
        Misconception(
            "no-scale/2",
            gives=lambda *args: (_faulty("no scale")(*args)[0], *_faulty("")(*args)[1:]),
        ),
        Misconception(
            "no-scale/3",
            gives=lambda *args: (_faulty("")(*args)[0], _faulty("no scale")(*args)[1], _faulty("")(*args)[2]),
        ),
        Misconception("p-of-a-block", gives=_faulty("p of a block")),
        Misconception("p-without-scale", gives=_faulty("p without scale")),
        Misconception(
            "scaled-q",
            gives=lambda *args: tuple(
                x / math.sqrt(args[0].shape[1]) if i == 1 else x for i, x in enumerate(_faulty("")(*args))
            ),
        ),
        Misconception("no-p", gives=_faulty("no p")),
        Misconception(
            "last-block-wins",
            when=lambda evidence: all(
                max(case.args[0].shape[0], case.args[1].shape[0]) > case.args[-1] for case in evidence.failed
            ),
        ),
    ),
)


# ------------------------------------------------------------------------------------------- flash_attention.gradients
def _gradients_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)

    def case(
        H: int, T_q: int, T_k: int, D: int, dtype: str = "float32", slope: float = 0.0, tags: str = "", small: int = 0
    ) -> Case:
        """small: by how many powers of 2 the gradients are smaller; the mean of many losses has such ones."""
        q, k, v = make.qkv(H, T_q, T_k, D, dtype, slope)
        do = make.normal(H, T_q, D)
        if T_q == 1:  # weights of about 1 / T_k and small dp: with one weight near 1, dp - delta cancels to nothing
            q, do = q / 4, do - do.mean(-1, keepdim=True)
        elif dtype == "float32":
            # v is around 1, so a row of do adds its sum to dp and to delta. Were it much, their difference would be what
            # rounding left of it, and one seed in hundreds would refuse a right order of the sums.
            do += 1 / D - do.mean(-1, keepdim=True)
        else:
            do += 0.5
        if dtype == "float32":
            # With 12 bits in one, too many for bf16 and tf32, and few in the other, scores and dp are exact sums, in any order.
            # What is left of dp - delta where the two are nearly equal is then the same in every right answer.
            # One column of q, of v and of do has a sign that the queries share: what a row adds up to is large beside the
            # roundings of its terms, which come from all of them.
            if T_q > 1:
                q[..., 1] += 2
                v[..., 0] = 3 - 4 * (make.torch.arange(T_k) % 2)
                do[..., 0] += 2
            q, do = ((1024 * x).round() / 1024 for x in (q, do))
            k, v = ((16 * x).round() / 16 for x in (k, v))
        do = do.to(q.dtype) * 2.0**-small
        return finished(q, k, v, do, tags + " small-gradients" * (small > 0), "small gradients" * (small > 0))

    def finished(q: Tensor, k: Tensor, v: Tensor, do: Tensor, tags: str, note: str = "") -> Case:
        o, lse = _with_lse(q.double(), k.double(), v.double())
        delta = (o * do.double()).sum(-1)
        blank = [x.new_full(x.shape, math.nan) for x in (k, v)]
        tags += " rest" * (q.shape[1] % 16 > 0)
        return _case(q, k, v, do, lse.float(), delta.float(), *blank, tags=tags, note=note)

    def stalling() -> Case:
        """Sums in bfloat16 lose a third: after a block of queries come many that add less than half of a unit of rounding."""
        q, k, v, do = (make.torch.zeros(1, n, 16, dtype=make.torch.bfloat16) for n in (1136, 2, 2, 1136))
        q[..., 1] = 1
        v[:, 0], v[:, 1] = 1, -1
        do[:] = 0.48 / 128
        do[:, :16] = 1
        return finished(q, k, v, do, "many-blocks", "what a block of queries adds is small")

    def high() -> Case:
        """Scores of 1,000, in float16: their LSE, 1,000 + log(37), has more digits than 16 bits hold. The other elements of q
        meet zeros, so that a row of dk has sums of every size."""
        q, k, v = make.normal(1, 20, 16), make.torch.zeros(1, 37, 16), make.normal(1, 37, 16) + 1
        q[..., 0], k[..., 0] = 1, 4000
        return finished(*(x.half() for x in (q, k, v, make.normal(1, 20, 16))), "high", "scores of 1,000")

    def faint() -> Case:
        """Three blocks of keys, of which the first has scores 20 above the others': they have 6e-11 of the weight each, and their
        rows of dk and dv are small and still as exact as any."""
        q, k, v = make.normal(1, 16, 16), make.torch.zeros(1, 96, 16), make.normal(1, 96, 16) + 1
        q[..., 0], k[:, :32, 0] = 4, 20
        # In 16 bits: in float32 the exponent -23.5 of a weight, however it is rounded, is several units of the result.
        return finished(*(x.bfloat16() for x in (q, k, v, make.normal(1, 16, 16))), "faint", "scores of 20 and of 0")

    def far_sums() -> Case:
        """Sums of dk beyond float16 before they are multiplied with the scale, and not behind it: 20 x 128 x about 48."""
        q, k, v, do = make.integers(32, 65, 1, 20, 16).float(), *(make.torch.zeros(1, n, 16) for n in (2, 2, 20))
        v[:, 0, 0], v[:, 1, 0], do[..., 0] = 16, -16, 16
        return finished(*(x.half() for x in (q, k, v, do)), "far rest", "sums of dk beyond 65,504")

    def digits() -> Case:
        """dp is 192 or 193, numbers of bfloat16, and delta, their mean, is none: rounded, it takes all of a difference with it."""
        q, k, v, do = make.normal(1, 20, 16).abs(), *(make.torch.zeros(1, n, 16) for n in (8, 8, 20))
        v[..., 0], do[..., 0] = 192 + make.torch.arange(8) % 2, 1
        return finished(*(x.bfloat16() for x in (q, k, v, do)), "digits rest", "dp of 192 and of 193")

    def unknown() -> Case:
        """Two heads, of which the first has a NaN in its first key."""
        q, k, v, do = case(2, 16, 31, 16).args[:4]
        k[0, 0, 3] = math.nan
        return finished(q, k, v, do, "special", _NAN)

    q, k, v = make.corners(37, "float16")
    return [
        case(1, 1, 3, 1),
        case(2, 16, 31, 16),
        case(2, 33, 35, 16),
        case(1, 13, 32, 32, small=16),
        case(1, 32, 5, 20, "float16"),
        case(1, 17, 65, 80, "bfloat16"),
        case(1, 3, 7, 256, "float16"),
        case(1, 19, 40, 33, slope=0.05),
        stalling(),
        finished(q[:1], k[:1], v[:1], make.like(q[:1]), "rest", "scores from -18 to 18"),
        high(),
        faint(),
        far_sums(),
        digits(),
        unknown(),
    ]


def _dk_dv(q, k, v, do, lse, delta, *_, fault: str = "") -> tuple:
    """The formulas, in the dtype of the case as PyTorch would compute them, but for the sums of dk, which are scaled before
    they are rounded."""
    import torch

    scale = 1 / math.sqrt(q.shape[-1])
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    s = _scores(q, k).to(wide)
    if fault == "p without scale":
        s = (q @ k.mT).to(wide)
    p = torch.exp(s - (0 if fault == "no lse" else lse.to(wide)[..., None]))
    if fault == "queries of the keys":  # as many blocks of queries as there are of keys
        p = p * (torch.arange(p.shape[-2]) < cdiv(k.shape[-2], 16) * 16)[:, None]
    dp = (do @ v.mT).to(wide)
    ds = p * (dp - (0 if fault == "no delta" else delta.to(wide)[..., None]))
    if fault == "no p":
        ds = dp - delta.to(wide)[..., None]
    dk = ds.to(q.dtype).to(wide).mT @ q.to(wide) * {"no scale": 1, "scaled q": scale**2}.get(fault, scale)
    return dk.to(q.dtype), (ds if fault == "dv of ds" else p).to(q.dtype).mT @ do


def _wrong(fault: str, *names: str) -> Callable[..., dict]:
    """What a mistake makes of the results called `names`."""
    return lambda *args: {k: x for k, x in zip(("dk", "dv"), _dk_dv(*args, fault=fault), strict=True) if k in names}


def _rounded_delta(evidence: Evidence) -> bool:
    """Cases in 16 bits fail, and of those with nearly equal dp; scores may be what they are."""
    return (
        only("float16", "bfloat16")(evidence)
        and only("digits", "high", "rest")(evidence)
        and _fails("digits", evidence)
    )


def _rounded_lse(evidence: Evidence) -> bool:
    return only("high", "faint")(evidence) and _fails("high", evidence)


def _fails(tag: str, evidence: Evidence) -> bool:
    return any(tag in case.tags for case in evidence.failed)


GRADIENTS = KernelExercise(
    id="flash_attention.gradients",
    function="dk_dv",
    cases=_gradients_cases,
    reference=_dk_dv,
    huge=lambda: (
        far(*_MANY_KEYS),
        *(far(*_MANY_QUERIES),) * 2,
        far(*_MANY_KEYS),
        *(far(*_MANY_KEYS[:2], dtype="float32"),) * 2,
        *(far(*_MANY_QUERIES),) * 2,
    ),
    in_place=(6, 7),
    traffic=Traffic(
        reads=lambda q, k, v, do, lse, delta, *_: nbytes(k, v) + cdiv(k.shape[1], 32) * nbytes(q, do, lse, delta),
        writes=lambda q, k, *_: 2 * nbytes(k),
        flops=lambda q, k, *_: (
            8 * q.shape[0] * 16 * cdiv(q.shape[1], 16) * 32 * cdiv(k.shape[1], 32) * _wide(q.shape[2])
        ),
        memory=lambda *_: _NUMBERS,
    ),
    launch_rule=ideas.no_atomics(
        "{bytes} bytes were added with atomics, in the order in which programs happen to arrive: two runs then differ in "
        "their last bits. Which program could own a block of dk and dv and walk over the queries itself?"
    ),
    misconceptions=(
        ideas.NOT_FINITE,
        Misconception("no-delta", gives=_wrong("no delta", "dk")),
        Misconception("no-scale", gives=_wrong("no scale", "dk")),
        Misconception("no-p", gives=_wrong("no p", "dk")),
        Misconception("no-lse", gives=_wrong("no lse", "dk", "dv")),
        Misconception("p-without-scale", gives=_wrong("p without scale", "dk", "dv")),
        Misconception("scaled-q", gives=_wrong("scaled q", "dk")),
        Misconception("walk-too-short", gives=_wrong("queries of the keys", "dk", "dv")),
        Misconception("dv-of-ds", gives=_wrong("dv of ds", "dv")),
        Misconception(
            "last-block-wins",
            when=lambda evidence: (
                all(case.args[0].shape[1] > 16 for case in evidence.failed)
                and all(case.args[0].shape[1] <= 16 for case in evidence.passed)
            ),
        ),
        Misconception("scaled-in-16-bits", when=only("far")),
        Misconception("delta-in-16-bits", when=_rounded_delta),
        Misconception("faint-keys", when=only("faint")),
        Misconception("lse-in-16-bits", when=_rounded_lse),
        Misconception("small-gradients", when=only("small-gradients")),
        # An edge is one in every dtype.
        Misconception(
            "query-edge",
            when=lambda evidence: only("rest")(evidence) and not only("float16", "bfloat16")(evidence),
        ),
        Misconception("low-precision-sums", when=_only_16_bits),
        Misconception("tf32", when=lambda evidence: only("float32")(evidence) and evidence.near(5e-3)),
    ),
)

EXERCISES = [MERGE, TILES, LATE, FORWARD, CAUSAL, WINDOW, PACKED, RECOMPUTE, GRADIENTS]
