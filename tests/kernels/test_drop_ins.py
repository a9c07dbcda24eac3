"""The shapes that PyTorch's own functions take beside rows: vectors, scalars, other dimensions, several of them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gpukit import kernels
from gpukit.kernels.flash_attention import scaled_dot_product_attention
from tests.kernels.cases import agree, noise, seeded

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
PRODUCTS = (
    ((4,), (4,)),
    ((3, 4), (4,)),
    ((4,), (4, 5)),
    ((2, 3, 4), (4,)),
    ((2, 1, 3, 4), (4,)),
    ((4,), (2, 4, 5)),
    ((2, 1, 3, 4), (5, 4, 2)),
    ((0, 4), (4,)),
    ((0,), (0, 3)),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vectors(dtype, device):
    for shapes in PRODUCTS:
        agree(kernels.matmul, torch.matmul, [noise(*shape, seed=i) for i, shape in enumerate(shapes)], dtype, device)


def test_a_vector_with_what_follows_the_product(device):
    x, w, bias, residual = noise(4), noise(4, 6, seed=1), noise(6, seed=2), noise(6, seed=3)
    ours = lambda x, w, bias, residual: kernels.matmul(x, w, bias, "gelu", residual=residual)  # noqa: E731
    agree(
        ours,
        lambda x, w, bias, residual: F.gelu(x @ w + bias) + residual,
        [x, w, bias, residual],
        torch.float32,
        device,
    )
    layer = kernels.Linear(4, 3, device=device)
    row = x.float().to(device)
    torch.testing.assert_close(layer(row), F.linear(row, layer.weight, layer.bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_over_any_dimension(name, dtype, device):
    ours, theirs = getattr(kernels, name), getattr(torch, name)
    for shape, dim in (((), 0), ((), -1), ((5,), 0), ((3, 4), 0), ((2, 3, 4), 1), ((2, 3, 4), -3), ((2, 0, 4), 1)):
        agree(partial(ours, dim=dim), partial(theirs, dim=dim), [noise(*shape)], dtype, device)
    x = noise(2, 3, 4).to(dtype).to(device)
    y = ours(x, 1, dtype=torch.float64)
    assert y.dtype == torch.float64 and y.is_contiguous()
    torch.testing.assert_close(y, theirs(x, 1, dtype=torch.float64))
    assert torch.equal(ours(x.long(), dtype=torch.float32), ours(x.long().float()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_several_dimensions(dtype, device):
    x, weight, bias = noise(2, 3, 4, 5), noise(4, 5, seed=1), noise(4, 5, seed=2)
    shape = (4, 5)
    rms, layer = (partial(f, eps=1e-5, normalized_shape=shape) for f in (kernels.rms_norm, kernels.layer_norm))
    agree(rms, lambda x, w: F.rms_norm(x, shape, w, 1e-5), [x, weight], dtype, device)
    agree(layer, lambda x, w, b: F.layer_norm(x, shape, w, b), [x, weight, bias], dtype, device)
    whole = (2, 3, 4, 5)
    agree(partial(rms, normalized_shape=whole), lambda x: F.rms_norm(x, whole, None, 1e-5), [x], dtype, device)
    agree(partial(layer, normalized_shape=5), lambda x: F.layer_norm(x, (5,)), [x], dtype, device)
    strided = x.transpose(2, 3)
    agree(partial(layer, normalized_shape=[5, 4]), lambda x: F.layer_norm(x, (5, 4)), [strided], dtype, device)
    empty = noise(0, 4, 5).to(dtype).to(device)
    assert layer(empty).shape == empty.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_of_one_number(dtype, device):
    agree(kernels.gelu, F.gelu, [noise()], dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_of_any_shape(dtype, device):
    """Class scores as PyTorch has them, [V] or [N, V, d1, ...]; of kl_div every shape is one."""
    for shape in ((7,), (3, 7), (2, 7, 3), (2, 3, 2, 4)):
        dim = min(1, len(shape) - 1)
        target = torch.randint(0, shape[dim], (*shape[:dim], *shape[dim + 1 :]), generator=seeded())
        for options in ({}, {"reduction": "none", "label_smoothing": 0.1}):
            ours = partial(kernels.cross_entropy, dim=dim, **options)
            agree(ours, partial(F.cross_entropy, **options), [noise(*shape), target], dtype, device)
        log_p, p = noise(*shape).log_softmax(dim), noise(*shape, seed=1).softmax(dim)
        for reduction in ("sum", "none"):
            fixed = lambda fn, p=p, reduction=reduction: lambda x: fn(x, p.to(x), reduction=reduction)  # noqa: E731
            agree(fixed(kernels.kl_div), fixed(F.kl_div), [log_p], dtype, device)


def test_square_class_scores_are_told_apart(device):
    """[N, 3, 3] with a target [N, 3] is both [N, V, d1] and [..., V]: `dim` says which."""
    x, target = noise(2, 3, 3).float().to(device), torch.tensor([[0, 1, 2], [2, 0, 0]], device=device)
    torch.testing.assert_close(kernels.cross_entropy(x, target, dim=1), F.cross_entropy(x, target))
    torch.testing.assert_close(kernels.cross_entropy(x, target), F.cross_entropy(x.mT, target))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_attention_of_any_rank(dtype, device):
    shapes = (
        ((3, 8), (6, 8)),
        ((4, 3, 8), (4, 6, 8)),
        ((4, 3, 8), (2, 4, 6, 8)),
        ((2, 4, 6, 8), (1, 4, 3, 8)),
        ((2, 1, 4, 3, 8), (3, 4, 6, 8)),
    )
    for q, k in shapes:
        for is_causal in (False, True):
            ours, theirs = (
                partial(f, is_causal=is_causal) for f in (scaled_dot_product_attention, F.scaled_dot_product_attention)
            )
            agree(ours, theirs, [noise(*q), noise(*k, seed=1), noise(*k, seed=2)], dtype, device)


def test_attention_that_has_no_such_shape(device):
    refused = partial(pytest.raises, ValueError)
    q = torch.zeros(2, 4, 3, 8, device=device)
    with refused(match=r"scaled_dot_product_attention: .* at least two dimensions \[T D\], got \[\[8\], "):
        scaled_dot_product_attention(q[0, 0, 0], q, q)
    with refused(match="scaled_dot_product_attention: the dimensions before the heads must be equal or 1, got"):
        scaled_dot_product_attention(q, q[:1].expand(3, 4, 3, 8), q)
    with refused(match="scaled_dot_product_attention: query has 4 heads and key 1; pass enable_gqa=True"):
        scaled_dot_product_attention(q[0], q[0, :1], q[0, :1])


CALLS = {
    "vector": (lambda x: kernels.matmul(x, x.transpose(-1, -2)[..., 0] if x.ndim > 1 else x), (3, 3)),
    "softmax": (lambda x: kernels.softmax(x, 0), (3, 4)),
    "scalar": (lambda x: kernels.softmax(x[0, 0], 0) + kernels.gelu(x[0, 0]), (3, 4)),
    "norms": (
        lambda x: kernels.layer_norm(x, normalized_shape=(3, 4)) + kernels.rms_norm(x, normalized_shape=(3, 4)),
        (2, 3, 4),
    ),
    "loss": (lambda x: kernels.cross_entropy(x, torch.zeros_like(x[:, 0]).long(), dim=1), (2, 3, 4)),
    "attention": (lambda x: scaled_dot_product_attention(x, x, x), (2, 3, 8)),
}


@pytest.mark.parametrize("call", CALLS)
def test_torch_compile_and_autocast(call, device):
    fn, shape = CALLS[call]
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    results = []
    for f in (fn, compiled):
        x = noise(*shape).float().to(device).requires_grad_()
        y = f(x)
        results.append((y, *torch.autograd.grad(y, x, torch.ones_like(y))))
    torch.testing.assert_close(*results)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert fn(noise(*shape).float().to(device)).isfinite().all()
