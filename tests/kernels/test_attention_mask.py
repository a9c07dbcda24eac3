"""Attention with a mask of the caller's, boolean or added to the scores."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gpukit.kernels import _flash_choices, flash_attention
from gpukit.kernels.flash_attention import scaled_dot_product_attention
from gpukit.testing import poison
from tests.kernels.cases import DTYPES, agree, every_second, noise, opchecked, seeded, transposed

LEAST = torch.finfo(torch.float32).min


def formula(q, k, v, mask, causal=False, window=None, scale=None):
    """softmax(scale q k^T + mask) v and the LSE, in the inputs' dtype; 0 where a query sees nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    (T_q, D), T_k = q.shape[2:], k.shape[2]
    s = (q @ k.mT) * (D**-0.5 if scale is None else scale)
    s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.to(s.dtype)
    apart = torch.arange(T_k) - torch.arange(T_q)[:, None] - (T_k - T_q)
    left = T_k + T_q if window is None else window - 1
    s = s.masked_fill((apart < -left) | (apart > (0 if causal else left)), -math.inf)
    blind = (s == -math.inf).all(-1, keepdim=True)
    s = s.masked_fill(blind, 0)
    return s.softmax(-1).masked_fill(blind, 0) @ v, s.logsumexp(-1).masked_fill(blind.squeeze(-1), -math.inf)


def inputs_of(B=2, H=2, H_kv=1, T_q=33, T_k=35, D=16):
    return [noise(B, heads, T, D, seed=i) for i, (heads, T) in enumerate(((H, T_q), (H_kv, T_k), (H_kv, T_k)))]


def seen(*shape):
    return torch.rand(shape, generator=seeded(5)) > 0.4


MASKS = {
    "bool": seen(2, 2, 33, 35),
    "bool-keys": seen(2, 1, 1, 35),
    "bool-blind": seen(33, 35).index_fill(0, torch.tensor([0, 3, 32]), False),
    "added": noise(33, 35, seed=6).bfloat16(),
    "added-keys": noise(2, 1, 1, 35, seed=6).half(),
    "added-heads": (3 * noise(2, 33, 1, seed=6)).half(),
    "-inf": noise(2, 1, 33, 35, seed=6).half().masked_fill(~seen(33, 35), -math.inf).index_fill(2, torch.tensor(5), -math.inf),
    "least": torch.zeros(33, 35).masked_fill(~seen(33, 35), LEAST).index_fill(0, torch.tensor([2, 30]), LEAST),
    "far": 10 * noise(33, 1, seed=6).float().expand(33, 35),
}  # fmt: skip
every_mask = pytest.mark.parametrize("mask", MASKS)


def check(mask, dtype, device, inputs=None, **options):
    """Results and gradients of q, k and v by the project's rule."""
    inputs = inputs_of() if inputs is None else inputs
    ours = lambda *qkv: flash_attention(*qkv, attn_mask=mask.to(device), **options)  # noqa: E731
    agree(ours, lambda *qkv: formula(*qkv, mask, **options)[0], inputs, dtype, device)


@every_mask
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks(mask, dtype, device):
    check(MASKS[mask], dtype, device)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": 7}, {"causal": True, "window": 20, "scale": 0.7}], ids=str)  # fmt: skip
def test_masks_beside_other_limits(options, device):
    for mask in ("bool", "-inf"):
        check(MASKS[mask], torch.float32, device, **options)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1, 1), (1, 2, 2, 50, 37, 40), (1, 3, 1, 16, 130, 64), (2, 2, 1, 1, 65, 8)]
)
def test_masks_of_other_shapes(shape, device):
    B, H, _, T_q, T_k, _ = shape
    check(noise(B, H, T_q, T_k, seed=6).float(), torch.float32, device, inputs_of(*shape))
    check(seen(B, 1, T_q, T_k), torch.float32, device, inputs_of(*shape))


