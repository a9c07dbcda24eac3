"""The exercises of notebook 17: cases, bounds on traffic and memory, and what each wrong idea computes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading import compare, ideas
from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Misconception, Traffic
from gpukit.grading.ideas import only
from gpukit.grading.inputs import Inputs, case, far, listed, nbytes, tensor_case

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence


# ------------------------------------------------------------------------------------------------------- capstone.pair
def _pair_cases(rng: Random) -> list[Case]:
    a, b, c, d, e, f = sorted(rng.sample(range(97, 123), 6))
    n = rng.randrange(4, 30)
    words = [[rng.choice((a, b, c, 300, 301)) for _ in range(rng.randrange(1, 9))] for _ in range(30)]
    often = [rng.randrange(1, 60) for _ in words]
    return [
        case("one piece", [[a, b, a, b, c]], [1], 256),
        case("one piece that is much more frequent", [[a, b, c], [a, b, d], [a, b, e], [e, f]], [1, 2, 1, 9 * n], 256),
        case("three pairs, equally often", [[b, e], [a, d], [c, f]], [n, n, n], 256),
        case("three pairs, equally often, in another order", [[c, e], [a, d], [b, f]], [n, n, n], 256),
        case("two pairs with one first token, equally often", [[c, b], [c, a]], [n, n], 256),
        case("two pairs, equally often, the larger one with the smaller second token", [[b, c], [a, f]], [n, n], 256),
        case("one token three times in a row", [[c, c, c], [a, b]], [n, 2 * n - 1], 400, tags="runs"),
        case("one token many times in a row", [[c] * 5, [d, c, c, c, c, d], [c, c]], [n, 1, 1], 256, tags="runs"),
        case("a pair many times in one piece", [[a, b] * 3, [c, d]], [2, 5], 257),
        case(
            "a pair many times over the ends of pieces",
            [[a, c], [d, b], [e, c], [d, f], [b, c], [d, a], [e, f]],
            [1, 1, 1, 1, 1, 1, 2],
            256,
        ),
        case("a piece that ends as it begins", [[c, d, e, c], [a, b]], [n, n + 1], 256),
        case("pieces of one token and of none", [[a], [], [b]], [3, 1, 2], 256, tags="nothing"),
        case("an empty piece between others", [[a, b], [], [c], [a, b, d]], [n, 2, 1, 1], 256, tags="empty-piece"),
        case("no pieces", [], [], 256, tags="nothing"),
        case("thirty words, some of joined tokens", words, often, 302),
        # Written one after the other, 11 ends as 1 does, and 23 begins as 2 does.
        case("numbers that begin or end as those of the pair", [[1, 2], [11, 2], [1, 23], [31, 24]], [n, 2, 1, 1], 256),
        case("no pair more than once", [[d, e], [c, a, f]], [1, 1], 256),
        case("a pair that is often in a piece that never occurs", [[a, b] * 4, [d, c]], [0, 1], 256),
        case("numbers beyond those of letters", [[2_000_000, a], [b, 2_000_000, a]], [n, 1], 3_000_000),
    ]


def _apart(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without the pairs that share a token with an equal pair before them."""
    kept, before = [], None
    for pair in pairs:
        if pair == before and pair[0] == pair[1]:
            before = None
        else:
            kept.append(pair)
            before = pair
    return kept


def _joined(pieces: list[list[int]], times: list[int], new: int, fault: str = "") -> tuple:
    counts: Counter[tuple[int, int]] = Counter()
    for piece, often in zip(pieces, times, strict=True):
        pairs = list(pairwise(piece))
        if fault == "a piece counts its pair once":
            pairs = list(dict.fromkeys(pairs))
        if fault == "counts only what can be joined":
            pairs = _apart(pairs)
        for pair in pairs:
            counts[pair] += 1 if fault == "times forgotten" else often
    if fault == "text in a row":
        counts = Counter(pairwise(chain(*pieces)))
    if fault == "text in a row, repeated":
        counts = Counter(pairwise(chain(*(piece * n for piece, n in zip(pieces, times, strict=True)))))
    if not counts or (fault == "once is no pair" and max(counts.values()) < 2):
        return None, pieces
    most = max(counts.values())
    ties = [pair for pair, count in counts.items() if count == most]
    best = {"larger": max(ties), "first": ties[0], "last": ties[-1]}.get(fault, min(ties))
    if fault == "first token only":
        best = min(ties, key=lambda pair: pair[0])
    if fault == "second token first":
        best = min(ties, key=lambda pair: pair[::-1])
    if fault == "rarest":
        best = min(counts, key=lambda pair: (counts[pair], pair))
    return best, [_replaced(piece, best, new, fault) for piece in pieces]


def _replaced(piece: list[int], pair: tuple[int, int], new: int, fault: str) -> list[int]:
    if fault == "nothing joined":
        return piece
    if fault == "in a text":
        text = " ".join(map(str, piece)).replace(f"{pair[0]} {pair[1]}", str(new))
        return [int(number) for number in text.split()]
    if fault == "not side by side":
        text = f" {' '.join(map(str, piece))} ".replace(f" {pair[0]} {pair[1]} ", f" {new} ")
        return [int(number) for number in text.split()]
    if fault == "from the right":
        return _replaced(piece[::-1], pair[::-1], new, "")[::-1]
    out, i = [], 0
    while i < len(piece):
        if tuple(piece[i : i + 2]) == pair and not (fault == "once" and new in out):
            out.append(new)
            i += 1 if fault == "second token stays" else 2
        elif i + 1 == len(piece) and fault == "last token lost":
            break
        else:
            out.append(piece[i])
            i += 1
    return out


def _pair_gives(fault: str) -> Callable[..., tuple]:
    return lambda pieces, times, new: _joined(pieces, times, new, fault)


