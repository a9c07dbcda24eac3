"""gpukit.patch on transformers' families: values and gradients by the project's rule, and everything else as it was."""

import copy
import pickle

import pytest
import torch
from torch import nn

import gpukit
from gpukit.huggingface import mlp, norms, rope
from gpukit.testing import assert_close
from tests.huggingface.models import FAMILIES, build, build_one_layer, tokens, transformers

PADDING = {
    "none": None,
    "left": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9]),
    "right": torch.tensor([[1] * 9, [1, 1, 1, 1, 1, 0, 0, 0, 0]]),
    "holes": torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1, 0], [1] * 9]),
}


def run(model, padding: str = "none", **named):
    """Loss, logits of the real tokens and gradients of a model in training mode."""
    ids, mask = tokens(2, 9), PADDING[padding]
    real = torch.ones_like(ids) if mask is None else mask
    # A real token behind padding would be predicted from the padding.
    before = torch.cat((torch.ones_like(real[:, :1]), real[:, :-1]), dim=1)
    labels = ids.masked_fill((real & before) == 0, -100)
    outputs = model(ids, attention_mask=mask, labels=labels, **named)
    outputs.loss.backward()
    logits = model.eval()(ids, attention_mask=mask).logits.detach()[real.bool()]
    return outputs.loss.detach(), logits, {name: p.grad for name, p in model.named_parameters()}


def held_to_the_rule(family: str, dtype: torch.dtype, padding: str = "none", build=build_one_layer):
    """The patched model's report, after it was compared with the original in float64 and in dtype."""
    model = build(family, dtype=dtype)
    report = gpukit.patch(model)
    loss, logits, gradients = run(model, padding)
    true_loss, true_logits, true_gradients = run(build(family, dtype=dtype).double(), padding)
    native_loss, native_logits, native_gradients = run(build(family, dtype=dtype), padding)
    assert_close(logits, true_logits, native_logits, what="logits")
    for name in gradients:
        assert_close(gradients[name], true_gradients[name], native_gradients[name], gradient=True, what=name)
    # One number says nothing of bfloat16: PyTorch's own error in it may happen to be 0.
    if dtype == torch.float32:
        assert_close(loss, true_loss, native_loss, what="loss")
    return report


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients(family):
    layers = 2 if family == "llama" else 1  # one family shows that layers do not get into each other's way
    report = held_to_the_rule(family, torch.float32, build=build if layers == 2 else build_one_layer)
    softcapped = family == "gemma2"
    assert report.count("attention") == (0 if softcapped else layers) and report.count("mlp") == layers
    assert report.count("rope") == (0 if family == "gpt2" else layers) and report.count("loss") == (not softcapped)
    assert report.count("norms") == {"qwen3": 5, "gemma2": 5}.get(family, 2 * layers + 1)
    assert [row[0] for row in report.kept] == (["attention", "loss"] if softcapped else []) and not report.fallbacks


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_bfloat16(family):
    assert not held_to_the_rule(family, torch.bfloat16).fallbacks


@pytest.mark.parametrize(
    ("family", "padding"), [("gpt2", "right"), ("llama", "left"), ("mistral", "left"), ("mistral", "right")]
)
def test_padding(family, padding):
    assert not held_to_the_rule(family, torch.float32, padding).fallbacks


def test_padding_between_tokens_goes_to_the_original():
    report = held_to_the_rule("mistral", torch.float32, "holes")
    assert report.fallbacks == {("attention", "a mask that is neither causal nor padding"): 2}


def test_position_ids():
    model, ids = build("llama").eval(), tokens(2, 6)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [3, 4, 7, 9, 10, 20]])
    mask = torch.ones_like(ids)
    before = model(ids, position_ids=positions, attention_mask=mask).logits
    gpukit.patch(model)
    torch.testing.assert_close(
        model(ids, position_ids=positions, attention_mask=mask).logits, before, atol=1e-5, rtol=1e-4
    )
    # Positions that begin anew are transformers' sign of packed sequences, which must not see each other.
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    alone = model(ids[:1, 3:]).logits
    torch.testing.assert_close(
        model(ids[:1], position_ids=packed, use_cache=False).logits[:, 3:], alone, atol=1e-5, rtol=1e-4
    )


# ------------------------------------------------------------------------------------------------------- as it was
@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_unpatch_restores_every_bit(family, tmp_path):
    model, ids = build(family), tokens()
    before, attributes = model(ids, labels=ids), {name: set(module.__dict__) for name, module in model.named_modules()}
    state, implementation = {k: v.clone() for k, v in model.state_dict().items()}, model.config._attn_implementation
    model.save_pretrained(tmp_path / "before")

    gpukit.patch(model)
    assert list(model.state_dict()) == list(state) and type(model) is type(build(family))
    model.save_pretrained(tmp_path / "patched")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "patched" / name).read_text() == (tmp_path / "before" / name).read_text()

    gpukit.unpatch(model)
    after = model(ids, labels=ids)
    assert torch.equal(after.logits, before.logits) and torch.equal(after.loss, before.loss)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())
    gpukit.unpatch(model)  # once more does nothing


