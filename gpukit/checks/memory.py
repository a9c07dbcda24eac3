"""The exercises of notebook 02: cases, hints, and the wrong answers that each check must recognise."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from gpukit.accounting import memory, models
from gpukit.grading.exercise import Case, FunctionExercise, Label, Misconception, Variant

NOTEBOOK = "02_memory"


def case(name: str, *args, tags: str = "") -> Case:
    return Case(name, args, frozenset(tags.split()))


# -------------------------------------------------------------------------------------------------------- memory.gpt2
def _gpt2_cases(rng: Random) -> list[Case]:
    def some(tied: bool) -> Case:
        vocab, positions = rng.randrange(200, 60_000), rng.choice((64, 100, 512, 2048))
        h, layers = 8 * rng.randrange(2, 200), rng.randrange(2, 40)
        head = "tied" if tied else "untied"
        return case(f"vocab {vocab:,}, {positions:,} positions, h = {h}, {layers} layers, {head} head", vocab, positions,
                    h, layers, tied, tags=head)  # fmt: skip

    return [
        case("GPT-2 small", 50257, 1024, 768, 12, True, tags="tied"),
        case("GPT-2 XL", 50257, 1024, 1600, 48, True, tags="tied"),
        some(True),
        case("GPT-2 small with an untied head", 50257, 1024, 768, 12, False, tags="untied"),
        some(False),
        case("one layer of width 1", 10, 3, 1, 1, False, tags="untied"),
    ]


def _gpt2(vocab: int, positions: int, h: int, layers: int, tied: bool) -> int:
    config = models.Config("GPT-2", vocab, h, layers, heads=1, positions=positions, tied_embeddings=tied, biases="all")
    return models.parameters(config).total


def _gpt2_but(error: Callable[[int, int, int, int, bool], int]) -> Callable[..., int]:
    return lambda *args: _gpt2(*args) + error(*args)


_NO_POSITIONS = (
    "yours is short in every case, for GPT-2 small by 786,432, which is 1,024 x 768. The formula in circulation lacks that "
    "too, and the 124.44 M that it is quoted with have it. What in the docstring is so large?"
)

GPT2 = FunctionExercise(
    id="memory.gpt2",
    title="The formula that is 786,432 short",
    notebook=NOTEBOOK,
    function="gpt2",
    label=Label(1, 5, "what a model holds besides its matrices"),
    hints=(
        "Compare what you return for GPT-2 small with what was counted on the model above. Which product of the five "
        "arguments is the difference?",
        "Two tables of vectors stand at the bottom of the model, and what stands at its top is a matrix of its own or the "
        "first table once more: memory that is shared is counted once.",
        "Add the positions to the vocabulary before multiplying by the width. And when the head is not tied, add one more "
        "matrix of vocabulary by width.",
    ),
    cases=_gpt2_cases,
    expected=_gpt2,
    unit="parameters",
    misconceptions=(
        Misconception(
            "no-positions",
            _NO_POSITIONS,
            gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -positions * h - (not tied) * vocab * h),
        ),
        Misconception(
            "no-positions",
            _NO_POSITIONS,
            gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -positions * h),
        ),
        Misconception(
            "head-shared-always",
            "an untied head is missing. It has as many numbers as the table of tokens, and they are others. When is it the "
            "same memory, and when not?",
            gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -(not tied) * vocab * h),
        ),
        Misconception(
            "tied-counted-twice",
            "a tied head is counted beside the table whose memory it is. How many numbers does an optimizer move there?",
            gives=_gpt2_but(lambda vocab, positions, h, layers, tied: tied * vocab * h),
        ),
        Misconception(
            "positions-in-every-layer",
            "positions are added once, below the first block; yours has a table of them in every layer. That is how many too "
            "many?",
            gives=_gpt2_but(lambda vocab, positions, h, layers, tied: (layers - 1) * positions * h),
        ),
        Misconception(
            "no-biases",
            "the biases of the matrices are missing, 9 h a block. How wide is what each of the four (q, k and v count as one) "
            "adds its bias to?",
            gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -9 * h * layers),
        ),
        Misconception(
            "norms-without-bias",
            "a LayerNorm has a gain and a bias of width h. Yours has one of them. How many LayerNorms are there in all?",
            gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -(2 * layers + 1) * h),
        ),
        Misconception(
            "no-last-norm",
            "yours is short by 2 h, however many layers there are. What stands between the last block and the head?",
            gives=_gpt2_but(lambda vocab, positions, h, layers, tied: -2 * h),
        ),
        Misconception(
            "mask-is-no-parameter",
            "yours counts a causal mask of positions x positions in every layer. Does the optimizer change it?",
            gives=_gpt2_but(lambda vocab, positions, h, layers, tied: layers * positions**2),
        ),
    ),
    wrong=(
        Variant(
            "the formula as handed out",
            (
                ("tables = (vocab + positions) * h", "tables = vocab * h"),
                ("head = 0 if tied else vocab * h", "head = 0"),
            ),
            diagnosis="no-positions",
        ),
        Variant("positions forgotten", (("(vocab + positions) * h", "vocab * h"),), diagnosis="no-positions"),
        Variant(
            "head always shared", (("head = 0 if tied else vocab * h", "head = 0"),), diagnosis="head-shared-always"
        ),
        Variant(
            "head always counted",
            (("head = 0 if tied else vocab * h", "head = vocab * h"),),
            diagnosis="tied-counted-twice",
        ),
        Variant(
            "positions in every layer",
            (
                ("tables = (vocab + positions) * h", "tables = vocab * h"),
                ("block = 12 * h**2 + 13 * h", "block = 12 * h**2 + 13 * h + positions * h"),
            ),
            diagnosis="positions-in-every-layer",
        ),
        Variant("no biases", (("12 * h**2 + 13 * h\n    head", "12 * h**2 + 4 * h\n    head"),), diagnosis="no-biases"),
        Variant(
            "norms without biases",
            (
                ("12 * h**2 + 13 * h\n    head", "12 * h**2 + 11 * h\n    head"),
                ("block + 2 * h + head", "block + h + head"),
            ),
            diagnosis="norms-without-bias",
        ),
        Variant("no last norm", (("block + 2 * h + head", "block + head"),), diagnosis="no-last-norm"),
        Variant(
            "mask counted",
            (("block = 12 * h**2 + 13 * h", "block = 12 * h**2 + 13 * h + positions**2"),),
            diagnosis="mask-is-no-parameter",
        ),
        Variant("MLP forgotten", (("block = 12 * h**2 + 13 * h", "block = 4 * h**2 + 8 * h"),), diagnosis="values"),
    ),
    right=(
        Variant(
            "a list of shapes",
            source="""import math


def gpt2(vocab, positions, h, layers, tied):
    norm = [(h,), (h,)]
    block = norm + [(h, 3 * h), (3 * h,), (h, h), (h,)] + norm + [(h, 4 * h), (4 * h,), (4 * h, h), (h,)]
    shapes = [(vocab, h), (positions, h)] + layers * block + norm
    if not tied:
        shapes.append((h, vocab))
    return sum(math.prod(shape) for shape in shapes)
""",
        ),
        Variant(
            "torch counts",
            source="""import torch


def gpt2(vocab, positions, h, layers, tied):
    with torch.device("meta"):
        block = torch.nn.TransformerEncoderLayer(h, 1, dim_feedforward=4 * h)
    total = h * (vocab * (2 - tied) + positions + 2)
    return total + layers * sum(p.numel() for p in block.parameters())
