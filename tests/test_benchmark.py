"""Benchmark rows: how they are checked, measured, written and read."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import gpukit.kernels
from gpukit import benchmark, timing
from gpukit.benchmark import BenchmarkFailed, Row, operation, rows, run, summary, write
from gpukit.cli import main
from gpukit.op import Cost
from gpukit.timing import ImpossibleTime, Timing

CPU = {"device": "cpu", "shapes": [(6, 40)], "rep_ms": 1}


def row(provider="gpukit", median_ms=0.05, mode="fwd", shape=(4096, 4096), op="softmax", **changed):
    return Row(
        **{
            "op": op, "provider": provider, "mode": mode, "dtype": "bfloat16", "shape": shape, "median_ms": median_ms,
            "p20_ms": 0.04, "p80_ms": 0.06, "bytes": 67_108_864, "flops": 83_886_080, "peak_bytes": 0,
            "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc1234", "date": "2026-11-21",
            **changed,
        }
    )  # fmt: skip


@pytest.fixture
def timed(monkeypatch):
    """time_ms without the time: it calls fn once and says what `timed.say` returns."""

    def time_ms(fn, *inputs, graph=False, **_):
        fn(*inputs)
        return timed.say(graph)

    class timed:
        @staticmethod
        def say(graph):
            return Timing(0.5, 0.4, 0.6, "graph" if graph else "events", "NVIDIA H200")

    monkeypatch.setattr(timing, "time_ms", time_ms)
    return timed


# --------------------------------------------------------------------------------------------------------- the records
def test_rows_survive_the_file(tmp_path, monkeypatch):
    path = tmp_path / "h200" / "softmax.csv"
    first = [row(), row("torch", 0.5, note="launch-bound"), row("library", shape=(2, 3, 5))]
    write(first, path)
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    assert sorted(rows("softmax"), key=lambda r: r.provider) == sorted(first, key=lambda r: r.provider)
    assert path.read_text().splitlines()[0] == (
        "op,provider,mode,dtype,shape,median_ms,p20_ms,p80_ms,bytes,flops,peak_bytes,gpu,torch,triton,commit,date,note,sm_mhz"
    )
    assert "4096x4096" in path.read_text()


def test_a_later_measurement_replaces_the_earlier(tmp_path):
    path = tmp_path / "softmax.csv"
    write([row(), row("torch")], path)
    write([row(median_ms=0.03, commit="def5678")], path)
    read = {r.provider: r for r in benchmark._read(path)}
    assert len(read) == 2 and read["gpukit"].median_ms == 0.03 and read["torch"].commit == "abc1234"


def test_missing_records_say_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match="no times of 'softmax' on 'a100' are recorded; there are: none"):
        rows("softmax", "a100")
    write([row()], tmp_path / "h200" / "softmax.csv")
    with pytest.raises(FileNotFoundError, match="there are: softmax on h200"):
        rows("softmax", "a100")


def test_derived_rates():
    assert row(median_ms=0.02).gbps == pytest.approx(3355.44)
    assert row(median_ms=0.02).tflops == pytest.approx(4.194, rel=1e-3)


def test_recorded_rows_are_possible():
    """What is committed: no row above its GPU's peak, one row for each thing."""
    for path in benchmark.RESULTS.glob("*/*.csv"):
        if not benchmark.holds_times(path):  # counters
            continue
        recorded = benchmark._read(path)
        assert len({r.what for r in recorded}) == len(recorded), path
        for r in recorded:
            op = benchmark.operations().get(r.op)
            dtype = op.arithmetic if op and op.arithmetic else r.dtype
            timing.check_possible(r.median_ms, Cost(r.bytes, 0, r.flops), getattr(torch, dtype), r.gpu)


def test_summary_names_the_best_peer_and_the_copy_rate():
    lines = summary([row(), row("torch", 0.5), row("library", 0.1), row("torch", 0.5, op="copy", bytes=2**31)])
    assert lines == "softmax fwd bfloat16 4096x4096: 50.0 µs, 2.00 x as fast as library, 0.31 of the copy rate"