def test_the_log_sum_exp_beside_a_mask(device):
    mask = MASKS["-inf"].float()
    both = lambda o, lse: torch.cat((o.flatten(), lse[lse > -math.inf]))  # noqa: E731
    agree(
        lambda *qkv: both(*flash_attention(*qkv, attn_mask=mask.to(device), return_lse=True)),
        lambda *qkv: both(*formula(*qkv, mask)),
        inputs_of(), torch.float32, device,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_a_query_that_sees_nothing(kind, device):
    """0, as in PyTorch, and as without a mask here."""
    q, k, v = (x.float().to(device).requires_grad_() for x in inputs_of())
    mask = torch.zeros(33, 35, dtype=torch.bool, device=device)
    mask = mask if kind == "bool" else torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -math.inf)
    o, lse = flash_attention(q, k, v, attn_mask=mask, return_lse=True)
    assert (o == 0).all() and (lse == -math.inf).all()
    assert torch.equal(o, F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True))
    assert all((dx == 0).all() for dx in torch.autograd.grad(o.sum(), (q, k, v)))


@pytest.mark.parametrize("mask", ["added", "added-keys", "-inf", "least"])
def test_the_gradient_of_what_is_added(mask, device):
    for options in ({}, {"causal": True}, {"window": 9}):
        agree(
            lambda *x: flash_attention(*x[:3], attn_mask=x[3], **options),  # noqa: B023
            lambda *x: formula(*x, **options)[0],  # noqa: B023
            [*inputs_of(), MASKS[mask].double()], torch.float32, device,
        )  # fmt: skip
    q, k, v, added = (x.float().to(device) for x in (*inputs_of(), MASKS["added"]))
    added.requires_grad_()
    _, lse = flash_attention(q, k, v, attn_mask=added, return_lse=True)
    (given,) = torch.autograd.grad(lse.sum(), added)
    torch.testing.assert_close(given.sum(), lse.new_tensor(lse.numel()))


def test_masks_of_any_strides(device):
    for mask in (MASKS["bool"], noise(2, 2, 33, 35, seed=6)):
        for layout in (every_second, transposed, lambda x: x.transpose(0, 2).contiguous().transpose(0, 2)):
            agree(
                lambda *x: flash_attention(*x[:3], attn_mask=layout(x[3])),  # noqa: B023
                lambda *x: formula(*x)[0],
                [*inputs_of(), mask], torch.float32, device,
            )  # fmt: skip


def test_masks_beyond_int32(device):
    """Heads 2^31 elements apart, in memory that is never touched in between; and rows, which are copied."""
    qkv = [x.float().to(device) for x in inputs_of(1, 2, 2, 3, 5)]
    far = torch.empty(2**31 + 64, dtype=torch.bool, device=device)
    for strides in ((0, 2**31, 5, 1), (0, 15, 2**30, 1)):
        mask = far.as_strided((1, 2, 3, 5), strides)
        mask.copy_(seen(1, 2, 3, 5))
        assert torch.equal(flash_attention(*qkv, attn_mask=mask), flash_attention(*qkv, attn_mask=mask.contiguous()))


def test_only_kernels_with_pointers_take_a_mask(device, monkeypatch):
    def asked(*_):
        raise AssertionError("descriptors")

    leaves = [x.bfloat16().to(device).requires_grad_() for x in inputs_of(1, 2, 2, 32, 32, 64)]
    monkeypatch.setattr(_flash_choices, "by_descriptors", asked)
    o = flash_attention(*leaves, attn_mask=seen(32, 32).to(device))
    torch.autograd.grad(o.sum(), leaves)


def test_the_same_bits_and_every_element(device, monkeypatch):
    leaves = [x.float().to(device).requires_grad_() for x in inputs_of()]
    for owner, how in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, how)
        monkeypatch.setattr(owner, how, lambda *a, original=original, **options: poison(original(*a, **options)))
    for mask in (MASKS["bool-blind"].to(device), MASKS["added"].to(device)):
        results = []
        for _ in range(2):
            o = flash_attention(*leaves, attn_mask=mask)
            results.append((o, *torch.autograd.grad(o, leaves, torch.ones_like(o))))
        assert all(map(torch.equal, *results)) and not any(x.isnan().any() for x in results[0])


