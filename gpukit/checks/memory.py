"""The exercises of notebook 02: cases, and what each wrong idea computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from random import Random

from gpukit.accounting import memory, models
from gpukit.grading import ideas
from gpukit.grading.exercise import Case, FunctionExercise, Misconception
from gpukit.grading.inputs import case


# -------------------------------------------------------------------------------------------------------- memory.gpt2
def _of_layers(layers: int, total: Callable[[int], int]) -> int:
    """total(layers), which grows by as much with each layer; a models.Config has one at least."""
    return total(layers) if layers else 2 * total(1) - total(2)


def _gpt2_cases(rng: Random) -> list[Case]:
    def some(tied: bool) -> Case:
        vocab, positions = rng.randrange(200, 60_000), rng.choice((64, 100, 512, 2048))
        h, layers = 8 * rng.randrange(2, 200), rng.randrange(2, 40)
        head = "tied" if tied else "untied"
        return case(
            f"vocab {vocab:,}, {positions:,} positions, h = {h}, {layers} layers, {head} head",
            vocab,
            positions,
            h,
            layers,
            tied,
            tags=head,
        )

    return [
        case("GPT-2 small", 50257, 1024, 768, 12, True, tags="tied"),
        case("GPT-2 XL", 50257, 1024, 1600, 48, True, tags="tied"),
        some(True),
        case("GPT-2 small with an untied head", 50257, 1024, 768, 12, False, tags="untied"),
        some(False),
        case("one layer of width 1", 10, 3, 1, 1, False, tags="untied"),
        case("one token, one position, odd width", 1, 1, 13, 2, True, tags="tied"),
        case("no layer and no position", 97, 0, 12, 0, False, tags="untied"),
    ]


def _gpt2(vocab: int, positions: int, h: int, layers: int, tied: bool) -> int:
    def total(n: int) -> int:
        config = models.Config("GPT-2", vocab, h, n, heads=1, positions=positions, tied_embeddings=tied, biases="all")
        return models.parameters(config).total

    return _of_layers(layers, total)


def _gpt2_but(error: Callable[[int, int, int, int, bool], int]) -> Callable[..., int]:
    return lambda *args: _gpt2(*args) + error(*args)


GPT2 = FunctionExercise(
    id="memory.gpt2",
    function="gpt2",
    cases=_gpt2_cases,
    expected=_gpt2,
    unit="parameters",
    misconceptions=(
        Misconception(
            "no-positions",
            gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -positions * h - (not tied) * vocab * h),
        ),
        Misconception("no-positions", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -positions * h)),
        Misconception(
            "head-shared-always", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -(not tied) * vocab * h)
        ),
        Misconception(
            "tied-counted-twice", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: tied * vocab * h)
        ),
        Misconception(
            "positions-in-every-layer",
            gives=_gpt2_but(lambda vocab, positions, h, layers, tied: (layers - 1) * positions * h),
        ),
        Misconception(
            "tied-inverted", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: (1 if tied else -1) * vocab * h)
        ),
        Misconception(
            "position-is-number", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: positions - positions * h)
        ),
        Misconception("constant", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: 786_432 - positions * h)),
        Misconception("head-bias", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: (not tied) * vocab)),
        Misconception("head-bias", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: vocab)),
        Misconception(
            "no-output-projection", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -layers * (h * h + h))
        ),
        Misconception(
            "no-output-projection", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -layers * h * h)
        ),
        Misconception("no-biases", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -9 * h * layers)),
        Misconception("attention-biases", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -4 * h * layers)),
        Misconception("mlp-biases", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -5 * h * layers)),
        Misconception("no-norms", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -(4 * layers + 2) * h)),
        Misconception("one-norm", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -2 * layers * h)),
        Misconception(
            "norms-without-bias", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -(2 * layers + 1) * h)
        ),
        Misconception("no-last-norm", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -2 * h)),
        Misconception(
            "mask-is-no-parameter", gives=_gpt2_but(lambda vocab, positions, h, layers, tied: layers * positions**2)
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------- memory.llama
def _llama_cases(rng: Random) -> list[Case]:
    def some(heads: int, kv_heads: int, head_size: int, h: int, tied: bool) -> Case:
        vocab, ffn, layers = rng.randrange(300, 200_000), 16 * rng.randrange(5, 900), rng.randrange(2, 90)
        args = (vocab, h, layers, heads, kv_heads, head_size, ffn, tied)
        tags = f"{'gqa' if kv_heads < heads else 'mha'} {'tied' if tied else 'untied'}"
        tags += " own-head-size" if heads * head_size != h else ""
        return case(f"{heads} heads of {head_size}, {kv_heads} of them for k and v, h = {h}", *args, tags=tags)

    wide = 32 * rng.randrange(3, 60)
    return [
        case("Llama 3 8B", 128256, 4096, 32, 32, 8, 128, 14336, False, tags="gqa untied"),
        case("Llama 2 7B", 32000, 4096, 32, 32, 32, 128, 11008, False, tags="mha untied"),
        case("SmolLM2 135M", 49152, 576, 30, 9, 3, 64, 1536, True, tags="gqa tied"),
        case("Mistral Nemo 12B", 131072, 5120, 40, 32, 8, 128, 14336, False, tags="gqa untied own-head-size"),
        some(16, 16, wide // 16, wide, False),
        some(12, 1, rng.choice((16, 64, 96)), 8 * rng.randrange(20, 300), True),
        some(24, 8, rng.choice((32, 80, 128)), 8 * rng.randrange(20, 300), False),
        case("one of everything, heads of 3, h = 5", 1, 5, 1, 1, 1, 3, 1, True, tags="mha tied own-head-size"),
        case("no layer, the other sizes 1", 1, 1, 0, 1, 1, 1, 1, False, tags="mha untied"),
    ]


def _llama(vocab: int, h: int, layers: int, heads: int, kv_heads: int, head_size: int, ffn: int, tied: bool) -> int:
    def total(n: int) -> int:
        config = models.Config(
            "Llama", vocab, h, n, heads, kv_heads, head_size, ffn, glu=True, tied_embeddings=tied, norm="rmsnorm"
        )
        return models.parameters(config).total

    return _of_layers(layers, total)


def _llama_but(error: Callable[..., int]) -> Callable[..., int]:
    return lambda *args: _llama(*args) + error(*args)


LLAMA = FunctionExercise(
    id="memory.llama",
    function="llama",
    cases=_llama_cases,
    expected=_llama,
    unit="parameters",
    misconceptions=(
        Misconception(
            "kv-like-queries", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: n * 2 * h * d * (heads - kv))
        ),
        Misconception(
            "kv-like-queries",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: n * (4 * h * h - 2 * h * d * (heads + kv))),
        ),
        Misconception("no-norms/2", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -2 * n * h)),
        Misconception("two-matrices", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -n * h * f)),
        Misconception("inner-width", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: n * 3 * h * (4 * h - f))),
        Misconception(
            "head-size-from-h",
            gives=_llama_but(
                lambda v, h, n, heads, kv, d, f, tied: (
                    n * (2 * h * h + 2 * h * (h * kv // heads) - 2 * h * d * (heads + kv))
                )
            ),
        ),
        Misconception(
            "head-size-from-h",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: n * (2 * h * h - 2 * h * d * heads)),
        ),
        Misconception(
            "no-output-projection", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -n * h * heads * d)
        ),
        Misconception("only-keys", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -n * h * kv * d)),
        Misconception("tied-counted-twice", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: tied * v * h)),
        Misconception(
            "head-shared-always", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -(not tied) * v * h)
        ),
        Misconception(
            "tied-inverted", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: (1 if tied else -1) * v * h)
        ),
        Misconception("norms-with-bias", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: (2 * n + 1) * h)),
        Misconception("no-last-norm", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -h)),
        Misconception("no-norms", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -(2 * n + 1) * h)),
        Misconception("one-norm", gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -n * h)),
    ),
)


# ------------------------------------------------------------------------------------------------------- memory.state
_RECIPES = {"fp32": "fp32-adamw", "mixed": "bf16-adamw", "bf16": "bf16-pure"}  # as gpukit.accounting.memory calls them


def _state_cases(rng: Random) -> list[Case]:
    def some(recipe: str, gpus: int, stage: int, frozen: bool) -> Case:
        unit = 960 * rng.randrange(70, 7000)
        base = 960 * rng.randrange(14_000, 140_000) if frozen else 0
        lora = ", and frozen ones" if frozen else ""
        tags = f"{recipe} {'frozen' if frozen else ''} {('', 'zero-1-or-2', 'zero-1-or-2', 'zero-3')[stage]}"
        return case(f"{recipe}, ZeRO {stage} on {gpus} GPUs{lora}", unit, base, recipe, gpus, stage, tags=tags)

    return [
        case("7 B parameters, fp32, ZeRO 0", 7 * 10**9, 0, "fp32", 1, 0, tags="fp32"),
        case("7 B parameters, mixed, ZeRO 0", 7 * 10**9, 0, "mixed", 1, 0, tags="mixed"),
        some("bf16", 1, 0, False),
        *(some(recipe, rng.choice((2, 3, 5)), stage, False) for recipe in ("fp32", "mixed") for stage in (1, 2, 3)),
        *(some(recipe, rng.choice((4, 6, 8, 64)), stage, True) for recipe in _RECIPES for stage in range(4)),
        case("nothing trained, mixed, ZeRO 1 on 4 GPUs", 0, 960 * 41, "mixed", 4, 1, tags="mixed frozen zero-1-or-2"),
    ]


@ideas.options
def _state(
    sizes: dict[str, tuple[int, int, int]] | None = None,
    *,
    weights_from: int = 3,
    gradients_from: int = 2,
    states_from: int = 1,
    frozen_moves: bool = False,
    frozen_gradients: bool = False,
    frozen_cut: bool = True,
    frozen_counts: bool = True,
    frozen_copied: bool = False,
    stages_add: bool = True,
    master: int = 0,
) -> Callable[..., int]:
    """Bytes of state by recipe: (a weight, its gradient, its optimizer state); the options are ways to be wrong."""
    states = {name: memory.model_states(1, recipe) for name, recipe in _RECIPES.items()}
    right = {name: (s.weights_bytes, s.gradients_bytes, s.optimizer_bytes) for name, s in states.items()}
    sizes = right | (sizes or {})

    def count(trained: int, frozen: int, recipe: str, gpus: int, stage: int) -> int:
        weight, gradient, optimizer = sizes[recipe]

        def cut(size: int, begins: int) -> int:
            return size // gpus if stage == begins or (stages_add and stage > begins) else size

        moved = trained + frozen if frozen_moves else trained
        weights = cut(weight * trained, weights_from)
        weights += cut(weight * frozen * frozen_counts, weights_from if frozen_cut else 4)
        weights += cut(4 * frozen, states_from) if frozen_copied and recipe == "mixed" else 0
        # `master`: bytes of the optimizer's state in "mixed" that are taken for weights
        weights += cut(master * moved, weights_from) if recipe == "mixed" else 0
        optimizer -= master if recipe == "mixed" else 0
        gradients = cut(gradient * (moved + frozen_gradients * frozen), gradients_from)
        return weights + gradients + cut(optimizer * moved, states_from)

    return count


STATE = FunctionExercise(
    id="memory.state",
    function="state_bytes",
    cases=_state_cases,
    expected=_state(),
    unit="bytes",
    misconceptions=(
        Misconception("frozen-is-not-trained", gives=_state(frozen_moves=True)),
        Misconception("frozen-is-not-trained/2", gives=_state(frozen_gradients=True)),
        Misconception("frozen-is-not-trained/3", gives=_state(frozen_copied=True)),
        Misconception("frozen-not-cut", gives=_state(frozen_cut=False)),
        Misconception("frozen-forgotten", gives=_state(frozen_counts=False)),
        Misconception("no-copy", gives=_state({"mixed": (2, 2, 8)})),
        Misconception("recipe-of-autocast", gives=_state({"mixed": (4, 4, 8)})),
        Misconception("one-moment", gives=_state({"fp32": (4, 4, 4), "mixed": (2, 2, 8), "bf16": (2, 2, 2)})),
        Misconception("gradients-in-fp32", gives=_state({"mixed": (2, 4, 12)})),
        Misconception("everything-in-16-bit", gives=_state({"mixed": (2, 2, 6)})),
        Misconception("everything-in-16-bit/2", gives=_state({"mixed": (2, 2, 4)})),
        Misconception("bf16-everywhere", gives=_state({"bf16": (2, 2, 8)})),
        Misconception("copy-is-state", gives=_state(master=4)),
        Misconception("stage-order", gives=_state(weights_from=1, gradients_from=2, states_from=3)),
        Misconception("stage-order/2", gives=_state(gradients_from=1, states_from=2)),
        Misconception("stages-add-up", gives=_state(stages_add=False)),
        Misconception("weights-not-cut", gives=_state(weights_from=4)),
        Misconception("states-not-cut", gives=_state(states_from=4)),
        Misconception("everything-in-stage-3", gives=_state(gradients_from=3, states_from=3)),
        Misconception("nothing-cut", gives=_state(weights_from=4, gradients_from=4, states_from=4)),
        Misconception("one-stage-late", gives=_state(weights_from=4, gradients_from=3, states_from=2)),
        Misconception("everything-cut", gives=_state(weights_from=1, gradients_from=1)),
        Misconception("everything-cut/2", gives=_state(weights_from=0, gradients_from=0, states_from=0)),
    ),
)


# ------------------------------------------------------------------------------------------------------- memory.saved
Operation = tuple[str, list[str], str]
Shapes = dict[str, tuple[int, ...]]

_NEEDS_INPUTS = frozenset(("matmul", "mul", "gelu", "silu"))
_NEEDS_OUTPUT = frozenset(("relu", "exp", "sigmoid", "softmax"))


def programs(rng: Random) -> list[tuple[str, list[Operation], Shapes, list[str]]]:
    """(name, operations, shape of each tensor, weights), as the exercise hands them out but for the shapes."""
    T, h = rng.choice((96, 128, 200)), rng.choice((64, 80))
    f, heads = 4 * h, 4
    found = []

    def add(name: str, operations: list[Operation], shapes: Shapes) -> None:
        weights = sorted({n for _, inputs, _ in operations for n in inputs if n.startswith("w")})
        shapes |= {n: shapes[n] for n in weights}
        found.append((name, operations, shapes, weights))

    inner, outer, score = (T, f), (T, h), (heads, T, T)
    for activation in ("gelu", "relu"):
        add(
            f"MLP with {activation.upper() if activation == 'gelu' else 'ReLU'}, {T} tokens",
            [
                ("matmul", ["x", "w1"], "a"),
                (activation, ["a"], "b"),
                ("matmul", ["b", "w2"], "c"),
                ("add", ["c", "x"], "y"),
            ],
            {"x": outer, "w1": (h, f), "a": inner, "b": inner, "w2": (f, h), "c": outer, "y": outer},
        )
    add(
        f"SwiGLU, {T} tokens",
        [
            ("matmul", ["x", "w1"], "gate"),
            ("silu", ["gate"], "g"),
            ("matmul", ["x", "w2"], "up"),
            ("mul", ["g", "up"], "u"),
            ("matmul", ["u", "w3"], "y"),
        ],
        {
            "x": outer,
            "w1": (h, f),
            "gate": inner,
            "g": inner,
            "w2": (h, f),
            "up": inner,
            "u": inner,
            "w3": (f, h),
            "y": outer,
        },
    )
    split = (heads, T, h // heads)
    turned = (heads, h // heads, T)
    add(
        f"attention, {T} tokens",
        [
            ("matmul", ["x", "wq"], "q"),
            ("matmul", ["x", "wk"], "k"),
            ("matmul", ["x", "wv"], "v"),
            ("view", ["q"], "qh"),
            ("view", ["k"], "kh"),
            ("view", ["v"], "vh"),
            ("view", ["kh"], "kt"),
            ("matmul", ["qh", "kt"], "s"),
            ("scale", ["s"], "s2"),
            ("softmax", ["s2"], "p"),
            ("matmul", ["p", "vh"], "o"),
        ],
        {
            "x": outer,
            "wq": (h, h),
            "wk": (h, h),
            "wv": (h, h),
            "q": outer,
            "k": outer,
            "v": outer,
            "qh": split,
            "kh": split,
            "vh": split,
            "kt": turned,
            "s": score,
            "s2": score,
            "p": score,
            "o": split,
        },
    )
    add(
        "three adds and a constant",
        [("add", ["x", "x2"], "a"), ("scale", ["a"], "b"), ("add", ["b", "x"], "c"), ("add", ["c", "a"], "y")],
        {name: outer for name in ("x", "x2", "a", "b", "c", "y")},
    )
    add(
        "a square, and the same memory twice",
        [
            ("exp", ["x"], "a"),
            ("view", ["a"], "a2"),
            ("mul", ["a2", "a2"], "b"),
            ("view", ["b"], "c"),
            ("mul", ["a", "c"], "y"),
        ],
        {"x": outer, "a": outer, "a2": (h, T), "b": (h, T), "c": outer, "y": outer},
    )
    add(
        "a turned weight, a view of a view, a square, weights by element, a turned input",
        [
            ("view", ["w1"], "turned"),
            ("matmul", ["x", "turned"], "a"),
            ("relu", ["a"], "b"),
            ("view", ["b"], "bt"),
            ("view", ["bt"], "btt"),
            ("matmul", ["btt", "w2"], "c"),
            ("sigmoid", ["c"], "d"),
            ("mul", ["d", "d"], "e"),
            ("silu", ["e"], "g"),
            ("scale", ["g"], "s"),
            ("mul", ["w3", "s"], "m"),
            ("gelu", ["w3"], "n"),
            ("add", ["m", "n"], "p"),
            ("view", ["x"], "xt"),
            ("matmul", ["xt", "p"], "q"),
            ("matmul", ["w4", "q"], "y"),
        ],
        {name: outer for name in ("x", "c", "d", "e", "g", "s", "w3", "m", "n", "p", "not used")}
        | {name: inner for name in ("a", "b", "btt")}
        | {
            "w1": (f, h),
            "turned": (h, f),
            "bt": (f, T),
            "w2": (f, h),
            "xt": (h, T),
            "q": (h, h),
            "w4": (f, h),
            "y": (f, h),
        },
    )
    # What an operation keeps is kept by no other.
    chain, last = [], "x"
    for kind in ("relu", "exp", "sigmoid", "softmax", "gelu", "silu"):
        chain += [(kind, [last], kind[:2]), ("scale", [kind[:2]], last := f"{kind[:2]}2")]
    add("a chain whose results are scaled", chain, {"x": outer} | {name: outer for _, _, name in chain})
    add("no operation at all", [], {"x": outer})
    found.append(_random_program(rng, T, h))
    return found


def _random_program(rng: Random, T: int, h: int) -> tuple[str, list[Operation], Shapes, list[str]]:
    shapes: Shapes = {"x": (T, h)}
    operations: list[Operation] = []
    weights = []
    for i in range(14):
        kind = rng.choice(("matmul", "mul", "add", *sorted(_NEEDS_OUTPUT), "gelu", "silu", "scale", "view"))
        a = rng.choice(list(shapes)[-4:])
        while a in weights:
            a = rng.choice(list(shapes)[-4:])
        inputs, shape = [a], shapes[a]
        if kind == "matmul":
            shape = (shapes[a][0], rng.choice((32, 64, 128)))
            weights.append(f"w{i}")
            shapes[f"w{i}"] = (shapes[a][1], shape[1])
            inputs.append(f"w{i}")
        elif kind in ("mul", "add"):
            inputs.append(rng.choice([n for n, s in shapes.items() if s == shape and n not in weights]))
        elif kind == "view":
            shape = shape[::-1]
        shapes[f"t{i}"] = shape
        operations.append((kind, inputs, f"t{i}"))
    return "fourteen operations at random", operations, shapes, weights


def _saved_cases(rng: Random) -> list[Case]:
    cases = []
    for i, (name, operations, shapes, weights) in enumerate(programs(rng)):
        itemsize = (2, 4, 1, 8)[i % 4]
        elements = {n: math.prod(shape) for n, shape in shapes.items()}
        has_view = any(kind == "view" for kind, _, _ in operations)
        cases.append(case(name, operations, elements, weights, itemsize, tags="view" if has_view else ""))
    return cases


@ideas.options
def _saved(
    inputs_of: frozenset[str] = _NEEDS_INPUTS,
    output_of: frozenset[str] = _NEEDS_OUTPUT,
    *,
    twice: bool = False,
    views: bool = True,
    own_weights: bool = False,
    first_only: str = "",
    far_views: bool = True,
    turned_weights: bool = False,
    with_itemsize: bool = True,
) -> Callable[..., int]:
    """Bytes kept, when the kinds in `inputs_of` keep their inputs and those in `output_of` their output."""

    def count(operations: list[Operation], elements: dict[str, int], weights: list[str], itemsize: int) -> int:
        base: dict[str, str] = {}
        kept: list[str] = []
        for kind, inputs, output in map(tuple, operations):
            if kind == "view" and views:
                viewed = inputs[0]
                base[output] = base.get(viewed, viewed) if far_views else viewed
            if kind in inputs_of:
                kept += inputs[:1] if kind == first_only else inputs
            if kind in output_of:
                kept.append(output)
        free = () if own_weights else weights
        names = [base.get(name, name) for name in kept if not turned_weights or name not in free]
        names = names if twice else list(dict.fromkeys(names))
        counted = sum(elements[name] for name in names if turned_weights or name not in free)
        return counted * (itemsize if with_itemsize else 1)

    return count


_ALL_KINDS = _NEEDS_INPUTS | _NEEDS_OUTPUT | {"add", "scale"}
_COARSE_RULES = (
    ("every-input", (_ALL_KINDS, frozenset())),
    ("every-input", (_ALL_KINDS | {"view"}, frozenset())),
    ("every-output", (frozenset(), _ALL_KINDS)),
    ("every-output", (frozenset(), _ALL_KINDS | {"view"})),
    ("every-output/2", (_ALL_KINDS, _ALL_KINDS)),
    ("every-output/2", (_ALL_KINDS | {"view"}, _ALL_KINDS | {"view"})),
)

SAVED = FunctionExercise(
    id="memory.saved",
    function="saved_bytes",
    cases=_saved_cases,
    expected=_saved(),
    unit="bytes",
    misconceptions=(
        Misconception("weights-counted", gives=_saved(own_weights=True)),
        Misconception("counted-twice", gives=_saved(twice=True)),
        Misconception("view-is-memory", gives=_saved(views=False)),
        Misconception("every-output", gives=_saved(frozenset(), _ALL_KINDS)),
        Misconception("every-input", gives=_saved(_ALL_KINDS, frozenset())),
        Misconception("add-keeps-nothing", gives=_saved(_NEEDS_INPUTS | {"add", "scale"})),
        Misconception("add-keeps-nothing/2", gives=_saved(_NEEDS_INPUTS | {"add"})),
        Misconception("output-would-do", gives=_saved(_NEEDS_INPUTS | _NEEDS_OUTPUT, frozenset())),
        Misconception("output-would-do/4", gives=_saved(_NEEDS_INPUTS | {"softmax"}, _NEEDS_OUTPUT - {"softmax"})),
        Misconception("output-would-do/2", gives=_saved(_NEEDS_INPUTS | {"relu"}, _NEEDS_OUTPUT - {"relu"})),
        Misconception(
            "output-does-not-tell", gives=_saved(_NEEDS_INPUTS - {"gelu", "silu"}, _NEEDS_OUTPUT | {"gelu", "silu"})
        ),
        Misconception("output-does-not-tell/2", gives=_saved(_NEEDS_INPUTS - {"silu"}, _NEEDS_OUTPUT | {"silu"})),
        Misconception("output-does-not-tell/3", gives=_saved(_NEEDS_INPUTS - {"gelu"}, _NEEDS_OUTPUT | {"gelu"})),
        Misconception("mul-keeps-both", gives=_saved(first_only="mul")),
        Misconception("matmul-keeps-both", gives=_saved(first_only="matmul")),
        Misconception("output-would-do/3", gives=_saved(_NEEDS_INPUTS | _NEEDS_OUTPUT)),
        Misconception("add-keeps-nothing/3", gives=_saved(_NEEDS_INPUTS | {"scale"})),
        Misconception("view-is-memory/2", gives=_saved(far_views=False)),
        Misconception("mul-keeps-both/2", gives=_saved(_NEEDS_INPUTS - {"mul"})),
        Misconception("elements-not-bytes", gives=_saved(with_itemsize=False)),
        Misconception("elements-not-bytes/2", gives=lambda *args: 8 * _saved()(*args)),
        Misconception("weights-counted/2", gives=_saved(turned_weights=True)),
        Misconception("every-output/3", gives=_saved(output_of=_NEEDS_OUTPUT | _NEEDS_INPUTS)),
        *(
            Misconception(
                "keeps-nothing",
                gives=_saved(_NEEDS_INPUTS - {*kinds}, _NEEDS_OUTPUT - {*kinds}),
                fill=lambda evidence, kinds=kinds: {"kinds": " and ".join(kinds)},
            )
            for kinds in (*((kind,) for kind in sorted(_NEEDS_INPUTS | _NEEDS_OUTPUT)), ("gelu", "silu"))
        ),
        Misconception("every-tensor", gives=lambda _, elements, weights, itemsize: itemsize * sum(elements.values())),
        Misconception(
            "every-tensor",
            gives=lambda _, elements, weights, itemsize: (
                itemsize * sum(n for name, n in elements.items() if name not in weights)
            ),
        ),
        # Those who take several things for memory of their own are told of the rule first.
        *(
            Misconception(name, gives=_saved(*kinds, twice=twice, views=views, own_weights=own_weights))
            for name, kinds in _COARSE_RULES
            for twice in (False, True)
            for views in (True, False)
            for own_weights in (False, True)
        ),
        Misconception("view-is-memory", gives=_saved(views=False, own_weights=True)),
        Misconception("counted-twice", gives=_saved(twice=True, own_weights=True)),
        Misconception("counted-twice", gives=_saved(twice=True, views=False)),
        Misconception("counted-twice", gives=_saved(twice=True, views=False, own_weights=True)),
    ),
)


# --------------------------------------------------------------------------------------------------- memory.recompute
def _recompute_cases(rng: Random) -> list[Case]:
    def some(layers: int, every: int) -> Case:
        inputs = 2 * rng.randrange(1000, 10**6)
        block = inputs * rng.randrange(5, 40) + rng.randrange(10**6)
        tags = "short-segment" if layers % every else ""
        return case(f"{layers} blocks in segments of {every}", layers, every, inputs, block, tags=tags)

    whole = rng.randrange(3, 9)
    return [
        case("32 blocks in segments of 1", 32, 1, 67_108_864, 1_140_850_688),
        case("32 blocks in segments of 4", 32, 4, 67_108_864, 1_140_850_688),
        some(whole * 6, whole),
        some(12, 12),
        some(32, 5),
        some(rng.randrange(4, 9) * 7 + rng.randrange(1, 7), 7),
        some(10, 9),
        some(6, 20),
        some(1, 1),
        case(
            "13 blocks in segments of 4, which keep their input and nothing else", 13, 4, 999, 999, tags="short-segment"
        ),
    ]


def _segments(layers: int, every: int) -> list[int]:
    return [min(every, layers - first) for first in range(0, layers, every)]


@ideas.options
def _peak(
    inputs_of: Callable[[int], int] = lambda earlier: earlier, blocks_of: Callable[[int], int] = lambda blocks: blocks
) -> Callable[..., int]:
    """The largest over segments of (inputs that count x input_bytes + blocks that count x block_bytes)."""

    def count(layers: int, every: int, input_bytes: int, block_bytes: int) -> int:
        return max(
            inputs_of(earlier) * input_bytes + blocks_of(blocks) * block_bytes
            for earlier, blocks in enumerate(_segments(layers, every))
        )

    return count


def _last_two(layers: int, every: int, input_bytes: int, block_bytes: int) -> int:
    """The last segment and the full one before it, also where there is none before it."""
    earlier = len(_segments(layers, every)) - 2
    return max(earlier * input_bytes + every * block_bytes, _last_segment(layers, every, input_bytes, block_bytes))


def _last_segment(layers: int, every: int, input_bytes: int, block_bytes: int) -> int:
    segments = _segments(layers, every)
    return (len(segments) - 1) * input_bytes + segments[-1] * block_bytes


RECOMPUTE = FunctionExercise(
    id="memory.recompute",
    function="recompute_peak",
    cases=_recompute_cases,
    expected=_peak(),
    unit="bytes",
    misconceptions=(
        Misconception("none-before", gives=_last_two),
        Misconception("nothing-freed", gives=lambda layers, every, inputs, block: layers * block),
        Misconception(
            "nothing-freed/2",
            gives=lambda layers, every, inputs, block: math.ceil(layers / every) * inputs + layers * block,
        ),
        Misconception("own-input-twice", gives=_peak(lambda earlier: earlier + 1)),
        Misconception(
            "own-input-twice",
            gives=lambda layers, every, inputs, block: math.ceil(layers / every) * inputs + min(every, layers) * block,
        ),
        Misconception(
            "own-input-twice",
            gives=lambda layers, every, inputs, block: math.ceil(layers / every) * inputs + every * block,
        ),
        Misconception(
            "own-input-twice", gives=lambda layers, every, inputs, block: layers // every * inputs + every * block
        ),
        Misconception(
            "own-input-twice/2",
            gives=lambda layers, every, inputs, block: _peak()(layers, every, inputs, block + inputs),
        ),
        Misconception(
            "own-input-missing",
            gives=lambda layers, every, inputs, block: _peak()(layers, every, inputs, block - inputs),
        ),
        Misconception("one-input", gives=lambda layers, every, inputs, block: inputs + min(every, layers) * block),
        Misconception("one-input", gives=lambda layers, every, inputs, block: inputs + every * block),
        Misconception("inputs-forgotten", gives=_peak(lambda earlier: 0)),
        Misconception(
            "own-input-missing/2",
            gives=lambda layers, every, inputs, block: _peak()(layers, every, inputs, block) - inputs,
        ),
        Misconception(
            "segments-added",
            gives=lambda layers, every, inputs, block: sum(
                earlier * inputs + blocks * block for earlier, blocks in enumerate(_segments(layers, every))
            ),
        ),
        Misconception(
            "every-input-kept/2",
            gives=lambda layers, every, inputs, block: max(
                first * inputs + min(every, layers - first) * block for first in range(0, layers, every)
            ),
        ),
        Misconception(
            "kept-whole",
            gives=lambda layers, every, inputs, block: _peak()(layers, every, block, block),
        ),
        Misconception("one-block-off", gives=_peak(blocks_of=lambda blocks: blocks + 1)),
        Misconception("one-block-off/2", gives=_peak(blocks_of=lambda blocks: blocks - 1)),
        Misconception("last-segment-only", gives=_last_segment),
        Misconception(
            "last-segment-full",
            gives=lambda layers, every, inputs, block: (
                (math.ceil(layers / every) - 1) * inputs + min(every, layers) * block
            ),
        ),
        Misconception(
            "last-segment-full/2",
            gives=lambda layers, every, inputs, block: (math.ceil(layers / every) - 1) * inputs + every * block,
        ),
        Misconception(
            "no-segment",
            gives=lambda layers, every, inputs, block: _peak()(layers, every, inputs, block) if layers >= every else 0,
        ),
        Misconception("one-block-at-a-time", gives=_peak(blocks_of=lambda blocks: 1)),
        Misconception(
            "every-input-kept",
            gives=lambda layers, every, inputs, block: (layers - 1) * inputs + min(every, layers) * block,
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------- memory.serve
def _serve_cases(rng: Random) -> list[Case]:
    def some(gpu: int, billions: float, layers: int, heads: int, kv: int, size: int, tokens: int, page: int) -> Case:
        tags = ("gqa " if kv < heads else "") + ("open-page" if tokens % page else "")
        name = f"{gpu / 10**9:.0f} GB, {billions:g} B parameters, {heads} heads and {kv} for k and v, "
        name += f"{tokens:,} tokens in pages of {page}"
        return case(name, gpu, int(billions * 10**9), layers, heads, kv, size, tokens, page, tags=tags)

    small = 3, 6, 2, 5, rng.randrange(33, 48), 16  # layers, heads, kv_heads, head_size, tokens, page
    weights, sequence = rng.randrange(10**6, 10**7), 48 * 2 * 2 * 3 * 2 * 5
    return [
        case("Llama 3 8B, 80 GB, 8,192 tokens", 80 * 10**9, 8_030_261_248, 32, 32, 8, 128, 8192, 16, tags="gqa"),
        case("Llama 2 7B, 80 GB, 4,096 tokens", 80 * 10**9, 6_738_415_616, 32, 32, 32, 128, 4096, 16),
        some(141 * 10**9, 8, 32, 32, 8, 128, 16 * rng.randrange(60, 90), 16),
        some(24 * 10**9, rng.choice((1.5, 3)), 28, 12, 2, 128, rng.randrange(33, 48), 32),
        some(80 * 10**9, 7, 32, 32, 32, 128, 1 + 64 * rng.randrange(3, 9), 64),
        some(180 * 10**9, 14, 40, 40, 8, 128, rng.randrange(1000, 1020), 256),
        case("70 B parameters do not fit on 80 GB", 80 * 10**9, 70 * 10**9, 80, 64, 8, 128, 4096, 16, tags="gqa"),
        *(
            case(f"room for {what}", 2 * weights + room, weights, *small, tags="gqa open-page")
            for what, room in (
                ("exactly seven sequences", 7 * sequence),
                ("seven sequences, less a byte", 7 * sequence - 1),
                ("one sequence, less a byte", sequence - 1),
                ("the weights and no more", 0),
                ("the weights, less a byte", -1),
            )
        ),
        case("sequences of one token, a page each", 10**9, 10**8, 3, 5, 1, 7, 1, 16, tags="gqa open-page"),
        case("pages of one token", 10**9, 10**8, 3, 5, 5, 7, 12_347, 1),
        case("one token, one layer, one head of size 1, a page each", 2 * 10**5 + 1003, 10**5, 1, 1, 1, 1, 1, 1),
    ]


@ideas.options
def _serve(
    *,
    kinds: int = 2,
    itemsize: int = 2,
    of_weights: int = 2,
    query_heads: bool = False,
    one_layer: bool = False,
    head_size_counts: bool = True,
    pages: str = "up",
    rounded: Callable[[Fraction], int] = math.floor,
    least: bool = True,
) -> Callable[..., int]:
    """Sequences that fit; the options are ways to be wrong."""

    def count(
        gpu_bytes: int, parameters: int, layers: int, heads: int, kv_heads: int, head_size: int, tokens: int, page: int
    ) -> int:
        a_token = kinds * itemsize * (1 if one_layer else layers) * (heads if query_heads else kv_heads)
        a_token *= head_size if head_size_counts else 1
        room = {
            "up": math.ceil(tokens / page) * page,
            "down": tokens // page * page,
            "nearest": round(tokens / page) * page,
            "exact": tokens,
            "plus": (tokens // page + 1) * page,
            "count": math.ceil(tokens / page),
        }
        fits = rounded(Fraction(gpu_bytes - of_weights * parameters, room[pages] * a_token))
        return max(0, fits) if least else fits

    return count


def _weights_for_each(
    gpu_bytes: int, parameters: int, layers: int, heads: int, kv_heads: int, head_size: int, tokens: int, page: int
) -> int:
    return gpu_bytes // (2 * parameters + 4 * layers * kv_heads * head_size * math.ceil(tokens / page) * page)


SERVE = FunctionExercise(
    id="memory.serve",
    function="sequences",
    cases=_serve_cases,
    expected=_serve(),
    unit="sequences",
    misconceptions=(
        Misconception("fraction", when=lambda evidence: evidence.outputs != round(evidence.outputs)),
        Misconception("rounded-up", gives=_serve(rounded=math.ceil)),
        Misconception("rounded-up", gives=_serve(rounded=round)),
        Misconception("keys-only", gives=_serve(kinds=1)),
        Misconception("query-heads", gives=_serve(query_heads=True)),
        Misconception("one-layer", gives=_serve(one_layer=True)),
        Misconception("no-weights", gives=_serve(of_weights=0)),
        Misconception("weights-in-elements", gives=_serve(of_weights=1)),
        Misconception("weights-in-fp32", gives=_serve(of_weights=4)),
        Misconception("head-size-forgotten", gives=_serve(head_size_counts=False)),
        Misconception("pages-rounded-down", gives=_serve(pages="nearest")),
        Misconception("cache-in-elements", gives=_serve(itemsize=1)),
        Misconception("fp32", gives=_serve(itemsize=4)),
        Misconception("no-pages", gives=_serve(pages="exact")),
        Misconception("pages-rounded-down", gives=_serve(pages="down")),
        Misconception("one-page-too-many", gives=_serve(pages="plus")),
        Misconception("pages-as-tokens", gives=_serve(pages="count")),
        Misconception(
            "group-size",
            gives=lambda gpu, n, layers, heads, kv, *rest: _serve()(gpu, n, layers, heads, heads // kv, *rest),
        ),
        Misconception(
            "query-heads/2",
            gives=lambda gpu, n, layers, heads, kv, *rest: _serve()(gpu, n, layers, heads, heads + kv, *rest),
        ),
        Misconception("tokens-not-sequences", gives=lambda *args: _serve()(*args[:-2], 1, 1)),
        Misconception("tokens-not-sequences/2", gives=lambda *args: _serve()(*args[:-2], args[-1], args[-1])),
        Misconception("page-for-each-token", gives=lambda *args: _serve()(*args[:-2], args[-2] * args[-1], 1)),
        Misconception("weights-for-each", gives=_weights_for_each),
        Misconception("negative/2", gives=lambda *args: abs(_serve(least=False)(*args))),
        Misconception("negative", gives=_serve(least=False)),
        Misconception("negative", gives=_serve(least=False, rounded=math.trunc)),
        Misconception("at-least-one", gives=lambda *args: max(1, _serve()(*args))),
        # No case tells these two mistakes from one of them alone, so the first is told first.
        Misconception("no-pages", gives=_serve(pages="exact", least=False)),
        Misconception("pages-rounded-down", gives=_serve(pages="down", least=False)),
        Misconception("one-page-too-many", gives=_serve(pages="plus", least=False)),
        Misconception("pages-as-tokens", gives=_serve(pages="count", least=False)),
    ),
)


# -------------------------------------------------------------------------------------------------- memory.accumulate
def _accumulate_cases(rng: Random) -> list[Case]:
    import torch

    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def some(rows: int, micro_batch: int, layers: int = 3, width: int = 16) -> Case:
        def draw(*shape: int):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        weights = [draw(width, width) / math.sqrt(width) for _ in range(layers)]
        tags = "micro-batches" if rows > micro_batch else ""
        tags += " short-micro-batch" if rows > micro_batch and rows % micro_batch else ""
        name = f"{rows} rows, {micro_batch} at a time"
        return case(name, draw(rows, width), draw(rows, width), weights, micro_batch, tags=tags)

    return [
        some(48, 48),
        some(512, 32),
        some(512, 128),
        some(192, 48, 12, 4),  # so deep that what else a step needs hides no second graph
        some(300, 64),
        some(16 * rng.randrange(11, 16) + 3, 16),
        some(40, 64),
        some(9, 1, 1, 3),
        some(1, 1, 2, 5),
    ]


def _micro_batches(x, target, weights: list, micro_batch: int) -> list[list]:
    """The gradients of each micro-batch's part of the mean squared error."""
    import torch

    found = []
    for first in range(0, len(x), micro_batch):
        leaves = [weight.clone().requires_grad_() for weight in weights]
        y = x[first : first + micro_batch]
        for weight in leaves:
            y = torch.nn.functional.gelu(y @ weight)
        loss = (y - target[first : first + micro_batch]).square().sum() / x.numel()
        found.append(list(torch.autograd.grad(loss, leaves)))
    return found


