"""What is special about the exercises and the lesson of notebook 14; tests/checks/test_answers.py judges the known answers of all
exercises, tests/kernels/test_kv_cache.py tests the kernels."""

import random
from types import SimpleNamespace

import pytest
import torch

from gpukit import course, hardware
from gpukit.accounting import decoding, memory, models, roofline
from gpukit.checks import kv_cache as checks
from gpukit.checks.kv_cache import ATTEND, DECODE, EXERCISES, INT8, PACKED, SPLIT
from gpukit.grading.exercise import KernelExercise
from gpukit.grading.judge import judge_source
from gpukit.grading.stubs import clear
from gpukit.reference import kv_cache as reference
from gpukit.testing import compare
from gpukit.widgets.decoding import busy
from gpukit.widgets.decoding import decoding as decoding_view
from tests.checks.known import cases, edited, ids

ROOT = course.root(__file__)
SOLUTION = (ROOT / "solutions" / "kv_cache.py").read_text(encoding="utf-8")
KERNELS = [exercise for exercise in EXERCISES if isinstance(exercise, KernelExercise)]


def tensors(args):
    return [x for x in args if isinstance(x, torch.Tensor)]


# ---- cases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise", KERNELS, ids=ids)
def test_cases_hold_what_breaks_kernels(exercise):
    tags = set().union(*(case.tags for case in cases(exercise)))
    assert {"float32", "float16", "bfloat16"} <= tags
    wanted = {
        DECODE: {"blocks", "stale", "strides", "no-token", "many-blocks"},
        PACKED: {"groups", "stale", "many-blocks"},
        SPLIT: {"uneven", "empty", "large-sums", "many-blocks"},
        INT8: {"first", "zero"},
    }
    assert wanted[exercise] <= tags
    assert max(case.args[0].numel() for case in cases(exercise)) <= 1 << 12


@pytest.mark.parametrize("exercise", KERNELS, ids=ids)
def test_slots_behind_the_length_hold_nan_somewhere(exercise):
    at = 5 if exercise is INT8 else 1
    assert any(bool(case.args[at].isnan().any()) for case in cases(exercise))


@pytest.mark.parametrize("exercise", KERNELS, ids=ids)
def test_costs_are_bounded_in_every_case(exercise):
    assert exercise.traffic.memory is not None


@pytest.mark.parametrize("exercise", [DECODE, PACKED, SPLIT], ids=ids)
def test_lengths_lie_around_blocks(exercise):
    found = {n for case in cases(exercise) for n in case.args[3].tolist()}
    assert 1 in found and found & {31, 63, 95} and found & {33, 65, 97, 193} and (0 in found) == (exercise is DECODE)


@pytest.mark.parametrize("of", ("l", "acc"))
def test_sums_in_16_bits_fail_by_more_than_rounding(of):
    q, k, v, lengths = checks._Caches(random.Random(1)).stalling()
    truth = DECODE.reference(*(x.double() for x in (q, k, v)), lengths)
    l, acc = torch.zeros(2, 1), torch.zeros(2, 16)
    for keys, values in zip(k.float().split(32, 1), v.float().split(32, 1), strict=True):
        p = torch.exp(torch.einsum("hd,thd->ht", q[0].float(), keys[0]) / 4)  # the maximum is 0
        l, acc = l + p.sum(-1, keepdim=True), acc + torch.einsum("ht,thd->hd", p, values[0])
        l, acc = (l.bfloat16().float(), acc) if of == "l" else (l, acc.bfloat16().float())
    assert compare((acc / l)[None].bfloat16(), truth, DECODE.reference(q, k, v, lengths)) is not None


