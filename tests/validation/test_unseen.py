"""The sets of kernels that are measured before they are predicted: they are right and unlike older ones; and their commands."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton

from gpukit import cli
from gpukit.lessons import start
from gpukit.validation import counters, halves, report, simulated_counts, times, traffic, unseen
from gpukit.validation.eighth_set import CASES as EIGHTH
from gpukit.validation.eleventh_set import CASES as ELEVENTH
from gpukit.validation.fifth_set import CASES as FIFTH
from gpukit.validation.fourth_set import CASES as FOURTH
from gpukit.validation.new_kernels import CASES as OLDER
from gpukit.validation.ninth_set import CASES as NINTH
from gpukit.validation.seventh_set import CASES as SEVENTH
from gpukit.validation.sixth_set import CASES as SIXTH
from gpukit.validation.tenth_set import CASES as TENTH
from gpukit.validation.third_set import CASES as THIRD
from gpukit.validation.twelfth_set import CASES as TWELFTH

CASES = {
    "third": THIRD,
    "fourth": FOURTH,
    "fifth": FIFTH,
    "sixth": SIXTH,
    "seventh": SEVENTH,
    "eighth": EIGHTH,
    "ninth": NINTH,
    "tenth": TENTH,
    "eleventh": ELEVENTH,
    "twelfth": TWELFTH,
}
# What the model had seen when a set was written.
SEEN = {
    "third": OLDER,
    "fourth": OLDER | THIRD,
    "fifth": OLDER | THIRD | FOURTH,
    "sixth": OLDER | THIRD | FOURTH | FIFTH,
    "seventh": OLDER | THIRD | FOURTH | FIFTH | SIXTH,
    "eighth": OLDER | THIRD | FOURTH | FIFTH | SIXTH | SEVENTH,
    "ninth": OLDER | THIRD | FOURTH | FIFTH | SIXTH | SEVENTH | EIGHTH,
    "tenth": OLDER | THIRD | FOURTH | FIFTH | SIXTH | SEVENTH | EIGHTH | NINTH,
    "eleventh": OLDER | THIRD | FOURTH | FIFTH | SIXTH | SEVENTH | EIGHTH | NINTH | TENTH,
    "twelfth": OLDER | THIRD | FOURTH | FIFTH | SIXTH | SEVENTH | EIGHTH | NINTH | TENTH | ELEVENTH,
}
each = pytest.mark.parametrize("name", unseen.SETS)
needs_the_interpreter = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


@needs_the_interpreter
@pytest.mark.parametrize(
    "name", [*THIRD, *FOURTH, *FIFTH, *SIXTH, *SEVENTH, *EIGHTH, *NINTH, *TENTH, *ELEVENTH, *TWELFTH]
)
def test_a_kernel_computes_what_pytorch_does(name):
    torch.manual_seed(0)
    case = (THIRD | FOURTH | FIFTH | SIXTH | SEVENTH | EIGHTH | NINTH | TENTH | ELEVENTH | TWELFTH)[name]
    assert case.build("cpu", **case.small).wrong() == ""


@each
def test_no_kernel_is_of_a_kind_that_the_model_was_fixed_by(name):
    cases, older = CASES[name], SEEN[name]
    kinds = {case.kind for case in cases.values()}
    assert len(cases) >= 24 and len(kinds) >= 12
    assert not kinds & {case.kind for case in older.values()} and not cases.keys() & older.keys()


@each
def test_nothing_is_predicted_before_it_is_measured(name):
    """A table of the set needs the raw measurements that were there before it."""
    for folder in times.RESULTS.iterdir():
        for _, table in (times.KERNELS[name], traffic.KERNELS[name]):
            assert not (folder / table).exists() or (folder / unseen.raw(name)).exists()


def set_option(name: str) -> list[str]:
    return [] if name == unseen.NEWEST else ["--set", name]


@pytest.fixture
def results(tmp_path, monkeypatch):
    for module in (times, traffic):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


def measured(results, name: str, case: str, kernel: str, median_us: float) -> None:
    """What a GPU's session leaves behind, of one case of a set."""
    folder = results / "h200"
    folder.mkdir(exist_ok=True)
    titles = "name,median_us,p20_us,p80_us,sm_mhz,watts,gpu,torch,triton,date,seconds,error"
    (folder / unseen.raw(name)).write_text(f'{titles}\n"{case}",{median_us},1,2,0,0,h200,2.11,3.6.0,2026-01-01,1,\n')
    row = {"kernel": kernel, "dram__bytes_read.sum": 268e6, "dram__bytes_write.sum": 240e6}
    row |= {"l1tex__m_xbar2l1tex_read_sectors.sum": 8388608, "launch__grid_size": 65536}
    facts = {"gpu": "h200", "triton": "3.6.0", "date": "2026-01-01"}
    log = [{"case": case, "what": what} for what in ("begin", "end")]
    assert unseen.keep(folder / unseen.counted(name), facts, [{"log": log, "rows": [row]}]) == 0


