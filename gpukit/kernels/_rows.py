"""What the kernels of this folder share: launches, the tensors they take, a tensor as rows, sums over columns."""

import importlib
import reprlib
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@triton.jit
def column_sums_kernel(
    partial_ptr, out_ptr, second_ptr,
    P, N,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """partial [1 or 2, P, N]. second_ptr: where the sums of partial[1] go, or None."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    which = (tl.program_id(0) // blocks_n).to(tl.int64)
    offs_n = (tl.program_id(0) % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offs_p = tl.arange(0, BLOCK_P)[:, None]
    acc = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    for start in tl.range(0, P, BLOCK_P):
        offs = (which * P + start + offs_p) * N + offs_n
        acc += tl.load(partial_ptr + offs, mask=(start + offs_p < P) & (offs_n < N), other=0.0)
    sums = tl.sum(acc, axis=0, keep_dims=True)
    tl.store(out_ptr + offs_n, sums, mask=(offs_n < N) & (which == 0))
    if second_ptr is not None:
        tl.store(second_ptr + offs_n, sums, mask=(offs_n < N) & (which == 1))


INTERPRETED = not isinstance(column_sums_kernel, triton.JITFunction)
# The GPU that an interpreted launch is made for, as torch.cuda.get_device_properties would say it; gpukit.trace_report sets it.
imagined = None


_compiled: dict[tuple, tuple] = {}


@cache
def _current_stream() -> Callable[[int], int]:
    """What says which stream is PyTorch's current one on a device."""
    return triton.runtime.driver.active.get_current_stream


def interpreted() -> bool:
    """Whether launches go through the interpreter: without a GPU, and beside it while gpukit.trace() counts them."""
    return INTERPRETED or imagined is not None or bool(getattr(triton.JITFunction.run, "watchers", None))


@cache
def _free(kernel) -> frozenset[int]:
    """The numbers among a kernel's arguments of which Triton looks at no more than their type."""
    return frozenset(p.num for p in getattr(kernel, "params", ()) if p.do_not_specialize)


def launch(kernel, programs: int, *arguments: Tensor | TensorDescriptor | int | None, **constants) -> None:
    """kernel[(programs,)](*arguments, **constants) on the device of the first tensor, in less than half of the time on the
    CPU.

    Triton asks of each argument at each launch what it has compiled for: the dtype, whether 16 divides an address or a
    number, whether a number is 1. Here the numbers themselves lead to the compiled kernel, and an unaligned address to
    Triton. `arguments` are the kernel's own in their order, without those called tl.constexpr, which come by name.
    """
    if interpreted():  # gpukit.trace() sees what goes through Triton's run()
        kernel[(programs,)](*arguments, **constants)
        return
    first = arguments[0]
    device = (first if isinstance(first, Tensor) else first.base).get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, *arguments, **constants)
        return
    kinds, values, addresses, free = [], list(arguments), 0, _free(kernel)
    for i, x in enumerate(arguments):
        if isinstance(x, Tensor):
            values[i] = x.data_ptr()  # spares Triton to ask for it, and the driver whose address it is
            addresses |= values[i]
            kinds.append(x.dtype)
        elif hasattr(x, "block_shape"):  # a descriptor: Triton's, or Gluon's, which is of another class
            kinds += x.base.dtype, *x.block_shape
        elif i in free and -(2**31) <= x < 2**31:
            kinds.append(None)
        elif x is None or free:
            kinds.append(x)
        else:  # from here on numbers, as in every kernel of this package
            kinds += arguments[i:]
            break
    key = (id(kernel), device, *kinds, *constants.values())
    known = None if addresses % 16 else _compiled.get(key)
    if known is None:
        if any(isinstance(x, Tensor) for x in kinds):
            raise TypeError(f"{kernel}: a tensor behind a number; tensors come first")
        compiled = kernel[(programs,)](*arguments, **constants)
        if len(_compiled) >= 10_000:  # numbers that always change
            _compiled.clear()
        if addresses % 16 == 0:
            ordered = [constants[name] for name in kernel.arg_names[len(arguments) :]]
            _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, ordered
        return
    run, function, metadata, ordered = known
    # None: no hooks before and after a launch, which Triton's profiler would set.
    run(programs, 1, 1, _current_stream()(device), function, metadata, None, None, None, *values, *ordered)


class _NoBackward:
    """The context of a Function's forward pass after which none goes back: what it hands over to be kept is let go."""

    def save_for_backward(self, *tensors) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


