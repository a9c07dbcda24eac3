"""What the tests of the kernels share: layouts in memory, and the comparison of an operation with float64."""

import os
import re
import subprocess
import sys

import torch

from gpukit.testing import assert_close

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def contiguous(x):
    return x


def padded_rows(x):
    """Rows that do not follow one another in memory, the first one not aligned."""
    return torch.nn.functional.pad(x, (3, 5))[..., 3:-5]


def every_second(x):
    return torch.stack((x, torch.full_like(x, 1e4)), dim=-1).flatten(-2)[..., ::2]


def transposed(x):
    return x.mT.contiguous().mT if x.ndim > 1 else x


def permuted(x):
    """Leading dimensions that no one stride describes: [2, 3, N] seen through [3, 2, N]."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 2 else x


LAYOUTS = (contiguous, padded_rows, every_second, transposed, permuted)


def shapes_of(op, device):
    """The operation's shapes; on a GPU, where each is compiled for some seconds, three of them."""
    return op.test_shapes if device == "cpu" else op.test_shapes[1::3]


def as_tuple(y):
    return y if isinstance(y, tuple) else (y,)


def upstream_of(outputs, dtype):
    return [torch.randn(y.shape, generator=seeded(i + 1), dtype=torch.float64).to(dtype) for i, y in enumerate(outputs)]


def check(op, fn, shape, dtype, device, layout=contiguous, dy_layout=contiguous, convert=None, **options):
    """fn's results and gradients against op.reference in float64, and nothing that went in changed.

    convert  applied to op's inputs first, for what the operation's own inputs do not show
    """
    inputs = op.make_inputs(shape, dtype, seeded())
    inputs = inputs if convert is None else convert(*inputs)
    wanted = range(len(inputs)) if op.grads is None else op.grads
    upstream = None
    results = []
    for call, to in ((op.reference, torch.Tensor.double), (op.library, torch.clone)):
        leaves = [to(x).requires_grad_(i in wanted) for i, x in enumerate(inputs)]
        outputs = as_tuple(call(*leaves, **options))
        upstream = upstream or upstream_of(outputs, dtype)
        gradients = torch.autograd.grad(outputs, [leaves[i] for i in wanted], [to(dy) for dy in upstream])
        results.append([*(y.detach() for y in outputs), *gradients])
    truth, native = results

    ours = [layout(x.to(device)).detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    given = [dy_layout(dy.to(device)) for dy in upstream]
    outputs = as_tuple(fn(*ours, **options))
    gradients = torch.autograd.grad(outputs, [ours[i] for i in wanted], given)
    for i, result in enumerate([*outputs, *gradients]):
        is_gradient = i >= len(outputs)
        what = f"gradient of input {wanted[i - len(outputs)]}" if is_gradient else f"output {i}"
        assert_close(result.detach().cpu(), truth[i], native[i], gradient=is_gradient, what=f"{what}, {shape}")
    for before, after in zip([*inputs, *upstream], [*ours, *given], strict=True):
        assert torch.equal(before, after.detach().cpu()), "an input was changed"


AS_IF_ON_HOPPER = """
import torch, triton
from gpukit.simulator.compiler.worker import _Target

triton.runtime.driver.set_active(_Target(90))

def launch(kernel, programs, *given, **constants):
    kernel.warmup(*given, grid=(programs,), **constants)
"""


def compile_for_hopper(code, tmp_path):
    """Run code in which kernels are compiled by `launch` as on a Hopper GPU, without one. Returns how many bytes of a
    thread's registers had to be put elsewhere, stored and loaded, for each kernel."""
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }  # fmt: skip
    command = [sys.executable, "-c", AS_IF_ON_HOPPER + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "serialized" not in done.stdout, "ptxas says so if it waits after each product"
    return [int(n) for n in re.findall(r"(\d+) bytes spill", done.stdout)]
