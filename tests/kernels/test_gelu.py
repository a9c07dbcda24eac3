"""GELU, bias + GELU and SwiGLU: the references and their costs, and the kernels against them."""

import sys

import pytest
import torch
import torch.nn.functional as F

from gpukit.kernels import _dtypes, _launch, bias_gelu, gelu, swiglu
from gpukit.op import Cost
from gpukit.reference.gelu import BIAS_GELU, GELU, SWIGLU
from gpukit.testing import assert_close, poison
from tests.kernels.cases import DTYPES, LAYOUTS, check, every_second, padded_rows, seeded, shapes_of, transposed

kernels = sys.modules["gpukit.kernels.gelu"]  # the package's attribute of that name is the function
CASES = (
    pytest.param(GELU, gelu, {}, id="gelu"),
    pytest.param(GELU, gelu, {"approximate": "tanh"}, id="gelu-tanh"),
    pytest.param(BIAS_GELU, bias_gelu, {}, id="bias_gelu"),
    pytest.param(BIAS_GELU, bias_gelu, {"approximate": "tanh"}, id="bias_gelu-tanh"),
    pytest.param(SWIGLU, swiglu, {}, id="swiglu"),
)
FUNCTIONS = (
    pytest.param(GELU, gelu, id="gelu"),
    pytest.param(BIAS_GELU, bias_gelu, id="bias_gelu"),
    pytest.param(SWIGLU, swiglu, id="swiglu"),
)


def leaves(op, shape, dtype, device):
    """Inputs of normal noise that want gradients."""
    shapes = {"gelu": (shape,), "bias_gelu": (shape, shape[-1:]), "swiglu": (shape, shape)}[op.name]
    noise = [torch.randn(size, generator=seeded(i), dtype=torch.float64) for i, size in enumerate(shapes)]
    return [x.to(device, dtype).requires_grad_() for x in noise]


# ---------------------------------------------------------------------------------------------------------- reference
@pytest.mark.parametrize(("op", "fn", "options"), CASES)
def test_reference_is_pytorchs(op, fn, options):
    for shape in op.test_shapes:
        inputs = op.make_inputs(shape, torch.float64, seeded())
        torch.testing.assert_close(op.reference(*inputs, **options), op.library(*inputs, **options))


def test_costs_by_hand():
    assert GELU.cost((2, 3), torch.float32) == Cost(read_bytes=24, write_bytes=24, flops=30)
    assert GELU.cost_bwd((2, 3), torch.bfloat16) == Cost(read_bytes=24, write_bytes=12, flops=66)
    assert BIAS_GELU.cost((2, 3), torch.float32) == Cost(read_bytes=36, write_bytes=24, flops=36)
    assert BIAS_GELU.cost_bwd((2, 3), torch.bfloat16) == Cost(read_bytes=30, write_bytes=18, flops=78)
    assert SWIGLU.cost((2, 3), torch.float32) == Cost(read_bytes=48, write_bytes=24, flops=36)
    assert SWIGLU.cost_bwd((2, 3), torch.bfloat16) == Cost(read_bytes=36, write_bytes=24, flops=66)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_are_hard(dtype):
    for x in (op.make_inputs((8, 64), dtype, seeded())[0].float() for op in (GELU, BIAS_GELU, SWIGLU)):
        assert torch.exp(x[0]).isinf().all(), "e^x of the large row must overflow fp32"
        assert (torch.exp(x[1]) == 0).all() and (1 + torch.erf(x[1]) == 0).all()
        assert x[2].abs().max() < 0.05 and (x[3].diff() >= 0).all() and x[3, 0] == -6
        assert torch.isfinite(x).all()


# ------------------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "fn", "options"), CASES)
def test_matches_float64(op, fn, options, dtype, device):
    for shape in shapes_of(op, device):
        check(op, fn, shape, dtype, device, **options)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("op", "fn"), FUNCTIONS)
def test_every_layout(op, fn, layout, device):
    for shape, dtype in (((2, 1), torch.float32), ((5, 63), torch.bfloat16), ((2, 3, 781), torch.float16)):
        check(op, fn, shape, dtype, device, layout, dy_layout=layout)
    check(op, fn, (6, 64), torch.float32, device, layout, dy_layout=padded_rows)