PAIR = FunctionExercise(
    id="capstone.pair",
    function="join_most_frequent",
    returns=("the pair", "the pieces"),
    cases=_pair_cases,
    expected=_joined,
    misconceptions=(
        Misconception("times-forgotten", gives=_pair_gives("times forgotten")),
        Misconception("once-per-piece", gives=_pair_gives("a piece counts its pair once")),
        Misconception("only-what-can-be-joined", gives=_pair_gives("counts only what can be joined")),
        Misconception("across-pieces", gives=_pair_gives("text in a row")),
        Misconception("across-pieces", gives=_pair_gives("text in a row, repeated")),
        Misconception("tie", gives=_pair_gives("first")),
        Misconception("tie", gives=_pair_gives("last")),
        Misconception("tie/2", gives=_pair_gives("larger")),
        Misconception("tie/3", gives=_pair_gives("first token only")),
        Misconception("tie/4", gives=_pair_gives("second token first")),
        Misconception("once-is-enough", gives=_pair_gives("once is no pair")),
        Misconception("rarest", gives=_pair_gives("rarest")),
        Misconception("from-the-right", gives=_pair_gives("from the right")),
        Misconception("joined-once", gives=_pair_gives("once")),
        Misconception("joined-once/2", gives=_pair_gives("not side by side")),
        Misconception("part-of-a-number", gives=_pair_gives("in a text")),
        Misconception("second-token-stays", gives=_pair_gives("second token stays")),
        Misconception("last-token-lost", gives=_pair_gives("last token lost")),
        Misconception("nothing-joined", gives=_pair_gives("nothing joined")),
        Misconception("no-pair", when=only("nothing")),
    ),
)


