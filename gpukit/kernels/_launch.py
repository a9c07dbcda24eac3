"""Launches through a table of compiled kernels, tensor descriptors, and the sizes of blocks."""

from collections.abc import Callable
from functools import cache, wraps

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit import hardware, launches

INTERPRETED = triton.knobs.runtime.interpret  # as @triton.jit reads it when a kernel is defined
# Products and the sums they go into are one instruction. Triton 3.10 will make one of them only where this is asked for.
OPTIONS = {"enable_fp_fusion": True}
_compiled: dict[tuple, tuple] = {}
_asked: dict[int, tuple] = {}


@cache
def current_stream() -> Callable[[int], int]:
    """What says which stream is PyTorch's current one on a device."""
    return triton.runtime.driver.active.get_current_stream


def interpreted() -> bool:
    """Whether launches go through the interpreter: without a GPU, and beside it for a GPU that is imagined and while
    gpukit.trace() counts them."""
    return INTERPRETED or launches.watched() or hardware.imagined_gpu() is not None


def _free(kernel) -> frozenset[int]:
    """The numbers among a kernel's arguments of which Triton looks at no more than their type."""
    if id(kernel) not in _asked:  # by its id, since a kernel's hash is that of its source
        _asked[id(kernel)] = kernel, frozenset(p.num for p in getattr(kernel, "params", ()) if p.do_not_specialize)
    return _asked[id(kernel)][1]


def launch(kernel, programs: int, *arguments: Tensor | TensorDescriptor | int | None, **constants) -> None:
    """kernel[(programs,)](*arguments, **constants) on the device of the first tensor, in less than half of the time on the
    CPU.

    Triton asks of each argument at each launch what it has compiled for: the dtype, whether 16 divides an address or a
    number, whether a number is 1. Here the numbers themselves lead to the compiled kernel, and an unaligned address to
    Triton. `arguments` are the kernel's own in their order, without those called tl.constexpr, which come by name.
    """
    if interpreted():  # gpukit.trace() sees what goes through Triton's run()
        kernel[(programs,)](*arguments, **OPTIONS, **constants)
        return
    first = arguments[0]
    device = (first if isinstance(first, Tensor) else first.base).get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, *arguments, **constants)
        return
    kinds, values, addresses, free = [id(kernel), device], list(arguments), 0, _free(kernel)
    for i, x in enumerate(arguments):
        if x is None:
            kinds.append(x)
        elif isinstance(x, int):
            if not free:  # from here on numbers, as in every kernel of this package
                kinds += arguments[i:]
                break
            kinds.append(None if i in free and -(2**31) <= x < 2**31 else x)
        elif isinstance(x, Tensor):
            values[i] = x.data_ptr()  # spares Triton to ask for it, and the driver whose address it is
            addresses |= values[i]
            kinds.append(x.dtype)
        elif hasattr(x, "block_shape"):  # a descriptor: Triton's, or Gluon's, which is of another class
            kinds += x.base.dtype, *x.block_shape
        else:
            kinds.append(x)
    key = (*kinds, *constants.values())
    known = None if addresses % 16 else _compiled.get(key)
    if known is None:
        if any(isinstance(x, Tensor) for x in kinds):
            raise TypeError(f"{kernel}: a tensor behind a number; tensors come first")
        compiled = kernel[(programs,)](*arguments, **OPTIONS, **constants)
        if len(_compiled) >= 10_000:  # numbers that always change
            _compiled.clear()
        if addresses % 16 == 0:
            ordered = [constants[name] for name in kernel.arg_names[len(arguments) :]]
            _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, ordered
        return
    run, function, metadata, ordered = known
    # None: no hooks before and after a launch, which Triton's profiler would set.
    run(programs, 1, 1, current_stream()(device), function, metadata, None, None, None, *values, *ordered)


def checked_once(make: Callable) -> Callable:
    """A decorator of make(x, *sizes), which makes a tensor descriptor of x, Triton's or Gluon's.

    What a descriptor holds beside x, and what is checked of it, follows from the dtype, shape and strides of x and from the
    sizes; the checks take the CPU 2 to 4 µs. Of tensors alike in these `make` is asked once, and the others get a copy.
    """
    made: dict[tuple, tuple[type, dict]] = {}

    @wraps(make)
    def descriptor(x: Tensor, *sizes: int):
        key = x.dtype, x.shape, x.stride(), sizes
        known = None if x.data_ptr() % 16 else made.get(key)  # an unaligned address is refused by the checks
        if known is None:
            first = make(x, *sizes)
            if len(made) >= 10_000:
                made.clear()
            made[key] = type(first), {name: value for name, value in vars(first).items() if name != "base"}
            return first
        kind, fields = known
        copy = object.__new__(kind)
        copy.__dict__.update(fields, base=x)
        return copy

    return descriptor


def power_of_2(n: int) -> int:
    """The smallest power of two that is n, at least 1, or more. Triton's own takes the CPU 4 µs."""
    return 1 << (n - 1).bit_length()
