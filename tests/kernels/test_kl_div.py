"""KL divergence: the reference and its cost, and the kernels against it."""

import pytest
import torch
import torch.nn.functional as F

from gpukit.kernels.kl_div import kl_div, kl_div_bwd, kl_div_fwd
from gpukit.op import Cost
from gpukit.reference import kl_div as reference
from tests.kernels.cases import seeded

REDUCTIONS = ("batchmean", "mean", "sum", "none")
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")


def inputs(shape, dtype, log_target):
    x, t = reference.make_inputs(shape, dtype, seeded())
    return (x, (t.double() + 1e-6).log().to(dtype)) if log_target else (x, t)


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


def test_gradient_without_strides(device):
    x, t = (v.to(device) for v in inputs((3, 9), torch.float32, False))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    kl_div(ours, t, "none").sum().backward()
    F.kl_div(theirs, t, reduction="none").sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


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


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_more_than_2_31_elements(device):
    n = 2**31 + 4096
    x, t = (torch.rand(n, device=device, dtype=torch.bfloat16) for _ in range(2))
    terms = kl_div_fwd(x, t, False, False)
    dx = kl_div_bwd(t, torch.ones((), device=device), False, True, 1.0)
    last = slice(n - 100, n)
    expected = F.kl_div(x[last].float(), t[last].float(), reduction="none")
    torch.testing.assert_close(terms[last].float(), expected, atol=2e-2, rtol=1e-2)
    assert torch.equal(dx[last], -t[last])
