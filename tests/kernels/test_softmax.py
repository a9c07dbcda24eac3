"""Softmax: the reference and its cost, and the kernels against it, on the CPU in the interpreter and on a GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

from gpukit.kernels import _launch, log_softmax, softmax
from gpukit.kernels.softmax import softmax_bwd, softmax_fwd
from gpukit.op import Cost
from gpukit.reference.softmax import LOG_SOFTMAX, OP
from gpukit.testing import assert_close, poison
from tests.kernels.cases import DTYPES, LAYOUTS, contiguous, every_second, padded_rows, seeded, shapes_of, transposed

kernels = sys.modules["gpukit.kernels.softmax"]  # the package's attribute of that name is the function
# Longer than a program holds in registers, in whole blocks and not.
LONG = ((1, 40_960), (5, 33_001))


def check(shape, dtype, device, layout=contiguous, dy_layout=contiguous, fn=softmax):
    """fn's result and gradient against float64, both inputs unchanged."""
    op = OP if fn is softmax else LOG_SOFTMAX
    (x,) = op.make_inputs(shape, dtype, seeded())
    dy = torch.randn(shape, generator=seeded(1), dtype=torch.float64).to(dtype)
    results = []
    for call, convert in ((op.reference, torch.Tensor.double), (op.library, torch.clone)):
        leaf = convert(x).requires_grad_()
        y = call(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, convert(dy))))
    (truth, true_dx), (native, native_dx) = results

    leaf, upstream = layout(x.to(device)).detach(), dy_layout(dy.to(device))
    assert torch.equal(leaf, x.to(device))
    y = fn(leaf.requires_grad_())
    assert_close(y.detach().cpu(), truth, native, what="y")
    (dx,) = torch.autograd.grad(y, leaf, upstream)
    assert_close(dx.cpu(), true_dx, native_dx, gradient=True, what="dx")
    assert torch.equal(leaf.detach().cpu(), x), "x was changed"
    assert torch.equal(upstream.cpu(), dy), "dy was changed"


# ---------------------------------------------------------------------------------------------------------- reference
def test_reference_is_softmax():
    for shape in OP.test_shapes:
        (x,) = OP.make_inputs(shape, torch.float64, seeded())
        torch.testing.assert_close(OP.reference(x), torch.softmax(x, -1))
        torch.testing.assert_close(LOG_SOFTMAX.reference(x), torch.log_softmax(x, -1))


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
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64(dtype, layout, device):
    for shape in shapes_of(OP, device):
        check(shape, dtype, device, layout, dy_layout=layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_longer_than_the_registers(dtype, device):
    for shape in LONG:
        check(shape, dtype, device)
    check((2, 70_001), dtype, device, every_second, dy_layout=padded_rows)
    check((2, 33_001), dtype, device, transposed, dy_layout=transposed)


@pytest.mark.parametrize("shape", [(2, 5), (2, 33_000)], ids=str)
def test_float64_is_computed_in_float64(shape, device):
    (x,) = OP.make_inputs(shape, torch.float64, seeded())
    x, dy = x.to(device), torch.randn(shape, generator=seeded(1), dtype=torch.float64).to(device)
    y, expected = softmax(x), torch.softmax(x, -1)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(softmax_bwd(y, dy), y * (dy - (y * dy).sum(-1, keepdim=True)), rtol=1e-12, atol=1e-14)


def test_gradcheck(device):
    x = torch.randn(3, 7, generator=seeded(), dtype=torch.float64).to(device).requires_grad_()
    assert torch.autograd.gradcheck(softmax, (x,))
    assert torch.autograd.gradgradcheck(softmax, (x,))


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


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4), (1,), (5, 1), (1, 1, 1)], ids=str)
def test_sizes_zero_and_one(shape, device):
    x = torch.randn(shape, generator=seeded()).to(device).requires_grad_()
    y = softmax(x)
    assert y.shape == x.shape and (y == 1).all()
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert dx.shape == x.shape and (dx == 0).all()


def test_one_dimension(device):
    x = torch.randn(33, generator=seeded()).to(device)
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1))


