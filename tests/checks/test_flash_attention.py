"""What is special about the exercises of notebook 13; tests/checks/test_answers.py judges the known answers of all exercises,
tests/kernels/test_flash_attention.py tests the kernels, tests/notebooks/test_lessons.py what lessons have in common."""

import random

import pytest
import torch

from gpukit import course
from gpukit.checks import flash_attention as checks
from gpukit.checks.flash_attention import (
    CAUSAL,
    EXERCISES,
    FORWARD,
    GRADIENTS,
    LATE,
    MERGE,
    PACKED,
    RECOMPUTE,
    TILES,
    WINDOW,
)
from gpukit.grading.exercise import KernelExercise
from gpukit.grading.judge import judge_source
from gpukit.grading.stubs import clear
from gpukit.reference import flash_attention as reference
from gpukit.testing import compare
from tests.checks import known
from tests.checks.known import cases, edited, ids

ROOT = course.root(__file__)
KERNELS = [exercise for exercise in EXERCISES if isinstance(exercise, KernelExercise)]
SOLUTION = (ROOT / "solutions" / "flash_attention.py").read_text(encoding="utf-8")


# ---- cases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise", KERNELS, ids=ids)
def test_cases_hold_what_breaks_kernels(exercise):
    tags = set().union(*(case.tags for case in cases(exercise)))
    assert {"float32", "float16", "bfloat16"} <= tags
    wanted = {
        LATE: {"partial", "late", "many-blocks"},
        FORWARD: {"partial", "late", "many-blocks"},
        CAUSAL: {"partial", "unequal", "unseen"},
        WINDOW: {"partial", "unequal", "unseen", "first-block", "many-blocks"},
        PACKED: {"gqa", "sequences", "unequal", "no-query"},
        GRADIENTS: {"partial", "rest", "many-blocks"},
    }
    assert wanted[exercise] <= tags
    sizes = [case.args[0].shape[-1] for case in cases(exercise)]
    assert any(size & (size - 1) for size in sizes)  # a head size that is no power of two
    assert max(case.args[0].numel() for case in cases(exercise)) <= 1 << 15


def test_head_sizes_from_1_to_256():
    sizes = {case.args[0].shape[-1] for exercise in (FORWARD, GRADIENTS) for case in cases(exercise)}
    assert {1, 16, 33, 80, 256} <= sizes


@pytest.mark.parametrize("exercise", KERNELS, ids=ids)
def test_lengths_lie_around_blocks(exercise):
    found = {n for case in cases(exercise) for x in case.args[:2] for n in (x.shape[0 if exercise is PACKED else 1],)}
    if exercise is PACKED:
        found = {n for case in cases(exercise) for cu in case.args[3:5] for n in cu.diff().tolist()}
    assert found & {15, 31} and found & {17, 33} and 1 in found


@pytest.mark.parametrize("exercise", KERNELS, ids=ids)
def test_costs_are_bounded_in_every_case(exercise):
    assert exercise.traffic.memory is not None
    for case in cases(exercise):
        allowed = exercise.traffic.allowed(case)
        assert allowed.memory < 2 * allowed.writes + 100, "no room for a matrix of scores"


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_scores_of_the_corners_are_exact(dtype):
    make = checks._Heads(random.Random(1))
    q, k, _ = make.corners(37, dtype)
    s = (q.float() @ k.float().mT) / 4
    assert torch.equal(s.double(), checks._scores(q.double(), k.double()))
    assert torch.equal(s.to(q.dtype).float(), s) and float(s.max()) == 1600 and float(s.min()) == -720
    products = q[0, 1].half() * k[0, 0].half()
    assert dtype == "bfloat16" or bool(products.isinf().any()), "float16 does not hold the terms"


