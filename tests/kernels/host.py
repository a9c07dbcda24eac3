"""What calls of the operations take the CPU, without a GPU: the host code that a Hopper GPU would see, on tensors of the CPU,
with a driver that launches nothing.

    python -m tests.kernels.host [NAME ...]   for each operation the CPU's µs and the calls of functions, forward and forward +
                                              backward, beside an autograd Function that only makes its results
    python -m tests.kernels.host --launches   their launches, the first through Triton, the second through the table, as JSON

What PyTorch itself launches does run here, on tensors so small that this takes as long as a launch. Run as a process of its own:
kernels must not be those of the interpreter.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import gc
import importlib
import json
import pkgutil
import time
from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from gpukit import kernels
from gpukit.kernels import _device, _launch, _matmul_choices, _rows_choices
from tests.calls import calls

HOPPER = _device.Device((9, 0), 132, 228 * 1024)
launched: list[tuple] = []  # (kernel's name, programs, arguments)
asked: list[str] = []  # the kernels that Triton was to compile


class Driver:
    """What Triton returns for a kernel: how to launch it."""

    packed_metadata = None

    def __init__(self, kernel):
        self.function = kernel.__name__

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *given) -> None:
        launched.append((function, x, given))


def first_launch(kernel, *arguments, grid, warmup=False, **constants) -> Driver:
    """Triton's run(): here nothing is compiled. Raises TypeError for arguments that are not the kernel's."""
    asked.append(kernel.__name__)
    rest = kernel.arg_names[len(arguments) :]
    if missing := [name for name in rest if name not in constants]:
        raise TypeError(f"{kernel.__name__}: {missing} are missing")
    given = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    launched.append((kernel.__name__, grid[0], (*given, *(constants[name] for name in rest))))
    return Driver(kernel)


def pretend() -> None:
    """From now on tensors of the CPU are a Hopper GPU's."""
    modules = [importlib.import_module(f"{kernels.__name__}.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)]
    properties = _device.properties
    for module in modules:
        if getattr(module, "properties", None) is properties:
            module.properties = lambda device: HOPPER
        if module not in (_launch, _device) and hasattr(module, "interpreted"):
            module.interpreted = lambda: True  # as if x.is_cuda were
    torch.cuda.current_device = lambda: -1
    torch.cuda.is_current_stream_capturing = lambda: False
    _launch.current_stream = lambda: lambda device: 0
    # Descriptors for products so small that a GPU would take pointers.
    _matmul_choices.WORTH_DESCRIPTORS = _matmul_choices.WORTH_A_COPY = 0
    _matmul_choices._seconds = lambda given, config: not config.descriptors
    _rows_choices.multiprocessors = lambda device: 1  # rows so few that a GPU would leave SMs idle
    JITFunction.run = GluonJITFunction.run = first_launch


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def operations() -> dict[str, tuple[Callable, tuple]]:
    """name: (operation, arguments)."""
    from gpukit.kernels.cross_entropy import cross_entropy_inplace as in_place

    x, row = numbers(8, 16), numbers(16)
    targets = torch.randint(0, 16, (8,))
    q = numbers(2, 4, 128, 64)
    tables = torch.randn(128, 32)
    return {
        "softmax": (kernels.softmax, (x,)),
        "log_softmax": (kernels.log_softmax, (x,)),
        "gelu": (kernels.gelu, (x,)),
        "bias_gelu": (kernels.bias_gelu, (x, row)),
        "swiglu": (kernels.swiglu, (x, numbers(8, 16))),
        "geglu": (kernels.geglu, (x, numbers(8, 16))),
        "layer_norm": (kernels.layer_norm, (x, row, numbers(16))),
        "rms_norm": (kernels.rms_norm, (x, row)),
        "residual_rms_norm": (kernels.residual_rms_norm, (x, numbers(8, 16), row)),
        "rope": (kernels.rope, (q, numbers(2, 4, 128, 64), tables, tables)),
        "dropout": (kernels.dropout, (x, 0.1, 7)),
        "cross_entropy": (kernels.cross_entropy, (x, targets)),
        "cross_entropy in place": (lambda x, targets: in_place(x * 1, targets), (x, targets)),
        "linear_cross_entropy": (kernels.linear_cross_entropy, (x, numbers(16, 16), targets)),
        "kl_div": (kernels.kl_div, (x, torch.rand(8, 16).bfloat16(), "batchmean")),
        "matmul": (kernels.matmul, (x, numbers(16, 16))),
        "matmul, bias, gelu": (kernels.matmul, (x, numbers(16, 16), row, "gelu")),
        "matmul in Gluon": (kernels.matmul, (numbers(256, 128), numbers(128, 256))),
        "matmul of odd sizes": (kernels.matmul, (numbers(131, 137), numbers(137, 129))),
        "flash_attention": (kernels.flash_attention, (q, numbers(2, 4, 128, 64), numbers(2, 4, 128, 64))),
        "softmax, rows of 65,536": (kernels.softmax, (numbers(2, 16, 65_536),)),
        "softmax, rows of 131,072": (kernels.softmax, (numbers(2, 16, 131_072),)),
        "layer_norm, long rows": (kernels.layer_norm, (numbers(2, 16, 16_384), numbers(16_384), numbers(16_384))),
        "cross_entropy in place, long rows": (
            lambda x, targets: in_place(x * 1, targets),
            (numbers(32, 32_768), torch.zeros(32, dtype=torch.long)),
        ),
        "flash_attention, long": (kernels.flash_attention, tuple(numbers(1, 1, 2048, 64) for _ in range(3))),
    }


def forward(function: Callable, arguments: tuple) -> Callable[[], Tensor]:
    def run():
        results = function(*arguments)
        return results[0] if isinstance(results, tuple) else results

    return run


def both(run: Callable[[], Tensor], arguments: tuple) -> Callable[[], object]:
    leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
    upstream = torch.randn_like(run())
    return lambda: torch.autograd.grad(run(), leaves, upstream, allow_unused=True)


def without_gradients(run: Callable) -> Callable[[], None]:
    def plain():
        with torch.no_grad():
            run()

    return plain


class Bare(torch.autograd.Function):
    """What no operation can do without: a result, and a gradient for each argument."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx, upstream):
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def microseconds(work: Callable) -> float:
    """Of the CPU per call, the least of 40 rounds: what other processes do to caches makes others longer."""
    rounds = []
    gc.disable()
    for _ in range(40):
        begin = time.process_time()
        for _ in range(50):
            work()
        rounds.append((time.process_time() - begin) / 50 * 1e6)
        launched.clear()
    gc.enable()
    return min(rounds)


def launches() -> dict[str, list]:
    """name: of a call forward and backward whose kernels are new, of a second call, and whether that one asked Triton. A launch
    is the kernel's name, its programs and its arguments, without addresses."""
    found = {}
    for name, (function, arguments) in operations().items():
        work = both(forward(function, arguments), arguments)
        _launch._compiled.clear()
        two = []
        for _ in range(2):
            launched.clear()
            asked.clear()
            work()
            two.append([(kernel, programs, list(map(_shown, given))) for kernel, programs, given in launched])
        found[name] = [*two, list(asked)]
    return found


def _shown(x):
    if hasattr(x, "block_shape"):
        return [str(x.base.dtype), list(x.shape), list(x.strides), list(x.block_shape)]
    return "address" if isinstance(x, int) and x >= 2**33 else x


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    pretend()
    if names == ["--launches"]:
        print(json.dumps(launches(), default=str))
        return
    rows = {f"nothing but {n} gradients": (Bare.apply, tuple(numbers(8, 16) for _ in range(n))) for n in (1, 2, 3)}
    print(f"{'':28}{'forward':>16}{'and backward':>16}\n{'':28}{'µs':>8}{'calls':>8}{'µs':>8}{'calls':>8}")
    for name, (function, arguments) in (rows | operations()).items():
        if names and name not in names:
            continue
        run = forward(function, arguments)
        works = without_gradients(run), both(run, arguments)
        for work in works:
            work()  # compiles
        print(f"{name:28}" + "".join(f"{microseconds(work):8.1f}{calls(work):8}" for work in works), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
