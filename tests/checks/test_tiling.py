"""Tiles, waves, order and reuse: the arithmetic of notebook 07, held against counting and against the trace, and what is
special about its exercises. tests/checks/test_answers.py judges the known answers of all exercises."""

import dataclasses
import itertools
import random

import pytest
import torch
import triton

import gpukit
from gpukit import hardware
from gpukit.accounting import roofline, tiling
from gpukit.accounting.roofline import Point
from gpukit.accounting.tiling import Tiling
from gpukit.checks.tiling import EXERCISES, GROUPED, MATMUL, OCCUPANCY, WAVES
from gpukit.simulator.compiler.occupancy import occupancy
from gpukit.validation.counted_kernels import matmul

A100, H200 = hardware.gpu("a100"), hardware.gpu("h200")


# ---- tiles and waves -------------------------------------------------------------------------------------------------


def test_the_sizes_of_the_lesson():
    fits, over = (Tiling(n, n, 256, 128, A100.sms) for n in (1792, 1793))
    assert (fits.num_m, fits.num_n, fits.tiles, fits.waves, fits.tail) == (7, 14, 98, 1, 98)
    assert (over.num_m, over.num_n, over.tiles, over.waves, over.tail) == (8, 15, 120, 2, 12)
    assert fits.tile_efficiency == 1
    assert fits.efficiency == pytest.approx(98 / 108)
    assert over.efficiency == pytest.approx(1793**2 / (2 * 108 * 256 * 128))


@pytest.mark.parametrize(
    ("M", "N", "BLOCK_M", "BLOCK_N", "sms", "per_sm"),
    ((1, 1, 16, 16, 3, 1), (65, 130, 64, 32, 4, 2), (7, 5, 1, 1, 2, 3)),
)
def test_waves_hold_every_program_once_and_efficiency_is_what_is_used(M, N, BLOCK_M, BLOCK_N, sms, per_sm):
    t = Tiling(M, N, BLOCK_M, BLOCK_N, sms, per_sm)
    programs = [pid for wave in range(t.waves) for pid in t.programs(wave)]
    assert programs == list(range(t.tiles))
    assert len(t.programs(t.waves - 1)) == t.tail
    assert all(0 <= t.sm(pid) < sms for pid in programs)
    for wave in range(t.waves):
        on = [t.sm(pid) for pid in t.programs(wave)]
        assert max(on.count(sm) for sm in set(on)) <= per_sm
    assert t.efficiency == pytest.approx(M * N / (t.waves * t.slots * BLOCK_M * BLOCK_N))
    with pytest.raises(IndexError, match=f"wave must be 0 to {t.waves - 1}, got {t.waves}"):
        t.programs(t.waves)


@pytest.mark.parametrize("wrong", ({"M": 0}, {"BLOCK_N": -1}, {"sms": 1.5}))
def test_tiling_says_which_number_is_wrong(wrong):
    (name,) = wrong
    arguments = {"M": 4, "N": 4, "BLOCK_M": 2, "BLOCK_N": 2, "sms": 1} | wrong
    with pytest.raises(ValueError, match=f"tiling: {name} must be a whole number, at least 1, got "):
        Tiling(**arguments)


# ---- traffic ---------------------------------------------------------------------------------------------------------


def traced(M, N, K, BM, BN, BK=32, group=1, **options):
    a, b = torch.zeros(M, K, dtype=torch.float16), torch.zeros(K, N, dtype=torch.float16)
    c = torch.empty(M, N, dtype=torch.float16)
    grid = (triton.cdiv(M, BM) * triton.cdiv(N, BN), 1)
    with gpukit.trace(**options) as t:
        matmul[grid](a, b, c, M, N, K, K, 1, N, 1, BM=BM, BN=BN, BK=BK, GROUP_M=group, SPLIT_K=1)
    return t.launches[0]


