"""Arguments, batches and fields of a config that are of a wrong kind: an error in a line that names the fix."""

import json

import pytest
import torch
from families import build, lm_batches, tokens
from transformers import AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, patch_model

CONFIG = GrowthConfig(qk_dims=1, v_dims=1, oversampling=4)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"layers": "01"}, "layers must be a list"),
        ({"ridge": "a"}, "ridge must be positive"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"ridge": float("inf")}, "ridge must be positive"),
        ({"seed": 2**70}, r"seed must be a whole number, .*below 2\*\*63"),
    ],
)
def test_a_config_says_what_it_takes(options, said):
    with pytest.raises(ValueError, match=said):
        GrowthConfig(qk_dims=1, **options)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_tokens_of_any_whole_numbers_grow(dtype):
    ids = tokens().to(dtype)
    assert Grower(patch_model(build("llama-2")), CONFIG).find([ids, ids]).keep().loss_before > 0


def test_a_loss_that_is_no_function_or_no_number():
    model = patch_model(build("llama-2"))
    with pytest.raises(TypeError, match="loss must be a function of model and batch"):
        Grower(model, CONFIG, loss=0.5)
    for loss, found in (
        (lambda output: output, "a CausalLMOutputWithPast"),
        (lambda output: output.logits, "a tensor"),
    ):
        with pytest.raises(ValueError, match=rf"is {found}.*: pass labels along, and return outputs\.loss") as error:
            Grower(model, CONFIG, loss=lambda model, batch: loss(model(**batch))).find(lm_batches(2)).keep()  # noqa: B023
        assert "tensor(" not in str(error.value)


def test_a_submodel_may_be_named_by_a_text():
    with pytest.raises(ValueError, match="no inner model 'encoder'"):
        patch_model(build("llama-2"), submodels="encoder")


@pytest.mark.parametrize("name", ["keys", "training", "a.b", "", "forward"])
def test_growths_have_names_that_modules_can_have(name, tmp_path):
    model = patch_model(build("llama-2"))
    Grower(model, CONFIG).find(lm_batches(2)).keep()
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["extra_dims"] = {"0": {name: [1, 1]}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"extra_dims in config\.json must have a form"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_name_of_a_growth_is_a_text():
    config = patch_model(build("llama-2")).config
    with pytest.raises(ValueError, match=r"extra_dims in config\.json must have a form"):
        type(config)(extra_dims={"0": {1: [1, 1]}})


@pytest.mark.parametrize("value", [5, "language_model", [1]])
def test_submodels_in_a_config_are_names(value, tmp_path):
    patch_model(build("llama-2")).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"growable_submodels": value}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"growable_submodels in config\.json must be a list of names"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
