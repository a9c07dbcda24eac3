"""What the tests share: warnings are errors, which tests need a GPU, and the device that kernels run on."""

import os
import warnings

import pytest
from _pytest.config import parse_warning_filter

import gpukit  # noqa: F401  without a GPU it chooses Triton's interpreter, which Triton reads when it is imported


def pytest_sessionstart(session):
    """Warnings are errors, ours and those of the libraries that we call. Other plugins of the environment may warn: while
    they configure themselves, which is over here, and later in their own modules or (stacklevel=2) in pluggy, their caller."""
    config = session.config
    plugins = {plugin.__name__.partition(".")[0] for plugin, _ in config.pluginmanager.list_plugin_distinfo()}
    filters = config.getini("filterwarnings")  # what pytest reads again for collection and for each test
    filters[:0] = ["error", *(rf"default:::{name}\b" for name in sorted({"pluggy", *plugins} - {"gpukit", "nbval"}))]
    for line in filters:  # and what holds between the tests and after the last one
        warnings.filterwarnings(*parse_warning_filter(line, escape=False))


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
