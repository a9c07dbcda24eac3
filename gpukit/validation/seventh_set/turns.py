"""Turns of loops, registers and lanes: loads in flight, spills, persistent tiles, atomics of lanes, fp64, moments, scans."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, HALF, INT32, KI, MI, SMS, Work, empty, known, normal
from gpukit.validation.seventh_set.case import case

FLIGHT, OUTER, TILES = "loads in flight", "sums of outer products", "persistent tiles in a pipeline"
LANES, LABELS = "every lane adds to its row", "tables of two labels"
MOMENTS, SIGMOIDS, RUNS = "moments by pairs", "functions of float64", "runs that are numbered"


@triton.jit
def squares_in_turns(x_ptr, y_ptr, turns, LOADS: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """A program's own stretch: each turn has LOADS loads that do not wait for one another, or is in a pipeline of STAGES."""
    first = tl.program_id(0) * turns * LOADS * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(turns, num_stages=STAGES):
        for j in tl.static_range(LOADS):
            x = tl.load(x_ptr + first + (i * LOADS + j) * BLOCK)
            total += x * x
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


def _in_flight(name: str, loads: int, stages: int) -> None:
    @case(
        f"squares of 528 stretches of 128 Ki fp32, {name}, 2 warps",
        FLIGHT,
        dict(programs=4 * SMS, each=128 * KI),
        dict(programs=3, each=16 * KI),
    )
    def _(device, programs, each):
        x, y = normal(device, programs, each, dtype=FLOAT), empty(device, programs, dtype=FLOAT)

        def run():
            turns = each // (256 * loads)
            squares_in_turns[(programs,)](x, y, turns, LOADS=loads, STAGES=stages, BLOCK=256, num_warps=2)

        return Work(run, y, lambda: x.square().sum(1))


_in_flight("1 load per turn", loads=1, stages=1)
_in_flight("8 loads per turn", loads=8, stages=1)
_in_flight("1 load per turn in a pipeline of 5", loads=1, stages=5)


@triton.jit
def outer_products(x_ptr, y_ptr, decay_ptr, s_ptr, T, A: tl.constexpr, B: tl.constexpr):
    """A state of A x B that decays, to which the product of a column and a row is added: too large for 2 warps."""
    a, b = tl.arange(0, A), tl.arange(0, B)
    state = tl.zeros((A, B), tl.float32)
    for i in range(tl.program_id(0) * T, (tl.program_id(0) + 1) * T):
        x, y = tl.load(x_ptr + i * A + a), tl.load(y_ptr + i * B + b)
        state = state * tl.load(decay_ptr + i) + x[:, None] * y[None, :]
    at = tl.program_id(0) * A * B + a[:, None] * B + b[None, :]
    tl.store(s_ptr + at, state)


@case(
    "264 sums of 256 outer products of 256 and 64 numbers fp32, in registers of 2 warps",
    OUTER,
    dict(n=2 * SMS, T=256),
    dict(n=2, T=9),
)
def _(device, n, T):
    x, y = normal(device, n, T, 256, dtype=FLOAT), normal(device, n, T, 64, dtype=FLOAT)
    decay, state = normal(device, n, T, dtype=FLOAT).sigmoid(), empty(device, n, 256, 64, dtype=FLOAT)

    def want():
        after = decay.flip(1).cumprod(1).flip(1)
        after = F.pad(after[:, 1:], (0, 1), value=1.0)
        return (x * after[:, :, None]).transpose(1, 2) @ y

    def run():
        outer_products[(n,)](x, y, decay, state, T, A=256, B=64, num_warps=2)

    return Work(run, state, want)


@triton.jit
def tiles_in_turn(x_ptr, bias_ptr, residual_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """residual + SiLU(x + bias): a fixed number of programs, which load the next tiles ahead."""
    across = N // BN
    for tile in tl.range(tl.program_id(0), M // BM * across, tl.num_programs(0), num_stages=3):
        m, n = tile // across * BM + tl.arange(0, BM), tile % across * BN + tl.arange(0, BN)
        at = m[:, None] * N + n[None, :]
        x = tl.load(x_ptr + at).to(tl.float32) + tl.load(bias_ptr + n)[None, :]
        y = tl.load(residual_ptr + at).to(tl.float32) + x * tl.sigmoid(x)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty))


@case(
    "bias, SiLU and a residual, 8192 x 7168 fp16, tiles of 16 x 256 by 264 programs, 3 stages, 8 warps",
    TILES,
    dict(M=8192, N=7168, programs=2 * SMS),
    dict(M=64, N=512, programs=3),
)
def _(device, M, N, programs):
    x, residual, y = normal(device, M, N, dtype=HALF), normal(device, M, N, dtype=HALF), empty(device, M, N, dtype=HALF)
    bias = normal(device, N, dtype=FLOAT)

    def run():
        tiles_in_turn[(programs,)](x, bias, residual, y, M, N, BM=16, BN=256, num_warps=8)

    return Work(run, y, lambda: residual.float() + F.silu(x.float() + bias))


