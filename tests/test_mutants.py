"""Mutants: one thing changed in a gap, everything else as it was."""

import ast

from gpukit import mutants

SOURCE = """def f(x_ptr, n, stride_m, stride_n):
    before = n + 1
    # BEGIN SOLUTION
    total = 0.0
    for i in range(0, n):
        total += g(x_ptr, i < n, mask=i < n, other=0.0)
        total = total * stride_m
    # END SOLUTION
    return total - 1
"""


def changes(source: str = SOURCE) -> dict[str, str]:
    return {mutant.change: mutant.source for mutant in mutants.mutants(source, 0, len(source))}


def test_each_kind_of_change_is_made():
    made = changes()
    assert "total += g(x_ptr, (i <= n), mask=i < n, other=0.0)" in SOURCE.replace("i < n, mask", "(i <= n), mask")
    assert {
        "< -> <=",
        "0.0 -> 1.0",
        "stride_m -> stride_n",
        "* -> +",
        "without mask=",
        "+= -> =",
        "0 -> 1",
    } <= made.keys()
    assert {"lines 6 and 7 swapped", "statement left out", "n one more", "x_ptr and i < n swapped"} <= made.keys()
    assert "g(x_ptr, i < n))" in made["without mask="], "a mask goes with its other"
    for source in made.values():
        ast.parse(source)


def test_only_the_gap_changes_and_no_two_mutants_are_alike():
    lines = SOURCE.splitlines()
    for mutant in mutants.mutants(SOURCE, 0, len(SOURCE)):
        mutated = mutant.source.splitlines()
        assert mutated[:3] == lines[:3] and mutated[-2:] == lines[-2:]
        assert 4 <= mutant.line <= 7
    sources = [ast.dump(ast.parse(mutant.source)) for mutant in mutants.mutants(SOURCE, 0, len(SOURCE))]
    assert len(set(sources)) == len(sources) > 15
    assert ast.dump(ast.parse(SOURCE)) not in sources


def test_a_section_limits_the_mutants():
    assert mutants.mutants(SOURCE, 0, 20) == []


def test_a_first_assignment_is_not_left_out():
    """Without it nothing would run, and a check that rejects a NameError proves nothing."""
    left_out = [m for m in mutants.mutants(SOURCE, 0, len(SOURCE)) if m.change == "statement left out"]
    assert [m.line for m in left_out] == [6, 7]


KERNEL = """\"\"\"Kernels {}.\"\"\"
import triton


@triton.jit
def kernel(x_ptr, scale_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    # BEGIN SOLUTION
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + start + offs, mask=start + offs < N, other=0.0).to(tl.float32)
        top = tl.max(x, axis=0)
        p = tl.exp(x - top) * tl.load(scale_ptr)
        acc += p * x
    tl.store(y_ptr + offs, acc / N)
    # END SOLUTION
"""


def rounded(promise: str) -> set[str]:
    found = changes(KERNEL.format(promise))
    return {change.removesuffix(" in 16 bits") for change in found if change.endswith(" in 16 bits")}


def test_numbers_of_kernels_that_promise_float32_are_rounded():
    found = changes(KERNEL.format("compute in float32"))
    assert rounded("compute in float32") == {
        "x - top", "tl.exp(x - top)", "tl.load(scale_ptr)", "tl.exp(x - top) * tl.load(scale_ptr)", "p * x", "acc"
    }  # fmt: skip
    assert "acc = (acc + p * x).to(x_ptr.dtype.element_ty).to(tl.float32)" in found["acc in 16 bits"] or (
        "((acc).to(x_ptr.dtype.element_ty).to(tl.float32)) / N" in found["acc in 16 bits"]
    )


def test_where_sums_alone_are_promised_they_alone_are_rounded():
    assert rounded("add up in float32") == {"p * x", "acc"}
