"""RMSNorm, LayerNorm and residual + RMSNorm: the references and their costs, and the kernels against them."""

import sys

import pytest
import torch
import torch.nn.functional as F

from gpukit.kernels import _norm_backward as backward
from gpukit.kernels import layer_norm, residual_rms_norm, rms_norm
from gpukit.op import Cost
from gpukit.reference.norms import LAYER_NORM, RESIDUAL_RMS_NORM, RMS_NORM
from gpukit.testing import assert_close
from tests.kernels.cases import (
    DTYPES,
    as_tuple,
    check,
    compile_for_hopper,
    every_second,
    padded_rows,
    seeded,
    transposed,
)

kernels = sys.modules["gpukit.kernels.norms"]
CASES = (
    pytest.param(RMS_NORM, rms_norm, id="rms_norm"),
    pytest.param(LAYER_NORM, layer_norm, id="layer_norm"),
    pytest.param(RESIDUAL_RMS_NORM, residual_rms_norm, id="residual_rms_norm"),
)


def leaves(op, shape, dtype, device):
    """Inputs of normal noise that want gradients."""
    vector = shape[-1:]
    shapes = {"rms_norm": (shape, vector), "layer_norm": (shape, vector, vector)}.get(op.name, (shape, shape, vector))
    noise = [torch.randn(size, generator=seeded(i), dtype=torch.float64) for i, size in enumerate(shapes)]
    return [x.to(device, dtype).requires_grad_() for x in noise]


def gradients(outputs, inputs):
    """Of sums in which each element has a weight of its own, one that every dtype can hold."""
    upstream = [(torch.arange(y.numel(), device=y.device).view_as(y) % 7 - 3).to(y.dtype) for y in as_tuple(outputs)]
    return torch.autograd.grad(as_tuple(outputs), inputs, upstream)


# ---------------------------------------------------------------------------------------------------------- reference


def test_costs_by_hand():
    assert RMS_NORM.cost((2, 3), torch.float32) == Cost(read_bytes=36, write_bytes=24, flops=24)
    assert RMS_NORM.cost_bwd((2, 3), torch.bfloat16) == Cost(read_bytes=30, write_bytes=18, flops=54)
    assert LAYER_NORM.cost((2, 3), torch.float32) == Cost(read_bytes=48, write_bytes=24, flops=42)
    assert LAYER_NORM.cost_bwd((2, 3), torch.bfloat16) == Cost(read_bytes=30, write_bytes=24, flops=78)
    assert RESIDUAL_RMS_NORM.cost((2, 3), torch.float32) == Cost(read_bytes=60, write_bytes=48, flops=30)
    assert RESIDUAL_RMS_NORM.cost_bwd((2, 3), torch.bfloat16) == Cost(read_bytes=42, write_bytes=18, flops=60)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_are_hard(dtype):
    x, weight = RMS_NORM.make_inputs((8, 64), dtype, seeded())
    wide = x.float()
    assert x[0].half().square().isinf().any(), "the squares of the large row must overflow fp16"
    assert 3.9 < wide[1].mean() < 4.1 and wide[1].std() < 0.4
    assert (x[2] == x[2, 0]).all()
    assert wide[3].square().mean() < 2e-6, "eps must matter in the tiny row"
    assert wide[4, -1] == 100 and not torch.equal(weight, torch.ones_like(weight))


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("op", "fn"), CASES)
def test_few_programs_walk_over_all_rows(op, fn, stages, device, monkeypatch):
    """Each takes many steps, and the last one fewer than the first."""
    kernel, _, config = backward._bwd_config(40, torch.float32, False, 2, 0)
    config = {**config, "BLOCK_M": 2, "NUM_STAGES": stages}
    monkeypatch.setattr(backward, "_bwd_config", lambda *given: (kernel, 1, config))
    monkeypatch.setattr(backward, "multiprocessors", lambda device: 3)
    for shape in ((1, 40), (13, 40), (31, 40)):
        check(op, fn, shape, torch.float32, device)


