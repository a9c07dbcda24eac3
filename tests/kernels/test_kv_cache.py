"""The KV cache and attention over it: references and costs, and the kernels against them, on the CPU in the interpreter and
on a GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import gpukit
from gpukit.kernels import KVCache, _launch, decode_attention
from gpukit.kernels.decode_attention import Config, chunk_of, config_of, decode_attention_fwd, splits_of
from gpukit.kernels.kv_cache import generate, kv_append
from gpukit.op import Cost
from gpukit.reference import kv_cache as reference
from gpukit.reference.decode_attention import INT8, OP, cache_bytes, cost, library, make_inputs
from gpukit.testing import assert_close, guarded_empty, poison
from tests.kernels.cases import DTYPES, compile_for_hopper, every_second, padded_rows, seeded


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
        return decode_attention_fwd(q, k, v, lengths, k_scales, v_scales, scale, "ieee", splits=splits, config=config)

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
    q, k, v, full = make_inputs((2, 2, 2, 9, 16), torch.float64, seeded())
    for lengths in (full, torch.tensor([4, 9], dtype=torch.int32)):
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


def test_every_number_of_splits(device):
    """More splits than blocks too, so that some are empty; what is behind a length is NaN."""
    lengths = torch.tensor([0, 1, 33, 48])
    q, k, v, _ = inputs_of(4, 2, 1, 48, 20, 2)
    given = q, k, v, lengths
    truth = OP.reference(*(x.double() if x.is_floating_point() else x for x in given))
    native = OP.reference(*given)
    for b, n in enumerate(lengths):
        poison(k[b, n:]), poison(v[b, n:])
    for splits in (1, 2, 3, 7):
        inputs = [x.to(device) for x in given]
        o = split_by(splits)(*inputs)
        assert_close(o.cpu(), truth, native, what=f"{splits} splits")
        assert bool((o[0] == 0).all()) and bool((o[1, :, 0] == 0).all()), "a query that sees no token gives 0"
    assert torch.equal(o, split_by(7)(*inputs)), "two runs differ"


def test_the_join_takes_several_rounds(device):
    """The last of which has fewer splits than those before it; of 10 splits some are empty."""
    inputs = inputs_of(2, 16, 1, 83, 128)
    inputs[3].copy_(torch.tensor([83, 35]))
    assert chunk_of(7, 16, 128) == chunk_of(10, 16, 128) == 2
    for splits in (7, 10):
        check(inputs, device, fn=split_by(splits), what=f"{splits} splits")


def test_int8_scales_that_vanish_in_float16(device):
    """1e-6 is 17 steps of float16's subnormals, and a weight times it fewer or none."""
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scales_of_16_bits(dtype, device):
    q, k, v, lengths, *scales = INT8.make_inputs((1, 4, 2, 40, 16), dtype, seeded())
    scales = [x.to(dtype) for x in scales]
    check((q, k, v, lengths, *scales), device)
    strided = [torch.stack((x, x * 0), dim=-1)[..., 0] for x in scales]
    inputs = [x.to(device) for x in (q, k, v, lengths)]
    plain = decode_attention(*inputs, *(x.to(device) for x in scales))
    assert torch.equal(decode_attention(*inputs, *(x.to(device) for x in strided)), plain)


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


