"""Tiles, waves, order and reuse of a tiled matmul C [M, N] = A [M, K] B [K, N]: arithmetic on shapes, nothing is run.

One program computes one tile of C, BLOCK_M x BLOCK_N. Programs start in the order of their ids, as many at a time as fit
on the GPU; here all of them take equally long, so that they come in waves. Where the numbers are odd and why that is slow:
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass


def cdiv(n: int, block: int) -> int:
    """How many blocks hold n elements, the last of them perhaps not full."""
    return -(-n // block)


@dataclass(frozen=True)
class Tiling:
    """C [M, N] in tiles of BLOCK_M x BLOCK_N on a GPU with `sms` SMs that hold `programs_per_sm` programs each.

    Raises ValueError for a number that is not a whole one, at least 1.
    """

    M: int
    N: int
    BLOCK_M: int
    BLOCK_N: int
    sms: int
    programs_per_sm: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"tiling: {name} must be a whole number, at least 1, got {value!r}")

    @property
    def num_m(self) -> int:
        return cdiv(self.M, self.BLOCK_M)

    @property
    def num_n(self) -> int:
        return cdiv(self.N, self.BLOCK_N)

    @property
    def tiles(self) -> int:
        return self.num_m * self.num_n

    @property
    def slots(self) -> int:
        """Programs that run at a time."""
        return self.sms * self.programs_per_sm

    @property
    def waves(self) -> int:
        return cdiv(self.tiles, self.slots)

    @property
    def tail(self) -> int:
        """Programs in the last wave."""
        return self.tiles - (self.waves - 1) * self.slots

    def programs(self, wave: int) -> range:
        """The ids that run in `wave`, counted from 0. Raises IndexError where there is no such wave."""
        if not 0 <= wave < self.waves:
            raise IndexError(f"tiling: wave must be 0 to {self.waves - 1}, got {wave}")
        return range(wave * self.slots, min((wave + 1) * self.slots, self.tiles))

    def sm(self, pid: int) -> int:
        """The SM of a program, if each wave is dealt out like cards. Real GPUs deal in an order of their own."""
        return pid % self.slots % self.sms

    @property
    def tile_efficiency(self) -> float:
        """The share of the tiles' area that lies inside C."""
        return self.M * self.N / (self.tiles * self.BLOCK_M * self.BLOCK_N)

    @property
    def wave_efficiency(self) -> float:
        """The share of the slots, over all waves, that have a tile to compute."""
        return self.tiles / (self.waves * self.slots)

    @property
    def efficiency(self) -> float:
        """The share of the time and of the SMs that goes into elements of C: at most this much of the peak is left."""
        return self.tile_efficiency * self.wave_efficiency


