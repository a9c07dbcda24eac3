"""Which configuration a matmul gets: the tables, a model that ranks them, and, with autotune=True, a measurement."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gpukit import hardware
from gpukit.kernels._device import Device, for_hopper, properties
from gpukit.kernels._launch import interpreted

FP8 = torch.float8_e4m3fn
GLUON = "_matmul_hopper"


class Config(NamedTuple):
    """One way to compute a matmul. rate: about how many TFLOP/s of 16-bit operands when every SM of an H200 has such a tile;
    only their order matters."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int
    rate: float
    SPLIT_K: int = 1
    PIECES: int = 0  # not 0: by tensor descriptors, c stored in so many pieces
    FLATTEN: bool = False
    GLUON: bool = False  # by gpukit.kernels._matmul_hopper

    @property
    def descriptors(self) -> bool:
        return self.PIECES > 0


# BLOCK_K in bytes of an operand's row. Tiles of a few rows read more of b for each FLOP, and are for those that must.
HOPPER = (
    Config(128, 256, 128, 4, 4, 840, PIECES=2, GLUON=True),
    Config(128, 128, 128, 4, 6, 800, PIECES=2, GLUON=True),  # 3072 x 3072 x 3072, 4.4 waves: 87 us, 101 with 128 x 256
    Config(128, 256, 128, 8, 3, 830, PIECES=2, FLATTEN=True),
    Config(128, 128, 128, 8, 4, 720, PIECES=1),
    Config(64, 256, 128, 4, 5, 790, PIECES=4, FLATTEN=True),  # 1280 x 1280 x 1280: 10 us, 10.9 with 128 x 128
    Config(64, 128, 256, 4, 4, 640, PIECES=1, FLATTEN=True),  # 1024 x 1024 x 1024: 6.4 us, 7.9 by pointers
    Config(128, 128, 128, 4, 3, 700),  # two programs on an SM: 203 us for 4096 x 4096 x 4096, 273 with 128 x 256
    Config(64, 128, 128, 4, 4, 480),
    Config(64, 64, 128, 4, 4, 330),
    Config(16, 64, 256, 4, 4, 120),
    Config(128, 16, 256, 4, 4, 130),
)
AMPERE = (
    Config(128, 128, 64, 4, 4, 560),
    Config(64, 128, 64, 4, 4, 480),
    Config(64, 64, 64, 4, 4, 330),
    Config(16, 64, 128, 4, 4, 80),
    Config(64, 16, 128, 4, 4, 80),
)
# Triton has no tensor cores before Ampere: without them every operand is in registers.
OLDER = (Config(64, 64, 32, 4, 2, 30), Config(16, 64, 32, 4, 2, 15), Config(64, 16, 32, 4, 2, 15))
# float32 with "ieee" has no tensor cores anywhere, float64 those of Ampere and later.
PLAIN = (Config(64, 64, 64, 4, 3, 30), Config(16, 64, 64, 4, 3, 15), Config(64, 16, 64, 4, 3, 15))
INTERPRETER = (Config(32, 32, 64, 4, 1, 1),)
SPLITS = (1, 2, 4, 8, 16)
GROUP_M = 8
# From here on, in 2 M N K, descriptors gain more than they cost: on the CPU as much as three launches, which a CUDA graph takes
# out, and for operands without wide loads copies into padded rows.
WORTH_DESCRIPTORS = 2e10
WORTH_A_COPY = 4e9


