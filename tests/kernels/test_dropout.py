"""Dropout: the reference and its random numbers, and the kernel against it."""

import sys

import pytest
import torch
import torch.nn.functional as F

from gpukit import benchmark
from gpukit.kernels import dropout
from gpukit.op import Cost
from gpukit.reference.dropout import OP, by_hand, kept, philox
from gpukit.reference.dropout import dropout as reference
from gpukit.testing import poison
from tests.kernels.cases import DTYPES, LAYOUTS, seeded
from tests.kernels.cases import check as check_operation

kernels = sys.modules["gpukit.kernels.dropout"]  # the package's attribute of that name is the function
LANES = kernels.LANES.value
BLOCK = 4 * LANES


def check(shape, dtype, device, *layouts):
    check_operation(OP, dropout, shape, dtype, device, *layouts, native=reference)


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
def test_edges_of_blocks(device):
    for shape in ((BLOCK,), (BLOCK - 1,), (BLOCK + 1,), (3, LANES)):
        check(shape, torch.float32, device)


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


def test_float64_to_the_bit(device):
    x = torch.randn(4, 5, generator=seeded(), dtype=torch.float64)
    assert torch.equal(dropout(x.to(device), 0.3, 2).cpu(), reference(x, 0.3, 2))


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


# ------------------------------------------------------------------------------------------------------------- errors


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


def test_the_operator_takes_a_seed_on_the_device(device):
    x = torch.randn(2, 3, 7, generator=seeded()).to(device).transpose(0, 1).requires_grad_()
    torch.library.opcheck(torch.ops.gpukit.dropout.default, (x, 0.25, 0, torch.tensor(3, device=device)))


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_of_models(dtype, device):
    for shape in ((3, 4096), (300, 1000), (4, 33, 11008), (2049, 129), (100_000, 3)):
        check(shape, dtype, device)
    for layout in LAYOUTS[1:]:
        check((300, 1000), dtype, device, layout, layout)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
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
