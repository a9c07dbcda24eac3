"""The third set: its kernels are right, unlike the older ones, predicted after they were measured; and its two commands."""

import json

import pytest
import torch
import triton

from gpukit import cli
from gpukit.validation import counters, halves, report, simulated_counts, third, times, traffic
from gpukit.validation.fourth_set import CASES as FOURTH
from gpukit.validation.new_kernels import CASES as OLDER
from gpukit.validation.third_set import CASES

needs_the_interpreter = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


@needs_the_interpreter
@pytest.mark.parametrize("name", [*CASES, *FOURTH])
def test_a_kernel_computes_what_pytorch_does(name):
    torch.manual_seed(0)
    case = (CASES | FOURTH)[name]
    assert case.build("cpu", **case.small).wrong() == ""


@pytest.mark.parametrize("cases, older", [(CASES, OLDER), (FOURTH, OLDER | CASES)], ids=["third", "fourth"])
def test_no_kernel_is_of_a_kind_that_the_model_was_fixed_by(cases, older):
    kinds = {case.kind for case in cases.values()}
    assert len(cases) >= 24 and len(kinds) >= 12
    assert not kinds & {case.kind for case in older.values()} and not cases.keys() & older.keys()


def test_nothing_is_predicted_before_it_is_measured():
    """A table of the set needs the raw measurements that were there before it."""
    for folder in times.RESULTS.iterdir():
        for _, table in (times.KERNELS[third.SET], traffic.KERNELS[third.SET]):
            assert not (folder / table).exists() or (folder / third.RAW).exists()


@pytest.fixture
def results(tmp_path, monkeypatch):
    for module in (times, traffic):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


def measured(results, name: str, median_us: float) -> None:
    """What a GPU's session leaves behind, of one case."""
    folder = results / "h200"
    folder.mkdir()
    titles = "name,median_us,p20_us,p80_us,sm_mhz,watts,gpu,torch,triton,date,seconds,error"
    (folder / third.RAW).write_text(f'{titles}\n"{name}",{median_us},1,2,0,0,h200,2.11,3.6.0,2026-01-01,1,\n')
    row = {"kernel": "backwards", "dram__bytes_read.sum": 268e6, "dram__bytes_write.sum": 240e6}
    row |= {"l1tex__m_xbar2l1tex_read_sectors.sum": 8388608, "launch__grid_size": 65536}
    facts = {"gpu": "h200", "triton": "3.6.0", "date": "2026-01-01"}
    log = [{"case": name, "what": what} for what in ("begin", "end")]
    assert third.keep(folder, facts, [{"log": log, "rows": [row]}]) == 0


def test_a_missing_measurement_is_said_in_one_line(results, capsys):
    assert third.state([]) == [third.NOTHING] == third.state(["h200"])
    report.show(["h200"], True, missing=True)
    out = capsys.readouterr().out
    assert out.startswith(third.NOTHING + "\n") and out.count("THIRD SET") == 1
    assert cli.main(["validate", "--predict"]) == 2 and "gpukit validate --measure" in capsys.readouterr().err


def test_measuring_needs_a_gpu(results, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["validate", "--measure"]) == 2 and "needs an NVIDIA GPU" in capsys.readouterr().err
    assert not list(results.iterdir())


def test_one_command_measures_times_and_counters(results, monkeypatch):
    """On a GPU that is played: both are asked about all kernels of the set, and what is not shown is not kept."""
    asked = {}

    def time_all(path, only, workers, seconds, kernels):
        asked["times"] = list(times.cases(kernels))
        path.parent.mkdir()
        return 0

    def count_all(names, say, seconds, module):
        asked["counters"] = names, module
        return [{"log": [], "rows": [{"kernel": "f", "dram__bytes_read.sum": 1.0, "sm__cycles_active.avg": 2.0}]}]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(times, "measure", time_all)
    monkeypatch.setattr(counters, "measure", count_all)
    assert cli.main(["validate", "--measure"]) == 0
    assert asked == {"times": list(CASES), "counters": (list(CASES), traffic.KERNELS["third"][0])}
    kept = json.loads((results / "h200" / third.COUNTERS).read_text())
    assert kept["facts"]["gpu"] == "h200" and kept["runs"][0]["rows"] == [{"kernel": "f", "dram__bytes_read.sum": 1.0}]


@needs_the_interpreter
def test_what_is_measured_is_predicted_afterwards_and_has_the_bars(results, capsys, monkeypatch):
    """With numbers that are made up in place of the model's: nothing of the set is predicted here."""
    name = "64 Mi fp32 backwards"

    def predict_all(path, only, workers, kernels):
        row = times.Row(name, 150.0, 100.0, 1.5, "L2", "h200", "2.11", "3.6.0", "3.6.0", "2026-01-01")
        times.write([row], path.parent / times.KERNELS[kernels][1])
        return 0

    def trace_all(names, gpu, workers, module):
        counts = {"l2_read_sectors": 8388608, "dram_read_bytes": 268e6, "dram_bytes": 508e6}
        return {name: {"case": name, "kernels": ["backwards"], "counts": counts}}

    measured(results, name, 100.0)
    assert third.state(["h200"]) == ["THIRD SET, measured on h200 and not predicted yet: gpukit validate --predict"]
    monkeypatch.setattr(times, "again", predict_all)
    monkeypatch.setattr(simulated_counts, "trace_all", trace_all)
    assert cli.main(["validate", "--predict"]) == 0
    rows = traffic.read(results / "h200" / "third_traffic.csv")
    assert [(row.counter, row.ratio) for row in rows] == [
        ("l2_read_sectors", 1.0), ("dram_read_bytes", 1.0), ("dram_bytes", 1.0)
    ]  # fmt: skip
    capsys.readouterr()
    assert report.show(report.recorded(), True, missing=False) == 1, "the time is far from what was measured"
    out = capsys.readouterr().out
    assert out.startswith("TIMES OF THE THIRD SET, simulated and measured on h200") and "OUTSIDE: median" in out
    assert third.state(["h200"]) == [] and halves.outside(times.read("h200", third.SET))
