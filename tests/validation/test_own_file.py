"""`gpukit trace --ncu FILE.py`: what is asked of ncu, what is made of its answer, and what is one sentence."""

import sys

import pytest
import torch
import triton

from gpukit import cli, hardware
from gpukit.validation import own_file

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
FILE = """\
import sys
import torch, triton, triton.language as tl

@triton.jit
def scale(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, 2 * tl.load(x_ptr + offs))

@triton.jit
def column_sums(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + offs, tl.load(x_ptr + tl.program_id(0) * BLOCK + offs))

if __name__ == "__main__":
    assert len(sys.argv) == 1
    x, y = torch.zeros(256, 1024), torch.zeros(1024)
    for _ in range(2):
        scale[(256,)](x, torch.empty_like(x), BLOCK=1024)
    column_sums[(256,)](x, y, BLOCK=1024)
"""
# In the form in which ncu writes; the numbers are what an H200 might say.
RECORDED = """\
==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "scale": 0%....50%....100% - 9 passes
"ID","Process ID","Kernel Name","Context","Block Size","Grid Size","dram__bytes_read.sum","gpu__time_duration.sum",\
"l1tex__m_xbar2l1tex_read_sectors.sum","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",\
"l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum","launch__grid_size","launch__registers_per_thread",\
"lts__t_sectors_op_atom.sum","lts__t_sectors_op_red.sum","lts__t_sectors_srcunit_tex_op_write.sum"
"","","","","","","byte","ns","sector","sector","sector","","register/thread","sector","sector","sector"
"0","4242","scale","1","(128, 1, 1)","(256, 1, 1)","1,048,576","2,400","32,768","32,768","32,768","256","16","0","0","32,768"
"1","4242","scale","1","(128, 1, 1)","(256, 1, 1)","1,048,576","2,600","32,768","32,768","32,768","256","16","0","0","32,768"
"2","4242","column_sums","1","(128, 1, 1)","(256, 1, 1)","1,052,672","9,000","65,536","32,768","0","256","18","0","49,152","0"
==PROF== Disconnected from process 4242
"""
FAKE = """\
#!{python}
import sys
from pathlib import Path

arguments = sys.argv[1:]
if "--query-metrics" in arguments:
    sys.exit()
assert arguments[arguments.index("--kernel-name") + 1] == "regex:^(column_sums|scale)$", arguments
assert arguments[-4:-1] == ["-m", "gpukit.validation.own_file", "run"] and Path(arguments[-1]).name == "mine.py"
Path(arguments[arguments.index("--log-file") + 1]).write_text(Path({answer!r}).read_text())
sys.exit({status})
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A file, beside a GPU and an ncu that answers what it is told."""
    monkeypatch.setattr(own_file, "this_gpu", lambda: hardware.gpu("h200"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    answers(tmp_path, RECORDED)
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def answers(folder, text, status=0):
    (folder / "answer.csv").write_text(text)
    (folder / "ncu").write_text(FAKE.format(python=sys.executable, answer=str(folder / "answer.csv"), status=status))
    (folder / "ncu").chmod(0o755)


def refused(capsys, *arguments):
    """The one sentence, of a call that ends with status 2."""
    assert cli.main(["trace", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("gpukit: ") and err.count("\n") == 1
    return err


def test_our_numbers_and_ncus_stand_side_by_side(mine, capsys):
    assert cli.main(["trace", "--ncu", str(mine)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    at = [i for i, line in enumerate(lines) if line.endswith("256 programs")]
    assert [lines[i] for i in at] == ["scale, 256 programs", "column_sums, 256 programs"]
    tables = [
        {line[: line.find("  ")]: line[line.find("  ") :].split() for line in lines[begin:end]}
        for begin, end in zip(at, [at[1], len(lines)], strict=True)
    ]
    scale, sums = tables
    assert scale["launches"] == ["2", "2"] and sums["launches"] == ["1", "1"]
    assert scale["L2, sectors read"] == scale["L1, sectors stored"] == ["32,768", "32,768", "+0.0%"]
    assert "L2, sectors of atomics" not in scale
    assert sums["L2, sectors of atomics"] == ["49,152", "49,152", "+0.0%"]
    assert sums["DRAM, bytes read"] == ["1,052,672", "1,052,672", "+0.0%"]
    ours, theirs, off = scale["time (µs)"]
    assert theirs == "2.5" and float(off[:-1]) / 100 == pytest.approx(
        float(ours) / 2.5 - 1, abs=0.03
    )  # ours is rounded
    assert float(ours) < 4, "the kernel's own time, without the launch of 3.6 µs"
    assert int(scale["registers per thread"][0]) > 0


def test_launches_that_ncu_did_not_see_have_no_numbers(mine, tmp_path, capsys):
    answers(tmp_path, "\n".join(line for line in RECORDED.split("\n") if '"column_sums"' not in line))
    assert cli.main(["trace", "--ncu", str(mine)]) == 0
    text = capsys.readouterr().out
    assert text.partition("column_sums")[2].splitlines()[3].split() == ["launches", "1", "0"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
            "Performance Counters on the target device 0.\n",
            "ncu may not read the counters of this GPU (ERR_NVGPUCTRPERM): run it as root",
        ),
        ("==ERROR== Failed to prepare kernel\n", "ncu measured no kernel of mine.py (status 1): ==ERROR== Failed to"),
        ("", "ncu measured no kernel of mine.py (status 1): nothing was said"),
    ],
)
def test_an_ncu_that_does_not_measure_is_one_sentence(text, sentence, mine, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(own_file, "_traced", lambda path, gpu: [{"kernel": "scale"}, {"kernel": "column_sums"}])
    answers(tmp_path, text, status=1)
    assert sentence in refused(capsys, "--ncu", mine)


def test_without_ncu(mine, tmp_path, capsys, monkeypatch):
    (tmp_path / "ncu").unlink()
    monkeypatch.setattr("gpukit.validation.counters.Path.glob", lambda self, pattern: iter(()))
    assert "measuring needs Nsight Compute" in refused(capsys, "--ncu", mine)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FILE)
    assert "PyTorch finds none on this machine" in refused(capsys, "--ncu", tmp_path / "mine.py")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import torch\ntorch.ones(4) + 1\n", "mine.py launches no Triton kernel"),
        ("", "mine.py launches no Triton kernel"),
        ("1 / 0\n", "mine.py could not be traced: ZeroDivisionError: division by zero"),
        ("def f(:\n", "mine.py could not be traced: SyntaxError: "),
        ("raise SystemExit(3)\n", "mine.py could not be traced: RuntimeError: it ended with status 3"),
        ("import os; os._exit(1)\n", "mine.py could not be traced: the process ended"),
    ],
)
def test_a_file_that_launches_nothing_is_one_sentence(text, sentence, mine, capsys):
    mine.write_text(text)
    assert sentence in refused(capsys, "--ncu", mine)


def test_what_is_asked_for(tmp_path, capsys):
    assert "there is no file" in refused(capsys, "--ncu", tmp_path / "none.py")
    assert "an operation, such as softmax, a file, such as mine.py, or --ncu FILE.py" in refused(capsys)
    assert "and one of them alone" in refused(capsys, "softmax", "--ncu", tmp_path / "mine.py")
