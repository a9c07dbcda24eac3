"""Long rows that stay on an SM of Hopper: cross-entropy in place and LayerNorm's gradients, in the interpreter and on such a GPU."""

import importlib
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import gpukit
from gpukit import kernels
from gpukit.kernels import _cross_entropy_hopper, _launch, _norms_hopper, _rows_hopper
from gpukit.kernels import _norm_backward as norm_backward
from gpukit.kernels import _rows_choices as choices
from gpukit.kernels._device import multiprocessors, properties
from gpukit.kernels._launch import power_of_2
from gpukit.kernels._rows_choices import RowsConfig
from gpukit.kernels.norms import norm_fwd
from gpukit.testing import assert_close
from tests.kernels.cases import compile_for_hopper, seeded

cross_entropy_module = sys.modules["gpukit.kernels.cross_entropy"]
TABLES = ("CROSS_ENTROPY", "LAYER_NORM_BACKWARD")
# Small pieces, so that short rows have many: in the ring alone, and in registers as well; the last row's pieces pass the ring's
# end. Columns that are whole pieces, and that are not.
CASES = [
    (7, 4096, torch.bfloat16, RowsConfig(2048, 6, 0, 4)),
    (7, 4096, torch.bfloat16, RowsConfig(2048, 5, 4, 4)),
    (5, 3008, torch.float16, RowsConfig(2048, 5, 2, 4)),
    (3, 3040, torch.float32, RowsConfig(2048, 4, 3, 4, 2)),
    (1, 1024, torch.bfloat16, RowsConfig(2048, 1, 0, 4)),
]


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


