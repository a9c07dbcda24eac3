"""What is special about notebook 05; tests/checks/test_answers.py judges the known answers of all exercises."""

import random
import re

import pytest
import torch
import triton
import triton.language as tl

import gpukit
from gpukit import course
from gpukit.checks.triton_basics import DETECTIVE_RACE, DETECTIVE_SLOW, DROPOUT, EXERCISES, HISTOGRAM
from gpukit.grading.judge import judge_source
from gpukit.grading.stubs import clear
from gpukit.reference import triton_basics as reference
from gpukit.simulator.compiler.compile import CompileError
from gpukit.simulator.interpreter.faults import MemoryFault, RaceFault
from tests.checks.known import ids

ROOT = course.root(__file__)
interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


def solution() -> str:
    return (ROOT / "solutions" / "triton_basics.py").read_text(encoding="utf-8")


# ---- the cases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise", EXERCISES, ids=ids)
def test_cases_hold_what_breaks_lazy_answers(exercise):
    """Several programs, a tail, one element, and negative numbers where signs matter."""
    cases = exercise.cases(random.Random(1))
    assert any(case.args[0].numel() == 1 for case in cases)
    if exercise.id not in ("triton_basics.mul_relu", "triton_basics.dropout"):
        tags = [case.tags for case in cases]
        assert any({"blocks", "partial"} <= t for t in tags) and any("partial" not in t for t in tags)
    if exercise is not HISTOGRAM:
        assert any((case.args[0] < 0).any() for case in cases)
    assert max(case.args[0].numel() for case in cases) <= 1 << 14


def test_histogram_cases_have_duplicates_in_one_block_and_values_that_are_no_bin():
    cases = HISTOGRAM.cases(random.Random(1))
    assert any((c.args[0] < 0).any() and (c.args[0] >= c.args[1]).any() for c in cases)
    for x, num_bins, block in (case.args for case in cases if case.args[0].numel() > 1):
        assert torch.bincount(x[:block].clamp(0, num_bins - 1)).max() > 1


def test_sums_are_of_whole_numbers_that_float32_adds_exactly():
    """So that no order of adding is punished: the sum of all magnitudes stays below 2^24 units."""
    for name, of_case in {
        "row_sum": lambda x, *_: x.double() * 8,
        "dot": lambda x, y, _: x.double() * y.double(),
        "prefix_sum": lambda x, *_: x.double() * 8,
    }.items():
        (exercise,) = [e for e in EXERCISES if e.id == f"triton_basics.{name}"]
        for case in exercise.cases(random.Random(1)):
            units = of_case(*case.args)
            if "special" in case.tags:
                units = units[units.isfinite()]
            assert torch.equal(units, units.round())
            assert units.abs().sum(-1).max() < 2**24


# ---- the diagnoses -------------------------------------------------------------------------------------------------


def test_the_slow_detective_is_right_and_moves_too_much():
    found = judge_source(DETECTIVE_SLOW, clear(solution()), seed=1)
    assert (found.state, found.diagnosis) == ("fail", "traffic")
    shown = " ".join(str(found).split())
    assert "right values, but 6.0x the memory traffic" in shown
    assert "x_ptr is loaded 6 times" in shown


def test_the_race_names_a_program_and_an_element():
    found = judge_source(DETECTIVE_RACE, clear(solution()), seed=1)
    assert (found.state, found.diagnosis) == ("fail", "race")
    shown = " ".join(str(found).split())
    assert re.search(r"program 1, line \d+: stores to what another program loads, at index 64", shown), shown


def test_dropout_counts_its_elements_through_memory():
    """The contract pins every number, so that an answer is right or wrong and never lucky."""
    x, p, seed, _ = DROPOUT.cases(random.Random(1))[5].args
    assert x.ndim == 2
    flat = reference.dropout(x.view(-1), p, seed)
    assert torch.equal(reference.dropout(x, p, seed), flat.view(x.shape))