def test_patching_twice_is_patching_once():
    model, ids = build("llama"), tokens()
    first = gpukit.patch(model)
    forwards = [module.forward for module in model.modules()]
    again = gpukit.patch(model)
    assert again.replaced == first.replaced and again.kept == first.kept
    assert [module.forward.__func__.__name__ for module in model.modules()] == [f.__func__.__name__ for f in forwards]
    gpukit.patch(model, norms=False, loss=False)
    assert "forward" not in model.model.norm.__dict__ and model(ids, labels=ids).logits is not None
    gpukit.unpatch(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_the_tables_of_rope_are_cut_once_per_pass(monkeypatch):
    """All layers of a pass get the same views; those of another pass, of the same shapes, are their own."""
    seen = []
    kernel = rope.rope
    monkeypatch.setattr(rope, "rope", lambda q, k, cos, sin: seen.append(cos) or kernel(q, k, cos, sin))
    model, original = build("llama").eval(), build("llama").eval()
    gpukit.patch(model, norms=False, mlp=False, attention=False, loss=False)
    ids, steps = tokens(2, 5), torch.arange(5)[None]
    with torch.no_grad():
        for places in (steps, 3 * steps, steps):  # the distances differ, else the outputs would be the same
            logits = model(ids, position_ids=places).logits
            torch.testing.assert_close(logits, original(ids, position_ids=places).logits, rtol=1e-4, atol=1e-5)
    assert len(seen) == 3 * model.config.num_hidden_layers and len({id(cos) for cos in seen}) == 3


@pytest.mark.parametrize("part", ["norms", "rope", "mlp", "attention", "loss"])
def test_each_part_alone(part):
    model = build("llama")
    options = dict.fromkeys(("norms", "rope", "mlp", "attention", "loss"), False) | {part: True}
    report = gpukit.patch(model, **options)
    assert {row[0] for row in report.replaced} == {part}
    assert (model.config._attn_implementation == "gpukit") == (part == "attention")


def test_other_models_of_the_class_are_not_patched():
    """Not even one that shares the config."""
    model = build("llama").eval()
    twin, ids = type(model)(model.config).eval(), tokens()
    twin.load_state_dict(model.state_dict())
    before = twin(ids).logits
    report = gpukit.patch(model)
    assert torch.equal(twin(ids).logits, before) and not report.fallbacks


def test_a_copy_is_patched_on_its_own():
    model, ids = build_one_layer("llama").eval(), tokens()
    before = model(ids).logits
    gpukit.patch(model)
    patched = model(ids).logits
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(ids).logits, patched)
    gpukit.unpatch(copied)
    assert torch.equal(copied(ids).logits, before) and torch.equal(model(ids).logits, patched)
    # What was pickled has its own forwards back, and can be patched or unpatched as ever.
    torch.testing.assert_close(loaded(ids).logits, before, atol=1e-5, rtol=1e-4)
    gpukit.patch(loaded)
    assert torch.equal(loaded(ids).logits, patched)
    gpukit.unpatch(loaded)
    assert torch.equal(loaded(ids).logits, before)


def test_hooks_run_and_weights_may_be_exchanged():
    model, ids, seen = build("llama").eval(), tokens(), []
    model.model.norm.register_forward_hook(lambda *_: seen.append("norm"))
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append("mlp"))
    gpukit.patch(model)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.model.layers[0].mlp.down_proj = nn.Linear(40, 32, bias=False)
    patched = model(ids).logits
    assert seen == ["mlp", "norm"]
    gpukit.unpatch(model)
    torch.testing.assert_close(model(ids).logits, patched, atol=1e-5, rtol=1e-4)


def test_another_librarys_forward_is_left_alone():
    model = build("llama")
    theirs = model.model.norm.forward
    model.model.norm.forward = lambda x: theirs(x)
    report = gpukit.patch(model)
    assert report.kept == {("norms", "LlamaRMSNorm", "another library has replaced its forward"): 1}
    layer = model.model.layers[0].input_layernorm
    ours = layer.forward
    layer.forward = lambda x: ours(x)
    with pytest.raises(
        RuntimeError, match=r"unpatch: the forward of a LlamaRMSNorm was replaced once more after gpukit.patch"
    ):
        gpukit.unpatch(model)
    assert model.config._attn_implementation == "gpukit", "nothing was changed"
    layer.forward = ours
    gpukit.unpatch(model)


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"^patch: model must be a torch.nn.Module, got str$"):
        gpukit.patch("gpt2")
    with pytest.raises(TypeError, match=r"^unpatch: model must be a torch.nn.Module, got NoneType$"):
        gpukit.unpatch(None)
    with pytest.raises(TypeError, match=r"^patch: rope must be True or False, got 1$"):
        gpukit.patch(build("llama"), rope=1)
    model = build("llama")
    gpukit.patch(model)
    with pytest.raises(
        ValueError, match=r"^unpatch: this LlamaModel was patched as a part of a model; pass that model$"
    ):
        gpukit.unpatch(model.model)


