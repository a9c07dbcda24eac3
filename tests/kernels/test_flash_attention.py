"""FlashAttention: the reference and its cost, and the kernels against it, on the CPU in the interpreter and on a GPU."""

import dataclasses
import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import gpukit
from gpukit import hardware
from gpukit.kernels import _device, _launch, flash_attention, flash_attention_varlen
from gpukit.kernels import _flash_choices as choices
from gpukit.kernels import _flash_descriptors as descriptors
from gpukit.kernels._flash_backward import flash_attention_bwd
from gpukit.kernels._flash_choices import PLAIN, TABLES, Config
from gpukit.kernels._flash_descriptors import DescriptorConfig
from gpukit.kernels.flash_attention import flash_attention_fwd, reach, scaled_dot_product_attention
from gpukit.op import Cost
from gpukit.reference.flash_attention import CAUSAL, OP, library, log_sum_exp, make_inputs, pairs, seen
from gpukit.testing import assert_close, poison
from tests.kernels.cases import DTYPES, compile_for_hopper, seeded, spilled_beside_products
from tests.kernels.operations import mild_scores

varlen = sys.modules["gpukit.kernels.flash_attention_varlen"]  # the package's attribute of that name is the function


def inputs_of(B, H, H_kv, T_q, T_k, D, dtype=torch.float32):
    """q, k, v and do, on the CPU; the hard queries of the reference are among them where T_q is not less than T_k, in
    float32 milder ones."""
    q, k, v = mild_scores(*make_inputs((B, H, max(T_q, T_k), D), dtype, seeded()))
    do = torch.randn((B, H, T_q, D), generator=seeded(1), dtype=torch.float64).to(dtype)
    return q[:, :, :T_q], k[:, :H_kv, :T_k], v[:, :H_kv, :T_k], do


def gradients_of(call, inputs, upstream, to=torch.clone):
    leaves = [to(x.detach()).requires_grad_() for x in inputs]
    o = call(*leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, to(upstream))


def check(inputs, device, fn=flash_attention, layout=lambda x: x, **options):
    """fn's result and gradients against the reference in float64, by the project's rule, and nothing that went in changed."""
    *qkv, do = inputs
    truth = gradients_of(lambda *x: OP.reference(*x, **options), qkv, do, torch.Tensor.double)
    native = gradients_of(lambda *x: library(*x, **options), qkv, do)
    leaves = [layout(x.to(device)).detach().requires_grad_() for x in qkv]
    o = fn(*leaves, **options)
    results = o.detach(), *torch.autograd.grad(o, leaves, layout(do.to(device)))
    for name, result, true, theirs in zip(("o", "dq", "dk", "dv"), results, truth, native, strict=True):
        theirs = torch.where(theirs.isnan() & true.isfinite(), 0, theirs)  # of queries that see nothing
        if not true.any():  # of queries that see one key: do . v and do . o cancel, each summed in an order of its own
            terms = qkv[0].shape[-1] * do.abs().max() * qkv[2].abs().max() * max(x.abs().max() for x in qkv[:2])
            assert result.abs().max() <= torch.finfo(result.dtype).eps * terms, name
            continue
        assert_close(result.cpu(), true, theirs, gradient=name != "o", what=f"{name}, {list(qkv[0].shape)}, {options}")
    for before, after in zip(qkv, leaves, strict=True):
        assert torch.equal(before, after.detach().cpu()), "an input was changed"
    return results