@pytest.mark.parametrize(
    ("N", "tensors", "shared_kib", "stages"),
    [(4096, 2, 228, 3), (4096, 2, 80, 3), (4096, 3, 100, 1), (8192, 3, 228, 3), (16384, 2, 228, 1), (4095, 2, 228, 1)],
)
def test_rows_on_their_way_need_shared_memory(N, tensors, shared_kib, stages):
    """Two rows of each tensor for each program: 4,096 columns of bfloat16 in two tensors and two programs are 64 KiB."""
    _, _, config = backward._bwd_config(N, torch.bfloat16, False, tensors, shared_kib * 1024)
    assert config["NUM_STAGES"] == stages


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "fn", "kept"), [(RMS_NORM, rms_norm, 1), (LAYER_NORM, layer_norm, 1),
                         (LAYER_NORM, layer_norm, 2), (RESIDUAL_RMS_NORM, residual_rms_norm, 2)])  # fmt: skip
def test_without_weight_or_bias(op, fn, kept, dtype, device):
    inputs = leaves(op, (5, 33), dtype, device)
    neutral = [torch.full((33,), value, dtype=torch.float64, device=device) for value in (1, 0)]
    left_out = neutral[:1] if op is not LAYER_NORM else neutral[kept - 1 :]
    inputs = inputs[:kept]
    outputs = as_tuple(fn(*inputs))
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = as_tuple(op.reference(*wide, *left_out))
    both = zip([*outputs, *gradients(outputs, inputs)], [*expected, *gradients(expected, wide)], strict=True)
    for ours, truth in both:
        assert_close(ours, truth.detach(), truth.detach().to(dtype), gradient=True)


def test_a_bias_alone(device):
    x, _, bias = leaves(LAYER_NORM, (5, 33), torch.float32, device)
    both = [fn(x, None, bias) for fn in (layer_norm, lambda x, w, b: F.layer_norm(x, (33,), w, b))]
    torch.testing.assert_close(*both)
    for ours, theirs in zip(*(gradients(y, (x, bias)) for y in both), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_constant_row_is_centred_to_zero(device):
    """Its mean is itself, or the error would be multiplied by 1 / sqrt(eps)."""
    x = torch.full((3, 781), 3.0, device=device)
    assert (layer_norm(x, None, None, 1e-12) == 0).all()


def test_eps_is_used_and_exact_in_float64(device):
    x = (1e-3 * torch.randn(4, 30, generator=seeded(), dtype=torch.float64)).to(device)
    weight = torch.ones(30, dtype=torch.float64, device=device)
    for eps in (1e-12, 1e-6, 0.1):
        torch.testing.assert_close(rms_norm(x, weight, eps), F.rms_norm(x, (30,), weight, eps), rtol=1e-13, atol=0)
        torch.testing.assert_close(
            layer_norm(x, weight, None, eps), F.layer_norm(x, (30,), weight, None, eps), rtol=1e-11, atol=1e-14
        )


@pytest.mark.parametrize("used", [0, 1])
def test_derivatives_when_one_of_two_results_is_used(used, device):
    inputs = leaves(RESIDUAL_RMS_NORM, (2, 3), torch.float64, device)
    needed = inputs if used == 0 else inputs[:2]
    fn = lambda *x: residual_rms_norm(*x, *inputs[len(x) :])[used]  # noqa: E731
    assert torch.autograd.gradcheck(fn, needed, fast_mode=True)
    assert torch.autograd.gradgradcheck(fn, needed, fast_mode=True)


def test_second_derivative_of_an_input_that_depends_on_another(device):
    """x is made from the weight: what reaches the weight through x is not to be counted twice."""
    weight = torch.randn(3, generator=seeded(), dtype=torch.float64).to(device).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda w: rms_norm(torch.outer(w, w), w), (weight,))


def test_u_is_the_rounded_sum_and_what_is_normalised(device):
    x, residual, weight = (t.detach() for t in leaves(RESIDUAL_RMS_NORM, (5, 40), torch.bfloat16, device))
    y, u = residual_rms_norm(x, residual, weight)
    assert torch.equal(u, x + residual) and torch.equal(y, rms_norm(u, weight))