def test_the_best_peer_is_the_fastest_that_is_not_ours():
    found = [row("gpukit", 0.1), row("gpukit-inplace", 0.2), row("yours", 0.3), row("quack", 0.5), row("library", 0.6)]
    assert benchmark.best_peer(iter(found)).provider == "quack", "whichever of them a table has a column for"
    assert benchmark.best_peer(found[:3]) is None
    assert "2.50 x as fast as quack" in summary([row("gpukit", 0.2), *found[1:]])


def test_records_are_read_without_torch():
    code = "import sys, gpukit.benchmark; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_names_are_known_without_torch():
    assert benchmark.names() == tuple(benchmark.operations())


@pytest.mark.parametrize(
    "words",
    (
        "trace sofmax",
        "trace softmax --shape 4by4",
        "trace softmax --dtype int8",
        "trace softmax --gpu h3000",
        "bench sofmax",
        "bench",
    ),
)
def test_a_wrong_argument_is_refused_before_torch_is_imported(words):
    code = "import sys; from gpukit.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True)
    assert done.stdout == "2 False\n" and done.stderr.startswith("gpukit: ")


# --------------------------------------------------------------------------------------------------------- a run
def test_run_on_the_cpu_times_pytorch_and_not_the_interpreter(tmp_path, capsys, device):
    if device != "cpu":
        pytest.skip("kernels run on the GPU here")
    out = tmp_path / "cpu.csv"
    measured = run("softmax", ("torch", "library", "liger-triton", "gpukit"), **CPU, out=out, commit="abc1234")
    assert {(r.provider, r.mode) for r in measured} == {(p, m) for p in ("torch", "library") for m in ("fwd", "bwd")}
    assert all(r.shape == (6, 40) and r.dtype == "bfloat16" and r.median_ms > 0 for r in measured)
    assert {r.bytes for r in measured} == {2 * 6 * 40 * 2, 3 * 6 * 40 * 2}
    assert {r.commit for r in benchmark._read(out)} == {"abc1234"}
    said = capsys.readouterr().out
    assert "gpukit 6x40 bfloat16: fn ran a kernel in Triton's interpreter" in said
    assert "liger-triton 6x40 bfloat16: not installed, skipped" in said


def test_run_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="no GPU here, so nothing was measured"):
        run("softmax")


def test_unknown_names():
    with pytest.raises(ValueError, match=r"op must be one of .*softmax.*, got 'softmxa'"):
        run("softmxa")
    with pytest.raises(ValueError, match=r"providers must be among torch, .*gpukit, .*quack, got cublas"):
        run("softmax", ("torch", "cublas"), device="cpu")
    with pytest.raises(ValueError, match=r"modes must be among fwd, bwd, fwd\+bwd, wall, got both"):
        run("softmax", modes=("both",), device="cpu")
    with pytest.raises(ValueError, match="dtypes must be torch's names, such as bfloat16, got bf16"):
        run("softmax", dtypes=("bf16",), device="cpu")
    with pytest.raises(
        ValueError, match="shapes must be of 2 positive numbers for softmax, such as 4096x1024, got 4096"
    ):
        run("softmax", shapes=[(4096,)], device="cpu")
    with pytest.raises(ValueError, match="device must be cuda or cpu, got 'tpu'"):
        run("softmax", device="tpu")
    with pytest.raises(ValueError, match="graph: CUDA graphs need a GPU, got device cpu"):
        run("softmax", device="cpu", graph=True)
    with pytest.raises(ValueError, match="rep_ms must be a positive number of milliseconds, got 0"):
        run("softmax", device="cpu", rep_ms=0)


def test_launch_bound_rows_come_with_graph_rows_of_all_providers(timed):
    timed.say = lambda graph: Timing(*(0.01,) * 3, "graph" if graph else "events", "NVIDIA H200")
    measured = run("softmax", ("torch", "library"), **CPU)
    assert [r.provider for r in measured if r.mode == "fwd-graph"] == ["torch", "library"]
    assert {r.note for r in measured if r.mode == "fwd"} == {"launch-bound"}
    assert {r.note for r in measured if r.mode == "fwd-graph"} == {""}
    assert [r.provider for r in measured if r.mode == "bwd-graph"] == ["torch", "library"]


