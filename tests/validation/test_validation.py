"""The validation: its kernels, how Nsight Compute's output is read, the table and its bars, and the GPU's own numbers."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch
import triton

from gpukit import benchmark, hardware
from gpukit.kernels import _device
from gpukit.validation import __main__ as command
from gpukit.validation import counters, simulated_counts, traffic
from gpukit.validation.counted_kernels import CASES, Case, copy
from gpukit.validation.values import VALUES, distance, run_all

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
TRAFFIC = traffic.RESULTS / "h200" / "traffic.csv"
NUMBERS = traffic.RESULTS / "h200" / "values.npz"


def test_there_are_kernels_of_every_kind():
    own = [name for name in CASES if not name.startswith("gpukit ")]
    assert len(own) >= 25 and len(CASES) > len(own)
    kinds = "stride gather shift transpose tail two split atomics tiles groups persistent descriptor attention".split()
    for kind in kinds:
        assert any(kind in name for name in own) or (kind == "gather" and any("embedding" in name for name in own))


@pytest.mark.parametrize("name", ["copy, small blocks", "rows of 30, padded to 32", "descriptor, tiles of 128x32"])
def test_a_case_is_traced(name):
    found = simulated_counts.trace_case(name, "h200", compiled=False)
    assert found["counts"]["l2_read_sectors"] > 0 and len(found["kernels"]) == len(found["layouts"]) == 1
    assert set(found["counts"]) == set(simulated_counts.COUNTERS)


def test_grids_of_a_fixed_size_are_made_for_the_gpu(monkeypatch):
    """A program for each SM: 132 on an H200, though nothing here has one."""

    def prepare(device):
        x, y = torch.zeros(132 * 256), torch.zeros(132 * 256)
        return lambda: copy[(_device.multiprocessors(x.device),)](x, y, 132 * 256, BLOCK=256)

    monkeypatch.setitem(CASES, "one on each SM", Case("one on each SM", prepare))
    found = simulated_counts.trace_case("one on each SM", "h200", compiled=False)
    assert found["counts"]["l2_write_sectors"] == 132 * 256 * 4 // 32
    assert hardware.imagined_gpu() is None, "the next case begins without"


@pytest.mark.parametrize(
    "name", ["matmul", "int4_matmul", "flash_attention", "decode_attention", "rms_norm", "softmax"]
)
def test_kernels_that_ask_for_their_gpu_can_be_validated(name, monkeypatch):
    """Whatever host code asks of a GPU, its compute capability too, the imagined one answers; also when it raises, it is
    imagined no longer."""
    op = benchmark.operation(name)
    kernel = benchmark.provider(op, "gpukit")

    def prepare(device):
        inputs = op.make_inputs(op.test_shapes[2], torch.bfloat16, torch.Generator().manual_seed(0))
        return lambda: kernel(*inputs)

    monkeypatch.setitem(CASES, "own", Case("own", prepare))
    assert simulated_counts.trace_case("own", "h200", compiled=False)["kernels"]
    assert hardware.imagined_gpu() is None
    monkeypatch.setitem(CASES, "broken", Case("broken", lambda device: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        simulated_counts.trace_case("broken", "h200", compiled=False)
    assert hardware.imagined_gpu() is None


# ---- Nsight Compute -----------------------------------------------------------------------------------------------


def test_the_output_of_ncu_is_read():
    rows = counters.read_csv(
        "==PROF== Connected to process 12\n"
        '==PROF== Profiling "copy": 0%....50%....100% - 12 passes\n'
        '"ID","Process ID","Kernel Name","Block Size","gpu__time_duration.sum","lts__t_sectors_op_red.sum"\n'
        '"","","","","ns",""\n'
        '"0","12","copy","(128, 1, 1)","1,234","5"\n"1","12","matmul(float *)","(128, 1, 1)","2,000.5","n/a"\n'
        "==PROF== Disconnected\n"
    )
    assert rows == [
        {"kernel": "copy", "gpu__time_duration.sum": 1234.0, "lts__t_sectors_op_red.sum": 5.0},
        {"kernel": "matmul", "gpu__time_duration.sum": 2000.5},
    ]
    assert counters.judged(rows[0], "l2_atomic_sectors") == 5  # reductions, and no atomics that return something
    assert counters.judged(rows[1], "l2_read_sectors") is None


def test_kernels_find_their_cases():
    """A case of two kernels with PyTorch's between them, one that failed before it launched, one that was cut short."""
    rows = [
        {"kernel": k, "dram__bytes_read.sum": n} for k, n in (("a", 1), ("torch", 2), ("b", 4), ("c", 8), ("a", 16))
    ]
    log = [{"case": case, "what": "begin"} for case in ("two", "failed", "one", "cut short")]
    kernels = {"two": ["a", "b"], "failed": ["b"], "one": ["c"], "cut short": ["a", "b"]}
    found = counters.matched([{"log": log, "rows": rows}], kernels)
    assert found == {"two": {"dram__bytes_read.sum": 5}, "one": {"dram__bytes_read.sum": 8}}


