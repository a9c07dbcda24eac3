"""Where a GPU's memory goes: weights, gradients, optimizer states, activations, logits and the KV cache.

Everything is counted from shapes, for PyTorch as it runs: an activation is a tensor that autograd keeps for the backward
pass, each storage once, in bytes. What the allocator rounds up, fragmentation and CUDA's own context come on top; a GPU
sold as 80 GB has about 85 x 10^9 bytes, and that difference pays for them.

Per layer, 16 bits, LayerNorm, GELU of 4 h, dropout, b sequences of s tokens: s b h (34 + 5 heads s / h) bytes, and with
FlashAttention no term with s^2. Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198. Training states and ZeRO:
Rajbhandari et al. 2019, https://arxiv.org/abs/1910.02054. 8-bit states: Dettmers et al. 2021,
https://arxiv.org/abs/2110.02861.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpukit import hardware
from gpukit.accounting import models
from gpukit.accounting.arguments import MOST_PARAMETERS, MOST_TOKENS, choice, divides, positive, whole
from gpukit.accounting.dtypes import FORMATS
from gpukit.accounting.models import Config
from gpukit.nearest import did_you_mean

DTYPE_BITS = {name: fmt.storage_bits for name, fmt in FORMATS.items()} | {"fp8": 8, "fp4": 4, "int8": 8, "int4": 4}
ATTENTIONS = ("flash", "eager")
RECOMPUTE = ("none", "selective", "full")


def tensor_bytes(elements: int, dtype: str) -> int:
    """Bytes of that many elements, rounded up to whole ones. Raises ValueError for an unknown dtype."""
    choice("tensor_bytes", "dtype", dtype, DTYPE_BITS)
    return -(-elements * DTYPE_BITS[dtype] // 8)


# ---- weights, gradients, optimizer: bytes a parameter ----------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """What training keeps for each parameter.

    weights, gradients  dtypes in which forward and backward run
    master              dtype of the copy that the optimizer updates; "" if it updates the weights themselves
    states              how many numbers the optimizer remembers, each in state_dtype; of 8-bit states every state_block
                        share one fp32 scale
    """

    name: str
    weights: str
    gradients: str
    master: str
    states: int
    state_dtype: str = "fp32"
    state_block: int = 0
    title: str = ""

    @property
    def bytes_per_parameter(self) -> float:
        block = 2**20  # long enough that no scale is shared by fewer elements than state_block
        return model_states(block, self).total_bytes / block


_RECIPES = (
    Recipe("fp32-adamw", "fp32", "fp32", "", 2, title="AdamW, everything in fp32"),
    Recipe("bf16-adamw", "bf16", "bf16", "fp32", 2, title="bf16 weights and gradients; fp32 master copy, m and v"),
    Recipe("bf16-adamw-fp32-grads", "bf16", "fp32", "fp32", 2, title="the same with gradients summed in fp32"),
    Recipe("bf16-adamw-8bit", "bf16", "bf16", "fp32", 2, "int8", 256, "fp32 master copy, m and v in 8 bits"),
    Recipe("bf16-pure", "bf16", "bf16", "", 2, "bf16", title="AdamW, everything in bf16"),
    Recipe("fp32-sgd", "fp32", "fp32", "", 0, title="SGD without momentum"),
    Recipe("fp32-sgd-momentum", "fp32", "fp32", "", 1, title="SGD with momentum"),
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}


def recipe_named(name: str | Recipe) -> Recipe:
    """The recipe called `name`; a Recipe is returned as it is. Raises ValueError naming the nearest and all."""
    if isinstance(name, Recipe):
        return name
    if name in RECIPES:
        return RECIPES[name]
    raise ValueError(f"no recipe is called {name!r}{did_you_mean(name, RECIPES)}  (all of them: {', '.join(RECIPES)})")


@dataclass(frozen=True)
class States:
    """What stays allocated for the whole of training."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int  # master copy included

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def model_states(parameters: int, recipe: str | Recipe = "bf16-adamw") -> States:
    """Weights, gradients and optimizer of that many parameters on one GPU. Raises ValueError."""
    recipe = recipe_named(recipe)
    n = whole("model_states", "parameters", parameters, 1, MOST_PARAMETERS)
    return States(tensor_bytes(n, recipe.weights), tensor_bytes(n, recipe.gradients), _optimizer_bytes(n, recipe))


