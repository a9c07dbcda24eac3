"""gpukit.accounting.training and the operations of gpukit.accounting.roofline, against numbers worked out by hand."""

import math

import pytest

from gpukit import hardware
from gpukit.accounting import roofline
from gpukit.accounting.flops import forward_flops
from gpukit.accounting.memory import kv_cache_bytes
from gpukit.accounting.models import PRESETS, parameters, preset
from gpukit.accounting.roofline import (
    Point,
    attention_point,
    critical_batch,
    elementwise_point,
    least_us,
    matmul_point,
    model_points,
)
from gpukit.accounting.training import (
    Schedule,
    chinchilla_parameters,
    chinchilla_tokens,
    mfu,
    tokens_from_budget,
    tokens_per_s,
    training_cost,
)

H100 = hardware.gpu("h100")


def test_seventy_billion_on_fifteen_trillion_tokens():
    """About 143 days on 1,024 H100 at an MFU of 0.5; half of that for who takes the peak «with sparsity»."""
    cost = training_cost(70e9, 15e12, "h100", 1024, 0.5)
    assert cost.flops == 63 * 10**23
    assert (
        cost.days
        == pytest.approx(6 * 70e9 * 15e12 / (989.4e12 * 0.5 * 1024 * 86400))
        == pytest.approx(143.94, abs=0.01)
    )
    assert training_cost(70e9, 15e12, "h100", 1024, 0.5, sparse_peak=True).days == pytest.approx(cost.days / 2)
    assert cost.gpu_hours == pytest.approx(cost.days * 24 * 1024)
    assert cost.energy_kwh is None and cost.money is None


def test_energy_and_money():
    cost = training_cost(70e9, 15e12, H100, 1024, 0.5, watts=1000, price_per_gpu_hour=2)
    assert cost.energy_kwh == pytest.approx(cost.gpu_hours) and cost.money == pytest.approx(2 * cost.gpu_hours)


def test_deepseeks_own_account():
    """2.664 million H800 GPU-hours for 14.8 trillion tokens of pre-training (https://arxiv.org/abs/2412.19437, table 1):
    what MFU, counted in bf16 on the H800's dense peak, which is the H100's, that was."""
    active = parameters(preset("deepseek-v3")).active
    share = mfu(14.8e12 / (2.664e6 * 3600 / 2048), 6 * active, H100, 2048)
    assert 0.3 < share < 0.4
    assert training_cost(active, 14.8e12, H100, 2048, share).gpu_hours == pytest.approx(2.664e6)


def test_mfu_and_tokens_per_second_are_inverse():
    rate = tokens_per_s(8e9, "h200", 64, 0.4)
    assert mfu(rate, 6 * 8e9, "h200", 64) == pytest.approx(0.4)
    assert tokens_from_budget(8e9, "h200", 64, 10, 0.4) == pytest.approx(rate * 864000, rel=1e-9)
    assert training_cost(8e9, tokens_from_budget(8e9, "h200", 64, 10, 0.4), "h200", 64, 0.4).days == pytest.approx(10)


def test_flops_counted_better_than_by_six_nd():
    assert training_cost(1, 1, H100, flops=10**21).flops == 10**21
    assert training_cost(8e9, 1e12, H100, dtype="fp8").days * 1978.9 == pytest.approx(
        training_cost(8e9, 1e12, H100).days * 989.4
    )


def test_chinchilla():
    assert chinchilla_tokens(70e9) == 1_400_000_000_000
    assert chinchilla_parameters(6 * 70e9 * 1.4e12) == 70_000_000_000


# ---- the schedule ----------------------------------------------------------------------------------------------------


def test_schedule():
    schedule = Schedule(steps=1000, warmup=100, peak=3e-4, final=0.1)
    assert schedule.rate(0) == pytest.approx(3e-6) and schedule.rate(99) == schedule.rate(100) == pytest.approx(3e-4)
    assert schedule.rate(550) == pytest.approx(3e-4 * 0.55) and schedule.rate(1000) == pytest.approx(3e-5)
    assert schedule.rate(5000) == schedule.rate(1000)
    rates = [schedule.rate(step) for step in range(100, 1001)]
    assert rates == sorted(rates, reverse=True)
    exact = sum(schedule.rate(step) for step in range(1000)) / 1000 / 3e-4
    assert schedule.mean_rate() == pytest.approx(exact) == pytest.approx(0.1 * 0.505 + 0.9 * 0.55, abs=1e-3)


