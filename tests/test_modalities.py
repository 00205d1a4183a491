"""Encoder-decoders, image and speech models grow, are reloaded exactly, and generate with a cache as without."""

import logging

import pytest
import torch
from modalities import MODELS, batches, build

from hf_growattn import Grower, GrowthConfig, attention_views, export_model, patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.measure.bottlenecks import KINDS, compute_moments
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
    report = Grower(model, GrowthConfig(qk_dims=2, v_dims=2)).find(given).keep()
    assert report.kept
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


STOCK = {
    **dict.fromkeys(("bart", "swin"), "takes no other width of heads"),
    **dict.fromkeys(("t5", "umt5", "vit", "vit_mae"), ""),  # which drops patches at random
    "moonshine": "rotates neighbouring dims in pairs",
}


@pytest.mark.parametrize("name", STOCK)
def test_its_stock_checkpoint_computes_the_same_or_is_refused(name, tmp_path):
    model, given = patch_model(build(name)), batches(name)
    Grower(model, GrowthConfig(qk_dims=2, v_dims=2)).find(given).keep()
    if STOCK[name]:
        with pytest.raises(ValueError, match=STOCK[name]):
            export_model(model, tmp_path / "stock")
        return
    report = export_model(model, tmp_path / "stock")
    assert report.difference < 1e-4  # of the largest output, in fp32
    stock = type(model).__bases__[1].from_pretrained(tmp_path / "stock").eval()
    found = []
    for each in (stock, model.eval()):
        torch.manual_seed(0)
        found.append(outputs(each, given[0]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["whisper", "wav2vec2", "clip", "blip-2"])
def test_what_tokens_or_an_image_do_not_run_is_not_exported(name, tmp_path):
    with pytest.raises(ValueError, match=r"random tokens or an image.*Save the model as it is"):
        export_model(patch_model(build(name)), tmp_path / "stock")
    assert not (tmp_path / "stock").exists()


@torch.no_grad()
def test_old_logits_of_t5_are_not_scaled_and_new_ones_are():
    model = patch_model(build("t5").double()).eval()
    for attention in attentions(model):
        part = attention.add_new_dims("growth_1", 2, 1)
        torch.nn.init.normal_(part.in_proj.weight, std=0.1)
    view = attention_views(model)[0]
    model.set_attn_implementation("eager")
    hidden_states = torch.randn(1, 5, 64, dtype=torch.float64)
    (weights,) = (
        o for o in view.module(hidden_states)[1:] if (o is not None) and o[0, 0].sum(-1).allclose(o.new_ones(5))
    )
    logits = view.scaling * (hidden_states[0] @ view.pattern(0).dense() @ hidden_states[0].T)
    found = torch.softmax(logits + view.module.compute_bias(5, 5)[0, 0], -1)
    torch.testing.assert_close(found, weights[0, 0], rtol=1e-6, atol=1e-8)


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
        bottlenecks, _ = compute_moments(Objective(model), attentions(model), [KINDS["qk"]], given[:1], 1e-9)
    (bottleneck,) = (bottleneck for bottleneck in bottlenecks if bottleneck.attention.module is crossing)
    kept = given[0]["attention_mask"].bool()
    sides = {
        bottleneck.roots.shared_root: inputs["key_value_states"][kept],
        bottleneck.roots.stacked_root: inputs["queries"].flatten(0, 1),
    }
    for root, states in sides.items():
        states = torch.cat((states, torch.ones(len(states), 1)), -1)
        torch.testing.assert_close(root.mT @ root, states.T @ states / len(states), rtol=1e-3, atol=1e-3)