@pytest.mark.parametrize("N", [9, 40_000])
def test_gradients_without_strides(N, device):
    """sum().backward() hands down one number with stride 0 in every dimension."""
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
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_matches_float64(dtype, layout, device):
    for shape in ((1, 1), (5, 65), (2, 3, 781)):
        check(shape, dtype, device, layout, dy_layout=layout, fn=log_softmax)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_of_rows_longer_than_the_registers(dtype, device):
    check((3, 33_001), dtype, device, fn=log_softmax)


def test_log_in_the_persistent_form(device, monkeypatch):
    monkeypatch.setattr(kernels, "_persistent_programs", lambda device: 3)
    check((5, 16_401), torch.bfloat16, device, fn=log_softmax)


def test_log_is_finite_where_softmax_is_zero(device):
    x = torch.tensor([[0.0, -300.0]], device=device)
    assert softmax(x)[0, 1] == 0 and log_softmax(x).tolist() == [[0.0, -300.0]]


def test_log_in_float64_and_its_derivatives(device):
    x = torch.randn(3, 7, generator=seeded(), dtype=torch.float64).to(device).requires_grad_()
    torch.testing.assert_close(log_softmax(x), torch.log_softmax(x, -1), rtol=1e-13, atol=1e-15)
    assert torch.autograd.gradcheck(log_softmax, (x,))
    assert torch.autograd.gradgradcheck(log_softmax, (x,))


@pytest.mark.parametrize("N", [5, 70_001])
def test_log_of_rows_without_a_softmax(N, device):
    x = torch.randn(4, N, generator=seeded())
    x[0], x[1, 3], x[2, 1], x[3, 1:] = -torch.inf, torch.inf, torch.nan, -torch.inf
    torch.testing.assert_close(log_softmax(x.to(device)).cpu(), torch.log_softmax(x, -1), equal_nan=True)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (1,), (5, 1)], ids=str)
def test_log_of_sizes_zero_and_one(shape, device):
    x = torch.randn(shape, generator=seeded()).to(device).requires_grad_()
    y = log_softmax(x)
    (dx,) = torch.autograd.grad(y.sum(), x)  # a gradient without strides
    assert y.shape == dx.shape == x.shape and (y == 0).all() and (dx == 0).all()


# ------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("shape", [(3, 250), (2, 70_001)], ids=str)
def test_every_element_is_written(shape, device, monkeypatch):
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: poison(empty_like(x, **options)))
    y = softmax_fwd(torch.randn(shape, generator=seeded()).to(device))
    assert not y.isnan().any() and not softmax_bwd(y, y).isnan().any()