@pytest.mark.parametrize("of", ("l", "acc"))
def test_sums_in_16_bits_fail_by_more_than_rounding(of):
    q, k, v = checks._Heads(random.Random(1)).stalling()
    truth, native = (checks._attention(*x) for x in ((q.double(), k.double(), v.double()), (q, k, v)))
    l, acc = torch.zeros(2, 1, 1), torch.zeros(2, 1, 16)
    for keys, values in zip(k.float().split(16, 1), v.float().split(16, 1), strict=True):
        p = torch.exp(checks._scores(q.float(), keys))  # the maximum is 0
        l, acc = l + p.sum(-1, keepdim=True), acc + p @ values
        l, acc = (l.bfloat16().float(), acc) if of == "l" else (l, acc.bfloat16().float())
    assert compare((acc / l).bfloat16(), truth, native) is not None


def test_a_walk_without_a_fault_is_attention():
    for case in cases(FORWARD):
        q, k, v = (x.double() for x in case.args)
        for found, right in zip(checks._walk(q, k, v), checks._with_lse(q, k, v), strict=True):
            torch.testing.assert_close(found, right, equal_nan=True)


def test_causal_lengths_differ_both_ways():
    lengths = [case.args[0].shape[1] - case.args[1].shape[1] for case in cases(CAUSAL)]
    assert min(lengths) < 0 < max(lengths) and 0 in lengths


def test_scores_that_rise_have_their_maximum_in_a_later_block():
    for exercise in (LATE, FORWARD):
        for case in cases(exercise):
            q, k, _ = (x.double() for x in case.args)
            if "rise" in case.name:
                assert int((checks._scores(q, k).argmax(-1) >= 16).sum()) > 0, case.name


@pytest.mark.parametrize("exercise", [TILES, RECOMPUTE], ids=ids)
def test_the_library_does_not_take_the_largest_cases(exercise):
    """Its own kernel holds no scores either; a last dimension that is not contiguous sends it down the plain way."""
    large = [case for case in cases(exercise) if max(len(case.args[0]), len(case.args[1])) > 300]
    assert large and all(case.args[2].stride(-1) != 1 for case in large)


# ---- what the checks hold to be true ---------------------------------------------------------------------------------


def test_references_are_the_projects():
    for case in cases(CAUSAL):
        q, k, v = (x.double()[None] for x in case.args)
        o, lse = CAUSAL.reference(*(x[0] for x in (q, k, v)))
        torch.testing.assert_close(o, reference.flash_attention(q, k, v, causal=True)[0], equal_nan=True)
        torch.testing.assert_close(lse, reference.log_sum_exp(q, k, causal=True)[0], equal_nan=True)
    for case in cases(WINDOW):
        *qkv, window = case.args
        q, k, v = (x.double()[None] for x in qkv)
        o, lse = WINDOW.reference(q[0], k[0], v[0], window)
        torch.testing.assert_close(o, reference.flash_attention(q, k, v, causal=True, window=window)[0], equal_nan=True)
        torch.testing.assert_close(lse, reference.log_sum_exp(q, k, causal=True, window=window)[0], equal_nan=True)
        if "special" not in case.tags:
            torch.testing.assert_close(checks._walked_to(q[0], k[0], v[0], window, rows=32), o)
    for case in cases(FORWARD):
        q, k, v = (x.double()[None] for x in case.args)
        o, lse = FORWARD.reference(*(x[0] for x in (q, k, v)))
        torch.testing.assert_close(o, reference.flash_attention(q, k, v)[0], equal_nan=True)
        torch.testing.assert_close(lse, reference.log_sum_exp(q, k)[0], equal_nan=True)


def test_a_window_bounds_loads_from_both_sides():
    """By the definition: of every block of 16 keys, whether one of 32 queries sees one of them."""
    for case in cases(WINDOW):
        q, k, _, window = case.args
        seen = checks._seen(q, k, None, window)
        rows = sum(len(keys[0]) for queries in seen.split(32) for keys in queries.split(16, dim=1) if bool(keys.any()))
        assert checks._visible_bytes(q, k, 32, window) == 2 * len(q) * rows * q.shape[2] * q.element_size(), case.name


