"""The exercises of notebook 13: cases, bounds on traffic and memory, hints, and the wrong answers that each check must
recognise."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Label, Misconception, Traffic, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence
    from gpukit.grading.messages import LaunchFacts

NOTEBOOK = "13_flash_attention"


# ------------------------------------------------------------------------------------------------------------ inputs
class _Heads:
    """Seeded q, k and v, and cases named after them."""

    def __init__(self, rng: Random):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def normal(self, *shape: int, dtype: str = "float32") -> Tensor:
        return self.torch.randn(shape, generator=self.generator).to(getattr(self.torch, dtype))

    def qkv(self, H: int, T_q: int, T_k: int, D: int, dtype: str = "float32", slope: float = 0.0) -> tuple:
        """v is around 1, so that a row's sum matters. slope: by how much the scores rise from key to key, up to about 0; from
        slope 20 on they begin at 0, so that their exponentials overflow, and the last key has all the weight."""
        q, k, v = self.normal(H, T_q, D), self.normal(H, T_k, D), self.normal(H, T_k, D) + 1
        if T_k == 1:  # its score is the LSE; if its terms cancelled, rounding would be as large as the allowed error
            q, k = q.abs(), k.abs()
        if slope:
            q[..., 0] = 2
            steps = self.torch.arange(T_k) - (T_k - 1 if 0 < slope < 20 else 0)
            k[..., 0] = steps * slope * math.sqrt(D) / 2
        return tuple(x.to(getattr(self.torch, dtype)) for x in (q, k, v))


def _low(qkv: tuple) -> tuple:
    """The same values with scores that are all -128, exactly: exp of that is 0 in float32. D is 16."""
    q, k, v = (x.clone() for x in qkv)
    q.zero_()[..., 0], k[..., 0] = 2, -256
    return q, k, v


def _case(q: Tensor, k: Tensor, v: Tensor, *rest: Any, tags: str = "", note: str = "") -> Case:
    dtype = str(q.dtype).removeprefix("torch.")
    lengths = f"T_q {q.shape[-2]}, T_k {k.shape[-2]}, D {q.shape[-1]}, {dtype}"
    name = (f"H {q.shape[0]}, " if q.ndim == 3 else "") + lengths + (f", {note}" if note else "")
    found = {dtype, *tags.split()}
    if k.shape[-2] % 16:
        found.add("partial")
    if k.shape[-2] > 16:
        found.add("blocks")
    return Case(name, (q, k, v, *rest), frozenset(found))


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _wide(D: int) -> int:
    """D as a block holds it."""
    return max(16, 1 << (D - 1).bit_length())


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return _scores(q, k).softmax(-1) @ v


def _lse(s: Tensor) -> Tensor:
    import torch

    return s.logsumexp(-1).to(torch.float64 if s.dtype == torch.float64 else torch.float32)


def _walk(q: Tensor, k: Tensor, v: Tensor, step: int, fault: str) -> Tensor:
    """Online softmax over blocks of `step` keys, with one fault in it."""
    import torch

    s = _scores(q, k)
    m = torch.full_like(s[..., :1], -math.inf)
    l, acc = torch.zeros_like(m), torch.zeros_like(q)
    for part, values in zip(s.split(step, -1), v.split(step, -2), strict=True):
        m_new = torch.maximum(m, part.amax(-1, keepdim=True))
        p, shrink = torch.exp(part - m_new), torch.exp(m - m_new)
        p = torch.where(p < 2**-149, 0, p)  # as float32, whatever the dtype is here
        if fault == "last":
            shrink = torch.zeros_like(shrink)
        l = (l if fault in ("l", "both") else l * shrink) + p.sum(-1, keepdim=True)
        acc = (acc if fault in ("acc", "both") else acc * shrink) + p @ values
        if fault == "last acc":
            acc = p @ values
        if fault in ("divided", "divided, also in the end"):
            acc = acc / l
        m = m_new
    return acc if fault in ("not divided", "divided") else acc / l


# ----------------------------------------------------------------------------------------------- flash_attention.merge
def _state(keys: list[tuple[float, float]]) -> tuple[float, float, float]:
    m = max((s for s, _ in keys), default=-math.inf)
    weights = [math.exp(s - m) for s, _ in keys]
    return m, math.fsum(weights), math.fsum(w * v for w, (_, v) in zip(weights, keys, strict=True))


def _merge_cases(rng: Random) -> list[Case]:
    def keys(count: int, about: float = 0.0) -> list[tuple[float, float]]:
        return [(about + rng.gauss(0, 2), rng.gauss(1, 1)) for _ in range(count)]

    def case(name: str, a: list, b: list, tags: str) -> Case:
        return Case(name, (_state(a), _state(b)), frozenset(tags.split()))

    same = keys(4)
    return [
        case("equal maxima", same, [(s, rng.gauss(1, 1)) for s, _ in same], "equal"),
        case("the second maximum is larger", keys(3), keys(5, 12), "rises"),
        case("the first maximum is larger", keys(3, 12), keys(5), "falls"),
        case("a single key", keys(6, 10), keys(1), "falls"),
        case("scores around 1,000", keys(3, 1000), keys(3, 1010), "rises large"),
        case("scores around -1,000", keys(3, -990), keys(3, -1010), "falls large"),
        case("2,000 apart", keys(3, 1000), keys(3, -1000), "falls large"),
        case("2,000 apart, the other way round", keys(3, -1000), keys(3, 1000), "rises large"),
        case("no keys in the first", [], keys(4), "empty"),
        case("no keys in the second", keys(4), [], "empty"),
        case("no keys in either", [], [], "empty none"),
    ]


def _merged(a: tuple, b: tuple, shrink_l: tuple = (True, True), shrink_acc: tuple = (True, True)) -> tuple:
    m = max(a[0], b[0])
    by = [math.exp(x[0] - m) if x[0] > -math.inf else 0.0 for x in (a, b)]
    l = sum(x[1] * (f if on else 1) for x, f, on in zip((a, b), by, shrink_l, strict=True))
    return m, l, sum(x[2] * (f if on else 1) for x, f, on in zip((a, b), by, shrink_acc, strict=True))


def _averaged(a: tuple, b: tuple) -> tuple:
    m, l, _ = _merged(a, b)
    by = [x[1] * math.exp(x[0] - m) if x[0] > -math.inf else 0.0 for x in (a, b)]
    return m, l, sum(x[2] * f for x, f in zip((a, b), by, strict=True)) / (l or 1)


_M_MAX = "    m = max(m_a, m_b)\n"
_M_EMPTY = "    if m == -math.inf:\n        return a\n"
_M_SHRINK = "    shrink_a, shrink_b = math.exp(m_a - m), math.exp(m_b - m)\n"
_M_RETURN = "    return m, l_a * shrink_a + l_b * shrink_b, acc_a * shrink_a + acc_b * shrink_b\n"

MERGE = FunctionExercise(
    id="flash_attention.merge",
    title="Two partial results are one",
    notebook=NOTEBOOK,
    function="merge",
    label=Label(2, 15, "maximum, sum and weighted sum as one state; any two states merge, in any order"),
    hints=(
        "Both sums were made with a maximum of their own. With which maximum must the sums of the result be made, and by "
        "which factor is each of the four old sums wrong?",
        "exp(s - m) = exp(s - m_a) exp(m_a - m): one factor for each state repairs both its sums. Of the two factors one is "
        "1. If no key is in either state, both maxima are -inf, and a difference of infinities is no number.",
        "The larger of the two maxima; if that is -inf, either state. Else the factor of each state is the exponential of its "
        "own maximum minus the common one; l and acc are the sums of the states' l and acc, each times its state's factor.",
    ),
    cases=_merge_cases,
    expected=lambda a, b: _merged(a, b),
    tolerance=1e-12,
    misconceptions=(
        Misconception(
            "sums-added",
            "the sums were added as they are. They were made with different maxima: what does that make of their terms?",
            gives=lambda a, b: _merged(a, b, (False, False), (False, False)),
        ),
        Misconception(
            "acc-not-rescaled",
            "l is right, acc is not: it was made with the same exponentials. Does it not need the same factors?",
            gives=lambda a, b: _merged(a, b, (True, True), (False, False)),
        ),
        Misconception(
            "l-not-rescaled",
            "acc is right, l is not: it was made with the same exponentials. Does it not need the same factors?",
            gives=lambda a, b: _merged(a, b, (False, False), (True, True)),
        ),
        Misconception(
            "one-side",
            "the first state was scaled to the new maximum, the second was not. Which of them has the larger maximum?",
            gives=lambda a, b: _merged(a, b, (True, False), (True, False)),
        ),
        Misconception(
            "averaged",
            "acc is a mean of the two. It is a sum and is divided at the very end; o would be a mean, weighted by l",
            gives=_averaged,
        ),
        Misconception(
            "divided",
            "acc was divided by l, as o is. It stays a sum: by what would the next merge have to multiply it?",
            gives=lambda a, b: (*_merged(a, b)[:2], _merged(a, b)[2] / (_merged(a, b)[1] or 1)),
        ),
        Misconception(
            "empty",
            "without keys the maximum is -inf, and -inf - (-inf) is NaN. What is the result if there are no keys at all?",
            when=lambda evidence: all("empty" in case.tags for case in evidence.failed),
        ),
        Misconception(
            "overflow",
            "large scores go wrong: exp of a score is no float, exp of a difference may be. Is every exponent 0 or less?",
            when=lambda evidence: all("large" in case.tags for case in evidence.failed),
        ),
    ),
    wrong=(
        Variant("added", ((_M_RETURN, "    return m, l_a + l_b, acc_a + acc_b\n"),), diagnosis="sums-added"),
        Variant(
            "acc added",
            ((_M_RETURN, _M_RETURN.replace("acc_a * shrink_a + acc_b * shrink_b", "acc_a + acc_b")),),
            diagnosis="acc-not-rescaled",
        ),
        Variant(
            "l added",
            ((_M_RETURN, _M_RETURN.replace("l_a * shrink_a + l_b * shrink_b", "l_a + l_b")),),
            diagnosis="l-not-rescaled",
        ),
        Variant(
            "the second is taken for the newer",
            ((_M_RETURN, "    return m, l_a * shrink_a + l_b, acc_a * shrink_a + acc_b\n"),),
            diagnosis="one-side",
        ),
        Variant(
            "a mean",
            (
                (
                    _M_RETURN,
                    "    l = l_a * shrink_a + l_b * shrink_b\n"
                    "    return m, l, (acc_a * l_a * shrink_a + acc_b * l_b * shrink_b) / l\n",
                ),
            ),
            diagnosis="averaged",
        ),
        Variant(
            "o in place of acc",
            ((_M_RETURN, _M_RETURN.replace("acc_a * shrink_a + acc_b * shrink_b", "(acc_a * shrink_a + acc_b * shrink_b) / (l_a * shrink_a + l_b * shrink_b)")),),
            diagnosis="divided",
        ),
        Variant("nothing for no keys", ((_M_EMPTY, ""),), diagnosis="empty"),
        Variant(
            "without a maximum",
            (
                (
                    _M_RETURN,
                    "    big = math.exp(min(m, 700))\n"
                    "    l = (l_a * math.exp(min(m_a, 700)) + l_b * math.exp(min(m_b, 700))) / (big or 1)\n"
                    "    acc = (acc_a * math.exp(min(m_a, 700)) + acc_b * math.exp(min(m_b, 700))) / (big or 1)\n"
                    "    return m, l, acc\n",
                ),
            ),
            diagnosis="overflow",
        ),
        Variant("overflows", ((_M_SHRINK, "    shrink_a, shrink_b = math.exp(m_a) / math.exp(m), math.exp(m_b) / math.exp(m)\n"),),
                diagnosis="exception"),
    ),
    right=(
        Variant(
            "the larger first",
            source="""import math


def merge(a, b):
    if b[0] > a[0]:
        a, b = b, a
    if b[1] == 0:
        return a
    factor = math.exp(b[0] - a[0])
    return (a[0], a[1] + b[1] * factor, a[2] + b[2] * factor)
""",
        ),
        Variant(
            "with NumPy",
            source="""import numpy as np


def merge(a, b):
    m, l, acc = np.array([a, b]).T
    top = np.maximum(m[0], m[1])
    if np.isneginf(top):
        return top, 0.0, 0.0
    factor = np.exp(m - top)
    return [top, np.sum(l * factor), factor @ acc]
""",
        ),
        Variant(
            "with tensors",
            source="""import torch


def merge(a, b):
    m, l, acc = torch.tensor([a, b], dtype=torch.float64).unbind(1)
    factor = torch.where(m == -torch.inf, 0.0, torch.exp(m - m.max()))
    return m.max().item(), (l * factor).sum().item(), (acc * factor).sum().item()
""",
        ),
    ),
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- flash_attention.tiles
def _spread(case: Case) -> Case:
    """The case with a first query of zeros: its largest score is not the others'."""
    case.args[0][..., 0, :] = 0
    return case


def _one_maximum(evidence: Evidence) -> bool:
    """Large scores are right, but not in the row whose own scores are small."""
    if not all("large" in case.tags for case in evidence.failed):
        return False
    right = evidence.outputs.isfinite().all(-1).reshape(-1)
    return not right[0] and bool(right[1:].all())


