"""Dropout: what it means, random numbers included, on which inputs it is judged, and the least it must move."""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gpukit.op import Cost, Op

P, SEED = 0.1, 20_111_112

# Philox-4x32 of Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405: multipliers, and what the key grows by.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a b, both below 2^32; int64 would overflow, so by halves."""
    high = ((a >> 16) * b + (((a & 0xFFFF) * b) >> 16)) >> 16
    return high, (a * b) & _LOW


def philox(seed: int, counter: tuple[Tensor, ...], rounds: int) -> tuple[Tensor, ...]:
    """Four random numbers of 32 bits for each counter of four such numbers; all int64, of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(rounds):
        (high0, low0), (high2, low2) = _product(_MULTIPLIERS[0], c0), _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def kept(shape: tuple[int, ...], p: float, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Which elements of a tensor of that shape are kept, bool: element i takes word `i // 1024 % 4` of Philox' 7 rounds for
    the counter (i % 1024, i // 4096, 0, 0), and is kept where its upper 24 bits are p 2^24 or more."""
    i = torch.arange(math.prod(shape), device=device)
    words = philox(seed, (i % 1024, i // 4096, torch.zeros_like(i), torch.zeros_like(i)), rounds=7)
    word = torch.stack(words).gather(0, (i // 1024 % 4).unsqueeze(0)).squeeze(0)
    return (word >> 8 >= round(p * 2**24)).view(shape)


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """x / (1 - p) where `kept`, else 0, for p rounded to 24 bits."""
    scale = 2**24 / max(2**24 - round(p * 2**24), 1)
    return torch.where(kept(x.shape, p, seed, x.device), x * scale, torch.zeros_like(x))


def library(x: Tensor, p: float, seed: int) -> Tensor:
    """PyTorch's fused dropout, which draws other numbers and keeps a mask of a byte an element for its gradient."""
    return F.dropout(x, p)


def by_hand(x: Tensor, p: float, seed: int) -> Tensor:
    """Dropout as one would write it in PyTorch: random numbers, a comparison, a product and a division."""
    return x * (torch.rand_like(x) >= p) / (1 - p)


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, float, int]:
    """x [shape] on the CPU, p and a seed. Normal noise, the first row large."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x.view(-1, shape[-1])[:1] *= 10_000
    return x.to(dtype), P, SEED


def cost(shape: tuple[int, ...], dtype: torch.dtype) -> Cost:
    """Forward, and backward: one tensor read, one written, a product an element; random numbers are integer work."""
    elements = math.prod(shape)
    return Cost(elements * dtype.itemsize, elements * dtype.itemsize, elements)


def observed(inputs: tuple[Tensor, float, int], y: Tensor) -> tuple[Tensor, Tensor]:
    """What all dropouts share: the values of what is kept (put in for the others), and which share that is, to 1/20."""
    x, p, _ = inputs
    zeros = y == 0
    share = 1 - (zeros.double().mean() - (x == 0).double().mean())
    return torch.where(zeros, x / (1 - p), y), (share * 20).round()


OP = Op(
    name="dropout",
    reference=dropout,
    library=library,
    make_inputs=make_inputs,
    cost=cost,
    cost_bwd=cost,
    test_shapes=((1, 1), (2, 1), (6, 64), (5, 63), (2, 3, 781), (3, 5000)),
    bench_shapes=((4096, 4096), (16384, 4096)),
    peers={"torch": by_hand, "compile": library},
    observed=observed,
)
