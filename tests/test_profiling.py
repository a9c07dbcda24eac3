"""Profiles: what is recorded, what is derived from it, and the record that ships with the course."""

import gzip
import json

import pytest
import torch

from gpukit import profiling
from gpukit.profiling import MAX_BYTES, RESULTS, Profile, Span, load, profile, recorded


@pytest.fixture
def two_steps() -> Profile:
    """A host that launches two kernels in a range and one after it; the second kernel of the range ends after it."""
    return Profile(
        (
            Span("step", "note", 0, 50),
            Span("aten::linear", "op", 1, 20),
            Span("aten::addmm", "op", 3, 15),
            Span("cudaLaunchKernel", "launch", 5, 6, launched=1),
            Span("gemm", "kernel", 14, 10, launched=1),
            Span("aten::gelu", "op", 25, 12),
            Span("cudaLaunchKernel", "launch", 28, 5, launched=2),
            Span("gelu", "kernel", 40, 30, launched=2),
            Span("cudaLaunchKernel", "launch", 60, 5, launched=3),
            Span("gelu", "kernel", 70, 10, launched=3),
            Span("other stream", "kernel", 72, 20, lane=1),
        ),
        "NVIDIA H200",
        "two steps",
    )


def test_busy_and_gaps(two_steps):
    assert two_steps.busy_us == 10 + 52  # kernels that overlap count once
    assert two_steps.gaps() == [(24, 40)]
    assert two_steps.span_us == 92
    assert len(two_steps.kernels) == 4


def test_a_range_holds_the_kernels_it_launched(two_steps):
    step = two_steps.note("step")
    assert [s.name for s in step.kernels] == ["gemm", "gelu"]
    assert step.span_us == 70
    with pytest.raises(ValueError, match="name must be one of step, got 'stop'"):
        two_steps.note("stop")
    assert list(two_steps.notes) == ["step"]
    nothing = two_steps.between(1000, 2000)
    assert (nothing.span_us, nothing.busy_us, nothing.gaps(), nothing.table()) == (0, 0, [], [])


def test_table_counts_own_time(two_steps):
    rows = {(name, kind): (calls, host, gpu) for name, kind, calls, host, gpu in two_steps.table(20)}
    assert rows["gelu", "kernel"] == (2, 0, 40)
    assert rows["aten::linear", "op"] == (1, 5, 0)  # 20 less the addmm inside
    assert rows["aten::addmm", "op"] == (1, 9, 0)  # 15 less its launch
    assert rows["cudaLaunchKernel", "launch"] == (3, 16, 0)
    assert ("step", "note") not in rows
    assert [row[0] for row in two_steps.table(2)] == ["gelu", "other stream"]


@pytest.mark.parametrize("name", ("p.json", "p.json.gz"))
def test_a_record_survives_its_file(two_steps, tmp_path, name):
    path = two_steps.save(tmp_path / "deep" / name)
    assert load(path) == two_steps
    first = path.read_bytes()
    two_steps.save(path)
    assert path.read_bytes() == first, "the same record gives the same bytes"


def test_what_torch_writes_is_read(tmp_path):
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1000.5, "dur": 8, "pid": 7, "tid": 4711},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1002, "dur": 3, "tid": 4711, "args": {"correlation": 9}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1010, "dur": 5, "tid": 7, "args": {"correlation": 9, "stream": 7}},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 1010, "tid": 7},
        {"ph": "X", "cat": "python_function", "name": "f", "ts": 0, "dur": 99, "tid": 4711},
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"deviceProperties": [{"name": "NVIDIA L4"}], "traceEvents": events}))
    read = load(path)
    assert read.device == "NVIDIA L4"
    assert [(s.name, s.kind, s.start_us, s.lane) for s in read.spans] == [
        ("aten::mm", "op", 0, 0), ("cudaLaunchKernel", "launch", 1.5, 0), ("gemm", "kernel", 9.5, 0),
    ]  # fmt: skip


def test_files_that_are_no_trace(tmp_path):
    for content in (b"{}", b"[1]", b"not json", gzip.compress(b"{}")[:-3]):
        path = tmp_path / ("x.json.gz" if content[:1] == b"\x1f" else "x.json")
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"path must be a Chrome trace, got x\.json"):
            load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match="no record 'none' of 'h200'; there are: "):
        recorded("none")


def test_profile_of_a_call(capfd):
    model = torch.nn.Linear(8, 8)
    made = profile(lambda: model(torch.ones(2, 8)).sum().backward(), calls=3, name="step", about="a test")
    assert made.about == "a test" and list(made.notes) == ["step"]
    assert sum(s.name == "step" for s in made.spans) == 3
    assert sum(s.name == "aten::addmm" for s in made.spans) == 3, "warm-up calls are not recorded"
    assert made.device == ("cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name())
    assert min(s.start_us for s in made.spans) == 0
    assert capfd.readouterr().err == "", "the profiler's own messages would end up in a notebook"
    for wrong in ({"calls": 0}, {"warmup": -1}, {"calls": 1.5}, {"warmup": True}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a whole number from . on, got "):
            profile(torch.ones, 3, **wrong)
    with pytest.raises(ValueError, match="limit must be a whole number from 1 on, got 0"):
        made.table(0)
    with pytest.raises(ZeroDivisionError):
        profile(lambda: 1 / 0, warmup=0)
    assert profile(torch.ones, 3).spans, "a call that failed left the profiler usable"


def test_records_that_ship_are_small_and_have_kernels():
    paths = sorted(RESULTS.glob("*/*.json.gz"))
    assert paths, "no record ships"
    for path in paths:
        assert path.stat().st_size <= MAX_BYTES, path
        record = load(path)
        assert record.kernels and record.about and record.notes
        launched = {s.launched for s in record.spans if s.kind == "launch"}
        assert all(k.launched in launched for k in record.kernels)


def test_the_recorded_mlp_says_what_the_lesson_says():
    record = recorded("mlp")
    share = {name: record.note(name).busy_us / record.note(name).span_us for name in record.notes if "MLP" in name}
    assert share["small MLP"] < 0.3 < share["small MLP, graph"] < share["large MLP"]
    assert len({record.note(f"matmul {n} bfloat16").kernels[-1].name for n in (128, 512, 2048, 8192)}) == 4


def test_importing_it_is_light():
    import subprocess
    import sys

    code = "import sys, gpukit.profiling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert profiling.MAX_BYTES == 100_000
