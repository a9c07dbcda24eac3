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


def check(op: str, *, scalars: bool = False, **tensors: Tensor) -> None:
    """Raise TypeError or ValueError unless each is a tensor of a dtype, a rank and a device that the kernels can take.
    scalars: a tensor without dimensions is one number, and welcome."""
    check_tensors(op, **tensors)
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.ndim == 0 and not scalars:
            raise ValueError(f"{op}: {name} must have at least one dimension, got a scalar of shape []")
        check_runs(op, name, x)


def check_dim(op: str, name: str, dim: int, x: Tensor) -> int:
    """Which of x's dimensions `dim` is, counted from the front; of a scalar there is one, as in PyTorch."""
    ndim = max(x.ndim, 1)
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{op}: dim must be an integer, got {dim!r}")
    if not -ndim <= dim < ndim:
        raise ValueError(f"{op}: dim must be {-ndim} to {ndim - 1} for {name} of shape {list(x.shape)}, got {dim}")
    return dim % ndim


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


def check_vector(op: str, name: str, vector: Tensor, x: Tensor, dims: int = 1) -> None:
    """Raise unless `vector` has one element for each column of x, or the shape of its last `dims` dimensions, on x's device.
    Its dtype may be another."""
    check(op, **{name: vector})
    if vector.shape != x.shape[x.ndim - dims :]:
        last = "last dimension" if dims == 1 else f"last {dims} dimensions"
        raise ValueError(
            f"{op}: {name} must have the shape {list(x.shape[x.ndim - dims :])} of x's {last}, got {list(vector.shape)}"
        )
    check_device(op, name, vector, "x", x)


def check_device(op: str, name: str, x: Tensor, of: str, other: Tensor) -> None:
    if x.device != other.device:
        raise ValueError(f"{op}: {name} is on {x.device}, {of} on {other.device}; they must be on one device")
