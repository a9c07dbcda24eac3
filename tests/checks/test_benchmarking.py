"""Notebook 04: the GPU in miniature, the exercises that run on it, timelines and the pictures of measured times.

tests/checks/test_answers.py judges the known answers of all exercises; tests/test_benchmark.py is about gpukit.benchmark.
"""

import io
import random
import threading

import pytest
from PIL import Image

from gpukit import benchmark, course
from gpukit.benchmark import Row, write
from gpukit.checks.benchmarking import BENCHMARK, DETECTIVE, EXERCISES, HONEST, RATE, TIMELINE
from gpukit.grading import example
from gpukit.grading.judge import judge_source
from gpukit.profiling import Profile
from gpukit.profiling import Span as Recorded
from gpukit.simulator.queue_model import MIB, Buffer, Device, SimulatedGpu, Span, one_function
from gpukit.widgets import style, times
from gpukit.widgets import versus as versus_module
from gpukit.widgets.benchmark import bench
from gpukit.widgets.timeline import MAX_BARS, clear, describe, of_profile, timeline
from gpukit.widgets.versus import Missing, Versus, colour, show_recorded, versus
from tests.checks import known
from tests.waiting import until

ROOT = course.root(__file__)
STEADY = {"slow": 1.0, "disturbed_every": 0, "jitter": 0.0, "compile_us": 0.0}


# ------------------------------------------------------------------------------------------------- the GPU in miniature
def test_a_launch_returns_at_once_and_the_queue_works_on():
    gpu = SimulatedGpu(**STEADY)
    device = Device(gpu)
    for _ in range(3):
        gpu.launch("k", least_us=60.0)
    assert device.clock() == 15  # three launches of 5 us
    device.synchronize()
    assert device.clock() == 7 + 180 + 4  # the first start, three kernels, the way back
    assert [span.lane for span in gpu.lanes] == ["host", "stream 0"] * 3 + ["host"]


def test_events_are_stamped_by_the_gpu():
    gpu = SimulatedGpu(**STEADY)
    device = Device(gpu)
    device.flush_l2()
    start = device.event()
    gpu.launch("k", least_us=60.0)
    end = device.event()
    with pytest.raises(RuntimeError, match="this event has not happened yet"):
        start.elapsed_us(end)
    device.synchronize()
    assert start.elapsed_us(end) == pytest.approx(60.2)
    idle = device.event()
    gpu.launch("k", least_us=60.0)
    end = device.event()
    device.synchronize()
    assert idle.elapsed_us(end) == pytest.approx(67.0), "the queue was empty: the launch is in it"


def test_what_was_used_last_lies_in_the_l2():
    gpu = SimulatedGpu(**STEADY)
    x, y, large = Buffer(20 * MIB), Buffer(20 * MIB), Buffer(60 * MIB)

    def took(*buffers) -> float:
        gpu.launch("k", *buffers)
        return gpu.lanes[-1].end_us - gpu.lanes[-1].start_us

    cold = gpu.cold_us(x, y)
    assert took(x, y) == pytest.approx(cold)
    assert took(x, y) == pytest.approx(cold * gpu.dram_gbps / gpu.l2_gbps)
    gpu.flush()
    assert took(x, y) == pytest.approx(cold)
    assert took(large) == took(large) == pytest.approx(gpu.cold_us(large)), "what does not fit is never there"
    assert took(x) == pytest.approx(gpu.cold_us(x)), "and it has pushed out the rest"
    assert took(gpu.fill(Buffer(MIB))) < gpu.cold_us(Buffer(MIB)), "what was just filled is warm"


def test_first_calls_slow_clocks_and_disturbed_runs():
    gpu = SimulatedGpu(jitter=0.0)
    for _ in range(40):
        gpu.launch("k", least_us=200.0)
    spans = [span for span in gpu.lanes if span.lane == "stream 0"]
    lengths = [round(span.end_us - span.start_us, 3) for span in spans]
    assert gpu.lanes[0].kind == "compile" and sum(span.kind == "compile" for span in gpu.lanes) == 1
    assert lengths[:3] == [280, 280, 280] and lengths[3] == 840, "slow, and the fourth run is disturbed"
    assert set(lengths[20:]) == {200, 600} and lengths.count(600) + lengths.count(840) == len(range(4, 41, 9))