def _tiles_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)

    def case(T_q: int, T_k: int, D: int, BLOCK: int = 16, slope: float = 0.0, tags: str = "", note: str = "") -> Case:
        q, k, v = (x[0] for x in make.qkv(1, T_q, T_k, D, slope=slope))
        return _case(q, k, v, BLOCK, tags=tags, note=", ".join(filter(None, (f"BLOCK {BLOCK}", note))))

    def transposed(T_q: int, T_k: int, D: int, BLOCK: int) -> Case:
        """The last dimension of v is not contiguous: the library's own kernel, which has no scores either, does not take it."""
        q, k, v = case(T_q, T_k, D).args[:3]
        return _case(q, k, v.mT.contiguous().mT, BLOCK, tags="late", note=f"BLOCK {BLOCK}, v transposed in memory")

    return [
        case(1, 1, 16),
        case(16, 16, 8),
        case(20, 64, 16, slope=-0.5, note="scores that fall"),
        case(20, 64, 16, slope=0.5, tags="late", note="scores that rise"),
        case(33, 70, 24, 32),
        case(50, 37, 40, tags="late"),
        _spread(case(8, 40, 16, slope=20, tags="late large", note="scores up to 780, and a query of zeros")),
        case(8, 40, 16, slope=-20, tags="plunge", note="scores down to -780"),
        _case(*_low(case(5, 32, 16).args[:3]), 16, tags="low", note="BLOCK 16, scores of -128"),
        transposed(200, 200, 8, 8),
        transposed(3, 330, 4, 4),  # so many keys that one query's scores are more than 16 blocks
    ]


def _held(case: Case, peak_bytes: int, results: int, extra: int, allowed: str) -> tuple[str, str] | None:
    """results, extra: numbers that the results are, and that may be held besides them and 16 blocks."""
    q, BLOCK = case.args[0], case.args[-1]
    beyond, most = peak_bytes - 4 * results, 4 * (16 * BLOCK * max(BLOCK, q.shape[1]) + extra)
    if beyond <= most:
        return None
    return (
        "memory",
        f"{beyond:,} bytes were held at once besides the results, and 16 blocks, {allowed} are {most:,}. Which of your "
        "tensors grows with the lengths?",
    )


def _tiles_memory(case: Case, peak_bytes: int) -> tuple[str, str] | None:
    q = case.args[0]
    return _held(case, peak_bytes, q.numel(), 2 * len(q), "with two numbers for each query,")


_T_Q = "        rows = q[i : i + BLOCK] / math.sqrt(D)\n"
_T_KEYS = "        for j in range(0, T_k, BLOCK):\n            s = rows @ k[j : j + BLOCK].T\n"
_T_L = "            l = l * shrink + p.sum(1, keepdim=True)\n"
_T_ACC = "            acc.mul_(shrink).add_(p @ v[j : j + BLOCK])\n"
_T_SHRINK = "            shrink = torch.exp(m - m_new)\n"
_T_MAX = "            m_new = torch.maximum(m, s.amax(1, keepdim=True))\n"
_T_END = "            m = m_new\n        acc.div_(l)\n"
_T_M = "        m = torch.full((len(rows), 1), -math.inf)\n"
_T_I = "    for i in range(0, T_q, BLOCK):\n        rows = q[i : i + BLOCK] / math.sqrt(D)\n"


def _walked(fault: str) -> Callable[..., Tensor]:
    """What a fault in the walk gives, in blocks of 16 or of the case's own size, in float32 as the learner's."""
    return lambda q, k, v, BLOCK=16: _walk(q.double(), k.double(), v.double(), BLOCK, fault).to(q.dtype)


def _last_block(q: Tensor, k: Tensor, v: Tensor, BLOCK: int = 16) -> Tensor:
    return _attention(q.double(), k.split(BLOCK, -2)[-1].double(), v.split(BLOCK, -2)[-1].double()).to(q.dtype)


def _only(*tags: str) -> Callable[[Evidence], bool]:
    """Every case that failed has one of the tags."""
    return lambda evidence: all(case.tags.intersection(tags) for case in evidence.failed)


_NOT_CARRIED = (
    "where the scores of a later block are all far lower, the factor of the older sums overflows: the largest score so far is "
    "not the largest of the new block. Is every exponent 0 or less?"
)
_NOT_LOW_ENOUGH = (
    "where all scores are far below 0, the maximum so far is one that no key has, and every exponential is 0. With which number "
    "does a maximum begin that every score is above?"
)
_ONE_MAXIMUM = (
    "the queries of a block share one maximum: where one query's scores are far below the others', all its exponentials are 0. "
    "Whose maximum belongs to a row?"
)
_NO_SCALE = "the scores were not multiplied by the scale, 1 / sqrt(D)"
_FACTOR = (
    "wrong only where a later block has a larger score. Write down the factor of each sum when the maximum goes from 1 to 3: is "
    "it exp(-2)?"
)
_LATE_ACC = (
    "acc keeps what it had when a larger maximum turns up in a later block: l is scaled down to it, acc is not. Which number "
    "were its terms made with?"
)
_LATE_L = (
    "l keeps what it had when a larger maximum turns up in a later block: acc is scaled down to it, l is not. Which number "
    "were its terms made with?"
)

