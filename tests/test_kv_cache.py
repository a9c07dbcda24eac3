"""The KV cache and attention over it: references and costs, and the kernels against them, on the CPU in the interpreter and
on a GPU."""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F

import gpukit
from gpukit.kernels import KVCache, _rows, decode_attention
from gpukit.kernels.decode_attention import Config, config_of, decode_attention_fwd, splits_of
from gpukit.op import Cost
from gpukit.reference import kv_cache as reference
from gpukit.reference.decode_attention import INT8, OP, cache_bytes, cost, library, make_inputs
from gpukit.testing import assert_close, poison
from tests.kernel_cases import DTYPES, every_second, padded_rows, seeded, shapes_of

decode = sys.modules["gpukit.kernels.decode_attention"]  # the package's attribute of that name is the function
SPLITS = (1, 2, 3, 5, 40)


def inputs_of(B, H, H_kv, T, D, T_q=1, dtype=torch.float32):
    """q [B, H, T_q, D], the caches [B, T, H_kv, D] and lengths, on the CPU."""
    q, k, v, lengths = make_inputs((B, H, H_kv, T, D), dtype, seeded())
    more = torch.randn((B, H, T_q - 1, D), generator=seeded(1)).to(dtype)
    return torch.cat((more, q[:, :, None]), dim=2), k, v, lengths


def check(inputs, device, fn=decode_attention, layout=lambda x: x, what="o"):
    """fn against the reference in float64, by the project's rule, and nothing that went in changed."""
    truth = OP.reference(*(x.double() if x.is_floating_point() else x for x in inputs))
    native = OP.reference(*inputs)
    ours = [layout(x.to(device)) if x.ndim > 2 else x.to(device) for x in inputs]
    o = fn(*ours)
    assert_close(o.cpu(), truth, native, what=f"{what} of q {list(inputs[0].shape)}, cache {list(inputs[1].shape)}")
    for before, after in zip(inputs, ours, strict=True):
        assert torch.equal(before, after.cpu()), "an input was changed"
    return o


def split_by(splits, BLOCK_M=16, BLOCK_N=16):
    """decode_attention with so many splits, and the blocks of the interpreter."""

    def fn(q, k, v, lengths, k_scales=None, v_scales=None):
        config = Config(BLOCK_M, BLOCK_N, 4, 2, 2)
        scale = q.shape[-1] ** -0.5
        return decode_attention_fwd(q, k, v, lengths, k_scales, v_scales, scale, "ieee", splits, config)

    return fn


# ---------------------------------------------------------------------------------------------------------- reference
def test_reference_is_attention_of_the_last_tokens():
    q, k, v, lengths = inputs_of(2, 4, 2, 13, 8, 3, torch.float64)
    lengths = torch.tensor([13, 7], dtype=torch.int32)
    o = OP.reference(q, k, v, lengths)
    for b, n in enumerate(lengths.tolist()):
        keys, values = k[b, :n].transpose(0, 1), v[b, :n].transpose(0, 1)
        rows = torch.zeros(4, n, 8, dtype=torch.float64)
        rows[:, n - 3 :] = q[b]
        expected = F.scaled_dot_product_attention(rows, keys, values, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(o[b], expected[:, n - 3 :])
    torch.testing.assert_close(library(q, k, v, lengths), o)
    torch.testing.assert_close(OP.reference(q[:, :, -1], k, v, lengths), o[:, :, -1])


def test_library_sees_other_lengths():
    q, k, v, lengths = make_inputs((2, 2, 2, 9, 16), torch.float64, seeded())
    for lengths in (lengths, torch.tensor([4, 9], dtype=torch.int32)):
        torch.testing.assert_close(library(q, k, v, lengths), OP.reference(q, k, v, lengths))


def test_quantised_numbers_are_near():
    x = torch.randn(3, 5, 33, generator=seeded()).mul_(torch.tensor([1e-20, 1.0, 1e20])[:, None, None])
    x[1, 2] = 0
    q, scales = reference.quantize(x)
    assert q.dtype == torch.int8 and q.shape == x.shape and scales.shape == x.shape[:2]
    largest = x.abs().amax(-1, keepdim=True)
    assert (q.abs().amax(-1) == 127).sum() == 14  # of 15 heads of a token, one is zeros
    error = (reference.dequantize(q, scales, torch.float64) - x.double()).abs()
    assert (error <= largest.double() / 254 * 1.001).all() and error[0].max() > 0


def test_costs():
    # A token of Llama 3 8B, 8 heads of 128: 4 KiB a layer in bfloat16, 2 KiB and 64 bytes of scales in int8.
    assert cache_bytes(1, 8, 128) == 4096 and cache_bytes(1, 8, 128, torch.int8) == 2048 + 64
    assert cost((1, 32, 8, 32768, 128), torch.bfloat16) == Cost(8192 + 4 + 32768 * 4096, 8192, 4 * 32 * 32768 * 128)
    assert cost((2, 1, 1, 3, 16), torch.float32) == Cost(2 * 64 + 8 + 2 * 2 * 3 * 64, 2 * 64, 4 * 2 * 3 * 16)
    assert INT8.cost((1, 1, 1, 10, 16), torch.float16).read_bytes == 32 + 4 + 2 * 10 * (16 + 4)
    cache = KVCache(2, 10, 8, 128, torch.bfloat16, "cpu", int8=True)
    assert cache.nbytes == 2 * cache_bytes(10, 8, 128, torch.int8)


# -------------------------------------------------------------------------------------------------- decode_attention
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [OP, INT8], ids=lambda op: op.name)
def test_kernel_matches_reference(op, dtype, device):
    for shape in shapes_of(op, device):
        check(op.make_inputs(shape, dtype, seeded()), device)


