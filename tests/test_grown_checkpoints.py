"""Grown checkpoints of several kinds of models: stock classes warn of them, and a growth travels alone."""

import logging
import os
import shutil

import pytest
import torch
import transformers
from encoders import build as build_encoder
from every_type import build as build_type
from families import build, lm_batches, tokens, wide
from safetensors.torch import load_file, save_file
from test_saving import grown as saved
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from wrappers import build as build_wrapper

from hf_growattn import Grower, GrowthConfig, load_growth, patch_model, save_growth
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config

BUILD = {"bert": build_encoder, "vit": build_encoder, "gemma4_text": build_type, "llava": build_wrapper}


def grown(name: str):
    return wide(BUILD.get(name, build)(name), 3, 2)


@pytest.mark.parametrize("name", BUILD)
def test_transformers_warns_where_a_stock_class_reads_a_grown_checkpoint(name, tmp_path, caplog, monkeypatch):
    """It leaves the new dims out, and says so of every tensor; the type alone tells the Auto classes."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = grown(name)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "transformers"):
        read = getattr(transformers, type(model).__name__.removeprefix("GrowAttn")).from_pretrained(tmp_path)
    assert f"You are using a model of type `{model.config.model_type}`" in caplog.text
    assert "extra.growths.growth_1.in_proj.weight" in caplog.text and "UNEXPECTED" in caplog.text
    assert not any(".extra." in name for name in read.state_dict())


def test_a_growth_is_saved_and_loaded_alone(tmp_path):
    model, fresh = grown("llama-5-bias"), patch_model(build("llama-5-bias"))
    save_growth(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"growth.safetensors"}
    load_growth(fresh, tmp_path)
    assert torch.equal(fresh(tokens()).logits, model(tokens()).logits)
    assert fresh.config.extra_dims == model.config.extra_dims
    other = patch_model(AutoModelForCausalLM.from_config(fresh.config))  # with other weights
    load_growth(other, tmp_path, strict=False)
    assert other.config.extra_dims == model.config.extra_dims
    load_growth(patch_model(build("llama-5-bias", dtype=torch.bfloat16)), tmp_path)  # rounding makes no other base
    (tmp_path / "growth.safetensors").unlink()
    os.mkfifo(tmp_path / "growth.safetensors")  # opening a pipe waits for a writer
    with pytest.raises(ValueError, match=r"damaged growth: growth.safetensors is not an ordinary file"):
        load_growth(fresh, tmp_path)


def test_growths_load_in_the_order_in_which_they_grew(tmp_path):
    """Sums of another order would round otherwise, and JSON puts the tenth growth before the second."""
    model = patch_model(build("llama-2"))
    for number in range(1, 12):
        attentions(model)[0].add_new_dims(f"growth_{number}", 1, 0)
    sync_config(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [*loaded.state_dict()] == [*model.state_dict()]


def test_a_growth_of_the_same_name_and_another_size_takes_the_place_of_the_former(tmp_path):
    models = [patch_model(build("llama-2")) for _ in range(2)]
    for model, dims in zip(models, (3, 1)):
        assert Grower(model, GrowthConfig(qk_dims=dims, v_dims=2)).find(lm_batches(4)).keep().kept
    save_growth(models[0], tmp_path)
    load_growth(models[1], tmp_path)
    one, other = (model(tokens()).logits for model in models)
    assert torch.equal(one, other)


def test_what_lies_in_the_file_of_weights_counts(tmp_path):
    """As somebody may have edited it; not what lies in files next to it."""
    model = saved(4)
    model.save_pretrained(tmp_path)
    saved(9).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "model-00001-of-00001.safetensors")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens()).logits, model(tokens()).logits)
    weights = {name: -value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_a_task_head_may_be_new_or_of_another_size(tmp_path):
    saved(4).save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    model.save_pretrained(tmp_path / "head")
    options = dict(num_labels=5, ignore_mismatched_sizes=True)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "head", **options)
    assert again.score.weight.shape[0] == 5
    found, expected = (attentions(each)[0].growths["growth_1"].in_proj.weight for each in (again, saved(4)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "name, head", [("bert", AutoModelForSequenceClassification), ("bert", AutoModel), ("vit", AutoModel)]
)
def test_a_pooler_may_be_new(name, head, tmp_path):
    """Masked language models and image classifiers save none, and models of other tasks have one."""
    model = patch_model(build_encoder(name))
    model.save_pretrained(tmp_path)
    again = head.from_pretrained(tmp_path).base_model
    assert again.pooler is not None
    for key, tensor in model.base_model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)
