"""A GPT in one file: token ids go in, the loss or the logits come out.

    tokens -> embedding -> layers x (norm, attention, add; norm, MLP, add) -> norm -> head -> logits

Between the blocks each token is a vector of `hidden` numbers; the sum that every block adds to is called the residual stream.
The logits are one number for each entry of the vocabulary: the larger it is, the likelier that token comes next. The loss is
-log of the probability that the right token got, on average, in nats (natural logarithms).

One class covers two families, and `GPTConfig` says which. GPT-2 has LayerNorm, a learned vector for each position, GELU and
biases. Llama has RMSNorm, rotary positions (RoPE), SwiGLU, fewer heads of keys and values than of queries, and no biases.

Every operation that `gpukit.kernels` has a kernel for is called through `Operations`, a table of functions. Its defaults are
plain PyTorch; a kernel replaces one entry without a change to the model:

    model = GPT(config, Operations(attention=gpukit.kernels.flash_attention))

Letters in shapes: B sequences, T tokens in each, H heads, D numbers per head, V entries of the vocabulary.

Sources: GPT-2, https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf;
Llama, https://arxiv.org/abs/2302.13971; RoPE, https://arxiv.org/abs/2104.09864; SwiGLU, https://arxiv.org/abs/2002.05202;
grouped query heads, https://arxiv.org/abs/2305.13245.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpukit.accounting.arguments import choice, divides, whole


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model.

    vocab_size       number of different tokens, V
    context          the longest sequence that the model takes, in tokens
    layers, heads    number of blocks; heads of queries in each
    hidden           width of the residual stream: how many numbers stand for one token between the blocks
    kv_heads         heads of keys and values; None for as many as `heads`. Fewer save memory (grouped query heads)
    intermediate     width inside the MLP; None for 4 hidden
    norm             "layer" (LayerNorm) or "rms" (RMSNorm)
    positions        "learned" (a table with a vector for each position) or "rope" (queries and keys are rotated)
    mlp              "gelu" (two matrices) or "swiglu" (three; one of them gates)
    biases           whether the matrices of the blocks have biases
    tied_embeddings  whether the output head uses the embedding table as its matrix
    dropout          probability with which an output of attention or MLP is set to 0 in training
    rope_base        RoPE's slowest rotation takes about 2 pi rope_base tokens per turn

    Raises ValueError naming the argument, what was given and what is allowed.
    """

    vocab_size: int
    context: int
    layers: int
    heads: int
    hidden: int
    kv_heads: int | None = None
    intermediate: int | None = None
    norm: str = "layer"
    positions: str = "learned"
    mlp: str = "gelu"
    biases: bool = True
    tied_embeddings: bool = True
    dropout: float = 0.0
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        defaults = {"kv_heads": self.heads, "intermediate": 4 * self.hidden}
        for name in ("vocab_size", "context", "layers", "heads", "hidden", "kv_heads", "intermediate"):
            value = getattr(self, name)
            # The dataclass is frozen, so that a model and its config cannot drift apart; here alone it is completed.
            object.__setattr__(self, name, whole("GPTConfig", name, defaults[name] if value is None else value))
        divides("GPTConfig", "heads", self.heads, "hidden", self.hidden)
        divides("GPTConfig", "kv_heads", self.kv_heads, "heads", self.heads)
        choice("GPTConfig", "norm", self.norm, ("layer", "rms"))
        choice("GPTConfig", "positions", self.positions, ("learned", "rope"))
        choice("GPTConfig", "mlp", self.mlp, ("gelu", "swiglu"))
        if self.positions == "rope" and self.head_size % 2:
            raise ValueError(f"GPTConfig: rope needs an even head size, hidden / heads, got {self.head_size}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"GPTConfig: dropout must be 0 or more and below 1, got {self.dropout!r}")
        if not 1 < self.rope_base < math.inf:
            raise ValueError(f"GPTConfig: rope_base must be a finite number above 1, got {self.rope_base!r}")

    @property
    def head_size(self) -> int:
        """Numbers per head, D."""
        return self.hidden // self.heads


# ---- the operations that kernels can replace -------------------------------------------------------------------------


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Each row of x [..., hidden] with its mean subtracted and divided by its standard deviation, times weight, plus bias."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of x [..., hidden] divided by the root of its mean square, times weight."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, H, T, D] and k [B, H_kv, T, D], each pair of numbers (i, i + D/2) rotated by an angle that grows with the
    token's position; cos and sin [T, D/2]. The product of a query with a key then depends on the distance between them."""

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for each head. q [B, H, T, D]; k and v [B, H_kv, T, D], each of their heads serves H / H_kv
    heads of q. With `causal` a token sees itself and the tokens before it. Returns [B, H, T, D]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def gelu(x: Tensor, approximate: str) -> Tensor:
    """GELU of each element; GPT-2 uses approximate="tanh"."""
    return F.gelu(x, approximate=approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate sigmoid(gate) up, element by element."""
    return F.silu(gate) * up


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean of -log(probability of the right token). x [B, T, hidden], weight [V, hidden], targets [B, T].

    The logits [B T, V] are the largest tensor of a training step. They have no name that outlives the call, so that only
    their log-softmax, which the backward pass needs, stays in memory: one float32 tensor of that size and not two.
    """
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Operations:
    """What the model calls where `gpukit.kernels` has a kernel. A kernel of the same name can take each function's place;
    for attention and loss these are `flash_attention` and `linear_cross_entropy`."""

    layer_norm: Callable[..., Tensor] = layer_norm
    rms_norm: Callable[..., Tensor] = rms_norm
    rope: Callable[..., tuple[Tensor, Tensor]] = rope
    attention: Callable[..., Tensor] = attention
    gelu: Callable[..., Tensor] = gelu
    swiglu: Callable[..., Tensor] = swiglu
    loss: Callable[..., Tensor] = linear_cross_entropy


# ---- the parts -------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.bias = nn.Parameter(torch.zeros(config.hidden)) if config.norm == "layer" else None

    def forward(self, x: Tensor, operations: Operations) -> Tensor:
        # FSDP hands over a block's parameters in bf16, and x, the residual stream, is float32.
        weight = self.weight.to(x.dtype)
        if self.bias is None:
            return operations.rms_norm(x, weight, 1e-5)
        return operations.layer_norm(x, weight, self.bias.to(x.dtype), 1e-5)


class Attention(nn.Module):
    """Every token collects from the tokens before it what it looks for."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        # Queries, keys and values of all heads come out of one matrix: one large product is faster than three.
        outputs = (config.heads + 2 * config.kv_heads) * config.head_size
        self.qkv = nn.Linear(config.hidden, outputs, bias=config.biases)
        self.out = nn.Linear(config.hidden, config.hidden, bias=config.biases)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None, operations: Operations) -> Tensor:
        c = self.config
        B, T, _ = x.shape
        heads = self.qkv(x).view(B, T, -1, c.head_size).transpose(1, 2)  # [B, H + 2 H_kv, T, D]
        q, k, v = heads.split((c.heads, c.kv_heads, c.kv_heads), dim=1)
        if angles is not None:
            q, k = operations.rope(q, k, *angles)
        y = operations.attention(q, k, v, causal=True)  # [B, H, T, D]
        return self.out(y.transpose(1, 2).reshape(B, T, c.hidden))


class MLP(nn.Module):
    """Every token is transformed by itself: out to a wider vector, through a non-linear function, and back."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.up = nn.Linear(config.hidden, (2 if self.gated else 1) * config.intermediate, bias=config.biases)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=config.biases)

    def forward(self, x: Tensor, operations: Operations) -> Tensor:
        if self.gated:
            return self.down(operations.swiglu(*self.up(x).chunk(2, dim=-1)))
        return self.down(operations.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): both add to the residual stream x [B, T, hidden]."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm, self.attention = Norm(config), Attention(config)
        self.mlp_norm, self.mlp = Norm(config), MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None, operations: Operations) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x, operations), angles, operations))
        return x + self.dropout(self.mlp(self.mlp_norm(x, operations), operations))