def test_every_share_of_an_uneven_split_is_bounded():
    """One program that takes what is left when the blocks are dealt out rounded down makes too many loads."""
    left = 0
    for case in cases(SPLIT):
        blocks, SPLITS = -(-int(case.args[3].max()) // checks.BLOCK), case.args[4]
        last = blocks - (SPLITS - 1) * (blocks // SPLITS)
        launch = SimpleNamespace(longest=5 + 2 * last, load_bytes=0, atomic_bytes=0, store_bytes=1 << 40)
        broken = checks._split_rule(case, (launch,))
        assert broken is None or last > -(-blocks // SPLITS)
        left += broken is not None
    assert left >= 3


def test_strided_caches_are_views_of_several_kinds():
    strided = [case for case in cases(DECODE) if "strides" in case.tags]
    assert any(case.args[1].stride() != case.args[2].stride() for case in strided)
    assert any(not case.args[1].is_contiguous() for case in strided)
    assert any(case.args[1].untyped_storage().nbytes() > case.args[1].nbytes for case in strided)  # k and v together


# ---- what the checks hold to be true ---------------------------------------------------------------------------------


def test_attending_in_pieces_is_attending_at_once():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 11, heads, 8, generator=generator) for heads in (4, 2, 2))
    k_cache, v_cache = (torch.full((2, 12, 2, 8), torch.nan) for _ in range(2))
    outputs, length = [], 0
    for T in (5, 1, 1, 4):
        new = [x[:, length : length + T] for x in (q, k, v)]
        o, k_cache, v_cache = checks._attended()(*new, k_cache, v_cache, length)
        outputs.append(o)
        length += T
    whole = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(torch.cat(outputs, 1), whole.transpose(1, 2), rtol=1e-5, atol=1e-5)
    assert torch.equal(k_cache[:, :11], k) and bool(v_cache[:, 11:].isnan().all())


def test_parts_and_blocks_give_the_whole_softmax():
    """With nothing wrong in them the formulas of the misconceptions are the reference."""
    for exercise, gives in ((DECODE, checks._blockwise()), (SPLIT, checks._joined())):
        for case in cases(exercise):
            args = [x.double() if isinstance(x, torch.Tensor) and x.dtype.is_floating_point else x for x in case.args]
            right = exercise.reference(*args)
            torch.testing.assert_close(gives(*args).reshape(right.shape), right, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_int8_reference_is_the_projects():
    for case in cases(INT8):
        _, k, v, *_, lengths = case.args
        _, k_cache, v_cache, k_scales, v_scales = INT8.reference(*case.args)
        for x, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
            q, steps = reference.quantize(x)
            for b, n in enumerate(lengths.tolist()):
                assert torch.equal(cache[b, n], q[b]) and torch.equal(scales[b, n], steps[b])


@pytest.mark.parametrize("seed", range(5))
def test_speed_agrees_with_the_accounting(seed):
    """Tokens a second of a real model, step by step."""
    c, gpu, rng = models.preset("llama3-8b"), hardware.gpu("h200"), random.Random(seed)
    batch, prompt, new = rng.randint(1, 32), rng.randint(1, 4000), rng.randint(1, 20)
    for bits, cache in ((16, "bf16"), (8, "int8")):
        steps = [decoding.decode_step(c, batch, prompt + i, "bf16", cache) for i in range(1, new + 1)]
        rate = batch * new / sum(step.ms(gpu) / 1e3 for step in steps)
        read = steps[0].weights_bytes // 2
        args = (read, 16, c.layers, c.kv_heads, c.head_size, bits, batch, prompt, new, gpu.hbm_gbps)
        assert checks._rate(*args) == pytest.approx(rate, rel=1e-9)


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_detective_stub_serves_the_prompt_alone():
    found = judge_source(ATTEND, clear(SOLUTION), seed=1)
    assert (found.state, found.diagnosis) == ("fail", "first-tokens-only")
    assert "fails for every case with tokens in the cache already" in " ".join(str(found).split())


def test_two_passes_over_the_keys_are_one_too_many():
    loop = "    for start in range(0, length, BLOCK_T):\n        offs_t = start + tl.arange(0, BLOCK_T).to(tl.int64)\n"
    first = loop + (
        "        mask = (offs_t < length)[:, None] & mask_d[None, :]\n"
        "        k = tl.load(k_ptrs + offs_t[:, None] * stride_kt, mask=mask, other=0.0).to(tl.float32)\n"
        "        s = tl.where(offs_t < length, tl.sum(q[None, :] * k, axis=1), -float('inf'))\n"
        "        m = tl.maximum(m, tl.max(s, axis=0))\n"
    )
    assert judge_source(DECODE, edited("kv_cache", (loop, first + loop)), seed=1).diagnosis == "traffic"


def test_attention_by_torch_is_no_kernel():
    body = "def decode_split(q, k_cache, v_cache, lengths, SPLITS):\n    o = torch.zeros_like(q)\n"
    for b in range(3):
        body += f"    if q.shape[0] > {b}:\n        n = int(lengths[{b}])\n"
        body += f"        k, v = k_cache[{b}, :n].transpose(0, 1), v_cache[{b}, :n].transpose(0, 1)\n"
        body += f"        o[{b}] = torch.nn.functional.scaled_dot_product_attention(q[{b}, :, None], k, v)[:, 0]\n"
    assert judge_source(SPLIT, "import torch\n\n\n" + body + "    return o\n", seed=1).diagnosis == "not-your-kernel"


# ---- bytes of a step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ("gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v3"))
@pytest.mark.parametrize("batch", (1, 16))
def test_a_step_reads_what_the_operations_read_but_for_activations(model, batch):
    step = decoding.decode_step(model, batch, 4096)
    operations = sum(point.bytes for point in roofline.model_points(model, batch, 1, past=4095))
    assert 0.985 * operations <= step.total_bytes <= operations


def test_a_step_by_hand():
    c = models.Config("small", vocab_size=10, hidden=4, layers=2, heads=2, kv_heads=1, tied_embeddings=False)
    step = decoding.decode_step(c, 3, 5, "fp32", "int8")
    assert step.weights_bytes == 4 * (models.parameters(c).total - 10 * 4)
    assert step.cache_bytes == 2 * 2 * 3 * 5 * (2 + 4)  # k and v, layers, sequences, tokens, D and a scale
    assert step.held_bytes == 4 * models.parameters(c).total + step.cache_bytes
    assert decoding.decode_step(c, 3, 5).cache_bytes == memory.kv_cache_bytes(c, 3, 5)
    gpu = hardware.gpu("h200")
    assert step.tokens_per_s(gpu) == pytest.approx(3 / (step.total_bytes / gpu.hbm_gbps / 1e9))
    assert step.fits(gpu) and not decoding.decode_step("llama3-70b", 1, 1).fits(gpu)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"batch": 0}, "decode_step: batch must be a whole number from 1"),
        ({"tokens": 0}, "tokens must be a whole number from 1"),
        ({"weights": "int7"}, "decode_step: weights must be one of"),
        ({"cache": "int7"}, "decode_step: cache must be one of"),
    ),
)
def test_what_is_no_step_is_said(change, message):
    with pytest.raises(ValueError, match=message):
        decoding.decode_step(**{"config": "gpt2", "batch": 1, "tokens": 1, **change})


