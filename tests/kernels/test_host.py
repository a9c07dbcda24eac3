"""The host code of every operation as a Hopper GPU would see it, up to the driver's call: no interpreter takes part."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def launches():
    """Of each operation, forward and backward: the launches of a first call, of a second one, and what that asked Triton for."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.host", "--launches"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_table_passes_on_what_triton_would(launches):
    for name, (first, second, _) in launches.items():
        assert first and second == first, name


def test_a_second_call_leaves_triton_alone(launches):
    assert {name: asked for name, (_, _, asked) in launches.items() if asked} == {}


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("matmul in Gluon", ["matmul_hopper_kernel"] * 3),
        ("matmul of odd sizes", ["matmul_persistent_kernel"] * 3),
        ("softmax, rows of 65,536", ["softmax_fwd_shared_kernel", "softmax_bwd_shared_kernel"]),
        ("softmax, rows of 131,072", ["softmax_fwd_shared_kernel", "softmax_bwd_shared_kernel"]),
        ("layer_norm, long rows", ["norm_fwd_kernel", "layer_norm_gradients_kernel", "column_sums_kernel"]),
        ("cross_entropy in place, long rows", ["cross_entropy_shared_kernel", "scale_rows_kernel"]),
        (
            "flash_attention",
            [
                "flash_attention_fwd_hopper_kernel",
                "flash_attention_delta_kernel",
                "flash_attention_bwd_q_hopper_kernel",
                "flash_attention_bwd_kv_hopper_kernel",
            ],
        ),
        (
            "flash_attention, long",
            [
                "flash_attention_fwd_hopper_kernel",
                "flash_attention_fwd_hopper_kernel",
                "flash_attention_delta_kernel",
                "flash_attention_bwd_hopper_kernel",
                "dq_from_sums_kernel",
            ],
        ),
    ],
)
def test_a_hopper_gpu_gets_its_own_kernels(launches, name, kernels):
    assert [kernel for kernel, *_ in launches[name][1]] == kernels