# ------------------------------------------------------------------------------------------------------- capstone.rate
def _rate_cases(rng: Random) -> list[Case]:
    peak, final = rng.choice((3e-4, 6e-4, 4e-3)), rng.choice((0.05, 0.1, 0.2))
    steps, warmup = rng.randrange(500, 2000), rng.randrange(40, 90)

    def at(
        step: int, name: str, tags: str = "", steps: int = steps, warmup: int = warmup, final: float = final
    ) -> Case:
        return case(name, step, steps, warmup, peak, final, tags=tags)

    return [
        at(0, "the first step", "rising"),
        at(warmup // 2, "in the warm-up", "rising"),
        at(warmup - 1, "the last step of the warm-up", "rising"),
        at(warmup, "the first step after the warm-up"),
        at(warmup + (steps - warmup) // 4, "a quarter of the way down"),
        at(warmup + 2 * (steps - warmup) // 3, "two thirds of the way down"),
        at(steps - 1, "the last step"),
        at(steps, "step number steps", "end"),
        at(steps + steps // 3, "after the end", "end"),
        at(steps // 2, "down to 0", final=0.0),
        at(steps // 2, "no fall at all", final=1.0),
        at(0, "without a warm-up, the first step", "no-warm-up", warmup=0),
        at(steps // 3, "without a warm-up", "no-warm-up", warmup=0),
        at(3, "nothing but a warm-up", "rising", steps=10, warmup=10),
        at(10, "nothing but a warm-up, after it", "end", steps=10, warmup=10),
        at(0, "no step at all", "end", steps=0, warmup=0),
        at(0, "a warm-up of one step", "rising", warmup=1),
        at(1, "after a warm-up of one step", warmup=1),
    ]


def _rate(step: int, steps: int, warmup: int, peak: float, final: float, fault: str = "") -> float:
    lowest = final / peak if fault == "final is a rate" else 0.0 if fault == "down to 0" else final
    if fault == "final is a rate before the end" and step < steps:
        lowest = final / peak
    if fault == "no warm-up":
        warmup = 0
    if step < warmup:
        first = {"from 0": 0, "late": 2}.get(fault, 1)
        if fault == "from final":
            return peak * (final + (1 - final) * (step + 1) / warmup)
        if fault == "one more amount":
            return peak * (step + 1) / (warmup + 1)
        if fault == "between":
            return peak * step / max(warmup - 1, 1)
        rising = (step + first) / warmup
        if fault == "falls in the warm-up":
            return peak * rising * (lowest + (1 - lowest) * (1 + math.cos(math.pi * step / steps)) / 2)
        return peak * rising
    if fault == "falls from step 0":
        way = step / max(steps, 1)
    else:
        way = (step - warmup) / max(steps if fault == "over all steps" else steps - warmup, 1)
    if step >= steps and fault == "0 at the end":
        return 0.0
    if fault == "one step on":
        way = (step - warmup + 1) / max(steps - warmup, 1)
    if fault == "one step less":
        way = (step - warmup) / max(steps - warmup - 1, 1)
    if fault == "whole numbers":
        way = (step - warmup) // max(steps - warmup, 1)
    if step >= steps and fault == "final at the end":
        return final
    if step >= steps and fault == "peak at the end":
        return peak
    way = way if fault == "not stopped" else 1.0 if step >= steps else way
    fall = 0.5 + math.cos(math.pi * way) / 2
    if step < steps and fault in ("no pi", "degrees"):
        fall = 0.5 + math.cos({"no pi": 1, "degrees": 180}[fault] * way) / 2
    if step < steps and fault in ("upside down", "not halved", "quarter, fast first"):
        fall = {"upside down": 1 - fall, "not halved": 2 * fall}.get(fault, 1 - math.sin(math.pi / 2 * way))
    if fault == "line":
        fall = 1 - way
    if fault == "quarter":
        fall = math.cos(math.pi / 2 * way)
    if fault == "whole wave":
        fall = (1 + math.cos(2 * math.pi * way)) / 2
    if fault == "no half":
        fall = math.cos(math.pi * way)
    if fault == "max":
        return peak * max(fall, lowest)
    if fault == "added":
        return peak * (lowest + fall)
    return peak * (lowest + (1 - lowest) * fall)


def _rate_gives(fault: str) -> Callable[..., float]:
    return partial(_rate, fault=fault)


RATE = FunctionExercise(
    id="capstone.rate",
    function="learning_rate",
    cases=_rate_cases,
    expected=_rate,
    tolerance=1e-9,
    misconceptions=(
        Misconception("from-zero", gives=_rate_gives("from 0")),
        Misconception("from-zero/2", gives=_rate_gives("between")),
        Misconception("warm-up-too-short", gives=_rate_gives("late")),
        Misconception("warm-up-too-long", gives=_rate_gives("one more amount")),
        Misconception("from-final", gives=_rate_gives("from final")),
        Misconception("no-warm-up", gives=_rate_gives("no warm-up")),
        Misconception("falls-too-early", gives=_rate_gives("falls from step 0")),
        Misconception("falls-too-early/2", gives=_rate_gives("falls in the warm-up")),
        Misconception("one-step-early", gives=_rate_gives("one step on")),
        Misconception("one-step-early/2", gives=_rate_gives("one step less")),
        Misconception("over-all-steps", gives=_rate_gives("over all steps")),
        Misconception("whole-division", gives=_rate_gives("whole numbers")),
        Misconception("not-stopped", gives=_rate_gives("not stopped")),
        Misconception("down-to-zero", gives=_rate_gives("down to 0")),
        Misconception("down-to-zero/2", gives=_rate_gives("0 at the end")),
        Misconception("final-is-a-share", gives=_rate_gives("final is a rate")),
        Misconception("final-is-a-share", gives=_rate_gives("final is a rate before the end")),
        Misconception("final-is-a-share/2", gives=_rate_gives("final at the end")),
        Misconception("peak-at-the-end", gives=_rate_gives("peak at the end")),
        Misconception("floor", gives=_rate_gives("max")),
        Misconception("added", gives=_rate_gives("added")),
        Misconception("line", gives=_rate_gives("line")),
        Misconception("quarter-wave", gives=_rate_gives("quarter")),
        Misconception("quarter-wave/2", gives=_rate_gives("quarter, fast first")),
        Misconception("angle", gives=_rate_gives("no pi")),
        Misconception("angle/2", gives=_rate_gives("degrees")),
        Misconception("upside-down", gives=_rate_gives("upside down")),
        Misconception("not-halved", gives=_rate_gives("not halved")),
        Misconception("whole-wave", gives=_rate_gives("whole wave")),
        Misconception("cosine-below-zero", gives=_rate_gives("no half")),
        Misconception("after-the-end", when=only("end")),
    ),
)


# ------------------------------------------------------------------------------------------------- capstone.accumulate
_PADDING = -100


def _accumulate_cases(rng: Random) -> list[Case]:
    make = Inputs(rng)

    def step(
        name: str, counts: list[int], rows: int, V: int, D: int, gpus: int = 1, others: int = 0, tags: str = ""
    ) -> Case:
        """Micro-batches of `rows` targets, of which as many count as `counts` says; `others` count on the other GPUs."""
        batches = []
        for count in counts:
            targets = make.integers(0, V, rows)
            targets[make.torch.randperm(rows, generator=make.generator)[count:]] = _PADDING
            batches.append((make.normal(rows, D), targets))
        return case(name, make.normal(V, D, scale=0.5), batches, sum(counts) + others, gpus, tags=tags)

    return [
        step("one micro-batch without padding", [7], 7, 11, 5),
        step("two micro-batches of equal counts", [12, 12], 12, 20, 8),
        step("one micro-batch with padding", [5], 16, 13, 4, tags="padding"),
        step("three micro-batches of unequal counts", [16, 3, 9], 16, 20, 8, tags="padding counts-differ"),
        step("a single token counts", [1], 1, 6, 3),
        step("a micro-batch of padding alone", [6, 0, 10], 12, 17, 8, tags="padding counts-differ padding-alone"),
        step("2 GPUs with equal counts", [8, 8], 8, 12, 6, gpus=2, others=16, tags="gpus"),
        step(
            "4 GPUs, this one has few tokens", [2, 1], 20, 12, 6, gpus=4, others=60, tags="gpus padding counts-differ"
        ),
        step(
            "8 GPUs, this one has nothing but padding",
            [0],
            9,
            12,
            6,
            gpus=8,
            others=60,
            tags="gpus padding padding-alone",
        ),
        step("16 micro-batches", [15, 16] * 8, 16, 300, 8, gpus=2, others=200, tags="gpus padding counts-differ many"),
    ]


def _step_gradient(weight: Tensor, batches: list, counted: int, gpus: int, fault: str = "") -> tuple[float, Tensor]:
    """By its formula, in float64; `fault` is a mistake in the divisor, in what counts or in what is kept."""
    import torch
    import torch.nn.functional as F

    W = weight.double()
    total, gradient, own = 0.0, torch.zeros_like(W), sum(int((targets != _PADDING).sum()) for _, targets in batches)
    for x, targets in batches:
        x, counts = x.double(), targets != _PADDING
        n = int(counts.sum())
        kept = torch.ones_like(counts) if fault == "padding counts" else counts
        logits = x @ W.T
        ones = F.one_hot(targets.where(counts, 0), len(W)).double()
        each = (logits.logsumexp(-1) - (logits * ones).sum(-1)) * kept
        divisor = {
            "": counted / gpus,
            "padding counts": counted / gpus,
            "average forgotten": counted,
            "summed": 1 / gpus,
            "summed here": 1,
            "means": (n or math.nan) * len(batches),
            "means, empty skipped": (n or 1) * len(batches),
            "sum of means": n or math.nan,
            "sum of means, empty skipped": n or 1,
            "rows": len(x) * len(batches),
            "own": own or math.nan,
            "own, gpus": (own or math.nan) / gpus,
            "own, never 0": max(own, 1),
            "over micro-batches too": counted / gpus * len(batches),
            "wrong way": counted * gpus,
        }[fault.partition(";")[0]]
        if fault.endswith("last alone"):
            total, gradient = 0.0, torch.zeros_like(W)
        if fault.endswith("last gradient"):
            gradient = torch.zeros_like(W)
        total = total + each.sum() / divisor
        if n or fault == "padding counts":  # PyTorch's mean of nothing is NaN, and its gradient 0
            gradient = gradient + ((logits.softmax(-1) - ones) * kept[:, None]).T @ x / divisor
    return float(total), gradient.float()


def _accumulates(fault: str, gradient: str | None = None) -> Callable[..., tuple]:
    """Both results with one fault; or the loss with `fault` and the gradient with another."""

    def gives(*args: Any) -> tuple:
        loss, own = _step_gradient(*args, fault=fault)
        return loss, own if gradient is None else _step_gradient(*args, fault=gradient)[1]

    return gives


def _accumulate_memory(case: Case, peak_bytes: int) -> tuple[str, str] | None:
    """Some logits of a micro-batch, what is as large as weight, what is as large as a micro-batch's x."""
    weight, batches, *_ = case.args
    x = batches[0][0]
    logits = 4 * len(x) * len(weight)
    allowed = 6 * logits + 4 * weight.nbytes + 4 * x.nbytes + 1024
    if peak_bytes <= allowed:
        return None
    return (
        "all-at-once",
        f"it held {peak_bytes / 1024:,.0f} KiB at once. The logits of one micro-batch take {logits / 1024:,.0f} KiB, those of all "
        f"{len(batches)} take {len(batches) * logits / 1024:,.0f}. What keeps the graph of the first one alive while the last one runs?",
    )


ACCUMULATE = FunctionExercise(
    id="capstone.accumulate",
    function="step_gradient",
    returns=("the loss", "the gradient"),
    cases=_accumulate_cases,
    expected=_step_gradient,
    tolerance=1e-5,
    memory_rule=_accumulate_memory,
    misconceptions=(
        Misconception("mean-of-means", gives=_accumulates("means")),
        Misconception("mean-of-means", gives=_accumulates("means, empty skipped")),
        Misconception("sum-of-means", gives=_accumulates("sum of means")),
        Misconception("sum-of-means", gives=_accumulates("sum of means, empty skipped")),
        Misconception("padding-in-the-mean", gives=_accumulates("rows")),
        Misconception("padding-counts", gives=_accumulates("padding counts")),
        Misconception("average-forgotten", gives=_accumulates("average forgotten")),
        Misconception("average-forgotten/2", gives=_accumulates("wrong way")),
        Misconception("own-count", gives=_accumulates("own")),
        Misconception("own-count", gives=_accumulates("own, never 0")),
        Misconception("own-count/2", gives=_accumulates("own, gpus")),
        Misconception("divided-twice", gives=_accumulates("over micro-batches too")),
        Misconception("not-divided", gives=_accumulates("summed")),
        Misconception("not-divided", gives=_accumulates("summed here")),
        Misconception("loss-only", gives=_accumulates("", "summed here")),
        Misconception("loss-only", gives=_accumulates("", "average forgotten")),
        Misconception("loss-not-scaled", gives=_accumulates("summed here", "")),
        Misconception("loss-not-scaled", gives=_accumulates("average forgotten", "")),
        Misconception("last-one-only", gives=_accumulates(";last alone")),
        Misconception("last-one-only", gives=_accumulates(";last gradient")),
        Misconception("mean-of-nothing", when=lambda evidence: any("nan" in repr(part) for part in evidence.outputs)),
    ),
)


# ------------------------------------------------------------------------------------------------------- capstone.ring
def _ring_cases(rng: Random) -> list[Case]:
    n = rng.randrange(10**6, 10**7)
    made = []

    def step(
        parameters: int,
        gpus: int,
        engine: str,
        micro: int = 1,
        weight: int = 2,
        gradient: int = 4,
        reshard: bool = True,
    ) -> None:
        name = f"{parameters:,} parameters, {gpus} GPUs, {engine}, {micro} micro-batch{'es' * (micro > 1)}, "
        name += f"{weight} bytes per weight, {gradient} per gradient" + ", resharded" * (engine == "fsdp" and reshard)
        made.append(
            case(
                name, parameters, gpus, engine, micro, weight, gradient, reshard, tags=f"{engine} {'one' * (gpus == 1)}"
            )
        )

    step(8 * n, 2, "ddp")
    step(8 * n, 8, "ddp", micro=4)
    step(8 * n + 3, 8, "ddp", gradient=2)
    step(8 * n, 1, "ddp")
    step(5, 8, "ddp", micro=2)
    step(8 * n, 2, "fsdp")
    step(8 * n, 4, "fsdp", micro=4)
    step(8 * n, 4, "fsdp", micro=3, reshard=False)
    step(8 * n + 5, 8, "fsdp", micro=2, weight=4, gradient=2)
    step(8 * n, 1, "fsdp", micro=2)
    step(64 * n, 64, "fsdp", weight=1, gradient=4, reshard=False)
    step(1, 4, "ddp", gradient=1)
    step(0, 4, "fsdp")
    return made


def _sent(
    parameters: int, gpus: int, engine: str, micro: int, weight: int, gradient: int, reshard: bool, fault: str = ""
) -> float:
    share = -(-parameters // gpus)
    if fault == "not filled up":
        share = parameters // gpus
    if fault == "a fraction":
        share = parameters / gpus
    if fault == "whole tensors":
        share = parameters
    rounds = gpus if fault == "n rounds" else gpus - 1
    if fault == "once to each":
        rounds = 1
    if fault == "of all GPUs":
        rounds *= gpus
    if engine == "ddp":
        steps = micro if fault == "ddp each micro-batch" else 1
        halves = 1 if fault == "half an all-reduce" else 2
        return steps * halves * rounds * share * (weight if fault == "ddp sends weights" else gradient)
    gathers = 2 if reshard else 1
    if fault in ("gathered once", "always kept"):
        gathers = 1
    if fault == "always freed":
        gathers = 2
    weights, gradients = gathers * weight, gradient
    if fault == "all-reduced":
        gradients = 2 * gradient
    if fault == "weights' bytes":
        gradients = weight
    if fault == "gradients' bytes":
        weights = gathers * gradient
    if fault == "no gradients":
        gradients = 0
    if fault == "gradients at the end":
        return rounds * share * (micro * weights + gradients)
    if fault == "weights at the start":
        return rounds * share * (weights + micro * gradients)
    return (1 if fault == "one micro-batch" else micro) * rounds * share * (weights + gradients)


def _sends(fault: str) -> Callable[..., float]:
    return lambda *args: _sent(*args, fault=fault)


RING = FunctionExercise(
    id="capstone.ring",
    function="bytes_sent",
    cases=_ring_cases,
    expected=_sent,
    unit="bytes",
    misconceptions=(
        Misconception("half-an-all-reduce", gives=_sends("half an all-reduce")),
        Misconception("one-round-too-many", gives=_sends("n rounds")),
        Misconception("one-round", gives=_sends("once to each")),
        Misconception("whole-tensors", gives=_sends("whole tensors")),
        Misconception("all-gpus", gives=_sends("of all GPUs")),
        Misconception("not-filled-up", gives=_sends("not filled up")),
        Misconception("not-filled-up", gives=_sends("a fraction")),
        Misconception("reduced-too-often", gives=_sends("ddp each micro-batch")),
        Misconception("weights-instead", gives=_sends("ddp sends weights")),
        Misconception("gathered-once", gives=_sends("always kept")),
        Misconception("always-freed", gives=_sends("always freed")),
        Misconception("all-reduced", gives=_sends("all-reduced")),
        Misconception("one-size", gives=_sends("weights' bytes")),
        Misconception("one-size", gives=_sends("gradients' bytes")),
        Misconception("no-gradients", gives=_sends("no gradients")),
        Misconception("once-per-step", gives=_sends("one micro-batch")),
        Misconception("once-per-step/2", gives=_sends("gradients at the end")),
        Misconception("once-per-step/3", gives=_sends("weights at the start")),
    ),
)


# --------------------------------------------------------------------------------------------------------- capstone.dq
# More than 2^32 elements, in many heads of few tokens: a program walks over all tokens of its head.
_MANY = (65_000, 80, 1024)
_NUMBERS = 64  # bytes that a call may allocate beside its results: single numbers


class _Heads(Inputs):
    def qkv(self, H: int, H_kv: int, T: int, D: int, dtype: str = "float32", slope: float = 0.0) -> tuple:
        """v is around 1, so that a row's sum matters. slope: by how much the scores rise from key to key."""
        q, k, v = self.normal(H, T, D), self.normal(H_kv, T, D), self.normal(H_kv, T, D) + 1
        if slope:
            q[..., 0] = 8
            k[..., 0] = (self.torch.arange(T) - T / 2) * slope * math.sqrt(D) / 8
        return tuple(x.to(getattr(self.torch, dtype)) for x in (q, k, v))

    def steps(self, T: int) -> tuple:
        """Two heads in bfloat16 whose scores change once, after the first block of keys: they fall from 100 to 0, so that the
        exponential of the difference is no float32; they rise from 0 to log(1.5). Each p is 1 or has no part in o, so o is
        rounded once whether p was rounded for tl.dot or not; the sum 16 / 1.5 + n has more digits than 16 bits hold."""
        q, k, v = self.torch.zeros(2, T, 16), self.torch.zeros(2, T, 16), self.normal(2, T, 16) + 1
        q[..., :3], k[0, :16, 0] = 2, 200
        rise = self.torch.tensor(2 * math.log(1.5))
        for i in range(3):  # numbers of 8 bits whose sum has 24
            k[1, 16:, i] = rise.bfloat16()
            rise -= k[1, 16, i]
        v[0, 16:] = v[1, :16] = 0
        return tuple(x.bfloat16() for x in (q, k, v))

    def waves(self, T: int) -> tuple:
        """q, k, v and do of a head in float16: key 0 has most of the weight of each query, and the gradients of the first 16
        queries and of the others have opposite signs, so that the sums of dk and dv leave float16 and come back."""
        q, k, v, do = (self.normal(1, T, 16, scale=s) for s in (1 / 4, 1, 1 / 32, 500))
        q[..., 0], k[..., 0], k[:, 0, 0] = 16, 0, 1
        v += 1 / 4
        v[:, 0] += 1 / 16
        do[:, :16] += 6000
        do[:, 16:] -= 3500
        return tuple(x.half() for x in (q, k, v, do))

    def hidden(self, T: int) -> tuple:
        """q, k, v and do of a head whose last key is 200 above all others: the exponential of that is no float32, and only the
        last query sees it. Its gradient is 0, and that of the first queries: with few keys, dp - delta cancels."""
        q, k, v, do = (self.normal(1, T, 16, scale=s) for s in (1 / 4, 1, 1, 1))
        q[..., 0], k[..., 0], k[:, -1, 0] = 1, 0, 800
        do[:, :6] = do[:, -1] = 0
        return q, k, v, do


_SMALL = 2.0**-16  # times a gradient: a mean over tokens has such ones, and a block of them is not nothing


def _attention_case(tensors: tuple, *rest: Any, note: str = "", tags: str = "") -> Case:
    (H, T, D), H_kv = tensors[0].shape, tensors[1].shape[0]
    tags += " gqa" * (H_kv < H) + " blocks" * (T > 16) + " rest" * (T % 16 > 0)
    return tensor_case(*tensors, *rest, shown=f"{H} head{'s' * (H > 1)} on {H_kv}, T {T}, D {D},", note=note, tags=tags)


def _weights(q: Tensor, k: Tensor, fault: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """The scores with -inf where a key is not seen, what is seen, and which head of k each head of q uses."""
    import torch

    H, T, D = q.shape
    H_kv = k.shape[0]
    group, heads = H // H_kv, torch.arange(H)
    use = {"interleaved": heads % H_kv, "first head": heads * 0, "own head": heads.clamp(max=H_kv - 1)}.get(
        fault, heads // group
    )
    past = {"not itself": -1, "one too many": 1, "nothing masked": T}.get(fault, 0)
    seen = torch.arange(T) <= torch.arange(T)[:, None] + past
    if fault == "whole blocks":  # every key of the blocks that are loaded
        seen = torch.arange(T) < (torch.arange(T)[:, None] // 16 + 1) * 16
    if fault == "last block":  # that the walk comes to
        seen = seen & (torch.arange(T) >= torch.arange(T)[:, None] // 16 * 16)
    if fault == "blocks before":  # no key of the block that the diagonal goes through
        seen = seen & (torch.arange(T) < torch.arange(T)[:, None] // 16 * 16)
    s = q @ k[use].mT * (1.0 if fault == "p without scale" else 1 / math.sqrt(D))
    return s.masked_fill(~seen, -math.inf), seen, use


def _turned(fault: str) -> tuple[str, ...]:
    """Which of lse and delta a fault reads along the wrong side of the scores."""
    return {"lse along keys": ("lse",), "delta along keys": ("delta",), "both along keys": ("lse", "delta")}.get(
        fault, ()
    )


def _along_keys(x: Tensor) -> Tensor:
    """lse or delta [H, T] read along the wrong side of each block of 16 x 16 scores: [H, queries, keys]."""
    import torch

    T = x.shape[-1]
    places = torch.arange(T)[:, None] // 16 * 16 + torch.arange(T) % 16
    return torch.nn.functional.pad(x, (0, -T % 16))[:, places]  # 0 beyond the last query, as they are loaded


def _dq(q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, fault: str = "") -> Tensor:
    """The formula: factors in the dtype of the case, sums in float32, as PyTorch's own attention computes it."""
    import torch

    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    s, seen, use = _weights(q.to(wide), k.to(wide), fault)
    beside = {name: x.to(wide)[..., None] for name, x in (("lse", lse), ("delta", delta))}
    beside |= {name: _along_keys(x.to(wide)) for name, x in (("lse", lse), ("delta", delta)) if name in _turned(fault)}
    p = torch.exp(s.to(wide) - (0 if fault == "no lse" else beside["lse"]))
    dp = (do @ v[use].mT).to(wide)
    ds = p * (dp - (0 if fault == "no delta" else beside["delta"]))
    if fault == "no p":
        ds = (dp - delta.to(wide)[..., None]) * seen
    if fault == "plus delta":
        ds = p * (dp + delta.to(wide)[..., None])
    scale = {"no scale": 1.0, "scale twice": 1 / q.shape[-1]}.get(fault, 1 / math.sqrt(q.shape[-1]))
    keys = (v if fault == "times v" else k)[use].to(wide)
    return (ds.to(q.dtype).to(wide) @ keys * scale).to(q.dtype)


def _forward(q: Tensor, k: Tensor, v: Tensor, fault: str = "") -> tuple[Tensor, Tensor]:
    """o and LSE."""
    s, _, use = _weights(q, k, fault)
    return s.softmax(-1) @ v[use], s.logsumexp(-1)


def _dq_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)

    def given(*shape: int, dtype: str = "float32", far: bool = False, high: bool = False, small: bool = False) -> Case:
        """small: gradients as the mean of many losses has them. far: the sums are beyond float16 before they are multiplied
        with scale, and not behind it. high: all scores are 1,000 and a bit, which with their LSE have more digits than 16 bits
        hold."""
        q, k, v = make.qkv(*shape, dtype)
        # A row of ds adds up to 0. Where a query has few keys, or one of them has nearly all the weight, dp - delta cancels to
        # rounding, which has no right value: so scores are small, and the first queries have a gradient of 0.
        q, do = q / 4, make.normal(*q.shape)
        do -= do.mean(-1, keepdim=True)
        do[:, : min(q.shape[1] // 2, 6)] = 0
        if far:
            q, k, v, do = q / 256, k * 256, v * 16, do * 16
            do[:, :20] = 0
        if high:
            q = make.torch.zeros_like(q)
            q[..., 0], q[..., 1], k[..., :2] = 16_000, 4, 1 / 4
        if small:
            do *= _SMALL
        note = "scores of 1,000" if high else "small gradients" if small else ""
        return of(q, k, v, do.to(q.dtype), note, "far" * far + "high" * high + "small-gradients" * small)

    def of(q: Tensor, k: Tensor, v: Tensor, do: Tensor, note: str, tags: str) -> Case:
        o, lse = _forward(q.double(), k.double(), v.double())
        delta = (o * do.double()).sum(-1)
        return _attention_case((q, k, v, do, lse.float(), delta.float()), note=note, tags=tags)

    def stalling() -> Case:
        """The first block of keys gives nearly all of dq, and each later one less than bfloat16 resolves beside it."""
        T, D = 320, 16
        sign = (1 - 2 * (make.torch.arange(T) % 2)).to(make.torch.bfloat16)
        q, k, v, do = (make.torch.zeros(1, T, D, dtype=make.torch.bfloat16) for _ in range(4))
        v[0, :, 0], k[0], do[..., 0] = sign, sign[:, None], 1
        k[0, :16] *= 600
        return of(q, k, v, do, "what a block adds is small", "many-blocks")

    def digits() -> Case:
        """Scores of 0, so that dp, 192 or 193, has a mean that is no number of bfloat16; rounded, it takes all of a difference
        with it."""
        q, k, v, do = make.torch.zeros(1, 18, 16), make.normal(1, 18, 16) + 1, *make.torch.zeros(2, 1, 18, 16)
        v[..., 0], do[..., 0] = 192 + make.torch.arange(18) % 2, 1
        do[:, :4] = 0
        return of(*(x.bfloat16() for x in (q, k, v, do)), "dp of 192 and of 193", "digits")

    def faint() -> Case:
        """The first key has all but 2e-9 of the weight of each other key, a value of 0 and nothing but its score, so that dq is
        what the others give, as exact as any. In 16 bits: in float32 the exponent -20, however it is rounded, would be
        several units of the result."""
        q, k, v = make.torch.zeros(1, 64, 16), make.normal(1, 64, 16), make.normal(1, 64, 16) + 1
        q[..., 0], k[..., 0], k[:, 0], v[:, 0] = 4, 0, 0, 0
        k[:, 0, 0] = 20
        do = make.normal(1, 64, 16)
        do[:, :2] = 0
        return of(*(x.bfloat16() for x in (q, k, v, do)), "scores of 20 and of 0", "faint")

    return [
        given(1, 1, 12, 8),
        given(1, 1, 16, 16),
        given(2, 2, 31, 8),
        given(4, 2, 17, 16),
        given(6, 3, 33, 20, dtype="float16"),
        given(6, 2, 15, 33, dtype="bfloat16"),
        given(4, 1, 32, 16),
        given(1, 1, 65, 16),
        given(2, 1, 9, 80, dtype="float16"),
        given(1, 1, 40, 16, dtype="float16", far=True),
        given(2, 1, 40, 16, dtype="float16", high=True),
        given(1, 1, 33, 16, small=True),
        digits(),
        faint(),
        of(*make.hidden(13), "a high score that is not seen", "hidden"),
        stalling(),
    ]


def _seen_bytes(q: Tensor) -> int:
    """Of k and v together, for all heads of q: for each 16 queries the blocks of 16 keys of which one is seen."""
    H, T, D = q.shape
    return 2 * H * sum(min(first + 16, T) for first in range(0, T, 16)) * D * q.element_size()


def _dq_gives(fault: str) -> Callable[..., Tensor]:
    return lambda *args: _dq(*args, fault=fault)


def _of_rows(q: Tensor) -> int:
    """The bytes of lse or of delta."""
    return 4 * q.shape[0] * q.shape[1]


# What is wrong with which key stands beside which query, whichever result shows it: the diagnosis and the fault.
_SEEN = (
    ("nothing-masked", "nothing masked"),
    ("not-itself", "not itself"),
    ("one-too-many", "one too many"),
    ("block-not-masked", "whole blocks"),
    ("diagonal-block", "blocks before"),
    ("heads-interleaved", "interleaved"),
    ("first-head", "first head"),
    ("own-head", "own head"),
)


def _only_among(tag: str, other: str) -> Callable[[Evidence], bool]:
    """Whether cases with `tag` fail, and beside them at most some with `other`."""
    return lambda evidence: (
        any(tag in case.tags for case in evidence.failed)
        and all(tag in case.tags or other in case.tags for case in evidence.failed)
    )


DQ = KernelExercise(
    id="capstone.dq",
    function="query_gradient",
    returns=("dq",),
    cases=_dq_cases,
    reference=_dq,
    huge=lambda: (*(far(*_MANY),) * 4, *(far(*_MANY[:2], dtype="float32"),) * 2),
    traffic=Traffic(
        reads=lambda q, k, v, do, lse, delta: nbytes(q, do, lse, delta) + _seen_bytes(q),
        writes=1,
        memory=lambda q, *_: nbytes(q) + _NUMBERS,
    ),
    misconceptions=(
        Misconception("faint-keys/2", when=only("faint")),
        Misconception("delta-in-16-bits", when=only("digits")),
        Misconception("small-gradients", when=only("small-gradients")),
        *(Misconception(name, gives=_dq_gives(fault)) for name, fault in _SEEN),
        Misconception("no-scale", gives=_dq_gives("no scale")),
        Misconception("scale-twice", gives=_dq_gives("scale twice")),
        Misconception("p-without-scale", gives=_dq_gives("p without scale")),
        Misconception("no-delta", gives=_dq_gives("no delta")),
        Misconception("plus-delta", gives=_dq_gives("plus delta")),
        Misconception("no-p", gives=_dq_gives("no p")),
        Misconception("no-lse", gives=_dq_gives("no lse")),
        Misconception("times-v", gives=_dq_gives("times v")),
        *(Misconception("along-keys", gives=_dq_gives(f"{which} along keys")) for which in ("delta", "lse", "both")),
        Misconception("last-block-wins", gives=_dq_gives("last block")),
        Misconception("scaled-in-16-bits", when=only("far")),
        Misconception("lse-in-16-bits", when=_only_among("high", "many-blocks")),
        Misconception("low-precision-sums", when=_only_among("many-blocks", "far")),
        Misconception("infinite-weights", when=only("hidden", kind="nan")),
    ),
)


# -------------------------------------------------------------------------------------------------- capstone.attention
def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, fault: str = "") -> Tensor:
    return _forward(q, k, v, fault)[0]


def _attention_cases(rng: Random) -> list[Case]:
    make = _Heads(rng)

    def given(*shape: int, dtype: str = "float32", slope: float = 0.0, upstream: str = "", small: bool = False) -> Case:
        q, k, v = make.qkv(*shape, dtype, slope)
        do = (make.normal(*q.shape) + 0.5).to(q.dtype) * (_SMALL if small else 1)
        if upstream == "[T, H, D]":  # from the projection behind attention, which takes the heads of a token together
            do = do.transpose(0, 1).contiguous().transpose(0, 1)
        elif upstream:
            do = dict(make.upstream(do))[upstream]
        note = listed("scores that rise" * (slope > 0), f"gradient {upstream}" * bool(upstream))
        note = listed(note, "small gradients" * small)
        tags = " strided" * (not do.is_contiguous()) + " small-gradients" * small
        return _attention_case((q, k, v), do, note=note, tags=tags)

    steps, faint, buried, stale = make.steps(33), make.faint(80, 80), make.buried(80, 80), make.stale(48)
    *waves, do = make.waves(33)
    *hidden, upstream = make.hidden(13)
    return [
        given(1, 1, 5, 4),
        given(1, 1, 16, 16),
        given(2, 2, 33, 16),
        given(4, 2, 15, 16, upstream="of a sum: stride 0"),
        given(4, 2, 31, 32, upstream="transposed"),
        given(3, 1, 20, 16, upstream="[T, H, D]"),
        given(2, 1, 18, 8, upstream="with a gap behind each row"),
        given(2, 2, 9, 16, upstream="one row expanded"),
        given(6, 2, 17, 20, dtype="bfloat16"),
        given(1, 1, 49, 16, slope=0.3),
        # Gradients of scores this large have few digits: this case is about the forward pass.
        _attention_case(steps, 0 * steps[0], note="scores that fall, scores that rise", tags="steep once"),
        _attention_case(faint, 0 * faint[0], note="one score 20 above the others", tags="faint"),
        _attention_case(buried, 0 * buried[0], note="scores of 0, and of 100 between them", tags="buried"),
        _attention_case(stale, 0 * stale[0], note="scores of 0, and of 11 behind them", tags="late-rise"),
        given(2, 1, 33, 16, small=True),
        _attention_case(waves, do, note="gradients with sums beyond 65,504", tags="far"),
        _attention_case(hidden, upstream, note="a high score that is not seen", tags="hidden"),
    ]


def _attention_traffic(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[int, int]:
    """Reads and writes of the four kernels. A gradient that is not contiguous is copied first."""
    T, rows = q.shape[1], _of_rows(q)
    copied = 0 if do.is_contiguous() else nbytes(do)
    per_query = 2 * nbytes(q) + 2 * rows  # q, do, lse, delta: what a block of keys needs of all queries that see it
    walked = sum(T - first for first in range(0, T, 16)) / T  # how many times the whole
    forward = nbytes(q) + _seen_bytes(q)
    backward = 2 * nbytes(q) + per_query + _seen_bytes(q) + nbytes(k, v) + walked * per_query
    return forward + backward + copied, 2 * nbytes(q) + 2 * rows + nbytes(k, v) + copied


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, fault: str = "", lse: Tensor | None = None
) -> dict[str, Tensor]:
    """dk and dv by their formulas, with a fault; dq is another exercise's. lse: in place of the right one."""
    import torch

    o, right = _forward(q, k, v)
    lse = right if lse is None else lse
    s, seen, use = _weights(q, k, fault)
    if fault == "last queries":  # the last block of them, in the last head
        seen = seen & (torch.arange(q.shape[1]) >= (q.shape[1] - 1) // 16 * 16)[:, None]
        s = s.masked_fill(~seen, -math.inf)
    p = torch.exp(s - (_along_keys(lse) if "lse" in _turned(fault) else lse[..., None]))
    dp = do @ v[use].mT
    delta = (o * do).sum(-1, keepdim=True)
    if "delta" in _turned(fault):
        delta = _along_keys(delta.squeeze(-1))
    if fault == "no delta":
        delta = delta * 0
    ds = dp - delta if fault == "no p" else p * (dp - delta)
    ds = ds * seen
    group = q.shape[0] // k.shape[0]
    each_k, each_v = ds.mT @ q / math.sqrt(q.shape[-1]), (ds if fault == "dv of ds" else p).mT @ do
    each_k = each_k / math.sqrt(q.shape[-1]) if fault == "scale twice" else each_k
    dk, dv = (x.unflatten(0, (-1, group)) for x in (each_k, each_v))
    if fault == "first of the group":
        return {"dk": dk[:, 0], "dv": dv[:, 0]}
    if fault in ("last of the group", "last queries"):
        return {"dk": dk[:, -1], "dv": dv[:, -1]}
    if fault == "mean of the group":
        return {"dk": dk.mean(1), "dv": dv.mean(1)}
    dk, dv = dk.sum(1), dv.sum(1)
    return {"dk": dv, "dv": dk} if fault == "exchanged" else {"dk": dk, "dv": dv}


def _of_gradients(fault: str, *names: str) -> Callable[..., dict]:
    return lambda *args: {
        name: x for name, x in _gradients(*args, fault=fault).items() if name in (names or ("dk", "dv"))
    }


def _in_another_order(order: str, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Tensor]:
    """The right gradients, returned in that order."""
    o, lse = _forward(q, k, v)
    right = {"dq": _dq(q, k, v, do, lse, (o * do).sum(-1)), **_gradients(q, k, v, do)}
    return {place: right[name] for place, name in zip(("dq", "dk", "dv"), order.split(), strict=True)}


def _of_output(gives: Callable[..., Tensor]) -> Callable[[Evidence], bool]:
    """Whether `gives` explains o wherever it is wrong. The gradients are wrong then as well, in ways of their own."""

    def when(evidence: Evidence) -> bool:
        wrong = [o for o in evidence.outcomes if o.wrong and o.wrong.output == "y"][:4]
        return bool(wrong) and all(
            compare.same({"y": gives(*compare.doubled(o.case.args))}, o.reply.outputs) for o in wrong
        )

    return when


def _walked(fault: str) -> Callable[..., Tensor]:
    """The o that a fault in the walk over the keys gives."""

    def gives(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Tensor:
        s, _, use = _weights(q, k)
        _, l, acc = ideas.online_softmax(s, v[use], 16, fault)
        return acc if fault == "not divided" else acc / l

    return gives


def _from_another_lse(of: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., dict]:
    """The gradients that follow from what `of` makes of each query's maximum and LSE."""

    def gives(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Tensor]:
        o, lse = _forward(q, k, v)
        lse = of(_weights(q, k)[0].amax(-1), lse)
        return {"dq": _dq(q, k, v, do, lse, (o * do).sum(-1)), **_gradients(q, k, v, do, lse=lse)}

    return gives


def _output_is_wrong(evidence: Evidence) -> bool:
    return evidence.output == "y"


ATTENTION = KernelExercise(
    id="capstone.attention",
    function="causal_attention",
    returns=("o",),
    cases=_attention_cases,
    reference=_attention,
    gradients=3,
    huge=lambda: (far(*_MANY),) * 4,
    traffic=Traffic(
        reads=lambda *args: _attention_traffic(*args)[0],
        writes=lambda *args: _attention_traffic(*args)[1],
        launches=4,
        # o, LSE, delta, three gradients, and a copy of the gradient of o where it is not contiguous
        memory=lambda q, k, v, do: 3 * nbytes(q) + 2 * _of_rows(q) + nbytes(k, v) + _NUMBERS,
        saved=lambda q, k, v, do: 2 * nbytes(q) + _of_rows(q) + nbytes(k, v),
    ),
    launch_rule=ideas.no_atomics(
        "{bytes} bytes were added with atomics, in the order in which programs happen to arrive: two runs then differ in "
        "their last bits. Which program could walk over all heads that share a block of keys?"
    ),
    misconceptions=(
        Misconception("faint-keys", when=only("faint")),
        Misconception("buried-keys", when=only("buried")),
        Misconception("stale-maximum", when=only("late-rise")),
        *(Misconception(name, when=_of_output(partial(_attention, fault=fault))) for name, fault in _SEEN),
        Misconception("no-scale", when=_of_output(partial(_attention, fault="p without scale"))),
        Misconception("not-divided", when=_of_output(_walked("not divided"))),
        Misconception("not-rescaled", when=_of_output(_walked("both"))),
        Misconception("not-rescaled", when=_of_output(_walked("acc"))),
        Misconception("not-rescaled", when=_of_output(_walked("l"))),
        Misconception("last-block-wins/2", when=_of_output(partial(_attention, fault="last block"))),
        Misconception(
            "maximum-not-carried",
            when=lambda evidence: _output_is_wrong(evidence) and _only_among("steep", "buried")(evidence),
        ),
        Misconception("small-gradients", when=only("small-gradients")),
        Misconception("forward-first", when=_output_is_wrong),
        *(Misconception(name, gives=_of_gradients(fault)) for name, fault in _SEEN[:5]),
        Misconception("exchanged", gives=_of_gradients("exchanged")),
        *(Misconception("exchanged/2", gives=partial(_in_another_order, order)) for order in ("dk dv dq", "dv dk dq")),
        Misconception("along-keys", gives=_of_gradients("delta along keys", "dk")),
        *(Misconception("along-keys", gives=_of_gradients(f"{which} along keys")) for which in ("lse", "both")),
        Misconception("one-head-of-the-group", gives=_of_gradients("first of the group")),
        Misconception("one-head-of-the-group", gives=_of_gradients("last of the group")),
        Misconception("mean-of-the-group", gives=_of_gradients("mean of the group")),
        *(
            Misconception("last-block-wins/3", gives=_of_gradients("last queries", *names))
            for names in (("dk",), ("dv",), ("dk", "dv"))
        ),
        Misconception("p-without-scale", gives=_of_gradients("p without scale")),
        Misconception("no-delta", gives=_of_gradients("no delta", "dk")),
        Misconception("no-p", gives=_of_gradients("no p", "dk")),
        Misconception("dv-of-ds", gives=_of_gradients("dv of ds", "dv")),
        Misconception("scale-twice", gives=_of_gradients("scale twice", "dk")),
        Misconception("lse", gives=_from_another_lse(lambda m, lse: lse - m)),
        Misconception("lse", gives=_from_another_lse(lambda m, lse: m)),
        Misconception("infinite-weights", when=only("hidden", kind="nan")),
        Misconception("gradient-strides", when=only("strided")),
        Misconception("dq-first", when=lambda evidence: evidence.output == "dq"),
    ),
)

EXERCISES = (PAIR, RATE, ACCUMULATE, RING, DQ, ATTENTION)
