"""Predicted beside measured times: the cases, the measuring process, the tables and what is said of misses."""

import subprocess
import sys

import pytest
import torch
import triton

from gpukit.validation import timed_kernels, times
from gpukit.validation.timed_kernels import CASES, RATES, Case

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


def test_there_are_cases_of_every_kind():
    assert len(CASES) >= 50 and len(RATES) >= 20
    kinds = (
        "copy stride gather embedding histogram softmax backward transpose sums exp xorshift matmul tf32 fp8 descriptor"
    )
    for kind in [*kinds.split(), "attention", "torch: ", "persistent", "spilled", "one warp an SM", "atomics"]:
        assert any(kind in name for name in CASES), kind
    assert not CASES.keys() & RATES.keys() and not any("|" in name for name in [*CASES, *RATES])
    assert all(rate.minus is None or rate.minus in RATES for rate in RATES.values())


@pytest.mark.parametrize("name", ["copy 256 MiB bf16", "torch: add 16384 x 4096 bf16"])
def test_a_case_is_predicted(name):
    us, limit = times.predict_case(name, "h200")
    assert 100 < us < 200 and limit == "device memory"


# ---- measuring ----------------------------------------------------------------------------------------------------


def _lost(device):
    raise RuntimeError("an illegal memory access")


@pytest.fixture
def fake_gpu(monkeypatch):
    """As on a GPU, but for the GPU: the cases run on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        timed_kernels, "CASES", {"good": Case("good", lambda d: lambda: torch.ones(9) + 1), "bad": Case("bad", _lost)}
    )
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def test_each_case_costs_only_itself(fake_gpu, tmp_path, monkeypatch, capsys):
    path = tmp_path / "raw.csv"
    path.write_text(",".join(f.name for f in times.fields(times._Raw)) + "\n")
    assert times._time(path, ["bad", "good"], 60, "timed") == 0
    bad, good = times._read(path, times._Raw)
    assert bad.error == "RuntimeError('an illegal memory access')" and bad.median_us == 0
    assert good.error == "" and 0 < good.p20_us <= good.median_us <= good.p80_us and good.gpu == "h200"
    assert (
        times._warm(["bad", "good"], 60, "timed") == 0 and "bad does not run: RuntimeError" in capsys.readouterr().out
    )
    # what breaks the context ends the process, so that the next one goes on behind it
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: _lost(""))
    assert times._time(path, ["good", "good"], 60, "timed") == 3 and len(times._read(path, times._Raw)) == 3
    assert times._time(path, ["good"], -1, "timed") == 0 and len(times._read(path, times._Raw)) == 3  # no time left


def test_measuring_needs_a_gpu(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert times.main(["--measure", str(tmp_path / "raw.csv")]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


# ---- the tables ---------------------------------------------------------------------------------------------------


def row(case, predicted, measured):
    return times.Row(
        case, predicted, measured, predicted / measured, "L2", "h200", "2.11", "3.6.0", "3.6.0", "2026-01-01"
    )


def raw(name, us, error=""):
    return times._Raw(name, us, us, us, 1980.0, 500.0, "h200", "2.11", "3.6.0", "2026-01-01", 0.5, error)


def test_predicting_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(times, "RESULTS", tmp_path)
    path = tmp_path / "raw.csv"
    launch, first, after = "launch on an idle stream", "latency of L1", "launch after a launch"
    measured = {"torch: add 16384 x 4096 bf16": 120.0, launch: 3.0, first: 1000.0, after: 1064.0, "no such case": 9.0}
    times.write([*(raw(name, us) for name, us in measured.items()), raw("copy", 0.0, "broke")], path)
    assert times.main(["--again", str(path), "--workers", "1"]) == 0
    (found,) = times.read("h200")
    assert found.case == "torch: add 16384 x 4096 bf16" and found.limit == "device memory"
    assert (
        found.ratio == pytest.approx(found.predicted_us / 120, rel=1e-3) and found.predicted_with == triton.__version__
    )
    rates = {name: r.value for name, r in times.machine("h200").items()}
    assert rates == {launch: 3, first: pytest.approx(1e6 / 65536, rel=1e-3), after: 2}
    assert times.table("h200").splitlines() == capsys.readouterr().out.splitlines()
    assert times.main(["--again", str(tmp_path / "none.csv")]) == 2


def test_the_table(monkeypatch):
    monkeypatch.setattr(times, "REASONS", {"far": "it is far"})
    rows = [row("near", 110, 100), row("off", 80, 100), row("far", 200, 100), row("short", 20, 10)]
    assert [r.misses for r in rows] == [False, False, True, False]
    assert times.deviations(rows) == (pytest.approx(0.2), pytest.approx(1.0))
    lines = times.text(rows).splitlines()
    assert lines[2].split() == ["near", "L2", "110.0", "100.0", "1.10"]
    assert lines[4].endswith("MISS") and lines[5].endswith("not judged") and "far: it is far" in lines
    assert lines[-1].startswith("3 cases of 50 us and more: predicted times are off by 20.0% in the median (bar 15%)")
    assert "short" not in times.text(rows, everything=False)


def test_the_h200_is_within_the_bars_or_has_a_reason():
    rows = times.read("h200")
    assert {row.case for row in rows} == CASES.keys() and sum(row.judged for row in rows) >= 60
    assert times.deviations(rows)[0] <= times.MEDIAN_BAR
    assert {row.case for row in rows if row.misses} == times.REASONS.keys()  # each miss has one, and none is stale
    assert "reason not known" not in times.table("h200")
    assert all(row.ratio == pytest.approx(row.predicted_us / row.measured_us, rel=1e-3) for row in rows)


def test_no_measured_times(capsys):
    assert times.main(["--gpu", "t4"]) == 2
    assert "on a machine with that GPU run" in capsys.readouterr().err


def test_the_command_says_what_it_does():
    done = subprocess.run([sys.executable, "-m", "gpukit.validation.times", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--measure FILE" in done.stdout and "--names" not in done.stdout
