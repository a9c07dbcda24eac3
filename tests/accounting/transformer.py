"""A decoder-only transformer in plain PyTorch, built from a Config: what the calculators' counts are held against.

Each operation runs under a name, `op("mlp")`, the names of gpukit.accounting.memory.block_activations.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpukit.accounting.memory import Run
from gpukit.accounting.models import Config

_current = "other"


@contextmanager
def op(name: str):
    global _current
    before, _current = _current, name
    try:
        yield
    finally:
        _current = before


class Saved:
    """Counts the bytes that autograd keeps inside the block, by operation; each storage once, parameters and `constants`
    (the causal mask) not at all."""

    def __init__(self, module: nn.Module, constants=()):
        self.bytes: dict[str, int] = defaultdict(int)
        self._skip = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers(), *constants)}
        self._held = []  # a storage that was freed could come again under the same address

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._skip and tensor.numel() > 1:
            self._skip.add(storage.data_ptr())
            self._held.append(storage)
            self.bytes[_current] += storage.nbytes()
        return tensor


@torch.library.custom_op("gpukit_tests::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """y = x w / rms(x), and 1 / rms(x) in fp32. As one operation it keeps x and 1 / rms(x) for the backward pass, like
    PyTorch's fused kernel on a GPU and the course's own; elsewhere PyTorch takes it apart and keeps more."""
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    return (x * rstd).to(x.dtype) * weight, rstd


@torch.library.custom_op("gpukit_tests::rms_norm_backward", mutates_args=())
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    normed, dn = x * rstd, dy * weight
    dx = rstd * (dn - normed * (dn * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)


rms_norm.register_fake(lambda x, weight: (torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)))
rms_norm_backward.register_fake(lambda dy, x, weight, rstd: (torch.empty_like(x), torch.empty_like(weight)))
rms_norm.register_autograd(
    lambda ctx, dy, _: rms_norm_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]),
)


class RMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6) if x.is_cuda else rms_norm(x, self.weight)[0]


def norm(c: Config, size: int) -> nn.Module:
    return nn.LayerNorm(size) if c.norm == "layernorm" else RMSNorm(size)


def dropout(x: Tensor, run: Run) -> Tensor:
    # F.dropout is this on a GPU; on a CPU it keeps a mask of x's dtype, where this keeps one byte an element.
    return torch.native_dropout(x, 0.1, True)[0] if run.dropout else x


class Attention(nn.Module):
    def __init__(self, c: Config, run: Run):
        super().__init__()
        self.c, self.run = c, run
        qkv_bias, out_bias = c.biases != "none", c.biases == "all"
        if c.kv_rank:
            if c.q_rank:
                self.q_down = nn.Linear(c.hidden, c.q_rank, bias=False)
                self.q_norm = norm(c, c.q_rank)
            self.q = nn.Linear(c.q_rank or c.hidden, c.heads * c.qk_size, bias=False)
            self.kv_down = nn.Linear(c.hidden, c.kv_rank, bias=False)
            self.k_rope = nn.Linear(c.hidden, c.rope_size, bias=False) if c.rope_size else None
            self.kv_norm = norm(c, c.kv_rank)
            self.kv_up = nn.Linear(c.kv_rank, c.heads * (c.head_size + c.value_size), bias=False)
        else:
            self.q = nn.Linear(c.hidden, c.heads * c.head_size, bias=qkv_bias)
            self.k = nn.Linear(c.hidden, c.kv_heads * c.head_size, bias=qkv_bias)
            self.v = nn.Linear(c.hidden, c.kv_heads * c.head_size, bias=qkv_bias)
        self.out = nn.Linear(c.heads * c.value_size, c.hidden, bias=out_bias)

    def forward(self, x: Tensor) -> Tensor:
        c, run = self.c, self.run
        B, T, _ = x.shape
        with op("qkv projection"):
            q, k, v = self.mla(x) if c.kv_rank else (self.q(x), self.k(x), self.v(x))
        q, k, v = (
            t.view(B, T, -1, size).transpose(1, 2) for t, size in ((q, c.qk_size), (k, c.qk_size), (v, c.value_size))
        )
        with op("attention"):
            if run.recompute == "selective":
                y = checkpoint(self.core, q, k, v, use_reentrant=False)
            else:
                y = self.core(q, k, v)
        with op("output projection"):
            return self.out(y.transpose(1, 2).reshape(B, T, -1))

    def mla(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.c
        B, T, _ = x.shape
        down = self.q_down(x) if c.q_rank else x
        kv_low = self.kv_down(x)
        with op("low-rank q and kv"):
            q = self.q(self.q_norm(down) if c.q_rank else down)
            up = self.kv_up(self.kv_norm(kv_low)).view(B, T, c.heads, -1)
        k, v = up.split((c.head_size, c.value_size), -1)
        parts = [k, self.k_rope(x).view(B, T, 1, -1).expand(-1, -1, c.heads, -1)] if c.rope_size else [k]
        return q, torch.cat(parts, -1).reshape(B, T, -1), v.reshape(B, T, -1)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.run.attention == "flash" and q.is_meta:  # where nothing chooses the GPU's kernel by itself
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        if self.run.attention == "flash":
            # Told to repeat the heads only where there are any: the CPU's kernel takes grouped heads as they are.
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        if k.shape[1] < q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        T = q.shape[2]
        mask = torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        weights = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + mask, -1)
        return dropout(weights, self.run) @ v


class MLP(nn.Module):
    def __init__(self, c: Config, width: int):
        super().__init__()
        bias = c.biases == "all"
        self.gate = nn.Linear(c.hidden, width, bias=bias) if c.glu else None
        self.up = nn.Linear(c.hidden, width, bias=bias)
        self.down = nn.Linear(width, c.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.router = nn.Linear(c.hidden, c.experts, bias=False)
        self.experts = nn.ModuleList(MLP(c, c.expert_intermediate) for _ in range(c.experts))
        self.shared = nn.ModuleList(MLP(c, c.expert_intermediate) for _ in range(c.shared_experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = torch.softmax(self.router(flat), -1, dtype=torch.float32)
        weights, chosen = scores.topk(self.c.experts_per_token)
        # Tokens in the order of their experts, each as often as it has experts, and back again.
        order = chosen.flatten().argsort()
        gathered = flat[order // self.c.experts_per_token].split(
            chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        )
        y = torch.cat([expert(rows) for expert, rows in zip(self.experts, gathered, strict=True)])[order.argsort()]
        y = (y.view(*chosen.shape, -1) * weights.to(x.dtype)[..., None]).sum(1)
        for expert in self.shared:
            y = y + expert(flat)
        return y.view_as(x)


class Block(nn.Module):
    def __init__(self, c: Config, run: Run, moe: bool = False):
        super().__init__()
        self.run = run
        self.attention_norm, self.mlp_norm = norm(c, c.hidden), norm(c, c.hidden)
        self.attention = Attention(c, run)
        self.mlp = Experts(c) if moe else MLP(c, c.intermediate)

    def forward(self, x: Tensor) -> Tensor:
        with op("attention norm"):
            y = self.attention_norm(x)
        y = self.attention(y)
        with op("attention dropout"):
            x = x + dropout(y, self.run)
        with op("mlp norm"):
            y = self.mlp_norm(x)
        with op("mlp"):
            y = self.mlp(y)
        with op("mlp dropout"):
            return x + dropout(y, self.run)


class Transformer(nn.Module):
    def __init__(self, c: Config, run: Run):
        super().__init__()
        self.run = run
        self.embedding = nn.Embedding(c.vocab_size, c.hidden)
        self.positions = nn.Embedding(c.positions, c.hidden) if c.positions else None
        self.blocks = nn.ModuleList(Block(c, run, c.is_moe(layer)) for layer in range(c.layers))
        self.norm = norm(c, c.hidden)
        self.head = nn.Linear(c.hidden, c.vocab_size, bias=False)
        if c.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, vocab_size]."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.run.recompute == "full" else block(x)
        with op("final norm"):
            x = self.norm(x)
        with op("head"):
            return self.head(x)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self(tokens)
        with op("loss"):
            logits = logits.float() if self.run.logits == "fp32" else logits
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