@pytest.mark.parametrize(
    ("M", "N", "K", "BM", "BN"), ((64, 64, 64, 16, 16), (96, 80, 33, 32, 16), (50, 70, 40, 64, 32))
)
def test_reads_are_those_that_a_tiled_kernel_makes(M, N, K, BM, BN):
    assert traced(M, N, K, BM, BN).load_bytes == tiling.matmul_reads(M, N, K, BM, BN, itemsize=2)


def test_a_tile_of_t_reads_t_times_less():
    n = 4096
    naive = tiling.matmul_reads(n, n, n, 1, 1, 2)
    assert naive == 2 * n**3 * 2
    for T in (16, 64, 128):
        assert naive / tiling.matmul_reads(n, n, n, T, T, 2) == T


def test_shared_bytes_are_what_the_compiler_takes():
    assert tiling.tile_shared_bytes(128, 256, 64, num_stages=3, itemsize=2) == 147_456


# ---- alignment -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("itemsize", (1, 2, 4, 8))
@pytest.mark.parametrize("alignment", (8, 16, 128))
def test_align_rows_by_looking_at_every_row(itemsize, alignment):
    for N in (1, 2, 3, 7, 8, 12, 63, 64, 65, 1792, 1793):
        widest, stride = tiling.align_rows(N, itemsize, alignment)
        starts = [row * N * itemsize for row in range(256)]
        assert all(start % widest == 0 for start in starts)
        assert widest == alignment or any(start % (2 * widest) for start in starts)
        assert stride >= N and stride * itemsize % alignment == 0
        assert not any(s * itemsize % alignment == 0 for s in range(N, stride))


# ---- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_m", "num_n"), ((1, 1), (9, 9), (5, 8), (8, 5), (7, 1), (1, 7)))
def test_every_order_visits_every_tile_once(num_m, num_n):
    tiles = list(itertools.product(range(num_m), range(num_n)))
    for group_m in (1, 2, 3, 4, num_m, num_m + 3):
        assert sorted(tiling.program_order(num_m, num_n, group_m)) == tiles
    assert tiling.program_order(num_m, num_n) == tiles
    assert tiling.program_order(num_m, num_n, num_m) == sorted(tiles, key=lambda tile: tile[::-1])
    with pytest.raises(ValueError, match="group_m must be at least 1, got 0"):
        tiling.program_order(num_m, num_n, 0)


