"""Models that people change by hand: layers dropped, repeated or added, weights pruned or parametrized."""

import copy

import modalities
import pytest
import torch
from families import build, lm_batches, tokens
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_growattn import Grower, GrowthConfig, export_model, load_growth, patch_model, save_growth
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import extra_parameters, sync_config

BATCHES = lm_batches(2)
REORDERED = {
    "dropped first": [1, 2, 3, 4],
    "dropped last": [0, 1, 2],
    "another order": [4, 3, 2, 1, 0],
    "repeated": [0, 1, 1, 2, 3, 4],
}


def grown(name: str = "llama-5-bias"):
    """A model with other dims in each layer."""
    model = patch_model(build(name))
    for number, attention in enumerate(attentions(model)):
        part = attention.add_new_dims("growth_1", 1 + number, 2)
        for parameter in part.parameters():
            nn.init.normal_(parameter, std=0.3)
    sync_config(model)
    return model


def reorder(model, order: list[int], renumber: bool = True) -> None:
    layers = [model.model.layers[place] for place in order]
    layers = [copy.deepcopy(layer) if layer in layers[:place] else layer for place, layer in enumerate(layers)]
    for number, layer in enumerate(layers if renumber else ()):
        layer.self_attn.layer_idx = number
    model.model.layers, model.config.num_hidden_layers = nn.ModuleList(layers), len(layers)


@pytest.mark.parametrize("order", REORDERED)
def test_layers_may_come_and_go_after_a_growth(order, tmp_path):
    model = grown()
    reorder(model, REORDERED[order])
    logits = model(tokens()).logits
    model.save_pretrained(tmp_path / "model")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "model")(tokens()).logits, logits)
    save_growth(model, tmp_path / "growth")
    fresh = build("llama-5-bias")
    reorder(fresh, REORDERED[order])
    load_growth(patch_model(fresh), tmp_path / "growth")
    assert torch.equal(fresh(tokens()).logits, logits)
    assert export_model(model, tmp_path / "stock").difference < 1e-4  # fp32
    Grower(model, GrowthConfig(qk_dims=1, layers=[2])).find(BATCHES).keep()
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("order", REORDERED)
def test_layers_need_no_new_numbers_where_no_cache_is_used(order, tmp_path):
    """Their places say which they are: by these, weights are saved."""
    model = grown()
    reorder(model, REORDERED[order], renumber=False)
    logits = model(tokens(), use_cache=False).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens(), use_cache=False).logits, logits)


def test_layers_that_were_added_grow_with_the_others(tmp_path):
    model = grown()
    model.model.layers.append(copy.deepcopy(build("llama-5-bias").model.layers[0]))
    model.model.layers[5].self_attn.layer_idx, model.config.num_hidden_layers = 5, 6
    assert Grower(model, GrowthConfig(qk_dims=2, v_dims=2, layers=[5])).find(BATCHES).keep().kept
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens()).logits, model(tokens()).logits)
    assert export_model(model, tmp_path / "stock").difference < 1e-4  # fp32


@pytest.mark.parametrize("zero", ["o_proj", "v_proj", "q_proj", "k_proj"])
def test_layers_that_do_nothing_yet_grow_with_the_others(zero):
    """As blocks of depth growth begin: their output projection is zero."""
    model = build("llama-2")
    nn.init.zeros_(getattr(model.model.layers[1].self_attn, zero).weight)
    report = Grower(patch_model(model), GrowthConfig(budget=0.05)).find(BATCHES).keep()
    assert report.kept and all(torch.isfinite(parameter).all() for parameter in model.parameters())
    nn.init.zeros_(model.model.embed_tokens.weight)
    Grower(model, GrowthConfig(qk_dims=1, v_dims=1)).find(BATCHES).keep()
    for new in (attention.growths["growth_2"] for attention in attentions(model)):
        assert new.weight_of("key").any() and new.weight_of("value").any()  # both sides zero would not learn


@pytest.mark.parametrize("name", ["llama-5-bias", "gpt2-2"])
def test_a_student_with_fewer_layers(name, tmp_path):
    """By a config that is copied, or by an argument of `from_pretrained`: it has the new dims of its layers."""
    teacher = grown(name)
    teacher.save_pretrained(tmp_path)
    by_argument = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=1)
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = 1
    by_config = AutoModelForCausalLM.from_config(config).eval()
    assert by_config.config.extra_dims == by_argument.config.extra_dims == {"0": {"growth_1": [1, 2]}}
    assert len(teacher.config.extra_dims) > 1
    assert all(weight.any() for weight in extra_parameters(by_config) if weight.dim() > 1)  # so that they can train
    assert not by_config.load_state_dict(teacher.state_dict(), strict=False).missing_keys
    assert torch.equal(by_config(tokens()).logits, by_argument(tokens()).logits)


@pytest.mark.parametrize("sides", ["encoder_layers", "encoder_layers decoder_layers"])
def test_a_student_whose_layers_are_numbered_through_two_sides(sides, tmp_path):
    """What is layer 1 of the teacher's encoder would be layer 0 of the student's decoder."""
    teacher = patch_model(modalities.build("bart"))
    for attention in attentions(teacher):
        attention.add_new_dims("growth_1", 1 + attention.layer, 2)
    sync_config(teacher)
    teacher.save_pretrained(tmp_path)
    fewer = dict.fromkeys(sides.split(), 1)
    with pytest.raises(ValueError, match=r"of a model with 6 attention modules, and this one has .*extra_dims = {}"):
        type(teacher).from_pretrained(tmp_path, **fewer)
    config = copy.deepcopy(teacher.config)
    config.update(fewer)
    with pytest.raises(ValueError, match="of a model with 6 attention modules"):
        AutoModelForSeq2SeqLM.from_config(config)
    config.extra_dims = {}
    student = AutoModelForSeq2SeqLM.from_config(config)
    assert not student.load_state_dict(teacher.state_dict(), strict=False).missing_keys
    dims_by_name = {attention.name: attention.growths["growth_1"].qk_dims for attention in attentions(teacher)}
    for attention in attentions(student):
        assert attention.growths["growth_1"].qk_dims == dims_by_name[attention.name]


def test_one_dim_of_one_layer_that_is_numbered_through_two_sides(tmp_path):
    model = patch_model(modalities.build("bart"))
    attentions(model)[-1].add_new_dims("growth_1", 1, 0)
    sync_config(model)
    model.save_pretrained(tmp_path)
    state = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_weights_that_torch_computes_stay_where_they_are():
    model = patch_model(build("llama-2"))
    parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)
    prune.l1_unstructured(model.model.layers[1].self_attn.v_proj, "weight", 0.3)
    layer = attentions(model)[0]
    expected = layer.weight_of("key").clone()
    layer.module.k_proj = nn.Sequential(layer.module.k_proj)  # read by what it computes
    torch.testing.assert_close(layer.weight_of("key"), expected)  # fp32
    assert Grower(model, GrowthConfig(qk_dims=2, v_dims=2)).find(BATCHES).keep().kept


def test_a_base_model_with_a_config_of_its_own_is_told_of_the_growth(tmp_path):
    """Some task heads hold another config object than the base model inside them, which may be saved alone."""
    model = build("llama-2")
    model.model.config = copy.deepcopy(model.config)
    assert Grower(patch_model(model), GrowthConfig(qk_dims=2)).find(lm_batches(2)).keep().kept
    assert model.model.config is not model.config and model.model.config.extra_dims == model.config.extra_dims != {}
    model.model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state)