TILES = FunctionExercise(
    id="flash_attention.tiles",
    title="Attention without a matrix of scores",
    notebook=NOTEBOOK,
    function="attention_tiles",
    label=Label(3, 30, "two loops over blocks; what is carried from block to block; memory that does not grow with T"),
    hints=(
        "Softmax needs the maximum and the sum of a whole row of scores, and you hold a block of it. Which exercise was about "
        "joining what is known of some keys with what is known of others?",
        "For a block of queries: a maximum and a sum for each row, and the weighted sums of v so far. Each block of keys gives "
        "scores, a new maximum, exponentials; what was summed before is scaled by one factor a row. Divide at the very end.",
        "For each block of queries, m is a column of -inf, l of zeros, acc the slice of o. For each block of keys: scores "
        "times scale; the larger of m and their row maxima; p, the exponentials of the scores minus it; the factor, the "
        "exponential of the old maximum minus the new one; l and acc times the factor, plus the row sums of p and p times v. "
        "After the last block acc is divided by l.",
    ),
    cases=_tiles_cases,
    expected=lambda q, k, v, BLOCK: _attention(q.double(), k.double(), v.double()).float(),
    tolerance=1e-5,
    memory_rule=_tiles_memory,
    misconceptions=(
        Misconception("acc-not-rescaled", _LATE_ACC, gives=_walked("acc")),
        Misconception("l-not-rescaled", _LATE_L, gives=_walked("l")),
        Misconception(
            "not-rescaled",
            "sums of different maxima are added up: each block's exponentials are right among themselves only. What repairs "
            "the older ones?",
            gives=_walked("both"),
        ),
        Misconception("maximum-not-carried", _NOT_CARRIED, when=_only("plunge")),
        *(
            Misconception(
                "last-block-wins",
                "those are the results of the last block of keys alone. What should it do to those before it?",
                gives=gives,
            )
            for gives in (_walked("last"), _last_block)
        ),
        Misconception(
            "not-divided",
            "each row is too large by one factor, its sum of exponentials. When is it divided by it?",
            gives=_walked("not divided"),
        ),
        Misconception("no-scale", _NO_SCALE, gives=lambda q, k, v, BLOCK: _attention(q * math.sqrt(q.shape[-1]), k, v)),
        Misconception(
            "mean-of-blocks",
            "softmax of each block by itself, and their mean. Does a block whose scores are low weigh as much as one whose "
            "scores are high?",
            gives=lambda q, k, v, BLOCK: sum(
                _attention(q, *part) for part in zip(k.split(BLOCK), v.split(BLOCK), strict=True)
            ) / _up(len(k), BLOCK),
        ),
        Misconception(
            "scale-of-d", "the scores were divided by D. By what are they to be divided?",
            gives=lambda q, k, v, BLOCK: _attention(q / math.sqrt(q.shape[-1]), k, v),
        ),
        *(
            Misconception(
                "divided-too-often",
                "acc was divided by l after every block. It is a sum until the last one: when is it divided?",
                gives=_walked(fault),
            )
            for fault in ("divided", "divided, also in the end")
        ),
        Misconception("one-maximum", _ONE_MAXIMUM, when=_one_maximum),
        Misconception("not-low-enough", _NOT_LOW_ENOUGH, when=_only("low")),
        Misconception(
            "overflow",
            "scores of some hundreds go wrong: their exponentials are no float32. What does online softmax subtract?",
            when=_only("large", "low"),
        ),
    ),
    wrong=(
        Variant("acc kept", ((_T_ACC, _T_ACC.replace(".mul_(shrink)", "")),), diagnosis="acc-not-rescaled"),
        Variant("l kept", ((_T_L, _T_L.replace("l * shrink", "l")),), diagnosis="l-not-rescaled"),
        Variant(
            "both kept",
            ((_T_ACC, _T_ACC.replace(".mul_(shrink)", "")), (_T_L, _T_L.replace("l * shrink", "l"))),
            diagnosis="not-rescaled",
        ),
        Variant("factor of 0", ((_T_SHRINK, "            shrink = 0.0\n"),), diagnosis="last-block-wins"),
        Variant("divided by D", ((_T_Q, _T_Q.replace("math.sqrt(D)", "D")),), diagnosis="scale-of-d"),
        Variant("divided each time", ((_T_ACC, _T_ACC + "            acc.div_(l)\n"), (_T_END, "            m = m_new\n")), diagnosis="divided-too-often"),
        Variant("maximum of the block alone", ((_T_MAX, "            m_new = s.amax(1, keepdim=True)\n"),), diagnosis="maximum-not-carried"),
        Variant("one maximum", ((_T_MAX, "            m_new = torch.maximum(m, s.amax())\n"),), diagnosis="one-maximum"),
        Variant("divided each time and at the end", ((_T_ACC, _T_ACC + "            acc.div_(l)\n"),), diagnosis="divided-too-often"),
        Variant("the old maximum stays", ((_T_END, "        acc.div_(l)\n"),), diagnosis="last-block-wins"),
        Variant("never divided", ((_T_END, "            m = m_new\n"),), diagnosis="not-divided"),
        Variant("no scale", ((_T_Q, "        rows = q[i : i + BLOCK]\n"),), diagnosis="no-scale"),
        Variant(
            "a mean of blocks",
            (
                (_T_ACC, "            acc += torch.softmax(s, 1) @ v[j : j + BLOCK]\n"),
                (_T_END, "        acc /= -(-T_k // BLOCK)\n"),
            ),
            diagnosis="mean-of-blocks",
        ),
        Variant("no maximum", ((_T_MAX, "            m_new = torch.zeros_like(m)\n"),), diagnosis="overflow"),
        Variant("a maximum from 0 on", ((_T_M, "        m = torch.zeros(len(rows), 1)\n"),), diagnosis="not-low-enough"),
        Variant(
            "strips of scores",
            ((_T_I, "    for i in range(0, T_q, BLOCK):\n"
                    "        o[i : i + BLOCK] = torch.softmax(q[i : i + BLOCK] @ k.T / math.sqrt(D), 1) @ v\n"
                    "    return o\n" + _T_I),),
            diagnosis="memory",
        ),
        Variant(
            "all keys for a query",
            ((_T_I, "    for i in range(T_q):\n"
                    "        o[i] = torch.softmax(k @ q[i] / math.sqrt(D), 0) @ v\n"
                    "    return o\n" + _T_I),),
            diagnosis="memory",
        ),
        Variant("all at once", ((_T_I, "    return torch.softmax(q @ k.T / math.sqrt(D), 1) @ v\n" + _T_I),), diagnosis="memory"),
        Variant(
            "in NumPy, of which nobody sees the memory",
            source="""import math

import numpy as np
import torch


def attention_tiles(q, k, v, BLOCK):
    q, k, v = (np.asarray(x) for x in (q, k, v))
    s = q @ k.T / math.sqrt(q.shape[1])
    p = np.exp(s - s.max(1, keepdims=True))
    return torch.tensor(p @ v / p.sum(1, keepdims=True))
""",
            diagnosis="forbidden",
        ),
        Variant(
            "the library",
            source="""import torch.nn.functional as F


def attention_tiles(q, k, v, BLOCK):
    return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])[0, 0]
""",
            diagnosis="memory",
        ),
        Variant(
            "the library, from a copy",
            source="""import torch.nn.functional as F


def attention_tiles(q, k, v, BLOCK):
    v = v.contiguous()
    return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])[0, 0]
""",
            diagnosis="memory",
        ),
    ),
    right=(
        Variant(
            "keys outside, as the first FlashAttention",
            source="""import math

import torch


def attention_tiles(q, k, v, BLOCK):
    n = q.shape[0]
    out = torch.zeros_like(q)
    top, total = torch.full((n,), -1e30), torch.zeros(n)
    for keys, values in zip(k.split(BLOCK), v.split(BLOCK)):
        for first in range(0, n, BLOCK):
            at = slice(first, min(first + BLOCK, n))
            s = torch.mm(q[at], keys.t()).mul_(q.shape[1] ** -0.5)
            new = torch.max(top[at], s.max(dim=1).values)
            s.sub_(new[:, None]).exp_()
            old = total[at] * torch.exp(top[at] - new)
            total[at] = old + s.sum(1)
            out[at] = (out[at] * old[:, None] + s @ values) / total[at][:, None]
            top[at] = new
    return out
""",
        ),
        Variant(
            "a query at a time",
            source="""import math

import torch


def attention_tiles(q, k, v, BLOCK):
    o = torch.empty(q.shape)
    for i, row in enumerate(q):
        states = None
        for j in range(0, k.shape[0], BLOCK):
            s = k[j : j + BLOCK] @ row / math.sqrt(row.numel())
            m = s.max()
            w = (s - m).exp()
            here = m, w.sum(), w @ v[j : j + BLOCK]
            if states is None:
                states = here
            else:
                both = torch.maximum(states[0], m)
                f, g = torch.exp(states[0] - both), torch.exp(m - both)
                states = both, states[1] * f + here[1] * g, states[2] * f + here[2] * g
        o[i] = states[2] / states[1]
    return o
""",
        ),
        Variant(
            "float64 inside",
            source="""import torch


def attention_tiles(q, k, v, BLOCK):
    o = torch.empty_like(q)
    for rows, out in zip(q.split(BLOCK), o.split(BLOCK)):
        m, l, acc = torch.full((len(rows), 1), -torch.inf, dtype=torch.float64), 0.0, 0.0
        for keys, values in zip(k.split(BLOCK), v.split(BLOCK)):
            s = rows.double() @ keys.double().T / q.shape[1] ** 0.5
            new = torch.maximum(m, s.max(1, keepdim=True).values)
            p, factor = torch.exp(s - new), torch.exp(m - new)
            m, l, acc = new, l * factor + p.sum(1, keepdim=True), acc * factor + p @ values.double()
        out.copy_(acc / l)
    return o
""",
        ),
        Variant(
            "two passes",
            source="""import torch


def attention_tiles(q, k, v, BLOCK):
    o = torch.zeros_like(q)
    scale = q.shape[1] ** -0.5
    for rows, out in zip(q.split(BLOCK), o.split(BLOCK)):
        lse = torch.full((rows.shape[0],), float("-inf"))
        for keys in k.split(BLOCK):
            lse = torch.logaddexp(lse, torch.logsumexp(rows @ keys.mT * scale, 1))
        for keys, values in zip(k.split(BLOCK), v.split(BLOCK)):
            out += torch.exp(rows @ keys.mT * scale - lse.unsqueeze(1)) @ values
    return o
""",
        ),
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ flash_attention.late
def _late_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)
    return [
        _case(*make.qkv(1, 3, 1, 16)),
        _case(*make.qkv(2, 4, 16, 16, "float16")),
        _case(*make.qkv(1, 5, 11, 20)),
        _case(*make.qkv(1, 4, 64, 16, slope=-1), note="scores that fall"),
        _case(*make.qkv(2, 3, 40, 33, "bfloat16", slope=-1), note="scores that fall"),
        _case(*make.qkv(1, 4, 64, 16, slope=1), tags="late", note="scores that rise"),
        _case(*make.qkv(1, 3, 40, 16, slope=20), tags="late large", note="scores up to 780"),
        _case(*make.qkv(1, 3, 40, 16, slope=-20), tags="plunge", note="scores down to -780"),
        _case(*make.qkv(1, 12, 50, 24, slope=0.2), tags="late", note="scores that rise slowly"),
    ]


def _all_keys_at_once(T_k: int, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    """A block that holds all keys leaves nothing to carry from block to block."""
    if T_k <= 32 or max((launch.longest for launch in launches), default=0) >= 6:  # q, k and v twice, o
        return None
    return (
        "one-block",
        f"no program loads a second block: all {T_k} keys are in one. A text that is long enough fits no block. What does a "
        "program know of the keys before, when it comes to the next 16?",
    )


def _late_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    return _all_keys_at_once(case.args[1].shape[1], launches)


_L_P = "        p = tl.exp(s - m_new)\n"
_L_MAX = "        m_new = tl.maximum(m, tl.max(s, axis=0))\n"
_L_L = "        l = l * tl.exp(m - m_new) + tl.sum(p, axis=0)\n"
_L_ACC = "        acc = acc * tl.exp(m - m_new) + tl.sum(p[:, None] * v, axis=0)\n"
_L_M = "        m = m_new  # only now: both sums were made with the old maximum\n"

LATE = KernelExercise(
    id="flash_attention.late",
    title="Right until a maximum comes late",
    notebook=NOTEBOOK,
    function="attention_by_query",
    label=Label(2, 15, "detective: a state that is updated in the wrong order"),
    hints=(
        "Which cases pass? In those the first block holds the largest score, or there is one block only. What does the "
        "kernel do from the second block on that it need not do there?",
        "Both sums have a factor that repairs them when the maximum moves. Write down the value of each factor when the maximum "
        "goes from 1 to 3: line by line, as the kernel runs.",
        "The factor of acc is made with a maximum that has been overwritten by then, so it is always 1. The old maximum is "
        "needed until both sums are scaled.",
    ),
    cases=_late_cases,
    returns=("o",),
    reference=_attention,
    traffic=Traffic(reads=1 + 2 * 50, writes=1.0),  # 12 queries, each of which reads 50 keys and their values
    launch_rule=_late_rule,
    misconceptions=(
        Misconception("acc-not-rescaled", _LATE_ACC, gives=_walked("acc")),
        Misconception("l-not-rescaled", _LATE_L, gives=_walked("l")),
        Misconception(
            "not-rescaled",
            "neither sum is scaled when the maximum moves: each block's exponentials are right among themselves only",
            gives=_walked("both"),
        ),
        Misconception("maximum-not-carried", _NOT_CARRIED, when=_only("plunge")),
        *(
            Misconception(
                "last-block-wins",
                "those are the results of the last block of keys alone: the factor of all others is 0. What is the old maximum?",
                gives=gives,
            )
            for gives in (_walked("last"), _last_block)
        ),
        Misconception(
            "overflow",
            "large scores go wrong: their exponentials are no float32. What was subtracted for that?",
            when=lambda evidence: all("large" in case.tags for case in evidence.failed),
        ),
        Misconception("factor", _FACTOR, when=lambda evidence: evidence.tag("late")),
        Misconception("traffic", "each query needs each key and its value once"),
    ),
    wrong=(
        Variant("as it was", ((_L_ACC + _L_M, "        m = m_new\n" + _L_ACC),), diagnosis="acc-not-rescaled"),
        Variant("acc without a factor", ((_L_ACC, _L_ACC.replace("acc * tl.exp(m - m_new)", "acc")),), diagnosis="acc-not-rescaled"),
        Variant("l without a factor", ((_L_L, _L_L.replace("l * tl.exp(m - m_new)", "l")),), diagnosis="l-not-rescaled"),
        Variant("moved too far up", ((_L_L + _L_ACC + _L_M, "        m = m_new\n" + _L_L + _L_ACC),), diagnosis="not-rescaled"),
        Variant("the old maximum stays", ((_L_M, ""),), diagnosis="last-block-wins"),
        Variant("maximum of the block alone", ((_L_MAX, "        m_new = tl.max(s, axis=0)\n"),), diagnosis="maximum-not-carried"),
        Variant(
            "exponent turned round",
            (
                (_L_L, _L_L.replace("l * tl.exp(m - m_new)", "l * tl.where(m == -float('inf'), 0.0, tl.exp(m_new - m))")),
                (_L_ACC, _L_ACC.replace("acc * tl.exp(m - m_new)", "acc * tl.where(m == -float('inf'), 0.0, tl.exp(m_new - m))")),
            ),
            diagnosis="factor",
        ),
        Variant(
            "no maximum",
            ((_L_MAX, "        m_new = tl.zeros((), tl.float32)\n"), (_L_L, "        l += tl.sum(p, axis=0)\n"),
             (_L_ACC, "        acc += tl.sum(p[:, None] * v, axis=0)\n")),
            diagnosis="overflow",
        ),
        Variant("values loaded again", ((_L_P, _L_P + "        v = tl.load(v_ptr + offs, mask=mask, other=0.0).to(tl.float32)\n"),),
                diagnosis="traffic"),
        Variant(
            "as it was, and one block for all keys",
            ((_L_ACC + _L_M, "        m = m_new\n" + _L_ACC),
             ("BLOCK_N=16, BLOCK_D=BLOCK_D, num_warps=1", "BLOCK_N=triton.next_power_of_2(T_k), BLOCK_D=BLOCK_D, num_warps=1")),
            diagnosis="one-block",
        ),
    ),
    right=(
        Variant(
            "the factor first",
            ((_L_L + _L_ACC + _L_M,
              "        alpha = tl.exp(m - m_new)\n"
              "        m = m_new\n"
              "        acc = alpha * acc + tl.sum(v * p[:, None], axis=0)\n"
              "        l = alpha * l + tl.sum(p, axis=0)\n"),),
        ),
        Variant(
            "always divided",
            ((_L_MAX + _L_P + _L_L + _L_ACC + _L_M,
              "        here = tl.max(s, axis=0)\n"
              "        w = tl.exp2((s - here) * 1.4426950408889634)\n"
              "        top = tl.maximum(m, here)\n"
              "        old, new = l * tl.exp(m - top), tl.exp(here - top)\n"
              "        l = old + new * tl.sum(w, axis=0)\n"
              "        acc = acc * old + new * tl.sum(w[:, None] * v, axis=0)\n"
              "        acc, l, m = acc / l, l, top\n"),
             ("acc / l, mask=offs_d < D)", "acc, mask=offs_d < D)")),
        ),
        Variant(
            "the old one kept, blocks of 32",
            ((_L_MAX, "        m_old = m\n        m = tl.maximum(m_old, tl.max(s, axis=0))\n        m_new = m\n"),
             (_L_L, _L_L.replace("m - m_new", "m_old - m")), (_L_ACC, _L_ACC.replace("m - m_new", "m_old - m")), (_L_M, ""),
             ("BLOCK_N=16, BLOCK_D=BLOCK_D", "BLOCK_N=32, BLOCK_D=BLOCK_D")),
        ),
    ),
)  # fmt: skip


# --------------------------------------------------------------------------------------------- flash_attention.forward
def _forward_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)
    return [
        _case(*make.qkv(1, 1, 1, 16)),
        _case(*make.qkv(2, 32, 16, 16)),
        _case(*make.qkv(1, 32, 48, 16, slope=-0.5), note="scores that fall"),
        _case(*make.qkv(1, 20, 48, 32, slope=0.5), tags="late", note="scores that rise"),
        _case(*make.qkv(2, 37, 29, 16), tags="late"),
        _case(*make.qkv(1, 5, 41, 33, "float16", slope=0.2), tags="late"),
        _case(*make.qkv(2, 33, 17, 80, "bfloat16"), tags="late"),
        _case(*make.qkv(1, 3, 7, 256, "float16"), note="the largest head"),
        _spread(
            _case(*make.qkv(1, 16, 40, 16, slope=20), tags="late large", note="scores up to 780, and a query of zeros")
        ),
        _case(*make.qkv(1, 4, 40, 16, slope=-20), tags="plunge", note="scores down to -780"),
        _case(*_low(make.qkv(1, 32, 40, 16)), tags="low", note="scores of -128"),
        # 16 x 1.8125 again and again: what rounding to bfloat16 takes away goes one way.
        _case(make.normal(1, 1, 16, dtype="bfloat16") * 0, make.normal(1, 256, 16, dtype="bfloat16"),
              make.normal(1, 256, 16, dtype="bfloat16") * 0 + 1.8125, tags="many-blocks", note="all weights and all values alike"),
        _case(*make.qkv(2, 96, 80, 64, "float16"), tags="late"),
    ]  # fmt: skip


def _with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = _scores(q, k)
    return s.softmax(-1) @ v, _lse(s)


def _padded(q: Tensor, k: Tensor, v: Tensor, most: int = 16) -> Tensor:
    """The rows that fill the last block, or the first `most` of them, count as keys of score 0."""
    pad = min(-k.shape[-2] % 16, most)
    k, v = (x.new_zeros(*x.shape[:-2], pad, x.shape[-1]) if pad else x[..., :0, :] for x in (k, v)), (k, v)
    k, v = (_concat(x, zeros) for x, zeros in zip(v, k, strict=True))
    return _attention(q, k, v)


def _all_but_the_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without the last key; NaN where it is the only one."""
    return _attention(q, k[..., :-1, :], v[..., :-1, :]) if k.shape[-2] > 1 else q * math.nan


def _concat(x: Tensor, more: Tensor) -> Tensor:
    import torch

    return torch.cat((x, more), dim=-2)


def _in_float32_alone(evidence: Evidence) -> bool:
    return all("float32" in case.tags for case in evidence.failed)


def _nearly(evidence: Evidence) -> bool:
    """Off by about what tf32 cuts off, and not by more."""
    y, right = evidence.outputs.double(), evidence.expected.double()
    return bool((y - right).abs().max() < 5e-3 * right.abs().max())


def _only_lse(q: Tensor, k: Tensor, wrong: Callable[[Tensor], Tensor]) -> dict:
    return {"y[1]": wrong(_scores(q, k))}


_F_MAX = "    m_new = tl.maximum(m, tl.max(s, axis=1))\n"
_F_BASE = '    base = tl.where(m_new == -float("inf"), 0.0, m_new)\n'
_F_P = "    p = tl.exp(s - base[:, None])\n"
_F_SHRINK = "    shrink = tl.exp(m - base)\n"
_F_ACC = '    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")\n'
_F_RETURN = "    return acc, l * shrink + tl.sum(p, axis=1), m_new\n"
_F_LOOP = "    for start in range(0, T_k, BLOCK_N):\n        k = load_rows(k_ptr, start, T_k, stride,"
_F_V = "        v = load_rows(v_ptr, start, T_k, stride, D, BLOCK_N, BLOCK_D)\n"
_F_S = (
    '        s = tl.dot(q, k.T, input_precision="ieee") * scale\n'
    "        # The rows of k beyond the end are 0, and so would their scores be, which is not nothing.\n"
)
_F_MASK = '        s = tl.where(start + tl.arange(0, BLOCK_N)[None, :] < T_k, s, -float("inf"))\n'
_F_UPDATE = "        acc, l, m = update(acc, l, m, s, v)\n    return acc / l[:, None], m + tl.log(l)\n"
_F_GAP = (
    _F_MAX
    + "    # A query that has seen no key yet: -inf - (-inf) would be NaN.\n"
    + _F_BASE
    + _F_P
    + _F_SHRINK
    + _F_ACC
    + _F_RETURN
)
_F_CALL = "    attention_kernel[(triton.cdiv(T_q, 32), H)]"

FORWARD = KernelExercise(
    id="flash_attention.forward",
    title="FlashAttention, forward, with LSE",
    notebook=NOTEBOOK,
    function="attention",
    label=Label(4, 40, "online softmax around two products; the edge of the keys; what backward needs"),
    hints=(
        "It is the kernel of the detective, with a block of queries in place of one: which of its numbers become columns, "
        "which of its sums become products of matrices, and what tells a key from padding?",
        "`update`: row maxima, exponentials, the factor of the old sums, then the product of the exponentials with v, added "
        "to acc times that factor. Factors of rows stand in a column. `attend`: a loop over blocks of keys, scores times "
        "scale, and -inf for what lies beyond the last key, since the score of a row of zeros is 0. LSE is the logarithm of "
        "the sum of exp(s) itself.",
        "In the loop: k and v of the block, the product of q and k transposed times scale, -inf where the key's number is not "
        "below T_k, update. In update: the larger of m and the row maxima, p = exp of s minus that as a column, the factor exp "
        "of the old m minus the new, acc = acc times the factor as a column plus p (in the dtype of v) times v, l likewise with "
        "the row sums of p. At the end acc over l, and m plus the logarithm of l.",
    ),
    cases=_forward_cases,
    returns=("o", "LSE"),
    reference=_with_lse,
    # 96 queries in three blocks, 80 keys; LSE has 1 / 32 of q's bytes in float16, D 64.
    traffic=Traffic(
        reads=1 + 3 * 2 * 80 / 96,
        writes=1 + 1 / 32,
        flops=lambda q, k, v: 4 * q.shape[0] * 32 * _up(q.shape[1], 32) * 32 * _up(k.shape[1], 32) * _wide(q.shape[2]),
    ),
    misconceptions=(
        Misconception(
            "low-precision-sums",
            "wrong only after many blocks: sums that are rounded to 16 bits again and again lose what is added to them. Of which "
            "dtype is acc when update returns it?",
            when=_only("many-blocks"),
        ),
        Misconception(
            "padding-counts",
            "the rows that fill the last block of keys count as keys: zeros were loaded for them, and their score is 0. What "
            "is exp of that, and which score counts for nothing?",
            gives=_padded,
        ),
        Misconception(
            "one-key-too-many",
            "one key more than there are counts, with a score of 0. T_k keys have the numbers 0 to T_k - 1: which number is "
            "the first that does not count?",
            gives=lambda q, k, v: _padded(q, k, v, most=1),
        ),
        Misconception(
            "last-key-missing",
            "the last key does not count. T_k keys have the numbers 0 to T_k - 1: which number is the first that does not?",
            gives=_all_but_the_last,
        ),
        Misconception("acc-not-rescaled", _LATE_ACC, gives=_walked("acc")),
        Misconception("l-not-rescaled", _LATE_L, gives=_walked("l")),
        Misconception(
            "not-rescaled",
            "neither sum is scaled when the maximum moves: each block's exponentials are right among themselves only",
            gives=_walked("both"),
        ),
        Misconception("maximum-not-carried", _NOT_CARRIED, when=_only("plunge")),
        *(
            Misconception(
                "last-block-wins",
                "those are the results of the last block of keys alone: what was summed before is gone",
                gives=gives,
            )
            for gives in (_walked("last"), _last_block)
        ),
        Misconception(
            "last-block-wins",
            "l is a sum over all blocks, acc the products of the last one alone: to what is p v to be added?",
            gives=_walked("last acc"),
        ),
        Misconception("no-scale", _NO_SCALE, gives=lambda q, k, v: _attention(q * math.sqrt(q.shape[-1]), k, v)),
        Misconception(
            "not-divided",
            "each row is too large by one factor, its sum of exponentials. When is it divided by it?",
            gives=_walked("not divided"),
        ),
        Misconception(
            "lse",
            "o is right, LSE is not: that is the maximum alone. Of what is it the logarithm?",
            gives=lambda q, k, v: _only_lse(q, k, lambda s: s.amax(-1)),
        ),
        Misconception(
            "lse",
            "o is right, LSE is not: that is the logarithm of l, whose exponentials were made after the maximum was "
            "subtracted. How does that come back?",
            gives=lambda q, k, v: _only_lse(q, k, lambda s: s.logsumexp(-1) - s.amax(-1)),
        ),
        Misconception(
            "lse-base-2",
            "o is right, LSE is a power of 2: it is larger by 1 / log(2). Backward expects powers of e",
            gives=lambda q, k, v: _only_lse(q, k, lambda s: s.logsumexp(-1) / math.log(2)),
        ),
        Misconception(
            "lse-base-2",
            "o is right, LSE is not: the logarithm of l is to base 2, and l is a sum of powers of e",
            gives=lambda q, k, v: _only_lse(q, k, lambda s: s.amax(-1) + (s.logsumexp(-1) - s.amax(-1)) / math.log(2)),
        ),
        Misconception(
            "lse",
            "o is right, LSE is not. Which sum is it the logarithm of, and what are its terms in m and l?",
            when=lambda evidence: all((o.wrong.output, o.wrong.kind) == ("y[1]", "values") for o in evidence.outcomes if o.wrong),
        ),
        *(
            Misconception(
                "divided-too-often",
                "acc was divided by l after every block. It is a sum until the last one: when is it divided?",
                gives=_walked(fault),
            )
            for fault in ("divided", "divided, also in the end")
        ),
        Misconception("factor", _FACTOR, when=lambda evidence: evidence.tag("late")),
        Misconception("one-maximum", _ONE_MAXIMUM, when=_one_maximum),
        Misconception("not-low-enough", _NOT_LOW_ENOUGH, when=_only("low")),
        Misconception(
            "overflow",
            "large scores go wrong: their exponentials are no float32. What does online softmax subtract?",
            when=_only("large", "low"),
        ),
        Misconception(
            "tf32",
            "float32 operands were cut to 10 bits of mantissa. Which argument of tl.dot says that float32 means float32?",
            when=lambda evidence: _in_float32_alone(evidence) and _nearly(evidence),
        ),
        Misconception("traffic", "a block of queries needs each key and each value once, and nothing of the scores in memory"),
        Misconception("flops", "two products for each pair of blocks are enough: scores, and their exponentials times v"),
    ),
    wrong=(
        Variant("no mask", ((_F_MASK, ""),), diagnosis="padding-counts"),
        Variant("masked with 0", ((_F_MASK, _F_MASK.replace('-float("inf")', "0.0")),), diagnosis="padding-counts"),
        Variant("up to T_k", ((_F_MASK, _F_MASK.replace("< T_k", "<= T_k")),), diagnosis="one-key-too-many"),
        Variant("below T_k - 1", ((_F_MASK, _F_MASK.replace("< T_k", "< T_k - 1")),), diagnosis="last-key-missing"),
        Variant("no sum", ((_F_ACC, _F_ACC.replace("acc * shrink[:, None], ", "")),), diagnosis="last-block-wins"),
        Variant("maximum of the block alone", ((_F_MAX, "    m_new = tl.max(s, axis=1)\n"),), diagnosis="maximum-not-carried"),
        Variant("one maximum", ((_F_MAX, "    m_new = tl.maximum(m, tl.max(s))\n"),), diagnosis="one-maximum"),
        Variant("log2 of powers of e", ((_F_UPDATE, _F_UPDATE.replace("tl.log(l)", "tl.log2(l)")),), diagnosis="lse-base-2"),
        Variant("acc not scaled", ((_F_ACC, _F_ACC.replace("acc * shrink[:, None]", "acc")),), diagnosis="acc-not-rescaled"),
        Variant("l not scaled", ((_F_RETURN, _F_RETURN.replace("l * shrink", "l")),), diagnosis="l-not-rescaled"),
        Variant("factor forgotten", ((_F_SHRINK, "    shrink = tl.exp(m_new - base)\n"),), diagnosis="not-rescaled"),
        Variant("m never changes", ((_F_RETURN, _F_RETURN.replace("m_new", "m")), (_F_UPDATE, _F_UPDATE.replace("m + tl", "l * 0 + tl"))),
                diagnosis="last-block-wins"),
        Variant("no scale", ((_F_S, _F_S.replace(" * scale", "")),), diagnosis="no-scale"),
        Variant("not divided", ((_F_UPDATE, _F_UPDATE.replace("acc / l[:, None]", "acc")),), diagnosis="not-divided"),
        Variant("LSE is m", ((_F_UPDATE, _F_UPDATE.replace("m + tl.log(l)", "m")),), diagnosis="lse"),
        Variant("LSE with the wrong sign", ((_F_UPDATE, _F_UPDATE.replace("m + tl.log(l)", "m - tl.log(l)")),), diagnosis="lse"),
        Variant("a maximum from 0 on", ((_F_MAX, "    m_new = tl.maximum(tl.maximum(m, 0.0), tl.max(s, axis=1))\n"),), diagnosis="not-low-enough"),
        Variant("exponent turned round", ((_F_SHRINK, '    shrink = tl.where(m == -float("inf"), 0.0, tl.exp(base - m))\n'),), diagnosis="factor"),
        Variant("divided each time and at the end",
                ((_F_RETURN, "    l = l * shrink + tl.sum(p, axis=1)\n    return acc / l[:, None], l, m_new\n"),), diagnosis="divided-too-often"),
        Variant("divided each time",
                ((_F_RETURN, "    l = l * shrink + tl.sum(p, axis=1)\n    return acc / l[:, None], l, m_new\n"),
                 (_F_UPDATE, _F_UPDATE.replace("acc / l[:, None]", "acc"))), diagnosis="divided-too-often"),
        Variant("LSE is log(l)", ((_F_UPDATE, _F_UPDATE.replace("m + tl.log(l)", "tl.log(l)")),), diagnosis="lse"),
        Variant(
            "powers of 2",
            ((_F_S, _F_S.replace(" * scale", " * (scale * 1.4426950408889634)")), (_F_P, _F_P.replace("exp", "exp2")),
             (_F_SHRINK, _F_SHRINK.replace("exp", "exp2")), (_F_UPDATE, _F_UPDATE.replace("tl.log(l)", "tl.log2(l)"))),
            diagnosis="lse-base-2",
        ),
        Variant("no maximum", ((_F_BASE, "    base = tl.zeros_like(m_new)\n"), (_F_SHRINK, "    shrink = tl.zeros_like(m) + 1\n"),
                               (_F_RETURN, _F_RETURN.replace("m_new", "base"))), diagnosis="overflow"),
        Variant("tf32 scores", ((_F_S, _F_S.replace(', input_precision="ieee"', "")),), diagnosis="tf32"),
        Variant("keys loaded twice", ((_F_V, _F_V + _F_V.replace("v = ", "k = ").replace("v_ptr", "k_ptr")),), diagnosis="traffic"),
        Variant("a product too many", ((_F_S, '        s = tl.dot(q, k.T, input_precision="ieee")\n' + _F_S),), diagnosis="flops"),
        Variant("types do not fit", ((_F_ACC, _F_ACC.replace("p.to(v.dtype)", "p")),), diagnosis="exception"),
        Variant("sums in 16 bits", ((_F_ACC, _F_ACC + "    acc = acc.to(v.dtype).to(tl.float32)\n"),), diagnosis="low-precision-sums"),
        Variant("the library", ((_F_CALL, "    return torch.nn.functional.scaled_dot_product_attention(q, k, v), lse\n" + _F_CALL),),
                diagnosis="nan"),
        Variant("scores by torch", ((_F_CALL, "    s = q @ k.mT\n" + _F_CALL),), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant(
            "powers of 2, finite start",
            (
                (_F_GAP,
                 "    top = tl.maximum(tl.maximum(m, -1e30), tl.max(s, axis=1))\n"
                 "    alpha = tl.exp2((m - top) * 1.4426950408889634)\n"
                 "    weights = tl.exp2((s - tl.expand_dims(top, 1)) * 1.4426950408889634)\n"
                 "    l = l * alpha\n"
                 "    l += tl.sum(weights, 1)\n"
                 "    acc = acc * tl.expand_dims(alpha, 1)\n"
                 '    acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")\n'
                 "    return acc, l, top\n"),
            ),
        ),
        Variant(
            "whole blocks first, float32 throughout",
            (
                (_F_ACC, '    acc = acc * shrink[:, None] + tl.dot(p, v.to(tl.float32), input_precision="ieee")\n'),
                (_F_LOOP, "    whole = T_k // BLOCK_N * BLOCK_N\n    q = q.to(tl.float32) * scale\n"
                          "    for start in tl.range(0, T_k, BLOCK_N):\n        k = load_rows(k_ptr, start, T_k, stride,"),
                (_F_S, '        s = tl.dot(q, tl.trans(k).to(tl.float32), input_precision="ieee")\n'),
                (_F_MASK, "        if start >= whole:\n"
                          '            s += tl.where(tl.arange(0, BLOCK_N)[None, :] < T_k - start, 0.0, -float("inf"))\n'),
                (_F_UPDATE, "        acc, l, m = update(acc, l, m, s, v)\n"
                            "    inverse = 1.0 / l\n    return acc * inverse[:, None], tl.log(l) + m\n"),
            ),
        ),
        Variant("keys by 32", (('"BLOCK_M": 32, "BLOCK_N": 16', '"BLOCK_M": 32, "BLOCK_N": 32'),)),
        Variant(
            "backwards, without update",
            (
                (_F_LOOP, "    blocks = tl.cdiv(T_k, BLOCK_N)\n    for i in range(0, blocks):\n"
                          "        start = (blocks - 1 - i) * BLOCK_N\n        k = load_rows(k_ptr, start, T_k, stride,"),
                (_F_UPDATE,
                 "        new = tl.maximum(m, tl.max(s, 1))\n"
                 "        w = tl.exp(s - new[:, None])\n"
                 "        f = tl.exp(m - new)\n"
                 "        m = new\n"
                 '        acc = acc * f[:, None] + tl.dot(w.to(v.dtype), v, input_precision="ieee")\n'
                 "        l = tl.fma(l, f, tl.sum(w, 1))\n"
                 "    return acc / l[:, None], m + tl.log(l)\n"),
            ),
        ),
    ),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- flash_attention.causal
def _seen(q: Tensor, k: Tensor, shift: int | None = None) -> Tensor:
    """[T_q, T_k] of bool: query i sees the keys up to i + shift, T_k - T_q unless said."""
    import torch

    T_q, T_k = q.shape[-2], k.shape[-2]
    shift = T_k - T_q if shift is None else shift
    return torch.arange(T_k) <= torch.arange(T_q)[:, None] + shift


def _masked(q: Tensor, k: Tensor, v: Tensor, shift: int | None = None) -> tuple[Tensor, Tensor]:
    import torch

    s = _scores(q, k).masked_fill(~_seen(q, k, shift), -math.inf)
    lse = _lse(s)
    p = torch.where(s.isneginf(), 0, torch.exp(s - torch.nan_to_num(lse, neginf=0).to(s.dtype)[..., None]))
    return p @ v, lse


def _causal_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)

    def case(H: int, T_q: int, T_k: int, D: int, dtype: str = "float32", slope: float = 0.0, tags: str = "") -> Case:
        tags += " unequal" if T_q != T_k else ""
        tags += " unseen" if T_q > T_k else ""
        return _case(*make.qkv(H, T_q, T_k, D, dtype, slope), tags=tags)

    return [
        case(1, 1, 1, 16),
        case(1, 16, 16, 16),
        case(2, 40, 40, 20, slope=0.3),
        case(1, 19, 19, 33, "float16"),
        case(1, 1, 37, 16),
        case(1, 20, 53, 16, "bfloat16"),
        case(1, 32, 80, 32),
        case(1, 37, 20, 16),
        case(2, 40, 5, 16, "float16"),
        case(1, 112, 112, 16, slope=0.1, tags="largest"),
    ]


def _visible_bytes(T_q: int, T_k: int, D: int, itemsize: int) -> int:
    """Of k and v together: for each 16 queries all blocks of 16 keys of which one is seen."""
    rows = 0
    for first in range(0, T_q, 16):
        behind = min(first + 16, T_q) + T_k - T_q  # behind the last key that is seen
        rows += min(_up(max(behind, 0), 16) * 16, T_k)
    return 2 * rows * D * itemsize


def _causal_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    q, k, _ = case.args
    (H, T_q, D), T_k = q.shape, k.shape[1]
    read = sum(launch.load_bytes for launch in launches) - q.numel() * q.element_size()
    enough = H * _visible_bytes(T_q, T_k, D, q.element_size())
    if read <= 1.02 * enough:
        return _all_keys_at_once(T_k, launches)
    everything = H * _up(T_q, 16) * 2 * T_k * D * q.element_size()
    return (
        "blocks",
        f"{read:,} bytes of k and v are loaded where {enough:,} are enough; all blocks for all queries are {everything:,}. "
        "Behind which key does the last query of a block see nothing any more?",
    )


_C_LAST = "    last = offs_m + T_k - T_q  # the last key that each query sees; negative where it sees none\n"
_C_END = "    end = tl.minimum(start_m + BLOCK_M, T_q) + T_k - T_q  # behind the last key that any of the block's queries sees\n"
_C_LOOP = "    for start in range(0, end, BLOCK_N):\n"
_C_MASK = '        s = tl.where(keys[None, :] <= last[:, None], s, -float("inf"))\n'
_C_O = "    o = acc / tl.where(l == 0, 1.0, l)[:, None]\n"
_C_LSE = "    lse = m + tl.log(l)\n"
_C_INIT = '    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)\n    # BEGIN SOLUTION\n    last ='
_C_S = '        s = tl.dot(q, k.T, input_precision="ieee") * scale\n        keys ='
_C_CALL = "    causal_kernel[(triton.cdiv(T_q, 16), H)]"


def _walked_to(q: Tensor, k: Tensor, v: Tensor, past: int = 0, end: str = "right") -> Tensor:
    """o in blocks of 16 queries, each of which sees `past` keys more than it should, rows of zeros behind the last key among
    them. The walk ends where it should, before the last block that is not whole, or before the block of the first query."""
    import torch

    T_q, T_k = q.shape[-2], k.shape[-2]
    k, v = (_concat(x, x.new_zeros(*x.shape[:-2], -T_k % 16, x.shape[-1])) for x in (k, v))
    first, keys = torch.arange(T_q) // 16 * 16, torch.arange(k.shape[-2])
    last = (first + 16).clamp(max=T_q) + T_k - T_q
    stop = {"right": -(-last // 16) * 16, "whole": last // 16 * 16, "first": -(-(first + T_k - T_q) // 16) * 16}[end]
    seen = (keys <= torch.arange(T_q)[:, None] + T_k - T_q + past) & (keys < stop[:, None])
    return torch.nan_to_num(_scores(q, k).masked_fill(~seen, -math.inf).softmax(-1)) @ v


def _or_nan(gives: Callable[..., Tensor]) -> Callable[[Evidence], bool]:
    """Whether an idea explains o where there are more keys than queries, or as many; where it lets a query see nothing, the
    learner's NaN is as good as 0."""

    def when(evidence: Evidence) -> bool:
        import torch

        checked = [o for o in evidence.outcomes if o.wrong and o.case.args[0].shape[1] <= o.case.args[1].shape[1]]
        for outcome in checked:
            y = outcome.reply.outputs["y[0]"]
            eps, wrong = torch.finfo(y.dtype).eps, gives(*(x.double() for x in outcome.case.args))
            if not torch.allclose(
                y.nan_to_num(0).double(), wrong, rtol=16 * eps, atol=16 * eps * float(wrong.abs().max())
            ):
                return False
        return bool(checked)

    return when


CAUSAL = KernelExercise(
    id="flash_attention.causal",
    title="Causal, with lengths that differ",
    notebook=NOTEBOOK,
    function="attention_causal",
    label=Label(4, 35, "which block is whole, cut or not there; which key stands beside which query; rows that see nothing"),
    hints=(
        "Draw the scores of 2 queries and 5 keys, and of 5 queries and 2 keys, with the last query above the last key. Which "
        "places count? Which rows have none, and what do your running maximum and sum hold for them at the end?",
        "Query i stands beside key i + T_k - T_q. The walk over the keys ends behind what the last query of the block sees, "
        "which may be before it begins. In the block at the diagonal some places become -inf. A query that sees nothing has "
        "m = -inf and l = 0: two places make NaN of it, an exponent and a division.",
        "The loop of your forward kernel, up to the smaller of start_m + BLOCK_M and T_q, plus T_k - T_q. -inf where the key's "
        "number is larger than the query's plus T_k - T_q. Where the maximum is -inf subtract 0 from the scores, where l is "
        "0 divide by 1; the logarithm of 0 is the -inf that LSE should be.",
    ),
    cases=_causal_cases,
    returns=("o", "LSE"),
    reference=_masked,
    traffic=Traffic(reads=1 + 2 * 16 * 28 / 112, writes=1 + 1 / 16),  # 28 of 49 pairs of blocks
    launch_rule=_causal_rule,
    misconceptions=(
        Misconception(
            "top-left",
            "query 0 stands beside key 0 here, so that the last query does not see the last keys, or sees what is not there. "
            "With 1 query and 37 keys, which is what a model does at every step it writes, how many are seen?",
            gives=lambda q, k, v: _masked(q, k, v, 0)[0],
        ),
        Misconception(
            "not-itself",
            "no query sees the key it stands beside. Is the key of a token part of its own past?",
            when=_or_nan(lambda q, k, v: _masked(q, k, v, k.shape[-2] - q.shape[-2] - 1)[0]),
        ),
        Misconception(
            "one-too-many",
            "every query sees the key behind its own as well. Compare the two numbers: may they be equal, may one be larger?",
            when=_or_nan(lambda q, k, v: _walked_to(q, k, v, past=1)),
        ),
        Misconception(
            "top-left",
            "query 0 stands beside key 0 in your mask, though not where the walk ends. With 1 query and 37 keys, which is what a "
            "model does at every step it writes, how many are seen?",
            when=_or_nan(lambda q, k, v: _masked(q, k, v, 0)[0]),
        ),
        Misconception(
            "wrong-sign",
            "the keys are shifted the wrong way: with more keys than queries the last query sees fewer of them, not all. Which "
            "length is subtracted from which?",
            when=_or_nan(lambda q, k, v: _masked(q, k, v, q.shape[-2] - k.shape[-2])[0]),
        ),
        Misconception(
            "nothing-masked",
            "every query sees every key. Where does the mask come in?",
            gives=_attention,
        ),
        *(
            Misconception(
                "diagonal-block",
                "the block that the diagonal goes through is missing. How many blocks hold a key that some query of the block "
                "sees?",
                when=_or_nan(lambda q, k, v, end=end: _walked_to(q, k, v, end=end)),
            )
            for end in ("whole", "first")
        ),
        Misconception(
            "unseen-rows",
            "a query that sees no key has l = 0 and m = -inf: 0 / 0 is NaN, and so is -inf - (-inf). What is its result to be?",
            when=lambda evidence: evidence.tag("unseen") and evidence.kind == "nan",
        ),
        Misconception(
            "unseen-rows",
            "only queries that see no key are wrong: a finite number in place of -inf makes all keys equal where nothing else "
            "counts, and log(0) is -inf for a reason",
            when=lambda evidence: evidence.tag("unseen"),
        ),
        Misconception("traffic", "what is loaded besides k and v is q, once"),
    ),
    wrong=(
        Variant("first beside first", ((_C_LAST, "    last = offs_m\n"), (_C_END, "    end = tl.minimum(start_m + BLOCK_M, T_k)\n"),
                                       (_C_MASK, _C_MASK.replace("keys[None, :] <= last[:, None]",
                                                                 "(keys[None, :] <= last[:, None]) & (keys[None, :] < T_k)"))),
                diagnosis="top-left"),
        Variant("before, not up to", ((_C_MASK, _C_MASK.replace("<=", "<")),), diagnosis="not-itself"),
        Variant("before, and divided by 0", ((_C_MASK, _C_MASK.replace("<=", "<")), (_C_O, "    o = acc / l[:, None]\n")), diagnosis="not-itself"),
        Variant("one key more", ((_C_MASK, _C_MASK.replace("keys[None, :] <=", "keys[None, :] - 1 <=")),), diagnosis="one-too-many"),
        Variant("first beside first in the mask", ((_C_MASK, _C_MASK.replace("last[:, None]", "offs_m[:, None]")),), diagnosis="top-left"),
        Variant("lengths exchanged", ((_C_MASK, _C_MASK.replace("last[:, None]", "(offs_m + T_q - T_k)[:, None]")),), diagnosis="wrong-sign"),
        Variant("walk ends before the block", ((_C_LOOP, _C_LOOP.replace("end", "start_m + T_k - T_q")),), diagnosis="diagonal-block"),
        Variant("no mask", ((_C_MASK, '        s = tl.where(keys[None, :] < T_k, s, -float("inf"))\n'), (_C_LOOP, _C_LOOP.replace("end", "T_k"))),
                diagnosis="nothing-masked"),
        Variant("whole blocks", ((_C_LOOP, _C_LOOP.replace("end", "end // BLOCK_N * BLOCK_N")),), diagnosis="diagonal-block"),
        Variant("divides by 0", ((_C_O, "    o = acc / l[:, None]\n"),), diagnosis="unseen-rows"),
        Variant("-inf minus -inf", ((_F_BASE, "    base = m_new\n"), (_C_O, "    o = acc / l[:, None]\n")), diagnosis="unseen-rows"),
        Variant("a large number for -inf", ((_C_MASK, _C_MASK.replace('-float("inf")', "-1e30")),), diagnosis="unseen-rows"),
        Variant("LSE 0", ((_C_LSE, "    lse = tl.where(l == 0, 0.0, m + tl.log(l))\n"),), diagnosis="unseen-rows"),
        Variant("o is right, LSE of a small sum", ((_C_LSE, "    lse = m + tl.log(l + 1e-20)\n"), (_C_INIT, _C_INIT.replace('-float("inf")', "-1e30"))),
                diagnosis="unseen-rows"),
        Variant("all blocks", ((_C_LOOP, _C_LOOP.replace("end", "T_k")),), diagnosis="blocks"),
        Variant("one block more", ((_C_LOOP, _C_LOOP.replace("end", "end + BLOCK_N")),), diagnosis="blocks"),
        Variant("a mask by torch", ((_C_CALL, "    q = q * 1.0\n" + _C_CALL),), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant(
            "finite start",
            (
                (_F_BASE, "    base = m_new\n"),
                (_C_INIT, '    m = tl.full((BLOCK_M,), -1e38, tl.float32)\n    # BEGIN SOLUTION\n    last ='),
                (_C_O, "    o = tl.where(l[:, None] > 0, acc / l[:, None], 0.0)\n"),
                (_C_LSE, "    lse = tl.log(l) + m\n"),
            ),
        ),
        Variant(
            "whole blocks apart",
            (
                (_C_LOOP, "    whole = tl.maximum(start_m + T_k - T_q + 1, 0) // BLOCK_N * BLOCK_N\n"
                          "    for start in tl.range(0, tl.cdiv(tl.maximum(end, 0), BLOCK_N) * BLOCK_N, BLOCK_N):\n"),
                (_C_MASK, "        if start >= whole:\n"
                          "            gap = offs_m[:, None] - keys[None, :]\n"
                          '            s = tl.where(gap >= T_q - T_k, s, float("-inf"))\n'),
                (_C_O, "    o = acc * (1.0 / tl.maximum(l, 1e-37))[:, None]\n"),
                (_C_LSE, '    lse = tl.where(l == 0, -float("inf"), m + tl.log(l))\n'),
            ),
        ),
        Variant(
            "to the end of the block of queries",
            ((_C_LOOP, _C_LOOP.replace("end", "start_m + BLOCK_M + T_k - T_q")),),
        ),
        Variant(
            "from the diagonal back",
            (
                (_C_LOOP, "    n = tl.cdiv(end, BLOCK_N)\n    for j in range(0, n):\n        start = (n - 1 - j) * BLOCK_N\n"),
                (_C_S, '        s = scale * tl.dot(q, tl.trans(k), input_precision="ieee")\n        keys ='),
            ),
        ),
    ),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- flash_attention.packed
def _packed_case(
    make: _Heads, lengths: list[tuple[int, int]], H: int, H_kv: int, D: int, dtype: str = "float32"
) -> Case:
    torch = make.torch
    total_q, total_k = (sum(pair[i] for pair in lengths) for i in (0, 1))
    q, k, v = make.normal(total_q, H, D), make.normal(total_k, H_kv, D), make.normal(total_k, H_kv, D) + 1
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v))
    cu = [torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0).int() for i in (0, 1)]
    tags = {dtype} | ({"gqa"} if H_kv != H else set()) | ({"sequences"} if len(lengths) > 1 else set())
    tags |= {"unequal"} if any(a != b for a, b in lengths) else set()
    tags |= {"no-query"} if any(a == 0 for a, _ in lengths) else set()
    shown = ", ".join(f"{a}/{b}" for a, b in lengths)
    name = f"queries/keys {shown}; {H} heads on {H_kv}, D {D}, {dtype}"
    return Case(name, (q, k, v, *cu, max(a for a, _ in lengths)), frozenset(tags))


