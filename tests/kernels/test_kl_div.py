"""KL divergence: the reference and its cost, and the kernels against it."""

import sys

import pytest
import torch
import torch.nn.functional as F

from gpukit.kernels.kl_div import kl_div, kl_div_bwd, kl_div_fwd
from gpukit.op import Cost
from gpukit.reference import kl_div as reference
from gpukit.testing import assert_close, poison

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("batchmean", "mean", "sum", "none")
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs(shape, dtype, log_target):
    x, t = reference.make_inputs(shape, dtype, seeded())
    return (x, (t.double() + 1e-6).log().to(dtype)) if log_target else (x, t)


def check(shape, dtype, device, reduction="batchmean", log_target=False, layout=lambda x: x):
    x, t = inputs(shape, dtype, log_target)
    results, upstream = [], None
    for convert in (torch.Tensor.double, torch.clone):
        leaf = convert(x).clone().requires_grad_()
        loss = reference.kl_div(leaf, convert(t), reduction, log_target)
        upstream = torch.randn(loss.shape, generator=seeded(1)) if upstream is None else upstream
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf, upstream.to(loss.dtype))))
    (truth, true_dx), (native, native_dx) = results
    leaf, target = layout(x.to(device)).detach().requires_grad_(), layout(t.to(device))
    loss = kl_div(leaf, target, reduction, log_target)
    assert_close(loss.detach().cpu(), truth, native, what="loss")
    (dx,) = torch.autograd.grad(loss, leaf, upstream.to(loss))
    assert_close(dx.cpu(), true_dx, native_dx, gradient=True, what="dx")
    assert torch.equal(leaf.detach().cpu(), x) and torch.equal(target.cpu(), t), "an input was changed"


def test_reference_is_pytorchs():
    for shape in reference.OP.test_shapes:
        for log_target in (False, True):
            x, t = inputs(shape, torch.float64, log_target)
            for reduction in REDUCTIONS:
                expected = F.kl_div(x, t, reduction=reduction, log_target=log_target)
                torch.testing.assert_close(reference.kl_div(x, t, reduction, log_target), expected)


def test_cost_by_hand():
    assert reference.cost((2, 3), torch.float32) == Cost(48, 4, 24)
    assert reference.cost_bwd((2, 3), torch.float32) == Cost(24, 24, 6)


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64(dtype, log_target, device):
    for shape in reference.OP.test_shapes:
        for reduction in REDUCTIONS if shape == (5, 65) else ("batchmean", "none"):
            check(shape, dtype, device, reduction, log_target)


def test_any_strides(device):
    for layout in (lambda x: F.pad(x, (3, 5))[..., 3:-5], lambda x: x.mT.contiguous().mT):
        check((6, 65), torch.float32, device, layout=layout)
        check((6, 65), torch.float32, device, "none", layout=layout)


def test_gradient_without_strides(device):
    x, t = (v.to(device) for v in inputs((3, 9), torch.float32, False))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    kl_div(ours, t, "none").sum().backward()
    F.kl_div(theirs, t, reduction="none").sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_gradcheck(device):
    x, t = (v.to(device) for v in inputs((3, 5), torch.float64, False))
    for reduction in REDUCTIONS:
        assert torch.autograd.gradcheck(lambda x, reduction=reduction: kl_div(x, t, reduction), (x.requires_grad_(),))


def test_second_derivatives(device):
    """The divergence is linear in x; a function of it need not be."""
    for log_target in (False, True):
        x, t = (v.to(device) for v in inputs((3, 5), torch.float64, log_target))
        for reduction in ("mean", "none"):
            call = lambda x, r=reduction, log=log_target, t=t: kl_div(x, t, r, log).square()  # noqa: E731
            assert torch.autograd.gradgradcheck(call, (x.requires_grad_(),), fast_mode=True)


