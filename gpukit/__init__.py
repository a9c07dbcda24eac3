"""gpukit: how to make language models fast on GPUs."""

import importlib
import os

__version__ = "0.1.0"

# Public names and the modules they live in: loaded at first use, so that `import gpukit` costs milliseconds.
_PUBLIC = {
    "check": "gpukit.grading.judge",
    "compile": "gpukit.simulator.compiler.compile",
    "exercise": "gpukit.course",
    "hint": "gpukit.grading.judge",
    "predict": "gpukit.simulator.prediction.predict",
    "trace": "gpukit.simulator.trace.tracer",
    "use": "gpukit.course",
}
__all__ = ["__version__", *_PUBLIC]


def _cuda_device_present() -> bool:
    """Whether Triton can find an NVIDIA GPU here, told from the device files: no driver call, no torch import."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    return any(os.path.exists(path) for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))


# The side effects of this import. Without a GPU, kernels run in Triton's interpreter: Triton reads the variable when it is
# imported, so it must be set before that; doing it here makes notebooks work however Jupyter was started. And whenever
# Triton is imported later, our layer makes its interpreter safe and right.
if not _cuda_device_present():
    os.environ.setdefault("TRITON_INTERPRET", "1")
importlib.import_module("gpukit.simulator.interpreter.autoload").arm()


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'gpukit' has no attribute {name!r}")