def test_offsets_beyond_int32(device):
    """Four rows 2^30 elements apart, in 6 GB that are never touched in between."""
    x = torch.empty(3 * 2**30 + 100, dtype=torch.float16, device=device).as_strided((4, 100), (2**30, 1))
    x.copy_(torch.randn(4, 100, generator=seeded()))
    y = softmax(x)
    torch.testing.assert_close(y, torch.softmax(x, -1))
    dx = softmax_bwd(y, x).double()
    y, x = y.double(), x.double()
    torch.testing.assert_close(dx, y * (x - (y * x).sum(-1, keepdim=True)), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("shape", [(3, 250), (2, 70_001)], ids=str)
def test_deterministic(shape, device):
    x = torch.randn(shape, generator=seeded()).to(device)
    y = softmax(x)
    assert torch.equal(y, softmax(x)) and torch.equal(softmax_bwd(y, x), softmax_bwd(y, x))


def test_result_is_contiguous_and_new(device):
    x = torch.randn(2, 3, 5, generator=seeded()).to(device)
    for view in (x, x.transpose(0, 2), x[:, :, ::2]):
        y = softmax(view)
        assert y.is_contiguous() and y.data_ptr() != x.data_ptr()


# ------------------------------------------------------------------------------------------------------------- errors
def test_bad_arguments(device, monkeypatch):
    with pytest.raises(TypeError, match=r"softmax: x must be float16, .* or float64, got torch.int64"):
        softmax(torch.arange(3, device=device))
    with pytest.raises(TypeError, match=r"log_softmax: x must be .* got torch.int64"):
        log_softmax(torch.arange(3, device=device))
    with pytest.raises(TypeError, match=r"got torch\.complex64"):
        softmax(torch.zeros(3, dtype=torch.complex64, device=device))
    with pytest.raises(ValueError, match=r"softmax: x must have at least one dimension, got a scalar of shape \[\]"):
        softmax(torch.tensor(1.0, device=device))
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    with pytest.raises(
        ValueError, match=r"softmax: x is on cpu; Triton needs a CUDA tensor here, or TRITON_INTERPRET=1"
    ):
        softmax(torch.zeros(3))


# ------------------------------------------------------------------------------------------------------------ PyTorch
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor's advice on matmuls, and there is none here
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_torch_compile_without_a_graph_break(backend, device):
    torch.compiler.reset()
    model = lambda f, g, x: g(f(2 * x).sin())  # noqa: E731
    compiled = torch.compile(lambda x: model(softmax, log_softmax, x), fullgraph=True, backend=backend, dynamic=True)
    plain = OP.library, LOG_SOFTMAX.library
    for shape in ((3, 33), (5, 20), (2, 3, 64)):
        x = torch.randn(shape, generator=seeded()).to(device).requires_grad_()
        y, expected = compiled(x), model(*plain, x)
        torch.testing.assert_close(y, expected)
        dx, expected_dx = (torch.autograd.grad(z.square().sum(), x)[0] for z in (y, expected))
        torch.testing.assert_close(dx, expected_dx, rtol=1e-4, atol=1e-5)


def test_operator_registration(device):
    x = torch.randn(2, 3, 7, generator=seeded()).to(device)
    for view in (x, x.transpose(0, 1), x[..., ::2]):
        for log in (False, True):
            torch.library.opcheck(torch.ops.gpukit.softmax.default, (view.detach().requires_grad_(), log))
            torch.library.opcheck(torch.ops.gpukit.softmax_bwd.default, (view, view, log))


def test_autocast_leaves_the_dtype(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            assert softmax(torch.zeros(2, 3, dtype=dtype, device=device)).dtype == dtype


# ---------------------------------------------------------------------------------------------------- on a GPU alone
# Both sides of every limit of the launch configuration, and the lengths that are measured.
GPU_LENGTHS = (
    1, 2, 33, 100, 256, 600, 781, 1000, 1024, 1025, 1601, 4096, 4097, 8193, 16384, 16385, 16400, 32001, 32768, 32769,
    50257, 65536, 65537, 131072, 200003,
)  # fmt: skip


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda f: f.__name__)
def test_every_kernel_in_every_layout(layout, device):
    for shape in ((6, 33), (6, 781), (2, 3, 4096), (6, 32_000), (6, 65_536), (2, 3, 70_001)):
        check(shape, torch.bfloat16, device, layout, dy_layout=layout)


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
@pytest.mark.parametrize("N", [1024, 32_768, 65_537])
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
@pytest.mark.parametrize("N", [781, 4096, 32_000, 70_001])
def test_cuda_graph(N, device):
    x = torch.randn(33, N, device=device, dtype=torch.bfloat16)
    softmax_bwd(softmax(x), x)  # compiles, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x)
        dx = softmax_bwd(y, x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, softmax(x)) and torch.equal(dx, softmax_bwd(y, x))


@pytest.mark.gpu
def test_runs_on_the_current_stream(device):
    x, stream = torch.randn(4096, 4096, device=device), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        y = softmax(x.mul_(2))
    stream.synchronize()
    torch.testing.assert_close(y, torch.softmax(x, -1))


def test_a_view_that_is_negated_when_read(device):
    x = torch.randn(3, 8, dtype=torch.complex64, device=device).conj().imag
    with pytest.raises(ValueError, match=r"softmax: x is a view that PyTorch negates .*; pass x.resolve_neg\(\)"):
        softmax(x)
