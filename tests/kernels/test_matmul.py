"""Matmul: the reference, and the kernels against it, with every epilogue, layout and configuration."""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F

import gpukit
from gpukit import hardware
from gpukit.kernels._device import properties
from gpukit.kernels._matmul_choices import FP8, HOPPER, Config, Problem, _by_tma, _in_gluon, choices
from gpukit.kernels.matmul import ACTIVATIONS, Linear, matmul, matmul_fwd
from gpukit.op import Cost
from gpukit.reference import matmul as reference
from gpukit.reference.matmul import OP
from gpukit.simulator.interpreter import numerics
from gpukit.testing import assert_close
from tests.kernels.cases import (
    compile_for_hopper,
    contiguous,
    every_second,
    padded_rows,
    seeded,
    transposed,
)

module = sys.modules["gpukit.kernels.matmul"]  # the name is also that of the function
persistent = sys.modules["gpukit.kernels._matmul_persistent"]

# Configurations that the interpreter runs in no time: more than one tile, step and share.
SPLIT = Config(16, 16, 16, 4, 1, 1, SPLIT_K=3)
BY_TMA = Config(16, 32, 16, 4, 1, 1, PIECES=2)
IN_GLUON = next(config for config in HOPPER if config.GLUON)._replace(BLOCK_K=64)  # of 16-bit numbers


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def full_check(M, N, K, dtype, device, activation=None, bias=False, residual=False, config=None, monkeypatch=None):
    """Result and all gradients against float64."""
    columns = 2 * N if activation == "swiglu" else N
    tensors = [random(M, K, dtype=dtype), random(K, columns, seed=1).div(max(K, 1) ** 0.5).to(dtype)]
    tensors += [random(columns, seed=2, dtype=dtype)] if bias else [None]
    tensors += [random(M, N, seed=3, dtype=dtype)] if residual else [None]
    dy = random(M, N, seed=4, dtype=dtype)
    results = []
    for convert in (torch.Tensor.double, torch.clone):
        a, b, *more = (None if x is None else convert(x).requires_grad_() for x in tensors)
        y = reference.matmul(a, b, more[0], activation, more[1])
        leaves = [x for x in (a, b, *more) if x is not None]
        results.append([y.detach(), *torch.autograd.grad(y, leaves, convert(dy))])
    ours = [None if x is None else x.to(device).requires_grad_() for x in tensors]
    if config is not None:
        monkeypatch.setattr(module, "choices", lambda *_: (config,))
        monkeypatch.setattr(module, "_known", {})  # else what was chosen for these sizes before would be used
    y = matmul(ours[0], ours[1], ours[2], activation, residual=ours[3])
    given = [y.detach(), *torch.autograd.grad(y, [x for x in ours if x is not None], dy.to(device))]
    for i, (result, truth, native) in enumerate(zip(given, *results, strict=True)):
        assert_close(result.cpu(), truth, native, gradient=i > 0, what=f"{'gradient' if i else 'result'} {i}")


# ---------------------------------------------------------------------------------------------------------- reference
def test_reference_is_pytorchs():
    for shape in OP.test_shapes:
        a, b = OP.make_inputs(shape, torch.float64, seeded())
        torch.testing.assert_close(reference.matmul(a, b), a @ b)
        assert a.shape == (shape[0], shape[2]) and b.shape == (shape[2], shape[1])
    a, b, bias = random(3, 5), random(5, 8, seed=1), random(8, seed=2)
    torch.testing.assert_close(reference.matmul(a, b, bias, "gelu"), F.gelu(F.linear(a, b.mT, bias)))
    torch.testing.assert_close(reference.matmul(a, b, bias, "gelu_tanh"), F.gelu(a @ b + bias, approximate="tanh"))
    gate, up = (a @ b).chunk(2, -1)
    torch.testing.assert_close(reference.matmul(a, b, None, "swiglu", gate), F.silu(gate) * up + gate)