def _norms_of(combine: Callable[[list[list], int, int], list]) -> Callable[..., list[float]]:
    def count(x, target, weights: list, micro_batch: int) -> list[float]:
        parts = _micro_batches(x, target, weights, micro_batch)
        return [gradient.norm().item() for gradient in combine(parts, len(x), micro_batch)]

    return count


def _weighted(weight_of: Callable[[int, int, int, int], float]) -> Callable[..., list[float]]:
    """Norms of the sum of the parts, each taken weight_of(index, count, rows in it, all rows) times."""

    def combine(parts: list[list], rows: int, micro_batch: int) -> list:
        sizes = [min(micro_batch, rows - first) for first in range(0, rows, micro_batch)]
        factors = [weight_of(i, len(parts), size, rows) for i, size in enumerate(sizes)]
        return [
            sum(factor * gradient for factor, gradient in zip(factors, gradients, strict=True))
            for gradients in zip(*parts, strict=True)
        ]

    return _norms_of(combine)


def _norms_added(x, target, weights: list, micro_batch: int) -> list[float]:
    parts = _micro_batches(x, target, weights, micro_batch)
    return [sum(gradient.norm().item() for gradient in gradients) for gradients in zip(*parts, strict=True)]


def _memory_rule(case: Case, peak_bytes: int) -> tuple[str, str] | None:
    x, _, weights, micro_batch = case.args
    rows, width = x.shape
    # A layer keeps its input and what gelu was applied to; the error and the backward pass need a few more.
    a_row = (2 * len(weights) + 5) * width * x.element_size()
    parameters = 4 * sum(weight.nbytes for weight in weights)  # copies, gradients, what is being added to them
    allowed = 1.3 * (min(rows, micro_batch) * a_row + parameters)
    if peak_bytes <= allowed:
        return None
    batches = math.ceil(rows / micro_batch)
    held = f"it held {peak_bytes / 1024:,.0f} KiB of tensors at once, and one micro-batch needs {allowed / 1.3 / 1024:,.0f} KiB"
    if peak_bytes > 0.75 * rows * (2 * len(weights)) * width * x.element_size():
        return (
            "all-at-once",
            f"{held}: as much as all {batches} micro-batches together. What keeps the activations of the first one alive "
            "while the second is worked on, and what would let them go?",
        )
    if batches >= 4 and peak_bytes <= 2 * micro_batch * a_row + parameters:
        return (
            "two-at-once",
            f"{held}: as much as two. What keeps the activations of one micro-batch alive until those of the next are there?",
        )
    return (
        "something-kept",
        f"{held}. Something of every earlier micro-batch is still there: which of your names refers to a tensor, or to a "
        "list of them, that grows from one to the next?",
    )


