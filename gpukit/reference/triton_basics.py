"""What the kernels of notebook 08 are held against: Triton's random numbers, in PyTorch."""

import torch
from torch import Tensor

# Philox 4x32 with ten rounds, Salmon et al. 2011, https://www.thesalmons.org/john/random123/papers/random123sc11.pdf,
# as in https://github.com/triton-lang/triton/blob/main/python/triton/language/random.py
_ROUNDS = 10
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_MUL_A, _MUL_B = 0xD2511F53, 0xCD9E8D57
_MASK = 0xFFFFFFFF


def _high_and_low(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of x * factor, both below 2^32; in int64, which the product does not fit."""
    low = x * (factor & 0xFFFF)
    high = x * (factor >> 16) + (low >> 16)
    return high >> 16, (high << 16 & _MASK) | (low & 0xFFFF)


def randint(seed: int, offsets: Tensor) -> Tensor:
    """tl.randint(seed, offsets): 32 random bits for each offset (below 2^32), as int64."""
    c0 = offsets.to(torch.int64) & _MASK
    c1 = c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(_ROUNDS):
        high_a, low_a = _high_and_low(c0, _MUL_A)
        high_b, low_b = _high_and_low(c2, _MUL_B)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0


def rand(seed: int, offsets: Tensor) -> Tensor:
    """tl.rand(seed, offsets): numbers in [0, 1), float32, equal to Triton's to the bit."""
    bits = randint(seed, offsets)
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return torch.where(signed < 0, -signed - 1, signed).float() * 4.6566127342e-10


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """x of any shape: element i is kept where rand(seed, i) >= p and divided by 1 - p, and is 0 elsewhere."""
    kept = rand(seed, torch.arange(x.numel(), device=x.device)).view(x.shape) >= p
    return torch.where(kept, x * (1 / (1 - p) if p < 1 else 0.0), torch.zeros_like(x))
