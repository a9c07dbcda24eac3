"""What the tests share: warnings are errors, which tests need a GPU, and the device that kernels run on."""

import gc
import os
import random
import signal
import sys
import warnings

import pytest
from _pytest.config import parse_warning_filter

import gpukit  # noqa: F401  without a GPU it chooses Triton's interpreter, which Triton reads when it is imported

sys.modules.setdefault("rfc3987_syntax", None)  # as gpukit.grading.plugin does, with the reason


def pytest_sessionstart(session):
    """Warnings are errors, ours and those of the libraries that we call. Other plugins of the environment may warn: while
    they configure themselves, which is over here, and later in their own modules or (stacklevel=2) in pluggy, their caller."""
    for number in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # a shell's background and nohup ignore them, and so would what tests start
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    config = session.config
    plugins = {plugin.__name__.partition(".")[0] for plugin, _ in config.pluginmanager.list_plugin_distinfo()}
    filters = config.getini("filterwarnings")  # what pytest reads again for collection and for each test
    filters[:0] = ["error", *(rf"default:::{name}\b" for name in sorted({"pluggy", *plugins} - {"gpukit", "nbval"}))]
    for line in filters:  # and what holds between the tests and after the last one
        warnings.filterwarnings(*parse_warning_filter(line, escape=False))


def pytest_collection():
    """What is imported and collected stays until the end: looking for garbage in it takes a fifth of the time."""
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


_TORCH_SEED = (
    67280421310721  # that with which torch begins: whether it is loaded before a test or by it makes no difference
)


@pytest.fixture(autouse=True)
def _seeded():
    """A test draws the same numbers alone, after others and on any process; what must hold for many seeds says which."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(_TORCH_SEED)


@pytest.fixture(autouse=True)
def _settings_are_put_back():
    """What a test leaves changed makes another one fail that happens to run after it in the same process."""
    yield
    if torch := sys.modules.get("torch"):
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_default_dtype() == torch.float32
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.is_grad_enabled()


def _why_no_gpu() -> str:
    """Why kernels do not run on a GPU here, or "" if they do."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1: kernels run in the interpreter"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device"


def _gpu_alone(config) -> bool:
    return config.option.markexpr == "gpu"


def pytest_configure(config):
    """Many processes on few cores: none starts as many threads, or as many processes that compile, as there are cores. What
    the tests compute is small, and threads that wait for each other take more CPU than the work."""
    # No terminal reads what tests start. pytest imports readline, which tells every child process of a terminal of 80 columns
    # without an entry in os.environ; in pytest-xdist's processes there is one.
    os.environ.pop("COLUMNS", None)
    os.unsetenv("COLUMNS")
    os.environ.setdefault("OMP_NUM_THREADS", "2" if _gpu_alone(config) else "1")
    if _gpu_alone(config):
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_ignore_collect(collection_path, config):
    """What needs a GPU is in few files, and `-m gpu` imports no others: that takes half a minute in each process, and
    JupyterLab, which the machine may lack."""
    if _gpu_alone(config) and collection_path.name.startswith("test_"):
        return True if "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None
    return None


def pytest_runtest_teardown(item):
    """The memory that a process keeps for its next test is the other processes', too."""
    if item.get_closest_marker("gpu"):
        import torch

        torch.cuda.empty_cache()  # does nothing where there is no GPU


# Tests that take 10 s and more begin first: one that begins last keeps a process busy while the others have nothing to do.
LONG = (
    "::test_saved_outputs_are_what_the_stubs_give",
    "/test_browser.py",
    "/train/test_ranks.py",
    "/train/test_loop.py::test_two_processes",
    "/train/test_loop.py::test_a_killed_run",
    "/test_typed.py",
    "/test_trace_report.py::test_a_prediction_beside_a_gpu",
    "_without_a_gpu",
    "/classroom/test_instructor.py",
    "/classroom/test_release.py",
    "/classroom/test_cluster.py",
    "/classroom/test_class.py",
    "/classroom/test_own.py",
    "/classroom/test_wheel.py",
    "/kernels/test_opinfo.py",
    "/test_side_by_side.py",
    "/validation/test_own_file.py",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONG))
    marks = {item: item.get_closest_marker("gpu") for item in items}
    items.sort(key=lambda item: not (marks[item] and "long" in marks[item].args))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if on_gpu else ""
    for item in on_gpu if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> str:
    """Where kernels run: "cuda", or "cpu" in Triton's interpreter."""
    return "cpu" if _why_no_gpu() else "cuda"
