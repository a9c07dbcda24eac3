"""The loss without logits: what it equals, when it is used, and which models it is not for."""

import pytest
import torch
from torch import nn

import gpukit
from gpukit.testing import assert_close
from tests.huggingface.models import build, tokens, transformers


def step(model, **named):
    ids = tokens(2, 6)
    model.zero_grad()
    outputs = model(ids, **{"labels": ids, **named})
    outputs.loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters()}


def only_loss(model):
    return gpukit.patch(model, norms=False, rope=False, mlp=False, attention=False)


IGNORED = torch.tensor([[7, -100, 8, 9, 7, 7], [-100, -100, -100, 7, 7, 7]])


@pytest.mark.parametrize(
    "named",
    [
        {"labels": IGNORED},
        {"num_items_in_batch": 5},
        {"num_items_in_batch": torch.tensor(7)},
        {"labels": IGNORED.clamp(min=7), "ignore_index": 7},
        {"shift_labels": IGNORED},
    ],
    ids=lambda named: "-".join(named),
)
def test_equals_the_loss_from_logits(named):
    original, patched = build("llama"), build("llama")
    report = only_loss(patched)
    truth, true_gradients = step(build("llama").double(), **named)
    native, native_gradients = step(original, **named)
    ours, gradients = step(patched, **named)
    assert ours.logits is None and native.logits is not None and ours.past_key_values is not None
    assert_close(ours.loss, truth.loss, native.loss, what="loss")
    for name, gradient in gradients.items():
        assert_close(gradient, true_gradients[name], native_gradients[name], gradient=True, what=name)
    assert not report.fallbacks and report.count("loss") == 1


def test_logits_where_they_are_asked_for():
    model, ids = build("llama"), tokens(2, 6)
    before = model(ids, labels=ids)
    report = only_loss(model)
    assert torch.equal(model(ids).logits, before.logits)
    assert torch.equal(model(ids, labels=ids, skip_logits=False).logits, before.logits)
    model.eval()
    after = model(ids, None, None, None, None, ids)  # labels by their place
    assert torch.equal(after.logits, before.logits) and torch.equal(after.loss, before.loss)
    assert model(ids, labels=ids, skip_logits=True).logits is None
    assert not report.fallbacks
    model.train()
    assert model(ids, labels=ids, return_dict=False)[1].shape == (2, 6, 67)
    assert model(ids, labels=ids[:, -2:], logits_to_keep=2).logits.shape == (2, 2, 67)
    assert report.fallbacks == {("loss", "a tuple is asked for"): 1, ("loss", "logits_to_keep"): 1}


def test_generate_and_trainer_see_the_same_arguments():
    import inspect

    model = build("llama")
    before = inspect.signature(model.forward)
    only_loss(model)
    assert inspect.signature(model.forward) == before


class Scaled(transformers.LlamaForCausalLM):
    """Changes its logits after lm_head, which no attribute of its config tells."""

    def forward(self, input_ids=None, labels=None, **named):
        hidden = self.model(input_ids, **named).last_hidden_state
        logits = self.lm_head(hidden) * 0.5
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class Sliced(Scaled):
    """Leaves out classes that only fill up the vocabulary."""

    def forward(self, input_ids=None, labels=None, **named):
        logits = self.lm_head(self.model(input_ids, **named).last_hidden_state)[..., :66]
        loss = None if labels is None else self.loss_function(logits, labels, 66)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("kind", [Scaled, Sliced])
def test_a_model_that_changes_its_logits_is_noticed(kind):
    model = kind(build("llama").config)
    before, gradients = step(model)
    report = only_loss(model)
    for calls in (1, 2):
        after, again = step(model)
        assert torch.equal(after.loss, before.loss) and torch.equal(after.logits, before.logits)
        assert all(torch.equal(again[name], gradients[name]) for name in gradients)
        assert report.fallbacks == {("loss", "the model changes its logits before its loss"): calls}


def test_models_that_keep_their_loss():
    def reason(model):
        ((_, _, why),) = only_loss(model).kept
        return why

    model = build("llama")
    model.lm_head = nn.Linear(32, 67, bias=True)
    assert reason(model) == "its lm_head has a bias"
    model.lm_head = nn.Sequential(nn.Linear(32, 67))
    assert reason(model) == "its lm_head is Sequential, not a plain torch.nn.Linear"
    model = build("llama")
    model.loss_function = lambda *_, **__: torch.zeros(())
    assert reason(model) == "has a loss function of its own"
    assert reason(build("gemma2")) == "soft-capped logits"
    assert not only_loss(build("llama").model).kept, "a model without a head has no loss to keep"
    sizes = {"vocab_size": 67, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    report = only_loss(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))
    assert not report.replaced and not report.kept, "it computes its loss itself, and shifts no labels"


def test_what_is_exchanged_after_patch():
    model, ids = build("llama"), tokens(2, 6)
    report = only_loss(model)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    assert model(ids, labels=ids).logits is not None
    gpukit.unpatch(model)
    only_loss(model)
    del model._loss_function
    report = only_loss(model)
    model.lm_head = nn.Linear(32, 67, bias=False)
    assert model(ids, labels=ids).logits is not None
    assert report.fallbacks == {("loss", "lm_head was exchanged after patch"): 1}


def test_an_error_leaves_nothing_behind():
    model, ids = build("llama"), tokens(2, 6)
    only_loss(model)
    with pytest.raises(Exception, match=r"shape"):
        model(ids, labels=ids[:, :3])
    assert model(ids).logits.shape == (2, 6, 67)
