"""Several processes: the same numbers as with one, and no waiting for a process that is gone."""

import subprocess
import sys

import pytest
import torch

from gpukit import profiling
from tests.train import scaling


def run(*arguments: str) -> str:
    """What tests/train/ranks.py prints; it says what the cases are, of which `make prove` runs three more. Each start of Python
    and PyTorch costs seconds."""
    command = [sys.executable, "-W", "error::UserWarning", "-m", "tests.train.ranks", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    return done.stdout


def said_of_the_lost(output: str, third: str) -> None:
    lines = [line for line in output.splitlines() if line.startswith("stopped: ")]
    subjects = ["process 1 of 2 (counted from 0)", "torchrun, or process 0,", third]
    assert len(lines) == 3
    for line, subject in zip(lines, subjects, strict=True):
        assert line.startswith(f"stopped: {subject} has died or no longer answers.") and "--resume" in line


@pytest.mark.parametrize("cases", [("equal", "resumed"), ("moved", "full", "lost")])
def test_several_processes(cases):
    output = run(*cases)
    if "lost" in cases:
        said_of_the_lost(output, "process 1 of 3 (counted from 0)")


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["equal", "resumed", "moved", "full", "lost"])
def test_several_gpus(case):
    """The same with a GPU for each process, and NCCL between them."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    output = run(case, "--device", "cuda")
    if case == "lost":
        three = torch.cuda.device_count() > 2
        said_of_the_lost(output, f"process 1 of {3 if three else 2} (counted from 0)")


# ---- the rows of tests/train/scaling.py ------------------------------------------------------------------------------


def call(name: str, into: int, out: int, dtype: str = "Float") -> dict:
    """An event of PyTorch's record of a call of NCCL."""
    about = {"Collective name": name, "In msg nelems": into, "Out msg nelems": out, "dtype": dtype, "Group size": 4}
    return {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "args": about}


def test_what_the_recorded_calls_send():
    once = [
        call("allreduce", 1000, 1000),  # 2 x 3 rounds with a quarter each
        call("_allgather_base", 250, 1000, "BFloat16"),  # 3 rounds
        call("_reduce_scatter_base", 1000, 250),
        call("wait", 0, 0),
        {"ph": "X", "name": "aten::mm", "args": {"In msg nelems": 7}},
    ]
    expected = {"calls": 3, "all_reduce_bytes": 6000, "all_gather_bytes": 1500, "reduce_scatter_bytes": 3000}
    assert scaling.sent(scaling.PROFILED * once, world=4) == expected


@pytest.mark.parametrize("unknown", [call("alltoall", 8, 8), call("allreduce", 8, 8, "ComplexFloat")])
def test_an_unknown_call_is_said_and_not_left_out(unknown, capsys):
    assert set(scaling.sent([call("allreduce", 8, 8), unknown], world=2).values()) == {""}
    assert unknown["args"]["Collective name"] in capsys.readouterr().out


def row(preset: str, engine: str, gpus: int, tokens_per_s: int, gpu: str = "H100") -> dict:
    return {"preset": preset, "engine": engine, "gpus": str(gpus), "tokens_per_s": str(tokens_per_s), "gpu": gpu}


def test_rows_are_replaced_in_order_and_scaling_follows_the_row_of_one_gpu():
    rows = [row("llama-1b", "one", 1, 50), row("gpt2", "fsdp", 2, 150), row("gpt2", "ddp", 2, 180)]
    rows = scaling.merged(rows, row("gpt2", "one", 1, 100))
    assert [(r["preset"], r["engine"], r["scaling"]) for r in rows] == [
        ("gpt2", "one", "1.0000"), ("gpt2", "ddp", "0.9000"), ("gpt2", "fsdp", "0.7500"), ("llama-1b", "one", "1.0000"),
    ]  # fmt: skip
    rows = scaling.merged(rows, row("gpt2", "one", 1, 200))
    assert [r["scaling"] for r in rows] == ["1.0000", "0.4500", "0.3750", "1.0000"]
    rows = scaling.merged(rows, row("gpt2", "one", 1, 200, gpu="H200"))  # another GPU says nothing about these
    assert [r["scaling"] for r in rows] == ["1.0000", "", "", "1.0000"]


def test_a_step_as_stretches():
    """Kernels that follow each other at once are one stretch; those of another kind are not in it."""
    spans = [
        profiling.Span("gemm", "kernel", 1000, 500), profiling.Span("gelu", "kernel", 1510, 490),
        profiling.Span("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 1800, 400, lane=1),
        profiling.Span("adamw", "kernel", 2400, 100), profiling.Span("aten::mm", "op", 0, 9000),
    ]  # fmt: skip
    rows = scaling.stretches(scaling.grouped(profiling.Profile(tuple(spans), "H100")))
    assert [tuple(row.values()) for row in rows] == [
        ("computation", "0.00", "1.00"), ("computation", "1.40", "0.10"), ("all-reduce", "0.80", "0.40"),
    ]  # fmt: skip
