"""What the tests of the kernels share: layouts in memory, and the comparison of an operation with float64."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from gpukit.kernels import _launch
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
    between = torch.full_like(x, 1e4 if x.is_floating_point() else 1)
    return torch.stack((x, between), dim=-1).flatten(-2)[..., ::2]


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


def upstream_of(outputs):
    return [
        torch.randn(y.shape, generator=seeded(i + 1), dtype=torch.float64).to(y.dtype) for i, y in enumerate(outputs)
    ]


def wanted_of(op, inputs):
    """Which inputs get gradients."""
    return [i for i, x in enumerate(inputs) if is_floating(x)] if op.grads is None else list(op.grads)


def is_floating(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def moved(inputs, device, layout=contiguous):
    return [layout(x.to(device)) if isinstance(x, torch.Tensor) else x for x in inputs]


def leaves_of(op, inputs, to=torch.Tensor.detach):
    """The inputs converted by `to`, and which of them get gradients."""
    wanted = wanted_of(op, inputs)
    return [to(x).detach().requires_grad_(i in wanted) if is_floating(x) else x for i, x in enumerate(inputs)], wanted


def gradients_of(outputs, leaves, wanted, upstream, **how):
    return list(torch.autograd.grad(outputs, [leaves[i] for i in wanted], upstream, **how)) if wanted else []


def check(
    op, fn, shape, dtype, device, layout=contiguous, dy_layout=contiguous, convert=None, native=None, upstream=upstream_of,
    **options,
):  # fmt: skip
    """fn's results and gradients against op.reference in float64, and nothing that went in changed.

    convert   applied to op's inputs first, for what the operation's own inputs do not show
    native    what PyTorch's error is taken from; default: op.library
    upstream  from results to the gradients above them
    """
    inputs = op.make_inputs(shape, dtype, seeded())
    inputs = inputs if convert is None else convert(*inputs)
    above, results = None, []
    for call, to in ((native or op.library, torch.clone), (op.reference, torch.Tensor.double)):
        leaves, wanted = leaves_of(op, inputs, to)
        outputs = as_tuple(call(*leaves, **options))
        above = upstream(outputs) if above is None else above
        results.append(
            [*(y.detach() for y in outputs), *gradients_of(outputs, leaves, wanted, [to(dy) for dy in above])]
        )

    ours, _ = leaves_of(op, moved(inputs, device, layout))
    given = [dy_layout(dy.to(device)) if dy.ndim else dy.to(device) for dy in above]
    outputs = as_tuple(fn(*ours, **options))
    gradients = gradients_of(outputs, ours, wanted, given)
    for i, (result, near, truth) in enumerate(zip([*outputs, *gradients], *results, strict=True)):
        is_gradient = i >= len(outputs)
        what = f"gradient of input {wanted[i - len(outputs)]}" if is_gradient else f"output {i}"
        what = f"{what}, {shape} {dtype}" + (f", {options}" if options else "")
        assert_close(result.detach().cpu(), truth, near, gradient=is_gradient, what=what)
    for before, after in zip([*inputs, *above], [*ours, *given], strict=True):
        if isinstance(before, torch.Tensor):
            assert torch.equal(before, after.detach().cpu()), "an input was changed"


def noise(*shape, seed=0):
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def _derived(fn, inputs, to):
    """Results and gradients of all floating-point inputs."""
    leaves = [to(x).detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    y = fn(*leaves)
    above = to(noise(*y.shape, seed=9)).to(y.dtype)
    wanted = [x for x in leaves if x.requires_grad]
    return y.detach().cpu(), *(dx.cpu() for dx in torch.autograd.grad(y, wanted, above.to(y.device)))


def agree(ours, theirs, inputs, dtype, device):
    """ours against theirs, results and gradients: by the project's rule, with PyTorch in float64 and in the dtype; in float64 itself to 12 digits, as PyTorch is no
    truth there."""
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    truth = _derived(theirs, inputs, torch.Tensor.double)
    native = _derived(theirs, inputs, torch.clone)
    results = _derived(ours, [x.to(device) for x in inputs], torch.clone)
    for i, (y, true, near) in enumerate(zip(results, truth, native, strict=True)):
        # What a loss has in 16 bits it has in float32 here.
        near = near.to(y.dtype) if i == 0 else near
        if dtype == torch.float64:
            torch.testing.assert_close(y, true, rtol=1e-12, atol=1e-13, equal_nan=True)
            continue
        assert_close(y, true, near, gradient=i > 0, what=f"{i}, {[list(x.shape) for x in inputs]} {dtype}")


def no_interpreter(monkeypatch):
    """From now on kernels think that they are compiled."""
    monkeypatch.setattr(_launch, "INTERPRETED", False)


class _Operators(TorchDispatchMode):
    """Keeps the calls of this project's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "gpukit":
            # What goes back has no gradient of its own.
            leaf = lambda x: x.detach().requires_grad_(x.requires_grad and "bwd" not in operator.name())  # noqa: E731
            fresh = [leaf(x) if is_floating(x) else x for x in args]
            self.calls.append((operator, tuple(fresh)))
        return operator(*args, **(kwargs or {}))


def opchecked(call):
    """Have PyTorch check each of this project's operators that `call` goes through when it is compiled. Returns their
    names."""
    with pytest.MonkeyPatch.context() as patch, _Operators() as operators:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        call()
    for operator, given in operators.calls:
        torch.library.opcheck(operator, given)
    return [operator.name() for operator, _ in operators.calls]


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


def spilled_beside_products(tmp_path):
    """For each kernel that `compile_for_hopper` left there: how many numbers are stored or loaded for want of registers in
    those pieces of its code, between two jumps, that multiply on the tensor cores. Others run once for a tile."""
    found = {}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    for cubin in sorted(tmp_path.rglob("*.cubin")):
        text = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
        pieces = [re.findall(r"\b(HGMMA|STL|LDL)\b", piece) for piece in re.split(r"\bBRA\b|\n\s*\.L", text)]
        assert any("HGMMA" in piece for piece in pieces) or "dq_from_sums" in cubin.name, cubin.name
        found[f"{cubin.parent.name}/{cubin.name}"] = sum(len(p) - p.count("HGMMA") for p in pieces if "HGMMA" in p)
    return found
