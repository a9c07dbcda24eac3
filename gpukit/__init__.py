"""gpukit: how to make language models fast on GPUs. What lies where, from the ground up:

op, hardware        one operation as data; what each GPU can do at most; also course (files), tables (text), launches
                    (watchers), dispatch (PyTorch's operations, watched) and nearest (suggestions)
accounting/         bytes, FLOPs, time and money from shapes, nothing is run
reference/          each operation in PyTorch, with its inputs and its least cost
kernels/            the operations in Triton, as one would use them in a model; huggingface/ puts them into transformers' models
simulator/          what a GPU would do, without one: interpreter, trace, compiler, prediction
testing, timing     the tolerance rule; times that can be believed; live (tensors), profiling and nvcc beside them
benchmark           providers side by side, recorded in results/, patched_models too; validation/: the simulator and real GPUs
checks/, grading/   the exercises as data, and what judges them; integrity and mutants prove the checks
widgets/, lessons/  what notebooks show: for all of them, and for one each; trace_report, trace_page: `gpukit trace`
side_by_side        your answer and the course's: `gpukit compare`; cheatsheet: formulas and GPUs on one page
train/              a GPT, its tokenizer, its data and the loop that trains it: `gpukit train`; classroom/: a term with a class
doctor, lab, cli    what starts and prepares: the machine, JupyterLab, notebooks (files), bootstrap (packages); the command
"""

import importlib
import os

__version__ = "0.1.0"

# Public names and the modules they live in: loaded at first use, so that `import gpukit` costs milliseconds.
_PUBLIC = {
    "check": "gpukit.grading.judge",
    "compare": "gpukit.side_by_side",
    "compile": "gpukit.simulator.compiler.compile",
    "exercise": "gpukit.course",
    "hint": "gpukit.grading.judge",
    "patch": "gpukit.huggingface.patching",
    "predict": "gpukit.simulator.prediction.predict",
    "trace": "gpukit.simulator.trace.tracer",
    "unpatch": "gpukit.huggingface.patching",
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


def __dir__() -> list[str]:
    """What completion offers: also the public names whose modules are not loaded yet."""
    return sorted({*__all__, *globals()} - {"importlib", "os"})


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'gpukit' has no attribute {name!r}")