""",
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
    ]


def _llama(vocab: int, h: int, layers: int, heads: int, kv_heads: int, head_size: int, ffn: int, tied: bool) -> int:
    config = models.Config(
        "Llama", vocab, h, layers, heads, kv_heads, head_size, ffn, glu=True, tied_embeddings=tied, norm="rmsnorm"
    )
    return models.parameters(config).total


def _llama_but(error: Callable[..., int]) -> Callable[..., int]:
    return lambda *args: _llama(*args) + error(*args)


LLAMA = FunctionExercise(
    id="memory.llama",
    title="Parameters of a Llama",
    notebook=NOTEBOOK,
    function="llama",
    label=Label(2, 15, "grouped-query attention, gated MLPs, what has no parameters"),
    hints=(
        "Write down every matrix of a block with its two sides. Which of them know nothing of `heads`, and which nothing of "
        "`kv_heads`?",
        "Queries go from h to all heads and the output from all heads to h; keys and values go from h to their own, fewer "
        "heads. A gated MLP goes up twice, side by side, and down once. An RMSNorm has a gain and nothing else.",
        "A block: twice h times heads times head_size, twice h times kv_heads times head_size, three times h times ffn, and "
        "two gains. Then the table, once or twice, and the gain of the last norm.",
    ),
    cases=_llama_cases,
    expected=_llama,
    unit="parameters",
    misconceptions=(
        Misconception(
            "kv-like-queries",
            "keys and values have as many heads as queries in yours. What do `kv_heads` heads of them need? In Llama 3 8B four "
            "heads of queries look at the same keys.",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: n * 2 * h * d * (heads - kv)),
        ),
        Misconception(
            "two-matrices",
            "the MLP has two matrices in yours. SwiGLU multiplies two projections of x with each other before it goes down "
            "again: how many matrices is that?",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -n * h * f),
        ),
        Misconception(
            "inner-width",
            "the MLP is 4 h wide inside in yours. `ffn` says how wide it is: with a third matrix it is often chosen narrower, so "
            "that the parameters stay the same.",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: n * 3 * h * (4 * h - f)),
        ),
        Misconception(
            "head-size-from-h",
            "yours is right only where heads x head_size is h. Mistral Nemo has h = 5,120 and 32 heads of 128. Which sides of the "
            "attention's matrices are h, and which are heads x head_size?",
            gives=_llama_but(
                lambda v, h, n, heads, kv, d, f, tied: (
                    n * (2 * h * h + 2 * h * (h * kv // heads) - 2 * h * d * (heads + kv))
                )
            ),
        ),
        Misconception(
            "head-size-from-h",
            "yours is right only where heads x head_size is h. Mistral Nemo has h = 5,120 and 32 heads of 128. Which sides of the "
            "attention's matrices are h, and which are heads x head_size?",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: n * (2 * h * h - 2 * h * d * heads)),
        ),
        Misconception(
            "no-output-projection",
            "a matrix of heads x head_size by h is missing in every block. What mixes the heads' results?",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -n * h * heads * d),
        ),
        Misconception(
            "only-keys",
            "each block is short by h x kv_heads x head_size. Keys and values share their heads' number, not their matrix.",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -n * h * kv * d),
        ),
        Misconception(
            "tied-counted-twice",
            "a tied head is counted beside the table whose memory it is. How many numbers does an optimizer move there?",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: tied * v * h),
        ),
        Misconception(
            "head-shared-always",
            "an untied head is missing. It has as many numbers as the table of tokens, and they are others.",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -(not tied) * v * h),
        ),
        Misconception(
            "norms-with-bias",
            "the norms have two vectors in yours. RMSNorm subtracts no mean and adds no bias: what is left of a LayerNorm?",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: (2 * n + 1) * h),
        ),
        Misconception(
            "no-last-norm",
            "yours is short by h, however many layers there are. What stands between the last block and the head?",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -h),
        ),
        Misconception(
            "no-norms",
            "the norms are missing: vectors of width h. How many are there in a block, and is there one more?",
            gives=_llama_but(lambda v, h, n, heads, kv, d, f, tied: -(2 * n + 1) * h),
        ),
    ),
    wrong=(
        Variant(
            "keys and values for all heads",
            (("2 * h * kv_heads * head_size\n    mlp", "2 * h * heads * head_size\n    mlp"),),
            diagnosis="kv-like-queries",
        ),
        Variant("two matrices in the MLP", (("mlp = 3 * h * ffn", "mlp = 2 * h * ffn"),), diagnosis="two-matrices"),
        Variant("ffn ignored", (("mlp = 3 * h * ffn", "mlp = 3 * h * 4 * h"),), diagnosis="inner-width"),
        Variant(
            "head size from h",
            (
                ("2 * h * heads * head_size", "2 * h * h"),
                ("2 * h * kv_heads * head_size", "2 * h * (h * kv_heads // heads)"),
            ),
            diagnosis="head-size-from-h",
        ),
        Variant("q and o h x h", (("2 * h * heads * head_size", "2 * h * h"),), diagnosis="head-size-from-h"),
        Variant(
            "no output projection",
            (("2 * h * heads * head_size", "h * heads * head_size"),),
            diagnosis="no-output-projection",
        ),
        Variant("keys only", (("2 * h * kv_heads * head_size", "h * kv_heads * head_size"),), diagnosis="only-keys"),
        Variant(
            "head always counted",
            (("tables = vocab * h if tied else 2 * vocab * h", "tables = 2 * vocab * h"),),
            diagnosis="tied-counted-twice",
        ),
        Variant(
            "head never counted",
            (("tables = vocab * h if tied else 2 * vocab * h", "tables = vocab * h"),),
            diagnosis="head-shared-always",
        ),
        Variant(
            "LayerNorms",
            (("+ mlp + 2 * h\n", "+ mlp + 4 * h\n"), ("layers * block + h\n", "layers * block + 2 * h\n")),
            diagnosis="norms-with-bias",
        ),
        Variant("last norm forgotten", (("layers * block + h\n", "layers * block\n"),), diagnosis="no-last-norm"),
        Variant(
            "no norms",
            (("+ mlp + 2 * h\n", "+ mlp\n"), ("layers * block + h\n", "layers * block\n")),
            diagnosis="no-norms",
        ),
    ),
    right=(
        Variant(
            "a list of shapes",
            source="""from math import prod


def llama(vocab, h, layers, heads, kv_heads, head_size, ffn, tied):
    q, kv = heads * head_size, kv_heads * head_size
    block = [(h,), (h, q), (h, kv), (h, kv), (q, h), (h,), (h, ffn), (h, ffn), (ffn, h)]
    shapes = [(vocab, h)] * (1 if tied else 2) + [(h,)]
    return sum(map(prod, shapes)) + layers * sum(map(prod, block))
""",
        ),
        Variant(
            "h outside the bracket",
            source="""def llama(vocab, h, layers, heads, kv_heads, head_size, ffn, tied):
    per_layer = 2 * head_size * (heads + kv_heads) + 3 * ffn + 2
    return h * (vocab + (not tied) * vocab + layers * per_layer + 1)
