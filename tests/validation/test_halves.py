"""The kernels of the two halves are right, the coin is the recorded one, and bars are on the half held back."""

import dataclasses
import hashlib

import pytest
import torch
import triton

from gpukit import cli
from gpukit.validation import halves, report, times, traffic, unseen
from gpukit.validation.new_kernels import CASES
from gpukit.validation.new_kernels.case import Work

needs_the_interpreter = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
KINDS = (
    "dependent walks", "overlapping loads", "ragged sizes", "interleaved", "transposed operands", "causal attention",
    "atomics", "gathers", "small grids", "persistent loops", "sums across programs", "int8 and fp8 products",
    "several launches",
)  # fmt: skip


@needs_the_interpreter
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_what_pytorch_does(name):
    torch.manual_seed(0)
    assert CASES[name].build("cpu", **CASES[name].small).wrong() == ""


def test_a_wrong_result_is_noticed():
    y = torch.ones(3)
    assert Work(lambda: y.add_(1), y, lambda: torch.ones(3)).wrong() == "", "results are cleared first"
    assert "off by 1," in Work(lambda: y.add_(2), y, lambda: torch.ones(3)).wrong()
    assert "off by nan" in Work(lambda: y.add_(float("nan")), y, lambda: torch.ones(3)).wrong()


def test_the_coin_is_the_one_that_was_tossed():
    """A new name is a new toss, and a kernel that is renamed could change sides: these are the names that were measured."""
    held = [name for name in sorted(CASES) if halves.half(name) == "held"]
    assert (len(CASES), len(held)) == (68, 33)
    assert hashlib.sha256("\n".join(held).encode()).hexdigest()[:16] == "ebd5571b2e3f554c"
    assert {case.kind for case in CASES.values()} >= set(KINDS)


def row(case: str, ratio: float, measured: float = 100.0) -> times.Row:
    return times.Row(case, measured * ratio, measured, ratio, "L2", "h200", "2.11", "3.6.0", "3.6.0", "2026-01-01")


HELD = [name for name in CASES if halves.half(name) == "held"][:10]
OPEN = next(name for name in CASES if halves.half(name) == "open")


def test_bars_of_the_median_of_nine_in_ten_and_of_the_worst():
    good = [row(name, 1.07) for name in HELD]
    assert halves.outside(good) == [] == halves.outside([row("short", 9.0, measured=20)])
    assert halves.outside([*good[:9], row(HELD[9], 1.34)]) == []
    assert halves.outside([*good[:9], row(HELD[9], 0.6)]) == ["worst"]
    assert halves.outside([*good[:8], row(HELD[8], 1.3), row(HELD[9], 1.3)]) == ["90th percentile"]
    assert halves.outside([row(name, 0.9) for name in HELD]) == ["median"]
    assert halves.outside([*good, row("short", 9.0, measured=20)]) == [], "launches of 50 µs and more"
    assert "reason not known" in halves.text([*good, row("far", 2.0)])


@pytest.fixture
def results(tmp_path, monkeypatch):
    for module in (times, traffic):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


def test_the_half_held_back_comes_first_and_decides(results, capsys):
    rows = [row(OPEN, 3.0), *(row(name, 1.05) for name in HELD)]
    for gpu in ("h100-sxm", "h200"):
        times.write([dataclasses.replace(each, gpu=gpu) for each in rows], results / gpu / "halves.csv")
    counted = traffic.row(HELD[0], "l2_write_sectors", 10_400, 10_000, False, "h200", "3.6.0", "2026-01-01")
    traffic.write([counted], results / "h200" / "halves_traffic.csv")
    assert report.recorded() == ["h200", "h100-sxm"]
    assert cli.main(["validate"]) == 0, "what is open may be far off"
    out = capsys.readouterr().out
    titles = [line for line in out.splitlines() if "simulated and measured" in line]
    assert titles[0] == "TIMES OF KERNELS HELD BACK, simulated and measured on h200" and HELD[0] in out
    assert [title.startswith("TIMES OF OPEN") for title in titles].index(True) == 3, "both GPUs, and traffic, before it"
    assert "median 5.0% (bar 8%), 90th percentile 5.0% (bar 25%), worst 5.0% (bar 35%); within all bars" in out
    times.write([row(name, 1.2) for name in HELD], results / "h100-sxm" / "halves.csv")
    assert cli.main(["validate", "--misses"]) == 1 and "OUTSIDE: median" in capsys.readouterr().out
    assert cli.main(["validate", "--gpu", "h200"]) == 0 and "nothing is recorded" in capsys.readouterr().out
    traffic.write([dataclasses.replace(counted, ratio=1.2)], results / "h200" / "halves_traffic.csv")
    assert cli.main(["validate", "--gpu", "h200"]) == 1


def test_what_is_recorded_of_an_h100():
    rows = times.read("h100-sxm", "new")
    assert [row.case for row in rows] == list(CASES)
    assert all(row.ratio == pytest.approx(row.predicted_us / row.measured_us, rel=1e-3) for row in rows)
    sets = [name for name in unseen.SETS if (times.RESULTS / "h100-sxm" / times.KERNELS[name][1]).exists()]
    seen = [*rows, *(row for name in sets for row in times.read("h100-sxm", name))]
    missed = {(row.case, row.gpu) for row in seen if row.judged and abs(row.ratio - 1) > halves.BARS["worst"]}
    assert {key for key in halves.REASONS if key[1] == "h100-sxm"} == missed, (
        "each miss has its reason, and no other row"
    )
    assert halves.reason(*min(missed)) == halves.REASONS[min(missed)] and halves.reason("no case", "h200") is None
    assert halves.reason(min(missed)[0], "h200") == "as on another GPU: " + halves.REASONS[min(missed)]
    judged = [halves.of(rows, "held"), *(times.read("h100-sxm", name) for name in sets)]
    broken = any(halves.outside(each) for each in judged)
    assert cli.main(["validate", "--gpu", "h100-sxm"]) == int(broken), "all traffic outside its bar has its reason"


def test_each_miss_on_an_h200_has_its_reason():
    """That of an H100 may do; what is none has none."""
    sets = [name for name in unseen.SETS if (times.RESULTS / "h200" / times.KERNELS[name][1]).exists()]
    rows = [row for name in sets for row in times.read("h200", name)]
    missed = {(row.case, row.gpu) for row in rows if row.judged and abs(row.ratio - 1) > halves.BARS["worst"]}
    assert missed and [case for case, gpu in missed if halves.reason(case, gpu) is None] == []
    assert {key for key in halves.REASONS if key[1] == "h200"} <= missed
    assert {gpu for _, gpu in halves.REASONS} <= {"h100-sxm", "h200"}


@needs_the_interpreter
@pytest.mark.parametrize("case", ["16 Mi atomics into one address", "linked lists in 8 MiB, 132 programs"])
def test_what_is_recorded_is_what_is_predicted_today(case):
    (recorded,) = (row.predicted_us for row in times.read("h100-sxm", "new") if row.case == case)
    assert times.predict_case(case, "h100-sxm", "new")[0] == pytest.approx(recorded, rel=0.01)
