"""LayerNorm's gradients of long rows that stay on an SM of Hopper, in the interpreter and on such a GPU."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from gpukit import kernels
from gpukit.kernels import _launch, _norms_hopper
from gpukit.kernels import _norm_backward as norm_backward
from gpukit.kernels import _rows_choices as choices
from gpukit.kernels._device import multiprocessors, properties
from gpukit.kernels._launch import power_of_2
from gpukit.kernels._rows_choices import RowsConfig
from gpukit.kernels.norms import norm_fwd
from gpukit.testing import assert_close
from tests.kernels.cases import compile_for_hopper, seeded


def torch_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


@pytest.fixture
def hopper(device):
    if device == "cuda" and properties(torch.device(device)).compute_capability[0] != 9:
        pytest.skip("kernels for Hopper")
    return device


def random(*shape, dtype, seed=0, device="cpu"):
    return torch.randn(shape, generator=seeded(seed)).mul_(3).to(dtype).to(device)


def empty(like, *shape, dtype=None):
    """Room of which a number that is not written is seen."""
    return torch.full(shape or like.shape, float("nan"), dtype=dtype or like.dtype, device=like.device)


@pytest.mark.parametrize(
    ("M", "N", "dtype", "weights", "stages", "warps"),
    [
        (7, 4096, torch.bfloat16, (torch.bfloat16, torch.bfloat16), 3, 8),
        (5, 3008, torch.float16, (torch.float32, None), 2, 4),
        (3, 1024, torch.float32, (None, torch.float32), 2, 4),
        (1, 2048, torch.bfloat16, (None, None), 1, 4),
    ],
    ids=str,
)
def test_gradients_of_layer_norm(M, N, dtype, weights, stages, warps, hopper):
    x, dy = (random(M, N, dtype=dtype, seed=i, device=hopper) + i for i in (1, 0))
    weight, bias = (None if w is None else random(N, dtype=w, seed=2, device=hopper) for w in weights)

    def expected(kind):
        given = [None if t is None else t.to(kind).requires_grad_() for t in (x, weight, bias)]
        y = F.layer_norm(given[0], (N,), *given[1:], 1e-5)
        found = iter(torch.autograd.grad(y, [t for t in given if t is not None], dy.to(kind)))
        return [None if t is None else next(found) for t in given]

    mean, variance = x.double().mean(-1), x.double().var(-1, correction=0)
    stats = torch.stack([(variance + 1e-5).rsqrt(), mean]).float()
    config = RowsConfig(power_of_2(N) * x.element_size(), stages, warps)
    found = _norms_hopper.layer_norm_gradients(dy, x, weight, bias, stats, empty(x), config)
    for result, true, native in zip(found, expected(torch.float64), expected(torch.float32), strict=True):
        assert (result is None) == (true is None)
        if result is not None:
            assert_close(result, true, native.to(result.dtype), gradient=True)


# ------------------------------------------------------------------------------------------------------------- choices
SMALL = choices.Choice(4096, 8192, 2, RowsConfig(8192, 2, 4))


@pytest.fixture
def taken(monkeypatch):
    """Short rows are for Hopper, and the GPU is one. Returns the kernels that were launched for it."""
    if torch.cuda.is_available():
        pytest.skip("a GPU has choices of its own")
    launched = []

    def launch(kernel, *given, **constants):
        launched.append(kernel.fn.__name__)
        return _launch.launch(kernel, *given, **constants)

    monkeypatch.setattr(_norms_hopper, "launch", launch)
    monkeypatch.setattr(choices, "for_hopper", lambda name, device: importlib.import_module(f"gpukit.kernels.{name}"))
    monkeypatch.setattr(norm_backward, "LAYER_NORM_BACKWARD", SMALL)
    return launched


def test_the_operation_takes_it(taken):
    x, above = (random(4, 2048, dtype=torch.bfloat16, seed=i) for i in (0, 1))
    results = []
    for kind, layer_norm in (
        (torch.bfloat16, kernels.layer_norm),
        (torch.float64, torch_layer_norm),
        (torch.bfloat16, torch_layer_norm),
    ):
        leaves = [t.to(kind).requires_grad_() for t in (x, above[0], above[1])]
        y = layer_norm(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, above.to(kind))])
    assert taken == ["layer_norm_gradients_kernel"]
    for i, (ours, truth, native) in enumerate(zip(*results, strict=True)):
        assert_close(ours, truth, native, gradient=i >= 1, what=f"result {i}")


def test_what_does_not_fit_goes_to_the_others(taken):
    def fits(x):
        return choices.chosen("_norms_hopper", SMALL, x) is not None

    x = random(4, 2304, dtype=torch.bfloat16)
    assert fits(x) and fits(x[:, 128:])
    assert not fits(x[:1]), "fewer rows than two for each SM"
    assert not fits(x[:, :2112]), "no whole blocks of 128"
    assert not fits(x[:, 4:-124]), "rows that begin anywhere"
    assert not fits(x[:1].expand(4, -1)) and not fits(x.mT.contiguous().mT), "no rows in memory"
    assert not fits(x.float()) and not fits(random(4, 4224, dtype=torch.bfloat16)) and not fits(x[:, :1920])


def test_no_other_gpu_gets_them(device):
    """The choices themselves, here and on every GPU but Hopper's; that nothing else is looked at where there is none."""
    x = torch.empty(8 * multiprocessors(torch.device(device)), 16384, dtype=torch.bfloat16, device=device)
    if device == "cuda" and properties(torch.device(device)).compute_capability[0] == 9:
        pytest.skip("kernels for Hopper")
    assert choices._describable(x) and choices.LAYER_NORM_BACKWARD.least <= 2 * 16384, "Hopper's would"
    assert choices.chosen("_norms_hopper", choices.LAYER_NORM_BACKWARD, x) is None


