"""Products in 8 bits: the operands, made in the interpreter here, and a layer on a GPU."""

import pytest
import torch
from torch import nn

from gpukit.kernels._cast_transpose import cast_transpose
from gpukit.train import fp8
from gpukit.train.model import GPT, GPTConfig


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("M", "N"), [(1, 1), (130, 70), (64, 128)])
def test_cast_transpose(dtype, M, N, device):
    torch.manual_seed(M)
    x = (100 * torch.randn(M, 2 * N)).bfloat16()[:, ::2].to(device)
    x[0, 0] = 1e30  # beyond the format
    factor = torch.tensor(0.3, device=device)
    largest = torch.finfo(dtype).max
    # A GPU's own division is good to 2 units of float32, and where a quotient lies between two numbers of 8 bits, it decides.
    near = [
        (x.float() / factor * (1 + unit)).clamp(-largest, largest).to(dtype).float() for unit in (-(2.0**-22), 2.0**-22)
    ]
    rows, columns = cast_transpose(x, factor, dtype)
    assert rows.is_contiguous() and columns.is_contiguous() and rows.dtype == columns.dtype == dtype
    assert bool((torch.minimum(*near) <= rows.float()).all() and (rows.float() <= torch.maximum(*near)).all())
    assert torch.equal(columns.float(), rows.float().T)


def test_nan_stays_nan(device):
    x = torch.full((2, 3), float("nan"), device=device)
    rows, columns = cast_transpose(x, torch.ones((), device=device), torch.float8_e4m3fn)
    assert rows.float().isnan().all() and columns.float().isnan().all()


def test_what_is_refused(device):
    x, one = torch.ones(2, 2, device=device), torch.ones((), device=device)
    with pytest.raises(ValueError, match=r"x must be a matrix \[M, N\]"):
        cast_transpose(x[0], one, torch.float8_e5m2)
    with pytest.raises(TypeError, match="x must be float32, float16 or bfloat16"):
        cast_transpose(x.double(), one, torch.float8_e5m2)
    with pytest.raises(ValueError, match="factor must be one float32"):
        cast_transpose(x, x, torch.float8_e5m2)
    with pytest.raises(TypeError, match=r"dtype must be torch\.float8"):
        cast_transpose(x, one, torch.int8)


def test_the_factor_uses_the_whole_range(device):
    x = torch.tensor([[0.5, -3.0], [0.0, 1.0]], device=device)
    rows, columns, factor = fp8.rounded(x, fp8.FORWARD)
    assert rows.float().abs().max() == torch.finfo(fp8.FORWARD).max
    torch.testing.assert_close(rows.float() * factor, x, rtol=1 / 16, atol=0)
    torch.testing.assert_close(columns.float() * factor, x.T, rtol=1 / 16, atol=0)


def test_which_layers_are_converted():
    model = GPT(GPTConfig(vocab_size=64, context=16, layers=1, heads=2, hidden=32)).bfloat16()
    weights = {name: parameter for name, parameter in model.named_parameters()}
    fp8.to_fp8(model)
    assert type(model.head) is nn.Linear
    assert all(type(m) is fp8.Linear for m in model.blocks.modules() if isinstance(m, nn.Linear))
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())
    with pytest.raises(ValueError, match=r"must be bfloat16, got torch.float32 in blocks.0.attention.qkv"):
        fp8.to_fp8(GPT(model.config))
    odd = GPT(GPTConfig(vocab_size=64, context=16, layers=1, heads=1, hidden=24)).bfloat16()
    with pytest.raises(ValueError, match="multiples of 16"):
        fp8.to_fp8(odd)


@pytest.mark.gpu
def test_a_layer_and_its_gradients(device):
    torch.manual_seed(0)
    layer = nn.Linear(256, 128, device=device, dtype=torch.bfloat16)
    x = torch.randn(3, 64, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(3, 64, 128, device=device, dtype=torch.bfloat16)
    expected = (layer(x), *torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), dy))
    layer.__class__ = fp8.Linear
    found = (layer(x), *torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), dy))
    for got, wanted in zip(found, expected, strict=True):
        assert got.shape == wanted.shape
        assert (got - wanted).norm() < 0.08 * wanted.norm()
