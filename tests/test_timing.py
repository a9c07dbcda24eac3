"""Times that can be believed: what is timed, what is refused, and what is impossible."""

import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpukit import benchmark, timing
from gpukit.kernels import softmax
from gpukit.op import Cost
from gpukit.timing import ImpossibleTime, NotTimed, Timing, check_possible, time_ms

H200 = "NVIDIA H200"


@pytest.fixture
def interpreted(device):
    if device != "cpu":
        pytest.skip("kernels run on the GPU here")


@pytest.fixture
def clock(monkeypatch):
    """The host's clock, which moves when it is told to: `clock.now` in seconds."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_cpu_time_is_that_of_the_call(clock):
    taken = []

    def call(x):
        taken.append((0.002, 0.002, 0.004)[len(taken) % 3])
        clock.now += taken[-1]

    timing = time_ms(call, torch.zeros(1), rep_ms=30)
    assert (timing.p20_ms, timing.median_ms, timing.p80_ms) == pytest.approx((2, 2, 4)) and len(taken) >= 11
    assert timing.how == "cpu" and timing.device == "cpu" and not timing.launch_bound


def test_wall_is_the_time_from_call_to_call(clock):
    seen = []

    def call(x):
        seen.append(x)
        clock.now += 0.002

    timing = time_ms(call, torch.zeros(1), wall=True, warmup_ms=1, rep_ms=10)
    assert timing.how == "wall" and timing.p20_ms == timing.median_ms == pytest.approx(2) and len(seen) >= 9
    with pytest.raises(ValueError, match="graph, wall: one of the two"):
        time_ms(call, torch.zeros(1), graph=True, wall=True)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), True, "100"])
def test_lengths_of_time(bad):
    for name in ("warmup_ms", "rep_ms"):
        with pytest.raises(ValueError, match=f"{name} must be a positive number of milliseconds, got "):
            time_ms(lambda: None, **{name: bad})
    with pytest.raises(ValueError, match="median_ms must be a positive number"):
        check_possible(bad, Cost(1, 1, 1), torch.float32, H200)


def test_devices():
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda', got 'tpu'"):
        time_ms(lambda: None, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device: 'cuda' needs a GPU"):
            time_ms(lambda: None, device="cuda")
        assert timing.sm_mhz() == 0
    assert time_ms(lambda: torch.ones(3), device="cpu", warmup_ms=1, rep_ms=1).device == "cpu"


def test_a_time_of_nothing_is_no_time(monkeypatch):
    monkeypatch.setattr(timing, "_time_cpu", lambda *_: (0.0, 0.0, 0.0))
    with pytest.raises(NotTimed, match="less time than the clock can tell apart"):
        time_ms(lambda: None, device="cpu")


def test_gradients_are_cleared_before_each_run():
    x = torch.ones(3, requires_grad=True)
    time_ms(lambda x: (2 * x).sum().backward(), x, grad_to_none=[x], rep_ms=1)
    assert x.grad.tolist() == [2, 2, 2]


def test_interpreter_is_not_timed(interpreted):
    x = torch.randn(1_000_000, 3)  # minutes, if it were run to its end
    with pytest.raises(NotTimed, match="fn ran a kernel in Triton's interpreter, whose time says nothing about a GPU"):
        time_ms(softmax, x)
    y = softmax(x[:2].requires_grad_())
    with pytest.raises(NotTimed):
        time_ms(lambda: y.sum().backward())
    assert sys.getprofile() is None
    torch.testing.assert_close(softmax(x[:2]), torch.softmax(x[:2], -1))


def test_errors_of_fn_come_through():
    with pytest.raises(ZeroDivisionError):
        time_ms(lambda: 1 / 0)


def test_graph_needs_a_gpu_and_inputs(device):
    with pytest.raises(ValueError, match="graph: "):
        time_ms(lambda: None, graph=True)
    with pytest.raises(ValueError, match="graph: CUDA graphs need a GPU and inputs on it"):
        time_ms(torch.sin, torch.zeros(3), graph=True)


def test_time_below_what_memory_allows_is_impossible():
    gigabyte = Cost(5 * 10**8, 5 * 10**8, 0)
    check_possible(0.25, gigabyte, torch.float16, H200)  # 4,000 of 4,800 GB/s
    with pytest.raises(
        ImpossibleTime, match=r"1,000,000,000 bytes in 0.1 ms are 10,000 GB/s, and H200 SXM has 4,800: "
    ):
        check_possible(0.1, gigabyte, torch.float16, H200)


def test_time_below_what_arithmetic_allows_is_impossible():
    teraflop = Cost(0, 0, 10**12)
    check_possible(2, teraflop, torch.bfloat16, H200)  # 500 of 989 TFLOP/s
    with pytest.raises(ImpossibleTime, match=r"are 2,000 TFLOP/s, and H200 SXM has 989 in bf16"):
        check_possible(0.5, teraflop, torch.bfloat16, H200)
    with pytest.raises(ImpossibleTime, match="in tf32"):
        check_possible(2, Cost(0, 0, 10**12), torch.float32, H200)


def test_unknown_gpu_is_not_checked():
    check_possible(1e-9, Cost(10**12, 0, 10**15), torch.float16, "Some GPU 9000")


def test_launch_bound_is_told_from_events_alone():
    assert Timing(0.019, 0.018, 0.02, "events", H200).launch_bound
    assert not Timing(0.021, 0.018, 0.03, "events", H200).launch_bound
    assert Timing(0.12, 0.11, 0.13, "events", H200, host_ms=0.15).launch_bound, "the GPU waited for the CPU"
    assert not Timing(0.12, 0.11, 0.13, "events", H200, host_ms=0.1).launch_bound
    assert not Timing(0.009, 0.008, 0.01, "graph", H200).launch_bound
    assert str(Timing(0.009, 0.008, 0.01, "events", H200)).endswith("on NVIDIA H200, launch-bound")


def test_nobody_else_calls_do_bench():
    package = Path(__file__).parents[1] / "gpukit"
    callers = [p.name for p in package.rglob("*.py") if re.search(r"^[^#\n]*\bdo_bench\w*\(", p.read_text(), re.M)]
    assert callers == ["timing.py"]


def test_overhead_on_an_h200_is_below_five_percent():
    """Recorded: the same softmax by time_ms, its figure held against the peaks, and by bare do_bench."""
    runs = benchmark.notes("benchmarking")["overhead"]
    bare, ours = (statistics.median(run[key] for run in runs) for key in ("bare_s", "ours_s"))
    assert ours <= 1.05 * bare
    bare, ours = (statistics.median(run[key] for run in runs) for key in ("bare_ms", "ours_ms"))
    assert ours == pytest.approx(bare, rel=0.01), "and it gives the same figure"


@pytest.mark.gpu
def test_copy_runs_at_a_plausible_rate(device):
    x = torch.randn(8192, 16384, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    timing = time_ms(y.copy_, x, cost=Cost(x.nbytes, x.nbytes, 0), dtype=x.dtype)
    assert timing.how == "events" and timing.p20_ms <= timing.median_ms <= timing.p80_ms
    assert 100 < timing.sm_mhz < 5000
    with pytest.raises(ImpossibleTime):
        time_ms(y.copy_, x, cost=Cost(9 * x.nbytes, 9 * x.nbytes, 0), dtype=x.dtype)


@pytest.mark.gpu
def test_graph_keeps_the_l2_cold(device):
    """8 MB each way fit the L2 six times over; a graph that reused them would beat the memory's peak."""
    x = torch.randn(4096, 1024, device=device, dtype=torch.bfloat16)
    cost = Cost(x.nbytes, x.nbytes, 0)
    timing = time_ms(softmax, x, graph=True, cost=cost, dtype=x.dtype)
    assert timing.how == "graph"
    assert timing.median_ms < time_ms(softmax, x).median_ms