def test_gradient_of_the_target_is_pytorchs(device):
    x, t = (v.to(device) for v in inputs((3, 5), torch.float64, True))
    t.requires_grad_()
    (ours,) = torch.autograd.grad(kl_div(x, t, "sum", log_target=True), t)
    (theirs,) = torch.autograd.grad(F.kl_div(x, t, reduction="sum", log_target=True), t)
    torch.testing.assert_close(ours, theirs)


def test_sizes_zero_and_one(device):
    empty = torch.zeros(0, 5, device=device, requires_grad=True)
    assert kl_div(empty, empty.detach()).isnan() and kl_div(empty, empty.detach(), "sum") == 0
    assert torch.autograd.grad(kl_div(empty, empty.detach(), "sum"), empty)[0].shape == (0, 5)
    one = torch.zeros((), device=device)
    torch.testing.assert_close(kl_div(one, one + 1, "sum"), F.kl_div(one, one + 1, reduction="sum"))


def test_every_element_is_written(device, monkeypatch):
    x, t = (v.to(device) for v in inputs((3, 5000), torch.float32, False))
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *size, **options: poison(empty(*size, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *size, **options: poison(empty_like(*size, **options)))
    assert not kl_div_fwd(x, t, False, False).isnan().any() and not kl_div_fwd(x, t, False, True).isnan().any()
    assert not kl_div_bwd(t, torch.ones((), device=device), False, True, 1.0).isnan().any()


def test_deterministic(device):
    x, t = (v.to(device) for v in inputs((7, 5000), torch.float32, False))
    assert torch.equal(kl_div(x, t), kl_div(x, t))


def test_bad_arguments(device, monkeypatch):
    x = torch.zeros(2, 3, device=device)
    for error, message, call in (
        (TypeError, r"one dtype of .* got torch\.float32 and torch\.float16", lambda: kl_div(x, x.half())),
        (TypeError, r"got torch\.int64 and torch\.int64", lambda: kl_div(x.long(), x.long())),
        (ValueError, r"one shape, got \[2, 3\] and \[2, 2\]", lambda: kl_div(x, x[:, :2])),
        (ValueError, r"reduction must be one of 'mean', 'batchmean', 'sum', 'none', got 'avg'", lambda: kl_div(x, x, "avg")),
        (ValueError, r"divides by the first dimension", lambda: kl_div(x[0, 0], x[0, 0], "batchmean")),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    monkeypatch.setattr(sys.modules["gpukit.kernels.kl_div"], "interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"input is on cpu .* TRITON_INTERPRET=1"):
        kl_div(x.cpu(), x.cpu())


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_torch_compile_without_a_graph_break(backend, device):
    torch.compiler.reset()
    x, t = (v.to(device) for v in inputs((3, 65), torch.float32, False))
    x.requires_grad_()
    compiled = torch.compile(lambda x: kl_div(2 * x, t, "batchmean"), fullgraph=True, backend=backend)
    loss, expected = compiled(x), F.kl_div(2 * x, t, reduction="batchmean")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(expected, x))


def test_operator_registration(device):
    x, t = (v.to(device) for v in inputs((3, 5), torch.float32, False))
    for reduced in (True, False):
        torch.library.opcheck(torch.ops.gpukit.kl_div.default, (x.detach().requires_grad_(), t, False, reduced, 0.5))
    torch.library.opcheck(torch.ops.gpukit.kl_div_bwd.default, (t, torch.ones((), device=device), False, True, 0.5))


@pytest.mark.gpu
def test_more_than_2_31_elements(device):
    n = 2**31 + 4096
    x, t = (torch.rand(n, device=device, dtype=torch.bfloat16) for _ in range(2))
    terms = kl_div_fwd(x, t, False, False)
    dx = kl_div_bwd(t, torch.ones((), device=device), False, True, 1.0)
    last = slice(n - 100, n)
    expected = F.kl_div(x[last].float(), t[last].float(), reduction="none")
    torch.testing.assert_close(terms[last].float(), expected, atol=2e-2, rtol=1e-2)
    assert torch.equal(dx[last], -t[last])
