"""Attention of patched models: generated text, every cache, every kind of mask, and what goes to the original."""

import pytest
import torch

import gpukit
from tests.huggingface.models import FAMILIES, build, build_one_layer, tokens, transformers

attention = pytest.importorskip("gpukit.huggingface.attention")


def text(model, ids, **named):
    return model.eval().generate(ids, do_sample=False, **{"max_new_tokens": 3, **named})


def left_padded(B=3, T=7):
    mask = torch.ones(B, T, dtype=torch.int64)
    mask[0, :3], mask[1, :1] = 0, 0
    return tokens(B, T).masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen2"])  # qwen3 is as it, and more
def test_generate_writes_the_same_text(family):
    """Prompts of several lengths, padded on the left as generate() wants them; Mistral's window is shorter than the text."""
    model = build_one_layer(family)
    ids, mask = left_padded()
    before = text(model, ids, attention_mask=mask)
    report = gpukit.patch(model)
    assert torch.equal(text(model, ids, attention_mask=mask), before) and not report.fallbacks


@pytest.mark.parametrize("how", ["plain", "static", "beams", "chunks"])
def test_generate_with_every_cache(how):
    options = {
        "plain": {}, "static": {"cache_implementation": "static"}, "beams": {"num_beams": 2},
        "chunks": {"prefill_chunk_size": 3},
    }[how]  # fmt: skip
    model, ids = build_one_layer("llama"), tokens(2, 7)
    before = text(model, ids, **options)
    report = gpukit.patch(model)
    assert torch.equal(text(model, ids, **options), before) and not report.fallbacks


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("how", ["plain", "beams", "chunks"])
def test_a_growing_cache_writes_the_same_text(how, patched, monkeypatch):
    """Room for 4 tokens at a time, so that it is used up while text is written; behind padding, and reused after reset()."""
    cache = pytest.importorskip("gpukit.huggingface.cache")
    monkeypatch.setattr(cache, "ROOM", 4)
    options = {"plain": {}, "beams": {"num_beams": 2}, "chunks": {"prefill_chunk_size": 3}}[how]
    model, (ids, mask) = build_one_layer("llama"), left_padded()
    before = text(model, ids, attention_mask=mask, max_new_tokens=6, **options)
    if patched:
        gpukit.patch(model)
    grown = cache.GrowingCache()
    for _ in range(2):
        after = text(model, ids, attention_mask=mask, max_new_tokens=6, past_key_values=grown, **options)
        assert torch.equal(after, before)
        grown.reset()


def test_a_growing_cache_appends_in_place():
    cache = pytest.importorskip("gpukit.huggingface.cache")
    layer, x = cache.GrowingLayer(), torch.randn(2, 3, 40, 8)
    keys, values = layer.update(x[:, :, :30], -x[:, :, :30])
    place = keys.data_ptr()
    for t in range(30, 38):
        keys, values = layer.update(x[:, :, t : t + 1], -x[:, :, t : t + 1])
        assert keys.data_ptr() == place
    layer.crop(-5)
    keys, values = layer.update(x[:, :, 33:], -x[:, :, 33:])
    assert torch.equal(keys, x) and torch.equal(values, -x)


def test_static_cache_behind_padding():
    model, (ids, mask) = build_one_layer("gpt2"), left_padded()
    before = text(model, ids, attention_mask=mask, cache_implementation="static")
    report = gpukit.patch(model)
    after = text(model, ids, attention_mask=mask, cache_implementation="static")
    assert torch.equal(after, before) and not report.fallbacks


def test_decoding_goes_through_the_decode_kernel(monkeypatch):
    seen = []
    for name in ("decode_attention", "flash_attention", "flash_attention_varlen"):
        kernel = getattr(attention, name)
        monkeypatch.setattr(
            attention, name, lambda *a, kernel=kernel, name=name, **n: (seen.append(name), kernel(*a, **n))[1]
        )
    model, ids = build_one_layer("llama"), tokens(1, 5)
    gpukit.patch(model)
    text(model, ids, max_new_tokens=3)
    assert seen == ["flash_attention"] + ["decode_attention"] * 2
    seen.clear()
    text(model, *left_padded()[:1], attention_mask=left_padded()[1], max_new_tokens=2)
    assert seen == ["flash_attention_varlen", "decode_attention"]


def test_decoding_inside_torch_compile():
    """Without a mask: generate() passes one, and what it means is not known then."""
    model, ids = build_one_layer("llama").eval(), tokens(2, 5)
    gpukit.patch(model)
    with torch.no_grad():
        expected = model(ids).logits[:, -1:]
        cache = model(ids[:, :4]).past_key_values
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager")
        found = compiled(ids[:, 4:], past_key_values=cache).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


# --------------------------------------------------------------------------------------------------- to the original
def logits(model, **named):
    ids = tokens(2, 6)
    outputs = model(ids, **named)
    return outputs.logits.detach(), outputs


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", [None, torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])], ids=["no mask", "padding"])
def test_dropout_in_training_is_the_originals(implementation, mask):
    """The same random numbers, so the same bits, with masks as the implementation makes them."""
    model = build("mistral", attention_dropout=0.5, attn_implementation=implementation)
    torch.manual_seed(1)
    before, _ = logits(model, attention_mask=mask)
    report = gpukit.patch(model, norms=False, rope=False, mlp=False, loss=False)
    torch.manual_seed(1)
    assert torch.equal(logits(model, attention_mask=mask)[0], before)
    assert report.fallbacks == {("attention", "dropout above 0 in training"): 2}
    model.eval()
    after, _ = logits(model, attention_mask=mask)
    gpukit.unpatch(model)
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(after[real], logits(model, attention_mask=mask)[0][real], atol=1e-5, rtol=1e-4)
    assert report.fallbacks.total() == 2


