"""Rotary position embedding: the reference and its cost, and the kernel against it."""

import sys

import pytest
import torch

from gpukit.kernels import rope
from gpukit.op import Cost
from gpukit.reference.rope import OP, rotate, tables
from gpukit.testing import assert_close
from tests.kernels.cases import DTYPES, check, every_second, padded_rows, seeded

kernels = sys.modules["gpukit.kernels.rope"]  # the package's attribute of that name is the function


def leaves(shape, dtype, device):
    """q and k, which want gradients, and the tables."""
    q, k, *angles = (x.to(device) for x in OP.make_inputs(shape, dtype, seeded()))
    return [q.requires_grad_(), k.requires_grad_(), *angles]


# ---------------------------------------------------------------------------------------------------------- reference


def test_reference_is_a_product_of_complex_numbers():
    """The definition in the paper: the pair of halves is a complex number, turned by e^(i angle)."""
    q, _, cos, sin = OP.make_inputs((2, 3, 1, 5, 8), torch.float64, seeded())
    turned = torch.complex(*q.chunk(2, -1)) * torch.complex(cos, sin)
    torch.testing.assert_close(rotate(q, cos, sin), torch.cat((turned.real, turned.imag), -1))


def test_tables():
    cos, sin = tables(3, 4, base=100.0)
    torch.testing.assert_close(cos, torch.tensor([[0, 0], [1, 0.1], [2, 0.2]], dtype=torch.float64).cos())
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


def test_scores_depend_on_distances_alone():
    """What the embedding is for: q at position m and k at position n give what they give 5 positions later."""
    cos, sin = tables(12, 8)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=seeded(), dtype=torch.float64)
    at = lambda x, t: rotate(x, cos[t : t + 1], sin[t : t + 1])  # noqa: E731
    torch.testing.assert_close((at(q, 6) * at(k, 2)).sum(), (at(q, 11) * at(k, 7)).sum())


def test_cost_by_hand():
    """q [1, 2, 3, 4], k [1, 1, 3, 4] and two tables [3, 2]: 36 elements turned and 12 more read."""
    assert OP.cost((1, 2, 1, 3, 4), torch.float32) == Cost(read_bytes=192, write_bytes=144, flops=108)
    assert OP.cost_bwd((1, 2, 1, 3, 4), torch.bfloat16) == Cost(read_bytes=96, write_bytes=72, flops=108)


# ------------------------------------------------------------------------------------------------------------- values


def test_heads_after_tokens(device):
    """As a linear layer leaves them, [B, T, H, D], seen through a transpose."""
    q, k, cos, sin = (x.detach() for x in leaves((2, 4, 2, 5, 6), torch.float32, device))
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    for ours, expected in zip(rope(*views, cos, sin), OP.reference(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions_of_each_sequence(dtype, device):
    """Tables [B, T, D/2], where two sequences begin at different positions."""

    def shifted(q, k, cos, sin):
        return q, k, *(torch.stack((table, table.roll(2, 0))) for table in (cos, sin))

    check(OP, rope, (2, 3, 2, 5, 6), dtype, device, convert=shifted)


def test_tables_of_float32(device):
    """Tables keep their precision beside queries in 16 bits, and repeated ones may be cut."""
    q, k, cos, sin = leaves((1, 4, 2, 40, 8), torch.bfloat16, device)
    cos, sin = (table.to(device, torch.float32) for table in tables(40, 8))
    doubled = [torch.cat((table, table), -1)[..., :4] for table in (cos, sin)]
    for turned, again, x in zip(rope(q, k, cos, sin), rope(q, k, *doubled), (q, k), strict=True):
        truth = rotate(x.detach().double(), cos.double(), sin.double())
        assert_close(turned.detach(), truth, truth.to(turned.dtype))
        assert torch.equal(turned, again)


def test_one_of_two_results_is_used(device):
    for used in (0, 1):
        q, k, cos, sin = leaves((1, 2, 1, 3, 4), torch.float32, device)
        gradients = torch.autograd.grad(rope(q, k, cos, sin)[used].sum(), (q, k))
        assert (gradients[1 - used] == 0).all() and (gradients[used] != 0).any()


@pytest.mark.parametrize("shape", [(0, 2, 1, 3, 4), (2, 0, 1, 3, 4), (2, 2, 0, 3, 4), (1, 2, 1, 0, 4), (1, 2, 1, 3, 0)])
def test_sizes_zero(shape, device):
    B, H, H_kv, T, D = shape
    q, k = (torch.randn(B, n, T, D, device=device).requires_grad_() for n in (H, H_kv))
    cos, sin = (torch.randn(T, D // 2, device=device) for _ in range(2))
    ours, expected = rope(q, k, cos, sin), OP.reference(q, k, cos, sin)
    torch.testing.assert_close(ours, expected)
    for dx, x in zip(torch.autograd.grad([y.sum() for y in ours], (q, k)), (q, k), strict=True):
        assert dx.shape == x.shape


def test_expanded_inputs(device):
    """One key head seen as four, and one position for the whole batch."""
    q, k, cos, sin = (x.detach() for x in leaves((2, 4, 1, 5, 6), torch.float32, device))
    k, cos, sin = k.expand(2, 4, 5, 6), cos.expand(2, 5, 3), sin.expand(2, 5, 3)
    for ours, expected in zip(rope(q, k, cos, sin), OP.reference(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, expected)


# ------------------------------------------------------------------------------------------------------------- memory


# ------------------------------------------------------------------------------------------------------------- errors


# ------------------------------------------------------------------------------------------------------------ PyTorch


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_of_models(dtype, device):
    for shape in (
        (2, 32, 8, 100, 128),
        (1, 64, 8, 33, 128),
        (2, 12, 12, 200, 64),
        (1, 71, 1, 17, 80),
        (1, 8, 8, 9, 256),
    ):
        check(OP, rope, shape, dtype, device)
        check(OP, rope, shape, dtype, device, every_second, dy_layout=padded_rows)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_more_than_2_31_elements(device):
    T = 2**31 // (8 * 128) + 2
    q = torch.randn((1, 8, T, 128), device=device, dtype=torch.bfloat16)
    k = q[:, :1]
    cos, sin = (torch.randn((T, 64), device=device, dtype=torch.bfloat16) for _ in range(2))
    turned = rope(q, k, cos, sin)
    for x, y in zip((q, k), turned, strict=True):
        for part in (slice(0, 2), slice(T - 2, T)):
            truth = rotate(x[:, :, part].double(), cos[part].double(), sin[part].double())
            assert_close(y[:, :, part], truth, truth.to(y.dtype))