# ---- the random numbers --------------------------------------------------------------------------------------------


@triton.jit
def rand_kernel(y_ptr, bits_ptr, seed, first, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.rand(seed, first + offs))
    tl.store(bits_ptr + offs, tl.randint(seed, first + offs).to(tl.int64))


@pytest.mark.parametrize("seed", (0, 1, 42, 2**31 - 1, -5, 2**40 + 3))
@pytest.mark.parametrize("first", (0, 100_000))
def test_random_numbers_equal_tritons(seed, first):
    device = "cpu" if triton.knobs.runtime.interpret else "cuda"
    y = torch.empty(256, device=device)
    bits = torch.empty(256, dtype=torch.int64, device=device)
    rand_kernel[(1,)](y, bits, seed, first, BLOCK=256)
    offsets = first + torch.arange(256)
    assert torch.equal(y.cpu(), reference.rand(seed, offsets))
    assert torch.equal(bits.cpu() & 0xFFFFFFFF, reference.randint(seed, offsets))


def test_random_numbers_are_uniform_and_differ_by_seed():
    numbers = reference.rand(7, torch.arange(100_000))
    assert 0 <= numbers.min() and numbers.max() < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.005
    assert not torch.equal(numbers, reference.rand(8, torch.arange(100_000)))


@pytest.mark.parametrize("p", (0.0, 0.3, 1.0))
def test_reference_dropout_and_its_gradient(p):
    x = torch.arange(1.0, 1001.0, dtype=torch.float64, requires_grad=True)
    y = reference.dropout(x, p, 3)
    (dx,) = torch.autograd.grad(y.sum(), x)
    kept = y != 0
    assert torch.equal(dx != 0, kept)
    assert abs(float(kept.double().mean()) - (1 - p)) < 0.05
    if p < 1:
        torch.testing.assert_close(y[kept], x[kept] / (1 - p))


# ---- the interpreter is not a GPU: the rows of the notebook's table -------------------------------------------------


@triton.jit
def masked_load_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n))


@triton.jit
def order_kernel(count_ptr, y_ptr):
    tl.store(y_ptr + tl.program_id(0), tl.atomic_add(count_ptr, 1))


@triton.jit
def total_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    total = 0
    for start in range(0, n, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + offs, mask=offs < n, other=0.0), axis=0)
    tl.store(y_ptr, total)


@interpreted
def test_row_masked_lane_without_other_is_nan():
    y = torch.empty(4)
    masked_load_kernel[(1,)](torch.ones(3), y, 3, BLOCK=4)
    assert y[:3].tolist() == [1, 1, 1] and bool(y[3].isnan())


@interpreted
def test_row_programs_run_in_order():
    y = torch.empty(5, dtype=torch.int32)
    order_kernel[(5,)](torch.zeros(1, dtype=torch.int32), y)
    assert y.tolist() == [0, 1, 2, 3, 4]


@interpreted
def test_row_outside_a_tensor_is_a_fault():
    with pytest.raises(MemoryFault, match="1 element past the end"):
        masked_load_kernel[(1,)](torch.ones(3), torch.empty(4), 4, BLOCK=4)


@interpreted
def test_row_a_race_is_reported_though_the_values_are_right():
    module = course.Functions("triton_basics")
    kernel = module.neighbour_mean_kernel
    y = torch.arange(10.0)
    with pytest.raises(RaceFault):
        kernel[(3,)](y, y, 10, BLOCK=4)
    assert torch.equal(y[:-1], torch.arange(9.0) + 0.5)


def test_row_what_the_interpreter_runs_need_not_compile():
    x, y = torch.arange(10.0), torch.zeros(1)
    if triton.knobs.runtime.interpret:
        total_kernel[(1,)](x, y, 10, BLOCK=4)
        assert y.item() == 45
    with pytest.raises(CompileError, match="initial type int32"):
        gpukit.compile(total_kernel, x, y, 10, BLOCK=4)