def predicted(results, name: str, case: str, us: float) -> None:
    row = times.Row(case, us, 100.0, us / 100, "L2", "h200", "2.11", "3.6.0", "3.6.0", "2026-01-01")
    times.write([row], results / "h200" / times.KERNELS[name][1])


def test_a_missing_measurement_is_said_in_one_line(results, capsys):
    for name in unseen.SETS:
        assert unseen.state([], name) == [unseen.nothing(name)] == unseen.state(["h200"], name)
    report.show(["h200"], True, missing=True)
    out = capsys.readouterr().out
    assert out.startswith("".join(f"{unseen.nothing(name)}\n\n" for name in unseen.SETS)) and out.count(
        " SET, "
    ) == len(unseen.SETS)
    assert cli.main(["validate", "--predict"]) == 2
    assert capsys.readouterr().err.strip().endswith("run: gpukit validate --measure")
    assert cli.main(["validate", "--predict", "--set", "third"]) == 2
    assert capsys.readouterr().err.strip().endswith("run: gpukit validate --measure --set third")


def test_a_set_that_does_not_exist_is_refused(results, capsys):
    assert cli.main(["validate", "--predict", "--set", "thirteenth"]) == 2
    assert (
        "--set must be one of twelfth, eleventh, tenth, ninth, eighth, seventh, sixth, fifth, fourth, third, got 'thirteenth'"
        in capsys.readouterr().err
    )
    assert cli.main(["validate", "--set", "third"]) == 2
    assert "--set goes with --measure or --predict" in capsys.readouterr().err


def test_measuring_needs_a_gpu(results, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["validate", "--measure"]) == 2 and "needs an NVIDIA GPU" in capsys.readouterr().err
    assert not list(results.iterdir())


