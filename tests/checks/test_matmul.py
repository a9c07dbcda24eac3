"""What is special about the exercises and the lesson of notebook 12; tests/checks/test_answers.py judges the known answers of all
exercises, tests/kernels/test_matmul.py tests the kernels."""

import json
from dataclasses import replace

import pytest
import torch

from gpukit import course
from gpukit.checks import matmul as checks
from gpukit.checks.matmul import EXERCISES, INT4, ORDER, PRECISION, SPLIT_K, STRIDES, TILES
from gpukit.grading.exercise import KernelExercise
from gpukit.grading.judge import judge_source
from gpukit.grading.stubs import clear
from gpukit.simulator.interpreter import numerics
from tests.checks.known import cases, edited, ids

ROOT = course.root(__file__)
SOLUTION = (ROOT / "solutions" / "matmul.py").read_text(encoding="utf-8")
CELLS = json.loads((ROOT / "notebooks" / "12_matmul.ipynb").read_text(encoding="utf-8"))["cells"]


# ---- cases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise", [e for e in EXERCISES if isinstance(e, KernelExercise)], ids=ids)
def test_cases_hold_what_breaks_kernels(exercise):
    tags = set().union(*(case.tags for case in cases(exercise)))
    assert {"float32", "float16", "bfloat16"} <= tags
    wanted = {
        STRIDES: {"a-strides", "b-strides", "batched", "ragged"},
        ORDER: {"short-group"},
        SPLIT_K: {"uneven", "empty", "large-sums"},
        INT4: {"groups", "ragged", "large-sums"},
    }
    assert wanted.get(exercise, {"ragged", "large"}) <= tags
    assert max(case.args[0].numel() for case in cases(exercise)) <= 1 << 14


def test_strided_cases_are_views_of_many_kinds():
    strides = [case.args[0].stride() + case.args[1].stride() for case in cases(STRIDES)]
    assert any(0 in stride for stride in strides)  # expanded
    assert any(not case.args[0].is_contiguous() for case in cases(STRIDES))
    assert any(case.args[0].untyped_storage().nbytes() > case.args[0].nbytes for case in cases(STRIDES))  # gaps


# ---- what the checks hold to be true ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_each_result_is_told_by_its_precision(seed):
    """Where several ways fit, the first; the names of the other cases begin with the way that made them."""
    for case in cases(PRECISION, seed):
        way = case.name.partition(",")[0]
        expected = way if way in checks.WAYS else "ieee"
        assert checks._which(*case.args) == expected, case.name


def test_tf32_is_the_simulators():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(checks._read("tf32", x), torch.from_numpy(numerics.tf32(x.numpy())))


def test_no_threshold_on_the_error_tells_tf32_from_bf16():
    """With random signs bfloat16 errs more, with positive numbers tf32 does."""
    error = {}
    for case in cases(PRECISION):
        a, b, c = case.args
        terms = a.double().abs() @ b.double().abs()
        error[case.name] = float(((c - a.double() @ b.double()).abs() / terms).max())
    assert error["bf16, K 256"] > error["tf32, K 256"]
    assert error["tf32, K 1024, all positive"] > 2 * error["bf16, K 1024, all positive"]


def test_references():
    for case in cases(TILES):
        a, b, _ = case.args
        torch.testing.assert_close(checks._exact(*case.args), a.float() @ b.float(), rtol=1e-5, atol=1e-5)
    x, weight, bias = cases(checks.EPILOGUE)[0].args
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(checks.EPILOGUE.reference(x, weight, bias), expected)
    # A byte 0x2f: 15 - 8 in the even row, 2 - 8 in the odd one.
    y = INT4.reference(torch.eye(2), torch.tensor([[0x2F]], dtype=torch.uint8), torch.ones(1, 1))
    assert y.flatten().tolist() == [7, -6]


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_detective_stub_is_right_and_reads_too_much():
    found = judge_source(ORDER, clear(SOLUTION), seed=1)
    assert (found.state, found.diagnosis) == ("fail", "order")
    assert "142 KiB come from memory where 64 are enough" in " ".join(str(found).split())


def test_one_dot_product_for_each_element_is_no_tiling():
    loops = """def matmul_tiles(a, b, BLOCK):
    import torch
    c = torch.zeros(a.shape[0], b.shape[1])
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            c[i, j] = a[i].float() @ b[:, j].float()
    return c
"""
    deep = replace(TILES, cases=lambda rng: [case for case in TILES.cases(rng) if "deep" in case.tags])
    assert (
        judge_source(deep, loops, seed=1).diagnosis == "memory"
    )  # a row and a column of the others fit into eight tiles


