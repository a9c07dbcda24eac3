"""`gpukit memory` and `gpukit flops`: what they print, and that their formulas come out."""

import re

import pytest

from gpukit import cli, hardware
from gpukit.accounting import pencil
from gpukit.accounting.memory import Parallel, training_memory
from gpukit.accounting.models import PRESETS, parameters, preset


def printed(capsys, line: str) -> str:
    assert cli.main(line.split()) == 0
    out = capsys.readouterr()
    assert not out.err and not re.search(r"\b(inf|nan)\b", out.out)
    return out.out


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_memory(capsys):
    text = printed(capsys, "memory --model llama3-8b --batch 8 --seq 8192 --gpus 8xh100 --zero 3")
    wanted = training_memory("llama3-8b", 8, 8192, parallel=Parallel(data=8, zero=3))
    rows = dict(re.findall(r"^  (\w+) +([\d.]+) GB ", text, re.MULTILINE))
    assert rows == {name: f"{part / 1e9:.2f}" for name, part in [*wanted.parts.items(), ("total", wanted.total_bytes)]}
    assert "fits: 75.4 of 80 GB on each H100 SXM" in text
    layers, batch, tokens, each = map(
        number, re.search(r"(\d+) layers x (\d+) x ([\d,]+) tokens x ([\d,]+) b", text).groups()
    )
    assert layers * batch * tokens * each == wanted.parts["activations"]
    block = sum(map(float, re.findall(r"([\d.]+) MB$", text, re.MULTILINE))) * 1e6
    assert layers * block == pytest.approx(wanted.parts["activations"], rel=1e-3)
    assert "80 GB x 8 / 16 bytes per parameter = 40 B parameters at most" in text


def test_the_formula_for_the_parameters_comes_out():
    for name in PRESETS:
        left, right = pencil.formula(preset(name)).removeprefix("N = ").rsplit(" = ", 1)
        words = left.replace(",", "").replace(" x ", " * ").replace("(last norm)", "")
        arithmetic = re.sub(r"\([a-z]+\)|[a-zA-Z]+", "", words)
        assert eval(arithmetic) == number(right) == parameters(preset(name)).total


def test_the_most_that_fits_is_the_most(capsys):
    layout = "--gpus 8xh100 --zero 3 --recompute full"
    text = printed(capsys, f"memory --model llama3-8b --batch 8 --seq 8192 {layout}")
    batch, tokens = map(number, re.search(r"fits: ([\d,]+) sequences of 8,192 tokens, or 8 of ([\d,]+)", text).groups())
    for sequences, length, fits in (
        (batch, 8192, True),
        (batch + 8, 8192, False),
        (8, tokens, True),
        (8, tokens + 1, False),
    ):
        text = printed(capsys, f"memory --model llama3-8b --batch {sequences:.0f} --seq {length:.0f} {layout}")
        assert ("  fits: " in text) == fits and ("does not fit" in text) != fits
    assert "and what it computes again" in text or "logits of" in text


@pytest.mark.parametrize("name", PRESETS)
def test_every_model_can_be_asked_for(capsys, name):
    text = printed(
        capsys, f"memory --model {name} --gpus 8xb200 --batch 8 --zero 3 --recompute selective --attention eager"
    )
    assert f"{parameters(preset(name)).total:,} parameters" in text and "One layer keeps" in text
    printed(capsys, f"memory --model {name} --serve --gpus 1xh200 --batch 4")
    assert "GPU-hours" in printed(capsys, f"flops --model {name} --tokens 1T --gpus 64xh200")


def test_serving(capsys):
    text = printed(
        capsys, "memory --model llama3-70b --serve --batch 16 --seq 8192 --gpus 8xh100 --cache fp8 --weights int4"
    )
    assert "70.55 B parameters x 0.5 bytes over 8" in text
    assert "16 x 8,192 tokens x 163,840 bytes (GQA, fp8) over 8" in text and "fits: " in text
    assert "does not fit" in printed(capsys, "memory --model llama3-70b --serve --gpus h100")
    said = printed(capsys, "memory --model llama3-8b")
    assert "The most that fits: nothing, not even one token of one sequence\n" in said and "or 1 of 0" not in said


def test_flops(capsys):
    text = printed(capsys, "flops --model llama3-70b --tokens 15T --gpus 1024xh100 --mfu 0.5")
    assert "6 x 70,553,706,496 x 15,000,000,000,000 = 6.35e+24" in text
    assert "1,024 x 989.4 T (H100 SXM, bf16, dense) x MFU 0.5 = 5.066e+17" in text
    assert "= 145.1 days" in text and "«with sparsity» would promise 72.5 days" in text
    shares = [float(share) for share in re.findall(r"([\d.]+)%$", text, re.MULTILINE)]
    assert len(shares) == 8 and sum(shares) == pytest.approx(100, abs=0.5)


