"""gpukit.accounting.memory against what PyTorch keeps and allocates: autograd's saved tensors, real optimizers, and the
peak of whole training steps on the meta device. On a GPU: tests/accounting/peak_memory.py."""

import csv
import gc
import itertools
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpukit import hardware
from gpukit.accounting import memory, models
from gpukit.accounting.memory import (
    RECIPES,
    Memory,
    Parallel,
    Run,
    activations_bytes,
    block_activations,
    gpu_parameters,
    head_activations,
    inference_memory,
    kept_activations,
    kv_cache_bytes,
    largest_batch,
    largest_context,
    largest_model,
    model_states,
    training_memory,
    zero_states,
)
from gpukit.accounting.models import PRESETS, Config, parameters, preset
from tests.accounting.peak import PeakMemory
from tests.accounting.test_models import CONFIGS
from tests.accounting.transformer import Block, Saved, Transformer

H100 = hardware.gpu("h100")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
B, T = 2, 16


def build(config: Config, run: Run, device: str = "cpu"):
    torch.set_default_dtype(DTYPES[run.dtype])
    try:
        with torch.device(device):
            return Transformer(config, run)
    finally:
        torch.set_default_dtype(torch.float32)


# ---- activations, operation by operation -----------------------------------------------------------------------------

RUNS = (
    Run("fp32"),
    Run("fp32", "eager"),
    Run("fp32", "eager", dropout=True),
    Run("fp32", recompute="selective"),
    Run("fp32", "eager", "selective"),
    Run("fp32", "eager", "full", dropout=True),
)


def saved(module, run: Run, config: Config) -> dict[str, int]:
    torch.manual_seed(0)
    x = torch.randn(B, T, config.hidden, requires_grad=True, dtype=DTYPES[run.dtype])
    with Saved(module) as kept:
        checkpoint(module, x, use_reentrant=False) if run.recompute == "full" else module(x)
    return dict(kept.bytes)


# The CPU's fused attention takes heads of one size only.
CASES = [(c, r) for c in CONFIGS for r in RUNS if r.attention == "eager" or c.value_size == c.qk_size]


@pytest.mark.parametrize(
    ("config", "run"), CASES, ids=[f"{c.name}-{r.attention}-{r.recompute}-{r.dropout}" for c, r in CASES]
)
def test_a_block_keeps_what_autograd_saves(config, run):
    """Counted: every storage that autograd keeps for the backward pass, once, by the operation that keeps it first;
    parameters and the causal mask are not."""
    for moe in {False, bool(config.experts)}:
        found = saved(Block(config, run, moe), run, config)
        assert sum(found.values()) == kept_activations(config, B, T, run, moe=moe)
        if run.recompute == "none":
            assert found == block_activations(config, B, T, run, moe=moe)


def test_a_block_in_bf16_keeps_statistics_in_fp32():
    config, run = CONFIGS[1], Run("bf16", "eager")
    assert saved(build(config, run).blocks[0], run, config) == block_activations(config, B, T, run)
    norm = block_activations(config, B, T, run)["attention norm"]
    assert norm == B * T * (2 * config.hidden + 4)


@pytest.mark.parametrize("run", (Run("fp32"), Run("bf16"), Run("bf16", logits="bf16")), ids=str)
def test_the_head_keeps_what_autograd_saves(run):
    config = CONFIGS[1]
    model = build(config, run)
    tokens, labels = torch.zeros(2, B, T, dtype=torch.int64).clone().unbind()
    with Saved(model) as kept:
        model.loss(tokens, labels.clone())
    assert {name: kept.bytes[name] for name in ("final norm", "head", "loss")} == head_activations(config, B, T, run)


