"""Which lanes of a warp move together when nothing has been compiled: what Triton's compiler does by default, guessed.

Triton gives each block of pointers a blocked layout of its own ("Coalesce" pass): lanes follow the dimension along which
addresses are next to each other, and a thread takes as many neighbours as alignment and 16 bytes allow. The compiler
knows alignments from the arguments (it looks whether 16 divides them) and constants; here they are read off the addresses
that were seen, checked against the arguments. The compiled kernel (compile.py) tells what really happens.

Source: https://github.com/triton-lang/triton/blob/v3.6.0/lib/Dialect/TritonGPU/Transforms/Coalesce.cpp
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpukit.simulator.compiler.layouts import Layout
from gpukit.simulator.interpreter.addresses import Tile
from gpukit.simulator.trace.recording import Site

_VECTOR_BYTES = 16
_DIVISOR = 16  # Triton specialises arguments on being divisible by this
LANES = 32


@dataclass(frozen=True)
class Facts:
    """What the addresses of one site show.

    order       dimensions of the block, the one with neighboring elements first
    neighbours  elements next to each other along it
    aligned     bytes that divide the address of each run of neighbours, as far as the compiler can tell
    mask        elements along it that a mask turns off together
    """

    order: tuple[int, ...]
    neighbours: int
    aligned: int
    mask: int

    def per_thread(self, width: int) -> int:
        return max(1, min(self.aligned // width, self.neighbours, _VECTOR_BYTES // width))


def facts(site: Site, seen: Iterable[tuple[Tile, int]], arguments: Sequence[int]) -> Facts:
    """Facts of a site from the (tile, start) of its executions and from the kernel's integer arguments."""
    rank = len(site.shape)
    unknown = [value & -value for value in arguments if value not in (0, 1) and value % _DIVISOR]
    neighbours, aligned, mask, steps = [*site.shape], 256, max(site.shape), set()
    for tile, start in seen:
        for d in range(rank):
            if site.shape[d] > 1 and tile.strides[d] != site.width:
                neighbours[d] = 1
        steps.add(
            math.gcd(start, *(s for s, n in zip(tile.strides, site.shape, strict=True) if n > 1 and s != site.width))
        )
        edges = [e for d in range(rank) if tile.strides[d] == site.width for e in (tile.low[d], tile.high[d])]
        edges = [e for e in edges if e % max(site.shape)]
        mask = math.gcd(mask, *edges) if edges else mask
    order = tuple(sorted(range(rank), key=lambda d: (-neighbours[d], -d)))
    aligned = math.gcd(aligned, *steps)
    # A stride of 776 elements is a multiple of 8, but the compiler sees only an argument that 16 does not divide.
    if any(part <= max(1, aligned // site.width) for part in unknown) and aligned // site.width < _DIVISOR:
        aligned = site.width
    if mask % _DIVISOR and mask < site.shape[order[0]]:
        mask = 1
    return Facts(order, neighbours[order[0]], max(aligned, site.width), mask)


@lru_cache(maxsize=256)
def blocked(shape: tuple[int, ...], per_thread: int, order: tuple[int, ...], num_warps: int) -> Layout:
    """Triton's blocked layout for a block: threads go along `order`, `per_thread` elements each."""
    rank = len(shape)
    size = [1] * rank
    size[order[0]] = per_thread
    lanes, warps = [1] * rank, [1] * rank
    left_threads, left_lanes, left_warps = num_warps * LANES, LANES, num_warps
    for d in order[:-1]:
        threads = min(max(1, shape[d] // size[d]), left_threads)
        lanes[d] = min(max(threads, 1), left_lanes)
        warps[d] = min(max(threads // lanes[d], 1), left_warps)
        left_warps //= warps[d]
        left_lanes //= lanes[d]
        left_threads //= threads
    lanes[order[-1]], warps[order[-1]] = left_lanes, left_warps
    return Layout("blocked", "assumed", tuple(size), tuple(lanes), tuple(warps), order)


def assumed(sites: dict[Site, Facts], num_warps: int) -> dict[Site, tuple[Layout, int]]:
    """For each site its layout and how many elements a thread moves with one instruction."""
    found = {}
    for site, own in sites.items():
        # Accesses of one block shape that run along one dimension share the widest layout, but a store never takes more
        # than it can write at once.
        alike = [f.per_thread(s.width) for s, f in sites.items() if s.shape == site.shape and f.order == own.order]
        per_thread = min(max(alike), max(site.lanes // (num_warps * LANES), 1))
        if site.kind != "load":
            per_thread = min(per_thread, own.per_thread(site.width))
        vector = min(per_thread, own.per_thread(site.width), own.mask)
        found[site] = blocked(site.shape, per_thread, own.order, num_warps), max(1, vector)
    return found
