"""What one step of decoding reads, and how many tokens per second that allows.

A step makes the next token of every sequence in a batch. Its FLOPs are few, so that it takes as long as its bytes take to
come: the weights, once for the whole batch, and each sequence's own keys and values. Pope et al. 2022,
https://arxiv.org/abs/2211.05102. Activations are left out: some thousandths of the weights for each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpukit.accounting import models
from gpukit.accounting.arguments import choice, whole
from gpukit.accounting.memory import DTYPE_BITS, kv_cache_bytes, tensor_bytes
from gpukit.accounting.models import Config
from gpukit.hardware import Gpu

SCALE_BYTES = 4  # of an int8 cache: float32, one for each head's keys and one for its values of a token


@dataclass(frozen=True)
class Step:
    """Bytes that a step reads. `held_bytes`: what must be in memory for it, the whole table of embeddings included."""

    batch: int
    weights_bytes: int
    cache_bytes: int
    held_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes

    def ms(self, gpu: Gpu) -> float:
        """The least time of the step by the GPU's bandwidth."""
        return self.total_bytes / gpu.hbm_gbps / 1e6

    def tokens_per_s(self, gpu: Gpu) -> float:
        """Of all sequences together."""
        return self.batch / self.ms(gpu) * 1e3

    def fits(self, gpu: Gpu) -> bool:
        return self.held_bytes <= gpu.hbm_bytes


def tokens_of_sms(tokens: int, heads: int, parts: int, sms: int) -> list[list[int]]:
    """Attention of one sequence's newest token, `heads` heads of the cache in `parts` parts each, one program a part: how
    many tokens the programs of each SM read, if they are dealt out in turn. Raises ValueError."""
    for name, value in (("tokens", tokens), ("heads", heads), ("parts", parts), ("sms", sms)):
        whole("tokens_of_sms", name, value)
    sizes = [tokens * (i + 1) // parts - tokens * i // parts for i in range(parts) for _ in range(heads)]
    return [sizes[sm::sms] for sm in range(sms)]


def decode_step(config: Config | str, batch: int, tokens: int, weights: str = "bf16", cache: str = "bf16") -> Step:
    """The step that finds `tokens` tokens of each of `batch` sequences in the cache, the new ones included.

    weights, cache  their dtypes in memory; an int8 cache has scales
    Of experts those are read that the batch can reach. Raises ValueError.
    """
    c = models.preset(config)
    batch = whole("decode_step", "batch", batch)
    choice("decode_step", "weights", weights, DTYPE_BITS)
    choice("decode_step", "cache", cache, DTYPE_BITS)
    parts = models.parameters(c)
    # Of the table of embeddings a token takes one row; where it is the output head as well, all of it.
    read = parts.total - parts.positions - (0 if c.tied_embeddings else parts.embedding)
    reached = min(c.experts, batch * c.experts_per_token)
    read -= c.moe_layers * (c.experts - reached) * (3 if c.glu else 2) * c.hidden * c.expert_intermediate
    cached = kv_cache_bytes(c, batch, tokens, cache)
    if cache == "int8":
        cached += SCALE_BYTES * c.layers * batch * tokens * (1 if c.kv_rank else 2 * c.kv_heads)
    return Step(batch, tensor_bytes(read, weights), cached, tensor_bytes(parts.total, weights) + cached)
