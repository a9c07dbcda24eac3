"""The exercises of notebook 03: cases, and what each wrong idea computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from gpukit.grading.exercise import Case, FunctionExercise, Misconception
from gpukit.grading.inputs import case

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
    "a b, b c, c d, d a ->",
    "i i, i -> i",
)


def _einsum_cases(rng: Random) -> list[Case]:
    cases = []
    for expression in _EXPRESSIONS:
        axes = sorted({*expression} - {*" ,->"})
        sizes = {axis: rng.choice((3, 5, 7, 11, 13, 64, 128)) for axis in axes}
        unused = {"z": 17} if len(cases) % 2 else {}
        cases.append(case(f"{expression}  {_sizes(sizes | unused)}", expression, sizes | unused))
    words, lengths = "tokens d_in, d_out d_in -> tokens d_out", {"tokens": 1024, "d_in": 256, "d_out": 64}
    parts = lengths | {"d": 32, "in": 16}  # the letters of these are in other names, too
    inside = {"b": rng.randrange(5, 50, 2), "d": 64, "d_out": 128}
    return [
        case(f"{words}  {_sizes(lengths)}", words, lengths),
        case(f"{words}  {_sizes(parts)}", words, parts),
        *cases,
        # The result's text contains the name of an axis that the result lacks.
        case(f"b d, d d_out -> b d_out  {_sizes(inside)}", "b d, d d_out -> b d_out", inside),
        case("m k, k n -> m n  m=1, k=1, n=9", "m k, k n -> m n", {"m": 1, "k": 1, "n": 9}),
        case(", i -> i  i=11 (a number times a vector)", ", i -> i", {"i": 11}),
        case("m k, k n -> m n  more than a float holds exactly", "m k, k n -> m n", dict.fromkeys("mkn", 2**19 + 1)),
        case("m k, k n -> m n  more than 64 bits hold", "m k, k n -> m n", dict.fromkeys("mkn", 3 << 20)),
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
    function="einsum_flops",
    cases=_einsum_cases,
    expected=_einsum,
    unit="FLOPs",
    misconceptions=(
        Misconception("multiply-add-is-one", gives=_einsum_rounds),
        Misconception(
            "summed-axis-forgotten",
            gives=lambda expression, sizes: _volume(_parse(expression)[1], sizes) * _per_round(expression),
        ),
        Misconception(
            "summed-axis-forgotten/2", gives=lambda expression, sizes: 2 * _volume(_parse(expression)[1], sizes)
        ),
        Misconception(
            "shared-axis-twice",
            gives=lambda expression, sizes: _einsum_operands(expression, sizes) * _per_round(expression),
        ),
        Misconception("shared-axis-twice", gives=lambda expression, sizes: 2 * _einsum_operands(expression, sizes)),
        Misconception("always-two", gives=lambda expression, sizes: 2 * _einsum_rounds(expression, sizes)),
        Misconception(
            "always-adds",
            gives=lambda expression, sizes: _einsum_rounds(expression, sizes) * len(_parse(expression)[0]),
        ),
        Misconception(
            "always-adds/2",
            gives=lambda expression, sizes: (
                _einsum_rounds(expression, sizes)
                * (len(_parse(expression)[0]) if len(_parse(expression)[0]) > 1 else 0)
            ),
        ),
        Misconception(
            "two-operands",
            gives=lambda expression, sizes: _einsum_rounds(expression, sizes) * (1 + _summed(expression)),
        ),
        Misconception("other-axes", gives=lambda expression, sizes: math.prod(sizes.values()) * _per_round(expression)),
        Misconception("first-addition-free", gives=_einsum_first_addition_free),
        Misconception("pairwise", gives=_einsum_pairwise),
        *(
            Misconception(
                name,
                gives=lambda expression, sizes, per_round=per_round: (
                    _einsum_rounds(expression, sizes)
                    * per_round(len(_parse(expression)[0]), len(_axes(expression) - {*_parse(expression)[1]}))
                ),
            )
            for name, per_round in (
                ("additions-forgotten", lambda operands, summed: operands - 1),
                ("multiplications", lambda operands, summed: operands + (summed > 0)),
                ("additions-by-axis", lambda operands, summed: operands - 1 + summed),
                ("always-two/2", lambda operands, summed: 2 * (operands - 1)),
                ("one-operand", lambda operands, summed: max(operands - 1 + (summed > 0), 1)),
                ("one-operand", lambda operands, summed: (operands - 1 or 1) + (summed > 0)),
            )
        ),
        Misconception("rounded", gives=lambda expression, sizes: float(_einsum(expression, sizes))),
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
        return case(f"{what} ({shown})", B, T, d_model, heads, kv_heads, head_dim, d_ff, gated, causal, tags=tags)

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
        one("two tokens, odd sizes", 1, 2, 5, 9, 3, 7, 11, True, True),
        one("all sizes 1", 1, 1, 1, 1, 1, 1, 1, True, False),
    ]


def _layer(
    B,
    T,
    d_model,
    heads,
    kv_heads,
    head_dim,
    d_ff,
    gated,
    causal,
    *,
    kv=None,
    projections=None,
    products=2,
    q_width=None,
    kv_width=None,
    kv_score_heads=None,
    pairs=None,
    mlps=None,
    per=2,
    backward=2,
    attention_backward=None,
    out=True,
    sequences=None,
    score_width=None,
):
    """The right count, or one that errs in what the keywords say."""
    kv = kv_heads if kv is None else kv
    q_width = heads * head_dim if q_width is None else q_width
    kv_width = kv * head_dim if kv_width is None else kv_width
    projected = per * B * T * d_model * ((2 if out else 1) * q_width + 2 * kv_width)
    pairs = (T * (T + 1) // 2 if causal else T * T) if pairs is None else pairs
    score_width = (kv_score_heads or heads) * head_dim if score_width is None else score_width
    attention = products * per * (sequences or B) * pairs * score_width
    mlp = per * B * T * d_model * d_ff * ((3 if gated else 2) if mlps is None else mlps)
    weights = projected + mlp
    attention_backward = backward if attention_backward is None else attention_backward
    return weights + attention, backward * weights + attention_backward * attention


def _layer_with(B, T, d_model, heads, kv_heads, head_dim, d_ff, gated, causal, **errs):
    """`errs` may hold functions of the arguments, by name."""
    given = {"T": T, "heads": heads, "kv_heads": kv_heads, "causal": causal, "d_model": d_model}
    fixed = {name: value(given) if callable(value) else value for name, value in errs.items()}
    return _layer(B, T, d_model, heads, kv_heads, head_dim, d_ff, gated, causal, **fixed)


def _layer_wrong(label: str, **errs) -> Misconception:
    return Misconception(label, gives=partial(_layer_with, **errs))


LAYER = FunctionExercise(
    id="flops.layer",
    function="layer_flops",
    cases=_layer_cases,
    expected=_layer,
    unit="FLOPs",
    returns=("forward", "backward"),
    misconceptions=(
        _layer_wrong("multiply-add-is-one", per=1),
        _layer_wrong("no-attention", products=0),
        _layer_wrong("one-attention-product", products=1),
        _layer_wrong("mask-ignored", pairs=lambda a: a["T"] ** 2),
        _layer_wrong("diagonal-forgotten", pairs=lambda a: a["T"] ** 2 / 2 if a["causal"] else a["T"] ** 2),
        _layer_wrong("diagonal-forgotten", pairs=lambda a: a["T"] ** 2 // 2 if a["causal"] else a["T"] ** 2),
        _layer_wrong("diagonal-forgotten", pairs=lambda a: a["T"] * (a["T"] // 2 if a["causal"] else a["T"])),
        _layer_wrong(
            "diagonal-forgotten/2", pairs=lambda a: a["T"] * (a["T"] - 1) // 2 if a["causal"] else a["T"] ** 2
        ),
        _layer_wrong("kv-heads-in-projection", kv=lambda a: a["heads"]),
        _layer_wrong("kv-heads-in-scores", kv_score_heads=lambda a: a["kv_heads"]),
        _layer_wrong("head-dim-ignored", q_width=lambda a: a["d_model"]),
        _layer_wrong(
            "head-dim-ignored",
            q_width=lambda a: a["d_model"],
            kv_width=lambda a: a["d_model"] // a["heads"] * a["kv_heads"],
        ),
        _layer_wrong("head-dim-ignored", q_width=lambda a: a["d_model"], kv_width=lambda a: a["d_model"]),
        _layer_wrong("head-dim-ignored", score_width=lambda a: a["d_model"]),
        _layer_wrong("one-sequence", sequences=1),
        _layer_wrong("gate-forgotten", mlps=2),
        _layer_wrong("gate-forgotten/2", mlps=3),
        _layer_wrong("output-projection-forgotten", out=False),
        _layer_wrong("backward-as-forward", backward=1),
        _layer_wrong("attention-backward-once", attention_backward=1),
        _layer_wrong("attention-backward-once/2", attention_backward=0),
        _layer_wrong("recomputed", backward=3),
        Misconception("swapped", gives=lambda *args: _layer(*args)[::-1]),
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
        one("all sizes 1", 1, 1, 1, 1, 1, False, 1, 1),
        one("one layer, odd sizes", 1, 3, 5, 7, 11, True, 3, 13),
        one("no layer", 0, 6, 10, 14, 11, False, 3, 13),
    ]


def _audit(
    layers, d_model, d_ff, vocab, positions, tied, B, T, *, multiplied=None, square=1, passes=6, one_layer=False
):
    """The right count, or one that errs in what the keywords say."""
    products = vocab * d_model if multiplied is None else multiplied
    blocks = layers * (4 * d_model**2 + 2 * d_model * d_ff)
    return passes * B * T * (blocks + products + (1 if one_layer else layers) * 2 * T * d_model * square)


def _audit_with(layers, d_model, d_ff, vocab, positions, tied, B, T, **errs):
    """`errs` may hold functions of the sizes of the tables, by name."""
    table, own_head = vocab * d_model, 0 if tied else vocab * d_model
    given = {"table": table, "head": own_head, "positions": positions * d_model}
    fixed = {name: value(given) if callable(value) else value for name, value in errs.items()}
    return _audit(layers, d_model, d_ff, vocab, positions, tied, B, T, **fixed)


def _audit_wrong(label: str, **errs) -> Misconception:
    return Misconception(label, gives=partial(_audit_with, **errs))


AUDIT = FunctionExercise(
    id="flops.audit",
    function="step_flops",
    cases=_audit_cases,
    expected=_audit,
    unit="FLOPs",
    misconceptions=(
        _audit_wrong("lookups-counted", multiplied=lambda a: a["table"] + a["positions"] + a["head"]),
        _audit_wrong("token-lookup-counted", multiplied=lambda a: a["table"] + a["head"]),
        _audit_wrong("position-lookup-counted", multiplied=lambda a: a["table"] + a["positions"]),
        _audit_wrong("position-lookup-counted/2", multiplied=lambda a: a["positions"] + a["head"]),
        _audit_wrong("logits-forgotten", multiplied=lambda a: a["head"]),
        _audit_wrong("logits-forgotten/2", multiplied=0),
        _audit_wrong("attention-dropped", square=0),
        _audit_wrong("attention-dropped/2", multiplied=lambda a: a["table"] + a["positions"] + a["head"], square=0),
        _audit_wrong("mask-subtracted", square=0.5),
        _audit_wrong("mask-subtracted/2", multiplied=lambda a: a["table"] + a["positions"] + a["head"], square=0.5),
        _audit_wrong("forward-only", passes=2),
        _audit_wrong("one-layer", one_layer=True),
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
        ("an odd number of GPUs, a third recomputed", 3.1e9, 7, 989.4, False, 1 / 3),
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
    function="utilization",
    cases=_mfu_cases,
    expected=_mfu,
    tolerance=1e-9,
    returns=("MFU", "HFU"),
    misconceptions=(
        Misconception("sparse-peak", gives=partial(_mfu, halved=False)),
        Misconception(
            "sparse-peak-doubled",
            gives=lambda tokens, forward, gpus, rate, sparse, recomputed: _mfu(
                tokens, forward, gpus, rate * (2 if sparse else 1), False, recomputed
            ),
        ),
        Misconception("always-halved", gives=partial(_mfu, halved=True)),
        Misconception("recomputation-in-mfu", gives=lambda *a: _mfu(*a, model=3 + a[-1])),
        Misconception("recomputation-forgotten", gives=partial(_mfu, hardware=3)),
        Misconception("swapped", gives=lambda *a: _mfu(*a)[::-1]),
        Misconception("backward-recomputed", gives=lambda *a: _mfu(*a, hardware=3 + 2 * a[-1])),
        Misconception("recomputed-always", gives=partial(_mfu, hardware=4)),
        Misconception("whole-step-recomputed", gives=lambda *a: _mfu(*a, hardware=3 * (1 + a[-1]))),
        Misconception("forward-only", gives=lambda *a: _mfu(*a, model=1, hardware=1 + a[-1])),
        Misconception("backward-as-forward", gives=lambda *a: _mfu(*a, model=2, hardware=2 + a[-1])),
        Misconception("parameters-not-flops", gives=lambda *a: _mfu(*a, model=6, hardware=6 + 2 * a[-1])),
        Misconception("parameters-not-flops", gives=lambda *a: _mfu(*a, model=6, hardware=6 + a[-1])),
        Misconception("one-gpu", gives=partial(_mfu, per_gpu=False)),
        Misconception("percent", when=lambda evidence: _power_of_ten(evidence, _mfu)),
    ),
)


def _power_of_ten(evidence, expected: Callable[..., Any]) -> bool:
    """Every result of every case is the expected one times one power of ten."""
    powers = []
    for outcome in evidence.outcomes:
        yours, right = outcome.reply.output, expected(*outcome.case.args)
        pairs = [(yours, right)] if isinstance(right, float) else zip(yours, right, strict=True)
        powers += [math.log10(one / other) for one, other in pairs]
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
        ("restarted at once", 8e9, 8e9, 1e12, 100, 989.4, 0.45, 4.0, 17, 0.0),
        ("checkpoints all the time, a slow restart", 8e9, 8e9, 1e12, 100, 989.4, 0.45, 0.0, 17, 3.0),
        ("one interruption", 1e9, 0.3e9, 2e12, 8, 312.0, 0.5, 6.0, 1, 0.5),
    ):
        gap, mfu = gap * rng.uniform(0.8, 1.2), mfu * rng.uniform(0.9, 1.1)
        name = f"{what}, {stops} interruptions"
        tags = ("moe " if active < params else "") + ("interrupted" if stops else "")
        cases.append(case(name, params, active, tokens, gpus, peak, mfu, gap, stops, restart, tags=tags))
    return cases


def _days(
    params, active, tokens, gpus, peak, mfu, gap, stops, restart, *, flops=6.0, lost=0.5, down=1.0, useful=1.0
) -> float:
    training = flops * active * tokens / (gpus * peak * 1e12 * mfu * useful) / 3600
    return (training + stops * (lost * gap + down * restart)) / 24


def _days_off(factor: float) -> Callable[..., float]:
    """The time of training alone is `factor` times too long."""
    return lambda *args: _days(*args, useful=1 / factor)


DAYS = FunctionExercise(
    id="flops.days",
    function="training_days",
    cases=_days_cases,
    expected=_days,
    tolerance=1e-9,
    unit="days",
    misconceptions=(
        Misconception("all-experts", gives=lambda params, active, *rest: _days(params, params, *rest)),
        Misconception("all-lost", gives=partial(_days, lost=1)),
        Misconception("nothing-lost", gives=partial(_days, lost=0)),
        Misconception("restart-forgotten", gives=partial(_days, down=0)),
        Misconception("interruptions-forgotten", gives=partial(_days, lost=0, down=0)),
        Misconception("forward-only", gives=partial(_days, flops=2)),
        Misconception("multiply-add-is-one", gives=partial(_days, flops=3)),
        Misconception("backward-as-forward", gives=partial(_days, flops=4)),
        Misconception("restart-halved", gives=partial(_days, down=0.5)),
        Misconception(
            "mfu-forgotten",
            gives=lambda params, active, tokens, gpus, peak, mfu, *rest: _days(
                params, active, tokens, gpus, peak, 1, *rest
            ),
        ),
        Misconception(
            "mfu-upside-down",
            gives=lambda params, active, tokens, gpus, peak, mfu, *rest: _days(
                params, active, tokens, gpus, peak, 1 / mfu, *rest
            ),
        ),
        Misconception(
            "one-gpu", gives=lambda params, active, tokens, gpus, *rest: _days(params, active, tokens, 1, *rest)
        ),
        *(Misconception("units", gives=_days_off(10.0**power)) for power in (12, 9, 6, 3, -3)),
        Misconception("seconds-and-hours", gives=_days_off(3600)),
        Misconception("seconds-and-hours", gives=_days_off(60)),
        Misconception("lost-once", gives=lambda *a: _days(*a[:7], bool(a[7]), a[8])),
        Misconception("lost-once", gives=lambda *a: _days(*a, down=0) + a[8] / 24),
        Misconception("peak-halved", gives=partial(_days, useful=0.5)),
        Misconception(
            "hours",
            when=lambda evidence: any(
                math.isclose(evidence.outputs, evidence.expected * factor, rel_tol=1e-6) for factor in (24, 1440, 86400)
            ),
        ),
        Misconception(
            "hours-and-days",
            gives=lambda params, active, tokens, gpus, peak, mfu, gap, stops, restart: _days(
                params, active, tokens, gpus, peak, mfu, 24 * gap, stops, 24 * restart
            ),
        ),
    ),
)


# --------------------------------------------------------------------------------------------------- flops.chinchilla
def _chinchilla_cases(rng: Random) -> list[Case]:
    cases = []
    for what, gpus, peak, mfu, days, ratio in (
        ("1,024 H100, 30 days", 1024, 989.4, 0.4, 30.0, 20.0),
        ("8 A100, a week", 8, 312.0, 0.45, 7.0, 20.0),
        ("16,384 H100, 54 days", 16_384, 989.4, 0.41, 54.0, 38.0),
        ("one RTX 4090, a night", 1, 165.2, 0.35, 0.4, 20.0),
        ("a small model, trained for long", 256, 989.4, 0.4, 20.0, 1800.0),
        ("as many tokens as parameters", 512, 312.0, 0.5, 10.0, 1.0),
        ("fewer tokens than parameters", 64, 2250.0, 0.3, 3.0, 0.5),
    ):
        mfu, days = mfu * rng.uniform(0.9, 1.1), days * rng.uniform(0.8, 1.2)
        tags = "other-ratio" if ratio != 20 else ""
        cases.append(case(f"{what}, {ratio:g} tokens per parameter", gpus, peak, mfu, days, ratio, tags=tags))
    return cases


def _chinchilla(
    gpus, peak, mfu, days, ratio, *, flops=6.0, inside=1.0, after=0.0, useful=1.0, spent=math.sqrt
) -> tuple[float, float]:
    """The right model and its tokens, or one that errs in what the keywords say; inside, after: the power of the ratio by
    which the FLOPs are divided before the root, and the result after it."""
    budget = gpus * peak * 1e12 * mfu * days * 86400 * useful
    params = spent(budget / flops / ratio**inside) / ratio**after
    return params, ratio * params


def _chinchilla_useful(factor: float) -> Callable[..., tuple[float, float]]:
    return partial(_chinchilla, useful=factor)


CHINCHILLA = FunctionExercise(
    id="flops.chinchilla",
    function="compute_optimal",
    cases=_chinchilla_cases,
    expected=_chinchilla,
    tolerance=1e-9,
    returns=("parameters", "tokens"),
    misconceptions=(
        Misconception("no-root", gives=partial(_chinchilla, spent=float)),
        Misconception("ratio-forgotten", gives=partial(_chinchilla, inside=0)),
        Misconception("ratio-after-the-root", gives=partial(_chinchilla, inside=0, after=1)),
        Misconception(
            "always-twenty", gives=lambda gpus, peak, mfu, days, ratio: _chinchilla(gpus, peak, mfu, days, 20.0)
        ),
        Misconception("swapped", gives=lambda *a: _chinchilla(*a)[::-1]),
        Misconception("tokens-divided", gives=lambda *a: (_chinchilla(*a)[0], _chinchilla(*a)[0] / a[-1])),
        Misconception("budget-as-tokens", gives=lambda *a: (_chinchilla(*a)[0], _chinchilla(*a)[1] * 6)),
        Misconception("six-forgotten", gives=partial(_chinchilla, flops=1)),
        Misconception("forward-only", gives=partial(_chinchilla, flops=2)),
        Misconception("multiply-add-is-one", gives=partial(_chinchilla, flops=3)),
        Misconception("backward-as-forward", gives=partial(_chinchilla, flops=4)),
        Misconception("mfu-forgotten", gives=lambda gpus, peak, mfu, *rest: _chinchilla(gpus, peak, 1, *rest)),
        Misconception("mfu-upside-down", gives=lambda gpus, peak, mfu, *rest: _chinchilla(gpus, peak, 1 / mfu, *rest)),
        Misconception("one-gpu", gives=lambda gpus, *rest: _chinchilla(1, *rest)),
        Misconception("peak-halved", gives=_chinchilla_useful(0.5)),
        *(Misconception("units", gives=_chinchilla_useful(10.0**-power)) for power in (12, 9, 6, 3)),
        *(
            Misconception("seconds-of-a-day", gives=_chinchilla_useful(1 / factor))
            for factor in (86400, 3600, 24, 60, 1440)
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
        ("slow arithmetic, fast memory", 1000 + rng.randrange(100), 64, 256, 2, (2.0, 1.0, 4800.0)),
        ("one token in int8, odd sizes", 1, 2 * rng.randrange(50, 500) + 1, 2 * rng.randrange(50, 500) + 1, 1, a100),
        ("all sizes 1", 1, 1, 1, 1, t4),
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


def _mlp(*args, both=max, weights=1.0, separate_h=2, gelu_on=None, a_gelu=8, lanes_fused=True):
    """The right time, or one that errs in what the keywords say. `both`: how arithmetic and traffic combine."""
    *sizes, fused = args
    if gelu_on is not None:
        sizes[5] = sizes[gelu_on]
    product, gelu, x, w, h = _mlp_parts(*sizes)
    gelu *= a_gelu / 8
    moved = x + weights * w + h
    if fused:
        return both(max(product, gelu if lanes_fused else 0), moved) + both(product, moved)
    return 2 * both(product, moved) + both(gelu, separate_h * h)


def _mlp_with_rate(which: int, times: float, *args):
    """One of the rates, by its place among the arguments, is another by a factor."""
    return _mlp(*(times * arg if i == which else arg for i, arg in enumerate(args)))


def _mlp_gelu_afterwards(*args):
    """A fused kernel whose lanes begin when products and traffic are done."""
    *sizes, fused = args
    product, gelu, x, w, h = _mlp_parts(*sizes)
    return 2 * max(product, x + w + h) + gelu if fused else _mlp(*args)


def _mlp_gelu_kernel_in_turn(*args):
    *sizes, fused = args
    product, gelu, x, w, h = _mlp_parts(*sizes)
    return _mlp(*args) if fused else 2 * max(product, x + w + h) + gelu + 2 * h


def _mlp_one_product(which: tuple[bool, ...], *args):
    """Without the second product, where `fused` is one of `which`."""
    *sizes, fused = args
    product, _, x, w, h = _mlp_parts(*sizes)
    return _mlp(*args) - (max(product, x + w + h) if fused in which else 0)


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


def _mlp_one_kernel(*args):
    *sizes, fused = args
    product, gelu, x, w, _ = _mlp_parts(*sizes)
    return max(2 * product, gelu, 2 * (x + w)) if fused else _mlp(*args)


def _mlp_all_in_turn(*args):
    *sizes, fused = args
    product, gelu, x, w, h = _mlp_parts(*sizes)
    return 2 * (product + x + w + h) + gelu + (0 if fused else 2 * h)


def _mlp_slowest_kernel(*args):
    *sizes, fused = args
    product, gelu, x, w, h = _mlp_parts(*sizes)
    return max(product, gelu, x + w + h, 0 if fused else 2 * h)


def _mlp_reads_only(*args):
    *sizes, fused = args
    product, gelu, x, w, h = _mlp_parts(*sizes)
    if fused:
        return max(product, gelu, x + w) + max(product, h + w)
    return max(product, x + w) + max(gelu, h) + max(product, h + w)


ROOFLINE = FunctionExercise(
    id="flops.roofline",
    function="mlp_us",
    cases=_roofline_cases,
    expected=_mlp,
    tolerance=1e-9,
    unit="µs",
    misconceptions=(
        Misconception("one-roof-for-all", gives=_mlp_sums),
        Misconception("one-roof-for-all", gives=_mlp_sums_units),
        Misconception("one-roof-for-all", gives=_mlp_sums_all),
        Misconception("no-overlap", gives=partial(_mlp, both=lambda x, y: x + y)),
        Misconception("no-overlap", gives=_mlp_all_in_turn),
        Misconception("kernels-at-once", gives=_mlp_slowest_kernel),
        Misconception("traffic-only", gives=partial(_mlp, both=lambda x, y: y)),
        Misconception("compute-only", gives=partial(_mlp, both=lambda x, y: x)),
        Misconception("weights-forgotten", gives=partial(_mlp, weights=0)),
        Misconception("reads-only", gives=_mlp_reads_only),
        Misconception("gelu-one-way", gives=partial(_mlp, separate_h=1)),
        Misconception("gelu-one-way/2", gives=partial(_mlp, separate_h=0)),
        Misconception("gelu-for-nothing", gives=partial(_mlp, lanes_fused=False)),
        Misconception("gelu-for-nothing", gives=partial(_mlp, a_gelu=0)),
        Misconception("gelu-one-flop", gives=partial(_mlp, a_gelu=1)),
        Misconception("gelu-on-tensor-cores", gives=partial(_mlp, gelu_on=4)),
        Misconception(
            "products-on-lanes",
            gives=lambda M, d, f, i, tensor, lane, gbps, fused: _mlp(M, d, f, i, lane, lane, gbps, fused),
        ),
        Misconception(
            "units-swapped",
            gives=lambda M, d, f, i, tensor, lane, gbps, fused: _mlp(M, d, f, i, lane, tensor, gbps, fused),
        ),
        Misconception("fusing-saves-nothing", gives=lambda *a: _mlp(*a[:-1], False)),
        Misconception("always-fused", gives=lambda *a: _mlp(*a[:-1], True)),
        Misconception("fused-in-turn", gives=_mlp_fused_in_turn),
        Misconception("fused-in-turn", gives=_mlp_gelu_afterwards),
        Misconception("no-overlap/2", gives=_mlp_gelu_kernel_in_turn),
        *(
            Misconception("one-product", gives=partial(_mlp_one_product, which))
            for which in ((False,), (True,), (False, True))
        ),
        Misconception("h-stays-on-chip", gives=_mlp_h_stays),
        Misconception("h-stays-on-chip", gives=_mlp_one_kernel),
        Misconception(
            "multiply-add-is-one",
            gives=lambda M, d, f, i, tensor, lane, gbps, fused: _mlp(M, d, f, i, 2 * tensor, lane, gbps, fused),
        ),
        Misconception(
            "multiply-add-is-one/2",
            gives=lambda M, d, f, i, tensor, lane, gbps, fused: _mlp(M, d, f, i, tensor / 2, lane, gbps, fused),
        ),
        Misconception("elements", gives=lambda M, d, f, i, *rest: _mlp(M, d, f, 1, *rest)),
        Misconception("units", when=lambda evidence: _power_of_ten(evidence, _mlp)),
        *(
            Misconception(f"units/{2 + i}", gives=partial(_mlp_with_rate, 4 + i, 10.0**power))
            for i in range(3)
            for power in (-6, -3)  # with a rate that is too high, what it bounds counts for nothing: other ideas say so
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
    # Exact in floating point, so that every way of dividing finds the two slopes equal.
    half = rng.randrange(2_000_000, 4_000_000) + 0.5  # a crossing so late that nobody tries one batch after the other
    late = 8e9, 2.0, 2 * 8e9 * 3350e9 / 989.4e12 - 8e9 * 2.0 / half, 0.0, 989.4, 3350.0
    parallel = 8.192e9, 2.0, 16384.0, 0.0, 1000.0, 1.0
    return [
        *cases,
        case("every sequence brings as much to fetch as to compute", *parallel, tags="never"),
        case("a cache that takes almost as long as its arithmetic", *late, tags="cache"),
        case("at 128 both take equally long", 2.0**33, 2.0, 0.0, 0.0, 128.0, 1000.0, tags="no-cache"),  # exact, too
        case("one sequence is enough", 1e6, 2.0, 1e6, 1e12, 100.0, 1000.0, tags="cache"),
    ]


def _critical_exact(params, weight, kv, attention, tflops, gbps, *, flops=2.0) -> float:
    """Where the two lines cross; negative where they do not, infinite where they are parallel."""
    gained = (flops * params + attention) * gbps * 1e9 / (tflops * 1e12) - kv
    return params * weight / gained if gained else math.inf


def _critical(
    params, weight, kv, attention, tflops, gbps,
    *, flops=2.0, fetched=1, computed=1, once=False, itemsize=None, rounded=math.ceil, overlooked=False, never=0,
) -> int:  # fmt: skip
    """The right batch, or one that errs in what the keywords say.

    fetched, computed  how many caches, and how much of what is computed with them, count for a sequence
    once               one cache is fetched for all of them, with the weights
    overlooked         that the lines may not cross; else the answer is then `never`
    """
    weight = itemsize or weight
    if once:
        weight, fetched = weight + kv / params, 0
    exact = _critical_exact(params, weight, fetched * kv, computed * attention, tflops, gbps, flops=flops)
    return rounded(exact) if overlooked or 0 < exact < math.inf else never


CRITICAL = FunctionExercise(
    id="flops.critical_batch",
    function="critical_batch",
    cases=_critical_cases,
    expected=_critical,
    unit="sequences",
    misconceptions=(
        Misconception("cache-ignored", gives=partial(_critical, fetched=0)),
        Misconception("cache-ignored/2", gives=partial(_critical, fetched=0, computed=0)),
        Misconception("cache-fetched-once", gives=partial(_critical, once=True)),
        Misconception("never-overlooked", gives=partial(_critical, overlooked=True)),
        Misconception("never-overlooked/2", gives=partial(_critical, never=1)),
        Misconception("attention-not-computed", gives=partial(_critical, computed=0)),
        Misconception("multiply-add-is-one", gives=partial(_critical, flops=1)),
        Misconception("flops-by-bytes", gives=lambda *a: _critical(*a, flops=2 * a[1])),
        Misconception("rounded-down", gives=partial(_critical, rounded=math.floor)),
        Misconception("rounded-down/2", gives=partial(_critical, rounded=round)),
        Misconception("longer", gives=partial(_critical, rounded=lambda exact: math.floor(exact) + 1)),
        Misconception("not-rounded", when=lambda evidence: evidence.outputs != round(evidence.outputs)),
        Misconception("two-bytes", gives=partial(_critical, itemsize=2)),
        Misconception(
            "ridge", gives=lambda params, weight, kv, attention, tflops, gbps: math.ceil(tflops * 1e3 / gbps)
        ),
        Misconception(
            "weights-for-each-sequence",
            gives=lambda params, weight, kv, attention, tflops, gbps: int(
                (2 * params + attention) / tflops / 1e12 >= (params * weight + kv) / gbps / 1e9
            ),
        ),
    ),
)

EXERCISES = [EINSUM, LAYER, AUDIT, MFU, DAYS, CHINCHILLA, ROOFLINE, CRITICAL]
