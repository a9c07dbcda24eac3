"""Products in 8 bits: the operands, the product of what was rounded, and how far rounding may lead."""

import sys

import pytest
import torch

from gpukit import benchmark, hardware, timing
from gpukit.kernels._cast_transpose import SMALLEST, scaled_copies
from gpukit.kernels.fp8_matmul import E4M3, E5M2, fp8_matmul, product
from gpukit.op import Cost
from gpukit.reference.fp8_matmul import OP
from gpukit.testing import assert_close
from tests.kernels.cases import compile_for_hopper, every_second, padded_rows, seeded, transposed

module = sys.modules["gpukit.kernels.fp8_matmul"]  # the name is also that of the function
BOTH = pytest.mark.parametrize("scaling", ["tensor", "row"])
# Half of the distance of two numbers of a format: relative, and of the small ones absolute.
HALF = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}


@pytest.fixture(autouse=True)
def eight_bits(device):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no products in 8 bits on this GPU")


def random(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def factors_of(x, format, scaling):
    """float64 [M, 1]."""
    size = x.double().abs().amax(1, keepdim=True)
    return (size.amax() if scaling == "tensor" else size).expand_as(size) / torch.finfo(format).max


def rounding(x, format, scaling):
    """How far each element of x [M, K] may move when it is rounded."""
    relative, absolute = HALF[format]
    return torch.maximum(relative * x.double().abs(), absolute * factors_of(x, format, scaling)) * (1 + 2.0**-20)


def bound(a, b, formats, scaling):
    """How far a [M, K] @ b [N, K]^T in 8 bits may be from the product of what came in: the rounding of a and of b, of the
    result to bfloat16, and the tensor cores' sums of 128 products."""
    da, db = (rounding(x, format, scaling) for x, format in zip((a, b), formats, strict=True))
    a, b = a.double().abs(), b.double().abs()
    return da @ b.mT + a @ db.mT + da @ db.mT + 1.5 * 2.0**-8 * (a @ b.mT)


# ----------------------------------------------------------------------------------------------------------- operands
@pytest.mark.parametrize("layout", [padded_rows, every_second, transposed])
@pytest.mark.parametrize("format", [E4M3, E5M2])
@BOTH
def test_operands(scaling, format, layout, device):
    x = random(130, 70)
    x[5] *= 1e3
    x[:, 7] *= 1e-3
    copies = scaled_copies(layout(x.to(device)), format, scaling == "row", True, True)
    for copy, factors, plain in (
        (copies.rows, copies.row_factors, x),
        (copies.columns, copies.column_factors, x.mT),
    ):
        assert copy.is_contiguous() and copy.shape == plain.shape and copy.dtype == format
        expected = factors_of(plain, format, scaling)
        found = factors.cpu().double()[:, None].expand_as(expected)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        error = (copy.cpu().double() * found - plain.double()).abs()
        assert bool((error <= rounding(plain, format, scaling)).all())
        largest = copy.cpu().float().abs().amax(1)
        assert (largest.max() if scaling == "tensor" else largest.min()) == torch.finfo(format).max


@BOTH
def test_only_what_was_asked_for(scaling, device):
    x, by_row = random(20, 30).to(device), scaling == "row"
    both = scaled_copies(x, E4M3, by_row, True, True)
    for layout in (torch.clone, transposed):
        rows = scaled_copies(layout(x), E4M3, by_row, True, False)
        columns = scaled_copies(layout(x), E4M3, by_row, False, True)
        assert rows.columns is rows.column_factors is columns.rows is columns.row_factors is None
        for one, of_both in ((rows.rows, both.rows), (columns.columns, both.columns)):
            assert torch.equal(one.view(torch.uint8), of_both.view(torch.uint8))


@BOTH
def test_zeros_have_a_factor(scaling, device):
    copies = scaled_copies(torch.zeros(3, 40, device=device), E4M3, scaling == "row", True, True)
    assert bool((copies.row_factors == SMALLEST).all() and (copies.rows.float() == 0).all())
    a, b = torch.zeros(3, 40, device=device).bfloat16(), random(40, 5).to(device)
    assert bool((fp8_matmul(a, b, scaling) == 0).all())


# ------------------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 1), (40, 50, 300), (33, 65, 128), (3, 70, 17)])
def test_the_product_of_what_was_rounded(M, N, K, formats, device):
    for by_row in (False, True):
        a = scaled_copies(random(M, K).to(device), formats[0], by_row, True, False)
        b = scaled_copies(random(N, K, seed=1).to(device), formats[1], by_row, True, False)
        given = a.rows, b.rows, a.row_factors, b.row_factors
        left, right = (x.rows.cpu().double() * x.row_factors.cpu().double()[:, None] for x in (a, b))
        truth = left @ right.mT
        for dtype in (torch.bfloat16, torch.float16):
            assert_close(product(*given, dtype).cpu(), truth, truth.to(dtype))


@pytest.mark.parametrize(("M", "N", "K"), [(30, 40, 1), (40, 33, 200)])
@BOTH
def test_as_far_as_three_bits_lead(scaling, M, N, K, device):
    """And hardly less: of single products the bound is nearly reached."""
    a, b, dc = random(M, K), random(N, K, seed=1), random(M, N, seed=2)
    a[0] *= 30
    leaves = [x.to(device).requires_grad_() for x in (a, b)]
    c = fp8_matmul(leaves[0], leaves[1].mT, scaling)
    da, db = torch.autograd.grad(c, leaves, dc.to(device))
    gradient = E5M2 if scaling == "tensor" else E4M3
    for name, found, left, right, formats in (
        ("c", c, a, b, (E4M3, E4M3)),
        ("da", da, dc, b.mT, (gradient, E4M3)),
        ("db", db, dc.mT, a.mT, (gradient, E4M3)),
    ):
        error = (found.detach().cpu().double() - left.double() @ right.double().mT).abs()
        allowed = bound(left, right, formats, scaling)
        assert bool((error <= allowed).all()), name
        if K == 1 and name == "c" and scaling == "tensor":  # by row each element is the largest, and nothing is rounded
            assert (error / allowed).max() > 0.6


def test_a_large_row_costs_the_others_nothing_by_row(device):
    a, b = random(16, 64), random(64, 24, seed=1)
    a[3] *= 2.0**18
    truth = a.double() @ b.double()
    error = {s: (fp8_matmul(a.to(device), b.to(device), s).cpu() - truth).norm(dim=1) for s in ("tensor", "row")}
    error = {s: e / truth.norm(dim=1) for s, e in error.items()}
    assert error["row"].max() < 0.06
    assert error["tensor"][3] < 0.06 < 0.5 < error["tensor"][4:].min(), "the largest element decides for all rows"


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen(bad, device):
    a, b = random(8, 32).to(device), random(32, 8, seed=1).to(device)
    a[2, 5] = bad
    assert bool(fp8_matmul(a, b).isnan().all())
    rows = fp8_matmul(a, b, "row").isnan()
    assert bool(rows[2].all()) and int(rows.sum()) == 8
    b[3, 4] = bad
    assert bool(fp8_matmul(a[3:], b, "row").isnan()[:, 4].all())


def test_magnitudes_that_no_format_holds(device):
    """Factors take them all up, one after the other: their product would be no float32."""
    a, b = random(20, 32), random(32, 20, seed=1)
    truth = a.double() @ b.double()
    for scaling in ("tensor", "row"):
        plain = fp8_matmul(a.to(device), b.to(device), scaling).cpu().double()
        assert (plain - truth).norm() < 0.06 * truth.norm()
        large, small = (a.double() * 2.0**80).bfloat16(), (b.double() * 2.0**-80).bfloat16()
        assert torch.equal(fp8_matmul(large.to(device), small.to(device), scaling).cpu().double(), plain)
    tiny = torch.full((4, 4), 2.0**-126, device=device, dtype=torch.bfloat16)
    assert bool((fp8_matmul(tiny, tiny) == 0).all())


# --------------------------------------------------------------------------------------------------- shapes and dtypes
@BOTH
def test_leading_dimensions_and_vectors(scaling, device):
    a, b = random(2, 3, 20), random(20, 8, seed=1)
    a, b = a.to(device), b.to(device)
    c = fp8_matmul(a, b, scaling)
    assert c.shape == (2, 3, 8) and torch.equal(c.view(6, 8), fp8_matmul(a.view(6, 20), b, scaling))
    assert fp8_matmul(a[0, 0], b, scaling).shape == (8,)


@BOTH
def test_sizes_of_zero(scaling, device):
    for M, N, K in ((0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)):
        a, b = (random(*shape).to(device).requires_grad_() for shape in ((M, K), (K, N)))
        c = fp8_matmul(a, b, scaling)
        assert c.shape == (M, N) and bool((c == 0).all())
        da, db = torch.autograd.grad(c, (a, b), torch.ones_like(c))
        assert bool((da == 0).all() and (db == 0).all())


def test_dtypes(device):
    for dtype, result in ((torch.float16,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)):
        a, b = (random(8, 8, seed=i, dtype=dtype).to(device).requires_grad_() for i in range(2))
        c = fp8_matmul(a, b)
        assert c.dtype == result
        assert [x.dtype for x in torch.autograd.grad(c.sum(), (a, b))] == [dtype] * 2


def test_a_gradient_lies_as_its_operand_does(device):
    weight = random(24, 16).to(device).requires_grad_()
    fp8_matmul(random(8, 16, seed=1).to(device), weight.mT).sum().backward()
    assert weight.grad.is_contiguous()


def test_what_is_kept_for_the_backward_pass(device):
    """8 bits of each element, of an operand whose partner has a gradient, and nothing of the others."""
    a, b = random(24, 32).to(device), random(32, 16, seed=1).to(device)
    for for_a, for_b in ((True, False), (False, True), (True, True)):
        c = fp8_matmul(a.clone().requires_grad_(for_a), b.clone().requires_grad_(for_b), "row")
        kept = sum(x.nbytes for x in c.grad_fn.saved_tensors if x is not None)
        assert kept == for_a * (b.numel() + 4 * 32) + for_b * (a.numel() + 4 * 32)
    assert fp8_matmul(a, b).grad_fn is None


# ------------------------------------------------------------------------------------------------------------- the GPU
def test_gpus_without_products_in_8_bits(device):
    a = random(4, 4).to(device)
    with hardware.imagined(hardware.gpu("a100")), pytest.raises(ValueError, match=r"compute capability 8.9 .* got 8.0"):
        if device == "cuda":  # a GPU that is there is not imagined away
            raise ValueError("compute capability 8.9 or later, got 8.0")
        fp8_matmul(a, a)


FOR_HOPPER = """
from gpukit.kernels import _fp8_hopper as hopper

hopper.launch = launch
factors = torch.ones(512)
for a_format, b_format, dtype in (
    (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16), (torch.float8_e5m2, torch.float8_e4m3fn, torch.float16)
):
    a, b = (torch.zeros(512, 512).to(format) for format in (a_format, b_format))
    hopper.fp8_hopper(a, b, torch.zeros(512, 512, dtype=dtype), factors, torch.ones(1).expand(512), 132)
"""


def test_gluon_compiles_without_a_gpu(tmp_path):
    assert compile_for_hopper(FOR_HOPPER, tmp_path) == [0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N", "K"), [(520, 776, 1040), (128, 128, 16), (1000, 4000, 2064), (777, 1001, 333)])
@BOTH
def test_large_products_and_their_gradients(scaling, M, N, K, device):
    """On Hopper by its own kernel, but for sizes that it does not take; with and without tiles that are cut off."""
    a, b, dc = random(M, K).to(device), random(N, K, seed=1).to(device), random(M, N, seed=2).to(device)
    leaves = [x.requires_grad_() for x in (a, b)]
    c = fp8_matmul(a, b.mT, scaling)
    gradient = E5M2 if scaling == "tensor" else E4M3
    found = c, *torch.autograd.grad(c, leaves, dc)
    with torch.no_grad():
        for y, left, right, formats in zip(
            found, (a, dc, dc.mT), (b, b.mT, a.mT), ((E4M3, E4M3), (gradient, E4M3), (gradient, E4M3)), strict=True
        ):
            error = (y.double() - left.double() @ right.double().mT).abs()
            assert bool((error <= bound(left, right, formats, scaling)).all())


@pytest.mark.gpu
def test_sums_of_many_positive_products(device):
    """Of these, sums of the tensor cores' bits alone lose a tenth: cuBLAS does, with use_fast_accum."""
    a, b = (torch.rand(256, 3 * 2**13, generator=seeded(i)).bfloat16().to(device) for i in range(2))
    left, right = (scaled_copies(x, E4M3, False, True, False) for x in (a, b))
    truth = left.rows.double() @ right.rows.double().mT * (left.row_factors * right.row_factors).double()
    c = product(left.rows, right.rows, left.row_factors, right.row_factors, torch.bfloat16)
    error = (c.double() - truth) / truth
    assert error.abs().max() < 1.5 * 2.0**-8 and error.mean().abs() < 2.0**-9, "half a unit of bfloat16 is up to 2^-8"


# ----------------------------------------------------------------------------------------------------------- benchmark
def test_times_may_be_those_of_8_bits(monkeypatch):
    """Twice what bfloat16 can reach is possible here."""
    asked = []
    monkeypatch.setattr(timing, "time_ms", lambda *given, dtype, **options: asked.append(dtype))
    bench = benchmark._Bench(OP, "cpu", "cpu", "", 1, print, print)
    inputs = OP.make_inputs((4, 4, 4), torch.bfloat16, seeded())
    bench._round(OP.reference, "fwd", torch.bfloat16, inputs, Cost(1, 1, 1), False)
    assert asked == [E4M3]
