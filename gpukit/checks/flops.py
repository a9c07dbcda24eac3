"""The exercises of notebook 03: cases, hints, and the wrong answers that each check must recognise."""

from __future__ import annotations

import math
from random import Random

from gpukit.grading.exercise import Case, FunctionExercise, Label, Misconception, Variant

NOTEBOOK = "03_flops"


def case(name: str, *args, tags: str = "") -> Case:
    return Case(name, args, frozenset(tags.split()))


# ------------------------------------------------------------------------------------------------------- flops.einsum
_EXPRESSIONS = (
    "b i, o i -> b o",
    "b i, i o -> b o",
    "l i, i -> l",
    "o i, o i ->",
    "i, j -> i j",
    "b t i, h i d -> b t h d",
    "b q h d, b k h d -> b h q k",
    "b t i, i -> b t i",
    "b i j -> b j i",
    "b i j -> b i",
    "i i ->",
    "i k, k j, j m -> i m",
    "b i, j i, j -> b",
    "i, j, k -> i j k",
)


def _einsum_cases(rng: Random) -> list[Case]:
    cases = []
    for expression in _EXPRESSIONS:
        axes = sorted({*expression} - {*" ,->"})
        sizes = {axis: rng.choice((3, 5, 7, 11, 13, 64, 128)) for axis in axes}
        unused = {"z": 17} if len(cases) % 2 else {}
        cases.append(case(f"{expression}  {_sizes(sizes | unused)}", expression, sizes | unused))
    words, lengths = "tokens d_in, d_out d_in -> tokens d_out", {"tokens": 1024, "d_in": 256, "d_out": 64}
    return [
        case(f"{words}  {_sizes(lengths)}", words, lengths),
        *cases,
        case("m k, k n -> m n  m=1, k=1, n=9", "m k, k n -> m n", {"m": 1, "k": 1, "n": 9}),
    ]


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def _parse(expression: str) -> tuple[list[list[str]], list[str]]:
    inputs, _, output = expression.partition("->")
    return [operand.split() for operand in inputs.split(",")], output.split()


