"""Products with int8 and int4 weights: packing, quantisation, and the kernel against its references."""

import sys

import pytest
import torch

import gpukit
from gpukit.kernels.quantized_matmul import (
    dequantize,
    int4_matmul,
    int8_matmul,
    pack_int4,
    quantize_int4,
    quantize_int8,
    unpack_int4,
)
from gpukit.op import Cost
from gpukit.reference import quantized_matmul as reference
from gpukit.reference.quantized_matmul import INT4, INT8
from gpukit.testing import assert_close
from tests.kernels.cases import DTYPES, seeded, transposed
from tests.kernels.cases import check as check_operation

module = sys.modules["gpukit.kernels.quantized_matmul"]
KERNELS = {INT8: int8_matmul, INT4: int4_matmul}
BOTH = pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)


def check(op, shape, dtype, device, *layouts):
    check_operation(op, KERNELS[op], shape, dtype, device, *layouts, native=op.reference)


# -------------------------------------------------------------------------------------------------------------- weights
def test_packing_and_back():
    q = torch.randint(-8, 8, (192, 5), generator=seeded(), dtype=torch.int8)
    packed = pack_int4(q)
    assert packed.shape == (48, 5) and packed.dtype == torch.int16
    assert torch.equal(unpack_int4(packed), q)
    assert torch.equal(reference._int4(packed), q)
    everything = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(-1, 4096)
    assert torch.equal(pack_int4(unpack_int4(everything)), everything)
    one = torch.full((64, 1), -8, dtype=torch.int8)
    one[16 + 3] = -7  # row 16 + 3: the second four bits of word 3
    assert pack_int4(one).flatten().tolist() == [0, 0, 0, 16] + 12 * [0]