def test_jitter_is_a_fair_sample():
    gpu = SimulatedGpu(**STEADY | {"jitter": 0.04})
    for _ in range(20):
        gpu.launch("k", least_us=100.0)
    lengths = sorted(span.end_us - span.start_us for span in gpu.lanes if span.lane == "stream 0")
    assert 96 <= lengths[0] < 97 and 103 < lengths[-1] <= 104 and 99.5 < lengths[10] < 100.5


def test_streams_run_side_by_side_and_a_graph_is_one_launch():
    gpu = SimulatedGpu(**STEADY)
    gpu.launch("a", least_us=50.0)
    gpu.launch("b", least_us=50.0, stream="stream 1")
    assert gpu.lanes[-1].start_us < gpu.lanes[1].end_us
    gpu = SimulatedGpu(**STEADY)
    gpu.replay([("k", 2.0)] * 20)
    assert gpu.lanes[-1].end_us == 7 + 40 and sum(span.lane == "host" for span in gpu.lanes) == 1


def test_two_runs_are_equal():
    def times():
        (device, run), _ = one_function({}, 8 * MIB, 8 * MIB, 20.0)
        marks = []
        for _ in range(30):
            device.flush_l2()
            run()
            marks.append(device.event())
        device.synchronize()
        return [marks[0].elapsed_us(mark) for mark in marks], device.clock()

    assert times() == times()


def test_a_device_shows_what_a_real_one_shows():
    """Nothing on it tells the answer, and a benchmark written for it runs on this machine as well."""
    from gpukit.timing import ThisDevice

    device = Device(SimulatedGpu())
    assert not vars(device) and not vars(device.event()), (
        "a method of the learner's own may read self._anything of them"
    )
    public = {name for name in dir(Device) if not name.startswith("_")}
    assert public == {"clock", "synchronize", "event", "flush_l2", "random", "zeros"}
    assert public <= set(dir(ThisDevice))


# --------------------------------------------------------------------------------------------------------- the exercises
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_cases_are_fresh_but_always_the_same_ones(exercise):
    first, second = (exercise.cases(random.Random(seed)) for seed in (1, 2))
    assert [case.name for case in first] == [case.name for case in second]
    assert [case.tags for case in first] == [case.tags for case in second]
    assert len({case.name for case in first}) == len(first) >= 6
    assert [case.args for case in first] != [case.args for case in second]
    assert [case.args for case in first] == [case.args for case in exercise.cases(random.Random(1))]


@pytest.mark.parametrize("exercise", [BENCHMARK, DETECTIVE, HONEST], ids=lambda e: e.id)
def test_right_answers_pass(exercise):
    """With other inputs, too: `make prove`."""
    for answer in known.right(exercise):
        assert judge_source(exercise, answer.source, seed=2).passed


CHEATS = {
    "reads the simulator": "    return device._gpu.lanes[-1].end_us\n",
    "reads it through a format": '    return float("{0._gpu.dram_gbps}".format(device))\n',
    "reads a closure": "    return run.__closure__[0].cell_contents.least_us\n",
    "reads it through vars": '    return vars(device)["_gpu"].lanes[-1].end_us\n',
    "makes the clock stand still": "    type(device).clock = lambda self: 0.0\n    run()\n    return device.clock()\n",
    "answers with infinity": "    return float('inf')\n",
    "answers with NaN": "    return float('nan')\n",
    "answers with itself": "    return device\n",
    "answers with the launch": "    a = device.clock()\n    run()\n    return device.clock() - a\n",
    "times the flush": "    a = device.event()\n    device.flush_l2()\n    b = device.event()\n    device.synchronize()\n"
    "    return a.elapsed_us(b)\n",
}


