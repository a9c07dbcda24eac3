"""What the checks of several concepts have in common beside their inputs: references, what wrong ideas are made of, rules."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence
    from gpukit.grading.exercise import Case
    from gpukit.grading.messages import LaunchFacts


def reference(name: str, arguments: int | None = None) -> Callable[..., Any]:
    """A function of gpukit.reference, "gelu.swiglu", loaded when it is called, since it imports torch.

    arguments  how many it takes of a case's; those behind, such as block sizes, say how to compute, not what
    """
    module, _, function = name.partition(".")
    return lambda *args: getattr(import_module(f"gpukit.reference.{module}"), function)(*args[:arguments])


# -------------------------------------------------------------------------------------------- what wrong ideas compute
def padding(n: int, block: int = 0) -> int:
    """Lanes past the end of n elements: in the last one of blocks, or in one block that is a power of two."""
    return -n % block if block else (1 << (n - 1).bit_length()) - n


def as_if_contiguous(x: Tensor) -> Tensor:
    """What is read of x by one who takes it for contiguous. Nothing behind x's own elements if it has no gaps."""
    return x.as_strided(x.shape, x.contiguous().stride())


def stored_like(x: Tensor, y: Tensor) -> Tensor:
    """What a contiguous result holds if y is stored at the offsets that its elements have in x."""
    memory = y.new_empty(x.numel())
    memory.as_strided(x.shape, x.stride()).copy_(y)
    return memory.view(x.shape)


def each_block(of: Callable[[Tensor], Tensor], x: Tensor, block: int) -> Tensor:
    """`of` each block of the last dimension as if there were no others, side by side."""
    import torch

    return torch.cat([of(part) for part in x.split(block, -1)], -1)


# --------------------------------------------------------------------------------------- by what they are recognized
def only(*tags: str, kind: str = "") -> Callable[[Evidence], bool]:
    """Every case that failed has one of the tags; and the first of them failed by `kind`, if that is given."""
    return lambda evidence: (
        kind in ("", evidence.kind) and all(case.tags.intersection(tags) for case in evidence.failed)
    )


# ----------------------------------------------------------------------------------------------- what launches may do
def no_atomics(sentence: str) -> Callable[[Case, tuple[LaunchFacts, ...]], tuple[str, str] | None]:
    """A rule against atomics, which add in whatever order the programs arrive. {bytes} in the sentence: how many."""

    def rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
        added = sum(launch.atomic_bytes for launch in launches)
        return ("atomics", sentence.format(bytes=f"{added:,}")) if added else None

    return rule
