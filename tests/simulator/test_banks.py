"""Turns of shared memory, by hand and in what Triton's compiler writes."""

import pytest
import torch
import triton
import triton.language as tl

from gpukit.simulator.compiler import assembly, banks
from gpukit.simulator.compiler.compile import compile
from gpukit.simulator.prediction import mix
from gpukit.simulator.trace.tracer import trace

needs_the_interpreter = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


def turns(code: str, threads: int = 32) -> list[tuple[float, float]]:
    return list(banks.turns(assembly.ptx("\n".join(["mov.u32 %r1, %tid.x;", *code.split("\n")])), threads).values())


def test_constants_have_64_bits_and_a_sign():
    for constant in ("-8", "0xfffffffffffffff8", "18446744073709551608U"):
        code = f"mul.lo.s64 %rd2, %r1, 4;\nand.b64 %rd3, %rd2, {constant};\nld.shared.b32 %r9, [%rd3];"
        assert turns(code) == [(1, 1)]  # two lanes each want one word
    assert turns("mov.b32 %r2, 0f3F800000;\nadd.s32 %r3, %r1, 0x1ffffffffffffffff;\nld.shared.b32 %r9, [%r3];")


@pytest.mark.parametrize(
    "step, access, taken, least",
    [
        (4, "ld.shared.b32 %r9, [%r2];", 1, 1),
        (8, "ld.shared.b32 %r9, [%r2];", 2, 1),
        (128, "ld.shared.b32 %r9, [%r2+64];", 32, 1),
        (132, "ld.shared.b32 %r9, [%r2];", 1, 1),  # a row that is one word longer
        (0, "ld.shared.b32 %r9, [%r2];", 1, 1),  # all lanes want one word
        (1, "st.shared.b8 [%r2], %r9;", 1, 1),
        (64, "st.shared.b8 [%r2], %r9;", 16, 1),
        (8, "ld.shared.v2.b32 {%r8, %r9}, [%r2];", 2, 2),
        (16, "ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%r2];", 4, 4),
        (32, "ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%r2];", 8, 4),
        (64, "cp.async.ca.shared.global [ %r2 + 0 ], [ %rd5 + 0 ], 0x4;", 16, 1),
        (16, "cp.async.cg.shared.global [ %r2 + 0 ], [ %rd5 + 0 ], 0x10;", 4, 4),
        (16, "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6, %r7, %r8, %r9}, [%r2];", 4, 4),
        (128, "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6, %r7, %r8, %r9}, [%r2];", 32, 4),
    ],
)
def test_turns_by_hand(step, access, taken, least):
    assert turns(f"mul.lo.s32 %r2, %r1, {step};\n{access}") == [(taken, least)]


def test_a_swizzle_keeps_a_column_apart():
    """Rows of 128 bytes: 16 bytes of each of eight rows meet in one bank, unless the row's number moves them."""
    row = "and.b32 %r2, %r1, 7;\nshl.b32 %r3, %r2, 7;"
    access = "ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%r4];"
    assert turns(f"{row}\nmov.b32 %r4, %r3;\n{access}") == [(32, 4)]
    assert turns(f"{row}\nshl.b32 %r5, %r2, 4;\nxor.b32 %r4, %r3, %r5;\n{access}") == [(4, 4)]


def test_what_no_thread_knows_moves_all_of_them():
    known = "shl.b32 %r2, %r1, 3;"
    unknown = f"ld.param.b32 %r7, [kernel_param_1];\nmov.u32 %r8, %ctaid.x;\nmad.lo.s32 %r9, %r7, %r8, 4;\n{known}\nadd.s32 %r2, %r2, %r9;"
    access = "ld.shared.b32 %r5, [%r2];"
    assert turns(f"{known}\n{access}") == turns(f"{unknown}\n{access}") == [(2, 1)]


def test_lanes_that_are_masked_off_take_no_turn():
    code = "setp.lt.u32 %p1, %r1, 4;\nshl.b32 %r2, %r1, 7;\n@%p1 st.shared.b32 [%r2], %r9;"
    assert turns(code) == [(4, 1)]
    assert turns(code, threads=128) == [(1, 0.25)], "three of the four warps have no live lane"


@triton.jit
def product(a_ptr, b_ptr, c_ptr, K, B: tl.constexpr):
    i, j = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    total = tl.zeros((B, B), tl.float32)
    for k in range(0, K, B):
        total = tl.dot(tl.load(a_ptr + i * K + k + j), tl.load(b_ptr + (k + i) * B + j), total)
    tl.store(c_ptr + i * B + j, total)


@needs_the_interpreter
@pytest.mark.parametrize("dtype, meets", [(torch.bfloat16, False), (torch.float32, True)])
def test_a_matrix_that_the_copies_transpose(dtype, meets):
    """Hopper's tensor cores take tf32 only with neighbors along the sum: b is transposed word by word as it is copied."""
    a, b, c = (torch.empty(64, 64, dtype=dtype, device="meta") for _ in range(3))
    with trace(sample=1) as t:
        product[(1,)](a, b, c, 64, B=64)
    compiled = compile(t.launches[0], gpu="h200")
    worst = max(taken / least for (kind, *_), (taken, least) in compiled.shared_turns.items() if kind == "copy")
    assert (worst > 4) == meets


def test_predicates_rotations_and_what_the_first_lane_knows():
    access = "ld.shared.b32 %r9, [%r2];"
    assert turns(f"shl.b32 %r2, %r1, 7;\nmov.pred %p1, -1;\n@%p1 {access}") == [(32, 1)]
    assert turns(f"shl.b32 %r2, %r1, 7;\nsetp.lt.u32 %p1, %r1, 4;\nnot.pred %p2, %p1;\n@%p2 {access}") == [(28, 1)]
    assert turns(f"shf.l.wrap.b32 %r2, %r1, %r1, 7;\n{access}") == [(32, 1)], "by 7 bits, as shl"
    warp = "shr.u32 %r3, %r1, 5;\nshfl.sync.idx.b32 %r4, %r3, 0, 31, -1;\nsetp.eq.s32 %p1, %r4, 1;"
    assert turns(f"{warp}\nshl.b32 %r2, %r1, 7;\n@%p1 {access}", threads=64) == [(16, 0.5)], "the second warp alone"


@triton.jit
def columns_in_pairs(x_ptr, y_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    x = tl.load(x_ptr + row * COLS + col)
    tl.store(y_ptr + tl.arange(0, COLS), tl.sum(x, 0) + tl.max(x, 0))


@needs_the_interpreter
def test_sums_across_warps_meet_in_banks_whoever_called_them():
    """Triton's own lines say which instructions these are, in both listings; those that a kernel called them from do not."""
    x = torch.empty(64, 128, device="meta")
    with trace(sample=1) as t:
        columns_in_pairs[(1,)](x, x, ROWS=64, COLS=128)
    compiled = compile(t.launches[0], gpu="h200")
    known = [mix.shared_turns(compiled, i) for i in compiled.instructions if i.base in ("LDS", "STS")]
    known = [each for each in known if each != (0.0, 0.0)]
    assert known and max(taken - least for taken, least in known) >= 3
    assert mix.mix(compiled, None).conflicts == pytest.approx(sum(taken - least for taken, least in known), rel=0.01)
