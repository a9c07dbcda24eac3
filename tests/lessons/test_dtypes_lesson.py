"""What notebook 01 shows."""

import pytest
import torch

from gpukit.accounting.dtypes import FORMATS
from gpukit.lessons import dtypes as lesson


@pytest.fixture(scope="module")
def x():
    """The rows that the notebook adds up."""
    return torch.rand(16, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64).half()


def running_sum(dtype):
    total, step, totals = torch.zeros((), dtype=dtype), torch.tensor(0.1, dtype=dtype), []
    for _ in range(3000):
        totals.append((total := total + step).item())
    return totals


def test_sums_stop_where_the_sentence_says():
    sums = {"fp16": running_sum(torch.float16), "bf16": running_sum(torch.bfloat16)}
    assert (sums["fp16"][-1], sums["bf16"][-1]) == (256, 32)
    said = lesson.what_sums_say(sums, 0.1).data
    assert "stops at 256" in said and "at 32, where the spacing is 0.25" in said


def test_the_rule_accepts_what_is_as_good_as_pytorch_and_rejects_one_long_sum(x):
    verdicts = {name: accepted for name, _, accepted in lesson.judged(x)}
    assert verdicts == {
        "fp32 sum, rounded at the end": True,
        "64 fp16 sums side by side, added pair by pair": True,
        "one long fp16 sum": False,
        "fp32, without the last 2 numbers": True,
        "fp32, without the last 64 numbers": False,
    }
    assert (x.sum(-1).double() - x.double().sum(-1)).abs().max() <= FORMATS["fp16"].spacing(2060) / 2


def test_a_factor_saves_small_tensors_and_bf16_is_sixteen_times_better():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    errors = {row[0]: row[1:] for row in lesson.fp8_errors(a, 0.02 * b).rows}
    assert errors["e4m3, no factor"][1] == 100
    assert errors["e4m3, with a factor"][0] == pytest.approx(errors["e4m3, with a factor"][1])
    assert errors["e4m3, with a factor"][0] / errors["bf16"][0] == pytest.approx(16, rel=0.15)
    assert errors["e4m3, with a factor"][0] < 6.25


def test_pieces_save_a_sum_of_few_bits():
    whole, by_512, by_128 = (row[1] for row in lesson.accumulators().rows)
    assert whole < by_512 < by_128 < 0
    exact = torch.full((1, 64), 0.5, dtype=torch.float64)
    assert lesson.few_bits(exact, 64).item() == 32
    assert lesson.few_bits(torch.tensor([[1.0] + 31 * [0.0] + [2.0**-14] + 31 * [0.0]]).double(), 64).item() == 1


def test_finer_blocks_saturate_more_in_e4m3():
    values = lesson.outlier()
    assert lesson.saturated(values, "fp8_e4m3", 128) < lesson.saturated(values, "fp8_e4m3", 32)
    zeros = {(row[0], row[1]): row[3] for row in lesson.block_errors(values).rows}
    assert zeros["fp4_e2m1", 128] > zeros["fp4_e2m1", 32] > zeros["fp8_e4m3", 32] == 0


def test_a_layer_of_llama_in_each_format():
    bytes_of = lesson.layer_bytes()
    assert bytes_of["bf16"] == 2 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336)
    assert bytes_of["MX fp4, a scale per 32"] / bytes_of["bf16"] == 4.25 / 16
    assert f"{bytes_of['bf16'] / 4800e3:.0f} µs" in lesson.what_the_layer_says().data
