"""What GPUs send each other: the three collective operations of training on a ring, and a training step made of them.

    reduce-scatter  every GPU has a whole tensor; afterwards each has the sum over all GPUs, of its own share only
    all-gather      every GPU has one share; afterwards each has all of them
    all-reduce      a reduce-scatter and then an all-gather: afterwards each GPU has the whole sum

On a ring of n GPUs a tensor is cut into n shares, the last one filled up. In each round every GPU sends one share to its
neighbor; a reduce-scatter takes n - 1 rounds, and so does an all-gather. No algorithm sends less per GPU: Patarasuk and Yuan
2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpukit.accounting.arguments import MOST_PARAMETERS, choice, whole

ENGINES = ("ddp", "fsdp")


@dataclass(frozen=True)
class Step:
    """Bytes that each GPU sends in one training step, by operation."""

    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0

    @property
    def total(self) -> int:
        return self.all_reduce + self.all_gather + self.reduce_scatter


def all_gather(elements: int, gpus: int, itemsize: int) -> int:
    """Bytes that each GPU sends to gather a tensor of `elements`; a reduce-scatter of it sends as many. Raises ValueError."""
    gpus = whole("all_gather", "gpus", gpus, 1, 10**7)
    return (gpus - 1) * -(-whole("all_gather", "elements", elements, 0, MOST_PARAMETERS) // gpus) * itemsize


reduce_scatter = all_gather  # the same shares, in the same number of rounds


def all_reduce(elements: int, gpus: int, itemsize: int) -> int:
    """Bytes that each GPU sends for an all-reduce of `elements`. Raises ValueError."""
    return reduce_scatter(elements, gpus, itemsize) + all_gather(elements, gpus, itemsize)


def step(
    engine: str, parameters: int, gpus: int, *, micro_batches: int = 1, weight_bytes: int = 2, gradient_bytes: int = 4,
    reshard: bool = True,
) -> Step:  # fmt: skip
    """What each GPU sends in one training step.

    engine   "ddp": the gradients are all-reduced once, after the last micro-batch. "fsdp": in each micro-batch the weights
             are gathered for the forward pass and, with `reshard`, again for the backward pass; the gradients are
             reduce-scattered after it
    Raises ValueError.
    """
    micro_batches = whole("step", "micro_batches", micro_batches)
    if choice("step", "engine", engine, ENGINES) == "ddp":
        return Step(all_reduce=all_reduce(parameters, gpus, gradient_bytes))
    gathers = 2 if reshard else 1
    return Step(
        all_gather=micro_batches * gathers * all_gather(parameters, gpus, weight_bytes),
        reduce_scatter=micro_batches * reduce_scatter(parameters, gpus, gradient_bytes),
    )
