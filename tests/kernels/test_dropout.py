"""Dropout: the reference and its random numbers, and the kernel against it."""

import re
import sys

import pytest
import torch
import torch.nn.functional as F

from gpukit import benchmark
from gpukit.kernels import _launch, dropout
from gpukit.op import Cost
from gpukit.reference.dropout import OP, by_hand, kept, philox
from gpukit.reference.dropout import dropout as reference
from gpukit.testing import assert_close, poison
from tests.kernels.cases import DTYPES, LAYOUTS, contiguous, every_second, seeded

kernels = sys.modules["gpukit.kernels.dropout"]  # the package's attribute of that name is the function
LANES = kernels.LANES.value
BLOCK = 4 * LANES


def check(shape, dtype, device, layout=contiguous, dy_layout=contiguous, p=0.3, seed=5):
    """y and dx against the reference in float64, and nothing that went in changed."""
    x, dy = (torch.randn(shape, generator=seeded(i), dtype=torch.float64).to(dtype) for i in (0, 1))
    given, upstream = layout(x.to(device)).detach().requires_grad_(), dy_layout(dy.to(device))
    y = dropout(given, p, seed)
    (dx,) = torch.autograd.grad(y, given, upstream)
    for result, into in ((y, x), (dx, dy)):
        assert_close(result.detach().cpu(), reference(into.double(), p, seed), reference(into, p, seed))
    assert torch.equal(given.detach().cpu(), x) and torch.equal(upstream.cpu(), dy), "an input was changed"


# ---------------------------------------------------------------------------------------------------------- reference
@pytest.mark.parametrize(
    ("seed", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0_A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_authors_numbers(seed, counter, expected):
    """The known answers of ten rounds, https://github.com/DEShawResearch/random123/blob/main/tests/kat_vectors."""
    words = philox(seed, tuple(torch.tensor([c]) for c in counter), rounds=10)
    assert tuple(int(word) for word in words) == expected


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_and_the_mean(p):
    """What is kept is as likely as it should be, in all parts of a block; seeds and neighbours have nothing in common."""
    n = 64 * BLOCK
    deviation = (p * (1 - p)) ** 0.5
    masks = [kept((n,), p, seed).double() for seed in (0, 1)]
    for mask in masks:
        by_word = mask.view(-1, 4, LANES).mean((0, 2))
        assert ((by_word - (1 - p)).abs() < 5 * deviation / (n / 4) ** 0.5).all()
    centred = [(mask - (1 - p)) / deviation for mask in masks]
    for other in (centred[1], *(centred[0].roll(k) for k in (1, LANES, BLOCK))):
        assert abs(float((centred[0] * other).mean())) < 5 / n**0.5
    assert float(reference(torch.ones(n), p, 0).mean()) == pytest.approx(1, abs=5 * deviation / (1 - p) / n**0.5)


def test_costs_by_hand():
    assert OP.cost((2, 3), torch.float32) == OP.cost_bwd((2, 3), torch.float32) == Cost(24, 24, 6)
    assert OP.cost((2, 3), torch.bfloat16) == Cost(read_bytes=12, write_bytes=12, flops=6)


def test_benchmarks_know_a_dropout_by_what_all_have_in_common(device):
    inputs = benchmark.make_inputs(OP, (64, 4096), torch.bfloat16, device)
    truth = benchmark._Truth(OP, inputs, OP.bench_modes)
    assert [truth.refutes(f) for f in (OP.reference, OP.library, by_hand, dropout)] == [""] * 4
    for wrong in (
        lambda x, p, seed: F.dropout(x, 2 * p),
        lambda x, p, seed: F.dropout(x, p) * (1 - p),
        lambda x, p, seed: x / (1 - p),
    ):
        assert truth.refutes(wrong)


# ------------------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_the_reference(dtype, device):
    for shape in (*OP.test_shapes, (BLOCK,), (BLOCK - 1,), (BLOCK + 1,), (3, LANES)):
        check(shape, dtype, device)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda f: f.__name__)
def test_every_layout(layout, device):
    """The number goes by the element's index: strides do not change what is dropped."""
    for shape, dtype in (((2, 1), torch.float32), ((5, 63), torch.bfloat16), ((2, 3, 781), torch.float16)):
        check(shape, dtype, device, layout, dy_layout=layout)
    check((2, 5000), torch.float32, device, layout, dy_layout=every_second)


@pytest.mark.parametrize("p", [0, 0.0, 1, 1.0, 1e-9, 1 - 1e-9, 0.5])
def test_ends_of_p(p, device):
    x = torch.randn(3, 70, generator=seeded()).to(device).requires_grad_()
    y = dropout(x, p, 3)
    (dx,) = torch.autograd.grad(y.sum(), x)
    if p in (0, 1e-9):
        assert torch.equal(y, x) and (dx == 1).all()
    elif p != 0.5:
        assert (y == 0).all() and (dx == 0).all()
    else:
        assert torch.equal(y, torch.where(y == 0, 0, 2 * x)) and torch.equal(dx, torch.where(y == 0, 0.0, 2.0))


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**31, 2**63 - 1])
def test_seeds(seed, device):
    x = torch.ones(2 * BLOCK, device=device)
    expected = kept(tuple(x.shape), 0.5, seed)
    assert torch.equal(dropout(x, 0.5, seed).cpu() != 0, expected)
    assert torch.equal(dropout(x, 0.5, torch.tensor([seed], device=device)).cpu() != 0, expected)
    assert not torch.equal(expected, kept(tuple(x.shape), 0.5, seed ^ 1))