@pytest.mark.parametrize("body", CHEATS.values(), ids=CHEATS)
def test_cheats_do_not_pass(body):
    verdict = judge_source(BENCHMARK, f"def benchmark(device, run):\n{body}", seed=1)
    assert not verdict.passed and len(verdict.lines) <= 8


def test_the_stub_of_the_detective_looks_right_and_is_caught():
    stub = (ROOT / "exercises" / "benchmarking.py").read_text(encoding="utf-8")
    verdict = judge_source(DETECTIVE, stub, seed=1)
    assert verdict.diagnosis == "cached" and verdict.checks_passed == 3
    assert "fails for every case whose program keeps its results" in "\n".join(verdict.lines)


def test_a_mark_that_is_read_too_early_says_so():
    source = "def benchmark(device, run):\n    a = device.event()\n    run()\n    b = device.event()\n    return a.elapsed_us(b)\n"
    verdict = judge_source(BENCHMARK, source, seed=1)
    assert verdict.diagnosis == "exception" and "the GPU is still working" in "\n".join(verdict.lines)


def test_rates_of_the_lesson():
    tflops, gbps, possible = RATE.expected(8192, 8192, 8192, 2, 1.6189, 989.4, 4800.0)
    assert tflops == pytest.approx(679.2, abs=0.1) and gbps == pytest.approx(248.7, abs=0.1) and possible
    assert RATE.expected(8192, 8192, 8192, 2, 0.054, 989.4, 4800.0)[2] is False
    assert TIMELINE.expected([2.0] * 20, 5.0, False) == (102.0, 62.0)


# ------------------------------------------------------------------------------------------------------------- timelines
def test_no_mark_of_a_timeline_crosses_a_name():
    assert clear(0, 100, 40, [10, 90]) == 50  # the middle, where nothing is in the way
    assert clear(0, 100, 40, [50]) == 25  # the first of two halves
    assert (
        clear(0, 100, 40, [40]) == 70 and clear(0, 100, 40, [30, 60]) == 50
    )  # the widest part, or the middle after all
    assert clear(0, 30, 40, []) is None


def test_timeline_says_what_it_shows():
    gpu = SimulatedGpu(**STEADY)
    gpu.launch("gelu", least_us=10.0)
    gpu.wait()
    gpu.launch("gelu", least_us=10.0)
    picture = timeline(gpu.lanes, title="two", marks=[(5.0, "clock")])
    assert repr(picture) == "two: 2 kernels, 20 µs of work in 38 µs" == describe(gpu.lanes, "two")
    assert Image.open(io.BytesIO(picture.data)).width == 1600
    assert picture.data == timeline(gpu.lanes, title="two", marks=[(5.0, "clock")]).data
    assert picture.data != timeline(gpu.lanes, title="two", marks=[(5.0, "clock")], gaps=False).data
    with pytest.raises(ValueError, match="nothing happens between 500 and 600 µs"):
        timeline(gpu.lanes, window=(500, 600))
    for window in ((5, 5), (9, 3), (0, float("inf")), (float("nan"), 9)):
        with pytest.raises(ValueError, match="nothing happens"):
            timeline(gpu.lanes, window=window)
    with pytest.raises(ValueError, match="nothing happens"):
        timeline([])
    with pytest.raises(ValueError, match="at most 2000 spans can be told apart, got 2001"):
        timeline([Span("host", "x", "launch", i, i + 1) for i in range(MAX_BARS + 1)])


def test_timeline_of_a_profile():
    record = Profile(
        (
            Recorded("aten::linear", "op", 0, 20),
            Recorded("aten::addmm", "op", 2, 15),
            Recorded("cudaLaunchKernel", "launch", 4, 3, 0, 1),
            Recorded("gemm", "kernel", 9, 5, 0, 1),
            Recorded("cudaDeviceSynchronize", "launch", 21, 9),
            Recorded("AddmmBackward0", "op", 22, 5, 1),
        ),
        "NVIDIA H200",
    )
    spans = [(span.lane, span.name) for span in of_profile(record)]
    assert spans == [
        ("host", "aten::linear"), ("launches", "cudaLaunchKernel"), ("GPU", "gemm"), ("host 2", "AddmmBackward0"),
    ]  # fmt: skip
    assert "1 kernel, 5 µs of work in 27 µs" in repr(timeline(of_profile(record)))


