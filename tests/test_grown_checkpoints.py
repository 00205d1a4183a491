"""Grown checkpoints of several kinds of models: stock classes warn of them, and a growth travels alone."""

import logging

import pytest
import torch
import transformers
from encoders import build as build_encoder
from every_type import build as build_type
from families import VARIANTS, build, lm_batches, tokens, wide
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from wrappers import build as build_wrapper

from hf_growattn import Grower, GrowthConfig, load_growth, patch_model, save_growth
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import is_grown, sync_config

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


def fresh_config(**fields):
    return AutoConfig.for_model(**VARIANTS["llama-5-bias"]().to_dict() | fields)


def test_a_growth_is_saved_and_loaded_alone(tmp_path):
    model, fresh = grown("llama-5-bias"), patch_model(build("llama-5-bias"))
    save_growth(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"growth.safetensors"}
    load_growth(fresh, tmp_path)
    assert torch.equal(fresh(tokens()).logits, model(tokens()).logits)
    assert fresh.config.extra_dims == model.config.extra_dims
    with pytest.raises(ValueError, match=r"growth of a growattn_llama, and this is a growattn_gpt2"):
        load_growth(patch_model(build("gpt2-2")), tmp_path)
    other = patch_model(AutoModelForCausalLM.from_config(fresh_config(num_key_value_heads=4)))
    with pytest.raises(ValueError, match="growth of a model of other sizes"):
        load_growth(other, tmp_path)
    assert not is_grown(other)
    file = tmp_path / "growth.safetensors"
    whole, weights = file.read_bytes(), load_file(file)
    deep = "[" * 100_000 + "]" * 100_000
    sizes = [f'{{"0": {{"growth_1": [{size}, 2]}}}}' for size in ("1e30", "NaN", "-1", "1.5")]
    for extra_dims in ('{"0": 3}', "[", "3", *sizes, deep, None):
        metadata = {"model_type": "growattn_llama"} | ({} if extra_dims is None else {"extra_dims": extra_dims})
        save_file(weights, file, metadata=metadata)
        with pytest.raises(ValueError, match="holds a damaged growth"):
            load_growth(fresh, tmp_path)
    for damage in (b"", whole[:100], whole[:-1]):
        file.write_bytes(damage)
        with pytest.raises(ValueError, match="holds a damaged growth"):
            load_growth(fresh, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no growth.*save_growth"):
        load_growth(fresh, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has not grown"):
        save_growth(patch_model(build("llama-2")), tmp_path)


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
        assert Grower(model, GrowthConfig(qk_dims=dims, v_dims=2, oversampling=4)).find(lm_batches(4)).keep().kept
    save_growth(models[0], tmp_path)
    load_growth(models[1], tmp_path)
    one, other = (model(tokens()).logits for model in models)
    assert torch.equal(one, other)