@pytest.mark.parametrize("lengths", [(0, 1, 33), (16, 17, 47), (48, 48, 5)], ids=str)
def test_every_number_of_splits(lengths, device):
    """More splits than blocks too, so that some are empty; what is behind a length is NaN."""
    q, k, v, _ = inputs_of(3, 4, 2, 48, 20, 2)
    k[0, 0], v[0, 0] = 1, 1
    for b, n in enumerate(lengths):
        poison(k[b, n:]), poison(v[b, n:])
    given = q, torch.nan_to_num(k), torch.nan_to_num(v), torch.tensor(lengths, dtype=torch.int64)
    expected = OP.reference(*(x.double() if x.is_floating_point() else x for x in given))
    native = OP.reference(*given)
    results = []
    for splits in SPLITS:
        inputs = [x.to(device) for x in (q, k, v, given[3])]
        o = split_by(splits)(*inputs)
        assert_close(o.cpu(), expected, native, what=f"{splits} splits")
        assert torch.equal(o, split_by(splits)(*inputs)), "two runs differ"
        results.append(o.cpu())
    for b, n in enumerate(lengths):
        for o in results:
            assert bool((o[b, :, : max(2 - n, 0)] == 0).all()), "a query that sees no token gives 0"


def test_int8_scales_that_vanish_in_float16(device):
    """1e-6 is two steps of float16's subnormals, and a weight times it is none."""
    q, k, v, lengths = inputs_of(2, 4, 2, 40, 16, 1, torch.float16)
    for factor in (1e-6, 1e3, 0):
        (k8, ks), (v8, vs) = reference.quantize(k), reference.quantize(v.float() * factor)
        inputs = q.float(), k8, v8, lengths, ks, vs
        truth = OP.reference(*(x.double() if x.is_floating_point() else x for x in inputs))
        o = decode_attention(*(x.to(device) for x in (q, *inputs[1:])))
        # In float16 what comes out has few digits near 0, which is its own: as if rounded there.
        bound = 4e-3 * truth.abs().amax(-1, keepdim=True) + 2**-24
        assert bool(((o.cpu().double() - truth).abs() <= bound).all()), factor


@pytest.mark.parametrize("T_q", [1, 3, 6])
def test_a_few_tokens_and_blocks_of_queries(T_q, device):
    """Query heads and tokens are the rows of one product; 8 x 6 of them make three blocks of 16."""
    inputs = inputs_of(2, 8, 1, 37, 24, T_q)
    inputs[3][1] = 5  # fewer than six tokens
    check(inputs, device)
    for splits in (1, 3):
        check(inputs, device, fn=split_by(splits), what=f"{splits} splits")


@pytest.mark.parametrize("D", [1, 15, 17, 96, 129, 256])
def test_head_sizes(D, device):
    check(inputs_of(1, 2, 1, 35, D), device)


