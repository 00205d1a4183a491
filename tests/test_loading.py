"""Widths travel with the weights: states from before and after a growth load into living models, either way."""

import copy

import pytest
import torch
from accelerate import Accelerator
from families import FAMILIES, build, lm_batches, tokens

from hf_growattn import Grower, GrowthConfig, load_growth, patch_model, save_growth
from hf_growattn.growable.attention import attentions

CONFIG = GrowthConfig(qk_dims=3, v_dims=2, layers=[1], oversampling=4)


def trained(model, optimizer, steps=2):
    for batch in lm_batches(steps):
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fresh(variant):
    model = patch_model(build(variant))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, Grower(model, CONFIG, optimizer)


def snapshot(model, optimizer):
    logits = model(tokens(), use_cache=False).logits.detach()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return weights, copy.deepcopy(optimizer.state_dict()), logits


def assert_is(model, optimizer, state):
    """The model computes what it did at the snapshot, and the optimizer steps its live parameters from that state."""
    _, kept, logits = state
    assert torch.equal(model(tokens(), use_cache=False).logits, logits)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], kept["state"][index]["exp_avg"])
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    names = {f"{layer.layer}": {*layer.extra.growths} for layer in attentions(model) if layer.extra is not None}
    assert {layer: {*parts} for layer, parts in model.config.extra_dims.items()} == names


@pytest.mark.parametrize("variant", FAMILIES)
def test_state_dicts(variant):
    model, optimizer, grower = fresh(variant)
    trained(model, optimizer)
    before = snapshot(model, optimizer)
    assert grower.find(lm_batches()).keep().kept
    trained(model, optimizer)
    after = snapshot(model, optimizer)

    other, its_optimizer, _ = fresh(variant)
    for weights, state, logits in (after, before, after):  # wider, narrower, wider again
        other.load_state_dict(weights)
        with pytest.raises(ValueError, match="doesn't match the size"):  # it was made for the dims of before
            its_optimizer.load_state_dict(state)
        its_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
        its_optimizer.load_state_dict(state)
        assert_is(other, its_optimizer, (weights, state, logits))
    trained(model, optimizer)
    trained(other, its_optimizer)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters()))
    assert Grower(other, CONFIG, its_optimizer).find(lm_batches()).keep().kept


def test_accelerate_resumes_after_a_growth(tmp_path):
    model, optimizer, _ = fresh("llama-2")
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    trained(model, optimizer)
    assert Grower(model, CONFIG, optimizer).find(lm_batches()).keep().kept
    trained(model, optimizer)
    accelerator.save_state(tmp_path / "state")
    save_growth(model, tmp_path / "growth")
    after = snapshot(model, optimizer.optimizer)

    again = Accelerator(cpu=True)
    model, optimizer, _ = fresh("llama-2")
    model, optimizer = again.prepare(model, optimizer)
    with pytest.raises(ValueError, match="doesn't match the size"):
        again.load_state(tmp_path / "state")

    again = Accelerator(cpu=True)
    model, optimizer, _ = fresh("llama-2")
    model, optimizer = again.prepare(model, optimizer)
    load_growth(model, tmp_path / "growth", optimizer, strict=False)  # the trained weights follow
    again.load_state(tmp_path / "state")
    assert_is(model, optimizer.optimizer, after)


def test_an_optimizer_is_told_of_that_was_there_before_a_wider_state():
    model, _, grower = fresh("gpt2-2")
    other, its_optimizer, _ = fresh("gpt2-2")
    assert grower.find(lm_batches()).keep().kept
    other.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="AdamW steps without the new dims"):
        trained(other, its_optimizer, steps=1)


def test_a_state_of_another_model_is_refused_as_by_torch():
    model, _, _ = fresh("llama-2")
    shapes = [parameter.shape for parameter in model.parameters()]
    wrong = model.state_dict()
    wrong["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(4 * 16 + 1, 48)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(wrong)
    assert [parameter.shape for parameter in model.parameters()] == shapes


def test_other_models_may_lend_their_state():
    """Weights without an optimizer: the values are those of the state, and a stock state has no new dims."""
    grown, _, grower = fresh("gpt2-2")
    assert grower.find(lm_batches()).keep().kept
    grown.load_state_dict(build("gpt2-2").state_dict())
    assert torch.equal(grown(tokens(), use_cache=False).logits, build("gpt2-2")(tokens()).logits)
    assert attentions(grown)[1].width_of("query") == 16 and not grown.config.extra_dims