# ---------------------------------------------------------------------------------------------- pictures of measured times
def test_pictures_of_times():
    calls = times.first_calls({"matmul": [60_000.0, 300.0, 299.0], "gelu": [2_400_000.0, 20.0, 19.0]}, "H200")
    assert "matmul 60 ms at first, 300 µs in the middle; gelu 2.4 s at first" in repr(calls)
    spread = times.spread({"cold": [*range(50, 60), 400], "warm": [40.0] * 10}, "softmax")
    assert "cold: median 55 µs" in repr(spread) and "1 beyond" in repr(spread)
    lines = {"bf16": [(1024, 200.0), (2048, 600.0)], "none": []}
    curve = times.curve(lines, x="n", y="TFLOP/s", title="matmul", bounds={"peak": 989.0})
    assert repr(curve) == "matmul: TFLOP/s by n. bf16 reaches 600."
    assert "from 1,980 to 1,400 MHz" in repr(
        times.clocks([(0, 345, 0), (0.1, 1980, 700.0), (0.2, 1400, 600.0)], "H200")
    )
    nothing = [
        times.first_calls({}, ""),
        times.spread({}, ""),
        times.curve({"a": []}, x="", y="", title=""),
        times.clocks([], ""),
    ]
    assert [repr(each) for each in nothing] == ["Nothing of the kind is recorded yet."] * 4


def row(provider, shape, median_ms, mode="fwd", op="softmax", flops=0, **changed) -> Row:
    return Row(
        **{
            "op": op, "provider": provider, "mode": mode, "dtype": "bfloat16", "shape": shape, "median_ms": median_ms,
            "p20_ms": median_ms, "p80_ms": median_ms, "bytes": 4 * shape[0] * shape[1], "flops": flops, "peak_bytes": 0,
            "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc1234", "date": "2026-11-21",
            **changed,
        }
    )  # fmt: skip


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    rows = [row("torch", (32768, 16384), 0.51, op="copy")]
    for n in (1024, 4096, 16384):
        rows += [
            row("library", (4096, n), n * 1e-5),
            row("gpukit", (4096, n), n * 5e-6),
            row("torch", (4096, n), n * 4e-5),
        ]
    rows += [
        row("gpukit", (8192, 781), 0.0143),
        row("gpukit", (4096, 1024), 0.006, mode="fwd-graph"),
        row("sdpa-x", (4096, 1024), 0.02),
    ]
    write([*rows, row("gpukit", (4096, 1024), 0.02, mode="bwd")], tmp_path / "h200" / "softmax.csv")
    return tmp_path


def test_versus_draws_what_is_recorded(records):
    view = versus("softmax", names={"torch": "five lines"})
    assert isinstance(view, Versus)
    text = str(view)
    assert "softmax, forward, bfloat16: recorded on an NVIDIA H200, 2026-11-21" in text
    assert "2026-11-21; times in µs" in text and "five lines" in text and "this course" in text
    graphed = [line for line in text.splitlines() if line.startswith("4,096 x 1,024") and "CUDA graph" in line]
    assert len(graphed) == 1 and graphed[0].endswith("6.0"), "the one row that was timed in a graph"
    assert 'white-space:nowrap">4,096 x 1,024' in view.table._repr_html_(), "a shape stays on one line"
    assert view.providers == ["torch", "library", "sdpa-x", "gpukit"]
    assert view._along()[0] == 1 and len(view._along()[1]) == 3, "a line along N; 8192 x 781 is in the table alone"
    assert "2.00 times as fast as the best of the others (PyTorch) at 4,096 x" in view.sentence
    assert "of the rate of a copy" in view.sentence
    assert view.picture.alt.startswith(view.title)
    shown = versus("softmax", shapes=[(8192, 781)])
    assert isinstance(shown, Versus) and shown.shapes == [(8192, 781)]