def test_the_board_shows_the_accounting():
    view, gpu = decoding_view("llama3-8b", batch=16, tokens=8192), hardware.gpu("h200")
    step = decoding.decode_step("llama3-8b", 16, 8192)
    assert f"{step.tokens_per_s(gpu):,.0f} tokens/s" in view.sentence() and "batch 256 does not fit" in view.sentence()
    view.batch, view.cache = 100, "int8"
    assert "batch 100" not in view.sentence().partition("Others")[2] and "in each of 100 caches" in view.sentence()
    view.tokens = "nothing"
    assert "tokens" in view.sentence()
    with pytest.raises(ValueError, match="decoding: cache must be one of bf16, int8, got 'int4'"):
        decoding_view(cache="int4")


@pytest.mark.parametrize(
    ("parts", "at_work", "most"), ((1, 8, 32_768), (4, 32, 8192), (16, 128, 2048), (32, 132, 2048))
)
def test_parts_of_a_head_over_sms(parts, at_work, most):
    by_sm = decoding.tokens_of_sms(32_768, 8, parts, 132)
    assert sum(map(sum, by_sm)) == 8 * 32_768
    assert (sum(map(bool, by_sm)), max(map(sum, by_sm))) == (at_work, most)
    alt = busy(32_768, 8, (parts,), 132).alt
    assert f"{parts}: {at_work} of 132 SMs at work, at most {most:,} tokens each" in alt


def test_no_parts_are_refused():
    with pytest.raises(ValueError, match="tokens_of_sms: parts must be a whole number from 1"):
        busy(32, 8, (0,), 132)