def test_halves_of_one_matmul(device):
    """gate and up as they come out of one linear layer: neither is contiguous, and neither is copied first."""
    h = torch.randn(7, 2 * 33, generator=seeded()).to(device).requires_grad_()
    y = swiglu(*h.chunk(2, -1))
    expected = SWIGLU.library(*h.chunk(2, -1))
    torch.testing.assert_close(y, expected)
    ours, theirs = (torch.autograd.grad(z.square().sum(), h)[0] for z in (y, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_negative_tail_does_not_cancel(dtype, approximate, device):
    """1 + erf(x) has no digit left at -6. The tail itself, near 1e-9, is far below one unit of the row's maximum."""
    x = torch.linspace(-4.5, -2, 200, dtype=torch.float64).to(dtype)
    expected = F.gelu(x.double(), approximate=approximate)
    info = torch.finfo(dtype)
    bounds = {"rtol": max(3e-3, info.eps), "atol": info.smallest_normal * info.eps}  # one subnormal number of fp16
    torch.testing.assert_close(gelu(x.to(device), approximate).cpu().double(), expected, **bounds)


def test_infinities_and_nan(device):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 0.0], device=device)
    y = gelu(x).tolist()
    assert y[0] == torch.inf and y[1] == 0 and y[2] != y[2] and y[3] > 9e29 and y[4:] == [0, 0]
    y = gelu(x, "tanh").tolist()
    assert y[0] == torch.inf and y[1] != y[1] and y[2] != y[2] and y[3] > 9e29 and y[4:] == [0, 0]
    y = swiglu(x, torch.ones_like(x)).tolist()
    assert y[0] == torch.inf and y[1] != y[1] and y[2] != y[2] and y[3] > 9e29 and y[4:] == [0, 0]


@pytest.mark.parametrize(("op", "fn", "options"), CASES)
def test_float64_and_its_derivatives(op, fn, options, device):
    inputs = leaves(op, (2, 3), torch.float64, device)
    torch.testing.assert_close(fn(*inputs, **options), op.library(*inputs, **options), rtol=1e-13, atol=1e-15)
    assert torch.autograd.gradcheck(lambda *x: fn(*x, **options), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: fn(*x, **options), inputs)