@pytest.mark.parametrize("mask", ["bool-keys", "added"])
def test_masks_inside_pytorch(mask, device):
    q, k, v = (x.float().to(device) for x in inputs_of())
    mask = MASKS[mask].to(device)
    if mask.is_floating_point():
        mask = mask.float().requires_grad_()

    def gradients(call, q=q, k=k, v=v):
        leaves = [*(x.clone().requires_grad_() for x in (q, k, v)), *[mask] * mask.requires_grad]
        o = call(*leaves[:3], attn_mask=mask)
        return o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))

    expected = gradients(flash_attention)
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    for call in (compiled, partial(checkpoint, flash_attention, use_reentrant=False)):
        torch.testing.assert_close(gradients(call), expected)
    names = opchecked(lambda: gradients(flash_attention))
    assert names == ["gpukit::flash_attention", "gpukit::flash_attention_bwd"]
    with torch.autocast(device, dtype=torch.bfloat16):
        assert flash_attention(q, k, v, attn_mask=mask).dtype == torch.bfloat16
    o = flash_attention(q.requires_grad_(), k, v, attn_mask=mask)
    with pytest.raises(RuntimeError, match="there is no second derivative"):
        torch.autograd.grad(o.sum(), q, create_graph=True)


def test_in_the_place_of_pytorchs(device):
    """Fewer dimensions, more of them, and no keys."""
    for q, k, shape in (
        ((3, 8), (6, 8), (3, 6)),
        ((4, 3, 8), (4, 6, 8), (4, 3, 6)),
        ((4, 3, 8), (2, 4, 6, 8), (2, 1, 3, 6)),
        ((2, 3, 4, 3, 8), (2, 1, 4, 6, 8), (2, 1, 1, 1, 6)),
    ):
        q, k, v = (noise(*s, seed=i).float().to(device) for i, s in enumerate((q, k, k)))
        for mask in (seen(*shape).to(device), noise(*shape, seed=6).float().to(device)):
            expected = F.scaled_dot_product_attention(q, k, v, mask)
            torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), expected, rtol=1e-4, atol=1e-5)
    q, k = torch.ones(1, 2, 3, 8, device=device), torch.ones(1, 2, 0, 8, device=device)
    assert (flash_attention(q, k, k, attn_mask=torch.ones(3, 0, device=device)) == 0).all()
    assert flash_attention(k, q, q, attn_mask=torch.ones(1, 3, device=device)).shape == k.shape


@pytest.mark.parametrize(
    ("error", "message", "mask"),
    [
        (TypeError, "attn_mask must be bool, float16, bfloat16 or float32, got torch.int64", torch.ones(33, 35).long()),
        (TypeError, "attn_mask must be bool, .* got torch.float64", torch.ones(33, 35).double()),
        (TypeError, r"attn_mask must be a tensor, got \[1\]", [1]),
        (ValueError, r"attn_mask must be broadcastable to \[B, H, T_q, T_k\], here \[2, 2, 33, 35\], got \[33, 34\]",
         torch.ones(33, 34)),
        (ValueError, r"attn_mask must be broadcastable .* got \[1, 2, 2, 33, 35\]", torch.ones(1, 2, 2, 33, 35)),
        (ValueError, "attn_mask is on meta, q on", torch.ones(33, 35, device="meta")),
    ],
)  # fmt: skip
def test_masks_that_do_not_fit(error, message, mask, device):
    q, k, v = (x.float().to(device) for x in inputs_of())
    mask = mask.to(device) if isinstance(mask, torch.Tensor) and mask.is_cpu else mask
    with pytest.raises(error, match=f"flash_attention: {message}"):
        flash_attention(q, k, v, attn_mask=mask)


def test_masks_beside_is_causal(device):
    q = torch.ones(1, 2, 3, 8, device=device)
    with pytest.raises(ValueError, match="attn_mask and is_causal exclude each other; put both into the mask"):
        scaled_dot_product_attention(q, q, q, torch.ones(3, 3, device=device), is_causal=True)
    with pytest.raises(
        ValueError, match=r"attn_mask must be broadcastable to \[2, 3, 2, 3, 3\], got \[4, 1, 1, 3, 3\]"
    ):
        scaled_dot_product_attention(*[q.expand(2, 3, 2, 3, 8)] * 3, torch.ones(4, 1, 1, 3, 3, device=device))
