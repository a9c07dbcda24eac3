"""What the programs that share a tile need: a counter that tells the last of them, and the kernels that use it."""

from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl

from gpukit.kernels import _launch, _tiles, decode_attention, int4_matmul, matmul
from gpukit.kernels._tiles import added, counters, is_last
from gpukit.kernels.quantized_matmul import quantize_int4
from gpukit.reference.decode_attention import OP
from gpukit.simulator.interpreter.faults import RaceFault
from tests.kernels.cases import seeded


@triton.jit
def shared_sums(x_ptr, parts_ptr, counters_ptr, y_ptr, tiles, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    tile, share = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    size = tiles * BLOCK
    tl.store(parts_ptr + share * size + offs, tl.load(x_ptr + share * size + offs))
    if is_last(counters_ptr + tile, SHARES):
        tl.store(y_ptr + offs, added(parts_ptr + offs, size, offs < size, SHARES))


@triton.jit
def unordered_sums(parts_ptr, counter_ptr, y_ptr, SHARES: tl.constexpr):
    tl.store(parts_ptr + tl.program_id(0), 1.0 + tl.program_id(0))
    if tl.atomic_add(counter_ptr, 1, sem="relaxed") == SHARES - 1:
        tl.store(y_ptr, added(parts_ptr, 1, True, SHARES))


def test_the_last_one_adds_and_leaves_zeros(device):
    count = torch.zeros(8, dtype=torch.int32, device=device)
    for shares, tiles in ((1, 3), (2, 5), (7, 8)):
        # Sums that depend on their order, which is that of the shares.
        x = torch.randn((shares, tiles, 16), generator=seeded(shares)).to(device) * 1e4
        y = torch.full((tiles, 16), float("nan"), device=device)
        for _ in range(3):
            shared_sums[(tiles * shares,)](x, torch.empty_like(x), count, y, tiles, SHARES=shares, BLOCK=16)
            expected = x[0]
            for share in x[1:]:
                expected = expected + share
            assert torch.equal(y, expected)
            assert not count.any(), "the next launch would find other than zeros"


@pytest.mark.skipif(not _launch.INTERPRETED, reason="the interpreter looks for races")
def test_without_an_order_it_would_be_a_race():
    with pytest.raises(RaceFault):
        unordered_sums[(3,)](torch.zeros(3), torch.zeros(1, dtype=torch.int32), torch.zeros(1), SHARES=3)


@pytest.fixture
def gpu(monkeypatch):
    """As on a GPU, whose stream and capture are what the test says."""
    now = {"stream": 7, "capturing": False, "device": None}
    monkeypatch.setattr(_tiles, "interpreted", lambda: False)
    monkeypatch.setattr(_tiles, "_counters", {})
    monkeypatch.setattr(_tiles, "current_stream", lambda: lambda device: now["stream"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now["device"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["capturing"])
    monkeypatch.setattr(torch.cuda, "device", lambda device: now.update(device=device.index) or nullcontext())
    return now


def test_counters_are_kept_for_their_stream_alone(gpu):
    cpu = torch.device("cpu")
    first = counters(10, cpu, True)
    assert counters(4000, cpu, True) is first and len(first) >= 4000
    larger = counters(len(first) + 1, cpu, True)
    assert larger is not first and not larger.any() and counters(10, cpu, True) is larger
    gpu["stream"] = 8
    assert counters(10, cpu, True) is not larger
    gpu["stream"], gpu["device"] = 7, 1  # whatever device was current
    assert counters(10, cpu, True) is larger
    for change in ({"capturing": True}, {}):
        gpu.update(change)
        one, other = counters(10, cpu, bool(change)), counters(10, cpu, bool(change))
        assert one is not other and not one.any() and one is not larger, "a graph has counters of its own"
        gpu["capturing"] = False
    assert len(_tiles._counters) == 2


# ---------------------------------------------------------------------------------------------------- on a GPU alone
def split_calls(device):
    """Products and attention that are split, and what they gave."""
    g = seeded()
    weight = [x.to(device) for x in quantize_int4(torch.randn(4096, 1024, generator=g))]
    a = torch.randn(4, 4096, generator=g).to(device, torch.bfloat16)
    b = torch.randn(4096, 256, generator=g).to(device, torch.bfloat16)
    cache = [x.to(device) for x in OP.make_inputs((1, 8, 2, 4096, 64), torch.bfloat16, g)]
    calls = (lambda: int4_matmul(a, *weight), lambda: matmul(a, b), lambda: decode_attention(*cache))
    return calls, [call() for call in calls]


@pytest.mark.gpu
def test_the_same_bits_on_every_stream(device):
    calls, expected = split_calls(device)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(40):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append([call() for call in calls])
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for given in results for x, y in zip(given, expected, strict=True))
    assert len(_tiles._counters) >= 4, "one set for each stream"
    assert not any(count.any() for count in _tiles._counters.values())


@pytest.mark.gpu
def test_two_graphs_at_a_time(device):
    calls, expected = split_calls(device)
    kept = len(_tiles._counters)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call() for call in calls]
        graphs.append((graph, results, torch.cuda.Stream()))
    assert len(_tiles._counters) == kept, "a graph's memory was kept"
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, results, _ in graphs:
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