def test_flops_of_a_number_of_parameters(capsys):
    text = printed(capsys, "flops --model 70B --tokens 15T --gpus 1024xh100 --mfu 0.5 --watts 1000 --price 2.5")
    assert "= 143.9 days" in text and "By operation" not in text
    hours = 6 * 70e9 * 15e12 / (989.4e12 * 0.5) / 3600
    assert f"= {hours:,.0f} kWh" in text and f"= {2.5 * hours:,.0f}" in text
    assert "hours" in printed(capsys, "flops --model 124M --tokens 10B --gpus h100")


def test_experts_count_as_often_as_they_are_used(capsys):
    text = printed(capsys, "flops --model deepseek-v3 --tokens 14.8T --gpus 2048xh100")
    assert "671,026,404,352 parameters, of which a token uses 37,552,282,624" in text
    assert "6 N D = 6 x 37,552,282,624 x 14,800,000,000,000" in text and "experts" in text


@pytest.mark.parametrize(
    ("line", "words"),
    (
        ("memory --model gpt2 --batch -3", "--batch must be a number such as 8192, 1.5B or 15T, got '-3'"),
        ("memory --model gpt2 --batch 0", "--batch must be a whole number from 1"),
        ("memory --model gpt2 --seq 1.5", "--seq must be a whole number, got '1.5'"),
        ("memory --model gpt2 --seq 1000000000000000000000000000000", "--seq must be a whole number from 1 to"),
        ("memory --model gtp2", "no model is called 'gtp2'; did you mean 'gpt2'?"),
        ("memory --model gpt2 --gpus 8xh1000", "no GPU is called 'h1000'"),
        ("memory --model gpt2 --gpus 8", "gpukit: --gpus must be written as 8xh100, got '8'"),
        ("memory --model gpt2 --gpus 0xh100", "--gpus must be a whole number from 1"),
        (
            "memory --model gpt2 --gpus 3xh100",
            "3 copies of the model with 1 micro-batch each need a multiple of 3, got 1",
        ),
        (
            "memory --model gpt2 --serve --zero 3",
            "--zero is an option of a training step and has no meaning with --serve",
        ),
        ("memory --model gpt2 --cache fp8", "--cache is an option of serving: add --serve"),
        ("memory --model gpt2 --gpus 8xh100 --tensor 3", "--tensor x --pipeline must divide the number of GPUs"),
        ("memory --model gpt2 --gpus 8xh100 --tensor 8", "--tensor must divide heads, and 8 does not divide 12"),
        (
            "memory --model gpt2 --gpus 13xh100 --pipeline 13",
            "gpukit: --pipeline must be at most the model's 12 layers, got 13",
        ),
        ("memory --model gpt2 --zero 4", "--zero must be a whole number from 0 to 3, got 4"),
        ("memory --model gpt2 --recipe adam", "no recipe is called 'adam'; did you mean"),
        ("memory --model gpt2 --recompute some", "--recompute must be one of none, selective, full, got 'some'"),
        ("memory --model gpt2 --serve --gpus 8xh100 --tensor 2", "--tensor x --pipeline must be the number of GPUs, 8"),
        ("memory --model gpt2 --serve --cache fp7", "gpukit: --cache must be one of"),
        ("flops --model gpt2 --tokens 0", "--tokens must be a whole number from 1 to 10^18, got 0"),
        ("flops --model 1e30 --tokens 1T", "gpukit: --model must be a number such as 8192, 1.5B or 15T, got '1e30'"),
        ("flops --model 9999999T --tokens 1T", "--model must be a whole number from 1 to 10^15"),
        ("flops --model gpt2 --tokens 1T --mfu 1.5", "gpukit: --mfu must be a number above 0 and at most 1, got 1.5"),
        ("flops --model gpt2 --tokens 1T --mfu half", "--mfu must be a number, got 'half'"),
        ("flops --model gpt2 --tokens 1T --mfu nan", "gpukit: --mfu must be a number above 0 and at most 1, got nan"),
        ("flops --model gpt2 --tokens 1T --watts inf", "gpukit: --watts must be a number above 0"),
        ("flops --model gpt2 --tokens 1T --gpus t4", "gpukit: --dtype must be one of"),
    ),
)
def test_what_is_refused(capsys, line, words):
    assert cli.main(line.split()) == 2
    out = capsys.readouterr()
    assert not out.out and out.err.startswith("gpukit: ") and words in out.err and out.err.count("\n") == 1


def test_numbers_as_people_write_them():
    assert [pencil.count(t) for t in ("15T", "1.5B", "8,192", "70b", "0.5K")] == [
        15 * 10**12,
        15 * 10**8,
        8192,
        70 * 10**9,
        500,
    ]
    assert pencil.gpus("8xh100") == pencil.gpus(" 8 X H100") == (8, hardware.gpu("h100"))
    assert pencil.gpus("NVIDIA H200") == (1, hardware.gpu("h200"))
    assert [pencil.big(n) for n in (15e12, 8.03e9, 1000, 12)] == ["15 T", "8.03 B", "1,000", "12"]
    assert [pencil.size(n) for n in (1.5e12, 2e9, 131072, 12)] == ["1.5 TB", "2 GB", "131.1 kB", "12 bytes"]
