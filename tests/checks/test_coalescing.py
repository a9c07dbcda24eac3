"""What notebook 06 rests on: its exercises agree with the thread-level model, and the recorded counters with the trace."""

import csv
import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import gpukit
from gpukit import course
from gpukit.checks import coalescing
from gpukit.simulator import simt

RECORDED = Path(gpukit.__file__).parent / "results" / "h200" / "coalescing.csv"


@pytest.fixture(scope="module")
def solutions():
    path = course.exercise_file("coalescing", course.root(__file__), "solutions")
    spec = importlib.util.spec_from_file_location("solutions_coalescing", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(exercise, seeds=3):
    return [case for seed in range(seeds) for case in exercise.cases(random.Random(seed))]


def lanes(values):
    """32 numbers, None for a lane that is off, as numbers and a mask."""
    return np.array([v or 0 for v in values]), np.array([v is not None for v in values])


def test_transactions_are_those_of_the_model(solutions):
    for case in cases(coalescing.SECTORS):
        addresses, active = lanes(*case.args)
        model = int(simt.sectors(addresses, active)), int(simt.distinct(addresses, simt.LINE_BYTES, active))
        assert solutions.transactions(*case.args) == coalescing.SECTORS.expected(*case.args) == model


def test_bank_passes_are_those_of_the_model(solutions):
    for case in cases(coalescing.BANK_PASSES):
        words, active = lanes(*case.args)
        model = int(simt.bank_passes(words * 4, active))
        assert solutions.bank_passes(*case.args) == coalescing.BANK_PASSES.expected(*case.args) == model


def test_loop_cost_is_that_of_the_model(solutions):
    def loop(t, trips, y):
        n, done = trips[t.index], t.full(0, np.int32)
        for _ in t.range(n):
            done += 1
        y[t.index] = done

    for case in cases(coalescing.DIVERGENCE):
        trips = np.array(case.args[0], dtype=np.int32)
        run = simt.launch(loop, trips, np.zeros_like(trips), grid=1, block=len(trips))
        rounds = [i for i in run.instructions if i.kind == "arithmetic"][1:]  # not the comparison
        issued, busy = sum(i.issued for i in rounds), sum(i.lanes for i in rounds)
        expected = coalescing.DIVERGENCE.expected(*case.args)
        assert expected == solutions.loop_cost(*case.args)
        assert expected == (issued, busy / issued if issued else 0.0)


@pytest.mark.parametrize(
    "exercise", (coalescing.DETECTIVE, coalescing.GATHER, coalescing.TRANSPOSE), ids=lambda e: e.id
)
def test_graded_cases_begin_on_sectors(exercise):
    """Where rows begin inside a sector, a right kernel touches more sectors than its bytes fill."""
    graded = [case for case in cases(exercise, 1) if "aligned" in case.tags]
    assert graded
    for case in graded:
        for arg in case.args:
            if arg.ndim == 2 and exercise is not coalescing.DETECTIVE:  # there the whole matrix is one row
                assert all(n * arg.element_size() % 32 == 0 for n in arg.shape[exercise is coalescing.GATHER :])


# ---- the recorded counters -----------------------------------------------------------------------------------------------


def recorded():
    lines = [line for line in RECORDED.read_text().splitlines() if not line.startswith("#")]
    return {row.pop("kernel"): {k: int(v) for k, v in row.items()} for row in csv.DictReader(lines)}


def test_every_column_is_documented():
    comments = [line for line in RECORDED.read_text().splitlines() if line.startswith("#")]
    for column in ("kernel", *next(iter(recorded().values()))):
        assert any(line.removeprefix("#").split()[0] == column for line in comments), column


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(y_ptr + i, tl.load(x_ptr + i * stride, mask=inside), mask=inside)


@triton.jit
def transpose_kernel(x_ptr, y_ptr, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    tl.store(y_ptr + n[None, :] * N + m[:, None], x)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("stride", (1, 2, 16))
def test_copies_against_the_counters(stride):
    n, row = 2**20, recorded()[f"copy, stride {stride}"]
    x, y = (torch.empty(size, dtype=torch.float16, device="meta") for size in (16 * n, n))
    with gpukit.trace(sample=8) as t:
        copy_kernel[(n // 1024,)](x, y, n, stride, BLOCK=1024)
    assert t.launches[0].load_sectors == row["l2_read_sectors"]
    assert t.launches[0].store_sectors == row["store_sectors"]


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("tile", ((64, 64), (1, 1024)))
def test_transposes_against_the_counters(tile):
    row = recorded()["transpose, " + " x ".join(map(str, tile))]
    x, y = (torch.empty(1024, 1024, dtype=torch.float16, device="meta") for _ in range(2))
    with gpukit.trace(sample=8) as t:
        transpose_kernel[(1024 // tile[0], 1024 // tile[1])](x, y, 1024, BLOCK_M=tile[0], BLOCK_N=tile[1])
    assert t.launches[0].load_sectors == row["l2_read_sectors"]
    assert t.launches[0].store_sectors == row["store_sectors"]
