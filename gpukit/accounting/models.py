"""Transformers as a few numbers, and how many parameters follow from them.

One `Config` covers the families that matter: GPT-2 (learned positions, biases, GELU), Llama, Mistral and Qwen (grouped
query heads, GLU), Mixtral (experts) and DeepSeek-V3 (experts and multi-head latent attention). Per layer, with h hidden:

    attention  h (heads + 2 kv_heads) head_size  for q, k, v,  + heads head_size h  for the output
    MLP        2 h f, with a gate (GLU) 3 h f; with experts as often as there are experts, and h experts for the router
    norms      2 gains of h, with LayerNorm 2 biases too

GPT-2 with f = 4 h: 12 h^2 + 13 h a layer, so N = h v + n (12 h^2 + 13 h) + 2 h, and h for each learned position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpukit.accounting.arguments import MOST_PARAMETERS, choice, divides, whole
from gpukit.nearest import did_you_mean

NORMS = {"layernorm": 2, "rmsnorm": 1}  # parameters for each element of hidden: gain and bias, or gain
BIASES = ("none", "qkv", "all")


@dataclass(frozen=True)
class Config:
    """A decoder-only transformer. Every number is a whole one; 0 where the model has no such thing.

    kv_heads           heads of k and v, None for as many as heads; fewer is grouped-query attention, 1 multi-query
    head_size          None for hidden / heads. With MLA the part of q and k that carries no position
    intermediate       width of the MLP, None for 4 hidden
    glu                a second up-projection gates the first: three matrices instead of two
    experts            MLPs of width expert_intermediate (None: intermediate) of which a token uses experts_per_token,
                       besides shared_experts that it always uses; the first dense_layers layers keep the plain MLP
    positions          rows of a learned position table; 0 for RoPE, which has no parameters
    tied_embeddings    the output head is the embedding table
    biases             "none", "qkv" (Qwen) or "all" (GPT-2: every projection but the head)
    kv_rank            MLA: what is cached of k and v for a token, besides rope_size numbers that carry the position;
    q_rank             MLA: rank of q's projection, 0 for a full one;  value_size: of a head of v, None for head_size
    max_context        tokens that the model was made for; 0 if unknown

    Raises ValueError naming the argument and the rule.
    """

    name: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int | None = None
    head_size: int | None = None
    intermediate: int | None = None
    glu: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    expert_intermediate: int | None = None
    dense_layers: int = 0
    positions: int = 0
    tied_embeddings: bool = True
    biases: str = "none"
    norm: str = "layernorm"
    q_rank: int = 0
    kv_rank: int = 0
    rope_size: int = 0
    value_size: int | None = None
    max_context: int = 0

    def __post_init__(self) -> None:
        where = f"config {self.name!r}"

        def take(name: str, least: int, default: int | None = None, most: int = 10**7) -> int:
            value = getattr(self, name)
            value = whole(where, name, default if value is None else value, least, most)
            object.__setattr__(self, name, value)
            return value

        for name in ("vocab_size", "hidden", "layers", "heads"):
            take(name, 1)
        if self.head_size is None:
            divides(where, "heads", self.heads, "hidden", self.hidden)
        take("head_size", 1, self.hidden // self.heads)
        take("value_size", 1, self.head_size)
        take("kv_heads", 1, self.heads)
        divides(where, "kv_heads", self.kv_heads, "heads", self.heads)
        take("intermediate", 1, 4 * self.hidden)
        take("expert_intermediate", 1, self.intermediate)
        for name in ("experts", "experts_per_token", "shared_experts", "positions", "q_rank", "kv_rank", "rope_size"):
            take(name, 0)
        take("max_context", 0, most=10**9)
        take("dense_layers", 0)
        choice(where, "norm", self.norm, NORMS)
        choice(where, "biases", self.biases, BIASES)
        self._consistent(where)
        if parameters(self).total > MOST_PARAMETERS:
            raise ValueError(f"{where}: its parameters must be at most 10^15, got {parameters(self).total:.2e}")

    def _consistent(self, where: str) -> None:
        if self.experts:
            whole(where, "experts_per_token", self.experts_per_token, 1, self.experts)
            whole(where, "dense_layers", self.dense_layers, 0, self.layers)
        elif self.experts_per_token or self.shared_experts or self.dense_layers:
            raise ValueError(
                f"{where}: experts_per_token, shared_experts and dense_layers need experts, got "
                f"{self.experts_per_token}, {self.shared_experts}, {self.dense_layers} and no experts"
            )
        if self.kv_rank and (self.kv_heads != self.heads or self.biases != "none"):
            raise ValueError(f"{where}: with kv_rank (MLA) kv_heads must equal heads and biases be 'none'")
        if not self.kv_rank and (self.q_rank or self.rope_size or self.value_size != self.head_size):
            raise ValueError(f"{where}: q_rank, rope_size and value_size need kv_rank (MLA), got kv_rank 0")

    # ---- sizes that other calculators need

    @property
    def attention(self) -> str:
        """ "MHA", "GQA", "MQA" or "MLA"."""
        if self.kv_rank:
            return "MLA"
        return "MHA" if self.kv_heads == self.heads else "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def qk_size(self) -> int:
        """Elements of one head of q and of k."""
        return self.head_size + self.rope_size

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    def is_moe(self, layer: int) -> bool:
        """Whether the MLP of `layer`, counted from 0, is experts. Raises ValueError where there is no such layer."""
        whole(f"config {self.name!r}", "layer", layer, 0, self.layers - 1)
        return bool(self.experts) and layer >= self.dense_layers


@dataclass(frozen=True)
class Parameters:
    """Of a whole model. mlp includes routers, norms those of MLA; head is 0 where it is the embedding table.

    active  what one token's forward pass uses: all but the experts that were not chosen
    """

    embedding: int
    positions: int
    attention: int
    mlp: int
    norms: int
    head: int
    active: int

    @property
    def total(self) -> int:
        return sum(self.items().values())

    @property
    def non_embedding(self) -> int:
        """Without the tables that are looked up; the output head, a matmul, counts."""
        return self.total - self.embedding - self.positions

    def items(self) -> dict[str, int]:
        """The parts by name, in the order of the forward pass; they sum to `total`."""
        names = ("embedding", "positions", "attention", "mlp", "norms", "head")
        return {name: getattr(self, name) for name in names}


def parameters(config: Config) -> Parameters:
    """How many parameters the model has, by part."""
    c = config
    attention = c.layers * (attention_weights(c) + attention_biases(c))
    mlp = sum(mlp_weights(c, moe) * n for moe, n in ((True, c.moe_layers), (False, c.layers - c.moe_layers)))
    mlp += mlp_biases(c) * c.layers
    unused = c.moe_layers * (c.experts - c.experts_per_token) * _expert(c)
    counted = {
        "embedding": c.vocab_size * c.hidden,
        "positions": c.positions * c.hidden,
        "attention": attention,
        "mlp": mlp,
        "norms": c.layers * norm_parameters(c) + NORMS[c.norm] * c.hidden,
        "head": 0 if c.tied_embeddings else c.vocab_size * c.hidden,
    }
    return Parameters(**counted, active=sum(counted.values()) - unused)


# ---- one layer -------------------------------------------------------------------------------------------------------


def attention_projections(config: Config) -> dict[str, tuple[int, int]]:
    """The matmuls of attention that have weights: name -> (inputs, outputs). All queries' heads lie in one matrix."""
    c = config
    if not c.kv_rank:
        return {
            "q projection": (c.hidden, c.heads * c.head_size),
            "k projection": (c.hidden, c.kv_heads * c.head_size),
            "v projection": (c.hidden, c.kv_heads * c.head_size),
            "output projection": (c.heads * c.head_size, c.hidden),
        }
    q_up = (c.q_rank or c.hidden, c.heads * c.qk_size)
    q = {"q down": (c.hidden, c.q_rank), "q up": q_up} if c.q_rank else {"q projection": q_up}
    return {
        **q,
        "kv down": (c.hidden, c.kv_rank + c.rope_size),
        "kv up": (c.kv_rank, c.heads * (c.head_size + c.value_size)),
        "output projection": (c.heads * c.value_size, c.hidden),
    }