def test_any_strides(device):
    """q out of a projection, caches of other orders, odd starts, gaps; the result lies in memory as q does."""
    inputs = inputs_of(2, 6, 3, 34, 16, 2, torch.bfloat16)
    for layout in (padded_rows, every_second, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        check(inputs, device, layout=layout)
    q, k, v, lengths = (x.to(device) for x in inputs)
    together = torch.stack((k, v), dim=3)  # keys beside values
    assert torch.equal(decode_attention(q, *together.unbind(3), lengths), decode_attention(q, k, v, lengths))
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert decode_attention(turned, k, v, lengths).stride() == turned.stride()
    one = decode_attention(q[:, :, 1], k[:, :, :1].expand(k.shape), v, lengths)
    assert one.shape == (2, 6, 16)


def test_tokens_past_2_31_elements(device):
    """A cache that spans more than int32 counts, of which nothing exists but the few tokens in use."""
    if device == "cpu":
        last = 2**31 + 4096
        k = torch.empty_strided((1, 3, 1, 16), (0, last // 2, 0, 1), device="meta")
        storage = torch.UntypedStorage.from_file("/dev/zero", shared=False, nbytes=0) if False else None
        assert storage is None and k.stride(1) * 2 >= 2**31
        pytest.skip("8 GB of memory: on a GPU alone")
    k, v = (torch.empty_strided((1, 3, 1, 16), (0, 2**30 + 8, 0, 1), dtype=torch.float16, device=device) for _ in "kv")
    q, small_k, small_v, lengths = (x.to(device) for x in inputs_of(1, 2, 1, 3, 16, 1, torch.float16))
    k.copy_(small_k), v.copy_(small_v)
    assert torch.equal(decode_attention(q, k, v, lengths), decode_attention(q, small_k, small_v, lengths))


def test_precision_and_scale(device):
    q, k, v, lengths = (x.to(device) for x in inputs_of(1, 2, 2, 20, 16))
    expected = OP.reference(*(x.double() if x.is_floating_point() else x for x in (q, k, v, lengths)), scale=0.3)
    torch.testing.assert_close(decode_attention(q, k, v, lengths, scale=0.3).double(), expected, atol=1e-5, rtol=1e-5)
    with_tf32 = decode_attention(q, k, v, lengths, scale=0.3, precision="tf32").double()
    torch.testing.assert_close(with_tf32, expected, atol=1e-2, rtol=1e-2)
    assert not torch.equal(with_tf32.float(), decode_attention(q, k, v, lengths, scale=0.3))


def test_nothing_to_do(device):
    q, k, v, lengths = (x.to(device) for x in inputs_of(2, 4, 2, 5, 16))
    assert decode_attention(q[:0], k[:0], v[:0], lengths[:0]).shape == (0, 4, 1, 16)
    assert bool((decode_attention(q, k[:, :0], v[:, :0], lengths * 0) == 0).all())


# ------------------------------------------------------------------------------------------------- sharing out the work
def test_splits_fill_the_gpu():
    """132 SMs with two programs each: at least nine tenths of them busy, however small the batch."""
    for work, T in itertools.product((1, 2, 7, 8, 32, 64, 100, 512, 4096), (1, 100, 2048, 8192, 131072)):
        splits, blocks = splits_of(work, T, 64, 264), -(-T // 64)
        assert 1 <= splits <= blocks
        turns = -(-work * splits // 264)
        if blocks >= 128:
            assert work * -(-T // 64) / (turns * 264 * -(-blocks // splits)) > 0.8, (work, T, splits)
    assert splits_of(32, 8192, 64, 264) == 8, "32 heads: 256 programs of 16 blocks"
    assert splits_of(8, 32768, 64, 264) == 32 or splits_of(8, 32768, 64, 264) == 33
    assert splits_of(4096, 8192, 64, 264) == 1, "a large batch needs no second kernel"


def test_short_sequences_are_split_by_their_own_length(device):
    """One length of many: all splits of each sequence have as many blocks, give or take one."""
    if device == "cuda":
        pytest.skip("the trace counts loads of the interpreter")
    q, k, v, _ = inputs_of(2, 1, 1, 160, 16)
    lengths = torch.tensor([160, 48], dtype=torch.int32)
    loads = []
    with gpukit.trace(detail=True) as t:
        split_by(3)(q, k, v, lengths)
    for access in t.launches[0].accesses:
        loads += [access.nbytes] if access.tensor == "k_ptr" and access.kind == "load" else []
    assert sum(loads) == (160 + 48) * 16 * 4


def test_configurations_fit():
    for rows, D, dtype, int8, kib in itertools.product(
        (1, 8, 64, 200), (16, 64, 128, 256), DTYPES, (0, 1), (228, 164, 100, 64)
    ):
        config = config_of(rows, D, dtype, torch.int8 if int8 else dtype, kib * 1024)
        stage = 2 * config.BLOCK_N * D * (1 if int8 else dtype.itemsize)
        held = config.num_stages if config.BLOCK_M == 64 and kib == 228 else config.num_stages - 1
        assert held * stage * config.per_sm <= kib * 1024 or held <= 1
        assert config.BLOCK_M >= 16 and config.BLOCK_N >= 16


# ----------------------------------------------------------------------------------------------------------- traffic
@pytest.mark.skipif(not _rows.INTERPRETED, reason="the trace counts what the interpreter loads")
@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_the_cache_is_read_once(int8):
    """By all query heads and tokens together, up to each length, and not a byte behind it."""
    op = INT8 if int8 else OP
    q, k, v, _, *scales = op.make_inputs((2, 8, 2, 96, 32), torch.bfloat16, seeded())
    lengths = torch.tensor([96, 37], dtype=torch.int32)
    with gpukit.trace() as t:
        split_by(3)(q[:, :, None], k, v, lengths, *scales)
    main = t.launches[0]
    by_tensor = {}
    for access in main.accesses:
        if access.kind == "load":
            by_tensor[access.tensor] = by_tensor.get(access.tensor, 0) + access.nbytes
    tokens = int(lengths.sum())
    assert sum(n for name, n in by_tensor.items() if name[0] in "kv") == cache_bytes(tokens, 2, 32, k.dtype)
    assert bool(t.loaded(k)[0].all()) and bool(t.loaded(k)[1, :37].all()) and not bool(t.loaded(k)[1, 37:].any())