_PACKED_LARGEST = ([(48, 48), (16, 33), (7, 16)], 4, 2, 32)


def _packed_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)
    return [
        _packed_case(make, [(16, 16)], 1, 1, 16),
        _packed_case(make, [(21, 21)], 2, 2, 20),
        _packed_case(make, [(32, 32)], 4, 2, 16),
        _packed_case(make, [(5, 5), (19, 19)], 1, 1, 16),
        _packed_case(make, [(16, 16), (16, 16)], 2, 2, 16, "float16"),
        _packed_case(make, [(3, 20), (1, 9), (18, 18)], 2, 1, 16),
        _packed_case(make, [(4, 7), (0, 5), (17, 6)], 6, 2, 16, "bfloat16"),
        _packed_case(make, *_PACKED_LARGEST),
    ]


def _packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: int,
    heads: Callable[[int, int, int], int] | None = None, spans: Callable | None = None,
) -> Tensor:  # fmt: skip
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


def _packed_traffic() -> Traffic:
    """Of the largest case, in units of q."""
    lengths, H, _, D = _PACKED_LARGEST
    elements = sum(a for a, _ in lengths) * H * D
    read = sum(2 * _up(a, 16) * b * H * D for a, b in lengths)
    cu = 4 * H * 3 * _up(48, 16)  # four numbers for each program, as large as an element
    return Traffic(reads=1 + (read + cu) / elements, writes=1.0, slack=0.02)