def test_dropped_is_zero_even_where_x_is_not_finite(device):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan], device=device).repeat(100)
    y = dropout(x, 0.5, 0)
    mask = kept((300,), 0.5, 0).to(device)
    assert (y[~mask] == 0).all() and torch.equal(y[mask].isnan(), x[mask].isnan()) and not y[mask].isfinite().any()


@pytest.mark.parametrize("num_warps", [1, 2, 8])
def test_does_not_depend_on_the_launch(num_warps, device, monkeypatch):
    """Nor on the dtype, nor on torch's generator, which it leaves alone."""
    x = torch.randn(3, BLOCK - 70, generator=seeded()).to(device)
    before = torch.get_rng_state()
    y = dropout(x, 0.2, 9)
    monkeypatch.setattr(kernels, "NUM_WARPS", num_warps)
    assert torch.equal(dropout(x, 0.2, 9), y)
    assert torch.equal(dropout(x.double(), 0.2, 9) != 0, y != 0)
    assert torch.equal(dropout(x.view(-1), 0.2, 9).view_as(y), y)
    assert torch.equal(torch.get_rng_state(), before)


def test_float64_and_its_derivatives(device):
    x = torch.randn(4, 5, generator=seeded(), dtype=torch.float64).to(device).requires_grad_()
    torch.testing.assert_close(dropout(x, 0.3, 2).detach().cpu(), reference(x.detach().cpu(), 0.3, 2), rtol=0, atol=0)
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.3, 2), (x,))
    assert torch.autograd.gradgradcheck(lambda x: dropout(x, 0.3, 2), (x,))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4), (1,), (5, 1), (1, 1, 1)], ids=str)
def test_sizes_zero_and_one(shape, device):
    x = torch.ones(shape, device=device, requires_grad=True)
    y = dropout(x, 0.5, 1)
    expected = 2.0 * kept(shape, 0.5, 1)
    assert torch.equal(y.detach().cpu(), expected)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0].cpu(), expected)


# ------------------------------------------------------------------------------------------------------------- memory
def test_every_element_is_written_and_nothing_is_kept(device, monkeypatch):
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **options: poison(empty_like(*a, **options)))
    x = torch.randn(7, 1030, generator=seeded()).to(device).requires_grad_()
    kept_for_backward = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept_for_backward.append(t) or t, lambda t: t):
        y = dropout(x, 0.5, 1)
    assert kept_for_backward == [] and y.is_contiguous() and not y.isnan().any()
    assert not torch.autograd.grad(y.sum(), x)[0].isnan().any()


def test_offsets_beyond_int32(device):
    """Three rows 2^30 elements apart, in 4 GB that are never touched in between."""
    x = torch.empty(2 * 2**30 + 50, dtype=torch.float16, device=device).as_strided((3, 50), (2**30, 1))
    x.copy_(torch.randn(3, 50, generator=seeded()))
    assert torch.equal(dropout(x, 0.5, 1), dropout(x.clone(), 0.5, 1))