def test_precision_and_scale(device):
    q, k, v, lengths = (x.to(device) for x in inputs_of(1, 2, 2, 20, 16))
    expected = OP.reference(*(x.double() if x.is_floating_point() else x for x in (q, k, v, lengths)), scale=0.3)
    torch.testing.assert_close(decode_attention(q, k, v, lengths, scale=0.3).double(), expected, atol=1e-5, rtol=1e-5)
    with_tf32 = decode_attention(q, k, v, lengths, scale=0.3, precision="tf32").double()
    torch.testing.assert_close(with_tf32, expected, atol=1e-2, rtol=1e-2)
    assert not torch.equal(with_tf32.float(), decode_attention(q, k, v, lengths, scale=0.3))


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
def test_sequences_that_begin_behind_padding(int8, device):
    """The same bits as if each sequence began at the beginning, and what is before it may be NaN."""
    lengths, first = torch.tensor([37, 40, 40, 5]), torch.tensor([0, 3, 39, 5])
    q, k, v, _ = inputs_of(4, 4, 2, 40, 16, 2)
    scales = ()
    if int8:
        (k, k_scales), (v, v_scales) = reference.quantize(k), reference.quantize(v)
        scales = k_scales, v_scales
    moved = [torch.stack([x.roll(-n, 0) for x, n in zip(c, first.tolist(), strict=True)]) for c in (k, v, *scales)]
    for b, n in enumerate(first.tolist()):
        for x in scales or (k, v):
            poison(x[b, :n])
    on = lambda *tensors: [x.to(device) for x in tensors]  # noqa: E731
    for dtype in (torch.int32, torch.int64):
        o = decode_attention(*on(q, k, v, lengths, *scales), first=first.to(device, dtype))
        assert torch.equal(o, decode_attention(*on(q, *moved[:2], lengths - first, *moved[2:])))
    assert bool((o[3] == 0).all()), "a sequence of padding alone"


@pytest.mark.parametrize(
    "first", [torch.zeros(3, dtype=torch.int32), torch.zeros(2), 0], ids=["length", "dtype", "number"]
)
def test_first_tokens_that_do_not_fit(first, device):
    q, k, v, lengths = (x.to(device) for x in inputs_of(2, 4, 2, 5, 16))
    with pytest.raises(
        ValueError, match=r"^decode_attention: first must be int32 or int64 \[2\], one for each sequence, got"
    ):
        decode_attention(q, k, v, lengths, first=first)


def test_nothing_to_do(device):
    q, k, v, lengths = (x.to(device) for x in inputs_of(2, 4, 2, 5, 16))
    assert decode_attention(q[:0], k[:0], v[:0], lengths[:0]).shape == (0, 4, 1, 16)
    assert bool((decode_attention(q, k[:, :0], v[:, :0], lengths * 0) == 0).all())