def test_rows_with_nan_or_infinity_stay_by_themselves(device):
    x = torch.randn(4, 40, generator=seeded()).to(device)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    weight = torch.ones(40, device=device)
    for y, expected in ((rms_norm(x, weight), F.rms_norm(x, (40,), weight, 1e-6)),
                        (layer_norm(x, weight), F.layer_norm(x, (40,), weight))):  # fmt: skip
        torch.testing.assert_close(y, expected, equal_nan=True)
        assert torch.isfinite(y[2:]).all()


@pytest.mark.parametrize(("op", "fn"), CASES)
def test_parameters_of_another_dtype(op, fn, device):
    """As under autocast, where activations have 16 bits and parameters 32. A strided weight is one, too."""
    for dtype in (torch.float16, torch.bfloat16):
        inputs = [x.detach().to(dtype if x.ndim == 2 else torch.float32) for x in leaves(op, (5, 20), dtype, device)]
        inputs = [(every_second(x) if x.ndim == 1 else x).requires_grad_() for x in inputs]
        outputs = as_tuple(fn(*inputs))
        ours = [*outputs, *gradients(outputs, inputs)]
        assert [y.dtype for y in ours] == [dtype] * len(outputs) + [x.dtype for x in inputs]
        wide = [x.detach().double().requires_grad_() for x in inputs]
        expected = as_tuple(op.reference(*wide))
        for y, truth in zip(ours, [*expected, *gradients(expected, wide)], strict=True):
            assert_close(y, truth.detach(), truth.detach().to(dtype).to(y.dtype), gradient=True)


