"""What the cases of exercises are made of: seeded tensors by kind of argument, and how cases are named and tagged.

What exercises of several concepts take is drawn here, once for each kind of argument; a concept subclasses Inputs for what
it alone takes. Nothing here imports torch before a tensor is drawn.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading import wire
from gpukit.grading.exercise import Case

if TYPE_CHECKING:
    from torch import Tensor


def far(*shape: int, dtype: str = "float16") -> wire.Imaginary:
    """A tensor of which only the addresses exist, for `KernelExercise.huge`."""
    return wire.Imaginary(shape, dtype)


class Inputs:
    """Tensors on the CPU, the same on every machine for one state of `rng`. scale: the spread of `normal`."""

    def __init__(self, rng: Random, scale: float = 1.0):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))
        self.scale = scale

    def normal(self, *shape: int, dtype: str = "float32", scale: float | None = None) -> Tensor:
        """Normal noise about 0; drawn in float32, so that the numbers of all dtypes are the same but for rounding."""
        x = self.torch.randn(shape, generator=self.generator).mul_(self.scale if scale is None else scale)
        return x.to(getattr(self.torch, dtype))

    def like(self, x: Tensor, *shape: int) -> Tensor:
        """What goes with x, such as a weight or an upstream gradient: noise of spread 1 in x's dtype, of x's shape unless
        another is given."""
        return self.torch.randn(shape or x.shape, generator=self.generator).to(x.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: str = "int64") -> Tensor:
        """Whole numbers from low to high - 1."""
        return self.torch.randint(low, high, shape, generator=self.generator).to(getattr(self.torch, dtype))


def case(name: str, *args: Any, tags: str = "") -> Case:
    """A case that is named by hand. tags: words, with spaces between them."""
    return Case(name, args, frozenset(tags.split()))


def tensor_case(x: Tensor, *rest: Any, shown: str = "", note: str = "", tags: str = "", tail: bool = False) -> Case:
    """A case that is named after its tensors, "x [37, 781] float32, note", and tagged with the dtype of the first.

    shown  how the tensors read, where not as x and its shape
    tail   whether it is tagged "tail" if a row of x is shorter than the power of two that holds it
    """
    dtype = str(x.dtype).removeprefix("torch.")
    shorter = tail and x.shape[-1] & (x.shape[-1] - 1)
    name = listed(f"{shown or f'x {list(x.shape)}'} {dtype}", note)
    return case(name, x, *rest, tags=f"{dtype} {tags} {'tail' if shorter else ''}")


def listed(*parts: str) -> str:
    """The parts that are not empty, with commas between them."""
    return ", ".join(filter(None, parts))