@dataclass(frozen=True)
class Problem:
    """A product as far as the choice depends on it: of a [batches, M, K] and b [batches, K, N], 2 N columns if gated."""

    batches: int
    M: int
    N: int
    K: int
    dtype: torch.dtype
    gpu: Device | hardware.Gpu | None  # None: the interpreter
    precision: str = "ieee"
    gated: bool = False  # "swiglu", with two sums for each element of c
    wide: bool = False  # both operands are loaded 16 bytes at a time
    by_tma: bool = False  # tensor descriptors can be used, and are worth it
    in_gluon: bool = False  # gpukit.kernels._matmul_hopper can compute it

    def tiles(self, config: Config) -> int:
        return self.batches * -(-self.M // config.BLOCK_M) * -(-self.N // config.BLOCK_N)


def problem(a: Tensor, b: Tensor, activation: str, precision: str) -> Problem:
    """The product a @ b with what its operands' strides and the GPU allow."""
    batches, M, K = a.shape
    gated = activation == "swiglu"
    N = b.shape[2] // 2 if gated else b.shape[2]
    wide, by_tma = _wide(a) and _wide(b), _by_tma(a, b, gated)
    in_gluon = by_tma and _in_gluon(a, b, gated)
    return Problem(batches, M, N, K, a.dtype, properties(a.device), precision, gated, wide, by_tma, in_gluon)


def _candidates(given: Problem) -> list[Config]:
    """The configurations for these operands on this GPU, BLOCK_K in elements."""
    dtype = given.dtype
    if given.gpu is None:
        table = INTERPRETER
    elif dtype == torch.float64 or (dtype == torch.float32 and given.precision == "ieee"):
        table = PLAIN
    else:
        major = given.gpu.compute_capability[0]
        table = HOPPER if major >= 9 else AMPERE if major == 8 else OLDER
    configs = []
    for config in table:
        if config.descriptors and (not given.by_tma or dtype.itemsize == 4):
            continue  # tf32 operands would have to be transposed on the way
        if config.GLUON and not given.in_gluon:
            continue
        # SwiGLU has two sums in registers, and so has fp8: the one within a block of K, and the whole. float64 is as wide.
        sums = (2 if given.gated else 1) * (2 if dtype in (FP8, torch.float64) else 1)
        BLOCK_N = max(config.BLOCK_N // sums, 16)
        BLOCK_K = max(config.BLOCK_K // dtype.itemsize, 16)
        if not (given.wide or config.descriptors):
            # Single elements, each with an address of two registers: smaller blocks in more threads.
            if config.BLOCK_M * config.BLOCK_N > 128 * 128:
                continue
            BLOCK_K = min(BLOCK_K, 32)
            config = config._replace(num_warps=max(config.num_warps, config.BLOCK_M * BLOCK_N // 2048))
        configs.append(config._replace(BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K))
    return configs


def _seconds(given: Problem, config: Config) -> float:
    """A model of an H200, good enough to rank configurations: waves of tiles, each limited by its arithmetic or by what
    one SM draws from memory, and for shares of K their sums, written and read."""
    split, row_bytes = config.SPLIT_K, given.K * given.dtype.itemsize
    waves = -(-given.tiles(config) * split // (given.gpu.sms if given.gpu else 2))
    # Until a first block of K is there, and while a last tile is stored, nothing is multiplied; and groups of warps with registers
    # of their own begin later.
    ends = 2.5e-6 + config.BLOCK_M * config.BLOCK_N * 6e-11 + (1.2e-6 if config.GLUON else 0)
    arithmetic = config.BLOCK_M * config.BLOCK_N * row_bytes / (config.rate * 1e12 / 132)
    traffic = (config.BLOCK_M + config.BLOCK_N) * row_bytes / (120e9 if config.descriptors else 60e9)
    again = 0 if split == 1 else 2e-6 + given.batches * given.M * given.N * 8 * split / 4e12
    return ends + waves * max(arithmetic, traffic) / split + again


@cache
def choices(given: Problem) -> tuple[Config, ...]:
    """The configurations that can compute this product, the fastest by `_seconds` first."""
    configs = _candidates(given)
    for config in list(configs):
        # Shares of at least 512 bytes of a row, and only where tiles alone leave SMs idle.
        for split in SPLITS[1:]:
            idle = given.gpu is not None and given.tiles(config) * split <= 4 * given.gpu.sms
            if idle and not config.descriptors and given.K * given.dtype.itemsize >= 512 * split:
                configs.append(config._replace(SPLIT_K=split))
    return tuple(sorted(configs, key=lambda config: _seconds(given, config)))


def _wide(x: Tensor) -> bool:
    """Whether Triton loads x [batches, R, C] 16 bytes at a time: it looks at strides and sizes for multiples of 16."""
    batch, *strides = x.stride()
    along = strides.index(1) if 1 in strides else None
    if along is None or x.data_ptr() % 16:
        return False
    return (batch if x.shape[0] > 1 else 0) % 16 == strides[1 - along] % 16 == x.shape[1 + along] % 16 == 0


def _by_tma(a: Tensor, b: Tensor, gated: bool) -> bool:
    """Whether a [1, M, K] @ b [1, K, N] should go through tensor descriptors, copied for them if need be."""
    gpu = properties(a.device)
    batches, M, K = a.shape
    N = b.shape[2]
    if gpu is None or gpu.compute_capability[0] < 9 or batches != 1 or a.dtype.itemsize > 2 or min(M, N, K) < 128:
        return False
    if gated and N // 2 * b.dtype.itemsize % 16:
        return False  # the columns of `up` would not begin where a load can
    if not (_wide(a) and _wide(b)):
        return 2 * M * N * K >= WORTH_A_COPY
    return 2 * M * N * K >= WORTH_DESCRIPTORS or (a.is_cuda and torch.cuda.is_current_stream_capturing())


def _in_gluon(a: Tensor, b: Tensor, gated: bool) -> bool:
    """Whether gpukit.kernels._matmul_hopper can compute a @ b, which goes by tensor descriptors: it stores c by one too."""
    aligned = a.dtype.itemsize == 2 and b.shape[2] % 8 == 0
    return aligned and not gated and for_hopper(GLUON, a.device) is not None


_tuned: dict[tuple, Config] = {}


def fastest(key: tuple, configs: tuple[Config, ...], run: Callable[[Config], object]) -> Config:
    """The configuration that takes the least time here, measured once for each key. Not inside a CUDA graph's capture,
    which cannot wait for a result."""
    if key not in _tuned:
        if interpreted() or torch.cuda.is_current_stream_capturing():
            return configs[0]
        times = {}
        for config in configs:
            for _ in range(3):
                run(config)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                run(config)
            end.record()
            end.synchronize()
            times[config] = start.elapsed_time(end)
        _tuned[key] = min(times, key=times.get)
    return _tuned[key]