# ---- the model -------------------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """A decoder-only transformer. `operations` may be replaced at any time: `model.operations = Operations(gelu=...)`.

    With `recompute` set, a block keeps only its input for the backward pass, which computes the rest again: about a third more
    FLOPs for a small part of the memory (activation checkpointing).
    """

    recompute = False

    def __init__(self, config: GPTConfig, operations: Operations | None = None):
        super().__init__()
        self.config, self.operations = config, operations or Operations()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context, config.hidden)
        else:
            # Pair i of a head turns by position x rope_base^(-2 i / D): the first pairs fast, the last ones slowly.
            speeds = config.rope_base ** (-torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size)
            angles = torch.outer(torch.arange(config.context, dtype=torch.float64), speeds)
            # [context, D/2] each. They are computed and not learned, so they are no part of a checkpoint.
            self.register_buffer("cos", angles.cos().float(), persistent=False)
            self.register_buffer("sin", angles.sin().float(), persistent=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self._initialize()
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight

    def _initialize(self) -> None:
        """GPT-2's start: small random matrices, biases of 0. What is added to the residual stream begins smaller still, or
        its size would grow with the number of layers."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                added = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.layers) if added else 0.02)
            elif name.endswith(("qkv.bias", "out.bias", "up.bias", "down.bias")):
                nn.init.zeros_(parameter)

    def features(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> what the output head reads, [B, T, hidden]. Raises ValueError for more tokens than `context`."""
        if tokens.ndim != 2:
            raise ValueError(f"GPT: tokens must be [sequences, tokens], got the shape {list(tokens.shape)}")
        T = tokens.shape[1]
        if not 1 <= T <= self.config.context:
            raise ValueError(f"GPT: a sequence must have 1 to {self.config.context:,} tokens (context), got {T:,}")
        x, angles = self.embedding(tokens), None
        if self.config.positions == "learned":
            x = x + self.position_embedding.weight[:T]
        else:
            angles = self.cos[:T], self.sin[:T]
        for block in self.blocks:
            if self.recompute and self.training:
                x = checkpoint(block, x, angles, self.operations, use_reentrant=False)
            else:
                x = block(x, angles, self.operations)
        return self.norm(x, self.operations)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The logits [B, T, V] of the token that follows each of tokens [B, T]; with targets [B, T], int64 ids of the tokens
        that did follow, the mean loss in nats per token instead. Raises ValueError for more tokens than `context`."""
        x = self.features(tokens)
        return self.head(x) if targets is None else self.operations.loss(x, self.head.weight, targets)

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, *, temperature: float = 1.0, top_k: int = 0, generator: Generator | None = None
    ) -> Tensor:  # fmt: skip
        """tokens [B, T] followed by `count` drawn ones, [B, T + count]. The model looks back at most `context` tokens.

        temperature  the logits are divided by it: below 1 likely tokens become likelier; 0 always takes the likeliest
        top_k        draw from the k likeliest tokens only; 0 for all
        Nothing is kept between tokens (no KV cache), so each costs a whole forward pass. Raises ValueError.
        """
        if temperature < 0:
            raise ValueError(f"generate: temperature must be 0 or more, got {temperature!r}")
        whole("generate", "top_k", top_k, 0, self.config.vocab_size)
        for _ in range(whole("generate", "count", count, 0)):
            last = self.features(tokens[:, -self.config.context :])[:, -1]  # only the last token's logits are needed
            logits = self.head(last).float()
            if top_k:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
            if temperature == 0:
                drawn = logits.argmax(-1, keepdim=True)
            else:
                drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, drawn), dim=1)
        return tokens