@pytest.mark.parametrize(("op", "fn"), CASES)
def test_second_derivatives_with_parameters_of_another_dtype(op, fn, device):
    first = [x.detach() for x in leaves(op, (3, 8), torch.float32, device)]
    second = []
    for mixed in (True, False):
        inputs = [x.to(torch.float64 if mixed and x.ndim == 1 else torch.float32).requires_grad_() for x in first]
        outputs = as_tuple(fn(*inputs))
        slopes = torch.autograd.grad([y.square().sum() for y in outputs], inputs, create_graph=True)
        second.append(torch.autograd.grad(sum(d.square().sum() for d in slopes), inputs))
    for mixed, plain in zip(*second, strict=True):
        torch.testing.assert_close(mixed.float(), plain, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------- memory


# ------------------------------------------------------------------------------------------------------------- errors


# ------------------------------------------------------------------------------------------------------------ PyTorch


def test_operators_without_weight_and_bias(device):
    x, _, _ = leaves(LAYER_NORM, (2, 3, 7), torch.float32, device)
    torch.library.opcheck(torch.ops.gpukit.norm.default, (x, None, None, None, 1e-5, True))
    x, stats = x.detach(), torch.ones(2, 6, device=device)
    torch.library.opcheck(torch.ops.gpukit.norm_bwd.default, (x, None, x, None, None, stats))


# ------------------------------------------------------------------------------------------------- in pieces, for Hopper
@pytest.fixture
def in_pieces(monkeypatch):
    """Rows of 16 bits come in pieces of 64. Returns how many pieces the launches had."""
    if torch.cuda.is_available():
        pytest.skip("a GPU has choices of its own")
    launched, original = [], kernels.launch

    def launch(kernel, *given, **constants):
        if kernel is kernels.norm_fwd_pieces_kernel:
            launched.append(constants["PIECES"])
        original(kernel, *given, **constants)

    def config(N, dtype, centre):
        pieces = {"PIECES": -(-N // 64), "PIECE": 64, "EVEN": N % 64 == 0, "num_warps": 1, "maxnreg": 64}
        return pieces if dtype.itemsize == 2 else None

    monkeypatch.setattr(kernels, "launch", launch)
    monkeypatch.setattr(kernels, "_on_hopper", lambda device: True)
    monkeypatch.setattr(kernels.choices, "pieces_config", config)
    return launched


@pytest.mark.parametrize("N", [1, 61, 64, 100, 256, 509])
@pytest.mark.parametrize(("op", "fn"), CASES[:2])
def test_rows_in_pieces(op, fn, N, in_pieces):
    for dtype in (torch.float16, torch.bfloat16):
        check(op, fn, (3, N), dtype, "cpu", padded_rows)
        assert set(in_pieces) == {-(-N // 64)}
        in_pieces.clear()


def test_rows_in_pieces_stay_by_themselves(in_pieces):
    x = torch.randn(4, 200, generator=seeded()).bfloat16()
    x[0, 3], x[1, 5], x[2] = torch.nan, torch.inf, 3
    for weight in (None, torch.full((200,), 2.0)):
        y = layer_norm(x, weight, weight)
        expected = F.layer_norm(x.float(), (200,), weight, weight).bfloat16()
        torch.testing.assert_close(y, expected, equal_nan=True)
        assert (y[2] == (0 if weight is None else 2)).all(), "the mean of a row of threes is 3"
    assert in_pieces == [4, 4]


def test_what_does_not_come_in_pieces(in_pieces):
    x = torch.randn(6, 128, generator=seeded()).bfloat16()
    rms_norm(x.float())
    rms_norm(x.mT)
    residual_rms_norm(x, x)
    assert not in_pieces, "float32, rows that are interleaved, a residual"


FOR_HOPPER = """
from gpukit.kernels import norms

norms.launch, norms.interpreted, norms._on_hopper = launch, lambda: False, lambda device: True
for N, centre in ((16_384, True), (12_288, True), (5120, True), (5121, True), (12_288, False)):
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.empty(N, dtype=dtype)
        norms.norm_fwd(torch.empty(4, N, dtype=torch.bfloat16), None, weight, weight if centre else None, 1e-5, centre)
"""


def test_pieces_compile_without_a_gpu(tmp_path):
    """No register is lacking."""
    assert compile_for_hopper(FOR_HOPPER, tmp_path) == [0] * 20


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.mark.gpu
@pytest.mark.parametrize("N", [33, 1024, 4096, 5000, 8200, 12_288, 12_289, 16_384, 20_001, 32_768, 40_000])
@pytest.mark.parametrize(("op", "fn"), CASES)
def test_every_length(op, fn, N, device):
    """Each form of the kernels, with more rows than programs where there is room for that."""
    M = max(6, 2_000_000 // N)
    check(op, fn, (M, N), torch.bfloat16, device)
    if N in (1024, 8200, 40_000):
        check(op, fn, (6, N), torch.float32, device)
    if N in (33, 5000, 12_288, 40_000):
        check(op, fn, (6, N), torch.float16, device, padded_rows, dy_layout=transposed)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("N", [1024, 8192, 65_537])
def test_more_than_2_31_elements(N, device):
    M = 2**31 // N + 2
    x = torch.randn((M, N), device=device, dtype=torch.bfloat16)
    weight = torch.randn(N, device=device, dtype=torch.bfloat16)
    y, _, stats = kernels.norm_fwd(x, None, weight, weight, 1e-5, True)
    dx, _, dbias = kernels.norm_bwd(x, None, x, weight, weight, stats)
    for rows in (slice(0, 2), slice(M - 2, M)):
        given = x[rows].double().requires_grad_()
        truth = F.layer_norm(given, (N,), weight.double(), weight.double(), 1e-5)
        (true_dx,) = torch.autograd.grad(truth, given, x[rows].double())
        assert_close(y[rows], truth.detach(), truth.detach().to(x.dtype), what="y")
        assert_close(dx[rows], true_dx, true_dx.to(x.dtype), gradient=True, what="dx")
    truth = sum(part.sum(0, dtype=torch.float64) for part in x.split(4096))
    assert_close(dbias, truth, truth.to(x.dtype), gradient=True, what="dbias")
