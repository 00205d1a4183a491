"""`GrowAttnConfig(budget=...)`: spread evenly at first, spent by the guided start, and saved as dims of each layer."""

import json

import pytest
import torch
from families import build, same
from test_peft_method import BATCHES, LLAMA, VARIANTS, logits, near, peft, pytestmark, stir, train, trainable  # noqa: F401

from hf_growattn import GrowAttnConfig, Grower, GrowthConfig, initialize_growattn_weights, patch_model
from hf_growattn.growable.attention import attentions

BUDGET = 0.08


def adapted(variant, **kwargs):
    return peft.get_peft_model(build(variant), GrowAttnConfig(**{"budget": BUDGET} | kwargs)).eval()


def count(model, name="default"):
    return sum(p.numel() for key, p in model.named_parameters() if "growattn_" in key and f".{name}." in key)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_budget_is_spread_evenly_until_the_guided_start(variant):
    base = build(variant)
    expected, bought = logits(base), int(BUDGET * base.num_parameters())
    model = adapted(variant)
    near(logits(model), expected)
    numbers = [n for both in model.peft_config["default"].dims.values() for n in both]
    assert len(numbers) == 2 * len(attentions(model)) and max(numbers) - min(numbers) <= 1
    grown = patch_model(build(variant))
    attentions(grown)[0].add_new_dims("growth_1", 1, 1)
    dim = grown.num_parameters() - build(variant).num_parameters()  # of either kind, in one layer
    assert bought - dim < count(model) <= bought
    losses = train(model, steps=8)
    assert losses[-2] < losses[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_guided_start_spends_it_as_growth_does(variant, tmp_path):
    grown = patch_model(build(variant))
    growth = Grower(grown, GrowthConfig(budget=BUDGET, old_dims_train=False)).find(BATCHES).keep()
    model = adapted(variant)
    model.add_adapter("other", GrowAttnConfig(v_dims=1))  # has no part in it
    report = initialize_growattn_weights(model, BATCHES)
    assert (report.loss_before, report.fall) == (growth.loss_before, growth.fall)
    assert 0 < count(model) == report.added_parameters == growth.added_parameters
    kinds = ("qk", "v")
    widths = {(g.layer, g.kind): g.width[1] - g.width[0] for g in report.layers}
    every = {layer: [widths.get((layer, kind), 0) for kind in kinds] for layer, _ in widths}
    found = {str(layer): both for layer, both in every.items() if any(both)}
    assert model.peft_config["default"].dims == found and any(qk != v for qk, v in found.values())
    assert trainable(model).keys() == {name for name, _ in model.named_parameters() if ".default." in name}

    expected = logits(model)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["dims"] == found and saved["budget"] == BUDGET
    loaded = peft.PeftModel.from_pretrained(build(variant), tmp_path, is_trainable=True).eval()
    assert torch.equal(logits(loaded), expected) and loaded.peft_config["default"].dims == found
    assert same(dict(model.merge_and_unload().state_dict()), dict(grown.state_dict()))
    train(loaded)
    trained = logits(loaded)
    near(logits(loaded.merge_and_unload()), trained)


def test_layers_that_get_nothing_have_no_new_dims():
    model = adapted(LLAMA, budget=3000, layers=[1])
    assert initialize_growattn_weights(model, BATCHES).kept
    assert set(model.peft_config["default"].dims) == {"1"}
    assert attentions(model)[0].extra is None
    few = adapted(LLAMA, budget=600)  # spread over two layers at first
    assert len(few.peft_config["default"].dims) == 2
    report = initialize_growattn_weights(few, BATCHES)
    assert len(few.peft_config["default"].dims) == 1 and count(few) == report.added_parameters
    again = initialize_growattn_weights(model, BATCHES[:14])  # spends it anew
    assert again.kept and count(model) == again.added_parameters


def test_an_inactive_adapter_stays_so_and_in_its_precision():
    base = build(LLAMA, dtype=torch.bfloat16)
    model = peft.get_peft_model(base, GrowAttnConfig(v_dims=1))
    model.add_adapter("other", GrowAttnConfig(budget=BUDGET))
    model.set_adapter("default")
    stir(model)
    expected = logits(model)
    (dtype,) = {p.dtype for name, p in model.named_parameters() if ".other." in name}
    assert initialize_growattn_weights(model, BATCHES, "other").kept
    assert torch.equal(logits(model), expected)
    other = [p for name, p in model.named_parameters() if ".other." in name]
    assert other and {(p.dtype, p.requires_grad) for p in other} == {(dtype, False)}
    model.set_adapter("other")
    assert all(p.requires_grad for p in other)


def test_what_a_budget_bought_is_loaded_onto_the_same_name(tmp_path):
    """As Trainer resumes: the model's own budget is spread evenly, and the saved one was spent by a guided start."""
    model = adapted(LLAMA)
    assert initialize_growattn_weights(model, BATCHES).kept
    model.save_pretrained(tmp_path)
    again = adapted(LLAMA)
    assert again.peft_config["default"].dims != model.peft_config["default"].dims
    again.load_adapter(tmp_path, "default", is_trainable=True)
    assert again.peft_config["default"].dims == model.peft_config["default"].dims
    assert torch.equal(logits(again.eval()), logits(model)) and trainable(again).keys() == trainable(model).keys()


def test_dims_and_layers_may_be_chosen_without_a_budget(tmp_path):
    model = peft.get_peft_model(build(LLAMA), GrowAttnConfig(dims={"1": [2, 1]}))
    assert attentions(model)[0].extra is None and count(model) > 0
    stir(model).save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build(LLAMA), tmp_path)
    assert torch.equal(logits(loaded.eval()), logits(model.eval()))
    one = peft.get_peft_model(build(LLAMA), GrowAttnConfig(qk_dims=1, layers=1))
    values = peft.get_peft_model(build(LLAMA), GrowAttnConfig(budget=BUDGET, kinds=["v"]))
    assert attentions(one)[0].extra is None and not any(qk for qk, _ in values.peft_config["default"].dims.values())