def test_versus_has_the_learners_kernel_in_it_once_that_passes(records, monkeypatch):
    state = {"state": "pass", "edited": False}
    monkeypatch.setattr(versus_module, "checked", lambda root: {"softmax.fused": state})
    asked = []

    def weigh(exercise_id, path, gpu, sizes, measured):
        asked.extend(sizes)
        assert (exercise_id, path.parts[-2:], gpu) == ("softmax.fused", ("exercises", "softmax.py"), "h200")
        return [{"time_us": 20.0} for _ in sizes]

    monkeypatch.setattr(example, "weigh", weigh)
    monkeypatch.setattr(versus_module, "_here", lambda gpu: False)
    plain, view = versus("softmax"), versus("softmax", yours="softmax.fused")
    assert view.providers == [*plain.providers, "yours"] and {*asked} == {("bfloat16", shape) for shape in plain.shapes}
    assert "yours, predicted" in repr(view.table) and view.sentence == plain.sentence
    assert colour("yours", view.providers) == style.YOURS != colour("gpukit", view.providers)
    assert view.picture.data != plain.picture.data
    for changed in ({"edited": True}, {"state": "fail"}):
        monkeypatch.setattr(versus_module, "checked", lambda root, changed=changed: {"softmax.fused": state | changed})
        assert "yours" not in versus("softmax", yours="softmax.fused").providers


def test_versus_without_records_says_so(records):
    for view in (versus("gelu"), versus("softmax", mode="wall"), versus("softmax", "a100")):
        assert isinstance(view, Missing)
    assert repr(versus("gelu")) == (
        "No times of gelu (forward) are recorded for the H200 SXM yet: `gpukit bench gelu` makes them."
    )
    with pytest.raises(ValueError, match="no GPU is called 'h2000'"):
        versus("softmax", "h2000")
    with pytest.raises(ValueError, match=r"mode must be one of fwd, bwd, fwd\+bwd, wall, got 'forward'"):
        versus("softmax", mode="forward")


def test_versus_of_arithmetic(records):
    cubes = [(n, n, n) for n in (1024, 2048, 4096)]
    rows = [
        row(p, s, ms * (s[0] / 1024) ** power, op="matmul", flops=2 * s[0] ** 3, bytes=6 * s[0] ** 2)
        for s in cubes
        for p, ms, power in (("library", 0.0044, 3.0), ("gpukit", 0.004, 2.9))
    ]
    write(rows, records / "h200" / "matmul.csv")
    view = versus("matmul")
    assert view.bound == (989.4, "data sheet") and view._along() == (0, cubes)
    assert "1.26 times as fast as the best of the others (PyTorch) at 4,096 x 4,096 x 4,096" in view.sentence
    assert "and 1.10 times (PyTorch) at 1,024" in view.sentence and "62% of the peak at 4,096" in view.sentence
    assert view.picture.data


def test_show_prints_and_draws(records, tmp_path, capsys):
    show_recorded(["all"], "h200", None, tmp_path / "out")
    said = capsys.readouterr().out
    assert "2.00 x as fast as library" in said
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"softmax-fwd-h200.png", "softmax-bwd-h200.png"}
    with pytest.raises(FileNotFoundError, match="no times of 'gelu' on 'h200' are recorded; there are: softmax"):
        show_recorded(["gelu"], "h200", None, tmp_path)


# ---------------------------------------------------------------------------------------------------------- the panel
def test_panel_of_recorded_rows(records):
    panel = bench("softmax")
    assert repr(panel) == "benchmark panel: softmax, recorded on an H200 SXM"
    assert panel.mode.value == "fwd" and panel.run_button.disabled
    assert "recorded on an H200 SXM, 2026-11-21: nothing is measured here" in panel.status.value
    assert "<svg" in panel.picture_area.value and "4,096 x 1,024" in panel.sentence()
    panel.providers.value = ("gpukit",)
    assert {r.provider for r in panel.rows} == {"gpukit"}
    panel.mode.value = "bwd"
    assert [r.mode for r in panel.rows] == ["bwd"]
    data, metadata = panel._repr_png_()
    assert (
        data == panel._repr_png_()[0] and len(data) < style.MAX_PNG_BYTES and metadata["alt"].startswith("softmax on")
    )
    panel.reset()
    assert panel.mode.value == "fwd" and len(panel.rows) == 11
    with pytest.raises(FileNotFoundError, match="no times of 'gelu' on 'h200' are recorded"):
        bench("gelu")


