"""Floating-point operations, from shapes: a multiply-add is 2.

Counted are matmuls, the few operations that hold nearly all of the work, as torch.utils.flop_counter counts them; norms,
softmax and activations come to less than a hundredth of a large model. N parameters and D tokens: forward 2 N D, backward
twice that, 6 N D together. Kaplan et al. 2020, https://arxiv.org/abs/2001.08361
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpukit.accounting import models
from gpukit.accounting.arguments import MOST_PARAMETERS, MOST_TOKENS, choice, whole
from gpukit.accounting.models import Config


def matmul_flops(M: int, N: int, K: int, batch: int = 1) -> int:
    """2 M N K for [M, K] by [K, N]: each of the M N results takes K multiplications and K additions. Raises ValueError."""
    sizes = {"M": M, "N": N, "K": K, "batch": batch}
    M, N, K, batch = (whole("matmul_flops", name, size) for name, size in sizes.items())
    return 2 * M * N * K * batch


# ---- einsum ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Einsum:
    """An expression taken apart: the names of each input's and of the output's axes, and which are summed over."""

    inputs: tuple[tuple[str, ...], ...]
    output: tuple[str, ...]

    @property
    def summed(self) -> tuple[str, ...]:
        names = dict.fromkeys(name for axes in self.inputs for name in axes)
        return tuple(name for name in names if name not in self.output)


def parse_einsum(expression: str) -> Einsum:
    """Read "bqd,bkd->bqk", or with spaces and whole names as einops does: "batch q d, batch k d -> batch q k".

    An axis "..." stands for any number of axes. Raises ValueError for what is not such an expression.
    """
    where = f"einsum {expression!r}"
    if not isinstance(expression, str) or expression.count("->") != 1:
        raise ValueError(f"{where}: write inputs -> output, for instance 'b i, i o -> b o'")
    left, right = expression.split("->")
    words = " " in left.strip().replace(", ", ",").replace(" ,", ",") or " " in right.strip()

    def axes(text: str) -> tuple[str, ...]:
        names = text.split() if words else re.findall(r"\.\.\.|\S", text)
        for name in names:
            if name != "..." and not name.isidentifier():
                raise ValueError(f"{where}: an axis is a name or ..., got {name!r}")
        return tuple(names)

    parsed = Einsum(tuple(axes(part) for part in left.split(",")), axes(right))
    if len(set(parsed.output)) < len(parsed.output):
        raise ValueError(f"{where}: the output names an axis twice")
    unknown = set(parsed.output) - {name for axes in parsed.inputs for name in axes}
    if unknown:
        raise ValueError(f"{where}: no input has the output's {', '.join(sorted(unknown))}")
    return parsed


def einsum_flops(expression: str, sizes: Mapping[str, int]) -> int:
    """Operations of an einsum: 2 for each combination of all axes where something is summed, as a matmul; 1 where nothing
    is. More than two inputs are taken from left to right, and an axis is summed as soon as no later input has it.

    einsum_flops("bhqd,bhkd->bhqk", {"b": 1, "h": 12, "q": 1024, "k": 1024, "d": 64})
    einsum_flops("... i, o i -> ... o", {"...": 4096, "i": 768, "o": 3072})
    Raises ValueError for an expression that is none, and for a size that is missing or not whole.
    """
    parsed = parse_einsum(expression)
    names = dict.fromkeys(name for axes in parsed.inputs for name in axes)
    missing = [name for name in names if name not in sizes]
    if missing:
        raise ValueError(f"einsum {expression!r}: sizes lacks {', '.join(missing)}")
    size = {name: whole(f"einsum {expression!r}", name, sizes[name]) for name in names}
    left, *rest = parsed.inputs
    if not rest:
        points = _product(size, left)
        return points if set(left) - set(parsed.output) else 0  # a sum adds; another order of axes computes nothing
    flops = 0
    for i, right in enumerate(rest):
        needed = set(parsed.output).union(*rest[i + 1 :])
        together = dict.fromkeys((*left, *right))
        left = tuple(name for name in together if name in needed)
        flops += (2 if len(left) < len(together) else 1) * _product(size, together)
    return flops


def _product(size: Mapping[str, int], names) -> int:
    points = 1
    for name in dict.fromkeys(names):
        points *= size[name]
    return points


# ---- transformers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops:
    """Operation -> FLOPs; what has weights and what is attention's own are told apart by `attention_flops`."""

    operations: dict[str, int] = field(hash=False)

    @property
    def total(self) -> int:
        return sum(self.operations.values())

    @property
    def attention_flops(self) -> int:
        """The part that grows with the square of the length: q k^T and weights v."""
        return sum(self.operations.get(name, 0) for name in ("attention scores", "attention values"))

    def times(self, factor: int) -> Flops:
        return Flops({name: factor * count for name, count in self.operations.items()})