""",
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------- memory.state
_RECIPES = {"fp32": "fp32-adamw", "mixed": "bf16-adamw", "bf16": "bf16-pure"}  # as gpukit.accounting.memory calls them


def _state_cases(rng: Random) -> list[Case]:
    def some(recipe: str, gpus: int, stage: int, frozen: bool) -> Case:
        unit = 64 * rng.randrange(1000, 100_000)
        base = 64 * rng.randrange(200_000, 2_000_000) if frozen else 0
        lora = ", and frozen ones" if frozen else ""
        tags = f"{recipe} {'frozen' if frozen else ''} {('', 'zero-1-or-2', 'zero-1-or-2', 'zero-3')[stage]}"
        return case(f"{recipe}, ZeRO {stage} on {gpus} GPUs{lora}", unit, base, recipe, gpus, stage, tags=tags)

    return [
        case("7 B parameters, fp32, ZeRO 0", 7 * 10**9, 0, "fp32", 1, 0, tags="fp32"),
        case("7 B parameters, mixed, ZeRO 0", 7 * 10**9, 0, "mixed", 1, 0, tags="mixed"),
        some("bf16", 1, 0, False),
        some("mixed", rng.choice((2, 8)), 0, True),
        some("fp32", rng.choice((4, 8)), 1, False),
        some("mixed", rng.choice((4, 8, 64)), 1, False),
        some("mixed", rng.choice((4, 8)), 2, False),
        some("bf16", rng.choice((16, 32)), 2, True),
        some("mixed", rng.choice((8, 64)), 3, False),
        some("mixed", rng.choice((4, 16)), 3, True),
        some("fp32", 8, 3, True),
    ]


def _state(
    sizes: dict[str, tuple[int, int, int]] | None = None,
    *,
    weights_from: int = 3,
    gradients_from: int = 2,
    states_from: int = 1,
    frozen_moves: bool = False,
    frozen_gradients: bool = False,
    frozen_cut: bool = True,
    master: int = 0,
) -> Callable[..., int]:
    """Bytes of state by recipe: (a weight, its gradient, its optimizer state); the options are ways to be wrong."""
    states = {name: memory.model_states(1, recipe) for name, recipe in _RECIPES.items()}
    right = {name: (s.weights_bytes, s.gradients_bytes, s.optimizer_bytes) for name, s in states.items()}
    sizes = right | (sizes or {})

    def count(trained: int, frozen: int, recipe: str, gpus: int, stage: int) -> int:
        weight, gradient, optimizer = sizes[recipe]

        def cut(size: int, begins: int) -> int:
            return size // gpus if stage >= begins else size

        moved = trained + frozen if frozen_moves else trained
        weights = cut(weight * trained, weights_from)
        weights += cut(weight * frozen, weights_from if frozen_cut else 4)
        # `master`: bytes of the optimizer's state in "mixed" that are taken for weights
        weights += cut(master * moved, weights_from) if recipe == "mixed" else 0
        optimizer -= master if recipe == "mixed" else 0
        gradients = cut(gradient * (moved + frozen_gradients * frozen), gradients_from)
        return weights + gradients + cut(optimizer * moved, states_from)

    return count


STATE = FunctionExercise(
    id="memory.state",
    title="What training keeps, and who keeps it",
    notebook=NOTEBOOK,
    function="state_bytes",
    label=Label(2, 15, "bytes a parameter by recipe, ZeRO stages, frozen weights"),
    hints=(
        "Ask of each of these what it is for: weights, gradients, first moments, second moments, a copy of the weights. Who "
        "reads it, when, and does a weight that never moves need it?",
        "Add up three sums first: weights (of everything), gradients (of what is trained), optimizer state (of what is trained: "
        "two moments, and in the mixed recipe the fp32 copy). ZeRO cuts the one that is read most rarely first.",
        "The optimizer state is divided by the number of GPUs from stage 1 on, the gradients from stage 2 on, the weights, "
        "frozen ones too, in stage 3. Mixed is two, two and twelve bytes a parameter.",
    ),
    cases=_state_cases,
    expected=_state(),
    unit="bytes",
    misconceptions=(
        Misconception(
            "frozen-is-not-trained",
            "frozen parameters cost as much as trained ones in yours. Which of gradient, moments and copy does AdamW need for a "
            "weight that it never moves?",
            gives=_state(frozen_moves=True),
        ),
        Misconception(
            "frozen-is-not-trained",
            "yours keeps gradients for frozen parameters. Who would read them? The backward pass goes through a frozen matrix, but "
            "needs no gradient *of* it.",
            gives=_state(frozen_gradients=True),
        ),
        Misconception(
            "frozen-not-cut",
            "in stage 3 each GPU keeps all the frozen weights in yours. They are weights like others: fetched for their layer, then "
            "dropped.",
            gives=_state(frozen_cut=False),
        ),
        Misconception(
            "no-copy",
            "the mixed recipe lacks four bytes a parameter. A bf16 weight of 1.0 swallows an update of 0.001 (notebook 01): what "
            "does AdamW add it to instead?",
            gives=_state({"mixed": (2, 2, 8)}),
        ),
        Misconception(
            "one-moment",
            "the optimizer's state is half of what it should be. AdamW keeps a running mean of the gradient, and of what else?",
            gives=_state({"fp32": (4, 4, 4), "mixed": (2, 2, 8), "bf16": (2, 2, 2)}),
        ),
        Misconception(
            "gradients-in-fp32",
            "gradients take four bytes in the mixed recipe in yours. Some frameworks do accumulate them so; this recipe says bf16.",
            gives=_state({"mixed": (2, 4, 12)}),
        ),
        Misconception(
            "everything-in-16-bit",
            "AdamW's moments are in bf16 in the mixed recipe in yours. Eight bits of mantissa are too few for a mean over a "
            "thousand steps: the recipe keeps them, and a copy of the weights, in fp32.",
            gives=_state({"mixed": (2, 2, 6)}),
        ),
        Misconception(
            "everything-in-16-bit",
            "the mixed recipe takes as much as bf16 in yours. What is mixed in it? Which numbers may not lose their last bits?",
            gives=_state({"mixed": (2, 2, 4)}),
        ),
        Misconception(
            "copy-is-state",
            "the fp32 copy of the weights is cut with the weights in yours, in stage 3. Who reads it, and how often: the forward "
            "pass, or the optimizer?",
            gives=_state(master=4),
        ),
        Misconception(
            "stage-order",
            "yours cuts the weights first. They are needed twice a layer, by every GPU; which of the three is touched once a step, "
            "and by whom?",
            gives=_state(weights_from=1, gradients_from=2, states_from=3),
        ),
        Misconception(
            "one-stage-late",
            "each stage cuts in yours what the one before should have cut. What does stage 1 cut?",
            gives=_state(weights_from=4, gradients_from=3, states_from=2),
        ),
        Misconception(
            "everything-cut",
            "from stage 1 on everything is cut in yours. The stages add one kind after the other; what is left whole in stage 1?",
            gives=_state(weights_from=1, gradients_from=1),
        ),
        Misconception(
            "everything-cut",
            "data parallel without ZeRO is stage 0: every GPU keeps everything. What do the GPUs share then, memory or only work?",
            gives=_state(weights_from=0, gradients_from=0, states_from=0),
        ),
    ),
    wrong=(
        Variant(
            "frozen ones trained",
            (
                ("gradient * trained // (gpus", "gradient * (trained + frozen) // (gpus"),
                ("optimizer * trained // (gpus", "optimizer * (trained + frozen) // (gpus"),
            ),
            diagnosis="frozen-is-not-trained",
        ),
        Variant(
            "gradients for frozen ones",
            (("gradient * trained // (gpus", "gradient * (trained + frozen) // (gpus"),),
            diagnosis="frozen-is-not-trained",
        ),
        Variant(
            "frozen ones everywhere",
            (
                (
                    "weight * (trained + frozen) // (gpus if stage >= 3 else 1)",
                    "weight * trained // (gpus if stage >= 3 else 1) + weight * frozen",
                ),
            ),
            diagnosis="frozen-not-cut",
        ),
        Variant("no copy in fp32", (("(2, 2, 4 + 4 + 4)", "(2, 2, 4 + 4)"),), diagnosis="no-copy"),
        Variant(
            "one moment",
            (
                (
                    '"fp32": (4, 4, 4 + 4), "mixed": (2, 2, 4 + 4 + 4), "bf16": (2, 2, 2 + 2)',
                    '"fp32": (4, 4, 4), "mixed": (2, 2, 4 + 4), "bf16": (2, 2, 2)',
                ),
            ),
            diagnosis="one-moment",
        ),
        Variant("gradients in fp32", (("(2, 2, 4 + 4 + 4)", "(2, 4, 4 + 4 + 4)"),), diagnosis="gradients-in-fp32"),
        Variant("moments in bf16", (("(2, 2, 4 + 4 + 4)", "(2, 2, 2 + 2 + 2)"),), diagnosis="everything-in-16-bit"),
        Variant("mixed like bf16", (("(2, 2, 4 + 4 + 4)", "(2, 2, 2 + 2)"),), diagnosis="everything-in-16-bit"),
        Variant(
            "copy belongs to the weights",
            (
                ('"mixed": (2, 2, 4 + 4 + 4)', '"mixed": (2, 2, 4 + 4)'),
                (
                    "weights = weight * (trained + frozen)",
                    "weights = (weight * (trained + frozen) + 4 * trained * (recipe == 'mixed'))",
                ),
            ),
            diagnosis="copy-is-state",
        ),
        Variant(
            "weights first",
            (
                (
                    "weights = weight * (trained + frozen) // (gpus if stage >= 3 else 1)",
                    "weights = weight * (trained + frozen) // (gpus if stage >= 1 else 1)",
                ),
                (
                    "states = optimizer * trained // (gpus if stage >= 1 else 1)",
                    "states = optimizer * trained // (gpus if stage >= 3 else 1)",
                ),
            ),
            diagnosis="stage-order",
        ),
        Variant(
            "one stage late",
            (("stage >= 3", "stage > 3"), ("stage >= 2", "stage > 2"), ("stage >= 1", "stage > 1")),
            diagnosis="one-stage-late",
        ),
        Variant(
            "all from stage 1 on",
            (("stage >= 3", "stage"), ("stage >= 2", "stage"), ("stage >= 1", "stage")),
            diagnosis="everything-cut",
        ),
        Variant(
            "all always",
            (
                ("gpus if stage >= 3 else 1", "gpus"),
                ("gpus if stage >= 2 else 1", "gpus"),
                ("gpus if stage >= 1 else 1", "gpus"),
            ),
            diagnosis="everything-cut",
        ),
    ),
    right=(
        Variant(
            "one GPU's share of each kind",
            source="""def state_bytes(trained, frozen, recipe, gpus, stage):
    width = 4 if recipe == "fp32" else 2
    moment = 2 if recipe == "bf16" else 4
    share = [1, gpus]
    total = width * (trained + frozen) / share[stage == 3]
    total += width * trained / share[stage in (2, 3)]
    total += (2 * moment + 4 * (recipe == "mixed")) * trained / share[stage > 0]
    return int(total)
