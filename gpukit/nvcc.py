"""CUDA C++ from Python: nvcc compiles a file into a library, ctypes calls its functions by name.

    nvcc.build(Path("gpukit/kernels/fusion.cu")).launch("gelu_float32", x, y, x.numel())

Unlike torch.utils.cpp_extension this needs no ninja and none of PyTorch's headers, which take a minute to compile.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

OPTIONS = ("-O3", "-arch=native", "-shared", "-Xcompiler", "-fPIC")
_TIMEOUT_S = 120  # gpukit/kernels/fusion.cu takes 2 s


class NotBuilt(RuntimeError):
    """There is nothing to launch; the message says why in one sentence."""


class Library:
    """The functions that a file declares as `extern "C"`. Each takes the stream as its last argument and returns CUDA's
    error code, 0 for none."""

    def __init__(self, functions: ctypes.CDLL):
        self._functions = functions

    def launch(self, name: str, *arguments: Tensor | int) -> None:
        """Call a function on the current stream: tensors as their addresses, ints as long long.

        Nothing checks shapes, dtypes or devices. Raises AttributeError for an unknown name, RuntimeError for a launch that
        failed; what goes wrong inside the kernel shows at the next synchronisation.
        """
        passed = [
            ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else ctypes.c_longlong(value)
            for value in arguments
        ]
        if error := getattr(self._functions, name)(*passed, ctypes.c_void_p(_stream())):
            raise RuntimeError(f"{name}: the launch failed with CUDA error {error}")


@cache
def build(source: Path) -> Library:
    """Compile `source` for this machine's GPU, once in a process.

    Raises NotBuilt where there is no GPU or no nvcc, where nvcc fails and where its library cannot be loaded.
    """
    if not torch.cuda.is_available():
        raise NotBuilt("there is no GPU")
    nvcc = find()
    if nvcc is None:
        raise NotBuilt("nvcc, the compiler of the CUDA toolkit, was not found")
    with tempfile.TemporaryDirectory(prefix="gpukit-nvcc-") as folder:
        library = Path(folder) / "library.so"
        command = [nvcc, *OPTIONS, str(source), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotBuilt(f"nvcc did not run: {error}") from None
        if done.returncode:
            said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            raise NotBuilt(f"nvcc failed: {said[0].strip() if said else f'exit status {done.returncode}'}")
        try:
            return Library(ctypes.CDLL(str(library)))  # it stays loaded when the folder is gone
        except OSError as error:
            raise NotBuilt(f"what nvcc built cannot be loaded: {error}") from None


def find() -> str | None:
    """nvcc on the search path, in CUDA_HOME, or where CUDA's installers put it."""
    places = [os.environ.get("PATH", os.defpath)]
    if home := os.environ.get("CUDA_HOME"):
        places.append(os.path.join(home, "bin"))
    return shutil.which("nvcc", path=os.pathsep.join([*places, "/usr/local/cuda/bin"]))


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
