"""Patched models under what training wraps around them: autocast, checkpointing, LoRA, torch.compile, DDP and FSDP2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpukit
from gpukit.testing import assert_close
from tests.huggingface.models import build_one_layer, tokens


def step(model, **named):
    ids = tokens(2, 7)
    model.zero_grad()
    outputs = model(ids, labels=ids, **named)
    outputs.loss.backward()
    return outputs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(found, expected):
    """Losses and gradients of two steps that differ by rounding alone."""
    torch.testing.assert_close(found[0].loss, expected[0].loss, atol=1e-5, rtol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_autocast():
    family = "qwen3"  # whose norms of queries and keys give float32 there
    truth = step(build_one_layer(family).double())
    with torch.autocast("cpu", torch.bfloat16):
        native = step(build_one_layer(family))
        model = build_one_layer(family)
        report = gpukit.patch(model)
        ours = step(model)
        written = model.eval().generate(tokens(1, 4), max_new_tokens=2, do_sample=False)
    assert written.shape == (1, 6) and not report.fallbacks
    for name, gradient in ours[1].items():
        assert_close(gradient, truth[1][name], native[1][name], gradient=True, what=name)


@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"
)  # what older ones have
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    expected = step(build_one_layer("llama"), attention_mask=mask)
    model = build_one_layer("llama")
    report = gpukit.patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    same(step(model, attention_mask=mask, use_cache=False), expected)
    assert not report.fallbacks


def test_frozen_weights():
    def frozen():
        model = build_one_layer("llama").requires_grad_(False)
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
        return model

    model = frozen()
    gpukit.patch(model)
    ours = step(model)
    same(ours, step(frozen()))
    assert list(ours[1]) == ["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(("family", "patch_first"), [("llama", True), ("gpt2", False)])
def test_lora(family, patch_first):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    targets = ["q_proj", "gate_proj", "down_proj"] if family == "llama" else ["c_attn", "c_fc"]

    def adapted(model):
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out=family == "gpt2", task_type="CAUSAL_LM"
        )
        return peft.get_peft_model(model, config)

    expected = step(adapted(build_one_layer(family)))
    model = build_one_layer(family)
    report = gpukit.patch(model) if patch_first else None
    model = adapted(model)
    report = report or gpukit.patch(model)
    same(step(model), expected)
    assert report.count("mlp") == 1 and report.count("loss") == 1 and not report.fallbacks
    assert all("lora" in name for name in expected[1])
    gpukit.unpatch(model)
    after = step(model)
    assert torch.equal(after[0].loss, expected[0].loss)
    assert all(torch.equal(after[1][name], gradient) for name, gradient in expected[1].items())


def test_torch_compile_without_a_graph_break():
    expected = step(build_one_layer("qwen3"))
    model = build_one_layer("qwen3")
    gpukit.patch(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ours = step(compiled)
    same((ours[0], {name.removeprefix("_orig_mod."): x for name, x in ours[1].items()}), expected)
    assert ours[0].logits is None


def test_torch_compile_with_padding():
    """The compiler cannot know which tokens are real: the attention is the original's, and there is no graph break either."""
    model, ids = build_one_layer("gpt2").eval(), tokens(2, 7)
    gpukit.patch(model)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[mask.bool()]
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        logits = compiled(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
def test_two_processes_with_ddp_and_fsdp2():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.huggingface.ranks"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_a_few_steps_reach_the_same_loss():
    losses = []
    for patched in (False, True):
        model, ids = build_one_layer("gemma"), tokens(1, 8)
        if patched:
            gpukit.patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(model(ids, labels=ids).loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