# ---------------------------------------------------------------------------------------------------------- reference
def test_reference_is_attention():
    q, k, v, _ = inputs_of(2, 4, 2, 9, 13, 8, torch.float64)
    torch.testing.assert_close(OP.reference(q, k, v), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    q, k, v = q[:, :, :9], k[:, :, :9], v[:, :, :9]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(OP.reference(q, k, v, True, 0.3), expected)
    torch.testing.assert_close(library(q, k, v, True, window=4), OP.reference(q, k, v, True, window=4))


def test_which_keys_a_query_sees():
    as_rows = lambda *given: [[int(x) for x in row] for row in seen(*given)]  # noqa: E731
    assert as_rows(2, 3, True) == [[1, 1, 0], [1, 1, 1]]
    assert as_rows(3, 2, True) == [[0, 0], [1, 0], [1, 1]], "the first query of three sees none of two keys"
    assert as_rows(3, 3, True, 2) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert as_rows(3, 4, False, 2) == [[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]


def test_pairs_are_the_ones_of_the_mask():
    for T_q, T_k, causal, window in itertools.product((1, 4, 7), (1, 5, 7), (False, True), (None, 1, 3)):
        assert pairs(T_q, T_k, causal, window) == seen(T_q, T_k, causal, window).sum()


def test_cost_by_hand():
    assert OP.cost((1, 1, 2, 3), torch.bfloat16) == Cost(read_bytes=36, write_bytes=12, flops=48)
    assert CAUSAL.cost((1, 1, 2, 3), torch.bfloat16) == Cost(read_bytes=36, write_bytes=12, flops=36)
    assert OP.cost_bwd((1, 1, 2, 3), torch.bfloat16) == Cost(read_bytes=60 + 8, write_bytes=36, flops=120)
    assert CAUSAL.cost_bwd((2, 2, 2, 3), torch.bfloat16).flops == 4 * 90


def test_inputs_are_hard():
    q, k, v = make_inputs((1, 2, 64, 32), torch.float32, seeded())
    s = (q @ k.mT / math.sqrt(32))[0, 0]
    assert torch.exp(s[-1]).isinf().any(), "exp of these scores must overflow fp32"
    assert (s[-2] == 0).all() and torch.softmax(s[-3], -1)[0] > 0.99
    assert torch.isfinite(OP.reference(q, k, v)).all() and v.mean() > 0.5


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("T_q", "T_k"), [(70, 50), (45, 71), (1, 40)])
def test_unequal_lengths_and_windows(T_q, T_k, causal, window, device):
    check(inputs_of(1, 1, 1, T_q, T_k, 24), device, causal=causal, window=window)


@pytest.mark.parametrize(("H", "H_kv"), [(4, 2), (3, 1), (2, 2)])
def test_heads_share_keys(H, H_kv, device):
    check(inputs_of(2, H, H_kv, 35, 40, 16, torch.bfloat16), device, causal=True)


@pytest.mark.parametrize("D", [1, 17, 72, 128, 200, 256])
def test_head_sizes(D, device):
    check(inputs_of(1, 1, 1, 20, 33, D), device, causal=True)


def as_BTHD(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def part_of_qkv(x):
    """As a slice of the result of one projection, [B, T, 3, H, D]."""
    return torch.stack([x, x + 1, x], dim=2).transpose(1, 3)[:, :, 1].sub_(1).transpose(1, 2)


def every_second(x):
    return torch.stack((x, torch.full_like(x, 1e4)), dim=-1).flatten(-2)[..., ::2]


def transposed(x):
    return x.mT.contiguous().mT


@pytest.mark.parametrize("layout", [as_BTHD, part_of_qkv, transposed], ids=lambda f: f.__name__)
def test_layouts(layout, device):
    inputs = inputs_of(2, 2, 2, 33, 33, 16)
    o, dq, dk, _ = check([x.bfloat16().float() for x in inputs], device, layout=layout, causal=True)
    if layout in (as_BTHD, transposed):
        assert o.stride() == dq.stride() == dk.stride() == layout(inputs[0]).stride(), "not laid out as q"


def test_expanded_keys_and_upstream_without_strides(device):
    q, k, v, _ = (x.to(device) for x in inputs_of(1, 3, 1, 20, 20, 16))
    plain = flash_attention(q, k, v)
    torch.testing.assert_close(flash_attention(q, k.expand(1, 3, 20, 16), v.expand(1, 3, 20, 16)), plain)
    ours, theirs = (x.clone().requires_grad_() for x in (q, q.double()))
    flash_attention(ours, k, v).sum().backward()
    OP.reference(theirs, k.double(), v.double()).sum().backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


CONFIGS = {
    (c.BLOCK_M, c.BLOCK_N)
    for table in [*(getattr(t, k) for t in TABLES for k in ("forward", "backward_kv", "backward_q")), PLAIN]
    for c in table.values()
}


@pytest.mark.parametrize("blocks", sorted(CONFIGS), ids=str)
def test_every_block_size(blocks, device, monkeypatch):
    """Those of a GPU, on the CPU; on a GPU test_every_configuration goes over warps and stages as well."""
    if device != "cpu":
        pytest.skip("test_every_configuration does more")
    monkeypatch.setattr(choices, "config_of", lambda *_: Config(*blocks, 4, 1))
    check(inputs_of(1, 1, 1, 150, 130, 16), device, causal=True, window=None if sum(blocks) % 3 else 140)


@pytest.mark.parametrize(
    ("shared_kib", "at"), [(228, 0), (164, 1), (100, 2), (64, None)], ids=["h200", "a100", "rtx-4090", "t4"]
)
def test_configurations_are_chosen_by_shared_memory(shared_kib, at, monkeypatch):
    gpu = SimpleNamespace(smem_per_sm_bytes=shared_kib * 1024)
    monkeypatch.setattr(choices, "properties", lambda device: gpu)
    for D, size in ((1, 64), (64, 64), (65, 128), (256, 256)):
        choose = lambda dtype, precision, D=D: choices.config_of("backward_kv", D, dtype, precision, None)  # noqa: E731
        plain = PLAIN[size]
        assert choose(torch.bfloat16, "ieee") == (plain if at is None else TABLES[at].backward_kv[size])
        assert choose(torch.float32, "ieee") == plain
        assert choose(torch.float32, "tf32") == (plain if at is None else TABLES[2].backward_kv[size])


def test_scale(device):
    inputs = inputs_of(1, 2, 2, 20, 20, 16)
    for scale in (1.0, 0.01):
        check([inputs[0] / 8, *inputs[1:]], device, scale=scale)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scores_of_which_exp_overflows(causal, device):
    """In float32 a score of 110 has five digits behind the point, and so do its weight and the gradients."""
    q, k, v = make_inputs((1, 2, 64, 32), torch.float32, seeded())
    do = torch.randn(q.shape, generator=seeded(1))
    truth = gradients_of(lambda *x: OP.reference(*x, causal), (q, k, v), do, torch.Tensor.double)
    ours = gradients_of(lambda *x: flash_attention(*x, causal), [x.to(device) for x in (q, k, v)], do.to(device))
    for given, expected in zip(ours, truth, strict=True):
        size = float(expected.abs().max())
        torch.testing.assert_close(given.cpu().double() / size, expected / size, rtol=0, atol=110 * 2**-22)


def test_tf32_is_less_exact(device):
    q, k, v, _ = (x.to(device) for x in inputs_of(1, 1, 1, 64, 64, 32))
    truth = OP.reference(q.double(), k.double(), v.double())
    ieee, tf32 = ((flash_attention(q, k, v, precision=p) - truth).abs().max() for p in ("ieee", "tf32"))
    assert ieee < 2e-5 and 10 * ieee < tf32 < 0.2


# -------------------------------------------------------------------------------------------------------------- the LSE
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_log_sum_exp_and_its_gradient(causal, device):
    q, k, v, do = (
        torch.randn(size, generator=seeded(i))
        for i, size in enumerate(((1, 2, 40, 16), *2 * [(1, 1, 33, 16)], (1, 2, 40, 16)))
    )
    weights = torch.randn(1, 2, 40, generator=seeded(4))

    def loss(o, lse, do, weights):
        return (o * do).sum() + (torch.where(lse.isinf(), 0, lse) * weights).sum()

    ours = [x.to(device).requires_grad_() for x in (q, k, v)]
    o, lse = flash_attention(*ours, causal, return_lse=True)
    given = torch.autograd.grad(loss(o, lse, do.to(device), weights.to(device)), ours)
    expected = []
    for dtype in (torch.float64, torch.float32):
        theirs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        truth = log_sum_exp(*theirs[:2], causal=causal)
        dx = torch.autograd.grad(loss(OP.reference(*theirs, causal), truth, do, weights), theirs)
        expected.append([truth.detach(), *(x.nan_to_num(0) for x in dx)])  # NaN where a query sees nothing
    assert lse.dtype == torch.float32 and lse.isinf().sum() == (14 if causal else 0)
    for a, b, c in zip((lse.detach(), *given), *expected, strict=True):
        assert_close(a.cpu(), b, c, gradient=a is not lse)


def test_results_over_two_sets_of_keys_can_be_joined(device):
    q, k, v, _ = (x.to(device) for x in inputs_of(1, 1, 1, 20, 50, 16))
    (o1, lse1), (o2, lse2) = (
        flash_attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(23), slice(23, 50))
    )
    lse = torch.logaddexp(lse1, lse2)
    joined = o1 * torch.exp(lse1 - lse)[..., None] + o2 * torch.exp(lse2 - lse)[..., None]
    torch.testing.assert_close(joined, flash_attention(q, k, v), rtol=1e-4, atol=1e-4)


def test_only_the_log_sum_exp_is_used(device):
    q, k, v, _ = (x.to(device) for x in inputs_of(1, 1, 1, 5, 9, 16))
    _, lse = flash_attention(q.requires_grad_(), k, v, return_lse=True)
    (dq,) = torch.autograd.grad(lse.sum(), q)
    p = torch.softmax(q.detach() @ k.mT / 4, -1)
    torch.testing.assert_close(dq, p @ k / 4, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------- edge cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_that_see_nothing(dtype, device):
    q, k, v, do = (x.to(device) for x in inputs_of(1, 1, 1, 50, 11, 16, dtype))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = flash_attention(*leaves, causal=True, return_lse=True)
    assert (o[:, :, :39] == 0).all() and (lse[:, :, :39] == -math.inf).all()
    assert (o[:, :, 39:] != 0).all() and lse[:, :, 39:].isfinite().all()
    dq, dk, dv = torch.autograd.grad(
        [o, lse], leaves, [do, torch.full_like(lse, math.nan).masked_fill(lse.isfinite(), 0)]
    )
    assert (dq[:, :, :39] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv)) and (dv[:, :, 0] != 0).all()


@pytest.mark.parametrize("shape", [(0, 1, 3, 3), (1, 0, 3, 3), (1, 1, 0, 3), (1, 1, 3, 0), (1, 1, 0, 0)], ids=str)
def test_sizes_zero(shape, device):
    B, H, T_q, T_k = shape
    q = torch.randn(B, H, T_q, 16, device=device, requires_grad=True)
    k, v = (torch.randn(B, H, T_k, 16, device=device, requires_grad=True) for _ in range(2))
    o, lse = flash_attention(q, k, v, return_lse=True)
    assert o.shape == q.shape and (o == 0).all() and (lse == -math.inf).all()
    for dx, x in zip(torch.autograd.grad(o.sum(), (q, k, v)), (q, k, v), strict=True):
        assert dx.shape == x.shape and (dx == 0).all()


def test_nan_stays_in_its_query(device):
    q, k, v, _ = (x.to(device) for x in inputs_of(1, 2, 2, 20, 20, 16))
    q[0, 0, 3] = math.nan
    o = flash_attention(q, k, v, causal=True)
    assert o[0, 0].isnan().all(-1).nonzero().flatten().tolist() == [3] and o[0, 1].isfinite().all()


# ------------------------------------------------------------------------------------------------------------- memory
def test_every_element_is_written(device, monkeypatch):
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, original=original, **b: poison(original(*a, **b)))
    q, k, v, do = (x.to(device) for x in inputs_of(1, 2, 1, 45, 37, 24))
    for causal in (False, True):
        settings = *reach(causal, None), 0.2, "ieee"
        o, lse, _ = flash_attention_fwd(q, k, v, *settings)
        results = o, lse, *flash_attention_bwd(do, None, q, k, v, o, lse, *settings)
        assert not any(x.isnan().any() for x in results)