""",
        ),
        Variant(
            "bytes a parameter",
            source="""def state_bytes(trained, frozen, recipe, gpus, stage):
    if stage == 3:
        return state_bytes(trained // gpus, frozen // gpus, recipe, 1, 0)
    a_weight = {"fp32": 4, "mixed": 2, "bf16": 2}[recipe]
    a_step = {"fp32": 8, "mixed": 12, "bf16": 4}[recipe]
    mine = trained // gpus
    own_gradients = mine if stage == 2 else trained
    own_states = mine if stage else trained
    return a_weight * (trained + frozen + own_gradients) + a_step * own_states
""",
        ),
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
            ("matmul", ["x", "w1"], "gate"), ("silu", ["gate"], "g"), ("matmul", ["x", "w2"], "up"), ("mul", ["g", "up"], "u"),
            ("matmul", ["u", "w3"], "y"),
        ],
        {"x": outer, "w1": (h, f), "gate": inner, "g": inner, "w2": (h, f), "up": inner, "u": inner, "w3": (f, h), "y": outer},
    )  # fmt: skip
    split = (heads, T, h // heads)
    turned = (heads, h // heads, T)
    add(
        f"attention, {T} tokens",
        [
            ("matmul", ["x", "wq"], "q"), ("matmul", ["x", "wk"], "k"), ("matmul", ["x", "wv"], "v"),
            ("view", ["q"], "qh"), ("view", ["k"], "kh"), ("view", ["v"], "vh"), ("view", ["kh"], "kt"),
            ("matmul", ["qh", "kt"], "s"), ("scale", ["s"], "s2"), ("softmax", ["s2"], "p"), ("matmul", ["p", "vh"], "o"),
        ],
        {
            "x": outer, "wq": (h, h), "wk": (h, h), "wv": (h, h), "q": outer, "k": outer, "v": outer, "qh": split, "kh": split,
            "vh": split, "kt": turned, "s": score, "s2": score, "p": score, "o": split,
        },
    )  # fmt: skip
    add(
        "three adds and a constant",
        [("add", ["x", "x2"], "a"), ("scale", ["a"], "b"), ("add", ["b", "x"], "c"), ("add", ["c", "a"], "y")],
        {name: outer for name in ("x", "x2", "a", "b", "c", "y")},
    )
    add(
        "a square, and the same memory twice",
        [("exp", ["x"], "a"), ("view", ["a"], "a2"), ("mul", ["a2", "a2"], "b"), ("view", ["b"], "c"), ("mul", ["a", "c"], "y")],
        {"x": outer, "a": outer, "a2": (h, T), "b": (h, T), "c": outer, "y": outer},
    )  # fmt: skip
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
    for name, operations, shapes, weights in programs(rng):
        itemsize = rng.choice((2, 4))
        elements = {n: math.prod(shape) for n, shape in shapes.items()}
        has_view = any(kind == "view" for kind, _, _ in operations)
        cases.append(case(name, operations, elements, weights, itemsize, tags="view" if has_view else ""))
    return cases


def _saved(
    inputs_of: frozenset[str] = _NEEDS_INPUTS,
    output_of: frozenset[str] = _NEEDS_OUTPUT,
    *,
    twice: bool = False,
    views: bool = True,
    own_weights: bool = False,
    first_only: bool = False,
    with_itemsize: bool = True,
) -> Callable[..., int]:
    """Bytes kept, when the kinds in `inputs_of` keep their inputs and those in `output_of` their output."""

    def count(operations: list[Operation], elements: dict[str, int], weights: list[str], itemsize: int) -> int:
        base: dict[str, str] = {}
        kept: list[str] = []
        for kind, inputs, output in operations:
            if kind == "view" and views:
                base[output] = base.get(inputs[0], inputs[0])
            if kind in inputs_of:
                kept += inputs[:1] if first_only and kind == "mul" else inputs
            if kind in output_of:
                kept.append(output)
        names = [base.get(name, name) for name in kept]
        names = names if twice else list(dict.fromkeys(names))
        counted = sum(elements[name] for name in names if own_weights or name not in weights)
        return counted * (itemsize if with_itemsize else 1)

    return count


_ALL_KINDS = _NEEDS_INPUTS | _NEEDS_OUTPUT | {"add", "scale"}

SAVED = FunctionExercise(
    id="memory.saved",
    title="What autograd keeps",
    notebook=NOTEBOOK,
    function="saved_bytes",
    label=Label(3, 20, "which tensors a backward pass needs; shared memory"),
    hints=(
        "Write down the derivative of each kind. Which tensor of the forward pass appears in it? If y = exp(x), do you need x to "
        "say dy/dx?",
        "A product needs its other factor. exp, sigmoid, softmax and ReLU can say their derivative from the output alone; GELU and "
        "SiLU fall and rise again, so the output does not tell where on the curve it was. A sum needs nothing. Two operations that "
        "keep the same memory keep it once.",
        "Collect names in a set: both inputs for matmul and mul, the input for gelu and silu, the output for relu, exp, sigmoid and "
        "softmax. Replace each view by the tensor it looks at, through several views if need be; take the weights away; add up.",
    ),
    cases=_saved_cases,
    expected=_saved(),
    unit="bytes",
    misconceptions=(
        Misconception(
            "weights-counted",
            "yours counts weights: a matmul refers to its weight, but that memory is there anyway and was counted as parameters.",
            gives=_saved(own_weights=True),
        ),
        Misconception(
            "counted-twice",
            "yours counts a tensor as often as somebody keeps it. x goes into three matmuls of attention and lies in memory once.",
            gives=_saved(twice=True),
        ),
        Misconception(
            "view-is-memory",
            "yours counts views as memory of their own. How many bytes does x.view(…) or x.t() move or make?",
            gives=_saved(views=False),
        ),
        Misconception(
            "every-output",
            "yours keeps the output of every operation. Who reads the sum a + b again, when d(a + b) is passed on as it is?",
            gives=_saved(frozenset(), _ALL_KINDS),
        ),
        Misconception(
            "every-input",
            "yours keeps the inputs of every operation. Which of them can say their derivative without?",
            gives=_saved(_ALL_KINDS, frozenset()),
        ),
        Misconception(
            "add-keeps-nothing",
            "add and scale keep their inputs in yours. What is the derivative of a + b by a, and does it depend on b?",
            gives=_saved(_NEEDS_INPUTS | {"add", "scale"}),
        ),
        Misconception(
            "add-keeps-nothing",
            "add keeps its inputs in yours. What is the derivative of a + b by a, and does it depend on b?",
            gives=_saved(_NEEDS_INPUTS | {"add"}),
        ),
        Misconception(
            "output-would-do",
            "relu, exp, sigmoid and softmax keep their inputs in yours. Their outputs would do, and the next operation often keeps "
            "those anyway: one tensor instead of two.",
            gives=_saved(_NEEDS_INPUTS | _NEEDS_OUTPUT, frozenset()),
        ),
        Misconception(
            "output-would-do",
            "ReLU keeps its input in yours. Where is its derivative 1, told from the output? The matmul after it keeps that anyway.",
            gives=_saved(_NEEDS_INPUTS | {"relu"}, _NEEDS_OUTPUT - {"relu"}),
        ),
        Misconception(
            "output-does-not-tell",
            "GELU and SiLU keep their outputs in yours. Left of zero both fall and rise again: two inputs have the same output and "
            "different slopes.",
            gives=_saved(_NEEDS_INPUTS - {"gelu", "silu"}, _NEEDS_OUTPUT | {"gelu", "silu"}),
        ),
        Misconception(
            "output-does-not-tell",
            "SiLU keeps its output in yours. Left of zero it falls and rises again, as GELU does: two inputs, one output.",
            gives=_saved(_NEEDS_INPUTS - {"silu"}, _NEEDS_OUTPUT | {"silu"}),
        ),
        Misconception(
            "output-does-not-tell",
            "GELU keeps its output in yours. Left of zero it falls and rises again, as SiLU does: two inputs, one output.",
            gives=_saved(_NEEDS_INPUTS - {"gelu"}, _NEEDS_OUTPUT | {"gelu"}),
        ),
        Misconception(
            "mul-keeps-both",
            "mul keeps one of its inputs in yours. The derivative by a is b, and by b?",
            gives=_saved(first_only=True),
        ),
        Misconception(
            "mul-keeps-both",
            "mul keeps nothing in yours. What is the derivative of a b by a?",
            gives=_saved(_NEEDS_INPUTS - {"mul"}),
        ),
        Misconception(
            "elements-not-bytes",
            "yours are elements. How many bytes does each take?",
            gives=_saved(with_itemsize=False),
        ),
    ),
    wrong=(
        Variant(
            "weights counted", (("for name in kept} - set(weights)", "for name in kept}"),), diagnosis="weights-counted"
        ),
        Variant(
            "no set",
            (
                ("kept = set()", "kept = []"),
                ("kept.update(inputs)", "kept += inputs"),
                ("kept.add(output)", "kept.append(output)"),
                (
                    "kept = {base.get(name, name) for name in kept} - set(weights)",
                    "kept = [base.get(name, name) for name in kept if name not in weights]",
                ),
            ),
            diagnosis="counted-twice",
        ),
        Variant("views are memory", (('if kind == "view":', 'if kind == "":'),), diagnosis="view-is-memory"),
        Variant(
            "every output",
            source="""def saved_bytes(operations, elements, weights, itemsize):
    return itemsize * sum(elements[output] for kind, _, output in operations if kind != "view")
""",
            diagnosis="every-output",
        ),
        Variant(
            "every input",
            source="""def saved_bytes(operations, elements, weights, itemsize):
    base, kept = {}, set()
    for kind, inputs, output in operations:
        if kind == "view":
            base[output] = base.get(inputs[0], inputs[0])
        else:
            kept |= {base.get(name, name) for name in inputs}
    return itemsize * sum(elements[name] for name in kept if name not in weights)
""",
            diagnosis="every-input",
        ),
        Variant(
            "add keeps its inputs",
            (('("matmul", "mul", "gelu", "silu")', '("matmul", "mul", "add", "gelu", "silu")'),),
            diagnosis="add-keeps-nothing",
        ),
        Variant(
            "inputs of everything that is not a sum",
            (
                (
                    '("matmul", "mul", "gelu", "silu")',
                    '("matmul", "mul", "gelu", "silu", "relu", "exp", "sigmoid", "softmax")',
                ),
                ('elif kind in ("relu", "exp", "sigmoid", "softmax"):', "elif kind == 'nothing':"),
            ),
            diagnosis="output-would-do",
        ),
        Variant(
            "ReLU's input",
            (
                ('("matmul", "mul", "gelu", "silu")', '("matmul", "mul", "gelu", "silu", "relu")'),
                ('("relu", "exp", "sigmoid", "softmax")', '("exp", "sigmoid", "softmax")'),
            ),
            diagnosis="output-would-do",
        ),
        Variant(
            "outputs of all activations",
            (
                ('("matmul", "mul", "gelu", "silu")', '("matmul", "mul")'),
                ('("relu", "exp", "sigmoid", "softmax")', '("relu", "gelu", "silu", "exp", "sigmoid", "softmax")'),
            ),
            diagnosis="output-does-not-tell",
        ),
        Variant(
            "one factor",
            (("kept.update(inputs)", "kept.update(inputs[:1] if kind == 'mul' else inputs)"),),
            diagnosis="mul-keeps-both",
        ),
        Variant("elements", (("for name in kept) * itemsize", "for name in kept)"),), diagnosis="elements-not-bytes"),
    ),
    right=(
        Variant(
            "a table of rules, views resolved at once",
            source="""RULES = {"matmul": "ab", "mul": "ab", "gelu": "a", "silu": "a"} | dict.fromkeys("relu exp sigmoid softmax".split(), "y")


def saved_bytes(operations, elements, weights, itemsize):
    real = {name: name for name in elements}
    size = dict.fromkeys(weights, 0)
    for kind, inputs, output in operations:
        if kind == "view":
            real[output] = real[inputs[0]]
        parts = dict(zip("ab", inputs)) | {"y": output}
        for letter in RULES.get(kind, ""):
            name = real[parts[letter]]
            size.setdefault(name, itemsize * elements[name])
    return sum(size.values())
""",
        ),
        Variant(
            "backwards, asking of each tensor who needs it",
            source="""def saved_bytes(operations, elements, weights, itemsize):
    needed = {name: False for name in elements}
    for kind, inputs, output in reversed(operations):
        match kind:
            case "view":
                needed[inputs[0]] = needed[inputs[0]] or needed[output]
                needed[output] = False
            case "add" | "scale":
                pass
            case "matmul" | "mul" | "gelu" | "silu":
                for name in inputs:
                    needed[name] = True
            case _:
                needed[output] = True
    # a view that was marked after its own line was passed is resolved in a second round
    for kind, inputs, output in reversed(operations):
        if kind == "view" and needed[output]:
            needed[inputs[0]], needed[output] = True, False
    return sum(elements[name] * itemsize for name in needed if needed[name] and name not in weights)
""",
        ),
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
    ]


def _segments(layers: int, every: int) -> list[int]:
    return [min(every, layers - first) for first in range(0, layers, every)]


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


def _last_segment(layers: int, every: int, input_bytes: int, block_bytes: int) -> int:
    segments = _segments(layers, every)
    return (len(segments) - 1) * input_bytes + segments[-1] * block_bytes


RECOMPUTE = FunctionExercise(
    id="memory.recompute",
    title="Keep little, compute it again",
    notebook=NOTEBOOK,
    function="recompute_peak",
    label=Label(3, 20, "activation recomputation, and when memory peaks"),
    hints=(
        "Draw the moment at which the last segment has just been run forward again. What is in memory? Then the same for the "
        "segment before it.",
        "While a segment is worked on, its blocks' activations are there, and the kept inputs of the segments before it; those of "
        "the segments after it are gone. Its own kept input is one of its first block's activations.",
        "Go over the segments and take the largest of: the number of earlier segments times input_bytes, plus the number of blocks "
        "in this segment times block_bytes. The last segment may be too short to be the largest.",
    ),
    cases=_recompute_cases,
    expected=_peak(),
    unit="bytes",
    misconceptions=(
        Misconception(
            "nothing-freed",
            "yours holds the activations of all blocks at once, as if nothing had been dropped. Which blocks' are alive while one "
            "segment is worked on?",
            gives=lambda layers, every, inputs, block: layers * block,
        ),
        Misconception(
            "own-input-twice",
            "yours counts the segment's own kept input beside its blocks. It is the input of its first block: one tensor, counted in "
            "block_bytes already.",
            gives=_peak(lambda earlier: earlier + 1),
        ),
        Misconception(
            "inputs-forgotten",
            "yours forgets the kept inputs of the other segments. Which of them still wait for their turn?",
            gives=_peak(lambda earlier: 0),
        ),
        Misconception(
            "last-segment-only",
            "yours looks at the last segment. It has the most kept inputs beside it, but it may be short: what of the one before it?",
            gives=_last_segment,
        ),
        Misconception(
            "last-segment-full",
            "yours is too large where `every` does not divide `layers`: it takes the last segment to be full. How many blocks are left "
            "for it?",
            gives=lambda layers, every, inputs, block: (
                (math.ceil(layers / every) - 1) * inputs + min(every, layers) * block
            ),
        ),
        Misconception(
            "last-segment-full",
            "yours is too large where `every` is more than `layers`, or does not divide it. How many blocks does the last segment have?",
            gives=lambda layers, every, inputs, block: (math.ceil(layers / every) - 1) * inputs + every * block,
        ),
        Misconception(
            "one-block-at-a-time",
            "yours holds one block of the segment at a time. But the segment is run forward as a whole before its backward pass, keeping "
            "what all of its blocks need.",
            gives=_peak(blocks_of=lambda blocks: 1),
        ),
        Misconception(
            "every-input-kept",
            "yours keeps the input of every block. Which blocks' inputs does the forward pass keep?",
            gives=lambda layers, every, inputs, block: (layers - 1) * inputs + min(every, layers) * block,
        ),
    ),
    wrong=(
        Variant(
            "nothing freed",
            (("    return peak\n", "    return layers * block_bytes\n"),),
            diagnosis="nothing-freed",
        ),
        Variant(
            "own input twice",
            (("peak = max(peak, kept * input", "peak = max(peak, (kept + 1) * input"),),
            diagnosis="own-input-twice",
        ),
        Variant(
            "kept inputs forgotten",
            (("max(peak, kept * input_bytes + blocks * block_bytes)", "max(peak, blocks * block_bytes)"),),
            diagnosis="inputs-forgotten",
        ),
        Variant(
            "the last segment",
            (
                (
                    "peak = max(peak, kept * input_bytes + blocks * block_bytes)",
                    "peak = kept * input_bytes + blocks * block_bytes",
                ),
            ),
            diagnosis="last-segment-only",
        ),
        Variant(
            "last one full",
            (("blocks = min(every, layers - first)", "blocks = min(every, layers)"),),
            diagnosis="last-segment-full",
        ),
        Variant(
            "every segment full",
            (("blocks = min(every, layers - first)", "blocks = every"),),
            diagnosis="last-segment-full",
        ),
        Variant("one block at a time", (("blocks * block_bytes)", "block_bytes)"),), diagnosis="one-block-at-a-time"),
        Variant(
            "every input kept",
            source="""def recompute_peak(layers, every, input_bytes, block_bytes):
    return (layers - 1) * input_bytes + min(every, layers) * block_bytes
""",
            diagnosis="every-input-kept",
        ),
        Variant(
            "averages of square roots",
            source="""def recompute_peak(layers, every, input_bytes, block_bytes):
    return layers / every * input_bytes + every * block_bytes
""",
            diagnosis="values",
        ),
    ),
    right=(
        Variant(
            "no loop: the last segment or the one before it",
            source="""def recompute_peak(layers, every, input_bytes, block_bytes):
    count, rest = divmod(layers, every)
    full = (count - 1) * input_bytes + every * block_bytes if count else 0
    short = count * input_bytes + rest * block_bytes if rest else 0
    return max(full, short)
""",
        ),
        Variant(
            "played through, block by block",
            source="""def recompute_peak(layers, every, input_bytes, block_bytes):
    starts = [block for block in range(layers) if block % every == 0]
    alive = len(starts) * input_bytes
    peak = alive
    end = layers
    while starts:
        start = starts.pop()
        for block in range(start, end):
            alive += block_bytes - (input_bytes if block == start else 0)
            peak = max(peak, alive)
        alive -= (end - start) * block_bytes
        end = start
    return peak
""",
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------- memory.serve
def _serve_cases(rng: Random) -> list[Case]:
    def some(gpu: int, billions: float, layers: int, heads: int, kv: int, size: int, tokens: int, page: int) -> Case:
        tags = ("gqa " if kv < heads else "") + ("open-page" if tokens % page else "")
        name = f"{gpu / 10**9:.0f} GB, {billions:g} B parameters, {heads} heads and {kv} for k and v, {tokens:,} tokens in pages of {page}"
        return case(name, gpu, int(billions * 10**9), layers, heads, kv, size, tokens, page, tags=tags)

    return [
        case("Llama 3 8B, 80 GB, 8,192 tokens", 80 * 10**9, 8_030_261_248, 32, 32, 8, 128, 8192, 16, tags="gqa"),
        case("Llama 2 7B, 80 GB, 4,096 tokens", 80 * 10**9, 6_738_415_616, 32, 32, 32, 128, 4096, 16),
        some(141 * 10**9, 8, 32, 32, 8, 128, 16 * rng.randrange(60, 90), 16),
        some(24 * 10**9, rng.choice((1.5, 3)), 28, 12, 2, 128, rng.randrange(33, 48), 32),
        some(80 * 10**9, 7, 32, 32, 32, 128, 1 + 64 * rng.randrange(3, 9), 64),
        some(180 * 10**9, 14, 40, 40, 8, 128, rng.randrange(1000, 1020), 256),
        case("70 B parameters do not fit on 80 GB", 80 * 10**9, 70 * 10**9, 80, 64, 8, 128, 4096, 16, tags="gqa"),
    ]


def _serve(
    *, kinds: int = 2, itemsize: int = 2, of_weights: int = 2, query_heads: bool = False, one_layer: bool = False,
    pages: str = "up", least: bool = True,
) -> Callable[..., int]:  # fmt: skip
    """Sequences that fit; the options are ways to be wrong."""

    def count(
        gpu_bytes: int, parameters: int, layers: int, heads: int, kv_heads: int, head_size: int, tokens: int, page: int
    ) -> int:
        a_token = kinds * itemsize * (1 if one_layer else layers) * (heads if query_heads else kv_heads) * head_size
        room = {
            "up": math.ceil(tokens / page) * page,
            "down": tokens // page * page,
            "exact": tokens,
            "plus": (tokens // page + 1) * page,
        }
        fits = (gpu_bytes - of_weights * parameters) // (room[pages] * a_token)
        return max(0, fits) if least else fits

    return count


SERVE = FunctionExercise(
    id="memory.serve",
    title="How many conversations fit?",
    notebook=NOTEBOOK,
    function="sequences",
    label=Label(2, 15, "the KV cache, grouped heads, pages"),
    hints=(
        "What does one more token leave behind in every layer, for the tokens after it to look at? How many numbers are that?",
        "Bytes of a token: two kinds (keys and values), all layers, the heads that keys and values have, head_size, two bytes. A "
        "sequence takes whole pages. The weights come first.",
        "Divide what the weights leave by the bytes of a sequence, without a rest: pages of a sequence, rounded up, times tokens in a "
        "page, times bytes of a token. If the weights leave nothing the answer is zero.",
    ),
    cases=_serve_cases,
    expected=_serve(),
    unit="sequences",
    misconceptions=(
        Misconception(
            "keys-only",
            "twice as many as there can be: yours stores one vector a head and token. Attention compares with keys, and then adds up "
            "what?",
            gives=_serve(kinds=1),
        ),
        Misconception(
            "query-heads",
            "yours stores keys and values for every head of queries. Several of those share one: that is what `kv_heads` is for, and "
            "why models have it.",
            gives=_serve(query_heads=True),
        ),
        Misconception(
            "one-layer",
            "yours stores one layer's keys and values. Does layer 2 look at the same keys as layer 1?",
            gives=_serve(one_layer=True),
        ),
        Misconception(
            "no-weights",
            "yours gives the cache the whole GPU. Where are the weights?",
            gives=_serve(of_weights=0),
        ),
        Misconception(
            "weights-in-elements",
            "yours takes a byte for each weight. How many does bf16 have?",
            gives=_serve(of_weights=1),
        ),
        Misconception(
            "cache-in-elements",
            "yours takes a byte for each number in the cache. How many does bf16 have?",
            gives=_serve(itemsize=1),
        ),
        Misconception(
            "fp32",
            "yours takes four bytes for each number in the cache. How many does bf16 have?",
            gives=_serve(itemsize=4),
        ),
        Misconception(
            "no-pages",
            "yours gives a sequence exactly its tokens. Its last page is its own, filled or not: what does that cost 33 tokens in pages "
            "of 32?",
            gives=_serve(pages="exact"),
        ),
        Misconception(
            "pages-rounded-down",
            "yours rounds pages down: the last tokens of a sequence have no place.",
            gives=_serve(pages="down"),
        ),
        Misconception(
            "one-page-too-many",
            "a sequence whose tokens fill its last page needs no further one. How do you round up?",
            gives=_serve(pages="plus"),
        ),
        Misconception(
            "negative",
            "a negative number of sequences. What should the answer be when the weights alone do not fit?",
            gives=_serve(least=False),
        ),
    ),
    wrong=(
        Variant("keys only", (("2 * 2 * layers", "2 * layers"),), diagnosis="keys-only"),
        Variant(
            "query heads", (("layers * kv_heads * head_size", "layers * heads * head_size"),), diagnosis="query-heads"
        ),
        Variant("one layer", (("2 * 2 * layers * kv", "2 * 2 * kv"),), diagnosis="one-layer"),
        Variant("weights forgotten", (("gpu_bytes - 2 * parameters", "gpu_bytes"),), diagnosis="no-weights"),
        Variant(
            "a byte a weight",
            (("gpu_bytes - 2 * parameters", "gpu_bytes - parameters"),),
            diagnosis="weights-in-elements",
        ),
        Variant("cache in fp32", (("2 * 2 * layers", "2 * 4 * layers"),), diagnosis="fp32"),
        Variant("no pages", (("pages * page * token_bytes", "tokens * token_bytes"),), diagnosis="no-pages"),
        Variant("pages rounded down", (("-(-tokens // page)", "tokens // page"),), diagnosis="pages-rounded-down"),
        Variant("one page too many", (("-(-tokens // page)", "tokens // page + 1"),), diagnosis="one-page-too-many"),
        Variant(
            "negative",
            (("max(0, free // (pages * page * token_bytes))", "free // (pages * page * token_bytes)"),),
            diagnosis="negative",
        ),
        Variant("a fraction", (("free // (pages", "free / (pages"),), diagnosis="values"),
    ),
    right=(
        Variant(
            "pages counted first",
            source="""import math


def sequences(gpu_bytes, parameters, layers, heads, kv_heads, head_size, tokens, page):
    weights = parameters * 2
    if weights >= gpu_bytes:
        return 0
    key = value = layers * kv_heads * head_size * page * 2
    pages = (gpu_bytes - weights) // (key + value)
    return pages // math.ceil(tokens / page)
""",
        ),
        Variant(
            "one after the other",
            source="""def sequences(gpu_bytes, parameters, layers, heads, kv_heads, head_size, tokens, page):
    slots = tokens if tokens % page == 0 else tokens + page - tokens % page
    each = slots * layers * 4 * (head_size * kv_heads)
    used, found = 2 * parameters + each, 0
    while used <= gpu_bytes:
        used += each
        found += 1
    return found
""",
        ),
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
        some(300, 64),
        some(16 * rng.randrange(11, 16) + 3, 16),
        some(40, 64),
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
            f"{held}: as much as all {batches} micro-batches together. What keeps the activations of the first one alive while the "
            "second is worked on, and what would let them go?",
        )
    return (
        "something-kept",
        f"{held}. Something of every earlier micro-batch is still there: which of your names refers to a tensor, or to a list of "
        "them, that grows from one to the next?",
    )


# Lines of the solution that variants change, each with enough around it to occur once.
_ROWS = "        rows = slice(first, first + micro_batch)\n"
_LOOP = "    for first in range(0, len(x), micro_batch):\n" + _ROWS
_LOSS = "        loss = squared_error(x[rows], target[rows], weights) / x.numel()\n"
_BACKWARD = "        loss.backward()  # adds to the gradients, and lets this micro-batch's activations go\n"

ACCUMULATE = FunctionExercise(
    id="memory.accumulate",
    title="A detective: the micro-batches that saved nothing",
    notebook=NOTEBOOK,
    function="gradient_norms",
    label=Label(3, 20, "how long a graph lives; gradient accumulation"),
    hints=(
        "The gradients are right. When does the first micro-batch's graph, with all that it keeps, stop being needed by anybody?",
        "A loss refers to its graph, and the graph to every tensor that it saved; a sum of losses refers to all the graphs. A "
        "backward pass through a graph lets its tensors go, and adds to the gradients that are there already.",
        "Call backward inside the loop, on this micro-batch's part of the mean alone. Nothing has to be added up by hand, and no name "
        "from one round may be needed in the next.",
    ),
    cases=_accumulate_cases,
    expected=_weighted(lambda i, count, size, rows: 1.0),
    tolerance=1e-9,
    memory_rule=_memory_rule,
    misconceptions=(
        Misconception(
            "last-one-only",
            "these are the gradients of the last micro-batch alone. What happened to those of the others: were they overwritten, or set "
            "to zero?",
            gives=_weighted(lambda i, count, size, rows: float(i == count - 1)),
        ),
        Misconception(
            "earlier-ones-again",
            "earlier micro-batches are counted again with every later one: yours goes backward through the sum so far, and gradients add "
            "up. Through what should it go?",
            gives=_weighted(lambda i, count, size, rows: float(count - i)),
        ),
        Misconception(
            "sum-of-means",
            "yours is the sum of the micro-batches' means, larger by about their number. By what must each loss be divided, so that they "
            "add up to the mean over all rows?",
            gives=_weighted(lambda i, count, size, rows: rows / size),
        ),
        Misconception(
            "mean-of-means",
            "right only where all micro-batches are equally long: yours is a mean of means, and the rows of a short last one weigh more "
            "than others.",
            gives=_weighted(lambda i, count, size, rows: rows / size / count),
        ),
        Misconception(
            "mean-of-means",
            "right only where micro_batch divides the rows. How many rows has the last micro-batch?",
            gives=lambda x, target, weights, micro_batch: _weighted(
                lambda i, count, size, rows: rows / (micro_batch * math.ceil(rows / micro_batch))
            )(x, target, weights, micro_batch),
        ),
        Misconception(
            "last-rows-lost",
            "the rows that do not fill a micro-batch are missing. Which rows does the last one take?",
            gives=lambda x, target, weights, micro_batch: _weighted(
                lambda i, count, size, rows: float(size == min(micro_batch, rows))
            )(x, target, weights, micro_batch),
        ),
    ),
    wrong=(
        Variant(
            "as handed out",
            (
                (_LOOP, "    loss = 0.0\n" + _LOOP),
                (_LOSS, _LOSS.replace("squared_error", "loss + squared_error")),
                (_BACKWARD, "    loss.backward()\n"),
            ),
            diagnosis="all-at-once",
        ),
        Variant(
            "the whole batch at once",
            ((_LOOP, "    for rows in [slice(None)]:\n"),),
            diagnosis="all-at-once",
        ),
        Variant(
            "backward through the sum so far",
            (
                (_LOOP, "    loss = 0.0\n" + _LOOP),
                (_LOSS, _LOSS.replace("squared_error", "loss + squared_error")),
                (_BACKWARD, "        loss.backward(retain_graph=True)\n"),
            ),
            diagnosis="earlier-ones-again",
        ),
        Variant(
            "graphs kept after backward",
            (
                (_LOOP, "    losses = []\n" + _LOOP),
                (_BACKWARD, "        losses.append(loss)\n        loss.backward(retain_graph=True)\n"),
            ),
            diagnosis="all-at-once",
        ),
        Variant(
            "gradients set to None every time",
            ((_BACKWARD, "        for weight in weights:\n            weight.grad = None\n" + _BACKWARD),),
            diagnosis="last-one-only",
        ),
        Variant("a mean each", ((_LOSS, _LOSS.replace("x.numel()", "x[rows].numel()")),), diagnosis="sum-of-means"),
        Variant(
            "mean of means",
            ((_LOSS, _LOSS.replace("x.numel()", "x[rows].numel() / -(-len(x) // micro_batch)")),),
            diagnosis="mean-of-means",
        ),
        Variant(
            "last rows lost",
            ((_LOOP, _LOOP.replace("range(0, len(x)", "range(0, max(1, len(x) - micro_batch + 1)")),),
            diagnosis="last-rows-lost",
        ),
        Variant(
            "the activations of every micro-batch kept",
            source="""import torch


def gradient_norms(x, target, weights, micro_batch):
    weights = [weight.clone().requires_grad_() for weight in weights]
    hidden = []
    for first in range(0, len(x), micro_batch):
        y = x[first : first + micro_batch]
        for weight in weights:
            y = torch.nn.functional.gelu(y @ weight)
            hidden.append(y.detach())
        loss = (y - target[first : first + micro_batch]).square().sum() / x.numel()
        loss.backward()
    return [weight.grad.norm().item() for weight in weights]
""",
            diagnosis="something-kept",
        ),
        Variant(
            "the sum detached",
            (
                (_LOOP, "    total = 0.0\n" + _LOOP),
                (_BACKWARD, "        total = total + loss.detach()\n    total.backward()\n"),
            ),
            diagnosis="exception",
        ),
    ),
    right=(
        Variant(
            "torch.split and autograd.grad",
            source="""import torch


def gradient_norms(x, target, weights, micro_batch):
    leaves = [weight.detach().requires_grad_() for weight in weights]
    sums = None
    for rows, wanted in zip(x.split(micro_batch), target.split(micro_batch)):
        y = rows
        for weight in leaves:
            y = torch.nn.functional.gelu(y.mm(weight))
        found = torch.autograd.grad(torch.nn.functional.mse_loss(y, wanted, reduction="sum"), leaves)
        sums = found if sums is None else [a.add_(b) for a, b in zip(sums, found)]
        del y
    return [float(total.norm()) / x.numel() for total in sums]
""",
        ),
        Variant(
            "a list of losses, whose graphs are gone",
            (
                (_LOOP, "    log, losses = 0.0, []\n" + _LOOP),
                (_BACKWARD, "        log += loss.item()\n        losses.append(loss)\n" + _BACKWARD),
            ),
        ),
        Variant(
            "rows picked by an index, the graph let go by name",
            (
                (_ROWS, "        rows = torch.arange(first, min(first + micro_batch, len(x)))\n"),
                (_LOSS, _LOSS.replace(" / x.numel()", ".div(x.shape[0] * x.shape[1])")),
                (_BACKWARD, _BACKWARD + "        del loss\n"),
            ),
        ),
        Variant(
            "derived by hand",
            source="""import torch


def slope(x):
    inside = torch.special.erf(x * 0.5**0.5)
    return 0.5 * (1 + inside) + x * torch.exp(-0.5 * x * x) * 0.3989422804014327


def gradient_norms(x, target, weights, micro_batch):
    sums = [torch.zeros_like(weight) for weight in weights]
    for first in range(0, len(x), micro_batch):
        inputs, before, y = [], [], x[first : first + micro_batch]
        for weight in weights:
            inputs.append(y)
            before.append(y @ weight)
            y = torch.nn.functional.gelu(before[-1])
        dy = 2 * (y - target[first : first + micro_batch]) / x.numel()
        for i in reversed(range(len(weights))):
            dy = dy * slope(before[i])
            sums[i] += inputs[i].t() @ dy
            dy = dy @ weights[i].t()
    return [total.norm().item() for total in sums]
""",
        ),
    ),
)

EXERCISES = [GPT2, LLAMA, STATE, SAVED, RECOMPUTE, SERVE, ACCUMULATE]
