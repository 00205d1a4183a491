"""Widths travel with the weights: states from before and after a growth load into living models, either way."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, load_checkpoint_in_model
from families import FAMILIES, build, lm_batches, tokens, train, wide
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict, set_state_dict
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import load_sharded_checkpoint

from hf_growattn import Grower, GrowthConfig, load_growth, patch_model, save_growth
from hf_growattn.growable.attention import attentions

CONFIG = GrowthConfig(qk_dims=3, v_dims=2, layers=[1])


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
    train(model, optimizer, lm_batches(2))
    before = snapshot(model, optimizer)
    assert grower.find(lm_batches()).keep().kept
    train(model, optimizer, lm_batches(2))
    after = snapshot(model, optimizer)

    other, its_optimizer, _ = fresh(variant)
    for weights, state, logits in (after, before, after):  # wider, narrower, wider again
        other.load_state_dict(weights)
        with pytest.raises(ValueError, match="doesn't match the size"):  # it was made for the dims of before
            its_optimizer.load_state_dict(state)
        its_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
        its_optimizer.load_state_dict(state)
        assert_is(other, its_optimizer, (weights, state, logits))
    train(model, optimizer, lm_batches(2))
    train(other, its_optimizer, lm_batches(2))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters()))
    assert Grower(other, CONFIG, its_optimizer).find(lm_batches()).keep().kept


def test_accelerate_resumes_after_a_growth(tmp_path):
    model, optimizer, _ = fresh("llama-2")
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(model, optimizer, lm_batches(2))
    assert Grower(model, CONFIG, optimizer).find(lm_batches()).keep().kept
    train(model, optimizer, lm_batches(2))
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


def test_new_dims_of_other_sizes_take_the_place_of_those_of_the_same_name():
    model, other = wide("llama-2", 2, 1), wide("llama-2", 2, 3)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(tokens()).logits, other(tokens()).logits)


def test_other_models_may_lend_their_state():
    """Weights without an optimizer: the values are those of the state, and a stock state has no new dims."""
    grown, _, grower = fresh("gpt2-2")
    assert grower.find(lm_batches()).keep().kept
    with pytest.warns(UserWarning, match="no new dims, so those of this model were taken off"):
        grown.load_state_dict(build("gpt2-2").state_dict())
    assert torch.equal(grown(tokens(), use_cache=False).logits, build("gpt2-2")(tokens()).logits)
    assert attentions(grown)[1].width_of("query") == 16 and not grown.config.extra_dims


@pytest.mark.parametrize("size", ["3KB", "12KB"])
def test_other_loaders_bring_new_dims_or_say_that_they_do_not(size, tmp_path):
    """Those that read file by file, and torch's distributed checkpoints, which read what they are asked for."""
    model, _, grower = fresh("llama-2")
    assert grower.find(lm_batches()).keep().kept
    model.save_pretrained(tmp_path / "files", max_shard_size=size)
    wanted = model(tokens(), use_cache=False).logits
    other = patch_model(build("llama-2"))
    if size == "3KB":  # the two tensors of a growth are in two files
        with pytest.warns(UserWarning, match=r"tensors of new dims, such as .*, were left out.*all of it at once"):
            load_sharded_checkpoint(other, tmp_path / "files", strict=False)
        assert not other.config.extra_dims
    else:
        load_sharded_checkpoint(other, tmp_path / "files", strict=False)
        assert torch.equal(other(tokens(), use_cache=False).logits, wanted)
        other = patch_model(build("llama-2"))
        load_checkpoint_in_model(other, tmp_path / "files")
        assert torch.equal(other(tokens(), use_cache=False).logits, wanted)
    part = {name: tensor for name, tensor in build("llama-2").state_dict().items() if "layers.1" in name}
    dims = model.config.extra_dims
    assert not model.load_state_dict(part, strict=False).unexpected_keys and model.config.extra_dims == dims

    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    for config, refused in ((build("llama-2").config, True), (model.config, False)):
        other = patch_model(AutoModelForCausalLM.from_config(config))
        state = {"model": other.state_dict()}
        if refused:
            with pytest.raises(dcp.api.CheckpointException, match=r"lacks these new dims\. Build it by from_config"):
                dcp.load(state, checkpoint_id=tmp_path / "dcp")
        else:
            dcp.load(state, checkpoint_id=tmp_path / "dcp")
            assert other.load_state_dict(state["model"]) and other.config.extra_dims == dims


def test_set_state_dict_says_that_an_optimizer_came_too_early():
    model, optimizer, grower = fresh("llama-2")
    train(model, optimizer, lm_batches(2))
    assert grower.find(lm_batches()).keep().kept
    train(model, optimizer, lm_batches(2))
    saved, after = copy.deepcopy(get_state_dict(model, optimizer)), snapshot(model, optimizer)
    other, its_optimizer, _ = fresh("llama-2")
    states = copy.deepcopy({"model_state_dict": saved[0], "optim_state_dict": saved[1]})
    with pytest.warns(UserWarning, match=r"make it after the model is loaded, and load its own state last"):
        set_state_dict(other, its_optimizer, **states)
    other.load_state_dict(saved[0])
    its_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    set_optimizer_state_dict(other, its_optimizer, saved[1])
    assert_is(other, its_optimizer, after)