def test_offsets_beyond_int32(device):
    """Heads 2^30 elements apart, and rows 2^25, in memory that is never touched in between."""
    buffer = torch.empty(2**31 + 2**30 + 20 * 16, dtype=torch.float16, device=device)
    # 16 divides all strides, as it does those near by: of others Triton makes another kernel, which adds in another order.
    for size, stride in (((1, 4, 20, 16), (16, 2**30, 16, 1)), ((1, 1, 70, 16), (16, 16, 2**25, 1))):
        x = buffer.as_strided(size, stride)
        x.copy_(torch.randn(size, generator=seeded()))
        o = flash_attention(x, x, x, causal=True)
        settings = *reach(True, None), 0.25, "ieee"
        _, lse, _ = flash_attention_fwd(x, x, x, *settings)
        near = x.contiguous()
        torch.testing.assert_close(o, flash_attention(near, near, near, causal=True), rtol=0, atol=0)
        o = o.contiguous()
        given = flash_attention_bwd(x, None, x, x, x, o, lse, *settings)
        expected = flash_attention_bwd(near, None, near, near, near, o, lse, *settings)
        for a, b in zip(given, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        del o, given, a


def test_no_traffic_of_the_size_of_the_scores():
    """Bytes of a forward and a backward pass on an imagined H200, counted: what is written and what is allocated grows as
    T, and of the reads, which go through L2, only the blocks that each program walks over grow as T^2."""
    written, allocated = {}, {}
    D = 64
    for T in (1024, 2048):
        q, k, v = (torch.empty(1, 1, T, D, dtype=torch.bfloat16, device="meta") for _ in range(3))
        # Without a TMA unit, for the kernels with pointers.
        by_pointers = dataclasses.replace(hardware.gpu("h200"), compute_capability=(8, 0))
        with hardware.imagined(by_pointers), gpukit.trace(gpu="h200", sample=2) as t:
            settings = *reach(False, None), 0.1, "ieee"
            made = flash_attention_fwd(q, k, v, *settings)[:2]
            made += flash_attention_bwd(q, None, q, k, v, *made, *settings)
        written[T], allocated[T] = t.write_bytes, sum(x.nbytes for x in made) + 4 * T  # and delta
        forward = next(launch for launch in t.launches if "fwd" in launch.kernel)
        walks = T // TABLES[0].forward[64].BLOCK_M
        assert forward.load_bytes == q.nbytes + walks * (k.nbytes + v.nbytes) and len(t.launches) == 4
    assert written == allocated, "o, the LSE, delta, dq, dk and dv once, and nothing else"
    assert allocated[2048] == 2 * allocated[1024]


# -------------------------------------------------------------------------------------------------- tensor descriptors
@pytest.fixture
def hopper(device, monkeypatch):
    """What is for Hopper wherever it applies: on the CPU, as if it were an H200, the descriptors of the backward pass, in
    small blocks; Gluon cannot be interpreted. Returns what was launched."""
    launched = []

    def launch(kernel, *given, **constants):
        launched.append(kernel.fn.__name__)
        return _launch.launch(kernel, *given, **constants)

    monkeypatch.setattr(descriptors, "launch", launch)
    if device == "cpu":
        monkeypatch.setattr(choices, "properties", lambda device: hardware.gpu("h200"))
        small = DescriptorConfig(16, 32, 4, 2)
        monkeypatch.setattr(descriptors, "BACKWARD_KV", dict.fromkeys(descriptors.BACKWARD_KV, small))
    elif torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with tensor descriptors")
    elif torch.cuda.get_device_capability() < (10, 0):
        monkeypatch.setattr(_device.for_hopper(choices.GLUON, torch.device(device)), "launch", launch)
    return launched


def for_hopper(device):
    """The kernels of a call and its backward pass that are launched from there."""
    if device != "cpu" and torch.cuda.get_device_capability() < (10, 0):
        return [f"flash_attention_{x}_hopper_kernel" for x in ("fwd", "bwd_q", "bwd_kv")]
    return ["flash_attention_bwd_kv_descriptor_kernel"]


@pytest.mark.parametrize(
    ("T_q", "T_k", "causal", "window"),
    [
        (70, 50, False, None),
        (70, 50, True, None),
        (45, 71, True, None),
        (64, 64, True, 20),
        (45, 71, False, 20),
        (1, 40, True, None),
        (40, 40, True, 1),
    ],
)
def test_descriptors_match_float64(T_q, T_k, causal, window, hopper, device):
    check(inputs_of(1, 2, 1, T_q, T_k, 64, torch.bfloat16), device, causal=causal, window=window)
    assert hopper == for_hopper(device)


def part_of_projection(x):
    """As a slice of [B, T, 3, H, D] in memory."""
    return torch.stack([x.transpose(1, 2)] * 3, dim=2)[:, :, 1].transpose(1, 2)


@pytest.mark.parametrize("layout", [as_BTHD, part_of_projection], ids=lambda f: f.__name__)
def test_descriptors_take_layouts_and_shared_heads(layout, hopper, device):
    inputs = inputs_of(2, 4, 2, 37, 64, 128, torch.float16)
    _, dq, _, _ = check(inputs, device, layout=layout, causal=True)
    assert hopper == for_hopper(device)
    if layout is as_BTHD:
        assert dq.stride() == layout(inputs[0]).stride()


def test_descriptors_give_what_pointers_give(hopper, device, monkeypatch):
    """o, the LSE with its rows that see nothing, and the gradients of both; and each bit of it twice."""
    q, k, v, do = (x.to(device) for x in inputs_of(1, 2, 1, 70, 50, 64, torch.bfloat16))
    settings = *reach(True, None), 0.125, "ieee"
    dlse = torch.randn(1, 2, 70, generator=seeded(2)).to(device)
    results = []
    for _ in range(2):
        o, lse, _ = flash_attention_fwd(q, k, v, *settings)
        results.append((o, lse, *flash_attention_bwd(do, dlse, q, k, v, o, lse, *settings)))
    assert all(map(torch.equal, *results)) and hopper == 2 * for_hopper(device)
    monkeypatch.setattr(choices, "by_descriptors", lambda *_: False)
    monkeypatch.setattr(choices, "config_of", lambda *_: Config(32, 16, 4, 1))
    o, lse, _ = flash_attention_fwd(q, k, v, *settings)
    others = o, lse, *flash_attention_bwd(do, dlse, q, k, v, o, lse, *settings)
    assert (results[0][0][:, :, :20] == 0).all() and (results[0][1][:, :, :20] == -math.inf).all()
    assert hopper == 2 * for_hopper(device)
    for a, b in zip(results[0], others, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


ONE_PASS = {64: "flash_attention_bwd_hopper_kernel", 128: "flash_attention_bwd_two_groups_kernel"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "H", "H_kv", "T_q", "T_k", "D", "causal", "window"),
    [
        (2, 4, 2, 1100, 1100, 64, False, None),
        (4, 10, 10, 1024, 1024, 64, True, None),  # two tiles and more for a program
        (1, 2, 1, 2111, 2600, 64, True, None),
        (1, 2, 2, 4133, 4101, 64, False, 1500),
        (1, 4, 1, 2100, 2051, 128, False, None),
        (1, 2, 2, 4100, 5000, 128, True, None),
    ],
)
def test_all_gradients_in_one_pass(B, H, H_kv, T_q, T_k, D, causal, window, hopper, device):
    """Long sequences; also where the last tile of keys is cut, whose rows of zeros must give nothing."""
    if device == "cpu" or torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("needs a Hopper GPU")
    inputs = inputs_of(B, H, H_kv, T_q, T_k, D, torch.bfloat16)
    check(inputs, device, causal=causal, window=window)
    assert hopper[-2:] == [ONE_PASS[D], "dq_from_sums_kernel"]
    q, k, v, do = (x.to(device) for x in inputs)
    q, k = q.abs(), -k.abs()  # scores far below 0: the exponential of a missing key's score, 0, less the LSE overflows
    settings = *reach(causal, window), 30.0, "ieee"
    o, lse, _ = flash_attention_fwd(q, k, v, *settings)
    assert all(x.isfinite().all() for x in flash_attention_bwd(do, None, q, k, v, o, lse, *settings))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("factor", [1, 30], ids=["references of the first block do", "and do not"])
def test_long_sequences_forward(D, causal, factor, hopper, device):
    """The first block's maxima as references: the second launch computes again where scores rise far beyond them."""
    if device == "cpu" or torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("needs a Hopper GPU")
    q, k, v, _ = (x.to(device) for x in inputs_of(2, 2, 1, 2111, 2203, D, torch.bfloat16))
    q = q * factor
    options = {"causal": causal}
    o = flash_attention(q, k, v, **options)
    assert hopper == 2 * for_hopper(device)[:1]
    wide = q, *(x.expand(2, 2, -1, -1) for x in (k, v))
    assert_close(o, OP.reference(*(x.double() for x in wide), **options), library(*wide, **options))


@pytest.mark.gpu
def test_gradients_are_deterministic_on_request(hopper, device):
    if device == "cpu" or torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("needs a Hopper GPU")
    q, k, v, do = (x.to(device) for x in inputs_of(1, 8, 8, 4096, 4096, 64, torch.bfloat16))
    settings = *reach(False, None), 0.125, "ieee"
    o, lse, _ = flash_attention_fwd(q, k, v, *settings)
    hopper.clear()
    torch.use_deterministic_algorithms(True)
    try:
        results = [flash_attention_bwd(do, None, q, k, v, o, lse, *settings) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert hopper == 3 * for_hopper(device)[1:]
    assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[0], results[2]))


