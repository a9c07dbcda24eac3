"""The tolerance rule and the guarded buffers: what they let pass and what they catch."""

import pytest
import torch

from gpukit.testing import assert_close, compare, compare_rounded, guarded, guarded_empty

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def softmax_case(dtype, n=781):
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] += 100
    return x, torch.softmax(x.double(), -1), torch.softmax(x, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accepts_pytorch_and_a_single_rounding_of_the_truth(dtype):
    _, truth, native = softmax_case(dtype)
    assert compare(native, truth, native) is None
    assert compare(truth.to(dtype), truth, native) is None


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_one_rounding_of_float32_and_no_second_one(dtype):
    x, truth, _ = softmax_case(dtype, 5)
    single = torch.softmax(x.float(), -1)
    assert compare_rounded(single.to(dtype), truth, single) is None
    assert compare_rounded((single * (1 + 1e-6)).to(dtype), truth, single) is None, "float32 may be a little off"
    numerator = torch.exp(x.float() - x.float().amax(-1, keepdim=True))
    early = (numerator.to(dtype).float() / numerator.sum(-1, keepdim=True)).to(dtype)
    assert compare(early, truth, torch.softmax(x, -1)) is None
    assert compare_rounded(early, truth, single) is not None
    assert compare_rounded(single, truth, single) is None, "nothing to say of float32"
    assert compare_rounded(early[:0], truth[:0], single[:0]) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", ["zeros", "copy", "padding", "one element", "nan", "no maximum", "transposed"])
def test_rejects(dtype, wrong):
    x, truth, native = softmax_case(dtype)
    if wrong == "zeros":
        actual = torch.zeros_like(native)
    elif wrong == "copy":
        actual = x.clone()
    elif wrong == "padding":
        e = torch.exp(x.double() - x.double().amax(-1, keepdim=True))
        actual = (e / (e.sum(-1, keepdim=True) + 243 * torch.exp(-x.double().amax(-1, keepdim=True)))).to(dtype)
        actual[0] = truth[0]
    elif wrong == "one element":
        actual = native.clone()
        actual[2, 300] = 0.5
    elif wrong == "nan":
        actual = native.clone()
        actual[4, 780] = float("nan")
    elif wrong == "no maximum":
        actual = (torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)).to(dtype)
    else:
        actual = native.flip(-1)
    assert compare(actual, truth, native) is not None


def test_low_precision_in_a_float32_task_is_rejected():
    x, truth, native = softmax_case(torch.float32)
    assert compare(torch.softmax(x.half(), -1).float(), truth, native) is not None
    assert compare(torch.softmax(x.bfloat16(), -1).float(), truth, native) is not None


def test_nan_and_infinity_match_only_themselves():
    truth = torch.tensor([[1.0, float("nan"), float("inf"), -float("inf")]], dtype=torch.float64)
    native = truth.float()
    assert compare(native, truth, native) is None
    for i, bad in enumerate([float("nan"), 1.0, -float("inf"), float("inf")]):
        actual = native.clone()
        actual[0, i] = bad
        assert compare(actual, truth, native).index == (0, i)


def test_overflow_of_the_dtype_is_not_held_against_a_kernel():
    truth = torch.tensor([1e6, 1.0], dtype=torch.float64)
    native = truth.half()
    assert compare(native, truth, native) is None


def test_gradient_is_judged_by_the_tensors_scale():
    truth = torch.tensor([[1e-7, -1e-7], [1.0, -1.0]], dtype=torch.float64)
    native = truth.float()
    actual = native + torch.tensor([[1e-7, 0.0], [0.0, 0.0]])
    assert compare(actual, truth, native) is not None
    assert compare(actual, truth, native, gradient=True) is None


def test_scalars_and_empty_tensors():
    assert compare(torch.tensor(2.0), torch.tensor(2.0), torch.tensor(2.0)) is None
    assert compare(torch.tensor(2.1), torch.tensor(2.0), torch.tensor(2.0)).index == ()
    assert compare(torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, 3)) is None


def test_assert_close_wants_a_plain_tensor_of_the_right_kind():
    _, truth, native = softmax_case(torch.float32)
    assert_close(native, truth, native)
    for bad in (native.double(), native[:1], torch.nn.Parameter(native), 1.0):
        with pytest.raises(AssertionError):
            assert_close(bad, truth, native)


def test_guard_notices_writes_around_and_between_rows():
    view, verify = guarded(torch.randn(3, 5), stride=(8, 1))
    view.fill_(1)
    verify()
    view.as_strided((3, 8), (8, 1))[0, 6] = 2.0
    with pytest.raises(AssertionError, match=r"1 elements outside y \[3, 5\] were written; first at offset 6"):
        verify("y")
    out, verify = guarded_empty((4,), torch.float16)
    assert bool(torch.isnan(out).all())
    out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0)
    with pytest.raises(AssertionError, match="first at offset -1"):
        verify()


def test_guard_takes_integers_and_empty_tensors():
    out, verify = guarded_empty((3,), torch.int32)
    assert out.tolist() == [torch.iinfo(torch.int32).max] * 3
    verify()
    guarded_empty((0, 3), torch.float32)[1]()