def attention_weights(config: Config) -> int:
    """Of one layer, without biases and norms."""
    return sum(inputs * outputs for inputs, outputs in attention_projections(config).values())


def attention_biases(config: Config) -> int:
    """Of one layer."""
    qkv = (config.heads + 2 * config.kv_heads) * config.head_size
    return {"none": 0, "qkv": qkv, "all": qkv + config.hidden}[config.biases]


def mlp_weights(config: Config, moe: bool = False) -> int:
    """Of one layer, without biases: the plain MLP, or all experts and their router."""
    if moe:
        return (config.experts + config.shared_experts) * _expert(config) + config.hidden * config.experts
    return (3 if config.glu else 2) * config.hidden * config.intermediate


def mlp_biases(config: Config) -> int:
    """Of one layer."""
    if config.biases != "all":
        return 0
    return (2 if config.glu else 1) * config.intermediate + config.hidden


def norm_parameters(config: Config) -> int:
    """Of one layer: before attention and before the MLP; MLA has one on each low-rank vector as well."""
    return NORMS[config.norm] * 2 * config.hidden + config.q_rank + config.kv_rank


def _expert(config: Config) -> int:
    return (3 if config.glu else 2) * config.hidden * config.expert_intermediate


# ---- real models -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A published model. `published` is its count of parameters from elsewhere (below), `source` the page with its
    config.json; `aliases` are other names that people type."""

    config: Config
    published: int
    source: str
    aliases: tuple[str, ...] = ()


def _gpt2(name: str, published: int, hidden: int, layers: int, heads: int, source: str, *aliases: str) -> Preset:
    sizes = {"positions": 1024, "biases": "all", "max_context": 1024}
    return Preset(Config(name, 50257, hidden, layers, heads, **sizes), published, source, aliases)


def _llama(name: str, published: int, source: str, *aliases: str, vocab: int, tied: bool = False, **sizes) -> Preset:
    """Llama and what follows its plan: RMSNorm, RoPE, GLU."""
    config = Config(name, vocab, glu=True, tied_embeddings=tied, norm="rmsnorm", **sizes)
    return Preset(config, published, source, aliases)


_HF = "https://huggingface.co/"


def _qwen(size: str, published: int, *, tied: bool, vocab: int = 152064, **sizes) -> Preset:
    return _llama(
        f"qwen2.5-{size}", published, f"{_HF}Qwen/Qwen2.5-{size.upper()}", vocab=vocab, tied=tied,
        biases="qkv", **sizes,
    )  # fmt: skip


# `published`: what the weight files hold, half of the bytes that their index states (model.safetensors.index.json); of
# GPT-2 the released tensors. Their pages round it, and GPT-2's counts the causal masks in its files too: 137 million.
# DeepSeek prints 671 billion; its files hold the 14 billion of a module that predicts further tokens besides.
_ALL = (
    _gpt2("gpt2", 124_439_808, 768, 12, 12, f"{_HF}openai-community/gpt2", "gpt2-small"),
    _gpt2("gpt2-medium", 354_823_168, 1024, 24, 16, f"{_HF}openai-community/gpt2-medium"),
    _gpt2("gpt2-large", 774_030_080, 1280, 36, 20, f"{_HF}openai-community/gpt2-large"),
    _gpt2("gpt2-xl", 1_557_611_200, 1600, 48, 25, f"{_HF}openai-community/gpt2-xl"),
    _llama(
        "llama3-8b", 8_030_261_248, f"{_HF}meta-llama/Meta-Llama-3-8B", "llama-3-8b",
        vocab=128256, hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, max_context=8192,
    ),
    _llama(
        "llama3-70b", 70_553_706_496, f"{_HF}meta-llama/Meta-Llama-3-70B", "llama-3-70b",
        vocab=128256, hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28672, max_context=8192,
    ),
    _llama(
        "llama3-405b", 405_853_388_800, f"{_HF}meta-llama/Llama-3.1-405B", "llama3.1-405b",
        vocab=128256, hidden=16384, layers=126, heads=128, kv_heads=8, intermediate=53248, max_context=131072,
    ),
    _llama(
        "mistral-7b", 7_241_732_096, f"{_HF}mistralai/Mistral-7B-v0.1",
        vocab=32000, hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, max_context=32768,
    ),
    _llama(
        "mixtral-8x7b", 46_702_792_704, f"{_HF}mistralai/Mixtral-8x7B-v0.1",
        vocab=32000, hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, experts=8,
        experts_per_token=2, max_context=32768,
    ),
    _qwen("0.5b", 494_032_768, tied=True, vocab=151936, hidden=896, layers=24, heads=14, kv_heads=2,
          intermediate=4864, max_context=32768),
    _qwen("1.5b", 1_543_714_304, tied=True, vocab=151936, hidden=1536, layers=28, heads=12, kv_heads=2,
          intermediate=8960, max_context=131072),
    _qwen("3b", 3_085_938_688, tied=True, vocab=151936, hidden=2048, layers=36, heads=16, kv_heads=2,
          intermediate=11008, max_context=32768),
    _qwen("7b", 7_615_616_512, tied=False, hidden=3584, layers=28, heads=28, kv_heads=4, intermediate=18944,
          max_context=131072),
    _qwen("14b", 14_770_033_664, tied=False, hidden=5120, layers=48, heads=40, kv_heads=8, intermediate=13824,
          max_context=131072),
    _qwen("32b", 32_763_876_352, tied=False, hidden=5120, layers=64, heads=40, kv_heads=8, intermediate=27648,
          max_context=131072),
    _qwen("72b", 72_706_203_648, tied=False, hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=29568,
          max_context=131072),
    _llama(
        "deepseek-v3", 671_000_000_000, f"{_HF}deepseek-ai/DeepSeek-V3", vocab=129280, hidden=7168, layers=61,
        heads=128, head_size=128, rope_size=64, value_size=128, q_rank=1536, kv_rank=512, intermediate=18432,
        experts=256, experts_per_token=8, shared_experts=1, expert_intermediate=2048, dense_layers=3,
        max_context=163840,
    ),
)  # fmt: skip
PRESETS: Mapping[str, Preset] = {preset.config.name: preset for preset in _ALL}
_BY_NAME = {alias: preset.config for preset in _ALL for alias in (preset.config.name, *preset.aliases)}


def preset(name: str | Config) -> Config:
    """The config of the model called `name` ("llama3-8b"); a Config is returned as it is. Raises ValueError naming the
    nearest and all."""
    if isinstance(name, Config):
        return name
    plain = str(name).lower().replace("_", "-").replace(" ", "-")
    if plain in _BY_NAME:
        return _BY_NAME[plain]
    raise ValueError(f"no model is called {name!r}{did_you_mean(plain, _BY_NAME)}  (all of them: {', '.join(PRESETS)})")