def test_korthikantis_formulas():
    """Activation bytes a layer, 16 bits, from https://arxiv.org/abs/2205.05198, equations 1, 2 and 4; the norms'
    statistics, which the paper neglects, come on top."""
    s, b, h, a, t = 1024, 4, 2048, 16, 8
    gpt = Config("gpt", 51200, h, 24, a, biases="all")
    run = Run("bf16", "eager", dropout=True)
    stats = 2 * 2 * 4 * s * b
    assert sum(block_activations(gpt, b, s, run).values()) - stats == s * b * h * (34 + 5 * a * s // h)
    split = block_activations(gpt, b, s, run, tensor=t)
    assert sum(split.values()) - stats == s * b * h * (10 + 24 // t) + s * b * 5 * a * s // t
    shared = block_activations(gpt, b, s, run, tensor=t, sequence_parallel=True)
    assert sum(shared.values()) - stats // t == s * b * h * 34 // t + s * b * 5 * a * s // t
    assert kept_activations(gpt, b, s, Run("bf16", "eager", "selective", dropout=True)) - stats == s * b * h * 34
    assert kept_activations(gpt, b, s, Run("bf16", "eager", "full", dropout=True)) == 2 * s * b * h


def test_only_attention_without_flash_grows_with_the_square():
    config = preset("llama3-8b")

    def grows(run: Run) -> float:
        return activations_bytes(config, 1, 16384, run) / activations_bytes(config, 1, 8192, run)

    assert grows(Run()) == grows(Run(recompute="full")) == grows(Run(attention="eager", recompute="full")) == 2
    assert 3.4 < grows(Run(attention="eager")) < 4


# ---- the peak of a step ----------------------------------------------------------------------------------------------

STEP = Config(
    "step", 4000, hidden=512, layers=6, heads=8, kv_heads=2, glu=True, intermediate=1408, norm="rmsnorm",
    tied_embeddings=False,
)  # fmt: skip
# A small vocabulary, so that a block's backward pass is the worst moment and not the loss.
BLOCK = Config("block", 50, hidden=512, layers=4, heads=8, kv_heads=2, glu=True, intermediate=1792, norm="rmsnorm")
GPT = Config("gpt", 2000, hidden=512, layers=5, heads=8, positions=2048, biases="all")
GPT_BLOCK = Config("gpt-block", 50, hidden=512, layers=5, heads=8, positions=2048, biases="all")
PLAIN = (Run(), Run(recompute="full"), Run(attention="eager", recompute="selective"))
MORE = (Run(recompute="selective"), Run(attention="eager"), Run(attention="eager", recompute="full", dropout=True))
STEPS = (
    *((config, run, 4, 512) for config in (STEP, BLOCK, GPT, GPT_BLOCK) for run in PLAIN),
    *((config, run, 4, 512) for config in (BLOCK, GPT) for run in MORE),
    (STEP, Run(logits="bf16"), 4, 512),
    (STEP, Run(), 4, 1024),
    (GPT, Run(), 1, 128),
    (BLOCK, Run(attention="eager"), 1, 2048),
    (GPT, Run("fp32", "eager"), 2, 256),
    (preset("gpt2-medium"), Run(attention="eager", dropout=True), 8, 1024),
    (preset("llama3-8b"), Run(), 1, 8192),
    (preset("qwen2.5-7b"), Run(recompute="full"), 1, 32768),
)


@pytest.mark.parametrize(
    ("config", "run", "batch", "tokens"),
    STEPS,
    ids=lambda value: value.name if isinstance(value, Config) else None,
)
def test_a_steps_peak_is_what_pytorch_allocates(config, run, batch, tokens):
    """Forward and backward on the meta device, every storage counted from birth to death. The kernels' own memory, such as
    FlashAttention's fp32 sum of dq, is not seen there."""
    recipe = {"bf16": "bf16-adamw", "fp32": "fp32-adamw"}[run.dtype]
    predicted = training_memory(config, batch, tokens, recipe=recipe, run=run)
    model = build(config, run, "meta")
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
    for weight in model.parameters():
        weight.grad = torch.empty_like(weight)
    gc.collect()
    peak = PeakMemory()
    peak.add(tensor for weight in model.parameters() for tensor in (weight, weight.grad))
    with peak:
        model.loss(ids, ids).backward()
    assert predicted.total_bytes - predicted.parts["optimizer"] == pytest.approx(peak.peak, rel=0.02)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_a_steps_peak_on_a_gpu():
    from tests.accounting.peak_memory import LLAMA, _workspaces, measure

    _workspaces()
    row = measure(LLAMA, "bf16-adamw", 2, 2048, Run())
    assert row["predicted_bytes"] == pytest.approx(row["measured_bytes"], rel=0.05)


# ---- weights, gradients, optimizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "dtype", "optimizer"),
    (
        ("fp32-adamw", torch.float32, lambda p: torch.optim.AdamW(p)),
        ("bf16-pure", torch.bfloat16, lambda p: torch.optim.AdamW(p)),
        ("fp32-sgd", torch.float32, lambda p: torch.optim.SGD(p, lr=0.1)),
        ("fp32-sgd-momentum", torch.float32, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ),
)
def test_states_are_those_of_real_optimizers(recipe, dtype, optimizer):
    weights = [torch.ones(shape, dtype=dtype, requires_grad=True) for shape in ((30, 7), (11,))]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    stepper = optimizer(weights)
    stepper.step()
    # Without the step counts, one number for each tensor.
    kept = [t for state in stepper.state.values() for t in state.values() if torch.is_tensor(t) and t.ndim]

    def size(tensors) -> int:
        return sum(t.nbytes for t in tensors)

    states = model_states(221, recipe)
    assert states == memory.States(size(weights), size(w.grad for w in weights), size(kept))


def test_bytes_a_parameter():
    assert {name: recipe.bytes_per_parameter for name, recipe in RECIPES.items()} == {
        "fp32-adamw": 16, "bf16-adamw": 16, "bf16-adamw-fp32-grads": 18, "bf16-adamw-8bit": 2 + 2 + 4 + 2 * (1 + 4 / 256),
        "bf16-pure": 8, "fp32-sgd": 8, "fp32-sgd-momentum": 12,
    }  # fmt: skip


def test_the_largest_model_on_eight_h100():
    assert largest_model(H100.hbm_bytes, 8) == 40_000_000_000
    assert model_states(40_000_000_000, "fp32-adamw").total_bytes == 8 * H100.hbm_bytes
    assert largest_model(H100.hbm_bytes, 8, 18) == 35_555_555_555


# ---- many GPUs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_conserves_bytes(recipe, zero):
    """What is shared out sums up to what one GPU held; the last share may be filled up with less than 8-bit states' one
    block of scales for each GPU."""
    n, data = 1_000_000, 7
    alone, shared = model_states(n, recipe), zero_states(n, recipe, data, zero)
    for name, since in (("optimizer_bytes", 1), ("gradients_bytes", 2), ("weights_bytes", 3)):
        if zero >= since:
            assert 0 <= data * getattr(shared, name) - getattr(alone, name) < data * 16
        else:
            assert getattr(shared, name) == getattr(alone, name)


@pytest.mark.parametrize("name", PRESETS)
def test_sharding_conserves_parameters(name):
    """Over all GPUs of one replica: every parameter once, and those that are copied as often as there are copies."""
    config = preset(name)
    whole = parameters(config).total
    tables = config.vocab_size * config.hidden
    for tensor, pipeline in itertools.product((1, 2, 4, 8), (1, 2, 3, config.layers)):
        if config.kv_heads % tensor or config.heads % tensor:
            continue
        parallel = Parallel(tensor=tensor, pipeline=pipeline)
        layers = [parallel.stage_layers(config, stage) for stage in range(pipeline)]
        assert [layer for stage in layers for layer in stage] == list(range(config.layers))
        held = tensor * sum(gpu_parameters(config, parallel, stage) for stage in range(pipeline))
        copied = sum(memory._block_parameters(config, config.is_moe(layer))[1] for layer in range(config.layers))
        copied += models.NORMS[config.norm] * config.hidden + config.positions * config.hidden
        again = tables if config.tied_embeddings and pipeline > 1 else 0
        rounding = tensor * (config.layers + 2 * config.hidden)  # a table's rows and a block's weights are rounded up
        assert 0 <= held - (whole + (tensor - 1) * copied + again) <= (rounding if tensor > 1 else 0)


def test_tensor_parallel_activations_sum_up():
    """What is divided sums up to the whole; the rest is on every GPU, unless the sequence is divided too."""
    config, run = preset("gpt2-medium"), Run(attention="eager", dropout=True)
    alone = block_activations(config, 4, 512, run)
    for tensor in (2, 4, 8):
        divided = block_activations(config, 4, 512, run, tensor=tensor)
        shared = block_activations(config, 4, 512, run, tensor=tensor, sequence_parallel=True)
        for name in ("attention", "output projection"):
            assert tensor * divided[name] == alone[name]
        for name in ("attention norm", "qkv projection", "mlp norm", "mlp dropout"):
            assert divided[name] == alone[name]
        assert tensor * sum(shared.values()) == sum(alone.values())


@pytest.mark.parametrize(
    "run",
    (Run(), Run(attention="eager"), Run(attention="eager", recompute="selective"), Run(recompute="full")),
    ids=str,
)
@pytest.mark.parametrize("name", ("gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v3"))
def test_memory_grows_with_batch_and_length(name, run):
    def total(batch: int, tokens: int, **options) -> int:
        return training_memory(name, batch, tokens, run=run, **options).total_bytes

    sizes = [total(batch, 512) for batch in (1, 2, 3, 4, 8, 16)]
    assert sizes == sorted(set(sizes))
    sizes = [total(1, tokens) for tokens in (1, 2, 63, 64, 512, 4096, 32768)]
    assert sizes == sorted(set(sizes))
    served = [inference_memory(name, batch, 512).total_bytes for batch in (1, 2, 3, 17)]
    assert served == sorted(set(served))


def test_more_sharing_takes_less():
    def total(**layout) -> int:
        return training_memory("llama3-8b", 8, 4096, parallel=Parallel(**layout)).total_bytes

    by_stage = [total(data=8, zero=zero) for zero in range(4)]
    assert by_stage == sorted(by_stage, reverse=True) and len(set(by_stage)) == 4
    assert total(data=8) < total(data=4) < total() and total(tensor=8) < total(tensor=2) < total()
    assert total(tensor=4, sequence_parallel=True) < total(tensor=4)
    recomputed = [training_memory("llama3-8b", 1, 8192, run=Run(attention="eager", recompute=r)).total_bytes
                  for r in memory.RECOMPUTE]  # fmt: skip
    assert recomputed == sorted(recomputed, reverse=True)


def test_pipeline_stages_hold_micro_batches():
    """The first of four stages has begun four micro-batches when the first comes back; the last stage one."""
    config = Config("even", 1000, hidden=256, layers=8, heads=8)
    parallel = Parallel(pipeline=4)
    first = memory._stage_memory(config, 2, 128, RECIPES["bf16-adamw"], parallel, Run(), 8, 0)
    last = memory._stage_memory(config, 2, 128, RECIPES["bf16-adamw"], parallel, Run(), 8, 3)
    assert first.parts["activations"] == 4 * last.parts["activations"] == activations_bytes(config, 2, 128)
    assert {first.moment, last.moment} == {"backward", "loss"}


def test_the_whole_is_the_sum_of_its_parts():
    found = training_memory("llama3-8b", 8, 8192, parallel=Parallel(data=8, zero=3))
    share = -(-parameters(preset("llama3-8b")).total // 8)
    assert found.parts["weights"] == found.parts["gradients"] == 2 * share and found.parts["optimizer"] == 12 * share
    assert found.parts["activations"] == activations_bytes(preset("llama3-8b"), 1, 8192)
    assert found.total_bytes == sum(found.parts.values()) < H100.hbm_bytes
    assert found.fits(H100) and found.reason(H100).startswith("fits: ")
    more = training_memory("llama3-8b", 16, 8192, parallel=Parallel(data=8, zero=3))
    assert not more.fits(H100)
    assert "does not fit" in more.reason(H100) and "most of it is activations" in more.reason(H100)


# ---- inference -------------------------------------------------------------------------------------------------------


def test_kv_cache():
    """Llama 3 8B: 32 layers x 8 heads x 128 x 2 (k and v) x 2 bytes = 128 KiB a token, a quarter of what 32 heads would
    take; DeepSeek-V3: 61 layers x 576 x 2 bytes."""
    assert kv_cache_bytes("llama3-8b", 1, 1) == 131_072
    assert kv_cache_bytes("llama3-8b", 4, 8192, "fp8") == 4 * 8192 * 65_536
    assert kv_cache_bytes("deepseek-v3", 1, 1) == 61 * 576 * 2
    many = Config("many heads", 128256, hidden=4096, layers=32, heads=32)
    assert kv_cache_bytes(many, 1, 1) == 4 * 131_072


def test_kv_cache_of_real_tensors():
    config = CONFIGS[1]
    cache = [
        torch.empty(2, B, T, config.kv_heads, config.head_size, dtype=torch.bfloat16) for _ in range(config.layers)
    ]
    assert kv_cache_bytes(config, B, T) == sum(layer.nbytes for layer in cache)


def test_inference_memory():
    one = inference_memory("llama3-8b", 4, 8192)
    assert one.parts["weights"] == 2 * 8_030_261_248 and one.parts["kv cache"] == 4 * 8192 * 131_072
    assert inference_memory("llama3-8b", 4, 8192, weights="int4").parts["weights"] == 8_030_261_248 // 2
    eight = inference_memory("llama3-70b", 4, 8192, tensor=8)
    alone = inference_memory("llama3-70b", 4, 8192)
    assert 8 * eight.parts["kv cache"] == alone.parts["kv cache"] and not alone.fits(H100) and eight.fits(H100)
    latent = inference_memory("deepseek-v3", 1, 8192, tensor=8), inference_memory("deepseek-v3", 1, 8192)
    assert latent[0].parts["kv cache"] == latent[1].parts["kv cache"]


def test_the_most_that_fits():
    def serve(tokens: int) -> Memory:
        return inference_memory("llama3-8b", 1, tokens)

    most = largest_context(serve, H100)
    assert serve(most).fits(H100) and not serve(most + 1).fits(H100)
    layout = Parallel(data=8, zero=3)

    def train(batch: int) -> Memory:
        return training_memory("llama3-8b", batch, 2048, parallel=layout)

    most = largest_batch(train, H100, multiple=8)
    assert most % 8 == 0 and train(most).fits(H100) and not train(most + 8).fits(H100)
    assert largest_context(lambda tokens: inference_memory("llama3-70b", 1, tokens), H100) == 0
    assert largest_context(lambda tokens: inference_memory("gpt2", 1, tokens), H100, most=1000) == 1000


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    (
        (lambda: model_states(0), "model_states: parameters must be a whole number from 1 to 10^15, got 0"),
        (lambda: model_states(10**30), "parameters must be a whole number from 1 to 10^15"),
        (lambda: model_states(1e30), "got 1e+30"),
        (lambda: model_states(7, "adam"), "no recipe is called 'adam'; did you mean 'fp32-adamw'?"),
        (lambda: largest_model(80e9, 0), "gpus must be a whole number from 1"),
        (lambda: largest_model(80e9, 8, 0), "bytes_per_parameter must be a number above 0 and at most 1,000, got 0"),
        (lambda: largest_model(80e9, 8, float("nan")), "bytes_per_parameter must be a number above 0"),
        (lambda: zero_states(10, data=2, zero=4), "zero must be a whole number from 0 to 3, got 4"),
        (lambda: Parallel(zero=4), "parallel: zero must be a whole number from 0 to 3, got 4"),
        (lambda: Parallel(data=0), "parallel: data must be a whole number from 1 to 10^6, got 0"),
        (lambda: Parallel(tensor=1.5), "parallel: tensor must be a whole number, got 1.5"),
        (lambda: Run(attention="naive"), "run: attention must be one of flash, eager, got 'naive'"),
        (lambda: Run(recompute="some"), "run: recompute must be one of none, selective, full, got 'some'"),
        (lambda: Run(dtype="fp8"), "run: dtype must be one of fp32, bf16, fp16, got 'fp8'"),
        (lambda: Run(logits="int8"), "run: logits must be one of fp32, bf16, fp16, got 'int8'"),
        (lambda: training_memory("gpt2", 8, 0), "tokens must be a whole number from 1 to 10^18, got 0"),
        (lambda: training_memory("gpt2", -8, 5), "batch must be a whole number from 1 to 10^9, got -8"),
        (lambda: training_memory("gpt2", 8, 1, micro_batches=0), "micro_batches must be a whole number from 1"),
        (
            lambda: training_memory("gpt2", 8, 1, parallel=Parallel(data=3)),
            "data x micro_batches must divide batch, and 3 does not divide 8",
        ),
        (
            lambda: training_memory("gpt2", 8, 1, parallel=Parallel(pipeline=13)),
            "pipeline must be at most the model's 12 layers, got 13",
        ),
        (
            lambda: training_memory("gpt2", 8, 1, parallel=Parallel(tensor=8)),
            "tensor must divide heads, and 8 does not divide 12",
        ),
        (
            lambda: training_memory("llama3-8b", 8, 1, parallel=Parallel(tensor=16)),
            "tensor must divide kv_heads, and 16 does not divide 8",
        ),
        (lambda: kv_cache_bytes("gpt2", 1, 2.5), "kv_cache_bytes: tokens must be a whole number, got 2.5"),
        (lambda: kv_cache_bytes("gpt2", 1, 2, "bf17"), "dtype must be one of"),
        (
            lambda: inference_memory("gpt2", 1, 10, prefill=11),
            "prefill must be a whole number from 1 to 10, got 11",
        ),
        (lambda: largest_batch(lambda n: None, H100, multiple=0), "multiple must be a whole number from 1"),
        (lambda: gpu_parameters(preset("gpt2"), Parallel(), 1), "stage must be a whole number from 0 to 0, got 1"),
        (lambda: block_activations(preset("gpt2"), 1, "8"), "tokens must be a whole number, got '8'"),
    ),
)  # fmt: skip
def test_what_is_refused(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value)


def test_absurd_sizes_give_numbers():
    """The largest that is accepted is finite and prints as a number."""
    found = training_memory("llama3-405b", 10**6, 10**9)
    text = f"{found.total_bytes} {found.reason(H100)}"
    assert "inf" not in text and "nan" not in text and "does not fit" in text


# ---- what an H200 measured -------------------------------------------------------------------------------------------

MEASURED = Path(memory.__file__).parents[1] / "results" / "h200" / "memory.csv"


@pytest.mark.skipif(
    not MEASURED.exists(), reason="python -m tests.accounting.peak_memory has not been run on an H200 yet"
)
def test_recorded_peaks_are_within_five_percent_of_what_is_predicted_now():
    from tests.accounting.peak_memory import SETTINGS

    with MEASURED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 6
    predicted = {}
    for config, recipe, batch, tokens, run in SETTINGS:
        what = (
            config.name,
            recipe,
            run.attention,
            run.recompute,
            str(int(run.dropout)),
            run.logits,
            str(batch),
            str(tokens),
        )
        predicted[what] = training_memory(config, batch, tokens, recipe=recipe, run=run).total_bytes
    names = ("model", "recipe", "attention", "recompute", "dropout", "logits", "batch", "tokens")
    for row in rows:
        what = tuple(row[name] for name in names)
        assert int(row["measured_bytes"]) == pytest.approx(predicted[what], rel=0.05), what
        assert int(row["measured_states_bytes"]) == pytest.approx(int(row["predicted_states_bytes"]), rel=0.01), what