def test_rows_of_two_tensors_fit_into_shared_memory():
    choice = choices.LAYER_NORM_BACKWARD
    assert choice.most <= choice.config.BYTES
    assert 2 * choice.config.BYTES * choice.config.STAGES + 16 * choice.config.STAGES + 1024 + 200 <= 228 * 1024


FOR_HOPPER = """
from gpukit.kernels import _norms_hopper
from gpukit.kernels._rows_choices import LAYER_NORM_BACKWARD

_norms_hopper.multiprocessors, _norms_hopper.launch = lambda device: 132, launch
_norms_hopper.column_sums = lambda partial, *given: given
x, stats = torch.empty(200, 16384, dtype=torch.bfloat16), torch.empty(2, 200)
_norms_hopper.layer_norm_gradients(x, x, x[0], x[0], stats, x, LAYER_NORM_BACKWARD.config)
"""


def test_it_compiles_without_a_gpu(tmp_path):
    """Nothing lacks registers but the sums, which take nearly all, a dozen of 232."""
    stored, loaded = compile_for_hopper(FOR_HOPPER, tmp_path)
    assert max(stored, loaded) <= 48


# --------------------------------------------------------------------------------------------------------------- a GPU
@pytest.fixture
def chosen(device, monkeypatch):
    """What was chosen of the kernels for Hopper."""
    if choices.for_hopper("_norms_hopper", torch.device(device)) is None:
        pytest.skip("kernels for Hopper")
    names, original = [], norm_backward.chosen

    def spy(name, *given):
        found = original(name, *given)
        names.append(name if found else None)
        return found

    monkeypatch.setattr(norm_backward, "chosen", spy)
    return names


@pytest.mark.gpu("long")
def test_layer_norm_as_chosen(device, chosen, monkeypatch):
    x = random(31 * multiprocessors(torch.device(device)), 16384, dtype=torch.bfloat16).to(device)
    dy, weight, bias = x.flip(0), x[0], x[1]
    _, _, stats = norm_fwd(x, None, weight, bias, 1e-5, True)
    ours = norm_backward.norm_bwd(dy, None, x, weight, bias, stats)
    assert chosen == ["_norms_hopper"]
    again = norm_backward.norm_bwd(dy, None, x, weight, bias, stats)
    assert all(map(torch.equal, ours, again)), "sums in a fixed order"
    monkeypatch.setattr(norm_backward, "chosen", lambda *_: None)
    for a, b in zip(ours, norm_backward.norm_bwd(dy, None, x, weight, bias, stats), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-2)
