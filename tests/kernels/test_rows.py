"""What the kernels share: the launcher, and tensors as rows."""

from typing import NamedTuple

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukit import launches
from gpukit.kernels import _launch
from gpukit.kernels._autograd import differentiable, operator
from gpukit.kernels._launch import checked_once, launch
from gpukit.kernels._rows import as_rows


class Kernel:
    """A Triton kernel as far as `launch` knows one; says how it was called."""

    arg_names = ("x_ptr", "y_ptr", "n", "BLOCK", "EVEN")

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        def through_triton(*arguments, **constants):
            self.calls.append(("triton", grid, arguments, constants))
            return Compiled(self)

        return through_triton


class Parameter(NamedTuple):
    num: int
    do_not_specialize: bool


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *arguments):
        assert (stream, function, metadata) == ("stream -1", "function", "metadata")
        self.kernel.calls.append(("cached", (x, y, z), arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(_launch, "current_stream", lambda: lambda device: f"stream {device}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # where the CPU's tensors are
    return Kernel()


def how(kernel, *arguments, **constants):
    launch(kernel, 3, *arguments, **{"EVEN": True, "BLOCK": 8, "num_warps": 4, **constants})
    return kernel.calls[-1][0]


def test_a_second_launch_passes_all_arguments_in_the_kernels_order(kernel):
    x, y = torch.zeros(8), torch.zeros(8)
    assert how(kernel, x, None, 5) == "triton"
    assert how(kernel, y, None, 5) == "cached"
    _, grid, arguments = kernel.calls[-1]
    assert grid == (3, 1, 1) and arguments == (y.data_ptr(), None, 5, 8, True)
    assert kernel.calls[0][1] == (3,) and kernel.calls[0][3] == {
        "enable_fp_fusion": True, "EVEN": True, "BLOCK": 8, "num_warps": 4,
    }  # fmt: skip


def test_what_triton_compiles_anew_is_not_taken_from_the_table(kernel):
    x = torch.zeros(8)
    assert how(kernel, x, None, 16) == "triton"
    for arguments, constants in (
        ((x, None, 15), {}),
        ((x, None, 1), {}),
        ((x, x, 16), {}),
        ((x.double(), None, 16), {}),
        ((x, None, 16), {"BLOCK": 4}),
        ((x, None, 16), {"num_warps": 8}),
    ):
        assert how(kernel, *arguments, **constants) == "triton", (arguments, constants)
    assert how(kernel, x[1:], None, 16) == "triton" and how(kernel, x[1:], None, 16) == "triton", "not aligned"
    assert how(kernel, x, None, 16) == "cached"
    other = Kernel()
    assert how(other, x, None, 16) == "triton"


def test_of_numbers_that_triton_does_not_look_at_only_the_width_counts(kernel):
    kernel.params = [Parameter(i, i == 2) for i in range(5)]
    x = torch.zeros(8)
    assert how(kernel, x, None, 16) == "triton"
    for n in (15, 1, 2**31 - 1, -(2**31)):
        assert how(kernel, x, None, n) == "cached" and kernel.calls[-1][2][2] == n
    assert how(kernel, x, None, 2**31) == "triton", "64 bits"
    assert how(kernel, x, 3, 16) == "triton" and how(kernel, x, 4, 16) == "triton", "another number, which it looks at"
    assert (
        how(kernel, x, 0.5, 16) == "triton"
        and how(kernel, x, 0.5, 15) == "cached"
        and how(kernel, x, 0.25, 15) == "triton"
    )


def test_a_parameter_is_a_tensor_and_a_tensor_behind_a_number_is_refused(kernel):
    x = torch.zeros(8)
    assert (
        how(kernel, x, torch.nn.Parameter(x), 16) == "triton" and how(kernel, torch.nn.Parameter(x), x, 16) == "cached"
    )
    with pytest.raises(TypeError, match="tensors come first"):
        launch(kernel, 3, x, 16, x, EVEN=True, BLOCK=8)


def test_a_descriptor_leads_to_its_kernel_by_its_dtype_and_its_block(kernel):
    def described(dtype=torch.bfloat16, columns=32, block=16):
        return TensorDescriptor(torch.zeros(8, columns, dtype=dtype), [8, columns], [columns, 1], [4, block])

    x = torch.zeros(8)
    assert how(kernel, described(), x, 16) == "triton"
    other = described(columns=64)  # its address, sizes and strides are told to the driver
    assert how(kernel, other, x, 16) == "cached" and kernel.calls[-1][2][0] is other
    assert how(kernel, described(block=32), x, 16) == "triton"
    assert how(kernel, described(torch.float16), x, 16) == "triton"


def test_what_is_checked_of_a_descriptor_once_holds_for_tensors_alike():
    asked = []

    @checked_once
    def described(x, *block):
        asked.append(block)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))

    x = torch.zeros(8, 32)
    for y, block in (
        (x, (4, 16)),
        (x[:, :16], (4, 16)),
        (x, (8, 16)),
        (x.half(), (4, 16)),
        (torch.zeros(4, 32), (4, 16)),
    ):
        first = described(y, *block)
        again = described(y.clone() if y.is_contiguous() else y, *block)
        assert asked[-1] == block and type(again) is TensorDescriptor
        assert {**vars(again), "base": 0} == {**vars(first), "base": 0}
        assert again.base.data_ptr() != first.base.data_ptr() or not y.is_contiguous()
    assert len(asked) == 5
    with pytest.raises(AssertionError, match="aligned"):
        described(torch.zeros(8 * 32 + 1)[1:].view(8, 32), 4, 16)
    assert described(x, 4, 16).base is x and len(asked) == 6


def test_who_traces_sees_every_launch(kernel, monkeypatch):
    x = torch.zeros(8)
    how(kernel, x, None, 16)
    monkeypatch.setattr(launches, "watchers", ["somebody"])
    assert how(kernel, x, None, 16) == "triton"


def test_the_table_stays_small(kernel):
    x = torch.zeros(8)
    for n in range(10_050):
        how(kernel, x, None, n)
    assert len(_launch._compiled) <= 10_000


def test_without_gradients_autograd_is_left_out():
    """Under torch.no_grad() its forward pass alone: autograd's part takes the CPU a third of a small kernel's call."""
    kept = []

    def keep(inputs, y):
        kept.append(y)
        return inputs, ()

    double = differentiable(
        operator("double", _double, like=torch.empty_like),
        operator("double_bwd", _double, like=torch.empty_like),
        keep=keep,
        gradients=lambda backward, ctx, dy: backward(dy),
    )
    x = torch.ones(3, requires_grad=True)
    y = double(x)
    y.sum().backward()
    assert y.requires_grad and len(kept) == 1 and torch.equal(x.grad, torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="double: there is no second derivative, which create_graph=True asks for"):
        torch.autograd.grad(double(x).sum(), x, create_graph=True)
    kept.clear()
    with torch.no_grad():
        assert torch.equal(double(x), torch.full((3,), 2.0)) and not kept
    with torch.inference_mode():
        assert not double(x).requires_grad and not kept


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_as_rows():
    x = torch.arange(24).view(2, 3, 4)
    assert as_rows(x).shape == (6, 4) and as_rows(x).data_ptr() == x.data_ptr()
    assert as_rows(x[0, 0]).shape == (1, 4)
    columns = x[0].mT
    assert as_rows(columns).data_ptr() == x.data_ptr() and as_rows(columns, copy_interleaved=True).is_contiguous()
    assert torch.equal(as_rows(x.transpose(0, 1)), x.transpose(0, 1).reshape(6, 4))


# ------------------------------------------------------------------------------------------------------------ bad input