def _optimizer_bytes(n: int, recipe: Recipe) -> int:
    scales = -(-n // recipe.state_block) * 4 if recipe.state_block else 0
    master = tensor_bytes(n, recipe.master) if recipe.master else 0
    return master + recipe.states * (tensor_bytes(n, recipe.state_dtype) + scales)


def largest_model(gpu_bytes: int, gpus: int = 1, bytes_per_parameter: float = 16) -> int:
    """The most parameters whose states fit `gpus` GPUs of `gpu_bytes` each, shared out evenly, with no byte left for
    activations. 16 bytes: AdamW in fp32, or bf16 with fp32 master copy, m and v. Raises ValueError."""
    gpu_bytes = whole("largest_model", "gpu_bytes", gpu_bytes, 1, 10**15)
    gpus = whole("largest_model", "gpus", gpus)
    return int(gpu_bytes * gpus / positive("largest_model", "bytes_per_parameter", bytes_per_parameter, 1000))


# ---- activations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """How a block is run, as far as memory is concerned.

    attention   "flash" keeps q, k, v, the output and one number a row; "eager" keeps heads x tokens x tokens weights
    recompute   "none"; "selective" keeps q, k, v of attention and computes the weights again; "full" keeps a block's
                input and computes the rest again
    dropout     after attention's weights (not with flash), after attention and after the MLP: a byte an element
    logits      dtype of the loss: "fp32" turns the logits into it first
    """

    dtype: str = "bf16"
    attention: str = "flash"
    recompute: str = "none"
    dropout: bool = False
    logits: str = "fp32"

    def __post_init__(self) -> None:
        choice("run", "dtype", self.dtype, ("fp32", "bf16", "fp16"))
        choice("run", "attention", self.attention, ATTENTIONS)
        choice("run", "recompute", self.recompute, RECOMPUTE)
        choice("run", "logits", self.logits, ("fp32", "bf16", "fp16"))


def block_activations(
    config: Config, batch: int, tokens: int, run: Run = Run(), *, moe: bool = False, tensor: int = 1,
    sequence_parallel: bool = False,
) -> dict[str, int]:  # fmt: skip
    """Bytes that one block keeps for its backward pass when nothing is recomputed: operation -> bytes.

    A tensor that two operations need is counted where it comes first. Parameters are not counted, nor the causal mask
    and RoPE's tables, which all blocks share. `moe`: the block has experts. `tensor`: over so many GPUs; what is not
    divided by them (norms, their outputs, dropout after a projection) is with `sequence_parallel`. Raises ValueError.
    """
    c, s = config, DTYPE_BITS[run.dtype] // 8
    n = _positions(batch, tokens)
    shard = tensor if sequence_parallel else 1
    stats = (2 if c.norm == "layernorm" else 1) * 4 * n  # fp32: mean and 1 / deviation, or the latter alone
    heads, kv_heads = c.heads // tensor, c.kv_heads // tensor
    q = n * heads * c.qk_size
    k = n * (kv_heads if run.attention == "flash" else heads) * c.qk_size
    v = n * (kv_heads if run.attention == "flash" else heads) * c.value_size
    context = n * heads * c.value_size
    weights = batch * heads * tokens * tokens

    kept = {"attention norm": (s * n * c.hidden + stats) // shard, "qkv projection": s * n * c.hidden // shard}
    if c.kv_rank:
        # Each low-rank vector is the input of a norm, whose output is the input of the projection up.
        low = sum(2 * s * n * rank + 4 * n for rank in (c.q_rank, c.kv_rank) if rank)
        kept["low-rank q and kv"] = low
    if run.attention == "flash":
        kept["attention"] = s * (q + k + v + context) + 4 * batch * heads * tokens
    else:
        kept["attention"] = s * (q + k + v) + s * weights + ((s + 1) * weights if run.dropout else 0)
        kept["output projection"] = s * context
    kept["attention dropout"] = n * c.hidden // shard if run.dropout else 0
    kept["mlp norm"] = (s * n * c.hidden + stats) // shard
    kept["mlp"] = _moe_bytes(c, n, s, tensor) if moe else s * n * c.hidden // shard + _mlp_bytes(c, n, s, tensor)
    kept["mlp dropout"] = n * c.hidden // shard if run.dropout else 0
    return {name: size for name, size in kept.items() if size}


def _mlp_bytes(c: Config, n: int, s: int, tensor: int, width: int | None = None) -> int:
    """Without its input. GELU: before and after it. GLU: both projections, silu of one and the product."""
    return (4 if c.glu else 2) * s * n * (width or c.intermediate) // tensor


def _moe_bytes(c: Config, n: int, s: int, tensor: int) -> int:
    """Input, the router's softmax in fp32 and the chosen weights; then for every token of every chosen expert three
    int64 (which expert, from where, back to where), its gathered input, the MLP and its output, which is multiplied."""
    routed = n * c.experts_per_token
    router = s * n * c.hidden + 4 * n * c.experts + (24 + s) * routed
    return (
        router
        + 2 * s * routed * c.hidden
        + _mlp_bytes(c, routed, s, tensor, c.expert_intermediate)
        + _mlp_bytes(c, n * c.shared_experts, s, tensor, c.expert_intermediate)
    )


def kept_activations(
    config: Config, batch: int, tokens: int, run: Run = Run(), *, moe: bool = False, tensor: int = 1,
    sequence_parallel: bool = False,
) -> int:  # fmt: skip
    """Bytes that one block keeps from its forward to its backward pass, with what `run.recompute` leaves out."""
    n = _positions(batch, tokens)
    s = DTYPE_BITS[run.dtype] // 8
    if run.recompute == "full":
        return s * n * config.hidden // (tensor if sequence_parallel else 1)
    block = block_activations(config, batch, tokens, run, moe=moe, tensor=tensor, sequence_parallel=sequence_parallel)
    kept = sum(block.values())
    if run.recompute == "selective":
        output = s * n * config.heads * config.value_size // tensor if run.attention == "flash" else 0
        kept -= block["attention"] - _attention_inputs(config, n, run, tensor) - output  # the projection needs that
    return kept


def _attention_inputs(c: Config, n: int, run: Run, tensor: int) -> int:
    """q, k and v as they come out of their projections."""
    s = DTYPE_BITS[run.dtype] // 8
    return s * n * (c.heads * c.qk_size + c.kv_heads * (c.qk_size + c.value_size)) // tensor


def head_activations(config: Config, batch: int, tokens: int, run: Run = Run(), *, tensor: int = 1) -> dict[str, int]:
    """Bytes that the last norm, the output head and the loss keep for the backward pass: operation -> bytes."""
    n = _positions(batch, tokens)
    s = DTYPE_BITS[run.dtype] // 8
    stats = (2 if config.norm == "layernorm" else 1) * 4 * n
    return {
        "final norm": s * n * config.hidden + stats,
        "head": s * n * config.hidden,
        "loss": tensor_bytes(n * -(-config.vocab_size // tensor), run.logits) + 8 * n,  # log-softmax; int64 labels
    }


def activations_bytes(config: Config, batch: int, tokens: int, run: Run = Run()) -> int:
    """Of all blocks, what they keep from the forward to the backward pass; without the head."""
    c = config
    of = {moe: kept_activations(c, batch, tokens, run, moe=moe) for moe in {bool(c.moe_layers), False}}
    return c.moe_layers * of[bool(c.moe_layers)] + (c.layers - c.moe_layers) * of[False]


def _positions(batch: int, tokens: int) -> int:
    return whole("activations", "batch", batch) * whole("activations", "tokens", tokens)


def _block_peak(
    c: Config, batch: int, tokens: int, run: Run, *, moe: bool, tensor: int, sequence_parallel: bool
) -> int:
    """Bytes beyond what is kept, at the worst moment of a block's backward pass. The gradient of the block's output is
    there throughout, for the residual sum. In the MLP the gradients of its products stand beside what they were made
    from; by the time of attention's softmax, what the MLP kept has been given back."""
    n = _positions(batch, tokens)
    s = DTYPE_BITS[run.dtype] // 8
    split = {"moe": moe, "tensor": tensor, "sequence_parallel": sequence_parallel}
    block = block_activations(c, batch, tokens, run, **split)
    again = sum(block.values()) - kept_activations(c, batch, tokens, run, **split)
    if run.recompute == "selective" and run.attention == "eager":
        again += _attention_inputs(c, n, run, tensor)  # a batched matmul copies q, k and v, whose originals are kept
    residual = s * n * c.hidden // (tensor if sequence_parallel else 1)
    dropped = residual if run.dropout else 0

    routed = n * c.experts_per_token if moe else n
    product = s * routed * (c.expert_intermediate if moe else c.intermediate) // tensor
    weight = s * c.hidden * (c.expert_intermediate if moe else c.intermediate) // tensor
    outputs = 2 * s * routed * c.hidden if moe else 0  # each chosen expert's, before and after they are put in order
    mlp = residual + outputs + max(dropped + product + weight, 2 * product if c.glu else product)

    heads = c.heads // tensor
    values = s * n * heads * c.value_size
    attention = residual - block["mlp norm"] - block["mlp"] - block.get("mlp dropout", 0)
    if run.attention == "eager":
        weights = s * batch * heads * tokens * tokens
        attention += weights if run.dropout else 2 * weights
        attention -= values  # v's gradient is there; v and what the projection kept have been given back
    else:
        attention += values + s * n * (heads * c.qk_size + c.kv_heads // tensor * (c.qk_size + c.value_size))
        attention += 4 * n * heads * c.qk_size  # the kernel sums dq in fp32
    return max(mlp + (again if run.recompute == "full" else 0), attention + again)


def working_memory(config: Config, batch: int, tokens: int, run: Run = Run()) -> dict[str, int]:
    """Bytes beside what the blocks keep, at the two worst moments of a pass: "loss", while the loss runs, and "backward", inside a
    block's backward pass. For models without experts, on one GPU."""
    return {
        "loss": _head_peak(config, batch, tokens, run, 1),
        "backward": _block_peak(config, batch, tokens, run, moe=False, tensor=1, sequence_parallel=False),
    }


def _head_peak(c: Config, batch: int, tokens: int, run: Run, tensor: int) -> int:
    """Bytes at the worst moment of the head's backward pass: the loss, with two gradients as large as the logits beside
    what it kept; or, for few tokens and a large vocabulary, the gradient of the head's weights."""
    n = _positions(batch, tokens)
    kept = head_activations(c, batch, tokens, run, tensor=tensor)
    vocab = -(-c.vocab_size // tensor)
    loss = sum(kept.values()) + 2 * tensor_bytes(n * vocab, run.logits)
    return max(loss, sum(kept.values()) - kept["loss"] + tensor_bytes(n * vocab + vocab * c.hidden, run.dtype))


# ---- many GPUs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parallel:
    """How training is laid out over GPUs.

    data      replicas, each with its share of the batch;  zero: what they share out among them instead of each keeping
              all of it: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too
    tensor    GPUs that divide every large matrix;  sequence_parallel: they divide what lies between the matrices too
    pipeline  stages of consecutive layers
    Raises ValueError naming the argument and the rule.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline"):
            object.__setattr__(self, name, whole("parallel", name, getattr(self, name), 1, 10**6))
        object.__setattr__(self, "zero", whole("parallel", "zero", self.zero, 0, 3))

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline

    def check(self, config: Config) -> None:
        """Raises ValueError if the model cannot be laid out so."""
        c = config
        for of in ("heads", "kv_heads", "intermediate"):
            divides("parallel", "tensor", self.tensor, of, getattr(c, of))
        if c.experts:
            divides("parallel", "tensor", self.tensor, "expert_intermediate", c.expert_intermediate)
        if self.pipeline > c.layers:
            raise ValueError(
                f"parallel: pipeline must be at most the model's {c.layers} layers, got {self.pipeline}: "
                "a stage needs a layer"
            )

    def stage_layers(self, config: Config, stage: int) -> range:
        """The layers of a stage, counted from 0; the first stages take one more where they do not come out even."""
        whole("parallel", "stage", stage, 0, self.pipeline - 1)
        whole_layers, rest = divmod(config.layers, self.pipeline)
        first = stage * whole_layers + min(stage, rest)
        return range(first, first + whole_layers + (stage < rest))


def gpu_parameters(config: Config, parallel: Parallel, stage: int = 0) -> int:
    """Parameters on one GPU of a pipeline stage, before ZeRO: matrices and their output biases divided by `tensor`
    (rounded up), norms, routers and MLA's projections down on every one. With tied embeddings the first and the last
    stage each hold the table."""
    parallel.check(config)
    c, t = config, parallel.tensor
    sharded, copied = _block_parameters(c, False)
    moe_sharded, moe_copied = _block_parameters(c, True)
    count = 0
    for layer in parallel.stage_layers(c, stage):
        moe = c.is_moe(layer)
        count += -(-(moe_sharded if moe else sharded) // t) + (moe_copied if moe else copied)
    table = -(-c.vocab_size // t) * c.hidden
    first, last = stage == 0, stage == parallel.pipeline - 1
    count += (table + c.positions * c.hidden) if first else 0
    if last:
        count += models.NORMS[c.norm] * c.hidden
        count += 0 if first and c.tied_embeddings else table
    return count


def _block_parameters(c: Config, moe: bool) -> tuple[int, int]:
    """(divided by tensor parallelism, on every GPU)."""
    down = {name: i * o for name, (i, o) in models.attention_projections(c).items() if name in ("q down", "kv down")}
    router = c.hidden * c.experts if moe else 0
    output_biases = 2 * c.hidden if c.biases == "all" else 0  # added after the partial sums are
    copied = models.norm_parameters(c) + sum(down.values()) + router + output_biases
    whole_block = models.attention_weights(c) + models.attention_biases(c) + models.norm_parameters(c)
    whole_block += models.mlp_weights(c, moe) + models.mlp_biases(c)
    return whole_block - copied, copied


def zero_states(parameters: int, recipe: str | Recipe = "bf16-adamw", data: int = 1, zero: int = 0) -> States:
    """The states of one of `data` replicas that share them out as ZeRO stage `zero` says. Raises ValueError."""
    recipe = recipe_named(recipe)
    n = whole("zero_states", "parameters", parameters, 1, MOST_PARAMETERS)
    data, zero = whole("zero_states", "data", data, 1, 10**6), whole("zero_states", "zero", zero, 0, 3)
    share = -(-n // data)
    return States(
        tensor_bytes(share if zero == 3 else n, recipe.weights),
        tensor_bytes(share if zero >= 2 else n, recipe.gradients),
        _optimizer_bytes(share if zero >= 1 else n, recipe),
    )


# ---- the whole of it -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """What one GPU holds at the worst moment; `parts` sum to `total_bytes`.

    moment  what happens then: "loss" or "backward" of a block, "decode" or "prefill"
    stage   the pipeline stage of the GPU, the fullest one
    """

    parts: dict[str, int] = field(hash=False)
    moment: str = ""
    stage: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    def fits(self, gpu: hardware.Gpu) -> bool:
        return self.total_bytes <= gpu.hbm_bytes

    def reason(self, gpu: hardware.Gpu) -> str:
        """Whether it fits `gpu`, and if not what is too large, in a sentence."""
        total, have = self.total_bytes / 1e9, gpu.hbm_bytes / 1e9
        if self.fits(gpu):
            return f"fits: {total:,.1f} of {have:,.0f} GB on each {gpu.name}"
        largest = max(self.parts, key=self.parts.__getitem__)
        text = f"does not fit: {total:,.1f} GB, {total - have:,.1f} more than the {have:,.0f} GB of each {gpu.name}"
        return f"{text}; most of it is {largest} ({self.parts[largest] / 1e9:,.1f} GB)"


def training_memory(
    config: Config | str, batch: int, tokens: int, *, recipe: str | Recipe = "bf16-adamw",
    parallel: Parallel = Parallel(), run: Run | None = None, micro_batches: int = 1,
) -> Memory:  # fmt: skip
    """What the fullest GPU holds at the worst moment of a training step.

    batch          sequences of one optimizer step, over all GPUs; each replica takes them in `micro_batches` passes
    tokens         in each sequence
    run            by default in the recipe's dtype, FlashAttention, nothing computed again

    Gradients stay allocated from step to step. Parts: weights, gradients, optimizer; activations: what the blocks keep
    for the backward pass; working: logits and their gradients while the loss runs, or, where that is more, the gradients
    inside one block (and what it computes again, and with ZeRO 3 its gathered weights).
    Raises ValueError, for instance where the batch cannot be shared out.
    """
    c = models.preset(config)
    recipe = recipe_named(recipe)
    run = run or Run(dtype=recipe.weights)
    where = "training_memory"
    tokens = whole(where, "tokens", tokens, 1, MOST_TOKENS)
    batch = whole(where, "batch", batch)
    micro_batches = whole(where, "micro_batches", micro_batches)
    divides(where, "data x micro_batches", parallel.data * micro_batches, "batch", batch)
    parallel.check(c)
    worst: Memory | None = None
    for stage in {0, min(1, parallel.pipeline - 1), parallel.pipeline - 1}:  # all others hold no more than stage 1
        memory = _stage_memory(
            c, batch // parallel.data // micro_batches, tokens, recipe, parallel, run, micro_batches, stage
        )
        if worst is None or memory.total_bytes > worst.total_bytes:
            worst = memory
    return worst


def _stage_memory(
    c: Config, batch: int, tokens: int, recipe: Recipe, parallel: Parallel, run: Run, micro_batches: int, stage: int
) -> Memory:
    states = zero_states(gpu_parameters(c, parallel, stage), recipe, parallel.data, parallel.zero)
    split = {"tensor": parallel.tensor, "sequence_parallel": parallel.sequence_parallel}
    layers = parallel.stage_layers(c, stage)
    kinds = {c.is_moe(layer) for layer in layers}
    kept = {moe: kept_activations(c, batch, tokens, run, moe=moe, **split) for moe in kinds}
    # One forward, one backward in turns: a stage has begun on as many micro-batches as there are stages from it on.
    in_flight = min(parallel.pipeline - stage, micro_batches)
    activations = in_flight * sum(kept[c.is_moe(layer)] for layer in layers)

    moments = {"backward": max(_block_peak(c, batch, tokens, run, moe=moe, **split) for moe in kinds)}
    if stage == parallel.pipeline - 1:
        moments["loss"] = _head_peak(c, batch, tokens, run, parallel.tensor)
    if parallel.data > 1 and parallel.zero >= 2:
        block = max(sum(_block_parameters(c, moe)) for moe in kinds) // parallel.tensor
        table = -(-c.vocab_size // parallel.tensor) * c.hidden
        for moment in moments:
            gathered = table if moment == "loss" else block
            moments[moment] += tensor_bytes(gathered, recipe.gradients)  # before they are summed and shared out
            if parallel.zero == 3:
                moments[moment] += tensor_bytes(gathered + block, recipe.weights)  # and the next block, fetched ahead
    moment = max(moments, key=moments.__getitem__)
    parts = {
        "weights": states.weights_bytes,
        "gradients": states.gradients_bytes,
        "optimizer": states.optimizer_bytes,
        "activations": activations,
        "working": moments[moment],
    }
    return Memory(parts, moment, stage)


# ---- inference -------------------------------------------------------------------------------------------------------


def kv_cache_bytes(config: Config | str, batch: int, tokens: int, dtype: str = "bf16") -> int:
    """k and v of every layer for `batch` sequences of `tokens`; with MLA the low-rank vector and the positions' part."""
    c = models.preset(config)
    n = whole("kv_cache_bytes", "batch", batch) * whole("kv_cache_bytes", "tokens", tokens, 1, MOST_TOKENS)
    return tensor_bytes(c.layers * n * _cached_elements(c), dtype)


def _cached_elements(c: Config) -> int:
    """For one token in one layer."""
    return c.kv_rank + c.rope_size if c.kv_rank else c.kv_heads * (c.head_size + c.value_size)


def inference_memory(
    config: Config | str, batch: int, tokens: int, *, weights: str = "bf16", cache: str = "bf16", tensor: int = 1,
    pipeline: int = 1, prefill: int = 1,
) -> Memory:  # fmt: skip
    """What the fullest GPU holds while it serves `batch` sequences of at most `tokens`.

    prefill  tokens of each sequence that go through the model at once: 1 while decoding
    Parts: weights, kv cache, working (the widest place of a block in 16 bits, and the last logits in fp32). MLA's cache is
    not divided by `tensor`: all heads read the same vector. Raises ValueError.
    """
    c = models.preset(config)
    parallel = Parallel(tensor=tensor, pipeline=pipeline)
    parallel.check(c)
    prefill = whole(
        "inference_memory", "prefill", prefill, 1, whole("inference_memory", "tokens", tokens, 1, MOST_TOKENS)
    )
    layers = len(parallel.stage_layers(c, 0))
    n = whole("inference_memory", "batch", batch) * tokens
    shared = 1 if c.kv_rank else tensor
    new = batch * prefill
    widest = max(c.intermediate, c.expert_intermediate * (c.experts_per_token + c.shared_experts)) * (2 if c.glu else 1)
    qkv = c.heads * (c.qk_size + c.value_size) + c.kv_heads * (c.qk_size + c.value_size)
    working = 2 * new * (2 * c.hidden + max(widest, qkv) // tensor) + 4 * batch * c.vocab_size
    held = max(gpu_parameters(c, parallel, stage) for stage in {0, pipeline - 1})
    parts = {
        "weights": tensor_bytes(held, weights),
        "kv cache": tensor_bytes(layers * n * (_cached_elements(c) // shared), cache),
        "working": working,
    }
    return Memory(parts, "decode" if prefill == 1 else "prefill")


# ---- the most that fits ----------------------------------------------------------------------------------------------


def largest_context(memory: Callable[[int], Memory], gpu: hardware.Gpu, most: int = 10**8) -> int:
    """The most tokens for which `memory(tokens)` fits `gpu`; 0 if not even one does.

    largest_context(lambda tokens: inference_memory("llama3-8b", 1, tokens), gpu("h100"))
    """
    return _largest(lambda n: memory(n).fits(gpu), most)


def largest_batch(memory: Callable[[int], Memory], gpu: hardware.Gpu, multiple: int = 1, most: int = 10**7) -> int:
    """The most sequences, in multiples of `multiple`, for which `memory(batch)` fits `gpu`; 0 if none do."""
    whole("largest_batch", "multiple", multiple)
    return multiple * _largest(lambda n: memory(n * multiple).fits(gpu), most // multiple)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    low, high = 0, 1  # fits (or is 0); to be tried
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
