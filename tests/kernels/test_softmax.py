"""Softmax: the reference and its cost, and the kernels against it, on the CPU in the interpreter and on a GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

from gpukit.kernels import log_softmax, softmax
from gpukit.kernels.softmax import softmax_bwd, softmax_fwd
from gpukit.op import Cost
from gpukit.reference.softmax import LOG_SOFTMAX, OP
from gpukit.testing import assert_close, poison
from tests.kernels.cases import DTYPES, LAYOUTS, every_second, padded_rows, seeded, transposed
from tests.kernels.cases import check as check_operation

kernels = sys.modules["gpukit.kernels.softmax"]  # the package's attribute of that name is the function
# Longer than a program holds in registers, in whole blocks and not.
LONG = ((1, 40_960), (5, 33_001))


def check(shape, dtype, device, *layouts, fn=softmax):
    check_operation(OP if fn is softmax else LOG_SOFTMAX, fn, shape, dtype, device, *layouts)


# ---------------------------------------------------------------------------------------------------------- reference


def test_cost_by_hand():
    assert OP.cost((2, 3), torch.float32) == Cost(read_bytes=24, write_bytes=24, flops=30)
    assert OP.cost_bwd((2, 3), torch.bfloat16) == Cost(read_bytes=24, write_bytes=12, flops=24)
    assert OP.cost((4, 2, 3), torch.float16).bytes == 4 * OP.cost((2, 3), torch.float16).bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_are_hard(dtype):
    (x,) = OP.make_inputs((8, 64), dtype, seeded())
    assert torch.exp(x[0].float()).isinf().any(), "exp of the large row must overflow fp32"
    assert (x[1] == x[1, 0]).all()
    assert x[2].isinf().sum() == 32 and (x[2, ::2] > -100).all()
    assert torch.exp(x[3].float()).sum() == 0, "the very negative row must underflow without the maximum"
    assert torch.isfinite(OP.reference(x)).all()


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_longer_than_the_registers(dtype, device):
    for shape in LONG:
        check(shape, dtype, device)
    check((2, 70_001), dtype, device, every_second, padded_rows)
    check((2, 33_001), dtype, device, transposed, transposed)


def test_long_rows_of_float64_are_computed_in_float64(device):
    shape = (2, 33_000)
    (x,) = OP.make_inputs(shape, torch.float64, seeded())
    x, dy = x.to(device), torch.randn(shape, generator=seeded(1), dtype=torch.float64).to(device)
    y, expected = softmax(x), torch.softmax(x, -1)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(softmax_bwd(y, dy), y * (dy - (y * dy).sum(-1, keepdim=True)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("N", [5, 70_001])
def test_rows_without_a_softmax_are_nan_as_in_pytorch(N, device):
    x = torch.randn(5, N, generator=seeded())
    x[0] = -torch.inf  # no largest element to subtract
    x[1, 3] = torch.inf
    x[2, 1] = torch.nan
    x[3, 1:] = -torch.inf  # this one has: it is 1, 0, 0, ...
    y, expected = softmax(x.to(device)).cpu(), torch.softmax(x, -1)
    assert y.isnan().all(-1).tolist() == [True, True, True, False, False]
    torch.testing.assert_close(y, expected, equal_nan=True)


def test_one_dimension(device):
    x = torch.randn(33, generator=seeded()).to(device)
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1))


def test_gradients_without_strides_of_long_rows(device):
    """sum().backward() hands down one number with stride 0 in every dimension."""
    N = 40_000
    x = torch.randn(3, N, generator=seeded()).to(device)
    for reduce in (torch.Tensor.sum, lambda y: (y.sum(0) * torch.arange(N, device=device)).sum()):
        ours, theirs = x.clone().requires_grad_(), x.clone().double().requires_grad_()
        reduce(softmax(ours)).backward()
        reduce(torch.softmax(theirs, -1)).backward()
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6 * N)


def test_expanded_input(device):
    x = torch.randn(1, 20, generator=seeded()).to(device).expand(4, 20)
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
    x = torch.randn(4, 1, generator=seeded()).to(device).expand(4, 20)
    torch.testing.assert_close(softmax(x), torch.full_like(x, 0.05))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_persistent_form(dtype, device, monkeypatch):
    monkeypatch.setattr(kernels, "_persistent_programs", lambda device: 3)
    for shape in ((7, 16_400), (2, 16_387), (4, 32_768)):
        check(shape, dtype, device)
    check((5, 16_401), dtype, device, every_second)


@pytest.mark.parametrize(("shared_bytes", "programs"), [(228 * 1024, 132), (164 * 1024, 132), (100 * 1024, 0)])
def test_persistent_form_needs_shared_memory(shared_bytes, programs, monkeypatch):
    gpu = SimpleNamespace(smem_per_sm_bytes=shared_bytes, sms=132)
    assert kernels._persistent_programs(torch.device("cpu")) == 0
    monkeypatch.setattr(kernels, "properties", lambda device: gpu)
    assert kernels._persistent_programs(torch.device("cuda", 0)) == programs


# -------------------------------------------------------------------------------------------------------- log_softmax


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_of_rows_longer_than_the_registers(dtype, device):
    check((3, 33_001), dtype, device, fn=log_softmax)


def test_log_in_the_persistent_form(device, monkeypatch):
    monkeypatch.setattr(kernels, "_persistent_programs", lambda device: 3)
    check((5, 16_401), torch.bfloat16, device, fn=log_softmax)


def test_log_is_finite_where_softmax_is_zero(device):
    x = torch.tensor([[0.0, -300.0]], device=device)
    assert softmax(x)[0, 1] == 0 and log_softmax(x).tolist() == [[0.0, -300.0]]


@pytest.mark.parametrize("N", [5, 70_001])
def test_log_of_rows_without_a_softmax(N, device):
    x = torch.randn(4, N, generator=seeded())
    x[0], x[1, 3], x[2, 1], x[3, 1:] = -torch.inf, torch.inf, torch.nan, -torch.inf
    torch.testing.assert_close(log_softmax(x.to(device)).cpu(), torch.log_softmax(x, -1), equal_nan=True)


# ------------------------------------------------------------------------------------------------------------- memory
def test_every_element_of_long_rows_is_written(device, monkeypatch):
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: poison(empty_like(x, **options)))
    y = softmax_fwd(torch.randn(2, 70_001, generator=seeded()).to(device))
    assert not y.isnan().any() and not softmax_bwd(y, y).isnan().any()


def test_long_rows_are_deterministic(device):
    x = torch.randn(2, 70_001, generator=seeded()).to(device)
    y = softmax(x)
    assert torch.equal(y, softmax(x)) and torch.equal(softmax_bwd(y, x), softmax_bwd(y, x))


# ------------------------------------------------------------------------------------------------------------- errors


# ------------------------------------------------------------------------------------------------------------ PyTorch


# ---------------------------------------------------------------------------------------------------- on a GPU alone
# Both sides of every limit of the launch configuration, and the lengths that are measured.
GPU_LENGTHS = (
    1, 2, 33, 100, 256, 600, 781, 1000, 1024, 1025, 1601, 4096, 4097, 8193, 16384, 16385, 16400, 32001, 32768, 32769,
    50257, 65536, 65537, 131072, 200003,
)  # fmt: skip


@pytest.mark.gpu("long")
@pytest.mark.parametrize("some", range(5))
def test_every_length(some, device):
    for N in GPU_LENGTHS[some::5]:
        check((6, N), torch.bfloat16, device)
    for N in GPU_LENGTHS[some::10]:
        check((6, N), torch.float32, device)
        check((6, N), torch.float16, device, fn=log_softmax)


@pytest.mark.gpu
def test_more_rows_than_programs(device):
    for M, N in ((300, 33), (1000, 4096), (300, 20_001), (300, 32_768)):
        check((M, N), torch.bfloat16, device)


@pytest.mark.gpu("long")
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda f: f.__name__)
def test_every_kernel_in_every_layout(layout, device):
    for shape in ((6, 33), (6, 781), (2, 3, 4096), (6, 32_000), (6, 65_536), (2, 3, 70_001)):
        check(shape, torch.bfloat16, device, layout, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", OP.bench_shapes, ids=str)
def test_measured_shapes_in_full(shape, device):
    """Every element against PyTorch on the GPU, since float64 on the CPU would take minutes: within two roundings."""
    x = torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(3).requires_grad_()
    dy = torch.randn_like(x)
    ours, theirs = softmax(x), torch.softmax(x, -1)
    (dx,), (expected_dx,) = (torch.autograd.grad(y, x, dy) for y in (ours, theirs))
    eps = torch.finfo(x.dtype).eps
    for y, expected, dim in ((ours.detach(), theirs.detach(), -1), (dx, expected_dx, None)):
        largest = expected.abs().amax() if dim is None else expected.amax(dim, keepdim=True)
        for i in range(0, len(expected), 256):
            bound = (largest if dim is None else largest[i : i + 256]).float() * eps * (16 if dim is None else 2)
            assert ((y[i : i + 256].float() - expected[i : i + 256].float()).abs() <= bound).all()


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("N", [1024, 32_768, 65_537, 131_072])
def test_more_than_2_31_elements(N, device):
    M = 2**31 // N + 2
    x = torch.randn((M, N), device=device, dtype=torch.bfloat16)
    y = softmax(x)
    dx = softmax_bwd(y, x)
    for rows in (slice(0, 2), slice(M - 2, M)):
        truth = torch.softmax(x[rows].double(), -1)
        native = torch.softmax(x[rows], -1)
        assert_close(y[rows], truth, native, what="y")
        given = y[rows].double()  # the backward pass starts from the rounded y
        true_dx = given * (x[rows] - (given * x[rows]).sum(-1, keepdim=True))
        assert_close(dx[rows], true_dx, true_dx.to(x.dtype), gradient=True, what="dx")


@pytest.mark.gpu
def test_runs_on_the_current_stream(device):
    x, stream = torch.randn(4096, 4096, device=device), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        y = softmax(x.mul_(2))
    stream.synchronize()
    torch.testing.assert_close(y, torch.softmax(x, -1))
