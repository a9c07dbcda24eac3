"""Kernels in Gluon in the interpreter: the course's own compute what they should, and what would go wrong on a GPU is named."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import gpukit
from gpukit.kernels import _flash_hopper, _fp8_hopper, _matmul_hopper
from gpukit.kernels._flash_backward import delta_and_zeros
from gpukit.kernels._hopper import barriers, blocks_like, fetch, put, swizzled
from gpukit.reference import flash_attention as reference
from gpukit.simulator.interpreter.faults import SynchronizationFault
from gpukit.testing import assert_close

FAR = 1 << 30

# ---- the course's kernels


@pytest.mark.parametrize(
    ("M", "N", "K", "transposed", "dtype"),
    [
        (256, 256, 256, False, torch.float16),
        (200, 264, 136, False, torch.bfloat16),
        (64, 128, 512, True, torch.float16),
    ],
)
def test_matmul(M, N, K, transposed, dtype):
    a, b = torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype).T if transposed else torch.randn(K, N).to(dtype)
    c = torch.full((M, N), float("nan"), dtype=dtype)
    constants = {"ACTIVATION": None, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 4, "STAGES": 3, "PIECES": 2}
    _matmul_hopper.matmul_hopper(a, b, c, None, None, None, None, 2, constants)
    assert_close(c, a.double() @ b.double(), a @ b)


@pytest.mark.parametrize(("M", "N", "K"), [(256, 512, 384), (200, 264, 400), (64, 8, 16)])
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_matmul(M, N, K, format):
    a, b = torch.randn(M, K).to(format), torch.randn(N, K).to(torch.float8_e4m3fn)
    a_factors, b_factors = torch.rand(M), torch.rand(1).expand(N)
    c = torch.full((M, N), float("nan"), dtype=torch.bfloat16)
    _fp8_hopper.fp8_hopper(a, b, c, a_factors, b_factors, 2)
    truth = (a.double() * a_factors.double()[:, None]) @ (b.double() * b_factors.double()[:, None]).T
    assert_close(c, truth, truth.to(torch.bfloat16))


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize(
    ("H", "H_kv", "T_q", "T_k", "D", "left", "right"),
    [
        (2, 1, 200, 200, 64, FAR, 0),
        (1, 1, 130, 259, 128, FAR, FAR),
        (1, 1, 200, 200, 64, 70, 0),
        (2, 2, 259, 170, 64, FAR, 0),
        (2, 1, 200, 200, 128, FAR, 0),
        (1, 1, 259, 70, 128, 40, 0),
    ],
)
def test_flash_attention_and_its_gradients(H, H_kv, T_q, T_k, D, left, right, one_pass, monkeypatch):
    dtype, scale = torch.float16, D**-0.5
    q, do = (torch.randn(1, H, T_q, D).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, H_kv, T_k, D).to(dtype) for _ in range(2))
    options = {"causal": right == 0, "window": None if left == FAR else left + 1}

    def expected(kind):
        leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
        wide = [x if x is leaves[0] else x.repeat_interleave(H // H_kv, 1) for x in leaves]
        o = reference.flash_attention(*wide, **options)
        o.backward(do.to(kind))
        return o.detach(), *(x.grad for x in leaves)

    o, lse = torch.full_like(q, float("nan")), torch.full((1, H, T_q), float("nan"))
    _flash_hopper.forward(q, k, v, o, lse, left, right, scale)
    truth, native = expected(torch.float64), expected(dtype)
    assert_close(o, truth[0], native[0])
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    monkeypatch.setitem(_flash_hopper.BACKWARD, D, _flash_hopper.BACKWARD[D]._replace(keys=0 if one_pass else 1000))
    sums = _flash_hopper.room_for_sums(q, k, left, right)
    assert (sums is not None) == one_pass
    if one_pass:
        sums.fill_(float("nan"))
    delta = delta_and_zeros(o, do, lse, None, sums)
    _flash_hopper.backward(q, k, v, do, lse, delta, sums, *gradients, left, right, scale)
    for actual, true, plain in zip(gradients, truth[1:], native[1:], strict=True):
        assert_close(actual, true, plain, gradient=True)


@pytest.mark.parametrize(
    ("D", "T_q", "T_k", "right", "factor", "largest", "again"),
    [
        (64, 200, 333, FAR, 1, 1, False),
        (128, 200, 200, 0, 1, 1, False),
        (64, 333, 200, FAR, 200, 1, True),  # scores that rise by more than 2^64 can hold
        (128, 333, 333, 0, 200, 1, True),
        (64, 200, 200, 0, 12, 1e37, True),  # sums that 2^64 holds, and their products with these values overflow
    ],
)
def test_flash_attention_with_references_of_the_first_block(D, T_q, T_k, right, factor, largest, again, monkeypatch):
    """And where they do not do, a second launch computes again; else that one changes nothing."""
    noted, launch = [], _flash_hopper.launch

    def noting(kernel, programs, lse, failed, *given, **constants):
        launch(kernel, programs, lse, failed, *given, **constants)
        noted.append((constants["FIXED"], failed.any().item()))

    monkeypatch.setattr(_flash_hopper, "launch", noting)
    monkeypatch.setitem(_flash_hopper.FIXED_FROM, D, 1)
    q = (factor * torch.randn(1, 2, T_q, D)).bfloat16()
    k, v = (torch.randn(1, 1, T_k, D).bfloat16() for _ in range(2))
    v *= largest
    o, lse = torch.full_like(q, float("nan")), torch.full((1, 2, T_q), float("nan"))
    _flash_hopper.forward(q, k, v, o, lse, FAR, right, D**-0.5)
    assert noted == [(True, again), (False, again)]
    k, v = (x.expand(1, 2, T_k, D) for x in (k, v))
    truth = reference.flash_attention(*(x.double() for x in (q, k, v)), causal=right == 0)
    assert_close(o, truth, reference.flash_attention(q, k, v, causal=right == 0))
    seen = torch.ones(T_q, T_k, dtype=torch.bool).tril(right if right == 0 else T_k)
    s = (q.double() @ k.double().mT * D**-0.5).masked_fill(~seen, -float("inf"))
    torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_when_attention_takes_references_of_the_first_block():
    def fixed(T_q, T_k, D=64, left=FAR, right=FAR, dtype=torch.bfloat16):
        q, k = (torch.empty(1, 1, T, D, dtype=dtype, device="meta") for T in (T_q, T_k))
        return _flash_hopper.reference_is_fixed(q, k, left, right)

    assert fixed(2048, 2048) and fixed(2048, 2048, right=0) and fixed(4096, 2048) and fixed(1024, 1024, D=128)
    assert not fixed(2047, 4096) and not fixed(4096, 2047), "short"
    assert not fixed(4096, 4095, right=0) and fixed(4095, 4096, right=0), "queries that see nothing"
    assert not fixed(4096, 4096, left=1000, right=0), "a window"
    assert not fixed(4096, 4096, dtype=torch.float16)


def test_a_trace_counts_what_the_tma_unit_moves():
    """Each tile of 128 queries reads all keys and values; nothing is read twice but these."""
    T, D = 256, 128
    q, k, v = (torch.randn(1, 1, T, D).to(torch.float16) for _ in range(3))
    o, lse = torch.empty_like(q), torch.empty(1, 1, T)
    with gpukit.trace() as t:
        _flash_hopper.forward(q, k, v, o, lse, FAR, FAR, D**-0.5)
    (launch,) = t.launches
    one = T * D * 2
    assert launch.read_bytes == one + 2 * (T // 128) * one
    assert launch.write_bytes == one + 4 * T
    assert launch.flops == 4 * T * T * D


# ---- what would go wrong on a GPU


@gluon.jit
def _fetch_blocks(x_desc, smem, ready, free, BLOCKS: gl.constexpr, STAGES: gl.constexpr, WRONG: gl.constexpr):
    for i in range(BLOCKS):
        slot, round = i % STAGES, i // STAGES
        if WRONG != "does not wait for a free slot":
            mbarrier.wait(free.index(slot), (round & 1) ^ 1)
        if WRONG == "announces too much":
            mbarrier.expect(ready.index(slot), 2 * x_desc.block_type.nbytes)
        else:
            mbarrier.expect(ready.index(slot), x_desc.block_type.nbytes)
        if WRONG == "arrives twice":
            mbarrier.arrive(ready.index(slot), count=1)
        fetch(x_desc, [i * 64, 0], ready.index(slot), smem.index(slot))


@gluon.jit
def _square_blocks(y_desc, smem, y_smem, ready, free, BLOCKS: gl.constexpr, STAGES: gl.constexpr, WRONG: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    for i in range(BLOCKS):
        slot, round = i % STAGES, i // STAGES
        if WRONG != "reads too early":
            mbarrier.wait(ready.index(slot), round & 1)
        x = smem.index(slot)
        acc = gl.zeros([64, 64], gl.float32, LAYOUT)
        acc = warpgroup_mma(x, x.permute((1, 0)), acc, is_async=True)
        if WRONG == "frees too early":
            mbarrier.arrive(free.index(slot), count=1)
        if WRONG != "never waits for the product":
            acc = warpgroup_mma_wait(0, deps=(acc,))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        if WRONG != "frees too early" and WRONG != "never frees":
            mbarrier.arrive(free.index(slot), count=1)
        if WRONG != "does not wait for the store":
            tma.store_wait(0)
        y_smem.index(0).store(acc.to(y_smem.dtype))
        if WRONG != "leaves out the fence":
            hopper.fence_async_shared()
        put(y_desc, [i * 64, 0], y_smem.index(0))
    if WRONG != "ends during the store":
        tma.store_wait(0)


@gluon.jit
def squares(x_desc, y_desc, BLOCKS: gl.constexpr, STAGES: gl.constexpr, WRONG: gl.constexpr):
    smem, y_smem = blocks_like(x_desc, STAGES), blocks_like(y_desc, 1)
    free = barriers(STAGES, 1)
    if WRONG == "does not initialize":
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    else:
        ready = barriers(STAGES, 1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_square_blocks, (y_desc, smem, y_smem, ready, free, BLOCKS, STAGES, WRONG)),
            (_fetch_blocks, (x_desc, smem, ready, free, BLOCKS, STAGES, WRONG)),
        ],
        [1], [24],
    )  # fmt: skip


def square(wrong: str = "", programs: int = 1, rows: int = 256, stages: int = 2):
    """x x^T of each block of 64 rows, and what it should be."""
    x = torch.randn(rows, 64).to(torch.float16)
    y = torch.full((rows, 64), float("nan"), dtype=torch.float16)
    described = [TensorDescriptor(t, list(t.shape), list(t.stride()), [64, 64], swizzled(2)) for t in (x, y)]
    squares[(programs,)](*described, BLOCKS=-(-rows // 64), STAGES=stages, WRONG=wrong)
    blocks = x.view(-1, 64, 64)
    return y, (blocks.double() @ blocks.double().mT).reshape(rows, 64), (blocks @ blocks.mT).reshape(rows, 64)


def test_groups_of_warps_hand_blocks_to_each_other():
    assert_close(*square())
    assert_close(*square(stages=1))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("reads too early", r"multiplies a block .*, which nobody has written"),
        ("does not wait for a free slot", r"while a product still reads it|nobody is left"),
        ("frees too early", r"copies to a block .* while a product still reads it: warpgroup_mma_wait comes first"),
        (
            "announces too much",
            r"group 0, line \d+, waits for phase 0 of barrier 0 .* 1 of 1 have arrived, 8,192 announced bytes are not on",
        ),
        ("arrives twice", r"arrives 1 times at barrier 0 .* where 0 of 1 are missing"),
        ("never frees", r"group 1, line \d+, waits for phase 0 of barrier 0 .*: 0 of 1 have arrived"),
        (
            "does not wait for the store",
            r"stores to a block .* while a copy to global memory still reads it: store_wait",
        ),
        ("leaves out the fence", r"which warps have written: without fence_async_shared"),
        ("ends during the store", r"warps end while a copy to global memory still reads shared memory"),
        ("does not initialize", r"a barrier that was not initialized: mbarrier.init comes first"),
    ],
)
def test_what_a_gpu_would_not_say(wrong, says):
    with pytest.raises(SynchronizationFault, match=says) as caught:
        square(wrong)
    assert caught.value.file == __file__ or "_hopper" in caught.value.file


@gluon.jit
def _two_layouts(x_ptr, y_ptr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    other: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    offs = gl.arange(0, 256, layout=one)
    x = gl.load(x_ptr + offs)
    gl.store(y_ptr + gl.arange(0, 256, layout=other), x + gl.full([256], 1.0, gl.float32, other))


def test_layouts_are_not_looked_at():
    """The compiler refuses the sum of two layouts."""
    x, y = torch.randn(256), torch.zeros(256)
    _two_layouts[(1,)](x, y)
    assert torch.equal(y, x + 1)


@gluon.jit
def _adds_up(x_desc, y_desc):
    smem, ready = blocks_like(x_desc, 1), barriers(1, 1)
    mbarrier.expect(ready.index(0), x_desc.block_type.nbytes)
    fetch(x_desc, [gl.program_id(0) * 64, 0], ready.index(0), smem.index(0))
    mbarrier.wait(ready.index(0), 0)
    tma.async_atomic_add(y_desc, [0, 0], smem.index(0))
    tma.store_wait(0)


@pytest.mark.skipif(not hasattr(tma, "async_atomic_add"), reason="this Triton's Gluon lacks reductions by the TMA unit")
def test_reductions_of_the_tma_unit():
    x, y = torch.randn(256, 64), torch.zeros(64, 64)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    described = [TensorDescriptor(t, list(t.shape), list(t.stride()), [64, 64], layout) for t in (x, y)]
    _adds_up[(4,)](*described)
    assert torch.allclose(y, x.view(4, 64, 64).sum(0), atol=1e-5)


def test_shared_memory_is_as_large_as_an_sm():
    with pytest.raises(SynchronizationFault, match=r"take 2\d\d,\d\d\d bytes; an SM has 232,448"):
        square(stages=29)


@gluon.jit
def _beyond(x_desc, y_ptr):
    smem = blocks_like(x_desc, 2)
    smem.index(2)._keep_alive()


def test_an_index_outside_of_a_block():
    x = torch.randn(64, 64).to(torch.float16)
    with pytest.raises(SynchronizationFault, match="index 2 of a block in shared memory that has 2"):
        _beyond[(1,)](TensorDescriptor(x, [64, 64], [64, 1], [64, 64], swizzled(2)), x)


@gluon.jit
def _unknown(x_ptr):
    gl.histogram(gl.arange(0, 16), 4)
    hopper.async_copy.commit_group()


def test_what_is_not_interpreted_is_named():
    with pytest.raises(Exception, match="Gluon's commit_group is not interpreted"):
        _unknown[(1,)](torch.zeros(16))