def hard(M, N, dtype, device):
    """Rows with -inf, of which one has nothing else, with NaN, and with large numbers, as far as there are rows."""
    x = random(M, N, dtype=dtype, device=device)
    for i, row in enumerate(x[1:]):
        if i == 0:
            row[3:] = -float("inf")
        elif i == 1:
            row.mul_(100)
        elif i == 2:
            row[N // 2] = float("nan")
        elif i == 3:
            row.fill_(-float("inf"))
    return x


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize(("M", "N", "dtype", "config"), CASES, ids=str)
def test_cross_entropy_in_place(M, N, dtype, config, z_loss, hopper):
    x = random(M, N, dtype=dtype, device=hopper)
    target = torch.randint(0, N, (M,), generator=seeded(2)).to(hopper)
    target[-1] = N - 1
    if M > 3:
        target[:3] = torch.tensor([0, -100, 1023])
    scale = torch.tensor(0.5, device=hopper)

    def expected(x):
        x = x.detach().requires_grad_()
        z = torch.where(target == -100, 0.0, x.logsumexp(-1).square()) * z_loss
        losses = F.cross_entropy(x, target, reduction="none") + z
        return losses.detach(), torch.autograd.grad(losses.sum() * scale, x)[0]

    losses, stats = empty(x, M, dtype=torch.float32), empty(x, M, 2, dtype=torch.float32)
    truth, native = expected(x.double()), expected(x.float())
    plain = expected(x)[1]
    maximum = x.max(-1).values.float()
    _cross_entropy_hopper.cross_entropy_rows(x, target, losses, stats, scale, -100, z_loss, config)
    assert_close(losses, truth[0], native[0])
    assert_close(x, truth[1], plain, gradient=True)
    assert torch.equal(stats[:, 0], maximum) and stats.isfinite().all()


def test_a_target_outside_has_no_loss(hopper):
    x = random(4, 1024, dtype=torch.float32, device=hopper)
    target = torch.tensor([5, 1024, -7, -100], device=hopper)
    losses, stats, scale = empty(x, 4), empty(x, 4, 2), torch.ones((), device=hopper)
    _cross_entropy_hopper.cross_entropy_rows(x, target, losses, stats, scale, -100, 0.0, RowsConfig(2048, 3, 0, 4))
    assert losses.isnan().tolist() == [False, True, True, False] and losses[3] == 0 and (x[3] == 0).all()


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
    config = RowsConfig(power_of_2(N) * x.element_size(), stages, 0, warps)
    found = _norms_hopper.layer_norm_gradients(dy, x, weight, bias, stats, empty(x), config)
    for result, true, native in zip(found, expected(torch.float64), expected(torch.float32), strict=True):
        assert (result is None) == (true is None)
        if result is not None:
            assert_close(result, true, native.to(result.dtype), gradient=True)


@pytest.mark.skipif("torch.cuda.is_available()", reason="counted in the interpreter")
def test_each_byte_is_read_once_and_written_once():
    x = random(5, 4096, dtype=torch.bfloat16)
    target, losses, lse, scale = torch.zeros(5, dtype=torch.int64), torch.empty(5), torch.empty(5, 2), torch.ones(())
    with gpukit.trace() as t:
        _cross_entropy_hopper.cross_entropy_rows(x, target, losses, lse, scale, -100, 0.0, RowsConfig(2048, 5, 4, 4))
    (launch,) = t.launches
    aside = (
        target.nbytes + losses.nbytes + lse.nbytes + 5 * (4 + 2)
    )  # with the scale and the target's logit for each row
    assert 0 <= launch.read_bytes - x.nbytes <= aside and 0 <= launch.write_bytes - x.nbytes <= aside


# ------------------------------------------------------------------------------------------------------------- choices
SMALL = choices.Choice(0, 8192, 2, 2048, 5, 1, 4)


@pytest.fixture
def taken(monkeypatch):
    """Short rows are for Hopper, and the GPU is one. Returns the kernels that were launched for it."""
    if torch.cuda.is_available():
        pytest.skip("a GPU has choices of its own")
    launched = []

    def launch(kernel, *given, **constants):
        launched.append(kernel.fn.__name__)
        return _launch.launch(kernel, *given, **constants)

    monkeypatch.setattr(_rows_hopper, "launch", launch)
    monkeypatch.setattr(choices, "for_hopper", lambda name, device: importlib.import_module(f"gpukit.kernels.{name}"))
    monkeypatch.setattr(cross_entropy_module, "CROSS_ENTROPY", (SMALL,))
    monkeypatch.setattr(norm_backward, "LAYER_NORM_BACKWARD", (SMALL._replace(BYTES=4096, STAGES=2),))
    return launched


def test_the_operations_take_them(taken):
    x, above = (random(4, 2048, dtype=torch.bfloat16, seed=i) for i in (0, 1))
    results = []
    for kind, layer_norm, cross_entropy in (
        (torch.bfloat16, kernels.layer_norm, partial(kernels.cross_entropy, inplace=True)),
        (torch.float64, torch_layer_norm, F.cross_entropy),
        (torch.bfloat16, torch_layer_norm, F.cross_entropy),
    ):
        logits, weight, bias = (t.to(kind).requires_grad_() for t in (x, above[0], above[1]))
        loss = cross_entropy(logits.clone(), torch.tensor([3, -100, 2047, 0]))
        outputs = layer_norm(logits, weight, bias), loss.to(kind)
        upstream = above.to(kind), torch.ones((), dtype=kind)
        gradients = [
            torch.autograd.grad(y, logits, dy, retain_graph=True)[0] for y, dy in zip(outputs, upstream, strict=True)
        ]
        gradients += torch.autograd.grad(outputs[0], (weight, bias), above.to(kind))
        results.append([*(y.detach() for y in outputs), *gradients])
    assert taken == [
        "cross_entropy_rows_kernel",
        "layer_norm_gradients_kernel",
        "layer_norm_gradients_kernel",
    ]
    for i, (ours, truth, native) in enumerate(zip(*results, strict=True)):
        assert_close(ours, truth, native, gradient=i >= 2, what=f"result {i}")


def test_what_does_not_fit_goes_to_the_others(taken):
    def fits(x):
        return choices.chosen("_cross_entropy_hopper", (SMALL,), x) is not None

    x = random(4, 2304, dtype=torch.bfloat16)
    assert fits(x) and fits(x[:, 128:])
    assert not fits(x[:3]), "fewer rows than two for each SM"
    assert not fits(x[:, :2112]), "no whole blocks of 128"
    assert not fits(x[:, 4:-124]), "rows that begin anywhere"
    assert not fits(x[:1].expand(4, -1)) and not fits(x.mT.contiguous().mT), "no rows in memory"
    assert not fits(x.float()) and not fits(random(4, 4224, dtype=torch.bfloat16))

    def launched(x, fn):
        taken.clear()
        fn(x)
        return len(taken)

    target, weight = torch.tensor([1, 2, 3, -100]), torch.rand(2304)
    inplace = partial(kernels.cross_entropy, target=target, inplace=True)
    assert launched(x.clone(), inplace) == 1
    assert launched(x, partial(kernels.cross_entropy, target=target)) == 0
    assert launched(x.clone(), partial(inplace, weight=weight)) == 0
    assert launched(x.clone(), partial(inplace, label_smoothing=0.1)) == 0
    with torch.no_grad():
        assert launched(x.clone(), partial(inplace, z_loss=0.1)) == 1


def test_no_other_gpu_gets_them(device):
    """The choices themselves, here and on every GPU but Hopper's; that nothing else is looked at where there is none."""
    x = torch.empty(8 * multiprocessors(torch.device(device)), 16384, dtype=torch.bfloat16, device=device)
    if device == "cuda" and properties(torch.device(device)).compute_capability[0] == 9:
        pytest.skip("kernels for Hopper")
    assert choices._describable(x) and choices._config(choices.LAYER_NORM_BACKWARD, 2 * 16384, 8), "Hopper's would"
    assert choices.chosen("_norms_hopper", choices.LAYER_NORM_BACKWARD, x) is None


@pytest.mark.parametrize("table", TABLES)
def test_a_row_fits_beside_what_is_to_be_free(table):
    for choice in getattr(choices, table):
        tensors = 2 if "BACKWARD" in table else 1
        most = choices._config((choice,), choice.most, choice.rows)
        pieces = -(-choice.most // choice.BYTES)
        assert pieces + choice.ahead <= most.STAGES + most.HELD or (most.HELD == 0 and pieces <= most.STAGES)
        assert choice.PER_SM * (tensors * choice.BYTES * choice.STAGES + 16 * choice.STAGES + 1024 + 200) <= 228 * 1024
        assert choices._config((choice,), choice.least - 1, choice.rows) is None
        assert choices._config((choice,), choice.least, choice.rows - 1) is None


FOR_HOPPER = """
from gpukit.kernels import _cross_entropy_hopper, _norms_hopper, _rows_hopper
from gpukit.kernels import _rows_choices as choices

_rows_hopper.multiprocessors, _rows_hopper.launch = lambda device: 132, launch
_norms_hopper.column_sums = lambda partial, *given: given
row = lambda n: torch.empty(200, n, dtype=torch.bfloat16)
config = lambda name, n: choices._config(getattr(choices, name), 2 * n, 1000)
stats, target, scale = torch.empty(200, 2), torch.empty(200, dtype=torch.int64), torch.empty(())

for V in (32000, 50304, 128256):
    x = row(V)
    _cross_entropy_hopper.cross_entropy_rows(x, target, stats, stats, scale, -100, 0.0, config("CROSS_ENTROPY", V))
x, stats = row(16384), torch.empty(2, 200)
_norms_hopper.layer_norm_gradients(x, x, x[0], x[0], stats, x, config("LAYER_NORM_BACKWARD", 16384))
"""


def test_they_compile_without_a_gpu(tmp_path):
    """Nothing lacks registers but the sums of LayerNorm's gradients, which take nearly all, a dozen of 232."""
    *others, stored, loaded = compile_for_hopper(FOR_HOPPER, tmp_path)
    assert others == [0] * 6 and max(stored, loaded) <= 48


# --------------------------------------------------------------------------------------------------------------- a GPU
@pytest.fixture
def chosen(device, monkeypatch):
    """What was chosen of the kernels for Hopper."""
    if choices.for_hopper("_rows_hopper", torch.device(device)) is None:
        pytest.skip("kernels for Hopper")
    names = []
    for module in (cross_entropy_module, norm_backward):
        original = module.chosen

        def spy(name, *given, original=original):
            found = original(name, *given)
            names.append(name if found else None)
            return found

        monkeypatch.setattr(module, "chosen", spy)
    return names


def rows_for(device, N):
    return random(31 * multiprocessors(torch.device(device)), N, dtype=torch.bfloat16).to(device)


@pytest.mark.gpu("long")
@pytest.mark.parametrize("V", [32000, 50304, 128256])
def test_cross_entropy_as_chosen(V, device, chosen, monkeypatch):
    x = rows_for(device, V)
    target = torch.randint(0, V, (len(x),), generator=seeded(1)).to(device)
    target[::7] = -100
    scale = torch.tensor(1.0, device=device)
    ours, others = x.clone(), x.clone()
    losses, stats, _ = cross_entropy_module.cross_entropy_fwd(ours, target, -100, 0.0, 1e-4, scale=scale)
    assert chosen == ["_cross_entropy_hopper"]
    monkeypatch.setattr(cross_entropy_module, "chosen", lambda *_: None)
    losses_others, stats_others, _ = cross_entropy_module.cross_entropy_fwd(
        others, target, -100, 0.0, 1e-4, scale=scale
    )
    torch.testing.assert_close(losses, losses_others, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats, stats_others, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, others, rtol=2**-7, atol=1e-9)


@pytest.mark.gpu("long")
def test_layer_norm_as_chosen(device, chosen, monkeypatch):
    x = rows_for(device, 16384)
    dy, weight, bias = x.flip(0), x[0], x[1]
    _, _, stats = norm_fwd(x, None, weight, bias, 1e-5, True)
    ours = norm_backward.norm_bwd(dy, None, x, weight, bias, stats)
    assert chosen == ["_norms_hopper"]
    again = norm_backward.norm_bwd(dy, None, x, weight, bias, stats)
    assert all(map(torch.equal, ours, again)), "sums in a fixed order"
    monkeypatch.setattr(norm_backward, "chosen", lambda *_: None)
    for a, b in zip(ours, norm_backward.norm_bwd(dy, None, x, weight, bias, stats), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-2)
