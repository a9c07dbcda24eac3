"""The roofline: what a GPU can reach at a given number of FLOPs a byte, and where a kernel lies below that.

Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785. A multiply-add is 2 FLOPs; bytes are those
that device memory moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpukit.accounting import models
from gpukit.accounting.arguments import choice, whole
from gpukit.accounting.flops import forward_flops, matmul_flops
from gpukit.accounting.memory import DTYPE_BITS, tensor_bytes
from gpukit.accounting.models import Config
from gpukit.hardware import Gpu


@dataclass(frozen=True)
class Point:
    """One kernel: what it computes, what it moves, and how long it takes, if that is known.

    how  where time_us comes from: "measured" or "modelled"
    Raises ValueError for a number that is not positive.
    """

    name: str
    flops: float
    bytes: float
    time_us: float | None = None
    how: str = "measured"

    def __post_init__(self) -> None:
        for name in ("flops", "bytes", "time_us"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"roofline: {name} of {self.name!r} must be a positive number, got {value!r}")

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def flops_per_s(self, gpu: Gpu, dtype: str) -> float:
        """What it reaches; where no time is known, what the roof allows."""
        return attainable(gpu, dtype, self.intensity) if self.time_us is None else self.flops / self.time_us * 1e6

    def least_us(self, gpu: Gpu, dtype: str) -> float:
        """The least time by this roof."""
        return self.flops / attainable(gpu, dtype, self.intensity) * 1e6


def attainable(gpu: Gpu, dtype: str, intensity: float) -> float:
    """FLOP/s that `gpu` can reach at `intensity` FLOPs per byte. Raises ValueError for a dtype without a rate."""
    return min(gpu.peak(dtype), intensity * gpu.hbm_gbps * 1e9)


def limit(gpu: Gpu, dtype: str, intensity: float) -> str:
    """ "memory" left of the ridge, "compute" right of it."""
    return "memory" if intensity < gpu.ridge(dtype) else "compute"


def critical_batch(gpu: Gpu, dtype: str = "bf16", weights: str | None = None) -> float:
    """Tokens in a batch from which on a matmul with large weights is limited by compute, not by reading the weights: a
    weight takes its bytes of traffic, once, and 2 FLOPs for each token. In decoding a sequence gives one token, in prefill
    all that it has.

    weights  their dtype in memory, `dtype` if not given: 4-bit weights need a quarter of the batch of 16-bit ones
    Raises ValueError for a dtype without a rate.
    """
    bits = DTYPE_BITS[choice("critical_batch", "weights", weights or dtype, DTYPE_BITS)]
    return gpu.ridge(dtype) * bits / 8 / 2


# ---- operations as points --------------------------------------------------------------------------------------------


def matmul_point(name: str, M: int, N: int, K: int, dtype: str = "bf16", batch: int = 1) -> Point:
    """[M, K] by [K, N], each matrix moved once. Raises ValueError."""
    flops = matmul_flops(M, N, K, batch)
    return Point(name, flops, tensor_bytes(batch * (M * K + K * N + M * N), dtype))


def elementwise_point(
    name: str, elements: int, dtype: str = "bf16", *, reads: int = 1, writes: int = 1, flops: int = 1
) -> Point:
    """`reads` tensors in and `writes` out, each of `elements`, with `flops` for each element. Raises ValueError."""
    n = whole("elementwise_point", "elements", elements, 1, 10**15)
    return Point(name, n * flops, tensor_bytes(n * (reads + writes), dtype))


def attention_point(
    name: str, batch: int, heads: int, kv_heads: int, tokens: int, keys: int, head_size: int, dtype: str = "bf16",
    *, causal: bool = False,
) -> Point:  # fmt: skip
    """Fused attention of `tokens` queries over `keys` keys: q, k, v in, the output out. causal: the last query sees all
    keys, the one before it one less. Raises ValueError."""
    sizes = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "tokens": tokens,
        "keys": keys,
        "head_size": head_size,
    }
    for argument, size in sizes.items():
        whole("attention_point", argument, size)
    if causal and keys < tokens:
        raise ValueError(f"attention_point: causal attention needs keys >= tokens, got {keys} and {tokens}")
    pairs = tokens * keys - (tokens * (tokens - 1) // 2 if causal else 0)
    elements = 2 * batch * head_size * (heads * tokens + kv_heads * keys)
    return Point(name, 4 * batch * heads * pairs * head_size, tensor_bytes(elements, dtype))


def model_points(
    config: Config | str, batch: int, tokens: int, *, past: int = 0, dtype: str = "bf16", logits: str = "last",
    together: bool = False,
) -> list[Point]:  # fmt: skip
    """The operations of a forward pass, all layers together: tokens=T is a prefill, tokens=1 with past=T a decode step.

    Traffic is the least of an unfused model: each operation reads its inputs and weights and writes its result, attention
    is one kernel. Experts: all that a batch can reach are read. FLOPs of norms and activations are those that people
    count, a handful an element. together: attention's projections as one point. Raises ValueError.
    """
    c = models.preset(config)
    absorbed = bool(c.kv_rank and past)
    flops = forward_flops(c, batch, tokens, past=past, logits=logits, absorbed=absorbed).operations
    n, keys, s = batch * tokens, past + tokens, DTYPE_BITS[choice("model_points", "dtype", dtype, DTYPE_BITS)] / 8

    def point(name: str, flop: int, elements: int) -> Point:
        return Point(name, flop, elements * s)

    matrices, layers = 3 if c.glu else 2, c.layers
    points = [point("norms", 2 * layers * 4 * n * c.hidden, 2 * layers * (2 * n * c.hidden + c.hidden))]
    projections = [
        point(name, flops[name], layers * (n * inputs + inputs * outputs + n * outputs))
        for name, (inputs, outputs) in models.attention_projections(c).items()
    ]
    if together:
        flop, moved = sum(p.flops for p in projections), sum(p.bytes for p in projections)
        projections = [Point("projections", flop, moved)]
    points += projections
    # With a cache MLA reads one low-rank vector a key, which all heads share; else k and v of every kv head.
    cached = c.kv_rank + c.rope_size if absorbed else c.kv_heads * (c.qk_size + c.value_size)
    points.append(
        point(
            "attention",
            flops["attention scores"] + flops["attention values"],
            layers * (n * c.heads * (c.qk_size + c.value_size) + batch * keys * cached),
        )
    )
    width = 0
    if "mlp" in flops:
        dense = layers - c.moe_layers
        moved = 2 * n * c.hidden + matrices * c.hidden * c.intermediate + matrices * n * c.intermediate
        points.append(point("mlp", flops["mlp"], dense * moved))
        width += dense * c.intermediate
    if "experts" in flops:
        used = c.experts_per_token + c.shared_experts
        read = min(c.experts, n * c.experts_per_token) + c.shared_experts
        moved = n * used * (2 * c.hidden + matrices * c.expert_intermediate)
        moved += read * matrices * c.hidden * c.expert_intermediate
        points.append(point("router", flops["router"], c.moe_layers * (n * c.hidden + (n + c.hidden) * c.experts)))
        points.append(point("experts", flops["experts"], c.moe_layers * moved))
        width += c.moe_layers * used * c.expert_intermediate
    points.append(point("activation", 8 * n * width, n * width * matrices))
    points.append(point("residual adds", 2 * layers * n * c.hidden, 6 * layers * n * c.hidden))
    if logits != "none":
        rows = n if logits == "all" else batch
        moved = rows * c.hidden + c.hidden * c.vocab_size + rows * c.vocab_size
        points.append(point("logits", flops["logits"], moved))
    return points


def least_us(points: Sequence[Point], gpu: Gpu, dtype: str) -> float:
    """The least time of operations that run one after another, each at its own roof."""
    return sum(point.least_us(gpu, dtype) for point in points)