def test_second_derivative_of_an_input_that_depends_on_another(device):
    """x is made from the bias: what reaches the bias through x is not to be counted twice."""
    bias = torch.randn(3, generator=seeded(), dtype=torch.float64).to(device).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda b: bias_gelu(torch.outer(b, b), b), (bias,))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4), (1,), (5, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize(("op", "fn"), FUNCTIONS)
def test_sizes_zero_and_one(op, fn, shape, device):
    inputs = leaves(op, shape, torch.float32, device)
    y, expected = fn(*inputs), op.library(*inputs)
    torch.testing.assert_close(y, expected)
    for ours, theirs in zip(*(torch.autograd.grad(z.sum(), inputs) for z in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("op", "fn"), FUNCTIONS)
def test_gradients_without_strides(op, fn, device):
    """sum().backward() hands down one number with stride 0 in every dimension, sum(0) one row."""
    inputs = leaves(op, (5, 9), torch.float32, device)
    for reduce in (torch.Tensor.sum, lambda y: (y.sum(0) * torch.arange(9, device=device)).sum()):
        gradients = [torch.autograd.grad(reduce(f(*inputs)), inputs) for f in (fn, op.library)]
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_expanded_inputs(device):
    row = torch.randn(1, 20, generator=seeded()).to(device)
    for x in (row.expand(4, 20), row.mT.expand(20, 4)):
        torch.testing.assert_close(gelu(x), F.gelu(x))
        torch.testing.assert_close(swiglu(x, x), F.silu(x) * x)
    bias = torch.ones(1, device=device).expand(20)
    torch.testing.assert_close(bias_gelu(row, bias), F.gelu(row + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_gradient_over_many_steps(dtype, device, monkeypatch):
    """Few programs in a column, so that each takes many steps, and the last one fewer than the first."""
    config = {"BLOCK_M": 2, "BLOCK_N": 32, "ACC": _dtypes.acc_dtype(dtype), "num_warps": 1}
    monkeypatch.setattr(kernels, "_config", lambda M, N, dtype: config)
    monkeypatch.setattr(kernels, "BIAS_PROGRAMS", 3)
    for shape in ((1, 40), (13, 40), (31, 70)):
        check(BIAS_GELU, bias_gelu, shape, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_of_another_dtype(dtype, device):
    """As under autocast, where activations have 16 bits and parameters 32."""
    x, bias = (t.detach().to(d).requires_grad_() for t, d in
               zip(leaves(BIAS_GELU, (5, 20), torch.float32, device), (dtype, torch.float32), strict=True))  # fmt: skip
    y = bias_gelu(x, bias)
    dx, dbias = torch.autograd.grad(y.float().sum(), (x, bias))
    assert (y.dtype, dx.dtype, dbias.dtype) == (dtype, dtype, torch.float32)
    wide = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.gelu(wide + bias.double()).sum(), bias)
    torch.testing.assert_close(dbias, expected)


# ------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize(("op", "fn"), FUNCTIONS)
def test_every_element_is_written(op, fn, device, monkeypatch):
    empty_like, empty = torch.empty_like, torch.empty
    monkeypatch.setattr(torch, "empty_like", lambda *a, **options: poison(empty_like(*a, **options)))
    monkeypatch.setattr(torch, "empty", lambda *a, **options: poison(empty(*a, **options)))
    inputs = leaves(op, (7, 1030), torch.float32, device)
    y = fn(*inputs)
    assert not y.isnan().any()
    assert not any(dx.isnan().any() for dx in torch.autograd.grad(y.sum(), inputs))


def test_offsets_beyond_int32(device):
    """Three rows 2^30 elements apart, in 4 GB that are never touched in between."""
    x = torch.empty(2 * 2**30 + 50, dtype=torch.float16, device=device).as_strided((3, 50), (2**30, 1))
    x.copy_(torch.randn(3, 50, generator=seeded()))
    near, bias = x.clone(), torch.ones(50, dtype=x.dtype, device=device)
    assert torch.equal(gelu(x), gelu(near)) and torch.equal(swiglu(x, x), swiglu(near, near))
    for far, close in zip(
        kernels.gelu_bwd(x, x, bias, "none"), kernels.gelu_bwd(near, near, bias, "none"), strict=True
    ):
        assert torch.equal(far, close)
    assert torch.equal(kernels.swiglu_bwd(x, x, x)[0], kernels.swiglu_bwd(near, near, near)[0])


@pytest.mark.parametrize(("op", "fn"), FUNCTIONS)
def test_deterministic_new_and_contiguous(op, fn, device):
    inputs = leaves(op, (40, 65), torch.float32, device)
    views = [every_second(x.detach()).requires_grad_() for x in inputs]
    (y, *gradients), (again, *gradients_again), (strided, *_) = (
        [(z := fn(*x)), *torch.autograd.grad(z.sum(), x)] for x in (inputs, inputs, views)
    )
    assert torch.equal(y, again) and y.is_contiguous() and strided.is_contiguous()
    assert all(map(torch.equal, gradients, gradients_again))
    assert y.data_ptr() not in [x.data_ptr() for x in inputs]


# ------------------------------------------------------------------------------------------------------------- errors
def test_bad_arguments(device, monkeypatch):
    x = torch.zeros(2, 3, device=device)
    with pytest.raises(TypeError, match=r"gelu: x must be float16, bfloat16, float32 or float64, got torch\.int64"):
        gelu(x.long())
    with pytest.raises(ValueError, match=r"gelu: x must have at least one dimension, got a scalar of shape \[\]"):
        gelu(torch.tensor(1.0, device=device))
    with pytest.raises(ValueError, match='gelu: approximate must be "none" or "tanh", got True'):
        gelu(x, True)
    with pytest.raises(ValueError, match='bias_gelu: approximate must be "none" or "tanh", got \'erf\''):
        bias_gelu(x, x[0], "erf")
    with pytest.raises(ValueError, match=r"bias_gelu: bias must have the shape \[3\] of x's last dimension, got \[2\]"):
        bias_gelu(x, x[:, 0])
    with pytest.raises(TypeError, match=r"bias_gelu: bias must be float16, .* got torch\.int64"):
        bias_gelu(x, x[0].long())
    with pytest.raises(ValueError, match=r"swiglu: up must have the shape of gate, \[2, 3\], got \[2, 1\]"):
        swiglu(x, x[:, :1])
    with pytest.raises(TypeError, match=r"swiglu: up must have the dtype of gate, torch\.float32, got torch\.float16"):
        swiglu(x, x.half())
    with pytest.raises(ValueError, match="gelu: x is on meta; Triton needs a CUDA tensor here"):
        gelu(x.to("meta"))
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    with pytest.raises(
        ValueError, match="swiglu: gate is on cpu; Triton needs a CUDA tensor here, or TRITON_INTERPRET=1"
    ):
        swiglu(x.cpu(), x.cpu())


@pytest.mark.gpu
def test_tensors_on_two_devices(device):
    x = torch.zeros(2, 3, device=device)
    with pytest.raises(ValueError, match="bias_gelu: bias is on cpu"):
        bias_gelu(x, x[0].cpu())


# ------------------------------------------------------------------------------------------------------------ PyTorch
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor's advice on matmuls, and there is none here
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_torch_compile_without_a_graph_break(backend, device):
    def model(x, bias, f, g, h):
        return h(f(x, "tanh"), g(2 * x, bias)).sin()

    torch.compiler.reset()
    compiled = torch.compile(lambda x, b: model(x, b, gelu, bias_gelu, swiglu), fullgraph=True, backend=backend,
                             dynamic=True)  # fmt: skip
    for shape in ((3, 33), (5, 20), (2, 3, 64)):
        x, bias = leaves(BIAS_GELU, shape, torch.float32, device)
        y = compiled(x, bias)
        expected = model(x, bias, lambda x, a: F.gelu(x, approximate=a), BIAS_GELU.library, SWIGLU.library)
        torch.testing.assert_close(y, expected)
        for ours, theirs in zip(*(torch.autograd.grad(z.sum(), (x, bias)) for z in (y, expected)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_operator_registration(device):
    x, bias = leaves(BIAS_GELU, (2, 3, 7), torch.float32, device)
    view = x.detach().transpose(0, 1).requires_grad_()
    ops = torch.ops.gpukit
    for given in ((x, None, "none"), (x, bias, "tanh"), (view, bias, "none")):
        torch.library.opcheck(ops.gelu.default, given)
        torch.library.opcheck(ops.gelu_bwd.default, tuple(t.detach() if isinstance(t, torch.Tensor) else t
                                                          for t in (given[0], *given)))  # fmt: skip
    torch.library.opcheck(ops.swiglu.default, (x, x.detach().clone().requires_grad_()))
    torch.library.opcheck(ops.swiglu_bwd.default, (x.detach(), x.detach(), x.detach()))


def test_autocast_leaves_the_dtype(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.zeros(2, 3, dtype=dtype, device=device)
            assert gelu(x).dtype == bias_gelu(x, x[0].float()).dtype == swiglu(x, x).dtype == dtype


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "fn", "options"), CASES)
def test_shapes_of_models(op, fn, options, dtype, device):
    for shape in ((3, 4096), (4, 33, 11008), (2049, 129), (100_000, 3)):
        check(op, fn, shape, dtype, device, **options)
    check(op, fn, (300, 1000), dtype, device, transposed, dy_layout=padded_rows, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**31 + 4096,), (2**20 + 3, 2048)], ids=str)
def test_more_than_2_31_elements(shape, device):
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    bias = torch.randn(shape[-1:], device=device, dtype=torch.bfloat16) if len(shape) == 2 else None
    results = {"gelu": gelu(x), "swiglu": swiglu(x, x), "dx": kernels.gelu_bwd(x, x, bias, "none")[0]}
    for part in (slice(0, 2048), slice(shape[0] - 2048, shape[0])):
        given = x[part].double()
        z = (given if bias is None else given + bias.double()).requires_grad_()
        slope = torch.autograd.grad(F.gelu(z).sum(), z)[0]
        expected = {"gelu": F.gelu(given), "swiglu": F.silu(given) * given, "dx": given * slope}
        for name, truth in expected.items():
            assert_close(results[name][part], truth, truth.to(x.dtype), gradient=True, what=name)


@pytest.mark.gpu
def test_cuda_graph(device):
    x, bias = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((333, 4096), (4096,)))

    def all_of_them():
        y = bias_gelu(x, bias)
        return y, swiglu(x, y), *kernels.gelu_bwd(y, x, bias, "none"), *kernels.swiglu_bwd(y, x, y)

    all_of_them()  # compiles, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = all_of_them()
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(map(torch.equal, results, all_of_them()))
