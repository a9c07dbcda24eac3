"""Small models of transformers, built from configs: nothing is downloaded."""

import copy
import functools

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 66,
}  # fmt: skip
GPT2 = {
    "vocab_size": 67, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 66,
}  # fmt: skip
# The name of transformers' classes before Config and ForCausalLM, and what differs from SIZES.
FAMILIES = {
    "gpt2": ("GPT2", {}),
    "llama": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "gemma": ("Gemma", {"head_dim": 24}),
    "gemma2": ("Gemma2", {"head_dim": 24, "sliding_window": 5, "query_pre_attn_scalar": 16}),
}


@functools.cache
def _built(family: str, changes: tuple):
    prefix, differences = FAMILIES[family]
    sizes = GPT2 if family == "gpt2" else SIZES
    config = getattr(transformers, f"{prefix}Config")(**{**sizes, **differences, **dict(changes)})
    name = "GPT2LMHeadModel" if family == "gpt2" else f"{prefix}ForCausalLM"
    generator = torch.Generator().manual_seed(0)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for p in model.parameters():
            # Weights as they begin would make every attention row nearly uniform, and no mistake in it would show.
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(p + 0.2 * noise if p.ndim == 1 else noise * p.shape[-1] ** -0.5)
    return model


def build(family: str, dtype: torch.dtype = torch.float32, **changes):
    """A model of one of FAMILIES with the same weights at every call, in training mode. Each call makes its own config."""
    return copy.deepcopy(_built(family, tuple(changes.items()))).to(dtype).train()


def build_one_layer(family: str, **changes):
    """`build` of a single layer, for what does not depend on their number: the interpreter takes its time for each."""
    return build(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 1}, **changes)


def tokens(B: int = 2, T: int = 10, seed: int = 0) -> torch.Tensor:
    """[B, T] ordinary tokens: none is padding or an end."""
    return torch.randint(2, 66, (B, T), generator=torch.Generator().manual_seed(seed))
