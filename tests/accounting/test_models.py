"""gpukit.accounting.models: parameters against models that really exist."""

import random

import pytest
import torch

from gpukit.accounting.memory import Run
from gpukit.accounting.models import PRESETS, Config, parameters, preset
from tests.accounting.transformer import Transformer

SMALL = {"vocab_size": 64, "hidden": 32, "layers": 3, "heads": 4}
CONFIGS = (
    Config("gpt", **SMALL, positions=48, biases="all"),
    Config("llama", **SMALL, kv_heads=2, glu=True, intermediate=80, norm="rmsnorm", tied_embeddings=False),
    Config("qwen", **SMALL, kv_heads=1, glu=True, head_size=12, biases="qkv", norm="rmsnorm"),
    Config("glu-biases", **SMALL, glu=True, biases="all", tied_embeddings=False),
    Config("mixtral", **SMALL, kv_heads=2, glu=True, norm="rmsnorm", experts=4, experts_per_token=2),
    Config(
        "deepseek", **SMALL, head_size=8, rope_size=4, value_size=6, q_rank=12, kv_rank=10, glu=True, norm="rmsnorm",
        experts=5, experts_per_token=2, shared_experts=1, expert_intermediate=24, dense_layers=1,
    ),
    Config("mla-full-q", **SMALL, head_size=8, rope_size=4, value_size=12, kv_rank=10, glu=True, norm="rmsnorm"),
)  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_parameters_are_those_of_a_real_model(config):
    with torch.device("meta"):
        model = Transformer(config, Run("fp32"))
    counted = parameters(config)
    assert counted.total == sum(p.numel() for p in model.parameters())
    sums = {name: 0 for name in counted.items()}
    for name, weight in model.named_parameters():
        kind = next(k for k in ("norm", "positions", "embedding", "head", "attention", "mlp") if k in name)
        sums[{"norm": "norms"}.get(kind, kind)] += weight.numel()
    assert counted.items() == sums


def test_a_token_uses_all_but_the_experts_that_were_not_chosen():
    config = CONFIGS[5]
    one_expert = 3 * config.hidden * config.expert_intermediate
    assert parameters(config).total - parameters(config).active == 2 * 3 * one_expert  # 2 layers, 3 experts of 5 unused
    assert parameters(CONFIGS[0]).active == parameters(CONFIGS[0]).total


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_their_published_size(name):
    published = PRESETS[name].published
    assert abs(parameters(PRESETS[name].config).total - published) <= published / 1000
    assert PRESETS[name].source.startswith("https://")
    assert preset(name) is PRESETS[name].config


def test_published_sizes_of_mixtures():
    """The makers' own words: of Mixtral's 46.7 billion a token uses 12.9 (https://mistral.ai/news/mixtral-of-experts), of
    DeepSeek-V3's 671 billion 37 (https://arxiv.org/abs/2412.19437); theirs leaves out a table that is only looked up."""
    mixtral, deepseek = parameters(preset("mixtral-8x7b")), parameters(preset("deepseek-v3"))
    assert round(mixtral.total / 1e9, 1) == 46.7 and round(mixtral.active / 1e9, 1) == 12.9
    assert round(deepseek.total / 1e9) == 671 and round((deepseek.active - deepseek.embedding) / 1e9) == 37


def test_gpt2_by_the_formula():
    c = preset("gpt2-small")
    h, v, n = c.hidden, c.vocab_size, c.layers
    without_positions = h * v + n * (12 * h * h + 13 * h) + 2 * h
    assert without_positions == 123_653_376
    assert parameters(c).total == without_positions + c.positions * h == 124_439_808
    assert parameters(c).non_embedding == n * (12 * h * h + 13 * h) + 2 * h


def test_a_glu_of_four_hidden_makes_sixteen_hidden_squared():
    c = Config("glu", vocab_size=100, hidden=64, layers=1, heads=4, glu=True)
    counted = parameters(c)
    assert counted.attention + counted.mlp == 16 * 64**2


# ---- transformers' models, built from configs on the meta device: nothing is downloaded, no weight is allocated -------


def _hugging_face(c: Config):
    """The transformers config of the same model."""
    transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")
    if c.positions:
        return transformers.GPT2Config(
            vocab_size=c.vocab_size, n_positions=c.positions, n_embd=c.hidden, n_layer=c.layers, n_head=c.heads,
            n_inner=c.intermediate,
        )  # fmt: skip
    common = {
        "vocab_size": c.vocab_size, "hidden_size": c.hidden, "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "intermediate_size": c.intermediate,
        "tie_word_embeddings": c.tied_embeddings,
    }  # fmt: skip
    if c.kv_rank:
        return transformers.DeepseekV3Config(
            **common, kv_lora_rank=c.kv_rank, q_lora_rank=c.q_rank or None, qk_rope_head_dim=c.rope_size,
            qk_nope_head_dim=c.head_size, v_head_dim=c.value_size, n_routed_experts=c.experts, n_group=1, topk_group=1,
            num_experts_per_tok=c.experts_per_token, n_shared_experts=c.shared_experts,
            moe_intermediate_size=c.expert_intermediate, first_k_dense_replace=c.dense_layers,
        )  # fmt: skip
    if c.experts:
        return transformers.MixtralConfig(
            **common, num_local_experts=c.experts, num_experts_per_tok=c.experts_per_token
        )
    if c.biases == "qkv":
        return transformers.Qwen2Config(**common)
    if c.name.startswith("mistral"):
        return transformers.MistralConfig(**common)
    return transformers.LlamaConfig(**common)