def _volume(axes, sizes: dict[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _axes(expression: str) -> set[str]:
    return {axis for operand in _parse(expression)[0] for axis in operand}


def _summed(expression: str) -> bool:
    return bool(_axes(expression) - {*_parse(expression)[1]})


def _per_round(expression: str) -> int:
    return len(_parse(expression)[0]) - 1 + _summed(expression)


def _einsum_rounds(expression: str, sizes: dict[str, int]) -> int:
    return _volume(_axes(expression), sizes)


def _einsum(expression: str, sizes: dict[str, int]) -> int:
    return _einsum_rounds(expression, sizes) * _per_round(expression)


def _einsum_operands(expression: str, sizes: dict[str, int]) -> int:
    """The sizes of the operands, multiplied: axes that they share count as often as they occur."""
    return math.prod(_volume(operand, sizes) for operand in _parse(expression)[0])


def _einsum_pairwise(expression: str, sizes: dict[str, int]) -> int:
    """From left to right, keeping what a later operand or the result still needs."""
    operands, kept = _parse(expression)
    if len(operands) == 1:
        return _einsum(expression, sizes)
    total, have = 0, {*operands[0]}
    for i, operand in enumerate(operands[1:], start=1):
        needed = {*kept, *(axis for later in operands[i + 1 :] for axis in later)}
        axes = have | {*operand}
        total += _volume(axes, sizes) * (1 + bool(axes - needed))
        have = axes & needed
    return total


def _einsum_first_addition_free(expression: str, sizes: dict[str, int]) -> int:
    operands, kept = _parse(expression)
    rounds = _einsum_rounds(expression, sizes)
    return rounds * (len(operands) - 1) + rounds - _volume({*kept}, sizes)


EINSUM = FunctionExercise(
    id="flops.einsum",
    title="FLOPs of an einsum",
    notebook=NOTEBOOK,
    function="einsum_flops",
    label=Label(2, 10, "reading the cost of any product off its shapes"),
    hints=(
        "Write the nest of loops for a matrix product in plain Python, with three `for`. Which axes became a loop, and "
        "what happens in the innermost line?",
        "There is one loop for every different axis name, wherever and however often it occurs. A round costs one "
        "multiplication less than there are operands, and an addition if there is something to add up.",
        "Collect the names of all operands in a set and multiply their lengths. Per round: number of operands minus 1, "
        "plus 1 if the set has a name that the result lacks.",
    ),
    cases=_einsum_cases,
    expected=_einsum,
    unit="FLOPs",
    misconceptions=(
        Misconception(
            "multiply-add-is-one",
            "that is the number of rounds. A round of a matrix product has a multiplication and an addition: how many "
            "FLOPs is that?",
            gives=_einsum_rounds,
        ),
        Misconception(
            "summed-axis-forgotten",
            "yours counts one round for each element of the result. How many products go into one element?",
            gives=lambda expression, sizes: _volume(_parse(expression)[1], sizes) * _per_round(expression),
        ),
        Misconception(
            "summed-axis-forgotten",
            "yours counts two FLOPs for each element of the result. How many products go into one element?",
            gives=lambda expression, sizes: 2 * _volume(_parse(expression)[1], sizes),
        ),
        Misconception(
            "shared-axis-twice",
            "an axis that two operands share is counted once for each of them. It is one loop, in which the index of "
            "both moves. Which rounds have you counted?",
            gives=lambda expression, sizes: _einsum_operands(expression, sizes) * _per_round(expression),
        ),
        Misconception(
            "shared-axis-twice",
            "an axis that two operands share is counted once for each of them. It is one loop, in which the index of "
            "both moves. Which rounds have you counted?",
            gives=lambda expression, sizes: 2 * _einsum_operands(expression, sizes),
        ),
        Misconception(
            "always-two",
            "2 a round is right where two operands are multiplied and summed. What is added up in an outer product, "
            "and what is multiplied in the sum of a row?",
            gives=lambda expression, sizes: 2 * _einsum_rounds(expression, sizes),
        ),
        Misconception(
            "always-adds",
            "yours adds in every round, also where the result has all the axes. Is there anything to add up when each "
            "element of the result is one product?",
            gives=lambda expression, sizes: _einsum_rounds(expression, sizes) * len(_parse(expression)[0]),
        ),
        Misconception(
            "two-operands",
            "right for two operands, not for one or three. How many multiplications does a round need to multiply one "
            "element of each operand?",
            gives=lambda expression, sizes: _einsum_rounds(expression, sizes) * (1 + _summed(expression)),
        ),
        Misconception(
            "other-axes",
            "`sizes` also tells the lengths of axes that this expression does not have, and yours loops over those "
            "too. Which axes become loops?",
            gives=lambda expression, sizes: math.prod(sizes.values()) * _per_round(expression),
        ),
        Misconception(
            "first-addition-free",
            "yours counts K - 1 additions for K products. By the contract the result begins at zero and every product "
            "is added to it: how many additions then?",
            gives=_einsum_first_addition_free,
        ),
        Misconception(
            "pairwise",
            "yours computes three operands in two steps, with a result in between. That is what a good library does, "
            "and it may be far less work; the contract asks for one nest of loops. What does that cost?",
            gives=_einsum_pairwise,
        ),
    ),
    wrong=(
        Variant(
            "a multiply-add is one",
            (("return rounds * (multiplications + additions)", "return rounds"),),
            diagnosis="multiply-add-is-one",
        ),
        Variant(
            "elements of the result",
            (("for axis in axes)\n", "for axis in kept)\n"),),
            diagnosis="summed-axis-forgotten",
        ),
        Variant(
            "two for each element of the result",
            source="""import math


def einsum_flops(expression, sizes):
    return 2 * math.prod(sizes[axis] for axis in expression.split("->")[1].split())
""",
            diagnosis="summed-axis-forgotten",
        ),
        Variant(
            "a list instead of a set",
            (
                ("axes = {axis for operand in operands for axis in operand}", "axes = sum(operands, [])"),
                ("1 if axes - set(kept) else 0", "1 if set(axes) - set(kept) else 0"),
            ),
            diagnosis="shared-axis-twice",
        ),
        Variant(
            "sizes of the operands, times two",
            (
                (
                    "rounds = math.prod(sizes[axis] for axis in axes)",
                    "rounds = math.prod(sizes[axis] for operand in operands for axis in operand)",
                ),
                ("return rounds * (multiplications + additions)", "return 2 * rounds"),
            ),
            diagnosis="shared-axis-twice",
        ),
        Variant(
            "2 MNK for everything",
            (("return rounds * (multiplications + additions)", "return 2 * rounds"),),
            diagnosis="always-two",
        ),
        Variant(
            "an addition in every round",
            (("1 if axes - set(kept) else 0", "1"),),
            diagnosis="always-adds",
        ),
        Variant(
            "one multiplication in every round",
            (("multiplications = len(operands) - 1", "multiplications = 1"),),
            diagnosis="two-operands",
        ),
        Variant(
            "all sizes that are known",
            (("math.prod(sizes[axis] for axis in axes)", "math.prod(sizes.values())"),),
            diagnosis="other-axes",
        ),
        Variant(
            "the first product is not added",
            (
                (
                    "return rounds * (multiplications + additions)",
                    "return rounds * multiplications + rounds - math.prod(sizes[axis] for axis in kept)",
                ),
            ),
            diagnosis="first-addition-free",
        ),
        Variant(
            "two at a time",
            source="""import math


def einsum_flops(expression, sizes):
    left, right = expression.split("->")
    operands, kept = [set(part.split()) for part in left.split(",")], set(right.split())
    if len(operands) == 1:
        return math.prod(sizes[a] for a in operands[0]) * bool(operands[0] - kept)
    total = 0
    have = operands.pop(0)
    while operands:
        both = have | operands.pop(0)
        have = both & kept.union(*operands)
        total += math.prod(sizes[a] for a in both) * (1 + bool(both - have))
    return total
""",
            diagnosis="pairwise",
        ),
        Variant(
            "letters instead of names",
            source="""def einsum_flops(expression, sizes):
    total = 2
    for axis in set(expression) - set(" ,->"):
        total *= sizes[axis]
    return total
""",
            diagnosis="exception",
        ),
    ),
    right=(
        Variant(
            "a walk over the text",
            source="""def einsum_flops(expression, sizes):
    left, right = expression.split("->")
    names = left.replace(",", " ").split()
    total, seen, summed = 1, [], False
    for name in names:
        if name not in seen:
            seen.append(name)
            total *= sizes[name]
            summed = summed or name not in right.split()
    return total * left.count(",") + (total if summed else 0)
""",
        ),
        Variant(
            "the result's elements, times what goes into each",
            source="""import math
from functools import reduce


def einsum_flops(expression, sizes):
    left, right = (side.strip() for side in expression.split("->"))
    operands = [set(part.split()) for part in left.split(",")]
    everything = reduce(set.union, operands)
    kept = everything & set(right.split())
    elements = math.prod(map(sizes.get, kept))
    terms = math.prod(map(sizes.get, everything - kept))
    per_term = len(operands) if everything != kept else len(operands) - 1
    return elements * terms * per_term
""",
        ),
    ),
)


# -------------------------------------------------------------------------------------------------------- flops.layer
def _layer_cases(rng: Random) -> list[Case]:
    def one(what: str, B, T, d_model, heads, kv_heads, head_dim, d_ff, gated, causal) -> Case:
        tags = " ".join(
            [*(["gqa"] if kv_heads < heads else []), *(["gated"] if gated else []), *(["causal"] if causal else [])]
        )
        shown = f"B={B}, T={T}, d_model={d_model}, heads={heads}, kv_heads={kv_heads}, head_dim={head_dim}, d_ff={d_ff}"
        shown += f"{', gated' if gated else ''}{', causal' if causal else ''}"
        return case(
            f"{what} ({shown})", B, T, d_model, heads, kv_heads, head_dim, d_ff, gated, causal, tags=tags
        )  # fmt: skip

    def small(kv: int, gated: bool, causal: bool) -> Case:
        heads = kv * rng.choice((2, 3, 4))
        sizes = rng.choice((24, 40, 56)), rng.choice((8, 10, 12)), rng.choice((72, 88, 104))
        return one(
            "small", rng.randint(2, 5), 2 * rng.randint(4, 20) + 1, sizes[0], heads, kv, *sizes[1:], gated, causal
        )

    return [
        one("BERT-like", 4, 512, 768, 12, 12, 64, 3072, False, False),
        one("GPT-2", 8, 1024, 768, 12, 12, 64, 3072, False, True),
        one("Llama 3 8B", 1, 8192, 4096, 32, 8, 128, 14336, True, True),
        one("gated, no mask", 2, 300, 640, 10, 10, 64, 1720, True, False),
        one("multi-query", 3, 77, 512, 8, 1, 64, 2048, False, False),
        one("heads wider than d_model", 1, 1000, 5120, 64, 8, 128, 25600, True, True),
        small(1, False, True),
        small(2, True, False),
        one("one token", 1, 1, 16, 2, 2, 8, 64, False, True),
    ]


def _layer(
    B, T, d_model, heads, kv_heads, head_dim, d_ff, gated, causal,
    *, kv=None, projections=None, products=2, kv_score_heads=None, pairs=None, mlps=None, per=2, backward=2,
    attention_backward=None, out=True,
):  # fmt: skip
    """The right count, or one that errs in what the keywords say."""
    kv = kv_heads if kv is None else kv
    projected = per * B * T * d_model * head_dim * ((2 if out else 1) * heads + 2 * kv)
    pairs = (T * (T + 1) // 2 if causal else T * T) if pairs is None else pairs
    attention = products * per * B * (kv_score_heads or heads) * pairs * head_dim
    mlp = per * B * T * d_model * d_ff * ((3 if gated else 2) if mlps is None else mlps)
    weights = projected + mlp
    attention_backward = backward if attention_backward is None else attention_backward
    return weights + attention, backward * weights + attention_backward * attention


def _layer_wrong(label: str, say: str, **errs) -> Misconception:
    """`errs` may hold functions of the arguments, by name."""

    def gives(B, T, d_model, heads, kv_heads, head_dim, d_ff, gated, causal):
        given = {"T": T, "heads": heads, "kv_heads": kv_heads, "causal": causal, "gated": gated}
        fixed = {name: value(given) if callable(value) else value for name, value in errs.items()}
        return _layer(B, T, d_model, heads, kv_heads, head_dim, d_ff, gated, causal, **fixed)

    return Misconception(label, say, gives=gives)


LAYER = FunctionExercise(
    id="flops.layer",
    title="A transformer layer, forward and backward",
    notebook=NOTEBOOK,
    function="layer_flops",
    label=Label(3, 20, "every matrix product of a layer, attention's quadratic term, what backward costs"),
    hints=(
        "List the products one by one, with the three sizes M, N, K of each. How many are there without a gate? Two of "
        "them have no weights at all.",
        "Projections and MLP cost 2 x tokens x rows x columns of their matrix. Scores cost 2 x head_dim for each pair "
        "of a query and a key, for every query head; so does the weighted sum. In the backward pass a product C = A B "
        "becomes two: one for the gradient of A, one for that of B.",
        "Query and output matrix: d_model by heads times head_dim. Key and value: d_model by kv_heads times head_dim. "
        "Pairs: T squared, or with a mask the sum of 1 to T. MLP: two or three matrices d_model by d_ff. Every "
        "product, attention's as well, costs twice as much backward as forward.",
    ),
    cases=_layer_cases,
    expected=_layer,
    unit="FLOPs",
    misconceptions=(
        _layer_wrong(
            "multiply-add-is-one",
            "all of yours is half of what it should be. What does one multiply-add count for?",
            per=1,
        ),
        _layer_wrong(
            "no-attention",
            "yours has the products with weights and no others. Between projecting q, k, v and projecting back, two "
            "more take place. What are their shapes?",
            products=0,
        ),
        _layer_wrong(
            "one-attention-product",
            "one of attention's two products is missing. Scores from q and k are the first; what happens with them?",
            products=1,
        ),
        _layer_wrong(
            "mask-ignored",
            "with a causal mask yours still computes all T x T scores. How many of them does token t need?",
            pairs=lambda a: a["T"] ** 2,
        ),
        _layer_wrong(
            "diagonal-forgotten",
            "half of T x T is close, not right: the diagonal is not cut in two. How many tokens does the first one "
            "see, and the last?",
            pairs=lambda a: a["T"] ** 2 / 2 if a["causal"] else a["T"] ** 2,
        ),
        _layer_wrong(
            "diagonal-forgotten",
            "half of T x T is close, not right: the diagonal is not cut in two. How many tokens does the first one "
            "see, and the last?",
            pairs=lambda a: a["T"] ** 2 // 2 if a["causal"] else a["T"] ** 2,
        ),
        _layer_wrong(
            "diagonal-forgotten",
            "yours lets token t see the tokens before it and not itself. What does the first one see then?",
            pairs=lambda a: a["T"] * (a["T"] - 1) // 2 if a["causal"] else a["T"] ** 2,
        ),
        _layer_wrong(
            "kv-heads-in-projection",
            "keys and values are projected as if they had as many heads as the queries. How wide is their matrix when "
            "several query heads share one?",
            kv=lambda a: a["heads"],
        ),
        _layer_wrong(
            "kv-heads-in-scores",
            "sharing keys saves memory, not scores: every query head still makes its own. How many heads of scores are "
            "there?",
            kv_score_heads=lambda a: a["kv_heads"],
        ),
        _layer_wrong(
            "gate-forgotten",
            "with a gate there is one matrix more between d_model and d_ff. How many are there now?",
            mlps=2,
        ),
        _layer_wrong(
            "output-projection-forgotten",
            "one product with weights is missing in attention. How do the heads get back to d_model?",
            out=False,
        ),
        _layer_wrong(
            "backward-as-forward",
            "yours makes backward as expensive as forward. Each product has two operands: how many of them need a "
            "gradient?",
            backward=1,
        ),
        _layer_wrong(
            "attention-backward-once",
            "right but for attention's share of the backward pass: those two products have no weights, but both of "
            "their operands came from x. How many gradients does each need?",
            attention_backward=1,
        ),
        _layer_wrong(
            "attention-backward-once",
            "right but for attention's share of the backward pass, which is missing: no weights there, but gradients "
            "all the same. Of which operands?",
            attention_backward=0,
        ),
        _layer_wrong(
            "recomputed",
            "yours runs the forward pass again inside the backward pass. That is activation recomputation; the "
            "contract says that nothing is computed twice. What is left?",
            backward=3,
        ),
    ),
    wrong=(
        Variant(
            "multiply-adds",
            (
                ("projections = 2 * tokens", "projections = tokens"),
                ("attention = 2 * (2 * B", "attention = 2 * (B"),
                ("mlp = 2 * tokens", "mlp = tokens"),
            ),
            diagnosis="multiply-add-is-one",
        ),
        Variant("weights only", (("projections + attention + mlp", "projections + mlp"),), diagnosis="no-attention"),
        Variant(
            "scores only",
            (("attention = 2 * (2 * B * heads * pairs * head_dim)", "attention = 2 * B * heads * pairs * head_dim"),),
            diagnosis="one-attention-product",
        ),
        Variant("no mask", (("T * (T + 1) // 2 if causal else T * T", "T * T"),), diagnosis="mask-ignored"),
        Variant("half the square", (("T * (T + 1) // 2", "T * T / 2"),), diagnosis="diagonal-forgotten"),
        Variant("half the square, whole", (("T * (T + 1) // 2", "T * T // 2"),), diagnosis="diagonal-forgotten"),
        Variant("without itself", (("T * (T + 1) // 2", "T * (T - 1) // 2"),), diagnosis="diagonal-forgotten"),
        Variant(
            "k and v as wide as q",
            (("2 * heads + 2 * kv_heads", "4 * heads"),),
            diagnosis="kv-heads-in-projection",
        ),
        Variant(
            "scores of the shared heads",
            (("2 * B * heads * pairs", "2 * B * kv_heads * pairs"),),
            diagnosis="kv-heads-in-scores",
        ),
        Variant("no gate", (("(3 if gated else 2)", "2"),), diagnosis="gate-forgotten"),
        Variant(
            "no output projection",
            (("2 * heads + 2 * kv_heads", "heads + 2 * kv_heads"),),
            diagnosis="output-projection-forgotten",
        ),
        Variant(
            "backward once",
            (("return forward, 2 * forward", "return forward, forward"),),
            diagnosis="backward-as-forward",
        ),
        Variant(
            "weights need gradients, attention one",
            (("return forward, 2 * forward", "return forward, 2 * (projections + mlp) + attention"),),
            diagnosis="attention-backward-once",
        ),
        Variant(
            "attention has no weights, so no gradients",
            (("return forward, 2 * forward", "return forward, 2 * (projections + mlp)"),),
            diagnosis="attention-backward-once",
        ),
        Variant(
            "forward again in backward",
            (("return forward, 2 * forward", "return forward, 3 * forward"),),
            diagnosis="recomputed",
        ),
    ),
    right=(
        Variant(
            "a list of products M, N, K",
            source="""def layer_flops(B, T, d_model, heads, kv_heads, head_dim, d_ff, gated, causal):
    rows = B * T
    matmuls = [
        (rows, heads * head_dim, d_model),
        (rows, kv_heads * head_dim, d_model),
        (rows, kv_heads * head_dim, d_model),
        (rows, d_model, heads * head_dim),
        (rows, d_ff, d_model),
        (rows, d_model, d_ff),
    ]
    if gated:
        matmuls.append((rows, d_ff, d_model))
    for _ in range(B * heads):
        for query in range(T) if causal and T < 100 else ():
            matmuls += [(1, query + 1, head_dim), (1, head_dim, query + 1)]
    if not causal or T >= 100:
        seen = sum(range(1, T + 1)) if causal else T * T
        matmuls += [(B * heads, seen, head_dim)] * 2
    forward = sum(2 * M * N * K for M, N, K in matmuls)
    grads = sum(2 * M * N * K + 2 * M * N * K for M, N, K in matmuls)
    return (forward, grads)
""",
        ),
        Variant(
            "FLOPs a token, in a list",
            source="""def layer_flops(B, T, d_model, heads, kv_heads, head_dim, d_ff, gated, causal):
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    weights = d_model * (q_width + kv_width + kv_width + q_width) + (2 + int(gated)) * d_model * d_ff
    seen = T if not causal else (T + 1) / 2  # tokens that one token sees, on average
    per_token = 2 * weights + 4 * q_width * seen
    total = B * T * per_token
    return [int(total), int(total) * 2]
""",
        ),
    ),
)


# -------------------------------------------------------------------------------------------------------- flops.audit
def _audit_cases(rng: Random) -> list[Case]:
    def one(what: str, layers, d_model, d_ff, vocab, positions, tied, B, T) -> Case:
        shown = f"{what}: vocab={vocab:,}, positions={positions:,}, {'tied' if tied else 'a head of its own'}, T={T:,}"
        return case(shown, layers, d_model, d_ff, vocab, positions, tied, B, T, tags="tied" if tied else "untied")

    def small(tied: bool, positions: int) -> Case:
        sizes = rng.randint(1, 4), 16 * rng.randint(1, 4), 8 * rng.randint(8, 20), rng.randint(100, 999)
        return one("small", *sizes, positions, tied, rng.randint(1, 4), rng.randint(5, 60))

    return [
        one("GPT-2 small", 12, 768, 3072, 50257, 1024, True, 4, 1024),
        one("the same, untied", 12, 768, 3072, 50257, 1024, False, 4, 1024),
        one("rotary, tied", 24, 1024, 4096, 32000, 0, True, 2, 2048),
        one("rotary, untied", 32, 4096, 11008, 32000, 0, False, 1, 4096),
        one("large vocabulary", 4, 512, 2048, 256000, 0, False, 1, 256),
        one("long context", 2, 128, 512, 1000, 65536, True, 1, 65536),
        small(True, 0),
        small(False, 64),
    ]


def _audit(layers, d_model, d_ff, vocab, positions, tied, B, T, *, multiplied=None, square=1, passes=6):
    """The right count, or one that errs in what the keywords say."""
    products = vocab * d_model if multiplied is None else multiplied
    blocks = layers * (4 * d_model**2 + 2 * d_model * d_ff)
    return passes * B * T * (blocks + products + layers * 2 * T * d_model * square)


def _audit_wrong(label: str, say: str, **errs) -> Misconception:
    def gives(layers, d_model, d_ff, vocab, positions, tied, B, T):
        table, own_head = vocab * d_model, 0 if tied else vocab * d_model
        given = {"table": table, "head": own_head, "positions": positions * d_model}
        fixed = {name: value(given) if callable(value) else value for name, value in errs.items()}
        return _audit(layers, d_model, d_ff, vocab, positions, tied, B, T, **fixed)

    return Misconception(label, say, gives=gives)


AUDIT = FunctionExercise(
    id="flops.audit",
    title="Detective: a FLOP count that is too high",
    notebook=NOTEBOOK,
    function="step_flops",
    label=Label(3, 15, "which parameters multiply, and what FLOPs per parameter cannot see"),
    hints=(
        "Take the table above. Divide the excess of each model by 6 x B x T x d_model. Which numbers of the model come "
        "out?",
        "The rule of 6 rests on every parameter being in a multiply-add for every token. A row of an embedding table "
        "is fetched, not multiplied. Which tables of this model are only fetched from, and which one is also a matrix?",
        "Of all that is not in a layer, one product remains: x times the head. It takes place whether the head has "
        "memory of its own or not.",
    ),
    cases=_audit_cases,
    expected=_audit,
    unit="FLOPs",
    misconceptions=(
        _audit_wrong(
            "lookups-counted",
            "every parameter is counted as if it met every token in a multiply-add. What does an embedding do with its "
            "table for one token?",
            multiplied=lambda a: a["table"] + a["positions"] + a["head"],
        ),
        _audit_wrong(
            "token-lookup-counted",
            "the positions are gone; the table of tokens is still counted once too often where the head is its own. "
            "What happens with that table at the input, and what at the output?",
            multiplied=lambda a: a["table"] + a["head"],
        ),
        _audit_wrong(
            "position-lookup-counted",
            "right for rotary models; a learned table of positions is still counted. What is done with it for a token?",
            multiplied=lambda a: a["table"] + a["positions"],
        ),
        _audit_wrong(
            "position-lookup-counted",
            "a learned table of positions is still counted, and a tied head is not. Which of the two multiplies?",
            multiplied=lambda a: a["positions"] + a["head"],
        ),
        _audit_wrong(
            "logits-forgotten",
            "now the logits are missing where the head is tied. Sharing memory with the embedding saves parameters: "
            "does it save the product?",
            multiplied=lambda a: a["head"],
        ),
        _audit_wrong(
            "logits-forgotten",
            "now the logits are missing. Which product turns x into one number for each word of the vocabulary?",
            multiplied=0,
        ),
        _audit_wrong(
            "attention-dropped",
            "attention's products are gone. They have no parameters, but were they the fault?",
            square=0,
        ),
        _audit_wrong(
            "attention-dropped",
            "attention's products are gone, and the tables are still counted. What in the table above grows with T?",
            multiplied=lambda a: a["table"] + a["positions"] + a["head"],
            square=0,
        ),
        _audit_wrong(
            "mask-subtracted",
            "the scores are halved for a mask. The contract counts as PyTorch's counter does, the whole square: was "
            "that the fault?",
            square=0.5,
        ),
        _audit_wrong(
            "mask-subtracted",
            "the scores are halved for a mask, which the contract does not ask for, and the tables are still counted. "
            "Does the excess in the table above grow with T for a fixed vocabulary?",
            multiplied=lambda a: a["table"] + a["positions"] + a["head"],
            square=0.5,
        ),
        _audit_wrong(
            "forward-only",
            "that is a forward pass. What does a step do besides?",
            passes=2,
        ),
    ),
    wrong=(
        Variant(
            "as it was",
            source="""def step_flops(layers, d_model, d_ff, vocab, positions, tied, B, T):
    layer = 4 * d_model**2 + 2 * d_model * d_ff
    embeddings = vocab * d_model + positions * d_model
    head = 0 if tied else vocab * d_model
    params = layers * layer + embeddings + head
    scores = layers * 2 * T * d_model
    return 6 * B * T * (params + scores)
""",
            diagnosis="lookups-counted",
        ),
        Variant(
            "positions taken out",
            (("multiplied = layers * layer + head", "multiplied = layers * layer + head + (not tied) * head"),),
            diagnosis="token-lookup-counted",
        ),
        Variant(
            "tokens taken out",
            (("multiplied = layers * layer + head", "multiplied = layers * layer + head + positions * d_model"),),
            diagnosis="position-lookup-counted",
        ),
        Variant(
            "the wrong table taken out",
            (
                (
                    "multiplied = layers * layer + head",
                    "multiplied = layers * layer + positions * d_model + (0 if tied else head)",
                ),
            ),
            diagnosis="position-lookup-counted",
        ),
        Variant(
            "both tables taken out, a tied head too",
            (("multiplied = layers * layer + head", "multiplied = layers * layer + (0 if tied else head)"),),
            diagnosis="logits-forgotten",
        ),
        Variant(
            "layers only",
            (("multiplied = layers * layer + head", "multiplied = layers * layer"),),
            diagnosis="logits-forgotten",
        ),
        Variant(
            "the rule of 6 and no more",
            (("(multiplied + scores)", "multiplied"),),
            diagnosis="attention-dropped",
        ),
        Variant(
            "causal",
            (("(multiplied + scores)", "(multiplied + scores // 2)"),),
            diagnosis="mask-subtracted",
        ),
        Variant("forward", (("6 * B * T * (multiplied", "2 * B * T * (multiplied"),), diagnosis="forward-only"),
    ),
    right=(
        Variant(
            "product by product",
            source="""def step_flops(layers, d_model, d_ff, vocab, positions, tied, B, T):
    def product(M, N, K):
        return 3 * 2 * M * N * K

    rows = B * T
    total = product(rows, vocab, d_model)
    for _ in range(layers):
        total += 4 * product(rows, d_model, d_model)
        total += product(rows, d_ff, d_model) + product(rows, d_model, d_ff)
        total += product(rows, T, d_model) + product(rows, d_model, T)
    return total
""",
        ),
        Variant(
            "parameters less those that are looked up",
            source="""def step_flops(layers, d_model, d_ff, vocab, positions, tied, B, T):
    params = layers * 2 * d_model * (2 * d_model + d_ff) + (1 if tied else 2) * vocab * d_model + positions * d_model
    idle = positions * d_model
    if not tied:
        idle += vocab * d_model
    return 6 * B * T * (params - idle) + 12 * layers * d_model * B * T * T
""",
        ),
    ),
)


# ---------------------------------------------------------------------------------------------------------- flops.mfu
def _mfu_cases(rng: Random) -> list[Case]:
    cases = []
    for what, params, gpus, rate, sparse, recomputed in (
        ("A100", 1.3e9, 8, 312.0, False, 0.0),
        ("A100, datasheet with sparsity", 6.9e9, 64, 624.0, True, 0.0),
        ("H100, datasheet with sparsity", 8.0e9, 512, 1979.0, True, 0.0),
        ("H100, dense, everything recomputed", 70.6e9, 1024, 989.4, False, 1.0),
        ("H100, with sparsity, attention recomputed", 405.9e9, 16384, 1979.0, True, 0.25),
        ("B200, with sparsity, everything recomputed", 32.8e9, 256, 4500.0, True, 1.0),
        ("one RTX 4090", 0.124e9, 1, 165.2, False, 0.0),
    ):
        forward = params * rng.uniform(2.02, 2.4)
        peak = gpus * rate * 1e12 / (2 if sparse else 1)
        tokens = round(rng.uniform(0.2, 0.55) * peak / (3 * forward))
        name = f"{what}: {tokens:,} tokens/s, {gpus:,} GPUs, recomputed={recomputed:g}"
        tags = ("sparse " if sparse else "") + ("recomputed" if recomputed else "")
        cases.append(case(name, float(tokens), forward, gpus, rate, sparse, recomputed, tags=tags))
    return cases


def _mfu(tokens, forward, gpus, rate, sparse, recomputed, *, model=3.0, hardware=None, halved=None, per_gpu=True):
    halved = sparse if halved is None else halved
    peak = (gpus if per_gpu else 1) * rate * 1e12 / (2 if halved else 1)
    hardware = 3 + recomputed if hardware is None else hardware
    return model * tokens * forward / peak, hardware * tokens * forward / peak


MFU = FunctionExercise(
    id="flops.mfu",
    title="MFU and HFU",
    notebook=NOTEBOOK,
    function="utilisation",
    label=Label(2, 10, "what MFU divides by what: dense peaks, useful work"),
    hints=(
        "Both are a rate that was reached over a rate that is possible. Which of the two rates does recomputation "
        "change, and in which of the two numbers?",
        "The model needs its forward pass once and a backward pass twice as large, for every token, on whatever "
        "hardware. What is possible is the dense rate: with two in four elements zero, half of the products of the "
        "sparse rate are never carried out.",
        "Peak: GPUs times rate times 10^12, halved where the rate is with sparsity. MFU: tokens a second times three "
        "forward passes over the peak. HFU: the same with the recomputed share added to the three.",
    ),
    cases=_mfu_cases,
    expected=_mfu,
    tolerance=1e-9,
    misconceptions=(
        Misconception(
            "sparse-peak",
            "where the datasheet's rate is with sparsity your utilisation is half of what it is. Can a model without "
            "zeros in its matrices reach that rate?",
            gives=lambda *a: _mfu(*a, halved=False),
        ),
        Misconception(
            "sparse-peak-doubled",
            "yours doubles a rate with sparsity. It is twice the dense one already: which one is possible here?",
            gives=lambda tokens, forward, gpus, rate, sparse, recomputed: _mfu(
                tokens, forward, gpus, rate * (2 if sparse else 1), False, recomputed
            ),
        ),
        Misconception(
            "always-halved",
            "yours halves every rate, also one that is dense already. What does with_sparsity say?",
            gives=lambda *a: _mfu(*a, halved=True),
        ),
        Misconception(
            "recomputation-in-mfu",
            "recomputing raises your MFU: a run that works twice for the same result would look better. Which FLOPs "
            "does the model need?",
            gives=lambda *a: _mfu(*a, model=3 + a[-1]),
        ),
        Misconception(
            "recomputation-forgotten",
            "yours gives MFU twice. What else did the GPUs carry out where something was recomputed?",
            gives=lambda *a: _mfu(*a, hardware=3),
        ),
        Misconception(
            "swapped",
            "these are the two right numbers in the wrong order. Which one can recomputation raise?",
            gives=lambda *a: _mfu(*a)[::-1],
        ),
        Misconception(
            "whole-step-recomputed",
            "the forward pass is recomputed, not the step. How many forward passes does a step with full "
            "recomputation cost in all?",
            gives=lambda *a: _mfu(*a, hardware=3 * (1 + a[-1])),
        ),
        Misconception(
            "forward-only",
            "that is the forward pass alone. What does a training step do besides, and at what cost?",
            gives=lambda *a: _mfu(*a, model=1, hardware=1 + a[-1]),
        ),
        Misconception(
            "backward-as-forward",
            "yours makes backward as expensive as forward. How many products does the gradient of one product take?",
            gives=lambda *a: _mfu(*a, model=2, hardware=2 + a[-1]),
        ),
        Misconception(
            "parameters-not-flops",
            "yours multiplies by 6, which is for parameters. forward_flops has its factor 2 already: what is left?",
            gives=lambda *a: _mfu(*a, model=6, hardware=6 + 2 * a[-1]),
        ),
        Misconception(
            "parameters-not-flops",
            "yours multiplies by 6, which is for parameters. forward_flops has its factor 2 already: what is left?",
            gives=lambda *a: _mfu(*a, model=6, hardware=6 + a[-1]),
        ),
        Misconception(
            "one-gpu",
            "tokens_per_s is of all GPUs together. What can all of them do together?",
            gives=lambda *a: _mfu(*a, per_gpu=False),
        ),
        Misconception(
            "percent",
            "yours is in percent, or off by a power of ten. By the contract 1 is everything; tera is 10^12.",
            when=lambda evidence: _power_of_ten(evidence),
        ),
    ),
    wrong=(
        Variant("datasheet as printed", ((" / (2 if with_sparsity else 1)", ""),), diagnosis="sparse-peak"),
        Variant(
            "sparsity doubles",
            (("/ (2 if with_sparsity else 1)", "* (2 if with_sparsity else 1)"),),
            diagnosis="sparse-peak-doubled",
        ),
        Variant("always half", (("(2 if with_sparsity else 1)", "2"),), diagnosis="always-halved"),
        Variant(
            "recomputation counts as work",
            (("return 3 * forward_per_s,", "return (3 + recomputed) * forward_per_s,"),),
            diagnosis="recomputation-in-mfu",
        ),
        Variant(
            "the same twice",
            (("(3 + recomputed) * forward_per_s", "3 * forward_per_s"),),
            diagnosis="recomputation-forgotten",
        ),
        Variant(
            "HFU, MFU",
            (
                (
                    "return 3 * forward_per_s, (3 + recomputed) * forward_per_s",
                    "return (3 + recomputed) * forward_per_s, 3 * forward_per_s",
                ),
            ),
            diagnosis="swapped",
        ),
        Variant(
            "all three again",
            (("(3 + recomputed) * forward_per_s", "3 * (1 + recomputed) * forward_per_s"),),
            diagnosis="whole-step-recomputed",
        ),
        Variant(
            "forward",
            (
                (
                    "return 3 * forward_per_s, (3 + recomputed) * forward_per_s",
                    "return forward_per_s, (1 + recomputed) * forward_per_s",
                ),
            ),
            diagnosis="forward-only",
        ),
        Variant(
            "backward once",
            (
                (
                    "return 3 * forward_per_s, (3 + recomputed) * forward_per_s",
                    "return 2 * forward_per_s, (2 + recomputed) * forward_per_s",
                ),
            ),
            diagnosis="backward-as-forward",
        ),
        Variant(
            "six",
            (
                (
                    "return 3 * forward_per_s, (3 + recomputed) * forward_per_s",
                    "return 6 * forward_per_s, (6 + 2 * recomputed) * forward_per_s",
                ),
            ),
            diagnosis="parameters-not-flops",
        ),
        Variant("one GPU", (("gpus * rate_tflops", "rate_tflops"),), diagnosis="one-gpu"),
        Variant(
            "percent",
            (
                (
                    "return 3 * forward_per_s, (3 + recomputed) * forward_per_s",
                    "return 300 * forward_per_s, 100 * (3 + recomputed) * forward_per_s",
                ),
            ),
            diagnosis="percent",
        ),
    ),
    right=(
        Variant(
            "seconds that a token should take, over seconds that it takes",
            source="""def utilisation(tokens_per_s, forward_flops, gpus, rate_tflops, with_sparsity, recomputed):
    dense = rate_tflops * 0.5 if with_sparsity else rate_tflops
    takes_s = gpus / tokens_per_s  # GPU seconds a token
    forward_s = forward_flops / (dense * 1e12)
    needs_s = forward_s + 2 * forward_s
    return [needs_s / takes_s, (needs_s + recomputed * forward_s) / takes_s]
""",
        ),
        Variant(
            "TFLOP/s of one GPU",
            source="""def utilisation(tokens_per_s, forward_flops, gpus, rate_tflops, with_sparsity, recomputed):
    if with_sparsity:
        rate_tflops = rate_tflops / 2
    mfu = 1e-12 * tokens_per_s / gpus * forward_flops * 3 / rate_tflops
    return mfu, mfu * (1 + recomputed / 3)
""",
        ),
    ),
)


def _power_of_ten(evidence) -> bool:
    """Every output is the expected one times one power of ten."""
    if evidence.kind != "values" or isinstance(evidence.expected, int | float):
        return False
    powers = [math.log10(yours / right) for yours, right in zip(evidence.outputs, evidence.expected, strict=True)]
    return abs(powers[0] - round(powers[0])) < 1e-6 and round(powers[0]) != 0 and max(powers) - min(powers) < 1e-6


# --------------------------------------------------------------------------------------------------------- flops.days
def _days_cases(rng: Random) -> list[Case]:
    cases = []
    for what, params, active, tokens, gpus, peak, mfu, gap, stops, restart in (
        ("70 B, 15 T tokens, 1,024 H100", 70e9, 70e9, 15e12, 1024, 989.5, 0.5, 1.0, 0, 0.0),
        ("405 B, 15.6 T tokens, 16,384 H100", 405e9, 405e9, 15.6e12, 16384, 989.4, 0.4, 0.5, 466, 0.2),
        ("a mixture of experts, 671 B, 37 B active", 671e9, 37e9, 14.8e12, 2048, 989.4, 0.3, 2.0, 0, 0.0),
        ("a mixture of experts that fails", 46.7e9, 12.9e9, 4e12, 256, 312.0, 0.4, 3.0, 55, 0.75),
        ("GPT-2 on one GPU", 124e6, 124e6, 10e9, 1, 312.0, 0.35, 0.25, 3, 0.1),
    ):
        gap, mfu = gap * rng.uniform(0.8, 1.2), mfu * rng.uniform(0.9, 1.1)
        name = f"{what}, {stops} interruptions"
        tags = ("moe " if active < params else "") + ("interrupted" if stops else "")
        cases.append(case(name, params, active, tokens, gpus, peak, mfu, gap, stops, restart, tags=tags))
    return cases


def _days(
    params, active, tokens, gpus, peak, mfu, gap, stops, restart, *, flops=6.0, lost=0.5, down=1.0, useful=1.0
) -> float:  # fmt: skip
    training = flops * active * tokens / (gpus * peak * 1e12 * mfu * useful) / 3600
    return (training + stops * (lost * gap + down * restart)) / 24


DAYS = FunctionExercise(
    id="flops.days",
    title="How long a training run takes",
    notebook=NOTEBOOK,
    function="training_days",
    label=Label(2, 10, "from parameters and tokens to days; what an interruption costs"),
    hints=(
        "An interruption comes at some moment between two checkpoints. Sometimes nearly nothing is lost, sometimes "
        "nearly everything since the last one. How much is it in the long run?",
        "FLOPs in all over FLOP/s of all GPUs at the MFU gives the time of an undisturbed run. Only parameters that a "
        "token meets are multiplied with it. Add for each interruption the work that is done again, and the restart.",
        "Hours: 6 times active parameters times tokens, over GPUs times peak times 10^12 times MFU times 3,600. Plus "
        "interruptions times (half the hours between checkpoints plus the restart). Divide by 24.",
    ),
    cases=_days_cases,
    expected=_days,
    tolerance=1e-9,
    unit="days",
    misconceptions=(
        Misconception(
            "all-experts",
            "right for dense models. In a mixture of experts, how many of the parameters does one token meet?",
            gives=lambda params, active, *rest: _days(params, params, *rest),
        ),
        Misconception(
            "all-lost",
            "every interruption costs you the whole time between two checkpoints, the worst that can happen. What is "
            "it on average, if it may come at any moment?",
            gives=lambda *a: _days(*a, lost=1),
        ),
        Misconception(
            "nothing-lost",
            "right without interruptions. After one, training goes on from the last checkpoint: what was done since "
            "then?",
            gives=lambda *a: _days(*a, lost=0),
        ),
        Misconception(
            "restart-forgotten",
            "right without interruptions. What was lost is done again in yours, but from which moment on?",
            gives=lambda *a: _days(*a, down=0),
        ),
        Misconception(
            "interruptions-forgotten",
            "right without interruptions, and yours knows nothing of them. What does each one cost?",
            gives=lambda *a: _days(*a, lost=0, down=0),
        ),
        Misconception(
            "forward-only",
            "yours is a third: the forward pass. How many FLOPs for a parameter and a token does training take?",
            gives=lambda *a: _days(*a, flops=2),
        ),
        Misconception(
            "mfu-forgotten",
            "yours assumes that all GPUs compute at their peak. What does mfu say?",
            gives=lambda params, active, tokens, gpus, peak, mfu, *rest: _days(
                params, active, tokens, gpus, peak, 1, *rest
            ),
        ),
        Misconception(
            "mfu-upside-down",
            "a lower MFU makes your run shorter. On which side of the division does it belong?",
            gives=lambda params, active, tokens, gpus, peak, mfu, *rest: _days(
                params, active, tokens, gpus, peak, 1 / mfu, *rest
            ),
        ),
        Misconception(
            "peak-halved",
            "yours halves the peak. That is right for a rate with sparsity; what does the contract say of this one?",
            gives=lambda *a: _days(*a, useful=0.5),
        ),
        Misconception(
            "hours",
            "yours is in hours, or in seconds. How many are in a day?",
            when=lambda evidence: any(
                math.isclose(evidence.outputs, evidence.expected * factor, rel_tol=1e-6) for factor in (24, 1440, 86400)
            ),
        ),
        Misconception(
            "hours-and-days",
            "right without interruptions; what they cost comes out in another unit. checkpoint_hours and restart_hours "
            "are hours: what is your sum in?",
            gives=lambda params, active, tokens, gpus, peak, mfu, gap, stops, restart: _days(
                params, active, tokens, gpus, peak, mfu, 24 * gap, stops, 24 * restart
            ),
        ),
    ),
    wrong=(
        Variant("all experts", (("6 * active_params", "6 * params"),), diagnosis="all-experts"),
        Variant("everything lost", (("checkpoint_hours / 2", "checkpoint_hours"),), diagnosis="all-lost"),
        Variant(
            "nothing lost", (("(checkpoint_hours / 2 + restart_hours)", "restart_hours"),), diagnosis="nothing-lost"
        ),
        Variant(
            "no restart",
            (("(checkpoint_hours / 2 + restart_hours)", "checkpoint_hours / 2"),),
            diagnosis="restart-forgotten",
        ),
        Variant(
            "nothing ever fails",
            (("(training_hours + lost_hours)", "training_hours"),),
            diagnosis="interruptions-forgotten",
        ),
        Variant("two", (("6 * active_params", "2 * active_params"),), diagnosis="forward-only"),
        Variant("at the peak", ((" * mfu * 3600", " * 3600"),), diagnosis="mfu-forgotten"),
        Variant("times 1 / MFU", ((" * mfu * 3600", " / mfu * 3600"),), diagnosis="mfu-upside-down"),
        Variant("half the peak", ((" * mfu * 3600", " / 2 * mfu * 3600"),), diagnosis="peak-halved"),
        Variant("hours", (("(training_hours + lost_hours) / 24", "training_hours + lost_hours"),), diagnosis="hours"),
        Variant(
            "days and hours",
            (("(training_hours + lost_hours) / 24", "training_hours / 24 + lost_hours"),),
            diagnosis="hours-and-days",
        ),
    ),
    right=(
        Variant(
            "seconds",
            source="""def training_days(params, active_params, tokens, gpus, peak_tflops, mfu, checkpoint_hours, interruptions,
                  restart_hours):
    seconds = 6 * active_params * tokens / (peak_tflops * 1e12) / gpus / mfu
    for _ in range(interruptions):
        seconds += 1800 * checkpoint_hours + 3600 * restart_hours
    return seconds / 86_400
""",
        ),
        Variant(
            "days at the rate of a GPU",
            source="""def training_days(params, active_params, tokens, gpus, peak_tflops, mfu, checkpoint_hours, interruptions,
                  restart_hours):
    day = 24 * 60 * 60
    tokens_per_day = gpus * day * (mfu * peak_tflops * 1e12) / (2 * active_params + 4 * active_params)
    expected_loss = 0.5 * checkpoint_hours / 24 + restart_hours / 24
    return tokens / tokens_per_day + interruptions * expected_loss
""",
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------- flops.roofline
def _roofline_cases(rng: Random) -> list[Case]:
    h200, a100, t4 = (989.4, 66.9, 4800.0), (312.0, 19.5, 1555.0), (65.0, 8.1, 320.0)
    cases = []
    for what, M, d_model, d_ff, itemsize, rates in (
        ("prefill on an H200", 8192 + rng.randrange(1000), 4096, 14336, 2, h200),
        ("decode on an H200", rng.randint(1, 16), 4096, 14336, 2, h200),
        ("near the ridge on an A100", 190 + rng.randrange(30), 2048, 8192, 2, a100),
        ("a narrow model on an H200", 4096 + rng.randrange(100), 128, 512, 2, h200),
        ("fp32 on a T4", 512 + rng.randrange(100), 768, 3072, 4, t4),
        ("slow lanes", 4096 + rng.randrange(100), 256, 1024, 2, (989.4, 0.9, 4800.0)),
    ):
        for fused in (False, True):
            shown = (
                f"M={M}, d_model={d_model}, d_ff={d_ff}, itemsize={itemsize}, {'fused' if fused else 'three kernels'}"
            )
            tags = "fused" if fused else "separate"
            cases.append(case(f"{what}: {shown}", M, d_model, d_ff, itemsize, *rates, fused, tags=tags))
    return cases


def _mlp_parts(M, d_model, d_ff, itemsize, tensor, lane, gbps):
    """Microseconds: of a product's arithmetic, of GELU's, of moving x, a weight matrix, h."""
    sizes = (M * d_model, d_model * d_ff, M * d_ff)
    moves = (n * itemsize / (gbps * 1e3) for n in sizes)
    return 2 * M * d_model * d_ff / (tensor * 1e6), 8 * M * d_ff / (lane * 1e6), *moves


def _mlp(*args, both=max, weights=1.0, separate_h=2, gelu_on=None):
    """The right time, or one that errs in what the keywords say. `both`: how arithmetic and traffic combine."""
    *sizes, fused = args
    if gelu_on is not None:
        sizes[5] = sizes[gelu_on]
    product, gelu, x, w, h = _mlp_parts(*sizes)
    moved = x + weights * w + h
    if fused:
        return both(max(product, gelu), moved) + both(product, moved)
    return 2 * both(product, moved) + both(gelu, separate_h * h)


def _mlp_sums(*args):
    *sizes, fused = args
    product, gelu, x, w, h = _mlp_parts(*sizes)
    moved = 2 * (x + w + h) + (0 if fused else 2 * h)
    return max(2 * product + (0 if fused else gelu), moved)


def _mlp_sums_units(*args):
    *sizes, fused = args
    product, gelu, x, w, h = _mlp_parts(*sizes)
    return max(2 * product, gelu, 2 * (x + w + h) + (0 if fused else 2 * h))


def _mlp_sums_all(*args):
    *sizes, fused = args
    product, gelu, x, w, h = _mlp_parts(*sizes)
    return max(2 * product + gelu, 2 * (x + w + h) + (0 if fused else 2 * h))


def _mlp_fused_in_turn(*args):
    *sizes, fused = args
    product, gelu, x, w, h = _mlp_parts(*sizes)
    return max(product + gelu, x + w + h) + max(product, x + w + h) if fused else _mlp(*args)


def _mlp_h_stays(*args):
    *sizes, fused = args
    product, gelu, x, w, _ = _mlp_parts(*sizes)
    return max(product, gelu, x + w) + max(product, w + x) if fused else _mlp(*args)


def _mlp_reads_only(*args):
    *sizes, fused = args
    product, gelu, x, w, h = _mlp_parts(*sizes)
    if fused:
        return max(product, gelu, x + w) + max(product, h + w)
    return max(product, x + w) + max(gelu, h) + max(product, h + w)


ROOFLINE = FunctionExercise(
    id="flops.roofline",
    title="Three kernels under the roof",
    notebook=NOTEBOOK,
    function="mlp_us",
    label=Label(3, 20, "the roofline of a sequence of kernels, and what fusing buys"),
    hints=(
        "Draw the three kernels as boxes with arrows for what each reads and writes. Which arrows disappear when two "
        "boxes become one?",
        "Inside a kernel the busiest of tensor cores, lanes and memory decides, the others wait for it. Between "
        "kernels nothing overlaps: one ends before the next begins.",
        "A product moves x, one weight matrix and h; GELU reads h and writes h. Take the largest of the times of each "
        "kernel, then add up the kernels. Fused, GELU's lanes join the first product's maximum and its bytes are gone.",
    ),
    cases=_roofline_cases,
    expected=_mlp,
    tolerance=1e-9,
    unit="us",
    misconceptions=(
        Misconception(
            "one-roof-for-all",
            "yours adds up all work and all bytes and then takes the larger. But the first kernel's spare bandwidth "
            "does not help the second: where does the maximum belong?",
            gives=_mlp_sums,
        ),
        Misconception(
            "one-roof-for-all",
            "yours adds up all work and all bytes and then takes the larger. But the first kernel's spare bandwidth "
            "does not help the second: where does the maximum belong?",
            gives=_mlp_sums_units,
        ),
        Misconception(
            "one-roof-for-all",
            "yours adds up all work and all bytes and then takes the larger. But the first kernel's spare bandwidth "
            "does not help the second: where does the maximum belong?",
            gives=_mlp_sums_all,
        ),
        Misconception(
            "no-overlap",
            "yours adds the time of the arithmetic to that of the traffic. By the contract they go on at the same "
            "time: when is a kernel done?",
            gives=lambda *a: _mlp(*a, both=lambda x, y: x + y),
        ),
        Misconception(
            "traffic-only",
            "yours counts bytes only. Which of these kernels has more to compute than to move?",
            gives=lambda *a: _mlp(*a, both=lambda x, y: y),
        ),
        Misconception(
            "compute-only",
            "yours counts FLOPs only. What keeps the tensor cores waiting when M is small?",
            gives=lambda *a: _mlp(*a, both=lambda x, y: x),
        ),
        Misconception(
            "weights-forgotten",
            "the weights have to be fetched too. With a small M, what is most of the traffic?",
            gives=lambda *a: _mlp(*a, weights=0),
        ),
        Misconception(
            "reads-only",
            "yours counts what is read. What is written goes over the same wires: what does each kernel write?",
            gives=_mlp_reads_only,
        ),
        Misconception(
            "gelu-one-way",
            "right when fused. A GELU kernel of its own reads h, and then?",
            gives=lambda *a: _mlp(*a, separate_h=1),
        ),
        Misconception(
            "gelu-on-tensor-cores",
            "yours runs GELU at the rate of the tensor cores, which multiply matrices and nothing else. Which rate is "
            "the lanes'?",
            gives=lambda *a: _mlp(*a, gelu_on=4),
        ),
        Misconception(
            "products-on-lanes",
            "yours runs the products on the ordinary lanes. Which of the two rates is that of the tensor cores?",
            gives=lambda M, d, f, i, tensor, lane, gbps, fused: _mlp(M, d, f, i, lane, lane, gbps, fused),
        ),
        Misconception(
            "units-swapped",
            "yours runs the products on the lanes and GELU on the tensor cores. Which can what?",
            gives=lambda M, d, f, i, tensor, lane, gbps, fused: _mlp(M, d, f, i, lane, tensor, gbps, fused),
        ),
        Misconception(
            "fusing-saves-nothing",
            "yours does not look at `fused`. Which trip to memory does GELU no longer make?",
            gives=lambda *a: _mlp(*a[:-1], False),
        ),
        Misconception(
            "always-fused",
            "right when fused. A kernel of its own has to fetch h and write it again: what does that take?",
            gives=lambda *a: _mlp(*a[:-1], True),
        ),
        Misconception(
            "fused-in-turn",
            "right for three kernels. In the fused one yours lets the lanes begin when the tensor cores are done; by "
            "the contract they work at the same time.",
            gives=_mlp_fused_in_turn,
        ),
        Misconception(
            "h-stays-on-chip",
            "right for three kernels. Fusing GELU into the first product does not bring in the second: how does h get "
            "from one to the other?",
            gives=_mlp_h_stays,
        ),
        Misconception(
            "multiply-add-is-one",
            "the products take half of what they should. What does one multiply-add count for?",
            gives=lambda M, d, f, i, tensor, lane, gbps, fused: _mlp(M, d, f, i, 2 * tensor, lane, gbps, fused),
        ),
        Misconception(
            "elements",
            "memory is paid for by the byte. Which argument has not been used?",
            gives=lambda M, d, f, i, *rest: _mlp(M, d, f, 1, *rest),
        ),
        Misconception(
            "units",
            "off by a power of ten. Micro is 10^-6, tera 10^12, giga 10^9: what is a GB/s in bytes a microsecond?",
            when=lambda evidence: (
                abs(power := math.log10(evidence.outputs / evidence.expected)) > 0.5
                and abs(power - round(power)) < 1e-6
            ),
        ),
    ),
    wrong=(
        Variant(
            "one roof",
            source="""def mlp_us(M, d_model, d_ff, itemsize, tensor_tflops, lane_tflops, hbm_gbps, fused):
    x, w, h = M * d_model, d_model * d_ff, M * d_ff
    moved = 2 * (x + w + h) + (0 if fused else 2 * h)
    compute = 4 * M * d_model * d_ff / tensor_tflops + 8 * h / lane_tflops
    return max(compute / 1e6, moved * itemsize / hbm_gbps / 1e3)
""",
            diagnosis="one-roof-for-all",
        ),
        Variant(
            "work, then traffic",
            (
                (
                    "max(product_us, gelu_us, product_bytes_us) + max(product_us, product_bytes_us)",
                    "max(product_us, gelu_us) + product_us + 2 * product_bytes_us",
                ),
                (
                    "2 * max(product_us, product_bytes_us) + max(gelu_us, 2 * h / bytes_per_us)",
                    "2 * (product_us + product_bytes_us) + gelu_us + 2 * h / bytes_per_us",
                ),
            ),
            diagnosis="no-overlap",
        ),
        Variant(
            "bytes only",
            (
                (
                    "return max(product_us, gelu_us, product_bytes_us) + max(product_us, product_bytes_us)",
                    "return 2 * product_bytes_us",
                ),
                (
                    "2 * max(product_us, product_bytes_us) + max(gelu_us, 2 * h / bytes_per_us)",
                    "2 * product_bytes_us + 2 * h / bytes_per_us",
                ),
            ),
            diagnosis="traffic-only",
        ),
        Variant(
            "FLOPs only",
            (
                (
                    "return max(product_us, gelu_us, product_bytes_us) + max(product_us, product_bytes_us)",
                    "return max(product_us, gelu_us) + product_us",
                ),
                (
                    "2 * max(product_us, product_bytes_us) + max(gelu_us, 2 * h / bytes_per_us)",
                    "2 * product_us + gelu_us",
                ),
            ),
            diagnosis="compute-only",
        ),
        Variant("no weights", (("(x + weights + h)", "(x + h)"),), diagnosis="weights-forgotten"),
        Variant(
            "reads",
            source="""def mlp_us(M, d_model, d_ff, itemsize, tensor_tflops, lane_tflops, hbm_gbps, fused):
    x, w, h = (n * itemsize / hbm_gbps / 1e3 for n in (M * d_model, d_model * d_ff, M * d_ff))
    product, gelu = 2 * M * d_model * d_ff / tensor_tflops / 1e6, 8 * M * d_ff / lane_tflops / 1e6
    if fused:
        return max(product, gelu, x + w) + max(product, h + w)
    return max(product, x + w) + max(gelu, h) + max(product, h + w)
""",
            diagnosis="reads-only",
        ),
        Variant("GELU writes nothing", (("2 * h / bytes_per_us", "h / bytes_per_us"),), diagnosis="gelu-one-way"),
        Variant(
            "GELU on tensor cores",
            (("8 * M * d_ff / lane_per_us", "8 * M * d_ff / tensor_per_us"),),
            diagnosis="gelu-on-tensor-cores",
        ),
        Variant(
            "products on lanes",
            (("2 * M * d_model * d_ff / tensor_per_us", "2 * M * d_model * d_ff / lane_per_us"),),
            diagnosis="products-on-lanes",
        ),
        Variant("never fused", (("    if fused:", "    if False:"),), diagnosis="fusing-saves-nothing"),
        Variant("always fused", (("    if fused:", "    if True:"),), diagnosis="always-fused"),
        Variant(
            "one unit after the other",
            (("max(product_us, gelu_us, product_bytes_us)", "max(product_us + gelu_us, product_bytes_us)"),),
            diagnosis="fused-in-turn",
        ),
        Variant(
            "h stays",
            (
                (
                    "max(product_us, gelu_us, product_bytes_us) + max(product_us, product_bytes_us)",
                    "max(product_us, gelu_us, (x + weights) / bytes_per_us) "
                    "+ max(product_us, (weights + x) / bytes_per_us)",
                ),
            ),
            diagnosis="h-stays-on-chip",
        ),
        Variant(
            "a multiply-add is one",
            (("product_us = 2 * M", "product_us = M"),),
            diagnosis="multiply-add-is-one",
        ),
        Variant(
            "elements",
            (
                (
                    "d_model * d_ff * itemsize, M * d_model * itemsize, M * d_ff * itemsize",
                    "d_model * d_ff, M * d_model, M * d_ff",
                ),
            ),
            diagnosis="elements",
        ),
        Variant(
            "milliseconds",
            (
                (
                    "hbm_gbps * 1e3, tensor_tflops * 1e6, lane_tflops * 1e6",
                    "hbm_gbps * 1e6, tensor_tflops * 1e9, lane_tflops * 1e9",
                ),
            ),
            diagnosis="units",
        ),
    ),
    right=(
        Variant(
            "a list of kernels",
            source="""def mlp_us(M, d_model, d_ff, itemsize, tensor_tflops, lane_tflops, hbm_gbps, fused):
    product, activation = 2 * M * d_model * d_ff, 8 * M * d_ff
    elements = M * d_model + d_model * d_ff + M * d_ff
    kernels = [(product, 0, elements), (0, activation, 2 * M * d_ff), (product, 0, elements)]
    if fused:
        kernels = [(product, activation, elements), (product, 0, elements)]
    seconds = 0
    for on_tensor_cores, on_lanes, moved in kernels:
        seconds += max(
            on_tensor_cores / (tensor_tflops * 1e12), on_lanes / (lane_tflops * 1e12), moved * itemsize / (hbm_gbps * 1e9)
        )
    return seconds * 1e6
""",
        ),
        Variant(
            "FLOPs a byte",
            source="""def mlp_us(M, d_model, d_ff, itemsize, tensor_tflops, lane_tflops, hbm_gbps, fused):
    def under(flops, moved, tflops):
        intensity = flops / moved
        attainable = min(tflops * 1e12, intensity * hbm_gbps * 1e9)
        return flops / attainable * 1e6

    moved = itemsize * (M * d_model + d_model * d_ff + M * d_ff)
    one = under(2 * M * d_model * d_ff, moved, tensor_tflops)
    lanes = 8 * M * d_ff
    if fused:
        first = one if one > under(lanes, moved, lane_tflops) else under(lanes, moved, lane_tflops)
        return first + one
    return one + under(lanes, 2 * itemsize * M * d_ff, lane_tflops) + one
""",
        ),
    ),
)


# ----------------------------------------------------------------------------------------------- flops.critical_batch
def _critical_cases(rng: Random) -> list[Case]:
    cases = []
    for what, params, weight, kv, attention, tflops, gbps in (
        ("bf16, no cache", 8e9, 2.0, 0.0, 0.0, 989.4, 3350.0),
        ("fp8 weights, no cache", 70e9, 1.0, 0.0, 0.0, 989.4, 4800.0),
        ("int4 weights, no cache", 8e9, 0.5, 0.0, 0.0, 312.0, 2039.0),
        ("short context", 70e9, 2.0, 0.02e9, 0.2e9, 989.4, 3350.0),
        ("a shared cache, long attention", 7e9, 2.0, 0.008e9, 8e9, 312.0, 2039.0),
        ("context at the edge", 8e9, 2.0, 0.045e9, 0.4e9, 989.4, 3350.0),
        ("long context", 8e9, 2.0, 4.3e9, 17e9, 989.4, 3350.0),
        ("a small model, long context", 0.5e9, 2.0, 0.4e9, 1e9, 165.2, 1008.0),
    ):
        while True:
            drawn = [value * rng.uniform(0.95, 1.05) for value in (params, kv, attention)]
            args = drawn[0], weight, drawn[1], drawn[2], tflops, gbps
            batch = _critical_exact(*args)
            if abs(batch - round(batch)) > 0.02:  # a rounding error must not decide
                break
        shown = f"{args[0] / 1e9:.2f} B weights of {weight:g} bytes, cache {args[2] / 1e9:.4g} GB"
        tags = "never" if batch < 0 else "cache" if kv else "no-cache"
        cases.append(case(f"{what}: {shown}", *args, tags=tags))
    return cases


def _critical_exact(params, weight, kv, attention, tflops, gbps, *, flops=2.0) -> float:
    """Where the two lines cross; negative where they do not."""
    return params * weight / ((flops * params + attention) * gbps * 1e9 / (tflops * 1e12) - kv)


def _critical(params, weight, kv, attention, tflops, gbps, *, flops=2.0) -> int:
    exact = _critical_exact(params, weight, kv, attention, tflops, gbps, flops=flops)
    return math.ceil(exact) if exact > 0 else 0


CRITICAL = FunctionExercise(
    id="flops.critical_batch",
    title="The batch at which decoding is no longer waiting",
    notebook=NOTEBOOK,
    function="critical_batch",
    label=Label(4, 20, "why decoding waits for memory, what a batch helps against, and what not"),
    hints=(
        "Write the time to fetch and the time to compute as functions of the batch B. Both are straight lines. Which "
        "of them begins above zero, and which one is steeper?",
        "Fetching: all weights once, plus B caches. Computing: B times (2 FLOPs a weight plus attention). They cross "
        "where the larger slope of computing has made up for the weights. If that slope is not larger, they never do.",
        "Seconds for the weights, divided by (seconds that one sequence adds to computing, less seconds that one "
        "sequence adds to fetching), rounded up; 0 where the difference is not positive.",
    ),
    cases=_critical_cases,
    expected=_critical,
    unit="sequences",
    misconceptions=(
        Misconception(
            "cache-ignored",
            "right without a cache. Keys and values are fetched too, and a larger batch does not share them: what does "
            "each sequence add to the fetching?",
            gives=lambda params, weight, kv, *rest: _critical(params, weight, 0, *rest),
        ),
        Misconception(
            "cache-ignored",
            "yours looks at the weights only. What do keys and values add, for each sequence, to fetching and to "
            "computing?",
            gives=lambda params, weight, kv, attention, *rest: _critical(params, weight, 0, 0, *rest),
        ),
        Misconception(
            "cache-fetched-once",
            "yours fetches one cache for the whole batch, as it fetches the weights. Whose keys and values are in it?",
            gives=lambda params, weight, kv, *rest: _critical(params, weight + kv / params, 0, *rest),
        ),
        Misconception(
            "never-overlooked",
            "a batch below zero: with a long context each sequence brings more to fetch than to compute, and the lines "
            "do not cross. What does the contract ask for then?",
            gives=lambda *a: math.ceil(_critical_exact(*a)),
        ),
        Misconception(
            "never-overlooked",
            "with a long context each sequence brings more to fetch than to compute, and the lines do not cross for "
            "any batch. What does the contract ask for then?",
            gives=lambda *a: _critical(*a) or 1,
        ),
        Misconception(
            "attention-not-computed",
            "right where attention_flops is 0. The cache is fetched in yours; what is computed with it?",
            gives=lambda params, weight, kv, attention, *rest: _critical(params, weight, kv, 0, *rest),
        ),
        Misconception(
            "multiply-add-is-one",
            "too large: yours has one FLOP for each weight and sequence. What does one multiply-add count for?",
            gives=lambda *a: _critical(*a, flops=1),
        ),
        Misconception(
            "rounded-down",
            "at yours the step still waits for memory. Which way must the crossing be rounded?",
            gives=lambda *a: math.floor(_critical_exact(*a)) if _critical(*a) else 0,
        ),
        Misconception(
            "rounded-down",
            "rounding to the nearest may end one short, where the step still waits. Which way must it be?",
            gives=lambda *a: round(_critical_exact(*a)) if _critical(*a) else 0,
        ),
        Misconception(
            "not-rounded",
            "a batch is a whole number of sequences. Which way must the crossing be rounded?",
            when=lambda evidence: evidence.outputs != round(evidence.outputs),
        ),
        Misconception(
            "two-bytes",
            "right for weights of two bytes. Half the bytes are fetched in half the time: which argument says how many "
            "there are?",
            gives=lambda params, weight, *rest: _critical(params, 2, *rest),
        ),
        Misconception(
            "ridge",
            "that is the ridge point, FLOPs a byte. How many bytes, and how many FLOPs for each sequence, does one "
            "weight stand for?",
            gives=lambda params, weight, kv, attention, tflops, gbps: math.ceil(tflops * 1e3 / gbps),
        ),
        Misconception(
            "weights-for-each-sequence",
            "yours fetches the weights once for every sequence. Then a batch would never pay; how often are they "
            "fetched in one step?",
            gives=lambda params, weight, kv, attention, tflops, gbps: int(
                (2 * params + attention) / tflops / 1e12 >= (params * weight + kv) / gbps / 1e9
            ),
        ),
    ),
    wrong=(
        Variant(
            "the cache costs nothing to fetch",
            (("cache_s = kv_bytes / bytes_per_s", "cache_s = 0.0"),),
            diagnosis="cache-ignored",
        ),
        Variant(
            "weights only",
            source="""import math


def critical_batch(params, weight_bytes, kv_bytes, attention_flops, peak_tflops, hbm_gbps):
    return math.ceil(peak_tflops * 1e3 / hbm_gbps * weight_bytes / 2)
""",
            diagnosis="cache-ignored",
        ),
        Variant(
            "one cache for all",
            (
                (
                    "weights_s = params * weight_bytes / bytes_per_s",
                    "weights_s = (params * weight_bytes + kv_bytes) / bytes_per_s",
                ),
                ("cache_s = kv_bytes / bytes_per_s", "cache_s = 0.0"),
            ),
            diagnosis="cache-fetched-once",
        ),
        Variant("negative batches", (("if compute_s <= cache_s:", "if False:"),), diagnosis="never-overlooked"),
        Variant(
            "at least one",
            (("        return 0  #", "        return 1  #"),),
            diagnosis="never-overlooked",
        ),
        Variant(
            "attention is free",
            (("(2 * params + attention_flops)", "(2 * params)"),),
            diagnosis="attention-not-computed",
        ),
        Variant(
            "a multiply-add is one",
            (("(2 * params + attention_flops)", "(params + attention_flops)"),),
            diagnosis="multiply-add-is-one",
        ),
        Variant("rounded down", (("math.ceil(weights_s", "math.floor(weights_s"),), diagnosis="rounded-down"),
        Variant("to the nearest", (("math.ceil(weights_s", "round(weights_s"),), diagnosis="rounded-down"),
        Variant("a fraction", (("math.ceil(weights_s", "(weights_s"),), diagnosis="not-rounded"),
        Variant("two bytes", (("params * weight_bytes", "params * 2"),), diagnosis="two-bytes"),
        Variant(
            "the ridge",
            source="""import math


def critical_batch(params, weight_bytes, kv_bytes, attention_flops, peak_tflops, hbm_gbps):
    return math.ceil(peak_tflops * 1e12 / (hbm_gbps * 1e9))
""",
            diagnosis="ridge",
        ),
        Variant(
            "weights once for each sequence",
            source="""def critical_batch(params, weight_bytes, kv_bytes, attention_flops, peak_tflops, hbm_gbps):
    compute = (2 * params + attention_flops) / (peak_tflops * 1e12)
    fetch = (params * weight_bytes + kv_bytes) / (hbm_gbps * 1e9)
    return 1 if compute >= fetch else 0
""",
            diagnosis="weights-for-each-sequence",
        ),
    ),
    right=(
        Variant(
            "bytes, through the ridge",
            source="""def critical_batch(params, weight_bytes, kv_bytes, attention_flops, peak_tflops, hbm_gbps):
    ridge = peak_tflops * 1e12 / (hbm_gbps * 1e9)
    gained = (2 * params + attention_flops) / ridge - kv_bytes  # bytes that a sequence could be fetched for free
    if gained <= 0:
        return 0
    return int(-(-params * weight_bytes // gained))
""",
        ),
        Variant(
            "search by doubling and halving",
            source="""def critical_batch(params, weight_bytes, kv_bytes, attention_flops, peak_tflops, hbm_gbps):
    def waits(B):
        return B * (2 * params + attention_flops) / peak_tflops / 1e12 < (params * weight_bytes + B * kv_bytes) / hbm_gbps / 1e9

    high = 1
    while waits(high):
        high *= 2
        if high > 1 << 60:
            return 0
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if waits(middle) else (low, middle)
    return high
""",
        ),
    ),
)

EXERCISES = [EINSUM, LAYER, AUDIT, MFU, DAYS, ROOFLINE, CRITICAL]