def test_grouped_order_is_the_kernels():
    """Stores in the order of the programs say which tile each of them computes."""
    launch = traced(80, 48, 16, 16, 16, BK=16, group=2, detail=True)
    stores = [event for event in launch.events if event.kind == "store"]
    order = [(int(e.offsets.min()) // 48 // 16, int(e.offsets.min()) % 48 // 16) for e in stores]
    assert order == tiling.program_order(5, 3, 2)


# ---- L2 --------------------------------------------------------------------------------------------------------------


def reads(steps):
    return sum(len(step.missed) for step in steps)


def test_the_toy_of_the_lesson():
    toy = {"num_m": 9, "num_n": 9, "num_k": 9, "slots": 9}
    assert {g: reads(tiling.play(**toy, group_m=g, capacity=54)) for g in (1, 3, 9)} == {1: 810, 3: 324, 9: 810}
    assert reads(tiling.play(**toy, group_m=1, capacity=90)) == 162  # B and a row of A fit: everything once
    steps = tiling.play(**toy, group_m=3, capacity=54)
    assert tiling.hit_rate(steps) == pytest.approx(1 - 324 / (2 * 9**3))


def test_l2_never_holds_more_than_it_can_and_always_what_was_just_used():
    for step in tiling.play(6, 5, 4, group_m=2, slots=7, capacity=16):
        assert len(step.held) <= 16
        assert step.missed | step.found <= step.held
        assert not step.missed & step.found
        assert step.missed | step.found == {("A", m, step.k) for m, _ in step.programs} | {
            ("B", step.k, n) for _, n in step.programs
        }


def test_a_large_cache_reads_everything_once_and_none_reads_every_request():
    assert reads(tiling.play(6, 5, 4, group_m=2, slots=7, capacity=1000)) == 6 * 4 + 4 * 5
    assert reads(tiling.play(6, 5, 4, group_m=1, slots=1, capacity=1)) == 2 * 6 * 5 * 4
    assert [s.held for s in tiling.play(2, 2, 2, group_m=1, slots=1, capacity=1, keep=False)] == [None] * 8


@pytest.mark.parametrize("group", (1, 4))
def test_the_tile_cache_agrees_with_the_trace(group):
    """A small GPU whose L2 holds 24 tiles of 32 x 32 float16, and the same matmul through the simulator's sectors."""
    tile_bytes = 32 * 32 * 2
    toy = dataclasses.replace(H200, key="toy", sms=8, l2_bytes=24 * tile_bytes)
    launch = traced(256, 256, 256, 32, 32, group=group)
    found = launch.traffic(toy, compiled=False)
    slots = toy.sms * found.programs_per_sm
    steps = tiling.play(8, 8, 8, group_m=group, slots=slots, capacity=24)
    assert found.dram_read_bytes == pytest.approx(reads(steps) * tile_bytes, rel=0.15)


# ---- roofline --------------------------------------------------------------------------------------------------------


def test_the_roof():
    ridge = H200.ridge("bf16")
    assert roofline.attainable(H200, "bf16", ridge / 2) == pytest.approx(H200.peak("bf16") / 2)
    assert roofline.attainable(H200, "bf16", 2 * ridge) == H200.peak("bf16")
    assert [roofline.limit(H200, "bf16", x) for x in (ridge / 2, 2 * ridge)] == ["memory", "compute"]


def test_a_point_lies_where_its_time_says_or_on_the_roof():
    point = Point("copy", flops=1e9, bytes=4.8e9)
    assert point.flops_per_s(H200, "bf16") == pytest.approx(1e12)
    assert point.least_us(H200, "bf16") == pytest.approx(1000)
    assert Point("copy", 1e9, 4.8e9, time_us=2000).flops_per_s(H200, "bf16") == pytest.approx(0.5e12)
    with pytest.raises(ValueError, match="bytes of 'nothing' must be a positive number, got 0"):
        Point("nothing", 1, 0)


# ---- exercises -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_cases_have_the_same_names_for_every_seed(exercise):
    counts = {len(exercise.cases(random.Random(seed))) for seed in range(5)}
    assert len(counts) == 1
    cases = exercise.cases(random.Random(1))
    assert len(cases) >= 8


@pytest.mark.parametrize("seed", range(8))
def test_wrong_orders_are_told_apart_for_every_seed(seed):
    """The inputs of the arithmetic exercises are drawn: each known wrong answer must differ in some case."""
    for exercise in (WAVES, GROUPED, OCCUPANCY):
        cases = exercise.cases(random.Random(seed))
        for known in exercise.misconceptions:
            assert any(known.gives(*case.args) != exercise.expected(*case.args) for case in cases), known.label


def test_the_bound_of_the_matmul_is_n_over_t():
    whole = 0
    for case in MATMUL.cases(random.Random(0)):
        a, b, BLOCK = case.args
        (M, K), N = a.shape, b.shape[1]
        allowed, least = MATMUL.traffic.allowed(case), tiling.matmul_reads(M, N, K, BLOCK, BLOCK, a.element_size())
        assert allowed.reads >= least and allowed.writes == allowed.memory == M * N * a.element_size()
        if M % BLOCK == N % BLOCK == 0:
            whole += 1
            assert allowed.reads == least
    assert whole >= 3


def test_occupancy_of_the_exercise_is_the_simulators_but_for_rounding():
    for warps, registers, shared in ((4, 32, 0), (4, 64, 48 * 1024), (8, 128, 96 * 1024), (16, 24, 8 * 1024)):
        limits = (A100.max_threads_per_sm // 32, A100.registers_per_sm, A100.smem_per_sm_bytes)
        assert (
            OCCUPANCY.expected(warps, registers, shared, *limits) == occupancy(A100, warps, registers, shared).programs
        )