def test_providers_take_turns_and_the_median_round_counts(timed, monkeypatch):
    monkeypatch.setitem(benchmark._ROUNDS, "cpu", 3)
    times, order = iter((1.0, 5.0, 6.0, 2.0, 3.0, 4.0)), []
    monkeypatch.setattr(
        benchmark._Bench, "_round",
        lambda self, fn, *_: (order.append(fn.__name__), (Timing(*(next(times),) * 3, "events", "NVIDIA H200"), 0))[1],
    )  # fmt: skip
    measured = run("softmax", ("torch", "library"), **{**CPU, "modes": ("fwd",)})
    first, second = order[:2]
    assert order == [first, second, second, first, first, second] and first != second
    assert [r.median_ms for r in measured] == [2.0, 5.0]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda x: torch.softmax(x, -1) * 1.02, "result: element"),
        (lambda x: torch.softmax(x, -1)[:1], r"result is \[1, 40\]"),
        (lambda x: torch.softmax(x, -1).float(), "result is .* torch.float32"),
        (lambda x: torch.softmax(x, -1).detach() + 0 * x.nan_to_num(neginf=0), "gradient: element"),
    ],
)
def test_a_wrong_kernel_is_not_timed(wrong, why, timed, tmp_path, monkeypatch):
    monkeypatch.setattr(gpukit.kernels, "softmax", wrong)
    out = tmp_path / "softmax.csv"
    with pytest.raises(BenchmarkFailed, match=f"gpukit 6x40 bfloat16: not timed: {why}"):
        run("softmax", ("library", "gpukit"), **CPU, out=out)
    assert {r.provider for r in benchmark._read(out)} == {"library"}


def test_an_impossible_time_fails_the_run_and_keeps_the_rest(timed, tmp_path):
    def say(graph):
        timed.say = lambda graph: Timing(0.5, 0.4, 0.6, "events", "NVIDIA H200")
        raise ImpossibleTime("10,000 GB/s")

    timed.say = say
    out = tmp_path / "softmax.csv"
    with pytest.raises(BenchmarkFailed, match="torch 6x40 bfloat16 fwd: ImpossibleTime: 10,000 GB/s"):
        run("softmax", ("torch", "library"), **CPU, out=out)
    assert {r.provider for r in benchmark._read(out)} == {"library"}


def test_a_peer_that_fails_costs_its_own_rows_only(timed, monkeypatch):
    def out_of_memory(graph):
        timed.say = lambda graph: Timing(0.5, 0.4, 0.6, "events", "NVIDIA H200")
        raise torch.OutOfMemoryError("CUDA out of memory")

    timed.say = out_of_memory
    assert {r.provider for r in run("softmax", ("torch", "library"), **CPU)} == {"library"}


def test_a_peer_that_overwrites_its_inputs_spoils_only_its_own(timed, monkeypatch):
    """As some libraries' backward passes do, and kernels in place."""

    def peer(x):
        y = torch.softmax(x, -1)
        x.data.fill_(1)
        return y

    softmax = operation("softmax")
    monkeypatch.setattr(benchmark, "operation", lambda name: replace(softmax, peers={"liger": peer}))
    rows = run("softmax", ("liger", "library"), modes=("fwd",), **CPU)
    assert [r.provider for r in rows if r.op == "softmax"] == ["liger", "library"]


def test_a_peer_without_its_package_is_left_out(timed, monkeypatch, capsys):
    def peer(x):
        import no_such_package  # noqa: F401

    softmax = operation("softmax")
    monkeypatch.setattr(benchmark, "operation", lambda name: replace(softmax, peers={"liger": peer}))
    assert [r.provider for r in run("softmax", ("liger", "library"), modes=("fwd",), **CPU)] == ["library"]
    assert "liger 6x40 bfloat16: no_such_package is not installed, skipped" in capsys.readouterr().out