FOR_HOPPER = """
from gpukit.kernels import _flash_hopper as hopper

hopper.multiprocessors, hopper.launch = lambda device: 132, launch
for D, dtype in ((64, torch.bfloat16), (128, torch.float16)):
    x, lse = torch.zeros(1, 2, 208, D, dtype=dtype), torch.zeros(1, 2, 208)
    hopper.forward(x, x, x, x, lse, 2**30, 0, 0.1)
    for sums in (torch.zeros(1, 2, 4, 64 * D), None):
        hopper.backward(x, x, x, x, lse, lse, sums, x, x, x, 2**30, 0, 0.1)
"""
FIXED_FOR_HOPPER = """
from gpukit.kernels import _flash_hopper as hopper

hopper.multiprocessors, hopper.launch = lambda device: 132, launch
hopper.FIXED_FROM = dict.fromkeys(hopper.FIXED_FROM, 1)
for D in (64, 128):
    x, lse = torch.zeros(1, 2, 208, D, dtype=torch.bfloat16), torch.zeros(1, 2, 208)
    hopper.forward(x, x, x, x, lse, 2**30, 0, 0.1)
"""


@pytest.mark.prove
def test_hopper_kernels_compile_without_a_gpu(tmp_path):
    compile_for_hopper(FOR_HOPPER, tmp_path)
    spilled = spilled_beside_products(tmp_path)
    assert len(spilled) == 10, spilled
    # Of two groups with all of the registers, some addresses lie in memory, and nothing of what is computed.
    assert not any(n for name, n in spilled.items() if "bwd" in name and "two_groups" not in name), spilled
    # Forward, the first product of a tile stands outside the loop, beside what the tile needs. A block of scores takes 64.
    assert max(spilled.values()) <= 16, spilled