@triton.jit
def lanes_add(x_ptr, y_ptr, N: tl.constexpr):
    """The sum of a row, to which each of its numbers is added by itself."""
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N))
    tl.atomic_add(y_ptr + tl.program_id(0) + tl.zeros((N,), tl.int32), tl.abs(x), sem="relaxed")


@case("sums of 32 Ki rows of 512 fp32, every lane adds", LANES, dict(M=32 * KI), dict(M=16))
def _(device, M):
    """The sums are not cleared by what is measured."""
    x, y = normal(device, M, 512, dtype=FLOAT), empty(device, M, dtype=FLOAT)
    return Work(lambda: lanes_add[(M,)](x, y, N=512), y, lambda: x.abs().sum(1))


@triton.jit
def count_pairs(said_ptr, right_ptr, table_ptr, CLASSES, BLOCK: tl.constexpr):
    """How often each label was said for each right one."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(right_ptr + at).to(tl.int32) * CLASSES + tl.load(said_ptr + at).to(tl.int32)
    tl.atomic_add(table_ptr + place, tl.full((BLOCK,), 1, tl.int32), sem="relaxed")


@case("table of 150 x 150 labels of 16 Mi pairs int16", LABELS, dict(n=16 * MI), dict(n=2048))
def _(device, n):
    """The counts are not cleared by what is measured."""
    right = known(device, 150, n, dtype=torch.int16)
    said = (right + (right.roll(1) % 7) * (right.roll(2) % 3)) % 150
    table = empty(device, 150, 150, dtype=INT32)

    def want():
        return torch.bincount(right.long() * 150 + said.long(), minlength=150 * 150).view(150, 150)

    return Work(lambda: count_pairs[(n // 1024,)](said, right, table, 150, BLOCK=1024), table, want)


@triton.jit
def join_moments(mean_a, square_a, count_a, mean_b, square_b, count_b):
    """The mean, the sum of squares about it, and the count of two sets together."""
    count = count_a + count_b
    apart, share = mean_b - mean_a, count_b / count
    return mean_a + apart * share, square_a + square_b + apart * apart * count_a * share, count


@triton.jit
def moments(x_ptr, mean_ptr, variance_ptr, N: tl.constexpr):
    """Mean and variance of a row, joined pair by pair."""
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N))
    mean, square, count = tl.reduce((x, tl.zeros_like(x), tl.zeros_like(x) + 1), 0, join_moments)
    tl.store(mean_ptr + tl.program_id(0), mean)
    tl.store(variance_ptr + tl.program_id(0), square / count)


@case("moments of 32 Ki rows of 2048 fp64, pair by pair, 8 warps", MOMENTS, dict(M=32 * KI), dict(M=3))
def _(device, M):
    x, mean, variance = (
        normal(device, M, 2048, dtype=torch.float64),
        empty(device, M, dtype=torch.float64),
        empty(device, M, dtype=torch.float64),
    )

    def run():
        moments[(M,)](x, mean, variance, N=2048, num_warps=8)

    return Work(run, (mean, variance), lambda: (x.mean(1), x.var(1, correction=0)))


@triton.jit
def sigmoid64(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """x / (1 + exp(-x)) in float64, whose exponential takes many instructions."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x / (1.0 + tl.exp(-x)))


@case("SiLU of 24 Mi fp64, 512 per program", SIGMOIDS, dict(n=24 * MI), dict(n=1024))
def _(device, n):
    x, y = normal(device, n, dtype=torch.float64), empty(device, n, dtype=torch.float64)
    return Work(lambda: sigmoid64[(n // 512,)](x, y, BLOCK=512), y, lambda: F.silu(x))


@triton.jit
def number_runs(x_ptr, run_ptr, count_ptr, N: tl.constexpr):
    """A run of equal numbers gets its place among the runs of its row."""
    i = tl.arange(0, N)
    at = tl.program_id(0) * N + i
    x = tl.load(x_ptr + at)
    new = (i > 0) & (x != tl.load(x_ptr + at - 1, mask=i > 0, other=0))
    number = tl.cumsum(new.to(tl.int32), 0)
    tl.store(run_ptr + at, number)
    tl.store(count_ptr + tl.program_id(0), tl.max(number, 0) + 1)


@case("runs of 16 Ki rows of 2048 int64 numbered, 2 warps", RUNS, dict(M=16 * KI, N=2048), dict(M=4, N=256))
def _(device, M, N):
    x = (normal(device, M, N) > 0).long()
    number, count = empty(device, M, N, dtype=INT32), empty(device, M, dtype=INT32)

    def want():
        found = F.pad((x[:, 1:] != x[:, :-1]).cumsum(1), (1, 0))
        return found, found[:, -1] + 1

    return Work(lambda: number_runs[(M,)](x, number, count, N=N, num_warps=2), (number, count), want)