# ------------------------------------------------------------------------------------------------- sharing out the work
def test_splits_fill_the_gpu():
    """132 SMs with two programs each, in every turn, as long as there is work for them."""
    for work, T in itertools.product((1, 2, 7, 8, 32, 64, 100, 265, 512, 4096), (1, 100, 2048, 8192, 131072)):
        splits, blocks = splits_of(work, T, 64, 264), -(-T // 64)
        turns = -(-work * splits // 264)
        assert 1 <= splits <= blocks
        if work * blocks >= 8 * 264:
            assert work * blocks > 0.75 * turns * 264 * -(-blocks // splits), (work, T, splits)
    assert splits_of(32, 8192, 64, 264) == 8, "32 heads: 256 programs of 16 blocks"
    assert splits_of(8, 32768, 64, 264) == 32 or splits_of(8, 32768, 64, 264) == 33
    assert splits_of(4096, 8192, 64, 264) == 1, "a large batch needs no splits"


def test_a_round_of_the_join_reads_what_registers_hold():
    for splits, ROWS, BLOCK_D in itertools.product((2, 16, 33, 512), (1, 4, 16, 64), (16, 32, 64, 128, 256)):
        chunk = chunk_of(splits, ROWS, BLOCK_D)
        assert chunk.bit_count() == 1 and chunk * ROWS * BLOCK_D <= max(8192, ROWS * BLOCK_D)
    assert chunk_of(16, 4, 128) == 16, "one round for 16 splits of 4 query heads"


FOR_HOPPER = """
import sys
from gpukit import hardware, kernels

module = sys.modules["gpukit.kernels.decode_attention"]
module.launch, module.properties = launch, lambda device: hardware.gpu("h200")
module.counters = lambda number, *_: torch.zeros(number, dtype=torch.int32)
k, lengths, scales = torch.empty(1, 32768, 8, 128, dtype=torch.bfloat16), torch.tensor([32768]), torch.empty(1, 32768, 8)
for heads in (32, 64):
    q = torch.empty(1, heads, 128, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.int8, torch.float32):
        given = (q if dtype == torch.int8 else q.to(dtype)), k.to(dtype), k.to(dtype), lengths
        module.decode_attention_fwd(*given, *((scales, scales) if dtype == torch.int8 else (None, None)), 0.1, "ieee")
"""


@pytest.mark.prove
def test_it_compiles_without_a_gpu(tmp_path):
    """In bfloat16, int8 and float32, with no register lacking."""
    assert compile_for_hopper(FOR_HOPPER, tmp_path) == [0] * 12


def test_short_sequences_are_split_by_their_own_length(device):
    """Of one launch for many lengths: 10 blocks and 3, among three splits each."""
    if device == "cuda":
        pytest.skip("the trace counts what the interpreter loads")
    q, k, v, _ = inputs_of(2, 1, 1, 160, 16)
    with gpukit.trace(detail=True) as t:
        split_by(3)(q, k, v, torch.tensor([160, 35], dtype=torch.int32))
    tokens = [0] * 6
    for event in t.launches[0].events:
        if event.tensor == "k_ptr" and event.kind == "load":
            tokens[event.program[0]] += len(event.offsets) // 16
    assert tokens == [48, 48, 64, 16, 16, 3]


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
@pytest.mark.skipif(not _launch.INTERPRETED, reason="the trace counts what the interpreter loads")
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
            by_tensor[access.tensor] = by_tensor.get(access.tensor, 0) + access.bytes
    tokens = int(lengths.sum())
    assert sum(n for name, n in by_tensor.items() if name[0] in "kv") == cache_bytes(tokens, 2, 32, k.dtype)
    assert bool(t.loaded(k)[0].all()) and bool(t.loaded(k)[1, :37].all()) and not bool(t.loaded(k)[1, 37:].any())


@pytest.mark.skipif(not _launch.INTERPRETED, reason="the trace counts what the interpreter loads")
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
def test_a_step_reads_and_writes_what_is_predicted(int8):
    cache = KVCache(2, 40, 2, 16, torch.float32, "cpu", int8=int8)
    q, k, v = (torch.randn(2, n, 21, 16, generator=seeded(n)) for n in (4, 2, 2))
    cache.append(k[:, :, :20], v[:, :, :20], [20, 3])
    with gpukit.trace() as t:
        cache.attend(q[:, :, 20:], k[:, :, 20:], v[:, :, 20:])
    append, *attention = t.launches
    token = cache_bytes(1, 2, 16, cache.k.dtype)
    assert append.store_bytes == 2 * token + 2 * 4 and cache.bytes_in_use == 25 * token
    read = sum(a.bytes for launch in attention for a in launch.accesses if a.kind == "load" and a.tensor[0] in "kv")
    assert read == cache.bytes_in_use


# ------------------------------------------------------------------------------------------------------------- KVCache
def filled(B, T, H, D, dtype, device, seed=0):
    return (
        torch.randn((B, T, H, D), generator=seeded(seed + i)).to(dtype).to(device).transpose(1, 2) for i in range(2)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_keeps_tokens_in_order(dtype, device):
    cache = KVCache(2, 9, 3, 20, dtype, device)
    poison(cache.k), poison(cache.v)
    k, v = filled(2, 9, 3, 20, dtype, device)
    for first, last in ((0, 4), (4, 5), (5, 9)):
        cache.append(k[:, :, first:last], v[:, :, first:last])
        assert cache.lengths.tolist() == [last] * 2 and cache.longest == last
        assert torch.equal(cache.k[:, :last], k[:, :, :last].transpose(1, 2))
        assert torch.equal(cache.v[:, :last], v[:, :, :last].transpose(1, 2))
        assert bool(cache.k[:, last:].isnan().all()), "nothing is written behind the last token"
    assert cache.nbytes == cache.bytes_in_use == 2 * 2 * 9 * 3 * 20 * dtype.itemsize
    cache.clear()
    assert cache.longest == cache.bytes_in_use == int(cache.lengths.sum()) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_quantises(dtype, device):
    cache = KVCache(2, 6, 5, 33, dtype, device, int8=True)
    k, v = filled(2, 5, 5, 33, dtype, device)
    k, v = k.clone(), v.clone()
    k[0, 0, 0] = 0
    cache.append(k[:, :, :4], v[:, :, :4])
    cache.append(k[:, :, 4:], v[:, :, 4:])
    for x, q, scales in ((k, cache.k, cache.k_scales), (v, cache.v, cache.v_scales)):
        expected, expected_scales = reference.quantize(x.transpose(1, 2))
        torch.testing.assert_close(scales[:, :5], expected_scales)
        # Exactly between two integers the last bit of the division decides.
        assert (q[:, :5].int() - expected.int()).abs().max() <= 1
        assert (q[:, :5] != expected).float().mean() < 0.01
    assert cache.bytes_in_use == 2 * cache_bytes(5, 5, 33, torch.int8)


def test_append_takes_prompts_of_several_lengths(device):
    cache = KVCache(3, 6, 2, 16, torch.float32, device)
    poison(cache.k)
    k, v = filled(3, 5, 2, 16, torch.float32, device)
    cache.append(k, v, [5, 0, 2])
    assert bool(cache.k[1].isnan().all()) and bool(cache.k[2, 2:].isnan().all()), "padding is not kept"
    cache.append(k[:, :, :1], v[:, :, :1])
    assert cache.lengths.tolist() == [6, 1, 3] and cache.bytes_in_use == cache_bytes(10, 2, 16, torch.float32)
    k = k.transpose(1, 2)
    assert torch.equal(cache.k[0], torch.cat((k[0], k[0, :1])))
    assert torch.equal(cache.k[2, :3], torch.cat((k[2, :2], k[2, :1])))
    assert bool(cache.k[1, 1:].isnan().all()) and bool(cache.k[2, 3:].isnan().all())


def test_append_stays_inside(device):
    """A replayed CUDA graph does not look whether a token still fits; the kernel does."""
    k_cache, verify = guarded_empty((2, 4, 2, 16), torch.float32, device)
    v_cache, verify_v = guarded_empty((2, 4, 2, 16), torch.float32, device)
    k, v = filled(2, 3, 2, 16, torch.float32, device)
    kv_append(k, v, k_cache, v_cache, None, None, torch.tensor([3, 9], device=device), None)
    verify("k_cache"), verify_v("v_cache")
    assert torch.equal(k_cache[0, 3], k[0, :, 0]) and bool(k_cache[1].isnan().all())


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_attend_step_by_step(int8, device):
    """Prefill, one token, three tokens: the rows of causal attention over the whole sequence."""
    q, k, v = (torch.randn((2, n, 9, 16), generator=seeded(n)).to(device) for n in (4, 2, 2))
    k = k + torch.arange(9, device=device)[:, None] / 9
    cache = KVCache(2, 9, 2, 16, torch.float32, device, int8=int8)
    parts = [cache.attend(*(x[:, :, a:b] for x in (q, k, v))) for a, b in ((0, 5), (5, 6), (6, 9))]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    tolerance = 0.03 if int8 else 1e-5
    torch.testing.assert_close(torch.cat(parts, dim=2), expected, atol=tolerance, rtol=tolerance)
    assert cache.longest == 9


# ------------------------------------------------------------------------------------------------------------ generate
@pytest.fixture
def model(device):
    return reference.SmallModel(max_tokens=24).to(device)


def caches_for(model, batch, max_tokens, device, **options):
    return [
        KVCache(batch, max_tokens, model.kv_heads, model.head_size, torch.float32, device, **options)
        for _ in range(model.layers)
    ]


def test_generate_says_what_it_says_without_a_cache(model, device):
    prompt = torch.randint(0, 64, (2, 5), generator=seeded()).to(device)
    expected = reference.generate(model, prompt, 6)
    caches = caches_for(model, 2, 10, device)
    text = generate(model, prompt, 6, caches)
    assert torch.equal(text, expected)
    assert len(set(text.flatten().tolist())) > 3, "a text of one token would prove little"
    assert caches[0].longest == 10, "the last token is not needed in the cache"


def test_generate_from_prompts_of_several_lengths(model, device):
    prompt = torch.randint(0, 64, (2, 5), generator=seeded(3)).to(device)
    text = generate(model, prompt, 4, caches_for(model, 2, 8, device), [2, 5])
    assert torch.equal(text[:1], reference.generate(model, prompt[:1, :2], 4))
    assert torch.equal(text[1:], reference.generate(model, prompt[1:], 4))


def test_generate_draws_by_seed(model, device):
    prompt = torch.randint(0, 64, (1, 3), generator=seeded()).to(device)

    def draw(seed, temperature):
        generator = torch.Generator(device).manual_seed(seed)
        return generate(
            model, prompt, 3, caches_for(model, 1, 5, device), temperature=temperature, generator=generator
        ).tolist()

    first = draw(0, 5.0)
    assert draw(0, 5.0) == first != draw(1, 5.0)
    assert draw(1, 1e-4) == reference.generate(model, prompt, 3).tolist(), "a low temperature is greedy"


def test_generate_with_an_int8_cache(model, device):
    """The logits hardly move."""
    tokens = torch.randint(0, 64, (1, 6), generator=seeded()).to(device)
    with torch.no_grad():
        expected = model(tokens)[:, -1]
        caches = caches_for(model, 1, 6, device, int8=True)
        model(tokens[:, :5], caches)
        logits = model(tokens[:, 5:], caches)[:, -1]
    assert (logits - expected).abs().max() < 0.05 * expected.std()


# --------------------------------------------------------------------------------------------- errors and torch.compile


@pytest.mark.skipif(not _launch.INTERPRETED, reason="a GPU's lengths are not looked at")
@pytest.mark.parametrize("lengths", [(1, 4), (-1, 1)], ids=str)
def test_lengths_that_cannot_be(lengths):
    q, cache = torch.zeros(2, 4, 16), torch.zeros(2, 3, 2, 16)
    low, high = lengths
    with pytest.raises(
        ValueError, match=f"^decode_attention: lengths must be 0 to 3, the caches' tokens, got {low} to {high}"
    ):
        decode_attention(q, cache, cache, torch.tensor(lengths))


def test_lengths_out_of_range_are_clamped_on_a_gpu():
    """There nobody can look at them without waiting. Here the same kernel, below the check."""
    q, k, v, _ = inputs_of(2, 1, 1, 20, 16)
    for given, meant in ((25, 20), (2**40, 20), (-3, 0)):
        o = split_by(2)(q, k, v, torch.tensor([given, 7]))
        assert torch.equal(o, split_by(2)(q, k, v, torch.tensor([meant, 7])))


def test_the_cache_refuses(device):
    cache = KVCache(2, 4, 2, 16, torch.float32, device)
    k = torch.zeros(2, 2, 3, 16, device=device)
    cache.append(k, k, [3, 1])
    before = cache.lengths.tolist()
    full = "the cache is full: sequence 0 has 3 of 4 tokens, and 2 more do not fit; max_tokens must be at least 5"
    for error, message, given in (
        (ValueError, full, (k[:, :, :2], k[:, :, :2])),
        (TypeError, "k must have the cache's dtype torch.float32, got torch.float16", (k.half(), k)),
        (ValueError, r"must both be \[2, 2, T, 16\], k is \[2, 2, 3, 15\]", (k[..., 1:], k[..., 1:])),
        (ValueError, r"must both be \[2, 2, T, 16\], v is \[2, 2, 2, 16\]", (k, k[:, :, 1:])),
        (ValueError, "k is on meta, the cache on", (k.to("meta"), k)),
        (ValueError, "counts must be 2 numbers from 0 to 3, the tokens given, got \\[1\\]", (k, k, [1])),
        (ValueError, "counts must be 2 numbers from 0 to 3, .*4", (k, k, [1, 4])),
    ):
        with pytest.raises(error, match=f"KVCache.append: .*{message}"):
            cache.append(*given)
        assert cache.lengths.tolist() == before and cache.longest == 3, "what is refused changes nothing"
    with pytest.raises(ValueError, match="counts are for the first call"):
        cache.attend(k, k, k, [1, 1])
    with pytest.raises(ValueError, match=r"q must have k's tokens and head size, \[3, 16\], got \[2, 16\]"):
        KVCache(2, 4, 2, 16, torch.float32, device).attend(k[:, :, 1:], k, k)


def test_attend_that_raises_appends_nothing(device):
    k = torch.zeros(2, 2, 1, 16, device=device)
    for first in (True, False):
        cache = KVCache(2, 4, 2, 16, torch.float32, device)
        if not first:
            cache.append(k, k, [1, 0])
        before = cache.lengths.tolist()
        for q, scale in ((k.half(), None), (k[:, :, :, 1:], None), (k[:1], None), (k[:, :, :0], None), (k, -1.0)):
            with pytest.raises((TypeError, ValueError)):
                cache.attend(q, k, k, scale=scale)
            assert cache.lengths.tolist() == before and cache.longest == max(before)


@pytest.mark.parametrize(
    ("error", "message", "given"),
    [
        (ValueError, "batch must be a positive integer, got 0", (0, 4, 2, 16)),
        (ValueError, "max_tokens must be a positive integer, got 4.0", (1, 4.0, 2, 16)),
        (ValueError, "head_size must be 1 to 256, got 512", (1, 4, 2, 512)),
        (TypeError, "dtype must be float16, bfloat16 or float32, got torch.int8; int8=True", (1, 4, 2, 16, torch.int8)),
    ],
)
def test_a_cache_that_cannot_be(error, message, given):
    with pytest.raises(error, match=f"KVCache: {message}"):
        KVCache(*given)


def test_generate_refuses_before_it_computes(model, device):
    prompt = torch.zeros(2, 5, dtype=torch.int64, device=device)
    never = lambda *_: pytest.fail("computed")  # noqa: E731
    caches = caches_for(model, 2, 8, device)
    for message, given, options in (
        ("caches\\[0\\] has room for 8 tokens, and 9 are needed", (prompt, 5, caches), {}),
        ("prompt must be \\[B, T\\] with at least one token", (prompt[:, :0], 2, caches), {}),
        ("new_tokens must be a positive integer, got 0", (prompt, 0, caches), {}),
        ("new_tokens must be a positive integer, got 1.5", (prompt, 1.5, caches), {}),
        ("caches\\[0\\] is for 2 sequences, and prompt has 1", (prompt[:1], 2, caches), {}),
        ("temperature must be 0 or more, got -1", (prompt, 2, caches), {"temperature": -1}),
        ("counts must be 2 numbers from 1 to 5, got \\[0, 5\\]", (prompt, 2, caches), {"counts": [0, 5]}),
    ):
        with pytest.raises(ValueError, match=f"generate: {message}"):
            generate(never, *given, **options)
    with pytest.raises(TypeError, match=r"generate: prompt must be int64, got torch\.float32"):
        generate(never, prompt.float(), 2, caches)
    caches[1].append(*(torch.zeros(2, 2, 1, 16, device=device) for _ in range(2)))
    with pytest.raises(ValueError, match=r"caches\[1\] holds 1 tokens already"):
        generate(never, prompt, 2, caches)


def test_kv_append_is_registered(device):
    ops = torch.ops.gpukit
    _, k, v, lengths = (x.to(device) for x in inputs_of(1, 2, 1, 5, 16))
    new = [x[:, :2].transpose(1, 2) for x in (k, v)]
    torch.library.opcheck(ops.kv_append.default, (*new, k.clone(), v.clone(), None, None, lengths * 0, None))
    caches = [torch.zeros(x.shape, dtype=torch.int8, device=device) for x in (k, v)]
    scales = [torch.zeros(x.shape[:3], device=device) for x in (k, v)]
    inputs = *new, *caches, *scales, lengths * 0, lengths * 0 + 1
    torch.library.opcheck(ops.kv_append.default, inputs)


def test_torch_compile_without_a_graph_break(device):
    torch.compiler.reset()
    q, k, v, lengths = (x.to(device) for x in inputs_of(2, 4, 2, 20, 16))

    def step(q, k, v, lengths):
        return decode_attention(q * 2, k, v, lengths).sum(-1), decode_attention(q[:, :, 0] * 2, k, v, lengths)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for n in (20, 7):
        for given, expected in zip(compiled(q, k, v, lengths * 0 + n), step(q, k, v, lengths * 0 + n), strict=True):
            torch.testing.assert_close(given, expected)


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.mark.gpu("long")
@pytest.mark.parametrize(
    ("dtype", "D"),
    [*((torch.bfloat16, D) for D in (16, 64, 80, 128, 256)), *itertools.product(DTYPES[:2], (128, 256))],
    ids=str,
)
def test_every_configuration(dtype, D, device):
    """Of this GPU, and those of GPUs with less shared memory; other head sizes than 128 and 256 in one dtype."""
    kib = torch.cuda.get_device_properties(0).shared_memory_per_multiprocessor // 1024
    for (groups, T_q), op in itertools.product(((1, 1), (4, 1), (8, 8)), (OP, INT8)):
        # A float32 dot adds one product after the other, PyTorch's in several sums side by side: of scores around 400 that
        # costs a digit more than the rule allows.
        q, *cache = op.make_inputs((2, 2 * groups, 2, 1009, D), dtype, seeded())
        if dtype == torch.float32:
            q[0, -1] /= 32
        inputs = torch.cat([q[:, :, None]] * T_q, dim=2), *cache
        configs = {config_of(groups * T_q, D, dtype, cache[0].dtype, n * 1024) for n in {kib, min(kib, 100)}}
        for config, splits in itertools.product(configs, (1, 4)):
            fn = lambda q, k, v, n, ks=None, vs=None, c=config, s=splits: decode_attention_fwd(  # noqa: E731
                q, k, v, n, ks, vs, q.shape[-1] ** -0.5, "ieee", splits=s, config=c
            )
            check(inputs, device, fn=fn, what=f"{config}, {splits} splits")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", OP.bench_shapes, ids=str)
def test_measured_shapes(shape, device):
    """Some sequences against float64, by the rule, all of them at the same bits in two runs."""
    B, H, H_kv, T, D = shape
    q, k, v = (
        torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((B, H, D), (B, T, H_kv, D), (B, T, H_kv, D))
    )
    lengths = torch.randint(1, T + 1, (B,), device=device)
    o = decode_attention(q, k, v, lengths)
    assert torch.equal(o, decode_attention(q, k, v, lengths))
    for b in {0, B - 1}:
        one = [x[b : b + 1] for x in (q, k, v, lengths)]
        truth = OP.reference(*(x.double() if x.is_floating_point() else x for x in one))
        assert_close(o[b : b + 1], truth, library(*one))


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_tokens_past_2_31_elements(device):
    k, v = (torch.empty(1, 2**31 // 128 + 40, 1, 128, dtype=torch.float16, device=device) for _ in "kv")
    k[:, -33:], v[:, -33:] = torch.randn(2, 1, 33, 1, 128, device=device)
    q = torch.randn(1, 2, 128, device=device, dtype=torch.float16)
    k[:, :-33] = -100 * q[:, None, :1]  # what nobody attends to
    v[:, :-33] = 7
    k_one, v_one = k[:, -33:].contiguous(), v[:, -33:].contiguous()
    lengths = torch.tensor([k.shape[1]], device=device)
    far = decode_attention(q[:, :1], k, v, lengths)
    torch.testing.assert_close(far, decode_attention(q[:, :1], k_one, v_one, lengths * 0 + 33), atol=4e-3, rtol=4e-3)


@pytest.mark.gpu
def test_cuda_graph_of_a_step(device):
    """One graph serves every length: the kernels read it from memory."""
    q, k, v, lengths = (x.to(device) for x in inputs_of(2, 8, 2, 300, 64, 1, torch.bfloat16))
    decode_attention(q, k, v, lengths)  # compiles, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode_attention(q, k, v, lengths)
    for n in (300, 17, 0):
        lengths.fill_(n)
        graph.replay()
        assert torch.equal(o, decode_attention(q, k, v, lengths))