ACCUMULATE = FunctionExercise(
    id="memory.accumulate",
    function="gradient_norms",
    cases=_accumulate_cases,
    expected=_weighted(lambda i, count, size, rows: 1.0),
    returns=("norm of the gradient of weights[{}]",),
    tolerance=1e-9,
    memory_rule=_memory_rule,
    misconceptions=(
        Misconception("last-one-only", gives=_weighted(lambda i, count, size, rows: float(i == count - 1))),
        Misconception("earlier-ones-again", gives=_weighted(lambda i, count, size, rows: float(count - i))),
        Misconception("norms-added", gives=_norms_added),
        Misconception("not-divided", gives=lambda x, *rest: _weighted(lambda *_: float(x.numel()))(x, *rest)),
        Misconception("not-divided", gives=lambda x, *rest: _weighted(lambda *_: float(x.shape[1]))(x, *rest)),
        Misconception("sum-of-means", gives=_weighted(lambda i, count, size, rows: rows / size)),
        Misconception(
            "sum-of-means",
            gives=lambda x, target, weights, micro_batch: _weighted(lambda i, count, size, rows: rows / micro_batch)(
                x, target, weights, micro_batch
            ),
        ),
        Misconception("mean-of-means", gives=_weighted(lambda i, count, size, rows: rows / size / count)),
        Misconception(
            "mean-of-means/2",
            gives=lambda x, target, weights, micro_batch: _weighted(
                lambda i, count, size, rows: rows / (micro_batch * math.ceil(rows / micro_batch))
            )(x, target, weights, micro_batch),
        ),
        Misconception(
            "last-rows-lost",
            gives=lambda x, target, weights, micro_batch: _weighted(
                lambda i, count, size, rows: float(size == min(micro_batch, rows))
            )(x, target, weights, micro_batch),
        ),
    ),
)

EXERCISES = [GPT2, LLAMA, STATE, SAVED, RECOMPUTE, SERVE, ACCUMULATE]
