"""Encoder-decoders, image and speech models grow, are reloaded exactly, and generate with a cache as without."""

import logging

import pytest
import torch
from modalities import MODELS, batches, build

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.growable.growths import attentions
from hf_growattn.measure.blocks import KINDS, measure_moments
from hf_growattn.measure.passes import Objective, preserved_state


@torch.no_grad()
def outputs(model, batch) -> torch.Tensor:
    found = model(**batch)
    return found["logits"] if "logits" in found else found[1]


@pytest.mark.parametrize("name", MODELS)
def test_it_grows_and_is_reloaded(name, tmp_path, caplog):
    model, given = build(name), batches(name)
    before = outputs(model, given[0])
    assert torch.equal(outputs(patch_model(model), given[0]), before)
    report = Grower(model, GrowthConfig(qk_dims=2, v_dims=2)).grow(given)
    assert report.applied and report.loss_after < report.loss_before
    grown = outputs(model.eval(), given[0])
    assert not torch.equal(grown, before)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(type(model).from_pretrained(tmp_path).eval(), given[0]), grown)
    if model.can_generate():
        prompt = {key: value for key, value in given[0].items() if key != "labels"}
        with caplog.at_level(logging.ERROR, logger="transformers"):  # Whisper's generate gives deprecated arguments
            cached, full = (
                model.generate(**prompt, max_new_tokens=6, do_sample=False, use_cache=use_cache)
                for use_cache in (True, False)
            )
        assert torch.equal(cached, full)


def test_cross_attention_is_measured_by_both_of_its_inputs():
    """New queries read the decoder's states, new keys the encoder's without padding: each is whitened by its own."""
    model, given = patch_model(build("bart")), batches("bart")
    inputs = {}
    crossing = model.model.decoder.layers[0].encoder_attn
    hook = crossing.register_forward_pre_hook(
        lambda *call: inputs.update(call[2], queries=call[1][0]), with_kwargs=True
    )
    model(**given[0])
    hook.remove()
    with preserved_state(model, []):
        blocks, _ = measure_moments(Objective(model), attentions(model), [KINDS["patterns"]], given[:1], 1e-9)
    (block,) = (block for block in blocks if block.attention is crossing)
    kept = given[0]["attention_mask"].bool()
    sides = {
        block.roots.shared_root: inputs["key_value_states"][kept],
        block.roots.stacked_root: inputs["queries"].flatten(0, 1),
    }
    for root, states in sides.items():
        states = torch.cat((states, torch.ones(len(states), 1)), -1)
        torch.testing.assert_close(root @ root, states.T @ states / len(states), rtol=1e-3, atol=1e-3)