@pytest.mark.prove
def test_references_of_the_first_block_compile_without_a_gpu(tmp_path):
    compile_for_hopper(FIXED_FOR_HOPPER, tmp_path)
    spilled = spilled_beside_products(tmp_path)
    assert len(spilled) == 4, spilled
    # Ten numbers in each of two groups, beside the last product of a tile.
    assert max(spilled.values()) <= 20, spilled


def test_where_descriptors_are_used(hopper, device):
    def used(x, k=None, fn=flash_attention):
        hopper.clear()
        leaves = [y.detach().requires_grad_() for y in (x, x if k is None else k, x if k is None else k)]
        o = fn(*leaves)
        torch.autograd.grad(o, leaves, torch.zeros_like(o))
        assert hopper in ([], for_hopper(device))
        return bool(hopper)

    x = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16, device=device)
    cu = starts((16,), device)
    assert used(x) and used(x.half()) and used(as_BTHD(x)) and used(x[:, :, 1:, :])
    assert not used(x.float()) and not used(torch.cat((x, x[..., :16]), -1)) and not used(transposed(x))
    assert not used(every_second(x)) and not used(x[:, :1].expand(1, 2, 16, 64)), "a stride of 2, and of 0"
    assert not used(torch.cat((x, x[..., :4]), -1)[..., :64]), "rows that 16 bytes do not divide"
    assert not used(torch.zeros(1 + x.numel(), dtype=x.dtype, device=device)[1:].view(x.shape)), "address"
    assert not used(x, x[:, :, :0]), "no keys"
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    o = flash_attention(*leaves)
    hopper.clear()
    torch.autograd.grad(o.sum(), leaves)
    assert hopper, "an upstream gradient that is one number for all is copied"
    packed = lambda *x: flash_attention_varlen(*(y[0].transpose(0, 1) for y in x), cu, cu, 16, 16)  # noqa: E731
    assert not used(x, fn=packed)
    if device == "cpu":
        for major, shared in ((8, 228), (12, 100)):
            gpu = SimpleNamespace(compute_capability=(major, 0), smem_per_sm_bytes=shared * 1024)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(choices, "properties", lambda device, gpu=gpu: gpu)
                patch.setattr(choices, "config_of", lambda *_: Config(16, 16, 4, 1))
                assert not used(x), "an A100, a small GPU"