@pytest.mark.parametrize(("shape", "mean"), (("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)))
def test_shapes(shape, mean):
    schedule = Schedule(10**9, peak=2.0, final=0, shape=shape)
    assert schedule.mean_rate() == pytest.approx(mean, abs=1e-3)
    assert schedule.rate(0) == 2.0 and schedule.rate(10**9) == pytest.approx(2.0 if shape == "constant" else 0)


def test_how_much_of_a_run_is_spent_at_a_low_rate():
    # cos^2 is below a half for half of the way, and the warm-up for half of its own.
    assert Schedule(10_000, warmup=2000, final=0).share_below(0.5) == pytest.approx(0.1 + 0.4, abs=2e-3)
    assert Schedule(10**6, shape="constant").share_below(1.0) == 0


# ---- operations on the roofline --------------------------------------------------------------------------------------


def test_points_by_hand():
    square = matmul_point("square", 4096, 4096, 4096)
    assert (
        square.flops == 2 * 4096**3 and square.bytes == 3 * 2 * 4096**2 and square.intensity == pytest.approx(4096 / 3)
    )
    relu = elementwise_point("relu", 1000, "fp32")
    assert 1 / relu.intensity == 8 and 1 / elementwise_point("relu", 1000, "fp16").intensity == 4  # bytes a FLOP
    decode = attention_point("decode", 1, heads=32, kv_heads=8, tokens=1, keys=8192, head_size=128)
    assert decode.flops == 4 * 32 * 8192 * 128
    assert decode.bytes == 2 * 2 * 128 * (32 + 8 * 8192)
    prefill = attention_point("prefill", 1, 32, 8, 100, 100, 128, causal=True)
    assert prefill.flops == 4 * 32 * 128 * 5050


def test_critical_batch():
    """The ridge of an H100 in bf16 is 295 FLOP a byte; a weight of 2 bytes takes 2 FLOPs for each token."""
    assert critical_batch(H100) == pytest.approx(989.4e12 / 3350e9) == pytest.approx(295, abs=0.5)
    assert critical_batch(H100, "bf16", "int4") == pytest.approx(critical_batch(H100) / 4)
    assert critical_batch(H100, "fp8") == pytest.approx(H100.ridge("fp8") / 2)
    batch = math.ceil(critical_batch(H100))
    for tokens, limited in ((batch // 2, "memory"), (batch * 2, "compute")):
        point = matmul_point("weights", tokens, 65536, 65536)
        assert roofline.limit(H100, "bf16", point.intensity) == limited


@pytest.mark.parametrize("name", PRESETS)
def test_a_models_points_hold_all_of_its_flops_and_weights(name):
    config = preset(name)
    for tokens, past in ((1024, 0), (1, 1024)):
        points = {point.name: point for point in model_points(config, 1, tokens, past=past)}
        absorbed = bool(config.kv_rank and past)
        flops = forward_flops(config, 1, tokens, past=past, logits="last", absorbed=absorbed).total
        small = sum(points[op].flops for op in ("norms", "activation", "residual adds"))
        assert sum(point.flops for point in points.values()) - small == flops
        moved = sum(point.bytes for point in points.values())
        reached = parameters(config)
        read = reached.total if tokens > 1 else reached.active  # one token reads the experts that it chose
        weights = 2 * (read - reached.embedding - reached.positions)
        assert moved > 0.99 * weights
        if tokens == 1:
            cache = kv_cache_bytes(config, 1, past)
            assert moved == pytest.approx(
                weights + cache + (2 * reached.embedding if config.tied_embeddings else 0), rel=0.02
            )


def test_decode_is_limited_by_memory_and_prefill_by_compute():
    decode, prefill = model_points("llama3-70b", 1, 1, past=4096), model_points("llama3-70b", 1, 4096)
    assert all(roofline.limit(H100, "bf16", point.intensity) == "memory" for point in decode)
    big = max(prefill, key=lambda point: point.flops)
    assert big.name == "mlp" and roofline.limit(H100, "bf16", big.intensity) == "compute"
    # A token takes as long as reading the weights and the cache does.
    moved = 2 * parameters(preset("llama3-70b")).non_embedding + kv_cache_bytes("llama3-70b", 1, 4096)
    assert least_us(decode, H100, "bf16") == pytest.approx(moved / 3350e9 * 1e6, rel=0.02)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    (
        (lambda: training_cost(0, 1, H100), "parameters must be a whole number from 1 to 10^15, got 0"),
        (lambda: training_cost(1e30, 1, H100), "parameters must be a whole number from 1 to 10^15, got 1e+30"),
        (lambda: training_cost(7e9, -1, H100), "tokens must be a whole number from 1 to 10^18, got -1"),
        (lambda: training_cost(7e9, 1.5, H100), "tokens must be a whole number, got 1.5"),
        (lambda: training_cost(7e9, 1e12, H100, 0), "training_cost: gpus must be a whole number from 1 to 10^7, got 0"),
        (lambda: training_cost(7e9, 1e12, H100, mfu=0), "mfu must be a number above 0 and at most 1, got 0"),
        (lambda: training_cost(7e9, 1e12, H100, mfu=1.2), "mfu must be a number above 0 and at most 1, got 1.2"),
        (lambda: training_cost(7e9, 1e12, H100, mfu="0.5"), "mfu must be a number above 0 and at most 1, got '0.5'"),
        (lambda: training_cost(7e9, 1e12, "h1000"), "no GPU is called 'h1000'"),
        (lambda: training_cost(7e9, 1e12, "t4"), "dtype must be one of fp64, fp32, fp16, int8 on T4, got 'bf16'"),
        (lambda: training_cost(7e9, 1e12, H100, watts=0), "watts must be a number above 0"),
        (lambda: training_cost(7e9, 1e12, H100, price_per_gpu_hour=-1), "price_per_gpu_hour must be a number above 0"),
        (lambda: training_cost(7e9, 1e12, H100, flops=0), "flops must be a whole number from 1 to 10^36, got 0"),
        (lambda: mfu(1e9, 6 * 8e9, H100), "at most 1 is possible"),
        (lambda: mfu(0, 6 * 8e9, H100), "tokens_per_s must be a number above 0"),
        (lambda: mfu(float("nan"), 6, H100), "tokens_per_s must be a number above 0"),
        (lambda: tokens_from_budget(8e9, H100, 1, 0), "days must be a number above 0"),
        (lambda: chinchilla_tokens(-1), "parameters must be a whole number from 1"),
        (lambda: chinchilla_parameters(1), "flops must be a whole number from 120"),
        (lambda: Schedule(0), "schedule: steps must be a whole number from 1"),
        (lambda: Schedule(10, warmup=11), "schedule: warmup must be a whole number from 0 to 10, got 11"),
        (lambda: Schedule(10, final=1.5), "schedule: final must be a number above 0 and at most 1, got 1.5"),
        (lambda: Schedule(10, shape="step"), "schedule: shape must be one of cosine, linear, constant, got 'step'"),
        (lambda: Schedule(10).rate(-1), "schedule: step must be a whole number from 0"),
        (lambda: critical_batch(H100, "fp6"), "must be one of"),
        (lambda: elementwise_point("relu", 0), "elements must be a whole number from 1"),
        (lambda: model_points("gpt2", 1, 1, dtype="fp3"), "dtype must be one of"),
        (lambda: Point("copy", 0, 1), "flops of 'copy' must be a positive number, got 0"),
    ),
)  # fmt: skip
def test_what_is_refused(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value)


def test_nothing_is_infinite_at_the_edges():
    cost = training_cost(10**15, 10**18, "t4", 1, 1e-6, dtype="fp16", watts=1, price_per_gpu_hour=1)
    assert all(map(math.isfinite, (cost.days, cost.gpu_hours, cost.energy_kwh, cost.money)))
    assert math.isfinite(training_cost(1, 1, "b200", 10**7, 1).days)
