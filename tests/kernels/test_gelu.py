"""GELU, bias + GELU, SwiGLU and GEGLU: the references and their costs, and the kernels against them."""

import sys

import pytest
import torch
import torch.nn.functional as F

from gpukit.kernels import _dtypes, bias_gelu, geglu, gelu, swiglu
from gpukit.op import Cost
from gpukit.reference.gelu import BIAS_GELU, GEGLU, GELU, SWIGLU
from gpukit.testing import assert_close
from tests.kernels.cases import DTYPES, check, padded_rows, seeded, transposed

kernels = sys.modules["gpukit.kernels.gelu"]  # the package's attribute of that name is the function
CASES = (
    pytest.param(GELU, gelu, {}, id="gelu"),
    pytest.param(GELU, gelu, {"approximate": "tanh"}, id="gelu-tanh"),
    pytest.param(BIAS_GELU, bias_gelu, {}, id="bias_gelu"),
    pytest.param(BIAS_GELU, bias_gelu, {"approximate": "tanh"}, id="bias_gelu-tanh"),
    pytest.param(SWIGLU, swiglu, {}, id="swiglu"),
    pytest.param(GEGLU, geglu, {}, id="geglu"),
    pytest.param(GEGLU, geglu, {"approximate": "tanh"}, id="geglu-tanh"),
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


def test_costs_by_hand():
    assert GELU.cost((2, 3), torch.float32) == Cost(read_bytes=24, write_bytes=24, flops=30)
    assert GELU.cost_bwd((2, 3), torch.bfloat16) == Cost(read_bytes=24, write_bytes=12, flops=66)
    assert BIAS_GELU.cost((2, 3), torch.float32) == Cost(read_bytes=36, write_bytes=24, flops=36)
    assert BIAS_GELU.cost_bwd((2, 3), torch.bfloat16) == Cost(read_bytes=30, write_bytes=18, flops=78)
    assert SWIGLU.cost((2, 3), torch.float32) == Cost(read_bytes=48, write_bytes=24, flops=36)
    assert SWIGLU.cost_bwd((2, 3), torch.bfloat16) == Cost(read_bytes=36, write_bytes=24, flops=66)
    assert GEGLU.cost((2, 3), torch.float32) == Cost(read_bytes=48, write_bytes=24, flops=36)
    assert GEGLU.cost_bwd((2, 3), torch.bfloat16) == Cost(read_bytes=36, write_bytes=24, flops=84)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_are_hard(dtype):
    for x in (op.make_inputs((8, 64), dtype, seeded())[0].float() for op in (GELU, BIAS_GELU, SWIGLU, GEGLU)):
        assert torch.exp(x[0]).isinf().all(), "e^x of the large row must overflow fp32"
        assert (torch.exp(x[1]) == 0).all() and (1 + torch.erf(x[1]) == 0).all()
        assert x[2].abs().max() < 0.05 and (x[3].diff() >= 0).all() and x[3, 0] == -6
        assert torch.isfinite(x).all()


# ------------------------------------------------------------------------------------------------------------- values


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


def test_second_derivative_of_an_input_that_depends_on_another(device):
    """x is made from the bias: what reaches the bias through x is not to be counted twice."""
    bias = torch.randn(3, generator=seeded(), dtype=torch.float64).to(device).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda b: bias_gelu(torch.outer(b, b), b), (bias,))


def test_expanded_inputs(device):
    row = torch.randn(1, 20, generator=seeded()).to(device)
    for x in (row.expand(4, 20), row.mT.expand(20, 4)):
        torch.testing.assert_close(gelu(x), F.gelu(x))
        torch.testing.assert_close(swiglu(x, x), F.silu(x) * x)
        torch.testing.assert_close(geglu(x, x), F.gelu(x) * x)
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


# ------------------------------------------------------------------------------------------------------------- errors


# ------------------------------------------------------------------------------------------------------------ PyTorch


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "fn", "options"), CASES)
def test_shapes_of_models(op, fn, options, dtype, device):
    for shape in ((3, 4096), (4, 33, 11008), (2049, 129), (100_000, 3)):
        check(op, fn, shape, dtype, device, **options)
    check(op, fn, (300, 1000), dtype, device, transposed, dy_layout=padded_rows, **options)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
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