def test_quantisation_is_to_the_nearest():
    weight = torch.randn(256, 9, generator=seeded())
    weight[:128, 4] = 0
    for quantize, largest in ((quantize_int8, 127), (quantize_int4, 7)):
        for group in (64, 128, 256):
            q, scales = quantize(weight, group)
            assert scales.shape == (256 // group, 9) and scales.dtype == weight.dtype
            error = (dequantize(q, scales, torch.float32) - weight).abs().view(-1, group, 9)
            assert bool((error <= 0.5001 * scales[:, None]).all()) and error.max() > 0.4 * scales.max()
            plain = q if q.dtype == torch.int8 else unpack_int4(q)
            assert plain.abs().max() == largest and bool((plain[:128, 4] == 0).all())
    assert quantize_int8(weight)[0].stride() == (1, 256)  # columns are contiguous
    torch.testing.assert_close(dequantize(*quantize_int8(weight), torch.float32), weight, rtol=0, atol=0.02)


def test_cost_by_hand():
    assert reference.int8_cost((2, 3, 256), torch.bfloat16) == Cost(2 * 512 + 768 + 2 * 6, 12, 2 * 2 * 3 * 256)
    assert reference.int4_cost((2, 3, 256), torch.bfloat16) == Cost(2 * 512 + 384 + 2 * 6, 12, 2 * 2 * 3 * 256)


def test_references_agree():
    a, weight, scales = INT8.make_inputs((3, 5, 256), torch.float64, seeded())
    torch.testing.assert_close(reference.int8_matmul(a, weight, scales), reference.cublas(a, weight, scales))
    by_hand = sum(a[:, k : k + 1] * weight[k] * scales[k // 128] for k in range(256))
    torch.testing.assert_close(reference.int8_matmul(a, weight, scales), by_hand)


# ------------------------------------------------------------------------------------------------------------- values


@BOTH
def test_shares_of_k(op, device, monkeypatch):
    plain = module._config
    monkeypatch.setattr(module, "_config", lambda *args: {**plain(*args), "SPLIT_K": 3})
    check(op, (5, 40, 512), torch.bfloat16, device)


def test_bias_and_leading_dimensions(device):
    weight = torch.randn(128, 24, generator=seeded())
    a = torch.randn(2, 3, 128, generator=seeded(1))
    bias = torch.randn(24, generator=seeded(2))
    for kernel, quantize in ((int8_matmul, quantize_int8), (int4_matmul, quantize_int4)):
        q, scales = quantize(weight, 64)
        full = dequantize(q, scales, torch.float32)
        truth, native = a.double() @ full.double() + bias.double(), a @ full + bias
        ours = [x.clone().to(device).requires_grad_() for x in (a, bias)]
        c = kernel(ours[0], q.to(device), scales.to(device), ours[1])
        assert_close(c.detach().cpu(), truth, native)
        assert_close(
            kernel(ours[0][0, 0], q.to(device), scales.to(device)).detach().cpu(), truth[0, 0] - bias, native[0, 0]
        )
        c.sum().backward()
        torch.testing.assert_close(ours[0].grad.cpu(), full.sum(1).expand(2, 3, 128), rtol=1e-4, atol=1e-4)
        assert torch.equal(ours[1].grad.cpu(), torch.full((24,), 6.0))


@BOTH
def test_sizes_zero(op, device):
    a, weight, scales = (x.to(device) for x in op.make_inputs((4, 40, 256), torch.bfloat16, seeded()))
    kernel = KERNELS[op]
    assert kernel(a[:0], weight, scales).shape == (0, 40)
    assert kernel(a, weight[:, :0], scales[:, :0]).shape == (4, 0)
    nothing = kernel(a[:, :0], weight[:0], scales[:0], torch.ones(40, device=device))
    assert torch.equal(nothing, torch.ones(4, 40, dtype=a.dtype, device=device))


def test_the_weight_is_read_once(device):
    """And shares of K fill a GPU that is imagined here, in one launch of which a few programs are looked at, none of them
    the last of its tile."""
    if device == "cuda":
        pytest.skip("counted in the interpreter, where tensors need no GPU")
    from gpukit import hardware, trace_report

    M, N, K = shape = (16, 2048, 2048)
    with hardware.imagined(hardware.gpu("t4")), trace_report.Sizes(), gpukit.trace(sample=2) as t:
        int4_matmul(*INT4.make_inputs(shape, torch.bfloat16, seeded()))
    (product,) = t.launches
    split = product.grid[0] // (N // 128)
    assert split > 1 and product.grid[0] >= 40, "every SM has something to load"
    weight_and_scales = N * K // 2 + N * (K // 128) * 2
    assert product.load_bytes == weight_and_scales + N // 128 * M * K * 2
    assert product.store_bytes == split * M * N * 4


# -------------------------------------------------------------------------------------------------- errors and PyTorch


def test_bad_weights():
    with pytest.raises(ValueError, match="quantize_int4: group must be a multiple of 64 that divides K = 128, got 32"):
        quantize_int4(torch.zeros(128, 4), 32)
    with pytest.raises(ValueError, match=r"quantize_int8: group must be .* K = 100, got 128"):
        quantize_int8(torch.zeros(100, 4))
    with pytest.raises(
        ValueError, match=r"quantize_int8: weight must be \[K, N\] of floating-point numbers, got \[4\]"
    ):
        quantize_int8(torch.zeros(4))
    with pytest.raises(ValueError, match=r"pack_int4: q must be \[K, N\] with K a multiple of 64, got \[32, 4\]"):
        pack_int4(torch.zeros(32, 4, dtype=torch.int8))
    for value, dtype in ((8, torch.int8), (-9, torch.int64), (0.5, torch.float32)):  # each would change its neighbours
        with pytest.raises(ValueError, match="pack_int4: q must be integers from -8 to 7, got"):
            pack_int4(torch.full((64, 1), value, dtype=dtype))
    with pytest.raises(ValueError, match=r"unpack_int4: packed must be int16 .* got torch.int8 \[16, 4\]"):
        unpack_int4(torch.zeros(16, 4, dtype=torch.int8))


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.mark.gpu("long")
@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_of_tile(op, dtype, device):
    for shape in ((1, 4096, 4096), (17, 1000, 1024), (33, 513, 512), (300, 640, 256)):
        check(op, shape, dtype, device)
    if dtype == torch.bfloat16:
        check(op, (16, 1024, 4096), dtype, device, transposed)