@dataclass(frozen=True)
class Grid:
    """A launch grid over a tensor [N] or [M, N]: along each axis, program i has the lanes i * BLOCK to i * BLOCK + BLOCK - 1,
    and those past the tensor's end are masked off."""

    shape: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """Programs along each axis."""
        return tuple(-(-n // b) for n, b in zip(self.shape, self.block, strict=True))

    @property
    def programs(self) -> int:
        return math.prod(self.size)

    def ids(self, program: int) -> tuple[int, ...]:
        """The program ids of a program by its number. The grid's first axis moves fastest, as at a launch."""
        ids = []
        for n in self.size:
            program, i = divmod(program, n)
            ids.append(i)
        return tuple(ids)

    def lanes(self, program: int) -> list[range]:
        """Along each axis the offsets of its lanes, those past the end included."""
        return [range(i * b, i * b + b) for i, b in zip(self.ids(program), self.block, strict=True)]

    def owns(self, program: int) -> list[range]:
        """Along each axis the offsets of its lanes that have an element."""
        return [
            range(lanes.start, min(lanes.stop, n)) for lanes, n in zip(self.lanes(program), self.shape, strict=True)
        ]


def matmul_reads(M: int, N: int, K: int, BLOCK_M: int, BLOCK_N: int, itemsize: int) -> int:
    """Bytes of A and B that all programs together load: A once for each column of tiles, B once for each row of tiles."""
    num_m, num_n = cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)
    return (M * K * num_n + K * N * num_m) * itemsize


def tile_shared_bytes(BLOCK_M: int, BLOCK_N: int, BLOCK_K: int, num_stages: int, itemsize: int) -> int:
    """Shared memory for the tiles of A and B, of `num_stages` steps along K at a time."""
    return num_stages * (BLOCK_M + BLOCK_N) * BLOCK_K * itemsize


def align_rows(N: int, itemsize: int, alignment: int) -> tuple[int, int]:
    """For rows of N elements: the widest load in bytes, at most `alignment`, that every row of a matrix without gaps may
    begin with, and the stride in elements, at least N, at which every row begins at a multiple of `alignment` bytes.

    itemsize and alignment are powers of two, alignment is at least itemsize; row 0 begins at a multiple of alignment.
    """
    lowest_bit = N * itemsize & -(N * itemsize)
    lanes = alignment // itemsize
    return min(lowest_bit, alignment), cdiv(N, lanes) * lanes


def grouped(pid: int, num_m: int, num_n: int, group_m: int) -> tuple[int, int]:
    """(pid_m, pid_n) of program `pid`: `group_m` rows of tiles at a time, down each column before the next one.

    group_m = 1 is row by row; group_m >= num_m is column by column. The last group may have fewer rows.
    Source: https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html#l2-cache-optimizations
    """
    first = pid // (group_m * num_n) * group_m
    rows = min(num_m - first, group_m)
    inside = pid % (group_m * num_n)
    return first + inside % rows, inside // rows


def program_order(num_m: int, num_n: int, group_m: int = 1) -> list[tuple[int, int]]:
    """(pid_m, pid_n) of all programs in the order in which they start. Raises ValueError for a group_m below 1."""
    if group_m < 1:
        raise ValueError(f"program_order: group_m must be at least 1, got {group_m}")
    return [grouped(pid, num_m, num_n, group_m) for pid in range(num_m * num_n)]


# ---- which tiles of A and B are in L2 --------------------------------------------------------------------------------

Tile = tuple[str, int, int]  # ("A", m, k) or ("B", k, n)


@dataclass(frozen=True)
class CacheStep:
    """All programs of a wave take step k together: each asks for its tile of A and its tile of B.

    missed  the tiles that came from memory, found those that were in L2 already; a tile that several programs ask for in
            one step is read once, and the others find it
    held    what is in L2 afterwards, or None if that is not kept
    """

    wave: int
    k: int
    programs: tuple[tuple[int, int], ...]
    missed: frozenset[Tile]
    found: frozenset[Tile]
    held: frozenset[Tile] | None

    @property
    def requests(self) -> int:
        return 2 * len(self.programs)


def play(
    num_m: int, num_n: int, num_k: int, *, group_m: int, slots: int, capacity: int, keep: bool = True
) -> list[CacheStep]:
    """Every step of a matmul with num_m x num_n programs of num_k steps, `slots` at a time, on an L2 of `capacity` tiles
    that gives up the tile that was not used for longest. Tiles of A and of B are taken to be of one size.

    keep  whether each step says what L2 holds
    """
    order = program_order(num_m, num_n, group_m)
    cache: OrderedDict[Tile, None] = OrderedDict()
    steps = []
    for wave, first in enumerate(range(0, len(order), slots)):
        programs = tuple(order[first : first + slots])
        rows, columns = dict.fromkeys(m for m, _ in programs), dict.fromkeys(n for _, n in programs)
        for k in range(num_k):
            missed, found = [], []
            for tile in [*(("A", m, k) for m in rows), *(("B", k, n) for n in columns)]:
                if tile in cache:
                    cache.move_to_end(tile)
                    found.append(tile)
                else:
                    cache[tile] = None
                    missed.append(tile)
                    if len(cache) > capacity:
                        cache.popitem(last=False)
            held = frozenset(cache) if keep else None
            steps.append(CacheStep(wave, k, programs, frozenset(missed), frozenset(found), held))
    return steps


def hit_rate(steps: list[CacheStep]) -> float:
    """The share of the programs' requests that L2 answered."""
    return 1 - sum(len(step.missed) for step in steps) / sum(step.requests for step in steps)