# ------------------------------------------------------------------------------------------------------------- errors
def test_bad_arguments(device, monkeypatch):
    x = torch.zeros(2, 3, device=device)
    for p in (-0.1, 1.5, float("nan"), None, torch.tensor(0.5)):
        with pytest.raises(ValueError, match=rf"dropout: p must be a number in \[0, 1\], got {re.escape(repr(p))}"):
            dropout(x, p, 0)
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match=rf"dropout: seed must be 0 to 2\^63 - 1, got {seed}"):
            dropout(x, 0.5, seed)
    with pytest.raises(
        TypeError, match=r"dropout: seed must be an integer or an int64 tensor of one element, got 1\.5"
    ):
        dropout(x, 0.5, 1.5)
    for seed in (torch.zeros(2, dtype=torch.int64), torch.zeros(1)):
        with pytest.raises(ValueError, match=rf"got a tensor of {seed.dtype} \[{len(seed)}\]"):
            dropout(x, 0.5, seed)
    with pytest.raises(ValueError, match="dropout: seed is on meta"):
        dropout(x, 0.5, torch.zeros(1, dtype=torch.int64, device="meta"))
    with pytest.raises(TypeError, match=r"dropout: x must be float16, .* got torch\.int64"):
        dropout(x.long(), 0.5, 0)
    with pytest.raises(ValueError, match=r"dropout: x must have at least one dimension"):
        dropout(torch.tensor(1.0, device=device), 0.5, 0)
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="dropout: x is on cpu; Triton needs a CUDA tensor here"):
        dropout(x.cpu(), 0.5, 0)


def test_a_seed_that_changes_before_the_backward_pass(device):
    x, seed = torch.ones(50, device=device, requires_grad=True), torch.tensor(3, device=device)
    y = dropout(x, 0.5, seed)
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ------------------------------------------------------------------------------------------------------------ PyTorch
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_torch_compile_without_a_graph_break(backend, device):
    torch.compiler.reset()
    compiled = torch.compile(lambda x, s: dropout(x, 0.5, s).sin(), fullgraph=True, backend=backend, dynamic=True)
    for shape, seed in (((3, 33), 4), ((5, 20), 5), ((2, 3, 64), 6), ((7, 7), torch.tensor(7, device=device))):
        x = torch.randn(shape, generator=seeded()).to(device).requires_grad_()
        y = compiled(x, seed)
        expected = reference(x, 0.5, int(seed)).sin()
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(*(torch.autograd.grad(z.sum(), x)[0] for z in (y, expected)))


def test_operator_registration(device):
    x = torch.randn(2, 3, 7, generator=seeded()).to(device).requires_grad_()
    view = x.detach().transpose(0, 1).requires_grad_()
    for given in ((x, 0.5, 3, None), (view, 0.25, 0, torch.tensor(3, device=device))):
        torch.library.opcheck(torch.ops.gpukit.dropout.default, given)


def test_autocast_leaves_the_dtype(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        for dtype in DTYPES:
            assert dropout(torch.zeros(2, 3, dtype=dtype, device=device), 0.5, 0).dtype == dtype


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_of_models(dtype, device):
    for shape in ((3, 4096), (300, 1000), (4, 33, 11008), (2049, 129), (100_000, 3)):
        check(shape, dtype, device)
    for layout in LAYOUTS[1:]:
        check((300, 1000), dtype, device, layout, dy_layout=layout)


@pytest.mark.gpu
@pytest.mark.parametrize("strided", [False, True])
def test_more_than_2_31_elements(strided, device):
    shape = (2**20 + 3, 2048)
    x = torch.ones(shape[0], shape[1] + 8 * strided, device=device, dtype=torch.bfloat16)[:, : shape[1]]
    y = dropout(x, 0.5, 1)
    assert 0.49 < float((y[-4096:] != 0).double().mean()) < 0.51
    i = torch.arange(shape[0] * shape[1] - 2 * BLOCK, shape[0] * shape[1], device=device)
    words = torch.stack(philox(1, (i % 1024, i // 4096, torch.zeros_like(i), torch.zeros_like(i)), rounds=7))
    expected = words.gather(0, (i // 1024 % 4).unsqueeze(0)).squeeze(0) >> 8 >= 2**23
    assert torch.equal(y.view(-1)[-2 * BLOCK :] != 0, expected)


@pytest.mark.gpu
def test_cuda_graph(device):
    """The seed lies on the device: each replay reads it again."""
    x, seed = torch.randn(333, 4096, device=device), torch.tensor(1, device=device)
    dropout(x, 0.5, seed)  # compiles, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dropout(x, 0.5, seed)
    for s in (2, 3):
        seed.fill_(s)
        graph.replay()
        assert torch.equal(y, dropout(x, 0.5, s))