FAKE = """\
#!{python}
import json, sys
from pathlib import Path

arguments = sys.argv[1:]
if "--query-metrics" in arguments:
    print("\\n".join(f"l1tex__thing_{{i}} a counter" for i in range(60)), "dram__bytes_read x", "lts__t_sectors_op_red y")
    sys.exit()
assert "--profile-from-start" in arguments and "none" in arguments
names = arguments[arguments.index("--metrics") + 1].split(",")
raw = Path(arguments[arguments.index("--log-file") + 1])
log, chosen = Path(arguments[-3]), json.loads(Path(arguments[-1]).read_text())
lines, rows = [], ['"ID","Kernel Name",' + ",".join(f'"{{n}}"' for n in names)]
for i, case in enumerate(chosen):
    lines.append(json.dumps({{"case": case, "what": "begin"}}))
    if case == "b":
        lines.append(json.dumps({{"case": case, "what": "failed", "error": "it broke"}}))
        break
    rows.append(f'"{{i}}","kernel of {{case}}",' + ",".join('"7"' for _ in names))
    lines.append(json.dumps({{"case": case, "what": "end"}}))
log.write_text("\\n".join(lines) + "\\n")
raw.write_text("==PROF==\\n" + "\\n".join(rows) + "\\n")
sys.exit(3 if "b" in chosen else 0)
"""


def test_a_kernel_that_breaks_the_process_costs_only_itself(tmp_path, monkeypatch):
    ncu = tmp_path / "ncu"
    ncu.write_text(FAKE.format(python=sys.executable))
    ncu.chmod(0o755)
    monkeypatch.setattr(counters.shutil, "which", lambda name: str(ncu))
    monkeypatch.setattr(counters, "_AT_ONCE", 3)
    said = []
    runs = counters.measure(list("abcde"), said.append)
    assert [[entry["case"] for entry in run["log"] if entry["what"] == "begin"] for run in runs] == [
        ["a", "b"],
        ["c", "d", "e"],
    ]
    found = counters.matched(runs, {name: [f"kernel of {name}"] for name in "abcde"})
    assert set(found) == set("acde") and found["a"]["dram__bytes_read.sum"] == 7
    assert any("b: it broke" in line for line in said) and any("does not list" in line for line in said)