# ------------------------------------------------------------------------------------------------------------- varlen
LENGTHS_Q, LENGTHS_K = (20, 0, 1, 37, 5), (33, 4, 1, 20, 0)


def starts(lengths, device, dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 7)], ids=str)
def test_packed_sequences_are_as_single_ones(causal, window, device):
    H, H_kv, D = 2, 1, 24
    sizes = ((sum(LENGTHS_Q), H, D), (sum(LENGTHS_K), H_kv, D), (sum(LENGTHS_K), H_kv, D))
    q, k, v = (torch.randn(s, generator=seeded(i)).to(device).requires_grad_() for i, s in enumerate(sizes))
    cu_q, cu_k = starts(LENGTHS_Q, device), starts(LENGTHS_K, device, torch.int64)
    o, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, 37, 40, causal, window=window, return_lse=True)
    do = torch.randn(o.shape, generator=seeded(3)).to(device)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    assert o.shape == q.shape and lse.shape == (H, len(q))
    for i in range(len(LENGTHS_Q)):
        some_q, some_k = slice(*cu_q[i : i + 2].tolist()), slice(*cu_k[i : i + 2].tolist())
        parts = [x.detach()[s].transpose(0, 1)[None] for x, s in ((q, some_q), (k, some_k), (v, some_k))]
        leaves = [x.clone().requires_grad_() for x in parts]
        alone, alone_lse = flash_attention(*leaves, causal, window=window, return_lse=True)
        expected = torch.autograd.grad(alone, leaves, do[some_q].transpose(0, 1)[None])
        torch.testing.assert_close(o[some_q], alone[0].transpose(0, 1), rtol=0, atol=0)
        torch.testing.assert_close(lse[:, some_q], alone_lse[0], rtol=0, atol=0)
        for dx, s, other in zip(gradients, (some_q, some_k, some_k), expected, strict=True):
            torch.testing.assert_close(dx[s], other[0].transpose(0, 1), rtol=0, atol=0)


def test_packed_in_16_bits_against_float64(device):
    q, k, v, do = inputs_of(1, 2, 2, 60, 60, 16, torch.bfloat16)
    cu = starts((23, 37), device)

    def fn(q, k, v):
        packed = flash_attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), cu, cu, 37, 37)
        return packed.transpose(0, 1)[None]

    for cut in (slice(0, 23), slice(23, 60)):
        part = [x[:, :, cut] for x in (q, k, v, do)]
        truth = gradients_of(OP.reference, part[:3], part[3], torch.Tensor.double)
        native = gradients_of(library, part[:3], part[3])
        ours = gradients_of(fn, [x.to(device) for x in (q, k, v)], do.to(device))
        for i, (a, b, c) in enumerate(zip(ours, truth, native, strict=True)):
            assert_close(a[:, :, cut].cpu(), b, c, gradient=i > 0)


# ------------------------------------------------------------------------------------------------------------- errors