def test_packed_reference_is_a_loop_over_texts():
    for case in cases(PACKED):
        q, k, v, cu_q, cu_k, longest = case.args
        assert longest == int(cu_q.diff().max()) and int(cu_k.diff().min()) > 0
        for i in range(len(cu_q) - 1):
            parts = (x[a:b].transpose(0, 1)[None].double() for x, a, b in (
                (q, cu_q[i], cu_q[i + 1]), (k, cu_k[i], cu_k[i + 1]), (v, cu_k[i], cu_k[i + 1])))  # fmt: skip
            expected = reference.flash_attention(*parts)[0].transpose(0, 1)
            found = PACKED.reference(q.double(), k.double(), v.double(), cu_q, cu_k, longest)
            torch.testing.assert_close(found[cu_q[i] : cu_q[i + 1]], expected, equal_nan=True)


def test_gradients_are_autograds():
    for case in cases(RECOMPUTE)[:5]:
        q, k, v, _, _, do, _ = (x.double() if isinstance(x, torch.Tensor) else x for x in case.args)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(checks._attention(*leaves), leaves, do)
        for found, right in zip(RECOMPUTE.expected(*case.args), expected, strict=True):
            torch.testing.assert_close(found, right.float(), rtol=1e-4, atol=1e-5, equal_nan=True)
    for case in cases(GRADIENTS):
        q, k, v, do, lse, delta, _, _ = (x.double() for x in case.args)
        leaves = [x.requires_grad_() for x in (k, v)]
        expected = torch.autograd.grad(checks._attention(q, *leaves), leaves, do)
        for found, right in zip(GRADIENTS.reference(q, k, v, do, lse, delta), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_merging_is_what_softmax_says():
    s, v = torch.randn(2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys = list(zip(s.tolist(), v.tolist(), strict=True))
    m, l, acc = MERGE.expected(checks._state(keys[:4]), checks._state(keys[4:]))
    assert acc / l == pytest.approx(float(s.softmax(0) @ v))
    assert (m, l) == pytest.approx((float(s.max()), float((s - s.max()).exp().sum())))


def test_bound_on_causal_keys_is_half_of_them():
    """28 of the 49 pairs of blocks of 112 queries and keys."""
    for (T_q, T_k), rows in {(112, 112): 28 * 16, (1, 37): 37, (40, 5): 5}.items():  # of 40 queries 32 see nothing
        assert checks._visible_bytes(torch.zeros(1, T_q, 16), torch.zeros(1, T_k, 16)) == 2 * rows * 16 * 4


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_detective_stub_is_right_until_a_maximum_comes_late():
    found = judge_source(LATE, clear(SOLUTION), seed=1)
    assert (found.state, found.diagnosis) == ("fail", "acc-not-rescaled")
    assert "fails for every case whose largest scores come late; passes for the others" in str(found)


def test_top_left_is_right_where_lengths_agree():
    answer = next(answer for answer in known.wrong(CAUSAL) if answer.diagnosis == "top-left")
    found = judge_source(CAUSAL, answer.source, seed=1)
    assert "fails for every case whose lengths differ; passes for the others" in str(found)


def test_a_matrix_of_scores_in_memory_is_too_much_traffic():
    """A kernel of one's own is not enough: S written and read is what the exercise is about."""
    call = "    attention_kernel[(triton.cdiv(T_q, 32), H)]"
    stored = "    s = torch.zeros(H, T_q, T_k, dtype=torch.float32, device=q.device)\n"
    found = judge_source(FORWARD, edited("flash_attention", (call, stored + call)), seed=1)
    assert found.diagnosis == "traffic"


def test_calling_one_kernel_for_each_head_is_too_many_launches():
    call = (
        "    attention_kernel[(triton.cdiv(T_q, 32), H)](q, k, v, o, lse, T_q, T_k, 1 / math.sqrt(D), D=D, **blocks)\n"
    )
    each = (
        "    for h in range(H):\n        attention_kernel[(triton.cdiv(T_q, 32), 1)]"
        "(q[h], k[h], v[h], o[h], lse[h], T_q, T_k, 1 / math.sqrt(D), D=D, **blocks)\n"
    )
    assert judge_source(FORWARD, edited("flash_attention", (call, each)), seed=1).diagnosis == "launches"