def test_panel_of_what_cannot_be_measured_here(records):
    write([row("library", (8, 8), 0.1, op="linear")], records / "h200" / "linear.csv")
    write([row("torch", (8, 8), 0.1, op="chain")], records / "h200" / "benchmarking.csv")
    with pytest.raises(
        FileNotFoundError, match="'benchmarking' is not an operation; recorded on h200 are: linear, soft"
    ):
        bench("benchmarking")
    panel = bench("linear")
    panel.live.value = True
    assert not panel.live.value and panel.status.value.startswith("linear is recorded only; recorded on an H200")
    panel.op.value = "softmax"
    assert panel.mode.value == "fwd" and len(panel.rows) == 11


@pytest.fixture
def measured(monkeypatch):
    """benchmark.run without the time: one row a step, and a gate before each."""
    gate = threading.Semaphore(0)

    def run(op, providers, shapes, dtypes, modes, *, go_on, on_row, say, **_):
        steps = [(p, s) for s in shapes for p in providers]
        for done, (p, s) in enumerate(steps):
            if not go_on(done, len(steps), p):
                break
            gate.acquire()
            on_row(row(p, s, 0.5))
        say("gpukit 8x8 bfloat16: not timed: result is wrong")

    monkeypatch.setattr(benchmark, "run", run)
    return gate


def test_panel_measures_and_can_be_cancelled(records, measured):
    panel = bench("softmax")
    panel.live.value = True
    assert not panel.run_button.disabled and not panel.rows
    assert panel.status.value.startswith("nothing measured yet on ")
    panel.providers.value = ("torch", "library")
    panel.shapes.value = panel.shapes.options[0][1], panel.shapes.options[1][1]
    panel.start()
    assert panel.run_button.disabled and not panel.cancel_button.disabled
    measured.release()
    until(lambda: len(panel.rows) == 1)
    until(lambda: panel.bar.value == 1)
    assert "1 of 4" in panel.status.value and "s left" in panel.status.value
    panel.cancel()
    measured.release()
    panel.thread.join()
    assert panel.status.value.startswith("cancelled, 2 rows") and "gpukit not timed" in panel.status.value
    panel.providers.value = ()
    panel.start()
    assert panel.status.value == "choose at least one shape and one provider"


def test_panel_forgets_a_run_that_was_left(records, measured):
    panel = bench("softmax")
    panel.live.value = True
    panel.start()
    left = panel.thread
    panel.reset()
    shown = list(panel.rows)
    measured.release()
    left.join()
    assert panel.rows == shown and "nothing is measured here" in panel.status.value


def test_panel_shows_what_went_wrong(records, monkeypatch):
    def run(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(benchmark, "run", run)
    panel = bench("softmax")
    panel.live.value = True
    panel.start()
    panel.thread.join()
    assert panel.status.value.startswith("RuntimeError: out of memory, 0 rows")


@pytest.mark.parametrize(("exercise", "within"), ((BENCHMARK, 0.03), (HONEST, 0.06)), ids=("benchmark", "honest"))
def test_no_single_run_is_typical_in_all_cases(exercise, within):
    settings = [case.args[0] for case in exercise.cases(random.Random(1))]

    def lengths(of_case: dict) -> list[float]:
        gpu = SimulatedGpu(**of_case | {"slow": 1.0})
        for _ in range(200):
            gpu.launch("k", least_us=100.0)
        return [span.end_us - span.start_us for span in gpu.lanes if span.lane == "stream 0"]

    for run, took in enumerate(zip(*map(lengths, settings), strict=True)):
        assert any(abs(one / 100 - 1) > within for one in took), f"run {run}"
