"""A frozen base that grows: the new dims train alone, and what was frozen stays to the bit, whatever the optimizer."""

import pytest
import torch
from families import build, lm_batches
from test_optimizer import OPTIMIZERS
from transformers import AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, export_model, load_growth, patch_model, save_growth
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import extra_parameters

CONFIG = GrowthConfig(qk_dims=2, v_dims=1)


def frozen(variant="llama-5-bias"):
    """A frozen model whose head and norms train, and copies of what is frozen."""
    model = patch_model(build(variant)).train().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "ln_" in name or "lm_head" in name)
    return model, {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def assert_frozen(model, before):
    assert all(torch.equal(model.get_parameter(name), values) for name, values in before.items())
    assert not any(model.get_parameter(name).requires_grad for name in before)


def train(model, optimizers, batches):
    for batch in batches:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name, held", [("adamw", True), ("adamw", False), ("adafactor-transformers", True)])
def test_new_dims_train_and_the_rest_stays(name, held):
    """Whether the optimizer holds the frozen weights, too, or only those that train."""
    model, before = frozen()
    optimizers = OPTIMIZERS[name]([p for p in model.parameters() if held or p.requires_grad])
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["weight_decay"] = 0.1
    train(model, optimizers, lm_batches(1))
    for config in (CONFIG, GrowthConfig(budget=0.05)):
        assert Grower(model, config, optimizers).find(lm_batches()).keep().kept
        grown = [parameter.detach().clone() for parameter in extra_parameters(model)]
        train(model, optimizers, lm_batches(3, seed=5))
        assert all(not torch.equal(p, former) for p, former in zip(extra_parameters(model), grown))
        assert_frozen(model, before)


@pytest.mark.parametrize(
    "variant, trains, moved", [("opt", "q_proj", [(1, "qk")]), ("llama-2", "v_proj", [(0, "qk"), (1, "qk"), (1, "v")])]
)
def test_frozen_old_dims_can_follow_nothing(variant, trains, moved):
    """What growth finds beside them is what `old_dims_train=False` finds; True overrides.

    Where they rotate, queries and keys are found as if nothing could be followed, whatever trains.
    """
    found = {}
    for said in (None, False, True):
        model, _ = frozen(variant)
        config = GrowthConfig(qk_dims=2, v_dims=1, old_dims_train=said)
        found[said] = [layer.gain for layer in Grower(model, config).measure(lm_batches(16)).layers]
    assert found[None] == found[False] != found[True]
    config = GrowthConfig(qk_dims=2, v_dims=1, old_dims_train=False)  # of weights that do train, too
    layers = Grower(patch_model(build(variant)), config).measure(lm_batches(16)).layers
    assert [layer.gain for layer in layers] == found[False]
    attentions(model)[1].module.get_submodule(trains).requires_grad_(True)
    layers = Grower(model, CONFIG).measure(lm_batches(16)).layers
    assert [(each.layer, each.kind) for each, gain in zip(layers, found[True]) if each.gain == gain] == moved


def test_of_an_unusual_layer_any_weight_that_trains_counts():
    model, _ = frozen()
    attention = attentions(model)[0].module
    attention.wq = attention._modules.pop("q_proj")
    assert attentions(model)[0].projection_of("query") is None and not attentions(model)[0].trains("query")
    attention.wq.requires_grad_(True)
    assert attentions(model)[0].trains("query") and not attentions(model)[0].trains("key")


def test_weights_that_accelerate_keeps_elsewhere(tmp_path):
    """Old weights that come from disk for each call are read likewise; new dims stay where the layer computes."""
    build("llama-2").save_pretrained(tmp_path / "base")
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"], "cpu")
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    options = {"device_map": places, "offload_folder": tmp_path / "offloaded"}
    model = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base", **options)).requires_grad_(False)
    report = Grower(model, CONFIG).find(lm_batches(4)).keep()
    expected = Grower(patch_model(build("llama-2")).requires_grad_(False), CONFIG).find(lm_batches(4)).keep()
    assert report.fall == expected.fall and report.kept
    model.save_pretrained(tmp_path / "grown")
    batch = lm_batches(1)[0]
    with torch.no_grad():
        logits = model(**batch).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "grown")(**batch).logits, logits)
        offloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "grown", **options)
        assert torch.equal(offloaded(**batch).logits, logits)
    with pytest.raises(
        ValueError, match=r"extra.growths.growth_1.in_projection.weight of layer 1 is on the meta device"
    ):
        Grower(offloaded, CONFIG).find(lm_batches(4)).keep()
    save_growth(offloaded, tmp_path / "growth")
    base = patch_model(build("llama-2"))
    load_growth(base, tmp_path / "growth")
    assert torch.equal(base(**batch).logits, logits)
    for action in (
        lambda: export_model(offloaded, tmp_path / "stock"),
        lambda: load_growth(offloaded, tmp_path / "growth"),
    ):
        with pytest.raises(
            ValueError, match=r"on the meta device, where offloading leaves it: load the model into memory"
        ):
            action()