def test_bad_lengths(device):
    q = torch.zeros(8, 2, 16, device=device)

    def call(cu_q, cu_k=(0, 8), longest_q=8, longest_k=8, dtype=torch.int32):
        cu_q, cu_k = (torch.tensor(cu, dtype=dtype, device=device) for cu in (cu_q, cu_k))
        return flash_attention_varlen(q, q, q, cu_q, cu_k, longest_q, longest_k)

    assert call((0, 8)).shape == q.shape
    for given, message in (
        (
            ((0, 5, 3, 8), (0, 1, 2, 8)),
            r"cu_seqlens_q must rise from 0 to the 8 rows of q, got \[0, 5, 3, 8\], lengths",
        ),
        (((0, 8), (0, 9)), "cu_seqlens_k must rise from 0 to the 8 rows of k"),
        (((1, 8),), "cu_seqlens_q must rise from 0"),
        (((0, 7),), "cu_seqlens_q must rise from 0 to the 8 rows"),
        (((0, 8), (0, 4, 8)), "must describe as many sequences, got 1 and 2"),
        (((0, 8), (0, 8), 7), "max_seqlen_q is 7, and a sequence of cu_seqlens_q has 8"),
        (((0, 8), (0, 8), 8, 0), "max_seqlen_k is 0, and a sequence of cu_seqlens_k has 8"),
        (((),), r"cu_seqlens_q must be int32 or int64 \[sequences \+ 1\], got \[0\]"),
        ((((0, 8),),), r"cu_seqlens_q must be int32 or int64 .* got \[1, 2\]"),
        (((0, 8), (0, 8), 8, 8, torch.float32), "cu_seqlens_q must be int32 or int64 .* torch.float32"),
    ):
        with pytest.raises(ValueError, match=f"flash_attention_varlen: .*{message}"):
            call(*given)
    with pytest.raises(TypeError, match=r"max_seqlen_k must be a Python integer, got 8\.0"):
        call((0, 8), longest_k=8.0)
    with pytest.raises(ValueError, match="cu_seqlens_q is on meta, q on"):
        flash_attention_varlen(q, q, q, torch.zeros(2, dtype=torch.int32, device="meta"), starts((8,), device), 8, 8)
    with pytest.raises(ValueError, match=r"q must have the dimensions \[total H D\], got shape \[1, 8, 2, 16\]"):
        flash_attention_varlen(q[None], q, q, starts((8,), device), starts((8,), device), 8, 8)


def test_lengths_of_every_origin(device):
    q, cu = torch.randn(8, 1, 16, generator=seeded()).to(device), starts((3, 5), device)
    expected = flash_attention_varlen(q, q, q, cu, cu, 5, 5)
    apart = cu.repeat_interleave(2)[::2]
    assert torch.equal(flash_attention_varlen(q, q, q, apart, apart, 5, 5), expected)
    with torch.inference_mode():
        made_here = starts((3, 5), device)
        for _ in range(2):
            assert torch.equal(flash_attention_varlen(q, q, q, made_here, made_here, 5, 5), expected)


def test_lengths_that_change_before_the_backward_pass(device):
    q, cu = torch.randn(8, 1, 16, generator=seeded()).to(device).requires_grad_(), starts((3, 5), device)
    o = flash_attention_varlen(q, q, q, cu, cu, 5, 5)
    cu[1] = 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**63 - 1, 2**64])
def test_a_window_longer_than_any_sequence(window, device):
    q, k, v, _ = (x.to(device) for x in inputs_of(1, 1, 1, 20, 33, 16))
    for causal in (False, True):
        assert torch.equal(flash_attention(q, k, v, causal, window=window), flash_attention(q, k, v, causal))


def test_packed_there_are_no_second_derivatives(device):
    q, cu = torch.ones(5, 1, 16, device=device, requires_grad=True), starts((5,), device)
    o = flash_attention_varlen(q, q, q, cu, cu, 5, 5)
    with pytest.raises(RuntimeError, match="there is no second derivative, which create_graph=True asks for"):
        torch.autograd.grad(o.sum(), q, create_graph=True)


def test_lengths_are_looked_at_again_when_they_change(device):
    q, cu = torch.zeros(8, 1, 16, device=device), starts((8,), device)
    flash_attention_varlen(q, q, q, cu, cu, 8, 8)
    cu[1] = 9
    with pytest.raises(ValueError, match="cu_seqlens_q must rise"):
        flash_attention_varlen(q, q, q, cu, cu, 8, 8)


# ------------------------------------------------------------------------------------------------------------ PyTorch
@pytest.mark.parametrize(("T_q", "T_k"), [(20, 20), (20, 33), (33, 20)])
def test_in_the_place_of_pytorchs(T_q, T_k, device):
    q, k, v, _ = (x.to(device) for x in inputs_of(2, 4, 2, T_q, T_k, 16))
    for options in ({"is_causal": True}, {"scale": 0.1}, {"is_causal": True, "scale": 0.1, "dropout_p": 0.0}):
        expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        torch.testing.assert_close(
            scaled_dot_product_attention(q, k, v, enable_gqa=True, **options), expected, rtol=1e-4, atol=1e-4
        )