def apply(function: type[torch.autograd.Function], *inputs):
    """function.apply(*inputs). Under torch.no_grad() its forward pass alone: autograd's part takes the CPU a third of a
    small kernel's call."""
    return function.apply(*inputs) if torch.is_grad_enabled() else function.forward(_NoBackward(), *inputs)


def refuse_second(op: str) -> None:
    """Raise RuntimeError in a backward pass that is to be differentiated itself: its results would count as constants."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{op}: there is no second derivative, which create_graph=True asks for")


def column_sums(partial: Tensor, like: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The sums over P of partial [1 or 2, P, N], as tensors like `like` [N] and `second` [N]; None without a second.
    Always in the same order."""
    out, out_second = empty(like), None if second is None else empty(second)
    several, P, N = partial.shape
    # Narrow blocks of columns, so that there are enough programs: 264 x 8192 in 8.5 us, in 9.4 with 32 columns and half
    # the rows.
    launch(
        column_sums_kernel, several * -(-N // 16), partial, out, out_second, P, N,
        BLOCK_P=256, BLOCK_N=16, ACC=acc_dtype(partial.dtype), num_warps=8,
    )  # fmt: skip
    return out, out_second


def power_of_2(n: int) -> int:
    """The smallest power of two that is n, at least 1, or more. Triton's own takes the CPU 4 us."""
    return 1 << (n - 1).bit_length()


def acc_dtype(dtype: torch.dtype) -> tl.dtype:
    """What sums are kept in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def torch_acc_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty(x: Tensor) -> Tensor:
    """Room for a result of x's shape, dtype and device: contiguous, whatever x is."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def as_rows(x: Tensor, copy_interleaved: bool = False) -> Tensor:
    """x [..., N] as [M, N]: a view where the strides allow it, else a copy.

    Rows that span 2^31 elements are copied, because offsets within a row are int32. So are interleaved rows (those of a
    transposed matrix) if asked for: each element of one row fetches a sector of 32 bytes.
    """
    if x.ndim != 2:
        x = x.reshape(-1, x.shape[-1])
    stride_m, stride_n = x.stride()
    if x.shape[1] * stride_n >= 2**31 or (0 < stride_m < stride_n and copy_interleaved):
        return x.contiguous()
    return x


@cache
def _properties(device: torch.device):
    return torch.cuda.get_device_properties(device)


def properties(device: torch.device):
    """The GPU's properties; in the interpreter those of `imagined`, None where there is none."""
    return _properties(device) if device.type == "cuda" else imagined


def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU. In the interpreter 2, unless a GPU is imagined, so that a grid of a fixed size is one there too."""
    gpu = properties(device)
    return gpu.multi_processor_count if gpu else 2


@cache
def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"gpukit.kernels.{name}")
    except (ImportError, AttributeError):
        return None


def for_hopper(name: str, device: torch.device) -> ModuleType | None:
    """The module of this package with kernels in Gluon for this GPU, or None: it is not of Hopper's kind, or imagined, since
    Gluon cannot be interpreted, or Triton's Gluon, which is experimental, lacks what the kernels take."""
    gpu = properties(device)
    return None if gpu is None or gpu.major != 9 or interpreted() else _imported(name)


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


def check_runs(op: str, name: str, x: Tensor) -> None:
    """Raise ValueError unless kernels can read x: on a GPU, or on the CPU through the interpreter, its numbers as stored."""
    if not torch.compiler.is_compiling() and x.is_neg():  # as z.conj().imag is
        raise ValueError(f"{op}: {name} is a view that PyTorch negates when it reads it; pass {name}.resolve_neg()")
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


def differentiable(fn: Callable, inputs: Sequence[Tensor | None], upstream: Sequence[Tensor | None]) -> list:
    """The gradients of fn(*inputs) through PyTorch's own operations, which can be differentiated once more: what a
    backward pass returns under create_graph=True. None where an input is None or needs no gradient."""
    # Views, so that an input which was computed from another one still counts as independent of it.
    inputs = [None if x is None else x.view_as(x) for x in inputs]
    outputs = fn(*inputs)
    pairs = zip(outputs if isinstance(outputs, tuple) else (outputs,), upstream, strict=True)
    outputs, upstream = zip(*(pair for pair in pairs if pair[1] is not None), strict=True)
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    gradients = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=True, allow_unused=True))
    return [next(gradients) if x is not None and x.requires_grad else None for x in inputs]
