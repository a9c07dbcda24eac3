"""`gpukit trace`: inputs without memory, what is printed, and what is refused."""

import os
import re
import subprocess
import sys

import pytest
import torch

import gpukit
from gpukit import benchmark, hardware, trace_report
from gpukit.simulator.prediction.predict import SAMPLE

H200 = hardware.gpu("h200")


def predicted(op, shape, dtype=torch.bfloat16, gpu=H200):
    return trace_report.predict_op(benchmark.operation(op), shape, dtype, gpu)


def test_what_is_printed():
    lines = trace_report.command("softmax", "4096x1024", "bf16", "h200").split("\n")
    assert lines[0].startswith("softmax 4096x1024 bfloat16 on H200 SXM, forward: traffic is counted")
    assert lines[1] == "least traffic     8,388,608 bytes read, 8,388,608 written; 3.5 µs at 4,800 GB/s"
    assert re.fullmatch(
        r"roofline          1.25 FLOPs per byte, memory side of the ridge at 206; \d\d% of the roof \(modelled\)",
        lines[2],
    )
    titles = (
        f"TRAFFIC of softmax_fwd_kernel, 4,096 programs, {SAMPLE} of them looked at",
        "MACHINE CODE of softmax_fwd_kernel",
    )
    assert [line for line in lines if line.isupper() or line.startswith(("TRAFFIC", "MACHINE"))] == [
        *titles, "PREDICTED TIME"
    ]  # fmt: skip
    facts = {line.split("  ")[0] for line in lines}
    assert facts >= {
        "registers",
        "shared memory",
        "occupancy",
        "loads",
        "stores",
        "tensor cores",
        "L2",
        "device memory",
    }
    assert "L2                262,144 sectors read, 262,144 written; 0% of the reads found there" in lines
    assert any("µs on H200 SXM, limited by" in line for line in lines)


@pytest.mark.parametrize(
    ("op", "shape"), [("softmax", (4096, 4096)), ("kl_div", (64, 32768)), ("cross_entropy", (64, 32000))]
)
def test_the_kernel_moves_what_it_must(op, shape):
    least = benchmark.operation(op).cost(shape, torch.bfloat16)
    launch = predicted(op, shape).steps
    launch = next(step.launch for step in launch if step.launch is not None)
    assert least.read_bytes <= launch.load_bytes <= 1.01 * least.read_bytes + 64 * 1024
    assert launch.grid and launch.sampled == SAMPLE


@pytest.mark.parametrize("op", benchmark.operations())
def test_every_operation_can_be_traced(op, monkeypatch):
    """Without the machine code, which takes seconds."""

    def traced(call, gpu):
        with gpukit.trace(gpu=gpu, sample=1) as t:
            call()
        return t

    monkeypatch.setattr(trace_report, "predict", traced)
    shape = benchmark.operation(op).test_shapes[2]
    t = predicted(op, shape)
    least = benchmark.operation(op).cost(shape, torch.bfloat16)
    assert t.launches and t.read_bytes >= least.read_bytes and t.write_bytes >= least.write_bytes


def test_a_grid_of_a_fixed_size_is_the_gpus():
    steps = {gpu: predicted("softmax", (4096, 32768), gpu=hardware.gpu(gpu)).steps for gpu in ("h200", "t4")}
    assert steps["h200"][0].launch.grid == (132,) and steps["h200"][0].name == "softmax_fwd_persistent_kernel"
    assert steps["t4"][0].launch.grid == (4096,)  # two rows do not fit into its shared memory
    assert hardware.imagined_gpu() is None


def test_sizes_without_values():
    with trace_report.Sizes():
        x = torch.randn((1 << 17, 1 << 20), dtype=torch.float64)  # 1 TiB
        x[0] += 1
        y = x.mul_(3).to(torch.bfloat16).view(-1, 4)
        assert y.shape == (1 << 35, 4) and y.dtype == torch.bfloat16 and y.device.type == "cpu"
        assert torch.softmax(x, -1).shape == (x @ x.new_empty(1 << 20, 1 << 20)).shape == x.shape
        assert torch.zeros_like(x, dtype=torch.float32).dtype == torch.float32
        index = torch.randint(0, 9, (1000,), generator=torch.Generator().manual_seed(0))
        index[1] = -100
        assert torch.arange(5).tolist() == [0, 1, 2, 3, 4] and (index < 0).sum() == 1
        with pytest.raises(ValueError, match=r"aten.empty.* needs a tensor larger than this machine can promise"):
            torch.empty(1 << 55)
    assert set(index.tolist()) == {-100, *range(9)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("sofmax", None, "bf16", "h200"), "op must be one of .*softmax.*, got 'sofmax'"),
        (("softmax", "4096,1024", "bf16", "h200"), "--shape must be positive numbers with x between them"),
        (("softmax", "4096x0", "bf16", "h200"), "--shape must be positive numbers"),
        (("softmax", "64x64", "int8", "h200"), "--dtype must be one of bf16, .*, got 'int8'"),
        (("softmax", "64x64", "bf16", "h3000"), "no GPU is called 'h3000'"),
        (("softmax", "1000000x1000000", "bf16", "t4"), "softmax moves at least 4,000 GB, and T4 has 16 GB"),
        (
            ("linear_cross_entropy", "64x64", "bf16", "h200"),
            "64x64 does not fit linear_cross_entropy .*: it takes 3 sizes, ",
        ),
    ],
)
def test_what_does_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        trace_report.command(*given)


def test_an_operation_without_a_kernel(monkeypatch):
    import gpukit.kernels

    monkeypatch.delattr(gpukit.kernels, "softmax")
    with pytest.raises(ValueError, match=r"softmax cannot be traced: gpukit\.kernels has no softmax"):
        predicted("softmax", (64, 64))


def test_the_command_line():
    refused = subprocess.run(
        [sys.executable, "-m", "gpukit", "trace", "softmax", "--gpu", "h3000"], capture_output=True, text=True
    )
    assert refused.returncode == 2 and refused.stderr.startswith("gpukit: no GPU is called 'h3000'")


BESIDE_A_GPU = """
import torch, triton
from gpukit.simulator.compiler.worker import _Target
triton.runtime.driver.set_active(_Target(90))  # knows a target, and would fail at a launch
torch.cuda.is_available = lambda: True
from gpukit import benchmark, hardware, trace_report
for op, shape in (("softmax", (64, 256)), ("flash_attention_causal", (1, 2, 64, 64)), ("adamw", (1, 1000))):
    print(trace_report.predict_op(benchmark.operation(op), shape, torch.bfloat16, hardware.gpu("h200")).report())
"""


def test_a_prediction_beside_a_gpu_is_the_one_without():
    environments = [{**os.environ, "TRITON_INTERPRET": interpreted} for interpreted in ("0", "1")]
    runs = [
        subprocess.run([sys.executable, "-c", BESIDE_A_GPU], capture_output=True, text=True, env=env, timeout=120)
        for env in environments
    ]
    assert runs[0].stdout and runs[0].stdout == runs[1].stdout, runs[0].stderr
