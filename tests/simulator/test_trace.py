"""What a trace counts: accesses, samples, fresh memory, PyTorch ops."""

import os
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import gpukit
from gpukit import launches
from gpukit.simulator.interpreter.faults import MemoryFault, UnwrittenFault, WarpFault
from gpukit.simulator.trace import tracer as trace_module
from gpukit.simulator.trace.recording import Recording

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


def line_of(kernel, text):
    source = Path(__file__).read_text().split("\n")
    start = next(i for i, line in enumerate(source) if line.startswith(f"def {kernel.__name__}("))
    return next(i for i in range(start, len(source)) if text in source[i]) + 1


# ---- kernels (test_caches.py holds the sectors to those of an H200) ---------------------------------------------------------------------------------------------


@triton.jit
def copy(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(y_ptr + offs, tl.load(x_ptr + offs * stride, mask=mask), mask=mask)


@triton.jit
def transpose(x_ptr, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    x = tl.load(x_ptr + offs_m[:, None] * N + offs_n[None, :], mask=mask)
    tl.store(y_ptr + offs_n[None, :] * M + offs_m[:, None], x, mask=mask)


@triton.jit
def softmax(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + offs, mask=offs < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * n + offs, e / tl.sum(e, 0), mask=offs < n)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        offs_k = k + tl.arange(0, BK)
        a_mask = (offs_m < M) & (offs_k[None, :] < K)
        b_mask = (offs_k[:, None] < K) & (offs_n < N)
        a = tl.load(a_ptr + offs_m * K + offs_k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + offs_k[:, None] * N + offs_n, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + offs_m * N + offs_n, acc.to(tl.float16), mask=(offs_m < M) & (offs_n < N))


# ---- what a launch says -------------------------------------------------------------------------------------------


def test_a_launch_and_its_accesses():
    a, b, c = (torch.randn(64, 48).half(), torch.randn(48, 64).half(), torch.zeros(64, 64).half())
    with gpukit.trace() as t:
        matmul[(2, 4)](a, b, c, 64, 64, 48, BM=32, BN=16, BK=16)
    (launch,) = t.launches
    assert (launch.kernel, launch.grid, launch.programs, launch.function) == ("matmul", (2, 4), 8, matmul)
    assert launch.file == str(Path(__file__).resolve())
    assert launch.load_bytes == 2 * (64 * 48 * 4 + 48 * 64 * 2) and launch.store_bytes == 2 * 64 * 64
    assert launch.flops == t.flops == 2 * 64 * 64 * 48
    rows = [(r.kind, r.tensor, r.line, r.count, r.lanes, r.bytes, r.sectors) for r in launch.accesses]
    assert rows == [
        ("load", "a_ptr", line_of(matmul, "a = tl.load"), 24, 24 * 512, 24 * 1024, 24 * 32),
        ("load", "b_ptr", line_of(matmul, "b = tl.load"), 24, 24 * 256, 24 * 512, 24 * 16),
        ("store", "c_ptr", line_of(matmul, "tl.store"), 8, 8 * 512, 8 * 1024, 8 * 32),
    ]
    assert sum(r.sectors for r in launch.accesses if r.kind == "load") == launch.load_sectors
    assert t.bytes == t.read_bytes + t.write_bytes == launch.load_bytes + launch.store_bytes


@triton.jit
def histogram(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + tl.load(x_ptr + offs, mask=offs < n, other=0), 1, mask=offs < n)


def test_atomics_count_once_as_writes():
    x, y = torch.arange(100) % 7, torch.zeros(7, dtype=torch.int32)
    with gpukit.trace() as t:
        histogram[(4,)](x, y, 100, BLOCK=32)
    assert (t.launches[0].atomic_bytes, t.launches[0].store_bytes, t.write_bytes, t.read_bytes) == (400, 0, 400, 800)
    assert t.launches[0].atomic_sectors == 4
    assert t.written(y).all() and t.loaded(y).all() and y.sum() == 100


def test_written_and_loaded_elements():
    x, y = torch.zeros(64), torch.zeros(64)
    with gpukit.trace() as t:
        copy[(2,)](x, y, 20, 2, BLOCK=16)
    assert torch.equal(t.written(y), torch.arange(64) < 20)
    assert torch.equal(t.loaded(x), (torch.arange(64) < 40) & (torch.arange(64) % 2 == 0))
    assert not t.loaded(y).any() and not t.written(x).any() and not t.written(torch.zeros(3)).any()
    rows = x.view(8, 8)[:, ::2]
    assert torch.equal(t.loaded(rows), torch.arange(8)[:, None].expand(8, 4) < 5)
    assert torch.equal(t.loaded(x.view(torch.int64)), torch.arange(32) < 20)  # half of each is enough
    assert torch.equal(t.loaded(x.view(torch.int16)), t.loaded(x).repeat_interleave(2))


def test_accesses_of_two_widths_to_one_storage():
    x = torch.zeros(64)
    with gpukit.trace() as t:
        copy[(1,)](torch.zeros(8), x, 8, 1, BLOCK=8)
        copy[(1,)](torch.zeros(8, dtype=torch.int16), x.view(torch.int16)[120:], 8, 1, BLOCK=8)
    assert torch.equal(t.written(x), (torch.arange(64) < 8) | (torch.arange(64) >= 60))


def test_dry_launches_are_listed_and_not_run():
    x, y = torch.ones(64), torch.zeros(64)
    with gpukit.trace(dry=True) as t:
        copy[(4,)](x, y, 64, 1, BLOCK=16)
        y.add_(1)
    assert y.tolist() == [1.0] * 64
    assert [(launch.kernel, launch.programs, launch.dry) for launch in t.launches] == [("copy", 4, True)]
    assert t.launches[0].load_bytes == 0 and not t.written(y).any()
    assert "copy[4] (not run)" in t.report()


def test_detail_keeps_every_access_in_order():
    base = torch.arange(80.0)
    x, y = base[16:], torch.zeros(40)
    with gpukit.trace(detail=True) as t:
        copy[(3,)](x, y, 40, 1, BLOCK=16)
    events = t.launches[0].events
    assert [(e.program, e.kind, e.tensor, e.masked) for e in events] == [
        ((0,), "load", "x_ptr", 0),
        ((0,), "store", "y_ptr", 0),
        ((1,), "load", "x_ptr", 0),
        ((1,), "store", "y_ptr", 0),
        ((2,), "load", "x_ptr", 8),
        ((2,), "store", "y_ptr", 8),
    ]
    assert events[4].offsets.tolist() == list(range(32, 40)) and events[4].line == line_of(copy, "tl.load")
    with pytest.raises(ValueError, match="at most 1024 programs; copy was launched with 1025"):
        with gpukit.trace(detail=True):
            copy[(1025,)](x, y, 0, 1, BLOCK=16)


def test_axis_0_runs_first():
    y = torch.zeros(64, 64)
    with gpukit.trace(detail=True) as t:
        transpose[(2, 3)](y, torch.zeros(64, 64), 64, 64, BM=16, BN=16)
    assert [e.program for e in t.launches[0].events[::2]] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_on_launch_sees_the_real_arguments():
    x, y = torch.ones(16), torch.zeros(16)
    seen = []

    def on_launch(kernel, arguments):
        seen.append((kernel, arguments["x_ptr"] is x, arguments["n"], arguments["y_ptr"].sum().item()))

    with gpukit.trace(on_launch=on_launch) as t:
        copy[(1,)](x, y, 16, 1, BLOCK=16)
        copy[(1,)](x, y, n=16, stride=1, BLOCK=16)
    assert seen == [("copy", True, 16, 0.0), ("copy", True, 16, 16.0)]
    assert t.torch_ops == []  # what the callback does is not the user's


def test_a_fault_ends_the_block_and_the_trace_stays_usable():
    x, y = torch.zeros(16), torch.zeros(32)
    with pytest.raises(MemoryFault), gpukit.trace() as t:
        copy[(2,)](x, y, 32, 1, BLOCK=16)
    assert t.launches[0].accesses[0].count == 1 and not launches.watched()
    with gpukit.trace() as t:
        copy[(1,)](x, y, 16, 1, BLOCK=16)
    assert t.bytes == 128


@triton.jit
def through_descriptors(x, y_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    y = tl.make_tensor_descriptor(y_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    i = tl.program_id(0) * BM
    y.store([i, 0], x.load([i, 0]) + 1)


def test_descriptors_are_marked():
    x, y = torch.zeros(10, 16), torch.zeros(10, 16)
    with gpukit.trace() as t:
        through_descriptors[(3,)](TensorDescriptor.from_tensor(x, [4, 16]), y, 10, 16, BM=4, BN=16)
        copy[(1,)](x, y, 16, 1, BLOCK=16)
    first, second = t.launches
    assert [(a.kind, a.tensor, a.via, a.bytes) for a in first.descriptors] == [
        ("load", "x", "tma", 640),
        ("store", "y_ptr", "tma", 640),
    ]
    assert second.descriptors == [] and "load x, line" in first.report() and "(descriptor)" in first.report()


def test_runs_that_a_thread_could_move_at_once():
    x, y = torch.zeros(4096, dtype=torch.float16), torch.zeros(4096, dtype=torch.float16)
    launches = {
        (2048, 16): lambda: copy[(2,)](x, y, 2048, 1, BLOCK=1024),
        (62, 2): lambda: copy[(2,)](x, y, 1024 + 31, 1, BLOCK=1024),  # the last program has 31 elements
        (2, 2): lambda: copy[(2,)](x, y, 1024, 2, BLOCK=512),
        (2046, 2): lambda: copy[(1,)](x[1:], y, 1023, 1, BLOCK=1024),
        (32, 16): lambda: transpose[(4, 4)](x, y, 64, 64, BM=16, BN=16),
        (80, 16): lambda: softmax[(4,)](x, y, 40, BLOCK=64),
    }
    for want, launch in launches.items():
        with gpukit.trace() as t:
            launch()
        access = t.launches[0].accesses[0]
        assert (access.run_bytes, access.vector_bytes) == want


def test_a_launch_knows_its_arguments_and_options():
    x, y = torch.zeros(64), torch.zeros(64)
    with gpukit.trace(gpu="a100") as t:
        copy[(4,)](x, y, 64, 1, BLOCK=16, num_warps=2)
    (launch,) = t.launches
    assert launch.arguments["x_ptr"] is x and launch.arguments["BLOCK"] == 16
    assert (launch.options, launch.num_warps, launch.gpu) == ({"num_warps": 2}, 2, "a100-80gb")
    with pytest.raises(ValueError, match="no GPU is called 'h300'; did you mean"):
        gpukit.trace(gpu="h300")


# ---- reads of what nobody wrote -----------------------------------------------------------------------------------


def test_a_load_of_fresh_memory_is_a_fault():
    with pytest.raises(UnwrittenFault) as caught, gpukit.trace():
        x = torch.empty(64)
        copy[(2,)](torch.zeros(64), x, 20, 1, BLOCK=16)
        copy[(2,)](x, torch.zeros(64), 24, 1, BLOCK=16)
    line = line_of(copy, "tl.load")
    assert str(caught.value) == (
        f"load of x_ptr: program 1, line {line}: 4 elements of x_ptr [64] that nobody has written; first at index 20"
    )
    assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == line
    with pytest.raises(UnwrittenFault, match="atomic of y_ptr"), gpukit.trace():
        histogram[(1,)](torch.zeros(8, dtype=torch.int64), torch.empty(3, dtype=torch.int32), 8, BLOCK=8)


def test_faults_of_fresh_memory_can_be_listed_only():
    with gpukit.trace(raises=False) as t:
        copy[(1,)](torch.empty(16), torch.zeros(16), 16, 1, BLOCK=16)
        copy[(1,)](torch.zeros(16), torch.zeros(16), 16, 1, BLOCK=16)
    assert [(f.tensor, f.count, f.kind) for f in t.unwritten] == [("x_ptr", 16, "load")]


def test_memory_that_somebody_filled_is_not_fresh():
    y = torch.zeros(64)
    before = torch.empty(64)
    with gpukit.trace() as t:
        copy[(1,)](before, y, 64, 1, BLOCK=64)  # allocated outside: nobody knows
        for fill in (lambda x: x.zero_(), lambda x: x[3:].copy_(y[3:]), lambda x: torch.exp(y, out=x)):
            x = torch.empty(64)
            fill(x)
            copy[(1,)](x, y, 64, 1, BLOCK=64)
        x = torch.empty(64)
        copy[(1,)](y, x, 64, 1, BLOCK=64)
        copy[(1,)](x.view(8, 8).t(), y, 64, 1, BLOCK=64)
        for _ in range(20):  # an address that is used again is another tensor
            torch.empty(64)
            copy[(1,)](torch.ones(64), y, 64, 1, BLOCK=64)
    assert t.unwritten == []
    copy[(1,)](torch.empty(64), y, 64, 1, BLOCK=64)


# ---- threads of one program ---------------------------------------------------------------------------------------


@triton.jit
def one_and_the_row(x_ptr, y_ptr, at, N, HOW: tl.constexpr, BLOCK: tl.constexpr):
    """Loads one element by itself and writes the row in place, in several orders."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0.0)
    if HOW == "load, store":
        one = tl.load(x_ptr + at)
        tl.store(x_ptr + offs, x + 1, mask=offs < N)
    elif HOW == "load, barrier, store":
        one = tl.load(x_ptr + at)
        tl.debug_barrier()
        tl.store(x_ptr + offs, x + 1, mask=offs < N)
    elif HOW == "load, sum, store":
        one = tl.load(x_ptr + at)
        tl.store(x_ptr + offs, x + tl.sum(x, axis=0), mask=offs < N)
    elif HOW == "store, load":
        tl.store(x_ptr + offs, x + 1, mask=offs < N)
        one = tl.load(x_ptr + at)
    elif HOW == "store, barrier, load":
        tl.store(x_ptr + offs, x + 1, mask=offs < N)
        tl.debug_barrier()
        one = tl.load(x_ptr + at)
    elif HOW == "store, store":
        one = tl.sum(x, axis=0)
        tl.store(x_ptr + offs, x + 1, mask=offs < N)
        tl.store(x_ptr + at, one)
    elif HOW == "store, store the same":
        one = tl.sum(x, axis=0)
        tl.store(x_ptr + offs, x * 0 + 7, mask=offs < N)
        tl.store(x_ptr + at, 7.0)
    elif HOW == "store one, load it":
        tl.store(x_ptr + at, tl.sum(x, axis=0))
        one = tl.load(x_ptr + at)
    elif HOW == "store one, barrier, load it":
        tl.store(x_ptr + at, tl.sum(x, axis=0))
        tl.debug_barrier()
        one = tl.load(x_ptr + at)
    elif HOW == "count":
        tl.debug_barrier()
        one = tl.load(x_ptr + at)
        tl.store(x_ptr + at, one + 1)
    elif HOW == "shift":
        one = tl.sum(x, axis=0)
        following = tl.load(x_ptr + offs + 1, mask=offs + 1 < N, other=0.0)
        tl.store(x_ptr + offs, following, mask=offs < N)
    elif HOW == "block by block":
        one = tl.sum(x, axis=0)
        for start in range(0, N, 16):
            part = tl.arange(0, 16) + start
            tl.store(x_ptr + part, tl.load(x_ptr + part, mask=part < N) + 1, mask=part < N)
    else:
        one = tl.load(x_ptr + at)
        tl.store(x_ptr + offs, x + 1, mask=(offs < N) & (offs != at))
    tl.store(y_ptr, one)


@pytest.mark.parametrize(
    ("how", "kind", "clash"),
    [
        ("load, store", "store", "load"),
        ("store, load", "load", "store"),
        ("store, store", "store", "store"),
        ("store one, load it", "load", "store"),
        ("shift", "store", "load"),
    ],
)
def test_threads_of_one_program_race(how, kind, clash):
    with gpukit.trace(raises=False) as t:
        one_and_the_row[(1,)](torch.rand(50), torch.zeros(1), 33, 50, HOW=how, BLOCK=64)
    (fault,) = t.disorder
    assert (fault.kind, fault.clash, fault.tensor, fault.program) == (kind, clash, "x_ptr", (0,))
    assert 0 < fault.line - fault.before < 4 and f"line {fault.before}" in str(fault)
    assert fault.first_index == 33 or how == "shift"
    with pytest.raises(WarpFault), gpukit.trace():
        one_and_the_row[(1,)](torch.rand(50), torch.zeros(1), 33, 50, HOW=how, BLOCK=64)


@pytest.mark.parametrize(
    "how",
    [
        "load, barrier, store",
        "load, sum, store",
        "store, barrier, load",
        "store, store the same",
        "store one, barrier, load it",
        "count",
        "block by block",
        "another element",
    ],
)
def test_what_is_no_race_of_threads(how):
    with gpukit.trace() as t:
        one_and_the_row[(1,)](torch.rand(50), torch.zeros(1), 33, 50, HOW=how, BLOCK=64)
    assert t.disorder == []


def test_one_warp_is_in_step_with_itself():
    with gpukit.trace() as t:
        one_and_the_row[(1,)](torch.rand(50), torch.zeros(1), 33, 50, HOW="load, store", BLOCK=64, num_warps=1)
    assert t.disorder == []


# ---- sampled launches ---------------------------------------------------------------------------------------------


def counts(launch):
    names = [f"{kind}_{what}" for kind in ("load", "store", "atomic") for what in ("bytes", "sectors")]
    return [getattr(launch, name) for name in [*names, "flops"]], [vars(a) for a in launch.accesses]


SAMPLED = {
    "copy": (4, lambda device: copy[(64,)](*empty(device, 1 << 16), 1 << 16, 1, BLOCK=1024)),
    "softmax": (3, lambda device: softmax[(32,)](*empty(device, 32 * 1024), 1024, BLOCK=1024)),
    "transpose": (5, lambda device: transpose[(8, 8)](*empty(device, 1 << 16), 256, 256, BM=32, BN=32)),
    "matmul": (2, lambda device: matmul[(4, 4)](*empty(device, 1 << 14, 3), 128, 128, 128, BM=32, BN=32, BK=32)),
    "all of them": (99, lambda device: softmax[(7,)](*empty(device, 7 * 781), 781, BLOCK=1024)),
}


def empty(device, n, tensors=2):
    return [torch.zeros(n, dtype=torch.float16, device=device) for _ in range(tensors)]


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampled_launch_counts_like_a_whole_one(name):
    sample, launch = SAMPLED[name]
    with gpukit.trace() as whole:
        launch("cpu")
    for device in ("cpu", "meta"):
        with gpukit.trace() as outer, gpukit.trace(sample=sample) as t:
            launch(device)
        assert counts(t.launches[0]) == counts(whole.launches[0]) == counts(outer.launches[0])
        assert t.launches[0].sampled == min(sample, whole.launches[0].programs)


def test_where_programs_differ_more_are_looked_at():
    """Sums of 1 to 64 blocks in the order of the programs: two of them would say little. Of larger blocks fewer are run, in pairs
    that have as much to do as any two others."""

    @triton.jit
    def ragged(x_ptr, y_ptr, BLOCK: tl.constexpr):
        total = tl.zeros([BLOCK], tl.float32)
        for i in range(tl.program_id(0) // 64 + 1):
            total += tl.load(x_ptr + i * BLOCK + tl.arange(0, BLOCK))
        tl.store(y_ptr + tl.program_id(0), tl.sum(total))

    x, y = torch.empty(1 << 22, device="meta"), torch.empty(4096, device="meta")
    loaded = {}
    for block in (128, 65_536):
        with gpukit.trace(sample=2) as t:
            ragged[(4096,)](x, y, BLOCK=block)
        launch = t.launches[0]
        loaded[block] = launch.sampled, launch.load_bytes / (4096 * 32.5 * 4 * block)
    assert loaded[128][0] >= 32 > 16 >= loaded[65_536][0] and loaded[128][1] == pytest.approx(1, rel=0.1)
    assert loaded[65_536][1] == pytest.approx(1, rel=0.05)


def test_programs_that_move_nothing_are_among_those_of_the_sample():
    @triton.jit
    def seldom(x_ptr, rows_ptr, y_ptr, BLOCK: tl.constexpr):
        if tl.program_id(0) % 4 == 1:
            offs = tl.load(rows_ptr + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
            tl.store(y_ptr + offs, tl.load(x_ptr + offs))

    x, y = torch.empty(1 << 20, device="meta"), torch.empty(1 << 20, device="meta")
    with gpukit.trace(sample=8) as t:
        seldom[(1024,)](x, torch.arange(1024), y, BLOCK=1024)
    (launch,) = t.launches
    least, most = launch.spread
    assert least < 1 < most and launch.store_bytes == pytest.approx(1 << 20, rel=0.5)


def test_a_sampled_launch_computes_nothing():
    x, y = torch.ones(64), torch.zeros(64)
    with gpukit.trace(sample=2) as t:
        copy[(4,)](x, y, 64, 1, BLOCK=16)
    assert not y.any() and "copy[4] (2 run)" in t.report()
    with pytest.raises(ValueError, match="a sampled trace does not know which elements"):
        t.written(y)
    y = torch.zeros(8, dtype=torch.int32)
    with gpukit.trace(sample=1):
        histogram[(4,)](torch.zeros(128, dtype=torch.int64), y, 128, BLOCK=32)
    assert not y.any()


def test_sampled_tensors_may_be_larger_than_any_memory():
    x, y = (torch.empty(1 << 22, 1 << 18, dtype=torch.bfloat16, device="meta") for _ in range(2))
    with gpukit.trace(sample=3) as t:
        softmax_of_long_rows[(1 << 22,)](x, y, 1 << 18, BLOCK=4096)
    assert t.launches[0].load_bytes == t.launches[0].store_bytes == 1 << 41
    with pytest.raises(ValueError, match=r"x_ptr is a meta tensor, which has no memory: only gpukit.trace\(sample=N\)"):
        copy[(1,)](x, y, 16, 1, BLOCK=16)


@triton.jit
def softmax_of_long_rows(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    for start in range(0, N, BLOCK):
        offs = row + start + tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, tl.load(x_ptr + offs))


def test_a_sampled_launch_keeps_to_its_tensors_and_reads_indices():
    x, y = (torch.zeros(100, device="meta") for _ in range(2))
    with pytest.raises(MemoryFault, match="load outside x_ptr: program 1, line"):
        with gpukit.trace(sample=4):
            copy[(4,)](x, y, 100, 2, BLOCK=32)
    table, index = torch.zeros(1 << 20, device="meta"), torch.arange(64) * 64
    with gpukit.trace(sample=2) as t:
        picked[(4,)](table, index, torch.zeros(64, device="meta"), BLOCK=16)
    assert t.launches[0].accesses[1].sectors == 64
    for wrong in (0, -1, 2.0):
        with pytest.raises(ValueError, match="sample must be a number of programs, at least 1"):
            gpukit.trace(sample=wrong)


@triton.jit
def begins(x_ptr, index_ptr, y_ptr, HOW: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(1), tl.program_id(0)
    if HOW == "grouped":
        row = row // 3
    if HOW == "scattered":
        row = row * row % 64
    offs = row * 8 * BLOCK + column * BLOCK + tl.arange(0, BLOCK)
    if HOW == "gathered":
        offs += tl.load(index_ptr + row)
    if HOW == "picked" or HOW == "branched":
        index = tl.load(index_ptr + row * 8 + column)
        if HOW == "branched":
            if index > 9:
                row = row * 0
        own = x_ptr + row * 8 * BLOCK + index * 2
        tl.store(y_ptr + row + 64 * column, tl.load(own, mask=(index >= 0) & (index < 50)))
    if HOW == "counted":
        index = tl.sum(tl.arange(0, 4) + tl.load(index_ptr + row), 0)
        tl.store(y_ptr + row, tl.load(x_ptr + index))
    live = offs < 8 * BLOCK * (tl.num_programs(1) - 1) + 8 * BLOCK - 4
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=live) + tl.load(x_ptr + offs, mask=live), mask=live)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("rows", [True]),
        ("grouped", [True]),
        ("scattered", [False]),
        ("picked", [True]),
        # A block of places, a branch and a sum of a block are not followed.
        ("gathered", []),
        ("branched", []),
        ("counted", []),
    ],
)
def test_where_programs_begin_is_told_from_a_few_where_it_can_be(how, expected, monkeypatch):
    """What is noted is the same as if each of them had run; the last ones of each axis, whose masks are others, run."""

    def launch():
        x, y = (torch.empty(64 * 8 * 64 + 64, device="meta") for _ in range(2))
        index = torch.arange(512) * 37 % (61 if how == "picked" else 64) - int(how == "picked")
        begins[(8, 64)](x, index, y, HOW=how, BLOCK=64, num_warps=32)

    assert told_from_a_few(launch, monkeypatch) == expected


def told_from_a_few(launch, monkeypatch) -> list[bool]:
    """What was said when the others were to be told; what was noted is the same as if each program had run."""
    said, infer = [], Recording.infer

    def noted():
        with gpukit.trace(sample=2) as t:
            launch()
        recording = t.launches[0].recording
        columns = np.stack([np.array(c) for c in (recording.program, recording.site, recording.tile, recording.start)])
        return columns[:, np.argsort(columns[0], kind="stable")].tolist(), recording.cut

    monkeypatch.setattr(Recording, "infer", lambda *given: said.append(infer(*given)) or said[-1])
    told = noted()
    monkeypatch.setattr(Recording, "infer", lambda *given: False)
    assert told == noted()
    return said


@triton.jit
def fewer_and_fewer(x_ptr, y_ptr, BLOCKS):
    program = tl.program_id(0)
    for i in range(0, BLOCKS - 1 - program % BLOCKS):
        tl.store(y_ptr + program, tl.load(x_ptr + program + i))
    tl.store(y_ptr + program, 1.0)


@pytest.mark.parametrize("blocks", [64, 96])
def test_loops_tell_programs_apart_that_lie_on_one_line(blocks, monkeypatch):
    """As under a causal mask: of so many programs the last one has no turn, and the one before it has one, and ends by itself."""
    x, y = (torch.empty(4096, device="meta") for _ in range(2))
    assert told_from_a_few(lambda: fewer_and_fewer[(32 * blocks,)](x, y, blocks, num_warps=32), monkeypatch) == [True]


@triton.jit
def long_loop(x_ptr, index_ptr, y_ptr, N, HOW: tl.constexpr, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0).to(tl.int64) * N
    offs, total, carried = tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32), 0
    for k in tl.range(0, N, BLOCK):
        at = k
        if HOW == "backwards":
            total += tl.load(x_ptr + (N - BLOCK - k) + offs)
        if HOW == "named":
            at = k + 0
        if HOW == "again after 16 turns":
            at = k % (16 * BLOCK)
        if HOW == "carried":
            carried += BLOCK
            at = carried - BLOCK
        if HOW == "indices":
            at = tl.load(index_ptr + k // BLOCK)
        if HOW == "a branch":
            if k == 37 * BLOCK:
                total += tl.load(x_ptr + offs)
        if HOW == "a loop":
            for i in tl.range(0, 2):
                total += tl.load(x_ptr + k + i * 4 + offs, mask=offs < 4)
        total += tl.load(x_ptr + at + offs, mask=at + offs < N)
        if HOW == "stores":
            tl.store(y_ptr + offs, total)
    tl.store(y_ptr + offs, total)


@triton.jit
def the_same_loop_again(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    offs, total = tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32)
    for row in range(0, 4):
        start = (tl.program_id(0) * 4 + row) * N
        for k in tl.range(0, N, BLOCK):
            total += tl.load(x_ptr + start + k + offs, mask=offs < BLOCK - row // 3)
        tl.store(y_ptr + (tl.program_id(0) * 4 + row) * BLOCK + offs, total)


def test_a_loop_found_alike_is_looked_at_less_the_next_time(monkeypatch):
    from gpukit.simulator.interpreter import memory_ops, turns

    admit, made = memory_ops._admit, []
    monkeypatch.setattr(memory_ops, "_admit", lambda *given: made.append(given) or admit(*given))

    def traced():
        made.clear()
        with gpukit.trace(sample=1, gpu="h100-sxm") as t:
            the_same_loop_again[(1,)](
                torch.empty(4, 4096, device="meta"), torch.empty(256, device="meta"), 4096, BLOCK=64
            )
        rows = list(t.launches[0].recording.rows())
        return sum(kind == "load" for kind, *_ in made), (counts(t.launches[0]), rows)

    some, found = traced()
    assert some == turns._FIRST + turns._PROBES + 1 + 3 * (turns._FIRST + 1)
    monkeypatch.setattr(turns, "_LEAST", 10**9)
    every, expected = traced()
    assert found == expected and every == 4 * 64


@pytest.mark.parametrize(
    ("how", "N", "in_part"),
    [
        ("", 4096, True), ("backwards", 4096, True), ("the last turn is masked", 4090, False),
        ("again after 16 turns", 4096, False), ("carried", 4096, False), ("named", 4096, False), ("indices", 4096, False),
        ("a branch", 4096, False), ("a loop", 4096, False), ("stores", 4096, False), ("a short loop", 64 * 20, False),
    ],
)  # fmt: skip
def test_of_a_long_loop_as_many_turns_are_run_as_tell_the_others(how, N, in_part, monkeypatch):
    """What is counted is that of all turns: accesses, FLOPs, where rows begin, and how often lines run."""
    from gpukit.simulator.interpreter import memory_ops, turns
    from gpukit.simulator.interpreter.lines import LineCounter

    admit, made = memory_ops._admit, []
    monkeypatch.setattr(memory_ops, "_admit", lambda *given: made.append(given) or admit(*given))
    index = torch.arange(64, dtype=torch.int32) * 64

    def traced():
        made.clear()
        x, y = torch.empty(8, N, device="meta"), torch.empty(64, device="meta")
        with gpukit.trace(sample=2, gpu="h100-sxm") as t, LineCounter() as lines:
            long_loop[(8,)](x, index, y, N, HOW=how, BLOCK=64)
        loads = sum(kind == "load" for kind, *_ in made)
        recording = t.launches[0].recording
        rows = [(*row[:2], row[3]) for row in recording.rows()]
        return loads, (t.launches[0], counts(t.launches[0]), rows, recording.tiles, recording.dots, lines.launches)

    some, found = traced()
    monkeypatch.setattr(turns, "_LEAST", 10**9)
    every, expected = traced()
    assert found == expected
    assert some < every / 2 if in_part else some >= every


@triton.jit
def picked(x_ptr, index_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + tl.load(index_ptr + offs)))


# ---- PyTorch ops --------------------------------------------------------------------------------------------------


def naive_softmax(x):
    largest = x.amax(dim=1)
    z = x - largest[:, None]
    e = torch.exp(z)
    total = e.sum(dim=1)
    return e / total[:, None]


def test_naive_softmax_moves_8mn_and_4m():
    M, N = 37, 781
    with gpukit.trace() as t:
        naive_softmax(torch.randn(M, N))
    ops = t.torch_ops[1:]  # without randn
    assert sum(op.read_bytes for op in ops) == 4 * (5 * M * N + 2 * M)
    assert sum(op.write_bytes for op in ops) == 4 * (3 * M * N + 2 * M)
    assert [op.name for op in ops if op.read_bytes] == ["aten.amax", "aten.sub", "aten.exp", "aten.sum", "aten.div"]


A = 12 * 4  # bytes of x in the table below: fp32 [3, 4]
OPS = {
    "view": (lambda x: x.view(4, 3).t()[1:].unsqueeze(0).expand(2, -1, -1), 0, 0),
    "empty": (lambda x: (torch.empty(5), torch.empty_like(x), x.new_empty(9)), 0, 0),
    "zeros": (lambda x: torch.zeros(5), 0, 20),
    "zeros_like": (lambda x: torch.zeros_like(x), 0, A),
    "full": (lambda x: torch.full((5,), 2.0), 0, 20),
    "fill_": (lambda x: x.fill_(3), 0, A),
    "zero_": (lambda x: x.zero_(), 0, A),
    "arange": (lambda x: torch.arange(5), 0, 40),
    "scalar": (lambda x: x * 2, A, A),
    "in place": (lambda x: x.add_(1), A, A),
    "copy_": (lambda x: x.copy_(torch.empty(4)), 16, A),
    "out": (lambda x: torch.exp(x, out=torch.empty(3, 4)), A, A),
    "twice the same": (lambda x: x * x, A, A),
    "broadcast": (lambda x: x + x[:, :1], A + 12, A),
    "expanded": (lambda x: torch.exp(x[:1].expand(3, 4)), 16, A),
    "contiguous": (lambda x: x.t().contiguous(), A, A),
    "cast": (lambda x: x.half(), A, A // 2),
    "max with indices": (lambda x: x.max(dim=1), A, 12 + 24),
    "matmul": (lambda x: x @ torch.empty(4, 2), A + 32, 24),
    "item": (lambda x: x[0, 0].item(), 4, 0),
    "assignment": (lambda x: x.__setitem__(1, 5.0), 0, 16),
    "embedding": (lambda x: torch.nn.functional.embedding(torch.ones(2, dtype=torch.int64), x), 16 + 32, 32 + 16),
    "index": (lambda x: x[torch.ones(2, dtype=torch.int64)], 16 + 32, 32 + 16),  # ones() writes 16
}


@pytest.mark.parametrize("name", OPS)
def test_torch_ops(name):
    op, read, write = OPS[name]
    x = torch.randn(3, 4)
    with gpukit.trace() as t:
        op(x)
    assert (t.read_bytes, t.write_bytes) == (read, write)


def test_backward_is_counted():
    x = torch.randn(8, requires_grad=True)
    with gpukit.trace() as t:
        x.exp().sum().backward()
    assert "aten.exp" in [op.name for op in t.torch_ops] and "aten.mul" in [op.name for op in t.torch_ops]


def test_a_custom_op_made_of_launches_counts_once():
    @torch.library.custom_op("gpukit_test::copied", mutates_args=())
    def copied(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        copy[(1,)](x, y, 16, 1, BLOCK=16)
        return y

    x = torch.ones(16)
    with gpukit.trace() as t:
        y = copied(x)
    assert torch.equal(x, y) and [e.name for e in t.events] == ["copy"]


def test_without_triton_ops_are_counted_all_the_same(monkeypatch):
    monkeypatch.setattr(trace_module, "layer", None)
    with gpukit.trace() as t:
        torch.ones(4) + 1
    assert (t.read_bytes, t.write_bytes) == (16, 32)


# ---- the whole block ----------------------------------------------------------------------------------------------


def test_nested_blocks_both_count_and_count_once():
    x, y = torch.ones(16), torch.zeros(16)
    with gpukit.trace() as outer:
        x.exp()
        with gpukit.trace() as inner:
            x.exp()
            copy[(1,)](x, y, 16, 1, BLOCK=16)
    assert [e.name for e in inner.events] == ["aten.exp", "copy"]
    assert [e.name for e in outer.events] == ["aten.exp", "aten.exp", "copy"]
    assert inner.launches[0].bytes == outer.launches[0].bytes == 128
    assert (inner.bytes, outer.bytes) == (256, 384)


def block(x, y):
    copy[(4,)](x, y, 64, 1, BLOCK=16)
    copy[(4,)](x, y, 64, 1, BLOCK=16)
    naive_softmax(y.view(8, 8))


REPORT = """\
step       times  programs  read (bytes)  written (bytes)  load sectors  store sectors  dot (FLOP)
--------------------------------------------------------------------------------------------------
copy[4]        2         8           512              512            16             16           0
aten.amax      1                     256               32
aten.sub       1                     288              256
aten.exp       1                     256              256
aten.sum       1                     256               32
aten.div       1                     288              256
--------------------------------------------------------------------------------------------------
total          7         8         1,856            1,344            16             16           0"""


def test_the_report_is_a_table():
    x, y = torch.ones(64), torch.zeros(64)
    with gpukit.trace() as t:
        block(x, y)
    assert t.report() == repr(t) == REPORT
    page = t._repr_html_()
    assert all(word.strip("-") in page for word in REPORT.split())
    assert page.count("<tr>") == 8


def test_rows_and_a_table_with_caches():
    x, y = torch.ones(64), torch.zeros(64)
    with gpukit.trace() as t:
        copy[(4,)](x, y, 64, 1, BLOCK=16)
        x.exp()
    t.launches[0].recording.answers["h200", True] = t.launches[0].traffic(compiled=False)  # without the compiler
    launch, op = t.rows(caches=True)
    assert (launch["name"], launch["kind"], launch["programs"], launch["read_bytes"]) == ("copy", "launch", 4, 256)
    assert (launch["l2_read_sectors"], launch["l2_write_sectors"], launch["dram_read_bytes"]) == (8, 8, 256)
    assert op == {"name": "aten.exp", "kind": "torch", "read_bytes": 256, "write_bytes": 256}
    assert "L2 write sectors" in t.report(caches=True) and "L2 write sectors" not in t.report()
    assert "l2_read_sectors" not in t.rows()[0]
    pandas = pytest.importorskip("pandas")
    assert isinstance(t.dataframe(), pandas.DataFrame) and len(t.dataframe()) == 2


def test_an_empty_block():
    with gpukit.trace() as t:
        pass
    assert t.bytes == 0 and t.report().endswith("0") and "<table>" in t._repr_html_()


def test_a_trace_is_deterministic():
    def counted():
        with gpukit.trace() as t:
            block(torch.ones(64), torch.zeros(64))
        known = [vars(e) | {"accesses": [vars(a) for a in getattr(e, "accesses", ())]} for e in t.events]
        return [{k: v for k, v in facts.items() if k != "arguments"} for facts in known]

    assert counted() == counted()


def test_a_launch_on_a_gpu_is_counted_in_the_interpreter_first(tmp_path):
    """Without a GPU the launch itself then fails, which is how this test knows that it was tried."""
    script = tmp_path / "compiled.py"
    script.write_text(
        "import gpukit, torch, triton, triton.language as tl\n"
        "@triton.jit\n"
        "def twice(x):\n"
        "    return x * 2\n"
        "@triton.jit\n"
        "def k(x_ptr, y_ptr, N, BLOCK: tl.constexpr):\n"
        "    offs = tl.arange(0, BLOCK)\n"
        "    x = tl.load(x_ptr + offs, mask=offs < N, other=0.0)\n"
        "    tl.store(y_ptr + offs, twice(x) / tl.sum(x, axis=0), mask=offs < N)\n"
        "x, y = torch.ones(100), torch.zeros(100)\n"
        "with gpukit.trace() as t:\n"
        "    try:\n"
        "        k[(1,)](x, y, 100, BLOCK=128, num_warps=4)\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
        "print(t.launches[0].kernel, t.launches[0].load_bytes, t.launches[0].store_bytes)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert "k 400 400" in run.stdout, run.stdout + run.stderr
    assert "active driver" in run.stdout