def test_cost_by_hand():
    assert reference.cost((2, 3, 5), torch.bfloat16) == Cost(2 * (10 + 15), 2 * 6, 60)
    assert reference.cost_bwd((2, 3, 5), torch.bfloat16) == Cost(2 * (10 + 15 + 6), 2 * 25, 120)
    assert reference.bias_gelu_cost((2, 3, 5), torch.float32) == Cost(4 * (25 + 3), 4 * 6, 60 + 36)
    assert reference.naive_traffic((2, 3, 5), torch.float32) == 6 * 2 * 5 * 4
    assert reference.tiled_traffic((64, 96, 10), torch.float32, 32, 48) == (2 * 640 + 2 * 960) * 4


# ------------------------------------------------------------------------------------------------------------- values


def test_layouts_may_differ(device):
    a, b = random(35, 50), random(50, 40, seed=1)
    truth = a.double() @ b.double()
    for left, right in itertools.product((contiguous, transposed, padded_rows, every_second), repeat=2):
        assert_close(matmul(left(a.to(device)), right(b.to(device))).cpu(), truth, a @ b, what=left.__name__)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
def test_epilogues(activation, device):
    full_check(35, 40, 50, torch.float32, device, activation, bias=True, residual=True)
    full_check(5, 33, 20, torch.bfloat16, device, activation)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
def test_shares_of_k(activation, device, monkeypatch):
    full_check(20, 30, 100, torch.float32, device, activation, True, True, SPLIT, monkeypatch)
    if activation is None:
        full_check(3, 5, 7, torch.float16, device, config=SPLIT, monkeypatch=monkeypatch)  # shares of nothing


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
def test_by_descriptors(activation, device, monkeypatch):
    """16 divides no row of 34 or 50 columns in bytes: operands are copied and the result goes out by pointers."""
    full_check(35, 40, 48, torch.bfloat16, device, activation, True, True, BY_TMA, monkeypatch)
    if activation != "swiglu":  # whose columns of `up` must begin at an aligned address
        full_check(35, 34, 50, torch.bfloat16, device, activation, True, False, BY_TMA, monkeypatch)


def test_descriptors_of_every_layout(device):
    a, b = random(35, 48, dtype=torch.bfloat16), random(48, 40, seed=1, dtype=torch.bfloat16)
    truth = a.double() @ b.double()
    for left, right in itertools.product((contiguous, transposed, padded_rows), repeat=2):
        for pieces, flatten in ((1, False), (4, True)):
            config = BY_TMA._replace(BLOCK_N=64, PIECES=pieces, FLATTEN=flatten)
            x, y = left(a.to(device))[None], right(b.to(device))[None]
            c, _ = matmul_fwd(x, y, None, None, None, "", "ieee", False, False, config=config)
            assert_close(c[0].cpu(), truth, a @ b, what=f"{left.__name__} {right.__name__}")


FOR_HOPPER = """
from gpukit.kernels import _matmul_hopper as hopper
from gpukit.kernels._matmul_choices import HOPPER
from gpukit.kernels.matmul import _constants

hopper.launch = launch
config = next(config for config in HOPPER if config.GLUON)._replace(BLOCK_K=64)
for dtype, activation in ((torch.bfloat16, ""), (torch.float16, "gelu")):
    x = torch.zeros(512, 512, dtype=dtype)
    bias, residual = (x[0], x) if activation else (None, None)
    a, b = (x.mT, x) if activation else (x, x.mT)
    hopper.matmul_hopper(a, b, x, None, bias, residual, None, 132, _constants(config, activation, "ieee", dtype))
"""


@pytest.mark.prove
def test_gluon_compiles_without_a_gpu(tmp_path):
    assert compile_for_hopper(FOR_HOPPER, tmp_path) == [0] * 4


def test_described_copies_only_what_it_must():
    described = persistent.described
    x = torch.zeros(32, 64, dtype=torch.bfloat16)
    for ready in (x, x.mT, x[:, :40], x[::2], x[:, 8:]):
        assert described(ready) is ready
    for view in (x[:, 1:], x[:, :63].contiguous(), x[:, ::2], x[:1].expand(32, 64), x[:, :1].expand(32, 64), x.mT[3:]):
        copy = described(view)
        assert copy.data_ptr() != view.data_ptr() and torch.equal(copy, view)
        assert described(copy) is copy
    rows = torch.zeros(32, 64).to(FP8)
    assert described(rows, True) is rows and described(rows.mT, False).data_ptr() == rows.data_ptr()
    along_k = described(rows, False)
    assert along_k.stride() == (1, 32) and described(along_k, False) is along_k


