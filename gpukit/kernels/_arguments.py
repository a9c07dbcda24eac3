"""What kernels refuse before they launch, each with a sentence that names the operation and the argument."""

import reprlib

import torch
from torch import Tensor

from gpukit.kernels._dtypes import DTYPES
from gpukit.kernels._launch import interpreted


def check_tensors(op: str, **tensors: Tensor) -> None:
    """Raise TypeError for what is no tensor."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {reprlib.repr(x)}")


def check(op: str, **tensors: Tensor) -> None:
    """Raise TypeError or ValueError unless each is a tensor of a dtype, a rank and a device that the kernels can take."""
    check_tensors(op, **tensors)
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.ndim == 0:
            raise ValueError(f"{op}: {name} must have at least one dimension, got a scalar of shape []")
        check_runs(op, name, x)


def check_stored(op: str, name: str, x: Tensor) -> None:
    """Raise ValueError unless x's numbers are those in memory."""
    if not torch.compiler.is_compiling() and x.is_neg():  # as z.conj().imag is
        raise ValueError(f"{op}: {name} is a view that PyTorch negates when it reads it; pass {name}.resolve_neg()")


def check_runs(op: str, name: str, x: Tensor) -> None:
    """Raise ValueError unless kernels can read x: on a GPU, or on the CPU through the interpreter, its numbers as stored."""
    check_stored(op, name, x)
    if not (x.is_cuda or (x.is_cpu and interpreted())):
        raise ValueError(
            f"{op}: {name} is on {x.device}; Triton needs a CUDA tensor here, or TRITON_INTERPRET=1 before Python starts "
            "and a CPU tensor"
        )


def check_alike(op: str, name: str, x: Tensor, of: str, other: Tensor) -> None:
    """Raise unless x, the argument called `name`, has the shape, dtype and device of the one called `of`."""
    check_tensors(op, **{name: x})
    if x.shape != other.shape:
        raise ValueError(f"{op}: {name} must have the shape of {of}, {list(other.shape)}, got {list(x.shape)}")
    if x.dtype != other.dtype:
        raise TypeError(f"{op}: {name} must have the dtype of {of}, {other.dtype}, got {x.dtype}")
    check_device(op, name, x, of, other)


def check_vector(op: str, name: str, vector: Tensor, x: Tensor) -> None:
    """Raise unless `vector` has one element for each column of x, on x's device. Its dtype may be another."""
    check(op, **{name: vector})
    if vector.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {name} must have the shape [{x.shape[-1]}] of x's last dimension, got {list(vector.shape)}"
        )
    check_device(op, name, vector, "x", x)


def check_device(op: str, name: str, x: Tensor, of: str, other: Tensor) -> None:
    if x.device != other.device:
        raise ValueError(f"{op}: {name} is on {x.device}, {of} on {other.device}; they must be on one device")
