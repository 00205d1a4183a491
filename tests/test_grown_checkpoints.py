"""Grown checkpoints of several kinds of models: stock classes warn of them, and a growth travels alone."""

import os

import pytest
import torch
from encoders import build as build_encoder
from families import build, lm_batches, tokens, wide
from test_saving import grown as saved
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_growattn import Grower, GrowthConfig, load_growth, patch_model, save_growth
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config


def test_a_growth_is_saved_and_loaded_alone(tmp_path):
    model, fresh = wide("llama-5-bias", 3, 2), patch_model(build("llama-5-bias"))
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


@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2"])
def test_a_growth_goes_to_a_base_without_a_head_and_back(variant, tmp_path):
    model = wide(variant, 3, 2)
    build(variant).save_pretrained(tmp_path / "base")
    save_growth(model, tmp_path / "growth")
    bare = load_growth(patch_model(AutoModel.from_pretrained(tmp_path / "base")), tmp_path / "growth").eval()
    assert torch.equal(bare(tokens())[0], model.base_model(tokens())[0])
    save_growth(bare, tmp_path / "back")
    again = load_growth(patch_model(build(variant)), tmp_path / "back")
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_a_base_with_more_tokens_is_the_same_base(tmp_path):
    model = wide("llama-2", 3, 2)
    save_growth(model, tmp_path)
    larger = patch_model(build("llama-2"))
    larger.resize_token_embeddings(105)
    load_growth(larger, tmp_path)
    torch.testing.assert_close(larger(tokens()).logits[..., :97], model(tokens()).logits)


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


def test_a_task_head_may_be_new_or_of_another_size(tmp_path):
    saved(4).save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    model.save_pretrained(tmp_path / "head")
    options = dict(num_labels=5, ignore_mismatched_sizes=True)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "head", **options)
    assert again.score.weight.shape[0] == 5
    found, expected = (attentions(each)[0].growths["growth_1"].in_projection.weight for each in (again, saved(4)))
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