def test_batches(device):
    def truth(x, y):
        return x.double() @ y.double()

    a, b = random(2, 3, 20, 30), random(2, 3, 30, 40, seed=1)
    for x, y in (
        (a, b), (a, b[:, :1]), (a[:1], b), (a, b[0, 0]), (a[0, 0], b), (a.transpose(0, 1), b.transpose(0, 1)),
        (a.mT.contiguous().mT, b.mT.contiguous().mT), (a[..., :0], b[..., :0, :]), (a[:0], b[0, 0]), (a[0], b),
    ):  # fmt: skip
        c = matmul(x.to(device), y.to(device))
        assert_close(c.cpu(), truth(x, y), x @ y, what=f"{list(x.shape)} {list(y.shape)}")
        assert c.is_contiguous()


def test_gradients_of_broadcast_operands(device):
    a, b, residual = random(2, 20, 30), random(30, 40, seed=1), random(2, 20, 40, seed=2)
    for x, y in (
        (a, b),
        (a, b.expand(2, 30, 40)),
        (a[:1].expand(2, 20, 30), b.expand(2, 1, 30, 40).reshape(2, 30, 40)),
    ):
        leaves = [t.clone().to(device).requires_grad_() for t in (x, y, residual)]
        plain = [t.detach().clone().requires_grad_() for t in leaves]
        matmul(leaves[0], leaves[1], activation="gelu", residual=leaves[2]).square().sum().backward()
        (F.gelu(plain[0] @ plain[1]) + plain[2]).square().sum().backward()
        for ours, theirs in zip(leaves, plain, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_sizes_of_zero_and_one(device):
    for M, N, K in itertools.product((0, 1, 2), repeat=3):
        a, b, bias = random(M, K), random(K, N, seed=1), random(N, seed=2)
        c = matmul(a.to(device), b.to(device), bias.to(device), "gelu").cpu()
        torch.testing.assert_close(c, F.gelu(a @ b + bias), rtol=1e-5, atol=1e-5)


def test_a_column(device):
    a, b = random(70, 33), random(33, 1, seed=1)
    c = matmul(a.to(device), b.to(device)).cpu()
    assert_close(c.mT, (a.double() @ b.double()).mT, (a @ b).mT)  # as a row: one element has no scale of its own


def test_precisions(device):
    a, b = random(30, 64), random(64, 40, seed=1)
    truth = a.double() @ b.double()
    error = {p: (matmul(a.to(device), b.to(device), precision=p).cpu() - truth).abs().max() for p in ("ieee", "tf32")}
    assert error["ieee"] < 1e-5 < 1e-4 < error["tf32"] < 0.05
    x, y = a.double().to(device), b.double().to(device)
    torch.testing.assert_close(matmul(x, y).cpu(), truth, rtol=1e-14, atol=1e-13)


def test_fp8(device):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 in this GPU's tensor cores")
    a, b = random(40, 64).to(FP8), random(50, 64, seed=1).to(FP8).mT
    scale = torch.tensor([0.25], device=device)
    c = matmul(a.to(device), b.to(device), scale=scale).cpu()
    truth = a.double() @ b.double() / 4
    assert c.dtype == torch.bfloat16
    assert_close(c, truth, truth.to(torch.bfloat16), what="fp8")
    for config in (BY_TMA._replace(BLOCK_K=32), Config(16, 16, 32, 4, 1, 1)):
        x, y = a.to(device)[None], b.contiguous().to(device)[None]
        c, _ = matmul_fwd(x, y, None, None, scale, "", "ieee", False, False, config=config)
        assert_close(c[0].cpu(), truth, truth.to(torch.bfloat16), what="fp8")


def test_scale_comes_before_the_bias(device):
    a, b, bias = (x.to(device).requires_grad_() for x in (random(5, 6), random(6, 8, seed=1), random(8, seed=2)))
    scale = torch.tensor(0.5, device=device)
    c = matmul(a, b, bias, "gelu", scale=scale)
    expected = F.gelu(a @ b * 0.5 + bias)
    torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-5)
    upstream = random(5, 8, seed=3).to(device)
    for ours, theirs in zip(*(torch.autograd.grad(y, (a, b, bias), upstream) for y in (c, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradcheck(device):
    a, b, bias = (random(*shape, dtype=torch.float64).to(device).requires_grad_() for shape in ((2, 3), (3, 4), (4,)))
    for activation in (None, "gelu", "swiglu"):
        f = lambda *inputs, activation=activation: matmul(*inputs, activation)  # noqa: E731
        assert torch.autograd.gradcheck(f, (a, b, bias), fast_mode=True)
    residual = random(2, 4, seed=1, dtype=torch.float64).to(device).requires_grad_()
    f = lambda *inputs: matmul(*inputs[:3], "gelu", residual=inputs[3])  # noqa: E731
    assert torch.autograd.gradgradcheck(f, (a, b, bias, residual), fast_mode=True)


def test_large_values_do_not_become_nan(device):
    a = torch.full((4, 16), 1e4, device=device)
    b = torch.full((16, 32), -1e4, device=device)
    for activation in ("gelu", "gelu_tanh"):
        assert torch.equal(matmul(a, b, activation=activation).abs().cpu(), torch.zeros(4, 32))
    assert torch.isinf(matmul(a, -b, activation="swiglu")).sum() == 0


def test_deterministic_and_inputs_unchanged(device):
    a, b = random(40, 200).to(device), random(200, 40, seed=1).to(device)
    before = a.clone(), b.clone()
    for config in (None, SPLIT):
        first, again = (
            matmul_fwd(a[None], b[None], None, None, None, "", "ieee", False, False, config=config) for _ in range(2)
        )
        assert torch.equal(first[0], again[0])
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


def test_autotune_gives_the_same(device):
    a, b = random(33, 64).to(device), random(64, 40, seed=1).to(device)
    torch.testing.assert_close(matmul(a, b, autotune=True), matmul(a, b))


# ------------------------------------------------------------------------------------------------------------- choices
def imagined(gpu):
    return hardware.imagined(hardware.gpu(gpu))


def chosen(gpu, M, N, K, dtype=torch.bfloat16, precision="ieee", gated=False, by_tma=None, wide=True):
    gpu = hardware.gpu(gpu)
    tma = gpu.compute_capability >= (9, 0) and dtype.itemsize <= 2 if by_tma is None else by_tma
    in_gluon = tma and dtype.itemsize == 2 and not gated and gpu.compute_capability < (10, 0)
    return choices(Problem(1, M, N, K, dtype, gpu, precision, gated, wide, tma, in_gluon))


def test_large_products_take_large_tiles_by_descriptors():
    for shape in ((4096, 4096, 4096), (8192, 28672, 8192), (16384, 16384, 16384)):
        best = chosen("h200", *shape)[0]
        assert best.GLUON and best.BLOCK_M * best.BLOCK_N == 128 * 256
        assert not chosen("h200", *shape, gated=True)[0].GLUON and not chosen("h200", *shape, dtype=FP8)[0].GLUON
        best = chosen("b200", *shape)[0]
        assert best.descriptors and not best.GLUON and best.BLOCK_M * best.BLOCK_N >= 64 * 256
        best = chosen("h200", *shape, by_tma=False)[0]
        assert not best.descriptors and best.BLOCK_M * best.BLOCK_N >= 128 * 128
        assert chosen("a100", *shape)[0].SPLIT_K == 1


@pytest.mark.parametrize(
    ("shape", "tile"),
    [((1024, 1024, 1024), (64, 128)), ((1280, 1280, 1280), (64, 256)), ((2048, 2048, 2048), (128, 256)),
     ((3072, 3072, 3072), (64, 256)), ((512, 4096, 4096), (64, 256)), ((2048, 5120, 5120), (128, 128))],
)  # fmt: skip
def test_tiles_by_descriptors_leave_few_sms_idle(shape, tile):
    """The tile that was fastest on an H200: a last wave that is nearly empty costs as much as a full one."""
    best = chosen("h200", *shape)[0]
    assert (best.BLOCK_M, best.BLOCK_N) == tile and best.descriptors


def test_thin_products_fill_the_gpu():
    for M, N, K in ((1, 4096, 4096), (16, 4096, 14336), (4096, 8, 4096), (64, 64, 65536)):
        best = chosen("h200", M, N, K, by_tma=False)[0]
        programs = -(-M // best.BLOCK_M) * -(-N // best.BLOCK_N) * best.SPLIT_K
        assert programs >= 64 and min(best.BLOCK_M, best.BLOCK_N) <= 64


@pytest.mark.parametrize("gpu", ["h200", "a100", "l4", "t4", "b200"])
def test_every_configuration_fits_the_gpu(gpu):
    limit = hardware.gpu(gpu).smem_per_block_bytes
    cases = [(torch.bfloat16, "ieee"), (torch.float32, "tf32"), (torch.float32, "ieee"), (torch.float64, "ieee")]
    for (dtype, precision), gated in itertools.product([*cases, (FP8, "ieee")], (False, True)):
        both = (chosen(gpu, 1024, 1024, 1024, dtype, precision, gated, wide=wide) for wide in (True, False))
        for c in itertools.chain(*both):
            columns = c.BLOCK_N * (2 if gated else 1)
            operands = c.num_stages * (c.BLOCK_M + columns) * c.BLOCK_K * dtype.itemsize
            result = c.BLOCK_M * c.BLOCK_N * 2 // c.PIECES if c.descriptors else 0
            assert operands + result <= limit, (gpu, dtype, c)
            assert c.BLOCK_K >= (32 if dtype == FP8 else 16) and c.BLOCK_N >= 16


def test_traffic_is_that_of_the_tiles(device):
    """N / T reads of a and b: the reason for tiles, counted."""
    if device == "cuda":
        pytest.skip("counted in the interpreter, where tensors need no GPU")
    shape = (256, 192, 64)
    a, b = OP.make_inputs(shape, torch.float32, seeded())
    for BLOCK_M, BLOCK_N in ((32, 32), (64, 32), (128, 64)):
        config = Config(BLOCK_M, BLOCK_N, 32, 4, 1, 1)
        with gpukit.trace() as t:
            matmul_fwd(a[None], b[None], None, None, None, "", "ieee", False, False, config=config)
        assert t.read_bytes == reference.tiled_traffic(shape, torch.float32, BLOCK_M, BLOCK_N)
        assert t.write_bytes == 256 * 192 * 4
    assert 64 * reference.tiled_traffic(shape, torch.float32, 64, 64) == reference.naive_traffic(shape, torch.float32)


def test_linear_of_a_vector(device):
    layer, x = Linear(24, 40).to(device), torch.randn(24, device=device)
    torch.testing.assert_close(layer(x, residual=torch.ones(40, device=device)), torch.nn.Linear.forward(layer, x) + 1)


def test_linear_refuses_what_its_calls_would():
    with pytest.raises(ValueError, match=r"Linear: activation must be None, .*, got 'silu'"):
        Linear(4, 4, activation="silu")


def test_tiles_are_visited_once_and_in_groups():
    tile_at = sys.modules["gpukit.kernels._tiles"].tile_at.fn
    for tiles_m, tiles_n, group in ((1, 1, 8), (5, 7, 1), (5, 7, 2), (9, 4, 8), (3, 10, 8)):
        seen = [tile_at(pid, tiles_m, tiles_n, group) for pid in range(tiles_m * tiles_n)]
        assert len(set(seen)) == len(seen) and max(seen) == (tiles_m - 1, tiles_n - 1)
    assert [tile_at(pid, 4, 4, 2) for pid in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


# ------------------------------------------------------------------------------------------------------------- Linear
def test_linear(device):
    x = random(2, 5, 24).to(device)
    for activation, bias in ((None, True), ("gelu", True), ("swiglu", False)):
        layer = Linear(24, 40, bias=bias, activation=activation).to(device)
        assert layer.weight.shape == (80 if activation == "swiglu" else 40, 24)
        residual = random(2, 5, 40, seed=1).to(device)
        expected = reference.matmul(x, layer.weight.mT, layer.bias, activation, residual)
        y = layer(x, residual)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        gradients = (torch.autograd.grad(z.square().sum(), list(layer.parameters())) for z in (y, expected))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    plain = torch.nn.Linear(24, 40).to(device)
    layer = Linear(24, 40).to(device)
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- errors


def test_fp8_errors(device):
    x = torch.zeros(4, 4, device=device).to(FP8)
    with pytest.raises(ValueError, match="a and b in float8_e4m3fn have no gradients"):
        matmul(x.requires_grad_(), x)
    with imagined("a100"), pytest.raises(ValueError, match=r"needs a GPU of compute capability 8.9 or later, got 8.0"):
        if device == "cuda":
            raise ValueError("float8_e4m3fn needs a GPU of compute capability 8.9 or later, got 8.0")
        matmul(x.detach(), x.detach())


# ------------------------------------------------------------------------------------------------------------ PyTorch


def test_operator_registration(device):
    a, b = random(2, 5, 6).to(device), random(2, 6, 8, seed=1).to(device)
    bias, residual = random(8, seed=2).to(device), random(2, 5, 8, seed=3).to(device)
    operator = torch.ops.gpukit.matmul.default
    for view in (a, a.mT.contiguous().mT):
        torch.library.opcheck(operator, (view.detach().requires_grad_(), b, None, None, None, "", "tf32", False, False))
    leaves = [t.requires_grad_() for t in (a, b, bias, residual)]
    torch.library.opcheck(operator, (*leaves, torch.ones((), device=device), "gelu", "ieee", False, True))
    torch.library.opcheck(operator, (a, b, bias, residual[..., :4].detach(), None, "swiglu", "ieee", False, True))


# ---------------------------------------------------------------------------------------------------- on a GPU alone
# (dtype, precision, activation, M, N, K, layouts of a and b): every kind of tile compiled for every kind of operand, once.
EVEN, ODD = (512, 768, 640), (257, 331, 521)
CASES = [
    *((torch.bfloat16, "ieee", activation, *EVEN, "NT") for activation in (None, *ACTIVATIONS)),
    *((torch.bfloat16, "ieee", None, *EVEN, layouts) for layouts in ("NN", "TN", "TT")),
    # A second tile for each program; blocks of K that end early, the fewest there may be, or many; aligned rows of c alone.
    (torch.bfloat16, "ieee", None, 2200, 4104, 72, "NT"), (torch.float16, "ieee", "gelu_tanh", 264, 1000, 1096, "TN"),
    (torch.bfloat16, "ieee", "gelu", 257, 328, 521, "NN"),
    (torch.bfloat16, "ieee", None, *ODD, "NT"), (torch.bfloat16, "ieee", None, *ODD, "TN"),
    (torch.float16, "ieee", None, *EVEN, "NT"),
    (torch.float32, "tf32", None, *EVEN, "NN"), (torch.float32, "tf32", None, *ODD, "NT"),
    (torch.float32, "ieee", None, *EVEN, "NN"), (torch.float32, "ieee", None, *ODD, "NT"),
    (torch.float64, "ieee", "gelu", *EVEN, "NN"),
    (FP8, "ieee", None, *EVEN, "NT"), (FP8, "ieee", "gelu", *EVEN, "NN"), (FP8, "ieee", None, *ODD, "NT"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_configuration(case, device):
    """Not only the one that wins: Triton has been wrong for single configurations before."""
    dtype, precision, activation, M, N, K, layouts = case
    if dtype == FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 in this GPU's tensor cores")
    out, gated = torch.bfloat16 if dtype == FP8 else dtype, activation == "swiglu"
    columns = 2 * N if gated else N
    a, b = random(M, K).to(dtype).to(device), random(K, columns, seed=1).div(K**0.5).to(dtype).to(device)
    bias = random(columns, seed=2, dtype=out).to(device)
    a, b = (x.contiguous() if rows == "N" else x.mT.contiguous().mT for x, rows in zip((a, b), layouts, strict=True))
    exact = [x.float().double() for x in (a, b)] if dtype == FP8 else [a.double(), b.double()]
    truth = reference.matmul(*exact, bias.double(), activation)
    # tf32 as the tensor cores read it, without the last 13 bits; a library that rounds first errs less.
    keep = (
        (lambda x: torch.from_numpy(numerics.tf32(x.cpu().numpy())).to(device)) if precision == "tf32" else lambda x: x
    )
    native = reference.matmul(*(keep(x.to(out)) for x in exact), bias, activation)
    wide = M % 16 == N % 16 == K % 16 == 0
    tma = torch.cuda.get_device_capability() >= (9, 0) and dtype.itemsize <= 2
    in_gluon = tma and _in_gluon(a[None], b[None], gated)
    gpu = properties(a.device)
    for config in choices(Problem(1, M, N, K, dtype, gpu, precision, gated, wide, tma, in_gluon)):
        if config.SPLIT_K in (1, 4):
            after = (bias, None, None, activation or "", precision, False, False)
            c, _ = matmul_fwd(a[None], b[None], *after, config=config)
            if dtype == torch.float64:  # PyTorch's own is the truth here
                torch.testing.assert_close(c[0], truth, rtol=1e-12, atol=1e-13)
            else:
                assert_close(c[0], truth, native, what=f"{config}")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [128, 1024, 1296])
def test_in_a_graph_small_products_go_by_descriptors(n, device):
    """They cost the CPU more than the GPU gains, and a graph's replay costs no CPU time."""
    a, b = random(n, n).bfloat16().to(device), random(n, n, seed=1).bfloat16().to(device)
    assert not _by_tma(a[None], b[None], False)
    matmul(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert _by_tma(a[None], b[None], False)
        c = matmul(a, b)
    graph.replay()
    assert_close(c, a.double() @ b.double(), a @ b, what="in a graph")


@pytest.mark.gpu("long")
def test_gluon_keeps_and_adds(device, monkeypatch):
    """Gradients of everything that an epilogue does, and the same bits again."""
    if module.for_hopper(module.GLUON, torch.device(device)) is None:
        pytest.skip("kernels for Hopper")
    for M, N, K in ((300, 264, 200), (2056, 4104, 136)):
        full_check(M, N, K, torch.bfloat16, device, "gelu", True, True, IN_GLUON, monkeypatch)
    a, b = (random(2056, 4104, seed=i, dtype=torch.bfloat16).to(device) for i in (0, 1))
    first = matmul(a, b.mT)
    assert all(torch.equal(first, matmul(a, b.mT)) for _ in range(20))


@pytest.mark.gpu("long")
@pytest.mark.parametrize(
    "shape", [(1024, 1024, 1024), (1793, 1793, 1793), (4096, 4096, 4096), (4096, 8192, 8192)], ids=str
)
def test_measured_shapes_in_full(shape, device):
    a, b = (x.to(device) for x in OP.make_inputs(shape, torch.bfloat16, seeded()))
    truth, native = a.double() @ b.double(), a @ b
    assert_close(matmul(a, b), truth, native)
    assert_close(module.matmul_by_pointers(a, b), truth, native)
    assert_close(matmul(a, b, autotune=True), truth, native)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_more_than_2_31_elements(device):
    M, N, K = 2**16 + 3, 2**15 + 8, 128  # by descriptors too
    a, b = random(M, K).to(device, torch.bfloat16), random(K, N, seed=1).to(device, torch.bfloat16)
    for c in (matmul(a, b), module.matmul_by_pointers(a, b)):
        for rows in (slice(0, 2), slice(M - 2, M)):
            assert_close(c[rows], a[rows].double() @ b.double(), a[rows] @ b)
    tall = torch.randn(2**25 + 5, 66, device=device, dtype=torch.bfloat16)  # more than 2^31 as an operand
    c = matmul(tall[:, :64], b[:64, :32])
    assert_close(c[-2:], tall[-2:, :64].double() @ b[:64, :32].double(), tall[-2:, :64] @ b[:64, :32])
    c = matmul(tall.mT[:, -128:], tall[-128:])
    assert_close(c, tall[-128:].mT.double() @ tall[-128:].double(), tall[-128:].mT @ tall[-128:])


@pytest.mark.gpu
def test_autotune_in_a_cuda_graph(device):
    """A capture can measure nothing: it takes what is chosen without."""
    a, b = random(512, 640).to(device, torch.bfloat16), random(640, 512, seed=1).to(device, torch.bfloat16)
    matmul(a, b)  # compiles, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = matmul(a, b, autotune=True)
    a.copy_(torch.randn_like(a))
    graph.replay()
    assert torch.equal(c, matmul(a, b))