def test_the_report_as_text():
    model = build("gemma2")
    report = gpukit.patch(model)
    assert str(report) == repr(report) and str(report).splitlines() == [
        "gpukit.patch: Gemma2ForCausalLM",
        "",
        "replaced  module           kernel    modules",
        "norms     Gemma2RMSNorm    rms_norm        9",
        "rope      Gemma2Attention  rope            2",
        "mlp       Gemma2MLP        geglu           2",
        "",
        "not replaced  module             reason              modules",
        "attention     Gemma2Attention    soft-capped scores        2",
        "loss          Gemma2ForCausalLM  soft-capped logits        1",
    ]


# --------------------------------------------------------------------------------------------------- unknown models
class HalfRMSNorm(nn.Module):
    """By its name and its parts an RMSNorm, but not by its formula."""

    def __init__(self, N):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(N)), 1e-6

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + self.eps)


class LateEpsRMSNorm(HalfRMSNorm):
    """eps is added to the root, not under it: a difference that only tiny rows show."""

    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class PlainLayerNorm(HalfRMSNorm):
    """By its formula an RMSNorm, as T5's is."""

    def forward(self, x):
        return (x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Gated(nn.Module):
    def __init__(self, act_fn, order=1):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.act_fn, self.order = act_fn, order

    def forward(self, x):
        gate, up = (self.gate_proj(x), self.up_proj(x))[:: self.order]
        return self.down_proj(self.act_fn(gate) * up)


def test_an_unknown_model_is_replaced_by_structure():
    model = nn.Sequential(
        HalfRMSNorm(6), LateEpsRMSNorm(6), PlainLayerNorm(6), nn.RMSNorm(6), nn.LayerNorm(6, bias=False),
        nn.LayerNorm((2, 6)), nn.GELU(), nn.GELU("tanh"), QuickGELU(), Gated(nn.SiLU()), Gated(nn.GELU("tanh")),
        Gated(nn.SiLU(), -1), Gated(nn.ReLU()),
    )  # fmt: skip
    x = torch.randn(3, 2, 6)
    before = [module(x) for module in model]
    report = gpukit.patch(model)
    assert report.replaced == {
        ("norms", "PlainLayerNorm", "rms_norm"): 1, ("norms", "RMSNorm", "rms_norm"): 1,
        ("norms", "LayerNorm", "layer_norm"): 1, ("mlp", "GELU", "gelu"): 2, ("mlp", "Gated", "swiglu"): 1,
        ("mlp", "Gated", "geglu"): 1,
    }  # fmt: skip
    other = "computes something other than RMSNorm"
    product = "computes something other than down_proj(act_fn(gate_proj(x)) * up_proj(x))"
    assert report.kept == {
        ("norms", "HalfRMSNorm", other): 1, ("norms", "LateEpsRMSNorm", other): 1,
        ("norms", "LayerNorm", "normalizes over 2 dimensions, the kernel over the last one"): 1,
        ("mlp", "QuickGELU", "computes another form of GELU"): 1, ("mlp", "Gated", product): 1,
        ("mlp", "Gated", "its activation is ReLU, and the kernels have SiLU and GELU"): 1,
    }  # fmt: skip
    for module, expected in zip(model, before, strict=True):
        torch.testing.assert_close(module(x), expected)
    gpukit.unpatch(model)
    assert all(torch.equal(module(x), expected) for module, expected in zip(model, before, strict=True))


def test_calls_that_no_kernel_takes_go_to_the_original():
    model = nn.Sequential(nn.LayerNorm(6, device="meta"), nn.GELU(), nn.RMSNorm(6, eps=1e-5))
    report = gpukit.patch(model)
    assert model[0](torch.empty(2, 6, device="meta")).shape == (2, 6)
    assert model[1](torch.tensor(2.0)) == nn.GELU()(torch.tensor(2.0))
    assert model[1](input=torch.ones(2)).shape == (2,)
    assert model[2](torch.ones(2, 6).double()).dtype == torch.float64  # which the kernels do take
    assert report.fallbacks == {
        ("norms", "tensors on device meta"): 1, ("mlp", "arguments other than one tensor"): 2,
    }  # fmt: skip
    assert "fell back  reason                           calls" in str(report)


def test_the_dtypes_of_norms_stay():
    """Llama's returns the wider dtype of input and weight, Gemma's that of the input."""
    for family, expected in (("llama", torch.float32), ("gemma", torch.bfloat16)):
        norm = build(family).model.norm
        x = torch.randn(2, 32, dtype=torch.bfloat16)
        before = norm(x)
        gpukit.patch(norm)
        assert norm(x).dtype == before.dtype == expected
        torch.testing.assert_close(norm(x), before, atol=2e-2, rtol=2e-2)


def test_probing_touches_neither_weights_nor_hooks():
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(8)
    norm.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    before, random = norm.weight.clone(), torch.get_rng_state()
    report = gpukit.patch(nn.Sequential(norm, nn.GELU()))
    assert report.count("norms") == report.count("mlp") == 1 and torch.equal(norm.weight, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert norms.kind_of(norm) == "rms_norm" and mlp.name_of(torch.relu) == ""