def test_what_is_not_as_in_pytorchs(device):
    q = torch.zeros(1, 2, 4, 16, device=device)
    with pytest.raises(ValueError, match=r"dropout_p is not supported, it must be 0, got 0\.1"):
        scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    with pytest.raises(ValueError, match="query has 2 heads and key 1; pass enable_gqa=True"):
        scaled_dot_product_attention(q, q[:, :1], q[:, :1])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_packed_torch_compile_without_a_graph_break(backend, device):
    torch.compiler.reset()
    q, k, v, _ = (x[0].transpose(0, 1).to(device) for x in inputs_of(1, 2, 1, 20, 33, 16))
    cu = starts((12, 8), device), starts((13, 20), device)
    model = lambda q, k, v: flash_attention_varlen(2 * q, k, v, *cu, 12, 20, causal=True).sin()  # noqa: E731
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    (y, *given), (expected, *wanted) = (gradients_of(f, (q, k, v), torch.ones_like(q)) for f in (compiled, model))
    torch.testing.assert_close(y, expected)
    for a, b in zip(given, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_packed_operators_are_registered(device):
    ops = torch.ops.gpukit
    packed = [x[0].transpose(0, 1).contiguous().to(device) for x in inputs_of(1, 2, 1, 5, 6, 16)[:3]]
    lengths = starts((2, 3), device), starts((3, 3), device), 3, 3
    settings = *reach(True, None), 0.25, "ieee"
    leaves = [x.detach().requires_grad_() for x in packed]
    torch.library.opcheck(ops.flash_attention_varlen.default, (*leaves, *lengths, *settings))
    o, lse = varlen.varlen_fwd(*packed, *lengths, *settings)
    torch.library.opcheck(ops.flash_attention_varlen_bwd.default, (o, None, *packed, o, lse, *lengths, *settings))


def test_autocast_casts(device):
    q, k, v, _ = (x.to(device) for x in inputs_of(1, 1, 1, 5, 6, 16))
    cu_q, cu_k = starts((5,), device), starts((6,), device)
    with torch.autocast(device, dtype=torch.bfloat16):
        o = flash_attention(q, k.half(), v)
        packed = flash_attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), cu_q, cu_k, 5, 6)
        assert F.scaled_dot_product_attention(q, k, v).dtype == o.dtype == packed.dtype == torch.bfloat16
    assert flash_attention(q, k, v).dtype == torch.float32


# ---------------------------------------------------------------------------------------------------- on a GPU alone
# Which of the tables that the GPU's shared memory can hold, not only of its own; None: PLAIN.
TABLE_OF = [*((torch.bfloat16, at) for at in range(len(TABLES))), (torch.float16, 0), (torch.float32, None)]


@pytest.mark.gpu("long")
@pytest.mark.parametrize(
    ("D", "dtype", "at"), [*((D, *which) for D in (64, 128, 256) for which in TABLE_OF), (80, *TABLE_OF[0])], ids=str
)
def test_every_configuration(D, dtype, at, device, monkeypatch):
    size = max(64, 1 << (D - 1).bit_length())
    shared_kib = torch.cuda.get_device_properties(0).shared_memory_per_multiprocessor // 1024
    tables = [table for table in TABLES if shared_kib >= table.shared_kib]
    if at is not None and at >= len(tables):
        pytest.skip("more shared memory than this GPU has")
    table = None if at is None else tables[at]
    choose = lambda kind, *_: getattr(table, kind)[size] if table else PLAIN[size]  # noqa: E731
    monkeypatch.setattr(choices, "config_of", choose)
    monkeypatch.setattr(choices, "by_descriptors", lambda *_: False)
    for options in ({}, {"causal": True}, {"causal": True, "window": 200}, {"window": 200}):
        check(inputs_of(1, 4, 2, 509, 640, D, dtype), device, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_descriptors_in_their_own_blocks(D, hopper, device):
    """With enough keys that some blocks need no mask."""
    for dtype, options in (
        (torch.bfloat16, {}),
        (torch.bfloat16, {"causal": True}),
        (torch.float16, {"causal": True, "window": 300}),
        (torch.float16, {"window": 300}),
    ):
        check(inputs_of(2, 4, 2, 765, 896, D, dtype), device, layout=as_BTHD, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", OP.bench_shapes, ids=str)
def test_measured_shapes(shape, device):
    """Every head against PyTorch in float32, some rows against float64."""
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    for causal in (False, True):
        o = flash_attention(q, k, v, causal)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert (o.float() - expected.float()).abs().amax() <= 4 * torch.finfo(
            o.dtype
        ).eps * expected.float().abs().amax()


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_more_than_2_31_elements(device):
    q = torch.randn(1, 2**31 // (16384 * 128) + 1, 16384, 128, device=device, dtype=torch.bfloat16)
    o = flash_attention(q, q, q, causal=True)
    for head in (0, q.shape[1] - 1):
        part = q[:, head : head + 1]
        assert torch.equal(o[:, head : head + 1], flash_attention(part, part, part, causal=True))


@pytest.mark.gpu
def test_peak_memory_is_linear(device):
    peaks = []
    for T in (4096, 8192, 16384):
        q, k, v = (torch.randn(1, 2, T, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flash_attention(q, k, v, causal=True).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del q, k, v
    assert peaks[1] < 2.1 * peaks[0] and peaks[2] < 2.1 * peaks[1]


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_many_tiles_for_a_program(D, device):
    """More than twice as many as programs find room, of unequal length, an odd number of them; twice with the same bits, and
    on another stream."""
    q, k, v = (torch.randn(33, 13, 1100, D, device=device, dtype=torch.bfloat16) for _ in range(3))
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).float()
    assert (o.float() - expected).abs().amax() <= 4 * torch.finfo(o.dtype).eps * expected.abs().amax()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = flash_attention(q, k, v, causal=True, return_lse=True)
    torch.cuda.synchronize()
    assert torch.equal(o, again[0]) and torch.equal(lse, again[1])