def test_masks_of_four_dimensions():
    ours = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    ours[:, :, 4:, 1] = False
    for implementation, mask in (("sdpa", ours), ("eager", torch.where(ours, 0.0, -1e9))):
        model = build("llama", attn_implementation=implementation).eval()
        before, _ = logits(model, attention_mask=mask)
        report = gpukit.patch(model, norms=False, rope=False, mlp=False)
        assert torch.equal(logits(model, attention_mask=mask)[0], before)
        assert report.fallbacks == {("attention", "a mask that is neither causal nor padding"): 2}


def test_attention_weights():
    model = build("llama", attn_implementation="eager").eval()
    before = logits(model, output_attentions=True)[1].attentions
    report = gpukit.patch(model, norms=False, rope=False, mlp=False)
    after = logits(model, output_attentions=True)[1].attentions
    assert len(after) == 2 and all(map(torch.equal, after, before))
    assert report.fallbacks == {("attention", "attention weights are asked for"): 2}


def test_float64():
    model = build("llama", torch.float64).eval()
    before, _ = logits(model)
    report = gpukit.patch(model)
    torch.testing.assert_close(logits(model)[0], before, atol=1e-5, rtol=1e-5)
    assert report.fallbacks == {("attention", "float64 tensors"): 2}


def test_models_that_keep_their_attention():
    for family, kind, change, reason in (
        ("llama", "LlamaAttention", "flex_attention", "uses flex_attention, and calls could not fall back to it"),
        ("gpt2", "GPT2Attention", "eager", "reorder_and_upcast_attn"),
    ):
        options = {"reorder_and_upcast_attn": True} if family == "gpt2" else {}
        model = build(family, attn_implementation=change, **options)
        before = model.config._attn_implementation
        report = gpukit.patch(model)
        assert report.kept == {("attention", kind, reason): 2}
        assert model.config._attn_implementation == before


def test_a_window_that_a_layer_does_not_hand_on(monkeypatch):
    module = build("mistral").model.layers[0].self_attn
    assert attention.passes_window(module) and not attention.passes_window(build("llama").model.layers[0].self_attn)
    monkeypatch.setattr(attention, "passes_window", lambda module: False)
    report = gpukit.patch(build("mistral"))
    assert report.kept == {("attention", "MistralAttention", "keeps its sliding window to itself"): 2}


def test_cross_attention():
    model = build("gpt2", add_cross_attention=True).eval()
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3))
    before, _ = logits(model, encoder_hidden_states=states)
    report = gpukit.patch(model)
    torch.testing.assert_close(logits(model, encoder_hidden_states=states)[0], before, atol=1e-5, rtol=1e-4)
    assert report.count("attention") == 4 and not report.fallbacks


# -------------------------------------------------------------------------------------------------------------- masks
def mask_of(q_length, kv_length, **named):
    return attention.gpukit_mask(batch_size=2, q_length=q_length, kv_length=kv_length, **named)


def test_masks_by_hand():
    assert mask_of(4, 4) is None and mask_of(1, 9, q_offset=8) is None
    assert mask_of(4, 4, attention_mask=torch.ones(2, 4)) is None
    real = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert torch.equal(mask_of(4, 4, attention_mask=real), real.bool())
    assert torch.equal(mask_of(4, 6, attention_mask=real), real.bool()), "room to spare in a cache"
    assert torch.equal(mask_of(2, 6, q_offset=torch.tensor(2), attention_mask=real), real.bool())
    assert torch.equal(mask_of(2, 3, q_offset=2, kv_offset=1, attention_mask=real), real[:, 1:].bool())
    holes = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    assert mask_of(4, 4, attention_mask=holes).shape == (2, 1, 4, 4)
    assert mask_of(2, 4, attention_mask=real[:, :1]).shape == (2, 1, 2, 4), "a mask that is too short"
    causal = transformers.masking_utils.causal_mask_function
    assert mask_of(4, 4, mask_function=lambda *places: causal(*places)).shape == (2, 1, 4, 4)
    window = transformers.masking_utils.sliding_window_causal_mask_function(2)
    assert mask_of(4, 4, mask_function=window, local_size=2) is None, "the layer passes its window"


def test_tokens_by_hand():
    real = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    found = attention._tokens(real, 2)
    assert found.q_places.tolist() == [0, 1, 2, 3] and found.cu_q.tolist() == [0, 2, 4, 4]
    assert found.k_places.tolist() == [2, 3, 4, 5, 6, 7, 8, 9] and found.cu_k.tolist() == [0, 2, 6, 8]
    assert (found.longest_q, found.longest_k, found.first.tolist(), found.to_the_end) == (2, 4, [2, 0, 0], False)
    assert attention._tokens(real, 2) is found and attention._tokens(real, 1) is not found
    real[0, 0] = True
    assert attention._tokens(real, 2).first.tolist() == [0, 0, 0], "a mask that was written to is looked at again"