def test_commit(monkeypatch):
    monkeypatch.setenv("GPUKIT_COMMIT", "fedcba9")
    assert benchmark._commit() == "fedcba9"
    monkeypatch.delenv("GPUKIT_COMMIT")
    monkeypatch.setenv("PATH", "/nowhere")
    assert benchmark._commit() == "unknown"


def test_checked_shape_keeps_the_row():
    op = operation("softmax")
    assert benchmark._cut(op, (4096, 131072), "cuda") == (1024, 131072)
    assert benchmark._cut(op, (4096, 131072), "cpu") == (8, 131072)
    assert benchmark._cut(op, (6, 40), "cpu") == (6, 40)
    assert benchmark._cut(op, (1, 2**30), "cuda") == (1, 2**30)
    assert benchmark._cut(replace(op, check_shape=lambda shape: (3, *shape[1:])), (6, 40), "cpu") == (3, 40)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_every_provider_on_a_gpu(tmp_path, device):
    measured = run("softmax", shapes=[(512, 781)], out=tmp_path / "softmax.csv", rep_ms=10)
    assert {"torch", "compile", "library", "gpukit"} <= {r.provider for r in measured if r.mode == "bwd"}
    assert {r.op for r in measured} == {"softmax", "copy"}


# ------------------------------------------------------------------------------------------------------- command line
def bench(*arguments: str) -> int:
    try:
        return main(["bench", *arguments])
    except SystemExit as end:  # argparse
        return int(end.code or 0)


def test_command_measures_pytorch_on_the_cpu(tmp_path, capsys, device):
    if device != "cpu":
        pytest.skip("kernels run on the GPU here")
    asked = ["--device", "cpu", "--shape", "6x40", "--mode", "forward", "--rep-ms", "1", "--out", str(tmp_path)]
    assert bench("softmax", "log_softmax", "--providers", "torch,library,gpukit", *asked) == 0
    said = capsys.readouterr().out
    assert said.count(" µs ") == 4 and said.count("fn ran a kernel in Triton's interpreter") == 2
    assert {r.provider for r in benchmark._read(tmp_path / "cpu" / "softmax.csv")} == {"torch", "library"}
    assert bench("softmax", "--seconds", "1e-9", *asked) == 0
    assert capsys.readouterr().out.strip().endswith("out of time: 7 of 7 steps were not begun")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["softmxa"], "op must be one of .*softmax.*, got 'softmxa'"),
        (["softmax", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["softmax", "--providers", "cublas"], "none of these operations knows cublas"),
        (["softmax", "--providers", ","], "--providers: must name at least one, got ','"),
        (["softmax", "--shape", "4x"], "--shape: must look like 4096x1024,8192x781, got '4x'"),
        (["softmax", "--shape", "4x0"], "shapes must be of 2 positive numbers for softmax"),
        (["softmax", "--dtype", "bf16"], "dtypes must be torch's names, such as bfloat16, got bf16"),
        (["softmax", "--mode", "sideways"], "--mode: must be among forward, .*, got sideways"),
        (["softmax", "--seconds", "0"], "--seconds: must be a positive number, got '0'"),
        (["softmax", "--seconds", "soon"], "--seconds: must be a positive number, got 'soon'"),
        (["softmax", "--rep-ms", "nan"], "rep_ms must be a positive number of milliseconds, got nan"),
        (["softmax", "--graph"], "graph: CUDA graphs need a GPU, got device cpu"),
        ([], "bench needs an operation, or all: .*softmax"),
        (["softmax", "--gpu", "h200"], "--gpu h200 goes with --show"),
        (["softmax", "--show", "--gpu", "t4"], "no times of 'softmax' on 't4' are recorded; there are: "),
        (["softmax", "--show", "--gpu", "h2000"], "no GPU is called 'h2000'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_command_says_what_is_wrong(arguments, why, capsys):
    given = arguments if {"--device", "--show"} & {*arguments} else [*arguments, "--device", "cpu"]
    assert bench(*given) == 2
    said = capsys.readouterr()
    assert re.search(why, said.err) and not said.out


def test_command_without_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert bench("all") == 2
    assert "no GPU here, so nothing was measured; with --show, gpukit bench prints" in " ".join(
        capsys.readouterr().err.split()
    )