def _total(c: Config) -> int:
    wanted = _hugging_face(c)
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(wanted)
    return sum(p.numel() for p in model.parameters())  # a tied table counts once, buffers not at all


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_transformers_models(name):
    assert _total(preset(name)) == parameters(preset(name)).total


@pytest.mark.parametrize("family", ("gpt2", "llama3-8b", "qwen2.5-7b", "mixtral-8x7b", "deepseek-v3"))
def test_other_sizes_are_transformers_models_too(family):
    """The families' formulas, not only the sizes that were published."""
    random.seed(family)
    base = preset(family)
    for _ in range(3):
        heads = random.choice((2, 4, 8))
        sizes = {"vocab_size": random.randrange(50, 500), "hidden": 16 * heads, "layers": random.randint(1, 3)}
        sizes |= {"heads": heads, "tied_embeddings": random.random() < 0.5 or bool(base.positions)}
        sizes |= {"intermediate": random.randrange(8, 200), "glu": base.glu, "norm": base.norm, "biases": base.biases}
        sizes |= {"positions": random.randrange(8, 99) if base.positions else 0}
        sizes |= {"kv_heads": heads if base.kv_rank or base.positions else random.choice((1, 2, heads))}
        if base.kv_rank:
            sizes |= {
                "head_size": 16,
                "rope_size": 8,
                "value_size": 12,
                "q_rank": random.choice((0, 24)),
                "kv_rank": 20,
            }
        if base.experts:
            sizes |= {"experts": 4, "experts_per_token": 2, "shared_experts": base.shared_experts}
            sizes |= {"expert_intermediate": sizes["intermediate"] if not base.kv_rank else 48}
            sizes |= {"dense_layers": random.randint(0, sizes["layers"]) if base.kv_rank else 0}
        config = Config(base.name, **sizes)
        assert _total(config) == parameters(config).total, config


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    (
        ({"heads": 5}, "heads must divide hidden, and 5 does not divide 32"),
        ({"kv_heads": 3}, "kv_heads must divide heads, and 3 does not divide 4"),
        ({"hidden": 0}, "hidden must be a whole number from 1 to 10^7, got 0"),
        ({"layers": -1}, "layers must be a whole number from 1 to 10^7, got -1"),
        ({"layers": 1.5}, "layers must be a whole number, got 1.5"),
        ({"layers": True}, "layers must be a whole number, got True"),
        ({"layers": "12"}, "layers must be a whole number, got '12'"),
        ({"vocab_size": 10**30}, "vocab_size must be a whole number from 1 to 10^7"),
        ({"vocab_size": float("inf")}, "vocab_size must be a whole number, got inf"),
        ({"vocab_size": float("nan")}, "vocab_size must be a whole number, got nan"),
        ({"hidden": 10**6, "heads": 1, "layers": 1000}, "its parameters must be at most 10^15"),
        ({"norm": "batchnorm"}, "norm must be one of layernorm, rmsnorm, got 'batchnorm'"),
        ({"biases": "some"}, "biases must be one of none, qkv, all, got 'some'"),
        ({"experts_per_token": 2}, "need experts"),
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token must be a whole number from 1 to 2, got 3"),
        ({"experts": 2}, "experts_per_token must be a whole number from 1 to 2, got 0"),
        (
            {"experts": 2, "experts_per_token": 1, "dense_layers": 4},
            "dense_layers must be a whole number from 0 to 3, got 4",
        ),
        ({"rope_size": 4}, "need kv_rank (MLA), got kv_rank 0"),
        ({"kv_rank": 8, "kv_heads": 2}, "with kv_rank (MLA) kv_heads must equal heads"),
    ),
)
def test_a_config_that_cannot_be(change, words):
    with pytest.raises(ValueError) as error:
        Config("mine", **(SMALL | change))
    assert "config 'mine': " in str(error.value) and words in str(error.value)


def test_whole_numbers_come_in_several_types():
    import numpy as np

    assert Config("mine", **(SMALL | {"hidden": 32.0, "layers": np.int64(3)})) == Config("mine", **SMALL)


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(ValueError, match=r"no model is called 'lama3-8b'; did you mean 'llama3-8b'\?.*gpt2-xl"):
        preset("lama3-8b")
    assert preset("Llama-3-8B") is preset("llama3-8b")
    assert preset(CONFIGS[0]) is CONFIGS[0]


def test_a_layer_is_experts_after_the_dense_ones():
    config = CONFIGS[5]
    assert [config.is_moe(layer) for layer in range(3)] == [False, True, True] and config.moe_layers == 2
    with pytest.raises(ValueError, match="layer must be a whole number from 0 to 2, got 3"):
        config.is_moe(3)
    assert [c.attention for c in CONFIGS[:3]] == ["MHA", "GQA", "MQA"] and config.attention == "MLA"