def test_no_ncu_is_one_sentence(monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    monkeypatch.setattr(counters.Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(RuntimeError, match="measuring needs Nsight Compute: no ncu is on the PATH"):
        counters.find_ncu()


# ---- the table ----------------------------------------------------------------------------------------------------


def row(kernel, counter, traced, measured, aligned=True):
    return traffic.row(kernel, counter, traced, measured, aligned, "h200", "3.6.0", "2026-01-01")


def test_bars():
    assert row("k", "l2_read_sectors", 10_100, 10_000).inside
    assert not row("k", "l2_read_sectors", 10_300, 10_000).inside
    assert row("k", "l2_read_sectors", 10_300, 10_000, aligned=False).inside
    assert row("k", "dram_read_bytes", 10_900_000, 10_000_000).inside
    assert not row("k", "dram_bytes", 8_900_000, 10_000_000).inside
    assert not row("k", "dram_write_bytes", 80_000_000, 100_000_000).inside
    assert not row("k", "dram_write_bytes", 0, 100_000_000).inside
    assert not row("k", "dram_write_bytes", 100_000_000, 0).inside
    assert row("k", "dram_write_bytes", 0, 10_000_000).bar == 0  # L2 holds as much: chance decides what leaves it
    assert row("k", "l2_write_sectors", 10, 20).bar == 0  # too few for a percentage
    assert row("k", "l1_read_sectors", 10_000, 20_000).bar == 0  # shown, not judged


def test_the_table_is_written_read_and_shown(tmp_path, capsys, monkeypatch):
    rows = [row("copy", "l2_read_sectors", 65_536, 65_536), row("odd", "dram_read_bytes", 3_000_000, 2_000_000)]
    path = tmp_path / "h200" / "traffic.csv"
    traffic.write(rows, path)
    assert traffic.read(path) == rows
    monkeypatch.setattr(traffic, "RESULTS", tmp_path)
    assert command.main([]) == 1
    shown = capsys.readouterr().out
    assert "copy    l2_read_sectors     65,536     65,536  1.000   2%\n" in shown
    assert "odd     dram_read_bytes  3,000,000  2,000,000  1.500  10%  MISS\n" in shown
    assert "MISS: odd (dram_read_bytes)\n      the reason is not known\n" in shown
    assert "l2_read_sectors: 1 of 1 kernels within their bar; the worst is copy, 1.000" in shown
    assert "2 rows judged: 1 within their bar, 0 outside with a reason, 1 outside without" in shown
    monkeypatch.setitem(traffic.REASONS, ("odd", "dram_read_bytes"), "the moon was full")
    assert command.main(["--misses"]) == 0
    shown = capsys.readouterr().out
    assert "MISS: odd (dram_read_bytes)\n      of an H100: the moon was full\n" in shown and "65,536" not in shown
    monkeypatch.setitem(traffic.REASONS, ("odd", "dram_read_bytes", "h200"), "here the sun shone")
    assert command.main(["--misses"]) == 0
    assert "MISS: odd (dram_read_bytes)\n      here the sun shone\n" in capsys.readouterr().out
    assert command.main(["--only", "copy"]) == 0
    assert command.main(["--only", "nothing"]) == 2
    assert command.main(["--gpu", "t4"]) == 2
    assert "no such file" in capsys.readouterr().err


MEASURED = {
    "l1tex__m_xbar2l1tex_read_sectors.sum": 65_600.0,
    "lts__t_sectors_srcunit_tex_op_write.sum": 65_536.0,
    "dram__bytes_read.sum": 2_100_000.0,
    "dram__bytes_write.sum": 0.0,
}


def test_a_measurement_is_looked_at_again_without_a_gpu(tmp_path, capsys, monkeypatch):
    """From the raw counters of a measurement: traced anew, held against what ncu said; then again from the table."""
    monkeypatch.setattr(traffic, "RESULTS", tmp_path)
    again = ["--only", "small blocks", "--workers", "1", "--again"]
    assert command.main([*again, str(tmp_path)]) == 2
    facts = {"gpu": "h200", "device": "NVIDIA H200", "torch": "2.11", "triton": "3.6.0", "date": "2026-01-01"}
    run = {"log": [{"case": "copy, small blocks", "what": "begin"}], "rows": [{"kernel": "copy", **MEASURED}]}
    (tmp_path / "measured.json").write_text(json.dumps({"facts": facts, "runs": [run]}))
    assert command.main([*again, str(tmp_path)]) == 0
    assert "1 kernels measured, 1 traced" in capsys.readouterr().out
    rows = traffic.read(tmp_path / "traffic.csv")
    assert [r.counter for r in rows] == ["l2_read_sectors", "l2_write_sectors", "dram_read_bytes", "dram_bytes"]
    assert (rows[0].traced, rows[0].measured) == (65_536, 65_600)
    assert rows[2].ratio == pytest.approx(2_097_152 / 2_100_000, rel=1e-3)

    def in_this_process(names, gpu, workers, module):
        return {name: simulated_counts.trace_case(name, gpu, module=module) for name in names}

    monkeypatch.setattr(simulated_counts, "trace_all", in_this_process)
    old = [dataclasses.replace(r, traced=1, ratio=0.0) for r in rows]
    traffic.write([*old, row("gone", "l2_read_sectors", 5, 5)], tmp_path / "h200" / "traffic.csv")
    assert command.main(again) == 0
    assert {r.kernel: r for r in traffic.read(tmp_path / "h200" / "traffic.csv")}.keys() == {
        "copy, small blocks",
        "gone",
    }
    assert [r for r in traffic.read(tmp_path / "h200" / "traffic.csv") if r.kernel != "gone"] == rows


def test_what_is_recorded_is_within_its_bars_or_says_why():
    rows = traffic.read(TRAFFIC)
    assert len({r.kernel for r in rows}) >= 25 and {r.kernel for r in rows} <= set(CASES)
    assert [(r.kernel, r.counter, r.ratio) for r in rows if r.unexplained] == []
    outside = set()
    for gpu in ("h100-sxm", "h200"):
        tables = {kind: traffic.RESULTS / gpu / table for kind, (_, table) in traffic.KERNELS.items()}
        of_gpu = {kind: traffic.read(path) for kind, path in tables.items() if path.exists()}
        judged = [r for each in of_gpu.values() for r in each]
        assert len(of_gpu) >= 4 and [(r.kernel, r.counter, r.gpu) for r in judged if r.unexplained] == []
        outside |= {(r.kernel, r.counter, gpu) for each in of_gpu.values() for r in each if not r.inside}
    outside |= {(kernel, counter) for kernel, counter, gpu in outside if gpu == "h100-sxm"}
    outside |= {(r.kernel, r.counter) for r in rows if not r.inside}
    assert set(traffic.REASONS) - outside == set(), "reasons for rows that are within their bars, or gone"
    for r in rows:  # nobody has moved a ratio or a bar by hand
        aligned = CASES[r.kernel].aligned
        assert r == traffic.row(r.kernel, r.counter, r.traced, r.measured, aligned, r.gpu, r.triton, r.date)


@pytest.mark.parametrize(
    "name", ["rows of 30, padded to 32", "matmul 512, 64x64x32", "store stride 64", "32 MiB twice"]
)
def test_what_is_recorded_is_what_is_traced_today(name):
    recorded = {r.counter: r.traced for r in traffic.read(TRAFFIC) if r.kernel == name}
    traced = simulated_counts.trace_case(name, "h200", compiled=False)["counts"]
    for counter in ("l2_read_sectors", "l2_write_sectors", "dram_read_bytes", "dram_bytes"):
        assert traced[counter] == pytest.approx(recorded[counter], rel=0.02)


# ---- the GPU's numbers --------------------------------------------------------------------------------------------


def test_every_value_is_computed_in_the_interpreter():
    found = run_all("cpu")
    assert [key for key in found if key.endswith("|error")] == [] and len(found) == len(VALUES)


def test_distance():
    one = np.array([1.0, np.nan, np.inf, 0.0], dtype=np.float32)
    assert distance(one, one.copy(), "float32") == (0, 0)
    assert distance(one, one + np.float32(2**-22), "float32")[0] > 1.9
    other = one.copy()
    other[1] = 0
    assert distance(one, other, "float32") == (np.inf, np.inf)
    assert distance(np.array([5], dtype=np.int32), np.array([7], dtype=np.int32), "int32")[0] == 2


@pytest.mark.skipif(not NUMBERS.exists(), reason="no measurement is recorded yet")
@pytest.mark.parametrize("name", VALUES)
def test_the_interpreter_computes_what_the_gpu_does(name):
    recorded = {key.partition("|")[0]: (key.partition("|")[2], value) for key, value in np.load(NUMBERS).items()}
    if name not in recorded:
        pytest.skip("this row is newer than the measurement")
    dtype, want = recorded[name]
    assert dtype != "error", bytes(want).decode()
    y = VALUES[name].run("cpu").contiguous().view(-1).view(torch.uint8).numpy()
    ulps, relative = distance(y, want, dtype)
    assert ulps <= VALUES[name].ulps or relative <= VALUES[name].relative, f"{ulps} ulps, {relative:.2g} of the largest"
