"""PyTorch's caching allocator for GPU memory, played through on paper: which block a tensor gets, and what is left between.

The GPU's own allocation (cudaMalloc) waits for all work to end, so PyTorch asks it for large *segments*, cuts *blocks* from
them and keeps what is freed for the next tensor. Memory that it keeps and nobody uses is *reserved*, not *allocated*.

Rules, by default: sizes are rounded up to 512 bytes. Tensors of up to 1 MiB share segments of 2 MiB, those below 10 MiB
segments of 20 MiB; a larger one gets a segment of its own, rounded up to 2 MiB. A tensor takes the smallest free block that
holds it, which is split if more than 1 MiB is left (512 bytes among the small). Free neighbors in one segment become one
block; segments never join and never move.

Of equal blocks the lowest address is taken. Where the driver puts segments cannot be known, so here that is the oldest
one's. On an H200, of three random runs of 1,500 steps two were equal to this model block by block in every step, the third
until such a tie; the bytes reserved were equal in all (gpukit/results/h200/allocator.csv).
Source: https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
_ROUND, _SMALL, _SMALL_SEGMENT = 512, MIB, 2 * MIB
_LARGE_SEGMENT, _OWN_SEGMENT, _ROUND_LARGE = 20 * MIB, 10 * MIB, 2 * MIB


class OutOfMemory(RuntimeError):
    """No block fits and the GPU has no room for another segment."""


@dataclass
class Block:
    size: int  # bytes
    name: str | None = None  # of the tensor in it; None: free


@dataclass
class Segment:
    """Memory that the GPU gave in one piece; its blocks, in the order of their addresses, fill it."""

    blocks: list[Block]
    small: bool

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def free(self) -> bool:
        return len(self.blocks) == 1 and self.blocks[0].name is None


class Allocator:
    """`capacity_bytes` is what the GPU can give to PyTorch.

    segments         the memory map, oldest first
    allocated_bytes  in blocks with a tensor; reserved_bytes in all segments; `peak_reserved_bytes` at most so far
    """

    def __init__(self, capacity_bytes: int):
        if capacity_bytes <= 0:
            raise ValueError(f"allocator: capacity_bytes must be positive, got {capacity_bytes!r}")
        self.capacity_bytes = capacity_bytes
        self.segments: list[Segment] = []
        self.peak_reserved_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        return sum(block.size for segment in self.segments for block in segment.blocks if block.name is not None)

    @property
    def largest_free_bytes(self) -> int:
        """The largest tensor that fits without another segment."""
        return max((b.size for s in self.segments for b in s.blocks if b.name is None), default=0)

    def map(self) -> list[list[tuple[str | None, int]]]:
        """The segments as lists of (name or None, bytes): a picture of this moment."""
        return [[(block.name, block.size) for block in segment.blocks] for segment in self.segments]

    def malloc(self, name: str, size: int) -> None:
        """Place a tensor of `size` bytes. Raises OutOfMemory, and ValueError for a size or a name that cannot be."""
        if size <= 0:
            raise ValueError(f"allocator: size must be positive, got {size!r}")
        if self._find(name):
            raise ValueError(f"allocator: a tensor called {name!r} is there already")
        rounded = -(-size // _ROUND) * _ROUND
        small = rounded <= _SMALL
        segment, index = self._best_fit(rounded, small) or self._grow(rounded, small, size)
        block = segment.blocks[index]
        rest = block.size - rounded
        if rest >= _ROUND if small else rest > _SMALL:
            segment.blocks[index : index + 1] = [Block(rounded, name), Block(rest)]
        else:
            block.name = name

    def free(self, name: str) -> None:
        """Give a tensor's block back, to the allocator and not to the GPU. Raises ValueError if there is none."""
        found = self._find(name)
        if not found:
            raise ValueError(f"allocator: there is no tensor called {name!r}")
        segment, index = found
        segment.blocks[index].name = None
        for left in (index, index - 1):
            if 0 <= left < len(segment.blocks) - 1 and all(b.name is None for b in segment.blocks[left : left + 2]):
                segment.blocks[left].size += segment.blocks.pop(left + 1).size

    def empty_cache(self) -> None:
        """Return whole free segments to the GPU: what PyTorch does by itself before it gives up."""
        self.segments = [segment for segment in self.segments if not segment.free]

    def _best_fit(self, size: int, small: bool) -> tuple[Segment, int] | None:
        fits = [
            (block.size, order, index)
            for order, segment in enumerate(self.segments)
            for index, block in enumerate(segment.blocks)
            if segment.small == small and block.name is None and block.size >= size
        ]
        if not fits:
            return None
        _, order, index = min(fits)
        return self.segments[order], index

    def _grow(self, rounded: int, small: bool, size: int) -> tuple[Segment, int]:
        own = -(-rounded // _ROUND_LARGE) * _ROUND_LARGE
        wanted = _SMALL_SEGMENT if small else _LARGE_SEGMENT if rounded < _OWN_SEGMENT else own
        if self.reserved_bytes + wanted > self.capacity_bytes:
            self.empty_cache()
        if self.reserved_bytes + wanted > self.capacity_bytes:
            idle = self.reserved_bytes - self.allocated_bytes
            raise OutOfMemory(
                f"tried to allocate {size / MIB:,.0f} MiB. The GPU has {self.capacity_bytes / MIB:,.0f} MiB, of which "
                f"{(self.capacity_bytes - self.reserved_bytes) / MIB:,.0f} MiB are free. {self.allocated_bytes / MIB:,.0f} "
                f"MiB are allocated, and {idle / MIB:,.0f} MiB are reserved and unallocated; the largest piece of that has "
                f"{self.largest_free_bytes / MIB:,.0f} MiB"
            )
        segment = Segment([Block(wanted)], small)
        self.segments.append(segment)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return segment, 0

    def _find(self, name: str) -> tuple[Segment, int] | None:
        for segment in self.segments:
            for index, block in enumerate(segment.blocks):
                if block.name == name:
                    return segment, index
        return None
