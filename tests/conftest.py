"""What the tests share: which of them need a GPU, and the device that kernels run on."""

import os

import pytest

import gpukit  # noqa: F401  without a GPU it chooses Triton's interpreter, which Triton reads when it is imported


def _why_no_gpu() -> str:
    """Why kernels do not run on a GPU here, or "" if they do."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1: kernels run in the interpreter"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device"


def pytest_collection_modifyitems(items):
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if on_gpu else ""
    for item in on_gpu if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> str:
    """Where kernels run: "cuda", or "cpu" in Triton's interpreter."""
    return "cpu" if _why_no_gpu() else "cuda"
