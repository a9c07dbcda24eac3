"""A cache of keys and values: what quantising it means, and a small language model that decodes with one or without."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] as int8 [..., D] and scales [...] in float32: x is about q scale, the largest of the D numbers at 127."""
    scales = x.float().abs().amax(-1) / 127
    q = x.float() / torch.where(scales == 0, 1, scales)[..., None]
    return torch.floor(q + 0.5).clamp(-127, 127).to(torch.int8), scales


def dequantize(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [..., D] in dtype that q [..., D] and scales [...] stand for."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (q.to(wide) * scales.to(wide)[..., None]).to(dtype)


class SmallModel(nn.Module):
    """A decoder-only language model, as small as possible: embeddings of tokens and places, blocks of attention and an
    MLP, logits. Weights are random: what it says means nothing, and each token depends on all before it.

    `model(tokens)` sees whole sequences [B, T] and returns logits [B, T, vocabulary]. `model(tokens, caches)` sees what
    follows the tokens in `caches`, one gpukit.kernels.KVCache for each block, and appends to them.
    """

    def __init__(
        self, vocabulary: int = 64, layers: int = 2, heads: int = 4, kv_heads: int = 2, head_size: int = 16,
        max_tokens: int = 128, seed: int = 0,
    ):  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.head_size, self.layers = heads, kv_heads, head_size, layers
        hidden = heads * head_size
        self.token, self.place = nn.Embedding(vocabulary, hidden), nn.Embedding(max_tokens, hidden)
        self.qkv = nn.ModuleList(nn.Linear(hidden, (heads + 2 * kv_heads) * head_size) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(hidden, 4 * hidden) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * hidden, hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                # Wide enough that the logits are far apart and one cannot guess the next token from the last alone.
                scale = 2 / weight.shape[-1] ** 0.5 if weight.ndim == 2 else 0.1
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)

    def forward(self, tokens: Tensor, caches: Sequence | None = None, counts: Sequence[int] | None = None) -> Tensor:
        """counts: how many of the tokens of each sequence are real, the rest being padding; default: all."""
        B, T = tokens.shape
        places = torch.arange(T, device=tokens.device)
        if caches is not None:
            places = places + caches[0].lengths[:, None]
        x = self.token(tokens) + self.place(places)
        for i in range(self.layers):
            heads = self.qkv[i](_normed(x)).view(B, T, -1, self.head_size).transpose(1, 2)
            q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            if caches is None:
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                o = caches[i].attend(q, k, v, counts)
            x = x + self.out[i](o.transpose(1, 2).reshape(B, T, -1))
            x = x + self.down[i](F.gelu(self.up[i](_normed(x))))
        return self.head(_normed(x))


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


@torch.no_grad()
def generate(model: SmallModel, prompt: Tensor, new_tokens: int) -> Tensor:
    """The most likely continuation [B, new_tokens] of prompt [B, T], without a cache: each token costs a pass over all
    before it."""
    tokens = prompt
    for _ in range(new_tokens):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens[:, prompt.shape[1] :]
