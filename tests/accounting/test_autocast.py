"""The autocast table: what is documented for CUDA, and what this machine does."""

import pytest

from gpukit.accounting.autocast import OPERATIONS, SOURCE, runs_in

ids = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


@ids
def test_every_operation_runs_on_the_cpu(operation):
    assert SOURCE.startswith("https://docs.pytorch.org/")
    for dtype in ("float32", "bfloat16"):
        assert runs_in(operation, dtype) in ("float32", "bfloat16")


def test_what_never_changes_on_the_cpu():
    found = {operation.name: runs_in(operation, "float32") for operation in OPERATIONS}
    assert found["matmul"] == found["linear"] == "bfloat16"
    assert found["add"] == found["relu"] == found["softmax"] == "float32"


@pytest.mark.gpu
@ids
def test_cuda_does_what_is_documented(operation):
    for dtype in ("float32", "float16"):
        expected = {"16 bit": "float16", "fp32": "float32", "as input": dtype}[operation.cuda]
        assert runs_in(operation, dtype, "cuda", "float16") == expected