_P_FIRST = "    first_k = tl.load(cu_k_ptr + sequence)\n"
_P_TQ = "    T_q = tl.load(cu_q_ptr + sequence + 1) - first_q\n"
_P_TK = "    T_k = tl.load(cu_k_ptr + sequence + 1) - first_k\n"
_P_RETURN = "    if start_m >= T_q:  # a sequence shorter than the longest\n        return\n"
_P_STRIDES = "    stride_q, stride_k = H * D, H_kv * D\n"
_P_HEAD = "    head_k = head // (H // H_kv)\n"
_P_K = "    k_ptr += first_k.to(tl.int64) * stride_k + head_k * D\n"
_P_CALL = "    packed_kernel[grid]"

PACKED = KernelExercise(
    id="flash_attention.packed",
    title="Packed sequences, shared heads of keys",
    notebook=NOTEBOOK,
    function="attention_packed",
    label=Label(3, 25, "lengths and places from cu_seqlens; one head of k for several of q without a copy"),
    hints=(
        "Program (block, head, sequence): what must it know before it can call `attend`? And how far apart are two rows of one "
        "head when the heads of a token lie side by side?",
        "cu_q and cu_k hold beginnings; the next beginning is the end. Row t of head h begins t times the row's length plus "
        "h times D after the start, and rows of q and of k have different lengths. Query heads share a head of k in groups of H / "
        "H_kv neighbours. The grid has room for the longest sequence; a program beyond a shorter one has nothing to do.",
        "Load both beginnings and both next ones of your sequence; the differences are T_q and T_k. Return if the block begins "
        "at or behind T_q. The row strides are H D and H_kv D. The head of k is the program's head divided by the size of a "
        "group, rounded down. Each pointer moves on by its beginning times its stride, plus its head times D.",
    ),
    cases=_packed_cases,
    returns=("o",),
    reference=_packed,
    traffic=_packed_traffic(),
    misconceptions=(
        Misconception(
            "heads-interleaved",
            "the head of k is the remainder of the head of q here. Neighbours share: which head of k do the query heads 0, 1 and "
            "2 of 6 use, if there are two?",
            gives=lambda *args: _packed(*args, heads=lambda h, H, H_kv: h % H_kv),
        ),
        Misconception(
            "wrong-group",
            "query head h uses head h // H_kv of k here. How many query heads share one of them: H_kv, or H / H_kv?",
            gives=lambda *args: _packed(*args, heads=lambda h, H, H_kv: min(h // H_kv, H_kv - 1)),
        ),
        Misconception(
            "first-head",
            "every query head uses head 0 of k and v. Which group is it in?",
            gives=lambda *args: _packed(*args, heads=lambda h, H, H_kv: 0),
        ),
        Misconception(
            "other-sequences",
            "the queries see keys of other sequences: one text reads another. Where do the keys of a sequence end?",
            gives=lambda *args: _packed(*args, spans=lambda i, cu_q, cu_k: (0, cu_k[-1])),
        ),
        Misconception(
            "other-sequences",
            "the queries see the keys of the sequences behind their own as well: one text reads another. Where do the keys of a "
            "sequence end?",
            gives=lambda *args: _packed(*args, spans=lambda i, cu_q, cu_k: (cu_k[i], cu_k[-1])),
        ),
        Misconception(
            "other-sequences",
            "the queries see the keys of the sequences before their own as well: one text reads another. Where do the keys of a "
            "sequence begin?",
            gives=lambda *args: _packed(*args, spans=lambda i, cu_q, cu_k: (0, cu_k[i + 1])),
        ),
        Misconception(
            "first-sequence",
            "all queries see the first keys of the batch. Where do those of their own sequence begin?",
            gives=lambda *args: _packed(*args, spans=lambda i, cu_q, cu_k: (0, cu_k[i + 1] - cu_k[i])),
        ),
        Misconception(
            "lengths-of-q",
            "the keys were taken to lie where the queries lie. The two have beginnings of their own: which of the two arrays "
            "says where a sequence's keys are?",
            when=lambda evidence: evidence.tag("unequal"),
        ),
        Misconception(
            "out-of-bounds", "which row does the sequence begin at, how far apart are its rows, and how many has it?"
        ),
        Misconception("race", "two programs store the same rows: where does each sequence begin, and where does it end?"),
        Misconception("traffic", "shared heads need no copy, and a program whose block begins behind the end of its sequence has nothing to load"),
    ),
    wrong=(
        Variant("remainder", ((_P_HEAD, "    head_k = head % H_kv\n"),), diagnosis="heads-interleaved"),
        Variant("groups of H_kv", ((_P_HEAD, "    head_k = head // H_kv\n"),), diagnosis="wrong-group"),
        Variant("returns one block late", ((_P_RETURN, _P_RETURN.replace(">=", ">")),), diagnosis="traffic"),
        Variant("head 0", ((_P_HEAD, "    head_k = head * 0\n"),), diagnosis="first-head"),
        Variant("all keys", ((_P_FIRST, "    first_k = tl.load(cu_k_ptr)\n"),
                             (_P_TK, "    T_k = tl.load(cu_k_ptr + tl.num_programs(2))\n")), diagnosis="other-sequences"),
        Variant("to the end", ((_P_TK, "    T_k = tl.load(cu_k_ptr + tl.num_programs(2)) - first_k\n"),), diagnosis="other-sequences"),
        Variant("ends for lengths", ((_P_FIRST, "    first_k = tl.load(cu_k_ptr)\n"),), diagnosis="other-sequences"),
        Variant("no beginning", ((_P_K, "    k_ptr += head_k * D\n"), ("    v_ptr += first_k.to(tl.int64) * stride_k + head_k * D\n", "    v_ptr += head_k * D\n")),
                diagnosis="first-sequence"),
        Variant("beginnings of q", ((_P_FIRST, "    first_k = tl.load(cu_q_ptr + sequence)\n"),
                                    (_P_TK, "    T_k = tl.load(cu_q_ptr + sequence + 1) - first_k\n")), diagnosis="lengths-of-q"),
        Variant("rows of q's length", ((_P_STRIDES, "    stride_q, stride_k = H * D, H * D\n"),), diagnosis="out-of-bounds"),
        Variant("the same head", ((_P_HEAD, "    head_k = head\n"),), diagnosis="out-of-bounds"),
        Variant("heads apart", ((_P_STRIDES, "    stride_q, stride_k = D, D\n"),), diagnosis="race"),
        Variant("nobody returns", ((_P_RETURN, ""),), diagnosis="traffic"),
        Variant("ends of q for lengths", ((_P_TQ, "    T_q = tl.load(cu_q_ptr + sequence + 1)\n"),), diagnosis="out-of-bounds"),
        Variant("repeated by torch", ((_P_CALL, "    k, v = (x.repeat_interleave(H // H_kv, 1) for x in (k, v))\n    H_kv = H\n" + _P_CALL),),
                diagnosis="traffic"),
        Variant("copied for all", ((_P_CALL, "    k, v = (x[:, :, None].expand(-1, -1, H // H_kv, -1).contiguous() for x in (k, v))\n"
                                            "    H_kv = H\n" + _P_CALL),), diagnosis="traffic"),
    ),
    right=(
        Variant(
            "pointers step by step",
            (
                (_P_TQ + _P_TK, "    T_q, T_k = tl.load(cu_q_ptr + sequence + 1), tl.load(cu_k_ptr + sequence + 1)\n"
                                "    T_q -= first_q\n    T_k -= first_k\n"),
                (_P_RETURN, "    if T_q <= start_m:\n        return\n"),
                (_P_HEAD, "    head_k = head * H_kv // H\n"),
                (_P_STRIDES, "    stride_k = D * H_kv\n    stride_q = D * H\n"),
            ),
        ),
        Variant(
            "nothing loaded instead of a return",
            ((_P_RETURN, "    T_k = tl.where(start_m < T_q, T_k, 0)\n"),),
        ),
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------- flash_attention.recompute
def _gradients(q, k, v, o, lse, do, *_, fault: str = "", step: int = 16) -> tuple:
    """dq, dk and dv from what forward kept, with whole matrices; `fault` is a mistake in it."""
    import torch

    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.exp(_scores(q, k) - lse.to(q.dtype)[..., None])
    if fault == "p without scale":
        p = torch.exp(q @ k.mT - lse.to(q.dtype)[..., None])
    if fault == "p of a block":
        p = torch.cat([s.softmax(-1) for s in _scores(q, k).split(step, -1)], -1)
    dp = do @ v.mT
    delta = (o * do).sum(-1, keepdim=True)
    if fault == "no delta":
        delta = delta * 0
    if fault == "delta of a block":
        delta = torch.cat(
            [
                (a * b).sum(-1, keepdim=True).expand_as(a)
                for a, b in zip(p.split(step, -1), dp.split(step, -1), strict=True)
            ],
            -1,
        )
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

    def case(T_q: int, T_k: int, D: int, BLOCK: int = 16, slope: float = 0.0, transposed: bool = False) -> Case:
        q, k, v = (x[0].double() for x in make.qkv(1, T_q, T_k, D, slope=slope))
        do = make.normal(T_q, D) + 0.5
        if T_q == 1:  # as in gradients: a single weight near 1 leaves differences of nearly equal numbers
            q, do = q / 4, do - do.mean(-1, keepdim=True)
        o, lse = _with_lse(q, k, v)
        q, k, v, o, lse = (x.float() for x in (q, k, v, o, lse))
        note = f"BLOCK {BLOCK}" + (", v transposed in memory" if transposed else "")
        v = v.mT.contiguous().mT if transposed else v
        return _case(q, k, v, o, lse, do, BLOCK, note=note)

    return [
        case(1, 5, 8),
        case(16, 16, 16),
        case(20, 33, 16),
        case(33, 20, 24, 32),
        case(17, 70, 40, slope=0.3),
        case(384, 64, 16, transposed=True),
        case(3, 350, 4, 4, transposed=True),  # so many keys that one query's scores are more than 16 blocks
    ]


def _recompute_memory(case: Case, peak_bytes: int) -> tuple[str, str] | None:
    q, k = case.args[:2]
    allowed = "with a tensor as large as q and two numbers for each query,"
    return _held(case, peak_bytes, q.numel() + 2 * k.numel(), q.numel() + 2 * len(q), allowed)


def _faulty(fault: str) -> Callable[..., tuple]:
    def gives(*args: Any) -> tuple:
        *tensors, BLOCK = args
        return tuple(x.float() for x in _gradients(*(x.double() for x in tensors), fault=fault, step=BLOCK))

    return gives


_G_DELTA = "        delta = (o[i : i + BLOCK] * do_rows).sum(1, keepdim=True)\n"
_G_P = "            p = torch.exp(rows @ keys.T * scale - lse[i : i + BLOCK, None])\n"
_G_DV = "            dv[j : j + BLOCK] += p.T @ do_rows\n"
_G_DS = "            ds = p * (do_rows @ values.T - delta)\n"
_G_DQ = "            dq[i : i + BLOCK] += ds @ keys * scale\n"
_G_DK = "            dk[j : j + BLOCK] += ds.T @ rows * scale\n"
_G_I = "    for i in range(0, T_q, BLOCK):\n        rows, do_rows ="
_P_WITHOUT_SCALE = "LSE is the logarithm of the sum of exp(scale q k^T), and your p is the exponential of q k^T - LSE. What is missing?"
_NO_DELTA = "ds is p dp alone. Raising one score lowers all other weights of the row, since they add up to one: which term says so?"
_BLOCK_DELTA = (
    "delta was summed over a block of keys. It belongs to the whole row; which product that forward kept is that sum?"
)

RECOMPUTE = FunctionExercise(
    id="flash_attention.recompute",
    title="Backward without a matrix of scores",
    notebook=NOTEBOOK,
    function="gradient_tiles",
    label=Label(4, 35, "scores computed again from LSE; delta = sum(o do) in place of a sum over all keys"),
    hints=(
        "Backward of a softmax needs p and, for each row, the sum of p dp over all keys. You hold a block of p at a time. "
        "From which two tensors that are there anyway does that sum follow?",
        "p = exp(s - LSE) is final at once: no maximum, no second pass. The sum over keys of p dp is the sum over D of o do. "
        "Then ds = p (dp - delta), and four products give dp, dv, dq and dk. Each pair of blocks adds to all three results.",
        "For each block of queries delta is the row sum of o times do. For each block of keys: p, the exponential of the scores "
        "times scale minus LSE; dv gets p transposed times do; dp is do times v transposed; ds is p times dp minus delta; dq gets "
        "ds times k times scale, dk gets ds transposed times q times scale.",
    ),
    cases=_recompute_cases,
    expected=lambda *args: _faulty("")(*args),
    tolerance=1e-5,
    memory_rule=_recompute_memory,
    misconceptions=(
        Misconception("no-delta", _NO_DELTA, gives=_faulty("no delta")),
        Misconception("delta-of-a-block", _BLOCK_DELTA, gives=_faulty("delta of a block")),
        Misconception(
            "delta-without-o",
            "delta is the sum of do alone. It is the sum over the keys of p dp: which weights are missing?",
            gives=_faulty("delta without o"),
        ),
        Misconception(
            "no-scale",
            "dq and dk are off by sqrt(D). s = scale q k^T: what is the derivative of s by q?",
            gives=_faulty("no scale"),
        ),
        *(
            Misconception(
                "no-scale",
                f"{name} is off by sqrt(D), the others are right. s = scale q k^T: what is the derivative of s by {name[1]}?",
                gives=lambda *args, i=i: (*_faulty("")(*args)[:i], _faulty("no scale")(*args)[i], *_faulty("")(*args)[i + 1 :]),
            )
            for i, name in enumerate(("dq", "dk"))
        ),
        Misconception(
            "p-of-a-block",
            "p was normalised within a block of keys. What does LSE stand for?",
            gives=_faulty("p of a block"),
        ),
        Misconception("p-without-scale", _P_WITHOUT_SCALE, gives=_faulty("p without scale")),
        Misconception(
            "scaled-q",
            "dk has the scale twice, dq once. Which q does ds meet, the one with the scale or the one without?",
            gives=lambda *args: tuple(
                x / math.sqrt(args[0].shape[1]) if i == 1 else x for i, x in enumerate(_faulty("")(*args))
            ),
        ),
        Misconception(
            "no-p",
            "ds is dp - delta: a key with no weight then gets as much as one with all of it",
            gives=_faulty("no p"),
        ),
        Misconception(
            "last-block-wins",
            "with more than one block of queries or of keys a part is lost. Which of the results gets something from every pair?",
            when=lambda evidence: all(
                max(case.args[0].shape[0], case.args[1].shape[0]) > case.args[-1] for case in evidence.failed
            ),
        ),
    ),
    wrong=(
        Variant("no delta", ((_G_DS, _G_DS.replace(" - delta", "")),), diagnosis="no-delta"),
        Variant(
            "delta of the block",
            ((_G_DS, "            dp = do_rows @ values.T\n            ds = p * (dp - (p * dp).sum(1, keepdim=True))\n"),),
            diagnosis="delta-of-a-block",
        ),
        Variant("delta without o", ((_G_DELTA, "        delta = do_rows.sum(1, keepdim=True)\n"),), diagnosis="delta-without-o"),
        Variant("no scale", ((_G_DQ, _G_DQ.replace(" * scale", "")), (_G_DK, _G_DK.replace(" * scale", ""))), diagnosis="no-scale"),
        Variant("dq without scale", ((_G_DQ, _G_DQ.replace(" * scale", "")),), diagnosis="no-scale"),
        Variant("dk without scale", ((_G_DK, _G_DK.replace(" * scale", "")),), diagnosis="no-scale"),
        Variant("softmax of the block", ((_G_P, "            p = torch.softmax(rows @ keys.T * scale, 1)\n"),), diagnosis="p-of-a-block"),
        Variant("p without scale", ((_G_P, _G_P.replace(" * scale", "")),), diagnosis="p-without-scale"),
        Variant("dk of the scaled q", ((_G_DK, _G_DK.replace("rows * scale", "(rows * scale) * scale")),), diagnosis="scaled-q"),
        Variant("without p", ((_G_DS, _G_DS.replace("p * (do_rows @ values.T - delta)", "do_rows @ values.T - delta")),), diagnosis="no-p"),
        Variant("dk assigned", ((_G_DK, _G_DK.replace("+=", "=")),), diagnosis="last-block-wins"),
        Variant("dq assigned", ((_G_DQ, _G_DQ.replace("+=", "=")),), diagnosis="last-block-wins"),
        Variant("dv of ds", ((_G_DV, ""), (_G_DS, _G_DS + "            dv[j : j + BLOCK] += ds.T @ do_rows\n")), diagnosis="values"),
        Variant(
            "whole matrices",
            ((_G_I, "    p = torch.exp(q @ k.T * scale - lse[:, None])\n"
                    "    ds = p * (do @ v.T - (o * do).sum(1, keepdim=True))\n"
                    "    return ds @ k * scale, ds.T @ q * scale, p.T @ do\n" + _G_I),),
            diagnosis="memory",
        ),
        Variant(
            "all keys for a block of queries",
            ((_G_I, "    for i in range(0, T_q, BLOCK):\n"
                    "        at = slice(i, i + BLOCK)\n"
                    "        p = torch.exp(q[at] @ k.T * scale - lse[at, None])\n"
                    "        ds = p * (do[at] @ v.T - (o[at] * do[at]).sum(1, keepdim=True)) * scale\n"
                    "        dq[at] = ds @ k\n        dk += ds.T @ q[at]\n        dv += p.T @ do[at]\n"
                    "    return dq, dk, dv\n" + _G_I),),
            diagnosis="memory",
        ),
        Variant(
            "all keys for a query",
            ((_G_I, "    for i in range(T_q):\n"
                    "        p = torch.exp(k @ q[i] * scale - lse[i])\n"
                    "        ds = p * (v @ do[i] - o[i] @ do[i]) * scale\n"
                    "        dq[i] = ds @ k\n        dk.addr_(ds, q[i])\n        dv.addr_(p, do[i])\n"
                    "    return dq, dk, dv\n" + _G_I),),
            diagnosis="memory",
        ),
        Variant(
            "autograd, of a copy",
            source="""import torch


def gradient_tiles(q, k, v, o, lse, do, BLOCK):
    q, k, v = (x[None, None].detach().contiguous().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return tuple(x[0, 0] for x in torch.autograd.grad(y, (q, k, v), do[None, None]))
""",
            diagnosis="memory",
        ),
        Variant(
            "autograd",
            source="""import torch


def gradient_tiles(q, k, v, o, lse, do, BLOCK):
    q, k, v = (x[None, None].detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return tuple(x[0, 0] for x in torch.autograd.grad(y, (q, k, v), do[None, None]))
""",
            diagnosis="memory",
        ),
    ),
    right=(
        Variant(
            "keys outside",
            source="""import torch


def gradient_tiles(q, k, v, o, lse, do, BLOCK):
    root = q.shape[1] ** 0.5
    delta = torch.einsum("td,td->t", o, do)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for j in range(0, k.shape[0], BLOCK):
        keys = slice(j, j + BLOCK)
        for i in range(0, q.shape[0], BLOCK):
            rows = slice(i, i + BLOCK)
            p = (k[keys] @ q[rows].mT / root - lse[rows]).exp()
            dv[keys].addmm_(p, do[rows])
            p *= v[keys] @ do[rows].mT - delta[rows]
            p /= root
            dk[keys] += p @ q[rows]
            dq[rows] += p.mT @ k[keys]
    return dq, dk, dv
""",
        ),
        Variant(
            "delta of all queries first",
            ((_G_I, "    all_delta = torch.sum(do * o, dim=-1, keepdim=True)\n" + _G_I),
             (_G_DELTA, "        delta = all_delta[i : i + BLOCK]\n")),
        ),
        Variant(
            "scale in q and in ds",
            ((_G_P, _G_P.replace("rows @ keys.T * scale", "(rows * scale) @ keys.T")), (_G_DS, _G_DS + "            ds *= scale\n"),
             (_G_DQ, _G_DQ.replace(" * scale", "")), (_G_DK, _G_DK.replace(" * scale", ""))),
        ),
        Variant(
            "delta subtracted at the end",
            ((_G_DS + _G_DQ + _G_DK,
              "            weighted = p * (do_rows @ values.T)\n"
              "            dq[i : i + BLOCK].add_(weighted @ keys, alpha=scale).sub_(p @ keys * delta, alpha=scale)\n"
              "            dk[j : j + BLOCK] += (weighted.T @ rows - p.T @ (rows * delta)) * scale\n"),),
        ),
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------- flash_attention.gradients
def _gradients_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)

    def case(H: int, T_q: int, T_k: int, D: int, dtype: str = "float32", slope: float = 0.0, tags: str = "") -> Case:
        q, k, v = make.qkv(H, T_q, T_k, D, dtype, slope)
        do = (make.normal(H, T_q, D) + 0.5).to(q.dtype)
        if (
            T_q == 1
        ):  # weights of about 1 / T_k and small dp: where one weight is nearly 1, dp - delta cancels to nothing
            q, do = q / 4, do - do.mean(-1, keepdim=True)
        o, lse = _with_lse(q.double(), k.double(), v.double())
        delta = (o * do.double()).sum(-1)
        blank = [x.new_full(x.shape, math.nan) for x in (k, v)]
        tags += " rest" if T_q % 16 else ""
        return _case(q, k, v, do, lse.float(), delta.float(), *blank, tags=tags)

    return [
        case(1, 1, 3, 16),
        case(1, 16, 32, 16),
        case(2, 48, 40, 16),
        case(1, 21, 32, 32),
        case(2, 37, 29, 20, "float16"),
        case(1, 5, 70, 80, "bfloat16"),
        case(1, 3, 7, 128, "float16"),
        case(1, 19, 40, 33, slope=0.1),
        case(1, 96, 64, 32, tags="largest"),
    ]


def _dk_dv(q, k, v, do, lse, delta, *_, fault: str = "") -> tuple:
    """The formulas, in the dtype of the case as PyTorch would compute them."""
    import torch

    scale = 1 / math.sqrt(q.shape[-1])
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    s = _scores(q, k).to(wide)
    if fault == "p without scale":
        s = (q @ k.mT).to(wide)
    p = torch.exp(s - (0 if fault == "no lse" else lse.to(wide)[..., None]))
    if fault == "queries of the keys":  # as many blocks of queries as there are of keys
        p = p * (torch.arange(p.shape[-2]) < _up(k.shape[-2], 16) * 16)[:, None]
    dp = (do @ v.mT).to(wide)
    ds = p * (dp - (0 if fault == "no delta" else delta.to(wide)[..., None]))
    if fault == "no p":
        ds = dp - delta.to(wide)[..., None]
    dk = ds.to(q.dtype).mT @ q * {"no scale": 1, "scaled q": scale**2}.get(fault, scale)
    return dk, (ds if fault == "dv of ds" else p).to(q.dtype).mT @ do


def _wrong(fault: str, *names: str) -> Callable[..., dict]:
    """What a mistake makes of the results called `names`."""
    return lambda *args: {k: x for k, x in zip(("dk", "dv"), _dk_dv(*args, fault=fault), strict=True) if k in names}


def _no_atomics(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    added = sum(launch.atomic_bytes for launch in launches)
    if not added:
        return None
    return (
        "atomics",
        f"{added:,} bytes were added with atomics, in the order in which programs happen to arrive: two runs then differ in "
        "their last bits. Which program could own a block of dk and dv and walk over the queries itself?",
    )


_K_Q = "        q = load_rows(q_ptr, start, T_q, D, D, BLOCK_M, BLOCK_D)\n        do ="
_K_LSE = "        lse = tl.load(lse_ptr + offs_m, mask=offs_m < T_q, other=0.0)\n"
_K_P = '        p = tl.exp(tl.dot(k, q.T, input_precision="ieee") * scale - lse[None, :])\n'
_K_DV = '        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")\n'
_K_DS = '        ds = p * (tl.dot(v, do.T, input_precision="ieee") - delta[None, :])\n'
_K_DK = '        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")\n'
_K_SCALE = "    dk *= scale\n"
_K_LOOP = "    for start in range(0, T_q, BLOCK_M):\n        offs_m ="
_K_END = "dk, dv, T_q, T_k, 1 / math.sqrt(D), D=D, **blocks)\n"
_K_CALL = "    grid = (triton.cdiv(T_k, 32), H)\n    dk_dv_kernel"

_ATOMIC = """import math

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, T_q, T_k, scale,
               D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK_D)
    at = (head * T_q + rows[:, None]) * D + columns[None, :]
    here = (rows[:, None] < T_q) & (columns[None, :] < D)
    q = tl.load(q_ptr + at, mask=here, other=0.0)
    do = tl.load(do_ptr + at, mask=here, other=0.0)
    lse = tl.load(lse_ptr + head * T_q + rows, mask=rows < T_q, other=0.0)
    delta = tl.load(delta_ptr + head * T_q + rows, mask=rows < T_q, other=0.0)
    for start in range(0, T_k, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        there = (keys[:, None] < T_k) & (columns[None, :] < D)
        offs = (head * T_k + keys[:, None]) * D + columns[None, :]
        k = tl.load(k_ptr + offs, mask=there, other=0.0)
        v = tl.load(v_ptr + offs, mask=there, other=0.0)
        p = tl.exp(tl.dot(k, q.T, input_precision="ieee") * scale - lse[None, :])
        ds = p * (tl.dot(v, do.T, input_precision="ieee") - delta[None, :])
        tl.atomic_add(dv_ptr + offs, tl.dot(p.to(do.dtype), do, input_precision="ieee"), mask=there)
        tl.atomic_add(dk_ptr + offs, tl.dot(ds.to(q.dtype), q, input_precision="ieee") * scale, mask=there)


def dk_dv(q, k, v, do, lse, delta, dk_out, dv_out):
    (H, T_q, D), T_k = q.shape, k.shape[1]
    dk, dv = (torch.zeros(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    add_kernel[(triton.cdiv(T_q, 16), H)](q, k, v, do, lse, delta, dk, dv, T_q, T_k, 1 / math.sqrt(D), D=D, BLOCK=16,
                                         BLOCK_D=max(16, triton.next_power_of_2(D)))
    dk_out.copy_(dk)
    dv_out.copy_(dv)
"""

GRADIENTS = KernelExercise(
    id="flash_attention.gradients",
    title="dk and dv",
    notebook=NOTEBOOK,
    function="dk_dv",
    label=Label(4, 40, "the walk over the queries; transposed scores; gradients that nobody else adds to"),
    hints=(
        "Forward held queries and walked over keys. Who must be held, and who walked over, if a program is to own a block of "
        "dk and dv? What of the queries does one step need?",
        "With k held, k q^T is the transposed block of scores, [keys, queries], so that p and ds need no transposing in their "
        "products with do and q. LSE and delta belong to queries: along which axis do they lie then? Rows of q and do beyond "
        "the end are zeros.",
        "Sums of float32 zeros for dk and dv. For each block of queries: q, do, LSE and delta, the last two masked; p, the "
        "exponential of k times q transposed times scale minus LSE as a row; dv plus p times do; ds, p times v times do "
        "transposed minus delta as a row; dk plus ds times q. p and ds go into their products in the dtype of the tensors. "
        "At the end dk times scale.",
    ),
    cases=_gradients_cases,
    reference=_dk_dv,
    in_place=(6, 7),
    # One head, 96 queries, 64 keys in two blocks, D 32: k and v once; q, do twice, and two more numbers for each query.
    traffic=Traffic(
        reads=2 * 64 / 96 + 2 * (2 + 2 / 32),
        writes=2 * 64 / 96,
        flops=lambda q, k, *_: 8 * q.shape[0] * 16 * _up(q.shape[1], 16) * 32 * _up(k.shape[1], 32) * _wide(q.shape[2]),
    ),
    launch_rule=_no_atomics,
    misconceptions=(
        Misconception("no-delta", _NO_DELTA, gives=_wrong("no delta", "dk")),
        Misconception(
            "no-scale",
            "dk is off by sqrt(D). s = scale q k^T: what is the derivative of s by k?",
            gives=_wrong("no scale", "dk"),
        ),
        Misconception(
            "no-p",
            "ds is dp - delta: a query that gives a key no weight then counts as much as one that gives it all",
            gives=_wrong("no p", "dk"),
        ),
        Misconception(
            "no-lse",
            "p is exp(s), which is not normalised: what does LSE hold?",
            gives=_wrong("no lse", "dk", "dv"),
        ),
        Misconception("p-without-scale", _P_WITHOUT_SCALE, gives=_wrong("p without scale", "dk", "dv")),
        Misconception(
            "scaled-q",
            "dv is right, dk has the scale twice. Which q does ds meet, the one with the scale or the one without?",
            gives=_wrong("scaled q", "dk"),
        ),
        Misconception(
            "walk-too-short",
            "the queries beyond the number of keys are missing. Over what does this program walk, and how many of those are there?",
            gives=_wrong("queries of the keys", "dk", "dv"),
        ),
        Misconception(
            "dv-of-ds",
            "dk is right, dv is not: o = p v. Which weights lead from do to dv?",
            gives=_wrong("dv of ds", "dv"),
        ),
        Misconception(
            "last-block-wins",
            "the last block of queries takes the place of those before it: each key gets something from every query",
            when=lambda evidence: all(case.args[0].shape[1] > 16 for case in evidence.failed)
            and all(case.args[0].shape[1] <= 16 for case in evidence.passed),
        ),
        Misconception(
            "query-edge",
            "the queries beyond the last one are zeros, and p of them is something. By which numbers does it get into the "
            "sums, and which of them is not 0, or not finite?",
            when=lambda evidence: all("rest" in case.tags for case in evidence.failed),
        ),
        Misconception(
            "tf32",
            "float32 operands were cut to 10 bits of mantissa. Which argument of tl.dot says that float32 means float32?",
            when=lambda evidence: _in_float32_alone(evidence) and _nearly(evidence),
        ),
        Misconception("traffic", "a block of queries is needed once: q serves both the scores and dk, do both dv and dp"),
        Misconception("flops", "scores, dp, dv and dk: four products"),
        Misconception("out-of-bounds", "a query has a row of q and of do, a number of LSE and one of delta: which are masked?"),
    ),
    wrong=(
        Variant("no delta", ((_K_DS, _K_DS.replace(" - delta[None, :]", "")),), diagnosis="no-delta"),
        Variant("no scale", ((_K_SCALE, ""),), diagnosis="no-scale"),
        Variant("no p", ((_K_DS, _K_DS.replace("p * (", "(")),), diagnosis="no-p"),
        Variant("no LSE", ((_K_P, _K_P.replace(" - lse[None, :]", "")),), diagnosis="no-lse"),
        Variant("p without scale", ((_K_P, _K_P.replace(" * scale", "")),), diagnosis="p-without-scale"),
        Variant("scale twice", ((_K_SCALE, "    dk *= scale * scale\n"),), diagnosis="scaled-q"),
        Variant("over the keys", ((_K_LOOP, _K_LOOP.replace("T_q", "T_k")),), diagnosis="walk-too-short"),
        Variant("dv of ds", ((_K_DV, ""), (_K_DK, _K_DK + _K_DV.replace("p.to", "ds.to"))), diagnosis="dv-of-ds"),
        Variant("no sums", ((_K_DV, _K_DV.replace("do, dv,", "do,")), (_K_DK, _K_DK.replace("q, dk,", "q,"))), diagnosis="last-block-wins"),
        Variant("-inf beyond the end", ((_K_LSE, _K_LSE.replace("other=0.0", 'other=-float("inf")')),), diagnosis="query-edge"),
        Variant("LSE not masked", ((_K_LSE, "        lse = tl.load(lse_ptr + offs_m)\n"),), diagnosis="out-of-bounds"),
        Variant("tf32 scores", ((_K_P, _K_P.replace(', input_precision="ieee"', "")),), diagnosis="tf32"),
        Variant("q twice", ((_K_P, _K_P + "        q = load_rows(q_ptr, start, T_q, D, D, BLOCK_M, BLOCK_D)\n"),), diagnosis="traffic"),
        Variant("five products", ((_K_DS, '        s = tl.dot(k, q.T, input_precision="ieee")\n' + _K_DS),), diagnosis="flops"),
        Variant("atomics", source=_ATOMIC, diagnosis="atomics"),
        Variant("torch", ((_K_CALL, "    q = q * 1.0\n" + _K_CALL),), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant(
            "powers of 2, masked",
            (
                (_K_LSE, '        lse = tl.load(lse_ptr + offs_m, mask=offs_m < T_q, other=float("inf"))\n'),
                (_K_P,
                 '        s = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * 1.4426950408889634)\n'
                 "        p = tl.exp2(s - lse[None, :] * 1.4426950408889634)\n"),
                (_K_DV, '        dv += tl.dot(p.to(v.dtype), do, input_precision="ieee")\n'),
                (_K_DK, '        dk += tl.dot((ds * scale).to(k.dtype), q, input_precision="ieee")\n'),
                (_K_SCALE, ""),
            ),
        ),
        Variant("returned as well", ((_K_END, _K_END + "    return dk, dv\n"),)),
        Variant(
            "float32 from the start, backwards",
            (
                (_K_LOOP, "    k, v = k.to(tl.float32), v.to(tl.float32)\n"
                          "    blocks = tl.cdiv(T_q, BLOCK_M)\n"
                          "    for step in tl.range(0, blocks):\n"
                          "        start = (blocks - 1 - step) * BLOCK_M\n        offs_m ="),
                (_K_P, "        q, do = q.to(tl.float32), do.to(tl.float32)\n"
                       '        p = tl.where(offs_m < T_q, tl.exp(tl.dot(k, q.T, input_precision="ieee") * scale - lse[None, :]), 0.0)\n'),
                (_K_DK, '        dk += tl.dot(ds, q, input_precision="ieee")\n'),
            ),
        ),
    ),
)  # fmt: skip

EXERCISES = [MERGE, TILES, LATE, FORWARD, CAUSAL, PACKED, RECOMPUTE, GRADIENTS]
