"""What the kernels of notebook 05 are checked against: Triton's random numbers, in PyTorch."""

import torch
from torch import Tensor

from gpukit.reference.dropout import philox


def randint(seed: int, offsets: Tensor) -> Tensor:
    """tl.randint(seed, offsets): 32 random bits for each offset (below 2^32), as int64. As it is written in
    https://github.com/triton-lang/triton/blob/main/python/triton/language/random.py"""
    zero = torch.zeros_like(offsets, dtype=torch.int64)
    return philox(seed, (offsets.to(torch.int64) & 0xFFFFFFFF, zero, zero, zero), rounds=10)[0]


def rand(seed: int, offsets: Tensor) -> Tensor:
    """tl.rand(seed, offsets): numbers in [0, 1), float32, equal to Triton's to the bit."""
    bits = randint(seed, offsets)
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return torch.where(signed < 0, -signed - 1, signed).float() * 4.6566127342e-10


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """x of any shape: element i is kept where rand(seed, i) >= p and divided by 1 - p, and is 0 elsewhere."""
    kept = rand(seed, torch.arange(x.numel(), device=x.device)).view(x.shape) >= p
    return torch.where(kept, x * (1 / (1 - p) if p < 1 else 0.0), torch.zeros_like(x))