LOGITS = ("all", "last", "none")


def forward_flops(
    config: Config | str, batch: int, tokens: int, *, past: int = 0, causal: bool = True, logits: str = "all",
    absorbed: bool = False,
) -> Flops:  # fmt: skip
    """The matmuls of a forward pass of `batch` sequences of `tokens` new tokens, by operation, all layers together.

    past     tokens before them whose k and v are cached: tokens=1, past=T is a decode step
    causal   count for each query the keys up to its own; False counts the full square, as a kernel does that computes
             and masks it, and as torch's counter does
    logits   of "all" new tokens (training), the "last" one of each sequence (generation), or "none"
    absorbed MLA only: attention works on the cached low-rank vectors, as decoding does. The projection up then turns
             queries and results instead of k and v, in as many FLOPs. Without it k and v count as made once and kept
    Raises ValueError.
    """
    c = models.preset(config)
    where = "forward_flops"
    batch = whole(where, "batch", batch)
    tokens, past = whole(where, "tokens", tokens, 1, 10**12), whole(where, "past", past, 0, 10**12)
    choice(where, "logits", logits, LOGITS)
    n = batch * tokens
    pairs = batch * (tokens * past + (tokens * (tokens + 1) // 2 if causal else tokens * tokens))
    operations = {
        name: c.layers * 2 * n * inputs * outputs for name, (inputs, outputs) in models.attention_projections(c).items()
    }
    output = operations.pop("output projection")
    if absorbed and not c.kv_rank:
        raise ValueError(f"{where}: absorbed needs a model with MLA, and {c.name} has none")
    for name, inner in (
        ("attention scores", c.kv_rank + c.rope_size if absorbed else c.qk_size),
        ("attention values", c.kv_rank if absorbed else c.value_size),
    ):
        operations[name] = c.layers * c.heads * 2 * pairs * inner
    operations["output projection"] = output
    matrices = 3 if c.glu else 2
    if c.layers > c.moe_layers:
        operations["mlp"] = (c.layers - c.moe_layers) * 2 * n * matrices * c.hidden * c.intermediate
    if c.moe_layers:
        used = c.experts_per_token + c.shared_experts
        operations["router"] = c.moe_layers * 2 * n * c.hidden * c.experts
        operations["experts"] = c.moe_layers * 2 * n * used * matrices * c.hidden * c.expert_intermediate
    if logits != "none":
        operations["logits"] = 2 * (n if logits == "all" else batch) * c.hidden * c.vocab_size
    return Flops(operations)


def backward_flops(config: Config | str, batch: int, tokens: int, *, causal: bool = True, flash: bool = False) -> Flops:
    """A matmul's backward pass is two of its size: one for each input's gradient. `flash`: FlashAttention computes q k^T a
    second time as well. Raises ValueError as `forward_flops`."""
    forward = forward_flops(config, batch, tokens, causal=causal)
    operations = forward.times(2).operations
    if flash:
        operations["attention scores"] += forward.operations["attention scores"]
    return Flops(operations)


@dataclass(frozen=True)
class StepFlops:
    """Of one training step: `model` counts each operation once, for MFU; `hardware` counts what is computed again too."""

    forward: int
    backward: int
    recomputed: int

    @property
    def model(self) -> int:
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        return self.model + self.recomputed


def step_flops(
    config: Config | str, batch: int, tokens: int, *, causal: bool = True, recompute: str = "none", flash: bool = True
) -> StepFlops:
    """Forward and backward of one step.

    recompute  "none", "selective" (attention between its projections) or "full" (all blocks, not the logits). The last
               matmul of what is computed again is not: nothing needs its result, and PyTorch stops before it
    flash      adds the q k^T that FlashAttention's backward pass computes again
    Raises ValueError.
    """
    choice("step_flops", "recompute", recompute, ("none", "selective", "full"))
    c = models.preset(config)
    forward = forward_flops(c, batch, tokens, causal=causal)
    scores = forward.operations["attention scores"]
    again = scores if flash else 0
    if recompute == "selective":
        again += forward.attention_flops if flash else scores  # one kernel computes both
    elif recompute == "full":
        again += forward.total - forward.operations["logits"]
        again -= forward.operations.get("mlp", 0) // (3 if c.glu else 2)
        again -= c.moe_layers * 2 * batch * tokens * c.shared_experts * c.hidden * c.expert_intermediate
    return StepFlops(forward.total, 2 * forward.total, again)


# ---- the pencil's formulas -------------------------------------------------------------------------------------------


SQUARE = "attention's square"  # q k^T and weights v: what grows with the square of the length
AGAIN = "computed again"
_GROUPS = {"mlp": "MLP", "experts": "MLP", "router": "MLP", "logits": "logits"}
_GROUPS |= dict.fromkeys(("attention scores", "attention values"), SQUARE)


def token_flops(config: Config | str, tokens: int, phase: str, recompute: str = "none") -> dict[str, float]:
    """The matmuls' FLOPs for one token, by group: projections, SQUARE, MLP, logits and, where some are, AGAIN.

    phase      "forward"; "training": forward and backward; of both the average token, which sees half of the context;
               "decode": the last of `tokens`, which sees all of it
    recompute  what a training step computes again: "none", "selective", "full"
    """
    if phase == "decode":
        counted, n, factor = forward_flops(config, 1, 1, past=tokens - 1, logits="last"), 1, 1
    else:
        counted, n, factor = forward_flops(config, 1, tokens), tokens, 3 if phase == "training" else 1
    groups = dict.fromkeys(("projections", SQUARE, "MLP", "logits"), 0.0)
    for name, part in counted.operations.items():
        groups[_GROUPS.get(name, "projections")] += factor * part / n
    if phase == "training" and recompute != "none":
        groups[AGAIN] = step_flops(config, 1, tokens, recompute=recompute, flash=False).recomputed / n
    return groups


def two_nd(parameters: int, tokens: int) -> int:
    """2 N D: a forward pass, attention's square left out. N: all that multiply, without tables that are looked up."""
    return 2 * whole("two_nd", "parameters", parameters, 1, MOST_PARAMETERS) * _tokens("two_nd", tokens)


def six_nd(parameters: int, tokens: int) -> int:
    """6 N D: forward and backward. With experts N is what a token uses. Raises ValueError."""
    return 6 * whole("six_nd", "parameters", parameters, 1, MOST_PARAMETERS) * _tokens("six_nd", tokens)


def _tokens(where: str, tokens: int) -> int:
    return whole(where, "tokens", tokens, 1, MOST_TOKENS)


def matmul_parameters(config: Config | str) -> int:
    """The N of 2 N D for which it is exact but for attention's square: the weights that a token is multiplied by. The
    output head counts, tied or not; embedding tables, norms and biases do not."""
    c = models.preset(config)
    per_token = forward_flops(c, 1, 1)
    return (per_token.total - per_token.attention_flops) // 2


def attention_share(config: Config | str, tokens: int, *, causal: bool = True) -> float:
    """The part of a forward pass over `tokens` that attention's square takes, 0 to 1."""
    flops = forward_flops(config, 1, tokens, causal=causal)
    return flops.attention_flops / flops.total
