"""The first loss of a compiled model, beside the model's own.

A kernel that torch.compile writes may store a row and read it again, by other threads, without a barrier between
(https://github.com/pytorch/pytorch/issues/190517, open in PyTorch 2.11 to 2.13 at least). The sum of the residual stream and
its LayerNorm are such a kernel: with blocks of 2 x 2,048 numbers and 16 warps, 22% of its results are wrong on an H200, with
2 x 1,024 none. The compiler times both and takes the faster one, and the two are so near each other that it takes the wrong one
in some starts. The loss is wrong from the first step on then, by 0.3%, and grows from 9 to 47 within 20 steps, where it
should fall to 6.6; nothing is said. Two ways to compute one loss differ by less than 0.001%, so one look finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpukit.course import CourseError

if TYPE_CHECKING:
    from torch import Tensor

BOUND = 1e-3  # of the loss: 300 times what rounding explains, and a third of what that kernel did to untrained weights


class Miscompiled(CourseError):
    """The compiled model computes another loss than the model itself; the message says what helps."""


def check_first(compiled: Tensor, own: Callable[[], Tensor]) -> None:
    """Compare the loss that the compiled model gave for a batch with the model's own, which `own()` computes. Both are scalars.
    Raises Miscompiled where they are further apart than rounding explains. A NaN passes: the loop has its own words for that."""
    import torch

    with torch.no_grad():
        found, expected = compiled.item(), own().item()
    if abs(found - expected) > BOUND * abs(expected):
        raise Miscompiled(
            f"train: the compiled model's first loss is {found:.5f}, and the model's own is {expected:.5f}. torch.compile has "
            "chosen a kernel that computes wrong numbers (https://github.com/pytorch/pytorch/issues/190517), which depends on "
            "measured times. Start again: mostly it chooses another one. Or train without torch.compile"
        )