AS_BITS = """    held = bytearray()
    for x in (*a.reshape(-1), *b.reshape(-1)):
        held += (x.view(torch.int16).item() & 0xFFFF).to_bytes(2, "little")
"""
AS_BITS_OF = """    held = bytearray()
    for x in a.reshape(-1).split(64):
        for byte in COPIED.view(torch.int8):
            held.append(byte.item() & 0xFF)
"""
AS_PACKED = """    held = bytearray()
    for x in (*a.reshape(-1), *b.reshape(-1)):
        held += struct.pack("f", x.item())
"""
COPIES = {"clone": "x.clone()", "copy_": "torch.empty(x.shape, dtype=x.dtype).copy_(x)"}
IN_OTHER_MEMORY = """    SCRATCH[: a.numel()].view(a.shape).copy_(a)
"""
AS_INDICES = """    place = torch.zeros(1, dtype=torch.int64)
    for _ in range(5000):
        place.item()
"""


@pytest.mark.parametrize(
    ("body", "diagnosis"),
    [
        (AS_BITS, "memory"),
        *((AS_BITS_OF.replace("COPIED", copied), "memory") for copied in COPIES.values()),
        (AS_PACKED, "memory"),
        (IN_OTHER_MEMORY, "memory"),
        (AS_INDICES, ""),
    ],
    ids=("bits", *COPIES, "packed", "scratch", "indices"),
)
def test_what_is_held_counts_wherever_it_lies(body, diagnosis):
    """As integers in an object of Python's, or in memory that was made when the file was loaded."""
    begin = "    # BEGIN SOLUTION\n    for m in range(0, M, BLOCK):"
    source = edited("matmul", (begin, body + begin))
    # Each number is looked at by itself: the cases with few of them have the same bound.
    few = replace(TILES, cases=lambda rng: [case for case in TILES.cases(rng) if sum(map(len, case.args[:2])) < 60])
    found = judge_source(
        few,
        source.replace("import torch\n", "import struct\n\nimport torch\n\nSCRATCH = torch.empty(1 << 20)\n", 1),
        seed=1,
    )
    assert found.diagnosis == diagnosis, f"{found}\n{found.detail}"


def test_a_fill_is_told_where_the_kernels_load_what_they_need():
    """b is twice as large as a here, and loaded once: what is too much is the fill of a tensor, and it alone is told."""
    empty = "    partial = torch.empty(SPLIT_K, M, N, dtype"
    found = judge_source(SPLIT_K, edited("matmul", (empty, empty.replace("empty", "zeros"))), seed=1)
    assert found.diagnosis == "traffic" and "which line outside them fills a tensor" in str(found), str(found)


def test_cases_are_listed_by_whole_names():
    """The names have commas of their own."""
    found = judge_source(PRECISION, "def which(a, b, c):\n    return 'ieee'\n", seed=1)
    shown = "fails for tf32, K 256 | tf32, K 1024, all positive and 16 more; passes for ieee, K 256 and 6 more"
    assert shown in str(found), str(found)


def test_dequantising_into_memory_first_is_not_enough():
    call = "    int4_kernel[grid](x, packed, scales, y, M, N, K, GROUP=K // scales.shape[0], BLOCK_M=16, BLOCK_N=32)\n"
    found = judge_source(INT4, edited("matmul", (call, "    packed = packed.clone()\n" + call)), seed=1)
    assert found.diagnosis == "traffic"


def test_a_small_argument_is_bounded_on_its_own():
    """The bias in each step of the loop is a small part of all bytes."""
    loop = '        acc = tl.dot(x, w, acc, input_precision="ieee")\n    # BEGIN SOLUTION\n'
    load = "tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)"
    assert SOLUTION.count(load) == 1
    assert SOLUTION.count(loop) == 1
    source = SOLUTION.replace(load, "bias").replace(
        loop, loop.replace("    # BEGIN", f"        bias = {load}\n    # BEGIN")
    )
    verdict = judge_source(next(e for e in EXERCISES if e.id == "matmul.epilogue"), source, seed=1)
    line = source.split("\n").index(f"        bias = {load}") + 1
    assert verdict.diagnosis == "traffic" and f"line {line} of" in str(verdict)
    assert "loads the same elements of bias_ptr" in str(verdict)