@needs_the_interpreter
def test_a_kernel_that_the_model_refuses_takes_one_line(results, capsys, monkeypatch):
    """Not a traceback. A thread predicts it, so that no process is started."""
    case, kernel = "roots of 64 Mi fp32, tiles by tickets to 264 programs, two launches", "by_tickets"
    measured(results, "sixth", case, kernel, 100.0)
    monkeypatch.setattr(times, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    assert times.again(results / "h200" / "sixth_raw.csv", "", 1, "sixth") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{case}: refused: line ")
    assert line.endswith("a loop waits for the answer of an atomic on ticket_ptr, and how long it waits depends on the other "
                         "programs: a sample cannot tell")  # fmt: skip


@each
def test_one_command_measures_times_and_counters(results, monkeypatch, name):
    """On a GPU that is played: both are asked about all kernels of the set, and what is not shown is not kept."""
    asked = {}

    def time_all(path, only, workers, seconds, kernels):
        asked["times"] = path.name, list(times.cases(kernels))
        path.parent.mkdir()
        return 0

    def count_all(names, say, seconds, module):
        asked["counters"] = names, module
        return [{"log": [], "rows": [{"kernel": "f", "dram__bytes_read.sum": 1.0, "sm__cycles_active.avg": 2.0}]}]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(times, "measure", time_all)
    monkeypatch.setattr(counters, "measure", count_all)
    assert cli.main(["validate", "--measure", *set_option(name)]) == 0
    names = list(CASES[name])
    assert asked == {"times": (f"{name}_raw.csv", names), "counters": (names, f"gpukit.validation.{name}_set")}
    kept = json.loads((results / "h200" / f"{name}_counters.json").read_text())
    assert kept["facts"]["gpu"] == "h200" and kept["runs"][0]["rows"] == [{"kernel": "f", "dram__bytes_read.sum": 1.0}]


@needs_the_interpreter
@pytest.mark.parametrize(
    "name, case, kernel",
    [
        ("third", "64 Mi fp32 backwards", "backwards"),
        ("fourth", "prices of 32 Mi options fp32", "prices"),
        ("fifth", "64 Mi fp32 to bf16, rounded by chance", "round_by_chance"),
        ("sixth", "48 Mi pairs of normal numbers fp32 to fp16, 8 warps", "two_normals"),
        ("seventh", "SiLU of 24 Mi fp64, 512 per program", "sigmoid64"),
        ("eighth", "dates of 64 Mi days int32, three columns of 16 and 8 bits", "dates"),
        ("ninth", "60,000,000 codes of 12 bits decoded by a table of 4096 int64, 1024 per program", "decode"),
        ("tenth", "12,000,001 points turned by quaternions of their own fp32, 64 per program of 1 warp", "rotate"),
        ("eleventh", "2,000,001 records of 84 bytes in any other order, 8 per program of 1 warp", "order_records"),
        (
            "twelfth",
            "240,000,000 bytes as 64 letters, 3 bytes to an int32, 512 int32 per program, 4 warps",
            "bytes_as_letters",
        ),
    ],
)
def test_what_is_measured_is_predicted_afterwards_and_has_the_bars(results, capsys, monkeypatch, name, case, kernel):
    """With numbers that are made up in place of the model's: nothing of the set is predicted here."""

    def predict_all(path, only, workers, kernels):
        assert path == results / "h200" / f"{name}_raw.csv" and kernels == name
        predicted(results, name, case, 150.0)
        return 0

    def trace_all(names, gpu, workers, module):
        counts = {"l2_read_sectors": 8388608, "dram_read_bytes": 268e6, "dram_bytes": 508e6}
        return {name: {"case": name, "kernels": [kernel], "counts": counts} for name in [case]}

    measured(results, name, case, kernel, 100.0)
    command = " ".join(["gpukit validate --predict", *set_option(name)])
    assert unseen.state(["h200"], name) == [f"{name.upper()} SET, measured on h200 and not predicted yet: {command}"]
    monkeypatch.setattr(times, "again", predict_all)
    monkeypatch.setattr(simulated_counts, "trace_all", trace_all)
    assert cli.main(["validate", "--predict", *set_option(name)]) == 0
    rows = traffic.read(results / "h200" / f"{name}_traffic.csv")
    assert [(row.counter, row.ratio) for row in rows] == [
        ("l2_read_sectors", 1.0), ("dram_read_bytes", 1.0), ("dram_bytes", 1.0)
    ]  # fmt: skip
    capsys.readouterr()
    assert report.show(report.recorded(), True, missing=False) == 1, "the time is far from what was measured"
    out = capsys.readouterr().out
    title = f"TIMES OF THE {name.upper()} SET, simulated and measured on h200"
    assert title in out and "OUTSIDE: median" in out
    assert unseen.state(["h200"], name) == [] and halves.outside(times.read("h200", name))


def test_the_newest_set_comes_first(results, capsys):
    for name in unseen.SETS:
        predicted(results, name, "a case", 101.0)
    assert report.show(["h200"], True, missing=False) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("TIMES OF")]
    assert [title.split()[3] for title in titles] == [name.upper() for name in unseen.SETS]


def test_a_set_that_is_not_measured_hides_no_older_one(results, capsys):
    older = unseen.SETS[1]
    predicted(results, older, "a case", 104.0)
    assert report.show(["h200"], True, missing=False) == 0
    out = capsys.readouterr().out
    assert out.startswith(unseen.nothing(unseen.NEWEST)), "one line says what is to be measured"
    assert [line.split()[3] for line in out.splitlines() if line.startswith("TIMES OF")] == [older.upper()]


def test_the_lesson_speaks_of_the_newest_set_that_was_predicted(results):
    (results / "h100-sxm").mkdir()
    with pytest.raises(FileNotFoundError):
        unseen.rows("h100-sxm")
    for name, us in (
        ("third", 120.0),
        ("fourth", 103.0),
        ("fifth", 107.0),
        ("sixth", 105.0),
        ("seventh", 106.0),
        ("eighth", 108.0),
        ("ninth", 109.0),
        ("tenth", 110.0),
        ("eleventh", 111.0),
        ("twelfth", 112.0),
    ):
        row = times.Row("a case", us, 100.0, us / 100, "L2", "h100-sxm", "2.11", "3.6.0", "3.6.0", "2026-01-01")
        times.write([row], results / "h100-sxm" / times.KERNELS[name][1])
        assert f"within {us / 100 - 1:.0%} of the measured ones" in start.accuracy().data
