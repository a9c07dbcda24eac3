"""PyTorch's own samples of the operations (torch.testing._internal, what its tests call its operators with): nobody here
chose these inputs. A sample is right, or refused with a reason that is known; none is wrong, and none crashes."""

import collections
import warnings

import pytest
import torch

from gpukit import kernels
from gpukit.kernels.flash_attention import scaled_dot_product_attention
from gpukit.testing import assert_close

for package in ("expecttest", "hypothesis"):
    pytest.importorskip(package, reason=f"torch's test helpers need {package}: the extra `dev` has it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_optimizers import optim_db

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch's own functions on its own samples

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float64: 1e-9}
# What may be refused, and how many samples of the three dtypes together. The aim is 50: an eps of -0.5, which PyTorch takes
# and the norms call a mistake, is what is beyond it.
REASONS = {
    "eps must be a number above 0": 6,
    "dropout_p is not supported": 36,
    "must be float16, bfloat16 or float32, got torch.float64": 13,
}
CALLS = {
    "softmax": kernels.softmax,
    "log_softmax": kernels.log_softmax,
    "nn.functional.gelu": kernels.gelu,
    "nn.functional.rms_norm": lambda x, shape, weight=None, eps=None: kernels.rms_norm(
        x, weight, torch.finfo(x.dtype).eps if eps is None else eps, normalized_shape=shape
    ),
    "nn.functional.layer_norm": lambda x, shape, weight=None, bias=None, eps=1e-5: kernels.layer_norm(
        x, weight, bias, eps, normalized_shape=shape
    ),
    "nn.functional.cross_entropy": lambda x, target, **options: kernels.cross_entropy(
        x, target, dim=min(1, x.ndim - 1), **options
    ),
    "nn.functional.kl_div": kernels.kl_div,
    "nn.functional.scaled_dot_product_attention": scaled_dot_product_attention,
    "nn.functional.linear": lambda x, weight, bias=None: kernels.matmul(x, weight.mT, bias),
    "matmul": kernels.matmul,
    "mm": kernels.matmul,
    "bmm": kernels.matmul,
}
OPS = {f"{op.name} {op.variant_test_name}".strip(): op for op in op_db if op.name in CALLS}
# Without a GPU, where each program is interpreted: all of one dtype, and of the others what differs most.
HERE = [(name, torch.float32) for name in OPS] + [
    (name, dtype)
    for name in ("nn.functional.scaled_dot_product_attention", "softmax", "nn.functional.cross_entropy")
    for dtype in DTYPES[1:]
]
EVERYWHERE = [(name, dtype) for name in OPS for dtype in DTYPES if dtype in OPS[name].dtypes]


def copied(x, dtype=None):
    """The same sample once more, with leaves of its own, and in another dtype if asked for."""
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.detach().to(dtype or x.dtype, copy=True).requires_grad_(x.requires_grad)
    if isinstance(x, dict):
        return {name: copied(value, dtype) for name, value in x.items()}
    return tuple(copied(value, dtype) for value in x) if isinstance(x, tuple | list) else x


def derived(fn, sample, upstream=None, dtype=None):
    """The result, and the gradients of all inputs that ask for one."""
    (x, *args), options = copied((sample.input, *sample.args), dtype), copied(sample.kwargs, dtype)
    y = fn(x, *args, **options)
    leaves = [t for t in (x, *args, *options.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not (y.requires_grad and leaves):
        return [y.detach()], None
    upstream = torch.randn_like(y) if upstream is None else upstream.to(y.dtype)
    gradients = torch.autograd.grad(y, leaves, upstream, allow_unused=True)
    return [
        y.detach(),
        *(torch.zeros_like(t) if g is None else g for t, g in zip(leaves, gradients, strict=True)),
    ], upstream


def tried(name, dtype, device) -> collections.Counter:
    """How many samples are equal, and refused for each reason."""
    op, counts = OPS[name], collections.Counter()
    tolerance = TOLERANCE[dtype]
    for sample in op.sample_inputs(device, dtype, requires_grad=True):
        try:
            expected, upstream = derived(op.op, sample)
        except Exception:  # a sample for another device
            counts["torch refuses"] += 1
            continue
        try:
            given, _ = derived(CALLS[op.name], sample, upstream)
        except (ValueError, TypeError) as error:
            reason = next((reason for reason in REASONS if reason in str(error)), None)
            assert reason, f"{name} {dtype} refuses {sample.summary()}: {error}"
            counts[reason] += 1
            continue
        for i, (y, near) in enumerate(zip(given, expected, strict=True)):
            close = tolerance * (4 if i else 1)
            if torch.allclose(y.to(near.dtype), near, close, close, equal_nan=True):
                continue
            # Neither is the truth: PyTorch in float64 is, and ours may be as far from it as the project's rule says.
            truth, _ = derived(op.op, sample, upstream, torch.float64)
            what = f"{i} of {sample.summary()}"
            assert_close(y, truth[i].to(y.device), near.to(y.dtype), gradient=i > 0, what=what)
        counts["equal"] += 1
    return counts


def few_are_refused(pairs, device):
    total = collections.Counter()
    for name, dtype in pairs:
        total += tried(name, dtype, device)
    print(dict(total))
    refused = {reason: total[reason] for reason in REASONS}
    assert all(refused[reason] <= REASONS[reason] for reason in REASONS), refused
    return total


def test_samples_of_pytorchs_operators(device):
    total = few_are_refused(HERE, device)
    assert total["equal"] > 150, total


@pytest.mark.gpu
def test_all_samples_of_pytorchs_operators(device):
    total = few_are_refused(EVERYWHERE, device)
    assert total["equal"] > 380, total  # 386 with PyTorch 2.11


def optimizer_samples(dtype, device):
    (info,) = (info for info in optim_db if info.optim_cls is torch.optim.AdamW)
    for sample in info.optim_inputs_func(device=device, dtype=dtype):
        yield sample.desc, sample.kwargs


def same_steps(dtype, device):
    """Three steps of ours and PyTorch's on each sample."""
    refused = 0
    for desc, options in optimizer_samples(dtype, device):
        pair = []
        for make in (kernels.AdamW, torch.optim.AdamW):
            generator = torch.Generator().manual_seed(0)
            draw = lambda *shape, generator=generator: torch.randn(shape, generator=generator).to(device, dtype)  # noqa: E731
            params = [torch.nn.Parameter(draw(*shape)) for shape in ((3, 5), (1,), (2, 3, 4), ())]
            try:
                optimizer = make(params, **options)
            except ValueError as error:
                assert "amsgrad=True is not supported here; use torch.optim.AdamW" in str(error), desc
                refused += 1
                break
            for _ in range(3):
                for p in params:
                    p.grad = draw(*p.shape)
                optimizer.step()
            pair.append(params)
        if len(pair) == 2:
            # Numbers such as lr reach the kernel in float32, beside float64 weights too.
            close = max(TOLERANCE[dtype] / 4, 1e-6)
            torch.testing.assert_close(
                *pair, rtol=close, atol=close, msg=lambda message, desc=desc: f"{desc}: {message}"
            )
    return refused


@pytest.mark.parametrize("where", ["here", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_samples_of_adamw(where, device):
    assert all(same_steps(dtype, device) <= 4 for dtype in DTYPES)
